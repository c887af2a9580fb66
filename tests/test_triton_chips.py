"""What the cost models of Triton kernels know of chips, also of those that no table has."""

from __future__ import annotations

import dataclasses

import pytest

from jaxkernels.core import dispatch, hardware, registry
from jaxkernels.core.hardware import Chip
from jaxkernels.triton import chips

pytestmark = pytest.mark.usefixtures("as_if_triton_was_installed")

H200 = hardware.lookup("NVIDIA H200")
UNKNOWN = [
    Chip(name="a new GPU", platform="cuda", compute_capability=capability)
    for capability in ((8, 0), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1))
]


def test_rates_are_the_tables_where_it_has_them():
    rates = chips.rates_of(H200)
    assert rates.bf16_flops * H200.num_sms == pytest.approx(H200.bf16_flops_per_s)
    assert rates.exps * H200.num_sms == pytest.approx(H200.exps_per_s)
    assert rates.memory_bytes * H200.num_sms == pytest.approx(H200.memory_bytes_per_s)
    assert (chips.num_sms(H200), chips.smem_bytes(H200)) == (H200.num_sms, H200.smem_bytes)


@pytest.mark.parametrize("chip", UNKNOWN, ids=lambda chip: str(chip.compute_capability))
def test_unknown_chip_has_the_rates_of_a_typical_one(chip):
    assert all(rate > 0 for rate in dataclasses.astuple(chips.rates_of(chip)))
    assert chips.num_sms(chip) > 50
    assert chips.smem_bytes(chip) >= 99 * 1024
    # Twice the SMs have the same rates each.
    assert chips.rates_of(dataclasses.replace(chip, num_sms=2 * chips.num_sms(chip))) == chips.rates_of(chip)


@pytest.mark.parametrize("chip", UNKNOWN, ids=lambda chip: str(chip.compute_capability))
@pytest.mark.parametrize("operation", registry.OPERATIONS)
def test_kernels_are_chosen_for_an_unknown_chip(operation, chip):
    spec = registry.part(operation, "tuning").probe(chip)
    kernels = registry.OPERATIONS[operation].kernels
    for kernel in (kernel for kernel, backends in kernels.items() if "triton" in backends):
        chosen = dispatch.default_config(kernel, "triton", spec)
        assert chosen in dispatch.search_space(kernel, "triton", spec)
