"""Passages to slots: each segment is read once by the sentence encoder and becomes one embedding or, with
`tokens_per_slot`, one for each run of its tokens.

    documents -> segments (`segmentation_arcaligner.py`) -> tokens -> context_embeds, context_word_ids
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers.utils import logging
from transformers.utils.chat_template_utils import (
    _get_control_token_patterns,
    encode_marked_chat,
    mark_control_tokens,
)

from .configuration_arcaligner import missing_model_message, resolve_encoder
from .segmentation_arcaligner import (
    FittedSegments,
    Segment,
    check_slot_budget,
    check_tokens_per_slot,
    equal_runs,
    fit_segments,
    segment_document,
)

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SegmentTokens:
    """A segment's tokens in the backbone's vocabulary, and what the encoder reads for it."""

    segment: Segment
    encoder_text: str
    word_ids: tuple[int, ...]
    word_ends: tuple[int, ...]  # the character of the segment's text where each token ends; 0 for those of a title

    @property
    def encoder_start(self) -> int:
        """Where the segment's text begins in what the encoder reads."""
        return len(self.encoder_text) - len(self.segment.text)

    def runs(self, tokens_per_slot: int | str) -> list[tuple[int, int]]:
        """First and end token of each slot."""
        return equal_runs(len(self.word_ids), tokens_per_slot)

    def pieces(self, tokens_per_slot: int | str) -> list[Segment]:
        """The part of the segment's text that each slot stands for, with its characters in the document."""
        pieces, start = [], 0
        for _, last in self.runs(tokens_per_slot):
            end = self.word_ends[last - 1] if last < len(self.word_ids) else len(self.segment.text)
            text = self.segment.text[start:end]
            pieces.append(Segment(self.segment.document, self.segment.start + start, self.segment.start + end, text))
            start = end
        return pieces


# What "no passages" is: one slot that stands for the empty string.
EMPTY_SEGMENT = SegmentTokens(Segment(0, 0, 0, ""), "", (), ())


class EncodedDocuments(NamedTuple):
    """The passages of one question as slots."""

    segments: list[Segment]  # what each slot stands for; none where there is nothing but white space
    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 behind a slot's tokens
    num_merged: int  # segments that share their slot with others
    dropped: list[Segment]  # what has no slot


def pad_words(rows: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Words of slots, each (num_slots, max_words), as one (batch, max_slots, max_words), -1 where there is none."""
    sizes = [max(row.shape[axis] for row in rows) for axis in (0, 1)]
    padded = torch.full((len(rows), *sizes), -1, device=rows[0].device)
    for number, row in enumerate(rows):
        padded[number, : row.shape[0], : row.shape[1]] = row
    return padded


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


def check_text(text: str, what: str) -> None:
    """Raises `ValueError` for halves of surrogate pairs, such as a name of another encoding has on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no text at character {error.start}: {text[error.start]!a}. Decode it anew."
        ) from error


def title_of(document) -> str | None:
    title = document.get("title") if isinstance(document, dict) else None
    if title is not None and not isinstance(title, str):
        raise ValueError(f"A title is of type {type(title).__name__}; expected a string or none.")
    check_text(title or "", "A title")
    return title


def text_of(document, number: int) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise ValueError(
            f"Document {number} is of type {type(document).__name__}"
            + (f" with a `text` of type {type(text).__name__}" if isinstance(document, dict) else "")
            + '; expected a string or {"title": str, "text": str}.'
        )
    check_text(text, f"Document {number}")
    return text


class DocumentEncoder:
    """Passages to slots, for the processor: needs its `tokenizer` and settings."""

    pad_words = staticmethod(pad_words)
    embeds_tensor = staticmethod(embeds_tensor)
    words_tensor = staticmethod(words_tensor)

    def mark_control_tokens(self, text):
        """Texts or messages with the tokenizer's special tokens marked, so that `encode_marked_chat` reads them as
        text. What stands for a turn without being a special token, such as Llama 2's `[INST]`, is not one."""
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return mark_control_tokens(text, _get_control_token_patterns(tuple(special))[0])

    @property
    def encoder_device(self) -> str | None:
        """Device of the sentence encoder; `None` leaves it to sentence-transformers."""
        return self._encoder.device

    @encoder_device.setter
    def encoder_device(self, device: str | None) -> None:
        self._encoder.device = device

    @property
    def sentence_encoder(self):
        """The `SentenceTransformer`, loaded on first use."""
        return self._encoder.model

    def segment_documents(self, documents: Sequence[str | dict]) -> list[Segment]:
        """The segments of one question's documents, in order; empty when there is nothing but white space.

        Raises:
            `ValueError`: a document that is neither a string nor `{"title": str, "text": str}`.
        """
        segments = []
        for number, document in enumerate(documents):
            segments += segment_document(
                text_of(document, number),
                number,
                sentences_per_segment=self.sentences_per_segment,
                spacy_model=self.spacy_model,
                num_reads=self._encoder.num_reads,
            )
        return segments

    def encoder_texts(self, segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[str]:
        """What the encoder reads for each segment: a title, where there is one, keeps a sentence's subject with it."""
        titles = [title_of(document) for document in documents]
        return [f"{titles[s.document]}: {s.text}" if titles[s.document] else s.text for s in segments]

    def tokenize_segments(self, segments: Sequence[Segment], documents: Sequence[str | dict]) -> list[SegmentTokens]:
        """Each segment's tokens in the backbone's vocabulary, as the whole document has them. The words of a title
        belong to the first segment of its document."""
        texts = self.encoder_texts(segments, documents)
        tokens_of = {
            number: self._tokenize_document(documents[number], number) for number in {s.document for s in segments}
        }
        found = []
        for number, (segment, text) in enumerate(zip(segments, texts, strict=True)):
            ids, ends = tokens_of[segment.document]
            is_first = number == 0 or segments[number - 1].document != segment.document
            start = 0 if is_first else np.searchsorted(ends, segment.start, side="right")
            end = np.searchsorted(ends, segment.end, side="right")
            word_ends = np.clip(ends[start:end] - segment.start, 0, len(segment.text))
            found.append(SegmentTokens(segment, text, tuple(ids[start:end].tolist()), tuple(word_ends.tolist())))
        return found

    def _tokenize_document(self, document: str | dict, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a document's tokens, title first, and the character of its text where each ends, below 1 in titles."""
        text, title = text_of(document, number), title_of(document)
        title = f"{title}: " if title else ""
        read = self.tokenizer(title + text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = read["input_ids"], [end for _, end in read["offset_mapping"]]
        special = {token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        if special.intersection(ids):  # a document's `<|im_end|>` is text
            tokens = [self.tokenizer.convert_ids_to_tokens(each) if each in special else None for each in ids]
            read_as_text = [
                [each] if token is None else encode_marked_chat(self.tokenizer, self.mark_control_tokens(token))
                for each, token in zip(ids, tokens, strict=True)
            ]
            ends = [end for end, each in zip(ends, read_as_text, strict=True) for _ in each]
            ids = [each for row in read_as_text for each in row]
        return np.array(ids, dtype=np.int64), np.array(ends, dtype=np.int64) - len(title)

    def encode_slots(self, tokens: Sequence[SegmentTokens], tokens_per_slot: int | str) -> torch.FloatTensor:
        """Normalised embeddings of the slots of `tokens`, in order, float32 (num_slots, encoder_hidden_size): one for
        each segment, or for each run of about `tokens_per_slot` tokens."""
        if tokens_per_slot == "segment":
            return self.encode_segments([each.encoder_text for each in tokens])
        starts = [each.encoder_start for each in tokens]
        ends = [
            [start + (each.word_ends[last - 1] if last else 0) for _, last in each.runs(tokens_per_slot)]
            for start, each in zip(starts, tokens, strict=True)
        ]
        with torch.no_grad():
            embeds = self._encoder.encode_runs([each.encoder_text for each in tokens], starts, ends).cpu()
        self.check_context_embeds(embeds, 0)
        return embeds

    def encode_segments(
        self, texts: Sequence[str], batch_size: int = 64, show_progress_bar: bool = False, **kwargs: Any
    ) -> torch.FloatTensor:
        """Normalised embeddings of `texts`, float32, (len(texts), encoder_hidden_size).

        `kwargs` are those of `SentenceTransformer.encode`, such as `pool`.
        """
        embeds = self._encoder.model.encode(
            list(texts),
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            normalize_embeddings=True,
            convert_to_tensor=True,
            **kwargs,
        )
        embeds = embeds.float().cpu()
        self.check_context_embeds(embeds, 0)
        return embeds

    def encode_for_search(self, texts: Sequence[str]) -> torch.FloatTensor:
        """Normalised embeddings, float32 (len(texts), encoder_hidden_size), by the encoder without what it learned with
        the aligner, which says what slots hold and no longer which texts answer a question."""
        return self._encoder.untrained.model.encode(
            list(texts), normalize_embeddings=True, convert_to_tensor=True, show_progress_bar=False
        ).cpu()

    def encode_runs(self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None):
        """Embeddings of runs of characters, as [`LazyEncoder.encode_runs`]; of whole texts where `ends` is `None`."""
        return self._encoder.encode_texts(texts) if ends is None else self._encoder.encode_runs(texts, starts, ends)

    def encode_documents(
        self,
        documents: Sequence[str | dict],
        *,
        max_slots: int | None = None,
        slot_policy: str | None = None,
        tokens_per_slot: int | str | None = None,
    ) -> EncodedDocuments:
        """The slots of one question's passages, to keep or to give as `context_embeds` and `context_word_ids`.

        Arguments and errors as in [`~ArcAlignerProcessor.__call__`].
        """
        return self.encode_batch(
            [documents], max_slots=max_slots, slot_policy=slot_policy, tokens_per_slot=tokens_per_slot
        )[0]

    def encode_batch(
        self,
        documents: Sequence[Sequence[str | dict]],
        *,
        max_slots: int | None = None,
        slot_policy: str | None = None,
        tokens_per_slot: int | str | None = None,
        room: Sequence[int] | None = None,
    ) -> list[EncodedDocuments]:
        """As `encode_documents` for the passages of several questions, all encoded at once. With `room`, the most slots
        that each may have, more are refused before anything is encoded."""
        rate = self.check_slot_settings(max_slots, slot_policy, tokens_per_slot)
        fitted = [self._fit(row, max_slots if rate == "segment" else None, slot_policy) for row in documents]
        tokens = [
            self._tokens_of(row.segments, row_documents, rate) or [EMPTY_SEGMENT]
            for row, row_documents in zip(fitted, documents, strict=True)
        ]
        counts = [sum(len(each.runs(rate)) for each in row) for row in tokens]
        for number, (count, most) in enumerate(zip(counts, room or counts, strict=True)):
            if min(count, max_slots or count) > most:
                raise ValueError(
                    f"The passages of row {number} are {count} slots, but beside its text the backbone reads {most}. "
                    "Pass fewer passages or a lower `max_slots`, or make a slot stand for more text."
                )
        encoded = self.encode_slots([each for row in tokens for each in row], rate).split(counts)
        rows = []
        for row, row_tokens, embeds in zip(fitted, tokens, encoded, strict=True):
            pieces, dropped, words = row.segments, row.dropped, None
            if rate != "segment":
                pieces = [piece for each in row_tokens for piece in each.pieces(rate)]
                pieces, dropped = pieces[:max_slots], pieces[max_slots or len(pieces) :]
            if self.context_words:
                runs = [torch.tensor(one.word_ids[a:b]) for one in row_tokens for a, b in one.runs(rate)][:max_slots]
                words = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True, padding_value=-1).long()
            pieces = pieces if row.segments else []
            rows.append(EncodedDocuments(pieces, embeds[:max_slots], words, row.num_merged, dropped))
        return rows

    def _tokens_of(self, segments, documents, rate) -> list[SegmentTokens]:
        if self.context_words or rate != "segment":
            return self.tokenize_segments(segments, documents)
        texts = self.encoder_texts(segments, documents)
        return [SegmentTokens(segment, text, (), ()) for segment, text in zip(segments, texts, strict=True)]

    def check_slot_settings(
        self, max_slots: int | None = None, slot_policy: str | None = None, tokens_per_slot: int | str | None = None
    ) -> int | str:
        """The rate that a call has.

        Raises:
            `ValueError`: settings that cannot be, or not together.
        """
        check_slot_budget(max_slots, "drop" if slot_policy is None else slot_policy)
        rate = self.tokens_per_slot if tokens_per_slot is None else tokens_per_slot
        check_tokens_per_slot(rate)
        if rate != "segment" and max_slots is not None and slot_policy == "merge":
            raise ValueError(
                f'`slot_policy` is "merge", but with `tokens_per_slot` {rate} slots are runs of tokens. Raise '
                '`tokens_per_slot` for fewer slots, or pass `slot_policy="drop"`.'
            )
        if (known := self.trained_tokens_per_slot) and rate not in known:
            logger.warning_once(
                f"`tokens_per_slot` is {rate!r}, but this aligner has learned {', '.join(map(str, known))}. Expect "
                "worse answers."
            )
        return rate

    def _fit(self, documents, max_slots, slot_policy) -> FittedSegments:
        segments = self.segment_documents(documents)
        texts = [text_of(document, number) for number, document in enumerate(documents)]
        return fit_segments(segments, texts, max_slots, slot_policy or "drop", self._encoder.num_reads)

    def check_context_embeds(self, embeds: torch.FloatTensor, row: int) -> None:
        """Raises `ValueError` unless `embeds` is (num_slots, encoder_hidden_size), finite, with at least one slot."""
        if embeds.dim() != 2 or embeds.shape[1] != self.encoder_hidden_size or embeds.shape[0] == 0:
            raise ValueError(
                f"The embeddings of row {row} have shape {tuple(embeds.shape)}; expected (num_slots, "
                f"{self.encoder_hidden_size}), the width of encoder {self.encoder_name_or_path}, with at least "
                "one slot."
            )
        if not torch.isfinite(embeds).all():
            raise ValueError(
                f"The embeddings of row {row} hold {int((~torch.isfinite(embeds)).sum())} NaN or infinite values of "
                f"{embeds.numel()}. Check the encoder's output."
            )


# Texts that are read at a time. They are sorted by length: of few, hardly any padding is read.
RUN_BATCH = 16


# Of a checkpoint whose encoder was trained along.
ENCODER_FOLDER = "encoder"


def find_encoder_folder(checkpoint: str, revision: str | None = None) -> str:
    """The folder `encoder` of a checkpoint, on this machine or on the Hub.

    Raises:
        `ValueError`: a checkpoint without, by its name.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        folder = Path(snapshot_download(checkpoint, revision=revision, allow_patterns=f"{ENCODER_FOLDER}/*"))
    if not (folder / ENCODER_FOLDER / "adapter_config.json").is_file():
        raise ValueError(
            f"{checkpoint} lacks {ENCODER_FOLDER}/adapter_config.json, the sentence encoder that was trained along "
            "with the aligner. Save the processor again, or download the checkpoint again."
        )
    return str(folder / ENCODER_FOLDER)


class LazyEncoder:
    """The sentence encoder, loaded on first use. Shared, not copied, when a processor is copied or saved.

    With `folder`, a sentence-transformers folder of LoRA weights that were trained along with the aligner, these are
    added to the encoder `name_or_path`.
    """

    def __init__(self, name_or_path: str, folder: str | None = None):
        self.name_or_path = name_or_path
        self.folder = folder
        self.device = None
        self._model = None
        self._reading = None

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # A process that cuts passages asks what the encoder reads; the weights stay where they are.
        return self.__dict__ | {"_model": None, "_reading": self._reading if self._model is None else self.reading}

    @property
    def model(self):
        if self._model is None:
            self._model = self._load()
            for layer in self._lora_layers():
                layer.merge()
        elif self.device is not None and self._model.device != torch.device(self.device):
            self._model.to(self.device)
        return self._model

    def _load(self):
        try:
            sentence_transformers = importlib.import_module("sentence_transformers")
        except ImportError as error:
            raise ImportError(
                "Passages are encoded by sentence-transformers, which is not installed: `pip install "
                "sentence-transformers`. Or pass precomputed `context_embeds`."
            ) from error
        try:
            model = sentence_transformers.SentenceTransformer(
                resolve_encoder(self.name_or_path), device=self.device, model_kwargs={"use_safetensors": True}
            )
        except OSError as error:
            raise OSError(missing_model_message("encoder", self.name_or_path, error)) from error
        if self.folder is not None:
            model.load_adapter(self.folder)
            model.eval().requires_grad_(False)
        return model

    @functools.cached_property
    def untrained(self) -> "LazyEncoder":
        """The encoder as it was before it was trained along."""
        if self.folder is None:
            return self
        encoder = LazyEncoder(self.name_or_path)
        encoder.device = self.device
        return encoder

    def _lora_layers(self) -> list:
        from peft.tuners.lora import LoraLayer  # only an encoder that was trained along needs PEFT

        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def train_along(self, lora_r: int) -> list[torch.nn.Parameter]:
        """Gives the encoder LoRA of rank `lora_r`, or goes on with what it has, and returns its weights, to be trained.

        Raises:
            `ValueError`: LoRA of another rank.
        """
        from peft import LoraConfig

        model = self.model
        if not (layers := self._lora_layers()):
            # A pooler is not read: it would get no gradient.
            config = LoraConfig(
                r=lora_r, lora_alpha=2 * lora_r, target_modules="all-linear", exclude_modules=".*pooler.*"
            )
            model.add_adapter(config)
            layers = self._lora_layers()
        weights = []
        for layer in layers:
            if layer.merged:
                layer.unmerge()
            if (found := layer.r["default"]) != lora_r:
                raise ValueError(f"The encoder has LoRA of rank {found}; got {lora_r}. Go on with the rank it has.")
            layer.cast_input_dtype_enabled = False  # autocast does it, and does not cast all of the input
            weights += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        model.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        return weights

    def save(self, folder: Path) -> None:
        """Writes the encoder's LoRA as a sentence-transformers folder, which needs the base encoder only."""
        config = self.model[0].model.peft_config["default"]
        config.base_model_name_or_path = self.name_or_path
        self.model.save(str(folder), create_model_card=False)

    @property
    def reading(self) -> tuple:
        """The most tokens it reads, if there is a limit, and its tokenizer."""
        if self._model is None and self._reading is not None:
            return self._reading
        return self.model.max_seq_length, self.model.tokenizer

    def num_reads(self, text: str) -> int:
        """How many times the most that the encoder reads `text` is, about; 1 where it reads it whole."""
        limit, tokenizer = self.reading
        if limit is None or 2 * len(text) < limit:
            return 1
        # No tokenizer joins so many characters. What is longer is cut first, so that it is tokenized twice at most.
        longest = 16 * limit
        if len(text) > longest:
            return max(2, len(text) // longest)
        return -(-len(tokenizer(text, truncation=False, verbose=False)["input_ids"]) // limit)

    def encode_runs(self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]]) -> torch.Tensor:
        """Late chunking: each text is read once, its token states are averaged over runs of characters.

        Args:
            texts (`Sequence[str]`): What the encoder reads.
            starts (`Sequence[int]`): For each text, the character where its first run begins.
            ends (`Sequence[Sequence[int]]`): For each text, the characters where its runs end, ascending.

        Returns:
            Normalised embeddings (num_runs, encoder_hidden_size) of all texts' runs in order, with a gradient where the
            encoder's weights ask for one. A run without a token of the encoder's own, inside of a long one, has the
            states of that token.
        """
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # texts of like length share a batch
        pooled: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for first in range(0, len(order), RUN_BATCH):
            batch = order[first : first + RUN_BATCH]
            states, offsets = self._token_states([texts[number] for number in batch])
            weights = torch.zeros(len(batch), max(len(ends[number]) for number in batch), states.shape[1])
            for row, number in enumerate(batch):
                run_weights = _run_weights(offsets[row], starts[number], np.asarray(ends[number]))
                weights[row, : len(ends[number]), : run_weights.shape[1]] = torch.from_numpy(run_weights)
            means = weights.to(states) @ states  # (texts, max_runs, encoder_hidden_size)
            for row, number in enumerate(batch):
                pooled[number] = means[row, : len(ends[number])]
        return torch.nn.functional.normalize(torch.cat(pooled).float(), dim=-1)

    def encode_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Normalised embeddings (len(texts), encoder_hidden_size), as [`SentenceTransformer.encode`] makes them, with a
        gradient where the encoder's weights ask for one."""
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        embeds: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for first in range(0, len(order), RUN_BATCH):
            batch = order[first : first + RUN_BATCH]
            features = self.model.preprocess([prompt + texts[number] for number in batch])
            features = {name: each.to(self.model.device) for name, each in features.items() if torch.is_tensor(each)}
            for number, embed in zip(batch, self.model(features)["sentence_embedding"], strict=True):
                embeds[number] = embed
        return torch.nn.functional.normalize(torch.stack(embeds).float(), dim=-1)

    def _token_states(self, texts: list[str]) -> tuple[torch.Tensor, list[np.ndarray]]:
        """States (texts, max_tokens, encoder_hidden_size), and of each text's tokens the characters they stand for,
        (tokens, 2), equal where a token stands for none."""
        transformer = self.model[0]
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""
        limit, tokenizer = self.reading
        read = tokenizer(
            [prompt + text for text in texts],
            truncation=limit is not None,
            max_length=limit,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets, lengths = read.pop("offset_mapping").numpy() - len(prompt), read["attention_mask"].sum(dim=1).tolist()
        device = next(transformer.parameters()).device
        states = transformer({name: tensor.to(device) for name, tensor in read.items()})["token_embeddings"]
        return states, [row[:length] for row, length in zip(offsets, lengths, strict=True)]


def _run_weights(offsets: np.ndarray, start: int, ends: np.ndarray) -> np.ndarray:
    """Weights (num_runs, tokens) that average the tokens at `offsets` (tokens, 2) whose middle lies in each run."""
    middles = offsets.sum(axis=1) / 2
    is_own = (offsets[:, 1] > offsets[:, 0]) & (middles > start)
    weights = np.zeros((len(ends), len(offsets)), dtype=np.float32)
    run_of_token = np.minimum(np.searchsorted(ends, middles), len(ends) - 1)
    weights[run_of_token[is_own], is_own.nonzero()[0]] = 1.0
    run_middles = (np.concatenate([[start], ends[:-1]]) + ends) / 2
    for run in (weights.sum(axis=1) == 0).nonzero()[0]:
        weights[run, np.abs(middles - run_middles[run]).argmin()] = 1.0
    return weights / weights.sum(axis=1, keepdims=True)
