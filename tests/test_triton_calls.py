"""How Triton kernels are called: what is needed, what is launched, and the tools that test kernels."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxkernels.triton
from jaxkernels import ffi
from jaxkernels.core import hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ffi import assembler, handler
from jaxkernels.triton import calls

A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")
H200 = hardware.lookup("NVIDIA H200")
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = SIZE
    scale: float = 0.5


# Requirements.


@pytest.fixture
def installed(monkeypatch) -> Iterator[Callable[[str | None], None]]:
    """Pretends that this version of Triton is installed; None: that none is."""
    right = importlib.metadata.version

    def install(triton: str | None) -> None:
        def version(name: str) -> str:
            if name != "triton":
                return right(name)
            if triton is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return triton

        monkeypatch.setattr(importlib.metadata, "version", version)
        calls.missing.cache_clear()

    yield install
    calls.missing.cache_clear()


UPGRADE = "pip install -U 'jaxkernels[triton]'"


@pytest.mark.parametrize(
    ("triton", "reason"),
    [
        (None, "needs triton: pip install 'jaxkernels[triton]'"),
        ("3.5.1", f"needs triton 3.6 or newer, found 3.5.1: {UPGRADE}"),
        ("2.3.1", f"needs triton 3.6 or newer, found 2.3.1: {UPGRADE}"),
        ("3.6.0", None),
        ("3.6.0+git1234567", None),
        ("3.10.0", None),
        ("4.0.0", None),
    ],
)
def test_versions_that_do_not_fit_are_named_with_the_way_out(installed, monkeypatch, triton, reason):
    installed(triton)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setattr(handler, "missing_launcher", lambda: None)
    monkeypatch.setattr(assembler, "missing", lambda: None)
    assert calls.version() == triton
    assert calls.missing() == reason


def test_launcher_and_assembler_are_needed(installed, monkeypatch):
    installed("3.9.0")
    monkeypatch.setattr(assembler, "missing", lambda: "needs nvJitLink")
    monkeypatch.setattr(handler, "missing_launcher", lambda: None)
    assert calls.missing() == "needs nvJitLink"
    calls.missing.cache_clear()
    monkeypatch.setattr(handler, "missing_launcher", lambda: "needs the launcher of the CUDA kernels: not built")
    assert calls.missing() == "needs the launcher of the CUDA kernels: not built"


def test_triton_that_cannot_be_imported_is_a_reason(installed, monkeypatch, tmp_path):
    installed("3.9.0")
    monkeypatch.setattr(handler, "missing_launcher", lambda: None)
    monkeypatch.setattr(assembler, "missing", lambda: None)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    (tmp_path / "triton.py").write_text("raise RuntimeError('built for another Python')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert calls.missing() == "triton 3.9.0 cannot be imported: RuntimeError: built for another Python"


# A small kernel, for real.


@pytest.fixture
def tritons() -> types.ModuleType:
    pytest.importorskip("triton", reason="Triton is not installed")
    import tritons

    return tritons


def multiply(target: hardware.Chip) -> Callable[..., list[jax.Array]]:
    """A function that calls `triton_product_kernel.product`."""
    import triton_product_kernel

    def function(lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
        results = ArrayType((SIZE, SIZE), lhs.dtype), ArrayType((SIZE,), np.dtype("float32"))
        return calls.call_kernel(
            triton_product_kernel.product, [lhs, rhs], results, target=target, grid=(1,), num_warps=4, num_stages=2,
            constants=dict(p=Config()),
        )  # fmt: skip

    return function


def matrices(dtype: str) -> list[jax.Array]:
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=(SIZE, SIZE)), dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_interpreter_computes_what_the_kernel_says(tritons, dtype):
    import triton_product_kernel

    lhs, rhs = matrices(dtype)
    with tritons.interpreted(triton_product_kernel):
        out, sums = multiply(A100)(lhs, rhs)
    exact = Config.scale * (np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64))
    assert out.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=rounding, atol=1e-5)
    np.testing.assert_allclose(sums, exact.sum(1), rtol=1e-4, atol=1e-4)


def test_kernel_is_compiled_for_chips_that_are_not_here(tritons):
    types_of = [ArrayType((SIZE, SIZE), np.dtype(jnp.bfloat16))] * 2
    for chip in tritons.CHIPS:
        (made,) = tritons.compiled(chip, multiply(chip), *types_of)
        major, minor = chip.compute_capability
        assert re.search(rf"^\.target sm_{10 * major + minor}a?$", made.ptx, re.MULTILINE)
        assert made.name == "product"
        assert 0 < made.registers <= 255
        assert made.spilled == 0
        assert made.shared >= 0
        assert "mma" in made.ptx


def code_in(text: str) -> bytes:
    """The cubin of the one call of a Triton kernel in a lowered program."""
    (line,) = (line for line in text.splitlines() if "custom_call @" in line)
    assert re.search(r"custom_call @(\w+)", line)[1] in calls.TARGETS
    return bytes.fromhex(re.findall(r'cubin = dense<"0x([0-9A-F]+)">', line)[0])


needs_all_parts = pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")


@needs_all_parts
@pytest.mark.parametrize(("chip", "architecture"), [(A100, b"sm_80"), (H200, b"sm_90a")], ids=["A100", "H200"])
def test_program_is_lowered_for_a_chip_that_is_not_here(chip, architecture):
    xs = matrices("bfloat16")
    for function in (multiply(chip), lambda *xs: multiply(chip)(*xs)[0]):
        lowered = jax.jit(function).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()
        assert {*re.findall(rb"sm_\d+a?", code_in(lowered))} == {architecture}
        for attribute in ("grid = dense<1> : tensor<3xi64>", "block = dense<[128, 1, 1]> : tensor<3xi64>"):
            assert attribute in lowered
        # Two operands, two results, and two pointers to memory that the kernel does not use.
        assert "num_parameters = 6 : i64" in lowered


@needs_all_parts
def test_last_result_may_take_the_place_of_the_first_operand():
    import triton_product_kernel

    def function(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        results = ArrayType((SIZE,), np.dtype("float32")), ArrayType((SIZE, SIZE), lhs.dtype)
        return calls.call_kernel(
            triton_product_kernel.product, [lhs, rhs], results, target=H200, grid=(1,), num_warps=4, num_stages=2,
            constants=dict(p=Config()), in_place=True,
        )[1]  # fmt: skip

    text = jax.jit(function).trace(*matrices("bfloat16")).lower(lowering_platforms=("cuda",)).as_text()
    assert "output_tuple_indices = [1], operand_index = 0" in text


@needs_all_parts
def test_kernel_is_compiled_once(monkeypatch):
    import triton.compiler

    compiled, right = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *xs, **options: compiled.append(xs) or right(*xs, **options))
    calls._compile.cache_clear()
    assert triton.compiler
    for _ in range(2):
        jax.jit(lambda *xs: multiply(H200)(*xs)).trace(*matrices("float16")).lower(lowering_platforms=("cuda",))
    assert len(compiled) == 1


@needs_all_parts
def test_scratch_memory_is_refused(monkeypatch):
    import triton

    made = types.SimpleNamespace(metadata=types.SimpleNamespace(global_scratch_size=128))
    monkeypatch.setattr(triton, "compile", lambda *xs, **options: made)
    calls._compile.cache_clear()
    message = r"product\[triton\]: needs scratch memory, which is not allocated here\."
    with pytest.raises(NotImplementedError, match=message):
        multiply(H200)(*matrices("float16"))


@needs_all_parts
def test_program_is_exported_if_the_check_of_its_call_is_disabled():
    xs = matrices("bfloat16")
    with pytest.raises(ValueError, match=handler.TARGET):
        export.export(jax.jit(multiply(A100)), platforms=("cuda",))(*xs)
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in jaxkernels.triton.TARGETS]
    program = export.export(jax.jit(multiply(A100)), platforms=("cuda",), disabled_checks=allowed)(*xs)
    restored = export.deserialize(program.serialize())
    assert b"sm_80" in code_in(restored.mlir_module())


@pytest.mark.gpu
def test_calls_are_replayed_from_a_command_buffer():
    """As the results of CUDA kernels: XLA captures them, and then launches a graph."""
    multiplied = multiply(hardware.chip_of(jax.devices()[0]))
    lhs, rhs = matrices("bfloat16")

    @jax.jit
    def power(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = multiplied(x, rhs)[0]
        return x

    expected, before = np.asarray(power(lhs)), ffi.launch_count()
    for _ in range(20):
        np.testing.assert_array_equal(power(lhs), expected)
    assert 0 < ffi.launch_count() - before < 160, "the launches were not replayed from a command buffer"
