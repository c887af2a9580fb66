"""The Pallas matmul kernel, interpreted on the CPU under the race detector: every schedule, edges, epilogues."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import products
import pytest
from cases import random_array
from interpret import RaceError, interpret
from jax.experimental.pallas import mosaic_gpu as plgpu
from products import REFUSALS, assert_right, random_operands

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.pallas.matmul import gemm as matmul

#: A Hopper GPU of two SMs, so that a handful of small tiles makes a CTA walk several.
_SMALL_GPU = dataclasses.replace(hardware.lookup("NVIDIA H200"), num_sms=2)
_SMALL_TILE = matmul.Config(block_m=64, block_n=128, num_stages=2, split="n", delay_release=0)

make_spec = functools.partial(products.make_spec, out_dtype="bfloat16", residual_dtype="bfloat16", target=_SMALL_GPU)


def check(spec: MatmulSpec, config: matmul.Config = _SMALL_TILE) -> None:
    """Runs the kernel interpreted and holds it to the error rule."""
    assert matmul.unsupported(spec) is None
    operands = random_operands(spec)
    with interpret():
        outs = matmul.run(spec, config, *map(jnp.asarray, operands))
    assert_right(spec, outs)


@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn", "km.nk"])
@pytest.mark.parametrize("split", ["m", "n"])
def test_layouts(layouts: str, split: str) -> None:
    block_m, block_n = (128, 64) if split == "m" else (64, 128)
    config = dataclasses.replace(_SMALL_TILE, block_m=block_m, block_n=block_n, split=split)
    check(make_spec(128, 192, 256, layouts=layouts), config)


@pytest.mark.sampled(one_in=8)
@pytest.mark.one_version
@pytest.mark.parametrize("layouts", ["mk.kn", "km.nk"])
@pytest.mark.parametrize("cluster", [None, "m", "n"])
@pytest.mark.parametrize("delay_release", [0, 1])
def test_schedules(layouts: str, cluster: Any, delay_release: int) -> None:
    config = dataclasses.replace(_SMALL_TILE, cluster=cluster, delay_release=delay_release, num_stages=3)
    check(make_spec(200, 264, 328, layouts=layouts), config)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_number_of_stages(num_stages: int) -> None:
    check(make_spec(72, 136, 320), dataclasses.replace(_SMALL_TILE, num_stages=num_stages))


@pytest.mark.sampled(one_in=10)
@pytest.mark.one_version
@pytest.mark.parametrize("layouts", ["mk.kn", "km.nk"])
@pytest.mark.parametrize("split_k", [2, 3])
@pytest.mark.parametrize("k", [264, 384])
def test_split_k(k: int, split_k: int, layouts: str) -> None:
    """Also if the last part's blocks are past k."""
    config = dataclasses.replace(_SMALL_TILE, split_k=split_k)
    check(make_spec(72, 136, k, layouts=layouts), config)
    check(make_spec(72, 136, k, layouts=layouts, batch=2), config)
    epilogue = dict(bias=True, residual=True, activation="gelu", save_preactivation=True, alpha=0.3)
    check(make_spec(72, 136, k, layouts=layouts, **epilogue), dataclasses.replace(config, cluster="n"))


def test_a_part_of_k_with_nothing_in_it_is_refused() -> None:
    spec = make_spec(72, 136, 200)
    with pytest.raises(ValueError, match=re.escape("every part of split_k=5 must have some of k=200")):
        matmul.run(spec, dataclasses.replace(_SMALL_TILE, split_k=5), *map(jnp.asarray, random_operands(spec)))


@pytest.mark.sampled(one_in=10)
@pytest.mark.one_version
@pytest.mark.parametrize("layouts", ["mk.kn", "km.nk"])
@pytest.mark.parametrize("cluster", ["m", "n"])
@pytest.mark.parametrize("delay_release", [0, 1])
@pytest.mark.parametrize("m", [64, 200, 520])
def test_epilogue_in_pairs(m: int, layouts: str, cluster: Any, delay_release: int) -> None:
    config = dataclasses.replace(_SMALL_TILE, cluster=cluster, delay_release=delay_release, num_stages=3)
    check(make_spec(m, 72, 200, layouts=layouts, bias=True, activation="silu", save_preactivation=True), config)


@pytest.mark.sampled(one_in=10)
@pytest.mark.one_version
@pytest.mark.parametrize("k", [40, 200])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (matmul.Config(num_stages=2), {}),
        (matmul.Config(256, 128, num_stages=2, delay_release=0), dict(bias=True, activation="gelu")),
        (matmul.Config(128, 192, num_stages=3), dict(bias=True)),
        (matmul.Config(64, 256, num_stages=3, split="n", cluster="n"), dict(alpha=0.3)),
        (matmul.Config(128, 128, num_stages=1, delay_release=0), dict(out_dtype="float32")),
    ],
    ids=["half", "half-tall", "all", "cluster", "nothing"],
)
def test_stores_behind_the_next_tile(config: matmul.Config, options: dict[str, Any], k: int) -> None:
    check(make_spec(500, 520, k, **options), config)


@pytest.mark.one_version
@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("strip", [1, 3])
def test_tile_orders(minor: Any, strip: int) -> None:
    check(make_spec(200, 520, 64), dataclasses.replace(_SMALL_TILE, minor=minor, strip=strip))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 7, 3), (63, 65, 129), (1, 300, 70), (300, 1, 70), (129, 257, 1)], ids=str
)
@pytest.mark.parametrize("layouts", ["mk.kn", "km.nk"])
def test_ragged_sizes(sizes: tuple[int, int, int], layouts: str) -> None:
    check(make_spec(*sizes, layouts=layouts))


@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn"])
def test_batches(layouts: str) -> None:
    check(make_spec(72, 136, 72, layouts=layouts, batch=3))
    check(make_spec(33, 9, 50, layouts=layouts, batch=2))


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str, out_dtype: str) -> None:
    check(make_spec(72, 136, 136, dtypes=(dtype, dtype), out_dtype=out_dtype))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("dtypes", list(itertools.permutations(("float32", "bfloat16", "float16"), 2)), ids="-".join)
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_operands_of_two_dtypes(dtypes: tuple[str, str], alpha: float) -> None:
    """Products of halves keep 16 bits of a float32 operand, and all of others; plain JAX on the CPU keeps all."""
    spec = make_spec(72, 136, 136, dtypes=dtypes, out_dtype="float32", alpha=alpha)
    lhs, rhs = random_operands(spec)
    with interpret():
        out = np.asarray(matmul.run(spec, _SMALL_TILE, jnp.asarray(lhs), jnp.asarray(rhs)))
    exact = alpha * (lhs.astype(np.float64) @ rhs.astype(np.float64))
    bits = 16 if {*dtypes} == {"float32", "float16"} else 17
    assert np.max(np.abs(out - exact)) <= 2.0**-bits * alpha * np.max(
        np.abs(lhs).astype(np.float64) @ np.abs(rhs).astype(np.float64)
    )


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")], ids="-".join
)
def test_infinities_stay_infinities(dtypes: tuple[str, str]) -> None:
    """In either operand, and multiplied by lower halves that are 0, positive or negative."""
    spec = make_spec(72, 136, 136, dtypes=dtypes, out_dtype="float32")
    lhs, rhs = np.ones((72, 136), np.float32), np.tile(np.float32([1, 1 + 2**-9, 1 - 2**-10, 2]), (136, 34))
    lhs[3, 5], lhs[7, 2], lhs[11, 3] = np.inf, np.nan, -np.inf
    with interpret():
        out = np.asarray(matmul.run(spec, _SMALL_TILE, jnp.asarray(lhs, dtypes[0]), jnp.asarray(rhs, dtypes[1])))
    assert np.isposinf(out[3]).all()
    assert np.isneginf(out[11]).all()
    assert np.isnan(out[7]).all()
    assert np.isfinite(np.delete(out, [3, 7, 11], axis=0)).all()


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("activation", [None, "relu", "relu_squared", "silu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_epilogues(activation: str | None, out_dtype: str) -> None:
    check(
        make_spec(
            100, 200, 136, out_dtype=out_dtype, bias=True, activation=activation, residual=True,
            save_preactivation=activation is not None,
        )
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [None, "n"])
def test_epilogue_parts(cluster: Any) -> None:
    config = dataclasses.replace(_SMALL_TILE, cluster=cluster)
    check(make_spec(72, 264, 72, bias=True), config)
    check(make_spec(72, 264, 72, batch=2, residual=True), config)
    check(make_spec(72, 264, 72, activation="silu"), config)
    check(make_spec(72, 264, 72, activation="silu", multiplier=True, save_preactivation=True), config)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_alpha(out_dtype: str) -> None:
    check(make_spec(100, 200, 136, layouts="km.nk", out_dtype=out_dtype, alpha=0.3))
    epilogue = dict(bias=True, activation="gelu", residual=True, save_preactivation=True)
    check(make_spec(100, 200, 136, batch=2, out_dtype=out_dtype, alpha=-0.3, **epilogue))


def test_alpha_scales_before_rounding() -> None:
    """The product is 68000, beyond float16."""
    spec = make_spec(72, 136, 136, dtypes=("float16", "float16"), out_dtype="float16", alpha=1e-3)
    with interpret():
        out = matmul.run(spec, _SMALL_TILE, jnp.full((72, 136), 50, jnp.float16), jnp.full((136, 136), 10, jnp.float16))
    np.testing.assert_array_equal(out, np.full((72, 136), 68, np.float16))


def test_padding_is_not_read() -> None:
    """NaNs in a neighbour's columns never reach the result: the operand's own rows end before them."""
    whole = np.full((136, 200), np.nan, np.float32).astype(jnp.bfloat16)
    whole[:, :136] = random_array(np.random.default_rng(0), (136, 136), "bfloat16")
    spec = make_spec(136, 136, 136)
    with interpret():
        out = matmul.run(spec, _SMALL_TILE, jnp.asarray(whole)[:, :136], jnp.asarray(whole)[:, :136])
    assert not np.isnan(np.asarray(out, np.float32)).any()


def test_same_inputs_give_the_same_bits() -> None:
    spec = make_spec(72, 136, 136, bias=True, activation="gelu")
    operands = [jnp.asarray(x) for x in random_operands(spec)]
    with interpret():
        first, second = (np.asarray(matmul.run(spec, _SMALL_TILE, *operands)[0]) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("missing", "config"),
    [
        ("commit_smem", _SMALL_TILE),
        ("wait_smem_to_gmem", _SMALL_TILE),
        ("wgmma_wait", dataclasses.replace(_SMALL_TILE, num_stages=2)),
        ("wgmma_wait", matmul.Config(num_stages=2)),
        ("wait_smem_to_gmem", matmul.Config(num_stages=2)),
    ],
)
def test_a_missing_wait_is_a_race(missing: str, config: matmul.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(200, 264, 264)
    operands = [jnp.asarray(x) for x in random_operands(spec)]
    monkeypatch.setattr(plgpu, missing, lambda *args, **kwargs: None)
    with pytest.raises(RaceError), interpret():
        matmul.run(spec, config, *operands)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            dict(block_m=96),
            "matmul[pallas]: each consumer's tile and block_k must be positive multiples of 64; got "
            "block_m=96, block_n=256, block_k=64 split along m.",
        ),
        (dict(num_stages=1, delay_release=1), "matmul[pallas]: num_stages must exceed delay_release=1; got 1."),
    ],
    ids=["tile", "stages"],
)
def test_config_refuses_what_cannot_run(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        matmul.Config(**knobs)


@pytest.mark.parametrize(("spec", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(spec: MatmulSpec, reason: str) -> None:
    assert matmul.unsupported(spec) == reason


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("precision", [None, "default", "BF16_BF16_F32", "F16_F16_F32"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), list(itertools.product(("float16", "bfloat16"), ("float16", "bfloat16", "float32")))
)
def test_what_a_kernel_multiplies_it_differentiates(dtype: str, out_dtype: str, precision: str | None) -> None:
    """Operands meet a cotangent of the result's dtype, and lose no more bits than a preset for 16 of them asks for."""
    operands = (jax.ShapeDtypeStruct((8, 8), jnp.dtype(dtype)),) * 2
    multiply = functools.partial(jk.matmul, precision=precision, out_dtype=out_dtype, backend="pallas")
    second = jax.grad(lambda *xs: sum(x.sum() for x in jax.grad(lambda *ys: (multiply(*ys) ** 2).sum(), (0, 1))(*xs)))
    choices = jk.explain(second, *operands, platform="cuda").choices
    assert {choice.backend for choice in choices} == {"pallas"}


def test_the_model_prefers_tiles_that_fill_the_machine() -> None:
    h200 = hardware.lookup("NVIDIA H200")
    config = lambda *sizes: dispatch.default_config(
        "matmul", "pallas", dataclasses.replace(make_spec(*sizes), target=h200)
    )
    assert config(8192, 8192, 8192) == matmul.Config()
    assert sorted(dataclasses.astuple(config(1024, 1024, 1024))[:2]) == [64, 128]
    assert config(64, 4096, 4096).block_m == 64
    assert config(256, 4096, 14336) == matmul.Config(128, 128, num_stages=6, split_k=2)


def check_on_this_chip(spec: MatmulSpec, config: matmul.Config, runs: int) -> None:
    """Holds the kernel to the error rule, and every run to the bits of the first."""
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    operands = random_operands(spec)
    arrays = [jnp.asarray(x) for x in operands]
    product = jax.jit(lambda *arrays: matmul.run(spec, config, *arrays))
    outs = product(*arrays)
    assert_right(spec, outs)
    agrees = jax.jit(lambda *pair: jnp.array([jnp.array_equal(*xs) for xs in zip(*map(jax.tree.leaves, pair))]).all())
    assert all(agrees(outs, product(*arrays)) for _ in range(runs))


#: What the search space has of every kind; several tiles for each CTA, and sizes that no tile divides.
_ON_THE_CHIP = {
    "usual": matmul.Config(),
    "early": matmul.Config(delay_release=0),
    "one-slot": matmul.Config(num_stages=1, delay_release=0),
    "six-slots": matmul.Config(128, 128, num_stages=6),
    "wide": matmul.Config(128, 192),
    "tall": matmul.Config(256, 128, minor="n", strip=4),
    "pairs-m": matmul.Config(cluster="m"),
    "pairs-n": matmul.Config(cluster="n", delay_release=0),
    "narrow": matmul.Config(128, 64, 128),
    "split-n": matmul.Config(64, 256, split="n", cluster="n"),
    "split-k": matmul.Config(128, 128, num_stages=5, split_k=3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn", "km.nk"])
@pytest.mark.parametrize("name", _ON_THE_CHIP)
def test_schedules_on_the_chip(name: str, layouts: str) -> None:
    check_on_this_chip(make_spec(2600, 2824, 584, layouts=layouts), _ON_THE_CHIP[name], runs=20)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["usual", "tall", "split-n", "split-k"])
@pytest.mark.parametrize(
    "options",
    [
        dict(bias=True, activation="gelu"),
        dict(bias=True, residual=True, activation="silu", save_preactivation=True, alpha=0.3),
        dict(out_dtype="float32", batch=2),
    ],
    ids=["bias-gelu", "all", "float32-batch"],
)
def test_epilogues_on_the_chip(name: str, options: dict[str, Any]) -> None:
    check_on_this_chip(make_spec(1400, 2824, 584, **options), _ON_THE_CHIP[name], runs=20)


@pytest.mark.gpu
def test_thousands_of_runs_agree() -> None:
    check_on_this_chip(make_spec(2600, 2824, 328), matmul.Config(), runs=2000)


@pytest.mark.gpu
@pytest.mark.parametrize("delay_release", [0, 1])
@pytest.mark.parametrize("cluster", ["m", "n"])
def test_a_cluster_ends_together(cluster: str, delay_release: int) -> None:
    """A block that left while its neighbour still released slots to it broke the context, in one run of hundreds."""
    spec = dataclasses.replace(make_spec(64, 28672, 4096), target=hardware.chip_of(jax.devices()[0]))
    lhs, rhs = (jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate((spec.lhs, spec.rhs)))
    config = matmul.Config(64, 256, split="n", cluster=cluster, delay_release=delay_release)
    product = jax.jit(lambda lhs, rhs: matmul.run(spec, config, lhs, rhs))
    expected = np.asarray(product(lhs, rhs))
    for _ in range(200):
        out = product(lhs, rhs)
    assert np.asarray(out).tobytes() == expected.tobytes()
