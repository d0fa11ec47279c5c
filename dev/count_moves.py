"""Count how often somebody who follows the code of a question, a forward, a request or a training batch changes files.

    python dev/count_moves.py                       # a table with a row for each of these ways through the code
    python dev/count_moves.py "a question" --pairs  # also the number of moves between each two files
    python dev/count_moves.py "a question" --walk   # also each move, with the function that is entered

A move is a call into a file of the project, or a return to it, from another file of the project. Calls within a file
and calls of libraries are not counted. Repetitions are folded: a loop over layers, passages or tokens counts once, as
long as its iterations do the same. Moves are counted in each thread, and added. What is loaded on first use is loaded
before counting, by a question about other passages. In the names of the ways, "first" is the first question with
several
passages (from then on the model's weights are watched), and "again" is a question about the same passages.

All ways use a checkpoint on the CPU, by default the shipped one, whose gates are off. With gates, this takes a second:

    ARCALIGNER_MODELS=tests/golden/saved/models python dev/count_moves.py --checkpoint tests/golden/saved/separate
"""

import argparse
import contextlib
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
QUESTION = "Who wrote the letter?"
PASSAGES = ["Ada wrote the letter in 1843. It was long.", "The loom wove cloth. It was loud."]
OTHERS = ["A pen is new. It is blue.", "The river is long."]
NEW_TOKENS = 4

# The first project function that runs after the scores of the first token are known.
AFTER_FIRST_SCORES = "_update_model_kwargs_for_generation"


class Recorder:
    """Records each function of the project that is entered or returned to, as (file, function), for each thread."""

    def __init__(self, until: str | None = None):
        self.walks: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self.until, self.is_on = until, False
        self._names: dict[str, str | None] = {}

    def _file(self, code) -> str | None:
        path = code.co_filename
        if path not in self._names:
            inside = Path(path).is_relative_to(ROOT) and Path(path) != Path(__file__).resolve()
            self._names[path] = Path(path).relative_to(ROOT).as_posix() if inside else None
        return self._names[path]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.is_on or event not in ("call", "return") or self._file(frame.f_code) is None:
            return
        if frame.f_code.co_name == self.until:
            self.is_on = False
            return
        place: FrameType | None = frame
        if event == "return":  # to the next function of the project, through those of libraries
            place = frame.f_back
            while place is not None and self._file(place.f_code) is None:
                place = place.f_back
        if place is not None:
            self.walks[threading.get_ident()].append((self._file(place.f_code), place.f_code.co_name))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.is_on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_on = False


def changes(files: list[str]) -> list[str]:
    """A walk without steps within a file.

    >>> changes(["a", "a", "b", "b", "a"])
    ['a', 'b', 'a']
    """
    return [file for number, file in enumerate(files) if not number or file != files[number - 1]]


def folded(walk: list[str]) -> list[str]:
    """A walk in which repeated parts occur once, the shortest repetitions first.

    >>> folded(["a", "b", "c", "b", "c", "b", "a"])
    ['a', 'b', 'c', 'b', 'a']
    """
    while True:
        before, period = len(walk), 1
        while 2 * period <= len(walk):
            folded_walk = walk[:period]
            place = period
            while place < len(walk):
                if walk[place : place + period] == folded_walk[-period:] and place + period <= len(walk):
                    place += period
                else:
                    folded_walk.append(walk[place])
                    place += 1
            walk, period = folded_walk, period + 1
        if len(walk) == before:
            return walk


# The ways through the code


def pipeline_of(checkpoint: Path):
    from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor

    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    processor.encoder.device = "cpu"
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")


def count_question(checkpoint: Path, num_passages: int, before: Sequence[Sequence[str]]) -> Recorder:
    """From the call of the pipeline to the scores of the first token, after questions about the passages `before`."""
    ask, recorder = pipeline_of(checkpoint), Recorder(AFTER_FIRST_SCORES)
    row = {"question": QUESTION, "documents": PASSAGES[:num_passages]}
    for documents in before:
        ask(row | {"documents": documents}, max_new_tokens=NEW_TOKENS)
    with recorder.recording():
        ask(row, max_new_tokens=NEW_TOKENS)
    return recorder


def count_answer(checkpoint: Path) -> Recorder:
    """From the call of the pipeline with one passage to the end of the answer."""
    ask, recorder = pipeline_of(checkpoint), Recorder()
    row = {"question": QUESTION, "documents": PASSAGES[:1]}
    ask(row | {"documents": OTHERS[:1]}, max_new_tokens=NEW_TOKENS)
    with recorder.recording():
        ask(row, max_new_tokens=NEW_TOKENS)
    return recorder


def count_forward(checkpoint: Path) -> Recorder:
    """One call of `model` with the inputs that the processor returns."""
    ask, recorder = pipeline_of(checkpoint), Recorder()
    chat = [{"role": "user", "content": QUESTION}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = ask.processor.apply_chat_template(chat, documents=PASSAGES[:1], **options)
    with torch.no_grad():
        ask.model(**inputs)
        with recorder.recording():
            ask.model(**inputs)
    return recorder


def count_request(checkpoint: Path, num_passages: int) -> Recorder:
    """From `Engine.submit` to the answer, in all threads of the engine."""
    from arcaligner.apps.server.engine import Engine
    from arcaligner.apps.server.request import Request

    ask, recorder = pipeline_of(checkpoint), Recorder()
    chat = [{"role": "user", "content": QUESTION}]
    threading.setprofile(recorder)  # for the threads that the engine starts
    try:
        engine = Engine(ask)
    finally:
        threading.setprofile(None)
    engine.warm_up()
    engine.submit(Request(chat, PASSAGES[:num_passages], max_new_tokens=NEW_TOKENS)).result()
    with recorder.recording():
        engine.submit(Request(chat, PASSAGES[:num_passages], max_new_tokens=NEW_TOKENS)).result()
    engine.close()
    return recorder


def count_training(checkpoint: Path) -> Recorder:
    """From examples to the loss of a batch: the collator and `compute_loss`."""
    from datasets import Dataset

    from arcaligner.train.examples import EXAMPLE_FEATURES, ExampleBuilder
    from arcaligner.train.sft import AlignerTrainer, AlignerTrainingConfig, ContextCollator

    ask, recorder = pipeline_of(checkpoint), Recorder()
    rows = [
        {"id": str(number), "question": QUESTION, "answers": ["Ada"], "passages": [{"title": "", "text": text}]}
        for number, text in enumerate(PASSAGES)
    ]
    builder = ExampleBuilder(ask.processor)
    examples = [example for row in rows for example in builder.question_examples([row])]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
        trainer = AlignerTrainer(
            ask.model,
            stage="grounding",
            args=AlignerTrainingConfig(folder, **settings),
            data_collator=ContextCollator(
                ask.processor.context_token_id,
                ask.processor.tokenizer.pad_token_id,
                ask.processor.encoder.text_tokenizer,
                [2],
                context_words=ask.processor.context_words,
            ),
            train_dataset=Dataset.from_list(examples, features=EXAMPLE_FEATURES),
            processing_class=ask.processor,
        )
        examples = list(trainer.train_dataset)
        trainer.model.train()
        trainer.compute_loss(trainer.model, trainer.data_collator(examples))
        with recorder.recording():
            trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    return recorder


WAYS: dict[str, Callable[[Path], Recorder]] = {
    "a question": lambda checkpoint: count_question(checkpoint, 1, [OTHERS[:1]]),
    "a question, again": lambda checkpoint: count_question(checkpoint, 1, [PASSAGES[:1]]),
    "a question, to the end of its answer": count_answer,
    "two passages, first": lambda checkpoint: count_question(checkpoint, 2, [OTHERS[:1]]),
    "two passages": lambda checkpoint: count_question(checkpoint, 2, [OTHERS]),
    "two passages, again": lambda checkpoint: count_question(checkpoint, 2, [OTHERS, PASSAGES]),
    "a forward": count_forward,
    "a request": lambda checkpoint: count_request(checkpoint, 1),
    "a request, two passages": lambda checkpoint: count_request(checkpoint, 2),
    "a training batch": count_training,
}


def print_counts(name: str, recorder: Recorder, with_pairs: bool, with_walk: bool) -> None:
    walks = [folded(changes([file for file, _ in walk])) for walk in recorder.walks.values()]
    raw = sum(len(changes([file for file, _ in walk])) - 1 for walk in recorder.walks.values())
    files = {file for walk in walks for file in walk}
    print(f"{name:40} {len(files):3} files {sum(len(walk) - 1 for walk in walks):5} moves {raw:6} unfolded", flush=True)
    if with_pairs:
        pairs = Counter(tuple(sorted(pair)) for walk in walks for pair in zip(walk, walk[1:], strict=False))
        for (one, other), count in pairs.most_common():
            print(f"    {count:4}  {one} <-> {other}")
    for walk in recorder.walks.values() if with_walk else ():
        print("    a thread")
        last = None
        for file, function in walk:
            if file != last:
                print(f"      {file}:{function}")
            last = file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", help=f"What to follow, in quotes. Default: {', '.join(map(repr, WAYS))}.")
    parser.add_argument("--pairs", action="store_true", help="Also print, for each pair of files, the number of moves.")
    parser.add_argument("--walk", action="store_true", help="Also print each move; repetitions are not folded.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="Folder of the checkpoint to run.")
    args = parser.parse_args()
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways: {', '.join(map(repr, sorted(unknown)))}; expected some of {', '.join(WAYS)}")
    logging.disable_progress_bar()
    for name in args.ways or WAYS:
        print_counts(name, WAYS[name](args.checkpoint), args.pairs, args.walk)


if __name__ == "__main__":
    main()
