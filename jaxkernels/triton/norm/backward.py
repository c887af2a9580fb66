"""Norms' backward pass in Triton.

A few programs for each SM compute dx of their rows, and a share of the sums over rows that the gradients of scale and
bias are. XLA adds up the shares in a second pass. The order of all additions is fixed: equal operands give equal bits.

A program that holds whole rows keeps its share in registers. Registers limit how many bytes an SM has in flight. A
program with num_stages=2 loads its next tile into registers while it computes one; `tiles_to_l2` asks for later tiles
without registers. Rows that take too many registers are read twice: for the means, and from the cache for dx. Rows that
are longer still are read in chunks. Their program adds to its share in memory, which stays in L2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls, chips
from jaxkernels.triton.norm import problem
from jaxkernels.triton.norm.problem import ABSENT, Problem, optional, unsupported

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unpreferred", "unsupported"]

VERSION = 2

#: Rows of 16-bit numbers up to here are held whole; longer ones are read in chunks of one of these sizes.
_LONGEST, _CHUNKS = 16384, (4096, 2048)

#: The fewest features that were measured.
_FEWEST = 768

#: Rows of 16-bit numbers up to here are read once. With longer ones, registers have no room for x, dout and the share.
_READ_ONCE = 8192

#: Rows up to here have one block of columns: the next power of two.
_ONE_BLOCK = 1024

#: (programs_per_sm, num_stages) of chunks.
_SCHEDULES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 3), (2, 3))

#: Elements of a tile that a default configuration has at least, if there are enough rows.
_SMALL_TILE = 2048

#: Elements of an array for each thread of a default configuration, by the bytes of an element: whole rows, and chunks.
#: Sixteen in whole rows take at most 128 registers, with loads ahead and one of dsum and dbias (ptxas of Triton 3.6 and
#: 3.9). Of chunks, an SM has registers for two programs.
_PER_THREAD, _PER_THREAD_OF_CHUNKS = {2: 16, 4: 8}, {2: 8, 4: 16}

#: Registers of an SM, and those of a thread with which a default configuration loads ahead: 16 warps get no more.
_REGISTERS_OF_SM, _MOST_AHEAD = 65536, 128


@dataclasses.dataclass(frozen=True)
class Config(problem.Config):
    """Tiles and schedule.

    Attributes:
      num_stages: 2: a program loads its next tile into registers while it computes one. With chunks, as in Triton.
      block_rest: features of the second block of columns, for whole rows that fill the first one; or 0. A tile with
        two blocks has one row.
      reads_twice: whether a program loads x and dout again for dx, in place of keeping them in registers.
      tiles_to_l2: so many tiles ahead, a program asks for a tile to be read into L2; 0: none. Hopper and newer.
    """

    label = "norm_backward[triton]"

    programs_per_sm: int = 2
    block_rest: int = 0
    reads_twice: bool = False
    tiles_to_l2: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.programs_per_sm == 0:
            raise ValueError(
                f"{self.label}: programs_per_sm must be positive; got 0. Each program writes a share of sums."
            )
        if self.block_rest < 0 or self.block_rest & (self.block_rest - 1):
            raise ValueError(f"{self.label}: block_rest must be 0 or a power of two; got {self.block_rest}.")
        if self.block_rest and self.block_rows > 1:
            raise ValueError(
                f"{self.label}: a tile with a second block of columns must have one row; got {self.block_rows} rows "
                f"and block_rest={self.block_rest}."
            )
        if not 0 <= self.tiles_to_l2 <= 8:
            raise ValueError(f"{self.label}: tiles_to_l2 must be from 0 to 8; got {self.tiles_to_l2}.")

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.block_features + self.block_rest

    @property
    def per_thread(self) -> float:
        """Elements of an array for each thread."""
        return self.block_rows * self.columns / (32 * self.num_warps)


def unpreferred(spec: NormSpec) -> str | None:
    """Why a call with backend=None takes XLA, or None.

    On an H200 XLA takes 2.2 to 3.3 times as long, from 1,024 to 16,384 features. In a model, XLA also adds the gradient
    of the stream in the same pass. The kernel does that if the norm returned the stream.
    """
    if not spec.target.is_hopper:
        return f"was not measured on {spec.target.name}"
    if not _FEWEST <= spec.num_features <= _LONGEST:
        return f"was measured with {_FEWEST:,} to {_LONGEST:,} features only"
    if not (spec.sum_gradient or spec.returns_x):
        return "may have no cotangent of a sum to add, and XLA fuses the gradient's sum"
    return None


def search_space(spec: NormSpec) -> Iterator[Config]:
    """Whole rows: each tile with as many programs for an SM as its registers have room for, and with half of them."""
    if not _is_whole(spec):
        yield from problem.configs(spec, Config, problem.tiles(spec, _limit(spec, _READ_ONCE), _CHUNKS), _SCHEDULES)
        return
    first, rest = _blocks(spec)
    columns = first + rest
    half, limit = _limit(spec, _READ_ONCE) // 2, _limit(spec, _READ_ONCE)
    twice = (False,) if columns <= half else (False, True) if columns <= limit else (True,)
    for block_rows in (1, 2, 4, 8, 16, 32, 64):
        elements = block_rows * columns
        if block_rows > 1 and (rest or elements > _READ_ONCE // 2 or block_rows > 2 * _num_rows(spec)):
            continue
        for num_warps in (1, 2, 4, 8, 16):
            per_thread = elements / (32 * num_warps)
            if not (4 <= per_thread <= 32 or (per_thread < 4 and num_warps == 1)):
                continue
            for reads_twice in twice:
                for num_stages in (1, 2):
                    one = Config(block_rows, first, num_warps, 1, num_stages, rest, reads_twice)
                    most = _resident(spec, one)
                    for programs_per_sm in dict.fromkeys((most, -(-most // 2))):
                        for tiles_to_l2 in (0, num_stages) if _can_ask_l2(spec) else (0,):
                            yield dataclasses.replace(one, programs_per_sm=programs_per_sm, tiles_to_l2=tiles_to_l2)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default."""
    if not _is_whole(spec):
        per_thread = _PER_THREAD_OF_CHUNKS[spec.x.dtype.itemsize]
        tile = problem.default_tile(spec, _limit(spec, _READ_ONCE), _CHUNKS, per_thread)
        usual = Config(*tile, 2, 2)
        return (usual if spec.target.is_hopper and problem.fits(spec, usual) else Config(*tile, 2, 1),)
    first, rest = _blocks(spec)
    # As few rows as make a tile of _SMALL_TILE elements, then the fewest warps that give a thread few enough.
    block_rows = 1
    while not rest and block_rows * first < _SMALL_TILE and block_rows < min(64, _num_rows(spec)):
        block_rows *= 2
    elements = block_rows * (first + rest)
    num_warps = next((n for n in (1, 2, 4, 8) if elements <= 32 * n * _PER_THREAD[spec.x.dtype.itemsize]), 16)
    reads_twice = first + rest > _limit(spec, _READ_ONCE)
    # Loads ahead of about 8192 elements keep enough bytes in flight. If there are fewer, L2 is asked for tiles.
    one = Config(block_rows, first, num_warps, 1, 2, rest, reads_twice)
    if reads_twice or _registers(spec, one) > _MOST_AHEAD or (spec.sum_gradient and spec.bias_gradient):
        one = dataclasses.replace(one, num_stages=1)
    programs_per_sm = _resident(spec, one)
    are_enough = one.num_stages == 2 and programs_per_sm * elements >= _READ_ONCE * 3 // 4
    tiles_to_l2 = one.num_stages if _can_ask_l2(spec) and not are_enough else 0
    return (dataclasses.replace(one, programs_per_sm=programs_per_sm, tiles_to_l2=tiles_to_l2),)


def _num_rows(spec: NormSpec) -> int:
    return math.prod(spec.x.shape[:-1])


def _limit(spec: NormSpec, features: int) -> int:
    """A limit in features of 16-bit numbers, for numbers of the spec's size."""
    return 2 * features // spec.x.dtype.itemsize


def _is_whole(spec: NormSpec) -> bool:
    """Whether the search space holds whole rows. Shares of both scale and bias take the registers of longer rows."""
    num_features = spec.num_features
    if num_features > 3 * _LONGEST // 4 and spec.scale_gradient and spec.bias_gradient:
        return False
    return num_features <= _limit(spec, _LONGEST)


def _blocks(spec: NormSpec) -> tuple[int, int]:
    """Features of the first and the second block of columns: the largest power of two, and the rest."""
    whole = 1 << (spec.num_features - 1).bit_length()
    if spec.num_features <= _ONE_BLOCK:
        return whole, 0
    rest = 1 << (spec.num_features - whole // 2 - 1).bit_length()
    # Two blocks of the same size take fewer registers where a row is read twice: one after the other.
    return (whole // 2, rest) if rest < whole // 2 or whole > _limit(spec, _READ_ONCE) else (whole, 0)


def _can_ask_l2(spec: NormSpec) -> bool:
    """Whether the GPU has the instruction (PTX ISA, "cp.async.bulk.prefetch"), and its sizes are multiples of 16."""
    capability = spec.target.compute_capability or (0, 0)
    return capability >= (9, 0) and spec.num_features * spec.x.dtype.itemsize % 16 == 0


def _registers(spec: NormSpec, config: Config) -> int:
    """Registers that a thread wants that holds whole rows, about: fitted to what ptxas says (Triton 3.6 and 3.9)."""
    ahead = config.num_stages > 1
    of_element = 3.95 + 0.95 * ahead + (spec.sum_gradient + spec.bias_gradient) * (1.25 + 0.15 * ahead)
    if spec.x.dtype.itemsize == 4:
        of_element += ahead * (1 + 0.5 * spec.sum_gradient)
    if spec.scale is not None and spec.scale.dtype.itemsize == 4:
        of_element += 0.4
    if config.reads_twice:
        of_element *= 0.7
    # Masks of rows and columns.
    masks = 24 if config.block_rows > 2 else 3 if config.block_rows > 1 else 0
    wanted = 22 + masks + of_element * config.per_thread
    return 8 * math.ceil(wanted / 8)


def _resident(spec: NormSpec, config: Config) -> int:
    """Programs for which an SM has registers; at most 8."""
    return max(1, min(8, _REGISTERS_OF_SM // (32 * config.num_warps * min(_registers(spec, config), 255))))


#: Constants of `estimate`. The seconds from a load to its value, from memory and from L2; of a reduction over rows of a
#: tile; and of XLA's sum of shares at least. Bytes/s of an SM whose programs wait for what they load, and the share of
#: the bandwidth that a copy reaches. Instructions for an element, and the clock in Hz. All but _L2_LATENCY and
#: _SUM_OF_SHARES come from the times of version 1 on an H200 (2026-11-26).
_MEMORY_LATENCY, _L2_LATENCY = 0.9e-6, 0.45e-6
_REDUCTION = 0.12e-6
_SUM_OF_SHARES = 3e-6
_BYTES_OF_WAITING_SM = 50e9
_COPY_SHARE = 0.896
_INSTRUCTIONS, _CLOCK = 12, 1.98e9

#: The time of a memory-bound loop over the time of a copy of its bytes.
_OVER_COPY = 1.08


def estimate(spec: NormSpec, config: Config) -> float:
    """Seconds: the programs of an SM take turns. A turn is one tile of each of them."""
    p = _problem(spec, config)
    num_sms, rates = chips.num_sms(spec.target), chips.rates_of(spec.target)
    copied = _COPY_SHARE * rates.memory_bytes
    num_sums = spec.scale_gradient + spec.bias_gradient
    of_sm = -(-p.num_programs * p.num_groups // num_sms)
    resident = min(of_sm, _resident(spec, config)) if p.is_whole else of_sm
    num_turns = -(-of_sm // resident) * -(-p.num_tiles // p.num_programs)

    array = resident * p.block_rows * spec.num_features * spec.x.dtype.itemsize
    num_bytes = (3 + spec.sum_gradient) * array
    num_chunks = 1 if p.is_whole else -(-p.num_features // p.block_features)
    num_instructions = (_INSTRUCTIONS + 2 * spec.centered) * (1.6 if p.reads_twice or num_chunks > 1 else 1)
    # While one program computes, others wait for loads.
    compute = p.block_rows * config.columns * num_chunks * num_instructions / (128 * _CLOCK)
    compute += _REDUCTION * (1 + spec.centered) * (1 + (p.block_rest > 0)) / resident
    if not p.is_whole:  # Each chunk waits for memory, for L2, and for the shares in L2.
        latency = num_chunks * (_MEMORY_LATENCY + (1 + num_sums + spec.sum_gradient) * _L2_LATENCY)
        shares = 8 * num_sums * resident * spec.num_features
        turn = latency + num_bytes / _BYTES_OF_WAITING_SM + (2 * array + shares) / rates.l2_bytes + compute
    elif p.loads_ahead:
        turn = max(_L2_LATENCY if p.tiles_to_l2 else _MEMORY_LATENCY, resident * compute)
    elif p.tiles_to_l2:
        turn = _L2_LATENCY + num_bytes / rates.l2_bytes + compute
    else:
        turn = _MEMORY_LATENCY + num_bytes / _BYTES_OF_WAITING_SM + compute
    if p.reads_twice:
        turn += _L2_LATENCY + 2 * array / rates.l2_bytes
    turn = max(turn, _OVER_COPY * num_bytes / copied)

    shares = 4 * num_sums * p.num_groups * p.num_programs * spec.num_features
    begin_and_end = 2 * _MEMORY_LATENCY
    return begin_and_end + num_turns * turn + num_sums * _SUM_OF_SHARES + 2 * shares / (copied * num_sms)


def _problem(spec: NormSpec, config: Config) -> Problem:
    return dataclasses.replace(
        Problem.of(spec, config),
        block_rest=config.block_rest,
        reads_twice=config.reads_twice,
        tiles_to_l2=config.tiles_to_l2,
    )


def run(spec: NormSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dx] (and dscale, dbias)."""
    from jaxkernels.triton.norm import backward_kernel

    named = spec.named("norm_backward", operands)
    p = _problem(spec, config)
    shares = ArrayType((p.num_groups, p.num_programs, p.num_features), np.dtype(np.float32))
    dx, of_scale, of_bias = calls.call_kernel(
        backward_kernel.norm_backward,
        optional(named, "x", "scale", "mean", "rstd", "dout", "dsum"),
        [spec.x, shares if spec.scale_gradient else ABSENT, shares if spec.bias_gradient else ABSENT],
        target=spec.target,
        grid=p.grid,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    grads = [dx]
    for shares, parameter, is_wanted in (
        (of_scale, spec.scale, spec.scale_gradient),
        (of_bias, spec.bias, spec.bias_gradient),
    ):
        if is_wanted:
            assert parameter is not None
            axes = (0, 1) if parameter.shape[0] == 1 else (1,)
            grads.append(jnp.sum(shares, axis=axes).reshape(parameter.shape).astype(parameter.dtype))
    return grads
