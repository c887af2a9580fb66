"""The CUDA matmul kernel for few rows: what it refuses, that every config compiles without spills, its results on an
emulator (tests/cuda/emulated), and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator
from products import LAYOUTS, assert_right, make_spec, random_operands

from jaxkernels.ffi.matmul import few_rows
from jaxkernels.ops.matmul.spec import MatmulSpec

Config = few_rows.Config


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(few_rows, "_compile_cached", few_rows._compile_cached.__wrapped__)
    with Emulator(libraries, {"jaxkernels::few_rows": DYNAMIC_SMEM}).installed() as emulator:
        yield emulator


def check_emulated(spec: MatmulSpec, config: Config) -> None:
    """Runs the kernel on a chip of one SM, so that CTAs work on several tiles each, and checks the result."""
    assert few_rows.unsupported(spec) is None
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=1))
    assert_right(spec, few_rows.run(spec, config, *map(jnp.asarray, random_operands(spec))))


@NEEDS_COMPILER
@pytest.mark.parametrize("split_k", [1, 2, 4, 8])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_emulated_layouts(layouts: str, split_k: int, emulator: Emulator) -> None:
    check_emulated(make_spec(16, 200, 584, layouts=layouts), Config(64, 64, 3, split_k))
    check_emulated(make_spec(200, 24, 584, layouts=layouts), Config(64, 64, 3, split_k))
