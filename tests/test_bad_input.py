"""Bad input to the model is refused with an error that names both sides and the remedy, and changes nothing."""

import copy
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import edit_json
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from test_training_properties import SETTINGS, save_base_model
from tiny_models import ENCODER_HIDDEN_SIZE, VOCAB_SIZE, backbone_config, collate, random_rows, tiny_aligner
from transformers import DynamicCache, GenerationConfig

from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.loading_arcaligner import AlignerMixin
from arcaligner.modeling_arcaligner import ADAPTER_NAME, ArcAlignerForCausalLM, slot_lora_layers

SLOT = VOCAB_SIZE
IDS = torch.tensor([[5, 6, SLOT, SLOT, SLOT, SLOT, 7, 8]])
EMBEDS = torch.randn(1, 4, ENCODER_HIDDEN_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORDS = torch.tensor([[[1, 2, -1], [3, -1, -1], [4, 4, 4], [5, -1, -1]]])
GOOD = {"input_ids": IDS, "context_embeds": EMBEDS}


@pytest.fixture(scope="module")
def model():
    return tiny_aligner("llama", encoder_name_or_path="some/encoder")


def assert_refused(model, message, **batch):
    """Asserts that each way to call the model refuses a batch (TRL calls the inner model, not our forward)."""
    for call in (model, model.model, partial(model.generate, max_new_tokens=2)):
        with pytest.raises(ValueError, match=message):
            call(**batch)


# Ids, slots and embeddings that do not fit

NOT_FINITE = r"`context_embeds` has NaN or absolute values above 1,000,000 in 1 of 4 slots, first in slot 2 of row 0"
FOUR_SLOTS = r"(?s)`input_ids`.*\[4\] slots.*`context_embeds` has "
NO_EMBEDS = r"`input_ids` has slots \(the `context_token_id` 61\), but `context_embeds` is missing.*processor"
TOO_LONG = r"(?s)prompt has 129 positions.*\(of type `llama`\) supports at most 128.*(fewer or shorter passages)"
ONE_SLOT = {"input_ids": torch.tensor([[SLOT]]), "context_embeds": None}
ONE = torch.zeros_like(EMBEDS, dtype=torch.bool)
ONE[0, 2, 5] = True


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context_embeds": EMBEDS[:, :3]}, FOUR_SLOTS + "3"),
        ({"context_embeds": EMBEDS[:, [0, 1, 2, 3, 3]]}, FOUR_SLOTS + "5"),
        ({"context_embeds": None}, NO_EMBEDS),
        (
            {"context_embeds": EMBEDS[..., :7]},
            "have 7 dimensions; expected 10, the `encoder_hidden_size`.*some/encoder",
        ),
        ({"context_embeds": EMBEDS.expand(2, -1, -1)}, r"(?s)\(2, 4, 10\).*\(1, max_slots, 10\)"),
        (
            {"context_embeds": EMBEDS.to(torch.float8_e4m3fn)},
            "of type torch.float8.*expected a tensor of floating-point",
        ),
        *(({"context_embeds": EMBEDS.masked_fill(ONE, n)}, NOT_FINITE) for n in (float("nan"), float("inf"), -1e38)),
        ({"input_ids": IDS.clamp(max=SLOT - 1)}, r"(?s)\[0\] slots.*has 4"),
        ({name: torch.cat([rows, rows]) for name, rows in GOOD.items()} | {"context_embeds": None}, NO_EMBEDS),
        ({"input_ids": IDS - 99}, "`input_ids` has the id -.*; expected ids from 0 to 60, or 61"),
        (
            {"input_ids": IDS[:, :2] + SLOT, "context_embeds": None},
            "`input_ids` has the id 66; expected ids from 0 to 60",
        ),
        (ONE_SLOT | {"past_key_values": DynamicCache()}, NO_EMBEDS),
        ({"input_ids": torch.cat([IDS, torch.full((1, 121), 5)], dim=1)}, TOO_LONG),
        (dict.fromkeys(("cache", "past_key_values"), DynamicCache()), "both `past_key_values` and `cache`.*only one"),
        ({"context_word_ids": WORDS}, "`config.word_parts` is 0"),
    ],
)
def test_misfit_batch_leaves_no_trace(model, change, message):
    """A batch that does not fit is refused and leaves no trace."""
    before = model(**GOOD).logits
    assert_refused(model, message, **GOOD | change)
    assert torch.equal(model(**GOOD).logits, before)


def test_prompt_may_fill_the_context(model):
    """A prompt may be as long as the context, and so may text alone."""
    model(**GOOD | {"input_ids": torch.cat([IDS, torch.full((1, 120), 5)], dim=1)})
    with pytest.raises(ValueError, match=TOO_LONG):  # before anything is computed
        model.generate(torch.full((1, 129), 5), max_new_tokens=2)


def test_embedding_padding_is_ignored():
    """The content of padding in `context_embeds` changes neither logits nor gradients."""
    model = tiny_aligner("llama").train()
    batch, trained = collate(random_rows(model, [2, 0, 5]), "left"), [p for _, p in model.aligner_parameters()]
    results = []
    for padding in (0.0, 3.0, float("nan")):
        batch["context_embeds"][0, 2:] = batch["context_embeds"][1] = padding
        output = model(**batch)
        results.append([output.logits.detach(), *torch.autograd.grad(output.loss, trained, allow_unused=True)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


LABELS = {
    -1: "has the id -1; expected ids from 0 to 60",
    SLOT + 1: "has the id 62",
    0.5: "is a tensor of dtype torch.float32, .* and shape",
}


@pytest.mark.parametrize("value", LABELS)
def test_labels_beyond_the_vocabulary(model, value):
    for skip_logits in (True, False):
        with pytest.raises(ValueError, match="`labels` " + LABELS[value]):
            model(**GOOD, labels=torch.full(IDS.shape, value), skip_logits=skip_logits)


def test_inputs_embeds_exclude_ids(model):
    words = model.get_input_embeddings()(IDS.clamp(max=SLOT - 1))
    for call in (model, model.model):
        with pytest.raises(ValueError, match=r"(?s)`?inputs_embeds`?.*`?input_ids`?"):
            call(inputs_embeds=words, **GOOD)
        with pytest.raises(ValueError, match=r"(?s)`context_embeds` without `input_ids`.*context_token_id` 61"):
            call(inputs_embeds=words, context_embeds=EMBEDS)


@pytest.mark.parametrize(
    "words, message",
    [
        (WORDS + SLOT, f"has the id {SLOT + 1}; expected ids from 0 to {VOCAB_SIZE - 1}, or -1"),
        (torch.full_like(WORDS, SLOT), f"has the id {SLOT}; expected ids from 0 to {VOCAB_SIZE - 1}"),
        (WORDS - 1, "has the id -2; expected ids from 0"),
        *((WORDS.to(kind), f"is a tensor of dtype {kind}") for kind in (torch.int16, torch.bool, torch.float64)),
        (WORDS.to_sparse(), r"torch.int64, layout torch.sparse_coo.*expected a dense tensor"),
        (WORDS.to("meta"), "expected a dense tensor"),
        (
            WORDS.tolist(),
            r"is of type list; expected a dense tensor of dtype int64 or int32, of shape \(1, 4, max_words\)",
        ),
        (WORDS[0], r"shape \(4, 3\); expected .* \(1, 4, max_words\)"),
        (WORDS[:, :2], r"shape \(1, 2, 3\); expected \(1, 4, max_words\)"),
        (None, r"is missing, but .*\(`config.word_parts` is 2\)"),
    ],
)
def test_slot_words_are_checked(words, message):
    reader = tiny_aligner("llama", word_parts=2)
    assert_refused(reader, "`context_word_ids` .*" + message, **GOOD, context_word_ids=words)
    assert torch.equal(*(reader(**GOOD, context_word_ids=ids).logits for ids in (WORDS, WORDS.int())))


def test_late_slots_are_refused(model):
    """Slots after a cache and in chunks are refused, and the cache is unchanged."""
    second, cache = {"input_ids": IDS[:, 2:4], "context_embeds": EMBEDS[:, :2]}, DynamicCache()
    with torch.no_grad():
        model(**GOOD, past_key_values=cache, use_cache=True)
        keys = cache.layers[0].keys.clone()
        for call in (model, model.model):
            with pytest.raises(ValueError, match=r"slots after 8 cached tokens, .*only the tokens after"):
                call(**second, past_key_values=cache, use_cache=True)
        both = {name: torch.cat([GOOD[name], second[name]], dim=1) for name in GOOD}
        for more in (both, both | {"context_embeds": second["context_embeds"]}, {"input_ids": both["input_ids"]}):
            with pytest.raises(ValueError, match=r"slots after 8 cached tokens|slots \(context tokens|has slots"):
                model.generate(**more, past_key_values=cache, max_new_tokens=2)
    assert torch.equal(cache.layers[0].keys, keys)
    with pytest.raises(ValueError, match=r"(?s)`prefill_chunk_size`.*chunks.*Leave `prefill_chunk_size` out"):
        model.generate(**GOOD, prefill_chunk_size=4, max_new_tokens=2)
    with pytest.raises(ValueError, match="`prefill_chunk_size` is 4.* Set it to None in the generation config"):
        model.generate(**GOOD, generation_config=GenerationConfig(prefill_chunk_size=4, max_new_tokens=2))


# Adapters and configurations


def test_lora_cannot_be_merged(model):
    before, layers = copy.deepcopy(model.state_dict()), list(slot_lora_layers(model))
    for layer in layers:
        with pytest.raises(ValueError, match=r"(?s)`slot`.*cannot be merged.*slots only.*text"):
            layer.merge()
    assert layers and not layers[0].merged
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_other_peft_adapter_is_refused(model):
    """Another PEFT adapter is refused on top of the slots' LoRA, and may be merged below it."""
    with_adapter = get_peft_model(tiny_aligner(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PEFT adapters: \['default'\]; expected only 'slot'.*no `peft_config`"):
        with_adapter(**GOOD)
    merged = tiny_aligner()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), merged, "other")
    for layer in slot_lora_layers(merged):
        if "other" in layer.lora_A:
            layer.merge(adapter_names=["other"])
        layer.set_adapter([ADAPTER_NAME])
    with pytest.raises(ValueError, match=r"PEFT adapters: \['slot', 'other'\]; expected only"):
        merged(**GOOD)


@pytest.mark.parametrize(
    "settings, message",
    [
        *(({"gate_layers": [layer]}, rf"(?s)`gate_layers` is \[{layer}\].*0 to 2") for layer in (3, -1)),
        ({"gate_layers": "some"}, r"(?s)`gate_layers`.*'some'.*\"all\""),
        ({"gate_threshold": 1.5}, "`gate_threshold` is 1.5; expected a probability above 0 and at most 1"),
        ({"lora_r": "eight"}, r"(?s)lora_r.*eight"),
        ({"lora_r": -1}, "`lora_r` is -1; expected a rank of at least 1, or 0"),
    ],
)
def test_impossible_configuration(settings, message):
    with pytest.raises(Exception, match=message):
        ArcAlignerConfig(text_config=backbone_config("llama"), **settings)


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path):
    """An aligner-only checkpoint and the base model it names."""
    save_base_model(tmp_path / "base")
    ArcAlignerForCausalLM.from_pretrained(tmp_path / "base", **SETTINGS).save_pretrained(tmp_path / "aligner")
    names = load_file(tmp_path / "aligner" / "model.safetensors")
    assert not any("base_layer" in name or "embed" in name for name in names)
    return tmp_path


def load_another_way(*args, **kwargs):
    """`from_pretrained` with a transformers whose loader does not call the private method that we override."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(AlignerMixin, "_load_pretrained_model")
        return ArcAlignerForCausalLM.from_pretrained(*args, **kwargs)


def test_misfit_checkpoints_are_refused(checkpoint):
    """A checkpoint for another encoder or backbone is refused, and so is one that does not exist."""
    load = partial(ArcAlignerForCausalLM.from_pretrained, checkpoint / "aligner")
    with pytest.raises(ValueError, match=r"(?s)width 12.*projector\.up\.weight.*\[24, 10\].*\[24, 12\]"):
        load(encoder_hidden_size=12)
    with pytest.raises(OSError, match="(?s)base model.*nobody/nothing.*hf download"):
        load(base_model_name_or_path="nobody/nothing")
    for backbone, changes in (("llama", {"hidden_size": 32}), ("llama", {"num_hidden_layers": 4}), ("qwen2", {})):
        shutil.rmtree(checkpoint / "base")
        save_base_model(checkpoint / "base", backbone, **changes)
        with pytest.raises(
            ValueError, match="base model .* is not the one that this aligner was trained for: it has .*; expected "
        ):
            load()


@pytest.mark.parametrize("load", [ArcAlignerForCausalLM.from_pretrained, load_another_way])
def test_incomplete_base_model_is_refused(checkpoint, load):
    tensors = load_file(checkpoint / "base" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"(?s)base.*layers\.1\.mlp\.up_proj"):
        load(checkpoint / "aligner")


@pytest.mark.parametrize("with_base, options", [(False, {}), (True, {"dtype": torch.bfloat16, "device_map": "cpu"})])
def test_other_loader_loads_the_same(checkpoint, tmp_path, with_base, options):
    """A version of transformers that loads weights in another way gives the same model."""
    folder = checkpoint / "aligner"
    if with_base:
        ArcAlignerForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "whole", save_base_model=True)
        folder = tmp_path / "whole"
    edit_json(folder / "generation_config.json", top_k=7)
    loads = (load_another_way, ArcAlignerForCausalLM.from_pretrained)
    loaded, expected = (load(folder, gate_threshold=0.3, **options) for load in loads)
    torch.testing.assert_close(loaded.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in expected.parameters()]
    files = []
    for model in (loaded, expected):
        model.save_pretrained(tmp_path / "again")
        files.append({path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()})
    assert files[0] == files[1] and loaded.config.gate_threshold == 0.3


def test_other_loader_cannot_quantize(checkpoint):
    """Such a version also loads a base model, and refuses to quantize one."""
    loaded, info = load_another_way(checkpoint / "base", output_loading_info=True, **SETTINGS)
    expected = ArcAlignerForCausalLM.from_pretrained(checkpoint / "base", **SETTINGS)
    of_base = {name: weight for name, weight in expected.state_dict().items() if not expected.is_aligner_key(name)}
    assert of_base and all(torch.equal(loaded.state_dict()[name], weight) for name, weight in of_base.items())
    assert not of_base.keys() & info["missing_keys"]
    expected.hf_quantizer = object()
    with pytest.raises(
        RuntimeError, match=r"with transformers [\d.]+, which loads weights in a way .* without quantization"
    ):
        ArcAlignerForCausalLM._load_state_dict(expected, str(checkpoint / "aligner"), {})


@pytest.mark.parametrize("library", ["transformers", "peft", "sentence-transformers"])
def test_old_library_is_named(library):
    """A library that is too old is named, with the version that is needed."""
    code = f"""
import importlib.metadata, transformers
found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.9.0" if name == {library!r} else found(name)
import arcaligner.modeling_arcaligner
"""
    errors = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    needed = rf"{library}>=[\d.]+"
    assert re.search(rf"\nImportError: {needed} is required .*, but found {library}==0.9.0.", errors)
    assert re.search(rf'\nRun `pip install "{needed}"`', errors)
