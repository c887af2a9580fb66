"""A new operation is a folder and one entry in the registry: everything else finds it there."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numerics import assert_accurate, with_gradients
from typer.testing import CliRunner

import jaxkernels as jk
from jaxkernels.bench import suites
from jaxkernels.cli import doctor
from jaxkernels.cli.app import app
from jaxkernels.core import dispatch, hardware, registry, winners
from jaxkernels.core.registry import Entry, Operation
from jaxkernels.core.types import ArrayType
from jaxkernels.tuning import tuner


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The entry in the registry."""
    kernels = {"scale_rows": {"pallas": Entry(("toy_operation.pallas",)), "xla": Entry(("toy_operation.reference",))}}
    monkeypatch.setitem(registry.OPERATIONS, "scale_rows", Operation("toy_operation", kernels))
    for key, entry in registry.entries().items():
        monkeypatch.setitem(dispatch.REGISTRY, key, entry)
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(winners, "_memo", {})
    dispatch.load.cache_clear()


def arrays(m: int = 16, n: int = 6) -> tuple[jax.Array, jax.Array]:
    x, s = jax.random.normal(jax.random.key(0), (m, n)), jax.random.normal(jax.random.key(1), (m,))
    return x, s


def scale_rows(x: jax.Array, s: jax.Array, backend: str | None = None) -> jax.Array:
    from toy_operation.api import scale_rows

    return scale_rows(x, s, backend=backend)


@pytest.mark.parametrize("name", [None, "pallas", "xla"])
def test_transforms(name: str | None) -> None:
    x, s = arrays()
    f = lambda x, s: scale_rows(x, s, name)
    np.testing.assert_allclose(f(x, s), x * s[:, None], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(x, s), x * s[:, None], rtol=1e-6)
    for actual, expected in zip(
        jax.grad(lambda x, s: jnp.sin(f(x, s)).sum(), argnums=(0, 1))(x, s),
        jax.grad(lambda x, s: jnp.sin(x * s[:, None]).sum(), argnums=(0, 1))(x, s),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    xs = jnp.stack([x, x + 1, x - 2])
    np.testing.assert_allclose(jax.vmap(f, in_axes=(0, None))(xs, s), xs * s[:, None], rtol=1e-6)
    hessian = jax.hessian(lambda s: (f(x, s) ** 2).sum())(s)
    np.testing.assert_allclose(hessian, 2 * jnp.diag((x**2).sum(1)), rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sharding(kind: AxisType) -> None:
    x, s = arrays(64)
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))
        compiled = jax.jit(scale_rows).lower(place(x, "rows", "columns"), place(s, "rows")).compile()
        out = compiled(place(x, "rows", "columns"), place(s, "rows"))
        assert out.sharding.spec == PartitionSpec("rows", "columns")
        assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "all-to-all"))
        np.testing.assert_allclose(out, x * s[:, None], rtol=1e-6)


def test_explain_and_refusals() -> None:
    text = str(jk.explain(scale_rows, *arrays()))
    assert text.splitlines()[1:] == [
        "scale_rows  x f32[16,6] s f32[16]",
        "  -> pallas  Config(block=8)",
    ]
    (choice,) = jk.explain(scale_rows, *arrays(7)).choices
    assert choice.passed_over == (("pallas", "needs a multiple of 4 rows, got 7"),)
    with raises_exactly(
        NotImplementedError,
        f"scale_rows[pallas]: needs a multiple of 4 rows, got 7. {dispatch.WAY_OUT}",
    ):
        scale_rows(*arrays(7), backend="pallas")


def test_tune() -> None:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.float32))
    from toy_operation.spec import ScaleRowsSpec

    spec = ScaleRowsSpec(array(64, 32), array(64), hardware.chip_of(jax.devices()[0]))
    result = tuner.tune("scale_rows", spec, budget_s=1000.0)
    assert {(c.backend, c.reason) for c in result.candidates} == {("pallas", None), ("xla", None)}
    assert len(result.candidates) == 3
    assert dispatch.is_tuned("scale_rows", spec, None)
    assert result.winner is not None
    assert dispatch.choose("scale_rows", spec, None).backend == result.winner.backend


def test_bench(tmp_path: pathlib.Path) -> None:
    assert suites.kinds() == ("gemm", "qkv", "attention", "norm", "lce", "scale-rows", "train")
    assert "scale-rows-smoke" in suites.all_suites()
    path = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["bench", "scale-rows", "--regime", "burst", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["64x32", "64x32 backward"]
    for row in rows:
        assert {(side["name"], side["is_ours"]) for side in row["sides"]} == {("xla", False), ("pallas", True)}
        assert row["checked"] == "all"


def test_command_line_refuses_other_shapes() -> None:
    result = CliRunner().invoke(app, ["bench", "scale-rows", "--shapes", "4x4x4"])
    assert "a shape of scale-rows is MxN, then any of :DTYPE :backward; got '4x4x4'." in " ".join(result.output.split())


def test_doctor() -> None:
    (pallas,) = [backend for backend in doctor.examine().backends if backend.name == "pallas"]
    assert pallas.name == "pallas"


@pytest.mark.parametrize("name", ["pallas", "xla"])
def test_error_rule(name: str) -> None:
    """The rule of the generic tests, for a case of the operation."""
    from toy_operation.cases import ScaleRowsCase

    case = ScaleRowsCase(24, 40, "bfloat16")
    rng = np.random.default_rng(0)
    operands = {name: draw.from_numpy(rng) for name, draw in case.draws.items()}
    cotangent = case.out_type.from_numpy(rng)
    actual = with_gradients(lambda xs: case.run(xs, backend=name), operands, cotangent)
    plain = with_gradients(case.plain, operands, cotangent)
    with jax.enable_x64(True):
        exact = with_gradients(
            case.plain, {n: x.astype(np.float64) for n, x in operands.items()}, cotangent.astype(np.float64)
        )
    assert_accurate(actual, plain, exact)
