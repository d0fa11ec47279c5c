"""Reconstruction perplexity is the backbone's own loss on the examples of stage I, summed over whole paragraphs."""

import json
import math

import pytest
import torch
from training_rows import passage_rows, write_rows
from transformers import AutoModelForCausalLM

from arcaligner.evaluation.analyses.reconstruction import (
    ReadFrom,
    measure,
    paragraph_examples,
    read_arms,
    reconstruction,
    summarize,
    with_text,
)
from arcaligner.train.data import ExampleBuilder, choose_template

ROWS = passage_rows(3)


def whole(example, processor, num_slots) -> tuple[list[int], list[int]]:
    """Ids and labels of an example."""
    (turn,) = example.turns
    before = example.head + [processor.context_token_id] * num_slots
    return before + turn.input_ids, [-100] * len(before) + turn.labels


@torch.inference_mode()
def plain_nll(model, processor, example, embeds=None) -> float:
    """The model's own loss on one example, without padding, times its tokens."""
    ids, labels = whole(example, processor, 0 if embeds is None else len(embeds))
    inputs = {} if embeds is None else {"context_embeds": embeds[None]}
    loss = model(torch.tensor([ids]), labels=torch.tensor([labels]), **inputs).loss
    return loss.item() * sum(label != -100 for label in labels)


@pytest.mark.parametrize("max_segments", [None, 1])
def test_each_paragraph_has_the_models_own_loss(checkpoint_dir, base_model_dir, model, processor, max_segments):
    backbone = AutoModelForCausalLM.from_pretrained(base_model_dir)
    arms = {reads: ReadFrom(reads, str(checkpoint_dir), reads) for reads in ("text", "slots")}
    found = {reads: measure(arm, ROWS, max_segments, 2, "cpu") for reads, arm in arms.items()}
    for number, row in enumerate(ROWS):
        examples = list(paragraph_examples(processor, row, max_segments))
        recited = sum(plain_nll(backbone, processor, with_text(example)) for example in examples)
        texts = [[segment["encoder_text"] for segment in each.segments] for each in examples]
        embeds = map(processor.encoder.encode, texts)
        read = sum(plain_nll(model, processor, *each) for each in zip(examples, embeds, strict=True))
        assert found["text"][number]["nll"] == pytest.approx(recited, rel=1e-4)
        assert found["slots"][number]["nll"] == pytest.approx(read, rel=1e-4) and abs(read - recited) > 1e-2
    assert [each["slots"] for each in found["slots"]] == [3, 2, 1] and not any(each["slots"] for each in found["text"])
    assert [each["tokens"] for each in found["slots"]] == [each["tokens"] for each in found["text"]]


def test_each_rate_is_read_with_its_own_slots(checkpoint_dir, model, processor):
    (found,) = measure(ReadFrom("x4", str(checkpoint_dir), tokens_per_slot=4), ROWS[2:], None, 2, "cpu")
    (example,) = paragraph_examples(processor, ROWS[2], None)
    encoded = processor.encode_documents(ROWS[2]["passages"], tokens_per_slot=4)
    nll = plain_nll(model, processor, example, encoded.context_embeds)
    assert (found["nll"], found["slots"]) == (pytest.approx(nll, rel=1e-4), len(encoded.context_embeds))
    assert found["slots"] > 1


def test_the_whole_paragraph_is_the_target_and_the_template_stands_around_its_slots(processor):
    (example,) = paragraph_examples(processor, ROWS[0], max_segments=None)
    text, (before, after) = ROWS[0]["passages"][0]["text"], choose_template("row-0:0:0")
    turns = f"<|im_start|>user\n{before}{{}}{after}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
    for each, read, num_slots in ((example, "<context>" * 3, 3), (with_text(example), text, 0)):
        ids, labels = whole(each, processor, num_slots)
        assert processor.decode(ids) == turns.format(read)
        assert processor.decode([label for label in labels if label != -100]) == text + "<|im_end|>"
    builder = ExampleBuilder(processor, max_segments=1)
    for row in ROWS:  # single segments are the examples of training
        assert list(paragraph_examples(processor, row, 1)) == list(builder.reconstruction_examples([row]))


def test_the_interval_is_that_of_all_resamples():
    data = summarize([{"nll": 2.0, "tokens": 2, "slots": 1}, {"nll": 12.0, "tokens": 4, "slots": 2}])
    ends = [math.exp(value) for value in (14 / 6, 1.0, 3.0)]  # both, the first twice, the second twice
    assert data == {"paragraphs": 2, "tokens": 6, "slots": 3, "perplexity": pytest.approx(ends)}


def test_the_command_draws_base_and_checkpoints(checkpoint_dir, tmp_path):
    rows = [*ROWS, passage_rows(1)[0] | {"passages": [{"title": "Ada", "text": " "}]}]  # without text: left out
    options = {"files": [write_rows(tmp_path / "heldout.jsonl.gz", rows)], "folder": tmp_path / "figures"}
    options |= {"tokens_per_slot": "segment", "num_paragraphs": 9, "batch_size": 2, "device": "cpu"}
    reconstruction(checkpoint=[f"ours={checkpoint_dir}"], max_segments=1, **options)
    data = json.loads((tmp_path / "figures" / "reconstruction_1.json").read_text("utf-8"))
    found = [(entry["title"], entry["reads"], entry["slots"], entry["paragraphs"]) for entry in data["arms"]]
    assert found == [("Base", "text", 0, 3), ("ours xsegment", "slots", 6, 3)]
    assert "1 segment at a time" in data["reading"] and "1 is certainty" in data["reading"]
    files = {path.name for path in (tmp_path / "figures").iterdir()}
    assert files == {f"reconstruction_1.{suffix}" for suffix in ("json", "svg")}


@pytest.mark.parametrize("pair", ["runs/mine", "=runs/mine", "ours="])
def test_a_checkpoint_without_a_title_is_refused(pair):
    with pytest.raises(ValueError, match="TITLE=PATH"):
        read_arms([pair])


def test_arms_of_one_name_or_of_different_backbones_are_refused(checkpoint_dir, tmp_path):
    with pytest.raises(ValueError, match="Name them apart"):
        read_arms([f"Base={checkpoint_dir}"])
    config = json.loads((checkpoint_dir / "config.json").read_text()) | {"base_model_name_or_path": "org/other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different backbones.*org/other"):
        read_arms([f"ours={checkpoint_dir}", f"xRAG={tmp_path}"])
