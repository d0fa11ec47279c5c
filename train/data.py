"""Makes tokenized examples of rows, slots and turns that read them, and batches of examples.

In stages 0 and I, a row (`corpora.py`) becomes an example for every few consecutive segments of its passages: the
slots, then a turn that gives their text back and, if asked for, one that continues with the text that follows. In
stages II and III, the questions about the same passages become one example: the slots of all segments, and after them
a turn for each question with its first answer. Questions that do not fit into `max_tokens` become a further example.

How many slots a segment has is decided later: the collator draws the rate of each batch. So an example keeps its
segments' tokens, and the prompt before and after the slots. The encoder runs in the training step.
"""

import itertools
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Features, List, Value
from torch.nn.utils.rnn import pad_sequence

from ..common.files import stable_number
from ..common.rows import Row
from ..configuration_arcaligner import ArcAlignerConfig
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE, ArcAlignerProcessor
from ..segmentation_arcaligner import EMPTY_SEGMENT, SegmentTokens, equal_runs, run_ends, tokenize_segments
from ..slot_rows_arcaligner import pad_words

# The paper's Table "Stage-I instruction templates", in its order. A template there reads "... [B] ... [T]": the slots
# stand for [B], and [T] is what the assistant says. Here are the user's words before and after the slots; the full
# stop after [T] is the target's own. The prompt of stages II and III is the processor's, the same as at inference.
RECONSTRUCTION_TEMPLATES = (
    ("Background: ", ". This is equivalent to:"),
    ("Rewrite the background in your own words: ", " →"),
    ("Provide a restatement of the background: ", ". Return:"),
    ("", " is a paraphrase of what? Answer with:"),
    ("These two expressions convey the same meaning: (1) ", " (2)"),
    ("Restate ", " using a single sentence. Output only"),
)
# Not in the paper: what follows the slots in a turn that continues with the text after theirs.
CONTINUATION = " Continue:"
# Minimum weight of a word, so that a slot of frequent words only has a weight as well.
MIN_RARITY = 0.02

EXAMPLE_FEATURES = Features(
    row_id=Value("string"),
    head=List(Value("int32")),
    turns=List({"input_ids": List(Value("int32")), "labels": List(Value("int32"))}),
    segments=List(
        {
            "document": Value("int32"),
            "encoder_text": Value("string"),
            "encoder_start": Value("int32"),
            "word_ids": List(Value("int32")),
            "word_ends": List(Value("int32")),
        }
    ),
    length=Value("int32"),
    answers=List(List(Value("string"))),
)


@dataclass
class Turn:
    """Ids from the slots to the end of the assistant's turn, and labels: what the assistant says, -100 elsewhere."""

    input_ids: list[int]
    labels: list[int]


@dataclass
class Example:
    """Slots and the turns that read them.

    Turns stand side by side: each reads the slots and itself, and no other turn. `length` counts tokens at the rate
    with the most slots. `answers` are all right answers to each turn's question, if it asks one.
    """

    row_id: str
    head: list[int]
    turns: list[Turn]
    segments: list[dict[str, Any]]
    length: int = 0
    answers: list[list[str]] = field(default_factory=list)


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


def choose_template(example_id: str) -> tuple[str, str]:
    """The stage-I template of an example, fixed by its id."""
    return RECONSTRUCTION_TEMPLATES[stable_number(f"template:{example_id}", len(RECONSTRUCTION_TEMPLATES))]


def chunk_segments(segments: list[Any], max_segments: int, row_id: str) -> Iterator[list[Any]]:
    """Consecutive runs of 1 to `max_segments` segments of one document, fixed by `row_id`."""
    start = 0
    while start < len(segments):
        size = 1 + stable_number(f"chunk:{row_id}:{start}", max_segments)
        yield segments[start : start + size]
        start += size


@dataclass
class ExampleBuilder:
    """
    Turns rows into examples, with the prompt the processor writes at inference.

    Args:
        processor ([`ArcAlignerProcessor`]): Tokenizer, chat template and segmenter.
        max_segments (`int`): Maximum number of segments of a reconstruction example, at least 1.
        continues (`bool`): Whether a reconstruction example has a second turn, which continues with the next segment.
        tokens_per_slot (`Sequence`): The rates that batches will have. The finest decides how long examples are.
        max_tokens (`int`, *optional*): Questions about the same passages share an example up to this length.
    """

    processor: ArcAlignerProcessor
    max_segments: int = 1
    continues: bool = False
    tokens_per_slot: Sequence[int | str] = ("segment",)
    max_tokens: int | None = None

    def __post_init__(self):
        if self.max_segments < 1:
            raise ValueError(f"`max_segments` is {self.max_segments}; an example needs at least 1 segment.")
        self.finest_rate = min(self.tokens_per_slot, key=lambda rate: math.inf if rate == "segment" else rate)

    def reconstruction_examples(self, rows: list[dict[str, Any]]) -> Iterator[Example]:
        """Stages 0 and I: each run of segments as slots, its text as the target, and the text that follows."""
        for row in rows:
            documents = row["passages"]
            tokens = self._tokens(documents)
            for document, group in itertools.groupby(tokens, key=lambda each: each.segment.document):
                segments, start = list(group), 0
                for chunk in chunk_segments(segments, self.max_segments, f"{row['id']}:{document}"):
                    start += len(chunk)
                    yield self.reconstruction_example(
                        row["id"], documents[document], chunk, segments[start : start + 1]
                    )

    def reconstruction_example(
        self, row_id: str, document: dict, chunk: list[SegmentTokens], following: list[SegmentTokens]
    ) -> Example:
        """Consecutive segments of a document as slots; their text and that of the `following` segment as targets."""
        first, last = chunk[0].segment, chunk[-1].segment
        before, after = choose_template(f"{row_id}:{first.document}:{first.start}")
        text = document["text"][first.start : last.end].strip()
        head, turn = self._turn(before, after, text, row_id)
        turns = [turn]
        if self.continues and following:
            # The words before the slots are shared: only what comes after them tells the two turns apart.
            _, turn = self._turn(before, CONTINUATION, following[0].segment.text.strip(), row_id)
            turns.append(turn)
        return self._example(row_id, head, turns, chunk)

    def question_examples(self, rows: list[dict[str, Any]]) -> Iterator[Example]:
        """Stages II and III: the passages that `rows` share as slots, a turn for each question that has an answer."""
        documents = rows[0]["passages"]
        tokens = self._tokens(documents)
        example = None
        for row in rows:
            if not (row["answers"] and (answer := row["answers"][0].strip())):
                continue
            head, turn = self._question_turn(row["question"], answer, row["id"])
            # The slots are paid for once: a further question adds its turn only.
            fits = self.max_tokens is None or (example and example.length + len(turn.input_ids) <= self.max_tokens)
            if example and fits:
                example.turns.append(turn)
                example.answers.append(row["answers"])
                example.length += len(turn.input_ids)
                continue
            if example:
                yield example
            example = self._example(row["id"], head, [turn], tokens, [row["answers"]])
        if example:
            yield example

    def _tokens(self, documents: list[dict[str, str]]) -> list[SegmentTokens]:
        segments = self.processor.slot_encoder.segment_documents(documents)
        return tokenize_segments(self.processor.tokenizer, segments, documents)

    def _example(self, row_id, head, turns, tokens: list[SegmentTokens], answers=None) -> Example:
        """An example; without segments it has one slot, the encoding of the empty string."""
        segments = [
            {
                "document": each.segment.document,
                "encoder_text": each.encoder_text,
                "encoder_start": each.encoder_start,
                "word_ids": list(each.word_ids),
                "word_ends": list(each.word_ends),
            }
            for each in tokens or [EMPTY_SEGMENT]
        ]
        num_slots = sum(len(equal_runs(len(each["word_ids"]), self.finest_rate)) for each in segments)
        length = len(head) + num_slots + sum(len(turn.input_ids) for turn in turns)
        return Example(row_id, head, turns, segments, length, answers or [])

    def _turn(self, before: str, after: str, target: str, row_id: str) -> tuple[list[int], Turn]:
        """The ids before the slots, and the turn after them; `before` and `after` are the user's words."""
        mark = uuid.uuid4().hex
        messages = [
            {"role": "user", "content": before + mark + after},
            {"role": "assistant", "content": target},
        ]
        return self._split(
            row_id,
            self.processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True).split(mark),
            self.processor.apply_chat_template(messages, tokenize=False).split(mark),
        )

    def _question_turn(self, question: str, answer: str, row_id: str) -> tuple[list[int], Turn]:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return self._split(
            row_id,
            self.processor.split_prompt(messages[:1], add_generation_prompt=True),
            self.processor.split_prompt(messages),
        )

    def _split(self, row_id: str, prompt: Sequence[str], whole: Sequence[str]) -> tuple[list[int], Turn]:
        """Labels on what the assistant says and the token that ends its turn, nothing else."""
        tokenize = self.processor.tokenize_prompt
        head, asked, said = tokenize(prompt[0]), tokenize(prompt[1]), tokenize(whole[1])
        if prompt[0] != whole[0] or said[: len(asked)] != asked:
            raise ValueError(
                f"Row {row_id}: the prompt {prompt!r} is not how the whole conversation {whole!r} begins, so the "
                "target cannot be told from the prompt. Name another `chat_template_path`."
            )
        target = self._end_of_turn(said[len(asked) :])
        return head, Turn(asked + target, [-100] * len(asked) + target)

    def _end_of_turn(self, target: list[int]) -> list[int]:
        """Cuts what follows the end of the turn; adds EOS if the template has no end."""
        tokenizer = self.processor.tokenizer
        special = set(tokenizer.all_special_ids)
        special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        end = len(target)
        while end and target[end - 1] not in special and not tokenizer.decode(target[end - 1 : end]).strip():
            end -= 1
        target = target[:end]
        return target if target and target[-1] in special else [*target, tokenizer.eos_token_id]


def word_rarity(examples: Sequence[dict[str, Any]], vocab_size: int) -> np.ndarray:
    """Inverse document frequency of each token over the segments of `examples`, scaled to (0, 1]; (vocab_size,)."""
    counts, num_segments = np.zeros(vocab_size), 0
    for example in examples:
        for segment in example["segments"]:
            counts[np.unique(segment["word_ids"]).astype(np.int64)] += 1
            num_segments += 1
    rarity = np.log((num_segments + 1) / (counts + 1)) / math.log(num_segments + 1)
    return np.maximum(rarity, MIN_RARITY)


# Examples to a batch


@dataclass
class ContextCollator:
    """
    Makes a padded batch of examples. A rate drawn for it decides how many slots they have.

    Args:
        context_token_id (`int`): The id that marks a slot.
        pad_token_id (`int`): Fills `input_ids`.
        tokens_per_slot (`Sequence`): The rates. The ids of a batch's rows choose its rate, so that a resumed run draws
            the same ones.
        context_words (`bool`): Whether the slots' words are in the batch.
        padding_side (`str`): `"left"` for prompts to generate from.

    Returns a dictionary of

    - `input_ids`, `labels`: `torch.LongTensor` (batch, seq_len), labels -100 where nothing is learned;
    - `turn_ids`: `torch.LongTensor` (batch, seq_len), 0 before the turns, slots included, 1, 2, ... in the turns, -1 in
      padding; see `turn_mask` in `trainer.py`;
    - `max_turns`: `int`, the maximum number of turns of a row;
    - `encoder_texts`, `encoder_starts`, `encoder_ends`: what `SentenceEncoder.encode_runs` takes, of all rows in
      order; `encoder_ends` is `None` where each text is one slot;
    - `num_slots`: `list[int]`, of each row;
    - `context_word_ids`: `torch.LongTensor` (batch, max_slots, max_words), with `context_words`;
    - `context_passage_ids`: `torch.LongTensor` (batch, max_slots), the number of each slot's passage, -1 in padding;
    - `row_ids`: `list[str]`, for error messages.
    """

    context_token_id: int
    pad_token_id: int
    tokens_per_slot: Sequence[int | str] = ("segment",)
    context_words: bool = False
    padding_side: str = "right"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        row_ids = [row["row_id"] for row in rows]
        # One rate for a batch, so that its rows are about as long; drawn by ids, as no generator has to be kept then.
        rate = self.tokens_per_slot[stable_number("rate:" + ":".join(row_ids), len(self.tokens_per_slot))]
        slots = [_slots(row, rate) for row in rows]
        ids, labels, turns = [], [], []
        for row, row_slots in zip(rows, slots, strict=True):
            before = row["head"] + [self.context_token_id] * len(row_slots)
            ids.append(before + [each for turn in row["turns"] for each in turn["input_ids"]])
            labels.append([-100] * len(before) + [each for turn in row["turns"] for each in turn["labels"]])
            turns.append([0] * len(before))
            for number, turn in enumerate(row["turns"], start=1):
                turns[-1] += [number] * len(turn["input_ids"])
        segments = [segment for row in rows for segment in row["segments"]]
        ends = [run_ends(segment["encoder_start"], segment["word_ends"], rate) for segment in segments]
        batch = {
            "input_ids": _padded(ids, self.pad_token_id, self.padding_side),
            "labels": _padded(labels, -100, self.padding_side),
            "turn_ids": _padded(turns, -1, self.padding_side),
            "max_turns": max(len(row["turns"]) for row in rows),
            "encoder_texts": [segment["encoder_text"] for segment in segments],
            "encoder_starts": [segment["encoder_start"] for segment in segments],
            "encoder_ends": None if rate == "segment" else ends,
            "num_slots": [len(row_slots) for row_slots in slots],
            "context_passage_ids": _padded([[passage for passage, _ in row_slots] for row_slots in slots], -1),
            "row_ids": row_ids,
        }
        if self.context_words:
            words = [_padded([own for _, own in row_slots], -1) for row_slots in slots]  # each (num_slots, max_words)
            batch["context_word_ids"] = pad_words(words)
        return batch


def read_slots(config: ArcAlignerConfig, batch: dict[str, Any], embeds: torch.FloatTensor) -> dict[str, torch.Tensor]:
    """What a model of `config` reads in the slots of a batch with `embeds`, as its keyword arguments."""
    slots = {"context_embeds": embeds}
    if config.word_parts:
        slots["context_word_ids"] = batch["context_word_ids"]
    if config.passage_attention == "separate":
        slots["context_passage_ids"] = batch["context_passage_ids"]
    return slots


def encode_slots(processor: ArcAlignerProcessor, batch: dict[str, Any]) -> torch.FloatTensor:
    """Context embeddings of a batch of [`ContextCollator`], (batch, max_slots, encoder_hidden_size), with a gradient
    where the encoder's weights ask for one."""
    embeds = processor.encoder.encode_runs(batch["encoder_texts"], batch["encoder_starts"], batch["encoder_ends"])
    return pad_sequence(embeds.split(batch["num_slots"]), batch_first=True)


def _slots(row: dict[str, Any], rate: int | str) -> list[tuple[int, list[int]]]:
    """The number of the passage and the words of each slot of a row."""
    return [
        (segment["document"], segment["word_ids"][start:end])
        for segment in row["segments"]
        for start, end in equal_runs(len(segment["word_ids"]), rate)
    ]


def _padded(rows: list[list[int]], value: int, side: str = "right") -> torch.LongTensor:
    """Lists as the rows of a tensor (rows, longest)."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
