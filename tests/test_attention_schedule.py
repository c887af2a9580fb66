"""The forward kernel's schedule: what it loads, visits, masks and stores, simulated on thousands of random cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from interpreted_attention import make_spec
from simulated_forward import Case, Simulation

from jaxkernels.pallas import attention_forward
from jaxkernels.specs import AttentionSpec


def near_a_block(rng: np.random.Generator, most: int) -> int:
    """A multiple of 64, one less or one more: there blocks are visited or masked that one key or query needs."""
    return max(0, int(rng.integers(most // 64 + 1)) * 64 + int(rng.integers(-1, 2)))


def random_case(rng: np.random.Generator) -> Case:
    pick = lambda *values: values[rng.integers(len(values))]
    chance = lambda probability: bool(rng.random() < probability)
    length = lambda: int(pick(rng.integers(1, 30), rng.integers(30, 200), rng.integers(100, 700)))
    side = lambda: pick(None, 0, *rng.integers(0, (30, 900)).tolist(), near_a_block(rng, 600))
    window = None if chance(0.3) else (side(), side())
    batch, num_queries, value_dim = int(rng.integers(1, 4)), length(), pick(64, 64, 128, 96)
    spec = make_spec(
        num_queries,
        pick(num_queries, length(), length()),
        heads=pick((1, 1), (2, 1), (3, 1), (4, 2), (2, 2)),
        dims=(64, value_dim),
        batch=batch,
        causal=chance(0.5),
        window=None if window == (None, None) else window,
        query_lengths=chance(0.35),
        key_lengths=chance(0.4),
        segments=chance(0.3),
        query_offset=chance(0.3),
    )
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=int(rng.integers(1, 5))))
    while True:
        config = attention_forward.Config(
            block_q=pick(64, 128),
            block_kv=pick(64, 128, 192),
            num_stages=pick(2, 3, 4),
            num_q_slots=pick(1, 2),
            bridge=chance(0.5),
            num_consumers=pick(2, 3),
            head_multiple=32 if value_dim == 96 else 64,
            lazy_rescale=chance(0.5),
        )
        if attention_forward._num_store_slots(spec, config) > 0:
            return Case(spec, config, random_integers(spec, rng))


def random_integers(spec: AttentionSpec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The optional operands: also lengths that are negative or too large, and offsets near overflow."""
    pick = lambda *values: values[rng.integers(len(values))]
    (batch, num_queries), num_keys = spec.q.shape[:2], spec.k.shape[1]
    some = 0, 2**30, *rng.integers(0, (50, 800)), near_a_block(rng, 600), max(0, num_keys - num_queries)
    offset = pick(*some) if spec.query_offset else 0

    def lengths(n: int) -> list[int]:
        return [pick(0, -3, 1, n, n + 70, rng.integers(n + 1), near_a_block(rng, n)) for _ in range(batch)]

    def ids(n: int) -> np.ndarray:
        documents = np.cumsum(rng.random((batch, n)) < 1 / rng.integers(2, 150), axis=1)
        blocks = np.arange(n)[None].repeat(batch, 0) // pick(64, 100, 128)
        extreme = np.where(documents % 2, 2**31 - 1, -(2**31))
        return pick(documents, blocks, blocks[:, ::-1] % 3, extreme, rng.integers(-2, 3, (batch, n)))

    queries, keys = ids(num_queries), ids(num_keys)
    values = dict(
        query_offset=offset,
        query_lengths=[n + pick(0, offset, offset, offset) for n in lengths(num_queries)],
        key_lengths=lengths(num_keys),
        query_segments=queries,
        key_segments=pick(queries, keys) if num_queries == num_keys else keys,
    )
    return {name: np.asarray(values[name], np.int32) for name in spec.extra_names}


def check(simulation: Simulation, seeds: Iterable[int]) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        simulation.check(random_case(rng), rng)


@pytest.mark.sampled
@pytest.mark.one_version
@pytest.mark.parametrize("first_seed", range(0, 2000, 20))
def test_random_cases(first_seed: int) -> None:
    check(Simulation(), range(first_seed, first_seed + 20))


#: Of a planted bug: a text of the source, what stands there instead, how that is noticed, and seeds of small cases in
#: which it is. One suffices; the others are for when `random_case` changes.
BUGS = {
    "blocks beyond the item's": (
        "first_block = jnp.clip(own_first, first_block, end_block - 1)\n"
        "                end_block = jnp.clip(own_end, first_block + 1, end_block)",
        "first_block, end_block = own_first, own_end",
        "once too often|deadlock",
        (155, 192, 258),
    ),
    "queries' release": ("when(block == item.first_block)", "when(block == 0)", "q is waited for again", (37, 99, 123)),
    "no skip at the end": ("if skips_blocks and look_back is not None:", "if False:", "deadlock|over", (62, 115, 183)),
    "unmasked too soon": ("(item.end_block - end, 1,", "(item.end_block - end - 1, 1,", "wrong pairs", (99, 217, 378)),
    "unmasked too long": ("(item.end_block - first,", "(item.end_block - first + 1,", "wrong pairs", (101, 166, 99)),
    "edge block": ("lax.div(item.key_end,", "lax.div(item.key_end - 1,", "the edge's values", (147, 108, 599)),
    "a key too few": (
        "(query_end + right, key_end)",
        "(query_end + right - 1, key_end)",
        "left out",
        (535, 1325, 1793),
    ),
}


@pytest.mark.one_version
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str) -> None:
    text, broken, noticed, seeds = BUGS[bug]
    simulation = Simulation((text, broken))
    with pytest.raises(AssertionError, match=noticed):
        check(simulation, seeds)


def test_a_bug_must_have_its_place_in_the_source() -> None:
    with pytest.raises(ValueError, match="is 0 times in the source, not once: no such text"):
        Simulation(("no such text", ""))
