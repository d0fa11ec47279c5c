"""Which two passages a multi-hop question needs: together they say what it asks about, and a name in one of them often
leads to the other. Beyond the paper."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .segmentation_arcaligner import stop_words
from .tokenization_arcaligner import text_of, title_of

# Of more passages only the top-ranked ones are combined, which is fast enough.
MOST_COMBINED = 50
# Words at the beginning of a passage without a title; the names among them are taken for one.
TITLE_WORDS = 10

_WORD = re.compile(r"\w+")
_IN_BRACKETS = re.compile(r"\([^()]*\)")  # "Casablanca (film)"


def best_pair(
    head, question: str, passages: Sequence[str | dict], log_odds: dict[int, float], spacy_model: str
) -> list[int]:
    """The numbers of the two passages that a question most likely needs, in order; of one if all texts are equal.

    Args:
        head ([`MultihopHead`]): Of the aligner.
        question (`str`): The question.
        passages (`Sequence[str | dict]`): The passages, as for the processor.
        log_odds (`dict[int, float]`): The scores that rank passages, by number, of at least one of them.
        spacy_model (`str`): Of the processor, for the stop words.
    """
    unique = {}  # two copies of a passage are no pair
    for number in sorted(log_odds, key=log_odds.__getitem__, reverse=True):
        text = f"{title_of(passages[number]) or ''} {text_of(passages[number], number)}"
        unique.setdefault(" ".join(text.split()), number)
    ranked = sorted([*unique.values()][:MOST_COMBINED])
    if len(ranked) < 2:
        return ranked
    pairs = [*itertools.combinations(ranked, 2)]
    features = pair_features(question, passages, log_odds, pairs, spacy_model)
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
        whole = f"{title} {text}"
        start = _IN_BRACKETS.sub(" ", title) or " ".join(_WORD.findall(text)[:TITLE_WORDS])
        own = words_of(start, common) if title else names_of(start, common)
        return cls(words_of(whole, common), names_of(whole, common), own)


def words_of(text: str, common: frozenset[str]) -> frozenset[str]:
    """
    >>> sorted(words_of("The loom of Ada", frozenset({"the", "of"})))
    ['ada', 'loom']
    """
    return frozenset(word.lower() for word in _WORD.findall(text)) - common


def names_of(text: str, common: frozenset[str]) -> frozenset[str]:
    """
    >>> sorted(names_of("The loom of Ada in 1843", frozenset({"the", "of"})))
    ['1843', 'ada']
    """
    found = (word for word in _WORD.findall(text) if word[0].isupper() or word[0].isdigit())
    return frozenset(word.lower() for word in found) - common


def pair_features(
    question: str,
    passages: Sequence[str | dict],
    log_odds: dict[int, float],
    pairs: Sequence[tuple[int, int]],
    spacy_model: str,
) -> torch.Tensor:
    """For each pair of passages (len(pairs), 6): the sum of their log-odds; the shares of the question's words, and of
    its names, that they cover together; the names that both have and the question does not, relative to how many they
    have; the share of a title that the other passage mentions and the question does not; the shares of both titles in
    the question."""
    common = stop_words(spacy_model)
    asked = words_of(question, common)
    asked_names = names_of(" ".join(question.split()[1:]), common)  # the first word has a capital anyway
    read = {number: PassageWords.of(passages[number], common) for number in {each for pair in pairs for each in pair}}
    features = []
    for one, two in pairs:
        first, second = read[one], read[two]
        names = math.sqrt(len(first.names) * len(second.names))
        features.append(
            (
                log_odds[one] + log_odds[two],
                _share(asked & (first.all | second.all), asked),
                _share(asked_names & (first.all | second.all), asked_names),
                len((first.names & second.names) - asked) / max(names, 1.0),
                max(
                    _share((first.title & second.all) - second.title - asked, first.title),
                    _share((second.title & first.all) - first.title - asked, second.title),
                ),
                _share(first.title & asked, first.title) + _share(second.title & asked, second.title),
            )
        )
    return torch.tensor(features, dtype=torch.float64, device="cpu").view(len(pairs), 6)


def _share(part: frozenset[str], whole: frozenset[str]) -> float:
    return len(part) / max(len(whole), 1)
