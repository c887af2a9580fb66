"""Speed floors of the kernels on a Hopper GPU, against what XLA and cuDNN reach in the same run.

Both sides are checked against each other first, then timed in turns: device time from CUPTI, in bursts of a
few launches after a pause. With JAXKERNELS_SPEED_JSON set, the figures are written there.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkernels as jk

pytestmark = pytest.mark.gpu

_LAUNCHES, _ROUNDS = 10, 5


def device_seconds(f: Callable[..., Any], *operands: jax.Array) -> float:
    """Median device time of one call."""
    from jax.experimental.mosaic.gpu import profiler

    time.sleep(0.05)
    _, milliseconds = profiler.measure(f, iterations=_LAUNCHES)(*operands)
    return statistics.median(milliseconds) / 1e3


#: For XLA as users have it: other tests do without what it measures.
_MEASURED = {"xla_gpu_autotune_level": 4, "xla_gpu_enable_triton_gemm": True}

#: A compiled function and its operands.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def compare(name: str, flops: float, ours: Call, baseline: Call) -> float:
    """Returns the baseline's time over ours, both sides timed in turns; records TFLOP/s of both."""
    results = [jax.tree.leaves(f(*operands)) for f, operands in (ours, baseline)]
    for x, y in zip(*results, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=0.02 * float(np.abs(y).max()), rtol=0.02)
    times = [[device_seconds(f, *operands) for f, operands in (ours, baseline)] for _ in range(_ROUNDS)]
    mine, theirs = (statistics.median(side) for side in zip(*times))
    _record(name, {"tflops": flops / mine / 1e12, "baseline_tflops": flops / theirs / 1e12, "ratio": theirs / mine})
    return theirs / mine


def _record(name: str, row: dict[str, float]) -> None:
    if not (path := os.environ.get("JAXKERNELS_SPEED_JSON")):
        return
    file = Path(path)
    device = jax.devices()[0]
    table = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    table |= {"device": device.device_kind, "platform_version": device.client.platform_version, "jax": jax.__version__}
    table["rows"][name] = {key: round(value, 4) for key, value in row.items()}
    file.write_text(json.dumps(table, indent=2) + "\n")


def _random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn"])
@pytest.mark.parametrize("kernel", ["cuda", "pallas"])
def test_matmul_reaches_most_of_xla(kernel: str, layouts: str) -> None:
    size = 4096
    contracting = ((layouts[:2].index("k"),), (layouts[3:].index("k"),))
    product = functools.partial(jk.dot_general, dimension_numbers=(contracting, ((), ())), backend=kernel)
    baseline = functools.partial(jax.lax.dot_general, dimension_numbers=(contracting, ((), ())))
    operands = _random(0, size, size), _random(1, size, size)
    calls = [(jax.jit(f, compiler_options=_MEASURED), operands) for f in (product, baseline)]
    assert compare(f"matmul[{kernel}] {size}^3 bf16 {layouts}", 2 * size**3, *calls) >= 0.7


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_reaches_most_of_cudnn(causal: bool) -> None:
    batch, length, heads, head_dim = 4, 4096, 16, 128
    q, k, v, ct = (_random(seed, batch, length, heads, head_dim) for seed in range(4))
    flops = 4 * batch * heads * length**2 * head_dim * (0.5 if causal else 1)
    ours = functools.partial(jk.dot_product_attention, is_causal=causal, backend="pallas")
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    label = f"attention D=128 S=4096 {'causal' if causal else 'full'}"
    calls = [(jax.jit(f, compiler_options=_MEASURED), (q, k, v)) for f in (ours, cudnn)]
    assert compare(f"{label} forward", flops, *calls) >= 0.6
    # The backward pass alone: what the forward pass saved comes in as operands of the pullback.
    backward = lambda: jax.jit(lambda pull, ct: pull(ct), compiler_options=_MEASURED)
    calls = [(backward(), (jax.vjp(f, q, k, v)[1], ct)) for f in (ours, cudnn)]
    assert compare(f"{label} backward", 2.5 * flops, *calls) >= 0.4
