"""Compilation for an H200 where there is none. It needs the extra "aot": compilers and JAX's CUDA plugin."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

_NEEDED = ("jax_plugins.xla_cuda13", "nvidia.cu13")


def _missing() -> list[str]:
    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in _NEEDED if not found(name)]


#: Skips tests where the extra is not installed.
needs_aot = pytest.mark.skipif(bool(_missing()), reason=f'needs the extra "aot"; missing: {", ".join(_missing())}')


@functools.cache
def h200() -> Any:
    """A device for which programs can be compiled, but not run."""
    from jax.experimental import topologies

    config = (Path(__file__).parent / "h200_target_config.txtpb").read_text()
    (device,) = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices
    return device
