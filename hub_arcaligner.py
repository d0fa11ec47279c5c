"""The push to the Hub: all files of a checkpoint in one commit, which is there whole or not at all.

`HfApi.upload_folder` commits in several steps where hf_xet is installed, so that one that breaks off leaves new code
beside old weights. `HfApi.create_commit` uploads first and then moves the branch once; done again, it uploads what is
missing.
"""

import contextlib
import re
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from .model_card_arcaligner import RECIPE_FILE, RESULTS_FILE, name_repository

PEFT_FOLDER = "peft_lora"

# Written by a push and by nobody else: not in the next one, they belong to an aligner that is gone.
_OWN_FILE = re.compile(
    rf"\w+_arcaligner\.py|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|{PEFT_FOLDER}/.*|"
    + "|".join(map(re.escape, (RECIPE_FILE, RESULTS_FILE)))
)


def upload_checkpoint(
    folder: Path, repo_id: str, *, commit_message: str | None = None, private: bool | None = None, token=None
) -> CommitInfo:
    """Uploads all files in `folder` to the main branch of `repo_id`, in one commit.

    Args:
        folder (`Path`): A complete checkpoint and its model card, in which the repository is named. Links are
            followed.
        repo_id (`str`): `user/name`; made when it is not there. Files in it that are not in `folder` stay, except
            former code, weights, recipe and results and a former PEFT adapter.
        commit_message (`str`, *optional*), private (`bool`, *optional*), token (`str`, *optional*): As for any model.

    Raises:
        `ValueError`: a name that is none, or a public repository where a private one was asked for.
        `PermissionError`: no token, an unknown one, or one that may not write there.
        `ConnectionError`: a push that broke off; nothing of it is visible.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} cannot be the name of a repository on the Hub: {error} Expected `user/name`, letters, "
            "digits, `-`, `_` and `.`."
        ) from error
    api = HfApi(token=token)
    if token is None and get_token() is None:
        raise PermissionError(
            f"No token to write to `{repo_id}` with. Make one with write permission at "
            f"{api.endpoint}/settings/tokens, then run `hf auth login` or set HF_TOKEN."
        )
    with _explained(repo_id, api.endpoint):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise ValueError(
                f"{repo_id} is there already and is public; nothing was uploaded. Make it private in its settings, "
                "choose another name, or push without asking for a private one."
            )
        name_repository(folder, repo_id)
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        former = [name for name in api.list_repo_files(repo_id) if _OWN_FILE.fullmatch(name) and name not in files]
        operations = [CommitOperationDelete(name) for name in former]
        operations += [CommitOperationAdd(name, path) for name, path in files.items()]
        return api.create_commit(repo_id, operations, commit_message=commit_message or "Upload ArcAligner")


@contextlib.contextmanager
def _explained(repo_id: str, endpoint: str):
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
            "all. Do it again to finish it: what has arrived is not uploaded twice."
        ) from error


__all__ = ["PEFT_FOLDER", "upload_checkpoint"]
