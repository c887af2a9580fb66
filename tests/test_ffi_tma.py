"""The operations of the Tensor Memory Accelerator: lowered everywhere, and run against NumPy, on a Hopper GPU and, in
fewer cases, on an emulator of the copy engine (tests/cuda/emulated)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from emulated import NEEDS_COMPILER, Emulator

import jaxkernels as jk
from jaxkernels.core import hardware
from jaxkernels.ffi import tma

# Values.


def places(shape: tuple[int, ...], start: np.ndarray, tile: tuple[int, ...]) -> tuple[tuple, tuple]:
    """The part of a tile inside the tensor: its slices in the tensor, and in the tile."""
    low = np.clip(start, 0, shape)
    high = np.clip(start + tile, low, shape)
    inside = tuple(map(slice, low, high))
    return inside, tuple(map(slice, low - start, high - start))


def loaded(x: np.ndarray, starts: np.ndarray, tile: tuple[int, ...], fill: float = 0) -> np.ndarray:
    out = np.full((len(starts), *tile), fill, x.dtype)
    for t, start in enumerate(starts):
        of_x, of_tile = places(x.shape, start, tile)
        out[t][of_tile] = x[of_x]
    return out


WRITES = {"store": lambda old, new: new, "add": np.add, "min": np.minimum, "max": np.maximum}


def written(x: np.ndarray, tiles: np.ndarray, starts: np.ndarray, op: str) -> np.ndarray:
    out = x.copy()
    for tile, start in zip(tiles, starts):
        of_x, of_tile = places(x.shape, start, tile.shape)
        out[of_x] = WRITES[op](out[of_x], tile[of_tile])
    return out


# Cases.


def draw(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Whole numbers so small that any sum of a few of them is exact in every type."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype == jnp.bool_ else 9, shape)
    return values.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{jnp.dtype(self.dtype).name}-{'x'.join(map(str, self.shape))}-{'x'.join(map(str, self.tile))}"

    @property
    def starts(self) -> np.ndarray:
        """Everywhere: at the corners, over each edge, wholly outside, and on top of one another.

        Half of them begin on a multiple of 16 bytes in their row, where the copy engine takes them as they are.
        """
        rng = np.random.default_rng(1)
        drawn = rng.integers([-t for t in self.tile], [n + 3 for n in self.shape], (20, len(self.shape)))
        step = 16 // jnp.dtype(self.dtype or jnp.uint8).itemsize
        drawn[::2, -1] = drawn[::2, -1] // step * step
        drawn[::4] = np.maximum(drawn[::4], 0)
        ends = np.array([np.zeros(len(self.shape)), np.array(self.shape) - self.tile, -np.array(self.tile), self.shape])
        return np.concatenate([drawn, ends]).astype(np.int32)

    def apart(self, before: int) -> np.ndarray:
        """Tiles side by side over all of the tensor, the first of a row so many elements before it."""
        step = [range(-min(before, t - 1), n, t) for n, t in zip(self.shape, self.tile)]
        return np.array(list(itertools.product(*step)), np.int32)


CASES = [
    Case((4096,), (256,), jnp.float32),
    Case((1001,), (37,), jnp.bfloat16),
    Case((7,), (16,), jnp.uint8),
    Case((1000, 200), (64, 64), jnp.bfloat16),
    Case((300, 512), (256, 200), jnp.float32),  # 200 KB: one tile fills the shared memory of a multiprocessor
    Case((130, 77), (128, 30), jnp.float16),
    Case((77, 99), (32, 63), jnp.int32),
    Case((33, 47), (1, 256), jnp.int8),
    Case((40, 31), (16, 16), jnp.bool_),
    Case((24, 33), (8, 16), jnp.float8_e4m3fn),
    Case((17, 21), (4, 5), jnp.complex64),
    Case((40, 50, 37), (2, 16, 24), jnp.bfloat16),
    Case((5, 12, 17, 20), (4, 3, 8, 8), jnp.float32),
    Case((3, 4, 9, 10, 11), (2, 2, 4, 8, 6), jnp.float16),
    Case((6, 5, 4, 3, 16), (1, 5, 2, 3, 16), jnp.uint32),
]
REDUCTIONS = [(name, op) for name, ops in tma._REDUCTIONS.items() for op in ops]
REDUCED = [Case((1001,), (37,), None), Case((130, 77), (64, 30), None), Case((5, 9, 12, 17, 11), (2, 1, 4, 8, 6), None)]


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every kind of kernel of tma.cu, with operands: what can be lowered without a GPU."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for case in CASES:
        x, starts = np.zeros(case.shape, case.dtype), case.starts
        found[f"load-{case}"] = (functools.partial(tma.load, tile=case.tile), (x, starts))
        for cluster in (2, 4):
            multicast = functools.partial(tma.multicast_load, tile=case.tile, cluster=cluster)
            found[f"multicast{cluster}-{case}"] = (multicast, (x, starts))
    for case in CASES:
        tiles = np.zeros((len(case.starts), *case.tile), case.dtype)
        found[f"store-{case}"] = (tma.store, (np.zeros(case.shape, case.dtype), tiles, case.starts))
    for dtype, op in REDUCTIONS:
        for case in REDUCED:
            case = dataclasses.replace(case, dtype=jnp.dtype(dtype))
            tiles = np.zeros((len(case.starts), *case.tile), case.dtype)
            reduce = functools.partial(tma.reduce, op=op)
            found[f"{op}-{case}"] = (reduce, (np.zeros(case.shape, case.dtype), tiles, case.starts))
    return found


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("program", programs().values(), ids=programs())
def test_lowers_without_a_gpu(program):
    fun, operands = program
    text = jax.jit(fun).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{jk.ffi.TARGET}") == 1
    out = jax.eval_shape(fun, *operands)
    assert out.dtype == operands[0].dtype


def test_pads_only_rows_that_need_it():
    starts = np.zeros((3, 2), np.int32)
    load = jax.jit(functools.partial(tma.load, tile=(8, 8)))
    lower = lambda x: load.trace(x, starts).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.pad" in lower(np.zeros((24, 61), np.float32))
    assert "stablehlo.pad" not in lower(np.zeros((24, 64), np.float32))
    # The tensor map keeps the size: what lies behind it is filled, not loaded.
    assert "parameter0.sizes = dense<[61, 24]>" in lower(np.zeros((24, 61), np.float32))
    assert "parameter0.byte_strides = dense<256>" in lower(np.zeros((24, 61), np.float32))


def test_starts_beyond_32_bits_stay_outside():
    x = np.zeros((24, 64), np.float32)
    starts_of = lambda starts: tma._checked("load", x, starts, (8, 16))[1]
    with jax.enable_x64(True):
        np.testing.assert_array_equal(starts_of(np.int64([[2**32, -(2**40)], [3, -5]])), [[24, -16], [3, -5]])
    np.testing.assert_array_equal(starts_of(np.uint32([[2**32 - 1, 3]])), [[24, 3]])


# Refusals.

X = np.zeros((24, 64), np.float32)
S = np.zeros((3, 2), np.int32)
T = np.zeros((3, 8, 8), np.float32)
REFUSED = [
    (lambda: tma.load(np.float32(1), S, ()), "load", "x must have 1 to 5 dimensions; got shape (). Merge dimensions."),
    (lambda: tma.load(np.zeros((1,) * 6), S, (1,) * 6), "load", "x must have 1 to 5 dimensions; got shape (1, 1, 1, 1"),
    (lambda: tma.load(np.zeros((0, 3)), S, (1, 4)), "load", "x must have elements; got shape (0, 3). There is nothing"),
    (lambda: tma.load(X, S, (8,)), "load", "a tile has as many dimensions as x; got tile=(8,), x of (24, 64). Use"),
    (lambda: tma.load(X, S, (8, 257)), "load", "a tile has 1 to 256 elements in each dimension; got tile=(8, 257)."),
    (lambda: tma.load(X, S, (0, 8)), "load", "a tile has 1 to 256 elements in each dimension; got tile=(0, 8)."),
    (lambda: tma.load(X, S, (8.5, 8)), "load", "tile must be whole numbers, one for each dimension of x; got tile=(8"),
    (lambda: tma.load(X, S, 8), "load", "tile must be whole numbers, one for each dimension of x; got tile=8. Divide"),
    (lambda: tma.load(jax.random.split(jax.random.key(0)), S[:, :1], (2,)), "load", "elements must have one of (1, 2, "
     "4, 8) bytes; got key<fry>. Use another type."),
    (lambda: tma.load(X, S[0], (8, 8)), "load", "starts must be integers of shape [tiles, 2]; got int32 (2,). Give"),
    (lambda: tma.load(X, S[:, :1], (8, 8)), "load", "starts must be integers of shape [tiles, 2]; got int32 (3, 1)."),
    (lambda: tma.load(X, S * 1.0, (8, 8)), "load", "starts must be integers of shape [tiles, 2]; got float32 (3, 2)."),
    (lambda: tma.multicast_load(X, S, (8, 8), cluster=3), "multicast_load", "cluster must be one of (2, 4); got 3."),
    (lambda: tma.multicast_load(X, S, (513, 8), cluster=2), "multicast_load", "a tile has 1 to 256 elements in each"),
    (lambda: tma.store(X, T[:2], S), "store", "tiles must be 3 of float32, as many as starts; got float32 (2, 8, 8)."),
    (lambda: tma.store(X, T.astype(int), S), "store", "tiles must be 3 of float32, as many as starts; got int32 (3,"),
    (lambda: tma.reduce(X, T, S, "mul"), "reduce", "op must be add, min or max; got 'mul'. These are the hardware's."),
    (lambda: tma.reduce(X, T, S, "min"), "reduce", "the hardware does min in bfloat16, float16, int32, uint32; got "
     "float32. Convert it, or use x.at[...].min."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "op", "message"), REFUSED)
def test_refuses_what_the_hardware_does_not_take(call, op, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'tma.{op}[cuda]: {message}')}") as error:
        call()
    assert re.search(r"; got .*\. [A-Z].*\.$", str(error.value)), "a message ends with a way out"


def test_refuses_elements_of_16_bytes():
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"^tma\.load\[cuda\]: elements .*; got complex128\. Use "),
    ):
        tma.load(X.astype(np.complex128), S, (8, 8))


def test_refuses_tiles_beyond_shared_memory_and_nan_in_integers():
    lower = lambda x, **kwargs: jax.eval_shape(lambda x: tma.load(x, S, **kwargs), x)
    with pytest.raises(ValueError, match=r"^load_tiles\[cuda\]: a block has at most 232448 bytes of shared memory on "):
        lower(X, tile=(256, 256))
    with pytest.raises(ValueError, match=r'^load_tiles\[cuda\]: parameter 0: fill="nan" needs floating point'):
        lower(X.astype(np.int32), tile=(8, 8), fill="nan")


def test_no_tiles_are_no_launch():
    none = S[:0]
    assert tma.load(X, none, (8, 8)).shape == (0, 8, 8)
    assert tma.multicast_load(X, none, (8, 8), cluster=4).shape == (0, 4, 8, 8)
    np.testing.assert_array_equal(tma.store(X + 1, T[:0], none), X + 1)
    np.testing.assert_array_equal(tma.reduce(X + 1, T[:0], none), X + 1)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (lambda tiles: tma.store(X, tiles, S), "store_tiles[cuda]: has no derivative"),
        (
            lambda tiles: tma.reduce(X.astype(jnp.bfloat16), tiles.astype(jnp.bfloat16), S, "max"),
            'tma.reduce[cuda]: only op="add" has a gradient; got "max". Use x.at[...].max.',
        ),
        (lambda tiles: tma.multicast_load(tiles[0], S, (8, 8), cluster=2), "multicast_tiles[cuda]: has no derivative"),
    ],
)
def test_derivatives_that_are_none_are_errors(fun, message):
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
        jax.eval_shape(jax.grad(lambda tiles: fun(tiles).sum()), T)


def test_gradient_of_a_load_needs_a_type_that_is_added():
    with pytest.raises(
        NotImplementedError, match=r"^tma\.load\[cuda\]: the gradient adds tiles up, .*; got float8_e4m3fn\."
    ):
        jax.eval_shape(
            jax.grad(lambda x: tma.load(x, S, (8, 16)).astype(jnp.float32).sum()), X.astype(jnp.float8_e4m3fn)
        )


# Values.

#: Text of tma.cu that a C++ compiler refuses, and its replacement. Threads announce what they lay out in shared memory.
_TRANSLATED = {
    "extern __shared__ unsigned char dynamic_smem[];": "#define dynamic_smem emulator::shared_memory()",
    "__shared__ tma::u64 full;": "tma::u64& full = emulator::static_shared<tma::u64>();",
    "box_smem[i] = inside ? tile[from] : neutral;":
    "emulator::write_shared(tma::shared_address(&box_smem[i]), inside ? tile[from] : neutral);",
}  # fmt: skip


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    names = ("load_tiles", "multicast_tiles", "store_tiles", "reduce_tiles")
    emulator = Emulator(libraries, dict.fromkeys(names, _TRANSLATED), smem_alignment=16)

    def call(kernel: jk.ffi.CudaKernel, *operands: Any, **constants: Any) -> jax.Array:
        (result,) = kernel._run(constants, hardware.lookup("NVIDIA H200"), *map(jnp.asarray, operands))
        return result

    monkeypatch.setattr(jk.ffi.CudaKernel, "__call__", call)
    with emulator.installed():
        yield emulator


@pytest.fixture(
    params=[
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulator", marks=[NEEDS_COMPILER, pytest.mark.sampled(one_in=8)]),
    ]
)
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """As `jax.jit` on the GPU; on the emulator, which JAX does not trace, the function itself."""
    if request.param == "gpu":
        return jax.jit
    request.getfixturevalue("emulator")
    return lambda function: function


def same(actual: Any, expected: np.ndarray) -> None:
    """Asserts equality of floating-point arrays; NumPy knows NaN from numbers in its own types only."""
    np.testing.assert_array_equal(np.asarray(actual).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_load(case, run):
    x = draw(case.shape, case.dtype)
    out = run(functools.partial(tma.load, tile=case.tile))(x, case.starts)
    np.testing.assert_array_equal(np.asarray(out), loaded(x, case.starts, case.tile))


@pytest.mark.parametrize("case", [case for case in CASES if jnp.dtype(case.dtype).name in tma._REDUCTIONS], ids=str)
def test_load_fills_with_nan_behind_padded_rows_too(case, run):
    if not jnp.issubdtype(case.dtype, jnp.floating):
        case = dataclasses.replace(case, dtype=jnp.float32)
    x = draw(case.shape, case.dtype)
    out = run(functools.partial(tma.load, tile=case.tile, fill="nan"))(x, case.starts)
    same(out, loaded(x, case.starts, case.tile, np.nan))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_multicast_load(case, cluster, run):
    x = draw(case.shape, case.dtype)
    out = run(functools.partial(tma.multicast_load, tile=case.tile, cluster=cluster))(x, case.starts)
    expected = np.repeat(loaded(x, case.starts, case.tile)[:, None], cluster, axis=1)
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_store(case, before, run):
    starts = case.apart(before)
    x, tiles = draw(case.shape, case.dtype), draw((len(starts), *case.tile), case.dtype, seed=1)
    out = run(tma.store)(x, tiles, starts)
    np.testing.assert_array_equal(np.asarray(out), written(x, tiles, starts, "store"))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
@pytest.mark.parametrize("case", REDUCED, ids=lambda case: str(dataclasses.replace(case, dtype=jnp.float32)))
def test_reduce(case, dtype, op, run):
    dtype = jnp.dtype(dtype)
    x, tiles = draw(case.shape, dtype), draw((len(case.starts), *case.tile), dtype, seed=1)
    if dtype != jnp.uint32:
        x, tiles = x - np.asarray(4, dtype), tiles - np.asarray(4, dtype)
    out = run(functools.partial(tma.reduce, op=op))(x, tiles, case.starts)
    np.testing.assert_array_equal(np.asarray(out), written(x, tiles, case.starts, op))


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reduce_leaves_neighbours_as_they_are(dtype, op, run):
    # A row of 3 elements is moved as 16 bytes: what is combined with the neighbours must not show, not even in a sign.
    extremes = [-0.0, 0.0, np.inf, -np.inf, np.nan]
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        extremes = [0, np.iinfo(dtype).min, np.iinfo(dtype).max]
    tiles = np.full((1, 1, 3), 2, dtype)
    reduce = run(functools.partial(tma.reduce, op=op))
    bits = f"u{tiles.dtype.itemsize}"
    # The engine combines what begins on 16 bytes, with the padding of `tiles`; else threads lay out what it combines.
    for begin, first in itertools.product((5, 8), range(len(extremes))):
        x = np.resize(np.roll(np.array(extremes, dtype), first), (4, 23))
        out = np.asarray(reduce(x, tiles, np.array([[1, begin]], np.int32)))
        same = np.isnan(x) & np.isnan(out) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, bool)
        same[1, begin : begin + 3] = True
        np.testing.assert_array_equal(out.view(bits)[~same], x.view(bits)[~same])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_min_and_max_prefer_numbers_to_nan(dtype, run):
    values = np.array([1, -1, np.nan, np.inf, -np.inf, -0.0, 0.0, 2], dtype)
    x, tile = np.repeat(values[:, None], 8, 1), np.repeat(values[None], 8, 0)
    for op, expected in (("min", np.fmin), ("max", np.fmax)):
        out = np.asarray(run(functools.partial(tma.reduce, op=op))(x, tile[None], np.zeros((1, 2), np.int32)))
        same(out, expected(x, tile))
    zeros = np.array([[-0.0] * 8, [0.0] * 8], dtype)
    for op, sign in (("min", True), ("max", False)):
        out = run(functools.partial(tma.reduce, op=op))(zeros, zeros[None, ::-1], np.zeros((1, 2), np.int32))
        np.testing.assert_array_equal(np.signbit(np.asarray(out).astype(np.float32)), np.full((2, 8), sign))


@NEEDS_COMPILER
def test_what_threads_lay_out_is_fenced(emulator):
    emulator.edits = {"  tma::fence_proxy_async();\n": ""}
    x, tile = np.zeros((4, 23), np.float32), np.ones((1, 1, 3), np.float32)
    unfenced = r"^reduce_tiles<.*>: .*: a store reads a byte at .*, which .* wrote without fence\.proxy\.async "
    with pytest.raises(RuntimeError, match=unfenced):
        tma.reduce(x, tile, np.array([[1, 5]], np.int32))


@pytest.mark.gpu
def test_everything_at_once_is_bitwise_the_same_twice():
    x, starts = draw((500, 333), jnp.bfloat16), Case((500, 333), (64, 40), None).starts

    @jax.jit
    def program(x, starts):
        tiles = tma.load(x, starts, (64, 40))
        x = tma.reduce(x, tiles, starts, "max")
        x = tma.reduce(x, tma.multicast_load(x, starts, (64, 40), cluster=2)[:, 1], starts, "min")
        return tma.store(x, tma.load(x, starts[:1], (64, 40)), starts[-2:-1])

    first = np.asarray(program(x, starts))
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(program(x, starts)).view(np.uint16), first.view(np.uint16))


@pytest.mark.gpu
def test_vmap_and_gradients():
    case = Case((3, 60, 45), (8, 20), jnp.float32)
    x, starts = draw(case.shape, case.dtype), Case((60, 45), (8, 20), None).starts
    load = functools.partial(tma.load, tile=case.tile)
    out = jax.jit(jax.vmap(load, (0, None)))(x, starts)
    np.testing.assert_array_equal(np.asarray(out), np.stack([loaded(row, starts, case.tile) for row in x]))

    weights = draw((len(starts), *case.tile), case.dtype, seed=1)
    dx = jax.jit(jax.grad(lambda x: (load(x, starts) * weights).sum()))(x[0])
    np.testing.assert_array_equal(np.asarray(dx), written(np.zeros_like(x[0]), weights, starts, "add"))

    weights_x = draw(case.shape[1:], case.dtype, seed=2)
    f = lambda x, tiles: (tma.reduce(x, tiles, starts) * weights_x).sum()
    dx, dtiles = jax.jit(jax.grad(f, (0, 1)))(x[0], weights)
    np.testing.assert_array_equal(np.asarray(dx), weights_x)
    np.testing.assert_array_equal(np.asarray(dtiles), loaded(weights_x, starts, case.tile))


SANITIZED = """
from jaxkernels.ffi import tma

starts = np.array([[-3, -5], [0, 0], [60, 40], [100, 100], [20, 8]], np.int32)
x = jax.device_put(np.ones((77, 45), np.float32))
tiles = jax.device_put(np.ones((5, 16, 24), np.float32))
steps = dict(
    loads=lambda: [
        jax.jit(lambda x: tma.load(x, starts, (16, 24)))(x),
        jax.jit(lambda x: tma.multicast_load(x, starts, (16, 24), cluster=2))(x),
        jax.jit(lambda x: tma.multicast_load(x, starts, (16, 24), cluster=4))(x),
    ],
    stores=lambda: [jax.jit(tma.store)(x, tiles, starts), jax.jit(tma.reduce)(x, tiles, starts)],
)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "steps"),
    [
        ("memcheck", ("loads", "planted")),
        ("racecheck", ("loads", "planted")),
        ("memcheck", ("stores",)),
        ("racecheck", ("planted", "stores")),
    ],
)
def test_compute_sanitizer_finds_what_is_planted_and_nothing_else(tool, steps):
    sanitizer.assert_finds_nothing_else(tool, SANITIZED, steps)


@pytest.mark.parametrize("op", ["load", "multicast_load", "store", "reduce"])
def test_no_argument_fails_obscurely(op):
    x = jnp.zeros((8, 16), jnp.float32)
    starts, tiles = jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 4, 8), jnp.float32)
    arguments: dict[str, dict[str, Any]] = {
        "load": dict(x=x, starts=starts, tile=(4, 8), fill="zeros"),
        "multicast_load": dict(x=x, starts=starts, tile=(4, 8), cluster=2, fill="zeros"),
        "store": dict(x=x, tiles=tiles, starts=starts),
        "reduce": dict(x=x, tiles=tiles, starts=starts, op="add"),
    }
    for name in arguments[op]:
        for value in (None, "x", 2.0, float("nan"), -1, 2**70, [], {}, object(), [None], ["x"]):
            changed = arguments[op] | {name: value}
            with pytest.raises(ValueError, match=rf"^tma\.{op}\[cuda\]: .*; got "):
                jax.eval_shape(lambda changed=changed: getattr(tma, op)(**changed))


def test_what_is_no_array_is_named():
    with pytest.raises(
        ValueError, match=r"^tma\.load\[cuda\]: x must be an array; got None\. Use jax.numpy.asarray\.$"
    ):
        tma.load(None, jnp.zeros((2, 2), jnp.int32), (4, 8))
