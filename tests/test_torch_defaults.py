"""PyTorch's default dtype and default device, which a notebook may have set, change no answer."""

import pytest
import torch
from conftest import pipeline_of

from arcaligner.answering_arcaligner import clear_text_caches

DOCUMENTS = ["It was written by Ada. Nobody knew how to read it aloud.", "Parkdale is in Canada.", "It is tall."]


@pytest.fixture
def answered(separate):
    """Answers a question from scored passages, with an empty passage cache."""
    model, processor = separate
    model.generation_config.max_new_tokens = 4

    def answered(**options):
        clear_text_caches()
        ask = pipeline_of(model.float(), processor)
        return ask({"question": "Who wrote it?", "documents": DOCUMENTS}, max_passages=2, **options)

    return answered


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_default_dtype_changes_no_answer(answered, dtype):
    """The aligner computes in its own dtype, whatever the default dtype is."""
    expected = answered(return_slots=True)
    torch.set_default_dtype(dtype)
    try:
        assert answered(return_slots=True) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device_changes_no_answer(answered):
    """No tensor stays on the default device; here it is "meta", whose tensors have no values."""
    expected = answered(min_confidence=0.0)
    with torch.device("meta"):
        assert answered(min_confidence=0.0) == expected


def test_inputs_use_default_device(processor):
    """All inputs from the processor are on the default device, as those from a tokenizer are."""
    processor.encode_documents(DOCUMENTS)  # loads the encoder
    with torch.device("meta"):
        inputs = processor(text="Who wrote it?", documents=DOCUMENTS, return_tensors="pt")
    assert {name: tensor.device.type for name, tensor in inputs.items()} == dict.fromkeys(inputs, "meta")
