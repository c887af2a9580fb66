"""`jax.export` from a machine without a GPU: for two platforms at once, with symbolic sizes, and back again."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from jax import export
from jax._src import dispatch as jax_dispatch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close

import jaxkernels as jk
from jaxkernels import triton
from jaxkernels.core import _jax, dispatch, times
from jaxkernels.ops.matmul.rules import dot_general_op
from jaxkernels.triton import calls

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
    "norm": (
        lambda x, scale, bias, residual: sum(jk.layer_norm(x, scale, bias, residual=residual)),
        ((2, 5, 7), (7,), (7,), (2, 5, 7)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_trip_for_two_platforms(name):
    f, shapes = PROGRAMS[name]
    xs = [draw(*shape) for shape in shapes]
    assert_close(exported(with_gradients(f), *xs).call(*xs), jax.jit(with_gradients(f))(*xs))


A, B = draw(256, 512, dtype="bfloat16"), draw(512, 384, dtype="bfloat16")
PALLAS = "mosaic_gpu"


def test_export_takes_the_kernels_of_each_platform():
    """A GPU gets kernels for GPUs, even if the exporting machine has none."""
    a, b = A, B
    for_cpu, for_cuda, for_both = (
        exported(jk.matmul, a, b, platforms=platforms) for platforms in (("cpu",), ("cuda",), PLATFORMS)
    )
    assert "custom_call" not in for_cpu.mlir_module()
    assert PALLAS in for_cuda.mlir_module()
    assert PALLAS in for_both.mlir_module()
    assert_close(for_both.call(a, b).astype(np.float32), jk.matmul(a, b).astype(jnp.float32))


def test_export_gets_another_kernel_only_where_it_would_refuse_the_first(monkeypatch):
    """And what was exported is no other program's kernel."""
    monkeypatch.setattr(calls, "missing", lambda: "is left out: the first is to be cuda")
    at_home = lambda: jax.jit(jk.matmul).trace(A, B).lower(lowering_platforms=("cuda",)).as_text()
    assert jk.ffi.TARGET in at_home()
    allowed = dict(disabled_checks=[export.DisabledSafetyCheck.custom_call(jk.ffi.TARGET)])
    for options in ({}, allowed):  # JAX does not say what it would allow.
        text = export.export(jax.jit(jk.matmul), platforms=("cuda",), **options)(A, B).mlir_module()
        assert PALLAS in text
        assert jk.ffi.TARGET not in text
    assert jk.ffi.TARGET in at_home()
    named = jax.jit(functools.partial(jk.matmul, backend="cuda"))
    with pytest.raises(ValueError, match=jk.ffi.TARGET):
        export.export(named, platforms=("cuda",))(A, B)
    assert jk.ffi.TARGET in export.export(named, platforms=("cuda",), **allowed)(A, B).mlir_module()


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
@pytest.mark.parametrize("chip", ["NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
def test_triton_kernels_are_exported_for_the_chip_that_is_named(monkeypatch, chip):
    """If they are asked for by name, with the check of their custom call disabled. Unasked, XLA stands in."""
    monkeypatch.setenv("JAXKERNELS_TARGET", chip)
    allowed = dict(disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in triton.TARGETS])
    q = draw(2, 64, 4, 64, dtype="bfloat16")
    product = lambda backend: lambda *xs: jk.matmul(*xs, backend=backend)
    attend = lambda backend: lambda *xs: jk.dot_product_attention(*xs, is_causal=True, backend=backend)
    for make, xs in ((product, (A, B)), (attend, (q, q, q))):
        with dispatch.recording() as choices:
            unasked = export.export(jax.jit(make(None)), platforms=("cuda",), **allowed)(*xs)
            with pytest.raises(ValueError, match=jk.ffi.TARGET):
                export.export(jax.jit(make("triton")), platforms=("cuda",))(*xs)
            program = export.export(jax.jit(make("triton")), platforms=("cuda",), **allowed)(*xs)
        assert "custom_call" not in unasked.mlir_module()
        assert [choice.backend for choice in choices] == ["xla", "triton", "triton"]
        assert {choice.spec.target.name for choice in choices} == {chip}
        text = export.deserialize(program.serialize()).mlir_module()
        assert any(f"@{name}(" in text for name in triton.TARGETS)


dense, dot_general, attention, norm = (PROGRAMS[name][0] for name in ("dense", "dot_general", "attention", "norm"))
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
    "norm": (with_gradients(norm), ("b, m, k", "k", "k", "b, m, k")),
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


def test_kernels_on_a_mesh(meshes, monkeypatch):
    """By itself the choice is what JAX exports, of the fastest; a named kernel on Auto axes is JAX's own error."""
    monkeypatch.setattr(times, "covers", lambda *args: False)  # The order decides.
    put = lambda mesh: [jax.device_put(x, NamedSharding(mesh, P("x", None))) for x in (A, B)]
    explicit = exported(jk.matmul, *put(meshes.explicit), platforms=("cuda",))
    assert PALLAS in explicit.mlir_module()
    q = draw(8, 256, 4, 64, dtype="bfloat16")
    qkv = [jax.device_put(q, NamedSharding(meshes.auto, P("x")))] * 3
    for f, xs in ((jk.matmul, put(meshes.auto)), (jk.dot_product_attention, qkv)):
        with dispatch.recording() as choices:
            auto = exported(f, *xs, platforms=("cuda",))
        assert auto.nr_devices == 8
        assert "custom_call" not in auto.mlir_module()
        (choice,) = choices
        reason = "jax.export takes no kernel on Auto mesh axes: XLA's partitioner would ask Python for each shard's"
        names = [name for op, name in dispatch.REGISTRY if op == choice.op and name != "xla"]
        refusals = {name: calls.missing() if name == "triton" else None for name in names}
        assert choice.passed_over == tuple((name, refusal or reason) for name, refusal in refusals.items())
        for name, refusal in refusals.items():
            with pytest.raises(NotImplementedError, match=re.escape(refusal or "host_callbacks")):
                exported(functools.partial(f, backend=name), *xs, platforms=("cuda",))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["product", "attention"])
def test_abstract_mesh(opaque, meshes, kind, name):
    """A program is lowered for a mesh whose devices are not known, and runs on one that has devices."""
    f, shapes = PROGRAMS[name]
    f, shapes = with_gradients(f), [(8, *shape[1:]) for shape in shapes[:3]]
    spec = P("x", *[None] * (len(shapes[0]) - 1))
    mesh = getattr(meshes, kind)
    specs = [spec if name == "attention" or i == 0 else P(None, None) for i in range(len(shapes))]
    if name == "product":
        shapes = [(8, 7), (7, 3)]
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh.abstract_mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    program = exported(f, *types)
    assert program.nr_devices == 8
    xs = [draw(*shape) for shape in shapes]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs)]
    assert_close(jax.jit(program.call)(*placed), jax.jit(f)(*xs))
    # A kernel too, which jax.export itself would refuse on Auto axes.
    named = jax.jit(functools.partial(PROGRAMS[name][0], backend=opaque)).trace(*types)
    assert "sdy" in named.lower(lowering_platforms=("cuda",)).as_text()


def test_devices_are_asked_for_where_gpus_are_unlike(monkeypatch):
    """One program for all devices of a process would then have the kernels of the first one's chip."""
    asked = jax_dispatch.prim_requires_devices_during_lowering
    jax.make_jaxpr(jk.matmul)(A, B)
    assert dot_general_op.primitive not in asked
    monkeypatch.setattr(jax_dispatch, "prim_requires_devices_during_lowering", set())
    monkeypatch.setattr(_jax, "_has_unlike_gpus", lambda: True)
    jax.make_jaxpr(jk.matmul)(A[:64], B)  # Another shape: JAX remembers the abstract evaluation of the first.
    assert dot_general_op.primitive in jax_dispatch.prim_requires_devices_during_lowering
