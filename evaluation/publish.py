"""Publishes a run: results and card of the checkpoint, `docs/results.md`, and the README's table.

    python -m arcaligner.evaluation.publish --run runs/evaluation --figures runs/figures

No number in these is typed by hand; each comes from the run's answers, or from the data beside a figure. The speed is
published by `python -m arcaligner.benchmarks.report`.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..configuration_arcaligner import ArcAlignerConfig
from ..files import run_command, write_whole
from ..model_card import RESULTS_FILE, write_model_card
from .methods import METHODS, find_method, fingerprint
from .results import results_page, write_results
from .runs import answer_files

ROOT = Path(__file__).parents[1]
DEFAULT_CHECKPOINT = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
README_SETS = ("SQuAD", "NaturalQA", "HotpotQA", "PopQA_longtail")
README_METHODS = ("naive", "llmlingua", "no_lora", "no_recursion", "arcaligner", "standard_rag", "full_text_lora")
MARKS = "<!-- results: evaluation/publish.py -->", "<!-- end of results -->"
SPEED_FIGURE = "latency"  # on the page of speed, the others on that of results
INTRODUCTION = """\
# Results

The shipped aligner and what it is compared with, written by `python -m arcaligner.evaluation.publish` from the answers
of `python -m arcaligner evaluate --recipe smollm2_135m`: the same frozen SmolLM2-135M-Instruct, chat template,
questions and greedy decoding (24 new tokens) in all rows; "fine-tuned" adds a LoRA that reads text.
`evaluation/recipes/smollm2_135m.yaml` says which passages are read.
"""


def publish(run: Path, checkpoint: Path, figures: Path | None, root: Path) -> None:
    """Writes all of it; pictures are copied to `docs/figures`."""
    check_weights(run, checkpoint)
    results = write_results(run)
    shown = copy_figures(figures, root / "docs" / "figures") if figures else {}
    lines = [line for name, each in shown.items() if name != SPEED_FIGURE for line in each]
    page = "\n".join([INTRODUCTION, results_page(results), *(["## Figures", "", *lines] if lines else [])])
    readme = with_block((root / "README.md").read_text(encoding="utf-8"), readme_table(results), MARKS)
    write_whole(checkpoint / RESULTS_FILE, (run / RESULTS_FILE).read_text(encoding="utf-8"))
    is_ours = checkpoint.resolve().is_relative_to(root.resolve())
    name = checkpoint.resolve().relative_to(root.resolve()).as_posix() if is_ours else None
    write_model_card(ArcAlignerConfig.from_pretrained(checkpoint), checkpoint, name=name)
    write_whole(root / "docs" / "results.md", page.rstrip() + "\n")
    write_whole(root / "README.md", readme)


def check_weights(run: Path, checkpoint: Path) -> None:
    """Refuses a run of another aligner.

    Raises:
        `ValueError`: with both fingerprints.
    """
    expected = fingerprint(str(checkpoint))
    for file in answer_files(run):
        if find_method(file.method).checkpoint == "aligner" and (found := file.settings()["weights"]) != expected:
            raise ValueError(f"{file.path} was answered by weights {found}, {checkpoint} has {expected}.")


def readme_table(results: dict[str, Any]) -> str:
    """F1 and EM of the README's sets and methods in one table."""
    sets = {name: results["sets"][name] for name in README_SETS if name in results["sets"]}
    lines = [f"| F1 / EM | {' | '.join(sets)} |", "|---" * (1 + len(sets)) + "|"]
    for title in (METHODS[name].title for name in README_METHODS):
        found = [each["methods"].get(title) for each in sets.values()]
        if any(found):
            cells = [f"{each['f1'][0]:.1f} / {each['em'][0]:.1f}" if each else "-" for each in found]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    rates = ", ".join(f"{name} x{each['compression_rate']:.0f}" for name, each in sets.items())
    counts = sorted({each["questions"] for each in sets.values()})
    lines += [
        "",
        f"Percent, {' to '.join(map(str, counts))} questions per set; EM is non-strict. Tokens per slot: {rates}.",
    ]
    return "\n".join(lines)


def with_block(text: str, block: str, marks: tuple[str, str]) -> str:
    """`text` with the part between two marks replaced.

    Raises:
        `ValueError`: the marks are not there once each, in order.
    """
    start, end = marks
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"Expected {start!r} and behind it {end!r}, each once, to know where the tables go.")
    return f"{text.partition(start)[0]}{start}\n{block}\n{end}{text.partition(end)[2]}"


def copy_figures(source: Path, folder: Path) -> dict[str, list[str]]:
    """Copies the SVG and data of each analysis; by its name, the Markdown lines that show it with its caption."""
    lines = {}
    folder.mkdir(parents=True, exist_ok=True)
    for data in sorted(source.glob("*.json")):
        picture = data.with_suffix(".svg")
        if picture.exists():
            for path in (data, picture):
                if path.resolve().parent != folder.resolve():
                    shutil.copyfile(path, folder / path.name)
            caption = json.loads(data.read_text(encoding="utf-8"))["reading"]
            lines[data.stem] = [f"![{data.stem.replace('_', ' ')}](figures/{picture.name})", "", caption, ""]
    return lines


def main(
    run: Annotated[Path, typer.Option(help="Folder of an evaluation.")] = Path("runs/evaluation"),
    checkpoint: Annotated[Path, typer.Option(help="The aligner that was measured.")] = DEFAULT_CHECKPOINT,
    figures: Annotated[Path | None, typer.Option(help="Folder of the analyses.")] = None,
) -> None:
    """Writes results, card, docs/results.md and the README's table from a run."""
    publish(run, checkpoint, figures, ROOT)


if __name__ == "__main__":
    run_command(main)
