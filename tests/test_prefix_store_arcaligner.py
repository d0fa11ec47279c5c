"""The slot-prefix store: passages are read once, and questions get the answers they get without it."""

import contextlib
import copy
import functools
import json
import os
import pickle
import random
import re
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ENCODER_WIDTH, aligner_for, chat_inputs, processor_with
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import EXACT, stock_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import BACKBONES, WINDOW, backbone_config, random_row, tiny_aligner
from transformers import DynamicCache

from arcaligner import prefix_store_arcaligner
from arcaligner.encoder_arcaligner import SlotEncoder
from arcaligner.generation_arcaligner import keys_values_of, load_keys_values, save_keys_values

FIVE_TOKENS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
FINGERPRINT = {"base_model": "ours", "gate_threshold": 0.5, "passages": "abc"}
QUESTIONS = ["Who wrote it?", "What sport does Radik Zhaparov play, and since when?", "When?"]
ADA = ["It was written by Ada. Nobody knew how to read it aloud."]
RADIK = [{"title": "Radik", "text": "He is a ski jumper. He has competed since 2003."}, "Parkdale is in Canada."]


def make_model(processor, backbone="llama", **changes):
    """Windows are shorter than a prompt, and three layers of them reach from the answer to the slots."""
    window = {"sliding_window": 25} if BACKBONES[backbone][1].get("sliding_window") else {}
    return aligner_for(processor, backbone, changes | window)


@pytest.fixture(scope="module")
def model(processor):
    return make_model(processor)


@pytest.fixture(scope="module")
def models(processor):
    return functools.cache(functools.partial(make_model, processor))


def embeddings(num_slots, seed=0):
    return torch.randn(num_slots, ENCODER_WIDTH, generator=torch.Generator().manual_seed(seed))


def prefix_of(store, documents=None, **kwargs):
    """The prefix of one question's passages."""
    return store.prepare("?", documents, **kwargs)["past_key_values"]


def assert_same_cache(cache, expected):
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


def generate(model, inputs, **kwargs):
    """New ids (batch, 5) and their logits (batch, 5, vocab_size)."""
    output = model.generate(**inputs, **FIVE_TOKENS, **kwargs, output_logits=True, return_dict_in_generate=True)
    return output.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(output.logits, dim=1)


def without_store(model, processor, question, documents=None, context_embeds=None, gates=None, **slots):
    inputs = chat_inputs(processor, question, documents, context_embeds=context_embeds, **slots)
    return generate(model, inputs, **(gates or {}))


def assert_answers_alone(model, processor, store, questions, embeds):
    """The batch's ids and logits are those of each question without a store."""
    ids, logits = generate(model, store.prepare(questions, context_embeds=embeds))
    for row, (question, row_embeds) in enumerate(zip(questions, embeds, strict=True)):
        expected_ids, expected_logits = without_store(model, processor, question, context_embeds=row_embeds)
        torch.testing.assert_close(logits[row], expected_logits[0], **EXACT)
        assert torch.equal(ids[row], expected_ids[0])
    return ids, logits


# Answers


@pytest.mark.usefixtures("float64_model_code")
@pytest.mark.parametrize("backbone", "llama mistral_window qwen3 gemma2 gemma3_text phi3_window smollm3 cohere".split())
def test_batch_of_kept_and_missing_prefixes_answers_as_each_question_alone(models, processor, backbone):
    """Prefixes and questions of different lengths, longer than a window; a second time all prefixes are kept."""
    model = models(backbone)
    store = model.slot_prefix_store(processor)
    embeds = [embeddings(num_slots, seed=num_slots) for num_slots in (2, 9, 1)]
    prefix_of(store, context_embeds=embeds[1])
    first = assert_answers_alone(model, processor, store, QUESTIONS, embeds)
    assert (store.hits, store.misses) == (1, 3)
    second = generate(model, store.prepare(QUESTIONS, context_embeds=embeds))
    assert (store.hits, store.misses) == (4, 3)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert_answers_alone(model, processor, store, QUESTIONS[::-1], embeds)
    _, of_other_slots = generate(model, store.prepare(QUESTIONS, context_embeds=embeds[::-1]))
    assert ((of_other_slots - first[1])[::2].abs().amax(dim=(1, 2)) > 1e-3).all()  # slots are read


@pytest.mark.usefixtures("float64_model_code")
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink])
@given(data=st.data())
def test_random_batches_answer_as_each_question_alone(models, processor, data):
    """A store too small for all: hits, misses, evictions and equal prefixes in one batch, as they come."""
    model = models(data.draw(st.sampled_from(["llama", "mistral_window", "gemma2"]), label="backbone"))
    model.config.gate_mode = data.draw(st.sampled_from(["adaptive", "off", "always"]), label="mode")
    store = model.slot_prefix_store(processor, max_bytes=data.draw(st.sampled_from([0, 60_000, 10**6]), label="bytes"))
    for step in range(2):
        slots = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), label=f"slots of step {step}")
        words = data.draw(st.lists(st.integers(1, 9), min_size=len(slots), max_size=len(slots)), label="words")
        questions = [" ".join(["why"] * number) + "?" for number in words]
        assert_answers_alone(model, processor, store, questions, [embeddings(count, seed=count) for count in slots])
        assert store.bytes <= store.max_bytes
    model.config.gate_mode = "adaptive"


@pytest.mark.usefixtures("float64_model_code")
def test_documents_are_encoded_once_for_all_questions(model, processor, monkeypatch):
    store = model.slot_prefix_store(processor)
    questions = [QUESTIONS[0], QUESTIONS[2], QUESTIONS[1]]
    documents = [ADA, ADA, RADIK]
    encoded, encode = [], SlotEncoder.encode_tokens
    monkeypatch.setattr(
        SlotEncoder, "encode_tokens", lambda self, *given: encoded.append(given[0]) or encode(self, *given)
    )
    ids, logits = generate(model, store.prepare(questions, documents))
    assert [len(tokens) for tokens in encoded] == [5]
    again = generate(model, store.prepare(questions[0], documents[0]))
    with_score = generate(model, store.prepare(questions[2], [{**RADIK[0], "score": 0.5}, RADIK[1]]))
    assert [len(tokens) for tokens in encoded] == [5] and (store.hits, store.misses) == (3, 2)
    for row, (question, row_documents) in enumerate(zip(questions, documents, strict=True)):
        expected_ids, expected_logits = without_store(model, processor, question, row_documents)
        assert torch.equal(ids[row], expected_ids[0])
        torch.testing.assert_close(logits[row], expected_logits[0], **EXACT)
    assert torch.equal(again[0][0], ids[0]) and torch.equal(with_score[0][0], ids[2])


@pytest.mark.usefixtures("float64_model_code")
def test_text_before_the_slots_belongs_to_the_prefix(model, processor):
    store = model.slot_prefix_store(processor)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]
    turns += [{"role": "user", "content": "When?"}]
    chats = [turns[:1], turns, [{"role": "system", "content": "Be brief."}, *turns[:1]]]
    embeds = [embeddings(3)] * 3
    assert_answers_alone(model, processor, store, chats, embeds)
    assert (store.hits, store.misses) == (1, 2)


@pytest.mark.usefixtures("float64_model_code")
def test_questions_without_a_chat_template(model, processor):
    plain = processor_with(processor)
    plain.chat_template = None
    store = model.slot_prefix_store(plain)
    embeds = [embeddings(3), embeddings(1, seed=1)]
    ids, _ = generate(model, store.prepare(QUESTIONS[:2], context_embeds=embeds))
    for row in range(2):
        alone = plain(text=QUESTIONS[row], context_embeds=embeds[row], return_tensors="pt")
        assert torch.equal(ids[row], generate(model, alone)[0][0])


def test_beams_continue_from_kept_prefixes(model, processor):
    store = model.slot_prefix_store(processor)
    embeds = [embeddings(4), embeddings(2, seed=1)]
    inputs = store.prepare(QUESTIONS[:2], context_embeds=embeds)
    inputs["past_key_values"].batch_repeat_interleave(3)
    answers = model.generate(**inputs, **FIVE_TOKENS, num_beams=3)[:, inputs["input_ids"].shape[1] :]
    for row in range(2):
        alone = chat_inputs(processor, QUESTIONS[row], context_embeds=embeds[row])
        expected = model.generate(**alone, **FIVE_TOKENS, num_beams=3)[0, alone["input_ids"].shape[1] :]
        assert torch.equal(answers[row], expected)


def test_a_cache_is_taken_by_either_of_its_names(model, processor):
    inputs = model.slot_prefix_store(processor).prepare(QUESTIONS[0], context_embeds=embeddings(3))
    answers, logits = [], []
    for name in ("past_key_values", "cache"):
        given = {key: value for key, value in inputs.items() if key != "past_key_values"}
        cache = {name: copy.deepcopy(inputs["past_key_values"])}
        answers.append(model.generate(**given, **cache, **FIVE_TOKENS))
        last, cache = given["input_ids"][:, -1:], {name: copy.deepcopy(inputs["past_key_values"])}
        logits.append(model(input_ids=last, **cache).logits)
    assert torch.equal(*answers) and torch.equal(*logits)


def test_continuing_a_prefix_leaves_the_kept_one(model, processor):
    store = model.slot_prefix_store(processor)
    prefix = prefix_of(store, context_embeds=embeddings(3))
    length = prefix.get_seq_length()
    before = [layer.keys.clone() for layer in prefix.layers]
    model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=prefix)
    prefix.layers[0].keys.zero_()
    again = prefix_of(store, context_embeds=embeddings(3))
    assert store.hits == 1 and again.get_seq_length() == length
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(again.layers, before, strict=True))


# What is kept


def test_least_recently_used_prefix_leaves_first(model, processor):
    one = model.slot_prefix_store(processor)
    prefix_of(one, context_embeds=embeddings(3))
    head, slots = (each.nbytes for each in one._kept.values())  # the text before the slots is kept as well
    store = model.slot_prefix_store(processor, max_bytes=head + 3 * slots)

    def get(seed):
        misses = store.misses
        prefix_of(store, context_embeds=embeddings(3, seed=seed))
        assert store.bytes <= store.max_bytes and store.bytes == head + (len(store) - 1) * slots
        return "miss" if store.misses > misses else "hit"

    assert [get(seed) for seed in (0, 1, 2, 0)] == ["miss", "miss", "miss", "hit"]
    assert len(store) == 4
    assert get(3) == "miss"  # 1 leaves
    assert [get(seed) for seed in (0, 2, 3)] == ["hit", "hit", "hit"]
    assert get(1) == "miss"  # 0 leaves
    assert [get(seed) for seed in (2, 3, 1, 0)] == ["hit", "hit", "hit", "miss"]


def test_bytes_are_those_of_keys_and_values_alone(model, processor):
    """Not those of the batch they were prefilled in."""
    store = model.slot_prefix_store(processor)
    store.prepare(["Who?", "Who?"], context_embeds=[embeddings(1), embeddings(40)])
    config = model.config.text_config
    positions = prefix_of(store, context_embeds=embeddings(1)).get_seq_length() + 40  # the text, 1 slot, 40 slots
    assert store.bytes == positions * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8


GATES = [{"gate_mode": "off"}, {"gate_mode": "always", "max_refinement_steps": 1}]
GATES += [{"gate_threshold": 0.9}, {"refinement_budget": 0.3}]
SLOTS = [{"max_slots": 2}, {"max_slots": 1}]


@pytest.mark.usefixtures("float64_model_code")
@pytest.mark.parametrize("settings", GATES + SLOTS, ids=str)
def test_settings_of_a_call_answer_as_without_the_store(model, processor, settings):
    store = model.slot_prefix_store(processor)
    store.prepare(QUESTIONS[0], RADIK)
    gates, slots = ({}, settings) if settings in SLOTS else (settings, {})
    expected_ids, expected_logits = without_store(model, processor, QUESTIONS[0], RADIK, gates=gates, **slots)
    for _ in range(2):
        ids, logits = generate(model, store.prepare(QUESTIONS[0], RADIK, **settings))
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(logits, expected_logits, **EXACT)
    assert (store.hits, store.misses) == (1, 2)
    plain_ids, plain_logits = generate(model, store.prepare(QUESTIONS[0], RADIK))
    assert (store.hits, store.misses) == (2, 2) and not torch.equal(plain_logits, logits)


def test_settings_that_are_the_configurations_own_find_its_prefix(model, processor):
    store = model.slot_prefix_store(processor)
    kept = prefix_of(store, context_embeds=embeddings(5))
    own = {"gate_mode": model.config.gate_mode, "gate_threshold": model.config.gate_threshold, "max_slots": None}
    assert torch.equal(prefix_of(store, context_embeds=embeddings(5), **own).layers[-1].keys, kept.layers[-1].keys)
    assert (store.hits, store.misses) == (1, 1)


def test_gates_for_slots_that_are_read_already_are_warned_of(model, processor, caplog):
    inputs = model.slot_prefix_store(processor).prepare("Who?", ADA)
    plain = model.generate(**inputs | {"past_key_values": copy.deepcopy(inputs["past_key_values"])}, **FIVE_TOKENS)
    assert not caplog.messages
    answer = model.generate(**inputs, **FIVE_TOKENS, gate_mode="off", max_refinement_steps=0)
    assert torch.equal(answer, plain)
    (message,) = caplog.messages
    assert message.startswith("`gate_mode`, `max_refinement_steps` of `generate` changes no slot that is in")
    fresh = processor(text="Who?", documents=ADA, return_tensors="pt")
    model.generate(**fresh, **FIVE_TOKENS, gate_mode="always")
    assert caplog.messages == [message]


# Files


@pytest.mark.usefixtures("float64_model_code")
def test_another_process_answers_from_the_folder(model, processor, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "prefixes"
    first = generate(model, model.slot_prefix_store(processor, folder=folder).prepare(QUESTIONS[:2], [ADA, RADIK]))
    assert len(list(folder.glob("*.safetensors"))) == 3 and len(list(folder.iterdir())) == 3  # with the text before
    monkeypatch.setattr(SlotEncoder, "encode_batch", None)  # nothing is cut or encoded
    store = model.slot_prefix_store(processor, folder=folder)
    second = generate(model, store.prepare(QUESTIONS[:2], [ADA, RADIK]))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    store.prepare(QUESTIONS[2], ADA)
    assert (store.hits, store.loads, store.misses) == (1, 2, 0)


# Several at once


def test_what_two_threads_ask_for_at_once_is_read_once(processor, monkeypatch):
    model = make_model(processor)
    store, together, read = model.slot_prefix_store(processor), threading.Barrier(2), []

    def encode(*args, former=SlotEncoder.encode_batch, **kwargs):
        read.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=0.3)  # for the other thread, which the lock keeps out
        return former(*args, **kwargs)

    monkeypatch.setattr(SlotEncoder, "encode_batch", encode)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: prefix_of(store, context_embeds=embeddings(3)), range(2))
    assert len(read) == 1 and (store.hits, store.misses) == (1, 1)
    assert_same_cache(first, second)


def use(store, expected, seed):
    """Asks for kept and other prefixes in a random order; each is the one that was asked for."""
    for number in random.Random(seed).choices(range(len(expected)), k=12):
        assert_same_cache(prefix_of(store, context_embeds=embeddings(3, seed=number)), expected[number])
        assert store.bytes <= store.max_bytes


def test_threads_and_processes_share_a_folder_and_keep_the_budget(model, processor, tmp_path):
    one = model.slot_prefix_store(processor)
    expected = [prefix_of(one, context_embeds=embeddings(3, seed=number)) for number in range(5)]
    head, slots = list(one._kept.values())[0].nbytes, list(one._kept.values())[1].nbytes
    budget = head + 2 * slots
    workers = []
    for seed in range(3):
        if (worker := os.fork()) == 0:
            try:
                use(model.slot_prefix_store(processor, max_bytes=budget, folder=tmp_path), expected, seed)
            except BaseException:
                os._exit(1)
            os._exit(0)
        workers.append(worker)
    store = model.slot_prefix_store(processor, max_bytes=budget, folder=tmp_path)
    with ThreadPoolExecutor(10) as threads:
        list(threads.map(lambda seed: use(store, expected, seed), range(10)))
    assert [os.waitpid(worker, 0)[1] for worker in workers] == [0, 0, 0]
    assert store.bytes == sum(each.nbytes for each in store._kept.values()) <= budget
    assert len(list(tmp_path.iterdir())) == 6


def test_a_copy_of_a_store_starts_empty_and_answers_the_same(model, processor):
    store = model.slot_prefix_store(processor, max_bytes=10**6)
    prefix = prefix_of(store, context_embeds=embeddings(3))
    for copied in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert len(copied) == 0 and copied.max_bytes == 10**6
        assert_same_cache(prefix_of(copied, context_embeds=embeddings(3)), prefix)


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "Got no `documents` and `context_embeds`; expected one of the two"),
        ({"documents": [ADA, ADA]}, "Got 1 questions but 2 entries of `documents`"),
        ({"questions": [], "documents": []}, "There is no question"),
        ({"documents": [ADA], "gate_mode": "sometimes"}, "`gate_mode`"),
        ({"documents": [ADA], "refinement_budget": -1.0}, "`refinement_budget` is -1.0"),
        ({"documents": [ADA], "max_slots": 0}, "`max_slots` is 0"),
    ],
)
def test_what_cannot_be_prepared_is_refused(model, processor, call, message):
    with pytest.raises(ValueError, match=message):
        model.slot_prefix_store(processor).prepare(**{"questions": ["Who?"]} | call)
    with pytest.raises(ValueError, match="`max_bytes` is -1"):
        model.slot_prefix_store(processor, max_bytes=-1)
    model.train()
    try:
        with pytest.raises(ValueError, match="Call `model.eval\\(\\)` first"):
            model.slot_prefix_store(processor).prepare("Who?", ADA)
    finally:
        model.eval()


# Prefixes as files, for any engine


def prefix_and_tail(model, num_slots=4, seed=0):
    """A one-row prompt cut after its last slot: the prefix's cache, its ids and the ids that follow."""
    row = random_row(model, num_slots, seed=seed, num_text=12, contiguous=True)
    length = int((row.input_ids == model.config.context_token_id).nonzero().max()) + 1
    cache = model.prefill_context(row.input_ids[None, :length], row.context_embeds[None])
    return keys_values_of(cache, 0, 0, length), row, row.input_ids[None, length:]


def recipe() -> str:
    """The code of the module's docstring."""
    return textwrap.dedent(re.search(r"\n\n(    parts = (?:.*\n    )+.*\n)", prefix_store_arcaligner.__doc__).group(1))


@pytest.mark.usefixtures("float64_model_code")
@pytest.mark.parametrize("backbone", list(BACKBONES))
def test_unmodified_backbone_continues_from_the_file(backbone, tmp_path):
    """By the recipe of the docstring, with nothing of ours."""
    model = tiny_aligner(backbone)
    cache, row, tail = prefix_and_tail(model, num_slots=7)
    path = tmp_path / "prefix.safetensors"
    save_keys_values(path, cache, FINGERPRINT)
    names = {
        "backbone": stock_model(model, torch.float64, model.config.text_config._attn_implementation),
        "paths": [path],
        "ids_after_the_slots": tail,
        "load_file": load_file,
        "DynamicCache": DynamicCache,
        "torch": torch,
    }
    with torch.no_grad():
        exec(compile(recipe(), "docstring", "exec"), names)  # noqa: S102
        whole = model(row.input_ids[None], context_embeds=row.context_embeds[None]).logits
    torch.testing.assert_close(names["logits"], whole[:, -tail.shape[1] :], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backbone", ["llama", "gemma2"])
def test_file_gives_back_what_was_saved(backbone, dtype, tmp_path):
    """Also a prefix longer than a window, which has dropped its first positions."""
    model = tiny_aligner(backbone, dtype=dtype)
    prefix, _, _ = prefix_and_tail(model, num_slots=7)
    assert prefix.shape[3] > WINDOW
    save_keys_values(tmp_path / "prefix.safetensors", prefix, FINGERPRINT)
    (tmp_path / "any").touch()  # another user's server may read what this one may
    assert {path.name for path in tmp_path.iterdir()} == {"any", "prefix.safetensors"}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    loaded = load_keys_values(tmp_path / "prefix.safetensors", FINGERPRINT, model.config.text_config)
    assert loaded.dtype == dtype and torch.equal(loaded, prefix)


# Files that are refused


def test_every_field_of_a_fingerprint_is_compared(model, processor, tmp_path):
    store = model.slot_prefix_store(processor, folder=tmp_path / "store")
    prefix_of(store, ADA)
    kept = list(store._kept.values())[-1]
    paths = sorted((tmp_path / "store").iterdir(), key=lambda path: path.stat().st_size)
    with safe_open(paths[-1], framework="pt") as file:  # the slots; the other file is the text before them
        fingerprint = json.loads(file.metadata()["fingerprint"])
    assert len(fingerprint) > 20
    save_keys_values(tmp_path / "p", kept, fingerprint)
    assert torch.equal(load_keys_values(tmp_path / "p", fingerprint, model.config.text_config), kept)
    for field, value in fingerprint.items():
        expected = f"`{field}` {json.loads(json.dumps(value))!r}; expected 'other'. Use what it was made with"
        with pytest.raises(ValueError, match=re.escape(expected)):
            load_keys_values(tmp_path / "p", {**fingerprint, field: "other"}, model.config.text_config)
        lacking = {name: each for name, each in fingerprint.items() if name != field}
        if value is not None:
            with pytest.raises(ValueError, match=f"`{field}`"):
                load_keys_values(tmp_path / "p", lacking, model.config.text_config)


@pytest.fixture
def saved(tmp_path):
    save_keys_values(tmp_path / "prefix.safetensors", prefix_and_tail(tiny_aligner())[0], FINGERPRINT)
    return tmp_path / "prefix.safetensors"


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "no-header", "half-a-header", "a-byte-short"])
def test_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cannot be read.*Delete the file"):
        load_keys_values(saved, FINGERPRINT, backbone_config())
    with pytest.raises(ValueError, match="cannot be read.*Delete the file"):
        load_keys_values(saved.parent, FINGERPRINT, backbone_config())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_with_a_changed_byte_is_refused(saved, data):
    whole = saved.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    first, last = data.draw(st.sampled_from([(0, 7), (8, 7 + header), (8 + header, len(whole) - 1)]), label="part")
    place, other = data.draw(st.integers(first, last), label="place"), data.draw(st.integers(1, 255), label="change")
    changed = bytearray(whole)
    changed[place] ^= other
    saved.write_bytes(changed)
    try:
        found = load_keys_values(saved, FINGERPRINT, backbone_config())
    except ValueError:
        pass
    else:  # white space of the header
        saved.write_bytes(whole)
        assert torch.equal(found, load_keys_values(saved, FINGERPRINT, backbone_config()))
    saved.write_bytes(whole)


NO_FINGERPRINTS = (None, "", "[]", "5", "{", '{"passages": "other"}')


@pytest.mark.parametrize(
    "metadata, message",
    [
        *((each, "expected 'arcaligner-passage-3'") for each in (None, {"format": "pt"}, {"format": "x-0"})),
        *(({"fingerprint": each}, "prefix.safetensors") for each in NO_FINGERPRINTS),
    ],
)
def test_file_with_other_metadata_is_refused(saved, metadata, message):
    if metadata and "fingerprint" in metadata:
        with safe_open(saved, framework="pt") as file:
            metadata = {name: each for name, each in (file.metadata() | metadata).items() if each is not None}
    save_file(load_file(saved), saved, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_keys_values(saved, FINGERPRINT, backbone_config())


@pytest.mark.parametrize("change", [{"num_hidden_layers": 2}, {"num_key_value_heads": 1}, {"head_dim": 16}])
def test_file_of_another_backbone_or_longer_than_its_context_is_refused(saved, change):
    with pytest.raises(ValueError, match="Load it with the backbone it was made for"):
        load_keys_values(saved, FINGERPRINT, backbone_config(**change))
    with pytest.raises(ValueError, match="has 8 positions but the backbone llama reads 7"):
        load_keys_values(saved, FINGERPRINT, backbone_config(max_position_embeddings=7))
