"""`make demo`: fourteen questions, answered from slots, and from text by the bare base model.

These are the first ten questions of the SQuAD sample in `tests/data` with its first ten passages, like the results of a
search; the first of these questions with four passages that do not answer it; and the three case studies of the paper's
appendix, with their sentences as printed there, noise included. No question was selected by its answer. If the aligner
can score passages, it uses the top-ranked one or two, and the base model gets the text of the same passages; otherwise
both use all passages.
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


class DemoAnswer(NamedTuple):
    """An answer, the number of positions that its passages take in the prompt, and the seconds that it took."""

    text: str
    positions: int
    seconds: float
    answerability: float | None = None


def demo_questions(no_answer: str | None = None) -> dict[str, list[Row]]:
    """Groups of questions by title; with a `no_answer`, also a question that its passages do not answer."""
    squad = list(islice(read_json_lines(SQUAD_SAMPLE), NUM_PASSAGES + NUM_OTHERS))
    passages, others = (
        [passage for row in rows for passage in row["passages"]]
        for rows in (squad[:NUM_PASSAGES], squad[NUM_PASSAGES:])
    )
    rows = [row | {"passages": passages} for row in squad[:NUM_QUESTIONS]]
    groups = {f"{NUM_QUESTIONS} questions about {len(passages)} passages": rows}
    if no_answer is not None:
        unanswered = squad[0] | {"passages": others, "answers": [no_answer]}
        groups[f"A question that its {len(others)} passages do not answer"] = [unanswered]
    return groups | {"The paper's case studies, each with one passage": list(read_json_lines(CASE_STUDIES))}


def from_slots(ask: ArcAlignerPipeline, row: Row, **settings: Any) -> tuple[DemoAnswer, list[dict[str, str]]]:
    """The answer from slots, and the passages that it is based on."""
    began = time.perf_counter()
    record = ask({"question": row["question"], "documents": row["passages"]}, return_slots=True, **settings)[0]
    seconds, statistics = time.perf_counter() - began, record["statistics"]
    numbers = sorted({segment["document"] for segment in record["segments"]})
    text, answerability = record["generated_text"].strip(), statistics.get("answerability")
    answer = DemoAnswer(text, statistics["slots"], seconds, answerability)
    return answer, [row["passages"][number] for number in numbers]


def from_text(ask: ArcAlignerPipeline, row: Row) -> DemoAnswer:
    """The answer of the bare base model from the text of the row's passages."""
    began = time.perf_counter()
    text = " ".join(": ".join(filter(None, [passage["title"], passage["text"]])) for passage in row["passages"])
    prompt = f"{BACKGROUND_LINE}{text}{QUESTION_LINE}{row['question']}"
    chat = prompt if ask.processor.chat_template is None else [{"role": "user", "content": prompt}]
    inputs = chat_inputs(ask.processor, [chat]).to(ask.model.device)
    (answer,), _ = greedy_answers(ask.model, ask.processor, inputs, max_new_tokens=MAX_NEW_TOKENS)
    positions = ask.processor.slot_encoder.count_tokens([text])
    return DemoAnswer(answer, positions, time.perf_counter() - began)


def answer_cell(row: Row, answer: DemoAnswer) -> str:
    """An answer and its cost, in rich markup."""
    is_right = contains_match(answer.text, row["answers"])
    note = f"{'right' if is_right else 'wrong'}, {answer.positions} positions, {answer.seconds:.1f} s"
    note += "" if answer.answerability is None else f", answerability {answer.answerability:.2f}"
    return f"[{'green' if is_right else 'yellow'}]{escape(printable(answer.text))}[/]\n[dim]{note}[/]"


def table_row(*cells: str) -> Table:
    """A row that is printed by itself, in columns of the same widths as all other rows."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for ratio in (5, 4, 4):
        table.add_column(ratio=ratio)
    table.add_row(*cells)
    return table


def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: int | str | None = None) -> None:
    """Answer the questions, print each answer as soon as it is known, and print a summary."""
    config = ask.model.config
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot}
    if threshold := config.answerability_threshold:  # fitted on other questions
        settings["min_confidence"] = threshold
    groups = demo_questions(threshold and ask.processor.no_answer)
    results: list[tuple[Row, DemoAnswer, DemoAnswer]] = []
    with torch.inference_mode():
        from_text(ask, {"question": "?", "passages": [{"title": "", "text": "."}]})  # loads everything before timing
        for title, rows in groups.items():
            console.print(f"\n[bold]{title}[/]")
            console.print(table_row("[dim]Question[/]", "[dim]From slots[/]", "[dim]Bare base model, from text[/]"))
            for row in rows:
                slots, passages = from_slots(ask, row, **settings)
                text = from_text(ask, row | {"passages": passages or row["passages"]})
                results.append((row, slots, text))
                right = {contains_match(answer.text, row["answers"]) for answer in (slots, text)}
                gold = "" if right == {1.0} else f"\n[dim]gold answer: {escape(printable(row['answers'][0]))}[/]"
                question = f"{escape(printable(row['question']))}{gold}"
                console.print(table_row(question, *(answer_cell(row, answer) for answer in (slots, text))))
    show_summary(console, config, results)


def show_summary(console: Console, config: Any, results: list[tuple[Row, DemoAnswer, DemoAnswer]]) -> None:
    """Print the summary, and the next command to try."""
    rows, *columns = zip(*results, strict=True)
    right, positions, seconds = [], [], []
    for answers in columns:  # from slots, then from text
        matches = [contains_match(answer.text, row["answers"]) for row, answer in zip(rows, answers, strict=True)]
        right.append(sum(matches))
        positions.append(sum(answer.positions for answer in answers))
        seconds.append(sum(answer.seconds for answer in answers))
    console.print(
        f"\nBase model: {config.base_model_name_or_path}, frozen. Sentence encoder: {config.encoder_name_or_path}. The "
        "time for answers from slots includes encoding the passages, which is done once per passage, and scoring them "
        "for each question.",
        style="dim",
        highlight=False,
    )
    console.print(
        f"Result: {right[0]:.0f} of {len(results)} answers from slots are right (contain a gold answer), and "
        f"{right[1]:.0f} of {len(results)} from text. Text takes {positions[1] / max(1, positions[0]):.1f} times as "
        f"many positions as slots. Time: {seconds[0]:.0f} s from slots, {seconds[1]:.0f} s from text.",
        highlight=False,
    )
    console.print(NEXT, markup=False, highlight=False, soft_wrap=True)
