"""The public function `qkv_projection`."""

from __future__ import annotations

import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.arguments import as_floating, as_precision, positive_whole
from jaxkernels.core.kernel_op import usual_promotion
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.api import matmul
from jaxkernels.ops.qkv_projection.reference import split_heads
from jaxkernels.ops.qkv_projection.rules import qkv_projection_op
from jaxkernels.ops.qkv_projection.spec import Pairs, QkvProjectionSpec

__all__ = ["qkv_projection"]

_FLOAT32 = jnp.dtype(jnp.float32)


def qkv_projection(
    x: ArrayLike,
    w: ArrayLike,
    rotation: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    pairs: Pairs = "halves",
    precision: Any = None,
    backend: str | None = None,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"]]:
    """Projects the stream of a transformer to queries, keys and values; queries and keys get rotary positions.

    query, key and value are column ranges of x @ w. Rotary positions (Su et al. 2021, arXiv:2104.09864) rotate pairs of
    features of each head of query and key. The kernel rotates in the epilogue of the product and stores three arrays.
    So no elementwise pass reads the product. The kernels for the gradients of x and w read the gradients of query, key
    and value from three arrays, too.

    Args:
      x: shape (*B, T, D), a float dtype of 16 bits or more, as w. Different dtypes are promoted as jnp does.
      w: shape (D, (N + 2 K) H): columns of N heads of queries, K heads of keys and K heads of values.
      rotation: (cos, sin), shapes (T, H/2), of the angles of every position and pair. They are converted to
        float32, or to float64 if the result is float64. None: no rotation.
      num_heads: N.
      num_kv_heads: K; default: N.
      pairs: "halves" rotates features i and i + H/2 of a head as a pair (GPT-NeoX, Llama in Hugging Face);
        "neighbours" rotates 2 i and 2 i + 1 (the paper, Llama's own code). Angle i is that of pair i.
      precision: as in `jnp.matmul`. For 16-bit operands every setting gives the same result.
      backend: name of the backend that must compute the products, or None for the fastest that can. With "pallas",
        "triton" and "xla" it is a plain product of this backend, and XLA rotates.

    Returns:
      (query, key, value) of the promoted dtype: shapes (*B, T, N, H), (*B, T, K, H) and (*B, T, K, H).

    Raises:
      ValueError: shapes, dtypes, numbers of heads, pairs or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in all arrays. The gradients of x and w are one product each.
    Policies of `jaxkernels.checkpoint_policies` that keep products keep query, key and value.

    Sharding: dimensions *B, T and D may be sharded; a sharded D costs one sum over the mesh. Columns of w are gathered.
    """
    op = f"qkv_projection[{backend or 'auto'}]"
    dispatch.check_backend("qkv_projection", backend)
    if pairs not in typing.get_args(Pairs):
        known = " or ".join(map(repr, typing.get_args(Pairs)))
        raise ValueError(f"{op}: unknown pairs={pairs!r}; use {known}.")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    positive_whole(op, "num_heads", num_heads, "It is the number of heads of queries.")
    positive_whole(op, "num_kv_heads", num_kv_heads, "Leave it out for as many as num_heads.")
    x, w = as_floating(op, "x", x), as_floating(op, "w", w)
    if x.ndim < 2:
        raise ValueError(f"{op}: x must have shape (*B, T, D); got {x.shape}. Add a dimension of tokens with x[None].")
    if w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: w must have shape (D, (N + 2 K) H) with D = {x.shape[-1]}, as x {x.shape} says; got {w.shape}."
        )
    heads = num_heads + 2 * num_kv_heads
    head_dim, rest = divmod(w.shape[1], heads)
    if rest or not head_dim:
        raise ValueError(
            f"{op}: the columns of w must be a multiple of num_heads + 2 num_kv_heads = "
            f"{num_heads} + 2 * {num_kv_heads} = {heads}; got w {w.shape}."
        )
    dtype = jnp.result_type(x, w)
    x, w = (_jax.convert(array, dtype, weak_type=False) for array in (x, w))
    angles = _checked_rotation(op, rotation, x.shape[-2], head_dim, dtype if dtype == jnp.float64 else _FLOAT32)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    precision = as_precision(op, precision)
    if backend == "xla" or (backend is not None and ("qkv_projection", backend) not in dispatch.REGISTRY):
        # JAX's own rules of derivatives are those that XLA fuses best.
        out = matmul(x, w, precision=precision, backend=backend)
        rotation = (angles["cos"], angles["sin"]) if angles else None
        with usual_promotion():
            query, key, value = split_heads(out, sizes, head_dim, rotation, pairs)
        return query, key, value
    spec = QkvProjectionSpec(
        "parts", sizes, dtype, head_dim, hardware.host(), pairs if angles else None, precision,
        x=ArrayType.of(x), w=ArrayType.of(w), **{name: ArrayType.of(array) for name, array in angles.items()},
    )  # fmt: skip
    query, key, value = (
        part.reshape(*part.shape[:-1], part.shape[-1] // head_dim, head_dim)
        for part in qkv_projection_op(spec, dict(x=x, w=w) | angles, backend=backend)
    )
    return query, key, value


def _checked_rotation(op: str, rotation: Any, num_tokens: int, head_dim: int, dtype: Any) -> dict[str, jax.Array]:
    """cos and sin in this dtype, or nothing."""
    if rotation is None:
        return {}
    if not (isinstance(rotation, tuple | list) and len(rotation) == 2):
        got = type(rotation).__name__ + (f" of {len(rotation)}" if isinstance(rotation, tuple | list) else "")
        raise ValueError(f"{op}: rotation must be a pair (cos, sin); got {got}. None is no rotation.")
    if head_dim % 2:
        raise ValueError(
            f"{op}: a rotation needs an even head dimension; got H = {head_dim}, the columns of w for each head. "
            "Leave rotation out."
        )
    angles = {}
    for name, array in zip(("cos", "sin"), rotation):
        angles[name] = as_floating(op, name, array)
        if angles[name].shape != (num_tokens, head_dim // 2):
            raise ValueError(
                f"{op}: {name} must have shape (T, H/2) = {(num_tokens, head_dim // 2)}; got {angles[name].shape}."
            )
    return {name: _jax.convert(array, dtype, weak_type=False) for name, array in angles.items()}
