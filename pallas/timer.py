"""A kernel that reads the clock of a GPU, to time what is between two of its launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref

__all__ = ["reader", "wait_and_read"]

#: Returns the clock's low 32 bits, at least $1 nanoseconds after the start.
_WAIT_AND_READ = """{
.reg .u64 now, end;
.reg .pred early;
cvt.u64.u32 end, $1;
mov.u64 now, %globaltimer;
add.u64 end, end, now;
AGAIN:
mov.u64 now, %globaltimer;
setp.lt.u64 early, now, end;
@early bra AGAIN;
cvt.u32.u64 $0, now;
}"""


def reader(device: Any) -> Callable[[int], jax.Array]:
    """`wait_and_read` on a device, for a number of nanoseconds."""
    operand = functools.cache(lambda nanoseconds: jax.device_put(np.array([nanoseconds], np.int32), device))
    return lambda nanoseconds: wait_and_read(operand(nanoseconds))


@jax.jit
def wait_and_read(nanoseconds: jax.Array) -> jax.Array:
    """Waits on the device, then reads its clock.

    Args:
      nanoseconds: int32 [1]. The kernel waits for so long.

    Returns:
      int32 [1]: nanoseconds, modulo 2**32.
    """
    return plgpu.kernel(read_clock, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))(nanoseconds)


def read_clock(nanoseconds: Any, out: Any) -> None:
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    inline(_wait_and_read)(nanoseconds, out)


def _wait_and_read(ctx: Any, nanoseconds: Any, out: Any) -> None:
    del ctx
    first = [mgpu.c(0, ir.IndexType.get())]
    with mgpu.single_thread(mgpu.ThreadSubset.BLOCK):
        i32 = ir.IntegerType.get_signless(32)
        wait = memref.load(nanoseconds, first)
        now = utils.inline_ptx(_WAIT_AND_READ, wait, result_types=i32, has_side_effects=True)
        memref.store(now, out, first)
