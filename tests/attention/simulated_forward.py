"""Simulates the schedule of the forward kernel (see `simulated`), and checks its stores.

For each consumer's share of each item it checks that

- the output is stored once, at the right place;
- it comes from the item's queries and, in order, from blocks of keys and of the same values, without padding;
- all visible pairs of a query and a key are unmasked, and no others.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from faults import Fault
from simulated import Case, Cta, Launch, Product, Ref, Sources, Store, Tile, Warpgroup, only, run
from simulated_replay import Block, Read, replay

from jaxkernels.ops.attention import visibility
from jaxkernels.pallas.attention import forward as attention_forward
from jaxkernels.pallas.attention import layouts

__all__ = ["Simulation"]

#: Queries of a consumer.
_BLOCK_Q = 64


class _Warpgroup(Warpgroup):
    """A warpgroup that takes items from the counter.

    `numbers` are the items that its CTA will get, `taken` the items that it has. The producer runs first.
    """

    def __init__(self, cta: Cta, index: int, numbers: list[int], taken: list[int]) -> None:
        super().__init__(cta, index)
        self.numbers, self.taken = numbers, taken
        self.numbers_read: list[tuple[Read, int]] = []

    def count_up(self, _: Ref, before: Ref) -> None:
        self.taken.append(self.numbers.pop(0))
        self.write(before, self.taken[-1])

    def number(self, ref: Ref) -> np.int32:
        read, value = self.read(ref, is_async=False), self.taken[len(self.numbers_read)]
        self.numbers_read.append((read, value))
        return np.int32(value)


class Simulation:
    def __init__(self, fault: Fault | None = None) -> None:
        self.sources = Sources(attention_forward, fault=fault)
        (self.forward,) = self.sources.kernels

    def check(self, case: Case, rng: np.random.Generator) -> None:
        """Runs all workers. If the items' lengths depend on arrays, each worker takes random items."""
        spec, num_items = case.spec, self.forward._num_items(case.spec, case.config)
        if visibility.is_known_at_run_time(spec):
            items = [[worker] for worker in range(min(spec.target.num_sms, num_items))]
            for number in range(len(items), num_items):
                items[rng.integers(len(items))].append(number)
            plan = np.array([num_items])
        else:
            plan = self.forward._plan(spec, case.config)
            items = [row[1 : 1 + row[0]].tolist() for row in plan]
        assert sorted(itertools.chain(*items)) == list(range(num_items)), "items are left out, or done twice"
        num_ctas = self.forward._num_ctas(case.config)
        numbers = [[*own[1:], num_items + int(rng.integers(3))] for own in items]
        for own, warpgroups in zip(items, run(self.sources, self._launch(case, plan, numbers)), strict=True):
            replay([warpgroups], rng)
            for warpgroup in warpgroups:
                assert all(only(read.contents) == number for read, number in warpgroup.numbers_read)
                if (consumer := warpgroup.index) < case.config.num_consumers:
                    stores = [store for store in warpgroup.cta.stores if store.warpgroup == consumer]
                    consumer += warpgroup.cta.number % num_ctas * case.config.num_consumers
                    _check_stores(case, consumer, own, stores)

    def _launch(self, case: Case, plan: np.ndarray, numbers: list[list[int]]) -> Launch:
        spec, config, dims = case.spec, case.config, case.padded_dims
        named = (("q", spec.q, dims[0]), ("k", spec.k, dims[0]), ("v", spec.v, dims[1]))
        operands = [Ref(name, shape=(*x.shape[:3], dim), is_bounded=name != "q") for name, x, dim in named]
        inputs = self.forward._inputs(spec, config, Tile(), case.integers)
        refs = Ref("plan", plan), {name: _input(name, x) for name, x in inputs.items()}, Ref("out"), Ref("lse")
        taken: list[list[int]] = [[] for _ in numbers]

        def make(cta: Cta, index: int) -> _Warpgroup:
            worker = cta.number // len(cta.cluster)
            warpgroup = _Warpgroup(cta, index, numbers[worker], taken[worker])
            self.sources.bind(count_up=warpgroup.count_up)
            return warpgroup

        body = lambda: self.forward._kernel(*operands, *refs, spec=spec, config=config)
        cluster = dict(cluster=2) if config.multicast else {}
        return Launch(body, dict(worker=len(numbers)), config.num_consumers + 1, cluster, make)


def _input(name: str, x: Any) -> Ref:
    return Ref(name, x if isinstance(x, np.ndarray) else None)


def _check_stores(case: Case, consumer: int, numbers: list[int], stores: list[Store]) -> None:
    """A consumer's results of a worker's items, in order: pieces of outputs, and logsumexps.

    The consumers of a pair of CTAs are counted together.
    """
    spec, config = case.spec, case.config
    num_q_blocks = -(-spec.q.shape[1] // attention_forward._rows(config))
    value_dim = case.padded_dims[1]
    span = layouts.swizzle_span(value_dim)
    columns = range(0, value_dim, span)
    outs, lses = ([store for store in stores if store.to[0] == name] for name in ("out", "lse"))
    assert (len(outs), len(lses)) == (len(columns) * len(numbers), len(numbers)), "some results are not stored once"
    for nth, number in enumerate(numbers):
        item, q_block = divmod(number, num_q_blocks)
        if spec.causal and visibility.is_known_at_run_time(spec):
            q_block = num_q_blocks - 1 - q_block
        (batch, head), first = divmod(item, spec.q.shape[2]), attention_forward._rows(config) * q_block
        first += consumer * _BLOCK_Q
        pieces, lse = outs[nth * len(columns) : (nth + 1) * len(columns)], lses[nth]
        places = [store.to for store in pieces]
        assert places == [("out", batch, first, head, column) for column in columns], f"stored at {places}"
        assert lse.to == ("lse", batch, head, first), f"stored at {lse.to}"
        tiles = [only(store.staged.contents) for store in pieces]
        assert [tile.columns for tile in tiles] == [(column, column + span) for column in columns], "wrong columns"
        products = tiles[0].origin("* v")
        assert all(tile.origin("* v") is products for tile in tiles), "pieces of an output differ"
        assert products, "an output without products"
        last = products[-1].lhs.origin("q k")[0]
        for tile in (*tiles, only(lse.staged.contents)):
            (logits,) = tile.origin("q k")
            assert logits.rhs is last.rhs, f"a sum of {logits.rhs.block}, an output of {last.rhs.block}"
        _check_products(case, batch, head, first, products)


def _check_products(case: Case, batch: int, head: int, first: int, products: tuple[Product, ...]) -> None:
    """Checks the blocks that a consumer's queries from `first` on have visited, and their masks."""
    spec, block_kv, last, num_pairs = case.spec, case.config.block_kv, None, 0
    for product in products:
        (logits,) = product.lhs.origin("q k")
        queries, keys = logits.lhs.block, logits.rhs.block
        assert queries == ("q", batch, first, head), f"{queries} for {(batch, first, head)}"
        assert keys[0] == "k", keys
        _, _, start, kv_head = keys
        assert keys == ("k", batch, start, head // spec.group_size), keys
        assert start % block_kv == 0, keys
        assert last is None or start == last - block_kv, f"{start} after {last}"
        last = start
        _check_values(case, product.rhs.block, batch, start, kv_head)
        num_pairs += case.num_unmasked(logits, batch, first, _BLOCK_Q, slice(start, start + block_kv))
    assert num_pairs == case.num_visible(batch, first, _BLOCK_Q), f"pairs are left out: {batch, first}"


def _check_values(case: Case, values: Block, batch: int, start: int, kv_head: int) -> None:
    """Checks that the values belong to the keys from `start` on, and that none are padding."""
    key_end, block_kv = case.key_end(batch), case.config.block_kv
    if values[0] == "edge_values":
        assert values == ("edge_values", batch, 0, kv_head), values
        assert start // block_kv == key_end // block_kv, f"the edge's values for the keys from {start} on"
    else:
        assert values == ("v", batch, start, kv_head), f"{values} for the keys from {start} on"
        assert not case.spec.key_lengths or start + block_kv <= key_end, "values of padding"
