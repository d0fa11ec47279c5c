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

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

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

logger = logging.getLogger(__name__)

YES, NO, UNREADABLE = "yes", "no", "unreadable"
VERDICTS = ".verdicts.jsonl"
MAX_NEW_TOKENS = 8  # a yes or a no, and what may stand before it
ATTEMPTS = 3
PAUSE_SECONDS = 2.0  # before the second attempt; twice as long before the third
KEY_VARIABLE = "OPENAI_API_KEY"
_BUSY = 429
_NEEDED = ("id", "question", "answers", "prediction")
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)

Reply = tuple[int, str | None]  # the number of a prompt and what the judge said, or `None`


# Verdicts


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


def verdict_path(file: AnswerFile, judge: str) -> Path:
    """Where the verdicts of a judge, named as in the command, on a file of answers are."""
    slug = re.sub(r"[^\w.-]+", "--", judge.strip("/"))
    return file.path.with_name(f"{file.method}.{slug}{VERDICTS}")


def judges_of(file: AnswerFile) -> list[str]:
    """The judges of a file's answers, as they stand in names of files."""
    paths = sorted(file.path.parent.glob(f"{file.method}.*{VERDICTS}"))
    return [path.name.removeprefix(f"{file.method}.").removesuffix(VERDICTS) for path in paths]


def read_verdicts(path: Path, rows: Sequence[Row]) -> dict[str, str | None]:
    """By id, what a judge said of the answers as they are now: `"yes"`, `"no"`, `"unreadable"`, or `None`."""
    found = {line["prompt"]: line["verdict"] for line in read_lines(path)}
    return {row["id"]: found.get(digest(judge_prompt(row))) for row in rows}


def judged_scores(file: AnswerFile, judge: str) -> dict[str, float]:
    """By id, 1.0 for each answer that the judge finds correct, and 0.0 for the others that it judged."""
    verdicts = read_verdicts(verdict_path(file, judge), file.read())
    return {key: float(verdict == YES) for key, verdict in verdicts.items() if verdict is not None}


def judge_answers(judge: "LocalJudge | EndpointJudge", rows: Sequence[Row], path: Path, title: str) -> None:
    """
    Asks for the verdicts that are missing in a file, and leaves it with one line per answer.

    Args:
        judge ([`LocalJudge`] or [`EndpointJudge`]): Has `replies`.
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
    bar = {"description": title, "total": len(todo), "transient": True, "console": Console(stderr=True)}
    with open(path, "a", encoding="utf-8") as file:
        for index, text in track(judge.replies([prompts[number] for number in todo]), **bar):
            number = todo[index]
            verdict = None if text is None else parse_verdict(text)
            lines[number] = {
                "id": rows[number]["id"],
                "prompt": digest(prompts[number]),
                "verdict": verdict,
                "reply": text,
            }
            file.write(to_lines([lines[number]]))
            file.flush()
    write_whole(path, to_lines(lines))


# Judges


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
        # Without the model's own sampling settings, such as a temperature or a repetition penalty.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.model.generation_config.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )
        self.batch_size = batch_size

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt, the longest first, those of similar length together."""
        longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))

        def generate(batch: list[int]) -> list[str]:
            return self._generate([prompts[index] for index in batch])

        for batch, texts in in_batches(longest_first, self.batch_size, generate):
            yield from zip(batch, texts, strict=True)

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
    A chat model behind an OpenAI-compatible endpoint, such as vLLM's; `$OPENAI_API_KEY` is its key if it wants one.

    Args:
        name (`str`): The model's name there.
        url (`str`): Such as `http://localhost:8000/v1`.
        timeout (`float`): Seconds to wait for a reply.
        concurrency (`int`): Prompts at a time.

    Raises:
        `ValueError`: anything but the address of a server.
    """

    def __init__(self, name: str, url: str, timeout: float = 60.0, concurrency: int = 16):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The endpoint is {url!r}; expected an address, such as http://localhost:8000/v1.")
        self.name, self.url, self.timeout, self.concurrency = name, url, timeout, concurrency
        # Without a key the client would send the Hub's token to this server.
        key = os.environ.get(KEY_VARIABLE) or "none"
        self.client = InferenceClient(base_url=url, api_key=key, timeout=timeout)

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt; `None` after some attempts that time out, fail on the server or make no sense.

        Raises:
            `ConnectionError`: the server cannot be reached.
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
        asked = {"model": self.name, "max_tokens": MAX_NEW_TOKENS, "temperature": 0.0}
        problem = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS * attempt)
            try:
                completion = self.client.chat_completion([{"role": "user", "content": prompt}], **asked)
                return index, completion.choices[0].message.content or ""
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
        logger.warning("an answer stays unjudged: %s", problem)
        return index, None


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
    """Judges all answers of a run and prints their accuracy. The same command asks again for unjudged ones."""
    rows = {file: found for file in answer_files(run) if (found := file.read())}
    if not rows:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    judge = None
    table = Table("task", "method", "Acc [95 %]", "judged", "unreadable", "unjudged", title=f"judged by {model}")
    for file, found in rows.items():
        path = verdict_path(file, model)
        if None in read_verdicts(path, found).values():
            if judge is None:
                judge = (
                    EndpointJudge(model, endpoint, timeout, batch_size)
                    if endpoint
                    else LocalJudge(model, device, batch_size)
                )
            judge_answers(judge, found, path, f"{file.task}: {file.method}")
        scores, verdicts = [*judged_scores(file, model).values()], [*read_verdicts(path, found).values()]
        shown = shown_interval(percent_interval(scores)) if scores else "-"
        counts = [len(scores), verdicts.count(UNREADABLE), verdicts.count(None)]
        table.add_row(file.task, file.method, shown, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
