"""Embeddings of training segments, computed once and kept on disk, shared by all stages and runs.

A store is a folder for each encoder under `root`:

    <root>/<encoder>-<width>/encoder.json       the encoder's fingerprint: its settings, its embedding of a probe
    <root>/<encoder>-<width>/<digest>.npy       float16 (num_texts, encoder_hidden_size), a memmap
    <root>/<encoder>-<width>/<digest>.keys.npy  uint8 (num_texts, 16), the hash of each text

A text is found by its own hash, so whatever the segmenter cut, a segment seen before is never encoded again and
another cut is another text: a store fits every segmenter, and one encoder only. `add` encodes what is missing and
writes it in parts as it goes: an interrupted run keeps what it has. A part is written under a temporary name and
renamed, and one without its keys is not read, so neither a full disk nor a killed process leaves anything that is
read; several processes may write at once.
"""

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

Encode = Callable[[list[str]], np.ndarray]

PROBE = "The quick brown fox jumps over the lazy dog."
# Two runs of one encoder differ by rounding; two encoders by about the size of the values.
PROBE_TOLERANCE = 1e-2
TEXTS_PER_PART = 16384
TEXTS_PER_STEP = 2048
# No process takes that long to write a file: one with a temporary name is a killed process's.
SECONDS_OF_A_LEFTOVER = 24 * 3600


def text_key(text: str) -> bytes:
    """The 16 bytes a text is found by."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


class EmbeddingStore:
    """
    Embeddings of one encoder by text.

    Args:
        root (`str` or `Path`): Folder of all stores; made when missing.
        encoder_name_or_path (`str`): Name of the encoder, part of the store's folder name.
        encoder_hidden_size (`int`): Width of an embedding.
        encode (`Callable`): Texts to embeddings `(num_texts, encoder_hidden_size)`, such as
            `ArcAlignerProcessor.encode_segments`.
        encoder_settings (`dict`, *optional*): What else decides an embedding, as JSON; see
            `encoding.encoder_settings`.

    Raises:
        `ValueError`: the folder holds embeddings of another encoder of the same name, or of this one
            with other settings; a part that cannot be read.

    Example:

    ```python
    >>> store = EmbeddingStore("cache", "all-MiniLM-L6-v2", 384, processor.encode_segments)
    >>> rows = store.add(["A sentence.", "Another one."])
    >>> store[rows].shape
    (2, 384)
    ```
    """

    def __init__(
        self,
        root: str | Path,
        encoder_name_or_path: str,
        encoder_hidden_size: int,
        encode: Encode,
        encoder_settings: dict[str, Any] | None = None,
    ):
        self.encoder_name_or_path = encoder_name_or_path
        self.encoder_hidden_size = encoder_hidden_size
        self.encoder_settings = encoder_settings or {}
        self._encode = encode
        name = encoder_name_or_path.rstrip("/").replace("/", "--").strip("-")
        self.folder = Path(root).expanduser() / f"{name}-{encoder_hidden_size}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._parts: list[np.ndarray] = []
        self._starts: list[int] = []
        self._rows: dict[bytes, int] = {}
        self._read_names: set[str] = set()
        self._check_encoder()
        self._remove_leftovers()
        self._read_parts()

    def __len__(self) -> int:
        return self._starts[-1] + len(self._parts[-1]) if self._parts else 0

    def __getitem__(self, rows: Iterable[int]) -> np.ndarray:
        """Embeddings of `rows` as `add` returned them, float32 (num_rows, encoder_hidden_size)."""
        rows = np.asarray(list(rows), dtype=np.int64)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        embeddings = np.empty((len(rows), self.encoder_hidden_size), dtype=np.float32)
        for index, (part, row) in enumerate(zip(parts, rows, strict=True)):
            embeddings[index] = self._parts[part][row - self._starts[part]]
        return embeddings

    def add(self, texts: Iterable[str]) -> np.ndarray:
        """Encodes the texts that are not stored yet, longest first, behind a progress bar.

        Args:
            texts (`Iterable[str]`): Texts as the encoder reads them; they may repeat.

        Returns:
            `np.ndarray` of shape `(num_texts,)`: the rows of `texts` in this store, valid in this
            process.

        Raises:
            `ValueError`: the encoder returned NaN, infinite values or another width.
        """
        keys = []
        missing: dict[bytes, str] = {}
        for text in texts:
            keys.append(text_key(text))
            if keys[-1] not in self._rows:
                missing[keys[-1]] = text
        if missing:
            logger.info("%d of %d segments are not in %s", len(missing), len(keys), self.folder)
            self._encode_missing(sorted(missing.items(), key=lambda item: -len(item[1])))
        return np.array([self._rows[key] for key in keys], dtype=np.int64)

    def _encode_missing(self, missing: list[tuple[bytes, str]]) -> None:
        columns = (
            TextColumn("encoding segments"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            task = progress.add_task("", total=len(missing))
            for start in range(0, len(missing), TEXTS_PER_PART):
                part = missing[start : start + TEXTS_PER_PART]
                embeddings = np.empty((len(part), self.encoder_hidden_size), dtype=np.float16)
                for step in range(0, len(part), TEXTS_PER_STEP):
                    texts = [text for _, text in part[step : step + TEXTS_PER_STEP]]
                    embeddings[step : step + len(texts)] = self._checked(texts)
                    progress.advance(task, len(texts))
                self._write_part([key for key, _ in part], embeddings)
        self._read_parts()

    def _checked(self, texts: list[str]) -> np.ndarray:
        embeddings = np.asarray(self._encode(texts), dtype=np.float32)
        expected = (len(texts), self.encoder_hidden_size)
        if embeddings.shape != expected:
            raise ValueError(
                f"The encoder {self.encoder_name_or_path} returned embeddings of shape "
                f"{embeddings.shape}; expected {expected}. Set `encoder_hidden_size` to its width."
            )
        if not np.isfinite(embeddings).all():
            bad = texts[int(np.argmin(np.isfinite(embeddings).all(axis=1)))]
            raise ValueError(
                f"The encoder {self.encoder_name_or_path} returned NaN or infinite values, first "
                f"for the segment {bad[:80]!r}. Remove it from the data or use another encoder."
            )
        return embeddings

    def _check_encoder(self) -> None:
        """Two encoders of a name would mix: settings, and the embedding of a probe, tell them apart."""
        probe = self._checked([PROBE])[0]  # (encoder_hidden_size,)
        path = self.folder / "encoder.json"
        if path.exists():
            self._compare(json.loads(path.read_text(encoding="utf-8")), probe)
            return
        fingerprint = {
            "encoder": self.encoder_name_or_path,
            "encoder_hidden_size": self.encoder_hidden_size,
            "settings": self.encoder_settings,
            "probe": probe.tolist(),
        }
        self._write("encoder.json", lambda file: file.write(json.dumps(fingerprint).encode("utf-8")))

    def _compare(self, stored: dict[str, Any], probe: np.ndarray) -> None:
        """Raises `ValueError` unless the store is this encoder's."""
        advice = "Delete the folder, or name another one as `embedding_cache_dir`."
        difference = np.abs(probe - np.array(stored["probe"], dtype=np.float32)).max()
        if difference > PROBE_TOLERANCE:
            raise ValueError(
                f"{self.folder} was made by another encoder named {self.encoder_name_or_path}: "
                f"their embeddings of a probe sentence differ by {difference:.3g}. {advice}"
            )
        settings = stored.get("settings", {})  # stores of before settings were kept have none
        changed = [
            f"`{name}` is {value!r}, in the store {settings[name]!r}"
            for name, value in self.encoder_settings.items()
            if name in settings and settings[name] != value
        ]
        if changed:
            raise ValueError(
                f"{self.folder} was made by {self.encoder_name_or_path} with other settings: "
                f"{'; '.join(changed)}. {advice}"
            )

    def _write(self, name: str, write: Callable[[BinaryIO], Any]) -> None:
        """A file of the store, whole or not at all."""
        temporary = self.folder / f"{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob("*.tmp"):
            try:
                if time.time() - path.stat().st_mtime > SECONDS_OF_A_LEFTOVER:
                    path.unlink()
            except FileNotFoundError:  # written to its end, or removed, by another process
                continue

    def _write_part(self, keys: list[bytes], embeddings: np.ndarray) -> None:
        name = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
        digests = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
        self._write(f"{name}.npy", lambda file: np.save(file, embeddings))
        self._write(f"{name}.keys.npy", lambda file: np.save(file, digests))  # last: it makes the part readable

    def _read_parts(self) -> None:
        for path in sorted(self.folder.glob("*.keys.npy")):
            if path.name in self._read_names:
                continue
            try:
                keys = np.load(path)  # (num_texts, 16)
                part = np.load(path.with_name(path.name.replace(".keys.npy", ".npy")), mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise ValueError(
                    f"{path} or the file of its embeddings cannot be read ({error}). Delete both files; the texts will "
                    "be encoded again."
                ) from error
            if part.shape != (len(keys), self.encoder_hidden_size):
                raise ValueError(
                    f"{path} names {len(keys)} texts but its embeddings have shape {part.shape}. "
                    f"Delete both files; the texts will be encoded again."
                )
            start = len(self)
            self._parts.append(part)
            self._starts.append(start)
            for row, key in enumerate(keys):
                self._rows.setdefault(key.tobytes(), start + row)
            self._read_names.add(path.name)
