"""The model card of a checkpoint: what its configuration, recipe and results say, and a quick start.

Results are read from `results.json` beside it, in percent with the ends of their 95 % intervals, as
`evaluation/results.py` writes it; what else it says is left out here. A set of another size says its own `questions`:

    {"questions": 500, "sets": {"SQuAD": {"questions": 500, "compression_rate": 33.6, "methods": {"ours (adaptive)":
    {"f1": [9.7, 6.5, 13.2]}}}}}
"""

import json
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load

RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"

# Stands for the repository until there is one.
_REPOSITORY = "THIS_REPOSITORY"
_QUICK_START = f"""```python
from transformers import pipeline

ask = pipeline("text-generation", model="{_REPOSITORY}", trust_remote_code=True)
ask({{"question": "Who wrote it?", "documents": ["It was written by Ada."]}})
```"""
_NAMED_IN_QUICK_START = re.compile(r'(pipeline\("text-generation", model=")[^"]*(")')
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".gz", ".csv")
_GENERATED = (
    "<!-- Written from the files beside it, and again when they change. Remove this line to edit it yourself. -->"
)
_MAIN_METHOD = "ArcAligner"
METRIC_TITLES = {"em": "EM (non-strict)", "f1": "F1", "em_raw": "EM (raw)"}
_LIMITS = """\
- A slot is lossy: names, numbers and dates of a sentence can come out wrong. Check answers against the passages.
- The aligner reads passages like those it was trained on; other languages and kinds of text it reads less well.
- What the base model gets wrong or has learnt from biased text, this model does too."""
_LICENCE = """\
Code and aligner weights: Apache-2.0. The base model, the sentence encoder and the training data keep their own
licences."""


def write_model_card(config, folder: Path, *, datasets: tuple[str, ...] = ()) -> bool:
    """A model card with what the configuration and the files in `folder` know; one that somebody edited is left alone.

    Args:
        config ([`ArcAlignerConfig`]): The checkpoint's.
        folder (`Path`): With the checkpoint's recipe and results, where it has them.
        datasets (`tuple[str, ...]`): Hub ids of data sets that the training files were made from; those that the card
            names already stay.

    Returns:
        `bool`: Whether it was written.

    Raises:
        `ValueError`: results or a recipe that cannot be read.
    """
    card = folder / "README.md"
    if card.exists():
        if _GENERATED not in card.read_text(encoding="utf-8"):
            return False
        datasets = (*datasets, *(metadata_load(card) or {}).get("datasets", []))
    recipes = _read_recipes(folder)
    results = _read_results(folder)
    sections = [
        f"---\n{_metadata(config, folder, recipes, results, datasets).to_yaml()}\n---\n{_GENERATED}",
        "# ArcAligner",
        "Reads retrieved passages as context slots, one vector a sentence, with a frozen language model "
        "([paper](https://huggingface.co/papers/2601.05038)).",
        _settings_table(config),
        _QUICK_START,
        *(["## Results", *_results_section(results)] if results else []),
        *(["## Training", _recipes_table(recipes)] if recipes else []),
        "## Limits",
        _LIMITS,
        "## Licence",
        _LICENCE,
    ]
    temporary = card.with_suffix(".tmp")
    temporary.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    temporary.replace(card)
    return True


def name_repository(folder: Path, repo_id: str) -> None:
    """Writes the name of the repository into the quick start of the model card in `folder`."""
    card = folder / "README.md"
    text = _NAMED_IN_QUICK_START.sub(rf"\g<1>{repo_id}\g<2>", card.read_text(encoding="utf-8"))
    card.write_text(text, encoding="utf-8")


def is_hub_id(name: str | None) -> bool:
    """Whether `name` is one of the Hub, as far as can be told from here: no path, no file."""
    is_name = name is not None and _HUB_ID.fullmatch(name) is not None
    return is_name and not name.startswith(".") and not name.endswith(_FILE_SUFFIXES) and not Path(name).exists()


def _read_recipes(folder: Path) -> list[dict]:
    """The recipes of the stages the checkpoint went through, in order."""
    path = folder / RECIPE_FILE
    if not path.exists():
        return []
    try:
        recipes = [recipe for recipe in yaml.safe_load_all(path.read_text(encoding="utf-8")) if recipe]
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({error}). Put the recipe the aligner was trained with there.") from error
    for number, recipe in enumerate(recipes, start=1):
        if not isinstance(recipe, dict) or "stage" not in recipe:
            raise ValueError(
                f"{path}: recipe {number} of {len(recipes)} has no `stage`. Expected the keys that a stage was trained "
                "with, `stage: grounding` among them, a line of `---` between stages. Add it, or remove the file."
            )
    return recipes


def _read_results(folder: Path) -> dict | None:
    """The results beside the card; `None` when nothing was measured."""
    path = folder / RESULTS_FILE
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        for each in results["sets"].values():
            each["methods"] = {
                method: {metric: values[metric] for metric in METRIC_TITLES if metric in values}
                for method, values in each["methods"].items()
            }
        _results_section(results)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold results of an evaluation. Expected "
            '{"questions": number, "sets": {set: {"compression_rate": number, "methods": {method: {"f1": [value, low, '
            "high]}}}}}. Write them anew, or remove the file."
        ) from error
    return results


def _metadata(config, folder: Path, recipes, results, datasets: tuple[str, ...]) -> ModelCardData:
    base = config.base_model_name_or_path
    has_base = is_hub_id(base)
    trained_on = {name for recipe in recipes for name in _sources(recipe) if is_hub_id(name)}
    return ModelCardData(
        license="apache-2.0",
        language=_language(folder),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["arcaligner", "rag", "context-compression"],
        base_model=base if has_base else None,
        base_model_relation="adapter" if has_base else None,
        datasets=sorted(trained_on | set(datasets)) or None,
        model_name="ArcAligner",
        eval_results=_eval_results(results) if results else None,
    )


def _language(folder: Path) -> str | None:
    """The language passages are split into sentences in, from the processor beside the card."""
    path = folder / "processor_config.json"
    if not path.exists():
        return None
    language = json.loads(path.read_text(encoding="utf-8"))["spacy_model"].split("_")[0]
    return language if re.fullmatch("[a-z]{2,3}", language) and language != "xx" else None


def _eval_results(results: dict) -> list[EvalResult] | None:
    """The main method's numbers, as the Hub lists them."""
    return [
        EvalResult(
            task_type="question-answering",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric,
            metric_value=value,
        )
        for name, each in results["sets"].items()
        for metric, (value, _, _) in each["methods"].get(_MAIN_METHOD, {}).items()
    ] or None


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _settings_table(config) -> str:
    base = config.base_model_name_or_path
    rows = [
        ["base model", base or "in this checkpoint"],
        ["sentence encoder", f"{config.encoder_name_or_path}, {config.encoder_hidden_size} wide"],
        ["LoRA on slots", f"r {config.lora_r}, alpha {config.lora_alpha}"],
        ["gates", f"{len(config.gated_layers)} layers, at most {config.max_refinement_steps} extra passes"],
    ]
    return _table(["", ""], rows)


def _recipes_table(recipes: list[dict]) -> str:
    rows = []
    for recipe in recipes:
        most = recipe.get("max_train_samples")
        rows.append([str(recipe["stage"]), ", ".join(_sources(recipe)), f"{most:,}" if most else "all"])
    return _table(["stage", "data", "most examples"], rows) + f"\n\nAll settings are in `{RECIPE_FILE}`."


def _sources(recipe: dict) -> list[str]:
    """What a stage was trained on: Hub ids, and of a file its name, since its folder is of another machine."""
    names = [source.partition("?")[0] for source in recipe.get("train_files", {})]
    return [name if is_hub_id(name) else Path(name).name for name in names]


def _results_section(results: dict) -> list[str]:
    """What was measured and, for each metric, a table of methods and sets."""
    sets, asked = results["sets"], results["questions"]
    methods = dict.fromkeys(method for each in sets.values() for method in each["methods"])
    rates = ", ".join(
        f"{name} x{each['compression_rate']:.1f}" for name, each in sets.items() if "compression_rate" in each
    )
    counts = {name: each.get("questions", asked) for name, each in sets.items()}
    if len(set(counts.values())) > 1:
        described = ", ".join(f"{name} {count:,}" for name, count in counts.items()) + " questions"
    else:
        described = f"{asked:,} questions of each set"
    section = [f"{described}, in percent with 95 % bootstrap intervals."]
    if rates:
        section.append(f"Measured compression rate (tokens of text a slot): {rates}.")
    for metric, title in METRIC_TITLES.items():
        rows = [
            [method, *(_cell(each["methods"].get(method, {}).get(metric)) for each in sets.values())]
            for method in methods
            if any(metric in each["methods"].get(method, {}) for each in sets.values())
        ]
        if rows:
            section.append(_table([title, *sets], rows))
    return section


def _cell(interval: list[float] | None) -> str:
    return "-" if interval is None else "{:.1f} [{:.1f}, {:.1f}]".format(*interval)


__all__ = ["RECIPE_FILE", "RESULTS_FILE", "is_hub_id", "name_repository", "write_model_card"]
