"""The interpreter the Pallas kernels are tested in: it computes what a Hopper GPU would, and sees planted bugs."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpret import RaceError, interpret, patches
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

F16, BF16, F32, I32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32
HALF = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])


def normal(seed: int, shape: tuple[int, ...], dtype=F32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def product(a: jax.Array, b: jax.Array) -> np.ndarray:
    """a @ b in float32, as the tensor core computes it from 16-bit operands."""
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32)


def run(kernel, *args, **settings):
    """Calls a kernel in the interpreter, and returns NumPy arrays."""
    with interpret(**settings):
        return jax.tree.map(np.asarray, kernel(*args))


def assert_close(actual, expected, dtype=F32) -> None:
    tolerance = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), tolerance, tolerance)


# Matrix products.


@HALF
@pytest.mark.parametrize("a_in_registers", [False, True], ids=["a_smem", "a_regs"])
@pytest.mark.parametrize("transposed", [False, True], ids=["kn", "nk"])
def test_wgmma(dtype, a_in_registers, transposed):
    a, b = normal(0, (64, 128), dtype), normal(1, (48, 128) if transposed else (128, 48), dtype)

    @functools.partial(
        plgpu.kernel,
        out_type=jax.ShapeDtypeStruct((64, 48), F32),
        scratch_types=dict(
            a_smem=plgpu.SMEM(a.shape, dtype), b_smem=plgpu.SMEM(b.shape, dtype), full=plgpu.Barrier(num_arrivals=2)
        ),
    )
    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, full):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, full)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, full)
        plgpu.barrier_wait(full)

        def compute(acc):
            lhs = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA) if a_in_registers else a_smem
            plgpu.wgmma(acc, lhs, b_smem.transpose((1, 0)) if transposed else b_smem)
            return acc[...]

        out_gmem[...] = pl.run_scoped(compute, plgpu.ACC((64, 48), F32))

    assert_close(run(kernel, a, b), product(a, b.T if transposed else b))


@HALF
def test_accumulators_are_initialised_stored_and_carried(dtype):
    """run_state gives the final values; stores start anew; a half of an accumulator can be added to."""
    a, b, c = normal(0, (64, 64), dtype), normal(1, (64, 64), dtype), normal(2, (64, 64))

    @functools.partial(
        plgpu.kernel,
        out_type=[jax.ShapeDtypeStruct((64, 64), F32)] * 2,
        scratch_types=dict(
            a_smem=plgpu.SMEM(a.shape, dtype), b_smem=plgpu.SMEM(b.shape, dtype), full=plgpu.Barrier(num_arrivals=2)
        ),
    )
    def kernel(a_gmem, b_gmem, c_gmem, initialised_gmem, stored_gmem, a_smem, b_smem, full):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, full)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, full)
        plgpu.barrier_wait(full)
        c = plgpu.layout_cast(c_gmem[...], plgpu.Layout.WGMMA)
        a_regs = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA)

        def add_product(acc):
            plgpu.wgmma(acc, a_regs, b_smem)
            plgpu.wgmma(acc.at[:, 32:], a_smem, b_smem.at[:, 32:])

        initialised_gmem[...] = pl.run_state(add_product)(plgpu.ACC.init(c))

        def store(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)
            acc[...] = c
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        stored_gmem[...] = pl.run_scoped(store, plgpu.ACC((64, 64), F32))

    initialised, stored = run(kernel, a, b, c)
    assert_close(initialised, c + product(a, b) * np.where(np.arange(64) < 32, 1, 2))
    assert_close(stored, c + product(a, b))


# Pipelines.


def pipelined_matmul(
    m: int,
    n: int,
    k: int,
    dtype,
    *,
    cluster: int = 1,
    manual: bool = False,
    delay_release: int = 0,
    num_k_tiles=None,
    num_waits_short: int = 0,
):
    """Two compute warpgroups side by side along n, blocks of the cluster along m, which share the right operand.

    Args:
      manual: arrive at the consumed barriers in the body.
      num_k_tiles: a traced number of tiles to add up, from the last operand; None for all of them.
      num_waits_short: planted bug: the number of wgmmas left in flight when a slot is released.
    """
    tile = 64

    def body(a_gmem, b_gmem, num_gmem, out_gmem, out_smem):
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("block")
        row = pl.ds((lax.axis_index("m") * cluster + block) * tile, tile)
        mine = pl.ds(warpgroup * tile, tile)

        def compute(pipeline):
            def scope(acc):
                pipeline(acc)
                out_smem[:, mine] = acc[...].astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[:, mine], out_gmem.at[row, mine])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(scope, plgpu.ACC((tile, tile), F32))

        def step(_, a_smem, b_smem, *rest):
            *consumed, acc = rest
            plgpu.wgmma(acc, a_smem, b_smem.at[:, mine])
            plgpu.wgmma_wait(delay_release + num_waits_short)
            for barrier in consumed:
                plgpu.barrier_arrive(barrier)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // tile if num_k_tiles is None else num_gmem[0],),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((tile, tile), lambda i: (0, i), delay_release=delay_release),
                plgpu.BlockSpec(
                    (tile, 2 * tile),
                    lambda i: (i, 0),
                    delay_release=delay_release,
                    collective_axes=("block",) if cluster > 1 else (),
                ),
            ],
            wg_axis="wg",
            num_compute_wgs=2,
            max_concurrent_steps=2,
            manual_consumed_barriers=manual,
            compute_context=compute,
        )(a_gmem.at[row], b_gmem)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        grid=(m // tile // cluster,),
        grid_names=("m",),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=dict(out_smem=plgpu.SMEM((tile, 2 * tile), dtype)),
    )
    return lambda a, b: kernel(a, b, jnp.array([num_k_tiles or 0], I32))


PIPELINES = {
    "plain": dict(),
    "manual": dict(manual=True),
    "delayed": dict(delay_release=1),
    "dynamic": dict(num_k_tiles=3),
    "multicast": dict(cluster=2),
    "multicast_delayed": dict(cluster=2, delay_release=1),
}


@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES.keys())
def test_warp_specialized_pipeline(options):
    a, b = normal(0, (128, 256), BF16), normal(1, (256, 128), BF16)
    out = run(pipelined_matmul(128, 128, 256, BF16, **options), a, b)
    k = 64 * options.get("num_k_tiles", 4)
    assert_close(out, product(a[:, :k], b[:k]), BF16)


@pytest.mark.parametrize(
    "options", [dict(), dict(cluster=2), dict(delay_release=1)], ids=["plain", "multicast", "delayed"]
)
def test_slot_released_before_its_wgmma_is_waited_for(options):
    a, b = normal(0, (128, 256), BF16), normal(1, (256, 128), BF16)
    kernel = pipelined_matmul(128, 128, 256, BF16, num_waits_short=1, **options)
    with pytest.raises(RaceError, match=r"RACE: write of SMEM .*\n.*earlier read of SMEM"):
        run(kernel, a, b)


def accumulating_pipeline(fault: str | None):
    """emit_pipeline over a 2-D grid, whose slots are released one step late, under at most one wgmma."""
    a, b = normal(0, (2, 64, 128), F16), normal(1, (2, 128, 64), F16)

    def body(a_gmem, b_gmem, out_gmem):
        def scope(acc):
            def step(indices, a_smem, b_smem):
                plgpu.wgmma(acc, a_smem, b_smem)
                if fault is None:
                    plgpu.wgmma_wait(1)

            plgpu.emit_pipeline(
                step,
                grid=(2, 2),
                in_specs=[
                    plgpu.BlockSpec((None, 64, 64), lambda g, k: (g, 0, k), delay_release=1),
                    plgpu.BlockSpec((None, 64, 64), lambda g, k: (g, k, 0), delay_release=1),
                ],
                max_concurrent_steps=2,
            )(a_gmem, b_gmem)
            return acc[...]

        out_gmem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

    return lambda: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), F32))(a, b), product(a, b).sum(0)


@HALF
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_pipeline_with_outputs(dtype, is_dynamic):
    """Two outputs in one group of stores, and one block that is stored after the last step."""
    x, y = normal(0, (192, 128), dtype), normal(1, (192, 128), dtype)
    grid = (3, 2)

    def body(x_gmem, y_gmem, grid_gmem, sum_gmem, double_gmem, last_gmem):
        def step(indices, x_smem, y_smem, sum_smem, double_smem, last_smem):
            sum_smem[...] = x_smem[...] + y_smem[...]
            double_smem[...] = x_smem[...] * 2
            last_smem[...] = x_smem[...]

        plgpu.emit_pipeline(
            step,
            grid=tuple(grid_gmem[i] for i in range(2)) if is_dynamic else grid,
            in_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, j))] * 2,
            out_specs=[
                *[plgpu.BlockSpec((64, 64), lambda i, j: (i, j))] * 2,
                plgpu.BlockSpec((64, 64), lambda i, j: (0, 0)),
            ],
            max_concurrent_steps=2,
        )(x_gmem, y_gmem, sum_gmem, double_gmem, last_gmem)

    out_type = [jax.ShapeDtypeStruct(x.shape, dtype)] * 2 + [jax.ShapeDtypeStruct((64, 64), dtype)]
    total, double, last = run(plgpu.kernel(body, out_type=out_type), x, y, jnp.array(grid, I32))
    assert_close(total, x + y, dtype)
    assert_close(double, 2 * x, dtype)
    assert_close(last, x[128:, 64:], dtype)


def test_pipeline_that_stores_a_block_twice():
    """emit_pipeline stores a block that stays the same over several steps after the first and after the last one."""
    x = normal(0, (64, 128), F16)

    def body(x_gmem, out_gmem):
        def step(indices, x_smem, out_smem):
            out_smem[...] = x_smem[...]

        plgpu.emit_pipeline(
            step,
            grid=(1, 2),
            in_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, j))],
            out_specs=[plgpu.BlockSpec((64, 64), lambda i, j: (i, 0))],
            max_concurrent_steps=2,
        )(x_gmem, out_gmem)

    with pytest.raises(RaceError, match=r"write of GMEM .* copy_smem_to_gmem in copy_out"):
        run(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64), F16)), x)


# Copies by the Tensor Memory Accelerator.


@HALF
def test_tiles_at_the_border(dtype):
    """Loads are filled with zeros and stores are clipped, even if the tile is larger than the array."""

    def body(x_gmem, loaded_gmem, copy_gmem, tile_smem, full):
        i, j = lax.axis_index("i"), lax.axis_index("j")
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * 64, 64), pl.ds(j * 128, 128)], tile_smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile_smem, loaded_gmem.at[i, j])
        plgpu.copy_smem_to_gmem(tile_smem, copy_gmem.at[pl.ds(i * 64, 64), pl.ds(j * 128, 128)])
        plgpu.wait_smem_to_gmem(0)

    for shape in ((100, 200), (40, 72)):
        x = normal(0, shape, dtype)
        grid = tuple(-(-size // tile) for size, tile in zip(shape, (64, 128)))
        kernel = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct((*grid, 64, 128), dtype), jax.ShapeDtypeStruct(shape, dtype)],
            grid=grid,
            grid_names=("i", "j"),
            scratch_types=dict(tile_smem=plgpu.SMEM((64, 128), dtype), full=plgpu.Barrier()),
        )
        loaded, copy = run(kernel, x)
        padded = np.pad(x, [(0, g * t - s) for g, t, s in zip(grid, (64, 128), shape)])
        np.testing.assert_array_equal(np.block([list(row) for row in loaded]), padded)
        np.testing.assert_array_equal(copy, x)


def test_broken_promise_to_stay_in_bounds():
    def body(x_gmem, out_gmem, tile_smem, full):
        at = pl.ds(lax.axis_index("i") * 64, 64)
        plgpu.copy_gmem_to_smem(x_gmem.at[at], tile_smem, full, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        plgpu.barrier_wait(full)
        out_gmem[lax.axis_index("i")] = tile_smem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64), F32),
        grid=(2,),
        grid_names=("i",),
        scratch_types=dict(tile_smem=plgpu.SMEM((64,), F32), full=plgpu.Barrier()),
    )
    x = normal(0, (128,))
    np.testing.assert_array_equal(run(kernel, x), x.reshape(2, 64))
    with pytest.raises(IndexError, match=r"of an array of shape \(100,\), and promised not to"):
        run(kernel, x[:100])


def test_start_before_the_array_is_refused():
    def body(x_gmem, out_gmem):
        out_gmem[...] = x_gmem[pl.ds(lax.axis_index("i") - 32, 64)]

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64,), F32), grid=(1,), grid_names=("i",))
    with pytest.raises(IndexError, match="starts before the array"):
        run(kernel, normal(0, (128,)))


def test_store_over_the_end_of_a_row_is_refused():
    """Mosaic GPU stores a contiguous slice as one run of bytes: clipped at the end of the array, not of the row."""

    def body(x_gmem, out_gmem, tile_smem, full):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        tile = (row, pl.ds(column * 64, 64))
        plgpu.copy_gmem_to_smem(x_gmem.at[tile], tile_smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[tile])
        plgpu.wait_smem_to_gmem(0)

    def copy(x):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, F32),
            grid=(x.shape[0], 2),
            grid_names=("row", "column"),
            scratch_types=dict(tile_smem=plgpu.SMEM((64,), F32), full=plgpu.Barrier()),
        )(x)

    one_row = normal(0, (1, 100))
    np.testing.assert_array_equal(run(copy, one_row), one_row)
    with pytest.raises(IndexError, match="is not clipped at the end of dimension 1"):
        run(copy, normal(0, (3, 100)))


def test_store_beyond_a_single_tile_of_columns_is_refused():
    """Mosaic GPU drops a dimension of one tile from the copy, and with it the index that lies outside."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_gmem, out_gmem, tile_smem, full):
        plgpu.copy_gmem_to_smem(x_gmem, tile_smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[:, pl.ds(lax.axis_index("column") * 64, 64)])
        plgpu.wait_smem_to_gmem(0)

    def copies(x, columns):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((64, columns), BF16),
            grid=(2,),
            grid_names=("column",),
            scratch_types=dict(tile_smem=plgpu.SMEM((64, 64), BF16, transforms=transforms), full=plgpu.Barrier()),
        )(x)

    x = normal(0, (64, 64), BF16)
    np.testing.assert_array_equal(run(copies, x, 128), np.tile(x, (1, 2)))
    with pytest.raises(IndexError, match="a single tile of columns"):
        run(copies, x, 64)


@HALF
@pytest.mark.parametrize("op", ["add", "min", "max"])
def test_reducing_stores(op, dtype):
    """Blocks reduce into one tile, in no order; every other block's store is switched off."""
    x, start = normal(0, (6, 64, 64), dtype), normal(1, (64, 64), dtype)

    def body(x_gmem, out_gmem, tile_smem, full):
        i = lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x_gmem.at[i], tile_smem, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile_smem, out_gmem, i % 2 == 0, reduction_op=op)
        plgpu.wait_smem_to_gmem(0)

    def reduce(x, start):
        out = jax.new_ref(start)
        plgpu.kernel(
            body,
            grid=(6,),
            grid_names=("i",),
            scratch_types=dict(tile_smem=plgpu.SMEM((64, 64), dtype), full=plgpu.Barrier()),
        )(x, out)
        return out[...]

    operation = {"add": jnp.add, "min": jnp.minimum, "max": jnp.maximum}[op]
    expected = functools.reduce(operation, np.asarray(x, np.float32)[::2], np.asarray(start, np.float32))
    assert_close(run(reduce, x, start), expected, dtype)


# Everything else a kernel is made of.


@HALF
def test_arithmetic_of_a_softmax(dtype):
    """Layouts, masks from indices, reductions, approximate functions, barriers of the optimizer, conditionals."""
    x = normal(0, (64, 64), dtype)

    def body(x_gmem, out_gmem, x_smem, full):
        plgpu.set_max_registers(40, action="decrease")
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, full)
        plgpu.barrier_wait(full)
        x = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(F32)
        x = 5 * jnp.tanh(x / 5)
        rows, columns = (plgpu.broadcasted_iota(I32, x.shape, d, layout=plgpu.Layout.WGMMA) for d in range(2))
        x = lax.cond(lax.axis_index("causal") == 1, lambda: jnp.where(columns <= rows, x, -jnp.inf), lambda: x)
        row_max = plgpu.layout_cast(x.max(axis=1), plgpu.Layout.WGMMA.reduce(1))
        p = jnp.exp2((x - lax.broadcast_in_dim(row_max, x.shape, [0])) * np.log2(np.e))
        p, row_sum = lax.optimization_barrier((p, p.sum(axis=1)))
        out = p / lax.broadcast_in_dim(row_sum, x.shape, [0]) + jnp.log2(lax.broadcast_in_dim(row_sum, x.shape, [0]))
        out_gmem[lax.axis_index("causal")] = out

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64, 64), F32),
        grid=(2,),
        grid_names=("causal",),
        scratch_types=dict(x_smem=plgpu.SMEM((64, 64), dtype), full=plgpu.Barrier()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out = run(kernel, x)
    capped = 5 * np.tanh(np.asarray(x, np.float32) / 5)
    for i, logits in enumerate((capped, np.where(np.tri(64, dtype=bool), capped, -np.inf))):
        row_sum = np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)
        assert_close(out[i], jax.nn.softmax(logits, axis=1) + np.log2(row_sum))


def test_inline_mgpu_is_emulated_by_name():
    layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((128,), F32, layout=layout))
    def cube(ctx, x):
        raise AssertionError("builds MLIR: runs only where the kernel is lowered for CUDA")

    def body(x_gmem, out_gmem):
        out_gmem[...] = cube(plgpu.load(x_gmem, layout=layout, optimized=False))

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), F32))
    x = normal(0, (128,))
    assert_close(run(kernel, x, emulations={"cube": lambda x: x * x * x}), x**3)
    with pytest.raises(NotImplementedError, match=r"pass emulations=\{'cube': function\}"):
        run(kernel, x)


def test_last_completion_of_a_barrier_need_not_be_waited_for():
    def body(x_gmem, out_gmem, both):
        warpgroup = lax.axis_index("wg")
        out_gmem[warpgroup] = x_gmem[...]
        for i in range(2):
            plgpu.barrier_arrive(both)
            pl.when((i == 0) | (warpgroup == 0))(lambda: plgpu.barrier_wait(both))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 128), F32),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(both=plgpu.Barrier(num_arrivals=2)),
    )
    x = normal(0, (128,))
    np.testing.assert_array_equal(run(kernel, x), [x, x])


# Planted bugs. Without its fault a kernel is correct. With the fault it is refused, even if its values are correct.


def ring(fault: str | None):
    """One warpgroup loads tiles into a ring of two slots, the other multiplies them."""
    a, b = normal(0, (5, 64, 64), F16), normal(1, (5, 64, 64), F16)

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, full, empty):
        def produce():
            @pl.loop(0, 5)
            def _(i):
                slot = lax.rem(i, 2)
                if fault != "no wait for an empty slot":
                    pl.when(i >= 2)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(a_gmem.at[i], a_smem.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[i], b_smem.at[slot], full.at[slot])

        def consume():
            def scope(acc):
                @pl.loop(0, 5)
                def _(i):
                    slot = lax.rem(i, 2)
                    if fault != "no wait for a full slot":
                        plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                    if fault != "slot released under wgmma":
                        plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                return acc[...]

            out_gmem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

        lax.cond(lax.axis_index("wg") == 0, produce, consume)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            a_smem=plgpu.SMEM((2, 64, 64), F16),
            b_smem=plgpu.SMEM((2, 64, 64), F16),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            empty=plgpu.Barrier(num_barriers=2),
        ),
    )
    return lambda: kernel(a, b), product(a, b).sum(0)


def staged(fault: str | None):
    """Scales two tiles through one buffer: load, change, store."""
    x = normal(0, (2, 64, 64), F16)

    def body(x_gmem, out_gmem, tile_smem, full):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x_gmem.at[i], tile_smem, full)
            if fault != "no wait before the read":
                plgpu.barrier_wait(full)
            tile_smem[...] = tile_smem[...] * 2
            if fault != "no commit_smem before the store":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[i], commit_group=fault != "store in no group")
            if (i == 0 and fault != "buffer reused under the store") or (i == 1 and fault != "no wait at the end"):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, F16),
        scratch_types=dict(tile_smem=plgpu.SMEM((64, 64), F16), full=plgpu.Barrier()),
    )
    return lambda: kernel(x), 2 * x


def grouped(fault: str | None):
    """Stores two tiles in one group, has an empty second group, and overwrites the first tile."""
    x = normal(0, (2, 64, 64), F16)

    def body(x_gmem, out_gmem, tile_smem):
        tile_smem[...] = x_gmem[...]
        plgpu.commit_smem()
        for i in range(2):
            plgpu.copy_smem_to_gmem(tile_smem.at[i], out_gmem.at[i], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        if fault is None:
            plgpu.copy_smem_to_gmem(tile_smem.at[0], out_gmem.at[0], lax.axis_index("i") > 0)
        # The wait leaves out the last group. Without the fault that group is empty.
        plgpu.wait_smem_to_gmem(1)
        tile_smem[0] = tile_smem[1]
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, F16),
        grid=(1,),
        grid_names=("i",),
        scratch_types=dict(tile_smem=plgpu.SMEM(x.shape, F16)),
    )
    return lambda: kernel(x), x


def tiles(fault: str | None):
    """Each block writes its tile; the faulty one writes the next block's too, after a different number of steps."""
    x = normal(0, (3, 64, 64))

    def body(x_gmem, out_gmem):
        i = lax.axis_index("i")
        out_gmem[i] = x_gmem[i]
        if fault:
            pl.when(i < 2)(lambda: out_gmem.__setitem__(i + 1, x_gmem[i + 1]))

    return lambda: plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, F32), grid=(3,), grid_names=("i",))(x), x


def multicast(fault: str | None):
    """Two blocks load two tiles together, one after the other into one buffer."""
    x = normal(0, (2, 64, 64))

    def body(x_gmem, out_gmem, tile_smem, full, empty):
        block = lax.axis_index("block")

        def load(i):
            plgpu.copy_gmem_to_smem(x_gmem.at[i], tile_smem, full, collective_axes="block")
            plgpu.barrier_wait(full)
            out_gmem[block, i] = tile_smem[...]
            if fault != "no cluster barrier":
                plgpu.barrier_arrive(empty)
                plgpu.barrier_wait(empty)

        load(0)
        if fault == "a block leaves early":
            pl.when(block == 0)(lambda: load(1))
        else:
            load(1)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 2, 64, 64), F32),
        cluster=(2,),
        cluster_names=("block",),
        scratch_types=dict(
            tile_smem=plgpu.SMEM((64, 64), F32),
            full=plgpu.Barrier(),
            empty=plgpu.ClusterBarrier(collective_axes=("block",)),
        ),
    )
    return lambda: kernel(x), np.stack([x, x])


def union(fault: str | None):
    """Two warpgroups write the same storage by two names, one after the other."""
    x = normal(0, (64, 64))

    def body(x_gmem, out_gmem, aliases, written, read):
        (f32_smem,), (f16_smem,) = aliases

        def first():
            f32_smem[...] = x_gmem[...]
            if fault != "read through the other name":
                out_gmem[0] = f32_smem[...]
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(read)
            if fault == "read through the other name":
                out_gmem[0] = f32_smem[...]

        def second():
            if fault != "written under a reader":
                plgpu.barrier_wait(written)
            f16_smem[...] = x_gmem[...].astype(F16)
            out_gmem[1] = f16_smem[...].astype(F32)
            plgpu.barrier_arrive(read)

        lax.cond(lax.axis_index("wg") == 0, first, second)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 64, 64), F32),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            aliases=plgpu.RefUnion((plgpu.SMEM((64, 64), F32),), (plgpu.SMEM((64, 64), F16),)),
            written=plgpu.Barrier(),
            read=plgpu.Barrier(),
        ),
    )
    return lambda: kernel(x), np.stack([x, x])


def accumulator(fault: str | None):
    """Reads an accumulator after waiting for the wgmma before the last one."""
    a = normal(0, (64, 64), F16)

    def body(a_gmem, out_gmem, a_smem, full):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, full)
        plgpu.barrier_wait(full)

        def scope(first, second):
            plgpu.wgmma(first, a_smem, a_smem)
            plgpu.wgmma(second, a_smem, a_smem)
            read = plgpu.wgmma_accumulator_load
            early = read(second if fault else first, wait_n=1)
            return early + read(first if fault else second, wait_n=0)

        out_gmem[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32), plgpu.ACC((64, 64), F32))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=dict(a_smem=plgpu.SMEM((64, 64), F16), full=plgpu.Barrier()),
    )
    return lambda: kernel(a), 2 * product(a, a)


def handshake(fault: str | None):
    """Two warpgroups wait for each other's arrival; the faulty one waits first."""
    x = normal(0, (128,))

    def body(x_gmem, out_gmem, arrived):
        warpgroup = lax.axis_index("wg")
        if fault:
            plgpu.barrier_wait(arrived.at[1 - warpgroup])
        plgpu.barrier_arrive(arrived.at[warpgroup])
        if not fault:
            plgpu.barrier_wait(arrived.at[1 - warpgroup])
        out_gmem[warpgroup] = x_gmem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 128), F32),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(arrived=plgpu.Barrier(num_barriers=2)),
    )
    return lambda: kernel(x), np.stack([x, x])


SMEM_RACE = r"RACE: (read|write) of SMEM"
#: (kernel, fault, exceptions, message). A thread that runs ahead may break a barrier rule before the race is seen.
FAULTS = [
    (ring, "no wait for a full slot", (RaceError, ValueError), SMEM_RACE + "|no threads observed phase 0"),
    (ring, "no wait for an empty slot", (RaceError, ValueError), SMEM_RACE + "|observe"),
    (ring, "slot released under wgmma", RaceError, r"RACE: write of SMEM .*\n.*earlier read of SMEM"),
    (staged, "no wait before the read", RaceError, r"RACE: read of SMEM .*\n.*earlier write of SMEM"),
    (staged, "no commit_smem before the store", RaceError, r"RACE: read of SMEM .*\n.*earlier write of SMEM"),
    (staged, "buffer reused under the store", RaceError, r"RACE: write of SMEM .*\n.*earlier read of SMEM"),
    (staged, "no wait at the end", ValueError, "before kernel finished"),
    (staged, "store in no group", (RaceError, ValueError), SMEM_RACE + "|in no commit group"),
    (grouped, "one wait too few", RaceError, r"RACE: write of SMEM .*\n.*earlier read of SMEM"),
    (accumulating_pipeline, "no wait in the body", RaceError, r"RACE: write of SMEM .*\n.*earlier read of SMEM"),
    (tiles, "tile of another block", RaceError, r"RACE: write of GMEM .*\n.*earlier write of GMEM"),
    (multicast, "no cluster barrier", RaceError, SMEM_RACE),
    (multicast, "a block leaves early", (ValueError, TimeoutError), "has left the scope|deadlock|arrivals pending"),
    (union, "written under a reader", RaceError, SMEM_RACE),
    (union, "read through the other name", RaceError, "reads through another alias group"),
    (accumulator, "read in flight", ValueError, "while a wgmma that adds to it is in flight"),
    (handshake, "deadlock", TimeoutError, r"deadlock: .* 0 of 1 arrivals .*test_interpret.py"),
]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("kernel", "fault", "error", "message"), FAULTS, ids=[f"{k.__name__}:{f}" for k, f, *_ in FAULTS]
)
def test_planted_bug(kernel, fault, error, message):
    call, expected = kernel(None)
    assert_close(run(call), expected, F16)
    call, _ = kernel(fault)
    start = time.monotonic()
    with pytest.raises(error, match=message):
        run(call, deadlock_after=1.0 if "deadlock" in message else 20.0)
    assert time.monotonic() - start < 10
    # The state of the interpreter is clean afterwards.
    call, expected = kernel(None)
    assert_close(run(call), expected, F16)


# The harness itself.


def test_races_of_every_kernel_are_reported():
    """Also the races of kernels before the last one."""
    racy, (right, expected) = tiles("tile of another block")[0], staged(None)
    with pytest.raises(RaceError, match=r"RACE: write of GMEM"):
        run(lambda: (racy(), right()))
    assert_close(run(right), expected, F16)


def test_races_are_noted_on_other_failures():
    def compare():
        jax.block_until_ready(tiles("tile of another block")[0]())
        raise AssertionError("values differ")

    with pytest.raises(AssertionError, match="values differ") as failure:
        run(compare)
    assert any(note.startswith("RACE: write of GMEM") for note in failure.value.__notes__)


def test_callbacks_of_others_are_left_alone():
    def double(x):
        assert isinstance(x, jax.Array)
        return 2 * np.asarray(x)

    x = normal(0, (8,))
    with interpret():
        out = jax.jit(lambda x: jax.experimental.io_callback(double, jax.typeof(x), x))(x)
        assert_close(out, 2 * x)


def test_unknown_jax_is_refused(monkeypatch):
    patches.check_jax()
    monkeypatch.delattr(gpu_callbacks, "_clip_store_to_shape")
    monkeypatch.setattr(jaxpr_interpret, "resolve_ref", lambda aval, ref: ref)
    with pytest.raises(RuntimeError) as failure:
        patches.check_jax()
    message = str(failure.value)
    assert f"jax {jax.__version__} differs" in message
    assert "_clip_store_to_shape: expected (access val shape), found (nothing)" in message
    assert "resolve_ref: expected (aval allocation_key_as_array transforms), found (aval ref)" in message


def test_limits_are_stated(meshes):
    def kernel(**mesh):
        body = lambda x_gmem, out_gmem: out_gmem.__setitem__(..., x_gmem[...])
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), F32), **mesh)

    x = normal(0, (128,))
    mesh = dict(num_threads=4, thread_name="wg", cluster=(8,), cluster_names=("block",))
    with pytest.raises(NotImplementedError, match="at most 31 warpgroups a cluster; got 1 and 32"):
        run(kernel(**mesh), x)
    spec = jax.sharding.PartitionSpec()
    with pytest.raises(NotImplementedError, match=r"runs one device and .*; got 8 and 1"):
        run(jax.shard_map(kernel(), mesh=meshes.auto, in_specs=spec, out_specs=spec, check_vma=False), x)
