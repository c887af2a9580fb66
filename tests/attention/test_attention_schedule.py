"""The attention kernels' schedules: what they load, visit, mask and store, simulated on thousands of random cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import simulated_backward
import simulated_forward
import simulated_wide
from interpreted_attention import make_spec
from simulated import Case

from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention import backward
from jaxkernels.pallas.attention import backward_fused as attention_backward_fused
from jaxkernels.pallas.attention import backward_wide as attention_backward_wide
from jaxkernels.pallas.attention import forward as attention_forward
from jaxkernels.pallas.attention.limits import least_head_multiple, padded_head_dims


def pick(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def chance(rng: np.random.Generator, probability: float) -> bool:
    return bool(rng.random() < probability)


def near_a_block(rng: np.random.Generator, most: int) -> int:
    """A multiple of 64, one less or one more: there blocks are visited or masked that one key or query needs."""
    return max(0, int(rng.integers(most // 64 + 1)) * 64 + int(rng.integers(-1, 2)))


def random_spec(
    rng: np.random.Generator,
    heads: Sequence[tuple[int, int]],
    dims: Sequence[tuple[int, int]],
    length: Callable[[], int],
    **rules: bool,
) -> AttentionSpec:
    side = lambda: pick(rng, None, 0, *rng.integers(0, (30, 900)).tolist(), near_a_block(rng, 600))
    window = None if chance(rng, 0.3) else (side(), side())
    batch, num_queries, padded = int(rng.integers(1, 4)), length(), pick(rng, *dims)
    spec = make_spec(
        num_queries,
        pick(rng, num_queries, length(), length()),
        heads=pick(rng, *heads),
        dims=padded,
        batch=batch,
        causal=chance(rng, 0.5),
        window=None if window == (None, None) else window,
        query_lengths=chance(rng, 0.35),
        key_lengths=chance(rng, 0.4),
        segments=chance(rng, 0.3),
        query_offset=chance(rng, 0.3),
        **rules,
    )
    return dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=int(rng.integers(1, 5))))


def random_forward(rng: np.random.Generator) -> Case:
    length = lambda: int(pick(rng, rng.integers(1, 30), rng.integers(30, 200), rng.integers(100, 700)))
    spec = random_spec(rng, [(1, 1), (2, 1), (3, 1), (4, 2), (2, 2)], [(64, 64), (64, 64), (64, 128), (64, 96)], length)
    while True:
        config = attention_forward.Config(
            block_kv=pick(rng, 64, 128),
            num_stages=pick(rng, 2, 3, 4),
            bridge=chance(rng, 0.5),
            num_consumers=pick(rng, 2, 3),
            head_multiple=32 if spec.v.shape[3] == 96 else 64,
            lazy_rescale=chance(rng, 0.5),
        )
        if attention_forward._sees_all(spec) and spec.target.num_sms > 1:
            config = dataclasses.replace(config, multicast=chance(rng, 0.7))
        if attention_forward._num_store_slots(spec, config) > 0:
            return Case(spec, config, random_integers(spec, rng))


def random_backward(rng: np.random.Generator) -> Case:
    """With query heads in parts of their group, too."""
    edge = lambda: max(1, near_a_block(rng, 700))
    heads, dims = [(1, 1), (2, 1), (3, 1), (4, 2), (4, 1)], [(64, 64), (128, 128), (96, 96), (64, 128), (96, 64)]
    length = lambda: int(pick(rng, rng.integers(1, 100), rng.integers(100, 400), rng.integers(300, 800), edge()))
    spec = random_spec(rng, heads, dims, length, deterministic=chance(rng, 0.4))
    # Else few would have plans that depend on the mask, or segments between which dQ's sum in order has gaps.
    kind = rng.random()
    if kind < 0.3:
        rules = dict.fromkeys(("query_lengths", "key_lengths", "segments", "query_offset"), False)
        spec = dataclasses.replace(spec, window=None, causal=True, **rules)
    elif kind < 0.5:
        spec = dataclasses.replace(spec, segments=True, deterministic=True)
    num_parts = pick(rng, *(n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0))
    spec = dataclasses.replace(backward.in_parts(spec, num_parts), soft_cap=pick(rng, None, 20.0))
    multiple = pick(rng, 64, least_head_multiple(spec))
    padded = padded_head_dims(spec, multiple)
    while True:
        block_q, num_stages = pick(rng, 64, 128), pick(rng, 2, 3, 4)
        if attention_backward_fused.smem_bytes(*padded, block_q, num_stages) <= spec.target.smem_bytes:
            config = attention_backward_fused.Config(
                block_q=block_q,
                num_stages=num_stages,
                head_multiple=multiple,
                stores_first=attention_backward_fused.can_store_first(spec) and chance(rng, 0.7),
            )
            return Case(spec, config, random_integers(spec, rng))


def random_wide(rng: np.random.Generator) -> Case:
    length = lambda: int(pick(rng, rng.integers(1, 60), rng.integers(30, 200), rng.integers(100, 500), edge()))
    edge = lambda: max(1, near_a_block(rng, 400))
    dims = [(192, 192), (256, 256), (192, 128), (160, 256)]
    spec = random_spec(rng, [(1, 1), (2, 1), (3, 1), (4, 2)], dims, length)
    if chance(rng, 0.4):
        rules = dict.fromkeys(("query_lengths", "key_lengths", "segments"), False)
        spec = dataclasses.replace(spec, window=None, **rules)
    spec = dataclasses.replace(spec, soft_cap=pick(rng, None, 20.0))
    dq_stages, dkv_stages = attention_backward_wide.num_stages(spec)
    config = attention_backward_wide.Config(
        dq_num_stages=pick(rng, *dq_stages),
        dkv_num_stages=pick(rng, *dkv_stages),
        multicast=chance(rng, 0.6),
        ping_pong=chance(rng, 0.5),
    )
    return Case(spec, config, random_integers(spec, rng))


def random_integers(spec: AttentionSpec, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The optional operands: also lengths that are negative or too large, and offsets near overflow."""
    (batch, num_queries), num_keys = spec.q.shape[:2], spec.k.shape[1]
    some = 0, 2**30, *rng.integers(0, (50, 800)), near_a_block(rng, 600), max(0, num_keys - num_queries)
    offset = pick(rng, *some) if spec.query_offset else 0

    def lengths(n: int) -> list[int]:
        return [pick(rng, 0, -3, 1, n, n + 70, rng.integers(n + 1), near_a_block(rng, n)) for _ in range(batch)]

    def ids(n: int) -> np.ndarray:
        documents = np.cumsum(rng.random((batch, n)) < 1 / rng.integers(2, 150), axis=1)
        blocks = np.arange(n)[None].repeat(batch, 0) // pick(rng, 64, 100, 128)
        extreme = np.where(documents % 2, 2**31 - 1, -(2**31))
        return pick(rng, documents, blocks, blocks[:, ::-1] % 3, extreme, rng.integers(-2, 3, (batch, n)))

    queries, keys = ids(num_queries), ids(num_keys)
    values = dict(
        query_offset=offset,
        query_lengths=[n + pick(rng, 0, offset, offset, offset) for n in lengths(num_queries)],
        key_lengths=lengths(num_keys),
        query_segments=queries,
        key_segments=pick(rng, queries, keys) if num_queries == num_keys else keys,
    )
    return {name: np.asarray(values[name], np.int32) for name in spec.extra_names}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How to simulate a case, how to make one, and of how many sets of cases one runs without --thorough."""

    simulation: Callable[..., Any]
    random_case: Callable[[np.random.Generator], Case]
    one_in: int

    def check(self, seeds: Iterable[int], edit: tuple[str, str] | None = None) -> None:
        simulation = self.simulation(edit)
        for seed in seeds:
            rng = np.random.default_rng(seed)
            simulation.check(self.random_case(rng), rng)


KERNELS = {
    "forward": Kernel(simulated_forward.Simulation, random_forward, 13),
    "backward": Kernel(simulated_backward.Simulation, random_backward, 20),
    "wide backward": Kernel(simulated_wide.Simulation, random_wide, 25),
}


@pytest.mark.one_version
@pytest.mark.parametrize(
    ("kernel", "first_seed"),
    [
        pytest.param(name, seed, marks=pytest.mark.sampled(one_in=kernel.one_in, of=f"{name} schedule"))
        for name, kernel in KERNELS.items()
        for seed in range(0, 2000, 20)
    ],
)
def test_random_cases(kernel: str, first_seed: int) -> None:
    KERNELS[kernel].check(range(first_seed, first_seed + 20))


#: Of a kernel's planted bug: a text of the source, what stands there instead, how that is noticed, and seeds of small
#: cases in which it is. One suffices; the others are for when random cases change.
BUGS = {
    "forward": {
        "blocks beyond the item's": (
            "first_block = jnp.clip(own_first, first_block, end_block - 1)\n"
            "            end_block = jnp.clip(own_end, first_block + 1, end_block)",
            "first_block, end_block = own_first, own_end",
            "deadlock|in another's place",
            (381, 46, 265),
        ),
        "queries' release": ("when(block == item.first_block)", "when(block == 0)", "deadlock", (155, 271, 491)),
        "no skip at the end": (
            "if cta.skips_blocks and looks_back(consumer.spec):",
            "if False:",
            "left over",
            (316, 492, 445),
        ),
        "unmasked too soon": ("(item.end_block - end, 1,", "(item.end_block - end - 1, 1,", "wrong pairs", (24, 58)),
        "unmasked too long": ("(item.end_block - first,", "(item.end_block - first + 1,", "wrong pairs", (101, 121)),
        "edge block": ("lax.div(item.key_end,", "lax.div(item.key_end - 1,", "the edge's values", (287, 296)),
        "a key too few": (
            "_seen_by_any(query_start, query_end, key_end) for",
            "_seen_by_any(query_start, query_end - 1, key_end) for",
            "left out",
            (50, 117, 99),
        ),
        "one CTA's queries": ('lax.axis_index("cluster") * _cta_rows(config)', "0", "stored at", (94, 34)),
    },
    "backward": {
        "a query too few": (
            "first_block, end_block = blocks_of(seeing[0] - offset, seeing[1] - offset,",
            "first_block, end_block = blocks_of(seeing[0] - offset, seeing[1] - offset - 1,",
            "left out",
            (25, 45, 20),
        ),
        "unmasked too long": (
            "end_block - first_whole\n",
            "end_block - first_whole + 1\n",
            "wrong pairs",
            (17, 43, 10),
        ),
        "keys' end unmasked": (
            "jnp.where(kv_base + _KEYS > key_end, 0, end_unmasked)",
            "end_unmasked",
            "wrong",
            (9, 28, 2),
        ),
        "queries' slot": ("jnp.where(slot == 0, cta.num_stages - 1, slot - 1)", "slot", "deadlock", (2, 7, 0)),
        "queries' product": ("plgpu.wgmma_wait(1)", "plgpu.wgmma_wait(2)", "race: .*'q'", (2, 8, 0)),
        "gradients' release": (
            "plgpu.barrier_arrive(smem.dout_empty.at[slot])\n    smem.ds_smem",
            "smem.ds_smem",
            "deadlock",
            (7, 2, 0),
        ),
        "no fence": ("[...] = ds\n    plgpu.commit_smem()", "[...] = ds", "race: .*'ds'", (1, 2, 0)),
        "an item left out": (
            "fori_loop(0, self.gmem.plan[self.index, 0], run",
            "fori_loop(1, self.gmem.plan[self.index, 0], run",
            "stored",
            (9, 16, 7),
        ),
        "blocks upwards": ("item.num_blocks - 1 - i, i)", "item.num_blocks - i, i)", "begins before", (7, 17, 21)),
        "last dQ": (
            "num_steps + cta.num_stages, load",
            "num_steps + cta.num_stages - 1, load",
            "left out|race|deadlock",
            (9, 7, 11),
        ),
        "a turn too soon": ("turn, rank, decr", "turn, jnp.maximum(rank - 1, 0), decr", "race: .*'dq'", (49, 70, 11)),
        "a turn too late": ("turn, rank, decr", "turn, rank + 1, decr", "deadlock", (2, 8, 4)),
        "added too soon": ("plgpu.wait_smem_to_gmem(1)", "plgpu.wait_smem_to_gmem(2)", "race: .*'dq'", (70, 11, 32)),
        "added before it is stored": (
            "plgpu.semaphore_wait(stored, 1,",
            "plgpu.semaphore_wait(stored, 0,",
            "race: .*'dq'|before it is stored",
            (251, 837, 907),
        ),
        "stored, but not there": ("adding - 1, 1))", "adding - 1, 2))", "race: .*'dq'", (907, 419, 1273)),
        "the last one not announced": ("num_steps - 1, 0))", "num_steps - 2, 0))", "deadlock", (645, 215, 205)),
        "some wait for a later CTA": (
            "return range(begin, begin + 1",
            "return range(begin if kv_block == 0 else 0, begin + 1",
            "deadlock",
            (419, 210, 1361),
        ),
        "gaps between segments": (
            "first, end = lax.cummin(first, axis=1, reverse=True), lax.cummax(end, axis=1)",
            "pass",
            "waits for -",
            (91, 0, 46),
        ),
        "later keys first": (
            "for kv_block in kv_blocks for stream",
            "for kv_block in kv_blocks[::-1] for stream",
            "deadlock",
            (49, 11, 70),
        ),
    },
    "wide backward": {
        "a slot of both": (
            "dout_empty=slot_releases(num_slots, NUM_CONSUMERS, multicast=config.multicast)",
            "dout_empty=plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_slots)",
            "race: .*'dout'",
            (8, 16, 12),
        ),
        "different steps": (
            "blocks_of(any_start - offset, any_end - offset, block_q),",
            "blocks_of(any_start - offset + 64 * lax.axis_index('cluster'), any_end - offset, block_q),",
            "deadlock|holds parts|in another's place|left over",
            (76, 22, 14),
        ),
        "one CTA's queries": (
            "queries_that_see_any(spec, start, jnp.minimum(start + rows,",
            "queries_that_see_any(spec, start, jnp.minimum(start + _ROWS_PER_CONSUMER,",
            "left out",
            (96, 299, 81),
        ),
        "unmasked too long": (
            "spec, my_start, my_start + _ROWS_PER_CONSUMER, offset, num_blocks",
            "spec, my_start, my_start + 1, offset, num_blocks",
            "wrong pairs",
            (108, 57, 137),
        ),
        "the first turn": ("pl.when(index == NUM_CONSUMERS - 1)(turns.pass_on)", "pass", "deadlock", (14, 16, 6)),
        "keys' product": ("plgpu.wgmma_wait(2)", "plgpu.wgmma_wait(3)", "race", (6, 3, 9)),
        "values' buffer": ("plgpu.barrier_wait(smem.v_read)", "pass", "race: .*'v'", (5, 2, 1)),
        "gone too soon": (
            "leave_cluster(item.smem.cluster_done)\n\n    pl.run_scoped(walk_queries",
            "\n    pl.run_scoped(walk_queries",
            "may be gone",
            (2, 7, 4),
        ),
    },
}


@pytest.mark.one_version
@pytest.mark.parametrize(("kernel", "bug"), [(kernel, bug) for kernel, bugs in BUGS.items() for bug in bugs])
def test_planted_bugs_are_noticed(kernel: str, bug: str) -> None:
    text, broken, noticed, seeds = BUGS[kernel][bug]
    with pytest.raises(AssertionError, match=noticed):
        KERNELS[kernel].check(seeds, (text, broken))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bug_must_have_its_place_in_the_source(kernel: str) -> None:
    with pytest.raises(ValueError, match="is 0 times in the source, not once: no such text"):
        KERNELS[kernel].check((), ("no such text", ""))
