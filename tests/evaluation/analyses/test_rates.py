"""The figure of quality against rate shows what a run's answers say, method by method and rate by rate."""

import pytest
from answer_rows import write_answers

from arcaligner.evaluation.analyses.rates import analyze, draw, save_rates
from arcaligner.evaluation.results import summarize

SCORES = {"naive": 0.1, "full_text_lora": 0.9}
RATES = {
    "arcaligner": {"4": (0.6, 12), "16": (0.5, 4), "segment": (0.3, 2)},
    "truncated": {"4": (0.3, 12), "16": (0.2, 4)},
    "llmlingua": {"16": (0.2, 4)},  # a single one is no line
}


def write(run, task: str, method: str, f1: float, context: int) -> None:
    tokens = {"context_tokens": context, "passage_tokens": 48}
    write_answers(run, task, method, ({"f1": f1 + n / 100, "em": f1, **tokens} for n in range(4)))


@pytest.fixture
def run(tmp_path):
    """Two sets of questions, on one of which the text was not read."""
    run = tmp_path / "run"
    for task in ("squad", "nq"):
        for method, f1 in SCORES.items():
            if (task, method) != ("nq", "full_text_lora"):
                write(run, task, method, f1, 0 if method == "naive" else 48)
        for method, asked in RATES.items():
            for rate, (f1, context) in asked.items():
                write(run, task, f"{method}_x{rate}", f1, context)
        write(run, task, "arcaligner", 0.4, 3)  # at the checkpoint's own rate
    return run


def test_each_method_has_a_point_for_each_rate_from_fine_to_coarse(run):
    sets = analyze(summarize(run))
    found = sets["SQuAD"]
    assert list(found["curves"]) == ["truncated text", "ArcAligner"]
    points = found["curves"]["ArcAligner"]
    assert [point["tokens_per_slot"] for point in points] == [4, 16, None, "segment"]
    assert [point["compression_rate"] for point in points] == [4.0, 12.0, 16.0, 24.0]
    numbers = summarize(run)["sets"]["SQuAD"]["methods"]
    assert points[0]["f1"] == numbers["arcaligner_x4"]["f1"]
    assert found["bounds"]["StandardRAG, fine-tuned"] == numbers["full_text_lora"]["f1"]
    assert list(sets["NaturalQA"]["bounds"]) == ["Naive"]  # which was not read as text


def test_a_line_of_the_figure_goes_through_the_points_of_its_method(run):
    sets = analyze(summarize(run))
    figure = draw(sets)
    assert [axes.get_title() for axes in figure.axes] == ["NaturalQA", "SQuAD"]
    squad = figure.axes[1]
    line, (lower, upper), _ = squad.containers[1]
    points = sets["SQuAD"]["curves"]["ArcAligner"]
    assert list(line.get_xdata()) == [4.0, 12.0, 16.0, 24.0] and squad.get_xscale() == "log"
    assert list(line.get_ydata()) == [point["f1"][0] for point in points]
    assert list(lower.get_ydata()) == pytest.approx([point["f1"][1] for point in points])
    assert list(upper.get_ydata()) == pytest.approx([point["f1"][2] for point in points])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["truncated text", "ArcAligner"]


def test_a_run_at_one_rate_is_refused_with_the_command_that_adds_others(run):
    for path in run.glob("*/*_x*"):
        path.unlink()
    with pytest.raises(ValueError, match="No method was asked at several rates.*--tokens-per-slot 4,8,16,segment"):
        save_rates(run, summarize(run))
