"""Reconstruction perplexity is the backbone's own loss on the examples of stage I, summed over whole paragraphs."""

import json
import math

import numpy as np
import pytest
import torch
from training_rows import passage_rows, write_rows
from transformers import AutoModelForCausalLM

from arcaligner.evaluation.analyses import reconstruction as module
from arcaligner.evaluation.analyses.reconstruction import (
    paragraph_examples,
    read_arms,
    read_paragraphs,
    reconstruction,
    with_text,
)
from arcaligner.train.data import ExampleBuilder, choose_template


@pytest.fixture
def heldout(tmp_path):
    return write_rows(tmp_path / "heldout.jsonl.gz", passage_rows(3))


def draw(heldout, checkpoint_dir, folder, **options) -> dict:
    """Runs the command with three paragraphs; what it wrote."""
    defaults = {"files": [heldout], "checkpoint": [f"ours={checkpoint_dir}"], "folder": folder, "batch_size": 2}
    reconstruction(**defaults | {"tokens_per_slot": None, "num_paragraphs": 2000, "max_segments": None} | options)
    name = "reconstruction" if "max_segments" not in options else f"reconstruction_{options['max_segments']}"
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def lines(folder, arm: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "reconstruction" / f"{arm}.jsonl").read_text().splitlines()]


def whole(example, processor) -> tuple[list[int], list[int]]:
    """Ids and labels of an example, one slot per segment."""
    (turn,) = example.turns
    before = example.head + [processor.context_token_id] * len(example.segments)
    return before + turn.input_ids, [-100] * len(before) + turn.labels


@torch.inference_mode()
def plain_nll(model, processor, example) -> float:
    """The model's own loss on one example, without padding, times its tokens."""
    ids, labels = whole(example, processor)
    inputs = {"input_ids": torch.tensor([ids])}
    if example.segments:
        embeds = processor.encode_segments([segment["encoder_text"] for segment in example.segments])
        inputs["context_embeds"] = embeds[None]
    loss = model(**inputs, labels=torch.tensor([labels])).loss
    return loss.item() * sum(label != -100 for label in labels)


def expected_records(model, processor, make=lambda example: example, max_segments=None) -> dict[str, float]:
    """By id, what each paragraph's examples lose in all."""
    return {
        row["id"]: sum(
            plain_nll(model, processor, make(example)) for example in paragraph_examples(processor, row, max_segments)
        )
        for row in passage_rows(3)
    }


def test_each_paragraph_has_the_loss_of_the_model_alone_without_padding(
    heldout, checkpoint_dir, base_model_dir, model, processor, tmp_path
):
    data = draw(heldout, checkpoint_dir, tmp_path / "figures")
    found = {arm: lines(tmp_path / "figures", arm) for arm in ("base", "ours")}
    backbone = AutoModelForCausalLM.from_pretrained(base_model_dir)
    expected = {
        "base": expected_records(backbone, processor, with_text),
        "ours": expected_records(model, processor),
    }
    for arm, records in found.items():
        assert {each["id"] for each in records} == set(expected[arm])
        for each in records:
            assert each["nll"] == pytest.approx(expected[arm][each["id"]], rel=1e-4)
    assert expected["ours"] != expected["base"]
    for arm, entry in zip(found, data["arms"], strict=True):
        assert entry["perplexity"][0] == pytest.approx(
            math.exp(sum(expected[arm].values()) / entry["tokens"]), rel=1e-4
        )
        assert entry["perplexity"][1] <= entry["perplexity"][0] <= entry["perplexity"][2]
        assert entry["paragraphs"] == 3
    assert len({entry["tokens"] for entry in data["arms"]}) == 1  # all read the same text back
    assert [(entry["title"], entry["reads"], entry["slots"]) for entry in data["arms"]] == [
        ("Base", "text", 0),
        ("ours", "slots", 6),
    ]
    assert "1 is certainty" in data["reading"]
    for suffix in ("png", "svg"):
        assert (tmp_path / "figures" / f"reconstruction.{suffix}").stat().st_size > 1000


def test_the_whole_paragraph_is_the_target_and_the_template_stands_around_its_slots(processor):
    row = passage_rows(1)[0]
    (example,) = paragraph_examples(processor, row, max_segments=None)
    text, template = row["passages"][0]["text"], choose_template("row-0:0:0")
    turns = (
        f"<|im_start|>user\n{template.before}{{}}{template.after}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
    )
    for each, read in ((example, "<context>" * 3), (with_text(example), text)):
        ids, labels = whole(each, processor)
        assert processor.decode(ids) == turns.format(read)
        assert processor.decode([label for label in labels if label != -100]) == text + "<|im_end|>"


def test_single_segments_are_the_examples_of_training(processor):
    builder = ExampleBuilder(processor, max_segments=1)
    for row in passage_rows(3):
        assert list(paragraph_examples(processor, row, 1)) == list(builder.reconstruction_examples([row]))


def test_single_segments_go_to_files_of_their_own(heldout, checkpoint_dir, model, processor, tmp_path):
    data = draw(heldout, checkpoint_dir, tmp_path, max_segments=1)
    records = {}
    for line in (tmp_path / "reconstruction_1" / "ours.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[record["id"]] = record["nll"]
    expected = expected_records(model, processor, max_segments=1)
    assert records == pytest.approx(expected, rel=1e-4)
    assert "1 segment at a time" in data["reading"]
    assert not (tmp_path / "reconstruction").exists()


def test_each_rate_is_an_arm_of_its_own(heldout, checkpoint_dir, model, processor, tmp_path):
    data = draw(heldout, checkpoint_dir, tmp_path, tokens_per_slot="4,segment")
    assert [(arm["title"], arm["tokens_per_slot"]) for arm in data["arms"]] == [
        ("Base", None),
        ("ours x4", 4),
        ("ours xsegment", "segment"),
    ]
    assert data["arms"][1]["slots"] > data["arms"][2]["slots"] == 6
    found = {each["id"]: each["nll"] for each in lines(tmp_path, "ours_xsegment")}
    assert found == pytest.approx(expected_records(model, processor), rel=1e-4)
    row = passage_rows(3)[2]
    (example,) = paragraph_examples(processor, row, None)
    encoded = processor.encode_documents(row["passages"], tokens_per_slot=4)
    (turn,) = example.turns
    ids = example.head + [processor.context_token_id] * len(encoded.context_embeds) + turn.input_ids
    labels = [-100] * (len(ids) - len(turn.labels)) + turn.labels
    inputs = {"input_ids": torch.tensor([ids]), "context_embeds": encoded.context_embeds[None]}
    with torch.no_grad():
        nll = model(**inputs, labels=torch.tensor([labels])).loss.item() * sum(each != -100 for each in labels)
    (own,) = [each["nll"] for each in lines(tmp_path, "ours_x4") if each["id"] == row["id"]]
    assert own == pytest.approx(nll, rel=1e-4)


def test_a_killed_run_goes_on_where_it_was(heldout, checkpoint_dir, tmp_path):
    whole = draw(heldout, checkpoint_dir, tmp_path)
    path = tmp_path / "reconstruction" / "ours.jsonl"
    before = lines(tmp_path, "ours")
    kept = before[0] | {"nll": 1.0}  # would be another if it were measured again
    path.write_text(json.dumps(kept) + "\n" + path.read_text().splitlines()[1][:20])
    again = draw(heldout, checkpoint_dir, tmp_path)
    after = lines(tmp_path, "ours")
    assert after[0] == kept
    assert {each["id"]: each["nll"] for each in after[1:]} == pytest.approx(
        {each["id"]: each["nll"] for each in before[1:]}, rel=1e-4
    )
    assert again["arms"][0] == whole["arms"][0]
    total = 1.0 + sum(each["nll"] for each in before[1:])
    assert again["arms"][1]["perplexity"][0] == pytest.approx(math.exp(total / again["arms"][1]["tokens"]), rel=1e-4)


def test_a_part_of_the_paragraphs_is_counted_alone(heldout, checkpoint_dir, tmp_path, monkeypatch):
    draw(heldout, checkpoint_dir, tmp_path)
    monkeypatch.setattr(module, "load_aligner", None)  # nothing is left to measure
    data = draw(heldout, checkpoint_dir, tmp_path, num_paragraphs=2)
    first = {"row-0", "row-1"}
    for entry, arm in zip(data["arms"], ("base", "ours"), strict=True):
        found = [each for each in lines(tmp_path, arm) if each["id"] in first]
        nll, tokens = (sum(each[key] for each in found) for key in ("nll", "tokens"))
        assert (entry["paragraphs"], entry["tokens"]) == (2, tokens)
        assert entry["perplexity"][0] == pytest.approx(math.exp(nll / tokens))


def test_the_interval_is_that_of_all_resamples():
    data = module.summarize([{"nll": 2.0, "tokens": 2, "slots": 1}, {"nll": 12.0, "tokens": 4, "slots": 2}])
    ends = [math.exp(value) for value in (14 / 6, 1.0, 3.0)]  # both, the first twice, the second twice
    assert data == {"paragraphs": 2, "tokens": 6, "slots": 3, "perplexity": pytest.approx(ends)}
    assert np.isfinite(data["perplexity"]).all()


def test_arms_of_the_paper_without_a_checkpoint_are_named(checkpoint_dir, caplog):
    arms = read_arms([f"w/o LoRA={checkpoint_dir}"])
    assert [(arm.title, arm.checkpoint) for arm in arms] == [
        ("Base", str(checkpoint_dir)),
        ("w/o LoRA", str(checkpoint_dir)),
    ]
    assert "xRAG, ours" in caplog.text


@pytest.mark.parametrize("pair", ["runs/mine", "=runs/mine", "ours="])
def test_a_checkpoint_without_a_title_is_refused(pair):
    with pytest.raises(ValueError, match="TITLE=PATH"):
        read_arms([pair])


def test_two_arms_of_a_name_are_refused(checkpoint_dir):
    with pytest.raises(ValueError, match="Name them apart"):
        read_arms([f"base={checkpoint_dir}"])


def test_checkpoints_of_different_backbones_are_refused(checkpoint_dir, tmp_path):
    config = json.loads((checkpoint_dir / "config.json").read_text()) | {"base_model_name_or_path": "org/other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different backbones.*org/other"):
        read_arms([f"ours={checkpoint_dir}", f"xRAG={tmp_path}"])


def test_paragraphs_without_text_are_left_out_and_counted(tmp_path, caplog):
    rows = passage_rows(3)
    rows[1]["passages"] = [{"title": "Ada", "text": " "}]
    assert read_paragraphs([write_rows(tmp_path / "rows.jsonl", rows)], 2) == [rows[0], rows[2]]
    assert "1 rows left out" in caplog.text
    path = write_rows(tmp_path / "empty.jsonl", rows[1:2])
    with pytest.raises(ValueError, match="no paragraph with text"):
        read_paragraphs([path], 2)


def test_paragraphs_of_one_id_are_refused(heldout):
    with pytest.raises(ValueError, match="one id"):
        read_paragraphs([heldout, heldout], 6)
