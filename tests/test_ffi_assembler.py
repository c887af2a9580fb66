"""PTX to a cubin by nvJitLink: what it takes, its errors, its cache, and what is missing."""

from __future__ import annotations

import re
import types

import pytest

from jaxkernels.ffi import assembler
from jaxkernels.ffi.compiler import CompileError
from jaxkernels.ffi.cubin import parameter_bytes

needs_nvjitlink = pytest.mark.skipif("assembler.missing() is not None", reason="nvJitLink is not installed")

PTX = """
.version 8.0
.target sm_80
.address_size 64

.visible .entry fill(.param .u64 place, .param .u32 value)
{
  .reg .b64 %rd<2>;
  .reg .b32 %r<2>;
  ld.param.u64 %rd1, [place];
  ld.param.u32 %r1, [value];
  st.global.u32 [%rd1], %r1;
  ret;
}
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    return tmp_path / "cubins"


@needs_nvjitlink
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_cubin_is_of_the_architecture_and_takes_the_parameters(cache, arch):
    cubin = assembler.assemble(PTX, "fill", arch)
    assert cubin.startswith(b"\x7fELF")
    assert {*re.findall(rb"sm_\d+a?", cubin)} == {arch.encode()}
    assert parameter_bytes(cubin, "fill") == (8, 4)


@needs_nvjitlink
def test_ptx_that_declares_a_newer_version_is_assembled(cache):
    """As long as it uses nothing of that version. An older declaration stays."""
    newer = assembler.assemble(PTX.replace(".version 8.0", ".version 99.9"), "fill", "sm_90a")
    assert parameter_bytes(newer, "fill") == (8, 4)
    with pytest.raises(CompileError):  # Version 6.0 does not know this target.
        assembler.assemble(PTX.replace(".version 8.0", ".version 6.0"), "fill", "sm_90a")


@needs_nvjitlink
def test_second_time_it_comes_from_the_cache(cache, monkeypatch):
    first = assembler.assemble(PTX, "fill", "sm_80")
    (path,) = cache.iterdir()
    monkeypatch.setattr(assembler, "_assemble", lambda *args: b"again")
    assert assembler.assemble(PTX, "fill", "sm_80") == first
    assert assembler.assemble(PTX, "fill", "sm_90a") == b"again"  # Of another architecture.
    assert assembler.assemble(PTX + "// Another text.", "fill", "sm_80") == b"again"
    monkeypatch.setattr(assembler, "version", lambda: (13, 99))
    assert assembler.assemble(PTX, "fill", "sm_80") == b"again"
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-30])  # Damaged.
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(cache.parent))
    assert assembler.assemble(PTX, "fill", "sm_80") == first


@needs_nvjitlink
def test_error_names_kernel_architecture_and_line(cache):
    match = r"^assemble\[nvjitlink\]: fill for sm_80: .*line 12.*"
    with pytest.raises(CompileError, match=match) as raised:
        assembler.assemble(PTX.replace("st.global.u32", "st.nowhere.u32"), "fill", "sm_80")
    assert "line 12" in raised.value.log
    assert not cache.exists() or not [*cache.iterdir()]


@pytest.fixture
def linker(monkeypatch):
    """A stand-in for the library."""
    assembler.version.cache_clear()
    module = types.SimpleNamespace(version=lambda: (13, 0))
    monkeypatch.setattr(assembler, "_linker", lambda: module)
    yield module
    assembler.version.cache_clear()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((12, 9), None),
        ((13, 5), None),
        ((12, 8), "needs nvJitLink 12.9 or newer, found 12.8: pip install -U nvidia-nvjitlink-cu12"),
    ],
)
def test_assemblers_that_miscompile_are_refused(linker, version, reason):
    linker.version = lambda: version
    assert assembler.missing() == reason


def test_library_that_is_missing_is_a_reason_with_the_way_out(linker):
    def fail():
        raise RuntimeError("Failed to dlopen libnvJitLink.so.13\nand more")

    linker.version = fail
    assert assembler.missing() == (
        "needs nvJitLink: the library cannot be loaded; got Failed to dlopen libnvJitLink.so.13. Install it with the "
        'package: pip install "jaxkernels[cuda13]" (or cuda12).'
    )


def test_package_that_is_missing_is_a_reason_with_the_way_out(linker, monkeypatch):
    def fail():
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(assembler, "_linker", fail)
    assert assembler.missing() == (
        "needs nvJitLink: the package cuda-bindings cannot be imported; got No module named 'cuda'. Install it with "
        'the package: pip install "jaxkernels[cuda13]" (or cuda12).'
    )
