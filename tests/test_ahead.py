"""Kernels compiled before a program is lowered, for an H200 that need not be there."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly

import jaxkernels as jk
from jaxkernels import ffi
from jaxkernels.core import dispatch, hardware
from jaxkernels.ffi import compiler
from jaxkernels.ffi.matmul import gemm
from jaxkernels.tuning import ahead, tuner

H200 = hardware.lookup("NVIDIA H200")
X = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
W = jax.ShapeDtypeStruct((3, 256, 256), jnp.bfloat16)
#: A kernel that compiles within a second.
SMALL = gemm.Config(block_m=64, block_n=64, block_k=64, num_stages=2)

matmul = functools.partial(jk.matmul, backend="cuda", config=SMALL)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The macros of every kernel that NVRTC compiles."""
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA H200")
    gemm._compile_cached.cache_clear()
    requests = []
    compile_now = compiler._Request.compile

    def recorded(request: compiler._Request) -> ffi.CompiledKernel:
        requests.append(request.options)
        return compile_now(request)

    monkeypatch.setattr(compiler._Request, "compile", recorded)
    yield requests
    gemm._compile_cached.cache_clear()


def layers(x, w):
    """Products in a loop, in a checkpoint, in a branch and in a jitted function, and one outside of them."""
    step = jax.checkpoint(lambda x, w: (matmul(x, w, activation="silu"), None))
    x, _ = jax.lax.scan(step, x, w)
    x = jax.lax.cond(jnp.sum(x) > 0, lambda x: matmul(x, w[0], activation="relu"), lambda x: x, x)
    x = jax.jit(matmul)(x, w[0].T)
    return jnp.sum(matmul(x, w[0]).astype(jnp.float32))


@pytest.mark.parametrize("x64", [False, True])
def test_lowering_finds_all_kernels(x64, compiled):
    lower = lambda: jax.jit(jax.grad(layers, (0, 1))).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
    with jax.enable_x64(x64):
        before, of_lowering = lower(), set(compiled)
        assert len(of_lowering) >= 5
        compiled.clear()
        gemm._compile_cached.cache_clear()
        for entry in compiler.cache_root().glob("cubins/*"):
            entry.unlink()
        ahead.compile_kernels(jax.jit(jax.grad(layers, (0, 1))).trace(X, W).jaxpr, H200)
        assert set(compiled) >= of_lowering
        assert len(compiled) == len(set(compiled))
        compiled.clear()
        assert lower() == before
        assert not compiled


def test_threads_wait_for_the_first_that_compiles_a_kernel(compiled):
    """Both products have one kernel, and different sizes."""

    def f(x, w):
        return matmul(x, w), matmul(x[:256], w)

    ahead.compile_kernels(jax.jit(f).trace(X, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)).jaxpr, H200)
    assert len(compiled) == 1


def test_kernels_compile_side_by_side(monkeypatch):
    """Each waits until the other has begun."""
    both = threading.Barrier(2)
    begun = []

    def compile_one(kernel, now, turn):
        both.wait(timeout=60)
        begun.append(kernel.config)

    monkeypatch.setattr(ahead, "_compile", compile_one)
    monkeypatch.setattr(ahead, "_THREADS", 2)
    f = lambda x, w: (matmul(x, w), matmul(x, w, activation="gelu"))
    ahead.compile_kernels(jax.jit(f).trace(X, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)).jaxpr, H200)
    assert begun == [SMALL, SMALL]


@pytest.mark.parametrize("is_compared", [False, True])
def test_kernels_that_will_be_compared(is_compared, monkeypatch, compiled):
    """A lowering that compares needs all backends with close estimates. Otherwise it needs the chosen one."""
    operands = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)] * 2
    (choice,) = jk.explain(jk.matmul, *operands, platform="cuda").choices
    assert len(choice.close) > 1
    begun = []
    monkeypatch.setattr(ahead, "_compile", lambda kernel, now, turn: begun.append((kernel.backend, kernel.is_compared)))
    traced = jax.jit(jk.matmul).trace(*operands)
    of_choice = [(choice.backend, False)] if dispatch.REGISTRY["matmul", choice.backend].compiles_in_lowering else []
    with jk.comparing(is_compared):
        ahead.compile_kernels(traced.jaxpr, H200)
        assert begun == of_choice  # The chip is not here: nothing will be compared.
        begun.clear()
        monkeypatch.setattr(tuner, "device_for", lambda chip: jax.devices()[0])
        ahead.compile_kernels(traced.jaxpr, H200)
    contenders = [(x, True) for x in choice.close for _ in dispatch.contenders("matmul", x, choice.spec)]
    assert begun == (contenders if is_compared else of_choice)


def test_choices_are_not_those_of_a_lowering(compiled):
    traced = jax.jit(matmul).trace(X, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16))
    with dispatch.recording() as choices:
        ahead.compile_kernels(traced.jaxpr, H200)
    assert not choices


def test_lowering_raises_what_a_kernel_raises(monkeypatch, compiled):
    def fails(request):
        raise ffi.CompileError("gemm.cu[nvrtc]: no", "no")

    monkeypatch.setattr(compiler._Request, "compile", fails)
    traced = jax.jit(matmul).trace(X, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16))
    ahead.compile_kernels(traced.jaxpr, H200)
    with pytest.raises(ffi.CompileError, match="no"):
        traced.lower(lowering_platforms=("cuda",))


def test_lowering_raises_what_a_backend_refuses(monkeypatch, compiled):
    """A chip without the instructions."""
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA A100-SXM4-80GB")
    traced = jax.jit(matmul).trace(X, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16))
    ahead.compile_kernels(traced.jaxpr, hardware.cuda_target())
    assert not compiled
    with pytest.raises(NotImplementedError, match=r"^matmul\[cuda\]: "):
        traced.lower(lowering_platforms=("cuda",))


def test_program_is_a_traced_function():
    f = jax.jit(jk.matmul)
    with raises_exactly(
        TypeError,
        "compile_ahead: traced must be a traced function; got function. Pass jax.jit(f).trace(...).",
    ):
        jk.compile_ahead(lambda x: x)  # type: ignore[arg-type]
    x = np.ones((4, 4), np.float32)
    traced = f.trace(x, x)
    jk.compile_ahead(traced)
    np.testing.assert_array_equal(traced.lower().compile()(x, x), np.full((4, 4), 4, np.float32))


@pytest.mark.gpu
def test_on_a_gpu(compiled, monkeypatch):
    monkeypatch.delenv("JAXKERNELS_TARGET")
    key = jax.random.key(0)
    x, w = jax.random.normal(key, X.shape, X.dtype), jax.random.normal(key, W.shape, W.dtype)
    f = jax.jit(jax.value_and_grad(layers, (0, 1)))
    expected = f(x, w)
    gemm._compile_cached.cache_clear()
    traced = jax.jit(jax.value_and_grad(layers, (0, 1))).trace(x, w)
    jk.compile_ahead(traced)
    jax.tree.map(np.testing.assert_array_equal, traced.lower().compile()(x, w), expected)
