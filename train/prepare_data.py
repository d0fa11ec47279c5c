"""Makes the training and validation files that the recipes name, of public sets.

    python -m arcaligner.train.prepare_data                         # into `data`, where the recipes look for them
    python -m arcaligner.train.prepare_data --limit hotpotqa=20000 --limit squad=5000
    python -m arcaligner.train.prepare_data --copies FOLDER         # of copies of the sets, FOLDER/rajpurkar/squad, ...

    train_qa        SQuAD, NaturalQuestions by way of QED, HotpotQA with its ten paragraphs, MuSiQue with its twenty
    train_extra     QAMR: questions about one sentence
    recon_train     a paragraph of each of many articles of Wikipedia
    recon_heldout   the same, of further articles that are not in train_qa

By default there are about as many rows of each as the shipped aligner was trained on. The sets are streamed: a limit
also limits what is downloaded. Rows are kept as they come, so a run that broke off goes on where it was, with the same
version of the set. A finished file is left alone. `README.md` beside the files says what they hold, and the licences.
"""

import contextlib
import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import datasets
import huggingface_hub
import typer
from tqdm.auto import tqdm

from ..data_sets import (
    HOTPOTQA,
    LICENCES,
    MUSIQUE,
    QAMR,
    QED,
    SQUAD,
    TRAINING_FILES,
    WIKIPEDIA,
    hotpotqa_row,
    musique_row,
    qamr_rows,
    qed_row,
    squad_row,
    wikipedia_row,
)
from ..files import counted, digest, markdown_table, read_json_lines, refuse_unknown, run_command, write_whole
from ..rows import Row, own_row

HELD_OUT = 2000  # paragraphs
PARTS = ".parts"  # folder of what is not finished
ROWS_PER_NOTE = 2000  # rows of a set between two notes of how far it was read
RECONSTRUCTION_FILES = ("recon_train.jsonl.gz", "recon_heldout.jsonl.gz")


@dataclass(frozen=True)
class Source:
    """
    A public set.

    Args:
        name (`str`): In `--limit`, and what the ids of its rows begin with.
        place (`str`): A data set of the Hub or, with `files`, a repository of GitHub.
        to_rows (`Callable`): A row of the set to a row of ours, several or `None`.
        limit (`int`, *optional*): Rows that are taken, the first ones; all by default.
        config (`str`, *optional*): Its configuration on the Hub.
        commit (`str`, *optional*): Of the repository.
        files (`tuple[str, ...]`): Text files of the repository, whose lines or paragraphs are its rows.
        sample_by (`str`): `"line"` or `"paragraph"`.
    """

    name: str
    place: str
    to_rows: Callable[[dict], Row | Iterable[Row] | None]
    limit: int | None = None
    config: str | None = None
    commit: str | None = None
    files: tuple[str, ...] = ()
    sample_by: str = "line"

    def revision(self, copies: Path | None) -> str | None:
        """The version of the set that is read; unknown of a copy."""
        if copies is not None:
            return None
        return self.commit or huggingface_hub.HfApi().dataset_info(self.place).sha

    def open(self, copies: Path | None, revision: str | None) -> datasets.IterableDataset:
        """A stream of the set's rows, in turn from each of its files; their order is always the same.

        Raises:
            `OSError`: a set that cannot be reached.
        """
        if self.files:
            root = (
                f"https://raw.githubusercontent.com/{self.place}/{revision}" if copies is None else copies / self.place
            )
            return datasets.load_dataset(
                "text", data_files=[f"{root}/{file}" for file in self.files], split="train", streaming=True,
                sample_by=self.sample_by,
            )  # fmt: skip
        path = self.place if copies is None else str(copies / self.place)
        stream = datasets.load_dataset(path, self.config, split="train", revision=revision, streaming=True)
        parts = [stream.shard(stream.num_shards, index) for index in range(stream.num_shards)]
        return datasets.interleave_datasets(parts, stopping_strategy="all_exhausted_without_replacement")

    def rows(self, row: dict) -> Iterator[Row]:
        """The rows that a row of the set becomes."""
        found = self.to_rows(row)
        for each in () if found is None else [found] if isinstance(found, dict) else found:
            yield each | {"id": f"{self.name}_{each['id']}"}


SOURCES = (
    Source("squad", SQUAD, squad_row),
    Source("qed", QED, qed_row, commit="2492920337122918bbfc7d12c1268b9af796c6cf", files=("qed-train.jsonlines",)),
    Source("hotpotqa", HOTPOTQA, hotpotqa_row, 1_100, config="distractor"),
    Source("musique", MUSIQUE, musique_row, 100),
    Source(
        "qamr",
        QAMR,
        qamr_rows,
        commit="3c81e6a67dbe90187178346bdf64eb75b448677f",
        sample_by="paragraph",
        files=("data/readable/dev.tsv", "data/readable/test.tsv"),
    ),  # fmt: skip
    Source("wikipedia", WIKIPEDIA, wikipedia_row, 48_000, config="20231101.en"),
)


def fetch(source: Source, folder: Path, copies: Path | None) -> dict[str, Any]:
    """Writes the rows of a set to `folder/NAME.jsonl`, or goes on with what is there.

    Returns:
        `dict`: `made_with`, `rows`, `revision`, `finished`, and what is needed to go on: `bytes` of the file, `state`
        of the stream.

    Raises:
        `OSError`: a set that cannot be reached, or no longer; what was read stays.
        `ValueError`: a row of another form.
    """
    part, note = part_of(source, folder), note_of(source, folder)
    done = read_note(note)
    if done.get("made_with") != made_with(source, copies) or not part.exists():
        done = {"made_with": made_with(source, copies), "rows": 0, "bytes": 0, "state": None, "finished": False}
    if done["finished"]:
        return done
    part.parent.mkdir(parents=True, exist_ok=True)
    with _reaching(source, done):
        done["revision"] = done.get("revision") or source.revision(copies)
        stream = source.open(copies, done["revision"])
        if done["state"] is not None:
            stream.load_state_dict(done["state"])
    with part.open("ab") as file, tqdm(total=source.limit, initial=done["rows"], desc=source.name) as bar:
        file.truncate(done["bytes"])  # without what was written after the last note
        for number, rows in enumerate(_converted(source, stream, done), start=1):
            for row in rows if source.limit is None else rows[: source.limit - done["rows"]]:
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
                done["rows"] += 1
            bar.update(done["rows"] - bar.n)
            if done["rows"] == source.limit:
                break
            if number % ROWS_PER_NOTE == 0:
                _write_note(note, done | {"state": stream.state_dict()}, file)
        done |= {"finished": True, "state": None}
        _write_note(note, done, file)
    return done


def made_with(source: Source, copies: Path | None) -> str:
    """Changes with what decides the rows of a set."""
    return digest([source.place, source.config, source.limit, source.commit, source.files, copies and str(copies)])


def part_of(source: Source, folder: Path) -> Path:
    """Where the rows of a set stand until its file is made."""
    return folder / f"{source.name}.jsonl"


def note_of(source: Source, folder: Path) -> Path:
    """Where it stands how far a set was read."""
    return folder / f"{source.name}.json"


def read_note(path: Path) -> dict[str, Any]:
    """How far a set was read; empty if it was not."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write_note(path: Path, done: dict[str, Any], part: BinaryIO) -> None:
    """Keeps how far a set was read, once the rows are on the disk."""
    part.flush()
    os.fsync(part.fileno())
    done["bytes"] = part.tell()
    write_whole(path, json.dumps(done))


def _converted(source: Source, stream: datasets.IterableDataset, done: dict[str, Any]) -> Iterator[list[Row]]:
    """The rows of ours that each row of a stream becomes."""
    stored = iter(stream)
    while True:
        with _reaching(source, done):
            row = next(stored, None)
        if row is None:
            return
        try:
            yield [own for each in source.rows(row) if (own := _checked(each, source.place))]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{source.place} has a row of another form than the one known here ({type(error).__name__}: {error}), "
                f"with {sorted(row)}. Leave the set out with `--limit {source.name}=0`, or name another version."
            ) from error


def _checked(row: Row, place: str) -> Row | None:
    """A row of our schema, with `meta.gold` only where the row says so; `None` if it has no passage to read."""
    own = own_row(row, 0, where=place)
    gold = own.pop("gold")
    if not any(passage["text"].strip() for passage in own["passages"]):
        return None
    return own | {"dataset": place} | ({"meta": {"gold": gold}} if gold else {})


@contextlib.contextmanager
def _reaching(source: Source, done: dict[str, Any]) -> Iterator[None]:
    """Says of an error in reading a set what it means and what to do."""
    try:
        yield
    except Exception as error:  # of whichever library reads the files
        raise OSError(
            f"{source.place} cannot be reached ({type(error).__name__}: {error}). {counted(done['rows'], 'row')} of it "
            "were written; run the command again to go on there, or put a copy of the set into a folder and name "
            "that with `--copies`."
        ) from error


# Files


def write_file(name: str, rows: Iterable[Row], folder: Path) -> None:
    """Writes rows to a gzipped file, whole or not at all; the same rows give the same bytes."""

    def write(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            for row in rows:
                packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode())

    write_whole(folder / name, write)


def split_paragraphs(rows: Iterable[Row], known_titles: set[str]) -> tuple[list[Row], list[Row]]:
    """Paragraphs for training and held-out ones, in random order, each text once. The titles of held-out ones are not
    in `known_titles`."""
    unique = list({row["passages"][0]["text"]: row for row in rows}.values())
    random.Random(0).shuffle(unique)
    number = min(HELD_OUT, len(unique) // 5)
    others = [row for row in unique if row["passages"][0]["title"] not in known_titles]
    held_out = others[:number]
    ids = {row["id"] for row in held_out}
    return [row for row in unique if row["id"] not in ids], held_out


def prepare(output: Path, sources: Sequence[Source], copies: Path | None = None) -> None:
    """Makes the files of `TRAINING_FILES` in `output`, and its `README.md`; what is finished is left alone.

    Raises:
        `OSError`: a set that cannot be reached; what was read stays.
        `ValueError`: a file that is there and was made of something else.
    """
    parts = output / PARTS
    for names in (("train_qa.jsonl.gz",), ("train_extra.jsonl.gz",), RECONSTRUCTION_FILES):
        own = [source for source in sources if source.place in TRAINING_FILES[names[0]]]
        if all((output / name).exists() for name in names):
            for source in own:
                if read_note(note_of(source, parts)).get("made_with") != made_with(source, copies):
                    raise ValueError(
                        f"{output / names[0]} is there, and was not made of {source.place} with these settings. Delete "
                        "it to make it again, or write to another folder with `--output`."
                    )
            continue
        for source in own:
            fetch(source, parts, copies)
        rows = itertools.chain.from_iterable(read_json_lines(part_of(source, parts)) for source in own)
        if names == RECONSTRUCTION_FILES:
            known = {each["title"] for row in read_json_lines(output / "train_qa.jsonl.gz") for each in row["passages"]}
            for name, chosen in zip(names, split_paragraphs(rows, known), strict=True):
                write_file(name, chosen, output)
        else:
            write_file(names[0], rows, output)
        for source in own:
            part_of(source, parts).unlink()
    write_whole(output / "README.md", describe(sources, parts))


def describe(sources: Sequence[Source], parts: Path) -> str:
    """What the files hold, where it is from and under which licence."""
    table = []
    for source in sources:
        note, files = (
            read_note(note_of(source, parts)),
            [name for name in TRAINING_FILES if source.place in TRAINING_FILES[name]],
        )
        title, licence = LICENCES[source.place]
        version = (note.get("revision") or "a local copy")[:12]
        table.append([title, f"{source.place}, {version}", note["rows"], licence, ", ".join(files)])
    lines = markdown_table(["Set", "From", "Rows", "Licence", "In"], table)
    return "\n".join([
        "# Training data", "", *lines, "",
        "Made by `python -m arcaligner.train.prepare_data`. Rows are in the schema of `docs/training.md`. Changed: selection "
        "and field names; QED's text has no spaces before punctuation; of an article of Wikipedia one paragraph is taken. "
        "Whoever shares these files, or a model trained on them, names the sets and keeps their licences.", "",
    ])  # fmt: skip


# The command


def read_limits(given: Iterable[str]) -> list[Source]:
    """The sources with the limits of a command line, `NAME=ROWS`; those of 0 rows are left out.

    Raises:
        `ValueError`: a source that there is not, or no whole number.
    """
    limits = dict(each.partition("=")[::2] for each in given)
    refuse_unknown("`--limit`", limits, [source.name for source in SOURCES])
    if bad := [name for name, number in limits.items() if not number.isdecimal()]:
        raise ValueError(
            f"`--limit {bad[0]}={limits[bad[0]]}`: expected a whole number of rows, as in `--limit {bad[0]}=1000`."
        )
    asked = [replace(source, limit=int(limits[source.name])) if source.name in limits else source for source in SOURCES]
    return [source for source in asked if source.limit != 0]


def main(
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("data"),
    limit: Annotated[list[str] | None, typer.Option(help="Rows of a set, as in squad=5000; can be repeated.")] = None,
    copies: Annotated[
        Path | None,
        typer.Option(help="Folder with a copy of each set under its name, instead of the Hub.", exists=True),
    ] = None,
) -> None:
    """Makes the training and validation files that the recipes name, of public sets."""
    sources = read_limits(limit or [])
    prepare(output, sources, copies)
    typer.echo((output / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
