"""JAX's persistent compilation cache: its folder, and whether programs of this package can be kept in it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jaxkernels.core import compilation_cache

ROOT = pathlib.Path(__file__).parent.parent

#: Runs the command line, and prints how many programs came from the cache and how many were compiled.
COUNTED = """
import sys, jax
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from jaxkernels import cli
try:
    cli.main()
finally:
    print("found", *(events.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses")))
"""

#: Prints a digest of programs with kernels of each backend.
LOWERED = """
import hashlib, sys, jax, jax.numpy as jnp
import jaxkernels as jk

x, w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
mean = lambda y: jnp.mean(y.astype(jnp.float32))
product = lambda backend: lambda x, w: mean(jk.matmul(x, w, activation="silu", backend=backend))
attention = lambda backend: lambda q, k, v: mean(jk.dot_product_attention(q, k, v, is_causal=True, backend=backend))
for f, xs, backends in ((product, (x, w), ("cuda", "pallas")), (attention, (q, q, q), ("pallas",))):
    for backend in backends:
        program = jax.jit(jax.value_and_grad(f(backend))).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()
        print(backend, "custom_call" in program, "callback" in program, hashlib.sha256(program.encode()).hexdigest())
"""


def run(script: str, *args: object, **variables: object) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | {k: str(v) for k, v in variables.items()}
    env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # The programs run once.
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_second_run_compiles_nothing_again(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    cache = dict(JAXKERNELS_CACHE_DIR=tmp_path / "cache")
    options = ("--steps=2", "--batch-size=2", "--sequence-length=16", "--data", tmp_path / "text.txt")
    found = []
    for name in ("first", "second"):
        out = run(COUNTED, "train", *options, "--out", tmp_path / name, **cache)
        found.append([int(number) for number in out.splitlines()[-1].split()[1:]])
    (_, compiled), (loaded, compiled_again) = found
    assert loaded >= compiled > 0
    assert compiled_again == 0
    assert (tmp_path / "cache" / "programs").stat().st_mode & 0o777 == 0o700


def test_programs_with_kernels_have_the_same_key_in_every_process():
    """The key is a digest of the program: an address in it, or a changing order, would make a new key each time."""
    first, second = (run(LOWERED, PYTHONHASHSEED=seed) for seed in (1, 2))
    assert first == second
    assert [line.split()[:3] for line in first.splitlines()] == [
        [backend, "True", "False"] for backend in ("cuda", "pallas", "pallas")
    ]


@pytest.fixture
def unset(tmp_path, monkeypatch):
    """JAX's cache as if the user had chosen nothing."""
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    names = "compilation_cache_dir", "enable_compilation_cache", "persistent_cache_min_compile_time_secs"
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    for name, value in zip(before, (None, True, 1.0)):
        jax.config.update(name, value)
    yield tmp_path / "cache" / "programs"
    for name, value in before.items():
        jax.config.update(name, value)


def test_cache_is_in_the_packages_folder(unset):
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir == str(unset)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_threshold_of_the_user_is_kept(unset, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1.0")
    assert compilation_cache.enable() is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1


def test_folder_of_the_user_is_kept(unset, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert not unset.exists()


def test_cache_that_is_switched_off_stays_off(unset):
    jax.config.update("jax_enable_compilation_cache", False)
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_folder_that_others_may_write_to_is_not_used(unset):
    unset.mkdir(parents=True)
    unset.chmod(0o777)
    assert compilation_cache.enable() == f"{unset}: other users may write to it (mode 0777)"
    assert jax.config.jax_compilation_cache_dir is None


def test_folder_that_cannot_be_made_is_one_clear_reason(unset):
    unset.parent.write_text("a file")
    assert compilation_cache.enable() == f"{unset}: Not a directory"
