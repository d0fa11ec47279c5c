"""Questions with k passages as prompts of text and of slots, each cut where the question begins.

    prefix   the turn's opening, "Refer to the background document: " and the passages, as text or as slots
    tail     "Question: ..." and the opening of the answer

Before the question nothing depends on it, so the keys and values of a prefix serve any number of questions.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..evaluation.answering import passages_text
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor

Row = dict[str, Any]
TOKENS_PER_PASSAGE = 150
TOKENS_PER_SLOT = 24  # of a shape without an encoder: the paper's rate
_MARK = "\x00"


@dataclass
class Ids:
    """Rows of ids, left-padded: `input_ids` and `attention_mask`, both (batch, seq_len)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions that padding does not count in."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return self.attention_mask.sum(dim=1).tolist()

    def then(self, tail: "Ids") -> "Ids":
        """These columns and those of `tail`, as they stand when `tail` follows a cache of these."""
        ids = torch.cat([self.input_ids, tail.input_ids], dim=1)
        return Ids(ids, torch.cat([self.attention_mask, tail.attention_mask], dim=1))

    def to(self, device: str) -> "Ids":
        """The same on `device`."""
        return Ids(self.input_ids.to(device), self.attention_mask.to(device))


@dataclass
class Prompts:
    """A batch of prompts, whole and in two parts; with slots, their embeddings (batch, max_slots, width)."""

    whole: Ids
    prefix: Ids
    tail: Ids
    context_embeds: torch.Tensor | None = None

    def to(self, device: str) -> "Prompts":
        """The same on `device`."""
        embeds = None if self.context_embeds is None else self.context_embeds.to(device)
        return Prompts(self.whole.to(device), self.prefix.to(device), self.tail.to(device), embeds)


def pick_rows(rows: list[Row], processor: ArcAlignerProcessor, k: int, batch_size: int) -> list[Row]:
    """
    `batch_size` rows with `k` passages each, of about `TOKENS_PER_PASSAGE` tokens.

    The passages nearest to that length are taken, each with its own question; the passages of the next rows follow it.

    Raises:
        `ValueError`: fewer than `k` passages.
    """
    own = [(row, passage) for row in rows if row["question"] for passage in row["passages"]]
    if len(own) < k:
        raise ValueError(
            f"Found {len(own)} passages with a question; {k} passages in a prompt need at least as many. Name larger "
            "`--data`, or fewer passages in `--sizes`."
        )
    counts = [len(ids) for ids in processor.tokenizer([passage["text"] for _, passage in own])["input_ids"]]
    nearest = sorted(range(len(own)), key=lambda index: (abs(counts[index] - TOKENS_PER_PASSAGE), index))
    own = [own[index] for index in nearest[: k + batch_size - 1]]
    return [
        {
            "question": own[number % len(own)][0]["question"],
            "passages": [own[(number + offset) % len(own)][1] for offset in range(k)],
        }
        for number in range(batch_size)
    ]


def turn_around_context(processor: ArcAlignerProcessor, question: str) -> list[str]:
    """The text of a prompt before and after what stands for the passages."""
    content = f"{BACKGROUND_LINE}{_MARK}{QUESTION_LINE}{question}"
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text.split(_MARK)


def make_prompts(
    processor: ArcAlignerProcessor, prefixes: list[list[int]], tails: list[list[int]], embeds: list | None = None
) -> Prompts:
    """Prompts of the ids before and after the place where the question begins."""
    whole = [prefix + tail for prefix, tail in zip(prefixes, tails, strict=True)]
    parts = [_pad(processor, rows) for rows in (whole, prefixes, tails)]
    padded = None if embeds is None else torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
    return Prompts(*parts, padded)


def _pad(processor: ArcAlignerProcessor, rows: list[list[int]]) -> Ids:
    width = max(map(len, rows))
    pad = processor.tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Ids(ids, mask)


def both_prompts(
    processor: ArcAlignerProcessor, rows: list[Row], embeds: list[torch.Tensor], vocab_size: int
) -> tuple[Prompts, Prompts]:
    """
    Prompts with the passages' text and with slots, of the same questions.

    Args:
        processor ([`ArcAlignerProcessor`]): With the tokenizer.
        rows (`list[dict]`): `question` and `passages`.
        embeds (`list[torch.Tensor]`): Embeddings of each row, (num_slots, width).
        vocab_size (`int`): Of the backbone: a shape whose own tokenizer is not there takes ids modulo this.
    """
    text_prefixes, slot_prefixes, tails = [], [], []
    for row, row_embeds in zip(rows, embeds, strict=True):
        before, after = turn_around_context(processor, row["question"])
        ids = {
            name: [token % vocab_size for token in processor.build_prompt(text, 0, "", add_special_tokens=False)]
            for name, text in (("text", before + passages_text(row)), ("before", before), ("after", after))
        }
        text_prefixes.append(ids["text"])
        slot_prefixes.append(ids["before"] + [processor.context_token_id] * len(row_embeds))
        tails.append(ids["after"])
    text = make_prompts(processor, text_prefixes, tails)
    return text, make_prompts(processor, slot_prefixes, tails, embeds)


def random_embeds(processor: ArcAlignerProcessor, rows: list[Row], width: int) -> list[torch.Tensor]:
    """Random unit vectors, one for `TOKENS_PER_SLOT` tokens: (num_slots, width) for each row."""
    generator = torch.Generator().manual_seed(0)
    counts = [len(ids) for ids in processor.tokenizer([passages_text(row) for row in rows])["input_ids"]]
    embeds = [torch.randn(math.ceil(count / TOKENS_PER_SLOT), width, generator=generator) for count in counts]
    return [torch.nn.functional.normalize(each, dim=-1) for each in embeds]
