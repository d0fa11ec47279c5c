"""From documents to rows of a corpus: cut, encode, write. Unchanged documents are skipped.

read_documents -> batches -> new or changed documents -> document_rows -> Corpus.add

With several processes, each runs `document_rows` on one batch at a time, while the main process reads documents and
writes rows, in the same order as without them.
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

# Limits of one batch, which is written in one step: a few hundred passages. A document is never split.
BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 300_000
# Number of passages that are encoded together.
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
    Add the documents of sources to a corpus, and replace those that have changed. If a build is killed, the next one
    continues where it stopped.

    Args:
        sources (`list[str]`): See `sources.py`.
        corpus ([`Corpus`]): The corpus to write.
        processor ([`ArcAlignerProcessor`]): Makes the slots; its settings must be those of the corpus.
        prune (`bool`): At the end, remove documents that are in none of the sources. The document of a file that cannot
            be read is kept. If a data set cannot be read to its end, nothing is removed.
        on_batch (`Callable`): Called with the report after each batch.
        processes (`int`, defaults to 1): Number of processes that encode passages, each with its own encoder. It does
            not change the table. A script that uses several needs `if __name__ == "__main__":`.

    Raises:
        `ValueError`: no document was found, another process is writing to the corpus, or `processes` is below 1.
        `OSError`: the disk is full, or an encoding process has died, for example for lack of memory.
    """
    if processes < 1:
        raise ValueError(f"`processes` is {processes}; expected at least 1.")
    # `num_hidden` counts sources and rows that could not be read and may contain any document of the corpus.
    report, num_hidden = BuildReport(), 0
    # From the hash of an id to that of its text, as there may be millions; `None` if the text could not be read.
    text_of: dict[int, int | None] = {}

    def skip(reason: str, may_contain_documents: bool = True, id: str | None = None) -> None:
        nonlocal num_hidden
        report.skipped.append(reason)
        if id is not None:
            text_of.setdefault(hash(id))
        else:
            num_hidden += may_contain_documents

    def is_first(document: Document) -> bool:
        """Whether the id of a document is new in this build. A second text under the same id is skipped."""
        text, before = hash((document.title, document.text)), text_of.get(hash(document.id))
        if before is None:
            text_of[hash(document.id)] = text
        elif before == text:
            report.unchanged += 1
        else:
            reason = f"{document.id} is the id of an earlier document with another text. Give each document its own id"
            skip(reason, may_contain_documents=False)
        return before is None

    with corpus.writing(), _encoding(corpus, processor, processes) as encode:
        batches = _batches(filter(is_first, read_documents(sources, skip, corpus.path.parent)))
        for batch in _encoded(batches, corpus, encode, prefetch=2 * processes if processes > 1 else 0):
            rows = batch.rows.result()
            if rows is not None:
                corpus.add(rows, batch.replaced)
            report.added += batch.num_new - len(batch.replaced)
            report.replaced += len(batch.replaced)
            report.unchanged += batch.num_unchanged
            report.passages += 0 if rows is None else len(rows)
            on_batch(report)
        if not report.added + report.replaced + report.unchanged:
            why = f" ({report.skipped[0]})" if report.skipped else ""
            others = f" and {counted(len(sources) - 1, 'more source')}" if len(sources) > 1 else ""
            raise ValueError(
                f"Found no document with text in {sources[0]}{others}{why}. Pass files or folders with text, or a data "
                "set of the Hub."
            )
        if prune and num_hidden:
            logger.warning(
                "`prune` removed nothing, because %d of the sources, files and rows could not be read and may contain "
                "documents of the corpus. Correct what could not be read, and run the command again.",
                num_hidden,
            )
        elif prune:
            removed = [document for document in corpus.documents() if hash(document) not in text_of]
            for first in range(0, len(removed), BATCH_DOCUMENTS):
                corpus.delete(removed[first : first + BATCH_DOCUMENTS])
            report.removed = len(removed)
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
    prefetch: int,
) -> Iterator[_Batch]:
    """Yield encoded batches in order. At most `prefetch` further batches are encoded in advance."""
    waiting: deque[_Batch] = deque()
    for documents in batches:
        stored = corpus.digests(document.id for document in documents)
        new = [document for document in documents if stored.get(document.id) != document.digest]
        replaced = [document.id for document in new if document.id in stored]
        waiting.append(_Batch(encode(new), replaced, len(new), len(documents) - len(new)))
        if len(waiting) > prefetch:
            yield waiting.popleft()
    yield from waiting


@contextmanager
def _encoding(
    corpus: Corpus, processor, processes: int
) -> Iterator[Callable[[list[Document]], "Future[pa.Table | None]"]]:
    """Provide a function that turns documents into rows, in this process or in several others, among which its threads
    are divided."""
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
            yield lambda documents: pool.submit(_worker_document_rows, documents)
        except BrokenProcessPool as error:
            raise OSError(
                f"One of the {processes} encoding processes ended, probably because memory ran out: each process loads "
                "its own encoder. Passages that were reported as encoded are in the corpus. To continue, run the "
                "command again with fewer processes."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_worker: tuple[Any, Corpus] | None = None  # processor and corpus of an encoding process


def _start_process(path: Path, processor, threads: int) -> None:
    global _worker
    torch.set_num_threads(threads)
    corpus = Corpus(path)
    corpus.check(processor)  # also loads the encoder, which is not sent with the processor
    _worker = processor, corpus


def _worker_document_rows(documents: list[Document]) -> pa.Table | None:
    return document_rows(documents, *_worker)


def summary(report: BuildReport, info: dict[str, Any]) -> str:
    """A summary of a build, and the size of the corpus."""
    return (
        f"{counted(report.added, 'document')} added, {report.replaced} replaced, {report.removed} removed, "
        f"{report.unchanged} unchanged, {len(report.skipped)} skipped.\nThe corpus has "
        f"{counted(info['passages'], 'passage')} of {counted(info['documents'], 'document')}, with "
        f"{counted(info['slots'], 'slot')}: {info['bytes']:,} bytes on disk."
    )


def document_rows(documents: list[Document], processor, corpus: Corpus) -> pa.Table | None:
    """The passages of documents with their slots, as rows of a corpus; `None` if there are no passages."""
    settings = corpus.settings
    passages = passages_of(documents, settings["passage_tokens"], settings["spacy_model"], processor.tokenizer)
    starts = range(0, len(passages), PART_PASSAGES)
    parts = [passage_rows(passages[start : start + PART_PASSAGES], processor, corpus) for start in starts]
    return pa.concat_tables(parts) if parts else None


def passage_rows(passages: list[Passage], processor, corpus: Corpus) -> pa.Table:
    """Passages with their slots, as rows of a corpus."""
    settings = corpus.settings
    batch = [[{"title": passage.title, "text": passage.text}] for passage in passages]  # each encoded by itself
    encoded = processor.slot_encoder.encode_batch(batch, tokens_per_slot=settings["tokens_per_slot"])
    columns = {
        "id": [f"{passage.document.id}#{passage.number}" for passage in passages],
        "document": [passage.document.id for passage in passages],
        "digest": [passage.document.digest for passage in passages],
        **{name: [getattr(passage, name) for passage in passages] for name in ("title", "start", "end", "page")},
        "text": [passage.text for passage in passages],
        "segments": [[{"start": s.start, "end": s.end} for s in slots.segments] for slots in encoded],
        "slots": pa.ListArray.from_arrays(
            np.cumsum([0, *(len(slots.context_embeds) for slots in encoded)], dtype=np.int32),
            _vectors([slots.context_embeds for slots in encoded], settings["encoder_hidden_size"]),
        ),
        "vector": _vectors([_search_vectors(passages, encoded, processor)], settings["encoder_hidden_size"]),
    }
    if settings["context_words"]:
        columns["words"] = [
            [[word for word in words if word >= 0] for words in slots.context_word_ids.tolist()] for slots in encoded
        ]
    schema = corpus.table.schema  # its last column, the checksum, is computed from the others
    rows = pa.table(columns, schema=pa.schema([*schema][:-1], schema.metadata))
    return rows.append_column(schema.field("checksum"), [passage_checksums(rows)])


def _search_vectors(passages: list[Passage], encoded: list, processor) -> torch.Tensor:
    """The search vector of each passage, (num_passages, encoder_hidden_size): the mean of its slots or, for an encoder
    that was trained with the aligner, the embedding by the base encoder."""
    if processor.trained_encoder:
        return processor.encoder.untrained.encode([search_text(passage.title, passage.text) for passage in passages])
    means = [slots.context_embeds.mean(dim=0) for slots in encoded]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def _vectors(rows: list[torch.Tensor], width: int) -> pa.FixedSizeListArray:
    """Concatenate tensors (number, width) into one Arrow array in float16."""
    values = torch.cat([torch.empty(0, width), *rows]).half().numpy().ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(values), width)
