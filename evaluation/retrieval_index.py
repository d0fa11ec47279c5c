"""Passages of a corpus by their embeddings: encoded once, shard by shard, searched exactly by FAISS.

    <folder>/<digest of 2,048 texts>.npy    float16 (num_passages, width), in the order of the passages

A shard is written under a temporary name and renamed when it is whole, and is found by the digest of its texts: a
killed run goes on behind the last shard, and changed texts are other shards. FAISS looks at a shard at a time, so that
a corpus may be larger than the memory.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Features, Value
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..train.corpora import open_corpus
from ..train.embedding_store import text_key
from .runs import text_digest

PASSAGES_PER_SHARD = 2048
PASSAGES_PER_STEP = 256

Encode = Callable[[list[str]], np.ndarray]


def passage_text(passage: dict[str, Any]) -> str:
    """A passage as encoders and re-rankers read it, the title before the text, as Contriever was evaluated."""
    return f"{passage['title']} {passage['text']}".strip()


def open_passages(source: str) -> datasets.Dataset:
    """
    The passages of a source, each once, in their order: `title` and `text`, memory-mapped.

    Args:
        source (`str`): See `train/corpora.py`.

    Raises:
        `ValueError`: no passage with a text.
    """
    corpus = open_corpus(source)
    if not any(passage["text"].strip() for row in corpus for passage in row["passages"]):
        raise ValueError(f"The corpus {source} has no passage with a text; there is nothing to retrieve from.")
    return datasets.Dataset.from_generator(
        _unique_passages,
        features=Features(title=Value("string"), text=Value("string")),
        gen_kwargs={"source": source, "version": corpus.fingerprint},
    )


def _unique_passages(source: str, version: str) -> Iterator[dict[str, str]]:
    """`version` makes a changed source another data set."""
    seen = set()
    for row in open_corpus(source):
        for passage in row["passages"]:
            key = text_key(f"{passage['title']}\0{passage['text']}")
            if passage["text"].strip() and key not in seen:
                seen.add(key)
                yield passage


def embed_passages(passages: datasets.Dataset, encode: Encode, folder: Path) -> list[Path]:
    """
    Encodes the passages whose shard is not in `folder`, behind a progress bar.

    Args:
        passages (`datasets.Dataset`): Of [`open_passages`].
        encode (`Callable`): Texts to embeddings (num_texts, width); of one encoder for all that is in `folder`.
        folder (`Path`): Where shards are kept; made when missing.

    Returns:
        `list[Path]`: The shards of the passages, in their order.

    Raises:
        `ValueError`: the encoder returned NaN, or values that are infinite in float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digests = (text_digest(_texts(batch)) for batch in passages.iter(PASSAGES_PER_SHARD))
    shards = [folder / f"{digest}.npy" for digest in digests]
    missing = [number for number, shard in enumerate(shards) if not shard.exists()]
    columns = (TextColumn("encoding passages"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not missing) as progress:
        left = sum(len(_range(number, passages)) for number in missing)
        bar = progress.add_task("", total=len(passages), completed=len(passages) - left)
        for number in missing:
            texts = _texts(passages[_range(number, passages)])
            steps = []
            for step in range(0, len(texts), PASSAGES_PER_STEP):
                steps.append(_checked(encode, texts[step : step + PASSAGES_PER_STEP]))
                progress.advance(bar, len(steps[-1]))
            _write(shards[number], np.concatenate(steps))
    return shards


def _range(shard: int, passages: datasets.Dataset) -> range:
    """Numbers of the passages of a shard."""
    return range(len(passages))[shard * PASSAGES_PER_SHARD : (shard + 1) * PASSAGES_PER_SHARD]


def _texts(batch: dict[str, list[str]]) -> list[str]:
    pairs = zip(batch["title"], batch["text"], strict=True)
    return [passage_text({"title": title, "text": text}) for title, text in pairs]


def _checked(encode: Encode, texts: list[str]) -> np.ndarray:
    with np.errstate(over="ignore"):
        embeddings = np.asarray(encode(texts)).astype(np.float16)  # (num_texts, width)
    if not np.isfinite(embeddings).all():
        bad = texts[int(np.argmin(np.isfinite(embeddings).all(axis=1)))]
        raise ValueError(
            f"The retriever returned NaN, or values too large for float16, first for the passage {bad[:80]!r}. Remove "
            "it from the corpus or use another retriever."
        )
    return embeddings


def _write(path: Path, embeddings: np.ndarray) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.save(file, embeddings)
    os.replace(temporary, path)


def search(queries: np.ndarray, shards: list[Path], top_n: int) -> tuple[np.ndarray, np.ndarray]:
    """
    The passages with the largest inner products, exactly.

    Args:
        queries (`np.ndarray` of shape `(num_queries, width)`): Embeddings of the questions.
        shards (`list[Path]`): Of [`embed_passages`].
        top_n (`int`): How many to find; at most the number of passages.

    Returns:
        Inner products and numbers of the passages, each `(num_queries, top_n)`, the best first.
    """
    faiss = _import_faiss()
    best = faiss.ResultHeap(len(queries), top_n, keep_max=True)
    start = 0
    for shard in shards:
        embeddings = np.load(shard).astype(np.float32)  # (num_passages, width)
        most = min(top_n, len(embeddings))
        scores, numbers = faiss.knn(queries, embeddings, most, metric=faiss.METRIC_INNER_PRODUCT)
        best.add_result(scores, numbers + start)
        start += len(embeddings)
    best.finalize()
    return best.D, best.I


def _import_faiss():
    try:
        import faiss
    except ImportError as error:
        raise ImportError("Retrieval searches with FAISS, which is not installed: `pip install faiss-cpu`.") from error
    return faiss
