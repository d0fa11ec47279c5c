"""Publish measurements: results and card of the checkpoint, tables of the README, pages, figures.

    python -m arcaligner.evaluation.publish --run runs/evaluation --figures runs/figures
    python -m arcaligner.evaluation.publish --reproduced runs/evaluation/paper
    python -m arcaligner.evaluation.publish     # writes the same pages again from the published numbers

No number between the marks is typed by hand: each comes from the run's answers, the checkpoint's `results.json`, or the
reports of `python -m arcaligner.benchmarks.latency` and `cached_passages`.
"""

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from ..answering_arcaligner import MAX_NEW_TOKENS
from ..common.files import DEFAULT_CHECKPOINT, ROOT, markdown_table, printable, run_command, write_atomically
from ..configuration_arcaligner import DEFAULT_BASE_MODEL, ArcAlignerConfig
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.hub import RESULTS_FILE, with_enough_questions, write_model_card
from .analyses.figures import draw_compressions, draw_speed, save_figure
from .analyses.speed import (
    CACHED_REPORT,
    LATENCY_REPORT,
    SHORT_PASSAGES,
    TOP_RANKED,
    cached_passages_table,
    find_size,
    first_token_ms,
    first_token_table,
)
from .methods import NEW_NAMES, depends_on_aligner, find_method, fingerprint, sort_key
from .paper import FIRST, SECOND, TITLES, published_backbone, published_ratios, published_table
from .results import MAIN, read_results, results_page, write_results
from .runs import FLOOR, answer_files
from .tasks import TASKS

DOCS = ROOT / "docs"
# Sets of the README's tables, with the names that readers know.
README_SETS = {
    "SQuAD": "SQuAD",
    "Natural Questions": "Natural Questions",
    "HotpotQA": "HotpotQA",
    "PopQA_longtail": "PopQA",
}
# Of the README's first table: what the model is given, and the method.
COMPARED = (
    ("the whole text", "standard_rag"),
    ("the whole text, after fine-tuning on questions with their text", "full_text_lora"),
    ("**slots of two tokens**", "arcaligner"),
    ("**slots with [zoom](docs/extensions.md#zoom)**: two tokens where the answer seems to be, else eight", "zoomed"),
)
# Of the README's table of F1: what the model is given, the compression (`None` is as measured), and the method.
# Copy-biased decoding is on where it helps, which is everywhere except for whole text.
QUALITY_ROWS = (
    ("whole text, not fine-tuned", "1", "standard_rag"),
    ("whole text, fine-tuned", "1", "full_text_lora"),
    ("first half of the text, fine-tuned", "2", "truncated_copying_x2"),
    ("**slots** of the selected passages (default)", "2", "as_needed"),
    ("**slots** of all passages", "2", "arcaligner"),
    ("first quarter of the text, fine-tuned", "4", "truncated_copying_x4"),
    ("**slots** of all passages", "4", "arcaligner_x4"),
    ("**slots** of all passages, with [zoom](docs/extensions.md#zoom)", None, "zoomed"),
    ("first eighth of the text, fine-tuned", "8", "truncated_copying_x8"),
    ("**slots** of all passages", "8", "arcaligner_x8"),
    ("**slots** of all passages", "one slot per sentence", "arcaligner_xsegment"),
)
# Of the README's table of times: what the model is given, the tokens per slot, and the timed arms of `latency.json` and
# `kept.json`.
SPEED_ROWS = (
    ("whole text", "-", "text", "text_same_set"),
    ("**slots**, one selected passage (default)", "2", None, "slots_x2_top_ranked"),
    ("**slots** of all passages", "2", 2, "slots_x2"),
    ("**slots** of all passages", "4", 4, "slots_x4"),
    ("**slots** of all passages", "8", 8, "slots_x8"),
    ("**slots** of all passages", "a sentence", "segment", "slots_xsegment"),
)
# Of the table on zoom: what the slots are, and the method.
ZOOM_ROWS = (
    ("two tokens each", "arcaligner"),
    ("**zoom**: eight tokens each, two where the answer seems to be", "zoomed"),
    ("**zoom**: sixteen tokens each, two where the answer seems to be", "zoomed_x16"),
    ("**zoom**: a sentence each, two tokens where the answer seems to be", "zoomed_xsegment"),
    ("four tokens each", "arcaligner_x4"),
    ("eight tokens each", "arcaligner_x8"),
    ("a sentence each", "arcaligner_xsegment"),
)
ANSWERS_PER_SET = 13
_FEW_FOUND = (
    "The model gets one passage, which a retriever found in a small collection. For most questions this passage does "
    "not contain a right answer ([how many](paper.md#tables-1-and-2))."
)
# Of the page of answers: the questions of a set, and the passages that the model gets with `smollm2_135m.yaml`.
ANSWERED = {
    "2wikimultihopqa": "A question of 2WikiMultiHopQA needs two or more paragraphs of Wikipedia. The passages are "
    "all paragraphs that our file has for the question.",
    "hotpotqa": "A question of HotpotQA needs two paragraphs of Wikipedia. The model gets these two paragraphs as "
    "passages.",
    "nq": "Natural Questions has questions that people typed into Google. The passage is a paragraph of Wikipedia that "
    "contains the answer.",
    "popqa_longtail": "PopQA_longtail has questions about subjects that few people look up. The model gets passages "
    "that a retriever found. For many questions these contain no right answer ([how many](paper.md#tables-1-and-2)).",
    "triviaqa": "TriviaQA has trivia questions. *TriviaQA\\** is the name that the [paper](paper.md) uses for a sample "
    "of 500 of them. " + _FEW_FOUND,
    "webq": f"WebQuestions has questions that people typed into Google. {_FEW_FOUND}",
    "squad": "A question of SQuAD is about a paragraph of Wikipedia. The model gets this paragraph as its passage.",
    "squad_more": "These questions of SQuAD are not in our other question set from SQuAD ([above](#squad)). The "
    "passage is the paragraph of Wikipedia that a question is about.",
    "squad_unanswerable": "These questions of SQuAD 2.0 have no answer in the paragraph of Wikipedia that they are "
    "about. The model gets this paragraph as its passage, so it should abstain.",
    "adversarialqa": "People wrote the questions of AdversarialQA so that models answer them wrongly. The passage is "
    "the paragraph of Wikipedia that a question is about.",
    "musique": "A question of MuSiQue needs two to four paragraphs of Wikipedia. The model gets these paragraphs as "
    "passages.",
}
# Parts of the paper whose pages are in `docs/paper.md` as `reproduce` writes them. Others come from the results.
REPRODUCED = ("ablation", "perplexity", "gates", "categories", "cases")
COMPRESSIONS = (4, 8, "segment")  # of the shipped aligner in the figure of ratios, next to its own
_PICTURE = re.compile(r"\]\((\w+\.svg)\)")
# What could become structure of a page.
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|]|&(?=#?\w+;))")
MARKS = "<!-- {}: evaluation/publish.py -->", "<!-- end of {} -->"  # of a part of a page, by its name


def publish(
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an evaluation (`--output` of `arcaligner evaluate`). Default: the published numbers are "
            "used again."
        ),
    ] = None,
    checkpoint: Annotated[Path, typer.Option(help="Folder of the aligner that was measured.")] = DEFAULT_CHECKPOINT,
    figures: Annotated[
        Path,
        typer.Option(
            help=f"Folder with {LATENCY_REPORT} and {CACHED_REPORT}, the reports of `python -m "
            "arcaligner.benchmarks.latency` and `python -m arcaligner.benchmarks.cached_passages`."
        ),
    ] = DOCS / "figures",
    reproduced: Annotated[
        Path | None,
        typer.Option(
            help="Folder with pages that `arcaligner reproduce` wrote. Default: the published pages stay as they are."
        ),
    ] = None,
) -> None:
    """Write the tables and figures of the pages in docs/ and of the README, from an evaluation and from the reports of
    the benchmarks."""
    if run is not None:
        check_weights(run, checkpoint)
        results = write_results(run) | {"weights": fingerprint(str(checkpoint))}
        has_results = (checkpoint / RESULTS_FILE).exists()
        published = read_results(checkpoint / RESULTS_FILE) if has_results else {"sets": {}}
        answers, config = None, ArcAlignerConfig.from_pretrained(checkpoint)
        if are_of_new_weights(results, published) and any(file.method == MAIN for file in answer_files(run)):
            no_answer = ArcAlignerProcessor.from_pretrained(checkpoint).no_answer
            answers = answers_page(run, config.answerability_threshold, no_answer)
        if published["sets"]:
            results = with_published(results, published)
        write_atomically(checkpoint / RESULTS_FILE, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        write_model_card(config, checkpoint)
        if answers is not None:
            write_atomically(DOCS / "answers.md", answers)
    if reproduced is not None:
        write_reproduced(reproduced)
    results = read_results(checkpoint / RESULTS_FILE)
    published = DOCS / "figures"
    for name in (LATENCY_REPORT, CACHED_REPORT):  # a report that was not measured again remains
        if (figures / name).exists():
            write_atomically(published / name, (figures / name).read_bytes())
    latency = read_json(published / LATENCY_REPORT)
    save_figure(published / "rates.svg", draw_compressions(with_enough_questions(results["sets"])))
    save_figure(
        published / "f1_of_speed.svg", draw_speed(latency, {name: results["sets"][name] for name in README_SETS})
    )
    cached = read_json(published / CACHED_REPORT)
    write_part(DOCS / "results.md", "results", results_page(results).splitlines())
    write_part(DOCS / "speed.md", "first token", first_token_table(latency))
    write_part(DOCS / "speed.md", "known passages", cached_passages_table(cached))
    for number, tasks in enumerate((FIRST, SECOND), start=1):
        write_part(DOCS / "paper.md", f"table {number}", published_table(results, tasks))
    write_figure("backbones", *published_backbone(results, DEFAULT_BASE_MODEL.rpartition("/")[2]))
    write_figure("ratios", *published_ratios(results, COMPRESSIONS))
    write_part(DOCS / "extensions.md", "zoom", zoom_table(results))
    write_part(ROOT / "README.md", "comparison", comparison_table(results))
    write_part(ROOT / "README.md", "quality", quality_table(results))
    write_part(ROOT / "README.md", "speed", speed_table(latency, cached))


def with_published(results: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """
    The results of a run, with the published ones for what it did not measure.

    A run that asked an aligner whose weights are not the published ones replaces all numbers that depend on them, and
    its sets are those of the result: only methods that use no aligner keep their numbers. Any other run adds to what
    is published.
    """
    replaces = are_of_new_weights(results, published)
    titles = results["sets"].keys() | (set() if replaces else published["sets"].keys())
    sets = {}
    for title in (task.title for task in TASKS.values() if task.title in titles):
        old = published["sets"].get(title, {"questions": 0, "methods": {}})
        new = results["sets"].get(title, {"questions": 0, "methods": {}})
        remaining = [name for name in old["methods"] if not (replaces and depends_on_aligner(name))]
        methods = {name: old["methods"][name] for name in remaining} | new["methods"]
        first = new if replaces or new["questions"] > old["questions"] else old
        differences = {} if replaces else _kept_differences(old, new["methods"])
        sets[title] = first | {
            "methods": {name: methods[name] for name in sorted(methods, key=sort_key)},
            "differences": differences | new.get("differences", {}),
        }
    machines = {*results["machine"].split("; "), *published["machine"].split("; ")}
    questions = min(entry["questions"] for entry in sets.values())
    weights = {"weights": results["weights"] if replaces else published.get("weights")}
    return {"machine": "; ".join(sorted(machines)), "questions": questions} | weights | {"sets": sets}


def _kept_differences(old: dict[str, Any], new_methods: dict[str, Any]) -> dict[str, Any]:
    """The published differences of a set from ArcAligner, without those of methods whose numbers change with
    `new_methods`: a difference needs the answers of both methods in one run."""
    changed = {name for name, numbers in new_methods.items() if old["methods"].get(name, numbers) != numbers}
    differences = {} if MAIN in changed else old.get("differences", {})
    return {name: difference for name, difference in differences.items() if name not in changed}


def are_of_new_weights(results: dict[str, Any], published: dict[str, Any]) -> bool:
    """Whether the results of a run are of an aligner, and of different weights than the published ones."""
    has_aligner = any(depends_on_aligner(name) for entry in results["sets"].values() for name in entry["methods"])
    return has_aligner and results["weights"] != published.get("weights")


def write_figure(name: str, lines: list[str], figure: Figure) -> None:
    """Writes a figure of the paper and its part of `docs/paper.md`."""
    save_figure(DOCS / "figures" / f"{name}.svg", figure)
    write_part(DOCS / "paper.md", name, [f"![{TITLES[name]}](figures/{name}.svg)", "", *lines])


def write_reproduced(folder: Path) -> None:
    """Copies the pages that `reproduce` wrote to `folder` into `docs/paper.md`, with their pictures."""
    pages = [folder / f"{name}.md" for name in REPRODUCED if (folder / f"{name}.md").is_file()]
    if not pages:
        raise ValueError(
            f"{folder} contains no page of `arcaligner reproduce`. Run `arcaligner reproduce all` first, or pass the "
            "folder of its pages with `--reproduced`."
        )
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()[1:]  # without the heading
        pictures = [name for line in lines for name in _PICTURE.findall(line)]
        for name in pictures:
            write_atomically(DOCS / "figures" / name, (folder / name).read_bytes())
        shown = (re.sub("^##", "###", _PICTURE.sub(r"](figures/\1)", line)) for line in lines)
        write_part(DOCS / "paper.md", page.stem, [wrapped for line in shown for wrapped in _wrapped(line)])


def _wrapped(line: str) -> list[str]:
    """A line of Markdown at the width of the pages; rows of tables, headings and pictures stay whole."""
    is_item = re.match(r"(\d+\.|-) ", line)
    indent = " " * (is_item.end() if is_item else 0)
    return textwrap.wrap(line, 120, subsequent_indent=indent) if is_item or line[:1].isalnum() else [line]


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_part(page: Path, name: str, lines: list[str]) -> None:
    """Replace the part of a page between the marks of a name; the rest of the page is written by hand."""
    text, (start, end) = page.read_text(encoding="utf-8"), (mark.format(name) for mark in MARKS)
    numbers = text.count(start), text.count(end)
    if numbers != (1, 1) or text.index(start) > text.index(end):
        found = ", the second before the first" if numbers == (1, 1) else " {} and {} times".format(*numbers)
        raise ValueError(
            f"{page} contains the marks {start!r} and {end!r}{found}; expected each once and in this order. Put one "
            "of each where the table belongs, and remove all others."
        )
    block = "\n".join(lines).strip()
    write_atomically(page, f"{text.partition(start)[0]}{start}\n{block}\n{end}{text.partition(end)[2]}")


def check_weights(run: Path, checkpoint: Path) -> None:
    """Raise `ValueError` for a run of another aligner, or one whose floor is another aligner's."""
    expected = fingerprint(str(checkpoint))
    for file in [*answer_files(run), *answer_files(run / FLOOR)]:
        if (
            find_method(NEW_NAMES.get(file.method, file.method)).checkpoint_field == "checkpoint"
            and (weights := file.settings()["weights"]) != expected
        ):
            raise ValueError(
                f"The answers in {file.path} are of an aligner whose weights have the digest {weights}; expected "
                f"{expected}, the digest of {checkpoint}. Evaluate this aligner with another `--output`, and pass that "
                "folder as `--run`."
            )


def answers_page(run: Path, threshold: float, no_answer: str) -> str:
    """The aligner's answers to the first questions of each set, by id, with their answerability; below the
    threshold the answer would be `no_answer`."""
    lines = answers_intro(threshold, no_answer)
    for file in answer_files(run):
        if file.method == "arcaligner" and file.task in TASKS:
            cells = []
            for row in sorted(file.read(), key=lambda row: row["id"])[:ANSWERS_PER_SET]:
                texts = row["question"], (row["answers"] or ["(not in the passages)"])[0], row["prediction"]
                shown = (_MARKDOWN.sub(r"\\\1", printable(" ".join(text.split()))) for text in texts)
                score = f"{100 * row['f1']:.0f}" if row["answers"] else "-"
                abstains = "yes" if row["answerability"] < threshold else "no"
                cells.append([*shown, score, f"{row['answerability']:.2f}", abstains])
            lines += answers_section(file.task, threshold, cells)
    return "\n".join([*lines, ""])


def answers_intro(threshold: float, no_answer: str) -> list[str]:
    """The lines above the sections of the page of answers."""
    intro = (
        "# Answers",
        "",
        "This page shows what the [shipped aligner](glossary.md#the-model) answers, right or wrong. Each section has "
        f"{ANSWERS_PER_SET} questions of one question set, the first ones by their ids. The model got the passages of "
        "a question as *slots*, vectors that replace the text, at two tokens per slot. Each section says which "
        "passages these are; all of them were used. Decoding was greedy, and answers were cut off after "
        f"{MAX_NEW_TOKENS} tokens. [results.md](results.md) has the mean F1 of each question set that has "
        "answers. The columns of the tables are:",
        "",
        "- *Expected* is the first gold answer, that is, the first answer that the data set calls right. (A question "
        'can have several.) "(not in the passages)" means that the question was written to have no answer in its '
        "passage.",
        "- *Answer* is what the model generated. `min_confidence`, with which it may abstain, was not set.",
        "- *F1*, in percent, is the word overlap of the answer with the most similar gold answer. 100 means that the "
        "words are the same, except for case, punctuation and articles. A question without a gold answer has no F1 "
        "(-).",
        "- *Answerability*, from 0 to 1, is an estimate of how likely it is that the passages contain an answer. It is "
        "not the chance that the answer is right.",
        f'- *Abstains?*: "yes" means that with `min_confidence={threshold}` the answer would be "{no_answer}", because '
        f"the answerability is lower than {threshold}. This number is the `answerability_threshold` of the checkpoint; "
        f"other pages round it to {threshold:.2f}.",
    )
    return [line for text in intro for line in _wrapped(text)]


def answers_section(task: str, threshold: float, cells: list[list[str]]) -> list[str]:
    """The lines of one section of the page of answers, which explains its table."""
    expected = (
        "*Expected* is an answer that the data set calls right; there may be others. *F1*, in percent, is the word "
        "overlap of *Answer* and the most similar right answer."
        if TASKS[task].is_answered
        else "There is no right answer, so there is no *F1* (-)."
    )
    columns = (
        f"{expected} *Answerability*, from 0 to 1, is an estimate of how likely it is that the passages contain an "
        f'answer. *Abstains?* is "yes" if the answerability is below {threshold}; with `min_confidence={threshold}` '
        f"the model would then not answer. Answers were cut off after {MAX_NEW_TOKENS} tokens. [More about the "
        "columns](#answers)"
    )
    table = markdown_table(["Question", "Expected", "Answer", "F1, %", "Answerability", "Abstains?"], cells)
    questions = (
        f"{ANSWERED[task]} The model is the [shipped aligner](glossary.md#the-model). The passages are given as "
        "[slots](glossary.md#the-model), vectors that replace text. In commands this question set is called "
        f"[`{task}`](evaluation.md#tasks)."
    )
    about = [
        *textwrap.wrap(questions, 120, break_on_hyphens=False),
        "",
        *textwrap.wrap(columns, 120, break_on_hyphens=False),
    ]
    return ["", f"## {TASKS[task].title}", "", *about, "", *table]


def comparison_table(results: dict[str, Any]) -> list[str]:
    """EM of one base model given text or slots of one set, and how many positions of the prompt a passage takes."""
    entry = results["sets"]["SQuAD"]
    rows = []
    for description, method in COMPARED:
        numbers = entry["methods"][method]
        rows.append([description, *(f"{cell:.0f}" for cell in (numbers["context_tokens"], numbers["em"][0]))])
    columns = ["The model is given", "Positions of the passage, mean", "Answers that contain a gold answer, %"]
    return markdown_table(columns, rows)


def zoom_table(results: dict[str, Any]) -> list[str]:
    """F1 and the number of slots with zoom and without, on the README's sets."""
    rows = []
    for description, method in ZOOM_ROWS:
        measured = [results["sets"][name]["methods"].get(method) for name in README_SETS]
        cells = ["-" if of is None else f"{of['f1'][0]:.1f} ({of['context_tokens']:.0f})" for of in measured]
        rows.append([description, *cells])
    return markdown_table(["Slots", *(f"{title}: F1 (number of slots)" for title in README_SETS.values())], rows)


def quality_table(results: dict[str, Any]) -> list[str]:
    """F1 of the README's sets: a row for each of `QUALITY_ROWS`, and what they mean."""
    sets = {name: results["sets"][name] for name in README_SETS}

    def f1(method: str) -> list[float | None]:
        methods = [entry["methods"] for entry in sets.values()]
        if method == "as_needed":  # with one passage it equals `arcaligner`, and is not measured separately
            methods = [{method: of_set["arcaligner"]} | of_set for of_set in methods]
        return [of_set[method]["f1"][0] if method in of_set else None for of_set in methods]

    def loss_without_copying(suffix: str) -> str | None:
        pairs = list(zip(f1(f"arcaligner{suffix}"), f1(f"no_copying{suffix}"), strict=True))
        if any(None in pair for pair in pairs):
            return None
        lost = [copied - free for copied, free in pairs]
        return f"{min(lost):.0f} to {max(lost):.0f} points lower at {suffix.removeprefix('_x') or 2} tokens per slot"

    rows = []
    for description, compression, method in QUALITY_ROWS:
        if compression is None:
            rates = [
                entry["methods"][method]["compression_rate"] for entry in sets.values() if method in entry["methods"]
            ]
            compression = f"{min(rates):.1f} to {max(rates):.1f}" if rates else "-"
        rows.append([description, compression, *("-" if mean is None else f"{mean:.1f}" for mean in f1(method))])
    counts = " to ".join(map(str, sorted({entry["questions"] for entry in sets.values()})))
    lengths = [entry["methods"]["full_text_lora"]["context_tokens"] for entry in sets.values()]
    lost = [loss for loss in map(loss_without_copying, ("", "_x4")) if loss is not None]
    gains = [
        f"{title} {free:.1f} -> {copied:.1f}"
        for title, free, copied in zip(README_SETS.values(), f1("full_text_lora"), f1("full_text_copying"), strict=True)
        if copied is not None
    ]
    about = (
        "F1 of the base model SmolLM2-135M-Instruct, in percent; higher is better. It was measured on "
        f"{counts} questions of each set{fewer_questions(sets)}. *Compression* is the number of tokens of the used "
        "passages, divided by the number of positions that they take in the prompt:"
    )
    notes = [
        "**F1** is the [word overlap](docs/glossary.md#measurements) of the answer with the gold answer. "
        "[docs/results.md](docs/results.md) has all methods and question sets, with 95 % intervals.",
        "**Passages.** A question of SQuAD or Natural Questions has one passage, a question of HotpotQA has two, and a "
        "question of PopQA has one to twelve, two on average. The passages of a question together have "
        f"{min(lengths):.0f} to {max(lengths):.0f} tokens on average, depending on the set. Those of "
        "PopQA were found by a retriever. The other sets say which passages contain the answer, and the model gets "
        "these. If your retriever misses the passage with the answer, expect a lower F1.",
        "**Fine-tuned.** The base model has a LoRA that was trained on 4,000 questions with the whole text of their "
        "passages. We call this model the *fine-tuned reader*. The aligner was trained on about 113,000 questions, so "
        "the comparison is uneven. Without fine-tuning, the base model answers in full sentences, which lowers F1.",
        "**Selected passages, all passages.** By default, ArcAligner scores the passages and uses only the best one, "
        "or the best two if the question needs both. In the rows with all passages, the model attends to all of them, "
        "without weights.",
        "**Zoom.** The compression is that of the second reading. Its mean differs between the sets.",
        "**Copy bonus.** In the rows with slots, and in those with a part of the text, tokens that continue a span of "
        "the passages get a bonus ([copy-biased decoding](docs/extensions.md#copy-biased-decoding))."
        + (f" Without it (`ask(..., copy_bonus=0)`) the F1 of slots is {', and '.join(lost)}." if lost else "")
        + " In the rows with the whole text there is no bonus"
        + (
            f", because it lowers F1 on most sets (fine-tuned, without -> with the bonus: {', '.join(gains)})."
            if gains
            else "."
        ),
    ]
    columns = ["The model is given", "Compression", *README_SETS.values()]
    return [*textwrap.wrap(about, 120), "", *markdown_table(columns, rows), "", *_bullets(notes)]


def speed_table(latency: dict[str, Any], cached: dict[str, Any]) -> list[str]:
    """Times to the first token and cached bytes: a row for each of `SPEED_ROWS`, and what they mean."""
    compression = latency["own_tokens_per_slot"]
    cached_sizes = [size for k in SHORT_PASSAGES for size in cached["sizes"] if size["k"] == k]

    def milliseconds(sizes: list[dict[str, Any]], arm: str) -> str:
        return " / ".join(f"{first_token_ms(size, arm):,.0f}" for size in sizes)

    rows = []
    for description, tokens, timed, cached_arm in SPEED_ROWS:
        new = "-"
        if timed is not None:
            of_row, arm = (compression, "standard_rag") if timed == "text" else (timed, "off")
            new = milliseconds([find_size(latency, k, of_row) for k in SHORT_PASSAGES], arm)
        stored = cached["kept_bytes"]["text_apart" if timed == "text" else cached_arm.removesuffix(TOP_RANKED)]
        memory = " / ".join(f"{k * stored / 2**20:.0f}" for k in SHORT_PASSAGES)
        rows.append([description, tokens, new, milliseconds(cached_sizes, cached_arm), memory])
    passages = " / ".join(map(str, SHORT_PASSAGES))
    lengths = " / ".join(f"{find_size(latency, k, compression)['text_tokens']:,.0f}" for k in SHORT_PASSAGES)
    about = (
        "The time from the question to the first token of the answer, and the size of the cached keys and values. Each "
        f"cell has two numbers, for {passages} passages. Everything was measured in {cached['dtype']}, on "
        f"{latency['machine']['cores']} CPU cores:"
    )
    notes = [
        f"**Not cached.** As text, the prompts have {lengths} tokens, including the question. For slots, the sentence "
        "encoder had processed the passages before the question; the base model had not.",
        "**Cached.** The keys and values of the passages were computed before the question. A passage has "
        f"{cached['tokens_per_passage']:.0f} tokens on average. Slots are cached for each passage separately, so any "
        "cached passages can be combined. The time of text is that of an ordinary prefix cache, which works only for "
        "the same passages in the same order. Text can be cached for each passage, too, with a model that was trained "
        "for it; its times are about those of the prefix cache ([docs/speed.md](docs/speed.md#cached-passages)).",
        f"**Different CPUs.** The column *Not cached* was measured on an {latency['machine']['cpu']}, the column "
        f"*Cached* on an {cached['machine']['cpu']}. So compare times within a column only. On the "
        f"{cached['machine']['cpu']}, text that is not cached takes {milliseconds(cached_sizes, 'text')} ms.",
        "**One selected passage.** The time includes the scoring of passages. Only [some "
        "passages](docs/extensions.md#selection-of-passages) are scored, so {1} passages take about as long as {0}. "
        "The cache has the keys and values of all passages. The time without a cache was not measured.".format(
            *SHORT_PASSAGES
        ),
        "**Whole text.** The times are those of the base model without fine-tuning.",
    ]
    columns = ["The model is given", "Tokens per slot", "Not cached, ms", "Cached, ms", "Size of the cache, MiB"]
    return [*textwrap.wrap(about, 120), "", *markdown_table(columns, rows), "", *_bullets(notes)]


def _bullets(notes: list[str]) -> list[str]:
    """A list of Markdown at the width of the pages; links stay whole."""
    return [
        line
        for note in notes
        for line in textwrap.wrap(f"- {note}", 120, subsequent_indent="  ", break_on_hyphens=False)
    ]


def fewer_questions(sets: dict[str, Any]) -> str:
    """A note on the sets in which the README's default row has fewer questions than the others; empty if there are
    none."""
    fewer: dict[int, list[str]] = {}
    for name, entry in sets.items():
        count = entry["methods"].get("as_needed", entry)["questions"]
        if count < entry["questions"]:
            fewer.setdefault(count, []).append(README_SETS[name])
    return "".join(f" (default: {count} of {' and '.join(names)})" for count, names in fewer.items())


if __name__ == "__main__":
    run_command(publish)
