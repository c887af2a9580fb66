"""What cost models and search spaces of Triton kernels need to know of a chip, also of one that has no row in a table.

A chip that `jaxkernels.core.hardware` does not list has no rates. It is taken to have those of a typical chip of its
compute capability, in proportion to its SMs. That ranks configurations; it is no statement about the chip.
"""

from __future__ import annotations

import dataclasses

from jaxkernels.core.hardware import Chip

__all__ = ["Rates", "num_sms", "programs_per_sm", "rates_of", "smem_bytes"]

#: Shared memory that the driver takes for each program (CUDA C++ Programming Guide, "Compute Capabilities").
_RESERVED_SMEM = 1024


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one SM.

    Attributes:
      bf16_flops, tf32_flops, fp32_flops: peak FLOP/s of products of 16-bit and TF32 operands, and of the fp32 units.
      exps: exponentials, 1/s: 16 a clock.
      memory_bytes: the SM's share of the memory bandwidth, bytes/s.
      l2_bytes: bytes/s from L2.
    """

    bf16_flops: float
    tf32_flops: float
    fp32_flops: float
    exps: float
    memory_bytes: float
    l2_bytes: float


@dataclasses.dataclass(frozen=True)
class _Typical:
    """A chip of a compute capability: SMs, shared memory of a block and of an SM, and its rates.

    L2 rates: 1.35e11 is what tiles of 64 x 128 reach at 1536^3 on an H200. The others are 64 bytes a clock, cut to
    what many SMs get at once.
    """

    num_sms: int
    smem_bytes: int
    smem_bytes_of_sm: int
    rates: Rates


def _typical(
    num_sms: int, smem_kib: tuple[int, int], tflops: tuple[float, float, float], ghz: float, memory: float, l2: float
) -> _Typical:
    """Takes figures of a whole chip as data sheets print them: KiB, dense TFLOP/s, boost clock and bytes/s."""
    bf16, tf32, fp32 = (1e12 * rate / num_sms for rate in tflops)
    block, sm = (1024 * size for size in smem_kib)
    return _Typical(num_sms, block, sm, Rates(bf16, tf32, fp32, 16e9 * ghz, memory / num_sms, l2))


#: Compute capability -> a typical chip. Rates: NVIDIA's data sheets and architecture white papers, dense, with fp32
#: accumulation. Shared memory: CUDA C++ Programming Guide, "Compute Capabilities".
_TYPICAL = {
    (8, 0): _typical(108, (163, 164), (312, 156, 19.5), 1.41, 2.04e12, 4.5e10),  # A100
    (8, 6): _typical(82, (99, 100), (71, 35.6, 35.6), 1.695, 0.936e12, 4.5e10),  # GeForce RTX 3090
    (8, 9): _typical(128, (99, 100), (165.2, 82.6, 82.6), 2.52, 1.008e12, 4.5e10),  # GeForce RTX 4090
    (9, 0): _typical(132, (227, 228), (989.4, 494.7, 66.9), 1.98, 3.35e12, 1.35e11),  # H100
    (10, 0): _typical(148, (227, 228), (2250, 1125, 75), 1.965, 8.0e12, 1.07e11),  # B200
    (12, 0): _typical(170, (99, 100), (209.5, 104.8, 104.8), 2.407, 1.792e12, 4.5e10),  # GeForce RTX 5090
}


def _typical_of(chip: Chip) -> _Typical:
    """The typical chip of the capability, or of the next lower one that is listed."""
    capability = chip.compute_capability or min(_TYPICAL)
    return _TYPICAL[max((known for known in _TYPICAL if known <= capability), default=min(_TYPICAL))]


def num_sms(chip: Chip) -> int:
    return chip.num_sms or _typical_of(chip).num_sms


def smem_bytes(chip: Chip) -> int:
    """Shared memory that a program may have."""
    return chip.smem_bytes or _typical_of(chip).smem_bytes


def programs_per_sm(chip: Chip, program_bytes: int) -> int:
    """How many programs that each use so many bytes of shared memory an SM has room for."""
    return _typical_of(chip).smem_bytes_of_sm // (program_bytes + _RESERVED_SMEM)


def rates_of(chip: Chip) -> Rates:
    """Rates of one of the chip's SMs: the table's, where it has them."""
    typical, sms = _typical_of(chip).rates, num_sms(chip)
    known = lambda rate, otherwise: rate / sms if rate else otherwise
    return Rates(
        bf16_flops=known(chip.bf16_flops_per_s, typical.bf16_flops),
        tf32_flops=known(chip.tf32_flops_per_s, typical.tf32_flops),
        fp32_flops=known(chip.fp32_flops_per_s, typical.fp32_flops),
        exps=known(chip.exps_per_s, typical.exps),
        memory_bytes=known(chip.memory_bytes_per_s, typical.memory_bytes),
        l2_bytes=typical.l2_bytes,
    )
