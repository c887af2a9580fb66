"""Device memory of a training step: refuses a step that does not fit before it runs, and names settings that fit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkernels as jk
from jaxkernels.core import hardware
from jaxkernels.core.errors import InputError
from jaxkernels.models.config import TrainingConfig

__all__ = ["check_compiled", "check_config", "device_bytes", "explained", "step_bytes", "stores_logits"]

#: Optimizer -> bytes of a float32 parameter, its gradient and its moments.
_BYTES_PER_PARAM = {"adamw": 16, "adafactor": 10}

#: The environment variable for JAX's share of a GPU's memory, its default, and a share that leaves room for CUDA.
_SHARE_VARIABLE, _USUAL_SHARE, _LARGEST_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75, 0.95


def device_bytes(device: Any) -> int | None:
    """The memory that programs can use on a device, in bytes; None if it is not known.

    The devices of a CPU share the machine's memory.
    """
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limit(devices: Sequence[Any]) -> int | None:
    limit = device_bytes(devices[0])
    return limit // len(devices) if limit is not None and devices[0].platform == "cpu" else limit


def stores_logits(config: TrainingConfig, device: Any) -> bool:
    """Whether a step of a run on a device stores the logits of all its tokens.

    Without a setting it does if no kernel of `jaxkernels.linear_cross_entropy` computes the loss, or if the model names
    the backends of its products and attention.
    """
    m = config.model
    if config.chunked_loss is not None or m.backend is not None:
        return not config.chunked_loss
    array = lambda *shape: jax.ShapeDtypeStruct(shape, m.dtype)
    x = array(config.batch_size, config.sequence_length, m.embed_dim)
    loss = lambda x, w: jk.linear_cross_entropy(x, w, jnp.zeros(x.shape[:2], jnp.int32), vocab_axis=0, reduction="mean")
    choices = jk.explain(jax.grad(loss, argnums=(0, 1)), x, array(m.vocab_size, m.embed_dim), platform=device.platform)
    return all(choice.backend == "xla" for choice in choices.choices)


def _least_bytes_per_sequence(config: TrainingConfig, device: Any) -> int:
    """The bytes of a sequence that a step keeps in any case: the inputs of layers, and stored logits."""
    m = config.model
    itemsize = 4 if m.dtype == "float32" else 2
    logits = m.vocab_size if stores_logits(config, device) else 0
    return config.sequence_length * (m.num_layers * m.embed_dim + logits) * itemsize


def _state_bytes(config: TrainingConfig) -> int:
    return _BYTES_PER_PARAM[config.optimizer] * config.model.num_params


def check_config(config: TrainingConfig, devices: Sequence[Any]) -> None:
    """Raises InputError if a step cannot fit into the devices' memory, however XLA compiles it."""
    state = _state_bytes(config)
    batch = -(-config.batch_size // len(devices)) * _least_bytes_per_sequence(config, devices[0])
    _check(config, devices, state, batch, at_least=True)


def step_bytes(step: Any) -> int | None:
    """The device memory that a compiled step needs, in bytes: operands, results and temporaries; None if not known."""
    stats = step.memory_analysis()
    if stats is None:
        return None
    return (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )


def check_compiled(config: TrainingConfig, devices: Sequence[Any], step: jax.stages.Compiled) -> None:
    """Raises InputError if a compiled step does not fit into the devices' memory."""
    if (needed := step_bytes(step)) is None:
        return
    state = min(_state_bytes(config), needed)
    _check(config, devices, state, needed - state, at_least=False)


def _check(config: TrainingConfig, devices: Sequence[Any], state: int, batch: int, *, at_least: bool) -> None:
    """Compares the bytes of the state and of a device's share of the batch with the device's memory."""
    limit = _limit(devices)
    if limit is None or state + batch <= limit:
        return
    local = -(-config.batch_size // len(devices))
    fitting = max(limit - state, 0) * local // max(batch, 1) * len(devices)
    raise InputError(
        f"train: out of memory: a step needs {'at least' if at_least else 'about'} {(state + batch) / 1e9:,.1f} GB on "
        f"each device, {state / 1e9:,.1f} GB of it for {config.model.num_params:,} parameters; "
        f"{devices[0].device_kind} gives JAX {limit / 1e9:,.1f} GB. "
        f"{_advice(config, fitting, recomputing=not at_least, sharing=_can_share_more(devices, state + batch, limit))}"
    )


def _can_share_more(devices: Sequence[Any], needed: int, limit: int) -> bool:
    """Whether JAX has its usual share of a GPU's memory, and a larger one would be enough."""
    has_usual = devices[0].platform in hardware.GPU_PLATFORMS and _SHARE_VARIABLE not in os.environ
    return has_usual and needed <= limit * _LARGEST_SHARE / _USUAL_SHARE


def _advice(config: TrainingConfig, fitting: int, *, recomputing: bool, sharing: bool = False) -> str:
    """Advice for the message: more of the GPU's memory, a batch of at most `fitting` sequences, recomputed activations,
    or a smaller preset."""
    ways = [f"the environment variable {_SHARE_VARIABLE}={_LARGEST_SHARE}"] if sharing else []
    if fitting < 1 and not ways:
        return "A batch of one sequence does not fit either: use a smaller --preset."
    if fitting >= 1:
        ways.append(f"--batch-size {fitting} or less")
    if recomputing and config.model.remat != "full":
        ways.append("--remat full (less memory, more work)")
    return f"Use {' or '.join([*ways, 'a smaller --sequence-length'])}."


@contextlib.contextmanager
def explained(config: TrainingConfig) -> Iterator[None]:
    """Turns XLA's error for exhausted memory into one line with advice."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as e:
        lines = str(e).splitlines() or [type(e).__name__]
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in lines[0] and "ut of memory" not in lines[0]:
            raise
        half = config.batch_size // 2
        raise InputError(
            f"train: out of memory with --batch-size {config.batch_size}: {lines[0][:200].rstrip('.')}. "
            f"{_advice(config, half, recomputing=True)}"
        ) from e
