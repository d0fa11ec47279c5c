"""A checkpoint folder to the Hub: checked, then uploaded in one commit, which is there whole or not at all.

`HfApi.upload_folder` commits in several steps where hf_xet is installed, which could leave new code beside old weights.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from .checkpoint_arcaligner import CODE_FILES, check_aligner_weights, tensor_shapes
from .configuration_arcaligner import ArcAlignerConfig
from .encoder_arcaligner import ENCODER_FOLDER
from .model_card import RECIPE_FILE, RESULTS_FILE, is_hub_id, write_model_card
from .modeling_arcaligner import ArcAlignerForCausalLM
from .processing_arcaligner import ArcAlignerProcessor

logger = logging.get_logger(__name__)

# What a training folder holds beside these, such as optimizer states, is not for others.
_CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("processor_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "README.md"),
    *(RECIPE_FILE, RESULTS_FILE),
    *(f"{ENCODER_FOLDER}/*", f"{ENCODER_FOLDER}/*/*.json"),
)
# Files of a former push that the next one removes when it has no such file: they belong to an aligner that is gone.
_FORMER_FILE = re.compile(
    rf"\w+_arcaligner\.py|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{ENCODER_FOLDER}/.*|"
    + "|".join(map(re.escape, (RECIPE_FILE, RESULTS_FILE)))
)


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
    """Refuses a folder that nobody could load an aligner from. No weights are loaded, no base model is needed.

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
    shapes = tensor_shapes(sorted(map(str, folder.glob("model*.safetensors"))))
    check_aligner_weights(model, shapes, str(folder), ignore_mismatched_sizes=False)
    return config


def push_checkpoint(repo_id: str, checkpoint: str | Path, *, private: bool = False) -> CommitInfo:
    """Uploads the checkpoint in a folder to the main branch of `repo_id`, in one commit.

    Code is uploaded as it is in this package, and the model card is written anew unless somebody edited it.

    Args:
        repo_id (`str`): `user/name`; made when it is not there. Other files in it stay.
        checkpoint (`str` or `Path`): Folder of a complete checkpoint; files in it may be links.
        private (`bool`): Whether only its owner may see the repository.

    Raises:
        `ValueError`: a checkpoint that nobody could load, an invalid `repo_id`, or a public repository where a private
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
            shutil.copyfile(Path(__file__).with_name(name), staged / name)
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
