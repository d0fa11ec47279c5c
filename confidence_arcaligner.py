"""How likely it is that passages answer a question, from the states of a model that has read both.

Beyond the paper. A frozen model that has read passages and question shows in its middle layers whether it found an
answer, also where it goes on to invent one. A logistic regression (the processor's `answer_probe`, fitted by
`train/confidence.py`) reads this from the states of the last token of the prompt. Asked of all passages together, it
says whether to believe the answer; asked of each passage by itself, which of them to read.
"""

import functools
import threading
from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from .segmentation_arcaligner import passages_apart, passages_of_questions

# Passages that a question is asked about at once, each by itself.
RANKED_AT_ONCE = 16


def check_min_confidence(processor, min_confidence: float) -> None:
    """Raises `ValueError` unless it is a share, of an aligner that tells how sure it is."""
    is_number = isinstance(min_confidence, int | float) and not isinstance(min_confidence, bool)
    if not is_number or not 0.0 <= min_confidence <= 1.0:
        raise ValueError(f"`min_confidence` is {min_confidence!r}; expected a number from 0 to 1.")
    _check_probe(processor, "`min_confidence`")
    if not isinstance(processor.no_answer, str):
        raise ValueError(f"The processor's `no_answer` is {processor.no_answer!r}; expected what is answered instead.")


def check_max_passages(processor, max_passages: int) -> None:
    """Raises `ValueError` unless it is a number of passages, of an aligner that can tell the likeliest ones."""
    is_whole = isinstance(max_passages, Integral) and not isinstance(max_passages, bool)
    if not is_whole or max_passages < 1:
        raise ValueError(f"`max_passages` is {max_passages!r}; expected a whole number of at least 1.")
    _check_probe(processor, "`max_passages`")
    if processor.passage_attention != "separate":
        raise ValueError(
            "`max_passages` asks about each passage by itself, and this aligner was trained to read those of a "
            'question jointly. Pass fewer documents, or take an aligner with `passage_attention` "separate".'
        )


def likeliest(confidences: Mapping[int, float], most: int) -> list[int]:
    """The numbers of the passages that most likely answer, at most `most` of them, in the order of the passages.

    >>> likeliest({0: 0.2, 1: 0.9, 3: 0.5}, most=2)
    [1, 3]
    """
    return sorted(sorted(confidences, key=confidences.__getitem__, reverse=True)[:most])


def _check_probe(processor, what: str) -> None:
    if processor.answer_probe is None:
        raise ValueError(
            f"{what} needs an aligner whose confidence was fitted, and this one's processor has no `answer_probe`. Fit "
            "it with `python -m arcaligner.train.confidence`, or leave it out."
        )


class AnswerConfidence(LogitsProcessor):
    """
    Watches one call of `generate` and tells how likely it is that the passages answer the question.

    It is known before the first token, and the same for all beams and samples. It does not say that the answer is
    right. Changes no score. Not with `guidance_scale`, prompt lookup or an assistant model, which have more than the
    prompt read.

    Args:
        model ([`ArcAlignerForCausalLM`]), processor ([`ArcAlignerProcessor`]): The aligner; the processor's
            `answer_probe` has the regression.

    Example:

    ```python
    >>> with AnswerConfidence(model, processor) as watch:
    ...     ids = model.generate(**inputs, logits_processor=[watch])
    >>> watch.confidence  # (batch,)
    tensor([0.9312])
    ```

    Raises:
        `ValueError`: a processor without `answer_probe`, or with that of another model.
    """

    def __init__(self, model, processor):
        _check_probe(processor, "A confidence")
        probe, width = processor.answer_probe, model.config.text_config.hidden_size
        layers = model.model.decoder_layers
        self.weight = torch.tensor(probe["weight"], dtype=torch.float32, device=model.device)
        self.bias = probe["bias"]
        if max(probe["layers"]) >= len(layers) or len(self.weight) != len(probe["layers"]) * width:
            raise ValueError(
                f"`answer_probe` has {len(self.weight)} weights for layers {probe['layers']}; expected {width} for "
                f"each, of {len(layers)} layers. It was fitted for another model: fit it again."
            )
        self.layers = [layers[layer] for layer in probe["layers"]]
        self.confidence: torch.Tensor | None = None  # (batch * beams or samples,)
        # Of each thread, as others may use the same model, and each layer, (batch, hidden).
        self._states: dict[tuple[int, int], torch.Tensor] = {}

    def __enter__(self) -> "AnswerConfidence":
        self.confidence = None
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
        if self.confidence is None:
            self._states[threading.get_ident(), place] = states[:, -1].float()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.confidence is None:
            self.confidence = self.of_states()
        return scores

    def of_states(self) -> torch.Tensor:
        """The confidence (batch,) of what this thread has read last."""
        states = [self._states.get((threading.get_ident(), place)) for place in range(len(self.layers))]
        if any(each is None for each in states):
            raise ValueError(
                "No states of the prompt's last token were seen. Generate in `with AnswerConfidence(...)`, with "
                "a model that is not compiled as a whole, and without prompt lookup or an assistant model."
            )
        states = torch.cat([each.to(self.weight.device) for each in states], dim=1)
        return torch.sigmoid(states @ self.weight + self.bias)


class RankedPassage(NamedTuple):
    """How likely a passage by itself answers a question, and whether it was kept, so that it was not read again."""

    confidence: float
    is_kept: bool


@torch.no_grad()
def rank_passages(
    store,
    question: str | list[dict],
    documents: list | None = None,
    context_embeds: torch.Tensor | None = None,
    context_word_ids: torch.Tensor | None = None,
    context_passage_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> dict[int, RankedPassage]:
    """How likely each passage by itself answers a question; `likeliest` then says which ones to read.

    The question is read behind each passage. What is read of the passages is the store's: `prepare` finds it there.

    Args:
        store ([`SlotPrefixStore`]): Of an aligner that reads passages apart and whose confidence was fitted.
        question (`str` or chat): One question.
        documents, context_embeds, context_word_ids, context_passage_ids, kwargs: As for `SlotPrefixStore.prepare`, of
            one question.

    Returns:
        `dict[int, RankedPassage]`: By the number of the passage, without those that have no text.
    """
    check_max_passages(store.processor, 1)
    given = (documents, context_embeds, context_word_ids, context_passage_ids)
    (passages,) = passages_of_questions(*given, True, 1, store.processor.context_words)
    alone, watch, ranked = passages_apart(passages), AnswerConfidence(store.model, store.processor), {}
    for start in range(0, len(alone), RANKED_AT_ONCE):
        numbers = list(alone)[start : start + RANKED_AT_ONCE]
        own = [alone[number] for number in numbers]
        if documents is None:
            words = None if context_word_ids is None else [each.context_word_ids for each in own]
            slots = {"context_embeds": [each.context_embeds for each in own], "context_word_ids": words}
        else:
            slots = {"documents": own}
        inputs = store.prepare([question] * len(own), **slots, **kwargs)
        ids, mask, cache = (inputs.pop(name) for name in ("input_ids", "attention_mask", "past_key_values"))
        positions = store.model.prompt_positions(ids, mask, inputs["context_passage_ids"])
        new = {"input_ids": ids, "position_ids": positions}
        new = {name: each[:, cache.get_seq_length() :] for name, each in new.items()}
        with watch:
            store.model.model(**new, attention_mask=mask, past_key_values=cache)
            sure = watch.of_states().tolist()
        ranked |= zip(numbers, map(RankedPassage, sure, map(bool, inputs.num_kept)), strict=True)
    return ranked
