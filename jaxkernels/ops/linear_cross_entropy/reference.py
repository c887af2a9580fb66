"""Linear cross entropy in plain JAX: a loop over chunks of tokens (`jaxkernels.ops.linear_cross_entropy.chunks`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.linear_cross_entropy.chunks import (
    Config,
    add_products,
    in_chunks,
    operand_of,
    product,
    rescaled,
    sizes,
    unit_of,
)
from jaxkernels.ops.linear_cross_entropy.losses import cotangents
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, FORWARD, FUSED, TANGENT, LinearCrossEntropySpec

__all__ = ["Config", "backward", "forward", "fused", "search_space", "tangent"]


def search_space(spec: LinearCrossEntropySpec) -> tuple[Config, ...]:
    """Each size of a chunk that is worth measuring; the default is first."""
    return tuple(map(Config, sizes(spec)))


def forward(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The statistics of each token."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        return sums, _Logits.of(spec, operands, chunk["x"]).statistics(spec, chunk["labels"])

    return in_chunks(spec, config, FORWARD, step, operands)


def tangent(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The tangents of the statistics for tangents of x, w and the bias."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        change = product(spec, chunk["dx"], operands["w"]) + product(spec, chunk["x"], operands["dw"])
        change = change.astype(spec.wide)
        if spec.bias is not None:
            change += operands["dbias"].astype(spec.wide)
        change = logits.chain(change)
        p = jnp.exp(logits.values - chunk["lse"][:, None])
        dots = dict(dlse=jnp.sum(p * change, axis=-1), dlabel_logit=_pick(change, chunk["labels"]))
        return sums, dots | (dict(dlogit_sum=jnp.sum(change, axis=-1)) if spec.logit_sum else {})

    return in_chunks(spec, config, TANGENT, step, operands)


def backward(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of x, w and the bias for cotangents of the statistics."""
    names = tuple(f"d{name}" for name in spec.statistics)

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        cts = {name: chunk[name] for name in names}
        return _add_gradients(spec, BACKWARD, sums, operands, chunk, logits, chunk["lse"], cts)

    return in_chunks(spec, config, BACKWARD, step, operands)


def fused(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The statistics, and the gradients of the sum of the losses times their weights, with one product of logits."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        statistics = logits.statistics(spec, chunk["labels"])
        cts = cotangents(spec, statistics["lse"], chunk["weights"], spec.vocab_size)
        sums, rows = _add_gradients(spec, FUSED, sums, operands, chunk, logits, statistics["lse"], cts)
        return sums, statistics | rows

    return in_chunks(spec, config, FUSED, step, operands)


@dataclasses.dataclass(frozen=True)
class _Logits:
    """The logits of a chunk.

    Attributes:
      values: in float32 at least.
      slope: the derivative of the soft cap; None without one.
    """

    values: Float[Array, "C V"]
    slope: Float[Array, "C V"] | None

    @classmethod
    def of(cls, spec: LinearCrossEntropySpec, operands: Mapping[str, jax.Array], x: jax.Array) -> _Logits:
        values = product(spec, x, operands["w"]).astype(spec.wide)
        if spec.bias is not None:
            values += operands["bias"].astype(spec.wide)
        if spec.soft_cap is None:
            return cls(values, None)
        tanh = jnp.tanh(values / spec.soft_cap)
        return cls(spec.soft_cap * tanh, 1 - tanh**2)

    def statistics(self, spec: LinearCrossEntropySpec, labels: jax.Array) -> dict[str, jax.Array]:
        found = dict(lse=jax.nn.logsumexp(self.values, axis=-1), label_logit=_pick(self.values, labels))
        return found | (dict(logit_sum=jnp.sum(self.values, axis=-1)) if spec.logit_sum else {})

    def chain(self, x: jax.Array) -> jax.Array:
        """Takes tangents of the logits from before the soft cap to after it, and cotangents the other way."""
        return x if self.slope is None else x * self.slope


def _pick(logits: Float[Array, "C V"], labels: jax.Array) -> Float[Array, " C"]:
    """The logit of each label; 0 for a label outside of the vocabulary."""
    is_inside = (labels >= 0) & (labels < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(is_inside, labels, 0)[:, None], axis=1, mode="promise_in_bounds")
    return jnp.where(is_inside, picked[:, 0], 0)


def _add_gradients(
    spec: LinearCrossEntropySpec,
    kernel: str,
    sums: dict[str, jax.Array],
    operands: Mapping[str, jax.Array],
    chunk: Mapping[str, jax.Array],
    logits: _Logits,
    lse: jax.Array,
    cts: Mapping[str, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns the sums (of dw and dbias) with the chunk's added, and the chunk's rows of dx."""
    unit = unit_of(spec, cts)
    column = {name: (ct if unit is None else ct / unit)[:, None] for name, ct in cts.items()}
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.values.shape, 1) == chunk["labels"][:, None]
    g = column["dlse"] * jnp.exp(logits.values - lse[:, None]) + jnp.where(is_label, column["dlabel_logit"], 0)
    g = logits.chain(g + column["dlogit_sum"] if spec.logit_sum else g)
    sums, rows = add_products(spec, kernel, sums, chunk["x"], operands["w"], g.astype(spec.x.dtype), unit)
    for name in spec.outputs(kernel):
        if operand_of(name) == "bias":
            sums[name] += rescaled(jnp.sum(g, axis=0), unit)
    return sums, rows
