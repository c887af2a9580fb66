"""Matmul and attention at the speed of the Hopper chip, behind ordinary JAX functions.

>>> import jaxkernels as jk
>>> h = jk.matmul(x, w, bias=bias, activation="gelu")
>>> out = jk.dot_product_attention(q, k, v, is_causal=True)
"""

import pathlib as _pathlib

# In a checkout the folders pallas, ffi and models stand beside this one; installed, inside it.
_root = _pathlib.Path(__file__).parent.parent
if (_root / "pyproject.toml").exists() and (_root / "pallas" / "__init__.py").exists():
    __path__.append(str(_root))

from jaxkernels.explain import explain
from jaxkernels.ops.attention import dot_product_attention
from jaxkernels.ops.matmul import dot_general, matmul
from jaxkernels.tuning.autotune import autotune, tuning

__all__ = ["autotune", "dot_general", "dot_product_attention", "explain", "matmul", "tuning"]
