"""From requests to answers: concurrent requests share a batch, and each gets its answer as it is generated.

One thread encodes passages and runs the model; any number of threads may submit.

    submit -> passages as slots (given, or of a corpus) -> the likeliest -> slot prefixes, kept or read -> `generate`
    -> pieces of the answer
"""

import json
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ...answering_arcaligner import Answerer, AnsweringCall, chat_inputs, select_top, similarities_of
from ...common.rows import find_answer
from ...configuration_arcaligner import check_length, longest_prompt
from ...encoder_arcaligner import EncodedDocuments, GivenSlots, passages_apart
from ...kv_cache_arcaligner import prefill_beginning
from ...pipeline_arcaligner import ArcAlignerPipeline
from ..corpus.retrieve import Retriever, SlotPassages

# Number of passages of requests whose slots are cached; slot prefixes have a budget of their own, in bytes.
KEPT_PASSAGES = 256


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the queue."""

    max_documents: int = 64
    max_slots: int = 2048  # used together: 20 passages of 160 tokens at two tokens per slot are 1,600
    max_slots_asked: int = 8192  # of all passages, if they are scored one by one and only the top-ranked are used
    max_new_tokens: int = 1024
    seconds: float = 120.0
    waiting: int = 256


@dataclass(eq=False)
class Request:
    """
    A chat to be answered.

    Args:
        messages (`list[dict]`): With `role` and `content`.
        documents (`list`, *optional*): Passages; `None` uses the corpus, if there is one.
        top_k (`int`, *optional*): Number of passages to retrieve from the corpus; 0 uses none. Default: the engine's.
        tokens_per_slot (`int` or `"segment"`, *optional*): Default: the engine's, or the rate of the corpus, whose
            stored slots are used. At another rate its passages are encoded again.
        max_new_tokens, temperature, top_p, min_p: Settings of sampling; temperature 0 is greedy decoding.
        sampling_top_k (`int`): With a temperature, the number of most likely tokens to sample from; 0 means all.
        seed (`int`, *optional*): With a temperature, makes sampling reproducible.
        stop (`list[str]`): Texts that end the answer, and are not part of it.
        min_confidence (`float`, *optional*): If the answerability is lower, the answer is the processor's `no_answer`.
            Default: the engine's.
        max_passages (`int`, *optional*): Maximum number of passages to use, those most likely to contain the answer.
            Default: the engine's.
        copy_bonus (`float`, *optional*): Bias of copy-biased decoding, in log-odds. Default: the processor's.
        on_text (`Callable`): Called with each new piece of the answer, in the engine's thread.
    """

    messages: list[dict[str, str]]
    documents: list[Any] | None = None
    top_k: int | None = None
    tokens_per_slot: int | str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    sampling_top_k: int = 0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    min_confidence: float | None = None
    max_passages: int | None = None
    copy_bonus: float | None = None
    on_text: Callable[[str], Any] = lambda text: None
    future: "Future[Answer]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    passages: SlotPassages | None = None
    kept: int | None = None  # number of cached passages, once it is known

    def wants_fewer(self, num_passages: int) -> bool:
        """Whether only some of so many passages are read, which are chosen then."""
        return self.max_passages is not None and num_passages > self.max_passages


@dataclass
class Answer:
    """The result of a request. `seconds` since it arrived: `waiting`, `retrieval`, `slots`, `choosing` (each passage is
    scored), `model` add up to `first_token`. `kept` is the number of passages of the answer that were cached,
    precomputed or from an earlier question. `answerability` is how likely the passages contain an answer,
    `answer_likelihood` how likely the answer is right, if these were fitted; the latter is only for answers that are
    neither sampled nor refused."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    batch_size: int
    seconds: dict[str, float]
    passages: SlotPassages | None
    kept: int
    answerability: float | None
    statistics: dict[str, Any]
    answer_likelihood: float | None = None

    @property
    def confidence(self) -> float | None:
        """The name of `answerability` in version 0.2."""
        warnings.warn(
            "`confidence` is now called `answerability`; the old name will be removed in the next release.",
            FutureWarning,
            stacklevel=2,
        )
        return self.answerability

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The passages, each with `read`, whether it was used, and `answer`: the first occurrence of the answer in its
        text, in characters, or `None`."""
        documents = [] if self.passages is None else self.passages.documents
        return [{"read": True, **each, "answer": find_answer(self.text, each["text"])} for each in documents]


class BusyError(RuntimeError):
    """Too many requests are waiting."""


class UnavailableError(OSError):
    """The engine is temporarily unavailable; `retry_after` is in seconds."""

    retry_after = 5


class RequestCancelledError(RuntimeError):
    """The client no longer waits for the answer."""


class _EndedError(Exception):
    """Some requests of a group have ended during a computation for all of them; their futures say how."""


class PassageEncoder:
    """The slots of passages, each encoded once for all requests that have it among others: its slots are the same ones
    then, and what was read of them is found again."""

    def __init__(self, processor, max_passages: int = KEPT_PASSAGES):
        self.processor, self.max_passages = processor, max_passages
        self._kept: OrderedDict[tuple, EncodedDocuments] = OrderedDict()  # longest unused first

    def __call__(self, documents: list[dict], tokens_per_slot: int | str | None, room: int) -> EncodedDocuments:
        """
        Raises:
            `ValueError`: more slots than there is `room` for, which are counted before any passage is encoded.
        """
        keys = [(json.dumps(each), tokens_per_slot) for each in documents]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        used = sum(len(found[key].segments) for key in keys if key in found)
        # One that stands twice is encoded twice then: it takes its room twice.
        new = [(key, each) for key, each in zip(keys, documents, strict=True) if key not in found]
        try:
            encoded = self._encode([each for _, each in new], tokens_per_slot, room - used)
            found |= zip((key for key, _ in new), encoded, strict=True)
            num_slots = sum(len(found[key].segments) for key in keys)
        except ValueError:
            num_slots = None
        if not num_slots or num_slots > room:  # an error counts all passages; white space alone is a slot, too
            return self.processor.encode_documents(documents, tokens_per_slot=tokens_per_slot, room=[room])
        for key in keys:
            self._kept[key] = found[key]
            self._kept.move_to_end(key)
        while len(self._kept) > self.max_passages:
            self._kept.popitem(last=False)
        return self._joined([found[key] for key in keys])

    def _encode(self, documents: list[dict], tokens_per_slot: int | str | None, room: int) -> list[EncodedDocuments]:
        """Each passage by itself, no slot for one that is white space; together, which is fastest."""
        if not documents:
            return []
        settings = {"tokens_per_slot": tokens_per_slot, "room": [room]}
        segments, *slots, _ = self.processor.encode_documents(documents, **settings)
        apart, nothing = passages_apart(GivenSlots(*slots)), GivenSlots(slots[0][:0], None)
        encoded = []
        for number in range(len(documents)):
            own = [each for each in segments if each.document == number]
            embeds, words, _ = apart[number] if own else nothing
            ids = torch.full((len(own),), number, device=embeds.device)
            encoded.append(EncodedDocuments(own, embeds, words, ids, []))
        return encoded

    def _joined(self, passages: list[EncodedDocuments]) -> EncodedDocuments:
        segments = [replace(each, document=number) for number, own in enumerate(passages) for each in own.segments]
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
        max_batch (`int`): Maximum number of requests per batch.
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
        self._current: list[Request] = []  # requests in computation, before their first tokens
        self._hooks: list[RemovableHandle] = []
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
        with self._arrival:
            if self._closed:
                raise BusyError("The server is closing.")
            if self.num_waiting >= self.limits.waiting:
                raise BusyError("Too many requests are waiting. Try again later.")
            self._waiting.append(request)
            self._arrival.notify()
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
        with self._arrival:
            self._closed = True
            self._arrival.notify()
        self._thread.join()
        for hook in self._hooks:
            hook.remove()

    # The engine's thread

    def _work(self) -> None:
        while batch := self._take():
            wanted = [request for request in batch if request.future.set_running_or_notify_cancel()]
            read = [request for one in wanted for (request,), _ in each_fails_alone([one], self._read)]
            chosen = [request for part, _ in each_fails_alone(read, self._choose) for request in part]
            for has_slots in (False, True):
                if group := [request for request in chosen if (request.passages is not None) == has_slots]:
                    self._answer(group)

    def _take(self) -> list[Request]:
        """The next requests, in order of arrival; empty if the engine is closed."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._waiting or self._closed)
            # Wait a moment for others to share the batch: it takes little longer than a single request.
            self._arrival.wait_for(lambda: len(self._waiting) >= self.max_batch or self._closed, self.batch_seconds)
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
        return batch

    def reason_to_end(self, request: Request) -> Exception | None:
        """Why a request has no client any more, or `None`."""
        if request.cancelled:
            return RequestCancelledError("The request was cancelled.")
        if time.monotonic() - request.arrived > self.limits.seconds:
            return TimeoutError(f"The answer was not done within {self.limits.seconds:g} seconds.")
        return None

    def _begin(self, group: list[Request]) -> None:
        """Start to compute for `group`: end requests without a client, now and before each call of model and encoder,
        so that long work for them does not delay others."""
        self._current = group
        if not self._hooks:  # models are loaded on first use
            encoder = self.processor.encoder
            modules = {self.model.model, encoder.model[0], encoder.untrained.model[0]}
            self._hooks = [module.register_forward_pre_hook(_pre_hook(self)) for module in modules]
        self._end_current()

    def _end_current(self) -> None:
        ended = [request for request in self._current if self.reason_to_end(request) is not None]
        if ended:
            self._current = []
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
            began = time.perf_counter()
            documents = [each if isinstance(each, dict) else {"title": "", "text": each} for each in request.documents]
            documents, pieces = self.answerer.cut(documents)
            encoded = self._encode(documents, rate, self._room(request, len(documents)))
            documents = [each | {"number": piece.document} for each, piece in zip(documents, pieces, strict=True)]
            seconds = {"retrieval": 0.0, "slots": time.perf_counter() - began}
            request.passages = SlotPassages(documents, encoded, seconds)
            return
        if self.retriever is None or request.top_k == 0:
            return
        questions = [each["content"] for each in request.messages if each["role"] == "user"]
        passages = self.retriever(questions[-1] if questions else "", request.top_k)
        if rate not in (None, self.retriever.corpus.settings["tokens_per_slot"]):
            began = time.perf_counter()
            texts = [{name: each[name] for name in ("title", "text")} for each in passages.documents]
            passages.encoded = self._encode(texts, rate, self._room(request, len(texts)))
            passages.seconds["slots"] += time.perf_counter() - began
        num_slots, most = len(passages.encoded.context_embeds), self._room(request, len(passages.documents))
        if num_slots > most:
            raise ValueError(f"The passages have {num_slots} slots; expected at most {most}. Pass a lower `top_k`.")
        request.passages = passages

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
        began = time.perf_counter()
        chats, rows = [self._chat(request) for request in group], [request.passages.inputs for request in group]
        similar = [
            similarities_of(self.processor.encoder, chat, request.passages.documents)
            if request.documents is not None
            else [each["similarity"] for each in request.passages.documents]
            for request, chat in zip(group, chats, strict=True)
        ]
        slots = {name: [row[name] for row in rows] for name in rows[0]}
        most = [request.max_passages for request in group]
        scores = self.answerer.score_candidates(chats, similarities=similar, most=most, **slots)
        seconds = time.perf_counter() - began
        for request, own in zip(group, scores, strict=True):
            numbers = select_top(own, request.max_passages)
            request.kept = sum(own[number].is_cached for number in numbers)
            request.passages = request.passages.only(numbers)
            request.passages.seconds["choosing"] = seconds
            for number, document in enumerate(request.passages.documents):  # `None` if it was not scored
                sure = own[number].answerability if number in own else None
                document |= dict.fromkeys(("answerability", "confidence"), sure)  # the second is its name in 0.2

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
        self._begin(group)
        inputs = {name: x.to(self.model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        prompt_tokens = inputs["attention_mask"].sum(dim=1).tolist()
        inputs = prefill_beginning(self.model, inputs)
        read = [[] if request.passages is None else request.passages.read for request in group]
        call = self.answerer.answer(
            list(map(self._chat, group)),
            read,
            copy_bonus=[request.copy_bonus for request in group],
            scores=group[0].passages is not None,
        )
        rows = AnswerStream(group, prompt_tokens, self, began, call)
        settings = GenerationConfig(
            max_new_tokens=max(rows.max_new_tokens),
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=self.processor.tokenizer.pad_token_id or 0,
            do_sample=False,
        )
        call.generate(
            inputs,
            last=[RowSampler(group)],
            generation_config=settings,
            streamer=rows,
            stopping_criteria=StoppingCriteriaList([rows]),
        )


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


def _pre_hook(engine: Engine) -> Callable:
    """Before a forward of the engine's thread: others may share the model. A function, which copies of it share."""

    def hook(module, args) -> None:
        if threading.current_thread() is engine._thread:
            engine._end_current()

    return hook


class RowSampler(LogitsProcessor):
    """Samples the tokens of each row with its own temperature, `top_k`, `top_p`, `min_p` and seed, so that all kinds of
    requests share a batch: the argmax after adding Gumbel noise is a sample from the softmax."""

    def __init__(self, group: list[Request]):
        self.group = group
        self.generators = [torch.Generator(device="cpu") for _ in group]
        for request, generator in zip(group, self.generators, strict=True):
            generator.seed() if request.seed is None else generator.manual_seed(request.seed)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores (batch, vocab_size) whose argmax is the next token."""
        rows = list(scores.float().split(1))
        for number, (request, generator) in enumerate(zip(self.group, self.generators, strict=True)):
            if request.temperature:
                row = TemperatureLogitsWarper(float(request.temperature))(input_ids, rows[number])
                if request.sampling_top_k:
                    row = TopKLogitsWarper(request.sampling_top_k)(input_ids, row)
                row = TopPLogitsWarper(request.top_p)(input_ids, row)
                if request.min_p:
                    row = MinPLogitsWarper(request.min_p)(input_ids, row)
                draws = torch.rand(row.shape, generator=generator, dtype=torch.float64, device="cpu")
                rows[number] = row - torch.log(-torch.log(draws)).to(row)
        return torch.cat(rows)


class AnswerStream(BaseStreamer, StoppingCriteria):
    """The answers of a batch during generation: passes its tokens to each, and reports which rows are done. `call` has
    the answerability."""

    def __init__(
        self,
        group: list[Request],
        prompt_tokens: list[int],
        engine: Engine,
        began: float,
        call: AnsweringCall,
    ):
        self.group, self.prompt_tokens, self.engine, self.call = group, prompt_tokens, engine, call
        self.eos = set(torch.tensor(engine.model.generation_config.eos_token_id, device="cpu").reshape(-1).tolist())
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
        self.engine._current = []  # from now on each request ends separately
        for row, token in enumerate(value.tolist()):
            if self.reasons[row] is None:
                self._put_token(row, token)

    def _put_token(self, row: int, token: int) -> None:
        request = self.group[row]
        least, sure = request.min_confidence, self.call.answerability
        if sure is not None and least is not None and sure[row].item() < least:
            self.said[row], self.reasons[row] = self.engine.processor.no_answer, "stop"
            request.on_text(self.said[row])
            return self._finish(row)
        if token in self.eos:
            self.reasons[row] = "stop"
        else:
            self.ids[row].append(token)
            if len(self.ids[row]) == self.max_new_tokens[row]:
                self.reasons[row] = "length"
            elif self.engine.reason_to_end(request) is not None:
                self.reasons[row] = "ended"
        self._say(row)
        if self.reasons[row] is not None:
            self._finish(row)

    def _say(self, row: int) -> None:
        """Report new text, except for an incomplete character and a possible beginning of a `stop`."""
        text = self.engine.processor.tokenizer.decode(self.ids[row], skip_special_tokens=True).lstrip()
        stops = self.group[row].stop
        if ends := [end for each in stops if (end := text.find(each)) >= 0]:
            self.reasons[row], text = "stop", text[: min(ends)]
        elif self.reasons[row] is None:
            if text.endswith("\ufffd"):
                return
            text = text[: len(text) - max((_overlap(text, each) for each in stops), default=0)]
        new, self.said[row] = text[len(self.said[row]) :], text
        if new:
            self.group[row].on_text(new)

    def end(self) -> None:
        """Nothing to do: each row reports its last piece when it is done."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        return torch.tensor([reason is not None for reason in self.reasons], device=input_ids.device)

    def _likelihood(self, row: int) -> float | None:
        """How likely the answer of a row is right; `None` if it is sampled or refused."""
        if self.group[row].temperature or not self.ids[row] or (found := self.call.answer_likelihood) is None:
            return None
        return found[row].item()

    def _finish(self, row: int) -> None:
        request = self.group[row]
        if self.reasons[row] == "ended":
            return request.future.set_exception(self.engine.reason_to_end(request))
        passages, parts = request.passages, {"retrieval": 0.0, "slots": 0.0, "choosing": 0.0}
        if passages is not None:
            parts |= passages.seconds
        first_token = self.first_token - request.arrived
        parts["model"] = self.first_token - self.began
        parts["waiting"] = first_token - sum(parts.values())
        request.future.set_result(
            Answer(
                text=self.said[row],
                finish_reason=self.reasons[row],
                prompt_tokens=self.prompt_tokens[row],
                completion_tokens=len(self.ids[row]),
                batch_size=len(self.group),
                seconds={**parts, "first_token": first_token, "total": time.monotonic() - request.arrived},
                passages=passages,
                kept=request.kept or 0,
                answerability=None if self.call.answerability is None else self.call.answerability[row].item(),
                answer_likelihood=self._likelihood(row),
                statistics=read_statistics(self.engine.processor, passages),
            )
        )


def read_statistics(processor, passages: SlotPassages | None) -> dict[str, Any]:
    """The number of tokens, and of the slots that represent them."""
    if passages is None:
        return {"tokens": 0, "slots": 0, "compression_rate": None}
    return processor.slot_encoder.statistics(passages.read, passages.encoded, has_budget=False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`.

    >>> _overlap("yes\\n", "\\n\\n")
    1
    """
    most = min(len(stop) - 1, len(text))
    # Knuth, Morris and Pratt: for each prefix, the length of its longest proper prefix that is also its suffix.
    read, borders = [*stop[:most], None, *text[len(text) - most :]], [0]
    for character in read[1:]:
        size = borders[-1]
        while size and read[size] != character:
            size = borders[size - 1]
        borders.append(size + (read[size] == character))
    return borders[-1]
