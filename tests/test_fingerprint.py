"""The fingerprint of a slot prefix: a change of anything that slots depend on changes its field."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import tiny_aligner

from arcaligner.encoder_arcaligner import PrecomputedSlots
from arcaligner.kv_cache_arcaligner import WatchedWeights, canonical_settings, passage_fingerprint, shared_fingerprint
from arcaligner.modeling_arcaligner import slot_lora_layers


def test_changes_of_slots_have_fields(model, processor, monkeypatch):
    """Each change that affects slots changes its own field of the fingerprint and no other."""
    store, encoder = model.passage_cache(processor), copy.deepcopy(processor.encoder.model)
    monkeypatch.setattr(type(processor.encoder), "model", encoder)
    other_tokenizer = copy.deepcopy(processor.tokenizer)
    other_tokenizer.add_tokens(["whole"])
    gate = next(parameter for name, parameter in model.aligner_parameters() if "slot_gate" in name)

    def fingerprint():
        return shared_fingerprint(model, processor, store.weights(["Ada wrote it."]))

    before = fingerprint()
    for field, change in {
        "gate_mode": lambda: setattr(model.config, "gate_mode", "always"),
        "gate_threshold": lambda: setattr(model.config, "gate_threshold", 0.7),
        "max_refinement_steps": lambda: setattr(model.config, "max_refinement_steps", 1),
        "aligner_weights": lambda: gate.detach().view(-1)[-1:].add_(1.0),
        "backbone_weights": lambda: model.get_input_embeddings().weight.detach()[0, 0].add_(1.0),
        "backbone": lambda: model.config.text_config.rope_parameters.update(rope_theta=2.0),
        "encoder_weights": lambda: next(encoder.parameters()).detach().add_(1.0),
        "encoder_reads": lambda: setattr(encoder, "max_seq_length", 9),
        "tokenizers": lambda: monkeypatch.setattr(processor, "tokenizer", other_tokenizer),
        "lora_alpha": lambda: setattr(model.config, "lora_alpha", 17),
        "encoder": lambda: monkeypatch.setattr(processor, "encoder_name_or_path", "another"),
        "sentences_per_segment": lambda: monkeypatch.setattr(processor, "sentences_per_segment", 3),
        "spacy_model": lambda: monkeypatch.setattr(processor, "spacy_model", "de"),
    }.items():
        change()
        after = fingerprint()
        assert [name for name in after if after[name] != before[name]] == [field]
        before = after
    model.to(torch.bfloat16)
    assert fingerprint()["backbone_weights"] != before["backbone_weights"]


def test_selection_keeps_the_fingerprint(model, processor):
    """Settings of the selection of passages do not change the fingerprint, so cached passages stay valid."""
    store = model.passage_cache(processor)
    before = shared_fingerprint(model, processor, store.weights([]))
    model.config.similarity_weight, model.config.scored_share, model.config.most_answerability = 3.0, 1.0, 0.9
    model.config.match_weight = 5.0
    assert shared_fingerprint(model, processor, store.weights([])) == before


def test_former_settings_keep_their_fingerprint(model, processor):
    """Values from before a setting existed are left out, so that files from then stay valid; others are named."""
    newer = {"lora_positions": "all", "passage_alignment": "end"}
    assert not newer.keys() & shared_fingerprint(model, processor, {}).keys()
    for name, value in newer.items():
        setattr(model.config, name, value)
        assert shared_fingerprint(model, processor, {})[name] == value


def test_used_tokenizer_is_the_same(model, processor):
    passages = ["Ada wrote it."]
    before = model.passage_cache(processor).weights(passages)
    for tokenizer in (processor.tokenizer, processor.encoder.model.tokenizer):
        tokenizer(["One.", "One, two."], padding="max_length", truncation=True, max_length=7)
    assert model.passage_cache(processor).weights(passages) == before


PASSAGE = {"title": "Ada", "text": "She wrote it."}
EMBEDS = torch.arange(24.0).view(2, 12)


def test_passages_differ_by_their_text():
    """Passages with other text or embeddings have other fingerprints; a score does not count."""
    variants = [[PASSAGE], ["She wrote it."], [PASSAGE | {"title": "Bob"}], [PASSAGE] * 2]
    variants += [[PASSAGE | {"text": "She wrote"}, " it."]]
    variants += [
        PrecomputedSlots(embeds, None) for embeds in (EMBEDS, EMBEDS + 1e-3 * (EMBEDS == 23), EMBEDS.view(4, -1))
    ]
    prints = [passage_fingerprint([1, 2], passages)["passages"] for passages in variants]
    assert len(set(prints)) == len(prints)
    for passages, same in (
        (variants[0], [PASSAGE | {"score": 0.3}]),
        (variants[5], PrecomputedSlots(EMBEDS.clone(), None)),
    ):
        assert passage_fingerprint([1, 2], passages) == passage_fingerprint([1, 2], same)
        assert passage_fingerprint([1, 2], passages)["prompt"] != passage_fingerprint([1], same)["prompt"]


def test_equal_settings_have_one_spelling():
    for settings, expected in [
        ({"max_slots": np.int64(2), "gate_threshold": 1}, {"max_slots": 2, "gate_threshold": 1.0}),
        ({"max_slots": None, "refinement_budget": float("inf"), "gate_mode": None}, {}),
        ({"refinement_budget": np.float32(0), "gate_mode": "always"}, {"gate_mode": "off"}),
        ({"max_slots": 3, "refinement_budget": 0.5}, {"max_slots": 3, "refinement_budget": 0.5}),
    ]:
        assert json.loads(json.dumps(canonical_settings(settings))) == expected


# Weights that are watched


def watched(model):
    return WatchedWeights(model, lambda name: "aligner" if model.is_aligner_key(name) else "backbone")


def sgd_step(model, weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight.requires_grad_()], lr=1.0).step()


def load(model, weight, **options):
    changed = next(name for name, parameter in model.named_parameters() if parameter is weight)
    model.load_state_dict({**model.state_dict(), changed: weight.detach() + 1}, **options)


WRITES = {
    "in place, a part": lambda model, weight: weight.detach().view(-1)[:1].add_(1.0),
    "other data": lambda model, weight: setattr(weight, "data", weight.detach() + 1),
    "an optimizer": sgd_step,
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda model, weight: load(model, weight, assign=True),
    "another type": lambda model, weight: model.float(),
    "there and back": lambda model, weight: model.to(torch.bfloat16).to(torch.float64),
    "an adapter added": lambda model, _: inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model, "other"),
    "LoRA switched off": lambda model, weight: next(slot_lora_layers(model)).enable_adapters(False),
    "LoRA scaled": lambda model, weight: next(slot_lora_layers(model)).scaling.update(slot=3.0),
    "a buffer": lambda model, weight: next(model.buffers()).add_(1.0),
}


@pytest.mark.parametrize("part", ["projector.up.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("write", WRITES)
def test_changed_weights_are_seen(write, part):
    """Each way to change a weight changes the mark and the digests."""
    model = tiny_aligner()
    watch = watched(model)
    before = watch.digests()
    model.generate(torch.arange(9)[None], max_new_tokens=2)
    assert watch.digests() is before == watched(copy.deepcopy(model)).digests()  # nothing was hashed again
    marked = watch.mark()
    assert watch.mark() == marked != watched(model).mark()  # a mark is valid in one object only
    WRITES[write](model, next(parameter for name, parameter in model.named_parameters() if part in name))
    assert watch.mark() != marked and watch.digests() != before
    assert watched(model).digests() == watch.digests()


@pytest.mark.parametrize("weight", [torch.ones(2, 2, device="meta"), torch.eye(2).to_sparse()])
def test_unwatchable_weight_is_refused(weight):
    """A weight whose changes cannot be detected is refused, and the error has its name."""
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(weight)
    with pytest.raises(ValueError, match="The weight `weight` is of type Parameter on .*cannot be detected"):
        WatchedWeights(model, str).digests()
