"""From a question and its passages to an answer: selection of passages, answerability and copy-biased decoding.
Pipeline, server, evaluation and engines call it; all of it is beyond the paper."""

import bisect
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import BatchFeature, LogitsProcessor, LogitsProcessorList

from .configuration_arcaligner import is_number
from .encoder_arcaligner import GivenSlots
from .kv_cache_arcaligner import AskedQuestions
from .modeling_arcaligner import PrefillOutputs
from .multihop_arcaligner import best_pair
from .segmentation_arcaligner import (
    Segment,
    cut_long,
    stop_words,
)
from .tokenization_arcaligner import control_token_ids, text_of, title_of, tokenize_with_ends, with_plain_texts

# A pair is selected from all passages or, of more than so many, from the more similar ones.
PAIR_CANDIDATES = 20


class ScoredPassage(NamedTuple):
    """The score of one passage for a question: its answerability by itself, its cosine with the question (0 if there is
    neither a text nor a search), whether it was cached, and the configuration's `similarity_weight`."""

    answerability: float
    similarity: float
    is_cached: bool
    similarity_weight: float

    @property
    def log_odds(self) -> float:
        """The score that ranks passages: answerability plus weighted cosine."""
        sure = min(max(self.answerability, 1e-9), 1 - 1e-9)
        return math.log(sure / (1 - sure)) + self.similarity_weight * self.similarity


def select_top(scores: Mapping[int, ScoredPassage], most: int) -> list[int]:
    """Numbers of the top-ranked passages, at most `most`, in the order of the passages.

    >>> select_top({0: ScoredPassage(0.6, 0.8, False, 10), 1: ScoredPassage(0.7, 0.4, False, 10)}, most=1)
    [0]
    """
    return sorted(sorted(scores, key=lambda number: scores[number].log_odds, reverse=True)[:most])


def candidates_of(similarities: Mapping[int, float], most: int, share: float) -> list[int]:
    """Numbers of the passages to score before `most` of them are selected, the most similar one first: a `share` of all
    passages, but at least one more than are selected.

    >>> candidates_of({0: 0.1, 1: 0.7, 2: 0.3, 3: 0.2, 4: 0.5}, most=1, share=0.5)
    [1, 4, 2]
    """
    order = sorted(similarities, key=similarities.__getitem__, reverse=True)
    return order[: max(most + 1, math.ceil(share * len(order)))]


def are_sure(scores: Mapping[int, ScoredPassage], most: int, similarity: float, answerability: float) -> bool:
    """Whether the selection is decided: a passage with this cosine would not be among the `most` top-ranked ones, even
    with this answerability.

    >>> are_sure({0: ScoredPassage(0.98, 0.7, False, 10.0)}, 1, similarity=0.6, answerability=0.98)
    True
    """
    ranked = sorted(scores.values(), key=lambda each: each.log_odds)[-most:]
    if len(ranked) < most:
        return False
    return ranked[0].log_odds >= ranked[0]._replace(answerability=answerability, similarity=similarity).log_odds


class Selection(NamedTuple):
    """The selected passages of a question."""

    numbers: Sequence[int]  # in the order of the passages
    # If there were more than asked for: scores by the number of the passage, of those that were scored, and the
    # question with the selected passages, for `PassageCache.prepare_asked`.
    scores: dict[int, ScoredPassage] | None = None
    asked: AskedQuestions | None = None


# The slots of some passages of each question, by the numbers of these; `None` for a question without numbers.
SlotsOf = Callable[[list[list[int]]], list[GivenSlots | None]]

# For each question its cosines with its passages, by their numbers.
Similarities = Sequence[Sequence[float] | Mapping[int, float]]


class Answerer:
    """
    Answers questions about documents, in the same way for pipeline, server and evaluation.

        documents -> `cut` -> passages -> `select` -> selected passages -> inputs of `generate` -> `answer`

    Pipeline, server, evaluation and benchmarks call it. Where passages go into the inputs is up to the caller: with
    the prompt (the processor) or from a cache of passages ([`PassageCache`]).

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
        """Default number of passages for a question that is no multi-hop question: one, because the top-ranked passage
        gives far better answers than all of them unless several are needed. `None`, which means all, if passages cannot
        be scored."""
        return 1 if self.can_score else None

    def check(
        self,
        *,
        max_passages: int | None = None,
        min_confidence: float | None = None,
        copy_bonus: float | None = None,
        tokens_per_slot: int | str | None = None,
    ) -> None:
        """Raises `ValueError` for settings of a call that are invalid, or that this aligner cannot follow."""
        if tokens_per_slot is not None:
            self.processor.slot_encoder.check_settings(tokens_per_slot=tokens_per_slot)
        if copy_bonus is not None:
            self.processor.check_copy_bonus(copy_bonus)
        if max_passages is not None:
            if not is_number(max_passages, Integral) or max_passages < 1:
                raise ValueError(f"`max_passages` is {max_passages!r}; expected a whole number of at least 1.")
            self._check_can_score(f"`max_passages={max_passages}`", "Leave `max_passages` out, or use")
        if min_confidence is not None:
            if not is_number(min_confidence, Real) or not 0.0 <= min_confidence <= 1.0:
                raise ValueError(f"`min_confidence` is {min_confidence!r}; expected a number from 0 to 1.")
            self._check_answerability("`min_confidence`")
            if not isinstance(own := self.processor.no_answer, str):
                raise ValueError(
                    f"The processor's `no_answer` is {own!r}; expected the text to return instead of an answer. Set it "
                    "in processor_config.json."
                )

    def _check_answerability(self, what: str) -> None:
        if self.model.answerability_head is None:
            raise ValueError(
                f"{what} needs an aligner whose answerability was fitted, but this one's `answerability_layers` is "
                "None. Fit it with `python -m arcaligner.train.confidence`, or leave the argument out."
            )

    def _check_can_score(self, what: str, advice: str = "Use") -> None:
        self._check_answerability(what)
        if self.processor.passage_attention != "separate":
            raise ValueError(
                f"{what} needs independent passages, but this aligner was trained with joint ones and cannot select "
                f'among them. {advice} an aligner with `passage_attention` "separate".'
            )

    # Passages

    def cut(self, documents: list) -> tuple[list, list[Segment]]:
        """Cut long documents into passages. Return the passages, and which part of which document each is. Nothing is
        cut if passages cannot be scored."""
        processor = self.processor
        longest = processor.max_passage_tokens if self.can_score else math.inf
        return cut_long(documents, processor.tokenizer, longest, processor.passage_tokens, processor.spacy_model)

    def selects(self, num_passages: int, max_passages: int | None = None) -> bool:
        """Whether so many passages are scored, because not all of them may be used."""
        most = max_passages or self.max_passages
        return most is not None and num_passages > most

    def select(
        self,
        questions: list,
        documents: list[list],
        max_passages: int | Sequence[int] | None = None,
        similarities: Similarities | None = None,
        slots_of: SlotsOf | None = None,
        **kwargs: Any,
    ) -> list[Selection]:
        """Select at most `max_passages` passages for each question, those with the highest scores. The most similar
        ones are scored first, the others only if that does not decide. The default is one passage. If the
        [`MultihopHead`] finds a multi-hop question, it is the pair that the question most likely needs, of up to
        `PAIR_CANDIDATES` passages, or of the more similar half.

        Args:
            questions, documents, similarities, kwargs: As for `score`.
            max_passages (`int` or `list`, *optional*): Of all questions, or of each; `None` is the default, which is
                all passages if they cannot be scored.
            slots_of (`SlotsOf`, *optional*): Returns the slots of some passages of each question, if they are cached
                elsewhere.
        """
        wanted = [max_passages] * len(questions) if isinstance(max_passages, int | None) else max_passages
        chosen = [place for place, own in enumerate(documents) if self.selects(len(own), wanted[place])]
        selected = [Selection(range(len(own))) for own in documents]
        if chosen:
            wanted = [wanted[place] for place in chosen]
            some = [each and [each[place] for place in chosen] for each in (questions, documents, similarities)]
            asked, similarities = self._ask(*some, **kwargs)
            most = [each or self.max_passages for each in wanted]
            asked, scores = self._score_candidates(asked, similarities, most, slots_of)
            is_multihop = [
                each is None and self.is_multihop(question, own)
                for each, question, own in zip(wanted, some[0], scores, strict=True)
            ]
            if any(is_multihop):
                # As many as are scored to select one less.
                numbers = self._candidates(asked, similarities, [PAIR_CANDIDATES - 1] * len(most))
                candidates = [own if found else [] for own, found in zip(numbers, is_multihop, strict=True)]
                asked, scores = self._score_missing(asked, similarities, candidates, scores, slots_of)
            for place, question, own, is_pair, each in zip(
                chosen, asked.questions, scores, is_multihop, most, strict=True
            ):
                numbers = self._pair(questions[place], documents[place], own) if is_pair else select_top(own, each)
                selected[place] = Selection(numbers, own, asked._replace(questions=[question.only(numbers)]))
        return selected

    def is_multihop(self, question: str | list[dict], scores: dict[int, ScoredPassage]) -> bool:
        """Whether a question, given the scores that select one passage, needs two of them more likely than not."""
        head = self.model.multihop_head
        if head is None or not scores:
            return False
        best = max(scores.values(), key=lambda each: each.log_odds)
        sure = torch.tensor([best.answerability], dtype=torch.float64, device="cpu").logit(eps=1e-12)
        vectors, num_words = (each.to(head.weight) for each in question_features(self.processor.encoder, [question]))
        return bool(head(vectors, num_words, sure.to(head.weight)) > 0)

    def _pair(
        self, question: str | list[dict], documents: list[str | dict], scores: dict[int, ScoredPassage]
    ) -> list[int]:
        """The numbers of the two passages that a multi-hop question needs most likely."""
        (text,), spacy_model = _searched(question, []), self.processor.spacy_model
        log_odds = {number: each.log_odds for number, each in scores.items()}
        return best_pair(self.model.multihop_head, text, documents, log_odds, spacy_model)

    def _candidates(self, asked: AskedQuestions, similarities: Similarities, most: Sequence[int]) -> list[list[int]]:
        """The numbers of each question's passages that are scored to select `most` of them, the most similar first."""
        share = self.model.config.scored_share
        return [
            candidates_of({number: own[number] for number in question.passage_numbers}, each, share)
            for own, question, each in zip(similarities, asked.questions, most, strict=True)
        ]

    def _score_candidates(
        self, asked: AskedQuestions, similarities: Similarities, wanted: Sequence[int], slots_of: SlotsOf | None
    ) -> tuple[AskedQuestions, list[dict[int, ScoredPassage]]]:
        """Score passages until the `wanted` number of each question can be selected. Return the questions, with the
        slots that `slots_of` made for them, and the scores."""
        waiting, scores = self._candidates(asked, similarities, wanted), [{} for _ in wanted]
        for is_first in (True, False):  # a call for each passage would read the model's weights as often
            only = [own[: each if is_first else None] for own, each in zip(waiting, wanted, strict=True)]
            asked, scores = self._score_missing(asked, similarities, only, scores, slots_of)
            waiting = [own[len(done) :] for own, done in zip(waiting, only, strict=True)]
            decided = zip(waiting, scores, wanted, similarities, strict=True)
            waiting = [
                [] if not own or are_sure(had, each, near[own[0]], self.model.config.most_answerability) else own
                for own, had, each, near in decided
            ]
        return asked, scores

    def _score_missing(
        self,
        asked: AskedQuestions,
        similarities: Similarities,
        only: Sequence[Sequence[int]],
        scores: list[dict[int, ScoredPassage]],
        slots_of: SlotsOf | None,
    ) -> tuple[AskedQuestions, list[dict[int, ScoredPassage]]]:
        """`scores` with those of `only` these passages of each question, and the questions with the slots that were
        asked for."""
        missing = [[each for each in own if each not in had] for own, had in zip(only, scores, strict=True)]
        if not any(missing):
            return asked, scores
        if slots_of is not None:
            asked = asked.with_slots(slots_of(missing))
        found = self._score(asked, similarities, missing)
        return asked, [dict(sorted((old | new).items())) for old, new in zip(scores, found, strict=True)]

    def score(
        self,
        questions: list,
        documents: list[list] | None = None,
        similarities: Similarities | None = None,
        **kwargs: Any,
    ) -> list[dict[int, ScoredPassage]]:
        """How likely each passage by itself contains the answer to its question.

        Each question is computed after each of its passages. Keys and values of the passages go into the cache, where
        `prepare` finds them.

        Args:
            questions, documents, kwargs: As for `PassageCache.prepare`, of several questions.
            similarities (`list[list[float]]`, *optional*): For each question, its cosines with the passages, if a
                search has computed them. Default: computed for `documents`.

        Returns:
            For each question, by the number of the passage, without those that have no text.
        """
        return self._score(*self._ask(questions, documents, similarities, **kwargs))

    def _ask(
        self, questions: list, documents: list[list] | None, similarities: Similarities | None, **kwargs: Any
    ) -> tuple[AskedQuestions, Similarities | None]:
        """The result of `PassageCache.ask`, and the cosines of questions and passages that are texts."""
        self._check_can_score("Scoring passages")
        asked = self.cache.ask(questions, documents, **kwargs)
        if documents is not None and similarities is None:
            texts = [own.texts for own in asked.questions]
            similarities = [
                dict(zip(own, similarities_of(self.processor.encoder, question, [*own.values()]), strict=True))
                for question, own in zip(questions, texts, strict=True)
            ]
        return asked, similarities

    @torch.no_grad()
    def _score(
        self,
        asked: AskedQuestions,
        similarities: Similarities | None = None,
        only: Sequence[Sequence[int]] | None = None,
    ) -> list[dict[int, ScoredPassage]]:
        """As `score`, for the result of `_ask`; `only` has the numbers of each question's passages to score."""
        scores, weight = [{} for _ in asked.questions], self.model.config.similarity_weight
        for rows, inputs in self.cache.iter_asked(asked, only):
            logits = self.cache.read_question(inputs, True, asked.turn).answerability_logits
            for (question, passage, is_cached), sure in zip(rows, torch.sigmoid(logits).tolist(), strict=True):
                similarity = similarities[question][passage] if similarities else 0.0
                scores[question][passage] = ScoredPassage(sure, similarity, is_cached, weight)
        return [dict(sorted(each.items())) for each in scores]

    # Answers

    def answer(self, questions: Sequence, passages: Sequence[list], **settings: Any) -> "AnsweringCall":
        """Begin one call of `generate`; arguments as for [`AnsweringCall`]."""
        return AnsweringCall(self.model, self.processor, questions, passages, **settings)


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


# Options of `generate` that compute more than the prompt before its first scores, so that the answerability cannot be
# computed.
READ_MORE = ("guidance_scale", "prompt_lookup_num_tokens", "assistant_model")


class AnsweringCall:
    """
    One call of `generate`: its further arguments, and the estimates that it reports.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): Of one checkpoint.
        questions (`Sequence`), passages (`Sequence[list]`): For each row of the batch the question, a text or a chat,
            and the used passages, for answerability; an empty list if their texts are not known.
        copied (`Sequence[list]`, *optional*): Of each row the passages that its answer may copy. Default: `passages`.
        copy_bonus (`float` or `list`, *optional*): Of [`PassageCopyLogitsProcessor`].
        scores (`bool`, defaults to `True`): Whether the answerability is reported, if it was fitted and `generate`
            computes nothing but the prompt before its first scores (`READ_MORE`).
        min_confidence (`float`, *optional*): The answerability that the caller needs, which has to be reported then.
        traces (`bool`, defaults to `False`): Whether `recursion_depth` is reported.

    Attribute: `likelihood`, the [`LikelihoodRecorder`] of a greedy call, if it was calibrated.

    Use [`~AnsweringCall.generate`] or, where another function calls `generate`, give it
    [`~AnsweringCall.options`]. `model` may be any causal language model without `scores` and `traces`.
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
    ):
        self.model, self.processor, self.questions, self.passages = model, processor, questions, passages
        self._copied, self._copy_bonus = passages if copied is None else copied, copy_bonus
        self._scores, self._traces = scores and model.answerability_head is not None, traces
        self._min_confidence = min_confidence
        self._prefill: PrefillOutputs | None = None
        self._answerability: torch.Tensor | None = None
        self.likelihood: LikelihoodRecorder | None = None

    def options(self, options: dict[str, Any], last: Sequence[LogitsProcessor] = ()) -> dict[str, Any]:
        """The `options` of a call of `generate` with this call's logits processors, after the given ones and before
        `last`, such as one that samples tokens.

        Raises:
            `ValueError`: options with which the answerability cannot be reported, if a `min_confidence` needs it.
        """
        config, default = options.get("generation_config"), self.model.generation_config
        if any(options.get(name) or getattr(config or default, name, None) for name in READ_MORE):
            if self._min_confidence is not None:
                raise ValueError(
                    f"`min_confidence` cannot be combined with any of {', '.join(READ_MORE)}. Leave out "
                    "`min_confidence`, or the others."
                )
            self._scores = False
        self._prefill = PrefillOutputs() if self._scores or self._traces else None
        end_ids = default.eos_token_id if config is None or config.eos_token_id is None else config.eos_token_id
        processors, copies = list(options.get("logits_processor") or []), None
        ends = options.get("eos_token_id", end_ids)
        if any(self._copied):
            copies = PassageCopyLogitsProcessor(self.processor, self._copied, self._copy_bonus, ends)
        # It wraps the processor of copies, as it needs the scores without their bonus.
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
        """Answerability of each row, (batch,), known once the prompt is computed: how likely its passages contain the
        answer, not how likely the answer is right. All beams and samples of a row share it. `None` if it was not
        fitted."""
        logits = self._prefill.answerability_logits if self._scores and self._prefill is not None else None
        if self._answerability is None and logits is not None:
            self._answerability = self.answerability_of(self._of_rows(logits))
        return self._answerability

    def answerability_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Answerability of each row, (batch,), from the head's logits (batch,), such as those of
        [`PassageCache.read_question`], for an answer that another engine generates."""
        logits = logits.float()
        if self.model.config.answerability_uses_match:
            asked = zip(self.questions, self.passages, strict=True)
            logits = self.model.answerability_head.with_match(
                logits, [maxsim_score(self.processor, *each) for each in asked]
            )
        return torch.sigmoid(logits).cpu()

    @property
    def answer_likelihood(self) -> torch.Tensor | None:
        """How likely the answer of each row is right, (batch,), from the likelihood of its tokens so far and the
        answerability. `None` if it was not fitted, for sampled answers and for beam search."""
        if self.likelihood is None or self.likelihood.counts is None or (sure := self.answerability) is None:
            return None
        likelihood, odds, offset = self.model.config.answer_calibration
        return torch.sigmoid(likelihood * self.likelihood.mean.cpu() + odds * torch.logit(sure, eps=1e-6) + offset)

    @property
    def recursion_depth(self) -> torch.LongTensor | None:
        """Refinement steps (batch, num_layers, max_slots) of the slots that were computed with the prompt."""
        depth = None if self._prefill is None else self._prefill.recursion_depth
        return None if depth is None else self._of_rows(depth)

    def _of_rows(self, repeated: torch.Tensor) -> torch.Tensor:
        """The first of the beams or samples of each row."""
        # `generate` repeats rows before the prefill; copies of a row have equal outputs.
        return repeated[:: len(repeated) // len(self.passages)]


def _is_greedy(options: dict[str, Any], config) -> bool:
    """Whether `generate` with these options, or its configuration, decodes greedily."""
    draws, beams = (options.get(name, getattr(config, name, None)) for name in ("do_sample", "num_beams"))
    return not draws and beams in (None, 1)


MAX_NEW_TOKENS = 24  # of greedy answers to questions that have short ones


@torch.inference_mode()
def greedy_answers(
    model,
    processor,
    inputs: dict[str, Any],
    questions: Sequence = (),
    passages: Sequence[list] = (),
    copy_bonus: float | None = None,
    **options: Any,
) -> tuple[list[str], list[float | None]]:
    """Greedy answers to left-padded prompts, and the answerability of each: `None` without slots, or if it was not
    fitted. `model` may be any causal language model; `options` are those of `generate`."""
    has_slots = "context_embeds" in inputs
    call = AnsweringCall(model, processor, questions, passages, copy_bonus=copy_bonus, scores=has_slots)
    ids = call.generate(inputs, **{"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, **options})
    texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    sure = [None] * len(texts) if call.answerability is None else call.answerability.tolist()
    return [text.strip() for text in texts], sure


# Embeddings and words of texts, by encoder, and tokens to copy, by tokenizer; `of_texts` has their limits.
_VECTORS, _WORDS, _COPIED = WeakKeyDictionary(), WeakKeyDictionary(), WeakKeyDictionary()


def clear_text_caches() -> None:
    """Drop cached embeddings and tokens of texts, of all encoders and tokenizers. They are computed again when they
    are needed."""
    for each in (_VECTORS, _WORDS, _COPIED):
        each.clear()


def search_text(title: str | None, text: str) -> str:
    """The text of a passage that the search encoder gets."""
    return f"{title or ''} {text}".strip()


def _searched(question: str | list[dict], documents: Sequence[str | dict]) -> list[str]:
    """The question (of a chat, the last one) and the texts of the passages."""
    if not isinstance(question, str):
        question = ["", *(each["content"] or "" for each in with_plain_texts(question) if each["role"] == "user")][-1]
    return [question, *(search_text(title_of(each), text_of(each, number)) for number, each in enumerate(documents))]


def similarities_of(encoder, question: str | list[dict], documents: Sequence[str | dict]) -> list[float]:
    """Cosine of a question (of a chat, the last one) with each passage."""
    asked, *vectors = of_texts(_VECTORS, encoder.untrained, _searched(question, documents), encoder.untrained.encode)
    return [float(asked @ vector) for vector in vectors]


def question_features(encoder, questions: Sequence[str | list[dict]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the [`MultihopHead`] for questions (of chats, the last ones): their embeddings from the search encoder
    (batch, d_r) and their numbers of words (batch,)."""
    texts = [text for question in questions for text in _searched(question, [])]
    vectors = of_texts(_VECTORS, encoder.untrained, texts, encoder.untrained.encode)
    return torch.stack([*vectors]), torch.tensor([float(len(text.split())) for text in texts])


def maxsim_score(processor, question: str | list[dict], documents: Sequence[str | dict]) -> float:
    """Late-interaction (MaxSim) score of passages for a question (of a chat, the last one). Each word of the question,
    except stop words, gets its highest cosine with a word of the passages; the score is the mean. NaN if question or
    passages have no such word."""
    asked, *texts = _searched(question, documents)
    texts = [text for text, own in zip(texts, documents, strict=True) if text_of(own, 0).strip()]
    encoder = processor.encoder.untrained
    pieces = [piece for text in texts for piece in encoder.pieces(text)]
    (words, states), *others = of_texts(_WORDS, encoder, [asked, *pieces], encoder.encode_words, most=256)
    nearest = [(states.float() @ own.float().T).amax(dim=1) for _, own in others if len(own)]  # each (words,)
    if not words or not nearest:
        return math.nan
    words, common = [word.strip().lower() for word in words], stop_words(processor.spacy_model)
    highest = torch.stack(nearest).amax(dim=0)  # (words,)
    says = [any(map(str.isalnum, word)) and word not in common for word in words]
    says = torch.tensor(says, device=highest.device)  # (words,)
    return float((highest[says] if says.any() else highest).mean())


def of_texts(
    kept: WeakKeyDictionary, owner: Any, texts: Sequence[str], compute: Callable[[list[str]], Any], most: int = 2048
) -> list:
    """Map `compute` over texts; cache the last `most` results per `owner`, of texts up to 10,000 characters."""
    found = kept.get(owner, {})
    if missing := [text for text in dict.fromkeys(texts) if text not in found]:
        new = dict(zip(missing, compute(missing), strict=True))
        short = {text: each for text, each in new.items() if len(text) <= 10_000}
        kept[owner] = dict([*(found | short).items()][-most:])  # a new dict: other threads may read the old one
        found = found | new
    return [found[text] for text in texts]


class PassageCopyLogitsProcessor(LogitsProcessor):
    """Bias decoding towards the words of the passages, in one call of `generate`.

    Beyond the paper: slots preserve meaning better than spelling, and the text is available when a question is asked.
    As long as the answer is a span of it that begins at a word, `bonus` is added to the scores of tokens that continue
    the span and, where a word ends, of those that end the answer. The input of the model does not change.

    Args:
        processor ([`ArcAlignerProcessor`]): Of the aligner.
        documents (`list[list]`): For each row of the batch, its passages; a copy is a span of one of them.
        bonus (`float` or `list`): In log-odds, of all rows or of each; `None` is the processor's `copy_bonus`.
        end_ids (`int` or `list[int]`, *optional*): Tokens that end an answer.
    """

    def __init__(self, processor, documents: list[list], bonus: float | list | None, end_ids: int | list | None):
        given = bonus if isinstance(bonus, list) else [bonus] * len(documents)
        self.bonus = [processor.copy_bonus if each is None else each for each in given]
        copied = (each if own else [] for each, own in zip(documents, self.bonus, strict=True))
        self.texts = [copied_texts(processor.tokenizer, each, processor.no_answer) for each in copied]
        self.end_ids = set() if end_ids is None else set(torch.as_tensor(end_ids, device="cpu").reshape(-1).tolist())
        self.prompt_length: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        if not any(self.texts):
            return scores
        scores, num_each = scores.clone(), len(input_ids) // len(self.texts)  # (batch * beams or samples, vocab_size)
        for row, written in enumerate(input_ids[:, self.prompt_length :].tolist()):
            ids = copied_next(self.texts[row // num_each], written, self.end_ids)
            scores[row, ids] += self.bonus[row // num_each]
        return scores.log_softmax(dim=-1)  # else each token of a copy would add its bonus to the sum of a beam


class LikelihoodRecorder(LogitsProcessor):
    """Record how likely the model finds the chosen tokens, in one greedy call of `generate`.

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
        own = scores.float()  # (batch, vocab_size)
        scores = scores if self.inner is None else self.inner(input_ids, scores)
        taken = scores.argmax(dim=1)  # (batch,)
        found = own.gather(1, taken[:, None])[:, 0] - own.logsumexp(dim=1)  # (batch,)
        if self.counts is None:
            self.sums, self.counts = torch.zeros_like(found), torch.zeros_like(found)
            self.is_done = torch.zeros_like(taken, dtype=torch.bool)
        self.sums = self.sums + found.masked_fill(self.is_done, 0.0)
        self.counts = self.counts + ~self.is_done
        if self.end_ids is not None:
            self.is_done = self.is_done | torch.isin(taken, self.end_ids.to(taken.device))
        return scores

    @property
    def mean(self) -> torch.FloatTensor:
        """The mean log-likelihood of each answer's tokens, (batch,)."""
        return self.sums / self.counts


_WORD_START = re.compile(r"(?<![^\W_])[^\W_]|(?<!\S)\S")

_WORD = re.compile(r"\S{1,40}")  # the first characters of a word, which are compared

# Answers that count as copied: else a "no" of the text would win where the answer is "yes".
YES_NO = ("yes", "no", "Yes", "No")


class CopiedText(NamedTuple):
    """The tokens of a text, and for each of its words how an answer that begins there is tokenized."""

    ids: list[int]
    ends_word: list[bool]  # whether a word ends with the token
    # For each word, by its first id: its ids without a space before it, as at the beginning of an answer; whether a
    # word ends with each; and where the text's own `ids` continue.
    words: dict[int, list[tuple[list[int], list[bool], int]]]

    def follow(self, written: list[int]) -> tuple[set[int], bool]:
        """Ids that follow `written` wherever it occurs in the text, and whether a word ends there."""
        found, is_end, length = set(), False, len(written)
        for own, own_ends, after in self.words.get(written[0], ()):
            place = after + max(0, length - len(own))
            if own[:length] + self.ids[after:place] == written:
                found.update(own[length : length + 1] or self.ids[place : place + 1])
                is_end |= self.ends_word[place - 1] if place > after else own_ends[length - 1]
        return found, is_end


def copied_texts(tokenizer, documents: Sequence[str | dict], no_answer: str | None = None) -> list[CopiedText]:
    """The texts that an answer may copy from documents, titles included; `YES_NO` and `no_answer` are copied whole."""
    read = [(text_of(document, number), title_of(document)) for number, document in enumerate(documents)]
    texts = [each for text, title in read if text.strip() for each in (text, title) if each]
    found = of_texts(_COPIED, tokenizer, texts, lambda missing: [_copied(tokenizer, text) for text in missing])
    others = [each for each in (*YES_NO, no_answer) if each] if texts else []
    whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in others]
    return found + [CopiedText([], [], {ids[0]: [(ids, [*[False] * (len(ids) - 1), True], 0)]}) for ids in whole]


def _copied(tokenizer, text: str) -> CopiedText:
    """Prepare a text for copying. A copy never begins at a word with a control token."""

    def ends_word(ends: Sequence[int]) -> list[bool]:
        pairs = zip(ends, [*ends[1:], len(text) + 1], strict=True)  # equal where a character has several tokens
        return [end < after and not (text[end - 1].isalnum() and text[end : end + 1].isalnum()) for end, after in pairs]

    ((ids, ends),) = tokenize_with_ends(tokenizer, [text])
    copied = CopiedText(ids, ends_word(ends), {})
    starts = [found.start() for found in _WORD_START.finditer(text)]
    words = [_WORD.match(text, start)[0] for start in starts] or [""]  # no tokenizer takes an empty batch
    read = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
    special = control_token_ids(tokenizer)
    for start, word, own, offsets in zip(starts, words, read["input_ids"], read["offset_mapping"], strict=False):
        if own and not special.intersection(own):
            after = bisect.bisect_right(ends, start + len(word))
            is_start = after and ends[after - 1] == start + len(word)  # else a token crosses the end of the word
            own_ends = ends_word([start + end for _, end in offsets])
            copied.words.setdefault(own[0], []).append((own, own_ends, after if is_start else len(ids)))
    return copied


def copied_next(texts: Sequence[CopiedText], written: list[int], end_ids: Set[int]) -> list[int]:
    """Ids that may follow an answer that was copied from `texts`: those that continue the copy and, at the end of a
    word, those that end the answer."""
    if not written:
        return sorted({first for text in texts for first in text.words})
    found = [text.follow(written) for text in texts]
    return sorted(set().union(*(ids for ids, _ in found), end_ids if any(is_end for _, is_end in found) else ()))
