"""Passages to slots: each segment is read once by the sentence encoder and becomes one embedding or, with
`tokens_per_slot`, one for each run of its tokens.

    documents -> segments (`segmentation_arcaligner.py`) -> tokens -> context_embeds, context_word_ids
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils import logging
from transformers.utils.chat_template_utils import (
    _get_control_token_patterns,
    encode_marked_chat,
    mark_control_tokens,
)

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
