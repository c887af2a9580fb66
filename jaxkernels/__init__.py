"""Matmul, attention and norms at the speed of the Hopper chip, behind ordinary JAX functions.

>>> import jaxkernels as jk
>>> h = jk.matmul(x, w, bias=bias, activation="gelu")
>>> out = jk.dot_product_attention(q, k, v, is_causal=True)
>>> loss = jk.linear_cross_entropy(h, table, labels, vocab_axis=0, reduction="mean")

`jk.ffi.CudaKernel` turns your own CUDA C++ into a JAX function. `jk.models` has a Flax transformer and
attention functions for Flax's layers.
"""

import importlib as _importlib
import pathlib as _pathlib
import typing as _typing

# In a checkout the folders pallas, ffi and models are beside this folder. In an installed copy they are inside it.
_root = _pathlib.Path(__file__).parent.parent
if (_root / "pyproject.toml").exists() and (_root / "pallas" / "__init__.py").exists():
    __path__.insert(0, str(_root))

from jaxkernels import checkpoint_policies
from jaxkernels.core.explain import explain
from jaxkernels.core.versions import installed_version as _installed_version
from jaxkernels.layers import scan_layers
from jaxkernels.ops.attention.api import dot_product_attention
from jaxkernels.ops.linear_cross_entropy.api import linear_cross_entropy
from jaxkernels.ops.matmul.api import dot_general, matmul
from jaxkernels.ops.matmul.gated import gated_mlp
from jaxkernels.ops.norm.api import layer_norm, rms_norm
from jaxkernels.ops.qkv_projection.api import qkv_projection
from jaxkernels.tuning.ahead import compile_ahead
from jaxkernels.tuning.autotune import autotune, comparing, tuning

__all__ = [
    "__version__", "autotune", "checkpoint_policies", "comparing", "compile_ahead", "dot_general",
    "dot_product_attention", "explain", "ffi", "gated_mlp", "layer_norm", "linear_cross_entropy", "matmul", "models",
    "qkv_projection", "rms_norm", "scan_layers", "tuning",
]  # fmt: skip

#: The installed version; "0+unknown" in a checkout that is not installed.
__version__: str = _installed_version("jaxkernels") or "0+unknown"

if _typing.TYPE_CHECKING:
    from jaxkernels import ffi, models
else:  # Hidden from type checkers, which accept every name of a module with __getattr__.

    def __getattr__(name: str) -> _typing.Any:
        # Imported at first use: most programs have no CUDA C++ and no Flax model.
        if name in ("ffi", "models"):
            return _importlib.import_module(f"jaxkernels.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
