"""`make demo`: fourteen questions answered from compressed passages.

The first ten questions of the SQuAD sample in `tests/data`, about its first twenty passages, as a search would find
several; the first of these about four passages that do not answer it; and the three case studies of the paper's
appendix, with their sentences as printed there, noise included. None was chosen by how it is answered. An aligner that
has a confidence reads the passage of several that most likely answers, and says how sure it is.
"""

from functools import partial
from itertools import islice
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from ...common.files import CASE_STUDIES, SQUAD_SAMPLE, printable, read_json_lines
from ...common.rows import Row, contains_match
from ...pipeline_arcaligner import ArcAlignerPipeline

NUM_QUESTIONS, NUM_PASSAGES = 10, 20
MAX_NEW_TOKENS = 32


def demo_questions(no_answer: str | None = None) -> dict[str, list[Row]]:
    """What is asked together, by its title; with a `no_answer` also a question that its passages do not answer."""
    squad = list(islice(read_json_lines(SQUAD_SAMPLE), NUM_PASSAGES))
    passages = [each for row in squad for each in row["passages"]]
    asked = [row | {"passages": passages} for row in squad[:NUM_QUESTIONS]]
    found = {f"{NUM_QUESTIONS} questions about {len(passages)} passages": asked}
    if no_answer is not None:
        others = passages[NUM_QUESTIONS:][:4]
        refused = squad[0] | {"passages": others, "answers": [no_answer]}
        found[f"One that its {len(others)} passages do not answer"] = [refused]
    return found | {"The paper's case studies, a passage each": list(read_json_lines(CASE_STUDIES))}


def answer_cells(row: Row, record: dict[str, Any]) -> list[str]:
    """A row of a table of answers, in rich markup."""
    answer = escape(printable(record["generated_text"].strip()))
    is_right = contains_match(record["generated_text"], row["answers"])
    gold = "" if is_right else f"\n[dim]gold: {escape(printable(row['answers'][0]))}[/]"
    sure = record["statistics"].get("confidence")
    return [
        escape(printable(row["question"])),
        f"[{'green' if is_right else 'yellow'}]{answer}[/]{gold}",
        "" if sure is None else f"{sure:.2f}",
    ]


def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: int | str | None = None) -> None:
    """Answers the questions and prints the tables."""
    config = ask.model.config
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot, "return_slots": True}
    if threshold := config.answerability_threshold:  # fitted on other questions
        settings |= {"min_confidence": threshold}
    asked = demo_questions(threshold and ask.processor.no_answer)
    progress = partial(track, description="Answering", console=Console(stderr=True), transient=True)
    num_right, num_rows = 0, sum(map(len, asked.values()))
    for title, rows in asked.items():
        columns = Column("Question", ratio=6), Column("Answer", ratio=5), Column("Confidence", justify="right")
        table = Table(*columns, box=box.SIMPLE_HEAD, expand=True, title=title, title_justify="left")
        for row in progress(rows):
            record = ask({"question": row["question"], "documents": row["passages"]}, **settings)[0]
            table.add_row(*answer_cells(row, record))
            num_right += int(contains_match(record["generated_text"], row["answers"]))
        console.print(table)
    console.print(
        f"{num_right} of {num_rows} answers contain a gold answer (green).\n"
        f"Base model {config.base_model_name_or_path}, frozen; sentence encoder {config.encoder_name_or_path}.",
        style="dim",
        highlight=False,
    )
