"""The passes of linear cross entropy with Triton kernels between the products."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy import chunks
from jaxkernels.ops.linear_cross_entropy.losses import cotangents
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, FORWARD, FUSED, TANGENT, LinearCrossEntropySpec
from jaxkernels.triton import calls
from jaxkernels.triton.linear_cross_entropy.problem import Config, Problem

__all__ = ["run"]

Arrays = dict[str, jax.Array]

#: Takes the place of the sum of the logits where a spec has none. It is not written.
_ABSENT = ArrayType((1,), np.dtype(np.float32))


def run(kernel: str, spec: LinearCrossEntropySpec, config: Config, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of a kernel of the operation."""
    named = spec.named(kernel, operands)
    step = functools.partial(_STEPS[kernel], spec, config, named)
    results = chunks.in_chunks(spec, config, kernel, step, named)
    return [results[name] for name in spec.outputs(kernel)]


def _forward(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    logits = chunks.product(spec, chunk["x"], operands["w"])
    return sums, _call(spec, config, "logits_forward", [logits, *_common(operands, chunk)], spec.statistics)


def _tangent(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    logits = chunks.product(spec, chunk["x"], operands["w"])
    change = chunks.product(spec, chunk["dx"], operands["w"]) + chunks.product(spec, chunk["x"], operands["dw"])
    given = [logits, *_common(operands, chunk), chunk["lse"], change, operands.get("dbias", chunk["labels"])]
    found = _call(spec, config, "logits_tangent", given, [f"d{name}" for name in spec.statistics])
    return sums, found


def _backward(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    logits = chunks.product(spec, chunk["x"], operands["w"])
    cts = {f"d{name}": chunk[f"d{name}"] for name in spec.statistics}
    unit = chunks.unit_of(spec, cts)
    g = _cotangent(spec, config, operands, chunk, logits, chunk["lse"], cts, unit)
    return chunks.add_products(spec, BACKWARD, sums, chunk["x"], operands["w"], g, unit)


def _fused(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    logits = chunks.product(spec, chunk["x"], operands["w"])
    weights = chunk["weights"]
    if spec.z_loss and spec.x.dtype == np.float16:  # The unit of g depends on all logsumexps.
        found = _call(spec, config, "logits_forward", [logits, *_common(operands, chunk)], spec.statistics)
        cts = cotangents(spec, found["lse"], weights, spec.vocab_size)
        unit = chunks.unit_of(spec, cts)
        g = _cotangent(spec, config, operands, chunk, logits, found["lse"], cts, unit)
    else:
        # Without a z-loss, the cotangents that a unit is made of do not depend on the logsumexp.
        unit = chunks.unit_of(spec, cotangents(spec, jnp.zeros_like(weights), weights, spec.vocab_size))
        given = [logits, *_common(operands, chunk), weights if unit is None else weights / unit]
        found = _call(spec, config, "logits_fused", given, spec.statistics)
        g = found.pop("g")
    sums, rows = chunks.add_products(spec, FUSED, sums, chunk["x"], operands["w"], g, unit)
    return sums, found | rows


_STEPS = {FORWARD: _forward, TANGENT: _tangent, BACKWARD: _backward, FUSED: _fused}


def _cotangent(
    spec: LinearCrossEntropySpec,
    config: Config,
    operands: Mapping[str, jax.Array],
    chunk: Arrays,
    logits: jax.Array,
    lse: jax.Array,
    cts: Mapping[str, jax.Array],
    unit: jax.Array | None,
) -> jax.Array:
    """g, the cotangent of the logits for those of the statistics, over the unit."""
    scaled = [ct if unit is None else ct / unit for ct in cts.values()]
    # Labels stand for cotangents of a sum that is not there.
    absent = [] if spec.logit_sum else [chunk["labels"]]
    return _call(spec, config, "logits_backward", [logits, *_common(operands, chunk), lse, *scaled, *absent], [])["g"]


def _common(operands: Mapping[str, jax.Array], chunk: Arrays) -> list[jax.Array]:
    """The bias and the labels.

    The labels stand for a bias that is not given, and are not read as such. The logits in their place would be used
    twice, and XLA would copy them.
    """
    return [operands.get("bias", chunk["labels"]), chunk["labels"]]


def _call(
    spec: LinearCrossEntropySpec, config: Config, name: str, operands: Sequence[jax.Array], results: Sequence[str]
) -> Arrays:
    """Launches a kernel with a program for each token.

    Args:
      operands: as the kernel takes them; the logits are first.
      results: names of the numbers of each token that the kernel writes. Kernels with "fused" and "backward" in their
        names also write g, in place of the logits if it has their dtype.
    """
    from jaxkernels.triton.linear_cross_entropy import logits_kernel

    num_tokens, vocab_size = operands[0].shape
    has_g = not name.endswith(("forward", "tangent"))
    types = [ArrayType((num_tokens,), spec.wide)] * len(results)
    if results and not spec.logit_sum:
        types += [_ABSENT]
    found: Any = calls.call_kernel(
        getattr(logits_kernel, name),
        operands,
        [*types, ArrayType((num_tokens, vocab_size), spec.x.dtype)] if has_g else types,
        target=spec.target,
        grid=(num_tokens,),
        num_warps=config.num_warps,
        num_stages=1,
        constants=dict(p=Problem.of(spec, config)),
        in_place=getattr(logits_kernel, f"{name}_in_place") if has_g and operands[0].dtype == spec.x.dtype else None,
    )
    return dict(zip(results, found)) | (dict(g=found[-1]) if has_g else {})
