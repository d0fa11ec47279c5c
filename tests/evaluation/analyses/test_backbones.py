"""Runs stand side by side with the numbers of their own results."""

import json

import pytest

from arcaligner.evaluation.analyses.__main__ import main
from arcaligner.evaluation.analyses.backbones import analyse, read_runs


def interval(mean: float) -> list[float]:
    return [mean, mean - 1, mean + 1]


def write(folder, sets: dict):
    """Results with `{set: {method: {metric: mean}}}`, each interval one point wide to both sides."""
    folder.mkdir()
    entries = {
        name: {
            "questions": 10,
            "methods": {
                title: {"questions": 10, "seconds": 0.1, "acc": {}}
                | {
                    metric: {"judge": interval(mean)} if metric == "acc" else interval(mean)
                    for metric, mean in numbers.items()
                }
                for title, numbers in methods.items()
            },
        }
        for name, methods in sets.items()
    }
    (folder / "results.json").write_text(json.dumps({"sets": entries}))
    return folder


@pytest.fixture
def runs(tmp_path):
    small = {
        "SQuAD": {
            "Naive": {"em": 10.0, "f1": 11.0, "acc": 12.0},
            "truncated text": {"em": 15.0, "f1": 16.0},
            "StandardRAG": {"em": 50.0, "f1": 51.0, "acc": 52.0},
            "ArcAligner": {"em": 30.0, "f1": 31.0, "acc": 32.0},
        },
        "NaturalQA": {"Naive": {"em": 1.0}},
    }
    large = {"SQuAD": {"Naive": {"em": 20.0, "f1": 21.0}, "ArcAligner": {"em": 40.0, "f1": 41.0}}}
    return {"small": write(tmp_path / "a", small), "large": write(tmp_path / "b", large)}


def test_the_three_methods_of_each_run_on_the_sets_that_all_have(runs):
    assert analyse(runs) == {
        "metric": "em",  # the large one is not judged
        "sets": {
            "SQuAD": {
                "small": {
                    "questions": 10,
                    "methods": {
                        "Naive": [10.0, 9.0, 11.0],
                        "StandardRAG": [50.0, 49.0, 51.0],
                        "ArcAligner": [30.0, 29.0, 31.0],
                    },
                },
                "large": {
                    "questions": 10,
                    "methods": {"Naive": [20.0, 19.0, 21.0], "ArcAligner": [40.0, 39.0, 41.0]},
                },
            }
        },
    }


def test_another_metric_is_shown_when_asked_for(runs):
    small = analyse(runs, "f1")["sets"]["SQuAD"]["small"]["methods"]
    assert small["ArcAligner"] == [31.0, 30.0, 32.0]


def test_judged_accuracy_is_shown_where_all_are_judged(runs):
    found = analyse({"small": runs["small"], "again": runs["small"]}, None)
    assert found["metric"] == "em"  # NaturalQA is not judged
    write(runs["small"] / "judged", {"SQuAD": {"Naive": {"em": 1.0, "acc": 2.0}, "ArcAligner": {"em": 1.0}}})
    found = analyse({"small": runs["small"], "judged": runs["small"] / "judged"})
    assert found["metric"] == "acc"
    assert found["sets"]["SQuAD"]["judged"]["methods"] == {"Naive": [2.0, 1.0, 3.0]}


def test_the_command_writes_figure_data_and_reading_help(runs, tmp_path, capsys):
    given = [option for title, folder in runs.items() for option in ("--run", f"{title}={folder}")]
    with pytest.raises(SystemExit) as end:
        main(["backbones", *given, "--output", str(tmp_path / "figures")])
    assert end.value.code == 0
    data = json.loads((tmp_path / "figures" / "backbones.json").read_text())
    assert data == {"reading": data["reading"], **analyse(runs)}
    assert data["reading"] in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "figures" / "backbones.png").stat().st_size > 1000
    assert "</svg>" in (tmp_path / "figures" / "backbones.svg").read_text()


def test_a_metric_that_a_run_lacks_is_refused_with_those_it_has(runs):
    with pytest.raises(ValueError, match=r"no 'acc' in SQuAD of large\. .*--metric` \(acc, em, f1\)"):
        analyse(runs, "acc")
    with pytest.raises(ValueError, match=r"no 'seconds' in SQuAD of small, SQuAD of large"):
        analyse(runs, "seconds")


def test_runs_without_results_or_a_set_in_common_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r"There is no .*none.results\.json.*arcaligner evaluate --output"):
        analyse(runs | {"none": tmp_path / "none"})
    other = write(tmp_path / "c", {"MuSiQue": {"Naive": {"em": 1.0}}})
    with pytest.raises(ValueError, match="small: SQuAD, NaturalQA; other: MuSiQue"):
        analyse({"small": runs["small"], "other": other})


@pytest.mark.parametrize(
    "given, problem",
    [
        (["runs/a"], "expected TITLE=FOLDER"),
        (["=runs/a"], "expected TITLE=FOLDER"),
        (["small="], "expected TITLE=FOLDER"),
        (["small=runs/a", "small=runs/b"], "Two runs have the title 'small'"),
    ],
)
def test_runs_without_a_title_of_their_own_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        read_runs(given)
