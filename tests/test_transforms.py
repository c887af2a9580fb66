"""Every transform of JAX over every operation, against the same transform of plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from flax import nnx
from jax.experimental import checkify, jet
from numerics import assert_close, assert_same_bits, compile_quickly

import jaxkernels as jk

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays by this package, taking backend=, and the same by plain JAX."""

    ours: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def operands(self, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        return tuple(random_array(rng, shape, "float32") for shape in self.shapes)

    def both(self, backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return functools.partial(self.ours, backend=backend), self.reference


def _fused(activation: str | None, function: Callable[..., Any], alpha: float = 1.0) -> Program:
    return Program(
        lambda a, b, bias, residual, backend: jk.matmul(
            a, b, alpha=alpha, bias=bias, activation=activation, residual=residual, backend=backend
        ),
        lambda a, b, bias, residual: function(alpha * (a @ b) + bias) + residual,
        shapes=((5, 7), (7, 3), (3,), (5, 3)),
    )


def _plain_lse(q: jax.Array, k: jax.Array) -> jax.Array:
    logits = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2))
    return jax.nn.logsumexp(logits / np.sqrt(q.shape[3]).astype(np.float32), axis=-1)


def _plain_norm(x: jax.Array, scale: jax.Array, *others: jax.Array) -> Any:
    """RMS norm of (x, scale); layer norm of (x, scale, bias); with a residual as the last, (out, sum)."""
    bias, residual = others if others else (None, None)
    z = x if residual is None else x + residual
    centred = z if bias is None else z - jnp.mean(z, axis=-1, keepdims=True)
    out = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 0.1) * (scale + 0.5)
    return out if bias is None else (out + bias, z)


def _projection(*shapes: tuple[int, ...], heads: tuple[int, int], pairs: Any = "halves") -> Program:
    """Queries, keys and values of x, w, and cos and sin if there are shapes for them."""
    num_heads, num_kv_heads = heads

    def ours(x: jax.Array, w: jax.Array, *rotation: jax.Array, backend: str | None) -> Any:
        # Named "xla", it would be a plain product, which JAX differentiates: not the rules of the primitive.
        named = None if backend == "xla" else backend
        options = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, pairs=pairs)
        return jk.qkv_projection(x, w, rotation or None, backend=named, **options)

    def reference(x: jax.Array, w: jax.Array, *rotation: jax.Array) -> Any:
        out = (x @ w).reshape(*x.shape[:-1], num_heads + 2 * num_kv_heads, -1)
        parts = jnp.split(out, (num_heads, num_heads + num_kv_heads), axis=-2)
        if rotation:
            parts[:2] = (_plain_rotation(part, *rotation, pairs) for part in parts[:2])
        return tuple(parts)

    return Program(ours, reference, shapes)


def _plain_rotation(heads: jax.Array, cos: jax.Array, sin: jax.Array, pairs: str) -> jax.Array:
    sizes, axis = ((2, -1), -2) if pairs == "halves" else ((-1, 2), -1)
    a, b = (jnp.take(heads.reshape(*heads.shape[:-1], *sizes), i, axis) for i in (0, 1))
    cos, sin = cos[:, None], sin[:, None]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis).reshape(heads.shape)


_NUMBERS = (((3, 1), (0, 2)), ((0,), (1,)))
_QKV = ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
_MASKS = dict(
    is_causal=True,
    local_window_size=(2, 1),
    query_seq_lengths=np.int32([3, 2]),
    key_value_seq_lengths=np.int32([4, 5]),
)

PROGRAMS = {
    "product": Program(jk.matmul, jnp.matmul, shapes=((5, 7), (7, 3))),
    "batch of products": Program(jk.matmul, jnp.matmul, shapes=((2, 5, 7), (2, 7, 3))),
    "alpha": Program(
        functools.partial(jk.matmul, alpha=0.3), lambda a, b: 0.3 * jnp.matmul(a, b), shapes=((2, 5, 7), (7, 3))
    ),
    "dot_general": Program(
        lambda lhs, rhs, backend: jk.dot_general(lhs, rhs, _NUMBERS, backend=backend),
        lambda lhs, rhs: jax.lax.dot_general(lhs, rhs, _NUMBERS),
        shapes=((2, 4, 5, 3), (3, 2, 4, 6)),
    ),
    "bias": Program(
        lambda a, b, bias, backend: jk.matmul(a, b, bias=bias, backend=backend),
        lambda a, b, bias: a @ b + bias,
        shapes=((5, 7), (7, 3), (3,)),
    ),
    "silu": Program(
        lambda a, b, backend: jk.matmul(a, b, activation="silu", backend=backend),
        lambda a, b: jax.nn.silu(a @ b),
        shapes=((2, 5, 7), (7, 3)),
    ),
    "silu, multiplier": Program(
        lambda a, b, multiplier, backend: jk.matmul(a, b, activation="silu", multiplier=multiplier, backend=backend),
        lambda a, b, multiplier: jax.nn.silu(a @ b) * multiplier,
        shapes=((5, 7), (7, 3), (5, 3)),
    ),
    "gated mlp": Program(
        jk.gated_mlp,
        lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down,
        shapes=((2, 5, 7), (7, 3), (7, 3), (3, 4)),
    ),
    "gated mlp, biases, residual": Program(
        lambda x, gate, up, down, b_gate, b_up, b_down, residual, backend: jk.gated_mlp(
            x,
            gate,
            up,
            down,
            activation="gelu",
            b_gate=b_gate,
            b_up=b_up,
            b_down=b_down,
            residual=residual,
            backend=backend,
        ),
        lambda x, gate, up, down, b_gate, b_up, b_down, residual: (
            (jax.nn.gelu(x @ gate + b_gate) * (x @ up + b_up)) @ down + b_down + residual
        ),
        shapes=((5, 7), (7, 3), (7, 3), (3, 4), (3,), (3,), (4,), (5, 4)),
    ),
    "projection": _projection((2, 5, 7), (7, 48), heads=(4, 2)),
    "projection, halves": _projection((2, 5, 7), (7, 48), (5, 3), (5, 3), heads=(4, 2)),
    "projection, neighbours": _projection((5, 7), (7, 60), (5, 2), (5, 2), heads=(5, 5), pairs="neighbours"),
    "bias, residual": _fused(None, lambda x: x),
    "bias, gelu, residual": _fused("gelu", jax.nn.gelu),
    "alpha, bias, gelu, residual": _fused("gelu", jax.nn.gelu, alpha=0.3),
    "attention": Program(jk.dot_product_attention, jax.nn.dot_product_attention, shapes=_QKV),
    "attention, bias": Program(
        functools.partial(jk.dot_product_attention, is_causal=True),
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
        shapes=(*_QKV, (1, 4, 3, 5)),
    ),
    "attention, bias of each batch": Program(
        jk.dot_product_attention, jax.nn.dot_product_attention, shapes=(*_QKV, (2, 1, 3, 1))
    ),
    "attention, masks": Program(
        functools.partial(jk.dot_product_attention, **_MASKS),
        functools.partial(jax.nn.dot_product_attention, **_MASKS),
        shapes=_QKV,
    ),
    "attention, lse": Program(
        functools.partial(jk.dot_product_attention, return_lse=True),
        lambda q, k, v: (jax.nn.dot_product_attention(q, k, v), _plain_lse(q, k)),
        shapes=_QKV,
    ),
    "rms norm": Program(
        functools.partial(jk.rms_norm, eps=0.1, scale_offset=0.5), _plain_norm, shapes=((2, 5, 7), (7,))
    ),
    "rms norm, stream": Program(
        functools.partial(jk.rms_norm, eps=0.1, scale_offset=0.5, return_x=True),
        lambda x, scale: (_plain_norm(x, scale), x),
        shapes=((2, 5, 7), (7,)),
    ),
    "layer norm, residual": Program(
        lambda x, scale, bias, residual, backend: jk.layer_norm(
            x, scale, bias, residual=residual, eps=0.1, scale_offset=0.5, backend=backend
        ),
        _plain_norm,
        shapes=((5, 7), (7,), (7,), (5, 7)),
    ),
}

every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


def some_programs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", [PROGRAMS[name] for name in names], ids=names)


def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A scalar whose derivatives of every order are there and differ in every entry."""
    return lambda *xs: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*xs)))


def assert_same(transform: Callable[[Callable[..., Any]], Any], *functions: Callable[..., Any]) -> None:
    """`transform(ours)` equals `transform(reference)`; both from one compiled program."""
    with jax.enable_checks(True):  # Also the types of what the rules return are checked.
        ours, reference = compile_quickly(lambda: tuple(transform(f) for f in functions))()
    assert_close(ours, reference)


def all_args(xs: Arrays) -> tuple[int, ...]:
    return tuple(range(len(xs)))


# Derivatives.


@every_program
def test_first_derivatives(backend, program):
    xs, dxs = program.operands(0), program.operands(1)

    def derivatives(f):
        out, pull = jax.vjp(f, *xs)
        _, push = jax.linearize(f, *xs)
        only_first = jax.jvp(lambda x: f(x, *xs[1:]), xs[:1], dxs[:1])
        only_last = jax.grad(lambda x: loss(f)(*xs[:-1], x))(xs[-1])
        return out, pull(out), push(*dxs), jax.jvp(f, xs, dxs), only_first, only_last

    assert_same(derivatives, *program.both(backend))


@pytest.mark.sampled(one_in=4)
@every_program
def test_second_derivatives(program):
    xs, dxs, ddxs = (program.operands(seed) for seed in range(3))

    def derivatives(f):
        grad = jax.grad(loss(f), all_args(xs))
        push = lambda *xs: jax.jvp(loss(f), xs, dxs)[1]
        return (
            jax.jvp(grad, xs, dxs),
            jax.grad(lambda *xs: loss(grad)(*xs), all_args(xs))(*xs),
            jax.jvp(push, xs, ddxs),
            jax.grad(push, all_args(xs))(*xs),
        )

    assert_same(derivatives, *program.both("xla"))


@some_programs("product", "dot_general", "bias, gelu, residual", "projection, halves")
def test_second_derivatives_on_a_kernel_backend(opaque, program):
    xs, dxs = program.operands(0), program.operands(1)
    assert_same(lambda f: jax.jvp(jax.grad(loss(f), all_args(xs)), xs, dxs), *program.both(opaque))


def test_third_derivatives():
    program = PROGRAMS["bias, gelu, residual"]
    xs, dxs = program.operands(0), program.operands(1)

    def third(f):
        hvp = lambda *xs: jax.jvp(jax.grad(loss(f), all_args(xs)), xs, dxs)[1]
        return jax.jvp(hvp, xs, dxs)[1]

    assert_same(third, *program.both("xla"))


@some_programs(
    "product", "bias, gelu, residual", "projection, halves", "attention, bias", "rms norm", "layer norm, residual"
)
def test_jacobians(program):
    """In forward mode, which also calls the batching rules if no operand is mapped."""
    xs = program.operands()

    def jacobians(f):
        argnums = 0, len(xs) - 1
        return jax.jacfwd(f, argnums)(*xs), jax.jacrev(f, argnums)(*xs), jax.hessian(loss(f), argnums)(*xs)

    assert_same(jacobians, *program.both("xla"))


@some_programs("product", "batch of products", "alpha", "dot_general", "projection")
def test_linear_transpose(backend, program):
    a, b = program.operands()

    def transposes(f):
        of_a, of_b = jax.linear_transpose(lambda a: f(a, b), a), jax.linear_transpose(lambda b: f(a, b), b)
        return of_a(f(a, b)), of_b(f(a, b))

    assert_same(transposes, *program.both(backend))


@some_programs("alpha", "bias, gelu, residual", "projection, halves", "attention, bias", "attention, masks", "rms norm")
def test_promotion_that_is_forbidden_to_the_caller(program):
    """Our own arithmetic promotes dtypes and ranks nevertheless: in kernels and in all rules."""
    xs = tuple(x.astype(jnp.bfloat16) for x in program.operands())
    scalar = lambda *xs: sum(map(jnp.sum, jax.tree.leaves(program.ours(*xs, backend=None))))

    def derivatives(*xs):
        grad = jax.grad(scalar, all_args(xs))
        of_weights = jax.vmap(grad, tuple(0 if i == 1 else None for i in all_args(xs)))
        return scalar(*xs), jax.jvp(grad, xs, xs), of_weights(xs[0], jnp.stack([xs[1], xs[1]]), *xs[2:])

    expected = compile_quickly(derivatives)(*xs)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_same_bits(compile_quickly(derivatives)(*xs), expected)


# vmap.


def mapped_in_all_ways(num: int) -> list[tuple[bool, ...]]:
    return [mapped for mapped in itertools.product([True, False], repeat=num) if any(mapped)]


def stack(x: np.ndarray, seed: int, axis: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([x, -x, x + random_array(rng, x.shape, "float32")], axis=axis)


@pytest.mark.sampled(one_in=2)
@every_program
def test_vmap_of_every_combination_of_operands(opaque, program):
    """Values and gradients, with the mapped axis first, last, or in the middle."""
    xs = program.operands()

    def mapped_gradients(f):
        results = []
        for n, mapped in enumerate(mapped_in_all_ways(len(xs))):
            axes = tuple(
                (n + i) % (x.ndim + 1) if is_mapped else None for i, (x, is_mapped) in enumerate(zip(xs, mapped))
            )
            stacked = [x if axis is None else stack(x, i, axis) for i, (x, axis) in enumerate(zip(xs, axes))]
            results.append(jax.vmap(f, axes, out_axes=1)(*stacked))
            results.append(jax.vmap(jax.grad(loss(f), all_args(xs)), axes)(*stacked))
        return results

    assert_same(mapped_gradients, *program.both(opaque))


@pytest.mark.sampled(one_in=2)
@every_program
def test_vmap_of_primals_and_tangents_apart(program):
    """As jacfwd does it: the tangents mapped over unmapped primals, and the other way round."""
    xs, dxs = program.operands(0), program.operands(1)

    def tangents(f):
        push = lambda xs, dxs: jax.jvp(f, xs, dxs)[1]
        results = []
        for i in all_args(xs):
            axes = tuple(0 if j == i else None for j in all_args(xs))
            stacked_xs, stacked_dxs = ((*x[:i], stack(x[i], i, 0), *x[i + 1 :]) for x in (xs, dxs))
            results.append(jax.vmap(push, (None, axes))(xs, stacked_dxs))
            results.append(jax.vmap(push, (axes, None))(stacked_xs, dxs))
        return results

    assert_same(tangents, *program.both("xla"))


@pytest.mark.sampled(one_in=2)
@every_program
def test_vmap_of_cotangents_alone(program):
    """As jacrev does it."""
    xs = program.operands()

    def gradients(f):
        out, pull = jax.vjp(f, *xs)
        cts = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x + 1]), out)
        return jax.vmap(pull)(cts)

    assert_same(gradients, *program.both("xla"))


@pytest.mark.sampled(one_in=2)
@every_program
def test_vmap_of_vmap(opaque, program):
    """The first operand mapped twice, the last once."""
    xs = program.operands()
    twice, once = stack(stack(xs[0], 0, 0), 1, 0), stack(xs[-1], 2, 0)
    none = (None,) * (len(xs) - 2)

    def mapped(f):
        inner = jax.vmap(jax.grad(loss(f), all_args(xs)), (0, *none, None))
        return jax.vmap(inner, (0, *none, 0))(twice, *xs[1:-1], once)

    assert_same(mapped, *program.both(opaque))


@pytest.mark.parametrize("name", ["query_seq_lengths", "query_segment_ids", "mask"])
def test_vmap_of_masks(name):
    rng = np.random.default_rng(0)
    q, k, v = PROGRAMS["attention"].operands()
    if name == "query_seq_lengths":
        mapped = {name: np.int32([[3, 2], [0, 1], [2, 3]]), "key_value_seq_lengths": np.int32([[4, 5], [1, 2], [5, 0]])}
    elif name == "query_segment_ids":
        mapped = {
            name: rng.integers(0, 2, (3, 2, 3), np.int32),
            "key_value_segment_ids": rng.integers(0, 2, (3, 2, 5), np.int32),
        }
    else:
        mapped = {name: rng.random((3, 1, 4, 3, 5)) < 0.7}
    grad = jax.grad(lambda xs, masks: jnp.sum(jnp.sin(jk.dot_product_attention(*xs, **masks))))

    def one_by_one(xs, masks):
        each = [grad(xs, {name: mask[i] for name, mask in masks.items()}) for i in range(3)]
        return jax.tree.map(lambda *grads: jnp.stack(grads), *each)

    assert_close(
        *compile_quickly(lambda: (jax.vmap(grad, (None, 0))((q, k, v), mapped), one_by_one((q, k, v), mapped)))()
    )


def test_vmap_with_an_axis_name():
    """A collective over the mapped axis inside the function."""
    a, b = stack(PROGRAMS["product"].operands()[0], 0, 0), PROGRAMS["product"].operands()[1]
    mean = lambda f: jax.vmap(lambda a: jax.lax.pmean(f(a, b), "i"), axis_name="i")(a)
    assert_same(mean, *PROGRAMS["product"].both("xla"))


# Control flow and remat.


def layer(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A residual block of a scan, from the activations and one weight."""
    if name == "attention":
        return lambda h, w: h + f(jnp.sin(h * w), h, h)
    return lambda h, w: jnp.sin(h + f(h, w))


def _side_by_side(projection: Program) -> Program:
    """Queries, keys and values as one array of as many columns as the weight, with angles that are constants."""
    length, columns = projection.shapes[0][-2], projection.shapes[1][-1]
    angles = np.linspace(0, 3, length * columns // 6, dtype=np.float32).reshape(length, -1)

    def joined(f: Callable[..., Any]) -> Callable[..., jax.Array]:
        def g(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
            parts = f(x, w, jnp.cos(angles), jnp.sin(angles), **options)
            return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], axis=-1)

        return g

    return Program(joined(projection.ours), joined(projection.reference), projection.shapes)


BLOCKS = {
    "product": Program(jk.matmul, jnp.matmul, shapes=((4, 6), (3, 6, 6))),
    "silu": Program(
        lambda a, b, backend: jk.matmul(a, b, activation="silu", backend=backend),
        lambda a, b: jax.nn.silu(a @ b),
        shapes=((4, 6), (3, 6, 6)),
    ),
    "projection": _side_by_side(_projection((4, 6), (3, 6, 6), heads=(1, 1))),
    "attention": Program(
        functools.partial(jk.dot_product_attention, is_causal=True),
        functools.partial(jax.nn.dot_product_attention, is_causal=True),
        shapes=((2, 3, 2, 4), (3, 2, 3, 2, 4)),
    ),
    "rms norm": Program(
        functools.partial(jk.rms_norm, eps=0.1, scale_offset=0.5), _plain_norm, shapes=((4, 6), (3, 6))
    ),
}

POLICIES = {
    "no checkpoint": None,
    "save nothing": jax.checkpoint_policies.nothing_saveable,
    "save everything": jax.checkpoint_policies.everything_saveable,
    "save our results": lambda primitive, *_, **__: primitive.name.startswith("jk_"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_scan_over_layers(opaque, name, policy):
    """The gradient of a scan, its body under jax.checkpoint or not, and the scan of a tangent."""
    h, ws = BLOCKS[name].operands(0)
    dh, dws = BLOCKS[name].operands(1)

    def derivatives(f):
        body = layer(f, name)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False) if policy else body
        scan = lambda h, ws: jax.lax.scan(lambda h, w: (body(h, w), None), h, ws)[0]
        results = [jax.grad(loss(scan), (0, 1))(h, ws)]
        return results if policy else [*results, jax.jvp(scan, (h, ws), (dh, dws))]

    assert_same(derivatives, *BLOCKS[name].both(opaque))


@some_programs("product", "bias, gelu, residual", "projection, halves", "attention, bias", "layer norm, residual")
def test_cond_loop_and_custom_derivatives_around_it(program):
    xs = program.operands()

    def programs(f):
        chosen = lambda flag, *xs: jax.lax.cond(flag, loss(f), lambda *xs: jnp.sum(xs[0]), *xs)
        grads = [jax.grad(chosen, tuple(i + 1 for i in all_args(xs)))(flag, *xs) for flag in (True, False)]
        looped = jax.lax.fori_loop(0, 3, lambda i, total: total + loss(f)(*xs) * i, 0.0)
        doubled = jax.custom_vjp(lambda *xs: f(*xs))
        doubled.defvjp(lambda *xs: (f(*xs), xs), lambda xs, ct: jax.tree.map(lambda g: 2 * g, jax.vjp(f, *xs)[1](ct)))
        return grads, looped, jax.grad(loss(doubled), all_args(xs))(*xs)

    assert_same(programs, *program.both("xla"))


def primitives_of(f: Callable[..., Any], *xs: Any) -> dict[str, int]:
    """How often each of our primitives is in the program of f, inner programs included."""
    text = str(jax.make_jaxpr(f)(*xs).pretty_print(use_color=False, name_stack=False))
    names = "jk_matmul", "jk_dot_general", "jk_attention_forward", "jk_attention_backward"
    return {name: count for name in names if (count := text.count(f" {name}["))}


def kept(f: Callable[..., Any], *xs: np.ndarray) -> list[tuple[int, ...]]:
    """Shapes of what the forward pass keeps for the backward one."""
    return sorted(leaf.shape for leaf in jax.tree.leaves(jax.vjp(f, *xs)[1]))


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "silu", "gelu", "gelu_erf"])
def test_fused_product_keeps_its_operands_and_the_preactivation(activation):
    a, b, bias, residual = PROGRAMS["bias, gelu, residual"].operands()
    f = lambda a, b, bias, residual: jk.matmul(a, b, bias=bias, activation=activation, residual=residual)
    assert kept(f, a, b, bias, residual) == sorted([a.shape, b.shape, residual.shape])
    assert kept(lambda a, b: jk.matmul(a, b), a, b) == sorted([a.shape, b.shape])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_tangent_of_a_multiplier_varies_with_the_operands(activation):
    """The derivative by the multiplier saves the pre-activation, and its own derivative must save it, too."""
    a, b, multiplier = PROGRAMS["silu, multiplier"].operands()
    activate = jax.nn.silu if activation else lambda x: x
    ours = lambda a, m: jk.matmul(a, b, activation=activation, multiplier=m)
    plain = lambda a, m: activate(a @ b) * m

    def mixed(f: Callable[..., Any]) -> Any:
        by_multiplier = lambda a: jax.jvp(lambda m: f(a, m), (multiplier,), (multiplier,))[1]
        return jax.jvp(by_multiplier, (a,), (a,))

    assert_close(mixed(ours), mixed(plain))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gated_product_keeps_its_multiplier_too(activation):
    a, b, multiplier = PROGRAMS["silu, multiplier"].operands()
    f = lambda a, b, multiplier: jk.matmul(a, b, activation=activation, multiplier=multiplier)
    assert kept(f, a, b, multiplier) == sorted([a.shape, b.shape, multiplier.shape, multiplier.shape])
    if activation is None:  # The derivative by the product alone needs no pre-activation.
        assert kept(lambda a, b: f(a, b, multiplier), a, b) == sorted([a.shape, b.shape, multiplier.shape])


def test_attention_keeps_its_operands_output_and_lse():
    q, k, v = PROGRAMS["attention"].operands()
    batch, num_queries, num_heads, _ = q.shape
    lse = batch, num_heads, num_queries
    assert kept(jk.dot_product_attention, q, k, v) == sorted([q.shape, k.shape, v.shape, q.shape, lse])


def test_norm_keeps_its_sum_and_the_statistics():
    x, scale, bias, residual = PROGRAMS["layer norm, residual"].operands()
    f = lambda x, scale, bias, residual: jk.layer_norm(x, scale, bias, residual=residual)
    row, parameter = (1, x.shape[0]), (1, x.shape[1])
    assert kept(f, x, scale, bias, residual) == sorted([row, row, parameter, parameter, (1, *x.shape)])
    assert kept(jk.rms_norm, x) == sorted([row, (1, *x.shape)])


def test_checkpoint_keeps_what_its_policy_says():
    """One fused product: recomputed in the backward pass, or only its results kept."""
    a, b, *_ = PROGRAMS["bias, gelu, residual"].operands()
    f = lambda a, b: jnp.sum(jk.matmul(a, b, activation="gelu"))
    gradient = lambda policy: jax.grad(jax.checkpoint(f, policy=policy), (0, 1))
    assert primitives_of(jax.grad(f, (0, 1)), a, b) == dict(jk_matmul=1, jk_dot_general=2)
    saved = gradient(POLICIES["save our results"])
    assert primitives_of(saved, a, b) == dict(jk_matmul=1, jk_dot_general=2)
    recomputed = gradient(POLICIES["save nothing"])
    assert primitives_of(recomputed, a, b) == dict(jk_matmul=2, jk_dot_general=2)


def count(f: Callable[..., Any], *xs: Any, names: tuple[str, ...]) -> int:
    """How many primitives of these names are in the program of f, inner programs included."""
    text = str(jax.make_jaxpr(f)(*xs).pretty_print(use_color=False, name_stack=False))
    return sum(text.count(f" {name}[") for name in names)


class Block(nn.Module):
    """Two products, of the arguments only."""

    product: Callable[..., Any]

    def __call__(self, x, v, w):
        return jnp.sin(self.product(jnp.sin(self.product(x, v)), w))


REMATS = {
    "jax": lambda product, policy: jax.checkpoint(Block(product).__call__, policy=policy),
    "linen": lambda product, policy: functools.partial(nn.remat(Block, policy=policy)(product).apply, {}),
    "nnx": lambda product, policy: nnx.remat(Block(product).__call__, policy=policy),
}


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("policy", ["dots_saveable", "checkpoint_dots", "dots_with_no_batch_dims_saveable"])
@pytest.mark.parametrize("ours", ["dot_general", "matmul", "silu"])
def test_checkpoint_policies_know_our_products(ours, policy, remat):
    """A gradient has as many products as with plain JAX under the policy of the same name."""
    product, reference = {
        "dot_general": (lambda a, b: jk.dot_general(a, b, (((1,), (0,)), ((), ()))), jnp.matmul),
        "matmul": (jk.matmul, jnp.matmul),
        "silu": (functools.partial(jk.matmul, activation="silu"), lambda a, b: jax.nn.silu(a @ b)),
    }[ours]
    xs = [random_array(np.random.default_rng(i), shape, "float32") for i, shape in enumerate([(4, 6), (6, 6), (6, 6)])]
    gradient = lambda f, policy: jax.grad(lambda *xs: jnp.sum(REMATS[remat](f, policy)(*xs)), (0, 1, 2))
    ours = gradient(product, getattr(jk.checkpoint_policies, policy))
    reference = gradient(reference, getattr(jax.checkpoint_policies, policy))
    assert count(reference, *xs, names=("dot_general",)) == 6
    assert count(ours, *xs, names=("jk_dot_general", "jk_matmul")) == 6
    assert_close(*compile_quickly(lambda: (ours(*xs), reference(*xs)))())


def test_gated_mlp_has_epilogues_for_its_elementwise_work():
    """The gradient has nine products. Those with an epilogue: the gate, its gradients, and the gradient of x."""

    def equations(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield eqn
            if "jaxpr" in eqn.params:
                yield from equations(eqn.params["jaxpr"])

    gradient = jax.make_jaxpr(jax.grad(lambda *xs: jnp.sum(jk.gated_mlp(*xs)), (0, 1, 2, 3)))
    found = equations(gradient(*PROGRAMS["gated mlp"].operands()))
    statics = [eqn.params["static"] for eqn in found if eqn.primitive.name in ("jk_dot_general", "jk_matmul")]
    assert len(statics) == 9
    assert [(x.activation, x.is_gradient, x.residual is not None) for x in statics if x.fused] == [
        ("silu", False, False),
        ("silu", True, False),
        (None, False, True),
    ]


@pytest.mark.parametrize(("moving", "most"), [((0,), 6), ((1,), 5), ((2,), 5), ((3,), 4), ((0, 3), 7), ((1, 2), 6)])
def test_gated_mlp_multiplies_no_zeros(moving, most):
    """Three products of the forward pass, and those that the wanted gradients need."""
    program = PROGRAMS["gated mlp"]
    xs = program.operands()
    gradient = lambda f: jax.grad(lambda *xs: jnp.sum(f(*xs)), moving)
    ours, reference = gradient(jk.gated_mlp), gradient(program.reference)
    assert_close(*compile_quickly(lambda: (ours(*xs), reference(*xs)))())
    assert count(ours, *xs, names=("jk_dot_general", "jk_matmul")) == most


@pytest.mark.parametrize("gated", [False, True])
def test_checkpoint_keeps_the_preactivation_alone(gated):
    """The backward pass computes the activation and the multiplication again, but no product."""
    a, b, multiplier = PROGRAMS["silu, multiplier"].operands()
    c = random_array(np.random.default_rng(7), (b.shape[1], 4), "float32")

    def f(a, b, c, multiplier):
        h = jk.matmul(a, b, activation="silu", multiplier=multiplier if gated else None)
        return jnp.sum(jnp.sin(jk.matmul(h, c)))

    xs = a, b, c, multiplier
    saving = jax.checkpoint(f, policy=jk.checkpoint_policies.dots_saveable)
    results = [multiplier.shape, (a.shape[0], c.shape[1])]  # The pre-activation, and the second product.
    assert kept(saving, *xs) == sorted([a.shape, b.shape, c.shape, *[multiplier.shape] * gated, *results])
    gradient = lambda f: jax.grad(f, (0, 1, 2, 3))
    assert count(gradient(saving), *xs, names=("jk_dot_general", "jk_matmul")) == 6
    assert count(gradient(saving), *xs, names=("activate",)) == 1
    everything = jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)
    assert count(gradient(everything), *xs, names=("activate",)) == 0
    for derivative in (gradient, jax.hessian):
        results = compile_quickly(lambda of=derivative: [of(g)(*xs) for g in (f, saving, everything)])()
        assert_close(results[1], results[0])
        assert_close(results[2], results[0])


def test_policies_tell_products_with_batch_dimensions():
    a, b = PROGRAMS["batch of products"].operands()
    f = lambda product: lambda a, b: jnp.sum(jnp.sin(product(jnp.sin(product(a, b)), jnp.swapaxes(b, 1, 2))))
    for name in ("dots_saveable", "dots_with_no_batch_dims_saveable"):
        ours = jax.grad(jax.checkpoint(f(jk.matmul), policy=getattr(jk.checkpoint_policies, name)))
        plain = jax.grad(jax.checkpoint(f(jnp.matmul), policy=getattr(jax.checkpoint_policies, name)))
        assert count(ours, a, b, names=("jk_dot_general",)) == count(plain, a, b, names=("dot_general",))


def test_attention_is_saved_by_name():
    """Then the backward pass runs no forward kernel again."""
    xs = PROGRAMS["attention"].operands()
    weight = np.ones((8, 8), np.float32)
    f = lambda weight, *xs: jnp.sum(jnp.sin(jk.matmul(jk.dot_product_attention(*xs).reshape(-1, 8), weight)))
    gradient = lambda policy: jax.grad(jax.checkpoint(f, policy=policy), (0, 1, 2, 3))
    forward = lambda policy: count(gradient(policy), weight, *xs, names=("jk_attention_forward",))
    named = jax.checkpoint_policies.save_only_these_names
    assert forward(None) == 2
    assert forward(jk.checkpoint_policies.dots_saveable) == 2
    assert forward(named("jk_attention_out")) == 2
    assert forward(named("jk_attention_out", "jk_attention_lse")) == 1
    both = jk.checkpoint_policies.save_products_and_attention
    assert forward(both) == 1
    assert count(gradient(both), weight, *xs, names=("jk_dot_general",)) == 3
    assert_close(jax.jit(gradient(both))(weight, *xs), jax.jit(gradient(None))(weight, *xs))


@pytest.mark.parametrize("centered", [False, True])
def test_statistics_of_norms_are_saved(centered):
    """Then the backward pass computes no norm again, and keeps the operand and the statistics, but not the result."""
    draw = functools.partial(random_array, np.random.default_rng(0), dtype="float32")
    x, scale = draw((2, 5, 8)), draw((8,))
    norm = lambda x, scale: (jk.layer_norm if centered else jk.rms_norm)(x, scale, return_x=True)
    f = lambda policy: lambda x, scale: sum(map(jnp.sum, map(jnp.sin, jax.checkpoint(norm, policy=policy)(x, scale))))
    gradient = lambda policy: jax.grad(f(policy), (0, 1))
    saving = jk.checkpoint_policies.save_norms
    forward = lambda policy: count(gradient(policy), x, scale, names=("jk_norm_forward",))
    assert (forward(None), forward(saving)) == (2, 1)
    statistics = [(1, 2, 5)] * (2 if centered else 1)
    assert kept(jax.checkpoint(lambda *xs: norm(*xs)[0], policy=saving), x, scale) == sorted(
        [x.shape, scale.shape, *statistics]
    )
    assert_close(gradient(saving)(x, scale), gradient(None)(x, scale))


def test_gradient_of_attention_is_one_forward_and_one_backward_kernel():
    q, k, v = PROGRAMS["attention"].operands()
    gradient = jax.grad(loss(jk.dot_product_attention), (0, 1, 2))
    assert primitives_of(gradient, q, k, v) == dict(jk_attention_forward=1, jk_attention_backward=1)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 64), (4, 64), (2, 32)])
def test_many_tangents_of_some_operands(num_heads, head_dim):
    """XLA's CPU backend returned garbage for 512 tangents of the queries with zero tangents of the values."""
    shape = (1, 16, num_heads, head_dim)
    draw = functools.partial(random_array, np.random.default_rng(0), dtype=jnp.float32)
    q, k, v = draw((1, 4, *shape[2:])), draw(shape), draw(shape)

    def products(attend):
        mapped = lambda t: jax.jvp(lambda q: attend(q, k, v), (q,), (t,))[1]
        return lambda ts: (jax.vmap(mapped)(ts), jax.hessian(lambda q: jnp.sum(jnp.sin(attend(q, k, v))))(q))

    ts = draw((512, *q.shape))
    ours = products(functools.partial(jk.dot_product_attention, backend="xla"))
    assert_close(jax.jit(ours)(ts), jax.jit(products(jax.nn.dot_product_attention))(ts))


# Experimental transforms.


@pytest.mark.sampled(one_in=2)
@some_programs(
    "product",
    "alpha",
    "dot_general",
    "silu",
    "bias, gelu, residual",
    "projection, halves",
    "attention",
    "attention, masks",
    "rms norm",
)
def test_taylor_series(program):
    """`jax.experimental.jet`: three orders, of every operand."""
    primals = program.operands()
    series = tuple([program.operands(order)[i] for order in (1, 2, 3)] for i in range(len(primals)))
    assert_same(lambda f: jet.jet(f, primals, series), *program.both("xla"))


def test_taylor_series_of_a_kernel_are_refused(opaque):
    primals = PROGRAMS["attention"].operands()
    with pytest.raises(NotImplementedError, match="Taylor series are computed by XLA only"):
        jet.jet(functools.partial(jk.dot_product_attention, backend=opaque), primals, tuple([x] for x in primals))


@some_programs("product", "silu", "projection, halves", "attention", "rms norm")
def test_checkify_finds_nan(backend, program):
    """And says which operation made it."""
    f = checkify.checkify(jax.jit(program.both(backend)[0]), errors=checkify.nan_checks)
    first, *rest = program.operands()
    assert f(first, *rest)[0].get() is None
    message = f(np.full_like(first, np.nan), *rest)[0].get()
    assert message is not None
    assert "nan generated by primitive: jk_" in message


# Other ways in.


@some_programs("bias, gelu, residual", "projection, neighbours", "attention, bias", "layer norm, residual")
def test_no_tracer_leaks(opaque, program):
    with jax.checking_leaks():
        compile_quickly(jax.vmap(jax.grad(loss(program.both(opaque)[0]))))(*(x[None] for x in program.operands()))


@some_programs("product", "bias, gelu, residual", "projection, halves", "layer norm, residual")
def test_eager_evaluation_equals_jit(backend, program):
    f, _ = program.both(backend)
    xs = program.operands()
    assert_close(f(*xs), jax.jit(f)(*xs))
    assert_close(jax.grad(loss(f))(*xs), jax.jit(jax.grad(loss(f)))(*xs))


# On the kernels, which take 16 bits.

_PRODUCTS = ("product", "batch of products", "alpha", "dot_general", "bias", "silu", "bias, residual")
_PRODUCTS += ("silu, multiplier", "bias, gelu, residual", "gated mlp", "gated mlp, biases, residual")
_ATTENTIONS = ("attention", "attention, masks", "attention, lse")
_NORMS = ("rms norm", "rms norm, stream", "layer norm, residual")
#: Large enough for the kernel: 128 rows, parts of whole 64 columns.
_PROJECTIONS = {
    "projection of 64": _projection((2, 64, 8), (8, 256), heads=(2, 1)),
    "projection of 64, halves": _projection((2, 64, 8), (8, 256), (64, 32), (64, 32), heads=(2, 1)),
    "projection of 64, neighbours": _projection(
        (2, 64, 8), (8, 384), (64, 32), (64, 32), heads=(2, 2), pairs="neighbours"
    ),
}
_ON_KERNELS = {
    "cuda": (*_PRODUCTS, *_PROJECTIONS),
    "pallas": (*_PRODUCTS, *_ATTENTIONS),
    "triton": _NORMS,
    "opaque": ("silu", "projection of 64, halves", "attention, masks", "rms norm"),
}


def rounded(xs: Arrays) -> Arrays:
    return tuple(np.float32(x.astype(jnp.bfloat16)) for x in xs)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(backend, name, id=f"{backend}-{name}", marks=() if backend == "opaque" else pytest.mark.gpu)
        for backend, names in _ON_KERNELS.items()
        for name in names
    ],
)
def test_kernels_under_every_transform(opaque, kernel, name):
    """Forward mode of attention and second derivatives of both attention and norms, which not all have, aside."""
    program = (PROGRAMS | _PROJECTIONS)[name]
    # The loss is a sine: it would amplify the rounding of large results.
    size, of_stack = (0.3, 0.3) if "mlp" in name or name in _PROJECTIONS else (0.7, 1.0)
    xs, dxs = (rounded(tuple(size * x for x in program.operands(seed))) for seed in (0, 1))
    stacks = rounded(tuple(of_stack * stack(x, i, 0) for i, x in enumerate(xs)))
    none = (None,) * (len(xs) - 1)

    def transforms(f):
        out, pull = jax.vjp(f, *xs)
        gradient = jax.grad(loss(f), all_args(xs))
        remade = jax.grad(loss(jax.checkpoint(f)), all_args(xs))
        forward = [jax.jvp(f, xs, dxs)] if name in (*_PRODUCTS, *_PROJECTIONS, *_NORMS) else []
        forward += [jax.jvp(gradient, xs, dxs)] if name in (*_PRODUCTS, *_PROJECTIONS) else []
        return dict(
            out=out,
            pull=pull(out),
            forward=forward,
            remat=remade(*xs),
            mapped=jax.vmap(gradient)(*stacks),
            first_mapped=jax.vmap(gradient, (0, *none))(stacks[0], *xs[1:]),
            last_mapped=jax.vmap(f, (*none, 0))(*xs[:-1], stacks[-1]),
            scanned=jax.lax.scan(lambda carry, x: (carry, gradient(x, *xs[1:])), None, stacks[0])[1],
            branch=jax.lax.cond(jnp.sum(xs[0]) > jnp.inf, lambda: out, lambda: f(*xs)),
        )

    f, reference = program.both(kernel)
    in_16_bits = lambda *xs: jax.tree.map(jnp.float32, f(*(jnp.asarray(x, jnp.bfloat16) for x in xs)))
    ours, expected = compile_quickly(lambda: (transforms(in_16_bits), transforms(reference)))()
    for transform in expected:
        assert_close(ours[transform], expected[transform], rtol=0.05)
