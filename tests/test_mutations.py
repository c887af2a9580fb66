"""The tests themselves: each bug of mutations.py is planted in a copy of the package, where its test must fail."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from mutations import MUTATIONS, Edit, Planted

ROOT = pathlib.Path(__file__).parent.parent
_COPIED = ("jaxkernels", "pallas", "ffi", "models", "tests", "pyproject.toml")
#: Seconds after which a test that never ends is taken to have noticed nothing.
_LONGEST = 550

#: Runs pytest on the copy, whether or not the package is installed, as it is or in editable mode, with one bug or none.
#: It ends with the status of pytest, or one of its own if another package, or none, was imported.
_SCRIPT = """
import sys
folder, bug, *arguments = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
sys.path[:0] = [folder, folder + "/tests"]
try:
    import jaxkernels, mutations, pytest
    is_copy = jaxkernels.__file__.startswith(folder)
    if bug:
        mutations.MUTATIONS[bug].plant()
    status = pytest.main(arguments) if is_copy else 91
except BaseException:
    status = 92
    raise
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    __import__("os")._exit(status)
"""


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the package and of its tests."""
    folder = tmp_path_factory.mktemp("mutated")
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@contextlib.contextmanager
def edited(folder: pathlib.Path, mutation: Edit) -> Iterator[None]:
    path = folder / mutation.path
    text = path.read_text()
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        yield
    finally:
        path.write_text(text)


def run(folder: pathlib.Path, *tests: str, bug: str = "") -> tuple[int, str]:
    """Pytest's exit status and output, with a faulty part planted in its process."""
    # Python takes bytecode for up to date if a file's size and second of change are the same.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _SCRIPT, str(folder), bug, "-x", "-q", "-p", "no:cacheprovider", *tests]
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=_LONGEST * len(tests)
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_has_its_place_in_the_source(mutation: Edit | Planted) -> None:
    if isinstance(mutation, Edit):
        assert (ROOT / mutation.path).read_text().count(mutation.before) == 1, f"{mutation.path}: {mutation.before!r}"
        assert mutation.before != mutation.after
    else:
        right = mutation.fault.right(importlib.import_module(mutation.fault.module))
        assert mutation.fault.make(right) != right
    file, _, test = mutation.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), mutation.test


@pytest.mark.thorough
@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_mutation_fails_its_test(bug: str, copy: pathlib.Path) -> None:
    mutation = MUTATIONS[bug]
    if isinstance(mutation, Edit):
        with edited(copy, mutation):
            status, output = run(copy, mutation.test)
    else:
        status, output = run(copy, mutation.test, bug=bug)
    # Tests failed: neither collection nor the import, of which a test would say nothing.
    assert status == pytest.ExitCode.TESTS_FAILED, output


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_without_mutations_the_same_tests_pass(copy: pathlib.Path) -> None:
    status, output = run(copy, *dict.fromkeys(mutation.test for mutation in MUTATIONS.values()))
    assert status == pytest.ExitCode.OK, output
