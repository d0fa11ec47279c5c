"""LLMLingua leaves a third of the passages' tokens and nothing else of the prompt changes."""

import sys
from importlib.util import find_spec

import pytest
import torch
from training_rows import question_rows

from arcaligner.evaluation.answering import MissingMethodError, text_inputs
from arcaligner.evaluation.compression import RATE, PairCacheModel, llmlingua_compressor
from arcaligner.evaluation.methods import METHODS, Checkpoints
from arcaligner.train.prompts import passages_text, text_prompt

needs_llmlingua = pytest.mark.skipif(
    find_spec("llmlingua") is None, reason="llmlingua is not installed: `pip install llmlingua==0.2.2`"
)
TEXT = " ".join(passages_text(row) for row in question_rows(3))


def is_subsequence(part: str, whole: str) -> bool:
    letters = iter(whole)
    return all(letter in letters for letter in part)


@pytest.fixture
def compress(model, tokenizer):
    return llmlingua_compressor(model, tokenizer)


@needs_llmlingua
@pytest.mark.parametrize("repeats", [1, 5, 8])  # one part; three with a cache between them; more than the model reads
def test_llmlingua_keeps_a_third_of_the_tokens_in_their_order(compress, tokenizer, repeats):
    text = " ".join([TEXT] * repeats)
    num_tokens = len(tokenizer(text)["input_ids"])
    assert (num_tokens > 200, num_tokens > 512) == (repeats > 1, repeats > 5)
    compressed = compress(text, RATE)
    assert is_subsequence(compressed, text)
    assert 0.25 < len(tokenizer(compressed)["input_ids"]) / num_tokens < 0.4


@needs_llmlingua
@pytest.mark.parametrize("text", ["", "a"])
def test_what_is_too_short_to_thin_out_stays(compress, text):
    assert compress(text, RATE) == text


@needs_llmlingua
def test_a_cache_of_pairs_continues_as_if_all_were_read_at_once(tokenizer, model):
    pairs_model = PairCacheModel(model)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]  # (1, seq_len)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        whole = model(ids).logits
        first = pairs_model(ids[:, :9], mask[:, :9], None, True)
        pairs = [[keys[:, :, :6], values[:, :, :6]] for keys, values in first.past_key_values]
        rest = pairs_model(ids[:, 6:], attention_mask=mask, past_key_values=pairs, use_cache=True)
    torch.testing.assert_close(first.logits, whole[:, :9])
    torch.testing.assert_close(rest.logits, whole[:, 6:])
    assert all(keys.shape[2] == values.shape[2] == ids.shape[1] for keys, values in rest.past_key_values)


@needs_llmlingua
def test_llmlingua_compresses_the_passages_and_leaves_the_question(checkpoint_dir, compress, processor):
    rows = question_rows(3)
    rows[1]["passages"] = []
    answers = METHODS["llmlingua"].load(Checkpoints(str(checkpoint_dir))).answer(rows)
    texts = [compress(passages_text(row), RATE) for row in rows]
    assert texts[1] == "" and len(texts[0]) < len(passages_text(rows[0])) / 2
    prompts = text_inputs(processor, [text_prompt(row, text) for row, text in zip(rows, texts, strict=True)])
    expected = [ids[mask.bool()].tolist() for ids, mask in zip(*prompts.values(), strict=True)]
    assert [answer.prompt_ids for answer in answers] == expected
    assert answers[1].context_tokens == 0 < answers[0].context_tokens < 0.5 * answers[0].passage_tokens


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llmlingua", None)
    with pytest.raises(MissingMethodError, match="pip install llmlingua==0.2.2"):
        llmlingua_compressor(None, None)
