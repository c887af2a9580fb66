"""Which kernel runs an operation: the registry of backends, the choice, and the record of it.

A backend has one or more designs of an operation. A design is a module with six names:

- `Config`: a frozen dataclass, the knobs of this kernel;
- `VERSION`: an int. It is raised when a Config's kernel, its speed or the search space changes. Winners that were
  measured with another version do not count. The version of a backend is the sum over its designs: a design that
  joins a backend begins at 0, so that the winners of the others stay;
- `unsupported(spec) -> str | None`: the one statement of its limits, a reason for each;
- `search_space(spec) -> Iterable[Config]`: the configurations worth measuring. All are legal (shared memory,
  registers). Rules that the module states prune them. Usual settings come first;
- `estimate(spec, config) -> float`: the cost model, in seconds (not needed where the space has one member);
- `run(spec, config, *arrays)`: the result, computed with JAX operations or a kernel call;

Three names are optional:

- `shortlist(spec)`, while its cost model is not to be trusted with the whole space: the configurations among which
  `default_config` looks. An empty shortlist says that another design is known to be faster;
- `unpreferred(spec) -> str | None`: why a call that names no backend takes a later one of the order, although this
  design supports the spec; None if it does not. A backend is unpreferred if all its designs that support the spec are;
- `NUM_COMPARED`: how many configurations a comparison measures: the default and the next best by the cost model.
  Without it, the default alone. Of long kernels, only configurations of the shortlist are measured.

A design whose cost model `jaxkernels tune --calibrate` can fit to measurements (`jaxkernels.tuning.calibration`) has
three more:

- `Constants`: a frozen dataclass of positive floats, the constants of the cost model;
- `CONSTANTS`: their values. `estimate` takes others as its third argument;
- `not_estimated(spec, config) -> str | None`: which part of the time of `run` the estimate leaves out, or None. Times
  of such calls are not compared with the estimate.

It may have one more:

- `RANKING`: constants in place of `CONSTANTS` where `default_config` compares the design's configurations with each
  other.

`REGISTRY` lists backends in order of preference. A call that names a backend gets that backend or an error. A call that
names none gets the fastest backend, if that was measured (`jaxkernels.tuning`). Otherwise it gets the first backend
that supports its spec on the platform being lowered; in a program for `jax.export`, the first that `jax.export` takes
unasked. It gets an unpreferred backend only if all that support its spec are unpreferred. Estimates that measured times
of similar problems correct (`jaxkernels.core.times`) put another backend in its place, unpreferred or not: that with
the least estimate, or XLA if no other one is faster by more than `times.MARGIN` (or the spec's own `margin`). Where the
GPU is at hand, backends whose estimates are close are measured instead, once (`jk.comparing`). The
configuration is the caller's, else the measured winner, else the one that the cost models find fastest among all
designs of the backend.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol

import jax

from jaxkernels.core import registry, times, winners
from jaxkernels.core.hardware import Chip
from jaxkernels.core.registry import Entry

__all__ = [
    "CLOSE", "REGISTRY", "WAY_OUT", "Backend", "Choice", "Entry", "Policy", "backend_names", "check", "check_backend",
    "choose", "compare_by", "compared", "compared_config", "config_of", "contenders", "default_config", "is_tuned",
    "load", "policy", "recording", "runs_on", "search_space", "store_compared", "store_fastest", "store_winner",
    "usable_backends",
]  # fmt: skip


class Spec(Protocol):
    """What every kernel spec has in common: the chip it is compiled for."""

    @property
    def target(self) -> Chip: ...
    @property
    def margin(self) -> float | None: ...
    @property
    def xla_may_merge(self) -> bool: ...
    @property
    def shared(self) -> str | None: ...
    @property
    def alone(self) -> Spec: ...


#: How a message about a backend that was named ends.
WAY_OUT = 'Use backend=None (chooses by itself) or backend="xla".'

#: Backends whose estimates are at most so many times the least may be the fastest. By cross-validation, estimates alone
#: choose a backend below 0.95 of the fastest for 15 % of the products, 13 % of the attentions and 17 % of their
#: gradients. If those within this factor are measured, it is below 1 %, and 2.6 to 3.1 backends are measured.
CLOSE = 1.7

#: Kernels that are estimated to take longer, in seconds, are compared in configurations of the shortlist only: cost
#: models rank those of long kernels better.
_SHORT = 1e-4

#: Kernels that take longer, in seconds, are not measured: a program would wait for minutes.
_LONGEST = 0.1

#: (operation, backend) -> where it lives; for one operation, first listed is first preferred.
REGISTRY: dict[tuple[str, str], Entry] = registry.entries()


def backend_names() -> tuple[str, ...]:
    """Every backend's name, for messages and for the command line."""
    return tuple(dict.fromkeys(backend for _, backend in REGISTRY))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel chosen for one operation, and why the ones before it in order were not.

    Attributes:
      op, spec: what is computed.
      backend, config: by what.
      passed_over: (backend, reason) of those that stand before it.
      source: where the configuration comes from: "given" by the caller, "tuned": measured fastest, or "default";
        "compared": the default of a backend that was measured fastest of those with close estimates.
      requested: the backend that the caller named, or None.
      design: the backend's design; empty where it has one only.
      estimates: (backend, seconds) of those whose estimates are corrected by measured times. Empty if a tuned or a
        named backend was taken.
      close: what a comparison would measure, if there is none: backends with close estimates, or one of them, if
        several of its configurations are compared.
    """

    op: str
    backend: str
    config: Any
    spec: Any
    passed_over: tuple[tuple[str, str], ...] = ()
    source: Literal["given", "tuned", "compared", "default"] = "default"
    requested: str | None = None
    design: str = ""
    estimates: tuple[tuple[str, float], ...] = ()
    close: tuple[str, ...] = ()

    def __str__(self) -> str:
        source = "" if self.source == "default" else f"  ({self.source})"
        design = self.design and f"{self.design}."
        lines = [f"{self.op}  {self.spec}", f"  -> {self.backend}  {design}{self.config}{source}"]
        lines += [f"     not {backend}: {reason}" for backend, reason in self.passed_over]
        if len(self.estimates) > 1:
            lines.append("     estimated: " + ", ".join(f"{name} {_microseconds(s)}" for name, s in self.estimates))
        if self.close:
            lines.append(f"     close, but not compared by measurements: {', '.join(self.close)}")
        return "\n".join(lines)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e6:.0f} us"


@dataclasses.dataclass(frozen=True)
class Policy:
    """What measured winners are to programs that are lowered while it holds.

    Attributes:
      use_winners: whether they are taken.
      tune: called with (op, spec, backend or None) where there is none, to measure and store one; or None.
      comparisons: how a backend is chosen among those with close estimates. "made": they are measured, if the GPU is at
        hand; "known": the one that was measured fastest before is taken; "ignored": estimates choose. None: "made" if
        the environment variable `JAXKERNELS_AUTOTUNE` is 1 or not set, else "known".
      exports_all: whether a program for `jax.export` gets the same kernels as any other. The exporter then disables the
        checks of custom calls.
    """

    use_winners: bool = True
    tune: Callable[[str, Any, str | None], None] | None = None
    comparisons: Literal["made", "known", "ignored"] | None = None
    exports_all: bool = False

    @property
    def makes_comparisons(self) -> bool:
        """Whether lowering measures backends with close estimates that were not measured before."""
        return self.comparisons == "made" or (self.comparisons is None and _autotunes())

    def without_measurements(self) -> Policy:
        """The policy under which lowering takes what was measured before, and measures nothing."""
        comparisons = "ignored" if self.comparisons == "ignored" else "known"
        return dataclasses.replace(self, tune=None, comparisons=comparisons)


#: The policy here and now: `policy.value`, or `with policy(Policy(...))`. JAX lowers a program anew for each.
policy = jax.make_user_context(Policy())


@dataclasses.dataclass(frozen=True)
class Backend:
    """The designs of a backend for one operation.

    Attributes:
      label: the operation and the backend, for messages.
      designs: modules.
    """

    label: str
    designs: tuple[ModuleType, ...]

    @property
    def version(self) -> int:
        """Rises with the version of each design."""
        return sum(design.VERSION for design in self.designs)

    def supporting(self, spec: Spec) -> list[ModuleType]:
        """The designs that can run the spec."""
        return [design for design in self.designs if design.unsupported(spec) is None]

    def unsupported(self, spec: Spec) -> str | None:
        """Why no design can run the spec, or None if one can."""
        reasons = {name_of(design): design.unsupported(spec) for design in self.designs}
        if None in reasons.values():
            return None
        if len(distinct := list(dict.fromkeys(reasons.values()))) == 1:
            return distinct[0]
        return "; ".join(f"{name} {reason}" for name, reason in reasons.items())

    def unpreferred(self, spec: Spec) -> str | None:
        """Why later backends are preferred, or None.

        The reason is the first design's. All designs that can run the spec must have one.
        """
        reasons = [_unpreferred(design, spec) for design in self.supporting(spec)]
        return None if None in reasons else next(iter(reasons), None)

    def search_space(self, spec: Spec) -> Iterator[Any]:
        """The configurations of all designs that can run the spec."""
        for design in self.supporting(spec):
            yield from design.search_space(spec)

    def shortlist(self, spec: Spec) -> Iterator[Any]:
        """The configurations among which the cost models choose, as far as they are in the search space."""
        for design in self.supporting(spec):
            yield from design.shortlist(spec) if hasattr(design, "shortlist") else design.search_space(spec)

    def design_of(self, config: Any) -> ModuleType:
        """The design that a configuration is for."""
        return next(design for design in self.designs if isinstance(config, design.Config))

    def estimate(self, spec: Spec, config: Any) -> float | None:
        """Seconds, or None for a design without a cost model. Models with constants are of chips with SMs."""
        design = self.design_of(config)
        return design.estimate(spec, config) if _can_estimate(design, spec) else None

    def rank(self, spec: Spec, config: Any) -> float:
        """The least is the design's default configuration: the estimate, with the design's `RANKING` if it has one."""
        design = self.design_of(config)
        if not _can_estimate(design, spec):
            return 0.0
        constants = [design.RANKING] if hasattr(design, "RANKING") else []
        return design.estimate(spec, config, *constants)

    def run(self, spec: Spec, config: Any, *arrays: jax.Array) -> Any:
        return self.design_of(config).run(spec, config, *arrays)

    def check_config(self, config: Any) -> None:
        """Raises ValueError if the configuration is for none of the designs."""
        if not isinstance(config, tuple(design.Config for design in self.designs)):
            classes = " or ".join(f"{design.__name__}.Config" for design in self.designs)
            raise ValueError(f"{self.label}: config must be a {classes}; got {config!r}.")

    def encode(self, config: Any) -> dict[str, Any]:
        """A configuration in JSON's types, with the name of its design where there are several."""
        design = {"design": name_of(self.design_of(config))} if len(self.designs) > 1 else {}
        return design | dataclasses.asdict(config)

    def decode(self, values: dict[str, Any]) -> Any:
        """The configuration that was encoded; ValueError if it is none of this backend. Without a design's name, it is
        the first design's: it may have been encoded when there was no other.
        """
        fields, designs = dict(values), {name_of(design): design for design in self.designs}
        name = fields.pop("design", next(iter(designs))) if len(designs) > 1 else next(iter(designs))
        if name not in designs:
            raise ValueError(f"{values} name none of the designs {', '.join(designs)}")
        config = designs[name].Config
        if set(fields) != {field.name for field in dataclasses.fields(config)}:
            raise ValueError(f"{values} are not the fields of {designs[name].__name__}.Config")
        return config(**fields)


def _can_estimate(design: ModuleType, spec: Spec) -> bool:
    return hasattr(design, "estimate") and bool(spec.target.num_sms or not hasattr(design, "Constants"))


def _unpreferred(design: ModuleType, spec: Spec) -> str | None:
    return design.unpreferred(spec) if hasattr(design, "unpreferred") else None


def name_of(design: ModuleType) -> str:
    """A design's name: its module's."""
    return design.__name__.rpartition(".")[2]


@functools.cache
def load(op: str, backend: str) -> Backend:
    """Imports the backend's designs; a module that fails to import raises with its cause."""
    designs = []
    for module in REGISTRY[op, backend].designs:
        try:
            designs.append(importlib.import_module(module))
        except Exception as e:
            raise ImportError(f"{op}[{backend}]: the backend failed to load ({module}): {e}") from e
    return Backend(f"{op}[{backend}]", tuple(designs))


def runs_on(backend: str, chip: Chip) -> bool:
    """Whether any kernel of the backend runs on chips of this platform."""
    return any(_runs_on(entry, chip) for (_, name), entry in REGISTRY.items() if name == backend)


def _runs_on(entry: Entry, chip: Chip) -> bool:
    return entry.platforms is None or chip.platform in entry.platforms


def _refusal(op: str, backend: str, spec: Spec) -> str | None:
    """Why this backend cannot run the spec, or None if it can."""
    entry = REGISTRY.get((op, backend))
    if entry is None:
        return "no such kernel in this backend"
    if not _runs_on(entry, spec.target):
        wanted = " or ".join(entry.platforms or ())
        return f"runs on {wanted} devices only, this program is lowered for {spec.target.platform}"
    return load(op, backend).unsupported(spec)


def check_backend(op: str, backend: str | None) -> None:
    """Raises ValueError unless `backend` is None or the name of a backend."""
    if backend is not None and backend not in backend_names():
        known = ", ".join(repr(name) for name in backend_names())
        raise ValueError(f"{op}: unknown backend={backend!r}; use one of {known}, or None to let the op choose.")


def _backends_of(op: str) -> list[str]:
    return [backend for name, backend in REGISTRY if name == op]


def usable_backends(op: str, spec: Spec, backend: str | None = None) -> list[str]:
    """The backends (of the one that is named) that can run the spec, in order of preference."""
    names = _backends_of(op) if backend is None else [backend]
    return [name for name in names if _refusal(op, name, spec) is None]


def check(op: str, spec: Spec, backend: str | None, config: Any = None) -> None:
    """Raises what `choose` raises where a backend is named that cannot run the spec, or whose config this is not."""
    check_backend(op, backend)
    if backend is None:
        if config is not None:
            raise ValueError(f"{op}: config={config!r} needs the backend it is for. Name it with backend=.")
        return
    if (reason := _refusal(op, backend, spec)) is not None:
        raise NotImplementedError(f"{op}[{backend}]: {reason}. {WAY_OUT}")
    if config is not None:
        load(op, backend).check_config(config)


def _export_refusal(op: str, backend: str, is_partitioned: bool) -> str | None:
    """Why `jax.export` does not take a program with this backend unasked, or None if it does."""
    if is_partitioned and backend != "xla":
        return "jax.export takes no kernel on Auto mesh axes: XLA's partitioner would ask Python for each shard's"
    if not REGISTRY[op, backend].is_exportable:
        return f'jax.export takes its custom call with disabled_checks only: name backend="{backend}" to do that'
    return None


def choose(
    op: str,
    spec: Spec,
    backend: str | None,
    config: Any = None,
    *,
    is_partitioned: bool = False,
    is_exported: bool = False,
) -> Choice:
    """Picks the kernel for `spec`.

    Args:
      op: the operation's name in `REGISTRY`.
      spec: what is to be computed, and for which chip.
      backend: a name, which is then binding, or None for the fastest known, else the first that supports the spec and
        is not unpreferred, or another one that is estimated to be faster.
      config: a configuration for a named backend; None for the measured winner, else its default.
      is_partitioned: whether XLA will partition the program, and ask again with each shard's shapes: only these are
        worth measuring.
      is_exported: whether the program is lowered for `jax.export`. What that would refuse is then passed over, unless
        it is named.

    Raises:
      ValueError: no backend has this name, or the configuration is not this backend's.
      NotImplementedError: the named backend cannot run the spec, or none can. The message has the
        reason (for None, every backend's reason) and the way out.
    """
    check(op, spec, backend, config)
    now = policy.value
    if now.tune is not None and not is_partitioned and config is None and not is_tuned(op, spec, backend):
        now.tune(op, spec, backend)

    @functools.cache
    def refusal(name: str) -> str | None:
        reason = _refusal(op, name, spec)
        if reason is None and backend is None and is_exported and not now.exports_all:
            reason = _export_refusal(op, name, is_partitioned)
        return reason

    fastest = _fastest(op, spec) if now.use_winners and backend is None else None
    if fastest is not None and refusal(fastest) is not None:
        fastest = None

    def objection(name: str) -> str | None:
        reason = refusal(name)
        return f"measured slower than {fastest}" if reason is None and fastest not in (None, name) else reason

    def reservation(name: str) -> str | None:
        return None if name in (backend, fastest) else load(op, name).unpreferred(spec)

    name, passed_over = _first(_backends_of(op) if backend is None else [backend], objection, reservation)
    if name is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        raise NotImplementedError(f"{op}: no backend supports {spec}: {reasons}.")
    estimates: dict[str, float] = {}
    close: list[str] = []
    is_compared = False
    if backend is None and fastest is None:
        estimates = _estimates(op, spec, [other for other in _backends_of(op) if refusal(other) is None])
    if name in estimates:
        margin = times.MARGIN if spec.margin is None else spec.margin
        close = [] if is_partitioned or is_exported else _close(spec, estimates, now)
        if close:
            is_always_compared = lambda x: REGISTRY[op, x].is_always_compared or (x == "xla" and spec.xla_may_merge)
            always = [x for x in _backends_of(op) if is_always_compared(x) and refusal(x) is None]
            close = [x for x in _backends_of(op) if x in close or x in always]
        if len(close) == 1 and _num_contenders(op, close[0], spec) == 1:
            close = []
        if (measured := _comparison(op, spec, close, now)) is not None:
            is_compared, name = True, measured
            before = itertools.takewhile(lambda other: other != measured, _backends_of(op))
            passed_over = tuple((x, refusal(x) or _slower(x, measured, estimates, close)) for x in before)
        elif (sooner := times.least(estimates, margin)) != name:
            slower = f"estimated at {_microseconds(estimates[name])}, {sooner} at {_microseconds(estimates[sooner])}"
            if estimates[sooner] >= estimates[name]:
                slower += f": less than {margin:.0%} apart"
            name, passed_over = sooner, (*passed_over, (name, slower))
    chosen, source = config, "given"
    if config is None:
        chosen = _winner(op, name, spec) if now.use_winners else None
        source = "default" if chosen is None else "tuned"
    if chosen is None:
        chosen = default_config(op, name, spec)
        if is_compared:
            chosen, source = compared_config(op, spec) or chosen, "compared"
        elif fastest is not None and len(search_space(op, name, spec)) == 1:
            source = "tuned"
    designs = load(op, name)
    design = name_of(designs.design_of(chosen)) if len(designs.designs) > 1 else ""
    undecided = () if is_compared else tuple(close)
    choice = Choice(op, name, chosen, spec, passed_over, source, backend, design, tuple(estimates.items()), undecided)
    if (record := _record.get()) is not None:
        record.append(choice)
    return choice


def _first(
    names: list[str], objection: Callable[[str], str | None], reservation: Callable[[str], str | None]
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The first backend, and the backends before it with their reasons.

    Args:
      names: backends in order of preference.
      objection: why a backend cannot be taken, or None.
      reservation: why a backend without an objection is taken only if all such backends have a reservation, or None.

    Returns:
      (name or None, ((name, reason), ...)). If all backends have an objection, the name is None.
    """
    passed_over: list[tuple[str, str]] = []
    first_reserved: int | None = None
    for name in names:
        reason = objection(name)
        if reason is None:
            reason = reservation(name)
            if reason is None:
                return name, tuple(passed_over)
            if first_reserved is None:
                first_reserved = len(passed_over)
        passed_over.append((name, reason))
    if first_reserved is not None:
        return passed_over[first_reserved][0], tuple(passed_over[:first_reserved])
    return None, tuple(passed_over)


def _estimates(op: str, spec: Spec, names: list[str]) -> dict[str, float]:
    """The seconds of the backends' default configurations, of those that were measured on similar problems."""
    if not times.covers(op, spec):
        return {}
    found, measured = [], times.as_measured(spec)
    for name in names:
        backend, config = load(op, name), default_config(op, name, spec)
        seconds = backend.estimate(measured, config)
        if seconds is not None and 0 < seconds < math.inf:
            found.append(times.Estimate(name, name_of(backend.design_of(config)), config, seconds))
    corrections = times.corrections_of(op, measured, found)
    return {x.backend: x.seconds * math.exp(corrections[x.backend]) for x in found if x.backend in corrections}


_compare: Callable[[str, Any, Sequence[str]], None] = lambda op, spec, backends: None


def compare_by(function: Callable[[str, Any, Sequence[str]], None]) -> None:
    """Sets the function that compares backends. It gets (op, spec, backends). If it can measure them, it stores the
    fastest.
    """
    global _compare
    _compare = function


def _autotunes() -> bool:
    """Whether programs compare backends by measurements, unless they are lowered inside `jk.comparing`."""
    if (value := os.environ.get("JAXKERNELS_AUTOTUNE") or "1") not in ("0", "1"):
        raise ValueError(
            f"JAXKERNELS_AUTOTUNE: must be 1 (measure backends whose estimates are close) or 0 (do not); got {value!r}."
        )
    return value == "1"


def _close(spec: Spec, estimates: dict[str, float], now: Policy) -> list[str]:
    """The backends that may be the fastest by their estimates, if a comparison may decide among them."""
    if now.comparisons == "ignored" or not now.use_winners or jax.process_count() > 1:
        return []
    if spec.margin is not None:
        return []  # XLA takes kernels in the program that it does not take for the operation alone.
    if (least := min(estimates.values())) > _LONGEST:
        return []
    return [name for name, seconds in estimates.items() if seconds <= CLOSE * least]


def _slower(name: str, measured: str, estimates: dict[str, float], close: list[str]) -> str:
    """Why a backend is not the fastest after a comparison."""
    if name in close:
        return f"measured slower than {measured}"
    return f"estimated at {_microseconds(estimates[name])}: not measured" if name in estimates else "no estimate"


def _comparison(op: str, spec: Spec, close: list[str], now: Policy) -> str | None:
    """The fastest of close backends, if they were measured or are measured now; else None."""
    if not close:
        return None
    if now.makes_comparisons and compared(op, spec, close) is None:
        _compare(op, spec, close)
    return compared(op, spec, close)


# Configurations: a backend's own, and those that were measured.


def search_space(op: str, backend: str, spec: Spec) -> tuple[Any, ...]:
    """The configurations of a backend that are worth measuring for a spec."""
    return tuple(_search_space(load(op, backend), spec))


@functools.lru_cache(maxsize=1024)
def _search_space(backend: Backend, spec: Spec) -> dict[Any, Any]:
    """The search space in order, each configuration under itself."""
    return {config: config for config in backend.search_space(spec)}


def default_config(op: str, backend: str, spec: Spec) -> Any:
    """The configuration that the backend's cost models find fastest; of equals the first.

    Each design chooses its own. Estimates, which have all of the time, then choose the design.
    """
    return _default_config(load(op, backend), spec)


@functools.lru_cache(maxsize=1024)
def _default_config(backend: Backend, spec: Spec) -> Any:
    space = _search_space(backend, spec)
    candidates = [config for config in backend.shortlist(spec) if config in space] or list(space)
    by_design: dict[ModuleType, list[Any]] = {}
    for config in candidates:
        by_design.setdefault(backend.design_of(config), []).append(config)
    first = lambda configs, key: configs[0] if len(configs) == 1 else min(configs, key=key)
    chosen = [first(configs, lambda config: backend.rank(spec, config)) for configs in by_design.values()]
    return first(chosen, lambda config: backend.estimate(spec, config) or 0.0)


def _winner(op: str, name: str, spec: Spec) -> Any | None:
    """The configuration of a backend that was measured fastest, or None."""
    backend = load(op, name)
    if len(_search_space(backend, spec)) == 1:
        return None
    decode = functools.partial(_member, backend, spec)
    return winners.lookup(_key(op, spec, name, backend.version), decode)


def _member(backend: Backend, spec: Spec, values: dict[str, Any]) -> Any:
    """The configuration of these values that is in the search space. What JSON made of one may be equal and yet of
    another type.

    Raises:
      ValueError: it is not in the space.
    """
    if (member := _search_space(backend, spec).get(config := backend.decode(values))) is None:
        raise ValueError(f"{config} is not in the search space of this spec")
    return member


def config_of(op: str, backend: str, spec: Spec) -> Any:
    """The configuration that was measured fastest, else the default."""
    winner = _winner(op, backend, spec)
    return default_config(op, backend, spec) if winner is None else winner


def contenders(op: str, backend: str, spec: Spec) -> tuple[Any, ...]:
    """The configurations of a backend that a comparison measures: that of a call, and more of designs with
    `NUM_COMPARED`.
    """
    first, number = config_of(op, backend, spec), _num_contenders(op, backend, spec)
    if number == 1:
        return (first,)
    designs = load(op, backend)
    others = [config for config in _comparable(designs, spec) if config != first]
    return first, *sorted(others, key=lambda config: designs.estimate(spec, config) or 0.0)[: number - 1]


def _num_contenders(op: str, backend: str, spec: Spec) -> int:
    """How many configurations of a backend a comparison measures at most."""
    designs = load(op, backend)
    number = max(getattr(design, "NUM_COMPARED", 1) for design in designs.supporting(spec))
    if number == 1 or _winner(op, backend, spec) is not None:
        return 1
    return min(number, max(1, len(_comparable(designs, spec))))


def _comparable(designs: Backend, spec: Spec) -> Collection[Any]:
    """The configurations among which those of a comparison are: all of a short kernel, the shortlist of another one."""
    space = _search_space(designs, spec)
    if (designs.estimate(spec, _default_config(designs, spec)) or 0.0) <= _SHORT:
        return space
    return [config for config in designs.shortlist(spec) if config in space]


def _fastest(op: str, spec: Spec) -> str | None:
    """The backend that was measured fastest, or None; also None where the field has changed since.

    An unpreferred backend that took no part in the measurement does not count as a change.
    """
    if sum(_runs_on(REGISTRY[op, name], spec.target) for name in _backends_of(op)) < 2:
        return None

    if (found := _stored(winners.AUTO, op, spec)) is None:
        return None
    fastest, measured, _ = found
    usable = usable_backends(op, spec)
    field = [name for name in usable if name in measured or load(op, name).unpreferred(spec) is None]
    return fastest if measured == _versions(op, field) else None


def compared(op: str, spec: Spec, backends: Sequence[str]) -> str | None:
    """The fastest of some backends, if these have been compared by measurements."""
    fastest, measured, _ = _stored(winners.COMPARED, op, spec) or (None, {}, None)
    return fastest if measured == _versions(op, backends) else None


def compared_config(op: str, spec: Spec) -> Any | None:
    """The configuration of the fastest of compared backends, if several of its configurations were compared."""
    _, _, config = _stored(winners.COMPARED, op, spec) or (None, {}, None)
    return config


def _stored(heading: str, op: str, spec: Spec) -> tuple[str, dict[str, int], Any | None] | None:
    """The fastest backend, the versions of those that were measured, and its configuration if that was compared."""

    def decode(values: dict[str, Any]) -> tuple[str, dict[str, int], Any | None]:
        versions = values.get("versions")
        if set(values) - {"config"} != {"backend", "versions"} or not isinstance(versions, dict):
            raise ValueError(f"{values} do not name a backend and the versions of those measured")
        if (backend := values["backend"]) not in versions:
            raise ValueError(f"its backend {backend!r} is not among those measured")
        config = None
        if "config" in values and (op, backend) in REGISTRY and versions[backend] == load(op, backend).version:
            config = _member(load(op, backend), spec, values["config"])
        return backend, versions, config

    return winners.lookup(_key(op, spec, heading), decode)


def _key(op: str, spec: Spec, heading: str, version: int = 0) -> winners.Key:
    """Comparisons time a kernel with the operand that it shares, so such kernels have entries of their own there."""
    is_shared = heading == winners.COMPARED and spec.shared is not None
    return winners.Key(spec.target, op, spec if is_shared else spec.alone, heading, version)


def _versions(op: str, backends: Sequence[str]) -> dict[str, int]:
    return {name: load(op, name).version for name in backends}


def store_winner(op: str, backend: str, spec: Spec, config: Any, seconds: float) -> None:
    """Keeps the configuration of a backend that was measured fastest."""
    designs = load(op, backend)
    key = _key(op, spec, backend, designs.version)
    winners.store(key, config, designs.encode(config), seconds)


def store_fastest(op: str, backend: str, spec: Spec, seconds: float) -> None:
    """Keeps the backend that was measured fastest of all that can run the spec."""
    _store(winners.AUTO, op, backend, spec, usable_backends(op, spec), seconds)


def store_compared(
    op: str, backend: str, spec: Spec, backends: Sequence[str], seconds: float, config: Any | None = None
) -> None:
    """Keeps the backend that was measured fastest of some, and its configuration if several of them were measured."""
    _store(winners.COMPARED, op, backend, spec, backends, seconds, config)


def _store(
    heading: str, op: str, backend: str, spec: Spec, backends: Sequence[str], seconds: float, config: Any | None = None
) -> None:
    versions = _versions(op, backends)
    key = _key(op, spec, heading)
    values: dict[str, Any] = {"backend": backend, "versions": versions}
    if config is not None:
        values["config"] = load(op, backend).encode(config)
    winners.store(key, (backend, versions, config), values, seconds)


def is_tuned(op: str, spec: Spec, backend: str | None) -> bool:
    """Whether measuring has nothing to add: there is a winner, or nothing to choose between."""
    usable = usable_backends(op, spec, backend)
    if backend is None and len(usable) > 1:
        fastest = _fastest(op, spec)
        if fastest is None:
            return False
        usable = [fastest]
    return not usable or len(search_space(op, usable[0], spec)) == 1 or _winner(op, usable[0], spec) is not None


_record: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collects the choices made while programs are lowered inside the block."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)
