"""Limits of time and number, and what is left when the engine closes or the corpus vanishes."""

import shutil
import threading
import time
from dataclasses import asdict

import pytest
import torch
from tiny_models import random_probe

from arcaligner import ArcAlignerPipeline, pipeline_arcaligner
from arcaligner.common.rows import find_answer
from arcaligner.corpus.build import build_corpus
from arcaligner.corpus.retrieve import Retriever
from arcaligner.corpus.table import Corpus
from arcaligner.encoder_arcaligner import SlotEncoder
from arcaligner.segmentation_arcaligner import similarities_of
from arcaligner.server.answers import Limits, Request, RowSampler
from arcaligner.server.app import describe_error
from arcaligner.server.engine import BusyError, Engine

CHAT = [{"role": "user", "content": "Who wrote it?"}]


@pytest.fixture
def engine_of(ask):
    """Engines that are closed at the end."""
    made = []

    def make(retriever=None, **settings):
        made.append(Engine(ask, retriever, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asked(question="Who wrote it?", **settings) -> Request:
    chat = [{"role": "user", "content": question}]
    return Request(chat, documents=["Ada wrote it."], **{"max_new_tokens": 12} | settings)


def failure(engine, **settings) -> BaseException:
    return engine.submit(Request(CHAT, documents=["Ada."], **settings)).exception()


def test_a_request_that_takes_too_long_ends_and_the_next_is_answered(engine_of):
    written = []
    engine = engine_of(limits=Limits(seconds=0.0))
    assert isinstance(failure(engine), TimeoutError) and describe_error(failure(engine))[0] == 408
    engine.limits = Limits(seconds=60)

    def slow(text):
        written.append(text)
        engine.limits = Limits(seconds=0.0)  # from now on, it is too late

    error = failure(engine, on_text=slow, max_new_tokens=64)
    assert isinstance(error, TimeoutError) and len(written) == 2
    engine.limits = Limits()
    assert engine.submit(Request(CHAT, max_new_tokens=2)).result().completion_tokens <= 2


def test_without_gates_the_passes_of_kept_slots_are_told_and_nothing_is_read_again(engine_of, ask, monkeypatch):
    monkeypatch.setattr(ask.model.config, "gate_mode", "off")
    engine, documents = engine_of(), ["Ada wrote it. It was long."]
    row = {"question": CHAT[0]["content"], "documents": documents}
    expected = ask(row, return_slots=True, max_new_tokens=4)[0]["trajectories"]
    for hits in range(2):
        request = Request(CHAT, documents=documents, max_new_tokens=4, return_slots=True)
        assert engine.submit(request).result().trajectories == expected
        assert (engine.store.hits, engine.store.misses) == (hits, 1)


def test_too_many_that_wait_are_told_and_a_closing_engine_answers_the_others(engine_of):
    engine = engine_of(limits=Limits(waiting=2), max_batch=1)
    busy, go_on = threading.Event(), threading.Event()
    first = engine.submit(Request(CHAT, max_new_tokens=2, on_text=lambda text: busy.set() or go_on.wait()))
    busy.wait()
    waiting = [engine.submit(Request(CHAT, max_new_tokens=2)) for _ in range(2)]
    with pytest.raises(BusyError, match="Too many requests wait"):
        engine.submit(Request(CHAT))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closed:
        pass
    with pytest.raises(BusyError, match="is closing"):
        engine.submit(Request(CHAT))
    go_on.set()
    closing.join()
    answers = [each.result().text for each in (first, *waiting)]
    assert len(set(answers)) == 1


def test_a_short_answer_does_not_wait_for_the_long_one_beside_it(engine_of):
    engine = engine_of(batch_seconds=30.0, max_batch=2)
    short, pieces = Request(CHAT, max_new_tokens=2), []

    def wait_for_short(text):
        pieces.append(text)
        if len(pieces) == 5:
            short.future.result(timeout=10)

    long = engine.submit(Request(CHAT, max_new_tokens=16, on_text=wait_for_short))
    engine.submit(short)
    assert long.result().completion_tokens == 16 and long.result().batch_size == 2 and len(pieces) > 5


def test_a_long_prompt_beside_it_cuts_no_answer_short(engine_of, ask):
    alone = engine_of().submit(Request(CHAT, max_new_tokens=64)).result()
    engine = engine_of(batch_seconds=30.0, max_batch=2)
    words = ask.tokenizer.decode(ask.tokenizer("aloud " * 500)["input_ids"][:470])
    long = engine.submit(Request([{"role": "user", "content": words}], max_new_tokens=64))
    beside, long = engine.submit(Request(CHAT, max_new_tokens=64)).result(), long.result()
    assert beside.batch_size == 2 and beside.text == alone.text
    assert long.prompt_tokens + long.completion_tokens <= 512 < long.prompt_tokens + alone.completion_tokens


def test_a_seed_gives_the_same_answer_whoever_shares_the_batch(engine_of):
    def drawn(seed):
        return Request(CHAT, documents=["Ada."], max_new_tokens=8, temperature=1.5, top_p=0.9, seed=seed)

    engine = engine_of(batch_seconds=0.0)
    first, second, unlike = (engine.submit(drawn(seed)).result().text for seed in (1, 1, 2))
    assert first == second != unlike
    engine = engine_of(batch_seconds=30.0, max_batch=3)
    plain = Request(CHAT, documents=["Ada."], max_new_tokens=8)
    answers = [engine.submit(each) for each in (drawn(2), plain, drawn(1))]
    assert [each.result().text for each in answers[::2]] == [unlike, first] and answers[0].result().batch_size == 3
    alone = engine_of().submit(Request(CHAT, documents=["Ada."], max_new_tokens=8)).result()
    assert answers[1].result().text == alone.text


def test_tokens_are_drawn_as_often_as_they_are_likely():
    scores, rows = torch.tensor([[2.0, 1.0, 0.5, -3.0]]), 4000
    group = [Request(CHAT, temperature=0.7, top_p=0.95, seed=seed) for seed in range(rows)]
    drawn = RowSampler([*group, Request(CHAT)])(None, scores.repeat(rows + 1, 1))
    expected = torch.tensor([*(scores[0, :3] / 0.7).softmax(0), 0.0])  # the last is beyond `top_p`
    found = drawn[:-1].argmax(dim=1).bincount(minlength=4) / rows
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert torch.equal(drawn[-1], scores[0])
    whole = [RowSampler([Request(CHAT, temperature=each, seed=1)])(None, scores) for each in (1, 1.0)]
    assert torch.equal(*whole)


@pytest.mark.parametrize(
    ("answer", "text", "place"),
    [
        ("Ski  jumper.", "😀 a ski\njumper", "ski\njumper"),
        ("19", "in 1987, or 19 of them", "19"),
        ("1987", "19876", None),
        ("$5", "US$5 each", "$5"),
        ("东京", "他住在东京都", "东京"),
        ("a (b", "x A (b) y", "A (b"),
        (" .", "Yes.", None),
        ("Ada", "Adam", None),
    ],
)
def test_the_place_of_an_answer_is_where_a_text_says_it(answer, text, place):
    found = find_answer(answer, text)
    assert (found and text[found["start"] : found["end"]]) == place
    if place == "19":
        assert found["start"] == text.index("19 of")


def test_a_corpus_that_vanishes_fails_its_questions_and_no_others(tmp_path, engine_of, processor):
    (tmp_path / "ada.txt").write_text("Ada wrote it.")
    corpus = Corpus.create(tmp_path / "corpus", processor)
    build_corpus([str(tmp_path / "ada.txt")], corpus, processor)
    engine = engine_of(Retriever(corpus, processor))
    assert engine.submit(Request(CHAT, max_new_tokens=2)).result().passages.documents[0]["text"] == "Ada wrote it."
    shutil.rmtree(corpus.path)
    error = engine.submit(Request(CHAT, max_new_tokens=2)).exception()
    assert "cannot be searched" in str(error) and describe_error(error)[0] == 503
    assert engine.submit(Request(CHAT, documents=["Ada."], max_new_tokens=2)).result().statistics["slots"] == 1


def test_too_many_slots_are_refused_before_any_is_encoded(engine_of, processor, monkeypatch):
    engine = engine_of(limits=Limits(max_slots=40))
    monkeypatch.setattr(processor, "tokens_per_slot", 1)
    monkeypatch.setattr(SlotEncoder, "encode_tokens", None)
    error = engine.submit(Request(CHAT, documents=["one sentence " * 30])).exception()
    assert isinstance(error, ValueError) and "slots, but there is room for 40" in str(error)


def test_a_warm_engine_has_searched_its_corpus(engine_of, retriever, monkeypatch):
    asked, search = [], Retriever.__call__
    monkeypatch.setattr(Retriever, "__call__", lambda self, each, **k: asked.append(each) or search(self, each, **k))
    engine_of(retriever).warm_up()
    assert asked == ["?"]


def test_slot_prefixes_are_kept_within_their_bytes(engine_of):
    for most, hits in ((2**20, 1), (0, 0)):
        engine = engine_of(prefix_bytes=most)
        answers = [engine.submit(Request(CHAT, documents=["Ada."], max_new_tokens=4)).result().text for _ in range(2)]
        assert answers[0] == answers[1]
        assert (engine.store.hits, engine.store.bytes > 0) == (hits, hits > 0)


def test_a_clock_that_jumps_back_changes_no_answer(engine_of, monkeypatch):
    engine, days = engine_of(), iter(range(10**9, 0, -86_400))
    expected = engine.submit(Request(CHAT, documents=["Ada."], max_new_tokens=4)).result()
    monkeypatch.setattr(time, "time", lambda: next(days))
    monkeypatch.setattr(time, "time_ns", lambda: 10**9 * next(days))
    again = engine.submit(Request(CHAT, documents=["Ada."], max_new_tokens=4)).result()
    assert again.text == expected.text and engine.store.hits == 1
    assert min(again.seconds.values()) >= 0 and again.seconds["total"] < 60


def test_an_answer_with_less_confidence_than_asked_for_is_the_refusal_told_at_once(engine_of, ask, monkeypatch):
    monkeypatch.setattr(ask.processor, "no_answer", "not in the text")
    monkeypatch.setattr(ask.processor, "answer_probe", random_probe(ask.model))
    engine, told = engine_of(), []

    def answer(**settings):
        request = asked(**settings)
        request.on_text = told.append
        told.clear()
        return engine.submit(request).result()

    plain = answer()
    assert 0 < plain.confidence < 1 and "".join(told) == plain.text and len(told) > 1
    kept = answer(min_confidence=plain.confidence - 1e-3)
    assert kept.text == plain.text and "".join(told) == plain.text
    refused = answer(min_confidence=plain.confidence + 1e-3)
    assert refused.text == "not in the text" and told == ["not in the text"] and refused.finish_reason == "stop"
    together = [engine.submit(asked(question)) for question in ("Who wrote it?", "When was that, and why?")]
    assert together[0].result().confidence == pytest.approx(plain.confidence, abs=1e-4)
    with pytest.raises(ValueError, match="`min_confidence` is 2; expected a number from 0 to 1"):
        answer(min_confidence=2)


def test_an_aligner_without_a_probe_answers_without_a_confidence(engine_of):
    engine = engine_of()
    assert engine.submit(asked("Who?")).result().confidence is None
    with pytest.raises(ValueError, match="`min_confidence` needs an aligner whose confidence was fitted"):
        engine.submit(asked("Who?", min_confidence=0.5))
    with pytest.raises(ValueError, match="`min_confidence` needs an aligner whose confidence was fitted"):
        engine_of(min_confidence=0.5)


PASSAGES = ["Ada wrote it.", {"title": "Loom", "text": "The loom wove. It was loud."}, "Nobody read it."]


@pytest.fixture
def apart(separate):
    """A pipeline of an aligner that reads passages apart."""
    model, reader = separate
    return ArcAlignerPipeline(model=model, processor=reader, task="text-generation", device="cpu")


def test_the_similarity_to_the_question_counts(apart, tmp_path, monkeypatch):
    for name in ("ada", "bob"):
        (tmp_path / f"{name}.txt").write_text(f"{name} wrote it.")
    corpus = Corpus.create(tmp_path / "corpus", apart.processor)
    build_corpus([str(tmp_path / "ada.txt"), str(tmp_path / "bob.txt")], corpus, apart.processor)
    engine = Engine(apart, Retriever(corpus, apart.processor), max_passages=1)
    monkeypatch.setattr(pipeline_arcaligner, "SIMILARITY_WEIGHT", 1e6)
    of_corpus = engine.submit(Request(CHAT, max_new_tokens=2)).result().sources
    similar = [each["similarity"] for each in of_corpus]
    assert similar[0] != pytest.approx(similar[1])
    documents = [each["text"] for each in of_corpus]
    assert similarities_of(apart.processor.encoder, CHAT, documents) == pytest.approx(similar, abs=1e-3)
    given = engine.submit(Request(CHAT, documents, max_new_tokens=2)).result().sources
    for sources in (of_corpus, given):
        assert [each["read"] for each in sources] == [each == max(similar) for each in similar]
        assert all("confidence" in each for each in sources)
    engine.close()


def test_answers_copy_from_the_passages_that_they_are_read_from(apart):
    apart.processor.copy_bonus = 1e4
    engine = Engine(apart, max_passages=1, batch_seconds=0.5, max_batch=2)
    requests = [Request(CHAT, list(PASSAGES), max_new_tokens=6, copy_bonus=bonus) for bonus in (None, 0.0)]
    copied, free = [future.result() for future in [engine.submit(request) for request in requests]]
    engine.close()
    options = {"max_passages": 1, "max_new_tokens": 6}
    for found, bonus in ((copied, 1e4), (free, 0.0)):
        (record,) = apart({"question": CHAT[0]["content"], "documents": PASSAGES}, copy_bonus=bonus, **options)
        assert found.text.strip() == record["generated_text"].strip()
    (read,) = (each for each in copied.sources if each["read"])
    assert copied.text in (read["title"], read["text"]) or copied.text in read["text"]
    assert copied.text != free.text and copied.batch_size == 2


def test_of_more_passages_the_likeliest_are_read_and_told(apart):
    engine = Engine(apart)
    settings = {"max_new_tokens": 6, "min_confidence": 0.0}
    records = apart({"question": "Who wrote it?", "documents": PASSAGES}, return_slots=True, max_passages=2, **settings)
    read = sorted({segment["document"] for segment in records[0]["segments"]})
    sure = records[0]["statistics"]["passage_confidences"]
    new, known = (engine.submit(Request(CHAT, list(PASSAGES), max_passages=2, **settings)).result() for _ in range(2))
    engine.close()
    assert new.text.strip() == records[0]["generated_text"].strip() and known.text == new.text
    assert [each["text"] for each in new.sources] == [PASSAGES[0], PASSAGES[1]["text"], PASSAGES[2]]
    assert [number for number, each in enumerate(new.sources) if each["read"]] == read
    assert {n: each["confidence"] for n, each in enumerate(new.sources)} == pytest.approx(sure, abs=1e-4)
    assert [asdict(each) for each in new.passages.encoded.segments] == records[0]["segments"]
    records[0]["statistics"].pop("passage_confidences"), records[0]["statistics"].pop("confidence")
    parts = sum(new.seconds[name] for name in ("waiting", "retrieval", "slots", "choosing", "model"))
    assert parts == pytest.approx(new.seconds["first_token"]) and new.seconds["choosing"] > 0
    assert (new.kept, known.kept) == (0, 2) and new.statistics == records[0]["statistics"]


def test_passages_of_a_batch_are_chosen_together_and_a_request_that_cannot_be_read_fails_alone(apart):
    engine = Engine(apart, max_passages=1, batch_seconds=0.5, max_batch=3)
    long = [{"role": "user", "content": "Who? " * 400}]
    alone = engine.submit(Request(CHAT, list(PASSAGES), max_new_tokens=3)).result()
    requests = [Request(chat, list(PASSAGES), max_new_tokens=3) for chat in (CHAT, long, CHAT)]
    first, failed, last = [engine.submit(request) for request in requests]
    assert first.result().text == last.result().text == alone.text and first.result().batch_size == 2
    assert first.result().sources == alone.sources and "The prompt has" in str(failed.exception())
    engine.close()


def test_passages_that_are_read_again_for_the_passes_of_their_slots_were_not_kept(apart):
    apart.model.config.gate_mode, engine = "adaptive", Engine(apart)
    settings = {"max_passages": 1, "max_new_tokens": 2}
    kept = [
        engine.submit(Request(CHAT, list(PASSAGES), return_slots=each, **settings)).result() for each in (False, True)
    ]
    engine.close()
    assert [each.kept for each in kept] == [0, 0] and kept[1].trajectories is not None


def test_a_request_names_its_own_number_of_passages_and_the_engine_one_for_the_others(apart):
    engine = Engine(apart, max_passages=1)
    few, all_of_them = (
        engine.submit(Request(CHAT, list(PASSAGES), max_passages=most, max_new_tokens=2)).result() for most in (None, 9)
    )
    engine.close()
    assert sum(each["read"] for each in few.sources) == 1 and all(each["read"] for each in all_of_them.sources)
    with pytest.raises(ValueError, match="`max_passages` is 0; expected a whole number of at least 1"):
        Engine(apart, max_passages=0)
    with pytest.raises(ValueError, match="`max_passages` is 0; expected a whole number of at least 1"):
        engine.submit(Request(CHAT, list(PASSAGES), max_passages=0))


def test_passages_are_read_as_text_and_what_the_next_question_has_in_common_is_kept(engine_of, ask, retriever):
    engine, documents = engine_of(retriever), [{"title": "Ada", "text": "Ada wrote it."}, "It was long."]
    prompt = "Refer to the background document: Ada: Ada wrote it. It was long.\nQuestion: "
    for question, kept in (("Who wrote it?", 0), ("Who wrote it?", 2), ("When?", 2)):
        chat = [{"role": "user", "content": question}]
        plain = ask([{"role": "user", "content": prompt + question}], max_new_tokens=12, return_full_text=False)
        found = engine.submit(Request(chat, documents=documents, full_text=True, max_new_tokens=12)).result()
        assert found.text == plain[0]["generated_text"].lstrip() and found.kept == kept
        assert [each["text"] for each in found.sources] == ["Ada wrote it.", "It was long."]
        assert found.statistics["slots"] == 0 < found.statistics["tokens"] and chat[0]["content"] == question
    other = engine.submit(Request(CHAT, documents=["Ada wrote it.", "No."], full_text=True)).result()
    assert other.kept == 0
    sources = engine.submit(Request(CHAT, top_k=1)).result().sources
    found = engine.submit(Request(CHAT, top_k=1, full_text=True)).result()
    assert [each["document"] for each in found.sources] == [each["document"] for each in sources]
    assert engine.submit(Request(CHAT, top_k=0, full_text=True, max_new_tokens=4)).result().sources == []
