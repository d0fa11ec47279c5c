"""Reading k passages as slots beside reading their text: time to the first token and after, memory, operations.

    python -m arcaligner.benchmarks.latency [--output FOLDER] [--sizes 1x1,5x1,10x1,20x1,5x8] [--dtype float32,bfloat16]
    python -m arcaligner.benchmarks.latency --device cuda --shape mistral_7b --dtype bfloat16 --sizes 1x1,20x1,20x32

All arms (`arms`) read the same questions with the same passages, in one process and in turns; who goes first rotates.
The first pass of an arm warms up; its operations, memory and first tokens are noted. Then rounds are timed until
`--seconds` are used, at least `MIN_ROUNDS` and at most `--rounds` of them. Tokens are ready and segments encoded
before; what segmenting and encoding take is timed separately. A run that broke off continues when its command is given
again.

Decoding is the same for all arms with slots, whose caches have one form, so three decoders take turns token by token:
the base model after the text, the aligner after the slots, and the bare base model after the same cache as the aligner.
Questions per second are those of a prompt and `NEW_TOKENS` tokens, of which the prompt gives the first.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..evaluation.settings import split_rates
from ..files import describe_machine, run_command, write_whole
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import Row, read_rows
from .arms import (
    SAME_AS,
    Arm,
    Decoding,
    FirstToken,
    Prompts,
    both_prompts,
    cache_bytes,
    encoded_slots,
    make_arms,
    pick_rows,
    random_slots,
)
from .measuring import Formula, Work, flop_counter, measured_peaks, peak_memory, quartiles, time_interleaved
from .models import load_models, random_models, shape_of
from .report import machine_line, ratio, refinement_ratio, save_figure, size_lines, target_lines, targets

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 16
MIN_ROUNDS = 3
DECODED = ("standard_rag", "adaptive")  # whose caches are decoded from
PARTIAL = "latency.partial.json"  # the report of a run that goes on, or that broke off
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Bench:
    """Models in one dtype, and the batches that they read."""

    def __init__(
        self,
        aligner,
        base,
        processor: ArcAlignerProcessor,
        rows: list[Row],
        has_encoder: bool,
        peaks: dict,
        tokens_per_slot: int | str | None = None,
    ):
        self.aligner, self.base, self.processor, self.rows = aligner, base, processor, rows
        self.has_encoder, self.peaks, self.tokens_per_slot = has_encoder, peaks, tokens_per_slot
        self.device = str(aligner.device)
        self.formula = Formula(aligner, base)
        # Weights come from the disk when they are first read, which must not count as memory of an arm.
        with torch.no_grad():
            for model in (aligner, base):
                model(torch.zeros(1, 1, dtype=torch.long, device=self.device))

    def prompts(self, rows: list[Row]) -> tuple[Prompts, Prompts]:
        """Of text and of slots, on the device.

        Raises:
            `ValueError`: longer than the backbone's context.
        """
        if self.has_encoder:
            encoded = encoded_slots(self.processor, rows, self.tokens_per_slot)
        else:
            encoded = random_slots(self.processor, rows, self.aligner.config.encoder_hidden_size)
        text, slots = both_prompts(self.processor, rows, encoded, self.base.config.vocab_size)
        longest, most = max(text.whole.lengths) + NEW_TOKENS, self.base.config.max_position_embeddings
        if longest > most:
            raise ValueError(
                f"A prompt with {len(rows[0]['passages'])} passages and its answer have {longest} tokens, but the "
                f"backbone reads {most}. Name fewer passages in `--sizes`."
            )
        return text.to(self.device), slots.to(self.device)

    def encoder_arms(self, rows: list[Row]) -> dict[str, Arm]:
        """What has to be done online where embeddings were not made before."""
        if not self.has_encoder:
            return {}
        segments = [self.processor.segment_documents(row["passages"]) for row in rows]
        tokens = [
            each
            for found, row in zip(segments, rows, strict=True)
            for each in self.processor.tokenize_segments(found, row["passages"])
        ]
        rate = self.tokens_per_slot or self.processor.tokens_per_slot
        return {
            "segmenting": Arm(lambda: [self.processor.segment_documents(row["passages"]) for row in rows]),
            "encoding": Arm(lambda: self.processor.encode_slots(tokens, rate)),
        }


def first_pass(arm: Arm, device: str) -> tuple[FirstToken, dict[str, Any]]:
    """Warms up; what was read, operations counted, peak memory and bytes of the cache."""
    with arm.state(), peak_memory(device) as peak, flop_counter() as counter:
        found = arm.run()
    return found, {
        "flops_counted": counter.get_total_flops(),
        "peak_bytes": peak["bytes"],
        "cache_bytes": cache_bytes(found.cache) / len(found.tokens),
    }


def decoders(bench: Bench, text: Prompts, slots: Prompts, read: dict[str, FirstToken]) -> dict[str, Decoding]:
    """The base model after text, the aligner after slots, and the bare base model after the same cache."""
    return {
        "standard_rag": Decoding(bench.base, text.whole, read["standard_rag"]),
        "slots": Decoding(bench.aligner, slots.whole, read["adaptive"]),
        "backbone": Decoding(bench.base, slots.whole, read["adaptive"]),
    }


def measure_rounds(
    prefills: dict[str, Arm], decoding: dict[str, Decoding], device: str, rounds: int, seconds: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Seconds of prefills and others, one per round; seconds of a decoded token, `NEW_TOKENS` - 1 for each round."""
    found, tokens = [], []
    steps = {name: Arm(decoder.step) for name, decoder in decoding.items()}
    start = time.perf_counter()
    while len(found) < MIN_ROUNDS or (len(found) < rounds and time.perf_counter() - start < seconds):
        found.append(time_interleaved(prefills, len(found), device))
        for decoder in decoding.values():
            decoder.restart()
        tokens += [time_interleaved(steps, len(tokens) + step, device) for step in range(NEW_TOKENS - 1)]
    return found, tokens


@torch.no_grad()
def measure_size(bench: Bench, k: int, batch_size: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All figures of `batch_size` questions with `k` passages each."""
    rows = pick_rows(bench.rows, bench.processor, k, batch_size)
    text, slots = bench.prompts(rows)
    arms, prefixes = make_arms(bench.aligner, bench.base, text, slots)
    read, noted = {}, {}
    for name, arm in arms.items():
        read[name], noted[name] = first_pass(arm, bench.device)
        if name not in DECODED:  # a long text's keys and values are gigabytes in a large batch
            read[name].cache = None
    encoder = bench.encoder_arms(rows)
    found, tokens = measure_rounds(
        {**arms, **encoder}, decoders(bench, text, slots, read), bench.device, rounds, seconds
    )
    depths = {name: read[name].recursion_depth for name in ("adaptive", "budgeted", "always")}
    work = bench.formula.of_arms(text, slots, depths)
    after_slots = bench.formula.reading([1] * batch_size, slots.whole.lengths)
    prefix_bytes = {name: cache_bytes(cache) / batch_size for name, cache in prefixes.items()}
    taken = depths["adaptive"]
    added = {name: work[name].flops - work["off"].flops for name in ("plain", "adaptive")}
    return {
        "k": k,
        "batch_size": batch_size,
        "rounds": len(found),
        "text_tokens": sum(text.whole.lengths) / batch_size,
        "slot_tokens": sum(slots.whole.lengths) / batch_size,
        "slots": int((taken[:, 0] >= 0).sum()) / batch_size,
        "open_share": float((taken[taken >= 0] > 0).double().mean()),
        "open_layers": float((taken > 0).any(dim=2).double().mean()),
        "encoder": {name: quartiles([each[name] for each in found]) for name in encoder},
        "arms": {
            name: {**summarize(name, found, tokens, work[name], bench.peaks, batch_size), **noted[name]}
            for name in arms
        },
        "per_token_limit": after_slots.limit(bench.peaks),
        "decoding_ratio": ratio(tokens, "slots", "backbone"),
        "cached_speed_up": ratio(found, "standard_rag_cached", "slots_cached"),
        "prefix_bytes": prefix_bytes,
        "prefix_bytes_ratio": prefix_bytes["standard_rag_cached"] / prefix_bytes["slots_cached"],
        "refinement_ratio": refinement_ratio(found),
        "refinement_flops_ratio": added["plain"] / added["adaptive"] if added["adaptive"] else None,
        "same_first_token": {
            name: float((read[name].tokens == read[other].tokens).double().mean()) for name, other in SAME_AS.items()
        },
    }


def summarize(
    name: str,
    found: list[dict[str, float]],
    tokens: list[dict[str, float]],
    work: Work,
    peaks: dict[str, float],
    batch_size: int,
) -> dict[str, Any]:
    """Times of an arm; questions a second with the time a token of the round's own decoder."""
    decoder = "standard_rag" if name.startswith("standard_rag") else "slots"
    per_token = [each[decoder] for each in tokens]
    after = NEW_TOKENS - 1
    decoded = [sum(per_token[number * after : (number + 1) * after]) for number in range(len(found))]
    rates = [batch_size / (each[name] + rest) for each, rest in zip(found, decoded, strict=True)]
    return {
        "first_token": quartiles([each[name] for each in found]),
        "first_token_limit": work.limit(peaks),
        "speed_up": ratio(found, "standard_rag", name),
        "per_token": quartiles(per_token),
        "questions_per_second": quartiles(rates),
        "flops": work.flops,
        "bytes": work.bytes,
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
            f"`--sizes` is {text!r}; expected passages x questions of a batch, with commas between, such as 1x1,5x8."
        )
    return sizes


def parse_dtypes(text: str) -> dict[str, torch.dtype]:
    """
    Dtypes by name.

    Raises:
        `ValueError`: another dtype.
    """
    names = text.split(",")
    if unknown := [name for name in names if name not in DTYPES]:
        raise ValueError(f"`--dtype` names {', '.join(unknown)}; expected {', '.join(DTYPES)}, with commas between.")
    return {name: DTYPES[name] for name in names}


def begin_report(path: Path | None, what: dict[str, Any]) -> dict[str, Any]:
    """
    A report of `what` is measured, with the sizes and peaks of a run that broke off, where `path` has one.

    Raises:
        `ValueError`: what broke off was another run.
    """
    report = {**what, "peaks": {}, "sizes": []}
    if path is None or not path.exists():
        return report
    left = json.loads(path.read_text("utf-8"))
    for name in what:
        ours, theirs = ({**each[name], "load": 0.0} if name == "machine" else each[name] for each in (what, left))
        if ours != theirs:
            raise ValueError(
                f"{path} is left from a run that broke off, with {name} {theirs} and not {ours}. Remove it, or name "
                "another `--output`."
            )
    return left


def main(
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")] = str(
        ROOT / "checkpoints/arcaligner-smollm2-135m"
    ),
    sizes: Annotated[
        str, typer.Option(help="Passages x questions of a batch, with commas between.")
    ] = "1x1,5x1,10x1,20x1,5x8",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or both with a comma.")] = "float32",
    tokens_per_slot: Annotated[
        str | None, typer.Option(help="A number, or `segment`; else the checkpoint's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Maximum number of rounds of a size.")] = 15,
    seconds: Annotated[float, typer.Option(help="Seconds of a size after which no further round begins.")] = 30.0,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of mistral_7b or llama_3_1_8b, and the checkpoint's tokenizer.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the shape, where its own are too many.")] = None,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
    output: Annotated[Path | None, typer.Option(help="Folder for the report and its figure.")] = None,
) -> None:
    """Measures time to the first token, time per token, memory and operations of slots and of text."""
    asked, dtypes = parse_sizes(sizes), parse_dtypes(dtype)
    rate = tokens_per_slot and split_rates(tokens_per_slot)[0]
    chosen = None if shape is None else shape_of(shape, layers)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    rows = read_rows(data)
    what = {
        "model": shape or checkpoint.rstrip("/").split("/")[-1],
        "layers": layers,
        "tokens_per_slot": rate,
        "data": data.name,
        "new_tokens": NEW_TOKENS,
        "machine": describe_machine(device),
    }
    report = begin_report(None if output is None else output / PARTIAL, what)
    found = {(size["dtype"], size["k"], size["batch_size"]): size for size in report["sizes"]}
    for size in report["sizes"]:  # of a run that broke off
        typer.echo("\n".join(size_lines(size)))
    for name, kind in dtypes.items():
        missing = [size for size in asked if (name, *size) not in found]
        if not missing:
            continue
        if name not in report["peaks"]:
            report["peaks"][name] = measured_peaks(device, kind)
        models = (
            load_models(checkpoint, kind, device)
            if chosen is None
            else random_models(chosen, kind, device, processor.context_token_id)
        )
        bench = Bench(*models, processor, rows, chosen is None, report["peaks"][name], rate)
        for k, batch_size in missing:
            size = {"dtype": name, **measure_size(bench, k, batch_size, rounds, seconds)}
            size["targets"] = targets(size)
            found[name, k, batch_size] = size
            report["sizes"] = list(found.values())
            if output is not None:
                write_whole(output / PARTIAL, json.dumps(report, indent=2) + "\n")
            typer.echo("\n".join(size_lines(size)))
        del models, bench  # before the next dtype's are loaded
    report["sizes"] = [found[name, *size] for name in dtypes for size in asked]
    typer.echo("\n".join([*target_lines(report["sizes"]), "", machine_line(report)]))
    typer.echo(json.dumps(report))
    if output is not None:
        save_figure(output, report)
        (output / PARTIAL).unlink()


if __name__ == "__main__":
    run_command(main)
