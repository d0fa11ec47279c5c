"""From documents to rows of a corpus: cut, encode, write. Unchanged documents are skipped.

read_documents -> batches -> new or changed documents -> document_rows -> Corpus.add

With several processes, `document_rows` runs in them, a batch each; this one reads and writes, in the same order.
"""

import logging
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from ...answering_arcaligner import search_text
from ...common.files import counted
from ...common.passages import Document, Passage, passages_of
from .sources import read_documents
from .table import Corpus, passage_checksums

logger = logging.getLogger(__name__)

# Written in one step: some hundred passages; a document is never split.
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 300_000
# Passages of a large document that are encoded together.
PART_PASSAGES = 256


@dataclass
class BuildReport:
    """Progress of a build. `skipped` lists what could not be read, and why."""

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
    processes: int = 1,
) -> BuildReport:
    """
    Adds the documents of sources, and replaces those that have changed. A killed build continues where it stopped.

    Args:
        sources (`list[str]`): See `sources.py`.
        corpus ([`Corpus`]): The corpus to write.
        processor ([`ArcAlignerProcessor`]): Makes the slots; its settings must be those of the corpus.
        prune (`bool`): At the end, remove documents that are in none of the sources. A file that cannot be read keeps
            its document; a data set that cannot be read to its end keeps all.
        on_batch (`Callable`): Called with the report after each batch.
        processes (`int`, defaults to 1): Number of processes that encode passages, each with its own encoder. The table
            is the same as with one. A script that uses several needs `if __name__ == "__main__":`.

    Raises:
        `ValueError`: no document; another process that writes; fewer than one process.
        `OSError`: a full disk; a process that has died, for example for lack of memory.
    """
    if processes < 1:
        raise ValueError(f"`processes` is {processes}; expected 1 or more.")
    # Hidden: sources and rows that could not be read, and may contain any document.
    report, num_hidden = BuildReport(), 0
    text_of: dict[int, int | None] = {}  # id to text, both as hashes, as there may be millions; `None` if not read

    def skip(what: str, may_hold_documents: bool = True, id: str | None = None) -> None:
        nonlocal num_hidden
        report.skipped.append(what)
        if id is not None:
            text_of.setdefault(hash(id))
        else:
            num_hidden += may_hold_documents

    def is_first(document: Document) -> bool:
        """Whether the id of a document is new in this build. A second text under the same id is skipped."""
        text, before = hash((document.title, document.text)), text_of.get(hash(document.id))
        if before is None:
            text_of[hash(document.id)] = text
        elif before == text:
            report.unchanged += 1
        else:
            skip(f"{document.id} is the id of an earlier document with another text", may_hold_documents=False)
        return before is None

    with corpus.writing(), _encoding(corpus, processor, processes) as encode:
        batches = _batches(filter(is_first, read_documents(sources, skip, corpus.path.parent)))
        for batch in _encoded(batches, corpus, encode, ahead=2 * processes if processes > 1 else 0):
            rows = batch.rows.result()
            if rows is not None:
                corpus.add(rows, batch.replaced)
            report.added += batch.num_new - len(batch.replaced)
            report.replaced += len(batch.replaced)
            report.unchanged += batch.num_unchanged
            report.passages += 0 if rows is None else len(rows)
            on_batch(report)
        if not report.added + report.replaced + report.unchanged:
            why = f": {report.skipped[0]}" if report.skipped else "."
            raise ValueError(f"{', '.join(sources)}: found no document that can be read{why}")
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


class _Batch(NamedTuple):
    """Documents that are written in one step: their rows, and the ids of the documents that they replace."""

    rows: "Future[pa.Table | None]"
    replaced: list[str]
    num_new: int
    num_unchanged: int


def _encoded(
    batches: Iterable[list[Document]],
    corpus: Corpus,
    encode: Callable[[list[Document]], "Future[pa.Table | None]"],
    ahead: int,
) -> Iterator[_Batch]:
    """Yield encoded batches in order; at most `ahead` further ones are encoded meanwhile."""
    waiting: deque[_Batch] = deque()
    for documents in batches:
        known = corpus.digests(document.id for document in documents)
        new = [document for document in documents if known.get(document.id) != document.digest]
        replaced = [document.id for document in new if document.id in known]
        waiting.append(_Batch(encode(new), replaced, len(new), len(documents) - len(new)))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


@contextmanager
def _encoding(
    corpus: Corpus, processor, processes: int
) -> Iterator[Callable[[list[Document]], "Future[pa.Table | None]"]]:
    """Provide a function that turns documents into rows, in this process or in several that share its threads."""
    if processes == 1:

        def encode(documents: list[Document]) -> "Future[pa.Table | None]":
            (rows := Future()).set_result(document_rows(documents, processor, corpus))
            return rows

        yield encode
        return
    # Not forked: a child would inherit locks that the parent's threads hold, such as PyTorch's.
    context, threads = multiprocessing.get_context("spawn"), max(1, torch.get_num_threads() // processes)
    started = (corpus.path, processor, threads)
    with ProcessPoolExecutor(processes, context, initializer=_start_process, initargs=started) as pool:
        try:
            yield lambda documents: pool.submit(_document_rows_here, documents)
        except BrokenProcessPool as error:
            raise OSError(
                f"One of {processes} encoding processes ended, probably for lack of memory: each loads an encoder. "
                "Finished passages are kept; run the command again with fewer processes to continue."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_here: tuple[Any, Corpus] | None = None  # processor and corpus of an encoding process


def _start_process(path: Path, processor, threads: int) -> None:
    global _here
    torch.set_num_threads(threads)
    corpus = Corpus(path)
    corpus.check(processor)  # it loads the encoder from where the processor has it from
    _here = processor, corpus


def _document_rows_here(documents: list[Document]) -> pa.Table | None:
    return document_rows(documents, *_here)


def summary(report: BuildReport, info: dict[str, Any]) -> str:
    """A summary of a build, and the size of the corpus."""
    return (
        f"{counted(report.added, 'document')} added, {report.replaced} replaced, {report.removed} removed, "
        f"{report.unchanged} unchanged, {len(report.skipped)} skipped.\n{counted(info['passages'], 'passage')} of "
        f"{counted(info['documents'], 'document')}, {counted(info['slots'], 'slot')}: {info['bytes']:,} bytes."
    )


def document_rows(documents: list[Document], processor, corpus: Corpus) -> pa.Table | None:
    """The passages of documents with their slots, as rows of a corpus; `None` without passages."""
    cut = corpus.settings["passage_tokens"], corpus.settings["spacy_model"], processor.tokenizer
    passages = passages_of(documents, *cut)
    starts = range(0, len(passages), PART_PASSAGES)
    parts = [passage_rows(passages[start : start + PART_PASSAGES], processor, corpus) for start in starts]
    return pa.concat_tables(parts) if parts else None


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
    schema = corpus.table.schema  # its last column is computed from the others
    rows = pa.table(columns, schema=pa.schema([*schema][:-1], schema.metadata))
    return rows.append_column(schema.field("checksum"), [passage_checksums(rows)])


def _search_vectors(read: list[list[dict]], encoded: list, processor) -> torch.Tensor:
    """The search vector of each passage, (num_passages, encoder_hidden_size): the mean of its slots or, for a jointly
    trained encoder, the embedding by the base encoder."""
    if processor.trained_encoder:
        return processor.encoder.untrained.encode([search_text(each["title"], each["text"]) for (each,) in read])
    means = [each.context_embeds.mean(dim=0) for each in encoded]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def _vectors(rows: list[torch.Tensor], width: int) -> pa.FixedSizeListArray:
    """Concatenate arrays (number, width), in float16."""
    values = torch.cat([torch.empty(0, width), *rows]).half().numpy().ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(values), width)
