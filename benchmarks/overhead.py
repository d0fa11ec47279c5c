"""What slots cost where they should cost nothing: decoding, prefill with closed gates, memory of a training step.

    python -m arcaligner.benchmarks.overhead [--output overhead.json]

Arms of a comparison take turns in one process, each pair gives a ratio, and the median of the ratios is printed with
the middle half of them. Memory is the peak resident size of a process of its own.
"""

import copy
import json
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from ..files import run_command
from ..configuration_arcaligner import DEFAULT_BASE_MODEL, resolve_base_model
from ..lora_arcaligner import lora_target_names
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..files import write_whole
from .machine import machine
from .models import base_of
from .timing import Turn, in_turn, spread

NUM_SLOTS, PROMPT_TOKENS, LORA_R = 25, 64, 16
TRAIN_BATCH, TRAIN_TOKENS = 8, 128


def load_aligner() -> ArcAlignerForCausalLM:
    """A fresh aligner around the default base model: its gates are closed."""
    settings = {"lora_r": LORA_R, "gate_mode": "adaptive", "dtype": torch.float32}
    return ArcAlignerForCausalLM.from_pretrained(DEFAULT_BASE_MODEL, **settings).eval()


def load_base_model():
    return AutoModelForCausalLM.from_pretrained(resolve_base_model(DEFAULT_BASE_MODEL), dtype=torch.float32).eval()


def prompt(model: ArcAlignerForCausalLM, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Random words with `NUM_SLOTS` slots behind the first eight."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(100, 40_000, (batch, seq_len), generator=generator)
    input_ids[:, 8 : 8 + NUM_SLOTS] = model.config.context_token_id
    embeds = torch.randn(batch, NUM_SLOTS, model.config.encoder_hidden_size, generator=generator)
    return {"input_ids": input_ids, "context_embeds": torch.nn.functional.normalize(embeds, dim=-1)}


def ratios(ours: Callable[[], None], theirs: Callable[[], None], runs: int, title: str) -> list[float]:
    """Seconds of `ours` over seconds of `theirs`, `runs` times in turn; who goes first alternates."""
    turns = {"theirs": Turn(theirs), "ours": Turn(ours)}
    rounds = track(range(runs + 3), description=title, transient=True)
    seconds = [in_turn(turns, number, "cpu") for number in rounds][3:]
    return [each["ours"] / each["theirs"] for each in seconds]


@torch.inference_mode()
def measure_decoding(runs: int) -> list[float]:
    """One token after the same cached prompt: ours over the bare base model."""
    model = load_aligner()
    base = base_of(model, torch.float32, "cpu")
    cache = model(**prompt(model, 1, PROMPT_TOKENS), use_cache=True).past_key_values
    token = torch.tensor([[42]])

    def step(decoder, own_cache) -> None:
        decoder(input_ids=token, past_key_values=own_cache, use_cache=True)
        own_cache.crop(-1)

    own, bare = copy.deepcopy(cache), copy.deepcopy(cache)
    return ratios(lambda: step(model, own), lambda: step(base, bare), runs, "decoding")


@torch.inference_mode()
def measure_prefill(runs: int) -> list[float]:
    """The same prompt with closed gates over without gates."""
    model = load_aligner()
    inputs = prompt(model, 1, PROMPT_TOKENS)

    def read(gate_mode: str) -> None:
        model.config.gate_mode = gate_mode
        model(**inputs, logits_to_keep=1)

    return ratios(lambda: read("adaptive"), lambda: read("off"), runs, "prefill")


def training_step(arm: str, result: multiprocessing.Queue) -> None:
    """Peak memory in MiB of loading a model and taking two training steps on the same tokens."""
    torch.manual_seed(0)
    if arm == "arcaligner":
        model = load_aligner()
        model.set_stage("grounding")
        inputs = prompt(model, TRAIN_BATCH, TRAIN_TOKENS)
    else:
        base = load_base_model()
        names = lora_target_names(base.model.layers, "model.layers", "all-linear")
        model = get_peft_model(base, LoraConfig(r=LORA_R, lora_alpha=32, target_modules=names))
        inputs = {"input_ids": torch.randint(100, 40_000, (TRAIN_BATCH, TRAIN_TOKENS))}
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(2):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure_memory() -> dict[str, float]:
    """Peak memory in MiB of a training step: ours and plain PEFT LoRA of the same rank on the same linears."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for arm in track(("arcaligner", "peft_lora"), description="training memory", transient=True):
        result = context.Queue()
        process = context.Process(target=training_step, args=(arm, result))
        process.start()
        peaks[arm] = result.get()
        process.join()
    return peaks


def main(
    runs: Annotated[int, typer.Option(help="Pairs of measurements.")] = 60,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Measures what slots cost where they should cost nothing."""
    found = {"decoding": measure_decoding(runs), "prefill with closed gates": measure_prefill(runs)}
    peaks = measure_memory()
    bounds = {"decoding": 1.02, "prefill with closed gates": 1.05, "memory of a training step": 1.2}
    summary = {name: spread(values) for name, values in found.items()}
    memory = peaks["arcaligner"] / peaks["peft_lora"]
    summary["memory of a training step"] = {"lower": memory, "median": memory, "upper": memory}
    table = Table("Cost", "Ratio", "Middle half", "Bound", title="Slots over none")
    for name, row in summary.items():
        table.add_row(name, f"{row['median']:.3f}", f"{row['lower']:.3f} to {row['upper']:.3f}", f"{bounds[name]}")
    Console().print(table)
    report = {"summary": summary, "peak_mib": peaks, "runs": runs, "machine": machine("cpu")}
    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_command(main)
