"""`jax.export` from a machine without a GPU: for two platforms at once, with symbolic sizes, and back again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close

import jaxkernels as jk

PLATFORMS = ("cpu", "cuda")


def draw(*shape: int, dtype: str = "float32") -> np.ndarray:
    return random_array(np.random.default_rng(0), shape, dtype)


def exported(f, *xs, platforms=PLATFORMS):
    """`f` after a round trip through bytes."""
    program = export.export(jax.jit(f), platforms=platforms)(*xs)
    restored = export.deserialize(program.serialize())
    assert restored.platforms == platforms
    return restored


def with_gradients(f):
    return lambda *xs: (f(*xs), jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), tuple(range(len(xs))))(*xs))


PROGRAMS = {
    "product": (jk.matmul, ((5, 7), (7, 3))),
    "dense": (lambda a, b, bias: jk.matmul(a, b, bias=bias, activation="gelu"), ((2, 5, 7), (7, 3), (3,))),
    "dot_general": (lambda a, b: jk.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))), ((2, 5, 7), (2, 7, 3))),
    "attention": (
        functools.partial(jk.dot_product_attention, is_causal=True),
        ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (1, 4, 5, 6)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_trip_for_two_platforms(name):
    f, shapes = PROGRAMS[name]
    xs = [draw(*shape) for shape in shapes]
    assert_close(exported(with_gradients(f), *xs).call(*xs), jax.jit(with_gradients(f))(*xs))


def test_export_takes_the_kernels_of_each_platform():
    """What a GPU gets is what it would get at home, not what the exporting machine runs."""
    a, b = draw(256, 512, dtype="bfloat16"), draw(512, 384, dtype="bfloat16")
    (choice,) = jk.explain(jk.matmul, a, b, platform="cuda").choices
    assert choice.backend != "xla"
    for_cpu, for_cuda, for_both = (
        exported(jk.matmul, a, b, platforms=platforms) for platforms in (("cpu",), ("cuda",), PLATFORMS)
    )
    assert "custom_call" not in for_cpu.mlir_module()
    assert "custom_call" in for_cuda.mlir_module()
    assert "custom_call" in for_both.mlir_module()
    assert_close(for_both.call(a, b).astype(np.float32), jk.matmul(a, b).astype(jnp.float32))


dense, dot_general, attention = (PROGRAMS[name][0] for name in ("dense", "dot_general", "attention"))
QKV = "b, t, 4, 8", "b, s, 2, 8", "b, s, 2, 8"

SYMBOLIC = {
    "rows": (with_gradients(jk.matmul), ("m, 7", "7, 3")),
    "contraction": (with_gradients(jk.matmul), ("m, k", "k, 3")),
    "batch": (with_gradients(jk.matmul), ("b, 5, 7", "7, 3")),
    "batches": (with_gradients(jk.matmul), ("b, 5, 7", "b, 7, 3")),
    "broadcast batch": (with_gradients(jk.matmul), ("b, 5, 7", "1, 7, 3")),
    "matrix by batch": (with_gradients(jk.matmul), ("5, 7", "b, 7, 3")),
    "dense": (with_gradients(dense), ("b, 5, 7", "7, 3", "3")),
    "dot_general": (with_gradients(dot_general), ("b, 5, 7", "b, 7, 3")),
    "vmap": (jax.vmap(with_gradients(dense)), ("b, 5, 7", "b, 7, 3", "b, 3")),
    "attention": (with_gradients(attention), (*QKV, "1, 4, t, s")),
    "attention, bias of each batch": (with_gradients(attention), (*QKV, "b, 4, 1, s")),
    "vmap of attention": (
        jax.vmap(with_gradients(attention)),
        (*(f"3, {shape}" for shape in QKV), "3, 1, 4, t, s"),
    ),
}
SIZES = dict(b=2, m=5, k=7, t=5, s=6)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name):
    """One program for every batch and length."""
    f, shapes = SYMBOLIC[name]
    scope = export.SymbolicScope()
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.float32) for shape in shapes]
    program = exported(f, *types)
    xs = [draw(*(SIZES[size] if size in SIZES else int(size) for size in shape.split(", "))) for shape in shapes]
    assert_close(program.call(*xs), jax.jit(f)(*xs))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_program_on_a_mesh(opaque, meshes, kind):
    """On Auto axes by XLA: a kernel would be partitioned by a callback into Python, which JAX does not export."""
    xs = draw(16, 32), draw(32, 8)
    mesh = getattr(meshes, kind)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, (P("x", "y"), P("y", None)))]
    f = functools.partial(jk.matmul, backend="xla" if kind == "auto" else opaque)
    program = exported(with_gradients(f), *placed, platforms=("cpu",))
    assert program.nr_devices == 8
    assert_close(jax.jit(program.call)(*placed), jax.jit(with_gradients(jnp.matmul))(*xs))
