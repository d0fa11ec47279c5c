"""Retrieval as in the paper: dense, over a corpus; the first 20 passages are re-ranked, and the first k of them kept.

    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl
    python -m arcaligner.evaluation.retrieval --questions nq.jsonl.gz --corpus paragraphs.jsonl.gz --output nq.jsonl \\
        --retriever sentence-transformers/all-MiniLM-L6-v2 --reranker bi_encoder:sentence-transformers/all-MiniLM-L6-v2

Writes the questions with the passages that were found and prints Recall@k. A retriever is any model of
sentence-transformers; a plain transformers checkpoint, such as Contriever, is read by the mean of its tokens. Passages
are compared by the inner product of embeddings, normalized or not as the model's own pipeline has them. A re-ranker is
named by its kind and its model:

    rank_llm:castorini/rank_zephyr_7b_v1_full             RankZephyr, the paper's, by the package `rank_llm`, on a GPU
    cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2     a CrossEncoder of sentence-transformers
    bi_encoder:sentence-transformers/all-MiniLM-L6-v2     inner products of a SentenceTransformer's embeddings

    <cache_dir>/embeddings/<retriever>/<texts>.npy                float16 embeddings of 2,048 passages
    <cache_dir>/ranks/<corpus, models, top_n>/<questions>.json    the passages found for 32 questions, with scores

A part of a path in brackets is a digest of what it names, models by their files or commit, so nothing is mixed up. A
killed run continues where it stopped.
"""

import gzip
import importlib.util
import itertools
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

from ..configuration_arcaligner import cache_directory, missing_model_message, resolve_encoder
from ..files import digest, digest_files, run_command, write_whole
from ..train.corpora import JSON_LINES, Row, open_corpus, read_rows
from .metrics import bootstrap_interval, contains_match, usable_golds
from .runs import to_lines

PASSAGES_PER_SHARD = 2048
QUESTIONS_PER_FILE = 32
PAPER_RETRIEVER = "facebook/contriever"
PAPER_RERANKER = "rank_llm:castorini/rank_zephyr_7b_v1_full"

Passage = dict[str, str]
# For each question, numbers and scores of the passages found, the best first.
Ranks = list[tuple[list[int], list[float]]]


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
        cache_dir (`Path`): Where embeddings and ranks are kept.
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
    groups = [questions[i : i + QUESTIONS_PER_FILE] for i in range(0, len(questions), QUESTIONS_PER_FILE)]
    files = [cache_dir / "ranks" / digest(made_from) / f"{digest(group)}.json" for group in groups]
    missing = [(group, file) for group, file in zip(groups, files, strict=True) if not file.exists()]
    if missing:
        _rank_missing(missing, passages, settings, cache_dir / "embeddings" / digest(retriever), device)
    return list(itertools.chain(*(json.loads(file.read_text(encoding="utf-8")) for file in files)))


def _rank_missing(
    missing: list[tuple[list[str], Path]],
    passages: datasets.Dataset,
    settings: RetrievalSettings,
    folder: Path,
    device: str,
) -> None:
    """Writes a file for each group of questions."""
    # The retriever's own scores are what it would give as a re-ranker.
    reranks = settings.reranker not in (None, f"bi_encoder:{settings.retriever}")
    if reranks:
        check_installed(settings.reranker)
    scores, numbers = _search(
        [question for group, _ in missing for question in group], passages, settings, folder, device
    )
    reranker = load_reranker(settings.reranker, device) if reranks else None
    found = zip(numbers.tolist(), scores.tolist(), strict=True)
    for group, file in track(missing, "re-ranking", transient=True, disable=reranker is None):
        ranks = list(itertools.islice(found, len(group)))
        if reranker is not None:
            candidates = [[passages[number] for number in numbers] for numbers, _ in ranks]
            new_scores = reranker.score(group, candidates)
            ranks = [_sorted(numbers, new) for (numbers, _), new in zip(ranks, new_scores, strict=True)]
        write_whole(file, json.dumps(ranks))


def _search(
    questions: list[str], passages: datasets.Dataset, settings: RetrievalSettings, folder: Path, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Inner products and numbers of the passages found, (num_questions, top_n); the retriever is freed at the end."""
    model = SentenceTransformer(resolve_encoder(settings.retriever), device=device)
    shards = embed_passages(passages, lambda texts: model.encode_document(texts, show_progress_bar=False), folder)
    queries = model.encode_query(questions, show_progress_bar=False)  # (num_questions, width)
    return search(queries, shards, min(settings.top_n, len(passages)))


def _sorted(numbers: list[int], scores: list[float]) -> tuple[list[int], list[float]]:
    """By score, the largest first; those of equal score in the order they had."""
    order = sorted(range(len(numbers)), key=lambda index: -scores[index])
    return [numbers[index] for index in order], [scores[index] for index in order]


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


def embed_passages(passages: datasets.Dataset, encode: Callable[[list[str]], np.ndarray], folder: Path) -> list[Path]:
    """
    Encodes the passages whose shard is not in `folder`, with a progress bar.

    Args:
        passages (`datasets.Dataset`): Of [`open_passages`].
        encode (`Callable`): Texts to embeddings (num_texts, width); the same encoder for everything in `folder`.
        folder (`Path`): Where shards are kept; made when missing.

    Returns:
        `list[Path]`: The shards, in order.

    Raises:
        `ValueError`: embeddings that are NaN, or infinite in float16.
    """
    shards = []
    num_shards = -(-len(passages) // PASSAGES_PER_SHARD)
    batches = passages.iter(PASSAGES_PER_SHARD)
    for batch in track(batches, "encoding passages", total=num_shards, transient=True):
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
    return shards


def search(queries: np.ndarray, shards: list[Path], top_n: int) -> tuple[np.ndarray, np.ndarray]:
    """
    The passages with the largest inner products, exactly. One shard is in memory at a time.

    Args:
        queries (`np.ndarray` of shape `(num_queries, width)`): Embeddings of the questions.
        shards (`list[Path]`): Of [`embed_passages`].
        top_n (`int`): How many to find; at most the number of passages.

    Returns:
        Inner products and numbers of the passages, each `(num_queries, top_n)`, the best first.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError("Retrieval searches with FAISS, which is not installed: `pip install faiss-cpu`.") from error
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


# Re-rankers. Each has `score`: a number for each candidate of each question; larger is better.


class CrossEncoderReranker:
    """Reads a question together with each passage."""

    def __init__(self, name: str, device: str):
        self.model = CrossEncoder(name, device=device)

    def score(self, questions: list[str], candidates: list[list[Passage]]) -> list[list[float]]:
        pairs = [
            (question, passage_text(passage))
            for question, passages in zip(questions, candidates, strict=True)
            for passage in passages
        ]
        scores = iter(self.model.predict(pairs, show_progress_bar=False).tolist())
        return [[next(scores) for _ in passages] for passages in candidates]


class BiEncoderReranker:
    """Encodes questions and passages separately; a passage that several questions share only once."""

    def __init__(self, name: str, device: str):
        self.model = SentenceTransformer(name, device=device)

    def score(self, questions: list[str], candidates: list[list[Passage]]) -> list[list[float]]:
        texts = [[passage_text(passage) for passage in passages] for passages in candidates]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(itertools.chain(*texts)))}
        queries = self.model.encode_query(questions, show_progress_bar=False)  # (num_questions, width)
        embeddings = self.model.encode_document(list(numbers), show_progress_bar=False)  # (num_texts, width)
        return [
            (embeddings[[numbers[text] for text in each]] @ query).tolist()
            for query, each in zip(queries, texts, strict=True)
        ]


class RankLLMReranker:
    """RankZephyr: reads all passages of a question at once and says their order; a score is minus the rank."""

    def __init__(self, name: str, device: str):
        from rank_llm.rerank.listwise import ZephyrReranker

        self.model = ZephyrReranker(model_path=name, device=torch.device(device).type)

    def score(self, questions: list[str], candidates: list[list[Passage]]) -> list[list[float]]:
        from rank_llm.data import Candidate, Query, Request

        requests = [
            Request(
                query=Query(text=question, qid=number),
                candidates=[Candidate(docid, -float(docid), dict(passage)) for docid, passage in enumerate(passages)],
            )
            for number, (question, passages) in enumerate(zip(questions, candidates, strict=True))
        ]
        results = self.model.rerank_batch(requests, rank_end=max(map(len, candidates)))
        ranks = [{candidate.docid: rank for rank, candidate in enumerate(each.candidates)} for each in results]
        return [[-float(rank[docid]) for docid in range(len(rank))] for rank in ranks]


RERANKERS = {"rank_llm": RankLLMReranker, "cross_encoder": CrossEncoderReranker, "bi_encoder": BiEncoderReranker}


def parse_reranker(reranker: str) -> tuple[str, str]:
    """Kind and model of a re-ranker.

    >>> parse_reranker("cross_encoder:org/model")
    ('cross_encoder', 'org/model')

    Raises:
        `ValueError`: no known kind, or no model.
    """
    kind, _, name = reranker.partition(":")
    if kind not in RERANKERS or not name:
        raise ValueError(
            f"The re-ranker is {reranker!r}; expected kind:model, the kind one of {', '.join(RERANKERS)}, such as "
            "'cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2'."
        )
    return kind, name


def check_installed(reranker: str) -> None:
    """Raises `ImportError` if the package of a re-ranker is missing, before anything is encoded."""
    if parse_reranker(reranker)[0] == "rank_llm" and importlib.util.find_spec("rank_llm") is None:
        raise ImportError(
            f"The re-ranker {reranker} needs the package `rank_llm`, which is not installed: `pip install rank-llm` "
            "(it brings vllm, and needs a GPU). Or name another re-ranker: cross_encoder:MODEL, bi_encoder:MODEL."
        )


def load_reranker(reranker: str, device: str) -> "CrossEncoderReranker | BiEncoderReranker | RankLLMReranker":
    """
    The re-ranker of a name, on a device.

    Raises:
        `OSError`: its model is neither on this machine nor available from the Hub.
    """
    kind, name = parse_reranker(reranker)
    try:
        return RERANKERS[kind](resolve_encoder(name), device)
    except OSError as error:
        raise OSError(missing_model_message("re-ranker", name, error)) from error


# The command


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
            f"{len(lacking)} rows have no gold that is left when it is normalized, first {lacking[0]!r}; leave them "
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
    cache_dir = cache_dir or cache_directory() / "retrieval"
    settings = RetrievalSettings(corpus, retriever, None if reranker == "none" else reranker, top_n, top_k)
    rows = read_rows(questions)[:num_questions]
    ranked = retrieve(rows, replace(settings, top_k=top_n), cache_dir, device)  # all of them, for the recall
    text = to_lines(retrieve(rows, settings, cache_dir, device)).encode()
    write_whole(output, gzip.compress(text) if output.suffix == ".gz" else text)
    console = Console()
    comparable = [row for row in ranked if usable_golds(row["answers"])]
    if comparable:
        ks = sorted({k for k in (1, 5, 20) if k <= top_n} | {top_n})
        console.print(recall_table(recall_at_k(comparable, tuple(ks))))
    console.print(f"{len(comparable)} of {len(rows)} questions have a gold to compare with. Wrote {output}")


if __name__ == "__main__":
    run_command(main)
