"""Training tokens a second: the aligner's stages beside plain LoRA fine-tuning of the bare base model.

    python -m arcaligner.benchmarks.throughput [--output throughput.json] [--steps 30] [--device cpu]

All arms read the same batches: real questions with their slots, padded and grouped by length as in training, the
embeddings made before. A step is forward, backward and AdamW; no gradient checkpointing; a learning rate of 0, so that
the arms stay what they are. The plain arms are the `transformers` model with PEFT's LoRA, of the aligner's rank on the
same linears, and read an ordinary token in the place of a slot:

    plain            the loss as TRL's `SFTTrainer` computes it; without Triton its fused head scores the prompt too
    plain_labelled   logits of the labelled columns only, as the aligner has them: the baseline of the targets
    stage_2          gates off, as in stage I
    stage_3          gates decide, as the checkpoint's were trained
    stage_3_always   each gate forced open

In training each slot takes all refinement steps in both of the last arms: a closed gate's gradient needs its candidate.

The arms take turns step by step in one process, and who goes first rotates. The ratio of an arm is the median over
steps of the plain arm's seconds over its own, beside the middle half of them: machines drift, ratios within a moment do
not. Tokens are real ones, slots included and padding not.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from ..files import run_command
from ..configuration_arcaligner import resolve_base_model
from ..lora_arcaligner import lora_target_names
from ..modeling_arcaligner import ArcAlignerForCausalLM, find_decoder_layers
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.collator import ContextCollator, labelled_columns
from ..train.corpora import read_rows
from ..train.data import ExampleBuilder, build_dataset
from ..train.embedding_store import EmbeddingStore
from .machine import machine
from .reports import show_report
from .timing import spread, wait_for

Batch = dict[str, torch.Tensor]
ROOT = Path(__file__).parents[1]
BASELINES = ("plain", "plain_labelled")
TARGETS = {"stage_2": 0.85, "stage_3": 0.6, "stage_3_always": 0.6}  # of `plain_labelled`
WARM_UP = 2


@dataclass
class Arm:
    """One way to train: `prepare` sets the model to it, outside of what is timed; `loss` is a batch's."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch], torch.Tensor]
    prepare: Callable[[], None] = lambda: None


def make_batches(processor: ArcAlignerProcessor, rows: list[dict[str, Any]], batch_size: int) -> list[Batch]:
    """Stage II's examples of `rows`, longest first, those of like length together; embeddings included."""
    builder = ExampleBuilder(processor)
    examples = [example for row in rows for example in builder.question_examples(row)]
    if len(examples) < batch_size:
        raise ValueError(f"Found {len(examples)} questions with answers; expected at least one batch of {batch_size}.")
    examples.sort(key=lambda example: len(example.input_ids), reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        name, width = processor.encoder_name_or_path, processor.encoder_hidden_size
        store = EmbeddingStore(folder, name, width, lambda texts: processor.encode_segments(texts).numpy())
        dataset = build_dataset(examples, store)
        collate = ContextCollator(store, processor.context_token_id, processor.tokenizer.pad_token_id or 0)
        starts = range(0, len(examples) - batch_size + 1, batch_size)
        batches = [collate([dataset[start + index] for index in range(batch_size)]) for start in starts]
    return [{name: value for name, value in batch.items() if name != "row_ids"} for batch in batches]


def num_tokens(batch: Batch) -> int:
    """Real tokens, slots included."""
    return int(batch["attention_mask"].sum())


def load_plain(aligner: ArcAlignerForCausalLM, device: str) -> torch.nn.Module:
    """The aligner's base model with PEFT's LoRA of the same rank on the same linears, and TRL's fused head."""
    config = aligner.config
    name = resolve_base_model(config.base_model_name_or_path)
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))  # what `SFTTrainer` asks for
    layers = find_decoder_layers(base.get_decoder())
    prefix = next(name for name, module in base.named_modules() if module is layers)
    lora = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=lora_target_names(layers, prefix, config.lora_target_modules),
    )
    return get_peft_model(base, lora).to(device).train()


def plain_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """As `SFTTrainer.compute_loss`."""
    outputs = model(**batch, fused_lm_head=True, use_cache=False)
    return -outputs.log_probs.sum() / outputs.label_mask.sum()


def plain_labelled_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Logits of the labelled columns; contiguous, which the model's own `logits_to_keep` would not make them."""
    base = model.get_base_model()
    keep = labelled_columns(batch["labels"])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    hidden = base.get_decoder()(**inputs, use_cache=False).last_hidden_state  # (batch, seq_len, hidden)
    logits = base.get_output_embeddings()(hidden[:, -keep:].contiguous())  # (batch, keep, vocab_size)
    return base.loss_function(logits=logits, labels=batch["labels"][:, -keep:], vocab_size=base.config.vocab_size)


def aligner_loss(model: ArcAlignerForCausalLM, batch: Batch) -> torch.Tensor:
    """As `AlignerTrainer.compute_loss`."""
    keep = labelled_columns(batch["labels"])
    labels = batch["labels"][:, -keep:]
    return model(**{**batch, "labels": labels, "logits_to_keep": keep, "use_cache": False}).loss


def make_arms(aligner: ArcAlignerForCausalLM, plain: torch.nn.Module) -> dict[str, Arm]:
    """All arms, on two models."""
    context_token_id, word = aligner.config.context_token_id, 0

    def without_slots(batch: Batch) -> Batch:
        ids = batch["input_ids"].masked_fill(batch["input_ids"] == context_token_id, word)
        return {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": batch["labels"]}

    def stage(name: str, gate_mode: str) -> Callable[[], None]:
        def prepare() -> None:
            aligner.set_stage(name)
            aligner.config.gate_mode = gate_mode

        return prepare

    own = torch.optim.AdamW([p for _, p in aligner.aligner_parameters()], lr=0.0, weight_decay=0.0)
    bare = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.0, weight_decay=0.0)
    own_loss = lambda batch: aligner_loss(aligner, batch)  # noqa: E731
    return {
        "plain": Arm(plain, bare, lambda batch: plain_loss(plain, without_slots(batch))),
        "plain_labelled": Arm(plain, bare, lambda batch: plain_labelled_loss(plain, without_slots(batch))),
        "stage_2": Arm(aligner, own, own_loss, stage("grounding", "off")),
        "stage_3": Arm(aligner, own, own_loss, stage("gating", "adaptive")),
        "stage_3_always": Arm(aligner, own, own_loss, stage("gating", "always")),
    }


def seconds_of_step(arm: Arm, batch: Batch) -> float:
    """Forward, backward and the optimizer's step; in bfloat16 on an accelerator, as the recipes say."""
    device = batch["input_ids"].device
    arm.prepare()
    wait_for(device)
    start = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        loss = arm.loss(batch)
    loss.backward()
    arm.optimizer.step()
    arm.optimizer.zero_grad()
    wait_for(device)
    return time.perf_counter() - start


def measure(arms: dict[str, Arm], batches: list[Batch], steps: int) -> tuple[list[dict[str, float]], list[int]]:
    """Seconds of each arm and tokens of each step, after `WARM_UP` steps; batches in turn."""
    seconds, tokens, names = [], [], list(arms)
    for step in track(range(WARM_UP + steps), description="steps", transient=True):
        batch = batches[step % len(batches)]
        first = step % len(names)
        found = {name: seconds_of_step(arms[name], batch) for name in names[first:] + names[:first]}
        if step >= WARM_UP:
            seconds.append({name: found[name] for name in names})
            tokens.append(num_tokens(batch))
    return seconds, tokens


def summarise(seconds: list[dict[str, float]], tokens: list[int]) -> dict[str, dict[str, Any]]:
    """For each arm `tokens_per_second`, and its ratio to each baseline: above 1 is faster than it."""
    summary = {}
    for arm in seconds[0]:
        rates = [count / step[arm] for step, count in zip(seconds, tokens, strict=True)]
        ratios = {base: spread([step[base] / step[arm] for step in seconds]) for base in BASELINES}
        summary[arm] = {"tokens_per_second": spread(rates), "ratio": ratios, "target": TARGETS.get(arm)}
    return summary


def make_table(report: dict[str, Any]) -> Table:
    """An arm a row: tokens a second, ratios to the baselines with their middle half, target."""
    title = f"Training: {report['steps']} steps of {report['batch_size']} rows"
    table = Table("Arm", "Tokens/s", "/ plain", "/ plain_labelled", "Target", title=title)
    for name, row in report["arms"].items():
        ratios = [f"{r['median']:.2f} ({r['lower']:.2f} to {r['upper']:.2f})" for r in row["ratio"].values()]
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        table.add_row(name, f"{row['tokens_per_second']['median']:.0f}", *ratios, target)
    made_on = report["machine"]
    table.caption = f"{made_on['device']}, {made_on['cpu']}, {made_on['threads']} threads, torch {made_on['torch']}"
    return table


def main(
    output: Annotated[Path | None, typer.Option(help="Write the JSON line here, the table beside it as .txt.")] = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each arm.", min=2)] = 30,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions, passages and answers.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
    model: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")] = str(
        ROOT / "checkpoints/arcaligner-smollm2-135m"
    ),
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 16,
) -> None:
    """Measures training tokens a second of the aligner's stages and of plain LoRA fine-tuning."""
    processor = ArcAlignerProcessor.from_pretrained(model, trust_remote_code=False)
    batches = make_batches(processor, read_rows(data), batch_size)
    aligner = ArcAlignerForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).train()
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    about = machine(device)
    seconds, tokens = measure(make_arms(aligner, load_plain(aligner, device)), batches, steps)
    slots = sum(int((batch["input_ids"] == aligner.config.context_token_id).sum()) for batch in batches)
    report = {
        "arms": summarise(seconds, tokens),
        "steps": steps,
        "batch_size": batch_size,
        "lora_r": aligner.config.lora_r,
        "tokens_per_row": sum(map(num_tokens, batches)) / (batch_size * len(batches)),
        "slots_per_row": slots / (batch_size * len(batches)),
        "data": data.name,
        "model": model.rstrip("/").split("/")[-1],
        "machine": about,
    }
    show_report(report, [make_table(report)], output)


if __name__ == "__main__":
    run_command(main)
