"""A complete checkpoint loads; any other is refused with an error that names the changed part."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import edit_json, new_processor, random_aligner
from safetensors.torch import load_file, save_file

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor

CONFIG, PROCESSOR, WEIGHTS = "config.json", "processor_config.json", "model.safetensors"
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
ADAPTER, ADAPTER_CONFIG = "encoder/adapter_model.safetensors", "encoder/adapter_config.json"


def save_checkpoint(folder: Path, base_model_dir: Path, encoder_dir: Path, seed: int, **options) -> Path:
    """Saves a random aligner with token embeddings in its slots, and with a trained encoder."""
    processor = new_processor(base_model_dir, encoder_dir, context_words=True)
    for number, weight in enumerate(processor.train_encoder(lora_r=2)):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(100 * seed + number))
    random_aligner(base_model_dir, processor, seed, word_parts=2).save_pretrained(folder, **options)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, base_model_dir, encoder_dir) -> dict[str, Path]:
    """Three checkpoints: of the aligner alone, of the aligner with its base model, and of another training."""
    folder, models = tmp_path_factory.mktemp("saved"), (base_model_dir, encoder_dir)
    return {
        "aligner": save_checkpoint(folder / "aligner", *models, seed=2),
        "full": save_checkpoint(folder / "full", *models, seed=2, save_base_model=True),
        "other": save_checkpoint(folder / "other", *models, seed=3),
    }


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved["aligner"], tmp_path / "checkpoint")


def load(folder: Path) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """Model and processor, with the encoder, which is loaded on first use."""
    processor = ArcAlignerProcessor.from_pretrained(folder)
    processor.encoder.device = "cpu"
    assert processor.encoder.model is not None
    return ArcAlignerForCausalLM.from_pretrained(folder).eval(), processor


@torch.no_grad()
def first_logits(folder: Path) -> torch.Tensor:
    model, processor = load(folder)
    return model(**processor(text="Who wrote it?", documents=["It was Ada. So be it."], return_tensors="pt")).logits


def forget_digests(folder: Path) -> None:
    """Removes the digests of a checkpoint, which older versions did not save."""
    edit(folder / CONFIG, without("digests", "includes_base_model"))


# Ways to change a file: a function of its tensors or its JSON object, other content, or `None`, which removes it.


def edit(path: Path, change) -> None:
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    elif path.suffix == ".safetensors":
        save_file(change(load_file(path)), path, metadata={"format": "pt"})
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))


def fields(**changes):
    return lambda content: {**content, **changes}


def without(*parts):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def with_value(part, value):
    def change(tensors):
        next(tensor for name, tensor in tensors.items() if part in name).view(-1)[1] = value
        return tensors

    return change


def with_surplus_lora(tensors):
    name = next(name for name in tensors if "layers.0" in name and "lora_A" in name)
    return tensors | {name.replace("layers.0", "layers.7"): tensors[name].clone()}


def within(name, change):
    return lambda content: content | {name: change(content[name])}


def first_half(ids):
    return dict(list(ids.items())[: len(ids) // 2])


INFINITE, NAN = float("inf"), float("nan")
NOT_SAVED = "was changed after the aligner was saved"
# Name of a change -> the file, the change, and the error. Those in `CHECKABLE` are also refused without digests;
# changed weights of `FULL`, a checkpoint with its base model, get the same errors.
CHECKABLE = {
    "encoder cut": (ADAPTER, "cut", "adapter_model.safetensors cannot be read.*Download it again"),
    "encoder gone": (ADAPTER_CONFIG, None, "has no encoder/adapter_config.json"),
    "encoder with NaN": (ADAPTER, with_value("lora_A", NAN), "adapter_model.safetensors"),
    "encoder's settings broken": (ADAPTER_CONFIG, "{", "adapter_config.json"),
    "encoder's rank": (ADAPTER_CONFIG, fields(r=3), "adapter_config.json"),
    "lora_r 3": (CONFIG, fields(lora_r=3), "(?s)lora_"),
    "fewer gates": (CONFIG, fields(gate_layers=[0]), "`gate_layers`"),
    "a wrong type": (CONFIG, fields(lora_alpha="48"), "lora_alpha"),
    "a stranger's weight": (WEIGHTS, fields(**{"foo.weight": torch.ones(2)}), "foo.weight"),
    "half of the aligner": (WEIGHTS, without("lora_B"), "lacks .* aligner weights"),
    "aligner cut": (WEIGHTS, "cut", "model.safetensors cannot be read"),
    "aligner infinite": (WEIGHTS, with_value("projector.up", INFINITE), "infinite values in `model.projector.up"),
    "fewer words": (TOKENIZER, within("model", within("vocab", first_half)), f"tokenizer.json {NOT_SAVED}"),
    "tokenizer broken": (TOKENIZER, "[]", "tokenizer.json"),
}
BOUND = {
    "encoder zeroed": (ADAPTER, lambda lora: {name: 0 * value for name, value in lora.items()}, f"model.*{NOT_SAVED}"),
    "encoder's lora_alpha": (ADAPTER_CONFIG, fields(lora_alpha=99), f"adapter_config.json {NOT_SAVED}"),
    "template gone": (TEMPLATE, None, "has no chat_template.jinja"),
    "another template": (TEMPLATE, "{{ messages }}", f"chat_template.jinja {NOT_SAVED}"),
    "aligner's value": (WEIGHTS, with_value("lora_B", 0.125), "weights of the aligner in .* do not match"),
    "a base model promised": (CONFIG, fields(includes_base_model=True), "should contain its base model"),
}
FULL = {
    "a weight gone": (WEIGHTS, without("layers.1.mlp.up_proj.base_layer"), "lacks weights of .* `llama`, first .*up_p"),
    "a weight more": (WEIGHTS, fields(**{"foo.weight": torch.ones(2)}), "not belong to .* `llama`, first `foo.weight"),
    "base model with NaN": (WEIGHTS, with_value("input_layernorm", NAN), "has NaN or infinite values in .*1 of"),
    "LoRA of a layer more": (WEIGHTS, with_surplus_lora, "aligner weights that a model with the settings"),
    "a base model denied": (CONFIG, fields(includes_base_model=False), "saved without a base model"),
}


@pytest.mark.parametrize("case", CHECKABLE | BOUND | FULL)
def test_changed_part_is_named(saved, tmp_path, case):
    folder = shutil.copytree(saved["full" if case in FULL else "aligner"], tmp_path / "checkpoint")
    name, change, message = (CHECKABLE | BOUND | FULL)[case]
    edit(folder / name, change)
    with pytest.raises(ValueError, match=message):
        load(folder)
    if case in CHECKABLE or (case in FULL and name == WEIGHTS):
        forget_digests(folder)
        with pytest.raises(ValueError, match=message if case in FULL else None):
            load(folder)


def test_older_checkpoints_load(saved, folder, tmp_path):
    """An older checkpoint still loads; one that contains its base model needs no other copy of it."""
    full = shutil.copytree(saved["full"], tmp_path / "full")
    for copy, kind in ((folder, "aligner"), (full, "full")):
        forget_digests(copy)
        assert torch.equal(first_logits(copy), first_logits(saved[kind]))
    edit_json(full / CONFIG, base_model_name_or_path="nobody/nothing")
    assert torch.equal(first_logits(full), first_logits(saved["full"]))


@pytest.mark.parametrize("names", [[CONFIG], [WEIGHTS], [PROCESSOR, ADAPTER, ADAPTER_CONFIG], [ADAPTER]])
def test_mixed_trainings_are_refused(folder, saved, names):
    for name in names:
        shutil.copy(saved["other"] / name, folder / name)
    with pytest.raises(ValueError, match="after the aligner was saved|do not match their digest"):
        load(folder)


def test_harmless_changes_are_allowed(folder, base_model_dir, tmp_path):
    """Changes of files that do not affect slots are allowed."""
    expected = first_logits(folder)
    moved = shutil.copytree(base_model_dir, tmp_path / "moved")
    edit_json(folder / CONFIG, base_model_name_or_path=str(moved), training_stage=None)
    edit_json(folder / PROCESSOR, context_token="[B]", tokens_per_slot="segment")
    for name in (CONFIG, TOKENIZER):  # as Git does on Windows
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", b"\r\n"))
    assert torch.equal(first_logits(folder), expected)


def test_edited_settings_load(folder):
    """Settings in both JSON files may be edited by hand, and take effect."""
    edits = {"gate_mode": "always", "gate_threshold": 0.25, "max_refinement_steps": 1, "lora_dropout": 0.2}
    edit_json(folder / CONFIG, **edits)
    edit_json(folder / PROCESSOR, copy_bonus=2.5, sentences_per_segment=2)
    model, processor = load(folder)
    assert {name: getattr(model.config, name) for name in edits} == edits
    assert (processor.copy_bonus, processor.sentences_per_segment) == (2.5, 2)
    inputs = processor(text="Who wrote it?", documents=["It was Ada. So be it."], return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs).recursion_depth.max() == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_weights_have_default_permissions(folder):
    """Files with weights get the permissions of any new file."""
    before = os.umask(0o027)
    try:
        for part in load(folder):
            part.save_pretrained(folder / "saved")
    finally:
        os.umask(before)
    files = list((folder / "saved").rglob("*.safetensors"))
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("place", ["elsewhere", "where it was"])
def test_changes_are_saved_and_bound(folder, tmp_path, order, place):
    """Changes after loading are saved with the checkpoint, with new digests."""
    model = ArcAlignerForCausalLM.from_pretrained(folder, lora_alpha=9)
    processor = ArcAlignerProcessor.from_pretrained(folder, sentences_per_segment=2)
    model.config.max_refinement_steps = 1
    with torch.no_grad():
        model.model.projector.up.bias.add_(1.0)
        processor.encoder.lora_weights()[0].mul_(2.0)
    target = folder if place == "where it was" else tmp_path / "saved"
    for part in (model, processor)[::order]:
        part.save_pretrained(target)
        if target == folder:
            load(folder)  # model and processor may each be saved again alone
    again, processor_again = load(target)
    assert (again.config.lora_alpha, again.config.max_refinement_steps) == (9, 1)
    assert processor_again.sentences_per_segment == 2
    assert torch.equal(again.model.projector.up.bias, model.model.projector.up.bias)
    assert torch.equal(processor_again.encoder.lora_weights()[0], processor.encoder.lora_weights()[0])
    edit_json(target / ADAPTER_CONFIG, lora_alpha=99)
    with pytest.raises(ValueError, match=f"adapter_config.json {NOT_SAVED}"):
        load(target)


def test_lone_configuration_has_no_digests(folder, tmp_path):
    config = ArcAlignerForCausalLM.from_pretrained(folder).config
    assert config.digests is None and config.includes_base_model is None
    for configuration in (config, type(config).from_pretrained(folder)):
        configuration.lora_alpha = 5
        configuration.save_pretrained(tmp_path / "alone")
        assert not {"digests", "includes_base_model"} & json.loads((tmp_path / "alone" / CONFIG).read_text()).keys()
        assert type(config).from_pretrained(tmp_path / "alone").lora_alpha == 5


def test_subfolder_of_a_processor(folder, tmp_path):
    """`subfolder` loads the processor and its encoder from a folder inside the named folder."""
    shutil.copytree(folder, tmp_path / "all" / "aligner")
    processor, expected = ArcAlignerProcessor.from_pretrained(tmp_path / "all", subfolder="aligner"), load(folder)[1]
    processor.encoder.device = "cpu"
    assert torch.equal(processor.encoder.encode(["Ada."]), expected.encoder.encode(["Ada."]))


def test_changed_base_weights_warn(folder, tmp_path, caplog):
    """Saving an aligner alone warns if base weights were changed, but not after a cast or a change of the aligner."""
    model = load(folder)[0]
    for parameter in dict(model.aligner_parameters()).values():
        parameter.data += 1
    model.bfloat16().save_pretrained(tmp_path / "same")
    assert "base model are not" not in caplog.text
    name, weight = next(pair for pair in model.named_parameters() if pair[0].endswith("base_layer.weight"))
    weight.data *= 1.1
    model.save_pretrained(tmp_path / "whole", save_base_model=True)
    assert "base model are not" not in caplog.text
    model.save_pretrained(tmp_path / "alone")
    assert f"Weights of the base model have changed since they were loaded, first `{name}` (1 in all)" in caplog.text


def test_resized_embeddings_are_refused(folder, tmp_path):
    """An aligner with resized embeddings is not saved without its base model, as it could not be loaded."""
    model = load(folder)[0]
    model.resize_token_embeddings(model.config.text_config.vocab_size + 3)
    with pytest.raises(ValueError, match=r"embed_tokens.* has shape \(\d+, 32\); expected"):
        model.save_pretrained(tmp_path / "alone")
    assert not (tmp_path / "alone").exists()
