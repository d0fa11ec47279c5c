"""Precompute keys and values of the passages of a corpus, so that no question has to wait for them.

    precompute_corpus(corpus, model, processor)    # writes a file for each passage to `corpus.precomputed_folder`

A `PassageCache` of that folder uses the files. Each is named after a digest of everything that it depends on: if the
text, the slots or the aligner have changed, the passage is computed again, and its outdated file is removed.
"""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ...common.files import counted
from ...kv_cache_arcaligner import entry_shape
from .retrieve import slot_passages
from .table import Corpus

# Number of passages that are computed together; meanwhile their keys and values are in memory.
BATCH_PASSAGES = 32


def precompute_corpus(corpus: Corpus, model, processor, on_progress: Callable[[str], Any] = lambda line: None) -> str:
    """Precompute all passages of a corpus that are not cached yet, for prompts without a system message, and return a
    summary with their number. If a run is killed, the next one continues where it stopped. `on_progress` is called with
    a line about the size on disk, then with the progress after each batch.

    Raises:
        `ValueError`: the aligner has joint passages or makes other slots, or another process is writing to the corpus.
        `OSError`: the disk is full.
    """
    if processor.passage_attention != "separate":
        raise ValueError(
            f"The checkpoint has `passage_attention` {processor.passage_attention!r}; expected 'separate', because "
            "passages that attend to each other cannot be precomputed one by one. Use a checkpoint that was trained "
            "with independent passages."
        )
    corpus.check(processor)
    info, per_slot = corpus.info(), math.prod(entry_shape(model.config.text_config, 1)) * model.dtype.itemsize
    on_progress(
        f"Keys and values of {counted(info['passages'], 'passage')} take {info['slots'] * per_slot / 1e6:,.1f} MB on "
        f"disk: {counted(info['slots'], 'slot')} of {per_slot / 1e3:.1f} KB each."
    )
    done, used, folder = "The corpus has no passages", set(), corpus.precomputed_folder
    with corpus.writing():
        store = model.passage_cache(processor, max_bytes=0, folder=folder)
        for batch in corpus.table.search().to_batches():
            for first in range(0, len(batch), BATCH_PASSAGES):
                rows = pa.Table.from_batches([batch.slice(first, BATCH_PASSAGES)])
                paths = store.precompute("?", **slot_passages(rows, processor.context_words).inputs)
                if missing := [path for path in paths if not path.exists()]:
                    raise OSError(
                        f"{missing[0]} could not be written. Check that the folder is writable and has free disk "
                        "space, and run the command again to continue."
                    )
                used.update(paths)
                done = f"{counted(store.misses, 'passage')} computed, {store.loads} already computed"
                on_progress(done)
        if outdated := set(folder.glob("*.safetensors")) - used:
            done += f", {counted(len(outdated), 'outdated file')} removed"
        for path in outdated:
            path.unlink()
    return done
