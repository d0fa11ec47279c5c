"""Passages to slots: each segment is read once by the sentence encoder and becomes one embedding or, with
`tokens_per_slot`, one for each run of its tokens.

    documents -> segments (`segmentation_arcaligner.py`) -> tokens -> context_embeds, context_word_ids
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import logging
from transformers.utils.chat_template_utils import _get_control_token_patterns, encode_marked_chat, mark_control_tokens

from .encoder_arcaligner import LazyEncoder, find_encoder_folder
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
    """A segment with its tokens in the backbone's vocabulary and the text that the encoder reads."""

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


class GivenSlots(NamedTuple):
    """Precomputed slots of one question."""

    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 behind a slot's tokens


class EncodedDocuments(NamedTuple):
    """The passages of one question as slots."""

    segments: list[Segment]  # what each slot stands for; none where there is nothing but white space
    context_embeds: torch.FloatTensor  # (num_slots, encoder_hidden_size)
    context_word_ids: torch.LongTensor | None  # (num_slots, max_words), -1 behind a slot's tokens
    num_merged: int  # segments that share their slot with others
    dropped: list[Segment]  # what has no slot


def pad_words(rows: Sequence[torch.LongTensor]) -> torch.LongTensor:
    """Stacks word ids of rows, each (num_slots, max_words), to (batch, max_slots, max_words), padded with -1."""
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
) -> tuple[list[list | None], list["GivenSlots | None"]]:
    """The passages and the precomputed slots of each of `num_rows` questions; `None` where there are none.

    Raises:
        `ValueError`: values of another kind, or not one entry for each question.
    """
    passages = rows_of(documents_of, documents, "`documents`", is_single, num_rows)
    embeds = rows_of(embeds_tensor, context_embeds, "`context_embeds`", is_single, num_rows)
    words = rows_of(words_tensor, context_word_ids, "`context_word_ids`", is_single, num_rows)
    given = [None if row is None else GivenSlots(row, ids) for row, ids in zip(embeds, words, strict=True)]
    return passages, given


def check_text(text: str, what: str) -> None:
    """Raises `ValueError` for text that is not valid Unicode, such as a command-line argument in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no text at character {error.start}: {text[error.start]!a}. Decode it anew."
        ) from error


def check_question(question) -> None:
    """Raises `ValueError` unless the question is a text that is not empty."""
    if not isinstance(question, str):
        raise ValueError(f"A question is of type {type(question).__name__}; expected a string.")
    check_text(question, "The question")
    if not question.strip():
        raise ValueError("The question is empty; expected a text. Passages alone ask nothing.")


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

    documents_of = staticmethod(documents_of)

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

    def load_trained_encoder(self, checkpoint: str, revision: str | None = None) -> None:
        """Uses the encoder that was trained with the aligner of a checkpoint (path or Hub id), loaded on first use.

        Raises:
            `ValueError`: a checkpoint without.
        """
        folder = find_encoder_folder(str(checkpoint), revision)
        self._encoder, self.trained_encoder = LazyEncoder(self.encoder_name_or_path, folder, self.encoder_dtype), True

    def train_encoder(self, lora_r: int) -> list[torch.nn.Parameter]:
        """Adds LoRA of rank `lora_r` to the encoder, unless it has it, and returns its weights, ready to be trained.

        Raises:
            `ValueError`: an encoder that has LoRA of another rank.
        """
        weights = self._encoder.train_along(lora_r)
        self.trained_encoder = True
        return weights

    def cast_encoder(self, dtype: torch.dtype, lora_dtype: torch.dtype = torch.float32) -> None:
        """Casts the sentence encoder to `dtype` and its LoRA to `lora_dtype`."""
        self._encoder.cast(dtype, lora_dtype)

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
        """Normalized embeddings of the slots of `tokens`, in order, float32 (num_slots, encoder_hidden_size): one for
        each segment, or for each run of about `tokens_per_slot` tokens."""
        if tokens_per_slot == "segment":
            return self.encode_segments([each.encoder_text for each in tokens])
        starts = [each.encoder_start for each in tokens]
        ends = [
            [start + (each.word_ends[last - 1] if last else 0) for _, last in each.runs(tokens_per_slot)]
            for start, each in zip(starts, tokens, strict=True)
        ]
        with torch.no_grad():
            embeds = self.encode_runs([each.encoder_text for each in tokens], starts, ends).cpu()
        self.check_context_embeds(embeds, 0)
        return embeds

    def encode_segments(self, texts: Sequence[str]) -> torch.FloatTensor:
        """Normalized embeddings of `texts`, float32 (len(texts), encoder_hidden_size)."""
        embeds = self._encoder.encode(texts)
        self.check_context_embeds(embeds, 0)
        return embeds

    def encode_for_search(self, texts: Sequence[str]) -> torch.FloatTensor:
        """Normalized embeddings for search, float32 (len(texts), encoder_hidden_size), of the encoder before training:
        the trained one describes what a text says, not which questions it answers."""
        return self._encoder.untrained.encode(texts)

    def encode_runs(self, texts: Sequence[str], starts: Sequence[int], ends: Sequence[Sequence[int]] | None):
        """Embeddings of runs of characters, as [`LazyEncoder.encode_runs`]; of whole texts where `ends` is `None`."""
        return self._encoder.encode_runs(texts, starts, ends)

    def encode_documents(
        self,
        documents: Sequence[str | dict],
        *,
        max_slots: int | None = None,
        slot_policy: str | None = None,
        tokens_per_slot: int | str | None = None,
    ) -> EncodedDocuments:
        """Encodes the passages of one question to slots: the `context_embeds` and `context_word_ids` of `__call__`.

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
        """Like `encode_documents`, for several questions at once. `room` is the maximum number of slots of each; more
        raise an error before anything is encoded."""
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
                    f"The passages of row {number} are {count} slots, but beside its text the backbone reads "
                    f"{max(0, most)}. Pass a shorter question, fewer passages or a lower `max_slots`, or make a slot "
                    "stand for more text."
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

    def use_given(
        self,
        documents: Sequence[list | None],
        given: Sequence[GivenSlots],
        *,
        max_slots: int | None = None,
        slot_policy: str | None = None,
        tokens_per_slot: int | str | None = None,
    ) -> list[EncodedDocuments]:
        """Like `encode_batch`, from precomputed slots. `documents`, where given, must have as many segments."""
        if max_slots is not None and slot_policy == "merge":
            raise ValueError(
                '`slot_policy` is "merge", but `context_embeds` made before cannot be merged. Pass `documents` '
                'alone, or `slot_policy="drop"`.'
            )
        rate = self.check_slot_settings(max_slots, slot_policy, tokens_per_slot)
        rows = []
        for number, (row_documents, (embeds, words)) in enumerate(zip(documents, given, strict=True)):
            self.check_context_embeds(embeds, number)
            if words is not None and (words.dim() != 2 or len(words) != len(embeds)):
                raise ValueError(
                    f"The `context_word_ids` of row {number} have shape {tuple(words.shape)} but its "
                    f"`context_embeds` hold {len(embeds)} slots; expected ({len(embeds)}, max_words)."
                )
            segments = []
            if row_documents is not None:
                segments = self.segment_documents(row_documents)
                if rate != "segment":
                    tokens = self.tokenize_segments(segments, row_documents)
                    segments = [piece for each in tokens for piece in each.pieces(rate)]
                if max(1, len(segments)) != len(embeds):
                    raise ValueError(
                        f"Row {number} has {max(1, len(segments))} segments but {len(embeds)} precomputed "
                        "`context_embeds`. Compute them with the same segmentation, or leave `documents` out."
                    )
            words = None if words is None else words[:max_slots]
            dropped = [] if max_slots is None else segments[max_slots:]
            rows.append(EncodedDocuments(segments[:max_slots], embeds[:max_slots], words, 0, dropped))
        return rows

    def statistics(self, documents: Sequence[str | dict], row: EncodedDocuments, has_budget: bool) -> dict[str, float]:
        """The number of `tokens` and `slots` and the `compression_rate`; with `has_budget` also how many segments are
        `merged` and `dropped`."""
        texts = [text_of(document, number) for number, document in enumerate(documents)]
        tokens = kept = self._count_tokens(texts)
        if row.dropped:
            last = row.segments[-1]
            kept = self._count_tokens([*texts[: last.document], texts[last.document][: last.end]])
        num_slots = len(row.context_embeds)
        found = {"tokens": tokens, "slots": num_slots, "compression_rate": kept / num_slots}
        return found | ({"merged": row.num_merged, "dropped": len(row.dropped)} if has_budget else {})

    def _count_tokens(self, texts: list[str]) -> int:
        return sum(len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else 0

    def _tokens_of(self, segments, documents, rate) -> list[SegmentTokens]:
        if self.context_words or rate != "segment":
            return self.tokenize_segments(segments, documents)
        texts = self.encoder_texts(segments, documents)
        return [SegmentTokens(segment, text, (), ()) for segment, text in zip(segments, texts, strict=True)]

    def check_slot_settings(
        self, max_slots: int | None = None, slot_policy: str | None = None, tokens_per_slot: int | str | None = None
    ) -> int | str:
        """Checks the settings of a call and returns its `tokens_per_slot`.

        Raises:
            `ValueError`: settings that are impossible, or that exclude each other.
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
