"""The Triton kernels of linear cross entropy: in Triton's interpreter against the reference, compiled for every chip,
and with planted mistakes."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are compiled and interpreted by Triton")

import tritons

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.spec import (
    BACKWARD,
    FORWARD,
    FUSED,
    TANGENT,
    LinearCrossEntropySpec,
)
from jaxkernels.triton import calls, functions
from jaxkernels.triton.linear_cross_entropy import backward, forward, fused, logits_kernel, tangent
from jaxkernels.triton.linear_cross_entropy.problem import Config

pytestmark = pytest.mark.usefixtures("as_if_triton_was_installed")

H200 = hardware.lookup("NVIDIA H200")
A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")

KERNELS = {
    FORWARD: (forward, reference.forward),
    TANGENT: (tangent, reference.tangent),
    BACKWARD: (backward, reference.backward),
    FUSED: (fused, reference.fused),
}

#: What a loss may have. The gradient of a bias is not supported.
EVERYTHING: dict[str, Any] = dict(bias="float32", soft_cap=3.0, logit_sum=True)

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def make_spec(
    tokens: int, width: int, vocab: int, dtype: str = "float32", logits_dtype: str | None = None,
    bias: str | None = None, target: hardware.Chip = H200, gradients: tuple[str, ...] = ("x", "w"), **options: Any,
) -> LinearCrossEntropySpec:  # fmt: skip
    array = lambda dtype, *shape: ArrayType(shape, jnp.dtype(dtype))
    return LinearCrossEntropySpec(
        array(dtype, tokens, width), array(dtype, width, vocab), jnp.dtype(logits_dtype or dtype), target,
        bias=None if bias is None else array(bias, vocab), gradients=gradients, **options,
    )  # fmt: skip


def for_kernel(kernel: str, options: dict[str, Any]) -> dict[str, Any]:
    """With the losses' own options for the kernel that sees them."""
    return options | (dict(label_smoothing=0.1, z_loss=0.01) if kernel == FUSED and options.get("logit_sum") else {})


def draw(kernel: str, spec: LinearCrossEntropySpec, seed: int = 0) -> dict[str, jax.Array]:
    """Operands; some labels are outside of the vocabulary, and the logsumexp is that of the logits."""
    rng = np.random.default_rng(seed)
    named: dict[str, jax.Array] = {}
    for name in dict.fromkeys((*spec.inputs(FORWARD), *spec.inputs(kernel))):
        array = spec.arrays()[name].type
        if name == "labels":
            labels = rng.integers(0, spec.vocab_size, array.shape)
            labels[1:2], labels[3:4] = -1, spec.vocab_size
            named[name] = jnp.asarray(labels, jnp.int32)
        elif name == "lse":
            named[name] = reference.forward(spec, reference.Config(), named)["lse"]
        else:
            named[name] = jnp.asarray(rng.standard_normal(array.shape), array.dtype)
    return named


def run(kernel: str, spec: LinearCrossEntropySpec, block: int, named: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The results in Triton's interpreter, by name."""
    config = Config(chunk=spec.num_tokens, block_vocab=block, num_warps=4)
    with tritons.interpreted(functions, logits_kernel):
        results = KERNELS[kernel][0].run(spec, config, *spec.pack(kernel, named))
    return dict(zip(spec.outputs(kernel), map(np.asarray, results), strict=True))


def assert_right(kernel: str, spec: LinearCrossEntropySpec, block: int, seed: int = 0) -> None:
    named = draw(kernel, spec, seed)
    actual = run(kernel, spec, block, named)
    expected = KERNELS[kernel][1](spec, reference.Config(spec.num_tokens), named)
    # g is rounded once, to x's dtype: by Triton's interpreter towards 0.
    eps = max(float(jnp.finfo(spec.x.dtype).eps), 2e-6)
    for name, value in actual.items():
        wanted = np.asarray(expected[name])
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), name
        value, wanted = value.astype(np.float64), wanted.astype(np.float64)
        is_gradient = name.removeprefix("wide_") in ("dx", "dw")
        tolerance = 2 * eps if is_gradient else 4e-6
        np.testing.assert_allclose(
            value, wanted, rtol=tolerance, atol=tolerance * max(1.0, np.max(np.abs(wanted))), err_msg=name
        )


#: One block, several of them, and a last one that is not full.
BLOCKS = [64, 32]


@pytest.mark.sampled(one_in=4)
@every_kernel
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "options",
    [{}, dict(bias="bfloat16"), dict(soft_cap=1.5), dict(logit_sum=True), EVERYTHING],
    ids=["plain", "bias", "cap", "sum", "everything"],
)
def test_options(kernel, block, options):
    """Of 7 tokens and 45 classes."""
    assert_right(kernel, make_spec(7, 6, 45, **for_kernel(kernel, options)), block)


@pytest.mark.sampled(one_in=4)
@every_kernel
@pytest.mark.parametrize(
    ("dtype", "logits_dtype"),
    [("bfloat16", None), ("bfloat16", "float32"), ("float16", None), ("float16", "float32"), ("float32", None)],
)
def test_dtypes(kernel, dtype, logits_dtype):
    """In float16, gradients have a unit of their own."""
    for options in ({}, EVERYTHING):
        assert_right(kernel, make_spec(6, 8, 50, dtype, logits_dtype, **for_kernel(kernel, options)), 32)


@every_kernel
@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 33), (5, 2, 1), (2, 4, 32), (3, 4, 129)], ids=str)
def test_sizes(kernel, sizes):
    assert_right(kernel, make_spec(*sizes), 32)


@every_kernel
@pytest.mark.sampled(one_in=30)
@pytest.mark.parametrize("seed", range(40))
def test_random(kernel, seed):
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    dtype = pick("bfloat16", "float16", "float32")
    vocab_axis, logit_sum = pick(0, 1), bool(rng.random() < 0.4)
    tokens, width, vocab = (int(n) for n in rng.integers(1, (9, 20, 150)))
    spec = make_spec(
        tokens, width, vocab, dtype, pick(None, "float32"), bias=pick(None, None, "bfloat16", "float32"),
        gradients=pick(("x", "w"), ("x",), ("w",)), soft_cap=pick(None, None, 0.5, 20.0), logit_sum=logit_sum,
        label_smoothing=0.2 if logit_sum and kernel == FUSED else 0.0,
        z_loss=pick(0.0, 1e-3) if kernel == FUSED else 0.0,
    )  # fmt: skip
    if vocab_axis == 0:
        spec = dataclasses.replace(spec, w=ArrayType((vocab, width), spec.w.dtype), vocab_axis=0)
    assert_right(kernel, spec, pick(32, 64, 256), seed)


def test_infinite_logits():
    """A bias of minus infinity leaves a class out, and large ones lose nothing: 1e30 is 1e30 more than 0."""
    spec = make_spec(4, 3, 40, bias="float32")
    named = draw(FUSED, spec) | dict(labels=jnp.arange(4, dtype=jnp.int32))
    for bias in (
        jnp.zeros(40).at[5:].set(-jnp.inf),
        jnp.full(40, -jnp.inf).at[39].set(0),
        jnp.full(40, -1e30),
        jnp.zeros(40).at[7].set(1e30),
        jnp.linspace(-1e4, 1e4, 40),
    ):
        actual = run(FUSED, spec, 32, named | dict(bias=bias))
        expected = reference.fused(spec, reference.Config(4), named | dict(bias=bias))
        for name, value in actual.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_nothing_is_hidden():
    """NaN stays in its token, a logit of infinity is the logsumexp, and a class without a finite logit is minus it."""
    spec = make_spec(4, 3, 40)
    named = draw(FORWARD, spec)
    x = named["x"].at[1].set(jnp.nan)
    actual = run(FORWARD, spec, 32, named | dict(x=x))
    assert np.isfinite(actual["lse"][[0, 2, 3]]).all()
    assert np.isnan(actual["lse"][1])
    spec = make_spec(4, 3, 40, bias="float32")
    for bias, expected in ((jnp.zeros(40).at[3].set(jnp.inf), np.inf), (jnp.full(40, -jnp.inf), -np.inf)):
        np.testing.assert_array_equal(run(FORWARD, spec, 32, named | dict(bias=bias))["lse"], np.full(4, expected))


# For every chip.


def compile_default(kernel: str, spec: LinearCrossEntropySpec) -> list[tritons.Compiled]:
    """The kernel; before it that in place, if it writes g."""
    config = dispatch.default_config(kernel, "triton", spec)
    types = spec.pack(kernel, {name: x.type for name, x in spec.arrays().items()})
    return tritons.compiled(spec.target, functools.partial(KERNELS[kernel][0].run, spec, config), *types)


@every_kernel
@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(("dtype", "logits_dtype"), [("bfloat16", None), ("float32", None), ("float16", "float32")])
@pytest.mark.parametrize("chip", tritons.CHIPS, ids=lambda chip: chip.name.removeprefix("NVIDIA ").replace(" ", "-"))
def test_default_compiles_without_spills(kernel, chip, dtype, logits_dtype, options):
    for vocab in (32768, 50257):
        for made in compile_default(kernel, make_spec(256, 64, vocab, dtype, logits_dtype, target=chip, **options)):
            assert made.spilled == 0, made


@every_kernel
def test_logits_are_read_16_bytes_at_a_time(kernel):
    for made in compile_default(kernel, make_spec(256, 64, 50304, "bfloat16")):
        assert re.search(r"ld\.global(\.L1\S*)?\.v4\.b32", made.ptx)
        # The label's logit alone.
        assert len(re.findall(r"ld\.global\.b16", made.ptx)) <= (kernel in (FORWARD, FUSED))
        assert bool(re.search(r"st\.global(\.cs)?\.v4\.b32", made.ptx)) == (kernel in (BACKWARD, FUSED))


# Planted mistakes.


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    ("name", "right", "wrong", "kernel"),
    [
        ("statistics", "total * tl.exp2((top - higher) * LOG2E) +", "total +", FORWARD),
        ("statistics", "(top - highest) * LOG2E", "0.0 * top", FORWARD),
        ("statistics", "tl.where(column < p.vocab_size, z, 0.0)", "tl.where(column < p.vocab_size, 1.0, 0.0)", FORWARD),
        ("statistics", "tl.where(is_inside, picked, 0.0)", "picked", FORWARD),
        ("load_change", "row.to(tl.int64) * p.vocab_size", "row.to(tl.int64) * p.block_vocab", FORWARD),
        ("load_change", "z += tl.load(bias", "z -= tl.load(bias", FORWARD),
        ("load_logits", "p.soft_cap * tanh", "tanh", FORWARD),
        ("load_logits", 'float("-inf")', "0.0", FORWARD),
        ("slope", "1 - (z", "1 + (z", BACKWARD),
        ("cotangent", "change += d_sum", "change -= d_sum", BACKWARD),
        ("cotangent", "column == label, d_label", "column == label, -d_label", BACKWARD),
        ("cotangent", "row.to(tl.int64) * p.vocab_size +", "", BACKWARD),
        ("logits_fused", "2 * p.z_loss", "p.z_loss", FUSED),
        ("logits_fused", "-(1 - p.label_smoothing)", "-1", FUSED),
        ("logits_fused", "-p.label_smoothing / p.vocab_size", "-p.label_smoothing", FUSED),
        ("logits_tangent", "slope(z, p) *", "", TANGENT),
        ("logits_tangent", "of_sum += change", "of_sum = change", TANGENT),
        ("logits_tangent", "column == label, change", "column != label, change", TANGENT),
    ],
)
def test_planted_mistake_is_noticed(name, right, wrong, kernel, tmp_path):
    spec = make_spec(5, 6, 75, **for_kernel(kernel, EVERYTHING))
    with tritons.planted(logits_kernel, name, right, wrong, tmp_path), pytest.raises((AssertionError, RuntimeError)):
        assert_right(kernel, spec, 32)
    assert_right(kernel, spec, 32)


# Limits and errors.


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(4, 3, 8, target=hardware.host()), "compute capability 8.0 or newer, the target is cpu"),
        (make_spec(4, 3, 8, "float64"), "takes bfloat16, float16 or float32, x is float64"),
        (make_spec(4, 3, 8, bias="float64"), "takes bfloat16, float16 or float32, bias is float64"),
        (make_spec(0, 3, 8), "has no work in an empty array"),
        (make_spec(4, 3, 8, bias="float32", gradients=("x", "bias")), "does not compute the gradient of the bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@every_kernel
def test_limits_are_stated(kernel, spec, reason):
    assert reason in (KERNELS[kernel][0].unsupported(spec) or "")


def test_what_none_takes():
    """The kernels on Hopper; XLA where nothing was measured, and where they cannot compute the loss."""
    choose = lambda spec: dispatch.choose(FUSED, spec, None).backend
    assert choose(make_spec(4096, 64, 32768, "bfloat16")) == "triton"
    assert choose(make_spec(4096, 64, 32768, "bfloat16", target=A100)) == "xla"
    assert choose(make_spec(4096, 64, 32768, "bfloat16", bias="bfloat16", gradients=("bias",))) == "xla"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(chunk=0), r"linear_cross_entropy\[triton\]: chunk must be at least 1"),
        (
            dict(block_vocab=48),
            r"linear_cross_entropy\[triton\]: block_vocab must be a power of two, 32 or more; got 48",
        ),
        (dict(num_warps=3), r"linear_cross_entropy\[triton\]: num_warps must be 1, 2, 4, 8 or 16; got 3"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_step_is_lowered_with_g_in_place_of_the_logits(reduction, monkeypatch):
    """In a loop over two chunks, and with one."""
    monkeypatch.setattr(hardware, "host", lambda: H200)
    x, w = jnp.ones((512, 16), jnp.bfloat16), jnp.ones((16, 64), jnp.bfloat16)
    for chunk in (256, 512):
        config = Config(chunk, 32, 4)
        loss = lambda x, w: jnp.sum(
            jk.linear_cross_entropy(
                x,
                w,
                jnp.zeros(512, jnp.int32),
                reduction=reduction,
                backend="triton",
                config=config,  # noqa: B023
            )
        )
        lowered = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",))
        calls_in = [
            line for line in lowered.as_text().splitlines() if any(f"@{name}(" in line for name in calls.TARGETS)
        ]
        num_backward = 2 if chunk == 256 else 1  # One before the loop.
        assert len(calls_in) == num_backward + (reduction == "none")
        assert "output_operand_alias" in calls_in[-1]
