"""Simulates the schedules of the backward kernels above head dimension 128 (see `simulated`), and checks their stores.

For each block of 64 keys (dK and dV) and of 64 queries (dQ) it checks that

- the gradients are stored once, at the right place;
- each block contributes at most once;
- the operands of each product have the same keys, queries and heads;
- all visible pairs of a query and a key are unmasked, and no others.

The two CTAs of a cluster are replayed together.
"""

from __future__ import annotations

import collections
import itertools

import numpy as np
from faults import Fault
from simulated import Case, Product, Sources, Store, Tile, only, run
from simulated_backward import Place, check_products_of_keys, launches_of, operands_of
from simulated_replay import Block, replay

from jaxkernels.pallas.attention import backward_wide as attention_backward_wide

__all__ = ["Simulation"]

#: Queries or keys of a block.
_ROWS = 64


class Simulation:
    def __init__(self, fault: Fault | None = None) -> None:
        self.sources = Sources(attention_backward_wide, fault=fault)
        (self.wide,) = self.sources.kernels

    def check(self, case: Case, rng: np.random.Generator) -> None:
        arguments = case.spec, case.config, operands_of(case, is_bounded=False), case.integers
        gradients = _Gradients(case)
        for launch in launches_of(self.sources, self.wide.gradients, *arguments):
            clusters = run(self.sources, launch)
            for cluster in clusters:
                replay([cluster], rng)
            ctas = dict.fromkeys(warpgroup.cta for cluster in clusters for warpgroup in cluster)
            gradients.add([store for cta in ctas for store in cta.stores])
        gradients.check_places()


class _Gradients:
    """Compares the stores with the expected ones."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec, config = case, case.spec, case.config
        head_dim, value_dim = case.padded_dims
        self.num_ctas = 2 if config.multicast else 1
        #: The ring that keys come through in the second kernel.
        self.keys = "v" if head_dim == value_dim else "k"
        self.places: collections.Counter[Block] = collections.Counter()

    def check_places(self) -> None:
        """All gradients are stored once."""
        spec, rows = self.spec, dict(dk=_ROWS, dv=_ROWS, dq=2 * _ROWS)
        expected: collections.Counter[Block] = collections.Counter()
        for name, x in (("dq", spec.q), ("dk", spec.k), ("dv", spec.k)):
            end = x.shape[1] + -x.shape[1] % (self.num_ctas * rows[name])
            places = itertools.product(range(x.shape[0]), range(0, end, _ROWS), range(x.shape[2]))
            expected.update((name, *place) for place in places)
        assert self.places == expected, f"stored {self.places - expected or 'not'}, expected {expected - self.places}"

    def add(self, stores: list[Store]) -> None:
        """Checks the stores of one kernel."""
        for store in stores:
            if store.to[0] in ("dk", "dv"):
                assert store.warpgroup == ("dv", "dk").index(store.to[0]), f"{store.to} is of {store.warpgroup}"
                self._check_keys(store)
            else:
                self._check_queries(store)
        self.places.update(store.to for store in stores)

    def _check_keys(self, store: Store) -> None:
        name, batch, first_key, kv_head = store.to
        products = only(store.staged.contents).origin("* dout" if name == "dv" else "* q")

        def count(product: Product, place: Place) -> int:
            return self._check_p(product.lhs if name == "dv" else self._p_of(product.lhs, place), place)

        check_products_of_keys(self.case, name, products, batch, first_key, kv_head, count)

    def _p_of(self, ds: Tile, place: Place) -> Tile:
        """Checks the other origins of consumer 1's dS."""
        batch, head, first_query, first_key = place
        assert set(ds.origins) == {"p", "v dout", "delta"}, f"dS of {set(ds.origins)}"
        (product,) = ds.origin("v dout")
        expected = ("v", batch, first_key, head // self.spec.group_size), ("dout", batch, first_query, head)
        assert (product.lhs.block, product.rhs.block) == expected, f"dP of {product.lhs.block, product.rhs.block}"
        delta = ds.origin("delta").block
        assert delta == ("delta", batch, head, first_query), f"{delta} for {place}"
        return only(ds.origin("p").contents)

    def _check_p(self, p: Tile, place: Place) -> int:
        """Returns the number of unmasked pairs. Keys past the last one need no mask: their gradients are not stored."""
        batch, head, first_query, first_key = place
        assert set(p.origins) == {"k q", "lse"}, f"P of {set(p.origins)}"
        (logits,) = p.origin("k q")
        expected = ("k", batch, first_key, head // self.spec.group_size), ("q", batch, first_query, head)
        assert (logits.lhs.block, logits.rhs.block) == expected, f"S of {logits.lhs.block, logits.rhs.block}"
        lse = p.origin("lse").block
        assert lse == ("lse", batch, head, first_query), f"{lse} for {place}"
        keys, num_kept = slice(first_key, first_key + _ROWS), max(0, self.case.key_end(batch) - first_key)
        return self.case.num_unmasked(logits, batch, first_query, _ROWS, keys, num_kept)

    def _check_queries(self, store: Store) -> None:
        _, batch, first_query, head = store.to
        tiles, kv_head = store.staged.contents, head // self.spec.group_size
        for part, tile in tiles.items():
            num_pairs, visited = 0, []
            for product in tile.origin(f"* {self.keys}"):
                array, of_batch, first_key, of_head = product.rhs.block
                assert (array, of_batch, of_head) == ("k", batch, kv_head), f"{product.rhs.block} for {store.to}"
                assert product.rhs.part == part, f"columns {product.rhs.part} for {part}"
                visited.append(first_key)
                num_pairs += self._check_ds(product, (batch, head, first_query, first_key))
            assert num_pairs == self.case.num_visible(batch, first_query, _ROWS), f"pairs are left out: {store.to}"
            assert visited == sorted(set(visited)), f"{store.to} of keys {visited}"

    def _check_ds(self, product: Product, place: Place) -> int:
        batch, head, first_query, first_key = place
        ds, kv_head, keys = product.lhs, head // self.spec.group_size, self.keys
        assert set(ds.origins) == {f"q {keys}", "lse", "dout v", "delta"}, f"dS of {set(ds.origins)}"
        for name in ("lse", "delta"):
            assert ds.origin(name).block == (name, batch, head, first_query), f"{ds.origin(name).block} for {place}"
        (logits,), (dp,) = ds.origin(f"q {keys}"), ds.origin("dout v")
        for of, names in ((logits, "qk"), (dp, ("dout", "v"))):
            expected = (names[0], batch, first_query, head), (names[1], batch, first_key, kv_head)
            assert (of.lhs.block, of.rhs.block) == expected, f"{of.lhs.block, of.rhs.block} for {place}"
        return self.case.num_unmasked(logits, batch, first_query, _ROWS, slice(first_key, first_key + _ROWS))
