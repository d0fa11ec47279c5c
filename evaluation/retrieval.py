"""Retrieval as in the paper: a dense retriever finds twenty passages, a re-ranker orders them, and the first is used.

    python -m arcaligner.evaluation.retrieval --tasks nq,squad --data FOLDER --pool FOLDER/recon_train.jsonl.gz \\
        --reranker aligner:checkpoints/arcaligner-smollm2-135m --output runs/retrieved
    python -m arcaligner evaluate --recipe smollm2_135m --data runs/retrieved --tasks nq --top-k 1 --output runs/read

    <output>/<task>.jsonl.gz           the task's questions with the passages that were found, in the re-ranker's order
    <output>/orders/<task>/...jsonl    for each question, the passages of the pool that were found, and their order
    <output>/embeddings/               embeddings of the pool's passages
    <output>/recall.md                 recall before and after re-ranking

The pool contains the passages of files of rows or texts; `--pool` takes several, separated by commas. Recall@k is the
share of questions for which one of the first k passages contains a gold answer. A second run encodes and orders only
what is missing. If a re-ranker writes a wrong list, it is counted, and the question keeps the retriever's order.
"""

import logging
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import torch
import typer
from datasets import Features, Value
from rich.progress import track
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import semantic_search

from ..answering_arcaligner import search_text
from ..common.files import digest, markdown_table, run_command, write_atomically
from ..common.rows import Row, contains_match
from ..configuration_arcaligner import DEFAULT_ENCODER
from ..loading_arcaligner import missing_model_message, resolve_model
from ..train.examples import data_fingerprint, open_corpus
from ..train.prepare_data import write_file
from .chat_endpoint import ENDPOINT
from .metrics import percent_interval, shown_interval
from .rerankers import Reranker, WrongListError, load_reranker
from .runs import AnswerFile, row_digest
from .settings import split_names
from .tasks import TASKS

logger = logging.getLogger(__name__)

NUM_CANDIDATES = 20  # passages that are re-ranked, as in the paper
KS = (1, 5, 20)
SHARD = 2048  # passages whose embeddings share a file
RETRIEVER = "facebook/contriever"  # the paper's


@dataclass(frozen=True)
class RetrievalSettings:
    """
    Settings of the retrieval.

    Args:
        pool (`list[str]`): Sources of passages, as in `common/rows.py`.
        retriever (`str`): A SentenceTransformer or, like Contriever, an encoder whose token states are averaged.
        reranker (`str`, *optional*): See `rerankers.py`. Default: none; the retriever's order remains.
        endpoint (`str`, *optional*): Address of a listwise re-ranker.
        num_candidates (`int`): Number of passages to retrieve and re-rank.
    """

    pool: list[str]
    retriever: str = RETRIEVER
    reranker: str | None = None
    endpoint: str | None = None
    num_candidates: int = NUM_CANDIDATES

    def __post_init__(self):
        if not self.pool:
            raise ValueError(
                "`pool` is empty; expected at least one file or data set with passages, such as questions.jsonl.gz."
            )
        if self.num_candidates < 1:
            raise ValueError(f"`num_candidates` is {self.num_candidates}; expected at least 1 passage.")

    @property
    def about(self) -> str:
        """A description of the passages, for tables."""
        order = f", re-ranked by {self.reranker}" if self.reranker else ""
        return f"the first of {self.num_candidates} passages found by {self.retriever}{order}"


# The pool


def open_pool(sources: Sequence[str], data_dir: str = "") -> datasets.Dataset:
    """The passages of sources, `title` and `text`, without duplicates, in order, memory-mapped.

    Raises:
        `ValueError`: no passage with a text.
    """
    versions = [data_fingerprint(open_corpus(source, data_dir=data_dir)) for source in sources]
    arguments = {"sources": list(sources), "data_dir": data_dir, "versions": versions}
    features = Features(title=Value("string"), text=Value("string"))
    pool = datasets.Dataset.from_generator(_unique_passages, features=features, gen_kwargs=arguments)
    if not len(pool):
        raise ValueError(
            f"The pool {', '.join(sources)} has no passage with text. Pass a file or data set with passages."
        )
    return pool


def _unique_passages(sources: list[str], data_dir: str, versions: list[str]) -> Iterator[dict[str, str]]:
    """Yield passages without duplicates; `versions` only invalidate the cache when sources change."""
    seen = set()
    for source in sources:
        for row in open_corpus(source, data_dir=data_dir).select_columns("passages"):
            for passage in row["passages"]:
                key = digest([passage["title"], passage["text"]])
                if passage["text"].strip() and key not in seen:
                    seen.add(key)
                    yield passage


class DensePool:
    """
    A pool of passages with exact search by embedding. The embeddings are saved in a folder, shard by shard.

    Args:
        pool (`datasets.Dataset`): Of [`open_pool`].
        retriever (`str`): Name of the encoder, as in [`RetrievalSettings`].
        folder (`Path`): For embeddings. A shard is named by the digest of its texts, so that a killed run can continue.
        device (`str`): The device that the retriever runs on.
    """

    def __init__(self, pool: datasets.Dataset, retriever: str, folder: Path, device: str = "cpu"):
        try:
            self.encoder = SentenceTransformer(resolve_model(retriever), device=device)
        except OSError as error:
            raise OSError(missing_model_message("retriever", retriever, error)) from error
        self.pool, self.folder = pool, folder / re.sub(r"[^\w.-]+", "--", retriever.strip("/"))

    def shards(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of the first passage of each shard, and its embeddings (num_passages, width), computed if they are
        not saved."""
        starts = range(0, len(self.pool), SHARD)
        for start in track(starts, "Encoding passages", transient=True):
            texts = [search_text(passage["title"], passage["text"]) for passage in self._part(start)]
            path = self.folder / f"{digest(texts)}.npy"
            if not path.exists():
                embeddings = self.encoder.encode_document(texts, show_progress_bar=False, batch_size=64)
                if not np.isfinite(embeddings).all():
                    bad = texts[int(np.argmin(np.isfinite(embeddings).all(axis=1)))]
                    raise ValueError(
                        f"The retriever returned NaN or infinity for the passage {bad[:80]!r}. Remove this passage "
                        "from the pool, or use another retriever."
                    )
                write_atomically(path, lambda file, numbers=embeddings: np.save(file, numbers.astype(np.float16)))
            yield start, torch.from_numpy(np.load(path)).float()

    def _part(self, start: int) -> list[dict[str, str]]:
        return self.pool.select(range(start, min(start + SHARD, len(self.pool)))).to_list()

    def search(self, questions: list[str], number: int) -> list[list[int]]:
        """For each question the passages with the largest inner products, the best first."""
        queries = self.encoder.encode_query(questions, show_progress_bar=False, convert_to_tensor=True).float().cpu()
        best: list[list[tuple[float, int]]] = [[] for _ in questions]
        for start, embeddings in self.shards():
            hits_of_shard = semantic_search(queries, embeddings, top_k=number, score_function=lambda a, b: a @ b.T)
            for nearest, hits in zip(best, hits_of_shard, strict=True):
                nearest += [(-hit["score"], start + hit["corpus_id"]) for hit in hits]
                nearest[:] = sorted(nearest)[:number]
        return [[number for _, number in nearest] for nearest in best]


# Retrieval and re-ranking


def retrieve(
    settings: RetrievalSettings, name: str, rows: list[Row], output: Path, data_dir: str = "", device: str = "cpu"
) -> tuple[list[Row], dict[str, Any]]:
    """
    Find passages for the questions of a task, re-rank them, and write them to `output`.

    Returns:
        `tuple`: The rows with the passages that were found, in the re-ranker's order, and `{"before", "after": {k:
        [percent, low, high]}, "wrong_lists": {reason: count}, "questions", "passages"}`.
    """
    pool = open_pool(settings.pool, data_dir)
    slug = re.sub(r"[^\w.-]+", "--", f"{settings.retriever}--{settings.reranker or 'as-found'}".strip("/"))
    file = AnswerFile(output / "orders", name, slug)
    made_with = {"pool": data_fingerprint(pool), "retriever": settings.retriever, "reranker": settings.reranker}
    todo = file.open(made_with | {"num_candidates": settings.num_candidates}, rows)
    if todo:
        dense = DensePool(pool, settings.retriever, output / "embeddings", device)
        reranker = load_reranker(settings.reranker, settings.endpoint, device) if settings.reranker else None
        nearest = dense.search([row["question"] for row in todo], settings.num_candidates)
        with file.claim():
            for row, found, order in zip(todo, nearest, _orders(reranker, todo, nearest, pool), strict=True):
                problem = {"problem": str(order)} if isinstance(order, WrongListError) else {}
                order = list(range(len(found))) if problem else order
                line = {"id": row["id"], "row": row_digest(row), "found": found, "order": order}
                file.append([line | problem])
    by_id = {line["id"]: line for line in file.read()}
    before, after = [], []
    for row in rows:
        line = by_id[row["id"]]
        passages = pool.select(line["found"]).to_list()
        before.append(row | {"passages": passages})
        after.append(row | {"passages": [passages[number] for number in line["order"]]})
    write_file(output / f"{name}.jsonl.gz", [_plain(row) for row in after])
    wrong = Counter(by_id[row["id"]]["problem"] for row in rows if "problem" in by_id[row["id"]])
    if wrong:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(wrong.items()))
        logger.warning(
            "%s: %s returned no usable ranking for %d of %d questions. Their passages keep the retriever's order. "
            "Reasons: %s",
            *(name, settings.reranker, wrong.total(), len(rows), reasons),
        )
    return after, {
        "questions": len(rows),
        "passages": len(pool),
        "before": recall_at_k(before),
        "after": recall_at_k(after),
        "wrong_lists": dict(wrong),
    }


def _orders(
    reranker: Reranker | None, rows: list[Row], nearest: list[list[int]], pool: datasets.Dataset
) -> Iterator[list[int] | WrongListError]:
    if reranker is None:
        return iter([list(range(len(found))) for found in nearest])
    passages = [pool.select(found).to_list() for found in nearest]
    ordered = reranker([row["question"] for row in rows], passages)
    return iter(track(ordered, "Re-ranking", total=len(rows), transient=True))


def _plain(row: Row) -> Row:
    """A row as it is written. The numbers of gold passages are removed, because the passages were replaced."""
    meta = {key: value for key, value in (row.get("meta") or {}).items() if key != "gold"}
    return {key: row[key] for key in ("id", "question", "answers", "passages")} | ({"meta": meta} if meta else {})


def recall_at_k(rows: list[Row]) -> dict[int, list[float]]:
    """For each of `KS`, the share of rows, in percent with its interval, whose first k passages contain a gold
    answer."""
    recalls = {}
    for k in KS:
        texts = (" ".join(passage["text"] for passage in row["passages"][:k]) for row in rows)
        recalls[k] = percent_interval(
            [contains_match(text, row["answers"]) for text, row in zip(texts, rows, strict=True)]
        )
    return recalls


def recall_table(recalls: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown lines: recall of each task before and after re-ranking, the wrong lists, and a note."""
    rows = []
    for name, numbers in recalls.items():
        for when in ("before", "after"):
            cells = [shown_interval(numbers[when][k]) for k in KS]
            wrong = sum(numbers["wrong_lists"].values()) if when == "after" else ""
            rows.append([TASKS[name].title, when, *cells, wrong, numbers["questions"], numbers["passages"]])
    columns = ["Set", "Re-ranking", *(f"Recall@{k}, %" for k in KS), "Unusable rankings", "Questions"]
    note = (
        "Recall@k is the share of questions for which one of the first k passages contains a gold answer; brackets "
        "contain 95 % intervals. For a question with an unusable ranking, the retriever's order remains."
    )
    return [*markdown_table([*columns, "Passages in the pool"], rows), "", *textwrap.wrap(note, 120)]


def main(
    pool: Annotated[str, typer.Option(help="Files or data sets with passages, separated by commas.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the results: questions with passages, embeddings and recall.")
    ],
    tasks: Annotated[
        str, typer.Option(help=f"Sets of questions, separated by commas. Known sets: {', '.join(TASKS)}.")
    ] = "nq",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with a file TASK.jsonl.gz for each set of questions. Default: the Hub."),
    ] = None,
    retriever: Annotated[
        str, typer.Option(help=f"Encoder for the search; the paper uses {RETRIEVER}.")
    ] = DEFAULT_ENCODER,
    reranker: Annotated[
        str | None,
        typer.Option(help="Re-ranker: listwise:MODEL, cross_encoder:MODEL or aligner:CHECKPOINT. Default: none."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help=f"Address of an OpenAI-compatible server with the model of listwise:MODEL. Default: {ENDPOINT}."
        ),
    ] = None,
    num_questions: Annotated[
        int | None, typer.Option("-n", min=1, help="Maximum number of questions per task.")
    ] = None,
    num_candidates: Annotated[
        int, typer.Option(min=1, help="Number of passages to retrieve and re-rank for each question.")
    ] = NUM_CANDIDATES,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
) -> None:
    """Retrieve passages for the questions of tasks and re-rank them. Print Recall@k before and after re-ranking."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = RetrievalSettings(split_names(pool), retriever, reranker, endpoint, num_candidates)
    recalls = {}
    for name in split_names(tasks):
        if name not in TASKS:
            raise ValueError(f"There is no task {name!r}; expected one of {', '.join(TASKS)}. Correct `--tasks`.")
        rows = TASKS[name].load(data, num_questions)
        _, recalls[name] = retrieve(settings, name, rows, output, device=device)
    lines = [
        *recall_table(recalls),
        "",
        f"The passages were found by {retriever} and {f're-ranked by {reranker}' if reranker else 'not re-ranked'}.",
    ]
    write_atomically(output / "recall.md", "\n".join([*lines, ""]))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    run_command(main)
