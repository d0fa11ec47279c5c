"""The sentence encoder's batches and its dtype."""

import math

import pytest
import torch
from safetensors.torch import load_file

from arcaligner import ArcAlignerProcessor, base_model_arcaligner
from arcaligner.encoder_arcaligner import SentenceEncoder, fastest_dtype, word_match
from arcaligner.train.recipe import resolve_dtype

TEXTS = ["It was written by Ada, and nobody else knew.", "", "Radik has competed since 2003."] * 4
# Of the dtype: eight bits.
ROUNDED = {"rtol": 0, "atol": 0.02}


@pytest.fixture
def load(checkpoint_dir):
    """A processor of the tiny checkpoint, or of another folder, whose encoder computes in a dtype."""
    return lambda dtype, folder=checkpoint_dir: ArcAlignerProcessor.from_pretrained(folder, encoder_dtype=dtype)


@pytest.fixture
def trained(load, tmp_path):
    """A checkpoint with an encoder that was trained jointly."""
    processor = load("float32")
    for weight in processor.train_encoder(lora_r=2):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    processor.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_texts_are_encoded_as_sentence_transformers_does(processor):
    expected = processor.encoder.model.encode(TEXTS, normalize_embeddings=True, convert_to_tensor=True)
    torch.testing.assert_close(processor.encoder.encode(TEXTS), expected, rtol=0, atol=1e-6)


def test_the_match_of_words_is_the_mean_of_the_highest_cosines_of_those_that_say_something(processor):
    question, passages = "Who wrote the letter?", [{"title": "Post", "text": "Ada wrote it."}, "It was a long letter."]

    def tokens(text):
        states = processor.encoder.model.encode(text, output_value="token_embeddings", convert_to_tensor=True)
        places = processor.encoder.model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        states = torch.nn.functional.normalize(states, dim=-1)
        return {place: state for place, state in zip(places, states, strict=True) if place[0] < place[1]}

    theirs = torch.stack([*tokens("Post Ada wrote it.").values(), *tokens("It was a long letter.").values()])
    asked = tokens(question)
    said = [(a, b) for a, b in asked if question[a:b].lower() not in ("who", "the", "?")]
    assert 0 < len(said) < len(asked)
    expected = torch.stack([(theirs @ asked[place]).max() for place in said]).mean().item()
    assert word_match(processor, question, passages) == pytest.approx(expected, abs=1e-3)  # they are kept in float16
    chat = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": question},
    ]
    assert word_match(processor, chat, passages) == pytest.approx(expected, abs=1e-3)
    nothing = (
        [],
        [""],
        ["\u200b"],
        [{"title": "Who wrote the letter?", "text": " "}],
    )  # texts without a token, or a slot
    for documents in nothing:
        assert math.isnan(word_match(processor, question, documents))
    assert math.isnan(word_match(processor, "", passages))
    assert word_match(processor, question, [*nothing[2], *passages]) == pytest.approx(expected, abs=1e-3)


def test_words_of_an_encoders_prompt_are_not_those_of_a_text(encoder_dir):
    encoder, prompted = SentenceEncoder(str(encoder_dir)), SentenceEncoder(str(encoder_dir))
    prompted.model.prompts, prompted.model.default_prompt_name = {"query": "book author: "}, "query"
    (plain, _), (found, states) = (each.encode_words(["Who wrote it?"])[0] for each in (encoder, prompted))
    assert found == plain and len(states) == len(plain)


def test_all_words_of_a_long_passage_are_matched(processor, monkeypatch):
    encoder, read = processor.encoder, []
    encode = encoder.encode_words
    monkeypatch.setattr(encoder, "encode_words", lambda texts: read.extend(texts) or encode(texts))
    long = " ".join(f"Number {number} stands here." for number in range(200))
    word_match(processor, "Which one?", [long])
    question, *pieces = read
    assert question == "Which one?" and " ".join(pieces) == long
    assert len(pieces) > 1 and {encoder.num_reads(piece) for piece in pieces} == {1}


@pytest.mark.parametrize("folder", ["checkpoint_dir", "trained"])
def test_bfloat16_rounds_the_embeddings_which_stay_normalized_and_float32(load, folder, request):
    folder = request.getfixturevalue(folder)
    exact, rounded = load("float32", folder), load("bfloat16", folder)
    for rate in ("segment", 3):
        expected = exact.encode_documents(TEXTS, tokens_per_slot=rate).context_embeds
        found = rounded.encode_documents(TEXTS, tokens_per_slot=rate).context_embeds
        torch.testing.assert_close(found, expected, **ROUNDED)
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found)))


@pytest.mark.parametrize(("speed", "dtype"), [(60.0, torch.bfloat16), (25.0, torch.float32)])
def test_auto_is_bfloat16_where_the_machine_is_much_faster_in_it(load, trained, monkeypatch, speed, dtype, tmp_path):
    fastest_dtype.cache_clear()
    monkeypatch.setattr(base_model_arcaligner, "_products_per_second", {torch.bfloat16: speed, torch.float32: 20.0}.get)
    processor = load("auto", trained)
    processor.encoder.device = "cpu"
    assert processor.encoder.model.dtype == dtype == processor.encoder.untrained.model.dtype
    assert resolve_dtype("auto", torch.device("cpu")) == dtype  # that of a recipe
    processor.save_pretrained(tmp_path / "saved")  # for other machines
    assert ArcAlignerProcessor.from_pretrained(tmp_path / "saved").encoder_dtype == "auto"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: speed == 60.0)
    assert fastest_dtype("cuda") == dtype
    fastest_dtype.cache_clear()


def test_an_encoder_in_bfloat16_is_saved_and_trained_on_unrounded(load, trained, tmp_path):
    processor = load("bfloat16", trained)
    processor.encoder.encode(TEXTS)
    processor.save_pretrained(tmp_path / "saved")
    name = "encoder/adapter_model.safetensors"
    expected, found = load_file(trained / name), load_file(tmp_path / "saved" / name)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], weight) for key, weight in expected.items())
    processor.train_encoder(lora_r=2)
    exact = load("float32", trained)
    exact.train_encoder(lora_r=2)
    pairs = zip(processor.encoder.model.parameters(), exact.encoder.model.parameters(), strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_an_unknown_dtype_is_refused(load):
    with pytest.raises(ValueError, match="`encoder_dtype` is 'float16'; expected one of float32, bfloat16, auto"):
        load("float16")
