"""`make demo`: six questions answered from compressed passages, as a table.

The three case studies of the paper's appendix, with their sentences as printed there, noise included, and the first
three questions of the SQuAD sample in `tests/data`. None was chosen by how it is answered.
"""

import statistics
import time
from functools import partial
from itertools import islice
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

from ..common.files import CASE_STUDIES, SQUAD_SAMPLE, printable, read_json_lines
from ..common.rows import contains_match
from ..pipeline_arcaligner import ArcAlignerPipeline
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE

NUM_SQUAD = 3
MAX_NEW_TOKENS = 32
TIMED_RUNS = 5

Row = dict[str, Any]
Rate = int | str | None


def describe_passes(trajectories: list[list[str]]) -> str:
    """The passes of slots through all layers in one line, from the pipeline's `trajectories`.

    >>> describe_passes([["L0.", "L0."], ["L0.", "LLL"], ["LL", "LL"]])
    '10 passes, 4 of them added by gates at layers 1 2'
    """
    passes = ["".join(layer).count("L") for layer in trajectories]
    added = {layer: count - len(trajectories[layer]) for layer, count in enumerate(passes)}
    where = " ".join(str(layer) for layer, count in added.items() if count)
    return f"{sum(passes)} passes" + (
        f", {sum(added.values())} of them added by gates at layers {where}" if where else ""
    )


def first_token_seconds(ask: ArcAlignerPipeline, row: Row, tokens_per_slot: Rate) -> tuple[float, float, float]:
    """Median time to the first token of the answer: from slots, from slots kept from an earlier question, and from the
    passages as text.

    All use the same base model and the same words around the passages, and take turns. The passages' embeddings are
    computed beforehand, as they are for passages that are asked about more than once.
    """
    model, processor, documents = ask.model, ask.processor, row["passages"]
    text = " ".join(passage["text"] for passage in documents)
    asked = [(row["question"], {"documents": documents, "tokens_per_slot": tokens_per_slot})]
    asked += [(BACKGROUND_LINE + text + QUESTION_LINE + row["question"], {})]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    slots, full = [
        processor.apply_chat_template([{"role": "user", "content": content}], **given, **options).to(ask.device)
        for content, given in asked
    ]
    store = model.slot_prefix_store(processor)
    kept = partial(store.prepare, row["question"], documents, tokens_per_slot=tokens_per_slot)
    arms = (lambda: slots, kept, lambda: full)
    seconds = ([], [], [])
    for _ in range(1 + TIMED_RUNS):
        for times, make_inputs in zip(seconds, arms, strict=True):
            start = time.perf_counter()
            model.generate(**make_inputs(), max_new_tokens=1, do_sample=False).tolist()
            times.append(time.perf_counter() - start)
    return tuple(statistics.median(times[1:]) for times in seconds)  # the first warms up


def answer_cells(row: Row, record: dict[str, Any], seconds: tuple[float, float, float]) -> list[str]:
    """A row of the table, in rich markup; `seconds` as from `first_token_seconds`."""
    answer = escape(printable(record["generated_text"].strip()))
    gold = escape(printable(" / ".join(dict.fromkeys(row["answers"]))))
    color = "green" if contains_match(record["generated_text"], row["answers"]) else "yellow"
    size = record["statistics"]
    slots, kept, full = (1000 * each for each in seconds)
    return [
        f"[bold]{escape(printable(row['question']))}[/]\n[{color}]{answer}[/]\n[dim]gold: {gold}[/]",
        f"{size['tokens']} → {size['slots']}\n[bold]x{size['compression_rate']:.1f}[/]",
        describe_passes(record["trajectories"]),
        f"[bold]{slots:.0f} ms[/] slots\n[bold]{kept:.0f} ms[/] kept slots\n{full:.0f} ms text",
    ]


@torch.inference_mode()
def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: Rate = None) -> None:
    """Answers the six questions and prints the table."""
    rows = [*read_json_lines(CASE_STUDIES), *islice(read_json_lines(SQUAD_SAMPLE), NUM_SQUAD)]
    table = Table(
        Column("Question, answer, gold"),
        Column("Tokens → slots", no_wrap=True),
        Column("Passes of slots through layers", max_width=30),
        Column("First token", no_wrap=True),
        box=box.ROUNDED,
        show_lines=True,
        title="Answers from context slots",
    )
    num_right = 0
    for row in track(rows, "Answering", console=Console(stderr=True), transient=True):
        question = {"question": row["question"], "documents": row["passages"]}
        settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot}
        record = ask(question, return_slots=True, **settings)[0]
        table.add_row(*answer_cells(row, record, first_token_seconds(ask, row, tokens_per_slot)))
        num_right += int(contains_match(record["generated_text"], row["answers"]))
    config = ask.model.config
    console.print(table)
    console.print(
        f"{num_right} of {len(rows)} answers contain a gold answer (green).\n"
        "Each slot passes once through each layer, and again where a gate adds a pass.\n"
        f"First token: median of {TIMED_RUNS} runs on {ask.device}, from slots (embeddings computed beforehand), "
        "from slots kept from an earlier question, and from the passages as text. Short passages gain little.\n"
        f"Base model {config.base_model_name_or_path}, frozen; sentence encoder {config.encoder_name_or_path}.",
        style="dim",
        highlight=False,
    )
