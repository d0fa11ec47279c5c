"""One aligner read with several settings: quality against the operations that its slots really took."""

import json

import pytest
import torch
from training_rows import PASSAGES, question_rows, write_rows

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.evaluation.analyses import budgets
from arcaligner.evaluation.analyses.__main__ import main
from arcaligner.evaluation.analyses.budgets import (
    AS_CONFIGURED,
    KNOBS,
    NO_REFINEMENT,
    MeasuringAnswerer,
    curves_of,
    load_answerer,
    measure,
    name_of,
)
from arcaligner.evaluation.answering import flop_counter, slot_inputs
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.runs import AnswerFile

pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def rows() -> list[dict]:
    """Questions with 3, 2, 1 and 6 slots."""
    rows = question_rows(4)
    rows[3]["passages"] = [{"title": title, "text": text} for title, text in PASSAGES]
    return rows


@pytest.fixture
def command(tmp_path, checkpoint_dir, rows):
    """Runs the command on questions of SQuAD; the data it wrote."""
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "squad.jsonl", rows)

    def run(knobs, num_questions=4, code=0):
        arguments = ["budgets", "--checkpoint", str(checkpoint_dir), "--tasks", "squad", "--knobs", knobs]
        arguments += ["--data", str(tmp_path / "data"), "-n", str(num_questions)]
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--output", str(tmp_path / "figures")])
        assert end.value.code == code
        return json.loads((tmp_path / "figures" / "budgets.json").read_text()) if code == 0 else None

    return run


def answers(tmp_path, setting: dict) -> dict[str, dict]:
    found = AnswerFile(tmp_path / "figures" / "budgets", "squad", name_of(setting)).read()
    return {answer["id"]: answer for answer in found}


def test_each_curve_goes_through_the_configuration_and_equal_settings_are_read_once():
    curves = curves_of(list(KNOBS), ArcAlignerConfig(gate_threshold=0.6))
    assert {curve: list(points) for curve, points in curves.items()} == {
        "refinement_budget": ["0", "0.05", "0.1", "0.2", "∞"],
        "gate_threshold": ["0.3", "0.5", "0.6", "0.7", "0.9"],
        "max_refinement_steps": ["0", "1", "2"],
        "drop": ["2", "4", "8", "all"],
        "merge": ["2", "4", "8", "all"],
    }
    assert all(list(points.values()).count(AS_CONFIGURED) == 1 for points in curves.values())
    assert curves["gate_threshold"]["0.6"] is AS_CONFIGURED
    assert curves["refinement_budget"]["0"] == curves["max_refinement_steps"]["0"] == NO_REFINEMENT
    curves = curves_of(list(KNOBS), ArcAlignerConfig())
    assert len({name_of(setting) for points in curves.values() for setting in points.values()}) == 15


def test_operations_are_those_of_the_prefill_and_grow_with_open_gates(model, processor, rows):
    found = {}
    for gates, bias in (("closed", -1e6), ("open", 1e6)):
        for layer in model.model.backbone.layers:
            layer.slot_gate.out.bias.data.fill_(bias)
        answers = MeasuringAnswerer(model, processor, slots={}, gate_mode="adaptive").answer(rows)
        (found[gates],) = {answer.measured["prefill_flops"] for answer in answers}
    inputs = slot_inputs(processor, rows)
    with torch.no_grad(), flop_counter() as counter:
        model(**inputs, gate_mode="adaptive", use_cache=True, logits_to_keep=1)
    assert found["open"] == counter.get_total_flops() / len(rows) > found["closed"]


def test_a_setting_is_read_as_the_model_and_the_processor_read_it(checkpoint_dir, model, processor, rows):
    for setting in (
        dict(refinement_budget=0.2),
        dict(gate_threshold=0.9),
        dict(max_refinement_steps=1),
        dict(max_slots=2, slot_policy="drop"),
        dict(max_slots=2, slot_policy="merge"),
    ):
        refinement = {key: value for key, value in setting.items() if "slot" not in key}
        slots = {key: value for key, value in setting.items() if "slot" in key}
        answers = load_answerer(str(checkpoint_dir), setting, "cpu").answer(rows)
        for row, answer in zip(rows, answers, strict=True):
            inputs = slot_inputs(processor, [row], **slots)
            output = model.generate(**inputs, **refinement, max_new_tokens=4, do_sample=False)
            text = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            assert answer.text == text.strip()
            assert answer.prompt_ids == inputs["input_ids"][0].tolist()


def test_the_command_writes_the_figure_and_a_point_for_each_value(command, tmp_path):
    data = command("max_refinement_steps,max_slots")
    assert data["sets"].keys() == {"SQuAD"}
    curves = data["sets"]["SQuAD"]
    assert {curve: [point["value"] for point in points] for curve, points in curves.items()} == {
        "max_refinement_steps": ["0", "1", "2"],
        "drop": ["2", "4", "8", "all"],
        "merge": ["2", "4", "8", "all"],
    }
    steps, drop = curves["max_refinement_steps"], curves["drop"]
    assert steps[0]["cost"] == 100 < steps[1]["cost"] < steps[2]["cost"] == drop[3]["cost"]
    assert [point["slots"] for point in drop] == [7 / 4, 10 / 4, 3, 3]
    assert drop[0]["cost"] < drop[1]["cost"] < drop[2]["cost"]
    assert steps[2] == curves["merge"][3] | {"value": "2"}
    found, base = (list(answers(tmp_path, setting).values()) for setting in (AS_CONFIGURED, NO_REFINEMENT))
    assert steps[2] == {"value": "2", **measure(found, base)}
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert files == {"budgets", "budgets.png", "budgets.svg", "budgets.json"}


def test_a_point_has_the_means_of_its_questions_and_the_ratio_of_all_their_operations():
    found = [
        {"f1": 0.5, "em": 1.0, "context_tokens": 2, "prefill_flops": 35},
        {"f1": 0.0, "em": 0.0, "context_tokens": 5, "prefill_flops": 65},
    ]
    assert measure(found, [{"prefill_flops": 60}, {"prefill_flops": 65}]) == {
        "cost": 80.0,
        "slots": 3.5,
        "questions": 2,
        "f1": [25.0, *bootstrap_interval([50.0, 0.0])],
        "em": [50.0, *bootstrap_interval([100.0, 0.0])],
    }


def test_each_knob_is_a_column_of_lines_through_its_costs():
    points = [
        {"value": value, "cost": cost, "f1": [f1, f1 - 1, f1 + 2]}
        for value, cost, f1 in (("4", 90, 30), ("all", 110, 40))
    ]
    curves = {"max_refinement_steps": points[1:], "drop": points, "merge": points[::-1]}
    figure = budgets.draw({"SQuAD": curves, "NaturalQA": curves}, ["max_refinement_steps", "max_slots"])
    steps, slots = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["max_refinement_steps", "max_slots"]
    assert [len(axes.containers) for axes in figure.axes] == [2, 4]
    line, (lower, upper), _ = slots.containers[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([90, 110], [30, 40])
    assert (list(lower.get_ydata()), list(upper.get_ydata())) == ([29, 39], [32, 42])
    assert [each[0].get_linestyle() for each in slots.containers] == ["-", "--", "-", "--"]
    assert [text.get_text() for text in steps.texts] == ["all", "all"]


def test_an_unknown_knob_is_refused(command, capsys):
    command("max_slots,depth", code=1)
    assert "There is no knob 'depth'; known: refinement_budget, gate" in capsys.readouterr().err.replace("\n", " ")


def test_an_aligner_whose_gates_decide_nothing_is_refused(model, processor, monkeypatch):
    model.config.gate_mode = "off"
    monkeypatch.setattr(budgets, "load_aligner", lambda checkpoint, device: (model, processor))
    with pytest.raises(ValueError, match="The gates of there decide nothing"):
        load_answerer("there", AS_CONFIGURED, "cpu")
