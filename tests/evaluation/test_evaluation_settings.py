"""Recipes and the command line decide what is evaluated; invalid settings are refused, with the valid ones."""

from pathlib import Path

import pytest

from arcaligner.evaluation.methods import METHODS
from arcaligner.evaluation.settings import RECIPES, read_settings
from arcaligner.evaluation.tasks import TASKS

NEEDED = {"checkpoint": "user/aligner", "output": "runs/x"}


def test_command_line_overrides_recipe(tmp_path):
    tasks = "{squad: {top_k: 3, num_questions: 5}, nq: }"
    (path := tmp_path / "r.yaml").write_text(f"{{checkpoint: a, batch_size: 4, tasks: {tasks}}}")
    settings = read_settings(path, NEEDED | {"methods": ["naive"], "device": None}, {"num_questions": 7})
    assert settings.checkpoint == "user/aligner" and settings.methods == ["naive"] and settings.batch_size == 4
    assert settings.device == "cpu" and settings.output == Path("runs/x")
    limits = {name: (task.top_k, task.num_questions) for name, task in settings.tasks.items()}
    assert limits == {"squad": (3, 7), "nq": (None, 7)}
    path.write_text("tasks: [nq]")
    settings = read_settings(path, NEEDED, {})
    assert list(settings.tasks) == ["nq"] and settings.methods == list(METHODS)
    path.write_text("tasks: {squad: {topk: 1}}")
    with pytest.raises(ValueError, match="Unknown key `topk` in `squad`. Did you mean `top_k`"):
        read_settings(path, NEEDED, {})


@pytest.mark.parametrize(
    ("of_tasks", "about"),
    [({}, "gold"), ({"passages": "given"}, "gold"), ({"top_k": 5}, None), ({"passages": "gold"}, None)],
)
def test_other_passages_lose_the_description(tmp_path, of_tasks, about):
    (path := tmp_path / "r.yaml").write_text("tasks: {nq: {about: gold}}")
    assert read_settings(path, NEEDED, of_tasks).tasks["nq"].about == about


def test_recipes_parse_by_name():
    """Recipes parse as intended, and an unknown name lists the known ones."""
    assert list(read_settings(None, NEEDED, {}).tasks) == list(TASKS)
    settings = read_settings("smollm2_135m", NEEDED | {"tasks": ["hotpotqa", "2wikimultihopqa"]}, {})
    passages = {name: task.passages for name, task in settings.tasks.items()}
    assert passages == {"hotpotqa": "gold", "2wikimultihopqa": "given"}  # named tasks keep the recipe's settings
    settings = read_settings("paper", NEEDED, {})
    assert list(settings.tasks) == list(TASKS)[:6] and settings.corpus
    assert {(task.passages, task.top_k) for task in settings.tasks.values()} == {("retrieved", None)}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {"paper", "smollm2_135m"}
    with pytest.raises(ValueError, match="no recipe 'mine'; expected one of paper, smollm2_135m, or the path of"):
        read_settings("mine", NEEDED, {})


def test_old_method_names_give_warning(tmp_path):
    """Names of version 0.2 are accepted as keys, in `methods` and as options."""
    (path := tmp_path / "r.yaml").write_text("{text_apart: runs/lora, methods: [naive, text_apart]}")
    with pytest.warns(FutureWarning, match="`text_apart` is now called `text_independent`"):
        settings = read_settings(path, NEEDED, {})
    assert settings.text_independent == "runs/lora" and settings.methods == ["naive", "text_independent"]
    path.write_text("text_independent: runs/lora")
    with pytest.warns(FutureWarning, match="text_independent"):
        assert read_settings(path, NEEDED | {"text_apart": "runs/other"}, {}).text_independent == "runs/other"


@pytest.mark.parametrize(
    "changes, of_tasks, message",
    [
        ({"tasks": ["squat"]}, {}, "Unknown key `squat` in the tasks. Did you mean `squad`"),
        ({"methods": ["arcalinger"]}, {}, "no method 'arcalinger'; expected one of naive"),
        ({"methods": []}, {}, "No method was given"),
        ({"color": "red"}, {}, "Unknown key `color` in the evaluation"),
        ({"tasks": ["squad"]}, {"passages": "golden"}, "`passages` is 'golden'; expected one of given, gold"),
        ({"tasks": ["squad"]}, {"top_k": 0}, "`top_k` is 0; expected a whole number of at least 1"),
        (
            {"tasks": ["squad"]},
            {"passages": "retrieved"},
            "`passages` is 'retrieved' for squad, but no corpus was given",
        ),
        ({"tasks": ["squad"], "corpus": "texts"}, {}, "`--corpus` has no effect.*Add `--passages retrieved`"),
        ({"batch_size": 0}, {}, "`batch_size` is 0"),
        ({"checkpoint": None}, {}, "No aligner was given"),
        ({"output": None}, {}, "No folder was given"),
    ],
)
def test_invalid_settings_are_refused(changes, of_tasks, message):
    with pytest.raises(ValueError, match=message):
        read_settings(None, NEEDED | changes, of_tasks)
