"""Reading k passages as slots and as text with llama.cpp: time to the first token and after, and what is kept.

    python -m arcaligner.benchmarks.llama_cpp --exported exported [--types q4_1,q8_0,f16] [--sizes 1,5,10,20]

Prints Markdown tables, one per weight type. All arms read the same questions and passages, in one process and in
turns; who goes first rotates. Passages are encoded before. The last column is the PyTorch model without refinement, in
float32, reading the same slots.
"""

import statistics
import tempfile
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
from .arms import both_prompts, encoded_slots, pick_rows, read
from .measuring import quartiles, time_interleaved
from .report import machine_line

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 16
COLUMNS = ("Rate", "Passages", "Tokens", "Slots", "text", "text, cached", "slots", "slots, cached", "slots, PyTorch")


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


@torch.no_grad()
def measure_size(
    engine: LlamaCppEngine, aligner: ArcAlignerForCausalLM, rows: list[Row], k: int, rate: int | str, rounds: int
) -> tuple[list[str], dict[str, float]]:
    """A row of the table, and more numbers about it."""
    session, processor = engine.session, engine.processor
    picked = pick_rows(rows, processor, k, 1)
    documents = picked[0]["passages"]
    encoded = processor.encode_documents(documents, tokens_per_slot=rate)
    text, slots = both_prompts(
        processor, picked, encoded_slots(processor, picked, rate), engine.config.text_config.vocab_size
    )
    before, after = (part.input_ids[0].tolist() for part in (text.prefix, text.tail))
    head = slots.prefix.input_ids[0, : -len(encoded.context_embeds)].tolist()

    def read_text() -> None:
        session.clear()
        session.read(before + after)

    def read_slots() -> None:
        session.clear()
        session.read(head, has_logits=False)
        session.read(engine.project(encoded), adapter=True, has_logits=False)
        session.read(after)

    def restore(state: bytes) -> None:
        session.restore(state)
        session.read(after)

    session.clear()
    session.read(before, has_logits=False)
    text_state = session.state()
    session.clear()
    session.read(head, has_logits=False)
    session.read(engine.project(encoded), adapter=True, has_logits=False)
    slot_state = session.state()
    arms = {
        "text": read_text,
        "text, cached": lambda: restore(text_state),
        "slots": read_slots,
        "slots, cached": lambda: restore(slot_state),
        "slots, PyTorch": lambda: read(aligner, slots.whole, gate_mode="off", **slots.slots),
    }
    time_interleaved(arms, 0, "cpu")  # warms up
    found = [time_interleaved(arms, number, "cpu") for number in range(rounds)]
    first = {name: 1000 * quartiles([each[name] for each in found])["median"] for name in arms}
    ratios = {name: statistics.median(each["text"] / each[name] for each in found) for name in arms}
    read_slots()
    tokens = {"token": lambda: session.read([int(session.logits.argmax())])}
    per_token = [time_interleaved(tokens, 0, "cpu")["token"] for _ in range(NEW_TOKENS)]
    cells = [str(k), str(len(before) + len(after)), str(len(encoded.context_embeds)), f"{first['text']:.0f}"]
    cells += [f"{first[name]:.0f} (x{ratios[name]:.1f})" for name in list(arms)[1:]]
    more = {"per_token": 1000 * statistics.median(per_token), "text": len(text_state), "slots": len(slot_state)}
    return cells, more


def main(
    exported: Annotated[Path, typer.Option(help="Folder of `arcaligner export-gguf`.")],
    types: Annotated[str, typer.Option(help="Weight types of the base model, separated by commas.")] = "q4_1,q8_0,f16",
    sizes: Annotated[str, typer.Option(help="Numbers of passages, separated by commas.")] = "1,5,10,20",
    tokens_per_slot: Annotated[str, typer.Option(help="Rates, separated by commas.")] = "segment,4",
    rounds: Annotated[int, typer.Option(help="Rounds of each size.", min=2)] = 5,
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions and passages.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
) -> None:
    """Measures llama.cpp with slots and with text."""
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
            lines, more = [], {}
            for rate in rates:
                for k in map(int, sizes.split(",")):
                    cells, more = measure_size(engine, aligner, rows, k, rate, rounds)
                    lines.append([str(rate), *cells])
            print(f"\n### {kind}, {path.stat().st_size / 2**20:.0f} MiB\n")
            print("\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *lines]))
            print(
                f"\nMilliseconds to the first token. A token after {cells[0]} passages as slots: "
                f"{more['per_token']:.1f} ms. Kept for them: {more['text'] / 2**20:.1f} MiB of text, "
                f"{more['slots'] / 2**20:.1f} MiB of slots."
            )
    print(f"\n{machine_line({'machine': describe_machine()})}; llama-cpp-python {import_llama_cpp().__version__}.")


if __name__ == "__main__":
    run_command(main)
