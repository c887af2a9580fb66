"""What compute-sanitizer says of kernels, beside a mistake planted in one that is not ours."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

__all__ = ["assert_finds_nothing_else"]

ROOT = pathlib.Path(__file__).parent.parent

_OUTSIDE = {"memcheck": 2**20, "racecheck": 0}
_FINDINGS = {"memcheck": "Invalid __global__ write", "racecheck": "Race reported between"}
#: Seconds after which a step, of which the slowest takes 21 among 11 others, is taken to hang.
_LONGEST = 100
_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import jaxkernels as jk

def planted():
    source = '''
    __global__ void planted(float* out, int outside) {
      __shared__ float values[64];
      values[threadIdx.x] = threadIdx.x;
      out[threadIdx.x + outside] = values[63 - threadIdx.x];  // no barrier in between
    }'''
    plan = lambda x: jk.ffi.LaunchPlan(
        {"out": x}, [jk.ffi.Pointer("out"), np.int32(OUTSIDE)], (1,), (64,)
    )
    return jk.ffi.CudaKernel(source, "planted", plan)(np.zeros(64, np.float32))

STEPS
for name in NAMES:
    print("step", name, flush=True)
    jax.block_until_ready(planted() if name == "planted" else steps[name]())
print("step end", flush=True)
"""


def assert_finds_nothing_else(tool: str, steps: str, names: tuple[str, ...]) -> None:
    """Runs steps, functions that Python text puts into a dictionary `steps`, and the one named "planted".

    compute-sanitizer 2025.3 sees nothing more in a process after a kernel that stores by TMA, and after a finding of
    memcheck nothing can run: "planted" follows what only loads, precedes what stores, or is left out.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    # Without XLA's autotuning, whose dozens of modules the tool patches one by one: 100 s a step, and once a crash of
    # the tool; and without the allocator's pool, whose neighbours' memory an access may reach unnoticed.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    env = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])), "XLA_FLAGS": flags}
    env["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    script = _SCRIPT.replace("OUTSIDE", str(_OUTSIDE[tool])).replace("STEPS", steps).replace("NAMES", repr(names))
    # Of kernels, not of what XLA asks the driver for.
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no", sys.executable, "-c", script]
    # Of 93 runs the tool itself crashed in one, while XLA compiled, and hung in three.
    ended = _ended(command, env) or _ended(command, env)
    assert ended is not None, f"{tool} crashed, or took longer than {_LONGEST} s, twice: {names}"
    stdout, output = ended
    if "Device not supported" in output:
        pytest.skip(f"{tool} does not support this device or its driver")
    # A finding is told when the kernel has ended or later, so that only its kernel's name says where it belongs.
    kernels = set(re.findall(r"^=========.* at ([\w:<>, ]+)\(", stdout, re.MULTILINE))
    assert stdout.count("========= COMPUTE-SANITIZER") == 1, output
    if "planted" in names:
        assert _FINDINGS[tool] in stdout, output
        assert kernels == {"planted"}, output
    else:
        assert "========= ERROR SUMMARY: 0 errors" in stdout, output
    assert ("end" in stdout.split()) or tool == "memcheck", output


def _ended(command: list[str], env: dict[str, str]) -> tuple[str, str] | None:
    """What a command printed, without and with its errors; None if a signal, or we, had to end it."""
    pipe = subprocess.PIPE
    # In a session of its own: the tool's program is a process of its own, and would outlive it.
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | env, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return None if process.returncode < 0 else (stdout, stdout + stderr)
