"""Texts as the backbone may read them: control tokens that people write are text, and messages are checked."""

import functools
import re
from collections.abc import Sequence
from typing import Any


# Inputs
def check_text(text: str, what: str) -> None:
    """Raises `ValueError` for text that is not valid Unicode, such as a command-line argument in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not valid Unicode at character {error.start}: {text[error.start]!a}. Decode it with its own "
            "encoding."
        ) from error


def check_question(question) -> None:
    """Raises `ValueError` unless the question is a text that is not empty."""
    if not isinstance(question, str):
        raise ValueError(f"A question is of type {type(question).__name__}; expected a string.")
    check_text(question, "The question")
    if not question.strip():
        raise ValueError("The question is empty; expected a text. Passages alone ask nothing.")


def check_conversation(given: Any) -> None:
    """Raises `ValueError` unless it is a list of messages, or a list of such lists."""
    messages = getattr(given, "messages", given)  # transformers' `Chat` has them inside
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"A conversation is {messages!r}; expected a list of messages, at least one.")
    if any(isinstance(each, list | tuple) for each in messages):
        for each in messages:
            check_conversation(each)
        return
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'A message is {message!r}; expected {{"role": str, "content": str}}.')


def with_plain_texts(given: Sequence) -> list:
    """The conversation, or each of several, with each message's parts joined to one text; `None` beside calls of tools
    stays."""
    if not isinstance(given[0], dict):
        return [with_plain_texts(getattr(each, "messages", each)) for each in given]
    texts = []
    for message in given:
        content = message["content"]
        if isinstance(content, list | tuple) and content:
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            is_text = all(isinstance(part, str) for part in parts) and all(part["type"] == "text" for part in content)
            content = "".join(parts) if is_text else content
        if isinstance(content, str):
            check_text(content, f"A message of the {message['role']}")
        elif content is not None or not message.get("tool_calls"):
            raise ValueError(
                f"A message of the {message['role']} is {content!r}; expected a text or "
                '[{"type": "text", "text": str}].'
            )
        texts.append({**message, "content": content})
    return texts


def has_empty_message(conversation: Sequence) -> bool:
    """Whether a message of the conversation, or of one of several, is empty."""
    return any(has_empty_message(each) if isinstance(each, list) else each["content"] == "" for each in conversation)


# Control tokens in what people write. Characters for private use stand around each, so that a chat template passes them
# on and they can still be told from those that the template writes.
_START, _END = "\ue0c0", "\ue0c1"


@functools.lru_cache
def _token_patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern, re.Pattern]:
    """Finds any of `tokens`, the longest first, and finds them where they are marked, or a mark that is left alone."""
    plain = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"  # (?!) never matches
    return re.compile(plain), re.compile(f"{_START}({plain}){_END}|[{_START}{_END}]")


def mark_tokens(value, tokens: tuple[str, ...]):
    """Texts, also in dictionaries and lists, with the `tokens` in them marked. Marks that they hold already go."""
    if isinstance(value, str):
        unmarked = value.replace(_START, "").replace(_END, "")
        return _token_patterns(tokens)[0].sub(f"{_START}\\g<0>{_END}", unmarked)
    if isinstance(value, dict):
        return {key: mark_tokens(each, tokens) for key, each in value.items()}
    return [mark_tokens(each, tokens) for each in value] if isinstance(value, list | tuple) else value


def mark_control_tokens(tokenizer, text):
    """Texts or messages with control tokens marked, so that `encode_marked` reads them as text: special tokens, and
    added ones that the chat template writes. Marks of a turn that are no tokens, such as Llama 2's `[INST]`, are
    left alone."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    of_template = (token.content for token in added if token.content.strip() and token.content in template)
    special = (token.content for token in added if token.special)
    return mark_tokens(text, tuple(dict.fromkeys((*special, *of_template))))


def encode_marked(tokenizer, text: str) -> list[int]:
    """Ids of a text, with what `mark_tokens` marked as plain text: `ValueError` for a tokenizer that makes a token of
    its characters. No special tokens are added."""
    pieces = _token_patterns(tuple(tokenizer.added_tokens_encoder))[1].split(text)  # text, marked token, text, ...
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = encode(pieces[0])
    newline = encode("\n") if len(pieces) > 1 else []
    for number, piece in enumerate(pieces[1:], start=1):
        if not piece:  # `None` is a mark that was alone
            continue
        is_marked = number % 2 == 1
        read = functools.partial(_encode_as_text, tokenizer) if is_marked else encode
        # After a newline, since some tokenizers add a space at the beginning of a text.
        own_ids = read("\n" + piece)
        own_ids = own_ids[len(newline) :] if own_ids[: len(newline)] == newline else read(piece)
        if is_marked and tokenizer.convert_tokens_to_ids(piece) in own_ids:
            raise ValueError(f"The tokenizer reads {piece!r} as a control token even in plain text. Leave it out.")
        ids += own_ids
    return ids


def _encode_as_text(tokenizer, text: str) -> list[int]:
    """Ids of a text in which nothing is a control token. `split_special_tokens` would change the tokenizer meanwhile,
    which other threads may be using."""
    backend = tokenizer.backend_tokenizer
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    words = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return [token.id for word, _ in words for token in backend.model.tokenize(word)]
