"""Calls that a type checker must accept or refuse. .ci/run checks this file with pyright."""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=error, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import assert_type

import jax

import jaxkernels as jk
from jaxkernels.ffi import CudaKernel
from jaxkernels.models import attention
from jaxkernels.models.config import ModelConfig


def refused(x: jax.Array) -> None:
    print(jk.nonsense)  # pyright: ignore
    print(jk.ffi.nonsense)  # pyright: ignore
    print(attention.nonsense)  # pyright: ignore
    jk.matmul(x, x, activation="swish")  # pyright: ignore
    jk.dot_product_attention(x, x, x, alignment="top_right")  # pyright: ignore


def accepted(x: jax.Array, model: ModelConfig) -> None:
    assert_type(jk.__version__, str)
    assert_type(jk.matmul(x, x, activation="gelu"), jax.Array)
    assert_type(jk.dot_product_attention(x, x, x), jax.Array)
    assert_type(jk.rms_norm(x, x), jax.Array)
    assert_type(jk.layer_norm(x, x, x, residual=x), tuple[jax.Array, jax.Array])
    assert_type(jk.ffi.CudaKernel, type[CudaKernel])
    assert_type(model.num_layers, int)
