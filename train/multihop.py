"""Fit the multi-hop head of an aligner: whether a question needs one passage or several.

    python -m arcaligner.train.multihop --recipe train/recipes/smollm2_135m/2_grounding.yaml --aligner FOLDER

By default a question gets the top-ranked of several passages, which is far better than all of them unless several are
needed. This head finds the questions that need several: those of HotpotQA and MuSiQue among the recipe's data. A
logistic regression separates the questions of the training articles by their embeddings and their numbers of words.
Questions of held-out articles, with their passages among the nearest others, then give the weight of this, of the
answerability of the top-ranked passage, and an offset. Both regressions weight the two kinds equally, because nobody
knows how many of a user's questions need several passages. The result is saved in the folder's model. No test set is
read. `python -m arcaligner.train.num_passages` measures what it brings.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from tqdm.auto import tqdm

from ..answering_arcaligner import Answerer, question_features, select_top
from ..common.files import run_command
from ..common.rows import Row
from ..modeling_arcaligner import MOST_ODDS, ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .distractors import own_passages
from .num_passages import CACHE_BYTES, mixed_rows
from .recipe import RecipeArguments
from .validate import asked_rows, load_mean, read_recipe

BATCH = 64  # questions that are encoded together
STRENGTH = 1.0  # inverse regularization, scikit-learn's default


def needs_several(row: Row) -> bool:
    """Whether the answer needs more than one of the row's passages."""
    return len(own_passages(row)[0]) > 1


def features_of(processor: ArcAlignerProcessor, rows: list[Row]) -> np.ndarray:
    """The embedding of each row's question, and the logarithm of its number of words: (rows, d_r + 1)."""
    found = []
    for start in tqdm(range(0, len(rows), BATCH), desc="questions", leave=False):
        questions = [row["question"] for row in rows[start : start + BATCH]]
        vectors, num_words = question_features(processor.encoder, questions)
        found.append(torch.cat([vectors, num_words[:, None].clamp(min=1).log()], dim=1).double().numpy())
    return np.concatenate(found)


@torch.inference_mode()
def best_odds(model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row]) -> np.ndarray:
    """The answerability of each row's top-ranked passage, in log-odds, as the head takes it: (rows,)."""
    answerer, found = Answerer(model, processor, model.passage_cache(processor, max_bytes=CACHE_BYTES)), []
    for row in tqdm(rows, desc="scoring passages", leave=False):
        (scores,) = answerer.score([row["question"]], [row["passages"]])
        (best,) = select_top(scores, 1)
        found.append(scores[best].answerability)
    return torch.tensor(found, dtype=torch.float64).logit(eps=1e-12).clamp(-MOST_ODDS, MOST_ODDS).numpy()


def fit_multihop(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: RecipeArguments,
    number: int,
    number_held_out: int,
    num_passages: int,
) -> dict[str, float]:
    """Gives `model` a fitted multi-hop head. Returns how well it separates the held-out questions, by cross-validation
    of what they fit.

    Raises:
        `ValueError`: data whose questions all need one passage, or all need several.
    """
    rows, held_out = asked_rows(recipe, number, held_out=False), mixed_rows(recipe, number_held_out)
    several, held_out_several = (np.array([needs_several(row) for row in some]) for some in (rows, held_out))
    if len({*several}) < 2 or len({*held_out_several}) < 2:
        raise ValueError(
            f"{int(several.sum())} of {len(rows)} training questions and {int(held_out_several.sum())} of "
            f"{len(held_out)} held-out ones need several passages; expected some of both kinds. Add questions whose "
            "`gold` names several passages to `train_files`, such as HotpotQA's."
        )
    wording = LogisticRegression(C=STRENGTH, class_weight="balanced", max_iter=5000)
    wording.fit(features_of(processor, rows), several)
    evidence = np.stack(
        [wording.decision_function(features_of(processor, held_out)), best_odds(model, processor, held_out)], axis=1
    )  # (held_out, 2)
    both = LogisticRegression(C=STRENGTH, class_weight="balanced")
    predicted = cross_val_predict(both, evidence, held_out_several, cv=5, method="decision_function")
    both.fit(evidence, held_out_several)
    scale, weight = both.coef_[0]
    model.set_multihop_passages(num_passages)
    head = model.multihop_head
    head.weight.copy_(torch.from_numpy(np.append(scale * wording.coef_[0], weight)))
    head.bias.fill_(float(scale * wording.intercept_[0] + both.intercept_[0]))
    is_found = predicted > 0
    return {
        "AUROC": roc_auc_score(held_out_several, predicted),
        "AUROC of the wording alone": roc_auc_score(held_out_several, evidence[:, 0]),
        "found, %": 100 * is_found[held_out_several].mean(),
        "wrongly found, %": 100 * is_found[~held_out_several].mean(),
    }


def main(
    recipe: Annotated[Path, typer.Option(help="Recipe file of a stage, for its data and held-out articles.")],
    aligner: Annotated[Path, typer.Option(help="Folder of the aligner, with a fitted answerability head.")],
    number: Annotated[int, typer.Option("-n", help="Number of training questions.")] = 20_000,
    held_out: Annotated[int, typer.Option(help="Number of held-out questions.")] = 1000,
    num_passages: Annotated[int, typer.Option(help="How many passages a multi-hop question gets by default.")] = 3,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data, instead of the recipe's.")] = None,
) -> None:
    """Fit which questions need several passages, and print how well it finds them among held-out questions."""
    model, processor = load_mean([aligner])
    Answerer(model, processor).check(max_passages=1)
    data = read_recipe(recipe, data_dir)
    for name, value in fit_multihop(model, processor, data, number, held_out, num_passages).items():
        typer.echo(f"{name}: {value:.3g}")
    model.save_heads(aligner)


if __name__ == "__main__":
    run_command(main)
