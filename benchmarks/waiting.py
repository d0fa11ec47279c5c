"""How long a short question waits while a server works on something long.

    python -m arcaligner.benchmarks.waiting --url http://127.0.0.1:8000

Measured are the seconds until the first token of the answer to a short question about one passage: alone, while the
server generates an answer of 256 tokens, and while it computes a question about five new documents of 2,000 words or
about 64 new passages.
"""

import asyncio
import json
import time
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from ..common.files import CASE_STUDIES, describe_machine, markdown_table, read_json_lines, run_command
from .serving import headers_of, memory

SHORT = {"documents": ["Ada wrote the letter in 1843. It was long."], "max_tokens": 16}
# Seconds between the long request and the short one, which is sent while the server works on the long one.
LATER = 1.0


def long_requests(number: int) -> dict[str, dict[str, Any]]:
    """The long requests of a round, by their names."""
    words = " ".join(passage["text"] for row in read_json_lines(CASE_STUDIES) for passage in row["passages"]).split()
    names = np.random.default_rng(number).permutation(words * 10).tolist()
    text = [" ".join(names[start : start + 12]) + "." for start in range(0, len(names), 12)]
    documents = [" ".join(text[start : start + 167]) for start in range(0, 5 * 167, 167)]
    passages = [" ".join(text[start : start + 8]) for start in range(0, 64 * 8, 8)]
    return {
        "256 tokens": {"documents": [], "max_tokens": 256, "temperature": 2.0, "seed": number},
        "five documents": {"documents": documents, "max_tokens": 16},
        "64 passages": {"documents": passages, "max_tokens": 16},
    }


async def first_token(client: httpx.AsyncClient, model: str, body: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds until the first token and until the last, and the number of chunks of the answer."""
    question = [{"role": "user", "content": "Who wrote the letter?"}]
    body = {"model": model, "messages": question, "stream": True} | body
    began, first, chunks = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(
                f"The server at {client.base_url} answered with status {response.status_code}; expected 200. The "
                f"reply: {(await response.aread()).decode()[:300]}"
            )
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: ")).get("choices", [])
                if choices and choices[0]["delta"].get("content"):
                    first, chunks = first or time.perf_counter() - began, chunks + 1
    return first, time.perf_counter() - began, chunks


async def measure(url: str, key: str, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """For each long request and round: seconds until the first token of the short request, and until the first and the
    last token of the long one."""
    waits: dict[str, list] = {"alone": []}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers_of(key)) as client:
        model = (await client.get("/health")).json()["model"]
        await first_token(client, model, SHORT)
        for number in range(rounds):
            waits["alone"].append(((await first_token(client, model, SHORT))[0], 0.0, 0.0))
            for name, body in long_requests(number).items():
                long = asyncio.create_task(first_token(client, model, body))
                await asyncio.sleep(LATER)
                short, _, _ = await first_token(client, model, SHORT)
                first, last, _ = await long
                waits.setdefault(name, []).append((short, first, last))
    return waits


def main(
    url: Annotated[str, typer.Option(help="Address of a running server.")] = "http://127.0.0.1:8000",
    rounds: Annotated[
        int, typer.Option(help="Number of rounds; each measures every row of the table once.", min=1)
    ] = 3,
    api_key: Annotated[str, typer.Option(envvar="ARCALIGNER_API_KEY", help="The server's API key.")] = "",
) -> None:
    """Measure how long a short question waits while a running server works on a long request. Print medians in seconds
    as a table, and all measurements as a JSON line."""
    memory(url, api_key)  # raises if there is no server
    waits = asyncio.run(measure(url, api_key, rounds))
    columns = ["Long request", "First token of the short request: median, s", "longest, s"]
    columns += ["First token of the long request, s", "Last token of the long request, s"]
    rows = []
    for name, times in waits.items():
        short, first, last = np.array(times).T
        title = "none (the short one alone)" if name == "alone" else name
        values = np.median(short), short.max(), np.median(first), np.median(last)
        rows.append([title, *(f"{value:.2f}" for value in values)])
    typer.echo("\n".join(markdown_table(columns, rows)))
    typer.echo(json.dumps({"waiting": waits, "machine": describe_machine()}))


if __name__ == "__main__":
    run_command(main)
