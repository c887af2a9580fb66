"""Matmul and attention at the speed of the Hopper chip, behind ordinary JAX functions.

>>> import jaxkernels as jk
>>> h = jk.matmul(x, w, bias=bias, activation="gelu")
>>> out = jk.dot_product_attention(q, k, v, is_causal=True)

`jk.ffi` makes JAX functions of your own CUDA C++: see `jk.ffi.CudaKernel`. `jk.models` has a Flax transformer and
attention functions for Flax's layers.
"""

import importlib as _importlib
import pathlib as _pathlib
import typing as _typing

# In a checkout the folders pallas, ffi and models stand beside this one; installed, inside it.
_root = _pathlib.Path(__file__).parent.parent
if (_root / "pyproject.toml").exists() and (_root / "pallas" / "__init__.py").exists():
    __path__.insert(0, str(_root))

from jaxkernels import checkpoint_policies
from jaxkernels.core.explain import explain
from jaxkernels.core.versions import installed_version as _installed_version
from jaxkernels.ops.attention.api import dot_product_attention
from jaxkernels.ops.matmul.api import dot_general, matmul
from jaxkernels.tuning.autotune import autotune, tuning

__all__ = [
    "__version__", "autotune", "checkpoint_policies", "dot_general", "dot_product_attention", "explain", "ffi",
    "matmul", "models", "tuning",
]  # fmt: skip

#: The installed version; that of a checkout that is not installed is "0+unknown".
__version__: str = _installed_version("jaxkernels") or "0+unknown"

if _typing.TYPE_CHECKING:
    from jaxkernels import ffi, models
else:  # A type checker that sees a module's __getattr__ accepts every name.

    def __getattr__(name: str) -> _typing.Any:
        # Imported at first use: most programs have no CUDA C++ and no Flax model.
        if name in ("ffi", "models"):
            return _importlib.import_module(f"jaxkernels.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
