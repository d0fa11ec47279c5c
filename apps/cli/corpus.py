"""The commands `arcaligner corpus`: build, change, precompute and describe passages that are encoded once."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...common.files import DEFAULT_CHECKPOINT, counted
from ...common.passages import tokens_of_words
from . import shared
from .shared import Checkpoint, CorpusFolder, CorpusTokensPerSlot, Dtype, busy, messages, one_line, show

# How many skipped files and rows are listed: a wrong column name would list every row.
MAX_LISTED = 20

corpus_app = typer.Typer(
    help="Build, update and inspect a corpus: a folder of passages that are encoded once, for `ask` and `serve`.",
    no_args_is_help=True,
)


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Files (text, Markdown, HTML, PDF, DOCX, JSON Lines, Parquet), folders, or data sets of the Hub "
        "(user/name).",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with an error if anything is skipped. Everything else is still added.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help=f"List everything that is skipped, not only the first {MAX_LISTED} files and rows."),
]
Processes = Annotated[
    int, typer.Option(help="Number of processes that encode passages; each loads its own encoder.", min=1)
]


@corpus_app.command("build")
def build(
    sources: Sources,
    folder: Annotated[Path, typer.Option("--output", help="Folder of the corpus. An existing corpus is updated.")],
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    passage_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per passage. Default: that of an existing corpus, else the checkpoint's.",
            min=1,
        ),
    ] = None,
    passage_words: Annotated[
        int | None,
        typer.Option(
            help="Deprecated: maximum number of English words per passage. Use `--passage-tokens`.", min=1, hidden=True
        ),
    ] = None,
    tokens_per_slot: CorpusTokensPerSlot = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove documents that are in none of the sources.")] = False,
    strict: Strict = False,
    verbose: Verbose = False,
    processes: Processes = 1,
) -> None:
    """Make a corpus from texts, or update one: add new documents, and replace those that have changed."""
    shared.check_checkpoint_exists(checkpoint)
    from ..corpus.build import build_corpus, summary
    from ..corpus.sources import check_source
    from ..corpus.table import Corpus

    for source in sources:  # before models are loaded
        check_source(source)
    if passage_words is not None:
        if passage_tokens is not None:
            raise ValueError(
                "`--passage-words` and `--passage-tokens` set the same limit. Leave out `--passage-words`."
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
                on_batch=lambda report: messages.print(f"[dim]{counted(report.passages, 'passage')} encoded[/]"),
            )
    except (ValueError, OSError):
        if is_new and len(corpus) == 0:  # no passage was written
            shutil.rmtree(folder)
        raise
    listed = report.skipped if verbose else report.skipped[:MAX_LISTED]
    for reason in listed:
        messages.print(one_line(f"Skipped: {reason}"), markup=False, soft_wrap=True)
    if others := len(report.skipped) - len(listed):
        messages.print(f"Skipped: {others:,} more (`--verbose` lists all)", soft_wrap=True)
    show(summary(report, corpus.info()))
    if strict and report.skipped:
        raise ValueError(
            f"{len(report.skipped)} of the files and rows {'was' if len(report.skipped) == 1 else 'were'} skipped. "
            f"The first one: {one_line(report.skipped[0]).rstrip('.')}. Everything else is in the corpus. Correct or "
            "remove what was skipped, or leave out `--strict`."
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
    """Add documents to an existing corpus, and replace those that have changed."""
    from ..corpus.table import Corpus

    Corpus(corpus)  # raises if there is none
    build(sources, corpus, checkpoint, None, None, strict=strict, verbose=verbose, processes=processes)


@corpus_app.command("precompute")
def precompute(corpus: CorpusFolder, checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), dtype: Dtype = None) -> None:
    """Precompute the keys and values of all passages of a corpus, for `ask` and `serve` with the same `--dtype`."""
    from ..corpus.precompute import precompute_corpus
    from ..corpus.table import Corpus

    opened = Corpus(corpus)
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint, dtype)
    with busy("Precomputing passages"):
        summary = precompute_corpus(opened, ask.model, ask.processor, lambda line: messages.print(f"[dim]{line}[/]"))
    show(summary)


@corpus_app.command("read", hidden=True)
def precompute_as_read(
    corpus: CorpusFolder, checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), dtype: Dtype = None
) -> None:
    """The name of `precompute` in version 0.2."""
    messages.print("`corpus read` is deprecated; use `corpus precompute`.", soft_wrap=True)
    precompute(corpus, checkpoint, dtype)


@corpus_app.command("remove")
def remove(
    documents: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENT...",
            help="Ids of documents, such as letters/letter.txt. `ask` prints a passage as ID:START-END.",
        ),
    ],
    corpus: CorpusFolder,
) -> None:
    """Remove documents from a corpus."""
    from ..corpus.table import Corpus

    Corpus(corpus).remove(documents)
    messages.print(f"{counted(len(set(documents)), 'document')} removed")


@corpus_app.command("info")
def info(corpus: CorpusFolder) -> None:
    """Show the number of documents, passages and slots of a corpus, its size, and the settings it was made with."""
    from ..corpus.table import Corpus

    facts = Corpus(corpus).info()
    for name, value in facts.items():
        show(f"{name}: {value}")
    if facts["passages"]:
        show(f"bytes_per_passage: {facts['bytes'] / facts['passages']:.0f}")
