"""The files of an installation: the wheel, the launcher or the reason for its absence, editable installs."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from scikit_build_core.settings import skbuild_overrides
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

import jaxkernels as jk

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = "jaxkernels/ffi/libjaxkernels_launcher.so"
NOTE = "jaxkernels/ffi/launcher.txt"
BUILT = r"built with (GNU|Clang) [\d.]+, headers of XLA FFI \d+\.\d+ and CUDA \d+\.\d+"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is built on Linux only")


def clean(env: dict[str, str]) -> dict[str, str]:
    """The environment without what would lead to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")} | env


def pip(*args: str, **env: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    outcome = subprocess.run(command, capture_output=True, text=True, env=clean(env), cwd=ROOT.parent)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def wheel(folder: pathlib.Path, **env: str) -> zipfile.ZipFile:
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT), **env)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def evaluate(interpreter: str, expression: str, **env: str) -> str:
    """Runs Python in a folder outside of the checkout, and returns the printed value of the expression."""
    script = f"import jaxkernels.ffi\nprint({expression})"
    command = [interpreter, "-c", script]
    outcome = subprocess.run(command, capture_output=True, text=True, env=clean(env), cwd=pathlib.Path(sys.prefix))
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


@pytest.fixture
def environment(tmp_path) -> str:
    """The interpreter of a virtual environment that sees the packages of this one.

    An editable installation here does not reach it: its hook is a .pth file, read in its own folder only.
    """
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "base.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.fixture(scope="module")
def built_wheel(tmp_path_factory) -> zipfile.ZipFile:
    return wheel(tmp_path_factory.mktemp("wheel"))


def test_version_is_that_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jk.__version__ == version
    outcome = subprocess.run([sys.executable, "-m", "jaxkernels", "--version"], capture_output=True, text=True)
    assert outcome.stdout == f"jaxkernels {version}\n"


def test_completion_shows_the_public_names():
    assert sorted(dir(jk)) == sorted(jk.__all__)
    assert {"ffi", "models"} <= set(dir(jk))
    assert all(hasattr(jk, name) for name in dir(jk))
    with pytest.raises(AttributeError, match="module 'jaxkernels' has no attribute 'nonsense'"):
        _ = jk.nonsense


def test_wheel_holds_nothing_but_the_package(built_wheel):
    names = built_wheel.namelist()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"jaxkernels", f"jaxkernels-{version}.dist-info"}
    assert {LIBRARY, NOTE} <= set(names)
    for folder in ("jaxkernels", "pallas", "ffi", "models"):
        inside = "jaxkernels/" if folder == "jaxkernels" else f"jaxkernels/{folder}/"
        for source in (path for suffix in ("py", "cu", "cuh") for path in (ROOT / folder).rglob(f"*.{suffix}")):
            assert inside + source.relative_to(ROOT / folder).as_posix() in names
    assert not [name for name in names if name.endswith((".cc", ".h", ".o", "CMakeLists.txt")) or "__pycache__" in name]


def test_installed_wheel_finds_its_launcher(built_wheel, environment, tmp_path):
    site = tmp_path / "site"
    built_wheel.extractall(site)
    assert re.fullmatch(
        rf"{BUILT} \({re.escape(str(site / LIBRARY))}\)",
        evaluate(environment, "jaxkernels.ffi.status()", PYTHONPATH=str(site)),
    )
    modules = "__import__('jaxkernels.pallas'), __import__('jaxkernels.models'), jaxkernels.ffi.__file__"
    assert str(site / "jaxkernels" / "ffi" / "__init__.py") in evaluate(environment, modules, PYTHONPATH=str(site))


def test_without_a_compiler_the_wheel_says_so(environment, tmp_path):
    contents = wheel(tmp_path / "wheel", CXX="/nowhere/c++")
    assert LIBRARY not in contents.namelist()
    contents.extractall(tmp_path / "site")
    assert evaluate(environment, "jaxkernels.ffi.status()", PYTHONPATH=str(tmp_path / "site")) == (
        "not built: the C++ compiler CXX=/nowhere/c++ does not work; install the package again once that is mended"
    )


def test_bare_checkout_asks_to_be_installed(environment):
    assert evaluate(environment, "jaxkernels.ffi.status()", PYTHONPATH=str(ROOT)) == (
        "not built: install the package (pip install -e .)"
    )
    assert evaluate(environment, "jaxkernels.ffi.__file__", PYTHONPATH=str(ROOT)) == str(ROOT / "ffi" / "__init__.py")


def test_editable_install_finds_launcher_and_sources(environment, tmp_path):
    pip("--python", environment, "install", "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    ours = {path.name for path in site.iterdir()} - {"base.pth", "__pycache__"}
    assert all("jaxkernels" in name for name in ours)
    assert {name for name in ours if (site / name).is_dir() and not name.endswith(".dist-info")} == {"jaxkernels"}
    for env in ({}, {"PYTHONPATH": str(ROOT)}):
        assert re.fullmatch(
            rf"{BUILT} \({re.escape(str(site / LIBRARY))}\)", evaluate(environment, "jaxkernels.ffi.status()", **env)
        )
        assert evaluate(environment, "jaxkernels.ffi.__file__", **env) == str(ROOT / "ffi" / "__init__.py")
    links = {name: (ROOT / "jaxkernels" / name).readlink() for name in ("ffi", "models", "pallas")}
    assert links == {name: pathlib.Path("..", name) for name in links}, "type checkers follow these"
    built_here = [path.name for path in (ROOT / "ffi").iterdir() if path.suffix in (".so", ".o", ".txt")]
    assert not built_here, "the checkout stays as it is"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-DJAXKERNELS_LAUNCHER=OFF"], "it was switched off (JAXKERNELS_LAUNCHER=OFF) when the package was installed"),
        (["-DPython_EXECUTABLE={bare}"], "jaxlib's headers (xla/ffi/api/ffi.h) were not found by {bare}"),
        (
            ["-DCUDA_INCLUDE_DIR={old}"],
            "{old}/cuda.h is of CUDA 11.8, too old; the package nvidia-cuda-runtime has 13",
        ),
    ],
)
def test_cmake_records_why_it_builds_nothing(tmp_path, options, reason):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    folders = {"bare": tmp_path / "bare" / "bin" / "python", "old": tmp_path}
    (tmp_path / "cuda.h").write_text("#define CUDA_VERSION 11080\n")
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", *(option.format(**folders) for option in options)]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["cmake", "--install", tmp_path / "build", "--prefix", tmp_path / "out"], check=True)
    installed = [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")]
    assert installed == [NOTE]
    assert (tmp_path / "out" / NOTE).read_text() == f"not built: {reason.format(**folders)}\n"


@pytest.mark.parametrize(("platform", "runs_cmake"), [("linux", True), ("darwin", False), ("win32", False)])
def test_cmake_runs_on_linux_only(monkeypatch, platform, runs_cmake):
    monkeypatch.setattr(skbuild_overrides.sys, "platform", platform)
    settings = SettingsReader.from_file(ROOT / "pyproject.toml", state="wheel").settings
    assert settings.wheel.cmake is runs_cmake


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_an_older_python_is_named_in_the_error(monkeypatch, version):
    monkeypatch.setattr(skbuild_overrides.sys, "version_info", (*map(int, version.split(".")), 0, "final", 0))
    settings = SettingsReader.from_file(ROOT / "pyproject.toml", state="metadata_wheel").settings
    assert bool(settings.fail) is (version == "3.11")
    assert bool(settings.fail) is ("needs Python 3.12 or newer" in settings.messages.after_failure)


def test_no_build_requirement_needs_a_newer_python_than_pip_runs_on():
    # pip installs the build requirements before it reads which Python the package needs.
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (jaxlib,) = [
        requirement
        for requirement in map(Requirement, pyproject["build-system"]["requires"])
        if requirement.name == "jaxlib" and requirement.marker.evaluate({"python_version": "3.14"})
    ]
    assert not jaxlib.marker.evaluate({"python_version": "3.11"})


def test_launcher_is_built_with_the_oldest_headers_we_support():
    # XLA refuses a handler that was built with headers newer than itself.
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built_with = [Requirement(line) for line in pyproject["build-system"]["requires"] if line.startswith("jaxlib")]
    here = [requirement for requirement in built_with if requirement.marker.evaluate()]
    (runs_with,) = [Requirement(line) for line in pyproject["project"]["dependencies"] if line.startswith("jax>")]
    oldest = re.fullmatch(r">=([\d.]+)", str(runs_with.specifier))[1]
    assert [str(requirement.specifier) for requirement in here] == [f"=={oldest}"]
