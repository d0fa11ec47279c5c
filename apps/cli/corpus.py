"""The commands `arcaligner corpus`: build, change, precompute and describe passages that are encoded once."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...common.files import DEFAULT_CHECKPOINT, counted
from ...common.passages import tokens_of_words
from . import shared
from .shared import Checkpoint, CorpusFolder, Dtype, TokensPerSlot, busy, messages, one_line, show

# How many skipped files and rows are listed: a wrong column name would list every row.
MOST_NAMED = 20

corpus_app = typer.Typer(
    help="Build, change and describe a corpus: passages that are encoded once.", no_args_is_help=True
)


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...", help="Files (text, Markdown, HTML, PDF, DOCX, JSON Lines, Parquet), folders, data sets."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if anything could not be read.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help=f"List everything that is skipped, not only the first {MOST_NAMED}.")
]
Processes = Annotated[
    int, typer.Option(help="Number of processes that encode passages; each loads its own encoder.", min=1)
]


@corpus_app.command("build")
def build(
    sources: Sources,
    folder: Annotated[Path, typer.Option("--output", help="Folder of the corpus. An existing one is updated.")],
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    passage_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per passage. Default: the checkpoint's.", min=1)
    ] = None,
    passage_words: Annotated[
        int | None, typer.Option(help="Deprecated: `--passage-tokens` in English words.", min=1, hidden=True)
    ] = None,
    tokens_per_slot: TokensPerSlot = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove documents that are in none of the sources.")] = False,
    strict: Strict = False,
    verbose: Verbose = False,
    processes: Processes = 1,
) -> None:
    """Make a corpus from texts, or update one: new documents are added, changed ones replaced."""
    shared.check_there(checkpoint)
    from ..corpus.build import build_corpus, summary
    from ..corpus.sources import check_source
    from ..corpus.table import Corpus

    for source in sources:  # before models are loaded
        check_source(source)
    if passage_words is not None:
        if passage_tokens is not None:
            raise ValueError(
                "`--passage-words` and `--passage-tokens` set the same limit. Leave `--passage-words` out."
            )
        passage_tokens = tokens_of_words(passage_words)
        messages.print(f"`--passage-words` is deprecated; use `--passage-tokens {passage_tokens}`.", soft_wrap=True)
    processor, is_new = shared.load_processor(checkpoint), not folder.exists()
    corpus = Corpus.create(folder, processor, tokens_per_slot=tokens_per_slot, passage_tokens=passage_tokens)
    try:
        with busy("Encoding passages"):
            report = build_corpus(
                sources,
                corpus,
                processor,
                prune=prune,
                processes=processes,
                on_batch=lambda report: messages.print(f"[dim]{counted(report.passages, 'passage')}[/]"),
            )
    except (ValueError, OSError):
        if is_new and len(corpus) == 0:  # no passage was written
            shutil.rmtree(folder)
        raise
    named = report.skipped if verbose else report.skipped[:MOST_NAMED]
    for each in named:
        messages.print(one_line(f"Skipped: {each}"), markup=False, soft_wrap=True)
    if others := len(report.skipped) - len(named):
        messages.print(f"Skipped: {others:,} more (--verbose lists them)", soft_wrap=True)
    show(summary(report, corpus.info()))
    if strict and report.skipped:
        raise ValueError(
            f"{counted(len(report.skipped), 'item')} of the sources could not be read. The first: "
            f"{one_line(report.skipped[0])}. The rest is in the corpus. Correct or remove what could not be read, or "
            "run without `--strict`."
        )


@corpus_app.command("add")
def add(
    sources: Sources,
    corpus: CorpusFolder,
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    strict: Strict = False,
    verbose: Verbose = False,
    processes: Processes = 1,
) -> None:
    """Add documents to an existing corpus, and replace those that have changed. Otherwise like `build`."""
    from ..corpus.table import Corpus

    Corpus(corpus)  # raises if there is none
    build(sources, corpus, checkpoint, None, None, strict=strict, verbose=verbose, processes=processes)


@corpus_app.command("read")
def read(corpus: CorpusFolder, checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), dtype: Dtype = None) -> None:
    """Precompute keys and values of all passages of a corpus, for `ask` and `serve` in the same precision."""
    from ..corpus.kept import read_corpus
    from ..corpus.table import Corpus

    opened = Corpus(corpus)
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint, dtype)
    with busy("Precomputing passages"):
        done = read_corpus(opened, ask.model, ask.processor, lambda said: messages.print(f"[dim]{said}[/]"))
    show(done)


@corpus_app.command("remove")
def remove(
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT...", help="Ids of documents, as `ask` prints them.")
    ],
    corpus: CorpusFolder,
) -> None:
    """Remove documents from a corpus."""
    from ..corpus.table import Corpus

    Corpus(corpus).remove(documents)
    messages.print(f"{counted(len(documents), 'document')} removed")


@corpus_app.command("info")
def info(corpus: CorpusFolder) -> None:
    """Show what is in a corpus, the settings that it was made with, and its size."""
    from ..corpus.table import Corpus

    found = Corpus(corpus).info()
    for name, value in found.items():
        show(f"{name}: {value}")
    if found["passages"]:
        show(f"bytes_per_passage: {found['bytes'] / found['passages']:.0f}")
