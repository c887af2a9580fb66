"""Random attentions as users have them.

The following is chosen first:

- decoding: a fifth are forward passes of one to eight new queries on a cache of keys. Half of them have one query. The
  others are causal, and the last query has the place of the last key. Problems that are not drawn as such may have so
  few queries, too;
- direction: half of the others are backward passes;
- lengths: half of the others have as many keys as queries. In the rest, both lengths are drawn;
- heads: a third have as many key heads as query heads. In the rest, 1 to 64 query heads share a key head;
- head dimension: 64 and 128 in a quarter each; else 32, 72, 80, 96, 112, 160, 256, or 192 with values of 128;
- causal: half. If there are more keys than queries, half of these let the last query have the place of the last key;
- a further mask: half have none. The others have a window, lengths, packed documents, a dense mask or a bias, each
  equally likely. Documents need as many keys as queries. A window needs no fewer keys than queries, so that every query
  sees a key. Decoding has lengths in half of the problems with one query, and none of the others;
- dtype: three of four are bfloat16, one is float16.

Then the sizes are drawn, each log-uniform: lengths from 1 to 32768, batches from 1 to 64, key heads from 1 to 16. They
are redrawn while the problem has

- more than 2e12 FLOPs (5 ms at 400 TFLOP/s), or operands and results of more than 2e9 bytes; or
- more than 128 query heads; or
- more than 2^30 logits in the query heads of a key head, which a check against the reference holds in memory; or
- lengths for which a choice above has no meaning.

The choices are kept, so that their shares do not depend on the limits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxkernels.core.dice import Dice
from jaxkernels.core.problems import Problem
from jaxkernels.ops.attention.cases import AttentionCase

__all__ = ["draw", "kinds"]

_MAX_FLOPS = 2e12
_MAX_BYTES = 2e9
_MAX_HEADS = 128
_MAX_LOGITS = 2**30

#: Head dimension, dimension of the values (None: the same) -> weight.
_HEADS = {
    (64, None): 4.0, (128, None): 4.0, (32, None): 1.0, (72, None): 1.0, (80, None): 1.0, (96, None): 1.0,
    (112, None): 1.0, (160, None): 1.0, (192, 128): 1.0, (256, None): 1.0,
}  # fmt: skip
_BIASES = ("1NTS", "BNTS", "11TS")
_MASKS = ("B1TS", "11TS", "B11S")

#: At most so many queries on a cache count as decoding.
_DECODING_QUERIES = 8
#: The shortest window.
_SHORT_WINDOW = 16

#: Fewer tiles of 128 queries than this leave SMs of an H100 or H200 idle.
_NUM_SMS, _TILE = 132, 128


def draw(dice: Dice) -> Problem:
    """A random attention."""
    is_decoding, is_single = dice.chance(1 / 5), dice.chance(1 / 2)
    direction = "backward" if dice.chance(1 / 2) and not is_decoding else "forward"
    is_self = dice.chance(1 / 2) and not is_decoding
    is_grouped = dice.chance(2 / 3)
    head_dim, value_dim = dice.choose(_HEADS)
    causal, at_end = dice.chance(1 / 2), dice.chance(1 / 2)
    extra = dice.choose({"window": 1, "lengths": 1, "documents": 1, "mask": 1, "bias": 1}) if dice.chance(1 / 2) else ""
    bias = dice.choose(dict.fromkeys(_BIASES, 1)) if extra == "bias" else None
    mask = dice.choose(dict.fromkeys(_MASKS, 1)) if extra == "mask" else None
    is_flag = dice.chance(1 / 2)  # Query lengths too, or documents of one length.
    dtype = dice.choose({"bfloat16": 3, "float16": 1})
    if is_decoding:
        causal = at_end = not is_single
        extra, bias, mask = "lengths" if is_single and is_flag else "", None, None
    is_self |= extra == "documents"

    def sized() -> Problem[AttentionCase]:
        queries = dice.size(*((1, 1) if is_single else (2, _DECODING_QUERIES))) if is_decoding else dice.size()
        keys = queries if is_self else dice.size()
        kv_heads = dice.size(1, 16)
        options: dict[str, Any] = dict(causal=causal, bias=bias, mask=mask, dtype=dtype, value_dim=value_dim)
        if causal and at_end and keys > queries:
            options["alignment"] = "bottom_right"
        if extra == "window":
            window = dice.size(_SHORT_WINDOW, max(keys, _SHORT_WINDOW))
            options["window"] = (window - 1, 0) if causal else (window, window)
        elif extra == "lengths":
            options |= dict(key_lengths=True, query_lengths=is_self and is_flag, shortest=0.5)
        elif extra == "documents":
            options |= dict(segments=True, documents=dice.size(2, 16), equal_documents=is_flag)
        heads = kv_heads * (dice.size(2, 64) if is_grouped else 1)
        return Problem(AttentionCase(dice.size(1, 64), queries, keys, heads, kv_heads, head_dim, **options), direction)

    def fits(problem: Problem[AttentionCase]) -> bool:
        case = problem.case
        mask_bytes = math.prod(case.shape_of(case.mask)) if case.mask else 0
        return (
            problem.flops <= _MAX_FLOPS
            and problem.num_bytes + mask_bytes <= _MAX_BYTES
            and case.heads <= _MAX_HEADS
            and case.heads // case.kv_heads * case.queries * case.keys <= _MAX_LOGITS
            and (is_self or case.queries != case.keys)
            and (not is_decoding or case.keys > case.queries)
            and (case.window is None or case.keys >= case.queries)
            and case.documents <= case.queries
            and (not case.key_lengths or case.keys > 1)
        )

    problem = dice.until(sized, fits)
    return dataclasses.replace(problem, kinds=kinds(problem))


def kinds(problem: Problem[AttentionCase]) -> tuple[str, ...]:
    """The groups in which a summary counts an attention."""
    case = problem.case
    tiles = case.batch * case.heads * math.ceil(case.queries / _TILE)
    is_decoding = case.queries <= _DECODING_QUERIES and case.queries < case.keys and problem.direction == "forward"
    found = {
        "decoding": is_decoding,
        "few tiles": tiles < _NUM_SMS and not is_decoding,
        "many tiles": tiles >= _NUM_SMS and not is_decoding,
        "odd heads": (case.head_dim, case.value_dim) not in ((64, None), (128, None), (256, None)),
        "grouped heads": case.heads != case.kv_heads,
        "T != S": case.queries != case.keys and not is_decoding,
        "causal": case.causal,
        "window": case.window is not None,
        "lengths": case.key_lengths,
        "documents": case.documents > 0,
        "mask": case.mask is not None,
        "bias": case.bias is not None,
        problem.direction: True,
        case.dtype: True,
    }
    return tuple(name for name, is_so in found.items() if is_so)
