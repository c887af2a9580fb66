"""The CUDA attention kernels on an emulator of warps and asynchronous copies (tests/cuda/emulated): they neither wait
for ever nor read, overwrite or leave too early, and their indices are right."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attentions import draw, make_spec
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator

from jaxkernels.core import dispatch
from jaxkernels.ffi.attention import backward, backward_wide, forward, launching
from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec

Config = forward.Config

TRANSLATED = {f"jaxkernels::attention_{name}": DYNAMIC_SMEM for name in ("forward", "backward", "backward_wide")}
TRANSLATED["jaxkernels::attention_row_sums"] = {}
TRANSLATED["jaxkernels::attention_blind_sums"] = {
    "__shared__ Totals totals;": "Totals& totals = emulator::static_shared<Totals>();"
}
TRANSLATED["jaxkernels::attention_blind_means"] = {
    "__shared__ SharedStorage shared;": "SharedStorage& shared = emulator::static_shared<SharedStorage>();"
}

pytestmark = NEEDS_COMPILER


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(launching, "compile_kernel", launching.compile_kernel.__wrapped__)
    with Emulator(libraries, TRANSLATED).installed() as emulator:
        yield emulator


def check(spec: AttentionSpec, config: Config, seed: int = 0) -> None:
    """Runs the kernel on a chip of few SMs, so that blocks work on several items each, and checks the results."""
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=2))
    operands = spec.pack("attention_forward", draw(spec, seed))
    out, lse = forward.run(spec, config, *operands)
    exact, exact_lse = dispatch.load("attention_forward", "xla").run(spec, reference.Config(), *operands)
    assert (out.shape, out.dtype) == (exact.shape, exact.dtype)
    lse, exact_lse = np.asarray(lse), np.asarray(exact_lse)
    is_masked = exact_lse <= MASKED_LOGIT / 2
    np.testing.assert_array_equal(lse == np.float32(MASKED_LOGIT), is_masked)
    np.testing.assert_allclose(lse[~is_masked], exact_lse[~is_masked], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(exact, np.float32), rtol=2e-2, atol=2e-2)


def spec_of(**options: Any) -> AttentionSpec:
    """An attention of lengths that are no multiples of blocks."""
    defaults: dict[str, Any] = dict(batch=1, queries=150, keys=200, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16")
    spec = make_spec(**defaults | options)
    return dataclasses.replace(spec, bias=spec.bias and dataclasses.replace(spec.bias, dtype=spec.q.dtype))


SMALL = Config(64, 2, 2)
CASES = {
    "plain": (spec_of(), SMALL),
    "causal": (spec_of(causal=True), SMALL),
    "more-queries-than-keys": (spec_of(causal=True, queries=200, keys=90), SMALL),
    "window": (spec_of(window=(40, 20)), SMALL),
    "window-behind-all-keys": (spec_of(window=(30, 0), queries=260, keys=100), SMALL),
    "key-lengths": (spec_of(batch=4, key_lengths=True, causal=True), SMALL),
    "query-lengths": (spec_of(batch=3, query_lengths=True), SMALL),
    "both-lengths": (spec_of(batch=4, query_lengths=True, key_lengths=True, window=(50, None)), SMALL),
    "segments": (spec_of(segments=True, causal=True), SMALL),
    "segments-and-lengths": (spec_of(batch=3, segments=True, query_lengths=True), SMALL),
    "mask-of-keys": (spec_of(batch=2, mask=(2, 1, 1, 200)), SMALL),
    "one-mask-of-keys": (spec_of(batch=2, mask=(1, 1, 1, 200), causal=True, key_lengths=True), SMALL),
    "bias": (spec_of(bias=(1, 2, 150, 200)), SMALL),
    "bias-of-one-head": (spec_of(batch=2, bias=(2, 1, 150, 200), causal=True), Config(128, 2, 2)),
    "bias-for-all": (spec_of(batch=2, bias=(1, 1, 150, 200), soft_cap=1.5, key_lengths=True), SMALL),
    "bias-of-odd-rows": (spec_of(bias=(1, 2, 150, 203), keys=203, segments=True), Config(80, 2, 2)),
    "bias-of-4-byte-rows": (spec_of(batch=2, bias=(2, 1, 150, 202), keys=202, causal=True), Config(80, 2, 2)),
    "bias-of-8-byte-rows": (spec_of(batch=2, bias=(1, 2, 150, 204), keys=204, key_lengths=True), SMALL),
    "bias-of-4-byte-rows-three-consumers": (
        spec_of(queries=300, bias=(1, 2, 300, 130), keys=130, soft_cap=1.5),
        Config(64, 2, 3),
    ),
    "bias-of-8-byte-rows-one-query": (
        spec_of(batch=3, queries=1, bias=(3, 2, 1, 20), keys=20),
        Config(64, 2, 1, takes_turns=False),
    ),
    "bias-of-one-4-byte-row": (spec_of(queries=3, keys=2, bias=(1, 2, 3, 2), window=(0, 0)), Config(16, 2, 1)),
    "bias-behind-all-queries": (spec_of(bias=(1, 2, 70, 203), queries=70, keys=203, causal=True), SMALL),
    "bias-three-consumers": (spec_of(queries=300, bias=(1, 2, 300, 200)), Config(64, 2, 3)),
    "bias-one-query": (spec_of(batch=3, queries=1, bias=(3, 2, 1, 200)), Config(64, 2, 1, takes_turns=False)),
    "mask": (spec_of(batch=2, mask=(2, 1, 150, 200)), SMALL),
    "mask-that-hides-all-keys": (spec_of(batch=2, keys=3, mask=(2, 1, 150, 3)), SMALL),
    "mask-of-a-head": (spec_of(batch=2, mask=(1, 2, 150, 200), causal=True), SMALL),
    "mask-and-bias": (spec_of(batch=2, mask=(2, 1, 150, 200), bias=(1, 2, 150, 200)), Config(64, 3, 2)),
    "mask-of-all-keys": (spec_of(batch=2, mask=(2, 1, 1, 1)), SMALL),
    "soft-cap": (spec_of(soft_cap=1.5, causal=True), SMALL),
    "offset": (spec_of(query_offset=True, causal=True), SMALL),
    "one-query": (spec_of(batch=3, queries=1, key_lengths=True), Config(64, 2, 1, takes_turns=False)),
    "one-key": (spec_of(keys=1), SMALL),
    "whole-blocks": (spec_of(queries=128, keys=192), SMALL),
    "float16": (spec_of(dtype="float16"), SMALL),
    "wide": (spec_of(head_dim=96, value_dim=128, causal=True), Config(80, 2, 2)),
    "values-wider": (spec_of(head_dim=40, value_dim=72), Config(48, 3, 2)),
    "odd-head-dims": (spec_of(head_dim=36, value_dim=20), SMALL),
    "three-consumers": (spec_of(queries=300), Config(64, 2, 3)),
    "three-without-turns": (spec_of(queries=300, causal=True), Config(96, 3, 3, takes_turns=False)),
    "lazy": (spec_of(scale=3.0), Config(32, 2, 2, lazy_rescale=True)),
    "polynomials": (spec_of(causal=True), Config(64, 2, 2, num_polynomials=2)),
    "polynomials-behind-all-keys": (
        spec_of(window=(30, 0), queries=260, keys=100),
        Config(64, 2, 2, num_polynomials=2),
    ),
}


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("name", CASES)
def test_right(name: str, emulator: Emulator) -> None:
    check(*CASES[name])


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", range(1, 7))
def test_in_any_order(seed: int, emulator: Emulator) -> None:
    """Threads, copies and products run in another order."""
    emulator.seed = seed
    check(spec_of(batch=2, key_lengths=True, causal=True), Config(64, 2, 2))
    check(spec_of(queries=300), Config(64, 2, 3))
    check(spec_of(batch=2, bias=(1, 2, 150, 200), causal=True), Config(64, 2, 2))
    check(spec_of(batch=2, bias=(1, 2, 150, 202), keys=202, causal=True), Config(64, 2, 2))


@pytest.mark.parametrize(("value_dim", "causal"), [(64, False), (40, True), (136, False)])
def test_a_bias_that_hides_all_keys(value_dim: int, causal: bool, emulator: Emulator) -> None:
    """The result of such a query is the mean of all values, as with a mask."""
    spec = spec_of(batch=2, queries=70, heads=4, kv_heads=2, bias=(2, 4, 70, 200), value_dim=value_dim, causal=causal)
    values = draw(spec)
    blind = [(0, 1, 3), (0, 1, 69), (1, 2, 0), (1, 2, 17), (1, 3, 40)]
    index = tuple(np.array(blind).T)
    bias = values["bias"].at[index].set(-jnp.inf)
    out, lse = forward.run(spec, SMALL, values["q"], values["k"], values["v"], bias)
    exact, _ = forward.run(spec, SMALL, values["q"], values["k"], values["v"], values["bias"])
    out, exact = (np.asarray(x, np.float32).transpose(0, 2, 1, 3) for x in (out, exact))
    means = np.repeat(np.asarray(values["v"], np.float32).mean(axis=1), 2, axis=1)
    np.testing.assert_allclose(out[index], np.stack([means[b, n] for b, n, _ in blind]), rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(np.asarray(lse)[index], np.float32(MASKED_LOGIT))
    others = np.ones(out.shape[:3], bool)
    others[index] = False
    np.testing.assert_array_equal(out[others], exact[others])


@pytest.mark.parametrize("num_polynomials", [0, 3])
def test_numbers_that_are_none_stay_so(num_polynomials: int, emulator: Emulator) -> None:
    """A query of NaN has a NaN as its result, and no other query has."""
    spec = spec_of(queries=70, keys=80)
    values = draw(spec)
    q = values["q"].at[0, 3, 1, 5].set(jnp.nan)
    config = Config(64, 2, 2, num_polynomials=num_polynomials)
    out, lse = forward.run(spec, config, q, values["k"], values["v"])
    is_nan = np.zeros((1, 70, 2), bool)
    is_nan[0, 3, 1] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)).any(axis=3), is_nan)
    np.testing.assert_array_equal(np.isnan(np.asarray(lse)), is_nan.transpose(0, 2, 1))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("void step(const Item& item, int block) {\n    shared_.key_ring.consumer_wait(keys_);\n",
         "void step(const Item& item, int block) {\n", "plain"),
        ("int block) {\n    shared_.value_ring.consumer_wait(values_);\n", "int block) {\n", "plain"),
        ("    wgmma_wait<0>();\n    pin(o_);\n", "    pin(o_);\n", "plain"),
        ("block * kBlockKv, 0,\n                            kv_head_", "block * kBlockKv, 0,\n"
         "                            item.head", "plain"),
        ("position + problem_.right + 1);\n      end -=", "position + problem_.right);\n      end -=", "causal"),
        ("position - problem_.left - first_key", "position - problem_.left + 1 - first_key", "window"),
        ("maximum[h] - next) : 1.0f", "maximum[h] - next) * 0.5f : 1.0f", "plain"),
        ("    if (block == item.last() && threadIdx.x % kWarp == 0) {", "    if (threadIdx.x % kWarp == 0) {",
         "plain"),
        ("rows_ = Statistics();", "", "plain"),
        ("load_values(item, block);", "load_values(item, block - 1);", "plain"),
        ("    adds_ = false;\n    const u32 warp", "    const u32 warp", "plain"),
        ("if (Config::kKeyLengths && first_of_padding", "if (false && first_of_padding", "key-lengths"),
        ("sees_nothing(lse, part, problem, query) || found", "found", "window-behind-all-keys"),
        ("totals.column(column + 1)", "totals.column(column)", "window-behind-all-keys"),
        ("if (!sees_nothing(lse, part, problem, query)) continue;", "", "window-behind-all-keys"),
        ("min(min(begin + problem.part_rows, problem.num_queries), positions.query_end - offset)",
         "min(begin + problem.part_rows, problem.num_queries)", "segments-and-lengths"),
        ("total[i] += value(", "total[0] += value(", "window-behind-all-keys"),
        ("rows_.sum[h] < 0.5f ||", "rows_.sum[h] == 0.0f ||", "polynomials-behind-all-keys"),
        ("if (pair.ids[e] != rows[1])", "if (pair.ids[e] != rows[0])", "segments"),
        ("Config::kQueryLengths && factor == 0.0f ?", "false ?", "query-lengths"),
        ("tanh_by_exp2(s_[i] * problem_.factor)", "tanh_by_exp2(s_[i])", "soft-cap"),
        ("    ring.consumer_wait(biases_);\n", "", "bias"),
        ("fence_proxy_async();  // The copy engine overwrites the bias.", ";", "bias"),
        ("fmaf(bias[r], problem_.bias_factor,", "fmaf(bias[r], 1.0f,", "bias"),
        ("problem.bias_batches > 1 ? item.batch : 0", "item.batch", "bias-for-all"),
        ("problem.bias_heads > 1 ? item.head : 0", "0", "bias"),
        ("rows + c / 4 * BiasTile::kBoxBytes", "rows", "bias-of-one-head"),
        ("    ring_.producer_wait(place_);\n", "", "bias-of-4-byte-rows"),
        ("cp_async_arrive(&ring_.full", "tma::mbarrier_arrive(&ring_.full", "bias-of-8-byte-rows"),
        ("(row + lane_row()) * row_bytes", "row * row_bytes", "bias-of-8-byte-rows"),
        ("i % 4 * 32 + lane_across()", "i % 4 * 32", "bias-of-4-byte-rows"),
        ("problem_.bias_batches > 1 ? item.batch : 0", "0", "bias-of-4-byte-rows"),
    ],
)  # fmt: skip
def test_planted_mistake_is_noticed(right: str, wrong: str, name: str, emulator: Emulator) -> None:
    def check_in_several_orders() -> None:
        for seed in range(4):
            emulator.seed = seed
            check(*CASES[name])

    emulator.edits = {right: wrong}
    with pytest.raises((AssertionError, RuntimeError)):
        check_in_several_orders()


# The backward pass.


def check_backward(spec: AttentionSpec, config: backward.Config | backward_wide.Config, seed: int = 0) -> None:
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=2))
    operands = spec.pack("attention_backward", draw(spec, seed))
    design = backward if isinstance(config, backward.Config) else backward_wide
    actual = design.run(spec, config, *operands)
    expected = dispatch.load("attention_backward", "xla").run(spec, reference.Config(), *operands)
    for name, x, y in zip(spec.outputs("attention_backward"), actual, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=3e-2, atol=1e-2 * max(1.0, np.abs(y).max()), err_msg=name)


WIDE, NARROW = backward.Config(64, 2), backward.Config(128, 2)
BACKWARD_CASES = {
    "plain": (spec_of(), NARROW),
    "plain-64": (spec_of(), WIDE),
    "causal": (spec_of(causal=True), NARROW),
    "wide": (spec_of(head_dim=128, causal=True), WIDE),
    "wide-and-narrow": (spec_of(head_dim=80, value_dim=112), WIDE),
    "narrow-and-wide": (spec_of(head_dim=40, value_dim=72, causal=True), WIDE),
    "odd-head-dims": (spec_of(head_dim=36, value_dim=20), NARROW),
    "more-queries-than-keys": (spec_of(causal=True, queries=260, keys=90), NARROW),
    "few-queries": (spec_of(causal=True, queries=60, keys=600), NARROW),
    "window": (spec_of(window=(40, 20)), NARROW),
    "window-behind-all-keys": (spec_of(window=(30, 0), queries=260, keys=100), WIDE),
    "key-lengths": (spec_of(batch=4, key_lengths=True, causal=True), NARROW),
    "query-lengths": (spec_of(batch=3, query_lengths=True), WIDE),
    "both-lengths": (spec_of(batch=4, query_lengths=True, key_lengths=True, window=(50, None)), NARROW),
    "segments": (spec_of(segments=True, causal=True), WIDE),
    "segments-full": (spec_of(segments=True, head_dim=128, batch=2), WIDE),
    "soft-cap": (spec_of(soft_cap=1.5, causal=True), WIDE),
    "soft-cap-and-lengths": (spec_of(soft_cap=1.5, batch=3, key_lengths=True, query_lengths=True), WIDE),
    "offset": (spec_of(query_offset=True, causal=True), NARROW),
    "one-query": (spec_of(batch=2, queries=1), WIDE),
    "one-key": (spec_of(keys=1), NARROW),
    "mask-of-keys": (spec_of(batch=2, mask=(2, 1, 1, 200)), WIDE),
    "mask-of-keys-in-order": (spec_of(batch=2, mask=(1, 1, 1, 200), causal=True, deterministic=True), WIDE),
    "groups-apart": (spec_of(heads=4, kv_heads=2, causal=True), backward.Config(64, 2, 2)),
    "float16": (spec_of(dtype="float16"), NARROW),
    "soft-cap-and-segments": (spec_of(soft_cap=1.5, segments=True), WIDE),
    "one-item-a-block": (spec_of(causal=True), dataclasses.replace(NARROW, persistent=False)),
    "early-gradients": (spec_of(causal=True), dataclasses.replace(WIDE, early_gradients=True)),
    "odd-columns": (spec_of(head_dim=72, queries=70), WIDE),
    "grouped-window": (spec_of(heads=4, kv_heads=2, window=(40, 0), queries=200), WIDE),
    "in-order": (spec_of(deterministic=True, causal=True, keys=300, queries=300), NARROW),
    "in-order-wide": (spec_of(deterministic=True, head_dim=128, keys=300, heads=4, kv_heads=2), WIDE),
    "in-order-window": (spec_of(deterministic=True, window=(130, 20), keys=500, queries=500), WIDE),
    "in-order-segments": (spec_of(deterministic=True, segments=True, causal=True, keys=400, queries=400), NARROW),
    "in-order-lengths": (
        spec_of(deterministic=True, batch=3, key_lengths=True, query_offset=True, window=(150, 0), keys=400),
        WIDE,
    ),
    "upwards": (spec_of(heads=4, kv_heads=2, causal=True, queries=520, keys=520), NARROW),
    "three-stages": (spec_of(queries=300), backward.Config(64, 3)),
}


# Above head dimension 128: two CTAs share 128 keys.
PAIRS = backward_wide.Config()
BACKWARD_CASES |= {
    "pairs": (spec_of(head_dim=160), PAIRS),
    "pairs-of-256": (spec_of(head_dim=256, queries=100, causal=True), PAIRS),
    "pairs-mask-of-keys": (spec_of(head_dim=144, batch=2, mask=(2, 1, 1, 200)), PAIRS),
    "pairs-192-128": (spec_of(head_dim=192, value_dim=128, causal=True), backward_wide.Config(3, 2, 2)),
    "pairs-wide-values": (spec_of(head_dim=40, value_dim=144, queries=80), PAIRS),
    "pairs-wide-keys": (spec_of(head_dim=136, value_dim=72, queries=80), PAIRS),
    "pairs-few-queries": (spec_of(head_dim=144, causal=True, queries=60, keys=400), PAIRS),
    "pairs-window": (spec_of(head_dim=144, window=(40, 20)), PAIRS),
    "pairs-lengths": (
        spec_of(head_dim=144, batch=3, query_lengths=True, key_lengths=True, window=(50, None)), PAIRS,
    ),
    "pairs-segments": (spec_of(head_dim=144, segments=True, causal=True), PAIRS),
    "pairs-soft-cap": (spec_of(head_dim=144, soft_cap=1.5, causal=True), PAIRS),
    "pairs-offset": (spec_of(head_dim=144, query_offset=True, causal=True), PAIRS),
    "pairs-one-query": (spec_of(head_dim=144, batch=2, queries=1), PAIRS),
    "pairs-one-key": (spec_of(head_dim=144, keys=1), PAIRS),
    "pairs-float16": (spec_of(head_dim=144, dtype="float16"), PAIRS),
    "pairs-groups-apart": (
        spec_of(head_dim=144, heads=4, kv_heads=2, causal=True), backward_wide.Config(group_parts=2),
    ),
    "pairs-grouped": (spec_of(head_dim=144, heads=4, kv_heads=2, window=(40, 0), queries=200), PAIRS),
    "pairs-in-order": (spec_of(head_dim=144, deterministic=True, causal=True, keys=300, queries=300), PAIRS),
    "pairs-in-order-window": (
        spec_of(head_dim=144, deterministic=True, window=(130, 20), keys=400, queries=400), PAIRS,
    ),
    "pairs-in-order-segments": (
        spec_of(head_dim=144, deterministic=True, segments=True, causal=True, keys=300, queries=300), PAIRS,
    ),
    "pairs-upwards": (spec_of(head_dim=144, heads=4, kv_heads=2, causal=True, queries=520, keys=520), PAIRS),
}  # fmt: skip


@pytest.mark.sampled(one_in=32)
@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_gradients_are_right(name: str, emulator: Emulator) -> None:
    check_backward(*BACKWARD_CASES[name])


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", range(1, 7))
def test_gradients_in_any_order(seed: int, emulator: Emulator) -> None:
    emulator.seed = seed
    check_backward(spec_of(batch=2, key_lengths=True, causal=True), WIDE)
    check_backward(spec_of(queries=300), NARROW)
    check_backward(spec_of(head_dim=144, batch=2, key_lengths=True, causal=True), PAIRS)


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("    shared_.output_ring.consumer_wait(place_);\n", "", "early-gradients"),
        ("    shared_.query_ring.consumer_wait(place_);\n", "", "plain"),
        ("    shared_.value_ring.consumer_wait(kv_);\n", "", "key-lengths"),
        ("      shared_.key_ring.consumer_wait(kv_);\n      const int count", "      const int count", "few-queries"),
        ("    shared_.logit_ring.consumer_wait(place_);\n", "", "plain"),
        ("    shared_.logit_ring.producer_wait(place_);\n", "", "three-stages"),
        ("    fence_proxy_async();\n    __syncwarp();\n    if", "    __syncwarp();\n    if", "plain"),
        ("    wgmma_wait<0>();\n    pin(dp_);\n", "    pin(dp_);\n", "plain"),
        ("cp_async_bulk_wait_group_read<kQueryPieces - 1>();", ";", "three-stages"),
        ("    if (has_previous) release_before();\n", "    release_before();\n", "plain"),
        ("    wgmma_wait<1>();\n    if (has_previous)", "    if (has_previous)", "three-stages"),
        ("offset_, steps.block(), steps.head())", "offset_, 0, steps.head())", "causal"),
        ("offset_, steps.block(), steps.head())", "offset_, steps.block(), 0)", "grouped-window"),
        ("by_segment =\n        Config::kSegments &&", "by_segment =\n        false &&", "segments"),
        ("problem_.right;\n    }\n    if constexpr (Config::kHasLeft) {\n      by_index",
         "problem_.right + kBlockQ;\n    }\n    if constexpr (Config::kHasLeft) {\n      by_index", "causal"),
        ("if (pair.ids[e] != rows[1])", "if (pair.ids[e] != rows[0])", "segments"),
        ("(1.0f - capped * capped)", "(1.0f - capped)", "soft-cap"),
        ("key - problem.right - position", "key - problem.right - position + 1", "causal"),
        ("key + problem.left + 1 - position", "key + problem.left - position", "window"),
        ("if (key >= edges.key_end) begin", "if (false) begin", "key-lengths"),
        ("clear_rows<KeyTile>(shared_.keys, begin, end);", "", "key-lengths"),
        ("clear_rows<ValueTile>(shared_.values, begin, end);", "", "key-lengths"),
        ("clear_rows<Tile>(tile, begin, kKeys);", "", "pairs-lengths"),
        ("problem_, item, 1 - cta_rank(),\n", "problem_, item, cta_rank(),\n", "pairs-lengths"),
        ("store(dk, item, dk_, problem_.scale)", "store(dk, item, dk_, 1.0f)", "plain"),
        ("max(item.first_key - problem_.right - offset, 0)",
         "max(item.first_key - problem_.right - offset + kBlockQ, 0)", "causal"),
        ("stride_(item.is_upward ? 1 : -1)", "stride_(-1)", "upwards"),
        ("return item.first_key / kBlockKv - first;", "return 0;", "in-order"),
        ("offset - problem_.left, 0) / kBlockKv;", "offset - problem_.left, 0) / kBlockQ;", "in-order-window"),
        ("    end_turn(arrays_.turns + pending_);\n", "", "in-order-wide"),
        ("if (is_inside && lane < kUnits)", "if (is_inside)", "odd-columns"),
        ("problem.num_heads + head;\n    float sum", "problem.num_heads;\n    float sum", "plain"),
        ("for (int step = kLanes / 2;", "for (int step = kLanes / 4;", "plain"),
        ("= float4{0.0f", "= float4{1.0f", "plain"),
        ("    shared_.weight_ring.consumer_wait(weight_place());\n", "", "pairs-of-256"),
        ("    shared_.weight_ring.producer_wait(weight_place());\n    shared_.output_ring", "    shared_.output_ring",
         "pairs-192-128"),
        ("    shared_.logit_ring.consumer_wait(logit_place());\n", "", "pairs"),
        ("    shared_.logit_ring.producer_wait(logit_place());\n    unsigned", "    unsigned", "pairs"),
        ("      shared_.logit_ring.producer_wait(logit_place());\n      store", "      store", "pairs-upwards"),
        ("    fence_proxy_async();  // The copy engine overwrites lse.\n", "", "pairs"),
        ("    fence_proxy_async();  // The copy engine overwrites delta.\n", "", "pairs"),
        ("    fence_proxy_async();\n    __syncwarp();\n    if (threadIdx.x % kWarp == 0) {\n      u64*",
         "    __syncwarp();\n    if (threadIdx.x % kWarp == 0) {\n      u64*", "pairs"),
        ("kStagingBytes, full, 1 - cta_rank());", "kStagingBytes, full, cta_rank());", "pairs"),
        ("mbarrier_arrive_expect_tx(full, kStagingBytes);", "mbarrier_arrive(full);", "pairs"),
        ("if (has_previous) release_previous_outputs();", "release_previous_outputs();", "pairs-grouped"),
        ("if (has_previous) release_previous_queries();", "release_previous_queries();", "pairs-grouped"),
        ("first_key_of(item, 1 - cta_rank())", "first_key_of(item, cta_rank())", "pairs"),
        ("full, cta_rank() * kQueryColumns", "full, 0 * kQueryColumns", "pairs-of-256"),
        ("logits + (1 - cta_rank()) *", "logits + cta_rank() *", "pairs"),
        ("edges_ = {first_key_of(item, cta_rank())", "edges_ = {item.first_key", "pairs-segments"),
        ("queries * kCtas + cta_rank()", "queries * kCtas", "pairs-in-order"),
        ("const auto& words = Config::kSoftCap ? slopes_ : p_;", "const auto& words = p_;", "pairs-soft-cap"),
        ("and copies to it, until it has ended, too.\n  barrier_cluster();\n", "\n", "pairs"),
    ],
)  # fmt: skip
def test_planted_mistake_in_gradients_is_noticed(right: str, wrong: str, name: str, emulator: Emulator) -> None:
    def check_in_several_orders() -> None:
        for seed in range(4):
            emulator.seed = seed
            check_backward(*BACKWARD_CASES[name])

    emulator.edits = {right: wrong}
    with pytest.raises((AssertionError, RuntimeError)):
        check_in_several_orders()
