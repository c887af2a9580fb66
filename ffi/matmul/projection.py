"""The projection to queries, keys and values in CUDA C++: the GEMM of gemm.cu, with one array in three parts.

The product stores query, key and value as three arrays, rotated by positions in its epilogue. The product for the
gradient of x reads an lhs that is three arrays along k, the one for the gradient of w an rhs that is three along n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import jax

from jaxkernels.core import hardware
from jaxkernels.ffi.matmul import gemm
from jaxkernels.ffi.matmul.gemm import Config, Parts
from jaxkernels.ffi.matmul.operand_blocks import ATOM
from jaxkernels.ops.matmul import tensor_cores
from jaxkernels.ops.qkv_projection.spec import PARTS, QkvProjectionSpec, Wanted

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 1

#: The array of the GEMM that is in three parts.
_IN_PARTS: Mapping[Wanted, Literal["lhs", "rhs", "out"]] = {"parts": "out", "x": "lhs", "w": "rhs"}
#: Columns of a head that a tile can have whole.
_HEAD_DIMS = (32, 64, 128, 256)
#: Below these, a plain product has kernels for few rows, and XLA's rotation is short.
_LEAST_ROWS = 128
#: Rotating the sums of a tile of 128 x 256, with heads of 64 features; on an H100. It takes as much longer as more
#: angles are loaded.
_ROTATION_SECONDS = 0.9e-6


def unsupported(spec: QkvProjectionSpec) -> str | None:
    if reason := gemm.unsupported(spec.product):
        return reason
    if spec.dtype not in tensor_cores.INPUTS:
        return f"returns bfloat16 or float16, not {spec.dtype}"
    if any(size % ATOM for size in spec.sizes):
        return f"stores {ATOM} columns at once: query, key and value need a multiple of {ATOM}, they have {spec.sizes}"
    if spec.pairs is not None and spec.head_dim not in _HEAD_DIMS:
        known = ", ".join(map(str, _HEAD_DIMS))
        return f"rotates heads of {known} features, not {spec.head_dim}"
    if (rows := math.prod(spec.lead)) < _LEAST_ROWS:
        return f"needs at least {_LEAST_ROWS} rows, x has {rows}"
    if spec.num_features % 8:
        return f"needs rows of whole 16 bytes, x has {spec.num_features} features"
    return None


def search_space(spec: QkvProjectionSpec) -> Iterator[Config]:
    """The configurations of the plain product that fit."""
    return _fitting(spec, gemm.search_space(spec.product))


def shortlist(spec: QkvProjectionSpec) -> tuple[Config, ...]:
    """Those of the plain product that share tiles.

    Consumers in turns took 1.1 to 1.5 times as long with a rotation (128 x 128; 350m, 124m and 1b on an H100).
    """
    return tuple(
        config
        for config in _fitting(spec, gemm.shortlist(spec.product))
        if spec.wanted != "parts" or not config.ping_pong
    )


def _fitting(spec: QkvProjectionSpec, configs: Iterable[Config]) -> Iterator[Config]:
    """Configurations without `in_place`. If heads are rotated, a tile has whole heads and its sums in one place."""
    for config in configs:
        fits = not config.in_place
        if spec.pairs is not None:
            # 192 accumulators leave no registers for the angles.
            fits &= config.block_n % spec.head_dim == 0 and config.cluster_parts == 1
            fits &= config.num_accumulators <= gemm.MAX_EPILOGUE_ACCUMULATORS
        if fits:
            yield config


def estimate(spec: QkvProjectionSpec, config: Config) -> float:
    """Seconds: the product, and the rotation of its tiles."""
    seconds = gemm.estimate(spec.product, config)
    if spec.pairs is None:
        return seconds
    waves = hardware.waves(gemm.num_tiles(spec.product, config.block_m, config.block_n), spec.target.num_sms)
    tile = config.block_m * config.block_n * spec.head_dim / (128 * 256 * 64)
    return seconds + waves * tile * _ROTATION_SECONDS


def run(spec: QkvProjectionSpec, config: Config, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the results, in the order of the spec's outputs."""
    named = spec.named("qkv_projection", arrays)
    of = _IN_PARTS[spec.wanted]
    parts = Parts(of, spec.sizes, spec.pairs, spec.head_dim, spec.num_rotated, spec.lead[-1])
    matrices = {name: x.reshape(-1, x.shape[-1]) for name, x in named.items()}
    three = [matrices[name] for name in PARTS if name in matrices]
    lhs = three if of == "lhs" else [matrices["x"]]
    rhs = three if of == "rhs" else [matrices["w"]]
    outs = gemm.run_in_parts(spec.product, config, parts, lhs, rhs, named)
    return [out.reshape(result.shape) for out, result in zip(outs, spec.results("qkv_projection"))]
