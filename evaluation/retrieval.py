"""Retrieval as in the paper: dense, over a corpus; the first 20 passages are re-ranked, and the first k of them kept.

    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl
    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl \\
        --retriever sentence-transformers/all-MiniLM-L6-v2 --reranker none

Writes the questions with the passages that were found and prints Recall@k. A retriever is any model of
sentence-transformers; a plain transformers checkpoint, such as Contriever, is read by the mean of its tokens. Passages
are compared by the inner product of embeddings, as the model's own pipeline makes them. The embeddings of the corpus
are in memory during the search. A re-ranker is named by its kind and its model:

    rank_llm:castorini/rank_zephyr_7b_v1_full             RankZephyr, the paper's, by the package `rank_llm`, on a GPU
    cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2     a CrossEncoder of sentence-transformers

    <cache_dir>/embeddings/<retriever>/<texts>.npy                 float16 embeddings of 2,048 passages
    <cache_dir>/ranks/<corpus, models, top_n, questions>.json      the passages found, with scores

A part of a path in brackets is a digest of what it names, models by their files or commit. A killed encoding continues
where it stopped.
"""

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import torch
import typer
from datasets import Features, Value
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.util import dot_score, semantic_search

from ..configuration_arcaligner import cache_directory, missing_model_message, resolve_encoder
from ..files import digest, digest_files, run_command, write_whole
from ..train.corpora import JSON_LINES, Row, open_corpus, read_rows
from .metrics import contains_match, percent_interval, shown_interval, usable_golds
from .runs import to_lines

PASSAGES_PER_SHARD = 2048
PAPER_RETRIEVER = "facebook/contriever"
PAPER_RERANKER = "rank_llm:castorini/rank_zephyr_7b_v1_full"

Passage = dict[str, str]
Ranks = list[list[tuple[int, float]]]  # of each question, numbers and scores of the passages found, the best first


@dataclass(frozen=True)
class RetrievalSettings:
    """
    How passages are found.

    Args:
        corpus (`str`): Source of the passages; see `train/corpora.py`.
        retriever (`str`): Model of sentence-transformers, a folder or a Hub id.
        reranker (`str`, *optional*): `kind:model`, see above; `None` keeps the retriever's order.
        top_n (`int`): How many passages are re-ranked.
        top_k (`int`): How many of them are kept.

    Raises:
        `ValueError`: `top_k` greater than `top_n` or less than 1; a re-ranker of an unknown kind.
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
        cache_dir (`Path`): Where embeddings and ranks are kept.
        device (`str`): Where the models run.

    Returns:
        `list[dict]`: The rows with `passages`, the best first: `top_k`, or all of a smaller corpus. `meta.retrieval`
        holds their scores; `meta.gold`, the numbers of other passages, is left out.

    Raises:
        `ValueError`: a row without a question; a corpus without a passage.
        `OSError`: a model that is not there, with how to get it.
        `ImportError`: the re-ranker's package is not installed.
    """
    empty = [row["id"] for row in rows if not row["question"].strip()]
    if empty:
        raise ValueError(f"{len(empty)} rows have no question to retrieve for, first {empty[0]!r}; leave them out.")
    passages = open_passages(settings.corpus)
    found = []
    for row, ranks in zip(rows, rank_passages(rows, passages, settings, Path(cache_dir), device), strict=True):
        ranks = ranks[: settings.top_k]
        meta = {key: value for key, value in (row.get("meta") or {}).items() if key != "gold"}
        meta["retrieval"] = {"scores": [score for _, score in ranks]}
        found.append(row | {"passages": [passages[number] for number, _ in ranks], "meta": meta})
    return found


def rank_passages(
    rows: list[Row], passages: datasets.Dataset, settings: RetrievalSettings, cache_dir: Path, device: str
) -> Ranks:
    """What is found for each question, from the cache if it is there."""
    questions = [row["question"] for row in rows]
    retriever = model_version("retriever", settings.retriever)
    made_from = {
        "settings": {key: value for key, value in asdict(settings).items() if key != "top_k"},
        "corpus": passages._fingerprint,
        "retriever": retriever,
        "reranker": settings.reranker and model_version("re-ranker", parse_reranker(settings.reranker)[1]),
        "questions": questions,
    }
    file = cache_dir / "ranks" / f"{digest(made_from)}.json"
    if not file.exists():
        rerank = load_reranker(settings.reranker, device) if settings.reranker else None
        model = SentenceTransformer(resolve_encoder(settings.retriever), device=device)

        def encode(texts: list[str]) -> np.ndarray:
            return model.encode_document(texts, show_progress_bar=False)

        corpus = embed_passages(passages, encode, cache_dir / "embeddings" / digest(retriever))
        queries = model.encode_query(questions, show_progress_bar=False, convert_to_tensor=True).cpu()
        hits = semantic_search(queries.float(), corpus.float(), top_k=settings.top_n, score_function=dot_score)
        ranks = [[(hit["corpus_id"], hit["score"]) for hit in of_question] for of_question in hits]
        if rerank is not None:
            pairs = track(zip(questions, ranks, strict=True), "re-ranking", total=len(questions), transient=True)
            ranks = [_reranked(rerank, question, found, passages) for question, found in pairs]
        write_whole(file, json.dumps(ranks))
    return json.loads(file.read_text(encoding="utf-8"))


def _reranked(rerank: Callable, question: str, found: list[tuple[int, float]], passages: datasets.Dataset):
    """By the re-ranker's scores, the largest first; those of equal score in the order they had."""
    numbers = [number for number, _ in found]
    scores = rerank(question, [passages[number] for number in numbers])
    return sorted(zip(numbers, scores, strict=True), key=lambda pair: -pair[1])


def model_version(kind: str, name: str) -> str:
    """
    The digest of a model folder's files, or the commit of a model of the Hub.

    Args:
        kind (`str`): What it is for, in messages.
        name (`str`): Folder or Hub id.

    Raises:
        `OSError`: it is neither on this machine nor available from the Hub, with how to get it.
    """
    folder = Path(resolve_encoder(name))
    if folder.is_dir():
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".md"]
        return digest_files([path for path in files if not path.relative_to(folder).as_posix().startswith(".")])
    try:
        return Path(snapshot_download(name, allow_patterns="*config.json")).name
    except (OSError, ValueError) as error:
        raise OSError(missing_model_message(kind, name, error)) from error


# The passages of a corpus and their embeddings


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


def _unique_passages(source: str, version: str) -> Iterator[Passage]:
    """`version` makes a changed source another data set."""
    seen = set()
    for row in open_corpus(source):
        for passage in row["passages"]:
            key = digest([passage["title"], passage["text"]])
            if passage["text"].strip() and key not in seen:
                seen.add(key)
                yield passage


def embed_passages(passages: datasets.Dataset, encode: Callable[[list[str]], np.ndarray], folder: Path) -> torch.Tensor:
    """
    The embeddings of passages, encoded where their shard is not in `folder`.

    Args:
        passages (`datasets.Dataset`): Of [`open_passages`].
        encode (`Callable`): Texts to embeddings (num_texts, width); the same encoder for everything in `folder`.
        folder (`Path`): Where shards are kept; made when missing.

    Returns:
        `torch.Tensor` of shape `(num_passages, width)`: In float16.

    Raises:
        `ValueError`: embeddings that are NaN, or infinite in float16.
    """
    shards = []
    batches = passages.iter(PASSAGES_PER_SHARD)
    for batch in track(batches, "encoding passages", total=-(-len(passages) // PASSAGES_PER_SHARD), transient=True):
        pairs = zip(batch["title"], batch["text"], strict=True)
        texts = [passage_text({"title": title, "text": text}) for title, text in pairs]
        shards.append(folder / f"{digest(texts)}.npy")
        if shards[-1].exists():
            continue
        with np.errstate(over="ignore"):
            embeddings = np.asarray(encode(texts)).astype(np.float16)  # (num_texts, width)
        is_finite = np.isfinite(embeddings).all(axis=1)
        if not is_finite.all():
            bad = texts[int(np.argmin(is_finite))]
            raise ValueError(
                f"The retriever returned NaN, or values too large for float16, first for the passage {bad[:80]!r}. "
                "Remove it from the corpus or use another retriever."
            )
        write_whole(shards[-1], lambda file, embeddings=embeddings: np.save(file, embeddings))
    return torch.from_numpy(np.concatenate([np.load(shard) for shard in shards]))


# Re-rankers: functions of a question and its passages to a score for each passage; larger is better.


def cross_encoder(name: str, device: str) -> Callable[[str, list[Passage]], list[float]]:
    """Reads a question together with each passage."""
    model = CrossEncoder(name, device=device)

    def score(question: str, passages: list[Passage]) -> list[float]:
        pairs = [(question, passage_text(passage)) for passage in passages]
        return model.predict(pairs, show_progress_bar=False).tolist()

    return score


def rank_llm(name: str, device: str) -> Callable[[str, list[Passage]], list[float]]:
    """RankZephyr: reads all passages of a question at once and gives their order; a score is minus the rank."""
    from rank_llm.data import Candidate, Query, Request
    from rank_llm.rerank.listwise import ZephyrReranker

    model = ZephyrReranker(model_path=name, device=torch.device(device).type)

    def score(question: str, passages: list[Passage]) -> list[float]:
        candidates = [Candidate(number, -float(number), dict(passage)) for number, passage in enumerate(passages)]
        request = Request(query=Query(text=question, qid=0), candidates=candidates)
        (result,) = model.rerank_batch([request], rank_end=len(passages))
        ranks = {candidate.docid: rank for rank, candidate in enumerate(result.candidates)}
        return [-float(ranks[number]) for number in range(len(passages))]

    return score


RERANKERS = {"rank_llm": rank_llm, "cross_encoder": cross_encoder}


def parse_reranker(reranker: str) -> tuple[str, str]:
    """Kind and model of a re-ranker.

    >>> parse_reranker("cross_encoder:org/model")
    ('cross_encoder', 'org/model')

    Raises:
        `ValueError`: an unknown kind, or no model.
    """
    kind, _, name = reranker.partition(":")
    if kind not in RERANKERS or not name:
        raise ValueError(
            f"The re-ranker is {reranker!r}; expected kind:model, the kind one of {', '.join(RERANKERS)}, such as "
            "'cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2'."
        )
    return kind, name


def load_reranker(reranker: str, device: str) -> Callable[[str, list[Passage]], list[float]]:
    """
    The re-ranker of a name, on a device.

    Raises:
        `OSError`: its model is neither on this machine nor available from the Hub.
        `ImportError`: its package is not installed.
    """
    kind, name = parse_reranker(reranker)
    if kind == "rank_llm" and importlib.util.find_spec("rank_llm") is None:
        raise ImportError(
            f"The re-ranker {reranker} needs the package `rank_llm`, which is not installed: `pip install rank-llm` "
            "(it brings vllm, and needs a GPU). Or name another re-ranker, cross_encoder:MODEL."
        )
    try:
        return RERANKERS[kind](resolve_encoder(name), device)
    except OSError as error:
        raise OSError(missing_model_message("re-ranker", name, error)) from error


# The command


def recall_at_k(rows: list[Row], k: int) -> list[float]:
    """1.0 for each row with a gold in the text of one of its first k passages, else 0.0; see `contains_match`."""
    hits = [[contains_match(passage["text"], row["answers"]) for passage in row["passages"][:k]] for row in rows]
    return [max(each, default=0.0) for each in hits]


def main(
    questions: Annotated[Path, typer.Option(help="Rows with questions, JSON Lines.", exists=True, dir_okay=False)],
    corpus: Annotated[str, typer.Option(help="Source of the passages; see train/corpora.py.")],
    output: Annotated[Path, typer.Option(help="File for the rows with what was found: .jsonl or .jsonl.gz.")],
    retriever: Annotated[str, typer.Option(help="Model of sentence-transformers.")] = PAPER_RETRIEVER,
    reranker: Annotated[str, typer.Option(help="kind:model, or `none`.")] = PAPER_RERANKER,
    top_n: Annotated[int, typer.Option(min=1, help="Passages that are re-ranked.")] = 20,
    top_k: Annotated[int, typer.Option(min=1, help="Passages that are kept.")] = 1,
    num_questions: Annotated[int | None, typer.Option("-n", min=1, help="Only the first questions.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where embeddings and ranks are kept.")] = None,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
) -> None:
    """Retrieves passages for the questions of a file and prints Recall@k."""
    if not output.name.endswith(JSON_LINES):
        raise ValueError(f"`--output` is {output}; expected a name with {' or '.join(JSON_LINES)}.")
    settings = RetrievalSettings(corpus, retriever, None if reranker == "none" else reranker, top_n, top_k)
    rows, cache_dir = read_rows(questions)[:num_questions], cache_dir or cache_directory() / "retrieval"
    text = to_lines(retrieve(rows, settings, cache_dir, device)).encode()
    write_whole(output, gzip.compress(text) if output.suffix == ".gz" else text)
    ranked = retrieve(rows, replace(settings, top_k=top_n), cache_dir, device)  # all of them, for the recall
    comparable = [row for row in ranked if usable_golds(row["answers"])]
    table = Table("Recall@", "% [95 %]", caption=f"{len(comparable)} of {len(rows)} questions have a gold to look for")
    for k in sorted({k for k in (1, 5, 20) if k <= top_n} | {top_n}) if comparable else ():
        table.add_row(str(k), shown_interval(percent_interval(recall_at_k(comparable, k))))
    Console().print(table)
    typer.echo(f"Wrote {output}")


if __name__ == "__main__":
    run_command(main)
