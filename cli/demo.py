"""`make demo`: questions answered from compressed passages, as a table.

The three case studies of the paper's appendix, with their sentences as printed there, noise included, and the first
three questions of the SQuAD sample in `tests/data`, each with the passages of the next four rows behind its own, as a
search would find several. None was chosen by how it is answered. An aligner that was trained to refuse is also asked
the first of these about passages that do not answer it, and says how sure it is of each answer.
"""

import statistics
import time
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table
from transformers import DynamicCache

from ..common.files import CASE_STUDIES, SQUAD_SAMPLE, printable, read_json_lines
from ..common.rows import contains_match
from ..pipeline_arcaligner import ArcAlignerPipeline
from ..processing_arcaligner import BACKGROUND_LINE, QUESTION_LINE

NUM_SQUAD = 3
NUM_PASSAGES = 5
MAX_NEW_TOKENS = 32
TIMED_RUNS = 3

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


class FirstTokens(NamedTuple):
    """Median seconds to the first token of an answer, from slots and from text, newly read and kept."""

    slots: float
    text: float
    kept_slots: float
    kept_text: float


def demo_rows(no_answer: str | None = None) -> list[Row]:
    """The questions with their passages; with a `no_answer` also one that they do not answer."""
    squad = list(islice(read_json_lines(SQUAD_SAMPLE), NUM_SQUAD + NUM_PASSAGES - 1))
    rows = [
        row | {"passages": [each for other in squad[number : number + NUM_PASSAGES] for each in other["passages"]]}
        for number, row in enumerate(squad[:NUM_SQUAD])
    ]
    others = [each for row in squad[NUM_SQUAD:] for each in row["passages"]]
    refused = [] if no_answer is None else [squad[0] | {"passages": others, "answers": [no_answer]}]
    return [*read_json_lines(CASE_STUDIES), *rows, *refused]


def first_token_seconds(ask: ArcAlignerPipeline, row: Row, tokens_per_slot: Rate) -> FirstTokens:
    """Times to the first token of the answer.

    All use the same base model and the same words around the passages, and take turns. The passages' embeddings are
    computed beforehand, as they are for passages that are asked about more than once. What is kept, of slots or of
    text, are the keys and values of all before the question.
    """
    model, processor, documents = ask.model, ask.processor, row["passages"]
    before = BACKGROUND_LINE + " ".join(passage["text"] for passage in documents) + QUESTION_LINE
    asked = [(row["question"], {"documents": documents, "tokens_per_slot": tokens_per_slot})]
    asked += [(before + row["question"], {}), (before, {})]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    slots, full, other = [
        processor.apply_chat_template([{"role": "user", "content": content}], **given, **options).to(ask.device)
        for content, given in asked
    ]
    ids, other_ids = full["input_ids"][0].tolist(), other["input_ids"][0].tolist()
    length, cache, store = len(commonprefix([ids, other_ids])), DynamicCache(), model.slot_prefix_store(processor)
    model(input_ids=full["input_ids"][:, :length], past_key_values=cache, use_cache=True)

    def kept_text() -> dict[str, Any]:
        if surplus := cache.get_seq_length() - length:
            cache.crop(-surplus)
        return {**full, "past_key_values": cache}

    kept_slots = partial(store.prepare, row["question"], documents, tokens_per_slot=tokens_per_slot)
    arms = FirstTokens(lambda: slots, lambda: full, kept_slots, kept_text)
    seconds = FirstTokens([], [], [], [])
    for _ in range(1 + TIMED_RUNS):
        for times, make_inputs in zip(seconds, arms, strict=True):
            start = time.perf_counter()
            model.generate(**make_inputs(), max_new_tokens=1, do_sample=False).tolist()
            times.append(time.perf_counter() - start)
    return FirstTokens(*(statistics.median(times[1:]) for times in seconds))  # the first warms up


def answer_cells(row: Row, record: dict[str, Any], seconds: FirstTokens) -> list[str]:
    """A row of the table, in rich markup; `seconds` as from `first_token_seconds`."""
    answer = escape(printable(record["generated_text"].strip()))
    gold = escape(printable(" / ".join(dict.fromkeys(row["answers"]))))
    color = "green" if contains_match(record["generated_text"], row["answers"]) else "yellow"
    size = record["statistics"]
    sure = f" [dim](confidence {size['confidence']:.2f})[/]" if "confidence" in size else ""
    slots, text, kept_slots, kept_text = (
        f"[green]{1000 * mine:.0f}[/]" if mine < other else f"{1000 * mine:.0f}"
        for mine, other in zip(seconds, (seconds[1], seconds[0], seconds[3], seconds[2]), strict=True)
    )
    return [
        f"[bold]{escape(printable(row['question']))}[/]\n[{color}]{answer}[/]{sure}\n[dim]gold: {gold}[/]",
        f"{size['tokens']} → {size['slots']}\n[bold]x{size['compression_rate']:.1f}[/]",
        describe_passes(record["trajectories"]),
        f"{slots} slots\n{text} text",
        f"{kept_slots} slots\n{kept_text} text",
    ]


@torch.inference_mode()
def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: Rate = None) -> None:
    """Answers the questions and prints the table."""
    rows, times = demo_rows(ask.processor.answer_probe and ask.processor.no_answer), []
    table = Table(
        Column("Question, answer, gold"),
        Column("Tokens → slots", no_wrap=True),
        Column("Passes of slots through layers", max_width=30),
        Column("First token, ms\nnewly read", no_wrap=True),
        Column("\nkept", no_wrap=True),
        box=box.ROUNDED,
        show_lines=True,
        title="Answers from context slots",
    )
    num_right = 0
    for row in track(rows, "Answering", console=Console(stderr=True), transient=True):
        question = {"question": row["question"], "documents": row["passages"]}
        settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot}
        if probe := ask.processor.answer_probe:  # fitted on other questions
            settings["min_confidence"] = probe["threshold"]
        record = ask(question, return_slots=True, **settings)[0]
        times.append(first_token_seconds(ask, row, tokens_per_slot))
        table.add_row(*answer_cells(row, record, times[-1]))
        num_right += int(contains_match(record["generated_text"], row["answers"]))
    config = ask.model.config
    console.print(table)
    console.print(
        f"{num_right} of {len(rows)} answers contain a gold answer (green).\n"
        "Each slot passes once through each layer, and again where a gate adds a pass.\n"
        f"First token: median of {TIMED_RUNS} runs on {ask.device}, embeddings computed beforehand; kept: all before "
        f"the question was read for an earlier one. Slots are faster (green) in "
        f"{sum(each.slots < each.text for each in times)} newly read and "
        f"{sum(each.kept_slots < each.kept_text for each in times)} kept of {len(rows)} cases; "
        "short passages gain little.\n"
        f"Base model {config.base_model_name_or_path}, frozen; sentence encoder {config.encoder_name_or_path}.",
        style="dim",
        highlight=False,
    )
