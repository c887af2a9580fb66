"""Attention's tangent pass (forward mode) in Triton.

With the saved logsumexp, P = exp(S - lse) is known before the sums. With S' the tangent of the logits,

    lse' = the sum of P S'          out' = the sum of P S' V + P V'  -  lse' out

so one kernel like the forward pass's computes both sums, and XLA the last step. Queries that see no key have the mean
of the tangents of all values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.blind import mean_of_values
from jaxkernels.ops.attention.planning import forward_steps
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import may_see_nothing, queries_inside
from jaxkernels.triton import calls
from jaxkernels.triton.attention import backward, costs
from jaxkernels.triton.attention.problem import (
    Problem,
    check_tiles,
    optional,
    ranges_of_keys,
    unsupported,
    with_aligned_rows,
)

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "unsupported"]

VERSION = 2

_LABEL = "attention_tangent[triton]"


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule.

    Attributes:
      block_q: queries of a tile.
      block_kv: keys of a block.
      num_warps: warps of a program.
      num_stages: blocks of keys and values, and of their tangents, in flight.
    """

    block_q: int = 64
    block_kv: int = 32
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        check_tiles(_LABEL, block_q=self.block_q, block_kv=self.block_kv)
        calls.check_schedule(_LABEL, self.num_warps, self.num_stages)


#: (block_q, block_kv, num_warps, num_stages). Of equals, the first is taken.
_TILES = (
    (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2),
    (64, 32, 8, 1), (64, 16, 8, 1), (128, 16, 8, 2), (32, 32, 4, 2),
    (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1),
)  # fmt: skip


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Tiles that fit shared memory and registers."""
    tiles = [tile for tile in itertools.starmap(Config, _TILES) if costs.fits(spec, "tangent", tile)]
    yield from tiles or [Config(*_TILES[-1])]


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Seconds, by the cost model of `jaxkernels.triton.attention.costs` with the constants of the backward pass."""
    visits = forward_steps(spec, config.block_q, config.block_kv)
    return costs.alignment_seconds(spec) + costs.seconds(
        spec,
        "tangent",
        config,
        backward.CONSTANTS,
        programs=len(visits) * spec.q.shape[0] * spec.q.shape[2],
        visits=visits,
        num_bytes=2 * costs.bytes_of(spec.q, spec.k, spec.v, *spec.results("attention_tangent")),
    )


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns the tangents [out' (B, T, N, D), lse' (B, N, T) float32]."""
    from jaxkernels.triton.attention import tangent_kernel

    named = spec.named("attention_tangent", operands)
    p = Problem.of(spec, config.block_q, config.block_kv)
    out, dlse = spec.results("attention_tangent")
    lse = named["lse"]
    has_blind = bool(spec.query_lengths or spec.bias is not None or may_see_nothing(spec))
    is_blind = lse <= MASKED_LOGIT / 2
    if has_blind:
        lse = jnp.where(is_blind, jnp.inf, lse)
    dbias = with_aligned_rows(named["dbias"], spec) if spec.bias is not None else named["dq"]
    tangents = [named["dq"], named["dk"], named["dv"], dbias]
    weighted, lse_dot = calls.call_kernel(
        tangent_kernel.attention_tangent,
        [named["q"], named["k"], named["v"], *optional(spec, named), ranges_of_keys(spec, p, named), lse, *tangents],
        [ArrayType(out.shape, np.dtype(np.float32)), dlse],
        target=spec.target,
        grid=(p.num_blocks * spec.q.shape[0] * spec.q.shape[2],),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    rows = lambda x: jnp.swapaxes(x, 1, 2)[..., None]
    out_dot = weighted - rows(lse_dot) * named["out"].astype(jnp.float32)
    if has_blind:
        out_dot = jnp.where(rows(is_blind), mean_of_values(spec, named["dv"], named), out_dot)
    if spec.query_lengths:
        out_dot = jnp.where(queries_inside(spec, named)[:, :, None, None], out_dot, 0)
    return [out_dot.astype(out.dtype), lse_dot]
