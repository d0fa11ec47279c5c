"""`make demo`: questions answered from compressed passages, and what reading them costs.

The first ten questions of the SQuAD sample in `tests/data`, about its first twenty passages, as a search would find
several; the first of these about four passages that do not answer it; and the three case studies of the paper's
appendix, with their sentences as printed there, noise included. None was chosen by how it is answered. An aligner that
has a confidence reads the passage of several that most likely answers, and says how sure it is.

Each passage is read by itself, so that what is kept of it serves any combination. Slots and text are compared twice:
newly read, and with all passages known, each read before. Text is kept as slots are, which is more than a cache of what
a prompt begins with can do: of a new combination that has nothing.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..base_model_arcaligner import cache_of
from ..common.files import CASE_STUDIES, SQUAD_SAMPLE, printable, read_json_lines
from ..common.rows import contains_match
from ..generation_arcaligner import entry_shape, join_keys_values, keys_values_of, read_text
from ..pipeline_arcaligner import ArcAlignerPipeline, rank_passages
from ..prefix_store_arcaligner import SlotPrefixStore

NUM_QUESTIONS = 10
PASSAGES = (5, 10, 20)  # so many are timed; the questions are about the most of them
MAX_NEW_TOKENS = 32
# Runs of each way to read a question's passages, as long as they take no more seconds together.
TIMED_RUNS, TIMED_SECONDS = 5, 1.0

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
    """Median seconds to the first token of an answer, from slots and from text, newly read and known."""

    slots: float
    text: float
    known_slots: float
    known_text: float
    choosing: float | None = None  # which of several known passages is the likeliest to answer


class Questions(NamedTuple):
    """Questions that are shown together."""

    title: str
    rows: list[Row]


def demo_questions(no_answer: str | None = None) -> list[Questions]:
    """What is asked; with a `no_answer` also a question that its passages do not answer."""
    squad = list(islice(read_json_lines(SQUAD_SAMPLE), max(PASSAGES)))
    passages = [each for row in squad for each in row["passages"]]
    asked = [row | {"passages": passages} for row in squad[:NUM_QUESTIONS]]
    found = [Questions(f"{NUM_QUESTIONS} questions about {len(passages)} passages", asked)]
    if no_answer is not None:
        others = passages[NUM_QUESTIONS:][:4]
        refused = squad[0] | {"passages": others, "answers": [no_answer]}
        found.append(Questions(f"One that its {len(others)} passages do not answer", [refused]))
    return [*found, Questions("The paper's case studies, a passage each", list(read_json_lines(CASE_STUDIES)))]


class Readers:
    """Reads questions to the first token of the answer: from slots and from text, newly read and known. All run on the
    same base model, which reads each passage by itself; the question goes on behind the longest one."""

    def __init__(self, ask: ArcAlignerPipeline, tokens_per_slot: Rate):
        self.model, self.processor, self.rate = ask.model, ask.processor, tokens_per_slot
        self.new, self.known = (ask.model.slot_prefix_store(ask.processor, max_bytes=size) for size in (0, 2**40))
        self.head = self.processor.prompt_ids("?")[0]
        self.kept_head = read_text(self.model, self.head)
        self.chooses = ask.processor.answer_probe is not None
        self.kept_text: dict[str, torch.Tensor] = {}  # (num_layers, 2, heads, num_tokens, head_dim), by the text

    def keep(self, row: Row) -> None:
        """Reads the passages of a row, as slots and as text."""
        self.known.keep(row["question"], row["passages"], tokens_per_slot=self.rate)
        for text in {each["text"] for each in row["passages"]} - self.kept_text.keys():
            ids, start = self.processor.tokenize_prompt(text), len(self.head)
            outputs = self._read(ids, start, self._joined([self.kept_head]))
            self.kept_text[text] = keys_values_of(cache_of(outputs), 0, start, start + len(ids))

    def size(self, row: Row) -> dict[str, Any]:
        """Tokens and slots of all passages of a row, whether the answer was read from all or not."""
        (encoded,) = self.processor.slot_encoder.encode_batch([row["passages"]], tokens_per_slot=self.rate)
        return self.processor.slot_encoder.statistics(row["passages"], encoded, has_budget=False)

    def kept_bytes(self, row: Row, num_slots: int) -> tuple[int, int]:
        """Of the passages of a row, as slots and as text."""
        slots = math.prod(entry_shape(self.model.config.text_config, num_slots)) * self.model.dtype.itemsize
        return slots, sum(self.kept_text[each["text"]].nbytes for each in row["passages"])

    def seconds(self, row: Row) -> FirstTokens:
        """Medians of each way to read a row whose passages are kept."""
        slots, known_slots = (partial(self.slots, store, row) for store in (self.new, self.known))
        new = _median_seconds(slots, partial(self.text, row))
        known = _median_seconds(known_slots, partial(self.known_text, row))
        if not self.chooses or len(row["passages"]) == 1:
            return FirstTokens(*new, *known)
        choose = partial(rank_passages, self.known, [row["question"]], [row["passages"]], tokens_per_slot=self.rate)
        return FirstTokens(*new, *known, *_median_seconds(choose))

    def slots(self, store: SlotPrefixStore, row: Row) -> torch.Tensor:
        """Scores (vocab_size,) of the first token; `store` is `new` or `known`."""
        inputs = store.prepare(row["question"], documents=row["passages"], tokens_per_slot=self.rate)
        return store.read_question(inputs).logits[0, -1].cpu()  # waits for the device

    def text(self, row: Row) -> torch.Tensor:
        """The same from text that is newly read."""
        passages = self.processor.tokenize_prompt(" ".join(each["text"] for each in row["passages"]))
        ids = self.head + passages + self.processor.prompt_ids(row["question"])[1]
        return self._read(ids, 0, None).logits[0, -1].cpu()

    def known_text(self, row: Row) -> torch.Tensor:
        """The same from text that is known."""
        parts = [self.kept_text[each["text"]] for each in row["passages"]]
        start = len(self.head) + max(part.shape[3] for part in parts)
        ids, cache = self.processor.prompt_ids(row["question"])[1], self._joined([self.kept_head, *parts])
        return self._read(ids, start, cache).logits[0, -1].cpu()

    def _joined(self, parts: list[torch.Tensor]) -> Cache:
        return join_keys_values([parts], self.model.config.text_config)

    def _read(self, ids: list[int], start: int, cache: Cache | None) -> ModelOutput:
        """Reads ids from the position `start` on, behind what the cache holds."""
        device, end = self.model.device, start + len(ids)
        inputs = {"input_ids": torch.tensor([ids], device=device), "past_key_values": cache}
        positions = torch.arange(start, end, device=device)[None]
        return self.model(**inputs, position_ids=positions, use_cache=True, logits_to_keep=1)


def _median_seconds(*ways: Callable[[], Any]) -> list[float]:
    """Median seconds of each of the ways, which take turns."""
    found, began = [], time.perf_counter()
    while len(found) < TIMED_RUNS and (not found or time.perf_counter() - began < TIMED_SECONDS):
        times = [time.perf_counter()]
        for way in ways:
            way()
            times.append(time.perf_counter())
        found.append([end - start for start, end in zip(times, times[1:], strict=False)])
    return [statistics.median(each) for each in zip(*found, strict=True)]


def answer_cells(row: Row, record: dict[str, Any], has_gates: bool = False) -> list[str]:
    """A row of a table of answers, in rich markup."""
    answer = escape(printable(record["generated_text"].strip()))
    is_right = contains_match(record["generated_text"], row["answers"])
    gold = "" if is_right else f"\n[dim]gold: {escape(printable(row['answers'][0]))}[/]"
    passes = f"\n[dim]{describe_passes(record['trajectories'])}[/]" if has_gates else ""
    sure = record["statistics"].get("confidence")
    return [
        escape(printable(row["question"])) + passes,
        f"[{'green' if is_right else 'yellow'}]{answer}[/]{gold}",
        "" if sure is None else f"{sure:.2f}",
    ]


def speed_cells(number: int, size: dict[str, Any], seconds: FirstTokens, kept_bytes: tuple[int, int]) -> list[str]:
    """A row of the table of speed, in rich markup, about `number` passages; the others are of [`Readers`]."""

    def pair(slots: float, text: float, shown: str) -> str:
        """Both, that of slots green where it is less."""
        mine = format(slots, shown)
        return f"{f'[green]{mine}[/]' if slots < text else mine} / {text:{shown}}"

    return [
        str(number),
        f"{size['slots']:,} / {size['tokens']:,}",
        pair(1000 * seconds.slots, 1000 * seconds.text, ",.0f"),
        pair(1000 * seconds.known_slots, 1000 * seconds.known_text, ",.0f"),
        "-" if seconds.choosing is None else f"{1000 * seconds.choosing:,.0f}",
        pair(kept_bytes[0] / 1e6, kept_bytes[1] / 1e6, ",.1f"),
    ]


@torch.inference_mode()
def run_demo(ask: ArcAlignerPipeline, console: Console, tokens_per_slot: Rate = None) -> None:
    """Answers the questions and prints the tables. From here on, `ask` reads each passage by itself."""
    config, trained = ask.model.config, ask.model.config.passage_attention
    config.passage_attention = ask.processor.passage_attention = "separate"
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "tokens_per_slot": tokens_per_slot, "return_slots": True}
    if probe := ask.processor.answer_probe:  # fitted on other questions
        settings |= {"min_confidence": probe["threshold"]}
    asked = demo_questions(probe and ask.processor.no_answer)
    progress = partial(track, console=Console(stderr=True), transient=True)
    num_right, num_rows = 0, sum(len(each.rows) for each in asked)
    for title, rows in asked:
        columns = Column("Question", ratio=6), Column("Answer", ratio=5), Column("Confidence", justify="right")
        table = Table(*columns, box=box.SIMPLE_HEAD, expand=True, title=title, title_justify="left")
        for row in progress(rows, "Answering"):
            record = ask({"question": row["question"], "documents": row["passages"]}, **settings)[0]
            table.add_row(*answer_cells(row, record, config.gate_mode != "off"))
            num_right += int(contains_match(record["generated_text"], row["answers"]))
        console.print(table)
    titles = "Passages", "Tokens", "First token, ms", "Known, ms", "Choosing one, ms", "Kept, MB"
    table = Table(*titles, box=box.SIMPLE_HEAD, title="Of all these passages, slots / text", title_justify="left")
    readers, row = Readers(ask, tokens_per_slot), asked[0].rows[0]
    for number in progress(PASSAGES, "Timing"):
        some = row | {"passages": row["passages"][:number]}
        readers.keep(some)
        if not table.rows:
            readers.seconds(some)  # warms up
        size = readers.size(some)
        table.add_row(*speed_cells(number, size, readers.seconds(some), readers.kept_bytes(some, size["slots"])))
    console.print(table)
    chosen = "Each question is asked about each passage, and the likeliest one answers. " * readers.chooses
    apart = " This aligner was trained to read those of a question jointly." if trained == "joint" else ""
    console.print(
        f"{num_right} of {num_rows} answers contain a gold answer (green). {chosen}Each passage is read by itself."
        f"{apart}\n"
        f"First token: median of up to {TIMED_RUNS} runs on {ask.device}, from the words on. Known: each passage was "
        "read before, and what was read of it, slots or text, is kept and joined; a cache of what a prompt begins with "
        "would have nothing of a new combination.\n"
        f"Base model {config.base_model_name_or_path}, frozen; sentence encoder {config.encoder_name_or_path}.",
        style="dim",
        highlight=False,
    )
