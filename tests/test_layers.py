"""Folders are layers: each imports from itself and from folders below it.

From the top: the command line, benchmarks, models, the public face, tuning, operations, backends, core.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import pathlib
from collections.abc import Iterator

import pytest

import jaxkernels

ROOT = pathlib.Path(jaxkernels.__file__).parent
BACKENDS = ("pallas", "ffi", "triton", "cudnn")

#: The engine that assembles and launches kernels. It is in the folder of the CUDA kernels, and launches Triton's, too.
ENGINE = {f"jaxkernels.ffi.{name}" for name in ("assembler", "cubin", "custom_call", "handler")}

#: Folders of the package from the top; "" is the public face, the modules in the package's own folder.
LAYERS = (("cli", "__main__"), ("bench",), ("models",), ("",), ("tuning",), ("ops",), BACKENDS, ("core",))


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its name, wherever its folder stands."""
    folders = [("jaxkernels", ROOT)]
    for name in ("models", "pallas", "ffi"):
        spec = importlib.util.find_spec(f"jaxkernels.{name}")
        # In an editable install the compiled part lies in a folder of its own.
        folders += [(f"jaxkernels.{name}", pathlib.Path(folder)) for folder in spec.submodule_search_locations]
    found = {}
    for package, folder in folders:
        for path in folder.rglob("*.py"):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join([package, *parts])] = path
    return found


MODULES = modules()


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    """Modules of ours and of JAX's that this one imports, also inside functions, but not for type checkers alone."""
    return frozenset(_imports_of(name, ast.parse(MODULES[name].read_text())))


def _imports_of(name: str, tree: ast.AST) -> Iterator[str]:
    is_package = MODULES[name].name == "__init__.py"
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
            base = ".".join([*parents, *([node.module] if node.module else [])]) if node.level else node.module
            # `from package import module` imports the module, `from module import name` does not.
            yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _imports_of(name, other)
        else:
            yield from _imports_of(name, node)


def ours(name: str) -> set[str]:
    """Modules of this package that a module imports."""
    return {imported for imported in imports_of(name) if imported.split(".")[0] == "jaxkernels"}


def folder_of(name: str) -> str:
    parts = name.split(".")[1:]
    folders = {folder for layer in LAYERS for folder in layer}
    if parts and parts[0] in folders:
        return parts[0]
    assert len(parts) < 2, f"{name}: the folder {parts[0]} is in no layer. Add it to LAYERS."
    return ""


def layer_of(name: str) -> int:
    return next(depth for depth, folders in enumerate(LAYERS) if folder_of(name) in folders)


@functools.cache
def reached_from(name: str) -> frozenset[str]:
    """Modules of ours that importing this one imports, directly or through others."""
    found, open_ends = set(), [name]
    while open_ends:
        for imported in ours(open_ends.pop()) - {"jaxkernels"} - found:
            found.add(imported)
            open_ends.append(imported)
    return frozenset(found)


def test_engine_needs_no_kernel():
    for name in ENGINE:
        assert not {
            imported for imported in reached_from(name) if imported.count(".") > 2 and folder_of(imported) == "ffi"
        }


def test_all_modules_are_found():
    names = "jaxkernels", "jaxkernels.ops.matmul.api", "jaxkernels.pallas", "jaxkernels.ffi"
    assert {*names} <= {*MODULES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    for imported in ours(name):
        if folder_of(name) in BACKENDS and folder_of(imported) == "ops":
            continue  # test_backends_import_descriptions_only
        assert layer_of(name) <= layer_of(imported), f"{name} imports {imported}, which stands above it"
        if folder_of(name) in BACKENDS and folder_of(imported) in BACKENDS and imported not in ENGINE:
            assert folder_of(name) == folder_of(imported), f"{name} imports {imported}, another backend"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if folder_of(name) in BACKENDS))
def test_backends_import_descriptions_only(name):
    """A backend reads what an operation is (its spec), never the primitive that calls the backend."""
    for imported in ours(name):
        if folder_of(imported) == "ops":
            above = {m for m in reached_from(imported) if folder_of(m) != "ops" and layer_of(m) < layer_of(name)}
            assert not above, f"{name} imports {imported}, which imports {above}"
            assert "jaxkernels.core.kernel_op" not in reached_from(imported), f"{imported} binds primitives"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if folder_of(name) in ("ops", "core")))
def test_operations_do_not_import_backends(name):
    """Operations name backends in the registry; `dispatch` loads them when it needs them."""
    assert not {imported for imported in reached_from(name) if folder_of(imported) in BACKENDS}


def test_models_use_the_public_face_only():
    """Models may also use three modules of core: the table of chips, the folders of caches, the error for bad input."""
    public = "jaxkernels", "jaxkernels.core.hardware", "jaxkernels.core.folders", "jaxkernels.core.errors"
    for name in MODULES:
        if folder_of(name) == "models":
            assert {imported for imported in ours(name) if folder_of(imported) != "models"} <= {*public}, name


def test_private_names_of_jax_are_used_in_one_file():
    users = {name for name in MODULES for imported in imports_of(name) if imported.startswith("jax._src")}
    assert users == {"jaxkernels.core._jax"}
