"""Slot prefixes: what they were made with, as files, and in batches.

Slots stand before the question and do not depend on it, and behind them every layer is the unmodified base model's. So
the keys and values of a prompt up to its last slot are all that a question about these passages needs, and a backbone
that knows nothing of slots continues from them with the same logits. All it takes, in any engine that takes a cache:

    cache = DynamicCache(config=backbone.config)  # backbone = AutoModelForCausalLM.from_pretrained(base_model)
    with safe_open(path, framework="pt") as file:
        for layer in range(backbone.config.num_hidden_layers):
            cache.update(file.get_tensor(f"layers.{layer}.keys"), file.get_tensor(f"layers.{layer}.values"), layer)
    logits = backbone(input_ids=ids_behind_the_slots, past_key_values=cache).logits

Shapes: keys and values (batch, key_value_heads, length, head_dim), rows of a batch left-padded.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from .refinement_settings_arcaligner import REFINEMENT_SETTINGS, check_refinement_settings, gates_and_budget
from .slot_budget_arcaligner import check_slot_budget

FORMAT = "arcaligner-slot-prefix-1"
# How slots may be chosen and refined for one call, other than as processor and model are configured.
PREFIX_SETTINGS = {
    "max_slots": int,
    "slot_policy": str,
    "tokens_per_slot": lambda rate: rate if rate == "segment" else int(rate),
    "gate_mode": str,
    "gate_threshold": float,
    "max_refinement_steps": int,
    "refinement_budget": float,
}
# Enough of a parameter to tell two backbones of one name from each other.
SAMPLED_VALUES = 64
# Settings of the aligner that change no slot; one that is added later is taken to change them.
_WITHOUT_EFFECT = (
    "text_config",  # among the backbone's weights
    "context_token",
    "initializer_range",
    "lora_dropout",
    "tie_word_embeddings",
    "training_stage",
)
# What two copies of one backbone's configuration may differ in.
_NOT_COMPUTED_WITH = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def fingerprint_weights(model) -> dict[str, str]:
    """Digests of the aligner, whole, and of the backbone, sampled. Reads the whole aligner: once a model is enough."""
    aligner, backbone = hashlib.sha256(), hashlib.sha256()
    config = model.config.text_config.to_dict()
    config = {name: value for name, value in config.items() if name not in _NOT_COMPUTED_WITH}
    backbone.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        if model.is_aligner_key(name):
            digest = aligner
        else:
            digest, values = backbone, values[:SAMPLED_VALUES]
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(values.cpu().contiguous().view(torch.uint8).numpy())
    return {"backbone_weights": backbone.hexdigest(), "aligner_weights": aligner.hexdigest()}


def slot_prefix_fingerprint(
    model,
    processor,
    prompt_ids: Sequence[int],
    passages: Sequence | torch.Tensor,
    weights: dict | None = None,
    settings: dict | None = None,
) -> dict[str, Any]:
    """All that decides the keys and values of a slot prefix, as JSON.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of the prefix.
        prompt_ids (`Sequence[int]`): The text before the slots.
        passages (`Sequence` or `torch.Tensor`):
            Documents, each a string or `{"title", "text"}`, or the embeddings of their segments
            (num_slots, encoder_hidden_size).
        weights (`dict`, *optional*): Of `fingerprint_weights`, when it was called before.
        settings (`dict`, *optional*): What was asked for instead of the configuration, of `normal_prefix_settings`.
    """
    config = {
        name: getattr(model.config, name) for name in type(model.config).__annotations__ if name not in _WITHOUT_EFFECT
    }
    return {
        **config,
        **(settings or {}),
        "dtype": str(model.get_input_embeddings().weight.dtype),
        **(weights or fingerprint_weights(model)),
        "encoder": processor.encoder_name_or_path,
        "sentences_per_segment": processor.sentences_per_segment,
        "spacy_model": processor.spacy_model,
        "tokens_per_slot": (settings or {}).get("tokens_per_slot", processor.tokens_per_slot),
        "context_words": processor.context_words,
        "prompt": _digest(list(prompt_ids)),
        "passages": _passages_digest(passages),
    }


def normal_prefix_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `PREFIX_SETTINGS` for one call, checked, in one spelling and without what changes nothing.

    >>> normal_prefix_settings({"slot_policy": "merge", "gate_mode": None, "refinement_budget": 0})
    {'gate_mode': 'off'}
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    check_slot_budget(settings.get("max_slots"), settings.get("slot_policy", "drop"))
    check_refinement_settings(**{name: settings[name] for name in REFINEMENT_SETTINGS if name in settings})
    settings = {name: PREFIX_SETTINGS[name](value) for name, value in settings.items()}  # as JSON has them
    if "max_slots" not in settings or settings.get("slot_policy") == "drop":
        settings.pop("slot_policy", None)
    gate_mode, budget = gates_and_budget(settings.get("gate_mode"), settings.get("refinement_budget"))
    settings |= {"gate_mode": gate_mode, "refinement_budget": budget}
    return {name: value for name, value in settings.items() if value is not None}


def _digest(value: Any) -> str:
    """Of anything JSON can hold; what it cannot is refused by the processor, which reads it next."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _passages_digest(passages: Sequence | torch.Tensor) -> str:
    if isinstance(passages, torch.Tensor):
        values = passages.detach().float().cpu().contiguous()
        return hashlib.sha256(str(tuple(values.shape)).encode() + values.numpy().tobytes()).hexdigest()
    # Scores and ids of a retriever do not change how a passage is read.
    return _digest([[d.get("title"), d.get("text")] if isinstance(d, dict) else [None, d] for d in passages])


def save_slot_prefix(path: str | Path, cache: Cache, fingerprint: dict[str, Any]) -> None:
    """Writes a slot prefix as safetensors, whole or not at all.

    Args:
        path (`str` or `Path`): File to write; its folder exists.
        cache ([`~transformers.Cache`]): Of one row, such as `prefill_context` returns.
        fingerprint (`dict`): Of `slot_prefix_fingerprint`.

    Raises:
        `ValueError`: a cache of several rows.
    """
    if (num_rows := cache.layers[0].keys.shape[0]) != 1:
        raise ValueError(f"The cache has {num_rows} rows; a file holds the prefix of one. Save each by itself.")
    path, length = Path(path), cache.get_seq_length()
    tensors = {}
    for layer_idx, layer in enumerate(cache.layers):
        # A sliding window has dropped the first positions; zeros, which it never reads, keep the rest in place.
        tensors[f"layers.{layer_idx}.keys"] = _left_pad(layer.keys, length).contiguous()
        tensors[f"layers.{layer_idx}.values"] = _left_pad(layer.values, length).contiguous()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": FORMAT, "fingerprint": json.dumps(fingerprint)})
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_slot_prefix(
    path: str | Path, fingerprint: dict[str, Any], config: PreTrainedConfig, device: str | torch.device = "cpu"
) -> DynamicCache:
    """Reads a slot prefix that `save_slot_prefix` wrote.

    Args:
        path (`str` or `Path`): The file.
        fingerprint (`dict`): Of `slot_prefix_fingerprint`, for the model, passages and prompt it will be used with.
        config (`PreTrainedConfig`): The backbone's, `model.config.text_config`.
        device (`str` or `torch.device`, defaults to `"cpu"`): Where the model is.

    Raises:
        `ValueError`: a file that is broken or no slot prefix, one of another fingerprint, naming the first field that
            differs, or one that the backbone cannot hold.
    """
    advice = "Use what it was made with, or delete the file and make it anew."
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete the file and make it anew.") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"The format of {path} is {metadata.get('format')!r}; expected {FORMAT!r}. {advice}")
    found = json.loads(metadata["fingerprint"])
    for field in [*fingerprint, *found]:
        if found.get(field) != fingerprint.get(field):
            raise ValueError(
                f"The slot prefix {path} was made with `{field}` {found.get(field)!r}; expected "
                f"{fingerprint.get(field)!r}. {advice}"
            )
    _check_shapes(path, tensors, config)
    cache = DynamicCache(config=config)
    for layer_idx in range(config.num_hidden_layers):
        keys, values = (tensors[f"layers.{layer_idx}.{kind}"].to(device) for kind in ("keys", "values"))
        cache.update(keys, values, layer_idx)
    return cache


def _check_shapes(path: str | Path, tensors: dict[str, torch.Tensor], config: PreTrainedConfig) -> None:
    names = {f"layers.{i}.{kind}" for i in range(config.num_hidden_layers) for kind in ("keys", "values")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    length = max((shape[2] for shape in shapes if len(shape) == 4), default=0)
    if tensors.keys() != names or shapes != {(1, config.num_key_value_heads, length, head_dim)}:
        raise ValueError(
            f"{path} holds {len(tensors)} tensors of shapes {sorted(shapes)}; the backbone {config.model_type} needs "
            f"keys and values of {config.num_hidden_layers} layers, each of shape (1, {config.num_key_value_heads}, "
            f"length, {head_dim}). Load it with the backbone it was made for."
        )
    check_length(length, f"The slot prefix {path}", config)


def check_length(length: int, what: str, config: PreTrainedConfig) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(
            f"{what} has {length} positions but the backbone {config.model_type} reads {longest}. Pass fewer passages, "
            "merge more sentences into a slot, or shorten the question."
        )


def _left_pad(states: torch.Tensor, length: int) -> torch.Tensor:
    return pad(states, (0, 0, length - states.shape[2], 0))


def join_slot_prefixes(prefixes: Sequence[Cache], config: PreTrainedConfig) -> tuple[DynamicCache, torch.LongTensor]:
    """One-row caches to the cache of a batch, left-padded, and its attention mask (batch, length).

    The rows are copied: generating from the batch leaves the prefixes as they are. A row's positions are those it has
    alone, so what follows needs `position_ids` counted over the mask, as `generate` does.

    Raises:
        `ValueError`: prefixes of several dtypes or on several devices.
    """
    kinds = {(prefix.layers[0].keys.dtype, prefix.layers[0].keys.device) for prefix in prefixes}
    if len(kinds) != 1:
        described = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"The slot prefixes are {described}; expected one dtype and device. Load them alike.")
    lengths = torch.tensor([prefix.get_seq_length() for prefix in prefixes])
    length = int(lengths.max())
    joined = DynamicCache(config=config)
    for layer_idx in range(config.num_hidden_layers):
        layers = [prefix.layers[layer_idx] for prefix in prefixes]
        keys = torch.cat([_left_pad(layer.keys, length) for layer in layers])
        values = torch.cat([_left_pad(layer.values, length) for layer in layers])
        joined.update(keys, values, layer_idx)
    mask = (torch.arange(length) >= length - lengths[:, None]).long()
    return joined, mask.to(prefixes[0].layers[0].keys.device)


def split_slot_prefixes(cache: Cache, lengths: Sequence[int], config: PreTrainedConfig) -> list[DynamicCache]:
    """The rows of a left-padded batch's cache, of `lengths` positions each, as caches of their own memory."""
    prefixes = []
    for row, length in enumerate(lengths):
        prefix = DynamicCache(config=config)
        for layer_idx, layer in enumerate(cache.layers):
            keys, values = (_left_pad(kept[row : row + 1, :, -length:], length) for kept in (layer.keys, layer.values))
            prefix.update(keys, values, layer_idx)
        prefixes.append(prefix)
    return prefixes


__all__ = [
    "fingerprint_weights",
    "join_slot_prefixes",
    "load_slot_prefix",
    "normal_prefix_settings",
    "save_slot_prefix",
    "slot_prefix_fingerprint",
    "split_slot_prefixes",
]
