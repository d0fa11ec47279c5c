"""Reconstruction perplexity: how well slots are read back as the text that they stand for.

    python -m arcaligner.evaluation.analyses reconstruction --files heldout.jsonl.gz \\
        --checkpoint "ours=runs/mine/1_reconstruction" --checkpoint "w/o LoRA=runs/projector_only/1_reconstruction"

"Base" is the backbone that repeats the text from the text: the upper limit. Beside it the paper has "xRAG" (a projector
alone, one slot per passage), "w/o LoRA" (a projector alone) and "ours", all after stage I. `--tokens-per-slot` reads
each aligner at several rates.

    <output>/reconstruction/<arm>.jsonl    one paragraph per line: nll, tokens, slots; a killed run continues
"""

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
from ...modeling_arcaligner import ArcAlignerForCausalLM
from ...processing_arcaligner import ArcAlignerProcessor
from ...train.collator import ContextCollator
from ...train.corpora import Row, read_rows
from ...train.data import Example, ExampleBuilder
from ..answering import encode_slots, in_batches, load_aligner, longest_first
from ..evaluate import machine_line
from ..methods import fingerprint
from ..metrics import ratio_interval
from ..runs import AnswerFile, answers_to, row_digest
from ..settings import split_rates
from .figures import COLORS, FIGURES, BatchSize, Device, Folder, new_figure, reach, save_analysis

logger = logging.getLogger(__name__)

PAPER_ARMS = ("xRAG", "w/o LoRA", "ours")
CAPTION = (
    "Each bar is the perplexity of the text of held-out paragraphs, {target}, when a model reads it back from what the "
    "bar names; 1 is certainty, lower is better. Base recites the text from the text itself and is the limit. Whiskers "
    "are 95 % bootstrap intervals over paragraphs; the scale is logarithmic."
)


@dataclass(frozen=True)
class ReadFrom:
    """A bar: what the text is read back from, `"text"` or `"slots"`, by which checkpoint."""

    title: str
    checkpoint: str
    reads: str = "slots"
    tokens_per_slot: int | str | None = None

    @property
    def file_name(self) -> str:
        return "_".join(re.findall(r"\w+", self.title.lower()))


def reconstruction(
    files: Annotated[list[Path], typer.Option(help="Held-out paragraphs, JSON Lines; can be repeated.")],
    checkpoint: Annotated[
        list[str], typer.Option(metavar="TITLE=PATH", help="An aligner and its name in the figure; can be repeated.")
    ],
    folder: Folder = FIGURES,
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="Rates, numbers or `segment`, with commas between; else the checkpoint's own.")
    ] = None,
    num_paragraphs: Annotated[int, typer.Option("-n", help="Maximum number of paragraphs.", min=1)] = 2000,
    max_segments: Annotated[
        int | None, typer.Option(help="Segments of a target; without, those of the whole paragraph.", min=1)
    ] = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
) -> None:
    """Draws how well slots are read back as text, for several checkpoints."""
    arms = read_arms(checkpoint, split_rates(tokens_per_slot))
    rows = read_paragraphs(files, num_paragraphs)
    name = "reconstruction" if max_segments is None else f"reconstruction_{max_segments}"
    measured = {}
    for arm in arms:
        file = AnswerFile(folder, name, arm.file_name)
        measure(arm, rows, file, max_segments, batch_size, device)
        measured[arm] = summarize(answers_to(rows, folder, name, arm.file_name))
    target = "whole" if max_segments is None else f"{max_segments} segment{'s' * (max_segments > 1)} at a time"
    caption = CAPTION.format(target=target)
    numbers = {"max_segments": max_segments, "arms": [{**asdict(arm), **found} for arm, found in measured.items()]}
    save_analysis(folder, name, draw({arm.title: found for arm, found in measured.items()}), numbers, caption)
    typer.echo(caption)


def read_arms(checkpoints: list[str], tokens_per_slot: list[int | str] | None = None) -> list[ReadFrom]:
    """
    The bars of `TITLE=PATH` pairs, after that of their backbone.

    Raises:
        `ValueError`: no such pair, two bars of the same name, checkpoints of different backbones.
    """
    arms = []
    for pair in checkpoints:
        title, _, path = pair.partition("=")
        if not title.strip() or not path.strip():
            raise ValueError(f'`--checkpoint {pair}` is not of the form TITLE=PATH, such as "ours=runs/mine".')
        arms.append(ReadFrom(title.strip(), path.strip()))
    backbones = {arm.title: backbone_name(ArcAlignerConfig.from_pretrained(arm.checkpoint)) for arm in arms}
    if len(set(backbones.values())) > 1:
        raise ValueError(f"Perplexities of different backbones cannot be compared: {backbones}. Draw each by itself.")
    if left_out := [title for title in PAPER_ARMS if title not in backbones]:
        logger.warning("left out, for no checkpoint is named so: %s", ", ".join(left_out))
    if tokens_per_slot:
        arms = [
            replace(arm, title=f"{arm.title} x{rate}", tokens_per_slot=rate) for arm in arms for rate in tokens_per_slot
        ]
    arms = [ReadFrom("Base", arms[0].checkpoint, "text"), *arms]
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
        `ValueError`: none has; two of the same id.
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


def measure(arm: ReadFrom, rows: list[Row], file: AnswerFile, max_segments: int | None, batch_size: int, device: str):
    """Adds the rows that are not in `file` yet."""
    config = ArcAlignerConfig.from_pretrained(arm.checkpoint)
    made_with = {
        "weights": backbone_name(config) if arm.reads == "text" else fingerprint(arm.checkpoint),
        "checkpoint": arm.checkpoint,
        "reads": arm.reads,
        "tokens_per_slot": arm.tokens_per_slot,
        "gate_mode": None if arm.reads == "text" else config.gate_mode,
        "max_segments": max_segments,
        "batch_size": batch_size,
        "machine": machine_line(device),
    }
    left = longest_first(file.open(made_with, rows))
    if not left:
        return
    model, processor = load_aligner(arm.checkpoint, device)
    rate = processor.tokens_per_slot if arm.tokens_per_slot is None else arm.tokens_per_slot
    collator = ContextCollator(
        processor.context_token_id,
        processor.tokenizer.pad_token_id or 0,
        [rate],
        context_words=bool(config.word_parts) and arm.reads != "text",
    )
    with file.claim():
        for start in track(range(0, len(left), batch_size), arm.title, transient=True):
            batch = left[start : start + batch_size]
            examples = [list(paragraph_examples(processor, row, max_segments)) for row in batch]
            if arm.reads == "text":
                examples = [[with_text(each) for each in of_row] for of_row in examples]
            file.append(records(model, processor, collator, batch, examples))


def paragraph_examples(processor: ArcAlignerProcessor, row: Row, max_segments: int | None) -> Iterator[Example]:
    """Examples of stage I that cover a row's passages, in order, of `max_segments` each or of a whole passage."""
    builder = ExampleBuilder(processor)
    tokens = processor.tokenize_segments(processor.segment_documents(row["passages"]), row["passages"])
    for number, group in itertools.groupby(tokens, key=lambda each: each.segment.document):
        of_passage = list(group)
        size = max_segments or len(of_passage)
        for start in range(0, len(of_passage), size):
            chunk = of_passage[start : start + size]
            yield builder.reconstruction_example(row["id"], row["passages"][number], chunk, [])


def with_text(example: Example) -> Example:
    """The example with its target's text, to recite, in the place of the slots."""
    (turn,) = example.turns
    target = [label for label in turn.labels if label != -100]
    return replace(example, head=example.head + target[:-1], segments=[])  # without the end of the turn


def records(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    collator: ContextCollator,
    rows: list[Row],
    examples: list[list[Example]],
) -> Iterator[dict[str, Any]]:
    """The line of each row. A forward has as many examples as there are rows, of about one length, or fewer."""
    flat = [example for of_row in examples for example in of_row]
    by_length = sorted(range(len(flat)), key=lambda index: -flat[index].length)

    def losses_of(part: list[int]) -> list[tuple[float, int]]:
        return target_losses(model, processor, collator, [flat[index] for index in part])

    found = {}
    for part, losses in in_batches(by_length, len(rows), losses_of):
        found |= zip(part, losses, strict=True)
    losses = (found[index] for index in range(len(flat)))
    for row, of_row in zip(rows, examples, strict=True):
        of_examples = list(itertools.islice(losses, len(of_row)))
        yield {
            "id": row["id"],
            "nll": sum(nll for nll, _ in of_examples),
            "tokens": sum(label != -100 for example in of_row for turn in example.turns for label in turn.labels),
            "slots": sum(num_slots for _, num_slots in of_examples),
            "row": row_digest(row),
        }


@torch.inference_mode()
def target_losses(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, collator: ContextCollator, examples: list[Example]
) -> list[tuple[float, int]]:
    """The negative log-likelihood of each example's target, in nats, summed over its tokens, and its slots."""
    batch = collator([asdict(each) for each in examples])
    labels = batch["labels"]  # (batch, seq_len)
    columns = labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1  # one before the first target
    inputs = {"input_ids": batch["input_ids"], "attention_mask": (batch["turn_ids"] >= 0).long()}
    inputs |= encode_slots(processor, batch)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    logits = model(**inputs, logits_to_keep=columns, use_cache=False).logits[:, :-1]  # (batch, columns - 1, vocab)
    labels = labels[:, 1 - columns :].to(model.device)
    losses = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    return list(zip(losses.view_as(labels).double().sum(dim=1).tolist(), batch["num_slots"], strict=True))


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
    """One bar per arm."""
    intervals = [found["perplexity"] for found in arms.values()]
    means = np.array([interval[0] for interval in intervals])
    figure, axes = new_figure(width=1.5 + 1.2 * len(arms))
    colors = list(itertools.islice(itertools.cycle(COLORS), len(arms)))
    bars = axes.bar(list(arms), means - 1, bottom=1, width=0.6, color=colors, yerr=reach(intervals), capsize=4)
    axes.bar_label(bars, labels=[f"{each:.2f}" for each in means], padding=3)
    axes.set_yscale("log")
    axes.set_ylim(1, 1.5 * max(interval[2] for interval in intervals))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("perplexity")
    return figure
