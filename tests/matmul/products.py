"""Shared by the tests of the matmul kernels: specs, operands, the error rule, and refusals of every kernel."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import assert_accurate, by_number, plain_and_exact

from jaxkernels.core import dispatch, hardware, winners
from jaxkernels.core.cases import random_array
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul import reference as xla_matmul
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = [
    "H200", "LAYOUTS", "REFUSALS", "assert_right", "make_spec", "random_operands", "shipped_winners", "types_of",
]  # fmt: skip

H200 = hardware.lookup("NVIDIA H200")
LAYOUTS = ("mk.kn", "mk.nk", "km.kn", "km.nk")


def make_spec(
    m: int,
    n: int,
    k: int,
    *,
    layouts: str = "mk.kn",
    batch: int | None = None,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    out_dtype: str | None = None,
    bias: bool = False,
    multiplier: bool = False,
    residual: bool = False,
    residual_dtype: str | None = None,
    gradients: bool = False,
    target: hardware.Chip = H200,
    **epilogue: Any,
) -> MatmulSpec:
    """A product of m x k and k x n. By default the result, the multiplier and the residual have the dtype of
    the lhs. With `gradients`, the results are those of a gated activation."""
    lhs_layout, rhs_layout = layouts.split(".")
    sizes = dict(m=m, n=n, k=k)
    lead = () if batch is None else (batch,)
    array = lambda dtype, *shape: ArrayType((*lead, *shape), jnp.dtype(dtype))
    contracting = (len(lead) + lhs_layout.index("k"),), (len(lead) + rhs_layout.index("k"),)
    out_dtype = out_dtype or dtypes[0]
    return MatmulSpec(
        lhs=array(dtypes[0], *(sizes[axis] for axis in lhs_layout)),
        rhs=array(dtypes[1], *(sizes[axis] for axis in rhs_layout)),
        dimension_numbers=(contracting, (tuple(range(len(lead))),) * 2),
        out_dtype=jnp.dtype(out_dtype),
        target=target,
        bias=ArrayType((n,), jnp.dtype("bfloat16")) if bias else None,
        multiplier=array(out_dtype, m, n) if multiplier or gradients else None,
        preactivation=array(out_dtype, m, n) if gradients else None,
        residual=array(residual_dtype or out_dtype, m, n) if residual else None,
        **epilogue,
    )


def shipped_winners(backend: str) -> list[tuple[MatmulSpec, Any]]:
    """A product and its configuration for each that the tables hold of a backend, in each pair of layouts."""
    decode = dispatch.load("matmul", backend).decode
    found = {}
    for path in (pathlib.Path(winners.__file__).parent / "tables").glob("*.json"):
        for entry in json.loads(path.read_text()):
            key = entry["key"]
            if (key["op"], key["backend"]) != ("matmul", backend):
                continue
            lhs, rhs = (list(map(int, re.findall(r"\d+", key["spec"][x].split("[")[1]))) for x in ("lhs", "rhs"))
            (lhs_k,), (rhs_k,) = key["spec"]["dimension_numbers"][0]
            layouts = f"{('km', 'mk')[lhs_k]}.{('kn', 'nk')[rhs_k]}"
            spec = make_spec(lhs[1 - lhs_k], rhs[1 - rhs_k], lhs[lhs_k], layouts=layouts)
            found.setdefault((layouts, decode(entry["winner"])), spec)
    return [(spec, config) for (_, config), spec in found.items()]


def types_of(spec: MatmulSpec) -> list[ArrayType]:
    """The types of the operands that are given, in the order of a kernel's arguments."""
    return [getattr(spec, name) for name in spec.inputs("matmul")]


def random_operands(spec: MatmulSpec) -> list[np.ndarray]:
    """The same ones for equal specs."""
    rng = np.random.default_rng(0)
    return [random_array(rng, array.shape, array.dtype) for array in types_of(spec)]


def assert_right(spec: MatmulSpec, results: Any) -> None:
    """Holds what a kernel returned of `random_operands` to the error rule."""
    assert_accurate(by_number(results), *_expected(spec))


@functools.lru_cache(maxsize=2)
def _expected(spec: MatmulSpec) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results in plain JAX: in the spec's dtypes, and in float64."""
    run = lambda spec, *xs: xla_matmul.run(spec, xla_matmul.Config(), *xs)
    wide = dataclasses.replace(spec, out_dtype=jnp.dtype(jnp.float64))
    return plain_and_exact(run, spec, wide, random_operands(spec))


_TAKES = "takes two bfloat16 or two float16 operands, or without epilogue any two of bfloat16, float16 and float32, not"

#: What no kernel of 16-bit products computes, and why.
REFUSALS: dict[str, tuple[MatmulSpec, str]] = {
    "float32": (make_spec(8, 8, 8, dtypes=("float32", "float32")), f"{_TAKES} float32 and float32"),
    "mixed with epilogue": (
        make_spec(8, 8, 8, dtypes=("float32", "bfloat16"), activation="relu"),
        f"{_TAKES} float32 and bfloat16 with an epilogue",
    ),
    "mixed with a higher precision": (
        dataclasses.replace(make_spec(8, 8, 8, dtypes=("float32", "bfloat16")), precision=jax.lax.Precision.HIGH),
        "keeps 16 bits of a float32 operand, the precision asked for is HIGH",
    ),
    "float64": (
        make_spec(8, 8, 8, out_dtype="float64"),
        "returns bfloat16, float16 or float32, not float64",
    ),
    "both": (make_spec(8, 8, 8, multiplier=True, residual=True), "takes a multiplier or a residual, not both"),
    "empty": (make_spec(8, 0, 8), "has no work in an empty product"),
    "large": (make_spec(1, 2**29 + 5, 8), "counts the bytes of a row in 32 bits, which 536870917 elements exceed"),
    "precision": (
        dataclasses.replace(make_spec(8, 8, 8), precision=jax.lax.DotAlgorithmPreset.F32_F32_F32),
        "accumulates 16-bit products in float32, the precision asked for is F32_F32_F32",
    ),
    "Ampere": (
        make_spec(8, 8, 8, target=hardware.lookup("NVIDIA A100-SXM4-80GB")),
        "needs a GPU of compute capability 9.0 (Hopper), the target is NVIDIA A100-SXM4-80GB (compute capability 8.0)",
    ),
}
