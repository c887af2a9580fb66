"""What the chips we compile for can do: one table, every figure with its source.

A `Chip` is part of every kernel spec, so that a backend can state its limits (`compute_capability`),
size its grid (`num_sms`) and a model can report its share of the peak (`flops_per_s`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any

import jax

__all__ = [
    "DEFAULT_CUDA_TARGET", "GPU_PLATFORMS", "PLATFORMS", "Chip", "chip_of", "clusters_at_once", "cuda_target", "host",
    "lookup", "needs_capability", "soft_max", "waves",
]  # fmt: skip


#: The JAX lowering platforms that operations have a rule for.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: The platforms of JAX's devices that are GPUs.
GPU_PLATFORMS = ("gpu", "cuda")

#: The share of the last wave's idle time that work of more waves than these gets back, as the clock rises: power limits
#: it (H200; docs/cuda-gemm.md, "What the tensor cores allow").
_REGAINED = 1 / 3
_FEW_WAVES = 3


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator (or the host) as the kernels see it.

    Attributes:
      name: the vendor's name, as `device.device_kind` reports it where it is known.
      platform: the JAX lowering platform ("cpu", "cuda", "rocm", "tpu").
      compute_capability: (major, minor) of a CUDA device, else None.
      num_sms: streaming multiprocessors.
      smem_bytes: shared memory that one block may opt in to, bytes.
      memory_bytes_per_s: device memory bandwidth, bytes/s.
      bf16_flops_per_s: dense bfloat16/float16 tensor-core peak, FLOP/s.
      tf32_flops_per_s: dense TF32 tensor-core peak, FLOP/s.
      fp32_flops_per_s: peak of the ordinary fp32 units, FLOP/s.
      exps_per_s: exponentials of the special function units, 1/s: 16 a clock and SM (CUDA C++ Programming Guide,
        "Arithmetic Instructions"), at the clock of `fp32_flops_per_s`.
      source: where the figures come from.
    """

    name: str
    platform: str
    compute_capability: tuple[int, int] | None = None
    num_sms: int = 0
    smem_bytes: int = 0
    memory_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    fp32_flops_per_s: float | None = None
    exps_per_s: float | None = None
    source: str = ""

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability == (9, 0)

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.name
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor})"


def _compute_capability(major: int, minor: int, smem_bytes: int) -> dict[str, Any]:
    """What chips of a compute capability share (CUDA C++ Programming Guide, "Compute Capabilities")."""
    return dict(platform="cuda", compute_capability=(major, minor), smem_bytes=smem_bytes)


_SM80 = _compute_capability(8, 0, 166912)
_SM86 = _compute_capability(8, 6, 101376)
_SM89 = _compute_capability(8, 9, 101376)
_SM90 = _compute_capability(9, 0, 232448)
_SM100 = _compute_capability(10, 0, 232448)
_SM120 = _compute_capability(12, 0, 101376)

_HALF = "(dense rates are half the sparse ones printed)"
_A100_DATASHEET = "NVIDIA A100 Tensor Core GPU datasheet"
_H100_DATASHEET = f"NVIDIA H100 Tensor Core GPU datasheet {_HALF}"
_H200_DATASHEET = f"NVIDIA H200 Tensor Core GPU datasheet {_HALF}"

#: GeForce chips multiply 16-bit numbers at half the rate if they add in fp32, as our kernels do: that rate counts here.
_FP32_ACCUMULATION = "16-bit tensor cores with fp32 accumulation"

_TABLE: tuple[Chip, ...] = (
    Chip(
        name="NVIDIA H200",
        num_sms=132,
        memory_bytes_per_s=4.8e12,
        bf16_flops_per_s=989.4e12,
        tf32_flops_per_s=494.7e12,
        fp32_flops_per_s=66.9e12,
        exps_per_s=4.18e12,
        source=_H200_DATASHEET,
        **_SM90,
    ),
    Chip(
        name="NVIDIA H100 80GB HBM3",
        num_sms=132,
        memory_bytes_per_s=3.35e12,
        bf16_flops_per_s=989.4e12,
        tf32_flops_per_s=494.7e12,
        fp32_flops_per_s=66.9e12,
        exps_per_s=4.18e12,
        source=_H100_DATASHEET + ", SXM5",
        **_SM90,
    ),
    Chip(
        name="NVIDIA H100 PCIe",
        num_sms=114,
        memory_bytes_per_s=2.0e12,
        bf16_flops_per_s=756e12,
        tf32_flops_per_s=378e12,
        fp32_flops_per_s=51.2e12,
        exps_per_s=3.2e12,
        source=_H100_DATASHEET + ", PCIe",
        **_SM90,
    ),
    Chip(
        name="NVIDIA A100-SXM4-80GB",
        num_sms=108,
        memory_bytes_per_s=2.039e12,
        bf16_flops_per_s=312e12,
        tf32_flops_per_s=156e12,
        fp32_flops_per_s=19.5e12,
        exps_per_s=2.44e12,
        source=_A100_DATASHEET + ", SXM4 80 GB",
        **_SM80,
    ),
    Chip(
        name="NVIDIA A100-SXM4-40GB",
        num_sms=108,
        memory_bytes_per_s=1.555e12,
        bf16_flops_per_s=312e12,
        tf32_flops_per_s=156e12,
        fp32_flops_per_s=19.5e12,
        exps_per_s=2.44e12,
        source=_A100_DATASHEET + ", SXM4 40 GB",
        **_SM80,
    ),
    Chip(
        name="NVIDIA A100 80GB PCIe",
        num_sms=108,
        memory_bytes_per_s=1.935e12,
        bf16_flops_per_s=312e12,
        tf32_flops_per_s=156e12,
        fp32_flops_per_s=19.5e12,
        exps_per_s=2.44e12,
        source=_A100_DATASHEET + ", PCIe 80 GB",
        **_SM80,
    ),
    Chip(
        name="NVIDIA A10",
        num_sms=72,
        memory_bytes_per_s=600e9,
        bf16_flops_per_s=125e12,
        tf32_flops_per_s=62.5e12,
        fp32_flops_per_s=31.2e12,
        exps_per_s=1.95e12,
        source="NVIDIA A10 Tensor Core GPU datasheet; SMs: NVIDIA Ampere GA102 GPU Architecture whitepaper",
        **_SM86,
    ),
    Chip(
        name="NVIDIA L4",
        num_sms=58,
        memory_bytes_per_s=300e9,
        bf16_flops_per_s=121e12,
        tf32_flops_per_s=60e12,
        fp32_flops_per_s=30.3e12,
        exps_per_s=1.89e12,
        source=f"NVIDIA L4 Tensor Core GPU datasheet {_HALF}; SMs: NVIDIA Ada GPU Architecture whitepaper",
        **_SM89,
    ),
    Chip(
        name="NVIDIA L40S",
        num_sms=142,
        memory_bytes_per_s=864e9,
        bf16_flops_per_s=362e12,
        tf32_flops_per_s=183e12,
        fp32_flops_per_s=91.6e12,
        exps_per_s=5.73e12,
        source="NVIDIA L40S GPU datasheet; SMs: NVIDIA Ada GPU Architecture whitepaper (AD102)",
        **_SM89,
    ),
    Chip(
        name="NVIDIA GeForce RTX 3090",
        num_sms=82,
        memory_bytes_per_s=936e9,
        bf16_flops_per_s=71e12,
        tf32_flops_per_s=35.6e12,
        fp32_flops_per_s=35.6e12,
        exps_per_s=2.22e12,
        source=f"NVIDIA Ampere GA102 GPU Architecture whitepaper, GeForce RTX 3090; {_FP32_ACCUMULATION}",
        **_SM86,
    ),
    Chip(
        name="NVIDIA GeForce RTX 4090",
        num_sms=128,
        memory_bytes_per_s=1.008e12,
        bf16_flops_per_s=165.2e12,
        tf32_flops_per_s=82.6e12,
        fp32_flops_per_s=82.6e12,
        exps_per_s=5.16e12,
        source=f"NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090; {_FP32_ACCUMULATION}",
        **_SM89,
    ),
    Chip(
        name="NVIDIA GeForce RTX 5090",
        num_sms=170,
        memory_bytes_per_s=1.792e12,
        bf16_flops_per_s=209.5e12,
        tf32_flops_per_s=104.8e12,
        fp32_flops_per_s=104.8e12,
        exps_per_s=6.55e12,
        source=f"NVIDIA RTX Blackwell GPU Architecture whitepaper, GeForce RTX 5090; {_FP32_ACCUMULATION}",
        **_SM120,
    ),
    Chip(
        name="NVIDIA B200",
        num_sms=148,
        memory_bytes_per_s=8e12,
        bf16_flops_per_s=2.25e15,
        tf32_flops_per_s=1.125e15,
        fp32_flops_per_s=75e12,
        exps_per_s=4.69e12,
        source=f"NVIDIA DGX B200 datasheet, an eighth of its rates {_HALF}; SMs: reported by the driver",
        **_SM100,
    ),
)

#: What a program is compiled for when it is lowered for CUDA on a machine that has no CUDA device
#: (export, tests). `JAXKERNELS_TARGET` names another chip of the table.
DEFAULT_CUDA_TARGET = "NVIDIA H200"


def lookup(name: str) -> Chip:
    """Returns the table's chip called `name`.

    Raises:
      ValueError: no chip of that name; the message lists the known ones.
    """
    for chip in _TABLE:
        if chip.name == name:
            return chip
    known = ", ".join(repr(chip.name) for chip in _TABLE)
    raise ValueError(f"hardware: unknown chip {name!r}; known chips are {known}.")


@functools.cache
def host(platform: str = "cpu") -> Chip:
    """Returns the chip that stands for a platform we have no table for (CPU, TPU, ROCm)."""
    return Chip(name=platform, platform=platform)


def chip_of(device: Any) -> Chip:
    """Describes a JAX device: the table's row where there is one, and always what the driver reports.

    Of a chip that is not in the table, the rates are not known.
    """
    if device.platform not in GPU_PLATFORMS:
        return host(device.platform)
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # ROCm devices carry no CUDA compute capability.
        return host("rocm")
    major, minor = (int(part) for part in str(capability).split("."))
    known = next((chip for chip in _TABLE if chip.name == device.device_kind), None)
    base = known or Chip(name=device.device_kind, platform="cuda", source="reported by the driver")
    # Devices of a topology, for which programs are compiled without a GPU, do not tell all.
    alike = next((chip for chip in _TABLE if chip.compute_capability == (major, minor)), base)
    return dataclasses.replace(
        base,
        compute_capability=(major, minor),
        num_sms=int(getattr(device, "core_count", 0) or base.num_sms or alike.num_sms),
        smem_bytes=int(getattr(device, "shared_memory_per_block_optin", 0) or alike.smem_bytes),
    )


def cuda_target(devices: Iterable[Any] = ()) -> Chip:
    """Returns the chip to compile for when lowering for CUDA.

    In order: the first CUDA device among `devices` (those the program will run on), the chip named by
    the environment variable `JAXKERNELS_TARGET`, the first local CUDA device, `DEFAULT_CUDA_TARGET`.
    """
    for device in devices:
        if device.platform in GPU_PLATFORMS:
            return chip_of(device)
    if target := os.environ.get("JAXKERNELS_TARGET"):
        return lookup(target)
    if jax.default_backend() == "gpu":
        return chip_of(jax.local_devices()[0])
    return lookup(DEFAULT_CUDA_TARGET)


def needs_capability(chip: Chip, oldest: tuple[int, int]) -> str | None:
    """A message about the compute capability that a kernel needs, if the chip is older or no CUDA GPU; else None."""
    if chip.compute_capability is not None and chip.compute_capability >= oldest:
        return None
    return f"needs a CUDA GPU of compute capability {'.'.join(map(str, oldest))} or newer"


def clusters_at_once(chip: Chip, blocks: int) -> int:
    """How many clusters the chip holds at once, of CTAs that have an SM each. SMs come in pairs, and pairs in groups
    that a cluster stays in: of 132 SMs clusters of four or eight leave 12 unused (H200, cuOccupancyMaxActiveClusters).
    """
    num_sms = chip.num_sms if blocks <= 2 else chip.num_sms * 10 // 11
    return max(num_sms // blocks, 1)


def waves(pieces: int, places: int) -> float:
    """How many times as long as one piece of work many equal ones take, of which a chip holds `places` at once."""
    count = float(-(-pieces // places))
    return count - (count - pieces / places) * _REGAINED if count > _FEW_WAVES else count


def soft_max(*seconds: float) -> float:
    """The time of pieces of work that overlap: that of the longest, and up to 19 % more for two that are as long."""
    return float(sum(x**4 for x in seconds) ** 0.25)
