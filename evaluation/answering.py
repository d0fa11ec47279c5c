"""Prompts, and the models that answer them, a batch at a time.

All models use the same frozen backbone, chat template and greedy decoding. They differ only in what represents the
passages: nothing, text, or slots.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from peft import PeftModel
from rich.console import Console
from rich.progress import Progress
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from ..answering_arcaligner import MAX_NEW_TOKENS, Answerer, greedy_answers
from ..attention_arcaligner import CACHE, check_can_separate, passage_positions, separate_passages
from ..common.files import counted, progress_lines
from ..common.rows import Row
from ..configuration_arcaligner import REFINEMENT_SETTINGS, check_length
from ..kv_cache_arcaligner import cache_of
from ..loading_arcaligner import default_dtype, resolve_model
from ..modeling_arcaligner import ADAPTER_NAME, ArcAlignerForCausalLM, slot_lora_layers
from ..processing_arcaligner import ArcAlignerProcessor
from ..tokenization_arcaligner import mark_control_tokens
from ..train.prompts import (
    IndependentText,
    passages_text,
    slot_inputs,
    text_inputs,
    text_prompt,
    with_selected,
    zoomed_inputs,
)
from ..zoom_arcaligner import check_zoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """An answer, and the prompt that it was made from."""

    text: str
    prompt_ids: list[int]  # one context token per slot
    context_tokens: int  # positions of the prompt that represent the passages: tokens of text, or slots
    passage_tokens: int  # number of tokens of the whole text of the passages
    answerability: float | None = None  # of the passages, if the aligner has an answerability head


# Prompts


def independent_text(processor: ArcAlignerProcessor, row: Row) -> IndependentText:
    """The prompt with the passages' text, each tokenized separately."""
    before, after = processor.split_prompt([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
    row = row | {"passages": mark_control_tokens(processor.tokenizer, row["passages"])}
    return IndependentText.of(row, before, after, processor.tokenize_prompt)


def count_tokens(tokenizer, texts: list[str]) -> list[int]:
    """Tokens of each text, without special ones."""
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


# Ways to answer


def answer_text(
    context: Callable[..., str],
    model,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    tokens_per_slot: int | str | None = None,
    copy_biased: bool = False,
    **settings: Any,
) -> list[Answer]:
    """Answer from prompts of text, with a model of transformers; an aligner acts as its backbone. `context` makes the
    text from model, processor, a row and `tokens_per_slot`. `copy_biased` switches on copy-biased decoding, with the
    words of the whole passages, as in answers from slots. `settings` are those of `generate`."""
    contexts = [context(model, processor, row, tokens_per_slot) for row in rows]
    contents = [text_prompt(row, text) for row, text in zip(rows, contexts, strict=True)]
    inputs = text_inputs(processor, contents).to(model.device)
    num_tokens = count_tokens(processor.tokenizer, contexts)
    passages = [row["passages"] for row in rows] if copy_biased else []
    return _generate(model, processor, inputs, rows, num_tokens, passages=passages, **settings)


def answer_slots(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    tokens_per_slot: int | str | None = None,
    use_lora: bool = True,
    max_passages: int | None = None,
    as_needed: bool = False,
    copy_bonus: float | None = None,
    zoom: float | None = None,
    **refinement: Any,
) -> list[Answer]:
    """
    Answer from the passages as slots, with an aligner.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): The aligner.
        rows (`list`): The questions with their passages.
        tokens_per_slot (`int` or `"segment"`, *optional*): Default: the checkpoint's.
        use_lora (`bool`): `False` switches the LoRA off, so that slots pass through the projector only.
        max_passages (`int`, *optional*): Maximum number of passages to use, those most likely to contain the answer.
            Two or more are weighted by their scores.
        as_needed (`bool`, defaults to `False`): Whether to use as many passages as the question needs, as pipeline and
            server do by default.
        copy_bonus (`float`, *optional*): Bias of copy-biased decoding, in log-odds. Default: the processor's.
        zoom (`float`, *optional*): As for [`zoom_in`]. Default: the passages are read once.
        refinement (`Any`): Settings of gates and budget, as for `generate`.
    """
    if zoom is not None:
        tokens_per_slot = check_zoom(model, processor, zoom, tokens_per_slot)
    used, layers = rows, [] if use_lora else list(slot_lora_layers(model))
    for layer in layers:
        layer.set_scale(ADAPTER_NAME, 0.0)
    try:
        if max_passages is not None or as_needed:
            settings = {"tokens_per_slot": tokens_per_slot, **refinement}
            used = with_selected(Answerer(model, processor), rows, max_passages, **settings)
        inputs = slot_inputs(processor, used, tokens_per_slot).to(model.device)
        if any("prior" in row for row in used):
            priors = [torch.tensor(row.get("prior", [0.0] * len(row["passages"]))) for row in used]
            inputs["passage_prior"] = pad_sequence(priors, batch_first=True).to(model.device)
        pointer_rate = tokens_per_slot or processor.tokens_per_slot
        if zoom is not None:
            prior = {"passage_prior": inputs.pop("passage_prior")} if "passage_prior" in inputs else {}
            gates = {name: refinement[name] for name in REFINEMENT_SETTINGS if name in refinement}
            inputs = zoomed_inputs(model, processor, used, inputs, tokens_per_slot, zoom, **prior, **gates) | prior
            pointer_rate = None  # only for slots of one size
        num_slots = (inputs["input_ids"] == model.config.context_token_id).sum(dim=1).tolist()
        sources = {"questions": [row["question"] for row in used], "passages": [row["passages"] for row in used]}
        settings = {"copy_bonus": copy_bonus, "tokens_per_slot": pointer_rate}
        return _generate(model, processor, inputs, rows, num_slots, **settings, **sources, **refinement)
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER_NAME, 1.0)


def answer_independent(
    model, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: None = None
) -> list[Answer]:
    """Answer from the text of independent passages, with a model of [`load_text_lora`] whose LoRA was trained for such
    passages (`passage_attention: separate` of `train/full_text.py`)."""
    prompts = [independent_text(processor, row) for row in rows]
    num_tokens = [sum(map(len, prompt.passages)) for prompt in prompts]
    return _generate(model, processor, independent_inputs(model, prompts), rows, num_tokens)


@torch.inference_mode()
def independent_inputs(model, prompts: list[IndependentText]) -> dict[str, Any]:
    """Inputs for `generate`: prompts (batch, seq_len), left-padded, with the keys and values of all tokens but the last
    one in the cache."""
    check_can_separate(model.config)
    sides = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], **sides)
    numbers = pad_sequence([torch.tensor(prompt.passage_ids) for prompt in prompts], **sides, padding_value=-1)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long()
    positions = passage_positions(numbers, mask)
    check_length(int(positions.max()) + 1, "The prompt", model.config)
    cached = slice(0, -1)
    output = model(
        input_ids=ids[:, cached].to(model.device),
        attention_mask=separate_passages(mask[:, cached], numbers[:, cached], model.dtype).to(model.device),
        position_ids=positions[:, cached].to(model.device),
        use_cache=True,
        logits_to_keep=1,
    )
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: tensor.to(model.device) for name, tensor in inputs.items()} | {CACHE: cache_of(output)}


@torch.inference_mode()
def answer_compressed(
    model, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: None = None
) -> list[Answer]:
    """Answer with a model of COCOM's design, [`CompressingModel`], which compresses the passages itself."""
    # Imported here and below, because the module imports TRL, which is slow, and only these methods need it.
    from ..train.cocom import CocomCollator

    prompts = [independent_text(processor, row)._asdict() for row in rows]
    device, pad = model.compression_token.device, processor.tokenizer.pad_token_id or 0
    batch = CocomCollator(pad, model.tokens_per_slot, padding_side="left")(prompts)
    batch = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    mask = batch.pop("attention_mask")
    ids = model.model.generate(
        inputs_embeds=model.embed(**batch), attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )  # given embeddings, `generate` returns the new tokens only
    texts = processor.batch_decode(ids, skip_special_tokens=True)
    prompt_ids = [ids[is_real].tolist() for ids, is_real in zip(batch["input_ids"], mask.bool(), strict=True)]
    context_tokens = batch["slot_mask"].sum(dim=1).tolist()
    passage_tokens = count_tokens(processor.tokenizer, [passages_text(row) for row in rows])
    columns = zip((text.strip() for text in texts), prompt_ids, context_tokens, passage_tokens, strict=True)
    return [Answer(*column) for column in columns]


def _generate(model, processor, inputs, rows: list[Row], context_tokens: list[int], **settings: Any) -> list[Answer]:
    """Greedy answers to left-padded prompts, `input_ids` (batch, seq_len); `settings` are those of
    `greedy_answers`."""
    texts, answerabilities = greedy_answers(model, processor, inputs, **settings)
    prompts = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    prompt_ids = [ids[is_real].tolist() for ids, is_real in prompts]
    passage_tokens = count_tokens(processor.tokenizer, [passages_text(row) for row in rows])
    columns = zip(texts, prompt_ids, context_tokens, passage_tokens, answerabilities, strict=True)
    return [Answer(*column) for column in columns]


# Models


@functools.lru_cache(maxsize=1)  # methods that use the same checkpoint are consecutive
def load_aligner(checkpoint: str, device: str) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """Model and processor of an aligner, ready to generate. An encoder's dtype of `"auto"` is float32 here, so that a
    run continued on another machine uses the same slots."""
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=default_dtype(device)).eval().to(device)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    if processor.encoder.dtype == "auto":
        processor.encoder.dtype = "float32"
    return model, processor


def load_backbone(aligner: str, device: str):
    """An aligner's base model, without the aligner."""
    config = ArcAlignerForCausalLM.config_class.from_pretrained(aligner)
    name, revision = resolve_model(config.base_model_name_or_path), config.base_model_revision
    return AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype=default_dtype(device))


def load_text_lora(aligner: str, lora: str, device: str):
    """The aligner's backbone with a LoRA of `train/full_text.py` merged into it, and the processor."""
    base = load_backbone(aligner, device)
    model = PeftModel.from_pretrained(base, lora).merge_and_unload().eval().to(device)
    return model, ArcAlignerProcessor.from_pretrained(aligner)


def load_compressing(aligner: str, folder: str, device: str):
    """The aligner's backbone with the weights of a run of `train/cocom.py`, and the processor."""
    from ..train.cocom import CompressingModel

    model = CompressingModel.load(load_backbone(aligner, device), folder).eval().to(device)
    return model, ArcAlignerProcessor.from_pretrained(aligner)


# Batches


def in_batches(rows: list[Row], batch_size: int, run: Callable[[list[Row]], Any], title: str) -> None:
    """Run a function on batches of rows, with a progress bar. The longest passages come first, so that there is little
    padding and a lack of memory shows immediately; batches are then halved."""
    rows = sorted(rows, key=lambda row: sum(len(passage["text"]) for passage in row["passages"]), reverse=True)
    done, show_progress = 0, progress_lines(title, len(rows))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=len(rows))

        while done < len(rows):
            batch = rows[done : done + batch_size]
            try:
                run(batch)
            except (RuntimeError, MemoryError) as error:
                if len(batch) == 1 or not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
                    raise
            else:
                done += len(batch)
                progress.update(bar, completed=done)
                show_progress(done)
                continue
            # After the `except` block, where no reference to the tensors of the failed batch remains.
            batch_size = len(batch) // 2
            logger.warning("Out of memory: continuing with %s per batch.", counted(batch_size, "question"))
            clear_device_cache(garbage_collection=True)
