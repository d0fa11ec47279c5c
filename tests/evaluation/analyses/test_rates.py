"""One aligner read with several segmentations, or several with their own: quality against the measured rate."""

import json
import shutil

import pytest
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerProcessor
from arcaligner.evaluation import evaluate, reading
from arcaligner.evaluation.analyses import rates
from arcaligner.evaluation.analyses.__main__ import main
from arcaligner.evaluation.analyses.rates import Reading, measure, readings_of
from arcaligner.evaluation.metrics import bootstrap_interval
from arcaligner.evaluation.runs import AnswerFile

pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def aligner(tmp_path, checkpoint_dir):
    """Copies of the tiny aligner, with other segmentations."""

    def make(sentences):
        folder = tmp_path / f"aligner_{sentences}"
        shutil.copytree(checkpoint_dir, folder)
        settings = json.loads((folder / "processor_config.json").read_text())
        (folder / "processor_config.json").write_text(json.dumps(settings | {"sentences_per_segment": sentences}))
        return str(folder)

    return make


@pytest.fixture
def command(tmp_path):
    """Runs the command on three questions of SQuAD; the data it wrote."""
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "squad.jsonl", question_rows(3))

    def run(*checkpoints, num_questions=3, code=0):
        arguments = ["rates", "--tasks", "squad", "--data", str(tmp_path / "data"), "-n", str(num_questions)]
        arguments += [option for each in checkpoints for option in ("--checkpoint", each)]
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--output", str(tmp_path / "figures")])
        assert end.value.code == code
        return json.loads((tmp_path / "figures" / "rates.json").read_text())

    return run


def answers(tmp_path, sentences: str) -> list[dict]:
    return AnswerFile(tmp_path / "figures" / "rates", "squad", f"sentences_{sentences}").read()


def test_one_aligner_is_read_with_each_segmentation(command, checkpoint_dir, tmp_path):
    data = command(str(checkpoint_dir))
    # Passages of three sentences, two and one; a half sentence is a slot where there is a place to cut.
    slots = {each: {row["id"]: row["context_tokens"] for row in answers(tmp_path, each)} for each in ("0.5", "1", "3")}
    assert slots["1"] == {"row-0": 3, "row-1": 2, "row-2": 1}
    assert slots["3"] == {"row-0": 1, "row-1": 1, "row-2": 1}
    assert slots["0.5"] == {"row-0": 6, "row-1": 4, "row-2": 2}
    tokens = sum(row["passage_tokens"] for row in answers(tmp_path, "1"))
    points = data["sets"]["SQuAD"]
    assert [point["sentences_per_segment"] for point in points] == [0.5, 1, 3]
    assert [point["compression_rate"] for point in points] == [tokens / 12, tokens / 6, tokens / 3]
    assert [point["questions"] for point in points] == [3, 3, 3]
    assert not data["trained_for_each"] and "not trained anew" in data["reading"]
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert files == {"rates", "rates.png", "rates.svg", "rates.json"}


def test_several_aligners_are_read_with_their_own_segmentation(command, aligner, tmp_path):
    data = command(aligner(3), aligner(0.5))
    assert [point["sentences_per_segment"] for point in data["sets"]["SQuAD"]] == [0.5, 3]
    assert sum(row["context_tokens"] for row in answers(tmp_path, "3")) == 3
    assert sum(row["context_tokens"] for row in answers(tmp_path, "0.5")) == 12
    assert data["trained_for_each"]


def test_the_answers_are_those_that_the_segmentation_gives(command, checkpoint_dir, tmp_path, model):
    command(str(checkpoint_dir))
    processor = ArcAlignerProcessor.from_pretrained(str(checkpoint_dir))
    processor.sentences_per_segment = 3
    rows = question_rows(3)
    expected = reading.SlotReader(model, processor, gate_mode="adaptive").answer(rows)
    found = {answer["id"]: answer["prediction"] for answer in answers(tmp_path, "3")}
    assert found == {row["id"]: answer.text for row, answer in zip(rows, expected, strict=True)}


def test_answers_that_are_there_are_kept_and_only_those_asked_for_are_measured(
    command, checkpoint_dir, tmp_path, monkeypatch
):
    command(str(checkpoint_dir), num_questions=2)
    asked = []
    original = evaluate.answer_file
    monkeypatch.setattr(
        evaluate,
        "answer_file",
        lambda reader, file, rows, *rest: asked.append(rows) or original(reader, file, rows, *rest),
    )
    command(str(checkpoint_dir))
    assert [[row["id"] for row in rows] for rows in asked] == [["row-2"]] * 3
    monkeypatch.setattr(rates, "load_aligner", None)  # there is nothing left to answer
    assert [point["questions"] for point in command(str(checkpoint_dir), num_questions=2)["sets"]["SQuAD"]] == [2] * 3


def test_a_point_has_the_mean_of_its_questions_and_the_rate_of_all_their_tokens():
    found = [
        {"id": "1", "f1": 0.5, "em": 1.0, "passage_tokens": 30, "context_tokens": 2},
        {"id": "2", "f1": 0.0, "em": 0.0, "passage_tokens": 90, "context_tokens": 3},
    ]
    assert measure(Reading("here", "digest", 3), found) == {
        "sentences_per_segment": 3,
        "weights": "digest",
        "questions": 2,
        "compression_rate": 24.0,
        "f1": [25.0, *bootstrap_interval([50.0, 0.0])],
        "em": [50.0, *bootstrap_interval([100.0, 0.0])],
    }


def test_each_set_is_a_line_through_its_rates_on_a_logarithmic_axis():
    points = [
        {"compression_rate": rate, "f1": [f1, f1 - 1, f1 + 2], "em": [2 * f1, f1, 3 * f1]}
        for rate, f1 in ((12.0, 30.0), (24.0, 20.0))
    ]
    f1_axes, em_axes = rates.draw({"SQuAD": points, "NaturalQA": points[:1]}).axes
    assert f1_axes.get_xscale() == em_axes.get_xscale() == "log"
    line, (lower, upper), _ = f1_axes.containers[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([12.0, 24.0], [30.0, 20.0])
    assert (list(lower.get_ydata()), list(upper.get_ydata())) == ([29.0, 19.0], [32.0, 22.0])
    assert list(em_axes.containers[0][0].get_ydata()) == [60.0, 40.0]
    assert [each.get_label() for each in f1_axes.containers] == ["SQuAD", "NaturalQA"]


def test_answers_of_another_aligner_are_not_mixed_in(command, checkpoint_dir, aligner, tmp_path, capsys):
    command(str(checkpoint_dir))
    other = aligner(1)
    path = next((tmp_path / "aligner_1").glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    command(other, code=1)
    assert "made otherwise: `weights` was" in capsys.readouterr().err.replace("\n", " ")


def test_aligners_that_cannot_be_compared_are_refused(checkpoint_dir, aligner, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\d* has 1, .*aligner_1 has 1, .*aligner_3 has 3\. Name such"):
        readings_of([str(checkpoint_dir), aligner(1), aligner(3)])
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        readings_of([str(checkpoint_dir), str(tmp_path / "elsewhere")])
