"""A CPU computes in float32, however a checkpoint is loaded, or in bfloat16 on request."""

import json
import shutil

import pytest
import torch
import transformers
from conftest import aligner_for, edit_json, processor_with
from tiny_models import tiny_aligner

from arcaligner import ArcAlignerForCausalLM
from arcaligner.apps.cli import shared
from arcaligner.evaluation.answering import load_aligner
from arcaligner.loading_arcaligner import default_dtype

DOCUMENTS = ["It was written by Ada. Nobody knew how to read it aloud.", "Parkdale is in Canada.", "It is tall."]


@pytest.fixture
def folder(checkpoint_dir, tmp_path):
    """A checkpoint whose `config.json` says bfloat16."""
    folder = shutil.copytree(checkpoint_dir, tmp_path / "checkpoint")
    edit_json(folder / "config.json", dtype="bfloat16")
    return folder


def served(folder):
    engine = shared.load_engine(folder, None)
    try:
        return engine.model
    finally:
        engine.close()


WAYS = {
    "from_pretrained": ArcAlignerForCausalLM.from_pretrained,
    "pipeline": lambda folder: transformers.pipeline(model=folder, trust_remote_code=True, device="cpu").model,
    "command line": lambda folder: shared.load_pipeline(folder).model,
    "server": served,
    "evaluation": lambda folder: load_aligner(folder, "cpu")[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_cpu_computes_in_float32(folder, way):
    """Each way to load a checkpoint computes in float32 on a CPU."""
    model = WAYS[way](str(folder))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_bfloat16_by_name_or_accelerator(folder, monkeypatch):
    """bfloat16 is used on request, or on an accelerator as the checkpoint says."""
    for name in ("dtype", "torch_dtype"):
        for value, dtype in (("bfloat16", torch.bfloat16), ("auto", torch.float32)):
            assert ArcAlignerForCausalLM.from_pretrained(folder, **{name: value}).dtype == dtype
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert ArcAlignerForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert ArcAlignerForCausalLM.from_pretrained(folder, device_map="cpu").dtype == torch.float32
    for places in ("auto", "cuda:1", 0, torch.device("cuda"), {"model": "cpu", "lm_head": 0}):
        assert default_dtype(places) == "auto"
    for places in (torch.device("cpu"), {"model": "cpu", "lm_head": "disk"}):
        assert default_dtype(places) == torch.float32


def test_cpu_keeps_the_dtype(folder, tmp_path):
    """A checkpoint that was loaded and saved on a CPU still names the dtype for accelerators."""

    def saved_dtype(model):
        model.save_pretrained(tmp_path / "saved")
        return json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"]

    model = ArcAlignerForCausalLM.from_pretrained(folder)
    assert saved_dtype(model) == "bfloat16"
    assert saved_dtype(model.to(torch.float16)) == "float16"
    assert saved_dtype(ArcAlignerForCausalLM.from_pretrained(folder, dtype="float32")) == "float32"


# Keys and values as bytes


def test_int8_passages(processor, tmp_path):
    """As int8, passages take a quarter of the bytes and give almost the same logits."""
    separate_processor = processor_with(processor, passage_attention="separate")
    model = aligner_for(processor, passage_attention="separate").float()
    exact, small = (model.passage_cache(separate_processor, folder=tmp_path, dtype=dtype) for dtype in (None, "int8"))
    expected = model.passage_cache(separate_processor).prepare("Who wrote it?", DOCUMENTS)["past_key_values"]
    exact.prepare("Who wrote it?", DOCUMENTS)
    for number in range(3):  # computed, then cached in memory, then in the folder
        store = small if number < 2 else model.passage_cache(separate_processor, folder=tmp_path, dtype="int8")
        inputs = store.prepare("Who wrote it?", DOCUMENTS)
        assert inputs.num_cached == [3 * (number > 0)]  # files of the other cache are not used
        for layer, other in zip(inputs["past_key_values"].layers, expected.layers, strict=True):
            for restored, original in ((layer.keys, other.keys), (layer.values, other.values)):
                step = original.abs().amax(dim=-1, keepdim=True) / 127
                assert ((restored - original).abs() <= 0.5 * step + 1e-6).all()
    head = next(iter(exact._entries.values())).nbytes  # the text before the slots is not quantized
    assert (small.bytes - head) * 4 * 8 == (exact.bytes - head) * (8 + 4)  # 8 numbers in float32, or with a scale
    with pytest.raises(ValueError, match="`dtype` is 'int4'; expected .int8."):
        model.passage_cache(processor, dtype="int4")


def test_float16_overflow_is_an_error():
    """Logits of a prompt that are not finite are an error, not an answer."""
    model = tiny_aligner("llama").to(torch.float16).eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
        model.model.backbone.norm.weight.fill_(6e4)
        with pytest.raises(ValueError, match="in float16, in which numbers above 65,504 overflow. Load the model with"):
            model.generate(ids, max_new_tokens=1)
