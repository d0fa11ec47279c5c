"""vLLM with slots, vLLM with the same passages as text, and the engine of this project, on the same cores.

    python -m arcaligner.benchmarks.vllm --output FOLDER [--sizes 5,20] [--clients 1,8,32] [--batches 5:12,20:6]
        [--arms slots,pytorch]

    slots      vLLM with the slots of precomputed passages; requests go directly to vLLM
    front      the same behind the project's server engine, which finds the files and computes the answerability
    text       vLLM with the passages' text and prefix caching, which helps if prompts begin with the same text
    pytorch    the engine of this project, with the slots of precomputed passages

Each question has a different combination of precomputed passages, among them the one that answers it. All arms answer
the same questions, in turns. Measured are the seconds to the first token, the answers per second, and the seconds of
processor time for an answer, which are more reliable on a shared machine. Set OMP_NUM_THREADS=1, because waiting
threads count as well. Copy-biased decoding is off and all passages are used, so that `slots`, `front` and `pytorch`
give the same answers.

First, batches of questions are measured that arrive together and get one token each: the seconds until all of them have
it. For these batches, not even the beginning of a prompt of text is in vLLM's prefix cache.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import torch
import typer

from ..answering_arcaligner import maxsim_score
from ..apps.server.engine import Engine
from ..apps.server.request import Limits, Request
from ..apps.server.vllm_engine import VllmEngine, VllmProcess, find_vllm, slots_request
from ..common.files import (
    DEFAULT_CHECKPOINT,
    SQUAD_SAMPLE,
    describe_machine,
    markdown_table,
    run_command,
    temporary_folder,
    write_atomically,
)
from ..common.rows import Row, read_rows
from ..kv_cache_arcaligner import ALONE, entry_shape
from ..loading_arcaligner import resolve_model
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..pipeline_arcaligner import ArcAlignerPipeline
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.prompts import text_ids
from .latency import parse_sizes

ARMS = ("slots", "front", "text", "pytorch")
NEW_TOKENS = 16
LIMITS = Limits(max_slots=8192, seconds=3600.0)


class Arms:
    """The four arms. Each takes questions with their passages, a number of clients and the maximum length of an answer.
    It returns, for each question, the seconds to the first token and the answer."""

    def __init__(
        self,
        checkpoint: str,
        python: str,
        folder: Path,
        tokens_per_slot: int | str,
        options: list[str],
        dtype: str,
        names: list[str],
    ):
        model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        self.processor = ArcAlignerProcessor.from_pretrained(checkpoint)
        self.model, self.tokens_per_slot = model, tokens_per_slot
        ask = ArcAlignerPipeline(model=model, processor=self.processor, task="text-generation")
        settings = {"max_passages": 100, "tokens_per_slot": tokens_per_slot, "limits": LIMITS, "prefix_bytes": 2**32}
        self.engine = Engine(ask, folder=folder, **settings)
        self.engine.weights_passages = False  # so that all arms do the same work: vLLM cannot weight passages
        base_model = resolve_model(model.config.base_model_name_or_path)
        self.vllm = VllmProcess(python, base_model, folder, ["--dtype", dtype, *options])
        self.front = VllmEngine(ask, vllm=self.vllm, folder=folder, **settings)
        self.front.warm_up()
        self.end_ids = torch.as_tensor(model.generation_config.eos_token_id).reshape(-1).tolist()
        arms: dict[str, Callable] = {
            "slots": lambda rows, *args: self._ask_vllm([self.slots_body(row) for row in rows], *args),
            "front": lambda rows, *args: self._ask_engine(self.front, rows, *args),
            "text": lambda rows, *args: self._ask_vllm([self.text_body(row) for row in rows], *args),
            "pytorch": lambda rows, *args: self._ask_engine(self.engine, rows, *args),
        }
        self.by_name = {name: arms[name] for name in names}

    def processor_seconds(self, name: str) -> float:
        """Seconds of processor time so far of the processes of an arm: vLLM's, or this one, or both."""
        seconds = time.process_time() if name in ("front", "pytorch") else 0.0
        if name == "pytorch":
            return seconds
        root = psutil.Process(self.vllm.process.pid)
        return seconds + sum(sum(process.cpu_times()[:2]) for process in [root, *root.children(recursive=True)])

    def close(self) -> None:
        self.engine.close()
        self.front.close()

    def slots_body(self, row: Row) -> dict[str, Any]:
        question = (
            row["question"] if self.processor.chat_template is None else [{"role": "user", "content": row["question"]}]
        )
        (files,) = self.front.store.prefix_files(question, row["passages"], tokens_per_slot=self.tokens_per_slot)
        return slots_request(files)

    def precompute(self, row: Row) -> None:
        """Cache what each arm may have precomputed for passages of a corpus: their slots, their keys and values, and
        the words that answerability compares. No request is sent, so that vLLM has no prefix of them."""
        self.slots_body(row)
        for engine in (self.front, self.engine):
            # An engine looks passages up by their slots, not by their text.
            engine._set_passages(ALONE, [request := self.request(row)])
            engine.store.prefix_files(engine._chat(request), **request.passages.inputs)
        maxsim_score(self.processor, row["question"], row["passages"])

    def request(self, row: Row, new_tokens: int = NEW_TOKENS) -> Request:
        """A request with a question, at the tokens per slot that all arms use."""
        chat = [{"role": "user", "content": row["question"]}]
        settings = {"tokens_per_slot": self.tokens_per_slot, "max_passages": 100, "copy_bonus": 0.0}
        return Request(chat, row["passages"], max_new_tokens=new_tokens, **settings)

    def text_body(self, row: Row) -> dict[str, Any]:
        before, after = text_ids(self.processor, row)
        salt = {"cache_salt": row["salt"]} if "salt" in row else {}
        return {"prompt": before + after} | salt

    def _ask_vllm(
        self, bodies: list[dict[str, Any]], clients: int, new_tokens: int = NEW_TOKENS
    ) -> list[tuple[float, str]]:
        async def ask_all() -> list[tuple[float, str]]:
            answers, waiting = [(0.0, "")] * len(bodies), list(enumerate(bodies))[::-1]

            async def one(client: httpx.AsyncClient) -> None:
                while waiting:
                    number, body = waiting.pop()
                    body = body | {"model": self.front.model_name, "max_tokens": new_tokens, "temperature": 0}
                    body |= {"stream": True, "stop_token_ids": self.end_ids}
                    began, first, text = time.perf_counter(), 0.0, ""
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        if response.status_code != 200:
                            reply = (await response.aread()).decode()[:300]
                            raise OSError(
                                f"vLLM answered with status {response.status_code}; expected 200. Its reply: {reply}"
                            )
                        async for line in response.aiter_lines():
                            if line.startswith("data: {"):
                                first = first or time.perf_counter() - began
                                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                    answers[number] = first, text.strip()

            async with httpx.AsyncClient(base_url=self.vllm.url, timeout=None) as client:
                await asyncio.gather(*(one(client) for _ in range(clients)))
            return answers

        return asyncio.run(ask_all())

    def _ask_engine(
        self, engine: Engine, rows: list[Row], clients: int, new_tokens: int = NEW_TOKENS
    ) -> list[tuple[float, str]]:
        """Answers to `rows` by an engine. Each client sends its next question when it has the answer to the last."""

        async def ask_all() -> list[tuple[float, str]]:
            answers, waiting = [(0.0, "")] * len(rows), list(enumerate(rows))[::-1]

            async def one() -> None:
                while waiting:
                    number, row = waiting.pop()
                    answer = await asyncio.wrap_future(engine.submit(self.request(row, new_tokens)))
                    answers[number] = answer.seconds["first_token"], answer.text.strip()

            await asyncio.gather(*(one() for _ in range(clients)))
            return answers

        return asyncio.run(ask_all())


def draw(rows: list[Row], size: int, number: int) -> Row:
    """Draw a question with `size` passages, among them the one that answers it. The same `number` gives the same
    question in each run."""
    draws = random.Random(number)
    row = rows[number % len(rows)]
    others = draws.sample([other["passages"][0] for other in rows if other is not row], size - 1)
    passages = [row["passages"][0], *others]
    draws.shuffle(passages)
    return row | {"passages": passages}


def measure(
    arms: Arms, rows: list[Row], size: int, clients: int, requests: int, rounds: int, first: int
) -> dict[str, Any]:
    """Answers per second, processor time and median seconds to the first token of all arms, which answer the same
    questions in turns."""
    measured: dict[str, dict[str, list]] = {
        name: {"seconds": [], "used": [], "first": [], "answers": []} for name in arms.by_name
    }
    for turn in range(rounds):
        questions = [draw(rows, size, first + turn * requests + number) for number in range(requests)]
        for row in questions:
            arms.precompute(row)
        for name, arm in arms.by_name.items():
            used, began = arms.processor_seconds(name), time.perf_counter()
            answers = arm(questions, clients)
            measured[name]["seconds"].append(time.perf_counter() - began)
            measured[name]["used"].append(arms.processor_seconds(name) - used)
            measured[name]["first"] += [seconds for seconds, _ in answers]
            measured[name]["answers"] += [text for _, text in answers]
    engine_answers = measured["pytorch"]["answers"] if "pytorch" in measured else None
    report = {
        name: {
            "answers_per_second": requests * rounds / sum(values["seconds"]),
            "processor_seconds": sum(values["used"]) / (requests * rounds),
            "first_token": float(np.median(values["first"])),
            "same_as_pytorch": None
            if engine_answers is None
            else float(np.mean(np.array(values["answers"]) == np.array(engine_answers))),
        }
        for name, values in measured.items()
    }
    return {"passages": size, "clients": clients, "requests": requests * rounds, "arms": report}


def measure_first_tokens(
    arms: Arms, rows: list[Row], size: int, questions: int, rounds: int, first: int
) -> dict[str, Any]:
    """For each arm, in turns: the seconds until all questions of a batch have their first token, and the seconds of
    processor time. Both are medians of the rounds. No prompt of text has a prefix in vLLM's cache, because its salt is
    new."""
    first_tokens: dict[str, list[float]] = {name: [] for name in arms.by_name}
    used: dict[str, list[float]] = {name: [] for name in arms.by_name}
    for turn in range(rounds):
        numbers = range(first + turn * questions, first + (turn + 1) * questions)
        batch = [draw(rows, size, number) | {"salt": f"{size} {number}"} for number in numbers]
        for row in batch:
            arms.precompute(row)
        for name, arm in arms.by_name.items():
            before = arms.processor_seconds(name)
            first_tokens[name].append(max(seconds for seconds, _ in arm(batch, questions, 1)))
            used[name].append(arms.processor_seconds(name) - before)
    report = {
        name: {"first_tokens": float(np.median(first_tokens[name])), "processor_seconds": float(np.median(used[name]))}
        for name in first_tokens
    }
    return {"passages": size, "questions": questions, "rounds": rounds, "arms": report}


def parse_arms(names: str) -> list[str]:
    """Parse the names of arms.

    >>> parse_arms("slots, pytorch")
    ['slots', 'pytorch']
    """
    arms = [arm.strip() for arm in names.split(",")]
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(
            f"`--arms` has {unknown[0]!r}; expected one or more of {', '.join(ARMS)}, separated by commas."
        )
    return arms


def parse_batches(batches: str) -> list[tuple[int, int]]:
    """Parse batches: numbers of passages and questions.

    >>> parse_batches("5:12,20:6")
    [(5, 12), (20, 6)]
    """
    pairs = [re.fullmatch(r"([1-9]\d*):([1-9]\d*)", batch.strip()) for batch in batches.split(",") if batch.strip()]
    if None in pairs:
        raise ValueError(
            f"`--batches` is {batches!r}; expected pairs PASSAGES:QUESTIONS of numbers of at least 1, separated by "
            "commas, such as 5:12,20:6."
        )
    return [(int(pair[1]), int(pair[2])) for pair in pairs]


def main(
    output: Annotated[Path, typer.Option(help="Folder for the report.")],
    checkpoint: Annotated[str, typer.Option(help="An aligner with independent passages: a folder or a Hub id.")] = str(
        DEFAULT_CHECKPOINT
    ),
    sizes: Annotated[str, typer.Option(help="Numbers of passages per question, separated by commas.")] = "5,20",
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,8,32",
    batches: Annotated[
        str,
        typer.Option(
            help="Batches to time, as PASSAGES:QUESTIONS, the number of passages of a question and the number of "
            "questions, separated by commas. The questions of a batch arrive together, and one token is generated for "
            "each."
        ),
    ] = "5:12,20:6",
    names: Annotated[
        str,
        typer.Option(
            "--arms",
            help="What to measure, separated by commas. slots: vLLM with slots, called directly; front: the "
            "same, called through this project's server; text: vLLM with text; pytorch: slots in this project's own "
            "engine, without vLLM.",
        ),
    ] = ",".join(ARMS),
    tokens_per_slot: Annotated[int, typer.Option(help="Tokens of text per slot.")] = 4,
    rounds: Annotated[
        int,
        typer.Option(
            help="Number of rounds of each measurement. A round has as many questions as clients, but at least 4."
        ),
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="Precision of the models, in vLLM and in this project's engine: float32 or bfloat16.")
    ] = "float32",
    vllm_options: Annotated[str, typer.Option(help="Options of vLLM's server, as one string.")] = "--enforce-eager",
    data: Annotated[Path, typer.Option(help="JSON Lines file of questions with passages.")] = SQUAD_SAMPLE,
) -> None:
    """Compare the speed of vLLM with slots, vLLM with text, and the engine of this project with slots. The engines take
    turns to answer the same questions."""
    if (python := find_vllm()) is None:
        raise ImportError(
            "vLLM is not installed. Run `make vllm` in the repository, or set the environment variable ARCALIGNER_VLLM "
            "to the path of a Python interpreter that has vLLM."
        )
    arm_names, batch_sizes = parse_arms(names), parse_batches(batches)
    numbers_of_passages, numbers_of_clients = parse_sizes(sizes), parse_sizes(clients, "--clients")
    rows, measured, first_tokens, number = list(read_rows(data)), [], [], 0
    output.mkdir(parents=True, exist_ok=True)
    columns = ["Passages", "Clients", "Measured", "First token, s", "Answers/s", "Processor time per answer, s"]
    columns += ["Same answers as `pytorch`"]
    with temporary_folder(output, ".passages-") as folder:
        arms = Arms(checkpoint, python, folder, tokens_per_slot, vllm_options.split(), dtype, arm_names)
        try:
            for arm in arms.by_name.values():
                arm([draw(rows, 2, 0), draw(rows, 2, 1)], 2)  # warms up
            for size, questions in batch_sizes:
                first_tokens.append(measure_first_tokens(arms, rows, size, questions, rounds, number))
                number += questions * rounds
                lines = [
                    [size, questions, name, f"{values['first_tokens']:.2f}", f"{values['processor_seconds']:.2f}"]
                    for name, values in first_tokens[-1]["arms"].items()
                ]
                columns_of_batches = ["Passages", "Questions", "Measured", "All first tokens, s", "Processor time, s"]
                typer.echo("\n".join(markdown_table(columns_of_batches, lines)))
            for size in numbers_of_passages:
                for count in numbers_of_clients:
                    questions = max(4, count)
                    measured.append(measure(arms, rows, size, count, questions, rounds, number))
                    number += questions * rounds
                    lines = [
                        [size, count, name, f"{values['first_token']:.2f}", f"{values['answers_per_second']:.2f}"]
                        + [f"{values['processor_seconds']:.2f}"]
                        + ["" if values["same_as_pytorch"] is None else f"{values['same_as_pytorch']:.0%}"]
                        for name, values in measured[-1]["arms"].items()
                    ]
                    typer.echo("\n".join(markdown_table(columns, lines)))
        finally:
            arms.close()
    per_position = torch.Size(entry_shape(arms.model.config.text_config, 1)).numel() * arms.model.dtype.itemsize
    report = {
        "first_tokens": first_tokens,
        "measured": measured,
        "tokens_per_slot": tokens_per_slot,
        "dtype": dtype,
        "vllm_options": vllm_options,
    }
    report |= {"bytes_per_position": per_position, "machine": describe_machine()}
    write_atomically(output / "vllm.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
