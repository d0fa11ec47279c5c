"""Passages apart: each slot reads its own passage, so what was read of a passage serves any question."""

import copy
import random

import pytest
import torch
from conftest import ENCODER_WIDTH, aligner_for, chat_inputs, pipeline_of, processor_with
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import EXACT, assert_matches_reference, loss_gradients
from safetensors.torch import load_file, save_file
from tiny_models import random_rows, tiny_aligner

from arcaligner.generation_arcaligner import read_passages, read_text

pytestmark = pytest.mark.usefixtures("float64_model_code")
FIVE_TOKENS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
PASSAGES = [
    "It was written by Ada. Nobody knew how to read it aloud.",
    {"title": "Radik", "text": "He is a ski jumper. He has competed since 2003. He is tall, and his skis are longer."},
    "Parkdale is in Canada.",
]
MODES = [{"gate_mode": "off"}, {"gate_mode": "always"}, {"gate_mode": "adaptive"}]


@pytest.fixture(scope="module")
def apart(processor):
    """A processor that tells the model which slot belongs to which passage."""
    return processor_with(processor, passage_attention="separate", max_prompt_length=300)


@pytest.fixture(scope="module")
def model(processor):
    return aligner_for(processor, passage_attention="separate")


def cut(draw: random.Random, num_slots: int) -> list[int]:
    """Numbers of passages for the slots of a row: some passages of one slot, some of several."""
    numbers, number = [], 0
    for _ in range(num_slots):
        number += draw.random() < 0.4
        numbers.append(number)
    return numbers


# Algorithm 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(draw=st.randoms(use_true_random=False), training=st.booleans(), attention=st.sampled_from(["eager", "sdpa"]))
def test_passages_apart_are_those_of_the_plain_algorithm(draw, training, attention):
    settings = {"gate_mode": draw.choice(["off", "adaptive", "always"]), "max_refinement_steps": draw.choice([1, 2, 3])}
    model = tiny_aligner("llama", seed=draw.randrange(999), passage_attention="separate", **settings)
    model.set_attn_implementation(attention)
    counts = [draw.randrange(13) for _ in range(3)]
    rows = random_rows(model, counts, seed=draw.randrange(99), contiguous=True)
    passages = [cut(draw, count) for count in counts]
    side = draw.choice(["left", "right"])
    assert_matches_reference(model, rows, side, training, passages)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_plain_algorithm(seed):
    draw = random.Random(seed)
    model = tiny_aligner("qwen3", seed=seed, passage_attention="separate")
    rows = random_rows(model, [7, 0, 4], seed=seed, contiguous=True)
    gradients, expected = loss_gradients(model, rows, "right", [cut(draw, 7), [], cut(draw, 4)])
    assert any(each.abs().sum() > 0 for name, each in gradients.items() if "slot_gate" in name)
    torch.testing.assert_close(gradients, expected, **EXACT)


def test_a_joint_model_reads_the_passages_before_and_a_separate_one_does_not(apart, model, monkeypatch):
    def last_logits(documents):
        return model(**chat_inputs(apart, "Who?", documents)).logits[0, -1]

    assert torch.allclose(last_logits(PASSAGES), last_logits(PASSAGES[::-1]), rtol=0, atol=1e-9)
    monkeypatch.setattr(model.config, "passage_attention", "joint")
    assert (last_logits(PASSAGES) - last_logits(PASSAGES[::-1])).abs().max() > 1e-3


# Read once, joined for any question


@pytest.mark.parametrize("gates", MODES, ids=str)
def test_kept_passages_answer_in_any_combination_as_when_read_together(apart, model, gates):
    store = model.slot_prefix_store(apart)
    store.prepare("?", PASSAGES, **gates)
    assert (store.hits, store.misses) == (0, 3)
    new = ["Something new stands here."]
    combinations = [[2, 0], [1], [0, 1, 2], [2, 1]]
    questions = ["Who wrote it?", "When, and why?", "Who is tall?", "Where?"]
    documents = [[PASSAGES[number] for number in numbers] for numbers in combinations]
    documents[3] = documents[3] + new
    inputs = store.prepare(questions, documents, **gates)
    assert (store.hits, store.misses) == (8, 4)
    assert inputs.num_passages == [2, 1, 3, 3] and inputs.num_kept == [2, 1, 3, 2]
    found = model.generate(**inputs, **FIVE_TOKENS, output_logits=True, return_dict_in_generate=True)
    logits = torch.stack(found.logits, dim=1)
    for row, (question, passages) in enumerate(zip(questions, documents, strict=True)):
        alone = chat_inputs(apart, question, passages)
        expected = model.generate(**alone, **FIVE_TOKENS, **gates, output_logits=True, return_dict_in_generate=True)
        torch.testing.assert_close(logits[row], torch.stack(expected.logits, dim=1)[0], rtol=0, atol=1e-6)


def test_generated_tokens_are_those_of_reading_the_whole_again(apart, model):
    """Positions of new tokens count on from the longest passage, too."""
    inputs = chat_inputs(apart, "Who wrote it?", PASSAGES)
    ids = model.generate(**inputs, **FIVE_TOKENS)
    whole = inputs | {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1])}
    again = model(**whole, logits_to_keep=5).logits.argmax(dim=-1)
    assert torch.equal(again, ids[:, -5:])


@pytest.mark.parametrize("room", [0, 3, 99])
def test_a_joined_cache_grows_beyond_its_room_and_a_copy_is_its_own(apart, model, room, monkeypatch):
    monkeypatch.setattr("arcaligner.generation_arcaligner.ROOM", room)
    store, questions, documents = model.slot_prefix_store(apart), ["Who wrote it?", "When?"], [PASSAGES, PASSAGES[:1]]
    with torch.inference_mode():
        inputs = store.prepare(questions, documents)
    before = copy.deepcopy(inputs)
    ids = model.generate(**inputs, **FIVE_TOKENS)
    for layer, other in zip(inputs["past_key_values"].layers, before["past_key_values"].layers, strict=True):
        assert layer.keys.shape[2] == ids.shape[1] - 1  # the last token was not read
        assert torch.equal(layer.keys[:, :, : other.keys.shape[2]], other.keys)
    assert torch.equal(model.generate(**before, **FIVE_TOKENS), ids)
    for row, (question, passages) in enumerate(zip(questions, documents, strict=True)):
        alone = model.generate(**chat_inputs(apart, question, passages), **FIVE_TOKENS)
        assert torch.equal(ids[row, -5:], alone[0, -5:])


def test_a_batch_of_chats_beams_and_the_pipeline_answer_as_one_by_one(apart, model):
    ask = pipeline_of(model, apart)
    asked = [{"question": "Who?", "documents": PASSAGES[:number]} for number in (3, 0, 1, 2)]
    for options in ({}, {"num_beams": 3}, {"max_slots": 5}, {"return_slots": True}, {"refinement_budget": 0.2}):
        together = ask(asked, batch_size=4, **FIVE_TOKENS, **options)
        assert together == [ask(each, **FIVE_TOKENS, **options) for each in asked], options
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]
    chat += [{"role": "user", "content": "When?"}]
    (record,) = ask(chat, documents=PASSAGES, **FIVE_TOKENS)
    store = model.slot_prefix_store(apart)
    ids = model.generate(**store.prepare(chat, PASSAGES), **FIVE_TOKENS)
    assert record["generated_text"][-1]["content"] == apart.decode(ids[0, -5:], skip_special_tokens=True)


@pytest.mark.parametrize("most", [1, 6, 9, 99])
def test_the_first_slots_of_kept_passages_are_those_of_a_budget_of_slots(apart, model, most):
    store = model.slot_prefix_store(apart)
    ids = model.generate(**store.prepare("Who?", PASSAGES, max_slots=most), **FIVE_TOKENS)
    expected = model.generate(**chat_inputs(apart, "Who?", PASSAGES, max_slots=most), **FIVE_TOKENS)
    assert torch.equal(ids[:, -5:], expected[:, -5:])
    store.prepare("Who?", PASSAGES)
    assert store.misses == 3  # whole passages are kept


def test_passages_without_text_have_no_slots_beside_others(apart, model):
    store = model.slot_prefix_store(apart)
    for documents in ([], [" "], [" ", PASSAGES[0], {"title": "Nothing", "text": ""}]):
        inputs, plain = store.prepare("Who?", documents), chat_inputs(apart, "Who?", documents)
        assert torch.equal(inputs["input_ids"], plain["input_ids"])
        assert torch.equal(inputs["context_passage_ids"] * 0, plain["context_passage_ids"] * 0)


def test_precomputed_slots_are_kept_by_passage(apart, model):
    embeds = torch.randn(5, ENCODER_WIDTH, generator=torch.Generator().manual_seed(0))
    store, numbers = model.slot_prefix_store(apart), torch.tensor([3, 3, 4, 4, 4])
    store.prepare("Who?", context_embeds=embeds, context_passage_ids=numbers)
    turned = {"context_embeds": embeds.roll(3, dims=0), "context_passage_ids": torch.tensor([0, 0, 0, 1, 1])}
    inputs = store.prepare("Who?", **turned)
    assert store.misses == 2 and inputs["context_passage_ids"].tolist() == [[0, 0, 0, 1, 1]]
    ids = model.generate(**store.prepare("Who?", context_embeds=embeds, context_passage_ids=numbers), **FIVE_TOKENS)
    plain = chat_inputs(apart, "Who?", context_embeds=embeds, context_passage_ids=numbers)
    assert torch.equal(ids, model.generate(**plain, **FIVE_TOKENS))


def test_words_of_a_kept_passage_are_the_same_beside_longer_ones(processor):
    """A corpus hands over the words of all passages found, padded to the longest."""
    reader = processor_with(processor, passage_attention="separate", context_words=True)
    model = aligner_for(processor, passage_attention="separate", word_parts=2)
    store = model.slot_prefix_store(reader)
    _, embeds, words, passage_ids, *_ = reader.encode_documents(["Nobody knew how to read it aloud.", "Ada."])
    is_short = passage_ids == 1
    own = words[is_short][:, (words[is_short] >= 0).any(dim=0)]  # as long as its own words
    assert own.shape[1] < words.shape[1]
    alone = {"context_word_ids": own, "context_passage_ids": passage_ids[is_short]}
    store.prepare("Who?", context_embeds=embeds[is_short], **alone)
    both = {"context_embeds": embeds, "context_word_ids": words, "context_passage_ids": passage_ids}
    inputs = store.prepare("Who?", **both)
    assert (store.hits, store.misses) == (1, 2) and inputs.num_kept == [1]
    expected = model.generate(**chat_inputs(reader, "Who?", **both), **FIVE_TOKENS)
    assert torch.equal(model.generate(**inputs, **FIVE_TOKENS), expected)


# A folder of passages


def test_passages_read_ahead_are_found_by_a_store_that_writes_nothing(apart, model, tmp_path):
    ahead = model.slot_prefix_store(apart, max_bytes=0, folder=tmp_path)
    paths = ahead.keep("?", PASSAGES)
    assert len(paths) == 4 and set(paths) == set(tmp_path.iterdir())  # with the text before them
    assert ahead.keep("Another?", PASSAGES[1:]) == [paths[0], *paths[2:]]
    assert (ahead.misses, ahead.loads, ahead.bytes) == (3, 2, 0)
    store = model.slot_prefix_store(apart, folder=tmp_path, read_only=True)
    for question in ("Who?", "When?"):
        inputs = store.prepare(question, [PASSAGES[2], "Something new stands here.", PASSAGES[0]])
        plain = chat_inputs(apart, question, [PASSAGES[2], "Something new stands here.", PASSAGES[0]])
        assert torch.equal(model.generate(**inputs, **FIVE_TOKENS), model.generate(**plain, **FIVE_TOKENS))
    assert (store.loads, store.misses, store.hits) == (2, 1, 3) and inputs.num_kept == [3]
    assert set(paths) == set(tmp_path.iterdir())
    copied = copy.deepcopy(store)
    assert copied.read_only and copied.folder == tmp_path


def test_a_broken_file_is_warned_of_and_its_passage_read_again(apart, model, tmp_path, caplog):
    paths = model.slot_prefix_store(apart, folder=tmp_path).keep("Who?", PASSAGES)
    whole, kept = paths[2].read_bytes(), load_file(paths[2])["keys_values"].clone()
    paths[2].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    store = model.slot_prefix_store(apart, folder=tmp_path)
    ids = model.generate(**store.prepare("Who?", PASSAGES), **FIVE_TOKENS)
    assert torch.equal(ids, model.generate(**chat_inputs(apart, "Who?", PASSAGES), **FIVE_TOKENS))
    (message,) = caplog.messages
    assert paths[2].name in message and "not those that were saved" in message
    assert (store.loads, store.misses) == (2, 1)
    torch.testing.assert_close(load_file(paths[2])["keys_values"], kept)


def test_a_disk_that_fills_up_costs_no_answer(apart, model, tmp_path, monkeypatch, caplog):
    written = []

    def save(tensors, path, metadata):
        if len(written) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr("arcaligner.generation_arcaligner.save_file", save)
    store = model.slot_prefix_store(apart, max_bytes=0, folder=tmp_path)
    ids = model.generate(**store.prepare("Who?", PASSAGES), **FIVE_TOKENS)
    assert torch.equal(ids, model.generate(**chat_inputs(apart, "Who?", PASSAGES), **FIVE_TOKENS))
    assert "No space left on device" in caplog.text and "will be read again" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2
    store.prepare("Who?", PASSAGES)
    assert (store.loads, store.misses) == (1, 5)


@pytest.mark.parametrize("gates", MODES, ids=str)
def test_passages_share_rows_of_like_length_and_read_as_one_by_one(apart, model, gates, monkeypatch):
    documents = [" ".join(["It was written by Ada."] * (1 + number % 5)) for number in range(12)]
    encoded = apart.slot_encoder.encode_batch([[each] for each in documents])  # 33 slots
    head = apart.prompt_ids("Who?")[0]
    text, read, forward = read_text(model, head), [], type(model.model).forward

    def record(self, *args, **kwargs):
        read.append(tuple(kwargs["context_embeds"].shape[:2]))
        return forward(self, *args, **kwargs)

    alone = [read_passages(model, head, text, [each], **gates)[0] for each in encoded]
    monkeypatch.setattr(type(model.model), "forward", record)
    monkeypatch.setattr("arcaligner.generation_arcaligner.SLOTS_PER_ROW", 9)
    monkeypatch.setattr("arcaligner.generation_arcaligner.SLOTS_PER_BATCH", 20)
    for each, other in zip(read_passages(model, head, text, encoded, **gates), alone, strict=True):
        torch.testing.assert_close(each, other, **EXACT)
    if gates["gate_mode"] == "off":
        assert read == [(2, 9), (2, 8)]
    else:  # each passage has its own row, and its own budget
        assert sum(rows for rows, _ in read) == 12 and max(rows * width for rows, width in read) <= 20


# Refused


def test_numbers_of_passages_that_do_not_fit_the_slots_are_refused(model):
    (row,) = random_rows(model, [4], contiguous=True, num_text=6)
    inputs = {"input_ids": row.input_ids[None], "context_embeds": torch.ones(1, 4, ENCODER_WIDTH).double()}
    for numbers, message in [
        ([[0, 1, 0, 1]], "never fall"),
        ([[0, 0, -1, -1]], "of at least 0"),
        ([[0, 0]], "of shape \\(1, 4\\)"),
        ([[0.0, 0.0, 1.0, 1.0]], "expected whole numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**inputs, context_passage_ids=torch.tensor(numbers))
    with pytest.raises(ValueError, match="is list; expected whole numbers"):
        model(**inputs, context_passage_ids=[0, 0, 1, 1])
    (row,) = random_rows(model, [4], seed=3, num_text=6)
    with pytest.raises(ValueError, match="There is text between the slots"):
        model(**inputs | {"input_ids": row.input_ids[None]}, context_passage_ids=torch.tensor([[0, 0, 1, 1]]))


@pytest.mark.parametrize("backbone", ["mistral_window", "gemma2"])
def test_a_backbone_with_a_sliding_window_is_refused(backbone):
    model = tiny_aligner(backbone, passage_attention="separate")
    (row,) = random_rows(model, [4], contiguous=True)
    inputs = {"input_ids": row.input_ids[None], "context_embeds": row.context_embeds[None]}
    with pytest.raises(ValueError, match="have a sliding window.*Use 'joint'"):
        model(**inputs, context_passage_ids=torch.tensor([[0, 0, 1, 1]]))
    model(**inputs)  # one passage


def test_kept_passages_are_not_joined_behind_a_sliding_window(processor, apart):
    store = aligner_for(processor, "mistral_window", passage_attention="separate").slot_prefix_store(apart)
    with pytest.raises(ValueError, match="have a sliding window.*Use 'joint', or pass one passage"):
        store.prepare("Who?", PASSAGES)
    assert store.misses == 0  # said before anything is read
    store.prepare("Who?", PASSAGES[:1])


def test_a_kernel_without_masks_is_refused_by_name(model, monkeypatch):
    (row,) = random_rows(model, [4], contiguous=True)
    inputs = {"input_ids": row.input_ids[None], "context_embeds": torch.ones(1, 4, ENCODER_WIDTH).double()}
    monkeypatch.setattr(model.config.text_config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(ValueError, match="attention `flash_attention_2` takes no mask"):
        model(**inputs, context_passage_ids=torch.tensor([[0, 0, 1, 1]]))


def test_a_store_of_a_model_and_a_processor_that_disagree_is_refused(processor, model):
    with pytest.raises(ValueError, match="`passage_attention` is 'separate' of the model and 'joint' of the processor"):
        model.slot_prefix_store(processor)


def test_passages_together_may_be_longer_than_the_context_and_one_may_not(apart, model):
    words = "He is tall. " * 50  # a slot each
    inputs = chat_inputs(apart, "Who?", [words + str(number) for number in range(6)])
    assert inputs["input_ids"].shape[1] > 300
    store = model.slot_prefix_store(apart)
    kept = store.prepare("Who?", [words + str(number) for number in range(6)])
    ids = model.generate(**kept, **FIVE_TOKENS)
    assert torch.equal(ids[:, -5:], model.generate(**inputs, **FIVE_TOKENS)[:, -5:])
    with pytest.raises(ValueError, match="room for 262"):
        model.generate(**chat_inputs(apart, "Who?", [words * 6]), **FIVE_TOKENS)
    with pytest.raises(ValueError, match="there is room for"):
        store.prepare("Who?", [words * 6])


def test_a_question_too_long_for_the_longest_kept_passage_is_refused_and_nothing_read(apart, model):
    store = model.slot_prefix_store(apart)
    store.prepare("Who?", PASSAGES)
    with pytest.raises(ValueError, match="The prompt has .* positions but the backbone llama reads 300"):
        store.prepare("Who? " * 150, PASSAGES)
    with pytest.raises(ValueError, match=r"^Passage 4 is \d+ slots, but there is room for \d+ beside the question"):
        store.prepare("Who?", [*PASSAGES, " ", "He is tall. " * 300])
    with pytest.raises(ValueError, match="^Passage 1 of question 1 is 300 slots"):
        store.prepare(["Who?", "When?"], [PASSAGES, ["Short.", "He is tall. " * 300]])
    assert store.misses == 6 and len(store) == 4  # the last three were neither read nor kept


def test_a_checkpoint_trained_jointly_is_read_apart_by_name_with_one_warning(processor, model, tmp_path, caplog):
    trained = aligner_for(processor, passage_attention="separate")
    trained.config.passage_attention, trained.config.training_stage = "joint", "grounding"
    trained.save_pretrained(tmp_path)
    config = type(trained.config)
    assert config.from_pretrained(tmp_path).passage_attention == "joint" and not caplog.messages
    for _ in range(2):
        assert config.from_pretrained(tmp_path, passage_attention="separate").passage_attention == "separate"
    (message,) = caplog.messages
    assert "was trained with `passage_attention` 'joint' and is loaded with 'separate'" in message
    assert config.from_pretrained(tmp_path).passage_attention == "joint"  # the file says what it was trained for
