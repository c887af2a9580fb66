"""A counter of work items in global memory."""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

__all__ = ["count_up"]


def count_up(counter: Any, before: Any) -> None:
    """Adds 1 to a counter in global memory, and writes its old value to shared memory."""
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    inline(_count_up)(counter, before)


def _count_up(ctx: Any, counter: Any, before: Any) -> None:
    """`count_up` in MLIR: one thread increments, and the warpgroup waits for it."""
    del ctx
    one = mgpu.c(1, ir.IntegerType.get_signless(32))
    with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
        # The counter orders no other accesses, so it can be relaxed.
        relaxed: Any = dict(ordering=llvm.AtomicOrdering.monotonic, syncscope="device")
        memref.store(llvm.atomicrmw(llvm.AtomicBinOp.add, memref_ptr(counter), one, **relaxed), before, [])
    mgpu.warpgroup_barrier()
