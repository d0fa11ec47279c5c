"""Requests to an engine, and its answers."""

import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ...common.rows import find_answer
from ...kv_cache_arcaligner import AskedQuestions
from ..corpus.retrieve import SlotPassages


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the queue."""

    max_documents: int = 64
    max_slots: int = 2048  # used together: 20 passages of 160 tokens at two tokens per slot are 1,600
    max_slots_asked: int = 8192  # of all passages, if they are scored one by one, to use some of them
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
            Default: the engine's, or, if it has none, as many as `Answerer.select` finds the question to need.
        copy_bonus (`float`, *optional*): Bias of copy-biased decoding, in log-odds. Default: the processor's.
        on_text (`Callable`, *optional*): Called with each new piece of the answer, in the engine's thread.
        is_streamed (`bool`): Whether the client gets the pieces as they are written; if not, they may be larger.
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
    seconds: float = math.inf  # that it has since then
    until: float = math.inf  # when it ends, in the seconds of `time.monotonic`; it is 0 after `cancel`
    on_cancel: Callable[[], Any] = lambda: None
    passages: SlotPassages | None = None
    asked: AskedQuestions | None = None  # its question with the passages that it uses, if these were scored
    kept: int | None = None  # number of cached passages, once it is known

    def cancel(self) -> None:
        """Cancel the request, because no client waits for it any more."""
        self.until = 0.0
        self.on_cancel()

    @property
    def is_cancelled(self) -> bool:
        return self.until == 0.0

    def end(self) -> None:
        """End a request whose client has left or whose time is over."""
        if self.is_cancelled:
            error: Exception = RequestCancelledError("The request was cancelled.")
        else:
            error = TimeoutError(f"The answer was not done within {self.seconds:g} seconds.")
        self.future.set_exception(error)


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


def read_statistics(processor, passages: SlotPassages | None) -> dict[str, Any]:
    """The number of tokens, and of the slots that represent them."""
    if passages is None:
        return {"tokens": 0, "slots": 0, "compression_rate": None}
    return processor.slot_encoder.statistics(passages.read, passages.encoded, has_budget=False)
