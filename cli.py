"""The command line: answer a question from files, watch the demo, train an aligner, measure it, share it.

    python -m arcaligner answer --question "Who wrote it?" --document letter.txt
    python -m arcaligner demo
    python -m arcaligner train --recipe smollm2_135m
    python -m arcaligner evaluate --recipe smollm2_135m
    python -m arcaligner push --repo-id user/name

Answers go to standard output, all else to standard error.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RECIPES = ", ".join(sorted(folder.name for folder in (Path(__file__).parent / "train" / "recipes").glob("*")))
DEFAULT_CHECKPOINT = Path(__file__).parent / "checkpoints" / "arcaligner-smollm2-135m"

app = typer.Typer(
    help="Answers questions from passages, each sentence of which is one slot of the prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
output = Console()
messages = Console(stderr=True)

Document = typer.Option(help="A text file; can be repeated.", exists=True, dir_okay=False)
Folder = Annotated[Path, typer.Option("--checkpoint", help="Aligner checkpoint: a folder.")]
Checkpoint = Annotated[str, typer.Option(help="Aligner checkpoint: a folder or a Hub id.")]


def check_folder(checkpoint: str) -> None:
    """Raises `FileNotFoundError` for a folder that is not there, whose name would be sought on the Hub, for minutes."""
    path = Path(checkpoint).expanduser()
    is_folder = path.is_absolute() or len(path.parts) > 2 or checkpoint.startswith(".") or Path(path.parts[0]).is_dir()
    if is_folder and not path.exists():
        raise FileNotFoundError(
            f"There is no folder {checkpoint}. Name another with `--checkpoint`, or train one: see docs/training.md."
        )


def load_pipeline(checkpoint: str):
    """The pipeline of a checkpoint, from this package's own code.

    Raises:
        `ValueError`: something else than an aligner checkpoint.
        `OSError`: a checkpoint, base model or encoder that is not there, with how to get it.
    """
    check_folder(checkpoint)
    # Here, so that `--help` and mistakes in the options do not wait for them.
    from transformers import PreTrainedConfig
    from transformers.utils import logging

    from .modeling_arcaligner import ArcAlignerForCausalLM
    from .pipeline_arcaligner import ArcAlignerPipeline
    from .processing_arcaligner import ArcAlignerProcessor

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model_type = PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
    except OSError as error:
        raise OSError(
            f"There is no aligner at {checkpoint}: neither a checkpoint folder on this machine nor "
            f"a repository on the Hub that can be reached ({type(error).__name__}). Name another "
            "with `--checkpoint`, or train one: see docs/training.md."
        ) from error
    if model_type != ArcAlignerForCausalLM.config_class.model_type:
        raise ValueError(
            f"{checkpoint} is a checkpoint of type {model_type!r}; expected 'arcaligner', that is "
            "a folder or a Hub id that an ArcAligner model was saved to."
        )
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint).eval()
    processor = ArcAlignerProcessor.from_pretrained(checkpoint, trust_remote_code=False)
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation")


def read_document(path: Path) -> str:
    """The text of a file.

    Raises:
        `ValueError`: a file that is not UTF-8 text, or has none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Convert it to plain text first.") from error
    if not text.strip():
        raise ValueError(f"{path} holds no text. Name a file that says something, or leave it out.")
    return text


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what is being done: in a line that moves, or where that cannot be, such as in a log, in one that stays."""
    if messages.is_terminal:
        with messages.status(what):
            yield
    else:
        messages.print(what, soft_wrap=True)
        yield


def slots_table(record: dict[str, Any]) -> Table:
    """One row for each slot: where its text stands and how often each layer passed over it."""
    from .demo import busiest_layer, format_trajectories

    layer = busiest_layer(record["trajectories"])
    table = Table("Slot", "Document", "Characters", "Text", f"Passes at layer {layer}")
    segments = record["segments"] or [{"document": "-", "start": 0, "end": 0, "text": ""}]
    passes = record["trajectories"][layer]
    for number, (segment, each) in enumerate(zip(segments, passes, strict=True)):
        span = f"{segment['start']}-{segment['end']}"
        text = escape(segment["text"])
        table.add_row(str(number), str(segment["document"]), span, text, format_trajectories([each]))
    return table


def reading_line(statistics: dict[str, Any]) -> str:
    """What was read as how many slots, of how much."""
    num_slots, rate = statistics["slots"], statistics["compression_rate"]
    tokens = (
        f"{round(rate * num_slots)} of {statistics['tokens']}" if statistics.get("dropped") else statistics["tokens"]
    )
    return f"{tokens} tokens of text read as {'one slot' if num_slots == 1 else f'{num_slots} slots'}, x{rate:.1f}"


@app.command()
def answer(
    question: Annotated[str, typer.Option(help="What to ask.")],
    document: Annotated[list[Path], Document],
    checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT),
    show_slots: Annotated[bool, typer.Option("--show-slots", help="Show what each slot stands for.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="The longest answer, in tokens.", min=1)] = None,
    max_slots: Annotated[int | None, typer.Option(help="The most slots; what comes later is not read.", min=1)] = None,
    gate_mode: Annotated[
        Literal["off", "adaptive", "always"] | None,  # `GATE_MODES`, which would wait for transformers
        typer.Option(help="Other than the checkpoint's."),
    ] = None,
) -> None:
    """Answers a question from your own text files."""
    documents = [read_document(path) for path in document]
    with busy("Loading the aligner and its base model"):
        ask = load_pipeline(checkpoint)
    with busy("Reading the documents"):
        row = {"question": question, "documents": documents}
        settings = {"max_new_tokens": max_new_tokens, "max_slots": max_slots, "gate_mode": gate_mode}
        given = {name: value for name, value in settings.items() if value is not None}
        record = ask(row, return_slots=True, **given)[0]
    output.print(record["generated_text"].strip(), markup=False, highlight=False, soft_wrap=True)
    if show_slots:
        output.print(slots_table(record))
    messages.print(f"[dim]{reading_line(record['statistics'])}[/]")


@app.command()
def demo(checkpoint: Checkpoint = str(DEFAULT_CHECKPOINT)) -> None:
    """Answers the paper's three case studies and three questions of SQuAD."""
    from .demo import run_demo

    with busy("Loading the aligner and its base model"):
        ask = load_pipeline(checkpoint)
    run_demo(ask, output)


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help=f"A folder with a file for each stage, or one of ours: {RECIPES}.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="--KEY VALUE", help="Keys of the recipe for every stage, behind --.")
    ] = None,
    stage: Annotated[int | None, typer.Option(help="Only this stage.", min=1, max=3)] = None,
    folder: Annotated[str | None, typer.Option("--output", help="Folder for the stages, not the recipe's.")] = None,
    accelerate: Annotated[
        str | None, typer.Option(help="Several processes: ddp, fsdp2, zero3, cpu, or a config file of accelerate.")
    ] = None,
) -> None:
    """Trains the stages of a recipe that are not finished, each from the end of the one before."""
    from .train.stages import find_recipe, read_stages, run_stages

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_stages(read_stages(find_recipe(recipe), folder, settings, stage), accelerate)


@app.command()
def evaluate(
    recipe: Annotated[str | None, typer.Option(help="A recipe of evaluation/recipes, or a YAML file.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, with commas between; without a recipe, all.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, with commas between; without a recipe, all.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="The aligner: a folder or a Hub id.")] = None,
    xrag: Annotated[str | None, typer.Option(help="An aligner as xRAG's: a projector, one slot a passage.")] = None,
    projector_only: Annotated[str | None, typer.Option(help="An aligner of a projector alone.")] = None,
    full_text_lora: Annotated[str | None, typer.Option(help="A LoRA that reads text, of train/full_text.py.")] = None,
    folder: Annotated[Path | None, typer.Option("--output", help="Folder for answers and tables.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of local files, TASK.jsonl.gz; else from the Hub.")] = None,
    num_questions: Annotated[int | None, typer.Option("-n", help="At most so many questions of each task.")] = None,
    passages: Annotated[str | None, typer.Option(help="given, gold or retrieved.")] = None,
    top_k: Annotated[int | None, typer.Option(help="The first so many passages.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Where passages are retrieved from: a file or a Hub id.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Questions at a time.")] = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda.")] = None,
) -> None:
    """Answers questions with several methods, and compares them in tables."""
    from .evaluation.evaluate import evaluate
    from .evaluation.settings import read_settings, split_names
    from .evaluation.tables import results_page

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    given = {"output": folder, "data": data, "batch_size": batch_size, "device": device, "checkpoint": checkpoint}
    given |= {"xrag": xrag, "projector_only": projector_only, "full_text_lora": full_text_lora}
    given |= {"tasks": split_names(tasks), "methods": split_names(methods)}
    given |= {"retrieval": corpus and {"corpus": corpus}}
    of_tasks = {"num_questions": num_questions, "passages": passages, "top_k": top_k}
    results = evaluate(read_settings(recipe, given, of_tasks))
    output.print(results_page(results), markup=False, highlight=False, soft_wrap=True)


@app.command()
def push(
    repo_id: Annotated[str, typer.Option(help="Repository on the Hub, user/name; made when it is not there.")],
    checkpoint: Folder = DEFAULT_CHECKPOINT,
    private: Annotated[bool, typer.Option("--private", help="Only its owner may see it.")] = False,
    peft: Annotated[bool, typer.Option("--peft", help="Add the LoRA as a PEFT adapter, in peft_lora.")] = False,
) -> None:
    """Uploads a trained aligner to the Hub, in one commit."""
    from .train.push import push_checkpoint

    commit = push_checkpoint(repo_id, checkpoint, private=private, peft=peft)
    output.print(commit.repo_url.url, markup=False, highlight=False, soft_wrap=True)


@app.command()
def export_peft(
    folder: Annotated[Path, typer.Option("--output", help="Folder to write.")],
    checkpoint: Folder = DEFAULT_CHECKPOINT,
) -> None:
    """Writes the LoRA of an aligner as a PEFT adapter, to look at: plain PEFT applies it to every token."""
    from .train.peft_export import export_peft

    export_peft(checkpoint, folder)
    messages.print(f"Wrote {escape(str(folder))}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; a mistake of the caller ends in one clear line and exit code 1."""
    run_app(app, arguments)


def run_command(function: Callable) -> None:
    """Runs a function that is a command by itself, `python -m` of its module, as `main` runs all of them."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(function)
    run_app(alone)


def run_app(commands: typer.Typer, arguments: list[str] | None = None) -> None:
    """Runs commands; a mistake of the caller ends in one clear line and exit code 1."""
    with clear_mistakes():
        commands(arguments)


@contextlib.contextmanager
def clear_mistakes() -> Iterator[None]:
    """Inside, a mistake of the caller ends in one clear line and exit code 1."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        messages.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(1) from error
