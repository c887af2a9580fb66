"""The decoder transformer in Flax NNX. jaxkernels computes every matrix product, the attention
and the norms.

Letters in shapes: B batch, T tokens, D embed_dim, N query heads, K key/value heads, H head_dim, F mlp_dim,
V vocabulary, S slots of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import jaxkernels as jk
from jaxkernels.models.config import ModelConfig

__all__ = ["Cache", "LayerCache", "Transformer", "abstract_params", "init_cache", "init_params"]

#: The policies of `ModelConfig.remat`, but for "none".
_POLICIES: dict[str, Any] = {
    "dots_and_attention": jk.checkpoint_policies.save_products_and_attention,
    "dots": jk.checkpoint_policies.dots_saveable,
    "attention": jk.checkpoint_policies.save_attention,
    "full": None,
}

_EMBEDDING_STDDEV = 0.02  # The logits of a tied embedding then start near 0, and the loss near ln(V).


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Rotated keys and values of one layer, (B, S, K, H) each. With `scan` they are stacked over layers."""

    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The key/value cache of decoding: keys and values of the last S tokens.

    The slots are a ring: token i is in slot i % S. The order of the slots does not matter, because rotated keys carry
    their positions.

    Attributes:
      layers: one `LayerCache` for each layer, or a stacked one, like the model's parameters.
      length: tokens seen so far, int32.
    """

    layers: tuple[LayerCache, ...] | LayerCache
    length: jax.Array


class Projection(nnx.Module):
    """A linear layer without bias: y = x kernel + residual, in one jaxkernels matmul."""

    def __init__(self, in_features: int, out_features: int, config: ModelConfig, *, rngs: nnx.Rngs, gain: float = 1.0):
        init = nnx.initializers.normal(gain / math.sqrt(in_features))
        self.kernel = nnx.Param(init(rngs.params(), (in_features, out_features), jnp.float32))
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T In"],
        *,
        residual: Float[Array, "B T Out"] | None = None,
    ) -> Float[Array, "B T Out"]:
        return jk.matmul(x, self.weight, residual=residual, backend=self.config.backend)

    @property
    def weight(self) -> Float[Array, "In Out"]:
        """The kernel in the dtype that the model computes in."""
        return self.kernel[...].astype(self.config.dtype)


class Norm(nnx.Module):
    """RMS norm with a scale. A residual is no operand: the products before have added it to the stream.

    It returns the stream, too: the norm's backward kernel then adds the gradient of what follows.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (config.embed_dim,), jnp.float32))
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        if self.config.backend == "xla":  # XLA fuses the sum of gradients best if it sees all of it.
            return jk.rms_norm(x, self.scale[...], eps=self.config.norm_epsilon, backend="xla"), x
        return jk.rms_norm(
            x, self.scale[...], return_x=True, eps=self.config.norm_epsilon
        )  # Not all backends have norms.


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, attention_fn: Callable[..., jax.Array] | None = None):
        c = self.config = config
        self.attention_fn = attention_fn
        self.qkv = Projection(c.embed_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c, rngs=rngs)
        self.out = Projection(c.num_heads * c.head_dim, c.embed_dim, c, rngs=rngs, gain=_residual_gain(c))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        residual: Float[Array, "B T D"],
        rotation: tuple[jax.Array, jax.Array],
        cache: LayerCache | None,
        length: jax.Array,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        c = self.config
        q, k, v = jk.qkv_projection(
            x, self.qkv.weight, rotation, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, backend=c.backend
        )
        if cache is not None:
            # A prompt fills an empty cache from slot 0. A single token takes the next slot of the ring.
            num_slots, num_tokens = cache.key.shape[1], x.shape[1]
            start = (0, length % num_slots if num_tokens == 1 else 0, 0, 0)
            write = lambda old, new: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), start)
            cache = LayerCache(write(cache.key, k), write(cache.value, v))
        with jax.named_scope("attention"):
            out = self._attend(q, k, v, cache, length)
        return self.out(out.reshape(*x.shape[:2], -1), residual=residual), cache

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache | None, length: jax.Array
    ) -> Float[Array, "B T N H"]:
        """The attention of a prompt to itself, or of a single token to the tokens in the cache."""
        c = self.config
        if cache is not None and q.shape[1] == 1:
            visible = jnp.broadcast_to(jnp.minimum(length + 1, cache.key.shape[1]), q.shape[:1])
            return jk.dot_product_attention(q, cache.key, cache.value, key_value_seq_lengths=visible, backend=c.backend)
        if self.attention_fn is not None:
            return self.attention_fn(q, k, v, is_causal=True)
        return jk.dot_product_attention(q, k, v, is_causal=True, deterministic=c.deterministic, backend=c.backend)


class FeedForward(nnx.Module):
    """SwiGLU: (silu(x gate) * (x up)) down (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.gate = Projection(c.embed_dim, c.mlp_dim, c, rngs=rngs)
        self.up = Projection(c.embed_dim, c.mlp_dim, c, rngs=rngs)
        self.down = Projection(c.mlp_dim, c.embed_dim, c, rngs=rngs, gain=_residual_gain(c))

    def __call__(self, x: Float[Array, "B T D"], residual: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        weights = self.gate.weight, self.up.weight, self.down.weight
        return jk.gated_mlp(x, *weights, activation="silu", residual=residual, backend=self.config.backend)


class Block(nnx.Module):
    """One layer: attention and feed-forward. Each reads the normalised stream and adds its result to the stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, attention_fn: Callable[..., jax.Array] | None = None):
        self.attention_norm = Norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs, attention_fn=attention_fn)
        self.mlp_norm = Norm(config, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotation: tuple[jax.Array, jax.Array],
        cache: LayerCache | None,
        length: jax.Array,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        normalised, x = _normalise(self.attention_norm, x)
        x, cache = self.attention(normalised, x, rotation, cache, length)
        return self.mlp(*_normalise(self.mlp_norm, x)), cache


class Transformer(nnx.Module):
    """A language model: tokens in, logits of the next token out.

    Args:
      config: sizes and options.
      rngs: the stream "params" seeds the initialisation. `scan` and `remat` do not change the initial parameters.
      attention_fn: replaces `jaxkernels.dot_product_attention`, except in decoding, for comparisons with other
        libraries. Called as attention_fn(query, key, value, is_causal=True).

    References: Vaswani et al. 2017, arXiv:1706.03762; RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467;
    rotary positions: Su et al. 2021, arXiv:2104.09864; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, attention_fn: Callable[..., jax.Array] | None = None):
        self.config = config
        shape = (config.vocab_size, config.embed_dim)
        init = nnx.initializers.normal(_EMBEDDING_STDDEV)
        self.embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))
        # XLA compiles the random draws of one block, and loops over the layers (see `init_params`).
        keys = jax.random.split(rngs.params(), config.num_layers)
        init_block = lambda key: Block(config, rngs=nnx.Rngs(params=key), attention_fn=attention_fn)
        stacked = nnx.scan(init_block, in_axes=0, out_axes=0)(keys)
        layer = lambda i: jax.tree.map(lambda x: x[i], stacked)
        # One Block with stacked parameters if the model scans, else a list of Blocks.
        self.layers: Any = stacked if config.scan else nnx.List(map(layer, range(config.num_layers)))
        self.norm = Norm(config, rngs=rngs)
        if not config.tied_embedding:
            self.unembedding = nnx.Param(init(rngs.params(), shape, jnp.float32))

    def __call__(
        self, tokens: Int[Array, "B T"], cache: Cache | None = None
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Returns the logits of the token after each token, in the config's dtype.

        With a cache it returns (logits, the cache with these tokens added). `tokens` is then a single token for each
        sequence, or, if the cache is empty, a prompt of at most S tokens.
        """
        x, updated = self._stream(tokens, cache)
        # Logits have the compute dtype. With float32 logits the backward products would be float32, too.
        logits = jk.dot_general(x, self._table(), (((2,), (1,)), ((), ())), backend=self.config.backend)
        return logits if updated is None else (logits, updated)

    def loss(self, tokens: Int[Array, "B T"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
        """Returns the mean negative log-likelihood of the targets, in nats per token, without storing all logits.

        `linear_cross_entropy` chooses its backend itself: the backends of the config have products and attention.
        """
        x, _ = self._stream(tokens, None)
        return jk.linear_cross_entropy(x, self._table(), targets, vocab_axis=0, reduction="mean")

    def _table(self) -> Float[Array, "V D"]:
        """The unembedding, in the compute dtype."""
        return (self.embedding if self.config.tied_embedding else self.unembedding)[...].astype(self.config.dtype)

    def _stream(self, tokens: Int[Array, "B T"], cache: Cache | None) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Returns the normalised stream after the last layer, and the updated cache (None without a cache)."""
        c = self.config
        length = jnp.int32(0) if cache is None else cache.length
        rotation = rotation_at(length + jnp.arange(tokens.shape[1]), c)
        x = jnp.take(self.embedding[...], tokens, axis=0).astype(c.dtype)
        x, layers = self._run_layers(x, rotation, None if cache is None else cache.layers, length)
        x, _ = _normalise(self.norm, x)
        return x, None if cache is None else Cache(layers, length + tokens.shape[1])

    def _run_layers(self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], caches: Any, length: jax.Array) -> Any:
        """Returns the stream after the last layer, and the updated caches (None without caches)."""

        def run(block: Block, x: jax.Array, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
            return block(x, rotation, cache, length)

        if self.config.remat != "none":
            # XLA cannot merge the two runs of a loop's body. So only unrolled layers need barriers between them.
            run = nnx.remat(run, policy=_POLICIES[self.config.remat], prevent_cse=not self.config.scan)
        if self.config.scan:
            layers = _cast_kernels(self.layers, self.config.dtype)
            if caches is not None:
                return nnx.scan(run, in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))(layers, x, caches)
            graphdef, params = nnx.split(layers)
            return jk.scan_layers(lambda x, params: run(nnx.merge(graphdef, params), x, None)[0], x, params), None
        updated = []
        for i, block in enumerate(self.layers):
            x, cache = run(block, x, None if caches is None else caches[i])
            updated.append(cache)
        return x, None if caches is None else tuple(updated)


def rotation_at(positions: Int[Array, " T"], config: ModelConfig) -> tuple[Float[Array, "T h"], Float[Array, "T h"]]:
    """Cosine and sine of the angles of every position, float32; h = H/2 wavelengths from 2 pi up to 2 pi theta."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def init_cache(config: ModelConfig, batch_size: int, num_slots: int) -> Cache:
    """Returns an empty cache for the last `num_slots` tokens of each sequence."""
    shape = (batch_size, num_slots, config.num_kv_heads, config.head_dim)
    zeros = lambda *lead: jnp.zeros((*lead, *shape), config.dtype)
    if config.scan:
        layers = LayerCache(zeros(config.num_layers), zeros(config.num_layers))
    else:
        layers = tuple(LayerCache(zeros(), zeros()) for _ in range(config.num_layers))
    return Cache(layers, jnp.int32(0))


def init_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    """Returns the model's initial parameters as a pure dict. They depend on the key; `scan` does not change the values.

    XLA compiles the random draws of one block only, and one slice for each shape. On a GPU it takes 0.1 s or more for
    each kernel, and longer for random draws: a program with the draws of 24 layers took minutes to compile.
    """
    # One program for all options that do not change the values.
    same = dict(scan=True, remat="none", dtype="float32", backend=None, deterministic=False)
    params = _stacked_params(dataclasses.replace(config, **same), key)
    if config.scan:
        return params
    layers = {i: jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.num_layers)}
    return {**params, "layers": layers}


# The initialisation runs once, so autotuning is not worth its time.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
def _stacked_params(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def abstract_params(
    config: ModelConfig, attention_fn: Callable[..., jax.Array] | None = None
) -> tuple[nnx.GraphDef, dict]:
    """Returns the model's structure and the shapes of its parameters, without allocating them."""
    build = lambda: Transformer(config, rngs=nnx.Rngs(params=0), attention_fn=attention_fn)
    graphdef, params = nnx.split(nnx.eval_shape(build), nnx.Param)
    return graphdef, nnx.to_pure_dict(params)


@functools.partial(nnx.remat, policy=jk.checkpoint_policies.save_norms, prevent_cse=False)
def _normalise(norm: Norm, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies a norm, and returns the stream, too. The backward pass computes nothing of it again.

    The checkpoint says that the gradient reads the stream: in a scan, products then write it into the array for all
    layers, and norms read it there. Without the checkpoint, XLA copies the stream.
    """
    with jax.named_scope("norm"):
        return norm(x)


def _cast_kernels(layers: Block, dtype: str) -> Block:
    """The stacked layers with the matrices in the compute dtype.

    Cast inside the scan, each matrix would be kept once more for the backward pass, and its gradients would be stacked
    in float32.
    """
    is_matrix = lambda x: x.ndim == 3  # layers, in, out
    return jax.tree.map(lambda x: x.astype(dtype) if is_matrix(x) else x, layers)


def _residual_gain(config: ModelConfig) -> float:
    """Scale of the two projections whose results are added to the stream: its variance then stays near 1 (GPT-2)."""
    return 1.0 / math.sqrt(2 * config.num_layers)
