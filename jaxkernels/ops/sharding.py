"""How an operation is split over a mesh: named factors, and the axes chosen for each.

An op labels every dimension of its operands and results with a factor, as an einsum does; None marks a
dimension that one device must hold whole. From the operands' shardings `assign` picks mesh axes for
each factor. The same answer serves the two ways a mesh arrives: `jax.shard_map` over the Explicit
axes, and XLA's partitioner (through `custom_partitioning`) for the Auto ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from jaxkernels.specs import ArrayType

__all__ = ["Assignment", "Factors", "assign"]

#: A dimension's label: a factor, a factor with an unsharded minor part ("n g"), or None.
Label = str | None
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """Labels of every dimension of the operands and results.

    A result is a sum over the factors it lacks: where such a factor is sharded, the shards' results
    are added up (psum).

    Attributes:
      operands, results: a tuple of labels each.
      sizes: sizes of the minor factors of compound labels.
      scatter: whether a sum over shards may leave each shard with a slice of the result.
    """

    operands: tuple[tuple[Label, ...], ...]
    results: tuple[tuple[Label, ...], ...]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    scatter: bool = True

    def shardy_rule(self) -> tuple[str, dict]:
        """The rule and options that `custom_partitioning.def_partition` takes."""
        fresh = (f"whole{i}" for i in itertools.count())
        whole: list[str] = []

        def term(labels: tuple[Label, ...]) -> str:
            words = []
            for label in labels:
                if label is None:
                    label = next(fresh)
                    whole.append(label)
                words.append(f"({label})" if " " in label else label)
            return " ".join(words)

        rule = ", ".join(map(term, self.operands)) + " -> " + ", ".join(map(term, self.results))
        in_results = {_major(label) for labels in self.results for label in labels}
        in_operands = {_major(label) for labels in self.operands for label in labels}
        reduction = sorted(f for f in in_operands - in_results if f is not None)
        options = dict(reduction_factors=tuple(reduction), need_replication_factors=tuple(whole), **self.sizes)
        return rule, options


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Mesh axes of each factor, and what follows from them.

    Attributes:
      axes: factor -> mesh axes it is sharded over (factors left whole are absent).
      in_specs, out_specs: the partition specs of operands and results.
      sums: for each result, the mesh axes over which shards are added up and all keep the sum.
      scatters: for each result, (mesh axis, dimension) pairs over which shards are added up and each
        keeps its slice of the dimension.
    """

    axes: Mapping[str, Axes]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    sums: tuple[Axes, ...]
    scatters: tuple[tuple[tuple[str, int], ...], ...]

    def add_up(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Adds up, inside the mesh, what each shard computed of every result."""
        outs = []
        for out, sums, scatters in zip(results, self.sums, self.scatters):
            for axis, dim in scatters:
                out = jax.lax.psum_scatter(out, axis, scatter_dimension=dim, tiled=True)
            outs.append(jax.lax.psum(out, sums) if sums else out)
        return outs


def assign(
    factors: Factors,
    operands: Sequence[ArrayType],
    operand_specs: Sequence[PartitionSpec],
    axis_sizes: Mapping[str, int],
    results: Sequence[ArrayType],
    result_specs: Sequence[PartitionSpec] = (),
) -> Assignment:
    """Chooses the mesh axes of every factor.

    A factor takes the first sharding its operands have, in order; one that no operand shards takes the
    results' wish. A mesh axis serves one factor only, and only where it divides every dimension that
    carries the factor. What cannot be kept is replicated: correct, at the price of a gather.
    """
    dims: dict[str, list[int]] = {}
    wishes: list[tuple[str, Axes]] = []
    for labels, array, spec in zip(factors.operands, operands, operand_specs):
        for label, size, axes in zip(labels, array.shape, _entries(spec, len(labels))):
            if (factor := _major(label)) is not None:
                dims.setdefault(factor, []).append(size)
                wishes.append((factor, axes))
    wanted = [_entries(spec, len(labels)) for labels, spec in zip(factors.results, result_specs)]
    for labels, entries in zip(factors.results, wanted):
        wishes += [(factor, axes) for label, axes in zip(labels, entries) if (factor := _major(label)) in dims]

    chosen: dict[str, Axes] = {}
    used: set[str] = set()
    for factor, axes in wishes:
        axes = tuple(a for a in axes if a in axis_sizes and a not in used)
        parts = math.prod(axis_sizes[a] for a in axes)
        if factor not in chosen and parts > 1 and all(size % parts == 0 for size in dims[factor]):
            chosen[factor] = axes
            used.update(axes)

    out_specs, sums, scatters = [], [], []
    for i, (labels, result) in enumerate(zip(factors.results, results)):
        entries = [chosen.get(_major(label), ()) for label in labels]
        present = {_major(label) for label in labels}
        add = [a for factor, axes in chosen.items() if factor not in present for a in axes]
        scatter = []
        for d, axes in enumerate(wanted[i] if wanted and factors.scatter else []):
            if not entries[d] and len(axes) == 1 and axes[0] in add and result.shape[d] % axis_sizes[axes[0]] == 0:
                scatter.append((axes[0], d))
                entries[d] = axes
                add.remove(axes[0])
        out_specs.append(_spec(entries))
        sums.append(tuple(add))
        scatters.append(tuple(scatter))
    return Assignment(
        axes=chosen,
        in_specs=tuple(_spec([chosen.get(_major(label), ()) for label in labels]) for labels in factors.operands),
        out_specs=tuple(out_specs),
        sums=tuple(sums),
        scatters=tuple(scatters),
    )


def _major(label: Label) -> str | None:
    return None if label is None else label.split()[0]


def _entries(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """A partition spec as one tuple of axis names for each dimension."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return entries + [()] * (ndim - len(entries))


def _spec(entries: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*((axes[0] if len(axes) == 1 else axes) if axes else None for axes in entries))
