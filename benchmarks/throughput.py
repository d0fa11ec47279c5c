"""Speed of training: today's steps one after another, beside the training as it was landed before.

    python -m arcaligner.benchmarks.throughput [--output throughput.json] [--steps 10] [--dtype float32]
    python -m arcaligner.benchmarks.throughput --data train_qa.jsonl.gz --device cuda

Each arm adds one step to the arm before it:

    before      float32, SDPA, logits of all labelled columns, one turn per row
    bfloat16    the backbone in bfloat16, the aligner in float32 (left out with `--dtype float32`)
    eager       eager attention, which is faster than SDPA on a CPU for rows this short
    no_logits   the loss of the labelled positions alone, by the frozen head, without logits
    turns       the turns that read the same slots side by side in one row
    compiled    the decoder layers compiled

All arms learn the same targets of the same rows in stage I (reconstruction, and the text behind it) and in stage II
(questions about the same passages). One turn per row repeats the slots for each turn, so side by side the tokens of
a step are fewer: compare the targets per second, or the ratio, which is of the time for the same rows. The built-in
sample has one question per passage: stage II needs `--data` to have turns to put side by side.

A step is forward, backward and AdamW, with a learning rate of 0, so that all steps are the same. Embeddings are made
before; what the encoder takes is timed separately. The arms take turns step by step in one process, and who goes first
rotates; a ratio is the median over steps, with the middle half.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..evaluation.answering import encode_slots
from ..evaluation.settings import split_rates
from ..files import describe_machine, run_command, write_whole
from ..modeling_arcaligner import ArcAlignerForCausalLM, slot_decoder_layers
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.collator import ContextCollator, turn_mask
from ..train.corpora import Row, read_rows
from ..train.data import Example, ExampleBuilder
from .arms import Arm
from .measuring import quartiles, time_interleaved

ROOT = Path(__file__).parents[1]
STAGES = {"I": "reconstruction", "II": "grounding"}
WARM_UP = 2  # steps, in which layers are compiled
MAX_SEGMENTS = 4  # of a reconstruction example, and
MAX_QUESTIONS = 6  # of a row of questions, as in the recipes

Batch = dict[str, Any]


@dataclass(frozen=True)
class TrainingArm:
    """What an arm does; see above."""

    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"
    has_logits: bool = True
    side_by_side: bool = False
    compiled: bool = False


def make_arms(dtype: str) -> dict[str, TrainingArm]:
    """The arms by name, in their order.

    Raises:
        `ValueError`: a dtype that is neither `bfloat16` nor `float32`.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"`--dtype` is {dtype!r}; expected bfloat16 or float32.")
    steps = {
        "bfloat16": {"dtype": torch.bfloat16},
        "eager": {"attention": "eager"},
        "no_logits": {"has_logits": False},
        "turns": {"side_by_side": True},
        "compiled": {"compiled": True},
    }
    arms = {"before": TrainingArm()}
    for name, change in steps.items():
        if name != dtype and name == "bfloat16":
            continue
        arms[name] = replace(list(arms.values())[-1], **change)
    return arms


def stage_examples(processor: ArcAlignerProcessor, rows: list[Row], stage: str, rate: int | str) -> list[Example]:
    """The examples of a stage, the longest first, so that those of about one length share a batch."""
    builder = ExampleBuilder(processor, MAX_SEGMENTS, continues=True, tokens_per_slot=[rate])
    if stage == "reconstruction":
        examples = list(builder.reconstruction_examples(rows))
    else:
        # Questions about the same passages share an example, wherever they stand.
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(json.dumps(row["passages"]), []).append(row)
        shared = [
            group[start : start + MAX_QUESTIONS]
            for group in groups.values()
            for start in range(0, len(group), MAX_QUESTIONS)
        ]
        examples = list(itertools.chain(*(builder.question_examples(group) for group in shared)))
    return sorted(examples, key=lambda example: -example.length)


def make_batches(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    examples: list[Example],
    batch_size: int,
    rate: int | str,
) -> tuple[list[list[Batch]], list[list[Batch]]]:
    """
    The batches of each step, with turns side by side and with one turn per row.

    Both learn the same targets. One turn per row makes more rows, so that a step has several batches of `batch_size`,
    whose gradients add up.

    Raises:
        `ValueError`: fewer examples than one batch needs.
    """
    if len(examples) < batch_size:
        raise ValueError(
            f"Found {len(examples)} examples; expected at least one batch of {batch_size}. Name more rows."
        )
    has_words = bool(model.config.word_parts)
    collate = ContextCollator(processor.context_token_id, processor.tokenizer.pad_token_id or 0, [rate], has_words)

    def batch_of(rows: list[Example]) -> Batch:
        batch = collate([asdict(row) for row in rows])
        tensors = {name: batch[name] for name in ("input_ids", "labels", "turn_ids")} | encode_slots(processor, batch)
        return {name: value.to(model.device) for name, value in tensors.items()}

    side_by_side, apart = [], []
    for start in range(0, len(examples) - batch_size + 1, batch_size):
        step = examples[start : start + batch_size]
        single = [replace(example, turns=[turn]) for example in step for turn in example.turns]
        side_by_side.append([batch_of(step)])
        apart.append([batch_of(single[i : i + batch_size]) for i in range(0, len(single), batch_size)])
    return side_by_side, apart


def loss_of(model: ArcAlignerForCausalLM, batch: Batch, arm: TrainingArm) -> torch.Tensor:
    """The sum over the targets of a batch, as the arm computes it."""
    slots = {name: batch[name] for name in ("context_embeds", "context_word_ids") if name in batch}
    inputs = {"input_ids": batch["input_ids"], "use_cache": False, **slots}
    labels = batch["labels"]  # (batch, seq_len)
    if batch["turn_ids"].max() > 1:
        inputs["attention_mask"], inputs["position_ids"] = turn_mask(batch["turn_ids"], model.dtype)
    else:  # as training does
        inputs["attention_mask"] = (batch["turn_ids"] >= 0).long()
    if arm.has_logits:
        columns = labels.shape[1] - int((labels != -100).any(dim=0).int().argmax()) + 1  # one before the first target
        labels = labels[:, -columns:]
        loss = model(**inputs, labels=labels, logits_to_keep=columns).loss
    else:
        loss = model(**inputs, labels=labels, skip_logits=True).loss
    return loss * (labels[:, 1:] != -100).sum()


def load_models(checkpoint: str, arms: dict[str, TrainingArm], device: str) -> dict[str, ArcAlignerForCausalLM]:
    """The model of each arm; arms that differ in their batches and loss alone share one."""
    made, models = {}, {}
    for name, arm in arms.items():
        key = (arm.dtype, arm.attention, arm.compiled)
        if key not in made:
            model = ArcAlignerForCausalLM.from_pretrained(
                checkpoint, dtype=arm.dtype, attn_implementation=arm.attention
            )
            made[key] = model.to(device).train()
            for layer in slot_decoder_layers(model) if arm.compiled else []:
                layer.compile(dynamic=True)
        models[name] = made[key]
    return models


def training_step(
    model: ArcAlignerForCausalLM, optimizer: torch.optim.Optimizer, arm: TrainingArm, batches: list[Batch]
) -> None:
    """Forward, backward and the optimizer's step."""
    num_targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        (loss_of(model, batch, arm) / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(
    steps: dict[str, Callable[[int], None]], num_steps: int, num_batches: int, device: str
) -> list[dict[str, float]]:
    """Seconds of each arm in each step after `WARM_UP` steps; `steps` take the number of a batch."""
    found = []
    for number in track(range(WARM_UP + num_steps), description="steps", transient=True):
        arms = {name: Arm(lambda step=step, n=number: step(n % num_batches)) for name, step in steps.items()}
        found.append(time_interleaved(arms, number, device))
    return found[WARM_UP:]


def summarize(seconds: list[dict[str, float]], sizes: dict[str, list[dict[str, int]]]) -> dict[str, dict[str, Any]]:
    """
    Args:
        seconds (`list[dict[str, float]]`): Of each arm in each step.
        sizes (`dict[str, list[dict[str, int]]]`): Of each arm, `tokens`, `targets` and `turns` of each batch.

    Returns:
        `dict`: For each arm these per second, and `ratio`, how many times faster it is than the first: quartiles.
    """
    first = next(iter(seconds[0]))
    summary = {}
    for arm, of_arm in sizes.items():
        taken = [(step[arm], of_arm[(WARM_UP + number) % len(of_arm)]) for number, step in enumerate(seconds)]
        summary[arm] = {
            f"{what}_per_second": quartiles([size[what] / time for time, size in taken])
            for what in ("tokens", "targets", "turns")
        }
        summary[arm]["ratio"] = quartiles([step[first] / step[arm] for step in seconds])
    return summary


def size_of(batches: list[Batch]) -> dict[str, int]:
    """Real tokens, slots included; target tokens; turns, that is texts read back or questions."""
    return {
        "tokens": sum(int((batch["turn_ids"] >= 0).sum()) for batch in batches),
        "targets": sum(int((batch["labels"] != -100).sum()) for batch in batches),
        "turns": sum(int(batch["turn_ids"].amax(dim=1).sum()) for batch in batches),
    }


def measure_stage(
    models: dict[str, ArcAlignerForCausalLM],
    arms: dict[str, TrainingArm],
    processor: ArcAlignerProcessor,
    examples: list[Example],
    batch_size: int,
    num_steps: int,
    rate: int | str,
) -> dict[str, Any]:
    """All figures of a stage."""
    device = str(next(iter(models.values())).device)
    side_by_side, apart = make_batches(next(iter(models.values())), processor, examples, batch_size, rate)
    steps, sizes = {}, {}
    for name, arm in arms.items():
        batches = side_by_side if arm.side_by_side else apart
        trained = [parameter for parameter in models[name].parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
        sizes[name] = [size_of(step) for step in batches]
        steps[name] = lambda n, name=name, batches=batches, optimizer=optimizer, arm=arm: training_step(
            models[name], optimizer, arm, batches[n]
        )
    summary = summarize(measure(steps, num_steps, len(side_by_side), device), sizes)
    collate = ContextCollator(processor.context_token_id, 0, [rate])
    encoder = Arm(lambda: encode_slots(processor, collate([asdict(each) for each in examples[:batch_size]])))
    encoding = [time_interleaved({"encoder": encoder}, 0, device)["encoder"] for _ in range(3)]
    return {"arms": summary, "steps": num_steps, "encoder_seconds": quartiles(encoding), "examples": len(examples)}


def make_table(name: str, stage: dict[str, Any], batch_size: int) -> Table:
    """One arm per row: tokens, targets and turns per second, and the ratio to the first with its middle half."""
    title = f"Stage {name}: {stage['steps']} steps of {batch_size} rows"
    table = Table("Arm", "Tokens/s", "Targets/s", "Turns/s", "Times faster", title=title)
    for arm, row in stage["arms"].items():
        rates = [f"{row[f'{what}_per_second']['median']:.1f}" for what in ("tokens", "targets", "turns")]
        ratio = row["ratio"]
        table.add_row(arm, *rates, f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})")
    table.caption = f"Encoding the segments of a step: {stage['encoder_seconds']['median']:.2f} s, not included"
    return table


def main(
    output: Annotated[Path | None, typer.Option(help="Write the JSON line here, the tables beside it as .txt.")] = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each arm.", min=2)] = 10,
    dtype: Annotated[str, typer.Option(help="bfloat16, or float32 throughout.")] = "bfloat16",
    stages: Annotated[str, typer.Option(help="I, II, or both with a comma.")] = "I,II",
    tokens_per_slot: Annotated[str, typer.Option(help="A number, or `segment`.")] = "8",
    batch_size: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="Where the models run: cpu, cuda.")] = "cpu",
    data: Annotated[Path, typer.Option(help="JSON Lines rows of questions, passages and answers.")] = ROOT
    / "tests/data/squad_dev_sample.jsonl",
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")] = str(
        ROOT / "checkpoints/arcaligner-smollm2-135m"
    ),
) -> None:
    """Measures the speed of training, stage by stage and step by step."""
    arms, (rate,) = make_arms(dtype), split_rates(tokens_per_slot)
    names = stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        raise ValueError(f"`--stages` names {', '.join(unknown)}; expected I, II, or both with a comma.")
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    rows = read_rows(data)
    models = load_models(checkpoint, arms, device)
    report = {
        "stages": {},
        "batch_size": batch_size,
        "tokens_per_slot": rate,
        "data": data.name,
        "model": checkpoint.rstrip("/").split("/")[-1],
        "machine": describe_machine(device),
    }
    console = Console(record=True, width=120)
    for name in names:
        for model in set(models.values()):
            model.set_stage(STAGES[name])
        examples = stage_examples(processor, rows, STAGES[name], rate)
        report["stages"][name] = measure_stage(models, arms, processor, examples, batch_size, steps, rate)
        console.print(make_table(name, report["stages"][name], batch_size))
    made_on = report["machine"]
    console.print(f"{made_on['device']}, {made_on['cpu']}, {made_on['threads']} threads, torch {made_on['torch']}")
    line = json.dumps(report)
    typer.echo(line)
    if output is not None:
        write_whole(output, line + "\n")
        write_whole(output.with_suffix(".txt"), console.export_text())


if __name__ == "__main__":
    run_command(main)
