"""What a request may hold and what an answer looks like: OpenAI's chat completions, with passages.

Beyond OpenAI's fields a request has `documents`, `top_k`, `tokens_per_slot`, `min_confidence`, `max_passages` and
`copy_bonus`; an answer has `arcaligner`, with its sources, confidence, segments, statistics and seconds.
"""

import json
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..common.files import refuse_unknown
from ..common.reading import LONGEST_TITLE
from .answers import Answer, Request

# Of an answer, where a client names no number.
MAX_TOKENS = 256
# Fields of OpenAI that change no answer.
WITHOUT_EFFECT = "user metadata safety_identifier prompt_cache_key prompt_cache_retention service_tier store prediction"
WITHOUT_EFFECT = {*WITHOUT_EFFECT.split(), "parallel_tool_calls"}
# Fields that would change it, and cannot be done here, with the value that asks for nothing.
NOT_DONE = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0}
NOT_DONE |= {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"}
NOT_DONE |= {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "reasoning_effort": "none"}
NOT_DONE |= {"audio": None, "web_search_options": None}


def check_unicode(text: str) -> str:
    """Refuses halves of surrogate pairs, which JSON can write but no tokenizer reads."""
    text.encode()
    return text


def as_text(given: Any) -> Any:
    """A string is read as a text."""
    return {"text": given} if isinstance(given, str) else given


def as_list(given: Any) -> Any:
    """A string is read as a list of one."""
    return [given] if isinstance(given, str) else given


Unicode = Annotated[str, AfterValidator(check_unicode)]


class Body(BaseModel):
    """Part of a request; an unknown field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Text(Body):
    """A part of a message; images and sound are refused."""

    type: Literal["text"] = "text"
    text: Unicode


class Message(Body):
    """A turn of the chat. An answer of this server can be sent back as it is, with its fields that are null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Annotated[Text, BeforeValidator(as_text)]], BeforeValidator(as_list)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class Document(Body):
    """A passage that comes with the request, also as a string."""

    title: Annotated[str, Field(max_length=LONGEST_TITLE), AfterValidator(check_unicode)] = ""
    text: Unicode


class StreamOptions(BaseModel):
    """Whether the last piece of a stream says how many tokens there were."""

    include_usage: bool = False


class ChatRequest(Body):
    """The body of `/v1/chat/completions`. What is null is as if it were left out."""

    model: str
    messages: list[Message] = Field(min_length=1)
    documents: list[Annotated[Document, BeforeValidator(as_text)]] | None = None
    top_k: Annotated[int, Field(ge=0, le=100)] | None = None
    tokens_per_slot: Annotated[int, Field(ge=1)] | Literal["segment"] | None = None
    min_confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    max_passages: Annotated[int, Field(ge=1)] | None = None
    copy_bonus: Annotated[float, Field(ge=0, le=100)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Annotated[Unicode, Field(min_length=1)]], BeforeValidator(as_list), Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def without_what_changes_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        refuse_unknown("the request", given, [*cls.model_fields, *WITHOUT_EFFECT, *NOT_DONE])
        given = {name: each for name, each in given.items() if each is not None and name not in WITHOUT_EFFECT}
        for name in NOT_DONE.keys() & given.keys():
            choices = (NOT_DONE[name], "auto") if name in ("tool_choice", "function_call") else (NOT_DONE[name],)
            if given.pop(name) not in choices:
                raise ValueError(f"`{name}` is not supported; leave it out, or pass {json.dumps(NOT_DONE[name])}.")
        return given

    def engine_request(self, on_text: Callable[[str], Any]) -> Request:
        """For the engine, which has most fields by the same names."""
        own = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "stream", "stream_options"}
        return Request(
            messages=[message.turn for message in self.messages],
            max_new_tokens=self.max_completion_tokens or self.max_tokens or MAX_TOKENS,
            temperature=round(self.temperature, 4),  # logits divided by less than that may overflow
            on_text=on_text,
            **self.model_dump(exclude=own),
        )


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error as the client of OpenAI reads it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def slots_report(answer: Answer) -> dict[str, Any]:
    """Where the answer comes from, and what reading it has cost."""
    segments = [] if answer.passages is None else answer.passages.encoded.segments
    return {
        "sources": answer.sources,
        "kept": answer.kept,
        "confidence": answer.confidence,
        "segments": [{"document": each.document, "start": each.start, "end": each.end} for each in segments],
        "statistics": answer.statistics,
        "seconds": answer.seconds,
        "batch_size": answer.batch_size,
    }


def usage(answer: Answer) -> dict[str, int]:
    """Tokens read and written; a slot counts as one."""
    read, written = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Completion:
    """The bodies of one answer: whole, or piece by piece; `has_usage` as in the request's `stream_options`."""

    def __init__(self, model: str, has_usage: bool = False):
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.has_usage = has_usage

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        report = {"usage": usage(answer), "arcaligner": slots_report(answer)}
        return {**self.head, "object": "chat.completion", "choices": [choice], **report}

    def begin(self) -> str:
        """The first event of a stream."""
        return self._event({"role": "assistant", "content": ""})

    def piece(self, text: str) -> str:
        """An event with a piece of the text."""
        return self._event({"content": text})

    def end(self, answer: Answer) -> str:
        """The last events; the very last has the report, and the usage where it is asked for."""
        report: dict[str, Any] = {"arcaligner": slots_report(answer)}
        if not self.has_usage:
            return self._event({}, answer.finish_reason, **report)
        report |= {"choices": [], "usage": usage(answer)}
        return self._event({}, answer.finish_reason) + self._event({}, **report)

    def _event(self, delta: dict[str, str], finish_reason: str | None = None, **report: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        body = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        return event(body | ({"usage": None} if self.has_usage else {}) | report)


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"
