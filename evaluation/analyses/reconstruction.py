"""Reconstruction perplexity: how well slots are read back as the text that they stand for.

    python -m arcaligner.evaluation.analyses reconstruction --files heldout.jsonl.gz \\
        --checkpoint "ours=runs/mine/1_reconstruction" --checkpoint "w/o LoRA=runs/projector_only/1_reconstruction"

"Base" is the backbone that recites the text from the text: the upper limit. Beside it the paper has "xRAG" (a projector
alone, one slot a passage), "w/o LoRA" (a projector alone) and "ours", all after stage I. `--lora-off` adds each aligner
with its LoRA switched off, which is not the same: its projector was trained together with the LoRA.

    <output>/reconstruction/<arm>.jsonl    a paragraph a line: nll, tokens, slots; a killed run goes on where it was
"""

import contextlib
import itertools
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import track
from torch.nn.functional import cross_entropy

from ...configuration_arcaligner import ArcAlignerConfig
from ...configuration_arcaligner import cache_directory
from ...modeling_arcaligner import ArcAlignerForCausalLM
from ...processing_arcaligner import ArcAlignerProcessor
from ...train.collator import ContextCollator, labelled_columns
from ...train.corpora import read_rows
from ...train.data import Example, ExampleBuilder
from ...train.embedding_store import EmbeddingStore
from ...train.encoding import encoder_settings
from ..answering import Row
from ..batches import in_batches, longest_first
from ..evaluate import machine
from ..fingerprints import fingerprint
from ..reading import load_aligner, lora_off
from ..runs import AnswerFile, digest
from .figures import COLOURS, new_figure, save_analysis
from .intervals import ratio_interval
from .options import FIGURES, BatchSize, Device, Folder

logger = logging.getLogger(__name__)

PAPER_ARMS = ("xRAG", "w/o LoRA", "ours")
READING = (
    "Each bar is the perplexity of the text of held-out paragraphs, {target}, when a model reads it back from what the "
    "bar names; 1 is certainty, lower is better. Base recites the text from the text itself and is the limit. Whiskers "
    "are 95 % bootstrap intervals over paragraphs; the scale is logarithmic."
)


@dataclass(frozen=True)
class Arm:
    """A bar: what the text is read back from, `"text"`, `"slots"` or `"slots, LoRA off"`, by which checkpoint."""

    title: str
    checkpoint: str
    reads: str = "slots"

    @property
    def file_name(self) -> str:
        return "_".join(re.findall(r"\w+", self.title.lower()))


def reconstruction(
    files: Annotated[list[Path], typer.Option(help="Held-out paragraphs, JSON Lines; can be repeated.")],
    checkpoint: Annotated[
        list[str], typer.Option(metavar="TITLE=PATH", help="An aligner and its name in the figure; can be repeated.")
    ],
    folder: Folder = FIGURES,
    with_lora_off: Annotated[bool, typer.Option("--lora-off", help="Each LoRA switched off, too.")] = False,
    num_paragraphs: Annotated[int, typer.Option("-n", help="At most so many paragraphs.", min=1)] = 2000,
    max_segments: Annotated[
        int | None, typer.Option(help="Segments of a target; without, those of the whole paragraph.", min=1)
    ] = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
) -> None:
    """Draws how well slots are read back as text, for several checkpoints."""
    arms = read_arms(checkpoint, with_lora_off)
    rows = read_paragraphs(files, num_paragraphs)
    name = "reconstruction" if max_segments is None else f"reconstruction_{max_segments}"
    measured = {}
    for arm in arms:
        file = AnswerFile(folder, name, arm.file_name)
        measure(arm, rows, file, max_segments, batch_size, device)
        wanted = {row["id"] for row in rows}
        measured[arm] = summarize([record for record in file.read() if record["id"] in wanted])
    target = "whole" if max_segments is None else f"{max_segments} segment{'s' * (max_segments > 1)} at a time"
    reading = READING.format(target=target)
    numbers = {"max_segments": max_segments, "arms": [asdict(arm) | found for arm, found in measured.items()]}
    save_analysis(folder, name, draw({arm.title: found for arm, found in measured.items()}), numbers, reading)
    typer.echo(reading)


def read_arms(checkpoints: list[str], with_lora_off: bool) -> list[Arm]:
    """
    The arms of `TITLE=PATH` pairs, after that of their backbone.

    Raises:
        `ValueError`: no such pair, two arms of a name, checkpoints of different backbones.
    """
    arms = []
    for pair in checkpoints:
        title, _, path = pair.partition("=")
        if not title.strip() or not path.strip():
            raise ValueError(f'`--checkpoint {pair}` is not of the form TITLE=PATH, such as "ours=runs/mine".')
        arms.append(Arm(title.strip(), path.strip()))
    configs = {arm: ArcAlignerConfig.from_pretrained(arm.checkpoint) for arm in arms}
    backbones = {arm.title: backbone_name(config) for arm, config in configs.items()}
    if len(set(backbones.values())) > 1:
        raise ValueError(f"Perplexities of different backbones cannot be compared: {backbones}. Draw each by itself.")
    if left_out := [title for title in PAPER_ARMS if title not in backbones]:
        logger.warning("left out, for no checkpoint is named so: %s", ", ".join(left_out))
    if with_lora_off:
        with_lora = [arm for arm, config in configs.items() if config.lora_r]
        arms += [replace(arm, title=f"{arm.title}, LoRA off", reads="slots, LoRA off") for arm in with_lora]
    arms = [Arm("Base", arms[0].checkpoint, "text"), *arms]
    if len({arm.file_name for arm in arms}) < len(arms):
        raise ValueError(f"Two arms have one name: {', '.join(arm.title for arm in arms)}. Name them apart.")
    return arms


def backbone_name(config: ArcAlignerConfig) -> str:
    """Name and revision of an aligner's backbone."""
    return f"{config.base_model_name_or_path}@{config.base_model_revision or 'main'}"


def read_paragraphs(files: list[Path], num_paragraphs: int) -> list[Row]:
    """
    The first rows of the files that have text.

    Raises:
        `ValueError`: none has; two of an id.
    """
    rows = [row for path in files for row in read_rows(path)]
    found = [row for row in rows if any(passage["text"].strip() for passage in row["passages"])]
    if len(found) < len(rows):
        logger.warning("%d rows left out, without text", len(rows) - len(found))
    found = found[:num_paragraphs]
    if not found:
        raise ValueError(f"{', '.join(map(str, files))} hold no paragraph with text.")
    if len({row["id"] for row in found}) < len(found):
        raise ValueError(f"Several paragraphs of {', '.join(map(str, files))} have one id. Give each its own.")
    return found


def measure(arm: Arm, rows: list[Row], file: AnswerFile, max_segments: int | None, batch_size: int, device: str):
    """Adds the rows that are not in `file` yet."""
    config = ArcAlignerConfig.from_pretrained(arm.checkpoint)
    made_with = {
        "weights": backbone_name(config) if arm.reads == "text" else fingerprint(arm.checkpoint),
        "checkpoint": arm.checkpoint,
        "reads": arm.reads,
        "gate_mode": None if arm.reads == "text" else config.gate_mode,
        "max_segments": max_segments,
        "batch_size": batch_size,
        "machine": machine(device),
    }
    left = file.open(made_with, rows)
    if not left:
        return
    model, processor = load_aligner(arm.checkpoint, device)
    examples = {row["id"]: list(paragraph_examples(processor, row, max_segments)) for row in left}
    if arm.reads == "text":
        examples = {key: [with_text(each, processor.context_token_id) for each in of] for key, of in examples.items()}
    collator = make_collator(processor, [each for of_row in examples.values() for each in of_row])
    with file.claim(), lora_off(model) if arm.reads == "slots, LoRA off" else contextlib.nullcontext():
        rows = longest_first(left)
        for start in track(range(0, len(rows), batch_size), arm.title, transient=True):
            batch = rows[start : start + batch_size]
            file.append(records(model, collator, batch, [examples[row["id"]] for row in batch]))


def paragraph_examples(processor: ArcAlignerProcessor, row: Row, max_segments: int | None) -> Iterator[Example]:
    """Examples of stage I that cover a row's passages, in order, of `max_segments` each or of a whole passage."""
    builder = ExampleBuilder(processor)
    segments = processor.segment_documents(row["passages"])
    for _, group in itertools.groupby(segments, key=lambda segment: segment.document):
        of_passage = list(group)
        size = max_segments or len(of_passage)
        for start in range(0, len(of_passage), size):
            yield builder.reconstruction_example(row["id"], row["passages"], of_passage[start : start + size])


def with_text(example: Example, context_token_id: int) -> Example:
    """The example with its target's text, to recite, in the place of the slots."""
    target = [label for label in example.labels if label != -100]
    first = example.input_ids.index(context_token_id)
    prompt = example.input_ids[:first] + target[:-1]  # without the end of the turn
    prompt += example.input_ids[first + len(example.segment_texts) : len(example.input_ids) - len(target)]
    return Example(example.row_id, prompt + target, [-100] * len(prompt) + target, segment_texts=[])


def make_collator(processor: ArcAlignerProcessor, examples: list[Example]) -> ContextCollator:
    """Pads examples as training does, from the store of embeddings that training has, with those of `examples`."""
    store = EmbeddingStore(
        cache_directory() / "embeddings",
        processor.encoder_name_or_path,
        processor.encoder_hidden_size,
        lambda texts: processor.encode_segments(texts).numpy(),
        encoder_settings(processor),
    )
    store.add(text for example in examples for text in example.segment_texts)
    return ContextCollator(store, processor.context_token_id, processor.tokenizer.pad_token_id or 0)


def records(
    model: ArcAlignerForCausalLM, collator: ContextCollator, rows: list[Row], examples: list[list[Example]]
) -> Iterator[dict[str, Any]]:
    """The line of each row. A forward has as many examples as there are rows, of about one length, or fewer."""
    flat = [example for of_row in examples for example in of_row]
    by_length = sorted(range(len(flat)), key=lambda index: -len(flat[index].input_ids))

    def losses_of(part: list[int]) -> list[float]:
        return target_losses(model, collator, [flat[index] for index in part])

    found = {}
    for part, losses in in_batches(by_length, len(rows), losses_of):
        found |= zip(part, losses, strict=True)
    losses = (found[index] for index in range(len(flat)))
    for row, of_row in zip(rows, examples, strict=True):
        yield {
            "id": row["id"],
            "nll": sum(itertools.islice(losses, len(of_row))),
            "tokens": sum(label != -100 for example in of_row for label in example.labels),
            "slots": sum(len(example.segment_texts) for example in of_row),
            "row": digest(row),
        }


@torch.inference_mode()
def target_losses(model: ArcAlignerForCausalLM, collator: ContextCollator, examples: list[Example]) -> list[float]:
    """The negative log-likelihood of each example's target, in nats, summed over its tokens."""
    features = [asdict(each) | {"segment_rows": collator.store.add(each.segment_texts)} for each in examples]
    batch = collator(features)
    labels = batch["labels"]  # (batch, seq_len)
    columns = labelled_columns(labels)
    inputs = {key: batch[key].to(model.device) for key in ("input_ids", "attention_mask")}
    if batch["context_embeds"].shape[1]:
        inputs["context_embeds"] = batch["context_embeds"].to(model.device)
    logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits[:, :-1]  # (batch, columns - 1, vocab)
    labels = labels[:, 1 - columns :].to(model.device)
    losses = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    return losses.view_as(labels).double().sum(dim=1).tolist()


def summarize(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity over all tokens, with the ends of its interval."""
    nll, tokens = (np.array([record[key] for record in found]) for key in ("nll", "tokens"))  # (num_rows,)
    low, high = ratio_interval(nll, tokens)
    return {
        "paragraphs": len(found),
        "tokens": int(tokens.sum()),
        "slots": sum(record["slots"] for record in found),
        "perplexity": [math.exp(each) for each in (nll.sum() / tokens.sum(), low, high)],
    }


def draw(arms: dict[str, dict[str, Any]]) -> Figure:
    """A bar an arm."""
    mean, low, high = np.transpose([found["perplexity"] for found in arms.values()])  # each (num_arms,)
    figure, axes = new_figure(width=1.5 + 1.2 * len(arms))
    reach = np.maximum(0, [mean - low, high - mean])  # an interval of one value may miss it by rounding
    colours = list(itertools.islice(itertools.cycle(COLOURS), len(arms)))
    bars = axes.bar(list(arms), mean - 1, bottom=1, width=0.6, color=colours, yerr=reach, capsize=4)
    axes.bar_label(bars, labels=[f"{each:.2f}" for each in mean], padding=3)
    axes.set_yscale("log")
    axes.set_ylim(1, 1.5 * max(high))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("perplexity")
    return figure
