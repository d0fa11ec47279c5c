"""Files of models and checkpoints: where they are, written whole, and bound to each other by digests.

A model that a checkpoint names, its base model or sentence encoder, is looked for as a folder, in the folder
`$ARCALIGNER_MODELS`, and on the Hub.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from .configuration_arcaligner import check_settings, settings_digests

# Where models are

# Of a repository on the Hub: configuration and tokenizer, the weights of a base model, and all of a sentence encoder.
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
BASE_MODEL_FILES = (*TEXT_FILES, "model*.safetensors")
ENCODER_FILES = (*TEXT_FILES, "*.safetensors")
_OTHER_FORMATS = ("onnx/*", "openvino/*", "original/*")


def models_directory() -> Path:
    """Where copies of models are, under their Hub ids: `$ARCALIGNER_MODELS`, else `arcaligner/models` in the user's
    cache folder."""
    if own := os.environ.get("ARCALIGNER_MODELS"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arcaligner" / "models"


def resolve_model(name: str) -> str:
    """The folder of a copy of a model, a folder or a Hub id, on this machine; else the name."""
    copy = models_directory() / name
    return str(copy) if not os.path.isdir(name) and copy.is_dir() else name


def find_model(kind: str, name: str, files: Iterable[str], **download: Any) -> Path:
    """The folder of a model, which is downloaded if it is not on this machine. The Hub is asked once.

    Args:
        kind (`str`): What it is, for an error.
        name (`str`): A folder or a Hub id.
        files (`Iterable[str]`): Patterns of the files that are wanted from the Hub.
        download: Arguments of `snapshot_download`, such as `revision`.

    Raises:
        `OSError`: a model that is neither here nor can be downloaded, with how to get it.
    """
    if (folder := Path(resolve_model(name))).is_dir():
        return folder
    try:
        found = snapshot_download(name, allow_patterns=[*files], ignore_patterns=[*_OTHER_FORMATS], **download)
        return Path(found)
    except (OSError, HFValidationError) as error:
        raise OSError(missing_model_message(kind, name, error)) from error


def missing_model_message(kind: str, name: str, error: Exception) -> str:
    """Two lines: which model is missing, and how to get it."""
    if isinstance(error, PermissionError):
        return (
            f"The {kind} `{name}` cannot be written to the Hub's cache ({error}).\n"
            "Set HF_HOME to a folder that you may write to."
        )
    return (
        f"The {kind} `{name}` is not on this machine, and the Hub does not give it ({type(error).__name__}).\n"
        f"Where there is a network: `hf download {name} --local-dir FOLDER/{name}`; here: ARCALIGNER_MODELS=FOLDER."
    )


# Files that are read


def read_tensors(files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors in safetensors files, one after the other.

    Raises:
        `ValueError`: a file that is not safetensors, or only a part of it.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    yield key, tensors.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}). Save it again, or download it again.") from error


def tensor_shapes(checkpoint_files: list[str]) -> dict[str, list[int]]:
    """Names and shapes of the tensors in `checkpoint_files`, read from their headers.

    Raises:
        `ValueError`: a file that is not safetensors, or only a part of it.
    """
    shapes = {}
    for file in checkpoint_files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}). Save it again, or download it again.") from error
    return shapes


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a model in a folder, in one or in several parts.

    Raises:
        `FileNotFoundError`: a folder without them, or without some.
    """
    names, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        check_json_file(index, "weight_map")
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no {missing[0]}. Name a complete copy of the model, in safetensors.")
    return [str(folder / name) for name in sorted(names)]


def check_json_file(path: Path, key: str | None = None) -> None:
    """Raises `ValueError` for a file that is missing, or is not a JSON object with `key`."""
    advice = "Save it again, or download it again."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path} is not JSON ({error}). {advice}") from error
    if not isinstance(content, dict) or (key is not None and key not in content):
        raise ValueError(f"{path} is not an object{f' with `{key}`' if key else ''}. {advice}")


# Files that are written


@contextlib.contextmanager
def written_whole(folder: str | Path, last: str = "config.json") -> Iterator[Path]:
    """Yields a temporary folder to write to. At the end, files that changed are moved to `folder`; equal ones, which
    may be links, stay. `last`, without which nothing loads, is moved away first and to its place last, so that a killed
    process leaves no mixture of two models. Where a file cannot be moved, the former ones come back.

    Raises:
        `OSError`: a file that cannot be written or moved; says where the former files are if they cannot be put back.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder, ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
        files = [path.relative_to(temporary) for path in Path(temporary).rglob("*") if path.is_file()]
        changed = [path for path in files if not _same_content(folder / path, Path(temporary, path))]
        if changed and (ending := Path(last)) in files:
            changed = [path for path in changed if path != ending] + [ending]
        former = Path(tempfile.mkdtemp(prefix=".former-", dir=folder))
        moves = [(folder / path, former / path) for path in reversed(changed) if (folder / path).is_file()]
        _move_all(moves + [(Path(temporary, path), folder / path) for path in changed], folder, former)
        shutil.rmtree(former, ignore_errors=True)


def _same_content(path: Path, other: Path) -> bool:
    return path.is_file() and path.read_bytes() == other.read_bytes()


def _move_all(moves: list[tuple[Path, Path]], folder: Path, former: Path) -> None:
    """Moves files, each from one path to another, or none."""
    done: list[tuple[Path, Path]] = []
    try:
        for path, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            done.append((path, target))
    except BaseException as error:
        try:
            for path, target in reversed(done):
                os.replace(target, path)
        except OSError:
            raise OSError(
                f"{folder} could not be written ({error}) and is not complete; its former files are in {former}."
            ) from error
        shutil.rmtree(former, ignore_errors=True)
        raise


# Digests

# Settings of a processor that change no slot, or that each call may choose.
_FREE_SETTINGS = (
    "auto_map",
    "context_token",
    "encoder_dtype",
    "max_prompt_length",
    "processor_class",
    "tokens_per_slot",
)


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _processor_settings(path: Path) -> dict[str, Any]:
    check_json_file(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in content.items() if name not in _FREE_SETTINGS}


def _text_digest(path: Path) -> str:
    """The digest of a text file, whose lines may have been ended as another system does."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


# What a processor writes of that which gives slots their meaning.
_PROCESSOR_FILES = {
    "processor_config.json": lambda path: settings_digests(_processor_settings(path)),
    "tokenizer.json": _text_digest,
    "chat_template.jinja": _text_digest,
    "encoder/adapter_config.json": _text_digest,
    "encoder/adapter_model.safetensors": lambda path: tensors_digest(dict(read_tensors([path]))),
}


def processor_digests(folder: Path) -> dict[str, Any]:
    return {name: digest(folder / name) for name, digest in _PROCESSOR_FILES.items() if (folder / name).is_file()}


def write_processor_digests(former: Path, folder: Path) -> None:
    """Where the folder `former` has an aligner, writes its `config.json` to `folder`, with the digests of the
    processor there, which will be put beside it."""
    path = former / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if isinstance(config, dict) and isinstance(digests := config.get("digests"), dict):
        own = {name: digest for name, digest in digests.items() if name not in _PROCESSOR_FILES}
        write_config(folder / path.name, config | {"digests": own | processor_digests(folder)})


def write_config(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")  # as transformers does


def check_processor_files(folder: Path) -> None:
    """Refuses files of a processor in a checkpoint's folder that are not those that were saved with its aligner.

    Raises:
        `ValueError`: the file that was changed, and which of its settings.
    """
    path = folder / "config.json"
    if not path.is_file():  # a processor alone
        return
    check_json_file(path)
    digests = json.loads(path.read_text(encoding="utf-8")).get("digests") or {}
    for name in _PROCESSOR_FILES:
        if name not in digests:
            continue
        if not (folder / name).is_file():
            raise ValueError(f"{folder} lacks {name}. Save the processor again, or download the checkpoint again.")
        if name == "processor_config.json":
            check_settings(f"{name} of {folder}", _processor_settings(folder / name), digests)
        elif _PROCESSOR_FILES[name](folder / name) != digests[name]:
            raise ValueError(
                f"{folder / name} is not the file that was saved with the aligner. Download the checkpoint again, or "
                "save the processor that the aligner was trained with."
            )
