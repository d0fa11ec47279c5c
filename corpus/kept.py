"""Passages of a corpus read ahead: keys and values beside their slots, so that no question has to read them.

    read_corpus(corpus, model, processor)                              # a file for each passage in `CORPUS/read`
    model.slot_prefix_store(processor, folder=kept_folder(corpus), read_only=True)   # finds them

The files are those of any `SlotPrefixStore`, under a digest of all that decides them: a passage whose text, slots or
aligner has changed is read again, and the former file removed.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..common.files import counted
from ..generation_arcaligner import entry_shape
from .retrieve import slot_passages
from .table import KEPT, Corpus

# Passages that are read together; their keys and values are in memory meanwhile.
BATCH_PASSAGES = 32


@dataclass
class ReadReport:
    """What a reading has done so far: passages `read`, those that were `kept` before, and files that were `removed`."""

    read: int = 0
    kept: int = 0
    removed: int = 0

    def __str__(self) -> str:
        removed = f", {counted(self.removed, 'former file')} removed" if self.removed else ""
        return f"{counted(self.read, 'passage')} read, {self.kept} kept before{removed}"


def kept_folder(corpus: Corpus) -> Path | None:
    """Where the passages of a corpus are kept, if they were read ahead."""
    folder = corpus.path / KEPT
    return folder if folder.is_dir() else None


def plan(corpus: Corpus, model, processor) -> str:
    """What reading a corpus ahead takes on disk.

    Raises:
        `ValueError`: an aligner that reads passages jointly, or that makes other slots.
        `OSError`: a disk with less room.
    """
    if processor.passage_attention != "separate":
        raise ValueError(
            "This checkpoint reads the passages of a question jointly (`passage_attention`), so none can be read "
            "ahead. Name one that was trained to read them apart."
        )
    corpus.check(processor)
    found, per_slot = corpus.info(), math.prod(entry_shape(model.config.text_config, 1)) * model.dtype.itemsize
    there = sum(file.stat().st_size for file in (corpus.path / KEPT).glob("*.safetensors"))
    needed, free = found["slots"] * per_slot, shutil.disk_usage(corpus.path).free
    if needed - there > free:
        raise OSError(
            f"The keys and values of {corpus.path} take {(needed - there) / 1e9:.1f} GB more, but its disk has "
            f"{free / 1e9:.1f} GB left. Make room, or build the corpus with more text per slot (`--tokens-per-slot`)."
        )
    return (
        f"Keys and values of {counted(found['passages'], 'passage')} take {needed / 1e6:,.1f} MB on disk: "
        f"{counted(found['slots'], 'slot')} of {per_slot / 1e3:.1f} KB."
    )


def read_corpus(
    corpus: Corpus, model, processor, on_batch: Callable[[ReadReport], Any] = lambda report: None
) -> ReadReport:
    """Reads all passages of a corpus that are not kept yet, behind the text that a question without a system message
    has before its slots. A killed reading continues where it stopped. `on_batch` is told what was done."""
    plan(corpus, model, processor)
    report, used = ReadReport(), set()
    with corpus.writing():
        store = model.slot_prefix_store(processor, max_bytes=0, folder=corpus.path / KEPT)
        columns = ["document", "title", "text", "start", "end", "segments", "slots"]
        columns += ["words"] * processor.context_words
        for batch in corpus.table.search().select(columns).to_batches():
            for first in range(0, len(batch), BATCH_PASSAGES):
                rows = pa.Table.from_batches([batch.slice(first, BATCH_PASSAGES)])
                paths = store.keep("?", **slot_passages(rows, processor.context_words).inputs)
                if lost := [path for path in paths if not path.exists()]:
                    raise OSError(f"{lost[0]} could not be written. Make room, and run this again to continue.")
                used.update(paths)
                report.read, report.kept = store.misses, store.loads
                on_batch(report)
        for path in (corpus.path / KEPT).glob("*.safetensors"):
            if path not in used:
                path.unlink(missing_ok=True)
                report.removed += 1
    return report
