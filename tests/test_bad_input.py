"""Bad input to the model: each is refused by an error that names both sides and the remedy, and changes nothing."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from test_training_properties import SETTINGS, save_base_model
from tiny_models import ENCODER_HIDDEN_SIZE, VOCAB_SIZE, backbone_config, collate, random_row, random_rows, tiny_aligner
from transformers import DynamicCache

from arcaligner.checkpoint_arcaligner import AlignerCheckpointMixin
from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.layers_arcaligner import ADAPTER_NAME, slot_lora_layers
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM

SLOT = VOCAB_SIZE


@pytest.fixture(scope="module")
def model():
    return tiny_aligner("llama", encoder_name_or_path="some/encoder")


def inputs(model, num_slots=4):
    row = random_row(model, num_slots, contiguous=True)
    return {"input_ids": row.input_ids[None], "context_embeds": row.context_embeds[None]}


def entry_points(model):
    """The ways a batch reaches the model: all must refuse alike (TRL calls the inner model, never our forward)."""
    return (model, model.model, lambda **batch: model.generate(**batch, max_new_tokens=2))


def assert_refused(model, message, **batch):
    for call in entry_points(model):
        with pytest.raises(ValueError, match=message):
            call(**batch)


# --- Slots and embeddings that do not fit ---------------------------------------------------------


def with_value(value):
    def change(embeds):
        embeds = embeds.clone()
        embeds[0, 2, 5] = value
        return embeds

    return change


NOT_FINITE = r"`context_embeds` holds NaN or values beyond 1e\+06 in 1 of 4 slots, first in slot 2 of row 0"
FOUR_SLOTS = r"(?s)\b4\b.*context tokens.*`input_ids`.*`context_embeds`.*"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda embeds: embeds[:, :3], FOUR_SLOTS + r"\b3\b"),
        (lambda embeds: torch.cat([embeds, torch.ones_like(embeds[:, :1])], 1), FOUR_SLOTS + r"\b5\b"),
        (lambda embeds: None, r"(?s)\b4 context tokens \(id 61\).*`input_ids`.*no.*`context_embeds`.*processor"),
        (lambda embeds: embeds[..., :7], r"(?s)`context_embeds` is 7 wide.*`encoder_hidden_size` 10.*some/encoder"),
        (lambda embeds: embeds[0], r"(?s)\(4, 10\).*\(1, max_slots, 10\)"),
        (lambda embeds: embeds.expand(2, -1, -1), r"(?s)\(2, 4, 10\).*\(1, max_slots, 10\)"),
        (lambda embeds: embeds[None], r"(?s)\(1, 1, 4, 10\).*\(1, max_slots, 10\)"),
        (lambda embeds: embeds.to(torch.float8_e4m3fn), r"of type torch.float8_e4m3fn; expected a tensor of floats"),
        *((with_value(value), NOT_FINITE) for value in (float("nan"), float("inf"), -1e38)),
    ],
)
def test_embeddings_that_do_not_fit_the_slots(model, change, message):
    batch = inputs(model, 4)
    assert_refused(model, message, **batch | {"context_embeds": change(batch["context_embeds"])})


def test_embeddings_without_context_tokens(model):
    batch = inputs(model, 4)
    batch["input_ids"][batch["input_ids"] == SLOT] = 5
    assert_refused(model, r"(?s)\[0\] context tokens.*`context_embeds` holds 4", **batch)


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_padding_of_embeddings_is_never_read(value):
    """Rows with fewer slots than the fullest: what stands in their padding changes neither logits nor gradients."""
    model = tiny_aligner("llama").train()
    batch = collate(random_rows(model, [2, 0, 5]), "left")
    results = []
    for padding in (0.0, value):
        batch["context_embeds"][0, 2:] = batch["context_embeds"][1] = padding
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        results.append((output.logits.detach(), [p.grad.clone() for _, p in model.aligner_parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(first, second) for first, second in zip(results[0][1], results[1][1], strict=True))


def test_more_slots_than_embeddings_in_one_row_of_a_batch(model):
    batch = collate(random_rows(model, [2, 5]))
    del batch["labels"], batch["position_ids"]
    batch["input_ids"][0, :6] = SLOT
    assert_refused(model, r"(?s)\[(6|7|8), 5\].*context tokens.*`context_embeds`.*\b5\b", **batch)


@pytest.mark.parametrize("value", [-1, SLOT + 1])
def test_ids_and_labels_beyond_the_vocabulary(model, value):
    batch = inputs(model, 4)
    ids = batch["input_ids"].clone()
    ids[0, -1] = value
    expected = f"hold {value}; expected 0 to {VOCAB_SIZE - 1}"
    assert_refused(model, "`input_ids` " + expected, **batch | {"input_ids": ids})
    assert_refused(model, "`input_ids` " + expected, input_ids=ids[:, -2:])  # text alone
    for skip_logits in (True, False):
        with pytest.raises(ValueError, match="`labels` " + expected):
            model(**batch, labels=ids, skip_logits=skip_logits)
    with pytest.raises(ValueError, match=r"`labels` is a Tensor torch.float32, torch.strided, of shape"):
        model(**batch, labels=ids.float())


def test_one_context_token_alone_is_no_generated_token(model):
    alone = torch.tensor([[SLOT]])
    with pytest.raises(ValueError, match=r"1 context tokens \(id 61\)"):
        model(input_ids=alone, past_key_values=DynamicCache(config=model.config.text_config))
    with pytest.raises(ValueError, match=r"1 context tokens \(id 61\)"):
        model.generate(input_ids=alone, max_new_tokens=2)


def test_embeddings_of_words_need_a_mask_and_no_ids(model):
    batch = inputs(model, 4)
    words = model.get_input_embeddings()(batch["input_ids"].clamp(max=SLOT - 1))
    for call in (model, model.model):
        with pytest.raises(ValueError, match=r"(?s)`?inputs_embeds`?.*`?input_ids`?"):
            call(inputs_embeds=words, **batch)
        with pytest.raises(ValueError, match=r"(?s)`context_embeds` without `input_ids`.*context_token_id` 61"):
            call(inputs_embeds=words, context_embeds=batch["context_embeds"])


@pytest.fixture(scope="module")
def reader():
    """An aligner that reads words."""
    return tiny_aligner("llama", word_parts=2)


WORDS = torch.tensor([[[1, 2, -1], [3, -1, -1], [4, 4, 4], [5, -1, -1]]])


@pytest.mark.parametrize(
    "words, message",
    [
        (WORDS + SLOT, f"hold {SLOT + 1}; expected 0 to {VOCAB_SIZE - 1}, or one of"),
        (torch.full_like(WORDS, SLOT), f"hold {SLOT}; expected 0 to {VOCAB_SIZE - 1}"),
        (WORDS - 1, "hold -2; expected 0"),
        *((WORDS.to(kind), f"is a Tensor {kind}") for kind in (torch.int16, torch.uint8, torch.bool, torch.complex64)),
        *((WORDS.to(kind), f"is a Tensor {kind}") for kind in (torch.float16, torch.float64)),
        (WORDS.to_sparse(), r"torch.int64, torch.sparse_coo.*expected a dense tensor"),
        (WORDS.to("meta"), "expected a dense tensor"),
        (WORDS.tolist(), r"is a list; expected a dense tensor of int64 or int32 \(1, 4, max_words\)"),
        (WORDS[0], r"shape \(4, 3\); expected .* \(1, 4, max_words\)"),
        (WORDS[:, :2], r"shape \(1, 2, 3\); expected \(1, 4, max_words\)"),
        (None, "is missing: with `config.word_parts` 2"),
    ],
)
def test_words_of_slots_are_checked_as_ids_are(reader, words, message):
    batch = inputs(reader, 4)
    assert_refused(reader, "`context_word_ids` .*" + message, **batch, context_word_ids=words)
    with pytest.raises(ValueError, match=message):
        reader.prefill_context(**batch, context_word_ids=words)
    with torch.no_grad():
        found = [reader(**batch, context_word_ids=ids).logits for ids in (WORDS, WORDS.int())]
    assert torch.equal(*found)


def test_words_for_an_aligner_that_reads_none_are_refused(model):
    with pytest.raises(ValueError, match="`config.word_parts` is 0"):
        model(**inputs(model, 4), context_word_ids=WORDS)


# --- Prompts --------------------------------------------------------------------------------------


def test_prompt_longer_than_the_context_of_the_backbone(model):
    row = random_row(model, 4, num_text=125)
    message = r"(?s)prompt has 129 positions.*backbone llama reads 128.*(fewer or shorter passages)"
    assert_refused(model, message, input_ids=row.input_ids[None], context_embeds=row.context_embeds[None])
    text = torch.full((1, 129), 5)
    with pytest.raises(ValueError, match=message):
        model.generate(input_ids=text, max_new_tokens=2)  # before minutes are spent on it
    row = random_row(model, 4, num_text=124)
    model(input_ids=row.input_ids[None], context_embeds=row.context_embeds[None])


def test_slots_after_a_cache_are_refused_and_the_cache_is_kept(model):
    first, second = inputs(model, 4), inputs(model, 2)
    cache = DynamicCache()
    with torch.no_grad():
        model(**first, past_key_values=cache, use_cache=True)
        length, keys = cache.get_seq_length(), cache.layers[0].keys.clone()
        for call in (model, model.model):
            with pytest.raises(ValueError, match=rf"(?s)context tokens after {length} cached tokens.*plain text"):
                call(**second, past_key_values=cache, use_cache=True)
        both = {name: torch.cat([first[name], second[name]], dim=1) for name in first}
        for more in (both, both | {"context_embeds": second["context_embeds"]}, {"input_ids": both["input_ids"]}):
            with pytest.raises(ValueError, match=r"(?s)context tokens"):
                model.generate(**more, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == length and torch.equal(cache.layers[0].keys, keys)


def test_a_cache_by_both_of_its_names_is_refused(model):
    cache, both = DynamicCache(), inputs(model)["input_ids"][:, :1]
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match=r"both `past_key_values` and `cache`.*pass one"):
            call(input_ids=both, past_key_values=cache, cache=cache)


def test_prefill_in_chunks_is_refused(model):
    with pytest.raises(ValueError, match=r"(?s)`prefill_chunk_size`.*chunks.*unset"):
        model.generate(**inputs(model), prefill_chunk_size=4, max_new_tokens=2)


def test_prefilling_without_slots_or_rows_whose_slots_end_apart_is_refused(model):
    with pytest.raises(ValueError, match=r"(?s)\[-1\].*slots"):
        model.prefill_context(torch.ones(1, 5, dtype=torch.long), torch.zeros(1, 0, ENCODER_HIDDEN_SIZE))
    batch = collate(random_rows(model, [2, 5], contiguous=True))
    with pytest.raises(ValueError, match=r"(?s)last slots.*\[\d+, \d+\].*one row at a time"):
        model.prefill_context(batch["input_ids"], batch["context_embeds"], batch["attention_mask"])


@pytest.mark.parametrize("stop", ["input_ids", "context_embeds"])
def test_refused_call_leaves_no_trace(model, stop):
    """The next good call gives what it gave before."""
    good, bad = inputs(model, 4), inputs(model, 4)
    bad[stop] = bad[stop][:, 2:] if stop == "context_embeds" else torch.full_like(bad[stop], SLOT)
    with torch.no_grad():
        before = model(**good).logits
        with pytest.raises(ValueError):
            model(**bad)
        assert torch.equal(model(**good).logits, before)


# --- Merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_lora_cannot_be_merged(model, safe):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers
    for layer in layers:
        with pytest.raises(ValueError, match=r"(?s)`slot`.*cannot be merged.*slots only.*text"):
            layer.merge(safe_merge=safe)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    row = inputs(model)
    with torch.no_grad():
        assert not layers[0].merged and torch.isfinite(model(**row).logits).all()


# --- Configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"gate_layers": [0, 3]}, r"(?s)`gate_layers` is \[0, 3\].*0 to 2"),
        ({"gate_layers": [-1]}, r"(?s)`gate_layers` is \[-1\].*0 to 2"),
        ({"gate_layers": "some"}, r"(?s)`gate_layers`.*'some'.*\"all\""),
        ({"gate_threshold": 1.5}, r"(?s)`gate_threshold` is 1.5.*\(0, 1\]"),
        ({"gate_mode": "sometimes"}, r"(?s)sometimes"),
        ({"lora_r": "eight"}, r"(?s)lora_r.*eight"),
        ({"lora_r": -1}, "`lora_r` is -1; expected a rank, or 0"),
    ],
)
def test_impossible_configuration(settings, message):
    with pytest.raises(Exception, match=message):
        ArcAlignerConfig(text_config=backbone_config("llama"), **settings)


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """An aligner-only checkpoint and the base model it names."""
    save_base_model(tmp_path / "base")
    model = ArcAlignerForCausalLM.from_pretrained(tmp_path / "base", **SETTINGS)
    model.save_pretrained(tmp_path / "aligner")
    assert not any("base_layer" in name or "embed" in name for name in load_file(weights(tmp_path / "aligner")))
    return tmp_path


def weights(folder):
    return folder / "model.safetensors"


def edit_weights(folder, edit):
    tensors = load_file(weights(folder))
    edit(tensors)
    save_file(tensors, weights(folder), metadata={"format": "pt"})


def test_checkpoint_for_an_aligner_of_another_size(checkpoint):
    with pytest.raises(ValueError, match=r"(?s)aligner.*width 12.*projector\.up\.weight.*\[24, 10\].*\[24, 12\]"):
        ArcAlignerForCausalLM.from_pretrained(checkpoint / "aligner", encoder_hidden_size=12)


def test_checkpoint_whose_base_model_is_not_on_this_machine(checkpoint, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"(?s)base model.*nobody/nothing.*(download|offline|install)"):
        ArcAlignerForCausalLM.from_pretrained(checkpoint / "aligner", base_model_name_or_path="nobody/nothing")


OTHER_SIZES = [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}]


@pytest.mark.parametrize(
    "backbone, changes",
    [*(("llama", each) for each in OTHER_SIZES), ("qwen2", {}), ("gemma2", {})],
)
def test_checkpoint_for_another_backbone(checkpoint, backbone, changes):
    """The base model at the name in the configuration is not the one the aligner was trained around."""
    shutil.rmtree(checkpoint / "base")
    save_base_model(checkpoint / "base", backbone, **changes)
    with pytest.raises(ValueError, match=r"(?s)base.*llama"):
        ArcAlignerForCausalLM.from_pretrained(checkpoint / "aligner")


def test_base_model_that_lacks_weights(checkpoint):
    edit_weights(checkpoint / "base", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"(?s)base.*layers\.1\.mlp\.up_proj"):
        ArcAlignerForCausalLM.from_pretrained(checkpoint / "aligner")


def test_another_peft_adapter_on_top_is_refused(model):
    with_adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PEFT adapter \['default'\] is active.*without a `peft_config`"):
        with_adapter(**inputs(model, 4))


def test_another_peft_adapter_merged_below_is_refused():
    model = tiny_aligner("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model, "other")
    for layer in slot_lora_layers(model):
        if "other" in layer.lora_A:
            layer.merge(adapter_names=["other"])
        layer.set_adapter([ADAPTER_NAME])
    with pytest.raises(ValueError, match=r"PEFT adapter \['slot', 'other'\] is active or merged"):
        model(**inputs(model, 4))


@pytest.fixture
def load_another_way(monkeypatch):
    """`from_pretrained`, where transformers' loader does not call the private method that we have of it."""

    def load(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.delattr(AlignerCheckpointMixin, "_load_pretrained_model")
            return ArcAlignerForCausalLM.from_pretrained(*args, **kwargs)

    return load


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16, "device_map": "cpu"}])
def test_a_transformers_that_loads_weights_in_another_way_loads_the_same(
    checkpoint, tmp_path, load_another_way, with_base, options
):
    folder = checkpoint / "aligner"
    if with_base:
        ArcAlignerForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "whole", save_base_model=True)
        folder = tmp_path / "whole"
    expected = ArcAlignerForCausalLM.from_pretrained(folder, gate_threshold=0.3, **options)
    found = load_another_way(folder, gate_threshold=0.3, **options)
    for (name, first), (other, second) in zip(expected.state_dict().items(), found.state_dict().items(), strict=True):
        assert name == other and first.dtype == second.dtype and torch.equal(first, second), name
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert found.config.to_dict() == expected.config.to_dict() and found.config.gate_threshold == 0.3
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    found.save_pretrained(tmp_path / "again")
    expected.save_pretrained(tmp_path / "expected")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_a_base_model_is_loaded_another_way_too(checkpoint, load_another_way):
    found, info = load_another_way(checkpoint / "base", output_loading_info=True, **SETTINGS)
    expected = ArcAlignerForCausalLM.from_pretrained(checkpoint / "base", **SETTINGS)
    of_base = {name: weight for name, weight in expected.state_dict().items() if not expected.is_aligner_key(name)}
    assert of_base and all(torch.equal(found.state_dict()[name], weight) for name, weight in of_base.items())
    assert not of_base.keys() & info["missing_keys"]


def test_what_is_damaged_is_refused_another_way_too(checkpoint, load_another_way):
    edit_weights(checkpoint / "base", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"(?s)base.*layers\.1\.mlp\.up_proj"):
        load_another_way(checkpoint / "aligner")
    edit_weights(checkpoint / "aligner", lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    with pytest.raises(ValueError, match="NaN or infinite values"):
        load_another_way(checkpoint / "aligner")


def test_nothing_is_quantized_another_way(checkpoint):
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint / "aligner")
    model.hf_quantizer = object()
    with pytest.raises(RuntimeError, match=r"transformers [\d.]+ loads weights in another way .* without quantization"):
        ArcAlignerForCausalLM._load_state_dict(model, str(checkpoint / "aligner"), {})


def import_with(library, version):
    """The last two lines of what importing the model says where a library has another version."""
    code = f"""
import importlib.metadata, transformers
found = importlib.metadata.version
importlib.metadata.version = lambda name: {version!r} if name == {library!r} else found(name)
import arcaligner.modeling_arcaligner
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-2:]


@pytest.mark.parametrize("library", ["transformers", "peft", "sentence-transformers"])
def test_a_library_that_is_too_old_is_named_with_what_is_needed(library):
    error, remedy = import_with(library, "0.9.0")
    assert re.match(rf"ImportError: {library}>=[\d.]+ is required .*, but found {library}==0.9.0.", error)
    assert re.match(rf'Install what this aligner needs: pip install "{library}>=[\d.]+"', remedy)
