"""Questions and passages to model inputs: the prompt with its slots, and the embeddings of the slots.

    passages -> segments (spaCy) -> context_embeds (sentence encoder), one row per slot
    question -> "Refer to the background document: [B] [B] ... [B]" + "Question: ..." with one [B] per slot

The context token is never part of the tokenizer: its id is written into `input_ids` here and nowhere else, so the same
characters in a user's text are text.
"""

import math
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any

import jinja2
from torch.nn import Parameter
from transformers import AutoConfig, AutoTokenizer, BatchFeature, PreTrainedConfig, ProcessorMixin
from transformers.utils import to_py_obj

from .configuration_arcaligner import DEFAULT_ENCODER, PASSAGE_ATTENTIONS, SLOT_SETTINGS, is_number, longest_prompt
from .encoder_arcaligner import (
    ENCODER_FOLDER,
    EncodedDocuments,
    SentenceEncoder,
    SlotEncoder,
    pad_slots,
    passages_of_questions,
)
from .kv_cache_arcaligner import PassageCache
from .loading_arcaligner import (
    TEXT_FILES,
    check_processor_files,
    check_processor_is_readable,
    find_model,
    write_folder_atomically,
    write_processor_digests,
)
from .segmentation_arcaligner import check_num_tokens, check_sentences_per_segment, check_tokens_per_slot
from .tokenization_arcaligner import (
    check_question,
    check_text,
    encode_marked,
    has_empty_message,
    mark_control_tokens,
    with_plain_texts,
)

# Arguments of `__call__` that are not the chat template's.
_SLOT_ARGUMENTS = (*SLOT_SETTINGS, "context_word_ids", "context_passage_ids", "return_segments")

BACKGROUND_LINE = "Refer to the background document: "

QUESTION_LINE = "\nQuestion: "


class ArcAlignerProcessor(ProcessorMixin):
    r"""
    Builds the inputs of an [`ArcAlignerForCausalLM`] from questions and passages.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The base model's.
        encoder_name_or_path (`str`, defaults to all-MiniLM-L6-v2): Sentence encoder, for sentence-transformers.
        encoder_hidden_size (`int`, defaults to 384): The encoder's width `d_r`.
        encoder_dtype (`str`, defaults to `"float32"`):
            The encoder's dtype. `"bfloat16"` is twice as fast as `"float32"` on CPUs with AMX; `"auto"` measures which
            one is faster.
        context_token (`str`, defaults to `"<context>"`): How a slot is shown when ids are decoded.
        context_token_id (`int`, *optional*): Id of a slot, outside of the tokenizer's. Default: `len(tokenizer)`.
        sentences_per_segment (`int` or `float`, defaults to 1):
            0.5, 1 or n sentences. The paper's compression is 12x with 0.5, 24x with 1 and 72x with 3.
        spacy_model (`str`, defaults to `"en"`): Language code for rule-based sentences, or an installed spaCy pipeline.
        tokens_per_slot (`int` or `"segment"`, defaults to `"segment"`):
            Beyond the paper: a segment becomes several slots of about this many tokens each, pooled from one pass
            through the encoder. `"segment"` is one slot per segment, as in the paper. Can be given per call.
        trained_tokens_per_slot (`list`, *optional*):
            The values of `tokens_per_slot` that the aligner was trained with; others give a warning.
        context_words (`bool`, defaults to `False`):
            Whether the model also gets the token ids of the slots, which an aligner with `word_parts` needs.
        max_prompt_length (`int`, *optional*):
            Maximum number of positions of the backbone. Passages with more slots are refused before they are encoded.
        max_passage_tokens (`int`, defaults to 360), passage_tokens (`int`, defaults to 256):
            A document of more than `max_passage_tokens` tokens is cut into passages of at most `passage_tokens`, of
            which the top-ranked ones are used. Files of a corpus are cut into such passages, too. The defaults are
            about 250 and 180 English words, selected for the shipped aligner.
        passage_attention (`"joint"` or `"separate"`, defaults to `"joint"`):
            As in [`ArcAlignerConfig`]; with `"separate"` the model also gets the passage of each slot.
        no_answer (`str`, *optional*):
            The sentence that replaces an answer if the passages do not contain one: learned by the aligner, or returned
            if the answerability is below `min_confidence`.
        copy_bonus (`float`, defaults to 0): Bias of [`PassageCopyLogitsProcessor`] towards words of the passages.
        trained_encoder (`bool`, defaults to `False`):
            Whether the encoder was trained with the aligner: the checkpoint's folder `encoder` has its LoRA weights.
        chat_template (`str`, *optional*): Default: the tokenizer's.

    Raises:
        `ValueError`: a setting of the wrong type, an invalid `sentences_per_segment` or `tokens_per_slot`.
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
        passage_attention: str = "joint",
        no_answer: str | None = None,
        copy_bonus: float = 0.0,
        max_prompt_length: int | None = None,
        max_passage_tokens: int = 360,
        passage_tokens: int = 256,
        chat_template: str | None = None,
        encoder_dtype: str = "float32",
    ):
        names = {"encoder_name_or_path": encoder_name_or_path, "spacy_model": spacy_model}
        sizes = {"encoder_hidden_size": encoder_hidden_size, "context_token_id": context_token_id}
        sizes |= {"max_prompt_length": max_prompt_length}
        for name, value in (names | sizes).items():
            if not isinstance(value, str if name in names else int | None):
                raise ValueError(
                    f"`{name}` is {value!r}; expected {'a string' if name in names else 'a whole number or None'}."
                )
        for name, value in {"max_passage_tokens": max_passage_tokens, "passage_tokens": passage_tokens}.items():
            check_num_tokens(name, value)
        self.max_passage_tokens, self.passage_tokens = max_passage_tokens, passage_tokens
        check_sentences_per_segment(sentences_per_segment)
        for rate in (tokens_per_slot, *(trained_tokens_per_slot or ())):
            check_tokens_per_slot(rate)
        self.context_token = context_token
        self.context_token_id = len(tokenizer) if context_token_id is None else context_token_id
        self.sentences_per_segment, self.spacy_model = sentences_per_segment, spacy_model
        self.tokens_per_slot, self.trained_tokens_per_slot = tokens_per_slot, trained_tokens_per_slot
        self.context_words, self.max_prompt_length = context_words, max_prompt_length
        if passage_attention not in PASSAGE_ATTENTIONS:
            raise ValueError(
                f"`passage_attention` is {passage_attention!r}; expected one of {', '.join(PASSAGE_ATTENTIONS)}."
            )
        self.passage_attention = passage_attention
        self.check_copy_bonus(copy_bonus)
        self.no_answer, self.copy_bonus = no_answer, copy_bonus
        self.encoder_name_or_path, self.encoder_hidden_size = encoder_name_or_path, encoder_hidden_size
        self.encoder_dtype, self.trained_encoder = encoder_dtype, trained_encoder
        self.encoder = SentenceEncoder(encoder_name_or_path, dtype=encoder_dtype)  # reads files on its first use
        self.auto_map = {"AutoProcessor": "processing_arcaligner.ArcAlignerProcessor"}
        super().__init__(tokenizer, chat_template=chat_template or tokenizer.chat_template)

    @staticmethod
    def check_copy_bonus(copy_bonus: Any) -> None:
        """Raise `ValueError` unless `copy_bonus` is a finite number of at least 0."""
        if not (is_number(copy_bonus, Real) and 0 <= copy_bonus < math.inf):
            raise ValueError(f"`copy_bonus` is {copy_bonus!r}; expected a finite number of at least 0, such as 8.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a processor, as for any processor. The code of this class is used, so no remote code is run.

        Raises:
            `ValueError`: files that are missing, broken or not those that the checkpoint was saved with.
            `OSError`: a checkpoint that is not on this machine and cannot be downloaded.
        """
        for name in ("dtype", "torch_dtype"):  # of the model: `pipeline` passes them to all, and no file can hold them
            kwargs.pop(name, None)
        kwargs.setdefault("trust_remote_code", False)
        # Else the tokenizer reads the aligner's configuration, and warns about it.
        kwargs.setdefault("config", PreTrainedConfig())
        download = {key: kwargs[key] for key in ("cache_dir", "local_files_only", "revision", "token") if key in kwargs}
        subfolder = kwargs.pop("subfolder", None) or ""
        files = (*TEXT_FILES, Path(subfolder, ENCODER_FOLDER, "*").as_posix())
        folder = find_model("checkpoint", str(pretrained_model_name_or_path), files, **download) / subfolder
        check_processor_files(folder)
        try:
            processor = super().from_pretrained(folder, *args, **kwargs)
        except Exception as error:
            if type(error) is not Exception:  # what the tokenizers library raises
                raise
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be used ({error}). Download it again.") from error
        if processor.trained_encoder:
            processor.load_trained_encoder(folder)
        return processor

    def save_pretrained(self, save_directory, **kwargs):
        """Save the processor, as for any processor. A trained encoder is written to the folder `encoder`. If
        `save_directory` has an aligner, the `digests` in its `config.json` are updated."""
        with write_folder_atomically(save_directory, last="processor_config.json") as folder:
            if self.trained_encoder:
                self.encoder.save(Path(folder, ENCODER_FOLDER))
            written = super().save_pretrained(folder, **kwargs)
            write_processor_digests(Path(save_directory), folder)
        return [str(Path(save_directory, Path(path).relative_to(folder))) for path in written]

    @classmethod
    def get_processor_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read `processor_config.json`. If it is missing, raise an error, where transformers would use defaults.

        Raises:
            `ValueError`: a file that is missing or broken; the message names it.
        """
        if (folder := Path(pretrained_model_name_or_path)).is_dir():
            check_processor_is_readable(folder)
        settings, kwargs = super().get_processor_dict(pretrained_model_name_or_path, **kwargs)
        if "encoder_name_or_path" not in settings:
            raise ValueError(
                f"{pretrained_model_name_or_path} has no processor_config.json, or the file lacks "
                "`encoder_name_or_path`. Download the checkpoint again, or save the processor there with "
                "`processor.save_pretrained`."
            )
        settings.pop("answer_probe", None)  # of checkpoints of 0.2, which the model reads
        return settings, kwargs

    @classmethod
    def from_base_model(cls, base_model: str, **settings: Any) -> "ArcAlignerProcessor":
        """A processor around the tokenizer of a base model, by name or path; `settings` as in `__init__`."""
        folder = find_model("base model", base_model, TEXT_FILES)
        settings.setdefault("max_prompt_length", longest_prompt(AutoConfig.from_pretrained(folder)))
        return cls(AutoTokenizer.from_pretrained(folder), **settings)

    def load_trained_encoder(self, checkpoint: str | Path) -> None:
        """Use the encoder that was trained with the aligner in the folder `checkpoint`. It is loaded on first use."""
        self.encoder = SentenceEncoder.from_checkpoint(checkpoint, self.encoder_name_or_path, self.encoder_dtype)
        self.trained_encoder = True

    def train_encoder(self, lora_r: int) -> list[Parameter]:
        """Call [`SentenceEncoder.add_trainable_lora`]. From then on the encoder is saved with the processor."""
        weights = self.encoder.add_trainable_lora(lora_r)
        self.trained_encoder = True
        return weights

    @property
    def slot_encoder(self) -> SlotEncoder:
        """Makes slots from passages, with the current settings of the processor."""
        return SlotEncoder(**{setting.name: getattr(self, setting.name) for setting in fields(SlotEncoder)})

    def encode_documents(self, documents: Sequence[str | dict], **settings: Any) -> EncodedDocuments:
        """Encode the passages of one question to slots; `settings` are `max_slots` and `tokens_per_slot`."""
        return self.slot_encoder.encode_batch([documents], **settings)[0]

    def split_prompt(
        self, messages: list[dict], sanitize_control_tokens: bool = True, **kwargs: Any
    ) -> tuple[str, str]:
        """The chat template's text before and after the slots; `kwargs` are the template's. Control tokens in messages,
        such as `<|im_end|>`, become text in `tokenize_prompt` unless `sanitize_control_tokens` is `False`.

        Raises:
            `ValueError`: a conversation without a question.
        """
        return self.split_prompts([messages], sanitize_control_tokens, **kwargs)[0]

    def split_prompts(
        self, conversations: list[list[dict]], sanitize_control_tokens: bool = True, **kwargs: Any
    ) -> list[tuple[str, str]]:
        """As `split_prompt`, for several conversations together, which takes less time than one after another."""
        conversations = with_plain_texts(conversations)
        # Templates may trim or repeat messages, so a mark that no text contains shows the place of the slots.
        mark = uuid.uuid4().hex
        if sanitize_control_tokens:
            conversations = mark_control_tokens(self.tokenizer, conversations)
        marked = [_with_background_line(messages, mark) for messages in conversations]
        prompts = [text.split(mark) for text in self._apply_template(marked, tokenize=False, **kwargs)]
        for parts in prompts:
            if (times := len(parts) - 1) != 1:
                raise ValueError(
                    f"The chat template writes the first user message {times} times; expected once, because the slots "
                    "are in this message. Use another chat template."
                )
        return [(before, after) for before, after in prompts]

    @property
    def model_input_names(self) -> list[str]:
        names = [*self.tokenizer.model_input_names, "context_embeds"]
        names += ["context_word_ids"] * self.context_words
        return names + ["context_passage_ids"] * (self.passage_attention == "separate")

    def plain_prompt(self, question: str, sanitize_control_tokens: bool = True) -> tuple[str, str]:
        """The text before and after the slots of a question without a chat template; see `split_prompt`.

        Raises:
            `ValueError`: an empty question, or one that is not text.
        """
        check_question(question)
        if sanitize_control_tokens:
            question = mark_control_tokens(self.tokenizer, question)
        return BACKGROUND_LINE, QUESTION_LINE + question

    def tokenize_prompt(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a part of a prompt.

        Raises:
            `ValueError`: a text that the tokenizer turns into the context token's id.
        """
        return self.tokenize_prompts([text], add_special_tokens)[0]

    def tokenize_prompts(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        """As `tokenize_prompt`, for several parts together, which takes less time than one after another."""
        ids = self.tokenizer(texts)["input_ids"] if add_special_tokens else encode_marked(self.tokenizer, texts)
        if any(self.context_token_id in text_ids for text_ids in ids):
            raise ValueError(
                f"`context_token_id` is {self.context_token_id}, which is also the tokenizer's id of "
                f"{self.tokenizer.convert_ids_to_tokens(self.context_token_id)!r}, so text would become a slot. Set "
                f"`context_token_id` to {len(self.tokenizer)} or more in the processor and in the model."
            )
        return ids

    def prompt_ids(self, question: str | list[dict], **kwargs: Any) -> tuple[list[int], list[int]]:
        """Ids before and after the slots of a question or chat. With a chat template, `kwargs` are those of
        `split_prompt`; `add_generation_prompt` is on."""
        has_template = self.chat_template is not None
        if has_template:
            messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
            before, after = self.split_prompt(messages, **{"add_generation_prompt": True, **kwargs})
        else:
            before, after = self.plain_prompt(question)
        return self.tokenize_prompt(before, add_special_tokens=not has_template), self.tokenize_prompt(after)

    def passage_cache(self, model, **options) -> PassageCache:
        """A cache of per-passage keys and values, shared across questions; `options` as for [`PassageCache`]."""
        return PassageCache(model, self, **options)

    def slot_prefix_store(self, model, **options) -> PassageCache:
        """The name of `passage_cache` in version 0.2."""
        message = "`slot_prefix_store` is now called `passage_cache`; the old name will be removed in the next release."
        warnings.warn(message, FutureWarning, stacklevel=2)
        return self.passage_cache(model, **options)

    def __call__(
        self,
        text: str | list[str] | None = None,
        documents: Sequence | None = None,
        context_embeds: Any = None,
        sanitize_control_tokens: bool | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        r"""
        Make the inputs of the model from questions and their passages.

        Args:
            text (`str` or `list[str]`):
                With documents or embeddings: the questions. Without: plain text, tokenized unchanged.
            documents (`str`, `dict`, or list of them, *optional*):
                Passages of a question, each a string or `{"title", "text"}`; for a list of questions, a list of such
                lists. An empty list, or only white space, gives one slot with the encoding of the empty string.
            context_embeds (tensor or array of shape `(num_slots, encoder_hidden_size)`, or a list of them, *optional*):
                Instead of documents: precomputed embeddings. Then neither encoder nor spaCy is needed.
            context_word_ids (tensor of shape `(num_slots, max_words)`, or a list of them, *optional*):
                The token ids of the slots of `context_embeds`, -1 after them, if the aligner uses them.
            context_passage_ids (tensor of shape `(num_slots,)`, or a list of them, *optional*):
                The number of the passage of each slot of `context_embeds`, with independent passages. Default: all
                slots are of one passage.
            return_segments (`bool`, *optional*):
                Adds `segments` (a list of [`Segment`] per row) and `statistics` (per row: `tokens` of the passages,
                `slots`, and `compression_rate`, the measured tokens per slot; with `max_slots` also how many segments
                are `dropped`). Remove both before passing the rest to the model. Not available for precomputed
                embeddings.
            max_slots (`int`, *optional*): Maximum number of slots of a question. The first ones are kept, so put the
                best documents first. Default: as many as the backbone has positions for. A question about 1,000
                passages (5,990 slots) takes 3.5 GB of memory.
            tokens_per_slot (`int` or `"segment"`, *optional*): As in `__init__`.
            sanitize_control_tokens (`bool`, *optional*, defaults to `True` with documents or embeddings):
                Whether special tokens of the tokenizer, such as `<|im_end|>`, are plain text in a question, too.
            kwargs:
                The tokenizer's: `return_tensors`, `padding` (on by default for tensors), `padding_side`, `truncation`,
                `max_length`, `add_special_tokens`. Truncation cuts text after the slots, never slots.

        Returns:
            [`BatchFeature`]: `input_ids` and `attention_mask` (batch, seq_len); with slots `context_embeds`
            (batch, max_slots, encoder_hidden_size), rows padded with zeros at the end; where the aligner needs them,
            `context_word_ids` (batch, max_slots, max_words) and `context_passage_ids` (batch, max_slots).

        Raises:
            `ValueError`: an empty question, documents or embeddings of the wrong kind, number or width, slots that
                `max_length` would cut.
        """
        if not isinstance(text, str) and not (isinstance(text, list | tuple) and text):
            raise ValueError(f"`text` is {text!r}; expected a question, or a list of questions.")
        is_single = isinstance(text, str)
        questions = [text] if is_single else text
        if documents is None and context_embeds is None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _SLOT_ARGUMENTS}
            for prompt in questions:
                if isinstance(prompt, str):
                    check_text(prompt, "The prompt")
            if sanitize_control_tokens:  # in the text that a chat template made of marked messages
                # The template writes its special tokens itself; pictures and sounds are `None`.
                kwargs = {k: value for k, value in kwargs.items() if k != "add_special_tokens" and value is not None}
                features = self._pad(encode_marked(self.tokenizer, questions), **kwargs)
                is_flat = is_single and kwargs.get("return_tensors") is None
                return BatchFeature({name: rows[0] for name, rows in features.items()}) if is_flat else features
            return BatchFeature(dict(self.tokenizer(text, **kwargs)), skip_tensor_conversion=None)
        # `None` is the default, which is `True` where there are slots.
        prompts = [self.plain_prompt(question, sanitize_control_tokens is not False) for question in questions]
        return self._with_slots(prompts, is_single, documents, context_embeds, **{"add_special_tokens": True, **kwargs})

    def _with_slots(
        self,
        prompts: list[tuple[str, str]],
        is_single: bool,
        documents,
        context_embeds,
        context_word_ids=None,
        context_passage_ids=None,
        return_segments: bool | None = None,
        add_special_tokens: bool = False,
        **kwargs,
    ) -> BatchFeature:
        """Make a batch of prompts, each cut in two where its slots go."""
        settings = {name: kwargs.pop(name, None) for name in SLOT_SETTINGS}
        befores, afters = map(list, zip(*prompts, strict=True))
        # Both parts are tokenized by themselves: no token spans a slot, and the ids before the slots, on which cached
        # passages depend, are the same for every question.
        befores, afters = self.tokenize_prompts(befores, add_special_tokens), self.tokenize_prompts(afters)
        texts = list(zip(befores, afters, strict=True))
        # Positions left for slots: a prompt that is too long is refused before anything is encoded.
        slot_limits = (max_prompt_length := self.max_prompt_length) and [
            max_prompt_length - len(before) - len(after) for before, after in texts
        ]
        inputs = (documents, context_embeds, context_word_ids, context_passage_ids)
        passages = passages_of_questions(*inputs, is_single, len(prompts), self.context_words)
        rows = self.slot_encoder.encode_batch(
            passages, **settings, slot_limits=slot_limits, per_passage=self.passage_attention == "separate"
        )
        ids = [
            before + [self.context_token_id] * len(row.context_embeds) + after
            for (before, after), row in zip(texts, rows, strict=True)
        ]
        features = self._pad(ids, rows, **kwargs)
        if return_segments:
            pairs, has_budget = zip(passages, rows, strict=True), settings["max_slots"] is not None
            features["segments"] = [row.segments for row in rows]
            features["statistics"] = [
                None if documents is None else self.slot_encoder.statistics(*pair, has_budget) for pair in pairs
            ]
        return features

    def _pad(
        self,
        ids: list[list[int]],
        rows: Sequence[EncodedDocuments] = (),
        *,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        padding: bool | str | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Make a batch of the ids of prompts and, in `rows`, their slots; cut and pad it by the tokenizer's
        arguments."""
        if truncation and max_length is not None:
            for row, row_ids in enumerate(ids if rows else ()):
                last_slot = len(row_ids) - 1 - row_ids[::-1].index(self.context_token_id)
                if last_slot >= max_length:
                    raise ValueError(
                        f"`max_length` is {max_length}, which would cut slots off: row {row} has its last slot at "
                        f"position {last_slot + 1}. Raise `max_length`, pass fewer documents, or put more text into "
                        "each slot (a larger `tokens_per_slot`)."
                    )
            ids = [row_ids[:max_length] for row_ids in ids]
        features = self.tokenizer.pad(
            {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]},
            padding=return_tensors is not None if padding is None else padding,
            max_length=max_length,
            return_tensors=return_tensors,
            **kwargs,
        )
        if not rows:
            return BatchFeature(dict(features))
        slots = pad_slots(rows)
        if return_tensors == "pt":  # the tokenizer's are on the default device
            slots = {name: tensor.to(features["input_ids"].device) for name, tensor in slots.items()}
        if self.passage_attention == "joint":
            del slots["context_passage_ids"]
        if return_tensors != "pt":
            is_numpy = return_tensors == "np"
            slots = {name: tensor.numpy() if is_numpy else tensor.tolist() for name, tensor in slots.items()}
        return BatchFeature({**features, **slots})

    def apply_chat_template(
        self,
        conversation: list[dict] | list[list[dict]],
        chat_template: str | None = None,
        documents: Sequence | None = None,
        context_embeds: Any = None,
        sanitize_control_tokens: bool | None = None,
        tokenize: bool = False,
        return_tensors: str | None = None,
        **kwargs: Any,
    ):
        r"""
        Apply the chat template, as for any processor. With `documents=` or `context_embeds=`, the first user message
        becomes

            Refer to the background document: [B] [B] ... [B]
            Question: {the message}

        Args:
            conversation (`list[dict]` or a list of them): Messages with `role` and `content`.
            documents, context_embeds, sanitize_control_tokens:
                As in [`~ArcAlignerProcessor.__call__`]; documents and embeddings have one entry for each conversation.
                By default, control tokens in messages are text if there are documents or embeddings.
            kwargs:
                `context_word_ids`, `return_segments`, `max_slots` and `tokens_per_slot` as in
                [`~ArcAlignerProcessor.__call__`]. `return_dict`, `return_tensors`, and `processor_kwargs` for the
                tokenizer: `padding`, `padding_side`, `truncation`, `max_length`. The rest is for the template, such as
                `add_generation_prompt=True`.

        Returns:
            `BatchFeature` (`tokenize` and `return_dict`), the `input_ids` alone (`tokenize`), or the text.
        """
        conversation = with_plain_texts(conversation)
        if sanitize_control_tokens is None:
            sanitize_control_tokens = tokenize and (documents is not None or context_embeds is not None)
        slots = {name: kwargs.pop(name) for name in _SLOT_ARGUMENTS if name in kwargs}
        kwargs["chat_template"] = chat_template
        if documents is None and context_embeds is None:
            if sanitize_control_tokens and tokenize:
                conversation, kwargs["tools"] = mark_control_tokens(self.tokenizer, [conversation, kwargs.get("tools")])
                kwargs["processor_kwargs"] = {**(kwargs.get("processor_kwargs") or {}), "sanitize_control_tokens": True}
            if tokenize and has_empty_message(conversation):  # transformers would replace its content by an empty list
                options = {"return_tensors": return_tensors, **(kwargs.pop("processor_kwargs", None) or {})}
                return_dict = kwargs.pop("return_dict", False)
                text = self._apply_template(conversation, tokenize=False, **kwargs)
                if (text if isinstance(text, str) else text[0]).startswith(self.tokenizer.bos_token or "\0"):
                    options.setdefault("add_special_tokens", False)
                features = self(text, **options)
                return features if return_dict else features["input_ids"]
            return self._apply_template(conversation, tokenize=tokenize, return_tensors=return_tensors, **kwargs)
        return_dict = kwargs.pop("return_dict", False)
        slots |= {"return_tensors": return_tensors, **(kwargs.pop("processor_kwargs", None) or {})}
        is_single = isinstance(conversation[0], dict)
        conversations = [conversation] if is_single else conversation
        prompts = self.split_prompts(conversations, sanitize_control_tokens, **kwargs)
        features = self._with_slots(prompts, is_single, documents, context_embeds, **slots)
        if not tokenize:
            texts = [
                before + self.context_token * row.count(self.context_token_id) + after
                for (before, after), row in zip(prompts, to_py_obj(features["input_ids"]), strict=True)
            ]
            return texts[0] if is_single else texts
        return features if return_dict else features["input_ids"]

    def _apply_template(self, conversation: list, **kwargs: Any):
        """Call transformers' `apply_chat_template`."""
        try:
            return super().apply_chat_template(conversation, **kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            chats = [conversation] if isinstance(conversation[0], dict) else conversation
            if any(message["content"] is None for chat in chats for message in chat):
                raise ValueError(
                    "A message has `tool_calls`, and its `content` is None, but the chat template of this model cannot "
                    f"render such a message ({error}). Leave the message out, or set its `content` to a string."
                ) from error
            raise ValueError(
                f"The chat template cannot be used ({error}). Correct chat_template.jinja, or use another template."
            ) from error

    # Ids to text

    def decode(self, token_ids, **kwargs) -> str | list[str]:
        """Decode ids as the tokenizer does, with slots shown as the context token."""
        token_ids = to_py_obj(token_ids)
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        if token_ids and isinstance(token_ids[0], list):
            return [self.decode(row, **kwargs) for row in token_ids]
        text = ""
        for is_slot, group in groupby(token_ids, lambda token_id: token_id == self.context_token_id):
            ids = list(group)
            # The tokenizer does not know the id of a slot and leaves it out.
            text += self.context_token * len(ids) if is_slot else self.tokenizer.decode(ids, **kwargs)
        return text

    def batch_decode(self, sequences, **kwargs) -> list[str]:
        """Call `decode` for each row."""
        return [self.decode(row, **kwargs) for row in sequences]


def _with_background_line(messages: list[dict], mark: str) -> list[dict]:
    """The conversation with the background line, `mark` for its slots, before its first user message."""
    for position, message in enumerate(messages):
        if message["role"] != "user":
            continue
        check_question(message["content"])
        content = BACKGROUND_LINE + mark + QUESTION_LINE + message["content"]
        return [*messages[:position], {**message, "content": content}, *messages[position + 1 :]]
    raise ValueError("The conversation has no user message; expected at least one. Add a message with the question.")


ArcAlignerProcessor.register_for_auto_class("AutoProcessor")
