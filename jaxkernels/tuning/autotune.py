"""Tuning as a user meets it: `autotune(f, *args)` for a program, `with tuning():` for whatever is lowered inside."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxkernels.core import dispatch
from jaxkernels.core.explain import explain
from jaxkernels.tuning.tuner import Result, TuningError, check_settings, device_for, tune

__all__ = ["Report", "autotune", "tuning"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What `autotune` did; printing it shows everything that was measured.

    Attributes:
      results: of what was tuned now, in program order.
      failures: (operation and spec, why it could not be tuned).
      num_kept: operations whose winner was known before.
      num_given: operations whose configuration the caller gives.
    """

    results: tuple[Result, ...]
    failures: tuple[tuple[str, str], ...] = ()
    num_kept: int = 0
    num_given: int = 0

    def __str__(self) -> str:
        lines = [str(result) for result in self.results]
        lines += [f"{what}\n  not tuned: {reason}" for what, reason in self.failures]
        lines += [f"{self.num_kept} already tuned, or with nothing to choose"] * bool(self.num_kept)
        lines += [f"{self.num_given} with a configuration of the caller's"] * bool(self.num_given)
        return "\n".join(lines) or "no jaxkernels operation in this program"

    __repr__ = __str__


def autotune(f: Callable[..., Any], *args: Any, top: int = 8, budget_s: float = 15.0, **kwargs: Any) -> Report:
    """Measures the kernels of every operation in `f(*args, **kwargs)` on this machine, and keeps the fastest.

    `f` itself is not run: it is traced and lowered, as by `jax.jit`, and each different operation found is measured
    on operands of its own. What has a winner already is left as it is. Winners go to the cache on disk, so that later
    processes have them too; where several hosts run one program, let one of them tune and all share its cache folder
    (`JAXKERNELS_CACHE_DIR`), as they must lower the same program.

    A program that was compiled before keeps the kernels it has. To have it lowered again call its `clear_cache()`, or
    `jax.clear_caches()`. On a mesh with Auto axes the operations found are those of the whole arrays; lower and compile
    inside `with jaxkernels.tuning():` to tune those of the shards.

    Args:
      f: a function; it may be jitted, and take gradients inside.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in place of arrays.
      top: configurations of each backend that are measured in the first round; half as many follow.
      budget_s: seconds for one operation, after which nothing new is begun.

    Returns:
      A `Report`; print it.

    Raises:
      Whatever tracing `f` raises; ValueError where `f` is no function, `top` no positive int, or `budget_s` no
      positive number.
    """
    if not callable(f):
        raise ValueError(f"autotune: f must be a function; got {f!r}. Give its arguments after it.")
    check_settings("autotune", top, budget_s)
    # Under a policy of our own: not that of an enclosing `tuning`.
    with dispatch.policy(dispatch.Policy()):
        choices = explain(f, *args, **kwargs).choices
        results, failures, num_kept = [], [], 0
        found = dict.fromkeys((c.op, c.spec, c.requested) for c in choices if c.source != "given")
        for op, spec, backend in found:
            if dispatch.is_tuned(op, spec, backend):
                num_kept += 1
                continue
            try:
                results.append(tune(op, spec, backend, top=top, budget_s=budget_s))
            except (TuningError, NotImplementedError) as e:
                failures.append((f"{op}  {spec}", str(e)))
    num_given = sum(choice.source == "given" for choice in choices)
    return Report(tuple(results), tuple(failures), num_kept, num_given)


@dataclasses.dataclass(frozen=True)
class _OnTheSpot:
    """Tunes what a program being lowered needs. Equal settings are equal: JAX need not lower again for them."""

    top: int
    budget_s: float

    def __call__(self, op: str, spec: Any, backend: str | None) -> None:
        if device_for(spec.target) is None:
            return  # Lowered for another machine.

        def run() -> None:
            with _tuning, dispatch.policy(dispatch.Policy()):
                if dispatch.is_tuned(op, spec, backend):  # Another thread was faster.
                    return
                tune(op, spec, backend, top=self.top, budget_s=self.budget_s)

        # In a thread of its own, where nothing is being traced, lowered or recorded.
        try:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(run).result()
        except TuningError as e:
            warnings.warn(f"{e}. The default configuration stays.", stacklevel=2)


_tuning = threading.Lock()


@contextlib.contextmanager
def tuning(enabled: bool = True, *, top: int = 8, budget_s: float = 15.0) -> Iterator[None]:
    """Says how programs lowered inside the block get their kernels.

    >>> with jk.tuning():
    ...     y = train_step(x)  # measures what has no winner yet, once
    >>> with jk.tuning(False):
    ...     y = train_step(x)  # as if nothing had ever been measured

    JAX takes the block for part of what a program depends on: a function that was compiled outside is traced and
    compiled again when it is called inside, and the other way round. Called outside again, it is what it was: to give
    winners found inside to programs compiled outside before, call `jax.clear_caches()`.

    The block holds for the thread that enters it, and cannot reach a program that is not lowered in it: one from
    `.compile()`, an exported one, one lowered for a chip that this process does not have. It does reach the
    shards of an Auto mesh, if the program is compiled inside.

    Args:
      enabled: True: measure what has no winner, on the spot (seconds for each), and keep it as `autotune` does.
        False: take no winners, neither the user's nor the package's; the cost models choose.
      top, budget_s: as of `autotune`.

    Raises:
      NotImplementedError: on several hosts, which would choose each for itself and lower different programs.
      ValueError: `enabled` is not a bool, `top` no positive int, or `budget_s` no positive number.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"tuning: enabled must be True or False; got {enabled!r}. Give top and budget_s by keyword.")
    check_settings("tuning", top, budget_s)
    if enabled and jax.process_count() > 1:
        raise NotImplementedError(
            f"tuning: {jax.process_count()} processes run this program, and each would choose for itself. Tune in one "
            "process first, with a JAXKERNELS_CACHE_DIR that all share, and run them without."
        )
    policy = dispatch.Policy(tune=_OnTheSpot(top, budget_s)) if enabled else dispatch.Policy(use_winners=False)
    with dispatch.policy(policy):
        yield
