"""Publishes a run: results and card of the checkpoint, `docs/results.md`, and the README's table.

    python -m arcaligner.evaluation.publish --run runs/evaluation --figures runs/figures
    python -m arcaligner.evaluation.publish --run runs/evaluation --earlier results.json

No number in these is typed by hand; each comes from the run's answers, from the data beside a figure, or from the
results of an earlier run, for methods that do not depend on the aligner. The speed is published by
`python -m arcaligner.benchmarks.report`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..configuration_arcaligner import ArcAlignerConfig
from ..files import DEFAULT_CHECKPOINT, ROOT, markdown_table, printable, run_command, write_whole
from ..hub import RESULTS_FILE, write_model_card
from .methods import find_method, fingerprint
from .results import EARLIER_HELP, add_earlier, results_page, write_results
from .runs import answer_files
from .tasks import TASKS

README_SETS = ("SQuAD", "NaturalQA", "HotpotQA", "PopQA_longtail")
README_METHODS = (
    "no_lora_x4",
    "arcaligner_xsegment",
    "truncated_lora_x4",
    "arcaligner_x4",
    "arcaligner",
    "standard_rag",
    "full_text_lora",
)
ANSWERS_PER_SET = 13
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&])")  # what could become structure of a page
MARKS = "<!-- results: evaluation/publish.py -->", "<!-- end of results -->"
SPEED_FIGURES = "latency", "f1_of_speed", "known_passages"  # on the page of speed, the others on that of results
INTRODUCTION = """\
# Results

The shipped aligner and what it is compared with, written by `python -m arcaligner.evaluation.publish` from the answers
of `python -m arcaligner evaluate --recipe smollm2_135m`: the same frozen SmolLM2-135M-Instruct (4-bit weights of the
default base model, Q4_1), chat template, questions and greedy decoding (24 new tokens) in all rows; "fine-tuned" is a
LoRA that learned to read the text from 4,000 questions; xRAG and the projector alone saw 4,000 rows in each stage, the
aligner far more. `evaluation/recipes/smollm2_135m.yaml` says which passages are read. [answers.md](answers.md) has
answers to read.
"""


def publish(
    run: Annotated[Path, typer.Option(help="Folder of an evaluation.")] = Path("runs/evaluation"),
    checkpoint: Annotated[Path, typer.Option(help="The aligner that was measured.")] = DEFAULT_CHECKPOINT,
    figures: Annotated[Path | None, typer.Option(help="Folder of the analyses.")] = None,
    earlier: Annotated[Path | None, typer.Option(help=EARLIER_HELP)] = None,
) -> None:
    """Writes results, card, docs/results.md, docs/answers.md and the README's table from a run."""
    check_weights(run, checkpoint)
    results = write_results(run)
    if earlier is not None:
        add_earlier(results, earlier)
    shown = copy_figures(figures) if figures else {}
    lines = [line for name, each in shown.items() if name not in SPEED_FIGURES for line in each]
    page = "\n".join([INTRODUCTION, results_page(results), *(["## Figures", "", *lines] if lines else [])])
    answers = answers_page(run)
    readme = with_block((ROOT / "README.md").read_text(encoding="utf-8"), readme_table(results), MARKS)
    write_whole(checkpoint / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    is_ours = checkpoint.resolve().is_relative_to(ROOT.resolve())
    name = checkpoint.resolve().relative_to(ROOT.resolve()).as_posix() if is_ours else None
    write_model_card(ArcAlignerConfig.from_pretrained(checkpoint), checkpoint, name=name)
    write_whole(ROOT / "docs" / "results.md", page.rstrip() + "\n")
    write_whole(ROOT / "docs" / "answers.md", answers)
    write_whole(ROOT / "README.md", readme)


def check_weights(run: Path, checkpoint: Path) -> None:
    """Refuses a run of another aligner.

    Raises:
        `ValueError`: with both fingerprints.
    """
    expected = fingerprint(str(checkpoint))
    for file in answer_files(run):
        if find_method(file.method).checkpoint == "aligner" and (found := file.settings()["weights"]) != expected:
            raise ValueError(f"{file.path} was answered by weights {found}, {checkpoint} has {expected}.")


def answers_page(run: Path) -> str:
    """The answers of the aligner to the first questions of each set, by their ids."""
    lines = [
        "# Answers",
        "",
        "What the shipped aligner answers, at its finest rate and with greedy decoding: the first",
        f"{ANSWERS_PER_SET} questions of each set by their ids, none left out, of the run of [results.md](results.md).",
        "",
    ]
    for file in answer_files(run):
        if file.method == "arcaligner" and file.task in TASKS:
            rows = sorted(file.read(), key=lambda row: row["id"])[:ANSWERS_PER_SET]
            cells = []
            for row in rows:
                texts = row["question"], row["answers"][0], row["prediction"]
                shown = (_MARKDOWN.sub(r"\\\1", printable(" ".join(text.split()))) for text in texts)
                cells.append([*shown, f"{100 * row['f1']:.0f}"])
            table = markdown_table(["Question", "Expected", "Answer", "F1"], cells)
            lines += [f"## {TASKS[file.task].title}", "", *table, ""]
    return "\n".join(lines)


def readme_table(results: dict[str, Any]) -> str:
    """F1 and EM of the README's sets and methods in one table."""
    sets = {name: results["sets"][name] for name in README_SETS if name in results["sets"]}
    rows = []
    for title in (find_method(name).title for name in README_METHODS):
        found = [each["methods"].get(title) for each in sets.values()]
        if any(found):
            rows.append([title, *(f"{each['f1'][0]:.1f} / {each['em'][0]:.1f}" if each else "-" for each in found)])
    rates = ", ".join(f"{name} x{each['compression_rate']:.0f}" for name, each in sets.items())
    counts = sorted({each["questions"] for each in sets.values()})
    lines = markdown_table(["F1 / EM", *sets], rows)
    lines += [
        "",
        f"Percent, {' to '.join(map(str, counts))} questions per set; EM is non-strict. Tokens per slot: {rates}.",
    ]
    return "\n".join(lines)


def with_block(text: str, block: str, marks: tuple[str, str]) -> str:
    """`text` with the part between two marks replaced.

    Raises:
        `ValueError`: the marks are not there once each, in order.
    """
    start, end = marks
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"Expected {start!r} and after it {end!r}, each once, to know where the tables go.")
    return f"{text.partition(start)[0]}{start}\n{block}\n{end}{text.partition(end)[2]}"


def copy_figures(source: Path) -> dict[str, list[str]]:
    """Copies the SVG and data of each analysis to `docs/figures`; by its name, the Markdown lines that show it with its
    caption."""
    lines, folder = {}, ROOT / "docs" / "figures"
    for data in sorted(source.glob("*.json")):
        picture = data.with_suffix(".svg")
        if picture.exists():
            for path in (data, picture):
                if path.resolve().parent != folder.resolve():
                    shutil.copyfile(path, folder / path.name)
            caption = json.loads(data.read_text(encoding="utf-8"))["reading"]
            lines[data.stem] = [f"![{data.stem.replace('_', ' ')}](figures/{picture.name})", "", caption, ""]
    return lines


if __name__ == "__main__":
    run_command(publish)
