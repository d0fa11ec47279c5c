"""How many clients a server answers.

    python -m arcaligner.benchmarks.serving --url http://127.0.0.1:8000 --questions nq.jsonl.gz --clients 1,8,32

It asks a running server: each client sends its next question when it has the answer to the last.
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..common.files import describe_machine, run_command
from ..common.rows import read_rows


async def ask_all(url: str, key: str, questions: list[str], clients: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Status, seconds and batch size of each answer."""
    waiting, answers = list(reversed(questions)), []

    async def ask(client: httpx.AsyncClient) -> None:
        while waiting:
            message = {"role": "user", "content": waiting.pop()}
            began = time.perf_counter()
            response = await client.post("/v1/chat/completions", json=body | {"messages": [message]})
            answer = {"status": response.status_code, "seconds": time.perf_counter() - began}
            if response.is_success:
                answer |= {"batch_size": response.json()["arcaligner"]["batch_size"]}
            answers.append(answer)

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:
        try:
            body["model"] = (await client.get("/health")).json()["model"]
        except httpx.ConnectError as error:
            raise OSError(f"There is no server at {url}. Start one: `arcaligner serve`.") from error
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    return answers


def main(
    questions: Annotated[Path, typer.Option(help="Rows with questions, JSON Lines.")],
    url: Annotated[str, typer.Option(help="A server that runs.")] = "http://127.0.0.1:8000",
    clients: Annotated[str, typer.Option(help="Numbers of clients, separated by commas.")] = "1,8,32",
    requests: Annotated[int, typer.Option(help="Requests of each number of clients.", min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    api_key: Annotated[str, typer.Option(envvar="ARCALIGNER_API_KEY", help="The server's key.")] = "",
) -> None:
    """Prints answers per second and the quantiles of their time, and a JSON line."""
    texts = [row["question"] for row in read_rows(questions)]
    table = Table("Clients", "Answers/s", "p50 s", "p95 s", "p99 s", "Batch", "Failed")
    found = {}
    for number, count in enumerate(int(each) for each in clients.split(",")):
        asked = [texts[(number * requests + index) % len(texts)] for index in range(requests)]
        began = time.perf_counter()
        answers = asyncio.run(ask_all(url, api_key, asked, count, {"max_tokens": max_tokens}))
        rate = len(answers) / (time.perf_counter() - began)
        good = [answer for answer in answers if answer["status"] == 200]
        quantiles = np.quantile([answer["seconds"] for answer in answers], (0.5, 0.95, 0.99)).tolist()
        batch = float(np.mean([answer["batch_size"] for answer in good] or [0]))
        found[count] = {"rate": rate, "seconds": quantiles, "batch": batch, "failed": len(answers) - len(good)}
        table.add_row(
            str(count),
            f"{rate:.2f}",
            *(f"{each:.2f}" for each in quantiles),
            f"{batch:.1f}",
            str(len(answers) - len(good)),
        )
    Console().print(table)
    typer.echo(json.dumps({"load": found, "machine": describe_machine()}))


if __name__ == "__main__":
    run_command(main)
