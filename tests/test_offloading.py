"""A model with weights on a disk or in CPU memory gives the same results as one that is loaded completely."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from conftest import ENCODER_WIDTH, new_processor, pipeline_of, random_aligner
from tiny_models import random_head

from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline

QUESTION = {
    "question": "Who wrote it?",
    "documents": ["It was written by Ada.", "Parkdale is in Canada.", "It is tall."],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, base_model_dir, encoder_dir):
    """A checkpoint with token embeddings in its slots, independent passages and a head, and its processor."""
    settings = {"context_words": True, "tokens_per_slot": 2, "passage_attention": "separate"}
    processor = new_processor(base_model_dir, encoder_dir, **settings)
    settings = {"word_parts": 2, "passage_attention": "separate"}
    model = random_aligner(base_model_dir, processor, seed=3, **settings)
    random_head(model)
    folder = tmp_path_factory.mktemp("offloaded")
    model.save_pretrained(folder)
    return folder, processor


def offloaded(way: str, folder, tmp_path) -> ArcAlignerForCausalLM:
    if way.startswith("auto"):
        limits = {"cpu": way.removeprefix("auto ")}
        return ArcAlignerForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory=limits, offload_folder=tmp_path, dtype=torch.float32
        )
    model = ArcAlignerForCausalLM.from_pretrained(folder)
    if way == "disk":
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        cpu_offload(model, execution_device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("way", ["auto 200KB", "auto 1KB", "disk", "memory"])
def test_offloaded_models_generate_the_same(saved, way, tmp_path):
    """Embeddings, projector, LoRA and the tied head are loaded when they are needed, and give the same answer."""
    folder, processor = saved
    model = ArcAlignerForCausalLM.from_pretrained(folder).eval()
    inputs = processor(text=QUESTION["question"], documents=QUESTION["documents"], return_tensors="pt")
    assert inputs["context_embeds"].shape[2] == ENCODER_WIDTH
    away = offloaded(way, folder, tmp_path).eval()
    assert any(weight.is_meta for weight in away.parameters())
    assert away.device.type == "cpu"
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, actual = (aligner.generate(**inputs, **options) for aligner in (model, away))
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("way", ["auto 200KB", "disk"])
def test_offloaded_models_select_passages(saved, way, tmp_path):
    """Selected passages are computed again for the answer, as changes of offloaded weights cannot be detected."""
    folder, processor = saved
    options = {"max_new_tokens": 4, "max_passages": 2, "return_slots": True}
    expected = pipeline_of(ArcAlignerForCausalLM.from_pretrained(folder).eval(), processor)(QUESTION, **options)
    away = offloaded(way, folder, tmp_path).eval()
    ask = ArcAlignerPipeline(model=away, processor=processor, task="text-generation")  # on the devices of the model
    assert ask(QUESTION, **options) == expected


def test_disk_pipeline_is_refused(saved, tmp_path):
    """A model whose first layers are offloaded to disk is refused, and the error says what to do."""
    folder, processor = saved
    away = offloaded("auto 1KB", folder, tmp_path)
    assert next(iter(away.hf_device_map.values())) == "disk"
    with pytest.raises(ValueError, match="first layers of the model are offloaded to disk.*`max_memory`"):
        ArcAlignerPipeline(model=away, processor=processor, task="text-generation")
