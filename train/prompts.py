"""Prompts of questions about passages, as text or as slots, and greedy answers to them: what validation, evaluation and
benchmarks share."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import tqdm

from ..answering_arcaligner import AnswerConfidence, CopyBonus, likeliest, rank_passages
from ..common.rows import Row
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor

MAX_NEW_TOKENS = 24


def passages_text(row: Row) -> str:
    """The passages with their titles, as the encoder reads them."""
    return " ".join(
        f"{passage['title']}: {passage['text']}" if passage["title"] else passage["text"] for passage in row["passages"]
    )


def text_prompt(row: Row, context: str) -> str:
    """The user's turn with a text instead of slots; without a text, the question alone."""
    question = QUESTION_LINE + row["question"]
    return BACKGROUND_LINE + context + question if context else question.lstrip()


def full_text(row: Row) -> str:
    """The user's turn with the whole text of the passages."""
    return text_prompt(row, passages_text(row))


def text_inputs(processor: ArcAlignerProcessor, contents: list[str], **slots: Any):
    """Prompts of the user's turns `contents`, left-padded: `input_ids` and `attention_mask` (batch, seq_len)."""
    return processor.apply_chat_template(
        [[{"role": "user", "content": content}] for content in contents],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
        **slots,
    )


def slot_inputs(processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str | None = None):
    """Prompts with slots, left-padded, and `context_embeds` (batch, max_slots, encoder_hidden_size)."""
    documents = [row["passages"] for row in rows]
    questions = [row["question"] for row in rows]
    return text_inputs(processor, questions, documents=documents, tokens_per_slot=tokens_per_slot)


def text_ids(processor: ArcAlignerProcessor, row: Row) -> tuple[list[int], list[int]]:
    """The prompt with the passages' text, cut where the question begins: what is before it can be kept."""
    before, after = processor.split_prompt([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
    return processor.tokenize_prompt(before + passages_text(row)), processor.tokenize_prompt(after)


class ApartText(NamedTuple):
    """Ids of a prompt of text whose passages do not read each other, as the slots of `passage_attention` "separate":
    the text before the passages, each passage, and the text after them."""

    head: list[int]
    passages: list[list[int]]
    tail: list[int]

    @classmethod
    def of(cls, row: Row, before: str, after: str, tokenize: Callable[[str], list[int]]) -> "ApartText":
        """The passages of `row` between the parts of its prompt, each tokenized by itself."""
        passages = [tokenize(passages_text({"passages": [passage]})) for passage in row["passages"]]
        return cls(tokenize(before), passages, tokenize(after))

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.head, *itertools.chain.from_iterable(self.passages), *self.tail]

    @property
    def passage_ids(self) -> list[int]:
        """The number of the passage of each of `ids`, -1 before and after the passages."""
        numbers = (number for number, ids in enumerate(self.passages) for _ in ids)
        return [-1] * len(self.head) + [*numbers] + [-1] * len(self.tail)


@torch.inference_mode()
def with_likeliest(store, rows: list[Row], max_passages: int, **settings: Any) -> list[Row]:
    """The rows, each with those of its passages that most likely answer, where it has more; `store` and `settings` as
    for `rank_passages`."""
    chosen = []
    for row in tqdm(rows, desc="asking about each passage", leave=False, disable=len(rows) == 1):
        if len(row["passages"]) > max_passages:
            (ranked,) = rank_passages(store, [row["question"]], [row["passages"]], **settings)
            row = row | {"passages": [row["passages"][number] for number in likeliest(ranked, max_passages)]}
        chosen.append(row)
    return chosen


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
