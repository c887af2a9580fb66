"""The Pallas attention kernels, interpreted on the CPU under the race detector: masks, edges, heads, schedules."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from cases import random_array
from interpret import RaceError, interpret
from interpret.memory import SharedMemory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import assert_accurate

from jaxkernels import dispatch, hardware
from jaxkernels.pallas import (
    attention_backward,
    attention_backward_fused,
    attention_backward_wide,
    attention_blocks,
    attention_forward,
)
from jaxkernels.specs import ArrayType, AttentionSpec
from jaxkernels.xla import attention_backward as xla_backward
from jaxkernels.xla import attention_forward as xla_forward

_SMALL_GPU = dataclasses.replace(hardware.lookup("NVIDIA H200"), num_sms=2)
_FORWARD = attention_forward.Config(block_kv=64)
_BACKWARD = attention_backward.Config()


def make_spec(
    queries: int,
    keys: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (64, 64),
    batch: int = 1,
    dtype: str = "bfloat16",
    **rules: Any,
) -> AttentionSpec:
    array = lambda *shape: ArrayType((batch, *shape), jnp.dtype(dtype))
    return AttentionSpec(
        q=array(queries, heads[0], dims[0]),
        k=array(keys, heads[1], dims[0]),
        v=array(keys, heads[1], dims[1]),
        scale=dims[0] ** -0.5,
        target=_SMALL_GPU,
        **rules,
    )


def widened(spec: AttentionSpec) -> AttentionSpec:
    wide = lambda array: dataclasses.replace(array, dtype=jnp.dtype(jnp.float64))
    return dataclasses.replace(spec, q=wide(spec.q), k=wide(spec.k), v=wide(spec.v))


def random_operands(spec: AttentionSpec) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_array(rng, x.shape, x.dtype) for x in (spec.q, spec.k, spec.v)]


def check(
    spec: AttentionSpec,
    forward: attention_forward.Config | None = _FORWARD,
    backward: attention_backward.Config | None = _BACKWARD,
    *,
    scale_queries: float = 1.0,
    **integers: Any,
) -> None:
    """Runs a pass for each config, interpreted, and holds out and lse, dq, dk and dv to the error rule.

    Without `forward` the backward pass begins with plain JAX's out and lse.

    Args:
      integers: the optional operands by name.
    """
    assert attention_forward.unsupported(spec) is None
    rng = np.random.default_rng(0)
    q, k, v = (random_array(rng, x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))
    q = (q * scale_queries).astype(q.dtype)
    rows = spec.q.shape[:3]
    dout, dlse = random_array(rng, (*rows, spec.v.shape[3]), spec.q.dtype), random_array(rng, rows, "float32")
    operands = [q, k, v, dout, dlse]
    extras = [jnp.asarray(integers[name], jnp.int32) for name in spec.extra_names]

    def plain(spec: AttentionSpec, operands: list[np.ndarray]) -> dict[str, jax.Array]:
        def run(q, k, v, dout, dlse, *extras):
            out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v, *extras)
            if backward is None:
                return dict(out=out, lse=lse)
            grads = xla_backward.run(spec, xla_backward.Config(), q, k, v, *extras, out, lse, dout, dlse)
            return dict(out=out, lse=lse, **dict(zip(("dq", "dk", "dv"), grads)))

        # Compiled whole, in a third of the time, and rounded as if run one by one.
        return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})(*operands, *extras)

    expected = plain(spec, operands)
    with jax.enable_x64(True):
        exact = plain(widened(spec), [x.astype(np.float64) for x in operands])
    q, k, v, dout, dlse = map(jnp.asarray, operands)
    actual, (out, lse) = {}, (expected["out"], expected["lse"])
    with interpret():
        if forward is not None:
            out, lse = attention_forward.run(spec, forward, q, k, v, *extras)
            actual |= dict(out=out, lse=lse)
        if backward is not None:
            grads = attention_backward.run(spec, backward, q, k, v, *extras, out, lse, dout, dlse)
            actual |= dict(zip(("dq", "dk", "dv"), grads))
    assert_accurate(*({name: np.asarray(results[name]) for name in actual} for results in (actual, expected, exact)))


def check_backward(spec: AttentionSpec, config: attention_backward.Config, **settings: Any) -> None:
    check(spec, None, config, **settings)


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (63, 65)], ids=str)
def test_lengths(lengths: tuple[int, int], causal: bool) -> None:
    check(make_spec(*lengths, causal=causal))


def test_one_key_and_one_query() -> None:
    check(make_spec(1, 1))
    check(make_spec(130, 1, causal=True))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)], ids=str)
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(make_spec(72, 72, heads=heads, batch=2, causal=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (128, 128), (64, 128), (128, 64)], ids=str)
def test_head_dimensions(dims: tuple[int, int]) -> None:
    check(make_spec(72, 136, dims=dims, causal=True))


@pytest.mark.sampled
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)], ids=str)
def test_wide_heads_split_the_outputs_between_the_consumers(dims: tuple[int, int]) -> None:
    spec = make_spec(136, 72, dims=dims, causal=True)
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert config.split_outputs
    check(spec, backward=config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    check(make_spec(136, 136, dtype=dtype, causal=True))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "schedule",
    [
        dict(block_kv=128),
        dict(num_stages=3),
        dict(block_q=128),
        dict(bridge=False),
        dict(num_q_slots=2),
        dict(num_q_slots=2, bridge=False),
        dict(num_consumers=3),
        dict(num_consumers=3, bridge=False, num_q_slots=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_schedules(schedule: dict[str, Any], causal: bool) -> None:
    """Nine items on two CTAs, ragged ends of queries and keys."""
    spec = make_spec(264, 200, heads=(3, 1), causal=causal)
    check(spec, dataclasses.replace(_FORWARD, **schedule), None)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "backward",
    [
        attention_backward.Config(dq_block_kv=128, dq_num_stages=1, dkv_block_q=128, dkv_num_stages=1),
        attention_backward.Config(dq_num_stages=3, dkv_num_stages=3),
        attention_backward.Config(dq_num_stages=3, split_outputs=True),
    ],
    ids=["one stage", "three stages", "split"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_backward_schedules(backward: attention_backward.Config, causal: bool) -> None:
    check_backward(make_spec(200, 264, causal=causal), backward)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 1, 70, 300])
def test_a_shard_of_the_queries_counts_from_its_place(offset: int) -> None:
    check(make_spec(72, 200, causal=True, query_offset=True), query_offset=offset)


def test_large_logits() -> None:
    """Logits of some hundreds: the running maximum keeps every exponential in range."""
    check(make_spec(72, 136, causal=True), scale_queries=200.0)


def test_same_inputs_give_the_same_bits() -> None:
    spec = make_spec(72, 136, causal=True)
    q, k, v = map(jnp.asarray, random_operands(spec))
    bits = set()
    for _ in range(2):
        with interpret():
            out, lse = attention_forward.run(spec, _FORWARD, q, k, v)
            grads = attention_backward.run(spec, _BACKWARD, q, k, v, out, lse, out, lse)
        bits.add(b"".join(np.asarray(x).tobytes() for x in (out, lse, *grads)))
    assert len(bits) == 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape", [(16, 1024, 16, 128), (4, 4096, 16, 128), (2, 8192, 32, 64), (1, 16384, 8, 256)], ids=str
)
def test_every_item_is_planned_once_and_all_ctas_end_together(shape: tuple[int, int, int, int], causal: bool) -> None:
    batch, length, heads, dim = shape
    spec = make_spec(length, length, heads=(heads, heads), dims=(dim, dim), batch=batch, causal=causal)
    spec = dataclasses.replace(spec, target=hardware.lookup("NVIDIA H200"))
    plan = attention_forward._plan(spec, attention_forward.Config())
    items = [row[1 : 1 + row[0]] for row in plan]
    num_q_blocks = length // 128
    assert sorted(np.concatenate(items)) == list(range(batch * heads * num_q_blocks))
    loads = [sum(item % num_q_blocks + 1 if causal else num_q_blocks for item in row) for row in items]
    best = np.mean(loads) if causal else num_q_blocks * max(map(len, items))
    assert max(loads) < 1.03 * best
    assert max(map(len, items)) < plan.shape[1] - 1  # A bridge from the last item looks at one number more.


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((16, 16), dict(length=4096, batch=4)),
        ((16, 16), dict(length=2048, batch=8, causal=True)),
        ((16, 2), dict(length=1024, batch=16, causal=True)),
        ((8, 8), dict(length=4096, batch=1, causal=True, deterministic=True)),
        ((16, 16), dict(length=4096, batch=4, window=(1023, 0))),
    ],
    ids=str,
)
def test_every_item_of_the_backward_pass_is_planned_once_behind_those_it_waits_for(
    heads: tuple[int, int], options: dict[str, Any]
) -> None:
    length, dims = options.pop("length"), (128, 128)
    spec = make_spec(length, length, heads=heads, dims=dims, **options)
    spec = dataclasses.replace(spec, target=hardware.lookup("NVIDIA H200"))
    plan = attention_backward_fused._plan(spec, 64)
    items = [row[1 : 1 + row[0]] for row in plan]
    num_kv_blocks = length // 128
    assert sorted(np.concatenate(items)) == list(range(spec.k.shape[0] * heads[1] * num_kv_blocks))
    if spec.deterministic:  # CTAs begin in their order: whom they wait for has begun.
        order = np.concatenate(items) % num_kv_blocks
        streams = np.concatenate(items) // num_kv_blocks
        assert all(list(order[streams == stream]) == list(range(num_kv_blocks)) for stream in set(streams))
        return
    steps = np.array(attention_backward_fused._steps(spec, 64))
    loads = [steps[item % num_kv_blocks].sum() for item in items]
    longest = max(steps.max(), pl.cdiv(sum(map(len, items)), len(items)) * steps.min(), np.mean(loads))
    assert max(loads) < 1.06 * longest


@pytest.mark.parametrize(
    "work", [np.arange(2048) % 17 + 1.0, np.ones(5), np.ones(132), [1000.0, *[1.0] * 200], [*[1.0] * 200, 1000.0]]
)
def test_consecutive_items_of_equal_work(work: Any) -> None:
    work = np.asarray(work)
    count, first = np.asarray(attention_blocks.plan_of_equal_work(jnp.asarray(work), 132)).T
    assert len(count) == min(132, len(work))
    assert min(count) >= 1
    assert list(first) == [0, *np.cumsum(count)[:-1]]
    assert sum(count) == len(work)
    loads = [work[i : i + n].sum() for i, n in zip(first, count)]
    assert max(loads) <= work.sum() / len(count) + work.max()


def forward(spec: AttentionSpec, *operands: Any, config: attention_forward.Config = _FORWARD) -> list[np.ndarray]:
    """out and lse, interpreted."""
    with interpret():
        return [np.asarray(x) for x in attention_forward.run(spec, config, *map(jnp.asarray, operands))]


_WINDOWS = [(70, None), (None, 40), (70, 40), (0, 0), (3, 200)]


@pytest.mark.sampled
@pytest.mark.parametrize(("lengths", "causal"), [((264, 264), True), ((136, 328), False), ((328, 136), False)], ids=str)
@pytest.mark.parametrize("window", _WINDOWS, ids=str)
def test_windows(window: tuple[int | None, int | None], lengths: tuple[int, int], causal: bool) -> None:
    """With 328 queries of 136 keys, the last queries of most windows see none."""
    check(make_spec(*lengths, window=window, causal=causal), backward=None)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
@pytest.mark.parametrize("window", [(70, None), (70, 40)], ids=str)
def test_a_shard_of_the_queries_has_its_place_in_the_window(window: tuple[int, int | None], offset: int) -> None:
    check(make_spec(136, 264, window=window, query_offset=True), backward=None, query_offset=offset)


_LENGTHS = [0, 1, 64, 130, 200]


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    spec = make_spec(200, 200, batch=5, **{f"{name}_lengths": True for name in given}, **rules)
    check(spec, backward=None, query_lengths=_LENGTHS[::-1], key_lengths=_LENGTHS)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
def test_padding_reaches_no_result(rules: dict[str, Any], poison: float) -> None:
    spec = make_spec(200, 200, batch=3, query_lengths=True, key_lengths=True, **rules)
    query_lengths, key_lengths = np.int32([200, 130, 1]), np.int32([200, 130, 1] if rules else [130, 64, 1])
    clean = random_operands(spec)
    poisoned = [x.copy() for x in clean]
    for x, lengths in zip(poisoned, (query_lengths, key_lengths, key_lengths)):
        for b, length in enumerate(lengths):
            x[b, length:] = poison
    expected = forward(spec, *clean, query_lengths, key_lengths)
    for x, y in zip(forward(spec, *poisoned, query_lengths, key_lengths), expected):
        np.testing.assert_array_equal(x, y)


def _documents(batch: int, length: int, mean: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(1).random((batch, length)) < 1 / mean, axis=1)


_SEGMENTS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "packed": (_documents(2, 264, 50),) * 2,
    "aligned": (np.arange(264)[None].repeat(2, 0) // 128,) * 2,
    "one": (np.zeros((2, 264)),) * 2,
    "unordered": tuple(np.random.default_rng(i).integers(-3, 4, (2, 264)) for i in range(2)),
    "alternating": (np.arange(264)[None].repeat(2, 0) // 64 % 2,) * 2,
    "other keys": (_documents(2, 264, 50), _documents(2, 136, 90)),
    "strangers": (np.arange(264)[None].repeat(2, 0) // 66, np.full((2, 136), 2)),
    "extreme": (np.where(_documents(2, 264, 90) % 2, 2**31 - 1, -(2**31)),) * 2,
}


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("name", _SEGMENTS)
def test_segments(name: str) -> None:
    query_ids, key_ids = _SEGMENTS[name]
    spec = make_spec(query_ids.shape[1], key_ids.shape[1], batch=2, segments=True, window=(40, 30))
    check(spec, backward=None, query_segments=query_ids, key_segments=key_ids)


#: Of one sequence: the same ids for queries and keys.
_OF_ITSELF = ["packed", "one", "alternating", "extreme"]


@pytest.mark.one_version
@pytest.mark.parametrize("name", _OF_ITSELF)
def test_segments_of_one_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query sees itself: nothing is computed for those that see no key."""
    monkeypatch.setattr(attention_backward, "_mean_gradient", None)
    ids, _ = _SEGMENTS[name]
    rules = dict(causal=True) if name == "packed" else dict(window=(40, 0)) if name == "extreme" else {}
    spec = make_spec(264, 264, batch=2, segments=True, self_segments=True, **rules)
    check(spec, backward=_FUSED[64], query_segments=ids, key_segments=ids)
    check_backward(spec, _SPLIT, query_segments=ids, key_segments=ids)


def test_segments_of_one_sequence_are_no_promise_beside_other_reasons_to_see_nothing() -> None:
    may = lambda *lengths, **rules: attention_blocks.may_see_nothing(
        make_spec(*lengths, segments=True, self_segments=True, **rules)
    )
    assert not may(264, 264)
    assert not may(264, 264, causal=True, window=(0, 0), query_lengths=True)
    assert may(264, 264, key_lengths=True)
    assert may(132, 264)  # A shard's queries are not those beside its keys,
    assert may(132, 264, query_offset=True)  # or some other of the keys.
    assert may(264, 264, query_offset=True)


@pytest.mark.sampled
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("scale_queries", [1.0, 100.0])
def test_soft_cap(cap: float, scale_queries: float) -> None:
    check(make_spec(72, 136, causal=True, soft_cap=cap), backward=None, scale_queries=scale_queries)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (80, 64)], ids=str)
@pytest.mark.parametrize(("causal", "offset"), [(False, None), (True, 60)])
def test_everything_at_once(dims: tuple[int, int], causal: bool, offset: int | None) -> None:
    spec = make_spec(
        200, 264, heads=(4, 2), dims=dims, batch=2, causal=causal, window=(100, 30), soft_cap=3.0,
        query_lengths=True, key_lengths=True, segments=True, query_offset=offset is not None,
    )  # fmt: skip
    ids = _documents(2, 264, 90)
    place = offset or 0
    check(
        spec, backward=None, query_lengths=[190, 264], key_lengths=[264, 150], query_offset=place,
        query_segments=ids[:, place : place + 200], key_segments=ids,
    )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize(
    "schedule",
    [
        dict(block_kv=128),
        dict(num_stages=3, num_q_slots=2),
        dict(num_consumers=3),
    ],
    ids=str,
)
def test_features_with_schedules(schedule: dict[str, Any]) -> None:
    spec = make_spec(264, 264, heads=(3, 1), window=(90, 20), key_lengths=True, segments=True)
    ids = _documents(1, 264, 90)
    config = dataclasses.replace(_FORWARD, **schedule)
    check(spec, config, None, key_lengths=[250], query_segments=ids, key_segments=ids)


def _poisoned(spec: AttentionSpec, keys: slice) -> list[np.ndarray]:
    q, k, v = random_operands(spec)
    v[:, keys] = np.nan  # Of a block that is visited NaN reaches every query: 0 NaN is NaN.
    return [q, k, v]


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("rules", "integers", "poisoned", "clean"),
    [
        (dict(window=(60, None), causal=True), {}, slice(0, 64), slice(128, 256)),
        (dict(window=(None, 60)), {}, slice(192, 264), slice(0, 128)),
        (dict(window=(10, 60)), {}, slice(192, 264), slice(0, 128)),
        (dict(key_lengths=True), dict(key_lengths=[120]), slice(128, 264), slice(0, 264)),
        (dict(query_lengths=True, causal=True), dict(query_lengths=[30]), slice(64, 264), slice(0, 264)),
        (
            dict(segments=True),
            dict(query_segments=np.arange(264)[None] // 128, key_segments=np.arange(264)[None] // 128),
            slice(0, 128),
            slice(128, 264),
        ),
    ],
    ids=["window", "right", "both sides", "key lengths", "query lengths", "segments"],
)
def test_blocks_that_no_query_sees_are_not_visited(
    rules: dict[str, Any], integers: dict[str, Any], poisoned: slice, clean: slice
) -> None:
    spec = make_spec(264, 264, **rules)
    extras = [np.int32(integers[name]) for name in spec.extra_names]
    out, _ = forward(spec, *_poisoned(spec, poisoned), *extras)
    assert np.isfinite(out[:, clean].astype(np.float32)).all()


def _sees(spec: AttentionSpec, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    left, right = spec.window or (None, None)
    sees = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
    if spec.causal:
        sees &= j <= i
    if left is not None:
        sees &= i - j <= left
    if right is not None:
        sees &= j - i <= right
    return sees


@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, *_WINDOWS], ids=str)
def test_ranges_are_what_the_masks_say(window: tuple[int | None, int | None] | None, causal: bool) -> None:
    """Of queries for keys and of keys for queries, in numbers and traced."""
    num_queries, num_keys, block_q, block_kv = 130, 170, 32, 16
    spec = make_spec(num_queries, num_keys, window=window, causal=causal)
    sees = _sees(spec, np.arange(num_queries)[:, None], np.arange(num_keys))
    inside = lambda indices, span: (indices >= int(span[0])) & (indices < int(span[1]))
    queries, keys = np.arange(num_queries), np.arange(num_keys)
    for number in (int, jnp.int32):
        for start in range(0, num_queries, block_q):
            rows = sees[start : start + block_q]
            ends = number(start), number(min(start + block_q, num_queries))
            seen = attention_blocks.keys_seen_by_any(spec, *ends, number(num_keys))
            np.testing.assert_array_equal(inside(keys, seen), rows.any(0))
            seen = attention_blocks.keys_seen_by_all(spec, *ends, number(num_keys))
            np.testing.assert_array_equal(inside(keys, seen), rows.all(0))
        for start in range(0, num_keys, block_kv):
            columns = sees[:, start : start + block_kv]
            ends = number(start), number(min(start + block_kv, num_keys))
            of_queries = number(0), number(num_queries)
            seeing = attention_blocks.queries_that_see_any(spec, *ends, *of_queries)
            np.testing.assert_array_equal(inside(queries, seeing), columns.any(1))
            seeing = attention_blocks.queries_that_see_all(spec, *ends, *of_queries)
            np.testing.assert_array_equal(inside(queries, seeing), columns.all(1))
        assert attention_blocks.blocks_of(number(17), number(33), 16) == (1, 3)
        assert attention_blocks.blocks_within(number(17), number(63), 16) == (2, 3)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("name", _SEGMENTS)
def test_segment_blocks_leave_no_key_out(name: str, rules: dict[str, Any]) -> None:
    query_ids, key_ids = (np.int32(ids) for ids in _SEGMENTS[name])
    (batch, num_queries), num_keys = query_ids.shape, key_ids.shape[1]
    spec = make_spec(num_queries, num_keys, batch=batch, segments=True, **rules)
    extras = dict(query_segments=jnp.asarray(query_ids), key_segments=jnp.asarray(key_ids))
    table = np.asarray(attention_blocks.segment_blocks(spec, 128, 64, extras))
    same = query_ids[:, :, None] == key_ids[:, None]
    seen = same & _sees(spec, np.arange(num_queries)[:, None], np.arange(num_keys))
    for b, q in np.ndindex(table.shape[:2]):
        first, end, first_of_one, end_of_one, is_lost = table[b, q]
        rows = same[b, q * 128 : (q + 1) * 128]
        assert not rows[:, : first * 64].any()
        assert not rows[:, end * 64 :].any()
        assert rows[:, first_of_one * 64 : end_of_one * 64].all()
        assert is_lost or seen[b, q * 128 : (q + 1) * 128].any(1).all()
        if name in ("packed", "aligned", "one"):  # Nothing is visited in vain, and nobody is given up.
            assert rows[:, first * 64 : first * 64 + 64].any()
            assert rows[:, end * 64 - 64 : end * 64].any()
            assert not is_lost
        if name == "aligned":
            assert (first_of_one, end_of_one) == (first, end)


@pytest.mark.one_version
def test_the_edges_of_a_mask_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the masked loops, or with one block too many taken for unmasked, results are wrong."""
    spec = make_spec(264, 264, window=(90, 20))
    everything = lambda spec, start, end, key_end: (0, key_end)
    monkeypatch.setattr(attention_forward, "keys_seen_by_all", everything)
    with pytest.raises(AssertionError, match="from the reference"):
        check(spec, backward=None)


@pytest.mark.one_version
def test_blocks_that_all_see_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides everything leaves the blocks in the middle of a window as they are."""
    monkeypatch.setattr(attention_forward, "hide_unseen", lambda s, *args, **kwargs: jnp.full_like(s, -jnp.inf))
    spec = make_spec(520, 520, window=(300, None), causal=True)
    q, k, v = random_operands(spec)
    _, lse = forward(spec, q, k, v)
    assert np.isfinite(lse[:, 256:384]).all()
    # Of 64 queries from 320 on, the blocks from 128 to 320 are seen whole: the first key that all see is 83.
    logits = np.einsum("tnh,skh->nts", *(x[0].astype(np.float32) for x in (q[:, 320:384], k[:, 128:320])))
    expected = np.log(np.exp(logits * spec.scale).sum(-1)).T
    np.testing.assert_allclose(lse[0, 320:384], expected, rtol=1e-3)


#: Every wait that the forward kernel's warpgroups have, in the order in which it is traced; turns are no condition.
_WAITS = ["keys free", "consumer 0's queries free", "consumer 1's queries free", "next keys free", "values free"]
_WAITS += ["last values free", "first queries", "first keys", "first values", "masked keys", "masked values", "keys"]
_WAITS += ["values", "next item's queries", "next item's keys", "next item's values"]


def run_forward(spec: AttentionSpec, config: attention_forward.Config, *extras: Any) -> None:
    with interpret(deadlock_after=3.0):
        attention_forward.run(spec, config, *map(jnp.asarray, (*random_operands(spec), *extras)))


@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_WAITS)), ids=_WAITS)
def test_a_missing_wait_of_the_forward_kernel_is_noticed(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.count()
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == missing else wait(barrier))
    # ValueError: a barrier went round before anyone had looked at it.
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_forward(make_spec(264, 264, causal=True), _FORWARD)
    assert next(waits) == len(_WAITS)


_WAITS_WITH_EDGES = [*_WAITS[:4], "edge values free", "values free", "last edge values free", *_WAITS[5:9]]
_WAITS_WITH_EDGES += [f"{loop} {what}" for loop in ("masked", "middle", "last masked") for what in ("keys", "values")]
_WAITS_WITH_EDGES += _WAITS[-3:]


@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_WAITS_WITH_EDGES)), ids=_WAITS_WITH_EDGES)
def test_a_missing_wait_beside_masks_is_noticed(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.count()
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == missing else wait(barrier))
    # The last queries see nothing but the block in which the keys end; those of six heads come one after the other.
    spec = make_spec(264, 264, heads=(6, 1), window=(0, 130), key_lengths=True)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_forward(spec, _FORWARD, np.int32([264]))
    assert next(waits) == len(_WAITS_WITH_EDGES)


@pytest.mark.parametrize("missing", ["commit_smem", "wait_smem_to_gmem"])
def test_a_missing_fence_of_the_forward_kernel_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, missing, lambda *args, **kwargs: None)
    with pytest.raises((RaceError, ValueError), match=r"is not ordered|Not all copy_smem_to_gmem"):
        run_forward(make_spec(264, 264, causal=True), _FORWARD)


def test_an_output_read_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plgpu.wgmma_accumulator_load
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", lambda ref, *, wait_n: load(ref, wait_n=1))
    with pytest.raises(ValueError, match="an accumulator is read while a wgmma that adds to it is in flight"):
        run_forward(make_spec(136, 136), _FORWARD)


_SPLIT = attention_backward.Config(dq_num_stages=3, split_outputs=True)


@pytest.mark.sampled
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (63, 300)], ids=str)
@pytest.mark.parametrize(("multicast", "causal"), [(True, False), (False, True)], ids=["pairs, full", "alone, causal"])
def test_split_lengths(lengths: tuple[int, int], multicast: bool, causal: bool) -> None:
    """Clusters of which one CTA has no keys or no queries, and keys that no query sees."""
    check_backward(make_spec(*lengths, causal=causal), dataclasses.replace(_SPLIT, multicast=multicast))


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize(
    "schedule",
    [
        dict(ping_pong=False),
        dict(dq_num_stages=4, dkv_num_stages=3),
        dict(dkv_num_stages=4, multicast=False, ping_pong=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_split_schedules(schedule: dict[str, Any], dims: tuple[int, int]) -> None:
    check_backward(make_spec(264, 264, dims=dims, causal=True), dataclasses.replace(_SPLIT, **schedule))


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_split_with_grouped_heads(heads: tuple[int, int], dtype: str) -> None:
    check_backward(make_spec(200, 200, heads=heads, batch=2, dtype=dtype, causal=True), _SPLIT)


@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_split_with_a_shard_of_the_queries(offset: int) -> None:
    check_backward(make_spec(72, 400, causal=True, query_offset=True), _SPLIT, query_offset=offset)


@pytest.mark.one_version
def test_split_with_large_logits() -> None:
    check_backward(make_spec(72, 136, causal=True), _SPLIT, scale_queries=200.0)


def run_backward(spec: AttentionSpec, config: attention_backward.Config, **settings: Any) -> None:
    q, k, v = map(jnp.asarray, random_operands(spec))
    out, lse = jax.jit(functools.partial(xla_forward.run, spec, xla_forward.Config()))(q, k, v)
    with interpret(**settings):
        attention_backward.run(spec, config, q, k, v, out, lse, out, lse)


_ALONE = dataclasses.replace(_SPLIT, multicast=False)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize(("config", "lengths"), [(_ALONE, (136, 328)), (_SPLIT, (328, 136))], ids=["alone", "pairs"])
@pytest.mark.parametrize("window", _WINDOWS, ids=str)
def test_split_windows(
    window: tuple[int | None, int | None], lengths: tuple[int, int], config: attention_backward.Config
) -> None:
    """Keys and queries that nobody sees, or that see none; CTAs of a pair that see different blocks."""
    check_backward(make_spec(*lengths, window=window), config)


@pytest.mark.one_version
@pytest.mark.parametrize("window", [(70, None), (0, 0)], ids=str)
def test_split_causal_windows(window: tuple[int, int | None]) -> None:
    check_backward(make_spec(264, 264, heads=(3, 1), window=window, causal=True), _SPLIT)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_split_with_a_shard_of_the_queries_in_the_window(offset: int) -> None:
    check_backward(make_spec(136, 264, window=(70, 40), query_offset=True), _SPLIT, query_offset=offset)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_split_with_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    spec = make_spec(200, 200, batch=5, **{f"{name}_lengths": True for name in given}, **rules)
    check_backward(spec, _SPLIT, query_lengths=_LENGTHS[::-1], key_lengths=_LENGTHS)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("name", _SEGMENTS)
def test_split_with_segments(name: str) -> None:
    query_ids, key_ids = _SEGMENTS[name]
    spec = make_spec(query_ids.shape[1], key_ids.shape[1], batch=2, segments=True, causal=True)
    check_backward(spec, _SPLIT, query_segments=query_ids, key_segments=key_ids)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("scale_queries", [1.0, 100.0])
def test_split_with_a_soft_cap(cap: float, scale_queries: float) -> None:
    check_backward(make_spec(72, 136, causal=True, soft_cap=cap), _SPLIT, scale_queries=scale_queries)


@pytest.mark.one_version
def test_split_with_capped_dlogits_in_memory() -> None:
    check_backward(make_spec(136, 200, causal=True, soft_cap=3.0), dataclasses.replace(_SPLIT, workspace_bytes=1))


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (256, 256)], ids=str)
def test_wide_heads_with_everything_at_once(dims: tuple[int, int], causal: bool) -> None:
    spec = make_spec(
        200, 264, heads=(4, 2), dims=dims, batch=2, causal=causal, window=(100, 30), soft_cap=3.0,
        query_lengths=True, key_lengths=True, segments=True, query_offset=causal,
    )  # fmt: skip
    ids, place = _documents(2, 264, 90), 60 * causal
    check_backward(
        spec, dispatch.default_config("attention_backward", "pallas", spec), query_lengths=[190, 264],
        key_lengths=[264, 150], query_offset=place, query_segments=ids[:, place : place + 200], key_segments=ids,
    )  # fmt: skip


def split_gradients(
    spec: AttentionSpec, config: attention_backward.Config, poisoned: dict[str, slice], **integers: Any
) -> dict[str, np.ndarray]:
    """What the two kernels make of NaN in some rows of the values or of the output gradients."""
    q, k, v = random_operands(spec)
    operands = dict(q=q, k=k, v=v, dout=random_array(np.random.default_rng(1), q.shape, q.dtype))
    for name, rows in poisoned.items():
        operands[name][:, rows] = np.nan
    rows = np.zeros((*spec.q.shape[:1], *spec.q.shape[2:0:-1]), np.float32)
    extras = {name: jnp.asarray(integers[name], jnp.int32) for name in spec.extra_names}
    with interpret():
        grads = attention_backward_wide.gradients(spec, config, extras, *operands.values(), rows + 5, rows)
    return {name: np.asarray(x).astype(np.float32) for name, x in zip(("dq", "dk", "dv"), grads)}


_HALVES = np.arange(264)[None] // 128


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("rules", "integers", "dout", "values", "clean_keys", "clean_queries"),
    [
        (dict(window=(60, None), causal=True), {}, slice(192, 264), slice(0, 64), slice(0, 128), slice(128, 264)),
        (dict(window=(None, 60)), {}, slice(0, 64), slice(192, 264), slice(128, 264), slice(0, 128)),
        (dict(key_lengths=True), dict(key_lengths=[120]), slice(0, 0), slice(128, 264), slice(0, 264), slice(0, 264)),
        (
            dict(query_lengths=True),
            dict(query_lengths=[120]),
            slice(128, 264),
            slice(0, 0),
            slice(0, 264),
            slice(0, 264),
        ),
        (
            dict(segments=True),
            dict(query_segments=_HALVES, key_segments=_HALVES),
            slice(0, 128),
            slice(0, 128),
            slice(128, 264),
            slice(128, 264),
        ),
    ],
    ids=["window", "right", "key lengths", "query lengths", "segments"],
)
def test_split_kernels_do_not_visit_what_nobody_sees(
    rules: dict[str, Any], integers: dict[str, Any], dout: slice, values: slice, clean_keys: slice, clean_queries: slice
) -> None:
    spec = make_spec(264, 264, **rules)
    grads = split_gradients(spec, _ALONE, dict(dout=dout), **integers)
    assert np.isfinite(grads["dv"][:, clean_keys]).all()
    grads = split_gradients(spec, _ALONE, dict(v=values), **integers)
    assert np.isfinite(grads["dq"][:, clean_queries]).all()


@pytest.mark.one_version
def test_split_kernels_mask_edges_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys that end with a block, and of one segment, nothing is hidden: that it would be NaN does not matter."""
    for name in ("hide_unseen", "hide_other_segments"):
        monkeypatch.setattr(attention_backward_wide, name, lambda s, *_, **__: jnp.full_like(s, jnp.nan))
    spec = make_spec(256, 264, key_lengths=True, segments=True)
    ids = dict(query_segments=np.ones((1, 256)), key_segments=np.ones((1, 264)))
    grads = split_gradients(spec, _SPLIT, {}, key_lengths=[256], **ids)
    assert all(np.isfinite(x).all() for x in grads.values())
    assert not grads["dk"][:, 256:].any()
    assert grads["dk"][:, :256].any(axis=(2, 3)).all()


@pytest.mark.one_version
@pytest.mark.parametrize("taken_for_clear", ["keys_seen_by_all", "queries_that_see_all"])
def test_the_edges_that_the_split_kernels_mask_matter(taken_for_clear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward_wide, taken_for_clear, lambda spec, *_: (0, 264))
    with pytest.raises(AssertionError, match="from the reference"):
        check_backward(make_spec(264, 264, window=(90, 20)), _SPLIT)


@pytest.mark.one_version
def test_a_pair_that_walks_different_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    together = attention_backward_wide._queries_of_keys

    def apart(spec: AttentionSpec, config: Any, inputs: Any, batch: Any, start: Any) -> Any:
        return together(spec, _ALONE, inputs, batch, start + jax.lax.axis_index("cluster") * 64)

    monkeypatch.setattr(attention_backward_wide, "_queries_of_keys", apart)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264, window=(70, 0)), _SPLIT, deadlock_after=3.0)


@pytest.mark.one_version
def test_dlogits_are_not_kept_where_blocks_are_skipped() -> None:
    config = dataclasses.replace(_SPLIT, workspace_bytes=1)
    message = (
        "attention_backward[pallas]: workspace_bytes must be 0 with a window, lengths or segments, as of dS only what "
        f"some query sees is written; got {config}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_backward(make_spec(72, 72, window=(3, 0)), config)


#: Every wait of the two kernels, in the order in which they are traced; turns are no condition, and nothing else
#: comes between the release of a neighbour's slot and the end in what is interpreted.
_SPLIT_WAITS = ["dq: values free", "dq: keys free", "dq: queries", "dq: first values", "dq: first keys", "dq: values"]
_SPLIT_WAITS += ["dq: keys", "queries free", "output gradients free", "keys", "first queries", "first P taken"]
_SPLIT_WAITS += ["output gradients for dV", "queries for S", "P taken", "last output gradients for dV"]
_SPLIT_WAITS += ["values read by the other", "values", "first output gradients", "first P", "queries for dK"]
_SPLIT_WAITS += ["output gradients for dP", "P", "last queries for dK"]
#: Of these queries consumer 1 has P, which consumer 0 computed when it had waited for them.
_SPLIT_IMPLIED = {"last queries for dK"}


@pytest.mark.one_version
@pytest.mark.parametrize("missing", sorted(set(_SPLIT_WAITS) - _SPLIT_IMPLIED))
def test_a_missing_wait_of_the_split_kernels_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.count()
    wait = plgpu.barrier_wait
    monkeypatch.setattr(
        plgpu, "barrier_wait", lambda barrier: None if _SPLIT_WAITS[next(waits)] == missing else wait(barrier)
    )
    config = dataclasses.replace(_SPLIT, ping_pong=False, multicast=False)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264), config, deadlock_after=3.0)


@pytest.mark.one_version
def test_the_waits_of_the_split_kernels_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: waits.append(wait(barrier)))
    run_backward(make_spec(72, 72), dataclasses.replace(_SPLIT, ping_pong=False, multicast=False))
    assert len(waits) == len(_SPLIT_WAITS)


@pytest.mark.one_version
def test_slots_that_a_neighbour_does_not_release_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lambda config, num_slots, num_consumers=2: plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_slots)
    monkeypatch.setattr(attention_backward_wide, "_empty", alone)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264), _SPLIT, deadlock_after=3.0)


@pytest.mark.one_version
def test_gradients_read_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plgpu.wgmma_accumulator_load
    monkeypatch.setattr(
        plgpu, "wgmma_accumulator_load", lambda ref, *, wait_n: load(ref, wait_n=1 if wait_n == 0 else wait_n)
    )
    with pytest.raises(ValueError, match="an accumulator is read while a wgmma that adds to it is in flight"):
        run_backward(make_spec(136, 136), _SPLIT)


#: Room for dS of one head of keys at a time, and for that of all heads.
_KEPT = [dataclasses.replace(_SPLIT, workspace_bytes=n) for n in (1, 10**9)]


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("lengths", [(128, 128), (200, 264), (1, 130), (63, 301)], ids=str)
@pytest.mark.parametrize(("config", "causal"), [(_KEPT[0], True), (_KEPT[1], False)], ids=["one head", "all heads"])
def test_split_with_dlogits_in_memory(
    lengths: tuple[int, int], config: attention_backward.Config, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing is written to holds NaN, and no gradient sees it."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    check_backward(make_spec(*lengths, heads=(4, 2), batch=2, causal=causal), config)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(64, 128), (192, 128), (256, 256)], ids=str)
def test_split_with_wide_dlogits_in_memory(dims: tuple[int, int]) -> None:
    check_backward(make_spec(136, 72, dims=dims, causal=True), _KEPT[1])


@pytest.mark.one_version
def test_split_with_dlogits_of_a_shard_of_the_queries_in_memory() -> None:
    check_backward(make_spec(72, 400, causal=True, query_offset=True), _KEPT[1], query_offset=70)


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("fit", "count"), [(0, 1), (1, 1), (3, 2), (4, 4), (5, 4), (9, 8), (99, 8)], ids=lambda n: f"{n}"
)
def test_dlogits_of_whole_batches_or_parts_of_one_are_in_memory_together(fit: int, count: int) -> None:
    spec = make_spec(128, 256, heads=(4, 2), batch=4)
    config = dataclasses.replace(_SPLIT, workspace_bytes=fit * 2 * 2 * 128 * 256)
    assert attention_backward_wide._streams_at_a_time(spec, config) == count


#: The waits of the kernel that multiplies dS by K.
_PRODUCT_WAITS = ["slots free", "dS and keys", "finished"]


@pytest.mark.one_version
@pytest.mark.parametrize("missing", _PRODUCT_WAITS)
def test_a_missing_wait_of_the_product_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([*_SPLIT_WAITS[7:], "slots free", "dS and keys", "dS and keys, not used", "finished"])
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == missing else wait(barrier))
    config = dataclasses.replace(_KEPT[1], ping_pong=False, multicast=False)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(328, 328, causal=True), config, deadlock_after=3.0)


# By head dimension.
_FUSED = {64: attention_backward.Config(dkv_block_q=128, fused=True), 128: attention_backward.Config(fused=True)}


@pytest.mark.sampled
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (130, 1)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_fused(lengths: tuple[int, int], causal: bool, deterministic: bool) -> None:
    check_backward(make_spec(*lengths, causal=causal, batch=2, deterministic=deterministic), _FUSED[64])


@pytest.mark.sampled
@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_fused_head_dimensions(dims: tuple[int, int], deterministic: bool) -> None:
    spec = make_spec(200, 136, dims=dims, causal=True, deterministic=deterministic)
    check_backward(spec, _FUSED[dims[0]])


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)], ids=str)
def test_fused_with_grouped_heads(heads: tuple[int, int], deterministic: bool) -> None:
    spec = make_spec(200, 200, heads=heads, batch=2, causal=True, deterministic=deterministic)
    check_backward(spec, _FUSED[64])


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 1, 70, 300])
def test_fused_on_a_shard_of_the_queries(offset: int) -> None:
    check_backward(make_spec(72, 200, causal=True, query_offset=True), _FUSED[64], query_offset=offset)


@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fused_with_three_slots(causal: bool) -> None:
    check_backward(make_spec(264, 200, causal=causal), attention_backward.Config(dkv_num_stages=3, fused=True))


@pytest.mark.one_version
def test_fused_ignores_keys_that_there_are_not() -> None:
    """Where all logits are some -300, a key of zeros beyond the last one would have an infinite probability."""
    spec = make_spec(72, 136)
    q, k, v = map(jnp.asarray, random_operands(spec))
    q, k = jnp.full_like(q, 6.0), jnp.full_like(k, -6.0) + k
    out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v)
    assert lse.max() < -100
    with interpret():
        actual = attention_backward.run(spec, _FUSED[64], q, k, v, out, lse, out, lse)
    expected = xla_backward.run(spec, xla_backward.Config(), q, k, v, out, lse, out, lse)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=0.05 * np.abs(np.float32(y)).max())


#: Every wait that the fused kernel's warpgroups have, in the order in which it is traced.
_FUSED_WAITS = ["keys free", "queries free", "output gradients free", "dQ full", "dS full", "dQ free"]
_FUSED_WAITS += ["keys", "queries", "output gradients", "dS free"]


@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_FUSED_WAITS)), ids=_FUSED_WAITS)
def test_a_missing_wait_of_the_fused_kernel_is_noticed(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(392, 264, causal=True)
    waits = itertools.count()
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == missing else wait(barrier))
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(spec, attention_backward.Config(fused=True), deadlock_after=3.0)
    assert next(waits) == len(_FUSED_WAITS)


@pytest.mark.one_version
def test_queries_freed_before_their_product_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(392, 264)
    wait = plgpu.wgmma_wait
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: wait(n) if n == 0 else None)
    with pytest.raises(RaceError, match="is not ordered"):
        run_backward(spec, attention_backward.Config(fused=True))


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("missing", "config"),
    [
        ("commit_smem", _FUSED[64]),
        ("wait_smem_to_gmem", _FUSED[64]),
        ("commit_smem", _BACKWARD),
        ("commit_smem", dataclasses.replace(_BACKWARD, dq_num_stages=3, split_outputs=True)),
        ("commit_smem", _KEPT[1]),
        ("wait_smem_to_gmem", _KEPT[1]),
        ("wait_smem_to_gmem", _BACKWARD),
    ],
    ids=["commit, fused", "wait, fused", "commit", "commit, split", "commit, kept", "wait, kept", "final wait"],
)
def test_a_missing_fence_is_noticed(
    missing: str, config: attention_backward.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(264, 264, causal=True)
    monkeypatch.setattr(plgpu, missing, lambda *args, **kwargs: None)
    unfinished = (RaceError, ValueError)  # ValueError: the kernel ended with stores in flight.
    with pytest.raises(unfinished, match=r"is not ordered|Not all copy_smem_to_gmem"):
        run_backward(spec, config)


@pytest.mark.one_version
def test_a_sum_that_does_not_wait_for_its_turn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of keys stores, the others add: these must come later."""
    spec = make_spec(136, 136, deterministic=True)
    q, k, v = (jnp.ones(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))
    out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v)
    monkeypatch.setattr(plgpu, "semaphore_wait", lambda *args, **kwargs: None)
    with pytest.raises(RaceError, match="is not ordered"), interpret():
        attention_backward.run(spec, _FUSED[64], q, k, v, out, lse, out, lse)


@pytest.mark.one_version
def test_a_sum_that_is_never_announced_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(136, 136, deterministic=True)
    q, k, v = (jnp.ones(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))
    out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v)
    monkeypatch.setattr(plgpu, "semaphore_signal", lambda *args, **kwargs: None)
    with pytest.raises(TimeoutError, match="deadlock: "), interpret(deadlock_after=1.0):
        attention_backward.run(spec, _FUSED[64], q, k, v, out, lse, out, lse)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("lengths", [(264, 264), (136, 328), (328, 136)], ids=str)
@pytest.mark.parametrize(
    ("window", "causal", "deterministic"),
    [((70, None), True, True), ((None, 40), False, False), ((70, 40), False, True), ((0, 0), False, False)],
    ids=str,
)
def test_fused_with_windows(
    window: tuple[int | None, int | None], causal: bool, deterministic: bool, lengths: tuple[int, int]
) -> None:
    """With 328 queries of 136 keys, the last queries of most windows see none: they add to all values' gradients."""
    check_backward(make_spec(*lengths, window=window, causal=causal, deterministic=deterministic), _FUSED[64])


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_fused_on_a_shard_that_has_its_place_in_the_window(offset: int) -> None:
    spec = make_spec(136, 264, window=(70, 40), query_offset=True, deterministic=True)
    check_backward(spec, _FUSED[64], query_offset=offset)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_fused_with_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    """In order, as in the next two tests: with the ranges of any order, and ranks of blocks of queries beside."""
    flags = {f"{name}_lengths": True for name in given}
    spec = make_spec(200, 200, batch=5, deterministic=True, **flags, **rules)
    check_backward(spec, _FUSED[64], query_lengths=_LENGTHS[::-1], key_lengths=_LENGTHS)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        *((name, {}) for name in _SEGMENTS),
        ("packed", dict(causal=True)),
        ("unordered", dict(window=(40, 30))),
        ("other keys", dict(causal=True)),
    ],
    ids=str,
)
def test_fused_with_segments(name: str, rules: dict[str, Any]) -> None:
    query_ids, key_ids = _SEGMENTS[name]
    lengths = query_ids.shape[1], key_ids.shape[1]
    spec = make_spec(*lengths, batch=2, segments=True, deterministic=True, **rules)
    check_backward(spec, _FUSED[64], query_segments=query_ids, key_segments=key_ids)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("scale_queries", [1.0, 100.0])
def test_fused_with_a_soft_cap(cap: float, scale_queries: float, dtype: str) -> None:
    """Where all logits are at the cap, what is left of the gradients is the slope there."""
    spec = make_spec(72, 136, causal=dtype == "float16", soft_cap=cap, dtype=dtype)
    check_backward(spec, _FUSED[64], scale_queries=scale_queries)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 64)], ids=str)
@pytest.mark.parametrize(("causal", "offset"), [(False, None), (True, 60)], ids=str)
def test_fused_with_everything_at_once(dims: tuple[int, int], causal: bool, offset: int | None) -> None:
    spec = make_spec(
        200, 264, heads=(4, 2), dims=dims, batch=2, causal=causal, window=(100, 30), soft_cap=3.0, query_lengths=True,
        key_lengths=True, segments=True, query_offset=offset is not None, deterministic=True,
    )  # fmt: skip
    ids, place = _documents(2, 264, 90), offset or 0
    check_backward(
        spec, _FUSED[64 if dims[0] == 64 else 128], query_lengths=[190, 264], key_lengths=[264, 150],
        query_offset=place, query_segments=ids[:, place : place + 200], key_segments=ids,
    )  # fmt: skip


def backward(spec: AttentionSpec, arrays: dict[str, Any], *extras: Any) -> list[np.ndarray]:
    """dq, dk and dv of the fused kernel, interpreted."""
    operands = [arrays[name] for name in "qkv"], extras, [arrays[name] for name in ("out", "lse", "dout", "dlse")]
    with interpret(deadlock_after=3.0):
        grads = attention_backward.run(spec, _FUSED[64], *map(jnp.asarray, itertools.chain(*operands)))
        return [np.asarray(x) for x in grads]


def residuals(spec: AttentionSpec, *extras: Any) -> dict[str, np.ndarray]:
    """The operands of the backward pass by name, but for the extras."""
    q, k, v = random_operands(spec)
    out, lse = xla_forward.run(spec, xla_forward.Config(), *map(jnp.asarray, (q, k, v, *extras)))
    rng = np.random.default_rng(1)
    dout, dlse = random_array(rng, out.shape, out.dtype), random_array(rng, lse.shape, "float32")
    return dict(q=q, k=k, v=v, out=np.array(out), lse=np.array(lse), dout=dout, dlse=dlse)


@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
def test_padding_reaches_no_gradient(rules: dict[str, Any]) -> None:
    spec = make_spec(200, 200, batch=3, query_lengths=True, key_lengths=True, deterministic=True, **rules)
    query_lengths, key_lengths = np.int32([200, 130, 1]), np.int32([200, 130, 1] if rules else [130, 64, 1])
    clean = residuals(spec, query_lengths, key_lengths)
    poisoned = {name: x.copy() for name, x in clean.items()}
    for name, x in poisoned.items():
        for b, length in enumerate(key_lengths if name in "kv" else query_lengths):
            if name != "lse":
                x[b, length:] = np.nan
    expected = backward(spec, clean, query_lengths, key_lengths)
    for x, y in zip(backward(spec, poisoned, query_lengths, key_lengths), expected, strict=True):
        assert np.isfinite(y.astype(np.float32)).all()
        np.testing.assert_array_equal(x, y)


@pytest.mark.one_version
def test_an_average_of_padding_reaches_no_gradient_but_that_of_values() -> None:
    """Queries without a key have averaged padding, too: their outputs are NaN, their weights constant."""
    spec = make_spec(136, 136, batch=2, key_lengths=True, deterministic=True)
    lengths = np.int32([0, 64])
    arrays = residuals(spec, lengths)
    arrays["out"][0] = np.nan
    arrays["v"][0] = np.nan
    dq, dk, dv = backward(spec, arrays, lengths)
    assert not dq[0].any()
    assert not dk[0].any()
    mean = arrays["dout"][0].astype(np.float32).sum((0, 1)) / 136
    np.testing.assert_allclose(dv[0, :, 0].astype(np.float32), np.broadcast_to(mean, (136, 64)), rtol=1e-2)
    assert np.isfinite(dv[1].astype(np.float32)).all()


_DOCUMENTS = np.arange(392)[None] // 128


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("rules", "integers", "poisoned", "clean"),
    [
        (dict(window=(60, None), causal=True), {}, slice(256, 392), slice(0, 128)),
        (dict(window=(None, 60)), {}, slice(0, 128), slice(256, 392)),
        (dict(causal=True), {}, slice(0, 128), slice(128, 392)),
        (dict(segments=True), dict(query_segments=_DOCUMENTS, key_segments=_DOCUMENTS), slice(0, 128), slice(128, 392)),
        (dict(key_lengths=True), dict(key_lengths=[100]), slice(0, 392), slice(128, 392)),
    ],
    ids=["window", "right", "causal", "segments", "key lengths"],
)
def test_blocks_that_see_no_key_are_not_visited(
    rules: dict[str, Any], integers: dict[str, Any], poisoned: slice, clean: slice
) -> None:
    """Of a block that is visited NaN reaches the gradients of every key: 0 NaN is NaN."""
    spec = make_spec(392, 392, **rules)
    extras = [np.int32(integers[name]) for name in spec.extra_names]
    arrays = residuals(spec, *extras)
    arrays["dout"][:, poisoned] = np.nan
    for x in backward(spec, arrays, *extras)[1:]:
        assert np.isfinite(x[:, clean].astype(np.float32)).all()


@pytest.mark.one_version
def test_the_edges_of_the_fused_kernels_mask_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masked blocks, results are wrong."""
    everything = lambda spec, key_start, key_end, query_start, query_end: (query_start, query_end)
    monkeypatch.setattr(attention_backward_fused, "queries_that_see_all", everything)
    with pytest.raises(AssertionError, match="from the reference"):
        check_backward(make_spec(264, 264, window=(90, 20)), _FUSED[64])


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("hidden", "rules"),
    [
        ("hide_unseen", dict(window=(300, 200))),
        ("hide_other_segments", dict(segments=True)),
    ],
    ids=["window", "segments"],
)
def test_blocks_that_see_all_keys_are_not_masked(
    hidden: str, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that hides everything leaves the gradients of keys that are seen by whole blocks as they are."""
    spec = make_spec(384, 384, **rules)
    extras = [np.int32(_DOCUMENTS[:, :384])] * (2 if spec.segments else 0)
    arrays = residuals(spec, *extras)
    _, dk, _ = backward(spec, arrays, *extras)
    monkeypatch.setattr(attention_backward_fused, hidden, lambda s, *args, **kwargs: jnp.full_like(s, -jnp.inf))
    _, masked_dk, _ = backward(spec, arrays, *extras)
    assert masked_dk[:, 128:256].any()
    if spec.segments:
        np.testing.assert_array_equal(masked_dk, dk)


_RANKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(window=(150, None), causal=True), {}),
    (dict(window=(20, 10)), {}),
    (dict(window=(150, 10), query_offset=True), dict(query_offset=70)),
    (dict(query_lengths=True, key_lengths=True), dict(query_lengths=[300], key_lengths=[200])),
    *((dict(segments=True), dict(query_segments=x[0][:1], key_segments=x[1][:1])) for x in _SEGMENTS.values()),
    (
        dict(segments=True, window=(150, 40), key_lengths=True),
        dict(query_segments=_DOCUMENTS % 2, key_segments=_DOCUMENTS % 2, key_lengths=[300]),
    ),
]


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize(("rules", "integers"), _RANKED, ids=[*"012345678901", "mixed"])
def test_blocks_of_keys_add_to_dq_in_turn(
    rules: dict[str, Any], integers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever adds to a block of dQ waits for as many as come before: 0, 1, 2 and so on, none twice."""
    ids = [integers[name].shape[1] for name in ("query_segments", "key_segments") if name in integers]
    spec = make_spec(*(ids or (392, 392)), deterministic=True, **rules)
    extras = [np.int32(integers[name]) for name in spec.extra_names]
    ranks: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    wait = SharedMemory.wait_semaphore

    def record(memory: Any, thread: Any, place: tuple[int, ...], value: int, **kwargs: Any) -> None:
        ranks[place].append(value)
        wait(memory, thread, place, value, **kwargs)

    monkeypatch.setattr(SharedMemory, "wait_semaphore", record)
    backward(spec, residuals(spec, *extras), *extras)
    assert ranks
    for values in ranks.values():
        assert sorted(values) == list(range(len(values)))


@pytest.mark.one_version
def test_a_rank_that_counts_blocks_that_do_not_come_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(392, 392, window=(20, 10), deterministic=True)
    monkeypatch.setattr(attention_backward_fused, "keys_seen_by_any", lambda spec, start, end, key_end: (0, key_end))
    with pytest.raises(TimeoutError, match="deadlock: "):
        backward(spec, residuals(spec))


_BIAS, _MASK = ArrayType((1, 2, 8, 8), jnp.dtype("float32")), ArrayType((1, 1, 8, 8), jnp.dtype("bool"))


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (dict(bias=_BIAS), "does not handle a bias yet"),
        (dict(mask=_MASK), "does not handle a dense mask yet"),
        (dict(dtype="float32"), "takes bfloat16 or float16, not float32"),
        (dict(dims=(288, 64)), "handles head dimensions up to 256, got 288 and 64"),
    ],
    ids=["bias", "mask", "float32", "wide"],
)
def test_refusals(rules: dict[str, Any], reason: str) -> None:
    spec = make_spec(8, 8, **rules)
    assert attention_forward.unsupported(spec) == reason
    assert attention_backward.unsupported(spec) == reason


@pytest.mark.one_version
def test_the_two_kernels_refuse_features() -> None:
    spec = make_spec(8, 8, window=(3, 0), segments=True)
    asked = "a local window, segment ids"
    message = f"attention_backward[pallas]: {asked}: needs fused or split_outputs; got {_BACKWARD}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention_backward.run(spec, _BACKWARD, *[jnp.zeros((1, 8, 2, 64))] * 9)
    for deterministic in (False, True):
        wider = make_spec(8, 8, dims=(128, 128), window=(3, 0), deterministic=deterministic)
        assert all(config.fused for config in attention_backward.shortlist(wider))
        assert all(config.fused for config in attention_backward.search_space(wider))


def test_refuses_what_has_no_kernel_shape() -> None:
    spec = make_spec(8, 8)
    assert attention_forward.unsupported(dataclasses.replace(spec, scale=-1.0)) == "needs a positive scale, got -1.0"
    assert attention_forward.unsupported(make_spec(0, 8)) == "has no work in an empty attention"
    ampere = dataclasses.replace(spec, target=hardware.lookup("NVIDIA A100-SXM4-80GB"))
    assert attention_forward.unsupported(ampere) == (
        "needs a GPU of compute capability 9.0 (Hopper), the target is NVIDIA A100-SXM4-80GB (compute capability 8.0)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: attention_forward.Config(block_kv=32),
            "attention_forward[pallas]: block_q and block_kv must be multiples of 64; "
            "got Config(block_q=64, block_kv=32, num_stages=2, num_q_slots=1, "
            "bridge=True, num_consumers=2).",
        ),
        (
            lambda: attention_forward.Config(num_q_slots=0),
            "attention_forward[pallas]: num_stages must be at least 2 and num_q_slots at least 1; "
            "got Config(block_q=64, block_kv=128, num_stages=2, num_q_slots=0, "
            "bridge=True, num_consumers=2).",
        ),
        (
            lambda: attention_forward.Config(num_stages=1),
            "attention_forward[pallas]: num_stages must be at least 2 and num_q_slots at least 1; "
            "got Config(block_q=64, block_kv=128, num_stages=1, num_q_slots=1, "
            "bridge=True, num_consumers=2).",
        ),
        (
            lambda: attention_forward.Config(num_consumers=4),
            "attention_forward[pallas]: num_consumers must be 2 or 3; "
            "got Config(block_q=64, block_kv=128, num_stages=2, num_q_slots=1, "
            "bridge=True, num_consumers=4).",
        ),
        (
            lambda: attention_backward.Config(dq_num_stages=0),
            "attention_backward[pallas]: block sizes must be multiples of 64 and stages at least 1; got "
            "Config(dq_block_kv=64, dq_num_stages=0, dkv_block_q=64, dkv_num_stages=2, split_outputs=False, "
            "fused=False, multicast=True, ping_pong=True, workspace_bytes=0).",
        ),
        (
            lambda: attention_backward.Config(dkv_num_stages=1, fused=True),
            "attention_backward[pallas]: fused needs dkv_num_stages of at least 2 and excludes split_outputs; got "
            "Config(dq_block_kv=64, dq_num_stages=2, dkv_block_q=64, dkv_num_stages=1, split_outputs=False, "
            "fused=True, multicast=True, ping_pong=True, workspace_bytes=0).",
        ),
    ],
    ids=["block", "no queries", "one slot", "consumers", "backward", "fused"],
)
def test_configs_refuse_what_cannot_run(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


_SANITIZED = """
import functools
from jaxkernels.pallas import attention_backward, attention_forward
from test_pallas_attention import make_spec

def forward(dim):
    spec = make_spec(200, 136, heads=(4, 2), dims=(dim, dim), batch=2, causal=True)
    q, k, v = (jnp.ones(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))
    return attention_forward.run(spec, attention_forward.shortlist(spec)[0], q, k, v)

def backward(dim):
    spec = make_spec(200, 136, heads=(4, 2), dims=(dim, dim), batch=2, causal=True)
    q, k, v = (jnp.ones(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))
    lse = jnp.ones(q.shape[:3], jnp.float32)
    return attention_backward.run(spec, attention_backward.shortlist(spec)[0], q, k, v, q, lse, q, lse)

steps = {f"{run.__name__} {dim}": functools.partial(run, dim) for run in (forward, backward) for dim in (64, 128, 256)}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("step", [f"{which} {dim}" for which in ("forward", "backward") for dim in (64, 128, 256)])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, step: str) -> None:
    names = (step,) if tool == "memcheck" else ("planted", step)
    sanitizer.assert_finds_nothing_else(tool, _SANITIZED, names)
