"""Which kernel runs: the order of preference, named backends, refusals, what `explain` says."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from jax import export

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware, registry, times
from jaxkernels.core.dispatch import Entry
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.reference_forward import Config as ForwardConfig
from jaxkernels.ops.attention.rules import forward_op
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul import reference as xla_matmul
from jaxkernels.ops.matmul.rules import dot_general_op
from jaxkernels.ops.matmul.spec import MatmulSpec

REAL = [name for name in dispatch.backend_names() if name != "xla"]
A = np.ones((5, 7), np.float32)
B = np.ones((7, 3), np.float32)
Q = np.ones((2, 5, 4, 8), np.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64


@pytest.fixture
def install(registry, monkeypatch) -> Callable[..., None]:
    """Registers a backend before the others: a module that computes 10 times the product, or refuses."""

    def install(name: str, *, reason: str | None = None, unpreferred: str | None = None, **fields: Any) -> None:
        module = types.ModuleType(f"backend_{name}")
        module.Config = Config
        module.unsupported = lambda spec: reason
        if unpreferred is not None:
            module.unpreferred = lambda spec: unpreferred
        module.VERSION = 1
        module.search_space = lambda spec: (Config(), Config(block=128))
        module.estimate = lambda spec, config: float(config.block)
        module.run = lambda spec, config, *xs: 10 * xla_matmul.run(spec, xla_matmul.Config(), *xs)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entries = {("matmul", name): Entry((module.__name__,), **fields), **registry}
        registry.clear()
        registry.update(entries)

    return install


def test_first_backend_that_supports_the_spec_is_taken(install):
    install("third")
    install("second")
    install("first", reason="k must be a multiple of 8; got k=7")
    assert jk.matmul(A, B)[0, 0] == 70
    (choice,) = jk.explain(jk.matmul, A, B).choices
    assert (choice.backend, choice.config) == ("second", Config())
    assert choice.passed_over == (("first", "k must be a multiple of 8; got k=7"),)


def test_backend_of_another_platform_is_passed_over(install):
    install("gpu_only", platforms=("cuda",))
    assert jk.matmul(A, B)[0, 0] == 7
    (on_cpu,) = jk.explain(jk.matmul, A, B, platform="cpu").choices
    (on_cuda,) = jk.explain(jk.matmul, A, B, platform="cuda").choices
    assert on_cuda.backend == "gpu_only"
    assert ("gpu_only", "runs on cuda devices only, this program is lowered for cpu") in on_cpu.passed_over


def test_one_trace_is_lowered_for_each_platform_by_its_own_backend(install):
    install("gpu_only", platforms=("cuda",))
    traced = jax.jit(jk.matmul).trace(A, B)
    with dispatch.recording() as choices:
        traced.lower(lowering_platforms=("cpu", "cuda"))
    assert [(choice.spec.target.platform, choice.backend) for choice in choices] == [
        ("cpu", "xla"),
        ("cuda", "gpu_only"),
    ]


def test_export_passes_over_what_it_would_refuse(install):
    install("refused", is_exportable=False)
    install("refused_elsewhere", is_exportable=False, platforms=("cuda",))
    reason = 'jax.export takes its custom call with disabled_checks only: name backend="refused" to do that'
    on_cuda = "runs on cuda devices only, this program is lowered for cpu"

    def lowered_for_export(backend: str | None) -> dispatch.Choice:
        with dispatch.recording() as choices:
            export.export(jax.jit(functools.partial(jk.matmul, backend=backend)))(A, B)
        return choices[0]

    assert jk.matmul(A, B)[0, 0] == 70
    choice = lowered_for_export(None)
    assert choice.backend == "xla"
    assert choice.passed_over[:2] == (("refused_elsewhere", on_cuda), ("refused", reason))
    assert lowered_for_export("refused").backend == "refused"
    assert jax.jit(jk.matmul)(A, B)[0, 0] == 70


SLOWER = "the backends after it are faster on this chip"


def test_unpreferred_backend_is_passed_over(install):
    install("second")
    install("first", unpreferred=SLOWER)
    (choice,) = jk.explain(jk.matmul, A, B).choices
    assert (choice.backend, choice.passed_over) == ("second", (("first", SLOWER),))
    assert f"     not first: {SLOWER}" in str(choice).splitlines()
    (named,) = jk.explain(functools.partial(jk.matmul, backend="first"), A, B).choices
    assert (named.backend, named.passed_over) == ("first", ())


def test_unpreferred_backend_is_taken_if_no_other_supports_the_spec(install, registry):
    """The first of several, also where backends that refuse stand around it."""
    install("last", unpreferred=SLOWER)
    install("picky", reason="it is Tuesday")
    install("second", unpreferred=SLOWER)
    install("first", reason="it is Monday")
    for name in ("xla", *REAL):
        registry.pop(("matmul", name), None)
    choice = dispatch.choose("matmul", matmul_spec(), None)
    assert (choice.backend, choice.passed_over) == ("second", (("first", "it is Monday"),))


def test_unpreferred_backend_is_taken_where_it_was_measured_fastest(install, registry, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    install("second")
    install("first", unpreferred=SLOWER)
    spec = matmul_spec()
    dispatch.store_fastest("matmul", "first", spec, 1e-6)
    choice = dispatch.choose("matmul", spec, None)
    assert (choice.backend, choice.passed_over) == ("first", ())
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    choice = dispatch.choose("matmul", spec, None)
    assert choice.backend == "xla"
    assert dict(choice.passed_over)["first"] == dict(choice.passed_over)["second"] == "measured slower than xla"
    # It was measured: another version of it may be faster.
    sys.modules["backend_first"].VERSION += 1
    assert dispatch.choose("matmul", spec, None).backend == "second"


def test_measured_choice_holds_if_an_unpreferred_backend_is_new(install, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    install("slow")
    spec = matmul_spec()
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    install("unpreferred", unpreferred=SLOWER)
    assert dispatch.choose("matmul", spec, None).backend == "xla"
    assert dispatch.is_tuned("matmul", spec, None)
    install("preferred")
    assert dispatch.choose("matmul", spec, None).backend == "preferred"
    assert not dispatch.is_tuned("matmul", spec, None)


@pytest.fixture
def estimated(install, monkeypatch) -> Callable[..., None]:
    """Registers backends whose estimates have a correction, the last one first."""
    corrections: dict[str, float | None] = {}

    def corrections_of(op: str, spec: Any, estimates: Sequence[times.Estimate]) -> dict[str, float]:
        found = {x.backend: corrections.get(x.backend) for x in estimates}
        return {backend: correction for backend, correction in found.items() if correction is not None}

    monkeypatch.setattr(times, "covers", lambda op, spec: True)
    monkeypatch.setattr(times, "corrections_of", corrections_of)

    def estimated(name: str, seconds: float, *, correction: float | None = 0.0, **fields: Any):
        install(name, **fields)
        corrections[name] = correction
        sys.modules[f"backend_{name}"].estimate = lambda spec, config: seconds * config.block / 64

    return estimated


def test_ranking_orders_configurations(install):
    install("first")
    module = sys.modules["backend_first"]
    module.estimate = lambda spec, config, constants=1: constants * float(config.block)
    assert jk.explain(jk.matmul, A, B).choices[0].config == Config()
    install("second")
    module = sys.modules["backend_second"]
    module.estimate, module.RANKING = lambda spec, config, constants=1: constants * float(config.block), -1
    assert jk.explain(jk.matmul, A, B).choices[0].config == Config(block=128)


def chosen() -> tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, float], ...]]:
    (choice,) = jk.explain(jk.matmul, A, B).choices
    return choice.backend, choice.passed_over, choice.estimates


def test_the_backend_with_the_least_estimate_is_taken(estimated):
    estimated("third", 1.1e-5)
    estimated("second", 1.0e-5)
    estimated("first", 1.21e-5)
    backend, passed_over, estimates = chosen()
    assert (backend, passed_over) == ("second", (("first", "estimated at 12.1 us, second at 10 us"),))
    assert dict(estimates) == dict(first=1.21e-5, second=1.0e-5, third=1.1e-5)
    assert str(jk.explain(jk.matmul, A, B)).splitlines()[-2:] == [
        "     estimated: first 12.1 us, second 10 us, third 11 us",
        "     close, but not compared by measurements: first, second, third",
    ]
    with jk.comparing(False):
        assert "close" not in str(jk.explain(jk.matmul, A, B))


def test_corrections_change_estimates(estimated):
    estimated("second", 1.0e-5, correction=math.log(3))
    estimated("first", 2.0e-5, correction=math.log(0.5))
    backend, passed_over, estimates = chosen()
    assert (backend, passed_over) == ("first", ())
    assert dict(estimates) == pytest.approx(dict(first=1.0e-5, second=3.0e-5))


@pytest.mark.parametrize(("seconds", "taken"), [(0.99e-5, "xla"), (0.94e-5, "first")])
def test_xla_is_taken_unless_another_backend_is_faster_by_a_margin(estimated, registry, seconds, taken):
    del registry["matmul", "xla"]
    estimated("xla", 1.0e-5)
    estimated("first", seconds)
    name, passed_over, _ = chosen()
    assert name == taken
    if taken == "xla":
        assert passed_over[-1] == ("first", "estimated at 9.9 us, xla at 10 us: less than 5% apart")


def test_order_decides_between_equal_estimates(estimated):
    estimated("second", 1.0e-5)
    estimated("first", 1.0e-5)
    assert chosen()[:2] == ("first", ())


def test_order_decides_if_the_first_was_not_measured_on_similar_problems(estimated):
    estimated("second", 1.0e-5)
    estimated("first", 1.0e-3, correction=None)
    assert chosen() == ("first", (), (("second", 1.0e-5),))
    assert "estimated" not in str(jk.explain(jk.matmul, A, B))


def test_estimates_do_not_choose_what_is_refused(estimated):
    estimated("second", 1.0e-6, reason="needs care")
    estimated("first", 1.0e-3)
    assert chosen() == ("first", (), (("first", 1.0e-3),))


def test_unpreferred_backend_is_taken_if_it_is_estimated_to_be_faster(estimated):
    estimated("second", 1.0e-6, unpreferred="slow as a rule")
    estimated("first", 1.0e-3)
    assert chosen()[0] == "second"


def test_unpreferred_backend_is_not_taken_if_it_is_estimated_to_be_slower(estimated):
    estimated("second", 1.0e-2, unpreferred="slow as a rule")
    estimated("first", 1.0e-3)
    assert chosen()[:2] == ("first", ())


def test_named_and_measured_backends_need_no_estimate(estimated, monkeypatch, tmp_path):
    estimated("second", 1.0e-6)
    estimated("first", 1.0e-3)
    (choice,) = jk.explain(functools.partial(jk.matmul, backend="first"), A, B).choices
    assert (choice.backend, choice.estimates) == ("first", ())
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    dispatch.store_fastest("matmul", "first", choice.spec, 1e-6)
    assert chosen()[::2] == ("first", ())


def test_estimates_choose_among_designs_and_ranking_within_one():
    def design(name: str, seconds: dict[int, float], ranking: dict[int, float] | None = None) -> types.ModuleType:
        config = dataclasses.make_dataclass("Config", [("block", int)], frozen=True)
        made = types.ModuleType(name)
        made.Config, made.unsupported = config, lambda spec: None
        made.search_space = lambda spec: map(config, seconds)
        made.estimate = lambda spec, config, constants=seconds: constants[config.block]
        if ranking is not None:
            made.RANKING = ranking
        return made

    def chosen(*designs: types.ModuleType) -> tuple[str, int]:
        backend = dispatch.Backend("matmul[fake]", designs)
        config = dispatch._default_config(backend, matmul_spec())
        return backend.design_of(config).__name__, config.block

    ranked = design("ranked", {64: 3.0, 128: 4.0}, {64: 2.0, 128: 1.0})
    assert chosen(ranked) == ("ranked", 128)
    assert chosen(ranked, design("other", {1: 3.5, 2: 9.0})) == ("other", 1)
    assert chosen(design("other", {1: 4.5}), ranked) == ("ranked", 128)
    assert chosen(design("first", {1: 4.0}), ranked) == ("first", 1)


def test_backend_is_unpreferred_if_all_designs_that_support_the_spec_are():
    def design(reason: str | None, *unpreferred: str | None) -> types.SimpleNamespace:
        made = types.SimpleNamespace(__name__="design", unsupported=lambda spec: reason)
        if unpreferred:
            made.unpreferred = lambda spec: unpreferred[0]
        return made

    of = lambda *designs: dispatch.Backend("matmul[fake]", designs).unpreferred(matmul_spec())
    assert of(design(None)) is None
    assert of(design(None, None)) is None
    assert of(design(None, "slow")) == "slow"
    assert of(design(None, "slow"), design(None, "slower")) == "slow"
    assert of(design(None, "slow"), design(None)) is None
    assert of(design("refuses"), design(None, "slow")) == "slow"
    assert of(design("refuses", None), design(None, "slow")) == "slow"
    assert of(design("refuses", "slow")) is None


def test_named_backend_never_falls_back(install):
    install("picky", reason="k must be a multiple of 8; got k=7")
    install("gpu_only", platforms=("cuda",))
    way_out = 'Use backend=None (chooses by itself) or backend="xla".'
    with raises_exactly(NotImplementedError, f"matmul[picky]: k must be a multiple of 8; got k=7. {way_out}"):
        jk.matmul(A, B, backend="picky")
    reason = "runs on cuda devices only, this program is lowered for cpu"
    with raises_exactly(NotImplementedError, f"matmul[gpu_only]: {reason}. {way_out}"):
        jk.matmul(A, B, backend="gpu_only")
    assert jk.matmul(A, B, backend="xla")[0, 0] == 7


def test_named_backend_refuses_when_it_is_called(install):
    """Not when the program is lowered: the traceback shows the call."""
    install("picky", reason="it is Monday")
    with pytest.raises(NotImplementedError, match="it is Monday"):
        jax.eval_shape(lambda a, b: jk.matmul(a, b, backend="picky"), A, B)


def test_named_backend_runs_derivatives_and_batches_too(install):
    install("tenfold")
    f = lambda a, b: jk.matmul(a, b, backend="tenfold")
    da = jax.grad(lambda a: jnp.sum(f(a, B)))(A)
    np.testing.assert_array_equal(da, np.full_like(A, 30))
    assert jax.vmap(f, (0, None))(A[None], B)[0, 0, 0] == 70


def test_backend_without_the_operation(install):
    install("only_matmul")
    message = (
        "attention_forward[only_matmul]: no such kernel in this backend. "
        'Use backend=None (chooses by itself) or backend="xla".'
    )
    with raises_exactly(NotImplementedError, message):
        jk.dot_product_attention(Q, Q, Q, backend="only_matmul")


def test_every_reason_is_listed_where_all_refuse(install, registry):
    install("second", reason="it is Monday")
    install("first", platforms=("cuda",))
    for name in ("xla", *REAL):
        registry.pop(("matmul", name), None)
    message = (
        "matmul: no backend supports f32[5,7] . f32[7,3] -> f32 (m=5 n=3 k=7 mk,kn): "
        "first: runs on cuda devices only, this program is lowered for cpu; second: it is Monday."
    )
    with raises_exactly(NotImplementedError, message):
        jk.matmul(A, B)


def test_broken_backend_raises_with_its_cause(registry, tmp_path, monkeypatch):
    """Also without a named backend: taking another one silently would hide the error."""
    (tmp_path / "broken_backend.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    others = dict(registry)
    registry.clear()
    registry.update({("matmul", "broken"): Entry(("broken_backend",)), **others})
    cause = "No module named 'a_library_that_is_not_there'"
    for backend in (None, "broken"):
        message = f"matmul[broken]: the backend failed to load (broken_backend): {cause}"
        with raises_exactly(ImportError, message) as error:
            jk.matmul(A, B, backend=backend)
        assert isinstance(error.value.__cause__, ModuleNotFoundError)


def test_backend_is_not_loaded_before_it_is_needed(registry):
    """A backend for another platform is passed over without its libraries."""
    others = dict(registry)
    registry.clear()
    registry.update({("matmul", "elsewhere"): Entry(("no_such_module",), ("tpu",)), **others})
    assert jk.matmul(A, B)[0, 0] == 7


def matmul_spec() -> MatmulSpec:
    numbers = (((1,), (0,)), ((), ()))
    return MatmulSpec(ArrayType.of(A), ArrayType.of(B), numbers, A.dtype, hardware.host())


def test_config_is_taken_by_the_backend_it_is_for(install):
    install("tuned")
    assert dispatch.choose("matmul", matmul_spec(), "tuned", Config(block=128)).config == Config(block=128)
    message = "matmul[xla]: config must be a jaxkernels.ops.matmul.reference.Config; got Config(block=64)."
    with raises_exactly(ValueError, message):
        dispatch.choose("matmul", matmul_spec(), "xla", Config())
    message = "matmul: config=Config(block=64) needs the backend it is for. Name it with backend=."
    with raises_exactly(ValueError, message):
        dispatch.choose("matmul", matmul_spec(), None, Config())


def test_config_of_a_public_call_is_the_forward_kernels():
    numbers, options = (((1,), (0,)), ((), ())), dict(backend="xla", config=xla_matmul.Config())
    for f in (
        lambda a, b: jk.matmul(a, b, **options).sum(),
        lambda a, b: jk.matmul(a, b, activation="relu", **options).sum(),
        lambda a, b: jk.dot_general(a, b, numbers, **options).sum(),
    ):
        (choice,) = jk.explain(f, A, B, platform="cuda").choices
        assert (choice.config, choice.source) == (xla_matmul.Config(), "given")
        choices = jk.explain(jax.value_and_grad(f, (0, 1)), A, B, platform="cuda").choices
        assert [choice.source for choice in choices] == ["given", "default", "default"]


def test_derivatives_choose_their_own_config():
    """The forward kernel's configuration means nothing to the backward kernel."""
    attention = AttentionSpec(*[ArrayType.of(Q)] * 3, scale=1.0, target=hardware.host())
    attend = functools.partial(forward_op, attention, backend="xla", config=ForwardConfig())
    forward = lambda q, k, v: attend(dict(q=q, k=k, v=v))[0].sum()
    product = functools.partial(dot_general_op, matmul_spec(), backend="xla", config=xla_matmul.Config())
    multiply = lambda a, b: product(dict(lhs=a, rhs=b)).sum()
    for f, xs in ((forward, (Q, Q, Q)), (multiply, (A, B))):
        equations = jax.make_jaxpr(jax.grad(f, (0, 1)))(*xs).eqns
        of_forward, *of_derivatives = [e.params["config"] for e in equations if e.primitive.name.startswith("jk_")]
        assert of_forward is not None
        assert of_derivatives
        assert all(config is None for config in of_derivatives)
    equations = jax.make_jaxpr(lambda *xs: jax.jvp(forward, xs, xs))(Q, Q, Q).eqns
    assert [e.params["config"] for e in equations if e.primitive.name == "jk_attention_tangent"] == [None]


def test_explain_shows_every_kernel_of_a_program(install):
    install("picky", reason="it is Monday")
    install("gpu_only", platforms=("cuda",))
    f = lambda a, b, q: (
        jk.matmul(a, b, bias=b[0], activation="gelu"),
        jk.dot_product_attention(q, q, q, is_causal=True),
    )
    bf16 = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    text = str(jk.explain(f, bf16(A), bf16(B), bf16(Q), platform="cpu"))
    on_cuda = "runs on cuda devices only, this program is lowered for cpu"
    assert text == "\n".join(
        [
            "lowered for cpu:",
            "matmul  bf16[5,7] . bf16[7,3] -> bf16 (m=5 n=3 k=7 mk,kn) + bias, gelu",
            "  -> xla  Config()",
            f"     not gpu_only: {on_cuda}",
            "     not picky: it is Monday",
            *(f"     not {name}: {on_cuda}" for op, name in dispatch.REGISTRY if op == "matmul" and name in REAL),
            "attention_forward  q bf16[2,5,4,8] k bf16[2,5,4,8] v bf16[2,5,4,8] scale=0.3536 causal drops_lse",
            "  -> xla  Config()",
            *(
                f"     not {name}: {on_cuda}"
                for op, name in dispatch.REGISTRY
                if op == "attention_forward" and name in REAL
            ),
        ]
    )


def test_explain_passes_on_what_is_not_an_array():
    explanation = jk.explain(jk.matmul, A, b=B, activation="gelu", bias=None, platform="cpu")
    assert explanation.choices[0].spec.activation == "gelu"
    jitted = jax.jit(lambda a, b, name: jk.matmul(a, b, activation=name), static_argnums=2)
    assert jk.explain(jitted, A, B, "relu", platform="cpu").choices[0].spec.activation == "relu"


def test_explain_shows_alpha():
    (choice,) = jk.explain(functools.partial(jk.matmul, alpha=1 / 3, activation="relu"), A, B, platform="cpu").choices
    assert str(choice.spec) == "0.3333 * f32[5,7] . f32[7,3] -> f32 (m=5 n=3 k=7 mk,kn) + relu"


def test_explain_runs_nothing_and_needs_no_gpu():
    shape = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    (choice,) = jk.explain(jk.matmul, shape, shape, platform="cuda").choices
    assert choice.spec.target == hardware.lookup(hardware.DEFAULT_CUDA_TARGET)
    assert str(jk.explain(jnp.sin, A, platform="cpu")) == "no jaxkernels operation in this program (lowered for cpu)"


def test_explain_wants_a_platform_it_knows():
    message = "explain: platform must be one of 'cpu', 'cuda', 'rocm', 'tpu', or None; got 'vulkan'."
    with raises_exactly(ValueError, message):
        jk.explain(jk.matmul, A, B, platform="vulkan")


def test_explain_calls_cuda_gpu_too():
    assert jk.explain(jk.matmul, A, B, platform="gpu") == jk.explain(jk.matmul, A, B, platform="cuda")


# The chips.


def test_target_of_cuda_is_what_the_program_will_run_on(monkeypatch):
    @dataclasses.dataclass
    class Device:
        platform: str = "gpu"
        device_kind: str = "NVIDIA H100 PCIe"
        compute_capability: str = "9.0"
        core_count: int = 100  # A part of a chip.

    h100 = hardware.cuda_target([Device()])
    assert (h100.name, h100.num_sms, h100.is_hopper) == ("NVIDIA H100 PCIe", 100, True)
    assert h100.smem_bytes == 232448
    unknown = hardware.cuda_target([Device(device_kind="NVIDIA L40", compute_capability="8.9")])
    assert (unknown.compute_capability, unknown.is_hopper) == ((8, 9), False)
    assert (unknown.smem_bytes, unknown.bf16_flops_per_s) == (101376, None)
    assert str(unknown) == "NVIDIA L40 (compute capability 8.9)"
    assert hardware.cuda_target([Device(device_kind="NVIDIA GH200 480GB")]).smem_bytes == 232448
    on_cpu = jax.devices("cpu")[:1]
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA A100-SXM4-80GB")
    assert hardware.cuda_target(on_cpu).compute_capability == (8, 0)
    monkeypatch.setenv("JAXKERNELS_TARGET", "A100")
    with pytest.raises(ValueError, match="hardware: unknown chip 'A100'; known chips are 'NVIDIA H200', "):
        hardware.cuda_target(on_cpu)


CHIPS = [
    # Name, compute capability, fp32 units of an SM, factor from TF32 to bf16 and from fp32 to TF32 products.
    ("NVIDIA H200", (9, 0), 128, 2, 7.4),
    ("NVIDIA H100 80GB HBM3", (9, 0), 128, 2, 7.4),
    ("NVIDIA H100 PCIe", (9, 0), 128, 2, 7.4),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 64, 2, 8),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 64, 2, 8),
    ("NVIDIA A100 80GB PCIe", (8, 0), 64, 2, 8),
    ("NVIDIA A10", (8, 6), 128, 2, 2),
    ("NVIDIA L4", (8, 9), 128, 2, 2),
    ("NVIDIA L40S", (8, 9), 128, 2, 2),
    ("NVIDIA GeForce RTX 3090", (8, 6), 128, 2, 1),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2, 1),
    ("NVIDIA GeForce RTX 5090", (12, 0), 128, 2, 1),
    ("NVIDIA B200", (10, 0), 128, 2, 15),
]


def test_all_chips_are_in_the_table_of_the_test():
    known = ", ".join(repr(name) for name, *_ in CHIPS)
    with raises_exactly(ValueError, f"hardware: unknown chip 'none'; known chips are {known}."):
        hardware.lookup("none")


@pytest.mark.parametrize(("name", "capability", "fp32_units", "to_bf16", "to_tf32"), CHIPS)
def test_figures_of_a_chip_fit_each_other(name, capability, fp32_units, to_bf16, to_tf32):
    """A wrong figure (a sparse rate, another chip's clock) breaks a ratio that the architecture fixes."""
    chip = hardware.lookup(name)
    assert (chip.compute_capability, chip.platform) == (capability, "cuda")
    assert "datasheet" in chip.source or "whitepaper" in chip.source
    assert chip.smem_bytes == {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) * 1024
    assert chip.bf16_flops_per_s == pytest.approx(to_bf16 * chip.tf32_flops_per_s, rel=0.02)
    assert chip.tf32_flops_per_s == pytest.approx(to_tf32 * chip.fp32_flops_per_s, rel=0.02)
    clock = chip.fp32_flops_per_s / (chip.num_sms * fp32_units * 2)
    assert 1.3e9 < clock < 2.6e9
    assert chip.exps_per_s == pytest.approx(16 * chip.num_sms * clock, rel=0.005)
    # FLOPs for a byte: at which a product is limited by neither.
    assert 70 < chip.bf16_flops_per_s / chip.memory_bytes_per_s < 450


_KERNELS = {design.__name__: op for op, backend in dispatch.REGISTRY for design in dispatch.load(op, backend).designs}
#: A Config names the kernel of the module that defines it. If that is no kernel's module, it names the operation whose
#: kernels share it.
CONFIG_FIELDS = dict.fromkeys(
    (
        design.Config,
        f"{_KERNELS.get(design.Config.__module__, registry.operation_of(op))}[{backend}]",
        field.name,
    )
    for op, backend in dispatch.REGISTRY
    for design in dispatch.load(op, backend).designs
    for field in dataclasses.fields(design.Config)
)


@pytest.mark.parametrize(("cls", "where", "name"), CONFIG_FIELDS, ids=lambda x: getattr(x, "__module__", x))
def test_config_refuses_values_of_another_type(cls, where, name):
    default = getattr(cls(), name)
    others = ["x", 1.5, float("nan"), [], {}, object(), *([] if name in ("split", "cluster") else [None])]
    others += [True, 2.0] if type(default) is int else [0, 1, -1]
    for value in others:
        with pytest.raises(ValueError, match=rf"^{re.escape(where)}: {name} must be ") as e:
            cls(**{name: value})
        assert str(e.value).endswith(f"; got {value!r}. Leave it out for the default.")
    if type(default) is int:
        for value in (-1, -64, -(2**70), *([2**70] if name == "strip" else [])):
            with pytest.raises(ValueError, match=rf"^{re.escape(where)}: .*; got "):
                cls(**{name: value})


def test_config_names_what_a_field_takes():
    config = dispatch.load("matmul", "pallas").designs[0].Config
    with raises_exactly(
        ValueError, 'matmul[pallas]: cluster must be "m" or "n" or None; got \'x\'. Leave it out for the default.'
    ):
        config(cluster="x")
    with raises_exactly(ValueError, "matmul[pallas]: strip must be an int; got 1.5. Leave it out for the default."):
        config(strip=1.5)
