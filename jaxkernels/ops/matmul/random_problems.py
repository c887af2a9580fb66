"""Random products as users have them.

The following is chosen first, each independently of the others:

- decoding: a fifth of the products have m of at most 64, the others have more;
- direction: an eighth of the others are the gradients of all operands;
- odd rows: in a quarter, the rows of some operand or of the result are no multiple of 16 bytes. In the others, the
  sizes of these rows are rounded up to a multiple of 8, 16, 32, 64 or 128 elements, each equally likely;
- epilogue: a quarter have a bias, an activation, both, a residual, a bias and a residual, or a gate with SiLU. Their
  layout is nn, as `jaxkernels.matmul` takes it. The others have the layouts nn, nt, tn and tt equally often;
- batch: a sixth are batches of 2 to 64. In a third of those with layout nn, the right operand is shared;
- dtype: three of four are bfloat16, one is float16.

Then m, n, k and the batch are drawn, each log-uniform. The largest is 32768, the smallest is 1, or 65 for the m of
products that are not decoding. They are redrawn while the problem has more than 4e12 FLOPs (7 ms at 600 TFLOP/s), or
its operands and results take more than 2e9 bytes. The choices above are kept, so that their shares do not depend on the
limits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxkernels.core.dice import Dice
from jaxkernels.core.problems import Problem
from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["draw", "kinds"]

_MAX_FLOPS = 4e12
_MAX_BYTES = 2e9

#: At most so many rows of the left operand count as decoding.
_DECODING_ROWS = 64

_LAYOUTS = (("mk", "kn"), ("mk", "nk"), ("km", "kn"), ("km", "nk"))
_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_erf")
_EPILOGUES = ("bias", "activation", "bias and activation", "residual", "bias and residual", "gate")

#: Elements in 16 bytes of a 16-bit dtype.
_ALIGNED = 8

#: Fewer tiles of 128 x 128 than this leave SMs of an H100 or H200 idle.
_NUM_SMS, _TILE = 132, 128


def draw(dice: Dice) -> Problem:
    """A random product."""
    is_decoding = dice.chance(1 / 5)
    direction = "backward" if dice.chance(1 / 8) and not is_decoding else "forward"
    has_odd_rows = dice.chance(1 / 4)
    step = dice.choose(dict.fromkeys((8, 16, 32, 64, 128), 1))
    epilogue = _epilogue(dice) if dice.chance(1 / 4) else {}
    lhs_layout, rhs_layout = dice.choose(dict.fromkeys(_LAYOUTS, 1)) if not epilogue else _LAYOUTS[0]
    is_batched, shares = dice.chance(1 / 6), dice.chance(1 / 3)
    shared_rhs = is_batched and shares and (lhs_layout, rhs_layout) == _LAYOUTS[0]
    dtype = dice.choose({"bfloat16": 3, "float16": 1})
    #: The innermost dimensions.
    rows = {lhs_layout[-1], rhs_layout[-1], "n"}

    def sized() -> Problem[MatmulCase]:
        m = dice.size(most=_DECODING_ROWS) if is_decoding else dice.size(_DECODING_ROWS + 1)
        sizes = dict(m=m, n=dice.size(), k=dice.size())
        if not has_odd_rows:
            most = dict.fromkeys(sizes, dice.largest) | (dict(m=_DECODING_ROWS) if is_decoding else {})
            sizes |= {name: _rounded_up(sizes[name], step, most[name]) for name in rows}
        batch = (dice.size(2, 64),) if is_batched else ()
        case = MatmulCase(
            **sizes, batch=batch, shared_rhs=shared_rhs, lhs_layout=lhs_layout, rhs_layout=rhs_layout, dtype=dtype,
            **epilogue,
        )  # fmt: skip
        return Problem(case, direction)

    def fits(problem: Problem[MatmulCase]) -> bool:
        is_small = problem.flops <= _MAX_FLOPS and problem.num_bytes <= _MAX_BYTES
        return is_small and has_odd_rows == _has_odd_rows(problem.case)

    problem = dice.until(sized, fits)
    return dataclasses.replace(problem, kinds=kinds(problem))


def _epilogue(dice: Dice) -> dict[str, Any]:
    name = dice.choose(dict.fromkeys(_EPILOGUES, 1))
    activation = dice.choose(dict.fromkeys(_ACTIVATIONS, 1))
    if name == "gate":
        return dict(gate=True, activation="silu")
    return dict(
        bias="bias" in name, residual="residual" in name, activation=activation if "activation" in name else None
    )


def _rounded_up(size: int, step: int, most: int) -> int:
    return min(math.ceil(size / step) * step, math.ceil(most / _ALIGNED) * _ALIGNED)


def _has_odd_rows(case: MatmulCase) -> bool:
    """Whether the rows of an operand or of the result are no multiple of 16 bytes."""
    return any(draw.shape[-1] % _ALIGNED for draw in (*case.draws.values(), case.out_type))


def kinds(problem: Problem[MatmulCase]) -> tuple[str, ...]:
    """The groups in which a summary counts a product."""
    case = problem.case
    tiles = math.prod(case.batch) * math.ceil(case.m / _TILE) * math.ceil(case.n / _TILE)
    is_decoding = case.m <= _DECODING_ROWS
    epilogue = [name for name in ("bias", "activation", "residual", "gate") if getattr(case, name)]
    found = {
        "decoding": is_decoding,
        "few tiles": tiles < _NUM_SMS and not is_decoding,
        "many tiles": tiles >= _NUM_SMS and not is_decoding,
        "odd rows": _has_odd_rows(case),
        "batch": bool(case.batch),
        "epilogue": bool(epilogue),
        problem.direction: True,
        case.description.split()[1]: True,
        case.dtype: True,
    }
    return tuple(name for name, is_so in found.items() if is_so)
