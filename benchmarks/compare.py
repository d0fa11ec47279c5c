"""Compare answers to your own questions, from the text of your passages and from slots.

    arcaligner compare --questions mine.jsonl --documents folder --output comparison

A line of the questions is `{"question": str, "answers"?: [str], "passages"?: [{"title", "text"}]}`. A question without
passages gets those that a search of the documents finds, as in `arcaligner ask`. As text, all of them are used. As
slots, only the top-ranked ones are used, as in `ask`: one, or the two that a multi-hop question needs, if the aligner
can score passages. Answers are generated greedily. The first token is timed while a question's passages are new. The
ways to answer (*readers*) take turns, and medians over the questions are reported.

F1 and non-strict EM are averages over the questions with answers. Agreement is the F1 of an answer compared with the
answer of the first row, which uses the text. It shows how often slots change an answer, not which answer is right.
"""

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..answering_arcaligner import MAX_NEW_TOKENS, Answerer, clear_text_caches
from ..common.files import counted, describe_machine, markdown_table, read_numbered_lines, tracked, write_atomically
from ..common.rows import Row, contains_match, normalized_row, token_f1, usable_golds
from ..evaluation.analyses.speed import machine_line
from ..evaluation.answering import answer_text, load_aligner, load_text_lora
from ..evaluation.methods import compression_title, whole_text
from ..evaluation.tasks import with_passages
from ..pipeline_arcaligner import ArcAlignerPipeline

logger = logging.getLogger(__name__)

COLUMNS = ("input", "positions", "F1, %", "EM, %", "agreement, %", "first token")
REMARKS = (
    "Positions: how many positions of the prompt the passages take, on average per question. First token: median time "
    "to the first token and, in brackets, the median speedup compared with text; for slots, the time includes "
    "selecting, segmenting and encoding new passages. Agreement: F1 of an answer compared with the answer of the first "
    "row. Agreement is low if the base model was not fine-tuned and answers in sentences."
)


# Questions and their passages


def read_questions(path: Path) -> list[Row]:
    """The questions of a JSON Lines file, gzipped or not."""
    rows = [normalized_row(row, line - 1, where=f"{path}, line {line}") for line, row in read_numbered_lines(path)]
    questions = [row for row in rows if row["question"].strip()]
    if not questions:
        raise ValueError(
            f"{path} contains no questions; expected lines such as "
            f'{{"question": "Who wrote it?", "answers": ["Ada"]}}, '
            "where `answers` is optional. Add questions, or pass another file with `--questions`."
        )
    return questions


def add_passages(rows: list[Row], sources: list[str], processor, top_k: int) -> list[Row]:
    """Rows with the passages to use: those of the row or, if it has none, the `top_k` that a search of the sources
    finds."""
    without_passages = [row for row in rows if not any(passage["text"].strip() for passage in row["passages"])]
    if not without_passages:
        if sources:
            logger.warning("`--documents` has no effect, because each question has its own `passages`.")
        return rows
    if not sources:
        raise ValueError(
            f"The question {without_passages[0]['question'][:80]!r} has no `passages`, and no documents were passed. "
            "Pass files or a folder with `--documents`, or add `passages` to each question (missing in "
            f"{len(without_passages)} of {len(rows)})."
        )
    from ..apps.corpus.build import build_corpus  # of the extra `corpus`
    from ..apps.corpus.retrieve import Retriever
    from ..apps.corpus.table import Corpus

    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.create(Path(folder, "corpus"), processor, tokens_per_slot="segment")
        build_corpus(sources, corpus, processor)
        search = Retriever(corpus, processor)
        for row in tracked(without_passages, "Retrieving passages"):
            row |= with_passages(row, search(row["question"], top_k=top_k).documents)
    return rows


# Readers


class TimedAnswer(NamedTuple):
    """An answer, the positions that represent the passages, and seconds to the first token."""

    answer: str
    positions: int
    seconds: float


@dataclass
class Reader:
    """A way to answer: from the text of passages, or from their slots."""

    title: str
    tokens_per_slot: int | str | None  # tokens of text per slot; `None` means text
    model: Any  # with text as input, an aligner acts as its bare base model
    max_passages: int | None = None  # maximum number of passages as slots, the top-ranked ones

    def ask(self, processor, row: Row) -> TimedAnswer:
        """Time the first token of an answer to a row with new passages, then generate the whole answer."""
        if self.tokens_per_slot is None:
            answer = partial(answer_text, whole_text, self.model, processor, [row])
        else:  # a new pipeline, whose cache of passages is empty
            ask = ArcAlignerPipeline(self.model, processor, task="text-generation", device=self.model.device)
            question = {"question": row["question"], "documents": row["passages"]}
            settings = {
                "tokens_per_slot": self.tokens_per_slot,
                "max_passages": self.max_passages,
                "return_slots": True,
            }
            answer = partial(ask, question, **settings)
        clear_text_caches()  # readers share them
        begin = time.perf_counter()
        answer(max_new_tokens=1)
        seconds = time.perf_counter() - begin
        (result,) = answer(max_new_tokens=MAX_NEW_TOKENS)
        if self.tokens_per_slot is None:
            return TimedAnswer(result.text, result.context_tokens, seconds)
        return TimedAnswer(result["generated_text"].strip(), result["statistics"]["slots"], seconds)


@torch.inference_mode()
def compare(rows: list[Row], readers: list[Reader], processor) -> dict[str, list[TimedAnswer]]:
    """Answers of all readers to all rows, by title."""
    readers[0].ask(processor, rows[0]), readers[-1].ask(processor, rows[0])  # warm up text and slots
    answers: dict[str, list[TimedAnswer]] = {reader.title: [] for reader in readers}
    for number, row in enumerate(tracked(rows, "Answering questions")):
        first = number % len(readers)
        for reader in readers[first:] + readers[:first]:
            answers[reader.title].append(reader.ask(processor, row))
    return answers


def cells_of(title: str, answers: list[TimedAnswer], text: list[TimedAnswer], rows: list[Row]) -> list[str]:
    """The table row of a reader. Agreement is the F1 of its `answers` compared with those from `text`."""
    known = [
        (answer.answer, row["answers"])
        for answer, row in zip(answers, rows, strict=True)
        if usable_golds(row["answers"])
    ]
    pairs = ((one.answer, other.answer) for one, other in zip(answers, text, strict=True))
    agreement = [token_f1(one, [other]) if usable_golds([other]) else float(one == other) for one, other in pairs]

    speed_ups = [one.seconds / other.seconds for one, other in zip(text, answers, strict=True)]

    def percent(scores: Iterable[float]) -> str:
        scores = list(scores)
        return f"{100 * statistics.mean(scores):.1f}" if scores else "-"

    return [
        title,
        f"{statistics.mean(answer.positions for answer in answers):.0f}",
        percent(token_f1(*pair) for pair in known),
        percent(contains_match(*pair) for pair in known),
        percent(agreement),
        f"{1000 * statistics.median(answer.seconds for answer in answers):.0f} ms"
        + ("" if answers is text else f" (x{statistics.median(speed_ups):.1f})"),
    ]


# The command


def run_compare(
    questions: Path,
    sources: list[str],
    output: Path,
    checkpoint: str,
    *,
    compressions: list[int | str] | None = None,
    full_text_lora: str | None = None,
    top_k: int = 5,
    max_passages: int | None = None,
    num_questions: int | None = None,
    device: str = "cpu",
) -> list[str]:
    """Compare, write `comparison.md` and `answers.jsonl` to the folder `output`, and return the table and its
    remarks."""
    rows = read_questions(questions)[:num_questions]
    aligner, processor = load_aligner(checkpoint, device)
    processor.encoder.device = device
    answerer = Answerer(aligner, processor)
    compressions = list(dict.fromkeys(compressions or processor.trained_tokens_per_slot or [processor.tokens_per_slot]))
    for tokens_per_slot in compressions:
        processor.slot_encoder.check_settings(tokens_per_slot=tokens_per_slot)
    rows = add_passages(rows, sources, processor, top_k)
    readers = [Reader("text, by the base model", None, aligner)]
    if full_text_lora is not None:
        tuned, _ = load_text_lora(checkpoint, full_text_lora, device)
        readers.append(Reader("text, by the fine-tuned base model", None, tuned))
    readers += [
        Reader(f"slots, {compression_title(tokens_per_slot)}", tokens_per_slot, aligner, max_passages)
        for tokens_per_slot in compressions
    ]
    answers_of = compare(rows, readers, processor)
    cells = [cells_of(title, answers, answers_of[readers[0].title], rows) for title, answers in answers_of.items()]
    known = sum(bool(usable_golds(row["answers"])) for row in rows)
    about = f"{counted(len(rows), 'question')}, {known} with answers. {machine_line(describe_machine(device))}. "
    about += f"Base model {aligner.config.base_model_name_or_path}."
    remarks = [REMARKS]
    if any(answerer.selects(len(row["passages"]), max_passages, weights=False) for row in rows):
        used = "as many passages as the question needs" if max_passages is None else f"at most {max_passages}"
        remarks += [f"Only the slots of the top-ranked passages are used ({used}); the time includes the scoring."]
    if max_passages is not None and max_passages > 1 and answerer.can_weight:
        remarks.append("Several passages are weighted by their scores; the time includes the scoring.")
    lines = [*markdown_table(COLUMNS, cells), "", " ".join(remarks), "", about]
    write_atomically(output / "comparison.md", "\n".join(["# Text and slots", "", *lines, ""]))
    answers = [
        {"question": row["question"], "answers": row["answers"]}
        | {title: answers[number].answer for title, answers in answers_of.items()}
        for number, row in enumerate(rows)
    ]
    write_atomically(output / "answers.jsonl", "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in answers))
    return lines
