"""Fitting the multi-hop head: its features, its results, and the command."""

import shutil

import numpy as np
import pytest
import torch
import yaml
from conftest import edit_json
from safetensors.torch import load_file
from training_rows import article_rows, write_rows

from arcaligner import ArcAlignerForCausalLM
from arcaligner.answering_arcaligner import Answerer, select_top, top_odds, word_matches
from arcaligner.modeling_arcaligner import MultihopHead
from arcaligner.multihop_arcaligner import best_pair
from arcaligner.train.multihop import features_of, fit_multihop, fit_pairs, gains_of, main, score_rows
from arcaligner.train.num_passages import FITTED, mixed_rows
from arcaligner.train.validate import read_recipe


def matches_of(processor, row):
    return dict(enumerate(word_matches(processor, row["question"], row["passages"])))


@pytest.fixture
def two_kinds(recipe_file, tmp_path):
    """A recipe with questions that need one passage, and longer questions that need two."""
    one = [row | {"id": f"town_{row['id']}"} for row in article_rows(40)]
    several = []
    for row, other in zip(one[::4], one[4::4], strict=False):
        passages = [*row["passages"], *other["passages"]]
        question = "Which of the two mills ground longer, the one of {} or the one of {}?"
        question = question.format(*(passage["title"] for passage in passages))
        several.append(row | {"id": f"pair_{row['id']}", "question": question, "passages": passages, "gold": [0, 1]})
    files = {write_rows(tmp_path / f"{name}.jsonl", rows): 1.0 for name, rows in (("one", one), ("pairs", several))}
    settings = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump(settings | {"train_files": files}))
    return recipe_file


def test_head_separates_both_kinds(two_kinds, separate):
    """The stored head separates both kinds of questions, with the log-odds of both regressions together."""
    model, processor = separate
    recipe = read_recipe(two_kinds, None)
    measured = fit_multihop(model, processor, recipe, 80, 60)
    rows = mixed_rows(recipe, 60, FITTED)
    several, features = np.array([row["needs"] == "several" for row in rows]), features_of(processor, rows)
    questions, odds = torch.from_numpy(features).float(), top_odds(score_rows(model, processor, rows)).float()
    gains = torch.from_numpy(gains_of(processor, rows)).float()
    logits = model.multihop_head(questions[:, :-1], questions[:, -1].exp(), odds, gains).numpy()
    assert 0 < several.sum() < len(several) and (logits > 0).tolist() == several.tolist()
    assert {value for name, value in measured.items() if name.startswith("AUROC")} == {1.0}
    assert measured["multi-hop questions that were recognized, %"] == 100.0
    assert measured["other questions that were taken for multi-hop questions, %"] == 0.0


def test_needed_pair_is_found(two_kinds, separate):
    """The pair is that of the towns in the question, not the two passages with the highest log-odds."""
    model, processor = separate
    recipe = read_recipe(two_kinds, None)
    rows = [row for row in mixed_rows(recipe, 60, FITTED, (10,)) if len(row["gold"]) == 2]
    scores = score_rows(model, processor, rows)
    weights, measured = fit_pairs(processor, rows, scores)
    by_log_odds = measured["questions whose two passages were found by their scores alone, %"]
    assert measured["questions whose two passages were found, %"] > 90 > 50 > by_log_odds
    head = MultihopHead(4)
    head.pair.copy_(torch.from_numpy(weights))
    odds = [{number: score.log_odds for number, score in row_scores.items()} for row_scores in scores]
    pairs = [
        best_pair(head, row["question"], row["passages"], row_odds, matches_of(processor, row), "en")
        for row, row_odds in zip(rows, odds, strict=True)
    ]
    assert sum(pair == row["gold"] for pair, row in zip(pairs, rows, strict=True)) > 0.9 * len(rows)


def test_answerability_is_of_the_top_ranked(two_kinds, separate):
    model, processor = separate
    rows = mixed_rows(read_recipe(two_kinds, None), 4, FITTED)
    for row, odds in zip(rows, top_odds(score_rows(model, processor, rows)).tolist(), strict=True):
        (scores,) = Answerer(model, processor).score([row["question"]], [row["passages"]])
        (best,) = select_top(scores, 1)
        assert odds == pytest.approx(float(torch.logit(torch.tensor(scores[best].answerability))), abs=1e-3)


def test_one_kind_is_refused(recipe_file, separate):
    """Questions of one kind only are refused, and the model stays unchanged."""
    model, processor = separate
    with pytest.raises(
        ValueError, match="questions, 0 need several passages, and 20 need one.* Expected at least 5 of each"
    ):
        fit_multihop(model, processor, read_recipe(recipe_file, None), 20, 20)
    assert model.multihop_head is None


def test_few_questions_are_refused(two_kinds, separate):
    with pytest.raises(ValueError, match="Expected at least 5 of each.* Raise `-n` and `--held-out`"):
        fit_multihop(*separate, read_recipe(two_kinds, None), 80, 4)


def test_command_writes_a_fitted_head(two_kinds, separate, tmp_path, capsys):
    """The command adds the head and changes nothing else in the checkpoint."""
    model, processor = separate
    model.config.base_model_name_or_path = None
    model.save_pretrained(tmp_path / "aligner", save_base_model=True)
    processor.save_pretrained(tmp_path / "aligner")
    before = load_file(tmp_path / "aligner" / "model.safetensors")
    main(two_kinds, tmp_path / "aligner", number=80, held_out=40)
    fitted = ArcAlignerForCausalLM.from_pretrained(tmp_path / "aligner")
    weights = load_file(tmp_path / "aligner" / "model.safetensors")
    assert "AUROC of multi-hop questions: 1" in capsys.readouterr().out and fitted.config.use_multihop_head
    assert fitted.multihop_head.weight.ne(0).all()
    unchanged = {name: weight for name, weight in before.items() if "answerability_head" not in name}
    assert all(torch.equal(weights[name], weight) for name, weight in unchanged.items())
    assert {name for name in weights if name not in before} == {
        f"multihop_head.{part}" for part in ("weight", "bias", "pair")
    }


def test_command_needs_answerability(two_kinds, checkpoint_dir, tmp_path):
    aligner = shutil.copytree(checkpoint_dir, tmp_path / "aligner")
    edit_json(aligner / "config.json", digests=None)
    with pytest.raises(ValueError, match="A multi-hop head needs an answerability head .*train.confidence`\\.$"):
        main(two_kinds, aligner, number=20, held_out=20)
