"""Reading k passages as slots and as text with llama.cpp: time to the first token and after, and what is kept.

    python -m arcaligner.benchmarks.llama_cpp --exported exported [--types q4_1,q8_0,f16] [--sizes 1,5,10,20]

Prints a Markdown table for each weight type: milliseconds, and times faster than the text. All arms read the same
questions and passages, in one process and in turns; who goes first rotates. Passages are encoded before. *Kept* starts
from llama.cpp's own state of everything before the question; *PyTorch* reads the same slots without refinement, in
float32.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from ..configuration_arcaligner import resolve_base_model
from ..engines.gguf_files import write_base_model
from ..engines.llama_cpp import LlamaCppEngine, import_llama_cpp
from ..evaluation.settings import split_rates
from ..files import describe_machine, run_command
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import Row, read_rows
from ..train.data import passages_text
from .arms import both_prompts, encoded_slots, pick_rows, read
from .measuring import time_interleaved
from .report import machine_line

ROOT = Path(__file__).parents[1]
SLOT_ARMS = ("slots", "slots, kept", "slots, PyTorch")
COLUMNS = ("Passages", "Tokens", "Rate", "Slots", "text", "text, kept", *SLOT_ARMS, "Kept, MiB: text / slots")


def show(lines: Iterable[Sequence[str]]) -> None:
    """Prints rows of a Markdown table, at once."""
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


def quantized(source: Path, kind: str) -> Path:
    """A GGUF file of another weight type, made of one in float32."""
    if kind == "f32":
        return source
    api, path = import_llama_cpp(), source.with_name(f"{kind}.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if api.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise ValueError(f"llama.cpp could not write weights of type {kind!r}.")
    return path


def slot_arms(
    engine: LlamaCppEngine, aligner: ArcAlignerForCausalLM, rows: list[Row], rate: int | str
) -> tuple[dict[str, Callable], int, bytes]:
    """The arms that read slots of this rate, how many there are, and what is kept of them."""
    session, encoded = engine.session, encoded_slots(engine.processor, rows, rate)
    text, slots = both_prompts(engine.processor, rows, encoded, engine.config.text_config.vocab_size)
    documents = engine.processor.encode_documents(rows[0]["passages"], tokens_per_slot=rate)
    num_slots, after = len(documents.context_embeds), slots.tail.input_ids[0].tolist()
    before = slots.prefix.input_ids[0, :-num_slots].tolist()

    def read_prefix() -> None:
        session.clear()
        session.read(before, has_logits=False)
        session.read(engine.project(documents), adapter=True, has_logits=False)

    def read_slots() -> None:
        read_prefix()
        session.read(after)

    def read_kept() -> None:
        session.restore(state)
        session.read(after)

    def read_with_pytorch() -> None:
        read(aligner, slots.whole, gate_mode="off", **slots.slots)

    read_prefix()
    state = session.state()
    read_with_pytorch()  # warms up
    names = [f"{name}, {rate}" for name in SLOT_ARMS]
    return dict(zip(names, (read_slots, read_kept, read_with_pytorch), strict=True)), num_slots, state


@torch.no_grad()
def measure_size(
    engine: LlamaCppEngine, aligner: ArcAlignerForCausalLM, rows: list[Row], k: int, rates: list[int | str], rounds: int
) -> list[list[str]]:
    """A line of the table for each rate."""
    session, rows = engine.session, pick_rows(rows, engine.processor, k, 1)
    turn = [{"role": "user", "content": rows[0]["question"]}]
    before, after = engine.processor.split_prompt(turn, add_generation_prompt=True)
    before, after = map(engine.processor.tokenize_prompt, (before + passages_text(rows[0]), after))

    def read_text() -> None:
        session.clear()
        session.read(before + after)

    def read_kept() -> None:
        session.restore(state)
        session.read(after)

    session.clear()
    session.read(before, has_logits=False)
    state = session.state()
    arms, found_slots = {"text": read_text, "text, kept": read_kept}, []
    for rate in rates:
        more, num_slots, slot_state = slot_arms(engine, aligner, rows, rate)
        arms |= more
        found_slots.append((rate, num_slots, slot_state))
    found = [time_interleaved(arms, number, "cpu") for number in range(rounds)]
    first = {name: 1000 * statistics.median(each[name] for each in found) for name in arms}
    times = {name: statistics.median(each["text"] / each[name] for each in found) for name in arms}
    text = [f"{first['text']:.0f}", f"{first['text, kept']:.0f} (x{times['text, kept']:.1f})"]
    lines = []
    for rate, num_slots, slot_state in found_slots:
        names = [f"{name}, {rate}" for name in SLOT_ARMS]
        kept = f"{len(state) / 2**20:.1f} / {len(slot_state) / 2**20:.1f}"
        sizes = [str(k), str(len(before) + len(after)), str(rate), str(num_slots)]
        lines.append([*sizes, *text, *(f"{first[name]:.0f} (x{times[name]:.1f})" for name in names), kept])
    return lines


def main(
    exported: Annotated[Path, typer.Option(help="Folder of `arcaligner export-gguf`.")],
    types: Annotated[str, typer.Option(help="Weight types of the base model, separated by commas.")] = "q4_1,q8_0,f16",
    sizes: Annotated[str, typer.Option(help="Numbers of passages, separated by commas.")] = "1,5,10,20",
    tokens_per_slot: Annotated[str, typer.Option(help="Rates, separated by commas.")] = "segment,4",
    rounds: Annotated[int, typer.Option(help="Rounds of each size.", min=2)] = 5,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
) -> None:
    """Measures time to the first token of slots and of text with llama.cpp."""
    aligner = ArcAlignerForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer, rows = ArcAlignerProcessor.from_pretrained(exported).tokenizer, read_rows(data)
    rates = split_rates(tokens_per_slot)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "f32.gguf")
        base = AutoModelForCausalLM.from_pretrained(resolve_base_model(aligner.config.base_model_name_or_path))
        write_base_model(base.float(), tokenizer.convert_ids_to_tokens(range(len(tokenizer))), source)
        del base
        for kind in types.split(","):
            path = quantized(source, kind)
            engine = LlamaCppEngine(exported, path, gate_mode="off")
            print(f"\n### {kind}, {path.stat().st_size / 2**20:.0f} MiB\n")
            show([COLUMNS, ["---"] * len(COLUMNS)])
            for k in map(int, sizes.split(",")):
                show(measure_size(engine, aligner, rows, k, rates, rounds))
    print(f"\n{machine_line({'machine': describe_machine()})}; llama-cpp-python {import_llama_cpp().__version__}.")


if __name__ == "__main__":
    run_command(main)
