"""Re-rankers: the second look at the passages that a retriever found.

One is named by its kind and its model, `kind:model`:

    rank_llm:castorini/rank_zephyr_7b_v1_full             RankZephyr, the paper's, by the package `rank_llm`, on a GPU
    cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2     a CrossEncoder of sentence-transformers
    bi_encoder:sentence-transformers/all-MiniLM-L6-v2     inner products of a SentenceTransformer's embeddings
"""

import importlib.util
import itertools
from typing import Protocol

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

from ..configuration_arcaligner import missing_model_message, resolve_encoder
from .retrieval_index import passage_text

Passage = dict[str, str]


class Reranker(Protocol):
    """Scores passages."""

    def score(self, questions: list[str], candidates: list[list[Passage]]) -> list[list[float]]:
        """A score for each candidate of each question; larger is better."""


class CrossEncoderReranker:
    """Reads a question with a passage at a time."""

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
    """Encodes questions and passages apart; a passage that several questions share once."""

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
    """Raises `ImportError` when the package of a re-ranker is not there, before anything is encoded."""
    if parse_reranker(reranker)[0] == "rank_llm" and importlib.util.find_spec("rank_llm") is None:
        raise ImportError(
            f"The re-ranker {reranker} needs the package `rank_llm`, which is not installed: `pip install rank-llm` "
            "(it brings vllm, and needs a GPU). Or name another re-ranker: cross_encoder:MODEL, bi_encoder:MODEL."
        )


def load_reranker(reranker: str, device: str) -> Reranker:
    """
    The re-ranker of a name, on a device.

    Raises:
        `OSError`: its model is neither on this machine nor to be had from the Hub.
    """
    kind, name = parse_reranker(reranker)
    try:
        return RERANKERS[kind](resolve_encoder(name), device)
    except OSError as error:
        raise OSError(missing_model_message("re-ranker", name, error)) from error
