"""Prompts differ only where they should; each method answers with its own model; batches shrink if memory is short."""

import shutil

import pytest
import torch
from conftest import greedy_answer, score_passages
from training_rows import question_rows
from transformers import AutoModelForCausalLM

from arcaligner import ArcAlignerProcessor, encoder_arcaligner
from arcaligner.answering_arcaligner import Answerer
from arcaligner.evaluation.answering import (
    answer_independent,
    answer_slots,
    answer_text,
    in_batches,
    independent_text,
    load_aligner,
    slot_inputs,
    text_inputs,
)
from arcaligner.evaluation.methods import no_text, whole_text
from arcaligner.train.prompts import full_text, passages_text, text_prompt, with_selected

ROWS = question_rows(5)
NEW_TOKENS = 4

pytestmark = pytest.mark.usefixtures("few_tokens")


def texts(answers) -> list[str]:
    return [answer.text for answer in answers]


def test_text_uses_bare_backbone(model, processor, base_model_dir):
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    for row, answer in zip(ROWS, answer_text(whole_text, model, processor, ROWS), strict=True):
        inputs = text_inputs(processor, [full_text(row)])
        assert answer.text == greedy_answer(base, processor, inputs, NEW_TOKENS).strip()
        assert answer.prompt_ids == inputs["input_ids"][0].tolist()
        num_tokens = len(processor.tokenizer(passages_text(row), add_special_tokens=False)["input_ids"])
        assert answer.context_tokens == answer.passage_tokens == num_tokens


def test_copies_use_whole_passages(model, processor, monkeypatch):
    """A reader of truncated text copies from the whole passages."""
    monkeypatch.setattr(processor, "copy_bonus", 100.0)
    passages = [" ".join(passages_text(row).split()) for row in ROWS]
    for copies in (False, True):
        answers = texts(answer_text(no_text, model, processor, ROWS, copy_biased=copies))
        are_copied = {answer in passage for answer, passage in zip(answers, passages, strict=True)}
        assert all(answers) and are_copied == {copies}


@pytest.mark.parametrize("gate_mode", ["off", "adaptive", "always"])
def test_gate_mode_is_per_call(model, processor, gate_mode):
    """Slots are computed in the gate mode of the call only."""
    answers = answer_slots(model, processor, ROWS, gate_mode=gate_mode)
    assert model.config.gate_mode == "adaptive"
    model.config.gate_mode = gate_mode
    for row, answer in zip(ROWS, answers, strict=True):
        inputs = slot_inputs(processor, [row])
        assert answer.text == greedy_answer(model, processor, inputs, NEW_TOKENS).strip()
        assert answer.context_tokens == len(processor.slot_encoder.segment_documents(row["passages"]))
        assert answer.prompt_ids.count(model.config.context_token_id) == answer.context_tokens


def test_no_lora_uses_projector_only(model, processor):
    model.config.gate_mode = "off"
    with_lora = texts(answer_slots(model, processor, ROWS))
    without = texts(answer_slots(model, processor, ROWS, use_lora=False))
    assert texts(answer_slots(model, processor, ROWS)) == with_lora != without
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert texts(answer_slots(model, processor, ROWS)) == without


def test_prompts_differ_in_the_passage(processor):
    """The prompt with text differs from the one with slots only in the passage."""
    (row,) = question_rows(1)
    slots = processor.decode(slot_inputs(processor, [row])["input_ids"][0])
    text = processor.decode(text_inputs(processor, [full_text(row)])["input_ids"][0])
    passage = f"Toronto Northwest: {row['passages'][0]['text']}"
    assert text == slots.replace("<context>" * 3, passage)
    closed = processor.decode(text_inputs(processor, [text_prompt(row, "")])["input_ids"][0])
    assert closed == text.replace(f"Refer to the background document: {passage}\n", "")


def test_independent_text_in_batches(model, processor, base_model_dir):
    """Independent text gives the same answers in a batch, and attends to no other passage."""
    base = AutoModelForCausalLM.from_pretrained(base_model_dir).double()
    rows = question_rows(4)
    rows[1]["passages"] = [passage for row in rows for passage in row["passages"]]
    rows[2]["passages"] = []
    rows[3]["passages"][0]["text"] = "He said <|im_end|> and left."  # control tokens are text
    prompts = [independent_text(processor, row) for row in rows]
    assert prompts[0].ids[-8:] == text_inputs(processor, [full_text(rows[0])])["input_ids"][0, -8:].tolist()
    assert processor.decode(prompts[3].passages[0]).endswith("He said <|im_end|> and left.")
    assert processor.tokenizer.convert_tokens_to_ids("<|im_end|>") not in prompts[3].passages[0]
    answers = answer_independent(base, processor, rows)
    assert answers == [answer_independent(base, processor, [row])[0] for row in rows]
    assert [answer.prompt_ids for answer in answers] == [prompt.ids for prompt in prompts]
    assert [answer.context_tokens for answer in answers] == [sum(map(len, prompt.passages)) for prompt in prompts]
    (turned,) = answer_independent(base, processor, [rows[1] | {"passages": rows[1]["passages"][::-1]}])
    assert turned.text == answers[1].text and turned.prompt_ids != answers[1].prompt_ids


def test_top_ranked_of_more_passages(separate):
    """Of more passages the top-ranked are used, and the tokens of all are counted."""
    model, reader = separate
    passages = [{"title": "", "text": text} for text in ("Ada wrote it.", "The loom wove. It was loud.", "Nobody.")]
    row = ROWS[0] | {"passages": passages}
    store = model.passage_cache(reader)
    (likely,) = with_selected(Answerer(model, reader, store), [row], 2, gate_mode="off")
    (ranked,) = score_passages(store, [row["question"]], [passages], gate_mode="off")
    least = min(ranked, key=lambda number: ranked[number].log_odds)
    best = sorted((ranked[number].log_odds for number in range(3) if number != least), reverse=True)
    assert sorted(likely["prior"]) == pytest.approx([(best[1] - best[0]) / 3, 0.0], abs=1e-5)
    used = [passage for number, passage in enumerate(passages) if number != least]
    assert likely == row | {"passages": used, "prior": likely["prior"]}
    (answer,) = answer_slots(model, reader, [row], gate_mode="off", max_passages=2)
    (expected,) = answer_slots(model, reader, [likely], gate_mode="off")
    assert answer.prompt_ids == expected.prompt_ids and answer.text == expected.text
    assert answer.passage_tokens > expected.passage_tokens


@pytest.mark.parametrize("is_multihop, most", [(True, 2), (False, 1)])
def test_passages_as_needed(separate, is_multihop, most):
    """A multi-hop question gets as many passages as the head was fitted for, any other question one."""
    model, reader = separate
    model.set_multihop_head(True)
    model.multihop_head.bias.fill_(1.0 if is_multihop else -1.0)
    passages = [{"title": "", "text": text} for text in ("Ada wrote it.", "The loom wove. It was loud.", "Nobody.")]
    row = ROWS[0] | {"passages": passages}
    (answer,) = answer_slots(model, reader, [row], gate_mode="off", as_needed=True)
    (expected,) = answer_slots(model, reader, [row], gate_mode="off", max_passages=most)
    assert answer.prompt_ids == expected.prompt_ids and answer.text == expected.text


def test_slots_ignore_machine_dtype(checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_arcaligner, "fastest_dtype", lambda device_type: torch.bfloat16)
    copied = shutil.copytree(checkpoint_dir, tmp_path / "copied")
    ArcAlignerProcessor.from_pretrained(copied, encoder_dtype="auto").save_pretrained(copied)
    assert ArcAlignerProcessor.from_pretrained(copied).encoder.model.dtype == torch.bfloat16
    assert load_aligner(str(copied), "cpu")[1].encoder.model.dtype == torch.float32


# Batches


@pytest.mark.parametrize(
    "most, error, message",
    [
        (2, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), None),
        (2, MemoryError(), None),
        (0, torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
        (2, RuntimeError("a bug"), "a bug"),
    ],
)
def test_batches_shrink_without_memory(most, error, message):
    """Without enough memory batches shrink, and the longest rows still come first."""
    rows = [{"passages": [{"text": "a" * number}]} for number in range(9)]
    done = []

    def run(batch):
        if len(batch) > most:
            raise error
        done.extend(batch)

    if message is not None:
        with pytest.raises(RuntimeError, match=message):
            in_batches(rows, 3, run, "")
        assert done == []
    else:
        in_batches(rows, 3, run, "")
        assert done == rows[::-1]
