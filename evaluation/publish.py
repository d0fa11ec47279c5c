"""Publishes what was measured: results and card of the checkpoint, the pages of results, answers and speed, and the
README's table; draws the figures.

    python -m arcaligner.evaluation.publish --run runs/evaluation --figures runs/figures
    python -m arcaligner.evaluation.publish     # the same pages again, from what is published

No number in these is typed by hand: each comes from the run's answers, the checkpoint's `results.json`, or the reports
of `python -m arcaligner.benchmarks.latency` and `kept`.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.files import DEFAULT_CHECKPOINT, ROOT, markdown_table, printable, run_command, write_whole
from ..configuration_arcaligner import ArcAlignerConfig
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.hub import RESULTS_FILE, write_model_card
from .analyses.figures import draw_rates, draw_speed, save_figure
from .analyses.speed import (
    KEPT_REPORT,
    LATENCY_REPORT,
    SHORT_PASSAGES,
    find_size,
    first_token_ms,
    first_token_table,
    kept_lines,
)
from .methods import find_method, fingerprint
from .paper import FIRST, SECOND, published_table
from .results import results_page, write_results
from .runs import answer_files
from .tasks import TASKS

DOCS = ROOT / "docs"
README_SETS = ("SQuAD", "NaturalQA", "HotpotQA", "PopQA_longtail")
# Of the README's table, by rate: what is read, tokens per position, the method, and the rate that was timed. The words
# of the passages are preferred where that answers better, which is everywhere but with the whole text.
README_ROWS = (
    ("whole text, fine-tuned", "1", "full_text_lora", "text"),
    ("text cut to a half, fine-tuned", "2", "truncated_copying_x2", None),
    ("**slots** of the likeliest passage (default)", "2", "one_passage", None),
    ("**slots**", "2", "arcaligner", 2),
    ("text cut to a quarter, fine-tuned", "4", "truncated_copying_x4", None),
    ("**slots**", "4", "arcaligner_x4", 4),
    ("text cut to an eighth, fine-tuned", "8", "truncated_copying_x8", None),
    ("**slots**", "8", "arcaligner_x8", 8),
    ("**slots**", "a sentence", "arcaligner_xsegment", "segment"),
)
ANSWERS_PER_SET = 13
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&])")  # what could become structure of a page
MARKS = "<!-- {}: evaluation/publish.py -->", "<!-- end of {} -->"  # of a part of a page, by its name


def publish(
    run: Annotated[Path | None, typer.Option(help="Folder of an evaluation. Default: what is published.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="The aligner that was measured.")] = DEFAULT_CHECKPOINT,
    figures: Annotated[Path, typer.Option(help="Folder of latency.json and kept.json.")] = DOCS / "figures",
) -> None:
    """Writes the pages and the README's table from a run and the timings."""
    if run is not None:
        check_weights(run, checkpoint)
        config = ArcAlignerConfig.from_pretrained(checkpoint)
        no_answer = ArcAlignerProcessor.from_pretrained(checkpoint).no_answer
        answers = answers_page(run, config.answerability_threshold, no_answer)
        found = write_results(run)
        write_whole(checkpoint / RESULTS_FILE, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        write_model_card(config, checkpoint)
        write_whole(DOCS / "answers.md", answers)
    results = read_json(checkpoint / RESULTS_FILE)
    published = DOCS / "figures"
    for name in (LATENCY_REPORT, KEPT_REPORT):  # what was not measured again stays
        if (figures / name).exists():
            write_whole(published / name, (figures / name).read_bytes())
    latency = read_json(published / LATENCY_REPORT)
    save_figure(published / "rates.svg", draw_rates(results["sets"]))
    save_figure(
        published / "f1_of_speed.svg", draw_speed(latency, {name: results["sets"][name] for name in README_SETS})
    )
    write_part(DOCS / "results.md", "results", results_page(results).splitlines())
    write_part(DOCS / "speed.md", "first token", first_token_table(latency))
    write_part(DOCS / "speed.md", "known passages", kept_lines(read_json(published / KEPT_REPORT)))
    for number, tasks in enumerate((FIRST, SECOND), start=1):
        write_part(DOCS / "paper.md", f"table {number}", published_table(results, tasks))
    write_part(ROOT / "README.md", "results", readme_table(results, latency))


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_part(page: Path, name: str, lines: list[str]) -> None:
    """Replaces the part of a page between the marks of a name; what stands around it is written by hand."""
    text, (start, end) = page.read_text(encoding="utf-8"), (mark.format(name) for mark in MARKS)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"Expected {start!r} and after it {end!r} in {page}, each once, to know where the tables go.")
    block = "\n".join(lines).strip()
    write_whole(page, f"{text.partition(start)[0]}{start}\n{block}\n{end}{text.partition(end)[2]}")


def check_weights(run: Path, checkpoint: Path) -> None:
    """Refuses a run of another aligner."""
    expected = fingerprint(str(checkpoint))
    for file in answer_files(run):
        if find_method(file.method).reads == "checkpoint" and (found := file.settings()["weights"]) != expected:
            raise ValueError(f"{file.path} was answered by weights {found}, {checkpoint} has {expected}.")


def answers_page(run: Path, threshold: float, no_answer: str) -> str:
    """The answers of the aligner to the first questions of each set, by their ids, and how sure it is of each:
    `no_answer` is said below the threshold."""
    lines = [
        "# Answers",
        "",
        "What the shipped aligner answers, at its finest rate and with greedy decoding: the first",
        f"{ANSWERS_PER_SET} questions of each set by their ids, none left out, of the run of [results.md](results.md).",
        f'With `min_confidence={threshold}`, those marked as refused become "{no_answer}".',
    ]
    for file in answer_files(run):
        if file.method == "arcaligner" and file.task in TASKS:
            cells = []
            for row in sorted(file.read(), key=lambda row: row["id"])[:ANSWERS_PER_SET]:
                texts = row["question"], (row["answers"] or ["(not in the passages)"])[0], row["prediction"]
                shown = (_MARKDOWN.sub(r"\\\1", printable(" ".join(text.split()))) for text in texts)
                said = ("refused, " if row["answerability"] < threshold else "") + f"{row['answerability']:.2f}"
                cells.append([*shown, f"{100 * row['f1']:.0f}" if row["answers"] else "-", said])
            table = markdown_table(["Question", "Expected", "Answer", "F1", "Answerability"], cells)
            lines += ["", f"## {TASKS[file.task].title}", "", *table]
    return "\n".join([*lines, ""])


def readme_table(results: dict[str, Any], latency: dict[str, Any]) -> list[str]:
    """F1 of the README's sets, and the time to the first token, in one table with a row for each of `README_ROWS`."""
    sets = {name: results["sets"][name] for name in README_SETS}

    def f1(method: str) -> list[float]:
        # A set of one passage a question was not asked again about the likeliest of them.
        each_set = (each["methods"] for each in sets.values())
        return [each.get(method, each["arcaligner"])["f1"][0] for each in each_set]

    def loss_without_copying(rate: str) -> str:
        lost = [own - free for own, free in zip(f1(f"arcaligner{rate}"), f1(f"no_copying{rate}"), strict=True)]
        return f"{min(lost):.0f} to {max(lost):.0f}"

    rows = []
    for read, tokens, method, timed in README_ROWS:
        cells = ["-", "-", "-"]
        if timed is not None:
            arms = ("standard_rag", "standard_rag_cached") if timed == "text" else ("off", "slots_cached")
            rate = latency["own_tokens_per_slot"] if timed == "text" else timed
            sizes = [find_size(latency, k, rate) for k in SHORT_PASSAGES]
            cells = [" / ".join(f"{first_token_ms(size, arm):,.0f}" for size in sizes) for arm in arms]
            cells.append(" / ".join(f"{size['arms'][arms[1]]['cache_bytes'] / 2**20:.0f}" for size in sizes))
        rows.append([read, tokens, *(f"{each:.1f}" for each in f1(method)), *cells])
    passages = " / ".join(map(str, SHORT_PASSAGES))
    columns = ["The model reads", "Rate", *sets, "First token, ms", "Kept, ms", "Kept, MiB"]
    counts = " to ".join(map(str, sorted({each["questions"] for each in sets.values()})))
    own = [find_size(latency, k, latency["own_tokens_per_slot"]) for k in SHORT_PASSAGES]
    tokens = " / ".join(f"{size['text_tokens']:,.0f}" for size in own)
    lengths = [each["methods"]["full_text_lora"]["context_tokens"] for each in sets.values()]
    note = (
        f"F1 in percent, {counts} questions per set, about passages of {min(lengths):.0f} to {max(lengths):.0f} tokens "
        f"(means). Times: {passages} passages, {tokens} tokens, in float32 on {latency['machine']['cores']} CPU cores. "
        "*Rate*: tokens of text per position. *Fine-tuned*: the same model, taught on 4,000 questions to answer from "
        "text. A slot holds what a text says better than its spelling, so answers from slots, and from cut text, "
        "prefer the passages' own words (`copy_bonus`); without that, slots lose "
        f"{loss_without_copying('')} points at 2, {loss_without_copying('_x4')} at 4."
    )
    return [*markdown_table(columns, rows), "", *textwrap.wrap(note, 120)]


if __name__ == "__main__":
    run_command(publish)
