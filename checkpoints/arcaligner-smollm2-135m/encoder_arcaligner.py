"""Passages to slots: the sentence encoder encodes each segment once, to one embedding or, with `tokens_per_slot`, to
one for each span of the segment's tokens.

    documents -> segments (`segmentation_arcaligner.py`) -> tokens -> context_embeds, context_word_ids
"""

import contextlib
import copy
import functools
import importlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from .configuration_arcaligner import longest_prompt, warn_of_rename
from .loading_arcaligner import ENCODER_FILES, find_model, read_tensors
from .segmentation_arcaligner import (
    EMPTY_SEGMENT,
    LOADING,
    Segment,
    SegmentTokens,
    check_slot_settings,
    fitting_spans,
    in_original_text,
    segment_documents,
    tokenize_segments,
    zoomed_spans,
)
from .tokenization_arcaligner import original_text, text_of

logger = logging.get_logger(__name__)

# Tokens, padding included, of one call of the encoder, on the CPU and on other devices. A CPU is fast while activations
# fit into its cache; any other device waits for the host unless a call is large.
CPU_TOKENS, DEVICE_TOKENS = 1024, 32_768

# Tokens of padding that take a CPU about as long as a further call of the encoder: 7 ms, MiniLM on one core.
CPU_PADDING = 32

DTYPES = ("float32", "bfloat16", "auto")

# Folder of a checkpoint, with the encoder that was trained with the aligner.
ENCODER_FOLDER = "encoder"


def _load_tokenizer(name_or_path: str):
    """The tokenizer of an encoder, as sentence-transformers sets it up, without the weights.

    Raises:
        `ValueError`, `OSError`: files of another layout, which sentence-transformers may know.
    """
    try:
        modules = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    except ModuleNotFoundError:  # before 5.4
        modules = importlib.import_module("sentence_transformers.models")
    settings = modules.Transformer.load_config(name_or_path)
    if settings.get("do_lower_case"):
        raise ValueError("sentence-transformers changes the tokenizer")
    options = dict(settings.get("processor_kwargs") or settings.get("tokenizer_args") or {})
    if settings.get("max_seq_length") is not None:
        options.setdefault("model_max_length", settings["max_seq_length"])
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    max_length = longest_prompt(AutoConfig.from_pretrained(name_or_path))
    if "model_max_length" not in options and max_length not in (None, -1):
        tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)
    return tokenizer


# Files of an encoder that name the classes which sentence-transformers imports.
_FILES_WITH_CLASSES = ("modules.json", "**/router_config.json", "**/wordembedding_config.json")

_CLASS_KEYS = ("type", "types", "tokenizer_class")


def _check_encoder_classes(folder: Path) -> None:
    """Raise `ValueError` for an encoder that names a class outside of sentence-transformers, which before version 6
    runs the Python files of a folder."""
    for path in sorted(path for pattern in _FILES_WITH_CLASSES for path in folder.glob(pattern)):
        parts = json.loads(path.read_text(encoding="utf-8"))
        for part in parts if isinstance(parts, list) else [parts]:
            classes = [part.get(key) for key in _CLASS_KEYS] if isinstance(part, dict) else [part]
            names = (entry.values() if isinstance(entry, dict) else [entry] for entry in classes)
            for name in chain.from_iterable(names):
                if name is not None and not str(name).startswith("sentence_transformers."):
                    raise ValueError(
                        f"{path} names the class {name!r}; expected a class of the package sentence_transformers, "
                        "because ArcAligner never runs code that comes with an encoder. Use an encoder without custom "
                        "code."
                    )


class SentenceEncoder:
    """The sentence encoder, loaded on first use. Shared, not copied, when a processor is copied or saved.

    `name_or_path` is the base encoder. `folder` has PEFT's files of a LoRA that was trained with the aligner, which is
    added to the base encoder. `dtype` is one of `DTYPES`; `"auto"` is decided when the encoder is loaded.
    """

    def __init__(self, name_or_path: str, folder: str | None = None, dtype: str = "float32"):
        if dtype not in DTYPES:
            raise ValueError(f"`encoder_dtype` is {dtype!r}; expected one of {', '.join(DTYPES)}.")
        self.name_or_path, self.folder, self.dtype = name_or_path, folder, dtype
        self.device = None
        self._model = self._tokenizer = self._untrained = None

    @classmethod
    def from_checkpoint(cls, checkpoint: str | Path, name_or_path: str, dtype: str) -> "SentenceEncoder":
        """The encoder that was trained with the aligner in the folder `checkpoint`.

        Raises:
            `ValueError`: a checkpoint without this encoder, or with only a part of it.
        """
        folder = Path(checkpoint, ENCODER_FOLDER)
        for name in ("adapter_config.json", SAFETENSORS_WEIGHTS_NAME):
            if not (folder / name).is_file():
                raise ValueError(
                    f"{checkpoint} lacks {ENCODER_FOLDER}/{name}, a file of the sentence encoder that was trained with "
                    "the aligner. Download the checkpoint again, or save the processor again."
                )
        return cls(name_or_path, str(folder), dtype)

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # Another process loads weights and tokenizer itself: it may be a fork, in which torch cannot compute.
        return self.__dict__ | dict.fromkeys(("_model", "_tokenizer", "_untrained"))

    @property
    def model(self):
        """The `SentenceTransformer`."""
        with LOADING:
            if self._model is None:
                self._model = self._load()
            elif self.device is not None and self._model.device != torch.device(self.device):
                self._model.to(self.device)
            return self._model

    def _load(self):
        """Load the encoder with its LoRA merged, in the dtype that it computes in."""
        library, folder = importlib.import_module("sentence_transformers"), self._find()  # here: it takes seconds
        _check_encoder_classes(folder)
        model = library.SentenceTransformer(str(folder), device=self.device, model_kwargs={"use_safetensors": True})
        if self.folder is not None:
            load_encoder_lora(model, Path(self.folder))
        model.eval().requires_grad_(False)
        for layer in _lora_layers(model):
            layer.merge()  # else the LoRA would be computed in each call
        if self.dtype == "auto":
            self.dtype = str(fastest_dtype(model.device.type)).removeprefix("torch.")
        if self.dtype == "bfloat16":
            _cast(model, torch.bfloat16, torch.float32)
        return model

    def _find(self) -> Path:
        return find_model("encoder", self.name_or_path, ENCODER_FILES)

    @property
    def tokenizer(self):
        """The encoder's tokenizer, loaded without the weights; `model_max_length` is the encoder's limit in tokens. It
        is not the tokenizer of `model`: a tokenizer's truncation is a state, which other threads may set meanwhile."""
        with LOADING:
            if self._tokenizer is None and self._model is None:
                with contextlib.suppress(OSError, ValueError):
                    self._tokenizer = _load_tokenizer(str(self._find()))
            if self._tokenizer is None:
                self._tokenizer = copy.deepcopy(self.model.tokenizer)
            return self._tokenizer

    @property
    def untrained(self) -> "SentenceEncoder":
        """The base encoder, for search. With its trained LoRA, an encoder represents what a text says, not which
        questions the text answers."""
        if self.folder is None:
            return self
        with LOADING:
            if self._untrained is None:
                self._untrained = SentenceEncoder(self.name_or_path, dtype=self.dtype)
            self._untrained.device = self.device
            return self._untrained

    def lora_weights(self) -> list[torch.nn.Parameter]:
        """The LoRA weights; empty for an encoder that was not trained."""
        return _lora_weights(self.model)

    def add_trainable_lora(self, lora_r: int) -> list[torch.nn.Parameter]:
        """Add a LoRA of rank `lora_r`, unless the encoder has it. Return the LoRA weights, ready to be trained.

        Raises:
            `ValueError`: an encoder with a LoRA of another rank.
        """
        if self.dtype != "float32":  # merged weights are rounded, so unmerging would not restore them
            self.dtype, self._model = "float32", None
        if not _lora_layers(self.model):
            # The pooler's output is not used, so it would get no gradient.
            config = LoraConfig(
                r=lora_r, lora_alpha=2 * lora_r, target_modules="all-linear", exclude_modules=".*pooler.*"
            )
            inject_adapter_in_model(config, self.model.transformers_model)
        for layer in _lora_layers(self.model):
            if layer.merged:
                layer.unmerge()
            if (rank := layer.r["default"]) != lora_r:
                raise ValueError(
                    f"`encoder_lora_r` is {lora_r}, but the encoder already has a LoRA of rank {rank}. Set "
                    f"`encoder_lora_r` to {rank}."
                )
            layer.cast_input_dtype_enabled = False  # autocast does it, and does not cast all of the input
        self.model.requires_grad_(False)
        weights = self.lora_weights()
        for weight in weights:
            weight.requires_grad_(True)
        return weights

    def cast(self, dtype: torch.dtype, lora_dtype: torch.dtype = torch.float32) -> None:
        """Cast the encoder to `dtype` and its LoRA to `lora_dtype`. In bfloat16, small updates of a LoRA are lost."""
        _cast(self.model, dtype, lora_dtype)

    def save(self, folder: Path) -> None:
        """Write the encoder's LoRA as PEFT does. It is added to the base encoder when it is loaded."""
        save_encoder_lora(self.model, self.name_or_path, folder)

    def num_parts(self, text: str) -> int:
        """Roughly how many parts `text` must be cut into so that the encoder encodes all of it; 1 if it fits."""
        limit = self.tokenizer.model_max_length
        if limit is None or 2 * len(text) < limit:
            return 1
        # No token has so many characters on average. A longer text is cut first, so that it is tokenized twice at most.
        longest = 16 * limit
        if len(text) > longest:
            return max(2, len(text) // longest)
        return -(-len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"]) // limit)

    def split(self, text: str) -> list[str]:
        """Parts of `text` that fit into the encoder; one if `text` does."""
        return [text[start:end] for start, end in fitting_spans(text, 0, len(text), self.num_parts)]

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Normalized embeddings (len(texts), encoder_hidden_size), float32 on the CPU, without a gradient."""
        return self.encode_spans(texts, (), None).cpu() if len(texts) else torch.empty(0, device="cpu")

    @property
    def text_tokenizer(self) -> "EncoderTokenizer":
        """The part that makes the encoder's inputs from texts, without weights, for workers of a data loader."""
        model = self.model
        prompt = model.prompts.get(model.default_prompt_name) or ""
        sizes = (CPU_TOKENS, CPU_PADDING) if model.device.type == "cpu" else (DEVICE_TOKENS, None)
        return EncoderTokenizer(model.tokenizer, prompt, model.max_seq_length, *sizes)

    def encode_spans(
        self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None
    ) -> torch.Tensor:
        """Late chunking: each text is encoded once, and its token states are averaged over spans of characters.

        Args:
            texts (`Sequence[str]`): The encoder's inputs.
            starts (`Sequence[int]`): For each text, the character where its first span begins.
            ends (`Sequence[Sequence[int]]`, *optional*): For each text, the characters where its spans end, ascending.
                `None` gives an embedding per text, as `encode` does.

        Returns:
            Normalized embeddings (num_spans, encoder_hidden_size) of all texts' spans in order, with a gradient if
            the encoder's weights require one. A span inside one of the encoder's tokens has the states of that token.
        """
        return self.encode_inputs(self.text_tokenizer(texts, starts, ends))

    def encode_runs(
        self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None
    ) -> torch.Tensor:
        """The name of `encode_spans` in version 0.2."""
        warn_of_rename("encode_runs", "encode_spans")
        return self.encode_spans(texts, starts, ends)

    def encode_inputs(self, inputs: "EncoderInputs") -> torch.Tensor:
        """As `encode_spans`, from tokenized texts: (num_slots, encoder_hidden_size), without waiting for the device. A
        slot without text is 0."""
        model, sums = self.model, None
        inputs = inputs.to(model.device)
        num_texts, longest, num_states = zip(*inputs.batches, strict=True)
        num_tokens = [texts * tokens for texts, tokens in zip(num_texts, longest, strict=True)]
        batches = zip(
            inputs.input_ids.split(num_tokens),
            inputs.lengths.split(num_texts),
            inputs.tokens.split(num_states),
            inputs.slots.split(num_states),
            strict=True,
        )
        for ids, lengths, tokens, slots in batches:
            ids = ids.view(len(lengths), -1)  # (texts, longest)
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (texts, longest)
            features = {"input_ids": ids, "attention_mask": mask.long()}
            if inputs.of_tokens:
                states = model[0](features)["token_embeddings"].flatten(0, 1)  # (texts * longest, encoder_hidden_size)
            else:
                states = model(features)["sentence_embedding"]  # (texts, encoder_hidden_size)
            states = states.index_select(0, tokens).float()  # bfloat16 would round the sum of many
            if sums is None:
                sums = states.new_zeros(inputs.num_slots, states.shape[1])
            sums.index_add_(0, slots, states)
        return torch.nn.functional.normalize(sums, dim=-1)  # as of the means

    @torch.no_grad()
    def encode_words(self, texts: Sequence[str]) -> list[tuple[list[str], torch.Tensor]]:
        """For each text its tokens, spelled as in the text, and their normalized states (tokens, encoder_hidden_size),
        float16 on the CPU. A text is cut at the encoder's limit."""
        if not texts:
            return []
        tokenizer = self.text_tokenizer
        ids, lengths, offsets = tokenizer.tokenize(texts)
        # Without those of the encoder's prompt. Each token is a slot by itself.
        tokens = ((offsets[:, 1] > offsets[:, 0]) & (offsets[:, 0] >= 0)).nonzero()[0]
        states = self.encode_inputs(tokenizer.batched(ids, lengths, tokens, np.arange(len(tokens)), len(tokens)))
        counts = np.bincount(np.repeat(np.arange(len(texts)), lengths)[tokens], minlength=len(texts))  # (num_texts,)
        spans_of_texts = np.split(offsets[tokens], counts.cumsum()[:-1])
        states = states.half().cpu().split(counts.tolist())
        words = [[text[start:end] for start, end in spans] for text, spans in zip(texts, spans_of_texts, strict=True)]
        return list(zip(words, states, strict=True))


@dataclass(frozen=True)
class EncoderInputs:
    """Tokenized texts in batches of similar length, and which slots they become. All tensors are flat, so that little
    is moved to a device. Numbers that the host needs are not tensors.

    Args:
        input_ids (`torch.LongTensor` of shape `(num_tokens,)`): Batches (texts, longest), one after the other.
        lengths (`torch.LongTensor` of shape `(num_texts,)`): The number of tokens of each text, padding not counted.
        tokens (`torch.LongTensor` of shape `(num_states,)`): Places in their batch of the tokens, or whole texts, that
            are averaged, batch after batch.
        slots (`torch.LongTensor` of shape `(num_states,)`): For each of `tokens` the slot that it is averaged into.
        batches (`tuple`): For each batch the number of texts, the tokens of the longest one and the number of `tokens`.
        num_slots (`int`): The number of slots.
        of_tokens (`bool`): Whether `tokens` are tokens; else they are texts, which pass all modules of the encoder.
    """

    input_ids: torch.LongTensor
    lengths: torch.LongTensor
    tokens: torch.LongTensor
    slots: torch.LongTensor
    batches: tuple[tuple[int, int, int], ...]
    num_slots: int
    of_tokens: bool

    def _with_tensors(self, change: Callable) -> "EncoderInputs":
        names = ("input_ids", "lengths", "tokens", "slots")
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def to(self, device, non_blocking: bool = False) -> "EncoderInputs":
        """Copy to a device; accelerate calls this."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "EncoderInputs":
        """Copy to pinned memory; data loaders call this."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def placed(self, indices: torch.LongTensor, num_slots: int) -> "EncoderInputs":
        """Put each slot at one of `num_slots` places; the other places are padding."""
        return replace(self, slots=indices[self.slots], num_slots=num_slots)


@dataclass(frozen=True)
class EncoderTokenizer:
    """Makes the inputs of an encoder. It has no weights, and can be sent to another process.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The encoder's.
        prompt (`str`): A text that is put before each text.
        limit (`int`, *optional*): The number of tokens after which a text is cut.
        batch_tokens (`int`): The maximum number of tokens, padding included, of a batch of several texts.
        batch_padding (`int`, *optional*): The maximum number of tokens of a batch that are padding.
    """

    tokenizer: Any
    prompt: str
    limit: int | None
    batch_tokens: int
    batch_padding: int | None = None

    def __call__(
        self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None
    ) -> EncoderInputs:
        """Inputs for a slot for each span, or for each text; see `SentenceEncoder.encode_spans`."""
        ids, lengths, offsets = self.tokenize(texts)
        if ends is None:
            return self.batched(ids, lengths, None, np.arange(len(texts)), len(texts))
        counts = np.fromiter(map(len, ends), np.int64, len(texts))
        ends = np.fromiter(chain.from_iterable(ends), np.int64, counts.sum())
        return self.batched(ids, lengths, *_span_tokens(offsets, lengths, np.asarray(starts), ends, counts), len(ends))

    def tokenize(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids (num_tokens,) of all texts, the number of tokens of each (num_texts,), and the first and end character of
        each token (num_tokens, 2). Characters are below 0 in the prompt, and equal for a token without characters."""
        options = {"truncation": self.limit is not None, "max_length": self.limit, "return_offsets_mapping": True}
        options |= {"return_attention_mask": False, "return_token_type_ids": False}
        rows = self.tokenizer([self.prompt + text for text in texts], **options)
        lengths = np.fromiter(map(len, rows["input_ids"]), np.int64, len(texts))
        ids = np.fromiter(chain.from_iterable(rows["input_ids"]), np.int64, lengths.sum())
        indices = chain.from_iterable(chain.from_iterable(rows["offset_mapping"]))
        return ids, lengths, np.fromiter(indices, np.int64, 2 * len(ids)).reshape(-1, 2) - len(self.prompt)

    def batched(
        self, ids: np.ndarray, lengths: np.ndarray, tokens: np.ndarray | None, slots: np.ndarray, num_slots: int
    ) -> EncoderInputs:
        """Make batches of texts of similar length from the result of `tokenize`. `tokens` are the numbers of the tokens
        that become `slots`; with `None` each whole text becomes a slot."""
        order = np.argsort(lengths, kind="stable")  # (num_texts,), the shortest first
        sizes = self._batch_sizes(lengths[order])
        longest = lengths[order][np.cumsum(sizes) - 1]  # (batches,)
        # For each text its batch, and for its tokens the places in the ids of all batches.
        batch_of_text, row_of_text = np.empty_like(order), np.empty_like(order)
        batch_of_text[order] = np.repeat(np.arange(len(sizes)), sizes)
        row_of_text[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        areas = sizes * longest
        first_of_text = (np.cumsum(areas) - areas)[batch_of_text] + row_of_text * longest[batch_of_text]
        text_of_token = np.repeat(np.arange(len(lengths)), lengths)  # (num_tokens,)
        indices = (first_of_text - (np.cumsum(lengths) - lengths))[text_of_token] + np.arange(len(ids))
        padded = np.full(areas.sum(), self.tokenizer.pad_token_id or 0)
        padded[indices] = ids
        if tokens is None:
            batch_of_state, index_of_state = batch_of_text, row_of_text
        else:
            batch_of_state = batch_of_text[text_of_token[tokens]]
            index_of_state = indices[tokens] - (np.cumsum(areas) - areas)[batch_of_state]
        by_batch = np.lexsort((index_of_state, batch_of_state))  # (num_states,)
        counts = np.bincount(batch_of_state, minlength=len(sizes))  # (batches,)
        return EncoderInputs(
            input_ids=torch.from_numpy(padded),
            lengths=torch.from_numpy(lengths[order]),
            tokens=torch.from_numpy(index_of_state[by_batch]),
            slots=torch.from_numpy(slots[by_batch]),
            batches=tuple(zip(sizes.tolist(), longest.tolist(), counts.tolist(), strict=True)),
            num_slots=num_slots,
            of_tokens=tokens is not None,
        )

    def _batch_sizes(self, lengths: np.ndarray) -> np.ndarray:
        """The number of texts in each batch, for texts of ascending `lengths`."""
        sizes, num_tokens = [0], 0
        for length in lengths.tolist():
            padded = (sizes[-1] + 1) * length
            padding = padded - num_tokens - length
            has_room = self.batch_padding is None or padding <= self.batch_padding
            if sizes[-1] and not (has_room and padded <= self.batch_tokens):
                sizes.append(0)
                num_tokens = 0
            sizes[-1] += 1
            num_tokens += length
        return np.array(sizes)


def _span_tokens(
    offsets: np.ndarray, lengths: np.ndarray, starts: np.ndarray, ends: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each span of a text, the tokens to average.

    Args:
        offsets (`np.ndarray` of shape `(num_tokens, 2)`): The first and end character of each token of all texts.
        lengths (`np.ndarray` of shape `(num_texts,)`): The number of tokens of each text.
        starts (`np.ndarray` of shape `(num_texts,)`): Where the first span of each text begins.
        ends (`np.ndarray` of shape `(num_spans,)`): Where spans end, text after text, ascending in each text.
        counts (`np.ndarray` of shape `(num_texts,)`): The number of spans of each text.

    Returns:
        Two arrays (num_states,): tokens, and for each of them the span that contains its middle. A span without a
        token, because it lies inside of a token or beyond the encoder's limit, gets the nearest one.
    """
    text_of_token, text_of_span = (np.repeat(np.arange(len(lengths)), sizes) for sizes in (lengths, counts))
    middles = offsets.sum(axis=1)  # of tokens, doubled, so that they are whole numbers
    tokens = ((offsets[:, 1] > offsets[:, 0]) & (middles > 2 * starts[text_of_token])).nonzero()[0]
    # One search for all texts: the places in a text are `width` above those in the text before it.
    width = 1 + max(middles.max(initial=0), 2 * ends.max(initial=0))
    token_keys = text_of_token[tokens] * width + middles[tokens]
    last_spans = (np.cumsum(counts) - 1)[text_of_token[tokens]]
    spans = np.minimum(np.searchsorted(text_of_span * width + 2 * ends, token_keys), last_spans)
    begins = np.concatenate([[0], ends[:-1]])
    begins[np.cumsum(counts) - counts] = starts
    bounds, nearest = np.concatenate([[0], np.cumsum(lengths)]), []
    lonely = (np.bincount(spans, minlength=len(ends)) == 0).nonzero()[0]
    for span in lonely:  # few
        first, end = bounds[text_of_span[span]], bounds[text_of_span[span] + 1]
        nearest.append(first + np.abs(middles[first:end] - (begins[span] + ends[span])).argmin())
    return np.concatenate([tokens, np.array(nearest, dtype=np.int64)]), np.concatenate([spans, lonely])


# Precomputed slots
class PrecomputedSlots(NamedTuple):
    """Precomputed slots of one question."""

    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 after a slot's tokens
    context_passage_ids: torch.LongTensor | None = None  # (num_slots,); without them all slots are of one passage


def __getattr__(name: str):
    if name == "GivenSlots":  # as in version 0.2
        warn_of_rename("GivenSlots", "PrecomputedSlots")
        return PrecomputedSlots
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pad_words(rows: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Stack word ids of rows, each (num_slots, max_words), to (batch, max_slots, max_words), padded with -1."""
    sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
    padded = torch.full((len(rows), *sizes), -1, device=rows[0].device)
    for number, row in enumerate(rows):
        padded[number, : row.shape[0], : row.shape[1]] = row
    return padded


def pad_slots(rows: Sequence) -> dict[str, torch.Tensor]:
    """Pad the slots of rows, [`PrecomputedSlots`] or [`EncodedDocuments`], to the inputs of the model: `context_embeds`
    (batch, max_slots, encoder_hidden_size) and, if any row has them, `context_word_ids` (batch, max_slots, max_words)
    and `context_passage_ids` (batch, max_slots). Empty if no row has a slot."""
    if not any(len(row.context_embeds) for row in rows):
        return {}
    slots = {"context_embeds": pad_sequence([row.context_embeds for row in rows], batch_first=True)}
    words, passages = [row.context_word_ids for row in rows], [row.context_passage_ids for row in rows]
    device = slots["context_embeds"].device
    if any(ids is not None for ids in words):
        no_words = torch.full((0, 1), -1, device=device)
        slots["context_word_ids"] = pad_words([no_words if ids is None else ids for ids in words])
    if any(ids is not None for ids in passages):
        no_passages = torch.full((0,), -1, device=device)
        passages = [no_passages if ids is None else ids for ids in passages]
        slots["context_passage_ids"] = pad_sequence(passages, batch_first=True, padding_value=-1)
    return slots


def documents_of(documents, name: str) -> list:
    """The passages of one question as a list; a single passage is wrapped."""
    if isinstance(documents, str | dict):
        return [documents]
    try:
        # Neither is a list of passages: a mapping has names, a set has no order.
        if isinstance(documents, Mapping | Set):
            raise TypeError
        return list(documents)
    except TypeError as error:
        raise ValueError(
            f'{name} is {documents!r}; expected a list of strings or of {{"title": str, "text": str}}.'
        ) from error


def _embeds_of(values, name: str) -> torch.FloatTensor:
    return _dense_tensor_of(values, name).float()


def _ids_of(values, name: str) -> torch.LongTensor:
    """Ids of words or numbers of passages. A float is refused, because it may have been rounded."""
    tensor = _dense_tensor_of(values, name)
    ids = tensor.long()
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        raise ValueError(f"{name} has the dtype {tensor.dtype}; expected whole numbers. Pass an int64 tensor.")
    if (ids < -1).any():
        raise ValueError(f"{name} contains {ids.min().item()}; expected ids of at least 0, or -1 for padding.")
    return ids


def _dense_tensor_of(values, name: str) -> torch.Tensor:
    try:
        is_tensor = isinstance(values, torch.Tensor)
        tensor = values if is_tensor else torch.as_tensor(np.asarray(values), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is of type {type(values).__name__}, which cannot be converted to a tensor ({error}); expected "
            "numbers."
        ) from error
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        raise ValueError(
            f"{name} is a tensor of dtype {tensor.dtype} and layout {tensor.layout} on the device {tensor.device}; "
            "expected a dense tensor of real numbers."
        )
    return tensor


def _entries_of_questions(convert: Callable, entries, name: str, is_single: bool, num_questions: int) -> list:
    """The entry of each of `num_questions` questions, converted by `convert`."""
    try:
        values = [entries] if is_single or isinstance(entries, str | dict) else list(entries)
    except TypeError as error:  # a number, or a tensor without dimensions
        raise ValueError(
            f"{name} is a single value of type {type(entries).__name__}; expected a list of length {num_questions}, "
            "with an entry for each question."
        ) from error
    if len(values) != num_questions:
        raise ValueError(f"{name} has the length {len(values)}; expected {num_questions}, an entry for each question.")
    return [convert(row, f"{name} of question {number}") for number, row in enumerate(values)]


def passages_of_questions(
    documents,
    context_embeds,
    context_word_ids,
    context_passage_ids,
    is_single: bool,
    num_questions: int,
    has_words: bool,
) -> list[list] | list[PrecomputedSlots]:
    """For each of `num_questions` questions, its documents or its precomputed slots, which need word ids if
    `has_words`.

    Raises:
        `ValueError`: both or neither, values of a wrong kind, or not one entry for each question.
    """
    if (documents is None) == (context_embeds is None):
        names = "neither `documents` nor" if documents is None else "both `documents` and"
        raise ValueError(f"Got {names} `context_embeds`. Pass exactly one of them.")
    if context_embeds is None:
        return _entries_of_questions(documents_of, documents, "`documents`", is_single, num_questions)
    embeds = _entries_of_questions(_embeds_of, context_embeds, "`context_embeds`", is_single, num_questions)
    words = passage_ids = [None] * num_questions
    if context_word_ids is not None:
        words = _entries_of_questions(_ids_of, context_word_ids, "`context_word_ids`", is_single, num_questions)
    elif has_words:
        raise ValueError(
            "Got `context_embeds` without `context_word_ids`, which this aligner needs as well. Pass the token ids of "
            "the text of each slot: a tensor with a row for each slot, in which shorter rows are padded with -1."
        )
    if context_passage_ids is not None:
        passage_ids = _entries_of_questions(
            _ids_of, context_passage_ids, "`context_passage_ids`", is_single, num_questions
        )
    return list(map(PrecomputedSlots, embeds, words, passage_ids))


def single_passages(passages: list | PrecomputedSlots) -> dict[int, list | PrecomputedSlots]:
    """Single passages of a question, by their numbers. Passages without text are left out, unless none has text."""
    if not isinstance(passages, PrecomputedSlots):
        numbered = enumerate(passages)
        return {number: [passage] for number, passage in numbered if text_of(passage, number).strip()} or {0: []}
    embeds, words, ids = passages
    if ids is None:
        return {0: passages}
    numbers, sizes = (tensor.tolist() for tensor in ids.unique_consecutive(return_counts=True))
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"`context_passage_ids` assigns the slots to passages in the order {numbers}; expected all slots of a "
            "passage directly after each other. Sort the slots by passage."
        )
    # Words of a passage are as wide as its longest slot, so that its digest does not depend on other passages.
    passage_words = [None] * len(sizes) if words is None else list(words.split(sizes))
    passage_words = [ids if ids is None else ids[:, (ids >= 0).any(dim=0)] for ids in passage_words]
    return dict(zip(numbers, map(PrecomputedSlots, embeds.split(sizes), passage_words), strict=True))


@functools.cache
def fastest_dtype(device_type: str) -> torch.dtype:
    """The dtype of `"auto"` for an encoder and in a recipe: bfloat16 if the machine multiplies matrices of a small
    model more than 1.5 times as fast in bfloat16 as in float32, else float32. On a CPU both are measured, for a tenth
    of a second each. A CUDA GPU gets bfloat16 if it supports it."""
    if device_type != "cpu":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    is_faster = _products_per_second(torch.bfloat16) > 1.5 * _products_per_second(torch.float32)
    return torch.bfloat16 if is_faster else torch.float32


def _products_per_second(dtype: torch.dtype) -> float:
    rows, weight = (torch.ones(*size, dtype=dtype, device="cpu") for size in ((512, 576), (576, 1536)))
    rows @ weight  # the first product sets up the kernel
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        rows @ weight
        count += 1
    return count / (time.perf_counter() - start)


# The LoRA of a trained sentence encoder, in PEFT's files
def _lora_layers(model) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _lora_weights(model) -> list[torch.nn.Parameter]:
    return [part["default"].weight for layer in _lora_layers(model) for part in (layer.lora_A, layer.lora_B)]


def _cast(model, dtype: torch.dtype, lora_dtype: torch.dtype) -> None:
    weights = [(weight, weight.data) for weight in _lora_weights(model)]
    model.to(dtype)
    for weight, values in weights:
        weight.data = values.to(weight.device, lora_dtype)


def load_encoder_lora(model, folder: Path) -> None:
    """Add the LoRA in `folder` to a `SentenceTransformer`.

    Raises:
        `ValueError`: a truncated file; weights that are not finite, of another shape, missing or unexpected.
    """
    path, transformer = folder / SAFETENSORS_WEIGHTS_NAME, model.transformers_model
    weights = dict(read_tensors([path]))
    try:
        inject_adapter_in_model(LoraConfig.from_pretrained(str(folder)), transformer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'adapter_config.json'} does not fit the encoder ({error}). Download the checkpoint again, or "
            "save the processor again."
        ) from error
    expected = _lora_tensors(transformer)
    for name in sorted(weights.keys() | expected.keys()):
        shape, fitting = (list(tensors[name].shape) if name in tensors else None for tensors in (weights, expected))
        if shape != fitting:
            fault = f"has shape {shape}; expected {fitting}" if shape and fitting else "is not expected"
            raise ValueError(
                f"{path} does not fit the encoder and adapter_config.json: `{name}` "
                f"{fault if shape else 'is missing'}. Download the checkpoint again, or save the processor again."
            )
        if not torch.isfinite(weights[name]).all():
            raise ValueError(
                f"{path} has NaN or infinite values in `{name}`; expected finite ones. Use another checkpoint."
            )
    set_peft_model_state_dict(transformer, {name.removeprefix(_PREFIX): weight for name, weight in weights.items()})


def save_encoder_lora(model, name_or_path: str, folder: Path) -> None:
    """Write the LoRA of a `SentenceTransformer` to `folder` as PEFT does, for the encoder `name_or_path`."""
    transformer = model.transformers_model
    config = transformer.peft_config["default"]
    config.base_model_name_or_path = name_or_path
    config.save_pretrained(str(folder))
    save_file(_lora_tensors(transformer), folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


# In PEFT's files, weights have the names that they have in a `PeftModel`.
_PREFIX = "base_model.model."


def _lora_tensors(transformer) -> dict[str, torch.Tensor]:
    """The LoRA weights of an encoder by the names that PEFT gives them in files."""
    tensors = get_peft_model_state_dict(transformer, save_embedding_layers=False)  # "auto" would ask the Hub
    return {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}


# Documents to slots
class EncodedDocuments(NamedTuple):
    """The passages of one question as slots."""

    segments: list[Segment]  # the text of each slot; none if there is only white space
    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 after a slot's tokens
    context_passage_ids: torch.LongTensor  # (num_slots,), the number of each slot's document
    dropped: list[Segment]  # segments without a slot


@dataclass(frozen=True)
class SlotEncoder:
    """Makes slots from passages: an encoder and a backbone's tokenizer, with the settings of a processor."""

    tokenizer: Any
    encoder: SentenceEncoder
    encoder_hidden_size: int
    sentences_per_segment: int | float
    spacy_model: str
    tokens_per_slot: int | str
    trained_tokens_per_slot: Sequence[int | str] | None
    context_words: bool

    def check_settings(self, max_slots: int | None = None, tokens_per_slot: int | str | None = None) -> int | str:
        """Check the settings of a call and return its `tokens_per_slot`.

        Raises:
            `ValueError`: settings that are invalid.
        """
        if max_slots is not None or tokens_per_slot is not None:  # the processor's defaults were checked
            check_slot_settings(max_slots, tokens_per_slot)
        tokens_per_slot = self.tokens_per_slot if tokens_per_slot is None else tokens_per_slot
        if (known := self.trained_tokens_per_slot) and tokens_per_slot not in known:
            logger.warning_once(
                f"`tokens_per_slot` is {tokens_per_slot!r}, but this aligner was trained with "
                f"{', '.join(map(str, known))}. Expect worse answers than with one of these values."
            )
        return tokens_per_slot

    def segment_documents(self, documents: Sequence[str | dict]) -> list[Segment]:
        """The segments of one question's documents, in order; empty if there is only white space. `start` and `end`
        count characters of the normalized text (`text_of`).

        Raises:
            `ValueError`: a document that is neither a string nor `{"title": str, "text": str}`.
        """
        return segment_documents(
            documents,
            sentences_per_segment=self.sentences_per_segment,
            spacy_model=self.spacy_model,
            num_parts=self.encoder.num_parts,
        )

    def slot_spans(self, documents: Sequence[str | dict], tokens_per_slot: int | str) -> list[Segment]:
        """The part of a document that each slot of one question represents, in the order of the slots."""
        tokens = tokenize_segments(self.tokenizer, self.segment_documents(documents), documents)
        return _slot_segments(tokens, [segment.token_spans(tokens_per_slot) for segment in tokens])

    def encode_tokens(self, tokens: Sequence[SegmentTokens], tokens_per_slot: int | str) -> torch.FloatTensor:
        """Normalized embeddings of the slots of `tokens`, in order, float32 (num_slots, encoder_hidden_size): one for
        each segment, or for each span of about `tokens_per_slot` tokens."""
        ends = None
        if tokens_per_slot != "segment":
            ends = [segment.span_ends(segment.token_spans(tokens_per_slot)) for segment in tokens]
        return self._encode_spans(tokens, ends)

    def _encode_spans(self, tokens: Sequence[SegmentTokens], ends: list[list[int]] | None) -> torch.FloatTensor:
        with torch.no_grad():
            texts = [segment.encoder_text for segment in tokens]
            starts = [segment.encoder_start for segment in tokens]
            embeds = self.encoder.encode_spans(texts, starts, ends).cpu()
        self._check_embeds(embeds, 0)
        return embeds

    def encode_batch(
        self,
        passages: Sequence[Sequence[str | dict]] | Sequence[PrecomputedSlots],
        *,
        max_slots: int | None = None,
        tokens_per_slot: int | str | None = None,
        slot_limits: Sequence[int] | None = None,
        per_passage: bool = False,
        limit_is_for: str | None = None,
        names: Sequence[str] | None = None,
        only_segments: bool = False,
    ) -> list[EncodedDocuments]:
        """Encode the passages of several questions to slots; all are documents, or all are precomputed slots.

        `slot_limits` is the maximum number of slots of each question or, with `per_passage`, of each of its passages.
        More slots raise `ValueError` before anything is encoded. The message begins with the question's name in
        `names`; `limit_is_for` says whose limit this is, by default the prompt's. With `only_segments` nothing is
        encoded, and embeddings are (num_slots, 0)."""
        tokens_per_slot = self.check_settings(max_slots, tokens_per_slot)
        if isinstance(passages[0], PrecomputedSlots):
            return [self._first_slots(row, number, max_slots) for number, row in enumerate(passages)]
        segments = [self.segment_documents(row) for row in passages]
        limit = max_slots if tokens_per_slot == "segment" else None  # segments beyond `max_slots` are not encoded
        needs_tokens = self.context_words or tokens_per_slot != "segment"
        tokens = [
            tokenize_segments(self.tokenizer if needs_tokens else None, row[:limit], documents) or [EMPTY_SEGMENT]
            for row, documents in zip(segments, passages, strict=True)
        ]
        # Slots of each question:
        counts = [sum(len(segment.token_spans(tokens_per_slot)) for segment in row) for row in tokens]
        for number, row in enumerate(tokens):
            name = "The passages need" if len(passages) == 1 else f"The passages of question {number} need"
            name = name if names is None else names[number]
            limit = None if slot_limits is None else slot_limits[number]
            _check_num_slots(name, row, tokens_per_slot, max_slots, limit, per_passage, limit_is_for)
        # All questions together: the encoder sorts texts by length, so more of them means less padding.
        all_tokens = [segment for row in tokens for segment in row]
        no_embeds = torch.empty(sum(counts), 0, device="cpu")
        encoded = no_embeds if only_segments else self.encode_tokens(all_tokens, tokens_per_slot)
        rows = []
        for documents, parts, row_tokens, embeds in zip(passages, segments, tokens, encoded.split(counts), strict=True):
            spans = [segment.token_spans(tokens_per_slot) for segment in row_tokens]
            if tokens_per_slot != "segment" and parts:  # each slot represents a part of a segment
                parts = _slot_segments(row_tokens, spans)
            rows.append(self._encoded(documents, parts, row_tokens, spans, embeds, max_slots))
        return rows

    def _encoded(
        self,
        documents: Sequence[str | dict],
        parts: Sequence[Segment],
        tokens: Sequence[SegmentTokens],
        spans: Sequence[list[tuple[int, int]]],
        embeds: torch.FloatTensor,
        max_slots: int | None = None,
    ) -> EncodedDocuments:
        """The first `max_slots` slots of one question: their `parts` of the normalized text, the `spans` of each of
        the `tokens`, and `embeds` (num_slots, encoder_hidden_size)."""
        parts = in_original_text(parts, documents)
        words = None
        if self.context_words:
            word_ids = [segment.word_ids[a:b] for segment, cut in zip(tokens, spans, strict=True) for a, b in cut]
            words = _pad_word_ids(word_ids[:max_slots], embeds.device)
        kept, dropped = parts[:max_slots], parts[max_slots or len(parts) :]
        numbers = torch.tensor([part.document for part in kept] or [0], device=embeds.device)
        return EncodedDocuments(kept, embeds[:max_slots], words, numbers, dropped)

    def zoom(
        self,
        documents: Sequence[str | dict],
        embeds: torch.FloatTensor,
        is_zoomed: torch.BoolTensor,
        tokens_per_slot: int | str,
        slot_limit: int | None = None,
        per_passage: bool = False,
    ) -> EncodedDocuments:
        """Replace slots of the passages of one question with finer ones, of about `self.tokens_per_slot` tokens.

        Args:
            documents (`Sequence`): The passages.
            embeds (`torch.FloatTensor` of shape `(num_slots, encoder_hidden_size)`): All their slots.
            is_zoomed (`torch.BoolTensor` of shape `(num_slots,)`): Which of these slots are replaced.
            tokens_per_slot (`int` or `"segment"`): Of these slots.
            slot_limit (`int`, *optional*): The maximum number of slots or, with `per_passage`, of those of a passage.

        Raises:
            `ValueError`: slots that are not those of the passages, or too many finer ones.
        """
        segments = self.segment_documents(documents)
        tokens = tokenize_segments(self.tokenizer, segments, documents) or [EMPTY_SEGMENT]
        coarse = [segment.token_spans(tokens_per_slot) for segment in tokens]
        counts = [len(spans) for spans in coarse]
        if sum(counts) != len(embeds):
            raise ValueError(
                f"The question has {len(embeds)} slots, but with `tokens_per_slot` {tokens_per_slot} its passages have "
                f"{sum(counts)}. Pass the `tokens_per_slot` and the passages that the slots were made with."
            )
        masks = is_zoomed.split(counts)  # each (slots of the segment,)
        spans = [
            zoomed_spans(of_segment, mask.tolist(), self.tokens_per_slot)
            for of_segment, mask in zip(coarse, masks, strict=True)
        ]
        parts = _slot_segments(tokens, spans)
        sizes = Counter(part.document for part in parts) if per_passage else {0: len(parts)}
        if slot_limit is not None and (needed := max(sizes.values())) > slot_limit:
            of_passage = " of each passage" if per_passage else ""
            raise ValueError(
                f"With zoom the passages need {needed} slots, but the prompt has space for only {slot_limit}"
                f"{of_passage}. Use a smaller `zoom`, a larger `tokens_per_slot`, or fewer or shorter passages."
            )
        rows = [*embeds.split(counts)]
        changed = [index for index, (old, new) in enumerate(zip(coarse, spans, strict=True)) if old != new]
        if changed:
            ends = [tokens[index].span_ends(spans[index]) for index in changed]
            encoded = self._encode_spans([tokens[index] for index in changed], ends).to(embeds.device)
            for index, finer in zip(changed, encoded.split([len(spans[index]) for index in changed]), strict=True):
                unchanged = dict(zip(coarse[index], rows[index], strict=True))
                rows[index] = torch.stack(
                    [unchanged.get(span, embed) for span, embed in zip(spans[index], finer, strict=True)]
                )
        return self._encoded(documents, parts if segments else [], tokens, spans, torch.cat(rows))

    def statistics(
        self, documents: Sequence[str | dict], encoded: EncodedDocuments, has_budget: bool
    ) -> dict[str, float]:
        """The number of `tokens` and of `slots`, and the `compression_rate`, the tokens per slot of the text that has
        slots. With `has_budget` also how many segments are `dropped`."""
        texts = [text_of(document, number) for number, document in enumerate(documents)]
        tokens = num_covered = self.count_tokens(texts)
        if encoded.dropped:
            last = encoded.segments[-1]
            beginning = text_of(original_text(documents[last.document], last.document)[: last.end], last.document)
            num_covered = self.count_tokens([*texts[: last.document], beginning])
        num_slots = len(encoded.context_embeds)
        counts = {"tokens": tokens, "slots": num_slots, "compression_rate": num_covered / num_slots}
        return counts | ({"dropped": len(encoded.dropped)} if has_budget else {})

    def count_tokens(self, texts: list[str]) -> int:
        """The number of tokens of the backbone in `texts`."""
        return sum(len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else 0

    def _first_slots(self, slots: PrecomputedSlots, row: int, max_slots: int | None) -> EncodedDocuments:
        """The first `max_slots` of a row's precomputed slots."""
        embeds, words, numbers = slots
        self._check_embeds(embeds, row)
        if words is not None and (words.dim() != 2 or len(words) != len(embeds)):
            raise ValueError(
                f"`context_word_ids` of question {row} has shape {tuple(words.shape)}; expected ({len(embeds)}, "
                "max_words): a row for each slot, with the token ids of its text, padded with -1."
            )
        if numbers is None:
            numbers = torch.zeros(len(embeds), dtype=torch.long, device=embeds.device)
        if numbers.shape != embeds.shape[:1]:
            raise ValueError(
                f"`context_passage_ids` of question {row} has shape {tuple(numbers.shape)}; expected ({len(embeds)},), "
                "with the passage number of each slot."
            )
        words = None if words is None else words[:max_slots]
        return EncodedDocuments([], embeds[:max_slots], words, numbers[:max_slots], [])

    def _check_embeds(self, embeds: torch.FloatTensor, row: int) -> None:
        """Raise `ValueError` unless `embeds` is (num_slots, encoder_hidden_size), finite, with at least one slot."""
        if embeds.dim() != 2 or embeds.shape[1] != self.encoder_hidden_size or embeds.shape[0] == 0:
            raise ValueError(
                f"`context_embeds` of question {row} has shape {tuple(embeds.shape)}; expected (num_slots, "
                f"{self.encoder_hidden_size}) with at least one slot. Use the encoder {self.encoder.name_or_path}, "
                f"whose embeddings have {self.encoder_hidden_size} dimensions."
            )
        if not torch.isfinite(embeds).all():
            raise ValueError(
                f"`context_embeds` of question {row} has NaN or infinite values: "
                f"{int((~torch.isfinite(embeds)).sum())} of {embeds.numel()}; expected finite ones. Check the "
                "encoder's output."
            )


def _slot_segments(tokens: Sequence[SegmentTokens], spans: Sequence[list[tuple[int, int]]]) -> list[Segment]:
    """The part of the text that each slot of a question represents, for the `spans` of each of its `tokens`."""
    return [part for segment, cut in zip(tokens, spans, strict=True) for part in segment.slot_segments(cut)]


def _pad_word_ids(word_ids: Sequence[tuple[int, ...]], device) -> torch.LongTensor:
    """The token ids of slots as (num_slots, max_words), -1 after a slot's tokens."""
    rows = [torch.tensor(ids, device=device) for ids in word_ids]  # each (words of the slot,)
    return pad_sequence(rows, batch_first=True, padding_value=-1).long()


def _check_num_slots(
    name: str,
    segments: list[SegmentTokens],
    tokens_per_slot: int | str,
    max_slots: int | None,
    limit: int | None,
    per_passage: bool,
    limit_is_for: str | None,
) -> None:
    """Raise `ValueError` for passages with more slots than `limit`; the message begins with `name`. With `per_passage`,
    `limit` is that of each passage, else of all together."""
    sizes: dict[int, int] = defaultdict(int)
    for tokens in segments:
        sizes[tokens.segment.document] += len(tokens.token_spans(tokens_per_slot))
    document = max(sizes, key=sizes.get)
    total = sum(sizes.values())
    count = sizes[document] if per_passage else total
    if limit is not None and min(count, max_slots or count) > limit:
        longest = f" (the longest, passage {document}, needs {sizes[document]})" if len(sizes) > 1 else ""
        fitting = sum(size <= limit for size in (sizes.values() if per_passage else accumulate(sizes.values())))
        fits = f" Passages that fit: {'' if per_passage else 'the first '}{fitting} of {len(sizes)}."
        space = limit_is_for or "besides the question the prompt has space for"
        shorter_question = "" if limit_is_for else "a shorter question, "
        raise ValueError(
            f"{name} {total} slot{'s' * (total != 1)}{longest}, but {space} only {max(0, limit)}"
            f"{' of each passage' * per_passage}.{fits * (len(sizes) > 1)} Pass {shorter_question}fewer or shorter "
            "passages, or put more text into each slot (a larger `tokens_per_slot`)."
        )
