"""Slot prefixes as files and in batches: read again they are what was computed, and a stock backbone continues them."""

import json
import re
import textwrap

import pytest
import torch
from conftest import ENCODER_WIDTH
from reference import stock_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import WINDOW, backbone_config, collate, float64_throughout, random_row, random_rows, tiny_aligner
from transformers import AutoModelForCausalLM, DynamicCache

from arcaligner import ArcAlignerForCausalLM, prefix_store_arcaligner
from arcaligner.prefix_store_arcaligner import (
    fingerprint_weights,
    join_slot_prefixes,
    load_slot_prefix,
    save_slot_prefix,
    slot_prefix_fingerprint,
    split_slot_prefixes,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
FINGERPRINT = {"base_model": "ours", "gate_threshold": 0.5, "passages": "abc"}


@pytest.fixture
def float64_model_code():
    with float64_throughout():
        yield


def prefix_and_tail(model, num_slots=4, seed=0):
    """A one-row prompt cut behind its last slot: the prefix's cache, its ids and the ids that follow."""
    row = random_row(model, num_slots, seed=seed, num_text=12, contiguous=True)
    length = int((row.input_ids == model.config.context_token_id).nonzero().max()) + 1
    cache = model.prefill_context(row.input_ids[None, :length], row.context_embeds[None])
    return cache, row, row.input_ids[None, length:]


def recipe() -> str:
    """The code of the module's docstring."""
    return textwrap.dedent(re.search(r"\n\n(    cache = (?:.*\n    )+.*\n)", prefix_store_arcaligner.__doc__).group(1))


def assert_same_cache(cache, expected):
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        for kept, kept_before in ((layer.keys, other.keys), (layer.values, other.values)):
            torch.testing.assert_close(kept, kept_before, rtol=0, atol=0)


@pytest.mark.usefixtures("float64_model_code")
@pytest.mark.parametrize("backbone", ["llama", "mistral_window", "qwen3", "gemma3_text", "cohere"])
def test_unmodified_backbone_continues_from_the_file(backbone, tmp_path):
    """By the recipe of the docstring, with nothing of ours."""
    model = tiny_aligner(backbone)
    cache, row, tail = prefix_and_tail(model, num_slots=7)
    path = tmp_path / "prefix.safetensors"
    save_slot_prefix(path, cache, FINGERPRINT)
    names = {
        "backbone": stock_model(model, torch.float64, "sdpa"),
        "path": path,
        "ids_behind_the_slots": tail,
        "safe_open": safe_open,
        "DynamicCache": DynamicCache,
    }
    with torch.no_grad():
        exec(compile(recipe(), "docstring", "exec"), names)  # noqa: S102
        whole = model(row.input_ids[None], context_embeds=row.context_embeds[None]).logits
    torch.testing.assert_close(names["logits"], whole[:, -tail.shape[1] :], **EXACT)


def test_base_model_of_its_own_repository_generates_from_the_file(checkpoint_dir, base_model_dir, processor, tmp_path):
    model = ArcAlignerForCausalLM.from_pretrained(str(checkpoint_dir), dtype=torch.float64).eval()
    backbone = AutoModelForCausalLM.from_pretrained(str(base_model_dir), dtype=torch.float64).eval()
    documents = ["It was written by Ada. Nobody knew how to read it aloud."]
    inputs = processor(text="Who wrote it?", documents=documents, return_tensors="pt")
    save_slot_prefix(tmp_path / "p", model.prefill_context(inputs["input_ids"], inputs["context_embeds"]), FINGERPRINT)
    cache = load_slot_prefix(tmp_path / "p", FINGERPRINT, backbone.config)
    tail = inputs["input_ids"][:, cache.get_seq_length() :]
    assert not (tail == processor.context_token_id).any()
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    answer = backbone.generate(tail, attention_mask=inputs["attention_mask"], past_key_values=cache, **settings)
    assert torch.equal(answer[:, tail.shape[1] :], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backbone", ["llama", "gemma2"])
def test_file_gives_back_what_was_saved(backbone, dtype, tmp_path):
    """Also a prefix longer than a window, which has dropped its first positions."""
    model = tiny_aligner(backbone, dtype=dtype)
    cache, _, _ = prefix_and_tail(model, num_slots=7)
    assert cache.get_seq_length() > WINDOW
    save_slot_prefix(tmp_path / "prefix.safetensors", cache, FINGERPRINT)
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.safetensors"]
    loaded = load_slot_prefix(tmp_path / "prefix.safetensors", FINGERPRINT, model.config.text_config)
    assert loaded.layers[0].keys.dtype == dtype
    assert_same_cache(loaded, cache)
    assert loaded.is_sliding == cache.is_sliding


def test_interrupted_save_leaves_the_former_file(monkeypatch, tmp_path):
    model = tiny_aligner()
    cache, _, _ = prefix_and_tail(model)
    path = tmp_path / "prefix.safetensors"
    save_slot_prefix(path, cache, FINGERPRINT)
    before = path.read_bytes()

    def broken_save(tensors, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(prefix_store_arcaligner, "save_file", broken_save)
    with pytest.raises(OSError, match="disk full"):
        save_slot_prefix(path, cache, FINGERPRINT)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# What a prefix was made with


@pytest.fixture
def fingerprint_of(model, processor):
    def get(prompt_ids=(1, 2, 3), passages=("Ada wrote it.",)):
        return slot_prefix_fingerprint(model, processor, list(prompt_ids), list(passages))

    return get


def test_every_field_of_a_fingerprint_is_compared(model, processor, fingerprint_of, tmp_path):
    inputs = processor(text="Who?", documents=["Ada wrote it."], return_tensors="pt")
    cache = model.prefill_context(inputs["input_ids"], inputs["context_embeds"])
    fingerprint = fingerprint_of()
    save_slot_prefix(tmp_path / "p", cache, fingerprint)
    assert_same_cache(load_slot_prefix(tmp_path / "p", fingerprint, model.config.text_config), cache)
    for field, value in fingerprint.items():
        expected = f"`{field}` {json.loads(json.dumps(value))!r}; expected 'other'. Use what it was made with"
        with pytest.raises(ValueError, match=re.escape(expected)):
            load_slot_prefix(tmp_path / "p", {**fingerprint, field: "other"}, model.config.text_config)
        lacking = {name: each for name, each in fingerprint.items() if name != field}
        if value is not None:
            with pytest.raises(ValueError, match=f"`{field}`"):
                load_slot_prefix(tmp_path / "p", lacking, model.config.text_config)


def test_what_changes_slots_changes_its_field(model, processor, fingerprint_of, monkeypatch):
    before = fingerprint_of()
    gate = next(parameter for name, parameter in model.aligner_parameters() if "slot_gate" in name)
    changes = {
        "gate_mode": lambda: setattr(model.config, "gate_mode", "always"),
        "gate_threshold": lambda: setattr(model.config, "gate_threshold", 0.7),
        "max_refinement_steps": lambda: setattr(model.config, "max_refinement_steps", 1),
        "aligner_weights": lambda: gate.data.view(-1)[-1:].add_(1.0),
        "backbone_weights": lambda: model.get_input_embeddings().weight.data[0, 0].add_(1.0),
        "lora_alpha": lambda: setattr(model.config, "lora_alpha", 17),
        "base_model_name_or_path": lambda: setattr(model.config, "base_model_name_or_path", "another"),
        "base_model_revision": lambda: setattr(model.config, "base_model_revision", "abc"),
        "encoder": lambda: monkeypatch.setattr(processor, "encoder_name_or_path", "another"),
        "sentences_per_segment": lambda: monkeypatch.setattr(processor, "sentences_per_segment", 3),
        "spacy_model": lambda: monkeypatch.setattr(processor, "spacy_model", "de"),
    }
    for field, change in changes.items():
        change()
        after = fingerprint_of()
        assert [name for name in after if after[name] != before[name]] == [field]
        before = after
    assert fingerprint_of(prompt_ids=[1, 2])["prompt"] != before["prompt"]
    model.to(torch.bfloat16)
    assert fingerprint_of()["dtype"] == "torch.bfloat16"


def test_rotary_settings_belong_to_the_backbone(model):
    before = fingerprint_weights(model)
    model.config.text_config.rope_parameters["rope_theta"] *= 2
    after = fingerprint_weights(model)
    assert after["backbone_weights"] != before["backbone_weights"]
    assert after["aligner_weights"] == before["aligner_weights"]


def test_passages_are_told_apart_by_what_is_read_of_them(fingerprint_of):
    passage = {"title": "Ada", "text": "She wrote it."}
    same = [{**passage, "score": 0.3, "id": 7}]
    others = [
        ["She wrote it."],
        [{**passage, "title": "Bob"}],
        [passage, passage],
        [{"title": "Ada", "text": "She wrote"}, " it."],
    ]
    expected = fingerprint_of(passages=[passage])["passages"]
    assert fingerprint_of(passages=same)["passages"] == expected
    assert expected not in [fingerprint_of(passages=other)["passages"] for other in others]


def test_embeddings_are_told_apart_by_values_and_shape(model, processor):
    embeds = torch.arange(2.0 * ENCODER_WIDTH).view(2, ENCODER_WIDTH)
    nudged = embeds.clone()
    nudged[1, -1] += 1e-3
    prints = [
        slot_prefix_fingerprint(model, processor, [1], each)["passages"]
        for each in (embeds, nudged, embeds.view(4, -1))
    ]
    assert len(set(prints)) == 3
    assert slot_prefix_fingerprint(model, processor, [1], embeds.clone())["passages"] == prints[0]


# Files that are refused


@pytest.fixture
def saved(tmp_path):
    model = tiny_aligner()
    save_slot_prefix(tmp_path / "prefix.safetensors", prefix_and_tail(model)[0], FINGERPRINT)
    return tmp_path / "prefix.safetensors"


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "no-header", "half-a-header", "a-byte-short"])
def test_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cannot be read.*Delete the file"):
        load_slot_prefix(saved, FINGERPRINT, backbone_config())


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "arcaligner-slot-prefix-0"}])
def test_file_of_another_format_is_refused(saved, metadata):
    save_file(load_file(saved), saved, metadata=metadata)
    with pytest.raises(ValueError, match="expected 'arcaligner-slot-prefix-1'"):
        load_slot_prefix(saved, FINGERPRINT, backbone_config())


@pytest.mark.parametrize("change", [{"num_hidden_layers": 2}, {"num_key_value_heads": 1}, {"head_dim": 16}])
def test_file_of_another_backbone_is_refused(saved, change):
    with pytest.raises(ValueError, match="Load it with the backbone it was made for"):
        load_slot_prefix(saved, FINGERPRINT, backbone_config(**change))


def test_prefix_longer_than_the_context_is_refused(saved):
    with pytest.raises(ValueError, match="has 8 positions but the backbone llama reads 7"):
        load_slot_prefix(saved, FINGERPRINT, backbone_config(max_position_embeddings=7))


def test_cache_of_several_rows_is_not_saved(tmp_path):
    model = tiny_aligner()
    cache, _, _ = prefix_and_tail(model)
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="has 2 rows"):
        save_slot_prefix(tmp_path / "prefix.safetensors", cache, FINGERPRINT)
    assert not list(tmp_path.iterdir())


# Batches


def test_prefixes_of_several_dtypes_do_not_make_a_batch():
    caches = [prefix_and_tail(tiny_aligner(dtype=dtype))[0] for dtype in (torch.float32, torch.bfloat16)]
    with pytest.raises(ValueError, match="torch.bfloat16 on cpu, torch.float32 on cpu; expected one"):
        join_slot_prefixes(caches, backbone_config())


@pytest.mark.parametrize("backbone", ["llama", "gemma2"])
def test_joined_prefixes_come_apart_again(backbone):
    model = tiny_aligner(backbone)
    prefixes = [prefix_and_tail(model, num_slots, seed=num_slots)[0] for num_slots in (1, 6, 3)]
    lengths = [prefix.get_seq_length() for prefix in prefixes]
    joined, mask = join_slot_prefixes(prefixes, model.config.text_config)
    assert mask.sum(1).tolist() == lengths and mask[:, -1].all()
    for prefix, again in zip(prefixes, split_slot_prefixes(joined, lengths, model.config.text_config), strict=True):
        assert_same_cache(again, prefix)


@pytest.mark.usefixtures("float64_model_code")
@pytest.mark.parametrize("backbone", ["llama", "mistral_window", "gemma2"])
def test_prefixes_prefilled_together_are_those_prefilled_alone(backbone):
    """Positions of a left-padded row are counted behind its padding."""
    model = tiny_aligner(backbone)
    rows = random_rows(model, [5, 2, 1], contiguous=True)
    for row in rows:
        row.input_ids = row.input_ids[: int((row.input_ids == model.config.context_token_id).nonzero().max()) + 1]
        row.labels = row.input_ids
    batch = collate(rows, "left")
    cache = model.prefill_context(batch["input_ids"], batch["context_embeds"], batch["attention_mask"])
    together = split_slot_prefixes(cache, [len(row.input_ids) for row in rows], model.config.text_config)
    for row, prefix in zip(rows, together, strict=True):
        alone = model.prefill_context(row.input_ids[None], row.context_embeds[None])
        for layer, expected in zip(prefix.layers, alone.layers, strict=True):
            torch.testing.assert_close(layer.keys, expected.keys, **EXACT)
            torch.testing.assert_close(layer.values, expected.values, **EXACT)
