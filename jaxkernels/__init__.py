"""Matmul and attention at the speed of the Hopper chip, behind ordinary JAX functions.

>>> import jaxkernels as jk
>>> h = jk.matmul(x, w, bias=bias, activation="gelu")
>>> out = jk.dot_product_attention(q, k, v, is_causal=True)

`jk.ffi` makes JAX functions of your own CUDA C++: see `jk.ffi.CudaKernel`.
"""

import importlib as _importlib
import pathlib as _pathlib
import typing as _typing

# In a checkout the folders pallas, ffi and models stand beside this one; installed, inside it.
_root = _pathlib.Path(__file__).parent.parent
if (_root / "pyproject.toml").exists() and (_root / "pallas" / "__init__.py").exists():
    __path__.append(str(_root))

from jaxkernels.explain import explain
from jaxkernels.ops.attention import dot_product_attention
from jaxkernels.ops.matmul import dot_general, matmul
from jaxkernels.tuning.autotune import autotune, tuning

if _typing.TYPE_CHECKING:
    from jaxkernels import ffi

__all__ = ["autotune", "dot_general", "dot_product_attention", "explain", "ffi", "matmul", "tuning"]


def __getattr__(name: str) -> _typing.Any:
    # Imported when it is asked for: most programs have no CUDA C++ of their own.
    if name == "ffi":
        return _importlib.import_module("jaxkernels.ffi")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
