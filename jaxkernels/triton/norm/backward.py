"""Norms' backward pass in Triton.

A few programs for each SM compute dx of their rows, and a share of the sums over rows that the gradients of scale and
bias are. A second kernel adds up the shares. The order of all additions is fixed: equal operands give equal bits.

A program that holds whole rows keeps its share in registers. Registers limit how many bytes an SM has in flight. A
program with num_stages=2 loads its next tile into registers while it computes one; `tiles_to_l2` asks for later tiles
without registers. Rows that take too many registers stay in the dtype that they have in memory, and are converted to
float32 twice: for the means, and for dx. Rows that are longer still are read in chunks. Their program adds to its share
in memory, which stays in L2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls, chips
from jaxkernels.triton.norm import problem
from jaxkernels.triton.norm.problem import ABSENT, Problem, optional, unsupported

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unpreferred", "unsupported"]

VERSION = 3

#: Rows of 16-bit numbers up to here are held whole; longer ones are read in chunks of one of these sizes.
_LONGEST, _CHUNKS = 16384, (4096, 2048)

#: The fewest features that were measured.
_FEWEST = 768

#: Rows of 16-bit numbers up to here can be held in float32, with the share.
_IN_FLOAT32 = 8192

#: Rows of 16-bit numbers over this and up to _IN_FLOAT32 have one block of columns.
_SHORT = 4096

#: (programs_per_sm, num_stages) of chunks.
_SCHEDULES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 3), (2, 3))

#: Elements of an array for each thread of a default configuration, at most: of 16-bit rows up to _SHORT, which leave
#: registers for several programs on an SM; of longer ones; and of chunks by the bytes of an element, for two programs.
_PER_THREAD, _PER_THREAD_OF_LONG, _PER_THREAD_OF_CHUNKS = 24, 32, {2: 8, 4: 16}

#: The kernel that adds up shares: the most shares that a program reads at once, and its columns.
_MOST_SHARES, _COLUMNS = 1024, 16

#: Registers of an SM.
_REGISTERS_OF_SM = 65536


@dataclasses.dataclass(frozen=True)
class Config(problem.BlocksConfig):
    """Tiles and schedule.

    Attributes:
      num_stages: 2: a program loads its next tile into registers while it computes one. With chunks, as in Triton.
      converts_twice: whether a program keeps x and dout in their dtypes, and converts them again for dx.
      tiles_to_l2: so many tiles ahead, a program asks for a tile to be read into L2; 0: none. Hopper and newer.
    """

    label = "norm_backward[triton]"

    programs_per_sm: int = 2
    converts_twice: bool = False
    tiles_to_l2: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.programs_per_sm == 0:
            raise ValueError(
                f"{self.label}: programs_per_sm must be positive; got 0. Each program writes a share of sums."
            )
        if not 0 <= self.tiles_to_l2 <= 8:
            raise ValueError(f"{self.label}: tiles_to_l2 must be from 0 to 8; got {self.tiles_to_l2}.")

    @property
    def per_thread(self) -> float:
        """Elements of an array for each thread."""
        return self.block_rows * self.columns / (32 * self.num_warps)


def unpreferred(spec: NormSpec) -> str | None:
    """Why a call with backend=None takes XLA, or None.

    On an H200 XLA takes 2.5 to 3.8 times as long, from 1,024 to 16,384 features. In a model, XLA also adds the gradient
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
        yield from problem.configs(spec, Config, problem.tiles(spec, _limit(spec, _IN_FLOAT32), _CHUNKS), _SCHEDULES)
        return
    first, rest = _blocks(spec)
    columns = first + rest
    half = _limit(spec, _IN_FLOAT32) // 2
    twice = (False,) if columns <= half else (False, True)
    for block_rows in (1, 2, 4, 8, 16, 32, 64):
        elements = block_rows * columns
        if block_rows > 1 and (rest or elements > _IN_FLOAT32 // 2 or block_rows > 2 * problem.num_rows(spec)):
            continue
        for num_warps in (1, 2, 4, 8, 16):
            per_thread = elements / (32 * num_warps)
            if not (4 <= per_thread <= 32 or (per_thread < 4 and num_warps == 1)):
                continue
            for converts_twice in twice:
                for num_stages in (1, 2):
                    one = Config(block_rows, first, num_warps, 1, num_stages, rest, converts_twice)
                    most = _resident(spec, one)
                    for programs_per_sm in dict.fromkeys((most, -(-most // 2))):
                        for tiles_to_l2 in (0, num_stages) if _can_ask_l2(spec) else (0,):
                            yield dataclasses.replace(one, programs_per_sm=programs_per_sm, tiles_to_l2=tiles_to_l2)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default."""
    if not _is_whole(spec):
        per_thread = _PER_THREAD_OF_CHUNKS[spec.x.dtype.itemsize]
        tile = problem.default_tile(spec, _limit(spec, _IN_FLOAT32), _CHUNKS, per_thread)
        usual = Config(*tile, 2, 2)
        return (usual if spec.target.is_hopper and problem.fits(spec, usual) else Config(*tile, 2, 1),)
    first, rest = _blocks(spec)
    block_rows = problem.rows_of_tile(spec, first, rest)
    elements = block_rows * (first + rest)
    # The fewest warps that give a thread few enough elements.
    per_thread = _PER_THREAD if elements <= _limit(spec, _SHORT) else _PER_THREAD_OF_LONG
    num_warps = next((n for n in (1, 2, 4, 8) if elements <= 32 * n * _limit(spec, per_thread)), 16)
    one = Config(block_rows, first, num_warps, 1, 2 if elements <= _limit(spec, _IN_FLOAT32) else 1, rest)
    if _registers(spec, one) > _most_registers(spec, one):
        one = dataclasses.replace(one, num_stages=1)
    if _registers(spec, one) > _most_registers(spec, one):
        one = dataclasses.replace(one, converts_twice=True)
    programs_per_sm = _resident(spec, one)
    # Loads ahead of so many elements keep enough bytes in flight if dsum is one of three arrays.
    num_ahead = programs_per_sm * block_rows * spec.num_features if one.num_stages == 2 else 0
    are_enough = spec.sum_gradient and num_ahead >= _limit(spec, 3 * _IN_FLOAT32 // 4)
    tiles_to_l2 = one.num_stages if _can_ask_l2(spec) and not are_enough else 0
    return (dataclasses.replace(one, programs_per_sm=programs_per_sm, tiles_to_l2=tiles_to_l2),)


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
    """Features of the first and the second block of columns; 0 if there is no second one.

    Each block has a sum over warps of its own. Between _SHORT and _IN_FLOAT32 features, a second sum takes longer than
    the empty columns of a single block.
    """
    num_features, longest = spec.num_features, _limit(spec, _IN_FLOAT32)
    if _limit(spec, _SHORT) < num_features <= longest:
        return longest, 0
    first, rest = problem.blocks(num_features)
    # A row that is too long for one block has two equal ones.
    return (first, rest) if rest or first <= longest else (first // 2, first // 2)


def _can_ask_l2(spec: NormSpec) -> bool:
    """Whether the GPU has the instruction (PTX ISA, "cp.async.bulk.prefetch"), and its sizes are multiples of 16."""
    capability = spec.target.compute_capability or (0, 0)
    return capability >= (9, 0) and spec.num_features * spec.x.dtype.itemsize % 16 == 0


def _has_wide_scale(spec: NormSpec) -> bool:
    return spec.scale is not None and spec.scale.dtype.itemsize == 4


def _most_registers(spec: NormSpec, config: Config) -> int:
    """Registers of a thread at most. For other GPUs than Hopper, ptxas takes more than `_registers` estimates."""
    return min(255 if spec.target.is_hopper else 232, _REGISTERS_OF_SM // (32 * config.num_warps))


def _registers(spec: NormSpec, config: Config) -> int:
    """Registers that a thread wants that holds whole rows, about: fitted to what ptxas says (Triton 3.7)."""
    ahead = config.num_stages > 1
    of_element = 3.95 + 0.95 * ahead + spec.sum_gradient * (1.25 + 0.15 * ahead) + spec.bias_gradient * 1.1
    if spec.x.dtype.itemsize == 4:
        of_element += ahead * (1 + 0.5 * spec.sum_gradient)
    elif config.converts_twice:
        of_element *= 0.7
    if _has_wide_scale(spec):
        of_element += 0.4
    # Masks of rows and columns, and the second block of columns.
    masks = 24 if config.block_rows > 2 else 3 if config.block_rows > 1 else 0
    wanted = 22 + masks + of_element * config.per_thread
    if config.block_rest:
        wanted += 20 if 2 * config.block_rest < config.block_features else 32 * spec.sum_gradient
    return 8 * math.ceil(wanted / 8)


def _resident(spec: NormSpec, config: Config) -> int:
    """Programs for which an SM has registers; at most 8."""
    return max(1, min(8, _REGISTERS_OF_SM // (32 * config.num_warps * min(_registers(spec, config), 255))))


#: Constants of `estimate`. The seconds from a load to its value, from memory and from L2; of a reduction over rows of a
#: tile; and of the sum of shares at least. Bytes/s of an SM whose programs wait for what they load. The share of the
#: bandwidth that a copy reaches. Instructions for an element, and the clock in Hz. All but _L2_LATENCY and
#: _SUM_OF_SHARES come from the times of version 1 on an H200 (2026-11-26). With version 3 the estimates of defaults are
#: within 10 % of the times there (2026-11-28).
_MEMORY_LATENCY, _L2_LATENCY = 0.9e-6, 0.45e-6
_REDUCTION = 0.12e-6
_SUM_OF_SHARES = 2e-6
_BYTES_OF_WAITING_SM = 50e9
_COPY_SHARE = 0.896
_INSTRUCTIONS, _CLOCK = 12, 1.98e9


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
    num_instructions = (_INSTRUCTIONS + 4 * spec.centered) * (1.6 if p.converts_twice or num_chunks > 1 else 1)
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
    turn = max(turn, num_bytes / copied)

    shares = 4 * num_sums * p.num_groups * p.num_programs * spec.num_features
    begin_and_end = 2 * _MEMORY_LATENCY
    return begin_and_end + num_turns * turn + (num_sums > 0) * _SUM_OF_SHARES + 2 * shares / (copied * num_sms)


def _problem(spec: NormSpec, config: Config) -> Problem:
    return dataclasses.replace(
        Problem.of(spec, config),
        converts_twice=config.converts_twice,
        tiles_to_l2=config.tiles_to_l2,
        loads_late=config.converts_twice and config.num_stages == 1 and _has_wide_scale(spec),
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
    return [dx, *_added(spec, p, of_scale, of_bias)]


@dataclasses.dataclass(frozen=True)
class _Shares:
    """The constants of `add_shares`: for scale and bias the groups with a sum of their own, and the shares of each.

    Shares are 0 for a gradient that is not computed.
    """

    num_features: int
    scale_groups: int
    scale_shares: int
    bias_groups: int
    bias_shares: int
    block_shares: int
    block_columns: int

    @property
    def num_sums(self) -> int:
        return (self.scale_shares > 0) + (self.bias_shares > 0)


def _added(spec: NormSpec, p: Problem, of_scale: jax.Array, of_bias: jax.Array) -> list[jax.Array]:
    """The gradients of scale and bias, as far as they are wanted, by one kernel."""
    from jaxkernels.triton.norm import backward_kernel

    names = ("scale", "bias")
    wanted = {
        name: one for name, one in zip(names, (spec.scale, spec.bias)) if getattr(spec, f"{name}_gradient") and one
    }
    if not wanted:
        return []
    groups = {name: parameter.shape[0] for name, parameter in wanted.items()}
    shares = {name: p.num_programs * p.num_groups // count for name, count in groups.items()}
    block_shares = min(_MOST_SHARES, problem.power_of_two(max(shares.values())))
    constants = _Shares(
        num_features=spec.num_features,
        scale_groups=groups.get("scale", 0),
        scale_shares=shares.get("scale", 0),
        bias_groups=groups.get("bias", 0),
        bias_shares=shares.get("bias", 0),
        block_shares=block_shares,
        block_columns=_COLUMNS,
    )
    grads = calls.call_kernel(
        backward_kernel.add_shares,
        [of_scale, of_bias],
        [wanted.get(name, ABSENT) for name in names],
        target=spec.target,
        grid=(-(-spec.num_features // _COLUMNS), max(groups.values()), len(wanted)),
        num_warps=4 if block_shares <= 256 else 8,
        num_stages=1,
        constants=dict(p=constants),
    )
    return [grad for name, grad in zip(names, grads) if name in wanted]
