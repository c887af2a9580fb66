"""The loop of linear cross entropy over chunks of tokens, so that memory holds the logits of one chunk.

A step of the loop computes the logits of its chunk, with one product, and what the kernel wants of them. The gradients
need two more products: dx = g w^T and dw += x^T g, where g is the cotangent of the logits, rounded to x's dtype. dw is
accumulated over the chunks in float32; the first chunk comes before the loop. All chunks have one size: the last is
filled up with tokens of weight 0.

The products are XLA's. What a backend does itself lies between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.core.arguments import check_fields, check_rules
from jaxkernels.ops.linear_cross_entropy.spec import LinearCrossEntropySpec

__all__ = ["Config", "Step", "add_products", "in_chunks", "operand_of", "product", "rescaled", "sizes", "unit_of"]

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

#: (sums so far, a chunk's operands) -> (sums, what each token of the chunk gets).
Step = Callable[[dict[str, jax.Array], dict[str, jax.Array]], tuple[dict[str, jax.Array], dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a step.

    Attributes:
      chunk: tokens in a chunk, at most.
    """

    #: What messages begin with.
    label: ClassVar[str] = "linear_cross_entropy[xla]"

    chunk: int = 4096

    def __post_init__(self) -> None:
        check_fields(self.label, self)
        check_rules(self.label, self, {"chunk must be at least 1": self.chunk < 1})


def sizes(spec: LinearCrossEntropySpec) -> tuple[int, ...]:
    """Sizes of chunks worth measuring, one for each number of chunks. The default is first: the largest chunk of at
    most `_MAX_CHUNK_BYTES`."""
    if not all(isinstance(size, int) for size in (spec.num_tokens, spec.vocab_size)):
        return (Config().chunk,)
    row_bytes = max(spec.vocab_size * spec.logits_dtype.itemsize, 1)
    default = max(_MAX_CHUNK_BYTES // row_bytes // _STEP * _STEP, _STEP)
    by_number: dict[int, int] = {}
    for chunk in (default, 1024, 2048, 4096, 8192, 16384):
        by_number.setdefault(math.ceil(spec.num_tokens / chunk), chunk)
    return tuple(by_number.values())


def product(spec: LinearCrossEntropySpec, x: jax.Array, w: jax.Array) -> Float[Array, "C V"]:
    """x w, rounded to the dtype of the logits."""
    contracted = ((1,), (1 - spec.vocab_axis,))
    return jax.lax.dot_general(
        x, w, (contracted, ((), ())), precision=spec.precision, preferred_element_type=spec.logits_dtype
    )


def unit_of(spec: LinearCrossEntropySpec, cts: Mapping[str, jax.Array]) -> jax.Array | None:
    """What g is divided by before it is rounded: None but for float16.

    There g is in units of a 2^-15th of its largest possible value: sums over few tokens are not lost below 2^-24.

    Args:
      cts: the cotangents of the statistics.
    """
    if spec.x.dtype != jnp.float16:
        return None
    bound = jnp.max(sum(jnp.abs(ct) for ct in cts.values()), initial=0)
    return jnp.where(bound > 0, bound, 1) / _FLOAT16_LIMIT


def add_products(
    spec: LinearCrossEntropySpec,
    kernel: str,
    sums: Mapping[str, jax.Array],
    x: jax.Array,
    w: jax.Array,
    g: Float[Array, "C V"],
    unit: jax.Array | None,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns the sums with the chunk's gradient of w added, and the chunk's rows of dx.

    Args:
      g: the cotangent of the logits in x's dtype, divided by `unit` if there is one.
    """
    dot = lambda lhs, rhs, contracted: rescaled(
        jax.lax.dot_general(
            lhs, rhs, (contracted, ((), ())), precision=spec.precision, preferred_element_type=spec.wide
        ),
        unit,
    )
    rows, sums = {}, dict(sums)
    names = {operand_of(name): name for name in spec.outputs(kernel)}
    if "x" in names:
        rows[names["x"]] = dot(g, w, ((1,), (spec.vocab_axis,))).astype(spec.arrays()[names["x"]].type.dtype)
    if "w" in names:
        sums[names["w"]] += dot(*((g, x) if spec.vocab_axis == 0 else (x, g)), ((0,), (0,)))
    return sums, rows


def rescaled(x: jax.Array, unit: jax.Array | None) -> jax.Array:
    return x if unit is None else x * unit


def in_chunks(
    spec: LinearCrossEntropySpec,
    config: Config,
    kernel: str,
    step: Step,
    operands: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Runs `step` on chunk after chunk of the tokens.

    Args:
      kernel: says which operands and which gradients there are.
      step: computes a chunk.
      operands: the kernel's, by name.

    Returns:
      Sums over all tokens, in the dtype of the result, and what each token gets in the shape of the tokens.
    """
    lead = spec.x.shape[:-1]
    num_tokens = spec.num_tokens
    names = [name for name in spec.inputs(kernel) if operand_of(name) not in _WEIGHTS]
    rows = {name: operands[name].reshape(num_tokens, *operands[name].shape[len(lead) :]) for name in names}
    arrays = spec.arrays()
    summed = [name for name in spec.outputs(kernel) if operand_of(name) in _WEIGHTS]
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
        parts = {name: split(name, x) for name, x in rows.items()}
        # A derivative of the loop keeps its operands, and computes the logits of each chunk again.
        step = jax.checkpoint(step)
        part = lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        step_of = lambda sums, i: step(sums, {name: part(x, i) for name, x in parts.items()})
        done: list[dict[str, jax.Array]] = []
        if sums:  # Outside of the loop, XLA knows that they are zeros: it neither fills them nor adds to them.
            sums, outs = step_of(sums, 0)
            done.append(outs)
        sums, others = jax.lax.scan(step_of, sums, jnp.arange(len(done), num_chunks))
        done.append({name: x.reshape(-1, *x.shape[2:]) for name, x in others.items()})
        outs = jax.tree.map(lambda *xs: jnp.concatenate(xs)[:num_tokens], *done)
    outs = {name: x.reshape(*lead, *x.shape[1:]) for name, x in outs.items()}
    return outs | {name: x.astype(arrays[name].type.dtype) for name, x in sums.items()}


def operand_of(name: str) -> str:
    """The operand that an array is, or of which it is a tangent or a gradient."""
    return name.removeprefix("wide_").removeprefix("d")
