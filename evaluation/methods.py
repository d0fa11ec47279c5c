"""The methods that are compared: the paper's baselines, its method, its ablations, and upper and lower bounds.

A method says which checkpoint it reads with and how it is loaded. If its weights or package are not on the machine, it
raises `MissingMethodError`: it is skipped by name, never replaced.

A name with a rate, such as `arcaligner_x4` or `truncated_xsegment`, reads with that number of tokens per slot; methods
that read text keep one token for each of these slots. So one run compares several rates of one checkpoint.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers.utils import CONFIG_NAME

from ..common.files import digest_files
from ..common.rows import Row
from ..configuration_arcaligner import ArcAlignerConfig
from ..pipeline_arcaligner import check_max_passages
from ..train.data import passages_text
from .answering import (
    Answerer,
    ApartAnswerer,
    MissingMethodError,
    SlotAnswerer,
    TextAnswerer,
    load_aligner,
    load_text_lora,
)
from .compression import compressed, truncated

# The files of a checkpoint's folder that decide its answers.
_CONFIGS = ("config.json", "adapter_config.json", "processor_config.json")
CHECKPOINT_FILES = ("*.safetensors", *_CONFIGS, "chat_template.jinja")


def rate_title(tokens_per_slot: int | str) -> str:
    """A rate in tables.

    >>> rate_title("segment"), rate_title(4)
    ('one slot per segment', '4 tokens per slot')
    """
    return "one slot per segment" if tokens_per_slot == "segment" else f"{tokens_per_slot} tokens per slot"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that methods read with, folders or Hub ids, and where models run."""

    aligner: str  # all methods use its backbone, chat template and segmentation
    xrag: str | None = None  # an aligner of a projector alone, one slot per passage
    projector_only: str | None = None  # one with the slots of `aligner`
    full_text_lora: str | None = None  # a LoRA of the backbone that reads text, of `train/full_text.py`
    text_apart: str | None = None  # one that reads passages apart, of the same script
    device: str = "cpu"


def fingerprint(checkpoint: str) -> str:
    """The digest of a folder's weights and settings, or the name and commit of a checkpoint on the Hub."""
    folder = Path(checkpoint)
    if any(folder.glob("*.safetensors")):
        return digest_files([path for pattern in CHECKPOINT_FILES for path in sorted(folder.glob(pattern))])[:16]
    if folder.is_dir() or checkpoint.count("/") != 1:
        raise ValueError(f"There is no checkpoint in {checkpoint}: no weights (*.safetensors). Name a finished folder.")
    ArcAlignerConfig.from_pretrained(checkpoint)  # in the cache from now on
    commit = Path(try_to_load_from_cache(checkpoint, CONFIG_NAME)).parent.name
    return f"{checkpoint}@{commit}"


def backbone_fingerprint(aligner: str) -> str:
    """The name and revision of an aligner's backbone, and the digest of its chat template."""
    config = ArcAlignerConfig.from_pretrained(aligner)
    template = digest_files(sorted(Path(aligner).glob("chat_template.jinja")))[:8]
    return f"{config.base_model_name_or_path}@{config.base_model_revision or 'main'}, chat template {template}"


@dataclass(frozen=True)
class Method:
    """A way to answer."""

    name: str  # in commands and of files
    title: str  # in tables
    # What the backbone reads: from model, processor, rows and `tokens_per_slot` to a text for each row.
    texts: Callable[..., list[str]] | None = None
    # Without `texts`, how an aligner reads the rows' slots, as [`SlotAnswerer`] takes it.
    slots: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None  # the field of `Checkpoints` that decides the answers, if not the backbone alone
    made_by: str | None = None  # the command that makes such a checkpoint
    has_rates: bool = False  # whether it can be asked for with a rate
    copies: bool = False  # whether one that reads text prefers the words of the passages, as aligners do by themselves
    tokens_per_slot: int | str | None = None  # the rate, if not the checkpoint's own

    def at_rate(self, tokens_per_slot: int | str) -> "Method":
        """The same method with another rate, under its own name and title."""
        return dataclasses.replace(
            self,
            name=f"{self.name}_x{tokens_per_slot}",
            title=f"{self.title}, {rate_title(tokens_per_slot)}",
            checkpoint=self.checkpoint or "aligner",  # its segments and tokens decide how many slots there are
            tokens_per_slot=tokens_per_slot,
        )

    def answer_settings(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """What the answers of this method depend on."""
        path, option = getattr(checkpoints, self.checkpoint or "aligner"), f"--{self.checkpoint}".replace("_", "-")
        if path is None:
            raise MissingMethodError(f"name its checkpoint with `{option}`; `{self.made_by}` makes one")
        try:
            weights = backbone_fingerprint(path) if self.checkpoint is None else fingerprint(path)
        except (ValueError, OSError) as error:
            if self.made_by is None:
                raise
            message = f"there is no {path}, named with `{option}`; `{self.made_by}` makes one"
            raise MissingMethodError(message) from error
        found = {"weights": weights, "checkpoint": path}
        if self.tokens_per_slot is None:
            return found
        if self.texts is not None and self.checkpoint != "aligner":
            found["slots_of"] = fingerprint(checkpoints.aligner)  # decides how many positions there are
        return found | {"tokens_per_slot": self.tokens_per_slot}

    def load(self, checkpoints: Checkpoints) -> Answerer:
        """What answers."""
        if self.checkpoint == "text_apart":
            return ApartAnswerer(*load_text_lora(checkpoints.aligner, checkpoints.text_apart, checkpoints.device))
        if self.texts is not None:
            if self.checkpoint == "full_text_lora":
                loaded = load_text_lora(checkpoints.aligner, checkpoints.full_text_lora, checkpoints.device)
            else:
                loaded = load_aligner(checkpoints.aligner, checkpoints.device)
            return TextAnswerer(*loaded, lambda rows: self.texts(*loaded, rows, self.tokens_per_slot), self.copies)
        path = getattr(checkpoints, self.checkpoint)
        model, processor = load_aligner(path, checkpoints.device)
        if self.checkpoint != "aligner" and model.config.lora_r:
            raise ValueError(
                f"{path} has a LoRA of rank {model.config.lora_r}; for `--{self.checkpoint.replace('_', '-')}` "
                "expected an aligner of a projector alone, trained with `aligner: {lora_r: 0, gate_layers: []}`."
            )
        if max_passages := self.slots.get("max_passages"):
            try:
                check_max_passages(processor, max_passages)
            except ValueError as error:
                raise MissingMethodError(str(error)) from error
        return SlotAnswerer(model, processor, tokens_per_slot=self.tokens_per_slot, **self.slots)


def no_texts(model, processor, rows: list[Row], tokens_per_slot: None) -> list[str]:
    """Nothing of the passages."""
    return [""] * len(rows)


def whole_texts(model, processor, rows: list[Row], tokens_per_slot: None) -> list[str]:
    """The passages."""
    return [passages_text(row) for row in rows]


_TRAIN = "python -m arcaligner train --recipe"
_FULL_TEXT = "python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml"
_READER = {"checkpoint": "full_text_lora", "made_by": _FULL_TEXT}
_COPIER = _READER | {"copies": True}
_APART = {"checkpoint": "text_apart", "made_by": _FULL_TEXT.replace("full_text.yaml", "full_text_apart.yaml")}
_OURS = {"checkpoint": "aligner", "has_rates": True}
_PROJECTOR = {"checkpoint": "projector_only", "made_by": f"{_TRAIN} projector_only"}
_OFF = {"gate_mode": "off"}

METHODS = {
    method.name: method
    for method in (
        Method("naive", "Naive", no_texts),
        Method("standard_rag", "StandardRAG", whole_texts),
        Method("full_text_lora", "StandardRAG, fine-tuned", whole_texts, **_READER),
        Method("full_text_copying", "StandardRAG, fine-tuned, copying", whole_texts, **_COPIER),
        Method("text_apart", "StandardRAG, fine-tuned, passages apart", **_APART),
        Method("truncated", "truncated text", truncated, **_OURS),
        Method("truncated_lora", "truncated text, fine-tuned", truncated, has_rates=True, **_READER),
        Method("truncated_copying", "truncated text, fine-tuned, copying", truncated, has_rates=True, **_COPIER),
        Method("llmlingua", "LLMLingua (the backbone scores)", compressed, has_rates=True),
        Method("xrag", "xRAG (our training)", slots=_OFF, checkpoint="xrag", made_by=f"{_TRAIN} xrag"),
        Method("projector_only", "projector only", slots=_OFF, has_rates=True, **_PROJECTOR),
        Method("arcaligner", "ArcAligner", **_OURS),
        Method("one_passage", "ArcAligner, the likeliest passage", slots=_OFF | {"max_passages": 1}, **_OURS),
        Method("no_copying", "ArcAligner, w/o copying", slots=_OFF | {"copy_bonus": 0.0}, **_OURS),
        Method("no_recursion", "w/o Recursion", slots=_OFF, **_OURS),
        Method("max_loop", "w/o Gate (Max Loop)", slots={"gate_mode": "always"}, **_OURS),
        Method("no_lora", "w/o LoRA & Recursion", slots=_OFF | {"use_lora": False}, **_OURS),
    )
}


def split_name(name: str) -> tuple[Method, int | str | None]:
    """
    A method by its name, and the rate that the name ends in.

    >>> method, rate = split_name("arcaligner_x4")
    >>> method.title, rate
    ('ArcAligner', 4)
    """
    base, _, rate = name.rpartition("_x")
    if name in METHODS:
        return METHODS[name], None
    if base in METHODS and METHODS[base].has_rates and (rate == "segment" or (rate.isdecimal() and int(rate))):
        return METHODS[base], rate if rate == "segment" else int(rate)
    rates = ", ".join(method.name for method in METHODS.values() if method.has_rates)
    raise ValueError(
        f"There is no method {name!r}. Known: {', '.join(METHODS)}; with a rate, such as `_x4` or `_xsegment`: {rates}."
    )


def find_method(name: str) -> Method:
    """A method by its name, with or without a rate."""
    method, rate = split_name(name)
    return method if rate is None else method.at_rate(rate)


def sort_key(name: str) -> tuple[int, float]:
    """The order of names in tables: that of `METHODS`, each without a rate first, then by rate."""
    method, rate = split_name(name)
    return list(METHODS).index(method.name), {None: 0.0, "segment": float("inf")}.get(rate, rate)
