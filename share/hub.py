"""Model card of a checkpoint, and its upload to the Hub.

The card (`model_card.md.jinja`) is filled from the configuration, `recipe.yaml` and `results.json` in its folder.
Results are those of an evaluation, in percent with 95 % intervals:

    {"sets": {"SQuAD": {"methods": {"arcaligner": {"f1": [9.7, 6.5, 13.2]}, "arcaligner_x4": {"f1": ...}}}}}

An upload is one commit, so it is atomic. `HfApi.upload_folder` commits in several steps where hf_xet
is installed, which could leave new code with old weights.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.repocard import ModelCard
from huggingface_hub.repocard_data import ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from ..common.data_sets import LICENCES, ON_GITHUB, TRAINING_FILES
from ..common.files import ROOT, write_atomically
from ..configuration_arcaligner import DEFAULT_BASE_MODEL, REQUIREMENTS, ArcAlignerConfig
from ..encoder_arcaligner import ENCODER_FOLDER
from ..loading_arcaligner import CODE_FILES, check_weights
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor

logger = logging.get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
RESULTS_FILE = "results.json"
TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# Part of each generated card. A card without this line was edited, and is not overwritten.
GENERATED = (
    "<!-- Generated from the other files of this folder whenever they change. Remove this line to edit it yourself. -->"
)

FEW_QUESTIONS = 50  # results of fewer questions say little: such a set is left out of cards and figures with other sets
_MAIN = "arcaligner"  # the method in results that is the aligner with the checkpoint's `tokens_per_slot`
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".gz", ".csv")
# Files to upload; others of a training folder, such as optimizer states, are not.
_CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("processor_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "README.md"),
    *(RECIPE_FILE, RESULTS_FILE),
    f"{ENCODER_FOLDER}/*",
)
# Files of an earlier push that a push without such a file removes.
_FORMER_FILE = re.compile(
    rf"\w+_arcaligner\.py|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{ENCODER_FOLDER}/.*|"
    + "|".join(map(re.escape, (RECIPE_FILE, RESULTS_FILE)))
)


# The model card


def write_model_card(config: ArcAlignerConfig, folder: Path) -> bool:
    """Write the [`model_card`] to `README.md`, unless that file was edited. Return whether it was written."""
    if (card := model_card(config, folder)) is not None:
        write_atomically(folder / "README.md", card)
    return card is not None


def model_card(config: ArcAlignerConfig, folder: Path, name: str | None = None) -> str | None:
    """The model card, made from the configuration and the files in `folder`; `None` if the card there was edited.

    Args:
        config ([`ArcAlignerConfig`]): The configuration of the checkpoint.
        folder (`Path`): Its folder, with its recipe and the results of an evaluation, if there are any.
        name (`str`, *optional*): The Hub id in the card's example. By default the example asks for the folder's path.

    Raises:
        `ValueError`: the results or the recipe cannot be read.
    """
    card = folder / "README.md"
    if card.exists() and GENERATED not in card.read_text(encoding="utf-8"):
        return None
    processor_file = folder / "processor_config.json"
    processor = json.loads(processor_file.read_text(encoding="utf-8")) if processor_file.exists() else {}
    (stages, data), results = _read_recipes(folder), _read_results(folder, processor)
    rows = []
    for source, names in data.items():
        title, licence = LICENCES.get(source, (source, "see its page on the Hub" if is_hub_id(source) else "unknown"))
        rows.append([title, source, licence, ", ".join(names)])
    base, language = config.base_model_name_or_path, processor.get("spacy_model", "").split("_")[0]
    metadata = ModelCardData(
        license="apache-2.0",
        language=language if re.fullmatch("[a-z]{2,3}", language) and language != "xx" else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["arcaligner", "rag", "context-compression"],
        base_model=base if is_hub_id(base) else None,
        base_model_relation="adapter" if is_hub_id(base) else None,
        datasets=sorted({source for source in data if is_hub_id(source)} - {*ON_GITHUB}) or None,
    )
    fields = {"config": config, "results": results, "processor": processor, "needs": REQUIREMENTS}
    fields |= {"default_base": DEFAULT_BASE_MODEL}
    fields |= {"tokens_per_slot": processor.get("trained_tokens_per_slot"), "data": rows, "stages": stages}
    fields |= {"name": name, "generated": GENERATED}
    return f"{ModelCard.from_template(metadata, str(TEMPLATE), **fields)}\n"


def is_hub_id(name: str | None) -> bool:
    """Whether `name` is a repository on the Hub, as far as its form shows: neither a path nor a file."""
    is_name = name is not None and _HUB_ID.fullmatch(name) is not None
    return is_name and not name.startswith(".") and not name.endswith(_FILE_SUFFIXES) and not Path(name).exists()


def _read_recipes(folder: Path) -> tuple[Counter[str], dict[str, dict[str, None]]]:
    """The number of recipes of each stage of the checkpoint's training, and for each data set the stages that used
    it."""
    path, stages, data = folder / RECIPE_FILE, Counter(), {}
    if not path.exists():
        return stages, data
    try:
        for recipe in filter(None, yaml.safe_load_all(path.read_text(encoding="utf-8"))):
            stages[recipe["stage"]] += 1
            for source in recipe.get("train_files", {}):
                name = source.partition("?")[0]
                name = name if is_hub_id(name) else Path(name).name  # the folder is on another machine
                for data_set in TRAINING_FILES.get(name, [name]):
                    data.setdefault(data_set, {})[recipe["stage"]] = None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not contain recipes of stages ({error!r}); expected YAML with the settings of each stage, "
            "such as `stage: grounding`, and `---` between stages. Correct or remove the file."
        ) from error
    return stages, data


def _read_results(folder: Path, processor: dict[str, Any]) -> dict[str, Any] | None:
    """Results for the card: F1 of each method on each question set, and which passages were used; `None` without
    results."""
    path = folder / RESULTS_FILE
    if not path.exists():
        return None
    default = processor.get("tokens_per_slot", "-")
    others = [number for number in processor.get("trained_tokens_per_slot") or () if number != default]
    methods = [("the whole text, with the base model fine-tuned on text", 1, "full_text_lora")]
    methods += [("**slots**", default, _MAIN), *(("**slots**", number, f"{_MAIN}_x{number}") for number in others)]
    methods += [("no passages, with the bare base model", "-", "naive")]
    try:
        sets = json.loads(path.read_text(encoding="utf-8"))["sets"]
        sets = with_enough_questions({title: entry for title, entry in sets.items() if _MAIN in entry["methods"]})
        rows = []
        for title, tokens_per_slot, name in methods:
            scores = [_shown_f1(entry, name) for entry in sets.values()]
            if any(score is not None for score in scores):
                rows.append([title, tokens_per_slot, *("-" if score is None else score for score in scores)])
        rows.append(["*number of questions*", "", *(entry.get("questions", "-") for entry in sets.values())])
        rows.append(["*which passages*", "", *(entry.get("passages", "given") for entry in sets.values())])
        recalls = (f"{entry['recall'][0]:.0f} %" if "recall" in entry else "-" for entry in sets.values())
        rows.append(["*questions whose passages contain a gold answer*", "", *recalls])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not contain results of an evaluation ({error!r}); expected "
            '{"sets": {set: {"methods": {"arcaligner": {"f1": [value, low, high]}}}}}. Write the file again, or '
            "remove it."
        ) from error
    return {"sets": list(sets), "rows": rows} if sets else None


def _shown_f1(entry: dict[str, Any], method: str) -> str | None:
    """The F1 of a method on a set, with the number of its questions if other methods answered more."""
    if (numbers := entry["methods"].get(method)) is None:
        return None
    count = numbers.get("questions")
    return f"{numbers['f1'][0]:.1f}" + (f" of {count}" if count and count < entry.get("questions", count) else "")


def with_enough_questions(sets: dict[str, Any]) -> dict[str, Any]:
    """The sets of results with at least `FEW_QUESTIONS` questions; all sets if none has as many."""
    large = {title: entry for title, entry in sets.items() if entry.get("questions", FEW_QUESTIONS) >= FEW_QUESTIONS}
    return large or sets


# The upload


def read_aligner_config(checkpoint: str | Path) -> ArcAlignerConfig:
    """The configuration of an aligner, a folder or a Hub id.

    Raises:
        `ValueError`: the checkpoint has another model type.
        `OSError`: there is no such checkpoint.
    """
    config = ArcAlignerConfig.from_pretrained(checkpoint)
    if config.base_model_name_or_path == str(checkpoint):  # a plain model loads as an untrained aligner around it
        raise ValueError(
            f"{checkpoint} is a checkpoint of type {config.text_config.model_type!r}; expected 'arcaligner'. Pass the "
            "folder or the Hub id of an aligner."
        )
    return config


def check_checkpoint(folder: Path) -> ArcAlignerConfig:
    """Raise for a folder from which no aligner can be loaded. No weights are loaded, and no base model is needed.

    Raises:
        `ValueError`: files are missing, also those of a trained encoder, or weights are missing, broken or of a
            different shape.
    """
    names = ("config.json", "processor_config.json", "tokenizer_config.json")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} is not a complete checkpoint: it lacks {', '.join(missing)}. Pass a folder that a training "
            "stage wrote, or to which both the model and the processor were saved with `save_pretrained`."
        )
    config = read_aligner_config(folder)
    ArcAlignerProcessor.from_pretrained(folder)
    with torch.device("meta"):
        model = ArcAlignerForCausalLM(config)
    check_weights(model, sorted(map(str, folder.glob("model*.safetensors"))), str(folder))
    return config


def push_checkpoint(repo_id: str, checkpoint: str | Path, *, private: bool = False) -> CommitInfo:
    """Upload the checkpoint in a folder to the main branch of `repo_id`, in one commit.

    The code is that of this package, and the model card is rewritten unless it was edited.

    Args:
        repo_id (`str`): `user/name`; created if it does not exist. Other files in it are kept.
        checkpoint (`str` or `Path`): Folder of a complete checkpoint; files in it may be links.
        private (`bool`): Whether only its owner may see the repository.

    Raises:
        `ValueError`: the checkpoint cannot be loaded, `repo_id` is invalid, or the repository is public and `private`
            is true. Nothing is uploaded.
        `PermissionError`: there is no token, it is invalid, or it may not write there.
        `ConnectionError`: the push was interrupted; no commit was made.
    """
    validate_repo_id(repo_id)
    folder, api = Path(checkpoint), HfApi()
    config = check_checkpoint(folder)
    base = config.base_model_name_or_path
    if base is not None and not is_hub_id(base):
        logger.warning(
            f"The base model of {folder} is {base}, not a model on the Hub. Others can load the checkpoint only if "
            "they have the base model at the same path."
        )
    files = {name: ROOT / name for name in CODE_FILES}
    for path in (path for pattern in _CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()):
        files[path.relative_to(folder).as_posix()] = path
    if (card := model_card(config, folder, repo_id)) is not None:
        files["README.md"] = card.encode()
    if get_token() is None:
        raise PermissionError(
            f"No Hub token was found, so nothing can be pushed to `{repo_id}`. Make a token with write permission at "
            f"{api.endpoint}/settings/tokens, then run `hf auth login` or set the environment variable HF_TOKEN."
        )
    with _translate_hub_errors(repo_id, api.endpoint):
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} exists and is public; expected a private repository. Nothing was uploaded. Make it private "
                "in its settings, choose another name, or leave out `--private`."
            )
        former = [name for name in api.list_repo_files(repo_id) if _FORMER_FILE.fullmatch(name) and name not in files]
        operations = [CommitOperationDelete(name) for name in former]
        operations += [CommitOperationAdd(name, content) for name, content in sorted(files.items())]
        return api.create_commit(repo_id, operations, commit_message="Upload ArcAligner")


@contextlib.contextmanager
def _translate_hub_errors(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the Hub into errors that say what to do about the push to `repo_id`."""
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled, RuntimeError) as error:
        cause = error
        while not isinstance(cause, HfHubHTTPError) and cause.__cause__ is not None:
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise PermissionError(
                f"The Hub token may not write to `{repo_id}` (status {status}). Make a token with write permission at "
                f"{endpoint}/settings/tokens, as the user `{repo_id.split('/')[0]}` or, if that is an organization, as "
                "a member of it. Then run `hf auth login` or set the environment variable HF_TOKEN."
            ) from error
        raise ConnectionError(
            f"The push to `{repo_id}` was interrupted ({type(cause).__name__}: {cause}). No commit was made. Push "
            "again: files that were already uploaded are not sent again."
        ) from error
