"""Fitting the answerability: the states, the regression and its calibration, and the command."""

import shutil

import numpy as np
import pytest
import torch
from conftest import chat_inputs, edit_json
from safetensors.torch import load_file, save_file

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.train.confidence import calibrate, fit_head, last_states, main, partly_unanswerable
from arcaligner.train.validate import read_recipe


def test_states_of_a_row(model, processor):
    """The states of a row depend on its prompt only."""
    passages = [{"title": "", "text": text} for text in ("Ada wrote it. It was long.", "It is a short book.")]
    rows = [{"question": q, "passages": [p]} for q, p in zip(("Who wrote it?", "What?"), passages, strict=True)]
    all_states = last_states(model, processor, rows, "segment", [0])
    for row, states in zip(rows, all_states, strict=True):
        inputs = chat_inputs(processor, row["question"], row["passages"])
        with torch.no_grad():
            expected = model.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[1][0, -1]
        torch.testing.assert_close(torch.tensor(states), expected, rtol=1e-4, atol=1e-4)


def test_regression_separates_and_calibrates():
    """The regression finds the feature that separates the rows, and is calibrated."""
    random = np.random.default_rng(0)
    states = random.normal(3.0, 2.0, (4000, 5))
    odds = 1.5 * (states[:, 2] - 3.0)
    is_answered = random.random(4000) < 1 / (1 + np.exp(-odds))
    weight, bias = fit_head(states[:2000], is_answered[:2000])
    assert np.argmax(np.abs(weight)) == 2 and np.abs(np.delete(weight, 2)).max() < 0.1 * weight[2]
    logits = states @ weight + bias
    scale, offset = calibrate(is_answered, logits)
    np.testing.assert_allclose(scale * logits + offset, odds, atol=0.5)
    both = calibrate(is_answered, states[:, 2], random.normal(size=4000))
    np.testing.assert_allclose(both, (1.5, 0.0, -4.5), atol=0.2)
    sure = 1 / (1 + np.exp(-(scale * logits + offset)))
    assert sure.mean() == pytest.approx(is_answered.mean(), abs=0.01)


def test_share_of_unanswerable_questions(recipe_file):
    """A share of the questions gets a passage that does not answer them."""
    rows = partly_unanswerable(read_recipe(recipe_file, None), 40, share=0.4)
    for row in rows:
        (passage,) = row["passages"]
        town = row["question"].split("town ")[1].split()[0]
        assert row["is_answered"] == (passage["title"] == f"Town {town}") == (row["answers"][0] in passage["text"])
    assert 0.2 < sum(not row["is_answered"] for row in rows) / len(rows) < 0.6


def test_command_writes_a_fitted_head(recipe_file, checkpoint_dir, tmp_path, capsys):
    """The command changes the head only: the weights of the aligner keep their dtype."""
    aligner = shutil.copytree(checkpoint_dir, tmp_path / "aligner")
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(aligner / "model.safetensors").items()}
    save_file(weights, aligner / "model.safetensors", {"format": "pt"})
    edit_json(aligner / "config.json", digests=None)
    main(recipe_file, aligner, number=40, held_out=20)
    printed, written = capsys.readouterr().out, load_file(aligner / "model.safetensors")
    model, processor = ArcAlignerForCausalLM.from_pretrained(aligner), ArcAlignerProcessor.from_pretrained(aligner)
    head, config = model.answerability_head, model.config
    assert "| segment |" in printed and f"`min_confidence`: {config.answerability_threshold}" in printed
    assert processor.no_answer == "not in the text" and 0 < config.answerability_threshold < 1
    assert head.weight.shape == (len(config.answerability_layers), config.text_config.hidden_size)
    assert config.answerability_uses_match and (head.match != torch.tensor([1.0, 0.0, 0.0])).any()
    assert head.weight.dtype == torch.float32 and (head.weight != 0).all()
    for name, weight in weights.items():
        assert torch.equal(written[name], weight) and written[name].dtype == weight.dtype
