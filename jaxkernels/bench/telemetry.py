"""Samples clock rate, power and temperature of the chip during a measurement.

This needs nvidia-ml-py (the extra "bench") and an NVIDIA driver. Without them nothing is sampled, and
`Telemetry.reason` has the reason.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
from typing import Any

__all__ = ["Reading", "Sample", "Telemetry"]

_INTERVAL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample."""

    sm_clock_mhz: float
    power_w: float
    temperature_c: float


@dataclasses.dataclass(frozen=True)
class Reading:
    """Medians over several samples, and the extremes of clock rate and power."""

    sm_clock_mhz: float
    sm_clock_min_mhz: float
    sm_clock_max_mhz: float
    power_w: float
    power_max_w: float
    temperature_c: float

    @classmethod
    def of(cls, samples: list[Sample]) -> Reading | None:
        """The reading of some samples; None if there are none."""
        if not samples:
            return None
        clocks, watts = [s.sm_clock_mhz for s in samples], [s.power_w for s in samples]
        return cls(
            sm_clock_mhz=statistics.median(clocks),
            sm_clock_min_mhz=min(clocks),
            sm_clock_max_mhz=max(clocks),
            power_w=statistics.median(watts),
            power_max_w=max(watts),
            temperature_c=statistics.median(s.temperature_c for s in samples),
        )


class Telemetry:
    """Samples one GPU on a separate thread, while the context is entered.

    Args:
      index: the index of the GPU among those visible to this process (`jax.Device.local_hardware_id`).
      nvml: the module `pynvml`, or a stand-in; None to import it.

    Attributes:
      reason: the reason why nothing is sampled, or None.
    """

    def __init__(self, index: int, nvml: Any = None):
        self.reason: str | None = None
        self._samples: list[Sample] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        if nvml is None:
            try:
                import pynvml as nvml
            except ImportError:
                self.reason = 'nvidia-ml-py is not installed: pip install "jaxkernels[bench]"'
                return
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._device = _handle(nvml, index)
            self._look()
        except nvml.NVMLError as e:
            self.reason = f"NVML: {e}"

    def __enter__(self) -> Telemetry:
        if self.reason is None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.reason is None:
            self._stop.set()
            self._thread.join()
            self._nvml.nvmlShutdown()

    def sm_clock(self) -> float | None:
        """The SM clock now, in MHz."""
        if self.reason is not None:
            return None
        return float(self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM))

    def take(self) -> Reading | None:
        """The reading of the samples since the last call."""
        with self._lock:
            samples, self._samples = self._samples, []
        return Reading.of(samples)

    def joules(self) -> float | None:
        """The energy that the GPU has taken since its driver was loaded; None if it does not count it."""
        if self.reason is not None:
            return None
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1e3
        except self._nvml.NVMLError:  # GPUs before Volta, and some virtual ones.
            return None

    def limits(self) -> dict[str, float]:
        """The power limit and the highest SM clock of the chip's settings."""
        if self.reason is not None:
            return {}
        nvml = self._nvml
        return dict(
            power_limit_w=nvml.nvmlDeviceGetEnforcedPowerLimit(self._device) / 1e3,
            max_sm_clock_mhz=float(nvml.nvmlDeviceGetMaxClockInfo(self._device, nvml.NVML_CLOCK_SM)),
        )

    def driver(self) -> str | None:
        return None if self.reason is not None else str(self._nvml.nvmlSystemGetDriverVersion())

    def _look(self) -> Sample:
        nvml = self._nvml
        return Sample(
            sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(self._device, nvml.NVML_CLOCK_SM)),
            power_w=nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3,
            temperature_c=float(nvml.nvmlDeviceGetTemperature(self._device, nvml.NVML_TEMPERATURE_GPU)),
        )

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            try:
                sample = self._look()
            except self._nvml.NVMLError:  # The driver may be busy; the next sample will succeed.
                continue
            with self._lock:
                self._samples.append(sample)


def _handle(nvml: Any, index: int) -> Any:
    """NVML's handle of a visible device. NVML counts all devices; CUDA_VISIBLE_DEVICES selects and orders them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    if name.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(int(name) if name.isdigit() else index)
