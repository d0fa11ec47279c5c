"""Retrieve passages of a corpus, with their stored slots, for a question; only the question is encoded.

    retriever = Retriever(Corpus("letters.lance"), processor)
    passages = retriever("Who wrote it?", top_k=5)
    inputs = processor("Who wrote it?", **passages.inputs, return_tensors="pt")

LanceDB searches by vectors and by full text, and joins both results by reciprocal rank fusion.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from lancedb.query import MultiMatchQuery
from lancedb.rerankers import RRFReranker
from torch.nn.utils.rnn import pad_sequence

from ...encoder_arcaligner import EncodedDocuments
from ...segmentation_arcaligner import Segment
from ...tokenization_arcaligner import check_question
from .table import Corpus, passage_checksums

# The constant of reciprocal rank fusion. Smaller than the usual 60, because few passages are used, so that the order of
# the first ones matters most.
FUSION = 10


@dataclass
class SlotPassages:
    """Passages for a question as slots, from a corpus or from the documents of a request."""

    # Each has `title` and `text`. Those from a corpus, best first, also have `document` (the document's id), `start`
    # and `end` (characters of the passage in the document), `page` (or `None`), `score`, and `similarity`, the cosine
    # to the question.
    documents: list[dict[str, Any]]
    encoded: EncodedDocuments
    seconds: dict[str, float]  # how long `retrieval` and `slots` took

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments for the processor, the passage cache and `generate`."""
        slots = self.encoded
        inputs = {"context_embeds": slots.context_embeds, "context_passage_ids": slots.context_passage_ids}
        return inputs if slots.context_word_ids is None else inputs | {"context_word_ids": slots.context_word_ids}

    @property
    def used(self) -> list[dict[str, Any]]:
        """The documents that are used."""
        return [document for document in self.documents if document.get("used", True)]

    def only(self, numbers: Collection[int]) -> "SlotPassages":
        """Only the slots of the passages with these numbers. All documents stay; `used` says whether they are used."""
        segments, embeds, words, ids, dropped = self.encoded
        is_in = torch.isin(ids, torch.tensor(list(numbers), device=ids.device))
        segments, dropped = (
            [segment for segment in group if segment.document in numbers] for group in (segments, dropped)
        )
        words = None if words is None else words[is_in]
        documents = [document | {"used": number in numbers} for number, document in enumerate(self.documents)]
        encoded = EncodedDocuments(segments, embeds[is_in], words, ids[is_in], dropped)
        return SlotPassages(documents, encoded, dict(self.seconds))


class Retriever:
    """
    Retrieves passages of a corpus.

    Args:
        corpus ([`Corpus`]): A corpus with at least one passage.
        processor ([`ArcAlignerProcessor`]): Encodes questions as the passages were encoded.

    Raises:
        `ValueError`: the corpus is empty, or was made with other settings than the processor's ([`Corpus.check`]).
    """

    def __init__(self, corpus: Corpus, processor):
        corpus.check(processor)
        if len(corpus) == 0:
            raise ValueError(f"The corpus {corpus.path} is empty. Add documents with `arcaligner corpus add`.")
        self.corpus, self.processor = corpus, processor
        self.columns = [name for name in corpus.table.schema.names if name not in ("id", "digest")]

    def __call__(self, question: str, top_k: int = 5) -> SlotPassages:
        """The `top_k` best passages for a question, best first; fewer if the corpus has fewer.

        Raises:
            `ValueError`: the question is empty, or `top_k` is below 1.
            `OSError`: the corpus was removed, or is damaged.
        """
        check_question(question)
        if not (isinstance(top_k, int) and top_k >= 1):
            raise ValueError(f"`top_k` is {top_k!r}; expected the number of passages to retrieve, at least 1.")
        began = time.perf_counter()
        vector = self.processor.encoder.untrained.encode([question])[0].numpy()
        try:
            try:
                rows = self._query(question, vector, top_k).to_arrow()
            except (RuntimeError, ValueError):  # a writer has just removed the version that we read
                rows = self._query(question, vector, top_k).to_arrow()
        except (RuntimeError, ValueError) as error:  # raised by Lance
            raise OSError(
                f"The corpus {self.corpus.path} cannot be searched: {error}. Delete its folder, and build the corpus "
                "again with `arcaligner corpus build`."
            ) from error
        searched = time.perf_counter()
        self._check(rows)
        passages = slot_passages(rows, self.processor.context_words)
        vectors = rows["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
        for document, similarity in zip(passages.documents, (vectors @ vector).tolist(), strict=True):
            document["similarity"] = similarity
        passages.seconds = {"retrieval": searched - began, "slots": time.perf_counter() - searched}
        return passages

    def _check(self, rows) -> None:
        for document, stored, computed in zip(
            rows["document"].to_pylist(), rows["checksum"].to_pylist(), passage_checksums(rows), strict=True
        ):
            if stored != computed:
                raise OSError(
                    f"The corpus {self.corpus.path} is damaged: a passage of {document} differs from what was written. "
                    "Remove this document with `arcaligner corpus remove`, and add it again with `arcaligner corpus "
                    "add`."
                )

    def _query(self, question: str, vector, top_k: int):
        query = self.corpus.table.search(query_type="hybrid", vector_column_name="vector").vector(vector)
        query = query.text(MultiMatchQuery(question, ["text", "title"])).distance_type("dot")
        return query.rerank(RRFReranker(FUSION)).limit(top_k).select(self.columns)


def slot_passages(rows, context_words: bool) -> SlotPassages:
    """Rows of a corpus as passages with slots and, with `context_words`, the word ids of each slot."""
    fields = ("document", "title", "text", "start", "end", "page")
    documents = rows.select([name for name in fields if name in rows.column_names]).to_pylist()
    if "_relevance_score" in rows.column_names:  # rows of a search
        for document, score in zip(documents, rows["_relevance_score"].to_pylist(), strict=True):
            document["score"] = score
    segments = [
        Segment(number, span["start"], span["end"], document["text"][span["start"] : span["end"]])
        for number, (document, spans) in enumerate(zip(documents, rows["segments"].to_pylist(), strict=True))
        for span in spans
    ]
    slots = rows["slots"].combine_chunks().flatten()
    width = slots.type.list_size
    embeds = torch.tensor(slots.flatten().to_numpy(zero_copy_only=False), device="cpu").view(-1, width).float()
    words = None
    if context_words:
        ids_of_slots = [ids for row in rows["words"].to_pylist() for ids in row]
        words_of_slots = [torch.tensor(ids, dtype=torch.long, device="cpu") for ids in ids_of_slots]
        words = pad_sequence(words_of_slots, batch_first=True, padding_value=-1)
    numbers = torch.tensor([segment.document for segment in segments], device="cpu")
    return SlotPassages(documents, EncodedDocuments(segments, embeds, words, numbers, dropped=[]), {})
