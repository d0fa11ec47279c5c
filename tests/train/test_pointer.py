"""Finding pointer heads: which slots have the answer, the heads, the weights, and the command."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import aligner_for, edit_json, processor_with
from training_rows import article_rows
from transformers import DynamicCache

from arcaligner import ArcAlignerForCausalLM
from arcaligner.answering_arcaligner import greedy_answers
from arcaligner.attention_arcaligner import CACHE
from arcaligner.common.rows import token_f1
from arcaligner.pointer_arcaligner import PointerAttention
from arcaligner.segmentation_arcaligner import Segment
from arcaligner.train import pointer
from arcaligner.train.num_passages import half_of
from arcaligner.train.pointer import (
    WEIGHTS,
    best_weight,
    count_hits,
    f1_by_weight,
    f1_by_zoom,
    main,
    needed_rows,
    slots_with_answer,
)
from arcaligner.train.prompts import slot_inputs, zoomed_inputs

RATE = 2


@pytest.fixture
def aligner(processor):
    model = aligner_for(processor, passage_attention="separate", pointer_heads=[[0, 0]])
    return model, processor_with(processor, passage_attention="separate")


def test_questions_have_their_needed_passages(monkeypatch):
    """Each question is in the half of its first needed passage, also if this is not its first passage."""
    towns = [row["passages"][0] for row in article_rows(12, questions=1)]
    rows = [{"id": str(at), "passages": towns, "gold": [at, 11]} for at in range(3, 9)]
    monkeypatch.setattr(pointer, "question_rows", lambda recipe, number: rows)
    halves = needed_rows(None, 6)
    assert sorted(row["id"] for half in halves.values() for row in half) == list("345678") and all(halves.values())
    for half, of_half in halves.items():
        for row in of_half:
            assert row["passages"] == [towns[int(row["id"])], towns[11]]
            assert half_of({"passages": row["passages"][:1], "gold": []}) == half


def test_slots_with_the_beginning_of_an_answer():
    row = {"answers": ["Ada", "1815"], "passages": [{"text": "Byron, Ada, Ada"}, {"text": "in 1815"}]}
    spans = [
        Segment(0, 0, 7, ""),
        Segment(0, 7, 9, ""),
        Segment(0, 9, 15, ""),
        Segment(1, 0, 3, ""),
        Segment(1, 3, 7, ""),
    ]
    assert slots_with_answer(spans, row).tolist() == [False, True, True, False, True]


def attention_by_head(model, processor, row) -> torch.Tensor:
    """The attention of all heads to the slots of a row: (12, num_slots)."""
    pointer = PointerAttention([[layer, head] for layer in range(3) for head in range(4)])
    inputs = slot_inputs(processor, [row], tokens_per_slot=RATE)
    with torch.inference_mode():
        model.model(**inputs, **{CACHE: DynamicCache(config=model.config.text_config)}, pointer=pointer)
    return torch.cat([*pointer.by_layer.values()], dim=1)[0, :, inputs["input_ids"][0] == model.config.context_token_id]


def test_hits_are_those_of_each_head(aligner):
    """A row counts for a head if its most attended slot has the answer. Rows without an answer, and rows whose slots
    all have it, do not count."""
    rows, expected = article_rows(6, questions=1), torch.zeros(12)
    for number, row in enumerate(rows):
        best = attention_by_head(*aligner, row).argmax(dim=1)
        spans = aligner[1].slot_encoder.slot_spans(row["passages"], RATE)
        row["answers"] = [spans[best[number]].text.strip()]  # this head has found it
        expected += slots_with_answer(spans, row)[best]
    no_answer = rows[0] | {"answers": ["nowhere"]}
    single = rows[0] | {"passages": [{"title": "", "text": "Ada"}], "answers": ["Ada"]}
    hits, count = count_hits(*aligner, [*rows, no_answer, single], RATE)
    assert count == len(rows) and expected.sum() >= len(rows)
    torch.testing.assert_close(hits, expected.view(3, 4), rtol=0, atol=0)


def test_f1_of_each_weight(aligner, monkeypatch):
    """Each weight has the F1 of its own answers, and the configuration keeps its weight."""
    monkeypatch.setattr(pointer, "WEIGHTS", (0.0, 50.0))
    monkeypatch.setattr(pointer, "BATCH", 2)
    model, processor = aligner
    rows = [row | {"answers": [row["passages"][0]["text"].split()[-1]]} for row in article_rows(5, questions=1)]
    expected = np.zeros((2, 5))
    for index, model.config.pointer_weight in enumerate(pointer.WEIGHTS):
        for number, row in enumerate(rows):
            inputs = slot_inputs(processor, [row], tokens_per_slot=RATE)
            sources = [row["question"]], [row["passages"]]
            (text,), _ = greedy_answers(model, processor, inputs, *sources, tokens_per_slot=RATE)
            expected[index, number] = 100 * token_f1(text, row["answers"])
    model.config.pointer_weight = 3.0
    np.testing.assert_allclose(f1_by_weight(model, processor, rows, RATE), expected)
    assert model.config.pointer_weight == 3.0


def test_best_weight_is_of_all_rates():
    """The difference is that of each question's mean over the rates."""
    f1 = [np.zeros((len(WEIGHTS), 4)), np.zeros((len(WEIGHTS), 4))]
    f1[0][2], f1[1][3] = (100, 0, 100, 0), (0, 0, 0, 100)
    weight, mean, error = best_weight(f1)
    assert (weight, mean) == (WEIGHTS[2], 25.0)
    assert error == pytest.approx(np.std([50, 0, 50, 0], ddof=1) / 2)


def test_f1_of_each_zoom(aligner, monkeypatch):
    """The first row is without zoom; each share has the F1 and the number of slots of its own prompts."""
    monkeypatch.setattr(pointer, "ZOOMS", (0.2, 1.0))
    monkeypatch.setattr(pointer, "BATCH", 2)
    model, processor = aligner[0], processor_with(aligner[1], tokens_per_slot=2)
    rows = [row | {"answers": [row["passages"][0]["text"].split()[-1]]} for row in article_rows(3, questions=1)]
    expected, num_slots = np.zeros((3, 3)), np.zeros((3, 3))
    for number, row in enumerate(rows):
        coarse = slot_inputs(processor, [row], tokens_per_slot=4)
        prompts = [coarse, *(zoomed_inputs(model, processor, [row], coarse, 4, share) for share in (0.2, 1.0))]
        for index, inputs in enumerate(prompts):
            (text,), _ = greedy_answers(model, processor, inputs, [row["question"]], [row["passages"]])
            expected[index, number] = 100 * token_f1(text, row["answers"])
            num_slots[index, number] = inputs["context_embeds"].shape[1]
    found = f1_by_zoom(model, processor, rows, 4)
    np.testing.assert_allclose(found, (expected, num_slots))
    assert (np.diff(num_slots, axis=0) > 0).all()


@pytest.mark.parametrize("gain, weight", [(60.0, 2.0), (0.0, 0.0)])
def test_command_saves_heads_and_a_better_weight(
    recipe_file, checkpoint_dir, tmp_path, monkeypatch, capsys, gain, weight
):
    """The heads are always saved, a weight only if the F1 rises; the aligner then loads with them."""
    folder = shutil.copytree(checkpoint_dir, tmp_path / "aligner")
    edit_json(folder / "config.json", digests=None)
    edit_json(folder / "processor_config.json", tokens_per_slot=2)

    def f1_of(model, processor, rows, rate):
        return np.array([[weight == 2.0] * len(rows) for weight in WEIGHTS]) * gain + np.arange(len(rows)) % 2

    def zoomed(model, processor, rows, rate):
        return np.arange(4)[:, None] * np.ones(len(rows)), np.full((4, len(rows)), 7)

    monkeypatch.setattr(pointer, "f1_by_weight", f1_of)
    monkeypatch.setattr(pointer, "f1_by_zoom", zoomed)
    before = json.loads((folder / "config.json").read_text())
    main(recipe_file, folder, number=40, rates="2,4", save=True)
    printed, after = capsys.readouterr().out, json.loads((folder / "config.json").read_text())
    assert f"Saved in {folder / 'config.json'}: the heads, and `pointer_weight` {weight:g}." in printed
    assert "| `zoom` | F1 in %, slots, `tokens_per_slot` 4 |" in printed
    assert "3.0 (+3.0 ± 0.0), 7" in printed
    heads = after["pointer_heads"]
    assert after == before | {"pointer_heads": heads, "pointer_weight": weight}
    loaded = ArcAlignerForCausalLM.from_pretrained(folder).config
    assert loaded.has_pointer == (weight > 0) and loaded.pointer_heads == sorted(heads)
    assert len(heads) <= pointer.NUM_HEADS


def test_unsuitable_questions_are_refused(recipe_file, checkpoint_dir, monkeypatch):
    monkeypatch.setattr(pointer, "count_hits", lambda *arguments: (torch.zeros(2, 4), 0))
    with pytest.raises(ValueError, match="None of .* has an answer in one of several slots; expected"):
        main(recipe_file, checkpoint_dir, number=40, rates="2")


def test_heads_that_find_nothing_are_refused(recipe_file, checkpoint_dir, monkeypatch):
    """For example those of a base model in which all layers have a sliding window."""
    monkeypatch.setattr(pointer, "count_hits", lambda *arguments: (torch.zeros(2, 4), 7))
    with pytest.raises(ValueError, match="No attention head .* finds a slot with an answer; expected a base model"):
        main(recipe_file, checkpoint_dir, number=40, rates="2")


def test_heads_without_a_hit_are_left_out(recipe_file, checkpoint_dir, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint_dir, tmp_path / "aligner")
    edit_json(folder / "config.json", digests=None)
    hits = torch.zeros(3, 4)
    hits[1, 2], hits[2, 0] = 3, 5
    monkeypatch.setattr(pointer, "count_hits", lambda *arguments: (hits, 7))
    monkeypatch.setattr(
        pointer, "f1_by_weight", lambda model, processor, rows, rate: np.zeros((len(WEIGHTS), len(rows)))
    )
    main(recipe_file, folder, number=40, rates="2", save=True)
    assert json.loads((folder / "config.json").read_text())["pointer_heads"] == [[1, 2], [2, 0]]
