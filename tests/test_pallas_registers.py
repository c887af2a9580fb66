"""Every Pallas kernel compiles to machine code for an H200 without spilling accumulators. Needs no GPU.

Each test states how many bytes may spill.

Needs the extra "aot" (compilers and JAX's CUDA plugin); the tests are skipped without it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ahead_of_time import h200, needs_aot
from attentions import extra_types
from jax.sharding import AxisType
from products import shipped_winners, types_of

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.pallas.attention import backward_fused
from jaxkernels.pallas.attention import forward as attention_forward
from jaxkernels.pallas.matmul import gemm as matmul

pytestmark = needs_aot

_H200 = hardware.lookup("NVIDIA H200")


@functools.cache
def _sharding() -> jax.sharding.NamedSharding:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=[h200()])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _compile(f: Callable[..., Any], *types: ArrayType) -> jax.stages.Compiled:
    """For an H200."""
    structs = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=_sharding()) for t in types]
    return jax.jit(f).lower(*structs).compile()


@pytest.fixture
def spills(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[int]]:
    """Compiles a function for an H200; returns the bytes each of its kernels spills, as ptxas reports them.

    No kernel may have its products serialized, each waited for before the next: ptxas does that where it sees a
    register of one in flight in use.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def compile_and_read(f: Callable[..., Any], *types: ArrayType) -> list[int]:
        capfd.readouterr()
        _compile(f, *types)
        out, err = capfd.readouterr()
        stores = re.findall(r"(\d+) bytes spill stores", out + err)
        assert stores, "ptxas reported no kernel"
        assert "wgmma.mma_async instructions are serialized" not in out + err
        return [int(count) for count in stores]

    return compile_and_read


def _matmul_spec(layouts: str, **epilogue: Any) -> MatmulSpec:
    lhs, rhs = layouts.split(".")
    bfloat16 = jnp.dtype(jnp.bfloat16)
    return MatmulSpec(
        lhs=ArrayType((4096, 4096), bfloat16),
        rhs=ArrayType((4096, 4096), bfloat16),
        dimension_numbers=(((lhs.index("k"),), (rhs.index("k"),)), ((), ())),
        out_dtype=bfloat16,
        target=_H200,
        **epilogue,
    )


@pytest.mark.parametrize(
    "config",
    [*matmul._CANDIDATES, matmul._SKINNY_CANDIDATE],
    ids=lambda c: f"{c.block_m}x{c.block_n}x{c.block_k}-{c.delay_release}-{c.cluster}-{c.split_k}",
)
@pytest.mark.parametrize("layouts", ["mk.kn", "km.nk"])
def test_matmul(config: matmul.Config, layouts: str, spills: Callable[..., list[int]]) -> None:
    spec = _matmul_spec(layouts)
    assert spills(functools.partial(matmul.run, spec, config), spec.lhs, spec.rhs) == [0]


@pytest.mark.parametrize(("spec", "config"), shipped_winners("pallas"), ids=str)
def test_shipped_winners(spec: MatmulSpec, config: matmul.Config, spills: Callable[..., list[int]]) -> None:
    assert set(spills(functools.partial(matmul.run, spec, config), *types_of(spec))) == {0}


@pytest.mark.parametrize(
    "schedule",
    [
        dict(delay_release=0),
        dict(cluster="m"),
        dict(cluster="n"),
        dict(block_m=256, block_n=128, cluster="n", minor="n", strip=4),
        dict(block_m=64, split="n", num_stages=3),
    ],
    ids=str,
)
def test_matmul_schedules(schedule: dict[str, Any], spills: Callable[..., list[int]]) -> None:
    spec = _matmul_spec("mk.kn")
    run = functools.partial(matmul.run, spec, dataclasses.replace(matmul.Config(), **schedule))
    assert spills(run, spec.lhs, spec.rhs) == [0]


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "silu", "gelu", "gelu_erf"])
def test_matmul_epilogue(activation: str, spills: Callable[..., list[int]]) -> None:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    spec = _matmul_spec(
        "mk.kn", activation=activation, bias=array(4096), residual=array(4096, 4096), save_preactivation=True
    )
    run = functools.partial(matmul.run, spec, dispatch.default_config("matmul", "pallas", spec))
    assert spills(run, spec.lhs, spec.rhs, spec.bias, spec.residual) == [0]


def test_the_default_product_compiles_ahead_of_time() -> None:
    """The backend cuda, if this machine can compile it: XLA has its handler without a GPU."""
    x = ArrayType((1024, 1024), jnp.dtype(jnp.bfloat16))
    _compile(jk.matmul, x, x)


def _attention_spec(
    head_dim: int, *, causal: bool, length: int = 4096, value_dim: int | None = None, **rules: Any
) -> AttentionSpec:
    array = lambda heads, dim=head_dim: ArrayType((2, length, heads, dim), jnp.dtype(jnp.bfloat16))
    return AttentionSpec(
        q=array(16), k=array(4), v=array(4, value_dim or head_dim), scale=head_dim**-0.5, target=_H200, causal=causal,
        **rules,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 192), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("length", [4096, 4000])
def test_attention_forward(dims: tuple[int, int], causal: bool, length: int, spills: Callable[..., list[int]]) -> None:
    spec = _attention_spec(dims[0], value_dim=dims[1], causal=causal, length=length)
    run = functools.partial(attention_forward.run, spec, dispatch.default_config("attention_forward", "pallas", spec))
    assert spills(run, spec.q, spec.k, spec.v) == [0]


@pytest.mark.parametrize(
    "schedule",
    [
        dict(bridge=False),
        dict(num_consumers=3, block_kv=64),
    ],
    ids=str,
)
def test_attention_forward_schedules(schedule: dict[str, Any], spills: Callable[..., list[int]]) -> None:
    spec = _attention_spec(128, causal=True)
    run = functools.partial(attention_forward.run, spec, attention_forward.Config(**schedule))
    assert spills(run, spec.q, spec.k, spec.v) == [0]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_attention_forward_space(head_dim: int, causal: bool, spills: Callable[..., list[int]]) -> None:
    spec = _attention_spec(head_dim, causal=causal)
    for config in attention_forward.search_space(spec):
        run = functools.partial(attention_forward.run, spec, config)
        assert spills(run, spec.q, spec.k, spec.v) == [0], config


_FEATURES: list[dict[str, Any]] = [
    dict(window=(1023, None)),
    dict(window=(1023, 512)),
    dict(key_lengths=True),
    dict(query_lengths=True, key_lengths=True),
    dict(segments=True),
    dict(segments=True, self_segments=True),
    dict(soft_cap=30.0),
    dict(window=(1023, None), query_lengths=True, key_lengths=True, segments=True, soft_cap=30.0, query_offset=True),
]


@pytest.mark.parametrize("features", _FEATURES, ids=lambda features: "+".join(features))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention_forward_features(
    head_dim: int, causal: bool, features: dict[str, Any], spills: Callable[..., list[int]]
) -> None:
    """At head dimension 256 an item's numbers spill, read once or twice an item, not accumulators."""
    spec = _attention_spec(head_dim, causal=causal, length=4000, **features)
    run = functools.partial(attention_forward.run, spec, dispatch.default_config("attention_forward", "pallas", spec))
    allowed = 128 if head_dim == 256 else 0
    assert max(spills(run, spec.q, spec.k, spec.v, *extra_types(spec))) <= allowed


def test_layers_share_the_plan_of_their_documents() -> None:
    """XLA computes it once."""
    x, ids = ArrayType((2, 4096, 8, 128), jnp.dtype(jnp.bfloat16)), ArrayType((2, 4096), jnp.dtype(jnp.int32))

    def num_kernels(num_layers: int) -> int:
        def run(x: jax.Array, ids: jax.Array) -> jax.Array:
            for _ in range(num_layers):
                x = jk.dot_product_attention(
                    x, x, x, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids, backend="pallas"
                )
            return x

        entry = _compile(run, x, ids).as_text().split("\nENTRY ")[1]
        return len(re.findall(r" (?:fusion|custom-call)\(", entry))

    assert num_kernels(4) == num_kernels(1) + 3


def _backward(spec: AttentionSpec, config: Any) -> tuple[Any, ...]:
    """A function and the types of its arguments."""
    batch, num_queries, num_heads, _ = spec.q.shape
    rows = ArrayType((batch, num_heads, num_queries), jnp.dtype(jnp.float32))
    out = ArrayType((*spec.q.shape[:3], spec.v.shape[3]), spec.q.dtype)
    run = functools.partial(dispatch.load("attention_backward", "pallas").run, spec, config)
    return run, spec.q, spec.k, spec.v, *extra_types(spec), out, rows, out, rows


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True, length=4000),
        dict(causal=True, window=(1023, 0)),
        dict(causal=True, segments=True, self_segments=True),
        dict(query_lengths=True),
        dict(causal=True, query_lengths=True, key_lengths=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_no_kernel_of_tritons_comes_right_before_the_fused_one(head_dim: int, options: dict[str, Any]) -> None:
    """XLA may give any fusion to Triton (it measures which is faster), but not a fusion with a concatenation."""
    spec = _attention_spec(head_dim, **{"causal": False, **options})
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert isinstance(config, backward_fused.Config)
    text = _compile(*_backward(spec, config)).as_text()
    kernel = re.compile(r"^ +(?:ROOT )?%\S+ = .*? (fusion|custom-call)\(.*?(?:calls=%([\w.]+)|$)", re.MULTILINE)
    kernels = kernel.findall(text.split("\nENTRY ")[1])  # In the order in which they run.
    fused = max(i for i, (kind, _) in enumerate(kernels) if kind == "custom-call")
    kind, computation = kernels[fused - 1]
    assert kind == "fusion"
    body = text.split(f"%{computation} (")[1].split("\n}")[0]
    assert "concatenate(" in body


#: By head dimension: what spills are places of barriers and of results, a few of which a step reads again.
_ALLOWED = {64: 0, 128: 96, 192: 0, 256: 64}


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_attention_backward(head_dim: int, causal: bool, deterministic: bool, spills: Callable[..., list[int]]) -> None:
    spec = _attention_spec(head_dim, causal=causal, deterministic=deterministic)
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert max(spills(*_backward(spec, config))) <= _ALLOWED[head_dim]


@pytest.mark.parametrize("stores_first", [False, True], ids=["zeros", "first stores"])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention_backward_sums(
    head_dim: int, causal: bool, soft_cap: float | None, stores_first: bool, spills: Callable[..., list[int]]
) -> None:
    spec = _attention_spec(head_dim, causal=causal, length=512, soft_cap=soft_cap)
    spec = dataclasses.replace(spec, k=spec.q, v=spec.q)
    config = dispatch.default_config("attention_backward", "pallas", spec)
    most = {64: 40, 96: 80, 128: 128} if soft_cap else {64: 4, 96: 96, 128: 96}
    assert max(spills(*_backward(spec, dataclasses.replace(config, stores_first=stores_first)))) <= most[head_dim]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention_backward_space(causal: bool, deterministic: bool, spills: Callable[..., list[int]]) -> None:
    """The fused kernel at head dimension 96, padded to 128 and not padded."""
    spec = _attention_spec(96, causal=causal, deterministic=deterministic)
    configs = list(backward_fused.search_space(spec))
    assert {config.head_multiple for config in configs} == {32, 64}
    for config in configs:
        assert max(spills(*_backward(spec, config))) <= _ALLOWED[128], config


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("features", _FEATURES, ids=lambda features: "+".join(features))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_attention_backward_features(
    head_dim: int, causal: bool, features: dict[str, Any], deterministic: bool, spills: Callable[..., list[int]]
) -> None:
    """Spilled registers are stored before the loop. A step reads six words of them."""
    spec = _attention_spec(head_dim, causal=causal, length=4000, deterministic=deterministic, **features)
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert max(spills(*_backward(spec, config))) <= {64: 40, 96: 52, 128: 128}[head_dim]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("schedule", [dict(multicast=False), dict(ping_pong=False)], ids=str)
def test_attention_backward_split(
    dims: tuple[int, int], causal: bool, schedule: dict[str, Any], spills: Callable[..., list[int]]
) -> None:
    spec = _attention_spec(dims[0], causal=causal, length=4000)
    spec = dataclasses.replace(spec, v=ArrayType((*spec.v.shape[:3], dims[1]), spec.v.dtype))
    config = dispatch.default_config("attention_backward", "pallas", spec)
    assert max(spills(*_backward(spec, dataclasses.replace(config, **schedule)))) <= _ALLOWED[dims[0]]


@pytest.mark.parametrize("features", _FEATURES, ids=lambda features: "+".join(features))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_attention_backward_split_features(
    dims: tuple[int, int], causal: bool, features: dict[str, Any], spills: Callable[..., list[int]]
) -> None:
    spec = _attention_spec(dims[0], causal=causal, length=4000, **features)
    spec = dataclasses.replace(spec, v=ArrayType((*spec.v.shape[:3], dims[1]), spec.v.dtype))
    config = dispatch.default_config("attention_backward", "pallas", spec)
    # One number more of a window at 192, with a causal mask.
    allowed = _ALLOWED[dims[0]] or 4 * (causal and list(features) == ["window"])
    assert max(spills(*_backward(spec, config))) <= allowed
