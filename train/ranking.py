"""Weights of the similarities that rank passages: which pair of weights selects the best passages of your questions.

    python -m arcaligner.train.ranking --aligner FOLDER --rows FILE

One of several passages is selected by its answerability, plus its cosine with the question times `similarity_weight`
and its late-interaction score times `match_weight`. FILE has questions with several passages each and with answers,
such as `python -m arcaligner.evaluation.retrieval` writes (the schema is in `common/rows.py`). The aligner scores all
passages and answers from each of them alone. Then the selection of one passage is repeated with each pair of weights,
as it takes place with `max_passages=1`, so that each pair also has its own number of scored passages. By default, a
multi-hop question gets two passages, which is not measured here: leave out such questions.

Differences are those to the configured weights, for the same questions, with their standard errors. `--save` saves the
best pair in `config.json` of the aligner if its difference, from at least 30 questions, is more than twice its standard
error. The best of several pairs looks a little better than it is, because chance has helped to choose it. So use many
questions, and others than those of your evaluation.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers.utils import CONFIG_NAME

from ..answering_arcaligner import Answerer, ScoredPassage, are_sure, candidates_of, greedy_answers, select_top
from ..common.files import counted, markdown_table, run_command, write_atomically
from ..common.rows import Row, contains_match, read_rows, token_f1, usable_golds
from ..loading_arcaligner import read_json
from .num_passages import CACHE_BYTES
from .validate import BATCH, load_mean

SETTINGS = "similarity_weight", "match_weight"
# Pairs of these weights, which are compared with the configured pair.
PAIRS = ((0, 0), (10, 0), (30, 0), (0, 15), (10, 5), (20, 10), (30, 15), (45, 20), (60, 30))

MIN_QUESTIONS = 30  # fewer say too little about weights

Weights = tuple[float, float]


class MeasuredPassage(NamedTuple):
    """One passage of a question: its score, the F1 in percent of the answer from it alone, and whether its text
    contains an answer of the row."""

    score: ScoredPassage
    f1: float
    has_answer: bool


Passages = dict[int, MeasuredPassage]  # of one question, by their numbers


def questions_of(rows: Sequence[Row], answerer: Answerer) -> list[Row]:
    """The rows, with long passages cut as they are when a question is asked.

    Raises:
        `ValueError`: no rows, or a row with fewer than two passages with text or without an answer.
    """
    cut = [row | {"passages": answerer.cut(row["passages"])[0]} for row in rows]
    for row in cut:
        num_passages = sum(bool(passage["text"].strip()) for passage in row["passages"])
        if num_passages < 2 or not usable_golds(row["answers"]):
            raise ValueError(
                f"The row with the id {row['id']!r} has {counted(num_passages, 'passage')} with text, and the "
                f"answers {row['answers']}; expected at least two passages and one answer. Add them, or remove the row."
            )
    if not cut:
        raise ValueError("The file has no rows; expected questions, each with answers and at least two passages.")
    return cut


@torch.inference_mode()
def measure(answerer: Answerer, rows: Sequence[Row]) -> list[Passages]:
    """Score all passages of each row, and answer from each of them alone."""
    config, measured = answerer.model.config, []
    configured, config.match_weight = config.match_weight, 1.0  # with 0, late-interaction scores are not computed
    try:
        for row in tqdm(rows, desc="answering from each passage"):
            (scores,) = answerer.score([row["question"]], [row["passages"]])
            measured.append({})
            for start in range(0, len(scores), BATCH):
                numbers = [*scores][start : start + BATCH]
                used = [[row["passages"][number]] for number in numbers]
                questions = [row["question"]] * len(used)
                inputs = answerer.cache.prepare(questions, used)
                settings = {"tokens_per_slot": answerer.processor.tokens_per_slot}
                texts, _ = greedy_answers(answerer.model, answerer.processor, inputs, questions, used, **settings)
                for number, (passage,), text in zip(numbers, used, texts, strict=True):
                    has_answer = bool(contains_match(passage["text"], row["answers"]))
                    f1 = 100 * token_f1(text, row["answers"])
                    measured[-1][number] = MeasuredPassage(scores[number], f1, has_answer)
    finally:
        config.match_weight = configured
    return measured


def select_one(passages: Passages, weights: Weights, config) -> tuple[int, int]:
    """The number of the passage that `Answerer.select` would select with these weights, and how many passages it would
    score. `config` is the aligner's."""
    settings = dict(zip(SETTINGS, weights, strict=True))
    scores = {number: passage.score._replace(**settings) for number, passage in passages.items()}
    unscored = {number: score._replace(answerability=config.most_answerability) for number, score in scores.items()}
    first, *others = candidates_of(unscored, 1, config.scored_share)
    scored = {first: scores[first]}
    if others and not are_sure(scored, 1, unscored[others[0]]):
        scored = {number: scores[number] for number in sorted([first, *others])}
    return select_top(scored, 1)[0], len(scored)


def difference(f1: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The mean of `f1` less that of `other`, of the same questions (num_questions,), and its standard error, which is
    infinite for a single question."""
    differences = f1 - other
    error = differences.std(ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return float(differences.mean()), float(error)


def compare(measured: Sequence[Passages], config) -> tuple[list[str], dict[Weights, tuple[float, float]]]:
    """Lines of a Markdown table of ways to select one passage, and for each pair of weights the difference of its F1 to
    that of the configured pair, with its standard error. `config` is the aligner's."""
    configured = config.similarity_weight, config.match_weight
    titles = {pair: "weights {:g} and {:g}".format(*pair) for pair in (configured, *PAIRS)}
    titles[configured] += ", as configured"
    ways = {
        "the first of the list": [passages[min(passages)] for passages in measured],
        "the highest cosine": [max(passages.values(), key=lambda one: one.score.similarity) for passages in measured],
    }
    num_scored = dict.fromkeys(ways, "")
    for pair, title in titles.items():
        numbers, counts = zip(*(select_one(passages, pair, config) for passages in measured), strict=True)
        ways[title] = [passages[number] for passages, number in zip(measured, numbers, strict=True)]
        num_scored[title] = f"{np.mean(counts):.2f}"
    best = "the best of all passages"
    ways[best] = [max(passages.values(), key=lambda one: (one.f1, one.has_answer)) for passages in measured]
    num_scored[best] = ""
    f1 = {title: np.array([passage.f1 for passage in selected]) for title, selected in ways.items()}
    differences = {title: difference(scores, f1[titles[configured]]) for title, scores in f1.items()}
    cells = []
    for title, selected in ways.items():
        found = 100 * np.mean([passage.has_answer for passage in selected])
        shown = f"{f1[title].mean():.1f}", "{:+.1f} ± {:.1f}".format(*differences[title]), f"{found:.1f}"
        cells.append([title, *shown, num_scored[title]])
    columns = ["selected passage", "F1, %", "difference", "contains an answer, %", "passages scored"]
    return markdown_table(columns, cells), {pair: differences[title] for pair, title in titles.items()}


def save_settings(folder: Path, settings: dict[str, Any]) -> Path:
    """Save settings in the configuration of the aligner in `folder`, and return the path of its file."""
    path = folder / CONFIG_NAME
    write_atomically(path, json.dumps(read_json(path) | settings, indent=2, sort_keys=True) + "\n")
    return path


def save_best(folder: Path, differences: dict[Weights, tuple[float, float]], num_questions: int) -> str:
    """Save the best pair of weights in the configuration of the aligner in `folder`, if its difference to the
    configured pair is more than twice its standard error, and there are `MIN_QUESTIONS`. Return a sentence that says
    whether it was saved."""
    if num_questions < MIN_QUESTIONS:
        return f"Nothing was saved: weights need at least {MIN_QUESTIONS} questions, and the file has {num_questions}."
    best = max(differences, key=lambda pair: differences[pair][0])
    mean, error = differences[best]
    if mean <= 2 * error:
        return (
            f"Nothing was saved: the difference of the best weights, {best[0]:g} and {best[1]:g}, is {mean:+.1f} ± "
            f"{error:.1f}, which is not more than twice its standard error."
        )
    path = save_settings(folder, dict(zip(SETTINGS, map(float, best), strict=True)))
    return f"Saved in {path}: `similarity_weight` {best[0]:g} and `match_weight` {best[1]:g}."


def main(
    aligner: Annotated[Path, typer.Option(help="Folder of an aligner with a fitted answerability head.")],
    rows: Annotated[Path, typer.Option(help="JSON Lines file of questions with answers and several passages each.")],
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Number of questions, the first ones.")] = 500,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Save the best weights of the similarities in the aligner's config.json, if they raise F1 by more "
            "than twice the standard error.",
        ),
    ] = False,
) -> None:
    """Print the F1 of answers from one selected passage, for several weights of the two similarities that rank
    passages: `similarity_weight` and `match_weight`."""
    model, processor = load_mean([aligner])
    answerer = Answerer(model, processor, model.passage_cache(processor, max_bytes=CACHE_BYTES))
    answerer.check_can_score("Ranking passages")
    questions = questions_of(read_rows(rows)[:number], answerer)
    lines, differences = compare(measure(answerer, questions), model.config)
    title = f"One selected passage, {len(questions)} questions. Weights are `similarity_weight` and `match_weight`."
    typer.echo("\n".join([title, "", *lines]))
    if save:
        typer.echo(f"\n{save_best(aligner, differences, len(questions))}")


if __name__ == "__main__":
    run_command(main)
