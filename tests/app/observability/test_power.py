"""Watts of the machine: as set, or by the counters that the system has, and else none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.observability import metrics, power
from app.observability.power import GpuCounters, Power, PowerMeter, gpu_counters

RANGE = 262_143_328_850  # microjoules, as a Xeon has it


def zone(folder: Path, id: str, name: str, energy: int) -> Path:
    made = folder / f"intel-rapl:{id}"
    made.mkdir()
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (made / "energy_uj").write_text(f"{energy}\n")
    return made


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_packages_and_memory_are_summed_and_what_is_in_them_is_not(tmp_path: Path, clock: Clock) -> None:
    package, memory = zone(tmp_path, "0", "package-0", 5), zone(tmp_path, "0:1", "dram", 0)
    core, platform = zone(tmp_path, "0:0", "core", 0), zone(tmp_path, "1", "psys", 0)
    meter = PowerMeter(None, folder=tmp_path, now=clock)
    assert meter.power() is None  # one look is no rate
    clock.at += 10
    for each, joules in ((package, 400), (memory, 100), (core, 300), (platform, 900)):
        (each / "energy_uj").write_text(str(joules * 1_000_000 + (5 if each is package else 0)))
    assert meter.power() == Power(50.0, "rapl")


def test_a_counter_that_wraps_and_one_that_was_not_looked_at(tmp_path: Path, clock: Clock) -> None:
    package = zone(tmp_path, "0", "package-0", RANGE)
    meter = PowerMeter(None, folder=tmp_path, now=clock)
    clock.at += 100
    (package / "energy_uj").write_text("999999")
    assert meter.power() == Power(0.01, "rapl")
    clock.at += 601  # it may have wrapped unseen
    assert meter.power() is None
    clock.at += 2
    (package / "energy_uj").write_text("20999999")
    assert meter.power() == Power(10.0, "rapl")


def test_power_is_that_of_the_last_minutes(tmp_path: Path, clock: Clock) -> None:
    package = zone(tmp_path, "0", "package-0", 0)
    meter = PowerMeter(None, folder=tmp_path, now=clock)
    energy = 0
    for watts in (100, 100, 100, 10, 10, 10, 10):
        clock.at += 100
        energy += watts * 100
        (package / "energy_uj").write_text(str(energy * 1_000_000))
        now = meter.power()
    assert now == Power(10.0, "rapl")


def test_what_is_not_known_is_not_made_up(tmp_path: Path, clock: Clock) -> None:
    assert PowerMeter(None, folder=tmp_path / "none", now=clock).power() is None
    package = zone(tmp_path, "0", "package-0", 0)
    on_gpu = PowerMeter(None, measure=False, folder=tmp_path, now=clock)
    unreadable = PowerMeter(None, folder=tmp_path, now=clock)
    (package / "energy_uj").unlink()
    clock.at += 10
    assert on_gpu.power() is None and unreadable.power() is None
    assert PowerMeter(250.0, folder=tmp_path).power() == Power(250.0, "power_watts")


class Nvml:
    """NVML's binding without a driver: the calls of `pynvml` that are made, millijoules by GPU, and its errors."""

    class NVMLError(Exception):
        """Base of the binding's errors."""

    def __init__(self, *millijoules: int) -> None:
        self.millijoules = list(millijoules)
        self.fails: str | None = None

    def nvmlInit(self) -> None:
        self._check()

    def nvmlDeviceGetCount(self) -> int:
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:
        return at

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        self._check()
        return self.millijoules[handle]

    def _check(self) -> None:
        if self.fails is not None:
            raise self.NVMLError(self.fails)


def test_gpus_are_added_to_the_cpu_and_stand_alone_without_it(tmp_path: Path, clock: Clock) -> None:
    package = zone(tmp_path, "0", "package-0", 0)
    nvml = Nvml(7_000, 0)
    both = PowerMeter(None, gpus=GpuCounters(nvml), folder=tmp_path, now=clock)
    alone = PowerMeter(None, gpus=GpuCounters(nvml), folder=tmp_path / "none", now=clock)
    clock.at += 10
    (package / "energy_uj").write_text(str(500 * 1_000_000))
    nvml.millijoules = [7_000 + 3_000_000, 1_000_000]
    assert both.power() == Power(450.0, "rapl+nvml") and alone.power() == Power(400.0, "nvml")


def test_a_driver_that_is_loaded_again_or_goes_begins_anew(tmp_path: Path, clock: Clock) -> None:
    nvml = Nvml(9_000_000)
    meter = PowerMeter(None, gpus=GpuCounters(nvml), folder=tmp_path, now=clock)
    clock.at += 10
    nvml.millijoules = [1_000]  # from nothing, since a moment ago
    assert meter.power() is None
    clock.at += 10
    nvml.millijoules = [501_000]
    assert meter.power() == Power(50.0, "nvml")
    nvml.fails = "GPU is lost"
    assert meter.power() is None
    nvml.fails = None
    clock.at += 10
    assert meter.power() is None  # what passed meanwhile is not known


def test_a_gpu_is_measured_where_its_library_and_driver_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml(1)
    monkeypatch.setattr(power, "POWERCAP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_counters() is not None
    nvml.fails = "Driver Not Loaded"
    assert gpu_counters() is None and "NVML says: Driver Not Loaded" in caplog.text
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    caplog.set_level("INFO", "ponder")
    assert gpu_counters() is None and "pip install 'ponder[nvml]'" in caplog.text


@pytest.mark.parametrize(
    ("devices", "asked"), [({"cpu"}, False), ({"cuda"}, True), ({"cpu", "cuda"}, True), ({"cuda", "mps"}, False)]
)
def test_nvml_is_asked_where_an_engine_runs_on_cuda(
    devices: set[str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(metrics, "gpu_counters", lambda: calls.append(None))
    metrics._power_meter(None, devices)
    assert bool(calls) == asked
    calls.clear()
    metrics._power_meter(400.0, devices)
    assert not calls
