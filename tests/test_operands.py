"""Specs as named operands: what follows from the names, for the operations of the package and for one of the test."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from jaxkernels.core import hardware
from jaxkernels.core.kernel_op import KernelOp
from jaxkernels.core.operands import GIVEN, Operand, Spec
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul.spec import MatmulSpec

H200 = hardware.lookup("NVIDIA H200")
KERNELS = ("attention_forward", "attention_tangent", "attention_backward")


def array(*shape: int, dtype: str = "float32") -> ArrayType:
    return ArrayType(shape, jnp.dtype(dtype))


def attention(heads: int = 4, kv_heads: int = 2, **options: Any) -> AttentionSpec:
    q, k, v = array(3, 5, heads, 8), array(3, 7, kv_heads, 8), array(3, 7, kv_heads, 16)
    return AttentionSpec(q, k, v, scale=0.5, target=H200, **options)


def attentions() -> list[AttentionSpec]:
    """Every set of optional operands."""
    bias, mask = array(1, 4, 5, 7), array(3, 1, 5, 1, dtype="bool")
    alternatives = dict(
        bias=(None, bias), mask=(None, mask), query_lengths=(False, True), key_lengths=(False, True),
        segments=(False, True), query_offset=(False, True),
    )  # fmt: skip
    return [attention(**dict(zip(alternatives, given))) for given in itertools.product(*alternatives.values())]


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_name_of_a_kernel_is_an_array(kernel):
    for spec in attentions():
        for some in (spec, dataclasses.replace(spec, bias_gradient=spec.bias is not None)):
            names = (*some.inputs(kernel), *some.outputs(kernel))
            arrays = some.arrays()
            assert len(set(some.inputs(kernel))) == len(some.inputs(kernel))
            for name in names:
                assert len(arrays[name].axes) == len(arrays[name].labels) == arrays[name].type.ndim, name


@pytest.mark.parametrize("kernel", KERNELS)
def test_types_are_put_back(kernel):
    """What a primitive carries, with its operands' types, is the spec again."""
    for spec in attentions():
        bare = spec.untyped()
        assert {getattr(bare, name) for name in bare.typed_fields} == {GIVEN}
        assert bare.inputs(kernel) == spec.inputs(kernel)
        assert bare == bare.untyped()
        assert hash(bare) == hash(spec.untyped())
        types = [spec.arrays()[name].type for name in spec.inputs(kernel)]
        assert bare.typed(kernel, types, H200) == spec


def test_pack_and_named_are_inverse():
    spec = attention(query_lengths=True, segments=True)
    values = {name: i for i, name in enumerate(spec.inputs("attention_backward"))}
    assert spec.named("attention_backward", spec.pack("attention_backward", values | {"other": 99})) == values
    with pytest.raises(ValueError, match="zip"):
        spec.named("attention_backward", range(3))
    with pytest.raises(KeyError, match="dlse"):
        spec.pack("attention_backward", {name: x for name, x in values.items() if name != "dlse"})


def test_labels_of_heads():
    """Groups split over their key head; one key head for all stays whole; an axis that broadcasts stays whole."""
    labels = lambda spec, name: spec.arrays()[name].labels
    assert labels(attention(), "q") == ("b", "t", "n g", None)
    assert labels(attention(), "k") == ("b", None, "n", None)
    assert attention().factor_sizes == {"g": 2}
    assert labels(attention(kv_heads=4), "lse") == ("b", "n", "t")
    assert labels(attention(kv_heads=1), "q") == ("b", "t", "n", None)
    assert labels(attention(kv_heads=1), "k") == ("b", None, None, None)
    biased = attention(bias=array(1, 4, 5, 1))
    assert labels(biased, "bias") == labels(biased, "dbias") == (None, "n g", "t", None)


def test_labels_of_a_product():
    lhs, rhs = array(2, 5, 3, 7), array(7, 4, 2, 3)
    spec = MatmulSpec(lhs, rhs, (((3, 2), (0, 3)), ((0,), (2,))), jnp.dtype(jnp.float32), H200)
    arrays = spec.arrays()
    assert arrays["lhs"].axes == ("b0", "m1", "k1", "k0")
    assert arrays["rhs"].axes == ("k0", "n1", "b0", "k1")
    assert arrays["out"].axes == ("b0", "m1", "n1")
    assert arrays["out"].type == array(2, 5, 4)
    assert spec.may_scatter
    biased = dataclasses.replace(spec, bias=array(4), activation="relu", save_preactivation=True)
    assert biased.inputs("matmul") == ("lhs", "rhs", "bias")
    assert biased.outputs("matmul") == ("out", "preactivation")
    assert biased.arrays()["bias"].axes == ("n1",)
    assert not biased.may_scatter
    assert biased.product == spec


def test_text():
    spec = attention(causal=True, window=(3, None), bias=array(1, 4, 5, 7), segments=True)
    assert str(spec) == (
        "q f32[3,5,4,8] k f32[3,7,2,8] v f32[3,7,2,16] bias f32[1,4,5,7] scale=0.5 causal window=(3, None) segments"
    )
    assert str(spec.untyped()) == "q given k given v given bias given scale=0.5 causal window=(3, None) segments"


def test_operands_to_tune_on_are_those_that_a_kernel_takes():
    cpu = jax.devices("cpu")[0]
    for spec in attentions()[::13]:
        names = spec.inputs("attention_forward")
        made, again = (spec.draw(names, cpu) for _ in range(2))
        assert tuple(made) == names
        for name, x in made.items():
            assert ArrayType.of(x) == spec.arrays()[name].type, name
            np.testing.assert_array_equal(x, again[name])


# A spec whose batch is not the first axis, with an operand for all and one that may broadcast.


@dataclasses.dataclass(frozen=True)
class Weighted(Spec):
    """out[i, c] = factor * w[i or 0, c] * x[c, i]."""

    batch_axis = "c"

    x: ArrayType
    w: ArrayType
    factor: ArrayType
    target: hardware.Chip

    def inputs(self, kernel: str) -> tuple[str, ...]:
        return ("x", "w", "factor")

    def outputs(self, kernel: str) -> tuple[str, ...]:
        return ("out", "dw")

    def arrays(self) -> Mapping[str, Operand]:
        w = Operand(self.w, ("i", "c"), broadcasts=True)
        out = ArrayType(self.x.shape[::-1], self.x.dtype)
        return dict(
            x=Operand(self.x, ("c", "i")), w=w, factor=Operand(self.factor, ()), out=Operand(out, ("i", "c")), dw=w
        )


class _Weighted(KernelOp):
    def not_shared(self, spec: Spec, mapped: frozenset[str]) -> frozenset[str]:
        return mapped | {"w"}


@pytest.fixture(scope="module")
def weighted() -> Any:
    """The primitive, evaluated by JAX operations: it has no backend."""
    op = _Weighted("matmul", "test_weighted", multiple_results=True)

    def compute(x: jax.Array, w: jax.Array, factor: jax.Array, **_: Any) -> list[jax.Array]:
        out = factor * w * x.T
        dw = factor * x.T
        summed = tuple(axis for axis in (0, 1) if w.shape[axis] == 1)
        return [out, jnp.sum(dw, axis=summed, keepdims=True)]

    op.primitive.def_impl(compute)
    mlir.register_lowering(op.primitive, mlir.lower_fun(compute, multiple_results=True), platform="cpu")

    def call(x: jax.Array, w: jax.Array, factor: jax.Array) -> list[jax.Array]:
        spec = Weighted(*map(ArrayType.of, (x, w, factor)), hardware.host())
        return op.bind(spec, dict(x=x, w=w, factor=factor), backend=None)

    return call, compute


@pytest.mark.parametrize("w_shape", [(3, 4), (1, 4), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("axes", list(itertools.product((None, 0, 1), (None, 0), (None, 0)))[1:], ids=str)
def test_vmap_joins_the_batch_wherever_it_is(weighted, axes, w_shape):
    call, compute = weighted
    rng = np.random.default_rng(0)
    shapes = [(4, 3), w_shape, ()]
    mapped = lambda shape, axis: shape if axis is None else (*shape[:axis], 5, *shape[axis:])
    xs = [jnp.asarray(rng.standard_normal(mapped(s, a)), jnp.float32) for s, a in zip(shapes, axes)]
    outs = jax.vmap(call, in_axes=axes)(*xs)
    expected = jax.vmap(functools.partial(compute), in_axes=axes)(*xs)
    for x, y in zip(outs, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
