"""What Triton's attention kernels take: shared memory, registers and time. It chooses among configurations.

A chip's figures are those of `jaxkernels.triton.chips`. The shares of its rates that kernels reach were measured on an
H200; for other chips they are a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jaxkernels.core import hardware
from jaxkernels.core.hardware import Chip
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import keys_in_reach
from jaxkernels.triton import chips
from jaxkernels.triton.attention.problem import aligned_shape, head_parts, padded

__all__ = [
    "MEMORY_SHARE",
    "Constants",
    "Tile",
    "alignment_seconds",
    "bytes_of",
    "bytes_of_keys",
    "combine_seconds",
    "fits",
    "is_filled",
    "measured_tile",
    "memory_seconds",
    "not_estimated",
    "packed_heads",
    "resident",
    "seconds",
    "shared_bytes",
    "splits",
    "sum_seconds",
    "work_of",
]

#: Registers of a thread for accumulators, logits and operands, on Hopper and on others. With more, ptxas spills.
_MOST_REGISTERS = 215, 170
#: The same if heads share a tile and queries have a band: of such kernels with more, ptxas spilled up to 588 bytes.
_MOST_REGISTERS_OF_PACKED = 190
#: The same for gradients with tiles of eight warps, on other chips than Hopper.
_MOST_REGISTERS_OF_EIGHT_WARPS = 150
#: The share of these registers that a kernel may use if its steps have results of their own.
_SHARE_WITH_RESULTS = 0.69
#: What masks of columns take of them.
_REGISTERS_OF_COLUMNS = 10
_REGISTERS_OF_SM = 65536
#: Registers that ptxas fills with loads, if a program loads all keys and values at once.
_REGISTERS_OF_LOADS = 75
#: What a tile of a bias or of a dense mask takes of them, in tiles of logits.
_LOGITS_OF_TERM = 0.5
#: Shared memory that a program takes beside its tiles, and that the driver takes of each.
_OTHER_SMEM = 1024
#: Combining the parts of a split: a second kernel, and for each part.
_COMBINE_SECONDS, _PART_SECONDS = 1.5e-6, 5e-8
#: The launch of a copy by XLA.
_COPY_SECONDS = 2e-6
#: The share of the memory's rate that kernels reach.
MEMORY_SHARE = 0.85
#: How much longer the elementwise part takes if fewer than eight warps share an SM, and a step without a pipeline.
_FEW_WARPS, _NO_PIPELINE = 1.6, 1.3

#: Configurations that a comparison measures. The cost model ranks those of short kernels badly: in five of 11
#: attentions on an H200, the best of four took 0.45 to 0.91 of the default's time (docs/choice.md).
NUM_COMPARED = 4


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model of a pass.

    Attributes:
      logit_exps: the elementwise part of a logit, in exponentials of an SM.
      step_seconds_16, step_seconds_64, step_seconds_128: what a step takes of a program that waits for its loads and
        products: with tiles below 64 rows, below 128, and others.
      byte_seconds: the same for each byte that a step loads.
      one_stage, two_stages: how many times as long a program waits without a pipeline, and with two stages.
      term_share: how much longer a step takes for a tile of a bias, and of a dense mask.
      wide_tile: how many times as long a step takes if eight warps share less than 128 rows.
      program_seconds: the beginning and the end of a program.
      stage_seconds: more for each stage that no step fills.
      launch_seconds: the launch of a kernel.
      eight_warps_seconds: more for a kernel of eight warps.
    """

    logit_exps: float
    step_seconds_16: float
    step_seconds_64: float
    step_seconds_128: float
    byte_seconds: float
    one_stage: float
    two_stages: float
    term_share: float
    wide_tile: float
    program_seconds: float
    stage_seconds: float
    launch_seconds: float
    eight_warps_seconds: float


class Tile(Protocol):
    """What the configurations of all kernels have."""

    @property
    def block_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel does, by tiles.

    Attributes:
      held: columns of float32 accumulators, for each row of the tile that stays.
      kept: columns of operands of the tile that stays.
      streamed: columns of the operands that a step loads.
      products: columns of all products of a step: 2 * block_q * block_kv * products are its FLOPs.
      rows: which block stays: "q" or "kv".
      logits: tiles of logits in registers.
      exchanged: tiles of logits that pass through shared memory, on Hopper.
      made: columns of float32 results of a step, for each row of the tile that streams.
    """

    held: int
    kept: int
    streamed: int
    products: int
    rows: str = "q"
    logits: float = 1
    exchanged: int = 0
    made: int = 0


def work_of(kernel: str, spec: AttentionSpec) -> Work:
    """The work of a kernel: "forward", "tangent", "dkv", "dq", "dbias", "few_queries" or "few_keys"."""
    h, d = padded(spec.q.shape[3]), padded(spec.v.shape[3])
    forward_h, forward_d = (sum(head_parts(size, spec.target)) for size in (spec.q.shape[3], spec.v.shape[3]))
    logits, logits_of_bias = (2.5, 3.5) if spec.target.is_hopper else (2.0, 10.0)
    return {
        "forward": Work(
            held=forward_d, kept=forward_h, streamed=forward_h + forward_d, products=forward_h + forward_d, logits=2.0
        ),
        "tangent": Work(
            held=d + h // 2, kept=2 * h, streamed=2 * (h + d), products=3 * h + 2 * d, logits=1 + logits, exchanged=1
        ),
        "dkv": Work(held=h + d, kept=h + d, streamed=h + d, products=2 * (h + d), rows="kv", logits=logits),
        "dq": Work(held=h, kept=h + d, streamed=h + d, products=2 * h + d, logits=logits),
        "few_queries": Work(
            held=h, kept=h + d, streamed=h + d, products=3 * h + 2 * d, logits=logits, exchanged=2, made=h + d
        ),
        "few_keys": Work(
            held=h + d,
            kept=h + d,
            streamed=h + 2 * d,
            products=3 * h + 2 * d,
            rows="kv",
            logits=logits,
            exchanged=1,
            made=h,
        ),
        "dbias": Work(held=0, kept=h + d, streamed=h + d, products=h + d, logits=logits_of_bias),
    }[kernel]


def shared_bytes(spec: AttentionSpec, work: Work, tile: Tile) -> int:
    """Shared memory of a program, bytes: at least what Triton takes (tests compile the kernels)."""
    rows, step = (tile.block_q, tile.block_kv) if work.rows == "q" else (tile.block_kv, tile.block_q)
    kept, streamed, logits = rows * work.kept, step * work.streamed, tile.block_q * tile.block_kv
    if _multiplies_from_shared(spec.target):
        if work.made and rows >= 64 > step:
            kept *= 2  # mma.sync multiplies the smaller tiles. It reads operands in another layout than wgmma.
        # Of float32, tensor cores read rows only: a transposed operand is copied.
        elements = kept + (tile.num_stages + (spec.q.dtype.itemsize > 2)) * streamed + work.exchanged * logits
    else:
        elements = max(kept + max(1, tile.num_stages - 1) * streamed + logits, tile.num_stages * streamed)
    # Triton loads tiles of a bias and of a dense mask ahead, too.
    ahead = sum(x.dtype.itemsize for x in (spec.bias, spec.mask) if x is not None) * (tile.num_stages - 1) * logits
    return elements * spec.q.dtype.itemsize + ahead + _OTHER_SMEM


def _multiplies_from_shared(chip: Chip) -> bool:
    """Whether tensor cores read operands from shared memory (wgmma, tcgen05), not from registers."""
    return chip.compute_capability in ((9, 0), (10, 0))


def registers(spec: AttentionSpec, work: Work, tile: Tile) -> float:
    """Registers of a thread that hold accumulators, logits and operands.

    On Hopper 16-bit operands stay in shared memory. Without a pipeline, a step's operands pass through registers.
    """
    rows, step = (tile.block_q, tile.block_kv) if work.rows == "q" else (tile.block_kv, tile.block_q)
    size, pairs = spec.q.dtype.itemsize, tile.block_q * tile.block_kv
    given = (spec.bias is not None) + (spec.mask is not None)
    count = rows * work.held + step * work.made + (work.logits + (size > 2) + _LOGITS_OF_TERM * given) * pairs
    if not spec.target.is_hopper or size > 2:
        count += rows * work.kept * size / 8
    if size > 2:
        count += step * work.streamed * size / 8
    if tile.num_stages == 1:
        # ptxas loads keys, and only then values, into the registers of one warp.
        loads = step * work.streamed * size / (8 if tile.num_warps == 1 else 2)
        count += min(loads, _REGISTERS_OF_LOADS * 32 * tile.num_warps) if holds_all_keys(tile) else loads
    return count / (32 * tile.num_warps) + (_REGISTERS_OF_COLUMNS if has_odd_heads(spec) else 0)


def holds_all_keys(tile: Tile) -> bool:
    """Whether a tile is for all keys. Its program has no loop: it loads all keys and values at once."""
    return tile.block_kv >= 256


def has_odd_heads(spec: AttentionSpec) -> bool:
    """Whether a head dimension is not a power of two, so that columns are masked."""
    return any(size != padded(size) for size in (spec.q.shape[3], spec.v.shape[3]))


def fits(spec: AttentionSpec, kernel: str, tile: Tile) -> bool:
    """Whether a tile fits the chip, and has work for each of its warps."""
    work = work_of(kernel, spec)
    rows, step = (tile.block_q, tile.block_kv) if work.rows == "q" else (tile.block_kv, tile.block_q)
    if 16 < rows < 16 * min(tile.num_warps, 4):
        return False
    if kernel == "few_queries" and rows >= 64 and max(work.held, work.made // 2) > 128:
        return False  # ptxas spills.
    if kernel == "few_queries" and rows > 64 and step > 16 and not spec.target.is_hopper:
        return False  # ptxas spills up to 96 bytes.
    is_large = tile.num_stages > 2 or registers(spec, work, tile) > _MOST_REGISTERS_OF_EIGHT_WARPS
    if kernel in ("dkv", "dq") and not spec.target.is_hopper and tile.num_warps > 4 and is_large:
        return False  # ptxas spills 8 to 48 bytes.
    if _multiplies_from_shared(spec.target) and kernel != "forward":
        # ptxas spills where wgmma shares 64 rows among 8 warps, or gets transposed copies of float32. Smaller tiles are
        # multiplied by mma.sync.
        if kernel == "tangent" and tile.num_warps == 8 and rows < 128:
            return False
        if spec.q.dtype.itemsize > 2 and rows >= 64:
            return False
    most = _MOST_REGISTERS[0 if spec.target.is_hopper else 1] * (_SHARE_WITH_RESULTS if work.made else 1.0)
    return shared_bytes(spec, work, tile) <= chips.smem_bytes(spec.target) and registers(spec, work, tile) <= most


#: Tiles that were fastest on an H200, 2026-11-25, of those that do not spill registers: kernel -> the padded head
#: dimension up to which they are -> tile, and where it differs the tile without a mask; (block_q, block_kv, num_warps,
#: num_stages). "dkv" at 256 spills 496 bytes with a mask and 128 without: it takes 0.79 and 0.75 of the time of the
#: fastest that does not.
_MEASURED: dict[str, dict[int, tuple[tuple[int, int, int, int], ...]]] = {
    "forward": {64: ((64, 64, 4, 3),), 128: ((64, 64, 4, 3),), 256: ((128, 64, 8, 2),)},
    "dkv": {64: ((64, 64, 4, 3),), 128: ((64, 64, 4, 2), (64, 128, 8, 3)), 256: ((64, 64, 8, 2),)},
    "dq": {64: ((64, 64, 4, 2), (128, 64, 8, 3)), 128: ((128, 64, 8, 3),), 256: ((128, 32, 8, 2), (64, 64, 4, 2))},
}


def measured_tile(spec: AttentionSpec, kernel: str) -> tuple[int, int, int, int] | None:
    """The tile that was measured fastest for problems like this one, or None: for others the model chooses.

    They are long: there are two such tiles of queries and of keys. They have no bias and no dense mask. To a gradient,
    one that has a single row makes no difference.
    """
    if not spec.target.is_hopper or spec.q.dtype.itemsize != 2 or kernel not in _MEASURED or has_odd_heads(spec):
        return None
    if terms_with_rows(spec) or (kernel == "forward" and (spec.bias is not None or spec.mask is not None)):
        return None
    widest = max(padded(spec.q.shape[3]), padded(spec.v.shape[3]))
    tiles = next(tiles for limit, tiles in _MEASURED[kernel].items() if widest <= limit)
    tile = tiles[0] if spec.mask_terms else tiles[-1]
    return tile if spec.q.shape[1] >= 2 * tile[0] and spec.k.shape[1] >= 2 * tile[1] else None


def terms_with_rows(spec: AttentionSpec) -> int:
    """How many of bias and dense mask have a row for each query, so that each step loads a tile of them."""
    return sum(x is not None and x.shape[2] > 1 for x in (spec.bias, spec.mask))


def is_filled(rows: int, block: int) -> bool:
    """Whether a tile is not much taller than the rows there are."""
    return block <= max(16, 2 * rows - 1)


def packed_heads(spec: AttentionSpec, tile: Tile) -> int:
    """How many query heads of a key head may share a tile of the forward pass: all of them.

    With segments, tiles have whole queries: then the largest power of two that divides their number and the rows of a
    tile. With a band, each row computes its query's position: heads share no tile that nearly fills the registers.
    """
    has_band = spec.band.left is not None or spec.band.right is not None
    count = registers(spec, work_of("forward", spec), tile)
    if spec.target.is_hopper and has_band and count > _MOST_REGISTERS_OF_PACKED:
        return 1
    heads = spec.group_size
    return min(heads & -heads, tile.block_q) if spec.segments else heads


def splits(spec: AttentionSpec, programs: int, num_blocks: int, *, per_sm: int) -> Iterator[int]:
    """Numbers of parts of the keys that are worth trying: powers of two that leave each part a block, and give an SM up
    to `per_sm` programs.
    """
    yield 1
    parts = 2
    while parts <= num_blocks and programs * parts <= per_sm * chips.num_sms(spec.target):
        yield parts
        parts *= 2


def seconds(
    spec: AttentionSpec,
    kernel: str,
    tile: Tile,
    constants: Constants,
    *,
    programs: int,
    visits: Sequence[int],
    parts: int = 1,
    num_bytes: float = 0,
) -> float:
    """Estimates a kernel's time: it computes, or waits for products and loads, or for the memory.

    Args:
      programs: how many there are.
      visits: for each tile that stays: the blocks that pass it.
      parts: how many programs share these blocks.
      num_bytes: what the kernel reads and writes of device memory.
    """
    chip, work = spec.target, work_of(kernel, spec)
    sm, num_sms = chips.rates_of(chip), chips.num_sms(chip)
    rows, step = (tile.block_q, tile.block_kv) if work.rows == "q" else (tile.block_kv, tile.block_q)
    pairs = rows * step
    steps, longest = max(1.0, sum(visits) / len(visits) / parts), -(-max(1, *visits) // parts)
    per_sm = max(1, min(resident(spec, work, tile), -(-programs // num_sms)))
    waves = -(-programs // (num_sms * per_sm))
    factor = 1 + constants.term_share * terms_with_rows(spec)
    if tile.num_warps > 4 and rows < 128:
        factor *= constants.wide_tile
    # The elementwise part overlaps with products of other programs of the SM, not with its own.
    elementwise = pairs / sm.exps * constants.logit_exps * (_FEW_WARPS if per_sm * tile.num_warps < 8 else 1)
    flops = sm.tf32_flops if spec.q.dtype.itemsize > 2 else sm.bf16_flops
    computing = 2.0 * pairs * work.products / (flops * _share(chip, rows, pairs)) + elementwise
    computing *= factor * (_NO_PIPELINE if tile.num_stages == 1 else 1)
    waiting = (constants.step_seconds_16, constants.step_seconds_64, constants.step_seconds_128)[
        (rows >= 64) + (rows >= 128)
    ]
    if not holds_all_keys(tile):
        waiting *= {1: constants.one_stage, 2: constants.two_stages}.get(tile.num_stages, 1.0)
    waiting = factor * (waiting + step * work.streamed * spec.q.dtype.itemsize * constants.byte_seconds)
    edges = constants.program_seconds + constants.stage_seconds * max(0.0, tile.num_stages - steps)
    launch = constants.launch_seconds + (constants.eight_warps_seconds if tile.num_warps > 4 else 0)
    return launch + hardware.soft_max(
        computing * max(longest, steps * waves * per_sm),
        waiting * max(longest, steps * waves) + waves * edges,
        memory_seconds(chip, num_bytes),
    )


def not_estimated(spec: AttentionSpec, config: Tile) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    if spec.query_lengths or spec.key_lengths or spec.segments:
        return "lengths and segments are not known"
    return None


def alignment_seconds(spec: AttentionSpec) -> float:
    """What XLA takes to copy a bias and a dense mask whose rows are no whole 16 bytes, before a pass."""
    seconds = 0.0
    for x in (spec.bias, spec.mask):
        if x is not None and (shape := aligned_shape(x, spec)) != x.shape:
            seconds += _COPY_SECONDS + memory_seconds(spec.target, 2 * math.prod(shape) * x.dtype.itemsize)
    return seconds


def combine_seconds(spec: AttentionSpec, num_splits: int) -> float:
    """What the second kernel takes to combine the results of parts of the keys."""
    if num_splits == 1:
        return 0.0
    num_elements = math.prod(spec.q.shape[:3]) * spec.v.shape[3]
    return sum_seconds(spec.target, num_splits, num_elements, _COMBINE_SECONDS, _PART_SECONDS)


def sum_seconds(chip: Chip, num_parts: int, num_elements: int, kernel_seconds: float, seconds_of_part: float) -> float:
    """What a kernel takes to add up the float32 parts of a result: a constant, more for each part, and the memory."""
    moving = 2 * num_parts * num_elements * 4 / (chips.num_sms(chip) * chips.rates_of(chip).memory_bytes)
    return kernel_seconds + num_parts * seconds_of_part + moving


def memory_seconds(chip: Chip, num_bytes: float) -> float:
    """What the memory takes to move bytes, at the rate that kernels reach."""
    return num_bytes / (chips.num_sms(chip) * chips.rates_of(chip).memory_bytes * MEMORY_SHARE)


def _share(chip: Chip, rows: int, pairs: int) -> float:
    """The share of the tensor cores' rate that products of a tile reach."""
    share = 0.75 if pairs >= 128 * 64 else 0.62 if pairs >= 64 * 64 else 0.45
    if chip.is_hopper and rows < 64:
        share *= 0.5  # wgmma needs 64 rows.
    return share * min(1.0, rows / 16)


def resident(spec: AttentionSpec, work: Work, tile: Tile) -> int:
    """Programs that an SM holds at once."""
    by_smem = chips.programs_per_sm(spec.target, shared_bytes(spec, work, tile))
    threads = 32 * tile.num_warps
    count = min(255.0, registers(spec, work, tile) + 56)
    return max(1, min(by_smem, int(_REGISTERS_OF_SM // (count * threads)), 8))


def bytes_of_keys(spec: AttentionSpec) -> float:
    """Bytes of the keys and values that some query may see."""
    return bytes_of(spec.k, spec.v) * keys_in_reach(spec) / spec.k.shape[1]


def bytes_of(*arrays: Any) -> int:
    """Bytes of arrays' types."""
    return sum(array.num_bytes for array in arrays)
