"""The commands `arcaligner corpus`: build, change, read ahead and describe passages that are encoded once."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..common.files import DEFAULT_CHECKPOINT, counted
from ..common.passages import PASSAGE_WORDS
from . import shared
from .shared import Checkpoint, CorpusFolder, Dtype, TokensPerSlot, busy, messages, one_line, show

corpus_app = typer.Typer(help="Builds, changes and describes a corpus: passages encoded once.", no_args_is_help=True)

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...", help="Text, Markdown, HTML, PDF, DOCX, JSON Lines, Parquet; folders; data sets."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at anything that cannot be read, instead of skipping it.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Name everything that is skipped, not only the first three.")]


def tell_time_left() -> Callable[[int, int], None]:
    """Says how far a large document is, and how long the rest will take at the pace of the last part."""
    before = (0, 0.0)

    def tell(done: int, total: int) -> None:
        nonlocal before
        parts, (last, then), now = f"{done} of {total} passages", before, time.monotonic()
        if done > last:
            seconds = (total - done) * (now - then) / (done - last)
            parts += f", about {counted(round(seconds / 60), 'minute') if seconds > 90 else f'{seconds:.0f} s'} left"
        before = done, now
        messages.print(f"[dim]{parts} of a large document[/]")

    return tell


def fill_corpus(corpus, processor, sources: list[str], strict: bool, verbose: bool, prune: bool = False) -> None:
    """Adds sources to a corpus and says what was done."""
    from ..corpus.build import build_corpus, summary

    with busy("Encoding passages"):
        report = build_corpus(
            sources,
            corpus,
            processor,
            strict=strict,
            prune=prune,
            on_batch=lambda report: messages.print(f"[dim]{counted(report.passages, 'passage')}[/]"),
            on_part=tell_time_left(),
        )
    shown = report.skipped[: None if verbose else 3]
    for each in shown:
        messages.print(one_line(f"Skipped: {each}"), markup=False, soft_wrap=True)
    if left := len(report.skipped) - len(shown):
        messages.print(f"Skipped: {left} more, which --verbose names", soft_wrap=True)
    show(summary(report, corpus.info()))


@corpus_app.command("build")
def build(
    sources: Sources,
    folder: Annotated[Path, typer.Option("--output", help="Folder of the corpus. An existing one is updated.")],
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    passage_words: Annotated[int, typer.Option(help="Maximum number of words per passage.", min=1)] = PASSAGE_WORDS,
    tokens_per_slot: TokensPerSlot = None,
    strict: Strict = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove documents that are in none of the sources.")] = False,
    verbose: Verbose = False,
) -> None:
    """Makes a corpus from texts, or updates one: new documents are added, changed ones replaced."""
    shared.check_there(checkpoint)
    shared.check_sources(sources)
    processor = shared.load_processor(checkpoint)
    from ..corpus.table import Corpus

    is_new = not folder.exists()
    corpus = Corpus.create(folder, processor, passage_words, tokens_per_slot)
    try:
        fill_corpus(corpus, processor, sources, strict, verbose, prune)
    except ValueError:
        if is_new and len(corpus) == 0:  # nothing came of it
            shutil.rmtree(folder)
        raise


@corpus_app.command("add")
def add(
    sources: Sources,
    corpus: CorpusFolder,
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    strict: Strict = False,
    verbose: Verbose = False,
) -> None:
    """Adds documents to a corpus, and replaces those that have changed."""
    shared.check_there(checkpoint)
    shared.check_sources(sources)
    processor = shared.load_processor(checkpoint)
    from ..corpus.table import Corpus

    opened = Corpus(corpus)
    opened.check(processor)
    fill_corpus(opened, processor, sources, strict, verbose)


@corpus_app.command("read")
def read(corpus: CorpusFolder, checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), dtype: Dtype = None) -> None:
    """Reads all passages of a corpus ahead, and keeps their keys and values, so that no question has to: of `ask` and
    `serve` in the same precision."""
    from ..corpus.kept import plan, read_corpus
    from ..corpus.table import Corpus

    opened = Corpus(corpus)
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint, dtype)
    messages.print(plan(opened, ask.model, ask.processor))
    with busy("Reading passages"):
        report = read_corpus(opened, ask.model, ask.processor, lambda report: messages.print(f"[dim]{report}[/]"))
    show(str(report))


@corpus_app.command("remove")
def remove(
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="Ids of documents, see `ask`.")],
    corpus: CorpusFolder,
) -> None:
    """Removes documents from a corpus."""
    from ..corpus.table import Corpus

    Corpus(corpus).remove(documents)
    messages.print(f"{counted(len(documents), 'document')} removed")


@corpus_app.command("info")
def info(corpus: CorpusFolder) -> None:
    """Shows what is in a corpus, what it was made with and how large it is."""
    from ..corpus.table import Corpus

    for name, value in Corpus(corpus).info().items():
        show(f"{name}: {value:.0f}" if isinstance(value, float) else f"{name}: {value}")
