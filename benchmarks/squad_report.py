"""What compression costs: EM and F1 on SQuAD dev, without a passage, with its text, from slots.

    python -m arcaligner.benchmarks.squad_report --model CHECKPOINT -n 200 --output report.json

Six ways to answer the same questions with the same frozen model, greedily, at most 24 new tokens:

    closed_book           Question: ...
    full_text             Refer to the background document: <text> / Question: ...
    compressed_off        Refer to the background document: <slots> / Question: ...  one pass
    compressed_adaptive   the same, the gates decide: the paper's ArcAligner
    compressed_always     the same, every slot takes all refinement steps
    empty_slot            the same with the slot of no passage: what an aligner says unread

Writes a JSON file with each prediction, prints a table. EM is non-strict (`evaluation/metrics.py`);
intervals are 95 % bootstrap intervals over questions.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from ..evaluation.metrics import METRICS, bootstrap_interval
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.corpora import read_rows

Row = dict[str, Any]
MAX_NEW_TOKENS = 24


def closed_book_text(row: Row) -> str:
    """The user's turn without a passage."""
    return f"Question: {row['question']}"


def full_text(row: Row) -> str:
    """The user's turn with the passages as text, titles as the encoder reads them."""
    passages = (
        f"{passage['title']}: {passage['text']}" if passage["title"] else passage["text"] for passage in row["passages"]
    )
    return f"Refer to the background document: {' '.join(passages)}\nQuestion: {row['question']}"


def text_inputs(processor: ArcAlignerProcessor, rows: list[Row], content: Callable[[Row], str]):
    """Prompts without slots, left-padded."""
    conversations = [[{"role": "user", "content": content(row)}] for row in rows]
    return _render(processor, conversations)


def slot_inputs(processor: ArcAlignerProcessor, rows: list[Row], with_passages: bool = True):
    """Prompts with slots, left-padded."""
    conversations = [[{"role": "user", "content": row["question"]}] for row in rows]
    documents = [row["passages"] if with_passages else [] for row in rows]
    return _render(processor, conversations, documents=documents)


def _render(processor: ArcAlignerProcessor, conversations: list, **kwargs: Any):
    return processor.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": "left"},
        **kwargs,
    )


def batches_by_length(rows: list[Row], batch_size: int) -> Iterator[list[int]]:
    """Indices of `rows`, those of like passage length together."""
    lengths = [sum(len(passage["text"]) for passage in row["passages"]) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: lengths[index])
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def predict(
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    batches: list[tuple[list[int], Any]],
    name: str,
) -> tuple[list[str], float]:
    """Greedy answers in the rows' order, and the seconds they took to generate."""
    answers: dict[int, str] = {}
    seconds = 0.0
    for indices, inputs in track(batches, description=name):
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        seconds += time.perf_counter() - start
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update(zip(indices, (text.strip() for text in texts), strict=True))
    return [answers[index] for index in range(len(answers))], seconds


def score(rows: list[Row], predictions: list[str]) -> dict[str, dict[str, float]]:
    """Mean and 95 % interval of each metric, in percent."""
    report = {}
    for name, metric in METRICS.items():
        scores = [100 * metric(text, row["answers"]) for row, text in zip(rows, predictions, strict=True)]
        low, high = bootstrap_interval(scores)
        report[name] = {"mean": sum(scores) / len(scores), "low": low, "high": high}
    return report


@torch.inference_mode()
def mean_refinement_steps(model: ArcAlignerForCausalLM, batches: list[tuple[list[int], Any]]) -> float:
    """Refinement steps of a slot at a layer, on average, in the model's gate mode."""
    depths = [model.model(**inputs).recursion_depth.flatten() for _, inputs in batches]
    depths = torch.cat(depths)
    return depths[depths >= 0].float().mean().item()


def context_statistics(processor: ArcAlignerProcessor, rows: list[Row], num_slots: int) -> dict[str, float]:
    """Measured compression: tokens of the passages as text over slots."""
    texts = [passage["text"] for row in rows for passage in row["passages"]]
    ids = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokens = sum(len(row) for row in ids)
    return {
        "tokens_per_question": tokens / len(rows),
        "slots_per_question": num_slots / len(rows),
        "compression_rate": tokens / num_slots,
    }


def run(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], batch_size: int
) -> dict[str, Any]:
    """All six ways over `rows`."""
    batches = list(batches_by_length(rows, batch_size))

    def prepare(make: Callable[[list[Row]], Any]) -> list[tuple[list[int], Any]]:
        return [(indices, make([rows[index] for index in indices]).to(model.device)) for indices in batches]

    slots = prepare(lambda some: slot_inputs(processor, some))
    ways = {
        "closed_book": (
            "off",
            prepare(lambda some: text_inputs(processor, some, closed_book_text)),
        ),
        "full_text": ("off", prepare(lambda some: text_inputs(processor, some, full_text))),
        "compressed_off": ("off", slots),
        "compressed_adaptive": ("adaptive", slots),
        "compressed_always": ("always", slots),
        "empty_slot": ("adaptive", prepare(lambda some: slot_inputs(processor, some, False))),
    }
    num_slots = sum(int((inputs["input_ids"] == model.config.context_token_id).sum()) for _, inputs in slots)
    report: dict[str, Any] = {"context": context_statistics(processor, rows, num_slots), "ways": {}}
    predictions = {}
    for name, (gate_mode, inputs) in ways.items():
        model.config.gate_mode = gate_mode
        predictions[name], seconds = predict(model, processor, inputs, name)
        report["ways"][name] = score(rows, predictions[name]) | {"seconds": seconds}
        if name == "compressed_adaptive":
            report["refinement_steps"] = mean_refinement_steps(model, inputs)
    report["predictions"] = [
        {"id": row["id"], "question": row["question"], "answers": row["answers"]}
        | {name: texts[index] for name, texts in predictions.items()}
        for index, row in enumerate(rows)
    ]
    return report


def markdown_table(report: dict[str, Any]) -> str:
    """The report as a table, intervals in brackets."""
    lines = [
        "| | EM (non-strict) | F1 | EM (raw) | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, way in report["ways"].items():
        cells = (
            f"{way[metric]['mean']:.1f} [{way[metric]['low']:.1f}, {way[metric]['high']:.1f}]" for metric in METRICS
        )
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} | {way['seconds']:.0f} |")
    context = report["context"]
    lines += [
        "",
        f"{len(report['predictions'])} questions, 95 % bootstrap intervals; "
        f"{context['tokens_per_question']:.0f} tokens -> {context['slots_per_question']:.1f} slots "
        f"a question (x{context['compression_rate']:.1f}); {report['refinement_steps']:.2f} "
        f"refinement steps a slot and "
        f"layer with adaptive gates. {report['machine']}",
    ]
    return "\n".join(lines)


def machine() -> str:
    """The processor, or the accelerator, a report was made on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def main(
    model: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    data: Annotated[Path, typer.Option(help="JSON Lines file of questions.")] = Path(
        "../shared/data/eval/squad.jsonl.gz"
    ),
    num_questions: Annotated[int, typer.Option("-n", help="The first this many are asked.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Questions at a time.")] = 16,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> None:
    """Answers SQuAD questions in six ways and reports EM and F1."""
    processor = ArcAlignerProcessor.from_pretrained(model, trust_remote_code=False)
    aligner = ArcAlignerForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    rows = read_rows(data)[:num_questions]
    report = {"model": model, "data": data.name, "machine": machine()}
    report |= run(aligner, processor, rows, batch_size)
    temporary = output.with_name(f"{output.name}.tmp")
    temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, output)
    typer.echo(markdown_table(report))


if __name__ == "__main__":
    typer.run(main)
