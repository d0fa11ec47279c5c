"""Documents to rows of a corpus: cut into passages, encoded, written. Documents that have not changed are left alone.

read_documents -> batches -> those that are new or changed -> passage_rows -> Corpus.add
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ...answering_arcaligner import search_text
from ...common.files import counted
from ...common.passages import Document, Passage, passages_of
from .sources import read_documents
from .table import Corpus, passage_checksums

logger = logging.getLogger(__name__)

# What is written at a time, some hundred passages; a document is never parted.
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 300_000
# What is encoded at a time, of a large document.
PART_PASSAGES = 256


@dataclass
class BuildReport:
    """What a build has done so far. `skipped` says what could not be read, and why."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    passages: int = 0
    skipped: list[str] = field(default_factory=list)
    removed: int = 0


def build_corpus(
    sources: list[str],
    corpus: Corpus,
    processor,
    *,
    prune: bool = False,
    on_batch: Callable[[BuildReport], Any] = lambda report: None,
) -> BuildReport:
    """
    Adds the documents of sources, and replaces those that have changed. A killed build continues where it stopped.

    Args:
        sources (`list[str]`): See `sources.py`.
        corpus ([`Corpus`]): Where to.
        processor ([`ArcAlignerProcessor`]): Makes the slots; its settings are the corpus's.
        prune (`bool`): At the end, remove documents that are in none of the sources. A file that cannot be read keeps
            its document; a data set that cannot be read to its end keeps all.
        on_batch (`Callable`): Is told what was done, after each batch.

    Raises:
        `ValueError`: no document at all; another process writes.
    """
    report, num_hidden = BuildReport(), 0  # sources and rows that could not be read, and may hold any document
    text_of: dict[int, int | None] = {}  # by id, both as hashes: there may be millions; `None` where it is not read

    def skip(what: str, may_hold_documents: bool = True, id: str | None = None) -> None:
        nonlocal num_hidden
        report.skipped.append(what)
        if id is not None:
            text_of.setdefault(hash(id))
        else:
            num_hidden += may_hold_documents

    def is_first(document: Document) -> bool:
        """Whether no document before had its id. Another text under one id is skipped."""
        text, before = hash((document.title, document.text)), text_of.get(hash(document.id))
        if before is None:
            text_of[hash(document.id)] = text
        elif before == text:
            report.unchanged += 1
        else:
            skip(f"{document.id} is the id of an earlier document with another text", may_hold_documents=False)
        return before is None

    with corpus.writing():
        for documents in _batches(filter(is_first, read_documents(sources, skip, corpus.path.parent))):
            known = corpus.digests(document.id for document in documents)
            new = [document for document in documents if known.get(document.id) != document.digest]
            replaced = [document.id for document in new if document.id in known]
            cut = corpus.settings["passage_tokens"], corpus.settings["spacy_model"], processor.tokenizer
            passages = passages_of(new, *cut)
            starts = range(0, len(passages), PART_PASSAGES)
            parts = [passage_rows(passages[start : start + PART_PASSAGES], processor, corpus) for start in starts]
            if parts:
                corpus.add(pa.concat_tables(parts), replaced)
            report.added += len(new) - len(replaced)
            report.replaced += len(replaced)
            report.unchanged += len(documents) - len(new)
            report.passages += len(passages)
            on_batch(report)
        if not report.added + report.replaced + report.unchanged:
            why = f": {report.skipped[0]}" if report.skipped else "."
            raise ValueError(f"There is no document in {', '.join(sources)}{why}")
        if prune and num_hidden:
            logger.warning("--prune removed nothing, because %d sources or rows could not be read", num_hidden)
        elif prune:
            gone = [each for each in corpus.documents() if hash(each) not in text_of]
            for first in range(0, len(gone), BATCH_DOCUMENTS):
                corpus.delete(gone[first : first + BATCH_DOCUMENTS])
            report.removed = len(gone)
        corpus.optimize()
    return report


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_characters = [], 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def summary(report: BuildReport, info: dict[str, Any]) -> str:
    """What a build has done, and the size of the corpus."""
    return (
        f"{counted(report.added, 'document')} added, {report.replaced} replaced, {report.removed} removed, "
        f"{report.unchanged} unchanged, {len(report.skipped)} skipped.\n{counted(info['passages'], 'passage')} of "
        f"{counted(info['documents'], 'document')}, {counted(info['slots'], 'slot')}: {info['bytes']:,} bytes."
    )


def passage_rows(passages: list[Passage], processor, corpus: Corpus) -> pa.Table:
    """Passages with their slots, as rows of a corpus."""
    settings = corpus.settings
    read = [[{"title": each.title, "text": each.text}] for each in passages]
    encoded = processor.slot_encoder.encode_batch(read, tokens_per_slot=settings["tokens_per_slot"])
    columns = {
        "id": [f"{each.document.id}#{each.number}" for each in passages],
        "document": [each.document.id for each in passages],
        "digest": [each.document.digest for each in passages],
        **{name: [getattr(each, name) for each in passages] for name in ("title", "start", "end", "page")},
        "text": [each["text"] for (each,) in read],
        "segments": [[{"start": s.start, "end": s.end} for s in each.segments] for each in encoded],
        "slots": pa.ListArray.from_arrays(
            np.cumsum([0, *(len(each.context_embeds) for each in encoded)], dtype=np.int32),
            _vectors([each.context_embeds for each in encoded], settings["encoder_hidden_size"]),
        ),
        "vector": _vectors([_search_vectors(read, encoded, processor)], settings["encoder_hidden_size"]),
    }
    if settings["context_words"]:
        columns["words"] = [
            [[word for word in words if word >= 0] for words in each.context_word_ids.tolist()] for each in encoded
        ]
    schema = corpus.table.schema  # its last column is made of the others
    rows = pa.table(columns, schema=pa.schema([*schema][:-1], schema.metadata))
    return rows.append_column(schema.field("checksum"), [passage_checksums(rows)])


def _search_vectors(read: list[list[dict]], encoded: list, processor) -> torch.Tensor:
    """What each passage is found by, (num_passages, encoder_hidden_size): the mean of its slots or, where the encoder
    was trained jointly and has become another, what it was before makes of the passage."""
    if processor.trained_encoder:
        return processor.encoder.untrained.encode([search_text(each["title"], each["text"]) for (each,) in read])
    means = [each.context_embeds.mean(dim=0) for each in encoded]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def _vectors(rows: list[torch.Tensor], width: int) -> pa.FixedSizeListArray:
    """Rows of (number, width) one below the other, in float16."""
    values = torch.cat([torch.empty(0, width), *rows]).half().numpy().ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(values), width)
