"""What a slot prefix was made with, as JSON, and whether weights have changed since."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from .configuration_arcaligner import REFINEMENT_SETTINGS, check_gates, json_digest, normalize_budget, slot_settings
from .folders_arcaligner import tensors_digest

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


def shared_fingerprint(model, processor, weights: dict[str, str], settings: dict | None = None) -> dict[str, Any]:
    """All that decides the keys and values of any passage, as JSON: everything but its words and the text before it.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): What reads passages.
        weights (`dict`): Digests of all that is read for it, of `SlotPrefixStore.weights`.
        settings (`dict`, *optional*): What was asked for instead of the configuration, of `canonical_settings`.
    """
    config = slot_settings(model.config.to_dict())
    backbone = config.pop("text_config")
    return {
        **config,
        **(settings or {}),
        "backbone": json_digest(backbone),
        **weights,
        "encoder": processor.encoder_name_or_path,
        "sentences_per_segment": processor.sentences_per_segment,
        "spacy_model": processor.spacy_model,
        "tokens_per_slot": (settings or {}).get("tokens_per_slot", processor.tokens_per_slot),
        "context_words": processor.context_words,
    }


def passage_fingerprint(prompt_ids: Sequence[int], passages: Sequence | None) -> dict[str, Any]:
    """The rest of what decides keys and values: the text before the slots, and the passages that are read together.

    Args:
        prompt_ids (`Sequence[int]`): The text before the slots.
        passages (`Sequence`, *optional*):
            Documents, each a string or `{"title", "text"}`, or [`GivenSlots`]. `None`: the text before the slots alone.
    """
    return {
        "prompt": json_digest(list(prompt_ids)),
        "passages": _passages_digest(passages or []),
        "has_slots": passages is not None,
    }


def canonical_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `PREFIX_SETTINGS` for one call, spelled in one way and without those that change nothing.

    >>> canonical_settings({"slot_policy": "merge", "gate_mode": None, "refinement_budget": 0})
    {'gate_mode': 'off'}
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    check_gates(**{name: settings[name] for name in REFINEMENT_SETTINGS if name in settings})
    settings = {name: PREFIX_SETTINGS[name](value) for name, value in settings.items()}  # as JSON has them
    if "max_slots" not in settings or settings.get("slot_policy") == "drop":
        settings.pop("slot_policy", None)
    gate_mode, budget = normalize_budget(settings.get("gate_mode"), settings.get("refinement_budget"))
    settings |= {"gate_mode": gate_mode, "refinement_budget": budget}
    return {name: value for name, value in settings.items() if value is not None}


def _passages_digest(passages: Sequence) -> str:
    if isinstance(passages, tuple):
        return tensors_digest({str(i): tensor for i, tensor in enumerate(passages) if tensor is not None})
    # Scores and ids of a retriever do not change how a passage is read.
    return json_digest([[d.get("title"), d.get("text")] if isinstance(d, dict) else [None, d] for d in passages])


@functools.cache
def spacy_version() -> str:
    """The version of spaCy, which splits passages."""
    return version("spacy")


class _Read(NamedTuple):
    """A weight as it was read."""

    owner: torch.nn.Module
    attribute: str
    weight: torch.Tensor
    alias: torch.Tensor  # keeps the memory, so that no other weight gets its address
    version: int
    digest: bytes

    def is_current(self) -> bool:
        weight = getattr(self.owner, self.attribute)
        is_there = weight is self.weight and weight.data_ptr() == self.alias.data_ptr()
        return is_there and _version(weight) == self.version


def _version(weight: torch.Tensor) -> int:
    """Grows with each write that PyTorch counts; those to weights of inference mode are not counted."""
    return 0 if weight.is_inference() else weight._version


class WatchedWeights:
    """Digests of a module's weights. A weight is read again when it has moved, been replaced, or been written to by
    PyTorch: by an optimizer, an operation in place, `load_state_dict`, `to`.

    Nobody tells of writes through `.data`, a NumPy array or a pointer, nor of modules and hooks that are added or
    replaced. Which of PEFT's adapters are on, and how they are scaled, is looked up.

    Args:
        module (`nn.Module`): Whose weights.
        part_of (`Callable`): The part that a weight belongs to, by its name; each part has a digest.
    """

    def __init__(self, module: torch.nn.Module, part_of: Callable[[str], str]):
        self.module, self._part_of = module, part_of
        self._layers = [each for each in module.modules() if isinstance(each, BaseTunerLayer)]
        self._read: dict[str, _Read] = {}
        self._adapters, self._digests = [], {}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's names, types, shapes and values.

        Raises:
            `ValueError`: a weight that cannot be watched, by its name.
        """
        adapters = [
            (m.active_adapter, m.disable_adapters, *m.merged_adapters, *m.scaling.items()) for m in self._layers
        ]
        if self._digests and adapters == self._adapters and all(each.is_current() for each in self._read.values()):
            return self._digests
        self._adapters, modules, parts = adapters, [], {}
        found: dict[int, tuple] = {}  # tied weights once
        for prefix, module in self.module.named_modules():
            modules.append((prefix, type(module).__qualname__))
            for name, weight in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                found.setdefault(id(weight), (f"{prefix}.{name}".lstrip("."), module, name, weight))
        first = hashlib.sha256(repr((adapters, modules)).encode())
        for whole_name, owner, name, weight in found.values():
            read = self._read.get(whole_name)
            if read is None or read.weight is not weight or not read.is_current():
                self._read[whole_name] = read = _read(whole_name, owner, name, weight)
            part = parts.setdefault(self._part_of(whole_name), first.copy())
            part.update(f"{whole_name} {weight.dtype} {tuple(weight.shape)}".encode() + read.digest)
        self._digests = {part: digest.hexdigest() for part, digest in parts.items()}
        return self._digests


def _read(whole_name: str, owner: torch.nn.Module, name: str, weight: torch.Tensor) -> _Read:
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta or weight.layout != torch.strided:
        raise ValueError(
            f"The weight `{whole_name}` is of type {type(weight).__name__} on {weight.device}; nobody can tell when "
            "such a weight changes, so prefixes computed with it are not kept. Load the model whole and without "
            "quantization, or call `generate` without a store."
        )
    values = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.sha256(values.numpy()).digest()
    return _Read(owner, name, weight, weight.detach(), _version(weight), digest)
