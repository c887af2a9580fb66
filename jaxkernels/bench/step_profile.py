"""Where a training step goes: the time of its kernels on the GPU, in groups and by name, as JAX's profiler traces them.

    breakdown = profile(lambda: run_steps(3), 3, compiled_step.as_text())

A kernel belongs to an HLO instruction, and the instruction to a group: the scopes "attention" and "norm" of the model's
code, and the operations of a fusion, decide. Kernels without an instruction are grouped by their names.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.profiler import ProfileData

from jaxkernels.core.errors import InputError

__all__ = ["GROUPS", "Breakdown", "KernelTime", "breakdown", "groups_of_hlo", "profile"]

#: The groups of kernels, in the order of tables. "idle" is the time in which no kernel runs.
GROUPS: tuple[str, ...] = ("products", "attention", "norms", "elementwise", "copies", "collectives", "other", "idle")

#: Kernels that are kept by name.
_NUM_KERNELS = 25


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """The kernels of one name.

    Attributes:
      name: the instruction's name without its number, and the kernel's name if that is another one.
      group: one of `GROUPS`.
      seconds: in a step.
      count: launches in a step.
    """

    name: str
    group: str
    seconds: float
    count: float


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """A step.

    Attributes:
      seconds: of a step, from kernel to kernel.
      groups: group -> seconds. Kernels that run at the same time count each in full, so that the sum may exceed the
        step.
      kernels: the kernels with the most time, by name.
    """

    seconds: float
    groups: dict[str, float]
    kernels: tuple[KernelTime, ...]


def profile(launch: Callable[[], Any], num_steps: int, hlo: str) -> Breakdown:
    """Traces a launch of steps that follow each other.

    Args:
      launch: makes the steps.
      num_steps: their number.
      hlo: the text of the compiled step.

    Raises:
      InputError: the trace has no kernels of a GPU.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(launch())
        # The trace of a process is one file.
        (path,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        return breakdown(ProfileData.from_file(str(path)), num_steps, groups_of_hlo(hlo))


def breakdown(trace: Any, num_steps: int, groups: Mapping[str, str]) -> Breakdown:
    """Sums up the kernels of a trace.

    Args:
      trace: the trace, a `jax.profiler.ProfileData`.
      num_steps: the steps in it.
      groups: instruction -> group, from `groups_of_hlo`.

    Raises:
      InputError: the trace has no kernels of a GPU.
    """
    spans: list[tuple[float, float]] = []
    found: dict[tuple[str, str], list[float]] = {}
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not str(line.name).startswith("Stream"):  # Other lines repeat the kernels, summed up.
                continue
            for event in line.events:
                name, group = _kernel(event, groups)
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
                found.setdefault((name, group), []).append(event.duration_ns / 1e9)
    if not spans:
        raise InputError("bench: --profile found no kernels in the trace. It needs a GPU, and CUPTI of jax[cuda13].")
    seconds = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9
    totals = dict.fromkeys(GROUPS, 0.0)
    for (_, group), times in found.items():
        totals[group] += sum(times) / num_steps
    totals["idle"] = (seconds - _busy(spans)) / num_steps
    kernels = [KernelTime(*key, sum(times) / num_steps, len(times) / num_steps) for key, times in found.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return Breakdown(seconds / num_steps, totals, tuple(kernels[:_NUM_KERNELS]))


def _busy(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one kernel runs."""
    busy, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        busy += max(stop - max(begin, end), 0.0)
        end = max(end, stop)
    return busy / 1e9


def _kernel(event: Any, groups: Mapping[str, str]) -> tuple[str, str]:
    """The name and the group of a kernel."""
    kernel = _short(event.name)
    stats = {str(name): value for name, value in event.stats if name is not None}
    instruction = str(stats.get("hlo_op", ""))
    if instruction == _GRAPH:
        instruction = ""
    # Our kernel's instruction is a custom call: it does not say what the kernel computes. A kernel of a CUDA graph may
    # have no instruction. XLA's own kernels have the names of their instructions.
    group = _group_of_name(kernel, _OWN_NAMES) or groups.get(instruction) or groups.get(_symbol(event.name))
    named = re.sub(r"[._]\d+$", "", instruction)
    name = kernel if not named or kernel.startswith(_symbol(named)) else f"{named}: {kernel}"
    if group is None or event.name.startswith(("Memcpy", "Memset")):
        group = _group_of_name(event.name) or "other"
    return name, group


def _short(name: str) -> str:
    """A kernel's name without arguments, templates and numbers at its end."""
    name = re.sub(r"^(void|static) ", "", name)
    return re.sub(r"[._]\d+$", "", re.split(r"[<(]", name, maxsplit=1)[0] or name)[:60]


def _symbol(name: str) -> str:
    return re.sub(r"[^\w]", "_", name)


#: What a trace names in place of the instruction of a kernel in a CUDA graph.
_GRAPH = "command_buffer"

#: Group -> a pattern of kernels' names, in the order in which they are tried.
_NAMES = {
    "collectives": r"nccl|all_?reduce|all_?gather|reduce_?scatter",
    "copies": r"^mem(cpy|set)|^copy|^wrapped_(copy|transpose|slice)|dynamic_(update_)?slice$",
    "attention": r"sdpa|fmha|flash|attention|\bcudnn::fusion",
    "products": r"gemm|matmul|few_rows|nvjet|cutlass|xmma|cublas|splitk|_dot",
    "elementwise": r"fusion|^wrapped_|elementwise",
}


#: The same of our kernels that are no products.
_OWN_NAMES = {"attention": r"^(jaxkernels::)?attention_", "norms": r"^norm_", "elementwise": r"^logits_"}


def _group_of_name(name: str, names: Mapping[str, str] = _NAMES) -> str | None:
    return next((group for group, pattern in names.items() if re.search(pattern, name, re.IGNORECASE)), None)


# The instructions of a compiled program.

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')

#: Operations that only move data, or choose the place.
_MOVES = frozenset(
    ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "copy-start", "copy-done", "slice",
     "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "transpose", "reshape", "broadcast", "reverse")
)  # fmt: skip
#: Operations with which a fusion computes where a slice begins; beside moves they are no work of their own.
_OFFSETS = frozenset(("add", "subtract", "select", "compare", "clamp"))

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass
class _Instruction:
    opcode: str
    calls: str | None
    op_name: str
    is_scalar: bool


def groups_of_hlo(text: str) -> dict[str, str]:
    """Returns the group of each instruction of a compiled program, by name and by the name of its kernel.

    Args:
      text: `jax.stages.Compiled.as_text()`.
    """
    computations: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], {})
        elif match := _INSTRUCTION.match(line):
            calls, op_name = _CALLS.search(line), _OP_NAME.search(line)
            is_scalar = re.search(r"= \w+\[\]", line) is not None
            current[match[1]] = _Instruction(
                match[2], calls and calls[1], "" if op_name is None else op_name[1], is_scalar
            )
    groups: dict[str, str] = {}
    for instructions in computations.values():
        for name, instruction in instructions.items():
            inner = list(computations.get(instruction.calls or "", {}).values()) or [instruction]
            group = _group_of(instruction, inner)
            groups[name] = groups[_symbol(name)] = group
    return groups


def _group_of(instruction: _Instruction, inner: list[_Instruction]) -> str:
    """The group of an instruction: of a fusion by the instructions in it."""
    opcodes = {x.opcode for x in inner}
    scopes = {part for x in (instruction, *inner) for part in x.op_name.split("/")}
    if any(opcode.startswith(_COLLECTIVES) for opcode in opcodes):
        return "collectives"
    if "attention" in scopes and "norm" not in scopes:
        return "attention"
    if "custom-call" in opcodes and "dot" not in opcodes and "norm" in scopes:
        return "norms"
    if opcodes & {"dot", "custom-call", "convolution"}:
        return "products"
    if all(x.opcode in _MOVES or (x.is_scalar and x.opcode in _OFFSETS) for x in inner):
        return "copies"
    return "norms" if "norm" in scopes else "elementwise"
