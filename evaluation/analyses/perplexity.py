"""Reconstruction perplexity after stage I: how well the text can be reconstructed from its slots.

*Base*, the upper bound, is the backbone that repeats a text it is given. The paper compares it with xRAG (a projector
alone, one slot per passage), w/o LoRA (a projector alone) and its own model.
"""

import itertools
import math
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import track

from ...common.files import markdown_table
from ...common.rows import Row
from ...modeling_arcaligner import ArcAlignerForCausalLM, head_nll
from ...processing_arcaligner import ArcAlignerProcessor
from ...train.examples import Example, ExampleBuilder
from ...train.validate import target_losses
from ..metrics import resample_counts
from .figures import COLORS, new_figure

BASE = "Base"  # the backbone repeats the text that it is given


def text_examples(processor: ArcAlignerProcessor, rows: list[Row]) -> list[Example]:
    """An example of stage I for each passage that has a text: all of its segments as slots, its text as the target."""
    builder = ExampleBuilder(processor, max_segments=1)
    return [example for row in rows for example in builder.passage_examples(row)]


def slot_losses(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str
) -> np.ndarray:
    """NLL of each passage's text, reconstructed from its slots, in nats, summed over its tokens, and the number of
    tokens: (num_passages, 2)."""
    return target_losses(model, processor, text_examples(processor, rows), tokens_per_slot)


@torch.inference_mode()
def base_losses(model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row]) -> np.ndarray:
    """Like [`slot_losses`], for the backbone with the text itself in place of the slots: (num_passages, 2)."""
    examples = text_examples(processor, rows)
    losses = np.zeros((len(examples), 2))
    for number, example in enumerate(track(examples, "losses with text in place of slots", transient=True)):
        (turn,) = example["turns"]
        target = [label for label in turn["labels"] if label != -100]
        before = example["head"] + target[:-1]  # the text, without the end of the turn
        ids = torch.tensor([before + turn["input_ids"]], device=model.device)
        labels = torch.tensor([-100] * len(before) + turn["labels"], device=model.device)[1:]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        is_target = labels != -100
        nll = head_nll(hidden[is_target], labels[is_target], model.lm_head, model.config.text_config)
        losses[number] = nll.item(), is_target.sum().item()
    return losses


def summarize_losses(losses: np.ndarray) -> dict[str, Any]:
    """Perplexity over all tokens of `losses` (num_passages, 2), with the ends of its 95 % bootstrap interval."""
    nll, tokens = losses.T
    drawn = resample_counts(len(losses))  # (resamples, num_passages)
    ends = np.quantile((drawn @ nll) / (drawn @ tokens), (0.025, 0.975))
    means = [nll.sum() / tokens.sum(), *ends]
    return {"passages": len(losses), "tokens": int(tokens.sum()), "perplexity": [math.exp(mean) for mean in means]}


def perplexity_table(arms: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: a row for each of the things that the text is reconstructed from."""
    rows = [
        [title, "{:.2f} [{:.2f}, {:.2f}]".format(*arm["perplexity"]), arm["passages"], f"{arm['tokens']:,}"]
        for title, arm in arms.items()
    ]
    return markdown_table(["Model", "Perplexity", "Paragraphs", "Tokens"], rows)


def draw_perplexity(arms: dict[str, dict[str, Any]]) -> Figure:
    """One bar for each of the `arms` of [`perplexity_table`], on a logarithmic scale."""
    means, lows, highs = np.transpose([arm["perplexity"] for arm in arms.values()])
    figure, axes = new_figure(1.5 + 1.3 * len(arms), 3.4)
    colors = list(itertools.islice(itertools.cycle(COLORS), len(arms)))
    bars = axes.bar(list(arms), means, width=0.6, color=colors, yerr=[means - lows, highs - means], capsize=4)
    axes.bar_label(bars, labels=[f"{mean:.2f}" for mean in means], padding=3)
    axes.set(yscale="log", ylim=(1, 2 * highs.max()), ylabel="perplexity")
    axes.yaxis.set_major_formatter("{x:g}")
    return figure
