"""`make demo`: fourteen questions, answered from slots, and from text by the bare base model.

The first ten questions of the SQuAD sample in `tests/data` with its first ten passages, like the results of a search;
the first of these questions with four passages that do not answer it; and the three case studies of the paper's
appendix, with their sentences as printed there, noise included. No question was selected by its answer. If the aligner
can score passages, it uses the top-ranked one or two, and the base model gets the text of the same passages; otherwise
both use all.
"""

import time
from itertools import islice
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...answering_arcaligner import chat_inputs, greedy_answers
from ...common.files import CASE_STUDIES, SQUAD_SAMPLE, printable, read_json_lines
from ...common.rows import Row, contains_match
from ...pipeline_arcaligner import ArcAlignerPipeline
from ...processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE

NUM_QUESTIONS, NUM_PASSAGES, NUM_OTHERS = 10, 10, 4
MAX_NEW_TOKENS = 32
NEXT = 'Next, ask about your own file: arcaligner answer "What does it say?" --document FILE'


class Told(NamedTuple):
    """An answer, with the number of positions that its passages take, and its seconds."""

    text: str
    positions: int
    seconds: float
    sure: float | None = None  # the answerability


def demo_questions(no_answer: str | None = None) -> dict[str, list[Row]]:
    """Groups of questions by title; with a `no_answer`, also a question that its passages do not answer."""
    squad = list(islice(read_json_lines(SQUAD_SAMPLE), NUM_PASSAGES + NUM_OTHERS))
    passages, others = (
        [each for row in rows for each in row["passages"]] for rows in (squad[:NUM_PASSAGES], squad[NUM_PASSAGES:])
    )
    asked = [row | {"passages": passages} for row in squad[:NUM_QUESTIONS]]
    found = {f"{NUM_QUESTIONS} questions about {len(passages)} passages": asked}
    if no_answer is not None:
        refused = squad[0] | {"passages": others, "answers": [no_answer]}
        found[f"One that its {len(others)} passages do not answer"] = [refused]
    return found | {"The paper's case studies, a passage each": list(read_json_lines(CASE_STUDIES))}


def from_slots(ask: ArcAlignerPipeline, row: Row, **settings: Any) -> tuple[Told, list[dict[str, str]]]:
    """The answer from slots, and the passages that it is based on."""
    began = time.perf_counter()
    record = ask({"question": row["question"], "documents": row["passages"]}, return_slots=True, **settings)[0]
    seconds, statistics = time.perf_counter() - began, record["statistics"]
    read = sorted({segment["document"] for segment in record["segments"]})
    told = Told(record["generated_text"].strip(), statistics["slots"], seconds, statistics.get("answerability"))
    return told, [row["passages"][number] for number in read]


def from_text(ask: ArcAlignerPipeline, row: Row) -> Told:
    """The answer of the bare base model from the text of the row's passages."""
    began, parts = time.perf_counter(), ([each["title"], each["text"]] for each in row["passages"])
    text = " ".join(": ".join(filter(None, each)) for each in parts)
    prompt = f"{BACKGROUND_LINE}{text}{QUESTION_LINE}{row['question']}"
    chat = prompt if ask.processor.chat_template is None else [{"role": "user", "content": prompt}]
    inputs = chat_inputs(ask.processor, [chat]).to(ask.model.device)
    (answer,), _ = greedy_answers(ask.model, ask.processor, inputs, max_new_tokens=MAX_NEW_TOKENS)
    positions = ask.processor.slot_encoder.count_tokens([text])
    return Told(answer, positions, time.perf_counter() - began)


def answer_cell(row: Row, told: Told) -> str:
    """An answer with its cost, in rich markup."""
    is_right = contains_match(told.text, row["answers"])
    sure = "" if told.sure is None else f", answerability {told.sure:.2f}"
    took = f"{'right' if is_right else 'wrong'}, {told.positions} positions, {told.seconds:.1f} s{sure}"
    return f"[{'green' if is_right else 'yellow'}]{escape(printable(told.text))}[/]\n[dim]{took}[/]"


def table_row(*cells: str) -> Table:
    """A row that is printed alone, in columns of the same widths as all others."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for ratio in (5, 4, 4):
        table.add_column(ratio=ratio)
    table.add_row(*cells)
    return table


def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: int | str | None = None) -> None:
    """Answer the questions, print each answer as soon as it is known, and summarize."""
    config = ask.model.config
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot}
    if threshold := config.answerability_threshold:  # fitted on other questions
        settings["min_confidence"] = threshold
    asked = demo_questions(threshold and ask.processor.no_answer)
    found: list[tuple[Row, Told, Told]] = []
    with torch.inference_mode():
        from_text(ask, {"question": "?", "passages": [{"title": "", "text": "."}]})  # warm-up: loads everything
        for title, rows in asked.items():
            console.print(f"\n[bold]{title}[/]")
            console.print(table_row("[dim]Question[/]", "[dim]From slots[/]", "[dim]Bare base model, from text[/]"))
            for row in rows:
                slots, read = from_slots(ask, row, **settings)
                text = from_text(ask, row | {"passages": read or row["passages"]})
                found.append((row, slots, text))
                right = {contains_match(each.text, row["answers"]) for each in (slots, text)}
                gold = "" if right == {1.0} else f"\n[dim]gold: {escape(printable(row['answers'][0]))}[/]"
                question = f"{escape(printable(row['question']))}{gold}"
                console.print(table_row(question, *(answer_cell(row, each) for each in (slots, text))))
    show_summary(console, config, found)


def show_summary(console: Console, config: Any, found: list[tuple[Row, Told, Told]]) -> None:
    """Print the summary, and the next command to try."""
    rows, *told = zip(*found, strict=True)
    right, positions, seconds = [], [], []
    for own in told:
        right.append(sum(contains_match(each.text, row["answers"]) for row, each in zip(rows, own, strict=True)))
        positions.append(sum(each.positions for each in own))
        seconds.append(sum(each.seconds for each in own))
    console.print(
        f"\nBase model {config.base_model_name_or_path}, frozen; sentence encoder {config.encoder_name_or_path}. The "
        "time of slots includes encoding and scoring the passages, which is cached for further questions.",
        style="dim",
        highlight=False,
    )
    console.print(
        f"Result: {right[0]:.0f} of {len(found)} right from slots, {right[1]:.0f} from text (right: contains a gold "
        f"answer), with {positions[1] / max(1, positions[0]):.1f} times fewer positions; {seconds[0]:.0f} s from "
        "slots, "
        f"{seconds[1]:.0f} s from text.",
        highlight=False,
    )
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)
