"""FlashAttention forward on Hopper tensor cores, in Pallas Mosaic GPU.

Algorithm. A persistent grid walks work items: two times `block_q` queries of one head of one batch element. A
producer warpgroup streams their queries, and blocks of keys and values, through rings of shared memory slots that
never stop: it is already loading the next item while this one is finished. Two consumer warpgroups take half of the
queries each, and keep the running maximum m, sum l and output O in registers (online softmax, base-2 exponentials
with the scale folded in). For a block of keys K_j and of values V_j:

    S = Q K_j^T        wgmma, fp32 accumulators
    m' = max(m, rowmax(c S)), P_j = exp2(c S - m'), l = exp2(m - m') l + rowsum(P_j)
    O = exp2(m - m') O + P_j V_j      wgmma with P in registers: S's layout is P's operand layout

Of one consumer the products of two blocks are in flight at once, and its softmax runs beside the older one's
(`overlap`); of two consumers, one issues its products while the other is in its softmax (`ping_pong`):

    consumer 0   softmax 0 | Q K_1  P_0 V_0 .            | Q K_2  P_1 V_1 .            |
                           |         . softmax 1 ....... |         . softmax 2 ....... |
    consumer 1         softmax 0 ...... | Q K_1  P_0 V_0 .            | Q K_2  P_1 V_1 .
                                        |         . softmax 1 ....... |         . softmax 2

The item's last P V is in flight together with the next item's first Q K^T (`bridge`). Results leave through staging
buffers by TMA, which nobody waits for before the next item's results.

With a causal mask, blocks beyond the diagonal are neither loaded nor visited. Blocks are walked from the last one back:
those that the mask touches come first, and only these are masked. Items come in strips of heads whose keys and values
stay in L2, the longest of a strip first; the CTA with the first item of one round gets the last of the next.
Head dimensions are padded to multiples of 64 by XLA, lengths to multiples of 8; beyond these TMA reads zeros and drops
what it would write.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.pallas.attention_blocks import (
    FLOPS_PER_SM,
    LAUNCH_SECONDS,
    NUM_CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    TILE,
    TRANSFORMS,
    hide_unseen,
    key_iters,
    pad_heads,
    padded_head_dims,
    query_offset,
    unsupported,
    visible_pairs,
)
from jaxkernels.specs import AttentionSpec

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 2

#: Registers of a consumer's thread, and of these for accumulators, logits and probabilities.
_CONSUMER_REGISTERS = 240
_MAX_TILE_REGISTERS = 200
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most.
_BARRIER_BYTES = 1024
#: Outputs are staged in shared memory and sent out in pieces of this many columns, one swizzle span.
_STORE_COLUMNS = 64
#: Keys and values of the heads that are walked together: half of an H200's L2.
_STRIP_BYTES = 25e6

# The search space: what is tried along each knob, the usual setting first.
_BLOCK_QS = (64, 128)
_BLOCK_KVS = (128, 64, 192)
_STAGES = (2, 3, 4, 1)
#: One step's wait for the other consumer's turn: 128 keys at head dimension 128 take 1.7 us on an H200 (637 TFLOP/s),
#: 1.35 us of which are the products.
_TURN_SECONDS = 0.4e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_q: queries of one consumer warpgroup.
      block_kv: keys and values of one pipeline step.
      num_stages: slots of the key ring and of the value ring.
      num_q_slots: items whose queries are in shared memory: with one, the next item's are loaded once this one's last
        logits are computed.
      persistent: whether a CTA for each SM takes items in turn; else there is one for each item.
      overlap: whether a consumer's softmax runs beside its own products with the values before.
      bridge: whether an item's first logits are computed together with the last output of the item before.
      ping_pong: whether the consumers take turns at the tensor cores.
      strip: heads that are walked together; 0: as many as L2 holds the keys and values of.
    """

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2
    num_q_slots: int = 1
    persistent: bool = True
    overlap: bool = True
    bridge: bool = True
    ping_pong: bool = True
    strip: int = 0

    def __post_init__(self) -> None:
        if self.block_q % 64 or self.block_kv % 64 or self.num_stages < 1:
            raise ValueError(
                "attention_forward[pallas]: block_q and block_kv must be multiples of 64 and num_stages at least 1; "
                f"got {self}."
            )
        if self.overlap and self.num_stages < 2:
            raise ValueError(
                "attention_forward[pallas]: overlap waits for values while others are in use, and needs at least 2 for "
                f"num_stages; got {self}."
            )
        if self.num_q_slots < 1 or self.strip < 0:
            raise ValueError(
                f"attention_forward[pallas]: num_q_slots must be at least 1 and strip not negative; got {self}."
            )


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    # Two stages of 128 keys fill shared memory at head dimension 128; at 256 the blocks must halve.
    return (Config(block_kv=128 if max(spec.q.shape[3], spec.v.shape[3]) <= 128 else 64),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the blocks whose tiles fit the registers and whose rings fit shared memory.

    A single slot, which nothing can be loaded beside, only where two do not fit.
    Blocks of 128 queries only where there are more than 128, of 192 keys only where there are more than 128.
    """
    _, value_dim = padded_head_dims(spec)
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    for block_q, block_kv in itertools.product(_BLOCK_QS, _BLOCK_KVS):
        # The output and the logits in float32, the probabilities in 16 bits, over the 128 threads of a consumer.
        registers = block_q * (value_dim + block_kv * 3 // 2) // 128
        wasteful = (block_q > 64 and num_queries <= 128) or (block_kv > 128 and num_keys <= 128)
        if registers > _MAX_TILE_REGISTERS or wasteful:
            continue
        rings = [Config(block_q, block_kv, n, overlap=n > 1) for n in _STAGES]
        fits = [config for config in rings if _num_store_slots(spec, config) > 0]
        yield from [config for config in fits if config.num_stages > 1] or fits


def _smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Queries, the rings, logsumexps and barriers, and one piece of each consumer's output."""
    head_dim, value_dim = padded_head_dims(spec)
    rows = NUM_CONSUMERS * config.block_q
    slot = 2 * config.block_kv * (head_dim + value_dim)
    return (
        rows * (2 * head_dim * config.num_q_slots + 2 * _STORE_COLUMNS + 4) + config.num_stages * slot + _BARRIER_BYTES
    )


def _num_store_slots(spec: AttentionSpec, config: Config) -> int:
    """Pieces of a consumer's output that shared memory has room for, beside the rings; all of them at most."""
    piece = 2 * NUM_CONSUMERS * config.block_q * _STORE_COLUMNS
    room = spec.target.smem_bytes - (_smem_bytes(spec, config) - piece)
    return min(room // piece, padded_head_dims(spec)[1] // _STORE_COLUMNS)


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Steps of all CTAs over the SMs, or the longest CTA's; the products of a step, and waiting for the turn."""
    batch, num_queries, num_heads, _ = spec.q.shape
    rows = NUM_CONSUMERS * config.block_q
    ctas = batch * num_heads * pl.cdiv(num_queries, rows)
    longest = pl.cdiv(spec.k.shape[1], config.block_kv)
    step = 2 * rows * config.block_kv * sum(padded_head_dims(spec)) / FLOPS_PER_SM + _TURN_SECONDS
    if config.num_stages == 1:
        step += _TURN_SECONDS  # Nor is anything loaded beside it.
    # With a mask, half a step more than the visible share: blocks on the diagonal are visited whole.
    average = min(longest, longest * visible_pairs(spec) + (0.5 if spec.causal else 0.0))
    steps = (
        max(longest, average * ctas / spec.target.num_sms)
        if spec.causal
        else (longest * pl.cdiv(ctas, spec.target.num_sms))
    )
    return LAUNCH_SECONDS * max(1.0, ctas / spec.target.num_sms) + steps * step


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array):
    """Returns [out, lse]."""
    num_queries, head_dim = q.shape[1], v.shape[3]
    q, k, v = pad_heads(q), pad_heads(k), pad_heads(v)
    batch, _, num_heads, _ = q.shape
    rows = NUM_CONSUMERS * config.block_q
    num_q_blocks = pl.cdiv(num_queries, rows)
    num_items = batch * num_heads * num_q_blocks
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config),
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype),
            # Whole blocks: Mosaic clips a store of contiguous bytes at the end of the array, not of the row.
            jax.ShapeDtypeStruct((batch, num_heads, num_q_blocks * rows), jnp.float32),
        ],
        grid=(min(num_items, spec.target.num_sms) if config.persistent else num_items,),
        grid_names=("cta",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Rows are reduced among the four threads that hold them.
            reduction_scratch_bytes=0,
            # Warpgroups write staging buffers only: a barrier follows in `commit_smem`, one comes before in the wait.
            unsafe_no_auto_barriers=True,
        ),
    )
    out, lse = kernel(q, k, v, *(x.reshape(1) for x in extras))
    return [out[:, :num_queries, :, :head_dim], jnp.swapaxes(lse[:, :, :num_queries], 1, 2)]


@dataclasses.dataclass(frozen=True)
class _Item:
    """A work item: queries from `q_base` on of a head, and the `num_blocks` blocks of keys that they see any of."""

    batch: Any
    head: Any
    q_base: Any
    num_blocks: Any


class _Schedule:
    """Which items a CTA works on, in order."""

    def __init__(self, spec: AttentionSpec, config: Config, offset: Any):
        batch, num_queries, self.num_heads, _ = spec.q.shape
        self.spec, self.block_kv, self.offset = spec, config.block_kv, offset
        self.rows = NUM_CONSUMERS * config.block_q
        self.num_q_blocks = pl.cdiv(num_queries, self.rows)
        self.heads = batch * self.num_heads
        self.strip = min(config.strip or _default_strip(spec), self.heads)
        self.cta, self.num_ctas = lax.axis_index("cta"), lax.axis_size("cta")

    def num_items(self) -> Any:
        """How many items this CTA has. Not an attribute: each warpgroup computes it, or a register waits for it."""
        num_rounds, rest = divmod(self.heads * self.num_q_blocks, self.num_ctas)
        return num_rounds + (self._turn(num_rounds) < rest).astype(jnp.int32) if rest else num_rounds

    def _turn(self, nth: Any) -> Any:
        """This CTA's place among those that take their nth items: the last to begin one round begins the next."""
        if isinstance(nth, int):
            return self.num_ctas - 1 - self.cta if nth % 2 else self.cta
        return jnp.where(lax.rem(nth, jnp.int32(2)) == 1, self.num_ctas - 1 - self.cta, self.cta)

    def __getitem__(self, nth: Any) -> _Item:
        div, rem = (lambda a, b: lax.div(a, jnp.int32(b))), (lambda a, b: lax.rem(a, jnp.int32(b)))
        i = nth * self.num_ctas + self._turn(nth)
        strip, i = div(i, self.strip * self.num_q_blocks), rem(i, self.strip * self.num_q_blocks)
        first = strip * self.strip
        width = self.strip if self.heads % self.strip == 0 else jnp.minimum(self.strip, self.heads - first)
        head, q_block = first + rem(i, width), div(i, width)
        if self.spec.causal:  # The last queries see the most keys.
            q_block = self.num_q_blocks - 1 - q_block
        q_base = q_block * self.rows
        num_blocks = key_iters(self.spec, q_base + self.rows + self.offset, self.block_kv)
        return _Item(div(head, self.num_heads), rem(head, self.num_heads), q_base, num_blocks)


def _default_strip(spec: AttentionSpec) -> int:
    """Query heads whose keys and values L2 holds."""
    return max(1, int(_STRIP_BYTES / (2 * spec.k.shape[1] * sum(padded_head_dims(spec))))) * spec.group_size


def _kernel(q_gmem: Any, k_gmem: Any, v_gmem: Any, *refs: Any, spec: AttentionSpec, config: Config) -> None:
    *offset_gmem, out_gmem, lse_gmem = refs
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = config.block_q, config.block_kv
    num_stages, num_q_slots = config.num_stages, config.num_q_slots
    num_pieces, num_store_slots = value_dim // _STORE_COLUMNS, _num_store_slots(spec, config)
    tile = lambda *shape: plgpu.SMEM(shape, dtype, transforms=TRANSFORMS)

    def _attend(
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        out_smem: Any,
        lse_smem: Any,
        q_full: Any,
        q_empty: Any,
        k_full: Any,
        v_full: Any,
        k_empty: Any,
        v_empty: Any,
        turn: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        offset = query_offset(offset_gmem)
        schedule = _Schedule(spec, config, offset)
        following = lambda slot: jnp.where(slot == num_stages - 1, 0, slot + 1)
        # In a consumer's eyes; the producer fills the slots of all.
        q_slot_of = lambda nth, consumer: lax.rem(nth, jnp.int32(num_q_slots)) * NUM_CONSUMERS + consumer

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _produce() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load_item(nth: Any, slot: Any) -> Any:
                item = schedule[nth]
                kv_head = lax.div(item.head, jnp.int32(spec.group_size))
                # JAX refuses slices that it sees end beyond the array, as the last block may: hide where they start.
                origin = schedule.cta * 0

                def load(gmem: Any, smem: Any, full: Any, empty: Any, block: Any, slot: Any) -> None:
                    plgpu.barrier_wait(empty.at[slot])
                    source = gmem.at[item.batch, pl.ds(origin + block * block_kv, block_kv), kv_head]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot])

                load_keys = functools.partial(load, k_gmem, k_smem, k_full, k_empty)
                load_values = functools.partial(load, v_gmem, v_smem, v_full, v_empty)

                last = item.num_blocks - 1
                load_keys(last, slot)
                for consumer in range(NUM_CONSUMERS):
                    q_slot = q_slot_of(nth, consumer)
                    rows = (item.batch, pl.ds(item.q_base + consumer * block_q, block_q), item.head)
                    plgpu.barrier_wait(q_empty.at[q_slot])
                    plgpu.copy_gmem_to_smem(q_gmem.at[rows], q_smem.at[q_slot], q_full.at[q_slot])

                def load_step(i: Any, slot: Any) -> Any:
                    load_keys(last - i, following(slot))
                    load_values(last - i + 1, slot)
                    return following(slot)

                slot = lax.fori_loop(1, item.num_blocks, load_step, slot)
                load_values(0, slot)
                return following(slot)

            lax.fori_loop(0, schedule.num_items(), load_item, jnp.int32(0))

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            consumer = warpgroup
            c = spec.scale * math.log2(math.e)
            spread = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])

            # All slots are free, and it is consumer 0's turn.
            for slot in range(num_stages):
                plgpu.barrier_arrive(k_empty.at[slot])
                plgpu.barrier_arrive(v_empty.at[slot])
            for slot in range(num_q_slots):
                plgpu.barrier_arrive(q_empty.at[slot * NUM_CONSUMERS + consumer])

            def pass_turn() -> None:
                if turn is not None:
                    plgpu.barrier_arrive(turn.at[NUM_CONSUMERS - 1 - consumer])

            def await_turn() -> None:
                if turn is not None:
                    plgpu.barrier_wait(turn.at[consumer])

            pl.when(consumer == NUM_CONSUMERS - 1)(pass_turn)

            def multiply_keys(s_ref: Any, nth: Any, slot: Any) -> None:
                plgpu.wgmma(s_ref, q_smem.at[q_slot_of(nth, consumer)], k_smem.at[slot].transpose((1, 0)))

            def probabilities(s: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                """P, its row sums, and the new maximum."""
                new_max = jnp.maximum(row_max, s.max(axis=1) * c)
                p = jnp.exp2(s * c - spread(new_max, s.shape))
                return p, p.sum(axis=1), new_max

            def hide(s: jax.Array, item: _Item, block: Any, *, maybe: bool) -> jax.Array:
                """Masks a block, where the mask may touch it."""
                return hide_unseen(s, spec, item.q_base + consumer * block_q + offset, block * block_kv) if maybe else s

            # The last block is masked whenever it may have to be, the others behind a test.
            last_is_masked = spec.causal or spec.k.shape[1] % block_kv != 0
            # Finite: a row that sees nothing of its last blocks has no maximum yet, and -inf - -inf is no number.
            no_max = plgpu.layout_cast(jnp.full((block_q,), jnp.finfo(jnp.float32).min, jnp.float32), ROWS)

            def release_keys(nth: Any, slot: Any, block: Any) -> None:
                """The logits of a block are computed: of the item's last one, its queries are not needed any more."""
                plgpu.barrier_arrive(k_empty.at[slot])
                pl.when(block == 0)(lambda: plgpu.barrier_arrive(q_empty.at[q_slot_of(nth, consumer)]))

            def begin(nth: Any, slot: Any) -> Any:
                """The first logits of an item, on their own."""
                item = schedule[nth]
                block = item.num_blocks - 1
                plgpu.barrier_wait(q_full.at[q_slot_of(nth, consumer)])
                plgpu.barrier_wait(k_full.at[slot])

                @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                def s(s_ref: Any) -> jax.Array:
                    await_turn()
                    multiply_keys(s_ref, nth, slot)
                    pass_turn()
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

                release_keys(nth, slot, block)
                p, row_sum, row_max = probabilities(hide(s, item, block, maybe=last_is_masked), no_max)
                p, row_sum, row_max = lax.optimization_barrier((p, row_sum, row_max))
                plgpu.barrier_wait(v_full.at[slot])
                return slot, p.astype(dtype), row_max, row_sum

            def attend(acc_ref: Any) -> None:
                def multiply(s_ref: Any, nth: Any, next_slot: Any, p: jax.Array, slot: Any) -> jax.Array:
                    """Adds P V of one block to the output, and returns the logits of the next."""
                    multiply_values = lambda: plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                    await_turn()
                    if config.overlap:
                        multiply_keys(s_ref, nth, next_slot)
                        multiply_values()
                        pass_turn()
                        return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    multiply_values()
                    multiply_keys(s_ref, nth, next_slot)
                    pass_turn()
                    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
                    # A single slot must be free before anyone waits for what comes next.
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return s

                def output(slot: Any) -> jax.Array:
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    if config.overlap:
                        plgpu.barrier_arrive(v_empty.at[slot])
                    return acc

                def step(nth: Any, item: _Item, masked: bool, i: Any, carry: Any) -> Any:
                    """The logits of the i-th block from the end, and the output of the one before."""
                    slot, p, row_max, row_sum = carry
                    next_slot = following(slot)
                    block = item.num_blocks - 1 - i

                    @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                    def carry(s_ref: Any) -> Any:
                        plgpu.barrier_wait(k_full.at[next_slot])
                        s = multiply(s_ref, nth, next_slot, p, slot)
                        release_keys(nth, next_slot, block)
                        next_p, next_sum, new_max = probabilities(hide(s, item, block, maybe=masked), row_max)
                        alpha = jnp.exp2(row_max - new_max)
                        next_sum = row_sum * alpha + next_sum
                        next_p, next_sum, new_max, alpha = lax.optimization_barrier((next_p, next_sum, new_max, alpha))
                        # The next product's values. To wait for them here ends a block of instructions, and so keeps
                        # ptxas from moving the wait for this product up before the exponentials.
                        plgpu.barrier_wait(v_full.at[next_slot])
                        acc = output(slot)
                        acc_ref[...] = acc * spread(alpha, acc.shape)
                        return next_slot, next_p.astype(dtype), new_max, next_sum

                    return carry

                def walk(nth: Any, item: _Item, carry: Any) -> Any:
                    """All blocks but the last, which `begin` has seen to."""
                    first_unmasked = 1
                    if spec.causal and (offset_gmem or block_kv % schedule.rows):
                        last_seen = jnp.minimum(item.q_base + consumer * block_q + offset, spec.k.shape[1] - 1)
                        num_unmasked = lax.div(last_seen + 1, jnp.int32(block_kv))
                        first_unmasked = jnp.maximum(1, item.num_blocks - num_unmasked)
                        carry = lax.fori_loop(1, first_unmasked, functools.partial(step, nth, item, True), carry)
                    return lax.fori_loop(
                        first_unmasked, item.num_blocks, functools.partial(step, nth, item, False), carry
                    )

                def end(nth: Any, carry: Any) -> Any:
                    """The last output of an item, on its own."""
                    slot, p, row_max, row_sum = carry
                    normalizer = stage_lse(row_max, row_sum)
                    await_turn()
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                    pass_turn()
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    store(nth, acc, normalizer)
                    return following(slot)

                def bridge(nth: Any, carry: Any) -> Any:
                    """The last output of an item, and the first logits of the next.

                    After the last item these are computed from what shared memory holds, and dropped.
                    """
                    slot, p, row_max, row_sum = carry
                    next_slot = following(slot)
                    item = schedule[nth + 1]
                    block = item.num_blocks - 1
                    if_any = pl.when(nth + 1 < schedule.num_items())
                    normalizer = stage_lse(row_max, row_sum)

                    @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                    def carry(s_ref: Any) -> Any:
                        @if_any
                        def _wait() -> None:
                            plgpu.barrier_wait(q_full.at[q_slot_of(nth + 1, consumer)])
                            plgpu.barrier_wait(k_full.at[next_slot])

                        s = multiply(s_ref, nth + 1, next_slot, p, slot)
                        if_any(lambda: release_keys(nth + 1, next_slot, block))
                        s = hide(s, item, block, maybe=last_is_masked)
                        next_p, next_sum, new_max = lax.optimization_barrier(probabilities(s, no_max))
                        if_any(lambda: plgpu.barrier_wait(v_full.at[next_slot]))
                        acc = output(slot)
                        next_p = lax.optimization_barrier(next_p.astype(dtype))
                        store(nth, acc, normalizer)
                        return next_slot, next_p, new_max, next_sum

                    return carry

                def stage_lse(row_max: jax.Array, row_sum: jax.Array) -> jax.Array:
                    """Writes logsumexps to shared memory, which frees their registers; returns 1 / row_sum."""
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    lse_smem.at[consumer][...] = (row_max + jnp.log2(row_sum)) * math.log(2)
                    return lax.optimization_barrier(1 / row_sum)

                def store(nth: Any, acc: jax.Array, normalizer: jax.Array) -> None:
                    """Sends the results of an item on their way, and clears the output."""
                    # Computed anew: no register holds it all the while.
                    item = schedule[lax.optimization_barrier(nth)]
                    rows = pl.ds(item.q_base + consumer * block_q, block_q)
                    for first in range(0, num_pieces, num_store_slots):
                        pieces = range(first, min(first + num_store_slots, num_pieces))
                        if first:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging = [out_smem.at[consumer * num_store_slots + i] for i in range(len(pieces))]
                        for i, smem in zip(pieces, staging):
                            piece = acc[:, i * _STORE_COLUMNS : (i + 1) * _STORE_COLUMNS]
                            smem[...] = (piece * spread(normalizer, piece.shape)).astype(dtype)
                        plgpu.commit_smem()
                        for i, smem in zip(pieces, staging):
                            to = out_gmem.at[item.batch, rows, item.head, pl.ds(i * _STORE_COLUMNS, _STORE_COLUMNS)]
                            plgpu.copy_smem_to_gmem(smem, to, commit_group=False)
                        if first == 0:
                            to = lse_gmem.at[item.batch, item.head, rows]
                            plgpu.copy_smem_to_gmem(lse_smem.at[consumer], to, commit_group=False)
                        plgpu.commit_smem_to_gmem_group()
                    acc_ref[...] = plgpu.layout_cast(jnp.zeros_like(acc), TILE)

                if config.bridge:
                    run_item = lambda nth, carry: bridge(nth, walk(nth, schedule[nth], carry))
                    first = begin(jnp.int32(0), jnp.int32(0))
                else:
                    run_item = lambda nth, slot: end(nth, walk(nth, schedule[nth], begin(nth, slot)))
                    first = jnp.int32(0)
                lax.fori_loop(0, schedule.num_items(), run_item, first)

            pl.run_scoped(attend, plgpu.ACC((block_q, value_dim), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(
        _attend,
        tile(num_q_slots * NUM_CONSUMERS, block_q, head_dim),
        tile(num_stages, block_kv, head_dim),
        tile(num_stages, block_kv, value_dim),
        tile(NUM_CONSUMERS * num_store_slots, block_q, _STORE_COLUMNS),
        plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
        # A consumer has queries of its own, and waits for its own only.
        plgpu.Barrier(num_barriers=num_q_slots * NUM_CONSUMERS),
        plgpu.Barrier(num_barriers=num_q_slots * NUM_CONSUMERS),
        plgpu.Barrier(num_barriers=num_stages),
        plgpu.Barrier(num_barriers=num_stages),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages),
        plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages),
        plgpu.Barrier(num_barriers=NUM_CONSUMERS) if config.ping_pong else None,
        collective_axes="warpgroup",
    )
