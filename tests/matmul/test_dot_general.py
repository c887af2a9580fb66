"""`jk.dot_general` in the place of `jax.lax.dot_general`: dimension numbers, dtypes, callers in JAX and Flax."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from flax import nnx
from numerics import assert_close, compile_quickly

import jaxkernels as jk
from jaxkernels.core import hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.spec import Gemm, MatmulSpec

#: lhs shape, rhs shape, dimension numbers.
PROGRAMS = {
    "vector . vector": ((7,), (7,), (((0,), (0,)), ((), ()))),
    "outer product": ((5,), (3,), (((), ()), ((), ()))),
    "scalar . matrix": ((), (3, 4), (((), ()), ((), ()))),
    "rank-3 kernel": ((2, 5, 7), (7, 3, 4), (((2,), (0,)), ((), ()))),
    "rank-3 kernel, two contracted": ((2, 5, 3, 4), (3, 4, 7), (((2, 3), (0, 1)), ((), ()))),
    "contracted in another order": ((3, 5, 4), (4, 6, 3), (((0, 2), (2, 0)), ((), ()))),
    "contracted and interleaved": ((3, 5, 4, 2), (2, 6, 3), (((3, 0), (0, 2)), ((), ()))),
    "attention logits": ((2, 5, 3, 4), (2, 6, 3, 4), (((3,), (3,)), ((0, 2), (0, 2)))),
    "attention values": ((2, 3, 5, 6), (2, 6, 3, 4), (((3,), (1,)), ((0, 1), (0, 2)))),
    "batches in another order": ((2, 3, 5, 4), (3, 4, 2, 6), (((3,), (1,)), ((1, 0), (0, 2)))),
    "batch last": ((5, 4, 2), (4, 6, 2), (((1,), (0,)), ((2,), (2,)))),
    "batch only": ((2, 3), (3, 2), (((), ()), ((0, 1), (1, 0)))),
    "no free dimension": ((2, 3, 4), (4, 2, 3), (((1, 2), (2, 0)), ((0,), (1,)))),
    "both matrices transposed": ((7, 5), (3, 7), (((0,), (1,)), ((), ()))),
    "empty contraction": ((5, 0), (0, 3), (((1,), (0,)), ((), ()))),
}


def operands(name: str, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_array(rng, shape, dtype) for shape in PROGRAMS[name][:2]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_follow_lax(backend, name):
    lhs, rhs = operands(name)
    numbers = PROGRAMS[name][2]
    ct = random_array(
        np.random.default_rng(1), jax.eval_shape(lambda: jax.lax.dot_general(lhs, rhs, numbers)).shape, "float32"
    )

    def with_gradients(dot_general):
        out, pull = jax.vjp(lambda lhs, rhs: dot_general(lhs, rhs, numbers), lhs, rhs)
        return out, pull(ct)

    ours = lambda *args: jk.dot_general(*args, backend=backend)
    assert_close(*compile_quickly(lambda: (with_gradients(ours), with_gradients(jax.lax.dot_general)))())


@pytest.mark.parametrize("name", PROGRAMS)
def test_gemm_is_the_product_kernels_compute(name):
    """`MatmulSpec.fold`, one (batched) matrix product and `unfold` make up any dot_general."""
    lhs, rhs = operands(name)
    numbers = PROGRAMS[name][2]
    chip = hardware.host()
    spec = MatmulSpec(ArrayType.of(lhs), ArrayType.of(rhs), numbers, np.dtype(np.float32), chip)
    a, b = spec.fold(lhs, rhs)
    a = np.asarray(a) if spec.gemm.lhs_layout == "mk" else np.swapaxes(a, -1, -2)
    b = np.asarray(b) if spec.gemm.rhs_layout == "kn" else np.swapaxes(b, -1, -2)
    lead = () if spec.gemm.batch is None else (spec.gemm.batch,)
    assert a.shape == (*lead, spec.gemm.m, spec.gemm.k)
    assert b.shape == (*lead, spec.gemm.k, spec.gemm.n)
    assert_close(spec.unfold(a @ b), np.asarray(jax.lax.dot_general(lhs, rhs, numbers)))


@pytest.mark.parametrize(
    ("name", "gemm"),
    [
        ("rank-3 kernel", Gemm(None, 10, 12, 7, "mk", "kn", None, None)),
        ("both matrices transposed", Gemm(None, 5, 3, 7, "km", "nk", None, None)),
        ("attention logits", Gemm(6, 5, 6, 4, "mk", "nk", (0, 2, 1, 3), (0, 2, 1, 3))),
        ("contracted and interleaved", Gemm(None, 20, 6, 6, "mk", "nk", (1, 2, 0, 3), (1, 2, 0))),
        ("batch last", Gemm(2, 5, 6, 4, "mk", "nk", (2, 0, 1), (2, 1, 0))),
    ],
)
def test_gemm_copies_no_operand_that_is_a_matrix_already(name, gemm):
    lhs, rhs = (ArrayType.of(x) for x in operands(name))
    assert MatmulSpec(lhs, rhs, PROGRAMS[name][2], np.dtype(np.float32), hardware.host()).gemm == gemm


@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "preferred"),
    [
        ("bfloat16", "bfloat16", None),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", None),
        ("float16", "bfloat16", None),
        ("float32", "float32", "bfloat16"),
        ("float32", "float32", "float64"),
        ("int8", "int8", None),
        ("int8", "int8", "int32"),
        ("int8", "float32", None),
        ("float8_e4m3fn", "float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "float8_e5m2", "float32"),
        ("complex64", "complex64", None),
        ("uint4", "uint32", None),
        ("float4_e2m1fn", "float4_e2m1fn", None),
        ("float4_e2m1fn", "float4_e2m1fn", "float4_e2m1fn"),
    ],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64:UserWarning")
def test_dtypes_follow_lax(lhs_dtype, rhs_dtype, preferred):
    numbers = (((1,), (0,)), ((), ()))
    rng = np.random.default_rng(0)
    lhs, rhs = (  # Small whole numbers, exact in every dtype and every order of sums.
        jnp.asarray(rng.integers(-3, 4, shape) if "float4" not in dtype else rng.integers(-1, 2, shape), dtype)
        for shape, dtype in (((5, 4), lhs_dtype), ((4, 3), rhs_dtype))
    )

    def results(dot_general):
        f = lambda lhs, rhs: dot_general(lhs, rhs, numbers, preferred_element_type=preferred)
        is_inexact = [i for i, x in enumerate((lhs, rhs)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if len(is_inexact) < 2:
            return [f(lhs, rhs)]
        out, pull = jax.vjp(f, lhs, rhs)
        return [out, *pull(jnp.ones_like(out))]

    for ours, reference in zip(results(jk.dot_general), results(jax.lax.dot_general), strict=True):
        assert ours.dtype == reference.dtype
        np.testing.assert_array_equal(ours, reference)


def test_wide_result_of_four_bit_floats():
    """XLA refuses lax's on the CPU."""
    lhs, rhs = (jnp.asarray(np.eye(3) * 2, "float4_e2m1fn") for _ in range(2))
    out = jk.dot_general(lhs, rhs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(out, np.eye(3, dtype=np.float32) * 4)


def test_real_result_of_complex_operands():
    """The complex product's real part: lax drops the imaginary parts of the operands."""
    x = np.full((1, 1), 1 + 2j, np.complex64)
    out = jk.dot_general(x, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(out, [[-3]])


_WEAK, _WEAK_INT = jnp.broadcast_to(2.0, (3,)), jnp.broadcast_to(2, (3,))
_FLOAT32, _BFLOAT16 = jnp.ones(3), jnp.ones(3, jnp.bfloat16)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("rhs", [_WEAK, _WEAK_INT, _FLOAT32, _BFLOAT16], ids=lambda x: jax.typeof(x).str_short())
@pytest.mark.parametrize("lhs", [_WEAK, _WEAK_INT, _BFLOAT16], ids=lambda x: jax.typeof(x).str_short())
def test_weak_types_follow_jax(lhs, rhs):
    """A product of weakly typed operands is weakly typed: added to bfloat16 it stays bfloat16."""

    def types(product):
        results = [product(lhs, rhs), jax.jit(product)(lhs, rhs), jax.vmap(product)(lhs[None], rhs[None])]
        if lhs.dtype == rhs.dtype == jnp.float32:
            results.append(jax.jvp(product, (lhs, rhs), (lhs, rhs))[1])
        results += [x + jnp.ones((), jnp.bfloat16) for x in results]
        return [(x.dtype, x.weak_type) for x in results]

    numbers = (((0,), (0,)), ((), ()))
    product = lambda dot_general: lambda lhs, rhs: dot_general(lhs, rhs, numbers)
    assert types(product(jk.dot_general)) == types(product(jax.lax.dot_general))
    assert types(jk.matmul) == types(jnp.matmul)
    # With a dtype that is asked for, dot_general keeps the weak type. matmul does not.
    wide = lambda dot_general: lambda lhs, rhs: dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
    assert types(wide(jk.dot_general)) == types(wide(jax.lax.dot_general))
    ours = lambda lhs, rhs: jk.matmul(lhs, rhs, out_dtype=jnp.float32)
    assert types(ours) == types(lambda lhs, rhs: jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32))


def test_python_scalars():
    """JAX hands literals of a program to the rules as Python numbers."""
    numbers = (((), ()), ((), ()))

    def results(dot_general):
        cube = lambda x: dot_general(dot_general(x, x, numbers), jnp.sin(x), numbers) + dot_general(2.0, x, numbers)
        second = jax.hessian(jax.remat(cube))
        return (
            second(1.0),
            jax.hessian(jax.remat(lambda x: dot_general(x, x, numbers)))(1.0),
            jax.vmap(second)(_FLOAT32),
        )

    assert_close(results(jk.dot_general), results(jax.lax.dot_general))


def test_integer_operand_beside_a_differentiated_one():
    """The derivative in one operand leaves an integer one alone."""
    lhs, rhs = np.arange(12, dtype=np.int8).reshape(3, 4), np.ones((4, 2), np.float32)
    loss = lambda dot: lambda rhs: jnp.sum(dot(lhs, rhs, (((1,), (0,)), ((), ()))) ** 2)
    assert_close(jax.grad(loss(jk.dot_general))(rhs), jax.grad(loss(jax.lax.dot_general))(rhs))


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_real_operand_beside_a_complex_one(dtype):
    """Nothing of the product is lost, and the real operand's gradient is real."""
    lhs = np.arange(12, dtype=np.complex64).reshape(3, 4) * (1 + 2j)
    rhs = np.ones((4, 2), jnp.dtype(dtype))

    def results(dot_general):
        out, pull = jax.vjp(lambda lhs, rhs: dot_general(lhs, rhs, (((1,), (0,)), ((), ()))), lhs, rhs)
        return out, *pull(jnp.full_like(out, 1 + 1j))

    for ours, reference in zip(results(jk.dot_general), results(jax.lax.dot_general), strict=True):
        assert ours.dtype == reference.dtype
        np.testing.assert_array_equal(ours, reference)


def test_einsum_takes_it(backend):
    a, b = operands("attention logits")
    ours = jnp.einsum(
        "btnh,bsnh->bnts", a, b, _dot_general=lambda *args, **kw: jk.dot_general(*args, **kw, backend=backend)
    )
    assert_close(ours, jnp.einsum("btnh,bsnh->bnts", a, b))


@pytest.mark.parametrize("hook", [dict(dot_general=jk.dot_general), dict(dot_general_cls=lambda: jk.dot_general)])
def test_linen_layers_take_it(hook):
    """Two dimensions into two, with a batch dimension."""
    x = random_array(np.random.default_rng(0), (2, 5, 3, 4), "float32")
    make = lambda **hook: nn.DenseGeneral(features=(6, 2), axis=(-1, 1), batch_dims=(0,), **hook)
    ours, reference = make(**hook), make()
    variables = reference.init(jax.random.key(0), x)
    loss = lambda layer: lambda variables: jnp.sum(jnp.sin(layer.apply(variables, x)))
    assert_close(ours.apply(variables, x), reference.apply(variables, x))
    assert_close(jax.grad(loss(ours))(variables), jax.grad(loss(reference))(variables))


def test_nnx_layers_take_it():
    x = random_array(np.random.default_rng(0), (2, 5, 3, 4), "float32")
    make = lambda **hook: nnx.LinearGeneral((3, 4), (6, 2), axis=(-2, -1), rngs=nnx.Rngs(0), **hook)
    loss = lambda layer: jnp.sum(jnp.sin(layer(x)))
    ours, reference = make(dot_general=jk.dot_general), make()
    assert_close(ours(x), reference(x))
    assert_close(nnx.grad(loss)(ours), nnx.grad(loss)(reference))
    assert "jk_dot_general" in str(jax.make_jaxpr(ours)(x))


def test_nnx_attention_takes_it():
    x = random_array(np.random.default_rng(0), (2, 5, 8), "float32")
    make = lambda **hooks: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **hooks)
    ours = make(qkv_dot_general=jk.dot_general, out_dot_general=jk.dot_general)
    assert_close(ours(x), make()(x))
    assert str(jax.make_jaxpr(ours)(x)).count("jk_dot_general") == 4


@pytest.mark.parametrize(
    ("n", "dtype", "transposed", "shared"),
    [
        ((13,), jnp.bfloat16, False, ["rhs", "lhs"]),
        ((13,), jnp.float16, True, ["lhs", "lhs"]),
        ((16,), jnp.bfloat16, False, [None, None]),
        ((13,), jnp.float32, False, [None, None]),
        ((8, 13), jnp.bfloat16, False, [None, None]),  # The rows have 8 * 13 columns.
        ((3, 13), jnp.bfloat16, False, ["rhs", "lhs"]),
    ],
)
def test_gradients_share_a_cotangent_with_odd_rows(n, dtype, transposed, shared):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        out = jk.dot_general(x, w, (((1,), (1 if transposed else 0,)), ((), ())))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    x, w = jnp.ones((8, 24), dtype), jnp.ones((*n, 24) if transposed else (24, *n), dtype)
    forward, *gradients = jk.explain(jax.grad(loss, (1, 0)), x, w).choices
    assert forward.spec.shared is None
    assert [choice.spec.shared for choice in gradients] == shared
    texts = [str(choice.spec).partition(" + ")[2] for choice in gradients]
    assert texts == ["" if name is None else f"shared {name}" for name in shared]


def test_a_cotangent_is_not_shared_if_vmap_makes_its_rows_even():
    x, w = jnp.ones((8, 24), jnp.bfloat16), jnp.ones((24, 13, 16), jnp.bfloat16)

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(jk.matmul(x, w).astype(jnp.float32) ** 2))(w)

    _, choice = jk.explain(jax.vmap(gradient, (None, 2), 2), x, w).choices
    assert (choice.spec.cotangent, choice.spec.shared) == ("rhs", None)
