"""How Triton kernels are called: which versions fit, what jax-triton is given, and the tools that test kernels."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.interpreters import partial_eval

import jaxkernels.triton
from jaxkernels.core import _jax, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.triton import calls

A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")
H200 = hardware.lookup("NVIDIA H200")
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = SIZE
    scale: float = 0.5


# Versions.


@pytest.fixture
def installed(monkeypatch) -> Iterator[Callable[..., types.ModuleType]]:
    """Pretends that these versions are installed, with a jax-triton that records how it is called."""
    right = importlib.metadata.version

    def forget() -> None:
        calls.missing.cache_clear()
        calls._jax_triton.cache_clear()

    def install(jax_triton: str | None, triton: str | None, *, has_plugin: bool = True) -> types.ModuleType:
        found = {"jax-triton": jax_triton, "triton": triton}

        def version(name: str) -> str:
            if name not in found:
                return right(name)
            if found[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        module: Any = types.ModuleType("jax_triton")
        module.calls = []
        module.triton_lib = types.SimpleNamespace(triton_kernel_call_p=object())
        module.triton_call = lambda *xs, **options: module.calls.append((xs, options)) or ["a result"]
        monkeypatch.setitem(sys.modules, "jax_triton", module)
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(_jax, "has_triton_calls", lambda: has_plugin)
        forget()
        return module

    forget()
    yield install
    forget()


UPGRADE = "pip install -U 'jaxkernels[triton]'"


@pytest.mark.parametrize(
    ("jax_triton", "triton", "reason"),
    [
        (None, None, "needs jax-triton and triton: pip install 'jaxkernels[triton]'"),
        (None, "3.6.0", "needs jax-triton: pip install 'jaxkernels[triton]'"),
        ("0.3.1", None, "needs triton: pip install 'jaxkernels[triton]'"),
        ("0.3.1", "3.5.1", f"needs triton 3.6 or newer, found 3.5.1: {UPGRADE}"),
        ("0.4.1", "2.3.1", f"needs triton 3.6 or newer, found 2.3.1: {UPGRADE}"),
        ("0.2.0", "3.6.0", f"needs jax-triton 0.3 or newer, found 0.2.0: {UPGRADE}"),
        ("0.3.1", "3.7.0", "jax-triton 0.3.1 does not fit triton 3.7.0: pip install 'jax-triton>=0.4'"),
        ("0.3.1", "3.9.0", "jax-triton 0.3.1 does not fit triton 3.9.0: pip install 'jax-triton>=0.4'"),
        ("0.4.1", "3.6.0", "jax-triton 0.4.1 does not fit triton 3.6.0: pip install 'jax-triton==0.3.*'"),
        ("0.3.0", "3.6.1", None),
        ("0.3.1", "3.6.0+git1234567", None),
        ("0.4.0", "3.7.1", None),
        ("0.4.1", "3.9.0", None),
        ("0.10.0", "3.10.0", None),
        ("1.0.0", "4.0.0", None),
    ],
)
def test_versions_that_do_not_fit_are_named_with_the_way_out(installed, jax_triton, triton, reason):
    installed(jax_triton, triton)
    assert calls.versions() == {"jax-triton": jax_triton, "triton": triton}
    assert calls.missing() == reason


def test_cuda_plugin_is_needed(installed):
    installed("0.4.1", "3.9.0", has_plugin=False)
    assert calls.missing() == "needs JAX's CUDA plugin: pip install 'jaxkernels[cuda13]' (or cuda12)"


def test_jax_triton_that_cannot_be_imported_is_a_reason(installed, monkeypatch, tmp_path):
    installed("0.4.1", "3.9.0")
    monkeypatch.delitem(sys.modules, "jax_triton")
    (tmp_path / "jax_triton.py").write_text("raise RuntimeError('built for another JAX')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert calls.missing() == "jax-triton 0.4.1 cannot be imported: RuntimeError: built for another JAX"


def test_plugin_is_told_from_its_absence(monkeypatch):
    """jaxlib has the module `gpu_triton` always, and its names only if a plugin is installed."""
    from jax._src.lib import gpu_triton

    monkeypatch.setattr(gpu_triton, "TritonKernelCall", object, raising=False)
    assert _jax.has_triton_calls()
    monkeypatch.delattr(gpu_triton, "TritonKernelCall")
    assert not _jax.has_triton_calls()


@pytest.mark.parametrize("before", [None, "/a/folder"])
def test_import_leaves_tritons_cache_where_it_was(before):
    pytest.importorskip("triton", reason="Triton is not installed")
    if calls.versions()["jax-triton"] is None:
        pytest.skip("jax-triton is not installed")
    script = (
        "import contextlib, os\n"
        "from jaxkernels.triton import calls\n"
        "with contextlib.suppress(ImportError):\n"  # Version 0.3 wants a plugin, which it asks for at the end.
        "    calls._jax_triton()\n"
        "print(os.environ.get('TRITON_CACHE_DIR'))"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {} if before is None else {"TRITON_CACHE_DIR": before}
    outcome = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert outcome.stdout == f"{before}\n", outcome.stderr


# Calls.


@pytest.mark.parametrize(
    ("jax_triton", "triton", "keyword", "options"),
    [
        ("0.3.1", "3.6.0", "out_shape", dict(enable_fp_fusion=True)),
        ("0.4.1", "3.9.0", "out_type", dict(backend_options=dict(enable_fp_fusion=True))),
    ],
)
def test_each_version_gets_its_own_arguments(installed, jax_triton, triton, keyword, options):
    module = installed(jax_triton, triton)
    x, kernel, out = jnp.ones(3), object(), ArrayType((2, 3), np.dtype("float32"))
    results = calls.call_kernel(
        kernel, [x, x], [out], target=H200, grid=(7, 2), num_warps=8, num_stages=3, constants=dict(p=Config())
    )
    assert results == ["a result"]
    (((first, second), given),) = module.calls
    assert first is second is x
    assert given.pop("kernel") is kernel
    common = dict(grid=(7, 2), num_warps=8, num_stages=3, compute_capability=90, p=Config())
    assert given == common | options | {keyword: [jax.ShapeDtypeStruct((2, 3), jnp.float32)]}


def test_rule_for_dead_code_written_for_jax_0_11_is_called_as_it_expects():
    """As that of jax-triton 0.4.1. A rule that fits stays what it is."""
    primitive = jax.extend.core.Primitive("jk_test_dead_code")
    primitive.def_abstract_eval(lambda x: x)
    asked = []

    def rule(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
        asked.append((used, equation.primitive))
        return [False], None

    jaxpr = jax.make_jaxpr(lambda x: (primitive.bind(x), x))(1.0).jaxpr
    partial_eval.dce_rules[primitive] = rule
    try:
        _jax.adapt_dead_code_rule(primitive)
        left, _ = partial_eval.dce_jaxpr(jaxpr, [False, True])
        adapted = partial_eval.dce_rules[primitive]
        _jax.adapt_dead_code_rule(primitive)
        assert partial_eval.dce_rules[primitive] is adapted
    finally:
        del partial_eval.dce_rules[primitive]
    assert asked == [([False], primitive)]
    assert not left.eqns
    _jax.adapt_dead_code_rule(primitive)
    assert primitive not in partial_eval.dce_rules


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


def call_in(text: str) -> bytes:
    """The one call of a Triton kernel in a lowered program, decompressed."""
    (line,) = (line for line in text.splitlines() if "custom_call @" in line)
    assert re.search(r"custom_call @(\w+)", line)[1] in calls.TARGETS
    (quoted,) = re.findall(r'(?:opaque|backend_config) = "([^"]+)"', line)
    # MLIR prints bytes that are not printable as two hexadecimal digits after a backslash.
    data = re.sub(
        rb"\\([0-9A-F]{2}|.)", lambda m: bytes.fromhex(m[1].decode()) if m[1] != b"\\" else b"\\", quoted.encode()
    )
    return zlib.decompress(data)


needs_all_parts = pytest.mark.skipif("calls.missing() is not None", reason="jax-triton cannot lower programs here")


@needs_all_parts
@pytest.mark.parametrize("chip", [A100, H200], ids=lambda chip: chip.name)
def test_program_is_lowered_for_a_chip_that_is_not_here(chip):
    """By the jax-triton that is installed, through JAX's removal of dead code."""
    xs = matrices("bfloat16")
    for function in (multiply(chip), lambda *xs: multiply(chip)(*xs)[0]):
        lowered = jax.jit(function).trace(*xs).lower(lowering_platforms=("cuda",))
        major, minor = chip.compute_capability
        assert re.search(rb"\.target sm_%d" % (10 * major + minor), call_in(lowered.as_text()))


@needs_all_parts
def test_program_is_exported_if_the_check_of_its_call_is_disabled():
    xs = matrices("bfloat16")
    with pytest.raises(ValueError, match="triton_kernel_call"):
        export.export(jax.jit(multiply(A100)), platforms=("cuda",))(*xs)
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in jaxkernels.triton.TARGETS]
    program = export.export(jax.jit(multiply(A100)), platforms=("cuda",), disabled_checks=allowed)(*xs)
    restored = export.deserialize(program.serialize())
    assert b".target sm_80" in call_in(restored.mlir_module())
