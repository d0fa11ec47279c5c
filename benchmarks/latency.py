"""Reading k passages as slots compared with reading their text: time to the first token and after, memory, operations.

    python -m arcaligner.benchmarks.latency [--output FOLDER] [--sizes 1,20] [--tokens-per-slot 4,segment]
    python -m arcaligner.benchmarks.latency --checkpoint CHECKPOINT --device cuda --dtype bfloat16

All arms (`arms.py`) read the same question with the same passages, in one process and in turns; who goes first
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
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import PreTrainedModel

from ..common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, describe_machine, run_command, write_whole
from ..common.rows import Row, read_rows
from ..configuration_arcaligner import check_length
from ..evaluation.analyses.speed import LATENCY_REPORT, first_token_table
from ..evaluation.settings import split_rates
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import tokenize_segments
from .arms import Decoding, both_prompts, cache_bytes, join_rows, load_models, make_arms, pick_rows
from .measuring import flop_counter, peak_memory, quartiles, ratio, time_interleaved

NEW_TOKENS = 16
MIN_ROUNDS = 3


def encoder_arms(processor: ArcAlignerProcessor, row: Row, rate: int | str) -> dict[str, Callable]:
    """The work that is done online where no embeddings are kept."""

    def segment() -> list:
        return processor.slot_encoder.segment_documents(row["passages"])

    tokens = tokenize_segments(processor.tokenizer, segment(), row["passages"])
    return {"segmenting": segment, "encoding": lambda: processor.slot_encoder.encode_tokens(tokens, rate)}


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
    k: int,
    rate: int | str,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """All numbers of a question about `k` passages at a rate; `models` are those of [`load_models`]."""
    (aligner, base), device = models, str(models[0].device)
    row = join_rows(pick_rows(rows, processor, k))
    text, slots = both_prompts(aligner, processor, row, rate)
    try:
        check_length(text.ids.shape[1] + NEW_TOKENS, "The text with its answer", base.config)
    except ValueError as error:
        raise ValueError(f"{k} passages are too many: name fewer in `--sizes`. {error}") from error
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
            "cache_bytes": cache_bytes(read[name].cache),
        }
        if name not in ("standard_rag", "adaptive"):  # whose caches are decoded from; the others take gigabytes
            read[name].cache = None
    decoding = {
        "standard_rag": Decoding(base, text, read["standard_rag"]),
        "slots": Decoding(aligner, slots, read["adaptive"]),
        "backbone": Decoding(base, slots, read["adaptive"]),
    }
    encoder = encoder_arms(processor, row, rate)
    first_tokens, next_tokens = measure_rounds({**arms, **encoder}, decoding, device, rounds, seconds)
    text_prefix, slot_prefix = (cache_bytes(prefixes[name]) for name in ("standard_rag_cached", "slots_cached"))
    taken = read["adaptive"].recursion_depth  # (1, num_layers, num_slots)
    return {
        "k": k,
        "tokens_per_slot": rate,
        "rounds": len(first_tokens),
        "text_tokens": text.ids.shape[1],
        "slots": taken.shape[2],
        "open_share": float((taken > 0).double().mean()),
        "open_layers": float((taken > 0).any(dim=2).double().mean()),
        "encoder": {name: quartiles([each[name] for each in first_tokens]) for name in encoder},
        "arms": {name: summarize(name, first_tokens, next_tokens) | noted[name] for name in arms},
        "decoding_ratio": ratio(next_tokens, "slots", "backbone"),
        "cached_speed_up": ratio(first_tokens, "standard_rag_cached", "slots_cached"),
        "prefix_bytes_ratio": text_prefix / slot_prefix,
    }


def summarize(name: str, first_tokens: list[dict[str, float]], next_tokens: list[dict[str, float]]) -> dict[str, Any]:
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
            [1 / (each[name] + rest) for each, rest in zip(first_tokens, decoded, strict=True)]
        ),
    }


def parse_sizes(text: str) -> list[int]:
    """
    Numbers of passages.

    >>> parse_sizes("1,5")
    [1, 5]
    """
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"`--sizes` is {text!r}; expected numbers of passages, separated by commas, such as 1,5.")
    return sizes


def main(
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    sizes: Annotated[str, typer.Option(help="Passages of a question, separated by commas.")] = "1,5,10,20",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the models.")] = "float32",
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="Numbers or `segment`, separated by commas.", show_default="own")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Maximum number of rounds of a size.")] = 15,
    seconds: Annotated[float, typer.Option(help="Seconds of a size after which no further round begins.")] = 30.0,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = SQUAD_SAMPLE,
    output: Annotated[Path | None, typer.Option(help="Folder for the report.")] = None,
) -> None:
    """Measures time to the first token, time per token, memory and operations of slots and of text."""
    asked = parse_sizes(sizes)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
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
    models = load_models(checkpoint, getattr(torch, dtype), device)
    for k, rate in itertools.product(asked, rates):
        typer.echo(f"{k} passages, rate {rate}")
        numbers = measure_size(models, processor, rows, k, rate, rounds, seconds)
        report["sizes"].append({"dtype": dtype, **numbers})
    typer.echo("\n".join(first_token_table(report)))
    typer.echo(json.dumps(report))
    if output is not None:
        write_whole(output / LATENCY_REPORT, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
