"""Precompute keys and values of the passages of a corpus, so that questions use them from the cache.

    read_corpus(corpus, model, processor)    # a file for each passage in `corpus.kept_folder`, where caches look

The files are those of any `PassageCache`, under a digest of everything they depend on: if text, slots or aligner of a
passage have changed, it is computed again, and the former file is removed.
"""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ...common.files import counted
from ...kv_cache_arcaligner import entry_shape
from .retrieve import slot_passages
from .table import Corpus

# Passages that are computed together; their keys and values are in memory for that time.
BATCH_PASSAGES = 32


def read_corpus(corpus: Corpus, model, processor, tell: Callable[[str], Any] = lambda said: None) -> str:
    """Precompute all passages of a corpus that are not cached yet, for prompts without a system message, and return
    their number. A killed run continues where it stopped. `tell` is called with the size on disk, then with the
    progress after each batch.

    Raises:
        `ValueError`: an aligner with joint passages, or with other slots; another process that writes.
        `OSError`: a disk that is full.
    """
    if processor.passage_attention != "separate":
        raise ValueError(
            "This checkpoint has joint passages (`passage_attention`), which cannot be precomputed. Use one that was "
            "trained with independent passages."
        )
    corpus.check(processor)
    found, per_slot = corpus.info(), math.prod(entry_shape(model.config.text_config, 1)) * model.dtype.itemsize
    tell(
        f"Keys and values of {counted(found['passages'], 'passage')} take {found['slots'] * per_slot / 1e6:,.1f} MB on "
        f"disk: {counted(found['slots'], 'slot')} of {per_slot / 1e3:.1f} KB."
    )
    done, used, folder = "No passage computed", set(), corpus.kept_folder
    with corpus.writing():
        store = model.passage_cache(processor, max_bytes=0, folder=folder)
        for batch in corpus.table.search().to_batches():
            for first in range(0, len(batch), BATCH_PASSAGES):
                rows = pa.Table.from_batches([batch.slice(first, BATCH_PASSAGES)])
                paths = store.precompute("?", **slot_passages(rows, processor.context_words).inputs)
                if lost := [path for path in paths if not path.exists()]:
                    raise OSError(f"{lost[0]} could not be written. Free disk space, and run this again to continue.")
                used.update(paths)
                done = f"{counted(store.misses, 'passage')} computed, {store.loads} precomputed before"
                tell(done)
        if former := set(folder.glob("*.safetensors")) - used:
            done += f", {counted(len(former), 'former file')} removed"
        for path in former:
            path.unlink()
    return done
