"""Limits of time and number, and the state after the engine closes or the corpus disappears."""

import shutil
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from conftest import pipeline_of
from tiny_models import random_head
from training_rows import write_rows

from arcaligner import kv_cache_arcaligner
from arcaligner.answering_arcaligner import similarities_of
from arcaligner.apps.corpus.build import build_corpus
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.table import Corpus
from arcaligner.apps.server.app import describe_error
from arcaligner.apps.server.engine import Engine, PassageEncoder
from arcaligner.apps.server.live_rows import RowSampler, _overlap
from arcaligner.apps.server.request import BusyError, Limits, Request, RequestCancelledError
from arcaligner.common.rows import find_answer
from arcaligner.encoder_arcaligner import SentenceEncoder, SlotEncoder

CHAT = [{"role": "user", "content": "Who wrote it?"}]
LONG = [{"role": "user", "content": "Who? " * 400}]
PASSAGES = ["Ada wrote it.", {"title": "Loom", "text": "The loom wove. It was loud."}, "Nobody read it."]


@pytest.fixture
def engine_of(ask):
    """Makes engines, and closes them at the end."""
    made = []

    def make(retriever=None, pipeline=ask, **settings):
        made.append(Engine(pipeline, retriever, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def independent(separate):
    """A pipeline of an aligner with independent passages."""
    return pipeline_of(*separate)


def request_of(documents=("Ada wrote it.",), chat=CHAT, **settings) -> Request:
    documents = None if documents is None else list(documents)
    return Request(chat, documents, **{"max_new_tokens": 4} | settings)


def answers(engine, *requests):
    return [future.result() for future in [engine.submit(request) for request in requests]]


def answer(engine, *documents, **settings):
    return engine.submit(request_of(*documents, **settings)).result()


def test_slow_request_ends(engine_of):
    """A request that takes too long ends, and the next one is answered."""
    written, engine = [], engine_of()

    def slow(text):
        written.append(text)
        request.deadline = time.monotonic()  # from now on the request is too late

    engine.limits, request = Limits(seconds=99), request_of(on_text=slow, max_new_tokens=64)
    late = [engine.submit(request).exception()]
    engine.limits = Limits(seconds=0.0)
    late.append(engine.submit(request_of()).exception())
    assert [describe_error(error)[0] for error in late] == [408, 408] and len(written) == 2
    for error, seconds in zip(late, (99, 0), strict=True):
        assert f"was not finished within {seconds} seconds" in str(error)
    engine.limits = Limits()
    assert answer(engine, None, max_new_tokens=2).completion_tokens <= 2


def test_full_queue_and_closing_engine(engine_of):
    """Requests beyond the queue are refused, and a closing engine answers those that wait."""
    engine = engine_of(limits=Limits(waiting=2), max_batch=1)
    busy, go_on = threading.Event(), threading.Event()
    futures = [engine.submit(request_of(None, on_text=lambda text: busy.set() or go_on.wait()))]
    busy.wait()
    futures += [engine.submit(request_of(None)) for _ in range(2)]
    with pytest.raises(BusyError, match="Too many requests are waiting"):
        engine.submit(request_of(None))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closed:
        pass
    with pytest.raises(BusyError, match="is shutting down"):
        engine.submit(request_of(None))
    go_on.set()
    closing.join()
    assert len({future.result().text for future in futures}) == 1


def test_short_answer_returns_early(engine_of):
    """A short answer does not wait for a long one in the same batch."""
    short, pieces = request_of(None, max_new_tokens=2), []

    def wait_for_short(text):
        pieces.append(text)
        if len(pieces) == 5:
            short.future.result(timeout=10)

    long = request_of(None, max_new_tokens=16, on_text=wait_for_short)
    long_answer, _ = answers(engine_of(batch_seconds=30.0, max_batch=2), long, short)
    assert long_answer.completion_tokens == 16 and long_answer.batch_size == 2 and len(pieces) > 5


def test_long_prompts_in_a_batch(engine_of, ask):
    """A long prompt does not shorten other answers, and one that is too long fails alone."""
    alone = answer(engine_of(), None, max_new_tokens=64)
    words = ask.tokenizer.decode(ask.tokenizer("aloud " * 500)["input_ids"][:470])
    long = request_of(None, [{"role": "user", "content": words}], max_new_tokens=64)
    engine = engine_of(batch_seconds=30.0, max_batch=3)
    failing = engine.submit(request_of(None, LONG))
    long, short = answers(engine, long, request_of(None, max_new_tokens=64))
    assert "positions, but the base model" in str(failing.exception())
    assert short.batch_size == 2 and short.text == alone.text
    assert long.prompt_tokens + long.completion_tokens <= 512 < long.prompt_tokens + alone.completion_tokens


def test_seed_fixes_the_answer(engine_of):
    """A seed gives the same answer, whatever else is in the batch."""

    def drawn(seed):
        return request_of(max_new_tokens=8, temperature=1.5, top_p=0.9, seed=seed)

    alone = engine_of(batch_seconds=0.0)
    plain, first, second, unlike = (
        alone.submit(request).result().text for request in (request_of(max_new_tokens=8), drawn(1), drawn(1), drawn(2))
    )
    assert first == second != unlike
    together = answers(engine_of(batch_seconds=30.0, max_batch=3), drawn(2), request_of(max_new_tokens=8), drawn(1))
    assert [result.text for result in together] == [unlike, plain, first] and together[0].batch_size == 3


def test_sampling_follows_probabilities():
    """Tokens are sampled as often as they are likely."""
    scores, rows = torch.tensor([[2.0, 1.0, 0.5, -3.0]]), 4000
    group = [Request(CHAT, temperature=0.7, top_p=0.95, seed=seed) for seed in range(rows)]
    drawn = torch.cat([RowSampler(request)(None, scores) for request in (*group, Request(CHAT))])
    expected = torch.tensor([*(scores[0, :3] / 0.7).softmax(0), 0.0])  # the last is beyond `top_p`
    shares = drawn[:-1].argmax(dim=1).bincount(minlength=4) / rows
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)
    assert torch.equal(drawn[-1], scores[0])
    whole = [RowSampler(Request(CHAT, temperature=temperature, seed=1))(None, scores) for temperature in (1, 1.0)]
    assert torch.equal(*whole)


def test_top_k_min_p_cut():
    """No token of 4000 draws is beyond the `sampling_top_k` most probable ones, or below `min_p` of the first."""
    scores, rows = torch.tensor([[2.0, 1.0, 0.5, -3.0]]), 4000
    for settings, left in (({"sampling_top_k": 2}, 2), ({"min_p": 0.3}, 2), ({"min_p": 0.2}, 3)):
        group = [Request(CHAT, temperature=1.0, seed=seed, **settings) for seed in range(rows)]
        drawn = torch.cat([RowSampler(request)(None, scores) for request in group])
        shares = drawn.argmax(dim=1).bincount(minlength=4) / rows
        expected = torch.tensor([*scores[0, :left].softmax(0), *[0.0] * (4 - left)])
        torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "text, stop, size", [("yes\n", "\n\n", 1), ("aab", "aabaa", 3), ("aaa", "aaa", 2), ("", "a", 0), ("b", "a", 0)]
)
def test_overlap_finds_stop_prefix(text, stop, size):
    assert _overlap(text, stop) == size


def test_a_long_stop_costs_little():
    """The work is bounded by the text: a `stop` of a million characters took seconds for each token."""
    began = time.process_time()
    assert _overlap("a" * 5000, "a" * 1_000_000) == 5000
    assert time.process_time() - began < 1


@pytest.mark.parametrize("separate", ["start", "end"], indirect=True)
def test_prompt_pieces_equal_whole(engine_of, independent, monkeypatch):
    """A prompt that is prefilled in pieces gives the answer of the whole one, with and without passages."""
    texts = ["Who wrote it? " * 20, "Who?"]
    requests = [(documents, [{"role": "user", "content": text}]) for documents in (PASSAGES, None) for text in texts]
    whole = answers(engine_of(None, independent), *(request_of(*request, max_new_tokens=8) for request in requests))
    monkeypatch.setattr(kv_cache_arcaligner, "CHUNK_POSITIONS", 10)
    monkeypatch.setattr(kv_cache_arcaligner, "CHUNK_SECONDS", 0)  # after a few, each piece is one position
    engine, forward, calls = (
        engine_of(None, independent, batch_seconds=30.0, max_batch=4),
        independent.model.model.forward,
        [],
    )
    monkeypatch.setattr(independent.model.model, "forward", lambda **kwargs: (calls.append(1), forward(**kwargs))[1])
    parts = answers(engine, *(request_of(*request, max_new_tokens=8) for request in requests))
    assert [result.text for result in parts] == [result.text for result in whole] and len(calls) > 100
    for part, one in zip(parts[:2], whole[:2], strict=True):
        assert part.answerability == pytest.approx(one.answerability, abs=1e-6)


@pytest.mark.parametrize("documents", [None, PASSAGES])
def test_abandoned_prompt_ends(engine_of, independent, monkeypatch, documents):
    """A cancelled request ends at the next piece of its prompt; the other one of its batch gets its usual answer."""
    alone = answer(engine_of(None, independent), documents, max_new_tokens=8)
    monkeypatch.setattr(kv_cache_arcaligner, "CHUNK_POSITIONS", 10)
    left = request_of(documents, [{"role": "user", "content": "Who wrote it? " * 20}])
    forward, pieces = independent.model.model.forward, []

    def leave(**kwargs):
        pieces.append(left.future.done())
        if len(pieces) > 6:
            left.cancel()
        return forward(**kwargs)

    monkeypatch.setattr(independent.model.model, "forward", leave)
    engine = engine_of(None, independent, batch_seconds=30.0, max_batch=2)
    future = engine.submit(left)
    repeated = answer(engine, documents, max_new_tokens=8)
    assert str(future.exception()) == "The request was cancelled." and pieces.index(True) == 7
    assert repeated.text == alone.text


def test_abandoned_passages_end(engine_of, independent, monkeypatch):
    """The passages of a cancelled request are encoded and prefilled only up to the next call of encoder or model."""
    engine = engine_of(None, independent)
    engine.warm_up()
    for owner, name in ((SentenceEncoder, "encode_spans"), (independent.model.model, "forward")):
        left, calls, compute = request_of(PASSAGES), [], getattr(owner, name)

        def leave(*args, left=left, calls=calls, compute=compute, **kwargs):
            calls.append(1)
            left.cancel()
            return compute(*args, **kwargs)

        monkeypatch.setattr(owner, name, leave)
        assert isinstance(engine.submit(left).exception(), RequestCancelledError) and len(calls) == 1
        monkeypatch.setattr(owner, name, compute)


def test_place_of_an_answer():
    """The place of an answer in a passage is counted in characters of the passage."""
    for answer_text, before, place, after in (
        ("Ski  jumper.", "😀 a ", "ski\njumper", ""),
        ("19", "in 1987, or ", "19", " of them"),
        ("$5", "US", "$5", " each"),
        ("东京", "他住在", "东京", "都"),
        ("a (b", "x ", "A (b", ") y"),
    ):
        assert find_answer(answer_text, before + place + after) == {"start": len(before), "end": len(before + place)}
    unseen = "The o\ufb03ce of Af\u00adfleck\u200b."
    assert find_answer("office of Affleck", unseen) == {"start": 4, "end": len(unseen) - 2}
    assert not any(
        find_answer(answer_text, text) for answer_text, text in (("1987", "19876"), (" .", "Yes."), ("Ada", "Adam"))
    )


def corpus_of(folder, processor, *names):
    """A corpus with one text for each name."""
    source = write_rows(folder / "texts.jsonl", [{"text": f"{name} wrote it."} for name in names])
    corpus = Corpus.create(folder / "corpus", processor)
    build_corpus([source], corpus, processor)
    return corpus


def test_vanished_corpus_fails_its_questions(tmp_path, engine_of, processor):
    """If the corpus disappears, only the questions about it fail."""
    corpus = corpus_of(tmp_path, processor, "Ada")
    engine = engine_of(search := Mock(wraps=Retriever(corpus, processor), corpus=corpus))
    engine.warm_up()
    search.assert_called_once_with("?", top_k=1)
    assert answer(engine, None).sources[0]["text"] == "Ada wrote it."
    shutil.rmtree(corpus.path)
    error = engine.submit(request_of(None)).exception()
    assert "cannot be searched" in str(error) and describe_error(error)[0] == 503
    assert answer(engine).statistics["slots"] == 1


def test_short_limit_warms_up(engine_of):
    """An engine whose answers may have one token only can be warmed up."""
    engine = engine_of(limits=Limits(max_new_tokens=1))
    engine.warm_up()
    assert answer(engine, max_new_tokens=1).completion_tokens == 1


def test_scored_slots_are_limited(engine_of, independent, processor, monkeypatch):
    """A request with more slots than may be scored is refused before any passage is encoded."""
    documents = ["Ada wrote it.", "Bob did not.", "Carol read it."]  # three slots
    engine = engine_of(None, independent, limits=Limits(max_slots=1, max_scored_slots=3))
    assert sum(source["used"] for source in answer(engine, documents, max_passages=1).sources) == 1
    for most, message in ((2, "2 slots; expected at most 1. Pass fewer"), (3, "but a request may have only 1.")):
        error = engine.submit(request_of(documents, max_passages=most)).exception()
        assert isinstance(error, ValueError) and message in str(error)
    engine = engine_of(limits=Limits(max_slots=40))
    monkeypatch.setattr(processor, "tokens_per_slot", 1)
    monkeypatch.setattr(SlotEncoder, "encode_tokens", None)
    error = engine.submit(request_of(["one sentence " * 30])).exception()
    assert isinstance(error, ValueError) and "slots, but a request may have only 40" in str(error)


@pytest.mark.parametrize("most, is_multihop, expected", [(None, True, 2), (None, False, 1), (3, True, 3)])
def test_multihop_question_uses_several(engine_of, independent, most, is_multihop, expected):
    """A multi-hop question uses two passages, unless the engine or the request sets another number."""
    documents = ["Ada wrote it.", "Bob did not.", "Carol read it."]
    independent.model.set_multihop_head(True)
    independent.model.multihop_head.bias.fill_(1.0 if is_multihop else -1.0)
    engine = engine_of(None, independent, max_passages=most)
    result = answer(engine, documents)
    assert sum(source["used"] for source in result.sources) == expected
    assert result.text == answer(engine_of(None, independent), documents, max_passages=expected).text
    assert sum(source["used"] for source in answer(engine, documents, max_passages=1).sources) == 1


@pytest.mark.parametrize("tokens_per_slot", [2, "segment"])
def test_passages_are_encoded_once(processor, tokens_per_slot, monkeypatch):
    """A passage is encoded once in any company; the last ones stay in memory, and white space has no slot."""
    blank = {"title": "", "text": " "}
    ada, loom, other = ({"title": "", "text": passage} if isinstance(passage, str) else passage for passage in PASSAGES)
    encode, texts = PassageEncoder(processor, max_passages=2), []

    def encode_tokens(self, tokens, tokens_per_slot, real=SlotEncoder.encode_tokens):
        texts.extend(part.segment.text for part in tokens)
        return real(self, tokens, tokens_per_slot)

    document_lists = ([ada, loom], [loom, blank, ada, loom], [other, ada], [loom], [blank])
    expected = [processor.encode_documents(documents, tokens_per_slot=tokens_per_slot) for documents in document_lists]
    monkeypatch.setattr(SlotEncoder, "encode_tokens", encode_tokens)
    for documents, whole in zip(document_lists, expected, strict=True):
        encoded = encode(documents, tokens_per_slot)
        assert encoded.segments == whole.segments
        assert torch.equal(encoded.context_passage_ids, whole.context_passage_ids)
        torch.testing.assert_close(encoded.context_embeds, whole.context_embeds)
        if whole.context_word_ids is not None:
            assert torch.equal(encoded.context_word_ids, whole.context_word_ids)
    # The passage about the loom is encoded twice: it had been dropped.
    assert sum("Ada" in text for text in texts) == 1 and sum("wove" in text for text in texts) == 2
    texts.clear()
    for documents in ([ada, loom, other], [ada], [{"title": "", "text": "New. Newer."}] * 9):
        max_slots = len(processor.encode_documents(documents, tokens_per_slot=tokens_per_slot).context_embeds) - 1
        texts.clear()
        with pytest.raises(ValueError, match=f"a request may have only {max_slots}"):
            encode.check_num_slots(documents, tokens_per_slot, max_slots)
        encode.check_num_slots(documents, tokens_per_slot, max_slots + 1)
        assert not texts
    encoded, whole = encode([loom, ada], tokens_per_slot, [7, 9]), encode([loom, ada], tokens_per_slot)
    with pytest.raises(ValueError, match="a request may have only"):  # the limit holds for encoded passages, too
        encode.check_num_slots([loom, ada], tokens_per_slot, len(whole.context_embeds) - 1)
    monkeypatch.delattr(SlotEncoder, "encode_batch")  # encoded passages do not need it
    encode.check_num_slots([loom, ada], tokens_per_slot, len(whole.context_embeds))
    assert encoded.context_passage_ids.tolist() == [[7, 9][number] for number in whole.context_passage_ids]
    assert [segment.document for segment in encoded.segments] == encoded.context_passage_ids.tolist()


@pytest.mark.parametrize("share, num_scored", [(0.5, 3), (0.9, 5)])
def test_few_passages_are_encoded(independent, engine_of, monkeypatch, share, num_scored):
    """Of five passages only the scored ones are encoded; their scores are those of an encoding of all five."""
    texts = [f"{name} wrote it in {1800 + number}." for number, name in enumerate(("Ada", "Bob", "Cy", "Di", "Ed"))]
    monkeypatch.setattr(independent.model.config, "scored_share", share)
    monkeypatch.setattr(independent.model.config, "most_answerability", 1.0)
    monkeypatch.setattr(independent.model.config, "similarity_weight", 0.0)
    monkeypatch.setattr(independent.model.config, "match_weight", 0.0)
    engine, encoded = engine_of(None, independent), []
    encode_tokens = SlotEncoder.encode_tokens

    def recorded(self, tokens, tokens_per_slot):
        encoded.extend(part.segment.text for part in tokens)
        return encode_tokens(self, tokens, tokens_per_slot)

    monkeypatch.setattr(SlotEncoder, "encode_tokens", recorded)
    result = answer(engine, texts)
    (used,) = (number for number, source in enumerate(result.sources) if source["used"])
    first = list(encoded)
    assert len(set(first)) == len(first) == num_scored
    assert [segment.text for segment in result.passages.encoded.segments] == [texts[used]]
    assert {segment.document for segment in result.passages.encoded.segments} == {used}
    scored = {number: source["answerability"] for number, source in enumerate(result.sources)}
    whole = engine.answerer.score([CHAT], [texts])[0]
    for number, answerability in scored.items():
        assert (
            answerability is None
            if texts[number] not in first
            else answerability == pytest.approx(whole[number].answerability)
        )
    assert used == max((n for n in scored if scored[n] is not None), key=lambda n: whole[n].answerability)
    encoded.clear()
    assert answer(engine, texts).num_cached == 1 and not encoded


def test_endless_text_is_refused_early(engine_of, independent, monkeypatch):
    """A text with more words than the limit of slots is refused before it is cut."""
    engine = engine_of(None, independent, limits=Limits(max_slots=10, max_scored_slots=20))
    monkeypatch.setattr(engine.answerer, "cut", None)
    error = engine.submit(request_of(["word " * 5000], tokens_per_slot=2)).exception()
    assert isinstance(error, ValueError) and "more than 1250 slots; expected at most 20" in str(error)


def test_prefix_cache_respects_bytes(engine_of):
    for most, hits in ((2**20, 1), (0, 0)):
        engine = engine_of(prefix_bytes=most)
        assert answer(engine).text == answer(engine).text
        assert (engine.store.hits, engine.store.bytes > 0) == (hits, hits > 0)


def test_low_answerability_abstains_early(engine_of, ask, monkeypatch, give_head):
    """If the answerability is below `min_confidence`, the abstention is sent immediately."""
    monkeypatch.setattr(ask.processor, "no_answer", "not in the text")
    give_head(ask.model)
    engine = engine_of()

    def ask_with(**settings):
        pieces = []
        return answer(engine, max_new_tokens=12, on_text=pieces.append, **settings), pieces

    plain, pieces = ask_with()
    assert 0 < plain.answerability < 1 and "".join(pieces) == plain.text and len(pieces) > 1
    enough, pieces = ask_with(min_confidence=plain.answerability - 1e-3)
    assert enough.text == plain.text and "".join(pieces) == plain.text
    refused, pieces = ask_with(min_confidence=plain.answerability + 1e-3)
    assert refused.text == "not in the text" and pieces == ["not in the text"] and refused.finish_reason == "stop"
    other = request_of(chat=[{"role": "user", "content": "When was that, and why?"}])
    assert answers(engine, request_of(), other)[0].answerability == pytest.approx(plain.answerability, abs=1e-4)
    with pytest.raises(ValueError, match="`min_confidence` is 2; expected a number from 0 to 1"):
        ask_with(min_confidence=2)


def test_invalid_settings_are_refused(engine_of):
    for name, value, message in (
        ("min_confidence", 0.5, "needs an answerability head"),
        ("max_passages", 0, "is 0; expected a whole number of at least 1"),
        ("tokens_per_slot", 0, "is 0; expected"),
        ("max_batch", 0, "is 0; expected at least 1 request"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` {message}"):
            engine_of(**{name: value})


REFUSED = {"cache_implementation": "static", "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3}


@pytest.mark.parametrize("name", REFUSED)
def test_generation_setting_is_refused(engine_of, ask, monkeypatch, name):
    """A generation setting that does not work in a batch that others join is refused by name."""
    monkeypatch.setattr(ask.model.generation_config, name, REFUSED[name])
    with pytest.raises(ValueError, match=f"`{name}` in generation_config.json is {REFUSED[name]!r}"):
        engine_of()


def test_similarity_selects_passages(independent, engine_of, tmp_path, monkeypatch):
    """With a large `similarity_weight` the similarity alone ranks the passages."""
    corpus = corpus_of(tmp_path, independent.processor, "ada", "bob")
    engine = engine_of(Retriever(corpus, independent.processor), independent, max_passages=1)
    monkeypatch.setattr(independent.model.config, "similarity_weight", 1e6)
    of_corpus = answer(engine, None).sources
    similar = [source["similarity"] for source in of_corpus]
    assert similar[0] != pytest.approx(similar[1])
    documents = [source["text"] for source in of_corpus]
    assert similarities_of(independent.processor.encoder, CHAT, documents) == pytest.approx(similar, abs=1e-3)
    for sources in (of_corpus, answer(engine, documents).sources):
        assert [source["used"] for source in sources] == [similarity == max(similar) for similarity in similar]
        assert all(source["answerability"] == source["confidence"] for source in sources)


@pytest.mark.parametrize("separate", ["start", "end"], indirect=True)
def test_batch_answers_like_the_pipeline(independent, engine_of):
    """A batch gets the answers of the pipeline, and an invalid request fails alone."""
    text = " ".join(f"Sentence {number} is about word and number {number}." for number in range(100))
    cases = [
        (PASSAGES, {"max_passages": 2, "min_confidence": 0.0}),
        (PASSAGES, {"max_passages": 1, "copy_bonus": 1e4}),
        (PASSAGES, {"max_passages": 1, "copy_bonus": 0.0}),
        ([text, "Ada."], {}),  # a long one is cut, and the top-ranked passage is used
    ]
    random_head(independent.model, match=(0.5, 3.0, -1.0))
    independent.model.config.answer_calibration = [1.5, 0.5, 1.0]
    independent.model.config.pointer_heads, independent.model.config.pointer_weight = [[0, 0], [1, 1]], 5.0
    engine = engine_of(None, independent, batch_seconds=0.5, max_batch=5)
    failing = engine.submit(request_of(PASSAGES, LONG))
    results = answers(engine, *(request_of(documents, max_new_tokens=6, **settings) for documents, settings in cases))
    assert "The prompt has" in str(failing.exception())
    for result, (documents, settings) in zip(results, cases, strict=True):
        row = {"question": CHAT[0]["content"], "documents": documents}
        (record,) = independent(row, return_slots=True, max_new_tokens=6, **settings)
        answerability, statistics = {}, record["statistics"]
        for source in result.sources:
            if source["confidence"] is not None:  # otherwise it was not scored
                answerability[source["number"]] = max(answerability.get(source["number"], 0.0), source["confidence"])
        for name in ("passage_answerabilities", "passage_confidences"):
            assert answerability == pytest.approx(statistics.pop(name), abs=1e-4)
        for name in ("answerability", "confidence"):
            assert result.answerability == pytest.approx(statistics.pop(name), abs=1e-4)
        assert result.answer_likelihood == pytest.approx(statistics.pop("answer_likelihood"), abs=1e-4)
        assert result.text.strip() == record["generated_text"].strip() and result.statistics == statistics
        slots = result.passages.encoded.segments
        numbers = [result.sources[slot.document]["number"] for slot in slots]
        segments = [(segment["document"], segment["text"]) for segment in record["segments"]]
        assert list(zip(numbers, [slot.text for slot in slots], strict=True)) == segments
        assert {slot.document for slot in slots} == {n for n, source in enumerate(result.sources) if source["used"]}
        assert result.batch_size == 4 and result.seconds["scoring"] > 0
    top_ranked, copied, free, cut = results
    (used,) = (source for source in copied.sources if source["used"])
    assert copied.text in (used["title"], used["text"]) or copied.text in used["text"]
    assert copied.text != free.text and [source["number"] for source in cut.sources] == [0] * 12 + [1]
    alone = engine_of(None, independent)
    new, again = (answer(alone, PASSAGES, max_new_tokens=6, **cases[0][1]) for _ in range(2))
    assert (new.num_cached, again.num_cached) == (0, 2) and {new.text, again.text} == {top_ranked.text}
    assert all(source["used"] for source in answer(engine, PASSAGES, max_passages=9).sources)


def test_old_name_of_a_limit_warns():
    with pytest.warns(FutureWarning, match="`max_slots_asked` is now called `max_scored_slots`"):
        assert Limits().max_slots_asked == Limits().max_scored_slots
