"""References in plain JAX, and the rule by which a result is accepted.

A kernel may be at most twice as far from a reference in float64 as the same formula in plain JAX and the
operands' own dtype is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import AttentionCase, MatmulCase

import jaxkernels as jk
from jaxkernels import dispatch

__all__ = [
    "Operands",
    "assert_accurate",
    "assert_close",
    "assert_same_bits",
    "compile_quickly",
    "in_float64",
    "plain_attention",
    "plain_matmul",
    "refusal",
    "with_gradients",
]

Operands = dict[str, Any]

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: jnp.maximum(x, 0),
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * jax.lax.erfc(-x / np.sqrt(2).astype(x.dtype)),
}

_MASKED = float(-0.7 * np.finfo(np.float32).max)  # As jax.nn's: finite, so that a row without keys is a mean.


def compile_quickly(f: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit for a program that runs once: on the CPU most of its time would go into optimising it."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0} if device.platform == "cpu" else None)


def plain_matmul(case: MatmulCase, operands: Operands) -> jax.Array:
    """`case` as jnp operations in the dtype of the operands."""
    lhs, rhs = operands["lhs"], operands["rhs"]
    if case.lhs_layout == "km":
        lhs = jnp.swapaxes(lhs, -1, -2)
    if case.rhs_layout == "nk":
        rhs = jnp.swapaxes(rhs, -1, -2)
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    if lhs.dtype != jnp.dtype(case.dtype):  # The operands have been widened: widen the rest too.
        out_dtype = lhs.dtype
    wide = jnp.promote_types(lhs.dtype, out_dtype)
    out = jnp.matmul(lhs, rhs, preferred_element_type=wide).astype(out_dtype)
    if case.bias:
        out = out + operands["bias"].astype(out_dtype)
    out = _ACTIVATIONS[case.activation](out)
    if case.residual:
        out = out + operands["residual"].astype(out_dtype)
    return out


def plain_attention(case: AttentionCase, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`case` with every array of logits spelled out: (out, lse)."""
    q, k, v = operands["query"], operands["key"], operands["value"]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    group_size = case.heads // case.kv_heads
    k, v = jnp.repeat(k, group_size, axis=2), jnp.repeat(v, group_size, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=dtype) / np.sqrt(case.head_dim).astype(dtype)
    if case.bias is not None:
        logits = logits + operands["bias"].astype(dtype)
    if case.soft_cap is not None:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    logits = jnp.where(visible_keys(case, operands), logits, _MASKED)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1).astype(k.dtype), v)
    if case.query_lengths:
        is_real = np.arange(case.queries) < operands["query_seq_lengths"][:, None]
        out = jnp.where(is_real[:, :, None, None], out, 0)
    return out, jnp.moveaxis(lse, 1, 2)


def visible_keys(case: AttentionCase, operands: Operands) -> jax.Array:
    """Which query sees which key: (B, N, T, S) bool."""
    i, j = np.arange(case.queries)[:, None], np.arange(case.keys)[None, :]
    visible = jnp.ones(case.shape_of("BNTS"), bool)
    if case.causal:
        visible &= j <= i
    if case.window is not None:
        left, right = case.window
        visible &= i - j <= (case.keys + case.queries if left is None else left)
        visible &= j - i <= (case.keys + case.queries if right is None else right)
    if case.mask is not None:
        visible &= operands["mask"]
    if case.query_lengths:
        visible &= i < operands["query_seq_lengths"][:, None, None, None]
    if case.key_lengths:
        visible &= j < operands["key_value_seq_lengths"][:, None, None, None]
    if case.segments:
        of_queries, of_keys = operands["query_segment_ids"], operands["key_value_segment_ids"]
        visible &= of_queries[:, None, :, None] == of_keys[:, None, None, :]
    return visible


def with_gradients(f: Callable[[Operands], Any], operands: Operands, cotangents: Any) -> dict[str, np.ndarray]:
    """Results of `f(operands)` and gradients in every floating operand, by name, from one compiled program."""

    def program(operands: Operands, cotangents: Any) -> tuple[Any, Any]:
        moving = {name for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        fixed = {name: x for name, x in operands.items() if name not in moving}
        out, pull = jax.vjp(lambda xs: f(fixed | xs), {name: operands[name] for name in moving})
        return out, pull(cotangents)[0]

    compiled = compile_quickly(program)
    out, grads = compiled(operands, cotangents)
    assert_same_bits((out, grads), compiled(operands, cotangents))
    names = ["out"] if isinstance(out, jax.Array) else ["out", "lse"]
    results = dict(zip(names, jax.tree.leaves(out))) | {f"d_{name}": grad for name, grad in grads.items()}
    return {name: np.asarray(x) for name, x in results.items()}


def refusal(backend: str, f: Callable[[Operands], Any], operands: Operands, cotangents: Any) -> str | None:
    """Why `backend` cannot compute `f` and its gradients, by its own statement; None if it can."""

    def program(operands: Operands, cotangents: Any) -> Any:
        moving = {name: x for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        out, pull = jax.vjp(lambda xs: f(operands | xs), moving)
        return out, pull(cotangents)

    for choice in jk.explain(program, operands, cotangents, platform="cuda").choices:
        if (choice.op, backend) in dispatch.REGISTRY:
            reason = dispatch.load(choice.op, backend).unsupported(choice.spec)
            if reason is not None:
                return reason
    return None


def in_float64(f: Callable[[Operands], Any], operands: Operands, cotangents: Any) -> dict[str, np.ndarray]:
    """`with_gradients` on widened operands."""
    widen = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    with jax.enable_x64(True):
        return with_gradients(f, jax.tree.map(widen, operands), jax.tree.map(widen, cotangents))


def assert_accurate(
    actual: dict[str, np.ndarray], plain: dict[str, np.ndarray], reference: dict[str, np.ndarray]
) -> None:
    """The error rule: max|actual - reference| <= 2 max|plain - reference| + a little of the largest value.

    That little is a quarter of the dtype's ulp, and for float32 the 2^-20 that a sum of float32 terms may lose
    where plain JAX happens to lose less: tensor cores truncate their float32 accumulators, while XLA may split
    the same sum. NaNs and infinities must stand where the plain result has them.
    """
    assert actual.keys() == plain.keys() == reference.keys()
    for name in plain:
        _assert_accurate(name, actual[name], plain[name], reference[name])


def _assert_accurate(name: str, actual: np.ndarray, plain: np.ndarray, reference: np.ndarray) -> None:
    assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype), name
    epsilon = float(jnp.finfo(actual.dtype).eps)
    actual, plain, reference = (x.astype(np.float64) for x in (actual, plain, reference))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(plain), err_msg=f"NaNs of {name}")
    is_infinite, is_finite = np.isinf(plain), np.isfinite(plain)
    np.testing.assert_array_equal(actual[is_infinite], plain[is_infinite], err_msg=f"infinities of {name}")
    distance = lambda x: np.max(np.abs(x - reference), where=is_finite, initial=0)
    largest = np.max(np.abs(reference), where=is_finite, initial=0)
    limit = 2 * distance(plain) + max(epsilon / 4, 2.0**-20) * largest
    assert distance(actual) <= limit, (
        f"{name} is {distance(actual):.3g} from the reference; at most {limit:.3g} is allowed, plain JAX is "
        f"{distance(plain):.3g} from it; values up to {largest:.3g}."
    )


def assert_close(actual: Any, expected: Any, *, rtol: float = 2e-5) -> None:
    """Two pytrees of float32 results of one formula, computed in two orders: equal up to rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x), np.asarray(y)
        largest = float(np.max(np.abs(y), initial=1, where=np.isfinite(y)))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * largest)


def assert_same_bits(actual: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
