"""The arms of the latency benchmark: what must read the same does, whatever was made before."""

import pytest
import torch
from conftest import processor_with
from training_rows import question_rows

from arcaligner.benchmarks.arms import (
    Decoding,
    both_prompts,
    cache_bytes,
    encoded_slots,
    load_models,
    make_arms,
    pick_rows,
)
from arcaligner.evaluation.answering import slot_inputs, text_inputs
from arcaligner.train.data import full_text

# What must read the same as another arm, up to the rounding of differently shaped products.
SAME_AS = {"standard_rag_cached": "standard_rag", "slots_cached": "adaptive"}


@pytest.fixture(scope="module", params=["joint", "separate"])
def attention(request):
    return request.param


@pytest.fixture(scope="module")
def models(checkpoint_dir, attention):
    return load_models(str(checkpoint_dir), torch.float64, "cpu", passage_attention=attention)


@pytest.fixture(scope="module", params=[1, 3])
def prompts(processor, attention, request):
    """Arms with text and with slots; the rows of the larger batch differ in length and in slots."""
    processor = processor_with(processor, passage_attention=attention)
    rows = pick_rows(question_rows(6), processor, k=2, batch_size=request.param)
    slots = encoded_slots(processor, rows)
    slots["context_embeds"] = [each.double() for each in slots["context_embeds"]]
    return both_prompts(processor, rows, slots)


@pytest.fixture(scope="module")
def read(models, prompts):
    """What each arm reads."""
    arms, _ = make_arms(*models, *prompts)
    found = {}
    with torch.no_grad():
        for name, arm in arms.items():
            found[name] = arm()
    return found


def real_rows(found, ids):
    """Keys and values of all layers without padding, (rows, features)."""
    mask = ids.attention_mask.bool()
    states = [tensor for layer in found.cache.layers for tensor in (layer.keys, layer.values)]
    return torch.cat([state.transpose(1, 2)[mask].flatten(1) for state in states], dim=1)


def columns(name, prompts):
    """The ids that an arm's cache holds."""
    own = prompts[0] if name.startswith("standard_rag") else prompts[1]
    return own.prefix.then(own.tail) if name.endswith("_cached") else own.whole


@pytest.mark.parametrize(("name", "other"), SAME_AS.items())
def test_cached_arms_read_what_their_counterparts_read(name, other, read, prompts):
    assert torch.equal(read[name].tokens, read[other].tokens)
    found, expected = (real_rows(read[each], columns(each, prompts)) for each in (name, other))
    torch.testing.assert_close(found, expected)


def test_a_budget_takes_steps_away_and_adds_none(read):
    budgeted, adaptive = (read[name].recursion_depth for name in ("budgeted", "adaptive"))
    assert (budgeted <= adaptive).all() and 0 < budgeted.clamp(min=0).sum() < adaptive.clamp(min=0).sum()


def test_the_bare_model_reads_the_text(models, prompts, read):
    text = prompts[0].whole
    own = models[0].model.backbone.layers[0].mlp.up_proj.base_layer.weight
    assert models[1].model.layers[0].mlp.up_proj.weight.data_ptr() == own.data_ptr()  # both read the same memory
    inputs = {"input_ids": text.input_ids, "attention_mask": text.attention_mask, "position_ids": text.position_ids}
    expected = models[1](**inputs).logits[:, -1].argmax(dim=-1)
    assert torch.equal(read["standard_rag"].tokens, expected)
    assert not any("lora" in name for name, _ in models[1].named_parameters())


def test_an_arm_leaves_the_models_and_the_prefix_as_they_were(models, prompts):
    aligner, base = models
    arms, prefixes = make_arms(aligner, base, *prompts)
    before = {name: (cache_bytes(cache), cache.get_seq_length()) for name, cache in prefixes.items()}
    gate_mode = aligner.config.gate_mode
    with torch.no_grad():
        for arm in arms.values():
            arm()
    assert {name: (cache_bytes(cache), cache.get_seq_length()) for name, cache in prefixes.items()} == before
    assert aligner.config.gate_mode == gate_mode


def test_both_models_decode_from_the_aligners_cache_as_generate_does(models, prompts, read):
    aligner, slots = models[0], prompts[1]
    inputs = {"input_ids": slots.whole.input_ids, "attention_mask": slots.whole.attention_mask}
    aligner.generation_config.eos_token_id = None
    expected = aligner.generate(**inputs, **slots.slots, max_new_tokens=5, do_sample=False)
    for model in models:
        decoding = Decoding(model, slots.whole, read["adaptive"])
        decoding.restart()
        with torch.no_grad():
            for _ in range(4):
                decoding.step()
        assert torch.equal(decoding.ids.input_ids, expected)
    assert read["adaptive"].cache.get_seq_length() == slots.whole.input_ids.shape[1]


# Prompts


def test_slots_are_read_as_the_aligner_reads_them(models, prompts, read):
    slots = prompts[1]
    inputs = {"input_ids": slots.whole.input_ids, "attention_mask": slots.whole.attention_mask}
    with torch.no_grad():
        expected = models[0](**inputs, **slots.slots, gate_mode="off", logits_to_keep=1).logits[:, -1]
    assert torch.equal(read["off"].tokens, expected.argmax(dim=-1))


@pytest.fixture
def rows(processor):
    return pick_rows(question_rows(6), processor, k=3, batch_size=2)


@pytest.mark.parametrize("rate", [None, 4])
def test_both_prompts_are_those_of_the_evaluation(processor, rows, rate):
    encoded = encoded_slots(processor, rows, rate)
    text, slots = both_prompts(processor, rows, encoded)
    expected = text_inputs(processor, [full_text(row) for row in rows])
    assert torch.equal(text.whole.input_ids, expected["input_ids"])
    assert torch.equal(text.whole.attention_mask, expected["attention_mask"])
    expected = slot_inputs(processor, rows, tokens_per_slot=rate)
    assert torch.equal(slots.whole.input_ids, expected["input_ids"])
    assert torch.equal(slots.whole.attention_mask, expected["attention_mask"])
    torch.testing.assert_close(slots.slots["context_embeds"], expected["context_embeds"])


def test_prefix_and_tail_are_the_whole_prompt_with_the_same_positions(processor, rows):
    for prompts in both_prompts(processor, rows, encoded_slots(processor, rows)):
        joined = prompts.prefix.then(prompts.tail)
        for row in range(len(rows)):
            whole, parts = prompts.whole.attention_mask[row].bool(), joined.attention_mask[row].bool()
            assert torch.equal(prompts.whole.input_ids[row, whole], joined.input_ids[row, parts])
            assert torch.equal(prompts.whole.position_ids[row, whole], joined.position_ids[row, parts])
        assert bool(prompts.prefix.attention_mask[:, -1].all()) and bool(prompts.tail.attention_mask[:, -1].all())
        assert not prompts.slots or (prompts.prefix.input_ids[:, -1] == processor.context_token_id).all()


def test_rows_take_the_passages_nearest_in_length_and_the_question_of_the_first(processor):
    texts = {f"{size}?": " ".join(["sky"] * size) for size in (1, 50, 400, 60, 55)}
    rows = [{"question": each, "passages": [{"title": "", "text": text}]} for each, text in texts.items()]
    tokens = [len(processor.tokenizer(row["passages"][0]["text"])["input_ids"]) for row in rows]
    nearest = sorted(range(5), key=lambda index: abs(tokens[index] - 150))[:3]
    picked = pick_rows(rows, processor, k=2, batch_size=2)
    passages = [rows[index]["passages"][0] for index in nearest]
    assert [row["passages"] for row in picked] == [passages[:2], passages[1:]]
    assert [row["question"] for row in picked] == [rows[index]["question"] for index in nearest[:2]]


def test_too_few_passages_are_refused(processor):
    with pytest.raises(ValueError, match="Found 3 passages with a question; 4 passages in a prompt need"):
        pick_rows(question_rows(3), processor, k=4, batch_size=1)
