"""What all suites share: eight virtual CPU devices, the backends a machine can run, the tables of cases."""

from __future__ import annotations

import os
from pathlib import Path

# Before JAX starts its CPU client. It leaves GPUs as they are: the tests marked gpu see the real ones.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# XLA measures its own ways to multiply: of no use to a reference, and most of the time that its compilation takes.
# The tests that compare speed turn it on again.
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
# Programs for the CPU run once: to optimise their machine code takes longer than it saves. The same option would slow
# down what XLA compiles for a GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
# pytest-xdist's workers share a GPU: each takes what its arrays need, and keeps nothing.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    # Where there are several GPUs, each worker has one.
    if (num_gpus := len(list(Path("/dev").glob("nvidia[0-9]*")))) > 1:
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(worker % num_gpus))

import collections
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest
from cases import ATTENTION_CASES, MATMUL_CASES, NORM_CASES

from jaxkernels.core import dispatch, hardware, winners
from jaxkernels.triton import calls

# Tracing and lowering make millions of objects that stay: to look for garbage less often saves 5 % of their time.
gc.set_threshold(100_000, 50, 1000)

OPS = tuple(dict.fromkeys(op for op, _ in dispatch.REGISTRY))


def _missing_hardware() -> str | None:
    """Why this machine cannot run the tests marked gpu, or None if it can."""
    chip = hardware.chip_of(jax.devices()[0])
    if chip.is_hopper:
        return None
    found = str(chip) if chip.platform == "cuda" else "no CUDA device"
    return f"needs a CUDA device of compute capability 9.0; this machine has {found}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="all cases of tests marked `sampled`, and tests marked `thorough`"
    )
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="every N-th of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        _sample(config, items)
    items[:] = items[:: config.getoption("--one-in")]
    if any(item.get_closest_marker("gpu") for item in items) and (reason := _missing_hardware()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests marked `sampled` and tests marked `thorough`, unless tests were asked for by name."""
    if config.option.keyword or any("::" in arg for arg in config.args):
        return
    counts: collections.Counter[str] = collections.Counter()
    kept, left_out = [], []
    for item in items:
        if item.get_closest_marker("thorough"):
            left_out.append(item)
            continue
        if (sampled := item.get_closest_marker("sampled")) is None:
            kept.append(item)
            continue
        of = sampled.kwargs.get("of", item.nodeid.partition("[")[0])
        (left_out if counts[of] % sampled.kwargs.get("one_in", 13) else kept).append(item)
        counts[of] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests over op x backend x case.

    With `matmul_case`, `attention_case` or `norm_case`, `backend` is "xla" on the table's small cases, one in five of
    them without --thorough, and on a Hopper GPU every kernel backend of the operation on all of them. By itself it is
    "xla" and "opaque" (see the fixture): how an operation behaves does not depend on its kernel.
    """
    if "backend" not in metafunc.fixturenames:
        return
    tables: dict[str, tuple[str, Sequence[Any]]] = dict(
        matmul_case=("matmul", MATMUL_CASES),
        attention_case=("attention_forward", ATTENTION_CASES),
        norm_case=("norm_forward", NORM_CASES),
    )
    name = next((name for name in tables if name in metafunc.fixturenames), None)
    if name is None:
        metafunc.parametrize("backend", ["xla", "opaque"], indirect=True)
        return
    op, cases = tables[name]
    on_gpu = [(backend, pytest.mark.gpu) for of, backend in dispatch.REGISTRY if of == op and backend != "xla"]
    params = [
        pytest.param(backend, case, marks=marks, id=f"{backend}-{case.id}")
        for case in cases
        for backend, marks in ([("xla", pytest.mark.sampled(one_in=5)), *on_gpu] if case.size == "small" else on_gpu)
    ]
    metafunc.parametrize(f"backend,{name}", params, indirect=["backend"])


@pytest.fixture(scope="session", autouse=True)
def _untuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which configuration a kernel gets depends neither on this machine's tuning nor on the table that is shipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAXKERNELS_AUTOTUNE", "0")
        patch.setattr(winners, "_TABLES", tmp_path_factory.mktemp("tables"))
        jax.config.update("jax_enable_compilation_cache", False)  # Commands would switch it on for all later tests.
        yield


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the kernels that are compiled for the emulator: suites share its precompiled headers."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests not marked gpu run on the CPU also where there is a GPU."""
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend for every operation that is plain JAX under a name of its own.

    Whatever asks for the name of a backend treats it as a kernel that XLA cannot see into: on the CPU it tests
    how kernels get into a mesh. Nothing chooses it unasked: it stands last in the order of preference.
    """
    for op in OPS:
        monkeypatch.setitem(dispatch.REGISTRY, (op, "opaque"), dispatch.Entry(dispatch.REGISTRY[op, "xla"].designs))
    return "opaque"


#: Linux allows a process 65,530 mappings of memory, and every program that XLA compiles for the CPU takes several. The
#: one beyond them ends the process.
_MANY_MAPPINGS = 30_000


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Drops the compiled programs of the tests before, when they are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "opaque":
        return request.getfixturevalue("opaque")
    return request.param


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], dispatch.Entry]]:
    """The registry of backends, to be changed by one test.

    JAX caches what was lowered under the old registry, and must forget what is lowered under the changed one.
    """
    original = dict(dispatch.REGISTRY)
    jax.clear_caches()
    dispatch.load.cache_clear()
    yield dispatch.REGISTRY
    dispatch.REGISTRY.clear()
    dispatch.REGISTRY.update(original)
    dispatch.load.cache_clear()
    jax.clear_caches()


@pytest.fixture
def as_if_triton_was_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels are chosen and configured as on a machine that can launch them."""

    def forget() -> None:
        dispatch._search_space.cache_clear()
        dispatch._default_config.cache_clear()

    monkeypatch.setattr(calls, "missing", lambda: None)
    forget()
    yield
    forget()


@dataclasses.dataclass(frozen=True)
class Meshes:
    """One 4 x 2 mesh of virtual CPU devices, with axes "x" and "y", for each kind of axis."""

    auto: jax.sharding.Mesh
    explicit: jax.sharding.Mesh
    mixed: jax.sharding.Mesh


@pytest.fixture(scope="session")
def meshes() -> Meshes:
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    make = lambda *kinds: jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds, devices=jax.devices("cpu"))
    return Meshes(auto=make(auto, auto), explicit=make(explicit, explicit), mixed=make(explicit, auto))
