"""Re-rankers of the passages that a retriever found.

A re-ranker is named by its kind and its model, `kind:model`:

    listwise:castorini/rank_zephyr_7b_v1_full            a chat model that lists all passages in order, as in the paper;
                                                         behind an OpenAI-compatible endpoint (`vllm serve`)
    cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2    a CrossEncoder of sentence-transformers
    aligner:checkpoints/arcaligner-smollm2-135m          an aligner's score of each passage; needs no other model
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..answering_arcaligner import Answerer, search_text
from ..loading_arcaligner import missing_model_message, resolve_model
from .answering import load_aligner
from .chat_endpoint import ENDPOINT, ChatEndpoint

MAX_WORDS = 300  # of a passage in the prompt, as in RankLLM
TOKENS_PER_NUMBER = 8  # of a reply, for "[12] > "
_NUMBER = re.compile(r"\[(\d+)\]")
KINDS = ("listwise", "cross_encoder", "aligner")

# From questions and their passages to the order of the passages, best first, or the reason why there is none.
Reranker = Callable[[list[str], list[list[dict[str, str]]]], Iterator["list[int] | WrongListError"]]


class WrongListError(ValueError):
    """The reply of a listwise re-ranker is not an order of its passages; the message says why."""


def listwise_prompt(question: str, passages: list[dict[str, str]]) -> str:
    """RankZephyr's prompt, in one turn (https://github.com/castorini/rank_llm)."""
    count = len(passages)
    lines = [
        f"I will provide you with {count} passages, each indicated by a numerical identifier []. Rank the passages "
        f"based on their relevance to the search query: {question}.",
        "",
    ]
    for number, passage in enumerate(passages, start=1):
        words = search_text(passage["title"], passage["text"]).split()
        lines.append(f"[{number}] {' '.join(words[:MAX_WORDS])}")
    return "\n".join(lines) + (
        f"\n\nSearch Query: {question}.\nRank the {count} passages above based on their relevance to the search query. "
        "All the passages should be included and listed using identifiers, in descending order of relevance. The "
        "output format should be [] > [], e.g., [4] > [2]. Only respond with the ranking results, do not say any word "
        "or explain."
    )


def parse_ranking(reply: str, count: int) -> list[int]:
    """
    The order that a reply gives `count` passages: their numbers, from 0.

    >>> parse_ranking("[2] > [3] > [1]", 3)
    [1, 2, 0]

    Raises:
        `WrongListError`: a reply that does not name each passage once.
    """
    numbers = [int(number) for number in _NUMBER.findall(reply)]
    if not numbers:
        raise WrongListError("the reply names no passage")
    if any(not 1 <= number <= count for number in numbers):
        raise WrongListError("the reply has a number that belongs to no passage")
    if len(set(numbers)) < len(numbers):
        raise WrongListError("the reply names a passage twice")
    if len(numbers) < count:
        raise WrongListError("the reply leaves out a passage")
    return [number - 1 for number in numbers]


def load_reranker(name: str, endpoint: str | None = None, device: str = "cpu") -> Reranker:
    """
    The re-ranker of a name, `kind:model`.

    Raises:
        `ValueError`: an unknown kind, or no model.
        `OSError`: a model that is neither on this machine nor on the Hub.
    """
    kind, _, model = name.partition(":")
    if kind not in KINDS or not model:
        raise ValueError(
            f"The re-ranker is {name!r}; expected KIND:MODEL, where KIND is one of {', '.join(KINDS)}, for example "
            "'cross_encoder:cross-encoder/ms-marco-MiniLM-L6-v2'."
        )
    if kind == "listwise":
        return listwise(ChatEndpoint(model, endpoint or ENDPOINT, timeout=300.0))
    return by_scores(cross_encoder(model, device) if kind == "cross_encoder" else aligner(model, device))


def listwise(endpoint: ChatEndpoint) -> Reranker:
    """Re-rank with a chat model, which gets all passages of a question and writes their order."""

    def rank(questions: list[str], passages: list[list[dict[str, str]]]) -> Iterator[list[int] | WrongListError]:
        longest = max(map(len, passages), default=1)
        ask = replace(endpoint, max_tokens=TOKENS_PER_NUMBER * longest)
        replies = ask([listwise_prompt(*pair) for pair in zip(questions, passages, strict=True)])
        for reply, ranked in zip(replies, passages, strict=True):
            try:
                yield parse_ranking(reply, len(ranked)) if reply is not None else WrongListError("there is no reply")
            except WrongListError as error:
                yield error

    return rank


def by_scores(score: Callable[[str, list[dict[str, str]]], Any]) -> Reranker:
    """Re-rank by a score (num_passages,) for each passage; equal scores keep the retriever's order."""

    def rank(questions: list[str], passages: list[list[dict[str, str]]]) -> Iterator[list[int]]:
        for question, candidates in zip(questions, passages, strict=True):
            yield np.argsort(-np.asarray(score(question, candidates), dtype=np.float64), kind="stable").tolist()

    return rank


def cross_encoder(name: str, device: str) -> Callable[[str, list[dict[str, str]]], Any]:
    """Scores of a CrossEncoder, whose input is the question with one passage."""
    from sentence_transformers import CrossEncoder

    try:
        model = CrossEncoder(resolve_model(name), device=device)
    except OSError as error:
        raise OSError(missing_model_message("re-ranker", name, error)) from error
    return lambda question, passages: model.predict(
        [(question, search_text(passage["title"], passage["text"])) for passage in passages], show_progress_bar=False
    )


def aligner(checkpoint: str, device: str) -> Callable[[str, list[dict[str, str]]], list[float]]:
    """Log-odds that a passage contains the answer, by an aligner with an answerability head."""
    answerer = Answerer(*load_aligner(checkpoint, device))
    answerer.check(max_passages=1)

    def score(question: str, passages: list[dict[str, str]]) -> list[float]:
        (scores,) = answerer.score([question], [passages])
        return [scores[number].log_odds if number in scores else -np.inf for number in range(len(passages))]

    return score
