"""A checkpoint for others: its model card, and its upload to the Hub.

The card (`model_card.md.jinja`) says what the configuration, `recipe.yaml` and `results.json` beside it say. Results
are those of an evaluation, in percent with 95 % intervals:

    {"questions": 500, "sets": {"SQuAD": {"questions": 500, "passages": "gold", "recall": [100.0, 100.0, 100.0],
    "methods": {"arcaligner": {"compression_rate": 2.0, "f1": [9.7, 6.5, 13.2], "em": [5.0, 2.0, 8.5]}}}}}

An upload is one commit, which is there whole or not at all. `HfApi.upload_folder` commits in several steps where hf_xet
is installed, which could leave new code beside old weights.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.repocard import ModelCard, metadata_load
from huggingface_hub.repocard_data import EvalResult, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from ..checkpoint_arcaligner import CODE_FILES, check_weights
from ..common.data_sets import LICENCES, ON_GITHUB, TRAINING_FILES, Licence
from ..common.files import ROOT, write_whole
from ..configuration_arcaligner import REQUIREMENTS, ArcAlignerConfig
from ..encoder_arcaligner import ENCODER_FOLDER
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor

logger = logging.get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"
METRIC_TITLES = {"em": "EM (non-strict)", "f1": "F1"}
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# Stands in each card that is written here. A card without this line was edited, and is not overwritten.
GENERATED = (
    "<!-- Written from the files beside it, and again when they change. Remove this line to edit it yourself. -->"
)

_MAIN_METHOD = "arcaligner"
# Rows of the card's table by a method's name, of any rate, with what a reader of the card calls it. Of all rates
# of the second only the finest is shown, which reads as many positions as the finest aligner.
_FULL_TEXT, _CUT_TEXT, _NOTHING = "full_text_lora", "truncated_copying", "naive"
_CARD_TITLES = {
    _FULL_TEXT: "the whole text, by the base model fine-tuned to read it",
    _CUT_TEXT: "the first tokens of the text, by the same",
    _MAIN_METHOD: "**slots**",
    _NOTHING: "no passages, by the base model",
}
_PASSAGES = {"given": "those of its file", "gold": "gold", "retrieved": "found in a corpus"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".gz", ".csv")
# Uploaded; other files of a training folder, such as optimizer states, are not.
_CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("processor_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "README.md"),
    *(RECIPE_FILE, RESULTS_FILE),
    f"{ENCODER_FOLDER}/*",
)
# Files of an earlier push that a new one removes when it has no such file.
_FORMER_FILE = re.compile(
    rf"\w+_arcaligner\.py|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{ENCODER_FOLDER}/.*|"
    + "|".join(map(re.escape, (RECIPE_FILE, RESULTS_FILE)))
)


# The model card


def write_model_card(
    config: ArcAlignerConfig, folder: Path, *, name: str | None = None, datasets: tuple[str, ...] = ()
) -> bool:
    """Writes `README.md` from the configuration and the files in `folder`, and says whether it did: one that was edited
    stays.

    Args:
        config ([`ArcAlignerConfig`]), folder (`Path`): The checkpoint's, with its recipe and results where it has them.
        name (`str`, *optional*): The Hub id that the quick start loads. Default: `user/name`, to be replaced.
        datasets (`tuple[str, ...]`): Hub ids of the data sets that the training files were made from. Those that the
            card already names stay.

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
    places = {place for stage in stages for place in stage["places"]}
    trained_on = {place for place in places if is_hub_id(place) and place not in ON_GITHUB}
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
    given = {"config": config, "results": results}
    given |= {"rates": processor.get("trained_tokens_per_slot"), "processor": processor}
    given |= {"stages": Counter(stage["stage"] for stage in stages), "data": _describe_data(stages)}
    given |= {
        "name": name or "user/name",
        "generated": GENERATED,
        "recipe_file": RECIPE_FILE,
        "needs": REQUIREMENTS,
    }
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
    """Name and data sets of each stage that the checkpoint went through, in order."""
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
    stages = []
    for recipe in recipes:
        sources = [_source_name(source) for source in recipe.get("train_files", {})]
        places = [place for source in sources for place in TRAINING_FILES.get(source, [source])]
        stages.append({"stage": recipe["stage"], "places": places})
    return stages


def _describe_data(stages: list[dict[str, Any]]) -> list[list[str]]:
    """Title, place, licence and stages of each data set that a checkpoint was trained on."""
    read: dict[str, dict[str, None]] = {}
    for stage in stages:
        for place in stage["places"]:
            read.setdefault(place, {})[stage["stage"]] = None
    rows = []
    for place, names in read.items():
        title, licence = LICENCES.get(place, Licence(place, "see there" if is_hub_id(place) else "not known"))
        rows.append([title, place, licence, ", ".join(names)])
    return rows


def _source_name(source: str) -> str:
    """A Hub id, or the name of a file without its folder, which is one of another machine."""
    name = source.partition("?")[0]
    return name if is_hub_id(name) else Path(name).name


def _read_results(folder: Path) -> dict[str, Any] | None:
    """What the card says of the results: questions and passages of each set, a table, and the numbers for the Hub."""
    path = folder / RESULTS_FILE
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        sets, questions = results["sets"], results["questions"]
        sets = {title: each for title, each in sets.items() if _MAIN_METHOD in each["methods"]} or sets
        described = [
            [title, f"{each.get('questions', questions):,}", *_describe_passages(each)] for title, each in sets.items()
        ]
        listed = [
            EvalResult("question-answering", title, title, metric, round(each["methods"][_MAIN_METHOD][metric][0], 1))
            for title, each in sets.items()
            for metric in METRIC_TITLES
            if metric in each["methods"].get(_MAIN_METHOD, {})
        ]
        found = {"sets": list(sets), "described": described, "rows": _result_rows(sets), "listed": listed or None}
        if not found["rows"] and any(each["methods"] for each in sets.values()):
            raise ValueError("no method has a known name")
        return found | {"machine": results.get("machine")}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold results of an evaluation. Expected "
            '{"questions": number, "sets": {set: {"methods": {name: {"f1": [value, low, high], "em": [...], '
            '"compression_rate": number}}}}}, with names such as `arcaligner_x4`. Write them again, or remove the file.'
        ) from error


def _describe_passages(each: dict[str, Any]) -> list[str]:
    """Which passages of a set are read, and how many questions they hold an expected answer of."""
    passages = each.get("passages", "given")
    return [_PASSAGES.get(passages, passages), f"{each['recall'][0]:.0f} %" if "recall" in each else "-"]


def _result_rows(sets: dict[str, Any]) -> list[list[str]]:
    """What is read, tokens of text per position, and F1 with its interval and EM of each set: text first, then slots
    from the finest rate to the coarsest."""
    rates: dict[str, list[float]] = {}
    for each in sets.values():
        for method, numbers in each["methods"].items():
            rates.setdefault(method, [])
            rates[method] += [numbers["compression_rate"]] if "compression_rate" in numbers else []
    finest = {method: min(found, default=0.0) for method, found in rates.items()}

    def of(name: str) -> list[str]:
        found = (method for method in rates if method == name or method.startswith(f"{name}_x"))
        return sorted(found, key=finest.get)

    shown = {_FULL_TEXT: of(_FULL_TEXT), _CUT_TEXT: of(_CUT_TEXT)[:1], _MAIN_METHOD: of(_MAIN_METHOD)}
    shown[_NOTHING] = of(_NOTHING)
    rows = []
    for name, methods in shown.items():
        for method in methods:
            ends = [f"x{rate:.1f}" for rate in (min(rates[method]), max(rates[method]))] if rates[method] else ["-"]
            cells = [_shown_scores(each["methods"].get(method, {})) for each in sets.values()]
            rate = "x1" if name == _FULL_TEXT else " to ".join(dict.fromkeys(ends))
            rows.append([_CARD_TITLES[name], rate, *cells])
    return rows


def _shown_scores(numbers: dict[str, Any]) -> str:
    """F1 with its interval, and non-strict EM."""
    f1 = "{:.1f} [{:.1f}, {:.1f}]".format(*numbers["f1"]) if "f1" in numbers else "-"
    return f"{f1} / {numbers['em'][0]:.1f}" if "em" in numbers else f1


# The upload


def read_aligner_config(checkpoint: str | Path) -> ArcAlignerConfig:
    """The configuration of an aligner, a folder or a Hub id.

    Raises:
        `ValueError`: a checkpoint of another model.
        `OSError`: a checkpoint that is not there.
    """
    config = ArcAlignerConfig.from_pretrained(checkpoint)
    if config.base_model_name_or_path == str(checkpoint):  # a plain model is read as the base of an aligner
        raise ValueError(
            f"{checkpoint} is a checkpoint of type {config.text_config.model_type!r}; expected 'arcaligner', that is a "
            "folder or a Hub id that an ArcAligner model was saved to."
        )
    return config


def check_checkpoint(folder: Path) -> ArcAlignerConfig:
    """Refuses a folder that no aligner can be loaded from. No weights are loaded, no base model is needed.

    Raises:
        `ValueError`: files that are missing, a trained encoder's among them, or weights that are missing, broken or
            of another shape.
    """
    names = ("config.json", "processor_config.json", "tokenizer_config.json")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} is not a complete checkpoint, it lacks {', '.join(missing)}. Name a folder that a training "
            "stage wrote, or `save_pretrained` of both model and processor."
        )
    config = read_aligner_config(folder)
    ArcAlignerProcessor.from_pretrained(folder)
    with torch.device("meta"):
        model = ArcAlignerForCausalLM(config)
    check_weights(model, sorted(map(str, folder.glob("model*.safetensors"))), str(folder))
    return config


def push_checkpoint(repo_id: str, checkpoint: str | Path, *, private: bool = False) -> CommitInfo:
    """Uploads the checkpoint in a folder to the main branch of `repo_id`, in one commit.

    Code is uploaded as it is in this package, and the model card is rewritten unless it was edited.

    Args:
        repo_id (`str`): `user/name`; made when it is not there. Other files in it stay.
        checkpoint (`str` or `Path`): Folder of a complete checkpoint; files in it may be links.
        private (`bool`): Whether only its owner may see the repository.

    Raises:
        `ValueError`: a checkpoint that cannot be loaded, an invalid `repo_id`, or a public repository where a private
            one was asked for. Nothing is uploaded.
        `PermissionError`: no token, an unknown one, or one that may not write there.
        `ConnectionError`: a push that broke off; nothing of it is visible.
    """
    validate_repo_id(repo_id)
    folder, api = Path(checkpoint), HfApi()
    config = check_checkpoint(folder)
    base = config.base_model_name_or_path
    if base is not None and not is_hub_id(base):
        logger.warning(
            f"The base model of {folder} is {base}, not a model on the Hub: others need it at the same place."
        )
    with tempfile.TemporaryDirectory() as temporary, _translate_hub_errors(repo_id, api.endpoint):
        staged = Path(temporary)
        for path in [path for pattern in _CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()]:
            copy = staged / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        for name in CODE_FILES:
            shutil.copyfile(ROOT / name, staged / name)
        write_model_card(config, staged, name=repo_id)
        if get_token() is None:
            raise PermissionError(
                f"No token to write to `{repo_id}` with. Make one with write permission at "
                f"{api.endpoint}/settings/tokens, then run `hf auth login` or set HF_TOKEN."
            )
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} is there already and is public; nothing was uploaded. Make it private in its settings, "
                "choose another name, or push without asking for a private one."
            )
        files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
        former = [name for name in api.list_repo_files(repo_id) if _FORMER_FILE.fullmatch(name) and name not in files]
        operations = [CommitOperationDelete(name) for name in former]
        operations += [CommitOperationAdd(name, path) for name, path in files.items()]
        return api.create_commit(repo_id, operations, commit_message="Upload ArcAligner")


@contextlib.contextmanager
def _translate_hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Says what a refusal or a lost connection means for the push to `repo_id`."""
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled, RuntimeError) as error:
        cause = error
        while not isinstance(cause, HfHubHTTPError) and cause.__cause__ is not None:
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if status == 401:
            raise PermissionError(
                f"The Hub does not accept the token for `{repo_id}` (401). Make a new one with write permission at "
                f"{endpoint}/settings/tokens, then run `hf auth login` or set HF_TOKEN."
            ) from error
        if status in (403, 404):
            raise PermissionError(
                f"The token may not write to `{repo_id}` ({status}). It needs write permission, and its owner to be "
                f"`{repo_id.split('/')[0]}` or a member of it: see {endpoint}/settings/tokens."
            ) from error
        raise ConnectionError(
            f"The push to `{repo_id}` broke off ({type(cause).__name__}: {cause}). A push is visible whole or not at "
            "all. Run it again to finish it: what has arrived is not uploaded twice."
        ) from error
