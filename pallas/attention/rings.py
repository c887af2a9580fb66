"""What the attention kernels share of their rings of buffers: warpgroups, barriers and clusters."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

__all__ = [
    "BARRIER_BYTES",
    "NUM_CONSUMERS",
    "PRODUCER_REGISTERS",
    "RING_BARRIER_BYTES",
    "cluster_end",
    "leave_cluster",
    "slot_releases",
]

#: Consumer warpgroups of a CTA; the producer is one more.
NUM_CONSUMERS = 2
#: Registers each producer thread keeps; the consumers share the rest.
PRODUCER_REGISTERS = 24
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most: where JAX emits the
#: pipelines, and where a kernel has rings of its own.
BARRIER_BYTES = 4096
RING_BARRIER_BYTES = 1024


def slot_releases(num_slots: int, num_consumers: int, *, multicast: bool) -> Any:
    """Barriers that all consumers arrive at; in a cluster those of both CTAs, whose producers both write the slot."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers, num_barriers=num_slots)
    return plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_slots)


def cluster_end(num_consumers: int, *, multicast: bool) -> Any:
    """The neighbour still releases slots of our ring, by barriers in our shared memory: nobody leaves first."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers + 1)
    return None


def leave_cluster(end: Any) -> None:
    """Waits for the others at `cluster_end`'s barrier, if there are any."""
    if end is not None:
        plgpu.barrier_arrive(end)
        plgpu.barrier_wait(end)
