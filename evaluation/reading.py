"""Readers: what turns rows into answers, a batch at a time, by one model with one prompt.

All read with the same frozen backbone, chat template and greedy decoding. They differ in what stands for the passages:
nothing, text, or slots.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..configuration_arcaligner import resolve_base_model
from ..lora_arcaligner import ADAPTER_NAME, slot_lora_layers
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .answering import MAX_NEW_TOKENS, Row, passages_text, slot_inputs, text_inputs


class MissingMethodError(Exception):
    """A method whose weights or package are not on this machine; the message says how to get them."""


@dataclass(frozen=True)
class Answer:
    """
    An answer, and what was read for it.

    Args:
        text (`str`): The answer.
        prompt_ids (`list[int]`): The prompt as the backbone read it, a context token for each slot; empty where a
            method does not tell.
        context_tokens (`int`): Positions of the prompt that stand for the passages: tokens of text, or slots.
        passage_tokens (`int`): Tokens of the passages' whole text.
        measured (`dict`): What else the reader measured, by its key in the answer's line.
    """

    text: str
    prompt_ids: list[int]
    context_tokens: int
    passage_tokens: int
    measured: dict[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """Answers rows."""

    def answer(self, rows: list[Row]) -> list[Answer]:
        """An answer to each row, in order."""


def dtype_on(device: str) -> torch.dtype:
    """What models compute in: float32 on a CPU and else bfloat16."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


@functools.lru_cache(maxsize=1)  # the methods of one checkpoint follow each other
def load_aligner(checkpoint: str, device: str) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """Model and processor of an aligner, ready to generate."""
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype_on(device)).eval().to(device)
    return model, ArcAlignerProcessor.from_pretrained(checkpoint)


class TextReader:
    """
    The backbone alone reads a prompt of text.

    Args:
        model: Of transformers, with `generate`. An aligner's is its bare backbone where there are no slots.
        processor ([`ArcAlignerProcessor`]): Its chat template and tokenizer.
        content (`Callable`): The user's turn for a row and the text that stands for its passages.
        context (`Callable`): That text for each of some rows.
    """

    def __init__(
        self,
        model,
        processor: ArcAlignerProcessor,
        content: Callable[[Row, str], str],
        context: Callable[[list[Row]], list[str]],
    ):
        self.model, self.processor, self.content, self.context = model, processor, content, context

    def answer(self, rows: list[Row]) -> list[Answer]:
        contexts = self.context(rows)
        contents = [self.content(row, text) for row, text in zip(rows, contexts, strict=True)]
        inputs = text_inputs(self.processor, contents).to(self.model.device)
        return _answers(self.model, self.processor, inputs, rows, count_tokens(self.processor, contexts))


class SlotReader:
    """
    An aligner reads the passages as slots.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): The aligner.
        gate_mode (`str`): `"off"`, `"adaptive"` or `"always"`.
        use_lora (`bool`): `False` leaves the slots to the projector alone.
        with_passages (`bool`): `False` gives each question the one slot of no passage.
        refinement (`dict`, *optional*): `gate_threshold`, `max_refinement_steps` and `refinement_budget` of `generate`.
        slot_budget (`dict`, *optional*): `max_slots` and `slot_policy` of the processor.
    """

    def __init__(
        self,
        model,
        processor: ArcAlignerProcessor,
        gate_mode: str,
        use_lora: bool = True,
        with_passages: bool = True,
        refinement: dict[str, Any] | None = None,
        slot_budget: dict[str, Any] | None = None,
    ):
        self.model, self.processor = model, processor
        self.use_lora, self.with_passages = use_lora, with_passages
        self.refinement = {"gate_mode": gate_mode, **(refinement or {})}
        self.slot_budget = slot_budget or {}

    def answer(self, rows: list[Row]) -> list[Answer]:
        inputs = slot_inputs(self.processor, rows, self.with_passages, **self.slot_budget).to(self.model.device)
        num_slots = (inputs["input_ids"] == self.model.config.context_token_id).sum(dim=1).tolist()
        with contextlib.nullcontext() if self.use_lora else lora_off(self.model):
            return _answers(self.model, self.processor, inputs, rows, num_slots, **self.refinement)


@contextlib.contextmanager
def lora_off(model: ArcAlignerForCausalLM) -> Iterator[None]:
    """Inside, the slot LoRA adds nothing."""
    layers = list(slot_lora_layers(model))
    for layer in layers:
        layer.set_scale(ADAPTER_NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER_NAME, 1.0)


def load_text_lora(aligner: str, lora: str, device: str):
    """The aligner's backbone with a LoRA of `train/full_text.py` merged into it, and the processor."""
    config = ArcAlignerForCausalLM.config_class.from_pretrained(aligner)
    name, revision = resolve_base_model(config.base_model_name_or_path), config.base_model_revision
    base = AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype=dtype_on(device))
    model = PeftModel.from_pretrained(base, lora).merge_and_unload().eval().to(device)
    return model, ArcAlignerProcessor.from_pretrained(aligner)


def count_tokens(processor: ArcAlignerProcessor, texts: list[str]) -> list[int]:
    """Tokens of each text, without special ones."""
    return [len(ids) for ids in processor.tokenizer(texts, add_special_tokens=False)["input_ids"]]


@torch.inference_mode()
def _answers(model, processor, inputs, rows: list[Row], context_tokens: list[int], **refinement: Any) -> list[Answer]:
    """Greedy answers to prompts, left-padded, `input_ids` (batch, seq_len)."""
    output = model.generate(**inputs, **refinement, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    prompts = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    prompt_ids = [ids[is_real].tolist() for ids, is_real in prompts]
    passage_tokens = count_tokens(processor, [passages_text(row) for row in rows])
    columns = zip(texts, prompt_ids, context_tokens, passage_tokens, strict=True)
    return [Answer(text.strip(), *rest) for text, *rest in columns]
