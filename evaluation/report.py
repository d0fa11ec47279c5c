"""What compression costs: EM and F1 of several ways to answer the same questions with the same frozen model.

    python -m arcaligner.evaluation.report --aligner CHECKPOINT --output runs/report
    python -m arcaligner.evaluation.report --aligner CHECKPOINT --output runs/report \\
        --full-text-lora runs/smollm2_135m/full_text --projector-only runs/projector_only/2_grounding

    closed book       Question: ...
    full text         Refer to the background document: <text> / Question: ...
    full text, LoRA   the same, the backbone fine-tuned to answer so: the honest upper bound
    projector only    Refer to the background document: <slots> / Question: ..., from a projector alone (xRAG's design)
    ours (off)        the same with this aligner, one pass
    ours (adaptive)   the gates decide: the paper's ArcAligner
    ours (always)     every slot takes all refinement steps
    empty slot        this aligner with the slot of no passage: what it says unread

A set and a way make one file with every prediction in the output folder; a second run, after a kill too, does what
is missing, and several may run at once with other `--sets` or `--only`. Then `report.md` and `results.json` are
written, from all files that are there; the model card reads the latter. EM is non-strict (`evaluation/metrics.py`);
intervals are 95 % bootstrap intervals over questions.
"""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ..defaults_arcaligner import resolve_base_model
from ..model_card_arcaligner import METRIC_TITLES, RESULTS_FILE, is_hub_id
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.checkpoint_folder import weights_digest
from ..train.corpora import read_rows
from ..train.saving import write_whole
from .answering import Batch, Row, batches_by_length, closed_book_text, full_text, predict, slot_inputs, text_inputs
from .metrics import METRICS, bootstrap_interval

# Name in the tables -> file. HotpotQA is asked with its two gold passages.
SETS = {"SQuAD": "squad", "NQ": "nq", "HotpotQA": "hotpotqa", "PopQA": "popqa_longtail"}
GATE_MODES = {"ours (off)": "off", "ours (adaptive)": "adaptive", "ours (always)": "always", "empty slot": "adaptive"}
WAYS = ("closed book", "full text", "full text, LoRA", "projector only", *GATE_MODES)


@dataclass
class Checkpoints:
    """What answers: an aligner; where given, a LoRA of its backbone that reads text, and a projector-only aligner."""

    aligner: str
    full_text_lora: str | None = None
    projector_only: str | None = None

    def ways(self) -> dict[str, str]:
        """Each way to answer that can be measured, and the checkpoint it needs."""
        ways = {"closed book": self.aligner, "full text": self.aligner}
        if self.full_text_lora:
            ways["full text, LoRA"] = self.full_text_lora
        if self.projector_only:
            ways["projector only"] = self.projector_only
        return ways | dict.fromkeys(GATE_MODES, self.aligner)


def read_set(path: Path, num_questions: int) -> list[Row]:
    """The first `num_questions` rows of a file, with their gold passages where the file tells which these are."""
    rows = read_rows(path)[:num_questions]
    for row in rows:
        if gold := (row.get("meta") or {}).get("gold"):
            row["passages"] = [row["passages"][index] for index in gold]
    return rows


def load_model(way: str, checkpoint: str, aligner: str):
    """The model and processor that answer in a way, ready to generate."""
    is_lora = way == "full text, LoRA"
    source = aligner if is_lora else checkpoint
    processor = ArcAlignerProcessor.from_pretrained(source)
    if is_lora:
        name = ArcAlignerForCausalLM.config_class.from_pretrained(aligner).base_model_name_or_path
        base = AutoModelForCausalLM.from_pretrained(resolve_base_model(name), dtype=torch.float32)
        return PeftModel.from_pretrained(base, checkpoint).merge_and_unload().eval(), processor
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.config.gate_mode = GATE_MODES.get(way, "off")
    return model, processor


def make_inputs(way: str, processor: ArcAlignerProcessor, rows: list[Row]):
    """The prompts of a way, (batch, seq_len)."""
    if way == "closed book":
        return text_inputs(processor, rows, closed_book_text)
    if way.startswith("full text"):
        return text_inputs(processor, rows, full_text)
    return slot_inputs(processor, rows, with_passages=way != "empty slot")


@torch.inference_mode()
def refinement_steps(model, batches: list[Batch]) -> float:
    """Refinement steps of a slot at a layer, on average, in the model's gate mode."""
    depths = torch.cat([model.model(**inputs).recursion_depth.flatten() for _, inputs in batches])
    return depths[depths >= 0].float().mean().item()


def measure(way: str, checkpoint: str, aligner: str, rows: list[Row], batch_size: int, device: str) -> dict[str, Any]:
    """One way over the rows of one set: predictions, scores of each metric, seconds, compression."""
    model, processor = load_model(way, checkpoint, aligner)
    model.to(device)
    batches = [
        (indices, make_inputs(way, processor, [rows[index] for index in indices]).to(device))
        for indices in batches_by_length(rows, batch_size)
    ]
    predictions, seconds = predict(model, processor, batches, way)
    result: dict[str, Any] = {
        "checkpoint": checkpoint,
        "fingerprint": fingerprint(checkpoint),
        "machine": machine(device),
        "seconds": seconds,
        "prompt_tokens": sum(int(inputs["attention_mask"].sum()) for _, inputs in batches),
    }
    if way == "ours (adaptive)":
        token_id = model.config.context_token_id
        num_slots = sum(int((inputs["input_ids"] == token_id).sum()) for _, inputs in batches)
        texts = [passage["text"] for row in rows for passage in row["passages"]]
        num_tokens = sum(len(ids) for ids in processor.tokenizer(texts, add_special_tokens=False)["input_ids"])
        result |= {"passage_tokens": num_tokens, "slots": num_slots}
        result["refinement_steps"] = refinement_steps(model, batches)
    result["rows"] = [
        {"id": row["id"], "question": row["question"], "answers": row["answers"], "prediction": text}
        | {name: metric(text, row["answers"]) for name, metric in METRICS.items()}
        for row, text in zip(rows, predictions, strict=True)
    ]
    return result


def summarize(results: dict[str, dict[str, dict]]) -> dict[str, Any]:
    """`{set: {way: result}}` to what the model card and the tables show: means and intervals, in percent."""
    sets: dict[str, dict] = {}
    for name, ways in results.items():
        sets[name] = {"questions": min(len(result["rows"]) for result in ways.values()), "methods": {}}
        for way, result in ways.items():
            num_rows = len(result["rows"])
            scores = {metric: [100 * row[metric] for row in result["rows"]] for metric in METRICS}
            sets[name]["methods"][way] = {
                metric: [sum(values) / num_rows, *bootstrap_interval(values)] for metric, values in scores.items()
            } | {"prompt_tokens": result["prompt_tokens"] / num_rows, "seconds": result["seconds"]}
            if "slots" in result:
                sets[name]["compression_rate"] = result["passage_tokens"] / result["slots"]
                sets[name]["slots_per_question"] = result["slots"] / num_rows
                sets[name]["refinement_steps"] = result["refinement_steps"]
    machines = sorted({result["machine"] for ways in results.values() for result in ways.values()})
    return {
        "machine": "; ".join(machines),
        "questions": min(entry["questions"] for entry in sets.values()),
        "sets": sets,
    }


def markdown(summary: dict[str, Any]) -> str:
    """A table a metric, one of the costs: ways down, sets across."""
    sets = summary["sets"]
    ways = [way for way in WAYS if any(way in entry["methods"] for entry in sets.values())]
    lines = []
    for metric in ("f1", "em", "em_raw"):
        lines += _table(
            METRIC_TITLES[metric],
            ways,
            sets,
            lambda values, metric=metric: "{:.1f} [{:.1f}, {:.1f}]".format(*values[metric]),
        )
    lines += _table("prompt tokens and slots (seconds)", ways, sets, "{prompt_tokens:.0f} ({seconds:.0f} s)".format_map)
    for name, entry in sets.items():
        if "compression_rate" in entry:
            lines.append(
                f"- {name}: x{entry['compression_rate']:.1f} fewer rows ({entry['slots_per_question']:.1f} slots a "
                f"question), {entry['refinement_steps']:.2f} refinement steps a slot and layer with adaptive gates"
            )
    counts = ", ".join(f"{name} {entry['questions']}" for name, entry in sets.items())
    lines += ["", f"Questions: {counts}; 95 % bootstrap intervals. {summary['machine']}", ""]
    return "\n".join(lines)


def _table(title: str, ways: list[str], sets: dict[str, dict], show: Callable[[dict], str]) -> list[str]:
    """Lines of a table, `show` making a cell of the numbers of a way on a set."""
    lines = [f"| {title} | {' | '.join(sets)} |", "|---|" + "---|" * len(sets)]
    for way in ways:
        cells = [show(entry["methods"][way]) if way in entry["methods"] else "" for entry in sets.values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return [*lines, ""]


def machine(device: str) -> str:
    """The processor, or the accelerator, a report was made on."""
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def fingerprint(checkpoint: str) -> str:
    """What tells one checkpoint from another: the hash of a folder's weights, the name of one on the Hub.

    Raises:
        `ValueError`: neither of both.
    """
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    if files:
        return weights_digest(files)[:16]
    if is_hub_id(checkpoint):
        return checkpoint
    raise ValueError(f"There is no checkpoint in {checkpoint}: no weights (*.safetensors). Name a finished folder.")


def result_path(output: Path, name: str, way: str) -> Path:
    """The file of a set and a way."""
    return output / SETS[name] / f"{way.translate(str.maketrans(' ', '_', '(),'))}.json"


def read_results(output: Path) -> dict[str, dict[str, dict]]:
    """`{set: {way: result}}` of all files there are."""
    paths = {name: {way: result_path(output, name, way) for way in WAYS} for name in SETS}
    results = {
        name: {way: json.loads(path.read_text(encoding="utf-8")) for way, path in ways.items() if path.exists()}
        for name, ways in paths.items()
    }
    return {name: ways for name, ways in results.items() if ways}


def check_results(output: Path, ways: dict[str, str], questions: dict[str, list[Row]]) -> None:
    """Refuses an output folder with answers of other checkpoints, or to other questions.

    Raises:
        `ValueError`: the file, what it holds and what was expected.
    """
    fingerprints = {checkpoint: fingerprint(checkpoint) for checkpoint in set(ways.values())}
    for name, found in read_results(output).items():
        for way, result in found.items():
            is_other = way in ways and result["fingerprint"] != fingerprints[ways[way]]
            asked = [row["id"] for row in questions.get(name, result["rows"])]
            if is_other or asked != [row["id"] for row in result["rows"]]:
                expected = f"{len(asked)} of {ways.get(way, result['checkpoint'])} as it is now"
                raise ValueError(
                    f"{result_path(output, name, way)} holds {len(result['rows'])} answers of {result['checkpoint']}, "
                    f"not the {expected}. Name another output folder, or delete the file to answer anew."
                )


def main(
    aligner: Annotated[str, typer.Option(help="Aligner checkpoint, a folder or a Hub id.")],
    output: Annotated[Path, typer.Option(help="Folder for answers, tables and results.json.")],
    full_text_lora: Annotated[str | None, typer.Option(help="LoRA that reads text, of train/full_text.py.")] = None,
    projector_only: Annotated[str | None, typer.Option(help="Aligner trained without LoRA.")] = None,
    data: Annotated[Path, typer.Option(help="Folder of the sets' files.")] = Path("../shared/data/eval"),
    sets: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(SETS)}; can be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Ways to answer; can be repeated. Default: all.")] = None,
    num_questions: Annotated[int, typer.Option("-n", min=1, help="The first this many of a set are asked.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Questions at a time.")] = 16,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
) -> None:
    """Answers the questions of each set in each way and writes the tables."""
    ways = Checkpoints(aligner, full_text_lora, projector_only).ways()
    for kind, chosen, known in (("set", sets, SETS), ("way", only, ways)):
        if unknown := set(chosen or ()) - set(known):
            raise typer.BadParameter(f"Unknown {kind} {sorted(unknown)}; known: {', '.join(known)}.")
    questions = {name: read_set(data / f"{SETS[name]}.jsonl.gz", num_questions) for name in sets or SETS}
    check_results(output, ways, questions)
    for name, rows in questions.items():
        for way in only or ways:
            path = result_path(output, name, way)
            if not path.exists():
                result = measure(way, ways[way], aligner, rows, batch_size, device)
                write_whole(path, json.dumps(result, indent=1, ensure_ascii=False))
    summary = summarize(read_results(output))
    write_whole(output / RESULTS_FILE, json.dumps(summary, indent=1))
    write_whole(output / "report.md", markdown(summary))
    typer.echo(markdown(summary))


if __name__ == "__main__":
    typer.run(main)
