"""How sure an answer is: what is watched, what it becomes, and answers that are given up for `no_answer`."""

import math

import pytest
import torch
from conftest import ENCODER_WIDTH, chat_inputs

from arcaligner import ArcAlignerProcessor
from arcaligner.pipeline_arcaligner import AnswerConfidence, ArcAlignerPipeline, confidence

DOCUMENTS = ["It was written by Ada. Nobody knew how to read it aloud."]
TOKENS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def refusing(processor):
    """A processor of an aligner that can say that the passages do not answer."""
    return ArcAlignerProcessor(
        processor.tokenizer,
        encoder_name_or_path=processor.encoder_name_or_path,
        encoder_hidden_size=ENCODER_WIDTH,
        context_token_id=processor.context_token_id,
        no_answer="not in the text",
    )


@pytest.fixture
def ask(model, refusing):
    return ArcAlignerPipeline(model=model, processor=refusing, task="text-generation", device="cpu")


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
def test_features_are_those_of_the_logits(model, refusing, options):
    inputs = chat_inputs(refusing, "Who wrote it?", DOCUMENTS)
    watch = AnswerConfidence(refusing)
    torch.manual_seed(0)
    found = model.generate(
        **inputs, **TOKENS | options, logits_processor=[watch], output_logits=True, return_dict_in_generate=True
    )
    new_ids = found.sequences[:, inputs["input_ids"].shape[1] :]
    logits = torch.stack(found.logits, dim=1).log_softmax(dim=-1)  # (1, new_tokens, vocab_size)
    refused = logits[0, 0, refusing.tokenizer("not in the text")["input_ids"][0]].exp()
    ends = (new_ids[0] == refusing.tokenizer.eos_token_id).nonzero().flatten().tolist()
    length = ends[0] + 1 if ends else new_ids.shape[1]
    mean = logits[0, torch.arange(length), new_ids[0, :length]].mean()
    ((odds, mean_found),) = watch.features(new_ids)
    torch.testing.assert_close(odds, torch.log((1 - refused) / refused).item(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean_found, mean.item(), rtol=1e-4, atol=1e-4)


def test_an_answer_that_ends_early_is_not_judged_by_its_padding(refusing):
    watch, end = AnswerConfidence(refusing), refusing.tokenizer.eos_token_id
    scores = torch.randn(2, len(refusing.tokenizer), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[5, 6, end], [7, end, end]])
    for step in range(3):
        watch(torch.cat([torch.zeros(2, 4, dtype=torch.long), ids[:, :step]], dim=1), scores + step)
    (_, first), (_, second) = watch.features(ids)
    chosen = scores.log_softmax(dim=-1)
    assert first == pytest.approx(chosen[0, ids[0]].mean().item(), abs=1e-5)
    assert second == pytest.approx(chosen[1, ids[1, :2]].mean().item(), abs=1e-5)


def test_confidence_is_a_product_of_probabilities_until_it_is_calibrated():
    assert confidence(math.log(3.0), math.log(0.5), None) == pytest.approx(0.75 * 0.5)
    assert confidence(1.0, -2.0, [0.5, 2.0, 1.0]) == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_an_answer_with_less_confidence_becomes_the_sentence(ask):
    row = {"question": "Who wrote it?", "documents": DOCUMENTS}
    (plain,) = ask(row, return_slots=True, **TOKENS)
    sure = plain["statistics"]["confidence"]
    assert 0 < sure < 1
    kept, given_up = (ask(row, min_confidence=each, **TOKENS)[0] for each in (sure - 1e-4, sure + 1e-4))
    assert kept["generated_text"] == plain["generated_text"] and given_up["generated_text"] == "not in the text"
    chat = [{"role": "user", "content": "Who wrote it?"}]
    (record,) = ask(chat, documents=DOCUMENTS, min_confidence=1.0, **TOKENS)
    assert record["generated_text"] == [*chat, {"role": "assistant", "content": "not in the text"}]


def test_each_row_of_a_batch_and_each_sample_has_its_own_confidence(ask):
    rows = [{"question": question, "documents": DOCUMENTS} for question in ("Who wrote it?", "When?", "Where was it?")]
    together = ask(rows, batch_size=3, return_slots=True, **TOKENS)
    alone = [ask(row, return_slots=True, **TOKENS) for row in rows]
    for (record,), (expected,) in zip(together, alone, strict=True):
        assert record["statistics"].pop("confidence") == pytest.approx(
            expected["statistics"].pop("confidence"), abs=1e-4
        )
        assert record == expected
    torch.manual_seed(0)
    samples = ask(rows[0], return_slots=True, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert len({each["statistics"]["confidence"] for each in samples}) == 3


def test_beams_have_no_confidence_and_text_without_slots_has_none(ask):
    row = {"question": "Who?", "documents": DOCUMENTS}
    assert "confidence" not in ask(row, return_slots=True, num_beams=2, **TOKENS)[0]["statistics"]
    with pytest.raises(ValueError, match="with beams an answer has no confidence"):
        ask(row, min_confidence=0.5, num_beams=2, **TOKENS)
    chat = [{"role": "user", "content": "Who?"}]
    assert ask(chat, min_confidence=1.0, **TOKENS)[0]["generated_text"][-1]["content"] != "not in the text"


@pytest.mark.parametrize("given", [-0.1, 1.5, "0.5", True, float("nan")])
def test_a_confidence_that_is_none_is_refused(ask, given):
    with pytest.raises(ValueError, match="expected a number from 0 to 1"):
        ask({"question": "Who?", "documents": DOCUMENTS}, min_confidence=given)


def test_an_aligner_that_cannot_refuse_has_no_confidence(model, processor):
    ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
    row = {"question": "Who?", "documents": DOCUMENTS}
    assert "confidence" not in ask(row, return_slots=True, **TOKENS)[0]["statistics"]
    with pytest.raises(ValueError, match="`min_confidence` needs an aligner that was trained with questions"):
        ask(row, min_confidence=0.5)
    with pytest.raises(ValueError, match="A confidence needs an aligner"):
        AnswerConfidence(processor)
