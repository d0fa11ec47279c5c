"""Generation with slots: every decoding method of transformers reads them once and never takes one for a token."""

import contextvars
import copy
import importlib.util
import pickle
import sys
import types
from threading import Thread

import pytest
import torch
from tiny_models import ENCODER_HIDDEN_SIZE, VOCAB_SIZE, collate, for_generate, random_rows, tiny_aligner
from torch.utils._python_dispatch import TorchDispatchMode

from arcaligner import base_model_arcaligner, layers_arcaligner

SIX_TOKENS = {"max_new_tokens": 6, "min_new_tokens": 6}


@pytest.fixture(scope="module", params=[VOCAB_SIZE, VOCAB_SIZE - 1], ids=["id-outside-vocab", "id-inside-vocab"])
def model(request):
    return tiny_aligner("llama", dtype=torch.float32, context_token_id=request.param)


def prompts(model, slot_counts, seed=0):
    return for_generate(collate(random_rows(model, slot_counts, seed=seed, contiguous=True, num_text=9), "left"))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "method", [{"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3, "num_return_sequences": 2}]
)
def test_hidden_states_and_attentions_are_recorded_once_per_layer(method, use_cache):
    """Refinement applies a layer again, which must not show as another layer."""
    model = tiny_aligner("llama", dtype=torch.float32, attn_implementation="eager")
    batch = prompts(model, [3, 6, 0])
    length, num_layers = batch["input_ids"].shape[1], model.config.text_config.num_hidden_layers
    recorded = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    output = model.generate(**batch, **SIX_TOKENS, **method, **recorded, use_cache=use_cache)
    for step, (hidden_states, attentions) in enumerate(zip(output.hidden_states, output.attentions, strict=True)):
        new = length if step == 0 else 1 if use_cache else length + step
        assert [h.shape[1] for h in hidden_states] == [new] * (num_layers + 1)
        assert [a.shape[2:] for a in attentions] == [(new, length + step)] * num_layers


def test_without_the_variable_of_transformers_all_passes_of_a_layer_are_recorded(monkeypatch):
    """Where the private variable is not found, refinement's passes are recorded as well; nothing else differs."""
    spec = importlib.util.spec_from_file_location("arcaligner.another_way", base_model_arcaligner.__file__)
    another_way = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.utils.output_capturing", types.ModuleType("of_another_version"))
        spec.loader.exec_module(another_way)
    model = tiny_aligner("llama", dtype=torch.float32, attn_implementation="eager")
    batch = prompts(model, [3, 6, 0])
    options = {"output_attentions": True, "gate_mode": "always", "max_refinement_steps": 2}
    expected = model(**batch, **options)
    for name in ("is_recording_outputs", "not_recording_outputs"):
        monkeypatch.setattr(layers_arcaligner, name, getattr(another_way, name))
    found = model(**batch, **options)
    assert torch.equal(found.logits, expected.logits)
    length = batch["input_ids"].shape[1]
    whole = [each for each in found.attentions if each.shape[2:] == (length, length)]
    assert len(found.attentions) > len(expected.attentions) == model.config.text_config.num_hidden_layers
    assert all(any(torch.equal(each, one) for one in whole) for each in expected.attentions)
    assert not another_way.is_recording_outputs()


def test_prompt_lookup_finds_what_greedy_search_finds(model):
    """Also when the last word stands right before the slots, which are then looked up as candidates."""
    batch = prompts(model, [4])
    batch["input_ids"][0, -1] = batch["input_ids"][0, 2]
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = model.generate(**batch, **settings)
    for ngram in (1, 2):
        found = model.generate(**batch, **settings, prompt_lookup_num_tokens=4, max_matching_ngram_size=ngram)
        assert torch.equal(found, expected)
    model.generate(**batch, **settings, prompt_lookup_num_tokens=4, repetition_penalty=1.4)


def test_assistant_with_slots_changes_nothing(model):
    batch = prompts(model, [4])
    expected = model.generate(**batch, **SIX_TOKENS, do_sample=False)
    assert torch.equal(model.generate(**batch, **SIX_TOKENS, do_sample=False, assistant_model=model), expected)


@pytest.mark.parametrize(
    "processor",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"num_beams": 3, "repetition_penalty": 1.5},
        {"bad_words_ids": [[4]], "sequence_bias": {(5,): 2.0}},
    ],
)
def test_logits_processors_work_on_prompts_of_slots(model, processor):
    """Also on a prompt without any text, which ends in a slot; with a cache and without."""
    slots_only = torch.full((1, 4), model.config.context_token_id)
    embeds = torch.randn(1, 4, ENCODER_HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    for batch in (prompts(model, [4]), {"input_ids": slots_only, "context_embeds": embeds}):
        found = model.generate(**batch, **SIX_TOKENS, **processor)
        new = found[:, batch["input_ids"].shape[1] :]
        assert new.shape == (1, 6) and not (new == model.config.context_token_id).any()
        assert torch.equal(found, model.generate(**batch, **SIX_TOKENS, **processor, use_cache=False))


def test_text_embeddings_generate_as_their_tokens_do(model):
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    embeds = model.get_input_embeddings()(ids)
    expected = model.generate(ids, **SIX_TOKENS, do_sample=False)[:, 9:]
    assert torch.equal(model.generate(inputs_embeds=embeds, **SIX_TOKENS, do_sample=False), expected)


@pytest.mark.parametrize("keep", [2, torch.tensor([1, 5]), torch.tensor([[0, 3], [2, 4], [1, 1]])])
def test_logits_are_kept_where_asked(model, keep):
    batch = prompts(model, [3, 6, 0])
    with torch.no_grad():
        every = model(**batch).logits
        kept = model(**batch, logits_to_keep=keep).logits
    if isinstance(keep, int):
        expected = every[:, -keep:]
    else:
        expected = every[:, keep] if keep.dim() == 1 else every[torch.arange(3)[:, None], keep]
    torch.testing.assert_close(kept, expected)


def test_copy_and_pickle_generate_the_same(model):
    batch = prompts(model, [3, 6, 0])
    expected = model.generate(**batch, **SIX_TOKENS, do_sample=False)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again.generate(**batch, **SIX_TOKENS, do_sample=False), expected)
        again.config.gate_mode = "off"
        assert not again(**batch).recursion_depth.clamp(min=0).any()
    assert model(**batch).recursion_depth.clamp(min=0).any()


def test_depths_are_recorded_in_a_thread_that_has_the_context_of_the_recorder(model):
    batch = prompts(model, [3, 6, 0])
    with model.recorded_depths() as depths:
        for target in (model.generate, contextvars.copy_context().run):
            thread = Thread(target=target, args=(model.generate,) * (target != model.generate), kwargs=batch)
            assert depths == []
            thread.start(), thread.join()
    assert torch.equal(depths[0], model(**batch).recursion_depth) and len(depths) == 1


class Products(TorchDispatchMode):
    """Notes the names of the matrix products inside that give one column for each word."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size, self.names = vocab_size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and result.shape[-1] == self.vocab_size:
            self.names.append(function.overloadpacket.__name__)
        return result


@torch.no_grad()
def test_one_row_of_logits_copies_no_weights_of_the_head():
    """A batched product would, of the whole frozen head: in bfloat16 a third of the time to the first token."""
    model = tiny_aligner("llama")
    ids = torch.randint(0, 50, (2, 7))
    with Products(model.lm_head.out_features) as products:
        kept = model(input_ids=ids, logits_to_keep=1).logits
    assert products.names == ["mm"]
    torch.testing.assert_close(kept, model(input_ids=ids).logits[:, -1:])


def test_slots_are_placed_by_a_mask_where_there_are_embeddings_and_no_tokens():
    """As with the tokens they stand for; what `inputs_embeds` has at a slot is not read."""
    model = tiny_aligner()
    batch = for_generate(collate(random_rows(model, [3, 0, 5]), "left"))
    ids = batch.pop("input_ids")
    context_mask = ids == model.config.context_token_id
    words = model.get_input_embeddings()(ids.masked_fill(context_mask, 7))
    placed = {**batch, "inputs_embeds": words, "context_mask": context_mask.long()}
    with torch.no_grad():
        expected, found = model(input_ids=ids, **batch), model(**placed)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    assert torch.equal(found.recursion_depth, expected.recursion_depth)
    for settings in ({}, {"num_beams": 2}):
        answers = model.generate(**placed, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings)
        whole = model.generate(ids, **batch, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings)
        assert torch.equal(answers, whole[:, ids.shape[1] :])
