"""Configurations of models and of training (frozen, validated), and the presets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from jaxkernels.core.errors import InputError

__all__ = ["OPTIMIZERS", "PRESETS", "REMATS", "ModelConfig", "Preset", "TrainingConfig", "preset", "training_config"]


#: Integers must be below: steps are counted in int32, and sizes of models are much smaller.
_INT_LIMIT = 2**31

#: Annotation of a field -> accepted types, and their name in messages. An int is also accepted as a float. A bool is
#: not accepted as an int.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an int"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a string"),
    "None": ((type(None),), "None"),
}


def _require_types(config: object) -> None:
    """Raises InputError if a field's value does not have the annotated type."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        names = str(field.type).split(" | ")
        value = getattr(config, field.name)
        allowed = [_TYPES.get(name, ((globals().get(name, object),), f"a {name}")) for name in names]
        types = tuple(itertools.chain.from_iterable(types for types, _ in allowed))
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            expected = " or ".join(name for _, name in allowed)
            raise InputError(f"{type(config).__name__}: {field.name} must be {expected}; got {value!r}.")


def _require_positive_ints(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value < 1:
            raise InputError(f"{type(config).__name__}: {field} must be a positive int; got {value!r}.")
        if value >= _INT_LIMIT:
            raise InputError(f"{type(config).__name__}: {field} must be below 2**31; got {value!r}.")


def _require_positive(config: object, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if not 0 < value < math.inf:
            raise InputError(f"{type(config).__name__}: {field} must be positive and finite; got {value!r}.")


#: `ModelConfig.remat` -> the activations of a block that the backward pass keeps; it recomputes the others.
REMATS: dict[str, str] = {
    "none": "everything; nothing is recomputed",
    "dots_and_attention": "the block's input, the products and the attention; norms and elementwise work are redone",
    "dots": "the block's input and the products; the attention is recomputed, too",
    "attention": "the block's input and the attention; the products are recomputed, too",
    "full": "the block's input only",
}


#: `TrainingConfig.optimizer` -> its description.
OPTIMIZERS: dict[str, str] = {
    "adamw": "AdamW with both moments in float32: 16 bytes for each parameter, with its gradient",
    "adafactor": "a factored second moment and a bfloat16 first moment: 10 bytes for each parameter, with its gradient",
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder transformer: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Attributes:
      vocab_size: rows of the embedding.
      num_layers: transformer blocks.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key/value heads; `num_heads` must be a multiple (1: multi-query attention).
      head_dim: width of one head; even, as the rotation turns pairs.
      mlp_dim: hidden width of the feed-forward block.
      rope_theta: base of the rotary wavelengths.
      norm_epsilon: added to the mean square in RMSNorm.
      tied_embedding: whether the unembedding is the embedding, transposed. Otherwise it is a separate matrix.
      dtype: name of the dtype the model computes in; parameters are always float32.
      remat: which activations of a block the backward pass keeps: a name of `REMATS`. From "none" to "full", a step
        needs less memory and more work. The policies are those of `jaxkernels.checkpoint_policies`.
      scan: one `jax.lax.scan` over stacked layers instead of a copy of the block for each layer. It compiles
        faster, and changes the parameters' layout but not the function.
      backend: the jaxkernels backend that runs every matmul and attention; None: the fastest that supports it, for
        each operation. Norms follow "xla" only: no other name has kernels for all.
      deterministic: the attention's gradient has the same bits in every run. Training overrides it with
        `TrainingConfig.deterministic`.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tied_embedding: bool = True
    dtype: str = "bfloat16"
    remat: str = "none"
    scan: bool = False
    backend: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require_types(self)
        _require_positive_ints(
            self, "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"
        )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "ModelConfig: num_heads must be a multiple of num_kv_heads; "
                f"got {self.num_heads} and {self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise InputError(f"ModelConfig: head_dim must be even (rotary embeddings turn pairs); got {self.head_dim}.")
        _require_positive(self, "rope_theta", "norm_epsilon")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(f'ModelConfig: dtype must be "bfloat16", "float16" or "float32"; got {self.dtype!r}.')
        if self.remat not in REMATS:
            raise InputError(f"ModelConfig: remat must be one of {', '.join(REMATS)}; got {self.remat!r}.")

    @property
    def num_matmul_params(self) -> int:
        """Parameters in matrix products of a token's forward pass, including the unembedding."""
        attention = self.embed_dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.embed_dim * self.mlp_dim) + self.vocab_size * self.embed_dim

    @property
    def num_params(self) -> int:
        """All parameters: the matrices, the norms' scales, and the embedding if it is not tied."""
        norms = (2 * self.num_layers + 1) * self.embed_dim
        embedding = 0 if self.tied_embedding else self.vocab_size * self.embed_dim
        return self.num_matmul_params + norms + embedding

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of a training step for one token, forward and backward: 6 N + 6 L T N_h H.

        N is `num_matmul_params`: 2 FLOPs each in the forward pass, 4 in the backward pass. Attention takes 4 T H FLOPs
        per head in the forward pass (two products over T keys), and twice that in the backward pass; a causal mask
        halves both. Recomputation (`remat`) is not counted. Source: Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B, which does not halve for the causal mask.
        """
        attention = 6 * self.num_layers * sequence_length * self.num_heads * self.head_dim
        return 6.0 * self.num_matmul_params + attention


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model size and the training settings that suit it.

    Attributes:
      model: the model. A run may replace its `vocab_size` and `dtype`.
      tokenizer: "bytes" or "bpe".
      steps, batch_size, sequence_length, learning_rate: training defaults; `learning_rate` is the peak.
      source: the source of the sizes.
      optimizer: a name of `OPTIMIZERS`.
    """

    model: ModelConfig
    tokenizer: str
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    source: str
    optimizer: str = "adamw"


#: The vocabulary of the larger presets: a multiple of 128, for the tiles of the kernels.
_BPE_VOCAB = 32_768

#: name -> preset; the parameter counts are asserted in tests/test_model.py.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        model=ModelConfig(
            vocab_size=256,
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=384,
        ),
        tokenizer="bytes",
        steps=800,
        batch_size=8,
        sequence_length=128,
        learning_rate=2e-3,
        source="our own: sized to learn the shape of Python in a minute or two on two CPU cores",
    ),
    "124m": Preset(
        model=ModelConfig(
            vocab_size=_BPE_VOCAB,
            num_layers=12,
            embed_dim=768,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            mlp_dim=2560,
        ),
        tokenizer="bpe",
        steps=2000,
        batch_size=32,
        sequence_length=1024,
        learning_rate=6e-4,
        source="depth, width and heads of GPT-2 small (Radford et al. 2019, table 2); mlp_dim makes up for the "
        "smaller vocabulary, so that the parameters are GPT-2's 124 M",
    ),
    "350m": Preset(
        model=ModelConfig(
            vocab_size=_BPE_VOCAB,
            num_layers=24,
            embed_dim=1024,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            mlp_dim=2944,
        ),
        tokenizer="bpe",
        steps=4000,
        batch_size=32,
        sequence_length=1024,
        learning_rate=3e-4,
        source="depth, width and heads of GPT-3 Medium, 350 M (Brown et al. 2020, arXiv:2005.14165, table 2.1); "
        "mlp_dim chosen for that parameter count",
    ),
    "1b": Preset(
        model=ModelConfig(
            vocab_size=_BPE_VOCAB,
            num_layers=16,
            embed_dim=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            mlp_dim=8192,
            rope_theta=500_000.0,
            norm_epsilon=1e-5,
            remat="dots_and_attention",
            scan=True,
        ),
        tokenizer="bpe",
        steps=4000,
        batch_size=16,
        sequence_length=2048,
        learning_rate=3e-4,
        source="Llama 3.2 1B (its published config.json), with a vocabulary of 32,768 instead of 128,256",
    ),
    "8b": Preset(
        model=ModelConfig(
            vocab_size=128_256,
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=14_336,
            rope_theta=500_000.0,
            norm_epsilon=1e-5,
            tied_embedding=False,
            remat="attention",
            scan=True,
        ),
        tokenizer="bpe",
        steps=4000,
        batch_size=4,
        sequence_length=4096,
        learning_rate=3e-4,
        source="Llama 3 8B (its published config.json); on one H200 with adafactor",
        optimizer="adafactor",
    ),
}


def preset(name: str) -> Preset:
    """Returns the preset called `name`.

    Raises:
      InputError: there is no preset of that name; the message lists the presets.
    """
    if name not in PRESETS:
        raise InputError(f"preset: unknown preset {name!r}; use one of {', '.join(PRESETS)}.")
    return PRESETS[name]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """All settings of a run. Its losses depend on them, on the text and on the machine.

    Attributes:
      preset: name of the preset that the settings come from.
      model: the model.
      tokenizer: "bytes" or "bpe".
      data: path of the text as given; None: the standard library's source.
      steps: optimizer steps.
      batch_size: sequences in a step.
      sequence_length: tokens of a sequence.
      learning_rate: peak of the schedule: linear warm-up over the first twentieth of the steps (at most
        2000), then a cosine down to a tenth.
      optimizer: a name of `OPTIMIZERS`.
      weight_decay: the decoupled weight decay, for every matrix but not for the norms' scales.
      clip_norm: gradients are scaled down to this global norm.
      seed: seed of the initialisation, the batches and the sample.
      log_every, eval_every, checkpoint_every: a step with each of these multiples logs, evaluates or saves; the last
        step does all three.
      eval_batches: validation batches in an evaluation, at most. A short validation text has fewer.
      deterministic: on a GPU, compile with `xla_gpu_deterministic_ops`: equal runs have equal losses, bit for
        bit. XLA then sums an embedding's gradient in order instead of atomically, and does not autotune its own
        matmuls. Our attention sums the queries' gradient in order. On CPUs equal runs are equal without it.
      init_from: folder of the run whose weights are the start; None: random weights.
      chunked_loss: compute the loss with `jaxkernels.linear_cross_entropy`, which stores the logits of some tokens at a
        time. The loss is the same up to rounding. None: if a kernel computes it, and the model names no backend.
    """

    preset: str
    model: ModelConfig
    tokenizer: str
    data: str | None
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    eval_every: int
    checkpoint_every: int
    seed: int = 0
    log_every: int = 10
    eval_batches: int = 20
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    deterministic: bool = True
    init_from: str | None = None
    chunked_loss: bool | None = None

    def __post_init__(self) -> None:
        _require_types(self)
        _require_positive_ints(
            self,
            "steps",
            "batch_size",
            "sequence_length",
            "log_every",
            "eval_every",
            "eval_batches",
            "checkpoint_every",
        )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"TrainingConfig: seed must be an int from 0 to 2**32 - 1; got {self.seed!r}.")
        _require_positive(self, "learning_rate", "clip_norm")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(
                f"TrainingConfig: weight_decay must be finite and not negative; got {self.weight_decay!r}."
            )
        if self.batch_size * (self.sequence_length + 1) >= _INT_LIMIT:
            raise InputError(
                "TrainingConfig: batch_size * (sequence_length + 1) must be below 2**31 tokens; "
                f"got {self.batch_size} * {self.sequence_length + 1}."
            )
        if self.optimizer not in OPTIMIZERS:
            raise InputError(
                f"TrainingConfig: optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}."
            )
        if self.tokenizer not in ("bytes", "bpe"):
            raise InputError(f'TrainingConfig: tokenizer must be "bytes" or "bpe"; got {self.tokenizer!r}.')

    @property
    def warmup_steps(self) -> int:
        return min(max(self.steps // 20, 1), 2000)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainingConfig:
        model = dict(values["model"])
        if isinstance(model.get("remat"), bool):  # Runs of older versions.
            model["remat"] = "full" if model["remat"] else "none"
        return cls(**{**values, "model": ModelConfig(**model)})


#: Entries of a BPE vocabulary for a preset that uses bytes by default.
_SMALL_BPE_VOCAB = 4096


def training_config(
    preset_name: str,
    *,
    platform: str,
    data: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    backend: str | None = None,
    remat: str | None = None,
    scan: bool | None = None,
    **overrides: Any,
) -> TrainingConfig:
    """Builds a run's configuration: the preset's settings, overridden by the arguments that are not None.

    Args:
      preset_name: a name from `PRESETS`.
      platform: the platform of the devices ("cpu", "gpu"). On the CPU the default dtype is float32, because only some
        CPUs have bfloat16 products. (One that has them, an EPYC with AVX512-BF16, took 0.7 of the time with bfloat16.)
      data, tokenizer, vocab_size, dtype, backend, remat, scan: see `TrainingConfig` and `ModelConfig`.
      **overrides: other fields of `TrainingConfig`.

    Raises:
      InputError: the preset is unknown, or a value is out of range.
    """
    base = preset(preset_name)
    tokenizer = tokenizer or base.tokenizer
    if tokenizer == "bytes":
        if vocab_size is not None:
            raise InputError(
                f"train: --vocab-size needs --tokenizer bpe, as a byte vocabulary has 256 entries; got {vocab_size}."
            )
        vocab_size = 256
    elif vocab_size is None:
        vocab_size = base.model.vocab_size if base.tokenizer == "bpe" else _SMALL_BPE_VOCAB
    model = dataclasses.replace(
        base.model,
        vocab_size=vocab_size,
        dtype=dtype or ("float32" if platform == "cpu" else base.model.dtype),
        backend=backend,
        remat=base.model.remat if remat is None else remat,
        scan=base.model.scan if scan is None else scan,
    )
    values: dict[str, Any] = dict(
        steps=base.steps,
        batch_size=base.batch_size,
        sequence_length=base.sequence_length,
        learning_rate=base.learning_rate,
        optimizer=base.optimizer,
    )
    values |= {name: value for name, value in overrides.items() if value is not None}
    values.setdefault("eval_every", max(values["steps"] // 10, 1))
    values.setdefault("checkpoint_every", max(values["steps"] // 4, 1))
    return TrainingConfig(preset=preset_name, model=model, tokenizer=tokenizer, data=data, **values)
