"""Independent passages: slots attend to their own passage only, so that each passage can be cached by itself."""

import copy
import math
import random
from unittest import mock

import pytest
import torch
from conftest import aligner_for, chat_inputs, pipeline_of, processor_with
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import EXACT, assert_matches_reference, loss_gradients
from safetensors.torch import load_file, save_file
from test_passage_cache import FIVE_TOKENS, assert_answers
from tiny_models import collate, for_generate, random_rows, tiny_aligner
from transformers import StaticCache

from arcaligner import encoder_arcaligner, kv_cache_arcaligner, segmentation_arcaligner
from arcaligner.configuration_arcaligner import ArcAlignerConfig
from arcaligner.kv_cache_arcaligner import (
    PassageCache,
    SlotPrefixStore,
    prefill_beginning,
    prefill_passages,
    prefill_text,
)

pytestmark = pytest.mark.usefixtures("float64_model_code")
PASSAGES = [
    "It was written by Ada. Nobody knew how to read it aloud.",
    {"title": "Radik", "text": "He is a ski jumper. He has competed since 2003. He is tall, and his skis are longer."},
    "Parkdale is in Canada.",
]
NEW = "Something new stands here."
ALIGNMENTS = ["start", "end"]
MODES = [{"gate_mode": "off"}, {"gate_mode": "always"}, {"gate_mode": "adaptive"}]


@pytest.fixture(scope="module")
def independent_processor(processor):
    """A processor whose inputs include the number of each slot's passage."""
    return processor_with(processor, passage_attention="separate", max_prompt_length=300)


@pytest.fixture(scope="module", params=ALIGNMENTS)
def model(processor, request):
    return aligner_for(processor, passage_attention="separate", passage_alignment=request.param)


@pytest.fixture
def store(model, independent_processor):
    return model.passage_cache(independent_processor)


# Algorithm 1


def cut(draw: random.Random, num_slots: int) -> list[int]:
    """Numbers of passages for the slots of a row: some passages of one slot, some of several."""
    numbers, number = [], 0
    for _ in range(num_slots):
        number += draw.random() < 0.4
        numbers.append(number)
    return numbers


@settings(max_examples=25, deadline=None, derandomize=True)
@given(draw=st.randoms(use_true_random=False), training=st.booleans(), attention=st.sampled_from(["eager", "sdpa"]))
def test_independent_passages_equal_reference(draw, training, attention):
    settings = {"gate_mode": draw.choice(["off", "adaptive", "always"]), "max_refinement_steps": draw.choice([1, 2, 3])}
    settings["passage_alignment"] = draw.choice(ALIGNMENTS)
    model = tiny_aligner("llama", seed=draw.randrange(999), passage_attention="separate", **settings)
    model.set_attn_implementation(attention)
    counts = [draw.randrange(13) for _ in range(3)]
    rows = random_rows(model, counts, seed=draw.randrange(99), contiguous=True)
    passages = [cut(draw, count) for count in counts]
    assert_matches_reference(model, rows, draw.choice(["left", "right"]), training, passages)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_equal_reference(seed, alignment):
    draw = random.Random(seed)
    model = tiny_aligner("qwen3", seed=seed, passage_attention="separate", passage_alignment=alignment)
    rows = random_rows(model, [7, 0, 4], seed=seed, contiguous=True)
    torch.testing.assert_close(*loss_gradients(model, rows, "right", [cut(draw, 7), [], cut(draw, 4)]), **EXACT)


def test_joint_and_separate_attention(independent_processor, model, monkeypatch):
    """A joint model attends to the passages before, and a separate one does not."""

    def last_logits(documents):
        return model(**chat_inputs(independent_processor, "Who?", documents)).logits[0, -1]

    assert torch.allclose(last_logits(PASSAGES), last_logits(PASSAGES[::-1]), rtol=0, atol=1e-9)
    monkeypatch.setattr(model.config, "passage_attention", "joint")
    assert (last_logits(PASSAGES) - last_logits(PASSAGES[::-1])).abs().max() > 1e-3


# Computed once, combined for any question


@pytest.mark.parametrize("gates", MODES, ids=str)
def test_cached_passages_combine(store, gates):
    """Cached passages answer in any combination as in one prompt."""
    store.prepare("?", PASSAGES, **gates)
    assert (store.hits, store.misses) == (0, 3)
    questions = ["Who wrote it?", "When, and why?", "Who is tall?", "Where?"]
    documents = [PASSAGES[::-2], PASSAGES[1:2], PASSAGES, [*PASSAGES[:0:-1], NEW]]
    inputs, *_ = assert_answers(store, questions, gates=gates, documents=documents)
    assert (store.hits, store.misses) == (8, 4)
    assert inputs.num_passages == [2, 1, 3, 3] and inputs.num_cached == [2, 1, 3, 2]


def test_moved_passages_record_no_attentions():
    model = tiny_aligner("llama", passage_attention="separate", passage_alignment="end")
    model.set_attn_implementation("eager")
    batch = for_generate(collate(random_rows(model, [3], contiguous=True)))
    with pytest.raises(ValueError, match="attentions cannot be recorded for passages of different lengths"):
        model(**batch, context_passage_ids=torch.tensor([[0, 0, 1]]), output_attentions=True)


@pytest.mark.parametrize("model", ["end"], indirect=True)
def test_passages_are_moved_in_the_cache(independent_processor, model):
    """A prompt up to its last slot, and then its text, is the whole prompt."""
    inputs = chat_inputs(independent_processor, "Who wrote it?", PASSAGES)
    ids = inputs.pop("input_ids")
    end = int((ids[0] == model.config.context_token_id).nonzero()[-1]) + 1
    whole, mask = model(ids, **inputs).logits[:, end:], inputs.pop("attention_mask")
    cache = model(ids[:, :end], **inputs, use_cache=True).past_key_values
    positions = model.prompt_positions(ids, mask, inputs["context_passage_ids"])[:, end:]
    rest = model(ids[:, end:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(rest, whole, **EXACT)


@pytest.mark.parametrize("model", ["end"], indirect=True)
def test_moved_passages_record_states(independent_processor, model):
    """Hidden states are those of the layers: the last one gives the logits."""
    inputs = chat_inputs(independent_processor, "Who wrote it?", PASSAGES)
    output = model(**inputs, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.text_config.num_hidden_layers + 1
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits, **EXACT)
    assert torch.equal(output.logits, model(**inputs).logits)


def test_other_alignment_is_warned_about(tmp_path, caplog):
    model = tiny_aligner("llama", passage_attention="separate", passage_alignment="end", training_stage="grounding")
    model.config.save_pretrained(tmp_path)
    ArcAlignerConfig.from_pretrained(tmp_path)
    assert "is loaded with" not in caplog.text
    ArcAlignerConfig.from_pretrained(tmp_path, passage_alignment="start")
    assert "was trained with `passage_alignment='end'` and is loaded with 'start'" in caplog.text


def test_alignments_differ(independent_processor, model, monkeypatch):
    """Passages of different lengths give other logits with the other alignment; a single passage does not."""
    for documents, is_same in ((PASSAGES, False), (PASSAGES[:1], True)):
        inputs, logits = chat_inputs(independent_processor, "Who wrote it?", documents), []
        for alignment in ALIGNMENTS:
            monkeypatch.setattr(model.config, "passage_alignment", alignment)
            logits.append(model(**inputs).logits[0, -1])
        assert torch.allclose(*logits, rtol=0, atol=1e-9) == is_same


@pytest.mark.parametrize(
    "backbone",
    [
        {"model_type": "gemma2"},
        {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_backbones_that_cannot_move(backbone):
    ArcAlignerConfig(text_config=backbone, passage_attention="separate")
    with pytest.raises(ValueError, match="`passage_alignment` is 'end', but the base model"):
        ArcAlignerConfig(text_config=backbone, passage_attention="separate", passage_alignment="end")


def test_generation_continues_the_prompt(independent_processor, model):
    """Positions of new tokens continue after the longest passage."""
    inputs = chat_inputs(independent_processor, "Who wrote it?", PASSAGES)
    ids = model.generate(**inputs, **FIVE_TOKENS)
    whole = inputs | {"input_ids": ids[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1])}
    again = model(**whole, logits_to_keep=5).logits.argmax(dim=-1)
    assert torch.equal(again, ids[:, -5:])


def test_static_caches_hold_independent_passages():
    """Static caches give the tokens of dynamic ones, and the logits, although the mask has more columns."""
    model = tiny_aligner("llama", passage_attention="separate")
    inputs = for_generate(collate(random_rows(model, [3, 2], contiguous=True), padding_side="left"))
    inputs["context_passage_ids"] = torch.tensor([[0, 0, 1], [0, 1, -1]])
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), expected)
    cache = StaticCache(model.config.text_config, max_cache_len=inputs["input_ids"].shape[1] + 5)
    is_real = inputs["attention_mask"].bool()
    with torch.no_grad():
        logits, expected = model(**inputs, past_key_values=cache).logits, model(**inputs).logits
    torch.testing.assert_close(logits[is_real], expected[is_real], **EXACT)


@pytest.mark.parametrize("room", [0, 3, 99])
def test_joined_cache_grows(independent_processor, model, store, room, monkeypatch):
    """A combined cache can grow beyond its buffer, and a copy has its own buffer."""
    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.SPARE_POSITIONS", room)
    questions, documents = ["Who wrote it?", "When?"], [PASSAGES, PASSAGES[:1]]
    with torch.inference_mode():
        inputs = store.prepare(questions, documents)
    before = copy.deepcopy(inputs)
    ids = model.generate(**inputs, **FIVE_TOKENS)
    for layer, other in zip(inputs["past_key_values"].layers, before["past_key_values"].layers, strict=True):
        assert layer.keys.shape[2] == ids.shape[1] - 1  # the last token is not in the cache
        assert torch.equal(layer.keys[:, :, : other.keys.shape[2]], other.keys)
    assert_answers(store, questions, before, documents=documents)


def test_batches_beams_and_pipeline_agree(independent_processor, model, store):
    """A batch of chats, beams and the pipeline answer like single questions."""
    ask = pipeline_of(model, independent_processor)
    rows = [{"question": "Who?", "documents": PASSAGES[:number]} for number in (3, 0, 1, 2)]
    for options in ({}, {"num_beams": 3}, {"max_slots": 5}, {"return_slots": True}, {"refinement_budget": 0.2}):
        together = ask(rows, batch_size=4, **FIVE_TOKENS, **options)
        assert together == [ask(row, **FIVE_TOKENS, **options) for row in rows], options
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]
    chat += [{"role": "user", "content": "When?"}]
    (record,) = ask(chat, documents=PASSAGES, **FIVE_TOKENS)
    ids = model.generate(**store.prepare(chat, PASSAGES), **FIVE_TOKENS)
    answer = independent_processor.decode(ids[0, -5:], skip_special_tokens=True)
    assert record["generated_text"][-1]["content"] == answer


def test_slot_budget_of_cached_passages(store):
    """A budget of slots takes the first slots of cached passages."""
    for most in (1, 6, 9, 99):
        assert_answers(store, ["Who?"], slots={"max_slots": most}, documents=[PASSAGES])
    assert store.misses == 3  # whole passages are cached


def test_empty_passages_have_no_slots(independent_processor, store):
    for documents in ([], [" "], [" ", PASSAGES[0], {"title": "Nothing", "text": ""}]):
        inputs, plain = store.prepare("Who?", documents), chat_inputs(independent_processor, "Who?", documents)
        assert torch.equal(inputs["input_ids"], plain["input_ids"])
        assert torch.equal(inputs["context_passage_ids"] * 0, plain["context_passage_ids"] * 0)


def test_precomputed_slots_of_any_length(processor):
    """Words of precomputed slots may be padded to the longest passage, as those from a corpus are."""
    reader = processor_with(processor, passage_attention="separate", context_words=True)
    model = aligner_for(processor, passage_attention="separate", word_parts=2)
    store = model.passage_cache(reader)
    _, embeds, words, numbers, *_ = reader.encode_documents(["Ada.", "Nobody knew how to read it. Who did?"])
    unpadded = words[:1, (words[0] >= 0)]  # without padding
    assert numbers.tolist() == [0, 1, 1] and unpadded.shape[1] < words.shape[1]
    store.prepare("Who?", context_embeds=embeds[:1], context_word_ids=unpadded)
    for order in ([0, 1, 2], [1, 2, 0]):
        precomputed = {"context_embeds": [embeds[order]], "context_word_ids": [words[order]]}
        passages = [3, 4, 4] if order[0] == 0 else [3, 3, 4]
        precomputed["context_passage_ids"] = [torch.tensor(passages)]
        inputs, *_ = assert_answers(store, ["Who?"], **precomputed)
        assert inputs["context_passage_ids"].tolist() == [[number - 3 for number in passages]]
    assert (store.hits, store.misses) == (3, 2)


@pytest.mark.parametrize("gates", MODES, ids=str)
def test_packed_passages_match_single_ones(independent_processor, model, gates, monkeypatch):
    """Passages packed into rows of similar length give the same keys and values as single passages."""
    documents = [" ".join(["It was written by Ada."] * (1 + number % 5)) for number in range(12)]
    encoded = independent_processor.slot_encoder.encode_batch([[passage] for passage in documents])  # 33 slots
    head = independent_processor.prompt_ids("Who?")[0]
    text, forward = prefill_text(model, head), mock.Mock(side_effect=model.model.forward)
    alone = [prefill_passages(model, head, text, [passage], **gates)[0] for passage in encoded]
    monkeypatch.setattr(type(model.model), "forward", forward)
    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.SLOTS_PER_ROW", 9)
    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.SLOTS_PER_BATCH", 20)
    for packed, other in zip(prefill_passages(model, head, text, encoded, **gates), alone, strict=True):
        torch.testing.assert_close(packed, other, **EXACT)
    shapes = [tuple(call.kwargs["context_embeds"].shape[:2]) for call in forward.call_args_list]
    if gates["gate_mode"] == "off":
        assert shapes == [(2, 9), (2, 8)]
    else:  # each passage has its own row, and its own budget
        assert sum(rows for rows, _ in shapes) == 12 and max(rows * width for rows, width in shapes) <= 20


# A folder of passages


def test_read_only_cache_finds_files(independent_processor, model, tmp_path):
    """Precomputed passages are found by a cache that writes nothing."""
    ahead = model.passage_cache(independent_processor, max_bytes=0, folder=tmp_path)
    paths = ahead.precompute("?", PASSAGES)
    assert len(paths) == 4 and set(paths) == set(tmp_path.iterdir())  # with the text before them
    assert ahead.precompute("Another?", PASSAGES[1:]) == [paths[0], *paths[2:]]
    assert (ahead.misses, ahead.loads, ahead.bytes) == (3, 2, 0)
    store = model.passage_cache(independent_processor, folder=tmp_path, read_only=True)
    for question in ("Who?", "When?"):
        inputs, *_ = assert_answers(store, [question], documents=[[PASSAGES[2], NEW, PASSAGES[0]]])
    assert (store.loads, store.misses, store.hits) == (2, 1, 3) and inputs.num_cached == [3]
    assert set(paths) == set(tmp_path.iterdir())
    copied = copy.deepcopy(store)
    assert copied.read_only and copied.folder == tmp_path


def test_broken_file_is_recomputed(independent_processor, model, tmp_path, caplog):
    """A broken file gives a warning, and its passage is computed again."""
    path = model.passage_cache(independent_processor, folder=tmp_path).precompute("Who?", PASSAGES)[2]
    whole, kept = path.read_bytes(), load_file(path)["keys_values"].clone()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    store = model.passage_cache(independent_processor, folder=tmp_path)
    assert_answers(store, ["Who?"], documents=[PASSAGES])
    (message,) = caplog.messages
    assert path.name in message and "changed after they were saved" in message
    assert (store.loads, store.misses) == (2, 1)
    torch.testing.assert_close(load_file(path)["keys_values"], kept)


def test_full_disk_loses_no_answer(independent_processor, model, tmp_path, monkeypatch, caplog):
    def save(tensors, path, metadata):
        if len(list(tmp_path.iterdir())) == 2:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.save_file", save)
    store = model.passage_cache(independent_processor, max_bytes=0, folder=tmp_path)
    assert_answers(store, ["Who?"], documents=[PASSAGES])
    assert "No space left on device" in caplog.text and "are computed again" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2
    store.prepare("Who?", PASSAGES)
    assert (store.loads, store.misses) == (1, 5)


# Refused


def four_slots(model, **options):
    (row,) = random_rows(model, [4], num_text=6, **options)
    return {"input_ids": row.input_ids[None], "context_embeds": row.context_embeds[None]}


TWO = torch.tensor([[0, 0, 1, 1]])


def test_wrong_passage_ids_are_refused(model):
    """Numbers of passages that do not fit the slots are refused."""
    for numbers, message in [
        (torch.tensor([[0, 1, 0, 1]]), "never decrease"),
        (-TWO, "of at least 0"),
        (TWO[:, :2], "of shape \\(1, 4\\)"),
        (TWO.float(), "expected an int64 tensor"),
        (TWO.tolist(), "is of type list; expected an int64 tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**four_slots(model, contiguous=True), context_passage_ids=numbers)


def test_unsupported_independence_is_refused(model, processor, independent_processor, monkeypatch):
    """Settings that independent passages do not support are refused with the reason."""
    with pytest.raises(ValueError, match="`input_ids` has text between the slots"):
        model(**four_slots(model, seed=3), context_passage_ids=TWO)
    for backbone in ("mistral_window", "gemma2"):
        other = aligner_for(processor, backbone, passage_attention="separate")
        inputs = four_slots(other, contiguous=True)
        with pytest.raises(ValueError, match="have a sliding window.*`passage_attention='joint'`"):
            other(**inputs, context_passage_ids=TWO)
        other(**inputs)  # one passage
        store = other.passage_cache(independent_processor)
        with pytest.raises(
            ValueError, match="have a sliding window.*`passage_attention='joint'`, or pass only one passage"
        ):
            store.prepare("Who?", PASSAGES)
        assert store.misses == 0  # reported before anything is computed
        store.prepare("Who?", PASSAGES[:1])
    with pytest.raises(
        ValueError, match="`passage_attention` is 'separate' in the model, but 'joint' in the processor"
    ):
        model.passage_cache(processor)
    monkeypatch.setattr(model.config.text_config, "_attn_implementation", "flash_attention_2")
    with pytest.raises(ValueError, match="attention kernel `flash_attention_2` does not accept a mask"):
        model(**four_slots(model, contiguous=True), context_passage_ids=TWO)


def test_context_limits_of_passages(independent_processor, store):
    """All passages together may be longer than the context, and a single one may not."""
    words = "He is tall. " * 50  # a slot each
    inputs, *_ = assert_answers(store, ["Who?"], documents=[[words + str(number) for number in range(6)]])
    assert inputs["input_ids"].shape[1] > 300
    with pytest.raises(ValueError, match="space for only 262 of each passage"):
        chat_inputs(independent_processor, "Who?", [words * 6])


def test_long_question_is_refused(store):
    """A question too long for the longest cached passage is refused, and nothing is computed."""
    store.prepare("Who?", PASSAGES)
    with pytest.raises(
        ValueError, match="The prompt has .* positions, but the base model \\(of type `llama`\\) supports at most 300"
    ):
        store.prepare("Who? " * 150, PASSAGES)
    with pytest.raises(
        ValueError, match=r"^Passage 4 needs \d+ slots, but besides the question the prompt has space for only \d+"
    ):
        store.prepare("Who?", [*PASSAGES, " ", "He is tall. " * 300])
    with pytest.raises(ValueError, match="^Passage 1 of question 1 needs 300 slots"):
        store.prepare(["Who?", "When?"], [PASSAGES, ["Short.", "He is tall. " * 300]])
    assert store.misses == 6 and len(store) == 4  # the last three were neither computed nor cached


def test_joint_checkpoint_run_separately(processor, tmp_path, caplog):
    """A jointly trained checkpoint runs with independent passages by name, with one warning."""
    trained = aligner_for(processor, passage_attention="separate")
    trained.config.passage_attention, trained.config.training_stage = "joint", "grounding"
    trained.save_pretrained(tmp_path)
    config = type(trained.config)
    assert config.from_pretrained(tmp_path).passage_attention == "joint" and not caplog.messages
    for _ in range(2):
        assert config.from_pretrained(tmp_path, passage_attention="separate").passage_attention == "separate"
    (message,) = caplog.messages
    assert "was trained with `passage_attention='joint'` and is loaded with 'separate'" in message
    assert config.from_pretrained(tmp_path).passage_attention == "joint"  # the file says how it was trained


def test_old_cache_names_warn(independent_processor, model, tmp_path):
    """Names of version 0.2 work for one release."""
    with pytest.warns(FutureWarning, match="passage_cache"):
        store = model.slot_prefix_store(independent_processor, folder=tmp_path)
    with pytest.warns(FutureWarning, match="precompute"):
        paths = store.keep("Who?", ["Ada wrote it."])
    assert paths == store.precompute("Who?", ["Ada wrote it."])
    with pytest.warns(FutureWarning, match="iter_single_passages"):
        ((rows, _),) = store.each_alone(["Who?"], [["Ada wrote it."]])
    assert rows == [(0, 0, True)]
    with pytest.warns(FutureWarning, match="PassageCache"):
        assert isinstance(SlotPrefixStore(model, independent_processor), PassageCache)
    with pytest.warns(FutureWarning, match="num_cached"):
        assert store.prepare("Who?", ["Ada wrote it."]).num_kept == [1]
    with pytest.warns(FutureWarning, match="prefill_suffix"):
        store.read_question(store.prepare("Who?", ["Ada wrote it."]))


def test_each_question_has_max_slots(independent_processor, model, tmp_path):
    """`max_slots` is the limit of each question, not of all questions together."""
    store = model.passage_cache(independent_processor, folder=tmp_path)
    questions, documents = ["Who?", "When?"], [["Ada wrote it. Bob read it."]] * 2
    first, second = store.prefix_files(questions, documents, max_slots=1)
    assert first.num_slots == second.num_slots and first.num_slots[1:] == [1]


@torch.no_grad()
def test_old_function_names_warn(independent_processor, model):
    """Functions of version 0.2 work for one release."""
    with pytest.warns(FutureWarning, match="prefill_text"):
        prefix = kv_cache_arcaligner.read_text(model, [1, 2])
    encoded = [independent_processor.encode_documents(["Ada wrote it."])]
    with pytest.warns(FutureWarning, match="prefill_passages"):
        (passage,) = kv_cache_arcaligner.read_passages(model, [1, 2], prefix, encoded)
    assert torch.equal(passage, prefill_passages(model, [1, 2], prefix, encoded)[0])
    with pytest.warns(FutureWarning, match="equal_spans"):
        assert segmentation_arcaligner.equal_runs(10, 4) == [(0, 3), (3, 6), (6, 10)]
    with pytest.warns(FutureWarning, match="PrecomputedSlots"):
        assert encoder_arcaligner.GivenSlots is encoder_arcaligner.PrecomputedSlots
    with pytest.warns(FutureWarning, match="encode_spans"):
        embeds = independent_processor.encoder.encode_runs(["Ada"], (), None)
    assert torch.equal(embeds, independent_processor.encoder.encode_spans(["Ada"], (), None))


# Priors of passages


def weighed(model, inputs, **options):
    """The scores of five new tokens, and their ids."""
    said = model.generate(**inputs, **FIVE_TOKENS, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(said.logits, dim=1), said.sequences


def test_prior_of_log_two(model, store):
    """Two equal passages at the same positions give each key twice the weight in the softmax."""
    twice, _ = weighed(model, store.prepare("Who?", [PASSAGES[0]] * 2))
    once, _ = weighed(model, store.prepare("Who?", PASSAGES[:1], passage_prior=[[math.log(2)]]))
    torch.testing.assert_close(once, twice, **EXACT)
    assert (once - weighed(model, store.prepare("Who?", PASSAGES[:1]))[0]).abs().max() > 1e-3


def test_a_prior_hides_a_passage(model, store):
    """A large negative prior hides a passage; positions still start after the longest one."""
    hidden, _ = weighed(model, store.prepare("Who?", PASSAGES, passage_prior=[[-1e9, 0.0, -1e9]]))
    alone, _ = weighed(model, store.prepare("Who?", PASSAGES[1:2]))
    torch.testing.assert_close(hidden, alone, **EXACT)


def test_prior_in_a_prompt(independent_processor, model, store):
    """A prior has the same effect if the slots are part of the prompt as if they are cached."""
    prior = torch.tensor([[0.0, -1.0, -2.5]], dtype=torch.float64)
    kept, ids = weighed(model, store.prepare("Who?", PASSAGES, passage_prior=prior.tolist()))
    whole, same = weighed(model, chat_inputs(independent_processor, "Who?", PASSAGES), passage_prior=prior)
    torch.testing.assert_close(whole, kept, **EXACT)
    assert torch.equal(ids, same)


def test_priors_are_per_row(model, store):
    """Each row of a batch has its own priors, whatever the padding, also for a passage without text."""
    questions, documents = ["Who wrote it, and why?", "When?"], [PASSAGES, ["", PASSAGES[2]]]
    priors = [[0.0, -1.0, -2.0], [5.0, -0.5]]
    both, _ = weighed(model, store.prepare(questions, documents, passage_prior=priors))
    for row in range(2):
        one, _ = weighed(model, store.prepare(questions[row], documents[row], passage_prior=priors[row : row + 1]))
        torch.testing.assert_close(both[row : row + 1], one, **EXACT)


def test_question_pieces_keep_prior(model, store, monkeypatch):
    prepared = [store.prepare("Who wrote it?", PASSAGES, passage_prior=[[0.0, -1.0, -2.0]]) for _ in range(3)]
    expected, _ = weighed(model, prepared[0])
    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.CHUNK_POSITIONS", 2)
    logits, _ = weighed(model, prefill_beginning(model, prepared[1]))
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(store.prefill_suffix(prepared[2]).logits[:, 0], expected[:, 0], **EXACT)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (torch.zeros(1, 2), "expected a floating-point tensor of shape"),
        (torch.zeros(2, 3), "expected a floating-point tensor of shape"),
        (torch.zeros(1, 3, dtype=torch.long), r"torch.int64 and shape \(1, 3\); expected a floating-point"),
        (torch.tensor([[0.0, float("nan"), 0.0]]), "NaN or infinite numbers"),
    ],
)
def test_mismatched_priors_are_refused(independent_processor, model, prior, message):
    inputs = chat_inputs(independent_processor, "Who?", PASSAGES)
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, **FIVE_TOKENS, passage_prior=prior)
    del inputs["context_passage_ids"]
    with pytest.raises(ValueError, match="without `context_passage_ids`"):
        model.generate(**inputs, **FIVE_TOKENS, passage_prior=torch.zeros(1, 3))


def test_short_priors_are_refused(store):
    with pytest.raises(ValueError, match="a list of length 2 for a question with 3 passages"):
        store.prepare("Who?", PASSAGES, passage_prior=[[0.0, 0.0]])
    with pytest.raises(ValueError, match="has the length 2; expected 1"):
        store.prepare("Who?", PASSAGES, passage_prior=[[0.0] * 3] * 2)
