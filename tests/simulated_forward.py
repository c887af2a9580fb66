"""Runs the integers of the forward kernel's own source, one warpgroup after the other, and checks what it did.

`Simulation` copies the source of `attention_forward` and `attention_blocks` into modules of its own, and there puts
stand-ins in the place of lax, jnp, pl, plgpu and the functions that write MLIR or mask values; the real modules stay
as they are. Integers are numpy's int32, which must not overflow, loops and branches are Python's. An array in registers
is a `_Tile`, which knows only the product that it comes from.

Checked are, of each consumer's share of each item: that it is stored once, and where; that it comes from its queries
and, in order, from blocks of keys and of the same values, none of them padding; that of all pairs of a query and a key
those that see each other count, and no others; that slots are read between their filling and their release. Then the
warpgroups' barriers are replayed in random orders, for deadlocks and barriers that go round twice.

It sees no values, no order of memory accesses (the interpreter's race detector does) and no clusters.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from jaxkernels.pallas import attention_blocks, attention_forward
from jaxkernels.specs import AttentionSpec

__all__ = ["Case", "Simulation"]

#: What is in memory: a global array's name, and the place in it.
type _Block = tuple[Any, ...]


def _in_window(query: np.ndarray, key: np.ndarray, left: int | None, right: int | None) -> Any:
    return (left is None or key >= query - left) & (right is None or key <= query + right)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of the kernel; `integers` are the spec's optional operands by name."""

    spec: AttentionSpec
    config: attention_forward.Config
    integers: dict[str, np.ndarray]

    @property
    def offset(self) -> int:
        return int(self.integers.get("query_offset", 0))

    def key_end(self, batch: int) -> int:
        num_keys = self.spec.k.shape[1]
        return min(max(int(self.integers["key_lengths"][batch]), 0), num_keys) if self.spec.key_lengths else num_keys

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """Which queries see which keys, (B, T, S)."""
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

    def queries(self, batch: int, first: int) -> np.ndarray:
        """A consumer's queries from `first` on, without padding."""
        rows = np.arange(first, min(first + self.config.block_q, self.spec.q.shape[1]))
        if self.spec.query_lengths:
            rows = rows[rows + self.offset < self.integers["query_lengths"][batch]]
        return rows


@dataclasses.dataclass(frozen=True)
class _Logits:
    """Whose product they are, and how they are masked: query and key at which the mask begins, and where keys end."""

    queries: _Block
    keys: _Block
    mask: tuple[int, int, int | None] | None = None
    segments: tuple[_Block, _Block] | None = None


class _Tile:
    """An array in registers; what is computed from several comes from the product that was read last.

    `origin` is `_Logits`, or of an output its products: pairs of logits and values.
    """

    shape = ()

    def __init__(self, origin: Any = None, time: int = 0) -> None:
        self.origin, self.time = origin, time

    def latest(self, *others: Any, **_: Any) -> _Tile:
        return max((self, *(x for x in others if isinstance(x, _Tile))), key=lambda tile: tile.time)

    __add__ = __sub__ = __mul__ = __rmul__ = __rtruediv__ = __lt__ = __gt__ = __eq__ = latest  # type: ignore
    __getitem__ = max = sum = astype = latest
    __hash__ = None  # type: ignore


_ZEROS = _Tile()


class _Ref:
    """A reference to memory or to barriers, or with an index to a part of these; an accumulator has an origin."""

    dtype, origin = np.float16, None

    def __init__(self, name: str, array: Any = None, *, shape: Any = (), num_arrivals: int = 1, num_barriers: int = 1):
        self.name, self.array, self.shape, self.index = name, array, shape, 0
        self.num_arrivals, self.num_barriers = num_arrivals, num_barriers

    @property
    def at(self) -> _Parts:
        return _Parts(self)

    def transpose(self, _: Any) -> _Ref:
        return self

    def __getitem__(self, index: Any) -> np.int32:
        places = index if isinstance(index, tuple) else (index,)
        assert all(0 <= i < n for i, n in zip(places, np.shape(self.array))), f"{self.name}[{index}] is out of bounds"
        return np.int32(self.array[index])

    def __setitem__(self, _: Any, value: Any) -> None:
        """Stages a tile in shared memory, or clears an accumulator (to scale it changes nothing here)."""
        if isinstance(self.array, dict):
            self.array[self.slot] = value
        elif value is _ZEROS:
            self.origin = None

    @property
    def slot(self) -> tuple[str, int]:
        """A slot of a ring, or a barrier, by name and number."""
        return self.name, int(self.index)

    @property
    def block(self) -> _Block:
        """The first place of a part of global memory."""
        block = tuple(i.start if isinstance(i, slice) else int(i) for i in self.index)
        assert all(i is None or i >= 0 for i in block), f"{self.name}{block} begins before the array"
        return self.name, *block


@dataclasses.dataclass
class _Parts:
    ref: _Ref

    def __getitem__(self, index: Any) -> _Ref:
        part = copy.copy(self.ref)
        part.index = index
        return part


class _Cta:
    """What a worker does: the numbers of items that it will take, loads of each slot in order, and results."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.taken = numbers, []
        self.loads: dict[Any, list[_Block]] = collections.defaultdict(list)
        self.stores: dict[int, list[tuple[_Block, Any]]] = collections.defaultdict(list)
        self.num_arrivals: dict[str, int] = {}


class _Warpgroup:
    """plgpu for one warpgroup. The producer comes first: the consumers find all its loads."""

    ACC = staticmethod(lambda *_: _Ref)
    Barrier = staticmethod(lambda **numbers: functools.partial(_Ref, **numbers))
    layout_cast = staticmethod(lambda x, _: x)
    broadcasted_iota = staticmethod(lambda *_, **__: _Tile())
    set_max_registers = commit_smem = commit_smem_to_gmem_group = wait_smem_to_gmem = staticmethod(
        lambda *_, **__: None
    )
    TilingTransform = SwizzleTransform = staticmethod(lambda _: None)

    def __init__(self, cta: _Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.trace: list[tuple[str, tuple[str, int]]] = []
        self.counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.staged: dict[tuple[str, int], _Tile] = {}
        self.taken_number = np.zeros(1, np.int32)
        self.clock = itertools.count(1)

    def SMEM(self, *_: Any, **__: Any) -> Callable[[str], _Ref]:  # noqa: N802
        return lambda name: _Ref(name, self.taken_number if name == "number_smem" else self.staged)

    def count_up(self, *_: Any) -> None:
        self.taken_number[0] = self.cta.numbers.pop(0)
        self.cta.taken.append(self.taken_number[0])

    def _use(self, kind: str, barrier: _Ref) -> None:
        assert 0 <= barrier.index < barrier.num_barriers, f"no barrier {barrier.slot}"
        self.cta.num_arrivals[barrier.name] = barrier.num_arrivals
        self.counts[kind, *barrier.slot] += 1
        self.trace.append((kind, barrier.slot))

    def barrier_arrive(self, barrier: _Ref) -> None:
        self._use("arrive", barrier)

    def barrier_wait(self, barrier: _Ref) -> None:
        self._use("wait", barrier)
        if barrier.name == "number_full":
            self.taken_number[0] = self.cta.taken[self.counts["wait", *barrier.slot] - 1]

    def copy_gmem_to_smem(self, source: _Ref, to: _Ref, full: _Ref, collective_axes: Any = None) -> None:
        block = source.block
        assert source.name not in ("k", "v") or block[2] < source.shape[1], f"{block} is beyond the array"
        self.cta.loads[to.slot].append(block)
        self.barrier_arrive(full)

    def copy_smem_to_gmem(self, smem: _Ref, to: _Ref, commit_group: bool) -> None:
        self.cta.stores[self.index].append((to.block, self.staged[smem.slot].origin))

    def wgmma(self, acc: _Ref, a: Any, b: _Ref) -> None:
        """S = Q K^T, or O += P V."""
        if isinstance(a, _Ref):
            acc.origin = _Logits(self._content(a), self._content(b))
        else:
            acc.origin = (*(acc.origin or ()), (a.origin, self._content(b)))

    def wgmma_accumulator_load(self, acc: _Ref, wait_n: int) -> _Tile:
        return _Tile(acc.origin, next(self.clock))

    def _content(self, part: _Ref) -> _Block:
        """What a slot holds for who has waited for it; garbage for who has not, or has released it."""
        ring, slot = part.name.removesuffix("_smem"), int(part.index)
        fillings = self.counts["wait", f"{ring}_full", slot]
        releases = self.counts["arrive", f"{ring}_empty", slot] - 1  # At first all slots are released.
        if releases >= fillings:
            return ("garbage",)
        assert fillings - releases == 1, f"slot {slot} of {ring} is waited for again before it is released"
        loads = self.cta.loads[part.slot]
        assert fillings <= len(loads), f"slot {slot} of {ring} is waited for once too often"
        return loads[fillings - 1]


class _Numpy:
    """jnp: of integers numpy's functions; of tiles the latest."""

    full = staticmethod(lambda *_: _Tile())
    zeros_like = staticmethod(lambda _: _ZEROS)

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if isinstance(value, type) or not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            tiles = [x for x in args if isinstance(x, _Tile)]
            return tiles[0].latest(*tiles) if tiles else value(*args, **kwargs)

        return call


def _div(a: Any, b: Any) -> np.int32:
    quotient = abs(int(a)) // abs(int(b))
    return np.int32(quotient if (a >= 0) == (b >= 0) else -quotient)


def _while_loop(cond: Callable[..., Any], body: Callable[..., Any], carry: Any) -> Any:
    while cond(carry):
        carry = body(carry)
    return carry


_LAX = dict(
    broadcast_in_dim=lambda x, *_: x,
    cond=lambda condition, yes, no, *args: yes(*args) if condition else no(*args),
    div=_div,
    fori_loop=lambda start, end, body, carry: functools.reduce(
        lambda carry, i: body(np.int32(i), carry), range(int(start), int(end)), carry
    ),
    optimization_barrier=lambda x: x,
    rem=lambda a, b: np.int32(int(a) - int(_div(a, b)) * int(b)),
    while_loop=_while_loop,
)


def _run_scoped(body: Callable[..., Any], *makers: Any, collective_axes: Any = None, **named: Any) -> Any:
    """Calls `body` with what SMEM, ACC and Barrier make of its arguments' names."""
    args = [make and make(name) for name, make in zip(inspect.signature(body).parameters, makers)]
    return body(*args, **{name: make(name) for name, make in named.items()})


_PL = SimpleNamespace(
    cdiv=lambda a, b: -(-a // b),
    ds=lambda start, size: slice(int(start), int(start) + size),
    when=lambda condition: lambda body: body() if condition else None,
    run_scoped=_run_scoped,
)


def _hide_unseen(s: _Tile, spec: AttentionSpec, query_start: Any, key_start: Any, key_end: Any = None) -> _Tile:
    mask = int(query_start), int(key_start), None if key_end is None else int(key_end)
    return _Tile(dataclasses.replace(s.origin, mask=mask), s.time)


def _hide_other_segments(s: _Tile, row_ids: _Ref, column_ids: _Ref) -> _Tile:
    return _Tile(dataclasses.replace(s.origin, segments=(row_ids.block, column_ids.block)), s.time)


def _copied(module: ModuleType, source: str) -> Any:
    copied = ModuleType(module.__name__)
    exec(compile(source, str(module.__file__), "exec"), vars(copied))
    return copied


class Simulation:
    """The kernel on stand-ins.

    Args:
      edit: a text that is in the source once, and what to put there.
    """

    def __init__(self, edit: tuple[str, str] | None = None) -> None:
        modules = attention_blocks, attention_forward
        sources = [Path(str(module.__file__)).read_text() for module in modules]
        if edit is not None:
            if (count := sum(source.count(edit[0]) for source in sources)) != 1:
                raise ValueError(f"is {count} times in the source, not once: {edit[0]}")
            sources = [source.replace(*edit) for source in sources]
        self.blocks, self.forward = map(_copied, modules, sources)
        self._bind(lax=SimpleNamespace(**_LAX), jnp=_Numpy())
        shared = {name: getattr(self.blocks, name) for name in self.blocks.__all__ if name in vars(self.forward)}
        masks = dict(hide_unseen=_hide_unseen, hide_other_segments=_hide_other_segments)
        vars(self.forward).update(shared, pl=_PL, scale_rows=_Tile.latest, **masks)

    def _bind(self, **names: Any) -> None:
        vars(self.blocks).update(names)
        vars(self.forward).update(names)

    def check(self, case: Case, rng: np.random.Generator) -> None:
        """Runs all workers, each of which takes random items where arrays tell how long these are."""
        spec, num_items = case.spec, self.forward._num_items(case.spec, case.config)
        if self.blocks.is_known_at_run_time(spec):
            items = [[worker] for worker in range(min(spec.target.num_sms, num_items))]
            for number in range(len(items), num_items):
                items[rng.integers(len(items))].append(number)
            plan = np.array([num_items])
        else:
            plan = self.forward._plan(spec, case.config)
            items = [row[1 : 1 + row[0]].tolist() for row in plan]
        assert sorted(itertools.chain(*items)) == list(range(num_items)), "items are left out, or done twice"
        for worker, numbers in enumerate(items):
            cta = _Cta([*numbers[1:], num_items + int(rng.integers(3))])
            with np.errstate(over="raise"):
                warpgroups = self._run(case, worker, cta, plan)
            for _ in range(3):
                _replay(warpgroups, cta.num_arrivals, rng)
            for consumer in range(case.config.num_consumers):
                _check_stores(case, consumer, numbers, cta.stores[consumer])

    def _run(self, case: Case, worker: int, cta: _Cta, plan: np.ndarray) -> list[_Warpgroup]:
        """The producer, then the consumers."""
        spec, config = case.spec, case.config
        dims = self.blocks.padded_head_dims(spec, config.head_multiple)
        named = (("q", spec.q, dims[0]), ("k", spec.k, dims[0]), ("v", spec.v, dims[1]))
        operands = [_Ref(name, shape=(*x.shape[:3], columns)) for name, x, columns in named]
        inputs = self.forward._inputs(spec, config, _Tile(), case.integers)
        refs = _Ref("plan", plan), {name: _Ref(name, x) for name, x in inputs.items()}, _Ref("out"), _Ref("lse")
        warpgroups = []
        for index in (config.num_consumers, *range(config.num_consumers)):
            warpgroup = _Warpgroup(cta, index)
            axes = dict(warpgroup=np.int32(index), worker=np.int32(worker))
            lax = SimpleNamespace(**_LAX, axis_index=axes.__getitem__)
            self._bind(lax=lax, plgpu=warpgroup, count_up=warpgroup.count_up)
            self.forward._kernel(*operands, *refs, spec=spec, config=config)
            warpgroups.append(warpgroup)
        return warpgroups


def _replay(warpgroups: list[_Warpgroup], num_arrivals: dict[str, int], rng: np.random.Generator) -> None:
    """Takes the warpgroups' waits and arrivals in a random order, a few of each at a time."""
    position = [0] * len(warpgroups)
    arrived: collections.Counter[Any] = collections.Counter()
    waited: list[collections.Counter[Any]] = [collections.Counter() for _ in warpgroups]

    def advance(index: int) -> bool:
        """Whether a warpgroup could do anything."""
        trace, start = warpgroups[index].trace, position[index]
        for kind, barrier in trace[start : start + int(rng.integers(1, 12))]:
            if kind == "arrive":
                arrived[barrier] += 1
            else:
                ahead = arrived[barrier] // num_arrivals[barrier[0]] - waited[index][barrier]
                if ahead == 0:
                    break
                assert ahead == 1, f"{barrier} went round twice"
                waited[index][barrier] += 1
            position[index] += 1
        return position[index] > start

    while live := [i for i, warpgroup in enumerate(warpgroups) if position[i] < len(warpgroup.trace)]:
        can_go_on = any(advance(i) for i in rng.permutation(live))
        assert can_go_on, f"deadlock: {[(i, warpgroups[i].trace[position[i]]) for i in live]}"
    for barrier, count in arrived.items():
        assert count % num_arrivals[barrier[0]] == 0, f"arrivals are left over at {barrier}"


def _check_stores(case: Case, consumer: int, numbers: list[int], stores: list[tuple[_Block, Any]]) -> None:
    """A consumer's results of a worker's items, in order: pieces of outputs, and logsumexps."""
    spec, config = case.spec, case.config
    num_q_blocks = -(-spec.q.shape[1] // attention_forward._rows(config))
    _, value_dim = attention_blocks.padded_head_dims(spec, config.head_multiple)
    columns = range(0, value_dim, attention_blocks.swizzle_span(value_dim))
    outs, lses = ([store for store in stores if store[0][0] == name] for name in ("out", "lse"))
    assert (len(outs), len(lses)) == (len(columns) * len(numbers), len(numbers)), "some results are not stored once"
    for nth, number in enumerate(numbers):
        item, q_block = divmod(number, num_q_blocks)
        if spec.causal and attention_blocks.is_known_at_run_time(spec):
            q_block = num_q_blocks - 1 - q_block
        (batch, head), first = divmod(item, spec.q.shape[2]), attention_forward._rows(config) * q_block
        first += consumer * config.block_q
        pieces, (lse, last_logits) = outs[nth * len(columns) : (nth + 1) * len(columns)], lses[nth]
        places = [place for place, _ in pieces]
        assert places == [("out", batch, first, head, column) for column in columns], f"stored at {places}"
        assert lse == ("lse", batch, head, first), f"stored at {lse}"
        products = pieces[0][1]
        assert all(origin == products for _, origin in pieces), "pieces of an output differ"
        assert products, "an output without products"
        unmasked = dict(mask=None, segments=None)
        last, of_output = (dataclasses.replace(logits, **unmasked) for logits in (last_logits, products[-1][0]))
        assert last == of_output, f"a logsumexp of {last}, an output of {of_output}"
        _check_products(case, batch, head, first, products)


def _check_products(case: Case, batch: int, head: int, first: int, products: list[tuple[_Logits, _Block]]) -> None:
    """The blocks that a consumer's queries from `first` on have visited, and what it has masked."""
    spec, block_kv = case.spec, case.config.block_kv
    rows, last, num_pairs = case.queries(batch, first), None, 0
    for logits, values in products:
        assert logits.queries == ("q", batch, first, head), f"{logits.queries} for {(batch, first, head)}"
        assert logits.keys[0] == "k", logits
        _, _, start, kv_head = logits.keys
        assert logits.keys == ("k", batch, start, head // spec.group_size), logits
        assert start % block_kv == 0, logits
        assert last is None or start == last - block_kv, f"{start} after {last}"
        last = start
        _check_values(case, values, batch, start, kv_head)
        expected = np.zeros((len(rows), block_kv), bool)
        seen = case.visible[batch, rows, start : start + block_kv]
        expected[:, : seen.shape[1]] = seen
        assert (_unmasked(case, logits, batch, rows, first) == expected).all(), f"wrong pairs: {logits}"
        num_pairs += seen.sum()
    assert num_pairs == case.visible[batch, rows].sum(), f"pairs are left out: {batch, first}"


def _check_values(case: Case, values: _Block, batch: int, start: int, kv_head: int) -> None:
    """Those of the keys from `start` on, and none of padding."""
    key_end, block_kv = case.key_end(batch), case.config.block_kv
    if values[0] == "edge_values":
        assert values == ("edge_values", batch, None, kv_head), values
        assert start // block_kv == key_end // block_kv, f"the edge's values for the keys from {start} on"
    else:
        assert values == ("v", batch, start, kv_head), f"{values} for the keys from {start} on"
        assert not case.spec.key_lengths or start + block_kv <= key_end, "values of padding"


def _unmasked(case: Case, logits: _Logits, batch: int, rows: np.ndarray, first: int) -> np.ndarray:
    """Which logits the kernel's masks leave."""
    start, key_end = logits.keys[2], case.key_end(batch)
    key, query = np.arange(start, start + case.config.block_kv), rows[:, None] + case.offset
    left = np.ones((len(rows), len(key)), bool)
    if logits.mask is not None:
        *places, end = logits.mask
        assert places == [first + case.offset, start], f"masked at {places}"
        assert key_end == (case.spec.k.shape[1] if end is None else end), f"keys end at {end}, not at {key_end}"
        left &= (key < key_end) & _in_window(query, key, *attention_blocks._window(case.spec))
    if logits.segments is not None:
        assert logits.segments == (("query_segments", batch, first), ("key_segments", batch, start)), logits
        ids = np.pad(case.integers["key_segments"][batch], (0, case.config.block_kv))[key]
        left &= case.integers["query_segments"][batch, rows][:, None] == ids
    return left
