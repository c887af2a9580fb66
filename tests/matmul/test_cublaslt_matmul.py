"""Products by cuBLASLt: the attributes and the handler, on a library that multiplies on the host, and the choice."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import assert_right, make_spec, random_operands
from stand_ins import StandIn

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware, winners
from jaxkernels.ffi import cublaslt as calls
from jaxkernels.ffi.matmul import cublaslt
from jaxkernels.ffi.matmul.cublaslt import Config
from jaxkernels.ops.matmul.spec import MatmulSpec


@pytest.fixture
def stand_in(tmp_path_factory) -> StandIn:
    """The handlers on the CPU backend, with a cuBLASLt that multiplies on the host."""
    made = StandIn.of_process(tmp_path_factory)
    made.cublaslt_events()
    return made


def run(spec: MatmulSpec, config: Config | None = None, operands=None):
    config = config or Config()
    operands = random_operands(spec) if operands is None else operands
    return jax.block_until_ready(jax.jit(lambda *xs: cublaslt.run(spec, config, *xs))(*operands))


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn", "km.nk"])
def test_layouts_and_batches(stand_in, layouts, batch):
    spec = make_spec(7, 10, 13, layouts=layouts, batch=batch, alpha=0.5)
    assert_right(spec, run(spec))
    assert stand_in.cublaslt_events() == [
        "propose wanted=1 workspace=33554432 reductions=2",
        "multiply algorithm=0 workspace=33554432 stream=0x1",
    ]


@pytest.mark.parametrize(
    ("epilogue", "parts"),
    [
        (dict(bias=True), ["bias"]),
        (dict(activation="relu"), ["activation"]),
        (dict(activation="gelu"), ["activation"]),
        (dict(bias=True, activation="relu"), ["bias", "activation"]),
        (dict(bias=True, activation="gelu"), ["bias", "activation"]),
        (dict(activation="silu"), []),
        (dict(bias=True, activation="gelu_erf"), ["bias"]),
        (dict(residual=True), ["residual"]),
        (dict(bias=True, residual=True), ["bias", "residual"]),
        (dict(activation="relu", residual=True), ["activation"]),
        (dict(residual=True, residual_dtype="float32"), []),
        (dict(multiplier=True, residual=True), []),
        (dict(activation="gelu", multiplier=True), ["activation"]),
        (dict(bias=True, activation="gelu", save_preactivation=True), ["bias"]),
        (dict(activation="silu", gradients=True, multiplier=True), []),
        (dict(bias=True, out_dtype="float32"), []),
        (dict(residual=True, out_dtype="float32"), ["residual"]),
        (dict(activation="relu", out_dtype="float32"), []),
    ],
)
def test_epilogues(stand_in, epilogue, parts):
    """cuBLASLt applies these parts, XLA the others."""
    spec = make_spec(9, 12, 17, alpha=0.3, **epilogue)
    assert cublaslt._parts_in_cublaslt(spec) == parts
    assert_right(spec, run(spec))


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(stand_in, out_dtype):
    operands = "float16" if out_dtype == "float16" else "bfloat16"
    spec = make_spec(5, 6, 7, dtypes=(operands, operands), out_dtype=out_dtype)
    assert_right(spec, run(spec))


def test_dimensions_that_are_no_matrix(stand_in):
    """Two free dimensions, contracted dimensions in another order, a batch dimension in the middle."""
    x, y = (np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16) for shape in ((2, 3, 4, 5), (5, 3, 6, 2)))
    numbers = (((0, 3), (3, 0)), ((1,), (1,)))
    spec = dataclasses.replace(
        make_spec(8, 8, 8),
        lhs=jk.core.types.ArrayType.of(x),
        rhs=jk.core.types.ArrayType.of(y),
        dimension_numbers=numbers,
    )
    expected = jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(run(spec, operands=[x, y]).astype(np.float32), expected, atol=0.05)


@pytest.mark.parametrize("epilogue", [{}, dict(bias=True, activation="gelu"), dict(bias=True, residual=True)])
@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn", "km.nk"])
def test_odd_rows_are_padded_or_not(stand_in, layouts, epilogue):
    spec = make_spec(7, 10, 13, layouts=layouts, batch=None if epilogue else 2, **epilogue)
    shapes = {}
    for pads in (True, False):
        f = jax.jit(lambda *xs, pads=pads: cublaslt.run(spec, Config(pads=pads), *xs))
        call = next(line for line in f.lower(*random_operands(spec)).as_text().splitlines() if "jaxkernels_cub" in line)
        found = re.findall(r"tensor<(?:2x)?(\d+x\d+)xbf16>", call)
        shapes[pads] = (*found[:2], found[-1])
        assert_right(spec, run(spec, Config(pads=pads)))
    pairs = (*layouts.split("."), "mn")
    sizes = {"m": 8 if layouts[1] == "m" else 7, "n": 16, "k": 16 if "k" in layouts[1] + layouts[-1] else 13}
    assert shapes[True] == tuple(f"{sizes[a]}x{sizes[b]}" for a, b in pairs)
    sizes = {"m": 7, "n": 10, "k": 13}
    assert shapes[False] == tuple(f"{sizes[a]}x{sizes[b]}" for a, b in pairs)


def test_whole_rows_are_not_padded():
    """m needs no padding where no array has it last."""
    assert cublaslt._padding(make_spec(7, 16, 24)) == {}
    assert cublaslt._padding(make_spec(7, 16, 24, layouts="km.kn")) == {"m": 1}
    assert cublaslt.search_space(make_spec(7, 16, 24)) == tuple(map(Config, range(8)))


def test_cublaslt_is_asked_once_for_a_program(stand_in):
    spec = make_spec(4, 4, 4)
    f = jax.jit(lambda *xs: cublaslt.run(spec, Config(2), *xs))
    operands = random_operands(spec)
    for _ in range(3):
        jax.block_until_ready(f(*operands))
    asked, *products = stand_in.cublaslt_events()
    assert asked == "propose wanted=3 workspace=33554432 reductions=2"
    assert products == ["multiply algorithm=2 workspace=33554432 stream=0x1"] * 3


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        (None, 0, "cuBLASLt has 4 algorithms for this product; got algorithm=5. Use a smaller number."),
        (
            "cublasLtMatmulAlgoGetHeuristic",
            15,
            'cuBLASLt does not multiply these operands; got CUBLAS_STATUS_NOT_SUPPORTED. Use backend="xla".',
        ),
        (
            "cublasLtMatmul",
            14,
            'cuBLASLt failed; got CUBLAS_STATUS_INTERNAL_ERROR of algorithm=0. Use backend="xla".',
        ),
    ],
)
def test_failures_of_cublaslt_are_exceptions(stand_in, function, status, message):
    if function is not None:
        stand_in.fail_in_cublaslt(function, status)
    try:
        with pytest.raises(Exception, match=re.escape(f"matmul[cublaslt]: {message}")):
            run(make_spec(3, 3, 3), Config(0 if function else 5))
    finally:
        if function is not None:
            stand_in.fail_in_cublaslt(function, 0)
    assert_right(spec := make_spec(3, 3, 3), run(spec))


def test_product_without_an_algorithm(stand_in):
    """The library on the host has none with a float32 result of float16 operands."""
    spec = make_spec(3, 3, 3, dtypes=("float16", "float16"), out_dtype="float32")
    message = 'matmul[cublaslt]: cuBLASLt has no algorithm for this product. Use backend="xla".'
    with pytest.raises(Exception, match=re.escape(message)):
        run(spec)


def test_a_buffer_of_another_size_is_refused(stand_in, monkeypatch):
    """A program that somebody wrote by hand reads and writes nothing outside its buffers."""
    ffi_call = jax.ffi.ffi_call

    def call(target, results):
        made = ffi_call(target, results)
        return lambda *operands, **attributes: made(*operands, **attributes | dict(k=np.int64(16)))

    monkeypatch.setattr(jax.ffi, "ffi_call", call)
    message = "matmul[cublaslt]: lhs must have 128 bytes; got 64. Have jaxkernels.ffi.cublaslt call the handler."
    with pytest.raises(Exception, match=re.escape(message)):
        run(make_spec(4, 4, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(m=np.int64(0)), "attribute m must be from 1 to 2147483647; got 0."),
        (dict(lhs_layout="mn"), 'attribute lhs_layout must be one of (mk, km); got "mn".'),
        (dict(activation="silu"), 'attribute activation must be one of (none, relu, gelu); got "silu".'),
        (dict(dtype="float32"), 'attribute dtype must be one of (bfloat16, float16); got "float32".'),
        (dict(algorithm=np.int64(-1)), "attribute algorithm must be from 0 to 63; got -1."),
        (dict(alpha=np.float64(1)), "attribute alpha is missing or of another type; got: "),
    ],
)
def test_attributes_that_are_wrong(stand_in, monkeypatch, changes, message):
    ffi_call = jax.ffi.ffi_call

    def call(target, results):
        made = ffi_call(target, results)
        return lambda *operands, **attributes: made(*operands, **attributes | changes)

    monkeypatch.setattr(jax.ffi, "ffi_call", call)
    with pytest.raises(Exception, match=re.escape(f"matmul[cublaslt]: {message}")):
        run(make_spec(4, 4, 4))


# Limits.

_TAKES = "takes two bfloat16 or two float16 operands"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(8, 8, 8, dtypes=("float32", "float32")), f"{_TAKES}, not float32 and float32"),
        (make_spec(8, 8, 8, dtypes=("float16", "bfloat16")), f"{_TAKES}, not float16 and bfloat16"),
        (make_spec(8, 8, 8, out_dtype="float16"), "returns bfloat16 or float32 of bfloat16 operands, not float16"),
        (make_spec(8, 0, 8), "has no work in an empty product"),
        (
            make_spec(8, 8, 8, target=dataclasses.replace(hardware.lookup("NVIDIA A10"), compute_capability=(7, 5))),
            "needs a CUDA GPU of compute capability 8.0 or newer, the target is NVIDIA A10 (compute capability 7.5)",
        ),
        (
            dataclasses.replace(make_spec(8, 8, 8), precision=jax.lax.DotAlgorithmPreset.F32_F32_F32),
            "accumulates 16-bit products in float32, the precision asked for is F32_F32_F32",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_take(spec, reason):
    assert cublaslt.unsupported(spec) == reason


@pytest.mark.parametrize(("value", "got"), [(-1, "-1"), (64, "64")])
def test_algorithms_are_counted(value, got):
    message = f"matmul[cublaslt]: algorithm must be from 0 to 63; got {got}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Config(value)


def test_any_gpu_of_cuda_is_taken():
    assert cublaslt.unsupported(make_spec(8, 8, 8, target=hardware.lookup("NVIDIA A100-SXM4-80GB"))) is None


def test_library_that_is_missing_is_a_reason(monkeypatch):
    monkeypatch.setattr(calls.handler, "has_cuda", lambda: True)
    monkeypatch.setattr(calls.handler, "has_cuda_device", lambda: True)
    calls.missing.cache_clear()
    try:
        assert (calls.missing() or "").startswith("needs cuBLASLt, and cuda-pathfinder to find it: ")
    finally:
        calls.missing.cache_clear()


def test_export_takes_it_if_the_check_is_disabled():
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    f = jax.jit(lambda x: jk.matmul(x, x, backend="cublaslt"))
    with pytest.raises(ValueError, match="jaxkernels_cublaslt_v1"):
        jax.export.export(f, platforms=["cuda"])(x)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(jk.ffi.CUBLASLT_TARGET)]
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)(x)
    assert "jaxkernels_cublaslt_v1" in exported.mlir_module()


# The choice.


@pytest.fixture
def no_winners(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(winners, "_memo", {})


def test_estimates_never_choose_it(no_winners):
    for sizes in ((4096, 4096, 4096), (16, 4096, 4096), (1000, 999, 777)):
        choice = dispatch.choose("matmul", make_spec(*sizes), None)
        assert choice.backend != "cublaslt"
        assert "cublaslt" not in dict(choice.estimates)


def test_chips_without_estimates_keep_xla(no_winners):
    spec = make_spec(4096, 4096, 4096, target=hardware.lookup("NVIDIA A100-SXM4-80GB"))
    choice = dispatch.choose("matmul", spec, None)
    assert choice.backend != "cublaslt"
    assert "cublaslt" not in choice.close


def test_it_is_always_compared(no_winners):
    """Whatever the estimates of the others are."""
    for sizes in ((4096, 4096, 4096), (1, 4096, 4096), (2415, 10602, 7054)):
        close = dispatch.choose("matmul", make_spec(*sizes), None).close
        assert close[-2:] in (("cublaslt", "xla"), (close[-2], "cublaslt"))
        assert len(close) > 1


def test_comparison_decides_its_algorithm_too(no_winners):
    spec = make_spec(1000, 999, 777)
    close = dispatch.choose("matmul", spec, None).close
    padded, unpadded = [Config(i) for i in range(8)], [Config(i, pads=False) for i in range(2)]
    assert list(dispatch.contenders("matmul", "cublaslt", spec)) == padded + unpadded
    dispatch.store_compared("matmul", "cublaslt", spec, close, 1e-5, Config(2))
    choice = dispatch.choose("matmul", spec, None)
    assert (choice.backend, choice.config, choice.source) == ("cublaslt", Config(2), "compared")
    assert dispatch.config_of("matmul", "cublaslt", spec) == Config(0)  # A call that names the backend has the first.
    winners._memo.clear()
    assert dispatch.choose("matmul", spec, None).config == Config(2)  # From the disk.


def test_winners_without_it_stay(no_winners):
    """The package's table was measured before this backend was there."""
    spec = make_spec(1000, 999, 777)
    usable = [name for name in dispatch.usable_backends("matmul", spec) if name != "cublaslt"]
    dispatch._store(winners.AUTO, "matmul", "pallas", spec, usable, 1e-5)
    assert dispatch.choose("matmul", spec, None).backend == "pallas"


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", range(3))
def test_algorithms_on_a_gpu(algorithm):
    spec = make_spec(640, 520, 1024, bias=True, activation="gelu", target=hardware.chip_of(jax.devices()[0]))
    assert_right(spec, run(spec, Config(algorithm)))


@pytest.mark.gpu
def test_too_many_algorithms_on_a_gpu():
    spec = make_spec(64, 64, 64, target=hardware.chip_of(jax.devices()[0]))
    with pytest.raises(Exception, match=r"matmul\[cublaslt\]: cuBLASLt has \d+ algorithms for this product; got algor"):
        run(spec, Config(63))
