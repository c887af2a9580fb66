"""The limits of cuDNN's attention as XLA calls it: one description, for the backend and for the benchmarks' baseline.

Source: the checks in JAX 0.11.2 and 0.12.0 (jax/_src/cudnn/fused_attention_stablehlo.py: `check_is_flash_attention`,
`check_layout`) and in `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

from jaxkernels.core.hardware import Chip, needs_capability
from jaxkernels.core.problems import needs_cuda

__all__ = [
    "largest_head_dim", "odd_lengths_of_gradients", "takes_window", "unsupported_chip", "unsupported_dtype",
    "unsupported_heads", "unsupported_lengths",
]  # fmt: skip

#: Compute capability from which on cuDNN has fused attention.
_OLDEST_CAPABILITY = (8, 0)
#: Compute capability from which on its heads have up to 256 dimensions, and before that 128.
_WIDE_CAPABILITY = (9, 0)
_HEAD_STEP = 8


def unsupported_dtype(dtype: str) -> str | None:
    """Why cuDNN has no attention for the dtype of queries, keys and values, or None."""
    return None if dtype in ("bfloat16", "float16") else f"computes in 16 bits, not in {dtype}"


def unsupported_chip(chip: Chip) -> str | None:
    """Why cuDNN has no attention on the chip, or None."""
    if reason := needs_cuda(chip):
        return reason
    needs = needs_capability(chip, _OLDEST_CAPABILITY)
    return None if needs is None else f"{needs}, this is {chip}"


def largest_head_dim(chip: Chip) -> int:
    """The largest head dimension on the chip."""
    return 256 if chip.compute_capability is not None and chip.compute_capability >= _WIDE_CAPABILITY else 128


def unsupported_heads(head_dim: int, value_dim: int, chip: Chip) -> str | None:
    """Why cuDNN does not take the head dimensions of keys and of values, or None. Narrower values can be padded."""
    if value_dim > head_dim:
        return f"takes values as wide as keys, or padded to be, not {head_dim} and {value_dim}"
    largest = largest_head_dim(chip)
    if head_dim % _HEAD_STEP or head_dim > largest:
        return f"needs a head dimension of at most {largest}, in steps of {_HEAD_STEP}, not {head_dim}"
    return None


def unsupported_lengths(queries: int, keys: int) -> str | None:
    """Why cuDNN does not take the lengths, or None."""
    return "needs more than one query or more than one key" if queries == keys == 1 else None


def odd_lengths_of_gradients(queries: int, keys: int) -> str | None:
    """Why cuDNN has no gradients for these lengths if there is a bias, or None. JAX makes a bias of a mask."""
    if queries % 2 or keys % 2:
        return f"needs even lengths for gradients with a bias or a mask, not {queries} and {keys}"
    return None


def takes_window(*, causal: bool, has_lengths: bool, has_bias: bool, queries: int, keys: int) -> bool:
    """Whether cuDNN can apply a local window. Its window has a left side only, and is causal.

    cuDNN's frontend takes it neither with lengths nor with a bias, and only if there are as many keys as queries.
    """
    return causal and not has_lengths and not has_bias and queries <= keys
