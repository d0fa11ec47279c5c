"""A run's folder: the answers of each method, one JSON line per question.

    <run>/<task>/<method>.jsonl   id, question, answers, prediction, scores, tokens, prompt and row digests
    <run>/<task>/<method>.json    the settings of these answers; a run with different settings is an error
    <run>/wrong_passages/...      the same files for the floor: answers from the passages of other questions

Answers are appended batch by batch: a killed run continues where it stopped, and several processes may fill different
files.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..common.files import counted, digest, write_atomically
from ..common.rows import Row

FLOOR = "wrong_passages"
# Settings that may change when a run continues.
FREE_SETTINGS = {"machine", "checkpoint", "corpus", "batch_size", "about"}
# Keys that version 0.2 wrote under another name.
_NEW_NAMES = {"confidence": "answerability"}


def row_digest(row: Row) -> str:
    """A digest of a row's question, golds and passages."""
    return digest([row["question"], row["answers"], row["passages"]])


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
        """All answers, without a last line that a kill has truncated."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return [{_NEW_NAMES.get(name, name): value for name, value in json.loads(line).items()} for line in lines]

    def settings(self) -> dict[str, Any]:
        """The settings that the answers were made with."""
        return json.loads(self.settings_path.read_text(encoding="utf-8"))

    def open(self, settings: dict[str, Any], rows: list[Row]) -> list[Row]:
        """Prepare the file for answers, and return the rows that are not answered yet."""
        known = {answer["id"]: answer["row"] for answer in self.read()}
        if known:
            self._check(settings, rows, known)
        unanswered = [row for row in rows if row["id"] not in known]
        if unanswered or not self.settings_path.exists():
            write_atomically(self.settings_path, json.dumps(settings, indent=1, ensure_ascii=False))
        return unanswered

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the file: inside, only this process appends. A truncated last line is removed first."""
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=0):
                if self.path.exists():
                    os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
                yield
        except Timeout as error:
            raise ValueError(
                f"Another process is writing to {self.path}. Wait until that process has ended, or stop it. "
                "`arcaligner evaluate` may run at the same time with other `--tasks` or `--methods`."
            ) from error

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Append answers. All of them are on disk when this method returns."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def _check(self, settings: dict[str, Any], rows: list[Row], known: dict[str, str]) -> None:
        before = self.settings()

        def shown(keys: dict[str, Any], key: str) -> str:
            return "not set" if keys.get(key) is None else repr(keys[key])

        changed = [
            f"`{key}` was {shown(before, key)} and is now {shown(settings, key)}"
            for key in sorted({*before, *settings} - FREE_SETTINGS)
            if before.get(key) != settings.get(key)
        ]
        changed += [
            f"the question, answers or passages of the row {row['id']} have changed"
            for row in rows
            if known.get(row["id"], row_digest(row)) != row_digest(row)
        ]
        if changed:
            raise ValueError(
                f"{self.path} contains {counted(len(known), 'answer')} made with different settings or questions: "
                f"{', '.join(changed[:3])}. Choose another folder with `--output`, or delete the file to make its "
                "answers again."
            )


def answer_files(run: Path) -> list[AnswerFile]:
    """All files of answers in a run's folder."""
    paths = sorted(path for path in run.glob("*/*.json") if path.with_suffix(".jsonl").exists())
    return [AnswerFile(run, path.parent.name, path.stem) for path in paths]
