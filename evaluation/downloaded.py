"""Weights of others' methods: looked for in the local cache of the Hub, never fetched."""

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from .reading import MissingMethodError


def downloaded(repo_id: str, note: str) -> str:
    """
    The folder of a Hub model in the local cache; no network is tried.

    Args:
        repo_id (`str`): The model.
        note (`str`): Its size and licence, for the error.

    Raises:
        `MissingMethodError`: it is not there.
    """
    try:
        return snapshot_download(repo_id, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise MissingMethodError(
            f"{repo_id} is not on this machine; `hf download {repo_id}` gets it ({note})"
        ) from error
