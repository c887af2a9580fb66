"""A Flax transformer that runs on jaxkernels, its training, and attention functions for Flax's own layers.

- `jaxkernels.models.attention`: `attention_fn` for `nnx.MultiHeadAttention` and Linen's counterpart.
- `jaxkernels.models.transformer`: the model; `config`: its sizes, and presets.
- `jaxkernels.models.training`: `train` and `resume`; `sampling`: text from a trained model.
"""
