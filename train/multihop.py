"""Fit the multi-hop head of an aligner: whether a question needs two passages, and which two.

    python -m arcaligner.train.multihop --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

By default only the top-ranked of several passages is used, which gives far better answers than all of them, unless the
question needs several. This head finds the questions that need several, such as those of HotpotQA and MuSiQue in the
recipe's data, and the two passages that they need.

- *Which questions*: A logistic regression separates the questions of the training articles by their embeddings and
  their numbers of words. A second one combines its result with the answerability of the top-ranked passage, and with
  the gain of late interaction from a second passage (`match_gain`). It is fitted on questions of half of the held-out
  articles, whose passages are mixed with the nearest others. Both
  regressions weight the two kinds of questions equally. The offset then assumes that a quarter of a user's questions
  are multi-hop questions: if few are, a second passage costs more where it is not needed than it gains where it is.
- *Which two*: Questions of the same half that need two passages get these among the nearest others, ten in all. A
  logistic regression separates the pair from all other pairs by the features of `pair_features`, with and without
  titles.

The result is saved in the model in `--aligner`. No test set is used. `python -m arcaligner.train.num_passages` measures
the gain on the other half of the held-out articles.
"""

import itertools
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm.auto import tqdm

from ..answering_arcaligner import Answerer, ScoredPassage, question_features, top_odds, word_matches
from ..common.files import run_command
from ..common.rows import Row
from ..modeling_arcaligner import ArcAlignerForCausalLM, MultihopHead
from ..multihop_arcaligner import match_gain, pair_features
from ..processing_arcaligner import ArcAlignerProcessor
from .distractors import needed_and_others
from .num_passages import CACHE_BYTES, FITTED, mixed_rows
from .recipe import RecipeArguments
from .validate import ALIGNER_HELP, RECIPE_HELP, load_mean, question_rows, read_recipe

BATCH = 64  # questions that are encoded together
SCORED = 8  # questions whose passages are scored together
STRENGTH = 1.0  # inverse regularization, scikit-learn's default
GAIN_UNITS = 10.0  # a gain is small, and regularization would give it too small a weight
PAIRS_AMONG = 10  # passages, from which the needed pair has to be selected
FOLDS = 5  # of cross-validation
MULTIHOP_SHARE = 0.25  # of the questions that users ask; it is not measured


def needs_several(row: Row) -> bool:
    """Whether the answer needs more than one of the row's passages."""
    return len(needed_and_others(row)[0]) > 1


def features_of(processor: ArcAlignerProcessor, rows: list[Row]) -> np.ndarray:
    """The embedding of each row's question and the logarithm of its number of words: (rows, d_r + 1)."""
    features = []
    for start in tqdm(range(0, len(rows), BATCH), desc="encoding questions", leave=False):
        questions = [row["question"] for row in rows[start : start + BATCH]]
        features.append(MultihopHead.wording(*question_features(processor.encoder, questions)).double().numpy())
    return np.concatenate(features)


def gains_of(processor: ArcAlignerProcessor, rows: list[Row]) -> np.ndarray:
    """The `match_gain` of each row's passages, (rows,)."""
    progress = tqdm(rows, desc="comparing words", leave=False)
    return np.array([match_gain(word_matches(processor, row["question"], row["passages"])) for row in progress])


@torch.inference_mode()
def score_rows(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row]
) -> list[dict[int, ScoredPassage]]:
    """The scores of all passages of each row."""
    answerer, scores = Answerer(model, processor, model.passage_cache(processor, max_bytes=CACHE_BYTES)), []
    for start in tqdm(range(0, len(rows), SCORED), desc="scoring passages", leave=False):
        batch = rows[start : start + SCORED]
        scores += answerer.score([row["question"] for row in batch], [row["passages"] for row in batch])
    return scores


def fit_questions(
    processor: ArcAlignerProcessor, rows: list[Row], held_out: list[Row], odds: np.ndarray
) -> tuple[np.ndarray, float, dict[str, float]]:
    """Weights (d_r + 3,) and bias for whether a question needs several passages. The wording is fitted to training
    `rows`; its weight and those of `odds` and of the passages' `match_gain` are fitted to `held_out` rows. Also how
    well they separate the held-out rows, by cross-validation of the second fit."""
    several, held_out_several = (np.array([needs_several(row) for row in part]) for part in (rows, held_out))
    wording = LogisticRegression(C=STRENGTH, class_weight="balanced", max_iter=5000)
    wording.fit(features_of(processor, rows), several)
    gains = GAIN_UNITS * gains_of(processor, held_out)
    evidence = [wording.decision_function(features_of(processor, held_out)), odds, gains]
    evidence = np.stack(evidence, axis=1)  # (held_out, 3)
    combined = LogisticRegression(C=STRENGTH, class_weight="balanced")
    predicted = cross_val_predict(combined, evidence, held_out_several, cv=FOLDS, method="decision_function")
    scale, of_odds, of_gain = combined.fit(evidence, held_out_several).coef_[0]
    needed = math.log((1 - MULTIHOP_SHARE) / MULTIHOP_SHARE)  # log-odds, where both kinds are weighted equally
    is_found = predicted > needed
    measured = {
        "AUROC of multi-hop questions": roc_auc_score(held_out_several, predicted),
        "AUROC of multi-hop questions, from the wording alone": roc_auc_score(held_out_several, evidence[:, 0]),
        "multi-hop questions that were recognized, %": 100 * is_found[held_out_several].mean(),
        "other questions that were taken for multi-hop questions, %": 100 * is_found[~held_out_several].mean(),
    }
    bias = float(scale * wording.intercept_[0] + combined.intercept_[0]) - needed
    return np.append(scale * wording.coef_[0], [of_odds, GAIN_UNITS * of_gain]), bias, measured


def fit_pairs(
    processor: ArcAlignerProcessor, rows: list[Row], scores: list[dict[int, ScoredPassage]]
) -> tuple[np.ndarray, dict[str, float]]:
    """Weights (8,) of the features of a pair of passages, fitted to rows that need two. Also the share of rows whose
    pair ranks first: by cross-validation, with and without titles, and by the log-odds alone."""
    features, is_needed, groups = [], [], []
    half = len(rows)  # the rows, then the same without titles
    untitled = [row | {"passages": [passage["text"] for passage in row["passages"]]} for row in rows]
    for number, (row, row_scores) in enumerate(zip([*rows, *untitled], scores * 2, strict=True)):
        pairs = [*itertools.combinations(sorted(row_scores), 2)]
        question, passages = row["question"], row["passages"]
        odds = {number_of_passage: score.pair_odds for number_of_passage, score in row_scores.items()}
        matches = dict(enumerate(word_matches(processor, question, passages)))
        features.append(pair_features(question, passages, odds, matches, pairs, processor.spacy_model).numpy())
        is_needed += [[*pair] == row["gold"] for pair in pairs]
        groups += [number] * len(pairs)
    features, is_needed, groups = np.concatenate(features), np.array(is_needed), np.array(groups)
    fit = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH))
    folds = GroupKFold(FOLDS)
    predicted = cross_val_predict(fit, features, is_needed, groups=groups % half, cv=folds, method="decision_function")
    scaler, regression = fit.fit(features, is_needed).named_steps.values()

    def first(order: np.ndarray, numbers: range) -> float:
        is_first = [is_needed[groups == number][order[groups == number].argmax()] for number in numbers]
        return 100 * float(np.mean(is_first))

    measured = {
        "questions whose two passages were found, %": first(predicted, range(half)),
        "questions whose two passages were found without titles, %": first(predicted, range(half, 2 * half)),
        "questions whose two passages were found by their scores alone, %": first(features[:, 0], range(half)),
    }
    return regression.coef_[0] / scaler.scale_, measured


def fit_multihop(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: RecipeArguments,
    number: int,
    number_held_out: int,
) -> dict[str, float]:
    """Give `model` a fitted multi-hop head. Return how well it separates held-out questions and pairs.

    Raises:
        `ValueError`: data without questions that need one passage, or without questions that need several.
    """
    rows, held_out = question_rows(recipe, number, held_out=False), mixed_rows(recipe, number_held_out, FITTED)
    pairs = [row for row in mixed_rows(recipe, number_held_out, FITTED, (PAIRS_AMONG,)) if len(row["gold"]) == 2]
    several = [sum(map(needs_several, part)) for part in (rows, held_out)]
    one = [len(part) - count for part, count in zip((rows, held_out), several, strict=True)]
    if min(len(pairs), *several, *one) < FOLDS:
        raise ValueError(
            f"Too few questions to fit the multi-hop head. Of the training questions, {several[0]} need several "
            f"passages, and {one[0]} need one. Of the held-out questions, {several[1]} need several, {len(pairs)} "
            f"exactly two, and {one[1]} one. Expected at least {FOLDS} of each kind. Raise `-n` and `--held-out`, or "
            "add a file of multi-hop questions, such as HotpotQA's, to `train_files` in the recipe."
        )
    odds = top_odds(score_rows(model, processor, held_out)).numpy()
    weight, bias, measured = fit_questions(processor, rows, held_out, odds)
    pair, measured_pairs = fit_pairs(processor, pairs, score_rows(model, processor, pairs))
    model.set_multihop_head(True)
    head = model.multihop_head
    head.weight.copy_(torch.from_numpy(weight))
    head.bias.fill_(bias)
    head.pair.copy_(torch.from_numpy(pair))
    return measured | measured_pairs


def main(
    recipe: Annotated[Path, typer.Option(help=RECIPE_HELP)],
    aligner: Annotated[
        Path,
        typer.Option(help=f"{ALIGNER_HELP} The multi-hop head is saved in this folder."),
    ],
    number: Annotated[
        int, typer.Option("-n", help="Approximate number of training questions that the head is fitted to.")
    ] = 20_000,
    held_out: Annotated[int, typer.Option(help="Approximate number of questions on held-out articles.")] = 1000,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data files. Default: `data_dir` of the recipe.")
    ] = None,
) -> None:
    """Fit the multi-hop head, which decides whether a question needs two passages, and which two. Print how often the
    head is right on questions about held-out articles."""
    model, processor = load_mean([aligner])
    Answerer(model, processor).check_can_score("A multi-hop head")
    data = read_recipe(recipe, data_dir)
    for name, value in fit_multihop(model, processor, data, number, held_out).items():
        typer.echo(f"{name}: {value:.3g}")
    model.save_heads(aligner)


if __name__ == "__main__":
    run_command(main)
