"""What the Triton kernels of norms share: limits, tiles, and the constants of a kernel.

A program computes tiles of `block_rows` rows, every num_programs-th one. It holds whole rows, or where a row is longer
than `block_features` it reads the row in chunks: once for each sum, which must be known before the next step, and
once for the result. After the first time, chunks come from L2.

The kernels are bound by memory: the least time is the bytes of operands and results over the bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import numpy as np

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls, chips

__all__ = [
    "ABSENT",
    "SCHEDULES",
    "BlocksConfig",
    "Config",
    "Problem",
    "blocks",
    "configs",
    "default_tile",
    "fits",
    "num_rows",
    "optional",
    "power_of_two",
    "rows_of_tile",
    "tiles",
    "unsupported",
]

_DTYPES = tuple(np.dtype(dtype) for dtype in (jax.numpy.bfloat16, np.float16, np.float32))

#: A grid has at most so many programs along its second axis (CUDA C++ Programming Guide, "Compute Capabilities").
_MOST_GROUPS = 65535

#: (programs_per_sm, num_stages) of passes without sums over rows: the default first.
SCHEDULES = ((0, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 3), (2, 3))

#: Elements of a tile that a default configuration has at least, if there are enough rows.
_SMALL_TILE = 4096

#: The same of whole rows in passes that may have two blocks of columns. Rows up to _ONE_BLOCK features have one block.
_SMALL_TILE_OF_BLOCKS, _ONE_BLOCK = 2048, 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule.

    Attributes:
      block_rows: rows of a tile.
      block_features: features of a chunk. Rows that are not longer are read once.
      num_warps: warps of a program.
      programs_per_sm: programs for each SM, which compute several tiles each; 0: a program for each tile.
      num_stages: tiles in flight: a program loads the next ones while it computes one.
    """

    #: What messages begin with, as "norm_forward[triton]".
    label: ClassVar[str] = "norm[triton]"

    block_rows: int = 1
    block_features: int = 4096
    num_warps: int = 8
    programs_per_sm: int = 0
    num_stages: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError unless Triton takes the configuration."""
        check_fields(self.label, self)
        for name in ("block_rows", "block_features"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{self.label}: {name} must be a power of two; got {size}.")
        calls.check_schedule(self.label, self.num_warps, self.num_stages)
        if self.programs_per_sm < 0:
            raise ValueError(f"{self.label}: programs_per_sm must not be negative; got {self.programs_per_sm}.")

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.block_features


@dataclasses.dataclass(frozen=True)
class BlocksConfig(Config):
    """Tiles and schedule of a pass whose whole rows may have two blocks of columns.

    Attributes:
      block_rest: features of the second block of columns, for whole rows that fill the first one; or 0. A tile with
        two blocks has one row.
    """

    block_rest: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_rest < 0 or self.block_rest & (self.block_rest - 1):
            raise ValueError(f"{self.label}: block_rest must be 0 or a power of two; got {self.block_rest}.")
        if self.block_rest and self.block_rows > 1:
            raise ValueError(
                f"{self.label}: a tile with a second block of columns must have one row; got {self.block_rows} rows "
                f"and block_rest={self.block_rest}."
            )

    @property
    def columns(self) -> int:
        return self.block_features + self.block_rest


@dataclasses.dataclass(frozen=True)
class Problem:
    """The constants of a kernel.

    Attributes:
      num_groups: groups with a scale or a bias of their own; 1 if all rows share both.
      num_rows: rows of a group.
      num_features: F.
      block_rows, block_features: of a tile, powers of two.
      num_programs: programs of a group.
      num_stages: tiles in flight.
      centered, eps, scale_offset, residual, sum_gradient: as in `NormSpec`.
      scale, bias: whether they are given.
      scale_per_group, bias_per_group: whether each group has its own.
      scale_gradient, bias_gradient: as in `NormSpec`.
      block_rest: as in `BlocksConfig`.
      converts_twice, tiles_to_l2: as in the backward pass's `Config`.
      loads_late: whether a program loads dsum after the means.
    """

    num_groups: int
    num_rows: int
    num_features: int
    block_rows: int
    block_features: int
    num_programs: int
    num_stages: int
    centered: bool
    eps: float
    scale_offset: float
    residual: bool
    sum_gradient: bool
    scale: bool
    bias: bool
    scale_per_group: bool
    bias_per_group: bool
    scale_gradient: bool
    bias_gradient: bool
    block_rest: int = 0
    converts_twice: bool = False
    tiles_to_l2: int = 0
    loads_late: bool = False

    @classmethod
    def of(cls, spec: NormSpec, config: Config) -> Problem:
        per_group = lambda parameter: parameter is not None and parameter.shape[0] > 1
        num_groups = spec.x.shape[0] if per_group(spec.scale) or per_group(spec.bias) else 1
        rows = num_rows(spec) // num_groups
        num_programs = num_tiles = -(-rows // config.block_rows)
        if config.programs_per_sm:
            for_each_group = -(-config.programs_per_sm * chips.num_sms(spec.target) // num_groups)
            num_programs = min(num_tiles, for_each_group)
        return cls(
            num_groups=num_groups,
            num_rows=rows,
            num_features=spec.num_features,
            block_rows=config.block_rows,
            block_features=config.block_features,
            num_programs=num_programs,
            num_stages=config.num_stages,
            centered=spec.centered,
            eps=spec.eps,
            scale_offset=spec.scale_offset,
            residual=spec.residual,
            sum_gradient=spec.sum_gradient,
            scale=spec.scale is not None,
            bias=spec.bias is not None,
            scale_per_group=per_group(spec.scale),
            bias_per_group=per_group(spec.bias),
            scale_gradient=spec.scale_gradient,
            bias_gradient=spec.bias_gradient,
            block_rest=config.columns - config.block_features,
        )

    @property
    def num_tiles(self) -> int:
        """Tiles of a group."""
        return -(-self.num_rows // self.block_rows)

    @property
    def is_whole(self) -> bool:
        """Whether a tile has whole rows."""
        return self.num_features <= self.block_features + self.block_rest

    @property
    def loads_ahead(self) -> bool:
        """Whether a program loads the next tile while it computes one."""
        return self.num_stages > 1

    @property
    def grid(self) -> tuple[int, int]:
        return self.num_programs, self.num_groups


def unsupported(spec: NormSpec) -> str | None:
    """Why no Triton kernel can compute a pass of this norm, or None."""
    if reason := calls.unsupported_chip(spec.target):
        return reason
    for name, array in dict(x=spec.x, scale=spec.scale, bias=spec.bias).items():
        if array is not None and array.dtype not in _DTYPES:
            return f"takes bfloat16, float16 or float32, {name} is {array.dtype}"
    if not all(isinstance(size, int) for size in spec.x.shape):
        return "needs static shapes"
    if 0 in spec.x.shape:
        return "has no work in an empty array"
    if spec.x.shape[0] > _MOST_GROUPS and Problem.of(spec, Config(1, 1, 1)).num_groups > 1:
        return f"takes at most {_MOST_GROUPS} groups with a scale or bias of their own, got {spec.x.shape[0]}"
    if num_rows(spec) >= 2**31:
        return f"counts rows in 32 bits, x has {num_rows(spec)}"
    return calls.missing()


def num_rows(spec: NormSpec) -> int:
    """Rows of all groups."""
    return math.prod(spec.x.shape[:-1])


def tiles(spec: NormSpec, longest: int, chunks: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(block_rows, block_features, num_warps) worth measuring. Each thread has 4 to 64 elements of an array.

    Args:
      longest: the longest rows that are held whole.
      chunks: block_features of longer rows.
    """
    whole = power_of_two(spec.num_features)
    for block_features in (whole,) if whole <= longest else chunks:
        for block_rows in (1, 2, 4, 8, 16, 32, 64):
            elements = block_rows * block_features
            if block_rows > 1 and (elements > longest or block_rows > 2 * num_rows(spec)):
                continue
            for num_warps in (1, 2, 4, 8, 16):
                per_thread = elements / (32 * num_warps)
                if 4 <= per_thread <= 64 or (per_thread < 4 and num_warps == 1):
                    yield block_rows, block_features, num_warps


def fits(spec: NormSpec, config: Config) -> bool:
    """Whether the tiles in flight have room in shared memory: x and up to two arrays of its type."""
    tile = config.block_rows * config.columns * spec.x.dtype.itemsize
    return config.num_stages == 1 or 3 * config.num_stages * tile <= chips.smem_bytes(spec.target)


def configs[C: Config](
    spec: NormSpec,
    config: type[C],
    sizes: Iterable[tuple[int, int, int]],
    schedules: Sequence[tuple[int, int]],
    **others: int,
) -> Iterator[C]:
    """A design's configurations with these sizes (`tiles`), schedules and other fields, as far as they fit."""
    for tile in sizes:
        every = (config(*tile, *schedule, **others) for schedule in schedules)
        yield from (one for one in every if fits(spec, one))


def default_tile(spec: NormSpec, longest: int, chunks: tuple[int, ...], per_thread: int) -> tuple[int, int, int]:
    """The member of `tiles` that a norm gets which was not measured.

    Args:
      per_thread: elements of an array that a thread should have.
    """
    found = list(tiles(spec, longest, chunks))
    # The first chunk; as few rows as make a tile of _SMALL_TILE elements; then the nearest number of warps.
    chunk = found[0][1]
    size = lambda tile: tile[0] * tile[1]
    enough = min(_SMALL_TILE, max(size(tile) for tile in found if tile[1] == chunk))
    ranks = lambda tile: (
        tile[1] != chunk,
        size(tile) < enough,
        size(tile),
        abs(math.log2(size(tile) / (32 * tile[2] * per_thread))),
    )
    return min(found, key=ranks)


def blocks(num_features: int) -> tuple[int, int]:
    """Features of both blocks of columns: the next power of two and 0, or half of it and the rest."""
    whole = power_of_two(num_features)
    rest = power_of_two(max(1, num_features - whole // 2))
    return (whole, 0) if num_features <= _ONE_BLOCK or rest == whole // 2 else (whole // 2, rest)


def rows_of_tile(spec: NormSpec, first: int, rest: int) -> int:
    """Rows of a default tile with these blocks: as few as make a tile large enough, or one with two blocks."""
    block_rows = 1
    while not rest and block_rows * first < _SMALL_TILE_OF_BLOCKS and block_rows < min(64, num_rows(spec)):
        block_rows *= 2
    return block_rows


def power_of_two(size: int) -> int:
    """The least one that is not below the size."""
    return 1 << (size - 1).bit_length()


def optional(named: Mapping[str, jax.Array], *names: str) -> list[jax.Array]:
    """Operands as kernels take them. For those not given stands x, which is not read as such."""
    return [named.get(name, named["x"]) for name in names]


#: Takes the place of a result that a norm does not have. It is not written.
ABSENT = ArrayType((1,), np.dtype(np.float32))
