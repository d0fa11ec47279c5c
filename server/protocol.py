"""What a request may hold and what an answer looks like: OpenAI's chat completions, with passages.

Beyond OpenAI's fields a request has `documents`, `top_k` and `return_slots`; an answer has `arcaligner`, with its
sources, segments, statistics, seconds and, where asked for, the passes of each slot.
"""

import json
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..corpus.sources import LONGEST_TITLE
from .engine import Answer, Request

# Of an answer, where a client names no number.
MAX_TOKENS = 256


def check_unicode(text: str) -> str:
    """Refuses halves of surrogate pairs, which JSON can write but no tokenizer reads."""
    text.encode()
    return text


def as_text(given: Any) -> Any:
    """A string is read as a text."""
    return {"text": given} if isinstance(given, str) else given


def as_parts(given: Any) -> Any:
    """A string is read as a list of one text."""
    return [as_text(given)] if isinstance(given, str) else given


Unicode = Annotated[str, AfterValidator(check_unicode)]


class Body(BaseModel):
    """Part of a request; an unknown field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Text(Body):
    """A part of a message; images and sound are refused."""

    type: Literal["text"] = "text"
    text: Unicode


class Message(Body):
    """A turn of the chat."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Text], BeforeValidator(as_parts)]
    name: str | None = None

    @property
    def turn(self) -> dict[str, str]:
        """As a chat template takes it."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class Document(Body):
    """A passage that comes with the request, also as a string."""

    title: Annotated[str, Field(max_length=LONGEST_TITLE), AfterValidator(check_unicode)] = ""
    text: Unicode


class StreamOptions(BaseModel):
    """Whether the last piece of a stream says how many tokens there were."""

    include_usage: bool = False


class ChatRequest(Body):
    """The body of `/v1/chat/completions`."""

    model: str
    messages: list[Message] = Field(min_length=1)
    documents: list[Annotated[Document, BeforeValidator(as_text)]] | None = None
    top_k: Annotated[int, Field(ge=0, le=100)] = 5
    return_slots: bool = False
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None

    def engine_request(self, **kwargs: Any) -> Request:
        """For the engine; `kwargs` are its own."""
        return Request(
            messages=[message.turn for message in self.messages],
            documents=None if self.documents is None else [each.model_dump() for each in self.documents],
            top_k=self.top_k,
            max_new_tokens=self.max_completion_tokens or self.max_tokens or MAX_TOKENS,
            temperature=round(self.temperature, 4),  # logits divided by less than that may overflow
            top_p=self.top_p,
            return_slots=self.return_slots,
            **kwargs,
        )


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error as the client of OpenAI reads it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def slots_report(answer: Answer) -> dict[str, Any]:
    """Where the answer comes from, and what reading it has cost."""
    passages = answer.passages
    segments = [] if passages is None else passages.encoded.segments
    return {
        "sources": [] if passages is None else passages.documents,
        "segments": [{"document": each.document, "start": each.start, "end": each.end} for each in segments],
        "trajectories": answer.trajectories,
        "statistics": answer.statistics,
        "seconds": answer.seconds,
        "batch_size": answer.batch_size,
    }


def usage(answer: Answer) -> dict[str, int]:
    """Tokens read and written; a slot counts as one."""
    read, written = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Completion:
    """The bodies of one answer: whole, or piece by piece."""

    def __init__(self, model: str):
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        report = {"usage": usage(answer), "arcaligner": slots_report(answer)}
        return {**self.head, "object": "chat.completion", "choices": [choice], **report}

    def piece(self, text: str | None = None, answer: Answer | None = None) -> str:
        """An event of a stream: the role (neither `text` nor `answer`), a piece of the text, or the end."""
        delta = {} if answer else {"content": text} if text is not None else {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": answer.finish_reason if answer else None}
        report = {"arcaligner": slots_report(answer)} if answer else {}
        return event({**self.head, "object": "chat.completion.chunk", "choices": [choice], **report})

    def usage_piece(self, answer: Answer) -> str:
        """The event after the end, for clients that ask for it."""
        return event({**self.head, "object": "chat.completion.chunk", "choices": [], "usage": usage(answer)})


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body)}\n\n"
