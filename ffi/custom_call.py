"""A CUDA kernel as a JAX operation: `launch` calls a kernel of a cubin on JAX arrays.

    (copy,) = launch(
        cubin, "tile_copy", [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        parameters=[TensorMap(0, box=(64, 64), swizzle="128B"), TensorMap(1, box=(64, 64), swizzle="128B")],
        grid=(4, 20), block=(128,), smem_bytes=8192,
    )

The limits of the hardware are checked here, where they can be explained, and the call is then
described in attributes of one custom call (listed in launcher.cc), the code included: a compiled or
exported program needs nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.ffi import handler
from jaxkernels.ffi.cubin import parameter_bytes

__all__ = ["Parameter", "Pointer", "TensorMap", "check", "launch"]

# Limits of tensor maps: CUDA driver API, cuTensorMapEncodeTiled.
_MAX_RANK = 5
_MAX_SIZE = 2**31
_MAX_STRIDE = 2**40
_MAX_BOX = 256
_MAX_ELEMENT_STRIDE = 8
_ALIGNMENT = 16
_SWIZZLE_BYTES = {"none": None, "32B": 32, "64B": 64, "128B": 128}
_INTERLEAVES = ("none", "16B", "32B")
_L2_PROMOTIONS = ("none", "64B", "128B", "256B")
_FILLS = ("zeros", "nan")

# What a kernel takes for them.
_POINTER_BYTES, _TENSOR_MAP_BYTES = 8, 128

# Limits of launches: CUDA C++ programming guide, table of technical specifications per compute
# capability, and its section on thread block clusters (more than 8 blocks are not portable).
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024
_MAX_CLUSTER_BLOCKS = 16

# The first compute capability with tensor maps and clusters (same table).
_HOPPER = (9, 0)

#: The types a tensor map knows, by their size in bytes. Any other dtype travels as bits of its size.
_DTYPES = {
    "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2,
    "float32": 4, "float32_ftz": 4, "tfloat32": 4, "tfloat32_ftz": 4, "float64": 8,
}  # fmt: skip
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the address of an operand or result.

    Attributes:
      buffer: operands count from 0, results follow them; in a `LaunchPlan`, also their names.
      offset: bytes from the start of the buffer.
    """

    buffer: int | str
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a tensor map over an operand or result (`const __grid_constant__ CUtensorMap`).

    Shapes are in the order of the array, last dimension contiguous; in the kernel, coordinates come
    the other way round (PTX ISA, cp.async.bulk.tensor).

    Attributes:
      buffer: operands count from 0, results follow them; in a `LaunchPlan`, also their names.
      box: the tile that one copy moves, elements; up to 256 in each dimension.
      shape: the tensor, elements. None: the array's own.
      strides: bytes between neighbours in each dimension but the last; multiples of 16. None: dense.
      offset: bytes from the start of the buffer to the tensor; a multiple of 16.
      dtype: None: the array's own. It decides what "nan" fills in and what a reducing copy computes;
        "tfloat32" rounds float32 on the way.
      element_strides: step within the box in each dimension. None: 1.
      swizzle: how 16-byte pieces are permuted in shared memory; a row of the box fits the width.
      interleave: "none", or an interleaved layout, which takes a tensor of rank 3 or more.
      l2_promotion: what is fetched into the L2 cache at once.
      fill: what a load puts where the box hangs over the edge.
    """

    buffer: int | str
    box: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset: int = 0
    dtype: str | None = None
    element_strides: tuple[int, ...] | None = None
    swizzle: Literal["none", "32B", "64B", "128B"] = "none"
    interleave: Literal["none", "16B", "32B"] = "none"
    l2_promotion: Literal["none", "64B", "128B", "256B"] = "256B"
    fill: Literal["zeros", "nan"] = "zeros"


#: What a kernel takes: a tensor map, several of them as one struct (an array of CUtensorMap), an address, or a NumPy
#: scalar passed by value.
Parameter = TensorMap | tuple[TensorMap, ...] | Pointer | np.generic


def launch(
    cubin: bytes,
    name: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    parameters: Sequence[Parameter],
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] = (1, 1, 1),
    smem_bytes: int = 0,
    input_output_aliases: Mapping[int, int] | None = None,
    target: hardware.Chip | None = None,
    label: str | None = None,
) -> list[jax.Array]:
    """Launches a kernel of a cubin; out = kernel<<<grid, block, smem_bytes>>>(parameters).

    Args:
      cubin: the code, compiled for the devices it will run on (`jaxkernels.ffi.compiler`).
      name: the kernel's symbol in the cubin.
      operands: arrays the kernel reads, row major.
      results: shapes and dtypes of the arrays it writes. Whatever it does not write is undefined.
      parameters: what the kernel is called with, in the order of its signature.
      grid: blocks, up to three dimensions x, y, z.
      block: threads of a block, likewise.
      cluster: blocks of a cluster, likewise; divides the grid.
      smem_bytes: dynamic shared memory per block.
      input_output_aliases: operand -> result that starts out as its copy (in place where XLA can).
      target: the chip, for its limit of shared memory; default: `hardware.cuda_target()`.
      label: what messages call the kernel; default: name, which is mangled.

    Returns:
      The results.

    Raises:
      ValueError: a parameter or a launch dimension no device takes, one outside its array, or one of another size than
        the kernel's.
      NotImplementedError: clusters or tensor maps on a chip older than Hopper.
      RuntimeError: there are CUDA devices but no launcher, see `jaxkernels.ffi.status()`.

    Differentiability: none, and no batching rule; the primitives that call this have their own.
    """
    label = name if label is None else label
    problem = _Problem(label)
    problem.unless(isinstance(cubin, bytes), "cubin must be bytes", type(cubin).__name__, "compile_kernel makes one.")
    problem.unless(isinstance(name, str), "name must be text", f"{name!r}", "It is CompiledKernel.name.")
    for what, values in (("operands", operands), ("results", results)):
        have_types = isinstance(values, Sequence) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in values)
        problem.unless(have_types, f"{what} must be a list of values with shape and dtype", f"{values!r}", "Fill it.")
    aliases = {} if input_output_aliases is None else input_output_aliases
    problem.unless(isinstance(aliases, Mapping), "input_output_aliases must be a dict", f"{aliases!r}", "None is none.")
    buffers = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*operands, *results)]
    attributes = check(
        label, buffers, parameters=parameters, grid=grid, block=block, cluster=cluster, smem_bytes=smem_bytes,
        target=target,
    )  # fmt: skip
    if (taken := parameter_bytes(cubin, name)) is not None:
        given = tuple(map(_bytes_of, parameters))
        listed = lambda sizes: f"({', '.join(map(str, sizes))})"
        problem.unless(
            given == taken,
            f"the kernel takes parameters of {listed(taken)} bytes",
            listed(given),
            "Give them in the order of the kernel's signature.",
        )
    if handler.has_cuda():
        handler.register()
    call = jax.ffi.ffi_call(handler.TARGET, list(results), input_output_aliases=dict(aliases))
    return list(call(*operands, cubin=np.frombuffer(cubin, np.uint8), kernel=name, label=label, **attributes))


def check(
    name: str,
    buffers: Sequence[jax.ShapeDtypeStruct],
    *,
    parameters: Sequence[Parameter],
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] = (1, 1, 1),
    smem_bytes: int = 0,
    target: hardware.Chip | None = None,
) -> dict[str, Any]:
    """Raises what `launch` would, of its arguments but the code, and returns the attributes it writes.

    Args:
      name: what the kernel is called in messages.
      buffers: shapes and dtypes of the operands, then of the results.
      parameters, grid, block, cluster, smem_bytes, target: as for `launch`.
    """
    target = hardware.cuda_target() if target is None else target
    problem = _Problem(name)
    attributes = _launch_attributes(problem, grid, block, cluster, smem_bytes, target)
    problem.unless(
        isinstance(parameters, Sequence), "parameters must be a list or tuple", f"{parameters!r}", "Put it into one."
    )
    attributes["num_parameters"] = np.int64(len(parameters))
    for i, parameter in enumerate(parameters):
        described = _parameter_attributes(problem.at(f"parameter {i}"), parameter, buffers, target)
        attributes |= {f"parameter{i}.{key}": value for key, value in described.items()}
    return attributes


def _bytes_of(parameter: Parameter) -> int:
    if isinstance(parameter, np.generic):
        return parameter.nbytes
    if isinstance(parameter, Pointer):
        return _POINTER_BYTES
    return _TENSOR_MAP_BYTES * (len(parameter) if isinstance(parameter, tuple) else 1)


class _Problem:
    """Raises errors of the form `kernel[cuda]: parameter 0: what is wrong; got value. way out.`"""

    def __init__(self, kernel: str, place: str = ""):
        self._kernel = kernel
        self._place = place

    def at(self, place: str) -> _Problem:
        return _Problem(self._kernel, f"{self._place}{place}: ")

    def unless(self, condition: bool, what: str, got: str, way_out: str) -> None:
        if not condition:
            raise ValueError(f"{self._kernel}[cuda]: {self._place}{what}; got {got}. {way_out}")

    def whole(self, what: str, value: Any) -> int:
        """A whole number, as one of Python's, which do not overflow."""
        self.unless(isinstance(value, (int, np.integer)), f"{what} must be whole", f"{what}={value}", "Divide with //.")
        return int(value)

    def all_whole(self, what: str, values: Any) -> tuple[int, ...]:
        """The same of a sequence of them."""
        self.unless(np.iterable(values), f"{what} must be a tuple", f"{what}={values}", f"Write ({values},).")
        numbers = tuple(values)
        is_whole = all(isinstance(n, (int, np.integer)) for n in numbers)
        self.unless(is_whole, f"{what} must be whole", f"{what}={numbers}", "Divide with //.")
        return tuple(map(int, numbers))

    def unless_hopper(self, target: hardware.Chip, what: str) -> None:
        capability = target.compute_capability
        if capability is not None and capability < _HOPPER:
            raise NotImplementedError(
                f"{self._kernel}[cuda]: {self._place}{what} need compute capability 9.0; got {target}. "
                "Use a kernel without them there."
            )


def _launch_attributes(
    problem: _Problem,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int],
    smem_bytes: int,
    target: hardware.Chip,
) -> dict[str, Any]:
    extents: dict[str, tuple[int, ...]] = {}
    limits = {"grid": _MAX_GRID, "block": _MAX_BLOCK, "cluster": (_MAX_CLUSTER_BLOCKS,) * 3}
    ways_out = {
        "grid": "An empty result needs no launch, a large one a loop in the kernel.",
        "block": "Use fewer threads.",
        "cluster": "Use fewer blocks.",
    }
    for what, given in {"grid": grid, "block": block, "cluster": cluster}.items():
        xyz = problem.all_whole(what, given)
        problem.unless(
            1 <= len(xyz) <= 3, f"{what} must have one to three dimensions", f"{what}={xyz}", "Fold the rest into x."
        )
        xyz += (1,) * (3 - len(xyz))
        problem.unless(
            all(1 <= n <= limit for n, limit in zip(xyz, limits[what])),
            f"{what} must be from 1 to {limits[what]}",
            f"{what}={xyz}",
            ways_out[what],
        )
        extents[what] = xyz
    threads = math.prod(extents["block"])
    problem.unless(
        threads <= _MAX_THREADS,
        f"a block has at most {_MAX_THREADS} threads",
        f"block={extents['block']} ({threads} threads)",
        ways_out["block"],
    )
    problem.unless(
        math.prod(extents["cluster"]) <= _MAX_CLUSTER_BLOCKS,
        f"a cluster has at most {_MAX_CLUSTER_BLOCKS} blocks (8 on every device)",
        f"cluster={extents['cluster']}",
        ways_out["cluster"],
    )
    problem.unless(
        all(g % c == 0 for g, c in zip(extents["grid"], extents["cluster"])),
        "the cluster must divide the grid",
        f"grid={extents['grid']}, cluster={extents['cluster']}",
        "Round the grid up and let the kernel skip what is too much.",
    )
    if math.prod(extents["cluster"]) > 1:
        problem.unless_hopper(target, "clusters")
    smem_bytes = problem.whole("smem_bytes", smem_bytes)
    problem.unless(smem_bytes >= 0, "smem_bytes must not be negative", f"smem_bytes={smem_bytes}", "Use 0 for none.")
    problem.unless(
        not target.smem_bytes or smem_bytes <= target.smem_bytes,
        f"a block has at most {target.smem_bytes} bytes of shared memory on {target.name}",
        f"smem_bytes={smem_bytes}",
        "Use smaller tiles or fewer stages.",
    )
    attributes: dict[str, Any] = {what: np.array(xyz, np.int64) for what, xyz in extents.items()}
    return attributes | {"smem_bytes": np.int64(smem_bytes)}


def _parameter_attributes(
    problem: _Problem, parameter: Parameter, buffers: Sequence[jax.ShapeDtypeStruct], target: hardware.Chip
) -> dict[str, Any]:
    if isinstance(parameter, np.generic):
        return {"kind": "value", "value": np.frombuffer(parameter.tobytes(), np.uint8)}
    are_maps = isinstance(parameter, tuple) and all(isinstance(one, TensorMap) for one in parameter) and parameter != ()
    problem.unless(
        are_maps or isinstance(parameter, Pointer | TensorMap),
        "a parameter must be a TensorMap, a tuple of them, a Pointer or a NumPy scalar",
        f"{parameter!r} ({type(parameter).__name__})",
        "Give a number its C type: np.int32(n), np.float32(alpha).",
    )
    if isinstance(parameter, tuple):
        attributes: dict[str, Any] = {"kind": "tensor_maps", "count": np.int64(len(parameter))}
        for i, one in enumerate(parameter):
            described = _parameter_attributes(problem.at(f"map {i}"), one, buffers, target)
            attributes |= {f"{i}.{key}": value for key, value in described.items() if key != "kind"}
        return attributes
    problem.unless(
        isinstance(parameter.buffer, int) and 0 <= parameter.buffer < len(buffers),
        f"buffer must name one of the {len(buffers)} operands and results",
        f"buffer={parameter.buffer!r}",
        "Operands count from 0, results follow them.",
    )
    buffer = buffers[int(parameter.buffer)]
    problem.unless(
        not jnp.issubdtype(buffer.dtype, jax.dtypes.extended),
        "an array of keys has no memory of its own",
        f"{buffer.dtype}",
        "Use jax.random.key_data.",
    )
    problem.unless(
        jax.dtypes.itemsize_bits(buffer.dtype) == 8 * buffer.dtype.itemsize,
        "dtypes of less than a byte are not supported: XLA packs them",
        f"{buffer.dtype.name}",
        "Bitcast to uint8.",
    )
    num_bytes = math.prod(buffer.shape) * buffer.dtype.itemsize
    offset = problem.whole("offset", parameter.offset)
    problem.unless(
        0 <= offset <= num_bytes,
        f"offset must lie in the buffer of {num_bytes} bytes",
        f"offset={offset}",
        "Offsets count bytes.",
    )
    place = {"buffer": np.int64(int(parameter.buffer)), "byte_offset": np.int64(offset)}
    if isinstance(parameter, Pointer):
        return {"kind": "pointer", **place}
    problem.unless_hopper(target, "tensor maps")
    return {"kind": "tensor_map", **place, **_tensor_map_attributes(problem, parameter, buffer, num_bytes)}


def _tensor_map_attributes(
    problem: _Problem, tensor_map: TensorMap, buffer: jax.ShapeDtypeStruct, num_bytes: int
) -> dict[str, Any]:
    for what, known in {
        "swizzle": tuple(_SWIZZLE_BYTES), "interleave": _INTERLEAVES, "l2_promotion": _L2_PROMOTIONS, "fill": _FILLS
    }.items():  # fmt: skip
        value = getattr(tensor_map, what)
        problem.unless(value in known, f"{what} must be one of {known}", f"{what}={value!r}", "These are CUDA's own.")

    dtype = tensor_map.dtype or _tensor_map_dtype(buffer.dtype)
    problem.unless(
        isinstance(dtype, str) and dtype in _DTYPES,
        f"dtype must be one of {tuple(_DTYPES)}",
        f"dtype={dtype!r}",
        "Use one of the same size.",
    )
    itemsize = _DTYPES[dtype]
    is_float = "float" in dtype
    problem.unless(
        tensor_map.fill == "zeros" or is_float, 'fill="nan" needs floating point', f"dtype={dtype!r}", "Use zeros."
    )

    shape = problem.all_whole("shape", buffer.shape if tensor_map.shape is None else tensor_map.shape)
    rank = len(shape)
    least_rank = 1 if tensor_map.interleave == "none" else 3
    problem.unless(
        least_rank <= rank <= _MAX_RANK,
        f"the tensor must have {least_rank} to {_MAX_RANK} dimensions",
        f"shape={shape}, interleave={tensor_map.interleave!r}",
        "Merge dimensions in shape.",
    )
    given = tensor_map.strides, tensor_map.element_strides
    box = problem.all_whole("box", tensor_map.box)
    strides = _dense_strides(shape, itemsize) if given[0] is None else problem.all_whole("strides", given[0])
    element_strides = (1,) * rank if given[1] is None else problem.all_whole("element_strides", given[1])
    for what, values, count in [
        ("box", box, rank),
        ("element_strides", element_strides, rank),
        ("strides", strides, rank - 1),
    ]:
        problem.unless(
            len(values) == count,
            f"{what} must have {count} elements for a tensor of rank {rank}",
            f"{what}={values}",
            "Strides leave out the last dimension, which is contiguous.",
        )
    problem.unless(
        all(1 <= n <= _MAX_SIZE for n in shape), f"sizes must be from 1 to {_MAX_SIZE}", f"shape={shape}", "Split it."
    )
    problem.unless(
        all(1 <= n <= _MAX_BOX for n in box),
        f"box must be from 1 to {_MAX_BOX} in each dimension",
        f"box={box}",
        "Copy a larger tile in several boxes.",
    )
    problem.unless(
        all(1 <= n <= _MAX_ELEMENT_STRIDE for n in element_strides),
        f"element_strides must be from 1 to {_MAX_ELEMENT_STRIDE}",
        f"element_strides={element_strides}",
        "Describe a wider step with strides.",
    )
    alignment = 32 if tensor_map.interleave == "32B" else _ALIGNMENT
    problem.unless(
        all(s % alignment == 0 and 0 <= s < _MAX_STRIDE for s in strides),
        f"strides must be multiples of {alignment} bytes below 2**40",
        f"strides={strides} for shape={shape} of {dtype}",
        "Pad the last dimension.",
    )
    offset = int(tensor_map.offset)
    problem.unless(
        offset % alignment == 0,
        f"offset must be a multiple of {alignment} bytes",
        f"offset={offset}",
        "Copy the slice to an array of its own.",
    )
    row_bytes = box[-1] * itemsize
    if tensor_map.interleave == "none":
        problem.unless(
            row_bytes % _ALIGNMENT == 0,
            f"a row of the box must be a multiple of {_ALIGNMENT} bytes",
            f"box={box} of {dtype} ({row_bytes} bytes)",
            "Widen the box; what hangs over the edge is cut off.",
        )
        width = _SWIZZLE_BYTES[tensor_map.swizzle]
        problem.unless(
            width is None or row_bytes <= width,
            f"a row of the box must fit the swizzle of {tensor_map.swizzle}",
            f"box={box} of {dtype} ({row_bytes} bytes)",
            "Copy it in several boxes.",
        )
    problem.unless(
        tensor_map.interleave != "32B" or tensor_map.swizzle == "32B",
        'interleave="32B" needs swizzle="32B"',
        f"swizzle={tensor_map.swizzle!r}",
        "Set it.",
    )
    last = (shape[-1] - 1) * itemsize + sum((n - 1) * s for n, s in zip(shape, strides))
    problem.unless(
        offset + last + itemsize <= num_bytes,
        f"the tensor reaches outside its buffer of {num_bytes} bytes",
        f"shape={shape}, strides={strides}, offset={offset} of {dtype}",
        "Check shape and strides, which count bytes.",
    )
    innermost_first = lambda values: np.array(values[::-1], np.int64)
    return {
        "dtype": dtype,
        "sizes": innermost_first(shape),
        "byte_strides": innermost_first(strides),
        "box": innermost_first(box),
        "element_strides": innermost_first(element_strides),
        "swizzle": tensor_map.swizzle,
        "interleave": tensor_map.interleave,
        "l2_promotion": tensor_map.l2_promotion,
        "fill": tensor_map.fill,
    }


def _tensor_map_dtype(dtype: Any) -> str:
    dtype = jnp.dtype(dtype)
    return str(dtype.name if dtype.name in _DTYPES else _BITS.get(dtype.itemsize, dtype.name))


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape) - 1))
