"""Questions to answers: the prompts of the ways to answer, and greedy generation in batches of like length.

The prompt with the passages' text differs from the one with slots in the passages alone.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import track

from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor

Row = dict[str, Any]
Batch = tuple[list[int], Any]
MAX_NEW_TOKENS = 24


def closed_book_text(row: Row) -> str:
    """The user's turn without a passage."""
    return QUESTION_LINE.lstrip() + row["question"]


def passages_text(row: Row) -> str:
    """The passages, titles as the encoder reads them."""
    return " ".join(
        f"{passage['title']}: {passage['text']}" if passage["title"] else passage["text"] for passage in row["passages"]
    )


def full_text(row: Row) -> str:
    """The user's turn with the passages as text."""
    return BACKGROUND_LINE + passages_text(row) + QUESTION_LINE + row["question"]


def text_inputs(processor: ArcAlignerProcessor, rows: list[Row], content: Callable[[Row], str]):
    """Prompts without slots, left-padded: `input_ids` and `attention_mask` (batch, seq_len)."""
    return _render(processor, [[{"role": "user", "content": content(row)}] for row in rows])


def slot_inputs(processor: ArcAlignerProcessor, rows: list[Row], with_passages: bool = True):
    """Prompts with slots, left-padded, and `context_embeds` (batch, max_slots, encoder_hidden_size)."""
    conversations = [[{"role": "user", "content": row["question"]}] for row in rows]
    return _render(processor, conversations, documents=[row["passages"] if with_passages else [] for row in rows])


def _render(processor: ArcAlignerProcessor, conversations: list, **kwargs: Any):
    return processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
        **kwargs,
    )


def batches_by_length(rows: list[Row], batch_size: int) -> Iterator[list[int]]:
    """Indices of `rows`, those of like passage length together."""
    lengths = [sum(len(passage["text"]) for passage in row["passages"]) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: lengths[index])
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def predict(model, processor: ArcAlignerProcessor, batches: list[Batch], name: str) -> tuple[list[str], float]:
    """Greedy answers in the rows' order, and the seconds they took to generate, behind a progress bar."""
    answers: dict[int, str] = {}
    seconds = 0.0
    for indices, inputs in track(batches, description=name):
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        seconds += time.perf_counter() - start
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update(zip(indices, (text.strip() for text in texts), strict=True))
    return [answers[index] for index in range(len(answers))], seconds
