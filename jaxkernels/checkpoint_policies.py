"""Policies for `jax.checkpoint` that recognise this package's products. JAX's own recognise `jax.lax.dot_general` only.

>>> import jax
>>> import jaxkernels as jk
>>> from jaxkernels import checkpoint_policies
>>> block = lambda x, w: jk.matmul(x, w, activation="gelu")
>>> block = jax.checkpoint(block, policy=checkpoint_policies.dots_saveable)

`nnx.remat(policy=...)` and Linen's `nn.remat(policy=...)` take them too. They have the names and the meaning of the
policies in `jax.checkpoint_policies`: they save `jk.matmul`, `jk.dot_general` and the results of `jk.qkv_projection` as
JAX's policies save `jax.lax.dot_general`. `knowing_products` converts any other policy. They save the pre-activation of
a product with an activation. The backward pass computes the result from it again. They also save the result if a
residual was added.

Attention is not a dot. `save_attention` saves its output and its logsumexp, so that the backward pass does not run the
forward kernel again. `save_products_and_attention` saves them and all products. Both also save the attention of
`jax.nn.dot_product_attention(implementation="cudnn")`. For policies of `jax.checkpoint_policies`, the output is named
`jk_attention_out` and the logsumexp `jk_attention_lse`.

`save_norms` saves the statistics of `jk.rms_norm` and `jk.layer_norm`. A norm under `jax.checkpoint` with this policy
computes nothing again, and saves its operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.rules import SAVED_NAMES
from jaxkernels.ops.matmul.rules import dot_general_op, matmul_op
from jaxkernels.ops.norm.rules import forward_op as norm_op
from jaxkernels.ops.qkv_projection.rules import qkv_projection_op

__all__ = [
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "knowing_products",
    "offload_dot_with_no_batch_dims",
    "save_attention",
    "save_norms",
    "save_products_and_attention",
]

#: A policy of `jax.checkpoint`: a function of a primitive, its operands' types and its parameters.
Policy = Callable[..., Any]

_PRODUCTS = (dot_general_op.primitive, matmul_op.primitive, qkv_projection_op.primitive)


def knowing_products(policy: Policy) -> Policy:
    """Returns a policy that treats each product of this package like a `jax.lax.dot_general`.

    Args:
      policy: a policy of `jax.checkpoint`, such as an attribute of `jax.checkpoint_policies`.

    Returns:
      The policy. For every other primitive it equals `policy`. Reuse it: JAX traces again for a new policy.
    """

    @functools.wraps(policy)
    def asked(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive not in _PRODUCTS:
            return policy(primitive, *avals, **params)
        static = params["static"]
        if primitive is qkv_projection_op.primitive:
            static = static.typed(qkv_projection_op.name, [ArrayType.of(aval) for aval in avals]).product
        as_lax = dict(
            dimension_numbers=static.dimension_numbers,
            precision=static.precision,
            preferred_element_type=static.out_dtype,
            out_sharding=None,
        )
        return policy(jax.lax.dot_general_p, *avals[:2], **as_lax)

    return asked


dots_saveable = knowing_products(jax.checkpoint_policies.dots_saveable)
checkpoint_dots = dots_saveable
dots_with_no_batch_dims_saveable = knowing_products(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable

_save_named_attention = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)

#: JAX's primitive of cuDNN's attention forward.
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"


def save_attention(primitive: Any, *avals: Any, **params: Any) -> Any:
    """The policy that saves the results of attentions only: of this package's, and of cuDNN's through `jax.nn`."""
    return primitive.name == _CUDNN_ATTENTION or _save_named_attention(primitive, *avals, **params)


def save_norms(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy that saves of norms' results what their gradients read: the statistics of each row."""
    return primitive is norm_op.primitive


save_products_and_attention = jax.checkpoint_policies.save_from_both_policies(dots_saveable, save_attention)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Like `jax.checkpoint_policies.offload_dot_with_no_batch_dims`, but recognises this package's products."""
    return knowing_products(jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src, offload_dst))
