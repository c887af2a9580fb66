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

from jaxkernels.core.types import ArrayType

__all__ = ["Assignment", "Factors", "assign"]

#: A dimension's label: a factor, a major and a minor factor ("n g": index n * size of g + g), or None.
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
        in_results = {factor for labels in self.results for label in labels for factor in _factors(label)}
        in_operands = {factor for labels in self.operands for label in labels for factor in _factors(label)}
        reduction = tuple(sorted(in_operands - in_results))
        options = dict(reduction_factors=reduction, need_replication_factors=tuple(whole), **self.sizes)
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
      unreduced: for each result, the mesh axes over which shards keep their terms of the sum.
    """

    axes: Mapping[str, Axes]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    sums: tuple[Axes, ...]
    scatters: tuple[tuple[tuple[str, int], ...], ...]
    unreduced: tuple[Axes, ...]

    def add_up(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Adds up, inside the mesh, what each shard computed of every result."""
        outs = []
        for out, sums, scatters, unreduced in zip(results, self.sums, self.scatters, self.unreduced):
            for axis, dim in scatters:
                out = jax.lax.psum_scatter(out, axis, scatter_dimension=dim, tiled=True)
            out = jax.lax.psum(out, sums) if sums else out
            outs.append(jax.lax.pcast(out, unreduced, to="unreduced") if unreduced else out)
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
    results' wish. An operand's sharding that a result keeps takes precedence over all others. A mesh axis serves one
    factor only, and only where it divides the factor's size; a minor factor is sharded only where every shard holds
    one index of its major one. What cannot be kept is replicated: correct, at the price of a gather.
    """
    num_shards = lambda axes: math.prod(axis_sizes[a] for a in axes)
    sizes = dict(factors.sizes)
    for labels, array in zip(factors.operands, operands):
        for label, size in zip(labels, array.shape):
            if label is not None:
                major, *minor = _factors(label)
                sizes[major] = size // math.prod(sizes[factor] for factor in minor)
    wanted = [_entries(spec, len(labels)) for labels, spec in zip(factors.results, result_specs)]
    sharded = [(labels, _entries(spec, len(labels))) for labels, spec in zip(factors.operands, operand_specs)]
    wishes = [
        (label, tuple(a for a in axes if a in axis_sizes))
        for labels, entries in (*sharded, *zip(factors.results, wanted))
        for label, axes in zip(labels, entries)
    ]

    choice = _Choice(axis_sizes, sizes)
    # Where a result is wanted as an operand is, that comes first: the two would both be resharded otherwise. Axes of
    # size 1 split nothing and are in no other's way: they come last.
    of_results = {(label, axes) for labels, e in zip(factors.results, wanted) for label, axes in zip(labels, e)}
    of_operands = {(label, axes) for labels, e in sharded for label, axes in zip(labels, e)}
    agreed = of_results & of_operands
    for label, axes in sorted(wishes, key=lambda wish: (num_shards(wish[1]) == 1, wish not in agreed)):
        choice.add(label, axes)

    chosen = choice.axes
    axes_of = lambda label: tuple(a for factor in _factors(label) for a in chosen.get(factor, ()))
    out_specs, sums, scatters, unreduced = [], [], [], []
    for i, (labels, result) in enumerate(zip(factors.results, results)):
        entries = [axes_of(label) for label in labels]
        present = {factor for label in labels for factor in _factors(label)}
        add = [a for factor, axes in chosen.items() if factor not in present for a in axes]
        terms = frozenset(add) & result_specs[i].unreduced if result_specs else frozenset()
        add = [a for a in add if a not in terms]
        scatter = []
        for d, axes in enumerate(wanted[i] if wanted and factors.scatter else []):
            if not entries[d] and len(axes) == 1 and axes[0] in add and result.shape[d] % axis_sizes[axes[0]] == 0:
                scatter.append((axes[0], d))
                entries[d] = axes
                add.remove(axes[0])
        out_specs.append(_spec(entries, unreduced=terms))
        sums.append(tuple(add))
        scatters.append(tuple(scatter))
        unreduced.append(tuple(sorted(terms)))
    in_specs = []
    for labels, spec in zip(factors.operands, operand_specs):
        entries = [axes_of(label) for label in labels]
        in_specs.append(_spec(entries, reduced=spec.reduced.difference(*entries)))
    return Assignment(
        axes=chosen,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        sums=tuple(sums),
        scatters=tuple(scatters),
        unreduced=tuple(unreduced),
    )


@dataclasses.dataclass
class _Choice:
    """The mesh axes of the factors, chosen one wish after the other.

    Attributes:
      axis_sizes: mesh axis -> its size.
      sizes: factor -> its size.
      axes: factor -> its mesh axes, of those that have some.
    """

    axis_sizes: Mapping[str, int]
    sizes: Mapping[str, int]
    axes: dict[str, Axes] = dataclasses.field(default_factory=dict)

    def add(self, label: Label, axes: Axes) -> None:
        """Gives mesh axes to the factors of a label that have none."""
        for factor in _factors(label):
            fitting = _fitting(self.unused(axes), self.axis_sizes, self.sizes[factor])
            if factor not in self.axes and fitting:
                self.axes[factor] = fitting
            if not self.is_split_up(factor):
                break

    def unused(self, axes: Axes) -> Axes:
        """Those that no factor has: an axis serves one factor."""
        return tuple(axis for axis in axes if not any(axis in taken for taken in self.axes.values()))

    def is_split_up(self, factor: str) -> bool:
        """Whether each shard has one element of the factor, so that the next minor one can be split."""
        return math.prod(self.axis_sizes[axis] for axis in self.axes.get(factor, ())) == self.sizes[factor]


def _factors(label: Label) -> list[str]:
    return [] if label is None else label.split()


def _fitting(axes: Sequence[str], axis_sizes: Mapping[str, int], size: int) -> Axes:
    """As many of the axes, from the first on, as divide `size`."""
    fitting: list[str] = []
    for axis in axes:
        if size % math.prod(axis_sizes[a] for a in (*fitting, axis)) != 0:
            break
        fitting.append(axis)
    return tuple(fitting)


def _entries(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """A partition spec as one tuple of axis names for each dimension."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec.partitions]
    return entries + [()] * (ndim - len(entries))


def _spec(entries: Sequence[Axes], **sets: frozenset[str]) -> PartitionSpec:
    return PartitionSpec(*((axes[0] if len(axes) == 1 else axes) if axes else None for axes in entries), **sets)
