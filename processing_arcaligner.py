"""Questions and passages to model inputs: the prompt with its slots, and what stands in them.

    passages -> segments (spaCy) -> context_embeds (sentence encoder), one row per slot
    question -> "Refer to the background document: [B] [B] ... [B]" + "Question: ..." with one [B] per slot

A slot is a segment or, with `tokens_per_slot`, a run of a segment's tokens.

The context token is never part of the tokenizer: its id is written into `input_ids` here and nowhere else, so the same
characters in somebody's text are text.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, BatchFeature, PreTrainedConfig, ProcessorMixin
from transformers.utils.chat_template_utils import encode_marked_chat

from .configuration_arcaligner import (
    DEFAULT_ENCODER,
    check_json_file,
    longest_prompt,
    resolve_base_model,
    written_whole,
)
from .encoder_arcaligner import ENCODER_FOLDER, DocumentEncoder, GivenSlots, SentenceEncoder, pad_words
from .segmentation_arcaligner import SLOT_SETTINGS, check_sentences_per_segment, check_text, check_tokens_per_slot

# Files of a processor's folder, and a key that each of them has.
_FILES = {
    "processor_config.json": "encoder_name_or_path",
    "tokenizer_config.json": "tokenizer_class",
    "tokenizer.json": "model",
}


# Arguments of `__call__` that are not the chat template's.
_SLOT_ARGUMENTS = (*SLOT_SETTINGS, "context_word_ids", "return_segments", "max_prompt_length")

BACKGROUND_LINE = "Refer to the background document: "
QUESTION_LINE = "\nQuestion: "


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template (chat_template.jinja) cannot be used: {error}.") from error


def check_conversation(given: Any) -> None:
    """Raises `ValueError` unless it is a list of messages, or a list of such lists."""
    messages = getattr(given, "messages", given)  # of transformers' `Chat`
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"A conversation is {messages!r}; expected a list of messages, at least one.")
    if any(isinstance(each, list | tuple) for each in messages):
        for each in messages:
            check_conversation(each)
        return
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'A message is {message!r}; expected {{"role": str, "content": str}}.')


# What is given, checked and converted


def embeds_tensor(values, name: str) -> torch.FloatTensor:
    """Embeddings as a float32 tensor.

    Raises:
        `ValueError`: what is no dense array of numbers, by its name.
    """
    try:
        tensor = torch.as_tensor(np.asarray(values) if isinstance(values, list | tuple) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is of type {type(values).__name__}; expected a tensor of numbers ({error})."
        ) from error
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}; expected a dense tensor.")
    return tensor.float()


def words_tensor(values, name: str) -> torch.LongTensor:
    """Words of slots as a tensor of whole numbers; errors as of `embeds_tensor`."""
    return embeds_tensor(values, name).long()


def rows_of(read: Callable, given, name: str, is_single: bool, num_rows: int) -> list:
    """An entry of `given` for each of `num_rows` questions, converted by `read`; `None` for each if none is given."""
    if given is None:
        return [None] * num_rows
    try:
        rows = [given] if is_single or isinstance(given, str | dict) else list(given)
    except TypeError:  # a number, or a tensor without dimensions
        rows = []
    if len(rows) != num_rows:
        raise ValueError(f"Got {num_rows} questions but {len(rows)} entries of {name}; each question needs its own.")
    return [read(row, f"{name} of row {number}") for number, row in enumerate(rows)]


def documents_of(row, name: str) -> list:
    """The passages of one question as a list; a single passage is wrapped."""
    if isinstance(row, str | dict):
        return [row]
    try:
        if isinstance(row, Mapping | Set):  # whose texts have other names, or no order
            raise TypeError
        return list(row)
    except TypeError as error:
        raise ValueError(f'{name} is {row!r}; expected a list of strings or {{"title": str, "text": str}}.') from error


def read_passages(
    documents, context_embeds, context_word_ids, is_single: bool, num_rows: int
) -> tuple[list[list | None], list[GivenSlots | None]]:
    """The passages and the precomputed slots of each of `num_rows` questions; `None` where there are none.

    Raises:
        `ValueError`: values of another kind, or not one entry for each question.
    """
    passages = rows_of(documents_of, documents, "`documents`", is_single, num_rows)
    embeds = rows_of(embeds_tensor, context_embeds, "`context_embeds`", is_single, num_rows)
    words = rows_of(words_tensor, context_word_ids, "`context_word_ids`", is_single, num_rows)
    given = [None if row is None else GivenSlots(row, ids) for row, ids in zip(embeds, words, strict=True)]
    return passages, given


def check_question(question) -> None:
    """Raises `ValueError` unless the question is a text that is not empty."""
    if not isinstance(question, str):
        raise ValueError(f"A question is of type {type(question).__name__}; expected a string.")
    check_text(question, "The question")
    if not question.strip():
        raise ValueError("The question is empty; expected a text. Passages alone ask nothing.")


# The processor


class ArcAlignerProcessor(ProcessorMixin, DocumentEncoder):
    r"""
    Builds the inputs of an [`ArcAlignerForCausalLM`] from questions and passages.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The backbone's.
        encoder_name_or_path (`str`, defaults to all-MiniLM-L6-v2): Sentence encoder, for sentence-transformers.
        encoder_hidden_size (`int`, defaults to 384): Its width `d_r`.
        encoder_dtype (`str`, defaults to `"float32"`):
            What it computes in. `"bfloat16"` is twice as fast on CPUs with AMX, and no faster on others; `"auto"` is
            bfloat16 on CPUs with AMX and float32 elsewhere.
        context_token (`str`, defaults to `"<context>"`): How a slot is shown when ids are decoded.
        context_token_id (`int`, *optional*): Id of a slot, outside of the tokenizer's. Default: `len(tokenizer)`.
        sentences_per_segment (`int` or `float`, defaults to 1): 0.5, 1 or n sentences a slot (the paper's 12x, 24x,
        72x).
        spacy_model (`str`, defaults to `"en"`): Language code for rule-based sentences, or an installed spaCy pipeline.
        tokens_per_slot (`int` or `"segment"`, defaults to `"segment"`):
            Beyond the paper: a segment becomes several slots of about this many tokens each, pooled from one reading of
            the segment by the encoder. `"segment"` is one slot per segment, as in the paper. Can be given per call.
        trained_tokens_per_slot (`list`, *optional*): The rates that the aligner has learned; others give a warning.
        context_words (`bool`, defaults to `False`):
            Whether the slots' own tokens are handed to the model, as an aligner with `word_parts` needs them.
        max_prompt_length (`int`, *optional*):
            The positions that the backbone reads. Passages with more slots are refused before they are encoded.
        trained_encoder (`bool`, defaults to `False`):
            Whether the encoder was trained along: the checkpoint's folder `encoder`, for sentence-transformers as well,
            holds LoRA weights that are added to it.
        chat_template (`str`, *optional*): Default: the tokenizer's.

    Raises:
        `ValueError`: a setting of another type, an impossible `sentences_per_segment` or `tokens_per_slot`.
    """

    def __init__(
        self,
        tokenizer=None,
        encoder_name_or_path: str = DEFAULT_ENCODER,
        encoder_hidden_size: int = 384,
        context_token: str = "<context>",
        context_token_id: int | None = None,
        sentences_per_segment: int | float = 1,
        spacy_model: str = "en",
        tokens_per_slot: int | str = "segment",
        trained_tokens_per_slot: list[int | str] | None = None,
        context_words: bool = False,
        trained_encoder: bool = False,
        max_prompt_length: int | None = None,
        chat_template: str | None = None,
        encoder_dtype: str = "float32",
    ):
        names = {"encoder_name_or_path": encoder_name_or_path, "spacy_model": spacy_model}
        sizes = {"encoder_hidden_size": encoder_hidden_size, "context_token_id": context_token_id}
        sizes |= {"max_prompt_length": max_prompt_length}
        for name, value in (names | sizes).items():
            if not isinstance(value, str if name in names else int | None):
                raise ValueError(f"`{name}` is {value!r}; expected {'a name' if name in names else 'a number'}.")
        check_sentences_per_segment(sentences_per_segment)
        for rate in (tokens_per_slot, *(trained_tokens_per_slot or ())):
            check_tokens_per_slot(rate)
        self.encoder_name_or_path = encoder_name_or_path
        self.encoder_hidden_size = encoder_hidden_size
        self.context_token = context_token
        self.context_token_id = len(tokenizer) if context_token_id is None else context_token_id
        self.sentences_per_segment = sentences_per_segment
        self.spacy_model = spacy_model
        self.tokens_per_slot = tokens_per_slot
        self.trained_tokens_per_slot = trained_tokens_per_slot
        self.context_words = context_words
        self.max_prompt_length = max_prompt_length
        self.trained_encoder = trained_encoder
        self.encoder_dtype = encoder_dtype
        self.encoder = SentenceEncoder(encoder_name_or_path, dtype=encoder_dtype)
        self.auto_map = {"AutoProcessor": "processing_arcaligner.ArcAlignerProcessor"}
        super().__init__(tokenizer, chat_template=chat_template or tokenizer.chat_template)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As for any processor. The code of this class is used, so no remote code is run."""
        kwargs.setdefault("trust_remote_code", False)
        kwargs.setdefault("config", PreTrainedConfig())  # else the tokenizer reads the aligner's, and complains of it
        processor = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if processor.trained_encoder:
            processor.load_trained_encoder(pretrained_model_name_or_path, kwargs.get("revision"))
        return processor

    def save_pretrained(self, save_directory, **kwargs):
        """As for any processor; a trained encoder is written to the folder `encoder`."""
        with written_whole(save_directory, last="processor_config.json") as folder:
            if self.trained_encoder:
                self.encoder.save(Path(folder, ENCODER_FOLDER))
            written = super().save_pretrained(folder, **kwargs)
        return [str(Path(save_directory, Path(each).relative_to(folder))) for each in written]

    def slot_prefix_store(self, model, max_bytes: int = 2**30, folder: str | Path | None = None):
        """Keeps the slot prefixes of passages for further questions; arguments as for [`SlotPrefixStore`]."""
        from .prefix_store_arcaligner import SlotPrefixStore  # which a processor alone does not need

        return SlotPrefixStore(model, self, max_bytes, folder)

    @classmethod
    def get_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads `processor_config.json`, without which transformers would take the defaults.

        Raises:
            `ValueError`: a file that is missing or broken, by its name.
        """
        if (folder := Path(pretrained_model_name_or_path)).is_dir():
            for name, key in _FILES.items():
                if (path := folder / name).is_file() or name == "tokenizer_config.json":
                    check_json_file(path, key)
            if not list(folder.glob("tokenizer.*")) + list(folder.glob("vocab.*")):
                raise ValueError(f"{folder} has no tokenizer.json. Save the processor again, or download it again.")
            try:
                [path.read_text(encoding="utf-8") for path in folder.glob("chat_template.jinja")]
            except UnicodeDecodeError as error:
                raise ValueError(f"{folder / 'chat_template.jinja'} is not UTF-8 text ({error}).") from error
        settings, kwargs = super().get_processor_dict(pretrained_model_name_or_path, **kwargs)
        if "encoder_name_or_path" not in settings:
            raise ValueError(
                f"{pretrained_model_name_or_path} has no processor_config.json, which says how passages become slots. "
                "Write it there with `processor.save_pretrained`."
            )
        return settings, kwargs

    @classmethod
    def from_base_model(cls, base_model: str, **settings: Any) -> "ArcAlignerProcessor":
        """A processor around the tokenizer of a base model, by name or path; `settings` as in `__init__`."""
        name = resolve_base_model(base_model)
        settings.setdefault("max_prompt_length", longest_prompt(AutoConfig.from_pretrained(name)))
        return cls(AutoTokenizer.from_pretrained(name), **settings)

    def split_prompt(
        self, messages: list[dict], sanitize_control_tokens: bool = True, **kwargs: Any
    ) -> tuple[str, str]:
        """The chat template's text before and behind the slots; `kwargs` are the template's. `tokenize_prompt` reads
        control tokens in messages, such as `<|im_end|>`, as text unless `sanitize_control_tokens` is `False`.

        Raises:
            `ValueError`: a conversation without a question.
        """
        check_conversation(messages)
        mark = uuid.uuid4().hex
        if sanitize_control_tokens:
            messages = self.mark_control_tokens(messages)
        with _template_errors():
            text = super().apply_chat_template(_with_background_line(messages, mark), tokenize=False, **kwargs)
        if (times := text.count(mark)) != 1:
            raise ValueError(f"The chat template writes the first user message {times} times; expected it once.")
        before, after = text.split(mark)
        return before, after

    @property
    def model_input_names(self) -> list[str]:
        names = [*self.tokenizer.model_input_names, "context_embeds"]
        return [*names, "context_word_ids"] if self.context_words else names

    def plain_prompt(self, question: str, sanitize_control_tokens: bool = True) -> tuple[str, str]:
        """The text before and behind the slots of a question without a chat template; see `split_prompt`.

        Raises:
            `ValueError`: an empty question, or something else than text.
        """
        check_question(question)
        if sanitize_control_tokens:
            question = self.mark_control_tokens(question)
        return BACKGROUND_LINE, QUESTION_LINE + question

    def tokenize_prompt(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a part of a prompt.

        Raises:
            `ValueError`: a text that the tokenizer turns into the context token's id.
        """
        ids = self.tokenizer(text)["input_ids"] if add_special_tokens else encode_marked_chat(self.tokenizer, text)
        if self.context_token_id in ids:
            raise ValueError(
                f"The tokenizer reads {self.tokenizer.convert_ids_to_tokens(self.context_token_id)!r} as id "
                f"{self.context_token_id}, which is `context_token_id` and marks slots. Set it to "
                f"{len(self.tokenizer)} or more in processor and model, so that no text can become a slot."
            )
        return ids

    def __call__(
        self,
        text: str | list[str] | None = None,
        documents: Sequence | None = None,
        context_embeds: Any = None,
        return_segments: bool | None = None,
        max_slots: int | None = None,
        slot_policy: str | None = None,
        context_word_ids: Any = None,
        **kwargs: Any,
    ) -> BatchFeature:
        r"""
        Args:
            text (`str` or `list[str]`):
                With documents or embeddings: the questions. Without: plain text, tokenized as it is.
            documents (`str`, `dict`, or list of them, *optional*):
                Passages of a question, each a string or `{"title", "text"}`; for a list of questions a list of such
                lists. An empty list, or only white space, gives one slot with the encoding of the empty string.
            context_embeds (tensor or array of shape `(num_slots, encoder_hidden_size)`, or a list of them, *optional*):
                Precomputed embeddings, one per segment. Neither encoder nor segmenter is needed then.
            context_word_ids (tensor of shape `(num_slots, max_words)`, or a list of them, *optional*):
                The tokens of the slots of `context_embeds`, -1 behind them, where the aligner reads them.
            return_segments (`bool`, *optional*):
                Adds `segments` (a list of [`Segment`] per row) and `statistics` (per row: `tokens` of the passages,
                `slots`, and the measured `compression_rate`; with `max_slots` also how many segments are `merged` and
                `dropped`). Remove both before passing the rest to the model.
            max_slots (`int`, *optional*): Maximum number of slots of a question. Default: one per segment.
            slot_policy (`str`, defaults to `"drop"`):
                What happens to further segments. `"drop"`: the first ones are kept, so documents come best first.
                `"merge"`: neighbors in a document share a slot, evenly, none longer than the encoder reads; where
                that is not enough, the last are dropped. Precomputed embeddings can be dropped, not merged.
            kwargs:
                `tokens_per_slot` and `max_prompt_length`, as in `__init__`. `sanitize_control_tokens` (default: `True`
                with documents or embeddings): the tokenizer's special tokens, such as `<|im_end|>`, are text where they
                stand in a question, as they are in documents.
                The tokenizer's: `return_tensors`, `padding` (on by default for tensors), `padding_side`, `truncation`,
                `max_length`, `add_special_tokens`. Truncation cuts text behind the slots, never slots.

        Returns:
            [`BatchFeature`]: `input_ids` and `attention_mask` (batch, seq_len); with slots `context_embeds`
            (batch, max_slots, encoder_hidden_size), rows padded with zeros at the end.

        Raises:
            `ValueError`: an empty question, documents or embeddings of the wrong kind, number or width, slots that
                `max_length` would cut.
        """
        if not isinstance(text, str) and not (isinstance(text, list | tuple) and text):
            raise ValueError(f"`text` is {text!r}; expected a question, or a list of questions.")
        sanitize_control_tokens = kwargs.pop("sanitize_control_tokens", None)
        if documents is None and context_embeds is None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _SLOT_ARGUMENTS}
            if sanitize_control_tokens:  # of `apply_chat_template`
                kwargs["sanitize_control_tokens"] = True
            for each in [text] if isinstance(text, str) else text:
                if isinstance(each, str):
                    check_text(each, "The prompt")
            return BatchFeature(dict(self.tokenizer(text, **kwargs)), skip_tensor_conversion=None)
        is_single = not isinstance(text, list | tuple)
        questions = [text] if is_single else text
        prompts = [self.plain_prompt(question, sanitize_control_tokens is not False) for question in questions]
        kwargs = {"add_special_tokens": True, "return_segments": return_segments} | kwargs
        kwargs |= {"max_slots": max_slots, "slot_policy": slot_policy, "context_word_ids": context_word_ids}
        return self._with_slots(prompts, is_single, documents, context_embeds, **kwargs)

    def _with_slots(
        self, prompts: list[tuple[str, str]], is_single: bool, documents, context_embeds, **kwargs
    ) -> BatchFeature:
        """Batch of prompts, each cut in two where its slots belong."""
        add_special_tokens = kwargs.pop("add_special_tokens", False)
        slots = {name: kwargs.pop(name, None) for name in _SLOT_ARGUMENTS}
        settings = {name: slots[name] for name in SLOT_SETTINGS}
        passages, given = read_passages(documents, context_embeds, slots["context_word_ids"], is_single, len(prompts))
        texts = [
            (self.tokenize_prompt(before, add_special_tokens), self.tokenize_prompt(after)) for before, after in prompts
        ]
        if context_embeds is None:
            longest = slots["max_prompt_length"] or self.max_prompt_length
            if not isinstance(longest, int | None):
                raise ValueError(f"`max_prompt_length` is {longest!r}; expected a number.")
            room = longest and [longest - len(before) - len(after) for before, after in texts]
            rows = self.encode_batch(passages, **settings, room=room)
        else:
            rows = self.use_given(passages, given, **settings)
        ids = [
            before + [self.context_token_id] * len(row.context_embeds) + after
            for (before, after), row in zip(texts, rows, strict=True)
        ]
        features = self._pad(ids, rows, **kwargs)
        if slots["return_segments"]:
            features["segments"] = features["statistics"] = [None] * len(rows)
        if slots["return_segments"] and documents is not None:
            has_budget = slots["max_slots"] is not None
            features["segments"] = [row.segments for row in rows]
            features["statistics"] = [
                self.statistics(each, row, has_budget) for each, row in zip(passages, rows, strict=True)
            ]
        return features

    def _pad(self, ids, rows, *, truncation=False, max_length=None, return_tensors=None, padding=None, **kwargs):
        if truncation and max_length is not None:
            for row, row_ids in enumerate(ids):
                last_slot = len(row_ids) - 1 - row_ids[::-1].index(self.context_token_id)
                if last_slot >= max_length:
                    raise ValueError(
                        f"`max_length` {max_length} would cut slots: those of row {row} end at position "
                        f"{last_slot + 1}. Raise it, pass fewer documents, or merge more sentences into a slot "
                        "(`sentences_per_segment`)."
                    )
            ids = [row_ids[:max_length] for row_ids in ids]
        if padding is None:
            padding = return_tensors is not None
        features = self.tokenizer.pad(
            {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]},
            padding=padding,
            max_length=max_length,
            return_tensors=return_tensors,
            **kwargs,
        )
        # (batch, max_slots, encoder_hidden_size)
        slots = {
            "context_embeds": torch.nn.utils.rnn.pad_sequence([row.context_embeds for row in rows], batch_first=True)
        }
        if rows[0].context_word_ids is not None:
            slots["context_word_ids"] = pad_words([row.context_word_ids for row in rows])
        if return_tensors != "pt":
            slots = {name: x.numpy() if return_tensors == "np" else x.tolist() for name, x in slots.items()}
        return BatchFeature({**features, **slots})

    def apply_chat_template(
        self,
        conversation: list[dict] | list[list[dict]],
        chat_template: str | None = None,
        documents: Sequence | None = None,
        context_embeds: Any = None,
        sanitize_control_tokens: bool | None = None,
        tokenize: bool = False,
        return_dict: bool = False,
        return_tensors: str | None = None,
        processor_kwargs: dict | None = None,
        **kwargs: Any,
    ):
        r"""
        As for any processor; with `documents=` or `context_embeds=` the first user message becomes

            Refer to the background document: [B] [B] ... [B]
            Question: {the message}

        Args:
            conversation (`list[dict]` or a list of them): Messages with `role` and `content`.
            documents, context_embeds, sanitize_control_tokens:
                As in [`~ArcAlignerProcessor.__call__`], documents and embeddings with one entry a conversation. Control
                tokens in messages are text by default where there are documents or embeddings.
            processor_kwargs (`dict`, *optional*):
                For the tokenizer: `padding`, `padding_side`, `truncation`, `max_length`. `max_slots` and `slot_policy`
                may stand here as well.
            kwargs:
                `context_word_ids`, `return_segments`, `max_slots`, `slot_policy`, `tokens_per_slot` and
                `max_prompt_length` as in [`~ArcAlignerProcessor.__call__`]; the rest is for the template, such as
                `add_generation_prompt=True`.

        Returns:
            `BatchFeature` (`tokenize` and `return_dict`), the `input_ids` alone (`tokenize`), or the text.
        """
        check_conversation(conversation)
        if sanitize_control_tokens is None:
            sanitize_control_tokens = tokenize and (documents is not None or context_embeds is not None)
        slots = {name: kwargs.pop(name) for name in _SLOT_ARGUMENTS if name in kwargs}
        if documents is None and context_embeds is None:
            with _template_errors():
                return super().apply_chat_template(
                    conversation,
                    chat_template,
                    sanitize_control_tokens=sanitize_control_tokens,
                    tokenize=tokenize,
                    return_dict=return_dict,
                    return_tensors=return_tensors,
                    processor_kwargs=processor_kwargs,
                    **kwargs,
                )
        is_single = isinstance(conversation[0], dict)
        conversations = [conversation] if is_single else conversation
        kwargs |= {"chat_template": chat_template, "sanitize_control_tokens": sanitize_control_tokens}
        prompts = [self.split_prompt(messages, **kwargs) for messages in conversations]
        features = self._with_slots(
            prompts,
            is_single,
            documents,
            context_embeds,
            return_tensors=return_tensors,
            **{**slots, **(processor_kwargs or {})},
        )
        if not tokenize:
            texts = [
                before + self.context_token * row.count(self.context_token_id) + after
                for (before, after), row in zip(prompts, _lists(features["input_ids"]), strict=True)
            ]
            return texts[0] if is_single else texts
        return features if return_dict else features["input_ids"]

    # Ids to text

    def decode(self, token_ids, **kwargs) -> str | list[str]:
        """The tokenizer's `decode`, with slots shown as the context token."""
        token_ids = _lists(token_ids)
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        if token_ids and isinstance(token_ids[0], list):
            return [self.decode(row, **kwargs) for row in token_ids]
        text = ""
        for is_slot, run in groupby(token_ids, lambda token_id: token_id == self.context_token_id):
            ids = list(run)
            text += self.context_token * len(ids) if is_slot else self.tokenizer.decode(ids, **kwargs)
        return text

    def batch_decode(self, sequences, **kwargs) -> list[str]:
        """`decode` of each row."""
        return [self.decode(row, **kwargs) for row in sequences]


def _lists(values):
    return values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else values


def _with_background_line(messages: list[dict], mark: str) -> list[dict]:
    """The conversation with the background line, `mark` for its slots, before its first user message."""
    for position, message in enumerate(messages):
        if message["role"] != "user":
            continue
        content = message["content"]
        if not isinstance(content, str):
            parts = content if isinstance(content, list | tuple) else []
            texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError(
                    f'A user message is {content!r}; expected a text or [{{"type": "text", "text": str}}].'
                )
            content = "".join(texts)
        check_question(content)
        asked = {**message, "content": BACKGROUND_LINE + mark + QUESTION_LINE + content}
        return [*messages[:position], asked, *messages[position + 1 :]]
    raise ValueError("The conversation has no user message, so there is no question to put the documents before.")


ArcAlignerProcessor.register_for_auto_class("AutoProcessor")

__all__ = ["ArcAlignerProcessor"]
