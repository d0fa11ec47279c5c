"""How often the host waits for the device: in a prefill of text and of slots, and for a decoded token.

    python -m arcaligner.benchmarks.syncs [--output syncs.json]
    python -m arcaligner.benchmarks.syncs --device cuda --shape mistral_7b --layers 8

A wait costs some microseconds and what could have been queued meanwhile, so what counts is how their number grows. On
any device operators that read are counted, on CUDA its own warnings as well (`host_reads`).

A decoded token is counted in two ways: a forward after the cache, and `generate`, of which the difference between two
lengths is taken. The bare base model does the same beside it.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ..files import run_command
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import read_rows
from .arms import Decoding, make_arms
from .host_reads import Read, ReadCounter, waits_on_cuda
from .latency import DTYPES, ROOT, Bench
from .machine import machine
from .models import load_models, random_models, shape_of
from .prompts import Prompts, pick_rows
from .reports import show_report

PASSAGES, QUESTIONS = 5, 2  # a batch with padding
SHORT, LONG = 3, 11  # tokens of two answers whose difference is taken
PREFILLS = {"text": "standard_rag", "off": "off", "adaptive": "adaptive", "always": "always"}

Counts = dict[str, dict[Read, float]]  # "operators", on CUDA "cuda" as well -> how often each read was asked for


def count(run: Callable[[], Any], device: str) -> Counts:
    """The reads of `run`, which has run before."""
    with ReadCounter() as counter:
        run()
    found: Counts = {"operators": counter.found}
    if torch.device(device).type == "cuda":
        with waits_on_cuda() as waits:
            run()
        found["cuda"] = waits
    return found


@torch.no_grad()
def measure(aligner, base, text: Prompts, slots: Prompts) -> tuple[dict[str, Counts], torch.Tensor]:
    """
    Args:
        aligner ([`ArcAlignerForCausalLM`]), base: The aligner and the bare base model with the same weights.
        text, slots ([`Prompts`]): Of the same questions.

    Returns:
        `dict`: Reads of each prefill and decoded token, by name.
        `torch.Tensor` of shape `(batch, num_layers, max_slots)`: refinement steps of the adaptive prefill.
    """
    device = str(aligner.device)
    arms, _ = make_arms(aligner, base, text, slots)
    found, read = {}, {}
    for name, arm in PREFILLS.items():
        with arms[arm].state():
            read[name] = arms[arm].run()
            found[f"prefill, {name}"] = count(arms[arm].run, device)
    for name, model in (("base", base), ("slots", aligner)):
        decoding = Decoding(model, slots.whole, read["adaptive"])
        decoding.restart()
        decoding.step()
        found[f"token by forward, {name}"] = count(decoding.step, device)
    found["token by generate, base"] = count_token(base, text, device)
    found["token by generate, slots"] = count_token(aligner, slots, device)
    return found, read["adaptive"].recursion_depth


def count_token(model, prompts: Prompts, device: str) -> Counts:
    """The reads of a greedy token in `generate`: the difference of two lengths, a token of it."""
    inputs = {"input_ids": prompts.whole.input_ids, "attention_mask": prompts.whole.attention_mask}
    if prompts.context_embeds is not None:
        inputs["context_embeds"] = prompts.context_embeds

    def answer(length: int) -> None:
        model.generate(**inputs, max_new_tokens=length, min_new_tokens=length, do_sample=False)

    answer(SHORT)
    short, long = (count(lambda length=length: answer(length), device) for length in (SHORT, LONG))
    return {
        way: {read: (times - short[way][read]) / (LONG - SHORT) for read, times in reads.items()}
        for way, reads in long.items()
    }


def gates_asked(depth: torch.Tensor, max_steps: int, gated_layers: list[int]) -> tuple[int, int]:
    """
    What an adaptive prefill needs to know of its gates.

    Args:
        depth (`torch.Tensor` of shape `(batch, num_layers, max_slots)`): Its refinement steps.
        max_steps (`int`): Of the aligner.
        gated_layers (`list[int]`): Its layers with a gate; that of the last layer is not asked.

    Returns:
        How often a layer and step had to know whether a slot is open, and layers with an open slot.
    """
    steps = [int(depth[:, layer].max()) for layer in gated_layers if layer < depth.shape[1] - 1]
    return sum(min(taken + 1, max_steps) for taken in steps), sum(taken > 0 for taken in steps)


def report_of(found: dict[str, Counts]) -> dict[str, Any]:
    """Numbers, and the lines that asked, the most frequent first."""
    return {
        name: {
            way: {
                "count": sum(reads.values()),
                "lines": [
                    {**read._asdict(), "times": times} for read, times in Counter(reads).most_common() if times != 0
                ],
            }
            for way, reads in counts.items()
        }
        for name, counts in found.items()
    }


def make_table(report: dict[str, Any], way: str) -> Table:
    """A row for each line that asked, a column for each prefill and token."""
    columns = {name: ways[way] for name, ways in report["reads"].items()}
    table = Table("Asked by", *columns, title=f"Reads of the host, {way}")
    table.add_row("all", *(f"{column['count']:g}" for column in columns.values()), style="bold", end_section=True)
    by_line: dict[tuple[str, ...], dict[str, float]] = {}
    for name, column in columns.items():
        for line in column["lines"]:
            by_line.setdefault((line["line"], line["operator"], line["source"]), {})[name] = line["times"]
    for (line, operator, source), times in by_line.items():
        shown = (f"{times[name]:g}" if name in times else "" for name in columns)
        table.add_row(f"{line}\n  {operator}: {escape(source)}", *shown)
    made_on = report["machine"]
    table.caption = (
        f"{report['model']}, {report['layers']} layers; adaptive: gates asked {report['gates_asked']} times, "
        f"{report['open_layers']} layers with an open slot; {made_on['device']}, torch {made_on['torch']}, "
        f"transformers {made_on['transformers']}"
    )
    return table


def main(
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")] = str(
        ROOT / "checkpoints/arcaligner-smollm2-135m"
    ),
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    shape: Annotated[
        str | None, typer.Option(help="Random weights of mistral_7b or llama_3_1_8b, and the checkpoint's tokenizer.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the shape, where its own are too many.")] = None,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
    output: Annotated[Path | None, typer.Option(help="Write the JSON line here, the table beside it as .txt.")] = None,
) -> None:
    """Counts how often the host waits for the device in a prefill and for a token."""
    if dtype not in DTYPES:
        raise ValueError(f"`--dtype` is {dtype!r}; expected {' or '.join(DTYPES)}.")
    chosen = None if shape is None else shape_of(shape, layers)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    models = (
        load_models(checkpoint, DTYPES[dtype], device)
        if chosen is None
        else random_models(chosen, DTYPES[dtype], device, processor.context_token_id)
    )
    bench = Bench(*models, processor, read_rows(data), has_encoder=chosen is None, peaks={})
    text, slots = bench.prompts(pick_rows(bench.rows, processor, PASSAGES, QUESTIONS))
    found, depth = measure(*models, text, slots)
    config = models[0].config
    asked, open_layers = gates_asked(depth, config.max_refinement_steps, config.gated_layers)
    report = {
        "model": shape or checkpoint.rstrip("/").split("/")[-1],
        "layers": config.text_config.num_hidden_layers,
        "dtype": dtype,
        "attn_implementation": config.text_config._attn_implementation,
        "passages": PASSAGES,
        "questions": QUESTIONS,
        "gates_asked": asked,
        "open_layers": open_layers,
        "reads": report_of(found),
        "machine": machine(device),
    }
    show_report(report, [make_table(report, way) for way in next(iter(found.values()))], output, width=170)


if __name__ == "__main__":
    run_command(main)
