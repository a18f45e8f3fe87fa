"""Watts of the machine: as set, or by the counters that the system has, and else none."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.observability.power import Power, PowerMeter

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
        power = meter.power()
    assert power == Power(10.0, "rapl")


def test_what_is_not_known_is_not_made_up(tmp_path: Path, clock: Clock) -> None:
    assert PowerMeter(None, folder=tmp_path / "none", now=clock).power() is None
    package = zone(tmp_path, "0", "package-0", 0)
    on_gpu = PowerMeter(None, measure=False, folder=tmp_path, now=clock)
    unreadable = PowerMeter(None, folder=tmp_path, now=clock)
    (package / "energy_uj").unlink()
    clock.at += 10
    assert on_gpu.power() is None and unreadable.power() is None
    assert PowerMeter(250.0, folder=tmp_path).power() == Power(250.0, "power_watts")
