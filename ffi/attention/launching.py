"""What the launches of the attention kernels have in common: operands, tensor maps, parameters, compilation."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.ffi import compiler, custom_call, wgmma
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import is_known_at_run_time, may_see_nothing

__all__ = [
    "ATOM",
    "ELEMENTS",
    "LOG2E",
    "STAGING_BYTES",
    "WARPGROUP",
    "Arrays",
    "compile_kernel",
    "factors",
    "not_estimated",
    "padded",
    "query_offset",
    "reach",
    "rows_of_a_head",
    "struct",
    "whole_blocks",
    "whole_units",
    "whole_units_of",
]

#: What the kernels call a dtype.
ELEMENTS = {jnp.dtype(jnp.bfloat16): "BFloat16", jnp.dtype(jnp.float16): "Float16"}
LOG2E = 1.4426950408889634

# As in the kernels: threads, elements of 16 bits across a swizzle span of 128 bytes, and a warp's staging buffer.
WARPGROUP = 128
ATOM = 64
STAGING_BYTES = 16 * 128
#: Rows that are TMA operands are whole units of so many elements.
_UNIT = 8
#: No position is so large.
_FAR = 2**29


def padded(size: int) -> int:
    """A head dimension as the kernels compute with it: whole steps of wgmma."""
    return size + -size % 16


def not_estimated(spec: AttentionSpec) -> str | None:
    """Which part of a pass's time the cost models leave out, or None."""
    if is_known_at_run_time(spec):
        return "lengths or segments decide at run time how long items take"
    if spec.q.shape[3] % _UNIT or spec.v.shape[3] % _UNIT:
        return "XLA pads the head dimensions"
    return "another kernel adds up values for queries that see no key" if may_see_nothing(spec) else None


def factors(spec: AttentionSpec) -> tuple[float, float]:
    """What kernels multiply a product q k by, and the soft cap in base 2. Without a soft cap, the first gives logits in
    base 2; with one, logits over the cap.
    """
    if spec.soft_cap is None:
        return float(spec.scale * LOG2E), 0.0
    return float(spec.scale / spec.soft_cap), float(spec.soft_cap * LOG2E)


def reach(side: int | None) -> int:
    """A side of the band as kernels take it. An open side, which they do not read, is 0."""
    return 0 if side is None else min(side, _FAR)


class Arrays:
    """The operands of a launch, in order.

    Attributes:
      operands: the arrays.
    """

    def __init__(self, *operands: jax.Array, absent: int) -> None:
        """`absent`: the number of the operand that stands for those that are not given. It is not read as such."""
        self.operands = list(operands)
        self._absent = absent

    def add(self, x: jax.Array | None) -> int:
        """Adds an operand, if it is given; returns its number."""
        if x is None:
            return self._absent
        self.operands.append(x)
        return len(self.operands) - 1


def query_offset(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> jax.Array | None:
    """The position of the first query as kernels take it, or None."""
    return named["query_offset"].reshape(1) if spec.query_offset else None


def whole_blocks(ids: jax.Array | None, block: int) -> jax.Array | None:
    """Pads rows of segment ids to whole blocks, if they are given."""
    return None if ids is None else jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)))


def whole_units_of(size: int) -> int:
    """A head dimension as the kernels' operands have it: whole units of 16 bytes."""
    return size + -size % _UNIT


def whole_units(x: jax.Array) -> jax.Array:
    """Pads the last dimension to whole units of 16 bytes; usually there is nothing to do."""
    missing = whole_units_of(x.shape[3]) - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def rows_of_a_head(buffer: int, x: Any, rows: int, columns: int = ATOM) -> custom_call.TensorMap:
    """Copies `rows` neighbours along the sequence, of one head, one swizzle span of `columns` elements across."""
    batch, length, num_heads, size = x.shape
    row_bytes = size * x.dtype.itemsize
    return custom_call.TensorMap(
        buffer,
        box=(1, 1, rows, columns),
        shape=(batch, num_heads, length, size),
        strides=(length * num_heads * row_bytes, row_bytes, num_heads * row_bytes),
        swizzle="128B",
    )


def struct(*fields: int | float) -> np.generic:
    """A struct of 32-bit numbers as a kernel parameter."""
    words = [np.float32(x).view(np.int32) if isinstance(x, float) else x for x in fields]
    return np.array(words, np.int32).view(f"V{4 * len(words)}")[0]


@functools.lru_cache(maxsize=512)
def compile_kernel(name: str, columns: frozenset[int], /, **choices: Any) -> compiler.CompiledKernel:
    """Compiles `name`.cu with each choice as a macro, and the wgmma instructions of so many columns."""
    return compiler.compile_kernel(
        (importlib.resources.files("jaxkernels.ffi.attention") / f"{name}.cu").read_text(),
        f"jaxkernels::attention_{name}",
        filename=f"{name}.cu",
        headers={wgmma.NAME: wgmma.instructions(choices["element"], *sorted(columns))},
        defines={f"JK_{choice.upper()}": value for choice, value in choices.items()},
        strict=True,
    )
