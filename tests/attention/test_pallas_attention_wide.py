"""The Pallas kernels of the backward pass above head dimension 128, interpreted on the CPU under the race detector."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from interpret import RaceError, interpret
from interpreted_attention import (
    LENGTHS,
    SEGMENTS,
    WIDE,
    WINDOWS,
    check_backward,
    documents,
    make_spec,
    random_operands,
    run_backward,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkernels.core import dispatch
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention import backward
from jaxkernels.pallas.attention import backward_wide as attention_backward_wide

_feature = pytest.mark.sampled(one_in=34, of="features of the split kernels")


@_feature
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (63, 300)], ids=str)
@pytest.mark.parametrize(("multicast", "causal"), [(True, False), (False, True)], ids=["pairs, full", "alone, causal"])
def test_split_lengths(lengths: tuple[int, int], multicast: bool, causal: bool) -> None:
    """Clusters in which one CTA has no keys or no queries, and keys that no query sees."""
    check_backward(make_spec(*lengths, causal=causal), dataclasses.replace(WIDE, multicast=multicast))


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
    check_backward(make_spec(264, 264, dims=dims, causal=True), dataclasses.replace(WIDE, **schedule))


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_split_with_grouped_heads(heads: tuple[int, int], dtype: str) -> None:
    check_backward(make_spec(200, 200, heads=heads, batch=2, dtype=dtype, causal=True), WIDE)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_split_with_a_shard_of_the_queries(offset: int) -> None:
    check_backward(make_spec(72, 400, causal=True, query_offset=True), WIDE, query_offset=offset)


@pytest.mark.one_version
def test_split_with_large_logits() -> None:
    check_backward(make_spec(72, 136, causal=True), WIDE, scale_queries=200.0)


_ALONE = dataclasses.replace(WIDE, multicast=False)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize(("config", "lengths"), [(_ALONE, (136, 328)), (WIDE, (328, 136))], ids=["alone", "pairs"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_split_windows(window: tuple[int | None, int | None], lengths: tuple[int, int], config: Any) -> None:
    """Keys that no query sees, queries that see no key, and CTAs of a pair that see different blocks."""
    check_backward(make_spec(*lengths, window=window), config)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("window", [(70, None), (0, 0)], ids=str)
def test_split_causal_windows(window: tuple[int, int | None]) -> None:
    check_backward(make_spec(264, 264, heads=(3, 1), window=window, causal=True), WIDE)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
def test_split_with_a_shard_of_the_queries_in_the_window(offset: int) -> None:
    check_backward(make_spec(136, 264, window=(70, 40), query_offset=True), WIDE, query_offset=offset)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_split_with_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    spec = make_spec(200, 200, batch=5, **{f"{name}_lengths": True for name in given}, **rules)
    check_backward(spec, WIDE, query_lengths=LENGTHS[::-1], key_lengths=LENGTHS)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("name", SEGMENTS)
def test_split_with_segments(name: str) -> None:
    query_ids, key_ids = SEGMENTS[name]
    spec = make_spec(query_ids.shape[1], key_ids.shape[1], batch=2, segments=True, causal=True)
    check_backward(spec, WIDE, query_segments=query_ids, key_segments=key_ids)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("scale_queries", [1.0, 100.0])
def test_split_with_a_soft_cap(cap: float, scale_queries: float) -> None:
    check_backward(make_spec(72, 136, causal=True, soft_cap=cap), WIDE, scale_queries=scale_queries)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 128), (192, 192), (256, 256)], ids=str)
def test_wide_heads_with_everything_at_once(dims: tuple[int, int], causal: bool) -> None:
    spec = make_spec(
        200, 264, heads=(4, 2), dims=dims, batch=2, causal=causal, window=(100, 30), soft_cap=3.0,
        query_lengths=True, key_lengths=True, segments=True, query_offset=causal,
    )  # fmt: skip
    ids, place = documents(2, 264, 90), 60 * causal
    check_backward(
        spec, dispatch.default_config("attention_backward", "pallas", spec), query_lengths=[190, 264],
        key_lengths=[264, 150], query_offset=place, query_segments=ids[:, place : place + 200], key_segments=ids,
    )  # fmt: skip


def split_gradients(
    spec: AttentionSpec, config: Any, poisoned: dict[str, slice], **integers: Any
) -> dict[str, np.ndarray]:
    """The gradients of the two kernels, with NaN in some rows of the operands."""
    q, k, v = random_operands(spec)
    operands = dict(q=q, k=k, v=v, dout=random_array(np.random.default_rng(1), q.shape, q.dtype))
    for name, rows in poisoned.items():
        operands[name][:, rows] = np.nan
    rows = np.zeros((*spec.q.shape[:1], *spec.q.shape[2:0:-1]), np.float32)
    extras = {name: jnp.asarray(integers[name], jnp.int32) for name in spec.extra_names}
    with interpret():
        grads = attention_backward_wide.gradients(
            spec, config, backward.Operands(*operands.values(), rows + 5, rows), extras
        )
    return {name: np.asarray(x).astype(np.float32) for name, x in zip(("dq", "dk", "dv"), grads)}


_HALVES = np.arange(264)[None] // 128


@pytest.mark.sampled(one_in=10)
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
def test_padding_visits_one_block() -> None:
    """Also if its position is far past the last query or key."""

    def visited(range_of: Any, spec: AttentionSpec, length: int, *place: int) -> list[int]:
        inputs = dict.fromkeys(spec.extra_names, jnp.int32([length]))

        def ends(_: jax.Array) -> tuple[jax.Array, jax.Array]:
            visited = range_of(spec, WIDE, inputs, 0, *map(jnp.int32, place))
            return visited.first, visited.end

        return [int(x) for x in jax.vmap(ends, axis_name="cluster", out_axes=None)(jnp.arange(2))]

    keys = make_spec(72, 520, causal=True, key_lengths=True)
    assert visited(attention_backward_wide._queries_of_keys, keys, 100, 384) == [1, 2]
    queries = make_spec(520, 72, window=(60, None), query_lengths=True)
    assert visited(attention_backward_wide._keys_of_queries, queries, 100, 256, 0) == [1, 2]


@pytest.mark.one_version
def test_split_kernels_mask_edges_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that end with a block, and a single segment, need no mask. A mask would make the results NaN."""
    for name in ("hide_unseen", "hide_other_segments"):
        monkeypatch.setattr(attention_backward_wide, name, lambda s, *_, **__: jnp.full_like(s, jnp.nan))
    spec = make_spec(256, 264, key_lengths=True, segments=True)
    ids = dict(query_segments=np.ones((1, 256)), key_segments=np.ones((1, 264)))
    grads = split_gradients(spec, WIDE, {}, key_lengths=[256], **ids)
    assert all(np.isfinite(x).all() for x in grads.values())
    assert not grads["dk"][:, 256:].any()
    assert grads["dk"][:, :256].any(axis=(2, 3)).all()


@pytest.mark.sampled(one_in=4)
@pytest.mark.one_version
@pytest.mark.parametrize("taken_for_clear", ["keys_seen_by_all", "queries_that_see_all"])
def test_the_edges_that_the_split_kernels_mask_matter(taken_for_clear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward_wide, taken_for_clear, lambda spec, *_: (0, 264))
    with pytest.raises(AssertionError, match="from the reference"):
        check_backward(make_spec(264, 264, window=(90, 20)), WIDE)


@pytest.mark.one_version
def test_a_pair_that_walks_different_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    together = attention_backward_wide._queries_of_keys

    def apart(spec: AttentionSpec, config: Any, inputs: Any, batch: Any, start: Any) -> Any:
        return together(spec, _ALONE, inputs, batch, start + jax.lax.axis_index("cluster") * 64)

    monkeypatch.setattr(attention_backward_wide, "_queries_of_keys", apart)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264, window=(70, 0)), WIDE, deadlock_after=3.0)


#: Every wait of the two kernels, in the order in which they are traced; turns are no condition, and nothing else
#: comes between the release of a neighbour's slot and the end in what is interpreted.
_SPLIT_WAITS = ["dq: values free", "dq: keys free", "dq: queries", "dq: first values", "dq: first keys", "dq: values"]
_SPLIT_WAITS += ["dq: keys", "queries free", "output gradients free", "keys", "first queries", "first P taken"]
_SPLIT_WAITS += ["output gradients for dV", "queries for S", "P taken", "last output gradients for dV"]
_SPLIT_WAITS += ["values read by the other", "values", "first output gradients", "first P", "queries for dK"]
_SPLIT_WAITS += ["output gradients for dP", "P", "last queries for dK"]
#: Of these queries consumer 1 has P, which consumer 0 computed when it had waited for them.
_SPLIT_IMPLIED = {"last queries for dK"}


@pytest.mark.sampled(one_in=12)
@pytest.mark.one_version
@pytest.mark.parametrize("missing", sorted(set(_SPLIT_WAITS) - _SPLIT_IMPLIED))
def test_a_missing_wait_of_the_split_kernels_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.count()
    wait = plgpu.barrier_wait
    monkeypatch.setattr(
        plgpu, "barrier_wait", lambda barrier: None if _SPLIT_WAITS[next(waits)] == missing else wait(barrier)
    )
    config = dataclasses.replace(WIDE, ping_pong=False, multicast=False)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264), config, deadlock_after=3.0)


@pytest.mark.one_version
def test_the_waits_of_the_split_kernels_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    wait = plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: waits.append(wait(barrier)))
    run_backward(make_spec(72, 72), dataclasses.replace(WIDE, ping_pong=False, multicast=False))
    assert len(waits) == len(_SPLIT_WAITS)


@pytest.mark.one_version
def test_slots_that_a_neighbour_does_not_release_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lambda num_slots, num_consumers, *, multicast: plgpu.Barrier(
        num_arrivals=num_consumers, num_barriers=num_slots
    )
    monkeypatch.setattr(attention_backward_wide, "slot_releases", alone)
    with pytest.raises((RaceError, TimeoutError, ValueError)):
        run_backward(make_spec(264, 264), WIDE, deadlock_after=3.0)


@pytest.mark.one_version
def test_gradients_read_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plgpu.wgmma_accumulator_load
    monkeypatch.setattr(
        plgpu, "wgmma_accumulator_load", lambda ref, *, wait_n: load(ref, wait_n=1 if wait_n == 0 else wait_n)
    )
    with pytest.raises(ValueError, match="an accumulator is read while a wgmma that adds to it is in flight"):
        run_backward(make_spec(136, 136), WIDE)
