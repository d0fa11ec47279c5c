"""Requests of `/v1/chat/completions` as clients of OpenAI, vLLM, llama.cpp and others send them.

Fields that have no effect are accepted. A field that would change the answer but is not supported is rejected by name,
and so is an unknown field, so that a typo is never silently ignored.
"""

import json
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationInfo, model_validator

from ...common.files import refuse_unknown
from ...common.reading import LONGEST_TITLE
from .request import Limits
from .request import Request as EngineRequest

# Maximum tokens of an answer, unless the client sets a limit.
MAX_TOKENS = 256
# Limits that are checked before any work: messages of a chat, parts of a message, stop strings and their length.
MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_CHARACTERS = 1000, 1000, 16, 256
# Characters of a value in a message.
MAX_SHOWN = 80

# Fields that have no effect here: those about accounts, caches, the server and reasoning (this model has none), and
# parameters of features in UNSUPPORTED or UNSUPPORTED_SAMPLING, which are switched off.
HINTS = frozenset(
    """
    user metadata store service_tier safety_identifier prediction verbosity priority timeout extra_headers extra_query
    prompt_cache_key prompt_cache_retention prompt_cache_options cache_control cache_prompt cache_salt cache caching
    id chat_id session_id conversation_id message_id request_id trace_id id_slot provider transforms usage keep_alive
    reasoning reasoning_effort include_reasoning reasoning_format reasoning_split think thinking enable_thinking
    thinking_budget parallel_tool_calls parse_tool_calls timings_per_token return_progress return_tokens
    post_sampling_probs num_ctx num_batch num_keep num_gpu num_thread use_mmap use_mlock numa
    repeat_last_n penalty_last_n penalize_nl dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    return_slots samplers min_keep xtc_threshold dynatemp_exponent mirostat_tau mirostat_eta
    """.split()
)
# Fields that would change the answer at any temperature, with the values that have no effect.
UNSUPPORTED: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1, 0),
    "repeat_penalty": (1, 0),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "dry_multiplier": (0,),
    "logit_bias": ({}, []),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "n_probs": (0,),
    "response_format": ({"type": "text"}, {}),
    "modalities": (["text"], []),
    "format": ("", "text"),
    "grammar": ("",),
    "lora": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "plugins": ([],),
    "models": ([],),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "echo": (False,),
    "return_full_text": (False,),
    "full_text": (False,),
    "num_return_sequences": (1,),
    "num_beams": (1,),
    "safe_prompt": (False,),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"thinking": False}),
    "options": ({},),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
}
# Fields that would change which tokens are sampled; without effect at temperature 0.
UNSUPPORTED_SAMPLING: dict[str, tuple] = {
    "top_a": (0,),
    "typical_p": (1, 0),
    "typical": (1, 0),
    "tfs_z": (1, 0),
    "tfs": (1, 0),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
}
TOOLS = {"tools": "tool_choice", "functions": "function_call"}
# Formerly, `top_k` without a temperature was the number of passages. It still is for these values, which are unusual in
# sampling, where 0, 1, and 20 or more are common.
PASSAGES_TOP_K = range(2, 20)


def without_nulls(fields: Any) -> Any:
    """Drop fields that are null."""
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


def as_list(content: Any) -> Any:
    """Turn a string into a list of one."""
    return [content] if isinstance(content, str) else content


def without_empty(stops: Any) -> Any:
    """Drop empty strings of a list: an empty stop string stops nothing."""
    stops = as_list(stops)
    return [stop for stop in stops if stop != ""] if isinstance(stops, list) else stops


# Documents and messages in the forms that libraries send


def as_passage(document: Any) -> Any:
    """A document as `{"title", "text", "id", "metadata"}`. It may be a string; a document of LangChain, also in the
    form of `dumpd`; a node of LlamaIndex, also with a score; a document of Haystack or Cohere; a result of OpenAI's
    search.
    """
    if isinstance(document, str):
        return {"text": document}
    document = without_nulls(document)
    if not isinstance(document, dict):
        return document
    for name in ("kwargs", "node", "data"):  # of LangChain's `dumpd`, of LlamaIndex's NodeWithScore, of Cohere
        if isinstance(document.get(name), dict) and "text" not in document:
            document = {**document, **without_nulls(document[name])}
    metadata = next(
        (document[name] for name in ("metadata", "meta", "attributes") if isinstance(document.get(name), dict)), None
    )
    id = document.get("id_", document.get("id"))  # in a `dumpd`, `id` is the name of a class
    passage: dict[str, Any] = {"id": id if isinstance(id, str | int) else None, "metadata": metadata}
    resource = document.get("text_resource")  # of LlamaIndex's Document
    texts = [document.get(name) for name in ("text", "page_content", "content", "snippet")]
    texts.append(resource.get("text") if isinstance(resource, dict) else None)
    if (text := next((text for text in texts if text is not None), None)) is not None:
        passage["text"] = "\n".join(map(text_of_part, text)) if isinstance(text, list) else text
    title = document.get("title")
    if title is None and metadata is not None:
        title = metadata.get("title")
        title = title[:LONGEST_TITLE] if isinstance(title, str) else None
    return passage if title is None else {**passage, "title": title}


def text_of_part(part: Any) -> str:
    """The text of a part of a document; empty if it has none."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def as_part(part: Any) -> Any:
    """A part of a message; strings and refusals become parts with a text."""
    if isinstance(part, str):
        return {"text": part}
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"text": part.get("refusal")}
    return part


def as_parts(content: Any) -> Any:
    """The content of a message as a list of its parts, without reasoning."""
    content = as_list(content)
    if not isinstance(content, list):
        return content
    thoughts = ("thinking", "redacted_thinking", "reasoning")
    return [part for part in content if not (isinstance(part, dict) and part.get("type") in thoughts)]


class Text(BaseModel):
    """A part of a message; images and sound are rejected. Further fields, such as `cache_control`, are ignored."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class Message(BaseModel):
    """A message of the chat; an answer of this server can be sent back as one. Further fields (`annotations`, `id`,
    `reasoning_content`, ...) are ignored; those with content other than text are rejected."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        list[Annotated[Text, BeforeValidator(as_part)]],
        FailFast(),
        Field(max_length=MAX_PARTS),
        BeforeValidator(as_parts),
    ]
    calls: bool = False

    @model_validator(mode="before")
    @classmethod
    def normalize_message(cls, message: Any) -> Any:
        message = without_nulls(message)
        if not isinstance(message, dict):
            return message
        for name in ("images", "audio", "files", "prefix", "partial"):
            if message.get(name):
                raise ValueError(
                    f"A message has the field `{name}`, which is not supported; expected `role` and `content`. Leave "
                    f"out `{name}`."
                )
        calls = bool(message.get("tool_calls") or message.get("function_call"))
        message = {name: message[name] for name in ("role", "content", "refusal") if name in message}
        if message.get("role") == "assistant" and "content" not in message and (calls or "refusal" in message):
            message["content"] = message.get("refusal", "")
        return {**message, "calls": calls}

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


def turns_of(messages: list[Message]) -> list[dict[str, str]]:
    """Messages in the form of chat templates. Templates of small models have no tools, so the result of a tool is put
    before the question for which the tool was called, and the message that called the tool is dropped."""
    turns: list[dict[str, str]] = []
    results: list[str] = []
    question = None  # the user's turn for which tools were called, and its text

    for number, message in enumerate(messages):
        if message.role in ("tool", "function"):
            if question is None:
                raise ValueError(
                    f"`messages.{number}` is the result of a tool, but no earlier message is from the user. Put the "
                    "user's message before it."
                )
            results.append(message.text)
            question[0]["content"] = "\n\n".join([*results, question[1]])
        elif not message.calls:
            role = "system" if message.role == "developer" else message.role
            turns.append({"role": role, "content": message.text})
            if role == "user":
                question, results = (turns[-1], message.text), []
    return turns


class Passage(BaseModel):
    """A document of the request. `id` and `metadata` are returned with the sources; further fields, such as `score`,
    are ignored."""

    title: Annotated[str, Field(max_length=LONGEST_TITLE)] = ""
    text: str
    id: str | int | None = Field(default=None, exclude=True)
    metadata: dict[str, Any] | None = Field(default=None, exclude=True)

    @property
    def origin(self) -> dict[str, Any]:
        """The id and metadata that the client sent with the document."""
        return without_nulls({"id": self.id, "metadata": self.metadata})


class ChatRequest(BaseModel):
    """The body of a request to `/v1/chat/completions`."""

    # /openapi.json shows the docstrings of these classes. What is not checked here is checked by the engine. With
    # `limits` of an engine in the context of the validation, a request with too many documents is rejected before any
    # of them is parsed.
    model: str
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    documents: list[Annotated[Passage, BeforeValidator(as_passage)]] | None = None
    num_passages: Annotated[int, Field(ge=0, le=100)] | None = None
    tokens_per_slot: Any = None
    min_confidence: float | None = None
    max_passages: int | None = None
    copy_bonus: Annotated[float, Field(le=100)] | None = None
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]],
        FailFast(),
        Field(max_length=MAX_STOPS),
        BeforeValidator(without_empty),
    ] = []
    stream: bool = False
    stream_options: dict[str, Any] = {}  # `include_usage`: whether the last event of a stream has the usage

    @model_validator(mode="before")
    @classmethod
    def drop_ignored_fields(cls, body: Any, info: ValidationInfo) -> Any:
        body = without_nulls(body)
        if not isinstance(body, dict):
            return body
        if isinstance(body.get("extra_body"), dict):  # sent as a field by clients that do not unpack it
            body = without_nulls(body.pop("extra_body")) | body
        unknown = body.keys() - cls.model_fields.keys() - HINTS - UNSUPPORTED.keys() - UNSUPPORTED_SAMPLING.keys()
        refuse_unknown("the request", unknown, cls.model_fields)
        limits, documents = (info.context or {}).get("limits", Limits()), body.get("documents")
        if isinstance(documents, list) and len(documents) > limits.max_documents:
            raise ValueError(f"Got {len(documents)} documents; expected at most {limits.max_documents}. Pass fewer.")
        refuse_unsupported_fields(body)
        return {name: value for name, value in body.items() if name in cls.model_fields}

    @property
    def note(self) -> str | None:
        """A note for the client about `top_k`, which formerly was the number of passages."""
        if self.top_k is None or self.num_passages is not None or self.temperature:
            return None
        if self.top_k in PASSAGES_TOP_K:
            return (
                "`top_k` without a `temperature` was used as `num_passages`. From the next release, it will be a "
                "sampling setting only. For the number of passages to retrieve, pass `num_passages`."
            )
        return (
            "`top_k` is a sampling setting and has no effect without a `temperature`. For the number of passages to "
            "retrieve, pass `num_passages`."
        )

    def num_tokens(self, limits: Limits) -> int:
        """Maximum tokens of the answer. -1 means the limit. A larger number is not an error, as it may be the default
        of a client: the answer may end earlier."""
        maxima = (self.max_completion_tokens, self.max_tokens, MAX_TOKENS)
        maximum = next(number for number in maxima if number is not None)
        if maximum == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise ValueError(f"`{name}` is 0; expected at least 1, or -1 for as many tokens as the server allows.")
        return limits.max_new_tokens if maximum == -1 else min(maximum, limits.max_new_tokens)

    def engine_request(self, on_text: Callable[[str], Any], limits: Limits) -> EngineRequest:
        """The request for the engine, which has most fields under the same names."""
        one_token = self.top_k == 1 or self.top_p == 0  # sampling from one token is greedy
        temperature = (
            0.0 if one_token else round(self.temperature, 4)
        )  # a temperature close to 0 may make logits overflow
        num_passages = self.num_passages
        if self.note is not None:
            warnings.warn(self.note, FutureWarning, stacklevel=2)
            num_passages = self.top_k if self.top_k in PASSAGES_TOP_K else None
        same = {"documents", "tokens_per_slot", "min_confidence", "max_passages", "copy_bonus", "stop"}
        return EngineRequest(
            messages=turns_of(self.messages),
            max_new_tokens=self.num_tokens(limits),
            temperature=temperature,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            sampling_top_k=max(0, self.top_k or 0) if temperature else 0,
            top_k=num_passages,
            seed=None if self.seed == -1 else self.seed,  # clients of llama.cpp send -1 for a random seed
            on_text=on_text,
            is_streamed=self.stream,
            **self.model_dump(include=same),
        )


def refuse_unsupported_fields(body: dict[str, Any]) -> None:
    """Raise `ValueError` for the first field whose value would change the answer and is not supported."""
    for tools, choice in TOOLS.items():
        if body.get(choice) == "none":  # tools that the model may not call have no effect
            body.pop(tools, None)
    draws = bool(body.get("temperature"))
    for name, value in body.items():
        neutral = UNSUPPORTED.get(name, UNSUPPORTED_SAMPLING.get(name) if draws else None)
        if neutral is not None and value not in neutral:
            if name in TOOLS:
                raise ValueError(f'Tools are not supported. Leave out `{name}`, or also pass `{TOOLS[name]}: "none"`.')
            shown, or_neutral = json.dumps(value), f", or pass {json.dumps(neutral[0])}" if neutral else ""
            shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
            raise ValueError(f"`{name}` is {shown}, which is not supported. Leave out `{name}`{or_neutral}.")
