"""Reading k passages as slots compared with reading their text: time to the first token and after, memory, operations.

    python -m arcaligner.benchmarks.latency [--output FOLDER] [--sizes 1x1,20x1,5x8] [--tokens-per-slot 4,segment]
    python -m arcaligner.benchmarks.latency --checkpoint CHECKPOINT --device cuda --dtype bfloat16 --sizes 20x32

All arms (`arms.py`) read the same questions with the same passages, in one process and in turns; who goes first
rotates. The first pass of an arm warms up; its operations and memory are noted. Then rounds are timed until `--seconds`
are used, at least `MIN_ROUNDS` and at most `--rounds`. Tokenizing, segmenting and encoding happen before; segmenting
and encoding are timed separately.

Decoding is the same for all arms with slots, so three decoders take turns token by token: the base model after the
text, the aligner after the slots, and the bare base model after the aligner's cache. Questions per second are those of
a prompt and `NEW_TOKENS` tokens, the first of which comes with the prompt.
"""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from ..common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, describe_machine, run_command
from ..common.rows import Row, read_rows
from ..evaluation.analyses.speed import machine_line, save_figure, size_lines
from ..evaluation.settings import split_rates
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .arms import Decoding, Prompts, both_prompts, cache_bytes, encoded_slots, load_models, make_arms, pick_rows
from .measuring import flop_counter, peak_memory, quartiles, ratio, time_interleaved

NEW_TOKENS = 16
MIN_ROUNDS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_prompts(
    base: PreTrainedModel, processor: ArcAlignerProcessor, rows: list[Row], rate: int | str
) -> tuple[Prompts, Prompts]:
    """The prompts of text and of slots, on the device of the base model.

    Raises:
        `ValueError`: a prompt longer than the backbone's context.
    """
    text, slots = both_prompts(processor, rows, encoded_slots(processor, rows, rate), str(base.device))
    longest, most = max(text.whole.lengths) + NEW_TOKENS, base.config.max_position_embeddings
    if longest > most:
        raise ValueError(
            f"A prompt with {len(rows[0]['passages'])} passages and its answer have {longest} tokens, but the "
            f"backbone reads {most}. Name fewer passages in `--sizes`."
        )
    return text, slots


def encoder_arms(processor: ArcAlignerProcessor, rows: list[Row], rate: int | str) -> dict[str, Callable]:
    """The work that is done online where no embeddings are kept."""

    def segment() -> list:
        return [processor.segment_documents(row["passages"]) for row in rows]

    of_rows = zip(segment(), rows, strict=True)
    tokens = [each for part, row in of_rows for each in processor.tokenize_segments(part, row["passages"])]
    return {"segmenting": segment, "encoding": lambda: processor.encode_tokens(tokens, rate)}


def measure_rounds(
    prefills: dict[str, Callable], decoding: dict[str, Decoding], device: str, rounds: int, seconds: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds of the prefills in each round, and of each decoded token: `NEW_TOKENS` - 1 entries for each round."""
    first_tokens, next_tokens = [], []
    steps = {name: decoder.step for name, decoder in decoding.items()}
    start = time.perf_counter()
    while len(first_tokens) < MIN_ROUNDS or (len(first_tokens) < rounds and time.perf_counter() - start < seconds):
        first_tokens.append(time_interleaved(prefills, len(first_tokens), device))
        for decoder in decoding.values():
            decoder.restart()
        next_tokens += [time_interleaved(steps, len(next_tokens) + step, device) for step in range(NEW_TOKENS - 1)]
    return first_tokens, next_tokens


@torch.no_grad()
def measure_size(
    models: tuple[ArcAlignerForCausalLM, PreTrainedModel],
    processor: ArcAlignerProcessor,
    rows: list[Row],
    size: tuple[int, int],
    rate: int | str,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """All numbers of a size, passages and questions, at a rate; `models` are those of [`load_models`]."""
    (aligner, base), (k, batch_size), device = models, size, str(models[0].device)
    rows = pick_rows(rows, processor, k, batch_size)
    text, slots = make_prompts(base, processor, rows, rate)
    for model in models:  # weights are read from the disk at their first use, which is no memory of an arm
        model(torch.zeros(1, 1, dtype=torch.long, device=device))
    arms, prefixes = make_arms(aligner, base, text, slots)
    read, noted = {}, {}
    for name, arm in arms.items():
        with peak_memory(device) as peak, flop_counter() as counter:
            read[name] = arm()
        noted[name] = {
            "flops_counted": counter.get_total_flops(),
            "peak_bytes": peak["bytes"],
            "cache_bytes": cache_bytes(read[name].cache) / batch_size,
        }
        if name not in ("standard_rag", "adaptive"):  # whose caches are decoded from; the others take gigabytes
            read[name].cache = None
    decoding = {
        "standard_rag": Decoding(base, text.whole, read["standard_rag"]),
        "slots": Decoding(aligner, slots.whole, read["adaptive"]),
        "backbone": Decoding(base, slots.whole, read["adaptive"]),
    }
    encoder = encoder_arms(processor, rows, rate)
    first_tokens, next_tokens = measure_rounds({**arms, **encoder}, decoding, device, rounds, seconds)
    text_prefix, slot_prefix = (cache_bytes(prefixes[name]) for name in ("standard_rag_cached", "slots_cached"))
    taken = read["adaptive"].recursion_depth  # (batch, num_layers, max_slots)
    return {
        "k": k,
        "batch_size": batch_size,
        "tokens_per_slot": rate,
        "rounds": len(first_tokens),
        "text_tokens": sum(text.whole.lengths) / batch_size,
        "slot_tokens": sum(slots.whole.lengths) / batch_size,
        "slots": int((taken[:, 0] >= 0).sum()) / batch_size,
        "open_share": float((taken[taken >= 0] > 0).double().mean()),
        "open_layers": float((taken > 0).any(dim=2).double().mean()),
        "encoder": {name: quartiles([each[name] for each in first_tokens]) for name in encoder},
        "arms": {name: summarize(name, first_tokens, next_tokens, batch_size) | noted[name] for name in arms},
        "decoding_ratio": ratio(next_tokens, "slots", "backbone"),
        "cached_speed_up": ratio(first_tokens, "standard_rag_cached", "slots_cached"),
        "prefix_bytes_ratio": text_prefix / slot_prefix,
    }


def summarize(
    name: str, first_tokens: list[dict[str, float]], next_tokens: list[dict[str, float]], batch_size: int
) -> dict[str, Any]:
    """Times of an arm; questions per second with the round's own times per token."""
    decoder = "standard_rag" if name.startswith("standard_rag") else "slots"
    per_token = [each[decoder] for each in next_tokens]
    after = NEW_TOKENS - 1
    decoded = [sum(per_token[number * after : (number + 1) * after]) for number in range(len(first_tokens))]
    return {
        "first_token": quartiles([each[name] for each in first_tokens]),
        "speed_up": ratio(first_tokens, "standard_rag", name),
        "per_token": quartiles(per_token),
        "questions_per_second": quartiles(
            [batch_size / (each[name] + rest) for each, rest in zip(first_tokens, decoded, strict=True)]
        ),
    }


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """
    Passages and questions of each batch.

    >>> parse_sizes("1x1,5x8")
    [(1, 1), (5, 8)]

    Raises:
        `ValueError`: another spelling, or a number below 1.
    """
    try:
        sizes = [tuple(map(int, size.split("x"))) for size in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or any(len(size) != 2 or min(size) < 1 for size in sizes):
        raise ValueError(
            f"`--sizes` is {text!r}; expected passages x questions of a batch, separated by commas, such as 1x1,5x8."
        )
    return sizes


def main(
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    sizes: Annotated[
        str, typer.Option(help="Passages x questions of a batch, separated by commas.")
    ] = "1x1,5x1,10x1,20x1,5x8",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or both with a comma.")] = "float32",
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="Numbers or `segment`, separated by commas.", show_default="own")
    ] = None,
    encoder_dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, auto.", show_default="own")] = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Maximum number of rounds of a size.")] = 15,
    seconds: Annotated[float, typer.Option(help="Seconds of a size after which no further round begins.")] = 30.0,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = SQUAD_SAMPLE,
    output: Annotated[Path | None, typer.Option(help="Folder for the report and its figure.")] = None,
) -> None:
    """Measures time to the first token, time per token, memory and operations of slots and of text."""
    asked, names = parse_sizes(sizes), dtype.split(",")
    if unknown := [name for name in names if name not in DTYPES]:
        raise ValueError(f"`--dtype` names {', '.join(unknown)}; expected {', '.join(DTYPES)}, separated by commas.")
    encoder = {} if encoder_dtype is None else {"encoder_dtype": encoder_dtype}
    processor = ArcAlignerProcessor.from_pretrained(checkpoint, **encoder)
    rates = split_rates(tokens_per_slot) if tokens_per_slot else [processor.tokens_per_slot]
    rows = read_rows(data)
    report = {
        "model": checkpoint.rstrip("/").split("/")[-1],
        "own_tokens_per_slot": processor.tokens_per_slot,
        "encoder_dtype": str(processor.encoder.model.dtype).removeprefix("torch."),
        "data": data.name,
        "new_tokens": NEW_TOKENS,
        "machine": describe_machine(device),
        "sizes": [],
    }
    for name in names:
        models = load_models(checkpoint, DTYPES[name], device)
        for size, rate in itertools.product(asked, rates):
            numbers = measure_size(models, processor, rows, size, rate, rounds, seconds)
            report["sizes"].append({"dtype": name, **numbers})
            typer.echo("\n".join(size_lines(report["sizes"][-1])))
        del models  # before the next dtype's are loaded
    typer.echo(machine_line(report))
    typer.echo(json.dumps(report))
    if output is not None:
        save_figure(output, report)


if __name__ == "__main__":
    run_command(main)
