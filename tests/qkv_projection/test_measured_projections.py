"""The projection in benchmarks and tuning."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_accurate, by_number, plain_and_exact
from typer.testing import CliRunner

from jaxkernels.cli.app import app
from jaxkernels.ops.qkv_projection.cases import CASE, QkvProjectionCase

CASES = [
    QkvProjectionCase(2, 24, 32, 4, 2, 16),
    QkvProjectionCase(2, 24, 32, 4, 4, 16, pairs="neighbours", dtype="float16"),
    QkvProjectionCase(1, 7, 32, 3, 1, 10, pairs=None, dtype="float32"),
]


def test_bench(tmp_path):
    path = tmp_path / "qkv.json"
    result = CliRunner().invoke(app, ["bench", "qkv", "--regime", "burst", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    shapes = ["B2 T24 D32 N4/2 H16 halves", "B2 T24 D32 N2 H16 neighbours", "B1 T24 D32 N2/1 H16 plain"]
    assert [row["shape"] for row in rows] == [f"{shape}{way}" for shape in shapes for way in ("", " backward")]
    for row in rows:
        assert {(side["name"], side["is_ours"]) for side in row["sides"]} == {("xla", False), ("xla", True)}
        assert row["checked"] == "all"
        assert all(side["error_ratio"] <= 2 for side in row["sides"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.description)
def test_plain_projection_is_the_projection(case):
    operands = case.operands()
    plain = lambda spec, *xs: case.plain(dict(zip(operands, xs)))
    actual = jax.jit(lambda xs: case.forward(xs, backend="xla"))(operands)
    assert_accurate(by_number(actual), *plain_and_exact(plain, None, None, list(operands.values())))


def test_rotation_keeps_the_length_of_pairs_and_turns_by_the_position():
    """A token's own angle: the product of two rotated vectors depends on the difference of their positions alone."""
    for pairs in ("halves", "neighbours"):
        case = QkvProjectionCase(1, 9, 16, 1, 1, 16, pairs=pairs, dtype="float32")
        operands = {name: jnp.asarray(x) for name, x in case.operands().items()}
        operands["x"] = jnp.broadcast_to(operands["x"][:, :1], operands["x"].shape)  # The same token everywhere.
        query, key, value = case.plain(operands)
        logits = np.asarray(query[0, :, 0] @ key[0, :, 0].T)
        for offset in (-3, 0, 5):
            np.testing.assert_allclose(np.diagonal(logits, offset), logits.diagonal(offset)[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.ptp(np.asarray(value), axis=1), 0, atol=1e-6)


def test_shapes_of_the_command_line():
    sizes = (2, 24, 32, 4, 2, 16)
    parse = lambda *words: CASE.parse(sizes, dict(dtype="float32"), words)
    assert parse() == QkvProjectionCase(*sizes, dtype="float32")
    assert parse("neighbours") == QkvProjectionCase(*sizes, dtype="float32", pairs="neighbours")
    assert parse("plain") == QkvProjectionCase(*sizes, dtype="float32", pairs=None)
    assert parse("nt") is None
    assert CASE.parse(sizes[:5], {}, ()) is None
