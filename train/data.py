"""Training rows: JSON Lines of questions and passages to tokenised examples with slots.

A row of a file (`.jsonl` or `.jsonl.gz`) is

    {"id": str, "question": str, "answers": [str], "passages": [{"title": str, "text": str}], ...}

and becomes, in stage I, one example for every few consecutive segments of its passages (the slots)
with their text as the target; in stages II and III one example with all segments as slots and the
first answer as the target. Tokenising never runs the encoder: a prompt needs the number of its
slots only.
"""

import gzip
import itertools
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from rich.progress import track

from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import Segment
from .embedding_store import EmbeddingStore
from .templates import choose_template, stable_number

logger = logging.getLogger(__name__)

ROW_FIELDS = ("id", "question", "answers", "passages")


@dataclass
class Example:
    """Ids with context tokens, labels, and the texts that the slots stand for, in order."""

    row_id: str
    input_ids: list[int]
    labels: list[int]
    segment_texts: list[str]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, gzipped or not.

    Raises:
        `ValueError`: a line that is no JSON object with `id`, `question`, `answers` and `passages`.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    rows = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                missing = [field for field in ROW_FIELDS if field not in row]
            except (json.JSONDecodeError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not a JSON object: {error}.") from error
            if missing:
                raise ValueError(f"{path}, line {number} has no {', '.join(missing)}; a row needs {ROW_FIELDS}.")
            rows.append(row)
    return rows


def chunk_segments(segments: list[Segment], max_segments: int, row_id: str) -> Iterator[list[Segment]]:
    """Consecutive runs of 1 to `max_segments` segments of one document, fixed by `row_id`."""
    start = 0
    while start < len(segments):
        size = 1 + stable_number(f"chunk:{row_id}:{start}", max_segments)
        yield segments[start : start + size]
        start += size


class ExampleBuilder:
    """
    Turns rows into examples, with the prompt the processor writes at inference.

    Args:
        processor ([`ArcAlignerProcessor`]): Tokenizer, chat template and segmenter.
        max_segments (`int`): The most segments of a reconstruction example, at least 1.

    Raises:
        `ValueError`: a chat template whose prompt is not the beginning of the whole conversation.
    """

    def __init__(self, processor: ArcAlignerProcessor, max_segments: int = 1):
        if max_segments < 1:
            raise ValueError(f"`max_segments` is {max_segments}; an example needs at least 1 segment.")
        self.processor = processor
        self.max_segments = max_segments
        self._segments_of: dict[tuple, list[Segment]] = {}

    def reconstruction_examples(self, row: dict[str, Any]) -> Iterator[Example]:
        """Stage I: each run of segments as slots, its text as the target."""
        documents = row["passages"]
        for document, segments in itertools.groupby(self._segments(documents), key=lambda segment: segment.document):
            name = f"{row['id']}:{document}"
            for chunk in chunk_segments(list(segments), self.max_segments, name):
                yield self._reconstruction(row["id"], documents, chunk)

    def question_examples(self, row: dict[str, Any]) -> Iterator[Example]:
        """Stages II and III: all passages as slots, the first answer as the target, if any."""
        answer = row["answers"][0].strip() if row["answers"] else ""
        if not answer:
            return
        documents = row["passages"]
        segments = self._segments(documents)
        texts = self.processor.encoder_texts(segments, documents) if segments else [""]
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": answer},
        ]
        prompt = self._question_prompt(messages[:1], len(texts), add_generation_prompt=True)
        whole = self._question_prompt(messages, len(texts), add_generation_prompt=False)
        yield self._example(row["id"], prompt, whole, texts)

    def _segments(self, documents: list[dict[str, str]]) -> list[Segment]:
        """Segments of `documents`, remembered: many questions share their passages."""
        key = tuple((document["title"], document["text"]) for document in documents)
        if key not in self._segments_of:
            self._segments_of[key] = self.processor.segment_documents(documents)
        return self._segments_of[key]

    def _reconstruction(self, row_id: str, documents: list, chunk: list[Segment]) -> Example:
        first, last = chunk[0], chunk[-1]
        target = documents[first.document]["text"][first.start : last.end].strip()
        template = choose_template(f"{row_id}:{first.document}:{first.start}")
        mark = uuid.uuid4().hex
        messages = [
            {"role": "user", "content": template.before + mark + template.after},
            {"role": "assistant", "content": target},
        ]
        prompt = self._marked_prompt(messages[:1], mark, len(chunk), add_generation_prompt=True)
        whole = self._marked_prompt(messages, mark, len(chunk), add_generation_prompt=False)
        return self._example(row_id, prompt, whole, self.processor.encoder_texts(chunk, documents))

    def _marked_prompt(self, messages: list, mark: str, num_slots: int, **kwargs) -> list[int]:
        """A conversation with `mark` in the place of the slots, as ids."""
        text = self.processor.apply_chat_template(messages, tokenize=False, **kwargs)
        before, after = text.split(mark)
        return self.processor.build_prompt(before, num_slots, after, add_special_tokens=False)

    def _question_prompt(self, messages: list, num_slots: int, **kwargs) -> list[int]:
        """The processor's own prompt; embeddings of zeros stand for the number of slots."""
        embeds = np.zeros((num_slots, self.processor.encoder_hidden_size), dtype=np.float32)
        inputs = self.processor.apply_chat_template(
            messages, context_embeds=embeds, tokenize=True, return_dict=True, **kwargs
        )
        return inputs["input_ids"][0]

    def _example(self, row_id: str, prompt: list[int], whole: list[int], texts: list[str]) -> Example:
        """Labels on what the assistant says and the token that ends its turn, nothing else."""
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"Row {row_id}: the prompt {self.processor.decode(prompt)!r} is not how the whole "
                f"conversation {self.processor.decode(whole)!r} begins, so the target cannot be "
                "told from the prompt. Name another `chat_template_path`."
            )
        target = self._end_of_turn(whole[len(prompt) :])
        return Example(row_id, prompt + target, [-100] * len(prompt) + target, texts)

    def _end_of_turn(self, target: list[int]) -> list[int]:
        """Cuts what stands behind the end of the turn; a template without gets EOS."""
        tokenizer = self.processor.tokenizer
        special = set(tokenizer.all_special_ids)
        special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        end = len(target)
        while end and target[end - 1] not in special and not tokenizer.decode(target[end - 1 : end]).strip():
            end -= 1
        target = target[:end]
        return target if target and target[-1] in special else [*target, tokenizer.eos_token_id]


def select_examples(
    files: dict[str, float],
    make_examples: Callable[[dict[str, Any]], Iterator[Example]],
    max_examples: int | None,
    max_tokens: int | None,
    seed: int,
    max_passages: int | None = None,
) -> list[Example]:
    """A mixture of several files.

    Args:
        files (`dict[str, float]`): Path of each file and its weight: its share of the mixture is
            weight / sum of weights.
        make_examples (`Callable`): A row to its examples, such as
            `ExampleBuilder.question_examples`.
        max_examples (`int` or `None`): Size of the mixture. Nothing is repeated: when a file holds
            less than its share, the mixture gets smaller and keeps its shares. `None`: as many as
            that allows.
        max_tokens (`int` or `None`): Longer examples are left out, and counted in the log.
        seed (`int`): Order of the rows.
        max_passages (`int` or `None`): Only rows of this many sets of passages in each file, drawn
            at random: fewer segments to encode, more questions about each.

    Raises:
        `ValueError`: a weight that is not positive, or no examples at all.
    """
    if not files or any(weight <= 0 for weight in files.values()):
        raise ValueError(f"Got files and weights {files}; expected files with positive weights.")
    total = sum(files.values())
    shares = {path: weight / total for path, weight in files.items()}
    found = {}
    for path, share in shares.items():
        quota = None if max_examples is None else round(max_examples * share)
        rows = _rows_of_passages(read_rows(path), max_passages, seed)
        random.Random(seed).shuffle(rows)
        found[path] = _take(rows, make_examples, quota, max_tokens, Path(path).name)
    size = min(len(found[path]) / share for path, share in shares.items())
    if max_examples is not None and size < max_examples - len(files):
        logger.warning("%s hold %d such examples, not %d.", list(files), size, max_examples)
    mixture = [example for path in files for example in found[path][: round(size * shares[path])]]
    if not mixture:
        raise ValueError(
            f"No examples in {list(files)}: {max_examples=}, {max_tokens=}. Raise the limits or name other files."
        )
    return mixture


def _rows_of_passages(rows: list[dict[str, Any]], max_passages: int | None, seed: int) -> list[dict[str, Any]]:
    """The rows of `max_passages` different sets of passages, or all."""
    if max_passages is None:
        return rows
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(passage["text"] for passage in row["passages"]), []).append(row)
    keys = sorted(groups)
    random.Random(seed).shuffle(keys)
    return [row for key in keys[:max_passages] for row in groups[key]]


def _take(
    rows: list[dict[str, Any]],
    make_examples: Callable[[dict[str, Any]], Iterator[Example]],
    quota: int | None,
    max_tokens: int | None,
    name: str,
) -> list[Example]:
    """The first `quota` examples of `rows` with at most `max_tokens` tokens."""
    taken, too_long = [], 0
    for row in track(rows, description=f"tokenising {name}"):
        for example in make_examples(row):
            if max_tokens is not None and len(example.input_ids) > max_tokens:
                too_long += 1
            else:
                taken.append(example)
        if quota is not None and len(taken) >= quota:
            break
    logger.info("%s: %d examples, %d left out (> %s tokens)", name, len(taken), too_long, max_tokens)
    return taken[:quota]


def build_dataset(examples: list[Example], store: EmbeddingStore) -> datasets.Dataset:
    """
    Examples as the trainer's dataset; segments not in `store` yet are encoded now.

    Columns: `row_id`, `input_ids`, `labels`, `length` (tokens, to group batches by), `segment_rows`
    (rows of `store`).
    """
    texts = [text for example in examples for text in example.segment_texts]
    rows = store.add(texts)
    ends = np.cumsum([len(example.segment_texts) for example in examples])
    return datasets.Dataset.from_dict(
        {
            "row_id": [example.row_id for example in examples],
            "input_ids": [example.input_ids for example in examples],
            "labels": [example.labels for example in examples],
            "length": [len(example.input_ids) for example in examples],
            "segment_rows": np.split(rows, ends[:-1]),
        }
    )
