"""The latency benchmark: time in turns, memory, rounds and their end, ratios within a round, one command for all."""

import json
from functools import partial
from unittest.mock import Mock, call

import pytest
import torch
from training_rows import question_rows, write_rows

from arcaligner.benchmarks.arms import join_rows, load_models, pick_rows
from arcaligner.benchmarks.latency import main, measure_rounds, measure_size, parse_sizes
from arcaligner.benchmarks.measuring import flop_counter, peak_memory, quartiles, ratio, time_interleaved
from arcaligner.evaluation.analyses import speed

MIB = 2**20


def test_who_goes_first_rotates_and_the_order_of_the_result_does_not():
    seen = []
    turns = {name: partial(seen.append, name) for name in "abc"}
    found = [time_interleaved(turns, number, "cpu") for number in range(4)]
    assert "".join(seen) == "abcbcacababc"
    assert [list(each) for each in found] == [["a", "b", "c"]] * 4


def test_peak_memory_sees_what_was_freed_inside_and_not_what_was_there_before():
    before = torch.ones(64 * MIB // 4)
    with peak_memory("cpu") as peak:
        torch.ones(96 * MIB // 4)
    assert 90 * MIB < peak["bytes"] < 110 * MIB
    with peak_memory("cpu") as peak:
        before += 1
    assert peak["bytes"] < 8 * MIB


def test_operations_of_products_and_attention_are_counted():
    query = torch.ones(1, 2, 5, 8)
    with flop_counter() as counter:
        torch.ones(3, 4) @ torch.ones(4, 6)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert counter.get_total_flops() == 2 * 3 * 4 * 6 + 2 * 2 * 2 * 5 * 5 * 8


def test_ratios_are_taken_within_a_round():
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == {"lower": 2.0, "median": 3.0, "upper": 4.0}
    seconds = [{"a": 2.0, "b": 1.0}, {"a": 40.0, "b": 10.0}, {"a": 9.0, "b": 3.0}]
    assert ratio(seconds, "a", "b") == {"lower": 2.5, "median": 3.0, "upper": 3.5}


def test_at_least_three_rounds_are_timed_each_with_a_whole_answer():
    decoding = {"a": Mock(), "b": Mock()}
    found, tokens = measure_rounds({"x": lambda: None}, decoding, "cpu", rounds=9, seconds=0.0)
    assert len(found) == 3 and len(tokens) == 3 * 15
    for decoder in decoding.values():
        assert decoder.mock_calls == [call.restart(), *[call.step()] * 15] * 3


@pytest.fixture(scope="module")
def models(checkpoint_dir):
    return load_models(str(checkpoint_dir), torch.float32, "cpu")


@pytest.fixture(scope="module")
def size(models, processor):
    found = measure_size(models, processor, question_rows(6), 3, "segment", rounds=3, seconds=0.0)
    return {"dtype": "float32", **found}


def test_a_size_has_all_numbers_of_all_arms(size, processor):
    arms = size["arms"]
    assert set(arms) > set(speed.ARM_TITLES) and (size["k"], size["rounds"]) == (3, 3)
    for name, arm in arms.items():
        assert arm["first_token"]["lower"] <= arm["first_token"]["median"] <= arm["first_token"]["upper"]
        assert arm["per_token"]["median"] > 0 and arm["questions_per_second"]["median"] > 0
        length = size["text_tokens" if name.startswith("standard") else "slots"]
        assert arm["cache_bytes"] >= 3 * 2 * 2 * 8 * 4 * length  # layers, keys and values, heads, head_dim, float32
    assert set(size["encoder"]) == {"segmenting", "encoding"}
    assert arms["standard_rag"]["speed_up"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
    flops = {name: arm["flops_counted"] for name, arm in arms.items()}
    assert flops["slots_cached"] < flops["off"] < flops["adaptive"] < flops["always"]
    assert flops["standard_rag_cached"] < flops["standard_rag"] and flops["off"] < flops["standard_rag"]
    row = join_rows(pick_rows(question_rows(6), processor, 3))
    assert (
        size["slots"] == len(processor.slot_encoder.segment_documents(row["passages"])) and 0 < size["open_share"] < 1
    )
    assert size["prefix_bytes_ratio"] > 1


def test_a_prompt_longer_than_the_backbones_context_is_refused(models, processor, monkeypatch):
    monkeypatch.setattr(models[1].config, "max_position_embeddings", 64)
    with pytest.raises(ValueError, match="The text with its answer has .* positions but the backbone llama reads 64"):
        measure_size(models, processor, question_rows(6), 3, "segment", rounds=3, seconds=0.0)


def test_the_command_prints_a_table_and_one_json_line(tmp_path, checkpoint_dir, capsys):
    data, output = tmp_path / "rows.jsonl", tmp_path / "found"
    write_rows(data, question_rows(6))
    options = {"sizes": "2", "dtype": "float32", "tokens_per_slot": "4,segment", "device": "cpu"}
    main(str(checkpoint_dir), rounds=3, seconds=0.0, data=data, output=output, **options)
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["data"] == "rows.jsonl"
    fine, coarse = found["sizes"]
    assert [(each["tokens_per_slot"], each["k"]) for each in (fine, coarse)] == [(4, 2), ("segment", 2)]
    assert fine["slots"] > coarse["slots"]
    assert printed.count("\n| 2 | ") == 2 and "| Passages | Tokens | Rate | Slots | text |" in printed
    assert json.loads((output / "latency.json").read_text("utf-8"))["sizes"] == found["sizes"]


@pytest.mark.parametrize("sizes", ["0", "5x1", "5,", "-1"])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match=f"`--sizes` is '{sizes}'; expected numbers of passages"):
        parse_sizes(sizes)
