"""The table of a corpus: a row for each passage, with its slots, in a LanceDB folder that needs no server.

    id         the document's id and the number of the passage in it
    document   the document's id; `digest` changes with its text
    title, text, start, end   the passage, and its characters in the document
    segments   the characters of the passage that each slot represents
    slots      embeddings, float16 (num_slots, encoder_hidden_size)
    words      word ids of each slot, if the aligner uses them
    page       the page on which the passage begins, if the document has pages
    checksum   of text and slots; rows that have changed on disk are rejected
    vector     the search vector: the mean of the slots, or an embedding by the base encoder

The metadata of the schema contain the settings of the slots. Only a processor that makes the same slots may write to
the table or read from it.
"""

import json
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock, Timeout
from lancedb.index import FTS, BTree, IvfSq

from ...common.files import digest
from ...common.passages import tokens_of_words
from ...segmentation_arcaligner import Segment, SegmentTokens, check_num_tokens

FORMAT = 2
NAME = "passages"
LOCK = ".writer.lock"
PRECOMPUTED = "read"  # name of the folder of precomputed passages, see `precompute.py`; as in version 0.2
METADATA = b"arcaligner"
# The embedding of this sentence distinguishes encoders of the same name. Its cosine to the stored one is below the
# first limit if the encoders are different, and above the second if they are the same in float32 or bfloat16. Between
# them, the encoder was trained further.
_TEXT = "It was written by Ada, and nobody else knew how to read it aloud."
PROBE = SegmentTokens(Segment(0, 0, len(_TEXT), _TEXT), _TEXT, (), ())
MIN_SIMILARITY = 0.999
SAME_SIMILARITY = 0.9998
# With fewer rows there is no index: search compares every vector, which is exact and fast enough.
MIN_INDEXED_ROWS = 100_000


def table_schema(settings: dict[str, Any]) -> pa.Schema:
    """Columns of a table, with `settings` in its metadata; vectors have `settings["encoder_hidden_size"]` numbers."""
    vector = pa.list_(pa.float16(), settings["encoder_hidden_size"])
    columns = {name: pa.string() for name in ("id", "document", "digest", "title", "text")}
    columns |= {"start": pa.int64(), "end": pa.int64()}
    columns |= {"segments": pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32()}))}
    columns |= {"slots": pa.list_(vector), "vector": vector}
    if settings["context_words"]:
        columns["words"] = pa.list_(pa.list_(pa.int32()))
    columns |= {"page": pa.int32(), "checksum": pa.int64()}
    return pa.schema(columns, metadata={METADATA: json.dumps(settings).encode()})


def passage_checksums(rows: pa.Table) -> list[int]:
    """CRC-32 of each row's slots and of its other columns that answers depend on. Detects disk corruption, not
    tampering."""
    slots = rows["slots"].combine_chunks()
    ends = np.cumsum(slots.value_lengths().to_numpy())
    values = slots.flatten().flatten().to_numpy().reshape(-1, slots.type.value_type.list_size)
    others = rows.select([name for name in ("title", "text", "page", "segments", "words") if name in rows.column_names])
    parts = zip(np.split(values, ends[:-1]), others.to_pylist(), strict=True)
    return [zlib.crc32(json.dumps(other).encode(), zlib.crc32(vectors.tobytes())) for vectors, other in parts]


def slot_settings(processor, tokens_per_slot: int | str | None = None) -> dict[str, Any]:
    """All settings that the slots of a processor depend on, as JSON values."""
    tokenizer = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    tokenizer = {name: value for name, value in tokenizer.items() if name not in ("padding", "truncation")}
    return {
        "encoder": processor.encoder_name_or_path,
        "encoder_hidden_size": processor.encoder_hidden_size,
        "encoder_dtype": str(processor.encoder.model.dtype).removeprefix("torch."),
        "sentences_per_segment": processor.sentences_per_segment,
        "spacy_model": processor.spacy_model,
        "tokens_per_slot": processor.slot_encoder.check_settings(tokens_per_slot=tokens_per_slot),
        "context_words": processor.context_words,
        "tokenizer": digest(tokenizer),
        "probe": [round(value, 5) for value in processor.slot_encoder.encode_tokens([PROBE], "segment")[0].tolist()],
    }


class Corpus:
    """
    A corpus on disk, open for reading and writing.

    Args:
        path (`str` or `Path`): Its folder.

    Attributes: `settings`, the settings that it was made with.

    Raises:
        `FileNotFoundError`: there is no such folder.
        `ValueError`: the folder is not a corpus, or is a corpus of a different format.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"There is no corpus {path}. Make one with `arcaligner corpus build SOURCE --output {path}`."
            )
        database = lancedb.connect(self.path, read_consistency_interval=timedelta(0))
        try:
            self.table = database.open_table(NAME)
            self.settings = json.loads(self.table.schema.metadata[METADATA])
            format_number = self.settings["format"]
            # An older version limited passages in words.
            if (words := self.settings.pop("passage_words", None)) is not None:
                self.settings["passage_tokens"] = tokens_of_words(words)
        except (ValueError, LookupError, TypeError, OSError, RuntimeError) as error:
            raise ValueError(
                f"{path} is not a corpus of ArcAligner, or is damaged: {error}. Choose another folder; to replace a "
                "damaged corpus, delete its folder and build the corpus again."
            ) from error
        if format_number != FORMAT:
            raise ValueError(
                f"The corpus {path} has format {format_number}; this version of ArcAligner needs format {FORMAT}. "
                "Delete the folder, and build the corpus again with `arcaligner corpus build`."
            )

    @classmethod
    def create(
        cls,
        path: str | Path,
        processor,
        passage_words: int | None = None,
        tokens_per_slot: int | str | None = None,
        passage_tokens: int | None = None,
    ) -> "Corpus":
        """Create an empty corpus, or open an existing one that was made with the same settings.

        Args:
            path (`str` or `Path`): Its folder.
            processor ([`ArcAlignerProcessor`]): Makes the slots.
            passage_words (`int`, *optional*): Deprecated: the maximum length of a passage in English words.
            tokens_per_slot (`int` or `"segment"`, *optional*): Tokens of text per slot. Default: that of an existing
                corpus, else the processor's.
            passage_tokens (`int`, *optional*): Maximum number of tokens of a passage. Default: as of `tokens_per_slot`.

        Raises:
            `ValueError`: the folder contains a corpus with different settings, or something other than a corpus.
        """
        if passage_words is not None:
            check_num_tokens("passage_words", passage_words)
            passage_tokens = tokens_of_words(passage_words)
            warnings.warn(
                "`passage_words` is deprecated and will be removed in the next release; pass "
                f"`passage_tokens={passage_tokens}`.",
                FutureWarning,
                stacklevel=2,
            )
        if passage_tokens is not None:
            check_num_tokens("passage_tokens", passage_tokens)
        path = Path(path)
        if not path.exists() or not any(file for file in path.iterdir() if file.name != LOCK):
            settings = {"format": FORMAT, **slot_settings(processor, tokens_per_slot)}
            settings["passage_tokens"] = passage_tokens or processor.passage_tokens
            path.mkdir(parents=True, exist_ok=True)
            lancedb.connect(path).create_table(NAME, schema=table_schema(settings), exist_ok=True)
        corpus = cls(path)
        requested = {"passage_tokens": passage_tokens, "tokens_per_slot": tokens_per_slot}
        corpus.check(processor, **{name: value for name, value in requested.items() if value is not None})
        return corpus

    def check(self, processor, **requested: Any) -> None:
        """Raise for a processor that makes other slots, or for `requested` settings that differ.

        Raises:
            `ValueError`: a setting differs; the message names the first one, with both values.

        Warns:
            `UserWarning`: the encoder has the same name and slightly different weights.
        """
        new = slot_settings(processor) | {"tokens_per_slot": self.settings["tokens_per_slot"]} | requested
        stored = dict(self.settings)
        probes = [torch.tensor(settings.pop("probe"), device="cpu") for settings in (new, stored)]
        similarity = float(probes[0] @ probes[1]) if probes[0].shape == probes[1].shape else 0.0
        if similarity < MIN_SIMILARITY:
            other = f"but the checkpoint has {new['encoder']!r}"
            if stored["encoder"] == new["encoder"]:
                other = "but the checkpoint has an encoder of this name with other weights"
            raise ValueError(
                f"The corpus {self.path} was made with the encoder {stored['encoder']!r}, {other}. Pass the checkpoint "
                "that the corpus was made with as `--checkpoint`, or build another corpus with this checkpoint."
            )
        if similarity < SAME_SIMILARITY:
            warnings.warn(
                f"The corpus {self.path} was made with an encoder whose weights differ slightly from those of the "
                "checkpoint's encoder, so answers may be slightly worse. To avoid this, delete the folder and build "
                "the corpus again.",
                UserWarning,
                stacklevel=2,
            )
        if not new["context_words"]:  # the aligner ignores words that the corpus may have
            new.pop("context_words")
            if new["tokens_per_slot"] == "segment":
                new.pop("tokenizer")
        for name, value in new.items():
            if name != "encoder" and stored[name] != value:
                raise ValueError(
                    f"The corpus {self.path} was made with `{name}` {stored[name]!r}, but the checkpoint or the "
                    f"command asks for {value!r}. Build another corpus in another folder, or use the checkpoint and "
                    "options that this corpus was made with."
                )

    def __len__(self) -> int:
        return self.table.count_rows()

    @property
    def precomputed_folder(self) -> Path:
        """The folder of precomputed passages (`precompute.py`)."""
        return self.path / PRECOMPUTED

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the corpus, so that only this process writes inside the `with` block.

        Raises:
            `ValueError`: another process holds the lock.
            `OSError`: the disk is full, or cannot be written to.
        """
        try:
            with FileLock(self.path / LOCK, timeout=0):
                yield
        except Timeout as error:
            raise ValueError(
                f"Another process is writing to the corpus {self.path}. Wait until that process has ended, and try "
                "again."
            ) from error
        except RuntimeError as error:  # raised by Lance
            raise OSError(
                f"Writing to the corpus {self.path} failed: {error}. What it contained before is unchanged. Free disk "
                "space or make the folder writable, and run the command again."
            ) from error

    def digests(self, documents: Iterable[str]) -> dict[str, str]:
        """The digest of each of these documents that the corpus has, by its id."""
        if not (documents := list(documents)):
            return {}
        rows = self.table.search().where(_is_one_of(documents)).select(["document", "digest"]).to_arrow()
        return dict(zip(rows["document"].to_pylist(), rows["digest"].to_pylist(), strict=True))

    def add(self, rows: pa.Table, replaced: list[str]) -> None:
        """Add complete documents and remove the passages that documents of the ids `replaced` had, in one step."""
        if replaced:
            merge = self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.when_not_matched_by_source_delete(_is_one_of(replaced)).execute(rows)
        else:
            self.table.add(rows)

    def remove(self, documents: list[str]) -> None:
        """Remove documents with all their passages.

        Raises:
            `ValueError`: a document is unknown; then none is removed.
        """
        with self.writing():
            digests = self.digests(documents)
            if missing := [document for document in documents if document not in digests]:
                like = sorted(document for document in self.documents() if document.endswith(missing[0]))[:1]
                raise ValueError(
                    f"The corpus {self.path} has no document {missing[0]!r}; expected the id of a "
                    f"document{f', such as {like[0]!r}' if like else ''}. Copy the ID from the output of `arcaligner "
                    "ask`, which names each passage as ID:START-END."
                )
            self.delete(documents)
            self.optimize()

    def delete(self, documents: list[str]) -> None:
        """Remove documents by their ids, if they exist, inside [`writing`]."""
        self.table.delete(_is_one_of(documents))

    def documents(self) -> set[str]:
        """The ids of all documents."""
        batches = self.table.search().select(["document"]).to_batches()
        return {document for batch in batches for document in batch["document"].to_pylist()}

    def optimize(self) -> None:
        """Create missing indices, update existing ones, and merge small files."""
        indexed = {column for index in self.table.list_indices() for column in index.columns}
        indices = {"document": BTree(), "text": FTS(), "title": FTS()}
        if len(self) >= MIN_INDEXED_ROWS:
            indices["vector"] = IvfSq(distance_type="dot")
        for column, config in indices.items():
            if column not in indexed and len(self):
                self.table.create_index(column, config=config)
        with warnings.catch_warnings(action="ignore"):  # that old versions are removed: readers use the newest one
            self.table.optimize(cleanup_older_than=timedelta(0))

    def info(self) -> dict[str, Any]:
        """Numbers of documents, passages and slots, bytes on disk, and the settings.

        Raises:
            `OSError`: the corpus cannot be read.
        """
        try:
            batches = self.table.search().select(["segments"]).to_batches()
            num_slots = sum(len(batch["segments"].flatten()) for batch in batches)
        except RuntimeError as error:  # raised by Lance
            raise OSError(
                f"The corpus {self.path} cannot be read: {error}. Delete the folder, and build the corpus again with "
                "`arcaligner corpus build`."
            ) from error
        num_bytes, precomputed_bytes = (
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            for folder in (self.path, self.precomputed_folder)
        )
        return {
            "documents": len(self.documents()),
            "passages": len(self),
            "slots": num_slots,
            "bytes": num_bytes - precomputed_bytes,
            "precomputed_bytes": precomputed_bytes,
            **{name: value for name, value in self.settings.items() if name != "probe"},
        }


def _is_one_of(documents: Iterable[str]) -> str:
    """A condition on rows, in SQL."""
    return "document IN ({})".format(", ".join("'{}'".format(id.replace("'", "''")) for id in documents))
