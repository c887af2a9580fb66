"""Attention by cuDNN without a GPU: its custom calls against JAX's, and what XLA does around them with a stand-in."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import H200, draw, make_spec
from errors import raises_exactly
from jax._src.cudnn import fused_attention_stablehlo

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware, times
from jaxkernels.core.types import ArrayType
from jaxkernels.cudnn import TARGETS, calls
from jaxkernels.cudnn.attention import backward, forward, problem
from jaxkernels.ops.attention import reference, reference_backward, reference_forward
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.terms import Band, MaskTerm

A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")
L4 = hardware.lookup("NVIDIA L4")
TURING = dataclasses.replace(H200, name="Tesla T4", compute_capability=(7, 5))

# The custom calls.


def custom_calls(f: Any, *args: Any) -> list[dict[str, Any]]:
    """The custom calls to cuDNN in a program for a GPU: name, attributes, layouts and types."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for line in text.splitlines():
        if match := re.search(r"custom_call @(__cudnn\S+?)\(.*backend_config = \"(.*?)\", (.*)} : (.*)$", line):
            name, config, layouts, types = match.groups()
            values = json.loads(config.replace(r"\22", '"'))["cudnn_fmha_backend_config"]
            found.append(dict(name=name, config=without_defaults(values), layouts=layouts, types=types))
    return found


def without_defaults(value: Any) -> Any:
    """A protocol buffer in JSON without the fields that have their default."""
    if isinstance(value, dict):
        fields = {name: without_defaults(x) for name, x in value.items()}
        return {name: x for name, x in fields.items() if x not in (0, "0", [], "PRIMITIVE_TYPE_INVALID")}
    return value


@pytest.fixture
def jax_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own function asks this machine for cuDNN and for its GPU."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda capability: False)


OPTIONS = {
    "full": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.7),
    "lengths": dict(query_seq_lengths=True, key_value_seq_lengths=True),
    "causal lengths": dict(query_seq_lengths=True, key_value_seq_lengths=True, is_causal=True),
    "window": dict(is_causal=True, local_window_size=(7, 0)),
    "bias": dict(bias=(1, 4, 32, 48)),
    "causal mask": dict(mask=(2, 1, 32, 48), is_causal=True),
}


@pytest.mark.usefixtures("jax_as_on_a_gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_custom_calls_are_those_of_jax(name, dtype):
    options, arrays = dict(OPTIONS[name]), {}
    for operand, kind in (("bias", dtype), ("mask", "bool")):
        if operand in options:
            arrays[operand] = jax.ShapeDtypeStruct(options.pop(operand), kind)
    for operand in ("query_seq_lengths", "key_value_seq_lengths"):
        if options.pop(operand, False):
            arrays[operand] = jax.ShapeDtypeStruct((2,), "int32")
    q = jax.ShapeDtypeStruct((2, 32, 4, 64), dtype)
    k = jax.ShapeDtypeStruct((2, 48, 2, 64), dtype)

    def gradients(attention: Any) -> Any:
        f = lambda q, k, v, bias, arrays: attention(q, k, v, bias=bias, **arrays, **options).astype("float32").sum()
        moving = (0, 1, 2, 3) if "bias" in arrays else (0, 1, 2)
        others = {key: x for key, x in arrays.items() if key != "bias"}
        return custom_calls(jax.grad(f, moving), q, k, k, arrays.get("bias"), others)

    ours = gradients(functools.partial(jk.dot_product_attention, backend="cudnn"))
    theirs = gradients(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    assert [call["name"] for call in ours] == [call["name"] for call in theirs]
    assert len(ours) == 2
    for our, their in zip(ours, theirs):
        assert our == their
    assert {call["name"] for call in ours} <= {*TARGETS}


# What XLA does around the calls.


def _logits(q: jax.Array, k: jax.Array, bias: Any, lengths: Any, scale: float, masks: calls.Masks) -> jax.Array:
    """(B, N, T, S) float32 as cuDNN has them, minus infinity where it masks."""
    group = q.shape[2] // k.shape[2]
    wide = lambda x: jnp.repeat(x, group, axis=2).astype(jnp.float32)
    logits = scale * jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), wide(k))
    if bias is not None:
        assert bias.shape[2:] == logits.shape[2:], "cuDNN broadcasts over batch and heads only"
        assert bias.dtype == q.dtype
        logits = logits + bias
    query, key = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    visible = jnp.ones((1, 1, *logits.shape[2:]), bool)
    if masks.is_causal:
        visible &= key <= query
    if masks.window is not None:
        assert masks.is_causal
        assert bias is None
        assert not lengths
        visible &= key > query - masks.window
    if masks.has_lengths:
        queries, keys = (x[:, None, None, None] for x in lengths)
        visible = visible & (query < queries) & (key < keys)
    return jnp.where(visible, logits, -jnp.inf)


def _undefined_behind(x: jax.Array, lengths: Any, side: int, axis: int) -> jax.Array:
    """NaN in rows behind the lengths: nothing may depend on them."""
    if not lengths:
        return x
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    place = jnp.arange(x.shape[axis]).reshape(shape)
    return jnp.where(place < lengths[side].reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)


def stand_in_forward(q, k, v, bias, lengths, *, scale, masks):
    """`calls.forward` in plain JAX, from cuDNN's documentation. Rows without a key are NaN."""
    assert q.shape[3] == k.shape[3] == v.shape[3]
    for x in lengths:
        assert x.dtype == jnp.int32
    logits = _logits(q, k, bias, lengths, scale, masks)
    p = jax.nn.softmax(logits)
    group = q.shape[2] // k.shape[2]
    out = jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(v, group, axis=2).astype(jnp.float32))
    lse = jax.nn.logsumexp(logits, axis=-1)
    return _undefined_behind(out, lengths, 0, 1).astype(q.dtype), _undefined_behind(lse, lengths, 0, 2)


def stand_in_backward(q, k, v, bias, lengths, out, lse, dout, *, scale, masks, bias_gradient):
    """`calls.backward` in plain JAX, from cuDNN's documentation."""
    group = q.shape[2] // k.shape[2]
    wide = lambda x: jnp.repeat(x, group, axis=2).astype(jnp.float32)
    together = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)
    q32, out, dout = (x.astype(jnp.float32) for x in (q, out, dout))
    p = jnp.exp(_logits(q, k, bias, lengths, scale, masks) - lse[..., None])
    delta = jnp.swapaxes((out * dout).sum(-1), 1, 2)[..., None]
    ds = p * (jnp.einsum("btnh,bsnh->bnts", dout, wide(v)) - delta)
    dq = scale * jnp.einsum("bnts,bsnh->btnh", ds, wide(k))
    dk = scale * together(jnp.einsum("bnts,btnh->bsnh", ds, q32))
    dv = together(jnp.einsum("bnts,btnh->bsnh", p, dout))
    grads = [_undefined_behind(x, lengths, side, 1).astype(q.dtype) for x, side in ((dq, 0), (dk, 1), (dv, 1))]
    if bias_gradient:
        summed = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        grads.append(ds.sum(summed, keepdims=True).astype(bias.dtype))
    return grads


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "forward", stand_in_forward)
    monkeypatch.setattr(calls, "backward", stand_in_backward)


@dataclasses.dataclass(frozen=True)
class _EveryThird(MaskTerm):
    def visible(self, query, key):
        return (query + key) % 3 == 0


SPECS = {
    "full": {},
    "causal": dict(causal=True),
    "fewer keys": dict(queries=40, keys=24, causal=True),
    "one key head": dict(kv_heads=1),
    "narrow values": dict(head_dim=32, value_dim=16),
    "causal window": dict(causal=True, window=(5, None)),
    "window to the left": dict(queries=40, keys=24, window=(3, 0)),
    "window": dict(window=(5, 3)),
    "offset": dict(causal=True, query_offset=True),
    "offset and lengths": dict(window=(9, 2), query_offset=True, query_lengths=True),
    "key lengths": dict(key_lengths=True),
    "query lengths": dict(query_lengths=True, causal=True),
    "lengths": dict(batch=4, query_lengths=True, key_lengths=True, causal=True),
    "lengths and window": dict(batch=4, query_lengths=True, key_lengths=True, causal=True, window=(5, None)),
    "mask": dict(mask=(2, 4, 24, 40)),
    "mask of keys": dict(mask=(2, 1, 1, 40), causal=True),
    "mask of queries": dict(mask=(1, 4, 24, 1)),
    "segments": dict(segments=True),
    "segments and lengths": dict(segments=True, key_lengths=True, causal=True),
    "own term": dict(terms=(_EveryThird(),)),
    "bias": dict(bias=(1, 4, 24, 40)),
    "broadcast bias": dict(bias=(2, 1, 1, 40), causal=True),
    "bias and mask": dict(bias=(1, 4, 24, 40), mask=(2, 1, 24, 40), causal=True),
    "bias gradient": dict(bias=(1, 4, 24, 40), bias_gradient=True, causal=True),
    "bias gradient and lengths": dict(bias=(1, 4, 24, 40), bias_gradient=True, query_lengths=True, key_lengths=True),
    "gradient of the logsumexp": dict(lse_gradient=True, causal=True),
    "gradient of the logsumexp and lengths": dict(lse_gradient=True, query_lengths=True, key_lengths=True),
    "everything": dict(
        batch=4, bias=(1, 4, 24, 40), mask=(4, 1, 24, 40), segments=True, query_lengths=True, key_lengths=True,
        causal=True, window=(9, None), lse_gradient=True, head_dim=32, value_dim=24,
    ),
}  # fmt: skip


def make(dtype: str = "bfloat16", **options: Any) -> AttentionSpec:
    spec = make_spec(dtype=dtype, **options)
    return spec if spec.bias is None else dataclasses.replace(spec, bias=ArrayType(spec.bias.shape, jnp.dtype(dtype)))


def operands_of(spec: AttentionSpec) -> dict[str, jax.Array]:
    values = draw(spec)
    return values if spec.lse_gradient else values | {"dlse": jnp.zeros_like(values["dlse"])}


def assert_close(name: str, actual: jax.Array, expected: jax.Array, tolerance: float = 3e-2) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    x, y = (np.asarray(z, np.float32) for z in (actual, expected))
    if name == "lse":
        assert np.array_equal(x <= MASKED_LOGIT / 2, y <= MASKED_LOGIT / 2)
        x, y = (np.where(z <= MASKED_LOGIT / 2, 0, z) for z in (x, y))
    np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()), err_msg=name)


@pytest.mark.sampled(one_in=4)
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SPECS)
def test_passes_equal_the_reference(name, dtype):
    spec = make(dtype, **SPECS[name])
    values = operands_of(spec)
    for design, plain, kernel in (
        (forward, reference_forward, "attention_forward"),
        (backward, reference_backward, "attention_backward"),
    ):
        assert design.unsupported(spec) is None
        operands = spec.pack(kernel, values)
        actual = design.run(spec, design.Config(), *operands)
        expected = plain.run(spec, reference.Config(), *operands)
        for result, x, y in zip(spec.outputs(kernel), actual, expected, strict=True):
            assert_close(result, x, y)


@pytest.mark.usefixtures("stand_in")
def test_cotangents_of_the_logsumexp_keep_float32s_precision():
    spec = make(lse_gradient=True)
    values = operands_of(spec) | {"dout": jnp.zeros((2, 24, 4, 16), jnp.bfloat16)}
    dv_like = lambda values: backward.run(spec, backward.Config(), *spec.pack("attention_backward", values))[1]
    parts = backward._parts(values["dlse"], problem.Inputs.of(spec, values), jnp.dtype(jnp.bfloat16))
    total = sum(part.astype(jnp.float32) for part in parts)
    np.testing.assert_allclose(total, jnp.swapaxes(values["dlse"], 1, 2), rtol=2**-22)
    without = dv_like(values | {"dlse": jnp.zeros_like(values["dlse"])})
    assert float(jnp.abs(dv_like(values) - without).max()) > 0.1


@pytest.mark.parametrize(
    ("options", "masks"),
    [
        ({}, calls.Masks()),
        (dict(causal=True), calls.Masks(is_causal=True)),
        (dict(causal=True, query_lengths=True), calls.Masks(is_causal=True, has_lengths=True)),
        (dict(causal=True, window=(5, 9)), calls.Masks(is_causal=True, window=6)),
        (dict(window=(5, 0)), calls.Masks(is_causal=True, window=6)),
        (dict(window=(5, 0), mask=(1, 1, 24, 40)), calls.Masks(is_causal=True)),
        (dict(window=(5, 3)), calls.Masks()),
        (dict(causal=True, query_offset=True), calls.Masks()),
    ],
    ids=str,
)
def test_masks_that_cudnn_applies(options, masks):
    spec = make(**options)
    assert problem.masks_of(spec) == masks
    band = Band(None if masks.window is None else masks.window - 1, 0 if masks.is_causal else None)
    assert problem.folds_masks(spec) == (band != spec.band or spec.mask is not None)


# Refusals.

REFUSALS = [
    (dict(dtype="float32"), "computes in 16 bits, not in float32"),
    (dict(head_dim=20), "needs a head dimension of at most 256, in steps of 8, not 20"),
    (dict(head_dim=264), "needs a head dimension of at most 256, in steps of 8, not 264"),
    (dict(head_dim=136, target=A100), "needs a head dimension of at most 128, in steps of 8, not 136"),
    (dict(value_dim=32), "takes values as wide as keys, or padded to be, not 16 and 32"),
    (dict(soft_cap=2.0), "has no soft cap and no score terms of your own"),
    (dict(scale=-1.0), "needs a positive scale, got -1.0"),
    (
        dict(deterministic=True),
        "promises no fixed order of its sums: XLA asks for one by a flag for whole programs only",
    ),
    (dict(queries=1, keys=1), "needs more than one query or more than one key"),
    (dict(batch=0), "has no work in an empty attention"),
    (
        dict(target=TURING),
        "needs a CUDA GPU of compute capability 8.0 or newer, this is Tesla T4 (compute capability 7.5)",
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
@pytest.mark.parametrize("design", [forward, backward], ids=["forward", "backward"])
def test_refusals(options, reason, design):
    assert design.unsupported(make(**options)) == reason


def test_a_bias_has_the_dtype_of_the_queries():
    reason = "takes operands of one dtype, not bfloat16, float32"
    assert forward.unsupported(make_spec(dtype="bfloat16", bias=(1, 4, 24, 40))) == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            dict(queries=23, mask=(1, 1, 23, 40)),
            "needs even lengths for gradients with a bias or a mask, not 23 and 40",
        ),
        (dict(queries=23, window=(3, 3)), "needs even lengths for gradients with a bias or a mask, not 23 and 40"),
        (
            dict(bias=(2, 4, 24, 40), bias_gradient=True),
            "has the gradient of a bias of shape (1, 4, 24, 40) only, not of (2, 4, 24, 40)",
        ),
        (
            dict(bias=(1, 4, 24, 40), bias_gradient=True, segments=True),
            "has no gradient of a bias beside masks other than the causal one and lengths",
        ),
        (
            dict(head_dim=256, lse_gradient=True),
            "takes the gradient of the logsumexp with head dimensions up to 248, not 256",
        ),
        (
            dict(head_dim=128, lse_gradient=True, target=L4),
            "takes the gradient of the logsumexp with head dimensions up to 120, not 128",
        ),
    ],
    ids=str,
)
def test_refusals_of_gradients(options, reason):
    spec = make(**options)
    assert forward.unsupported(spec) is None
    assert backward.unsupported(spec) == reason


def test_odd_lengths_without_a_bias_have_gradients():
    assert backward.unsupported(make(queries=23, keys=41, causal=True)) is None


def test_an_old_cudnn_is_refused(monkeypatch):
    monkeypatch.setattr(calls._jax, "cudnn_version", lambda: 90501)
    calls.missing.cache_clear()
    try:
        assert forward.unsupported(make()) == "needs cuDNN 9.8 or newer, found 9.5.1"
    finally:
        monkeypatch.undo()
        calls.missing.cache_clear()
    assert forward.unsupported(make()) is None


def test_message_of_a_call():
    q = jax.ShapeDtypeStruct((2, 24, 4, 20), "bfloat16")
    f = lambda q: jk.dot_product_attention(q, q, q, backend="cudnn")
    message = (
        "attention_forward[cudnn]: needs a head dimension of at most 256, in steps of 8, not 20. "
        'Use backend=None (chooses by itself) or backend="xla".'
    )
    with raises_exactly(NotImplementedError, message):
        jax.eval_shape(f, q)


# The choice, and transforms.


def backends(f: Any, *args: Any, platform: str = "cuda") -> list[str]:
    return [choice.backend for choice in jk.explain(f, *args, platform=platform).choices]


X = jax.ShapeDtypeStruct((2, 32, 4, 64), "bfloat16")


def grad(**options: Any) -> Any:
    loss = lambda q, k, v: jk.dot_product_attention(q, k, v, **options).astype("float32").sum()
    return jax.grad(loss, (0, 1, 2))


def test_order_of_preference(monkeypatch):
    """Below the kernels of this package, above XLA, where no measured times decide."""
    monkeypatch.setattr(times, "covers", lambda *args: False)
    for op in ("attention_forward", "attention_backward"):
        names = [backend for of, backend in dispatch.REGISTRY if of == op]
        assert names[-2:] == ["cudnn", "xla"]
    assert backends(grad(is_causal=True), X, X, X) == ["pallas", "pallas"]
    monkeypatch.setattr("jaxkernels.triton.calls.missing", lambda: "is not installed")
    mask = np.ones((32, 32), bool)
    assert backends(grad(mask=mask), X, X, X) == ["cudnn", "cudnn"]
    monkeypatch.setenv("JAXKERNELS_TARGET", L4.name)
    assert backends(grad(is_causal=True), X, X, X) == ["cudnn", "cudnn"]
    assert backends(grad(is_causal=True, deterministic=True), X, X, X) == ["xla", "xla"]


def test_gradients_of_the_logsumexp_are_told_apart():
    def spec_of(pick: Any, wrap: Any = lambda f: f) -> AttentionSpec:
        f = lambda q, k, v: pick(
            wrap(lambda *x: jk.dot_product_attention(*x, return_lse=True, backend="cudnn"))(q, k, v)
        )
        return jk.explain(jax.grad(lambda *x: f(*x).astype("float32").sum()), X, X, X, platform="cuda").choices[-1].spec

    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        assert not spec_of(lambda outs: outs[0], wrap).lse_gradient
        assert spec_of(lambda outs: outs[1], wrap).lse_gradient


def test_vmap_is_one_call():
    f = jax.vmap(lambda q, k, v: jk.dot_product_attention(q, k, v, backend="cudnn"))
    many = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    (call,) = custom_calls(f, many, many, many)
    assert call["config"]["intermediate_tensor_shape"]["dimensions"] == ["6", "4", "32", "32"]


def test_shards_call_cudnn(meshes):
    x = jax.ShapeDtypeStruct(
        (4, 32, 4, 64), "bfloat16", sharding=jax.NamedSharding(meshes.explicit, jax.P("x", None, "y"))
    )
    found = custom_calls(grad(backend="cudnn"), x, x, x)
    assert [call["config"]["intermediate_tensor_shape"]["dimensions"] for call in found] == [["1", "2", "32", "32"]] * 2


def test_export_takes_it_with_disabled_checks():
    f = jax.jit(lambda q, k, v: jk.dot_product_attention(q, k, v, is_causal=True, backend="cudnn"))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)(X, X, X)
    assert "__cudnn$fmhaSoftmax" in exported.mlir_module()
    with pytest.raises(ValueError, match="targets have no compatibility guarantees"):
        jax.export.export(f, platforms=["cuda"])(X, X, X)
