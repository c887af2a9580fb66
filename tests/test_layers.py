"""Imports point down only: command line, models, public face, tuner, operations, dispatch, backends, specs."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest

import jaxkernels

ROOT = pathlib.Path(jaxkernels.__file__).parent

#: Layers from the top. A module imports from its own layer's package and from layers below, nothing else of ours.
LAYERS: dict[str, tuple[str, ...]] = {
    "command line": (
        "jaxkernels.__main__", "jaxkernels.bench", "jaxkernels.cli", "jaxkernels.doctor", "jaxkernels.tuning.cli",
    ),
    "models": ("jaxkernels.models",),
    "public face": ("jaxkernels", "jaxkernels.checkpoint_policies", "jaxkernels.explain", "jaxkernels.tuning.autotune"),
    "operations": ("jaxkernels.ops",),
    # Measures kernels as dispatch knows them, with the benchmarks' method; knows nothing of primitives.
    "tuner": ("jaxkernels.tuning.tuner", "jaxkernels.tuning.operands"),
    "dispatch": ("jaxkernels.core.kernel_op", "jaxkernels.core.dispatch", "jaxkernels.core.sharding"),
    "backends": ("jaxkernels.pallas", "jaxkernels.ffi", "jaxkernels.triton"),
    "winners on disk": ("jaxkernels.tuning.cache", "jaxkernels.tuning"),
    "ground": (
        "jaxkernels.core", "jaxkernels.ops.matmul.spec", "jaxkernels.ops.attention.spec",
        "jaxkernels.ops.matmul.tensor_cores", "jaxkernels.ops.matmul.epilogue",
        "jaxkernels.core.folders", "jaxkernels.core._jax", "jaxkernels.core.arguments",
        "jaxkernels.core.versions", "jaxkernels.bench.measure",
    ),
}  # fmt: skip
BACKENDS = LAYERS["backends"]

#: What the layers would forbid. Derivatives of the derivatives are those of the reference in plain JAX: it defines what
#: the operations mean, and happens to be a backend too.
ALLOWED = {
    ("jaxkernels.ops.attention.api", "jaxkernels.ops.attention.reference"),
    # jk.models is a name of the public face. It is imported at first use.
    ("jaxkernels", "jaxkernels.models"),
}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its name, wherever its folder stands."""
    folders = [("jaxkernels", ROOT)]
    for name in ("models", "pallas", "ffi"):
        spec = importlib.util.find_spec(f"jaxkernels.{name}")
        # Of an editable install the compiled part lies in a folder of its own.
        folders += [(f"jaxkernels.{name}", pathlib.Path(folder)) for folder in spec.submodule_search_locations]
    found = {}
    for package, folder in folders:
        for path in folder.rglob("*.py"):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    return found


MODULES = modules()


def imports_of(name: str) -> Iterator[str]:
    """Modules that this one imports, also inside functions."""
    is_package = MODULES[name].name == "__init__.py"
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
            base = ".".join([*parents, *([node.module] if node.module else [])]) if node.level else node.module
            # `from package import module` imports the module, `from module import name` does not.
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)


def layer_of(name: str) -> int:
    """The layer of the longest member that the name is, or is inside of."""
    places = {member: depth for depth, members in enumerate(LAYERS.values()) for member in members}
    inside = [m for m in places if name == m or (name.startswith(f"{m}.") and m != "jaxkernels")]
    assert inside, f"{name} stands in no layer: add it to LAYERS"
    return places[max(inside, key=len)]


def backend_of(name: str) -> str | None:
    return next((backend for backend in BACKENDS if name == backend or name.startswith(f"{backend}.")), None)


def test_all_modules_are_found():
    names = "jaxkernels", "jaxkernels.ops.matmul.api", "jaxkernels.pallas", "jaxkernels.ffi"
    assert {*names} <= {*MODULES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    for imported in imports_of(name):
        if imported.split(".")[0] != "jaxkernels" or (name, imported) in ALLOWED:
            continue
        if imported == "jaxkernels":  # The package's own docstring and functions: for those above it.
            assert layer_of(name) <= layer_of("jaxkernels"), f"{name} imports the public face"
            continue
        assert layer_of(name) <= layer_of(imported), f"{name} imports {imported}, which stands above it"
        if (backend := backend_of(name)) and backend_of(imported):
            assert backend == backend_of(imported), f"{name} imports {imported}, another backend"


def test_operations_do_not_import_backends_otherwise():
    """They name them to `dispatch`, which loads them when they are needed."""
    found = {
        (name, imported)
        for name in MODULES
        if layer_of(name) < layer_of("jaxkernels.pallas")
        for imported in imports_of(name)
        if backend_of(imported)
    }
    of_operations = {(name, imported) for name, imported in found if name.startswith("jaxkernels.ops")}
    assert of_operations == {(name, imported) for name, imported in ALLOWED if backend_of(imported)}
    assert not any(name == "jaxkernels.core.dispatch" for name, _ in found)


def test_models_use_the_public_face_only():
    """And the table of chips, to report their share of the peak, and the rule for where caches are kept."""
    public = "jaxkernels", "jaxkernels.core.hardware", "jaxkernels.core.folders", "jaxkernels.core.errors"
    for name in MODULES:
        if name.startswith("jaxkernels.models"):
            ours = {imported for imported in imports_of(name) if imported.split(".")[0] == "jaxkernels"}
            assert {i for i in ours if not i.startswith("jaxkernels.models")} <= set(public), name


def test_private_names_of_jax_are_used_in_one_file():
    users = {name for name in MODULES for imported in imports_of(name) if imported.startswith("jax._src")}
    assert users == {"jaxkernels.core._jax"}
