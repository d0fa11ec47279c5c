"""Timing in turns, memory and peaks of the machine, and work by formula: what a counter counts."""

from contextlib import contextmanager

import pytest
import torch
from training_rows import question_rows

from arcaligner.benchmarks import measuring
from arcaligner.benchmarks.arms import Arm, both_prompts, encoded_slots, make_arms, pick_rows
from arcaligner.benchmarks.measuring import (
    Formula,
    Work,
    flop_counter,
    measured_peaks,
    peak_memory,
    quartiles,
    time_interleaved,
)
from arcaligner.benchmarks.models import load_models

MIB = 2**20


def test_who_goes_first_rotates_and_the_order_of_the_result_does_not():
    seen = []
    turns = {name: Arm(lambda name=name: seen.append(name)) for name in "abc"}
    found = [time_interleaved(turns, number, "cpu") for number in range(4)]
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

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    assert time_interleaved({"a": Arm(run, state), "b": Arm(run)}, 0, "cpu") == {"a": 3.0, "b": 3.0}


def test_spread_is_the_median_with_the_middle_half():
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == {"lower": 2.0, "median": 3.0, "upper": 4.0}


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
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(clock)))  # each try takes a second
    assert measured_peaks("cpu", torch.float32, scale=32) == {
        "flops_per_second": 2 * 64**3,
        "bytes_per_second": 2 * 2**28 // 32,
    }


@pytest.fixture(scope="module")
def models(checkpoint_dir):
    return load_models(str(checkpoint_dir), torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompts(processor):
    rows = pick_rows(question_rows(6), processor, k=3, batch_size=1)
    return both_prompts(processor, rows, encoded_slots(processor, rows), vocab_size=len(processor.tokenizer))


@pytest.fixture(scope="module")
def measured(models, prompts):
    """Operations counted, work by formula, and the refinement steps that were taken."""
    arms, _ = make_arms(*models, *prompts)
    counted, depths = {}, {}
    for name, arm in arms.items():
        with torch.no_grad(), arm.state(), flop_counter() as counter:
            depths[name] = arm.run().recursion_depth
        counted[name] = counter.get_total_flops()
    refined = {name: depths[name] for name in ("adaptive", "budgeted", "always")}
    return counted, Formula(*models).of_arms(*prompts, refined), depths


def masked(formula, length: int) -> float:
    """Attention to what comes later, which is counted and not needed."""
    return sum(cost.key for cost in formula.costs) * length * length / 2


def test_operations_of_the_text_are_those_counted_except_the_causal_half(models, prompts, measured):
    counted, work, _ = measured
    formula, rounding = Formula(*models), 2 * models[0].config.text_config.num_hidden_layers
    for name, part in (("standard_rag", prompts[0].whole), ("standard_rag_cached", prompts[0].tail)):
        expected = work[name].flops + masked(formula, part.lengths[0])
        assert counted[name] == pytest.approx(expected, abs=rounding)


def test_operations_of_the_slots_are_those_counted_except_projector_and_mask(models, prompts, measured):
    counted, work, _ = measured
    slots = prompts[1].slots["context_embeds"].shape[1]
    projector = 2 * slots * sum(p.numel() for p in models[0].model.projector.parameters() if p.dim() == 2)
    expected = work["off"].flops + masked(Formula(*models), prompts[1].whole.lengths[0]) + projector
    assert counted["off"] == pytest.approx(expected, abs=10)


def test_plain_refinement_is_counted_with_its_gates_on_all_rows(models, prompts, measured):
    counted, work, _ = measured
    formula = Formula(*models)
    added = work["plain"].flops - work["off"].flops
    later = formula.steps * masked(formula, prompts[1].whole.lengths[0])  # each layer has a gate
    assert counted["plain"] - counted["off"] == pytest.approx(added + later, abs=20)


def test_less_is_computed_the_more_was_made_before(measured):
    for each in (measured[0], {name: work.flops for name, work in measured[1].items()}):
        assert each["slots_cached"] < each["off"] < each["adaptive"] < each["always"] < each["plain"]
        assert each["standard_rag_cached"] < each["standard_rag"] and each["off"] < each["standard_rag"]


def test_rows_of_a_batch_add_up_and_weights_are_read_once(models):
    formula = Formula(*models)
    both, first, second = formula.reading([7, 9], [2, 0]), formula.reading([7], [2]), formula.reading([9], [0])
    weights = sum(p.nbytes for name, p in models[1].named_parameters() if p.dim() == 2 and "embed" not in name)
    assert both.flops == first.flops + second.flops
    assert both.bytes == first.bytes + second.bytes - weights


def test_a_step_reads_its_layer_again_however_many_slots_take_it(models):
    formula = Formula(*models)
    one = torch.tensor([[[1, 0, 0], [0, 0, 0], [0, 0, 0]]])
    more = torch.tensor([[[1, 1, 1], [0, 0, 0], [0, 0, 0]], [[1, 1, -1], [0, 0, -1], [0, 0, -1]]])
    layer = formula.layer_bytes[0] + formula.lora_bytes[0]
    assert formula.refinement(one, [4]).bytes == formula.refinement(more, [4, 4]).bytes == layer
    assert formula.refinement(torch.tensor([[[2, 0, 0], [0, 1, 0], [0, 0, 0]]]), [4]).bytes == 3 * layer


def test_the_limit_is_the_slower_of_operations_and_memory():
    peaks = {"flops_per_second": 10.0, "bytes_per_second": 5.0}
    assert Work(flops=100, bytes=20).limit(peaks) == 10.0
    assert (Work(flops=10, bytes=20) + Work(bytes=5)).limit(peaks) == 5.0
