"""The latency benchmark: time in turns, rounds and their end, ratios within a round, one command for all."""

import json
from functools import partial

import pytest
import torch
from training_rows import question_rows, write_rows

from arcaligner.benchmarks import arms
from arcaligner.benchmarks.arms import first_tokens, load_models, time_rounds
from arcaligner.benchmarks.latency import main, measure_size, parse_sizes
from arcaligner.evaluation.analyses import speed


def test_at_least_three_rounds_are_timed_and_who_goes_first_rotates(monkeypatch):
    monkeypatch.setattr(arms, "MAX_ROUNDS", 4)
    seen, told = [], []
    turns = {name: partial(seen.append, name) for name in "abc"}
    found = time_rounds(lambda number: turns, "cpu", 60.0, told.append)
    assert "".join(seen) == "".join(told) == "abcbcacababc"
    assert [list(each) for each in found] == [["a", "b", "c"]] * 4 and min(found[0].values()) > 0
    assert len(time_rounds(lambda number: turns, "cpu", 0.0)) == 3


def test_ratios_are_taken_within_a_round():
    seconds = [{"a": 2.0, "b": 1.0}, {"a": 40.0, "b": 10.0}, {"a": 9.0, "b": 3.0}]
    found = first_tokens(seconds, "b", "a")
    assert found["speed_up"] == {"lower": 2.5, "median": 3.0, "upper": 3.5}
    assert found["first_token"] == {"lower": 2.0, "median": 3.0, "upper": 6.5}


def test_a_prompt_longer_than_the_backbones_context_is_refused(checkpoint_dir, processor, monkeypatch):
    models = load_models(str(checkpoint_dir), torch.float32, "cpu")
    monkeypatch.setattr(models[1].config, "max_position_embeddings", 64)
    with pytest.raises(ValueError, match="The text has .* positions but the backbone llama reads 64"):
        measure_size(models, processor, question_rows(6), 3, "segment", seconds=0.0)


def test_the_command_prints_a_table_and_one_json_line(tmp_path, checkpoint_dir, capsys):
    data, output = tmp_path / "rows.jsonl", tmp_path / "found"
    write_rows(data, question_rows(6))
    options = {"sizes": "2", "dtype": "float32", "tokens_per_slot": "4,segment", "device": "cpu"}
    main(str(checkpoint_dir), seconds=0.0, data=data, output=output, **options)
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["data"] == "rows.jsonl"
    fine, coarse = found["sizes"]
    assert (
        fine["k"] == 2
        and fine["rounds"] == 3
        and [fine["tokens_per_slot"], coarse["tokens_per_slot"]] == [4, "segment"]
    )
    assert fine["slots"] > coarse["slots"]
    for size in (fine, coarse):
        assert set(size["encoder"]) == {"segmenting", "encoding"} and list(size["arms"]) == list(speed.ARM_TITLES)
        assert size["arms"]["standard_rag"]["speed_up"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
        for name, arm in size["arms"].items():
            length = size["text_tokens" if name.startswith("standard") else "slots"]
            # layers, keys and values, heads, head_dim, float32, and the question's few
            assert 0 <= arm["cache_bytes"] - 3 * 2 * 2 * 8 * 4 * length < 3 * 2 * 2 * 8 * 4 * 100
    assert f"| 2 | {fine['text_tokens']} | 4 | {fine['slots']} |" in printed
    assert json.loads((output / "latency.json").read_text("utf-8"))["sizes"] == found["sizes"]


@pytest.mark.parametrize("sizes", ["0", "5x1", "5,", "-1"])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match=f"`--sizes` is '{sizes}'; expected numbers of passages"):
        parse_sizes(sizes)
