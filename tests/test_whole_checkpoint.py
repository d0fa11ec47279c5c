"""A checkpoint is whole, or it is refused by an error that says which part of it was changed."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import edit_json, new_processor, random_aligner
from safetensors.torch import load_file, save_file

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor

CONFIG, PROCESSOR, WEIGHTS = "config.json", "processor_config.json", "model.safetensors"
TEMPLATE, NAN = "chat_template.jinja", float("nan")
ADAPTER, ADAPTER_CONFIG = "encoder/adapter_model.safetensors", "encoder/adapter_config.json"


def save_checkpoint(folder: Path, base_model_dir: Path, encoder_dir: Path, seed: int, **options) -> Path:
    """An aligner that reads words, all of it random, with an encoder that was trained along."""
    processor = new_processor(base_model_dir, encoder_dir, context_words=True)
    for number, weight in enumerate(processor.train_encoder(lora_r=2)):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(100 * seed + number))
    model = random_aligner(base_model_dir, processor, seed, word_parts=2)
    model.save_pretrained(folder, **options)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory, base_model_dir, encoder_dir) -> dict[str, Path]:
    """Three checkpoints: with the aligner only, with its base model too, and of another training."""
    folder, models = tmp_path_factory.mktemp("saved"), (base_model_dir, encoder_dir)
    return {
        "aligner": save_checkpoint(folder / "aligner", *models, seed=2),
        "full": save_checkpoint(folder / "full", *models, seed=2, save_base_model=True),
        "other": save_checkpoint(folder / "other", *models, seed=3),
    }


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved["aligner"], tmp_path / "checkpoint")


@pytest.fixture
def full(saved, tmp_path) -> Path:
    return shutil.copytree(saved["full"], tmp_path / "full")


def load(folder: Path) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """Model and processor, with the encoder, which is loaded on first use."""
    processor = ArcAlignerProcessor.from_pretrained(folder)
    processor.encoder.device = "cpu"
    assert processor.encoder.model is not None
    return ArcAlignerForCausalLM.from_pretrained(folder).eval(), processor


def first_logits(folder: Path) -> torch.Tensor:
    model, processor = load(folder)
    with torch.no_grad():
        return model(**processor(text="Who wrote it?", documents=["It was Ada. So be it."], return_tensors="pt")).logits


def forget_digests(folder: Path) -> None:
    """Makes a checkpoint as older versions saved them."""
    edit_json(folder / CONFIG, digests=None, includes_base_model=None)


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    save_file(change(dict(tensors)) or tensors, path, metadata={"format": "pt"})


def drop(path, *names):
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in names}))


def keys_with(part: str, tensors: dict) -> list[str]:
    return [name for name in tensors if part in name]


def half(tensors):
    return dict(sorted(tensors.items())[::2])


def without_first(part):
    return lambda tensors: {name: x for name, x in tensors.items() if name != keys_with(part, tensors)[0]}


def with_value(part, value):
    def change(tensors):
        tensors[keys_with(part, tensors)[0]].view(-1)[1] = value
        return tensors

    return change


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rope_theta(folder: Path) -> None:
    text_config = json.loads((folder / CONFIG).read_text())["text_config"]
    text_config["rope_parameters"]["rope_theta"] = 100.0
    edit_json(folder / CONFIG, text_config=text_config)


def with_vocabulary(change):
    def edit(folder: Path) -> None:
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        edit_json(folder / "tokenizer.json", model=model | {"vocab": change(model["vocab"])})

    return edit


# Ways to change a file of a checkpoint, as functions of its folder.


def tensors_of(name: str, change):
    return lambda folder: edit_tensors(folder / name, change)


def fields_of(name: str, **changes):
    return lambda folder: edit_json(folder / name, **changes)


def text_of(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def zeros(tensors):
    return {name: 0 * x for name, x in tensors.items()}


def renamed(tensors):
    return {name.replace("layer", "leyer"): x for name, x in tensors.items()}


def with_stranger(tensors):
    return tensors | {"foo.weight": torch.ones(2)}


def with_part_of_base(tensors):
    return tensors | {"model.backbone.norm.weight": torch.ones(32)}


def with_surplus_lora(tensors):
    name = keys_with("lora_A", tensors)[0]
    return tensors | {name.replace("layers.0", "layers.7"): tensors[name].clone()}


# What was changed -> how, and what the error says. Those of `CHECKABLE` are refused without digests too.
CHECKABLE = {
    "encoder renamed": (tensors_of(ADAPTER, renamed), "adapter_model.safetensors"),
    "encoder cut": (lambda f: cut(f / ADAPTER), r"adapter_model.safetensors cannot be read.*download it again"),
    "encoder gone": (lambda f: shutil.rmtree(f / "encoder"), "lacks encoder/adapter_config.json"),
    "encoder with NaN": (tensors_of(ADAPTER, with_value("lora_A", NAN)), "adapter_model.safetensors"),
    "encoder's settings broken": (text_of(ADAPTER_CONFIG, "{"), "adapter_config.json"),
    "encoder's rank": (fields_of(ADAPTER_CONFIG, r=3), "adapter_config.json"),
    "lora_r 3": (fields_of(CONFIG, lora_r=3), "(?s)lora_"),
    "fewer gates": (fields_of(CONFIG, gate_layers=[0]), "`gate_layers`"),
    "a stranger's weight": (tensors_of(WEIGHTS, with_stranger), "foo.weight"),
    "a weight of the base": (tensors_of(WEIGHTS, with_part_of_base), "weights"),
    "half of the aligner": (tensors_of(WEIGHTS, half), "lacks .* aligner weights"),
    "aligner cut": (lambda f: cut(f / WEIGHTS), "model.safetensors cannot be read"),
    "aligner infinite": (
        tensors_of(WEIGHTS, with_value("projector.up", float("inf"))),
        "1 NaN or .* in `model.projector.up",
    ),
    "a wrong type": (fields_of(CONFIG, lora_alpha="48"), "lora_alpha"),
    "tokenizer without words": (with_vocabulary(lambda words: dict(list(words.items())[:300])), "tokenizer.json"),
    "tokenizer broken": (text_of("tokenizer.json", "[]"), "tokenizer.json"),
}
BOUND = {
    "encoder zeroed": (
        tensors_of(ADAPTER, zeros),
        "adapter_model.safetensors is not the file that was saved with the aligner",
    ),
    "encoder's lora_alpha": (fields_of(ADAPTER_CONFIG, lora_alpha=99), "adapter_config.json is not the file that was"),
    "encoder as untrained": (
        fields_of(PROCESSOR, trained_encoder=False),
        "processor_config.json of .* is not as it was saved: `trained_encoder` is False",
    ),
    "two settings": (
        fields_of(PROCESSOR, spacy_model="de", context_token_id=999),
        "`context_token_id` is 999, `spacy_model` is 'de'",
    ),
    "template gone": (lambda f: (f / TEMPLATE).unlink(), "lacks chat_template.jinja"),
    "another template": (text_of(TEMPLATE, "{{ messages }}"), "chat_template.jinja is not the file"),
    "another tokenizer": (
        with_vocabulary(lambda words: words | {"a": words["b"], "b": words["a"]}),
        "tokenizer.json is not the file",
    ),
    "lora_alpha": (fields_of(CONFIG, lora_alpha=480), "config.json of .* is not as it was saved: `lora_alpha` is 480"),
    "lora_alpha gone": (lambda f: drop(f / CONFIG, "lora_alpha"), "`lora_alpha` is missing"),
    "rotary base": (rope_theta, "`text_config` was changed"),
    "aligner's value": (
        tensors_of(WEIGHTS, with_value("lora_B", 0.125)),
        "aligner's weights in .* are not those that it was saved with",
    ),
    "digests broken": (fields_of(CONFIG, digests={"config.json": 5}), "`digests` of a checkpoint lack"),
}


@pytest.mark.parametrize("case", CHECKABLE | BOUND)
def test_a_changed_part_is_refused_and_named(folder, case):
    change, message = (CHECKABLE | BOUND)[case]
    change(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("case", CHECKABLE)
def test_an_older_checkpoint_is_refused_for_what_can_be_checked(folder, case):
    change, _ = CHECKABLE[case]
    change(folder)
    forget_digests(folder)
    with pytest.raises(ValueError):
        load(folder)


@pytest.mark.parametrize("kind", ["aligner", "full"])
def test_an_older_checkpoint_loads_as_it_did(saved, kind, tmp_path):
    expected = first_logits(saved[kind])
    older = shutil.copytree(saved[kind], tmp_path / "older")
    drop(older / CONFIG, "digests", "includes_base_model")
    assert torch.equal(first_logits(older), expected)


@pytest.mark.parametrize("names", [[CONFIG], [WEIGHTS], [PROCESSOR, "encoder"], [ADAPTER]])
def test_parts_of_two_trainings_are_refused(folder, saved, names):
    for name in names:
        source = saved["other"] / name
        copy = shutil.copy if source.is_file() else partial(shutil.copytree, dirs_exist_ok=True)
        copy(source, folder / name)
    with pytest.raises(ValueError, match="saved with"):
        load(folder)


@pytest.mark.parametrize("has_digests", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_first("mlp.up_proj.base_layer"), "lacks 1 weights of a llama, first .*up_proj"),
        (without_first("embed"), "lacks 1 weights.*embed"),
        (with_stranger, "has 1 weights that are none of a llama, first `foo.weight`"),
        (with_value("input_layernorm", NAN), "1 NaN or infinite values"),
        (with_surplus_lora, "has 1 aligner weights"),
    ],
)
def test_a_full_checkpoint_is_complete_or_refused(full, change, message, has_digests):
    edit_tensors(full / WEIGHTS, change)
    if not has_digests:
        forget_digests(full)
    with pytest.raises(ValueError, match=message):
        load(full)


def test_a_full_checkpoint_answers_without_its_base_model(full):
    expected = first_logits(full)
    edit_json(full / CONFIG, base_model_name_or_path="nobody/nothing")
    assert torch.equal(first_logits(full), expected)


def test_a_checkpoint_says_whether_it_holds_its_base_model(full, folder):
    for wrong, value in ((full, False), (folder, True)):
        edit_json(wrong / CONFIG, includes_base_model=value)
        with pytest.raises(ValueError, match="saved without a base model|is to hold its base model"):
            load(wrong)


def test_what_changes_no_slot_may_be_changed_in_the_files(folder, base_model_dir, tmp_path):
    expected = first_logits(folder)
    moved = shutil.copytree(base_model_dir, tmp_path / "moved")
    edit_json(folder / CONFIG, base_model_name_or_path=str(moved), training_stage=None)
    edit_json(folder / PROCESSOR, context_token="[B]", tokens_per_slot="segment")
    for name in (CONFIG, "tokenizer.json"):  # as Git does on Windows
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", b"\r\n"))
    assert torch.equal(first_logits(folder), expected)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_whoever_may_read_a_new_file_may_read_the_weights(folder, tmp_path, umask):
    before = os.umask(umask)
    try:
        ArcAlignerForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
        ArcAlignerProcessor.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    finally:
        os.umask(before)
    files = list((tmp_path / "saved").rglob("*.safetensors"))
    assert len(files) == 2 and {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


@pytest.mark.parametrize("model_first", [True, False])
def test_settings_changed_on_what_was_loaded_are_saved_with_it(folder, tmp_path, model_first):
    model = ArcAlignerForCausalLM.from_pretrained(folder, lora_alpha=9)
    processor = ArcAlignerProcessor.from_pretrained(folder, sentences_per_segment=2)
    model.config.max_refinement_steps = 1
    with torch.no_grad():
        model.model.projector.up.bias.add_(1.0)
        processor.encoder.lora_weights()[0].mul_(2.0)
    saves = [model.save_pretrained, processor.save_pretrained]
    for save in saves if model_first else saves[::-1]:
        save(tmp_path / "saved")
    again, processor_again = load(tmp_path / "saved")
    assert (again.config.lora_alpha, again.config.max_refinement_steps) == (9, 1)
    assert processor_again.sentences_per_segment == 2
    assert torch.equal(again.model.projector.up.bias, model.model.projector.up.bias)
    assert torch.equal(processor_again.encoder.lora_weights()[0], processor.encoder.lora_weights()[0])


def test_each_of_model_and_processor_may_be_saved_again_alone(folder):
    model, processor = load(folder)
    processor.sentences_per_segment = 2
    processor.save_pretrained(folder)
    assert load(folder)[1].sentences_per_segment == 2
    model.config.max_refinement_steps = 1
    model.save_pretrained(folder)
    assert load(folder)[0].config.max_refinement_steps == 1
    with pytest.raises(ValueError, match="adapter_config.json is not the file"):
        edit_json(folder / ADAPTER_CONFIG, lora_alpha=99)
        load(folder)


def test_a_configuration_saved_alone_binds_nothing(folder, tmp_path):
    config = ArcAlignerForCausalLM.from_pretrained(folder).config
    assert config.digests is None and config.includes_base_model is None
    for each in (config, type(config).from_pretrained(folder)):
        each.lora_alpha = 5
        each.save_pretrained(tmp_path / "alone")
        assert not {"digests", "includes_base_model"} & json.loads((tmp_path / "alone" / CONFIG).read_text()).keys()
        assert type(config).from_pretrained(tmp_path / "alone").lora_alpha == 5
