"""Lines of the figures go through what results and timings say."""

import pytest

from arcaligner.evaluation.analyses.figures import draw_rates, speed_curves
from arcaligner.evaluation.analyses.speed import find_size


def numbers(f1: float, rate: float | None = None) -> dict:
    return {"f1": [f1, f1 - 5, f1 + 10]} | ({} if rate is None else {"compression_rate": rate})


SLOTS = {"arcaligner_x4": 60.0, "arcaligner_x16": 50.0, "arcaligner_xsegment": 30.0, "arcaligner": 40.0}
RATES = {"arcaligner_x4": 4.0, "arcaligner_x16": 12.0, "arcaligner": 16.0, "arcaligner_xsegment": 24.0}
METHODS = {name: numbers(f1, RATES[name]) for name, f1 in SLOTS.items()} | {"naive": numbers(10.0)}
METHODS |= {"truncated_x4": numbers(30.0, 4.0), "truncated_x16": numbers(20.0, 12.0), "full_text_lora": numbers(90.0)}
METHODS |= {"llmlingua_x16": numbers(20.0, 12.0)}  # a single one is no line
SETS = {"Naive only": {"methods": {"naive": numbers(10.0)}}, "SQuAD": {"methods": METHODS}}


def test_a_line_goes_through_the_points_of_its_method_from_fine_to_coarse():
    figure = draw_rates(SETS)
    (axes,) = figure.axes
    line, (lower, upper), _ = axes.containers[1]
    assert axes.get_title() == "SQuAD" and axes.get_xscale() == "log"
    assert list(line.get_xdata()) == list(RATES.values())
    for drawn, number in ((line, 0), (lower, 1), (upper, 2)):
        assert list(drawn.get_ydata()) == pytest.approx([METHODS[name]["f1"][number] for name in RATES])
    assert [line.get_ydata()[0] for line in axes.lines if len(line.get_xdata()) == 2][-2:] == [10.0, 90.0]  # bounds
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["truncated text", "ArcAligner"]


def test_f1_stands_over_the_time_at_the_same_rate():
    def size(rate, first, k=20):
        seconds = {"standard_rag": 1.0, "standard_rag_cached": 0.1, "off": first, "slots_cached": first / 8}
        arms = {name: {"first_token": {"median": each}} for name, each in seconds.items()}
        return {"k": k, "tokens_per_slot": rate, "arms": arms}

    report = {"sizes": [size(4, 0.5), size(8, 9.0, k=1), size(8, 0.25)], "own_tokens_per_slot": 4}
    f1 = {"arcaligner": 40.0, "arcaligner_x8": 20.0, "full_text_lora": 60.0}
    sets = {add: {"methods": {name: {"f1": [each + add]} for name, each in f1.items()}} for add in (0.0, 2.0)}
    assert speed_curves(report, sets) == {
        "slots, encoded before": [(500.0, 41.0, 4), (250.0, 21.0, 8)],
        "slots, kept": [(62.5, 41.0, 4), (31.25, 21.0, 8)],
        "text, fine-tuned": [(1000.0, 61.0, "text")],
        "text, fine-tuned, kept": [(100.0, 61.0, "text")],
    }
    with pytest.raises(ValueError, match="has no 20 passages at the rate 16"):
        find_size(report, 20, 16)
