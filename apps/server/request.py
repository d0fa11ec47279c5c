"""Requests to an engine, and its answers."""

import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ...common.rows import find_answer
from ...kv_cache_arcaligner import QuestionBatch
from ..corpus.retrieve import SlotPassages


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the queue."""

    max_documents: int = 64
    max_slots: int = 2048  # of the passages that are used; 20 passages of 160 tokens, two tokens per slot, have 1,600
    max_scored_slots: int = 8192  # of all passages, if they are scored one by one and only some of them are used
    max_new_tokens: int = 1024
    seconds: float = 120.0  # from the arrival of a request to the end of its answer
    waiting: int = 256  # requests

    @property
    def max_slots_asked(self) -> int:
        """The name of `max_scored_slots` in version 0.2."""
        _warn_of("max_slots_asked", "max_scored_slots")
        return self.max_scored_slots


@dataclass(eq=False)
class Request:
    """
    A chat to be answered.

    Args:
        messages (`list[dict]`): With `role` and `content`.
        documents (`list`, *optional*): Passages; `None` uses the corpus, if there is one.
        top_k (`int`, *optional*): Number of passages to retrieve from the corpus; 0 uses none. Default: the engine's.
        tokens_per_slot (`int` or `"segment"`, *optional*): Default: the engine's, else the corpus's, whose stored slots
            are then used. With another value, passages of the corpus are encoded again for this request.
        max_new_tokens, temperature, top_p, min_p: Settings of generation; temperature 0 is greedy decoding.
        sampling_top_k (`int`): With a temperature, the number of most likely tokens to sample from; 0 means all.
        seed (`int`, *optional*): With a temperature, makes sampling reproducible.
        stop (`list[str]`): Texts that end the answer and are not part of it.
        min_confidence (`float`, *optional*): If the answerability is lower, the answer is the processor's `no_answer`.
            Default: the engine's.
        max_passages (`int`, *optional*): Maximum number of passages to use: those that most likely contain the answer.
            Default: the engine's, or, if it has none, as many as the question needs according to `Answerer.select`.
        copy_bonus (`float`, *optional*): Bias of copy-biased decoding, in log-odds. Default: the processor's.
        on_text (`Callable`, *optional*): Called with each new part of the answer, in a thread of the engine.
        is_streamed (`bool`): Whether the client gets each part when it is generated; if not, parts may be larger.
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
    is_streamed: bool = False
    future: "Future[Answer]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    seconds: float = math.inf  # how long after `arrived` the answer has to be finished
    deadline: float = math.inf  # the end of this time, in the seconds of `time.monotonic`; 0 after `cancel`
    on_cancel: Callable[[], Any] = lambda: None
    passages: SlotPassages | None = None
    scored_question: QuestionBatch | None = None  # the question with the passages that are used, if these were scored
    prior: list[float] | None = None  # bias on the attention to each passage, if several are used and weighted
    num_cached: int | None = None  # number of passages that were cached; `None` until it is known

    def cancel(self) -> None:
        """Cancel the request, because no client waits for it any more."""
        self.deadline = 0.0
        self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        return self.deadline == 0.0

    def end(self) -> None:
        """End a request whose client has left or whose time is over."""
        if self.is_cancelled:
            error: Exception = RequestCancelledError("The request was cancelled.")
        else:
            error = timeout_error(self.seconds)
        self.future.set_exception(error)


def timeout_error(seconds: float) -> TimeoutError:
    """The error of a request whose answer takes too long."""
    return TimeoutError(
        f"The answer was not finished within {seconds:g} seconds. Try again later, or pass a lower `max_tokens`."
    )


def _warn_of(old: str, new: str) -> None:
    """Warn the caller of a deprecated property."""
    message = f"`{old}` is now called `{new}`; the old name will be removed in the next release. Use the new name."
    warnings.warn(message, FutureWarning, stacklevel=3)


@dataclass
class Answer:
    """The result of a request. In `seconds`, `waiting`, `retrieval`, `slots`, `scoring` (of passages) and `model` add
    up to `first_token`, the time from the arrival of the request to the first token; `total` is the time to the end of
    the answer. `num_cached` is the number of passages that were cached, either precomputed or from an earlier question.
    `answerability` is how likely it is that the passages contain an answer, and `answer_likelihood` how likely it is
    that the answer is right. An estimate is `None` if the aligner lacks it, and `answer_likelihood` also for sampled
    answers and abstentions."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    batch_size: int
    seconds: dict[str, float]
    passages: SlotPassages | None
    num_cached: int
    answerability: float | None
    statistics: dict[str, Any]
    answer_likelihood: float | None = None

    @property
    def confidence(self) -> float | None:
        """The name of `answerability` in version 0.2."""
        _warn_of("confidence", "answerability")
        return self.answerability

    @property
    def kept(self) -> int:
        """The name of `num_cached` in version 0.2."""
        _warn_of("kept", "num_cached")
        return self.num_cached

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The passages. Each has `used`, whether it was used, and `answer`: the characters of the first occurrence of
        the answer in its text, or `None`."""
        documents = [] if self.passages is None else self.passages.documents
        return [
            {"used": True, **document, "answer": find_answer(self.text, document["text"])} for document in documents
        ]


class BusyError(RuntimeError):
    """Too many requests are waiting."""


class UnavailableError(OSError):
    """The engine is temporarily unavailable; `retry_after` is in seconds."""

    retry_after = 5


class RequestCancelledError(RuntimeError):
    """The client no longer waits for the answer."""


def compression_statistics(processor, passages: SlotPassages | None) -> dict[str, Any]:
    """The number of tokens of the passages that are used, of their slots, and the ratio of both."""
    if passages is None:
        return {"tokens": 0, "slots": 0, "compression_rate": None}
    return processor.slot_encoder.statistics(passages.used, passages.encoded, has_budget=False)
