"""Passages of a corpus for the questions of a task, and how many of the right ones are found.

    python -m arcaligner corpus build paragraphs.jsonl.gz --output paragraphs.lance
    python -m arcaligner evaluate --recipe smollm2_135m --tasks nq --passages retrieved --corpus paragraphs.lance
    python -m arcaligner.evaluation.retrieval --corpus paragraphs.lance --questions nq.jsonl.gz

Recall@k is the share of a question's gold documents of which a passage is among the first k. Only questions count whose
gold documents are all in the corpus.
"""

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..common.files import DEFAULT_CHECKPOINT, run_command
from ..common.passages import Document
from ..common.rows import Row, read_rows
from ..corpus.retrieve import CANDIDATES, Retriever
from ..corpus.table import Corpus
from ..processing_arcaligner import ArcAlignerProcessor
from .metrics import percent_interval, shown_interval

MIN_CANDIDATES = 20  # passages that are joined and re-ranked, as in the paper
KS = (1, 5, 20)


def retrieve(rows: list[Row], corpus: str | Path, checkpoint: str, reranker: str | None, top_k: int) -> list[Row]:
    """Rows with the `top_k` passages of a corpus, made by the aligner `checkpoint`, that are found for their questions,
    the best first; `reranker` is a CrossEncoder.
    """
    retriever = Retriever(Corpus(corpus), ArcAlignerProcessor.from_pretrained(checkpoint), reranker)
    num_passages = max(top_k, MIN_CANDIDATES // CANDIDATES)
    with_passages = []
    for row in track(rows, "searching", transient=True):
        documents = retriever(row["question"], num_passages).documents[:top_k]
        with_passages.append(with_found(row, documents))
    return with_passages


def with_found(row: Row, documents: list[dict]) -> Row:
    """A row with the passages that a search found."""
    return row | {"passages": [{"title": each["title"], "text": each["text"]} for each in documents]}


def gold_documents(row: Row) -> set[str]:
    """Ids of the passages that answer a question: the row's gold passages, or all where it names none."""
    gold = (row.get("meta") or {}).get("gold", range(len(row["passages"])))
    passages = [row["passages"][number] for number in gold]
    return {Document("", each["title"], each["text"]).digest for each in passages}


def recall_at_k(retriever: Retriever, rows: list[Row]) -> dict[int, list[float]]:
    """For each of `KS` and each row the share of its gold documents that are found."""
    shares: dict[int, list[float]] = {k: [] for k in KS}
    for row in track(rows, "searching", transient=True):
        gold = gold_documents(row)
        documents = [each["document"] for each in retriever(row["question"], max(KS)).documents]
        for k in KS:
            shares[k].append(len(gold & {*documents[:k]}) / len(gold))
    return shares


def main(
    corpus: Annotated[Path, typer.Option(help="Folder of the corpus.")],
    questions: Annotated[Path, typer.Option(help="Rows with questions and gold passages, JSON Lines.")],
    checkpoint: Annotated[str, typer.Option(help="The aligner that made the corpus.")] = str(DEFAULT_CHECKPOINT),
    reranker: Annotated[str | None, typer.Option(help="A CrossEncoder.")] = None,
    num_questions: Annotated[int | None, typer.Option("-n", min=1, help="Only the first questions.")] = None,
) -> None:
    """Prints Recall@k of what a corpus finds."""
    opened, processor = Corpus(corpus), ArcAlignerProcessor.from_pretrained(checkpoint)
    known = ((row, gold_documents(row)) for row in read_rows(questions))
    found = (row for row, gold in known if gold and opened.digests(gold).keys() == gold)
    rows = list(itertools.islice(found, num_questions))
    if not rows:
        raise ValueError(f"No question of {questions} has its gold passages in {corpus}; build it from them.")
    table = Table(*(f"Recall@{k}" for k in KS), caption=f"{len(rows)} questions, {len(opened)} passages")
    found = recall_at_k(Retriever(opened, processor, reranker), rows)
    table.add_row(*(shown_interval(percent_interval(shares)) for shares in found.values()))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
