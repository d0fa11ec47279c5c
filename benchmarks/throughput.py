"""Speed of training a recipe: each step of the way from a plain trainer to the recipe.

    python -m arcaligner.benchmarks.throughput --config train/recipes/smollm2_135m/1_reconstruction.yaml --max_steps 10
    python -m arcaligner.benchmarks.throughput --config ... --data_dir DATA --dtype float32 --tokens_per_slot 8

It takes the keys of a recipe like `arcaligner.train.sft`; `--max_steps` is the number of measured steps. Each arm adds
one thing to the arm before it:

    plain       float32, SDPA, one turn per row, the logits of all positions
    loss        the frozen head's loss, which keeps no logits
    dtype       the recipe's `dtype`
    attention   its `attn_implementation`
    turns       turns that read the same slots side by side in one row
    compiled    its `compile_layers`

All arms learn the same targets of the same rows. One turn per row repeats the slots for each turn, so side by side a
step has fewer tokens: compare targets per second, or the ratio. A step is the trainer's own, with the encoder and
AdamW, and a learning rate of 0, so that all steps are the same. The arms take turns step by step in one process; a
ratio is the median over steps, with the middle half.
"""

import dataclasses
import json
from functools import partial
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..common.files import describe_machine
from ..train.recipe import RecipeArguments, resolve_dtype, run_script
from ..train.run import SCRIPT
from ..train.sft import KINDS, load_processor, make_examples, make_trainer
from ..train.trainer import AlignerTrainer, AlignerTrainingConfig
from .measuring import quartiles, ratio, time_interleaved

WARM_UP = 2  # steps, in which layers are compiled
SIZES = ("tokens", "targets")

Examples = list[dict[str, Any]]


@dataclasses.dataclass
class TrainingArm:
    """A trainer of the rows of a step, as they are or with one turn per row."""

    trainer: AlignerTrainer
    side_by_side: bool
    keeps_logits: bool

    def __post_init__(self):
        parameters = [parameter for parameter in self.trainer.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
        self.trainer.model.train()
        self.skip_logits = self.trainer.skip_logits and not self.keeps_logits  # arms may share a trainer

    def batches(self, rows: Examples) -> list[dict[str, Any]]:
        """The batches of a step. One turn per row makes more of them, whose gradients add up."""
        if not self.side_by_side:
            rows = [row | {"turns": [turn]} for row in rows for turn in row["turns"]]
        size = self.trainer.args.per_device_train_batch_size
        return [self.trainer.data_collator(rows[i : i + size]) for i in range(0, len(rows), size)]

    def step(self, batches: list[dict[str, Any]]) -> None:
        """Forward, backward and the optimizer's step."""
        self.trainer.skip_logits = self.skip_logits
        num_targets = torch.tensor(size_of(batches)["targets"], device=self.trainer.args.device)
        for batch in batches:
            self.trainer.training_step(self.trainer.model, dict(batch), num_targets)
        self.optimizer.step()
        self.optimizer.zero_grad()


def size_of(batches: list[dict[str, Any]]) -> dict[str, int]:
    """Real tokens, slots included; target tokens."""
    return {
        "tokens": sum(int((batch["turn_ids"] >= 0).sum()) for batch in batches),
        "targets": sum(int((batch["labels"] != -100).sum()) for batch in batches),
    }


def make_arms(recipe: RecipeArguments, args: AlignerTrainingConfig) -> tuple[dict[str, TrainingArm], list[Examples]]:
    """The arms of a recipe by name, without those that change nothing in it, and the rows of each step.

    Raises:
        `ValueError`: `max_steps` below 2; fewer examples than one step needs.
    """
    if args.max_steps < 2:
        raise ValueError(f"`max_steps` is {args.max_steps}; expected the number of measured steps, at least 2.")
    processor = load_processor(recipe, args.chat_template_path)
    size = args.per_device_train_batch_size
    args.eval_strategy = "no"
    examples, _ = make_examples(dataclasses.replace(recipe, eval_files={}), args, processor)
    if len(examples) < size:
        raise ValueError(f"Found {len(examples)} examples; expected at least one batch of {size}. Name more rows.")
    # As in training, those of similar length share a batch.
    lengths = examples["length"][: size * args.max_steps]
    examples = examples.select(sorted(range(len(lengths)), key=lambda number: -lengths[number]))
    rows = [examples.select(range(i, i + size)).to_list() for i in range(0, len(examples) - size + 1, size)]
    steps = {
        "plain": {"dtype": "float32", "attn_implementation": "sdpa", "compile_layers": False},
        "loss": {},
        "dtype": {"dtype": recipe.dtype},
        "attention": {"attn_implementation": recipe.attn_implementation or "sdpa"},
        "turns": {},
        "compiled": {"compile_layers": recipe.compile_layers},
    }
    arms, settings = {}, recipe
    for name, change in steps.items():
        before, settings = settings, dataclasses.replace(settings, **change)
        if arms and settings == before:
            if name != "loss" and (name != "turns" or not recipe.has_turns):
                continue
            trainer = list(arms.values())[-1].trainer  # the same model
        else:
            own = load_processor(settings, args.chat_template_path)  # its encoder has the arm's dtype
            trainer = make_trainer(settings, args, own, resolve_dtype(settings.dtype, args.device), examples)
        arms[name] = TrainingArm(trainer, side_by_side=name in ("turns", "compiled"), keeps_logits=name == "plain")
    return arms, rows


def measure(arms: dict[str, TrainingArm], rows: list[Examples], num_steps: int) -> dict[str, dict[str, Any]]:
    """Times the steps; step n takes the rows n, modulo their number. For each arm the quartiles of `tokens_per_second`,
    `targets_per_second` and `ratio`, how many times faster it is than the first."""
    device = str(next(iter(arms.values())).trainer.args.device)
    seconds, sizes = [], []
    for number in track(range(WARM_UP + num_steps), description="steps", transient=True):
        batches = {name: arm.batches(rows[number % len(rows)]) for name, arm in arms.items()}
        runs = {name: partial(arm.step, batches[name]) for name, arm in arms.items()}
        seconds.append(time_interleaved(runs, number, device))
        sizes.append({name: size_of(batches[name]) for name in arms})
    found = list(zip(seconds, sizes, strict=True))[WARM_UP:]
    return {
        name: {
            f"{what}_per_second": quartiles([size[name][what] / taken[name] for taken, size in found]) for what in SIZES
        }
        | {"ratio": ratio(seconds[WARM_UP:], next(iter(arms)), name)}
        for name in arms
    }


def main(recipe: RecipeArguments, args: AlignerTrainingConfig, settings: str) -> None:
    """Prints a table, and a JSON line with all numbers."""
    arms, rows = make_arms(recipe, args)
    found = measure(arms, rows, args.max_steps)
    machine = describe_machine(str(args.device))
    title = f"{recipe.stage}, {args.max_steps} steps of {args.per_device_train_batch_size} rows"
    table = Table("Arm", "Tokens/s", "Targets/s", "Times faster", title=title)
    for name, row in found.items():
        rates = [f"{row[f'{what}_per_second']['median']:.1f}" for what in SIZES]
        table.add_row(name, *rates, "{median:.2f} ({lower:.2f} to {upper:.2f})".format(**row["ratio"]))
    Console(width=100).print(table)
    typer.echo(json.dumps({"arms": found, "settings": settings, "machine": machine}))


if __name__ == "__main__":
    run_script(SCRIPT, KINDS, main)
