"""Backend "cudnn": cuDNN's fused attention, which XLA runs for a custom call of its own.

`jax.nn.dot_product_attention(implementation="cudnn")` makes the same custom calls. The backend makes them itself,
because that function gives no backward pass by itself, and checks the GPU of this machine instead of the target.

`TARGETS` are the names of the custom calls. `jax.export` takes a program with one only if the check is disabled:

    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jaxkernels.cudnn.TARGETS]
    jax.export.export(f, platforms=["cuda"], disabled_checks=allowed)
"""

from jaxkernels.cudnn.calls import TARGETS

__all__ = ["TARGETS"]
