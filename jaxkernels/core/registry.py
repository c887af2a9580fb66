"""Every operation: the folder that describes it, and the backends that compute its kernels.

An operation is one line of `OPERATIONS`. Its folder has what is particular to it: its public function, its spec with
named operands (`jaxkernels.core.operands`), its rules and its reference, and up to five modules that tests, benchmarks,
tuning and `doctor` find by their names:

- `cases`: `CASE`, its problems as data (`jaxkernels.core.cases.Case`);
- `suites`: `SUITES`, what `jaxkernels bench` times;
- `baselines`: `BASELINES`, name -> another way to compute a problem;
- `random_problems`: `draw(dice)`, a random problem as users have them, for `jaxkernels bench --random`;
- `tuning`: `probe(chip)`, a plain spec that every backend should take, for `doctor`. Where the spec's own draw will not
  do, also `operands(kernel, spec, device)`, what kernels are measured on; where not all results can be checked,
  `part_to_check(kernel, spec)`; where XLA merges a kernel with the operation that makes an operand,
  `beside(kernel, spec)`, what a comparison computes in one program with the kernel; and where specs have a `shared`
  operand, `shared_seconds(kernel, spec)`, what its copy takes.

A backend has a module for each design: for each kernel that can compute it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Literal

__all__ = ["OPERATIONS", "Entry", "Operation", "entries", "operation_of", "part"]

_CUDA = ("cuda",)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A backend of one kernel.

    Attributes:
      designs: its modules, one for each design. Their contract is in `jaxkernels.core.dispatch`.
      platforms: the lowering platforms it can run on; None: all.
      is_exportable: whether `jax.export` takes what it is lowered to unasked.
      compiles_in_lowering: whether a compiler other than XLA (NVRTC, Triton) runs when a program is lowered.
      is_always_compared: whether comparisons measure it although it has no estimate.
    """

    designs: tuple[str, ...]
    platforms: tuple[str, ...] | None = None
    is_exportable: bool = True
    compiles_in_lowering: bool = False
    is_always_compared: bool = False


def _compiled(*designs: str) -> Entry:
    """A backend with kernels in CUDA C++ or Triton."""
    return Entry(designs, _CUDA, is_exportable=False, compiles_in_lowering=True)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the package.

    Attributes:
      folder: the package that describes it.
      kernels: what is dispatched -> backend -> its entry; the first backend is the first preferred.
    """

    folder: str
    kernels: Mapping[str, Mapping[str, Entry]]


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(
        "jaxkernels.ops.matmul",
        {
            "matmul": {
                "cuda": _compiled(
                    "jaxkernels.ffi.matmul.gemm", "jaxkernels.ffi.matmul.few_rows", "jaxkernels.ffi.matmul.simt"
                ),
                "pallas": Entry(("jaxkernels.pallas.matmul.gemm",), _CUDA),
                "triton": _compiled("jaxkernels.triton.matmul.gemm"),
                "cublaslt": Entry(
                    ("jaxkernels.ffi.matmul.cublaslt",), _CUDA, is_exportable=False, is_always_compared=True
                ),
                "xla": Entry(("jaxkernels.ops.matmul.reference",)),
            }
        },
    ),
    "qkv_projection": Operation(
        "jaxkernels.ops.qkv_projection",
        {
            "qkv_projection": {
                "cuda": _compiled("jaxkernels.ffi.matmul.projection"),
                "xla": Entry(("jaxkernels.ops.qkv_projection.reference",)),
            }
        },
    ),
    "attention": Operation(
        "jaxkernels.ops.attention",
        {
            "attention_forward": {
                "pallas": Entry(("jaxkernels.pallas.attention.forward",), _CUDA),
                "cuda": _compiled("jaxkernels.ffi.attention.forward"),
                "triton": _compiled("jaxkernels.triton.attention.forward"),
                "cudnn": Entry(("jaxkernels.cudnn.attention.forward",), _CUDA, is_exportable=False),
                "xla": Entry(("jaxkernels.ops.attention.reference_forward",)),
            },
            "attention_backward": {
                "pallas": Entry(
                    (
                        "jaxkernels.pallas.attention.backward_fused",
                        "jaxkernels.pallas.attention.backward_two_kernels",
                        "jaxkernels.pallas.attention.backward_wide",
                    ),
                    _CUDA,
                ),
                "cuda": _compiled("jaxkernels.ffi.attention.backward", "jaxkernels.ffi.attention.backward_wide"),
                "triton": _compiled(
                    "jaxkernels.triton.attention.backward",
                    "jaxkernels.triton.attention.few_queries",
                    "jaxkernels.triton.attention.few_keys",
                ),
                "cudnn": Entry(("jaxkernels.cudnn.attention.backward",), _CUDA, is_exportable=False),
                "xla": Entry(("jaxkernels.ops.attention.reference_backward",)),
            },
            "attention_tangent": {
                "triton": _compiled("jaxkernels.triton.attention.tangent"),
                "xla": Entry(("jaxkernels.ops.attention.reference_tangent",)),
            },
        },
    ),
    "norm": Operation(
        "jaxkernels.ops.norm",
        {
            "norm_forward": {
                "triton": _compiled("jaxkernels.triton.norm.forward"),
                "xla": Entry(("jaxkernels.ops.norm.reference_forward",)),
            },
            "norm_backward": {
                "triton": _compiled("jaxkernels.triton.norm.backward"),
                "xla": Entry(("jaxkernels.ops.norm.reference_backward",)),
            },
            "norm_tangent": {
                "triton": _compiled("jaxkernels.triton.norm.tangent"),
                "xla": Entry(("jaxkernels.ops.norm.reference_tangent",)),
            },
        },
    ),
    "linear_cross_entropy": Operation(
        "jaxkernels.ops.linear_cross_entropy",
        {
            f"linear_cross_entropy_{kernel}": {
                "triton": _compiled(f"jaxkernels.triton.linear_cross_entropy.{kernel}"),
                "xla": Entry((f"jaxkernels.ops.linear_cross_entropy.reference_{kernel}",)),
            }
            for kernel in ("forward", "tangent", "backward", "fused")
        },
    ),
}


def entries() -> dict[tuple[str, str], Entry]:
    """(kernel, backend) -> entry, of all operations."""
    return {
        (kernel, backend): entry
        for operation in OPERATIONS.values()
        for kernel, backends in operation.kernels.items()
        for backend, entry in backends.items()
    }


def operation_of(kernel: str) -> str:
    """The operation that a kernel belongs to."""
    return next(name for name, operation in OPERATIONS.items() if kernel in operation.kernels)


def part(name: str, module: Literal["cases", "suites", "baselines", "random_problems", "tuning"]) -> ModuleType | None:
    """A module of an operation's folder, or None if the folder has none of this name."""
    path = f"{OPERATIONS[name].folder}.{module}"
    return None if importlib.util.find_spec(path) is None else importlib.import_module(path)
