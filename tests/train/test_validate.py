"""Validation on held-out articles: which rows, and what is measured."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from training_rows import article_rows, write_rows

from arcaligner import ArcAlignerProcessor
from arcaligner.pipeline_arcaligner import rank_passages
from arcaligner.train.data import ContextCollator, ExampleBuilder, encode_slots, read_slots
from arcaligner.train.metrics import ranked_passages, with_likeliest
from arcaligner.train.recipe import RecipeArguments
from arcaligner.train.selection import contains_answer, open_part
from arcaligner.train.validate import (
    _scores,
    answers,
    asked_rows,
    main,
    means_and_errors,
    read_recipe,
    refusal_scores,
    table,
    target_losses,
    validate,
)


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"id": f"town_{row['id']}"} for row in article_rows(40)])
    keys = {"stage": "grounding", "train_files": {rows: 1.0}, "reconstruction_files": {rows: 1.0}, "data_dir": ""}
    keys |= {"unanswerable": 0.15, "validation_share": 0.3, "examples_cache_dir": str(tmp_path / "examples")}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys | {"model_name_or_path": "base", "output_dir": "unused"}))
    return path


@pytest.fixture
def recipe(recipe_file) -> RecipeArguments:
    return read_recipe(recipe_file, None)


def test_questions_are_held_out_and_some_passages_do_not_answer(recipe):
    rows = asked_rows(recipe, 40)
    trained = {row["passages"][0]["title"] for row in open_part(recipe, *recipe.train_files, held_out=False)}
    assert 20 <= len(rows) <= 40 and rows == asked_rows(recipe, 40)
    for row in rows:
        (passage,) = row["passages"]
        assert passage["title"] not in trained
        asked = row["question"].split("town ")[1].split()[0]
        assert row["is_answered"] == (passage["title"] == f"Town {asked}")
        assert row["is_answered"] != (row["answers"] == ["not in the text"])
    assert 0.05 < sum(not row["is_answered"] for row in rows) / len(rows) < 0.5


def test_passages_of_a_question_stand_among_the_nearest_that_hold_no_answer(recipe):
    alone = asked_rows(recipe, 40)
    rows, places = asked_rows(recipe, 40, among=[4]), set()
    for row, one in zip(rows, alone, strict=True):
        assert row | {"passages": one["passages"]} == one and len(row["passages"]) == 4
        places.add(row["passages"].index(one["passages"][0]))
        answers = row["answers"] if row["is_answered"] else row["own_answers"]
        others = [each for each in row["passages"] if each not in one["passages"]]
        assert len(others) == 3 and not any(contains_answer(each, answers) for each in others)
    assert places == {0, 1, 2, 3}


def test_of_passages_among_others_the_likeliest_are_read_and_their_answers_scored(recipe, separate):
    model, reader = separate
    results = validate(model, reader, recipe, [4], 12, 12, among=[1, 3], max_passages=[1, 2, 3])
    assert list(results) == ["4", "4, 3 passages", "4, 3 passages, 1 read", "4, 3 passages, 2 read"]
    rows = asked_rows(recipe, 12, among=[3])
    likely = with_likeliest(rows, ranked_passages(model.slot_prefix_store(reader), rows, tokens_per_slot=4), 1)
    for row, one in zip(rows, likely, strict=True):
        asked = [row["question"]], [row["passages"]]
        (ranked,) = rank_passages(model.slot_prefix_store(reader), *asked, tokens_per_slot=4)
        best = max(ranked, key=lambda number: ranked[number].log_odds)
        assert one == row | {"passages": [row["passages"][best]]}
    of_all, of_one = results["4, 3 passages"], results["4, 3 passages, 1 read"]
    assert of_one == _scores(answers(model, reader, likely, 4)) != {name: of_all[name] for name in of_one}
    for options in ({"num_answers": 0, "among": [3]}, {"num_answers": 12, "among": [1]}):
        with pytest.raises(ValueError, match="expected answers .*, among more passages"):
            validate(model, reader, recipe, [4], 12, max_passages=[1], **options)


def test_a_question_without_an_answer_is_asked_about_none_of_its_own_passages(recipe, tmp_path):
    rows = article_rows(40)
    for row in rows:
        row["answers"] = ["yes"]  # which stands in no passage
    file = write_rows(tmp_path / "yes.jsonl", [row | {"id": f"town_{row['id']}"} for row in rows])
    recipe = replace(recipe, train_files={file: 1.0})
    asked = [row for row in asked_rows(recipe, 40, unanswerable=1.0, among=[4]) if not row["is_answered"]]
    assert asked and not any(each in row["passages"] for row in asked for each in row["own_passages"])


def test_a_loss_is_a_mean_over_tokens_with_the_error_of_drawing_articles():
    losses = np.array([[2.0, 1], [4.0, 1], [3.0, 2], [9.0, 3], [5.0, 1]])
    found = means_and_errors(losses, ["squad"] * 4 + ["nq"], ["a", "a", "b", "c", "d"])
    residuals = np.array([6 - 2 * 18 / 7, 3 - 2 * 18 / 7, 9 - 3 * 18 / 7])  # of articles, at the mean of 18 / 7
    assert found["squad"] == (18 / 7, pytest.approx(np.sqrt(3 / 2 * (residuals**2).sum()) / 7))
    assert found["nq"] == (5.0, np.inf)  # one article says nothing of others


def test_a_loss_is_that_of_the_logits_which_a_backbone_makes_of_its_heads(separate):
    model, reader = separate
    row = {"id": "1", "question": "Who?", "answers": ["Ada"], "passages": [{"title": "", "text": "It was Ada."}]}
    (example,) = ExampleBuilder(reader, tokens_per_slot=(2,)).question_examples([row])
    model.config.text_config.final_logit_softcapping = 0.5
    ((loss, tokens),) = target_losses(model, reader, [asdict(example)], 2)
    batch = ContextCollator(reader.context_token_id, 0, (2,), False)([asdict(example)])
    slots = read_slots(model.config, batch, encode_slots(reader, batch))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], **slots).logits
    labels = batch["labels"][0, 1:]
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum")
    assert logits.abs().max() <= 0.5 and tokens == (labels != -100).sum()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_two_aligners_are_compared_question_by_question(recipe, separate):
    model, reader = separate
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.projector.out.weight.mul_(3.0)
    ours = validate(model, reader, recipe, [4], 12, 0)["4"]
    theirs = validate(other, reader, recipe, [4], 12, 0)["4"]
    both = validate(model, reader, recipe, [4], 12, 0, other=(other, reader))["4"]
    assert both["loss"] == ours["loss"] and "difference" not in ours
    for kind, (mean, error) in both["difference"].items():
        assert mean == pytest.approx(ours["loss"][kind][0] - theirs["loss"][kind][0], abs=1e-9)
        assert mean != 0 and error > 0
    same = validate(model, reader, recipe, [4], 12, 0, other=(model, reader))["4"]
    assert set(same["difference"].values()) <= {(0.0, 0.0), (0.0, np.inf)}
    assert "+0.000 ± 0.000" in table({"4": same})


def test_refusals_are_counted_with_the_f1_they_lose():
    def answer(is_answered, is_refused, f1=0.0):
        return {"is_answered": is_answered, "is_refused": is_refused, "f1": f1}

    found = [answer(True, False, 0.6), answer(True, True, 0.2), answer(False, True), answer(False, False)]
    assert refusal_scores(found) == {"refused": 50.0, "wrongly refused": 50.0, "F1 lost": pytest.approx(25.0)}


def test_the_command_measures_and_writes_the_mean(recipe_file, checkpoint_dir, tmp_path, monkeypatch, capsys):
    processor = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
    processor.no_answer = "not in the text"
    monkeypatch.setattr(ArcAlignerProcessor, "from_pretrained", lambda *_: processor)
    asked = {"rates": "segment,4", "number": 20, "num_answers": 8, "among": "1,3"}
    main(recipe_file, str(checkpoint_dir), **asked, output=tmp_path / "out")
    results = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert table(results).strip() == capsys.readouterr().out.strip()
    assert set(results) == {"segment", "4", "segment, 3 passages", "4, 3 passages"}
    assert {"town", "unanswerable", "read back"} <= set(results["4"]["loss"])
    assert "read back" not in results["4, 3 passages"]["loss"]
    assert all(loss > 0 for each in results.values() for loss, _ in each["loss"].values())
    saved = json.loads((tmp_path / "out" / "processor_config.json").read_text())
    assert saved["no_answer"] == "not in the text"


def test_gates_are_judged_as_they_are_shut_and_all_open(recipe_file, checkpoint_dir, tmp_path, capsys):
    tables = {}
    for mode in (None, "off", "adaptive", "always"):
        main(recipe_file, str(checkpoint_dir), rates="4", number=12, gate_mode=mode, output=tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["gate_mode"] == "adaptive"
        tables[mode] = capsys.readouterr().out
    assert tables[None] == tables["adaptive"] and len(set(tables.values())) == 3
    with pytest.raises(ValueError, match="`gate_mode` is 'none'; expected one of"):
        main(recipe_file, str(checkpoint_dir), gate_mode="none")
