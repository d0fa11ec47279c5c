"""Timing in turns, memory and peaks of the machine."""

from contextlib import contextmanager

import torch

from arcaligner.benchmarks import timing
from arcaligner.benchmarks.machine import machine, measured_peaks, peak_memory
from arcaligner.benchmarks.timing import Turn, in_turn, spread

MIB = 2**20


def test_who_goes_first_rotates_and_the_order_of_the_result_does_not():
    seen = []
    turns = {name: Turn(lambda name=name: seen.append(name)) for name in "abc"}
    found = [in_turn(turns, number, "cpu") for number in range(4)]
    assert "".join(seen) == "abcbcacababc"
    assert [list(each) for each in found] == [["a", "b", "c"]] * 4


def test_a_state_is_entered_before_the_clock_starts_and_left_after_it_stops(monkeypatch):
    now = [0.0]

    @contextmanager
    def state():
        now[0] += 100
        yield
        now[0] += 1000

    def run():
        now[0] += 3

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert in_turn({"a": Turn(run, state), "b": Turn(run)}, 0, "cpu") == {"a": 3.0, "b": 3.0}


def test_spread_is_the_median_with_the_middle_half():
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"lower": 2.0, "median": 3.0, "upper": 4.0}


def test_peak_memory_sees_what_was_freed_inside_and_not_what_was_there_before():
    before = torch.ones(64 * MIB // 4)
    with peak_memory("cpu") as peak:
        torch.ones(96 * MIB // 4)
    assert 90 * MIB < peak["bytes"] < 110 * MIB
    with peak_memory("cpu") as peak:
        before += 1
    assert peak["bytes"] < 8 * MIB


def test_peaks_are_operations_and_bytes_over_the_fastest_try(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))  # each try takes a second
    assert measured_peaks("cpu", torch.float32, scale=32) == {
        "flops_per_second": 2 * 64**3,
        "bytes_per_second": 2 * 2**28 // 32,
    }


def test_the_machine_is_named_with_its_versions():
    found = machine("cpu")
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads() and {"cpu", "cores", "load", "transformers"} < set(found)
