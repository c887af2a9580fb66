"""The work items of attention kernels, and how they are assigned to CTAs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    blocks_of,
    hides_by_causality_alone,
    keys_seen_by_any,
    queries_that_see_any,
)

__all__ = [
    "alternates",
    "backward_plan",
    "backward_steps",
    "balanced_plan",
    "forward_plan",
    "forward_steps",
    "in_sets",
    "longest_cta",
    "num_even_ctas",
    "numbered",
    "too_few_queries",
    "visible_pairs",
]

#: With so few queries, a kernel that divides the keys among SMs is faster. One query took 3 to 9 times as long as with
#: Triton in every row of attention-decode (H200, 2026-11-25).
_FEW_QUERIES = 16


def too_few_queries(spec: AttentionSpec) -> str | None:
    """Why a forward pass that does not divide the keys among SMs is slow, or None: few SMs have work."""
    if spec.q.shape[1] > _FEW_QUERIES:
        return None
    return f"does not divide the keys among SMs, which {spec.q.shape[1]} queries need: others are faster"


#: In the backward pass, the order by length is used if the last CTA would otherwise take longer by this factor.
_MOST_IDLE = 1.05
#: The largest number of streams (heads of batch elements) that are processed side by side: with lengths, segments or a
#: window; and if blocks add in order, so that the last ones are few steps behind.
_STREAMS = 8
_STREAMS_IN_ORDER = 16


def visible_pairs(spec: AttentionSpec) -> float:
    """The share of (query, key) pairs that a kernel visits: about half with a causal mask, else all."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    if not spec.causal:
        return 1.0
    seen = num_queries * (num_queries + 1) / 2
    if num_queries > num_keys:
        seen -= (num_queries - num_keys) * (num_queries - num_keys + 1) / 2
    return seen / (num_queries * num_keys)


def num_even_ctas(durations: Collection[float], num_ctas: int) -> int:
    """The number of CTAs, at most `num_ctas`. For equal items: the smallest that needs the same number of waves.

    Example: 2048 items on 132 SMs take 16 waves, and so do 128 CTAs with 16 items each. The 128 CTAs begin the same
    sets of heads together, and share their blocks in L2.
    """
    num_ctas = min(len(durations), num_ctas)
    if len(set(durations)) == 1:
        num_ctas = -(-len(durations) // -(-len(durations) // num_ctas))
    return num_ctas


def balanced_plan(
    items: Sequence[tuple[int, float]], num_ctas: int, ctas: Callable[[int], range] | None = None
) -> tuple[np.ndarray, float]:
    """Assigns each item, in order, to the CTA with the least work so far.

    Args:
      items: numbers and durations, in the order in which they are started.
      num_ctas: the largest number of CTAs (see `num_even_ctas`).
      ctas: number of an item -> the CTAs that may take it. Items that only one CTA may take count as its work from the
        beginning.

    Returns:
      A row for each CTA: the number of its items, their numbers, and padding (at least one entry, for the prefetch past
      the last item); and the duration of the longest CTA.
    """
    num_ctas = num_even_ctas([duration for _, duration in items], num_ctas)
    loads, taken = np.zeros(num_ctas), [list[int]() for _ in range(num_ctas)]
    choices = [ctas(number) if ctas else range(num_ctas) for number, _ in items]
    for (_, duration), choice in zip(items, choices):
        if len(choice) == 1:
            loads[choice[0]] += duration
    for (number, duration), choice in zip(items, choices):
        cta = choice[int(np.argmin(loads[choice.start : choice.stop]))]
        if len(choice) > 1:
            loads[cta] += duration
        taken[cta].append(number)
    plan = np.zeros((num_ctas, 2 + max(map(len, taken))), np.int32)
    for row, numbers in zip(plan, taken):
        row[: 1 + len(numbers)] = len(numbers), *numbers
    return plan, float(loads.max())


def longest_cta(steps: Sequence[int], num_streams: int, num_ctas: int, item_steps: float) -> float:
    """The steps of the busiest CTA, for cost models.

    Args:
      steps: of each block of a stream.
      num_streams: streams with such blocks.
      num_ctas: the number of CTAs.
      item_steps: what an item costs beside its steps, in steps.
    """
    items = num_streams * len(steps)
    if min(steps) == max(steps):
        return (steps[0] + item_steps) * -(-items // num_ctas)
    return max(*steps, (sum(steps) / len(steps) + item_steps) * items / num_ctas)


@functools.lru_cache(maxsize=4096)
def forward_steps(spec: AttentionSpec, rows: int, block_kv: int) -> tuple[int, ...]:
    """For each block of `rows` queries: how many blocks of keys it visits, lengths and segments aside."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    offset = spec.planned_offset
    steps = []
    for start in range(offset, offset + num_queries, rows):
        first, end = blocks_of(*keys_seen_by_any(spec, start, start + rows, num_keys), block_kv)
        steps.append(max(end - first, 1))
    return tuple(steps)


def forward_plan(spec: AttentionSpec, steps: Sequence[int], num_workers: int, item_steps: float) -> np.ndarray:
    """The items of each worker (`balanced_plan`). An item's number is head * num_q_blocks + q_block, heads of all batch
    elements counted.

    Heads follow each other, so that workers share keys in L2. Each head's longest items come first. A third of the
    blocks of queries, those that see least, come at the end: they even out what is left.

    Args:
      steps: of each block of queries (`forward_steps`).
      item_steps: what an item costs beside its steps, in steps.
    """
    heads, num_q_blocks = _heads_in_order(spec), len(steps)
    num_last = num_q_blocks // 3 if spec.causal else 0
    items = [(q, head) for head in heads for q in reversed(range(num_last, num_q_blocks))]
    items += [(q, head) for q in reversed(range(num_last)) for head in heads]
    numbered = [(head * num_q_blocks + q_block, steps[q_block] + item_steps) for q_block, head in items]
    return balanced_plan(numbered, num_workers)[0]


def _heads_in_order(spec: AttentionSpec) -> list[int]:
    """The heads of all batch elements. Those that share the bias of a head follow each other, so that its values are
    read from memory once.
    """
    batch, _, num_heads, _ = spec.q.shape
    numbers = np.arange(batch * num_heads).reshape(batch, num_heads)
    shapes = [x.shape for x in (spec.bias, spec.mask) if x is not None]
    shares = any(shape[1] > 1 for shape in shapes) and all(shape[0] == 1 for shape in shapes)
    return (numbers.T if shares else numbers).flatten().tolist()


@functools.lru_cache(maxsize=4096)
def backward_steps(spec: AttentionSpec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """For each block of keys: how many blocks of queries of a group it visits, lengths and segments aside."""
    offset = spec.planned_offset
    steps = []
    for start in range(0, spec.k.shape[1], block_kv):
        seeing = queries_that_see_any(spec, start, start + block_kv, offset, spec.q.shape[1] + offset)
        first, end = blocks_of(seeing[0] - offset, seeing[1] - offset, block_q)
        steps.append(spec.group_size * max(end - first, 0))
    return tuple(steps)


def backward_plan(
    spec: AttentionSpec, steps: Sequence[int], num_streams: int, item_steps: float, *, is_persistent: bool
) -> np.ndarray:
    """The items of each CTA of the backward pass (`balanced_plan`).

    An item is a block of keys of a stream, and a stream is a key head, or its part of a group of query heads. An item's
    number is 2 * (stream * num_kv_blocks + kv_block), plus 1 if it processes its queries from the first.

    At any time all CTAs should work on the same few blocks of queries, so that these stay in L2: items are ordered by
    streams. If too many SMs would then be idle at the end, the longest come first.

    Args:
      steps: of each block of keys (`backward_steps`).
      item_steps: what an item costs beside its steps, in steps.
      is_persistent: whether there are as many CTAs as SMs; else each item has its own.
    """
    items = numbered(_items_by_streams(spec, num_streams, len(steps)), steps, item_steps)
    if not is_persistent:
        return np.array([(1, number, 0) for number, _ in items], np.int32)
    longest_first = sorted(items, key=lambda item: -item[1])
    by_streams, by_length = (balanced_plan(order, spec.target.num_sms) for order in (items, longest_first))
    return by_streams[0] if by_streams[1] < _MOST_IDLE * by_length[1] else by_length[0]


def alternates(spec: AttentionSpec, num_kv_blocks: int) -> bool:
    """Whether some items of the backward pass process their queries from the first instead of from the last.

    With one query head a key head and up to 132 blocks of keys it gains nothing (Pallas, head dimension 128: 0.99 at
    2048 and 4096 tokens).
    """
    if not spec.causal or not hides_by_causality_alone(spec) or spec.deterministic:
        return False
    return spec.group_size > 1 or num_kv_blocks > spec.target.num_sms


def numbered(items: Iterable[tuple[int, int, int]], steps: Sequence[int], item_steps: float) -> list[tuple[int, float]]:
    """Numbers and durations, in steps, of items given as stream, block of keys and direction."""
    return [
        (2 * (stream * len(steps) + kv_block) + is_upward, steps[kv_block] + item_steps)
        for stream, kv_block, is_upward in items
    ]


def in_sets(num_streams: int, num_kv_blocks: int, at_once: int) -> list[tuple[int, int, int]]:
    """All items, from the last query: for each set of `at_once` streams the first block of keys, then the next."""
    sets, kv_blocks = itertools.batched(range(num_streams), at_once), range(num_kv_blocks)
    return [(stream, kv_block, 0) for some in sets for kv_block in kv_blocks for stream in some]


def _items_by_streams(spec: AttentionSpec, num_streams: int, num_kv_blocks: int) -> list[tuple[int, int, int]]:
    """Stream, block of keys and direction of all items, in the order in which they are started."""
    streams, kv_blocks, num_sms = range(num_streams), range(num_kv_blocks), spec.target.num_sms
    at_once = max(1, num_sms // num_kv_blocks)
    if not alternates(spec, num_kv_blocks) or num_streams * num_kv_blocks <= num_sms:
        if spec.deterministic:
            at_once = _STREAMS_IN_ORDER
        elif not hides_by_causality_alone(spec):
            at_once = _STREAMS
        return in_sets(num_streams, num_kv_blocks, at_once)
    evenly = lambda xs, most: [x.tolist() for x in np.array_split(xs, 2 * -(-len(xs) // (2 * most)))]
    if num_kv_blocks <= num_sms:
        sets = [(some, kv_blocks) for some in evenly(streams, at_once)]
    else:  # The last keys of a stream, then its first ones.
        parts = evenly(kv_blocks, num_sms)
        pairs = list(zip(reversed(parts), parts))[: len(parts) // 2]
        sets = [((stream,), part) for stream in streams for pair in pairs for part in pair]
    return [(stream, kv_block, i % 2) for i, (some, part) in enumerate(sets) for kv_block in part for stream in some]
