"""`jaxkernels tune --calibrate`: fits to synthetic times, which rows of files count, the command and its messages."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from test_bench import rows
from test_tuning_spaces import attention_spec, matmul_spec
from typer.testing import CliRunner, Result

from jaxkernels import cli
from jaxkernels.bench import measured, results, suites
from jaxkernels.bench.results import Results, TimedKernel
from jaxkernels.core import dispatch, hardware, plain, winners
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Samples
from jaxkernels.core.problems import Problem
from jaxkernels.core.types import ArrayType
from jaxkernels.ffi.attention import forward
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.terms import Band
from jaxkernels.ops.matmul import reference as xla_matmul
from jaxkernels.ops.matmul.cases import MatmulCase
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.tuning import calibration
from jaxkernels.tuning.calibration import Time

H200 = hardware.lookup("NVIDIA H200")
CPU = hardware.host()


@dataclasses.dataclass(frozen=True)
class Constants:
    rate: float
    launch: float
    unused: float = 5.0


def estimate(spec: int, config: int, constants: Constants) -> float:
    """`spec` units of work in `config` parts."""
    return constants.launch * config + spec / constants.rate


TRUE = Constants(rate=8e12, launch=3e-6)
DISTORTED = Constants(rate=5e12, launch=6e-6)


def times(noise: float, seed: int = 0) -> list[Time]:
    draw = np.random.default_rng(seed)
    return [
        Time(work, parts, estimate(work, parts, TRUE) * math.exp(noise * draw.normal()))
        for work in (int(x) for x in np.geomspace(1e6, 1e10, 40))
        for parts in (1, 2, 4)
    ]


#: Operands of two dtypes, and an lhs whose contracting dimension is between its other two.
MIXED = dataclasses.replace(matmul_spec(64, 32, 48), lhs=ArrayType((64, 48), jnp.dtype(jnp.float32)))
HALVES = dataclasses.replace(
    matmul_spec(64, 32, 48),
    lhs=ArrayType((8, 48, 8), jnp.dtype(jnp.bfloat16)),
    dimension_numbers=(((1,), (0,)), ((), ())),
)


# The fit.


def test_constants_are_recovered_within_the_noise():
    fit = calibration.fit(estimate, DISTORTED, times(0.03))
    assert fit.new.rate == pytest.approx(TRUE.rate, rel=0.02)
    assert fit.new.launch == pytest.approx(TRUE.launch, rel=0.02)
    assert fit.before.median > 0.3
    assert fit.after.median == pytest.approx(0.03 * 0.674, rel=0.2)
    assert fit.validated.median == pytest.approx(fit.after.median, rel=0.1)
    assert fit.after.p90 == pytest.approx(0.03 * 1.645, rel=0.2)
    assert fit.is_better
    assert all(0 < error < 0.01 for error in fit.standard_errors.values())
    assert (fit.num_times, fit.num_problems) == (120, 40)


def test_exact_times_give_exact_constants():
    assert calibration.fit(estimate, DISTORTED, times(0)).new == TRUE


def test_constants_without_effect_are_kept():
    fit = calibration.fit(estimate, DISTORTED, times(0.03))
    assert fit.kept == {"unused": "no estimate depends on it"}
    assert fit.new.unused == 5.0
    large = [time for time in times(0.03) if time.spec > 1e9]
    fit = calibration.fit(estimate, dataclasses.replace(DISTORTED, launch=3e-9), large * 4)
    assert set(fit.kept) == {"unused", "launch"}
    assert fit.kept["launch"].startswith("its standard error would be ")
    assert fit.new.launch == 3e-9


def test_of_two_constants_with_the_same_effect_one_is_kept():
    product = lambda spec, config, c: spec / (c.rate * c.unused)
    fit = calibration.fit(product, Constants(2e12, 1.0, 2.0), times(0.03)[60:])
    assert len(fit.kept.keys() & {"rate", "unused"}) == 1


def test_outliers_change_little():
    wrong = [dataclasses.replace(t, seconds=5 * t.seconds) if i % 12 == 5 else t for i, t in enumerate(times(0.02))]
    fit = calibration.fit(estimate, DISTORTED, wrong)
    assert fit.new.rate == pytest.approx(TRUE.rate, rel=0.03)
    assert fit.new.launch == pytest.approx(TRUE.launch, rel=0.03)


def test_problems_are_held_out_whole():
    """Times of one problem share an error that only other times of the problem could explain."""
    draw = np.random.default_rng(0)
    names = [f"c{i}" for i in range(12)]
    kind = dataclasses.make_dataclass("PerProblem", [(name, float) for name in names], frozen=True)
    model = lambda spec, config, c: getattr(c, f"c{spec}")
    per_problem = [Time(i, j, math.exp(draw.normal())) for i in range(12) for j in range(4)]
    same = {t.spec: t.seconds for t in per_problem}
    per_problem = [dataclasses.replace(t, seconds=same[t.spec]) for t in per_problem]
    fit = calibration.fit(model, kind(*[1.0] * 12), per_problem)
    assert fit.after.median < 0.02
    assert fit.validated.median == pytest.approx(fit.before.median)
    assert fit.validated.p90 == pytest.approx(fit.before.p90)


def test_fit_prints_errors_and_python():
    fit = calibration.fit(estimate, DISTORTED, times(0))
    lines = str(fit).splitlines()
    assert lines[0].split() == ["|log(estimate", "/", "time)|", "median", "90th", "percentile"]
    assert lines[2].split() == ["fitted", "0.000", "0.000"]
    assert "  kept unused: no estimate depends on it" in lines
    assert fit.as_python().splitlines() == [
        "CONSTANTS = Constants(",
        f"    rate=8e12,  # was 5e12; standard error {fit.standard_errors['rate']:.1%}",
        f"    launch=3e-6,  # was 6e-6; standard error {fit.standard_errors['launch']:.1%}",
        "    unused=5.0,",
        ")",
    ]
    assert eval(fit.as_python().removeprefix("CONSTANTS = "), {"Constants": Constants}) == TRUE


def test_a_fit_that_does_not_generalise_says_so():
    fit = calibration.fit(estimate, TRUE, times(0.03))
    worse = dataclasses.replace(fit, validated=calibration.Errors(1.0, 2.0))
    assert "do not estimate other problems better. Keep those in the code." in str(worse)


def test_fits_that_need_more_times():
    assert calibration.too_few(TRUE, times(0)) is None
    assert calibration.too_few(TRUE, times(0)[:9]) == "a fit needs times of at least 10 problems, there are 3"
    ten = [time for time in times(0) if time.config == 1][:10]
    many = dataclasses.make_dataclass("Many", [(f"c{i}", float, 1.0) for i in range(10)])()
    assert calibration.too_few(many, ten) == "a fit of 10 constants needs more times than that, there are 10"


# The designs.


def test_designs_document_their_constants():
    designs = measured.designs()
    assert {"matmul.cuda.gemm", "matmul.triton.gemm", "attention_forward.cuda.forward"} <= set(designs)
    for design in designs.values():
        values = dataclasses.asdict(design.module.CONSTANTS)
        assert all(type(value) is float and value > 0 for value in values.values())
        documented = design.module.Constants.__doc__
        assert [name for name in values if name not in documented] == []


@pytest.mark.parametrize("name", list(measured.designs()))
def test_every_constant_is_used(name):
    """A change of any constant changes the estimate of some configuration."""
    module = measured.designs()[name].module
    if "attention" in name:
        specs = [attention_spec(64, 64), attention_spec(128, 128, length=512), attention_spec(128, 128, causal=False)]
        specs += [dataclasses.replace(specs[0], deterministic=True)]
        bias = ArrayType((1, 1, 2040, 2040), jnp.dtype(jnp.bfloat16))
        specs += [attention_spec(256, 256)] * ("cudnn" in name or "wide" in name)
        specs += [dataclasses.replace(specs[0], bias=bias)] * ("cudnn" in name or "triton" in name)
        specs += [attention_spec(64, 64, length=16), attention_spec(256, 256, length=500)] * ("triton" in name)
    else:
        sizes = [(4096, 4096, 4096), (64, 512, 8192), (16, 4096, 4096), (1000, 1003, 1004), (4096, 4096, 1001)]
        specs = [matmul_spec(*size, activation=activation) for size in sizes for activation in (None, "gelu")]
        specs += [matmul_spec(8, 8192, 8192), matmul_spec(256, 256, 16384), matmul_spec(4096, 4100, 1000)]
        specs += [matmul_spec(4096, 4096, k) for k in (16, 64, 1000, 1004)]
        like_out = matmul_spec(4096, 4096, 1000).results("matmul")[0]
        specs += [dataclasses.replace(specs[0], multiplier=like_out, preactivation=like_out)]
        exact = matmul_spec(16, 4096, 4096, precision=jax.lax.Precision.HIGHEST, out=jnp.float32)
        float32 = {side: dataclasses.replace(getattr(exact, side), dtype=exact.out_dtype) for side in ("lhs", "rhs")}
        specs += [dataclasses.replace(exact, **float32)] * ("triton" in name)
    space = [(spec, config) for spec in specs for config in module.search_space(spec)]
    before = [module.estimate(*one) for one in space]
    for field in dataclasses.fields(module.Constants):
        moved = dataclasses.replace(module.CONSTANTS, **{field.name: 1.5 * getattr(module.CONSTANTS, field.name)})
        assert [module.estimate(*one, moved) for one in space] != before, field.name


def test_constants_of_a_design_are_recovered():
    """The CUDA attention's model, with times of configurations of its own search space."""
    specs = [attention_spec(d, d, length=s, causal=c) for d in (64, 128) for s in (512, 2048, 8192) for c in (0, 1)]
    draw, true = np.random.default_rng(0), dataclasses.replace(forward.CONSTANTS, flops_per_sm=6e12, step_seconds=4e-7)
    found = [
        Time(spec, config, forward.estimate(spec, config, true) * math.exp(0.02 * draw.normal()))
        for spec in specs
        for config in list(forward.search_space(spec))[::3]
    ]
    fit = calibration.fit(forward.estimate, forward.CONSTANTS, found)
    assert fit.new.flops_per_sm == pytest.approx(6e12, rel=0.05)
    assert fit.new.step_seconds == pytest.approx(4e-7, rel=0.15)
    assert fit.is_better


# Specs as plain values.


@pytest.mark.parametrize(
    "spec",
    [
        matmul_spec(64, 32, 48),
        matmul_spec(64, 32, 48, batch=3, layouts="km.nk", activation="gelu", alpha=0.5, out=jnp.float32),
        matmul_spec(64, 32, 48, precision=jax.lax.Precision.HIGHEST),
        matmul_spec(64, 32, 48, precision=(jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT)),
        matmul_spec(64, 32, 48, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
        matmul_spec(64, 32, 48, bias=ArrayType((32,), jnp.dtype(jnp.float32))),
        attention_spec(128, 64),
        dataclasses.replace(attention_spec(64, 64), window=(5, None), soft_cap=30.0, segments=True),
    ],
    ids=str,
)
def test_specs_are_restored_from_json(spec):
    values = json.loads(json.dumps(plain.describe(spec)))
    assert plain.restore(type(spec), values, H200) == spec


def test_specs_that_are_not_restored():
    assert plain.describe(dataclasses.replace(attention_spec(64, 64), terms=(Band(1, 0),))) is None
    values = plain.describe(matmul_spec(64, 32, 48))
    for changes in (
        {"lhs": "bf16"},
        {"lhs": "bf17[64,48]"},
        {"out_dtype": "float17"},
        {"colour": 1},
        {"alpha": 1.0},
        {"precision": "Precision.SOME"},
        {"precision": ["bfloat16", "bfloat16", "float32", 1, 1, 1, False]},
    ):
        with pytest.raises(ValueError, match=r"do not describe"):
            plain.restore(MatmulSpec, values | changes, H200)
    with pytest.raises(ValueError, match=r"do not describe a AttentionSpec"):
        plain.restore(AttentionSpec, values, H200)


# Rows of benchmarks.


@pytest.fixture
def tuned_backend(registry, monkeypatch) -> types.ModuleType:
    """Backend "fake" of products, with constants, on any platform."""
    module = types.ModuleType("backend_fake_gemm")
    vars(module).update({name: value for name, value in vars(xla_matmul).items() if not name.startswith("__")})
    flops = lambda spec: 2 * spec.gemm.m * spec.gemm.n * spec.gemm.k
    module.Constants, module.CONSTANTS = Constants, DISTORTED
    module.estimate = lambda spec, config, constants=DISTORTED: estimate(flops(spec), 1, constants)
    module.not_estimated = lambda spec, config: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry["matmul", "fake"] = dispatch.Entry((module.__name__,))
    return module


def test_a_row_keeps_the_kernels_of_its_timed_program(tuned_backend, tmp_path):
    problem = Problem(MatmulCase(32, 48, 40, dtype="float32"))
    (row,) = rows(problem, backends=("fake", "xla"))
    (kernel,) = row.ours[0].timed
    assert (kernel.op, kernel.backend, kernel.config) == ("matmul", "fake", {})
    assert kernel.version == dispatch.load("matmul", "fake").version
    assert kernel.spec["lhs"] == "f32[32,40]"
    assert row.fastest_baseline.timed == ()
    results.save(Results({}, (row,)), tmp_path / "a.json")
    (again,) = results.load(tmp_path / "a.json").rows
    assert [side.timed for side in again.sides] == [side.timed for side in row.sides]


def test_a_backward_row_keeps_what_is_timed():
    (row,) = rows(Problem(AttentionCase(2, 24, 24, 4, 2, 16, dtype="float32"), "backward"), backends=("xla",))
    assert [kernel.op for kernel in row.ours[0].timed] == ["attention_backward"]
    assert [text.split(":")[0] for text in row.ours[0].kernels] == ["attention_forward", "attention_backward"]


def saved(path: pathlib.Path, *made: results.Row, device: hardware.Chip = CPU) -> pathlib.Path:
    results.save(Results(dict(device=str(device)), made), path)
    return path


@pytest.fixture
def row(tuned_backend) -> results.Row:
    (made,) = rows(Problem(MatmulCase(32, 48, 40, dtype="float32")), backends=("fake",))
    return made


def with_kernels(row: results.Row, *kernels: TimedKernel, **changes: Any) -> results.Row:
    (side,) = row.ours
    return dataclasses.replace(row, sides=(dataclasses.replace(side, timed=kernels, **changes),))


def read(path: pathlib.Path, chip: hardware.Chip = CPU) -> measured.Measured:
    return measured.read([path], chip, [measured.designs()["matmul.fake.backend_fake_gemm"]])


def test_a_row_is_a_time(row, tmp_path):
    found = read(saved(tmp_path / "a.json", row))
    (time,) = found.times["matmul.fake.backend_fake_gemm"]
    assert (time.config, time.spec.gemm.m, time.spec.target) == (xla_matmul.Config(), 32, CPU)
    assert time.seconds == row.ours[0].seconds
    assert found.left_out == {}


def test_rows_that_are_left_out_are_counted(row, tuned_backend, tmp_path):
    (kernel,) = row.ours[0].timed
    change = lambda **changes: with_kernels(row, dataclasses.replace(kernel, **changes))
    cases = {
        "of the sustained regime": dataclasses.replace(row, regime="sustained"),
        "without a record of the kernel: the file is older, or it is a training step": with_kernels(row),
        "of several kernels of ours together": with_kernels(row, kernel, kernel),
        "of another version of matmul[fake]": change(version=77),
        "of a spec that is not kept in files": change(spec=None),
        "of a configuration or spec that the code does not have": change(config={"block": 3}),
        "of a side that was only looked at once": with_kernels(row, kernel, samples=None),
    }
    found = read(saved(tmp_path / "a.json", *cases.values()))
    assert found.left_out == dict.fromkeys(cases, 1)
    assert found.times == {"matmul.fake.backend_fake_gemm": []}
    found = read(saved(tmp_path / "b.json", row, row, device=H200))
    assert found.left_out == {f"of another chip: {H200}": 2}
    tuned_backend.not_estimated = lambda spec, config: "XLA pads"
    assert read(saved(tmp_path / "c.json", row)).left_out == {"of more than the estimate has: XLA pads": 1}


def test_times_of_baselines_count_for_backends_of_their_names(tmp_path):
    """Of either direction, the kernel that is timed; also of sides that were looked at once."""
    suite = {suite.name: suite for suite in suites.all_suites().values()}
    problems = [("gemm-square", 2), ("attention-train", 0), ("attention-train", 1), ("attention-segments", 0)]
    made = []
    for seconds, (name, place) in enumerate(problems, 1):
        problem = suite[name].problems[place]
        text = dict(suite=name, label="", op=problem.op, shape=problem.shape, dtype=problem.case.dtype, regime="burst")
        numbers = dict(flops=1.0, num_bytes=1, peak_flops_per_s=None, memory_bytes_per_s=None, is_warm=False)
        baseline = "xla" if problem.op == "gemm" else "cudnn"
        sides = (results.Side(baseline, False, float(seconds), None, 0.0),)
        made.append(results.Row(**text, **numbers, sides=sides, refused={}, checked="all"))
    unknown = dataclasses.replace(made[0], shape="1x2x3 nn")
    path = saved(tmp_path / "a.json", *made, unknown, device=H200)
    found = measured.read([path], H200, measured.designs().values())
    times = {name: [time.seconds for time in times] for name, times in found.times.items() if times}
    assert times == {
        "matmul.xla.reference": [1.0],
        "attention_forward.cudnn.forward": [2.0],
        "attention_backward.cudnn.backward": [3.0],
    }
    assert found.left_out == {
        "of a baseline, for a problem that no suite has": 1,
        "of more than the estimate has: XLA makes a bias of masks": 1,
    }
    (time,) = found.times["matmul.xla.reference"]
    assert (time.spec.gemm.m, time.spec.target) == (suite["gemm-square"].problems[2].case.m, H200)


#: m, n, k, a time of XLA's product on an H200 from docs/benchmarks, in microseconds.
CUBLAS = [
    (4096, 4096, 4096, 168.0),
    (8192, 8192, 8192, 1352.7),
    (1, 4096, 14336, 29.4),
    (64, 28672, 4096, 57.4),
    (4096, 4096, 4097, 560.8),
    (4096, 4098, 4096, 234.2),
]


@pytest.mark.parametrize(("m", "n", "k", "microseconds"), CUBLAS)
def test_estimates_of_xla_are_near_measured_times(m, n, k, microseconds):
    spec = matmul_spec(m, n, k)
    assert xla_matmul.not_estimated(spec, xla_matmul.Config()) is None
    assert xla_matmul.estimate(spec, xla_matmul.Config()) * 1e6 == pytest.approx(microseconds, rel=0.08)


def test_an_older_file_is_read(tuned_backend):
    found = read(pathlib.Path(__file__).parent / "data" / "gemm-smoke.json")
    assert found.times == {"matmul.fake.backend_fake_gemm": []}
    assert sum(found.left_out.values()) > 0


def test_a_table_of_winners_is_read():
    design = measured.designs()["matmul.cuda.gemm"]
    table = pathlib.Path(winners.__file__).parent / "tables" / "nvidia_h200.json"
    entries = [entry["key"] for entry in json.loads(table.read_text())]
    found = measured.read([table], H200, [design])
    count = sum(key["backend"] == "cuda" for key in entries)
    assert len(found.times[design.name]) + sum(found.left_out.values()) == count
    h100 = hardware.lookup("NVIDIA H100 80GB HBM3")
    assert measured.read([table], h100, [design]).left_out == {"of another chip: NVIDIA H200": count}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (attention_spec(64, 64), None),
        (dataclasses.replace(attention_spec(64, 64), segments=True), "lengths or segments decide at run time how long"),
        (attention_spec(60, 64), "XLA pads the head dimensions"),
        (dataclasses.replace(attention_spec(64, 64), window=(3, 0)), None),
    ],
)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_cuda_attention_says_what_its_estimate_leaves_out(name, spec, reason):
    module = importlib.import_module(f"jaxkernels.ffi.attention.{name}")
    found = module.not_estimated(spec, module.Config())
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("spec", "changes", "cuda", "triton"),
    [
        (matmul_spec(64, 32, 48, activation="gelu"), {}, None, None),
        (matmul_spec(64, 32, 48, bias=ArrayType((32,), jnp.dtype(jnp.bfloat16))), {}, "XLA converts and pads", None),
        (matmul_spec(64, 32, 48, residual=ArrayType((64, 32), jnp.dtype(jnp.float32))), {}, "XLA converts the", None),
        (matmul_spec(64, 32, 48, activation="gelu"), dict(split_k=2), None, "XLA applies the epilogue"),
        (MIXED, {}, "operands of two dtypes", "operands of two dtypes"),
        (HALVES, {}, "XLA transposes an operand", "XLA transposes an operand"),
    ],
)
def test_products_say_what_their_estimates_leave_out(spec, changes, cuda, triton):
    for name, reason in {"matmul.cuda.gemm": cuda, "matmul.triton.gemm": triton}.items():
        module = measured.designs()[name].module
        found = module.not_estimated(spec, module.Config(block_m=64, block_n=64, **changes))
        assert found is None if reason is None else found.startswith(reason)


# The command.


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["tune", *map(str, args)])


def refusal(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def test_command_fits_a_benchmark(row, tmp_path, monkeypatch):
    (kernel,) = row.ours[0].timed
    monkeypatch.setattr(hardware, "cuda_target", lambda: CPU)
    made = []
    for i, time in enumerate(t for t in times(0.01) if t.config == 1):
        k = time.spec // (2 * 32 * 48) + 1
        spec = kernel.spec | {"lhs": f"f32[32,{k}]", "rhs": f"f32[{k},48]"}
        seconds = estimate(2 * 32 * 48 * k, 1, TRUE) * (1 + 0.01 * (-1) ** i)
        made.append(
            with_kernels(row, dataclasses.replace(kernel, spec=spec), seconds=seconds, samples=Samples.of([[seconds]]))
        )
    path = saved(tmp_path / "a.json", *made, dataclasses.replace(row, regime="sustained"))
    for arguments in (["gemm"], ["--backend=fake"], ["--design=matmul.fake.backend_fake_gemm"]):
        result = invoke(*arguments, f"--calibrate={path}")
        assert result.exit_code == 0, result.output
        count = 2 if arguments == ["gemm"] else 1  # The baseline xla is a backend of another design.
        assert f"left out: {count} times of the sustained regime\n" in result.stdout
        assert "matmul.fake.backend_fake_gemm  40 times of 40 problems on cpu\n" in result.stdout
        text = result.stdout[result.stdout.index("CONSTANTS = ") :].split("\n)")[0] + "\n)"
        fitted = eval(text.removeprefix("CONSTANTS = "), {"Constants": Constants})
        assert fitted.rate == pytest.approx(TRUE.rate, rel=0.02)
        assert fitted.launch == pytest.approx(TRUE.launch, rel=0.02)


def test_command_refuses_to_calibrate_in_one_line(row, tmp_path):
    path = saved(tmp_path / "a.json", row)
    assert refusal(f"--calibrate={tmp_path / 'none.json'}").startswith(
        f"error: tune: {tmp_path / 'none.json'} cannot be read: "
    )
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert refusal(f"--calibrate={other}") == (
        f"error: tune: {other} is not a benchmark of schema 1; its schema is None.\n"
    )
    other.write_text('[{"a": 1}]')
    assert refusal(f"--calibrate={other}") == (
        f"error: tune: {other} is neither a benchmark nor a table of winners: KeyError: 'key'. Use a file that "
        "`jaxkernels bench --json` or `jaxkernels tune --table` wrote.\n"
    )
    result = invoke("gemm", f"--calibrate={path}", f"--chip={H200.name}")
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: tune: the files have too few times on {H200} for any of the cost models; see the reasons above. "
        "Measure more problems with `jaxkernels bench OP --random N --json FILE`, or name the chip with --chip.\n"
    )
    assert "left out: 2 times of another chip: cpu\n" in result.stdout
    reason = "not fitted: a fit needs times of at least 10 problems, there are 0\n"
    assert f"matmul.fake.backend_fake_gemm: {reason}" in result.stdout
    known = ", ".join(measured.designs())
    assert refusal(f"--calibrate={path}", "--design=gemm") == (
        f"error: tune: no cost model with constants is called 'gemm'; use {known}.\n"
    )
    assert refusal("attention", f"--calibrate={path}", "--backend=xla") == (
        f"error: tune: no design of this operation and backend has constants to fit; {known} have. "
        "Leave the operation, --backend or --design out.\n"
    )
    assert "unknown chip 'X1'" in refusal(f"--calibrate={path}", "--chip=X1")
    assert refusal(str(path), f"--calibrate={path}") == (
        f"error: tune: unknown operation {str(path)!r}; repeat --calibrate for each file.\n"
    )
    assert refusal(f"--calibrate={path}", "--shapes=8x8x8") == (
        "error: tune: --calibrate measures nothing and takes no --shapes, --suite, --random, --minutes, --force or "
        "--table. Leave them out.\n"
    )
    assert refusal("gemm", "--design=matmul.cuda.gemm") == (
        "error: tune: --design needs --calibrate, and --chip --calibrate or --times. Name a file with it.\n"
    )
    assert refusal() == "error: tune: no operation is given; use one of gemm, qkv, attention, norm, lce.\n"


def test_a_file_without_its_device_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"schema": 1, "environment": {}, "rows": []}')
    message = (
        f"tune: {path} is neither a benchmark nor a table of winners: KeyError: 'device'. Use a file that "
        "`jaxkernels bench --json` or `jaxkernels tune --table` wrote."
    )
    with raises_exactly(InputError, message):
        measured.read([path], CPU, [])
