"""Summarize the answers of a run: `results.json`, and tables of means with intervals and paired differences."""

import json
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..common.files import markdown_table, write_atomically
from ..share.hub import RESULTS_FILE
from .judge import judged_scores, judges_of
from .methods import METHODS, NEW_NAMES, find_method, sort_key
from .metrics import METRICS, percent_interval, shown_interval
from .runs import FLOOR, AnswerFile, answer_files
from .tasks import TASKS

METRIC_TITLES = {"f1": "F1", "em": "EM (non-strict)"}  # in the order of tables
MAIN = "arcaligner"
MAIN_TITLE = METHODS[MAIN].title
# Rows that the page shows; others are folded.
MAIN_ROWS = (
    "naive",
    "standard_rag",
    "full_text_lora",
    "truncated_copying_x2",
    "llmlingua",
    "xrag",
    MAIN,
    f"{MAIN}_x4",
)
# Methods that get the whole text.
NOT_COMPRESSED = ("standard_rag", "full_text_lora", "full_text_copying", "text_independent")
PAPER = json.loads((Path(__file__).parent / "paper_results.json").read_text(encoding="utf-8"))
SCORES_NOTE = (
    "Each row is a way to answer, and each column is a set of questions. *F1* is the overlap of the answer's words "
    "with those of a gold answer, an answer that the set calls right. *EM* is the share of answers that contain a gold "
    "answer; *non-strict* means that the answer may contain other words, too. So EM rewards long answers. F1 and EM "
    "are in percent, and higher is better. "
    'Brackets contain 95 % bootstrap intervals over questions. "of N" means that only N questions of the set '
    "were used. A dash means not measured."
)
CONTAIN_GOLD = "Questions whose passages contain a gold answer, %"  # a column of tables of sets
FLOOR_NOTE = (
    "The first number is F1 with the passages of the question. *Floor* is F1 with the passages of another question. If "
    'the floor is low, the answers come from the passages. "of N" means that the floor was measured on only N '
    "questions. *Retained* is the share of the gain from text that the method keeps: (F1 - closed book) / (F1 of text "
    "- closed book). 100 % means as good as text. Closed book is the F1 of Naive, from the question alone. Text is the "
    "F1 of *StandardRAG, fine-tuned* or, if it was not measured, of StandardRAG."
)
# Why a share may be missing.
NO_SHARE_NOTE = (
    "Naive and the rows with the whole text have no share. Other rows have none if text is not clearly better than "
    "closed book, or if F1, closed book and text were measured on different numbers of questions."
)
DIFFERENCES_NOTE = (
    "Differences are in percentage points, over the questions that both methods answered. A positive number means that "
    "ArcAligner's score is higher. If the interval in brackets contains 0, the difference may be chance. A dash means "
    "that the two methods were not measured in the same run. A row with nothing but dashes is left out."
)
POSITIONS_NOTE = (
    "A position is a place in the prompt: a token of text takes one, and so does a slot. The first number is how many "
    "positions the passages of a question take, on average. The number after *x* is the measured compression: the "
    "number of tokens of all passages of a question, divided by these positions. (ArcAligner's README counts only the "
    "passages that are used, so there the compression of the default, *one passage or two*, is lower.)"
)
PAPER_NOTE = (
    "These are the numbers of the ArcAligner paper. It has another base model and other passages, so do not compare "
    "them with ours. The paper's ArcAligner has one slot per sentence. EM and F1 are as above. *Acc* is the share of "
    "answers that a judge, a chat model, accepts as right. LLMLingua-2 shortens text. *w/o* means without. A gate is a "
    "small network that decides whether a layer processes a slot again; each time is a pass. *w/o Recursion* has no "
    "gates: each slot takes one pass through each layer. *w/o Gate (Max Loop)* does not use their decision: each slot "
    "takes all passes. *w/o LoRA & Recursion* has no LoRA and no gates."
)

# Sets in results of version 0.2 with their new titles.
_NEW_TITLES = {"NaturalQA": "Natural Questions"}

Answers = dict[str, dict[str, Any]]  # by question id


# Numbers


def write_results(run: Path) -> dict[str, Any]:
    """Write `results.json` and `results.md` from all answers in a run's folder. Return the content of
    `results.json`."""
    results = summarize(run)
    write_atomically(run / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_atomically(run / "results.md", results_page(results))
    return results


def read_results(path: Path) -> dict[str, Any]:
    """The results in a `results.json`. Sets and methods that have been renamed since then get their new names."""
    results, sets = json.loads(path.read_text(encoding="utf-8")), {}
    for title, entry in results["sets"].items():
        by_method = {key: entry[key] for key in ("methods", "differences") if key in entry}
        renamed = {
            key: {NEW_NAMES.get(name, name): numbers for name, numbers in values.items()}
            for key, values in by_method.items()
        }
        sets[_NEW_TITLES.get(title, title)] = entry | renamed
    return results | {"sets": sets}


def summarize(run: Path) -> dict[str, Any]:
    """
    Scores of a run, in percent, for tasks whose passages answer the questions.

    Returns:
        `dict`: `{"machine", "questions", "sets": {title: {"passages", "questions", "recall", "methods",
        "differences"}}}`. `methods` has, by name, `[mean, low, high]` of each metric with 95 % bootstrap intervals over
        questions, `acc`, the accuracy by judge if answers were judged, `floor`, the metrics with the passages of other
        questions and the number of these questions, and the costs. `differences` has the metrics of ArcAligner minus
        those of a method, paired by question.
    """
    files = {(file.task, NEW_NAMES.get(file.method, file.method)): file for file in answer_files(run)}
    if not files:
        raise ValueError(f"{run} contains no answers. Run `arcaligner evaluate` first.")
    sets = {}
    for task in (name for name, definition in TASKS.items() if definition.is_answered):
        names = sorted((method for name, method in files if name == task), key=sort_key)
        of_task = {name: {answer["id"]: answer for answer in files[task, name].read()} for name in names}
        of_task = {name: answers for name, answers in of_task.items() if answers}
        if of_task:
            _check_pairs(run, task, of_task)
            settings = files[task, names[0]].settings()
            passages = settings.get("about") or settings.get("passages", "given")
            sets[TASKS[task].title] = {"passages": passages} | _summarize_task(task, of_task)
            for name, numbers in sets[TASKS[task].title]["methods"].items():
                if acc := _judged(files[task, name]):
                    numbers["acc"] = acc
                if floor := AnswerFile(run / FLOOR, task, files[task, name].method).read():
                    scores = {key: percent_interval([answer[key] for answer in floor]) for key in METRICS}
                    numbers["floor"] = {"questions": len(floor)} | scores
    machines = sorted({file.settings()["machine"] for file in files.values()})
    return {
        "machine": "; ".join(machines),
        "questions": min((entry["questions"] for entry in sets.values()), default=0),
        "sets": sets,
    }


def _judged(file: AnswerFile) -> dict[str, list[float]]:
    """The accuracy of a file's answers according to each judge."""
    scores = {judge: [*judged_scores(file, judge).values()] for judge in judges_of(file)}
    return {judge: percent_interval(of_judge) for judge, of_judge in scores.items() if of_judge}


def _check_pairs(run: Path, task: str, of_task: dict[str, Answers]) -> None:
    """Raise `ValueError` if two methods answered one question id with different passages or golds."""
    rows: dict[str, tuple[str, str]] = {}
    for method, answers in of_task.items():
        for key, answer in answers.items():
            other, row = rows.setdefault(key, (method, answer["row"]))
            if row != answer["row"]:
                raise ValueError(
                    f"{run / task}: the methods {other} and {method} cannot be compared, because question {key} had "
                    "different passages or gold answers for each. Delete the files of one method and evaluate this "
                    "method again, or use another folder."
                )


def _summarize_task(task: str, of_task: dict[str, Answers]) -> dict[str, Any]:
    first = next(iter(of_task.values())).values()
    entry: dict[str, Any] = {
        "task": task,
        "questions": max(len(answers) for answers in of_task.values()),
        "recall": percent_interval([answer["recall"] for answer in first]),
        "methods": {name: _summarize_method(name, list(answers.values())) for name, answers in of_task.items()},
    }
    if MAIN in of_task:
        others = {name: answers for name, answers in of_task.items() if name != MAIN}
        entry["differences"] = {name: compare(of_task[MAIN], answers) for name, answers in others.items()}
    return entry


def _summarize_method(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {key: sum(row[key] for row in rows) for key in ("context_tokens", "prompt_tokens", "passage_tokens")}
    numbers = {"questions": len(rows)} | {key: totals[key] / len(rows) for key in ("context_tokens", "prompt_tokens")}
    if name not in NOT_COMPRESSED and totals["context_tokens"]:
        # Tokens of the passages per position of the prompt that represents them.
        numbers["compression_rate"] = totals["passage_tokens"] / totals["context_tokens"]
    return numbers | {metric: percent_interval([row[metric] for row in rows]) for metric in METRICS}


def compare(ours: Answers, other: Answers) -> dict[str, Any]:
    """A paired bootstrap over the questions that both answered: `[difference, low, high]` of each metric."""
    shared = [key for key in ours if key in other]
    if not shared:
        return {"questions": 0}
    return {"questions": len(shared)} | {
        metric: percent_interval([ours[key][metric] - other[key][metric] for key in shared]) for metric in METRICS
    }


# Tables


def results_page(results: dict[str, Any]) -> str:
    """All tables of a run. Times are reported by the benchmarks, because answers of a run may come from several
    machines."""
    sets = results["sets"]
    titles = method_titles(sets)
    main = {name: title for name, title in titles.items() if name in MAIN_ROWS}
    lines: list[str] = []
    everything: list[str] = []
    differences: list[str] = []
    if sets:
        lines += _wrapped(SCORES_NOTE)
    for metric, title in METRIC_TITLES.items():
        lines += table(title, main, sets, partial(_score, metric))
        everything += table(title, titles, sets, partial(_score, metric)) if len(titles) > len(main) else []
        heading = f"{title} of {MAIN_TITLE} minus that of"
        differences += table(heading, titles, sets, partial(_difference, metric))
    for judge in sorted(
        {judge for entry in sets.values() for numbers in entry["methods"].values() for judge in _accs(numbers)}
    ):
        lines += table(f"Acc, judged by {judge}", titles, sets, partial(_acc, judge))
    lines += _folded(f"All {len(titles)} methods", everything)
    heading = f"Differences: {MAIN_TITLE} minus another method, on the same questions"
    lines += _folded(heading, differences, DIFFERENCES_NOTE)
    floors = table("F1 (floor, retained)", titles, _with_floors(sets), evidence)
    lines += _folded("Floor and retention", floors, f"{FLOOR_NOTE} {NO_SHARE_NOTE}")
    positions = table("Positions, compression", titles, sets, _positions)
    lines += _folded("Positions of the prompt", [*_wrapped(POSITIONS_NOTE), *positions])
    shared = {name: PAPER["sets"][name] for name in sets if name in PAPER["sets"]}
    of_paper = {method: method for numbers in shared.values() for method in numbers}
    of_paper_table = table("EM / F1 / Acc, %, with Mistral 7B", of_paper, shared, _paper)
    lines += _folded("The paper's numbers", of_paper_table, PAPER_NOTE)
    return "\n".join([*lines, "## Questions and passages", "", *sets_lines(results), ""])


def _wrapped(note: str) -> list[str]:
    """Lines of a note before a table."""
    return [*textwrap.wrap(note, 120, break_on_hyphens=False), ""]


def _with_floors(sets: dict) -> dict:
    """The sets on which a method was also measured with the passages of other questions."""
    return {
        name: entry for name, entry in sets.items() if any("floor" in numbers for numbers in entry["methods"].values())
    }


def method_titles(sets: dict) -> dict[str, str]:
    """Titles of all methods in `sets` by their names, in the order of `METHODS`, each followed by its variants with
    other tokens per slot."""
    names = sorted({name for entry in sets.values() for name in entry["methods"]}, key=sort_key)
    return {name: find_method(name).title for name in names}


def _folded(title: str, lines: list[str], note: str | None = None) -> list[str]:
    """Lines folded under a title, after a note; empty without lines."""
    noted = [*(_wrapped(note) if note else []), *lines]
    return [f"<details><summary>{title}</summary>", "", *noted, "</details>", ""] if lines else []


# Cells, from the entry of a set and a method, which the entry may lack.


def _score(metric: str, entry: dict, method: str) -> str | None:
    """A mean with its interval, and the number of questions if it is not all of the set."""
    if (numbers := entry["methods"].get(method)) is None:
        return None
    count = f" of {numbers['questions']}" if numbers["questions"] < entry["questions"] else ""
    return shown_interval(numbers[metric]) + count


def _accs(numbers: dict) -> dict[str, list[float]]:
    return numbers.get("acc", {})


def _acc(judge: str, entry: dict, method: str) -> str | None:
    accuracy = _accs(entry["methods"].get(method, {})).get(judge)
    return None if accuracy is None else shown_interval(accuracy)


def _difference(metric: str, entry: dict, method: str) -> str | None:
    numbers = entry.get("differences", {}).get(method, {})
    return shown_interval(numbers[metric], "+") if metric in numbers else None


def evidence(entry: dict, method: str) -> str | None:
    """F1 and, in brackets, the F1 with the passages of other questions, with their number if not all, and the
    retention."""
    if (numbers := entry["methods"].get(method)) is None:
        return None
    parts = []
    if floor := numbers.get("floor"):
        count = f" of {floor['questions']}" if floor["questions"] < numbers["questions"] else ""
        parts.append(f"floor {floor['f1'][0]:.1f}{count}")
    retained = retention(entry, method)
    parts += [] if retained is None else [f"retained {retained:.0f} %"]
    return f"{numbers['f1'][0]:.1f}" + (f" ({', '.join(parts)})" if parts else "")


def retention(entry: dict, method: str) -> float | None:
    """The share of the text's gain that a method retains, in percent: (F1 - closed book) / (text - closed book).
    Text is the fine-tuned reader's if it was measured, else the bare base model's. `None` if one of the three is
    missing or answered a different number of questions, or if text gains nothing beyond the intervals of both."""
    questions = entry["methods"][method].get("questions")
    f1 = {name: numbers["f1"] for name, numbers in entry["methods"].items() if numbers.get("questions") == questions}
    text, closed_book = f1.get("full_text_lora", f1.get("standard_rag")), f1.get("naive")
    if text is None or closed_book is None or method in ("naive", *NOT_COMPRESSED) or text[1] <= closed_book[2]:
        return None
    return 100 * (f1[method][0] - closed_book[0]) / (text[0] - closed_book[0])


def _positions(entry: dict, method: str) -> str | None:
    if (numbers := entry["methods"].get(method)) is None:
        return None
    compression = f", x{numbers['compression_rate']:.1f}" if "compression_rate" in numbers else ""
    return f"{numbers['context_tokens']:.1f}{compression}"


def _paper(numbers: dict, method: str) -> str | None:
    return " / ".join(f"{number:.1f}" for number in numbers[method]) if method in numbers else None


def sets_lines(results: dict) -> list[str]:
    """Lines on the questions and passages of each set, and on how the numbers were made."""
    note = (
        "The table shows for each set of questions how many were asked, which passages were used, and for how many "
        "questions, in percent, the passages contain a gold answer (an answer that the data set calls right). *Gold* "
        "passages are those that, according to the data set, a question needs."
    )
    machines = f"The answers were generated on these machines: {results['machine']}."
    table_lines = sets_table(results["sets"])
    return [*_wrapped(note), *table_lines, "", *textwrap.wrap(machines, 120, break_on_hyphens=False)]


def sets_table(sets: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table of the questions and passages of each set."""
    rows = [[name, entry["questions"], entry["passages"], f"{entry['recall'][0]:.0f}"] for name, entry in sets.items()]
    return markdown_table(["Set", "Questions", "Passages", CONTAIN_GOLD], rows)


def table(title: str, rows: dict[str, str], sets: dict, show: Callable[[dict, str], str | None]) -> list[str]:
    """Lines of a Markdown table without empty rows; `rows` maps names to titles, `show` makes a cell from the entry of
    a set and the name of a row."""
    shown = []
    for name, row in rows.items():
        cells = [show(entry, name) for entry in sets.values()]
        if any(cells):
            shown.append([f"**{row}**" if row == MAIN_TITLE else row, *(cell or "-" for cell in cells)])
    return [*markdown_table([title, *sets], shown), ""] if shown else []
