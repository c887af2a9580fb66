"""XLA's custom calls for cuDNN's fused attention: the one place that knows how they are written.

XLA's GPU compiler replaces a call by a graph of cuDNN when it compiles a program. The call names the products by their
dimension numbers, as `GpuBackendConfig.cudnn_fmha_backend_config` in JSON (openxla/xla, xla/service/gpu/
backend_configs.proto). JAX writes the same calls in `jax._src.cudnn.fused_attention_stablehlo`; a test compares both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxkernels.core import _jax

__all__ = ["TARGETS", "Masks", "backward", "forward", "missing", "version"]

#: (is backward, has a bias) -> the name of the custom call. `jax.export` takes none unasked.
_NAMES = {
    (False, False): "__cudnn$fmhaSoftmax",
    (False, True): "__cudnn$fmhaScaleBiasSoftmax",
    (True, False): "__cudnn$fmhaSoftmaxBackward",
    (True, True): "__cudnn$fmhaScaleBiasSoftmaxBackward",
}
TARGETS = tuple(_NAMES.values())

#: The oldest cuDNN that JAX's wheels for CUDA 12 and 13 install.
_OLDEST = (9, 8)
_ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}
#: XLA's custom calls before its typed FFI: their attributes are one string.
_API_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks that cuDNN applies by itself.

    Attributes:
      is_causal: query i sees keys j <= i.
      window: query i sees keys j > i - window; None: all. Only with the causal mask.
      has_lengths: whether the lengths of the sequences are given.
    """

    is_causal: bool = False
    window: int | None = None
    has_lengths: bool = False

    @property
    def kind(self) -> str:
        """XLA's name for the masks, without the window."""
        names = ["PADDING"] * self.has_lengths + ["CAUSAL"] * self.is_causal
        return "_".join(names) or "NO_MASK"


def version() -> tuple[int, ...] | None:
    """The version of the cuDNN that JAX has loaded; None if there is none (on a machine without a GPU, usually)."""
    number = _jax.cudnn_version()
    return None if number is None else (number // 10000, number // 100 % 100, number % 100)


@functools.cache
def missing() -> str | None:
    """Why programs with cuDNN's attention cannot be compiled here, or None.

    A machine without a GPU has no cuDNN, but can lower programs for one that has.
    """
    found = version()
    if found is not None and found < _OLDEST:
        named = lambda number: ".".join(map(str, number))
        return f"needs cuDNN {named(_OLDEST)} or newer, found {named(found)}"
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bias: Float[Array, "#B #N T S"] | None,
    lengths: Sequence[Int32[Array, " B"]],
    *,
    scale: float,
    masks: Masks,
) -> tuple[Float[Array, "B T N H"], Float32[Array, "B N T"]]:
    """Returns the output, and the natural logsumexp of the logits.

    Args:
      q, k, v, bias: of one dtype, bfloat16 or float16.
      lengths: those of queries and those of keys, at least 1, if the masks have lengths; else nothing.
      scale: factor of the logits, before the bias; positive.
      masks: what cuDNN hides. Rows behind the lengths are undefined in the results.
    """
    batch, num_queries, num_heads, _ = q.shape
    operands = [q, k, v, *_given(bias), *lengths]
    config = _config(q, k, scale, masks, forward_products=True)
    lse = jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32)
    out, lse = _call(_NAMES[False, bias is not None], operands, [_heads_first(q)], [lse], config)
    return jnp.swapaxes(out, 1, 2), lse


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bias: Float[Array, "#B #N T S"] | None,
    lengths: Sequence[Int32[Array, " B"]],
    out: Float[Array, "B T N H"],
    lse: Float32[Array, "B N T"],
    dout: Float[Array, "B T N H"],
    *,
    scale: float,
    masks: Masks,
    bias_gradient: bool,
) -> list[jax.Array]:
    """Returns dq, dk, dv (and dbias). The arguments are those of `forward`, its results and the output's cotangent.

    The gradient of the logits is P * (dout v^T - rowsum(out * dout)), P = exp(logits - lse): an infinite lse hides a
    row. dq is summed in no fixed order.
    """
    operands = [q, k, v, lse, dout, *_given(bias), out, *lengths]
    config = _config(q, k, scale, masks, forward_products=False)
    others = _given(bias) if bias_gradient else []
    grads = _call(_NAMES[True, bias is not None], operands, [*map(_heads_first, (q, k, v))], others, config)
    return [*(jnp.swapaxes(grad, 1, 2) for grad in grads[:3]), *grads[3:]]


def _call(
    name: str, operands: Sequence[jax.Array], heads_first: Sequence[Any], others: Sequence[Any], config: dict[str, Any]
) -> list[jax.Array]:
    """Calls cuDNN. The results are `heads_first`, stored with heads after tokens, and `others`; all but the workspace.

    Args:
      heads_first: types (B, N, T, H).
      others: types, or arrays of these types.
    """
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    others = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in others]
    call = jax.ffi.ffi_call(
        name,
        [*heads_first, *others, workspace],
        output_layouts=[*[(0, 2, 1, 3)] * len(heads_first), *[None] * (len(others) + 1)],
        custom_call_api_version=_API_VERSION,
        legacy_backend_config=json.dumps({"cudnn_fmha_backend_config": config}),
    )
    return list(call(*operands))[:-1]


def _heads_first(x: jax.Array) -> jax.ShapeDtypeStruct:
    batch, length, heads, dim = x.shape
    return jax.ShapeDtypeStruct((batch, heads, length, dim), x.dtype)


def _given(x: jax.Array | None) -> list[jax.Array]:
    return [] if x is None else [x]


def _config(q: jax.Array, k: jax.Array, scale: float, masks: Masks, *, forward_products: bool) -> dict[str, Any]:
    """The attributes of a call; what is left out has XLA's default.

    A product is written as an einsum of q (btnh), k and v (bsnh), P (bnts) and the output (btnh).
    """
    products = (
        dict(bmm1="btnh,bsnh", bmm2="bnts,bsnh")
        if forward_products
        else dict(
            bmm1_grad_gemm1="bnts,btnh", bmm1_grad_gemm2="bnts,bsnh", bmm2_grad_gemm1="bnts,btnh",
            bmm2_grad_gemm2="btnh,bsnh",
        )
    )  # fmt: skip
    batch, num_queries, num_heads, _ = q.shape
    return {
        "algorithm": {
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": _ELEMENTS[q.dtype.name],
            "dimensions": [str(size) for size in (batch, num_heads, num_queries, k.shape[1])],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": masks.kind,
        "seed": 42,
        "sliding_window_length": masks.window or 0,
        "max_seg_per_batch": 1,
        **{f"{name}_dot_dimension_numbers": _dimension_numbers(product) for name, product in products.items()},
    }


def _dimension_numbers(product: str) -> dict[str, list[str]]:
    """XLA's dimension numbers of an einsum's operands: axes b and n are batch axes, one other axis is contracted."""
    sides = dict(zip(("lhs", "rhs"), product.split(",")))
    (contracted,) = set.intersection(*map(set, sides.values())) - {*"bn"}
    return {
        f"{side}_{kind}_dimensions": [str(axes.index(axis)) for axis in names]
        for kind, names in (("contracting", contracted), ("batch", "bn"))
        for side, axes in sides.items()
    }
