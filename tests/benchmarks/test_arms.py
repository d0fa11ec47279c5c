"""The arms of the latency benchmark: what must read the same does, whatever was made before."""

import pytest
import torch
from conftest import processor_with
from training_rows import question_rows

from arcaligner.benchmarks.arms import both_prompts, join_rows, load_models, make_arms, pick_rows
from arcaligner.evaluation.answering import slot_inputs, text_inputs
from arcaligner.train.prompts import full_text


@pytest.fixture(scope="module", params=["joint", "separate"])
def models(checkpoint_dir, request):
    return load_models(str(checkpoint_dir), torch.float64, "cpu", passage_attention=request.param)


@pytest.fixture(scope="module")
def row(processor):
    return join_rows(pick_rows(question_rows(6), processor, 3))


@pytest.fixture(scope="module")
def prompts(models, processor, row):
    """Prompts with text and with slots, which are as exact as the models."""
    own = processor_with(processor, passage_attention=models[0].config.passage_attention)
    found = both_prompts(models[0], own, row, 4)
    found[1].slots["context_embeds"] = found[1].slots["context_embeds"].double()
    return found


def states(found):
    """Keys and values of all layers."""
    return torch.stack([tensor for layer in found.cache.layers for tensor in (layer.keys, layer.values)])


@torch.no_grad()
def test_arms_read_what_the_models_read_also_from_what_is_kept_and_a_second_time(models, prompts, processor, row):
    aligner, base = models
    arms = make_arms(*models, *prompts)
    whole = base(**text_inputs(processor, [full_text(row)])).logits
    slots = aligner(prompts[1].ids, **prompts[1].slots, gate_mode="off", logits_to_keep=1).logits
    for _ in range(2):  # an arm leaves models and prefixes as they were
        read = {name: arm() for name, arm in arms.items()}
        assert torch.equal(read["standard_rag"].token, whole[:, -1].argmax(dim=-1))
        assert torch.equal(read["off"].token, slots[:, -1].argmax(dim=-1))
        for name, other in (("standard_rag_cached", "standard_rag"), ("slots_cached", "off")):
            assert torch.equal(read[name].token, read[other].token)
            torch.testing.assert_close(states(read[name]), states(read[other]))


def test_the_bare_model_reads_the_same_memory(models):
    own = models[0].model.backbone.layers[0].mlp.up_proj.base_layer.weight
    assert models[1].model.layers[0].mlp.up_proj.weight.data_ptr() == own.data_ptr()
    assert not any("lora" in name for name, _ in models[1].named_parameters())


def test_prompts_are_those_of_the_evaluation_cut_where_the_question_begins(prompts, processor, row):
    text, slots = prompts
    assert torch.equal(text.ids, text_inputs(processor, [full_text(row)])["input_ids"])
    expected = slot_inputs(processor, [row], tokens_per_slot=4)
    assert torch.equal(slots.ids, expected["input_ids"])
    assert torch.equal(slots.slots["context_embeds"], expected["context_embeds"].double())
    assert (slots.prefix[0][:, -1] == processor.context_token_id).all()
    for prompt in (text, slots):
        assert torch.equal(prompt.tail[0], text.tail[0]) and processor.decode(prompt.tail[0][0]).count(row["question"])
        for number, whole in enumerate((prompt.ids, prompt.positions)):
            assert torch.equal(torch.cat([prompt.prefix[number], prompt.tail[number]], dim=1), whole)


def test_rows_take_the_passages_nearest_in_length_and_the_question_of_the_first(processor):
    passages = [{"title": "", "text": " " + "?" * size} for size in (1, 140, 400, 151, 170)]  # of about as many tokens
    rows = [{"question": str(number), "passages": [each]} for number, each in enumerate(passages)]
    nearest = pick_rows(rows, processor, 3)
    assert nearest == [rows[3], rows[1], rows[4]]
    assert join_rows(nearest) == {"question": "3", "passages": [passages[3], passages[1], passages[4]]}
    with pytest.raises(ValueError, match="Found 5 passages with a question, but 6 are wanted"):
        pick_rows(rows, processor, 6)
