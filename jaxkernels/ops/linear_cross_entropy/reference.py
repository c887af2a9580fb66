"""Linear cross entropy in plain JAX: a loop over chunks of tokens, so that memory holds the logits of one chunk.

A step of the loop computes the logits of its chunk, with one product, and what the kernel wants of them. The gradients
need two more products: dx = g w^T and dw += x^T g, where g is the cotangent of the logits, rounded to x's dtype. dw is
accumulated over the chunks in float32. All chunks have one size: the last is filled up with tokens of weight 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.core.arguments import check_fields, check_rules
from jaxkernels.ops.linear_cross_entropy.losses import cotangents
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, FORWARD, FUSED, TANGENT, LinearCrossEntropySpec

__all__ = ["Config", "backward", "forward", "fused", "search_space", "tangent"]

#: The logits of a chunk take at most so many bytes by default. Every chunk reads and writes all of dw in float32, in
#: about 8 / (6 * chunk) bytes for each FLOP of its products. On an H200 that is predicted to be 5 % of their time with
#: 4,096 tokens, which a vocabulary of 128,256 leaves in a chunk of bfloat16 logits.
_MAX_CHUNK_BYTES = 2**30

#: The sizes of chunks are multiples of it: tiles of products are then full.
_STEP = 128

#: The operands that all tokens have in common.
_WEIGHTS = ("w", "bias")

#: |g| is at most this in float16, so that it neither overflows nor loses what is small.
_FLOAT16_LIMIT = 2.0**15


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a step.

    Attributes:
      chunk: tokens in a chunk, at most.
    """

    chunk: int = 4096

    def __post_init__(self) -> None:
        check_fields("linear_cross_entropy[xla]", self)
        check_rules("linear_cross_entropy[xla]", self, {"chunk must be at least 1": self.chunk < 1})


def search_space(spec: LinearCrossEntropySpec) -> tuple[Config, ...]:
    """The default is first: the largest chunk of at most `_MAX_CHUNK_BYTES`. Each number of chunks is tried once."""
    if not all(isinstance(size, int) for size in (spec.num_tokens, spec.vocab_size)):
        return (Config(),)
    row_bytes = max(spec.vocab_size * spec.logits_dtype.itemsize, 1)
    default = max(_MAX_CHUNK_BYTES // row_bytes // _STEP * _STEP, _STEP)
    by_number: dict[int, Config] = {}
    for chunk in (default, 1024, 2048, 4096, 8192, 16384):
        by_number.setdefault(math.ceil(spec.num_tokens / chunk), Config(chunk))
    return tuple(by_number.values())


def forward(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The statistics of each token."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        return sums, _Logits.of(spec, operands, chunk["x"]).statistics(spec, chunk["labels"])

    return _in_chunks(spec, config, FORWARD, step, operands)


def tangent(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The tangents of the statistics for tangents of x, w and the bias."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        change = _product(spec, chunk["dx"], operands["w"]) + _product(spec, chunk["x"], operands["dw"])
        change = change.astype(spec.wide)
        if spec.bias is not None:
            change += operands["dbias"].astype(spec.wide)
        change = logits.chain(change)
        p = jnp.exp(logits.values - chunk["lse"][:, None])
        dots = dict(dlse=jnp.sum(p * change, axis=-1), dlabel_logit=_pick(change, chunk["labels"]))
        return sums, dots | (dict(dlogit_sum=jnp.sum(change, axis=-1)) if spec.logit_sum else {})

    return _in_chunks(spec, config, TANGENT, step, operands)


def backward(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of x, w and the bias for cotangents of the statistics."""
    names = tuple(f"d{name}" for name in spec.statistics)

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        cts = {name: chunk[name] for name in names}
        return _add_gradients(spec, BACKWARD, sums, operands, chunk, logits, chunk["lse"], cts)

    return _in_chunks(spec, config, BACKWARD, step, operands)


def fused(spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The statistics, and the gradients of the sum of the losses times their weights, with one product of logits."""

    def step(sums: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
        logits = _Logits.of(spec, operands, chunk["x"])
        statistics = logits.statistics(spec, chunk["labels"])
        cts = cotangents(spec, statistics["lse"], chunk["weights"], spec.vocab_size)
        sums, rows = _add_gradients(spec, FUSED, sums, operands, chunk, logits, statistics["lse"], cts)
        return sums, statistics | rows

    return _in_chunks(spec, config, FUSED, step, operands)


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
        values = _product(spec, x, operands["w"]).astype(spec.wide)
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


def _product(spec: LinearCrossEntropySpec, x: jax.Array, w: jax.Array) -> Float[Array, "C V"]:
    contracted = ((1,), (1 - spec.vocab_axis,))
    return jax.lax.dot_general(
        x, w, (contracted, ((), ())), precision=spec.precision, preferred_element_type=spec.logits_dtype
    )


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
    x, w = chunk["x"], operands["w"]
    unit = None
    if x.dtype == jnp.float16:
        # g is in units of a 2^-15th of its largest possible value: sums over few tokens are not lost below 2^-24.
        bound = jnp.max(sum(jnp.abs(ct) for ct in cts.values()), initial=0)
        unit = jnp.where(bound > 0, bound, 1) / _FLOAT16_LIMIT
        cts = {name: ct / unit for name, ct in cts.items()}
    column = {name: ct[:, None] for name, ct in cts.items()}
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.values.shape, 1) == chunk["labels"][:, None]
    g = column["dlse"] * jnp.exp(logits.values - lse[:, None]) + jnp.where(is_label, column["dlabel_logit"], 0)
    g = logits.chain(g + column["dlogit_sum"] if spec.logit_sum else g)
    rescaled = lambda out: out if unit is None else out * unit
    rounded = g.astype(x.dtype)
    dot = lambda lhs, rhs, contracted: rescaled(
        jax.lax.dot_general(
            lhs, rhs, (contracted, ((), ())), precision=spec.precision, preferred_element_type=spec.wide
        )
    )
    rows, sums = {}, dict(sums)
    names = {_operand_of(name): name for name in spec.outputs(kernel)}
    if "x" in names:
        rows[names["x"]] = dot(rounded, w, ((1,), (spec.vocab_axis,))).astype(spec.arrays()[names["x"]].type.dtype)
    if "w" in names:
        sums[names["w"]] += dot(*((rounded, x) if spec.vocab_axis == 0 else (x, rounded)), ((0,), (0,)))
    if "bias" in names:
        sums[names["bias"]] += rescaled(jnp.sum(g, axis=0))
    return sums, rows


def _in_chunks(
    spec: LinearCrossEntropySpec,
    config: Config,
    kernel: str,
    step: Callable[[dict[str, jax.Array], dict[str, jax.Array]], tuple[dict[str, jax.Array], dict[str, jax.Array]]],
    operands: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Runs `step` on chunk after chunk of the tokens.

    Args:
      kernel: says which operands and which gradients there are.
      step: (sums so far, the chunk's operands) -> (sums, what each token of the chunk gets).
      operands: the kernel's, by name.

    Returns:
      Sums over all tokens, in the dtype of the result, and what each token gets in the shape of the tokens.
    """
    lead = spec.x.shape[:-1]
    num_tokens = spec.num_tokens
    names = [name for name in spec.inputs(kernel) if _operand_of(name) not in _WEIGHTS]
    rows = {name: operands[name].reshape(num_tokens, *operands[name].shape[len(lead) :]) for name in names}
    arrays = spec.arrays()
    summed = [name for name in spec.outputs(kernel) if _operand_of(name) in _WEIGHTS]
    sums = {name: jnp.zeros(arrays[name].type.shape, spec.wide) for name in summed}
    # The size of a symbolic shape is not known: all its tokens are one chunk.
    num_chunks = max(math.ceil(num_tokens / config.chunk), 1) if isinstance(num_tokens, int) else 1
    if num_chunks == 1:
        sums, outs = step(sums, rows)
    else:
        size = math.ceil(num_tokens / num_chunks)
        size = min(math.ceil(size / _STEP) * _STEP, max(config.chunk, size))
        num_chunks = math.ceil(num_tokens / size)
        missing = num_chunks * size - num_tokens
        # Logits of a large bias less a logsumexp of 0 have infinite exponentials, and their product with 0 is NaN.
        filling = lambda name: jnp.inf if name == "lse" else 0
        pad = lambda name, x: jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)], constant_values=filling(name))
        split = lambda name, x: (pad(name, x) if missing else x).reshape(num_chunks, size, *x.shape[1:])
        # A derivative of the loop keeps its operands, and computes the logits of each chunk again.
        sums, outs = jax.lax.scan(jax.checkpoint(step), sums, {name: split(name, x) for name, x in rows.items()})
        outs = {name: x.reshape(-1, *x.shape[2:])[:num_tokens] for name, x in outs.items()}
    outs = {name: x.reshape(*lead, *x.shape[1:]) for name, x in outs.items()}
    return outs | {name: x.astype(arrays[name].type.dtype) for name, x in sums.items()}


def _operand_of(name: str) -> str:
    """The operand that an array is, or of which it is a tangent or a gradient."""
    return name.removeprefix("wide_").removeprefix("d")
