"""Simulates the attention kernels: runs their source on integers.

`Sources` makes copies of the kernels' modules. In the copies, stand-ins replace lax, jnp, pl, plgpu, and the functions
that write MLIR or mask values. The real modules are not changed. Integers are numpy's int32, and must not overflow.
Loops and branches are Python's. An array in registers is a `Tile`. A tile has no values, but a record of its origins:
products, tiles in shared memory, and blocks of global memory.

The steps of a warpgroup do not depend on the time of the others' steps. So each warpgroup runs by itself (`run`), and
records its waits, arrivals, reads and writes. `simulated_replay` replays them, and finds the content of each read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import jax
import numpy as np
from faults import Fault
from simulated_replay import Block, Part, Read, Write

from jaxkernels.ops.attention import planning, visibility
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention import counting, layouts, limits, logits, rings

__all__ = [
    "Case",
    "Cta",
    "Launch",
    "Product",
    "Ref",
    "Sources",
    "Store",
    "Tile",
    "Warpgroup",
    "launch_with",
    "only",
    "run",
    "with_faulty",
]

#: The order in which CTAs store to the same place: any, one after the other, or one stores before all others add.
type Order = Literal["any", "as added", "one stores first"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a kernel; `integers` are the spec's optional operands by name."""

    spec: AttentionSpec
    config: Any
    integers: dict[str, np.ndarray]

    @property
    def offset(self) -> int:
        return int(self.integers.get("query_offset", 0))

    @property
    def padded_dims(self) -> tuple[int, int]:
        return limits.padded_head_dims(self.spec, getattr(self.config, "head_multiple", 64))

    def key_end(self, batch: int) -> int:
        num_keys = self.spec.k.shape[1]
        return min(max(int(self.integers["key_lengths"][batch]), 0), num_keys) if self.spec.key_lengths else num_keys

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """Whether a query sees a key, (B, T, S)."""
        (batch, num_queries), num_keys = self.spec.q.shape[:2], self.spec.k.shape[1]
        query, key = np.arange(num_queries)[:, None] + self.offset, np.arange(num_keys)
        seen = np.ones((batch, num_queries, num_keys), bool) & _in_window(query, key, *self.spec.window or (None, None))
        if self.spec.causal:
            seen &= key <= query
        if self.spec.key_lengths:
            seen &= key < self.integers["key_lengths"][:, None, None]
        if self.spec.segments:
            seen &= self.integers["query_segments"][:, :, None] == self.integers["key_segments"][:, None]
        return seen

    def queries(self, batch: int, first: int, count: int) -> np.ndarray:
        """The queries of a block, without padding."""
        rows = np.arange(first, min(first + count, self.spec.q.shape[1]))
        if self.spec.query_lengths:
            rows = rows[rows + self.offset < self.integers["query_lengths"][batch]]
        return rows

    def num_visible(self, batch: int, first: int, count: int, keys: slice = slice(None)) -> int:
        """The number of visible pairs of a block of queries and some keys."""
        return int(self.visible[batch, self.queries(batch, first, count), keys].sum())

    def num_unmasked(
        self, logits: Product, batch: int, first: int, count: int, keys: slice, num_kept: int | None = None
    ) -> int:
        """Compares the mask of a block of logits with the visible pairs. Returns the number of unmasked pairs.

        Columns past the last key must be masked. Only the first `num_kept` columns are compared.
        """
        rows = self.queries(batch, first, count)
        inside = self.visible[batch, rows, keys]
        expected = np.pad(inside, ((0, 0), (0, keys.stop - keys.start - inside.shape[1])))
        left = self._unmasked(logits, batch, rows, first, keys)
        assert (left == expected)[:, :num_kept].all(), (
            f"wrong pairs: {batch, first, keys.start}, masked at {logits.mask}"
        )
        return int(expected.sum())

    def _unmasked(self, logits: Product, batch: int, rows: np.ndarray, first: int, keys: slice) -> np.ndarray:
        """The logits that the kernel does not mask."""
        key, query = np.arange(keys.start, keys.stop), rows[:, None] + self.offset
        left = np.ones((len(rows), len(key)), bool)
        if logits.mask is not None:
            *places, end = logits.mask
            assert places == [first + self.offset, keys.start], f"masked at {places}"
            assert end in (None, self.key_end(batch)), f"keys end at {end}, not at {self.key_end(batch)}"
            left &= _in_window(query, key, self.spec.band.left, self.spec.band.right)
            if end is not None:
                left &= key < end
        if logits.segments is not None:
            expected = {("query_segments", batch, first), ("key_segments", batch, keys.start)}
            assert set(logits.segments) == expected, f"segments {logits.segments}"
            ids = np.pad(self.integers["key_segments"][batch], (0, keys.stop))[key]
            left &= self.integers["query_segments"][batch, rows][:, None] == ids
        return left


def _in_window(query: np.ndarray, key: np.ndarray, left: int | None, right: int | None) -> Any:
    return (left is None or key >= query - left) & (right is None or key <= query + right)


# Products, tiles and references.


@dataclasses.dataclass(eq=False)
class Product:
    """A product: `lhs` is a tile or a read, `rhs` a read.

    Attributes:
      mask: of logits: first query and first key of the mask, and the end of the keys if later ones are masked.
      segments: of logits: the blocks of segment ids that are compared.
    """

    lhs: Any
    rhs: Read
    mask: tuple[int, int, int | None] | None = None
    segments: tuple[Block, Block] | None = None


class Tile:
    """An array in registers.

    Attributes:
      origins: kind -> the latest origin of that kind, with the time at which it was read.
      columns: the range of columns, if it is a part of a tile.
    """

    def __init__(self, origins: Any = None, shape: Any = (), columns: tuple[int, int] | None = None) -> None:
        self.origins, self.shape, self.columns = origins or {}, shape, columns

    def origin(self, kind: str) -> Any:
        return self.origins[kind][1] if kind in self.origins else None

    def combined(self, *others: Any, **_: Any) -> Tile:
        tiles = [self, *(x for x in others if isinstance(x, Tile))]
        if len(tiles) == 1:
            return self
        origins: dict[str, Any] = {}
        for tile in tiles:
            for kind, origin in tile.origins.items():
                if kind not in origins or origin[0] > origins[kind][0]:
                    origins[kind] = origin
        columns = next((tile.columns for tile in tiles if tile.columns), None)
        return Tile(origins, next((tile.shape for tile in tiles if tile.shape), ()), columns)

    def reduced(self, *_: Any, **__: Any) -> Tile:
        return Tile(self.origins)

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.origins, self.shape, (index[1].start, index[1].stop))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __rtruediv__ = combined
    __lt__ = __gt__ = __eq__ = astype = combined  # type: ignore
    max = sum = reduced
    __hash__ = None  # type: ignore


_ZEROS = Tile()


class Accumulator:
    """An accumulator: the sum of `initial` and some products."""

    def __init__(self, warpgroup: Warpgroup, shape: tuple[int, ...], initial: Tile | None = None) -> None:
        self.warpgroup, self.shape, self.initial = warpgroup, shape, initial
        self.kind, self.products = "", ()

    def __getitem__(self, _: Any) -> Tile:
        return self.warpgroup.wgmma_accumulator_load(self)

    def __setitem__(self, _: Any, value: Any) -> None:
        """Clears the accumulator if the value is zero. Scaling does not change the record."""
        if value is _ZEROS:
            self.products = ()


class Ref:
    """A reference to memory, to barriers, to semaphores, or to a part of these.

    Attributes:
      array: integers in global memory. Other arrays have a name only; a stacked array has several names.
      is_bounded: whether blocks must begin before the end of `shape`.
    """

    dtype = np.float16

    def __init__(
        self, name: Any, array: Any = None, *, shape: Any = (), warpgroup: Any = None, is_bounded: bool = False
    ) -> None:
        self.name, self.array, self.warpgroup, self.is_bounded = name, array, warpgroup, is_bounded
        self.shape = shape if array is None else array.shape
        self.index: tuple[Any, ...] = ()

    @property
    def at(self) -> _Parts:
        return _Parts(self)

    def transpose(self, _: Any) -> Ref:
        return self

    def __neg__(self) -> Ref:
        return Ref(f"-{self.name}", shape=self.shape)

    def __getitem__(self, index: Any) -> Any:
        if index is ...:
            return self
        places = index if isinstance(index, tuple) else (index,)
        if self.warpgroup is not None:
            return self.warpgroup.number(self.at[index])
        assert all(0 <= i < n for i, n in zip(places, self.shape)), f"{self.name}[{index}] is out of bounds"
        return np.int32(self.array[index])

    def __setitem__(self, _: Any, value: Any) -> None:
        self.warpgroup.write(self, value)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The index of a slot, a barrier or a semaphore."""
        numbers = tuple([int(i) for i in self.index if not isinstance(i, slice)])
        is_there = min(numbers, default=0) >= 0 and all(map(operator.lt, numbers, self.shape))
        assert is_there, f"there is no {self.name}{list(numbers)}"
        return numbers

    @property
    def num_rows(self) -> int | None:
        """The rows of a tile; None for all rows in global memory."""
        ranges = [i for i in self.index if isinstance(i, slice)]
        if ranges:
            return None if ranges[0].start is None else ranges[0].stop - ranges[0].start
        return self.shape[len(self.index)]

    @property
    def part(self) -> Part:
        ranges = [None if i.start is None else (i.start, i.stop) for i in self.index if isinstance(i, slice)]
        return () if set(ranges) <= {None} else tuple(ranges)

    @property
    def block(self) -> Block:
        name, index, shape = self.name, self.index, self.shape
        if isinstance(name, tuple):
            name, index, shape = name[index[0]], index[1:], shape[1:]
        block = tuple((i.start or 0) if isinstance(i, slice) else int(i) for i in index)
        assert all(i >= 0 for i in block), f"{name}{block} begins before the array"
        if self.is_bounded:
            assert all(i < n for i, n in zip(block, shape)), f"{name}{block} is beyond the array"
        return name, *block


@dataclasses.dataclass
class _Parts:
    ref: Ref

    def __getitem__(self, index: Any) -> Ref:
        part = object.__new__(Ref)
        vars(part).update(vars(self.ref), index=self.ref.index + (index if isinstance(index, tuple) else (index,)))
        return part


def only(contents: dict[Part, Any]) -> Any:
    """The only value in `contents`."""
    assert len(contents) == 1, f"{len(contents)} parts: {list(contents)}"
    return next(iter(contents.values()))


# Warpgroups.


@dataclasses.dataclass
class Store:
    """A store or an addition by TMA: the warpgroup, the target and the staging buffer."""

    warpgroup: int
    to: Block
    staged: Read
    operation: str | None


class Cta:
    """A CTA: its barriers by name, and its stores.

    Attributes:
      cluster: the numbers of the CTAs in its cluster.
      order: the order in which CTAs store to the same place, and add to it.
      sums: reads of the sums that it adds to.
    """

    def __init__(self, number: int, cluster: Sequence[int], order: Order) -> None:
        self.number, self.cluster, self.order = number, cluster, order
        self.sums: list[Read] = []
        self.num_arrivals: dict[str, int] = {}
        self.shared_barriers: set[str] = set()
        self.stores: list[Store] = []


class _Accumulators:
    """plgpu.ACC."""

    def __init__(self, warpgroup: Warpgroup) -> None:
        self.warpgroup = warpgroup

    def __call__(self, shape: tuple[int, ...], _: Any) -> Callable[[str], Accumulator]:
        return lambda _: Accumulator(self.warpgroup, shape)

    def init(self, tile: Tile) -> Accumulator:
        return Accumulator(self.warpgroup, tile.shape, tile)


class Warpgroup:
    """The stand-in for plgpu in one warpgroup. Records its trace."""

    layout_cast = staticmethod(lambda x, _: x)
    broadcasted_iota = staticmethod(lambda *_, **__: Tile())
    set_max_registers = staticmethod(lambda *_, **__: None)
    TilingTransform = SwizzleTransform = staticmethod(lambda _: None)
    SemaphoreType = SimpleNamespace(REGULAR=lambda shape: shape)

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.trace: list[tuple[str, Any]] = []
        self.clock = itertools.count(1)
        self.ACC = _Accumulators(self)
        self.products: list[tuple[Accumulator, list[Read]]] = []
        self.groups: list[list[Read | Write]] = []
        self.group: list[Read | Write] = []

    def finish(self) -> None:
        assert not self.products, "ends with products under way"
        assert not self.group, "ends with copies that are in no group"
        unread = [x for group in self.groups for x in group if isinstance(x, Read)]
        assert not unread, f"ends before its copies have read {[read.place for read in unread]}"

    # Memory.

    def SMEM(self, shape: Any, _: Any, **__: Any) -> Callable[[str], Ref]:  # noqa: N802
        return lambda name: Ref(name.removesuffix("_smem"), shape=shape, warpgroup=self)

    def read(self, ref: Ref, *, is_async: bool) -> Read:
        read = Read((self.cta.number, ref.name, *ref.numbers), ref.part, is_async)
        self.trace.append(("read", read))
        return read

    def write(self, ref: Ref, value: Any) -> None:
        self.trace.append(("write", Write((self.cta.number, ref.name, *ref.numbers), ref.part, value)))

    def load(self, ref: Ref, **_: Any) -> Tile:
        return Tile({ref.name: (next(self.clock), self.read(ref, is_async=False))})

    def commit_smem(self) -> None:
        self.trace.append(("fence", None))

    def copy_gmem_to_smem(self, source: Ref, to: Ref, full: Ref, collective_axes: Any = None) -> None:
        """Records a copy. With `collective_axes` it is half of the block, for all CTAs of the cluster."""
        assert source.num_rows in (None, to.num_rows), f"{source.num_rows} rows for {to.num_rows} of {to.name}"
        rank, (barrier, *_) = self.cta.cluster.index(self.cta.number), self._barriers(full)
        ctas, part = ([self.cta.number], ()) if collective_axes is None else (self.cta.cluster, ((rank, rank + 1),))
        for cta in ctas:
            place, barrier = (cta, to.name, *to.numbers), (cta, *barrier[1:])
            self.trace.append(("write", Write(place, part, source.block, barrier, True)))
            self.trace.append(("arrive" if cta == self.cta.number else "bytes", barrier))

    def copy_smem_to_gmem(
        self, smem: Ref, to: Ref, *, commit_group: bool = True, reduction_op: str | None = None
    ) -> None:
        assert to.num_rows == smem.num_rows, f"{to.num_rows} rows from {smem.num_rows} of {smem.name}"
        staged = self.read(smem, is_async=True)
        self.group.append(staged)
        self.cta.stores.append(Store(self.index, to.block, staged, reduction_op))
        if self.cta.order == "as added" or (self.cta.order == "one stores first" and reduction_op is None):
            write = Write(to.block, (), staged, is_async=True)
            self.trace.append(("write", write))
            self.group.append(write)
        elif self.cta.order == "one stores first":
            # CTAs that add are like readers to each other.
            sum_before = Read(to.block, (), is_async=False)
            self.trace.append(("read", sum_before))
            self.cta.sums.append(sum_before)
        if commit_group:
            self.commit_smem_to_gmem_group()

    def commit_smem_to_gmem_group(self) -> None:
        self.groups.append(self.group)
        self.group = []

    def wait_smem_to_gmem(self, n: int, wait_read_only: bool = False) -> None:
        for group in self.groups[: max(0, len(self.groups) - n)]:
            ended = [x for x in group if isinstance(x, Read) or not wait_read_only]
            self.trace += [("end", x) for x in ended]
            group[:] = [x for x in group if x not in ended]
        while self.groups and not self.groups[0] and len(self.groups) > n:
            del self.groups[0]

    # Products.

    def wgmma(self, acc: Accumulator, a: Any, b: Ref) -> None:
        lhs = self.read(a, is_async=True) if isinstance(a, Ref) else a
        rhs = self.read(b, is_async=True)
        acc.products += (Product(lhs, rhs),)
        acc.kind = f"{a.name if isinstance(a, Ref) else '*'} {b.name}"
        self.products.append((acc, [x for x in (lhs, rhs) if isinstance(x, Read)]))

    def wgmma_wait(self, n: int) -> None:
        while len(self.products) > n:
            _, reads = self.products.pop(0)
            self.trace += [("end", read) for read in reads]

    def wgmma_accumulator_load(self, acc: Accumulator, wait_n: int | None = 0) -> Tile:
        if wait_n is not None:
            self.wgmma_wait(wait_n)
        assert all(acc is not other for other, _ in self.products), f"the product {acc.kind} is read before its end"
        tile = Tile({acc.kind: (next(self.clock), acc.products)} if acc.products else {}, acc.shape)
        return tile if acc.initial is None else tile.combined(acc.initial)

    # Barriers and semaphores.

    def Barrier(self, num_arrivals: int = 1, num_barriers: int = 1) -> Callable[[str], Ref]:  # noqa: N802
        def make(name: str) -> Ref:
            self.cta.num_arrivals[name] = num_arrivals
            return Ref(name, shape=(num_barriers,), warpgroup=self)

        return make

    def ClusterBarrier(  # noqa: N802
        self, collective_axes: Any, num_arrivals: int = 1, num_barriers: int = 1
    ) -> Callable[[str], Ref]:
        """An arrival at this barrier arrives at the barriers of all CTAs of the cluster."""

        def make(name: str) -> Ref:
            self.cta.shared_barriers.add(name)
            return self.Barrier(num_arrivals * len(self.cta.cluster), num_barriers)(name)

        return make

    def _barriers(self, ref: Ref) -> list[tuple[Any, ...]]:
        """This CTA's barrier, or the barriers of all CTAs of the cluster."""
        ctas = self.cta.cluster if ref.name in self.cta.shared_barriers else [self.cta.number]
        return [(cta, ref.name, *(ref.numbers or (0,))) for cta in ctas]

    def barrier_arrive(self, barrier: Ref) -> None:
        self.trace += [("arrive", of_cta) for of_cta in self._barriers(barrier)]

    def barrier_wait(self, barrier: Ref) -> None:
        self.trace += [("wait", of_cta) for of_cta in self._barriers(barrier) if of_cta[0] == self.cta.number]

    def semaphore_signal(self, semaphore: Ref, memory_scope: str) -> None:
        self.trace.append(("signal", semaphore.numbers))

    def semaphore_wait(self, semaphore: Ref, value: Any, decrement: bool, memory_scope: str) -> None:
        assert value >= 0, f"waits for {value} signals"
        assert not decrement, "only counts that grow are simulated"
        self.trace.append(("await", (semaphore.numbers, int(value))))


# The other stand-ins.


class _Numpy:
    """The stand-in for jnp: numpy's functions for integers; for tiles it records the origins."""

    full = staticmethod(lambda *args, **_: Tile())
    zeros_like = staticmethod(lambda _: _ZEROS)

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if isinstance(value, type) or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            tiles = [x for x in args if isinstance(x, Tile)]
            return tiles[0].combined(*tiles[1:]) if tiles else value(*args, **kwargs)

        return call

    def stack(self, arrays: Any, axis: int = 0) -> Any:
        if isinstance(arrays[0], Ref):
            return Ref(tuple(ref.name for ref in arrays), shape=(len(arrays), *arrays[0].shape))
        return np.stack(arrays, axis)


def _div(a: Any, b: Any) -> np.int32:
    quotient = abs(int(a)) // abs(int(b))
    return np.int32(quotient if (a >= 0) == (b >= 0) else -quotient)


def _while_loop(cond: Callable[..., Any], body: Callable[..., Any], carry: Any) -> Any:
    while cond(carry):
        carry = body(carry)
    return carry


def _accumulated(function: Any) -> Callable[..., np.ndarray]:
    def accumulate(x: np.ndarray, axis: int, reverse: bool = False) -> np.ndarray:
        x = np.flip(x, axis) if reverse else x
        return np.flip(function.accumulate(x, axis), axis) if reverse else function.accumulate(x, axis)

    return accumulate


_LAX = dict(
    broadcast_in_dim=lambda x, *_: x,
    cond=lambda condition, yes, no, *args: yes(*args) if condition else no(*args),
    cummax=_accumulated(np.maximum),
    cummin=_accumulated(np.minimum),
    div=_div,
    empty=lambda shape, _: Ref("workspace", shape=shape),
    fori_loop=lambda start, end, body, carry: functools.reduce(
        lambda carry, i: body(np.int32(i), carry), range(int(start), int(end)), carry
    ),
    optimization_barrier=lambda x: x,
    rem=lambda a, b: np.int32(int(a) - int(_div(a, b)) * int(b)),
    rsqrt=Tile.combined,
    while_loop=_while_loop,
)


def _arguments(body: Any) -> tuple[str, ...]:
    if isinstance(body, functools.partial):
        return _arguments(body.func)[len(body.args) :]
    return body.__code__.co_varnames[: body.__code__.co_argcount]


def _run_scoped(body: Callable[..., Any], *makers: Any, collective_axes: Any = None, **named: Any) -> Any:
    """Calls `body` with the objects that SMEM, ACC and Barrier make for its arguments' names."""
    names = itertools.chain(_arguments(body), itertools.repeat("more"))
    args = [_made(make, name) for name, make in zip(names, makers)]
    return body(*args, **{name: make and make(name) for name, make in named.items()})


def _made(make: Any, name: str) -> Any:
    """The object that a maker makes; for a record of makers, the record of their objects."""
    if not dataclasses.is_dataclass(make):
        return make and make(name)
    fields = {field.name: getattr(make, field.name) for field in dataclasses.fields(make)}
    return type(make)(**{name: make and make(name) for name, make in fields.items()})


def _run_state(body: Callable[[Accumulator], None]) -> Callable[[Accumulator], Tile]:
    def run(acc: Accumulator) -> Tile:
        body(acc)
        return acc[...]

    return run


_PL = SimpleNamespace(
    cdiv=lambda a, b: -(-a // b),
    ds=lambda start, size: slice(int(start), int(start) + size),
    get_global=lambda shape: Ref("semaphores", shape=shape),
    run_scoped=_run_scoped,
    run_state=_run_state,
    when=lambda condition: lambda body: body() if condition else None,
)


def _hide_unseen(
    s: Tile, spec: AttentionSpec, query_start: Any, key_start: Any, *, keys_in_rows: bool = False, key_end: Any = None
) -> Tile:
    if key_end is None and not keys_in_rows and spec.k.shape[1] % s.shape[1]:
        key_end = spec.k.shape[1]
    return _masked(s, mask=(int(query_start), int(key_start), None if key_end is None else int(key_end)))


def _hide_other_segments(s: Tile, row_ids: Ref, column_ids: Ref) -> Tile:
    return _masked(s, segments=(row_ids.block, column_ids.block))


def _masked(s: Tile, **masks: Any) -> Tile:
    ((kind, (time, products)),) = s.origins.items()
    return Tile({kind: (time, tuple(dataclasses.replace(product, **masks) for product in products))}, s.shape)


def with_faulty(operation: str, faulty: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a part of a kernel in which an operation of plgpu is faulty.

    Args:
      faulty: takes the right operation, and the operation's arguments.
    """

    def make(right: Any) -> Callable[..., Any]:
        def part(*args: Any) -> Any:
            plgpu = right.__globals__["plgpu"]
            with mock.patch.object(plgpu, operation, functools.partial(faulty, getattr(plgpu, operation))):
                return right(*args)

        return part

    return make


class Sources:
    """Copies of the kernels' modules and of the modules that they share, with stand-ins.

    Args:
      fault: planted in the copies; its part begins with the module's last name.
    """

    def __init__(self, *modules: ModuleType, fault: Fault | None = None) -> None:
        shared = (layouts, limits, counting, planning, visibility, logits, rings)
        self.modules = [_copied(module) for module in (*shared, *modules)]
        self.kernels = self.modules[len(shared) :]
        stand_ins = dict(pl=_PL, jnp=_Numpy(), lax=SimpleNamespace(**_LAX), scale_rows=Tile.combined)
        self.bind(hide_unseen=_hide_unseen, hide_other_segments=_hide_other_segments, **stand_ins)
        for module in self.modules[: len(shared)]:
            self.bind(**{name: getattr(module, name) for name in module.__all__})
        if fault is not None:
            self._plant(fault)

    def _plant(self, fault: Fault) -> None:
        module = next(copied for copied in self.modules if copied.__name__.endswith(f".{fault.module}"))
        right = fault.right(module)
        fault.plant(module)
        # Others have imported it.
        for other in self.modules:
            if vars(other).get(fault.name) is right:
                setattr(other, fault.name, fault.right(module))

    def bind(self, **names: Any) -> None:
        for module in self.modules:
            vars(module).update({name: value for name, value in names.items() if name in vars(module)})


def _copied(module: ModuleType) -> Any:
    path, copied = Path(str(module.__file__)), ModuleType(module.__name__)
    exec(compile(path.read_text(), str(path), "exec"), vars(copied))
    return copied


# Kernels.


@dataclasses.dataclass
class Launch:
    """A kernel: `grid` and `cluster` are the sizes of their axes, by name."""

    body: Callable[[], None]
    grid: dict[str, int]
    num_warpgroups: int
    cluster: dict[str, int] = dataclasses.field(default_factory=dict)
    warpgroup: Callable[[Cta, int], Warpgroup] = Warpgroup
    order: Order = "any"


def launch_with(sources: Sources, function: Callable[..., Any], *args: Any, order: Order = "any") -> Any:
    """Calls a function that launches kernels. Returns the launches, and its results."""
    launches: list[Launch] = []

    def kernel(body: Any, out_type: Any, grid: Any, grid_names: Any, **settings: Any) -> Callable[..., Any]:
        cluster = dict(zip(settings.get("cluster_names", ()), settings.get("cluster", ()), strict=True))
        sizes = dict(zip(grid_names, grid, strict=True)), settings["num_threads"], cluster

        def call(*args: Any) -> list[Ref]:
            outs = [Ref("output", shape=x.shape) for x in out_type]
            refs = [_in_memory("array", arg) for arg in args]
            launches.append(Launch(functools.partial(body, *refs, *outs), *sizes, order=order))
            return outs

        return call

    compiler = SimpleNamespace(kernel=kernel, CompilerParams=lambda **_: None)
    names = SimpleNamespace(ShapeDtypeStruct=jax.ShapeDtypeStruct, new_ref=lambda x: x)
    sources.bind(plgpu=compiler, jax=names, lax=SimpleNamespace(**_LAX))
    return launches, function(*args)


def _in_memory(name: str, x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _in_memory(name, value) for name, value in x.items()}
    return Ref(name, x) if isinstance(x, np.ndarray) else x


def run(sources: Sources, launch: Launch) -> list[list[Warpgroup]]:
    """Runs each warpgroup, the producer first. Returns the warpgroups of each cluster."""
    clusters = []
    size = int(np.prod([*launch.cluster.values()], dtype=int))
    for number, index in enumerate(np.ndindex(*launch.grid.values())):
        cluster = []
        numbers = range(number * size, (number + 1) * size)
        for rank, cta in enumerate(Cta(number, numbers, launch.order) for number in numbers):
            for warpgroup in (launch.warpgroup(cta, i) for i in reversed(range(launch.num_warpgroups))):
                axes = dict(zip(launch.grid, map(np.int32, index)), warpgroup=np.int32(warpgroup.index))
                axes |= dict.fromkeys(launch.cluster, np.int32(rank)) or dict(cluster=np.int32(0))
                axis = dict(axis_index=axes.__getitem__, axis_size=launch.grid.__getitem__)
                sources.bind(lax=SimpleNamespace(**_LAX, **axis), plgpu=warpgroup)
                with np.errstate(over="raise"):
                    launch.body()
                warpgroup.finish()
                cluster.append(warpgroup)
        clusters.append(cluster)
    return clusters
