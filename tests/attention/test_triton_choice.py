"""The configurations that Triton's cost models choose, compared with measured times. It needs no Triton."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from typing import Any

import pytest
from attentions import H200

from jaxkernels.core import dispatch, plain
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.triton import calls
from jaxkernels.triton.attention import backward, costs, forward
from jaxkernels.triton.attention.problem import head_parts

_TIMES = pathlib.Path(__file__).parents[2] / "docs/benchmarks/choice/triton-configurations-h200.json"


@functools.cache
def measured(op: str) -> dict[str, tuple[AttentionSpec, dict[Any, float]]]:
    """Problem -> its spec, and the seconds of each configuration that was timed. The forward pass was timed before it
    had heads in two blocks of columns, and tiles of 256 and 512 keys.
    """
    backend, found = dispatch.load(op, "triton"), {}
    for problem in json.loads(_TIMES.read_text())["problems"]:
        if problem["op"] == op and len(problem["configurations"]) > 2:
            spec = plain.restore(AttentionSpec, problem["spec"], H200)
            if op == "attention_forward" and any(head_parts(x.shape[3], H200)[1] for x in (spec.q, spec.v)):
                continue
            times = {backend.decode(one["config"]): one["seconds"] for one in problem["configurations"]}
            found[problem["drawn"]] = spec, times
    return found


def losses(op: str) -> dict[str, float]:
    """Problem -> the time of the default configuration over that of the fastest, if the default was timed."""
    found = {}
    for name, (spec, times) in measured(op).items():
        default = dispatch.default_config(op, "triton", spec)
        if default in times:
            found[name] = times[default] / min(times.values())
    return found


def num_newer(op: str) -> int:
    """How many problems have a default that is newer than the times: a tile that holds all keys."""
    defaults = [dispatch.default_config(op, "triton", spec) for spec, _ in measured(op).values()]
    return sum(isinstance(config, forward.Config) and costs.holds_all_keys(config) for config in defaults)


@pytest.mark.parametrize(("op", "least", "mean"), [("attention_forward", 45, 1.05), ("attention_backward", 14, 1.06)])
def test_default_is_nearly_the_fastest_configuration(op, least, mean, monkeypatch):
    """With an earlier cost model the defaults took 1.15 and 1.09 times as long as the fastest, and up to 1.85."""
    monkeypatch.setattr(calls, "missing", lambda: None)
    found = losses(op)
    assert len(found) + num_newer(op) >= least
    assert math.prod(found.values()) ** (1 / len(found)) <= mean
    assert {name: loss for name, loss in found.items() if loss > 1.3} == {}


@pytest.mark.parametrize(("op", "design"), [("attention_forward", forward), ("attention_backward", backward)])
def test_estimates_are_near_the_times(op, design):
    """Two thirds of the estimates are within a factor of 1.5."""
    errors = [
        abs(math.log(design.estimate(spec, config) / seconds))
        for spec, times in measured(op).values()
        for config, seconds in times.items()
        if isinstance(config, design.Config) and design.not_estimated(spec, config) is None
    ]
    assert len(errors) >= 70
    assert sorted(errors)[2 * len(errors) // 3] <= math.log(1.5)
