"""The compiler of the CUDA engine and its cache. NVRTC needs no GPU: all of it is run."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time
import zipfile
from typing import Any

import numpy as np
import pytest

from jaxkernels import ffi
from jaxkernels.ffi import compiler

ROOT = pathlib.Path(__file__).parent.parent

TWO_KERNELS = """
template <int kCount>
__global__ void __launch_bounds__(1024, 1) sum(float* p) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = p[i * threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) p[i * 7] = values[i];
}
extern "C" __global__ void staged(float* p) {
  __shared__ float tile[128];
  tile[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = tile[127 - threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of each test's own."""
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def forbid_compiling(monkeypatch):
    def refuse(self):
        raise AssertionError("compiled again")

    return lambda: monkeypatch.setattr(compiler._Request, "compile", refuse)


def test_compile_reports_what_the_kernel_uses():
    compiled = ffi.compile_kernel(TWO_KERNELS, "staged")
    assert compiled.name == "staged"
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.report is not None
    assert compiled.report.smem_bytes == 512
    assert 0 < compiled.report.registers < 64
    assert (compiled.report.spill_store_bytes, compiled.report.spill_load_bytes) == (0, 0)


def test_compile_instantiates_a_template():
    compiled = ffi.compile_kernel(TWO_KERNELS, "sum<4>", strict=True)
    assert compiled.name == "_Z3sumILi4EEvPf"
    assert compiled.name.encode() in compiled.cubin


def test_compile_error_shows_the_lines_of_the_source():
    source = "__global__ void k(float* p) {\n  p[0] = 1;\n  p[1] = missing;\n}\n"
    with pytest.raises(ffi.CompileError, match=r"scale\.cu\(3\): error: identifier \"missing\" is undefined") as error:
        ffi.compile_kernel(source, "k", filename="scale.cu")
    assert str(error.value).startswith("scale.cu[nvrtc]: the source does not compile (NVRTC_ERROR_COMPILATION, NVRTC ")
    assert "--gpu-architecture=sm_90a" in str(error.value)
    assert error.value.log in str(error.value)


def test_compile_error_names_an_unknown_kernel():
    with pytest.raises(ffi.CompileError, match="transposed"):
        ffi.compile_kernel(TWO_KERNELS, "transposed")


def test_compile_takes_headers_defines_and_options():
    source = '#include "scale.cuh"\nextern "C" __global__ void k(float* p) { p[0] = scale(p[1]) * FACTOR * ON; }'
    headers = {"scale.cuh": "__device__ float scale(float x) { return x * x; }"}
    compiled = ffi.compile_kernel(
        source, "k", headers=headers, defines={"FACTOR": 3, "ON": True}, options=["--maxrregcount=32"]
    )
    assert compiled.report is not None
    assert compiled.report.registers <= 32
    with pytest.raises(ffi.CompileError, match="FACTOR"):
        ffi.compile_kernel(source, "k", headers=headers)


@pytest.mark.parametrize("on", [True, np.True_])
def test_booleans_are_numbers_to_the_preprocessor_too(on):
    source = "#if ON && !OFF\n__global__ void k() {}\n#endif"
    assert ffi.compile_kernel(source, "k", defines={"ON": on, "OFF": not on}).name == "_Z1kv"


@pytest.mark.parametrize("asked", [dict(arch="compute_90"), dict(options=["-dlto"])])
def test_compile_refuses_what_makes_no_machine_code(asked, cache):
    message = r"^kernel\.cu\[nvrtc\]: the options must ask for machine code; got --gpu-architecture=.* Name an "
    with pytest.raises(ffi.CompileError, match=message):
        ffi.compile_kernel(TWO_KERNELS, "staged", **asked)
    assert not cache.exists()


def test_compile_finds_cudas_own_headers():
    source = "#include <cuda_bf16.h>\n__global__ void k(__nv_bfloat16* p) { p[0] = __float2bfloat16(2.f); }"
    ffi.compile_kernel(source, "k")


def test_strict_refuses_spills():
    assert ffi.compile_kernel(TWO_KERNELS, "sum<200>").report.spill_store_bytes > 0
    with pytest.raises(
        ffi.CompileError, match=r"^kernel\.cu\[nvrtc\]: _Z3sumILi200EEvPf must not spill registers; got 64 registers, "
    ):
        ffi.compile_kernel(TWO_KERNELS, "sum<200>", strict=True)


def test_strict_refuses_an_ignored_setmaxnreg():
    source = '__global__ void k(float* p) { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); p[0] = 1; }'
    assert "C7508" in ffi.compile_kernel(source, "k").log
    with pytest.raises(ffi.CompileError, match=r"warnings of lost performance; got\n.*\(C7508\).*'setmaxnreg' ignored"):
        ffi.compile_kernel(source, "k", strict=True)
    capped = source.replace("void k", "void __launch_bounds__(128, 1) k")
    ffi.compile_kernel(capped, "k", strict=True)


def test_strict_refuses_a_serialised_pipeline():
    """If a kernel reads accumulators between products, ptxas waits for each product, and warns with C7514."""
    between = "p[128 + i] = d0;"
    source = """
    __global__ void __launch_bounds__(128) k(float* p, unsigned long long a, unsigned long long b) {
      float d0 = p[0], d1 = 0, d2 = 0, d3 = 0;
      asm volatile("wgmma.fence.sync.aligned;");
      for (int i = 0; i < 2; ++i) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a), "l"(b));
        BETWEEN
      }
      asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
                   : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3));
      p[threadIdx.x] = d0 + d1 + d2 + d3;
    }"""
    with pytest.raises(ffi.CompileError, match=r"\(C7514\) Potential Performance Loss: wgmma.* are serialized"):
        ffi.compile_kernel(source.replace("BETWEEN", between), "k", strict=True)
    ffi.compile_kernel(source.replace("BETWEEN", ""), "k", strict=True)


@pytest.mark.parametrize(
    ("account", "message"),
    [
        ("", "strict needs ptxas' account of the kernel; got none for k from NVRTC"),
        (
            "Compiling entry function 'k' for 'sm_90a'\nptxas info : Used 40 registers\n"
            "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            "C7512",
        ),
    ],
)
def test_strict_reads_the_log(account, message):
    compiled = ffi.CompiledKernel(b"", "k", compiler._report(account, "k"), account)
    with pytest.raises(ffi.CompileError, match=re.escape(message)):
        compiler._refuse_slow("kernel.cu", compiled)


def test_report_is_that_of_the_kernel_asked_for():
    log = ffi.compile_kernel(TWO_KERNELS + "template __global__ void sum<200>(float*);", "staged").log
    staged, spilling = compiler._report(log, "staged"), compiler._report(log, "_Z3sumILi200EEvPf")
    assert staged.spill_load_bytes == 0
    assert staged.smem_bytes == 512
    assert spilling.spill_load_bytes > 0
    assert spilling.smem_bytes == 0


def test_missing_cuda_bindings_names_the_extra(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    compiler._nvrtc_version.cache_clear()
    message = (
        "compile[nvrtc]: the package cuda-bindings cannot be imported; got No module named 'cuda'. "
        'Install NVRTC with the package: pip install "jaxkernels[cuda13]" (or cuda12).'
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        ffi.compile_kernel(TWO_KERNELS, "staged")


def test_missing_nvrtc_names_the_extra(monkeypatch):
    class Bindings:
        @staticmethod
        def nvrtcVersion():  # noqa: N802, the name is NVIDIA's
            raise RuntimeError("libnvrtc.so.13 is nowhere")

    monkeypatch.setattr(compiler, "_nvrtc", lambda: Bindings)
    compiler._nvrtc_version.cache_clear()
    with pytest.raises(ImportError, match=re.escape("got libnvrtc.so.13 is nowhere. Install NVRTC with the package")):
        ffi.compile_kernel(TWO_KERNELS, "staged")


# The cache.


def test_second_compilation_comes_from_the_cache(cache, forbid_compiling):
    compiler.nvrtc_version()  # The library is opened once in a process, cache or not.

    def timed() -> tuple[ffi.CompiledKernel, float]:
        start = time.perf_counter()
        return ffi.compile_kernel(TWO_KERNELS, "sum<200>"), time.perf_counter() - start

    cold, cold_seconds = timed()
    forbid_compiling()
    warm, warm_seconds = min((timed() for _ in range(5)), key=lambda result: result[1])  # Others may use the machine.
    assert warm == cold
    assert [entry.suffix for entry in cache.iterdir()] == [".zip"]
    assert warm_seconds < cold_seconds / 5


def test_strict_judges_a_cached_kernel_too(forbid_compiling):
    ffi.compile_kernel(TWO_KERNELS, "sum<200>")
    forbid_compiling()
    with pytest.raises(ffi.CompileError, match="must not spill"):
        ffi.compile_kernel(TWO_KERNELS, "sum<200>", strict=True)


def test_cache_key_covers_all_that_decides_the_code(cache, monkeypatch):
    variants: list[dict[str, Any]] = [
        {},
        {"source": TWO_KERNELS + "\n"},
        {"kernel": "sum<1>"},
        {"filename": "other.cu"},
        {"headers": {"a.cuh": ""}},
        {"headers": {"a.cuh": "//"}},
        {"defines": {"A": 1}},
        {"defines": {"A": 2}},
        {"options": ["--use_fast_math"]},
        {"arch": "sm_90"},
    ]
    for variant in variants:
        ffi.compile_kernel(**({"source": TWO_KERNELS, "kernel": "staged"} | variant))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    ffi.compile_kernel(TWO_KERNELS, "staged")
    monkeypatch.setattr(compiler, "_toolkit_headers", lambda: None)
    ffi.compile_kernel(TWO_KERNELS, "staged")
    monkeypatch.setattr(compiler, "_nvrtc_build", lambda: ("libnvrtc.so", 1, 2))
    ffi.compile_kernel(TWO_KERNELS, "staged")
    assert len(list(cache.iterdir())) == len(variants) + 3


def test_cache_key_names_the_library_that_compiles(monkeypatch):
    build = compiler._nvrtc_build()
    assert build is not None
    path, size, changed = build
    assert any(os.path.realpath(path) in line for line in pathlib.Path("/proc/self/maps").read_text().splitlines())
    stat = pathlib.Path(path).stat()
    assert (size, changed) == (stat.st_size, stat.st_mtime_ns)
    request = compiler._Request("", "kernel", "kernel.cu", (), ())
    key = request.key()
    monkeypatch.setattr(compiler, "_nvrtc_build", lambda: (path, size, changed + 1))
    assert request.key() != key


@pytest.mark.parametrize("from_path", [False, True], ids=["current directory", "include path"])
def test_files_that_nvrtc_finds_by_itself_may_change(from_path, cache, tmp_path, monkeypatch):
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2\n")
    source = '#include "factor.cuh"\n__global__ void scale(float* x) { x[0] *= FACTOR; }'
    if from_path:
        source, options = source.replace('"factor.cuh"', "<factor.cuh>"), [f"--include-path={tmp_path}"]
    else:
        monkeypatch.chdir(tmp_path)
        options = []
    before = ffi.compile_kernel(source, "scale", options=options)
    (tmp_path / "factor.cuh").write_text("#define FACTOR 3\n")
    assert ffi.compile_kernel(source, "scale", options=options).cubin != before.cubin
    given = ffi.compile_kernel(source, "scale", headers={"factor.cuh": "#define FACTOR 2\n"})
    assert given.cubin == before.cubin
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "include",
    [
        '#define NAME "factor.cuh"\n#include NAME',
        '#include /* of two */ "factor.cuh"',
        '#include \\\n"factor.cuh"',
        '# /* of two */ include "factor.cuh"',
        '/* of two */ #include "factor.cuh"',
        '#if __has_include("factor.cuh")\n#define FACTOR 2\n#else\n#define FACTOR 3\n#endif',
        '#define HAS __has_include\n#if HAS("factor.cuh")\n#define FACTOR 2\n#else\n#define FACTOR 3\n#endif',
    ],
)
def test_what_names_files_in_other_ways_is_not_cached(include, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factor.cuh").write_text("#define FACTOR 2\n")
    ffi.compile_kernel(include + "\n__global__ void scale(float* x) { x[0] *= FACTOR; }", "scale")
    assert not cache.exists()


@pytest.mark.parametrize("line", ['// #include "absent.cuh"', "#if __has_include(<cuda_bf16.h>)\n#endif", "/* */"])
def test_what_names_no_file_of_the_users_is_cached(line, cache):
    ffi.compile_kernel(line + "\n" + TWO_KERNELS, "staged")
    assert len(list(cache.iterdir())) == 1


def test_toolkit_headers_in_quotes_are_cached(cache):
    ffi.compile_kernel('#include "cuda_bf16.h"\n' + TWO_KERNELS, "staged")
    assert len(list(cache.iterdir())) == 1


def damages(entry: bytes):
    for kept in (0, 1, len(entry) // 3, len(entry) - 1):
        yield f"first {kept} bytes", entry[:kept]
    for place in (10, len(entry) // 3, len(entry) // 2, len(entry) - 10):
        yield f"byte {place} flipped", entry[:place] + bytes([entry[place] ^ 0xFF]) + entry[place + 1 :]
    yield "other text", b"not a zip file" * 100


def test_damaged_entries_are_compiled_again(cache, forbid_compiling):
    good = ffi.compile_kernel(TWO_KERNELS, "staged")
    (path,) = cache.iterdir()
    entry = path.read_bytes()
    for what, damaged in damages(entry):
        path.write_bytes(damaged)
        again = ffi.compile_kernel(TWO_KERNELS, "staged")
        assert (again.cubin, again.report) == (good.cubin, good.report), what
    forbid_compiling()
    assert ffi.compile_kernel(TWO_KERNELS, "staged") == again


def test_entry_under_another_name_or_with_another_account_is_compiled_again(cache):
    """An entry's digest covers its name, its code and what is said of it."""
    spills, staged = (ffi.compile_kernel(TWO_KERNELS, kernel) for kernel in ("sum<200>", "staged"))
    paths = {path: compiler.read_cached(path) for path in cache.iterdir()}
    of_spills, of_staged = sorted(paths, key=lambda path: paths[path] != spills)
    of_staged.write_bytes(of_spills.read_bytes())
    assert ffi.compile_kernel(TWO_KERNELS, "staged").cubin == staged.cubin
    with zipfile.ZipFile(of_staged) as sound:
        content, comment = {name: sound.read(name) for name in sound.namelist()}, sound.comment
    for name in content:
        with zipfile.ZipFile(of_staged, "w") as changed:
            for other, text in content.items():
                changed.writestr(other, text.replace(b"staged", b"dagest") if other == name else text)
            changed.comment = comment
        assert compiler.read_cached(of_staged) is None


@pytest.mark.timeout(60)
def test_entry_that_others_may_have_written_is_compiled_again_with_one_warning(cache, forbid_compiling):
    """`open_entry` has the rules: tests/test_folders.py. A pipe in an entry's place must not block."""
    good = ffi.compile_kernel(TWO_KERNELS, "staged")
    (path,) = cache.iterdir()
    path.chmod(0o606)
    for reason in ("other users may write to it (mode 0606)", "it is not a regular file"):
        with pytest.warns(UserWarning, match="^compile") as caught:
            assert ffi.compile_kernel(TWO_KERNELS, "staged").cubin == good.cubin
        assert [str(w.message) for w in caught] == [
            f"compile[nvrtc]: ignored the cached kernel {path}: {reason}. Delete it, or set JAXKERNELS_CACHE_DIR to a "
            "folder of your own."
        ]
        path.unlink()
        os.mkfifo(path)
    path.unlink()
    ffi.compile_kernel(TWO_KERNELS, "staged")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    forbid_compiling()
    assert ffi.compile_kernel(TWO_KERNELS, "staged").cubin == good.cubin


def test_two_processes_may_compile_the_same_kernel_at_once(cache):
    script = textwrap.dedent(f"""
        import sys
        from jaxkernels.ffi import compiler
        compiler.nvrtc_version()
        print("ready", flush=True)
        for line in sys.stdin:
            compiled = compiler.compile_kernel({TWO_KERNELS!r}, line.strip())
            print(len(compiled.cubin), flush=True)
    """)
    processes = [python(script) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for count in range(1, 11):
        for process in processes:
            process.stdin.write(f"sum<{count}>\n")
            process.stdin.flush()
        sizes = [process.stdout.readline() for process in processes]
        assert sizes[0] == sizes[1]
        assert int(sizes[0]) > 1000
    for process in processes:
        process.stdin.close()
        assert process.wait(60) == 0
    assert [path.suffix for path in cache.iterdir()] == [".zip"] * 10


def python(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path]))},
    )


def test_threads_that_compile_at_once_each_get_their_account():
    def registers(count):
        report = ffi.compile_kernel(TWO_KERNELS, f"sum<{count}>").report
        assert report is not None
        return report.registers

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        used = list(pool.map(registers, range(1, 17)))
    assert len(set(used)) > 1
    assert used == sorted(used)


WAITS = """
#include "tma.cuh"
__global__ void waits(int* p) {
  __shared__ tma::u64 full;
  tma::mbarrier_wait_parity(&full, 0);
#ifdef JK_MAX_WAIT_CYCLES
  static_assert(JK_MAX_WAIT_CYCLES == 3000000000, "");
  *p = 1;
#endif
}
"""


def test_waits_that_trap_are_compiled_apart_and_not_held_to_strict(cache, monkeypatch):
    plain = ffi.compile_kernel(WAITS, "waits", strict=True)
    monkeypatch.setenv("JAXKERNELS_MAX_WAIT_CYCLES", "3000000000")
    assert ffi.compile_kernel(WAITS, "waits", strict=True).cubin != plain.cubin
    assert len(list(cache.iterdir())) == 2
    assert ffi.compile_kernel(TWO_KERNELS, "sum<256>", strict=True).report.spill_store_bytes > 0
    monkeypatch.setenv("JAXKERNELS_MAX_WAIT_CYCLES", "3e9")
    message = (
        "compile[nvrtc]: JAXKERNELS_MAX_WAIT_CYCLES must be a number of cycles; got '3e9'. Unset it to wait for ever."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ffi.compile_kernel(WAITS, "waits")


def test_a_cache_that_cannot_be_written_warns_and_compiles(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"set JAXKERNELS_CACHE_DIR to a folder that can be written\.$"):
        compiled = ffi.compile_kernel(TWO_KERNELS, "staged")
    assert compiled.name == "staged"
