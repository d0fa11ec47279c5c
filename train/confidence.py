"""Fits how likely it is that passages answer a question: the answerability head of an aligner.

    python -m arcaligner.train.confidence --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

The aligner reads questions of the recipe's training articles, half of them with passages that do not answer them (the
nearest of all, or of the same article), at its rates in turn. A logistic regression tells the two apart by the states
of the prompt's last token; its strength is chosen by cross-validation. Then the questions of the held-out articles, a
fifth of them unanswerable, give scale and offset, what the late-interaction score of the question's words is worth
beside it (`maxsim_score`) and, at the aligner's own rate, the threshold: the answerability below which 6 % of the
answerable questions fall, which lose 5 % of the F1. All of it is written to the folder's model. No test set is read.
"""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm.auto import tqdm
from transformers.utils import PROCESSOR_NAME

from ..answering_arcaligner import maxsim_score
from ..common.files import markdown_table, run_command, stable_number, write_whole
from ..common.rows import Row
from ..loading_arcaligner import read_json
from ..modeling_arcaligner import ArcAlignerForCausalLM, LayerStates
from ..processing_arcaligner import ArcAlignerProcessor
from .distractors import NearestPassages, own_passages
from .examples import open_part
from .prompts import slot_inputs
from .recipe import RecipeArguments
from .validate import BATCH, asked_rows, load_mean, read_recipe

# From and to which of the backbone's layers: where the answer has been looked for, and not yet been turned into words.
DEPTHS = (0.45, 0.8)
STRENGTHS = (1e-3, 3e-3, 1e-2, 3e-2)
IN_ARTICLE = 0.5  # of the passages that do not answer
WRONGLY_REFUSED = 0.06  # share of answerable questions below the threshold
RATES = (2, 4, 8, 16, "segment")
NO_ANSWER = "not in the text"  # what is said below the threshold, where the processor has no sentence for it


def partly_unanswerable(recipe: RecipeArguments, number: int, share: float, held_out: bool = True) -> list[Row]:
    """The rows of `asked_rows`, a `share` of them with the nearest passage that does not answer in place of their own,
    and some of these with the nearest one of the same article, which is harder to tell. `is_answered` says which."""
    nearest = {source: NearestPassages(open_part(recipe, source, held_out)) for source in recipe.train_files}
    rows = []
    for row in asked_rows(recipe, number, held_out):
        near = []
        if stable_number(f"unanswerable:{row['id']}", 100) < 100 * share:
            find, asked = nearest[row["source"]].without_answer, (row["question"], row["answers"], row["passages"], 1)
            is_inside = stable_number(f"in article:{row['id']}", 100) < 100 * IN_ARTICLE
            near = (is_inside and find(*asked, in_article=True)) or find(*asked)
        rows.append(row | {"passages": near or own_passages(row)[0], "is_answered": not near})
    return rows


@torch.inference_mode()
def last_states(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    rate: int | str,
    layers: list[int],
) -> np.ndarray:
    """The outputs of `layers` at the last token of each row's prompt, (rows, layers * hidden), float32."""
    order = sorted(range(len(rows)), key=lambda number: sum(len(each["text"]) for each in rows[number]["passages"]))
    states = np.zeros((len(rows), len(layers) * model.config.text_config.hidden_size), dtype=np.float32)
    for start in tqdm(range(0, len(order), BATCH), desc=f"reading, rate {rate}", leave=False):
        numbers = order[start : start + BATCH]
        inputs = slot_inputs(processor, [rows[number] for number in numbers], tokens_per_slot=rate)
        read = LayerStates(layers, are_all=True)
        model.model(**inputs, use_cache=False, layer_states=read)
        states[numbers] = read.stacked().flatten(1).float().numpy()
    return states


def fit_probe(states: np.ndarray, is_answered: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights (features,) and bias of a logistic regression from `states` (rows, features) to `is_answered` (rows,)."""
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": STRENGTHS}, scoring="neg_log_loss", cv=3)
    scaler, found = make_pipeline(StandardScaler(), search).fit(states, is_answered)
    regression = found.best_estimator_
    weight = regression.coef_[0] / scaler.scale_
    return weight, float(regression.intercept_[0] - weight @ scaler.mean_)


def calibrate(is_answered: np.ndarray, *evidence: np.ndarray) -> tuple[float, ...]:
    """What each piece of evidence (rows,) is worth, and an offset, so that the sum is the log-odds of the share that is
    answered."""
    regression = LogisticRegression(C=1e6).fit(np.stack(evidence, axis=1), is_answered)
    return *regression.coef_[0].tolist(), float(regression.intercept_[0])


def fit_confidence(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: RecipeArguments,
    number: int,
    number_held_out: int,
    rates: tuple[int | str, ...],
) -> dict[str, dict[str, float]]:
    """Gives `model` a fitted answerability head. Returns how well it does on the held-out questions at each rate."""
    num_layers, width = model.config.text_config.num_hidden_layers, model.config.text_config.hidden_size
    layers = list(range(math.floor(DEPTHS[0] * num_layers), math.ceil(DEPTHS[1] * num_layers)))
    rows = partly_unanswerable(recipe, number, share=0.5, held_out=False)
    parts = [rows[place :: len(rates)] for place in range(len(rates))]
    states = [last_states(model, processor, part, rate, layers) for part, rate in zip(parts, rates, strict=True)]
    weight, bias = fit_probe(np.concatenate(states), np.array([row["is_answered"] for part in parts for row in part]))
    rows = partly_unanswerable(recipe, number_held_out, share=0.2)
    is_answered = np.array([row["is_answered"] for row in rows])
    odds = [last_states(model, processor, rows, rate, layers) @ weight + bias for rate in rates]
    asked = tqdm(rows, desc="matching words", leave=False)
    match = np.array([maxsim_score(processor, row["question"], row["passages"]) for row in asked])
    scale, offset = calibrate(np.tile(is_answered, len(rates)), np.concatenate(odds))
    odds, has_words = [scale * some + offset for some in odds], ~np.isnan(match)
    both = np.concatenate([some[has_words] for some in odds]), np.tile(match[has_words], len(rates))
    fitted = calibrate(np.tile(is_answered[has_words], len(rates)), *both)
    model.set_answerability_layers(layers)
    head = model.answerability_head
    head.weight.copy_(torch.from_numpy(scale * weight).view(len(layers), width))
    head.bias.fill_(scale * bias + offset)
    head.match.copy_(torch.tensor(fitted))
    sure = [torch.sigmoid(head.with_match(torch.from_numpy(some), match)).numpy() for some in odds]
    confidences = {str(rate): some for rate, some in zip(rates, sure, strict=True)}
    own = confidences[str(processor.tokens_per_slot)]
    threshold = float(np.quantile(own[is_answered], WRONGLY_REFUSED))
    model.config.answerability_uses_match, model.config.answerability_threshold = True, round(threshold, 4)
    results = {}
    for rate, sure in confidences.items():
        is_refused = sure < threshold
        results[rate] = {
            "refused": 100 * is_refused[~is_answered].mean(),
            "wrongly refused": 100 * is_refused[is_answered].mean(),
            "AUROC": roc_auc_score(is_answered, sure),
        }
    return results


def main(
    recipe: Annotated[Path, typer.Option(help="The recipe of the stage: its data, and what is held out.")],
    aligner: Annotated[Path, typer.Option(help="Folder of the aligner, which gets the head.")],
    number: Annotated[int, typer.Option("-n", help="Training questions.")] = 20_000,
    held_out: Annotated[int, typer.Option(help="Held-out questions.")] = 1000,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data, instead of the recipe's.")] = None,
) -> None:
    """Fits the confidence of an aligner's answers, and prints what it is worth on held-out questions."""
    model, processor = load_mean([aligner])
    data = read_recipe(recipe, data_dir)
    rates = tuple(dict.fromkeys([processor.tokens_per_slot, *(processor.trained_tokens_per_slot or RATES)]))
    results = fit_confidence(model, processor, data, number, held_out, rates)
    model.save_answerability_head(aligner)
    settings = read_json(path := aligner / PROCESSOR_NAME)
    write_whole(path, json.dumps(settings | {"no_answer": processor.no_answer or NO_ANSWER}, indent=2) + "\n")
    names = ("refused", "wrongly refused", "AUROC")
    cells = [[rate, *(f"{each[name]:.3g}" for name in names)] for rate, each in results.items()]
    threshold = f"threshold {model.config.answerability_threshold}"
    typer.echo("\n".join([*markdown_table(["rate", *names], cells), threshold]))


if __name__ == "__main__":
    run_command(main)
