"""Planted bugs of the whole product: each is a faulty part or a changed text, with a test that must fail."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from faults import Fault

__all__ = ["MUTATIONS", "Edit", "Planted"]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault in a part of the package, and the pytest node id of the test that must fail."""

    fault: Fault
    test: str

    def plant(self) -> None:
        """Plants the fault in this process: before other modules import the part."""
        self.fault.plant(importlib.import_module(self.fault.module))


@dataclasses.dataclass(frozen=True)
class Edit:
    """A changed text of a source: of C++, or where no named part has the bug.

    Attributes:
      path: the file, from the repository's root.
      before: text that the file has exactly once.
      after: the text that replaces it.
      test: the pytest node id of the test that must fail.
    """

    path: str
    before: str
    after: str
    test: str


# Faulty parts.


def contracts_in_own_order(right: Any) -> Any:
    def cotangent(*args: Any, mine_k: Any, other_k: Any, **params: Any) -> Any:
        # The right function sorts the dimensions as `other_k`; this undoes it in advance.
        places = np.argsort(np.argsort(other_k, kind="stable"))
        return right(*args, mine_k=tuple(mine_k[i] for i in places), other_k=other_k, **params)

    return cotangent


def contracts_first_dimensions(right: Any) -> Any:
    def cotangent(*args: Any, mine_b: Any, ct_other: Any, **params: Any) -> Any:
        first = range(len(mine_b), len(mine_b) + len(ct_other))
        return right(*args, mine_b=mine_b, ct_other=tuple(first), **params)

    return cotangent


def places_rhs_before_the_free_dimensions(right: Any) -> Any:
    def batched(numbers: Any, lhs_ndim: int, rhs_ndim: int, lhs_dim: int | None, rhs_dim: int | None) -> Any:
        ((lhs_k, rhs_k), (lhs_b, rhs_b)), place = right(numbers, lhs_ndim, rhs_ndim, lhs_dim, rhs_dim)
        if lhs_dim is None:
            place -= lhs_ndim - len(lhs_k) - len(lhs_b)
        return ((lhs_k, rhs_k), (lhs_b, rhs_b)), place

    return batched


def leaves_an_equal_dimension(right: Any) -> Any:
    def shifted(dims: tuple[int, ...], inserted: int | None) -> tuple[int, ...]:
        return tuple(d if d == inserted else moved for d, moved in zip(dims, right(dims, inserted)))

    return shifted


def hides_the_diagonal(right: Any) -> Any:
    def visible(band: Any, query: Any, key: Any) -> Any:
        return right(band, query, key) & (key < query) if band.right == 0 else right(band, query, key)

    return visible


def narrower(side: str) -> Callable[[Any], Any]:
    """A window that is one key short on a side."""

    def make(right: Any) -> Any:
        def visible(band: Any, query: Any, key: Any) -> Any:
            size = getattr(band, side)
            return right(dataclasses.replace(band, **{side: size - 1}) if size else band, query, key)

        return visible

    return make


def shows_a_key_of_padding(right: Any) -> Any:
    def visible_pairs(term: Any, places: Any) -> Any:
        if term.keys:
            extras = dataclasses.replace(places.extras, key_lengths=places.extras.key_lengths + 1)
            places = dataclasses.replace(places, extras=extras)
        return right(term, places)

    return visible_pairs


def keeps_a_query_of_padding(right: Any) -> Any:
    return lambda num_queries, extras: right(
        num_queries, dataclasses.replace(extras, query_lengths=extras.query_lengths + 1)
    )


def shows_earlier_segments(_: Any) -> Any:
    def visible_pairs(_: Any, places: Any) -> Any:
        queries, keys = places.extras.query_segments, places.extras.key_segments
        return (queries[:, :, None] >= keys[:, None, :])[:, None]

    return visible_pairs


def with_end_of(other: str, nth: int) -> Callable[[Any], Any]:
    """A range, one of whose ends is that of another range."""

    def make(right: Any) -> Any:
        def seen(band: Any, *args: Any) -> Any:
            ends = list(right(band, *args))
            ends[nth] = getattr(band, other)(*args)[nth]
            return tuple(ends)

        return seen

    return make


def adds_up_what_is_scattered(right: Any) -> Any:
    def assign(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        sums = [(*sums, *(axis for axis, _ in scatters)) for sums, scatters in zip(found.sums, found.scatters)]
        return dataclasses.replace(found, sums=tuple(sums))

    return assign


def fits_one_by_one(right: Any) -> Any:
    def fitting(axes: Any, axis_sizes: Any, size: int) -> Any:
        return tuple(axis for axis in axes if right([axis], axis_sizes, size))

    return fitting


def describes_as_0(name: str) -> Callable[[Any], Any]:
    return lambda right: lambda key: None if right(key) is None else right(key) | {name: 0}


def forgets_choices(right: Any) -> Any:
    def lookup(*args: Any) -> Any:
        right.__globals__["_memo"].clear()
        return right(*args)

    return lookup


def forgets_what_it_stores(right: Any) -> Any:
    def store(*args: Any, **options: Any) -> None:
        memo = right.__globals__["_memo"]
        with mock.patch.dict(memo):  # Restores it.
            right(*args, **options)

    return store


def adds_candidates_again(right: Any) -> Any:
    def add(trial: Any, *args: Any, **options: Any) -> None:
        tried, trial._tried = trial._tried, {}
        right(trial, *args, **options)
        trial._tried = tried | trial._tried

    return add


def allows_one_more_element(right: Any) -> Any:
    return lambda problem, tensor_map, buffer, num_bytes: right(
        problem, tensor_map, buffer, num_bytes + buffer.dtype.itemsize
    )


def strides_of_whole_rows_of_64(right: Any) -> Any:
    def map_of(name: str, shape: Any, wide: Any, *args: Any, **fields: Any) -> Any:
        rows = mock.Mock(shape=(*shape[:-1], shape[-1] + -shape[-1] % 64), dtype=wide.dtype)
        return right(name, shape, rows, *args, **fields)

    return map_of


def strides_of_unpadded_rows(right: Any) -> Any:
    return lambda shape, wide, *args: right(shape, mock.Mock(shape=shape), *args)


def leaves_out_the_compilers_release(right: Any) -> Any:
    def key(request: Any) -> str:
        with mock.patch.dict(right.__globals__, _nvrtc_build=lambda: None):
            return right(request)

    return key


def leaves_out_results(right: Any) -> Any:
    def num_bytes(case: Any, direction: str) -> int:
        return right(case, direction) - (case.out_type.num_bytes if direction == "forward" else 0)

    return num_bytes


def doubles_the_bytes(right: Any) -> Any:
    def limits(row: Any) -> Any:
        found = right.fget(row)
        return found and (found[0], 2 * found[1])

    return property(limits)


def copies_one_time_less(right: Any) -> Any:
    def num_rotations(num_bytes: int) -> tuple[int, bool]:
        copies, is_cold = right(num_bytes)
        return max(copies - 1, 1), is_cold

    return num_rotations


def names_parts_that_stay(right: Any) -> Any:
    def part_of(path: Any) -> Any:
        part = right(path)

        class Staying(type(part)):
            def unlink(self, missing_ok: bool = False) -> None: ...

        return Staying(part)

    return part_of


_ORDERS = "tests/matmul/test_cuda_matmul_emulated.py::test_without_them_every_order_is_right[64x96-1]"
_FOLLOWS_JAX_NN = "tests/attention/test_attention.py::test_options_follow_jax_nn"
_SCHEDULE = "tests/attention/test_attention_schedule.py::test_random_cases"
_WORK_IS_COUNTED = "tests/test_bench.py::test_work_is_counted"
_ROTATED = "tests/qkv_projection/test_cuda_qkv_projection.py::test_rotated_parts_emulated"
_IN_PARTS = "tests/qkv_projection/test_cuda_qkv_projection.py::test_arrays_in_parts_emulated"
_LAUNCH = "tests/test_ffi_launcher.py::test_launch_reaches_the_driver_as_it_was_asked_for"


def forgets(**options: Any) -> Callable[[Any], Any]:
    """A function of a spec that does not see some of its options."""
    return lambda right: lambda spec, *args: right(dataclasses.replace(spec, **options), *args)


def adds_up_all(right: Any) -> Any:
    return lambda assignment, outs, whole: right(assignment, outs, 0)


_LOSSES = "tests/linear_cross_entropy/test_linear_cross_entropy.py"
_SHARDED_LOSSES = "tests/linear_cross_entropy/test_sharded_losses.py"


MUTATIONS: dict[str, Edit | Planted] = {
    # Linear cross entropy.
    "fused gradients without the z-loss": Planted(
        Fault("jaxkernels.ops.linear_cross_entropy.reference:cotangents", forgets(z_loss=0.0)),
        f"{_LOSSES}::test_error_rule",
    ),
    "gradients without the soft cap's slope": Planted(
        Fault("jaxkernels.ops.linear_cross_entropy.reference:_Logits.chain", lambda right: lambda logits, x: x),
        f"{_LOSSES}::test_error_rule",
    ),
    "statistics added up over shards of the vocabulary": Planted(
        Fault("jaxkernels.ops.linear_cross_entropy.rules:_add_up", adds_up_all),
        f"{_SHARDED_LOSSES}::test_all_options",
    ),
    "loop over tokens left to XLA's partitioner": Planted(
        Fault("jaxkernels.ops.linear_cross_entropy.rules:_LinearCrossEntropyOp.loops", lambda right: False),
        f"{_SHARDED_LOSSES}::test_no_more_collectives_than_plain_losses",
    ),
    "ignored tokens reach the products": Edit(
        "jaxkernels/ops/linear_cross_entropy/api.py",
        "jnp.where(ignored[..., None], 0, x), jnp.where(ignored, 0, labels)",
        "x, jnp.where(ignored, 0, labels)",
        f"{_LOSSES}::test_ignored_tokens_may_be_nan",
    ),
    "float16 gradients rounded without a unit": Edit(
        "jaxkernels/ops/linear_cross_entropy/chunks.py",
        "if spec.x.dtype != jnp.float16:",
        "if spec.x.dtype != jnp.bool_:",
        f"{_LOSSES}::test_small_weights_in_float16",
    ),
    # Derivatives and vmap of products.
    "contracted dimensions in the operand's own order": Planted(
        Fault("jaxkernels.ops.matmul.rules:_cotangent", contracts_in_own_order),
        "tests/matmul/test_dot_general.py::test_values_and_gradients_follow_lax",
    ),
    "cotangent contracted over its first dimensions": Planted(
        Fault("jaxkernels.ops.matmul.rules:_cotangent", contracts_first_dimensions),
        "tests/matmul/test_dot_general.py::test_values_and_gradients_follow_lax",
    ),
    "mapped dimension moves no equal dimension": Planted(
        Fault("jaxkernels.ops.matmul.rules:_shifted", leaves_an_equal_dimension),
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands",
    ),
    "place of a mapped rhs in the result": Planted(
        Fault("jaxkernels.ops.matmul.rules:_batched", places_rhs_before_the_free_dimensions),
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands",
    ),
    # Derivatives, vmap and shards of norms.
    "norm's statistics as constants in second derivatives": Edit(
        "jaxkernels/ops/norm/rules.py",
        'named | reference.statistics(spec, named["x"])',
        "named",
        "tests/test_transforms.py::test_second_derivatives[rms norm]",
    ),
    "one gradient of a norm's scale for a mapped axis": Planted(
        Fault("jaxkernels.ops.norm.rules:_NormOp.not_shared", lambda _: lambda op, spec, mapped: mapped),
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands[rms norm]",
    ),
    "norm's statistics added up over shards of features": Edit(
        "jaxkernels/ops/norm/rules.py",
        "for axis in of_result if axis not in axes)",
        "for axis in of_result)",
        "tests/norm/test_sharded_norm.py::test_norm[rms-features-auto]",
    ),
    "cotangent of a norm's sum left out": Edit(
        "jaxkernels/ops/norm/reference.py",
        """    if spec.sum_gradient:
        dx = dx +""",
        """    if spec.sum_gradient:
        dx = dx + 0 *""",
        "tests/test_transforms.py::test_first_derivatives[xla-layer norm, residual]",
    ),
    # Masks of the reference.
    "causal mask without the diagonal": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.visible", hides_the_diagonal),
        _FOLLOWS_JAX_NN,
    ),
    "window one key short on the left": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.visible", narrower("left")),
        _FOLLOWS_JAX_NN,
    ),
    "window one key short on the right": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.visible", narrower("right")),
        _FOLLOWS_JAX_NN,
    ),
    "one key of padding seen": Planted(
        Fault("jaxkernels.ops.attention.terms:Lengths.visible_pairs", shows_a_key_of_padding),
        _FOLLOWS_JAX_NN,
    ),
    "one query of padding alive": Planted(
        Fault("jaxkernels.ops.attention.reference:_live_queries", keeps_a_query_of_padding),
        "tests/attention/test_attention.py::test_padded_queries_give_zero_and_take_no_gradient",
    ),
    "earlier segments seen": Planted(
        Fault("jaxkernels.ops.attention.terms:Segments.visible_pairs", shows_earlier_segments),
        "tests/attention/test_attention.py::test_segment_ids_without_batch",
    ),
    # Planning of the attention kernels, and a kernel itself. The schedule tests have more.
    # Ends for every query taken for those of any, and the other way round.
    "window's first keys not visited": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.keys_seen_by_any", with_end_of("keys_seen_by_all", 0)),
        f"{_SCHEDULE}[forward-0]",
    ),
    "keys after the diagonal unmasked": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.keys_seen_by_all", with_end_of("keys_seen_by_any", 1)),
        f"{_SCHEDULE}[forward-0]",
    ),
    "window's last queries not visited": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.queries_that_see_any", with_end_of("queries_that_see_all", 1)),
        f"{_SCHEDULE}[backward-0]",
    ),
    "queries before the diagonal unmasked": Planted(
        Fault("jaxkernels.ops.attention.terms:Band.queries_that_see_all", with_end_of("queries_that_see_any", 0)),
        f"{_SCHEDULE}[backward-0]",
    ),
    "exponentials to base 2 of natural logits": Planted(
        Fault("jaxkernels.pallas.attention.forward:LOG2E", lambda _: 1.0),
        "tests/attention/test_pallas_attention.py::test_one_key_and_one_query",
    ),
    # Sharding.
    "minor factor sharded beside a whole major one": Planted(
        Fault("jaxkernels.core.sharding:_Choice.is_split_up", lambda _: lambda *_: True),
        "tests/test_sharding.py::test_minor_factor_is_sharded_once_its_major_one_is_split_up",
    ),
    "axis of two factors": Planted(
        Fault("jaxkernels.core.sharding:_Choice.unused", lambda _: lambda choice, axes: axes),
        "tests/test_sharding.py::test_first_operand_settles_a_factor_and_an_axis_serves_one",
    ),
    "scattered sum added up again": Planted(
        Fault("jaxkernels.core.sharding:assign", adds_up_what_is_scattered),
        "tests/test_sharding.py::test_first_operand_settles_a_factor_and_an_axis_serves_one",
    ),
    "axes that divide a size one by one only": Planted(
        Fault("jaxkernels.core.sharding:_fitting", fits_one_by_one),
        "tests/test_sharding.py::test_axes_divide_a_factor_together",
    ),
    # Dispatch, winners and tuning.
    "measured winner not preferred": Planted(
        Fault("jaxkernels.core.dispatch:_fastest", lambda _: lambda op, spec: None),
        "tests/test_tuning.py::test_backends_compete_where_none_is_named",
    ),
    "versions of the field not compared": Planted(
        Fault("jaxkernels.core.dispatch:_versions", lambda right: lambda *args: dict.fromkeys(right(*args), 0)),
        "tests/test_tuning_cache.py::test_fastest_backend_is_measured_anew_when_the_field_changes",
    ),
    "unpreferred backend taken first": Planted(
        Fault("jaxkernels.core.dispatch:Backend.unpreferred", lambda _: lambda backend, spec: None),
        "tests/test_dispatch.py::test_unpreferred_backend_is_passed_over",
    ),
    "reasons left out": Planted(
        Fault("jaxkernels.core.dispatch:_refusal", lambda right: lambda *args: right(*args) and ""),
        "tests/test_dispatch.py::test_every_reason_is_listed_where_all_refuse",
    ),
    "key without the version": Planted(
        Fault("jaxkernels.core.winners:Key.describe", describes_as_0("version")),
        "tests/test_tuning_cache.py::test_every_part_of_the_key_counts",
    ),
    "key without the chip's size": Planted(
        Fault("jaxkernels.core.winners:Key.describe", describes_as_0("num_sms")),
        "tests/test_tuning_cache.py::test_every_part_of_the_key_counts",
    ),
    "choice not remembered": Planted(
        Fault("jaxkernels.core.winners:lookup", forgets_choices),
        "tests/test_tuning_cache.py::test_a_process_keeps_to_its_first_choice",
    ),
    "stored winner not remembered": Planted(
        Fault("jaxkernels.core.winners:store", forgets_what_it_stores),
        "tests/test_tuning_cache.py::test_winner_is_taken_instead_of_the_default",
    ),
    "candidates measured twice": Planted(
        Fault("jaxkernels.tuning.tuner:_Trial.add", adds_candidates_again),
        "tests/test_tuning.py::test_fastest_configuration_wins_and_is_kept",
    ),
    "errors in one place allowed": Planted(
        Fault("jaxkernels.tuning.tuner:_MAX_ERROR", lambda _: 1e9),
        "tests/test_tuning.py::test_error_in_one_place_is_seen",
    ),
    # Launches.
    "tensor one element beyond its buffer": Planted(
        Fault("jaxkernels.ffi.custom_call:_tensor_map_attributes", allows_one_more_element),
        "tests/test_ffi_launcher.py::test_refuses_what_no_device_takes",
    ),
    "tensor one element beyond its buffer, in the launcher": Edit(
        "ffi/launcher.cc",
        "return room >= dtype.bytes;",
        "return true;",
        "tests/test_ffi_launcher.py::test_reaching_outside_the_buffers_is_an_exception",
    ),
    "offset of a parameter dropped": Edit(
        "ffi/launcher.cc", "addresses_[i] = buffer.data + place.byte_offset;", "addresses_[i] = buffer.data;", _LAUNCH
    ),
    "parts of k added up in the result's dtype": Edit(
        "ffi/cublaslt.cc",
        "kInComputeType = 2",
        "kInComputeType = 7",
        "tests/matmul/test_cublaslt_matmul.py::test_cublaslt_is_asked_once_for_a_program",
    ),
    "one rhs for all of a batch": Edit(
        "ffi/cublaslt.cc",
        "static_cast<int64_t>(rows * columns);",
        "int64_t{0} * static_cast<int64_t>(rows * columns);",
        "tests/matmul/test_cublaslt_matmul.py::test_layouts_and_batches[mk.kn-3]",
    ),
    "strides in elements": Planted(
        Fault("jaxkernels.ffi.custom_call:_dense_strides", lambda right: lambda shape, itemsize: right(shape, 1)),
        _LAUNCH,
    ),
    "strides of rows that were not widened": Planted(
        Fault("jaxkernels.ffi.tma:_map_of", strides_of_whole_rows_of_64),
        "tests/test_ffi_tma.py::test_load[emulator-float16-130x77-128x30]",
    ),
    "strides of unpadded rows in the layout": Planted(
        Fault("jaxkernels.ffi.tma:_layout", strides_of_unpadded_rows),
        "tests/test_ffi_tma.py::test_load[emulator-float16-130x77-128x30]",
    ),
    "reduction padded with zeros": Planted(
        Fault("jaxkernels.ffi.tma:_padded", lambda right: lambda x, _: right(x, 0)),
        "tests/test_ffi_tma.py::test_reduce_leaves_neighbours_as_they_are[emulator-bfloat16-max]",
    ),
    "sums padded with positive zeros": Planted(
        Fault(
            "jaxkernels.ffi.tma:_neutral",
            lambda right: lambda op, dtype: abs(right(op, dtype)) if op == "add" else right(op, dtype),
        ),
        "tests/test_ffi_tma.py::test_reduce_leaves_neighbours_as_they_are[emulator-float32-add]",
    ),
    # Choice.
    "designs compared by what ranks configurations": Planted(
        Fault("jaxkernels.core.dispatch:Backend.estimate", lambda right: lambda backend, *args: backend.rank(*args)),
        "tests/test_dispatch.py::test_estimates_choose_among_designs_and_ranking_within_one",
    ),
    # Compilation.
    "cache key without the options": Planted(
        Fault(
            "jaxkernels.ffi.compiler:_Request.key",
            lambda right: lambda request: right(dataclasses.replace(request, options=())),
        ),
        "tests/test_ffi_compiler.py::test_cache_key_covers_all_that_decides_the_code",
    ),
    "cache key without the compiler's release": Planted(
        Fault("jaxkernels.ffi.compiler:_Request.key", leaves_out_the_compilers_release),
        "tests/test_ffi_compiler.py::test_cache_key_names_the_library_that_compiles",
    ),
    # The CUDA headers and the GEMM.
    "words of an lhs in registers in another order": Edit(
        "ffi/wgmma.py",
        "(lhs[{i}])",
        "(lhs[{3 - i}])",
        "tests/test_ffi_wgmma.py::test_ptx_of_an_lhs_in_registers",
    ),
    "steps of 8-bit tiles as wide as those of 16 bits": Edit(
        "ffi/tiles.cuh",
        "kWgmmaK<T> * (kIsKMajor ? T::kBytes : kSwizzleBytes)",
        "kWgmmaK<T> * (kIsKMajor ? 2 : kSwizzleBytes)",
        "tests/test_ffi_wgmma.py::test_types[emulator-Int8-8-kShared]",
    ),
    "store without a proxy fence": Edit(
        "ffi/staging.cuh", "  tma::fence_proxy_async();\n  __syncwarp();", "  __syncwarp();", _ORDERS
    ),
    "phase of the residual's barrier": Edit(
        "ffi/matmul/gemm.cu", "residual_parity_ ^= 1u << out_slot(p);", "", _ORDERS
    ),
    "slot filled before it is empty": Edit(
        "ffi/ring.cuh",
        "&empty[place.slot()], place.parity() ^ 1);",
        "&empty[place.slot()], place.parity());",
        _ORDERS,
    ),
    "bias of the neighbouring column": Edit(
        "ffi/matmul/gemm.cu",
        "values[r + 1] += pair.y, values[r + 2]",
        "values[r + 1] += pair.x, values[r + 2]",
        "tests/matmul/test_cuda_matmul_emulated.py::test_epilogues[silu]",
    ),
    "parts of k that overlap": Edit(
        "ffi/matmul/few_rows.cu",
        "problem.k_iters * (rank + 1) / Config::kSplitK)}",
        "problem.k_iters * (rank + 1) / Config::kSplitK) + (rank == 0)}",
        "tests/matmul/test_cuda_few_rows.py::test_without_them_every_order_is_right[cluster]",
    ),
    "sums of a part twice": Edit(
        "ffi/matmul/few_rows.cu",
        "shared.sums[part][in_part][column]",
        "shared.sums[part & ~1][in_part][column]",
        "tests/matmul/test_cuda_few_rows.py::test_without_them_every_order_is_right[cluster]",
    ),
    "bias of the other dimension": Edit(
        "ffi/matmul/few_rows.cu",
        "Config::kColumnsAreN ? column + j : row)",
        "Config::kColumnsAreN ? row : column + j)",
        "tests/matmul/test_cuda_few_rows.py::test_emulated_epilogues[12-200-config0-bias-gelu]",
    ),
    "next tile's sums over the last one's": Edit(
        "ffi/matmul/few_rows.cu",
        "    named_barrier_sync<kConsumerThreads>(1);  // All have read",
        "    // All have read",
        "tests/matmul/test_cuda_few_rows.py::test_without_them_every_order_is_right[alone]",
    ),
    "head of another residue": Edit(
        "ffi/matmul/gemm.cu",
        "residue * (problem_.k % kUnit) % kUnit}",
        "residue % kUnit}",
        "tests/matmul/test_cuda_matmul_emulated.py::test_without_them_every_order_in_place_is_right",
    ),
    "last strip as wide as the others": Edit(
        "ffi/scheduler.cuh",
        "min(order.strip, minor_tiles - strip * order.strip)",
        "order.strip",
        "tests/matmul/test_cuda_matmul_emulated.py::test_tile_orders[m]",
    ),
    "padded rows with their neighbours' elements": Edit(
        "ffi/matmul/pad_rows.cu",
        "if (first + kUnit < size) {",
        "if (first < size) {",
        "tests/matmul/test_cuda_matmul_emulated.py::test_padding_adds_nothing_to_a_sum",
    ),
    # The projection to queries, keys and values.
    "halves rotated by the sine's other sign": Edit(
        "ffi/matmul/gemm.cu",
        "y = second[r];\n            first[r] = x * cosine[r] - y * sine[r];",
        "y = second[r];\n            first[r] = x * cosine[r] + y * sine[r];",
        f"{_ROTATED}[64]",
    ),
    "neighbours rotated by the sine's other sign": Edit(
        "ffi/matmul/gemm.cu",
        "first[r + 1] = y * cosine[r] + x * sine[r];",
        "first[r + 1] = y * cosine[r] - x * sine[r];",
        f"{_ROTATED}[neighbours]",
    ),
    "second row at the first row's position": Edit(
        "ffi/matmul/gemm.cu", "(row + 8) % problem.num_positions", "row % problem.num_positions", f"{_ROTATED}[64]"
    ),
    "positions that do not begin anew": Edit(
        "ffi/matmul/gemm.cu",
        "{row % problem.num_positions *",
        "{row % (problem.num_positions + 1) *",
        f"{_ROTATED}[64]",
    ),
    "values rotated beside keys": Edit(
        "ffi/matmul/gemm.cu",
        "if (tile.column + head * Config::kHeadDim >= problem.num_rotated) break;",
        "if (tile.column >= problem.num_rotated) break;",
        f"{_ROTATED}[several heads]",
    ),
    "second part read and stored from its place in the whole": Edit(
        "ffi/matmul/gemm.cu",
        "return {1, index - problem.second};",
        "return {1, index};",
        f"{_IN_PARTS}[64-parts]",
    ),
    "third part begins with the second": Edit(
        "ffi/matmul/gemm.cu",
        "if (index >= problem.third) return {2, index - problem.third};",
        "if (index >= problem.second) return {2, index - problem.second};",
        f"{_IN_PARTS}[64-x]",
    ),
    "lhs read from its first part": Edit(
        "ffi/matmul/gemm.cu", "&maps.of[at.part], at.index", "&maps.of[0], at.index", f"{_IN_PARTS}[64-x]"
    ),
    "rhs read from its first part": Edit(
        "ffi/matmul/gemm.cu", "&maps.of[at.part], at.index", "&maps.of[0], at.index", f"{_IN_PARTS}[128-w]"
    ),
    "boxes of a block side by side in one part": Edit(
        "ffi/tiles.cuh",
        "box_at((Tile::kIsKMajor ? k : row) + (first_box + i) * kAcrossBox);",
        "box_at(Tile::kIsKMajor ? k : row);",
        f"{_IN_PARTS}[128-w]",
    ),
    "results stored to the first part": Edit(
        "ffi/matmul/gemm.cu", "? place.part : piece.residue;", "? 0 : piece.residue;", f"{_IN_PARTS}[64-parts]"
    ),
    "gradients of queries and keys rotated forward": Edit(
        "jaxkernels/ops/qkv_projection/rules.py",
        'given["cos"], -given["sin"]',
        'given["cos"], given["sin"]',
        "tests/test_transforms.py::test_first_derivatives[opaque-projection, halves]",
    ),
    "weights of a mapped axis taken for one": Edit(
        "jaxkernels/ops/qkv_projection/rules.py",
        'if static.wanted == "w" or any(',
        "if any(",
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands[projection, halves]",
    ),
    "shards of tokens with the angles of the first": Edit(
        "jaxkernels/ops/qkv_projection/spec.py",
        "cos=Operand(self.cos, (lead[-1], None))",
        "cos=Operand(self.cos, (None, None))",
        "tests/test_sharding.py::test_qkv_projection[opaque-auto-tokens]",
    ),
    # Benchmarks.
    "bytes counted as elements": Planted(
        Fault("jaxkernels.core.cases:Draw.num_bytes", lambda _: property(lambda draw: math.prod(draw.shape))),
        _WORK_IS_COUNTED,
    ),
    "results not counted": Planted(
        Fault("jaxkernels.ops.attention.cases:AttentionCase.num_bytes", leaves_out_results),
        _WORK_IS_COUNTED,
    ),
    "roofline of half the bandwidth": Planted(
        Fault("jaxkernels.bench.results:Row.limits", doubles_the_bytes),
        "tests/test_bench.py::test_limits_are_those_of_the_chip",
    ),
    "operands that stay in the cache": Planted(
        Fault("jaxkernels.core.measure:num_rotations", copies_one_time_less),
        "tests/test_bench_measure.py::test_rotation_exceeds_the_cache_or_is_left",
    ),
    "random problems that depend on their number": Planted(
        Fault(
            "jaxkernels.bench.random_rows:problems",
            lambda right: lambda op, count, seed, *largest: right(op, count, seed + count, *largest),
        ),
        "tests/test_random.py::test_a_problem_does_not_depend_on_how_many_are_drawn",
    ),
    "workers that choose as an export would": Edit(
        "jaxkernels/bench/lowering.py",
        "dispatch.Policy(exports_all=True)",
        "dispatch.Policy(exports_all=False)",
        "tests/test_random.py::test_a_worker_takes_what_an_export_passes_over",
    ),
    # Data, checkpoints and files.
    "every step's batch the same": Planted(
        Fault(
            "jaxkernels.models.data:batch_at",
            lambda right: lambda tokens, *, step, **options: right(tokens, step=0, **options),
        ),
        "tests/test_data.py::test_batch_is_a_function_of_seed_and_step",
    ),
    "last window never drawn": Planted(
        Fault("jaxkernels.models.data:batch_at", lambda right: lambda tokens, **options: right(tokens[:-1], **options)),
        "tests/test_data.py::test_shortest_stream_gives_its_one_window",
    ),
    "documents in the order of their names": Planted(
        Fault(
            "jaxkernels.models.data:find_documents",
            lambda right: lambda *args: sorted(right(*args), key=lambda document: document.path),
        ),
        "tests/test_data.py::test_documents_are_ordered_by_content_whatever_their_names",
    ),
    "checkpoint of any model taken": Planted(
        Fault("jaxkernels.models.checkpoints:Checkpoints._check_model", lambda _: lambda *_: None),
        "tests/test_training.py::test_checkpoint_of_another_model_is_refused",
    ),
    "part of a file left behind": Planted(
        Fault("jaxkernels.core.folders:part_of", names_parts_that_stay),
        "tests/test_folders.py::test_what_stood_there_stays_when_writing_fails",
    ),
}
