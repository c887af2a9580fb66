"""The Pallas attention kernels, interpreted on the CPU under the race detector: masks, edges, heads, schedules.

The backward pass up to head dimension 128 and above it have files of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from interpret import RaceError
from interpreted_attention import (
    FORWARD,
    FUSED,
    LENGTHS,
    SEGMENTS,
    TWO_KERNELS,
    WIDE,
    WINDOWS,
    attention_backward,
    check,
    check_backward,
    documents,
    forward,
    interpret,
    make_spec,
    missing_wait,
    random_cotangents,
    random_operands,
    run_backward,
)
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import planning, visibility
from jaxkernels.ops.attention import reference_backward as xla_backward
from jaxkernels.ops.attention import reference_forward as xla_forward
from jaxkernels.ops.attention.reference import visibility as visible_pairs
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec, Extras
from jaxkernels.pallas.attention import backward
from jaxkernels.pallas.attention import backward_fused as attention_backward_fused
from jaxkernels.pallas.attention import backward_two_kernels as attention_backward_two_kernels
from jaxkernels.pallas.attention import backward_wide as attention_backward_wide
from jaxkernels.pallas.attention import forward as attention_forward
from jaxkernels.pallas.attention import mean as attention_mean

_feature = pytest.mark.sampled(one_in=34, of="features of the attention kernels")


@_feature
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(128, 128), (136, 200), (200, 136), (1, 130), (63, 65)], ids=str)
def test_lengths(lengths: tuple[int, int], causal: bool) -> None:
    check(make_spec(*lengths, causal=causal))


@_feature
def test_one_key_and_one_query() -> None:
    check(make_spec(1, 1))
    check(make_spec(130, 1, causal=True))


@_feature
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)], ids=str)
def test_grouped_heads(heads: tuple[int, int]) -> None:
    check(make_spec(72, 72, heads=heads, batch=2, causal=True))


@_feature
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (128, 128), (64, 128), (128, 64)], ids=str)
def test_head_dimensions(dims: tuple[int, int]) -> None:
    check(make_spec(72, 136, dims=dims, causal=True))


@pytest.mark.one_version
@pytest.mark.parametrize("deterministic", [False, True])
def test_defaults_pad_head_dimensions_to_multiples_of_32_where_that_is_less(deterministic: bool) -> None:
    multiples = {}
    for dims in [(96, 96), (80, 80), (96, 128), (24, 24), (40, 40), (128, 128), (192, 128), (160, 160)]:
        spec = make_spec(72, 136, dims=dims, causal=True, deterministic=deterministic)
        configs = attention_forward.shortlist(spec)[0], *attention_backward.shortlist(spec)
        for op, config in zip(("attention_forward", "attention_backward"), configs):
            assert dispatch.default_config(op, "pallas", spec) == config
        assert getattr(configs[1], "head_multiple", 64) == configs[0].head_multiple
        multiples[dims] = configs[0].head_multiple
    assert {dims for dims, multiple in multiples.items() if multiple == 32} == {(96, 96), (80, 80), (96, 128), (24, 24)}
    assert set(multiples.values()) == {32, 64}


@_feature
@pytest.mark.parametrize("growth", [-3.0, 3.0, 20.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_logits_that_grow_from_block_to_block(growth: float, causal: bool) -> None:
    """By so many powers of two, with the walk or against it: outputs are rescaled never, every third time, always."""
    check(make_spec(328, 328, causal=causal), growth=growth)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("dims", [(96, 96), (80, 80), (96, 128), (64, 96), (24, 24)], ids=str)
def test_head_dimensions_padded_to_multiples_of_32(dims: tuple[int, int]) -> None:
    spec = make_spec(72, 136, dims=dims, causal=True)
    check(spec, dataclasses.replace(FORWARD, head_multiple=32), dataclasses.replace(TWO_KERNELS, head_multiple=32))


@_feature
@pytest.mark.parametrize("dims", [(192, 192), (192, 128), (256, 256)], ids=str)
def test_wide_heads_split_the_outputs_between_the_consumers(dims: tuple[int, int]) -> None:
    spec = make_spec(136, 72, dims=dims, causal=True)
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert isinstance(config, attention_backward_wide.Config)
    check(spec, backward=config)


@_feature
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    check(make_spec(136, 136, dtype=dtype, causal=True))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "schedule",
    [
        dict(block_kv=128),
        dict(num_stages=3),
        dict(bridge=False),
        dict(lazy_rescale=False),
        dict(num_consumers=3),
        dict(num_consumers=3, bridge=False, lazy_rescale=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_schedules(schedule: dict[str, Any], causal: bool) -> None:
    """Nine items on two CTAs, ragged ends of queries and keys."""
    spec = make_spec(264, 200, heads=(3, 1), causal=causal)
    check(spec, dataclasses.replace(FORWARD, **schedule), None)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", [dict(), dict(num_consumers=3, bridge=False), dict(num_stages=3)], ids=str)
@pytest.mark.parametrize("lengths", [(72, 328), (300, 200), (520, 128)], ids=str)
def test_pairs_of_ctas_that_load_for_each_other(lengths: tuple[int, int], schedule: dict[str, Any]) -> None:
    """One of them may have no queries at all."""
    check(make_spec(*lengths), dataclasses.replace(FORWARD, multicast=True, **schedule), None)


@pytest.mark.one_version
def test_pairs_of_ctas_need_full_attention() -> None:
    config = dataclasses.replace(FORWARD, multicast=True)
    spec = make_spec(8, 8, causal=True, window=(3, None))
    message = f"attention_forward[pallas]: a causal mask, a local window: needs multicast=False; got {config}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention_forward.run(spec, config, *[jnp.zeros((1, 8, 2, 64))] * 3)
    for rules in (dict(causal=True), dict(key_lengths=True)):
        assert not any(config.multicast for config in attention_forward.search_space(make_spec(512, 512, **rules)))
    assert any(config.multicast for config in attention_forward.search_space(make_spec(512, 512)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "backward",
    [
        attention_backward_two_kernels.Config(dq_block_kv=128, dq_num_stages=1, dkv_block_q=128, dkv_num_stages=1),
        attention_backward_two_kernels.Config(dq_num_stages=3, dkv_num_stages=3),
        WIDE,
    ],
    ids=["one stage", "three stages", "split"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_backward_schedules(backward: Any, causal: bool) -> None:
    check_backward(make_spec(200, 264, causal=causal), backward)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 1, 70, 300])
def test_a_shard_of_the_queries_counts_from_its_place(offset: int) -> None:
    check(make_spec(72, 200, causal=True, query_offset=True), query_offset=offset)


@_feature
def test_large_logits() -> None:
    """Logits of some hundreds: the running maximum keeps every exponential in range."""
    check(make_spec(72, 136, causal=True), scale_queries=200.0)


def test_same_inputs_give_the_same_bits() -> None:
    spec = make_spec(72, 136, causal=True)
    q, k, v = map(jnp.asarray, random_operands(spec))
    bits = set()
    for _ in range(2):
        with interpret():
            out, lse = attention_forward.run(spec, FORWARD, q, k, v)
            grads = attention_backward.run(spec, TWO_KERNELS, q, k, v, out, lse, out, lse)
        bits.add(b"".join(np.asarray(x).tobytes() for x in (out, lse, *grads)))
    assert len(bits) == 1


def _planned_spec(heads: tuple[int, int], *, length: int, dim: int = 128, **options: Any) -> AttentionSpec:
    """As many queries as keys, for an H200."""
    spec = make_spec(length, length, heads=heads, dims=(dim, dim), **options)
    return dataclasses.replace(spec, target=hardware.lookup("NVIDIA H200"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape", [(16, 1024, 16, 128), (4, 4096, 16, 128), (2, 8192, 32, 64), (1, 16384, 8, 256)], ids=str
)
def test_every_item_is_planned_once_and_all_ctas_end_together(shape: tuple[int, int, int, int], causal: bool) -> None:
    batch, length, heads, dim = shape
    spec = _planned_spec((heads, heads), length=length, dim=dim, batch=batch, causal=causal)
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
        ((16, 16), dict(length=1000, batch=7, causal=True)),
        ((2, 2), dict(length=32768, causal=True)),
        ((8, 8), dict(length=4096, batch=1, causal=True, deterministic=True)),
        ((16, 16), dict(length=4096, batch=4, window=(1023, 0))),
    ],
    ids=str,
)
def test_every_item_of_the_backward_pass_is_planned_once_behind_those_it_waits_for(
    heads: tuple[int, int], options: dict[str, Any]
) -> None:
    spec = _planned_spec(heads, **options)
    steps = np.array(attention_backward_fused._steps(spec, 64))
    plan = attention_backward_fused._plan(spec, 64, is_zeroed=True)
    items = [row[1 : 1 + row[0]] // 2 for row in plan]
    assert sorted(np.concatenate(items)) == list(range(spec.k.shape[0] * heads[1] * len(steps)))
    if spec.deterministic:  # CTAs begin in their order: whom they wait for has begun.
        streams, order = np.divmod(np.concatenate(items), len(steps))
        assert all(list(order[streams == stream]) == list(range(len(steps))) for stream in set(streams))
        return
    loads = [steps[item % len(steps)].sum() for item in items]
    longest = max(steps.max(), pl.cdiv(sum(map(len, items)), len(items)) * steps.min(), np.mean(loads))
    assert max(loads) < 1.06 * longest


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("heads", "options", "most"),
    [
        ((16, 16), dict(length=8192, batch=2, causal=True), 1.01),
        ((16, 16), dict(length=2048, batch=8), 1.01),
        ((16, 2), dict(length=2048, batch=8, causal=True), 1.01),
        ((2, 2), dict(length=32768, causal=True), 2.5),
        ((16, 16), dict(length=16384), 2.0),
        ((4, 4), dict(length=16384, causal=True, window=(1023, 0)), 1.5),
    ],
    ids=str,
)
def test_the_backward_pass_reads_queries_once(heads: tuple[int, int], options: dict[str, Any], most: float) -> None:
    """In a model: a cache of 24 MB; all steps take the same time; an item costs two additional steps."""
    spec = _planned_spec(heads, **options)
    steps = attention_backward_fused._steps(spec, 64)
    plan = attention_backward_fused._plan(spec, 64, is_zeroed=True)
    num_q_blocks, group = pl.cdiv(spec.q.shape[1], 64), spec.group_size
    visits = []  # (time, (stream, head, block of queries))
    for row in plan:
        time = 0
        for number in row[1 : 1 + row[0]]:
            (stream, kv_block), is_upward = divmod(number // 2, len(steps)), number % 2
            first = 2 * kv_block if spec.causal else 0
            for step in range(steps[kv_block]):
                i, head = divmod(step, group)
                q_block = first + i if is_upward else first + steps[kv_block] // group - 1 - i
                visits.append((time + step, (stream, head, min(q_block, num_q_blocks - 1))))
            time += steps[kv_block] + 2
    cache: collections.OrderedDict[Any, None] = collections.OrderedDict()
    loads = 0
    for _, block in sorted(visits, key=lambda visit: visit[0]):
        loads += block not in cache
        cache[block] = None
        cache.move_to_end(block)
        if len(cache) > 24 * 2**20 // (64 * 128 * 8):  # Queries, output gradients and dQ.
            cache.popitem(last=False)
    assert loads <= most * spec.k.shape[0] * heads[0] * num_q_blocks


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("options", "block_q"),
    [
        (dict(length=512, batch=32, causal=True), 64),
        (dict(length=512, batch=32), 64),
        (dict(length=1000, batch=16, causal=True), 64),
        (dict(length=2048, batch=8, causal=True), 64),
        (dict(length=2048, batch=8, causal=True), 128),
        (dict(length=384, batch=1), 64),
        (dict(length=100, batch=3), 64),
    ],
    ids=str,
)
def test_nobody_waits_long_for_the_first_block_of_keys(options: dict[str, Any], block_q: int) -> None:
    """In a model: all steps take the same time, and a block of queries may be added to 1.5 steps after its store."""
    spec = _planned_spec((16, 16), **options)
    steps = attention_backward_fused._steps(spec, block_q)
    plan = attention_backward_fused._plan(spec, block_q, is_zeroed=False)
    items = [[divmod(number // 2, len(steps)) for number in row[1 : 1 + row[0]]] for row in plan]
    num_items = spec.k.shape[0] * 16 * len(steps)
    assert len({item for some in items for item in some}) == sum(map(len, items)) == num_items
    cta_of = {item: cta for cta, some in enumerate(items) for item in some}
    assert all(cta_of[stream, 0] <= cta for (stream, _), cta in cta_of.items())
    stored: dict[int, list[float]] = {}
    ends, waiting = [0.0] * len(items), collections.deque(range(len(items)))
    while waiting:  # CTAs whose next item's first block is not begun come later.
        cta = waiting.popleft()
        while items[cta]:
            stream, kv_block = items[cta][0]
            if kv_block and stream not in stored:
                waiting.append(cta)
                break
            time, times = ends[cta] + 1, list[float]()
            for i in range(steps[kv_block]):
                time = max(time + 1, stored[stream][i] + 1.5) if kv_block else time + 1
                times.append(time)
            if kv_block == 0:
                stored[stream] = times
            ends[cta] = time + 1
            del items[cta][0]
    average = spec.k.shape[0] * 16 * sum(n + 2 for n in steps) / len(plan)
    assert max(ends) < 1.035 * average + 2


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("num_items", "num_ctas"), [(2048, 128), (2752, 132), (2112, 132), (200, 100), (132, 132), (70, 70)]
)
def test_items_as_long_as_each_other_are_for_as_few_ctas_as_end_in_that_time(num_items: int, num_ctas: int) -> None:
    plan, end = planning.balanced_plan([(number, 2.5) for number in range(num_items)], 132)
    assert len(plan) == num_ctas
    assert end == 2.5 * pl.cdiv(num_items, 132)
    uneven, _ = planning.balanced_plan([(number, 2.5 + (number == 0)) for number in range(num_items)], 132)
    assert len(uneven) == min(num_items, 132)


@_feature
@pytest.mark.parametrize(("lengths", "causal"), [((264, 264), True), ((136, 328), False), ((328, 136), False)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window: tuple[int | None, int | None], lengths: tuple[int, int], causal: bool) -> None:
    """With 328 queries of 136 keys, the last queries of most windows see none."""
    check(make_spec(*lengths, window=window, causal=causal), backward=None)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("offset", [0, 70, 300])
@pytest.mark.parametrize("window", [(70, None), (70, 40)], ids=str)
def test_a_shard_of_the_queries_has_its_place_in_the_window(window: tuple[int, int | None], offset: int) -> None:
    check(make_spec(136, 264, window=window, query_offset=True), backward=None, query_offset=offset)


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("rules", [{}, dict(causal=True), dict(window=(40, 30))], ids=str)
@pytest.mark.parametrize("given", [("query",), ("key",), ("query", "key")], ids="+".join)
def test_sequence_lengths(given: tuple[str, ...], rules: dict[str, Any]) -> None:
    spec = make_spec(200, 200, batch=5, **{f"{name}_lengths": True for name in given}, **rules)
    check(spec, backward=None, query_lengths=LENGTHS[::-1], key_lengths=LENGTHS)


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


@_feature
@pytest.mark.one_version
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str) -> None:
    query_ids, key_ids = SEGMENTS[name]
    spec = make_spec(query_ids.shape[1], key_ids.shape[1], batch=2, segments=True, window=(40, 30))
    check(spec, backward=None, query_segments=query_ids, key_segments=key_ids)


#: Of one sequence: the same ids for queries and keys.
_OF_ITSELF = ["packed", "one", "alternating", "extreme"]


@pytest.mark.thorough
@pytest.mark.one_version
@pytest.mark.parametrize("name", _OF_ITSELF)
def test_segments_of_one_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query sees itself, so no means are computed for queries that see no key."""
    monkeypatch.setattr(backward, "mean_gradient", None)
    ids, _ = SEGMENTS[name]
    rules = dict(causal=True) if name == "packed" else dict(window=(40, 0)) if name == "extreme" else {}
    spec = make_spec(264, 264, batch=2, segments=True, self_segments=True, **rules)
    check(spec, backward=FUSED[64], query_segments=ids, key_segments=ids)
    check_backward(spec, WIDE, query_segments=ids, key_segments=ids)


def test_segments_of_one_sequence_are_no_promise_beside_other_reasons_to_see_nothing() -> None:
    may = lambda *lengths, **rules: visibility.may_see_nothing(
        make_spec(*lengths, segments=True, self_segments=True, **rules)
    )
    assert not may(264, 264)
    assert not may(264, 264, causal=True, window=(0, 0), query_lengths=True)
    assert may(264, 264, key_lengths=True)
    assert may(132, 264)  # A shard's queries are not those beside its keys,
    assert may(132, 264, query_offset=True)  # or some other of the keys.
    assert may(264, 264, query_offset=True)


@_feature
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
    ids = documents(2, 264, 90)
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
        dict(num_stages=3),
        dict(num_consumers=3),
        dict(num_consumers=3, bridge=False),
    ],
    ids=str,
)
def test_features_with_schedules(schedule: dict[str, Any]) -> None:
    spec = make_spec(264, 264, heads=(3, 1), window=(90, 20), key_lengths=True, segments=True)
    ids = documents(1, 264, 90)
    config = dataclasses.replace(FORWARD, **schedule)
    check(spec, config, None, key_lengths=[250], query_segments=ids, key_segments=ids)


def _poisoned(spec: AttentionSpec, keys: slice) -> list[np.ndarray]:
    q, k, v = random_operands(spec)
    v[:, keys] = np.nan  # NaN in a visited block reaches every query, because 0 NaN is NaN.
    return [q, k, v]


@pytest.mark.sampled(one_in=8)
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("rules", "integers", "poisoned", "clean"),
    [
        (dict(window=(60, None), causal=True), {}, slice(0, 64), slice(128, 256)),
        (dict(window=(None, 60)), {}, slice(192, 264), slice(0, 128)),
        (dict(window=(10, 60)), {}, slice(192, 264), slice(0, 128)),
        (dict(key_lengths=True), dict(key_lengths=[120]), slice(128, 264), slice(0, 264)),
        # Queries from 160 on see no key, those before do: both of one item.
        (dict(window=(40, None), key_lengths=True), dict(key_lengths=[120]), slice(120, 264), slice(0, 160)),
        (dict(query_lengths=True, causal=True), dict(query_lengths=[30]), slice(64, 264), slice(0, 264)),
        (
            dict(segments=True),
            dict(query_segments=np.arange(264)[None] // 128, key_segments=np.arange(264)[None] // 128),
            slice(0, 128),
            slice(128, 264),
        ),
        (
            dict(segments=True, key_lengths=True),
            dict(query_segments=np.arange(264)[None] // 90, key_segments=np.arange(264)[None] // 90, key_lengths=[120]),
            slice(120, 264),
            slice(0, 180),
        ),
    ],
    ids=["window", "right", "both", "key lengths", "nothing seen", "query lengths", "segments", "segments and lengths"],
)
def test_blocks_that_no_query_sees_are_not_visited(
    rules: dict[str, Any], integers: dict[str, Any], poisoned: slice, clean: slice
) -> None:
    spec = make_spec(264, 264, **rules)
    extras = [np.int32(integers[name]) for name in spec.extra_names]
    out, _ = forward(spec, *_poisoned(spec, poisoned), *extras)
    assert np.isfinite(out[:, clean].astype(np.float32)).all()


def _loads(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, *extras: Any) -> int:
    """How many blocks of keys and of values the kernels load."""
    shapes = collections.Counter()
    read = shared_memory.GPUSharedMemory.get_buffer_content

    def count_and_read(self: Any, key: Any, access: Any, *args: Any, **kwargs: Any) -> Any:
        content = read(self, key, access, *args, **kwargs)
        shapes[tuple(content[1].shape)] += 1
        return content

    monkeypatch.setattr(shared_memory.GPUSharedMemory, "get_buffer_content", count_and_read)
    forward(spec, *random_operands(spec), *extras)
    return shapes[spec.k.shape]


@pytest.mark.sampled(one_in=3)
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("keys", "rules", "extras", "num_blocks"),
    [
        (520, {}, [[200]], 2 * 9),
        (136, dict(window=(0, None), causal=True), [[136]], 2 + 1),
        (520, dict(key_lengths=True, segments=True), [[200], [192], *np.zeros((2, 1, 520))], 2 * 3),
    ],
    ids=["full", "behind the window", "segments"],
)
def test_items_of_padding_visit_one_block(
    keys: int, rules: dict[str, Any], extras: list[Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs do not show it, because outputs of padding are 0. So the loads are counted."""
    spec = make_spec(520, keys, query_lengths=True, **rules)
    # Each of two heads has five items of 128 queries; the last three are padding. Blocks have 64 keys and values.
    assert _loads(spec, monkeypatch, *map(np.int32, extras)) == 2 * 2 * (num_blocks + 3)


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("length", "num_blocks", "num_values", "num_averaged"), [(520, 4 * 2 + 1, 4 * 2, 0), (130, 2 + 1 + 3, 2, 9)]
)
def test_items_that_see_nothing_visit_one_block(
    length: int, num_blocks: int, num_values: int, num_averaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a head's values are averaged once, if there are such. Those of the block in which keys end are a copy's."""
    spec = make_spec(520, 520, window=(0, 0), key_lengths=True)
    assert _loads(spec, monkeypatch, np.int32([length])) == 2 * (num_blocks + num_values + num_averaged)


def filled_in(
    spec: AttentionSpec, extras: dict[str, Any], v: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An output before and after means are filled in, and which queries see no key, by plain JAX."""
    v = jnp.asarray(random_operands(spec)[2] if v is None else v)
    batch, num_queries, num_heads, _ = spec.q.shape
    extras = {name: jnp.asarray(x, jnp.int32) for name, x in extras.items()}
    visible = visible_pairs(spec, Extras(**extras))
    is_blind = ~np.broadcast_to(visible, (batch, 1, num_queries, spec.k.shape[1])).any(3)[:, 0]
    is_blind &= np.asarray(visibility.queries_inside(spec, extras))
    lse = np.where(is_blind[:, None], MASKED_LOGIT, 1.0) * np.ones((1, num_heads, 1))
    out = np.random.default_rng(1).normal(size=(*spec.q.shape[:3], spec.v.shape[3]))
    out = jnp.asarray(out, spec.v.dtype)
    with interpret():
        padded = jnp.pad(jnp.float32(lse), ((0, 0), (0, 0), (0, -num_queries % 64)), constant_values=MASKED_LOGIT)
        inputs = visibility.kernel_inputs(extras, 64, 64)
        actual = attention_mean.fill_in_means(spec, out, padded, v, inputs)
        return np.float32(out), np.float32(actual), is_blind


@pytest.mark.sampled(one_in=10)
@pytest.mark.one_version
@pytest.mark.parametrize("value_dim", [64, 96])
@pytest.mark.parametrize(
    ("rules", "extras"),
    [
        (dict(key_lengths=True), dict(key_lengths=[0, 5, -1])),
        (dict(key_lengths=True, window=(10, None)), dict(key_lengths=[600, 5, 100])),
        (dict(key_lengths=True, query_lengths=True), dict(query_lengths=[200, 90, 130], key_lengths=[0, 0, 9])),
        (dict(window=(3, None), query_offset=True), dict(query_offset=500)),
        (
            dict(segments=True),
            dict(
                query_segments=np.arange(600).reshape(3, 200) // 50, key_segments=np.arange(1800).reshape(3, 600) // 300
            ),
        ),
    ],
    ids=["lengths", "window", "padding", "shard", "segments"],
)
def test_queries_that_see_no_key_get_means(value_dim: int, rules: dict[str, Any], extras: dict[str, Any]) -> None:
    """Other queries do not."""
    spec = make_spec(200, 600, heads=(4, 2), dims=(64, value_dim), batch=3, **rules)
    out, actual, is_blind = filled_in(spec, extras)
    assert is_blind.any()
    assert not is_blind.all()
    mean = np.repeat(np.float64(random_operands(spec)[2]).mean(1), 2, axis=1)
    expected = np.where(is_blind[:, :, None, None], mean[:, None], out)
    np.testing.assert_allclose(actual, expected, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(actual[~is_blind], out[~is_blind])


@pytest.mark.parametrize("poison", [np.nan, -np.inf], ids=str)
def test_means_take_padding_that_is_not_finite_for_zero(poison: float) -> None:
    """As the reference does; a NaN among the keys stays one."""
    spec = make_spec(200, 600, window=(10, None), key_lengths=True)
    extras, v = dict(key_lengths=[100]), random_operands(spec)[2]
    padded, zeros = v.copy(), v.copy()
    padded[:, 100::7], zeros[:, 100::7] = poison, 0
    padded[..., 3, 0, 5] = zeros[..., 3, 0, 5] = np.nan
    _, actual, is_blind = filled_in(spec, extras, padded)
    _, expected, _ = filled_in(spec, extras, zeros)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.isnan(actual[is_blind]).any(axis=(0, 1)), np.arange(64) == 5)


_MEAN_WAITS = ["values", "an output"]


@pytest.mark.parametrize("missing", range(len(_MEAN_WAITS)), ids=_MEAN_WAITS)
def test_a_missing_wait_of_the_mean_is_noticed(missing: int) -> None:
    with missing_wait(missing, _MEAN_WAITS), interpret(deadlock_after=3.0):
        filled_in(make_spec(200, 600, key_lengths=True, window=(10, None)), dict(key_lengths=[100]))


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("rules", "poisoned", "clean"),
    [
        (dict(causal=True), slice(128, 264), slice(0, 128)),
        (dict(window=(60, None)), slice(0, 64), slice(128, 264)),
        (dict(window=(10, 60)), slice(192, 264), slice(0, 128)),
    ],
    ids=["causal", "window", "both sides"],
)
def test_consumers_do_not_visit_blocks_that_only_others_queries_see(
    rules: dict[str, Any], poisoned: slice, clean: slice
) -> None:
    config = dataclasses.replace(FORWARD, num_consumers=3, bridge=False)
    spec = make_spec(264, 264, **rules)
    out, _ = forward(spec, *_poisoned(spec, poisoned), config=config)
    assert np.isfinite(out[:, clean].astype(np.float32)).all()


@pytest.mark.sampled(one_in=6)
@pytest.mark.one_version
@pytest.mark.parametrize("queries", [128, 130, 200])
def test_consumers_without_queries_have_blocks_among_the_items(queries: int) -> None:
    """Otherwise they would wait for blocks that are never loaded."""
    config = dataclasses.replace(FORWARD, num_consumers=3, bridge=False)
    check(make_spec(queries, 328, window=(0, 0)), config, None)


@pytest.mark.thorough
@pytest.mark.one_version
@pytest.mark.parametrize("length", [64, 128, 100])
def test_consumers_that_see_nothing_have_blocks_among_the_items(length: int) -> None:
    """Those of queries beyond the keys, beside some that see the last ones; or of other segments than the item's."""
    config = dataclasses.replace(FORWARD, num_consumers=3, bridge=False)
    check(make_spec(400, 400, window=(70, None), key_lengths=True), config, None, key_lengths=[length])
    ids = np.minimum(np.arange(400), length)[None] // 64
    spec = make_spec(400, 400, window=(30, 30), segments=True)
    check(spec, config, None, query_segments=ids[:, ::-1], key_segments=ids)


@pytest.mark.one_version
@pytest.mark.sampled(one_in=20)
@pytest.mark.parametrize("schedule", [dict(), dict(num_stages=3), dict(num_consumers=3), dict(block_kv=128)], ids=str)
@pytest.mark.parametrize(
    "rules",
    [
        dict(window=(70, None)),
        dict(window=(70, 40), segments=True),
        dict(causal=True, query_lengths=True, key_lengths=True),
        dict(causal=True, query_offset=True, window=(3, None)),
        dict(window=(40, 30), key_lengths=True),
        dict(window=(3, 0), query_lengths=True),
    ],
    ids=str,
)
def test_masks_with_consumers_that_pass_over_blocks(rules: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Several items of a CTA, each consumer with blocks of its own, some queries without any key."""
    given = dict(query_lengths=[300, 70], key_lengths=[270, 0], query_offset=60)
    ids = documents(2, 328, 90)
    given |= dict(query_segments=ids, key_segments=ids)
    spec = make_spec(328, 328, batch=2, **rules)
    config = dataclasses.replace(FORWARD, bridge=False, **schedule)
    check(spec, config, None, **{name: given[name] for name in spec.extra_names})


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
@pytest.mark.parametrize("window", [None, *WINDOWS], ids=str)
def test_ranges_are_what_the_masks_say(window: tuple[int | None, int | None] | None, causal: bool) -> None:
    """Ranges of queries for keys and of keys for queries, with numbers and with traced values."""
    num_queries, num_keys, block_q, block_kv = 130, 170, 32, 16
    spec = make_spec(num_queries, num_keys, window=window, causal=causal)
    sees = _sees(spec, np.arange(num_queries)[:, None], np.arange(num_keys))
    inside = lambda indices, span: (indices >= int(span[0])) & (indices < int(span[1]))
    queries, keys = np.arange(num_queries), np.arange(num_keys)
    for number in (int, jnp.int32):
        for start in range(0, num_queries, block_q):
            rows = sees[start : start + block_q]
            ends = number(start), number(min(start + block_q, num_queries))
            seen = visibility.keys_seen_by_any(spec, *ends, number(num_keys))
            np.testing.assert_array_equal(inside(keys, seen), rows.any(0))
            seen = visibility.keys_seen_by_all(spec, *ends, number(num_keys))
            np.testing.assert_array_equal(inside(keys, seen), rows.all(0))
        for start in range(0, num_keys, block_kv):
            columns = sees[:, start : start + block_kv]
            ends = number(start), number(min(start + block_kv, num_keys))
            of_queries = number(0), number(num_queries)
            seeing = visibility.queries_that_see_any(spec, *ends, *of_queries)
            np.testing.assert_array_equal(inside(queries, seeing), columns.any(1))
            seeing = visibility.queries_that_see_all(spec, *ends, *of_queries)
            np.testing.assert_array_equal(inside(queries, seeing), columns.all(1))
        assert visibility.blocks_of(number(17), number(33), 16) == (1, 3)
        assert visibility.blocks_within(number(17), number(63), 16) == (2, 3)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("name", SEGMENTS)
def test_segment_blocks_leave_no_key_out(name: str) -> None:
    query_ids, key_ids = (np.int32(ids) for ids in SEGMENTS[name])
    (batch, num_queries), num_keys = query_ids.shape, key_ids.shape[1]
    spec = make_spec(num_queries, num_keys, batch=batch, segments=True)
    extras = dict(query_segments=jnp.asarray(query_ids), key_segments=jnp.asarray(key_ids))
    table = np.asarray(visibility.segment_key_blocks(spec, 128, 64, extras))
    same = query_ids[:, :, None] == key_ids[:, None]
    for b, q in np.ndindex(table.shape[:2]):
        first, end, first_of_one, end_of_one = table[b, q]
        rows = same[b, q * 128 : (q + 1) * 128]
        assert not rows[:, : first * 64].any()
        assert not rows[:, end * 64 :].any()
        assert rows[:, first_of_one * 64 : end_of_one * 64].all()
        if name in ("packed", "aligned", "one"):  # Nothing is visited in vain.
            assert rows[:, first * 64 : first * 64 + 64].any()
            assert rows[:, end * 64 - 64 : end * 64].any()
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
    assert np.isfinite(lse[..., 256:384]).all()
    # The 64 queries from 320 on see all of the blocks from 128 to 320: the first key that all of them see is 83.
    logits = np.einsum("tnh,skh->nts", *(x[0].astype(np.float32) for x in (q[:, 320:384], k[:, 128:320])))
    np.testing.assert_allclose(lse[0, :, 320:384], np.log(np.exp(logits * spec.scale).sum(-1)), rtol=1e-3)


#: Every wait that the forward kernel's warpgroups have, in the order in which it is traced; turns are no condition.
_WAITS = ["keys free", "consumer 0's queries free", "consumer 1's queries free", "next keys free", "values free"]
_WAITS += ["last values free", "first queries", "first keys", "first values", "masked keys", "masked values", "keys"]
_WAITS += ["values", "next item's queries", "next item's keys", "next item's values"]


def run_forward(spec: AttentionSpec, config: attention_forward.Config, *extras: Any) -> None:
    with interpret(deadlock_after=3.0):
        attention_forward.run(spec, config, *map(jnp.asarray, (*random_operands(spec), *extras)))


@pytest.mark.sampled(one_in=12)
@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_WAITS)), ids=_WAITS)
def test_a_missing_wait_of_the_forward_kernel_is_noticed(missing: int) -> None:
    with missing_wait(missing, _WAITS):
        run_forward(make_spec(264, 264, causal=True), FORWARD)


_WALK = [f"{loop} {what}" for loop in ("masked", "middle", "last masked") for what in ("keys", "values")]
_WAITS_WITH_EDGES = [*_WAITS[:3], "number free", "next keys free", "edge values free", "values free"]
_WAITS_WITH_EDGES += ["last edge values free", *_WAITS[5:9], "number", *_WALK, *_WAITS[-3:]]


@pytest.mark.sampled(one_in=24)
@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_WAITS_WITH_EDGES)), ids=_WAITS_WITH_EDGES)
def test_a_missing_wait_beside_masks_is_noticed(missing: int) -> None:
    # The last queries see nothing but the block in which the keys end; those of six heads come one after the other.
    spec = make_spec(264, 264, heads=(6, 1), window=(0, 130), key_lengths=True)
    with missing_wait(missing, _WAITS_WITH_EDGES):
        run_forward(spec, FORWARD, np.int32([264]))


_WAITS_WITHOUT_BRIDGE = [*_WAITS[:6], "skipped keys", "skipped values", *_WAITS[6:9], *_WALK]
_WAITS_WITHOUT_BRIDGE += ["last skipped keys", "last skipped values"]


@pytest.mark.sampled(one_in=24)
@pytest.mark.one_version
@pytest.mark.parametrize("missing", range(len(_WAITS_WITHOUT_BRIDGE)), ids=_WAITS_WITHOUT_BRIDGE)
def test_a_missing_wait_without_a_bridge_is_noticed(missing: int) -> None:
    config = dataclasses.replace(FORWARD, bridge=False, num_consumers=2)
    with missing_wait(missing, _WAITS_WITHOUT_BRIDGE):
        run_forward(make_spec(456, 456, heads=(6, 1), window=(130, 120)), config)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("missing", ["commit_smem", "wait_smem_to_gmem"])
def test_a_missing_fence_of_the_forward_kernel_is_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, missing, lambda *args, **kwargs: None)
    with pytest.raises((RaceError, ValueError), match=r"is not ordered|Not all copy_smem_to_gmem"):
        run_forward(make_spec(264, 264, causal=True), FORWARD)


@pytest.mark.sampled(one_in=6)
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("missing", "config"),
    [
        ("commit_smem", FUSED[64]),
        ("wait_smem_to_gmem", FUSED[64]),
        ("commit_smem", TWO_KERNELS),
        ("commit_smem", WIDE),
        ("wait_smem_to_gmem", TWO_KERNELS),
    ],
    ids=["commit, fused", "wait, fused", "commit", "commit, split", "final wait"],
)
def test_a_missing_fence_of_the_backward_kernels_is_noticed(
    missing: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(264, 264, causal=True)
    monkeypatch.setattr(plgpu, missing, lambda *args, **kwargs: None)
    unfinished = (RaceError, ValueError)  # ValueError: the kernel ended with stores in flight.
    with pytest.raises(unfinished, match=r"is not ordered|Not all copy_smem_to_gmem"):
        run_backward(spec, config)


def test_an_output_read_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plgpu.wgmma_accumulator_load
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", lambda ref, *, wait_n: load(ref, wait_n=1))
    with pytest.raises(ValueError, match="an accumulator is read while a wgmma that adds to it is in flight"):
        run_forward(make_spec(136, 136), FORWARD)


_BIAS, _MASK = ArrayType((1, 2, 8, 8), jnp.dtype("float32")), ArrayType((1, 1, 8, 8), jnp.dtype("bool"))


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (dict(bias=_BIAS), "does not handle a bias yet"),
        (
            dict(mask=_MASK),
            "does not handle a dense mask yet; is_causal, a window, lengths or segments are fast in its place",
        ),
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
    message = "attention_backward[pallas]: backward_two_kernels does not handle a local window, segment ids."
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        attention_backward.run(spec, TWO_KERNELS, *[jnp.zeros((1, 8, 2, 64))] * 9)
    for deterministic in (False, True):
        wider = make_spec(8, 8, dims=(128, 128), window=(3, 0), deterministic=deterministic)
        for configs in (attention_backward.shortlist(wider), attention_backward.search_space(wider)):
            assert {type(config) for config in configs} == {attention_backward_fused.Config}


@pytest.mark.one_version
def test_designs_have_limits_of_their_own() -> None:
    reasons = lambda dims: [design.unsupported(make_spec(8, 8, dims=dims)) for design in attention_backward.designs]
    assert reasons((128, 128)) == [None, None, None]
    assert reasons((192, 64)) == ["has registers for head dimensions up to 128, got 192 and 64", None, None]
    assert reasons((200, 128)) == [
        "has registers for head dimensions up to 128, got 200 and 128",
        "has registers for head dimensions that sum up to 256, got 256 and 128 with padding",
        None,
    ]
    too_wide = ["handles head dimensions up to 256, got 288 and 64"] * 3
    assert reasons((288, 64)) == too_wide
    assert attention_backward.unsupported(make_spec(8, 8, dims=(288, 64))) == too_wide[0]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("backward", [TWO_KERNELS, WIDE, FUSED[64]], ids=["two kernels", "split", "fused"])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_groups_in_parts(num_parts: int, backward: Any) -> None:
    spec = make_spec(72, 136, heads=(8, 2), batch=2, causal=True)
    check_backward(spec, dataclasses.replace(backward, group_parts=num_parts))


@pytest.mark.one_version
def test_groups_in_parts_of_equal_size() -> None:
    spec, config = make_spec(8, 8, heads=(6, 2)), dataclasses.replace(TWO_KERNELS, group_parts=2)
    message = "attention_backward[pallas]: group_parts must divide the 3 query heads of a key head; got "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}2\\.$"):
        attention_backward.run(spec, config, *[jnp.zeros((1, 8, 6, 64))] * 7)


@pytest.mark.one_version
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_all_sms_have_something_to_do_in_the_backward_pass(dim: int) -> None:
    def num_parts(batch: int, length: int, heads: tuple[int, int], causal: bool) -> int:
        spec = _planned_spec(heads, length=length, dim=dim, batch=batch, causal=causal)
        assert {config.group_parts for config in attention_backward.search_space(spec)} <= {1, 2, 4, 8}
        (config,) = list(attention_backward.shortlist(spec))
        return config.group_parts

    assert num_parts(1, 2048, (8, 1), True) == 8
    assert num_parts(1, 8192, (8, 1), True) == {64: 4, 128: 4, 256: 2}[dim]
    assert num_parts(1, 4096, (16, 2), False) == {64: 2, 128: 2, 256: 1}[dim]
    assert (
        num_parts(4, 4096, (16, 2), True) == num_parts(1, 16384, (16, 2), False) == num_parts(1, 99, (4, 4), True) == 1
    )


def test_refuses_what_has_no_kernel_shape() -> None:
    spec = make_spec(8, 8)
    assert attention_forward.unsupported(dataclasses.replace(spec, scale=-1.0)) == "needs a positive scale, got -1.0"
    assert attention_forward.unsupported(make_spec(8, 8, soft_cap=1e5)) == (
        "soft_cap must be at most 1000: the kernel's tanh resolves 2^-21 of the cap; got 100000"
    )
    assert attention_forward.unsupported(make_spec(0, 8)) == "has no work in an empty attention"
    for lengths in ((2**31, 8), (8, 2**28 + 1)):
        assert attention_forward.unsupported(make_spec(*lengths)) == (
            f"needs at most 268435456 queries and keys, got {max(lengths)}"
        )
    assert attention_forward.unsupported(make_spec(2**28, 2**28)) is None
    ampere = dataclasses.replace(spec, target=hardware.lookup("NVIDIA A100-SXM4-80GB"))
    assert attention_forward.unsupported(ampere) == (
        "needs a GPU of compute capability 9.0 (Hopper), the target is NVIDIA A100-SXM4-80GB (compute capability 8.0)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: attention_forward.Config(block_kv=32),
            "attention_forward[pallas]: block_kv must be 64 or 128; got Config(block_kv=32, num_stages=2, bridge=True, "
            "num_consumers=2, head_multiple=64, multicast=False, lazy_rescale=True).",
        ),
        (
            lambda: attention_forward.Config(num_stages=1),
            "attention_forward[pallas]: num_stages must be at least 2; "
            "got Config(block_kv=128, num_stages=1, bridge=True, "
            "num_consumers=2, head_multiple=64, multicast=False, lazy_rescale=True).",
        ),
        (
            lambda: attention_forward.Config(num_consumers=4),
            "attention_forward[pallas]: num_consumers must be 2 or 3; "
            "got Config(block_kv=128, num_stages=2, bridge=True, "
            "num_consumers=4, head_multiple=64, multicast=False, lazy_rescale=True).",
        ),
        (
            lambda: attention_backward_two_kernels.Config(dq_num_stages=0),
            "attention_backward[pallas]: block sizes must be positive multiples of 64, stages and group_parts at least "
            "1; got Config(dq_block_kv=64, dq_num_stages=0, dkv_block_q=64, dkv_num_stages=2, head_multiple=64, "
            "group_parts=1).",
        ),
        (
            lambda: attention_backward_fused.Config(num_stages=1),
            "attention_backward[pallas]: block_q must be a positive multiple of 64, num_stages at least 2 and "
            "group_parts at least 1; got Config(block_q=64, num_stages=1, head_multiple=64, group_parts=1, "
            "stores_first=False).",
        ),
        (
            lambda: attention_backward_fused.Config(head_multiple=16),
            "attention_backward[pallas]: head_multiple must be 64 or 32; got Config(block_q=64, num_stages=2, "
            "head_multiple=16, group_parts=1, stores_first=False).",
        ),
        (
            lambda: attention_backward_wide.Config(group_parts=0),
            "attention_backward[pallas]: dq_num_stages and dkv_num_stages must be at least 2 and group_parts at least "
            "1; got Config(dq_num_stages=3, dkv_num_stages=2, multicast=True, ping_pong=True, group_parts=0).",
        ),
    ],
    ids=["block", "one slot", "consumers", "two kernels", "fused, one stage", "fused, padding", "wide"],
)
def test_configs_refuse_what_cannot_run(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.sampled(one_in=8)
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("dim", "config"),
    [(64, TWO_KERNELS), (64, FUSED[64]), (128, FUSED[128]), (256, WIDE)],
    ids=["two kernels", "fused", "fused 128", "split"],
)
def test_float16_gradients_overflow_no_earlier_than_the_reference(dim: int, config: Any) -> None:
    """As losses that are scaled for float16 have them; dS itself is beyond 65504."""
    spec = make_spec(72, 72, dims=(dim, dim), dtype="float16", causal=True)
    q, k, v = map(jnp.asarray, random_operands(spec))
    dout, dlse = map(jnp.asarray, random_cotangents(spec))
    dout *= 30000 / jnp.abs(dout).max()
    out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v)
    expected = xla_backward.run(spec, xla_backward.Config(), q, k, v, out, lse, dout, dlse)
    with interpret():
        actual = attention_backward.run(spec, config, q, k, v, out, lse, dout, dlse)
        actual = [np.asarray(x, np.float32) for x in actual]
    for x, y in zip(actual, expected, strict=True):
        assert np.isfinite(y).all()
        assert np.isfinite(x).all()


@pytest.mark.gpu
@pytest.mark.parametrize("design", [attention_backward_fused, attention_backward_two_kernels], ids=dispatch.name_of)
@pytest.mark.parametrize("dims", [(96, 96), (80, 80), (96, 128), (64, 96), (24, 24)], ids=str)
def test_head_dimensions_padded_to_multiples_of_32_on_the_chip(dims: tuple[int, int], design: Any) -> None:
    """Zeros that are not there change nothing: the results have the same bits.

    Also of delta, which XLA sums up in an order of its choice: of multiples of 1/256 that needs no rounding.
    """
    spec = make_spec(1000, 968, heads=(8, 4), dims=dims, batch=2, causal=True, deterministic=True)
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    operands, cotangents = random_operands(spec), random_cotangents(spec)

    def results(multiple: int) -> list[np.ndarray]:
        forward = attention_forward.Config(head_multiple=multiple)
        backward = design.Config(head_multiple=multiple)

        def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
            out, lse = attention_forward.run(spec, forward, q, k, v)
            rounded = [(jnp.round(x.astype(jnp.float32) * 16) / 16).astype(x.dtype) for x in (out, dout)]
            grads = design.run(spec, backward, q, k, v, rounded[0], lse, rounded[1], dlse)
            return out, lse, *grads

        return [np.asarray(x) for x in jax.jit(run)(*operands, *cotangents)]

    for actual, expected in zip(results(32), results(64), strict=True):
        assert np.isfinite(np.float32(expected)).all()
        assert actual.tobytes() == expected.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("dim", "lengths", "batch"),
    [(128, (512, 512), 32), (128, (1000, 968), 3), (64, (4096, 4096), 2), (96, (520, 520), 9), (128, (4096, 100), 1)],
)
def test_the_first_block_of_keys_stores_on_the_chip(
    dim: int, lengths: tuple[int, int], batch: int, causal: bool
) -> None:
    """200 runs: no block of dQ's sum is added to before it is stored, whichever values were there."""
    spec = make_spec(*lengths, heads=(8, 8), dims=(dim, dim), batch=batch, causal=causal)
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    (config,) = attention_backward_fused.shortlist(spec)
    q, k, v = random_operands(spec)
    out, lse = jax.jit(functools.partial(attention_forward.run, spec, attention_forward.Config()))(q, k, v)
    operands = (q, k, v, out, lse, *random_cotangents(spec))

    def compiled(*, stores_first: bool) -> Any:
        changed = dataclasses.replace(config, stores_first=stores_first)
        return jax.jit(functools.partial(attention_backward.run, spec, changed)).lower(*operands).compile()

    @jax.jit
    def is_right(actual: Any, expected: Any) -> jax.Array:
        dq = expected[0].astype(jnp.float32)
        error = jnp.abs(actual[0].astype(jnp.float32) - dq).max()
        agree = [(x == y).all() for x, y in zip(actual[1:], expected[1:], strict=True)]
        return jnp.stack(
            [*agree, error <= 2**-8 * jnp.abs(dq).max()]
        ).all()  # Two roundings to 16 bits, of the largest.

    expected, stores_first = compiled(stores_first=False)(*operands), compiled(stores_first=True)
    assert jnp.stack([is_right(stores_first(*operands), expected) for _ in range(200)]).all()


_SANITIZED = """
import dataclasses, functools
from interpreted_attention import make_spec
from jaxkernels.core import dispatch
from jaxkernels.pallas.attention import backward_fused, backward_two_kernels
from jaxkernels.pallas.attention import forward as attention_forward

attention_backward = dispatch.load("attention_backward", "pallas")

def operands(dim, heads=(4, 2), **rules):
    spec = make_spec(200, 136, heads=heads, dims=(dim, dim), batch=2, causal=True, **rules)
    return spec, *(jnp.ones(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v))

def compiled(kernel, spec, config=None):
    # One by one, the operations of XLA beside the kernel would be more modules to patch.
    config = config or next(iter(kernel.shortlist(spec)))
    return jax.jit(functools.partial(kernel.run, spec, config))

def forward(dim):
    spec, *arrays = operands(dim)
    return compiled(attention_forward, spec)(*arrays)

rules = dict(window=(90, None), query_lengths=True, key_lengths=True, segments=True, soft_cap=20.0)
extras = [jnp.array(lengths, jnp.int32) for lengths in ([200, 90], [136, 70])]
extras += [jnp.array(np.arange(2 * n).reshape(2, n) // 50, jnp.int32) for n in (200, 136)]

def documents(dim):
    spec, *arrays = operands(dim, **rules)
    return compiled(attention_forward, spec)(*arrays, *extras)

def backward_documents(dim):
    return backward(dim, extras, **rules)

def first_stores(dim):
    return backward(dim, config=fused(dim, stores_first=True), heads=(2, 2))

# Above head dimension 128 everything is.
def in_order(dim):
    return backward(dim, config=fused(dim), deterministic=True)

def in_order_documents(dim):
    return backward(dim, extras, deterministic=True, **rules)

def two_kernels(dim):
    return backward(dim, config=backward_two_kernels.Config(), deterministic=True)

def fused(dim, **changes):
    return backward_fused.Config(block_q=128 if dim == 64 else 64, **changes)

def backward(dim, extras=(), config=None, **rules):
    spec, q, k, v = operands(dim, **rules)
    lse = jnp.ones((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return compiled(attention_backward, spec, config)(q, k, v, *extras, q, lse, q, lse)

runs = (forward, documents, backward, backward_documents, first_stores, in_order, in_order_documents, two_kernels)
steps = {f"{run.__name__} {dim}": functools.partial(run, dim) for run in runs for dim in (64, 128, 256)}
"""
_RUNS = ("forward", "documents", "backward", "backward_documents")
_STEPS = [f"{run} {dim}" for run in _RUNS for dim in (64, 128, 256)]
_FUSED_RUNS = ("first_stores", "in_order", "in_order_documents", "two_kernels")
_STEPS += [f"{run} {dim}" for run in _FUSED_RUNS for dim in (64, 128)]


@pytest.mark.gpu
@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, step: str) -> None:
    names = (step,) if tool == "memcheck" else ("planted", step)
    sanitizer.assert_finds_nothing_else(tool, _SANITIZED, names)
