"""Fit the answerability head of an aligner: it estimates how likely it is that the passages contain an answer.

    python -m arcaligner.train.confidence --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

The aligner gets questions about the recipe's training articles, half of them with passages that do not contain the
answer (the nearest of all, or of the same article), with each number of tokens per slot that it was trained with. A
logistic regression separates answerable from unanswerable questions by the hidden states of the prompt's last token;
cross-validation chooses its regularization. Questions of held-out articles, a fifth of them unanswerable, then
calibrate it: they give scale and offset, the weight of the late-interaction score of the question's words
(`maxsim_score`) and, at the aligner's default number of tokens per slot, the threshold. 6 % of the answerable
questions, which account for 5 % of the F1, are below the threshold. Finally the aligner answers the held-out questions,
and a second logistic regression separates right answers (an F1 of at least a half) from wrong ones by their likelihood
and the answerability. The result is saved in the model in `--aligner`. No test set is used.
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

from ..answering_arcaligner import MAX_NEW_TOKENS, AnsweringCall, maxsim_score
from ..common.files import markdown_table, run_command, stable_number, write_atomically
from ..common.rows import Row, token_f1
from ..loading_arcaligner import read_json
from ..modeling_arcaligner import ArcAlignerForCausalLM, LayerStates
from ..processing_arcaligner import ArcAlignerProcessor
from .distractors import NearestPassages, needed_and_others
from .examples import open_part
from .prompts import slot_inputs
from .recipe import RecipeArguments
from .validate import BATCH, load_mean, question_rows, read_recipe

# First and last layer that the head uses, as shares of the backbone's depth: these layers have located the answer, and
# have not yet turned it into words.
DEPTHS = (0.45, 0.8)
STRENGTHS = (1e-3, 3e-3, 1e-2, 3e-2)  # inverse regularization, of which cross-validation chooses one
IN_ARTICLE = 0.5  # share of the passages without an answer that are of the same article
WRONGLY_ABSTAINED = 0.06  # share of answerable questions below the threshold
COMPRESSIONS = (2, 4, 8, 16, "segment")
RIGHT = 0.5  # F1 from which an answer is right
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of answers that remain if the least certain are left out
NO_ANSWER = "not in the text"  # `no_answer` of the processor, unless it has one already


def partly_unanswerable(recipe: RecipeArguments, number: int, share: float, held_out: bool = True) -> list[Row]:
    """The rows of `question_rows`. In a `share` of them, the nearest passage without the answer replaces their
    passages. For some of them it is of the same article, which is harder. `is_answered` is true in the other rows."""
    nearest = {source: NearestPassages(open_part(recipe, source, held_out)) for source in recipe.train_files}
    rows = []
    for row in question_rows(recipe, number, held_out):
        near = []
        if stable_number(f"unanswerable:{row['id']}", 100) < 100 * share:
            find, query = nearest[row["source"]].without_answer, (row["question"], row["answers"], row["passages"], 1)
            is_inside = stable_number(f"in article:{row['id']}", 100) < 100 * IN_ARTICLE
            near = (is_inside and find(*query, in_article=True)) or find(*query)
        rows.append(row | {"passages": near or needed_and_others(row)[0], "is_answered": not near})
    return rows


def by_length(rows: list[Row]) -> list[int]:
    """The numbers of `rows` in order of the length of their passages, so that batches need little padding."""
    return sorted(
        range(len(rows)), key=lambda number: sum(len(passage["text"]) for passage in rows[number]["passages"])
    )


@torch.inference_mode()
def last_states(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    tokens_per_slot: int | str,
    layers: list[int],
) -> np.ndarray:
    """The outputs of `layers` at the last token of each row's prompt, (rows, layers * hidden), float32."""
    order = by_length(rows)
    states = np.zeros((len(rows), len(layers) * model.config.text_config.hidden_size), dtype=np.float32)
    for start in tqdm(
        range(0, len(order), BATCH), desc=f"computing hidden states, tokens_per_slot={tokens_per_slot}", leave=False
    ):
        numbers = order[start : start + BATCH]
        inputs = slot_inputs(processor, [rows[number] for number in numbers], tokens_per_slot=tokens_per_slot)
        layer_states = LayerStates(layers, are_all=True)
        model.model(**inputs, use_cache=False, layer_states=layer_states)
        states[numbers] = layer_states.stacked().flatten(1).float().numpy()
    return states


def fit_head(states: np.ndarray, is_answered: np.ndarray) -> tuple[np.ndarray, float]:
    """Weights (features,) and bias of a logistic regression from `states` (rows, features) to `is_answered` (rows,)."""
    search = GridSearchCV(LogisticRegression(max_iter=1000), {"C": STRENGTHS}, scoring="neg_log_loss", cv=3)
    scaler, fitted_search = make_pipeline(StandardScaler(), search).fit(states, is_answered)
    regression = fitted_search.best_estimator_
    weight = regression.coef_[0] / scaler.scale_
    return weight, float(regression.intercept_[0] - weight @ scaler.mean_)


def calibrate(is_answered: np.ndarray, *evidence: np.ndarray) -> tuple[float, ...]:
    """The weight of each score (rows,) and an offset. The weighted sum is the log-odds that the passages contain the
    answer."""
    regression = LogisticRegression(C=1e6).fit(np.stack(evidence, axis=1), is_answered)
    return *regression.coef_[0].tolist(), float(regression.intercept_[0])


def fit_answerability(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: RecipeArguments,
    number: int,
    number_held_out: int,
    compressions: tuple[int | str, ...],
) -> dict[str, dict[str, float]]:
    """Give `model` a fitted answerability head. Return its accuracy on the held-out questions at each number of tokens
    per slot."""
    num_layers, width = model.config.text_config.num_hidden_layers, model.config.text_config.hidden_size
    layers = list(range(math.floor(DEPTHS[0] * num_layers), math.ceil(DEPTHS[1] * num_layers)))
    rows = partly_unanswerable(recipe, number, share=0.5, held_out=False)
    parts = [rows[start :: len(compressions)] for start in range(len(compressions))]
    states = [
        last_states(model, processor, part, compression, layers)
        for part, compression in zip(parts, compressions, strict=True)
    ]
    weight, bias = fit_head(np.concatenate(states), np.array([row["is_answered"] for part in parts for row in part]))
    rows = partly_unanswerable(recipe, number_held_out, share=0.2)
    is_answered = np.array([row["is_answered"] for row in rows])
    odds = [last_states(model, processor, rows, compression, layers) @ weight + bias for compression in compressions]
    progress = tqdm(rows, desc="computing late-interaction scores", leave=False)
    match = np.array([maxsim_score(processor, row["question"], row["passages"]) for row in progress])
    scale, offset = calibrate(np.tile(is_answered, len(compressions)), np.concatenate(odds))
    odds, has_words = [scale * row_odds + offset for row_odds in odds], ~np.isnan(match)
    both = np.concatenate([row_odds[has_words] for row_odds in odds]), np.tile(match[has_words], len(compressions))
    fitted = calibrate(np.tile(is_answered[has_words], len(compressions)), *both)
    model.set_answerability_layers(layers)
    head = model.answerability_head
    head.weight.copy_(torch.from_numpy(scale * weight).view(len(layers), width))
    head.bias.fill_(scale * bias + offset)
    head.match.copy_(torch.tensor(fitted))
    all_estimates = [torch.sigmoid(head.with_match(torch.from_numpy(row_odds), match)).numpy() for row_odds in odds]
    estimates = {
        str(compression): row_estimates for compression, row_estimates in zip(compressions, all_estimates, strict=True)
    }
    default_estimates = estimates[str(processor.tokens_per_slot)]
    threshold = float(np.quantile(default_estimates[is_answered], WRONGLY_ABSTAINED))
    model.config.answerability_uses_match, model.config.answerability_threshold = True, round(threshold, 4)
    results = {}
    for compression, row_estimates in estimates.items():
        is_abstention = row_estimates < threshold
        results[compression] = {
            "refused": 100 * is_abstention[~is_answered].mean(),
            "wrongly refused": 100 * is_abstention[is_answered].mean(),
            "AUROC": roc_auc_score(is_answered, row_estimates),
        }
    return results


@torch.inference_mode()
def graded_answers(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean log-likelihood, log-odds of the answerability and F1 from 0 to 1 of greedy answers to `rows`, each (rows,).
    The F1 is 0 for a question that its passages do not answer."""
    order = by_length(rows)
    grades = np.zeros((3, len(rows)))
    model.config.answer_calibration = [1.0, 0.0, 0.0]  # any values, so that `generate` records the likelihood
    for start in tqdm(range(0, len(order), BATCH), desc="answering held-out questions", leave=False):
        numbers = order[start : start + BATCH]
        batch = [rows[number] for number in numbers]
        inputs, passages = slot_inputs(processor, batch), [row["passages"] for row in batch]
        questions, rate = [row["question"] for row in batch], processor.tokens_per_slot
        call = AnsweringCall(model, processor, questions, passages, tokens_per_slot=rate)
        ids = call.generate(inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [token_f1(text, row["answers"]) * row["is_answered"] for text, row in zip(texts, batch, strict=True)]
        grades[:, numbers] = call.likelihood.mean, torch.logit(call.answerability, eps=1e-6), scores
    return tuple(grades)


def fit_likelihood(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, recipe: RecipeArguments, number: int
) -> list[list[str]]:
    """Give `model` the regression that separates right answers from wrong ones. Return rows of a table: for each share
    of the answers, the F1 of those with the highest answerability, and of those with the highest likelihood. The
    likelihood is fitted on the other half of the questions. The table is empty if no answer is right, or all are."""
    *evidence, f1 = graded_answers(model, processor, partly_unanswerable(recipe, number, share=0.2))
    features, is_right = np.stack(evidence, axis=1), f1 >= RIGHT
    likelihood, halves = np.zeros(len(f1)), np.arange(len(f1)) % 2
    model.config.answer_calibration = None
    if any(len(set(is_right[halves == half])) < 2 for half in (0, 1)):  # a single class cannot be fitted
        return []
    for half in (0, 1):
        *weights, offset = calibrate(is_right[halves != half], *features[halves != half].T)
        likelihood[halves == half] = 1 / (1 + np.exp(-features[halves == half] @ weights - offset))
    model.config.answer_calibration = [round(coefficient, 4) for coefficient in calibrate(is_right, *features.T)]
    table = []
    for share in SHARES:
        remaining = [np.argsort(-sure, kind="stable")[: round(share * len(f1))] for sure in (evidence[1], likelihood)]
        table.append([f"{100 * share:.0f} %", *(f"{100 * f1[answers].mean():.1f}" for answers in remaining)])
    areas = [f"{roc_auc_score(is_right, sure):.3f}" for sure in (evidence[1], likelihood)]
    return [*table, ["AUROC of right answers", *areas]]


def main(
    recipe: Annotated[Path, typer.Option(help="Recipe file of a stage, whose data and held-out articles are used.")],
    aligner: Annotated[Path, typer.Option(help="Folder of the aligner, in which the fitted heads are saved.")],
    number: Annotated[int, typer.Option("-n", help="Number of training questions.")] = 20_000,
    held_out: Annotated[int, typer.Option(help="Number of held-out questions.")] = 1000,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the data files. Default: `data_dir` of the recipe.")
    ] = None,
    keep_head: Annotated[
        bool, typer.Option("--keep-head", help="Keep the answerability head, and fit only the answer likelihood.")
    ] = False,
) -> None:
    """Fit two estimates: the answerability (do the passages contain an answer?) and the answer likelihood (is the
    answer right?). Print the accuracy of both on held-out questions."""
    model, processor = load_mean([aligner])
    data = read_recipe(recipe, data_dir)
    compressions = tuple(
        dict.fromkeys([processor.tokens_per_slot, *(processor.trained_tokens_per_slot or COMPRESSIONS)])
    )
    had_multihop_head = model.multihop_head is not None
    results = {} if keep_head else fit_answerability(model, processor, data, number, held_out, compressions)
    curve = fit_likelihood(model, processor, data, held_out)
    model.save_heads(aligner)
    settings = read_json(path := aligner / PROCESSOR_NAME)
    write_atomically(path, json.dumps(settings | {"no_answer": processor.no_answer or NO_ANSWER}, indent=2) + "\n")
    names = ("refused", "wrongly refused", "AUROC")
    cells = [[compression, *(f"{measured[name]:.3g}" for name in names)] for compression, measured in results.items()]
    columns = ["tokens per slot", "abstained, %", "wrongly abstained, %", "AUROC of answerable questions"]
    threshold = f"Recommended `min_confidence`: {model.config.answerability_threshold}"
    typer.echo("\n".join([*markdown_table(columns, cells), "", threshold, ""]))
    columns = ["share of the answers, the highest estimates first", "F1 by answerability", "F1 by answer likelihood"]
    typer.echo("\n".join(markdown_table(columns, curve)))
    if had_multihop_head and model.multihop_head is None:
        typer.echo(
            "The multi-hop head was removed, because it depends on the former answerability head. Fit another one with "
            "`python -m arcaligner.train.multihop`."
        )


if __name__ == "__main__":
    run_command(main)
