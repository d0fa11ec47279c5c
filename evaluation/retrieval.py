"""Retrieval as in the paper: dense, over a corpus; the first 20 passages re-ranked; the first k of them kept.

    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl
    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl \\
        --retriever sentence-transformers/all-MiniLM-L6-v2 --reranker bi_encoder:sentence-transformers/all-MiniLM-L6-v2

Writes the questions with the passages that were found and prints Recall@k. A retriever is any model of
sentence-transformers; a checkpoint of transformers alone, such as Contriever's, is read by the mean of its tokens.
Passages are compared by inner product of embeddings as the model's own pipeline makes them: these are of length 1, and
the product is their cosine, where the pipeline normalises, and stay as they are where it does not, as Contriever's.

    <cache_dir>/embeddings/<model>/           shards of embeddings; see retrieval_index.py
    <cache_dir>/ranks/<corpus, models, top_n>/<questions>.json    passages found for 32 questions, with scores

A part of a path in brackets is a digest of what it names, models by their files or commit: what was made from anything
else is not found, and is made anew. A killed run goes on where it was.
"""

import gzip
import hashlib
import itertools
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import datasets
import numpy as np
import typer
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sentence_transformers import SentenceTransformer

from ..files import run_command
from ..configuration_arcaligner import cache_directory, missing_model_message, resolve_encoder
from ..train.corpora import JSON_LINES, read_rows
from ..train.saving import write_whole
from .answering import Row
from .metrics import bootstrap_interval, contains_match, usable_golds
from .reranking import check_installed, load_reranker, parse_reranker
from .retrieval_index import embed_passages, open_passages, search
from .runs import text_digest

QUESTIONS_PER_FILE = 32
PAPER_RETRIEVER = "facebook/contriever"
PAPER_RERANKER = "rank_llm:castorini/rank_zephyr_7b_v1_full"

# For each question, numbers and scores of the passages found, the best first.
Ranks = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class RetrievalSettings:
    """
    How passages are found.

    Args:
        corpus (`str`): Source of the passages; see `train/corpora.py`.
        retriever (`str`): Model of sentence-transformers, a folder or a Hub id.
        reranker (`str`, *optional*): `kind:model`, see `evaluation/reranking.py`; `None` keeps the retriever's order.
        top_n (`int`): How many passages are re-ranked.
        top_k (`int`): How many of them are kept.

    Raises:
        `ValueError`: `top_k` greater than `top_n` or less than 1; a re-ranker of no known kind.
    """

    corpus: str
    retriever: str = PAPER_RETRIEVER
    reranker: str | None = PAPER_RERANKER
    top_n: int = 20
    top_k: int = 1

    def __post_init__(self):
        if not 1 <= self.top_k <= self.top_n:
            raise ValueError(
                f"`top_k` is {self.top_k} and `top_n` {self.top_n}; of the `top_n` passages that are re-ranked the "
                "first `top_k` are kept, at least 1 and at most all."
            )
        if self.reranker is not None:
            parse_reranker(self.reranker)


def retrieve(rows: list[Row], settings: RetrievalSettings, cache_dir: Path, device: str = "cpu") -> list[Row]:
    """
    Rows with the passages of a corpus that are found for their questions.

    Args:
        rows (`list[dict]`): With `question`.
        settings ([`RetrievalSettings`]): From where and how.
        cache_dir (`Path`): Where embeddings and what was found are kept.
        device (`str`): Where the models run.

    Returns:
        `list[dict]`: The rows with `passages`, the best first: `top_k`, or all of a smaller corpus. `meta.retrieval`
        holds their scores; `meta.gold`, the numbers of other passages, is left out.

    Raises:
        `ValueError`: a row without a question; a corpus without a passage.
        `OSError`: a model that is not there, with how to get it.
        `ImportError`: FAISS, or the re-ranker's package, is not installed.
    """
    empty = [row["id"] for row in rows if not row["question"].strip()]
    if empty:
        raise ValueError(f"{len(empty)} rows have no question to retrieve for, first {empty[0]!r}; leave them out.")
    passages = open_passages(settings.corpus)
    ranks = rank_passages([row["question"] for row in rows], passages, settings, Path(cache_dir), device)
    found = []
    for row, (numbers, scores) in zip(rows, ranks, strict=True):
        meta = {key: value for key, value in (row.get("meta") or {}).items() if key != "gold"}
        meta["retrieval"] = {"scores": scores[: settings.top_k]}
        found.append(row | {"passages": [passages[number] for number in numbers[: settings.top_k]], "meta": meta})
    return found


def rank_passages(
    questions: list[str], passages: datasets.Dataset, settings: RetrievalSettings, cache_dir: Path, device: str
) -> Ranks:
    """What is found for each question, from the cache where it is there."""
    retriever = model_version("retriever", settings.retriever)
    made_from = {
        "settings": {key: value for key, value in asdict(settings).items() if key != "top_k"},
        "corpus": passages._fingerprint,
        "retriever": retriever,
        "reranker": settings.reranker and model_version("re-ranker", parse_reranker(settings.reranker)[1]),
    }
    folder = cache_dir / "ranks" / text_digest(made_from)
    starts = range(0, len(questions), QUESTIONS_PER_FILE)
    groups = [questions[start : start + QUESTIONS_PER_FILE] for start in starts]
    files = [folder / f"{text_digest(group)}.json" for group in groups]
    missing = [(group, file) for group, file in zip(groups, files, strict=True) if not file.exists()]
    if missing:
        write_whole(folder / "made_from.json", json.dumps(made_from, indent=1))
        shards = cache_dir / "embeddings" / text_digest(retriever)
        _rank_missing(missing, passages, settings, shards, device)
    return list(itertools.chain(*(json.loads(file.read_text(encoding="utf-8")) for file in files)))


def _rank_missing(
    missing: list[tuple[list[str], Path]],
    passages: datasets.Dataset,
    settings: RetrievalSettings,
    shard_folder: Path,
    device: str,
) -> None:
    """Writes a file for each group of questions."""
    # The retriever's own scores are what it would give as a re-ranker.
    reranks = settings.reranker not in (None, f"bi_encoder:{settings.retriever}")
    if reranks:
        check_installed(settings.reranker)
    questions = [question for group, _ in missing for question in group]
    scores, numbers = _search(questions, passages, settings, shard_folder, device)
    reranker = load_reranker(settings.reranker, device) if reranks else None
    start = 0
    for group, file in track(missing, "re-ranking", transient=True, disable=reranker is None):
        of_group = slice(start, start + len(group))
        ranks = list(zip(numbers[of_group].tolist(), scores[of_group].tolist(), strict=True))
        if reranker is not None:
            candidates = [[passages[number] for number in found] for found, _ in ranks]
            ranks = [
                _sorted(found, new) for (found, _), new in zip(ranks, reranker.score(group, candidates), strict=True)
            ]
        write_whole(file, json.dumps(ranks))
        start += len(group)


def _search(
    questions: list[str], passages: datasets.Dataset, settings: RetrievalSettings, shard_folder: Path, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Inner products and numbers of the passages found, (num_questions, top_n); the retriever is freed at the end."""
    model = SentenceTransformer(resolve_encoder(settings.retriever), device=device)
    shards = embed_passages(passages, lambda texts: model.encode_document(texts, show_progress_bar=False), shard_folder)
    queries = model.encode_query(questions, show_progress_bar=False)  # (num_questions, width)
    return search(queries, shards, min(settings.top_n, len(passages)))


def _sorted(numbers: list[int], scores: list[float]) -> tuple[list[int], list[float]]:
    """By score, the largest first; those of equal score in the order they had."""
    order = sorted(range(len(numbers)), key=lambda index: -scores[index])
    return [numbers[index] for index in order], [scores[index] for index in order]


def model_version(kind: str, name: str) -> str:
    """
    What tells a model from others: the digest of a folder's files, the commit of a model of the Hub.

    Args:
        kind (`str`): What it is for, in messages.
        name (`str`): Folder or Hub id.

    Raises:
        `OSError`: it is neither on this machine nor to be had from the Hub, with how to get it.
    """
    folder = Path(resolve_encoder(name))
    if not folder.is_dir():
        try:
            return Path(snapshot_download(name, allow_patterns="*config.json")).name
        except (OSError, ValueError) as error:
            raise OSError(missing_model_message(kind, name, error)) from error
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix != ".md" and not name.startswith("."):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def recall_at_k(rows: list[Row], ks: tuple[int, ...] = (1, 5, 20)) -> dict[int, list[float]]:
    """
    Whether a gold is in one of the first passages.

    Args:
        rows (`list[dict]`): With `answers` and ranked `passages`, of which only the text counts.
        ks (`tuple[int]`): How many of the first passages are looked at.

    Returns:
        `dict[int, list[float]]`: For each of `ks` and each row 1.0 or 0.0, compared as in `metrics.contains_match`.

    Raises:
        `ValueError`: a row without a gold that can be compared.
    """
    lacking = [row["id"] for row in rows if not usable_golds(row["answers"])]
    if lacking:
        raise ValueError(
            f"{len(lacking)} rows have no gold that is left when it is normalised, first {lacking[0]!r}; leave them "
            "out."
        )
    hits = [[contains_match(passage["text"], row["answers"]) for passage in row["passages"]] for row in rows]
    return {k: [max(each[:k], default=0.0) for each in hits] for k in ks}


def recall_table(recall: dict[int, list[float]]) -> Table:
    """Recall in percent with 95 % bootstrap intervals over the questions."""
    table = Table("Recall@", "%", "95 % interval")
    for k, hits in recall.items():
        low, high = bootstrap_interval(hits)
        table.add_row(str(k), f"{100 * sum(hits) / len(hits):.1f}", f"[{100 * low:.1f}, {100 * high:.1f}]")
    return table


def write_rows(path: Path, rows: list[Row]) -> None:
    """Writes JSON Lines in one step, gzipped where the name says so."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(temporary, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(temporary, path)


def main(
    questions: Annotated[Path, typer.Option(help="Rows with questions, JSON Lines.", exists=True, dir_okay=False)],
    corpus: Annotated[str, typer.Option(help="Source of the passages; see train/corpora.py.")],
    output: Annotated[Path, typer.Option(help="File for the rows with what was found: .jsonl or .jsonl.gz.")],
    retriever: Annotated[str, typer.Option(help="Model of sentence-transformers.")] = PAPER_RETRIEVER,
    reranker: Annotated[str, typer.Option(help="kind:model, see evaluation/reranking.py, or `none`.")] = PAPER_RERANKER,
    top_n: Annotated[int, typer.Option(min=1, help="Passages that are re-ranked.")] = 20,
    top_k: Annotated[int, typer.Option(min=1, help="Passages that are kept.")] = 1,
    num_questions: Annotated[int | None, typer.Option("-n", min=1, help="The first this many.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where embeddings and ranks are kept.")] = None,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
) -> None:
    """Retrieves passages for the questions of a file and prints Recall@k."""
    if not output.name.endswith(JSON_LINES):
        raise ValueError(f"`--output` is {output}; expected a name with {' or '.join(JSON_LINES)}.")
    cache_dir = cache_dir or cache_directory() / "retrieval"
    settings = RetrievalSettings(corpus, retriever, None if reranker == "none" else reranker, top_n, top_k)
    rows = read_rows(questions)[:num_questions]
    ranked = retrieve(rows, replace(settings, top_k=top_n), cache_dir, device)  # all of them, for the recall
    output.parent.mkdir(parents=True, exist_ok=True)
    write_rows(output, retrieve(rows, settings, cache_dir, device))
    console = Console()
    comparable = [row for row in ranked if usable_golds(row["answers"])]
    if comparable:
        ks = sorted({k for k in (1, 5, 20) if k <= top_n} | {top_n})
        console.print(recall_table(recall_at_k(comparable, tuple(ks))))
    console.print(f"{len(comparable)} of {len(rows)} questions have a gold to compare with. Wrote {output}")


if __name__ == "__main__":
    run_command(main)
