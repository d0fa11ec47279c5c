"""Time to the first token for k passages, as slots and as text.

    python -m arcaligner.benchmarks.latency [--output FOLDER] [--sizes 1,20] [--tokens-per-slot 4,segment]
    python -m arcaligner.benchmarks.latency --checkpoint CHECKPOINT --device cuda --dtype bfloat16

All arms (`arms.py`) get the same question with the same passages, in one process and in turns; each round begins with
another arm. The first call of an arm is a warm-up. Then rounds are timed until `--seconds` have passed, at least
`MIN_ROUNDS` and at most `MAX_ROUNDS`. Tokenizing, segmenting and encoding happen before; segmenting and encoding are
timed separately.

With an aligner that has pointer heads there is one more arm, *zoomed*, for each number of tokens per slot above the
checkpoint's: the prompt is read, and then read again with finer slots. It includes the encoding of the finer slots.
"""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..common.files import DEFAULT_CHECKPOINT, SQUAD_SAMPLE, counted, describe_machine, run_command, write_atomically
from ..common.rows import Row, read_rows
from ..configuration_arcaligner import check_length
from ..evaluation.analyses.speed import LATENCY_REPORT, first_token_table
from ..evaluation.settings import split_tokens_per_slot
from ..kv_cache_arcaligner import cache_of
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import tokenize_segments
from ..train.prompts import slot_inputs, zoomed_inputs
from ..zoom_arcaligner import ZOOM, is_coarser
from .arms import (
    MIN_ROUNDS,
    both_prompts,
    cache_bytes,
    first_tokens,
    join_rows,
    load_models,
    make_arms,
    prefill,
    quartiles,
    select_rows,
    time_rounds,
)


@torch.no_grad()
def measure_size(
    models: tuple[ArcAlignerForCausalLM, PreTrainedModel],
    processor: ArcAlignerProcessor,
    rows: list[Row],
    k: int,
    tokens_per_slot: int | str,
    seconds: float,
) -> dict[str, Any]:
    """All numbers of a question about `k` passages at these tokens per slot; `models` are those of [`load_models`]."""
    aligner, base = models
    row = join_rows(select_rows(rows, processor, k))
    text, slots = both_prompts(aligner, processor, row, tokens_per_slot)
    num_tokens = text.full["input_ids"].shape[1]
    check_length(num_tokens, f"The text of {k} passages", base.config)
    arms = make_arms(aligner, base, text, slots)
    if aligner.config.pointer_heads and is_coarser(tokens_per_slot, processor.tokens_per_slot):
        inputs = slot_inputs(processor, [row], tokens_per_slot=tokens_per_slot).to(aligner.device)
        arms["zoomed"] = partial(read_zoomed, aligner, processor, row, inputs, tokens_per_slot)

    def segment() -> list:
        return processor.slot_encoder.segment_documents(row["passages"])

    tokens = tokenize_segments(processor.tokenizer, segment(), row["passages"])
    # What has to be done for each question if embeddings are not precomputed.
    encoder = {"segmenting": segment, "encoding": lambda: processor.slot_encoder.encode_tokens(tokens, tokens_per_slot)}
    num_bytes = {name: cache_bytes(cache_of(arm())) for name, arm in arms.items()}  # this also warms up
    rounds = time_rounds(lambda number: arms | encoder, str(aligner.device), seconds)
    return {
        "k": k,
        "tokens_per_slot": tokens_per_slot,
        "rounds": len(rounds),
        "text_tokens": num_tokens,
        "slots": slots.full["context_embeds"].shape[1],
        "encoder": {name: quartiles([seconds[name] for seconds in rounds]) for name in encoder},
        "arms": {name: first_tokens(rounds, name, "standard_rag") | {"cache_bytes": num_bytes[name]} for name in arms},
    }


def read_zoomed(
    aligner: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, row: Row, inputs: dict, tokens_per_slot: int | str
) -> ModelOutput:
    """Read the prompt `inputs`, encode finer slots for the places that it attends to, and prefill these slots."""
    zoomed = zoomed_inputs(aligner, processor, [row], inputs, tokens_per_slot, ZOOM)
    return prefill(aligner, {**zoomed, "gate_mode": "off"})


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """
    Whole numbers of an option, such as those of passages.

    >>> parse_sizes("1,5")
    [1, 5]
    """
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(
            f"`{option}` is {text!r}; expected whole numbers of at least 1, separated by commas, such as 1,5."
        )
    return sizes


def main(
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    sizes: Annotated[str, typer.Option(help="Numbers of passages per question, separated by commas.")] = "1,5,10,20",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the models.")] = "float32",
    tokens_per_slot: Annotated[
        str | None,
        typer.Option(
            help="Tokens per slot: numbers or `segment`, separated by commas.", show_default="the checkpoint's"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
    seconds: Annotated[
        float,
        typer.Option(
            help="Seconds after which no further round starts, for each pair of a number of passages and a number of "
            f"tokens per slot. A round measures each method once. At least {MIN_ROUNDS} rounds are measured."
        ),
    ] = 30.0,
    data: Annotated[Path, typer.Option(help="JSON Lines file of questions with passages.")] = SQUAD_SAMPLE,
    output: Annotated[Path | None, typer.Option(help="Folder for the report.")] = None,
) -> None:
    """Measure the time to the first token of a question about passages. Compare passages as slots with passages as
    text."""
    numbers_of_passages = parse_sizes(sizes)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    compressions = split_tokens_per_slot(tokens_per_slot) if tokens_per_slot else [processor.tokens_per_slot]
    rows = read_rows(data)
    report = {
        "model": checkpoint.rstrip("/").split("/")[-1],
        "own_tokens_per_slot": processor.tokens_per_slot,
        "encoder_dtype": str(processor.encoder.model.dtype).removeprefix("torch."),
        "data": data.name,
        "machine": describe_machine(device),
        "sizes": [],
    }
    models = load_models(checkpoint, getattr(torch, dtype), device)
    for k, compression in itertools.product(numbers_of_passages, compressions):
        typer.echo(f"Measuring {counted(k, 'passage')} with `tokens_per_slot` {compression}")
        numbers = measure_size(models, processor, rows, k, compression, seconds)
        report["sizes"].append({"dtype": dtype, **numbers})
    typer.echo("\n".join(first_token_table(report)))
    typer.echo(json.dumps(report))
    if output is not None:
        write_atomically(output / LATENCY_REPORT, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
