"""How sure an answer is, and the sentence that stands for "the passages do not say".

    log-odds of the tokens that `generate` chose, and of the sentence `no_answer`  ->  confidence in (0, 1)

Beyond the paper. An aligner that was trained with questions which their passages do not answer says a fixed sentence
there, the processor's `no_answer`. Two numbers tell how near an answer was to that: the probability that the model
begins this sentence, and how likely the tokens of the answer were. A logistic regression on held-out questions weighs
them (`confidence_weights` of the processor), so that of the answers with confidence 0.7 about seven in ten are right.
"""

import math

import torch
from transformers import LogitsProcessor


def check_no_answer(processor, what: str = "A confidence") -> None:
    """Raises `ValueError` for an aligner that has not learned to say that the passages do not answer."""
    if processor.no_answer is None:
        raise ValueError(
            f"{what} needs an aligner that was trained with questions which its passages do not answer, and this one's "
            "processor has no `no_answer`. Train with `unanswerable` in the recipe, or leave it out."
        )


def check_min_confidence(processor, min_confidence: float) -> None:
    """Raises `ValueError` unless it is a share, of an aligner that can refuse."""
    is_number = isinstance(min_confidence, int | float) and not isinstance(min_confidence, bool)
    if not is_number or not 0.0 <= min_confidence <= 1.0:
        raise ValueError(f"`min_confidence` is {min_confidence!r}; expected a number from 0 to 1.")
    check_no_answer(processor, "`min_confidence`")


class AnswerConfidence(LogitsProcessor):
    """
    Watches `generate` and tells how sure each answer is; changes no score. For one call, greedy or sampled.

    Args:
        processor ([`ArcAlignerProcessor`]): Its `no_answer`, `confidence_weights` and tokenizer.

    Example:

    ```python
    >>> watch = AnswerConfidence(processor)
    >>> ids = model.generate(**inputs, logits_processor=[watch])
    >>> watch.of(ids[:, inputs["input_ids"].shape[1] :])
    [0.93]
    ```

    Raises:
        `ValueError`: a processor without `no_answer`.
    """

    def __init__(self, processor):
        check_no_answer(processor)
        self.weights = processor.confidence_weights
        self.first_id = processor.tokenizer(processor.no_answer, add_special_tokens=False)["input_ids"][0]
        self.end_id = processor.tokenizer.eos_token_id
        self.refused: torch.Tensor | None = None  # (batch,), log-probability of beginning `no_answer`
        self._calls = 0
        self._chosen: list[torch.Tensor] = []  # each (batch,), log-probability of a token
        self._last: torch.Tensor | None = None  # (batch, vocab_size)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self._last is None:
            self.refused = scores.float().log_softmax(dim=-1)[:, self.first_id]
        elif len(self._chosen) < self._calls:
            self._choose(input_ids[:, -1])
        self._calls += 1
        self._last = scores.float().log_softmax(dim=-1)
        return scores

    def _choose(self, ids: torch.LongTensor) -> None:
        self._chosen.append(self._last.gather(1, ids[:, None])[:, 0])

    def features(self, new_ids: torch.LongTensor) -> list[tuple[float, float]]:
        """Of each answer, `new_ids` (batch, new_tokens), all that were generated until now: the log-odds that it is
        one, and the mean log-probability of its tokens, the end included."""
        if len(self._chosen) < self._calls:
            self._choose(new_ids[:, -1])
        chosen = torch.stack(self._chosen, dim=1)  # (batch, new_tokens)
        is_end = new_ids == self.end_id
        is_answer = is_end.long().cumsum(dim=1) - is_end.long() == 0  # up to the first end
        means = torch.where(is_answer, chosen, 0.0).sum(dim=1) / is_answer.sum(dim=1)
        refused = self.refused.clamp(-30.0, -1e-6)
        odds = torch.log1p(-refused.exp()) - refused
        return list(zip(odds.tolist(), means.tolist(), strict=True))

    def of(self, new_ids: torch.LongTensor) -> list[float]:
        """The confidence of each answer, `new_ids` (batch, new_tokens), from 0 to 1."""
        return [confidence(*each, weights=self.weights) for each in self.features(new_ids)]


def confidence(odds: float, mean: float, weights: list[float] | None) -> float:
    """The confidence of an answer with these log-odds against `no_answer` and this mean log-probability of a token:
    calibrated by `weights`, else the product of both probabilities."""
    if weights is None:
        return math.exp(mean) / (1 + math.exp(-odds))
    bias, of_odds, of_mean = weights
    return 1 / (1 + math.exp(-(bias + of_odds * odds + of_mean * mean)))
