"""Generation with slots: all decoding methods of transformers work, and none takes a slot for a token."""

import copy
import importlib.util
import itertools
import pickle
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import ENCODER_HIDDEN_SIZE, VOCAB_SIZE, collate, for_generate, random_rows, tiny_aligner

from arcaligner import modeling_arcaligner

SIX_TOKENS = {"max_new_tokens": 6, "min_new_tokens": 6}
GREEDY = {**SIX_TOKENS, "do_sample": False}


@pytest.fixture(scope="module", params=[VOCAB_SIZE, VOCAB_SIZE - 1], ids=["id-outside-vocab", "id-inside-vocab"])
def model(request):
    return tiny_aligner("llama", dtype=torch.float32, context_token_id=request.param)


@pytest.fixture
def recorded():
    """A model for one test, whose attention can be recorded."""
    return tiny_aligner("llama", dtype=torch.float32, attn_implementation="eager")


def prompts(model, slot_counts, seed=0):
    return for_generate(collate(random_rows(model, slot_counts, seed=seed, contiguous=True, num_text=9), "left"))


# Hidden states and attention


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("method", [{"do_sample": False}, {"num_beams": 3, "num_return_sequences": 2}])
def test_hidden_states_per_layer(recorded, method, use_cache):
    """There is one hidden state per layer, although refinement applies a layer again."""
    batch = prompts(recorded, [3, 6, 0])
    length, num_layers = batch["input_ids"].shape[1], recorded.config.text_config.num_hidden_layers
    method = method | dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict_in_generate"), True)
    output = recorded.generate(**batch, **SIX_TOKENS, **method, use_cache=use_cache)
    for step, (hidden_states, attentions) in enumerate(zip(output.hidden_states, output.attentions, strict=True)):
        new = length if step == 0 else 1 if use_cache else length + step
        assert [h.shape[1] for h in hidden_states] == [new] * (num_layers + 1)
        assert [a.shape[2:] for a in attentions] == [(new, length + step)] * num_layers


def test_all_passes_are_recorded(recorded, monkeypatch):
    """If transformers has no such private variable, passes of the refinement are recorded too; nothing else differs."""
    spec = importlib.util.spec_from_file_location("arcaligner.another_way", modeling_arcaligner.__file__)
    another_way = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.utils.output_capturing", types.ModuleType("of_another_version"))
        spec.loader.exec_module(another_way)
    batch = prompts(recorded, [3, 6, 0])
    options = {"output_attentions": True, "gate_mode": "always", "max_refinement_steps": 2}
    expected = recorded(**batch, **options)
    for name in ("is_recording_outputs", "not_recording_outputs"):
        monkeypatch.setattr(modeling_arcaligner, name, getattr(another_way, name))
    output = recorded(**batch, **options)
    assert torch.equal(output.logits, expected.logits) and not another_way.is_recording_outputs()
    length = batch["input_ids"].shape[1]
    whole = [attention for attention in output.attentions if attention.shape[2:] == (length, length)]
    assert len(output.attentions) > len(expected.attentions) == recorded.config.text_config.num_hidden_layers
    assert all(any(torch.equal(attention, one) for one in whole) for attention in expected.attentions)


# No slot is a token


@pytest.mark.parametrize("ngram", [1, 2])
def test_assisted_decoding_equals_greedy_search(model, ngram):
    """Prompt lookup gives the greedy answer, even if the match is right before the slots."""
    batch, settings = prompts(model, [4]), {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    batch["input_ids"][0, -1] = batch["input_ids"][0, 2]
    expected = model.generate(**batch, **settings)
    lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": ngram}
    for helper in (lookup, {"assistant_model": model}):
        assert torch.equal(model.generate(**batch, **settings, **helper), expected)
    model.generate(**batch, **settings, **lookup, repetition_penalty=1.4)


PROCESSORS = [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"num_beams": 3, "repetition_penalty": 1.5}]
PROCESSORS += [{"bad_words_ids": [[4]], "sequence_bias": {(5,): 2.0}}]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_logits_processors_skip_slots(model, processor):
    """Logits processors get no slots among the text; a prompt of slots alone works, with a cache or without."""
    slots_only, seen = torch.full((1, 4), model.config.context_token_id), []
    embeds = torch.randn(1, 4, ENCODER_HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    options = SIX_TOKENS | processor | {"logits_processor": [lambda ids, scores: seen.append(ids) or scores]}
    for batch in (prompts(model, [4]), {"input_ids": slots_only, "context_embeds": embeds}):
        ids = model.generate(**batch, **options)
        new = ids[:, batch["input_ids"].shape[1] :]
        assert new.shape == (1, 6) and not (new == model.config.context_token_id).any()
        assert torch.equal(ids, model.generate(**batch, **options, use_cache=False))
    assert len(seen) == 4 * 6 and not any((ids == model.config.context_token_id).any() for ids in seen[:12])


# Other forms of input and output


def test_text_embeddings_equal_tokens(model):
    batch = prompts(model, [0, 0])
    ids = batch.pop("input_ids")
    words = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=words, **batch).logits, model(ids, **batch).logits, rtol=0, atol=0)
    answers, whole = model.generate(inputs_embeds=words, **batch, **GREEDY), model.generate(ids, **batch, **GREEDY)
    assert torch.equal(answers, whole[:, ids.shape[1] :])


@pytest.mark.parametrize("keep", [2, torch.tensor([1, 5]), torch.tensor([[0, 3], [2, 4], [1, 1]])])
def test_logits_to_keep_selects_positions(model, keep):
    batch = prompts(model, [3, 6, 0])
    every, kept = model(**batch).logits, model(**batch, logits_to_keep=keep).logits
    places = torch.tensor([-2, -1]) if isinstance(keep, int) else keep
    expected = [logits[row_places] for logits, row_places in zip(every, places.expand(3, 2), strict=True)]
    torch.testing.assert_close(kept, torch.stack(expected))


def test_copied_model_generates_the_same(model):
    batch = prompts(model, [3, 6, 0])
    expected = model.generate(**batch, **GREEDY)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again.generate(**batch, **GREEDY), expected)
        again.config.gate_mode = "off"
        assert not again(**batch).recursion_depth.clamp(min=0).any()
    assert model(**batch).recursion_depth.clamp(min=0).any()


@torch.no_grad()
def test_logits_do_not_copy_head(model):
    """The head gets a matrix: a batched product would copy the head, a third of the time to the first token."""
    dims = []
    hook = model.lm_head.register_forward_pre_hook(lambda head, inputs: dims.append(inputs[0].dim()))
    model(torch.randint(0, 50, (2, 7)), logits_to_keep=1)
    hook.remove()
    assert dims == [2]  # rows and features: one product


# Gates of one call, which work like those in the configuration and do not change it

OTHER_GATES = [
    {"gate_threshold": 0.7},
    {"max_refinement_steps": 1},
    {"gate_mode": "off"},
    {"gate_mode": "always", "max_refinement_steps": 3},
    {"gate_mode": "adaptive", "gate_threshold": 0.2, "max_refinement_steps": 4},
]


@pytest.mark.parametrize("gates", OTHER_GATES)
@pytest.mark.parametrize("method", [{}, {"use_cache": False}, {"num_beams": 3}])
def test_gates_of_generate(recorded, gates, method):
    """`generate` with other gates equals a configuration with these gates."""
    model, batch = recorded, prompts(recorded, [3, 6, 0])
    options = GREEDY | method | {"return_dict_in_generate": True, "output_logits": True}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    output = model.generate(**batch, **options, **gates)
    plain = model.generate(**batch, **options)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation_config)
    model.config.update(gates)
    expected = model.generate(**batch, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))
    assert not torch.equal(output.logits[0], plain.logits[0])


def test_threads_are_independent(model):
    """Threads with five batches, one of them text alone, each get the logits of their own gates."""
    settings = [*OTHER_GATES[:3], {}, {"refinement_budget": 0.3}]
    batches = [prompts(model, [count], seed=count) | settings[count] for count in range(5)]

    @torch.no_grad()
    def logits_of(batch):
        return model(**batch).logits

    expected = [logits_of(batch) for batch in batches]
    with ThreadPoolExecutor(5) as pool:
        results = list(pool.map(logits_of, batches * 12))
    assert all(torch.equal(logits, expected[number % 5]) for number, logits in enumerate(results))


NAN = float("nan")
IMPOSSIBLE = {
    "gate_mode": (["sometimes"], "expected one of adaptive, off, always"),
    "gate_threshold": ([0, 1.01, "0.5", NAN], "expected a probability above 0 and at most 1"),
    "max_refinement_steps": ([-1, 1.5], ".*whole number of at least 0"),
    "refinement_budget": ([-0.1, NAN, "10%", True], "expected a number of at least 0"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_settings_are_refused(model, name):
    """Impossible settings are refused, with slots and without."""
    values, message = IMPOSSIBLE[name]
    for batch in (prompts(model, [4]), {"input_ids": torch.tensor([[5, 6, 7]])}):
        for call, value in itertools.product((model, model.model, model.generate), values):
            with pytest.raises(ValueError, match=f"`{name}` is {value!r}; {message}"):
                call(**batch, **{name: value})
    with pytest.raises(ValueError, match="gate_treshold"):  # misspelt
        model.generate(**batch, gate_treshold=0.7)


@pytest.mark.parametrize("option", [{"encoder_repetition_penalty": 1.2}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_prompt_processors_see_text_only(model, option):
    """Logits processors that look into the prompt find text where slots are."""
    batch = for_generate(collate(random_rows(model, [4])))
    ids = model.generate(**batch, max_new_tokens=3, do_sample=False, **option)
    assert ids.shape == (1, batch["input_ids"].shape[1] + 3)
    assert (ids[:, batch["input_ids"].shape[1] :] < model.config.text_config.vocab_size).all()
