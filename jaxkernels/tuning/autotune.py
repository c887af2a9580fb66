"""`autotune(f, *args)` tunes a program. `with tuning():` tunes all that is lowered inside. `with comparing(False):`
measures no backends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxkernels.core import dispatch
from jaxkernels.core.explain import explain
from jaxkernels.tuning import tuner
from jaxkernels.tuning.tuner import Result, TuningError, check_settings, device_for, tune

__all__ = ["Report", "autotune", "compare", "comparing", "tuning"]


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of `autotune`. Printing it shows all measurements.

    Attributes:
      results: one for each tuned operation, in program order.
      failures: (operation and spec, the reason why it was not tuned).
      num_kept: operations that had a winner before, or have only one configuration.
      num_given: operations whose configuration is given by the caller.
    """

    results: tuple[Result, ...]
    failures: tuple[tuple[str, str], ...] = ()
    num_kept: int = 0
    num_given: int = 0

    def __str__(self) -> str:
        lines = [str(result) for result in self.results]
        lines += [f"{what}\n  not tuned: {reason}" for what, reason in self.failures]
        lines += [f"{self.num_kept} already tuned, or with only one configuration"] * bool(self.num_kept)
        lines += [f"{self.num_given} with a configuration from the caller"] * bool(self.num_given)
        return "\n".join(lines) or "no jaxkernels operation in this program"

    __repr__ = __str__


def autotune(f: Callable[..., Any], *args: Any, top: int = 8, budget_s: float = 15.0, **kwargs: Any) -> Report:
    """Measures the kernels of every operation in `f(*args, **kwargs)` on this machine, and stores the fastest.

    `f` is traced and lowered, as by `jax.jit`, but not run. Each different operation in it is measured on random
    operands, unless it already has a winner. Winners are stored in the cache on disk, so later processes use them too.

    - Several hosts that run one program must lower the same program. Tune on one of them, and let all share its cache
      folder (`JAXKERNELS_CACHE_DIR`).
    - A program that is already compiled keeps its kernels. To lower it again, call its `clear_cache()`, or
      `jax.clear_caches()`.
    - On a mesh with Auto axes, the operations are measured at the size of the whole arrays. To tune them at the size of
      the shards, lower and compile inside `with jaxkernels.tuning():`.

    Args:
      f: a function. It may be jitted, and may compute gradients.
      *args, **kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
      top: configurations of each backend in the first round; the second round measures half as many.
      budget_s: seconds for one operation. After that no further configuration is started.

    Returns:
      A `Report`; print it.

    Raises:
      ValueError: `f` is not a function, `top` not a positive int, or `budget_s` not a positive number.
      The errors of tracing `f`.
    """
    if not callable(f):
        raise ValueError(f"autotune: f must be a function; got {f!r}. Pass its arguments after it.")
    check_settings("autotune", top, budget_s)
    # The policy of an enclosing `tuning` must not apply here.
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
    """Tunes the operations of a program while it is lowered. Equal settings compare equal: JAX lowers once for them."""

    top: int
    budget_s: float

    def __call__(self, op: str, spec: Any, backend: str | None) -> None:
        if device_for(spec.target) is None:
            return  # Lowered for another machine.

        def run() -> None:
            with _tuning, dispatch.policy(dispatch.Policy()):
                if dispatch.is_tuned(op, spec, backend):  # Another thread has tuned it meanwhile.
                    return
                tune(op, spec, backend, top=self.top, budget_s=self.budget_s)

        try:
            _in_a_thread(run)
        except TuningError as e:
            warnings.warn(f"{e}. The default configuration stays.", stacklevel=2)


_tuning = threading.Lock()

#: (operation, spec) of comparisons that failed in this process. Programs with them are not kept waiting again.
_failed: set[tuple[str, Any]] = set()


def _in_a_thread(work: Callable[[], None]) -> None:
    """Calls it while a program is being lowered: a new thread has no trace, lowering or recording in progress."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def compare(op: str, spec: Any, backends: Sequence[str]) -> None:
    """Measures backends for a call that names none, and stores the fastest.

    Nothing happens if the program is for another machine. If the measurement fails, a warning has the reason.
    """
    if device_for(spec.target) is None or (op, spec) in _failed:
        return

    def run() -> None:
        with _tuning:
            if dispatch.compared(op, spec, backends) is None:  # Another thread may have measured them meanwhile.
                tuner.compare(op, spec, backends)

    try:
        _in_a_thread(run)
    except Exception as e:  # The program can run nevertheless. Threads cannot start while Python exits.
        _failed.add((op, spec))
        reason = e if isinstance(e, TuningError) else f"compare: cannot measure {op}  {spec}: {e}"
        warnings.warn(f"{reason}. Estimates choose the backend.", stacklevel=2)


dispatch.compare_by(compare)


@contextlib.contextmanager
def comparing(enabled: bool = True) -> Iterator[None]:
    """Whether programs that are lowered inside the block compare backends by measurements.

    >>> with jk.comparing(False):
    ...     y = train_step(x)  # compiles sooner; estimates choose the backends

    Estimates of a backend's time have errors. So a call that names no backend measures those whose estimates are close,
    each in one configuration, if the GPU is at hand and the operation was not tuned. This takes one to three seconds
    for each new problem, when its program is first lowered. `jk.tuning` also measures configurations and checks
    results, which takes longer. This is the default; the environment variable `JAXKERNELS_AUTOTUNE=0` switches it off
    for the whole process, and `with jk.comparing():` switches it on inside.

    Products and attentions on an H100 or H200 have estimates; other operations and chips have none, and are not
    compared. Nor are kernels that take more than 0.1 s, and calls in a program for `jax.export`, on Auto mesh axes
    before XLA splits the arrays, in programs that several processes run, and inside `jk.tuning(False)`.

    The fastest backend is kept in the cache on disk, and later programs take it. Two measurements may find different
    kernels fastest, so two machines may compute different bits. With False, estimates choose the backend, even if it
    was measured before.

    Programs depend on the block as they depend on `jk.tuning`. The shards of an Auto mesh do if the program is compiled
    inside.

    Args:
      enabled: True: backends are compared; False: comparisons are neither made nor taken.

    Raises:
      ValueError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"comparing: enabled must be True or False; got {enabled!r}.")
    now = dispatch.policy.value
    with dispatch.policy(dataclasses.replace(now, comparisons="made" if enabled else "ignored")):
        yield


@contextlib.contextmanager
def tuning(enabled: bool = True, *, top: int = 8, budget_s: float = 15.0) -> Iterator[None]:
    """Tunes the operations of programs that are lowered inside the block; with False, ignores all winners.

    >>> with jk.tuning():
    ...     y = train_step(x)  # measures each operation that has no winner, once
    >>> with jk.tuning(False):
    ...     y = train_step(x)  # the cost models choose

    Programs depend on the block. A function that was compiled outside is traced and compiled again if it is called
    inside, and vice versa. Outside, it still has the kernels that it was compiled with: call `jax.clear_caches()` to
    compile it with the winners found inside.

    The block applies to the thread that enters it, and to programs that are lowered inside. It does not apply to a
    program from `.compile()`, to an exported program, or to a program lowered for a chip that this process does not
    have. It applies to the shards of an Auto mesh if the program is compiled inside.

    Args:
      enabled: True: measure each operation that has no winner (some seconds for each), and store the winner as
        `autotune` does. False: use no winners, neither the user's nor the package's; the cost models choose.
      top, budget_s: as in `autotune`.

    Raises:
      NotImplementedError: several hosts run the program. Each would choose kernels by itself, and they would lower
        different programs.
      ValueError: `enabled` is not a bool, `top` not a positive int, or `budget_s` not a positive number.
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"tuning: enabled must be True or False; got {enabled!r}. Pass top and budget_s by keyword.")
    check_settings("tuning", top, budget_s)
    if enabled and jax.process_count() > 1:
        raise NotImplementedError(
            "tuning: must run in a single process, because each process would choose its own kernels; "
            f"got {jax.process_count()} processes. Tune in one process first, with a JAXKERNELS_CACHE_DIR that all "
            "share, and run the program without jk.tuning."
        )
    tune_now = _OnTheSpot(top, budget_s) if enabled else None
    with dispatch.policy(dataclasses.replace(dispatch.policy.value, use_winners=enabled, tune=tune_now)):
        yield
