"""Find the pointer heads of an aligner: attention heads that attend to the slots which an answer comes from.

    python -m arcaligner.train.pointer --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

A copied answer may begin at any word of the passages. Some attention heads of the base model attend to the slots with
the answer already before its first token is generated. With a `pointer_weight` above 0, the words of these slots have
an advantage as the first word: the logarithm of the attention, times the weight. With `zoom`, the slots with most of
this attention are replaced with finer ones (`zoom_arcaligner.py`).

1. *Which heads*: For the questions of half of the held-out articles, and for each head, how often the slot with the
   most attention from the prompt's last token is one with the answer. The best 16 heads of the model are used.
2. *Which weight*: The F1 of greedy answers to questions about the other half, for several weights. Differences are
   those to the weight 0, for the same questions, with their standard errors.
3. *How much zoom*: The F1 of the same questions, and the number of their slots, for several shares of the attention.

`--save` saves the heads in `config.json` of the aligner, and the best weight, if its difference, the mean over all
values of `tokens_per_slot`, is more than twice its standard error; else the weight 0, with which the heads only serve
`zoom`. The weight is the best of several, so it looks a little better than it is. No test set is used. vLLM and
llama.cpp do not report their attention, so pointer heads have no effect on answers that they generate.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers import DynamicCache

from ..answering_arcaligner import greedy_answers
from ..attention_arcaligner import CACHE
from ..common.files import counted, markdown_table, run_command
from ..common.rows import Row, token_f1
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..pointer_arcaligner import PointerAttention
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import Segment
from ..zoom_arcaligner import is_coarser
from .distractors import needed_and_others
from .num_passages import FITTED, MEASURED, half_of
from .prompts import slot_inputs, zoomed_inputs
from .ranking import difference, save_settings
from .recipe import RecipeArguments
from .validate import ALIGNER_HELP, BATCH, RECIPE_HELP, load_mean, question_rows, read_rates, read_recipe

NUM_HEADS = 16
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 3.0)
ZOOMS = (0.5, 0.7, 0.9)


def needed_rows(recipe: RecipeArguments, number: int) -> dict[int, list[Row]]:
    """About `number` questions of the held-out articles with the passages that they need, by the half of the articles
    (`FITTED` or `MEASURED`)."""
    rows = question_rows(recipe, number)
    return {
        half: [row | {"passages": needed_and_others(row)[0]} for row in rows if half_of(row) == half]
        for half in (FITTED, MEASURED)
    }


def slots_with_answer(spans: Sequence[Segment], row: Row) -> torch.BoolTensor:
    """Which slots have the first character of an answer: (num_slots,)."""
    places = {
        (number, match.start())
        for number, passage in enumerate(row["passages"])
        for answer in row["answers"]
        for match in re.finditer(re.escape(answer), passage["text"])
    }
    found = [any(span.document == number and span.start <= at < span.end for number, at in places) for span in spans]
    return torch.tensor(found, dtype=torch.bool, device="cpu")


@torch.inference_mode()
def count_hits(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: Sequence[Row], tokens_per_slot: int | str
) -> tuple[torch.Tensor, int]:
    """For each attention head of the model, for how many of the rows the slot with the most attention has the answer:
    (num_layers, num_heads); and the number of rows, without those in which no slot has it, or all slots do."""
    config, device = model.config.text_config, model.device
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    every_head = [[layer, head] for layer in range(layers) for head in range(heads)]
    hits, count = torch.zeros(layers, heads, device=device), 0
    for row in tqdm(rows, desc=f"finding heads, tokens_per_slot={tokens_per_slot}", leave=False):
        spans = processor.slot_encoder.slot_spans(row["passages"], tokens_per_slot)
        has_answer = slots_with_answer(spans, row).to(device)
        inputs = slot_inputs(processor, [row], tokens_per_slot=tokens_per_slot).to(device)
        is_slot = inputs["input_ids"][0] == model.config.context_token_id
        if int(is_slot.sum()) != len(has_answer) or not has_answer.any() or has_answer.all():
            continue
        pointer = PointerAttention(every_head)
        model.model(**inputs, **{CACHE: DynamicCache(config=config)}, pointer=pointer)
        for layer, weights in pointer.by_layer.items():  # without layers that have a sliding window
            hits[layer] += has_answer[weights[0, :, is_slot].argmax(dim=1)]
        count += 1
    return hits.cpu(), count


@torch.inference_mode()
def f1_by_weight(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: Sequence[Row], tokens_per_slot: int | str
) -> np.ndarray:
    """The F1 of greedy answers in percent, with each of `WEIGHTS`: (len(WEIGHTS), num_rows)."""
    f1, configured = np.zeros((len(WEIGHTS), len(rows))), model.config.pointer_weight
    try:
        for start in tqdm(
            range(0, len(rows), BATCH), desc=f"answering, tokens_per_slot={tokens_per_slot}", leave=False
        ):
            batch = rows[start : start + BATCH]
            inputs = slot_inputs(processor, batch, tokens_per_slot=tokens_per_slot).to(model.device)
            sources = [row["question"] for row in batch], [row["passages"] for row in batch]
            for index, model.config.pointer_weight in enumerate(WEIGHTS):
                texts, _ = greedy_answers(model, processor, inputs, *sources, tokens_per_slot=tokens_per_slot)
                scores = [100 * token_f1(text, row["answers"]) for text, row in zip(texts, batch, strict=True)]
                f1[index, start : start + len(batch)] = scores
    finally:
        model.config.pointer_weight = configured
    return f1


@torch.inference_mode()
def f1_by_zoom(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: Sequence[Row], tokens_per_slot: int | str
) -> tuple[np.ndarray, np.ndarray]:
    """The F1 of greedy answers in percent, without zoom and with each of `ZOOMS`, and the numbers of slots that they
    are from: both (1 + len(ZOOMS), num_rows). `pointer_weight` is not used."""
    f1, num_slots = np.zeros((1 + len(ZOOMS), len(rows))), np.zeros((1 + len(ZOOMS), len(rows)))
    for start in tqdm(range(0, len(rows), BATCH), desc=f"zooming, tokens_per_slot={tokens_per_slot}", leave=False):
        batch = rows[start : start + BATCH]
        inputs = slot_inputs(processor, batch, tokens_per_slot=tokens_per_slot).to(model.device)
        sources = [row["question"] for row in batch], [row["passages"] for row in batch]
        prompts = [inputs, *(zoomed_inputs(model, processor, batch, inputs, tokens_per_slot, share) for share in ZOOMS)]
        for index, prompt in enumerate(prompts):
            texts, _ = greedy_answers(model, processor, prompt, *sources)
            scores = [100 * token_f1(text, row["answers"]) for text, row in zip(texts, batch, strict=True)]
            f1[index, start : start + len(batch)] = scores
            counts = (prompt["input_ids"] == model.config.context_token_id).sum(dim=1)
            num_slots[index, start : start + len(batch)] = counts.tolist()
    return f1, num_slots


def best_weight(f1: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The weight with the highest F1, the mean over all tokens per slot; its difference to the weight 0, and its
    standard error. `f1` has an array (len(WEIGHTS), num_rows) for each number of tokens per slot, of the same rows."""
    mean = np.mean(f1, axis=0)
    best = int(mean.mean(axis=1).argmax())
    return WEIGHTS[best], *difference(mean[best], mean[0])


def main(
    recipe: Annotated[Path, typer.Option(help=RECIPE_HELP)],
    aligner: Annotated[Path, typer.Option(help=ALIGNER_HELP)],
    number: Annotated[int, typer.Option("--number", "-n", min=4, help="About how many questions to use.")] = 400,
    rates: Annotated[
        str, typer.Option(help="Values of `tokens_per_slot`, separated by commas, such as 4,8,segment.")
    ] = "4,8,segment",
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data files. Default: `data_dir` of the recipe.")
    ] = None,
    save: Annotated[
        bool,
        typer.Option("--save", help="Save the heads, and the best weight if it raises F1 significantly."),
    ] = False,
) -> None:
    """Find the attention heads that attend to the slots with the answer. Print how often they do, and the F1 of answers
    for several weights of their attention."""
    model, processor = load_mean([aligner])
    compressions = read_rates(rates)
    halves = needed_rows(read_recipe(recipe, data_dir), number)
    results = [count_hits(model, processor, halves[FITTED], rate) for rate in compressions]
    if not all(count for _, count in results):
        raise ValueError(
            f"None of {counted(len(halves[FITTED]), 'question')} has an answer in one of several slots; expected "
            "questions whose answers are copied from their passages. Use more questions (`--number`) or another recipe."
        )
    shares = torch.stack([hits / count for hits, count in results]).mean(dim=0)  # (num_layers, num_heads)
    if not shares.any():
        raise ValueError(
            f"No attention head of {aligner} finds a slot with an answer; expected a base model with layers that "
            "attend to the whole prompt, without a sliding window. Use it without `zoom` and pointer heads."
        )
    order = shares.flatten().argsort(descending=True, stable=True)[: min(NUM_HEADS, int((shares > 0).sum()))].tolist()
    model.config.pointer_heads = sorted([index // shares.shape[1], index % shares.shape[1]] for index in order)
    typer.echo(f"Pointer heads (layer, head): {model.config.pointer_heads}")
    found = [float(shares[layer, head]) for layer, head in model.config.pointer_heads]
    typer.echo(
        f"Their most attended slot has the answer for {100 * min(found):.0f} to {100 * max(found):.0f} % of "
        f"{counted(len(halves[FITTED]), 'question')}.\n"
    )
    f1 = [f1_by_weight(model, processor, halves[MEASURED], rate) for rate in compressions]
    cells = []
    for index, weight in enumerate(WEIGHTS):
        shown = ["{:.1f} ({:+.1f} ± {:.1f})".format(of[index].mean(), *difference(of[index], of[0])) for of in f1]
        cells.append([f"{weight:g}", *shown])
    columns = ["`pointer_weight`", *(f"F1 in %, `tokens_per_slot` {rate}" for rate in compressions)]
    typer.echo("\n".join(markdown_table(columns, cells)))
    typer.echo("")
    cells = [[f"{share:g}"] for share in (0, *ZOOMS)]
    zoomed = [rate for rate in compressions if is_coarser(rate, processor.tokens_per_slot)]
    for rate in zoomed:
        scores, counts = f1_by_zoom(model, processor, halves[MEASURED], rate)
        for cell, of, slots in zip(cells, scores, counts, strict=True):
            cell.append("{:.1f} ({:+.1f} ± {:.1f}), {:.0f}".format(of.mean(), *difference(of, scores[0]), slots.mean()))
    columns = ["`zoom`", *(f"F1 in %, slots, `tokens_per_slot` {rate}" for rate in zoomed)]
    if zoomed:
        typer.echo("\n".join(markdown_table(columns, cells)))
    if save:
        weight, mean, error = best_weight(f1)
        weight = weight if mean > 2 * error else 0.0
        settings = {"pointer_heads": model.config.pointer_heads, "pointer_weight": weight}
        path = save_settings(aligner, settings)
        typer.echo(f"\nSaved in {path}: the heads, and `pointer_weight` {weight:g}.")


if __name__ == "__main__":
    run_command(main)
