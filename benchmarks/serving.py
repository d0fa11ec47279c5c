"""How well a corpus is searched, and how many clients a server answers.

    python -m arcaligner.benchmarks.serving recall --corpus CORPUS --questions nq.jsonl.gz
    python -m arcaligner.benchmarks.serving load --url http://127.0.0.1:8000 --questions nq.jsonl.gz --clients 1,8,32

Recall@k is the share of a question's gold documents of which a passage is among the first k. Only questions count whose
gold documents are all in the corpus. The load test asks a running server: each client sends its next question when it
has the answer to the last.
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
from rich.progress import track
from rich.table import Table

from ..corpus.retrieve import Retriever
from ..corpus.sources import Document
from ..corpus.table import Corpus
from ..evaluation.metrics import bootstrap_interval
from ..files import describe_machine, exit_on_user_error
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import read_rows

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "arcaligner-smollm2-135m"
KS = (1, 5, 20)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


def gold_documents(row: dict[str, Any]) -> set[str]:
    """Ids that the passages have which answer a question; all of them, unless it says which."""
    gold = (row.get("meta") or {}).get("gold", range(len(row["passages"])))
    passages = [row["passages"][number] for number in gold]
    return {Document("", each["title"], each["text"]).digest for each in passages}


def recall_at_k(retriever: Retriever, rows: list[dict[str, Any]]) -> dict[int, list[float]]:
    """For each of `KS` and each row the share of its gold documents that are found."""
    found: dict[int, list[float]] = {k: [] for k in KS}
    for row in track(rows, "searching", transient=True):
        gold = gold_documents(row)
        documents = [each["document"] for each in retriever(row["question"], max(KS)).documents]
        for k in KS:
            found[k].append(len(gold & {*documents[:k]}) / len(gold))
    return found


@app.command()
def recall(
    corpus: Annotated[Path, typer.Option(help="Folder of the corpus.")],
    questions: Annotated[Path, typer.Option(help="Rows with questions and gold passages, JSON Lines.")],
    checkpoint: Annotated[Path, typer.Option(help="The aligner that made the corpus.")] = CHECKPOINT,
    reranker: Annotated[str | None, typer.Option(help="A CrossEncoder.")] = None,
    num_questions: Annotated[int | None, typer.Option("-n", min=1, help="Only the first questions.")] = None,
) -> None:
    """Prints Recall@k of vectors alone and of hybrid search."""
    opened, processor = Corpus(corpus), ArcAlignerProcessor.from_pretrained(checkpoint)
    rows = [
        row for row in read_rows(questions) if (gold := gold_documents(row)) and opened.digests(gold).keys() == gold
    ]
    rows = rows[:num_questions]
    console.print(f"{len(rows)} questions of {questions.name}, {len(opened)} passages")
    table = Table("Search", *(f"Recall@{k}" for k in KS))
    for search in ("vector", "hybrid"):
        found = recall_at_k(Retriever(opened, processor, reranker, search), rows)
        cells = [
            (100 * np.mean(shares), *(100 * each for each in bootstrap_interval(shares))) for shares in found.values()
        ]
        table.add_row(search, *("{:.1f} [{:.1f}, {:.1f}]".format(*cell) for cell in cells))
    console.print(table)


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
        body["model"] = (await client.get("/health")).json()["model"]
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    return answers


@app.command()
def load(
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
    console.print(table)
    typer.echo(json.dumps({"load": found, "machine": describe_machine()}))


if __name__ == "__main__":
    with exit_on_user_error():
        app()
