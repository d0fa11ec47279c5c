"""Make the training and validation files of the recipes from public data sets.

    python -m arcaligner.train.prepare_data                         # into `data`, where the recipes look for them
    python -m arcaligner.train.prepare_data --limit hotpotqa=20000 --limit squad=5000
    python -m arcaligner.train.prepare_data --copies FOLDER         # from copies of the sets: FOLDER/rajpurkar/squad

    train_qa        SQuAD, Natural Questions from QED, HotpotQA (ten paragraphs a question), MuSiQue (twenty)
    train_extra     QAMR: questions about one sentence
    recon_train     one paragraph from each of many articles of Wikipedia
    recon_heldout   the same, of further articles that are not in train_qa

By default there are about as many rows of each as the shipped aligner was trained on. The sets are streamed: a limit
also limits the download. Finished files stay, so an interrupted run continues with the next one. `README.md`
next to the files describes their content and licences.
"""

import contextlib
import gzip
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import datasets
import huggingface_hub
import typer
from tqdm.auto import tqdm

from ..common.data_sets import (
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
from ..common.files import markdown_table, read_json_lines, refuse_unknown, run_command, write_atomically
from ..common.rows import Row, normalized_row

HELD_OUT = 2000  # paragraphs
HELD_OUT_FILE = "recon_heldout.jsonl.gz"  # made together with recon_train.jsonl.gz
DESCRIPTION = """\
# Training data

Made by `python -m arcaligner.train.prepare_data`, in the schema of `docs/training.md`. Changes: rows were selected, and
their fields renamed; spaces before punctuation were removed from QED's text; of each article of Wikipedia there is one
paragraph. If you share these files, or a model trained on them, name the data sets and keep their licences.
"""


@dataclass(frozen=True)
class Source:
    """A public data set."""

    name: str  # in `--limit`, and prefix of the ids of its rows
    place: str  # a data set of the Hub or, with `files`, a repository of GitHub
    to_rows: Callable[[dict], Row | Iterable[Row] | None]
    limit: int | None = None  # number of rows to take, from the beginning
    config: str | None = None  # on the Hub
    commit: str | None = None  # of the repository
    files: tuple[str, ...] = ()  # text files of the repository, whose lines or paragraphs are its rows
    sample_by: str = "line"  # or "paragraph"

    def open(self, copies: Path | None, revision: str | None) -> datasets.IterableDataset:
        """A stream of the set's rows, whose order is always the same."""
        if self.files:
            root = copies / self.place if copies else f"https://raw.githubusercontent.com/{self.place}/{revision}"
            files, how = [f"{root}/{file}" for file in self.files], {"sample_by": self.sample_by}
            return datasets.load_dataset("text", data_files=files, split="train", streaming=True, **how)
        path = self.place if copies is None else str(copies / self.place)
        return datasets.load_dataset(path, self.config, split="train", revision=revision, streaming=True)


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
        files=("data/readable/dev.tsv", "data/readable/test.tsv"),
        sample_by="paragraph",
    ),
    Source("wikipedia", WIKIPEDIA, wikipedia_row, 48_000, config="20231101.en"),
)


def _limited(source: Source, stream: datasets.IterableDataset) -> Iterator[Row]:
    """The first rows of a set. With a limit, each of its files contributes equally; if one has too few, later ones
    contribute more."""
    num_taken = 0
    for file in range(stream.num_shards):
        limit = None if source.limit is None else source.limit * (file + 1) // stream.num_shards - num_taken
        for row in itertools.islice(_converted(source, stream.shard(stream.num_shards, file)), limit):
            num_taken += 1
            yield row


def _converted(source: Source, stream: datasets.IterableDataset) -> Iterator[Row]:
    """Convert the rows of a stream to the schema of `common/rows.py`."""
    stored = iter(stream)
    while True:
        with _reaching(source):
            row = next(stored, None)
        if row is None:
            return
        try:
            converted = source.to_rows(row) or ()
            rows = [_stored_row(row, source) for row in ([converted] if isinstance(converted, dict) else converted)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{source.place} has a row in an unexpected format ({type(error).__name__}: {error}), with the keys "
                f"{', '.join(sorted(row))}. Leave the data set out with `--limit {source.name}=0`, or pass `--copies "
                "FOLDER` with copies of the data sets in the expected format."
            ) from error
        yield from (row for row in rows if any(passage["text"].strip() for passage in row["passages"]))


def _stored_row(row: Row, source: Source) -> Row:
    """A row as it is written to a file."""
    stored = normalized_row(row | {"id": f"{source.name}_{row['id']}"}, 0, where=source.place) | {
        "dataset": source.place
    }
    gold = stored.pop("gold")
    return stored | {"meta": {"gold": gold}} if gold else stored


@contextlib.contextmanager
def _reaching(source: Source) -> Iterator[None]:
    """Turn an error in reading a set into one that says what to do."""
    try:
        yield
    except Exception as error:  # of whichever library reads the files
        raise OSError(
            f"{source.place} cannot be read ({type(error).__name__}: {error}). Run the command again to continue, "
            f"or put a copy of the data set into FOLDER/{source.place} and pass `--copies FOLDER`."
        ) from error


# Files


def write_file(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a gzipped file atomically. Equal rows give equal bytes."""

    def write(file: BinaryIO) -> None:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            for row in rows:
                packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode())

    write_atomically(path, write)


def split_paragraphs(rows: Iterable[Row], known_titles: set[str]) -> tuple[list[Row], list[Row]]:
    """Paragraphs for training and held-out ones, in random order, without duplicates. No held-out one has a title in
    `known_titles`."""
    unique = list({row["passages"][0]["text"]: row for row in rows}.values())
    random.Random(0).shuffle(unique)
    others = [number for number, row in enumerate(unique) if row["passages"][0]["title"] not in known_titles]
    held_out = set(others[: min(HELD_OUT, len(unique) // 5)])
    trained = [row for number, row in enumerate(unique) if number not in held_out]
    return trained, [unique[number] for number in sorted(held_out)]


def prepare(output: Path, sources: Sequence[Source], copies: Path | None = None) -> None:
    """Make the files of `TRAINING_FILES` in `output`, and its `README.md`; finished files stay."""
    if not (output / "README.md").exists():
        write_atomically(output / "README.md", DESCRIPTION)
    for name in TRAINING_FILES:
        used = [source for source in sources if source.place in TRAINING_FILES[name]]
        if name == HELD_OUT_FILE or not used:
            continue
        if (output / name).exists():
            typer.echo(f"{output / name} exists and was not changed. Delete the file to make it again.")
        else:
            _make(output, name, used, copies)


def _make(output: Path, name: str, sources: list[Source], copies: Path | None) -> None:
    """Makes a file from its sets, and the part of `README.md` on their origin and licences. The file of training
    paragraphs comes with the file of held-out paragraphs."""
    revisions, numbers = {}, Counter()

    def read() -> Iterator[Row]:
        for source in sources:
            with _reaching(source):
                revision = None if copies else source.commit or huggingface_hub.HfApi().dataset_info(source.place).sha
                stream = source.open(copies, revision)
            revisions[source.place] = revision or "a local copy"
            for row in tqdm(_limited(source, stream), total=source.limit, desc=source.name, unit="row"):
                numbers[source.place] += 1
                yield row

    rows, made = read(), name
    if name == "recon_train.jsonl.gz":
        questions = output / "train_qa.jsonl.gz"
        question_rows = read_json_lines(questions) if questions.exists() else ()
        titles = {passage["title"] for row in question_rows for passage in row["passages"]}
        rows, held_out = split_paragraphs(rows, titles)
        write_file(output / HELD_OUT_FILE, held_out)
        made += f", {HELD_OUT_FILE}"
    write_file(output / name, rows)
    table = [[*LICENCES[place], f"{place}, {revision}", numbers[place]] for place, revision in revisions.items()]
    lines = ["", f"## {made}", "", *markdown_table(["Set", "Licence", "From", "Rows"], table), ""]
    page = re.sub(rf"\n## {re.escape(made)}\n[^#]*", "", (output / "README.md").read_text(encoding="utf-8"))
    write_atomically(output / "README.md", page + "\n".join(lines))


# The command


def read_limits(arguments: Iterable[str]) -> list[Source]:
    """The sources with the limits of a command line, `NAME=ROWS`; those of 0 rows are left out."""
    numbers = dict(limit.partition("=")[::2] for limit in arguments)
    refuse_unknown("`--limit`", numbers, [source.name for source in SOURCES])
    if bad := [name for name, number in numbers.items() if not number.isdecimal()]:
        raise ValueError(
            f"`--limit` is {bad[0]}={numbers[bad[0]]}; expected a whole number of rows, as in `--limit {bad[0]}=1000`."
        )
    limits = {name: int(number) for name, number in numbers.items()}
    limited = [replace(source, limit=limits.get(source.name, source.limit)) for source in SOURCES]
    return [source for source in limited if source.limit != 0]


def main(
    output: Annotated[Path, typer.Option(help="Folder in which the files are saved.")] = Path("data"),
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Maximum number of rows of a data set, such as squad=5000; 0 leaves the data set out. Can be "
            f"repeated. The data sets: {', '.join(source.name for source in SOURCES)}."
        ),
    ] = None,
    copies: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a copy of each data set under the name of its repository, such as "
            "FOLDER/rajpurkar/squad. Default: download them.",
            exists=True,
        ),
    ] = None,
) -> None:
    """Make the training and validation files of the recipes from public data sets."""
    sources = read_limits(limit or [])
    prepare(output, sources, copies)
    typer.echo((output / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
