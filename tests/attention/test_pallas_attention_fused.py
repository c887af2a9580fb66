"""The fused Pallas kernel of the backward pass, interpreted on the CPU under the race detector."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from interpret import RaceError, interpret
from interpret.memory import SharedMemory
from interpreted_attention import (
    FUSED,
    LENGTHS,
    SEGMENTS,
    attention_backward,
    check_backward,
    documents,
    make_spec,
    missing_wait,
    random_cotangents,
    random_operands,
    run_backward,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import exact_attention_gradients

from jaxkernels.ops.attention import reference_backward as xla_backward
from jaxkernels.ops.attention import reference_forward as xla_forward
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention import backward_fused as attention_backward_fused
from jaxkernels.pallas.attention import delta as attention_delta

_feature = pytest.mark.sampled(one_in=26, of="features of the fused kernel")


@_feature
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (130, 1)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_fused(lengths: tuple[int, int], causal: bool, deterministic: bool) -> None:
    check_backward(make_spec(*lengths, causal=causal, batch=2, deterministic=deterministic), FUSED[64])


@_feature
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 300), (1, 130), (130, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_fused_where_the_first_block_of_keys_stores(dim: int, lengths: tuple[int, int], causal: bool) -> None:
    spec = make_spec(*lengths, heads=(2, 2), dims=(dim, dim), causal=causal, batch=2)
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=3))
    check_backward(spec, dataclasses.replace(FUSED[dim], stores_first=True))


@pytest.mark.one_version
@pytest.mark.parametrize(
    "rules",
    [dict(window=(90, None)), dict(key_lengths=True), dict(segments=True), dict(causal=True, heads=(4, 2))],
    ids=str,
)
def test_the_first_block_of_keys_stores_only_where_all_queries_begin_with_it(rules: dict[str, Any]) -> None:
    spec, config = make_spec(200, 136, **{"heads": (2, 2), **rules}), dataclasses.replace(FUSED[64], stores_first=True)
    operands = [jnp.zeros(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v)]
    message = "attention_backward[pallas]: stores_first needs a spec without windows, lengths and segments; "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attention_backward.run(spec, config, *operands)
    assert not any(config.stores_first for config in attention_backward_fused.search_space(spec))


@_feature
@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_fused_head_dimensions(dims: tuple[int, int], deterministic: bool) -> None:
    spec = make_spec(200, 136, dims=dims, causal=True, deterministic=deterministic)
    check_backward(spec, FUSED[dims[0]])


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(96, 96), (80, 80), (96, 64), (64, 96), (24, 24)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
def test_fused_head_dimensions_padded_to_multiples_of_32(dims: tuple[int, int], deterministic: bool) -> None:
    spec = make_spec(200, 136, dims=dims, causal=True, deterministic=deterministic)
    check_backward(spec, attention_backward_fused.Config(head_multiple=32))


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize(("heads", "dim"), [((2, 2), 64), ((3, 1), 64), ((4, 2), 64), ((3, 1), 128)], ids=str)
def test_fused_with_grouped_heads(heads: tuple[int, int], dim: int, deterministic: bool) -> None:
    """Head by head, or block by block of all heads."""
    spec = make_spec(200, 200, heads=heads, dims=(dim, dim), batch=2, causal=True, deterministic=deterministic)
    check_backward(spec, FUSED[dim])


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("dim", "spread", "tied"), [(64, 16, False), (64, 1, True), (128, 100, False), (128, 1, True)], ids=str
)
def test_gradients_at_peaked_softmaxes(dim: int, spread: float, tied: bool) -> None:
    """Beside the error of plain JAX there is that of delta = rowsum(dO * O), which O's rounding moves."""
    spec = make_spec(128, 128, heads=(1, 1), dims=(dim, dim))
    q, k, v = random_operands(spec)
    dout, dlse = random_cotangents(spec)
    dlse = np.zeros_like(dlse)
    k = q if tied else k
    q = (spread * q.astype(np.float32)).astype(q.dtype)
    out, lse = xla_forward.run(spec, xla_forward.Config(), *map(jnp.asarray, (q, k, v)))
    with interpret():
        actual = attention_backward.run(spec, FUSED[dim], *map(jnp.asarray, (q, k, v, out, lse, dout, dlse)))
        actual = [np.float64(x) for x in actual]
    plain = xla_backward.run(spec, xla_backward.Config(), *map(jnp.asarray, (q, k, v, out, lse, dout, dlse)))
    exact = exact_attention_gradients(q, k, v, np.zeros((1, 1, 128, 128)), dout)
    # O's rounding moves delta by 2^-9 of each of its terms, and each dS in the row by P times as much.
    magnitude = lambda x: np.abs(np.float64(x))
    p = np.exp(spec.scale * np.einsum("btnh,bsnh->bnts", np.float64(q), np.float64(k)) - np.float64(lse)[..., None])
    shift = 2**-9 * spec.scale * np.sum(magnitude(dout) * magnitude(out), axis=-1)  # (B, T, N)
    moved = np.einsum("bnts,btn->bnts", p, shift)
    of_delta = [np.einsum("bnts,bsnh->btnh", moved, magnitude(k)), np.einsum("bnts,btnh->bsnh", moved, magnitude(q)), 0]
    for name, x, y, z, moved_by in zip(("dq", "dk", "dv"), actual, plain, exact, of_delta):
        allowed = 2 * np.max(magnitude(y - z)) + 2**-9 * np.max(magnitude(z)) + moved_by
        assert np.all(magnitude(x - z) <= allowed), name


@pytest.mark.one_version
@pytest.mark.parametrize(("zeros_dim", "value_dim"), [(64, 128), (128, 64), (96, 32), (None, 128)])
def test_row_sums(zeros_dim: int | None, value_dim: int) -> None:
    out, dout = (jnp.asarray(np.random.default_rng(i).normal(size=(2, 136, 3, value_dim)), "bfloat16") for i in (0, 1))
    with interpret():
        sums, zeros = attention_delta.row_sums(out, dout, zeros_dim)
        sums = np.asarray(sums)
    expected = np.sum(np.float64(out) * np.float64(dout), axis=-1)
    np.testing.assert_allclose(sums[:, :, :136].swapaxes(1, 2), expected, rtol=1e-5, atol=1e-4)
    if zeros_dim is None:
        assert zeros is None
    else:
        np.testing.assert_array_equal(np.asarray(zeros), np.zeros((2, 136, 3, zeros_dim), np.float32))


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 1, 70, 300])
def test_fused_on_a_shard_of_the_queries(offset: int) -> None:
    check_backward(make_spec(72, 200, causal=True, query_offset=True), FUSED[64], query_offset=offset)


@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fused_with_three_slots(causal: bool) -> None:
    check_backward(make_spec(264, 200, causal=causal), attention_backward_fused.Config(num_stages=3))


@pytest.mark.one_version
def test_fused_ignores_keys_that_there_are_not() -> None:
    """With all logits about -300, a zero key past the last one would have an infinite probability."""
    spec = make_spec(72, 136)
    q, k, v = map(jnp.asarray, random_operands(spec))
    q, k = jnp.full_like(q, 6.0), jnp.full_like(k, -6.0) + k
    out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v)
    assert lse.max() < -100
    with interpret():
        actual = attention_backward.run(spec, FUSED[64], q, k, v, out, lse, out, lse)
    expected = xla_backward.run(spec, xla_backward.Config(), q, k, v, out, lse, out, lse)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=0.05 * np.abs(np.float32(y)).max())


#: Every wait of the kernel that sums rows, and those of the fused kernel's warpgroups, in the order of tracing.
_FUSED_WAITS = ["outputs", "keys free", "queries free", "output gradients free", "dQ full", "dS full", "dQ free"]
_FUSED_WAITS += ["keys", "queries", "output gradients", "dS free"]


@pytest.mark.sampled(one_in=8)
@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_FUSED_WAITS)), ids=_FUSED_WAITS)
def test_a_missing_wait_of_the_fused_kernel_is_noticed(missing: int) -> None:
    spec = make_spec(392, 264, causal=True)
    with missing_wait(missing, _FUSED_WAITS):
        run_backward(spec, attention_backward_fused.Config(), deadlock_after=3.0)


@pytest.mark.one_version
def test_queries_freed_before_their_product_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(392, 264)
    wait = plgpu.wgmma_wait
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: wait(n) if n == 0 else None)
    with pytest.raises(RaceError, match="is not ordered"):
        run_backward(spec, attention_backward_fused.Config())


@pytest.mark.one_version
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_a_sum_that_does_not_wait_for_its_turn_is_noticed(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    """The first block of keys stores, the others add: these must come later."""
    monkeypatch.setattr(plgpu, "semaphore_wait", lambda *args, **kwargs: None)
    config = dataclasses.replace(FUSED[64], stores_first=not in_order)
    with pytest.raises(RaceError, match="is not ordered"):
        run_backward(make_spec(136, 136, deterministic=in_order), config)


@pytest.mark.one_version
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
def test_a_sum_that_is_never_announced_is_a_deadlock(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    monkeypatch.setattr(plgpu, "semaphore_signal", lambda *args, **kwargs: None)
    config = dataclasses.replace(FUSED[64], stores_first=not in_order)
    with pytest.raises(TimeoutError, match="deadlock: "):
        run_backward(make_spec(136, 136, deterministic=in_order), config, deadlock_after=1.0)


@_feature
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
    check_backward(make_spec(*lengths, window=window, causal=causal, deterministic=deterministic), FUSED[64])


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_fused_on_a_shard_that_has_its_place_in_the_window(offset: int) -> None:
    spec = make_spec(136, 264, window=(70, 40), query_offset=True, deterministic=True)
    check_backward(spec, FUSED[64], query_offset=offset)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_fused_with_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    """In order, as in the next two tests: with the ranges of any order, and ranks of blocks of queries beside."""
    flags = {f"{name}_lengths": True for name in given}
    spec = make_spec(200, 200, batch=5, deterministic=True, **flags, **rules)
    check_backward(spec, FUSED[64], query_lengths=LENGTHS[::-1], key_lengths=LENGTHS)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        *((name, {}) for name in SEGMENTS),
        ("packed", dict(causal=True)),
        ("unordered", dict(window=(40, 30))),
        ("other keys", dict(causal=True)),
    ],
    ids=str,
)
def test_fused_with_segments(name: str, rules: dict[str, Any]) -> None:
    query_ids, key_ids = SEGMENTS[name]
    lengths = query_ids.shape[1], key_ids.shape[1]
    spec = make_spec(*lengths, batch=2, segments=True, deterministic=True, **rules)
    check_backward(spec, FUSED[64], query_segments=query_ids, key_segments=key_ids)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("scale_queries", [1.0, 100.0])
def test_fused_with_a_soft_cap(cap: float, scale_queries: float, dtype: str) -> None:
    """With all logits at the cap, the gradients depend on the small slope there."""
    spec = make_spec(72, 136, causal=dtype == "float16", soft_cap=cap, dtype=dtype)
    check_backward(spec, FUSED[64], scale_queries=scale_queries)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 64)], ids=str)
@pytest.mark.parametrize(("causal", "offset"), [(False, None), (True, 60)], ids=str)
def test_fused_with_everything_at_once(dims: tuple[int, int], causal: bool, offset: int | None) -> None:
    spec = make_spec(
        200, 264, heads=(4, 2), dims=dims, batch=2, causal=causal, window=(100, 30), soft_cap=3.0, query_lengths=True,
        key_lengths=True, segments=True, query_offset=offset is not None, deterministic=True,
    )  # fmt: skip
    ids, place = documents(2, 264, 90), offset or 0
    check_backward(
        spec, FUSED[64 if dims[0] == 64 else 128], query_lengths=[190, 264], key_lengths=[264, 150],
        query_offset=place, query_segments=ids[:, place : place + 200], key_segments=ids,
    )  # fmt: skip


def backward(spec: AttentionSpec, arrays: dict[str, Any], *extras: Any) -> list[np.ndarray]:
    """dq, dk and dv of the fused kernel, interpreted."""
    operands = [arrays[name] for name in "qkv"], extras, [arrays[name] for name in ("out", "lse", "dout", "dlse")]
    with interpret(deadlock_after=3.0):
        grads = attention_backward.run(spec, FUSED[64], *map(jnp.asarray, itertools.chain(*operands)))
        return [np.asarray(x) for x in grads]


def residuals(spec: AttentionSpec, *extras: Any) -> dict[str, np.ndarray]:
    """The operands of the backward pass by name, but for the extras."""
    q, k, v = random_operands(spec)
    out, lse = xla_forward.run(spec, xla_forward.Config(), *map(jnp.asarray, (q, k, v, *extras)))
    dout, dlse = random_cotangents(spec)
    return dict(q=q, k=k, v=v, out=np.array(out), lse=np.array(lse), dout=dout, dlse=dlse)


@pytest.mark.sampled(one_in=6)
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
                x[np.s_[b, :, length:] if name == "dlse" else np.s_[b, length:]] = np.nan
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


@pytest.mark.sampled(one_in=10)
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
    """NaN in a visited block would reach the gradients of every key, because 0 NaN is NaN."""
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
        check_backward(make_spec(264, 264, window=(90, 20)), FUSED[64])


@pytest.mark.sampled(one_in=4)
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
    *((dict(segments=True), dict(query_segments=x[0][:1], key_segments=x[1][:1])) for x in SEGMENTS.values()),
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
    """The blocks of keys that add to a block of dQ wait for 0, 1, 2, ... earlier additions, each number once."""
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
