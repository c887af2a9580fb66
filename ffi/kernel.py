"""A user's CUDA C++ as a JAX function: `CudaKernel`.

One JAX primitive stands for all of them. It carries the kernel and its constants as parameters, and is
a primitive, not a bare `jax.ffi.ffi_call`, because that has no say in what JAX makes of it: under
`shard_map(check_vma=True)` it takes any out_specs, it is lowered for platforms that cannot run it, and
its vmap rule cannot be chosen for each kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir

from jaxkernels.core import _jax, hardware
from jaxkernels.ffi import compiler, custom_call
from jaxkernels.ffi.custom_call import Parameter

__all__ = ["CudaKernel", "LaunchPlan"]

_VMAP_METHODS = ("sequential", "expand_dims", "broadcast_all", None)


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """How a kernel is to be launched on operands of certain shapes and dtypes.

    Attributes:
      results: name -> anything with shape and dtype, for each array the kernel writes. Whatever it does
        not write is undefined.
      parameters: what the kernel is called with, in the order of its signature: `TensorMap`s, or a tuple of them
        for a struct of an array of maps, and `Pointer`s, which name an operand or result, and NumPy scalars; a
        struct is an `np.void` of its bytes.
      grid: blocks, up to three dimensions x, y, z.
      block: threads of a block, likewise.
      cluster: blocks of a cluster, likewise; divides the grid.
      smem_bytes: dynamic shared memory per block.
      template: arguments, where the kernel is a template: numbers, booleans, text for types.
      defines: macros of this launch. A kernel is compiled once for each template and defines.
      aliases: operand -> result that starts out as its copy (in place where XLA can).
    """

    results: Mapping[str, Any]
    parameters: Sequence[Parameter]
    grid: Sequence[int]
    block: Sequence[int]
    cluster: Sequence[int] = (1,)
    smem_bytes: int = 0
    template: Sequence[int | bool | str] = ()
    defines: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


class CudaKernel:
    r'''A JAX function computed by a CUDA C++ kernel.

        def plan(x, *, factor):
            return LaunchPlan(
                results={"out": x},
                parameters=[Pointer("x"), Pointer("out"), np.float32(factor), np.int32(x.size)],
                grid=(-(-x.size // 256),),
                block=(256,),
            )

        scale = CudaKernel(
            """
            __global__ void scale(const float* x, float* out, float factor, int n) {
              const int i = blockIdx.x * 256 + threadIdx.x;
              if (i < n) out[i] = factor * x[i];
            }
            """,
            "scale",
            plan,
        )
        y = jax.jit(scale, static_argnames="factor")(x, factor=2.0)

    The code is compiled by NVRTC when a program that calls it is lowered for CUDA, on any machine, and
    kept in a cache on disk. It travels inside compiled and exported programs. Make a CudaKernel once, at
    module level: JAX's caches tell kernels apart by identity.

    Transforms:
      jit: constants (keyword arguments) are static and hashable; a new value makes a new program.
      vmap: by `vmap_method`, for which see below.
      grad: with the rule given to `defvjp`; otherwise a NotImplementedError. Forward mode: none.
      shard_map: launches on each device's shard. Results vary over the mesh axes that any operand varies
        over, which `check_vma` holds out_specs to.
      Meshes outside shard_map: operands sharded over Explicit axes are refused; with Auto axes every
        device launches the whole.
      export: disable the check of the custom call, `DisabledSafetyCheck.custom_call(jk.ffi.TARGET)`.

    Args:
      source: CUDA C++17, as text or as the path of a file. `#include "tma.cuh"` gives the instructions of
        the Tensor Memory Accelerator; docs/cuda-engine.md lists the engine's other headers.
      name: the `__global__` function, or function template.
      plan: says how to launch it: called with the shape and dtype of each operand (`jax.ShapeDtypeStruct`)
        and the constants, returns a `LaunchPlan`. Its positional arguments name the operands. It must
        depend on nothing else.
      vmap_method: what vmap does, in the words of `jax.ffi.ffi_call`. "sequential": one launch for each
        example, one after the other. "expand_dims", "broadcast_all": one launch, whose plan sees the
        mapped dimension as a new first dimension of every operand (of size 1, or repeated, for operands
        that are not mapped), and gives its results the same. None: refuse.
      headers: text of what the source includes, by name.
      defines: macros of every launch.
      options: further options of NVRTC.
      arch: the architecture to compile for, as "sm_90a". None: the device's own.
      strict: refuse code that spills registers or drew a warning of potential performance loss from ptxas.

    Raises (when made):
      ValueError: an argument of another type, text with a NUL, a macro without a value.

    Raises (when called, before anything is launched):
      TypeError: a constant that cannot be hashed, or not those that `plan` takes; a plan of other types than declared.
      ValueError: a wrong number of operands, a plan no device takes, one outside its arrays, or parameters that are
        not the kernel's.
      NotImplementedError: lowered for another platform than CUDA, or for a chip that `arch`, tensor maps or
        clusters do not fit.
      CompileError: with NVRTC's log and the lines of `source`.
      ImportError, RuntimeError: NVRTC is not installed; the launcher is not built.
    What shows only on the device (a driver that is too old, a block that breaks `__launch_bounds__`) is
    a `jax.errors.JaxRuntimeError`, and leaves the device usable.
    '''

    def __init__(
        self,
        source: str | pathlib.Path,
        name: str,
        plan: Callable[..., LaunchPlan],
        *,
        vmap_method: Literal["sequential", "expand_dims", "broadcast_all"] | None = "sequential",
        headers: Mapping[str, str] | None = None,
        defines: Mapping[str, int | float | str] | None = None,
        options: Sequence[str] = (),
        arch: str | None = None,
        strict: bool = False,
    ):
        compiler.check_arguments("CudaKernel", kernel=name)
        self.name = name
        if not isinstance(source, str | pathlib.Path):
            what = "source must be CUDA C++ as text, or the pathlib.Path of a file"
            raise ValueError(self._message(what, f"{source!r}", "Read a file with pathlib.Path(...)."))
        if not callable(plan):
            raise ValueError(self._message("plan must be a function", f"{plan!r}", "It returns a LaunchPlan."))
        self._source = source.read_text() if isinstance(source, pathlib.Path) else source
        self._filename = source.name if isinstance(source, pathlib.Path) else f"{name}.cu"
        compiler.check_arguments(
            f"{name}[cuda]", source=self._source, headers=headers, defines=defines, options=options, strict=strict
        )
        self._plan = plan
        self._signature = inspect.signature(plan)
        self._compile_options: dict[str, Any] = dict(headers=headers, options=tuple(options), strict=strict)
        self._defines = dict(defines or {})
        self._vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        if vmap_method not in _VMAP_METHODS:
            raise ValueError(self._message(f"vmap_method must be one of {_VMAP_METHODS}", f"{vmap_method!r}", ""))
        self._vmap_method = vmap_method
        if arch is not None and not (isinstance(arch, str) and _ARCH.fullmatch(arch)):
            raise ValueError(self._message("arch must be of the form sm_90 or sm_90a", f"{arch!r}", "None is yours."))
        self._arch = arch

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the reverse-mode derivative, as `jax.custom_vjp` has it, with the constants by keyword.

        Args:
          fwd: `fwd(*operands, **constants)` returns the result and what `bwd` needs.
          bwd: `bwd(residuals, cotangent, **constants)` returns a cotangent for each operand; None for zero.

        Raises:
          ValueError: one of them is not a function.
        """
        for what, function in (("fwd", fwd), ("bwd", bwd)):
            if not callable(function):
                raise ValueError(self._message(f"{what} must be a function", f"{function!r}", "Give both."))
        self._vjp = fwd, bwd

    def compile(self, *operands: Any, **constants: Hashable) -> compiler.CompiledKernel:
        """Compiles what a call would launch, and so fills the cache; tells registers, spills and warnings.

        Args:
          operands: arrays, or anything with shape and dtype.
          constants: as for a call.
        """
        call = self._call(operands, constants, hardware.cuda_target())
        return self._compiled(call, hardware.cuda_target())

    def __call__(self, *operands: jax.typing.ArrayLike, **constants: Hashable) -> Any:
        """Launches the kernel; returns its result, or a tuple of them in the order of the plan."""
        for name, value in constants.items():
            try:
                hash(value)
            except TypeError:
                got, way_out = f"{name}={value!r}", "Use tuples for lists."
                if isinstance(value, jax.Array | np.ndarray):
                    got = f"{name}, an array of {value.dtype.name}{list(value.shape)}"
                    way_out = "Operands are given by position; of constants, tell jax.jit: static_argnames."
                raise TypeError(self._message("constants must be hashable", got, way_out)) from None
        arrays = tuple(map(jnp.asarray, operands))
        call = self._call(arrays, constants, hardware.cuda_target())
        _, explicit = _jax.explicit_axes_of(*arrays) if arrays else (None, ())
        if explicit:
            raise ValueError(
                self._message(
                    "a kernel does not know how to split its operands over a mesh",
                    f"operands sharded over Explicit axes {explicit}",
                    "Call it inside jax.shard_map.",
                )
            )
        if arrays:
            arrays = _jax.match_varying_axes(*arrays)
        parameters = dict(kernel=self, constants=_frozen(constants))

        def primal(*xs: jax.Array) -> Any:
            outs = _cuda_kernel_p.bind(*xs, **parameters)
            return outs[0] if len(call.results) == 1 else tuple(outs)

        if self._vjp is None:
            return primal(*arrays)
        fwd, bwd = self._vjp
        function = jax.custom_vjp(primal)
        function.defvjp(
            lambda *xs: fwd(*xs, **constants), lambda residuals, cotangent: bwd(residuals, cotangent, **constants)
        )
        return function(*arrays)

    # What the primitive's rules ask for.

    def _call(self, operands: Sequence[Any], constants: Mapping[str, Hashable], target: hardware.Chip) -> _Call:
        """Asks `plan` how to launch on these operands, and checks all of its answer."""
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        names = self._operand_names(len(types))
        try:
            self._signature.bind(*types, **constants)
        except TypeError as e:
            given = ", ".join(constants) or "none"
            raise TypeError(self._message(f"constants must be those of the plan: {e}", given, "Check names.")) from None
        plan = self._plan(*types, **constants)
        self._check_kinds(plan)
        results = [self._result(name, result) for name, result in plan.results.items()]
        buffers = (*names, *plan.results)
        if len(set(buffers)) != len(buffers):
            raise ValueError(self._message("names must be distinct", f"{buffers}", "Rename a result."))
        arguments: dict[str, Any] = dict(
            parameters=[self._numbered(p, f"parameter {i}", buffers) for i, p in enumerate(plan.parameters)],
            grid=plan.grid,
            block=plan.block,
            cluster=plan.cluster,
            smem_bytes=plan.smem_bytes,
        )
        custom_call.check(self.name, [*types, *results], target=target, **arguments)
        aliases = {}
        for operand, result in plan.aliases.items():
            i, j = (self._index(name, "aliases", among) for name, among in [(operand, names), (result, plan.results)])
            if (types[i].shape, types[i].dtype) != (results[j].shape, results[j].dtype):
                what = f"aliases: {operand} and {result} must be alike"
                raise ValueError(self._message(what, f"{types[i]} and {results[j]}", "Leave it out."))
            if j in aliases.values():
                what = f"aliases: {result} can start out as the copy of one operand"
                raise ValueError(self._message(what, f"{dict(plan.aliases)}", "Leave one out."))
            aliases[i] = j
        arguments["input_output_aliases"] = aliases
        template = ", ".join(map(compiler.literal, plan.template))
        instance = f"{self.name}<{template}>" if plan.template else self.name
        return _Call(tuple(results), instance, self._defines | dict(plan.defines), arguments)

    def _check_kinds(self, plan: Any) -> None:
        """What is not of the type it is declared with is said here, by its name."""
        if not isinstance(plan, LaunchPlan):
            raise TypeError(self._message("plan must return a LaunchPlan", f"{plan!r}", "Give it a return."))
        if not isinstance(plan.results, Mapping) or not plan.results:
            way_out = 'Write {"out": x}; what has no result JAX would leave out.'
            raise TypeError(self._message("results must be a dict of at least one", f"{plan.results!r}", way_out))
        for what in ("parameters", "template"):
            if isinstance(value := getattr(plan, what), str) or not isinstance(value, Iterable):
                raise TypeError(self._message(f"{what} must be a list or tuple", f"{value!r}", "Put it into one."))
        for what in ("aliases", "defines"):
            if not isinstance(value := getattr(plan, what), Mapping):
                raise TypeError(self._message(f"{what} must be a dict", f"{value!r}", "Write {} for none."))
        compiler.check_arguments(f"{self.name}[cuda]", defines=plan.defines)
        for argument in plan.template:
            compiler.check_literal(f"{self.name}[cuda]", "a template argument", argument)
        for name, result in plan.results.items():
            if not isinstance(name, str):
                raise TypeError(self._message("names of results must be text", f"{name!r}", 'Write {"out": x}.'))
            if not hasattr(result, "shape") or not hasattr(result, "dtype"):
                what = f"result {name} must have shape and dtype"
                raise TypeError(self._message(what, f"{result!r}", "Use jax.ShapeDtypeStruct."))

    def _operand_names(self, count: int) -> tuple[str, ...]:
        """The names of the plan's positional arguments, as many as there are operands."""
        names: list[str] = []
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}{i}" for i in range(count - len(names))]
        if len(names) != count:
            what = f"takes {len(names)} operands ({', '.join(names)})"
            raise ValueError(self._message(what, f"{count}", "Constants are given by keyword."))
        return tuple(names)

    def _result(self, name: str, result: Any) -> jax.ShapeDtypeStruct:
        dtype = jnp.dtype(result.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            way_out = "Set jax_enable_x64, or use a smaller type."
            raise ValueError(self._message(f"result {name} must have a type that JAX has", dtype.name, way_out))
        return jax.ShapeDtypeStruct(tuple(result.shape), dtype)

    def _numbered(self, parameter: Parameter, place: str, buffers: Sequence[str]) -> Parameter:
        if isinstance(parameter, tuple):
            maps: Any = tuple(self._numbered(one, place, buffers) for one in parameter)
            return maps
        if isinstance(parameter, custom_call.Pointer | custom_call.TensorMap) and isinstance(parameter.buffer, str):
            return dataclasses.replace(parameter, buffer=self._index(parameter.buffer, place, buffers))
        return parameter

    def _index(self, name: str, place: str, among: Any) -> int:
        if not isinstance(name, str) or name not in among:
            what = f"{place}: buffer must be one of {tuple(among)}"
            raise ValueError(self._message(what, f"{name!r}", "Those are the plan's operands and results."))
        return list(among).index(name)

    def _compiled(self, call: _Call, target: hardware.Chip) -> compiler.CompiledKernel:
        compiled = compiler.compile_kernel(
            self._source,
            call.instance,
            filename=self._filename,
            defines=call.defines,
            arch=self._arch_for(target),
            **self._compile_options,
        )
        static = 0 if compiled.report is None else compiled.report.smem_bytes
        dynamic = call.arguments["smem_bytes"]
        if target.smem_bytes and static + dynamic > target.smem_bytes:
            what = f"a block has at most {target.smem_bytes} bytes of shared memory on {target.name}"
            got = f"smem_bytes={dynamic} beside {static} static ones"
            raise ValueError(self._message(what, got, "Use smaller tiles or fewer stages."))
        return compiled

    def _arch_for(self, target: hardware.Chip) -> str:
        capability = target.compute_capability
        if capability is None:
            raise NotImplementedError(self._message("runs on CUDA devices", f"{target}", "Use plain JAX there."))
        if self._arch is None:
            # Only the architecture-specific variant has wgmma and setmaxnreg; there is none before Hopper.
            return f"sm_{capability[0]}{capability[1]}" + ("a" if capability >= (9, 0) else "")
        match = _ARCH.fullmatch(self._arch)
        assert match is not None, "checked by __init__"
        compiled_for = int(match[1]), int(match[2])
        runs = (
            capability == compiled_for
            if match[3] == "a"
            else capability[0] == compiled_for[0] and capability >= compiled_for
        )
        if not runs:
            what = f"code for {self._arch} needs a device of that architecture"
            raise NotImplementedError(self._message(what, f"{target}", "Use another kernel there, or arch=None."))
        return self._arch

    def _run(self, constants: Mapping[str, Hashable], target: hardware.Chip, *xs: jax.Array) -> list[jax.Array]:
        call = self._call(xs, constants, target)
        compiled = self._compiled(call, target)
        return custom_call.launch(
            compiled.cubin, compiled.name, xs, call.results, target=target, label=self.name, **call.arguments
        )

    def _message(self, what: str, got: str, way_out: str) -> str:
        return f"{self.name}[cuda]: {what}; got {got}. {way_out}".rstrip()


#: sm_90, sm_90a, sm_100f: generation, its member, and the set of instructions that only it has.
_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A plan, checked: what is compiled, and the arguments of `custom_call.launch`."""

    results: tuple[jax.ShapeDtypeStruct, ...]
    instance: str
    defines: dict[str, int | float | str]
    arguments: dict[str, Any]


#: Names, how they are written, and values: 2 and 2.0 are equal, and make different programs, as 0.0 and -0.0 do.
_Constants = tuple[tuple[str, str, Hashable], ...]


def _frozen(constants: Mapping[str, Hashable]) -> _Constants:
    return tuple((name, repr(value), value) for name, value in sorted(constants.items()))


def _thawed(constants: _Constants) -> dict[str, Hashable]:
    return {name: value for name, _, value in constants}


_cuda_kernel_p = jax.extend.core.Primitive("cuda_kernel")
_cuda_kernel_p.multiple_results = True
_jax.evaluate_eagerly(_cuda_kernel_p)


@_cuda_kernel_p.def_abstract_eval
def _abstract_eval(*avals: Any, kernel: CudaKernel, constants: _Constants) -> list[Any]:
    _jax.lower_by_device_if_unlike(_cuda_kernel_p)
    results = kernel._call(avals, _thawed(constants), hardware.cuda_target()).results
    if not avals:
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]
    return [_jax.abstract_output(kernel.name, avals, result.shape, result.dtype) for result in results]


def _lower(
    ctx: mlir.LoweringRuleContext, *values: Any, platform: str, kernel: CudaKernel, constants: _Constants
) -> Any:
    if platform != "cuda":
        way_out = "Choose by platform with jax.lax.platform_dependent, or lower for CUDA."
        raise NotImplementedError(kernel._message("runs on CUDA devices", f"platform {platform!r}", way_out))
    target = hardware.cuda_target(_jax.devices_during_lowering(ctx))
    run = functools.partial(kernel._run, _thawed(constants), target)
    return _jax.lower_traced(ctx, run, values, multiple_results=True)


for _platform in hardware.PLATFORMS:
    mlir.register_lowering(_cuda_kernel_p, functools.partial(_lower, platform=_platform), platform=_platform)


def _batch(
    args: Sequence[Any], dims: Sequence[int | None], *, kernel: CudaKernel, constants: _Constants
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    is_mapped = [d is not None for d in dims]

    def bind(*xs: jax.Array) -> list[jax.Array]:
        return _cuda_kernel_p.bind(*_jax.match_varying_axes(*xs), kernel=kernel, constants=constants)

    method = kernel._vmap_method
    if method is None:
        what, way_out = "has no rule for vmap", 'Make it with vmap_method="sequential".'
        raise NotImplementedError(kernel._message(what, f"a mapped dimension of size {size}", way_out))
    if method == "sequential":

        def example(mapped: list[jax.Array]) -> list[jax.Array]:
            rest = iter(mapped)
            return bind(*(next(rest) if m else x for x, m in zip(args, is_mapped)))

        outs = jax.lax.map(example, [x for x, m in zip(args, is_mapped) if m])
    else:
        count = 1 if method == "expand_dims" else size
        args = [x if m else jnp.broadcast_to(x, (count, *x.shape)) for x, m in zip(args, is_mapped)]
        for i, result in enumerate(kernel._call(args, _thawed(constants), hardware.cuda_target()).results):
            if result.shape[:1] != (size,):
                what = f"under vmap_method={method!r} results must have the mapped dimension of size {size} first"
                way_out = 'Have the plan add it, or use vmap_method="sequential".'
                raise ValueError(kernel._message(what, f"result {i} of shape {result.shape}", way_out))
        outs = bind(*args)
    return outs, [0] * len(outs)


_jax.register_batcher(_cuda_kernel_p, _batch)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, kernel: CudaKernel, constants: _Constants) -> Any:
    # With a vjp, custom_vjp keeps JAX from coming here.
    raise NotImplementedError(kernel._message("has no derivative", "jax.grad or jax.jvp", "Give it one: defvjp."))


ad.primitive_jvps[_cuda_kernel_p] = _jvp
