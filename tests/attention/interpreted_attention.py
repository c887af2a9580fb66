"""Runs the Pallas attention kernels interpreted on the CPU, and holds them to the error rule."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from interpret import RaceError
from interpret import interpret as interpret_kernels
from jax.experimental.pallas import mosaic_gpu as plgpu
from numerics import assert_accurate

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import reference_backward as xla_backward
from jaxkernels.ops.attention import reference_forward as xla_forward
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention import backward_fused, backward_two_kernels, backward_wide
from jaxkernels.pallas.attention import forward as attention_forward

__all__ = [
    "FORWARD",
    "FUSED",
    "LENGTHS",
    "SEGMENTS",
    "TWO_KERNELS",
    "WIDE",
    "WINDOWS",
    "attention_backward",
    "check",
    "check_backward",
    "documents",
    "forward",
    "interpret",
    "make_spec",
    "missing_wait",
    "random_cotangents",
    "random_operands",
    "run_backward",
]

#: Blocks work on several items each.
_SMALL_GPU = dataclasses.replace(hardware.lookup("NVIDIA H200"), num_sms=2)
FORWARD = attention_forward.Config(block_kv=64)
#: All designs of the backward pass.
attention_backward = dispatch.load("attention_backward", "pallas")
TWO_KERNELS, WIDE = backward_two_kernels.Config(), backward_wide.Config()
FUSED = {64: backward_fused.Config(block_q=128), 128: backward_fused.Config()}
WINDOWS = [(70, None), (None, 40), (70, 40), (0, 0), (3, 200)]
LENGTHS = [0, 1, 64, 130, 200]


def interpret(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """As `interpret.interpret`, with what these kernels write in MLIR."""
    emulations = dict(
        _scale_rows=lambda tile, factors: tile * factors[:, None], _count_up=lambda counter, _: (counter + 1, counter)
    )
    return interpret_kernels(emulations=emulations, **settings)


@contextlib.contextmanager
def missing_wait(missing: int, waits: Sequence[str]) -> Iterator[None]:
    """Leaves out one of all waits, which are in the order in which they are traced; fails unless that is noticed."""
    number, wait = itertools.count(), plgpu.barrier_wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(number) == missing else wait(barrier))
        # ValueError: a barrier went round before anyone had looked at it.
        with pytest.raises((RaceError, TimeoutError, ValueError)):
            yield
    assert next(number) == len(waits)


def make_spec(
    queries: int,
    keys: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (64, 64),
    batch: int = 1,
    dtype: str = "bfloat16",
    **rules: Any,
) -> AttentionSpec:
    array = lambda *shape: ArrayType((batch, *shape), jnp.dtype(dtype))
    return AttentionSpec(
        q=array(queries, heads[0], dims[0]),
        k=array(keys, heads[1], dims[0]),
        v=array(keys, heads[1], dims[1]),
        scale=dims[0] ** -0.5,
        target=_SMALL_GPU,
        **rules,
    )


def _widened(spec: AttentionSpec) -> AttentionSpec:
    wide = lambda array: dataclasses.replace(array, dtype=jnp.dtype(jnp.float64))
    return dataclasses.replace(spec, q=wide(spec.q), k=wide(spec.k), v=wide(spec.v))


def random_operands(spec: AttentionSpec) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_array(rng, x.shape, x.dtype) for x in (spec.q, spec.k, spec.v)]


def random_cotangents(spec: AttentionSpec) -> list[np.ndarray]:
    """Random cotangents of out and lse."""
    rng, (batch, num_queries, num_heads, _) = np.random.default_rng(1), spec.q.shape
    dout = random_array(rng, (*spec.q.shape[:3], spec.v.shape[3]), spec.v.dtype)
    return [dout, random_array(rng, (batch, num_heads, num_queries), "float32")]


def check(
    spec: AttentionSpec,
    forward: attention_forward.Config | None = FORWARD,
    backward: Any = TWO_KERNELS,
    *,
    scale_queries: float = 1.0,
    growth: float = 0.0,
    **integers: Any,
) -> None:
    """Runs a pass for each config, interpreted, and holds out and lse, dq, dk and dv to the error rule.

    Without `forward` the backward pass begins with plain JAX's out and lse.

    Args:
      growth: by how many powers of two logits grow every 64 keys towards the first.
      integers: the optional operands by name.
    """
    assert attention_forward.unsupported(spec) is None
    q, k, v = random_operands(spec)
    q = (q * scale_queries).astype(q.dtype)
    if growth:
        q[..., 0] = 1
        k[..., 0] = growth * (np.arange(k.shape[1])[::-1, None] // 64) / (spec.scale * np.log2(np.e))
    operands = [q, k, v, *random_cotangents(spec)]
    extras = [jnp.asarray(integers[name], jnp.int32) for name in spec.extra_names]

    def plain(spec: AttentionSpec, operands: list[np.ndarray]) -> dict[str, jax.Array]:
        def run(q, k, v, dout, dlse, *extras):
            out, lse = xla_forward.run(spec, xla_forward.Config(), q, k, v, *extras)
            if backward is None:
                return dict(out=out, lse=lse)
            grads = xla_backward.run(spec, xla_backward.Config(), q, k, v, *extras, out, lse, dout, dlse)
            return dict(out=out, lse=lse, **dict(zip(("dq", "dk", "dv"), grads)))

        # Compiled whole, in a third of the time, and rounded as if run one by one.
        return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})(*operands, *extras)

    expected = plain(spec, operands)
    with jax.enable_x64(True):
        exact = plain(_widened(spec), [x.astype(np.float64) for x in operands])
    q, k, v, dout, dlse = map(jnp.asarray, operands)
    actual, (out, lse) = {}, (expected["out"], expected["lse"])
    with interpret():
        if forward is not None:
            out, lse = attention_forward.run(spec, forward, q, k, v, *extras)
            actual |= dict(out=out, lse=lse)
        if backward is not None:
            grads = attention_backward.run(spec, backward, q, k, v, *extras, out, lse, dout, dlse)
            actual |= dict(zip(("dq", "dk", "dv"), grads))
    assert_accurate(*({name: np.asarray(results[name]) for name in actual} for results in (actual, expected, exact)))


def check_backward(spec: AttentionSpec, config: Any, **settings: Any) -> None:
    check(spec, None, config, **settings)


def forward(spec: AttentionSpec, *operands: Any, config: attention_forward.Config = FORWARD) -> list[np.ndarray]:
    """out and lse, interpreted."""
    with interpret():
        return [np.asarray(x) for x in attention_forward.run(spec, config, *map(jnp.asarray, operands))]


def documents(batch: int, length: int, mean: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(1).random((batch, length)) < 1 / mean, axis=1)


SEGMENTS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "packed": (documents(2, 264, 50),) * 2,
    "aligned": (np.arange(264)[None].repeat(2, 0) // 128,) * 2,
    "one": (np.zeros((2, 264)),) * 2,
    "unordered": tuple(np.random.default_rng(i).integers(-3, 4, (2, 264)) for i in range(2)),
    "alternating": (np.arange(264)[None].repeat(2, 0) // 64 % 2,) * 2,
    "other keys": (documents(2, 264, 50), documents(2, 136, 90)),
    "strangers": (np.arange(264)[None].repeat(2, 0) // 66, np.full((2, 136), 2)),
    "extreme": (np.where(documents(2, 264, 90) % 2, 2**31 - 1, -(2**31)),) * 2,
}


def run_backward(spec: AttentionSpec, config: Any, **settings: Any) -> None:
    q, k, v = map(jnp.asarray, random_operands(spec))
    out, lse = jax.jit(functools.partial(xla_forward.run, spec, xla_forward.Config()))(q, k, v)
    with interpret(**settings):
        attention_backward.run(spec, config, q, k, v, out, lse, out, lse)
