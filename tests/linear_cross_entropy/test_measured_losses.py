"""Linear cross entropy in benchmarks and tuning, and on a GPU."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import CASES, cotangents, ours, plain
from numerics import assert_accurate, assert_same_bits, in_float64, with_gradients
from typer.testing import CliRunner

from jaxkernels.cli.app import app
from jaxkernels.core import dispatch, hardware, registry, winners
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy.cases import CASE, LinearCrossEntropyCase
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, FUSED, LinearCrossEntropySpec
from jaxkernels.triton.linear_cross_entropy import problem
from jaxkernels.tuning import tuner

on_both = pytest.mark.parametrize("reduction", ["none", "mean"])


def test_bench(tmp_path):
    path = tmp_path / "lce.json"
    result = CliRunner().invoke(app, ["bench", "lce", "--regime", "burst", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["shape"] for row in rows] == [
        "256x64x512 value and gradients", "255x64x511", "255x64x511 backward",
    ]  # fmt: skip
    for row in rows:
        sides = {(side["name"], side["is_ours"]) for side in row["sides"]}
        assert sides == {("stored", False), ("optax", False), ("xla", True)}
        assert row["checked"] == "all"
        assert all(side["error_ratio"] <= 2 for side in row["sides"])


def test_shapes_of_the_command_line():
    parse = lambda *words: CASE.parse((8, 4, 16), dict(dtype="float32"), words)
    assert parse() == LinearCrossEntropyCase(8, 4, 16, dtype="float32")
    assert parse("step", "dv") == LinearCrossEntropyCase(8, 4, 16, dtype="float32", step=True, vocab_axis=1)
    assert parse("nt") is None
    assert CASE.parse((8, 4), {}, ()) is None


@pytest.mark.parametrize("kernel", [FUSED, BACKWARD])
def test_tuning_measures_chunks(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(pathlib.Path(tmp_path)))
    monkeypatch.setattr(winners, "_memo", {})
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.float32))
    chip = hardware.chip_of(jax.devices()[0])
    spec = LinearCrossEntropySpec(
        array(3000, 8), array(8, 16), jnp.dtype(jnp.float32), chip, gradients=("x", "w"), z_loss=1e-3
    )
    result = tuner.tune(kernel, spec, budget_s=1000.0)
    assert [candidate.reason for candidate in result.candidates] == [None] * 3
    assert {candidate.config.chunk for candidate in result.candidates} == {16777216, 1024, 2048}
    assert result.winner is not None
    assert dispatch.choose(kernel, spec, None).config == result.winner.config


def test_labels_to_tune_on_are_in_the_vocabulary():
    chip = hardware.lookup(hardware.DEFAULT_CUDA_TARGET)
    spec = registry.part("linear_cross_entropy", "tuning").probe(chip)
    labels = np.asarray(spec.draw(("labels",), jax.devices("cpu")[0])["labels"])
    assert labels.dtype == np.int32
    assert len(np.unique(labels)) == 4096
    assert (labels < spec.vocab_size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("named", ["xla", "triton"])
@on_both
@pytest.mark.parametrize(
    "case", [*CASES, LinearCrossEntropyCase(4096, 1024, 50257), LinearCrossEntropyCase(5000, 768, 32768, vocab_axis=1)],
    ids=lambda case: case.id,
)  # fmt: skip
def test_error_rule_on_a_gpu(case, reduction, named):
    options: dict[str, Any] = dict(config=None) if case.tokens > 1000 else {}
    if named == "triton":
        options = dict(backend="triton", config=problem.Config(**{} if case.tokens > 1000 else dict(chunk=150)))
    operands, cts = case.operands(), cotangents(case, reduction)
    if named == "triton" and case.bias:
        with pytest.raises(NotImplementedError, match="does not compute the gradient of the bias"):
            with_gradients(lambda xs: ours(case, reduction, xs, **options), operands, cts)
        return
    actual = with_gradients(lambda xs: ours(case, reduction, xs, **options), operands, cts)
    expected = with_gradients(lambda xs: plain(case, reduction, xs), operands, cts)
    assert_accurate(actual, expected, in_float64(lambda xs: plain(case, reduction, xs), operands, cts))


@pytest.mark.gpu
def test_memory_of_a_large_vocabulary():
    """16,384 tokens x 128,256 logits take 4.2 GB in bfloat16."""
    case = LinearCrossEntropyCase(16384, 4096, 128256)
    draws = {name: jax.ShapeDtypeStruct(draw.shape, draw.dtype) for name, draw in case.draws.items()}
    labels = jax.ShapeDtypeStruct((16384,), jnp.int32)

    def program(x: jax.Array, w: jax.Array, labels: jax.Array) -> Any:
        return jax.value_and_grad(lambda x, w: case.run(dict(x=x, w=w, labels=labels), reduction="mean"), (0, 1))(x, w)

    compiled = jax.jit(program).lower(draws["x"], draws["w"], labels).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.temp_size_in_bytes < 4e9


@pytest.mark.gpu
def test_steps_repeat_bit_for_bit():
    case = LinearCrossEntropyCase(8192, 1024, 50304)
    operands = {name: jnp.asarray(x) for name, x in case.operands().items()}
    f = jax.jit(jax.value_and_grad(lambda w: case.run(operands | dict(w=w), reduction="mean")))
    assert_same_bits(f(operands["w"]), f(operands["w"]))
