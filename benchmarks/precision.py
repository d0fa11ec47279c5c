"""How often a gate decides otherwise with a backbone in bfloat16 than in float32, and whether answers change.

    python -m arcaligner.benchmarks.precision [--data rows.jsonl.gz] [-n 50] [--output precision.json]
    python -m arcaligner.benchmarks.precision --device cuda --shape mistral_7b [--layers 8]

Projector, LoRA and gates are in float32 in both. Both models read the same prompts, one at a time. A layer's first
decision about a slot may differ for three reasons, told apart by what is in bfloat16:

    gate      the states that the gate reads, rounded, and nothing else
    layer     the layer that made them, given the states that it was given in float32
    backbone  all layers: what is decided in use

A shape has random weights and random gates (`gate_probes.spread_gates`): half of them open, as near to the threshold
as a normal distribution has it. It tells how rounding grows with depth and width, not what a trained aligner does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from rich.table import Table

from ..files import run_command
from ..evaluation.analyses.intervals import ratio_interval
from ..evaluation.answering import MAX_NEW_TOKENS
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import read_rows
from .gate_probes import asked_gates, first_decisions, layers_read, spread_gates
from .latency import ROOT
from .machine import machine
from .models import random_models, shape_of
from .prompts import Row, both_prompts, random_embeds
from .reports import show_report

CAUSES = ("gate", "layer", "backbone")
FITTED_ROWS = 8  # whose slots the gates of random weights are spread over

Inputs = dict[str, torch.Tensor]


@dataclass
class Compared:
    """One question, read twice: `probs` of first decisions (4, asked_layers, num_slots), in float32 and by `CAUSES`;
    `depths` (2, asked_layers, num_slots) and greedy `answers` in float32 and bfloat16."""

    probs: torch.Tensor
    depths: torch.Tensor
    answers: tuple[list[int], list[int]]


def make_inputs(
    aligner: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], encodes: bool
) -> Inputs:
    """A prompt with slots for each row, left-padded; with `encodes` the passages' embeddings, else random ones."""
    if encodes:
        texts = [processor.encoder_texts(processor.segment_documents(r["passages"]), r["passages"]) for r in rows]
        embeds = [processor.encode_segments(own) for own in texts]
    else:
        embeds = random_embeds(processor, rows, aligner.config.encoder_hidden_size)
    _, slots = both_prompts(processor, rows, embeds, aligner.config.text_config.vocab_size)
    slots = slots.to(str(aligner.device))
    return {
        "input_ids": slots.whole.input_ids,
        "attention_mask": slots.whole.attention_mask,
        "context_embeds": slots.context_embeds,
    }


@torch.no_grad()
def compare(full: ArcAlignerForCausalLM, half: ArcAlignerForCausalLM, inputs: Inputs) -> Compared:
    """Reads one prompt, (1, seq_len), with the backbone in float32 (`full`) and in bfloat16 (`half`)."""

    def read(aligner: ArcAlignerForCausalLM, given: list[torch.Tensor] | None = None):
        with first_decisions(aligner) as first, layers_read(aligner, given) as states:
            depth = aligner(**inputs, use_cache=False, logits_to_keep=1).recursion_depth[0].cpu()
        layers = sorted(first)
        return torch.stack([first[layer] for layer in layers], dim=1), depth[layers], states

    def answer(aligner: ArcAlignerForCausalLM) -> list[int]:
        output = aligner.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    own, own_depth, states = read(full)  # (2, asked_layers, num_slots)
    given, _, _ = read(half, states)
    other, other_depth, _ = read(half)
    return Compared(
        probs=torch.stack([own[0], own[1], given[0], other[0]]),
        depths=torch.stack([own_depth, other_depth]),
        answers=(answer(full), answer(half)),
    )


def share(flags: torch.Tensor) -> float:
    """The share of true ones."""
    return float(flags.double().mean())


def quantiles(values: torch.Tensor) -> dict[str, float] | None:
    """Median, 95th percentile and the greatest; `None` of none."""
    if values.numel() == 0:
        return None
    median, most = torch.quantile(values.double(), torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return {"median": median, "95 %": most, "max": float(values.max())}


def with_interval(differs: list[torch.Tensor]) -> dict[str, float]:
    """The share of all entries, with the ends of its 95 % bootstrap interval over questions."""
    counts = np.array([[float(each.sum()), float(each.numel())] for each in differs])
    lower, upper = ratio_interval(counts[:, 0], counts[:, 1])
    return {"share": counts[:, 0].sum() / counts[:, 1].sum(), "lower": float(lower), "upper": float(upper)}


def summarise(found: list[Compared], layers: list[int], threshold: float) -> dict[str, Any]:
    """Shares over all questions, by layer and of all; how near the threshold; first tokens and answers."""
    opens = [each.probs >= threshold for each in found]  # (4, asked_layers, num_slots) each
    flips = [each[1:] != each[:1] for each in opens]  # (3, asked_layers, num_slots) each
    deeper = [each.depths[0] != each.depths[1] for each in found]  # (asked_layers, num_slots) each
    opened, flipped, depths = (torch.cat(each, dim=-1) for each in (opens, flips, deeper))
    probs = torch.cat([each.probs for each in found], dim=-1)
    near = (probs[0] - threshold).abs()
    same_first = torch.tensor([each.answers[0][0] == each.answers[1][0] for each in found])
    same_answer = torch.tensor([each.answers[0] == each.answers[1] for each in found])
    differs = torch.tensor([bool(each.any()) for each in deeper])
    return {
        "questions": len(found),
        "slots": probs.shape[2],
        "decisions": near.numel(),
        "open": share(opened[0]),
        "decisions_differ": {cause: with_interval([each[i] for each in flips]) for i, cause in enumerate(CAUSES)},
        "depths_differ": with_interval(deeper),
        "by_layer": [
            {
                "layer": layer,
                "open": share(opened[0, i]),
                "decisions_differ": {cause: share(flipped[j, i]) for j, cause in enumerate(CAUSES)},
                "depths_differ": share(depths[i]),
            }
            for i, layer in enumerate(layers)
        ],
        "probability_moves": {cause: quantiles((probs[1 + i] - probs[0]).abs()) for i, cause in enumerate(CAUSES)},
        "from_threshold": {"all": quantiles(near), "flipped": quantiles(near[flipped[-1]])},
        "new_tokens": MAX_NEW_TOKENS,
        "same_first_token": share(same_first),
        "same_answer": share(same_answer),
        "questions_with_other_depths": int(differs.sum()),
        "same_answer_where_depths_differ": int(same_answer[differs].sum()),
    }


def make_table(report: dict[str, Any]) -> Table:
    """A row for each layer and one for all; the rest below."""
    title = f"First decisions of the gates that differ in bfloat16: {report['questions']} questions"
    table = Table("Layer", "Open", *(f"{cause} alone" for cause in CAUSES[:-1]), CAUSES[-1], "Depths", title=title)
    for row in report["by_layer"]:
        shares = [row["open"], *row["decisions_differ"].values(), row["depths_differ"]]
        table.add_row(str(row["layer"]), *(f"{100 * each:.2f} %" for each in shares))
    table.add_section()
    intervals = [*report["decisions_differ"].values(), report["depths_differ"]]
    shown = [f"{100 * r['share']:.2f} % ({100 * r['lower']:.2f} to {100 * r['upper']:.2f})" for r in intervals]
    table.add_row("all", f"{100 * report['open']:.2f} %", *shown, style="bold")
    near, made_on = report["from_threshold"], report["machine"]
    flipped = "none" if near["flipped"] is None else f"median {near['flipped']['median']:.3f}"
    table.caption = (
        f"{report['decisions']} decisions on {report['slots']} slots; from the threshold: flipped {flipped}, all "
        f"median {near['all']['median']:.3f}. Same first token {100 * report['same_first_token']:.1f} %, same answer "
        f"of {report['new_tokens']} tokens {100 * report['same_answer']:.1f} %; depths differ in "
        f"{report['questions_with_other_depths']} questions, {report['same_answer_where_depths_differ']} of them with "
        f"the same answer. {report['model']}, {report['attn_implementation']}, {made_on['device']}, "
        f"torch {made_on['torch']}"
    )
    return table


def load_pair(checkpoint: str, device: str) -> list[ArcAlignerForCausalLM]:
    """The aligner around a float32 and a bfloat16 backbone.

    Raises:
        `ValueError`: gates that decide nothing.
    """
    pair = [
        ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    if pair[0].config.gate_mode != "adaptive" or not asked_gates(pair[0]):
        raise ValueError(
            f"The gates of {checkpoint} decide nothing: its `gate_mode` is {pair[0].config.gate_mode!r}, and "
            f"{len(asked_gates(pair[0]))} layers before the last have a gate. Name a checkpoint of stage III."
        )
    return pair


def random_pair(
    shape: dict, processor: ArcAlignerProcessor, rows: list[Row], device: str
) -> list[ArcAlignerForCausalLM]:
    """The same of random weights, with gates that are spread over the slots of `rows`."""
    full, half = (
        random_models(shape, dtype, device, processor.context_token_id)[0] for dtype in (torch.float32, torch.bfloat16)
    )
    spread_gates(full, make_inputs(full, processor, rows[:FITTED_ROWS], encodes=False))
    for own, other in zip(asked_gates(full).values(), asked_gates(half).values(), strict=True):
        other.load_state_dict(own.state_dict())
    return [full, half]


def main(
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")] = str(
        ROOT / "checkpoints/arcaligner-smollm2-135m"
    ),
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
    num_questions: Annotated[int, typer.Option("-n", help="At most so many questions.", min=1)] = 50,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    shape: Annotated[
        str | None, typer.Option(help="Random weights of mistral_7b or llama_3_1_8b, and the checkpoint's tokenizer.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the shape, where its own are too many.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the JSON line here, the table beside it as .txt.")] = None,
) -> None:
    """Measures how often gates decide otherwise in bfloat16 than in float32."""
    chosen = None if shape is None else shape_of(shape, layers)
    rows = [row for row in read_rows(data) if row["question"] and row["passages"]][:num_questions]
    if not rows:
        raise ValueError(f"No row of {data} has a question and a passage, so there are no slots. Name other `--data`.")
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    full, half = load_pair(checkpoint, device) if chosen is None else random_pair(chosen, processor, rows, device)
    found = [
        compare(full, half, make_inputs(full, processor, [row], encodes=chosen is None))
        for row in track(rows, description="questions", transient=True)
    ]
    report = {
        "model": shape or checkpoint.rstrip("/").split("/")[-1],
        "layers": full.config.text_config.num_hidden_layers,
        "attn_implementation": full.config.text_config._attn_implementation,
        "data": data.name,
        **summarise(found, sorted(asked_gates(full)), full.config.gate_threshold),
        "machine": machine(device),
    }
    show_report(report, [make_table(report)], output)


if __name__ == "__main__":
    run_command(main)
