"""The model card of a checkpoint: what its configuration, recipe and results say, in `model_card.md.jinja`.

Results are those of `results.json` beside it, as the evaluation writes them, in percent with 95 % intervals:

    {"questions": 500, "sets": {"SQuAD": {"questions": 500, "compression_rate": 33.6, "methods": {"ArcAligner":
    {"f1": [9.7, 6.5, 13.2]}}}}}
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from .configuration_arcaligner import ArcAlignerConfig
from .files import write_whole

RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"
METRIC_TITLES = {"em": "EM (non-strict)", "f1": "F1", "em_raw": "EM (raw)"}
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# In each card that is written here. Without this line it was edited, and stays as it is.
GENERATED = (
    "<!-- Written from the files beside it, and again when they change. Remove this line to edit it yourself. -->"
)

_MAIN_METHOD = "ArcAligner"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".gz", ".csv")


def write_model_card(
    config: ArcAlignerConfig, folder: Path, *, name: str | None = None, datasets: tuple[str, ...] = ()
) -> bool:
    """Writes `README.md` from the configuration and the files in `folder`, unless somebody edited it.

    Args:
        config ([`ArcAlignerConfig`]): Of the checkpoint.
        folder (`Path`): The checkpoint's, with its recipe and results where it has them.
        name (`str`, *optional*): What the quick start loads, a Hub id or a folder. Default: `folder`.
        datasets (`tuple[str, ...]`): Hub ids of the data sets that the training files were made from. Those that the
            card already names stay.

    Returns:
        `bool`: Whether it was written.

    Raises:
        `ValueError`: results or a recipe that cannot be read.
    """
    card = folder / "README.md"
    if card.exists():
        if GENERATED not in card.read_text(encoding="utf-8"):
            return False
        datasets = (*datasets, *(metadata_load(card) or {}).get("datasets", []))
    stages, results, base = _read_recipes(folder), _read_results(folder), config.base_model_name_or_path
    processor_file = folder / "processor_config.json"
    processor = json.loads(processor_file.read_text(encoding="utf-8")) if processor_file.exists() else {}
    trained_on = {source for stage in stages for source in stage["sources"] if is_hub_id(source)}
    metadata = ModelCardData(
        license="apache-2.0",
        language=_language(processor.get("spacy_model", "")),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["arcaligner", "rag", "context-compression"],
        base_model=base if is_hub_id(base) else None,
        base_model_relation="adapter" if is_hub_id(base) else None,
        datasets=sorted(trained_on | set(datasets)) or None,
        model_name="ArcAligner",
        eval_results=results and results["listed"],
    )
    given = {"config": config, "rates": processor.get("trained_tokens_per_slot"), "stages": stages, "results": results}
    given |= {"name": name or folder.as_posix(), "generated": GENERATED, "recipe_file": RECIPE_FILE}
    write_whole(card, f"{ModelCard.from_template(metadata, str(TEMPLATE), **given)}\n")
    return True


def is_hub_id(name: str | None) -> bool:
    """Whether `name` is a repository on the Hub, as far as can be told from here: neither a path nor a file."""
    is_name = name is not None and _HUB_ID.fullmatch(name) is not None
    return is_name and not name.startswith(".") and not name.endswith(_FILE_SUFFIXES) and not Path(name).exists()


def _language(spacy_model: str) -> str | None:
    """The language of a spaCy pipeline, or of a language code."""
    language = spacy_model.split("_")[0]
    return language if re.fullmatch("[a-z]{2,3}", language) and language != "xx" else None


def _read_recipes(folder: Path) -> list[dict[str, Any]]:
    """Name, sources and number of examples of each stage that the checkpoint went through, in order."""
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
    return [
        {
            "stage": recipe["stage"],
            "sources": [_source_name(source) for source in recipe.get("train_files", {})],
            "examples": f"{most:,}" if (most := recipe.get("max_train_samples")) else "all",
        }
        for recipe in recipes
    ]


def _source_name(source: str) -> str:
    """A Hub id, or the name of a file without its folder, which is one of another machine."""
    name = source.partition("?")[0]
    return name if is_hub_id(name) else Path(name).name


def _read_results(folder: Path) -> dict[str, Any] | None:
    """What the card says of the results: questions, rates, a table for each metric, and the numbers for the Hub."""
    path = folder / RESULTS_FILE
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        sets = results["sets"]
        counts = {title: each.get("questions", results["questions"]) for title, each in sets.items()}
        if len(set(counts.values())) > 1:
            questions = ", ".join(f"{title} {count:,}" for title, count in counts.items()) + " questions"
        else:
            questions = f"{results['questions']:,} questions of each set"
        rates = [
            f"{title} x{each['compression_rate']:.1f}" for title, each in sets.items() if "compression_rate" in each
        ]
        tables = {title: _table(sets, metric) for metric, title in METRIC_TITLES.items()}
        listed = [
            EvalResult("question-answering", title, title, metric, each["methods"][_MAIN_METHOD][metric][0])
            for title, each in sets.items()
            for metric in METRIC_TITLES
            if metric in each["methods"].get(_MAIN_METHOD, {})
        ]
        return {"questions": questions, "rates": rates, "sets": list(sets), "tables": tables, "listed": listed or None}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold results of an evaluation. Expected "
            '{"questions": number, "sets": {set: {"compression_rate": number, "methods": {method: {"f1": [value, low, '
            "high]}}}}}. Write them anew, or remove the file."
        ) from error


def _table(sets: dict[str, Any], metric: str) -> dict[str, list[str]]:
    """The cells of each method that has the metric, one for each set."""
    methods = dict.fromkeys(m for each in sets.values() for m, values in each["methods"].items() if metric in values)
    rows = {method: [each["methods"].get(method, {}).get(metric) for each in sets.values()] for method in methods}
    shown = "{:.1f} [{:.1f}, {:.1f}]"
    return {method: ["-" if row is None else shown.format(*row) for row in cells] for method, cells in rows.items()}
