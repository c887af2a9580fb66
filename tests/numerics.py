"""Results and gradients of cases, and the assertions that accept them.

The references in plain JAX and the rule by which a result is accepted are the benchmarks' too: they are in
`jaxkernels.bench.accuracy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk
from jaxkernels.bench.accuracy import ALLOWED, error_ratio, widen
from jaxkernels.core import dispatch
from jaxkernels.ops.attention.oracle import plain_attention
from jaxkernels.ops.matmul.oracle import plain_matmul

__all__ = [
    "Operands",
    "assert_accurate",
    "assert_close",
    "assert_error_rule",
    "assert_same_bits",
    "by_number",
    "compile_quickly",
    "exact_attention_gradients",
    "in_float64",
    "plain_and_exact",
    "plain_attention",
    "plain_matmul",
    "with_gradients",
]

Operands = dict[str, Any]


def compile_quickly(f: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit for a program that runs once: on the CPU most of its time would go into optimising it."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0} if device.platform == "cpu" else None)


def plain_and_exact(
    run: Callable[..., Any], spec: Any, wide: Any, operands: Sequence[np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What `run(spec, *operands)` returns, by number: in the spec's dtypes, and in float64 with the spec `wide`."""
    compiled = lambda spec, xs: compile_quickly(functools.partial(run, spec))(*xs)
    with jax.default_matmul_precision("highest"):
        plain = compiled(spec, operands)
    with jax.enable_x64(True):
        exact = compiled(wide, [x.astype(np.float64) for x in operands])
    return by_number(plain), by_number(exact)


def by_number(results: Any) -> dict[str, np.ndarray]:
    """The arrays of a kernel's results."""
    return {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(results))}


def with_gradients(
    f: Callable[[Operands], Any],
    operands: Operands,
    cotangents: Any,
    *,
    gradients_repeat: bool = True,
    output_repeats: bool = True,
) -> dict[str, np.ndarray]:
    """Results of `f(operands)` and gradients in every floating operand, by name, from one compiled program.

    The results have the same bits in two runs, and so have the gradients, unless they need not repeat.
    """

    def program(operands: Operands, cotangents: Any) -> tuple[Any, Any]:
        moving = {name for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        fixed = {name: x for name, x in operands.items() if name not in moving}
        out, pull = jax.vjp(lambda xs: f(fixed | xs), {name: operands[name] for name in moving})
        return out, pull(cotangents)[0]

    compiled = compile_quickly(program)
    out, grads = compiled(operands, cotangents)
    again, grads_again = compiled(operands, cotangents)
    if output_repeats:
        assert_same_bits(out, again)
    if gradients_repeat:
        assert_same_bits(grads, grads_again)
    names = ["out"] if isinstance(out, jax.Array) else ["out", "lse"]
    results = dict(zip(names, jax.tree.leaves(out))) | {f"d_{name}": grad for name, grad in grads.items()}
    return {name: np.asarray(x) for name, x in results.items()}


def _refusals(backend: str, f: Callable[[Operands], Any], operands: Operands, cotangents: Any) -> Iterator[str]:
    """Why `backend` cannot compute `f` and its gradients, by the statements of its kernels."""

    def program(operands: Operands, cotangents: Any) -> Any:
        moving = {name: x for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        out, pull = jax.vjp(lambda xs: f(operands | xs), moving)
        return out, pull(cotangents)

    for choice in jk.explain(program, operands, cotangents, platform="cuda").choices:
        if (choice.op, backend) in dispatch.REGISTRY:
            reason = dispatch.load(choice.op, backend).unsupported(choice.spec)
            if reason is not None:
                yield reason


def in_float64(f: Callable[[Operands], Any], operands: Operands, cotangents: Any) -> dict[str, np.ndarray]:
    """`with_gradients` on widened operands."""
    with jax.enable_x64(True):
        return with_gradients(f, widen(operands), widen(cotangents))


def exact_attention_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, ...]:
    """dq, dk, dv and dbias of softmax(q k^T / sqrt(H) + bias) v by their formulas, in NumPy's float64; heads are not
    grouped."""
    q, k, v, bias, dout = (x.astype(np.float64) for x in (q, k, v, bias, dout))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]) + bias
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = np.einsum("btnd,bsnd->bnts", dout, v)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dq, dk = (
        np.einsum(f"bnts,b{x}nh->b{y}nh", ds / np.sqrt(q.shape[3]), z) for x, y, z in (("s", "t", k), ("t", "s", q))
    )
    return dq, dk, np.einsum("bnts,btnd->bsnd", p, dout), ds


@functools.lru_cache(maxsize=2)
def _drawn(case: Any) -> tuple[Operands, Any]:
    """Operands and cotangents of a case."""
    return case.operands(), case.cotangents()


@functools.lru_cache(maxsize=2)
def _expected(case: Any, plain: Callable[..., Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results and gradients of a case in plain JAX: in its own dtype, and in float64."""
    f = functools.partial(plain, case)
    return with_gradients(f, *_drawn(case)), in_float64(f, *_drawn(case))


def assert_error_rule(
    case: Any,
    plain: Callable[..., Any],
    backend: str,
    *,
    gradients_repeat: bool = True,
    output_repeats: bool = True,
    **options: Any,
) -> None:
    """A backend computes a case and its gradients within the error rule, or refuses it with the reason it states.

    `plain(case, operands)` is the case in plain JAX; `options` go to `case.run`.
    """
    run = functools.partial(case.run, backend=backend, **options)
    try:
        repeats = dict(gradients_repeat=gradients_repeat, output_repeats=output_repeats)
        actual = with_gradients(run, *_drawn(case), **repeats)
    except NotImplementedError as e:
        message = str(e)
    else:
        assert_accurate(actual, *_expected(case, plain))
        return
    assert any(reason in message for reason in _refusals(backend, case.run, *_drawn(case))), message


def assert_accurate(
    actual: dict[str, np.ndarray], plain: dict[str, np.ndarray], reference: dict[str, np.ndarray]
) -> None:
    """The error rule (`jaxkernels.bench.accuracy`): at most twice as far from the reference as plain JAX.

    NaNs and infinities must stand where the plain result has them.
    """
    assert actual.keys() == plain.keys() == reference.keys()
    for name in plain:
        _assert_accurate(name, actual[name], plain[name], reference[name])


def _assert_accurate(name: str, actual: np.ndarray, plain: np.ndarray, reference: np.ndarray) -> None:
    assert (actual.shape, actual.dtype) == (plain.shape, plain.dtype), name
    dtype = actual.dtype
    actual, plain, reference = (x.astype(np.float64) for x in (actual, plain, reference))
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(plain), err_msg=f"NaNs of {name}")
    is_infinite, is_finite = np.isinf(plain), np.isfinite(plain)
    np.testing.assert_array_equal(actual[is_infinite], plain[is_infinite], err_msg=f"infinities of {name}")
    distance = lambda x: np.max(np.abs(x - reference), where=is_finite, initial=0)
    largest = np.max(np.abs(reference), where=is_finite, initial=0)
    ratio = error_ratio(distance(actual), distance(plain), largest, dtype)
    assert ratio <= ALLOWED, (
        f"{name} is {distance(actual):.3g} from the reference, {ratio:.3g} times as far as plain JAX "
        f"({distance(plain):.3g}); at most {ALLOWED:g} is allowed; values up to {largest:.3g}."
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
