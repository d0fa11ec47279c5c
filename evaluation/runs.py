"""A run's folder: what each method answered to each question, one JSON line a question.

    <run>/<task>/<method>.jsonl   id, question, answers, prediction, scores, tokens, seconds, prompt and row digests
    <run>/<task>/<method>.json    what they were made with; another configuration is refused

Answers are appended batch by batch: a killed run goes on where it was, and several processes may fill different files.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..train.saving import write_whole
from .answering import Row

# What may be other when a run goes on.
FREE_SETTINGS = {"machine", "checkpoint", "batch_size"}


@dataclass(frozen=True)
class AnswerFile:
    """The answers of a method to a task, in the folder of a run."""

    run: Path
    task: str
    method: str

    @property
    def path(self) -> Path:
        return self.run / self.task / f"{self.method}.jsonl"

    @property
    def settings_path(self) -> Path:
        return self.path.with_suffix(".json")

    def read(self) -> list[dict[str, Any]]:
        """All answers; of a line that a kill cut off, nothing."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def settings(self) -> dict[str, Any]:
        """What the answers were made with."""
        return json.loads(self.settings_path.read_text(encoding="utf-8"))

    def open(self, settings: dict[str, Any], rows: list[Row]) -> list[Row]:
        """
        Makes the file ready for the rows that are not answered yet.

        Returns:
            `list[dict]`: These rows.

        Raises:
            `ValueError`: answers made with other settings, or to rows of these ids with another question, gold or
                passage.
        """
        known = {answer["id"]: answer["row"] for answer in self.read()}
        if known:
            self._check(settings, rows, known)
        left = [row for row in rows if row["id"] not in known]
        if left or not self.settings_path.exists():
            write_whole(self.settings_path, json.dumps(settings, indent=1, ensure_ascii=False))
        return left

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Inside, this process alone appends; a line that a kill cut off is gone.

        Raises:
            `ValueError`: another process appends.
        """
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=0):
                self._cut_broken_line()
                yield
        except Timeout as error:
            raise ValueError(
                f"Another process answers into {self.path}. Let it finish, or choose other `--tasks` or `--methods`."
            ) from error

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Adds answers, all of them on disk when it returns."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _check(self, settings: dict[str, Any], rows: list[Row], known: dict[str, str]) -> None:
        before = self.settings()
        changed = [
            f"`{key}` was {before.get(key)!r} and is now {settings.get(key)!r}"
            for key in {**before, **settings}
            if key not in FREE_SETTINGS and before.get(key) != settings.get(key)
        ]
        changed += [f"row {row['id']} is another" for row in rows if known.get(row["id"], digest(row)) != digest(row)]
        if changed:
            raise ValueError(
                f"{self.path} holds {len(known)} answers made otherwise: {', '.join(changed[:3])}. Name another folder "
                "with `--output`, or delete the file to answer anew."
            )

    def _cut_broken_line(self) -> None:
        if self.path.exists():
            whole = self.path.read_bytes()
            length = whole.rfind(b"\n") + 1
            if length < len(whole):
                os.truncate(self.path, length)


def answer_files(run: Path) -> list[AnswerFile]:
    """All files of answers in a run's folder."""
    paths = sorted(path for path in run.glob("*/*.json") if path.with_suffix(".jsonl").exists())
    return [AnswerFile(run, path.parent.name, path.stem) for path in paths]


def digest(row: Row) -> str:
    """Tells a row's question, golds and passages from others."""
    return text_digest([row["question"], row["answers"], row["passages"]])


def text_digest(value: Any) -> str:
    """A short SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]
