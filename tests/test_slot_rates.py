"""What a slot is made of, beyond the paper: several slots per segment, and its own words beside its embedding."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import ENCODER_WIDTH, chat_inputs, random_aligner
from hypothesis import given
from hypothesis import strategies as st

from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor
from arcaligner.modeling_arcaligner import ContextProjector
from arcaligner.segmentation_arcaligner import equal_runs

QUESTION = "What sport does he play?"
DOCUMENTS = [
    {"title": "Radik", "text": "Radik is a ski jumper.  He has competed since 2003 for Kazakhstan!"},
    "It was written by Ada, and nobody else knew how to read it aloud.",
]
EXACT = {"atol": 1e-6, "rtol": 0}


@pytest.fixture
def words_processor(processor) -> ArcAlignerProcessor:
    """As `processor`, for an aligner that has learned runs of 3 tokens and segments, and reads words."""
    return reading_words(processor)


def reading_words(processor) -> ArcAlignerProcessor:
    processor = copy.deepcopy(processor)
    processor.tokens_per_slot, processor.trained_tokens_per_slot = 3, [3, "segment"]
    processor.context_words = True
    return processor


@pytest.fixture(scope="session")
def words_dir(tmp_path_factory, base_model_dir: Path, processor) -> Path:
    """An aligner checkpoint that reads words in three parts; all of it is random."""
    folder = tmp_path_factory.mktemp("words")
    model = random_aligner(base_model_dir, processor, seed=3, word_parts=3)
    weights = torch.rand(model.config.text_config.vocab_size, generator=torch.Generator().manual_seed(0)) + 0.1
    model.model.projector.set_word_statistics(model.get_input_embeddings().weight, weights)
    model.save_pretrained(folder)
    reading_words(processor).save_pretrained(folder)
    return folder


@pytest.fixture
def words_model(words_dir: Path) -> ArcAlignerForCausalLM:
    return ArcAlignerForCausalLM.from_pretrained(str(words_dir)).eval()


# Runs


@given(num_tokens=st.integers(1, 200), tokens_per_slot=st.integers(1, 40))
def test_runs_are_all_tokens_in_order_and_about_as_long_as_asked(num_tokens, tokens_per_slot):
    runs = equal_runs(num_tokens, tokens_per_slot)
    lengths = [end - start for start, end in runs]
    assert [start for start, _ in runs] == [0, *[end for _, end in runs][:-1]] and runs[-1][1] == num_tokens
    assert max(lengths) - min(lengths) <= 1
    assert len(runs) == max(1, int(num_tokens / tokens_per_slot + 0.5))


@pytest.mark.parametrize("rate", [1, 3, 8, "segment"])
def test_slots_stand_for_all_of_a_segments_text_with_its_characters(words_processor, rate):
    encoded = words_processor.encode_documents(DOCUMENTS, tokens_per_slot=rate)
    for number, document in enumerate(DOCUMENTS):
        text = document if isinstance(document, str) else document["text"]
        pieces = [each for each in encoded.segments if each.document == number]
        assert "".join(piece.text for piece in pieces) == text.replace("  ", "")
        assert all(piece.text == text[piece.start : piece.end] for piece in pieces)
    assert len(encoded.segments) == len(encoded.context_embeds) == len(encoded.context_word_ids)


@pytest.mark.parametrize("rate", [1, 3, 8, "segment"])
def test_words_of_the_slots_are_the_documents_tokens_with_the_title_first(words_processor, rate):
    words = words_processor.encode_documents(DOCUMENTS, tokens_per_slot=rate).context_word_ids
    tokenizer = words_processor.tokenizer
    expected = tokenizer(["Radik: " + DOCUMENTS[0]["text"], DOCUMENTS[1]], add_special_tokens=False)["input_ids"]
    # White space between two sentences belongs to none.
    found, expected = words[words >= 0].tolist(), [token for ids in expected for token in ids]
    found, expected = ([token for token in ids if tokenizer.decode([token]).strip()] for ids in (found, expected))
    assert found == expected


def test_one_slot_per_segment_is_the_papers_embedding(words_processor, processor):
    found = words_processor.encode_documents(DOCUMENTS, tokens_per_slot="segment").context_embeds
    torch.testing.assert_close(found, processor.encode_documents(DOCUMENTS).context_embeds, **EXACT)


def test_first_slots_are_kept_within_a_budget(words_processor):
    whole = words_processor.encode_documents(DOCUMENTS)
    cut = words_processor.encode_documents(DOCUMENTS, max_slots=4)
    assert cut.segments == whole.segments[:4] and cut.dropped == whole.segments[4:]
    assert torch.equal(cut.context_embeds, whole.context_embeds[:4]) and len(cut.context_word_ids) == 4


def test_a_rate_that_was_not_learned_warns_and_names_those_that_were(words_processor, caplog):
    words_processor.encode_documents(DOCUMENTS, tokens_per_slot=3)
    assert "has learned" not in caplog.text
    words_processor.encode_documents(DOCUMENTS, tokens_per_slot=5)
    assert "`tokens_per_slot` is 5, but this aligner has learned 3, segment" in caplog.text


@pytest.mark.parametrize("rate", [0, -1, 2.5, "sentence", True, [4]])
def test_a_rate_that_cannot_be_is_refused(words_processor, rate):
    with pytest.raises(ValueError, match="`tokens_per_slot` is .*whole number of tokens"):
        words_processor(text=QUESTION, documents=DOCUMENTS, tokens_per_slot=rate)


# Words in the model


def test_parts_of_a_slot_add_up_to_the_mean_of_its_words_by_rarity():
    projector = ContextProjector(4, 6, word_parts=3, vocab_size=20)
    table, rarity = torch.randn(20, 6), torch.rand(20)
    projector.set_word_statistics(table, rarity)
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


def test_a_fresh_slot_of_one_word_is_nearly_that_words_embedding(base_model_dir):
    model = ArcAlignerForCausalLM.from_pretrained(str(base_model_dir), encoder_hidden_size=ENCODER_WIDTH, word_parts=2)
    table = model.get_input_embeddings().weight
    model.model.projector.set_word_statistics(table, torch.ones(len(table)))
    embeds = torch.nn.functional.normalize(torch.randn(1, 1, ENCODER_WIDTH), dim=-1)
    slot = model.model.project(embeds, torch.tensor([[[17]]]))[0, 0]
    mean = table.mean(dim=0)
    assert torch.cosine_similarity(slot - mean, table[17] - mean, dim=0) > 0.9
    torch.testing.assert_close((slot - mean).norm(), (table - mean).norm(dim=1).mean())


def test_rows_with_words_answer_in_a_batch_as_alone(words_dir):
    # In float64: what float32 rounds otherwise in a padded batch depends on the processor.
    model = ArcAlignerForCausalLM.from_pretrained(str(words_dir), dtype=torch.float64).eval()
    processor = ArcAlignerProcessor.from_pretrained(str(words_dir))
    processor.encoder.cast(torch.float64)
    rows = [DOCUMENTS, ["Ada."], []]
    batch = processor(text=[QUESTION] * 3, documents=rows, return_tensors="pt", padding=True, padding_side="left")
    together = model(**batch).logits[:, -1]
    for row, documents in enumerate(rows):
        alone = model(**processor(text=QUESTION, documents=documents, return_tensors="pt")).logits[:, -1]
        torch.testing.assert_close(together[row], alone[0], atol=1e-5, rtol=1e-5)


def test_words_change_what_is_read(words_model, words_processor):
    inputs = words_processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    others = inputs | {"context_word_ids": inputs["context_word_ids"].roll(1, dims=1)}
    assert not torch.allclose(words_model(**inputs).logits, words_model(**others).logits)


def test_words_travel_with_embeddings_that_were_made_before(words_model, words_processor):
    encoded = words_processor.encode_documents(DOCUMENTS)
    made = {"text": QUESTION, "context_embeds": encoded.context_embeds, "context_word_ids": encoded.context_word_ids}
    given = words_processor(**made, return_tensors="pt")
    expected = words_processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    assert given.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(given[name], expected[name])
    with pytest.raises(ValueError, match="`context_word_ids` of row 0 have shape"):
        words_processor(**made | {"context_word_ids": encoded.context_word_ids[:2]})


@pytest.mark.parametrize("rate", [3, "segment"])
def test_pipeline_and_kept_prefixes_answer_as_the_model_does_at_each_rate(words_model, words_processor, rate):
    inputs = chat_inputs(words_processor, QUESTION, DOCUMENTS, tokens_per_slot=rate)
    answer = words_model.generate(**inputs, max_new_tokens=6, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    expected = words_processor.batch_decode(answer, skip_special_tokens=True)[0]
    ask = ArcAlignerPipeline(words_model, words_processor)
    row = {"question": QUESTION, "documents": DOCUMENTS}
    alone = ask(row, tokens_per_slot=rate, max_new_tokens=6, return_slots=True)[0]
    assert alone["generated_text"] == expected
    assert len(alone["segments"]) == alone["statistics"]["slots"] == inputs["context_embeds"].shape[1]
    batch = ask([row, "plain text", row], tokens_per_slot=rate, max_new_tokens=6, batch_size=3)
    assert [batch[0][0]["generated_text"], batch[2][0]["generated_text"]] == [expected] * 2
    store = words_model.slot_prefix_store(words_processor)
    kept = store.prepare(QUESTION, DOCUMENTS, tokens_per_slot=rate)
    found = words_model.generate(**kept, max_new_tokens=6, do_sample=False)[:, kept["input_ids"].shape[1] :]
    assert torch.equal(found, answer)
    store.prepare(QUESTION, DOCUMENTS, tokens_per_slot={3: "segment", "segment": 3}[rate])
    assert store.misses == 2


def test_word_statistics_are_part_of_the_checkpoint(words_model, words_dir):
    again = ArcAlignerForCausalLM.from_pretrained(str(words_dir))
    for name in ("word_weights", "word_mean", "slot_norm", "slot_mean", "part_maps"):
        assert torch.equal(getattr(again.model.projector, name), getattr(words_model.model.projector, name))
    half = ArcAlignerForCausalLM.from_pretrained(str(words_dir), dtype=torch.bfloat16)
    assert half.model.projector.word_weights.dtype == torch.float32
