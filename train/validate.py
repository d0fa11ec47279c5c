"""Validate an aligner on held-out articles of a recipe: losses and answers.

    python -m arcaligner.train.validate --recipe train/recipes/smollm2_135m/2_grounding.yaml --runs runs/mine
    python -m arcaligner.train.validate --recipe RECIPE --runs runs/a,runs/b --last 10 --answers 300 --output runs/mean

Make all decisions by these numbers (checkpoints to average, tokens per slot, learning rates, when to stop), and use the
test sets for a finished aligner only. The held-out rows are the same for each aligner: those rows of the recipe's
`train_files` and `reconstruction_files` whose articles are held out.

Losses are printed with their standard errors. With `--output`, the mean of the checkpoints is saved as an aligner;
`train/confidence.py` then fits its answerability head.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

from ..answering_arcaligner import greedy_answers
from ..common.files import markdown_table, run_command, stable_number, write_atomically
from ..common.rows import Row, token_f1
from ..modeling_arcaligner import ArcAlignerForCausalLM, head_nll
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.export import save_stage
from .distractors import needed_and_others
from .examples import ExampleBuilder, open_part
from .prompts import slot_inputs
from .recipe import RecipeArguments
from .run import last_checkpoints, mean_of_checkpoints, read_keys
from .sft import ContextCollator, encode_slots

BATCH = 16
# Of the options that several commands have.
RECIPE_HELP = (
    "Recipe file of a stage, such as train/recipes/smollm2_135m/2_grounding.yaml. Its data files and its choice of "
    "held-out articles are used."
)
ALIGNER_HELP = "Folder of an aligner that has an answerability head (`python -m arcaligner.train.confidence` fits one)."


def read_recipe(path: Path, data_dir: str | None) -> RecipeArguments:
    """The keys of [`RecipeArguments`] in a recipe's file. `data_dir`, if it is not `None`, replaces the recipe's."""
    names = {field.name for field in fields(RecipeArguments)}
    keys = {name: value for name, value in read_keys(path.read_text(encoding="utf-8")).items() if name in names}
    return RecipeArguments(**keys | ({} if data_dir is None else {"data_dir": data_dir}))


def read_rates(rates: str) -> list[int | str]:
    """Values of `tokens_per_slot`, separated by commas.

    >>> read_rates("2,segment")
    [2, 'segment']
    """
    return [int(rate) if rate.isdecimal() else rate for rate in rates.split(",")]


def kind_of(row: Row) -> str:
    """The set that a row comes from: the prefix of its id."""
    return row["id"].partition("_")[0]


def _drawn(row: Row) -> int:
    """A sort key that puts rows into a fixed random order."""
    return stable_number(f"validate:{row['id']}", 2**60)


def question_rows(recipe: RecipeArguments, number: int, held_out: bool = True) -> list[Row]:
    """About `number` questions of the held-out articles, or of the others, equally many from each set if there are
    enough. The added key `source` is the entry of `train_files` that a row comes from."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for source in recipe.train_files:
        for row in open_part(recipe, source, held_out):
            if row["question"].strip() and row["answers"]:
                by_kind[kind_of(row)].append(row | {"source": source})
    selected, num_left = [], number
    for number_of_kind, rows in enumerate(sorted(by_kind.values(), key=len)):
        drawn = sorted(rows, key=_drawn)[: max(1, num_left // (len(by_kind) - number_of_kind))]
        num_left -= len(drawn)
        selected += drawn
    return selected


@torch.inference_mode()
def target_losses(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, examples: Sequence[dict], tokens_per_slot: int | str
) -> np.ndarray:
    """For each example, the summed NLL of its target tokens (Eq. 10) and their number, with slots of `tokens_per_slot`
    tokens: (num_examples, 2)."""
    collator = ContextCollator(
        processor.context_token_id,
        processor.tokenizer.pad_token_id or 0,
        processor.encoder.text_tokenizer,
        (tokens_per_slot,),
        context_words=bool(model.config.word_parts),
    )
    losses = np.zeros((len(examples), 2))
    shortest_first = sorted(range(len(examples)), key=lambda number: examples[number]["length"])
    title = f"computing losses, tokens_per_slot={tokens_per_slot}"
    for start in tqdm(range(0, len(examples), BATCH), desc=title, leave=False):
        numbers = shortest_first[start : start + BATCH]
        batch = collator([examples[number] for number in numbers])
        slots = encode_slots(model.config, processor, batch)
        labels, mask = batch["labels"][:, 1:], (batch["turn_ids"] >= 0).long()
        hidden = model.model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, **slots)
        for row, number in enumerate(numbers):
            is_target = labels[row] != -100
            states, targets = hidden.last_hidden_state[row, :-1][is_target], labels[row][is_target]
            nll = head_nll(states, targets, model.lm_head, model.config.text_config)
            losses[number] = nll.item(), is_target.sum().item()
    return losses


def means_and_errors(losses: np.ndarray, kinds: list[str], articles: list[str]) -> dict[str, tuple[float, float]]:
    """Mean of `losses` (num_examples, 2) per target token, by kind, and its standard error over articles, because
    questions about one article are alike (infinite for a single article).

    >>> means_and_errors(np.array([[1.0, 1], [3.0, 1], [4.0, 2]]), ["squad"] * 3, ["a", "b", "c"])
    {'squad': (2.0, 0.4330127018922193)}
    """
    sums: dict[str, dict[str, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for loss, kind, article in zip(losses, kinds, articles, strict=True):
        sums[kind][article] += loss
    means = {}
    for kind, by_article in sorted(sums.items()):
        nll, tokens = np.array([*by_article.values()]).T
        mean, number = nll.sum() / tokens.sum(), len(tokens)
        spread = np.square(nll - mean * tokens).sum() * number / (number - 1) if number > 1 else math.inf
        means[kind] = float(mean), math.sqrt(spread) / float(tokens.sum())
    return means


def answers(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str
) -> dict[str, float]:
    """Mean F1 of greedy answers to `rows`, in percent, by kind."""
    scores = defaultdict(list)
    rows = sorted(rows, key=lambda row: sum(len(passage["text"]) for passage in row["passages"]))
    title = f"answering questions, tokens_per_slot={tokens_per_slot}"
    for start in tqdm(range(0, len(rows), BATCH), desc=title, leave=False):
        batch = rows[start : start + BATCH]
        inputs = slot_inputs(processor, batch, tokens_per_slot=tokens_per_slot)
        arguments = [row["question"] for row in batch], [row["passages"] for row in batch]
        texts, _ = greedy_answers(model, processor, inputs, *arguments, tokens_per_slot=tokens_per_slot)
        for row, text in zip(batch, texts, strict=True):
            scores[kind_of(row)].append(100 * token_f1(text, row["answers"]))
    return {kind: sum(f1) / len(f1) for kind, f1 in sorted(scores.items())}


def validate(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: RecipeArguments,
    compressions: Sequence[int | str],
    number: int,
    num_answers: int,
) -> dict[str, dict]:
    """Losses and F1 of answers, by tokens per slot and kind. A loss is a pair of the mean and its standard error."""
    rows = [row | {"passages": needed_and_others(row)[0]} for row in question_rows(recipe, number)]
    texts = [row for source in recipe.reconstruction_files for row in open_part(recipe, source, held_out=True)]
    texts = sorted(texts, key=_drawn)[: number // 4]
    kinds, articles, examples = zip(*_examples(processor, rows, texts), strict=True)
    results = {}
    for compression in compressions:
        losses = target_losses(model, processor, examples, compression)
        results[str(compression)] = {"loss": means_and_errors(losses, kinds, articles)}
        if num_answers:
            results[str(compression)]["f1"] = answers(
                model, processor, rows[:: max(1, len(rows) // num_answers)], compression
            )
    return results


def _examples(processor: ArcAlignerProcessor, rows: list[Row], texts: list[Row]) -> list[tuple[str, str, dict]]:
    """Kind, article and example of each question, then of each part of a text to reconstruct."""
    builder = ExampleBuilder(processor, max_segments=8, tokens_per_slot=(2,))
    examples_of_rows = [(kind_of(row), row, builder.question_examples([row])) for row in rows]
    examples_of_rows += [("reconstruction", row, builder.reconstruction_examples([row])) for row in texts]
    return [
        (kind, row["passages"][0]["title"] or row["passages"][0]["text"], example)
        for kind, row, examples in examples_of_rows
        for example in examples
    ]


def table(results: dict[str, dict]) -> str:
    """The results as Markdown."""
    lines = []
    for measure, shown in (("loss", "{:.3f} ± {:.3f}"), ("f1", "{:.1f}")):
        title = {"loss": "loss (nats per token)", "f1": "F1 (%)"}[measure]
        measured = {compression: measures[measure] for compression, measures in results.items() if measure in measures}
        kinds = sorted({kind for by_kind in measured.values() for kind in by_kind})
        cells = [
            [compression, *(shown.format(*np.atleast_1d(by_kind[kind])) for kind in kinds)]
            for compression, by_kind in measured.items()
        ]
        lines += [*markdown_table([f"{title} by tokens per slot", *kinds], cells), ""] if cells else []
    return "\n".join(lines)


def load_mean(folders: list[Path]) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """The aligner with the mean of the weights of `folders`, in float32, and its processor."""
    processor = ArcAlignerProcessor.from_pretrained(folders[0])
    model = ArcAlignerForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    if len(folders) > 1:
        model.set_answerability_layers(None)  # different weights have different states
        model.load_state_dict(mean_of_checkpoints(folders, processor), strict=False)
    return model, processor


def main(
    recipe: Annotated[Path, typer.Option(help=RECIPE_HELP)],
    runs: Annotated[
        str,
        typer.Option(
            help="Folders of stages (their `output_dir`) or of aligners, separated by commas. The weights of several "
            "folders are averaged."
        ),
    ],
    last: Annotated[
        int,
        typer.Option(
            help="How many of the last checkpoints of each folder are averaged; 0 uses the folder's final weights."
        ),
    ] = 0,
    rates: Annotated[
        str, typer.Option(help="Values of `tokens_per_slot`, separated by commas, such as 2,4,segment.")
    ] = "2,4",
    number: Annotated[
        int,
        typer.Option(
            "-n",
            help="Approximate number of questions on held-out articles. A quarter as many texts are reconstructed.",
        ),
    ] = 1000,
    num_answers: Annotated[
        int,
        typer.Option(
            "--answers",
            help="About how many of the `-n` questions are also answered, to measure F1; 0 for none.",
        ),
    ] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder in which the averaged aligner and the results are saved.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data files. Default: `data_dir` of the recipe.")
    ] = None,
) -> None:
    """Print the loss and, with --answers, the F1 of an aligner on held-out articles. The weights of several folders or
    checkpoints are averaged first."""
    data = read_recipe(recipe, data_dir)
    folders = [Path(folder) for folder in runs.split(",")]
    if last:
        folders = [checkpoint for folder in folders for checkpoint in last_checkpoints(folder, last)]
    model, processor = load_mean(folders)
    compressions = read_rates(rates)
    results = validate(model, processor, data, compressions, number, num_answers)
    print(table(results))
    if output is not None:
        save_stage(output, model, processor, recipe.read_text(encoding="utf-8"))
        write_atomically(output / "validation.json", json.dumps(results, indent=1))


if __name__ == "__main__":
    run_command(main)
