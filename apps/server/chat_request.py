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
# Limits that are checked before any work: turns of a chat, parts of a turn, stop strings.
MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_STOP_CHARACTERS = 1000, 1000, 16, 256

# Fields without effect here: about accounts and caches, reasoning (this model has none) and the server, and parameters
# of features in NOT_DONE or NOT_DRAWN that are switched off.
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
NOT_DONE: dict[str, tuple] = {
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
NOT_DRAWN: dict[str, tuple] = {
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
# Without a temperature, `top_k` once was the number of passages. It is still read so for values that are unusual in
# sampling, where 0, 1, and 20 or more are common.
PASSAGES_TOP_K = range(2, 20)


def without_nulls(given: Any) -> Any:
    """Drop fields that are null."""
    return {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else given


def as_list(given: Any) -> Any:
    """Turn a string into a list of one."""
    return [given] if isinstance(given, str) else given


def without_empty(given: Any) -> Any:
    """Drop empty strings of a list: an empty stop string stops nothing."""
    given = as_list(given)
    return [each for each in given if each != ""] if isinstance(given, list) else given


# Documents and messages in the forms that libraries send


def as_passage(given: Any) -> Any:
    """A passage as `{"title", "text", "id", "metadata"}`. It may be a string; a document of LangChain, also as its
    `dumpd` writes it; a node of LlamaIndex, also with its score; a document of Haystack, Cohere or OpenAI's search."""
    if isinstance(given, str):
        return {"text": given}
    given = without_nulls(given)
    if not isinstance(given, dict):
        return given
    for name in ("kwargs", "node", "data"):  # of LangChain's `dumpd`, of LlamaIndex's NodeWithScore, of Cohere
        if isinstance(given.get(name), dict) and "text" not in given:
            given = {**given, **without_nulls(given[name])}
    metadata = next(
        (given[name] for name in ("metadata", "meta", "attributes") if isinstance(given.get(name), dict)), None
    )
    id = given.get("id_", given.get("id"))  # in a `dumpd`, `id` is the name of a class
    found: dict[str, Any] = {"id": id if isinstance(id, str | int) else None, "metadata": metadata}
    resource = given.get("text_resource")  # of LlamaIndex's Document
    texts = [given.get(name) for name in ("text", "page_content", "content", "snippet")]
    texts.append(resource.get("text") if isinstance(resource, dict) else None)
    if (text := next((each for each in texts if each is not None), None)) is not None:
        found["text"] = "\n".join(map(text_of_part, text)) if isinstance(text, list) else text
    title = given.get("title")
    if title is None and metadata is not None:
        title = metadata.get("title")
        title = title[:LONGEST_TITLE] if isinstance(title, str) else None
    return found if title is None else {**found, "title": title}


def text_of_part(part: Any) -> str:
    """The text of a part of a document; empty if it has none."""
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def as_part(given: Any) -> Any:
    """A part of a message; a string is a text, and so is a refusal."""
    if isinstance(given, str):
        return {"text": given}
    if isinstance(given, dict) and given.get("type") == "refusal":
        return {"text": given.get("refusal")}
    return given


def as_parts(given: Any) -> Any:
    """The content of a message as a list of its parts, without reasoning."""
    given = as_list(given)
    if not isinstance(given, list):
        return given
    thoughts = ("thinking", "redacted_thinking", "reasoning")
    return [each for each in given if not (isinstance(each, dict) and each.get("type") in thoughts)]


class Text(BaseModel):
    """A part of a message; images and sound are rejected. Further fields, such as `cache_control`, are ignored."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


class Message(BaseModel):
    """A turn of the chat, as it was sent or as an answer came back. Further fields (`annotations`, `id`,
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
    def known_forms(cls, given: Any) -> Any:
        given = without_nulls(given)
        if not isinstance(given, dict):
            return given
        for name in ("images", "audio", "files", "prefix", "partial"):
            if given.get(name):
                raise ValueError(
                    f"A message with `{name}` is not supported; expected `role`, and a string as `content`."
                )
        calls = bool(given.get("tool_calls") or given.get("function_call"))
        given = {name: given[name] for name in ("role", "content", "refusal") if name in given}
        if given.get("role") == "assistant" and "content" not in given and (calls or "refusal" in given):
            given["content"] = given.get("refusal", "")
        return {**given, "calls": calls}

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


def turns_of(messages: list[Message]) -> list[dict[str, str]]:
    """Messages in the form of chat templates. Templates of small models have no tools, so the result of a tool is put
    before the question that it was called for, and the turn that called it is dropped."""
    turns: list[dict[str, str]] = []
    results: list[str] = []
    question = None  # the user turn that tools were called for, and its text

    for number, message in enumerate(messages):
        if message.role in ("tool", "function"):
            if question is None:
                raise ValueError(
                    f"messages.{number}: a tool's result comes before any message of the user; expected the user's "
                    "message first."
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
    """A passage of the request. `id` and `metadata` are returned with the sources; further fields, such as `score`, are
    ignored."""

    title: Annotated[str, Field(max_length=LONGEST_TITLE)] = ""
    text: str
    id: str | int | None = Field(default=None, exclude=True)
    metadata: dict[str, Any] | None = Field(default=None, exclude=True)

    @property
    def origin(self) -> dict[str, Any]:
        """The id and metadata that the client sent with the passage."""
        return without_nulls({"id": self.id, "metadata": self.metadata})


class ChatRequest(BaseModel):
    """The body of `/v1/chat/completions`. The engine checks the rest. If it is validated with the `limits` of an engine
    as context, too many documents are rejected before any is parsed."""

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
    stream_options: dict[str, Any] = {}  # `include_usage`: whether the last piece of a stream has it

    @model_validator(mode="before")
    @classmethod
    def without_what_changes_nothing(cls, given: Any, info: ValidationInfo) -> Any:
        given = without_nulls(given)
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("extra_body"), dict):  # sent by clients without such an argument
            given = without_nulls(given.pop("extra_body")) | given
        unknown = given.keys() - cls.model_fields.keys() - HINTS - NOT_DONE.keys() - NOT_DRAWN.keys()
        refuse_unknown("the request", unknown, cls.model_fields)
        limits, documents = (info.context or {}).get("limits", Limits()), given.get("documents")
        if isinstance(documents, list) and len(documents) > limits.max_documents:
            raise ValueError(f"Got {len(documents)} documents; expected at most {limits.max_documents}.")
        refuse_what_is_not_done(given)
        return {name: each for name, each in given.items() if name in cls.model_fields}

    @property
    def note(self) -> str | None:
        """A note for the client about `top_k`, which once was the number of passages."""
        if self.top_k is None or self.num_passages is not None or self.temperature:
            return None
        if self.top_k in PASSAGES_TOP_K:
            return (
                "`top_k` without a temperature was used as `num_passages`; this ends with the next release, because "
                "elsewhere `top_k` is a setting of sampling. Pass `num_passages`."
            )
        return "`top_k` is a setting of sampling. Pass `num_passages` for the number of passages to retrieve."

    def num_tokens(self, limits: Limits) -> int:
        """Maximum tokens of the answer. A client's default may exceed the limit, and -1 means the limit: an answer that
        ends early is no error."""
        asked = next((each for each in (self.max_completion_tokens, self.max_tokens) if each is not None), MAX_TOKENS)
        if asked == 0:
            raise ValueError("`max_tokens` is 0; expected at least 1.")
        return limits.max_new_tokens if asked == -1 else min(asked, limits.max_new_tokens)

    def engine_request(self, on_text: Callable[[str], Any], limits: Limits) -> EngineRequest:
        """The request for the engine, which has most fields under the same names."""
        one_token = self.top_k == 1 or self.top_p == 0  # sampling from one token is greedy
        temperature = 0.0 if one_token else round(self.temperature, 4)  # a smaller temperature may make logits overflow
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
            seed=None if self.seed == -1 else self.seed,  # for llama.cpp, -1 means a random seed
            on_text=on_text,
            is_streamed=self.stream,
            **self.model_dump(include=same),
        )


def refuse_what_is_not_done(given: dict[str, Any]) -> None:
    """Raises `ValueError` for the first field whose value would change the answer and is not supported."""
    for tools, choice in TOOLS.items():
        if given.get(choice) == "none":  # tools that the model may not call have no effect
            given.pop(tools, None)
    draws = bool(given.get("temperature"))
    for name, value in given.items():
        neutral = NOT_DONE.get(name, NOT_DRAWN.get(name) if draws else None)
        if neutral is not None and value not in neutral:
            pass_it = f", or pass {json.dumps(neutral[0])}" if neutral else ""
            if name in TOOLS:
                only_with = f'`{TOOLS[name]}: "none"`'
                raise ValueError(f"Tools are not supported; `{name}` is accepted only together with {only_with}.")
            raise ValueError(f"`{name}` is not supported; leave it out{pass_it}.")
