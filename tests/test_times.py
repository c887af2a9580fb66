"""Times of similar problems: the regression, the table, and the choice of backends by both."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import h200, needs_aot
from typer.testing import CliRunner

import jaxkernels
from jaxkernels import cli
from jaxkernels.bench import measured, results
from jaxkernels.bench.results import Results, Row, Side, TimedKernel
from jaxkernels.core import dispatch, hardware, plain, registry, times
from jaxkernels.core.dice import Dice
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import tuning as attention_tuning
from jaxkernels.ops.matmul import cublas
from jaxkernels.ops.matmul import tuning as matmul_tuning
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.triton import calls
from jaxkernels.triton.matmul import gemm
from jaxkernels.tuning import choices

H200 = hardware.lookup("NVIDIA H200")
H100 = hardware.lookup("NVIDIA H100 80GB HBM3")


def product(
    m: int, n: int, k: int, *, dtype: str = "bfloat16", target: hardware.Chip = H200, **fields: Any
) -> MatmulSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(dtype))
    return MatmulSpec(array(m, k), array(k, n), (((1,), (0,)), ((), ())), jnp.dtype(dtype), target, **fields)


def problem(spec: MatmulSpec, **seconds: float) -> times.Problem:
    """A problem with times of the default configurations of backends."""
    of_backend = {}
    for name, t in seconds.items():
        backend = dispatch.load("matmul", name)
        config = dispatch.default_config("matmul", name, spec)
        of_backend[name] = backend.version, backend.encode(config), t
    return times.Problem("matmul", plain.describe(spec) or {}, of_backend, min(seconds.values()))


def estimate_of(spec: MatmulSpec, name: str) -> times.Estimate:
    """The estimate of a backend's default configuration."""
    backend, config = dispatch.load("matmul", name), dispatch.default_config("matmul", name, spec)
    seconds = backend.estimate(spec, config)
    assert seconds is not None
    return times.Estimate(name, dispatch.name_of(backend.design_of(config)), config, seconds)


def estimate(spec: MatmulSpec, name: str) -> float:
    return estimate_of(spec, name).seconds


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table of times that stands in the place of the package's, for an H200."""
    monkeypatch.setattr(times, "_TABLES", tmp_path)

    def write(problems: list[times.Problem]) -> pathlib.Path:
        path = tmp_path / "nvidia_h200.json"
        times.write(path, problems)
        forget()
        return path

    yield write
    forget()


def forget() -> None:
    times._read_table.cache_clear()
    times._regression.cache_clear()
    times._errors.cache_clear()


# The regression.


def test_regression_interpolates_and_returns_to_the_mean():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 10, (200, 2))
    f = lambda x: 0.3 * np.sin(x[..., 0]) + 0.1 * x[..., 1]
    regression = times.Regression(points.tolist(), f(points).tolist())
    inside = rng.uniform(1, 9, (50, 2))
    errors = [regression(x) - f(x) for x in inside]
    assert np.max(np.abs(errors)) < 0.15
    assert regression([1e4, 1e4]) == pytest.approx(float(np.mean(f(points))), abs=1e-6)


def test_regression_takes_one_point_twice():
    regression = times.Regression([[1.0], [1.0], [5.0]], [0.0, 1.0, 3.0])
    assert 0.4 < regression([1.0]) < 0.7


# The choice.

SIZES = [(m, n, 1024) for m in (512, 1024, 2048, 4096) for n in (512, 1024, 2048, 4096)]


def test_a_wrong_cost_model_is_corrected_where_similar_problems_were_measured(table):
    """The CUDA kernel takes three times its estimate from 2,048 rows on, and half below; XLA takes its estimate."""
    factor = lambda m: 3.0 if m >= 2048 else 0.5
    specs = [product(*size) for size in SIZES]
    table([problem(s, cuda=factor(s.gemm.m) * estimate(s, "cuda"), xla=estimate(s, "xla")) for s in specs])
    for m, backend in ((600, "cuda"), (3800, "xla")):
        spec = product(m, 1800, 1024)
        choice = dispatch.choose("matmul", spec, None)
        assert choice.backend == backend
        assert dict(choice.estimates)["cuda"] == pytest.approx(factor(m) * estimate(spec, "cuda"), rel=0.35)
        assert set(dict(choice.estimates)) == {"cuda", "xla"}


def test_times_of_another_version_do_not_count(table):
    problems = [problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES]
    older = [
        dataclasses.replace(p, times={name: (version - 1, *rest) for name, (version, *rest) in p.times.items()})
        for p in problems
    ]
    table(older)
    assert dispatch.choose("matmul", product(1000, 1000, 1000), None).estimates == ()
    table(problems)
    assert dispatch.choose("matmul", product(1000, 1000, 1000), None).backend == "xla"


def test_few_times_do_not_count(table):
    problems = [problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES]
    table(problems[: times.ENOUGH - 1])
    assert dispatch.choose("matmul", product(1000, 1000, 1000), None).backend == "cuda"
    table(problems[: times.ENOUGH])
    assert dispatch.choose("matmul", product(1000, 1000, 1000), None).backend == "xla"


def test_a_design_without_times_takes_those_of_its_backend(table):
    table([problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES])
    few = product(16, 4096, 4096)
    assert type(dispatch.default_config("matmul", "cuda", few)).__module__.endswith("few_rows")
    assert dict(dispatch.choose("matmul", few, None).estimates)["cuda"] > 1e-2


def test_an_h100_takes_the_times_of_an_h200(table):
    table([problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES])
    assert dispatch.choose("matmul", product(1000, 1000, 1000, target=H100), None).backend == "xla"
    h100_pcie = hardware.lookup("NVIDIA H100 PCIe")
    assert dispatch.choose("matmul", product(1000, 1000, 1000, target=h100_pcie), None).estimates == ()


def test_an_h100_counts_as_an_h200():
    """Also its memory: some cost models know that it is slower, and others do not."""
    spec = product(64, 28672, 4096)
    choice = dispatch.choose("matmul", spec, None)
    assert len(choice.estimates) >= 3
    assert dispatch.choose("matmul", dataclasses.replace(spec, target=H100), None).estimates == choice.estimates


def test_kinds_without_features_are_left_to_the_order(table):
    table([problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES])
    for spec in (product(1024, 1024, 1024, dtype="float32"), product(64, 64, 64, precision="highest")):
        assert dispatch.choose("matmul", spec, None).estimates == ()


def test_sizes_that_are_not_known_yet_are_left_to_the_order(monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", H200.name)
    shapes = [jax.export.symbolic_shape(shape) for shape in ("m, 8", "8, 16")]
    exported = jax.export.export(jax.jit(jaxkernels.matmul), platforms=("cuda",))
    exported(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


@pytest.mark.usefixtures("as_if_triton_was_installed")
def test_estimates_are_the_same_without_triton():
    spec = product(1000, 3000, 500)
    estimates = [estimate_of(spec, name) for name in ("cuda", "pallas", "triton", "xla")]
    found = times.corrections_of("matmul", spec, estimates)
    assert set(found) == {"cuda", "pallas", "triton", "xla"}
    without = times.corrections_of("matmul", spec, [x for x in estimates if x.backend != "triton"])
    assert without == {name: correction for name, correction in found.items() if name != "triton"}


def test_a_damaged_table_is_ignored_with_a_warning(table):
    path = table([problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES])
    for damage in (
        path.read_text()[:-20],
        "{}",
        '[{"op": 1}]',
        '[{"op":"matmul","spec":{},"times":{"xla":[1]},"fastest":1}]',
    ):
        path.write_text(damage)
        forget()
        if damage == "{}":  # A table without problems.
            assert times.read(path) == ()
            continue
        with pytest.warns(UserWarning, match=r"times: ignored .*nvidia_h200.json: it is no table of times. Install"):
            assert dispatch.choose("matmul", product(1000, 1000, 1000), None).backend == "cuda"


# The package's table.


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[times.Problem]]:
    by_op = collections.defaultdict(list)
    for p in times.table_of(H200):
        by_op[p.op].append(p)
    return by_op


@pytest.mark.parametrize(("op", "least"), [("matmul", 400), ("attention_forward", 150), ("attention_backward", 100)])
def test_the_package_has_times_of_many_problems(shipped, op, least):
    assert len(shipped[op]) >= least
    current = [times.errors_of(op, p, H200) for p in shipped[op]]
    assert sum(map(bool, current)) > 0.9 * len(current), "measure again: versions have changed"


@pytest.mark.parametrize(
    ("op", "least"), [("matmul", 0.961), ("attention_forward", 0.89), ("attention_backward", 0.92)]
)
def test_chosen_backends_are_fast_on_problems_left_out(shipped, op, least):
    """The lower bounds are the values in docs/choice.md, rounded down."""
    found = choices.validate(op, shipped[op], H200)
    assert found is not None
    assert found.corrected > least
    assert found.estimated < found.corrected < found.best <= 1


def test_an_outer_product_is_not_compared(monkeypatch):
    """XLA fuses it with other work: 110 x 1 x 10755 and its gradients took 6.8 us with Triton, 4.7 us with XLA."""
    monkeypatch.setattr(calls, "missing", lambda: None)
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA H100 80GB HBM3")

    def choice_of(k: int) -> dispatch.Choice:
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((110, k), (k, 10755))]
        (choice,) = jaxkernels.explain(jaxkernels.matmul, *operands, platform="cuda").choices
        return choice

    assert (choice_of(1).backend, choice_of(1).close) == ("xla", ())
    assert "triton" in choice_of(16).close


@pytest.mark.parametrize(
    ("m", "n", "k", "not_backend"),
    [(4, 1, 26518, "cuda"), (32, 32, 32, "cuda"), (20413, 25, 142, "cuda"), (8192, 8192, 8192, "triton")],
)
def test_measured_losers_are_not_chosen(m, n, k, not_backend):
    """They took 2 to 20 times as long as XLA on an H200; Triton's 8192 x 8192 1.2 times as long as ours."""
    choice = dispatch.choose("matmul", product(m, n, k), None)
    assert choice.backend != not_backend
    assert len(choice.estimates) >= 3  # Triton may be missing.


# Features.


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_random_problems_have_features(name):
    draw = registry.part(name, "random_problems").draw
    tuning = registry.part(name, "tuning")
    sizes = set()
    for seed in range(40):
        for op, spec in measured.kernels_of(draw(Dice(seed, 32768)), "xla"):
            for backend in dispatch.usable_backends(op, spec):
                point = tuning.features(op, spec, dispatch.default_config(op, backend, spec))
                if point is not None:
                    assert all(map(math.isfinite, point))
                    sizes.add(len(point))
    assert len(sizes) == 1


def test_similar_products_are_near():
    at = lambda *size, **fields: np.array(matmul_tuning.features("matmul", product(*size, **fields), None))
    distance = lambda x, y: float(np.linalg.norm(x - y))
    here = at(1024, 1024, 1024)
    assert distance(here, at(1032, 1024, 1024)) < 0.5
    assert distance(here, at(2048, 1024, 1024)) < distance(here, at(16384, 1024, 1024))
    assert distance(here, at(1024, 1023, 1024)) > 3
    assert distance(here, at(1024, 1024, 1024, activation="gelu")) >= 3


def test_attentions_with_terms_of_ones_own_have_no_features():
    spec = attention_tuning.probe(H200)
    assert attention_tuning.features("attention_forward", spec, None) is not None
    assert attention_tuning.features("attention_forward", dataclasses.replace(spec, soft_cap=30.0), None) is None


# From benchmarks to a table.


def saved(path: pathlib.Path, count: int = 12, device: hardware.Chip = H200) -> pathlib.Path:
    """A benchmark: the CUDA kernel takes twice its estimate, the baseline XLA takes its own."""
    rows = []
    for i in range(count):
        spec = product(256 + 64 * i, 512, 1024)
        backend, config = dispatch.load("matmul", "cuda"), dispatch.default_config("matmul", "cuda", spec)
        kernel = TimedKernel("matmul", "cuda", backend.version, backend.encode(config), plain.describe(spec))
        sides = (
            Side("cuda", True, 2 * estimate(spec, "cuda"), None, 0.5, timed=(kernel,)),
            Side("xla", False, estimate(spec, "xla"), None, 0.5),
            Side("cublaslt", False, estimate(spec, "xla") / 2, None, 0.5),
        )
        rows.append(
            Row(
                "gemm-random-0",
                f"#{i}",
                "gemm",
                f"{i}",
                "bfloat16",
                "burst",
                1.0,
                1,
                None,
                None,
                False,
                sides,
                {},
                "all",
            )
        )
    results.save(Results(dict(device=str(device)), tuple(rows)), path)
    return path


def invoke(*args: object):
    return CliRunner().invoke(cli.app, ["tune", *map(str, args)])


def test_the_command_makes_a_table_of_benchmarks(tmp_path):
    bench, made = saved(tmp_path / "bench.json"), tmp_path / "times.json"
    result = invoke("--times", bench, "--table", made, "--chip", "NVIDIA H200")
    assert result.exit_code == 0, result.output
    assert "matmul: 12 problems. Speed of the chosen backend relative to the fastest way" in result.output
    problems = times.read(made)
    assert len(problems) == 12
    spec = product(256, 512, 1024)
    assert problems[0].spec == plain.describe(spec)
    assert {name: seconds for name, (_, _, seconds) in problems[0].times.items()} == pytest.approx(
        dict(cuda=2 * estimate(spec, "cuda"), xla=estimate(spec, "xla")), rel=1e-5
    )
    assert problems[0].fastest == pytest.approx(estimate(spec, "xla") / 2, rel=1e-5)  # Files have six digits.
    errors = [times.errors_of("matmul", p, H200) for p in problems]
    for design in (("cuda", "gemm"), ("xla",)):
        (point, _), *_ = [error for key, error in errors[0].items() if key[0] == design[0]]
        expected = math.log(2) if design[0] == "cuda" else 0
        assert times.regression_of(errors, *design)(point) == pytest.approx(expected, abs=0.02)


def test_the_command_refuses_in_one_line(tmp_path):
    bench = saved(tmp_path / "bench.json", device=H100)
    refusal = lambda *args: invoke(*args).output
    assert refusal("--times", bench) == "error: tune: --times needs a file to write. Name it with --table.\n"
    assert refusal("gemm", "--times", bench, "--table", tmp_path / "t") == (
        "error: tune: --times measures nothing and takes no operation, --shapes, --suite, --random, --minutes, "
        "--force, --calibrate, --design or --backend. Leave them out.\n"
    )
    assert refusal("--times", bench, "--table", tmp_path / "t", "--chip", "NVIDIA H200").startswith(
        f"error: tune: {bench} is of another chip: NVIDIA H100 80GB HBM3"
    )
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps([1]))
    assert refusal("--times", broken, "--table", tmp_path / "t").startswith(f"error: tune: {broken} is ")
    unwritable = invoke("--times", saved(tmp_path / "b.json"), "--table", tmp_path, "--chip", "NVIDIA H200")
    assert unwritable.exit_code != 0
    assert f"error: tune: cannot write {tmp_path}: " in unwritable.output


def test_backends_with_times_are_those_of_this_very_chip():
    assert times.measured_backends(H200) == {"cuda", "pallas", "triton", "cudnn", "xla"}
    assert times.measured_backends(H100) == {"cuda", "pallas", "triton", "cudnn", "xla"}
    assert times.measured_backends(dataclasses.replace(H200, name="another")) == set()


def test_times_of_an_h100_count_beside_those_of_an_h200(table):
    path = table([problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES[:5]])
    times.write(path.with_name("nvidia_h100_80gb_hbm3.json"), [
        problem(product(*size), cuda=1.0, xla=1e-6) for size in SIZES[5:]
    ])  # fmt: skip
    forget()
    for chip in (H200, H100):
        assert len(times.table_of(chip)) == len(SIZES)
        assert dispatch.choose("matmul", product(1000, 1000, 1000, target=chip), None).backend == "xla"


def test_an_attention_that_holds_many_logits_is_not_estimated():
    spec = attention_tuning.probe(H200)
    estimates = dict(dispatch.choose("attention_forward", spec, None).estimates)
    assert {"pallas", "cuda", "xla"} <= set(estimates)
    long = dataclasses.replace(spec, **{x: ArrayType((2, 8192, 8, 128), jnp.dtype(jnp.bfloat16)) for x in "qkv"})
    estimates = dict(dispatch.choose("attention_forward", long, None).estimates)
    assert {"pallas", "cuda"} <= set(estimates)
    assert "xla" not in estimates


# What decides between backends, and not between configurations: cost models have it all the same.


def attention(queries: int, keys: int, *, heads: int = 8, kv_heads: int = 8, batch: int = 4, **fields: Any):
    array = lambda length, n: ArrayType((batch, length, n, 64), jnp.dtype(jnp.bfloat16))
    probe = attention_tuning.probe(H200)
    q, k = array(queries, heads), array(keys, kv_heads)
    return dataclasses.replace(probe, **{"q": q, "k": k, "v": k, "causal": False, **fields})


def seconds(op: str, name: str, spec: Any) -> float:
    backend = dispatch.load(op, name)
    found = backend.estimate(spec, dispatch.default_config(op, name, spec))
    assert found is not None
    return found


@pytest.mark.parametrize("op", ["attention_forward", "attention_backward"])
def test_the_estimate_of_xlas_attention_has_operands_and_launches(op):
    many, few = (seconds(op, "xla", attention(65536, keys)) for keys in (1, 2))
    num_bytes = 2 * attention(65536, 1).q.num_bytes
    assert num_bytes / 4.8e12 < many < few
    assert seconds(op, "xla", attention(1, 64)) < seconds(op, "xla", attention(2, 64))
    one_head = seconds(op, "xla", attention(8, 64, kv_heads=1))
    assert one_head < seconds(op, "xla", attention(8, 64, kv_heads=2)), "no key head's transposition"


def test_the_estimate_of_cudnn_knows_what_it_does_not_skip():
    estimate = lambda *sizes, **fields: seconds("attention_forward", "cudnn", attention(*sizes, **fields))
    assert estimate(1, 16384, kv_heads=1) < estimate(2, 16384, kv_heads=1) / 5, "one query's keys are divided"
    int32 = ArrayType((1, 1, 256, 16000), jnp.dtype(jnp.bool_))
    masked = estimate(256, 16000, mask=int32)
    assert masked == estimate(256, 16000, mask=int32, window=(16, 16)), "a window beside a mask becomes a bias"
    odd = ArrayType((1, 1, 256, 16001), jnp.dtype(jnp.bool_))
    assert estimate(256, 16001, mask=odd) > 1.5 * masked
    assert estimate(256, 512, key_lengths=True) > estimate(256, 512) + 2e-6


def test_the_estimate_of_pallas_products_has_copies():
    whole, columns, rows = (seconds("matmul", "pallas", product(*size, 1024)) for size in SIZES_OF_COPIES)
    assert H200.memory_bytes_per_s is not None
    copy = 2 * 2 * 4096 * 4096 / H200.memory_bytes_per_s
    assert columns > whole + copy
    assert whole < rows < whole + copy


#: Whole tiles, a result and an operand whose rows are padded, and rows that are added at the end of the lhs only.
SIZES_OF_COPIES = [(4096, 4096), (4096, 4088), (4089, 4096)]


@pytest.mark.usefixtures("as_if_triton_was_installed")
def test_the_estimate_of_triton_products_has_rows_of_odd_length():
    """Their loads wait one after the other, so few rows need more programs: 11.6 us with 8 parts of k, 23.0 with 1."""
    even, odd = product(2048, 4096, 4096), product(2048, 4095, 4096)
    assert seconds("matmul", "triton", odd) > 1.5 * seconds("matmul", "triton", even)
    few = product(6, 5419, 1486)
    whole = dataclasses.replace(config := dispatch.default_config("matmul", "triton", few), split_k=1)
    assert config.split_k >= 4
    assert gemm.estimate(few, whole) > 1.5 * gemm.estimate(few, config)


@needs_aot
@pytest.mark.parametrize(
    ("m", "n", "k", "batch", "dtype", "out_dtype", "parts"),
    [
        (192, 640, 9632, None, "bfloat16", "bfloat16", 16),
        (104, 761, 761, None, "float16", "float16", 8),  # It also pads k.
        (72, 32, 21120, None, "bfloat16", "float32", 64),
        (40, 15312, 16768, None, "bfloat16", "bfloat16", 4),
        (96, 64, 2000, 5, "bfloat16", "bfloat16", 8),
        (1024, 1024, 1024, None, "bfloat16", "bfloat16", 1),
    ],
)
def test_the_estimate_of_xlas_products_knows_how_xla_divides_k(m, n, k, batch, dtype, out_dtype, parts):
    lead = () if batch is None else (batch,)
    lhs, rhs = (ArrayType((*lead, *shape), jnp.dtype(dtype)) for shape in ((m, k), (k, n)))
    axes = (tuple(range(len(lead))),) * 2
    numbers = (((len(lead) + 1,), (len(lead),)), axes)
    spec = MatmulSpec(lhs, rhs, numbers, jnp.dtype(out_dtype), H200)
    assert cublas._num_parts(spec) == parts
    multiply = functools.partial(jax.lax.dot_general, dimension_numbers=numbers, preferred_element_type=out_dtype)
    device = jax.sharding.SingleDeviceSharding(h200())
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device) for x in (lhs, rhs)]
    options = dict(xla_gpu_autotune_level=0, xla_gpu_enable_triton_gemm=True)  # The tests' XLA has no Triton.
    program = jax.jit(multiply).lower(*operands).compile(options).as_text()
    # The parts are a batch axis of the product, whose result is float32.
    sizes = (*lead, m, n)
    results = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)}
    divided = [
        x for x in results if len(x) == len(sizes) + 1 and all(x.count(size) >= sizes.count(size) for size in sizes)
    ]
    assert {math.prod(x) // math.prod(sizes) for x in divided} - {1} == ({parts} if parts > 1 else set())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_empty_products_are_not_estimated(m, n, k, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA H200")
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    loss = lambda lhs, rhs: jaxkernels.matmul(lhs, rhs).sum()
    choices_ = jaxkernels.explain(jax.grad(loss, (0, 1)), lhs, rhs, platform="cuda").choices
    assert {(choice.backend, choice.estimates) for choice in choices_} == {("xla", ())}
    assert cublas.estimate(product(m, n, k), None) > 0


def test_xla_also_adds_parts_and_pads_in_its_estimate():
    # Both are divided into eight parts. One has a k that XLA pads.
    even, odd = product(104, 760, 768), product(104, 760, 761)
    assert cublas._num_parts(even) == cublas._num_parts(odd) == 8
    seconds = cublas.estimate(even, None)
    assert cublas.estimate(odd, None) > seconds + 1e-6
    eighth = dataclasses.replace(product(104, 760, 96), out_dtype=jnp.dtype(jnp.float32))
    assert cublas._num_parts(eighth) == 1
    assert seconds > cublas.estimate(eighth, None) + 1e-6


def test_the_estimate_of_xlas_products_has_the_activation():
    plain_, relu, gelu = (
        seconds("matmul", "xla", product(4096, 4096, 256, activation=name)) for name in (None, "relu", "gelu_erf")
    )
    assert plain_ == relu
    assert gelu > 2 * relu
