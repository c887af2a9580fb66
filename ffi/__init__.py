"""The CUDA engine: CUDA C++ compiled at first use and launched from JAX programs.

    scale = CudaKernel(source, "scale", plan)
    y = jax.jit(scale)(x)

A `CudaKernel` makes a JAX function of CUDA C++; docs/cuda-engine.md has an example. Below it,
`compile_kernel` turns text into a cubin, on any machine, and `launch` puts a cubin into a JAX program,
with the tensor maps, addresses and numbers the kernel takes. `launcher.cc`, built when the package is
installed, runs it; `status()` says whether it was built. `tma` has the operations of Hopper's Tensor
Memory Accelerator.

`cublaslt.cc`, built with the launcher, multiplies matrices with cuBLASLt, for the backend "cublaslt".
"""

from jaxkernels.ffi import tma
from jaxkernels.ffi.compiler import CompiledKernel, CompileError, Report, compile_kernel
from jaxkernels.ffi.custom_call import Parameter, Pointer, TensorMap, launch
from jaxkernels.ffi.handler import CUBLASLT_TARGET, TARGET, Status, launch_count, register, status
from jaxkernels.ffi.kernel import CudaKernel, LaunchPlan

__all__ = [
    "CUBLASLT_TARGET",
    "TARGET",
    "CompileError",
    "CompiledKernel",
    "CudaKernel",
    "LaunchPlan",
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
    "tma",
]
