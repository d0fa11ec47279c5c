"""Requests, their answers, and how those of a batch are written: each by its own settings, token by token."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from ..common.rows import find_answer
from ..configuration_arcaligner import longest_prompt
from ..corpus.retrieve import SlotPassages
from ..pipeline_arcaligner import AnswerConfidence


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many may wait."""

    max_documents: int = 64
    max_slots: int = 2048  # 20 passages of 160 tokens at two tokens per slot are 1,600
    max_new_tokens: int = 1024
    seconds: float = 120.0
    waiting: int = 256


@dataclass(eq=False)
class Request:
    """
    A chat to be answered.

    Args:
        messages (`list[dict]`): With `role` and `content`.
        documents (`list`, *optional*): Passages; `None` takes those of the corpus, if there is one.
        top_k (`int`, *optional*): How many passages of the corpus are found; 0 reads none. Default: the engine's.
        tokens_per_slot (`int` or `"segment"`, *optional*): Default: the engine's, or the rate of the corpus, whose
            slots are read as they are stored. At another rate its passages are encoded again.
        max_new_tokens, temperature, top_p: Of the answer; temperature 0 takes the likeliest token.
        seed (`int`, *optional*): With a temperature, makes the draws of tokens the same each time.
        stop (`list[str]`): Texts that end the answer; they are no part of it.
        min_confidence (`float`, *optional*): Where it is less likely that the passages answer, the answer is the
            processor's `no_answer`. Default: the engine's.
        max_passages (`int`, *optional*): Of more passages, only those that most likely answer are read. Default: the
            engine's.
        copy_bonus (`float`, *optional*): How much answers in the words of the passages are preferred. Default: the
            processor's.
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
    max_passages: int | None = None
    copy_bonus: float | None = None
    on_text: Callable[[str], Any] = lambda text: None
    future: "Future[Answer]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    passages: SlotPassages | None = None
    kept: int | None = None  # of the passages, once that is known


@dataclass
class Answer:
    """The result of a request. `seconds` since it arrived: `waiting`, `retrieval`, `slots`, `choosing` (passages are
    read and each is asked about), `model` add up to `first_token`. `kept` is how many of the passages that the answer
    was read from were read before, ahead or for an earlier question. `confidence` is how likely it is that they answer,
    where that was fitted."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    batch_size: int
    seconds: dict[str, float]
    documents: list[dict[str, Any]]
    passages: SlotPassages | None
    kept: int
    confidence: float | None
    statistics: dict[str, Any]

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The passages, each with `read`, whether the answer was read from it, and `answer`: the first characters of
        its text where the answer stands, or `None`."""
        return [{"read": True, **each, "answer": find_answer(self.text, each["text"])} for each in self.documents]


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
                row = TemperatureLogitsWarper(float(request.temperature))(input_ids, rows[number])
                row = TopPLogitsWarper(request.top_p)(input_ids, row)
                draws = torch.rand(row.shape, generator=generator, dtype=torch.float64)
                rows[number] = row - torch.log(-torch.log(draws)).to(row)
        return torch.cat(rows)


class AnswerStream(BaseStreamer, StoppingCriteria):
    """The answers of a batch while they are written: gives each its tokens, and says which rows are done. `watch`
    knows how likely it is that the passages answer."""

    def __init__(
        self,
        group: list[Request],
        prompt_tokens: list[int],
        engine: Any,
        began: float,
        watch: AnswerConfidence | None = None,
    ):
        self.group, self.prompt_tokens, self.engine, self.watch = group, prompt_tokens, engine, watch
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
        for row, token in enumerate(value.tolist()):
            if self.reasons[row] is None:
                self._put_token(row, token)

    def _put_token(self, row: int, token: int) -> None:
        request = self.group[row]
        if self._is_refused(row):
            self.said[row], self.reasons[row] = self.engine.processor.no_answer, "stop"
            request.on_text(self.said[row])
            return self._finish(row)
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
        if new:
            self.group[row].on_text(new)

    def _is_refused(self, row: int) -> bool:
        least = self.group[row].min_confidence
        return self.watch is not None and least is not None and self.watch.confidence[row].item() < least

    def end(self) -> None:
        """Nothing is left: each row is told its last piece when it is done."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs) -> torch.BoolTensor:
        return torch.tensor([reason is not None for reason in self.reasons], device=input_ids.device)

    def _finish(self, row: int) -> None:
        request = self.group[row]
        if self.reasons[row] == "time":
            error = TimeoutError(f"The answer was not done within {self.engine.limits.seconds:g} seconds.")
            return request.future.set_exception(error)
        passages = request.passages
        if passages is None:
            parts = {"retrieval": 0.0, "slots": 0.0}
            statistics: dict[str, Any] = {"tokens": 0, "slots": 0, "compression_rate": None}
        else:
            parts = dict(passages.seconds)
            read = [each for each in passages.documents if each.get("read", True)]
            statistics = self.engine.processor.slot_encoder.statistics(read, passages.encoded, has_budget=False)
        first_token = self.first_token - request.arrived
        parts.setdefault("choosing", 0.0)
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
                documents=request.documents,
                passages=passages,
                kept=request.kept or 0,
                confidence=None if self.watch is None else self.watch.confidence[row].item(),
                statistics=statistics,
            )
        )


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`.

    >>> _overlap("yes\\n", "\\n\\n")
    1
    """
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
