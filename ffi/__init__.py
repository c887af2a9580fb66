"""The CUDA engine: CUDA C++ compiled at first use and launched from JAX programs.

    kernel = compile_kernel(source, "tile_copy")
    (out,) = launch(kernel.cubin, kernel.name, [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)], ...)

`compile_kernel` turns text into a cubin, on any machine. `launch` puts the cubin into a JAX program,
with the tensor maps, addresses and numbers the kernel takes. `launcher.cc`, built when the package is
installed, runs it; `status()` says whether it was built.
"""

from jaxkernels.ffi.compiler import CompiledKernel, CompileError, Report, compile_kernel
from jaxkernels.ffi.custom_call import Parameter, Pointer, TensorMap, launch
from jaxkernels.ffi.launcher import TARGET, Status, launch_count, register, status

__all__ = [
    "TARGET",
    "CompileError",
    "CompiledKernel",
    "Parameter",
    "Pointer",
    "Report",
    "Status",
    "TensorMap",
    "compile_kernel",
    "launch",
    "launch_count",
    "register",
    "status",
]
