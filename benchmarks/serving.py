"""Load generator: throughput and latency of a server by number of clients.

    python -m arcaligner.benchmarks.serving --url http://127.0.0.1:8000 --questions nq.jsonl.gz --clients 1,8,32

Each client sends its next question to a running server when it has the answer to the last one. Lengths are mixed: the
number of passages depends on the question, the maximum length of an answer on the number of the request. `--distinct
24` uses 24 questions again and again. Each is asked once before the measurement, so that its passages are cached.
"""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from ..common.files import describe_machine, markdown_table, run_command
from ..common.rows import read_rows
from .latency import parse_sizes

# Numbers of passages to search for, chosen by the length of the question; maximum tokens of an answer, in turn.
NUM_PASSAGES, MAX_TOKENS = (1, 3, 5, 10), (4, 16, 64)


def memory(url: str, key: str) -> float:
    """Memory of the server in MB, if its system reports it."""
    try:
        text = httpx.get(f"{url}/metrics", headers=headers_of(key), timeout=60).text
    except httpx.ConnectError as error:
        raise OSError(
            f"There is no server at {url}. Start one with `arcaligner serve`, or pass another address with `--url`."
        ) from error
    match = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    return float(match[1]) / 1e6 if match else float("nan")


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def ask_all(url: str, key: str, questions: list[str], clients: int) -> list[dict[str, Any]]:
    """Status, seconds, batch size and share of cached passages of each answer."""
    waiting, answers, model = list(reversed(list(enumerate(questions)))), [], ""

    async def ask(client: httpx.AsyncClient) -> None:
        while waiting:
            number, question = waiting.pop()
            body = {"model": model, "messages": [{"role": "user", "content": question}]}
            body["num_passages"] = NUM_PASSAGES[len(question) % len(NUM_PASSAGES)]
            body["max_tokens"] = MAX_TOKENS[number % len(MAX_TOKENS)]
            began = time.perf_counter()
            response = await client.post("/v1/chat/completions", json=body)
            answer = {"status": response.status_code, "seconds": time.perf_counter() - began}
            if response.is_success:
                report = response.json()["arcaligner"]
                answer |= {"batch_size": report["batch_size"]}
                answer |= {"cached": report["num_cached"] / max(1, sum(source["used"] for source in report["sources"]))}
            answers.append(answer)

    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers_of(key)) as client:
        model = (await client.get("/health")).json()["model"]
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    return answers


def main(
    questions: Annotated[Path, typer.Option(help="JSON Lines file with questions.")],
    url: Annotated[str, typer.Option(help="Address of a running server.")] = "http://127.0.0.1:8000",
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,8,32",
    requests: Annotated[int, typer.Option(help="Number of requests for each number of clients.", min=1)] = 64,
    distinct: Annotated[
        int | None,
        typer.Option(
            help="Number of different questions, which are asked repeatedly. Each is asked once before the timing "
            "starts. Default: all.",
            min=1,
        ),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="ARCALIGNER_API_KEY", help="The server's API key.")] = "",
) -> None:
    """Send questions to a running server. Print answers per second and quantiles of the latency (p50 is the median) as
    a table and as a JSON line."""
    texts = [row["question"] for row in read_rows(questions)][:distinct]
    numbers_of_clients = parse_sizes(clients, "--clients")
    memory(url, api_key)  # raises if there is no server
    if distinct is not None:
        asyncio.run(ask_all(url, api_key, texts, 1))
    columns = ["Clients", "Answers/s", "Latency p50, s", "p95, s", "p99, s", "Mean batch size", "Passages in the cache"]
    columns += ["Server memory, MB", "Failed requests"]
    rows, measured = [], {}
    for number, count in enumerate(numbers_of_clients):
        sent = [texts[(number * requests + index) % len(texts)] for index in range(requests)]
        before, began = memory(url, api_key), time.perf_counter()
        answers = asyncio.run(ask_all(url, api_key, sent, count))
        throughput = len(answers) / (time.perf_counter() - began)
        good = [answer for answer in answers if answer["status"] == 200]
        quantiles = np.quantile([answer["seconds"] for answer in answers], (0.5, 0.95, 0.99)).tolist()
        batch = float(np.mean([answer["batch_size"] for answer in good] or [0]))
        cached, after = float(np.mean([answer["cached"] for answer in good] or [0])), memory(url, api_key)
        measured[count] = {
            "answers_per_second": throughput,
            "seconds": quantiles,
            "batch": batch,
            "failed": len(answers) - len(good),
        }
        measured[count] |= {"cached": cached, "megabytes": [before, after]}
        row = [
            str(count),
            f"{throughput:.2f}",
            *(f"{seconds:.2f}" for seconds in quantiles),
            f"{batch:.1f}",
            f"{cached:.0%}",
        ]
        rows.append([*row, f"{before:,.0f} to {after:,.0f}", str(len(answers) - len(good))])
    typer.echo("\n".join(markdown_table(columns, rows)))
    typer.echo(json.dumps({"load": measured, "machine": describe_machine()}))


if __name__ == "__main__":
    run_command(main)
