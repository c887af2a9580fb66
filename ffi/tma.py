"""The operations of Hopper's Tensor Memory Accelerator, each as a JAX function.

A tile is a box of a tensor, up to 256 elements in each dimension, that one instruction moves between
device memory and shared memory. These functions move many, at coordinates that the device computes:

    load            tiles of x                      out[t] = x[starts[t] : starts[t] + tile]
    multicast_load  the same, once per cluster      out[t, c] = x[starts[t] : starts[t] + tile]
    store           tiles into x                    x[starts[t] : starts[t] + tile] = tiles[t]
    reduce          tiles combined with x           x[starts[t] : starts[t] + tile] += tiles[t], or min, max

Coordinates may lie anywhere, negative ones too: what a load reads outside x is filled, what a store
writes there is left out. Sizes are any. The hardware wants more, at a price where it does not get it: where the rows
of x are not a multiple of 16 bytes, x is copied to wider ones first; a tile that does not begin on a multiple
of 16 bytes in its row, or is stored to before the first element of a dimension, is moved by ordinary instructions.

The kernels are in tma.cu, the instructions in tma.cuh: a user's kernel may include it.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxkernels.core.arguments import is_whole
from jaxkernels.ffi.custom_call import Pointer, TensorMap
from jaxkernels.ffi.kernel import CudaKernel, LaunchPlan

__all__ = ["load", "multicast_load", "reduce", "store"]

#: What the hardware adds and compares (PTX ISA, cp.reduce.async.bulk). It adds float32; to compare it is an illegal
#: instruction, found on an H200, after which the CUDA context is lost.
_REDUCTIONS: dict[str, tuple[str, ...]] = {
    "float32": ("add",),
    "float16": ("add", "min", "max"),
    "bfloat16": ("add", "min", "max"),
    "int32": ("add", "min", "max"),
    "uint32": ("add", "min", "max"),
}
_CLUSTERS = (2, 4)
_ROW_BYTES = 16  # Tensor maps: strides between rows, and rows of a box.
_BOX_ALIGNMENT = 128  # Where a box may begin in shared memory.
_MAX_BOX = 256
_ITEM_BYTES = (1, 2, 4, 8)
_THREADS = 128  # kThreads of tma.cu
_MAX_COORDINATE = 2**31 - 1


def load(
    x: Shaped[Array, "*shape"],
    starts: Int[Array, "T R"],
    tile: Sequence[int],
    *,
    fill: Literal["zeros", "nan"] = "zeros",
) -> Shaped[Array, "T ..."]:
    """Loads tiles: out[t, i, ...] = x[starts[t, 0] + i, ...].

    Args:
      x: a tensor of R dimensions, 1 to 5; elements of 1, 2, 4 or 8 bytes.
      starts: where each tile begins, elements; int32.
      tile: its shape, R numbers up to 256.
      fill: what is put where a tile hangs over the edge of x; "nan" for floating point only.

    Returns:
      The tiles, of x's dtype.

    Raises:
      ValueError: sizes and types the hardware does not take.
      NotImplementedError: lowered for anything but a GPU with tensor maps (Hopper or newer).

    Differentiability: reverse mode in x, of float32, float16 and bfloat16; added up in those types, in no
    certain order where tiles overlap. vmap launches once for each example.

    References: PTX ISA, cp.async.bulk.tensor.
    """
    _check_fill("load", fill)
    x, starts, tile, num_tiles = _checked("load", x, starts, tile)
    if num_tiles == 0:
        return jnp.zeros((0, *tile), x.dtype)
    tiles = _load(_wide_rows(x), starts, shape=x.shape, tile=tile, fill=fill)
    return _unstacked(tiles, (num_tiles,), tile)


def multicast_load(
    x: Shaped[Array, "*shape"],
    starts: Int[Array, "T R"],
    tile: Sequence[int],
    *,
    cluster: int,
    fill: Literal["zeros", "nan"] = "zeros",
) -> Shaped[Array, "T C ..."]:
    """Loads each tile once for a cluster of blocks: out[t, c] = load(x, starts, tile)[t] for every block c.

    Each block loads a slice of the tile's first dimension, and the hardware writes it to the shared memory
    of every block of the cluster; each block then writes the tile it has to its own part of the result.

    Args:
      x, starts, fill: as for `load`.
      tile: its shape, R numbers up to 256; the first up to 256 times `cluster`.
      cluster: C, the blocks of a cluster: 2 or 4.

    Returns:
      The tile as every block of its cluster got it.

    Raises:
      ValueError, NotImplementedError: as for `load`.

    Differentiability: none. vmap launches once for each example.

    References: PTX ISA, cp.async.bulk.tensor with .multicast::cluster.
    """
    _check_fill("multicast_load", fill)
    is_known = is_whole(cluster) and cluster in _CLUSTERS
    _require("multicast_load", is_known, f"cluster must be one of {_CLUSTERS}", f"{cluster!r}", "Use 2.")
    x, starts, tile, num_tiles = _checked("multicast_load", x, starts, tile, slices=cluster)
    if num_tiles == 0:
        return jnp.zeros((0, cluster, *tile), x.dtype)
    tiles = _multicast(_wide_rows(x), starts, shape=x.shape, tile=tile, cluster=cluster, fill=fill)
    return _unstacked(tiles, (num_tiles, cluster), tile, slices=cluster)


def store(
    x: Shaped[Array, "*shape"], tiles: Shaped[Array, "T ..."], starts: Int[Array, "T R"]
) -> Shaped[Array, "*shape"]:
    """Stores tiles: returns x with x[starts[t, 0] + i, ...] = tiles[t, i, ...].

    Where tiles overlap, one of them is stored, element by element in no certain order.

    Args:
      x: a tensor of R dimensions, 1 to 5; elements of 1, 2, 4 or 8 bytes. It is written in place where XLA
        can, as when it is donated.
      tiles: of x's dtype; up to 256 elements in each dimension.
      starts: where each tile begins, elements; int32. What hangs over the edge of x is left out.

    Returns:
      x with the tiles in it.

    Raises:
      ValueError, NotImplementedError: as for `load`.

    Differentiability: none. vmap launches once for each example.

    References: PTX ISA, cp.async.bulk.tensor.
    """
    tiles = _as_array("store", "tiles", tiles)
    x, starts, _, _ = _checked("store", x, starts, tiles.shape[1:], tiles=tiles)
    return _written(x, tiles, starts, op="store")


def reduce(
    x: Shaped[Array, "*shape"],
    tiles: Shaped[Array, "T ..."],
    starts: Int[Array, "T R"],
    op: Literal["add", "min", "max"] = "add",
) -> Shaped[Array, "*shape"]:
    """Combines tiles with x: returns x with x[starts[t, 0] + i, ...] op= tiles[t, i, ...].

    Tiles may overlap: every element is combined atomically, in the memory's own type and in no certain
    order. So sums of float16 and bfloat16 are rounded at each step, and overlapping floating-point sums may
    differ from run to run.

    Args:
      x: a tensor of R dimensions, 1 to 5; float16, bfloat16, int32 or uint32, float32 for "add". It is
        written in place where XLA can, as when it is donated.
      tiles: of x's dtype; up to 256 elements in each dimension.
      starts: where each tile begins, elements; int32. What hangs over the edge of x is left out.
      op: "add", "min" or "max". Of a NaN and a number, min and max take the number; -0.0 is less than 0.0.

    Returns:
      x with the tiles combined into it.

    Raises:
      ValueError, NotImplementedError: as for `load`.

    Differentiability: reverse mode for "add"; none for "min" and "max". vmap launches once for each example.

    References: PTX ISA, cp.reduce.async.bulk.tensor.
    """
    tiles = _as_array("reduce", "tiles", tiles)
    x, starts, _, _ = _checked("reduce", x, starts, tiles.shape[1:], tiles=tiles)
    able = sorted(name for name, ops in _REDUCTIONS.items() if op in ops)
    _require("reduce", bool(able), "op must be add, min or max", f"{op!r}", "These are the hardware's.")
    _require(
        "reduce",
        x.dtype.name in able,
        f"the hardware does {op} in {', '.join(able)}",
        f"{x.dtype.name}",
        f"Convert it, or use x.at[...].{op}.",
    )
    return _written(x, tiles, starts, op=op)


# Checks and shapes.


def _require(op: str, condition: bool, what: str, got: str, way_out: str) -> None:
    if not condition:
        raise ValueError(f"tma.{op}[cuda]: {what}; got {got}. {way_out}")


def _as_array(op: str, name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"tma.{op}[cuda]: {name} must be an array; got {value!r}. Use jax.numpy.asarray.") from e


def _check_fill(op: str, fill: Any) -> None:
    is_known = isinstance(fill, str) and fill in ("zeros", "nan")
    _require(op, is_known, 'fill must be "zeros" or "nan"', f"{fill!r}", "These are the hardware's.")


def _checked(
    op: str, x: Any, starts: Any, tile: Sequence[int], *, tiles: Any = None, slices: int = 1
) -> tuple[jax.Array, jax.Array, tuple[int, ...], int]:
    """Returns x, starts as int32, the tile's shape, and how many there are."""
    require = functools.partial(_require, op)
    x, starts = _as_array(op, "x", x), _as_array(op, "starts", starts)
    is_whole = np.iterable(tile) and all(isinstance(n, (int, np.integer)) for n in tile)
    require(is_whole, "tile must be whole numbers, one for each dimension of x", f"tile={tile}", "Divide with //.")
    tile = tuple(map(int, tile))
    require(
        not jnp.issubdtype(x.dtype, jax.dtypes.extended) and x.dtype.itemsize in _ITEM_BYTES,
        f"elements must have one of {_ITEM_BYTES} bytes",
        f"{x.dtype.name}",
        "Use another type.",
    )
    require(1 <= x.ndim <= 5, "x must have 1 to 5 dimensions", f"shape {x.shape}", "Merge dimensions.")
    require(x.size > 0, "x must have elements", f"shape {x.shape}", "There is nothing to move.")
    require(len(tile) == x.ndim, "a tile has as many dimensions as x", f"tile={tile}, x of {x.shape}", "Use size 1.")
    require(
        jnp.issubdtype(starts.dtype, jnp.integer) and starts.ndim == 2 and starts.shape[1] == x.ndim,
        f"starts must be integers of shape [tiles, {x.ndim}]",
        f"{starts.dtype.name} {starts.shape}",
        "Give one coordinate for each dimension of x.",
    )
    require(
        all(1 <= n <= _MAX_BOX * (slices if i == 0 else 1) for i, n in enumerate(tile)),
        f"a tile has 1 to {_MAX_BOX} elements in each dimension",
        f"tile={tile}",
        "Move a larger one in several.",
    )
    num_tiles = starts.shape[0]
    if tiles is not None:
        require(
            tiles.dtype == x.dtype and tiles.shape[0] == num_tiles,
            f"tiles must be {num_tiles} of {x.dtype.name}, as many as starts",
            f"{tiles.dtype.name} {tiles.shape}",
            "Convert them.",
        )
    require(
        num_tiles * slices * _wide_tile(tile, x.dtype, slices)[0] <= _MAX_COORDINATE,
        "all tiles together must be addressed by 32-bit coordinates",
        f"{num_tiles} tiles of {tile}",
        "Move them in several calls.",
    )
    # As far outside as a tile can be: what is beyond 32 bits would wrap round.
    least, most = (np.asarray(ends, np.int64) for ends in ([-n for n in tile], x.shape))
    if starts.dtype in (jnp.uint32, jnp.uint64):
        starts = jnp.minimum(starts, most.astype(starts.dtype))
    elif starts.dtype == jnp.int64:
        starts = jnp.clip(starts, least, most)
    return x, starts.astype(jnp.int32), tile, num_tiles


def _row_width(width: int, dtype: Any) -> int:
    """The least number of elements, not under `width`, that are a multiple of 16 bytes."""
    step = _ROW_BYTES // dtype.itemsize
    return -(-width // step) * step


def _padded(x: jax.Array, value: Any) -> jax.Array:
    """Pads the rows of x to a multiple of 16 bytes."""
    missing = _row_width(x.shape[-1], x.dtype) - x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, padding, constant_values=jnp.asarray(value, x.dtype)) if missing else x


def _wide_rows(x: jax.Array) -> jax.Array:
    """x in a form that a tensor map can describe. A vector may have any size: it has no second row."""
    return x if x.ndim == 1 else _padded(x, 0)


def _wide_tile(tile: tuple[int, ...], dtype: Any, slices: int = 1) -> tuple[int, ...]:
    """A tile's shape where it is moved: rows of a multiple of 16 bytes, the first dimension in equal slices."""
    piece = [-(-tile[0] // slices), *tile[1:]]
    piece[-1] = _row_width(piece[-1], dtype)
    return (piece[0] * slices, *piece[1:])


def _unstacked(tiles: jax.Array, counts: tuple[int, ...], tile: tuple[int, ...], slices: int = 1) -> jax.Array:
    whole = tiles.reshape(*counts, *_wide_tile(tile, tiles.dtype, slices))
    return whole[(..., *(slice(n) for n in tile))]


def _written(x: jax.Array, tiles: jax.Array, starts: jax.Array, *, op: str) -> jax.Array:
    if starts.shape[0] == 0:
        return x
    tile = tiles.shape[1:]
    # The elements that make a row 16 bytes are combined as well; stored they are not.
    stack = _padded(tiles, 0 if op == "store" else _neutral(op, x.dtype))
    stack = stack.reshape(-1, *stack.shape[2:])
    if op == "store":
        out = _store(_wide_rows(x), stack, starts, shape=x.shape, tile=tile)
    else:
        out = _reduce(_wide_rows(x), stack, starts, shape=x.shape, tile=tile, op=op)
    return out[..., : x.shape[-1]]


def _neutral(op: str, dtype: Any) -> Any:
    """A value that changes nothing, not even the sign of a zero: of a NaN and a number, min and max take the number."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-0.0 if op == "add" else np.nan, dtype)
    return np.asarray({"add": 0, "min": jnp.iinfo(dtype).max, "max": jnp.iinfo(dtype).min}[op], dtype)


# The kernels. `shape` is that of x before its rows were padded: the hardware fills and leaves out from there.
# Tiles lie one after the other along the first dimension of a tensor, their rows a multiple of 16 bytes.


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _map_of(name: str, shape: tuple[int, ...], wide: Any, box: tuple[int, ...], **fields: Any) -> TensorMap:
    strides = tuple(stride * wide.dtype.itemsize for stride in _dense_strides(wide.shape)[:-1])
    return TensorMap(name, box=box, shape=shape, strides=strides, **fields)


def _layout(shape: tuple[int, ...], wide: Any, box: tuple[int, ...], columns: int) -> np.void:
    """The struct Layout of tma.cu."""
    numbers = [*shape[::-1], *_dense_strides(wide.shape)[::-1], *box[::-1], columns]
    return np.void(np.array(numbers, np.int64).tobytes())


def _bits(value: Any, dtype: Any) -> np.generic:
    """One element as the unsigned integer of its size."""
    return np.asarray(value, dtype).reshape(1).view(f"u{jnp.dtype(dtype).itemsize}")[0]


def _fill_bits(fill: str, dtype: Any) -> np.generic:
    # Where integers cannot be filled with NaN, the tensor map's check says so.
    is_nan = fill == "nan" and jnp.issubdtype(dtype, jnp.inexact)
    return _bits(np.nan if is_nan else 0, dtype)


def _plan_load(x: Any, starts: Any, *, shape: tuple[int, ...], tile: tuple[int, ...], fill: str) -> LaunchPlan:
    box = _wide_tile(tile, x.dtype)
    box_bytes = math.prod(box) * x.dtype.itemsize
    return LaunchPlan(
        results={"tiles": jax.ShapeDtypeStruct((starts.shape[0] * box[0], *box[1:]), x.dtype)},
        parameters=[
            _map_of("x", shape, x, box, fill=fill),
            Pointer("x"),
            _layout(shape, x, box, box[-1]),
            Pointer("starts"),
            TensorMap("tiles", box=box),
            Pointer("tiles"),
            np.int32(box_bytes),
            _fill_bits(fill, x.dtype),
        ],
        grid=(starts.shape[0],),
        block=(_THREADS,),
        smem_bytes=box_bytes + _BOX_ALIGNMENT,
        template=(len(shape), x.dtype.itemsize),
    )


def _plan_multicast(
    x: Any, starts: Any, *, shape: tuple[int, ...], tile: tuple[int, ...], cluster: int, fill: str
) -> LaunchPlan:
    wide = _wide_tile(tile, x.dtype, slices=cluster)
    box = (wide[0] // cluster, *wide[1:])
    slice_bytes = math.prod(box) * x.dtype.itemsize
    slice_pitch = -(-slice_bytes // _BOX_ALIGNMENT) * _BOX_ALIGNMENT
    blocks = starts.shape[0] * cluster
    return LaunchPlan(
        results={"tiles": jax.ShapeDtypeStruct((blocks * wide[0], *wide[1:]), x.dtype)},
        parameters=[
            _map_of("x", shape, x, box, fill=fill),
            Pointer("x"),
            _layout(shape, x, wide, wide[-1]),
            Pointer("starts"),
            TensorMap("tiles", box=box),
            Pointer("tiles"),
            np.int32(slice_bytes),
            np.int32(slice_pitch),
            _fill_bits(fill, x.dtype),
        ],
        grid=(blocks,),
        block=(_THREADS,),
        cluster=(cluster,),
        smem_bytes=cluster * slice_pitch + _BOX_ALIGNMENT,
        template=(len(shape), x.dtype.itemsize, cluster),
    )


def _plan_store(x: Any, tiles: Any, starts: Any, *, shape: tuple[int, ...], tile: tuple[int, ...]) -> LaunchPlan:
    box = _wide_tile(tile, x.dtype)
    box_bytes = math.prod(box) * x.dtype.itemsize
    return LaunchPlan(
        results={"out": x},
        parameters=[
            TensorMap("tiles", box=box),
            Pointer("tiles"),
            Pointer("starts"),
            _map_of("out", shape, x, box),
            Pointer("out"),
            _layout(shape, x, box, tile[-1]),
            np.int32(box_bytes),
        ],
        grid=(starts.shape[0],),
        block=(_THREADS,),
        smem_bytes=box_bytes + _BOX_ALIGNMENT,
        template=(len(shape), x.dtype.itemsize),
        aliases={"x": "out"},
    )


def _plan_reduce(
    x: Any, tiles: Any, starts: Any, *, shape: tuple[int, ...], tile: tuple[int, ...], op: str
) -> LaunchPlan:
    box = _wide_tile(tile, x.dtype)
    rest = (*box[:-1], _ROW_BYTES // x.dtype.itemsize)
    box_bytes, rest_bytes = (math.prod(b) * x.dtype.itemsize for b in (box, rest))
    return LaunchPlan(
        results={"out": x},
        parameters=[
            TensorMap("tiles", box=box),
            Pointer("tiles"),
            Pointer("starts"),
            _map_of("out", shape, x, box),
            _map_of("out", shape, x, rest),
            _layout(shape, x, box, tile[-1]),
            np.int32(box_bytes),
            _bits(_neutral(op, x.dtype), x.dtype),
        ],
        grid=(starts.shape[0],),
        block=(_THREADS,),
        smem_bytes=box_bytes + rest_bytes + 2 * _BOX_ALIGNMENT,
        template=(len(shape), x.dtype.itemsize, f"tma::Reduction::k{op.capitalize()}"),
        aliases={"x": "out"},
    )


_SOURCE = pathlib.Path(__file__).with_name("tma.cu")
_load = CudaKernel(_SOURCE, "load_tiles", _plan_load, strict=True)
_multicast = CudaKernel(_SOURCE, "multicast_tiles", _plan_multicast, strict=True)
_store = CudaKernel(_SOURCE, "store_tiles", _plan_store, strict=True)
_reduce = CudaKernel(_SOURCE, "reduce_tiles", _plan_reduce, strict=True)


# Loading tiles and adding them are each other's transpose.


def _load_fwd(x: jax.Array, starts: jax.Array, **constants: Any) -> Any:
    return _load(x, starts, **constants), starts


def _load_bwd(starts: jax.Array, dtiles: jax.Array, *, shape: tuple[int, ...], tile: tuple[int, ...], fill: str) -> Any:
    if dtiles.dtype.name not in _REDUCTIONS:
        raise NotImplementedError(
            f"tma.load[cuda]: the gradient adds tiles up, which the hardware does in {', '.join(_REDUCTIONS)}; "
            f"got {dtiles.dtype.name}. Convert x."
        )
    dx = _wide_rows(jnp.zeros(shape, dtiles.dtype))
    return _reduce(dx, dtiles, starts, shape=shape, tile=tile, op="add"), None


def _reduce_fwd(x: jax.Array, tiles: jax.Array, starts: jax.Array, **constants: Any) -> Any:
    return _reduce(x, tiles, starts, **constants), starts


def _reduce_bwd(starts: jax.Array, dout: jax.Array, *, shape: tuple[int, ...], tile: tuple[int, ...], op: str) -> Any:
    if op != "add":
        raise NotImplementedError(f'tma.reduce[cuda]: only op="add" has a gradient; got "{op}". Use x.at[...].{op}.')
    return dout, _load(dout, starts, shape=shape, tile=tile, fill="zeros"), None


_load.defvjp(_load_fwd, _load_bwd)
_reduce.defvjp(_reduce_fwd, _reduce_bwd)
