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
    ("the whole text, model not fine-tuned", "standard_rag"),
    ("**slots, two tokens each**", "arcaligner"),
    (
        "**slots with [zoom](docs/extensions.md#zoom)**, eight tokens each, but two where the answer seems to be",
        "zoomed",
    ),
    ("the whole text, after fine-tuning on questions with their text", "full_text_lora"),
)
# Of the README's table, by compression: what the model is given, the compression (`None` is as measured), the method,
# and the timed arms of `latency.json` and `kept.json`. Copy-biased decoding is on where it helps, which is everywhere
# except for whole text.
README_ROWS = (
    ("whole text, not fine-tuned", "1", "standard_rag", "text", "text_same_set"),
    ("whole text, fine-tuned", "1", "full_text_lora", "text", "text_same_set"),
    ("only the first half of the text, fine-tuned", "2", "truncated_copying_x2", None, None),
    ("**slots** of one or two passages (default)", "2", "as_needed", None, "slots_x2_top_ranked"),
    ("**slots** of all passages, not weighted", "2", "arcaligner", 2, "slots_x2"),
    ("**slots** of all passages, with [zoom](docs/extensions.md#zoom)", None, "zoomed", None, None),
    ("only the first quarter of the text, fine-tuned", "4", "truncated_copying_x4", None, None),
    ("**slots** of all passages, not weighted", "4", "arcaligner_x4", 4, "slots_x4"),
    ("only the first eighth of the text, fine-tuned", "8", "truncated_copying_x8", None, None),
    ("**slots** of all passages, not weighted", "8", "arcaligner_x8", 8, "slots_x8"),
    (
        "**slots** of all passages, not weighted",
        "a sentence in a slot",
        "arcaligner_xsegment",
        "segment",
        "slots_xsegment",
    ),
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
# Parts of the paper whose pages are in `docs/paper.md` as `reproduce` writes them. Others come from the results.
REPRODUCED = ("ablation", "perplexity", "gates", "categories", "cases")
COMPRESSIONS = (4, 8, "segment")  # of the shipped aligner in the figure of ratios, next to its own
_PICTURE = re.compile(r"\]\((\w+\.svg)\)")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|&])")  # what could become structure of a page
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
    write_part(ROOT / "README.md", "results", readme_table(results, latency, cached))


def with_published(results: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """
    The results of a run, with the published ones for what it did not measure.

    A run that asked an aligner whose weights are not the published ones replaces all numbers that depend on them, and
    its sets are those of the result: only methods that use no aligner keep their numbers. Any other run adds to what
    is published. Differences between methods need the answers of both, so they are those of the first such run.
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
        sets[title] = first | {"methods": {name: methods[name] for name in sorted(methods, key=sort_key)}}
    machines = {*results["machine"].split("; "), *published["machine"].split("; ")}
    questions = min(entry["questions"] for entry in sets.values())
    weights = {"weights": results["weights"] if replaces else published.get("weights")}
    return {"machine": "; ".join(sorted(machines)), "questions": questions} | weights | {"sets": sets}


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
    intro = (
        "# Answers",
        "",
        "This page shows answers of the [shipped aligner](glossary.md#the-model), right or wrong. Each section has the "
        f"{ANSWERS_PER_SET} questions of one data set that come first in the order of their ids. The model was given "
        "all passages of a question as *slots*, vectors that replace the text, at two tokens per slot. It decoded "
        "greedily. [results.md](results.md) has the mean F1 of each set, and the [glossary](glossary.md) explains the "
        "terms. The columns of the tables:",
        "",
        "- *Expected* is the first gold answer that the data set gives for the question. The passages of TriviaQA, "
        "WebQuestions and PopQA were found by a retriever, and many of these passages do not contain a gold answer "
        "([how many](paper.md#tables-1-and-2)). If the question was written to have no answer in its passage, this "
        'column has "(not in the passages)".',
        "- *F1*, in percent, is the word overlap of the answer and a gold answer. 100 means that the words are the "
        "same, except for case, punctuation and articles. If a question has several gold answers, the most similar one "
        "counts, which may not be the expected one. A question without a gold answer has no F1 (-).",
        "- *Answerability*, from 0 to 1, is an estimate of how likely it is that the passages contain an answer. It is "
        "not the chance that the answer is right.",
        f'- *Abstains*: "yes" means that with `min_confidence={threshold}` the answer would be "{no_answer}", because '
        f"the answerability is below {threshold}. This number is the `answerability_threshold` of the checkpoint; "
        f"other pages round it to {threshold:.2f}. The columns *Answer* and *F1* are without `min_confidence`.",
    )
    lines = [line for text in intro for line in _wrapped(text)]
    for file in answer_files(run):
        if file.method == "arcaligner" and file.task in TASKS:
            cells = []
            for row in sorted(file.read(), key=lambda row: row["id"])[:ANSWERS_PER_SET]:
                texts = row["question"], (row["answers"] or ["(not in the passages)"])[0], row["prediction"]
                shown = (_MARKDOWN.sub(r"\\\1", printable(" ".join(text.split()))) for text in texts)
                score = f"{100 * row['f1']:.0f}" if row["answers"] else "-"
                abstains = "yes" if row["answerability"] < threshold else "no"
                cells.append([*shown, score, f"{row['answerability']:.2f}", abstains])
            abstention = f"Abstains with `min_confidence={threshold}`?"
            table = markdown_table(["Question", "Expected", "Answer", "F1", "Answerability", abstention], cells)
            about = (
                f"The questions are those of the [task](evaluation.md#tasks) `{file.task}`. [The top of this "
                "page](#answers) explains the columns."
            )
            lines += ["", f"## {TASKS[file.task].title}", "", *_wrapped(about), "", *table]
    return "\n".join([*lines, ""])


def comparison_table(results: dict[str, Any]) -> list[str]:
    """F1 of one base model given text or slots of one set, and how many positions of the prompt a passage takes."""
    entry = results["sets"]["SQuAD"]
    rows = []
    for description, method in COMPARED:
        numbers = entry["methods"][method]
        cells = numbers["context_tokens"], numbers["f1"][0], numbers["em"][0]
        rows.append([description, *(f"{cell:.0f}" for cell in cells)])
    scores = "F1, %", "Answers that contain a gold answer, %"
    return markdown_table(["SmolLM2-135M-Instruct is given", "Positions of a passage, mean", *scores], rows)


def zoom_table(results: dict[str, Any]) -> list[str]:
    """F1 and the number of slots with zoom and without, on the README's sets."""
    rows = []
    for description, method in ZOOM_ROWS:
        measured = [results["sets"][name]["methods"].get(method) for name in README_SETS]
        cells = ["-" if of is None else f"{of['f1'][0]:.1f} ({of['context_tokens']:.0f})" for of in measured]
        rows.append([description, *cells])
    return markdown_table(["Slots", *(f"{title}: F1 (number of slots)" for title in README_SETS.values())], rows)


def readme_table(results: dict[str, Any], latency: dict[str, Any], cached: dict[str, Any]) -> list[str]:
    """F1 of the README's sets, times to the first token and cached bytes: a row for each of `README_ROWS`."""
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

    default_compression = latency["own_tokens_per_slot"]
    cached_sizes = [size for k in SHORT_PASSAGES for size in cached["sizes"] if size["k"] == k]
    rows = []
    for description, tokens, method, timed, cached_arm in README_ROWS:
        new, again, memory = "-", "-", "-"
        if timed is not None:
            compression, arm = (default_compression, "standard_rag") if timed == "text" else (timed, "off")
            new = " / ".join(f"{first_token_ms(find_size(latency, k, compression), arm):,.0f}" for k in SHORT_PASSAGES)
        if cached_arm is not None:
            again = " / ".join(f"{first_token_ms(size, cached_arm):,.0f}" for size in cached_sizes)
            stored = cached["kept_bytes"]["text_apart" if timed == "text" else cached_arm.removesuffix(TOP_RANKED)]
            memory = " / ".join(f"{k * stored / 2**20:.0f}" for k in SHORT_PASSAGES)
        if tokens is None:
            rates = [
                entry["methods"][method]["compression_rate"] for entry in sets.values() if method in entry["methods"]
            ]
            tokens = f"{min(rates):.1f} to {max(rates):.1f}" if rates else "-"
        rows.append(
            [description, tokens, *("-" if mean is None else f"{mean:.1f}" for mean in f1(method)), new, again, memory]
        )
    passages = " / ".join(map(str, SHORT_PASSAGES))
    columns = ["The model is given", "Compression", *(f"F1: {title}" for title in README_SETS.values())]
    columns += [f"First token: {passages} passages, ms", f"First token: {passages} cached passages, ms"]
    columns.append(f"Cache of {passages} passages, MiB")
    counts = " to ".join(map(str, sorted({entry["questions"] for entry in sets.values()})))
    lengths = [entry["methods"]["full_text_lora"]["context_tokens"] for entry in sets.values()]
    new_tokens = " / ".join(f"{find_size(latency, k, default_compression)['text_tokens']:,.0f}" for k in SHORT_PASSAGES)
    lost = [loss for loss in map(loss_without_copying, ("", "_x4")) if loss is not None]
    gains = [
        f"{title} {free:.1f} -> {copied:.1f}"
        for title, free, copied in zip(README_SETS.values(), f1("full_text_lora"), f1("full_text_copying"), strict=True)
        if copied is not None
    ]
    copied = (
        f", because it lowers F1 on most sets (fine-tuned reader, without -> with the bonus: {', '.join(gains)})"
        if gains
        else ""
    )
    about = (
        "Each row combines measurements on different prompts. F1 was measured on questions with one or two passages. "
        f"The passages of a question together have {min(lengths):.0f} to {max(lengths):.0f} tokens on average, "
        f"depending on the data set. Times and the size of the cache were measured with {passages} passages. In the "
        f"column of times without a cache, the prompts have {new_tokens} tokens as text, including the question."
    )
    example = (
        "How to read a row, for example the row of slots of all passages at compression 2: F1 on SQuAD is "
        f"{f1('arcaligner')[0]:.1f}. Without a cache, the first token comes after "
        f"{first_token_ms(find_size(latency, SHORT_PASSAGES[0], 2), 'off'):,.0f} ms with {SHORT_PASSAGES[0]} "
        "passages. With a cache, on another CPU, it comes after "
        f"{first_token_ms(cached_sizes[0], 'slots_x2'):,.0f} ms. The cache takes "
        f"{SHORT_PASSAGES[0] * cached['kept_bytes']['slots_x2'] / 2**20:.0f} MiB."
    )
    notes = [
        "**Compression** is the number of tokens of the used passages, divided by the number of positions that they "
        "take in the prompt. At 2, each slot replaces two tokens; truncated text at 2 is the first half of the whole "
        "text.",
        "**Zoom**: the passages are read twice, first with eight tokens per slot, then with two tokens per slot where "
        "the answer seems to be. The compression is that of the second reading, the mean of each data set.",
        "**All passages, not weighted**: the model attends to all passages of the question, and none is preferred. The "
        "command `evaluate` measures answers in this way. Pipeline and server instead "
        "[weight](docs/extensions.md#which-passages-are-used) the passages by their scores if `max_passages` is two or "
        "more.",
        "**F1** is the [word overlap](docs/glossary.md#measurements) of the model's answer with the gold answer, in "
        f"percent; higher is better. It was measured on {counts} questions of each set{fewer_questions(sets)}.",
        "**Fine-tuned**: the base model has a LoRA that was trained on 4,000 questions with the whole text of their "
        "passages. We call this model the *fine-tuned reader*. Its times were not measured; the table shows the times "
        "of the base model without this LoRA.",
        f"**First token** is the time from the question to the first token of the answer; less is better. Times were "
        f"measured in float32 on {latency['machine']['cores']} CPU cores. The sentence encoder had processed the "
        "passages before the question.",
        f"**Cached passages** have {cached['tokens_per_passage']:.0f} tokens on average. Their keys and values were "
        f"computed before the question, and are stored in {cached['dtype']}; the last column shows their size. For "
        "whole text, times are those of an ordinary prefix cache, which works only for the same passages in the same "
        "order. Slots are cached for each passage separately, so any cached passages can be combined. "
        "[docs/speed.md](docs/speed.md#cached-passages) also has times of text that is cached for each passage.",
        "**The default** scores the passages and uses the passage with the highest score, or the best two if the "
        "question needs two. Its times include the scoring, and were measured on questions that were answered from one "
        "passage. Only [some passages](docs/extensions.md#selection-of-passages) are scored, so {1} passages take "
        "about as long as {0}.".format(*SHORT_PASSAGES),
        "**A dash** means not measured.",
        f"**CPUs.** The two columns of times were measured on different CPUs ({latency['machine']['cpu']}; for cached "
        f"passages {cached['machine']['cpu']}). So compare times within one column only.",
        "**[Copy-biased decoding](docs/extensions.md#copy-biased-decoding).** In the rows with slots, and in the rows "
        "with truncated text, tokens that continue a span of the passages get a bonus while the answer is generated. "
        f"In the rows with the whole text there is no bonus{copied}."
        + (f" Without the bonus (`ask(..., copy_bonus=0)`) the F1 of slots is {', and '.join(lost)}." if lost else ""),
    ]
    shown = [
        line
        for note in notes
        for line in textwrap.wrap(f"- {note}", 120, subsequent_indent="  ", break_on_hyphens=False)  # links stay whole
    ]
    table = markdown_table(columns, rows)
    return [*textwrap.wrap(about, 120), "", *table, "", *textwrap.wrap(example, 120), "", *shown]


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
