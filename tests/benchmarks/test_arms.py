"""The arms of the latency benchmark: what must read the same does, whatever was made before."""

import pytest
import torch
from conftest import processor_with
from training_rows import question_rows

from arcaligner.benchmarks.arms import (
    Decoding,
    both_prompts,
    cache_bytes,
    join_rows,
    load_models,
    make_arms,
    pick_rows,
)
from arcaligner.evaluation.answering import slot_inputs, text_inputs
from arcaligner.train.prompts import full_text

# What must read the same as another arm, up to the rounding of differently shaped products.
SAME_AS = {"standard_rag_cached": "standard_rag", "slots_cached": "adaptive"}


@pytest.fixture(scope="module", params=["joint", "separate"])
def attention(request):
    return request.param


@pytest.fixture(scope="module")
def models(checkpoint_dir, attention):
    return load_models(str(checkpoint_dir), torch.float64, "cpu", passage_attention=attention)


@pytest.fixture(scope="module")
def prompts(models, processor, attention):
    """Prompts with text and with slots, which are as exact as the models."""
    processor = processor_with(processor, passage_attention=attention)
    found = both_prompts(models[0], processor, join_rows(pick_rows(question_rows(6), processor, 3)))
    found[1].slots["context_embeds"] = found[1].slots["context_embeds"].double()
    return found


@pytest.fixture(scope="module")
def read(models, prompts):
    """What each arm reads."""
    arms, _ = make_arms(*models, *prompts)
    with torch.no_grad():
        return {name: arm() for name, arm in arms.items()}


def states(found):
    """Keys and values of all layers."""
    return torch.stack([tensor for layer in found.cache.layers for tensor in (layer.keys, layer.values)])


@pytest.mark.parametrize(("name", "other"), SAME_AS.items())
def test_cached_arms_read_what_their_counterparts_read(name, other, read):
    assert torch.equal(read[name].token, read[other].token)
    torch.testing.assert_close(states(read[name]), states(read[other]))


def test_a_budget_takes_steps_away_and_adds_none(read):
    budgeted, adaptive = (read[name].recursion_depth for name in ("budgeted", "adaptive"))
    assert (budgeted <= adaptive).all() and 0 < budgeted.sum() < adaptive.sum()


def test_the_bare_model_reads_the_text(models, processor, read):
    own = models[0].model.backbone.layers[0].mlp.up_proj.base_layer.weight
    assert models[1].model.layers[0].mlp.up_proj.weight.data_ptr() == own.data_ptr()  # both read the same memory
    assert not any("lora" in name for name, _ in models[1].named_parameters())
    row = join_rows(pick_rows(question_rows(6), processor, 3))
    with torch.no_grad():
        expected = models[1](**text_inputs(processor, [full_text(row)])).logits[:, -1].argmax(dim=-1)
    assert torch.equal(read["standard_rag"].token, expected)


def test_an_arm_leaves_the_models_and_the_prefix_as_they_were(models, prompts):
    arms, prefixes = make_arms(*models, *prompts)
    before = {name: (cache_bytes(cache), cache.get_seq_length()) for name, cache in prefixes.items()}
    gate_mode = models[0].config.gate_mode
    with torch.no_grad():
        for arm in arms.values():
            arm()
    assert {name: (cache_bytes(cache), cache.get_seq_length()) for name, cache in prefixes.items()} == before
    assert models[0].config.gate_mode == gate_mode


def test_both_models_decode_from_the_aligners_cache_as_generate_does(models, prompts, read):
    aligner, slots = models[0], prompts[1]
    aligner.generation_config.eos_token_id = None
    asked = {"input_ids": slots.ids, "attention_mask": torch.ones_like(slots.ids), **slots.slots}
    expected = aligner.generate(**asked, max_new_tokens=5, do_sample=False)
    for model in models:
        decoding = Decoding(model, slots, read["adaptive"])
        decoding.restart()
        with torch.no_grad():
            for _ in range(4):
                decoding.step()
        assert torch.equal(torch.stack(decoding.tokens, dim=1), expected[:, slots.ids.shape[1] :])
    assert read["adaptive"].cache.get_seq_length() == slots.ids.shape[1]


# Prompts


def test_slots_are_read_as_the_aligner_reads_them(models, prompts, read):
    with torch.no_grad():
        expected = models[0](prompts[1].ids, **prompts[1].slots, gate_mode="off", logits_to_keep=1).logits[:, -1]
    assert torch.equal(read["off"].token, expected.argmax(dim=-1))


def test_prompts_are_those_of_the_evaluation_cut_where_the_question_begins(models, processor):
    row = join_rows(pick_rows(question_rows(6), processor, 3))
    text, slots = both_prompts(models[0], processor, row, 4)
    assert torch.equal(text.ids, text_inputs(processor, [full_text(row)])["input_ids"])
    expected = slot_inputs(processor, [row], tokens_per_slot=4)
    assert torch.equal(slots.ids, expected["input_ids"])
    assert torch.equal(slots.slots["context_embeds"], expected["context_embeds"])
    assert (slots.prefix[0][:, -1] == processor.context_token_id).all()
    for prompt in (text, slots):
        assert torch.equal(prompt.tail[0], text.tail[0]) and processor.decode(prompt.tail[0][0]).count(row["question"])
        for number, whole in enumerate((prompt.ids, prompt.positions)):
            assert torch.equal(torch.cat([prompt.prefix[number], prompt.tail[number]], dim=1), whole)


def test_rows_take_the_passages_nearest_in_length_and_the_question_of_the_first(processor):
    texts = {f"{size}?": " ".join(["sky"] * size) for size in (1, 50, 400, 60, 55)}
    rows = [{"question": each, "passages": [{"title": "", "text": text}]} for each, text in texts.items()]
    tokens = [len(processor.tokenizer(row["passages"][0]["text"])["input_ids"]) for row in rows]
    nearest = [rows[index] for index in sorted(range(5), key=lambda index: abs(tokens[index] - 150))[:3]]
    assert pick_rows(rows, processor, 3) == nearest
    passages = [row["passages"][0] for row in nearest]
    assert join_rows(nearest) == {"question": nearest[0]["question"], "passages": passages}


def test_too_few_passages_are_refused(processor):
    with pytest.raises(ValueError, match="Found 3 passages with a question, but 4 are wanted"):
        pick_rows(question_rows(3), processor, 4)
