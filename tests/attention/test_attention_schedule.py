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
from faults import Fault
from interpreted_attention import make_spec
from simulated import Case, with_faulty

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

    def check(self, seeds: Iterable[int], fault: Fault | None = None) -> None:
        simulation = self.simulation(fault)
        for seed in seeds:
            rng = np.random.default_rng(seed)
            simulation.check(self.random_case(rng), rng)


KERNELS = {
    "forward": Kernel(simulated_forward.Simulation, random_forward, 26),
    "backward": Kernel(simulated_backward.Simulation, random_backward, 40),
    "wide backward": Kernel(simulated_wide.Simulation, random_wide, 50),
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


@dataclasses.dataclass(frozen=True)
class Bug:
    """A planted bug.

    Attributes:
      fault: what is wrong.
      noticed: how the simulation notices it.
      seeds: of small cases in which it is noticed. One suffices; the others are for when random cases change.
    """

    fault: Fault
    noticed: str
    seeds: tuple[int, ...]


def but_for(barrier: str) -> Callable[..., Any]:
    """A wait or an arrival that leaves out one barrier."""
    return lambda operation, ref: None if ref.name == barrier else operation(ref)


def walks_on(right: Any) -> Any:
    """The CTAs of a cluster begin with different blocks."""

    def queries_of_keys(*args: Any) -> Any:
        visited, rank = right(*args), right.__globals__["lax"].axis_index("cluster")
        return dataclasses.replace(visited, first=np.minimum(visited.first + rank, visited.end - 1))

    return queries_of_keys


def keys_to_add_to_first(right: Any) -> Any:
    """A turn comes one block of keys too soon."""
    return lambda *args: np.maximum(right(*args) - 1, 0)


def without_the_last(right: Any) -> Any:
    """An item's last dQ is not added."""

    def add(cta: Any, item: Any, step: Any) -> None:
        if step < cta.spec.group_size * item.num_blocks - 1:
            right(cta, item, step)

    return add


def skips_the_first(right: Any) -> Any:
    """The first item of a persistent CTA is left out."""
    return lambda cta, run, carry: right(cta, lambda nth, carry: run(nth, carry) if nth else carry, carry)


def from_the_last_keys(right: Any) -> Any:
    """A set's blocks of keys come in descending order."""

    def in_sets(num_streams: int, num_kv_blocks: int, at_once: int) -> Any:
        items = right(num_streams, num_kv_blocks, at_once)
        return [(stream, num_kv_blocks - 1 - kv_block, is_upward) for stream, kv_block, is_upward in items]

    return in_sets


def for_any_cta(right: Any) -> Any:
    """Blocks of keys other than the first may be on an earlier CTA than the one they wait for."""

    def ctas(stream: int, kv_block: int, *counts: int) -> range:
        allowed = right(stream, kv_block, *counts)
        return allowed if kv_block == 0 else range(allowed.stop)

    return ctas


def one_block_on(right: Any) -> Any:
    """Steps that go upwards are at the block of queries after theirs."""

    def place(cta: Any, item: Any, step: Any) -> Any:
        head, i = right(cta, item, step)
        return head, i + 1 if item.is_upward else i

    return place


def of_a_cta_alone(right: Any) -> Any:
    """The neighbour does not release this CTA's slots of output gradients."""

    def allocations(spec: Any, config: Any, gmem: Any) -> Any:
        alone = right(spec, dataclasses.replace(config, multicast=False), gmem)
        return right(spec, config, gmem) | dict(dout_empty=alone["dout_empty"])

    return allocations


BUGS = {
    "forward": {
        "blocks beyond the item's": Bug(
            Fault("forward:_cut_to", lambda _: lambda first, end, own_first, own_end: (own_first, own_end)),
            "deadlock|in another's place",
            (381, 46, 265),
        ),
        "queries' release": Bug(
            Fault(
                "forward:_release_keys",
                lambda right: (
                    lambda consumer, item, slot, block: right(
                        consumer, dataclasses.replace(item, first_block=0), slot, block
                    )
                ),
            ),
            "deadlock",
            (155, 271, 491),
        ),
        "no skip at the end": Bug(
            Fault("forward:_skip_earlier_blocks", lambda _: lambda consumer, number, slot: slot),
            "left over",
            (316, 492, 445),
        ),
        "unmasked too soon": Bug(
            Fault(
                "forward:_unmasked_steps", lambda right: lambda *args: (max(right(*args)[0] - 1, 1), right(*args)[1])
            ),
            "wrong pairs",
            (245, 62, 24),
        ),
        "unmasked too long": Bug(
            Fault(
                "forward:_unmasked_steps",
                lambda right: (
                    lambda consumer, item: (
                        right(consumer, item)[0],
                        min(right(consumer, item)[1] + 1, item.num_blocks),
                    )
                ),
            ),
            "wrong pairs",
            (316, 245, 205),
        ),
        "edge block": Bug(
            Fault(
                "forward:_load_cut_values",
                lambda right: (
                    lambda cta, item, *args: right(cta, dataclasses.replace(item, key_end=item.key_end - 1), *args)
                ),
            ),
            "the edge's values",
            (287, 296),
        ),
        "a key too few": Bug(
            Fault(
                "visibility:keys_seen_by_any",
                lambda right: lambda spec, start, end, key_end: right(spec, start, end - 1, key_end),
            ),
            "left out",
            (50, 117, 99),
        ),
        "one CTA's queries": Bug(
            Fault(
                "forward:_Cta.q_base_of",
                lambda _: lambda cta, q_block: q_block * attention_forward._rows(cta.config),
            ),
            "stored at",
            (94, 34),
        ),
    },
    "backward": {
        "a query too few": Bug(
            Fault(
                "visibility:queries_that_see_any",
                lambda right: lambda *args: (right(*args)[0], right(*args)[1] - 1),
            ),
            "left out",
            (25, 45, 20),
        ),
        "unmasked too long": Bug(
            Fault(
                "backward_fused:_Cta.item",
                lambda right: (
                    lambda cta, nth: dataclasses.replace(right(cta, nth), end_unmasked=right(cta, nth).end_unmasked + 1)
                ),
            ),
            "wrong pairs",
            (17, 43, 10),
        ),
        "keys' end unmasked": Bug(Fault("backward_fused:_Cta.is_cut", lambda _: lambda *_: False), "wrong", (9, 28, 2)),
        "queries' slot": Bug(
            Fault("backward_fused:_Cta.previous", lambda _: lambda cta, slot: slot), "deadlock", (2, 7, 0)
        ),
        "queries' product": Bug(
            Fault("backward_fused:_free_queries_before", with_faulty("wgmma_wait", lambda wait, n: wait(n + 1))),
            "race: .*'q'",
            (2, 8, 0),
        ),
        "gradients' release": Bug(
            Fault("backward_fused:_multiply_add", with_faulty("barrier_arrive", but_for("dout_empty"))),
            "deadlock",
            (7, 2, 0),
        ),
        "no fence": Bug(
            Fault("backward_fused:_multiply_add", with_faulty("commit_smem", lambda _: None)),
            "race: .*'ds'",
            (1, 2, 0),
        ),
        "an item left out": Bug(Fault("backward_fused:_Cta.for_each_item", skips_the_first), "stored", (9, 16, 7)),
        "blocks upwards": Bug(Fault("backward_fused:_Cta.place", one_block_on), "begins before", (7, 17, 21)),
        "last dQ": Bug(Fault("backward_fused:_add", without_the_last), "left out|race|deadlock", (9, 7, 11)),
        "a turn too soon": Bug(Fault("backward_fused:_Cta.rank", keys_to_add_to_first), "race: .*'dq'", (49, 70, 11)),
        "a turn too late": Bug(
            Fault("backward_fused:_Cta.rank", lambda right: lambda *args: right(*args) + 1), "deadlock", (2, 8, 4)
        ),
        "added too soon": Bug(
            Fault(
                "backward_fused:_copy_item",
                with_faulty("wait_smem_to_gmem", lambda wait, n, **options: wait(n + (n == 1), **options)),
            ),
            "race: .*'dq'",
            (70, 11, 32),
        ),
        "added before it is stored": Bug(
            Fault(
                "backward_fused:_add",
                with_faulty("semaphore_wait", lambda wait, semaphore, value, **options: wait(semaphore, 0, **options)),
            ),
            "race: .*'dq'|before it is stored",
            (251, 837, 907),
        ),
        "stored, but not there": Bug(
            Fault(
                "backward_fused:_announce_when_added",
                lambda right: (
                    lambda cta, item, step, num_pending: right(cta, item, step, num_pending + (num_pending == 1))
                ),
            ),
            "race: .*'dq'",
            (907, 419, 1273),
        ),
        "the last one not announced": Bug(
            Fault(
                "backward_fused:_announce_when_added",
                lambda right: (
                    lambda cta, item, step, num_pending: right(cta, item, step - (num_pending == 0), num_pending)
                ),
            ),
            "deadlock",
            (645, 215, 205),
        ),
        "some wait for a later CTA": Bug(
            Fault("backward_fused:_ctas_that_may_have", for_any_cta), "deadlock", (419, 210, 1361)
        ),
        "gaps between segments": Bug(
            Fault("visibility:_without_gaps", lambda _: lambda first, end: (first, end)),
            "waits for -",
            (91, 0, 46),
        ),
        "later keys first": Bug(Fault("planning:in_sets", from_the_last_keys), "deadlock", (49, 11, 70)),
    },
    "wide backward": {
        "a slot of both": Bug(Fault("backward_wide:_dkv_allocations", of_a_cta_alone), "race: .*'dout'", (8, 16, 12)),
        "different steps": Bug(
            Fault("backward_wide:_queries_of_keys", walks_on),
            "deadlock|holds parts|in another's place|left over",
            (2, 6, 76),
        ),
        "one CTA's queries": Bug(
            Fault(
                "visibility:queries_that_see_any",
                lambda right: lambda spec, start, end, *args: right(spec, start, np.minimum(end, start + 64), *args),
            ),
            "left out",
            (96, 299, 81),
        ),
        "unmasked too long": Bug(
            Fault(
                "visibility:queries_that_see_all",
                lambda right: lambda spec, start, end, *args: right(spec, start, start + 1, *args),
            ),
            "wrong pairs",
            (108, 57, 137),
        ),
        "last block left out": Bug(
            Fault("visibility:blocks_of", lambda _: lambda start, end, block: (start // block, end // block)),
            "left out",
            (15, 19, 6),
        ),
        "the first turn": Bug(
            Fault("backward_wide:_Turns.give_first", lambda _: lambda turns: None), "deadlock", (14, 16, 6)
        ),
        "keys' product": Bug(
            Fault("backward_wide:_accumulate_dq", with_faulty("wgmma_wait", lambda wait, n: wait(n + (n == 2)))),
            "race",
            (6, 3, 9),
        ),
        "values' buffer": Bug(
            Fault("backward_wide:_accumulate_dv", with_faulty("barrier_wait", but_for("v_read"))),
            "race: .*'v'",
            (5, 2, 1),
        ),
        "gone too soon": Bug(Fault("rings:leave_cluster", lambda _: lambda end: None), "may be gone", (2, 7, 4)),
    },
}


@pytest.mark.one_version
@pytest.mark.parametrize(("kernel", "bug"), [(kernel, bug) for kernel, bugs in BUGS.items() for bug in bugs])
def test_planted_bugs_are_noticed(kernel: str, bug: str) -> None:
    planted = BUGS[kernel][bug]
    with pytest.raises(AssertionError, match=planted.noticed):
        KERNELS[kernel].check(planted.seeds, planted.fault)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bug_must_be_in_a_part_of_the_kernel(kernel: str) -> None:
    with pytest.raises(AttributeError, match="no_such_part"):
        KERNELS[kernel].check((), Fault("rings:no_such_part", lambda right: right))
