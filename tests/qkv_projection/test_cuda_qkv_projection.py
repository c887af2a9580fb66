"""The projection to queries, keys and values in CUDA C++: which kernel is chosen, emulated, and on a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator
from projections import assert_right, make_spec, random_operands

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.ffi.matmul import few_rows, gemm, projection
from jaxkernels.ops.qkv_projection.spec import Pairs, QkvProjectionSpec, Wanted

Config = projection.Config


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(gemm, "_compile_cached", gemm._compile_cached.__wrapped__)
    with Emulator(libraries, {"jaxkernels::gemm": DYNAMIC_SMEM}).installed() as emulator:
        yield emulator


#: A name for each configuration, with numbers of heads of queries, of keys, and their features.
ROTATING: dict[str, tuple[Config, tuple[int, int, int], Pairs]] = {
    "64": (Config(64, 64, num_stages=2), (2, 1, 64), "halves"),
    "in turns": (Config(64, 128, num_stages=3, ping_pong=True), (2, 2, 64), "halves"),
    "packed": (Config(128, 128, num_stages=3), (3, 1, 128), "halves"),
    "neighbours": (Config(128, 128, num_stages=3), (4, 2, 64), "neighbours"),
    "neighbours in turns": (Config(64, 128, num_stages=2, ping_pong=True), (2, 1, 128), "neighbours"),
    "wide head": (Config(128, 256, num_stages=2), (1, 1, 256), "halves"),
    "narrow head": (Config(64, 64, num_stages=2), (4, 2, 32), "halves"),
    "cluster": (Config(64, 64, num_stages=2, cluster_m=2), (2, 1, 64), "halves"),
    # The last tile has heads that are rotated, and heads that are not.
    "several heads": (Config(64, 256, num_stages=2), (4, 1, 64), "halves"),
    "parts of k": (Config(64, 64, num_stages=2, split_k=2, through_memory=True), (2, 1, 64), "halves"),
}


def check_emulated(spec: QkvProjectionSpec, config: Config) -> None:
    """Runs the kernel on a chip of few SMs, so that blocks work on several tiles each, and checks the result."""
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=config.cluster_blocks))
    assert_right(spec, projection.run(spec, config, *map(jnp.asarray, random_operands(spec))))


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ROTATING)
def test_rotated_parts_emulated(name: str, emulator: Emulator) -> None:
    config, heads, pairs = ROTATING[name]
    emulator.is_at_once = config.through_memory
    check_emulated(make_spec("parts", (2, 83), 72 * config.split_k, heads, pairs=pairs), config)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("wanted", ["parts", "x", "w"])
@pytest.mark.parametrize(
    "config",
    [Config(64, 64, num_stages=2), Config(128, 128, num_stages=3), Config(64, 128, num_stages=2, cluster_n=2)],
    ids=["64", "128", "cluster"],
)
def test_arrays_in_parts_emulated(wanted: Wanted, config: Config, emulator: Emulator) -> None:
    heads = (4, 2, 64)  # Each part is whole tiles.
    check_emulated(make_spec(wanted, (3, 61), 200, heads, dtype="float16"), config)


#: What the kernel does not take, and why.
REFUSALS: dict[str, tuple[QkvProjectionSpec, str]] = {
    "columns": (
        make_spec("parts", (4, 64), 64, (3, 1, 32)),
        "stores 64 columns at once: query, key and value need a multiple of 64, they have (96, 32, 32)",
    ),
    "heads": (
        make_spec("parts", (4, 64), 64, (4, 4, 48), pairs="halves"),
        "rotates heads of 32, 64, 128, 256 features, not 48",
    ),
    "rows": (make_spec("w", (2, 63), 64, (4, 4, 64)), "needs at least 128 rows, x has 126"),
    "features": (make_spec("x", (4, 64), 68, (4, 4, 64)), "needs rows of whole 16 bytes, x has 68 features"),
    "float32": (
        make_spec("x", (4, 64), 64, (4, 4, 64), dtype="float32"),
        "takes two bfloat16 or two float16 operands, or without epilogue any two of bfloat16, float16 and float32, not "
        "float32 and float32",
    ),
    "chip": (
        make_spec("x", (4, 64), 64, (4, 4, 64), target=hardware.lookup("NVIDIA A100-SXM4-80GB")),
        "needs a GPU of compute capability 9.0 (Hopper), the target is NVIDIA A100-SXM4-80GB (compute capability 8.0)",
    ),
}


@pytest.mark.parametrize(("spec", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(spec: QkvProjectionSpec, reason: str) -> None:
    assert projection.unsupported(spec) == reason
    assert dispatch.choose("qkv_projection", spec, None).backend == "xla"


@pytest.mark.parametrize("wanted", ["parts", "x", "w"])
@pytest.mark.parametrize("sizes", [(768, (12, 12, 64)), (1024, (16, 16, 64)), (4096, (32, 8, 128))], ids=str)
def test_training_takes_the_kernel(sizes: tuple[int, tuple[int, int, int]], wanted: Wanted) -> None:
    """Also in a search space of its own, and compiled without spills."""
    spec = make_spec(wanted, (32, 1024), *sizes, pairs="halves" if wanted == "parts" else None)
    choice = dispatch.choose("qkv_projection", spec, None)
    assert choice.backend == "cuda"
    assert choice.config in tuple(projection.search_space(spec))
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_operands(dataclasses.replace(spec))]
    jax.jit(lambda *xs: projection.run(spec, choice.config, *xs)).trace(*operands).lower(lowering_platforms=("cuda",))


def test_decoding_takes_the_product_for_few_rows() -> None:
    """Without a kernel for the projection, the plain product is still that of the fastest backend."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 1, 4096), (4096, 6144))]
    angles = [jax.ShapeDtypeStruct((1, 64), jnp.float32)] * 2
    project = lambda x, w, cos, sin: jk.qkv_projection(x, w, (cos, sin), num_heads=32, num_kv_heads=8)
    choices = jk.explain(project, *types, *angles, platform="cuda").choices
    assert {choice.op: choice.backend for choice in choices} == {"qkv_projection": "xla", "matmul": "cuda"}
    assert isinstance(choices[-1].config, few_rows.Config)


def check(spec: QkvProjectionSpec, config: Config) -> None:
    """Runs the kernel and holds it to the error rule, and to the same bits in every run."""
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    operands = [jnp.asarray(x) for x in random_operands(spec)]
    run = jax.jit(lambda *xs: projection.run(spec, config, *xs))
    outs = jax.tree.map(np.asarray, run(*operands))
    for _ in range(2):
        assert [np.asarray(x).tobytes() for x in run(*operands)] == [x.tobytes() for x in outs]
    assert_right(spec, outs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROTATING)
def test_rotated_parts(name: str) -> None:
    config, (num_heads, num_kv_heads, head_dim), pairs = ROTATING[name]
    config = dataclasses.replace(config, num_stages=min(4, config.num_stages + 1))
    heads = (3 * num_heads, 3 * num_kv_heads, head_dim)
    check(make_spec("parts", (3, 1000), 520, heads, pairs=pairs), config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["parts", "x", "w"])
def test_configurations_of_the_search(wanted: Wanted, dtype: str) -> None:
    """Every tenth."""
    spec = make_spec(wanted, (3, 700), 776, (12, 4, 64), dtype=dtype, pairs="halves" if wanted == "parts" else None)
    for config in list(projection.search_space(spec))[::10]:
        check(spec, config)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("heads", [(8, 8, 64), (8, 2, 128)], ids=str)
def test_derivatives(heads: tuple[int, int, int], pairs: Any) -> None:
    """The public function with the kernel, and with XLA."""
    num_heads, num_kv_heads, head_dim = heads
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    x, w = draw(0, 2, 512, 384).astype(jnp.bfloat16), (draw(1, 384, columns) / 20).astype(jnp.bfloat16)
    angles = draw(2, 512, head_dim // 2)

    def gradients(backend: str) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            parts = jk.qkv_projection(
                x, w, (jnp.cos(angles), jnp.sin(angles)), num_heads=num_heads, num_kv_heads=num_kv_heads, pairs=pairs,
                backend=backend,
            )  # fmt: skip
            return sum(jnp.sum(jnp.sin(part.astype(jnp.float32)) * (i + 1)) for i, part in enumerate(parts))

        return jax.jit(jax.grad(loss, (0, 1)))(x, w)

    for ours, xla in zip(jax.tree.leaves(gradients("cuda")), jax.tree.leaves(gradients("xla"))):
        ours, xla = np.asarray(ours, np.float32), np.asarray(xla, np.float32)
        assert np.abs(ours - xla).max() <= 0.02 * np.abs(xla).max()
