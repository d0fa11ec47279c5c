"""Loops by layer are the model's refinement steps and the pass before them, the mean over real slots alone."""

import json

import numpy as np
import pytest
import torch
from conftest import chat_inputs
from training_rows import question_rows, write_rows

from arcaligner.evaluation.analyses import __main__ as commands
from arcaligner.evaluation.analyses.gates import require_gates, rows_with_passages, summarize


@pytest.fixture
def rows() -> list[dict]:
    """Rows of 3, 2, 1 and all 6 slots."""
    rows = question_rows(4)
    rows[3]["passages"] = [passage for row in rows[:3] for passage in row["passages"]]
    return rows


@torch.inference_mode()
def plain_loops(model, processor, row) -> np.ndarray:
    """Loops of a row's slots, asked alone, (num_layers, num_slots)."""
    return model(**chat_inputs(processor, row["question"], row["passages"])).recursion_depth[0].numpy() + 1


def test_means_are_over_slots_and_not_over_questions():
    counts = np.array([[[1, 0, 3], [4, 0, 0]], [[1, 1, 0], [1, 0, 1]]])  # 4 and 2 slots at two layers
    numbers = summarize(counts)
    assert (numbers["questions"], numbers["slots"]) == (2, 6)
    mean, low, high = np.transpose(numbers["loops"])
    np.testing.assert_allclose(mean, [13 / 6, 8 / 6])
    np.testing.assert_allclose(low, [3 / 2, 4 / 4])  # the second question twice, the first twice
    np.testing.assert_allclose(high, [10 / 4, 4 / 2])
    np.testing.assert_allclose(numbers["shares"], [[2 / 6, 1 / 6, 3 / 6], [5 / 6, 0, 1 / 6]])


def test_the_command_writes_figure_and_numbers_of_each_set(model, processor, checkpoint_dir, rows, tmp_path, capsys):
    write_rows(tmp_path / "squad.jsonl", rows[:2])
    gold_first = rows[3] | {"meta": {"gold": [1]}}
    write_rows(tmp_path / "hotpotqa.jsonl.gz", [gold_first, rows[2], rows[2] | {"id": "third"}])
    options = {"--checkpoint": checkpoint_dir, "--data": tmp_path, "--output": tmp_path / "figures", "-n": 2}
    arguments = [str(each) for pair in options.items() for each in pair]
    with pytest.raises(SystemExit) as end:
        commands.main(["gates", "--tasks", "squad, hotpotqa", *arguments])
    assert end.value.code == 0
    data = json.loads((tmp_path / "figures" / "gates.json").read_text(encoding="utf-8"))
    assert data["reading"] in capsys.readouterr().out
    assert data["checkpoint"] == str(checkpoint_dir)
    assert list(data["sets"]) == ["SQuAD", "HotpotQA"]
    gold_alone = rows[3] | {"passages": rows[3]["passages"][1:2]}
    for found, asked in zip(data["sets"].values(), (rows[:2], [gold_alone, rows[2]]), strict=True):
        loops = np.concatenate([plain_loops(model, processor, row) for row in asked], axis=1)  # (layers, slots)
        assert (found["questions"], found["slots"]) == (2, loops.shape[1])
        np.testing.assert_allclose([mean for mean, _, _ in found["loops"]], loops.mean(axis=1))
        shares = np.stack([(loops == number).mean(axis=1) for number in (1, 2, 3)], axis=1)
        np.testing.assert_allclose(found["shares"], shares)
        assert {1, 3} <= {*loops[1]}  # gates of one layer are open and closed
    assert (tmp_path / "figures" / "gates.svg").stat().st_size > 1000


def test_a_mistake_ends_in_one_clear_line(capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(["gates", "--checkpoint", "none", "--tasks", "squat"])
    assert end.value.code == 1
    assert "Error: There is no task 'squat'. Did you mean squad?" in capsys.readouterr().err


def test_questions_without_a_passage_are_left_out(rows):
    empty = rows[0] | {"passages": []}
    assert rows_with_passages("nq", [empty, rows[1]]) == rows[1:2]
    with pytest.raises(ValueError, match="No question of nq has a passage"):
        rows_with_passages("nq", [empty])


def test_gates_that_decide_nothing_are_refused(model):
    require_gates(model, "mine")
    model.set_stage("grounding")
    with pytest.raises(ValueError, match="gates of mine decide nothing: its `gate_mode` is 'off'"):
        require_gates(model, "mine")
    model.set_stage("gating")
    model.config.gate_layers = []
    with pytest.raises(ValueError, match="0 of its layers have a gate"):
        require_gates(model, "mine")
