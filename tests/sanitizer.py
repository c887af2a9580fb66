"""Runs kernels under compute-sanitizer, with a kernel with a planted mistake as a control."""

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
#: Seconds after which a step counts as hanging. The slowest takes 21, among 11 others.
_LONGEST = 60
#: The tool crashes (while XLA compiles) or hangs in 1 to 3 of 50 runs, each time in another step.
_RUNS = 3
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
    """Runs the named steps, functions that the text `steps` puts into a dictionary of that name, and "planted".

    compute-sanitizer 2025.3 finds nothing in a process after a kernel that stores by TMA. After a finding of memcheck
    no kernel can run. So "planted" comes after steps that only load and before steps that store, or is left out.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which is in the CUDA toolkit")
    # XLA's autotuning is off: the tool patches its dozens of modules one by one, which took 100 s a step and crashed it
    # once. The allocator's pool is off: an access past a buffer could reach another buffer unnoticed.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    env = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])), "XLA_FLAGS": flags}
    env["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
    script = _SCRIPT.replace("OUTSIDE", str(_OUTSIDE[tool])).replace("STEPS", steps).replace("NAMES", repr(names))
    # Reports errors of kernels only, not of XLA's calls of the driver.
    command = [sanitizer, "--tool", tool, "--report-api-errors", "no", sys.executable, "-c", script]
    ended = next((run for run in (_ended(command, env) for _ in range(_RUNS)) if run is not None), None)
    assert ended is not None, f"{tool} crashed, or took longer than {_LONGEST} s, in {_RUNS} runs: {names}"
    stdout, output = ended
    if "Device not supported" in output:
        pytest.skip(f"{tool} does not support this device or its driver")
    # A finding is printed when its kernel has ended or later, so only the kernel's name identifies the step.
    kernels = set(re.findall(r"^=========.* at ([\w:<>, ]+)\(", stdout, re.MULTILINE))
    assert stdout.count("========= COMPUTE-SANITIZER") == 1, output
    if "planted" in names:
        assert _FINDINGS[tool] in stdout, output
        assert kernels == {"planted"}, output
    else:
        assert "========= ERROR SUMMARY: 0 errors" in stdout, output
    assert ("end" in stdout.split()) or tool == "memcheck", output


def _ended(command: list[str], env: dict[str, str]) -> tuple[str, str] | None:
    """The output of a command, without and with standard error; None if it hung or a signal ended it."""
    pipe = subprocess.PIPE
    # In a new session: the tool runs the program in another process, which would outlive the tool.
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | env, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return None if process.returncode < 0 else (stdout, stdout + stderr)
