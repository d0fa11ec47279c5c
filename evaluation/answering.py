"""Questions to prompts: the user's turn and the model's inputs.

The prompt with the passages' text differs from the one with slots in the passages alone.
"""

from typing import Any

from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor

Row = dict[str, Any]
MAX_NEW_TOKENS = 24


def closed_book_text(row: Row) -> str:
    """The user's turn without a passage."""
    return QUESTION_LINE.lstrip() + row["question"]


def passages_text(row: Row) -> str:
    """The passages, titles as the encoder reads them."""
    return " ".join(
        f"{passage['title']}: {passage['text']}" if passage["title"] else passage["text"] for passage in row["passages"]
    )


def text_prompt(row: Row, context: str) -> str:
    """The user's turn with text that stands for the passages; where there is none, as without a passage."""
    return f"{BACKGROUND_LINE}{context}{QUESTION_LINE}{row['question']}" if context else closed_book_text(row)


def full_text(row: Row) -> str:
    """The user's turn with the passages' whole text."""
    return text_prompt(row, passages_text(row))


def text_inputs(processor: ArcAlignerProcessor, contents: list[str]):
    """Prompts of the user's turns `contents`, left-padded: `input_ids` and `attention_mask` (batch, seq_len)."""
    return _render(processor, [[{"role": "user", "content": content}] for content in contents])


def slot_inputs(processor: ArcAlignerProcessor, rows: list[Row], with_passages: bool = True, **slot_budget: Any):
    """Prompts with slots, left-padded, and `context_embeds` (batch, max_slots, encoder_hidden_size).

    `slot_budget` are the processor's `max_slots` and `slot_policy`.
    """
    conversations = [[{"role": "user", "content": row["question"]}] for row in rows]
    documents = [row["passages"] if with_passages else [] for row in rows]
    return _render(processor, conversations, documents=documents, **slot_budget)


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
