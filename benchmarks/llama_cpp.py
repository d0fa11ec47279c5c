"""Reading k passages as slots and as text with llama.cpp: time to the first token and after, and memory.

    python -m arcaligner.benchmarks.llama_cpp --exported exported [--types q4_1,q8_0,f16] [--sizes 1,5,10,20]

prints a Markdown table for each weight type: milliseconds, and times faster than the text. All arms read the same
questions and passages, in one process and in turns; who goes first rotates. Passages are encoded before, except for
*encoded too*. *Kept* starts from llama.cpp's own state of everything before the question; *PyTorch* reads the same
slots without refinement, in float32.
Keys and values are in float32 with weights in float32, otherwise in 16 bits.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from ..base_model_arcaligner import resolve_model
from ..common.files import SQUAD_SAMPLE, describe_machine, markdown_table, run_command
from ..common.rows import Row, read_rows
from ..encoder_arcaligner import EncodedDocuments
from ..engines.gguf_files import write_base_model
from ..engines.llama_cpp import LlamaCppEngine, Session, import_llama_cpp
from ..evaluation.analyses.speed import machine_line
from ..evaluation.answering import text_ids
from ..evaluation.settings import split_rates
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .arms import both_prompts, encoded_slots, pick_rows, read
from .measuring import peak_memory, time_interleaved

SLOT_ARMS = ("slots", "slots, encoded too", "slots, kept", "slots, PyTorch")
COLUMNS = ("Passages", "Tokens", "Rate", "Slots", "text", "text, kept", *SLOT_ARMS)
COLUMNS += ("Tokens a second: text / slots", "Kept, MiB: text / slots")
NEW_TOKENS = 16


def weight_types() -> dict[str, int | None]:
    """Weight types that llama.cpp writes, with its numbers of them."""
    start = "LLAMA_FTYPE_MOSTLY_"
    names = {name: value for name, value in vars(import_llama_cpp()).items() if name.startswith(start)}
    return {"f32": None} | {name.removeprefix(start).lower(): value for name, value in names.items()}


def quantized(source: Path, kind: str) -> Path:
    """A GGUF file of another weight type, made of one in float32."""
    if kind == "f32":
        return source
    api, path = import_llama_cpp(), source.with_name(f"{kind}.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype = weight_types()[kind]
    if api.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise ValueError(f"llama.cpp could not write weights of type {kind!r}.")
    return path


def slot_arms(
    engine: LlamaCppEngine, aligner: ArcAlignerForCausalLM, rows: list[Row], rate: int | str
) -> tuple[dict[str, Callable], int, bytes]:
    """The arms that read slots of this rate, how many there are, and what is kept of them."""
    session, encoded = engine.session, encoded_slots(engine.processor, rows, rate)
    text, slots = both_prompts(engine.processor, rows, encoded)
    documents = engine.processor.encode_documents(rows[0]["passages"], tokens_per_slot=rate)
    num_slots, after = len(documents.context_embeds), slots.tail.input_ids[0].tolist()
    before = slots.prefix.input_ids[0, :-num_slots].tolist()

    def read_prefix(documents: EncodedDocuments) -> None:
        session.clear()
        session.read(before, has_logits=False)
        session.read(engine.project(documents), adapter=True, has_logits=False)

    def read_slots() -> None:
        read_prefix(documents)
        session.read(after)

    def encode_and_read() -> None:
        read_prefix(engine.processor.encode_documents(rows[0]["passages"], tokens_per_slot=rate))
        session.read(after)

    def read_kept() -> None:
        session.restore(state)
        session.read(after)

    def read_with_pytorch() -> None:
        read(aligner, slots.whole, gate_mode="off", **slots.slots)

    read_prefix(documents)
    state = session.state()
    read_with_pytorch()  # warms up
    arms = (read_slots, encode_and_read, read_kept, read_with_pytorch)
    return dict(zip([f"{name}, {rate}" for name in SLOT_ARMS], arms, strict=True)), num_slots, state


def tokens_per_second(session: Session, state: bytes) -> float:
    """How fast an answer goes on from a state."""
    session.restore(state)
    start = time.perf_counter()
    for _ in range(NEW_TOKENS):
        session.read([0])
    return NEW_TOKENS / (time.perf_counter() - start)


@torch.no_grad()
def measure_size(
    engine: LlamaCppEngine, aligner: ArcAlignerForCausalLM, rows: list[Row], k: int, rates: list[int | str], rounds: int
) -> list[list[str]]:
    """A line of the table for each rate."""
    session, rows = engine.session, pick_rows(rows, engine.processor, k, 1)
    before, after = text_ids(engine.processor, rows[0])

    def read_text() -> None:
        session.clear()
        session.read(before + after)

    def read_kept() -> None:
        session.restore(states["text"])
        session.read(after)

    session.clear()
    session.read(before, has_logits=False)
    states, slots = {"text": session.state()}, {}
    arms = {"text": read_text, "text, kept": read_kept}
    for rate in rates:
        more, slots[rate], states[rate] = slot_arms(engine, aligner, rows, rate)
        arms |= more
    found, tokens = [], []
    for number in range(rounds):
        found.append(time_interleaved(arms, number, "cpu"))
        tokens.append({name: tokens_per_second(session, state) for name, state in states.items()})
    speed = {name: statistics.median(each[name] for each in tokens) for name in states}
    cells = {name: f"{1000 * statistics.median(each[name] for each in found):.0f}" for name in arms}
    for name in list(arms)[1:]:
        cells[name] += f" (x{statistics.median(each['text'] / each[name] for each in found):.1f})"
    lines = []
    for rate in rates:
        kept = f"{len(states['text']) / 2**20:.1f} / {len(states[rate]) / 2**20:.1f}"
        sizes = [str(k), str(len(before) + len(after)), str(rate), str(slots[rate])]
        names = ["text", "text, kept", *(f"{name}, {rate}" for name in SLOT_ARMS)]
        lines.append([*sizes, *map(cells.get, names), f"{speed['text']:.1f} / {speed[rate]:.1f}", kept])
    return lines


def main(
    exported: Annotated[Path, typer.Option(help="Folder of `arcaligner export-gguf`.")],
    types: Annotated[str, typer.Option(help="Weight types of the base model, separated by commas.")] = "q4_1,q8_0,f16",
    sizes: Annotated[str, typer.Option(help="Numbers of passages, separated by commas.")] = "1,5,10,20",
    tokens_per_slot: Annotated[str, typer.Option(help="Rates, separated by commas.")] = "segment,4",
    rounds: Annotated[int, typer.Option(help="Rounds of each size.", min=2)] = 5,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = SQUAD_SAMPLE,
) -> None:
    """Measures time to the first token of slots and of text with llama.cpp."""
    kinds, known = types.split(","), weight_types()
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"`--types` names {', '.join(unknown)}; expected some of {', '.join(sorted(known))}.")
    aligner = ArcAlignerForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    processor = ArcAlignerProcessor.from_pretrained(exported)
    rows, rates = read_rows(data), split_rates(tokens_per_slot)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "f32.gguf")
        base = AutoModelForCausalLM.from_pretrained(resolve_model(aligner.config.base_model_name_or_path))
        tokens = processor.tokenizer.convert_ids_to_tokens(range(len(processor.tokenizer)))
        write_base_model(base.float(), tokens, source)
        del base
        for kind in kinds:
            path = quantized(source, kind)
            with peak_memory("cpu") as peak:
                engine = LlamaCppEngine(exported, path, gate_mode="off", cache_type="f32" if kind == "f32" else "f16")
            memory = f"; {peak['bytes'] / 2**20:.0f} MiB of memory" if peak["bytes"] is not None else ""
            print(f"\n### {kind}, {path.stat().st_size / 2**20:.0f} MiB{memory}\n")
            lines = [measure_size(engine, aligner, rows, k, rates, rounds) for k in map(int, sizes.split(","))]
            print("\n".join(markdown_table(COLUMNS, itertools.chain.from_iterable(lines))), flush=True)
    print(f"\n{machine_line({'machine': describe_machine()})}; llama-cpp-python {import_llama_cpp().__version__}.")


if __name__ == "__main__":
    run_command(main)
