"""What a run logs besides its loss: EM and F1 of answers, open gates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import tqdm

from ..common.rows import Row
from ..pipeline_arcaligner import AnswerConfidence, CopyBonus, RankedPassage, likeliest, rank_passages
from .data import ContextCollator

MAX_NEW_TOKENS = 24


class GateCounter:
    """Refinement steps of slots since the last log."""

    def __init__(self):
        self._counts: torch.Tensor | None = None  # (num_layers, 2): refinement steps, slots with one or more
        self._num_slots = 0

    def add(self, depths: torch.Tensor) -> None:
        """`depths` (batch, num_layers, max_slots): refinement steps, -1 where there is no slot."""
        steps = depths.clamp(min=0)
        counts = torch.stack([steps.sum(dim=(0, 2)), (steps > 0).sum(dim=(0, 2))], dim=1).double()
        self._counts = counts if self._counts is None else self._counts + counts
        self._num_slots += int((depths[:, 0] >= 0).sum())

    def pop(self, accelerator: Accelerator) -> dict[str, float]:
        """Over all processes: mean steps of a slot at a layer, share of open gates, and this share of each layer."""
        if self._counts is None:
            return {}
        counts = accelerator.reduce(self._counts.to(accelerator.device, torch.float32))  # (num_layers, 2)
        num_slots = accelerator.reduce(torch.tensor(float(self._num_slots), device=accelerator.device)).item()
        self._counts, self._num_slots = None, 0
        steps, opened = (counts / max(1.0, num_slots)).T.tolist()
        by_layer = {f"open_gates/layer_{layer}": round(share, 4) for layer, share in enumerate(opened)}
        return {"refinement_steps": sum(steps) / len(steps), "open_gates": sum(opened) / len(opened)} | by_layer


@dataclass
class SwappedSlots:
    """A collator that gives each row the passages of another one. The loss that this adds is what the slots say.

    The other row is the next one of the batch that has other passages. In a batch whose rows all have the same
    passages, it is the first row of the batch before."""

    collator: ContextCollator
    _spare: list | None = None  # segments

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        segments = [row["segments"] for row in rows]
        swapped = []
        for index, row in enumerate(rows):
            others = [*segments[index + 1 :], *segments[:index]]
            other = next((each for each in others if each != segments[index]), self._spare or segments[index])
            swapped.append(row | {"segments": other})
        self._spare = segments[0]
        return self.collator(swapped)


def with_likeliest(rows: list[Row], ranked: list[dict[int, RankedPassage]], max_passages: int) -> list[Row]:
    """The rows, each with those of its passages that most likely answer, where it has more."""
    chosen = []
    for row, each in zip(rows, ranked, strict=True):
        if len(row["passages"]) > max_passages:
            row = row | {"passages": [row["passages"][number] for number in likeliest(each, max_passages)]}
        chosen.append(row)
    return chosen


@torch.inference_mode()
def ranked_passages(store, rows: list[Row], **settings: Any) -> list[dict[int, RankedPassage]]:
    """Of each row how likely each of its passages by itself answers, by number; `store` and `settings` as for
    `rank_passages`."""
    found = []
    for row in tqdm(rows, desc="asking about each passage", leave=False, disable=len(rows) == 1):
        found += rank_passages(store, [row["question"]], [row["passages"]], **settings)
    return found


@torch.inference_mode()
def greedy_answers(
    model,
    processor,
    inputs: dict[str, Any],
    questions: Sequence[str] = (),
    passages: Sequence[list] = (),
    copy_bonus: float | None = None,
    **refinement: Any,
) -> tuple[list[str], list[float | None]]:
    """Greedy answers to left-padded prompts, and of each how likely it is that its passages answer: `None` without
    slots, or where that was not fitted. See [`AnswerConfidence`], which the `questions` and the `passages` of each are
    for; from the latter answers may be copied ([`CopyBonus`])."""
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, **refinement}
    added = [CopyBonus(processor, passages, copy_bonus, model.generation_config.eos_token_id)]
    if processor.answer_probe is None or "context_embeds" not in inputs:
        ids, sure = model.generate(**inputs, **options, logits_processor=added), [None] * len(inputs["input_ids"])
    else:
        with AnswerConfidence(model, processor, zip(questions, passages, strict=True)) as watch:
            ids = model.generate(**inputs, **options, logits_processor=[watch, *added])
        sure = watch.confidence.tolist()
    texts = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts], sure
