"""Prompts of questions about passages, as text or as slots, and greedy answers to them. Validation, evaluation and
benchmarks share this module."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.utils import tqdm

from ..answering_arcaligner import Answerer, chat_inputs
from ..common.rows import Row
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor
from ..zoom_arcaligner import inputs_of, zoom_in


def passages_text(row: Row) -> str:
    """The passages with their titles, as the encoder gets them."""
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


def question_prompt(row: Row) -> str:
    """The user's turn that asks the model to write a question about the passages, instead of answering one."""
    request = "Write a short answer from the background, then the question it answers."
    return f"{BACKGROUND_LINE}{passages_text(row)}\n{request}"


def text_inputs(processor: ArcAlignerProcessor, contents: list[str], **slots: Any):
    """Prompts of the user's turns `contents`, left-padded: `input_ids` and `attention_mask` (batch, seq_len)."""
    return chat_inputs(processor, [[{"role": "user", "content": content}] for content in contents], **slots)


def slot_inputs(processor: ArcAlignerProcessor, rows: list[Row], tokens_per_slot: int | str | None = None):
    """Prompts with slots: `input_ids` and `attention_mask` (batch, seq_len), left-padded, and `context_embeds` (batch,
    max_slots, encoder_hidden_size)."""
    documents = [row["passages"] for row in rows]
    questions = [row["question"] for row in rows]
    return text_inputs(processor, questions, documents=documents, tokens_per_slot=tokens_per_slot)


def zoomed_inputs(
    model,
    processor: ArcAlignerProcessor,
    rows: list[Row],
    inputs: dict[str, Any],
    tokens_per_slot: int | str,
    zoom: float,
    **settings: Any,
):
    """The prompts of `rows` with finer slots, after the model has read `inputs`, which are those of `slot_inputs` on
    its device; other arguments as for [`zoom_in`]."""
    passages = [row["passages"] for row in rows]
    zoomed = zoom_in(model, processor, inputs, passages, tokens_per_slot, zoom, **settings)
    return text_inputs(processor, [row["question"] for row in rows], **inputs_of(zoomed)).to(model.device)


def text_ids(processor: ArcAlignerProcessor, row: Row) -> tuple[list[int], list[int]]:
    """The prompt with the passages' text, cut where the question begins, so that the first part can be cached."""
    before, after = processor.split_prompt([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
    return processor.tokenize_prompt(before + passages_text(row)), processor.tokenize_prompt(after)


class IndependentText(NamedTuple):
    """Ids of a prompt of text whose passages do not attend to each other, like the slots of `passage_attention`
    "separate": the text before the passages, each passage, and the text after them."""

    prefix_ids: list[int]
    passages: list[list[int]]
    suffix_ids: list[int]

    @classmethod
    def of(cls, row: Row, before: str, after: str, tokenize: Callable[[str], list[int]]) -> "IndependentText":
        """From the passages of `row`, and the prompt `before` and `after` them. All parts are tokenized separately."""
        passages = [tokenize(passages_text({"passages": [passage]})) for passage in row["passages"]]
        return cls(tokenize(before), passages, tokenize(after))

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.prefix_ids, *itertools.chain.from_iterable(self.passages), *self.suffix_ids]

    @property
    def passage_ids(self) -> list[int]:
        """For each of `ids` the index of its passage, or -1 before and after the passages."""
        numbers = (number for number, ids in enumerate(self.passages) for _ in ids)
        return [-1] * len(self.prefix_ids) + [*numbers] + [-1] * len(self.suffix_ids)


@torch.inference_mode()
def with_selected(answerer: Answerer, rows: list[Row], max_passages: int | None, **settings: Any) -> list[Row]:
    """The rows with at most `max_passages` passages each, or, with `None`, as many as the question needs, as
    `Answerer.select` selects them; `settings` as for `Answerer.score`. Where passages are weighted, the row has their
    `prior`."""
    selected = []
    for row in tqdm(rows, desc="scoring passages", leave=False, disable=len(rows) == 1):
        (selection,) = answerer.select([row["question"]], [row["passages"]], max_passages, **settings)
        row = row | {"passages": [row["passages"][number] for number in selection.numbers]}
        if selection.prior is not None:
            row["prior"] = [selection.prior[number] for number in selection.numbers]
        selected.append(row)
    return selected
