"""Which two passages a multi-hop question needs: together they have the words of the question, and a name in one of
them often leads to the other. Beyond the paper."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .segmentation_arcaligner import stop_words
from .tokenization_arcaligner import text_of, title_of

# Pairs are formed of at most so many passages, the top-ranked ones, because the number of pairs grows with the square.
MAX_COMBINED = 50
# In a passage without a title, the names among so many first words are taken for a title.
TITLE_WORDS = 10

_WORD = re.compile(r"\w+")
_IN_BRACKETS = re.compile(r"\([^()]*\)")  # "Casablanca (film)"


def match_gain(word_matches: torch.Tensor) -> float:
    """By how much the late-interaction score of two passages together is higher than that of one, both the best ones.
    For a multi-hop question it is large, because each passage has only a part of its words.

    Args:
        word_matches (`torch.Tensor` of shape `(num_passages, num_words)`): Late-interaction scores of the question's
            words; NaN for a passage without words.

    >>> round(match_gain(torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.5, 0.5]])), 3)
    0.25
    """
    matches = word_matches[~word_matches.isnan().any(dim=1)]
    if not matches.numel():
        return 0.0
    together = torch.maximum(matches[:, None], matches).mean(dim=2)  # (num_passages, num_passages)
    return float(together.amax() - matches.mean(dim=1).amax())


def combined_passages(passages: Sequence[str | dict], log_odds: dict[int, float]) -> list[int]:
    """The numbers of the passages that can form a pair, in order: the top-ranked ones with different texts, at most
    `MAX_COMBINED`. `log_odds` are the scores of passages (`ScoredPassage.pair_odds`), by the number of the passage."""
    unique = {}  # two copies of a passage are no pair
    for number in sorted(log_odds, key=log_odds.__getitem__, reverse=True):
        text = f"{title_of(passages[number]) or ''} {text_of(passages[number], number)}"
        unique.setdefault(" ".join(text.split()), number)
    return sorted([*unique.values()][:MAX_COMBINED])


def best_pair(
    head,
    question: str,
    passages: Sequence[str | dict],
    log_odds: dict[int, float],
    word_matches: dict[int, torch.Tensor],
    spacy_model: str,
) -> list[int]:
    """The numbers of the two passages that a question most likely needs, in order. If there is only one passage, its
    number alone.

    Args:
        head ([`MultihopHead`]): Of the aligner.
        question (`str`): The question.
        passages (`Sequence[str | dict]`): The passages, as for the processor.
        log_odds (`dict[int, float]`): The scores of passages (`ScoredPassage.pair_odds`), by the number of the passage.
        word_matches (`dict[int, torch.Tensor]`): The late-interaction scores of the question's words (num_words,), by
            the number of the passage (`word_matches`). Only passages that have them are selected.
        spacy_model (`str`): The processor's spaCy pipeline, for the stop words.
    """
    if len(word_matches) < 2:
        return [*word_matches]
    pairs = [*itertools.combinations(sorted(word_matches), 2)]
    features = pair_features(question, passages, log_odds, word_matches, pairs, spacy_model)
    return [*pairs[int(head.pair_logits(features).argmax())]]


class PassageWords(NamedTuple):
    """Words of a passage and its title, without stop words and case."""

    all: frozenset[str]
    names: frozenset[str]  # those with a capital or a digit at the beginning
    title: frozenset[str]

    @classmethod
    def of(cls, passage: str | dict, common: frozenset[str]) -> "PassageWords":
        """The words of a passage; `common` are the stop words."""
        title, text = title_of(passage) or "", text_of(passage, 0)
        full_text = f"{title} {text}"
        start = _IN_BRACKETS.sub(" ", title) or " ".join(_WORD.findall(text)[:TITLE_WORDS])
        title_words = words_of(start, common) if title else names_of(start, common)
        return cls(words_of(full_text, common), names_of(full_text, common), title_words)


def words_of(text: str, common: frozenset[str]) -> frozenset[str]:
    """Words of a text in lower case, without the `common` ones.

    >>> sorted(words_of("The loom of Ada", frozenset({"the", "of"})))
    ['ada', 'loom']
    """
    return frozenset(word.lower() for word in _WORD.findall(text)) - common


def names_of(text: str, common: frozenset[str]) -> frozenset[str]:
    """Words of a text that begin with a capital or a digit, in lower case, without the `common` ones.

    >>> sorted(names_of("The loom of Ada in 1843", frozenset({"the", "of"})))
    ['1843', 'ada']
    """
    names = (word for word in _WORD.findall(text) if word[0].isupper() or word[0].isdigit())
    return frozenset(word.lower() for word in names) - common


def pair_features(
    question: str,
    passages: Sequence[str | dict],
    log_odds: dict[int, float],
    word_matches: dict[int, torch.Tensor],
    pairs: Sequence[tuple[int, int]],
    spacy_model: str,
) -> torch.Tensor:
    """The features of pairs of passages (len(pairs), 8). Arguments as for `best_pair`.

    1. The sum of both log-odds.
    2. The share of the question's words that both passages together have.
    3. The share of the question's names that both passages together have.
    4. The number of names that both passages have and the question does not, divided by the geometric mean of their
       numbers of names.
    5. The larger of two shares, each of all words of a title: those that the other passage has, but neither its title
       nor the question.
    6. The sum of the shares of both titles that are in the question.
    7. The late-interaction score of both passages together: the mean over the question's words of the higher of two
       scores.
    8. The sum of the late-interaction scores of both passages.
    """
    common = stop_words(spacy_model)
    question_words = words_of(question, common)
    question_names = names_of(" ".join(question.split()[1:]), common)  # the first word has a capital anyway
    numbers = {number for pair in pairs for number in pair}
    words = {number: PassageWords.of(passages[number], common) for number in numbers}
    # A passage without words has NaN.
    matches = {number: word_matches[number].double().nan_to_num(0.0) for number in numbers}
    scores = {number: _mean(values) for number, values in matches.items()}
    features = []
    for one, two in pairs:
        first, second = words[one], words[two]
        num_names = math.sqrt(len(first.names) * len(second.names))
        features.append(
            (
                log_odds[one] + log_odds[two],
                _share(question_words & (first.all | second.all), question_words),
                _share(question_names & (first.all | second.all), question_names),
                len((first.names & second.names) - question_words) / max(num_names, 1.0),
                max(
                    _share((first.title & second.all) - second.title - question_words, first.title),
                    _share((second.title & first.all) - first.title - question_words, second.title),
                ),
                _share(first.title & question_words, first.title) + _share(second.title & question_words, second.title),
                _mean(torch.maximum(matches[one], matches[two])),
                scores[one] + scores[two],
            )
        )
    return torch.tensor(features, dtype=torch.float64, device="cpu").view(len(pairs), 8)


def _share(part: frozenset[str], whole: frozenset[str]) -> float:
    return len(part) / max(len(whole), 1)


def _mean(values: torch.Tensor) -> float:
    return float(values.sum()) / max(len(values), 1)  # a question may have no words
