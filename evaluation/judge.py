"""Judged accuracy, the paper's Acc: a chat model says of each answer of a run whether it is correct.

    python -m arcaligner.evaluation.judge --run runs/paper --model Qwen/Qwen3-30B-A3B-Instruct-2507 --device cuda
    python -m arcaligner.evaluation.judge --run runs/paper --model Qwen/Qwen3-30B-A3B-Instruct-2507 \\
        --endpoint http://localhost:8000/v1

The judge is a chat model of transformers, or one behind an OpenAI-compatible endpoint; it answers greedily. It reads
the question, the golds and the answer, and not the passages. The paper prints no prompt; this one is of OpenQA-eval
(Kamalloo et al., 2023). A reply that begins with neither yes nor no is unreadable: counted, and scored as wrong. A
question without a reply stays unjudged: counted, and left out of the mean.

    <run>/<task>/<method>.<judge>.verdicts.jsonl   id, digest of the prompt, verdict, reply: one line per answer

Verdicts are appended as they come. A second run, also after a kill, asks only for those that are missing or that belong
to answers that have changed.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, HTTPError, InferenceTimeoutError
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..configuration_arcaligner import missing_model_message, resolve_base_model
from ..files import digest, run_command, write_whole
from ..train.corpora import Row
from .answering import in_batches
from .metrics import percent_interval, shown_interval, usable_golds
from .runs import AnswerFile, answer_files, read_lines, to_lines

YES, NO, UNREADABLE = "yes", "no", "unreadable"
VERDICTS = ".verdicts.jsonl"
MAX_NEW_TOKENS = 8  # a yes or a no, and what may stand before it
ATTEMPTS = 3
PAUSE_SECONDS = 2.0  # before the second attempt; twice as long before the third
KEY_VARIABLE = "OPENAI_API_KEY"
_BUSY = 429
_NEEDED = ("id", "question", "answers", "prediction")
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


# Verdicts


@dataclass(frozen=True)
class Judged:
    """
    What a judge said of some answers.

    Args:
        verdicts (`dict[str, str | None]`): By id: `"yes"`, `"no"`, `"unreadable"`, or `None` without a reply.
    """

    verdicts: dict[str, str | None]

    @property
    def scores(self) -> dict[str, float]:
        """By id, 1.0 for a yes and 0.0 for all else; nothing for what is unjudged."""
        return {key: float(verdict == YES) for key, verdict in self.verdicts.items() if verdict is not None}

    def count(self, verdict: str | None) -> int:
        """Answers with a verdict."""
        return sum(each == verdict for each in self.verdicts.values())


def judge_prompt(row: Row) -> str:
    """What the judge is asked about an answer.

    Raises:
        `ValueError`: a row without question, prediction or gold.
    """
    if missing := [key for key in _NEEDED if key not in row]:
        raise ValueError(f"An answer has no {', '.join(missing)}: {row}. Expected {', '.join(_NEEDED)}.")
    golds = usable_golds(row["answers"])
    if not golds:
        raise ValueError(f"Question {row['id']!r} has no gold to judge by: {row['answers']}. Leave it out of the run.")
    question = row["question"].strip()
    question += "" if question.endswith("?") else "?"
    candidate = " ".join(row["prediction"].split())
    asked = "Is candidate correct? Answer yes or no."
    return f"Question: {question}\nAnswer: {' or '.join(golds)}\nCandidate: {candidate}\n\n{asked}"


def parse_verdict(reply: str) -> str:
    """The verdict of a reply, by its first word.

    >>> parse_verdict("**Yes**, it is."), parse_verdict("Not quite.")
    ('yes', 'unreadable')
    """
    found = _FIRST_WORD.match(reply)
    return found[1].lower() if found else UNREADABLE


def judge_slug(judge: str) -> str:
    """A judge's name in names of files.

    >>> judge_slug("Qwen/Qwen3-30B-A3B-Instruct-2507")
    'Qwen--Qwen3-30B-A3B-Instruct-2507'
    """
    return re.sub(r"[^\w.-]+", "--", judge.strip("/"))


def verdict_path(file: AnswerFile, judge: str) -> Path:
    """Where the verdicts of a judge on a file of answers are."""
    return file.path.with_name(f"{file.method}.{judge_slug(judge)}{VERDICTS}")


def judged_scores(run: Path, task: str, method: str, judge: str) -> dict[str, float]:
    """By id, 1.0 for each answer that the judge, named as in the command, finds correct, 0.0 for others it judged.

    An answer that is not judged as it is now is left out.
    """
    file = AnswerFile(run, task, method)
    return read_verdicts(verdict_path(file, judge), file.read()).scores


def judges_of(file: AnswerFile) -> list[str]:
    """Slugs of the judges that have judged answers in a file."""
    paths = sorted(file.path.parent.glob(f"{file.method}.*{VERDICTS}"))
    return [path.name.removeprefix(f"{file.method}.").removesuffix(VERDICTS) for path in paths]


def read_verdicts(path: Path, rows: Sequence[Row]) -> Judged:
    """The verdicts in a file on answers as they are now."""
    found = {line["prompt"]: line["verdict"] for line in read_lines(path)}
    return Judged({row["id"]: found.get(digest(judge_prompt(row))) for row in rows})


def judge_answers(judge: "Judge", rows: Sequence[Row], path: Path, title: str) -> None:
    """
    Asks for the verdicts that are missing in a file, and leaves it with one line per answer.

    Args:
        judge ([`Judge`]): Replies.
        rows (`Sequence[dict]`): With `id`, `question`, `answers` and `prediction`.
        path (`Path`): The file; what it has of these answers is kept.
        title (`str`): For the progress bar.
    """
    prompts = [judge_prompt(row) for row in rows]
    known = {line["prompt"]: line for line in read_lines(path) if line["verdict"] is not None}
    found = [known.get(digest(prompt)) for prompt in prompts]
    lines = [line and {**line, "id": row["id"]} for line, row in zip(found, rows, strict=True)]
    todo = [number for number, line in enumerate(lines) if line is None]
    write_whole(path, to_lines(line for line in lines if line))
    replies = judge.replies([prompts[number] for number in todo])
    with open(path, "a", encoding="utf-8") as file:
        bar = {"description": title, "total": len(todo), "transient": True, "console": Console(stderr=True)}
        for reply in track(replies, **bar):
            number = todo[reply.index]
            lines[number] = _line(rows[number]["id"], prompts[number], reply)
            file.write(to_lines([lines[number]]))
            file.flush()
    write_whole(path, to_lines(lines))


def _line(row_id: str, prompt: str, reply: "Reply") -> dict[str, Any]:
    line = {"id": row_id, "prompt": digest(prompt), "verdict": None, "reply": reply.text}
    if reply.text is None:
        return line | {"problem": reply.problem}
    return line | {"verdict": parse_verdict(reply.text)}


# Judges


@dataclass(frozen=True)
class Reply:
    """
    What a judge said.

    Args:
        index (`int`): Of the prompt.
        text (`str`, *optional*): The reply; `None` where there is none.
        problem (`str`, *optional*): Why there is none.
    """

    index: int
    text: str | None
    problem: str | None = None


class Judge(Protocol):
    """Replies to prompts."""

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt, in the order they come."""


class LocalJudge:
    """
    A chat model of transformers.

    Args:
        name (`str`): A folder or a Hub id.
        device (`str`): Where it runs; `"auto"` spreads it over the accelerators.
        batch_size (`int`): Prompts at a time; halved where memory is short.

    Raises:
        `ValueError`: no causal language model with a chat template.
        `OSError`: a model that is not there, with how to get it.
    """

    def __init__(self, name: str, device: str = "cpu", batch_size: int = 16):
        source = resolve_base_model(name)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
            if self.tokenizer.chat_template is None:
                raise ValueError("its tokenizer has no chat template")
            dtype = torch.float32 if device == "cpu" else "auto"
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device).eval()
        except OSError as error:
            raise OSError(missing_model_message("judge", name, error)) from error
        except ValueError as error:
            raise ValueError(
                f"{name} is no chat model that transformers can run: {error}. Name one that follows instructions, such "
                "as Qwen/Qwen3-30B-A3B-Instruct-2507."
            ) from error
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Nothing of its own way to sample: no temperature, no penalty for repetition.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.model.generation_config.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )
        self.batch_size = batch_size

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt, the longest first, those of like length together."""
        longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))

        def generate(batch: list[int]) -> list[str]:
            return self._generate([prompts[index] for index in batch])

        for batch, texts in in_batches(longest_first, self.batch_size, generate):
            yield from map(Reply, batch, texts)

    @torch.inference_mode()
    def _generate(self, prompts: list[str]) -> list[str]:
        inputs = self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            enable_thinking=False,  # of templates that know it, as Qwen3's
        ).to(self.model.device)
        input_ids = inputs["input_ids"]  # (batch, seq_len), left-padded
        output = self.model.generate(
            input_ids, attention_mask=inputs["attention_mask"], max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        return self.tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


class EndpointJudge:
    """
    A chat model behind an OpenAI-compatible endpoint, as of vLLM; `$OPENAI_API_KEY` is its key where it wants one.

    Args:
        name (`str`): The model's name there.
        url (`str`): As `http://localhost:8000/v1`.
        timeout (`float`): Seconds to wait for a reply.
        concurrency (`int`): Prompts at a time.

    Raises:
        `ValueError`: something else than the address of a server.
    """

    def __init__(self, name: str, url: str, timeout: float = 60.0, concurrency: int = 16):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The endpoint is {url!r}; expected an address, as http://localhost:8000/v1.")
        self.name, self.url, self.timeout, self.concurrency = name, url, timeout, concurrency
        # Without any key the client would send the one of the Hub to whoever listens there.
        key = os.environ.get(KEY_VARIABLE) or "none"
        self.client = InferenceClient(base_url=url, api_key=key, timeout=timeout)

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt; none after some attempts that time out, fail on the server's side or make no sense.

        Raises:
            `ConnectionError`: nobody can be reached there.
            `ValueError`: a server that refuses the request.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._ask, index, prompt) for index, prompt in enumerate(prompts)]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, index: int, prompt: str) -> Reply:
        problem = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS * attempt)
            try:
                return Reply(index, self._request(prompt))
            except InferenceTimeoutError:
                problem = f"no reply within {self.timeout:g} seconds"
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status < 500 and status != _BUSY:
                    raise ValueError(
                        f"{self.url} refuses to let `{self.name}` judge (status {status}: "
                        f"{error.response.text[:300]}). Check the address, the model's name there, and the key in "
                        f"${KEY_VARIABLE}."
                    ) from error
                problem = f"status {status}"
            except HTTPError as error:
                if attempt == ATTEMPTS - 1:
                    raise ConnectionError(
                        f"There is no endpoint at {self.url} that can be reached ({error}). Start the server, or name "
                        "another with `--endpoint`; verdicts so far are kept."
                    ) from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                problem = f"no chat completion ({type(error).__name__}: {error})"
        return Reply(index, None, problem)

    def _request(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        completion = self.client.chat_completion(messages, model=self.name, max_tokens=MAX_NEW_TOKENS, temperature=0.0)
        return completion.choices[0].message.content or ""


# The command


def main(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")],
    model: Annotated[
        str, typer.Option(help="The judge: a chat model's folder or Hub id, or its name at the endpoint.")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help=f"OpenAI-compatible address, such as http://localhost:8000/v1; key: ${KEY_VARIABLE}."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs, without an endpoint.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for the endpoint's reply.")] = 60.0,
) -> None:
    """Judges all answers of a run and prints their accuracy."""
    rows = {file: found for file in answer_files(run) if (found := file.read())}
    if not rows:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    paths = {file: verdict_path(file, model) for file in rows}
    waiting = [file for file in rows if read_verdicts(paths[file], rows[file]).count(None)]
    if waiting:
        judge = (
            LocalJudge(model, device, batch_size)
            if endpoint is None
            else EndpointJudge(model, endpoint, timeout, batch_size)
        )
        for file in waiting:
            judge_answers(judge, rows[file], paths[file], f"{file.task}: {file.method}")
    table = Table("task", "method", "Acc [95 %]", "judged", "unreadable", "unjudged", title=f"judged by {model}")
    for file in rows:
        judged = read_verdicts(paths[file], rows[file])
        counts = [len(judged.scores), judged.count(UNREADABLE), judged.count(None)]
        scores = [*judged.scores.values()]
        shown = shown_interval(percent_interval(scores)) if scores else "-"
        table.add_row(file.task, file.method, shown, *map(str, counts))
    Console().print(table)
    problems = [line["problem"] for path in paths.values() for line in read_lines(path) if line["verdict"] is None]
    if problems:
        counted = ", ".join(f"{problems.count(problem)} {problem}" for problem in dict.fromkeys(problems))
        typer.echo(f"Unjudged answers are asked for again by the same command: {counted}.", err=True)


if __name__ == "__main__":
    run_command(main)
