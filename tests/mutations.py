"""Planted bugs of the whole product: changes to its source, each with a test that must fail."""

from __future__ import annotations

import dataclasses

__all__ = ["MUTATIONS", "Mutation"]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change, and the test that notices it.

    Attributes:
      path: the file, from the repository's root.
      before: text that the file has exactly once.
      after: what takes its place.
      test: the pytest node id of the test that must fail.
    """

    path: str
    before: str
    after: str
    test: str


_ORDERS = "tests/matmul/test_cuda_matmul_emulated.py::test_without_them_every_order_is_right[64x96-1]"
_FOLLOWS_JAX_NN = "tests/attention/test_attention.py::test_options_follow_jax_nn"
_SCHEDULE = "tests/attention/test_attention_schedule.py::test_random_cases"
_WORK_IS_COUNTED = "tests/test_bench.py::test_work_is_counted"
_LAUNCH = "tests/test_ffi_launcher.py::test_launch_reaches_the_driver_as_it_was_asked_for"

MUTATIONS: dict[str, Mutation] = {
    # Derivatives and vmap of products.
    "contracted dimensions in the operand's own order": Mutation(
        "jaxkernels/ops/matmul/api.py", 'np.argsort(other_k, kind="stable"))', "range(len(mine_k)))",
        "tests/matmul/test_dot_general.py::test_values_and_gradients_follow_lax",
    ),
    "cotangent contracted over its first dimensions": Mutation(
        "jaxkernels/ops/matmul/api.py",
        "range(np.ndim(ct) - num_n, np.ndim(ct))", "range(len(lhs_b), len(lhs_b) + num_n)",
        "tests/matmul/test_dot_general.py::test_values_and_gradients_follow_lax",
    ),
    "mapped dimension moves no equal dimension": Mutation(
        "jaxkernels/ops/matmul/api.py", "d + (d >= inserted)", "d + (d > inserted)",
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands",
    ),
    "place of a mapped rhs in the result": Mutation(
        "jaxkernels/ops/matmul/api.py", "len(lhs_b) + len(lhs_free) + rhs_free", "len(lhs_b) + rhs_free",
        "tests/test_transforms.py::test_vmap_of_every_combination_of_operands",
    ),
    # Masks of the reference.
    "causal mask without the diagonal": Mutation(
        "jaxkernels/ops/attention/terms.py", "(key <= query)", "(key < query)", _FOLLOWS_JAX_NN
    ),
    "window one key short on the left": Mutation(
        "jaxkernels/ops/attention/terms.py", "query <= key + self.left", "query < key + self.left", _FOLLOWS_JAX_NN
    ),
    "window one key short on the right": Mutation(
        "jaxkernels/ops/attention/terms.py", "query >= key - self.right", "query > key - self.right", _FOLLOWS_JAX_NN
    ),
    "one key of padding seen": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "(places.key < places.extras", "(places.key <= places.extras", _FOLLOWS_JAX_NN
    ),
    "one query of padding alive": Mutation(
        "jaxkernels/ops/attention/reference.py",
        "[None, :] < extras.query_lengths", "[None, :] <= extras.query_lengths",
        "tests/attention/test_attention.py::test_padded_queries_give_zero_and_take_no_gradient",
    ),
    "earlier segments seen": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "[:, :, None] == key_ids", "[:, :, None] >= key_ids",
        "tests/attention/test_attention.py::test_segment_ids_without_batch",
    ),
    # Planning of the attention kernels, and a kernel itself.
    # Ends for every query taken for those of any, and the other way round.
    "window's first keys not visited": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "largest(query_start - self.left, 0)",
        "largest(query_end - 1 - self.left, 0)",
        f"{_SCHEDULE}[forward-0]",
    ),
    "keys after the diagonal unmasked": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "least(query_start + self.right + 1, key_end)",
        "least(query_end + self.right, key_end)", f"{_SCHEDULE}[forward-0]",
    ),
    "window's last queries not visited": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "least(key_end + self.left, query_end)",
        "least(key_start + self.left + 1, query_end)",
        f"{_SCHEDULE}[backward-0]",
    ),
    "queries before the diagonal unmasked": Mutation(
        "jaxkernels/ops/attention/terms.py",
        "largest(key_end - 1 - self.right, query_start)",
        "largest(key_start - self.right, query_start)", f"{_SCHEDULE}[backward-0]",
    ),
    "last block left out where it is a part": Mutation(
        "pallas/attention/visibility.py", "_quotient(end + block - 1, block)", "_quotient(end, block)",
        f"{_SCHEDULE}[wide backward-0]",
    ),
    "exponentials to base 2 of natural logits": Mutation(
        "pallas/attention/forward.py", "else consumer.spec.scale * LOG2E", "else consumer.spec.scale",
        "tests/attention/test_pallas_attention.py::test_one_key_and_one_query",
    ),
    # Sharding.
    "minor factor sharded beside a whole major one": Mutation(
        "jaxkernels/core/sharding.py", "if num_shards(chosen.get(factor, ())) != sizes[factor]:", "if False:",
        "tests/test_sharding.py::test_minor_factor_is_sharded_once_its_major_one_is_split_up",
    ),
    "axis of two factors": Mutation(
        "jaxkernels/core/sharding.py", "used.update(fitting)", "pass",
        "tests/test_sharding.py::test_first_operand_settles_a_factor_and_an_axis_serves_one",
    ),
    "scattered sum added up again": Mutation(
        "jaxkernels/core/sharding.py", "add.remove(axes[0])", "pass",
        "tests/test_sharding.py::test_first_operand_settles_a_factor_and_an_axis_serves_one",
    ),
    "axes that divide a size one by one only": Mutation(
        "jaxkernels/core/sharding.py", "size % math.prod(axis_sizes[a] for a in (*fitting, axis)) != 0",
        "size % axis_sizes[axis] != 0", "tests/test_sharding.py::test_axes_divide_a_factor_together",
    ),
    # Dispatch, winners and tuning.
    "measured winner not preferred": Mutation(
        "jaxkernels/core/dispatch.py", "if reason is None and fastest not in (None, name):", "if False:",
        "tests/test_tuning.py::test_backends_compete_where_none_is_named",
    ),
    "versions of the field not compared": Mutation(
        "jaxkernels/core/dispatch.py", "found[1] != _versions(op, usable_backends(op, spec))", "False",
        "tests/test_tuning_cache.py::test_fastest_backend_is_measured_anew_when_the_field_changes",
    ),
    "reasons left out": Mutation(
        "jaxkernels/core/dispatch.py", "no backend supports {spec}: {reasons}.", "no backend supports {spec}.",
        "tests/test_dispatch.py::test_every_reason_is_listed_where_all_refuse",
    ),
    "key without the version": Mutation(
        "jaxkernels/core/winners.py", '"version": self.version,', '"version": 0,',
        "tests/test_tuning_cache.py::test_every_part_of_the_key_counts",
    ),
    "key without the chip's size": Mutation(
        "jaxkernels/core/winners.py", '"num_sms": self.chip.num_sms,', '"num_sms": 0,',
        "tests/test_tuning_cache.py::test_every_part_of_the_key_counts",
    ),
    "choice not remembered": Mutation(
        "jaxkernels/core/winners.py", "return _memo.setdefault((folder, key), winner)", "return winner",
        "tests/test_tuning_cache.py::test_a_process_keeps_to_its_first_choice",
    ),
    "stored winner not remembered": Mutation(
        "jaxkernels/core/winners.py", "_memo[folder, key] = winner", "pass",
        "tests/test_tuning_cache.py::test_winner_is_taken_instead_of_the_default",
    ),
    "candidates measured twice": Mutation(
        "jaxkernels/tuning/tuner.py", "if (backend, config) not in self._tried]", "]",
        "tests/test_tuning.py::test_fastest_configuration_wins_and_is_kept",
    ),
    "errors in one place allowed": Mutation(
        "jaxkernels/tuning/tuner.py", "_MAX_ERROR = 0.1", "_MAX_ERROR = 1e9",
        "tests/test_tuning.py::test_error_in_one_place_is_seen",
    ),
    # Launches.
    "tensor one element beyond its buffer": Mutation(
        "ffi/custom_call.py", "offset + last + itemsize <= num_bytes", "offset + last <= num_bytes",
        "tests/test_ffi_launcher.py::test_refuses_what_no_device_takes",
    ),
    "tensor one element beyond its buffer, in the launcher": Mutation(
        "ffi/launcher.cc", "return room >= dtype.bytes;", "return true;",
        "tests/test_ffi_launcher.py::test_reaching_outside_the_buffers_is_an_exception",
    ),
    "offset of a parameter dropped": Mutation(
        "ffi/launcher.cc", "addresses_[i] = buffer.data + place.byte_offset;", "addresses_[i] = buffer.data;", _LAUNCH
    ),
    "strides in elements": Mutation(
        "ffi/custom_call.py", "math.prod(shape[i + 1 :]) * itemsize for", "math.prod(shape[i + 1 :]) for", _LAUNCH
    ),
    "strides of rows that were not widened": Mutation(
        "ffi/tma.py", "for stride in _dense_strides(wide.shape)[:-1]",
        "for stride in _dense_strides((*shape[:-1], -(-shape[-1] // 64) * 64))[:-1]",
        "tests/test_ffi_tma.py::test_load[emulator-float16-130x77-128x30]",
    ),
    "strides of unpadded rows in the layout": Mutation(
        "ffi/tma.py", "*_dense_strides(wide.shape)[::-1]", "*_dense_strides(shape)[::-1]",
        "tests/test_ffi_tma.py::test_load[emulator-float16-130x77-128x30]",
    ),
    "reduction padded with zeros": Mutation(
        "ffi/tma.py", '0 if op == "store" else _neutral(op, x.dtype)', "0",
        "tests/test_ffi_tma.py::test_reduce_leaves_neighbours_as_they_are[emulator-bfloat16-max]",
    ),
    "sums padded with positive zeros": Mutation(
        "ffi/tma.py", '-0.0 if op == "add"', '0.0 if op == "add"',
        "tests/test_ffi_tma.py::test_reduce_leaves_neighbours_as_they_are[emulator-float32-add]",
    ),
    # Compilation.
    "cache key without the options": Mutation(
        "ffi/compiler.py", "toolkit, dataclasses.astuple(self)]", "toolkit, dataclasses.astuple(self)[:-1]]",
        "tests/test_ffi_compiler.py::test_cache_key_covers_all_that_decides_the_code",
    ),
    "cache key without the compiler's release": Mutation(
        "ffi/compiler.py", "nvrtc_version(), _nvrtc_build(), toolkit", "nvrtc_version(), None, toolkit",
        "tests/test_ffi_compiler.py::test_cache_key_names_the_library_that_compiles",
    ),
    # The CUDA headers and the GEMM.
    "words of an lhs in registers in another order": Mutation(
        "ffi/wgmma.py", "(lhs[{i}])", "(lhs[{3 - i}])",
        "tests/test_ffi_wgmma.py::test_ptx_of_an_lhs_in_registers",
    ),
    "steps of 8-bit tiles as wide as those of 16 bits": Mutation(
        "ffi/tiles.cuh", "kWgmmaK<T> * (kIsKMajor ? T::kBytes : kSwizzleBytes)",
        "kWgmmaK<T> * (kIsKMajor ? 2 : kSwizzleBytes)",
        "tests/test_ffi_wgmma.py::test_types[emulator-Int8-8-kShared]",
    ),
    "store without a proxy fence": Mutation(
        "ffi/staging.cuh", "  tma::fence_proxy_async();\n  __syncwarp();", "  __syncwarp();", _ORDERS
    ),
    "phase of the residual's barrier": Mutation(
        "ffi/matmul/gemm.cu", "residual_parity_ ^= 1u << out_slot(p);", "", _ORDERS
    ),
    "slot filled before it is empty": Mutation(
        "ffi/ring.cuh",
        "place.parity() ^ 1);\n    tma::mbarrier_arrive", "place.parity());\n    tma::mbarrier_arrive", _ORDERS
    ),
    "bias of the neighbouring column": Mutation(
        "ffi/matmul/gemm.cu", "values[r + 1] += pair.y, values[r + 2]", "values[r + 1] += pair.x, values[r + 2]",
        "tests/matmul/test_cuda_matmul_emulated.py::test_epilogues[silu]",
    ),
    "head of another residue": Mutation(
        "ffi/matmul/gemm.cu", "residue * (problem_.k % kUnit) % kUnit}", "residue % kUnit}",
        "tests/matmul/test_cuda_matmul_emulated.py::test_without_them_every_order_in_place_is_right",
    ),
    "last strip as wide as the others": Mutation(
        "ffi/scheduler.cuh", "min(order.strip, minor_tiles - strip * order.strip)", "order.strip",
        "tests/matmul/test_cuda_matmul_emulated.py::test_tile_orders[m]",
    ),
    "padded rows with their neighbours' elements": Mutation(
        "ffi/matmul/pad_rows.cu", "if (first + kUnit < size) {", "if (first < size) {",
        "tests/matmul/test_cuda_matmul_emulated.py::test_padding_adds_nothing_to_a_sum",
    ),
    # Benchmarks.
    "bytes counted as elements": Mutation(
        "jaxkernels/core/cases.py", "math.prod(self.shape) * jnp.dtype(self.dtype).itemsize", "math.prod(self.shape)",
        _WORK_IS_COUNTED,
    ),
    "results not counted": Mutation(
        "jaxkernels/ops/attention/cases.py", "return sum(operands.values()) + out", "return sum(operands.values())",
        _WORK_IS_COUNTED,
    ),
    "roofline of half the bandwidth": Mutation(
        "jaxkernels/bench/results.py", "self.num_bytes / self.memory_bytes_per_s",
        "2 * self.num_bytes / self.memory_bytes_per_s", "tests/test_bench.py::test_limits_are_those_of_the_chip",
    ),
    "operands that stay in the cache": Mutation(
        "jaxkernels/core/measure.py", "math.ceil(_CACHE_BYTES / max(num_bytes, 1))",
        "math.floor(_CACHE_BYTES / max(num_bytes, 1))",
        "tests/test_bench_measure.py::test_rotation_exceeds_the_cache_or_is_left",
    ),
    # Data, checkpoints and files.
    "every step's batch the same": Mutation(
        "models/data.py", "default_rng((seed, step))", "default_rng((seed, 0))",
        "tests/test_data.py::test_batch_is_a_function_of_seed_and_step",
    ),
    "last window never drawn": Mutation(
        "models/data.py", "integers(len(tokens) - sequence_length, size",
        "integers(len(tokens) - sequence_length - 1, size",
        "tests/test_data.py::test_shortest_stream_gives_its_one_window",
    ),
    "documents in the order of their names": Mutation(
        "models/data.py", "key=lambda document: document.digest", "key=lambda document: document.path",
        "tests/test_data.py::test_documents_are_ordered_by_content_whatever_their_names",
    ),
    "checkpoint of any model taken": Mutation(
        "models/checkpoints.py", "if theirs.get(name) != ours.get(name)", "if False",
        "tests/test_training.py::test_checkpoint_of_another_model_is_refused",
    ),
    "part of a file left behind": Mutation(
        "jaxkernels/core/folders.py", "part.unlink(missing_ok=True)", "pass",
        "tests/test_folders.py::test_what_stood_there_stays_when_writing_fails",
    ),
}  # fmt: skip
