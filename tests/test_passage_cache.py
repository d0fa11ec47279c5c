"""The passage cache: passages are computed once, and questions get the answers that they get without it."""

import contextlib
import copy
import functools
import json
import os
import pickle
import random
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ENCODER_WIDTH, aligner_for, chat_inputs, processor_with
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import EXACT, stock_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import BACKBONES, WINDOW, backbone_config, random_row, tiny_aligner
from transformers import DynamicCache

from arcaligner import kv_cache_arcaligner
from arcaligner.encoder_arcaligner import SlotEncoder
from arcaligner.kv_cache_arcaligner import cache_of, keys_values_of, load_keys_values, save_keys_values

in_float64 = pytest.mark.usefixtures("float64_model_code")  # of this thread
FIVE_TOKENS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
FINGERPRINT = {"base_model": "ours", "gate_threshold": 0.5, "passages": "abc"}
QUESTIONS = ["Who wrote it?", "What sport does Radik Zhaparov play, and since when?", "When?"]
ADA = ["It was written by Ada. Nobody knew how to read it aloud."]
RADIK = [{"title": "Radik", "text": "He is a ski jumper. He has competed since 2003."}, "Parkdale is in Canada."]


@pytest.fixture(scope="module")
def models(processor):
    """A model of each backbone. Windows are shorter than a prompt, and three layers of them reach to the slots."""

    def make(backbone):
        has_window = BACKBONES[backbone][1].get("sliding_window")
        return aligner_for(processor, backbone, {"sliding_window": 25} if has_window else {})

    return functools.cache(make)


@pytest.fixture(scope="module")
def model(models):
    return models("llama")


def embeddings(num_slots, seed=0):
    return torch.randn(num_slots, ENCODER_WIDTH, generator=torch.Generator().manual_seed(seed))


def nbytes(model, positions):
    """Bytes of the keys and values of one prefix, in float64, without the rest of its batch."""
    config = model.config.text_config
    return positions * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8


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


def assert_answers(store, questions, inputs=None, gates=None, slots=None, **rows):
    """Asserts that `inputs`, by default prepared by `store`, give the answers of each question without the cache.

    Returns the inputs, ids and logits. `rows` have a value for each question, `gates` and `slots` are settings."""
    gates, slots, reader = gates or {}, slots or {}, store.processor
    inputs = inputs or store.prepare(questions, **rows, **gates, **slots)
    ids, logits = generate(store.model, inputs)
    for row, question in enumerate(questions):
        arguments = {name: values[row] for name, values in rows.items()} | slots
        if reader.chat_template is None:
            alone = reader(text=question, **arguments, return_tensors="pt")
        else:
            alone = chat_inputs(reader, question, **arguments)
        expected_ids, expected_logits = generate(store.model, alone, **gates)
        torch.testing.assert_close(logits[row], expected_logits[0], rtol=0, atol=1e-6)
        assert torch.equal(ids[row], expected_ids[0])
    return inputs, ids, logits


# Answers


@in_float64
@pytest.mark.parametrize("backbone", "llama mistral_window qwen3 gemma2 gemma3_text phi3_window smollm3 cohere".split())
def test_mixed_batch_of_prefixes(models, processor, backbone):
    """Prefixes and questions may differ in length and exceed a window; the second call finds all prefixes."""
    model, embeds = models(backbone), [embeddings(num_slots, seed=num_slots) for num_slots in (2, 9, 1)]
    store = model.passage_cache(processor)
    prefix_of(store, context_embeds=embeds[1])

    def ask(questions, embeds, store=store):
        _, _, logits = assert_answers(store, questions, context_embeds=embeds)
        assert store.bytes <= store.max_bytes
        return logits

    first, second = (ask(QUESTIONS, embeds) for _ in range(2))
    assert torch.equal(first, second) and (store.hits, store.misses) == (4, 3)
    assert ((ask(QUESTIONS, embeds[::-1]) - first)[::2].abs().amax(dim=(1, 2)) > 1e-3).all()  # slots are computed
    small = model.passage_cache(processor, max_bytes=nbytes(model, 2 + 9))
    for order in (1, -1):
        ask([*QUESTIONS, "Why?"][::order], [*embeds, embeds[0]], small)
    assert (small.hits, small.misses) == (4, 4)  # one was dropped; equal ones of a batch are computed once


@in_float64
def test_documents_are_encoded_once(model, processor, monkeypatch):
    store, encoded, encode = model.passage_cache(processor), [], SlotEncoder.encode_tokens
    watched = lambda self, *arguments: encoded.append(len(arguments[0])) or encode(self, *arguments)  # noqa: E731
    monkeypatch.setattr(SlotEncoder, "encode_tokens", watched)
    documents = [ADA, RADIK, ADA]
    inputs, again = store.prepare(QUESTIONS, documents), store.prepare(QUESTIONS[0], ADA)
    assert encoded == [5] and (store.hits, store.misses) == (2, 2)
    _, ids, _ = assert_answers(store, QUESTIONS, inputs, documents=documents)
    assert torch.equal(generate(model, again)[0], ids[:1])


@in_float64
@pytest.mark.parametrize("has_template", [True, False])
def test_prefix_includes_text_before(model, processor, has_template):
    chats, misses, reader = QUESTIONS, 1, processor_with(processor)
    if has_template:
        turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]
        turns += [{"role": "user", "content": "When?"}]
        chats, misses = [turns[:1], turns, [{"role": "system", "content": "Be brief."}, *turns[:1]]], 2
    else:
        reader.chat_template = None
    store, embeds = model.passage_cache(reader), [embeddings(3)] * 3
    assert_answers(store, chats, context_embeds=embeds)
    assert (store.hits, store.misses) == (3 - misses, misses)


def test_beams_continue_from_prefixes(model, processor):
    """Beams continue from cached prefixes under the newer name of a cache."""
    embeds = [embeddings(4), embeddings(2, seed=1)]
    inputs = model.passage_cache(processor).prepare(QUESTIONS[:2], context_embeds=embeds)
    cache = inputs.pop("past_key_values")
    cache.batch_repeat_interleave(3)
    answers = model.generate(**inputs, cache=cache, **FIVE_TOKENS, num_beams=3)
    for row in range(2):
        alone = chat_inputs(processor, QUESTIONS[row], context_embeds=embeds[row])
        expected = model.generate(**alone, **FIVE_TOKENS, num_beams=3)
        assert torch.equal(answers[row, -5:], expected[0, -5:])


def test_continued_prefix_is_not_changed(model, processor):
    """Continuing a prefix does not change the cached one, and a copy of a cache starts empty."""
    store = model.passage_cache(processor, max_bytes=10**6)
    prefix, other = (prefix_of(store, context_embeds=embeddings(3)) for _ in range(2))
    expected, ids = copy.deepcopy(prefix), torch.tensor([[5, 6, 7]])
    logits = model(input_ids=ids, past_key_values=prefix).logits
    assert torch.equal(model(input_ids=ids, cache=other).logits, logits)
    prefix.layers[0].keys.zero_()
    assert_same_cache(prefix_of(store, context_embeds=embeddings(3)), expected)
    assert (store.hits, store.misses) == (2, 1)
    for copied in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert len(copied) == 0 and copied.max_bytes == 10**6
        assert_same_cache(prefix_of(copied, context_embeds=embeddings(3)), expected)


# What is cached


def test_least_recent_prefix_is_dropped(model, processor):
    one = model.passage_cache(processor)
    one.prepare(["Who?", "Who?"], context_embeds=[embeddings(1), embeddings(40)])
    text = prefix_of(one, context_embeds=embeddings(1)).get_seq_length() - 1  # the text before the slots, also cached
    assert one.bytes == nbytes(model, text + 1 + 40)
    store = model.passage_cache(processor, max_bytes=nbytes(model, text + 3 * 3))

    def is_kept(seed):
        misses = store.misses
        prefix_of(store, context_embeds=embeddings(3, seed=seed))
        assert store.bytes == nbytes(model, text + 3 * (len(store) - 1)) <= store.max_bytes
        return store.misses == misses

    assert [number for number in (0, 1, 2, 0) if not is_kept(number)] == [0, 1, 2] and len(store) == 4
    assert [number for number in (3, 0, 2, 3) if not is_kept(number)] == [3]  # 1 leaves
    assert [number for number in (1, 2, 3, 1, 0) if not is_kept(number)] == [1, 0]  # 0 leaves, then 2


ALWAYS = {"gate_mode": "always", "max_refinement_steps": 1}


@in_float64
@pytest.mark.parametrize(
    "gates, slots",
    [(ALWAYS, {}), ({"gate_threshold": 0.9}, {}), ({"refinement_budget": 0.3}, {}), ({}, {"max_slots": 1})],
)
def test_settings_of_a_call(model, processor, gates, slots):
    """Settings of a call give the same answers as without the cache."""
    store = model.passage_cache(processor)
    _, plain = generate(model, store.prepare(QUESTIONS[0], RADIK))
    for _ in range(2):
        *_, logits = assert_answers(store, QUESTIONS[:1], gates=gates, slots=slots, documents=[RADIK])
    assert (store.hits, store.misses) == (1, 2)
    defaults = {"gate_mode": model.config.gate_mode, "gate_threshold": model.config.gate_threshold, "max_slots": None}
    _, again = generate(model, store.prepare(QUESTIONS[0], RADIK, **defaults))  # finds the prefix without them
    assert (store.hits, store.misses) == (2, 2) and torch.equal(again, plain) and not torch.equal(again, logits)


def test_late_gates_warn(model, processor, caplog):
    """Gates for slots that are already computed give a warning."""
    inputs = model.passage_cache(processor).prepare("Who?", ADA)
    plain = model.generate(**inputs | {"past_key_values": copy.deepcopy(inputs["past_key_values"])}, **FIVE_TOKENS)
    assert not caplog.messages
    answer = model.generate(**inputs, **FIVE_TOKENS, gate_mode="off", max_refinement_steps=0)
    assert torch.equal(answer, plain)
    (message,) = caplog.messages
    assert message.startswith("`generate` ignores `gate_mode`, `max_refinement_steps`, because the slots are")
    fresh = processor(text="Who?", documents=ADA, return_tensors="pt")
    model.generate(**fresh, **FIVE_TOKENS, gate_mode="always")
    assert caplog.messages == [message]


def test_invalid_inputs_are_refused(processor):
    model = aligner_for(processor)
    for call, message in [
        ({}, "Got neither `documents` nor `context_embeds`"),
        ({"questions": [], "documents": []}, "`questions` is"),
        ({"documents": [ADA], "gate_mode": "sometimes"}, "`gate_mode`"),
        ({"documents": [ADA], "refinement_budget": -1.0}, "`refinement_budget` is -1.0"),
        ({"documents": [ADA], "max_slots": 0}, "`max_slots` is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.passage_cache(processor).prepare(**{"questions": ["Who?"]} | call)
    with pytest.raises(ValueError, match="`max_bytes` is -1"):
        model.passage_cache(processor, max_bytes=-1)
    with pytest.raises(ValueError, match="Call `model.eval\\(\\)` first"):
        model.train().passage_cache(processor).prepare("Who?", ADA)


# Several at once


def test_shared_folder_keeps_its_budget(model, processor, tmp_path):
    """Threads and processes share a folder and keep its budget."""
    one = model.passage_cache(processor)
    with ThreadPoolExecutor(10) as threads:
        list(threads.map(lambda _: prefix_of(one, context_embeds=embeddings(40, seed=9)), range(10)))
    assert (one.hits, one.misses) == (9, 1)  # passages that several threads need at the same time are computed once
    expected = [prefix_of(one, context_embeds=embeddings(3, seed=number)) for number in range(5)]
    options = {"max_bytes": nbytes(model, expected[0].get_seq_length() + 3), "folder": tmp_path / "new" / "folder"}
    store = model.passage_cache(processor, **options)

    def use(store, seed):
        for number in random.Random(seed).choices(range(5), k=12):
            assert_same_cache(prefix_of(store, context_embeds=embeddings(3, seed=number)), expected[number])
            assert store.bytes <= store.max_bytes

    workers = []
    for seed in range(3):
        if (worker := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                use(model.passage_cache(processor, **options), seed)
                os._exit(0)
            os._exit(1)
        workers.append(worker)
    with ThreadPoolExecutor(10) as threads:
        list(threads.map(functools.partial(use, store), range(10)))
    assert [os.waitpid(worker, 0)[1] for worker in workers] == [0, 0, 0]
    assert store.bytes == sum(prefix.nbytes for prefix in store._entries.values()) <= store.max_bytes
    assert len(list(options["folder"].glob("*.safetensors"))) == len(list(options["folder"].iterdir())) == 6


# Prefixes as files, for any engine


def prefix_and_tail(model, num_slots=4):
    """A one-row prompt cut after its last slot: the prefix's keys and values, the row and the ids that follow."""
    row = random_row(model, num_slots, num_text=12, contiguous=True)
    length = int((row.input_ids == model.config.context_token_id).nonzero().max()) + 1
    output = model.model(row.input_ids[None, :length], context_embeds=row.context_embeds[None], use_cache=True)
    return keys_values_of(cache_of(output), 0, 0, length), row, row.input_ids[None, length:]


@in_float64
@pytest.mark.parametrize("backbone", list(BACKBONES))
def test_bare_backbone_continues_from_file(backbone, tmp_path):
    """The example in the module's docstring works with the base model alone, also after a sliding window."""
    recipe = re.search(r"\n\n(    parts = (?:.*\n    )+.*\n)", kv_cache_arcaligner.__doc__).group(1)
    model = tiny_aligner(backbone)
    prefix, row, tail = prefix_and_tail(model, num_slots=7)
    assert prefix.shape[3] > WINDOW
    path = tmp_path / "prefix.safetensors"
    save_keys_values(path, prefix, FINGERPRINT)
    loaded = load_keys_values(path, FINGERPRINT, model.config.text_config)
    assert loaded.dtype == prefix.dtype and torch.equal(loaded, prefix)
    (tmp_path / "any").touch()  # other users may read the file if umask allows it
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["any", path.name]
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    backbone = stock_model(model, torch.float64, model.config.text_config._attn_implementation)
    names = {"torch": torch, "load_file": load_file, "DynamicCache": DynamicCache}
    names |= {"backbone": backbone, "paths": [path], "ids_after_the_slots": tail}
    with torch.no_grad():
        exec(compile(textwrap.dedent(recipe), "docstring", "exec"), names)  # noqa: S102
        whole = model(row.input_ids[None], context_embeds=row.context_embeds[None]).logits
    torch.testing.assert_close(names["logits"], whole[:, -tail.shape[1] :], **EXACT)


# Files that are refused


def test_every_fingerprint_field_is_compared(model, processor, tmp_path):
    store, config = model.passage_cache(processor, folder=tmp_path), model.config.text_config
    path = store.precompute("?", ADA)[-1]
    with safe_open(path, framework="pt") as file:
        fingerprint = json.loads(file.metadata()["fingerprint"])
    assert len(fingerprint) > 20
    assert torch.equal(load_keys_values(path, fingerprint, config), store._entries[path.stem])
    for field, value in fingerprint.items():
        expected = f"`{field}` {json.loads(json.dumps(value))!r}; expected 'other'. A `PassageCache` replaces this file"
        with pytest.raises(ValueError, match=re.escape(expected)):
            load_keys_values(path, {**fingerprint, field: "other"}, config)


@pytest.fixture
def saved(tmp_path):
    save_keys_values(tmp_path / "prefix.safetensors", prefix_and_tail(tiny_aligner())[0], FINGERPRINT)
    return tmp_path / "prefix.safetensors"


def save_again(path, fingerprint):
    save_keys_values(path, load_file(path)["keys_values"].clone(), fingerprint)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read.*`PassageCache` replaces this file"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read.*`PassageCache` replaces this file"),
        (lambda path: save_file(load_file(path), path), "format is None; expected 'arcaligner-passage-3'"),
        (lambda path: save_file(load_file(path), path, {"format": "x-0"}), "'x-0'; expected 'arcaligner-passage-3'"),
        (
            lambda path: save_again(path, []),
            "prefix.safetensors cannot be read: `fingerprint` in its metadata is of type list",
        ),
        (lambda path: save_again(path, {"passages": "abc"}), "prefix.safetensors was made with `base_model` None"),
    ],
)
def test_wrong_file_is_refused(saved, change, message):
    """A file that is truncated or of another kind is refused."""
    change(saved)
    with pytest.raises(ValueError, match=message):
        load_keys_values(saved, FINGERPRINT, backbone_config())


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_byte_is_refused(saved, data):
    whole = saved.read_bytes()
    expected = load_keys_values(saved, FINGERPRINT, backbone_config())
    header = int.from_bytes(whole[:8], "little")
    first, last = data.draw(st.sampled_from([(0, 7), (8, 7 + header), (8 + header, len(whole) - 1)]), label="part")
    changed, place = bytearray(whole), data.draw(st.integers(first, last), label="place")
    changed[place] ^= data.draw(st.integers(1, 255), label="change")
    saved.write_bytes(changed)
    with contextlib.suppress(ValueError):  # else the byte is white space in the header
        assert torch.equal(load_keys_values(saved, FINGERPRINT, backbone_config()), expected)
    saved.write_bytes(whole)


def test_overwritten_files_change_no_values(saved):
    """Loaded values are copied, as a memory map of a file that is cut later would end the process."""
    loaded = load_keys_values(saved, FINGERPRINT, backbone_config())
    expected, whole = loaded.clone(), saved.read_bytes()
    with saved.open("r+b") as file:
        file.write(bytes(len(whole)))
    assert torch.equal(loaded, expected)


def test_misfit_file_is_refused(saved):
    """A file of another backbone, or longer than its context, is refused."""
    for change in ({"num_hidden_layers": 2}, {"num_key_value_heads": 1}, {"head_dim": 16}):
        with pytest.raises(ValueError, match="Load the file with the base model that it was made for"):
            load_keys_values(saved, FINGERPRINT, backbone_config(**change))
    with pytest.raises(
        ValueError, match="has 8 positions, but the base model \\(of type `llama`\\) supports at most 7"
    ):
        load_keys_values(saved, FINGERPRINT, backbone_config(max_position_embeddings=7))
