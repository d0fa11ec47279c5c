"""The settings of an evaluation: the keys of a recipe, overridden by the command line."""

import dataclasses
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ..common.files import find_path, refuse_unknown
from .judge import JUDGE
from .methods import METHODS, NEW_NAMES, Checkpoints, find_method
from .tasks import TASKS

RECIPES = Path(__file__).parent / "recipes"
PASSAGES = ("given", "gold", "retrieved")


@dataclass(frozen=True)
class TaskSettings:
    """Settings of one task."""

    passages: str = "given"  # all of a row; "gold": only those that the answer needs; "retrieved": from a corpus
    top_k: int | None = None  # number of passages to use. Default: all, or one if they are retrieved
    num_questions: int | None = None  # maximum number of questions. Default: that of the task
    about: str | None = None  # a description of the passages, for tables

    def __post_init__(self):
        if self.passages not in PASSAGES:
            raise ValueError(f"`passages` is {self.passages!r}; expected one of {', '.join(PASSAGES)}.")
        for key in ("top_k", "num_questions"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"`{key}` is {value!r}; expected a whole number of at least 1. Leave `{key}` out for the default."
                )


@dataclass(frozen=True)
class PaperSettings:
    """What `arcaligner reproduce` needs in addition to an evaluation; its fields are the keys of `reproduce` in a
    recipe."""

    tasks: dict[str, dict] = field(default_factory=dict)  # settings of tasks that are not in the recipe's `tasks`
    judge: str = JUDGE
    endpoint: str | None = None  # address of the judge; without one, nothing is judged
    backbone: str = "SmolLM2-135M-Instruct"  # of the recipe's aligner, in figures
    backbones: dict[str, str] = field(default_factory=dict)  # title -> an aligner of another backbone
    # An aligner whose gates were trained, for gates, cases and ablations. Default: the recipe's.
    gated: str | None = None
    stage_one: dict[str, str] = field(default_factory=dict)  # title -> an aligner after stage I, for perplexity
    held_out: str = "recon_heldout.jsonl.gz"  # texts that were not trained on: a file in `data`, or a path
    retrieval: dict[str, Any] | None = None  # how passages are found. Default: the passages of the tasks' rows
    ratios: dict[str, str] = field(default_factory=dict)  # title -> an aligner with another segmentation
    # Without `ratios`: the tokens per slot to compare with the recipe's aligner.
    tokens_per_slot: list[int | str] = field(default_factory=lambda: [2, 4, 8, 16, "segment"])

    @classmethod
    def of(cls, keys: dict[str, Any] | None) -> "PaperSettings":
        """Settings from the keys of a recipe. Paths that exist only in this package are resolved there."""
        refuse_unknown("`reproduce`", keys or {}, _fields(cls))
        settings = cls(**keys or {})
        paths = {
            name: {title: str(find_path(path)) for title, path in (getattr(settings, name) or {}).items()}
            for name in ("backbones", "stage_one", "ratios")
        }
        return dataclasses.replace(settings, **paths, gated=settings.gated and str(find_path(settings.gated)))


@dataclass(kw_only=True)
class EvaluationSettings(Checkpoints):
    """An evaluation; its fields are the keys of a recipe."""

    tasks: dict[str, TaskSettings]  # by name
    methods: list[str]  # names of `methods.METHODS`, which may end in tokens per slot, such as `arcaligner_x4`
    output: Path  # the run's folder
    data: Path | None = None  # a folder with local files of the tasks
    corpus: str | None = None  # a folder that the aligner made, for retrieved passages
    batch_size: int = 16
    floor: bool = False  # whether to also answer each question from the passages of another
    reproduce: PaperSettings | dict | None = None

    def __post_init__(self):
        if not isinstance(self.reproduce, PaperSettings):
            self.reproduce = PaperSettings.of(self.reproduce)
        self.checkpoint = str(find_path(self.checkpoint))
        self.output, self.data = Path(self.output), self.data and Path(self.data)
        for kind, names in (("task", self.tasks), ("method", self.methods)):
            if not names:
                raise ValueError(
                    f"No {kind} was given; expected at least one. Pass one with `--{kind}s`, or as `{kind}s` in the "
                    "recipe."
                )
        refuse_unknown("the tasks", self.tasks, TASKS)
        for name in self.methods:
            find_method(name)
        if self.batch_size < 1:
            raise ValueError(f"`batch_size` is {self.batch_size}; expected at least 1.")
        retrieving = [name for name, task in self.tasks.items() if task.passages == "retrieved"]
        if retrieving and self.corpus is None:
            raise ValueError(
                f"`passages` is 'retrieved' for {', '.join(retrieving)}, but no corpus was given. Build one with "
                "`arcaligner corpus build`, and pass its folder with `--corpus`, or as `corpus` in the recipe."
            )


def read_settings(recipe: str | None, command_keys: dict[str, Any], of_tasks: dict[str, Any]) -> EvaluationSettings:
    """
    Settings of a recipe and the command line.

    Args:
        recipe (`str`, *optional*): Name of one in `evaluation/recipes`, or a file.
        command_keys (`dict`): Keys of the command line, which override those of the recipe unless they are `None`.
        of_tasks (`dict`): Keys of `TaskSettings` on the command line, for all tasks.
    """
    keys = read_recipe(recipe) if recipe else {}
    of_recipe = keys.get("tasks", {})
    if isinstance(of_recipe, dict):
        of_recipe = ((keys.get("reproduce") or {}).get("tasks") or {}) | of_recipe
    corpus_of_recipe = keys.get("corpus")
    keys |= {key: value for key, value in command_keys.items() if value is not None}
    keys = _with_new_names(keys)
    refuse_unknown("the evaluation's settings", keys, _fields(EvaluationSettings))
    if "checkpoint" not in keys:
        raise ValueError("No aligner was given. Pass one with `--checkpoint`, or as `checkpoint` in the recipe.")
    if "output" not in keys:
        raise ValueError("No folder was given for the answers. Pass one with `--output`, or as `output` in the recipe.")
    over, tasks = {key: value for key, value in of_tasks.items() if value is not None}, {}
    for name in keys.get("tasks", TASKS):
        task_keys = (of_recipe.get(name) if isinstance(of_recipe, dict) else None) or {}
        refuse_unknown(f"`{name}`", task_keys, _fields(TaskSettings))
        of_task = TaskSettings(**task_keys)
        task = replace(of_task, **over)
        other_corpus = task.passages == "retrieved" and keys.get("corpus") != corpus_of_recipe
        if other_corpus or (task.passages, task.top_k) != (of_task.passages, of_task.top_k):
            # The recipe describes other passages.
            task = replace(task, about=over.get("about"))
        tasks[name] = task
    if command_keys.get("corpus") is not None and all(task.passages != "retrieved" for task in tasks.values()):
        raise ValueError(
            "`--corpus` has no effect, because passages are not retrieved. Add `--passages retrieved`, or leave out "
            "`--corpus`."
        )
    return EvaluationSettings(**{"methods": list(METHODS)} | keys | {"tasks": tasks})


def _with_new_names(keys: dict[str, Any]) -> dict[str, Any]:
    """Settings with the new names of methods, as keys and in `methods`; old names give a warning."""
    methods = keys.get("methods")
    for old, new in NEW_NAMES.items():
        if old in keys or old in (methods or ()):
            message = f"The method `{old}` is now called `{new}`; the old name will be removed in the next release."
            warnings.warn(message, FutureWarning, stacklevel=3)
    keys = {NEW_NAMES.get(key, key): value for key, value in keys.items()}
    return keys if methods is None else keys | {"methods": [NEW_NAMES.get(name, name) for name in methods]}


def split_names(names: str | None) -> list[str] | None:
    """
    Names separated by commas.

    >>> split_names("squad, nq")
    ['squad', 'nq']
    """
    return names and [name.strip() for name in names.split(",")]


def split_tokens_per_slot(values: str | None) -> list[int | str] | None:
    """
    Values of `tokens_per_slot` separated by commas.

    >>> split_tokens_per_slot("4,16,segment")
    [4, 16, 'segment']
    """
    return values and [int(value) if value.isdecimal() else value for value in split_names(values)]


def read_recipe(recipe: str) -> dict[str, Any]:
    """The keys of a recipe, by its name or file."""
    for path in (RECIPES / f"{recipe}.yaml", Path(recipe)):
        if path.is_file():
            return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    raise ValueError(f"There is no recipe {recipe!r}; expected one of {known}, or the path of a YAML file.")


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}
