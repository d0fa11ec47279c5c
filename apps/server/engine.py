"""From requests to answers: concurrent requests share a batch, and each gets its answer as it is generated.

    submit -> passages as slots (given, or of a corpus) -> selected passages -> slot prefixes, cached or computed
    -> first tokens -> rows of one batch, which new ones join -> pieces of the answer

Any number of threads may submit. A few prepare requests, and one writes the answers; these compute in turns, which they
pass on between two calls of model or encoder. So a short question does not wait until a long answer is written, or many
passages are encoded.
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
from ...encoder_arcaligner import EncodedDocuments, GivenSlots, single_passages
from ...kv_cache_arcaligner import ALONE, AskedQuestions, Turn, entry_shape, in_pieces, prefill_beginning
from ...pipeline_arcaligner import ArcAlignerPipeline
from ...segmentation_arcaligner import given_text
from ..corpus.retrieve import Retriever, SlotPassages
from .live_rows import LiveBatch, LiveRow, frequencies_change_at
from .request import Answer, BusyError, Limits, Request
from .turns import EndedError, GroupTurn, ThreadTurn, Turns

logger = logging.getLogger(__name__)

# Number of passages of requests whose slots are cached; slot prefixes have a budget of their own, in bytes.
KEPT_PASSAGES = 256

# Batches that are prepared in turns, and batches whose rows there may be at a time: paused ones need their memory.
PREPARED_AT_ONCE, BATCHES_AT_ONCE = 3, 4

# While others are answered, requests wait so many seconds for more, to be prepared together.
GATHER_SECONDS = 0.3

# How long answers of one length are written before those of another.
TURN_SECONDS = 0.5


class PassageEncoder:
    """Encodes each passage once for all requests. So its slots are the same in all of them, and its keys and values are
    found in the cache."""

    def __init__(self, processor, max_passages: int = KEPT_PASSAGES):
        self.processor, self.max_passages = processor, max_passages
        self._kept: OrderedDict[tuple, EncodedDocuments] = OrderedDict()  # longest unused first

    def check_room(self, documents: list[dict], tokens_per_slot: int | str | None, room: int) -> None:
        """Raises `ValueError` for passages with more slots than there is `room` for, before any of them is encoded."""
        known = [self._kept.get(key) for key in self._keys(documents, tokens_per_slot)]
        if None not in known and sum(len(each.context_embeds) for each in known) <= room:
            return
        encode = self.processor.slot_encoder.encode_batch
        encode([documents], tokens_per_slot=tokens_per_slot, room=[room], only_segments=True)

    @staticmethod
    def _keys(documents: list[dict], tokens_per_slot: int | str | None) -> list[tuple]:
        return [(json.dumps(each), tokens_per_slot) for each in documents]

    def __call__(
        self,
        documents: list[dict],
        tokens_per_slot: int | str | None,
        numbers: Sequence[int] | None = None,
        turn: Turn = ALONE,
    ) -> EncodedDocuments:
        """The slots of passages, whose `numbers` are by default those of their places."""
        if not any(each["text"].strip() for each in documents):  # nothing but white space is a slot, too
            return self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot)
        keys = self._keys(documents, tokens_per_slot)
        found = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: each for key, each in zip(keys, documents, strict=True) if key not in found}
        if new:
            found |= zip(new, self._encode(list(new.values()), tokens_per_slot, turn), strict=True)
        for key in keys:
            self._kept[key] = found[key]
            self._kept.move_to_end(key)
        while len(self._kept) > self.max_passages:
            self._kept.popitem(last=False)
        return self._joined([found[key] for key in keys], range(len(keys)) if numbers is None else numbers)

    def _encode(self, documents: list[dict], tokens_per_slot: int | str | None, turn: Turn) -> list[EncodedDocuments]:
        """Encode each passage by itself, without a slot for white space; many in a call, which is fastest."""
        pieces = in_pieces(len(documents), self.processor.passage_tokens, turn)
        return [each for some in pieces for each in self._encode_some(documents[some], tokens_per_slot)]

    def _encode_some(self, documents: list[dict], tokens_per_slot: int | str | None) -> list[EncodedDocuments]:
        segments, *slots, _ = self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot)
        apart, nothing = single_passages(GivenSlots(*slots)), GivenSlots(slots[0][:0], None)
        encoded = []
        for number in range(len(documents)):
            own = [each for each in segments if each.document == number]
            embeds, words, _ = apart[number] if own else nothing
            ids = torch.full((len(own),), number, device=embeds.device)
            encoded.append(EncodedDocuments(own, embeds, words, ids, []))
        return encoded

    def _joined(self, passages: list[EncodedDocuments], numbers: Sequence[int]) -> EncodedDocuments:
        named = zip(numbers, passages, strict=True)
        segments = [replace(each, document=number) for number, own in named for each in own.segments]
        words = [each.context_word_ids for each in passages if each.context_word_ids is not None]
        width = max((own.shape[1] for own in words), default=0)
        words = [pad(own, (0, width - own.shape[1]), value=-1) for own in words]
        embeds = torch.cat([each.context_embeds for each in passages])
        ids = torch.tensor([each.document for each in segments], device=embeds.device)
        return EncodedDocuments(segments, embeds, torch.cat(words) if words else None, ids, [])


class Engine:
    """
    Answers requests.

    Args:
        ask ([`ArcAlignerPipeline`]): Model and processor.
        retriever ([`Retriever`], *optional*): For requests without documents. Precomputed passages of its corpus are
            not computed again.
        top_k (`int`), tokens_per_slot (`int` or `"segment"`), min_confidence (`float`), max_passages (`int`): Defaults
            of requests. By default, as many passages are used as the question needs (`Answerer.select`).
        max_batch (`int`): Maximum number of requests that are prepared together. Four times as many are written.
        batch_seconds (`float`): Time that the first request of a batch waits for others.
        prefix_bytes (`int`): Memory for slot prefixes that are cached between requests.
        answer_bytes (`int`): Memory for the keys and values of answers that are written together, for a while twice as
            much when rows join. Further requests wait; one that needs more by itself is answered alone.
        folder (`str` or `Path`, *optional*): Folder to write slot prefixes to, and to read them from. Default: those of
            the corpus are read, if there is one.
        limits ([`Limits`]): What a request may ask for.

    Raises:
        `ValueError`: settings that are invalid; a `generation_config` with a `cache_implementation`, an
            `encoder_repetition_penalty` or an `encoder_no_repeat_ngram_size`.
    """

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
                f"`generation_config.cache_implementation` is {kind!r}; expected none, because requests to a server "
                "share a cache that grows and shrinks with them. Remove the field from generation_config.json."
            )
        for name in ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"):
            if (value := getattr(ask.model.generation_config, name)) not in (None, 0, 1.0):
                raise ValueError(
                    f"`generation_config.{name}` is {value!r}; expected none, because a server computes the "
                    "beginning of an answer again, with its prompt, when another answer joins the batch. Remove the "
                    "field from generation_config.json."
                )
        self.model, self.processor, self.retriever = ask.model, ask.processor, retriever
        kept = None if retriever is None else retriever.corpus.kept_folder
        options = {"max_bytes": prefix_bytes, "folder": folder or kept, "read_only": folder is None}
        self.answerer = Answerer(ask.model, ask.processor, ask.model.passage_cache(ask.processor, **options))
        self._check(tokens_per_slot, min_confidence, max_passages)
        self.top_k, self.tokens_per_slot, self.min_confidence = top_k, tokens_per_slot, min_confidence
        self.max_passages, self._least_scored = max_passages, self.answerer.max_passages
        self.max_batch, self.batch_seconds, self.limits = max_batch, batch_seconds, limits or Limits()
        self.store = self.answerer.cache
        self._encode = PassageEncoder(self.processor)
        # With LongRoPE, rows are no longer prepared together, as a long one would change the others.
        self._most_prepared = max_batch if frequencies_change_at(ask.model.config.text_config) is None else 1
        self.answer_bytes = answer_bytes
        self._bytes_per_position = ask.model.dtype.itemsize * math.prod(entry_shape(ask.model.config.text_config, 1))
        self._turns = Turns()
        self._waiting: list[Request] = []
        self._joining: list[LiveBatch] = []
        self._num_prepared = self._num_written = 0  # requests
        self._held: dict[Request, int] = {}  # bytes of the keys and values of live answers
        self._change = threading.Condition()  # of these
        self._closed = self._all_prepared = False
        self._door = threading.Lock()  # for the thread that takes the next requests
        self._threads = [
            threading.Thread(target=self._work, name=f"arcaligner-prepare-{number}", daemon=True)
            for number in range(PREPARED_AT_ONCE)
        ]
        self._writer = threading.Thread(target=self._write, name="arcaligner-write", daemon=True)
        for thread in (*self._threads, self._writer):
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether one of its threads is alive."""
        return any(thread.is_alive() for thread in (*self._threads, self._writer))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> "Future[Answer]":
        """Queues a request.

        Raises:
            `BusyError`: too many requests are waiting, or the engine is closing.
            `ValueError`: more documents or tokens than the limits allow.
        """
        documents = request.documents or ()
        if len(documents) > self.limits.max_documents:
            raise ValueError(f"Got {len(documents)} documents; expected at most {self.limits.max_documents}.")
        if not 1 <= request.max_new_tokens <= self.limits.max_new_tokens:
            raise ValueError(f"`max_tokens` is {request.max_new_tokens}; expected 1 to {self.limits.max_new_tokens}.")
        self._check(request.tokens_per_slot, request.min_confidence, request.max_passages, request.copy_bonus)
        for name in ("top_k", "tokens_per_slot", "min_confidence", "max_passages"):
            if getattr(request, name) is None:
                setattr(request, name, getattr(self, name))
        request.seconds, request.until = self.limits.seconds, request.arrived + self.limits.seconds
        request.on_cancel = self._wake
        with self._change:
            if self._closed:
                raise BusyError("The server is closing.")
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
        request = Request([{"role": "user", "content": "?"}], documents=[".", ","], max_new_tokens=2)
        self.submit(request).result()

    def close(self) -> None:
        """Accept no more requests, answer the waiting ones, and return."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        with self._change:
            self._all_prepared = True
            self._change.notify_all()
        self._writer.join()

    # The threads that prepare

    def _work(self) -> None:
        while True:
            with self._door:
                if not self._wait_for_requests():
                    return
                turn = self._turns.take()
                batch = self._take()
            try:
                self._prepare(batch, turn)
            except Exception as error:  # a fault of ours ends no thread, and no request waits for ever
                for request in batch:
                    if not request.future.done() and request not in self._held:
                        request.future.set_exception(error)
            finally:
                turn.give()
                with self._change:
                    self._num_prepared -= len(batch)
                    self._change.notify_all()

    def _wait_for_requests(self) -> bool:
        """Wait until requests should be taken. Do not wait if the engine is closed and has none."""

        def is_full() -> bool:
            return self._closed or len(self._waiting) >= self._most_prepared

        def is_idle() -> bool:
            return not self._num_prepared + self._num_written

        def is_due() -> bool:
            has_room = self._num_prepared + self._num_written < self.max_batch * BATCHES_AT_ONCE
            return has_room if self._waiting else self._closed

        with self._change:
            self._change.wait_for(is_due)
            # Wait for others to share the batch: it takes little longer than a single request.
            self._change.wait_for(lambda: is_full() or is_idle(), GATHER_SECONDS)
            self._change.wait_for(is_full, self.batch_seconds)
            return bool(self._waiting)

    def _take(self) -> list[Request]:
        """The next requests, in order of arrival."""
        with self._change:
            room = self.max_batch * BATCHES_AT_ONCE - self._num_prepared - self._num_written
            most = max(1, min(self._most_prepared, room))
            batch, self._waiting = self._waiting[:most], self._waiting[most:]
            self._num_prepared += len(batch)
        return batch

    def _prepare(self, batch: list[Request], turn: ThreadTurn) -> None:
        """Prepare a batch of requests up to their first tokens, and hand the answers over to be continued."""
        wanted = [request for request in batch if request.future.set_running_or_notify_cancel()]
        read, choose = (functools.partial(each, turn) for each in (self._read, self._choose))
        found = [request for one in wanted for (request,), _ in each_fails_alone([one], read)]
        chosen = [request for part, _ in each_fails_alone(found, choose) for request in part]
        for has_slots in (False, True):
            if group := [request for request in chosen if (request.passages is not None) == has_slots]:
                self._answer(turn, group)

    def _read(self, turn: ThreadTurn, group: list[Request]) -> None:
        """Give a request its passages as slots: its own, or those of the corpus, if there is one and the request uses
        it."""
        (request,), own_turn = group, GroupTurn(turn, group)
        rate = request.tokens_per_slot
        if request.documents is not None:
            self._read_documents(request, own_turn)
            return
        if self.retriever is None or request.top_k == 0:
            return
        questions = [each["content"] for each in request.messages if each["role"] == "user"]
        passages = self.retriever(questions[-1] if questions else "", request.top_k)
        if rate not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: each[name] for name in ("title", "text")} for each in passages.documents]
            self._encode.check_room(texts, rate, self._room(request, len(texts)))
            passages.encoded = self._encode(texts, rate, turn=own_turn)
            passages.seconds["slots"] += time.perf_counter() - began
        num_slots, most = len(passages.encoded.context_embeds), self._room(request, len(passages.documents))
        if num_slots > most:
            raise ValueError(
                f"The passages have {num_slots} slots; expected at most {most}. Pass a lower `num_passages`."
            )
        request.passages = passages

    def _read_documents(self, request: Request, turn: GroupTurn) -> None:
        """Cuts a request's own documents into passages and, if all of these are used, encodes them."""
        began, rate, passages = time.perf_counter(), request.tokens_per_slot, []
        documents = [each if isinstance(each, dict) else {"title": "", "text": each} for each in request.documents]
        self._check_size(documents, rate)
        for number, document in enumerate(documents):
            pieces, _ = self.answerer.cut([document])
            passages += [each | {"number": number} for each in pieces]
            turn.pass_on()
        texts = [_without_number(each) for each in passages]
        if not passages:
            encoded = self.processor.encode_documents([], tokens_per_slot=rate)  # nothing was found: an empty slot
        else:
            self._encode.check_room(texts, rate, self._room(request, len(texts)))
            turn.pass_on()
            encoded = None if self._selects(request, len(texts)) else self._encode(texts, rate, turn=turn)
        seconds = {"retrieval": 0.0, "slots": time.perf_counter() - began}
        request.passages = SlotPassages(passages, encoded, seconds)

    def _check_size(self, documents: list[dict], rate: int | str | None) -> None:
        """Refuse documents that have too many slots however they are cut. Cutting them first could take seconds."""
        rate = self.processor.tokens_per_slot if rate is None else rate
        if rate == "segment":
            return
        # A word is at least a token; twice as many as there is room for are surely too many.
        num_words = sum(len(given_text(each, number).split()) for number, each in enumerate(documents))
        num_slots = num_words // (2 * rate)
        if num_slots > self.limits.max_slots_asked:
            raise ValueError(
                f"The passages have more than {num_slots} slots; expected at most {self.limits.max_slots_asked}. Pass "
                "fewer or shorter documents, or put more text into a slot (`tokens_per_slot`)."
            )

    def _room(self, request: Request, num_passages: int) -> int:
        """Slot limit of a request with this many passages: higher if they are scored one by one than if all are
        used."""
        return self.limits.max_slots_asked if self._selects(request, num_passages) else self.limits.max_slots

    def _choose(self, turn: ThreadTurn, group: list[Request]) -> None:
        """Reduce the passages of each request to those that its question needs, or to its maximum: score each passage
        separately, and keep the top-ranked ones."""
        group = [each for each in group if each.passages and self._selects(each, len(each.passages.documents))]
        if not group:
            return
        own_turn = GroupTurn(turn, group)
        began, encoding = time.perf_counter(), 0.0
        chats, documents = [self._chat(request) for request in group], [request.passages.documents for request in group]
        similar = [self._similarities(request, own_turn) for request in group]

        def slots_of(only: list[list[int]]) -> list[GivenSlots | None]:
            nonlocal encoding
            began = time.perf_counter()
            slots = [self._slots_of(request, numbers, own_turn) for request, numbers in zip(group, only, strict=True)]
            encoding += time.perf_counter() - began
            return slots

        most = [request.max_passages for request in group]
        selected = self.answerer.select(chats, documents, most, similar, slots_of, turn=own_turn)
        seconds = time.perf_counter() - began - encoding
        for request, (numbers, own, asked) in zip(group, selected, strict=True):
            request.asked, request.kept = asked, sum(own[number].is_cached for number in numbers)
            if request.passages.encoded is None:
                request.passages.encoded = self._encoded(request, numbers, own_turn)
                request.passages.seconds["slots"] += encoding
            request.passages = request.passages.only(numbers)
            request.passages.seconds["choosing"] = seconds
            for number, document in enumerate(request.passages.documents):  # `None` if it was not scored
                sure = own[number].answerability if number in own else None
                document |= dict.fromkeys(("answerability", "confidence"), sure)  # the second is its name in 0.2

    def _selects(self, request: Request, num_passages: int) -> bool:
        """Whether so many passages are scored, because a request may not use all of them."""
        most = request.max_passages or self._least_scored
        return most is not None and num_passages > most

    def _similarities(self, request: Request, turn: GroupTurn) -> list[float]:
        """The cosine of the question and each of a request's passages."""
        documents = request.passages.documents
        if request.documents is None:  # the search has them
            return [each["similarity"] for each in documents]
        encoder, chat, found = self.processor.encoder, self._chat(request), []
        for some in in_pieces(len(documents), self.processor.passage_tokens, turn):
            found += similarities_of(encoder, chat, documents[some])
        return found

    def _slots_of(self, request: Request, numbers: list[int], turn: GroupTurn) -> GivenSlots | None:
        """The slots of these passages of a request, and maybe of others. Passages that are not known yet are
        encoded."""
        if not numbers:
            return None
        encoded = request.passages.encoded or self._encoded(request, numbers, turn)
        return GivenSlots(encoded.context_embeds, encoded.context_word_ids, encoded.context_passage_ids)

    def _encoded(self, request: Request, numbers: list[int], turn: GroupTurn) -> EncodedDocuments:
        texts = [_without_number(request.passages.documents[number]) for number in numbers]
        return self._encode(texts, request.tokens_per_slot, numbers, turn)

    def _answer(self, turn: ThreadTurn, group: list[Request]) -> None:
        began = time.monotonic()
        for part, inputs in each_fails_alone(group, functools.partial(self._inputs, turn)):
            try:
                self._generate(part, inputs, began)
            except Exception as error:
                for request in part:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _inputs(self, turn: ThreadTurn, group: list[Request]) -> dict[str, Any]:
        """The inputs of `generate` for a batch, with everything except for the end of the prompts in the cache."""
        own_turn = GroupTurn(turn, group)
        if group[0].passages is not None:
            asked = self._questions(group, own_turn)
            self._wait_for_room(group, asked.num_positions, own_turn)
            inputs = self.store.prepare_asked(asked)
            for request, kept, parts in zip(group, inputs.num_cached, inputs.num_passages, strict=True):
                if request.kept is None:  # else known from before they were scored
                    request.kept = len(request.passages.documents) * kept // parts
        else:
            # Text of a client must never end a turn.
            slots = {} if self.processor.chat_template is None else {"sanitize_control_tokens": True}
            inputs = dict(chat_inputs(self.processor, [self._chat(each) for each in group], **slots))
            inputs = {name: each.to(self.model.device) for name, each in inputs.items()}
            check_length(inputs["input_ids"].shape[1], "The prompt", self.model.config.text_config)
            self._wait_for_room(group, inputs["attention_mask"].sum(dim=1).tolist(), own_turn)
            inputs["past_key_values"] = DynamicCache(config=self.model.config.text_config)
        return prefill_beginning(self.model, inputs, own_turn)

    def _questions(self, group: list[Request], turn: Turn) -> AskedQuestions:
        """The questions of requests, each with the slots of the passages that it uses."""
        asked = []
        for request in group:
            _, embeds, words, ids, _ = request.passages.encoded
            if (num_slots := len(embeds)) > self.limits.max_slots:
                raise ValueError(
                    f"The passages have {num_slots} slots; expected at most {self.limits.max_slots}. Pass fewer "
                    "passages, a lower `max_passages`, or put more text into a slot (`tokens_per_slot`)."
                )
            if (known := request.asked) is None:  # else its passages were scored
                words = None if words is None else [words]
                known = self.store.ask([self._chat(request)], None, [embeds], words, [ids])
            asked += known.questions
        return known._replace(questions=asked, turn=turn)

    def _chat(self, request: Request) -> list[dict[str, str]] | str:
        """The question or chat, in the form of the processor."""
        if self.processor.chat_template is not None:
            return request.messages
        if len(request.messages) > 1:
            raise ValueError(
                f"Got {len(request.messages)} messages; expected exactly one user message, because this base model has "
                "no chat template."
            )
        return request.messages[0]["content"]

    def _generate(self, group: list[Request], inputs: dict[str, Any], began: float) -> None:
        """Generate the first token of each request, and hand the answers over to be continued."""
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
        batch = LiveBatch(self.answerer, rows, ids, mask, positions, cache)
        batch.begin()
        left = [row.request.future for row in rows if not row.is_done]
        if not left:
            return
        with self._change:
            self._joining.append(batch)
            self._num_written += len(left)
            self._change.notify_all()
        for future in left:
            future.add_done_callback(self._count_written)

    def _count_written(self, future: Future) -> None:
        with self._change:
            self._num_written -= 1
            self._change.notify_all()

    def _wait_for_room(self, group: list[Request], num_positions: list[int], turn: GroupTurn) -> None:
        """Wait until there is memory for the keys and values of a batch in addition to those of live answers. A batch
        does not wait if there are no others, nor a second time if it begins again because one of its requests ended."""
        longest = max(num_positions)  # prompts are padded to it
        bytes_of = {each: (longest + each.max_new_tokens) * self._bytes_per_position for each in group}

        def hold() -> bool:
            new = {each: size for each, size in bytes_of.items() if each not in self._held}
            used = sum(self._held.values())
            if new and used and used + sum(new.values()) > self.answer_bytes:
                return False
            self._held |= new
            for request in new:
                request.future.add_done_callback(lambda _, request=request: self._free(request))
            return True

        with self._change:
            is_held = hold()
        while not is_held:
            seconds = min(min(each.until for each in group) - time.monotonic(), threading.TIMEOUT_MAX)
            with turn.away(), self._change:
                is_held = self._change.wait_for(lambda: hold() or any(each.is_cancelled for each in group), seconds)
            turn.check()

    def _free(self, request: Request) -> None:
        with self._change:
            del self._held[request]
            self._change.notify_all()

    # The thread that writes

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._joining or self._all_prepared)
                if not self._joining:
                    return
            turn = self._turns.take()
            try:
                self._write_all(turn)
            finally:
                turn.give()

    def _write_all(self, turn: ThreadTurn) -> None:
        """Generate the rest of all answers that have begun, and of those that join meanwhile."""
        live: list[LiveBatch] = []
        while True:
            with self._change:
                joining, self._joining = self._joining, []
                batches = [batch for batch in (*live, *joining) if batch.num_left]
            if not batches:
                return
            if joining or any(each.is_sparse for each in batches):
                try:
                    batches = LiveBatch.packed(batches)
                except (RuntimeError, MemoryError) as error:  # no memory for a copy: continue without one
                    logger.warning(
                        "no memory to generate answers in one batch (%s); they are generated in separate batches", error
                    )
                joining.clear()  # their memory
            live = batches
            for batch in live:
                try:
                    self._write_some(batch, turn, alone=len(live) == 1)
                except Exception as error:
                    batch.fail(error)

    def _write_some(self, batch: LiveBatch, turn: ThreadTurn, alone: bool) -> None:
        end = time.monotonic() + TURN_SECONDS

        def pause() -> bool:
            turn.pass_on()
            return bool(self._joining) or not alone and time.monotonic() > end

        batch.write(pause)


def each_fails_alone(group: list[Request], run: Callable[[list[Request]], Any]) -> Iterator[tuple[list[Request], Any]]:
    """Run a group of requests and, if that fails, its halves, so that an invalid request fails alone. Yield the parts
    that could be run, each with its result. Requests that have ended meanwhile are left out."""
    try:
        result = run(group)
    except EndedError:
        if waiting := [request for request in group if not request.future.done()]:
            yield from each_fails_alone(waiting, run)
    except Exception as error:
        if len(group) == 1:
            group[0].future.set_exception(error)
        else:
            for part in (group[: len(group) // 2], group[len(group) // 2 :]):
                yield from each_fails_alone(part, run)
    else:
        yield group, result


def _without_number(document: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in document.items() if name != "number"}
