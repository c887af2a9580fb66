"""Simulates the schedule of the backward kernel up to head dimension 128 (see `simulated`), and checks its stores.

For each block of keys and each consumer it checks that

- dK and dV are stored once, at the right place;
- each block of queries contributes at most once;
- the operands of each product have the same keys, queries and heads;
- all visible pairs of a query and a key are unmasked, and no others.

For each block of queries it checks the same for dQ. With a fixed order it also checks the order of the additions, for
any number of resident CTAs.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from faults import Fault
from simulated import Case, Launch, Order, Product, Ref, Sources, Store, Tile, launch_with, only, run
from simulated_replay import Read, Write, replay

from jaxkernels.pallas.attention import backward_fused as attention_backward_fused

__all__ = ["Place", "Simulation", "check_products_of_keys", "launches_of", "operands_of"]

#: The position of a block of logits: batch, query head, first query, first key.
type Place = tuple[int, int, int, int]

#: Keys of a consumer.
_ROWS = 64


class Simulation:
    def __init__(self, fault: Fault | None = None) -> None:
        self.sources = Sources(attention_backward_fused, fault=fault)
        (self.fused,) = self.sources.kernels

    def check(self, case: Case, rng: np.random.Generator) -> None:
        """CTAs that wait for each other are replayed together."""
        spec, config = case.spec, case.config
        is_zeroed = self.fused.is_zeroed(spec, stores_first=config.stores_first)
        operands = operands_of(case, is_bounded=True)
        settings = spec, config, operands, case.integers
        zeros = Ref("dq", shape=operands[0].shape) if is_zeroed else None
        order: Order = "as added" if spec.deterministic else "any" if is_zeroed else "one stores first"
        (launch,) = launches_of(self.sources, self.fused.gradients, *settings, zeros, order=order)
        ctas = run(self.sources, launch)
        stores = [store for warpgroups in ctas for store in warpgroups[0].cta.stores]
        if order == "any":
            for cta in ctas:
                replay([cta], rng)
        else:
            added = replay(ctas, rng, most_resident=len(ctas))
            if spec.deterministic:
                _check_order(added)
            for sum_before in (x for warpgroups in ctas for x in warpgroups[0].cta.sums):
                assert sum_before.contents, f"{sum_before.place} is added to before it is stored"
        _Gradients(case).check(stores, is_zeroed=is_zeroed)


def launches_of(sources: Sources, gradients: Callable[..., Any], *args: Any, order: Order = "any") -> list[Launch]:
    """The launches of a backward pass. Its results get names."""
    launches, results = launch_with(sources, gradients, *args, order=order)
    for ref, name in zip(results, ("dq", "dk", "dv"), strict=True):
        ref.name = name
    return launches


def operands_of(case: Case, *, is_bounded: bool) -> tuple[Ref, ...]:
    """q, k, v, dout, lse and delta, as `gradients` takes them. If bounded, blocks must begin inside the array."""
    spec, (head_dim, value_dim) = case.spec, case.padded_dims
    rows = lambda x: x.shape[1] + -x.shape[1] % 8
    tiles = ("q", spec.q, head_dim), ("k", spec.k, head_dim), ("v", spec.v, value_dim), ("dout", spec.q, value_dim)
    of_rows = spec.q.shape[0], spec.q.shape[2], rows(spec.q)
    return (
        *(Ref(name, shape=(x.shape[0], rows(x), x.shape[2], dim), is_bounded=is_bounded) for name, x, dim in tiles),
        *(Ref(name, shape=of_rows) for name in ("lse", "delta")),
    )


def check_products_of_keys(
    case: Case,
    name: str,
    products: Sequence[Product],
    batch: int,
    first_key: int,
    kv_head: int,
    count: Callable[[Product, Place], int],
) -> None:
    """Checks dK or dV of 64 keys: dS Q, or P dO, from each block of queries at most once, with all visible pairs.

    Args:
      count: checks dS or P, and returns the number of its unmasked pairs.
    """
    spec, num_pairs = case.spec, collections.Counter[int]()
    visited = collections.Counter(product.rhs.block for product in products)
    assert all(n == 1 for n in visited.values()), f"{visited} for {(batch, first_key, kv_head)}"
    for product in products:
        array, of_batch, first_query, head = product.rhs.block
        of = array, of_batch, head // spec.group_size
        assert of == ("q" if name == "dk" else "dout", batch, kv_head), f"{name}{(batch, first_key, kv_head)} of {of}"
        num_pairs[head] += count(product, (batch, head, first_query, first_key))
    expected = case.num_visible(batch, 0, spec.q.shape[1], slice(first_key, first_key + _ROWS))
    for head in range(kv_head * spec.group_size, (kv_head + 1) * spec.group_size):
        assert num_pairs[head] == expected, f"pairs are left out: {name}{(batch, head, first_key)}"


def _check_order(stores: Sequence[Write]) -> None:
    """Checks that the additions to a block of dQ are in the order of the keys."""
    added = collections.defaultdict(list)
    for store in stores:
        if store.place[0] == "dq":
            tile = next(iter(store.value.contents.values()))
            added[store.place].append(tile.origin("ds k")[0].rhs.block[2])
    for place, first_keys in added.items():
        assert first_keys == sorted(first_keys), f"{place} is the sum over keys {first_keys}"


class _Gradients:
    """Compares the stores with the expected ones."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.block_q = case, case.spec, case.config.block_q
        self.keys_per_cta = 2 * _ROWS
        #: id of a dS or P that was checked -> its position, the number of its unmasked pairs, and the tile.
        self.checked: dict[int, tuple[Any, int, Tile]] = {}

    def check(self, stores: list[Store], *, is_zeroed: bool) -> None:
        dq, *others = ([store for store in stores if store.to[0] == name] for name in ("dq", "dk", "dv"))
        head_dim, value_dim = self.case.padded_dims
        for name, some, columns in zip(("dk", "dv"), others, (head_dim, value_dim)):
            self._check_keys(name, some, columns)
        self._check_queries(dq, is_zeroed)

    def _check_keys(self, name: str, stores: list[Store], columns: int) -> None:
        spec, span = self.spec, math.gcd(64, *self.case.padded_dims)
        batch, num_keys, num_kv_heads, _ = spec.k.shape
        first_keys = range(0, num_keys + -num_keys % self.keys_per_cta, _ROWS)
        places = itertools.product(range(batch), first_keys, range(num_kv_heads), range(0, columns, span))
        found = collections.Counter(store.to for store in stores)
        expected = collections.Counter((name, *place) for place in places)
        assert found == expected, f"stored {(found - expected) or 'not'}, expected {expected - found}"
        owners: dict[int, Any] = {}
        for store in stores:
            _, batch_idx, first_key, kv_head, column = store.to
            assert store.warpgroup == first_key // _ROWS % 2, f"{store.to} comes from warpgroup {store.warpgroup}"
            tile = only(store.staged.contents)
            assert tile.columns == (column, column + span), f"{store.to} are columns {tile.columns}"
            products = tile.origin("* q" if name == "dk" else "* dout") or ()
            owner = batch_idx, first_key, kv_head
            if not products or id(products) not in owners:
                count = lambda product, place: self._check_tile(product.lhs, place, is_gradient=name == "dk")
                check_products_of_keys(self.case, name, products, *owner, count)
                owners[id(products)] = owner
            assert not products or owners[id(products)] == owner, f"{store.to} is of {owners[id(products)]}"

    def _check_tile(self, tile: Tile, place: Place, *, is_gradient: bool) -> int:
        """Checks P or dS of 64 keys and a block of queries. Returns the number of unmasked pairs."""
        if id(tile) in self.checked:
            of, num_pairs, _ = self.checked[id(tile)]
            assert of == place, f"{of} in the place of {place}"
            return num_pairs
        batch, head, first_query, first_key = place
        kv_head, cta_keys = head // self.spec.group_size, first_key - first_key % self.keys_per_cta
        part = ((first_key - cta_keys, first_key - cta_keys + _ROWS),)

        def check_product(kind: str, names: tuple[str, str]) -> Any:
            (product,) = tile.origin(kind)
            assert product.lhs.block == (names[0], batch, cta_keys, kv_head), f"{product.lhs.block} for {place}"
            assert product.lhs.part == part, f"rows {product.lhs.part} for {place}"
            assert product.rhs.block == (names[1], batch, first_query, head), f"{product.rhs.block} for {place}"
            return product

        kinds = {"k q", "lse"} | ({"v dout", "minus_delta"} if is_gradient else set())
        assert set(tile.origins) == kinds, f"{set(tile.origins)} for {kinds}"
        assert tile.origin("lse").block == ("lse", batch, head, first_query), f"{tile.origin('lse').block} for {place}"
        logits = check_product("k q", ("k", "q"))
        if is_gradient:
            check_product("v dout", ("v", "dout"))
            delta = tile.origin("minus_delta").block
            assert delta == ("-delta", batch, head, first_query), f"{delta} for {place}"
        keys = slice(first_key, first_key + _ROWS)
        num_pairs = self.case.num_unmasked(logits, batch, first_query, self.block_q, keys)
        self.checked[id(tile)] = place, num_pairs, tile
        return num_pairs

    def _check_queries(self, stores: list[Store], is_zeroed: bool) -> None:
        spec = self.spec
        batch, num_queries, num_heads, _ = spec.q.shape
        visited: collections.Counter[Any] = collections.Counter()
        num_pairs: collections.Counter[Any] = collections.Counter()
        for store in stores:
            first_key, pairs = self._check_added(store.to, store.staged)
            visited[*store.to, first_key] += 1
            num_pairs[store.to] += pairs
            expected = "add" if is_zeroed or first_key > 0 else None
            assert store.operation == expected, f"{store.to} of keys {first_key}: {store.operation}"
        assert all(n == 1 for n in visited.values()), f"added more than once: {visited.most_common(1)}"
        for of, head, first in itertools.product(range(batch), range(num_heads), range(0, num_queries, self.block_q)):
            place, expected = ("dq", of, first, head), self.case.num_visible(of, first, self.block_q)
            assert num_pairs[place] == expected, f"pairs are left out: {place}"
            assert is_zeroed or visited[*place, 0], f"{place} is not stored, but added to"

    def _check_added(self, to: Any, staged: Read) -> tuple[int, int]:
        """Returns the first key from which a piece of dQ comes, and the number of its unmasked pairs."""
        _, batch, first_query, head = to
        width = math.gcd(64, self.case.padded_dims[0])
        rows, columns = range(0, self.block_q, 64), range(0, self.case.padded_dims[0], width)
        pieces = {((row, row + 64), (column, column + width)) for row, column in itertools.product(rows, columns)}
        assert set(staged.contents) == pieces, f"pieces {set(staged.contents)}"
        blocks, tiles = set(), []
        for (of_rows, of_columns), tile in staged.contents.items():
            (product,) = tile.origin("ds k")
            blocks.add(product.rhs.block)
            assert product.lhs.part == (None, of_rows), f"queries {product.lhs.part} for {of_rows}"
            assert product.rhs.part == (None, of_columns), f"columns {product.rhs.part} for {of_columns}"
            tiles.append(product.lhs.contents)
        assert len(blocks) == 1, f"dQ of {blocks}"
        ((array, of_batch, cta_keys, kv_head),) = blocks
        assert (array, of_batch, kv_head) == ("k", batch, head // self.spec.group_size), f"{blocks} for {to}"
        ds = tiles[0]
        assert all(tile is ds[part] for other in tiles for part, tile in other.items()), "pieces of different dS"
        assert set(ds) == {((first, first + _ROWS),) for first in range(0, self.keys_per_cta, _ROWS)}, (
            f"dS of {set(ds)}"
        )
        pairs = 0
        for ((first, _),), tile in ds.items():
            pairs += self._check_tile(tile, (batch, head, first_query, cta_keys + first), is_gradient=True)
        return cta_keys, pairs
