"""From requests to answers: concurrent requests share a batch, and each gets its answer as it is generated.

    submit -> passages as slots (given, or of a corpus) -> selected passages -> slot prefixes, cached or computed
    -> first tokens -> rows of one batch, which new ones join -> pieces of the answer

Any number of threads may submit. A few prepare requests, and one writes the answers; these compute in turns, which they
pass on between two calls of model or encoder. So a short question does not wait until a long answer is written, or many
passages are encoded.
"""

import json
import logging
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

from ...answering_arcaligner import Answerer, chat_inputs, select_top, similarities_of
from ...configuration_arcaligner import check_length, longest_prompt
from ...encoder_arcaligner import EncodedDocuments, GivenSlots, single_passages
from ...kv_cache_arcaligner import prefill_beginning
from ...pipeline_arcaligner import ArcAlignerPipeline
from ...segmentation_arcaligner import given_text
from ..corpus.retrieve import Retriever, SlotPassages
from .live_rows import LiveBatch, LiveRow
from .request import Answer, BusyError, Limits, Request, RequestCancelledError
from .turns import Turns

logger = logging.getLogger(__name__)

# Number of passages of requests whose slots are cached; slot prefixes have a budget of their own, in bytes.
KEPT_PASSAGES = 256

# Batches that are prepared in turns, and batches whose rows there may be at a time: paused ones need their memory.
PREPARED_AT_ONCE, BATCHES_AT_ONCE = 3, 4

# While others are answered, requests wait so many seconds for more, to be prepared together.
GATHER_SECONDS = 0.3

# How long answers of one length are written before those of another.
TURN_SECONDS = 0.5


class _EndedError(Exception):
    """Some requests of a group have ended during a computation for all of them; their futures say how."""


class PassageEncoder:
    """The slots of passages, each encoded once for all requests with it, so that its slots are the same in all of them
    and its keys and values are found in the cache."""

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
        self, documents: list[dict], tokens_per_slot: int | str | None, numbers: Sequence[int] | None = None
    ) -> EncodedDocuments:
        """The slots of passages, whose `numbers` are by default those of their places."""
        if not any(each["text"].strip() for each in documents):  # nothing but white space is a slot, too
            return self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot)
        keys = self._keys(documents, tokens_per_slot)
        found = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: each for key, each in zip(keys, documents, strict=True) if key not in found}
        found |= zip(new, self._encode(list(new.values()), tokens_per_slot), strict=True)
        for key in keys:
            self._kept[key] = found[key]
            self._kept.move_to_end(key)
        while len(self._kept) > self.max_passages:
            self._kept.popitem(last=False)
        return self._joined([found[key] for key in keys], range(len(keys)) if numbers is None else numbers)

    def _encode(self, documents: list[dict], tokens_per_slot: int | str | None) -> list[EncodedDocuments]:
        """Encode each passage by itself, without a slot for white space; all in one call, which is fastest."""
        if not documents:
            return []
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
            of requests. By default, the top-ranked of several passages is used (`Answerer.max_passages`).
        max_batch (`int`): Maximum number of requests that are prepared together. Four times as many are written.
        batch_seconds (`float`): Time that the first request of a batch waits for others.
        prefix_bytes (`int`): Memory for slot prefixes that are cached between requests.
        folder (`str` or `Path`, *optional*): Folder to write slot prefixes to, and to read them from. Default: those of
            the corpus are read, if there is one.
        limits ([`Limits`]): What a request may ask for.
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
        folder: str | Path | None = None,
        limits: Limits | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"`max_batch` is {max_batch}; expected at least 1 request.")
        self.model, self.processor, self.retriever = ask.model, ask.processor, retriever
        kept = None if retriever is None else retriever.corpus.kept_folder
        options = {"max_bytes": prefix_bytes, "folder": folder or kept, "read_only": folder is None}
        self.answerer = Answerer(ask.model, ask.processor, ask.model.passage_cache(ask.processor, **options))
        self._check(tokens_per_slot, min_confidence, max_passages)
        self.top_k, self.tokens_per_slot, self.min_confidence = top_k, tokens_per_slot, min_confidence
        self.max_passages = max_passages or self.answerer.max_passages
        self.max_batch, self.batch_seconds, self.limits = max_batch, batch_seconds, limits or Limits()
        self.store = self.answerer.cache
        self._encode = PassageEncoder(self.processor)
        self._turns = Turns()
        self.store.wait = self._turns.wait
        self._preparing = threading.local()  # `group`: what this thread computes for, before its first tokens
        self._hooks: dict[Any, Any] = {}
        self._waiting: list[Request] = []
        self._joining: list[LiveBatch] = []
        self._num_prepared = self._num_written = 0  # requests
        self._positions: dict[Request, int] = {}  # of the keys and values of live answers
        self._freed = threading.Event()  # set when some of these are no longer needed
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
        with self._change:
            if self._closed:
                raise BusyError("The server is closing.")
            if self.num_waiting >= self.limits.waiting:
                raise BusyError("Too many requests are waiting. Try again later.")
            self._waiting.append(request)
            self._change.notify_all()
        return request.future

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
        for hook in self._hooks.values():
            hook.remove()

    # The threads that prepare

    def _work(self) -> None:
        while True:
            with self._door:
                if not self._wait_for_requests():
                    return
                self._turns.take()
                batch = self._take()
            try:
                self._prepare(batch)
            except Exception as error:  # a fault of ours ends no thread, and no request waits for ever
                for request in batch:
                    if not request.future.done() and request not in self._positions:
                        request.future.set_exception(error)
            finally:
                self._turns.give()
                with self._change:
                    self._num_prepared -= len(batch)
                    self._change.notify_all()

    def _wait_for_requests(self) -> bool:
        """Waits until some should be taken; not if the engine is closed, and none are left."""

        def is_full() -> bool:
            return self._closed or len(self._waiting) >= self.max_batch

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
            most = max(1, min(self.max_batch, room))
            batch, self._waiting = self._waiting[:most], self._waiting[most:]
            self._num_prepared += len(batch)
        return batch

    def _prepare(self, batch: list[Request]) -> None:
        """Has a batch of requests written, after their first tokens."""
        wanted = [request for request in batch if request.future.set_running_or_notify_cancel()]
        read = [request for one in wanted for (request,), _ in each_fails_alone([one], self._read)]
        chosen = [request for part, _ in each_fails_alone(read, self._choose) for request in part]
        for has_slots in (False, True):
            if group := [request for request in chosen if (request.passages is not None) == has_slots]:
                self._answer(group)

    def reason_to_end(self, request: Request) -> Exception | None:
        """Why a request has no client any more, or `None`."""
        if request.cancelled:
            return RequestCancelledError("The request was cancelled.")
        if time.monotonic() - request.arrived > self.limits.seconds:
            return TimeoutError(f"The answer was not done within {self.limits.seconds:g} seconds.")
        return None

    def _begin(self, group: list[Request]) -> None:
        """Start to compute for `group`. Before each call of model and encoder, others may compute, and requests without
        a client end, so that long work for them does not delay others."""
        self._preparing.group = group
        encoder = self.processor.encoder
        for module in (self.model.model, encoder.model[0], encoder.untrained.model[0]):
            if module not in self._hooks:
                self._hooks[module] = module.register_forward_pre_hook(_pre_hook(self))
        self._end_current()

    def _between_calls(self) -> None:
        """Of model or encoder, in a thread of the engine."""
        if self._turns.is_mine:  # others may share the model
            self._turns.pass_on()
            self._end_current()

    def _end_current(self) -> None:
        group = getattr(self._preparing, "group", [])
        ended = [request for request in group if self.reason_to_end(request) is not None]
        if ended:
            self._preparing.group = []
            for request in ended:
                request.future.set_exception(self.reason_to_end(request))
            raise _EndedError

    def _read(self, group: list[Request]) -> None:
        """Give a request its passages as slots: its own, or those of the corpus, if there is one and the request uses
        it."""
        (request,) = group
        self._begin(group)
        rate = request.tokens_per_slot
        if request.documents is not None:
            self._read_documents(request)
            return
        if self.retriever is None or request.top_k == 0:
            return
        questions = [each["content"] for each in request.messages if each["role"] == "user"]
        passages = self.retriever(questions[-1] if questions else "", request.top_k)
        if rate not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: each[name] for name in ("title", "text")} for each in passages.documents]
            self._encode.check_room(texts, rate, self._room(request, len(texts)))
            passages.encoded = self._encode(texts, rate)
            passages.seconds["slots"] += time.perf_counter() - began
        num_slots, most = len(passages.encoded.context_embeds), self._room(request, len(passages.documents))
        if num_slots > most:
            raise ValueError(
                f"The passages have {num_slots} slots; expected at most {most}. Pass a lower `num_passages`."
            )
        request.passages = passages

    def _read_documents(self, request: Request) -> None:
        """Cuts a request's own documents into passages and, if all of these are used, encodes them."""
        began, rate, passages = time.perf_counter(), request.tokens_per_slot, []
        documents = [each if isinstance(each, dict) else {"title": "", "text": each} for each in request.documents]
        self._check_size(documents, rate)
        for number, document in enumerate(documents):
            pieces, _ = self.answerer.cut([document])
            passages += [each | {"number": number} for each in pieces]
            self._turns.pass_on()
        texts = [_without_number(each) for each in passages]
        if not passages:
            encoded = self.processor.encode_documents([], tokens_per_slot=rate)  # nothing was found: an empty slot
        else:
            self._encode.check_room(texts, rate, self._room(request, len(texts)))
            self._turns.pass_on()
            encoded = None if request.wants_fewer(len(texts)) else self._encode(texts, rate)
        seconds = {"retrieval": 0.0, "slots": time.perf_counter() - began}
        request.passages = SlotPassages(passages, encoded, seconds)

    def _check_size(self, documents: list[dict], rate: int | str | None) -> None:
        """Refuses documents that have too many slots however they are cut, before that takes seconds."""
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
        return self.limits.max_slots_asked if request.wants_fewer(num_passages) else self.limits.max_slots

    def _choose(self, group: list[Request]) -> None:
        """Reduce the passages of each request to its maximum: score each passage separately, and keep the top-ranked
        ones."""
        group = [each for each in group if each.passages and each.wants_fewer(len(each.passages.documents))]
        if not group:
            return
        self._begin(group)
        began, encoding = time.perf_counter(), 0.0
        chats, documents = [self._chat(request) for request in group], [request.passages.documents for request in group]
        similar = []
        for request, chat, own in zip(group, chats, documents, strict=True):
            if request.documents is None:
                similar.append([each["similarity"] for each in own])
            else:
                similar.append(similarities_of(self.processor.encoder, chat, own))

        def slots_of(only: list[list[int]]) -> dict[str, list]:
            nonlocal encoding
            began = time.perf_counter()
            # Of one whose passages are all scored any that is known, as none of it is read.
            known = [
                numbers or [max(range(len(own)), key=own.__getitem__)]
                for numbers, own in zip(only, similar, strict=True)
            ]
            rows = [self._inputs_of(request, numbers) for request, numbers in zip(group, known, strict=True)]
            encoding += time.perf_counter() - began
            return {name: [row[name] for row in rows] for name in rows[0]}

        most = [request.max_passages for request in group]
        scores = self.answerer.score_candidates(chats, documents, similarities=similar, most=most, slots_of=slots_of)
        seconds = time.perf_counter() - began - encoding
        for request, own in zip(group, scores, strict=True):
            numbers = select_top(own, request.max_passages)
            request.kept = sum(own[number].is_cached for number in numbers)
            if request.passages.encoded is None:
                request.passages.encoded = self._encoded(request, numbers)
                request.passages.seconds["slots"] += encoding
            request.passages = request.passages.only(numbers)
            request.passages.seconds["choosing"] = seconds
            for number, document in enumerate(request.passages.documents):  # `None` if it was not scored
                sure = own[number].answerability if number in own else None
                document |= dict.fromkeys(("answerability", "confidence"), sure)  # the second is its name in 0.2

    def _inputs_of(self, request: Request, numbers: list[int]) -> dict[str, Any]:
        """The slots of some of a request's passages, which are encoded now unless they are known."""
        if request.passages.encoded is not None:
            return request.passages.inputs
        encoded = self._encoded(request, numbers)
        return SlotPassages([], encoded, {}).inputs

    def _encoded(self, request: Request, numbers: list[int]) -> EncodedDocuments:
        texts = [_without_number(request.passages.documents[number]) for number in numbers]
        return self._encode(texts, request.tokens_per_slot, numbers)

    def _answer(self, group: list[Request]) -> None:
        began = time.monotonic()
        for part, inputs in each_fails_alone(group, self._inputs):
            try:
                self._generate(part, inputs, began)
            except _EndedError:
                if waiting := [request for request in part if not request.future.done()]:
                    self._answer(waiting)
            except Exception as error:
                for request in part:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _inputs(self, group: list[Request]) -> dict[str, Any]:
        """The inputs of `generate` for a batch."""
        self._begin(group)
        chats = [self._chat(request) for request in group]
        if group[0].passages is not None:
            rows = self._slots_of(group)
            inputs = self.store.prepare(chats, **{name: [row[name] for row in rows] for name in rows[0]})
            for request, kept, parts in zip(group, inputs.num_cached, inputs.num_passages, strict=True):
                if request.kept is None:  # else known from before they were scored
                    request.kept = len(request.passages.documents) * kept // parts
            return inputs
        # Text of a client must never end a turn.
        slots = {} if self.processor.chat_template is None else {"sanitize_control_tokens": True}
        inputs = chat_inputs(self.processor, chats, **slots)
        check_length(inputs["input_ids"].shape[1], "The prompt", self.model.config.text_config)
        return {**inputs}

    def _slots_of(self, group: list[Request]) -> list[dict[str, Any]]:
        """The slots that each request uses."""
        rows = [request.passages.inputs for request in group]
        for row in rows:
            if (num_slots := len(row["context_embeds"])) > self.limits.max_slots:
                raise ValueError(
                    f"The passages have {num_slots} slots; expected at most {self.limits.max_slots}. Pass fewer "
                    "passages, a lower `max_passages`, or put more text into a slot (`tokens_per_slot`)."
                )
        return rows

    def _chat(self, request: Request) -> list[dict[str, str]] | str:
        """The question or chat, in the form of the processor."""
        if self.processor.chat_template is not None:
            return request.messages
        if len(request.messages) > 1:
            raise ValueError("This base model has no chat template; expected exactly one user message.")
        return request.messages[0]["content"]

    @torch.inference_mode()
    def _generate(self, group: list[Request], inputs: dict[str, Any], began: float) -> None:
        """Writes the first token of each request, and lets the rest be written."""
        self._begin(group)
        inputs = {name: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        inputs.setdefault("past_key_values", DynamicCache(config=self.model.config.text_config))
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        self._wait_for_room(group, prompt_tokens)
        inputs = prefill_beginning(self.model, inputs)
        ids, mask, cache = (inputs[name] for name in ("input_ids", "attention_mask", "past_key_values"))
        rows = [
            LiveRow(
                self.answerer,
                request,
                self._chat(request),
                prompt_tokens=length,
                batch_size=len(group),
                began=began,
                reason_to_end=self.reason_to_end,
            )
            for request, length in zip(group, prompt_tokens, strict=True)
        ]
        positions = self.model.prompt_positions(ids, mask, inputs.get("context_passage_ids"))
        batch = LiveBatch(self.answerer, rows, ids, mask, positions, cache)
        batch.begin(on_first=self._end_alone)
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

    def _wait_for_room(self, group: list[Request], prompt_tokens: list[int]) -> None:
        """Wait until there is memory for the keys and values of a batch in addition to those of live answers: for as
        many positions as `max_batch` of the longest prompts have. A batch does not wait if there are no others, nor a
        second time if it begins again because one of its requests ended."""
        longest = longest_prompt(self.model.config.text_config)
        lengths = zip(group, prompt_tokens, strict=True)
        sizes = {each: length + each.max_new_tokens for each, length in lengths if each not in self._positions}
        while True:
            with self._change:
                used = sum(self._positions.values())
                if not used or longest is None or used + sum(sizes.values()) <= self.max_batch * longest:
                    self._positions |= sizes
                    break
                if self._freed.is_set():  # else others wait for it, too
                    self._freed = threading.Event()
                freed = self._freed
            self._turns.wait(freed, TURN_SECONDS)
            self._end_current()
        for request in sizes:
            request.future.add_done_callback(lambda _, request=request: self._free(request))

    def _free(self, request: Request) -> None:
        with self._change:
            del self._positions[request]
            self._freed.set()

    def _end_alone(self) -> None:
        """From now on each request of this thread ends by itself."""
        self._preparing.group = []

    # The thread that writes

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._joining or self._all_prepared)
                if not self._joining:
                    return
            self._turns.take()
            try:
                self._write_all()
            finally:
                self._turns.give()

    def _write_all(self) -> None:
        """Writes the rest of all answers that are begun, those that join meanwhile, too."""
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
                    logger.warning("answers are written in separate batches: %s", error)
                joining.clear()  # their memory
            live = batches
            for batch in live:
                try:
                    self._write_some(batch, alone=len(live) == 1)
                except Exception as error:
                    batch.fail(error)

    def _write_some(self, batch: LiveBatch, alone: bool) -> None:
        end = time.monotonic() + TURN_SECONDS
        batch.write(lambda: bool(self._joining) or not alone and time.monotonic() > end)


def each_fails_alone(group: list[Request], run: Callable[[list[Request]], Any]) -> Iterator[tuple[list[Request], Any]]:
    """Run a group and, if that fails, its halves, so that an invalid request fails alone; requests that have ended
    meanwhile are left out. Yields the parts that could be run, each with its result."""
    try:
        result = run(group)
    except _EndedError:
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


def _pre_hook(engine: Engine) -> Callable:
    """Before a call of the model or an encoder. A function, which copies of it share."""

    def hook(module, args) -> None:
        engine._between_calls()

    return hook
