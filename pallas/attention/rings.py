"""Warpgroups, ring barriers and clusters, shared by the attention kernels."""

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

#: Consumer warpgroups of a CTA. The producer is another warpgroup.
NUM_CONSUMERS = 2
#: Registers of a producer thread; the consumers get the rest.
PRODUCER_REGISTERS = 24
#: Upper bounds of the shared memory for barriers and for the alignment of buffers to 1 KB: if JAX emits the pipelines,
#: and if a kernel has its own rings.
BARRIER_BYTES = 4096
RING_BARRIER_BYTES = 1024


def slot_releases(num_slots: int, num_consumers: int, *, multicast: bool) -> Any:
    """Barriers at which all consumers arrive. In a cluster, those of both CTAs: both producers write the slot."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers, num_barriers=num_slots)
    return plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_slots)


def cluster_end(num_consumers: int, *, multicast: bool) -> Any:
    """The barrier at the end of a cluster. A CTA must not exit while its neighbour arrives at its barriers."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers + 1)
    return None


def leave_cluster(end: Any) -> None:
    """Waits at the barrier of `cluster_end`, if there is one."""
    if end is not None:
        plgpu.barrier_arrive(end)
        plgpu.barrier_wait(end)
