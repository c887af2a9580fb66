"""Attention in Triton: kernels in Triton's interpreter against the reference, compiled for every chip, and with
planted mistakes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import H200, draw, extras_of, make_spec

pytest.importorskip("triton", reason="the kernels are compiled and interpreted by Triton")

import triton_ranges_kernel
import tritons

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.terms import MaskTerm
from jaxkernels.triton import calls, functions
from jaxkernels.triton.attention import (
    backward,
    backward_kernel,
    costs,
    few_keys,
    few_keys_kernel,
    few_queries,
    few_queries_kernel,
    forward,
    forward_kernel,
    problem,
    tangent,
    tangent_kernel,
    tile_kernel,
)

pytestmark = pytest.mark.usefixtures("as_if_triton_was_installed")

KERNELS = ("attention_forward", "attention_backward", "attention_tangent")
MODULES = (
    functions, tile_kernel, forward_kernel, backward_kernel, few_queries_kernel, few_keys_kernel, tangent_kernel,
)  # fmt: skip
A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")

#: As users get it, before the fixture below.
FLOAT32_PRECISION = problem.FLOAT32_PRECISION

FORWARD = forward.Config(16, 16, 4, 2)
BACKWARD = backward.Config(16, 16, 4, 2, 16, 16, 4, 2)
TANGENT = tangent.Config(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 is not rounded to TF32, so that small differences show."""
    monkeypatch.setattr(problem, "FLOAT32_PRECISION", "ieee")


def assert_right(kernel: str, spec: AttentionSpec, config: Any, seed: int = 0) -> None:
    """A pass in Triton's interpreter gives what the reference gives. The logsumexp has a cotangent."""
    spec = dataclasses.replace(spec, lse_gradient=kernel == "attention_backward")
    values = draw(spec, seed)
    operands = spec.pack(kernel, values)
    with tritons.interpreted(*MODULES):
        actual = dispatch.load(kernel, "triton").run(spec, config, *operands)
    expected = dispatch.load(kernel, "xla").run(spec, reference.Config(), *operands)
    tolerance = 2e-5 if spec.q.dtype == jnp.float32 else 2e-2
    for name, x, y in zip(spec.outputs(kernel), actual, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        if name == "lse":
            assert np.array_equal(x <= MASKED_LOGIT / 2, y <= MASKED_LOGIT / 2)
            x, y = (np.where(z <= MASKED_LOGIT / 2, 0, z) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, np.abs(y).max()), err_msg=name)


BIASES = [(2, 4, 24, 40), (1, 4, 24, 40), (2, 1, 24, 40), (1, 1, 24, 40), (2, 1, 1, 40), (1, 4, 1, 40), (2, 4, 24, 1),
          (1, 1, 1, 1)]  # fmt: skip
CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "more-queries-than-keys": dict(causal=True, queries=40, keys=24),
    "window": dict(window=(5, 3), queries=40),
    "window-open-left": dict(window=(None, 2)),
    "window-behind-all-keys": dict(window=(3, 0), queries=40, keys=24),
    "query-lengths": dict(batch=3, query_lengths=True),
    "key-lengths": dict(batch=3, key_lengths=True, causal=True),
    "both-lengths": dict(batch=4, query_lengths=True, key_lengths=True),
    "lengths-and-window": dict(batch=3, key_lengths=True, window=(4, 4)),
    "segments": dict(segments=True, queries=40),
    "segments-causal": dict(segments=True, queries=40, causal=True),
    "soft-cap": dict(soft_cap=1.5, causal=True),
    "mask": dict(mask=(2, 4, 24, 40)),
    "mask-of-keys": dict(mask=(2, 1, 1, 40), causal=True),
    "mask-of-queries": dict(mask=(1, 1, 24, 1)),
    "offset": dict(query_offset=True, causal=True, window=(9, None)),
    "negative-scale": dict(scale=-0.5),
    "zero-scale": dict(scale=0.0),
    "odd-head-dims": dict(head_dim=20, value_dim=33, causal=True),
    "heads-in-two-blocks": dict(head_dim=72, value_dim=40, bias=(2, 4, 24, 40)),
    "heads-in-two-blocks-blind": dict(batch=3, head_dim=40, value_dim=48, key_lengths=True, window=(4, 4)),
    "only-keys-in-two-blocks": dict(head_dim=48, value_dim=32, query_lengths=True, batch=3),
    "one-query": dict(queries=1, batch=3, key_lengths=True),
    "one-key": dict(keys=1, causal=True),
    "one-head": dict(heads=1, kv_heads=1, keys=33),
    "everything": dict(
        batch=3, causal=True, window=(9, None), soft_cap=2.5, query_lengths=True, key_lengths=True, segments=True,
        bias=(3, 4, 24, 40), mask=(1, 4, 24, 40), head_dim=24,
    ),
}  # fmt: skip


def cases(names: Iterable[str] = CASES) -> Any:
    return pytest.mark.parametrize("options", [pytest.param(CASES[name], id=name) for name in names])


@pytest.mark.sampled(one_in=4)
@cases()
def test_forward(options):
    assert_right("attention_forward", make_spec(**options), FORWARD)


ODD_ROWS = {
    "bias-behind-all-queries": dict(causal=True, queries=66, keys=93, bias=(2, 4, 66, 93)),
    "mask-behind-all-queries": dict(window=(9, 4), queries=70, keys=101, mask=(2, 1, 70, 101)),
    "bias-and-mask": dict(
        queries=20, keys=93, bias=(1, 4, 20, 93), mask=(1, 1, 1, 93), causal=True, query_offset=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [pytest.param(value, id=name) for name, value in ODD_ROWS.items()])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_copied(kernel, options):
    """Rows of a bias or a mask that are no whole 16 bytes. The copy has no keys that are behind all queries."""
    spec = make_spec(**options)
    assert_right(kernel, spec, dict(zip(KERNELS, (FORWARD, BACKWARD, TANGENT)))[kernel])
    copied = spec.bias or spec.mask
    assert problem.aligned_shape(copied, spec)[3] == (96 if spec.query_offset else 68 if spec.causal else 80)
    aligned = dataclasses.replace(
        spec,
        **{name: ArrayType((*x.shape[:3], 96), x.dtype) for name in ("bias", "mask") if (x := getattr(spec, name))},
    )
    assert costs.alignment_seconds(spec) > 0 == costs.alignment_seconds(aligned)


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, queries=20, keys=93, bias=(2, 4, 20, 93)),
        dict(window=(9, 4), queries=30, keys=101, mask=(2, 1, 1, 101)),
    ],
    ids=["bias", "mask"],
)  # fmt: skip
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_which_few_keys_are_seen_are_not_copied(kernel, options):
    spec = make_spec(**options)
    given = spec.bias or spec.mask
    assert problem.aligned_shape(given, spec) == given.shape
    assert_right(kernel, spec, dict(zip(KERNELS, (FORWARD, BACKWARD, TANGENT)))[kernel])


@pytest.mark.sampled(one_in=4)
@cases()
def test_forward_with_one_block_of_keys(options):
    spec, config = make_spec(**options), forward.Config(16, 64, 4, 2)
    assert problem.Problem.of(spec, config.block_q, config.block_kv).has_one_block
    assert_right("attention_forward", spec, config)


@pytest.mark.sampled(one_in=8)
@cases()
def test_backward(options):
    assert_right("attention_backward", make_spec(**options), BACKWARD)


@pytest.mark.sampled(one_in=6)
@cases()
def test_backward_of_few_queries(options):
    assert_right("attention_backward", make_spec(**options), few_queries.Config(128, 16, 4, 2))


@pytest.mark.sampled(one_in=6)
@cases()
@pytest.mark.parametrize("num_splits", [1, 2])
def test_backward_of_few_keys(num_splits, options):
    assert_right("attention_backward", make_spec(**options), few_keys.Config(16, 64, 4, 2, num_splits))


@pytest.mark.parametrize("config", [few_queries.Config(128, 16, 4, 2), few_keys.Config(16, 64, 4, 2)], ids=str)
def test_few_queries_or_keys_without_a_cotangent_of_the_logsumexp(config):
    spec = make_spec()
    values = draw(spec)
    gradients = {}
    for dlse in (jnp.nan, 0.0):
        operands = spec.pack("attention_backward", values | {"dlse": jnp.full_like(values["dlse"], dlse)})
        with tritons.interpreted(*MODULES):
            gradients[dlse] = dispatch.load("attention_backward", "triton").run(spec, config, *operands)
    for x, y in zip(*gradients.values(), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (dict(queries=3, keys=100, heads=10, key_lengths=True, batch=3), few_queries.Config(16, 32, 4, 2)),
        (dict(queries=1, keys=70, heads=12, query_offset=True, causal=True), few_queries.Config(16, 16, 4, 2, 4)),
        (dict(batch=4, query_lengths=True, key_lengths=True, value_dim=33), few_queries.Config(64, 16, 4, 2, 3)),
        (dict(keys=3, dtype="bfloat16", bias=(1, 4, 24, 3)), few_queries.Config(64, 16, 4, 2, 2)),
        (dict(queries=5, keys=100, causal=True), few_queries.Config(16, 16, 4, 2, 2)),
        (dict(queries=5, keys=100, window=(7, 2), query_offset=True), few_queries.Config(16, 16, 4, 2, 3)),
    ],
)  # fmt: skip
def test_few_queries_in_other_tiles(options, config):
    assert_right("attention_backward", make_spec(**options), config)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (dict(queries=100, keys=3, heads=10, query_lengths=True, batch=3), few_keys.Config(32, 16, 4, 2)),
        (dict(queries=70, keys=1, heads=12, query_offset=True, causal=True), few_keys.Config(16, 16, 4, 2, 4)),
        (dict(batch=4, query_lengths=True, key_lengths=True, value_dim=33), few_keys.Config(64, 64, 8, 2, 3)),
        (dict(queries=5, keys=90, dtype="bfloat16", bias=(1, 4, 5, 90)), few_keys.Config(16, 128, 8, 3, 8)),
        (dict(queries=100, keys=5, window=(3, 2), kv_heads=1), few_keys.Config(16, 16, 4, 2, 5)),
        (dict(queries=60, keys=9, segments=True, soft_cap=2.0), few_keys.Config(64, 64, 4, 2, 2)),
    ],
)  # fmt: skip
def test_few_keys_in_other_tiles(options, config):
    assert_right("attention_backward", make_spec(**options), config)


@pytest.mark.parametrize(("window", "seen"), [((None, 0), (0, 45)), ((7, 2), (33, 47)), ((7, None), (33, 100))])
def test_keys_that_no_query_sees_are_not_loaded(window, seen):
    """The gradient for few queries has zeros for them, whatever they are. The queries are those from 40 to 44."""
    spec = make_spec(queries=5, keys=100, window=window, query_offset=True)
    values = draw(spec, 0) | dict(query_offset=np.int32(40))
    is_seen = (np.arange(100) >= seen[0]) & (np.arange(100) < seen[1])
    found = []
    for unseen in (0.0, np.nan):
        changed = {name: np.where(is_seen[:, None, None], values[name], unseen) for name in ("k", "v")}
        operands = spec.pack("attention_backward", values | changed)
        with tritons.interpreted(*MODULES):
            found.append(few_queries.run(spec, few_queries.Config(16, 16, 4, 2, 2), *operands))
    for zero, nan in zip(*found):
        np.testing.assert_array_equal(zero, nan)
    assert not np.any(np.asarray(found[0][1])[:, ~is_seen])


@pytest.mark.sampled(one_in=12)
@cases()
def test_tangent(options):
    assert_right("attention_tangent", make_spec(**options), TANGENT)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_bias_and_its_gradient(bias):
    spec = make_spec(bias=bias, causal=bias[0] == 1, soft_cap=2.5 if bias[1] == 4 else None)
    assert_right("attention_forward", spec, FORWARD)
    assert_right("attention_tangent", spec, TANGENT)
    assert_right("attention_backward", dataclasses.replace(spec, bias_gradient=True), BACKWARD)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("options", "config"),
    [
        (dict(causal=True), forward.Config(32, 16, 4, 2)),
        (dict(causal=True, queries=40, keys=70), forward.Config(16, 64, 4, 2)),
        (dict(segments=True, queries=40), forward.Config(16, 16, 4, 2, pack=2)),
        (dict(bias=(1, 4, 24, 40), causal=True), forward.Config(16, 16, 4, 2, pack=2)),
        (dict(window=(3, 0), queries=40, keys=24), forward.Config(16, 16, 4, 2, num_splits=2)),
        (dict(batch=4, query_lengths=True, key_lengths=True), forward.Config(16, 16, 4, 2, pack=2, num_splits=3)),
        (dict(queries=1, keys=100, heads=8, kv_heads=2), forward.Config(16, 16, 4, 2, pack=4, num_splits=4)),
        (dict(mask=(2, 4, 24, 40)), forward.Config(16, 16, 4, 2, num_splits=8)),  # More parts than blocks.
        (dict(queries=16, keys=100, causal=True), forward.Config(16, 16, 4, 2, num_splits=4)),  # Parts nobody sees.
        (dict(queries=3, keys=100, heads=18, key_lengths=True), forward.Config(16, 16, 4, 2, pack=9, num_splits=2)),
        (dict(heads=6, bias=(2, 6, 24, 40), query_lengths=True, value_dim=33), forward.Config(16, 16, 4, 2, pack=3)),
        (dict(queries=1, keys=70, heads=40, query_offset=True, causal=True), forward.Config(16, 16, 4, 2, pack=20)),
    ],
)  # fmt: skip
def test_forward_in_other_tiles(options, config):
    assert_right("attention_forward", make_spec(**options), config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype):
    spec = make_spec(dtype=dtype, causal=True)
    assert_right("attention_forward", spec, FORWARD)
    assert_right("attention_backward", spec, backward.Config(16, 32, 4, 2, 32, 16, 4, 2, group_parts=2))
    assert_right("attention_tangent", spec, TANGENT)


def random_options(seed: int) -> dict[str, Any]:
    """Sizes and terms drawn at random."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    batch, queries, keys, kv_heads = pick(1, 2, 3), int(rng.integers(1, 49)), int(rng.integers(1, 49)), pick(1, 2)
    heads = kv_heads * pick(1, 2, 3)
    broadcast = lambda: tuple(size if rng.random() < 0.6 else 1 for size in (batch, heads, queries, keys))
    chance = lambda share: bool(rng.random() < share)
    sides = lambda: int(rng.integers(0, 12)) if chance(0.7) else None
    return dict(
        batch=batch, queries=queries, keys=keys, heads=heads, kv_heads=kv_heads, head_dim=pick(8, 16, 24),
        value_dim=pick(16, 40), causal=chance(0.5), window=(sides(), sides()) if chance(0.4) else None,
        soft_cap=3.0 if chance(0.3) else None, query_lengths=chance(0.3), key_lengths=chance(0.4),
        segments=chance(0.3), bias=broadcast() if chance(0.4) else None, mask=broadcast() if chance(0.3) else None,
    )  # fmt: skip


def random_forward_config(spec: AttentionSpec, seed: int) -> forward.Config:
    rng = np.random.default_rng((seed, 1))
    tile = forward.Config(int(rng.choice([16, 32])), 16, 4, 2)
    heads = spec.group_size
    packs = [n for n in range(1, heads + 1) if heads % n == 0 and not (spec.segments and tile.block_q % n)]
    return dataclasses.replace(tile, pack=int(rng.choice(packs)), num_splits=int(rng.choice([1, 2, 3, 5])))


@pytest.mark.sampled(one_in=24)
@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    spec = make_spec(**random_options(seed))
    assert_right("attention_forward", spec, random_forward_config(spec, seed), seed)
    assert_right("attention_tangent", spec, TANGENT, seed)
    if few_queries.unsupported(spec) is None:
        assert_right("attention_backward", spec, few_queries.Config(128, 16, 4, 2, num_splits=1 + seed % 3), seed)
    assert_right("attention_backward", spec, few_keys.Config(16, 64, 4, 2, num_splits=1 + seed % 4), seed)
    config = dataclasses.replace(BACKWARD, dq_splits=1 + seed % 4)
    assert_right("attention_backward", dataclasses.replace(spec, bias_gradient=spec.bias is not None), config, seed)


# Ranges of blocks.


def ranges_in_kernel(
    p: problem.Problem, ends: tuple[int, int], offset: int, num_blocks: int, over_queries: bool
) -> np.ndarray:
    """What the kernels compute for each block of a batch element without segments.

    Args:
      ends: of queries and keys, as `tile_kernel.place_of` has them.
    """
    with tritons.interpreted(functions, tile_kernel, triton_ranges_kernel):
        (ranges,) = calls.call_kernel(
            triton_ranges_kernel.store_ranges, [], [ArrayType((num_blocks, 4), np.dtype(np.int32))], target=H200,
            grid=(num_blocks,), num_warps=4, num_stages=1,
            constants=dict(p=p, offset=offset, query_end=ends[0], key_end=ends[1], over_queries=over_queries),
        )  # fmt: skip
    return np.asarray(ranges)


@pytest.mark.one_version
@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("seed", range(40))
def test_ranges_hold_every_visible_pair(seed):
    """And in the blocks that need no mask, all pairs are visible, but for rows of padding and the dense mask."""
    spec = make_spec(**random_options(seed))
    spec = dataclasses.replace(spec, mask=None)
    values = draw(spec, seed)
    batch, queries, keys = spec.q.shape[0], spec.q.shape[1], spec.k.shape[1]
    seen = reference.visibility(spec, extras_of(spec, values))
    seen = np.broadcast_to(True if seen is None else seen[:, 0], (batch, queries, keys))
    inside = lambda is_given, name, size: (
        np.arange(size) < np.asarray(values[name])[:, None] if is_given else np.ones((batch, size), bool)
    )
    is_query = inside(spec.query_lengths, "query_lengths", queries)
    is_key = inside(spec.key_lengths, "key_lengths", keys)
    p = problem.Problem.of(spec, 16, 8)
    by_queries = np.asarray(problem.key_ranges(spec, p, values))
    by_keys = np.asarray(problem.query_ranges(spec, turned := dataclasses.replace(p, block_q=8, block_kv=16), values))
    for element in range(batch if not p.segments else 0):
        offset = int(values["query_offset"]) if spec.query_offset else 0
        query_end, key_end = offset + queries, keys
        if spec.query_lengths:
            query_end = min(query_end, int(values["query_lengths"][element]))
        if spec.key_lengths:
            key_end = min(key_end, int(values["key_lengths"][element]))
        for tile, ranges, over_queries in ((p, by_queries, False), (turned, by_keys, True)):
            expected = ranges[min(element, len(ranges) - 1)]
            found = ranges_in_kernel(tile, (query_end, key_end), offset, len(expected), over_queries)
            np.testing.assert_array_equal(found, expected)
    for element in range(batch):
        for axis, ranges, others in ((0, by_queries, keys), (1, by_keys, queries)):
            for i, (first, whole_first, whole_end, end) in enumerate(ranges[min(element, len(ranges) - 1)]):
                mine = slice(16 * i, 16 * i + 16)
                pairs = seen[element, mine] if axis == 0 else seen[element, :, mine].T
                visited = np.zeros(others, bool)
                visited[8 * first : 8 * end] = True
                assert not pairs[:, ~visited].any()
                is_row = (is_query, is_key)[axis][element, mine]
                assert pairs[is_row, 8 * whole_first : 8 * whole_end].all()
                assert whole_end * 8 <= others or whole_first == whole_end


# For every chip.

_SHAPES = [
    (64, "bfloat16"),
    (80, "float16"),
    (128, "bfloat16"),
    (160, "bfloat16"),
    (192, "bfloat16"),
    (256, "bfloat16"),
    (128, "float32"),
]


@pytest.mark.sampled(one_in=26)
@pytest.mark.parametrize(("head_dim", "dtype"), _SHAPES, ids=str)
@pytest.mark.parametrize("chip", tritons.CHIPS, ids=lambda chip: chip.name.removeprefix("NVIDIA ").replace(" ", "-"))
@pytest.mark.parametrize("kernel", KERNELS)
def test_default_compiles_without_spills(kernel, chip, head_dim, dtype):
    spec = make_spec(2, 2048, 2048, 8, 8, head_dim, dtype=dtype, causal=True, target=chip)
    made = compile_default(kernel, spec)
    for one in made:
        assert one.shared <= chip.smem_bytes, one
        if not (chip.is_hopper and one.name == "attention_keys_and_values" and head_dim > 128):  # docs/triton.md
            assert one.spilled == 0, one


def compile_default(kernel: str, spec: AttentionSpec) -> list[tritons.Compiled]:
    config = dispatch.default_config(kernel, "triton", spec)
    types = spec.pack(kernel, {name: x.type for name, x in spec.arrays().items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "FLOAT32_PRECISION", FLOAT32_PRECISION)
        return tritons.compiled(
            spec.target, functools.partial(dispatch.load(kernel, "triton").run, spec, config), *types
        )


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(3, 1601, 54, 1), (23, 101, 12, 1)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_heads_that_share_a_tile_compile_without_spills(head_dim, value_dim, queries, keys, heads, kv_heads):
    spec = make_spec(
        1, queries, keys, heads, kv_heads, head_dim, value_dim, dtype="bfloat16", causal=True, query_offset=queries < 9
    )
    config = dispatch.default_config("attention_forward", "triton", spec)
    assert config.pack > 1
    assert [(one.name, one.spilled) for one in compile_default("attention_forward", spec) if one.spilled] == []


@pytest.mark.parametrize(("chip", "wanted"), [(H200, "wgmma"), (A100, "cp.async"), (A100, "mma.sync")])
def test_tensor_cores_and_asynchronous_copies_are_used(chip, wanted):
    spec = make_spec(2, 2048, 2048, 8, 8, 128, dtype="bfloat16", causal=True, target=chip)
    (made,) = compile_default("attention_forward", spec)
    assert wanted in made.ptx


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("keys", [907, 1024])
@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("kernel", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("term", ["mask", "bias"])
@pytest.mark.parametrize("rows", [1, 512])
def test_masks_and_biases_fit_shared_memory_without_spills(rows, term, kernel, head_dim, keys):
    """Also if their rows are no whole 16 bytes: Triton would load them value by value and spill 500 bytes."""
    spec = make_spec(2, 512, keys, 8, 2, head_dim, dtype="bfloat16", **{term: (1, 1, rows, keys)})
    for one in compile_default(kernel, spec):
        assert one.shared <= spec.target.smem_bytes, one
        assert one.spilled == 0, one
        assert rows == 1 or not re.search(r"ld\.global\S*\.[bu]8\b", one.ptx), one.name


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("keys", [15, 37, 61])
@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        *(("attention_forward", size) for size in (64, 96, 128, 256)),
        ("attention_backward", 64),
        ("attention_backward", 128),
    ],
)
@pytest.mark.parametrize("term", ["mask", "bias", "neither"])
@pytest.mark.parametrize("rows", [1, 61])
def test_few_keys_compile_without_spills(rows, term, kernel, head_dim, keys):
    """All of them are one block, and rows of a mask or a bias are not aligned."""
    given = {} if term == "neither" else {term: (2, 1, rows, keys)}
    spec = make_spec(
        queries=61, keys=keys, heads=8, kv_heads=8, head_dim=head_dim, dtype="bfloat16", target=H200, **given
    )
    for one in compile_default(kernel, spec):
        assert one.spilled == 0, one
        assert one.shared <= H200.smem_bytes


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
@pytest.mark.parametrize(("queries", "group"), [(1, 5), (4, 8)])
def test_decoding_compiles_without_spills(queries, group, head_dim):
    spec = make_spec(2, queries, 8000, 2 * group, 2, head_dim, dtype="bfloat16", key_lengths=True)
    names = []
    for one in compile_default("attention_forward", spec):
        names.append(one.name)
        assert one.spilled == 0, one
    assert names == ["attention_forward", "combine_parts"]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("queries", "group"), [(1, 5), (24, 2), (1, 64), (60, 2)])
@pytest.mark.parametrize("chip", [H200, A100], ids=lambda chip: chip.name)
def test_gradients_of_few_queries_compile_without_spills(chip, queries, group, head_dim):
    spec = make_spec(
        2, queries, 1000, 2 * group, 2, head_dim, dtype="bfloat16", causal=True, key_lengths=True, target=chip
    )
    if few_queries.unsupported(spec) is None:
        for one in compile_default("attention_backward", spec):
            assert one.shared <= chip.smem_bytes, one
            assert one.spilled == 0, one


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("terms", ["plain", "causal", "lengths", "bias", "mask", "segments", "window", "soft_cap"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("keys", [5, 31, 64, 101])
def test_gradients_of_few_keys_compile_without_spills(keys, head_dim, value_dim, terms):
    """Every tile that a comparison may measure. Two of them spill 8 bytes: docs/triton.md."""
    given: dict[str, Any] = {
        "causal": dict(causal=True), "lengths": dict(query_lengths=True, key_lengths=True),
        "segments": dict(segments=True), "bias": dict(bias=(2, 4, 500, keys)), "mask": dict(mask=(2, 1, 500, keys)),
        "window": dict(window=(9, 30)), "soft_cap": dict(soft_cap=3.0),
    }.get(terms, {})  # fmt: skip
    spec = make_spec(2, 500, keys, 4, 2, head_dim, value_dim, dtype="bfloat16", target=H200, **given)
    if few_keys.unsupported(spec) is not None:
        pytest.skip("no tile fits")
    types = spec.pack("attention_backward", {name: x.type for name, x in spec.arrays().items()})
    for config in {dataclasses.replace(config, num_splits=1) for config in few_keys.search_space(spec)}:
        for one in tritons.compiled(H200, functools.partial(few_keys.run, spec, config), *types):
            assert one.shared <= H200.smem_bytes, one
            assert one.spilled <= 8, (config, one)


@pytest.mark.parametrize(
    ("queries", "keys", "design"),
    [(3, 300, few_queries), (1, 4096, few_queries), (900, 900, backward), (4096, 64, few_keys), (14165, 2, few_keys)],
)
def test_design_for_few_queries_or_keys(queries, keys, design):
    spec = make_spec(16, queries, keys, 8, 2, 128, dtype="bfloat16")
    assert isinstance(dispatch.default_config("attention_backward", "triton", spec), design.Config)


def test_few_queries_at_many_keys_divide_them_for_dq():
    spec = make_spec(1, 384, 13056, 2, 2, 256, dtype="bfloat16")
    assert dispatch.default_config("attention_backward", "triton", spec).dq_splits == 16


@pytest.mark.parametrize("keys", [3916, 25856])
def test_few_queries_at_the_end_of_many_keys_divide_them(keys):
    """The query offset of a decoding step says at run time that they see all keys. One part took 2.2 ms on an H200."""
    spec = make_spec(2, 5, keys, 4, 1, 96, dtype="bfloat16", causal=True, query_offset=True)
    config = dispatch.default_config("attention_forward", "triton", spec)
    assert config.num_splits >= 8
    assert config.block_kv >= 64


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("bias", [(2, 8, 256, 256), (1, 8, 256, 256), (2, 1, 1, 256)], ids=str)
@pytest.mark.parametrize("chip", [H200, A100], ids=lambda chip: chip.name)
def test_gradient_of_a_bias_compiles_without_spills(chip, bias):
    spec = make_spec(2, 256, 256, 8, 8, 64, dtype="bfloat16", bias=bias, bias_gradient=True, target=chip)
    for one in compile_default("attention_backward", spec):
        assert one.shared <= chip.smem_bytes, one
        assert one.spilled == 0, one


def test_measured_tiles_are_in_the_search_space():
    for head_dim, causal in itertools.product((64, 128, 256), (True, False)):
        spec = make_spec(4, 4096, 4096, 16, 16, head_dim, dtype="bfloat16", causal=causal)
        config = dispatch.default_config("attention_forward", "triton", spec)
        assert dataclasses.astuple(config)[:4] == costs.measured_tile(spec, "forward")
        config = dispatch.default_config("attention_backward", "triton", spec)
        assert config.keys_tile == costs.measured_tile(spec, "dkv")
        assert config.queries_tile == costs.measured_tile(spec, "dq")


# Planted mistakes.


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("module", "name", "right", "wrong", "kernel", "options"),
    [
        (tile_kernel, "visible", "key <= position + p.right", "key < position + p.right", "forward", "causal"),
        (tile_kernel, "visible", "key >= position - p.left", "key > position - p.left", "forward", "window"),
        (tile_kernel, "visible", " & (key < at.key_end)", "", "forward", "lengths-and-window"),
        (tile_kernel, "_blocks_in_band", "stop + behind", "start + behind", "forward", "causal"),
        (tile_kernel, "visible", "queries == keys", "queries >= keys", "forward", "segments"),
        (tile_kernel, "place_of", "tl.load(extras.query_offset)", "0 * batch", "forward", "offset"),
        (tile_kernel, "changed", "s = tanh(s)", "s = s", "forward", "soft-cap"),
        (tile_kernel, "slope", "1 - s * s", "1 - s", "backward", "soft-cap"),
        (tile_kernel, "load_pairs", "query * shape[3]", "query * shape[2]", "forward", "mask"),
        (tile_kernel, "visited", "batch * p.num_blocks + block", "block", "forward", "segments"),
        (tile_kernel, "visited", "tl.maximum(at.key_end, 0)", "at.offset + p.num_keys", "forward", "key-lengths"),
        (tile_kernel, "visited", "at.query_end - at.offset", "p.num_queries + 0 * block", "backward", "both-lengths"),
        (forward_kernel, "attend", "v_tile.main, main * fade[:, None]", "v_tile.main, main", "forward", "plain"),
        (forward_kernel, "attend", "total * fade", "total", "forward", "plain"),
        (forward_kernel, "attention_forward", "head // p.group", "head % p.num_kv_heads", "forward", "plain"),
        (forward_kernel, "attention_forward", "top + tl.log2", "tl.log2", "forward", "plain"),
        (forward_kernel, "mean_of_values", "total / p.num_keys", "total / at.key_end", "forward", "lengths-and-window"),
        (tile_kernel, "products_of", "columns.rest), products", "columns.rest), 0 * products", "forward",
         "heads-in-two-blocks"),
        (tile_kernel, "load_parts", "base + main", "base", "forward", "only-keys-in-two-blocks"),
        (forward_kernel, "attend", "rest * fade[:, None]", "rest", "forward", "heads-in-two-blocks"),
        (forward_kernel, "attention_forward", "out_base + MD", "out_base", "forward", "heads-in-two-blocks"),
        (forward_kernel, "attention_forward", "rest = rest * (1.0 / total)", "rest = rest + 0 * total", "forward",
         "heads-in-two-blocks"),
        (forward_kernel, "mean_of_values", "p.value_dim + first", "p.value_dim", "forward",
         "heads-in-two-blocks-blind"),
        (tile_kernel, "add_tile_of_queries", "dweights - shift[None, :]", "dweights", "backward", "plain"),
        (backward_kernel, "attention_keys_and_values", "kv_head * p.group +", "kv_head +", "backward", "plain"),
        (backward_kernel, "attention_keys_and_values", "+ kv_head) * D", ") * D", "backward", "key-lengths"),
        (backward_kernel, "add_keys", "head // p.group", "head % p.num_kv_heads", "backward", "plain"),
        (backward_kernel, "gradient_of_logits", "top[:, None]", "top[:, None] * 0.5", "backward", "plain"),
        (tangent_kernel, "follow", "weights * slope(s_dot, s, p)", "weights * s_dot", "tangent", "soft-cap"),
        (tangent_kernel, "follow", "total += tl.sum(changes, axis=1)", "total += 0", "tangent", "plain"),
    ],
)  # fmt: skip
def test_planted_mistake_is_noticed(module, name, right, wrong, kernel, options, tmp_path):
    configs: dict[str, Any] = dict(forward=FORWARD, backward=BACKWARD, tangent=TANGENT)
    spec = make_spec(**CASES[options])
    with tritons.planted(module, name, right, wrong, tmp_path), pytest.raises(AssertionError):
        assert_right(f"attention_{kernel}", spec, configs[kernel])
    assert_right(f"attention_{kernel}", spec, configs[kernel])


@pytest.mark.parametrize(
    ("name", "right", "wrong", "options"),
    [
        ("attend_to_one_block", "tl.where((key < at.key_end)[:, None], v_main, 0.0)", "v_main", "key-lengths"),
        ("attend_to_one_block", "tl.where(seen, s, float(\"-inf\"))", "s", "causal"),
        ("attend_to_one_block", "v + kv_row * D", "v + kv_row * 0", "plain"),
        ("attend_to_one_block", "changed(products_of(q_tile, k_tile, p.rest_h, p), bias, p)",
         "products_of(q_tile, k_tile, p.rest_h, p)", "soft-cap"),
        ("weights_of", "float(\"-inf\"), 0.0, top)", "float(\"-inf\"), top, top)", "lengths-and-window"),
    ],
)  # fmt: skip
def test_mistake_in_one_block_of_keys_is_noticed(name, right, wrong, options, tmp_path):
    spec, config = make_spec(**CASES[options]), forward.Config(16, 64, 4, 2)
    with (
        tritons.planted(forward_kernel, name, right, wrong, tmp_path),
        pytest.raises(AssertionError),
    ):
        assert_right("attention_forward", spec, config)
    assert_right("attention_forward", spec, config)


@pytest.mark.parametrize(
    ("module", "name", "right", "wrong"),
    [
        (tile_kernel, "part_of", "first + split * share", "first + 0"),
        (tile_kernel, "part_of", "+ p.num_splits - 1) //", ") //"),
        (forward_kernel, "combine_parts", "logsumexps - tl.where", "0 * logsumexps - tl.where"),
        (forward_kernel, "combine_parts", "* p.num_queries + query, logsumexp", "* p.num_queries + query, top"),
    ],
)  # fmt: skip
def test_mistake_in_parts_of_the_keys_is_noticed(module, name, right, wrong, tmp_path):
    spec, config = make_spec(), dataclasses.replace(FORWARD, num_splits=2)
    with tritons.planted(module, name, right, wrong, tmp_path), pytest.raises(AssertionError):
        assert_right("attention_forward", spec, config)


_FEW_QUERIES = few_queries.Config(64, 16, 4, 2, num_splits=2)
_FEW_KEYS = few_keys.Config(16, 64, 4, 2, num_splits=2)


@pytest.mark.parametrize(
    ("right", "wrong", "options"),
    [
        ("-= tl.load(dlse", "+= tl.load(dlse", {}),
        ("is_query & (logsumexp > BLIND_BELOW)", "is_query", CASES["key-lengths"]),
        ("rows % p.pack", "rows // p.num_queries", {}),
        ("kv_head * p.pack + rows % p.pack", "kv_head * p.pack + 0 * rows", {}),
        ("query + at.offset < at.query_end", "query < p.num_queries", CASES["query-lengths"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("config", [_FEW_QUERIES, _FEW_KEYS], ids=["few_queries", "few_keys"])
def test_mistake_in_rows_of_gradients_is_noticed(config, right, wrong, options, tmp_path):
    planted = tritons.planted(tile_kernel, "load_gradient_rows", right, wrong, tmp_path)
    with planted, pytest.raises(AssertionError):
        assert_right("attention_backward", make_spec(**options), config)


@pytest.mark.parametrize(
    ("module", "name", "right", "wrong", "config", "options"),
    [
        (few_queries_kernel, "attention_few_queries", *mistake, _FEW_QUERIES, options)
        for *mistake, options in [
            ("+ dmean[None, :]", "", dict(keys=12, window=(3, 0))),
            ("tl.broadcast_to(dmean", "0 * tl.broadcast_to(dmean", CASES["key-lengths"]),
            ("+ at.offset + p.right", "+ p.right", dict(causal=True, query_offset=True)),
            ("(split + 1) * SHARE", "(split + 2) * SHARE", {}),
            ("dk_tile * p.scale", "dk_tile", {}),
        ]
    ]
    + [
        (few_keys_kernel, "attention_few_keys", *mistake, _FEW_KEYS, options)
        for *mistake, options in [
            ("+ dmean[None, :]", "", CASES["window-behind-all-keys"]),
            ("dmean += gradient_of_mean", "dmean = gradient_of_mean", CASES["window-behind-all-keys"]),
            ("part * SHARE, tl.min", "part * 0, tl.min", {}),
            ("dk_acc * p.scale", "dk_acc", {}),
            ("dq_tile * p.scale", "dq_tile", {}),
            ("tl.where(is_key[:, None], dv_acc, 0.0)", "0 * dv_acc", {}),
            ("(p.num_keys * p.num_kv_heads) + k_row", "(p.num_keys * p.num_kv_heads)", {}),
        ]
    ]
    + [
        (tile_kernel, "add_tile_of_queries", *mistake, _FEW_KEYS, {})
        for mistake in [
            (", dk_acc, input_precision", ", 0 * dk_acc, input_precision"),
            ("dweights - shift[None, :]", "dweights"),
        ]
    ],
)  # fmt: skip
def test_mistake_in_gradients_of_one_kernel_is_noticed(module, name, right, wrong, config, options, tmp_path):
    planted = tritons.planted(module, name, right, wrong, tmp_path)
    with planted, pytest.raises(AssertionError):
        assert_right("attention_backward", make_spec(**options), config)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((8192, 49, 49, 12, 12, 32), {}), ((70000, 1, 300, 8, 2, 64), dict(key_lengths=True)),
     ((8192, 80, 80, 10, 10, 64), dict(bias=(8192, 10, 80, 80)))],
)  # fmt: skip
@pytest.mark.parametrize("kernel", KERNELS)
def test_grid_takes_any_number_of_heads(kernel, sizes, options, monkeypatch):
    """Only its first axis takes more than 65,535 programs: windows of images are many short sequences."""
    grids = []

    def call_kernel(
        kernel: Any, operands: Any, results: Any, *, grid: tuple[int, ...], **options: Any
    ) -> list[jax.Array]:
        grids.append(grid)
        return [jnp.zeros(result.shape, result.dtype) for result in results]

    monkeypatch.setattr(calls, "call_kernel", call_kernel)
    spec = make_spec(*sizes, dtype="bfloat16", **options)
    spec = dataclasses.replace(spec, bias_gradient=kernel == "attention_backward" and spec.bias is not None)
    config = dispatch.default_config(kernel, "triton", spec)
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in spec.pack(kernel, {name: x.type for name, x in spec.arrays().items()})
    ]
    jax.eval_shape(functools.partial(dispatch.load(kernel, "triton").run, spec, config), *types)
    assert grids
    for grid in grids:
        assert max(grid[1:], default=1) <= 65535 < grid[0]


# Limits and errors.


@dataclasses.dataclass(frozen=True)
class EveryOther(MaskTerm):
    """A mask that no kernel knows."""

    def visible(self, query: Any, key: Any) -> Any:
        return (query + key) % 2 == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(target=dataclasses.replace(A100, compute_capability=(7, 5))), "compute capability 8.0 or newer"),
        (dict(target=hardware.host()), "compute capability 8.0 or newer, the target is cpu"),
        (dict(terms=(EveryOther(),)), "terms of your own: EveryOther()"),
        (dict(head_dim=272), "up to 256, got 272 and 272"),
        (dict(value_dim=512), "up to 256, got 16 and 512"),
        (dict(dtype="float64"), "bfloat16, float16 or float32, of one dtype, not float64"),
        (dict(batch=0), "no work in an empty attention"),
        (dict(queries=2**20, heads=64, head_dim=64), "counts the elements of a batch element in 32 bits"),
    ],
)
@pytest.mark.parametrize(
    "design", [forward, backward, few_queries, few_keys, tangent], ids=lambda design: dispatch.name_of(design)
)
def test_limits_are_stated(design, options, reason):
    assert reason in design.unsupported(make_spec(**options))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forward.Config(block_q=24), r"attention_forward\[triton\]: block_q must be a power .* got 24"),
        (lambda: forward.Config(block_kv=8), r"attention_forward\[triton\]: block_kv .* at least 16; got 8"),
        (lambda: forward.Config(num_warps=3), r"attention_forward\[triton\]: num_warps must be 1, 2, .* got 3"),
        (lambda: forward.Config(num_stages=0), r"attention_forward\[triton\]: num_stages must be from 1 to 8; got 0"),
        (lambda: forward.Config(pack=0), r"attention_forward\[triton\]: pack must be positive; got 0"),
        (lambda: forward.Config(num_splits=0), r"attention_forward\[triton\]: num_splits must be positive; got 0"),
        (lambda: backward.Config(dq_block_q=48), r"attention_backward\[triton\]: dq_block_q .* got 48"),
        (lambda: backward.Config(dq_splits=0), r"attention_backward\[triton\]: dq_splits must be positive; got 0"),
        (lambda: few_keys.Config(num_splits=0), r"attention_backward\[triton\]: num_splits must be positive; got 0"),
        (
            lambda: few_keys.run(make_spec(), few_keys.Config(16, 16)),
            r"attention_backward\[triton\]: block_kv must be at least the 40 keys; got 16",
        ),
        (lambda: few_queries.Config(num_splits=0), r"attention_backward\[triton\]: num_splits must be positive; got 0"),
        (
            lambda: few_queries.run(make_spec(), few_queries.Config(16)),
            r"block_q must be at least the 24 queries times 2 heads of a key head; got 16",
        ),
        (lambda: backward.Config(group_parts=0), r"attention_backward\[triton\]: group_parts must be positive; got 0"),
        (lambda: tangent.Config(block_kv=7), r"attention_tangent\[triton\]: block_kv .* got 7"),
        (lambda: forward.run(make_spec(), forward.Config(pack=4)), r"pack must divide the 2 query heads of a key head"),
        (
            lambda: forward.run(make_spec(heads=6, segments=True), forward.Config(16, pack=3)),
            r"attention_forward\[triton\]: with segments, pack must divide block_q=16; got 3",
        ),
        (lambda: backward.run(make_spec(), backward.Config(group_parts=3)), r"group_parts must divide the 2 query"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Through the public function.


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
@pytest.mark.parametrize("mode", ["vjp", "jvp", "vmap"])
def test_public_function_is_lowered_for_another_chip(mode, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", A100.name)
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    attention = functools.partial(jk.dot_product_attention, is_causal=True)
    sum_of = lambda *xs: attention(*xs).astype(jnp.float32).sum()
    functions = {
        "vjp": (lambda *xs: jax.grad(sum_of, (0, 1, 2))(*xs), 3, 3),
        "jvp": (lambda *xs: jax.jvp(attention, xs[:3], xs[3:])[1], 6, 2),
        "vmap": (lambda *xs: jax.vmap(attention)(*(y[None] for y in xs)), 3, 1),
    }
    function, count, num_calls = functions[mode]
    text = jax.jit(function).trace(*[x] * count).lower(lowering_platforms=("cuda",)).as_text()
    assert sum(text.count(f"custom_call @{name}(") for name in calls.TARGETS) == num_calls
    assert "x256x256x" not in text  # No array of logits.


def test_modules_without_triton_code_do_not_import_it():
    """What chooses a kernel works where Triton is not installed."""
    for design in (forward, backward, few_queries, few_keys, tangent):
        assert isinstance(design, ModuleType)
        assert "triton" not in vars(design)
