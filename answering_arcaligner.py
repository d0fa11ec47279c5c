"""From a question and its passages to an answer: which passages are read, how likely they hold the answer, and answers
in their words. Pipeline, server, evaluation and engines call it; all of it is beyond the paper."""

import bisect
import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor

from .configuration_arcaligner import is_number
from .encoder_arcaligner import search_text
from .segmentation_arcaligner import (
    Segment,
    _tokenize_document,
    cut_long,
    documents_of,
    fitting_pieces,
    stop_words,
    text_of,
    title_of,
)
from .tokenization_arcaligner import control_token_ids, with_plain_texts


# How likely passages answer a question, beyond the paper: middle layers of a frozen model show whether it has found an
# answer. A logistic regression, the processor's `answer_probe`, reads it from the states of the prompt's last token: of
# all passages, beside the match of their words, whether to believe the answer; of each alone, which ones to read.
def check_max_passages(processor, max_passages: int) -> None:
    """Raises `ValueError` unless it is a number of passages, of an aligner that can tell the likeliest ones."""
    if not is_number(max_passages, Integral) or max_passages < 1:
        raise ValueError(f"`max_passages` is {max_passages!r}; expected a whole number of at least 1.")
    check_can_rank(processor, "`max_passages`")


def check_can_rank(processor, what: str) -> None:
    """Raises `ValueError`, about `what`, unless the aligner can be asked about each passage by itself."""
    check_probe(processor, what)
    if processor.passage_attention != "separate":
        raise ValueError(
            f"{what} needs passages that are read by themselves, and this aligner was trained to read those of a "
            'question jointly. Pass fewer documents, or take an aligner with `passage_attention` "separate".'
        )


# Whether the aligner's confidence can be asked for. See `AnswerConfidence` of the pipeline.
def check_probe(processor, what: str) -> None:
    """Raises `ValueError`, about `what`, unless its confidence was fitted."""
    if processor.answer_probe is None:
        raise ValueError(
            f"{what} needs an aligner whose confidence was fitted, and this one's processor has no `answer_probe`. Fit "
            "it with `python -m arcaligner.train.confidence`, or leave it out."
        )


def check_min_confidence(processor, min_confidence: float) -> None:
    """Raises `ValueError` unless it is a share, of an aligner that tells how sure it is."""
    if not is_number(min_confidence, Real) or not 0.0 <= min_confidence <= 1.0:
        raise ValueError(f"`min_confidence` is {min_confidence!r}; expected a number from 0 to 1.")
    check_probe(processor, "`min_confidence`")
    if not isinstance(processor.no_answer, str):
        raise ValueError(f"The processor's `no_answer` is {processor.no_answer!r}; expected what is answered instead.")


def passages_to_read(processor) -> int | None:
    """How many of several passages are read by default: the likeliest, which answers far better than all of them unless
    several are needed; `None`, all, where the aligner cannot tell it."""
    can_tell = processor.answer_probe is not None and processor.passage_attention == "separate"
    return 1 if can_tell else None


def cut_documents(processor, documents: list) -> tuple[list, list[Segment]]:
    """The passages that documents are read as, and what each is of which document: of long ones pieces, unless the
    aligner cannot tell which of them to read."""
    longest = math.inf if passages_to_read(processor) is None else processor.max_passage_tokens
    return cut_long(documents, processor.tokenizer, longest, processor.passage_tokens, processor.spacy_model)


# What the cosine of question and passage is worth beside the confidence, in log-odds: fitted on held-out questions.
SIMILARITY_WEIGHT = 10.0


class RankedPassage(NamedTuple):
    """How likely a passage by itself answers a question, the cosine of both (0 where neither texts nor a search tell),
    and whether the passage was kept, so that it was not read again."""

    confidence: float
    similarity: float
    is_kept: bool

    @property
    def log_odds(self) -> float:
        """What decides between passages: the confidence, and the cosine beside it."""
        sure = min(max(self.confidence, 1e-9), 1 - 1e-9)
        return math.log(sure / (1 - sure)) + SIMILARITY_WEIGHT * self.similarity


def likeliest(ranked: Mapping[int, RankedPassage], most: int) -> list[int]:
    """The numbers of the passages that most likely answer, at most `most` of them, in the order of the passages.

    >>> likeliest({0: RankedPassage(0.6, 0.8, False), 1: RankedPassage(0.7, 0.4, False)}, most=1)
    [0]
    """
    return sorted(sorted(ranked, key=lambda number: ranked[number].log_odds, reverse=True)[:most])


@torch.no_grad()
def rank_passages(
    store, questions: list, documents: list | None = None, similarities: list | None = None, **kwargs: Any
) -> list[dict[int, RankedPassage]]:
    """How likely each passage by itself answers its question; `likeliest` then says which ones to read.

    Each question is read behind each of its passages. What is read of these is in the store, where `prepare` finds it.

    Args:
        store ([`SlotPrefixStore`]): Of an aligner that reads passages apart and whose confidence was fitted.
        questions, documents, kwargs: As for `SlotPrefixStore.prepare`, of several questions.
        similarities (`list[list[float]]`, *optional*): Of each question, its cosines with the passages where a search
            has them. Default: computed, for `documents`.

    Returns:
        For each question, by the number of the passage, without those that have no text.
    """
    check_can_rank(store.processor, "Ranking passages")
    if similarities is None and documents is not None:
        documents = [documents_of(each, "`documents`") for each in documents]
        similarities = list(map(functools.partial(similarities_of, store.processor.encoder), questions, documents))
    watch, ranked = AnswerConfidence(store.model, store.processor, stops=True), [{} for _ in questions]
    for rows, inputs in store.each_alone(questions, documents, **kwargs):
        with watch:
            with contextlib.suppress(watch.SeenError):
                store.read_question(inputs)
            sure = torch.sigmoid(watch.log_odds()).tolist()
        for (question, passage, is_kept), confidence in zip(rows, sure, strict=True):
            similarity = similarities[question][passage] if similarities else 0.0
            ranked[question][passage] = RankedPassage(confidence, similarity, is_kept)
    return [dict(sorted(each.items())) for each in ranked]


class AnswerConfidence(LogitsProcessor):
    """
    Watches one call of `generate` and tells how likely it is that the passages answer the question.

    It is known before the first token, and the same for all beams and samples. It does not say that the answer is
    right. Changes no score. Not with `guidance_scale`, prompt lookup or an assistant model, which have more than the
    prompt read.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): The aligner; the processor's
            `answer_probe` has the regression.
        asked (`list[tuple]`): Of each row of the batch the question, a text or a chat, and the passages that are read.
            Their `word_match` counts, too, where it was fitted and there are words.
        stops (`bool`, defaults to `False`): Raises `SeenError` in the last layer that is watched, as what comes after
            it says nothing about the confidence.

    In `with AnswerConfidence(...) as watch`, give it to `generate`, in the same thread, as one of `logits_processor`;
    `watch.confidence` (batch,) is then there. Other threads may use the model meanwhile.

    Raises:
        `ValueError`: a processor without `answer_probe`, or with that of another model.
    """

    class SeenError(Exception):
        """All states that are needed have been seen."""

    def __init__(self, model, processor, asked: Iterable[tuple[Any, list]] = (), stops: bool = False):
        check_probe(processor, "A confidence")
        probe, width = processor.answer_probe, model.config.text_config.hidden_size
        layers = model.model.decoder_layers
        self.weight = torch.tensor(probe["weight"], dtype=torch.float32, device=model.device)
        self.bias, self.words, self.processor = probe["bias"], probe.get("words"), processor
        self.asked = [*asked] if self.words else []
        if max(probe["layers"]) >= len(layers) or len(self.weight) != len(probe["layers"]) * width:
            raise ValueError(
                f"`answer_probe` has {len(self.weight)} weights for layers {probe['layers']}; expected {width} for "
                f"each, of {len(layers)} layers. It was fitted for another model: fit it again."
            )
        self.layers = [layers[layer] for layer in probe["layers"]]
        self.last = probe["layers"].index(max(probe["layers"])) if stops else None
        self.odds: torch.Tensor | None = None  # of the states, (batch * beams or samples,)
        self._states: dict[int, torch.Tensor] = {}  # of each of the layers, (batch, hidden)

    def __enter__(self) -> "AnswerConfidence":
        self.odds, self._thread = None, threading.get_ident()
        self.__dict__.pop("confidence", None)  # of a call before
        self._hooks = [
            layer.register_forward_hook(functools.partial(self._see, place)) for place, layer in enumerate(self.layers)
        ]
        return self

    def __exit__(self, *error) -> None:
        for hook in self._hooks:
            hook.remove()
        self._states = {}

    def _see(self, place: int, layer, inputs, states: torch.Tensor) -> None:
        """Keeps the last token's states (batch, hidden). Passages that are read apart come first, then the prompt."""
        if self.odds is None and threading.get_ident() == self._thread:  # others may use the same model
            self._states[place] = states[:, -1].float()
            if place == self.last:
                raise self.SeenError

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.odds is None:
            self.odds = self.log_odds()
        return scores

    @functools.cached_property
    def confidence(self) -> torch.Tensor:
        """How likely it is that the passages answer, (batch * beams or samples,). Their words are read for it."""
        matches = [word_match(self.processor, *own) for own in self.asked]
        return torch.sigmoid(with_words(self.odds, self.words, matches))

    def log_odds(self) -> torch.Tensor:
        """What the states of what was read last tell, (batch,)."""
        if len(self._states) < len(self.layers):
            raise ValueError(
                "No states of the prompt's last token were seen. Generate in `with AnswerConfidence(...)` and its "
                "thread, with a model that is not compiled as a whole, and without prompt lookup or an assistant model."
            )
        states = [self._states[place].to(self.weight.device) for place in range(len(self.layers))]
        states = torch.cat(states, dim=1)  # (batch, layers * hidden)
        return states @ self.weight + self.bias


_VECTORS, _WORDS = WeakKeyDictionary(), WeakKeyDictionary()  # what encoders that search make of texts


def _searched(question: str | list[dict], documents: Sequence[str | dict]) -> list[str]:
    """The question, or a chat's last one, and the texts of the passages."""
    if not isinstance(question, str):
        question = ["", *(each["content"] or "" for each in with_plain_texts(question) if each["role"] == "user")][-1]
    return [question, *(search_text(title_of(each), text_of(each, number)) for number, each in enumerate(documents))]


def similarities_of(encoder, question: str | list[dict], documents: Sequence[str | dict]) -> list[float]:
    """The cosine of a question, or of a chat's last one, and each passage."""
    asked, *vectors = of_texts(_VECTORS, encoder.untrained, _searched(question, documents), encoder.untrained.encode)
    return [float(asked @ vector) for vector in vectors]


def word_match(processor, question: str | list[dict], documents: Sequence[str | dict]) -> float:
    """How well passages match the words of a question, or of a chat's last one: the highest cosine of each, stop words
    left out, with a word of theirs, on average. Without words on either side NaN."""
    encoder, (asked, *texts) = processor.encoder.untrained, _searched(question, documents)
    texts = [text for text, own in zip(texts, documents, strict=True) if text_of(own, 0).strip()]
    pieces = [text[a:b] for text in texts for a, b in fitting_pieces(text, 0, len(text), encoder.num_reads)]
    (words, states), *others = of_texts(_WORDS, encoder, [asked, *pieces], encoder.encode_words, most=256)
    nearest = [(states.float() @ own.float().T).amax(dim=1) for _, own in others if len(own)]  # each (words,)
    if not words or not nearest:
        return math.nan
    words, common = [word.strip().lower() for word in words], stop_words(processor.spacy_model)
    says = torch.tensor([any(map(str.isalnum, word)) and word not in common for word in words])
    highest = torch.stack(nearest).amax(dim=0)
    return float((highest[says] if says.any() else highest).mean())


def with_words(odds: torch.Tensor, words: dict[str, float] | None, matches: Sequence[float]) -> torch.Tensor:
    """Log-odds (batch,) of what the states tell and the `word_match` of each row; `words` are the `answer_probe`'s."""
    if not matches:
        return odds
    match = odds.new_tensor(matches).repeat_interleave(len(odds) // len(matches))  # a row for each beam
    return torch.where(match.isnan(), odds, words["scale"] * odds + words["weight"] * match + words["bias"])


# Texts and weights that were read
def of_texts(
    kept: WeakKeyDictionary, owner: Any, texts: Sequence[str], compute: Callable[[list[str]], Any], most: int = 2048
) -> list:
    """What `compute` makes of texts, in order; for some `most`, none of more than 10,000 characters, it is kept,
    as long as the `owner` lives."""
    found = kept.get(owner, {})
    if missing := [text for text in dict.fromkeys(texts) if text not in found]:
        new = dict(zip(missing, compute(missing), strict=True))
        short = {text: each for text, each in new.items() if len(text) <= 10_000}
        kept[owner] = dict([*(found | short).items()][-most:])  # anew: other threads may read the old one
        found = found | new
    return [found[text] for text in texts]


class CopyBonus(LogitsProcessor):
    """Prefers answers in the words of the passages, in one call of `generate`.

    Beyond the paper: a slot tells what a text says better than how it is spelled, and whoever asks has the text. While
    all of an answer stands in it, from the beginning of a word on, `bonus` is added to the scores of tokens that go on
    so and, where a word ends, of those that end the answer. What the model reads is the same.

    Args:
        processor ([`ArcAlignerProcessor`]): Of the aligner.
        documents (`list[list]`): Of each row of the batch, the passages that it reads; each is copied from as a whole.
        bonus (`float` or `list`): In log-odds, of all rows or of each; `None` is the processor's `copy_bonus`.
        end_ids (`int` or `list[int]`, *optional*): Tokens that end an answer.
    """

    def __init__(self, processor, documents: list[list], bonus: float | list | None, end_ids: int | list | None):
        given = bonus if isinstance(bonus, list) else [bonus] * len(documents)
        self.bonus = [processor.copy_bonus if each is None else each for each in given]
        copied = (each if own else [] for each, own in zip(documents, self.bonus, strict=True))
        self.texts = [copied_texts(processor.tokenizer, each, processor.no_answer) for each in copied]
        self.end_ids = set() if end_ids is None else set(torch.as_tensor(end_ids).reshape(-1).tolist())
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


_COPIED = WeakKeyDictionary()  # of each tokenizer, what is copied of texts

_WORD_START = re.compile(r"(?<![^\W_])[^\W_]|(?<!\S)\S")

_WORD = re.compile(r"\S{1,40}")  # what is looked at of one

# Answers that are as good as copied: else a question that wants "yes" would be answered by a "no" of the text.
YES_NO = ("yes", "no", "Yes", "No")


class CopiedText(NamedTuple):
    """A text, from any of its words on, as the backbone writes it at the beginning of an answer."""

    ids: list[int]
    ends_word: list[bool]  # whether a word ends with the token
    # Of each word, by its first id: its ids by itself, as an answer has no space before it, whether a word ends with
    # each, and where the text's own `ids` go on.
    words: dict[int, list[tuple[list[int], list[bool], int]]]

    def follow(self, written: list[int]) -> tuple[set[int], bool]:
        """The ids that go on with what is `written`, wherever it stands, and whether a word ends there."""
        found, is_end, length = set(), False, len(written)
        for own, own_ends, after in self.words.get(written[0], ()):
            place = after + max(0, length - len(own))
            if own[:length] + self.ids[after:place] == written:
                found.update(own[length : length + 1] or self.ids[place : place + 1])
                is_end |= self.ends_word[place - 1] if place > after else own_ends[length - 1]
        return found, is_end


def copied_texts(tokenizer, documents: Sequence[str | dict], no_answer: str | None = None) -> list[CopiedText]:
    """What an answer may copy of documents, titles included; `YES_NO` and `no_answer` are copied whole."""
    read = [(text_of(document, number), title_of(document)) for number, document in enumerate(documents)]
    texts = [each for text, title in read if text.strip() for each in (text, title) if each]
    found = of_texts(_COPIED, tokenizer, texts, lambda missing: [_copied(tokenizer, text) for text in missing])
    others = [each for each in (*YES_NO, no_answer) if each] if texts else []
    whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in others]
    return found + [CopiedText([], [], {ids[0]: [(ids, [*[False] * (len(ids) - 1), True], 0)]}) for ids in whole]


def _copied(tokenizer, text: str) -> CopiedText:
    """No copy begins with a word that holds a control token."""

    def ends_word(ends: Sequence[int]) -> list[bool]:
        pairs = zip(ends, [*ends[1:], len(text) + 1], strict=True)  # equal where a character has several tokens
        return [end < after and not (text[end - 1].isalnum() and text[end : end + 1].isalnum()) for end, after in pairs]

    ids, ends = (each.tolist() for each in _tokenize_document(tokenizer, text, 0))
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
    """Ids that go on with an answer in the words of `texts`, and, where a word of it is whole, of those that end it."""
    if not written:
        return sorted({first for text in texts for first in text.words})
    found = [text.follow(written) for text in texts]
    return sorted(set().union(*(ids for ids, _ in found), end_ids if any(is_end for _, is_end in found) else ()))
