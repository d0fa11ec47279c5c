"""Rows to tokenised examples with slots, and examples to the trainer's dataset.

A row of a corpus (`corpora.py`) becomes, in stage I, one example for every few consecutive segments of its passages
(the slots) with their text as the target; in stages II and III one example with all segments as slots and the first
answer as the target. Tokenising never runs the encoder: a prompt needs the number of its slots only.
"""

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Features, List, Value

from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import Segment
from .embedding_store import EmbeddingStore
from .templates import choose_template, stable_number

EXAMPLE_FEATURES = Features(
    row_id=Value("string"),
    input_ids=List(Value("int32")),
    labels=List(Value("int32")),
    segment_texts=List(Value("string")),
    answers=List(Value("string")),
)


@dataclass
class Example:
    """Ids with context tokens, labels, the texts that the slots stand for, in order, and all right answers, if any."""

    row_id: str
    input_ids: list[int]
    labels: list[int]
    segment_texts: list[str]
    answers: list[str] = field(default_factory=list)


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

    def __getstate__(self) -> dict[str, Any]:
        """Without the remembered segments: what a builder makes, and its fingerprint, do not depend on them."""
        return self.__dict__ | {"_segments_of": {}}

    def reconstruction_examples(self, row: dict[str, Any]) -> Iterator[Example]:
        """Stage I: each run of segments as slots, its text as the target."""
        documents = row["passages"]
        for document, segments in itertools.groupby(self._segments(documents), key=lambda segment: segment.document):
            name = f"{row['id']}:{document}"
            for chunk in chunk_segments(list(segments), self.max_segments, name):
                yield self.reconstruction_example(row["id"], documents, chunk)

    def reconstruction_example(self, row_id: str, documents: list, chunk: list[Segment]) -> Example:
        """Consecutive segments of one of `documents` as slots, their text as the target."""
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
        yield self._example(row["id"], prompt, whole, texts, row["answers"])

    def _segments(self, documents: list[dict[str, str]]) -> list[Segment]:
        """Segments of `documents`, remembered: many questions share their passages."""
        key = tuple((document["title"], document["text"]) for document in documents)
        if key not in self._segments_of:
            self._segments_of[key] = self.processor.segment_documents(documents)
        return self._segments_of[key]

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

    def _example(
        self, row_id: str, prompt: list[int], whole: list[int], texts: list[str], answers: list[str] | None = None
    ) -> Example:
        """Labels on what the assistant says and the token that ends its turn, nothing else."""
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"Row {row_id}: the prompt {self.processor.decode(prompt)!r} is not how the whole "
                f"conversation {self.processor.decode(whole)!r} begins, so the target cannot be "
                "told from the prompt. Name another `chat_template_path`."
            )
        target = self._end_of_turn(whole[len(prompt) :])
        return Example(row_id, prompt + target, [-100] * len(prompt) + target, texts, answers or [])

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


def examples_dataset(examples: list[Example]) -> datasets.Dataset:
    """Examples as rows, a column for each field."""
    return datasets.Dataset.from_list([asdict(example) for example in examples], features=EXAMPLE_FEATURES)


def build_dataset(examples: datasets.Dataset | list[Example], store: EmbeddingStore) -> datasets.Dataset:
    """
    Examples as the trainer's dataset; segments not in `store` yet are encoded now.

    Args:
        examples (`datasets.Dataset` or `list[Example]`): As `ExampleSelector.select` returns them, or a few.
        store ([`EmbeddingStore`]): Where the embeddings are, and get to.

    Columns: `row_id`, `input_ids`, `labels`, `length` (tokens, to group batches by), `segment_rows`
    (rows of `store`), `answers`.
    """
    if isinstance(examples, list):
        examples = examples_dataset(examples)
    table = examples.with_format("arrow")[:]
    texts = table["segment_texts"].combine_chunks()
    rows = pa.array(store.add(texts.flatten().to_pylist()))
    ends = np.cumsum(texts.value_lengths().to_numpy())
    return datasets.Dataset.from_dict(
        {
            "row_id": table["row_id"],
            "input_ids": table["input_ids"],
            "labels": table["labels"],
            "answers": table["answers"],
            "length": table["input_ids"].combine_chunks().value_lengths(),
            "segment_rows": pa.ListArray.from_arrays(pa.array(np.insert(ends, 0, 0), type=pa.int32()), rows),
        }
    )
