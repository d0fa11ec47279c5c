"""From passages to slots: segments, their embeddings, several slots per segment, and token embeddings in slots."""

import copy
import itertools
import json
import math
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import ENCODER_WIDTH, chat_inputs, greedy_answer, pipeline_of, random_aligner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_passage_cache import assert_answers
from torch.nn.functional import normalize

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor, encoder_arcaligner, segmentation_arcaligner
from arcaligner.answering_arcaligner import maxsim_score
from arcaligner.encoder_arcaligner import SentenceEncoder, fastest_dtype
from arcaligner.modeling_arcaligner import ContextProjector
from arcaligner.segmentation_arcaligner import equal_spans, segment_document
from arcaligner.train.recipe import resolve_dtype
from arcaligner.train.sft import set_word_statistics

QUESTION = "What sport does he play?"
DOCUMENTS = [
    "It was written by Ada, and nobody else knew how to read it aloud.",
    {"title": "Radik", "text": "Radik is a ski jumper.  He has competed since 2003 for Kazakhstan!"},
]
EXACT = {"atol": 1e-6, "rtol": 0}

# Segments: no text is lost, offsets are right, segments fit the encoder

TEXT = "One is here. Two goes there!  Is three next? Four ends it."


def reads_of(longest):
    return lambda text: -(-len(text) // longest)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("ab .!?\n\t\u2028\x00é漢😀'\""), max_size=200),
    sentences=st.sampled_from([0.5, 1, 2, 3]),
    longest=st.integers(1, 30),
)
def test_segments_keep_order(text, sentences, longest):
    """Segments keep order and offsets, and lose only white space."""
    segments = segment_document(text, 3, sentences_per_segment=sentences, num_parts=reads_of(longest))
    ends = [0]
    for segment in segments:
        assert text[segment.start : segment.end] == segment.text and segment.document == 3
        assert segment.text.strip() and len(segment.text) <= longest
        assert not text[ends[-1] : segment.start].strip()
        ends.append(segment.end)
    assert not text[ends[-1] :].strip()


URL = "https://" + "example.com/!?" * 20


@pytest.mark.parametrize(
    "text, options, expected",
    [
        ("One. Two!", {}, ["One.", "Two!"]),
        ("Aaaa bbbb cccc dddd.", {"sentences_per_segment": 0.5}, ["Aaaa bbbb", "cccc dddd."]),  # nearest to the middle
        ("Stop!", {"sentences_per_segment": 0.5}, ["Stop!"]),  # a single word is not split
        (TEXT, {"sentences_per_segment": 3}, ["One is here. Two goes there!  Is three next?", "Four ends it."]),
        ("aa bb cc dd ee", {"num_parts": reads_of(6)}, ["aa bb", "cc", "dd ee"]),  # split at spaces
        (f"See {URL}page. It is long! Yes.", {}, [f"See {URL}page.", "It is long!", "Yes."]),
    ],
)
def test_segments_halve_or_merge_sentences(text, options, expected):
    assert [segment.text for segment in segment_document(text, **options)] == expected


@pytest.mark.parametrize("text", [*'("[😀$a!. \n', "(.a", "你好。", "(" * 16 + " ", "[1].", "a ", "мир! Hi. "])
def test_segmentation_takes_linear_time(text):
    """On runs of brackets, spaCy's own tokenizer needs 25 seconds for 10,000 characters, four times that for 20,000."""
    text, start = (text * 100_000)[:100_000], time.process_time()
    segments = segment_document(text, sentences_per_segment=0.5, num_parts=reads_of(500))
    assert time.process_time() - start < 3
    assert "".join("".join(segment.text for segment in segments).split()) == "".join(text.split())


def test_spacy_vocabulary_stays_bounded(monkeypatch):
    nlp, most_words = segmentation_arcaligner._load_spacy("en")
    monkeypatch.setattr(segmentation_arcaligner, "_MAX_NEW_WORDS", 100)
    segmentation_arcaligner._new_spacy.cache_clear()
    for start in range(0, 200, 50):
        assert len(segment_document(" ".join(f"new{number}." for number in range(start, start + 50)))) == 50
        assert len(segmentation_arcaligner._load_spacy("en")[0].vocab.strings) < most_words
    segmentation_arcaligner._new_spacy.cache_clear()


def test_impossible_segment_settings(load):
    """Impossible numbers of sentences and an unknown dtype are refused."""
    for sentences in (0, 0.25, 1.5):
        with pytest.raises(ValueError, match=rf"`sentences_per_segment` is {sentences}; expected 0.5"):
            segment_document("One.", sentences_per_segment=sentences)
    with pytest.raises(ValueError, match="`encoder_dtype` is 'float16'; expected one of float32, bfloat16, auto"):
        load("float16")


# The encoder, and its dtype

TEXTS = ["It was written by Ada, and nobody else knew.", "", "Radik has competed since 2003."] * 4


@pytest.fixture
def load(checkpoint_dir):
    """Loads the processor of the tiny checkpoint, or of another folder, with an encoder in a given dtype."""
    return lambda dtype, folder=checkpoint_dir: ArcAlignerProcessor.from_pretrained(folder, encoder_dtype=dtype)


@pytest.fixture
def trained(load, tmp_path):
    """A checkpoint with an encoder that was trained jointly."""
    processor = load("float32")
    for weight in processor.train_encoder(lora_r=2):
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    processor.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_encoder_equals_sentence_transformers(processor):
    expected = processor.encoder.model.encode(TEXTS, normalize_embeddings=True, convert_to_tensor=True)
    torch.testing.assert_close(processor.encoder.encode(TEXTS), expected, **EXACT)


def test_maxsim_score(processor):
    """The MaxSim score is the mean, over content words of the question, of the highest cosine in the passages."""
    question, passages = "Who wrote the letter?", [{"title": "Post", "text": "Ada wrote it."}, "It was a long letter."]

    def tokens(text):
        states = processor.encoder.model.encode(text, output_value="token_embeddings", convert_to_tensor=True)
        places = processor.encoder.model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        pairs = zip(places, normalize(states, dim=-1), strict=True)
        return {place: state for place, state in pairs if place[0] < place[1]}

    theirs = torch.stack([*tokens("Post Ada wrote it.").values(), *tokens("It was a long letter.").values()])
    question_tokens = tokens(question)
    said = [(a, b) for a, b in question_tokens if question[a:b].lower() not in ("who", "the", "?")]
    assert 0 < len(said) < len(question_tokens)
    expected = torch.stack([(theirs @ question_tokens[place]).max() for place in said]).mean().item()
    said = [("user", "Hi."), ("assistant", "Yes?"), ("user", question)]
    chat = [{"role": role, "content": content} for role, content in said]
    without_tokens = ["\u200b"]
    for prompt, texts in ((question, passages), (chat, passages), (question, without_tokens + passages)):
        assert maxsim_score(processor, prompt, texts) == pytest.approx(expected, abs=1e-3)  # cached in float16
    for texts in ([], [""], without_tokens, [{"title": question, "text": " "}]):
        assert math.isnan(maxsim_score(processor, question, texts))
    assert math.isnan(maxsim_score(processor, "", passages))


def test_prompt_words_are_not_text(encoder_dir):
    """Words of the encoder's own prompt do not count as words of the text."""
    encoder, prompted = SentenceEncoder(str(encoder_dir)), SentenceEncoder(str(encoder_dir))
    prompted.model.prompts, prompted.model.default_prompt_name = {"query": "book author: "}, "query"
    (plain, _), (words, states) = (one.encode_words(["Who wrote it?"])[0] for one in (encoder, prompted))
    assert words == plain and len(states) == len(plain)


def test_long_passages_match_every_word(processor, monkeypatch):
    encoder, encoded = processor.encoder, []
    encode = encoder.encode_words
    monkeypatch.setattr(encoder, "encode_words", lambda texts: encoded.extend(texts) or encode(texts))
    long = " ".join(f"Number {number} stands here." for number in range(200))
    maxsim_score(processor, "Which one?", [long])
    question, *pieces = encoded
    assert question == "Which one?" and " ".join(pieces) == long
    assert len(pieces) > 1 and {encoder.num_parts(piece) for piece in pieces} == {1}


def test_bfloat16_embeddings_are_normalized(load, checkpoint_dir, trained):
    """bfloat16 rounds the embeddings, which stay normalized and float32."""
    for folder, rate in itertools.product((checkpoint_dir, trained), ("segment", 3)):
        exact, rounded = load("float32", folder), load("bfloat16", folder)
        encoded = (processor.encode_documents(TEXTS, tokens_per_slot=rate) for processor in (exact, rounded))
        expected, embeds = (passages.context_embeds for passages in encoded)
        torch.testing.assert_close(embeds, expected, rtol=0, atol=0.02)
        assert not torch.equal(embeds, expected)
        torch.testing.assert_close(embeds.norm(dim=1), torch.ones(len(embeds)))


@pytest.mark.parametrize(("speed", "dtype"), [(60.0, torch.bfloat16), (25.0, torch.float32)])
def test_auto_prefers_fast_bfloat16(load, trained, monkeypatch, speed, dtype, tmp_path):
    """`auto` is bfloat16 if the machine is much faster in it."""
    fastest_dtype.cache_clear()
    monkeypatch.setattr(encoder_arcaligner, "_products_per_second", {torch.bfloat16: speed, torch.float32: 20.0}.get)
    processor = load("auto", trained)
    processor.encoder.device = "cpu"
    assert processor.encoder.model.dtype == dtype == processor.encoder.untrained.model.dtype
    assert resolve_dtype("auto", torch.device("cpu")) == dtype  # the default of recipes
    processor.save_pretrained(tmp_path / "saved")  # for other machines
    assert ArcAlignerProcessor.from_pretrained(tmp_path / "saved").encoder_dtype == "auto"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: speed == 60.0)
    assert fastest_dtype("cuda") == dtype
    fastest_dtype.cache_clear()


def test_bfloat16_encoder_keeps_float32_weights(load, trained, tmp_path):
    """An encoder in bfloat16 is saved, and trained further, without rounding."""
    processor, exact = load("bfloat16", trained), load("float32", trained)
    processor.encoder.encode(TEXTS)
    processor.save_pretrained(tmp_path / "saved")
    files = [folder / "encoder/adapter_model.safetensors" for folder in (trained, tmp_path / "saved")]
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=0)
    for instance in (processor, exact):
        instance.train_encoder(lora_r=2)
    states = [instance.encoder.model.state_dict() for instance in (processor, exact)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


# Several slots of a segment, and their words


@pytest.fixture(scope="session")
def words_processor(processor) -> ArcAlignerProcessor:
    """Like `processor`, for an aligner with token embeddings, trained for 3 tokens per slot and for segments."""
    processor = copy.deepcopy(processor)
    processor.tokens_per_slot, processor.trained_tokens_per_slot = 3, [3, "segment"]
    processor.context_words = True
    return processor


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory, base_model_dir: Path, words_processor) -> Path:
    """A random aligner checkpoint with token embeddings in three parts."""
    folder = tmp_path_factory.mktemp("words")
    model = random_aligner(base_model_dir, words_processor, seed=3, word_parts=3)
    weights = torch.rand(model.config.text_config.vocab_size, generator=torch.Generator().manual_seed(0)) + 0.1
    set_word_statistics(model.model.projector, model.get_input_embeddings().weight, weights)
    model.save_pretrained(folder)
    words_processor.save_pretrained(folder)
    return folder


@pytest.fixture
def words_model(words_dir: Path) -> ArcAlignerForCausalLM:
    return ArcAlignerForCausalLM.from_pretrained(str(words_dir)).eval()


@given(num_tokens=st.integers(1, 200), tokens_per_slot=st.integers(1, 40))
def test_spans_have_equal_lengths(num_tokens, tokens_per_slot):
    """Spans contain all tokens in order, and have about the requested length."""
    runs = equal_spans(num_tokens, tokens_per_slot)
    lengths = [end - start for start, end in runs]
    assert [start for start, _ in runs] == [0, *[end for _, end in runs][:-1]] and runs[-1][1] == num_tokens
    assert max(lengths) - min(lengths) <= 1
    assert len(runs) == max(1, int(num_tokens / tokens_per_slot + 0.5))


@pytest.mark.parametrize("rate", [1, 3, 8, "segment"])
def test_slots_cover_the_document(words_processor, processor, rate):
    """The slots of a document cover all of its text and tokens."""
    encoded, tokenizer = words_processor.encode_documents(DOCUMENTS, tokens_per_slot=rate), processor.tokenizer
    for number, text in enumerate((DOCUMENTS[0], DOCUMENTS[1]["text"])):
        pieces = [segment for segment in encoded.segments if segment.document == number]
        assert "".join(piece.text for piece in pieces) == text.replace("  ", "")
        assert all(piece.text == text[piece.start : piece.end] for piece in pieces)
    words = encoded.context_word_ids
    expected = tokenizer([DOCUMENTS[0], "Radik: " + DOCUMENTS[1]["text"]], add_special_tokens=False)["input_ids"]
    # White space between two sentences belongs to none.
    word_ids, expected = words[words >= 0].tolist(), [token for ids in expected for token in ids]
    word_ids, expected = ([token for token in ids if tokenizer.decode([token]).strip()] for ids in (word_ids, expected))
    assert word_ids == expected and len(encoded.segments) == len(encoded.context_embeds) == len(words)
    cut = words_processor.encode_documents(DOCUMENTS, tokens_per_slot=rate, max_slots=2)
    assert cut.segments == encoded.segments[:2] and cut.dropped == encoded.segments[2:]
    assert torch.equal(cut.context_embeds, encoded.context_embeds[:2]) and len(cut.context_word_ids) == 2
    if rate == "segment":
        expected = processor.encode_documents(DOCUMENTS).context_embeds
        torch.testing.assert_close(encoded.context_embeds, expected, **EXACT)


def test_unknown_rate_warns(words_processor, caplog):
    """Tokens per slot that the aligner was not trained for give a warning with the trained numbers."""
    words_processor.encode_documents(DOCUMENTS, tokens_per_slot=3)
    assert "was trained with" not in caplog.text
    words_processor.encode_documents(DOCUMENTS, tokens_per_slot=5)
    assert "`tokens_per_slot` is 5, but this aligner was trained with 3, segment" in caplog.text


def test_slot_parts_add_up():
    """The parts of a slot add up to the mean of its words, weighted by rarity."""
    projector = ContextProjector(4, 6, word_parts=3, vocab_size=20)
    table, rarity = torch.randn(20, 6), torch.rand(20)
    set_word_statistics(projector, table, rarity)
    word_ids = torch.tensor([[3, 7, 7, 1], [5, -1, -1, -1], [-1, -1, -1, -1]])
    parts = projector.average_words(word_ids, table)  # (slots, parts, hidden)
    words, weights = table[[3, 7, 7, 1]] - table.mean(dim=0), rarity[[3, 7, 7, 1]]
    torch.testing.assert_close(parts[0].sum(dim=0), (weights[:, None] * words).sum(dim=0) / weights.sum(), **EXACT)
    # Four words in three parts: two, one, one.
    torch.testing.assert_close(parts[0, 0], (weights[:2, None] * words[:2]).sum(dim=0) / weights.sum(), **EXACT)
    torch.testing.assert_close(parts[1, 0], table[5] - table.mean(dim=0), **EXACT)
    assert not parts[1, 1:].any() and not parts[2].any()
    parts[0, 0].square().sum().backward()  # how much a word counts is learned
    gradient = projector.word_weights.grad
    assert gradient[[3, 7, 1]].all() and not gradient[[5, 0]].any()


def test_fresh_slot_of_one_word(base_model_dir):
    """A new slot of one word is close to the embedding of this word."""
    model = ArcAlignerForCausalLM.from_pretrained(str(base_model_dir), encoder_hidden_size=ENCODER_WIDTH, word_parts=2)
    table = model.get_input_embeddings().weight
    set_word_statistics(model.model.projector, table, torch.ones(len(table)))
    slot = model.model.project(normalize(torch.randn(1, 1, ENCODER_WIDTH), dim=-1), torch.tensor([[[17]]]))[0, 0]
    mean = table.mean(dim=0)
    assert torch.cosine_similarity(slot - mean, table[17] - mean, dim=0) > 0.9
    torch.testing.assert_close((slot - mean).norm(), (table - mean).norm(dim=1).mean())


def test_words_travel_with_embeddings(words_model, words_processor):
    """The words of slots change the logits, and can be given with precomputed embeddings."""
    encoded = words_processor.encode_documents(DOCUMENTS)
    made = {"context_embeds": encoded.context_embeds, "context_word_ids": encoded.context_word_ids}
    inputs = words_processor(text=QUESTION, **made, return_tensors="pt")
    expected = words_processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    assert inputs.keys() == expected.keys()
    torch.testing.assert_close(dict(inputs), dict(expected))
    both = words_processor(text=[QUESTION] * 2, documents=[["Ada."], DOCUMENTS], return_tensors="pt")
    assert torch.equal(both["context_word_ids"][1], expected["context_word_ids"][0])
    assert (both["context_word_ids"][0, 1:] == -1).all()
    others = inputs | {"context_word_ids": inputs["context_word_ids"].roll(1, dims=1)}
    assert not torch.allclose(words_model(**inputs).logits, words_model(**others).logits)


def test_pipeline_uses_words_of_rows(words_model, words_processor):
    """The pipeline uses the words of each row of a batch."""
    inputs, row = chat_inputs(words_processor, QUESTION, DOCUMENTS), {"question": QUESTION, "documents": DOCUMENTS}
    ask = pipeline_of(words_model, words_processor, max_new_tokens=6)
    batch = ask([row, "plain text", {"question": "Who?", "documents": ["Ada."]}, row], batch_size=4)
    expected = [{"generated_text": greedy_answer(words_model, words_processor, inputs, 6)}]
    assert batch[0] == batch[3] == ask(row) == expected


def test_cached_prefixes_at_each_rate(words_model, words_processor):
    """Cached prefixes give the answers of the model for each number of tokens per slot."""
    store = words_model.double().passage_cache(words_processor)
    for rate in (3, "segment", 3):
        assert_answers(store, [QUESTION], slots={"tokens_per_slot": rate}, documents=[DOCUMENTS])
    assert (store.hits, store.misses) == (1, 2)


def test_word_statistics_are_saved(words_dir):
    """Word statistics are saved in the checkpoint, in float32."""
    whole, half = (ArcAlignerForCausalLM.from_pretrained(str(words_dir), dtype=d) for d in (None, torch.bfloat16))
    saved = load_file(words_dir / "model.safetensors")
    for name in ("word_weights", "word_mean", "slot_norm", "slot_mean", "part_maps"):
        assert torch.equal(getattr(whole.model.projector, name), saved[f"model.projector.{name}"])
    assert half.model.projector.word_weights.dtype == torch.float32


@pytest.mark.parametrize(
    "name, content",
    [
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "own.Module"}]),
        ("router_config.json", {"types": {"query_0": "sentence_transformers.models.Pooling", "query_1": "own.Module"}}),
        ("0/wordembedding_config.json", {"tokenizer_class": "own.Module"}),
    ],
)
def test_an_encoder_brings_no_code(encoder_dir, tmp_path, name, content):
    """sentence-transformers before 6 would run the Python files of an encoder's folder."""
    folder = tmp_path / "encoder"
    shutil.copytree(encoder_dir, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    (folder / "own.py").write_text("raise AssertionError('run')")
    with pytest.raises(ValueError, match=f"{name} names the class 'own.Module'; expected a class of the package"):
        assert SentenceEncoder(str(folder)).model
