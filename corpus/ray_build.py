"""The build of a corpus on Ray Data, on this machine or on a cluster: the same table, row for row.

    one task reads documents -> an actor pool encodes passages -> this process writes them

A worker that dies is started again and its batch encoded again; a build that is killed continues as any other does.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import ray
except ImportError as error:
    raise ImportError("`--ray` needs Ray: `pip install 'arcaligner[ray]'`.") from error

from .build import Batch, new_documents, passage_rows
from .table import Corpus


class RayWriter:
    """`write_batches` of [`build_corpus`] on `workers` actors of Ray.

    Ray is started on this machine unless it runs already or `RAY_ADDRESS` names a cluster, which has to see the folders
    of sources and corpus.
    """

    def __init__(self, workers: int):
        self.workers = workers

    def __call__(self, sources: list[str], corpus: Corpus, processor) -> Iterator[tuple[Batch, int]]:
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # each batch is a block, for any worker
        reading = {"sources": sources, "path": corpus.path, "version": corpus.table.version}
        batches = ray.data.range(1).map_batches(read_batches, fn_kwargs=reading, batch_size=1, num_cpus=0)
        written = batches.map_batches(
            EncodingWorker,
            fn_constructor_args=(processor, corpus.path),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=self.workers),
        )
        for row in written.iter_rows():
            batch, encoded = pickle.loads(row["done"])
            if batch.error is not None:
                raise batch.error
            if len(encoded):
                corpus.add(encoded, batch.replaced)
            yield batch, len(encoded)


def read_batches(_, sources: list[str], path: Path, version: int) -> Iterator[dict[str, list]]:
    """Batches of documents that are new in one version of the corpus: the same ones when the task runs again."""
    corpus = Corpus(path)
    corpus.table.checkout(version)
    try:
        for batch in new_documents(sources, corpus):
            yield {"batch": [pickle.dumps(batch)]}
    except (ValueError, OSError) as error:  # Ray would make another one of it
        yield {"batch": [pickle.dumps(Batch(error=error))]}


class EncodingWorker:
    """Encodes batches."""

    def __init__(self, processor, path):
        self.processor, self.corpus = processor, Corpus(path)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list]:
        batch = pickle.loads(rows["batch"][0])
        encoded = []
        if batch.documents:
            encoded = passage_rows(self.corpus.cut(batch.documents), self.processor, self.corpus)
        batch.documents = [each._replace(text="") for each in batch.documents]
        return {"done": [pickle.dumps((batch, encoded))]}
