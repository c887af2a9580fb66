"""JAX's persistent compilation cache, in this package's cache folder: a second run does not compile its programs again.

The programs of this package hold their kernels as text or machine code, so that a compiled program runs in another
process. The cache's key includes the program, the versions of JAX and XLA, the device and the compiler's options.
"""

from __future__ import annotations

import os
import pathlib

import jax

from jaxkernels.core.folders import cache_root, distrust_folder, make_private

__all__ = ["enable", "folder"]

#: JAX keeps programs that took as long as this to compile.
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def folder() -> pathlib.Path:
    return cache_root() / "programs"


def enable() -> str | None:
    """Switches the cache on, unless the user has chosen a folder or has switched it off.

    The user's choice is JAX's own: `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE`. XLA also keeps the
    results of its autotuning in the folder. JAX keeps no program that compiles within a second, unless
    `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` says otherwise: a training has a dozen of them, so all are kept.

    Returns:
      None, or the reason why programs are not kept.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    programs = folder()
    try:
        make_private(programs)
        # JAX loads programs as they are: another user must not be able to write one.
        if reason := distrust_folder(programs):
            return f"{programs}: {reason}"
    except OSError as e:
        return f"{programs}: {e.strerror}"
    jax.config.update("jax_compilation_cache_dir", str(programs))
    if _LEAST_SECONDS.upper() not in os.environ:
        jax.config.update(_LEAST_SECONDS, 0.0)
    return None
