"""What a slot prefix was made with, as JSON, and whether weights have changed since."""

import functools
import hashlib
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils.hooks import RemovableHandle

from .checkpoint_arcaligner import tensors_digest
from .configuration_arcaligner import REFINEMENT_SETTINGS, check_gates, json_digest, normalize_budget, slot_settings

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


def slot_prefix_fingerprint(
    model,
    processor,
    prompt_ids: Sequence[int],
    passages: Sequence,
    weights: dict[str, str],
    settings: dict | None = None,
) -> dict[str, Any]:
    """All that decides the keys and values of a slot prefix, as JSON.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): What computes the prefix.
        prompt_ids (`Sequence[int]`): The text before the slots.
        passages (`Sequence`): Documents, each a string or `{"title", "text"}`, or [`GivenSlots`].
        weights (`dict`): Digests of all that was read for it, of `SlotPrefixStore.weights`.
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
        "prompt": json_digest(list(prompt_ids)),
        "passages": _passages_digest(passages),
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


# Where a tensor's memory begins, without the right to write that `data_ptr` asks for.
memory_address = torch._C._data_address


def seal(weight: torch.Tensor) -> torch.Tensor:
    """A copy-on-write clone: while it is kept, any write to `weight` moves it to other memory first. A weight
    that is mapped from a file cannot be shared like this; it gets memory of its own."""
    try:
        return torch._lazy_clone(weight.detach())
    except RuntimeError:
        weight.data = weight.detach().clone()
        return torch._lazy_clone(weight.detach())


class _Sealed(NamedTuple):
    weight: torch.Tensor
    clone: torch.Tensor
    address: int
    digest: bytes


class _Seen(NamedTuple):
    num_hooks: int
    held: list[int]
    adapters: list[tuple]
    addresses: list[int]


class WatchedWeights:
    """Digests of a module's weights, computed again when, and only when, something may have changed them.

    Each weight is sealed, so that an optimizer, `.data`, NumPy, `load_state_dict` or `to` moves it; what has moved is
    read again. It also sees parameters, buffers, modules and hooks that are added, replaced or removed, and which
    adapters are on. It does not see attributes, nor writes through a NumPy array or a pointer that was taken before.

    Args:
        module (`nn.Module`): Whose weights.
        part_of (`Callable`): The part that a weight belongs to, by its name; each part has a digest.
    """

    def __init__(self, module: torch.nn.Module, part_of: Callable[[str], str]):
        self.module, self._part_of = module, part_of
        self._holders, self._adapters = [], []  # dicts of weights, modules and hooks; PEFT's layers
        self._weights, self._sealed, self._digests = {}, {}, {}
        self._seen, self._hooks = None, {}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part's names, types, shapes and values.

        Raises:
            `ValueError`: a weight that cannot be watched, by its name.
        """
        if self._look(self._hold()) == self._seen:
            return self._digests
        self._find()
        for name, weight in self._weights.items():
            sealed = self._sealed.get(name)
            if sealed is None or sealed.weight is not weight or sealed.address != memory_address(weight):
                self._sealed[name] = _seal_and_read(name, weight)
        self._held = self._hold()  # kept, so that their ids stay theirs
        self._seen, parts = self._look(self._held), {}
        hooks = tuple(
            key for m in self.module.modules() for each in (m._forward_hooks, m._forward_pre_hooks) for key in each
        )
        # What a hook does is not known, so that other processes cannot have the same.
        hooks = self._hooks.setdefault(hooks, uuid.uuid4().hex) if hooks else ""
        modules = [(name, type(module).__qualname__) for name, module in self.module.named_modules()]
        first = hashlib.sha256(repr((self._seen.adapters, hooks, modules)).encode())
        for name, weight in self._weights.items():
            part = parts.setdefault(self._part_of(name), first.copy())
            part.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode() + self._sealed[name].digest)
        self._digests = {part: found.hexdigest() for part, found in parts.items()}
        return self._digests

    def _hold(self) -> list:
        return [each for holder in self._holders for each in holder.values()]

    def _look(self, held: list) -> _Seen:
        return _Seen(
            RemovableHandle.next_id,  # grows with each new hook
            list(map(id, held)),
            [(m.active_adapter, m.disable_adapters, *m.merged_adapters, *m.scaling.items()) for m in self._adapters],
            list(map(memory_address, self._weights.values())),
        )

    def _find(self) -> None:
        modules = list(self.module.modules())
        holders = [(m._parameters, m._buffers, m._modules, m._forward_hooks, m._forward_pre_hooks) for m in modules]
        self._holders = [each for row in holders for each in row if each]
        self._adapters = [module for module in modules if isinstance(module, BaseTunerLayer)]
        self._weights = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        self._sealed = {name: each for name, each in self._sealed.items() if name in self._weights}


def _seal_and_read(name: str, weight: torch.Tensor) -> _Sealed:
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.is_meta or weight.layout != torch.strided:
        raise ValueError(
            f"The weight `{name}` is of type {type(weight).__name__} on {weight.device}; nobody can tell when such a "
            "weight changes, so prefixes computed with it are not kept. Load the model whole and without quantization, "
            "or call `generate` without a store."
        )
    clone = seal(weight)
    values = weight.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
    return _Sealed(weight, clone, memory_address(clone), hashlib.sha256(values.numpy()).digest())
