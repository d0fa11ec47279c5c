"""Methods are found by name, with tokens per slot; answers of one checkpoint are told from those of another; LLMLingua
leaves a third of the passages' tokens and nothing else of the prompt changes."""

import shutil
import string
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import edit_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from training_rows import question_rows
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForTokenClassification

from arcaligner import ArcAlignerConfig
from arcaligner.evaluation import methods
from arcaligner.evaluation.answering import text_inputs
from arcaligner.evaluation.methods import (
    LLMLINGUA2,
    LLMLINGUA_SHARE,
    METHODS,
    Checkpoints,
    MissingMethodError,
    PairCacheModel,
    backbone_fingerprint,
    find_method,
    fingerprint,
    llmlingua_compressor,
    sort_key,
)
from arcaligner.train.prompts import passages_text, text_prompt

ROWS = question_rows(3)
TEXT = " ".join(map(passages_text, ROWS))


@pytest.fixture
def copied(checkpoint_dir, tmp_path):
    return shutil.copytree(checkpoint_dir, tmp_path / "copied")


def test_names_with_tokens_per_slot():
    """A name with tokens per slot is a separate method; compressions are sorted from fine to coarse after the method
    itself."""
    method = find_method("arcaligner_x4")
    assert (method.name, method.title) == ("arcaligner_x4", "ArcAligner, 4 tokens per slot")
    assert find_method("llmlingua_xsegment").tokens_per_slot == "segment"
    assert all(find_method(name) is METHODS[name] for name in METHODS)
    copies = {name for name in METHODS if "copy_biased" in getattr(METHODS[name].answer, "keywords", ())}
    assert copies == {"full_text_copying", "truncated_copying"}
    ordered = ["naive", "arcaligner", "arcaligner_x4", "arcaligner_x16", "arcaligner_xsegment", "no_recursion"]
    assert sorted(reversed(ordered), key=sort_key) == ordered
    for name in ("naive_x4", "arcaligner_x0", "arcaligner_x", "arcaligner_xhalf", "arcaligner_4"):
        with pytest.raises(
            ValueError, match=f"There is no method '{name}'.* as in `arcaligner_x4` .* to one of truncated"
        ):
            find_method(name)


# What answers depend on


def test_copy_has_the_same_fingerprint(checkpoint_dir, copied):
    """A copy is the same checkpoint; other weights or settings make another."""

    def changed(change) -> tuple[bool, bool]:
        """Whether one more byte in a file changes the checkpoint, and whether it changes the backbone."""
        before = change.read_bytes()
        change.write_bytes(before + b" ")
        whole, backbone = fingerprint(str(copied)), backbone_fingerprint(str(copied))
        change.write_bytes(before)
        return whole != fingerprint(str(checkpoint_dir)), backbone != backbone_fingerprint(str(checkpoint_dir))

    (copied / "README.md").write_text("another card")
    assert changed(copied / "README.md") == (False, False)
    for path in (*copied.glob("*.safetensors"), copied / "config.json", copied / "processor_config.json"):
        assert changed(path) == (True, False)
    assert changed(copied / "chat_template.jinja") == (True, True)  # the backbone gets another prompt
    with pytest.raises(ValueError, match="is not a folder with weights"):
        fingerprint(str(copied / "nowhere"))


def test_hub_checkpoint_has_a_commit(monkeypatch):
    """A checkpoint of the Hub is identified by its commit."""
    names = []
    monkeypatch.setattr(ArcAlignerConfig, "from_pretrained", names.append)
    cached = "hub/models--user--name/snapshots/abc/config.json"
    monkeypatch.setattr(methods, "try_to_load_from_cache", lambda name, file: f"{name}/{file}" and cached)
    assert fingerprint("user/name") == "user/name@abc" and names == ["user/name"]


def test_settings_that_answers_depend_on(checkpoint_dir, copied):
    """Answers depend on the tokens per slot, and on the checkpoint whose slots are counted."""

    def settings(name, aligner=checkpoint_dir):
        readers = {"full_text_lora": str(checkpoint_dir), "projector_only": str(checkpoint_dir)}
        return find_method(name).answer_settings(Checkpoints(str(aligner), **readers))

    plain = settings("arcaligner")
    assert settings("arcaligner_x4") == plain | {"tokens_per_slot": 4}
    assert settings("llmlingua_x4")["weights"] == plain["weights"] != settings("llmlingua")["weights"]
    assert settings("truncated_lora_x4", copied) == settings("truncated_lora_x4")
    edit_json(copied / "processor_config.json", sentences_per_segment=3)
    assert settings("truncated_lora_x4", copied) != settings("truncated_lora_x4")
    assert settings("projector_only_x4", copied) == settings("projector_only_x4")  # this method has slots of its own


def test_missing_requirements_are_named(checkpoint_dir, monkeypatch):
    """Missing requirements of a method are named."""
    with pytest.raises(MissingMethodError, match="confidence"):
        METHODS["one_passage"].load(Checkpoints(str(checkpoint_dir)))
    with pytest.raises(MissingMethodError, match="confidence"):
        METHODS["as_needed"].load(Checkpoints(str(checkpoint_dir)))
    with pytest.raises(MissingMethodError, match="train.pointer --save"):
        METHODS["zoomed"].load(Checkpoints(str(checkpoint_dir)))
    monkeypatch.setitem(sys.modules, "llmlingua", None)
    with pytest.raises(MissingMethodError, match="pip install llmlingua==0.2.2"):
        llmlingua_compressor(None, None)


# LLMLingua

needs_llmlingua = pytest.mark.skipif(
    find_spec("llmlingua") is None, reason="llmlingua is not installed: `pip install llmlingua==0.2.2`"
)


@needs_llmlingua
@pytest.mark.parametrize("repeats", [1, 5, 8])  # one part; three with a cache between them; more than the model reads
def test_llmlingua_keeps_a_third(model, tokenizer, repeats):
    """LLMLingua keeps a third of the tokens, in order."""
    text = " ".join([TEXT] * repeats)
    num_tokens = len(tokenizer(text)["input_ids"])
    assert (num_tokens > 200, num_tokens > 512) == (repeats > 1, repeats > 5)
    compressed, letters = llmlingua_compressor(model, tokenizer)(text, LLMLINGUA_SHARE), iter(text)
    assert all(letter in letters for letter in compressed)
    assert 0.25 < len(tokenizer(compressed)["input_ids"]) / num_tokens < 0.4


@needs_llmlingua
def test_cache_of_pairs_continues(tokenizer, model):
    """A cache of pairs continues as if all tokens were in one prompt."""
    pairs_model = PairCacheModel(model)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]  # (1, seq_len)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        whole = model(ids).logits
        first = pairs_model(ids[:, :9], mask[:, :9], None, use_cache=True)
        pairs = [[keys[:, :, :6], values[:, :, :6]] for keys, values in first.past_key_values]
        rest = pairs_model(ids[:, 6:], attention_mask=mask, past_key_values=pairs, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits[:, :6], rest.logits], dim=1), whole)
    assert all(keys.shape[2] == values.shape[2] == ids.shape[1] for keys, values in rest.past_key_values)


@needs_llmlingua
def test_llmlingua_compresses_passages_only(checkpoint_dir, model, processor):
    rows = [ROWS[0], ROWS[1] | {"passages": []}, ROWS[2]]
    answers = METHODS["llmlingua"].load(Checkpoints(str(checkpoint_dir)))(rows)
    compress = llmlingua_compressor(model, processor.tokenizer)
    texts = [compress(passages_text(row), LLMLINGUA_SHARE) for row in rows]
    assert texts[1] == "" and compress("a", LLMLINGUA_SHARE) == "a" and len(texts[0]) < len(passages_text(rows[0])) / 2
    prompts = text_inputs(processor, [text_prompt(row, text) for row, text in zip(rows, texts, strict=True)])
    expected = [ids[mask.bool()].tolist() for ids, mask in zip(*prompts.values(), strict=True)]
    assert [answer.prompt_ids for answer in answers] == expected
    assert answers[1].context_tokens == 0 < answers[0].context_tokens < 0.5 * answers[0].passage_tokens


@pytest.fixture
def classifier(tmp_path, monkeypatch):
    """A random token classifier with its tokenizer, in the folder where LLMLingua-2 expects its own."""
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words.train_from_iterator(
        [TEXT], trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    ends = [(token, words.token_to_id(token)) for token in ("<s>", "</s>")]
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", **names)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = XLMRobertaForTokenClassification(
        XLMRobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=520, initializer_range=1.0, **sizes)
    )
    folder = tmp_path / LLMLINGUA2.rpartition("/")[2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(methods, "LLMLINGUA2", str(folder))
    methods.llmlingua2_compressor.cache_clear()
    yield model.eval(), tokenizer
    methods.llmlingua2_compressor.cache_clear()


@needs_llmlingua
def test_llmlingua2_keeps_probable_words(checkpoint_dir, classifier, processor):
    """LLMLingua-2 keeps the third of the words that its classifier finds most probable, in order."""
    model, tokenizer = classifier
    answers = METHODS["llmlingua2"].load(Checkpoints(str(checkpoint_dir)))([ROWS[0], ROWS[1] | {"passages": []}])
    ids, ends = tokenizer(passages_text(ROWS[0]), add_special_tokens=False)["input_ids"], [tokenizer.unk_token_id]
    with torch.no_grad():  # the package uses the end tokens of BERT, which this classifier does not know
        probable = model(torch.tensor([ends + ids + ends])).logits.softmax(-1)[0, 1:-1, 1].tolist()
    words: list[tuple[str, list[float]]] = []
    for token, probability in zip(tokenizer.convert_ids_to_tokens(ids), probable, strict=True):
        if token.startswith("\u2581") or token in string.punctuation:
            words.append((token, [probability]))
        else:
            words[-1] = words[-1][0] + token, [*words[-1][1], probability]
    means = [float(np.mean(probabilities)) for _, probabilities in words]
    lengths = [len(processor.tokenizer(word)["input_ids"]) for word, _ in words]
    least = np.percentile(np.repeat(means, lengths), int(100 * (1 - LLMLINGUA_SHARE) + 1))
    kept = [word for (word, _), mean in zip(words, means, strict=True) if mean > least]
    text = "".join(kept).replace("\u2581", " ").strip()
    assert 0.15 < len(text) / len(passages_text(ROWS[0])) < 0.45
    prompts = text_inputs(processor, [text_prompt(row, kept) for row, kept in zip(ROWS, (text, ""), strict=False)])
    expected = [ids[mask.bool()].tolist() for ids, mask in zip(*prompts.values(), strict=True)]
    assert [answer.prompt_ids for answer in answers] == expected


@needs_llmlingua
def test_llmlingua2_needs_its_classifier(checkpoint_dir, monkeypatch, tmp_path):
    """Without its classifier LLMLingua-2 is skipped with the name of the classifier; no other model takes its place."""
    monkeypatch.setattr(methods, "LLMLINGUA2", str(tmp_path / "nowhere"))
    methods.llmlingua2_compressor.cache_clear()
    with pytest.raises(MissingMethodError, match="classifier.*nowhere"):
        METHODS["llmlingua2"].load(Checkpoints(str(checkpoint_dir)))
