"""How many of several passages to use: the F1 of answers to held-out questions from the top-ranked ones, and from all.

    python -m arcaligner.train.num_passages --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

The passages that a question needs are mixed, in random order, with the nearest others that do not answer it: two, three
or five in all. The default of `max_passages` was chosen by this table. Its rows are questions that need one passage and
questions that need several, because one passage is not enough for the latter. Three columns need an explanation. *all,
weighted*: all passages are used, and the attention to the slots of each is weighted, as if `max_passages` were the
number of passages. *three if unsure*: three passages if the top-ranked one is unlikely to contain the answer, else only
this one. *as needed*, the default: two passages if the multi-hop head finds that the question needs several, else one.
The questions are about half of the held-out articles; the head is fitted on the other half.
"""

import math
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

from ..answering_arcaligner import Answerer, greedy_answers, select_top
from ..common.files import markdown_table, run_command, stable_number
from ..common.rows import Row, token_f1
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .distractors import NearestPassages, needed_and_others
from .examples import open_part
from .recipe import RecipeArguments
from .validate import ALIGNER_HELP, RECIPE_HELP, load_mean, question_rows, read_rates, read_recipe

SIZES = 2, 3, 5
WAYS = "top-ranked", "two", "three if unsure", "as needed", "all", "all, weighted", "needed"
# What the columns of the table mean, as far as their titles do not say it.
LEGEND = (
    "Columns: which passages the answers come from. two: the two top-ranked passages. three if unsure: three, if the "
    "top-ranked passage is unlikely to contain the answer, else only one. as needed: one or two, as the multi-hop "
    "head decides (the default of the pipeline). all, weighted: attention to each passage is weighted by its score. "
    "needed: exactly the passages that the answer needs."
)
FITTED, MEASURED = 0, 1  # halves of the held-out articles: the one of `train/multihop.py`, and the one of this table
UNSURE = 0.5  # answerability of the top-ranked passage, below which three are used
CACHE_BYTES = 2**30


def mixed_rows(recipe: RecipeArguments, number: int, half: int, sizes: Sequence[int] = SIZES) -> list[Row]:
    """About `number` questions of a `half` of the held-out articles, 0 or 1. `passages` are those that the answer
    needs, mixed with the nearest others of the held-out articles; their number in all is drawn from `sizes`. `gold` has
    the numbers of the needed passages, and `needs` is `"one"` or `"several"`."""
    rows = [row for row in question_rows(recipe, 2 * number) if half_of(row) == half]
    nearest = NearestPassages(row for source in recipe.train_files for row in open_part(recipe, source, held_out=True))
    mixed = []
    for row in rows:
        draw = random.Random(row["id"])
        needed, _ = needed_and_others(row)
        size = max(draw.choice(sizes), len(needed) + 1)
        others = nearest.without_answer(row["question"], row["answers"], needed, size - len(needed))
        order = draw.sample(range(len(needed) + len(others)), len(needed) + len(others))
        passages = [[*needed, *others][index] for index in order]
        gold = [number for number, index in enumerate(order) if index < len(needed)]
        needs = "one" if len(needed) == 1 else "several"
        mixed.append(row | {"passages": passages, "gold": gold, "needs": needs})
    return mixed


def half_of(row: Row) -> int:
    """The half of the articles that a question belongs to, 0 or 1. The first passage that it needs decides."""
    return stable_number(f"half:{needed_and_others(row)[0][0]['title']}", 2)


@torch.inference_mode()
def answers_by_way(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: Sequence[Row], tokens_per_slot: int | str
) -> np.ndarray:
    """F1 of greedy answers, in percent: (num_rows, len(WAYS))."""
    cache = model.passage_cache(processor, max_bytes=CACHE_BYTES)
    answerer, f1 = Answerer(model, processor, cache), np.zeros((len(rows), len(WAYS)))
    for index, row in enumerate(tqdm(rows, desc=f"answering questions, tokens_per_slot={tokens_per_slot}")):
        question, passages = row["question"], row["passages"]
        scores = answerer.score([question], [passages], tokens_per_slot=tokens_per_slot)[0]
        (first,) = select_top(scores, 1)
        selected = {
            "top-ranked": [first],
            "two": select_top(scores, 2),
            "three if unsure": select_top(scores, 3) if scores[first].answerability < UNSURE else [first],
            "as needed": answerer.select([question], [passages], tokens_per_slot=tokens_per_slot)[0].numbers,
            "all": range(len(passages)),
            "all, weighted": range(len(passages)),
            "needed": row["gold"],
        }
        (weighted,) = answerer.select([question], [passages], len(passages), tokens_per_slot=tokens_per_slot)
        answers = {}  # by the passages used, because several ways often use the same ones
        for column, way in enumerate(WAYS):
            prior = [weighted.prior] if way == "all, weighted" else None
            key = (*selected[way], prior is None)
            if key not in answers:
                used = [passages[number] for number in selected[way]]
                inputs = cache.prepare([question], [used], tokens_per_slot=tokens_per_slot, passage_prior=prior)
                settings = {"tokens_per_slot": tokens_per_slot}
                (answers[key],), _ = greedy_answers(model, processor, inputs, [question], [used], **settings)
            f1[index, column] = 100 * token_f1(answers[key], row["answers"])
    return f1


def table(rows: Sequence[Row], scores: np.ndarray) -> str:
    """Mean F1 of each way, in percent, with its standard error, by how many passages are needed, as Markdown."""
    cells = []
    for needs in ("one", "several"):
        needed_scores = scores[[row["needs"] == needs for row in rows]]
        if len(needed_scores):
            errors = needed_scores.std(axis=0) / math.sqrt(len(needed_scores))
            means = needed_scores.mean(axis=0)
            shown = [f"{mean:.1f} ± {error:.1f}" for mean, error in zip(means, errors, strict=True)]
            cells.append([f"{needs} ({len(needed_scores)} questions)", *shown])
    return "\n".join(markdown_table(["passages needed", *WAYS], cells))


def main(
    recipe: Annotated[Path, typer.Option(help=RECIPE_HELP)],
    aligner: Annotated[
        Path, typer.Option(help=f"{ALIGNER_HELP} For the column `as needed`, it also needs a multi-hop head.")
    ],
    rates: Annotated[
        str, typer.Option(help="Values of `tokens_per_slot`, separated by commas, such as 2,4,segment.")
    ] = "2",
    number: Annotated[int, typer.Option("-n", help="Approximate number of questions to answer.")] = 150,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data files. Default: `data_dir` of the recipe.")
    ] = None,
) -> None:
    """Print the F1 of answers to questions about held-out articles: from the top-ranked passages, from all passages,
    and from those that the answer needs."""
    rows = mixed_rows(read_recipe(recipe, data_dir), number, MEASURED)
    model, processor = load_mean([aligner])
    for compression in read_rates(rates):
        scores = answers_by_way(model, processor, rows, compression)
        print(f"F1 in percent, with `tokens_per_slot` {compression}\n\n{table(rows, scores)}\n", flush=True)
    print("\n".join(textwrap.wrap(LEGEND, 120)))


if __name__ == "__main__":
    run_command(main)
