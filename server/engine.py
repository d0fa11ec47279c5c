"""Requests to answers: those that arrive together are one batch, and each gets its answer as it is written.

One thread reads passages and runs the model; any number of threads may submit.

    submit -> passages as slots (given, or of a corpus) -> slot prefixes, kept or read -> `generate` -> on_text
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ..configuration_arcaligner import check_length, longest_prompt
from ..corpus.kept import kept_folder
from ..corpus.retrieve import Retriever, SlotPassages
from ..encoder_arcaligner import EncodedDocuments
from ..pipeline_arcaligner import AnswerConfidence, ArcAlignerPipeline, check_min_confidence, format_trajectory

# Given passages whose slots are kept; the prefixes have their own budget, in bytes.
KEPT_DOCUMENTS = 64


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many may wait."""

    max_documents: int = 64
    max_slots: int = 2048  # 20 passages of 160 tokens at two tokens per slot are 1,600
    max_new_tokens: int = 1024
    seconds: float = 120.0
    waiting: int = 256


class BusyError(RuntimeError):
    """Too many requests wait."""


@dataclass(eq=False)
class Request:
    """
    A chat to be answered.

    Args:
        messages (`list[dict]`): With `role` and `content`.
        documents (`list`, *optional*): Passages; `None` takes those of the corpus, if there is one.
        top_k (`int`, *optional*): How many passages of the corpus are read; 0 reads none. Default: the engine's.
        tokens_per_slot (`int` or `"segment"`, *optional*): Default: the engine's, or the rate of the corpus, whose
            slots are read as they are stored. At another rate its passages are encoded again.
        max_new_tokens, temperature, top_p: Of the answer; temperature 0 takes the likeliest token.
        seed (`int`, *optional*): With a temperature, makes the draws of tokens the same each time.
        stop (`list[str]`): Texts that end the answer; they are no part of it.
        min_confidence (`float`, *optional*): An answer from passages with less becomes the processor's `no_answer`; it
            is told as one piece, when it is done. Default: the engine's.
        return_slots (`bool`): Whether the passes of each slot are reported. Where gates are on, those of a kept prefix
            are not known, so it is read again.
        on_text (`Callable`): Is told each new piece of the answer, by the engine's thread.
    """

    messages: list[dict[str, str]]
    documents: list[Any] | None = None
    top_k: int | None = None
    tokens_per_slot: int | str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    min_confidence: float | None = None
    return_slots: bool = False
    on_text: Callable[[str], Any] = lambda text: None
    future: "Future[Answer]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    passages: SlotPassages | None = None
    kept: int = 0


@dataclass
class Answer:
    """The result of a request. `seconds` since it arrived: `waiting`, `retrieval`, `slots`, `model` add up to
    `first_token`. `kept` of its passages did not have to be read: they were, ahead or for an earlier question.
    `confidence` is that of an answer from passages, where the aligner can refuse one."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    batch_size: int
    seconds: dict[str, float]
    passages: SlotPassages | None
    kept: int
    confidence: float | None
    statistics: dict[str, Any]
    trajectories: list[list[str]] | None

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The passages, each with `answer`: the first characters of its text where the answer stands, or `None`."""
        documents = [] if self.passages is None else self.passages.documents
        return [each | {"answer": find_answer(self.text, each["text"])} for each in documents]


def find_answer(answer: str, text: str) -> dict[str, int] | None:
    """Where a text says an answer word for word; case, spaces and punctuation around it make no difference.

    >>> find_answer("Ski  jumper.", "A Kazakh ski jumper since 2003.")
    {'start': 9, 'end': 19}
    """
    if not (words := answer.strip(" \n\t.,;:!?\"'").split()):
        return None
    pattern = r"\s+".join(map(re.escape, words))
    # Not inside a word or a number, in scripts that have spaces between words.
    before, after = (each.isdigit() or each.lower() != each.upper() for each in (words[0][0], words[-1][-1]))
    pattern = (r"(?<!\w)" if before else "") + pattern + (r"(?!\w)" if after else "")
    found = re.search(pattern, text, re.IGNORECASE)
    return None if found is None else {"start": found.start(), "end": found.end()}


class Engine:
    """
    Answers requests.

    Args:
        ask ([`ArcAlignerPipeline`]): Model and processor.
        retriever ([`Retriever`], *optional*):
            For requests without documents. Passages of its corpus that were read ahead are not read again.
        top_k (`int`), tokens_per_slot (`int` or `"segment"`, *optional*): Of requests that name none.
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
        max_batch: int = 8,
        batch_seconds: float = 0.01,
        prefix_bytes: int = 2**29,
        limits: Limits | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"`max_batch` is {max_batch}; expected at least 1 request.")
        self.model, self.processor, self.retriever = ask.model, ask.processor, retriever
        ask.processor.check_slot_settings(tokens_per_slot=tokens_per_slot)
        if min_confidence is not None:
            check_min_confidence(ask.processor, min_confidence)
        self.top_k, self.tokens_per_slot, self.min_confidence = top_k, tokens_per_slot, min_confidence
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
        request = Request([{"role": "user", "content": "?"}], documents=["."], max_new_tokens=2, return_slots=True)
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
            groups: dict[tuple, list[Request]] = {}
            for request in self._read(batch):
                groups.setdefault(self._kind(request), []).append(request)
            for group in groups.values():
                self._answer(group)

    def _kind(self, request: Request) -> tuple:
        """Requests of one kind can share a batch."""
        return request.passages is None, self._records(request)

    def _records(self, request: Request) -> bool:
        """Whether the passes of its slots have to be counted while they are read. Without gates each is one."""
        return request.passages is not None and request.return_slots and self.model.config.gate_mode != "off"

    def _take(self) -> list[Request]:
        """The next requests, in the order of their arrival; none when the engine is closed."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._waiting or self._closed)
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
        return read

    def _passages(self, request: Request) -> SlotPassages | None:
        began, most = time.perf_counter(), self.limits.max_slots
        rate = self.tokens_per_slot if request.tokens_per_slot is None else request.tokens_per_slot
        top_k = self.top_k if request.top_k is None else request.top_k
        if request.documents is not None:
            encoded = self._encode(json.dumps(request.documents), rate)
            documents = [each if isinstance(each, dict) else {"title": "", "text": each} for each in request.documents]
            return SlotPassages(documents, encoded, {"retrieval": 0.0, "slots": time.perf_counter() - began})
        if self.retriever is None or top_k == 0:
            return None
        questions = [each["content"] for each in request.messages if each["role"] == "user"]
        passages = self.retriever(questions[-1] if questions else "", top_k)
        if rate not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: each[name] for name in ("title", "text")} for each in passages.documents]
            passages.encoded = self._encode(json.dumps(texts), rate)
            passages.seconds["slots"] += time.perf_counter() - began
        if (num_slots := len(passages.encoded.context_embeds)) > most:
            raise ValueError(f"The passages have {num_slots} slots; expected at most {most}. Pass a lower `top_k`.")
        return passages

    def _encode_documents(self, documents: str, tokens_per_slot: int | str | None) -> EncodedDocuments:
        (encoded,) = self.processor.encode_batch(
            [json.loads(documents)], tokens_per_slot=tokens_per_slot, room=[self.limits.max_slots]
        )
        return encoded

    def _answer(self, group: list[Request]) -> None:
        began = time.monotonic()
        try:
            inputs = self._inputs(group)
        except Exception as error:
            if len(group) == 1:
                group[0].future.set_exception(error)
            else:  # a request that cannot be read fails alone
                middle = len(group) // 2
                self._answer(group[:middle])
                self._answer(group[middle:])
            return
        try:
            self._generate(group, inputs, began)
        except Exception as error:
            for request in group:
                if not request.future.done():
                    request.future.set_exception(error)

    def _inputs(self, group: list[Request]) -> dict[str, Any]:
        """What `generate` needs, for a batch."""
        has_template = self.processor.chat_template is not None
        if not has_template and any(len(request.messages) > 1 for request in group):
            raise ValueError("This base model has no chat template; expected one user message.")
        chats = [request.messages if has_template else request.messages[0]["content"] for request in group]
        slots: dict[str, Any] = {}
        if group[0].passages is not None:
            rows = [request.passages.inputs for request in group]
            slots = {name: [row[name] for row in rows] for name in rows[0]}
        if slots and not self._records(group[0]):
            inputs = self.store.prepare(chats, **slots)
            for request, kept, parts in zip(group, inputs.num_kept, inputs.num_passages, strict=True):
                request.kept = len(request.passages.documents) * kept // parts
            return inputs
        padding = {"padding": True, "padding_side": "left"}
        if has_template:
            inputs = self.processor.apply_chat_template(
                chats,
                **slots,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                sanitize_control_tokens=True,  # text of a client is never the end of a turn
                processor_kwargs=padding,
            )
        else:
            inputs = self.processor(chats, **slots, return_tensors="pt", **padding)
        check_length(inputs["input_ids"].shape[1], "The prompt", self.model.config.text_config)
        return {**inputs}

    @torch.inference_mode()
    def _generate(self, group: list[Request], inputs: dict[str, Any], began: float) -> None:
        depths: list[torch.Tensor] = []
        inputs = {name: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        if self._records(group[0]):
            inputs["recorded_depths"] = depths
        can_refuse = self.processor.no_answer is not None and group[0].passages is not None
        watch = AnswerConfidence(self.processor) if can_refuse else None
        rows = AnswerStream(group, inputs["attention_mask"].sum(dim=1).tolist(), self, began, depths, watch)
        settings = GenerationConfig(
            max_new_tokens=max(rows.max_new_tokens),
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=self.processor.tokenizer.pad_token_id or 0,
            do_sample=False,
        )
        self.model.generate(
            **inputs,
            generation_config=settings,
            streamer=rows,
            stopping_criteria=StoppingCriteriaList([rows]),
            logits_processor=LogitsProcessorList([*([watch] if watch else []), RowSampler(group)]),
        )


class RowSampler(LogitsProcessor):
    """Draws each row's tokens by its own temperature, `top_p` and seed, so that requests of any kind share a batch: the
    likeliest token after Gumbel noise is a draw from the softmax."""

    def __init__(self, group: list[Request]):
        self.group = group
        self.generators = [torch.Generator() for _ in group]
        for request, generator in zip(group, self.generators, strict=True):
            generator.seed() if request.seed is None else generator.manual_seed(request.seed)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores (batch, vocab_size) whose largest is the next token."""
        rows = list(scores.float().split(1))
        for number, (request, generator) in enumerate(zip(self.group, self.generators, strict=True)):
            if request.temperature:
                row = TemperatureLogitsWarper(request.temperature)(input_ids, rows[number])
                row = TopPLogitsWarper(request.top_p)(input_ids, row)
                draws = torch.rand(row.shape, generator=generator, dtype=torch.float64)
                rows[number] = row - torch.log(-torch.log(draws)).to(row)
        return torch.cat(rows)


class AnswerStream(BaseStreamer, StoppingCriteria):
    """The answers of a batch while they are written: gives each its tokens, and says which rows are done. `depths` has
    the passes of their slots, (batch, num_layers, max_slots), once the prompt is read, or nothing; `watch` knows how
    sure they are."""

    def __init__(
        self,
        group: list[Request],
        prompt_tokens: list[int],
        engine: Engine,
        began: float,
        depths: list[torch.Tensor],
        watch: AnswerConfidence | None = None,
    ):
        self.group, self.prompt_tokens, self.engine, self.depths = group, prompt_tokens, engine, depths
        self.watch = watch
        self.tokens: list[torch.Tensor] = []  # each (batch,)
        self.eos = set(torch.tensor(engine.model.generation_config.eos_token_id).reshape(-1).tolist())
        self.ids: list[list[int]] = [[] for _ in group]
        self.said = [""] * len(group)
        self.reasons: list[str | None] = [None] * len(group)
        self.began, self.first_token = began, 0.0
        longest = longest_prompt(engine.model.config.text_config)
        self.max_new_tokens = [
            request.max_new_tokens if longest is None else max(1, min(request.max_new_tokens, longest - length))
            for request, length in zip(group, prompt_tokens, strict=True)
        ]

    def put(self, value: torch.Tensor) -> None:
        """The prompt (batch, seq_len), then a token of each row (batch,)."""
        if value.dim() == 2:
            return
        self.first_token = self.first_token or time.monotonic()
        self.tokens.append(value)
        for row, token in enumerate(value.tolist()):
            if self.reasons[row] is None:
                self._put_token(row, token)

    def _put_token(self, row: int, token: int) -> None:
        request = self.group[row]
        if token in self.eos:
            self.reasons[row] = "stop"
        else:
            self.ids[row].append(token)
            if len(self.ids[row]) == self.max_new_tokens[row]:
                self.reasons[row] = "length"
            elif request.cancelled or time.monotonic() - request.arrived > self.engine.limits.seconds:
                self.reasons[row] = "time"
        self._say(row)
        if self.reasons[row] is not None:
            self._finish(row)

    def _say(self, row: int) -> None:
        """Tells what is new, except for what may become half of a character or the beginning of a `stop`."""
        text = self.engine.processor.tokenizer.decode(self.ids[row], skip_special_tokens=True).lstrip()
        stops = self.group[row].stop
        if ends := [end for each in stops if (end := text.find(each)) >= 0]:
            self.reasons[row], text = "stop", text[: min(ends)]
        elif self.reasons[row] is None:
            if text.endswith("\ufffd"):
                return
            text = text[: len(text) - max((_overlap(text, each) for each in stops), default=0)]
        new, self.said[row] = text[len(self.said[row]) :], text
        if new and not self._may_refuse(row):
            self.group[row].on_text(new)

    def _may_refuse(self, row: int) -> bool:
        """Whether the answer may yet be given up, so that none of it is told before it is done."""
        return self.watch is not None and self.group[row].min_confidence is not None

    def end(self) -> None:
        """Nothing is left: each row is told its last piece when it is done."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        return torch.tensor([reason is not None for reason in self.reasons], device=input_ids.device)

    def _finish(self, row: int) -> None:
        request = self.group[row]
        if self.reasons[row] == "time":
            error = TimeoutError(f"The answer was not done within {self.engine.limits.seconds:g} seconds.")
            return request.future.set_exception(error)
        passages, sure = request.passages, None
        if self.watch is not None:
            sure = self.watch.of(torch.stack(self.tokens, dim=1))[row]
        if self._may_refuse(row):
            if sure < request.min_confidence:
                self.said[row] = self.engine.processor.no_answer
            request.on_text(self.said[row])
        if passages is None:
            parts = {"retrieval": 0.0, "slots": 0.0}
            statistics: dict[str, Any] = {"tokens": 0, "slots": 0, "compression_rate": None}
        else:
            parts = dict(passages.seconds)
            statistics = self.engine.processor.statistics(passages.documents, passages.encoded, has_budget=False)
        first_token = self.first_token - request.arrived
        parts["model"] = self.first_token - self.began
        parts["waiting"] = first_token - sum(parts.values())
        layers = None
        if passages is not None and request.return_slots:
            num_layers, num_slots = self.engine.model.config.text_config.num_hidden_layers, statistics["slots"]
            depths = self.depths[0][row, :, :num_slots].tolist() if self.depths else [[0] * num_slots] * num_layers
            layers = [[format_trajectory(each) for each in layer] for layer in depths]
        request.future.set_result(
            Answer(
                text=self.said[row],
                finish_reason=self.reasons[row],
                prompt_tokens=self.prompt_tokens[row],
                completion_tokens=len(self.ids[row]),
                batch_size=len(self.group),
                seconds={**parts, "first_token": first_token, "total": time.monotonic() - request.arrived},
                passages=passages,
                kept=request.kept,
                confidence=sure,
                statistics=statistics,
                trajectories=layers,
            )
        )


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`.

    >>> _overlap("yes\\n", "\\n\\n")
    1
    """
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
