"""Generates text with a trained model: one pass over the prompt, then one token at a time with a key/value cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkernels.core.errors import InputError
from jaxkernels.models.config import ModelConfig
from jaxkernels.models.run import Run
from jaxkernels.models.tokenizer import END_OF_TEXT, Tokenizer
from jaxkernels.models.transformer import abstract_params, init_cache

__all__ = ["generate", "sample_text", "text_from_run"]

#: The random keys of all tokens are made before the first token.
_MOST_TOKENS = 1_000_000

#: Logits divided by a smaller temperature may become infinite.
_LEAST_TEMPERATURE = 1e-6


@functools.partial(
    jax.jit, static_argnames=("graphdef", "num_tokens", "num_slots", "temperature", "top_k", "vocab_size")
)
def generate(
    graphdef: nnx.GraphDef,
    params: Any,
    prompt: Int[Array, "B T"],
    key: jax.Array,
    *,
    num_tokens: int,
    num_slots: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocab_size: int | None = None,
) -> Int[Array, "B num_tokens"]:
    """Continues each prompt by `num_tokens` tokens.

    Args:
      graphdef: structure of the `Transformer`.
      params: its parameters, a pure dict of arrays.
      prompt: tokens; T from 1 to `num_slots`.
      key: a PRNG key.
      num_tokens: tokens to generate for each prompt.
      num_slots: the tokens that the model looks back, usually its training sequence length.
      temperature: divides the logits; 0 takes the most probable token.
      top_k: draw from the k most probable tokens only.
      vocab_size: draw from the first `vocab_size` tokens only. A tokenizer may have fewer tokens than the model.

    Returns:
      The new tokens.
    """
    config = nnx.merge(graphdef, params).config
    # Cast once. Otherwise the layers would cast each weight for each token.
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)

    def draw(logits: Float[Array, "B V"], key: jax.Array) -> Int[Array, " B"]:
        logits = logits[:, :vocab_size].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(logits, axis=-1)
        if top_k is not None:
            least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return jax.random.categorical(key, logits / temperature)

    def step(carry: Any, key: jax.Array) -> tuple[Any, Int[Array, " B"]]:
        logits, cache = carry
        token = draw(logits, key)
        logits, cache = nnx.merge(graphdef, params)(token[:, None], cache)
        return (logits[:, -1], cache), token

    logits, cache = nnx.merge(graphdef, params)(prompt, init_cache(config, prompt.shape[0], num_slots))
    _, tokens = jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, num_tokens))
    return tokens.T


def sample_text(
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    num_slots: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """Returns the continuation of `prompt`, up to the end of the document if the model ends it.

    An empty prompt starts a new document. The backend is chosen for each operation, even if the model was trained on a
    named backend, because decoding is other work than training.

    Raises:
      InputError: an option is out of range, or the prompt is not UTF-8 text.
    """
    if not 1 <= num_tokens <= _MOST_TOKENS:
        raise InputError(f"sample: --tokens must be from 1 to {_MOST_TOKENS:,}; got {num_tokens}.")
    if temperature != 0 and not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise InputError(
            f"sample: --temperature must be 0, or finite and at least {_LEAST_TEMPERATURE:g}; got {temperature}."
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"sample: --top-k must be at least 1; got {top_k}.")
    if not 0 <= seed < 2**32:
        raise InputError(f"sample: --seed must be from 0 to 2**32 - 1; got {seed}.")
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        raise InputError(f"sample: --prompt must be UTF-8 text; got {prompt!r}.") from e
    tokens = np.concatenate([*tokenizer.encode([prompt])]) if prompt else np.array([END_OF_TEXT])
    graphdef, _ = abstract_params(dataclasses.replace(config, backend=None))
    new = generate(
        graphdef,
        params,
        jnp.asarray(tokens[-num_slots:], jnp.int32)[None],
        jax.random.key(seed),
        num_tokens=num_tokens,
        num_slots=num_slots,
        temperature=temperature,
        top_k=top_k,
        vocab_size=tokenizer.vocab_size,
    )
    new = np.asarray(new[0])
    ends = np.flatnonzero(new == END_OF_TEXT)
    return tokenizer.decode(new[: ends[0]] if ends.size else new)


def text_from_run(run: Run, *, log: Callable[[str], None] = lambda message: None, **options: Any) -> str:
    """Returns the continuation of a prompt by a run's newest undamaged checkpoint.

    Args:
      run: the run.
      log: called with a line of text for each newer checkpoint that is damaged.
      **options: as in `sample_text`.
    """
    config = run.config
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    _, params = abstract_params(config.model)
    with run.checkpoints(read_only=True, log=log) as checkpoints:
        params, _ = checkpoints.restore(config, device, params)
    return sample_text(config.model, params, run.tokenizer(), num_slots=config.sequence_length, **options)
