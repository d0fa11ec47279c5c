"""Requests to answers: those that arrive together are one batch, and each gets its answer as it is written.

One thread reads passages and runs the model; any number of threads may submit.

    submit -> passages as slots (given, or of a corpus) -> slot prefixes, kept or read -> `generate` -> on_text
"""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..configuration_arcaligner import check_copy_bonus, check_length
from ..corpus.kept import kept_folder
from ..corpus.retrieve import Retriever, SlotPassages
from ..encoder_arcaligner import EncodedDocuments, similarities_of
from ..pipeline_arcaligner import (
    AnswerConfidence,
    ArcAlignerPipeline,
    CopyBonus,
    check_max_passages,
    likeliest,
    passages_to_read,
    rank_passages,
)
from ..processing_arcaligner import check_min_confidence
from .answers import Answer, AnswerStream, Limits, Request, RowSampler

# Given passages whose slots are kept; the prefixes have their own budget, in bytes.
KEPT_DOCUMENTS = 64


class BusyError(RuntimeError):
    """Too many requests wait."""


class Engine:
    """
    Answers requests.

    Args:
        ask ([`ArcAlignerPipeline`]): Model and processor.
        retriever ([`Retriever`], *optional*):
            For requests without documents. Passages of its corpus that were read ahead are not read again.
        top_k (`int`), tokens_per_slot (`int` or `"segment"`), min_confidence (`float`), max_passages (`int`):
            Of requests that name none. Of several passages, the likeliest is read by default (`passages_to_read`).
        max_batch (`int`): The most requests computed at a time.
        batch_seconds (`float`): How long the first request of a batch waits for others.
        prefix_bytes (`int`): Memory for slot prefixes kept between requests.
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
        limits: Limits | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"`max_batch` is {max_batch}; expected at least 1 request.")
        self.model, self.processor, self.retriever = ask.model, ask.processor, retriever
        ask.processor.slot_encoder.check_settings(tokens_per_slot=tokens_per_slot)
        if min_confidence is not None:
            check_min_confidence(ask.processor, min_confidence)
        if max_passages is not None:
            check_max_passages(ask.processor, max_passages)
        self.top_k, self.tokens_per_slot, self.min_confidence = top_k, tokens_per_slot, min_confidence
        self.max_passages = max_passages or passages_to_read(ask.processor)
        self.max_batch, self.batch_seconds, self.limits = max_batch, batch_seconds, limits or Limits()
        folder = None if retriever is None else kept_folder(retriever.corpus)
        self.store = self.model.slot_prefix_store(self.processor, max_bytes=prefix_bytes, folder=folder, read_only=True)
        self._encode = functools.lru_cache(KEPT_DOCUMENTS)(self._encode_documents)
        self._waiting: list[Request] = []
        self._arrival = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="arcaligner-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> "Future[Answer]":
        """Queues a request.

        Raises:
            `BusyError`: too many wait, or the engine is closing.
            `ValueError`: more documents or tokens than the limits allow.
        """
        documents = request.documents or ()
        if len(documents) > self.limits.max_documents:
            raise ValueError(f"Got {len(documents)} documents; expected at most {self.limits.max_documents}.")
        if not 1 <= request.max_new_tokens <= self.limits.max_new_tokens:
            raise ValueError(f"`max_tokens` is {request.max_new_tokens}; expected 1 to {self.limits.max_new_tokens}.")
        if request.min_confidence is None:
            request.min_confidence = self.min_confidence
        else:
            check_min_confidence(self.processor, request.min_confidence)
        if request.max_passages is None:
            request.max_passages = self.max_passages
        else:
            check_max_passages(self.processor, request.max_passages)
        if request.copy_bonus is not None:
            check_copy_bonus(request.copy_bonus)
        with self._arrival:
            if self._closed or len(self._waiting) >= self.limits.waiting:
                raise BusyError(
                    "The server is closing." if self._closed else "Too many requests wait. Try again later."
                )
            self._waiting.append(request)
            self._arrival.notify()
        return request.future

    def warm_up(self) -> None:
        """Searches the corpus and answers a short request, which loads what is loaded on first use."""
        if self.retriever is not None:
            self.retriever("?", top_k=1)
        request = Request([{"role": "user", "content": "?"}], documents=[".", ","], max_new_tokens=2)
        self.submit(request).result()

    def close(self) -> None:
        """Takes no more requests, answers those that wait, and returns."""
        with self._arrival:
            self._closed = True
            self._arrival.notify()
        self._thread.join()

    # The engine's thread

    def _work(self) -> None:
        while batch := self._take():
            groups: dict[bool, list[Request]] = {}  # without slots, and with
            for request in self._read(batch):
                groups.setdefault(request.passages is None, []).append(request)
            for group in groups.values():
                self._answer(group)

    def _take(self) -> list[Request]:
        """The next requests, in the order of their arrival; none when the engine is closed."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._waiting or self._closed)
            # A moment longer, for others to share the batch: it takes little longer than a single request.
            self._arrival.wait_for(lambda: len(self._waiting) >= self.max_batch or self._closed, self.batch_seconds)
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
        return batch

    def _read(self, batch: list[Request]) -> list[Request]:
        """Those whose passages could be read."""
        read = []
        for request in batch:
            if request.future.set_running_or_notify_cancel():
                try:
                    if request.cancelled or time.monotonic() - request.arrived > self.limits.seconds:
                        raise TimeoutError(f"The request waited for more than {self.limits.seconds:g} seconds.")
                    request.passages = self._passages(request)
                    read.append(request)
                except Exception as error:  # one request's mistake is its own
                    request.future.set_exception(error)
        read = [request for part, _ in _each_fails_alone(read, self._choose) for request in part]
        for request in read:
            request.documents = [] if request.passages is None else request.passages.documents
        return read

    def _passages(self, request: Request) -> SlotPassages | None:
        began, most = time.perf_counter(), self.limits.max_slots
        rate = self.tokens_per_slot if request.tokens_per_slot is None else request.tokens_per_slot
        if request.documents is not None:
            encoded = self._encode(json.dumps(request.documents), rate)  # as text, which a cache can look up
            seconds = {"retrieval": 0.0, "slots": time.perf_counter() - began}
            return SlotPassages(_as_passages(request.documents), encoded, seconds)
        if (passages := self._search(request)) is None:
            return None
        if rate not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: each[name] for name in ("title", "text")} for each in passages.documents]
            passages.encoded = self._encode(json.dumps(texts), rate)
            passages.seconds["slots"] += time.perf_counter() - began
        if (num_slots := len(passages.encoded.context_embeds)) > most:  # read or only asked about: it is work
            raise ValueError(f"The passages have {num_slots} slots; expected at most {most}. Pass a lower `top_k`.")
        return passages

    def _choose(self, group: list[Request]) -> None:
        """Leaves each the passages that most likely answer, each asked about by itself, where it has more than it
        wants."""
        group = [each for each in group if each.passages and len(each.passages.documents) > (each.max_passages or 1e9)]
        if not group:
            return
        began = time.perf_counter()
        chats, rows = [self._chat(request) for request in group], [request.passages.inputs for request in group]
        similar = [
            similarities_of(self.processor.encoder, chat, request.passages.documents)
            if request.documents is not None
            else [each["similarity"] for each in request.passages.documents]
            for request, chat in zip(group, chats, strict=True)
        ]
        slots = {name: [row[name] for row in rows] for name in rows[0]}
        asked = rank_passages(self.store, chats, similarities=similar, **slots)
        seconds = time.perf_counter() - began
        for request, ranked in zip(group, asked, strict=True):
            numbers = likeliest(ranked, request.max_passages)
            request.kept = sum(ranked[number].is_kept for number in numbers)
            request.passages = request.passages.only(numbers)
            request.passages.seconds["choosing"] = seconds
            for number, each in ranked.items():
                request.passages.documents[number]["confidence"] = each.confidence

    def _search(self, request: Request) -> SlotPassages | None:
        """The passages of the corpus for the last question, if there is a corpus and any are asked for."""
        top_k = self.top_k if request.top_k is None else request.top_k
        if self.retriever is None or top_k == 0:
            return None
        questions = [each["content"] for each in request.messages if each["role"] == "user"]
        return self.retriever(questions[-1] if questions else "", top_k)

    def _encode_documents(self, documents: str, tokens_per_slot: int | str | None) -> EncodedDocuments:
        (encoded,) = self.processor.slot_encoder.encode_batch(
            [json.loads(documents)], tokens_per_slot=tokens_per_slot, room=[self.limits.max_slots]
        )
        return encoded

    def _answer(self, group: list[Request]) -> None:
        for part, (began, inputs) in _each_fails_alone(group, lambda part: (time.monotonic(), self._inputs(part))):
            try:
                self._generate(part, inputs, began)
            except Exception as error:
                for request in part:
                    if not request.future.done():
                        request.future.set_exception(error)

    def _inputs(self, group: list[Request]) -> dict[str, Any]:
        """What `generate` needs, for a batch."""
        chats = [self._chat(request) for request in group]
        if group[0].passages is not None:
            rows = [request.passages.inputs for request in group]
            inputs = self.store.prepare(chats, **{name: [row[name] for row in rows] for name in rows[0]})
            for request, kept, parts in zip(group, inputs.num_kept, inputs.num_passages, strict=True):
                if request.kept is None:  # else known before they were asked about one by one
                    request.kept = len(request.passages.documents) * kept // parts
            return inputs
        padding = {"padding": True, "padding_side": "left"}
        if self.processor.chat_template is not None:
            inputs = self.processor.apply_chat_template(
                chats,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                sanitize_control_tokens=True,  # text of a client is never the end of a turn
                processor_kwargs=padding,
            )
        else:
            inputs = self.processor(chats, return_tensors="pt", **padding)
        check_length(inputs["input_ids"].shape[1], "The prompt", self.model.config.text_config)
        return {**inputs}

    def _chat(self, request: Request) -> list[dict[str, str]] | str:
        """What is asked, as the processor takes it."""
        if self.processor.chat_template is not None:
            return request.messages
        if len(request.messages) > 1:
            raise ValueError("This base model has no chat template; expected one user message.")
        return request.messages[0]["content"]

    @torch.inference_mode()
    def _generate(self, group: list[Request], inputs: dict[str, Any], began: float) -> None:
        inputs = {name: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        can_refuse = self.processor.answer_probe is not None and group[0].passages is not None
        read = [request.passages.read for request in group if request.passages is not None]
        about = zip(map(self._chat, group), read, strict=False)  # a group has passages or none has
        watch = AnswerConfidence(self.model, self.processor, about) if can_refuse else None
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        with watch or contextlib.nullcontext():
            rows = AnswerStream(group, prompt_tokens, self, began, watch)
            settings = GenerationConfig(
                max_new_tokens=max(rows.max_new_tokens),
                eos_token_id=self.model.generation_config.eos_token_id,
                pad_token_id=self.processor.tokenizer.pad_token_id or 0,
                do_sample=False,
            )
            added = [] if watch is None else [watch]
            if group[0].passages is not None:
                bonus = [request.copy_bonus for request in group]
                added.append(CopyBonus(self.processor, read, bonus, settings.eos_token_id))
            self.model.generate(
                **inputs,
                generation_config=settings,
                streamer=rows,
                stopping_criteria=StoppingCriteriaList([rows]),
                logits_processor=LogitsProcessorList([*added, RowSampler(group)]),
            )


def _each_fails_alone(group: list[Request], run: Callable[[list[Request]], Any]) -> Iterator[tuple[list[Request], Any]]:
    """Runs a group, and where that fails its halves, so that a request that cannot be read fails alone. Gives the parts
    that could be run, each with its result."""
    try:
        result = run(group)
    except Exception as error:
        if len(group) == 1:
            group[0].future.set_exception(error)
            return
        for part in (group[: len(group) // 2], group[len(group) // 2 :]):
            yield from _each_fails_alone(part, run)
    else:
        yield group, result


def _as_passages(documents: list[Any]) -> list[dict[str, Any]]:
    return [each if isinstance(each, dict) else {"title": "", "text": each} for each in documents]
