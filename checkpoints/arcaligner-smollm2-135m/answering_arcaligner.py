"""From a question and its passages to an answer: selection of passages, answerability and copy-biased decoding.
Pipeline, server, evaluation and engines call it; all of it is beyond the paper."""

import bisect
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import BatchFeature, LogitsProcessor, LogitsProcessorList

from .attention_arcaligner import MASK_KERNELS
from .configuration_arcaligner import is_number
from .encoder_arcaligner import PrecomputedSlots
from .kv_cache_arcaligner import QuestionBatch, in_chunks
from .modeling_arcaligner import PrefillOutputs
from .multihop_arcaligner import best_pair, combined_passages, match_gain
from .pointer_arcaligner import Pointer
from .segmentation_arcaligner import (
    Segment,
    cut_long,
    stop_words,
)
from .tokenization_arcaligner import control_token_ids, text_of, title_of, tokenize_with_ends, with_plain_texts

# A pair of passages is selected from so many, or from more if `scored_share` says so: the most relevant ones.
PAIR_CANDIDATES = 20
PAIR_SIMILARITY_WEIGHT = 10.0  # of the cosine in the score of a passage of a pair
# So many different passages of a question, the most similar ones, are compared with it word by word. Each takes a pass
# of the encoder.
MATCHED_PASSAGES = 5
# Bias on the attention to passages outside the pair of a multi-hop question, if more than two passages are used.
OUTSIDE_PAIR_PRIOR = -1.0
PRIOR_SCALE = 1 / 3  # a bias on the attention to a passage is so much of the difference of two scores
MIN_PRIOR = -10.0  # lowest bias on the attention to a passage
MAX_LOG_ODDS = 6.0  # bound of the log-odds of an answerability: beyond, they say nothing more about the question


class ScoredPassage(NamedTuple):
    """The score of one passage for a question: its answerability by itself, its cosine with the question (0 if there is
    neither a text nor a search), whether it was cached, its late-interaction score ([`maxsim_score`]; 0 if it was not
    computed), and the configuration's weights of the cosine and of that score."""

    answerability: float
    similarity: float
    is_cached: bool
    similarity_weight: float
    match: float = 0.0
    match_weight: float = 0.0

    @property
    def log_odds(self) -> float:
        """The score that ranks passages: the log-odds of the answerability, plus the weighted cosine and the weighted
        late-interaction score."""
        return self.answer_odds + self.similarity_weight * self.similarity + self.match_weight * self.match

    @property
    def pair_odds(self) -> float:
        """The score with which a passage counts in a pair: [`MultihopHead`] has weights that were fitted with it."""
        return self.answer_odds + PAIR_SIMILARITY_WEIGHT * self.similarity

    @property
    def answer_odds(self) -> float:
        """The log-odds of the answerability."""
        answerability = min(max(self.answerability, 1e-9), 1 - 1e-9)
        return math.log(answerability / (1 - answerability))


def select_top(scores: Mapping[int, ScoredPassage], max_passages: int) -> list[int]:
    """Numbers of the top-ranked passages, at most `max_passages`, in the order of the passages.

    >>> select_top({0: ScoredPassage(0.6, 0.8, False, 10), 1: ScoredPassage(0.7, 0.4, False, 10)}, max_passages=1)
    [0]
    """
    return sorted(sorted(scores, key=lambda number: scores[number].log_odds, reverse=True)[:max_passages])


def with_pair(scores: Mapping[int, ScoredPassage], pair: Sequence[int], max_passages: int) -> list[int]:
    """Numbers of a pair of passages and of the top-ranked others, at most `max_passages`, in the order of the
    passages."""
    others = {number: score for number, score in scores.items() if number not in pair}
    return sorted([*pair, *select_top(others, max(0, max_passages - len(pair)))])


def prior_of_scores(scores: Mapping[int, ScoredPassage], numbers: Sequence[int]) -> list[float]:
    """The bias on the attention to each of the used passages `numbers`, if the question needs one of them:
    `PRIOR_SCALE` times the difference of its score and the highest of these scores, but at least `MIN_PRIOR`.

    >>> prior_of_scores({0: ScoredPassage(0.5, 0.75, False, 24), 1: ScoredPassage(0.5, 0.5, False, 24)}, [0, 1])
    [0.0, -2.0]
    """
    log_odds = [scores[number].log_odds for number in numbers]
    # Rounded, because the scores of two copies of a passage differ by rounding.
    return [round(max(PRIOR_SCALE * (odds - max(log_odds)), MIN_PRIOR), 6) for odds in log_odds]


def prior_of_pair(pair: Sequence[int], numbers: Sequence[int]) -> list[float]:
    """The bias on the attention to each of the used passages `numbers`, if the question needs the two in `pair`.

    >>> prior_of_pair([0, 2], [0, 1, 2])
    [0.0, -1.0, 0.0]
    """
    return [0.0 if number in pair else OUTSIDE_PAIR_PRIOR for number in numbers]


def passage_prior(
    scores: Mapping[int, ScoredPassage], pair: Sequence[int], numbers: Sequence[int], num_passages: int
) -> list[float] | None:
    """The bias on the attention to each of `num_passages` passages, by its number, 0 for those that are not in
    `numbers`; `None` without any bias, because the attention then needs no mask of its own. `pair` are the passages
    that a multi-hop question needs: one if all texts are equal, none for other questions."""
    biases = prior_of_pair(pair, numbers) if len(pair) > 1 else prior_of_scores(scores, numbers)
    by_number = dict(zip(numbers, biases, strict=True))
    return [by_number.get(number, 0.0) for number in range(num_passages)] if any(biases) else None


def top_odds(scores: Sequence[Mapping[int, ScoredPassage]]) -> torch.Tensor:
    """The answerability of each question's top-ranked passage, as the [`MultihopHead`] takes it: in log-odds from
    -`MAX_LOG_ODDS` to `MAX_LOG_ODDS`, (questions,), float64 on the CPU."""
    best = [passages[select_top(passages, 1)[0]].answerability for passages in scores]
    return torch.tensor(best, dtype=torch.float64, device="cpu").logit(eps=1e-12).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def candidates_of(unscored: Mapping[int, ScoredPassage], max_passages: int, share: float) -> list[int]:
    """Numbers of the `unscored` passages to score before `max_passages` of them are selected, the most relevant one
    first: a `share` of all passages, but at least one more than are selected.

    >>> cosines = {0: 0.1, 1: 0.7, 2: 0.3, 3: 0.2, 4: 0.5}
    >>> unscored = {number: ScoredPassage(0.98, cosine, False, 10.0) for number, cosine in cosines.items()}
    >>> candidates_of(unscored, max_passages=1, share=0.5)
    [1, 4, 2]
    """
    relevances = {number: (passage.log_odds, passage.similarity) for number, passage in unscored.items()}
    order = sorted(relevances, key=relevances.__getitem__, reverse=True)
    return order[: max(max_passages + 1, math.ceil(share * len(order)))]


def are_sure(scores: Mapping[int, ScoredPassage], max_passages: int, unscored: ScoredPassage) -> bool:
    """Whether the selection is decided: an `unscored` further passage would not be among the `max_passages` top-ranked
    ones, even with the answerability that it is given here.

    >>> scores = {0: ScoredPassage(0.98, 0.7, False, 10.0)}
    >>> are_sure(scores, 1, scores[0]._replace(similarity=0.6))
    True
    """
    ranked = sorted(scores.values(), key=lambda passage: passage.log_odds)[-max_passages:]
    return len(ranked) == max_passages and ranked[0].log_odds >= unscored.log_odds


class Selection(NamedTuple):
    """The selected passages of a question."""

    numbers: Sequence[int]  # in the order of the passages
    # `None` if all passages are selected without scores:
    scores: dict[int, ScoredPassage] | None = None  # of the scored passages, by their numbers
    batch: QuestionBatch | None = None  # the question with the selected passages, for `PassageCache.prepare_batch`
    # The bias on the attention to each passage, by its number; `None` if the selected ones are used equally.
    prior: list[float] | None = None


# A function that returns precomputed slots. It gets the numbers of the passages of each question that need them, and
# returns `None` for a question without numbers.
SlotsOf = Callable[[list[list[int]]], list[PrecomputedSlots | None]]

# For each question its cosines with its passages, by their numbers.
Similarities = Sequence[Sequence[float] | Mapping[int, float]]


class Answerer:
    """
    Answers questions about documents, in the same way for pipeline, server and evaluation.

        documents -> `cut` -> passages -> `select` -> selected passages -> inputs of `generate` -> `answer`

    The caller decides how passages go into the inputs: with the prompt (the processor) or from a cache of passages
    ([`PassageCache`]).

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of one checkpoint.
        cache ([`PassageCache`], *optional*): Caches the passages that are scored. Default: one that caches none.
    """

    def __init__(self, model, processor, cache=None):
        self.model, self.processor = model, processor
        self.cache = model.passage_cache(processor, max_bytes=0) if cache is None else cache

    # Settings

    @property
    def can_score(self) -> bool:
        """Whether passages can be scored one by one: answerability was fitted, and they are independent."""
        return self.model.answerability_head is not None and self.processor.passage_attention == "separate"

    @property
    def max_passages(self) -> int | None:
        """Default number of passages for a question that is not a multi-hop question: one, because the top-ranked
        passage gives far better answers than all of them unless several are needed. `None`, which means all, if
        passages cannot be scored."""
        return 1 if self.can_score else None

    def check(
        self,
        *,
        max_passages: int | None = None,
        min_confidence: float | None = None,
        copy_bonus: float | None = None,
        tokens_per_slot: int | str | None = None,
    ) -> None:
        """Raise `ValueError` for settings of a call that are invalid, or that need another aligner."""
        if tokens_per_slot is not None:
            self.processor.slot_encoder.check_settings(tokens_per_slot=tokens_per_slot)
        if copy_bonus is not None:
            self.processor.check_copy_bonus(copy_bonus)
        if max_passages is not None:
            if not is_number(max_passages, Integral) or max_passages < 1:
                raise ValueError(f"`max_passages` is {max_passages!r}; expected a whole number of at least 1.")
            self.check_can_score(f"`max_passages={max_passages}`", "`max_passages`")
        if min_confidence is not None:
            if not is_number(min_confidence, Real) or not 0.0 <= min_confidence <= 1.0:
                raise ValueError(f"`min_confidence` is {min_confidence!r}; expected a number from 0 to 1.")
            self._check_answerability("`min_confidence`", "`min_confidence`")
            if not isinstance(no_answer := self.processor.no_answer, str):
                raise ValueError(
                    f"`no_answer` of the processor is {no_answer!r}; expected a string, which replaces the answer if "
                    "the answerability is below `min_confidence`. Set `no_answer` in processor_config.json, or leave "
                    "out `min_confidence`."
                )

    def _check_answerability(self, subject: str, argument: str | None = None) -> None:
        if self.model.answerability_head is None:
            leave_out = f", or leave out {argument}" if argument else ""
            raise ValueError(
                f"{subject} needs an answerability head (the classifier that estimates how likely it is that the "
                "passages contain an answer), but this aligner has none (its `answerability_layers` is None). Fit one "
                f"with `python -m arcaligner.train.confidence`{leave_out}."
            )

    def check_can_score(self, subject: str, argument: str | None = None) -> None:
        """Raise `ValueError` if passages cannot be scored. The message begins with `subject`, which needs the scores,
        and may advise to leave out an `argument`."""
        self._check_answerability(subject, argument)
        if self.processor.passage_attention != "separate":
            leave_out = f", or leave out {argument}" if argument else ""
            raise ValueError(
                f"{subject} needs an aligner with `passage_attention` 'separate', but this aligner has "
                f"{self.processor.passage_attention!r}. Use an aligner that was trained with 'separate'{leave_out}."
            )

    # Passages

    def cut(self, documents: list) -> tuple[list, list[Segment]]:
        """Cut long documents into passages. Return the passages, and which part of which document each passage is.
        Nothing is cut if passages cannot be scored."""
        processor = self.processor
        longest = processor.max_passage_tokens if self.can_score else math.inf
        return cut_long(documents, processor.tokenizer, longest, processor.passage_tokens, processor.spacy_model)

    @property
    def can_weight(self) -> bool:
        """Whether the attention to several passages can be weighted: they can be scored, and the attention kernel takes
        a bias for each key."""
        return self.can_score and self.model.config.text_config._attn_implementation in MASK_KERNELS

    def selects(self, num_passages: int, max_passages: int | None = None, weights: bool = True) -> bool:
        """Whether passages are scored: because `num_passages` is more than may be used or, with `weights`, because
        several are used and weighted by their scores."""
        limit = max_passages or self.max_passages
        if limit is None:
            return False
        return num_passages > limit or (weights and self.can_weight and limit > 1 and num_passages > 1)

    def select(
        self,
        questions: list,
        documents: list[list],
        max_passages: int | Sequence[int] | None = None,
        similarities: Similarities | None = None,
        slots_of: SlotsOf | None = None,
        weights: bool = True,
        **kwargs: Any,
    ) -> list[Selection]:
        """Select the passages of each question that are used: the top-ranked ones, at most `max_passages` of them. If
        the [`MultihopHead`] finds a multi-hop question, the pair of passages that it most likely needs comes first.

        Without `max_passages`, the top-ranked passage or the pair is selected. If `max_passages` is two or more, the
        selected passages are weighted: the attention to a passage has the bias of `prior_of_scores` or, with a pair, of
        `prior_of_pair`.

        Args:
            questions, documents, similarities, kwargs: As for `score`.
            max_passages (`int` or `list`, *optional*): For all questions, or for each question its number or `None`.
                Where passages cannot be scored, `None` selects all of them.
            slots_of (`SlotsOf`, *optional*): Returns slots of passages that are cached elsewhere. It gets one list of
                numbers for each question whose passages are scored.
            weights (`bool`, defaults to `True`): Whether several passages are weighted, if the attention kernel takes a
                bias.
        """
        limits = [max_passages] * len(questions) if isinstance(max_passages, int | None) else max_passages
        selections = [Selection(range(len(passages))) for passages in documents]
        counts = zip(map(len, documents), limits, strict=True)
        indices = [index for index, (count, limit) in enumerate(counts) if self.selects(count, limit, weights)]
        if not indices:
            return selections
        limits = [limits[index] for index in indices]
        questions, documents, similarities = (
            values and [values[index] for index in indices] for values in (questions, documents, similarities)
        )
        has_gains = self.model.multihop_head is not None and any(limit != 1 for limit in limits)
        batch, unscored, gains = self._make_batch(questions, documents, similarities, has_gains, **kwargs)
        scoring = _Scoring(self, batch, unscored, slots_of)
        selected = self._select_top(scoring, [limit or self.max_passages for limit in limits])
        is_multihop = [
            limit != 1 and self.is_multihop(question, scores, gain)
            for limit, question, scores, gain in zip(limits, questions, scoring.scores, gains, strict=True)
        ]
        pairs = [[]] * len(indices)
        if any(is_multihop):
            pairs = self._select_pairs(scoring, questions, documents, is_multihop)
        results = zip(indices, scoring.batch.questions, limits, selected, pairs, scoring.scores, strict=True)
        for index, question, limit, numbers, pair, scores in results:
            if pair:
                numbers = pair if limit is None else with_pair(scores, pair, limit)
            prior = None
            if weights and self.can_weight and limit is not None and len(numbers) > 1:
                prior = passage_prior(scores, pair, numbers, len(selections[index].numbers))
            used = batch._replace(questions=[question.only(numbers)])
            selections[index] = Selection(numbers, scores, used, prior)
        return selections

    def _select_top(self, scoring: "_Scoring", limits: Sequence[int]) -> list[list[int]]:
        """The numbers of the top-ranked passages of each question, at most as many as its limit. The most relevant
        passages are scored first, the other candidates only if these do not decide."""
        candidates = [scoring.candidates(index, limit) for index, limit in enumerate(limits)]
        # In at most two steps: each further call of the model would load its weights once more.
        scoring.add([numbers[:limit] for numbers, limit in zip(candidates, limits, strict=True)])
        undecided = []
        for numbers, limit, unscored, scores in zip(candidates, limits, scoring.unscored, scoring.scores, strict=True):
            others = numbers[limit:]
            is_decided = not others or are_sure(scores, limit, unscored[others[0]])
            undecided.append([] if is_decided else others)
        scoring.add(undecided)
        return [select_top(scores, limit) for scores, limit in zip(scoring.scores, limits, strict=True)]

    def _select_pairs(
        self, scoring: "_Scoring", questions: list, documents: list[list], is_multihop: Sequence[bool]
    ) -> list[list[int]]:
        """The numbers of the two passages that each multi-hop question most likely needs, in their order, or
        of one passage if all their texts are equal. Other questions have an empty list."""
        # One less, because `candidates` returns at least one more than the limit.
        limit = PAIR_CANDIDATES - 1
        scoring.add([scoring.candidates(index, limit) if needed else [] for index, needed in enumerate(is_multihop)])
        head, spacy_model = self.model.multihop_head, self.processor.spacy_model
        pairs = [[] for _ in questions]
        for index in (index for index, needed in enumerate(is_multihop) if needed):
            passages, (text,) = documents[index], _search_texts(questions[index], [])
            odds = {number: passage.pair_odds for number, passage in scoring.scores[index].items()}
            numbers = combined_passages(passages, odds)
            matches = self._match_words(text, [passages[number] for number in numbers], scoring.batch.turn)
            matches = dict(zip(numbers, matches, strict=True))
            pairs[index] = best_pair(head, text, passages, odds, matches, spacy_model)
        return pairs

    def is_multihop(self, question: str | list[dict], scores: dict[int, ScoredPassage], gain: float) -> bool:
        """Whether a question, given the scores that select one passage and the [`match_gain`] of its passages, needs
        two passages more likely than not."""
        head = self.model.multihop_head
        if head is None or not scores:
            return False
        gains = torch.tensor([gain], device="cpu")
        features = (*question_features(self.processor.encoder, [question]), top_odds([scores]), gains)
        return bool(head(*(feature.to(head.weight) for feature in features)) > 0)

    def score(
        self,
        questions: list,
        documents: list[list] | None = None,
        similarities: Similarities | None = None,
        **kwargs: Any,
    ) -> list[dict[int, ScoredPassage]]:
        """Score each passage: how likely it is that this passage alone contains the answer to its question.

        The question is prefilled after each of its passages. Keys and values of the passages go into the cache, where
        `prepare` finds them.

        Args:
            questions, documents, kwargs: As for `PassageCache.prepare`, of several questions.
            similarities (`list[list[float]]`, *optional*): For each question, its cosines with the passages, if a
                search has computed them. Default: computed for `documents`.

        Returns:
            For each question its scores by the number of the passage; a passage without text has none.
        """
        batch, unscored, _ = self._make_batch(questions, documents, similarities, **kwargs)
        return self._score(batch, unscored)

    def _make_batch(
        self,
        questions: list,
        documents: list[list] | None,
        similarities: Similarities | None,
        has_gains: bool = False,
        **kwargs: Any,
    ) -> tuple[QuestionBatch, list[dict[int, ScoredPassage]], list[float]]:
        """The result of `PassageCache.make_batch` and, for each question, its passages before they are scored, with the
        highest answerability that is assumed, and their [`match_gain`]. Without `has_gains`, and for passages without
        texts, the gain may be 0."""
        self.check_can_score("Scoring passages")
        batch, config = self.cache.make_batch(questions, documents, **kwargs), self.model.config
        weights, unscored, gains = (config.similarity_weight, config.match_weight), [], []
        for index, (question, prompt) in enumerate(zip(questions, batch.questions, strict=True)):
            texts = prompt.texts if documents is not None else {}
            if similarities is not None:
                cosines = {number: similarities[index][number] for number in prompt.passage_numbers}
            else:
                cosines = dict.fromkeys(prompt.passage_numbers, 0.0)
                found = similarities_of(self.processor.encoder, question, [*texts.values()])
                cosines |= dict(zip(texts, found, strict=True))
            matches, gain = dict.fromkeys(cosines, 0.0), 0.0
            if texts and (config.match_weight or has_gains):
                nearest = {number: texts[number] for number in sorted(texts, key=cosines.__getitem__, reverse=True)}
                found, gain = self._match(question, nearest, batch.turn)
                matches = dict.fromkeys(cosines, min(found.values())) | found
            gains.append(gain)
            unscored.append(
                {
                    number: ScoredPassage(
                        config.most_answerability, cosine, False, weights[0], matches[number], weights[1]
                    )
                    for number, cosine in cosines.items()
                }
            )
        return batch, unscored, gains

    def _match(
        self, question: str | list[dict], passages: Mapping[int, str | dict], turn: Any
    ) -> tuple[dict[int, float], float]:
        """The late-interaction scores of passages, by their numbers, the most similar one first, and their
        [`match_gain`]. Of the different texts, only the first `MATCHED_PASSAGES` are compared. Others, and those
        without words, are assumed to match no better than the worst of these."""
        copies: dict[str, list[int]] = {}  # numbers of the passages with the same text
        texts = _search_texts(question, [*passages.values()])[1:]
        for number, text in zip(passages, texts, strict=True):
            copies.setdefault(" ".join(text.split()), []).append(number)
        compared = [passages[numbers[0]] for numbers in copies.values()][:MATCHED_PASSAGES]
        matches = self._match_words(question, compared, turn)
        found = matches.mean(dim=1).tolist()
        lowest = min((score for score in found if not math.isnan(score)), default=0.0)
        scores = [lowest if math.isnan(score) else score for score in found]
        scores += [lowest] * (len(copies) - len(scores))
        of_copies = zip(copies.values(), scores, strict=True)
        return {number: score for numbers, score in of_copies for number in numbers}, match_gain(matches)

    def _match_words(self, question: str | list[dict], passages: Sequence[str | dict], turn: Any) -> torch.Tensor:
        """[`word_matches`], and other threads get their turn in between."""
        parts = in_chunks(len(passages), self.processor.passage_tokens, turn)
        return torch.cat([word_matches(self.processor, question, passages[part]) for part in parts])

    @torch.no_grad()
    def _score(
        self,
        batch: QuestionBatch,
        unscored: list[dict[int, ScoredPassage]],
        only: Sequence[Sequence[int]] | None = None,
    ) -> list[dict[int, ScoredPassage]]:
        """As `score`, for the result of `_make_batch`; `only` has the numbers of each question's passages to score."""
        scores: list[dict[int, ScoredPassage]] = [{} for _ in batch.questions]
        for rows, inputs in self.cache.iter_batch(batch, only):
            logits = self.cache.prefill_suffix(inputs, True, batch.turn).answerability_logits
            for (index, number, is_cached), answerability in zip(rows, torch.sigmoid(logits).tolist(), strict=True):
                passage = unscored[index][number]
                scores[index][number] = passage._replace(answerability=answerability, is_cached=is_cached)
        return [dict(sorted(passages.items())) for passages in scores]

    # Answers

    def answer(self, questions: Sequence, passages: Sequence[list], **settings: Any) -> "AnsweringCall":
        """Begin one call of `generate`; arguments as for [`AnsweringCall`]."""
        return AnsweringCall(self.model, self.processor, questions, passages, **settings)


class _Scoring:
    """The questions of one call of `select`, and the scores of their passages so far."""

    def __init__(
        self,
        answerer: Answerer,
        batch: QuestionBatch,
        unscored: list[dict[int, ScoredPassage]],
        slots_of: SlotsOf | None,
    ):
        self.answerer, self.batch, self.unscored, self.slots_of = answerer, batch, unscored, slots_of
        self.scores: list[dict[int, ScoredPassage]] = [{} for _ in batch.questions]

    def candidates(self, index: int, limit: int) -> list[int]:
        """The numbers of a question's passages to score before `limit` of them are selected, the most relevant one
        first."""
        return candidates_of(self.unscored[index], limit, self.answerer.model.config.scored_share)

    def add(self, numbers: Sequence[Sequence[int]]) -> None:
        """Score these passages of each question, except those that have a score."""
        missing = [
            [number for number in wanted if number not in scores]
            for wanted, scores in zip(numbers, self.scores, strict=True)
        ]
        if not any(missing):
            return
        if self.slots_of is not None:
            self.batch = self.batch.with_slots(self.slots_of(missing))
        new_scores = self.answerer._score(self.batch, self.unscored, missing)
        self.scores = [dict(sorted((old | new).items())) for old, new in zip(self.scores, new_scores, strict=True)]


def chat_inputs(processor, chats: Sequence[list[dict] | str], **slots: Any) -> BatchFeature:
    """Left-padded prompts of chats or, without a chat template, of texts: `input_ids` and `attention_mask` (batch,
    seq_len) and, with documents among `slots`, the inputs of the slots."""
    padding = {"padding": True, "padding_side": "left"}
    if processor.chat_template is None:
        return processor(chats, return_tensors="pt", **padding, **slots)
    return processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=padding,
        **slots,
    )


# Options with which `generate` computes more than the prompt before its first scores. Then the answerability cannot be
# reported.
EXTRA_PREFILL_OPTIONS = ("guidance_scale", "prompt_lookup_num_tokens", "assistant_model")


class AnsweringCall:
    """
    One call of `generate`: its options, and the estimates that it reports.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of one checkpoint. With `scores` and
            `traces` false, `model` may be any causal language model.
        questions (`Sequence`), passages (`Sequence[list]`): For each row of the batch the question, a text or a chat,
            and the used passages, an empty list if their texts are not known.
        copied (`Sequence[list]`, *optional*): For each row, the passages that its answer may copy. Default: `passages`.
        copy_bonus (`float` or `list`, *optional*): As for [`PassageCopyLogitsProcessor`].
        scores (`bool`, defaults to `True`): Whether the answerability is reported, if the head was fitted and no option
            prevents it (`EXTRA_PREFILL_OPTIONS`).
        traces (`bool`, defaults to `False`): Whether `recursion_depth` is reported.
        min_confidence (`float`, *optional*): The lowest answerability that the caller accepts. With it, an option that
            prevents the report is an error.
        tokens_per_slot (`int` or `"segment"`, *optional*): Of the slots of the copied passages. With it, pointer heads
            find the slots that an answer begins in, if the aligner has such heads.

    Attribute: `likelihood`, the [`LikelihoodRecorder`] of a greedy call, if the answer likelihood was fitted.

    Use [`~AnsweringCall.generate`] or, where another function calls `generate`, give that function
    [`~AnsweringCall.options`].
    """

    def __init__(
        self,
        model,
        processor,
        questions: Sequence,
        passages: Sequence[list],
        *,
        copied: Sequence[list] | None = None,
        copy_bonus: float | list | None = None,
        scores: bool = True,
        traces: bool = False,
        min_confidence: float | None = None,
        tokens_per_slot: int | str | None = None,
    ):
        self.model, self.processor, self.questions, self.passages = model, processor, questions, passages
        self._copied, self._copy_bonus = passages if copied is None else copied, copy_bonus
        self._scores, self._traces = scores and model.answerability_head is not None, traces
        self._min_confidence, self._tokens_per_slot = min_confidence, tokens_per_slot
        self._prefill: PrefillOutputs | None = None
        self._answerability: torch.Tensor | None = None
        self.likelihood: LikelihoodRecorder | None = None

    def options(self, options: dict[str, Any], last: Sequence[LogitsProcessor] = ()) -> dict[str, Any]:
        """The `options` of `generate` with this call's logits processors: after those in `options`, and before `last`,
        such as one that samples tokens.

        Raises:
            `ValueError`: options with which the answerability cannot be reported, if there is a `min_confidence`.
        """
        config, default = options.get("generation_config"), self.model.generation_config
        extra = [name for name in EXTRA_PREFILL_OPTIONS if options.get(name) or getattr(config or default, name, None)]
        if extra:
            if self._min_confidence is not None:
                names = " and ".join(f"`{name}`" for name in extra)
                raise ValueError(
                    f"`min_confidence` is {self._min_confidence}, but answerability cannot be computed in a call with "
                    f"{names}. Leave out `min_confidence`, or set {names} to None."
                )
            self._scores = False
        points = any(self._copied) and self._tokens_per_slot is not None and self.model.config.has_pointer
        self._prefill = PrefillOutputs() if self._scores or self._traces or points else None
        end_ids = default.eos_token_id if config is None or config.eos_token_id is None else config.eos_token_id
        processors, copies = list(options.get("logits_processor") or []), None
        ends = options.get("eos_token_id", end_ids)
        if any(self._copied):
            pointer = None
            if points:
                weight = self.model.config.pointer_weight
                pointer = Pointer(self.processor, self._copied, self._tokens_per_slot, weight, self._prefill)
            copies = PassageCopyLogitsProcessor(self.processor, self._copied, self._copy_bonus, ends, pointer)
        # The recorder wraps the copy processor, because it needs the scores without the bonus.
        if self._scores and self.model.config.answer_calibration is not None and _is_greedy(options, config or default):
            copies = self.likelihood = LikelihoodRecorder(copies, ends)
        processors += [] if copies is None else [copies]
        added = {"logits_processor": LogitsProcessorList([*processors, *last])} if processors or last else {}
        return options | added | ({} if self._prefill is None else {"prefill": self._prefill})

    def generate(
        self, inputs: dict[str, Any], last: Sequence[LogitsProcessor] = (), **options: Any
    ) -> torch.LongTensor:
        """`model.generate` for `inputs`: ids (batch, seq_len + new tokens)."""
        return self.model.generate(**inputs, **self.options(options, last))

    @property
    def answerability(self) -> torch.Tensor | None:
        """Answerability of each row, (batch,): how likely it is that its passages contain the answer, not that the
        answer is right. All beams and samples of a row share it. `None` before the prompt is computed, or if the head
        was not fitted."""
        logits = self._prefill.answerability_logits if self._scores and self._prefill is not None else None
        if self._answerability is None and logits is not None:
            self._answerability = self.answerability_of(self._first_of_copies(logits))
        return self._answerability

    def answerability_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Answerability of each row, (batch,), from the head's logits (batch,), such as those of
        [`PassageCache.prefill_suffix`], for an answer that another engine generates."""
        logits = logits.float()
        if self.model.config.answerability_uses_match:
            rows = zip(self.questions, self.passages, strict=True)
            matches = [maxsim_score(self.processor, question, passages) for question, passages in rows]
            logits = self.model.answerability_head.with_match(logits, matches)
        return torch.sigmoid(logits).cpu()

    @property
    def answer_likelihood(self) -> torch.Tensor | None:
        """How likely it is that the answer of each row is right, (batch,), from the likelihood of its tokens so far and
        the answerability. `None` if it was not fitted, for sampled answers and for beam search."""
        if self.likelihood is None or self.likelihood.counts is None or (answerability := self.answerability) is None:
            return None
        scale, weight, offset = self.model.config.answer_calibration
        odds = torch.logit(answerability, eps=1e-6)
        return torch.sigmoid(scale * self.likelihood.mean.cpu() + weight * odds + offset)

    @property
    def recursion_depth(self) -> torch.LongTensor | None:
        """Refinement steps (batch, num_layers, max_slots) of the slots that were computed with the prompt."""
        depth = self._prefill.recursion_depth if self._traces and self._prefill is not None else None
        return None if depth is None else self._first_of_copies(depth)

    def _first_of_copies(self, repeated: torch.Tensor) -> torch.Tensor:
        """The first of the beams or samples of each row."""
        # `generate` repeats rows before the prefill; copies of a row have equal outputs.
        return repeated[:: len(repeated) // len(self.passages)]


def _is_greedy(options: dict[str, Any], config) -> bool:
    """Whether `generate` with these options, or its configuration, decodes greedily."""
    do_sample, num_beams = (options.get(name, getattr(config, name, None)) for name in ("do_sample", "num_beams"))
    return not do_sample and num_beams in (None, 1)


MAX_NEW_TOKENS = 24  # of `greedy_answers`, for questions that have short answers


@torch.inference_mode()
def greedy_answers(
    model,
    processor,
    inputs: dict[str, Any],
    questions: Sequence = (),
    passages: Sequence[list] = (),
    copy_bonus: float | None = None,
    tokens_per_slot: int | str | None = None,
    **options: Any,
) -> tuple[list[str], list[float | None]]:
    """Greedy answers to left-padded prompts, and the answerability of each prompt: `None` without slots, or if the head
    was not fitted. `model` may be any causal language model; `options` are those of `generate`. With the
    `tokens_per_slot` of the slots, pointer heads are used, if the aligner has some."""
    has_slots = "context_embeds" in inputs
    settings = {"copy_bonus": copy_bonus, "scores": has_slots, "tokens_per_slot": tokens_per_slot}
    call = AnsweringCall(model, processor, questions, passages, **settings)
    ids = call.generate(inputs, **{"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, **options})
    texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answerability = [None] * len(texts) if call.answerability is None else call.answerability.tolist()
    return [text.strip() for text in texts], answerability


# Caches: embeddings and words of texts, by encoder, and texts to copy, by tokenizer. `of_texts` limits them.
_VECTORS, _WORDS, _COPIED = WeakKeyDictionary(), WeakKeyDictionary(), WeakKeyDictionary()


def clear_text_caches() -> None:
    """Drop cached embeddings and tokens of texts, of all encoders and tokenizers. They are computed again when they
    are needed."""
    for cache in (_VECTORS, _WORDS, _COPIED):
        cache.clear()


def search_text(title: str | None, text: str) -> str:
    """The text of a passage that the search encoder gets."""
    return f"{title or ''} {text}".strip()


def _search_texts(question: str | list[dict], documents: Sequence[str | dict]) -> list[str]:
    """The question (of a chat, the last one) and the texts of the passages."""
    if not isinstance(question, str):
        messages = [message for message in with_plain_texts(question) if message["role"] == "user"]
        question = (messages[-1]["content"] or "") if messages else ""
    texts = [search_text(title_of(passage), text_of(passage, number)) for number, passage in enumerate(documents)]
    return [question, *texts]


def similarities_of(encoder, question: str | list[dict], documents: Sequence[str | dict]) -> list[float]:
    """Cosine of a question (of a chat, the last one) with each passage."""
    texts = _search_texts(question, documents)
    query, *vectors = of_texts(_VECTORS, encoder.untrained, texts, encoder.untrained.encode)
    return [float(query @ vector) for vector in vectors]


def question_features(encoder, questions: Sequence[str | list[dict]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the [`MultihopHead`] for questions (of chats, the last ones): their embeddings from the search encoder
    (batch, d_r) and their numbers of words (batch,)."""
    texts = [text for question in questions for text in _search_texts(question, [])]
    vectors = of_texts(_VECTORS, encoder.untrained, texts, encoder.untrained.encode)
    return torch.stack([*vectors]), torch.tensor([float(len(text.split())) for text in texts])


def word_matches(processor, question: str | list[dict], documents: Sequence[str | dict]) -> torch.Tensor:
    """Late interaction: for each passage, the highest cosine of each word of a question (of a chat, the last one) with
    a word of the passage, (num_passages, num_words), on the CPU. Stop words of the question are left out, unless there
    are no others. NaN for a passage without words."""
    query, *texts = _search_texts(question, documents)
    encoder = processor.encoder.untrained
    spans = [
        encoder.split(text) if text_of(passage, 0).strip() else []
        for text, passage in zip(texts, documents, strict=True)
    ]
    parts = [part for of_passage in spans for part in of_passage]
    (words, states), *others = of_texts(_WORDS, encoder, [query, *parts], encoder.encode_words, max_cached=256)
    words, common = [word.strip().lower() for word in words], stop_words(processor.spacy_model)
    counted = [index for index, word in enumerate(words) if any(map(str.isalnum, word)) and word not in common]
    states, remaining = (states[counted] if counted else states).float(), iter(others)
    matches = states.new_full((len(documents), len(states)), math.nan)
    for row, of_passage in zip(matches, spans, strict=True):
        found = [states @ next(remaining)[1].float().T for _ in of_passage]  # each (num_words, words of the part)
        if sum(cosines.shape[1] for cosines in found):
            row.copy_(torch.cat(found, dim=1).amax(dim=1))
    return matches


def maxsim_score(processor, question: str | list[dict], documents: Sequence[str | dict]) -> float:
    """Late-interaction (MaxSim) score of passages for a question (of a chat, the last one): the mean over the
    question's words of their highest cosine with a word of the passages, by [`word_matches`]. NaN if the question or
    the passages have no words."""
    matches = word_matches(processor, question, documents)
    matches = matches[~matches.isnan().any(dim=1)]
    return float(matches.amax(dim=0).mean()) if matches.numel() else math.nan


def of_texts(
    cache: WeakKeyDictionary,
    owner: Any,
    texts: Sequence[str],
    compute: Callable[[list[str]], Any],
    max_cached: int = 2048,
) -> list:
    """Map `compute` over texts; cache the last `max_cached` results per `owner`, of texts up to 10,000 characters."""
    results = cache.get(owner, {})
    if missing := [text for text in dict.fromkeys(texts) if text not in results]:
        new = dict(zip(missing, compute(missing), strict=True))
        short = {text: result for text, result in new.items() if len(text) <= 10_000}
        # A new dict: other threads may read the old one.
        cache[owner] = dict([*(results | short).items()][-max_cached:])
        results = results | new
    return [results[text] for text in texts]


class PassageCopyLogitsProcessor(LogitsProcessor):
    """Bias decoding towards the words of the passages, in one call of `generate`.

    Beyond the paper: slots preserve meaning better than spelling, and the text of the passages is available when a
    question is asked. As long as the answer is a span of this text that begins at a word, `bonus` is added to the
    scores of tokens that continue the span and, where a word ends, of those that end the answer. The input of the model
    does not change. With a `pointer`, words of slots that get less attention have a smaller bonus at the beginning of
    the answer.

    Args:
        processor ([`ArcAlignerProcessor`]): Of the aligner.
        documents (`list[list]`): For each row of the batch, its passages; a copy is a span of one of them.
        bonus (`float` or `list`): In log-odds, for all rows or for each; `None` is the processor's `copy_bonus`.
        end_ids (`int` or `list[int]`, *optional*): Tokens that end an answer.
        pointer ([`Pointer`], *optional*): Of the same rows.
    """

    def __init__(
        self,
        processor,
        documents: list[list],
        bonus: float | list | None,
        end_ids: int | list | None,
        pointer: Pointer | None = None,
    ):
        bonuses = bonus if isinstance(bonus, list) else [bonus] * len(documents)
        self.bonus = [processor.copy_bonus if bonus is None else bonus for bonus in bonuses]
        copied = (passages if bonus else [] for passages, bonus in zip(documents, self.bonus, strict=True))
        copied = list(copied)
        self.texts = [copied_texts(processor.tokenizer, passages, processor.no_answer) for passages in copied]
        self.documents, self.pointer = [numbers_of_texts(passages) for passages in copied], pointer
        self.end_ids = set() if end_ids is None else set(torch.as_tensor(end_ids, device="cpu").reshape(-1).tolist())
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        if not any(self.texts):
            return scores
        scores, repeats = scores.clone(), len(input_ids) // len(self.texts)  # (batch * beams or samples, vocab_size)
        for row, answer_ids in enumerate(input_ids[:, self.prompt_length :].tolist()):
            ids = copied_next(self.texts[row // repeats], answer_ids, self.end_ids)
            scores[row, ids] += self.bonus[row // repeats]
            if self.pointer is not None and not answer_ids:
                # The last texts are of no document.
                numbered = zip_longest(self.documents[row // repeats], self.texts[row // repeats])
                starts = [(number, text.starts) for number, text in numbered]
                log_shares = self.pointer.log_shares(row, repeats, starts)
                scores[row, ids] += scores.new_tensor([log_shares.get(first, 0.0) for first in ids])
        return scores.log_softmax(dim=-1)  # else each token of a copy would add its bonus to the sum of a beam


class LikelihoodRecorder(LogitsProcessor):
    """Record the log-likelihood of the selected tokens, in one greedy call of `generate`.

    Args:
        inner (`LogitsProcessor`, *optional*): The processor that biases the choice of tokens. Its bonus is not counted,
            because it says nothing about the answer.
        end_ids (`int` or `list[int]`, *optional*): Tokens that end an answer; the first one is counted.
    """

    def __init__(self, inner: LogitsProcessor | None, end_ids: int | list | None):
        self.inner = inner
        self.end_ids = None if end_ids is None else torch.as_tensor(end_ids, device="cpu").reshape(-1)
        self.sums = self.counts = self.is_done = None  # each (batch,)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        unbiased = scores.float()  # (batch, vocab_size)
        scores = scores if self.inner is None else self.inner(input_ids, scores)
        tokens = scores.argmax(dim=1)  # (batch,)
        likelihood = unbiased.gather(1, tokens[:, None])[:, 0] - unbiased.logsumexp(dim=1)  # (batch,)
        if self.counts is None:
            self.sums, self.counts = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
            self.is_done = torch.zeros_like(tokens, dtype=torch.bool)
        self.sums = self.sums + likelihood.masked_fill(self.is_done, 0.0)
        self.counts = self.counts + ~self.is_done
        if self.end_ids is not None:
            self.is_done = self.is_done | torch.isin(tokens, self.end_ids.to(tokens.device))
        return scores

    @property
    def mean(self) -> torch.FloatTensor:
        """The mean log-likelihood of each answer's tokens, (batch,)."""
        return self.sums / self.counts


_WORD_START = re.compile(r"(?<![^\W_])[^\W_]|(?<!\S)\S")

_WORD = re.compile(r"\S{1,40}")  # the first characters of a word, which are compared

# Answers that get the bonus without being in the text: else a "no" in the text would win where the answer is "yes".
YES_NO = ("yes", "no", "Yes", "No")


class CopiedText(NamedTuple):
    """The tokens of a text, and for each of its words how an answer that begins there is tokenized."""

    ids: list[int]
    ends_word: list[bool]  # whether a word ends with the token
    # The words, by their first id. For each word its ids without a space before it, as at the beginning of an answer;
    # for each of these ids whether a word ends with it; and the place in `ids` of the token after the word.
    words: dict[int, list[tuple[list[int], list[bool], int]]]
    starts: dict[int, list[int]]  # the characters where these words begin, by the same ids

    def follow(self, answer_ids: list[int]) -> tuple[set[int], bool]:
        """Ids that follow `answer_ids` wherever it occurs in the text, and whether a word ends there."""
        following, is_end, length = set(), False, len(answer_ids)
        for first, first_ends, after in self.words.get(answer_ids[0], ()):
            index = after + max(0, length - len(first))
            if first[:length] + self.ids[after:index] == answer_ids:
                following.update(first[length : length + 1] or self.ids[index : index + 1])
                is_end |= self.ends_word[index - 1] if index > after else first_ends[length - 1]
        return following, is_end


def copied_texts(tokenizer, documents: Sequence[str | dict], no_answer: str | None = None) -> list[CopiedText]:
    """The texts that an answer may copy from documents, titles included; `YES_NO` and `no_answer` are copied whole."""
    texts = [text for _, text in _numbered_texts(documents)]
    copied = of_texts(_COPIED, tokenizer, texts, lambda missing: [_copied(tokenizer, text) for text in missing])
    others = [text for text in (*YES_NO, no_answer) if text] if texts else []
    other_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in others]
    words = [{ids[0]: [(ids, [*[False] * (len(ids) - 1), True], 0)]} for ids in other_ids]
    return copied + [CopiedText([], [], word, {first: [0] for first in word}) for word in words]


def numbers_of_texts(documents: Sequence[str | dict]) -> list[int | None]:
    """For each of [`copied_texts`], the number of its document; `None` for titles and for texts without a document."""
    return [number for number, _ in _numbered_texts(documents)]


def _numbered_texts(documents: Sequence[str | dict]) -> list[tuple[int | None, str]]:
    """The texts of documents with their numbers, and their titles with `None`."""
    texts: list[tuple[int | None, str]] = []
    for number, document in enumerate(documents):
        text, title = text_of(document, number), title_of(document)
        if text.strip():
            texts += [(number, text), (None, title)] if title else [(number, text)]
    return texts


def _copied(tokenizer, text: str) -> CopiedText:
    """Prepare a text for copying. A copy never begins at a word with a control token."""

    def ends_word(ends: Sequence[int]) -> list[bool]:
        pairs = zip(ends, [*ends[1:], len(text) + 1], strict=True)  # equal where a character has several tokens
        return [end < after and not (text[end - 1].isalnum() and text[end : end + 1].isalnum()) for end, after in pairs]

    ((ids, ends),) = tokenize_with_ends(tokenizer, [text])
    copied = CopiedText(ids, ends_word(ends), {}, {})
    starts = [match.start() for match in _WORD_START.finditer(text)]
    words = [_WORD.match(text, start)[0] for start in starts] or [""]  # no tokenizer takes an empty batch
    tokenized = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
    special = control_token_ids(tokenizer)
    rows = zip(starts, words, tokenized["input_ids"], tokenized["offset_mapping"], strict=False)  # starts may be empty
    for start, word, word_ids, offsets in rows:
        if word_ids and not special.intersection(word_ids):
            after = bisect.bisect_right(ends, start + len(word))
            is_start = after and ends[after - 1] == start + len(word)  # else a token crosses the end of the word
            word_ends = ends_word([start + end for _, end in offsets])
            copied.words.setdefault(word_ids[0], []).append((word_ids, word_ends, after if is_start else len(ids)))
            copied.starts.setdefault(word_ids[0], []).append(start)
    return copied


def copied_next(texts: Sequence[CopiedText], answer_ids: list[int], end_ids: Set[int]) -> list[int]:
    """Ids that may follow an answer that was copied from `texts`: those that continue the copy and, at the end of a
    word, those that end the answer."""
    if not answer_ids:
        return sorted({first for text in texts for first in text.words})
    follows = [text.follow(answer_ids) for text in texts]
    return sorted(set().union(*(ids for ids, _ in follows), end_ids if any(is_end for _, is_end in follows) else ()))
