"""Backend "triton": kernels for every CUDA GPU, written in Triton and launched by `jaxkernels.ffi`.

An operation is a folder. Modules that hold Triton code (`*_kernel.py`) import `triton`, and are imported when a kernel
is launched: the rest of a design works where Triton is not installed, and says what is missing.

`TARGETS` are the names of its custom calls. `jax.export` takes a program with one only if the check is disabled:

    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jaxkernels.triton.TARGETS]
    jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)
"""

from jaxkernels.triton.calls import TARGETS

__all__ = ["TARGETS"]
