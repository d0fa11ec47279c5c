"""Reconstruction perplexity: how well slots are read back as the text that they stand for.

    python -m arcaligner.evaluation.analyses reconstruction --files heldout.jsonl.gz \\
        --checkpoint "ours=runs/mine/1_reconstruction" --checkpoint "w/o LoRA=runs/projector_only/1_reconstruction"

"Base" is the backbone that repeats the text from the text: the upper limit. Beside it the paper has "xRAG" (a projector
alone, one slot per passage), "w/o LoRA" (a projector alone) and "ours", all after stage I. `--tokens-per-slot` reads
each aligner at several rates.
"""

import itertools
import math
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

from ...common.rows import Row, read_rows
from ...configuration_arcaligner import ArcAlignerConfig
from ...modeling_arcaligner import ArcAlignerForCausalLM
from ...processing_arcaligner import ArcAlignerProcessor
from ...train.data import ContextCollator, Example, ExampleBuilder, encode_slots
from ..answering import in_batches, load_aligner
from ..metrics import ratio_interval
from ..settings import split_rates
from .figures import COLORS, FIGURES, BatchSize, Device, Folder, error_bars, new_figure, save_analysis

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


def reconstruction(
    files: Annotated[list[Path], typer.Option(help="Held-out paragraphs, JSON Lines; can be repeated.")],
    checkpoint: Annotated[
        list[str], typer.Option(metavar="TITLE=PATH", help="An aligner and its name in the figure; can be repeated.")
    ],
    folder: Folder = FIGURES,
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="Numbers or `segment`, separated by commas. Default: the checkpoint's own.")
    ] = None,
    num_paragraphs: Annotated[int, typer.Option("-n", help="Maximum number of paragraphs.", min=1)] = 2000,
    max_segments: Annotated[
        int | None, typer.Option(help="Segments of a target. Default: the whole paragraph.", min=1)
    ] = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
) -> None:
    """Draws how well slots are read back as text, for several checkpoints."""
    arms = read_arms(checkpoint, split_rates(tokens_per_slot))
    rows = [row for path in files for row in read_rows(path) if any(each["text"].strip() for each in row["passages"])]
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))} hold no paragraph with text.")
    found = {arm: summarize(measure(arm, rows[:num_paragraphs], max_segments, batch_size, device)) for arm in arms}
    name = "reconstruction" if max_segments is None else f"reconstruction_{max_segments}"
    target = "whole" if max_segments is None else f"{max_segments} segment{'s' * (max_segments > 1)} at a time"
    caption = CAPTION.format(target=target)
    numbers = {"max_segments": max_segments, "arms": [{**asdict(arm), **each} for arm, each in found.items()]}
    save_analysis(folder, name, draw({arm.title: each for arm, each in found.items()}), numbers, caption)
    typer.echo(caption)


def read_arms(checkpoints: list[str], tokens_per_slot: list[int | str] | None = None) -> list[ReadFrom]:
    """
    A bar for the backbone, then one per `TITLE=PATH` pair.

    Raises:
        `ValueError`: no such pair, two bars of the same name, checkpoints of different backbones.
    """
    arms = []
    for pair in checkpoints:
        title, _, path = pair.partition("=")
        if not title.strip() or not path.strip():
            raise ValueError(f'`--checkpoint {pair}` is not of the form TITLE=PATH, such as "ours=runs/mine".')
        arms.append(ReadFrom(title.strip(), path.strip()))
    configs = {arm.title: ArcAlignerConfig.from_pretrained(arm.checkpoint) for arm in arms}
    backbones = {name: f"{each.base_model_name_or_path}@{each.base_model_revision}" for name, each in configs.items()}
    if len(set(backbones.values())) > 1:
        raise ValueError(f"Perplexities of different backbones cannot be compared: {backbones}. Draw each by itself.")
    base = ReadFrom("Base", arms[0].checkpoint, "text")
    if tokens_per_slot:
        rates = itertools.product(arms, tokens_per_slot)
        arms = [replace(arm, title=f"{arm.title} x{rate}", tokens_per_slot=rate) for arm, rate in rates]
    arms = [base, *arms]
    if len({arm.title for arm in arms}) < len(arms):
        raise ValueError(f"Two arms have one name: {', '.join(arm.title for arm in arms)}. Name them apart.")
    return arms


def measure(
    arm: ReadFrom, rows: list[Row], max_segments: int | None, batch_size: int, device: str
) -> list[dict[str, Any]]:
    """What each paragraph costs to read back: `nll` in nats and `tokens` of its targets, and its `slots`."""
    model, processor = load_aligner(arm.checkpoint, device)
    rate = processor.tokens_per_slot if arm.tokens_per_slot is None else arm.tokens_per_slot
    has_words = bool(model.config.word_parts) and arm.reads != "text"
    collator = ContextCollator(
        processor.context_token_id, processor.tokenizer.pad_token_id or 0, [rate], context_words=has_words
    )
    examples = [
        (number, example if arm.reads == "slots" else with_text(example))
        for number, row in enumerate(rows)
        for example in paragraph_examples(processor, row, max_segments)
    ]
    examples.sort(key=lambda pair: -pair[1].length)  # those of similar length share a batch
    costs = [{"nll": 0.0, "tokens": 0, "slots": 0} for _ in rows]
    losses = in_batches(
        examples, batch_size, lambda part: target_losses(model, processor, collator, [each for _, each in part])
    )
    pairs = (pair for part, of_part in losses for pair in zip(part, of_part, strict=True))
    for (number, example), (nll, num_slots) in track(pairs, arm.title, total=len(examples), transient=True):
        costs[number]["nll"] += nll
        costs[number]["slots"] += num_slots
        costs[number]["tokens"] += sum(label != -100 for turn in example.turns for label in turn.labels)
    return costs


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


@torch.inference_mode()
def target_losses(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, collator: ContextCollator, examples: list[Example]
) -> list[tuple[float, int]]:
    """The negative log-likelihood of each example's target, in nats, summed over its tokens, and its slots."""
    batch = collator([asdict(each) for each in examples])
    labels = batch["labels"]  # (batch, seq_len)
    columns = labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1  # one before the first target
    inputs = {"input_ids": batch["input_ids"], "attention_mask": (batch["turn_ids"] >= 0).long()}
    if any(batch["num_slots"]):
        inputs["context_embeds"] = encode_slots(processor, batch)
    if "context_word_ids" in batch:
        inputs["context_word_ids"] = batch["context_word_ids"]
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
    bars = axes.bar(list(arms), means - 1, bottom=1, width=0.6, color=colors, yerr=error_bars(intervals), capsize=4)
    axes.bar_label(bars, labels=[f"{each:.2f}" for each in means], padding=3)
    axes.set_yscale("log")
    axes.set_ylim(1, 1.5 * max(interval[2] for interval in intervals))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("perplexity")
    return figure
