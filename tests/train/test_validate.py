"""Validation on held-out articles: the rows and the measurements."""

import json

import numpy as np
import pytest
import torch

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train.examples import ExampleBuilder, open_part
from arcaligner.train.recipe import RecipeArguments
from arcaligner.train.sft import ContextCollator, encode_slots
from arcaligner.train.validate import main, means_and_errors, question_rows, read_recipe, table, target_losses


@pytest.fixture
def recipe(recipe_file) -> RecipeArguments:
    return read_recipe(recipe_file, None)


def test_questions_are_held_out(recipe):
    rows = question_rows(recipe, 40)
    trained = {row["passages"][0]["title"] for row in open_part(recipe, *recipe.train_files, held_out=False)}
    assert 20 <= len(rows) <= 40 and rows == question_rows(recipe, 40)
    assert not trained & {row["passages"][0]["title"] for row in rows}


def test_loss_error_is_over_articles():
    """A loss is a mean over tokens, with the standard error over articles."""
    losses = np.array([[2.0, 1], [4.0, 1], [3.0, 2], [9.0, 3], [5.0, 1]])
    means = means_and_errors(losses, ["squad"] * 4 + ["nq"], ["a", "a", "b", "c", "d"])
    residuals = np.array([6 - 2 * 18 / 7, 3 - 2 * 18 / 7, 9 - 3 * 18 / 7])  # of articles, at the mean of 18 / 7
    assert means["squad"] == (18 / 7, pytest.approx(np.sqrt(3 / 2 * (residuals**2).sum()) / 7))
    assert means["nq"] == (5.0, np.inf)  # one article has no standard error


def test_loss_matches_the_logits(separate):
    """The loss is computed from the logits of the backbone's own head."""
    model, reader = separate
    row = {"id": "1", "question": "Who?", "answers": ["Ada"], "passages": [{"title": "", "text": "It was Ada."}]}
    (example,) = ExampleBuilder(reader, tokens_per_slot=(2,)).question_examples([row])
    model.config.text_config.final_logit_softcapping = 0.5
    ((loss, tokens),) = target_losses(model, reader, [example], 2)
    batch = ContextCollator(reader.context_token_id, 0, reader.encoder.text_tokenizer, (2,))([example])
    slots = encode_slots(model.config, reader, batch)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], **slots).logits
    labels = batch["labels"][0, 1:]
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum")
    assert logits.abs().max() <= 0.5 and tokens == (labels != -100).sum()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_command_writes_measured_mean(recipe_file, checkpoint_dir, tmp_path, capsys):
    other = tmp_path / "other"
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir)
    with torch.no_grad():
        model.model.projector.out.weight.mul_(3.0)
    model.save_pretrained(other)
    ArcAlignerProcessor.from_pretrained(checkpoint_dir).save_pretrained(other)
    options = {"rates": "segment,4", "number": 20, "num_answers": 8, "output": tmp_path / "out"}
    main(recipe_file, f"{checkpoint_dir},{other}", **options)
    results = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert table(results).strip() == capsys.readouterr().out.strip()
    assert set(results) == {"segment", "4"}
    for measured in results.values():
        assert measured["loss"].keys() == {"town", "reconstruction"}
        assert all(loss > 0 for loss, _ in measured["loss"].values()) and 0 <= measured["f1"]["town"] <= 100
    weight = "model.projector.out.weight"
    mean = ArcAlignerForCausalLM.from_pretrained(tmp_path / "out").state_dict()[weight]
    torch.testing.assert_close(mean, model.state_dict()[weight] * 2 / 3)
