"""Judged accuracy, the paper's Acc: a chat model says of each answer of a run whether it is correct.

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507
    python -m arcaligner.evaluation.judge --run runs/paper --model Qwen/Qwen3-30B-A3B-Instruct-2507

The judge is behind an OpenAI-compatible endpoint, such as that of vLLM, llama.cpp or `transformers serve`; it answers
greedily. It reads the question, the golds and the answer, and not the passages. The paper prints no prompt; this one is
of OpenQA-eval (Kamalloo et al., 2023). A reply that begins with neither yes nor no is unreadable: counted, and scored
as wrong. A question without a reply stays unjudged: counted, and left out of the mean.

    <run>/<task>/<method>.<judge>.verdicts.jsonl   id, digest of the prompt, verdict, reply: one line per verdict

Verdicts are appended as they come. A second run, also after a kill, asks only for those that are missing or that belong
to answers that have changed.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..common.files import digest, run_command
from ..common.rows import Row
from .metrics import percent_interval, shown_interval, usable_golds
from .runs import AnswerFile, answer_files

logger = logging.getLogger(__name__)

YES, UNREADABLE = "yes", "unreadable"
VERDICTS = ".verdicts"
CONCURRENCY = 16  # prompts that are asked at a time
MAX_NEW_TOKENS = 8  # a yes or a no, and what may stand before it
RETRIES = 2
KEY_VARIABLE = "OPENAI_API_KEY"
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)

# Prompts to what the judge says of each, in order; `None` where it says nothing.
Judge = Callable[[list[str]], Iterator[str | None]]


def judge_prompt(row: Row) -> str:
    """What the judge is asked about an answer of a run, whose questions all have a gold."""
    question = row["question"].strip()
    question += "" if question.endswith("?") else "?"
    candidate = " ".join(row["prediction"].split())
    asked = "Is candidate correct? Answer yes or no."
    return (
        f"Question: {question}\nAnswer: {' or '.join(usable_golds(row['answers']))}\nCandidate: {candidate}\n\n{asked}"
    )


def parse_verdict(reply: str) -> str:
    """The verdict of a reply, by its first word.

    >>> parse_verdict("**Yes**, it is."), parse_verdict("Not quite.")
    ('yes', 'unreadable')
    """
    found = _FIRST_WORD.match(reply)
    return found[1].lower() if found else UNREADABLE


def verdict_file(file: AnswerFile, judge: str) -> AnswerFile:
    """Where the verdicts of a judge, named as in the command, on a file of answers are."""
    slug = re.sub(r"[^\w.-]+", "--", judge.strip("/"))
    return dataclasses.replace(file, method=f"{file.method}.{slug}{VERDICTS}")


def judges_of(file: AnswerFile) -> list[str]:
    """The judges of a file's answers, as they stand in names of files."""
    ending = f"{VERDICTS}.jsonl"
    paths = sorted(file.path.parent.glob(f"{file.method}.*{ending}"))
    return [path.name.removeprefix(f"{file.method}.").removesuffix(ending) for path in paths]


def read_verdicts(file: AnswerFile, rows: Sequence[Row]) -> dict[str, str | None]:
    """By id, what a judge said of the answers as they are now: `"yes"`, `"no"`, `"unreadable"`, or `None`."""
    found = {line["prompt"]: line["verdict"] for line in file.read()}
    return {row["id"]: found.get(digest(judge_prompt(row))) for row in rows}


def judged_scores(file: AnswerFile, judge: str) -> dict[str, float]:
    """By id, 1.0 for each answer that the judge finds correct, and 0.0 for the others that it judged."""
    verdicts = read_verdicts(verdict_file(file, judge), file.read())
    return {key: float(verdict == YES) for key, verdict in verdicts.items() if verdict is not None}


def judge_answers(judge: Judge, rows: Sequence[Row], file: AnswerFile) -> None:
    """Asks for the verdicts on answers that are missing in a file, of [`verdict_file`], and appends them."""
    known = read_verdicts(file, rows)
    todo = [(row["id"], judge_prompt(row)) for row in rows if known[row["id"]] is None]
    bar = {"description": file.method, "total": len(todo), "transient": True, "console": Console(stderr=True)}
    with file.claim():
        for (row_id, prompt), reply in zip(todo, track(judge([prompt for _, prompt in todo]), **bar), strict=True):
            if reply is not None:
                verdict = {"prompt": digest(prompt), "verdict": parse_verdict(reply), "reply": reply}
                file.append([{"id": row_id, **verdict}])


def ask_endpoint(prompts: list[str], model: str, url: str, timeout: float = 60.0) -> Iterator[str | None]:
    """What a chat model, by its name at an address such as `http://localhost:8000/v1`, says to each prompt, in order;
    `None` after some attempts that time out or fail on the server. `$OPENAI_API_KEY` is its key if it wants one."""
    try:
        import openai
    except ImportError as error:
        raise ImportError("A judge is asked by the package openai: `pip install 'arcaligner[evaluation]'`.") from error
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"The endpoint is {url!r}; expected an address, such as http://localhost:8000/v1.")
    key = os.environ.get(KEY_VARIABLE) or "none"
    client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=RETRIES)

    def ask(prompt: str) -> str | None:
        message = {"role": "user", "content": prompt}
        try:
            completion = client.chat.completions.create(
                model=model, messages=[message], max_tokens=MAX_NEW_TOKENS, temperature=0.0
            )
            return completion.choices[0].message.content or ""
        except openai.APITimeoutError:
            problem = f"no reply within {timeout:g} seconds"
        except openai.APIConnectionError as error:
            raise ConnectionError(
                f"There is no endpoint at {url} that can be reached ({error.__cause__}). Start the server, or name "
                "another with `--endpoint`; verdicts so far are kept."
            ) from error
        except (openai.InternalServerError, openai.RateLimitError) as error:
            problem = f"status {error.status_code}"
        except openai.APIStatusError as error:
            raise ValueError(
                f"{url} refuses to let `{model}` judge (status {error.status_code}: {error.response.text[:300]}). "
                f"Check the address, the model's name there, and the key in ${KEY_VARIABLE}."
            ) from error
        except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"no chat completion ({type(error).__name__}: {error})"
        logger.warning("an answer stays unjudged: %s", problem)
        return None

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        yield from pool.map(ask, prompts)


def main(
    run: Annotated[Path, typer.Option(help="Folder of a run, with answers.")],
    model: Annotated[str, typer.Option(help="The judge: its name at the endpoint.")],
    endpoint: Annotated[
        str, typer.Option(help=f"OpenAI-compatible address; its key is ${KEY_VARIABLE}.")
    ] = "http://localhost:8000/v1",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for a reply.")] = 60.0,
) -> None:
    """Judges all answers of a run and prints their accuracy. The same command asks again for unjudged ones."""
    rows = {file: found for file in answer_files(run) if (found := file.read())}
    if not rows:
        raise ValueError(f"{run} holds no answers. `python -m arcaligner evaluate` writes them.")
    table = Table("task", "method", "Acc [95 %]", "judged", "unreadable", "unjudged", title=f"judged by {model}")
    for file, found in rows.items():
        verdicts = verdict_file(file, model)
        if None in read_verdicts(verdicts, found).values():
            judge_answers(lambda prompts: ask_endpoint(prompts, model, endpoint, timeout), found, verdicts)
        scores, said = [*judged_scores(file, model).values()], [*read_verdicts(verdicts, found).values()]
        shown = shown_interval(percent_interval(scores)) if scores else "-"
        table.add_row(file.task, file.method, shown, *map(str, (len(scores), said.count(UNREADABLE), said.count(None))))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
