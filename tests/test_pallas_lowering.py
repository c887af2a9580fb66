"""Every Pallas kernel and every configuration it can choose lowers for a Hopper GPU, on a machine without one.

Lowering checks what interpret mode cannot: layouts in registers, the tiling and alignment TMA asks for, the
size of shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attentions import extra_types
from cases import ATTENTION_CASES, MATMUL_CASES, AttentionCase, MatmulCase
from products import shipped_winners, types_of

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware, times
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.pallas.attention import forward as attention_forward
from jaxkernels.pallas.matmul import gemm as matmul

_H200 = hardware.lookup("NVIDIA H200")
#: All designs of the backward pass.
ATTENTION_BACKWARD = dispatch.load("attention_backward", "pallas")


def lower(f: Callable[..., Any], *operands: Any) -> str:
    """The StableHLO of `f` for CUDA."""
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return jax.jit(f).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def structs(*types: ArrayType) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]


def chosen(f: Callable[..., Any], *operands: Any) -> list[tuple[str, str]]:
    """(operation, backend) of each kernel in `f` lowered for CUDA."""
    with dispatch.recording() as choices:
        lower(f, *operands)
    return [(choice.op, choice.backend) for choice in choices]


def gradients(case: Any) -> Callable[..., Any]:
    """Results and gradients of a case, as one function of its operands and cotangents."""

    def f(operands: dict[str, Any], cotangents: Any) -> Any:
        moving = {name for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        fixed = {name: x for name, x in operands.items() if name not in moving}
        out, pull = jax.vjp(lambda xs: case.run(fixed | xs), {name: operands[name] for name in moving})
        return out, pull(cotangents)

    return f


def _cases(table: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(case, id=case.id) for case in table]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", _cases(MATMUL_CASES))
def test_matmul_cases_lower(case: MatmulCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "covers", lambda *args: False)  # The order decides.
    # The CUDA kernels are asked first; Triton may be installed.
    without = {key: entry for key, entry in dispatch.REGISTRY.items() if key[1] not in ("cuda", "triton")}
    monkeypatch.setattr(dispatch, "REGISTRY", without)

    def expected(*dtypes: str) -> str:
        is_taken = {*dtypes} <= {"bfloat16", "float16", "float32"} and {*dtypes} != {"float32"}
        return "pallas" if is_taken else "xla"

    # The product itself, and its cotangent with either operand.
    backends = {expected(case.dtype), expected(case.dtype, case.out_dtype or case.dtype)}
    if case.multiplier and case.residual:  # No kernel takes both.
        backends.add("xla")
    assert {backend for _, backend in chosen(gradients(case), case.operands(), case.cotangents())} == backends


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", _cases(ATTENTION_CASES))
def test_attention_cases_lower(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "covers", lambda *args: False)  # The order decides.
    # Triton may be installed.
    without = {key: entry for key, entry in dispatch.REGISTRY.items() if key[1] not in ("triton", "cudnn")}
    monkeypatch.setattr(dispatch, "REGISTRY", without)
    backend = "xla" if any((case.bias, case.mask, case.dtype == "float32")) else "pallas"
    # Few queries are left to backends that divide the keys.
    forward = "xla" if case.queries <= 16 else backend
    expected = [("attention_forward", forward), ("attention_backward", backend)]
    assert chosen(gradients(case), case.operands(), case.cotangents()) == expected


def test_a_named_backend_refuses_a_gradient_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for design in dispatch.load("attention_backward", "pallas").designs:
        monkeypatch.setattr(design, "unsupported", lambda spec: "is left out here")
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    attend = functools.partial(jk.dot_product_attention, backend="pallas")
    assert chosen(attend, x, x, x) == [("attention_forward", "pallas")]
    with pytest.raises(NotImplementedError, match=r"^attention_backward.*is left out here"):
        lower(jax.grad(lambda *xs: attend(*xs).astype(jnp.float32).sum()), x, x, x)


def lower_matmul(config: matmul.Config, layouts: str = "mk.kn", *, epilogue: bool = False, out: str) -> None:
    lhs_layout, rhs_layout = layouts.split(".")
    sizes = dict(m=512, n=768, k=1024)
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    spec = MatmulSpec(
        lhs=array(*(sizes[axis] for axis in lhs_layout)),
        rhs=array(*(sizes[axis] for axis in rhs_layout)),
        dimension_numbers=(((lhs_layout.index("k"),), (rhs_layout.index("k"),)), ((), ())),
        out_dtype=jnp.dtype(out),
        target=_H200,
        bias=array(sizes["n"]) if epilogue else None,
        activation="gelu" if epilogue else None,
        residual=array(sizes["m"], sizes["n"]) if epilogue else None,
        save_preactivation=epilogue,
    )
    operands = structs(*(t for t in (spec.lhs, spec.rhs, spec.bias, spec.residual) if t is not None))
    lower(functools.partial(matmul.run, spec, config), *operands)


_CANDIDATES = [
    pytest.param(c, id=f"{c.block_m}x{c.block_n}x{c.block_k}-{c.delay_release}-{c.cluster}-{c.split_k}")
    for c in (*matmul._CANDIDATES, matmul._SKINNY_CANDIDATE)
]


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("config", _CANDIDATES)
@pytest.mark.parametrize("layouts", ["mk.kn", "mk.nk", "km.kn", "km.nk"])
def test_every_candidate_lowers_for_every_layout(config: matmul.Config, layouts: str) -> None:
    lower_matmul(config, layouts, out="bfloat16")


@pytest.mark.parametrize(("spec", "config"), shipped_winners("pallas"), ids=str)
def test_every_shipped_winner_lowers(spec: MatmulSpec, config: matmul.Config) -> None:
    lower(functools.partial(matmul.run, spec, config), *structs(*types_of(spec)))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("config", _CANDIDATES)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_every_candidate_lowers_with_an_epilogue(config: matmul.Config, out: str) -> None:
    lower_matmul(config, epilogue=True, out=out)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("config", _CANDIDATES)
@pytest.mark.parametrize("schedule", [dict(delay_release=1, cluster="m"), dict(cluster="n", minor="n")], ids=str)
def test_every_candidate_lowers_with_clusters(config: matmul.Config, schedule: dict[str, Any]) -> None:
    lower_matmul(dataclasses.replace(config, **schedule), "km.nk", out="bfloat16")


@pytest.mark.thorough
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("head_dims", "dtype"),
    [
        ((64, 64), "bfloat16"),
        ((128, 128), "bfloat16"),
        ((128, 128), "float16"),
        ((192, 128), "bfloat16"),
        ((192, 192), "bfloat16"),
        ((256, 256), "bfloat16"),
    ],
    ids=str,
)
def test_every_attention_default_lowers(head_dims: tuple[int, int], dtype: str) -> None:
    head_dim, value_dim = head_dims
    array = lambda *shape: ArrayType(shape, jnp.dtype(dtype))
    features: dict[str, Any] = dict(
        window=(500, 20), soft_cap=30.0, query_lengths=True, key_lengths=True, segments=True
    )
    for causal, offset in ((False, False), (True, False), (True, True)):
        spec = AttentionSpec(
            q=array(2, 2040, 8, head_dim),
            k=array(2, 2001, 4, head_dim),
            v=array(2, 2001, 4, value_dim),
            scale=head_dim**-0.5,
            target=_H200,
            causal=causal,
            query_offset=offset,
        )
        extras = [jax.ShapeDtypeStruct((), jnp.int32)] * offset
        rows = jax.ShapeDtypeStruct((2, 8, 2040), jnp.float32)
        (out,) = structs(array(*spec.q.shape[:3], value_dim))
        qkv = structs(spec.q, spec.k, spec.v)
        forward = functools.partial(
            attention_forward.run, spec, dispatch.default_config("attention_forward", "pallas", spec)
        )
        lower(forward, *qkv, *extras)
        backward = functools.partial(
            dispatch.load("attention_backward", "pallas").run,
            spec,
            dispatch.default_config("attention_backward", "pallas", spec),
        )
        lower(backward, *qkv, *extras, out, rows, out, rows)
        if causal == offset:
            masked = dataclasses.replace(spec, **features)
            config = dispatch.default_config("attention_forward", "pallas", masked)
            integers = structs(*extra_types(masked))
            lower(functools.partial(attention_forward.run, masked, config), *qkv, *integers)
            for deterministic in (False, True):
                masked = dataclasses.replace(masked, deterministic=deterministic)
                config = dispatch.default_config("attention_backward", "pallas", masked)
                lower(functools.partial(ATTENTION_BACKWARD.run, masked, config), *qkv, *integers, out, rows, out, rows)
