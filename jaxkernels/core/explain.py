"""Which kernel each operation of a program gets, and why the others were passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxkernels.core import dispatch, hardware

__all__ = ["Explanation", "explain"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernels of one program; printing it shows them.

    Attributes:
      platform: the platform the program was lowered for.
      choices: one for each operation lowered, in program order. A function that is jitted inside the
        program and called several times is lowered, and listed, once.
    """

    platform: str
    choices: tuple[dispatch.Choice, ...]

    def __str__(self) -> str:
        if not self.choices:
            return f"no jaxkernels operation in this program (lowered for {self.platform})"
        return "\n".join([f"lowered for {self.platform}:", *map(str, self.choices)])

    __repr__ = __str__


def explain(f: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Says which kernel and configuration every operation in `f(*args, **kwargs)` gets.

    Nothing is run: the function is traced and lowered. A program may measure backends whose estimates are close when
    it is lowered. `explain` shows the backend that was measured fastest before, else the one that the estimates choose,
    and which backends are close.
    On a mesh with Auto axes the choice shown is the one for the whole arrays; XLA's partitioner asks again with each
    shard's shapes.

    Args:
      f: a function; it may be jitted.
      *args, **kwargs: its arguments: arrays, `jax.ShapeDtypeStruct`s in their place, and whatever else it
        takes, which is passed on as it is.
      platform: "cpu" or "cuda" ("gpu" is another name of it); default: the platform of JAX's default backend.
        "cuda" works without a GPU (see `jaxkernels.core.hardware.cuda_target` for the chip that is then assumed).

    Returns:
      An `Explanation`; print it, or read its `choices`.
    """
    if platform is None:
        platform = jax.default_backend()
    platform = {"gpu": "cuda"}.get(platform, platform)
    if platform not in hardware.PLATFORMS:
        known = ", ".join(map(repr, hardware.PLATFORMS))
        raise ValueError(f"explain: platform must be one of {known}, or None; got {platform!r}.")
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}

    def program(arrays: dict[int, jax.Array]) -> Any:
        args, kwargs = structure.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return f(*args, **kwargs)

    traced = jax.jit(program).trace(arrays)
    with dispatch.policy(dispatch.policy.value.without_measurements()), dispatch.recording() as choices:
        traced.lower(lowering_platforms=(platform,))
    return Explanation(platform, tuple(choices))
