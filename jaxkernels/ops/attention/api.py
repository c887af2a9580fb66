"""Scaled dot-product attention: `dot_product_attention` and the three primitives behind it.

The forward primitive returns (out, lse), lse as (B, N, T): so kernels write and read it. Its derivative
binds the tangent primitive, linear in the tangents of q, k, v and bias, whose transpose is the backward
primitive: a gradient costs one forward and one backward kernel, and forward mode is there too. Derivatives
of those two, for every higher order, are those of the reference in plain JAX.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.interpreters import ad
from jaxtyping import Array, ArrayLike

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.arguments import as_array, as_flag, as_number
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.sharding import Assignment, Factors
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.spec import AttentionSpec, Extras
from jaxkernels.ops.attention.terms import MaskTerm, ScoreTerm

__all__ = ["dot_product_attention"]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The static part of an attention: masks by rule, and which optional operands are there."""

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    bias: bool = False
    mask: bool = False
    query_lengths: bool = False
    key_lengths: bool = False
    segments: bool = False
    self_segments: bool = False
    query_offset: bool = False
    bias_gradient: bool = False
    deterministic: bool = False
    terms: tuple[MaskTerm | ScoreTerm, ...] = ()

    @property
    def depends_on_query_index(self) -> bool:
        """Whether a shard must know where in the sequence its queries lie."""
        return self.causal or self.window is not None or self.query_lengths or bool(self.terms)


class _AttentionOp(KernelOp):
    """What the three primitives share: operands q, k, v, the optional ones, then the pass's own."""

    def spec(self, static: Attention, operands: Sequence[ArrayType], target: hardware.Chip) -> AttentionSpec:
        q, k, v, *rest = operands
        return AttentionSpec(
            q=q,
            k=k,
            v=v,
            scale=static.scale,
            target=target,
            causal=static.causal,
            window=static.window,
            soft_cap=static.soft_cap,
            bias=rest.pop(0) if static.bias else None,
            mask=rest.pop(0) if static.mask else None,
            query_lengths=static.query_lengths,
            key_lengths=static.key_lengths,
            segments=static.segments,
            self_segments=static.self_segments,
            query_offset=static.query_offset,
            bias_gradient=static.bias_gradient,
            deterministic=static.deterministic,
            terms=static.terms,
        )

    def out_and_lse(self, operands: Sequence[ArrayType]) -> list[ArrayType]:
        q, _, v, *_ = operands
        batch, num_queries, num_heads, _ = q.shape
        lse = ArrayType((batch, num_heads, num_queries), jnp.dtype(jnp.float32))
        return [ArrayType((*q.shape[:3], v.shape[3]), v.dtype), lse]

    def labels(self, static: Attention, operands: Sequence[ArrayType]) -> dict[str, tuple[str | None, ...]]:
        """Labels of every array an attention reads or writes, by name."""
        q, k, _, *rest = operands
        num_kv_heads = k.shape[2]
        # With one key/value head for all, it stays whole and every shard of the query heads uses it.
        q_heads = "n" if num_kv_heads in (1, q.shape[2]) else "n g"
        kv_heads = None if num_kv_heads == 1 and q.shape[2] > 1 else "n"
        rows = ("b", "t", q_heads)
        kv = ("b", None, kv_heads, None)
        broadcastable = lambda array: tuple(
            None if size == 1 else label for size, label in zip(array.shape, ("b", q_heads, "t", None))
        )
        rest = list(rest)
        named: dict[str, tuple[str | None, ...]] = dict(q=(*rows, None), k=kv, v=kv, out=(*rows, None))
        named["lse"] = ("b", q_heads, "t")
        if static.bias:
            named["bias"] = broadcastable(rest.pop(0))
        if static.mask:
            named["mask"] = broadcastable(rest.pop(0))
        named |= dict(query_lengths=("b",), key_lengths=("b",), query_offset=())
        named |= dict(query_segments=("b", "t"), key_segments=("b", None))
        return named

    def factors_of(
        self, static: Attention, operands: Sequence[ArrayType], after: Sequence[str], results: Sequence[str]
    ) -> Factors:
        named = self.labels(static, operands)
        q, k = operands[0], operands[1]
        names = ["q", "k", "v", *self.spec(static, operands, hardware.host()).extra_names, *after]
        sizes = dict(g=q.shape[2] // k.shape[2]) if "n g" in named["lse"] else {}
        return Factors(
            operands=tuple(named[name] for name in names), results=tuple(named[name] for name in results), sizes=sizes
        )

    def local(self, static: Attention, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        query_axes = assignment.axes.get("t", ())
        if not query_axes or not static.depends_on_query_index:
            return super().local(static, assignment, **params)

        def with_offset(*xs: jax.Array) -> list[jax.Array]:
            # The masks count queries from the start of the sequence: tell the kernel where ours begin.
            types = [ArrayType.of(x) for x in xs]
            spec = self.spec(static, types, hardware.host())
            extras, after = Extras.unpack(spec, xs[3:])
            offset = jax.lax.axis_index(query_axes) * xs[0].shape[1]
            if extras.query_offset is not None:
                offset = offset + extras.query_offset
            extras = dataclasses.replace(extras, query_offset=offset.astype(jnp.int32))
            body = super(_AttentionOp, self).local(dataclasses.replace(static, query_offset=True), assignment, **params)
            return body(*xs[:3], *extras.pack(), *after)

        return with_offset

    def batch(
        self, args: Sequence[jax.Array], dims: Sequence[int | None], *, static: Attention, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """A mapped axis joins the batch."""
        n = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        mapped = [d is not None for d in dims]
        xs = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)]
        types = [ArrayType(x.shape[1:] if m else x.shape, jnp.dtype(x.dtype)) for x, m in zip(xs, mapped)]
        names = ["q", "k", "v", *self.spec(static, types, hardware.host()).extra_names]
        names += ["linear"] * (len(xs) - len(names))
        if self is tangent_op and static.bias:
            names[-1] = "bias"
        bias_is_mapped = any(m for name, m in zip(names, mapped) if name == "bias")  # itself or its tangent
        b = types[0].shape[0]
        if static.query_offset and mapped[names.index("query_offset")]:
            # The kernels take one offset for all: loop over the mapped axis.
            xs = [x if m else jnp.broadcast_to(x, (n, *x.shape)) for x, m in zip(xs, mapped)]
            outs = jax.lax.map(lambda xs: self.bind(*xs, static=static, **params), tuple(xs))
            return list(outs), [0] * len(outs)

        def fold(name: str, x: jax.Array, is_mapped: bool) -> jax.Array:
            """(n?, b|1, ...) -> (n * b, ...)."""
            if name == "query_offset":
                return x
            is_shared = not static.bias_gradient and not bias_is_mapped if name == "bias" else not is_mapped
            if name in ("bias", "mask") and is_shared and x.shape[0] == 1:
                return x  # One for the whole batch stays one.
            lead, rest = x.shape[: 1 + is_mapped], x.shape[1 + is_mapped :]
            x = jnp.broadcast_to(x.reshape(*((1,) * (not is_mapped)), *lead, *rest), (n, b, *rest))
            return x.reshape(n * b, *rest)

        outs = self.bind(*map(fold, names, xs, mapped), static=static, **params)
        outs = [out.reshape(n, b, *out.shape[1:]) for out in outs]
        if self is backward_op and static.bias_gradient and types[3].shape[0] == 1:
            outs[3] = jnp.sum(outs[3], axis=1, keepdims=True)
        return outs, [0] * len(outs)


class _Forward(_AttentionOp):
    def results(self, static: Attention, operands: Sequence[ArrayType]) -> list[ArrayType]:
        return self.out_and_lse(operands)

    def factors(self, static: Attention, operands: Sequence[ArrayType]) -> Factors:
        return self.factors_of(static, operands, after=(), results=("out", "lse"))


class _Tangent(_AttentionOp):
    """Operands end with out, lse and the tangents of q, k, v (and bias)."""

    def results(self, static: Attention, operands: Sequence[ArrayType]) -> list[ArrayType]:
        return self.out_and_lse(operands)

    def factors(self, static: Attention, operands: Sequence[ArrayType]) -> Factors:
        after = ("out", "lse", "q", "k", "v", *(["bias"] if static.bias else []))
        return self.factors_of(static, operands, after=after, results=("out", "lse"))


class _Backward(_AttentionOp):
    """Operands end with out, lse and their cotangents; results are dq, dk, dv (and dbias)."""

    def results(self, static: Attention, operands: Sequence[ArrayType]) -> list[ArrayType]:
        return list(operands[: 4 if static.bias_gradient else 3])

    def factors(self, static: Attention, operands: Sequence[ArrayType]) -> Factors:
        results = ("q", "k", "v", "bias")[: 4 if static.bias_gradient else 3]
        return self.factors_of(static, operands, after=("out", "lse", "out", "lse"), results=results)


forward_op = _Forward("attention_forward", "jk_attention_forward", multiple_results=True)
tangent_op = _Tangent("attention_tangent", "jk_attention_tangent", multiple_results=True)
backward_op = _Backward("attention_backward", "jk_attention_backward", multiple_results=True)


# Differentiation.


def _num_extras(static: Attention) -> int:
    flags = (static.bias, static.mask, static.query_lengths, static.key_lengths, static.query_offset)
    return sum(flags) + 2 * static.segments


#: Names of output and logsumexp where they are differentiated, for policies of `jax.checkpoint`.
SAVED_NAMES = ("jk_attention_out", "jk_attention_lse")

# A configuration is for the kernel it was given with: the kernels of the derivatives choose their own.


def _forward_jvp(
    primals: Any, tangents: Any, *, static: Attention, backend: str | None, config: Any
) -> tuple[list, list]:
    outs = forward_op.bind(*primals, static=static, backend=backend, config=config)
    out, lse = map(checkpoint_name, outs, SAVED_NAMES)
    linear = tangents[: 4 if static.bias else 3]
    if all(type(t) is ad.Zero for t in linear):
        return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    dots = tangent_op.bind(*primals, out, lse, *map(ad.instantiate_zeros, linear), static=static, backend=backend)
    return [out, lse], dots


def _tangent_transpose(cts: Any, *args: Any, static: Attention, backend: str | None, config: Any) -> list[Any]:
    num_primals = 3 + _num_extras(static)
    primals, (out, lse), linear = args[:num_primals], args[num_primals : num_primals + 2], args[num_primals + 2 :]
    wanted = [ad.is_undefined_primal(t) for t in linear]
    # A bias that is a constant of the differentiation is spared its gradient.
    static = dataclasses.replace(static, bias_gradient=static.bias and wanted[3])
    dout, dlse = (ad.instantiate_zeros(ct) for ct in cts)
    grads = backward_op.bind(*primals, out, lse, dout, dlse, static=static, backend=backend)
    grads = [*grads, *[None] * (len(wanted) - len(grads))]
    return [None] * (num_primals + 2) + [g if w else None for g, w in zip(grads, wanted)]


def _reference_only(op: KernelOp, order: str, backend: str | None) -> None:
    if backend not in (None, "xla"):
        raise NotImplementedError(
            f'{op.name}[{backend}]: {order} are computed by XLA only. Use backend=None or backend="xla".'
        )


def _differentiate_reference(f: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """jax.jvp of f in its floating arguments that move; the others are constants."""
    floating = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]
    moving = [i for i in floating if type(tangents[i]) is not ad.Zero]

    def g(*xs: jax.Array) -> Any:
        args = list(primals)
        for i, x in zip(moving, xs):
            args[i] = x
        return f(*args)

    with usual_promotion():
        return jax.jvp(g, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))


def _tangent_jvp(primals: Any, tangents: Any, *, static: Attention, backend: str | None, config: Any) -> Any:
    _reference_only(tangent_op, "second derivatives", backend)
    outs = tangent_op.bind(*primals, static=static, backend=backend, config=config)

    def f(*args: jax.Array) -> list[jax.Array]:
        spec = tangent_op.spec(static, [ArrayType.of(x) for x in args], hardware.host())
        q, k, v, *rest = args
        extras, (_, _, *linear) = Extras.unpack(spec, rest)
        return list(reference.tangent(spec, q, k, v, extras, linear))

    return outs, _differentiate_reference(f, primals, tangents)[1]


def _backward_jvp(primals: Any, tangents: Any, *, static: Attention, backend: str | None, config: Any) -> Any:
    _reference_only(backward_op, "second derivatives", backend)
    outs = backward_op.bind(*primals, static=static, backend=backend, config=config)

    def f(*args: jax.Array) -> list[jax.Array]:
        spec = backward_op.spec(static, [ArrayType.of(x) for x in args], hardware.host())
        q, k, v, *rest = args
        extras, (_, _, dout, dlse) = Extras.unpack(spec, rest)
        return list(reference.backward(spec, q, k, v, extras, dout, dlse))

    return outs, _differentiate_reference(f, primals, tangents)[1]


def _forward_taylor(primals: Any, series: Any, *, static: Attention, backend: str | None, config: Any) -> Any:
    _reference_only(forward_op, "Taylor series", backend)

    def f(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        spec = forward_op.spec(static, [ArrayType.of(x) for x in (q, k, v, *rest)], hardware.host())
        return list(reference.attend(spec, q, k, v, Extras.unpack(spec, rest)[0]))

    with usual_promotion():
        return _jax.taylor(f, primals, series)


_jax.register_taylor(forward_op.primitive, _forward_taylor)
ad.primitive_jvps[forward_op.primitive] = _forward_jvp
ad.primitive_transposes[tangent_op.primitive] = _tangent_transpose
ad.primitive_jvps[tangent_op.primitive] = _tangent_jvp
ad.primitive_jvps[backward_op.primitive] = _backward_jvp


# The public function.


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla"] | None = None, return_residual: Literal[False] = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[False] = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla"] | None = None, return_residual: Literal[True],
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[False] = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla"] | None = None, return_residual: Literal[False] = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[True], alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla"] | None = None, return_residual: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: bool = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla"] | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    return_lse: bool = False,
    alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention: a drop-in for `jax.nn.dot_product_attention`, and a superset of it.

    out = softmax(mask(soft_cap(scale * query key^T + bias))) value, for each head, computed in float32
    from the first product to the last. Parameters up to `return_residual` mean what they mean in
    jax.nn; those after it are ours.

    B is the batch, T and S the query and key lengths, N the query heads, K the key/value heads (N a
    multiple of K; query head n uses key/value head n // (N / K)), H the head dimension of queries and
    keys, D that of the values. T and S may differ.

    Args:
      query: (B, T, N, H) or (T, N, H); any floating dtype of 16 bits or more.
      key: (B, S, K, H) or (S, K, H); the query's dtype. Three dimensions stand for a batch of 1, as for the query.
      value: (B, S, K, D) or (S, K, D); the query's dtype. The result has B if the query has it.
      bias: added to the scaled logits; up to 4 dimensions, broadcastable to (B, N, T, S), with 1 or N
        heads; floating, likewise.
      mask: True where a query sees a key; bool, same shapes as `bias`.
      scale: factor of the logits, finite in float32; default 1 / sqrt(H). If it is traced, it has a gradient, and XLA
        computes everything in float32: the kernels are compiled for one scale.
      is_causal: query i sees keys j <= i.
      query_seq_lengths: (B,) int32; queries from there on are padding, their output is 0.
      key_value_seq_lengths: (B,) int32; keys and values from there on are padding and not seen.
      local_window_size: (left, right): query i sees keys i - left <= j <= i + right; an int for both
        sides; None leaves a side open. Known at trace time, as `is_causal` is: give what is traced as a mask.
      implementation: jax.nn's name for the backend: "xla" or None; "cudnn" is refused.
      return_residual: also return jax.nn's residual: the logsumexp in the key's dtype, without gradient.
      logits_soft_cap: c, from 2^-126 to 2^100: logits become c * tanh(logits / c), after the bias, before the masks.
      query_segment_ids: (B, T) or (T,) int32; given together with `key_value_segment_ids`, (B, S) or
        (S,): a query sees only the keys of its own segment. Give one and the same array where both have the same ids:
        every query then sees a key, and nothing is computed for those that see none.
      return_lse: also return the natural logsumexp of the masked logits: float32, differentiable.
      alignment: what `is_causal` and `local_window_size` count from where T != S: "top_left", the first query and
        the first key, or "bottom_right", the last of both, as for new queries on a cache of keys (T <= S).
      deterministic: whether equal operands must give equal bits in every run. The output always does; the fastest
        backward pass adds up the query's gradient in whatever order its parts come.
      backend: name of the backend that must run it, or None for the fastest that can.

    Returns:
      Output (B, T, N, D) or (T, N, D), in the value's dtype; with `return_residual` or `return_lse` also
      the logsumexp, (B, T, N) or (T, N).

      A query that sees no key gets the mean of all S values, those behind `key_value_seq_lengths` too, as in
      jax.nn (masked logits are a large finite number), unless `query_seq_lengths` makes it padding. Values behind
      `key_value_seq_lengths` that are not finite count as 0 there.

      Otherwise padding does not reach a result, a gradient or a tangent, and may be NaN or infinite. jax.nn returns NaN
      for NaN in padding.

    Raises:
      ValueError: shapes, dtypes, window, soft cap or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in query, key, value and bias (of every
    broadcast shape), through the output and through the logsumexp. A named backend other than "xla"
    refuses what its kernels lack: forward mode, second derivatives and Taylor series (`jax.experimental.jet`).
    `checkify` reports a NaN in a result.

    Under `jax.checkpoint`, the output and the logsumexp can be saved by name: see `jaxkernels.checkpoint_policies`.

    Sharding: on a mesh, batch, heads and queries stay sharded; keys are gathered along S.

    References: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023 (FlashAttention-2), arXiv:2307.08691, for
    the logsumexp and the backward pass; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
    """
    op = f"dot_product_attention[{backend or implementation or 'auto'}]"
    dispatch.check_backend("dot_product_attention", backend)
    if implementation not in (None, "xla"):
        raise ValueError(
            f'{op}: implementation must be "xla" or None; got {implementation!r}. Name our kernels with backend=; call '
            "jax.nn.dot_product_attention for cuDNN's."
        )
    if implementation is not None and backend not in (None, implementation):
        raise ValueError(f"{op}: implementation={implementation!r} and backend={backend!r} disagree. Give one of them.")
    is_causal = as_flag(op, "is_causal", is_causal, "Give what is traced as a mask.")
    deterministic = as_flag(op, "deterministic", deterministic, "It chooses the kernel.")
    return_lse = as_flag(op, "return_lse", return_lse, "It decides how many results there are.")
    return_residual = as_flag(op, "return_residual", return_residual, "It decides how many results there are.")
    if return_residual and return_lse:
        raise ValueError(f"{op}: return_residual and return_lse are two forms of one result. Give one of them.")
    backend = backend or implementation

    q, k, v = (_floating(op, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: query must have shape (B, T, N, H) or (T, N, H); got {q.shape}.")
    batched = q.ndim == 4
    for name, x, head in (("key", k, "H"), ("value", v, "D")):
        if x.ndim not in (3, 4):
            raise ValueError(f"{op}: {name} must have shape (B, S, K, {head}) or (S, K, {head}); got {x.shape}.")
        if x.dtype != q.dtype:
            raise ValueError(
                f"{op}: {name} must have the query's dtype {q.dtype}; got {x.dtype}. Cast it with .astype."
            )
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    dtype = q.dtype
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"{op}: key must have the query's batch {batch} and head dimension {head_dim}; got key {k.shape} for "
            f"query {q.shape}."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: value must have the key's batch, length and heads {k.shape[:3]}; got value {v.shape}.")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: the query heads must be a multiple of the key/value heads; got {num_heads} and {num_kv_heads}."
        )
    shape = (batch, num_heads, num_queries, num_keys)
    extras = Extras(
        bias=_logits_shaped(op, "bias", bias, shape),
        mask=_logits_shaped(op, "mask", mask, shape),
        query_lengths=_integers(op, "query_seq_lengths", query_seq_lengths, (batch,)),
        key_lengths=_integers(op, "key_value_seq_lengths", key_value_seq_lengths, (batch,)),
        query_segments=_integers(op, "query_segment_ids", query_segment_ids, (batch, num_queries), batched),
        key_segments=_integers(op, "key_value_segment_ids", key_value_segment_ids, (batch, num_keys), batched),
    )
    if (extras.query_segments is None) != (extras.key_segments is None):
        given, missing = ("query", "key_value") if extras.key_segments is None else ("key_value", "query")
        raise ValueError(f"{op}: {given}_segment_ids needs {missing}_segment_ids too; got None.")
    if isinstance(scale, Tracer):
        if backend not in (None, "xla"):
            raise NotImplementedError(
                f"{op}: scale is a constant of the kernels; got {scale!r}. Give a number known at trace time, or use "
                'backend="xla".'
            )
        # Rounded to 16 bits, the scaled query would move each logit by up to 2^-9 of itself.
        wide = jnp.promote_types(dtype, jnp.float32)
        q, k, v = (x.astype(wide) for x in (q, k, v))
        q, scale = q * _traced_scale(op, scale).astype(wide), 1.0
    elif scale is not None:
        scale = as_number(op, "scale", scale, "None is 1 / sqrt(H).")
        if abs(scale) > float(jnp.finfo(jnp.float32).max):
            raise ValueError(f"{op}: scale must be finite in float32; got {scale!r}. None is 1 / sqrt(H).")
    elif not isinstance(head_dim, int) or head_dim == 0:  # Symbolic, in a program for jax.export.
        raise ValueError(
            f"{op}: scale must be given where the head dimension has no 1 / sqrt(H); got scale=None for H = "
            f"{head_dim}. Give a number."
        )
    else:
        scale = 1 / math.sqrt(head_dim)
    soft_cap = None
    if logits_soft_cap is not None:
        soft_cap = as_number(op, "logits_soft_cap", logits_soft_cap, "None turns it off.")
        if soft_cap <= 0:
            raise ValueError(f"{op}: logits_soft_cap must be positive; got {logits_soft_cap!r}. None turns it off.")
        if not 2.0**-126 <= soft_cap <= 2.0**100:  # Beyond, logits / cap is infinite or flushed to zero.
            raise ValueError(
                f"{op}: logits_soft_cap must be from 2^-126 to 2^100, for float32's division by it; got "
                f"{logits_soft_cap!r}. None turns it off."
            )

    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f'{op}: alignment must be "top_left" or "bottom_right"; got {alignment!r}.')
    window = _window(op, local_window_size, (num_queries, num_keys))
    if alignment == "bottom_right" and num_queries != num_keys and (is_causal or window is not None):
        if num_queries > num_keys:
            raise ValueError(
                f'{op}: alignment="bottom_right" needs no more queries than keys; got {num_queries} and {num_keys}. '
                "Pass the mask itself."
            )
        offset = jnp.int32(num_keys - num_queries)
        # Their places in the sequence are told apart from their index, which the lengths are about.
        lengths = extras.query_lengths
        lengths = None if lengths is None else jnp.minimum(lengths, num_queries) + offset
        extras = dataclasses.replace(extras, query_offset=offset, query_lengths=lengths)

    static = Attention(
        scale=scale,
        causal=is_causal,
        window=window,
        soft_cap=soft_cap,
        bias=extras.bias is not None,
        mask=extras.mask is not None,
        query_lengths=extras.query_lengths is not None,
        key_lengths=extras.key_lengths is not None,
        segments=extras.query_segments is not None,
        self_segments=query_segment_ids is not None and query_segment_ids is key_value_segment_ids,
        query_offset=extras.query_offset is not None,
        deterministic=deterministic,
    )
    out, lse = forward_op(q, k, v, *extras.pack(), static=static, backend=backend)
    out, lse = out.astype(dtype), jnp.swapaxes(lse, 1, 2)
    if not batched:
        out, lse = out[0], lse[0]
    if return_lse:
        return out, lse
    if return_residual:
        return out, jax.lax.stop_gradient(lse.astype(dtype))
    return out


def _logits_shaped(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A bias or a mask as a 4-dimensional array whose dimensions are 1 or those of the logits."""
    if x is None:
        return None
    x = _floating(op, name, x) if name == "bias" else as_array(op, name, x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"{op}: mask must be bool, True where a query sees a key; got {x.dtype}. "
            "Pass an additive mask as bias, a 0/1 mask as mask.astype(bool)."
        )
    if x.ndim > 4 or any(size not in (1, full) for size, full in zip(x.shape[::-1], shape[::-1])):
        raise ValueError(f"{op}: {name} must be broadcastable to (B, N, T, S) = {shape}; got {x.shape}.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _floating(op: str, name: str, x: Any) -> jax.Array:
    x = as_array(op, name, x, floating=True)
    if x.dtype.itemsize < 2:  # JAX promotes these to nothing.
        raise ValueError(
            f"{op}: {name} must have a floating dtype of 16 bits or more; got {x.dtype}. Cast it with .astype."
        )
    return x


def _integers(op: str, name: str, x: Any, shape: tuple[int, ...], batched: bool = True) -> jax.Array | None:
    if x is None:
        return None
    x = as_array(op, name, x)
    if x.dtype != jnp.int32:
        raise ValueError(f"{op}: {name} must be int32; got {x.dtype}. Cast it with .astype(jnp.int32).")
    expected = shape if batched else shape[1:]
    if x.shape != expected:
        raise ValueError(f"{op}: {name} must have shape {expected}; got {x.shape}.")
    return x.reshape(shape)


def _traced_scale(op: str, scale: jax.Array) -> jax.Array:
    is_real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.ndim != 0 or not is_real:
        raise ValueError(f"{op}: scale must be a real number; got {scale!r}. Multiply the query by it.")
    return scale


def _window(op: str, window: Any, lengths: Sequence[Any]) -> tuple[int | None, int | None] | None:
    """Both sides, None where they hide nothing in sequences of these lengths."""
    if window is None:
        return None
    try:
        pair = window if isinstance(window, Sequence) else (window, window)
        sides = tuple(None if side is None else operator.index(side) for side in pair)
    except TypeError:  # Tracers included.
        sides = ()
    if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
        raise ValueError(
            f"{op}: local_window_size must be an int or a pair (left, right) of ints >= 0 or None, known at trace "
            f"time; got {window!r}. Give what is traced as a mask."
        )
    longest = max(lengths) if all(isinstance(n, int) for n in lengths) else math.inf
    left, right = (None if s is None or s >= longest - 1 else s for s in sides)
    return None if left is None and right is None else (left, right)
