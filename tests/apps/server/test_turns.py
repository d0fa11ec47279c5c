"""A long request delays the others by a few calls of model and encoder, and no answer changes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import aligner_for, chat_inputs, pipeline_of

from arcaligner import encoder_arcaligner, kv_cache_arcaligner
from arcaligner.apps.server import engine as engine_module
from arcaligner.apps.server.engine import Engine
from arcaligner.apps.server.live_rows import LiveBatch, frequencies_change_at
from arcaligner.apps.server.request import Limits, Request
from arcaligner.apps.server.turns import Turns

CHAT = [{"role": "user", "content": "Who wrote it?"}]
PASSAGES = ["Ada wrote it.", {"title": "Loom", "text": "The loom wove. It was loud."}, "Nobody read it."]
# Calls of model and encoder before the first token of a short question; each call passes the turn on.
CALLS = 12


@pytest.fixture
def engine_of(monkeypatch):
    """Makes engines whose turns end at each call of model or encoder, and that do not wait to fill a batch."""
    made = []
    monkeypatch.setattr(engine_module, "GATHER_SECONDS", 0.0)

    def make(pipeline, **settings):
        made.append(Engine(pipeline, **{"batch_seconds": 0.0} | settings))
        made[-1]._turns.seconds = made[-1]._turns.first_seconds = 0.0
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def independent(separate):
    return pipeline_of(*separate)


def request_of(documents=("Ada wrote it.",), chat=CHAT, **settings) -> Request:
    documents = None if documents is None else list(documents)
    return Request(chat, documents, **{"max_new_tokens": 4} | settings)


def joined_answers(engine, requests, **settings) -> list[str]:
    """The texts of the answers, where the other requests join the first one while its answer is written."""
    begun = threading.Event()
    first = engine.submit(request_of(**requests[0], on_text=lambda text: begun.set(), **settings))
    assert begun.wait(60)
    others = [engine.submit(request_of(**request, **settings)) for request in requests[1:]]
    return [future.result().text for future in (first, *others)]


def until_queued(turns: Turns) -> None:
    """Waits until another thread waits for the turn."""
    with turns._change:
        while not turns._waiting:
            turns._change.wait(0.001)


def test_short_question_behind_long_answer(independent, engine_of):
    """A short question is answered while a long answer is written, after few of its tokens."""
    engine, written, short = engine_of(independent), [], request_of(PASSAGES)

    def on_text(text):
        written.append(text)
        if len(written) == 5:
            engine.submit(short)
            until_queued(engine._turns)

    short.on_text = lambda text: seen.append(len(written))
    seen = []
    long = engine.submit(request_of(None, max_new_tokens=200, on_text=on_text)).result()
    assert long.completion_tokens == 200 and short.future.done()
    assert 5 <= seen[0] <= 5 + CALLS


@pytest.mark.parametrize("module", ["encoder", "untrained", "model"])
def test_short_question_behind_many_passages(independent, engine_of, monkeypatch, module):
    """A short question is answered while many passages are encoded, compared or prefilled."""
    monkeypatch.setattr(encoder_arcaligner, "CPU_TOKENS", 1)  # each text is a call
    monkeypatch.setattr(kv_cache_arcaligner, "CHUNK_SECONDS", 0.0)  # and soon a piece
    monkeypatch.setattr(kv_cache_arcaligner, "SLOTS_PER_BATCH", 1)
    monkeypatch.setattr(kv_cache_arcaligner, "SLOTS_PER_ROW", 1)
    processor = independent.processor
    of_name = {"encoder": processor.encoder.model[0], "untrained": processor.encoder.untrained.model[0]}
    slow = of_name.get(module, independent.model.model)
    engine, short, calls = engine_of(independent), request_of(None, max_new_tokens=1), []
    engine.warm_up()
    forward = slow.forward

    def counted(*args, **kwargs):
        calls.append(short.future.done())
        if len(calls) == 2:
            engine.submit(short)
            until_queued(engine._turns)
        return forward(*args, **kwargs)

    monkeypatch.setattr(slow, "forward", counted)
    documents = [f"Text {number} is about {number} and {number + 1}." for number in range(60)]
    long = engine.submit(request_of(documents, max_passages=60 if module == "model" else 1, max_new_tokens=1))
    long.result()
    assert len(calls) > 50 and calls.index(True) <= CALLS


@pytest.mark.parametrize("separate", ["start", "end"], indirect=True)
def test_turns_change_no_answer(independent, engine_of):
    """Greedy, sampled, stopped and refused answers that start while others are written are those of single requests."""
    cases = [
        {"documents": None},
        {"documents": PASSAGES, "max_passages": 3},
        {"documents": PASSAGES, "max_passages": 1},
        {"documents": None, "temperature": 1.5, "seed": 3, "sampling_top_k": 9},
        {"documents": PASSAGES, "max_passages": 2, "temperature": 1.0, "top_p": 0.9, "seed": 4},
        {"documents": PASSAGES, "copy_bonus": 0.0, "max_new_tokens": 7},
        {"documents": PASSAGES[:1], "min_confidence": 1.0},
        {"documents": PASSAGES[1:], "max_passages": 2, "chat": [{"role": "user", "content": "When? " * 20}]},
    ]
    independent.model.config.answer_calibration = [1.5, 0.5, 1.0]
    alone, expected = engine_of(independent), []
    for case in cases:
        expected.append(alone.submit(request_of(**{"max_new_tokens": 40} | case)).result())
    stop = expected[0].text[3:6]
    cases.append({"documents": None, "stop": [stop]})
    expected.append(alone.submit(request_of(**{"max_new_tokens": 40} | cases[-1])).result())
    engine, pieces, futures = engine_of(independent, max_batch=2), [[] for _ in cases], []

    def ask(number):
        def on_text(text):
            pieces[number].append(text)
            if len(pieces[number]) == 1 and number + 1 < len(cases):  # the next one joins this one
                ask(number + 1)

        futures.append(engine.submit(request_of(**{"max_new_tokens": 40, "on_text": on_text} | cases[number])))

    ask(0)
    for number, (single, streamed) in enumerate(zip(expected, pieces, strict=True)):
        result = futures[number].result()
        assert (result.text, result.finish_reason, result.completion_tokens) == (
            single.text,
            single.finish_reason,
            single.completion_tokens,
        )
        assert "".join(streamed) == single.text and result.statistics == single.statistics
        assert result.answerability == pytest.approx(single.answerability, abs=1e-6)
        assert result.answer_likelihood == pytest.approx(single.answer_likelihood, abs=1e-6)
    assert expected[4].text != expected[1].text and expected[6].text == "not in the text"
    assert max(future.result().completion_tokens for future in futures) == 40


@pytest.mark.parametrize("backbone", ["llama", "gemma2", "phi3_window", "smollm3"])
def test_rows_join_behind_windows(processor, engine_of, backbone):
    """Rows of several lengths join and leave a batch although sliding windows have dropped other positions of each."""
    pipeline = pipeline_of(aligner_for(processor, backbone), processor)
    chats = [[{"role": "user", "content": "Who? " * number}] for number in (9, 1, 4)]
    alone = engine_of(pipeline)
    requests = [{"documents": PASSAGES[number:], "chat": chat} for number, chat in enumerate(chats)]
    expected = [alone.submit(request_of(**request, max_new_tokens=30)).result().text for request in requests]
    assert joined_answers(engine_of(pipeline), requests, max_new_tokens=30) == expected


def test_beginning_is_that_of_each_answer(independent, engine_of):
    """`min_new_tokens` and `begin_suppress_tokens` count from the beginning of each answer, whenever other rows
    join."""
    config, processor = independent.model.generation_config, independent.processor
    chats = [[{"role": "user", "content": "Who? " * number}] for number in (9, 1, 4)]

    def alone(chat) -> list[int]:
        inputs = chat_inputs(processor, chat, sanitize_control_tokens=True)
        ids = independent.model.generate(**inputs, max_new_tokens=30, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    config.begin_suppress_tokens = sorted({alone(chat)[0] for chat in chats})
    config.eos_token_id = sorted({alone(chat)[12] for chat in chats})
    config.min_new_tokens = 12
    whole = [alone(chat) for chat in chats]
    assert 13 in map(len, whole)  # the first token that may end an answer does
    expected = [processor.decode(ids[: -(ids[-1] in config.eos_token_id) or None]).lstrip() for ids in whole]
    requests = [{"documents": None, "chat": chat} for chat in chats]
    assert joined_answers(engine_of(independent), requests, max_new_tokens=30) == expected


COUNTED = [{"forced_eos_token_id": 5}, {"exponential_decay_length_penalty": (4, 1.3)}]


@pytest.mark.parametrize("settings", COUNTED, ids=lambda settings: next(iter(settings)))
def test_end_is_that_of_each_answer(independent, engine_of, settings):
    """Settings that count to the end of an answer use its own length, not when others join or end."""
    config, processor, lengths = independent.model.generation_config, independent.processor, (30, 12, 21)
    chats = [[{"role": "user", "content": "Who? " * number}] for number in (9, 1, 4)]

    def alone(chat, length) -> list[int]:
        inputs = chat_inputs(processor, chat, sanitize_control_tokens=True)
        ids = independent.model.generate(**inputs, max_new_tokens=length, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    plain = [alone(*pair) for pair in zip(chats, lengths, strict=True)]
    config.eos_token_id = [5]
    for name, value in settings.items():
        setattr(config, name, value)
    whole = [alone(*pair) for pair in zip(chats, lengths, strict=True)]
    assert whole != plain
    expected = [processor.decode(ids[: -(ids[-1] in config.eos_token_id) or None]).lstrip() for ids in whole]
    requests = [
        {"documents": None, "chat": chat, "max_new_tokens": length} for chat, length in zip(chats, lengths, strict=True)
    ]
    assert joined_answers(engine_of(independent), requests) == expected


def test_long_rows_change_no_frequencies(processor, engine_of):
    """A long row does not change the answers of short ones: LongRoPE changes its frequencies for a whole batch."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]}
    text = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    pipeline = pipeline_of(aligner_for(processor, "phi3", text), processor)
    chats = [[{"role": "user", "content": "Who? " * number}] for number in (8, 3, 2)]
    engine, requests = engine_of(pipeline), [{"documents": None, "chat": chat} for chat in chats]
    alone = [engine.submit(request_of(**request, max_new_tokens=30)).result() for request in requests]
    assert frequencies_change_at(pipeline.model.config.text_config) == 64
    lengths = [answer.prompt_tokens + 30 for answer in alone]
    assert lengths[0] > 64 >= max(lengths[1:]) and max(lengths) < 1.5 * min(lengths)  # the lengths would fit one batch
    assert joined_answers(engine, requests, max_new_tokens=30) == [answer.text for answer in alone]


def test_same_passages_in_two_threads(independent, engine_of, monkeypatch):
    """A request waits for passages that another one prefills, which meanwhile goes on; each is computed once."""
    engine, forward, second = (
        engine_of(independent, prefix_bytes=2**24),
        independent.model.model.forward,
        request_of(PASSAGES),
    )
    monkeypatch.setattr(kv_cache_arcaligner, "SLOTS_PER_BATCH", 1)
    monkeypatch.setattr(kv_cache_arcaligner, "SLOTS_PER_ROW", 1)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            engine.submit(second)
            until_queued(engine._turns)
        return forward(*args, **kwargs)

    monkeypatch.setattr(independent.model.model, "forward", counted)
    first = engine.submit(request_of(PASSAGES)).result()
    assert second.future.result().text == first.text
    assert engine.store.misses == len(engine.store._entries) - 1 <= len(PASSAGES)


def test_rows_have_a_limit(independent, engine_of):
    """Of many long answers few are written at a time, and in the end all are written."""
    engine = engine_of(independent, max_batch=1)
    most = []

    def on_text(text):
        most.append(engine._num_prepared + engine._num_generating)

    futures = [engine.submit(request_of(None, max_new_tokens=20, on_text=on_text)) for _ in range(9)]
    assert len({future.result().text for future in futures}) == 1
    assert 1 < max(most) <= engine_module.MAX_BATCHES


@pytest.mark.parametrize("separate", ["start", "end"], indirect=True)
def test_rows_are_packed_by_length(independent, engine_of, monkeypatch):
    """Long and short prompts are not padded to one length, and the answers are those of single requests."""
    chats = [[{"role": "user", "content": "Who? " * number}] for number in (1, 60, 2, 1)]
    alone = engine_of(independent)
    expected = [alone.submit(request_of(None, chat, max_new_tokens=30)).result().text for chat in chats]
    packed, packs = LiveBatch.packed, []
    monkeypatch.setattr(LiveBatch, "packed", lambda batches: packs.append(packed(batches)) or packs[-1])
    monkeypatch.setattr(engine_module, "TURN_SECONDS", 0.0)
    engine = engine_of(independent, max_batch=4, batch_seconds=30.0)
    futures = [engine.submit(request_of(None, chat, max_new_tokens=30)) for chat in chats]
    assert [future.result().text for future in futures] == expected
    assert [len(batch.rows) for batch in packs[0]] == [3, 1]
    for batch in packs[0]:
        assert 2 * batch.attention_mask.sum() >= batch.attention_mask.numel()


def test_long_prompts_wait_for_memory(independent, engine_of):
    """Keys and values of few answers are in memory at a time, and in the end all answers are written."""
    engine, used, chat = engine_of(independent, max_batch=1), [], [{"role": "user", "content": "Who? " * 60}]
    engine.answer_bytes = bytes_of(engine, 300)

    def on_text(text):
        used.append(sum(engine._reserved_bytes.values()))

    futures = [engine.submit(request_of(None, chat, max_new_tokens=20, on_text=on_text)) for _ in range(3)]
    assert len({future.result().text for future in futures}) == 1
    assert bytes_of(engine, 200) < max(used) <= bytes_of(engine, 300) and not engine._reserved_bytes


def test_cancelled_row_leaves_others(independent, engine_of):
    """A request that is cancelled while others are written ends at its next token."""
    engine = engine_of(independent)
    alone = engine.submit(request_of(None, max_new_tokens=40)).result()
    left, pieces = request_of(None, max_new_tokens=200), []

    def on_text(text):
        pieces.append(text)
        if len(pieces) == 3:
            other.append(engine.submit(request_of(None, max_new_tokens=40)))
        if len(pieces) > 20:
            left.cancel()

    other, left.on_text = [], on_text
    assert str(engine.submit(left).exception()) == "The request was cancelled." and len(pieces) < 30
    assert other[0].result().text == alone.text


def test_turns_alternate_new_and_old():
    """Long work has every second turn, however much new work comes; new work has the others."""
    turns, order, started = Turns(seconds=0.0, first_seconds=0.0), [], threading.Barrier(3)

    def work(name, pieces):
        turn = turns.take()
        if name == "long":
            started.wait()
            until_all_wait(turns, 2)
        for _ in range(pieces):
            order.append(name)
            turn.pass_on()
        turn.give()

    def until_all_wait(turns, number):
        while len(turns._waiting) < number:
            threading.Event().wait(0.001)

    with ThreadPoolExecutor(3) as threads:
        long = threads.submit(work, "long", 6)
        while not turns._holder:
            pass
        news = []
        for name in ("first", "second"):
            news.append(threads.submit(lambda name=name: (started.wait(), work(name, 3))))
        for task in (long, *news):
            task.result(timeout=10)
    assert order[0] == "long" and set(order[1:4]) >= {"first", "second"}
    assert order.count("long") == 6 and order.index("long", 1) <= 4


def bytes_of(engine, num_positions: int) -> int:
    return num_positions * engine._bytes_per_position


def test_batch_that_begins_again_waits_once(independent, engine_of):
    """If one request of a batch ends before its first token, the others keep the memory that they have."""
    engine, turn = engine_of(independent), Turns().take()
    engine.answer_bytes = bytes_of(engine, 300)
    group = [request_of(None, max_new_tokens=150), request_of(None, max_new_tokens=150)]
    engine._wait_for_memory(group, [10, 20], turn)  # no other batch, so there is room
    group[0].future.set_exception(TimeoutError())
    engine._wait_for_memory(group[1:], [20], turn)
    assert engine._reserved_bytes == {group[1]: bytes_of(engine, 170)}
    group[1].future.set_result(None)
    assert not engine._reserved_bytes


@pytest.mark.parametrize("max_passages", [None, 1, 2, 5])
def test_passages_without_text(independent, engine_of, max_passages):
    """Documents without any text are answered from the slot for no passages, as in the pipeline."""
    request = request_of(["", " "], max_passages=max_passages)
    text = engine_of(independent).submit(request).result(60).text
    (record,) = independent(CHAT, documents=["", " "], max_new_tokens=4, return_full_text=False)
    assert record["generated_text"] == text


def test_weighted_rows_join_others(independent, engine_of):
    """Requests with several passages, weighted by their scores, get the pipeline's answers in a batch with others."""
    engine = engine_of(independent)
    rows = [(PASSAGES, 3), (PASSAGES[:1], 1), (PASSAGES[1:], 2)]
    requests = [request_of(documents, max_passages=most, max_new_tokens=9) for documents, most in rows]
    answers = [future.result(60).text for future in [engine.submit(request) for request in requests]]
    assert requests[0].prior.count(0.0) == 1 and requests[1].prior is None
    for (documents, most), text in zip(rows, answers, strict=True):
        (record,) = independent(CHAT, documents=documents, max_passages=most, max_new_tokens=9, return_full_text=False)
        assert record["generated_text"] == text


@pytest.mark.parametrize("documents", [None, PASSAGES])
@pytest.mark.parametrize("ends", ["cancelled", "late"])
def test_request_that_waits_for_memory_ends(independent, engine_of, monkeypatch, documents, ends):
    """A request that waits for memory ends at once when it is cancelled or too late, and none of it is computed."""
    engine = engine_of(independent)
    engine.answer_bytes, engine.weights_passages = bytes_of(engine, 300), False  # so that nothing is scored
    held = request_of(None, max_new_tokens=290)
    engine._wait_for_memory([held], [10], Turns().take())
    if ends == "late":
        engine.limits = Limits(seconds=0.2)
    waiting = request_of(documents, max_new_tokens=20, max_passages=documents and len(documents))
    with monkeypatch.context() as patch:
        patch.setattr(independent.model.model, "forward", None)
        future = engine.submit(waiting)
        time.sleep(0.1)
        if ends == "cancelled":
            waiting.cancel()
        began = time.monotonic()
        assert {"cancelled": "was cancelled", "late": "within 0.2 seconds"}[ends] in str(future.exception(timeout=60))
        assert time.monotonic() - began < 0.4
    held.future.set_result(None)
    engine.limits = Limits()
    assert engine.submit(request_of(documents, max_new_tokens=4)).result(timeout=60).completion_tokens


def test_fault_in_one_batch_spares_others(independent, engine_of, monkeypatch):
    """An answer that cannot be delivered fails, and the engine goes on."""

    def fails(text):
        raise OSError("the client is gone")

    engine = engine_of(independent)
    broken = engine.submit(request_of(None, max_new_tokens=20, on_text=fails))
    assert str(broken.exception(timeout=60)) == "the client is gone"
    assert engine.submit(request_of(None, max_new_tokens=4)).result(timeout=60).completion_tokens
    assert engine.is_running and engine._num_prepared + engine._num_generating == 0
