"""The passes of linear cross entropy with Triton kernels between the products."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

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


def run(kernel: str, spec: LinearCrossEntropySpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns the results of a kernel of the operation."""
    named = spec.named(kernel, operands)
    step = functools.partial(_STEPS[kernel], spec, config, named)
    results = chunks.in_chunks(spec, config, kernel, step, named)
    return [results[name] for name in spec.outputs(kernel)]


def _forward(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    return sums, _call(spec, config, "logits_forward", _given(spec, operands, chunk), spec.statistics)


def _tangent(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    change = chunks.product(spec, chunk["dx"], operands["w"]) + chunks.product(spec, chunk["x"], operands["dw"])
    given = [*_given(spec, operands, chunk), chunk["lse"], change, operands.get("dbias", chunk["labels"])]
    return sums, _call(spec, config, "logits_tangent", given, [f"d{name}" for name in spec.statistics])


def _backward(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    cts = {f"d{name}": chunk[f"d{name}"] for name in spec.statistics}
    g, unit = _cotangent(spec, config, _given(spec, operands, chunk), chunk["lse"], cts)
    return chunks.add_products(spec, BACKWARD, sums, chunk["x"], operands["w"], g, unit)


def _fused(
    spec: LinearCrossEntropySpec, config: Config, operands: Mapping[str, jax.Array], sums: Arrays, chunk: Arrays
) -> tuple[Arrays, Arrays]:
    given, weights = _given(spec, operands, chunk), chunk["weights"]
    if spec.z_loss and spec.x.dtype == np.float16:  # The unit of g depends on all logsumexps.
        found = _call(spec, config, "logits_forward", given, spec.statistics)
        cts = cotangents(spec, found["lse"], weights, spec.vocab_size)
        g, unit = _cotangent(spec, config, given, found["lse"], cts)
    else:
        # Without a z-loss, the cotangents that a unit is made of do not depend on the logsumexp.
        unit = chunks.unit_of(spec, cotangents(spec, jnp.zeros_like(weights), weights, spec.vocab_size))
        weights = weights if unit is None else weights / unit
        found = _call(spec, config, "logits_fused", [*given, weights], [*spec.statistics, "g"])
        g = found.pop("g")
    sums, rows = chunks.add_products(spec, FUSED, sums, chunk["x"], operands["w"], g, unit)
    return sums, found | rows


_STEPS = {FORWARD: _forward, TANGENT: _tangent, BACKWARD: _backward, FUSED: _fused}


def _given(spec: LinearCrossEntropySpec, operands: Mapping[str, jax.Array], chunk: Arrays) -> list[jax.Array]:
    """What every kernel takes first: the logits before bias and soft cap, the bias, and the labels.

    The labels stand for a bias that is not given, and are not read as such. The logits in their place would be used
    twice, and XLA would copy them.
    """
    labels = chunk["labels"]
    return [chunks.product(spec, chunk["x"], operands["w"]), operands.get("bias", labels), labels]


def _cotangent(
    spec: LinearCrossEntropySpec,
    config: Config,
    given: Sequence[jax.Array],
    lse: jax.Array,
    cts: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array | None]:
    """g, the cotangent of the logits for those of the statistics, and its unit."""
    unit = chunks.unit_of(spec, cts)
    scaled = [ct if unit is None else ct / unit for ct in cts.values()]
    if not spec.logit_sum:
        scaled.append(given[-1])  # The labels stand for cotangents of a sum that is not there.
    return _call(spec, config, "logits_backward", [*given, lse, *scaled], ["g"])["g"], unit


def _call(
    spec: LinearCrossEntropySpec, config: Config, name: str, operands: Sequence[jax.Array], results: Sequence[str]
) -> Arrays:
    """Launches a kernel with a program for each token.

    Args:
      operands: as the kernel takes them; the logits are first.
      results: names of what the kernel writes: numbers of each token, and last "g", which takes the place of the logits
        if it has their dtype.
    """
    from jaxkernels.triton.linear_cross_entropy import logits_kernel

    logits = operands[0]
    per_token = [name for name in results if name != "g"]
    types = dict.fromkeys(per_token, ArrayType(logits.shape[:1], spec.wide))
    if per_token and not spec.logit_sum:
        types["absent"] = _ABSENT
    if "g" in results:
        types["g"] = ArrayType(logits.shape, spec.x.dtype)
    found = calls.call_kernel(
        getattr(logits_kernel, name),
        operands,
        list(types.values()),
        target=spec.target,
        grid=logits.shape[:1],
        num_warps=config.num_warps,
        num_stages=1,
        constants=dict(p=Problem.of(spec, config)),
        in_place="g" in results and logits.dtype == spec.x.dtype,
    )
    by_name = dict(zip(types, found, strict=True))
    return {name: by_name[name] for name in results}
