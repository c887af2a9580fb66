"""The work items of attention kernels, and how they are assigned to CTAs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import blocks_of, keys_seen_by_any

__all__ = ["balanced_plan", "forward_plan", "forward_steps", "num_even_ctas", "planned_offset", "visible_pairs"]


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


def planned_offset(spec: AttentionSpec) -> int:
    """The first query's position for plans and models. If queries are a part of the sequence, one in its middle."""
    return max(0, spec.k.shape[1] - spec.q.shape[1]) // 2 if spec.query_offset else 0


def forward_steps(spec: AttentionSpec, rows: int, block_kv: int) -> list[int]:
    """For each block of `rows` queries: how many blocks of keys it visits, lengths and segments aside."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    offset = planned_offset(spec)
    steps = []
    for start in range(offset, offset + num_queries, rows):
        first, end = blocks_of(*keys_seen_by_any(spec, start, start + rows, num_keys), block_kv)
        steps.append(max(end - first, 1))
    return steps


def forward_plan(spec: AttentionSpec, steps: Sequence[int], num_workers: int, item_steps: float) -> np.ndarray:
    """The items of each worker (`balanced_plan`). An item's number is head * num_q_blocks + q_block, heads of all batch
    elements counted.

    Heads follow each other, so that workers share keys in L2. Each head's longest items come first. A third of the
    blocks of queries, those that see least, come at the end: they even out what is left.

    Args:
      steps: of each block of queries (`forward_steps`).
      item_steps: what an item costs beside its steps, in steps.
    """
    heads, num_q_blocks = spec.q.shape[0] * spec.q.shape[2], len(steps)
    num_last = num_q_blocks // 3 if spec.causal else 0
    items = [(q, head) for head in range(heads) for q in reversed(range(num_last, num_q_blocks))]
    items += [(q, head) for q in reversed(range(num_last)) for head in range(heads)]
    numbered = [(head * num_q_blocks + q_block, steps[q_block] + item_steps) for q_block, head in items]
    return balanced_plan(numbered, num_workers)[0]
