"""From requests to answers: concurrent requests share a batch, and each gets its answer as it is generated.

    submit -> passages as slots (of the request, or of a corpus) -> selected passages -> slot prefixes, cached or
    computed -> first tokens -> rows of one batch, which new rows join -> parts of the answer

Any number of threads may submit requests. A few threads of the engine prepare requests, and one writes the answers.
They compute in turns, which they pass on between two calls of model or encoder. So a short question does not wait until
a long answer is written, or until many passages are encoded.
"""

import functools
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache

from ...answering_arcaligner import Answerer, chat_inputs, similarities_of
from ...configuration_arcaligner import check_length
from ...encoder_arcaligner import EncodedDocuments, PrecomputedSlots, single_passages
from ...kv_cache_arcaligner import ALONE, QuestionBatch, Turn, entry_shape, in_chunks, prefill_beginning
from ...pipeline_arcaligner import ArcAlignerPipeline
from ...segmentation_arcaligner import original_text
from ..corpus.retrieve import Retriever, SlotPassages
from .live_rows import LiveBatch, LiveRow, frequencies_change_at
from .request import Answer, BusyError, Limits, Request
from .turns import EndedError, GroupTurn, ThreadTurn, Turns

logger = logging.getLogger(__name__)

# Number of passages of requests whose slots are cached. The memory of cached slot prefixes is limited by
# `prefix_bytes`.
CACHED_PASSAGES = 256

# Number of batches that are prepared at a time, in turns, and of batches that may be prepared or generated at a time:
# also those that are paused need memory.
MAX_PREPARED, MAX_BATCHES = 3, 4

# While other requests are answered, new ones wait this many seconds for more, to be prepared together.
GATHER_SECONDS = 0.3

# Answers of similar length are written together, for this many seconds before those of another length.
TURN_SECONDS = 0.5


class PassageEncoder:
    """Encodes each passage once for all requests, so that its slots are the same in all of them and its keys and values
    are found in the cache."""

    def __init__(self, processor, max_passages: int = CACHED_PASSAGES):
        self.processor, self.max_passages = processor, max_passages
        self._cached: OrderedDict[tuple, EncodedDocuments] = OrderedDict()  # longest unused first

    def check_num_slots(self, documents: list[dict], tokens_per_slot: int | str | None, max_slots: int) -> None:
        """Raise `ValueError` for passages with more than `max_slots` slots, before any of them is encoded."""
        cached = [self._cached.get(key) for key in self._keys(documents, tokens_per_slot)]
        if None not in cached and sum(len(encoded.context_embeds) for encoded in cached) <= max_slots:
            return
        encode = self.processor.slot_encoder.encode_batch
        limit = {"slot_limits": [max_slots], "limit_is_for": "a request may have"}
        encode([documents], tokens_per_slot=tokens_per_slot, **limit, only_segments=True)

    @staticmethod
    def _keys(documents: list[dict], tokens_per_slot: int | str | None) -> list[tuple]:
        return [(json.dumps(document), tokens_per_slot) for document in documents]

    def __call__(
        self,
        documents: list[dict],
        tokens_per_slot: int | str | None,
        numbers: Sequence[int] | None = None,
        turn: Turn = ALONE,
    ) -> EncodedDocuments:
        """The slots of passages; `numbers` are the numbers of the passages, by default 0, 1, ..."""
        if not any(document["text"].strip() for document in documents):  # the processor makes a slot of the empty text
            return self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot)
        keys = self._keys(documents, tokens_per_slot)
        encoded = {key: self._cached[key] for key in keys if key in self._cached}
        new = {key: document for key, document in zip(keys, documents, strict=True) if key not in encoded}
        if new:
            encoded |= zip(new, self._encode(list(new.values()), tokens_per_slot, turn), strict=True)
        for key in keys:
            self._cached[key] = encoded[key]
            self._cached.move_to_end(key)
        while len(self._cached) > self.max_passages:
            self._cached.popitem(last=False)
        return self._joined([encoded[key] for key in keys], range(len(keys)) if numbers is None else numbers)

    def _encode(self, documents: list[dict], tokens_per_slot: int | str | None, turn: Turn) -> list[EncodedDocuments]:
        """Encode each passage by itself; passages of white space get no slot. Many are encoded in a call, which is
        fastest."""
        encoded = []
        for part in in_chunks(len(documents), self.processor.passage_tokens, turn):
            encoded += self._encode_part(documents[part], tokens_per_slot)
        return encoded

    def _encode_part(self, documents: list[dict], tokens_per_slot: int | str | None) -> list[EncodedDocuments]:
        segments, *slots, _ = self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot)
        single, nothing = single_passages(PrecomputedSlots(*slots)), PrecomputedSlots(slots[0][:0], None)
        encoded = []
        for number in range(len(documents)):
            segments_here = [segment for segment in segments if segment.document == number]
            embeds, words, _ = single[number] if segments_here else nothing
            ids = torch.full((len(segments_here),), number, device=embeds.device)
            encoded.append(EncodedDocuments(segments_here, embeds, words, ids, []))
        return encoded

    def _joined(self, passages: list[EncodedDocuments], numbers: Sequence[int]) -> EncodedDocuments:
        numbered = zip(numbers, passages, strict=True)
        segments = [replace(segment, document=number) for number, passage in numbered for segment in passage.segments]
        words = [passage.context_word_ids for passage in passages if passage.context_word_ids is not None]
        width = max((word_ids.shape[1] for word_ids in words), default=0)
        words = [pad(word_ids, (0, width - word_ids.shape[1]), value=-1) for word_ids in words]
        embeds = torch.cat([passage.context_embeds for passage in passages])
        ids = torch.tensor([segment.document for segment in segments], device=embeds.device)
        return EncodedDocuments(segments, embeds, torch.cat(words) if words else None, ids, [])


class Engine:
    """
    Answers requests.

    Args:
        ask ([`ArcAlignerPipeline`]): Model and processor.
        retriever ([`Retriever`], *optional*): For requests without documents. Precomputed passages of its corpus are
            not computed again.
        top_k (`int`), tokens_per_slot (`int` or `"segment"`), min_confidence (`float`), max_passages (`int`): Values
            for requests that do not set them. By default, as many passages are used as the question needs
            (`Answerer.select`).
        max_batch (`int`): Maximum number of requests that are prepared together. Up to four times as many are answered
            at a time.
        batch_seconds (`float`): Time that the first request of a batch waits for others.
        prefix_bytes (`int`): Memory for slot prefixes that are cached between requests.
        answer_bytes (`int`): Memory for the keys and values of answers that are generated together. While new answers
            join, twice as much is used for a short time. Further requests wait; a request that needs more than this is
            answered alone.
        folder (`str` or `Path`, *optional*): Folder to write slot prefixes to and to read them from. Default: none is
            written, and those of the corpus are read, if there is a corpus.
        limits ([`Limits`]): What a request may ask for.

    Raises:
        `ValueError`: settings that are invalid; a `generation_config` with a `cache_implementation`, an
            `encoder_repetition_penalty` or an `encoder_no_repeat_ngram_size`.
    """

    weights_passages = True  # whether several passages of a request are weighted by their scores

    def __init__(
        self,
        ask: ArcAlignerPipeline,
        retriever: Retriever | None = None,
        *,
        top_k: int = 5,
        tokens_per_slot: int | str | None = None,
        min_confidence: float | None = None,
        max_passages: int | None = None,
        max_batch: int = 8,
        batch_seconds: float = 0.01,
        prefix_bytes: int = 2**29,
        answer_bytes: int = 2**32,
        folder: str | Path | None = None,
        limits: Limits | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"`max_batch` is {max_batch}; expected at least 1 request.")
        if (kind := ask.model.generation_config.cache_implementation) is not None:
            raise ValueError(
                f"`cache_implementation` in generation_config.json is {kind!r}, which a server does not support, "
                "because requests share a cache whose size changes. Remove the field."
            )
        for name in ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"):
            if (value := getattr(ask.model.generation_config, name)) not in (None, 0, 1.0):
                raise ValueError(
                    f"`{name}` in generation_config.json is {value!r}, which a server does not support: it continues "
                    "an answer step by step, and the tokens so far would count as the prompt. Remove the field."
                )
        self.model, self.processor, self.retriever = ask.model, ask.processor, retriever
        precomputed = None if retriever is None else retriever.corpus.precomputed_folder
        options = {"max_bytes": prefix_bytes, "folder": folder or precomputed, "read_only": folder is None}
        self.answerer = Answerer(ask.model, ask.processor, ask.model.passage_cache(ask.processor, **options))
        self._check(tokens_per_slot, min_confidence, max_passages)
        self.top_k, self.tokens_per_slot, self.min_confidence = top_k, tokens_per_slot, min_confidence
        self.max_passages = max_passages
        self.max_batch, self.batch_seconds, self.limits = max_batch, batch_seconds, limits or Limits()
        self.store = self.answerer.cache
        self._encode = PassageEncoder(self.processor)
        # With LongRoPE, requests are prepared one by one, because a long one would change the others of its batch.
        self._max_prepared = max_batch if frequencies_change_at(ask.model.config.text_config) is None else 1
        self.answer_bytes = answer_bytes
        self._bytes_per_position = ask.model.dtype.itemsize * math.prod(entry_shape(ask.model.config.text_config, 1))
        self._turns = Turns()
        self._waiting: list[Request] = []
        self._joining: list[LiveBatch] = []
        self._num_prepared = self._num_generating = 0  # requests
        self._reserved_bytes: dict[Request, int] = {}  # bytes of the keys and values of live answers
        self._closed = self._all_prepared = False
        self._change = threading.Condition()  # notified when one of these changes
        self._take_lock = threading.Lock()  # held by the thread that takes the next requests
        self._threads = [
            threading.Thread(target=self._prepare_requests, name=f"arcaligner-prepare-{number}", daemon=True)
            for number in range(MAX_PREPARED)
        ]
        self._generator = threading.Thread(target=self._generate_answers, name="arcaligner-generate", daemon=True)
        for thread in (*self._threads, self._generator):
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether a thread of the engine is alive."""
        return any(thread.is_alive() for thread in (*self._threads, self._generator))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> "Future[Answer]":
        """Queue a request.

        Raises:
            `BusyError`: too many requests are waiting, or the engine is closing.
            `ValueError`: the request has more documents than the limits allow, asks for more tokens, or has an invalid
                setting.
        """
        documents = request.documents or ()
        if len(documents) > self.limits.max_documents:
            raise ValueError(
                f"Got {len(documents)} documents; expected at most {self.limits.max_documents}. Pass fewer."
            )
        if not 1 <= request.max_new_tokens <= self.limits.max_new_tokens:
            raise ValueError(
                f"`max_new_tokens` is {request.max_new_tokens}; expected a number from 1 to "
                f"{self.limits.max_new_tokens}."
            )
        self._check(request.tokens_per_slot, request.min_confidence, request.max_passages, request.copy_bonus)
        for name in ("top_k", "tokens_per_slot", "min_confidence", "max_passages"):
            if getattr(request, name) is None:
                setattr(request, name, getattr(self, name))
        request.seconds, request.deadline = self.limits.seconds, request.arrived + self.limits.seconds
        request.on_cancel = self._wake
        with self._change:
            if self._closed:
                raise BusyError("The server is shutting down. Try again later.")
            if self.num_waiting >= self.limits.waiting:
                raise BusyError("Too many requests are waiting. Try again later.")
            self._waiting.append(request)
            self._change.notify_all()
        return request.future

    def _wake(self) -> None:
        """Wake all threads that wait for a change."""
        with self._change:
            self._change.notify_all()

    def _check(self, tokens_per_slot, min_confidence, max_passages, copy_bonus=None) -> None:
        self.answerer.check(
            tokens_per_slot=tokens_per_slot,
            min_confidence=min_confidence,
            max_passages=max_passages,
            copy_bonus=copy_bonus,
        )

    def warm_up(self) -> None:
        """Search the corpus and answer a short request, so that everything is loaded."""
        if self.retriever is not None:
            self.retriever("?", top_k=1)
        most = min(2, self.limits.max_new_tokens)
        request = Request([{"role": "user", "content": "?"}], documents=[".", ","], max_new_tokens=most)
        self.submit(request).result()

    def close(self) -> None:
        """Stop accepting requests, answer those that wait, and end the threads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        with self._change:
            self._all_prepared = True
            self._change.notify_all()
        self._generator.join()

    # The threads that prepare

    def _prepare_requests(self) -> None:
        while True:
            with self._take_lock:
                if not self._wait_for_requests():
                    return
                turn = self._turns.take()
                batch = self._take_batch()
            try:
                self._prepare(batch, turn)
            except Exception as error:  # an error must not end the thread, and each request has to end
                for request in batch:
                    if not request.future.done() and request not in self._reserved_bytes:
                        request.future.set_exception(error)
            finally:
                turn.give()
                with self._change:
                    self._num_prepared -= len(batch)
                    self._change.notify_all()

    def _wait_for_requests(self) -> bool:
        """Wait until the next requests should be taken. Return whether there are any: there are none if the engine is
        closed."""

        def is_full() -> bool:
            return self._closed or len(self._waiting) >= self._max_prepared

        def is_idle() -> bool:
            return not self._num_prepared + self._num_generating

        def is_due() -> bool:
            has_capacity = self._num_prepared + self._num_generating < self.max_batch * MAX_BATCHES
            return has_capacity if self._waiting else self._closed

        with self._change:
            self._change.wait_for(is_due)
            # Wait for others to share the batch: it takes little longer than a single request.
            self._change.wait_for(lambda: is_full() or is_idle(), GATHER_SECONDS)
            self._change.wait_for(is_full, self.batch_seconds)
            return bool(self._waiting)

    def _take_batch(self) -> list[Request]:
        """The next requests, in order of arrival."""
        with self._change:
            capacity = self.max_batch * MAX_BATCHES - self._num_prepared - self._num_generating
            max_requests = max(1, min(self._max_prepared, capacity))
            batch, self._waiting = self._waiting[:max_requests], self._waiting[max_requests:]
            self._num_prepared += len(batch)
        return batch

    def _prepare(self, batch: list[Request], turn: ThreadTurn) -> None:
        """Prepare a batch of requests up to their first tokens, and hand the answers over to be continued."""
        running = [request for request in batch if request.future.set_running_or_notify_cancel()]
        set_passages, select = (
            functools.partial(self._set_passages, turn),
            functools.partial(self._select_passages, turn),
        )
        with_passages = [request for one in running for (request,), _ in isolate_failures([one], set_passages)]
        prepared = [request for part, _ in isolate_failures(with_passages, select) for request in part]
        for has_slots in (False, True):
            if group := [request for request in prepared if (request.passages is not None) == has_slots]:
                self._answer(turn, group)

    def _set_passages(self, turn: ThreadTurn, group: list[Request]) -> None:
        """Set the passages of one request, as slots: those of its documents, or those that the corpus has for its
        question. A request without documents has none if there is no corpus, or if its `top_k` is 0."""
        (request,), group_turn = group, GroupTurn(turn, group)
        tokens_per_slot = request.tokens_per_slot
        if request.documents is not None:
            self._cut_documents(request, group_turn)
            return
        if self.retriever is None or request.top_k == 0:
            return
        questions = [message["content"] for message in request.messages if message["role"] == "user"]
        passages = self.retriever(questions[-1] if questions else "", request.top_k)
        if tokens_per_slot not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: document[name] for name in ("title", "text")} for document in passages.documents]
            self._encode.check_num_slots(texts, tokens_per_slot, self._max_slots_of(request, len(texts)))
            passages.encoded = self._encode(texts, tokens_per_slot, turn=group_turn)
            passages.seconds["slots"] += time.perf_counter() - began
        num_slots = len(passages.encoded.context_embeds)
        max_slots = self._max_slots_of(request, len(passages.documents))
        if num_slots > max_slots:
            raise ValueError(
                f"The passages have {num_slots} slots; expected at most {max_slots}. Retrieve fewer passages "
                "(`num_passages` of the request, or `--top-k` of `arcaligner ask` and `arcaligner serve`), or use a "
                "larger `tokens_per_slot`."
            )
        request.passages = passages

    def _cut_documents(self, request: Request, turn: GroupTurn) -> None:
        """Cut the documents of a request into passages and, if all of these are used, encode them."""
        began, tokens_per_slot, passages = time.perf_counter(), request.tokens_per_slot, []
        documents = [
            document if isinstance(document, dict) else {"title": "", "text": document}
            for document in request.documents
        ]
        self._check_size(documents, tokens_per_slot)
        for number, document in enumerate(documents):
            parts, _ = self.answerer.cut([document])
            passages += [part | {"number": number} for part in parts]
            turn.pass_on()
        texts = [_without_number(passage) for passage in passages]
        if not passages:
            # One slot, of the empty text.
            encoded = self.processor.encode_documents([], tokens_per_slot=tokens_per_slot)
        else:
            self._encode.check_num_slots(texts, tokens_per_slot, self._max_slots_of(request, len(texts)))
            turn.pass_on()
            encoded = None if self._selects(request, len(texts)) else self._encode(texts, tokens_per_slot, turn=turn)
        seconds = {"retrieval": 0.0, "slots": time.perf_counter() - began}
        request.passages = SlotPassages(passages, encoded, seconds)

    def _check_size(self, documents: list[dict], tokens_per_slot: int | str | None) -> None:
        """Raise `ValueError` for documents that have too many slots in any case, before they are cut, which may take
        seconds."""
        tokens_per_slot = self.processor.tokens_per_slot if tokens_per_slot is None else tokens_per_slot
        if tokens_per_slot == "segment":
            return
        # A word has at least one token, so there are at least twice as many slots as this number.
        num_words = sum(len(original_text(document, number).split()) for number, document in enumerate(documents))
        num_slots = num_words // (2 * tokens_per_slot)
        if num_slots > self.limits.max_scored_slots:
            raise ValueError(
                f"The passages have more than {num_slots} slots; expected at most {self.limits.max_scored_slots}. Pass "
                "fewer or shorter documents, or a larger `tokens_per_slot`."
            )

    def _max_slots_of(self, request: Request, num_passages: int) -> int:
        """Maximum number of slots of a request with this many passages: larger if they are scored one by one than if
        all of them are used."""
        uses_all = not self.answerer.selects(num_passages, request.max_passages, weights=False)
        return self.limits.max_slots if uses_all else self.limits.max_scored_slots

    def _select_passages(self, turn: ThreadTurn, group: list[Request]) -> None:
        """Reduce the passages of each request to those that its question needs, or to `max_passages`: score each
        passage separately, and keep the top-ranked ones."""
        group = [
            request for request in group if request.passages and self._selects(request, len(request.passages.documents))
        ]
        if not group:
            return
        group_turn = GroupTurn(turn, group)
        began, encoding = time.perf_counter(), 0.0
        chats, documents = [self._chat(request) for request in group], [request.passages.documents for request in group]
        similar = [self._similarities(request, group_turn) for request in group]

        def slots_of(only: list[list[int]]) -> list[PrecomputedSlots | None]:
            nonlocal encoding
            began = time.perf_counter()
            slots = [self._slots_of(request, numbers, group_turn) for request, numbers in zip(group, only, strict=True)]
            encoding += time.perf_counter() - began
            return slots

        limits = [request.max_passages for request in group]
        selected = self.answerer.select(
            chats, documents, limits, similar, slots_of, weights=self.weights_passages, turn=group_turn
        )
        seconds = time.perf_counter() - began - encoding
        for request, (numbers, scores, question, prior) in zip(group, selected, strict=True):
            request.scored_question, request.prior = question, prior
            request.num_cached = sum(scores[number].is_cached for number in numbers)
            if not numbers:  # no passage has a text: one slot, of the empty text
                request.scored_question = None
                documents = [document | {"used": False} for document in request.passages.documents]
                encoded = self.processor.encode_documents([], tokens_per_slot=request.tokens_per_slot)
                request.passages = SlotPassages(documents, encoded, request.passages.seconds)
                continue
            if request.passages.encoded is None:
                request.passages.encoded = self._encoded(request, numbers, group_turn)
                request.passages.seconds["slots"] += encoding
            request.passages = request.passages.only(numbers)
            request.passages.seconds["scoring"] = seconds
            for number, document in enumerate(request.passages.documents):  # `None` if it was not scored
                answerability = scores[number].answerability if number in scores else None
                document |= {"answerability": answerability, "confidence": answerability}  # the latter as in 0.2

    def _selects(self, request: Request, num_passages: int) -> bool:
        """Whether passages are scored if a request has this many, because it uses only some of them or weights them."""
        return self.answerer.selects(num_passages, request.max_passages, self.weights_passages)

    def _similarities(self, request: Request, turn: GroupTurn) -> list[float]:
        """The cosine of the question and each of a request's passages."""
        documents = request.passages.documents
        if request.documents is None:  # the search has computed them
            return [document["similarity"] for document in documents]
        encoder, chat, cosines = self.processor.encoder, self._chat(request), []
        for part in in_chunks(len(documents), self.processor.passage_tokens, turn):
            cosines += similarities_of(encoder, chat, documents[part])
        return cosines

    def _slots_of(self, request: Request, numbers: list[int], turn: GroupTurn) -> PrecomputedSlots | None:
        """The slots of the passages of a request with these `numbers`, or of all its passages, if they are encoded
        already."""
        if not numbers:
            return None
        encoded = request.passages.encoded or self._encoded(request, numbers, turn)
        return PrecomputedSlots(encoded.context_embeds, encoded.context_word_ids, encoded.context_passage_ids)

    def _encoded(self, request: Request, numbers: list[int], turn: GroupTurn) -> EncodedDocuments:
        texts = [_without_number(request.passages.documents[number]) for number in numbers]
        return self._encode(texts, request.tokens_per_slot, numbers, turn)

    def _answer(self, turn: ThreadTurn, group: list[Request]) -> None:
        began = time.monotonic()
        for part, inputs in isolate_failures(group, functools.partial(self._inputs, turn)):
            try:
                self._generate(part, inputs, began)
            except Exception as error:
                for request in part:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _inputs(self, turn: ThreadTurn, group: list[Request]) -> dict[str, Any]:
        """The inputs of `generate` for a batch, with everything except for the end of the prompts in the cache."""
        group_turn = GroupTurn(turn, group)
        if group[0].passages is not None:
            questions = self._questions(group, group_turn)
            self._wait_for_memory(group, questions.num_positions, group_turn)
            inputs = self.store.prepare_batch(questions, [request.prior for request in group])
            for request, num_cached, num_parts in zip(group, inputs.num_cached, inputs.num_passages, strict=True):
                if request.num_cached is None:  # else `_select_passages` has counted them
                    request.num_cached = len(request.passages.documents) * num_cached // num_parts
        else:
            # Control tokens in the text of a client must not end a turn of the chat.
            options = {} if self.processor.chat_template is None else {"sanitize_control_tokens": True}
            inputs = dict(chat_inputs(self.processor, [self._chat(request) for request in group], **options))
            inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
            check_length(inputs["input_ids"].shape[1], "The prompt", self.model.config.text_config)
            self._wait_for_memory(group, inputs["attention_mask"].sum(dim=1).tolist(), group_turn)
            inputs["past_key_values"] = DynamicCache(config=self.model.config.text_config)
        return prefill_beginning(self.model, inputs, group_turn)

    def _questions(self, group: list[Request], turn: Turn) -> QuestionBatch:
        """The questions of requests, each with the slots of the passages that are used for it."""
        questions = []
        for request in group:
            _, embeds, words, ids, _ = request.passages.encoded
            if (num_slots := len(embeds)) > self.limits.max_slots:
                raise ValueError(
                    f"The passages have {num_slots} slots; expected at most {self.limits.max_slots}. Pass fewer "
                    "passages, a lower `max_passages`, or a larger `tokens_per_slot`."
                )
            if (question := request.scored_question) is None:  # if its passages were not scored
                words = None if words is None else [words]
                question = self.store.make_batch([self._chat(request)], None, [embeds], words, [ids])
            questions += question.questions
        return question._replace(questions=questions, turn=turn)

    def _chat(self, request: Request) -> list[dict[str, str]] | str:
        """The question or chat, in the form of the processor."""
        if self.processor.chat_template is not None:
            return request.messages
        if len(request.messages) > 1:
            raise ValueError(
                f"Got {len(request.messages)} messages; expected exactly one user message, because the base model has "
                "no chat template. Send the question alone."
            )
        return request.messages[0]["content"]

    def _generate(self, group: list[Request], inputs: dict[str, Any], began: float) -> None:
        """Generate the first token of each request, and hand the answers over to the thread that generates."""
        ids, mask, cache = (inputs[name] for name in ("input_ids", "attention_mask", "past_key_values"))
        rows = [
            LiveRow(
                self.answerer,
                request,
                self._chat(request),
                prompt_tokens=length,
                batch_size=len(group),
                began=began,
            )
            for request, length in zip(group, mask.sum(dim=1).tolist(), strict=True)
        ]
        positions = self.model.prompt_positions(ids, mask, inputs.get("context_passage_ids"))
        bias = self.model.slot_bias(ids, inputs.get("context_passage_ids"), inputs.get("passage_prior"))
        batch = LiveBatch(self.answerer, rows, ids, mask, positions, cache, bias)
        batch.begin()
        unfinished = [row.request.future for row in rows if not row.is_done]
        if not unfinished:
            return
        with self._change:
            self._joining.append(batch)
            self._num_generating += len(unfinished)
            self._change.notify_all()
        for future in unfinished:
            future.add_done_callback(self._count_finished)

    def _count_finished(self, future: Future) -> None:
        with self._change:
            self._num_generating -= 1
            self._change.notify_all()

    def _wait_for_memory(self, group: list[Request], num_positions: list[int], turn: GroupTurn) -> None:
        """Wait until there is memory for the keys and values of a batch in addition to those of live answers. A batch
        does not wait if there are no live answers, nor a second time if it is computed again because one of its
        requests ended."""
        longest = max(num_positions)  # prompts are padded to it
        bytes_of = {request: (longest + request.max_new_tokens) * self._bytes_per_position for request in group}

        def reserve() -> bool:
            new = {request: size for request, size in bytes_of.items() if request not in self._reserved_bytes}
            used = sum(self._reserved_bytes.values())
            if new and used and used + sum(new.values()) > self.answer_bytes:
                return False
            self._reserved_bytes |= new
            for request in new:
                request.future.add_done_callback(lambda _, request=request: self._free(request))
            return True

        with self._change:
            is_reserved = reserve()
        while not is_reserved:
            seconds = min(min(request.deadline for request in group) - time.monotonic(), threading.TIMEOUT_MAX)
            with turn.away(), self._change:
                is_reserved = self._change.wait_for(
                    lambda: reserve() or any(request.is_cancelled for request in group), seconds
                )
            turn.check()

    def _free(self, request: Request) -> None:
        with self._change:
            del self._reserved_bytes[request]
            self._change.notify_all()

    # The thread that generates

    def _generate_answers(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._joining or self._all_prepared)
                if not self._joining:
                    return
            turn = self._turns.take()
            try:
                self._generate_all(turn)
            finally:
                turn.give()

    def _generate_all(self, turn: ThreadTurn) -> None:
        """Generate the rest of all answers that have begun, and of those that join meanwhile."""
        live: list[LiveBatch] = []
        while True:
            with self._change:
                joining, self._joining = self._joining, []
                batches = [batch for batch in (*live, *joining) if batch.num_left]
            if not batches:
                return
            if joining or any(batch.is_sparse for batch in batches):
                try:
                    batches = LiveBatch.packed(batches)
                except (RuntimeError, MemoryError) as error:  # no memory for a copy: continue without one
                    logger.warning(
                        "There is not enough memory to generate all answers in one batch (%s). They are generated in "
                        "several smaller batches, which is slower.",
                        error,
                    )
                joining.clear()  # frees the memory of batches that were joined
            live = batches
            for batch in live:
                try:
                    self._generate_turn(batch, turn, is_only_batch=len(live) == 1)
                except Exception as error:
                    batch.fail(error)

    def _generate_turn(self, batch: LiveBatch, turn: ThreadTurn, is_only_batch: bool) -> None:
        end = time.monotonic() + TURN_SECONDS

        def pause() -> bool:
            turn.pass_on()
            return bool(self._joining) or not is_only_batch and time.monotonic() > end

        batch.advance(pause)


def isolate_failures(
    group: list[Request], function: Callable[[list[Request]], Any]
) -> Iterator[tuple[list[Request], Any]]:
    """Call `function` with a group of requests and, if that fails, with its halves, so that an invalid request fails
    alone. Yield the parts that could be run, each with its result. Requests that have ended meanwhile are left out."""
    try:
        result = function(group)
    except EndedError:
        if waiting := [request for request in group if not request.future.done()]:
            yield from isolate_failures(waiting, function)
    except Exception as error:
        if len(group) == 1:
            group[0].future.set_exception(error)
        else:
            for part in (group[: len(group) // 2], group[len(group) // 2 :]):
                yield from isolate_failures(part, function)
    else:
        yield group, result


def _without_number(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "number"}
