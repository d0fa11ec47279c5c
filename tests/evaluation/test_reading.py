"""Readers answer as the model does by itself, and tell what they read."""

import pytest
import torch
from training_rows import question_rows
from transformers import AutoModelForCausalLM

from arcaligner.evaluation import reading
from arcaligner.evaluation.answering import full_text, passages_text, slot_inputs, text_inputs, text_prompt
from arcaligner.evaluation.reading import SlotReader, TextReader, load_aligner, lora_off

ROWS = question_rows(5)
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(reading, "MAX_NEW_TOKENS", NEW_TOKENS)


def generate(model, processor, inputs) -> str:
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_text_is_read_by_the_bare_backbone(model, processor, base_model_dir):
    reader = TextReader(model, processor, text_prompt, lambda rows: [passages_text(row) for row in rows])
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    answers = reader.answer(ROWS)
    for row, answer in zip(ROWS, answers, strict=True):
        inputs = text_inputs(processor, [full_text(row)])
        assert answer.text == generate(base, processor, inputs)
        assert answer.prompt_ids == inputs["input_ids"][0].tolist()
        num_tokens = len(processor.tokenizer(passages_text(row), add_special_tokens=False)["input_ids"])
        assert answer.context_tokens == answer.passage_tokens == num_tokens


@pytest.mark.parametrize("gate_mode", ["off", "adaptive", "always"])
def test_slots_are_read_in_the_gate_mode_that_is_asked_for_alone(model, processor, gate_mode):
    answers = SlotReader(model, processor, gate_mode).answer(ROWS)
    assert model.config.gate_mode == "adaptive"
    model.config.gate_mode = gate_mode
    for row, answer in zip(ROWS, answers, strict=True):
        inputs = slot_inputs(processor, [row])
        assert answer.text == generate(model, processor, inputs)
        assert answer.context_tokens == len(processor.segment_documents(row["passages"]))
        assert answer.prompt_ids.count(model.config.context_token_id) == answer.context_tokens


def test_the_ways_to_read_slots_differ(model, processor):
    readers = [
        SlotReader(model, processor, "adaptive"),
        SlotReader(model, processor, "off"),
        SlotReader(model, processor, "always"),
        SlotReader(model, processor, "off", use_lora=False),
        SlotReader(model, processor, "adaptive", with_passages=False),
    ]
    texts = [tuple(answer.text for answer in reader.answer(ROWS)) for reader in readers]
    assert len(set(texts)) == len(readers)


def test_gates_and_slots_are_those_that_are_asked_for(model, processor):
    refinement = {"gate_threshold": 0.3, "max_refinement_steps": 1, "refinement_budget": 0.5}
    slot_budget = {"max_slots": 2, "slot_policy": "merge"}
    everything = SlotReader(model, processor, "adaptive").answer(ROWS)
    asked = []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: asked.append(kwargs), with_kwargs=True)
    answers = SlotReader(model, processor, "adaptive", refinement=refinement, slot_budget=slot_budget).answer(ROWS)
    assert (refinement | {"gate_mode": "adaptive"}).items() <= asked[0].items()
    inputs = slot_inputs(processor, ROWS, **slot_budget)
    assert torch.equal(asked[0]["input_ids"], inputs["input_ids"])
    torch.testing.assert_close(asked[0]["context_embeds"], inputs["context_embeds"])
    assert [answer.context_tokens for answer in answers] == [2, 2, 1, 2, 2]
    assert [answer.context_tokens for answer in everything] == [3, 2, 1, 3, 2]


def test_without_lora_the_slots_are_the_projectors_alone(model, processor, checkpoint_dir):
    inputs = slot_inputs(processor, ROWS[:2])
    model.config.gate_mode = "off"
    with torch.inference_mode():
        with_lora = model(**inputs).logits
        with lora_off(model):
            without = model(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, with_lora, rtol=0, atol=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        torch.testing.assert_close(without, model(**inputs).logits)
    assert not torch.allclose(with_lora, without)


def test_the_empty_slot_is_one_that_no_passage_changes(model, processor):
    reader = SlotReader(model, processor, "adaptive", with_passages=False)
    answers = reader.answer(ROWS)
    others = reader.answer([row | {"passages": ROWS[0]["passages"]} for row in ROWS])
    assert [answer.context_tokens for answer in answers] == [1] * 5
    assert [answer.text for answer in answers] == [answer.text for answer in others]


def test_methods_of_one_checkpoint_share_its_model(checkpoint_dir):
    load_aligner.cache_clear()
    model, _ = load_aligner(str(checkpoint_dir), "cpu")
    assert load_aligner(str(checkpoint_dir), "cpu")[0] is model
    assert model.dtype == torch.float32 and not model.training
    load_aligner.cache_clear()
