"""Numbers that are written by hand equal those of the results, the shipped checkpoints and the code.

Tables between marks are written by `evaluation/publish.py`; `tests/evaluation/test_publish.py` compares them.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from arcaligner.apps.cli.demo import demo_questions
from arcaligner.evaluation.analyses.speed import CACHED_REPORT, first_token_ms

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
CONFIG = json.loads((SHIPPED / "config.json").read_text("utf-8"))
GATED = json.loads((SHIPPED.with_name("arcaligner-smollm2-135m-gated") / "config.json").read_text("utf-8"))
PROCESSOR = json.loads((SHIPPED / "processor_config.json").read_text("utf-8"))
SETS = json.loads((SHIPPED / "results.json").read_text("utf-8"))["sets"]
CACHED_TIMES = json.loads((ROOT / "docs" / "figures" / CACHED_REPORT).read_text("utf-8"))
README_SETS = ("SQuAD", "Natural Questions", "HotpotQA", "PopQA_longtail")
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


def f1(name: str, method: str = "arcaligner") -> str:
    return f"{SETS[name]['methods'][method]['f1'][0]:.1f}"


def f1s(method: str = "arcaligner") -> list[str]:
    return [f1(name, method) for name in README_SETS]


def distances(method: str, names: tuple[str, ...] = README_SETS) -> list[str]:
    """The least and the greatest distance between the F1 of ArcAligner and of a method, in whole points."""
    points = [abs(float(f1(name)) - float(f1(name, method))) for name in names]
    return [f"{bound(points):.0f}" for bound in (min, max)]


def tokens_per_slot(method: str) -> list[float]:
    return [results["methods"][method]["compression_rate"] for results in SETS.values() if method in results["methods"]]


def cached_ms(arm: str) -> str:
    """The time to the first token with five passages, in the comparison of cached passages."""
    (size,) = (size for size in CACHED_TIMES["sizes"] if size["k"] == 5)
    return f"{first_token_ms(size, arm):,.0f}"


def bytes_per_slot(size: int) -> int:
    """Bytes of keys and values in all layers for one slot."""
    text = CONFIG["text_config"]
    return text["num_hidden_layers"] * 2 * text["num_key_value_heads"] * text["head_dim"] * size


SEGMENTS = [f"{bound(tokens_per_slot('arcaligner_xsegment')):.1f}" for bound in (min, max)]
THRESHOLD = f"{CONFIG['answerability_threshold']:.2f}"
LONGEST = str(PROCESSOR["max_passage_tokens"])
CACHED = [str(round(bytes_per_slot(4) / 1000))]
OTHERS = [
    f1 for method in ("arcaligner", "arcaligner_x4", "arcaligner_x8", "arcaligner_xsegment") for f1 in f1s(method)
]
# A page, a pattern that its text has to match (line breaks are spaces, links are their text), and the numbers in the
# match.
TYPED = [
    (
        "README.md",
        rf"fine-tuned reader is {NUMBER} to {NUMBER} points above that of the default on SQuAD and Natural Questions, "
        rf"and {NUMBER} point below",
        [
            *distances("full_text_lora", README_SETS[:2]),
            *{
                f"{abs(float(f1(name, 'as_needed')) - float(f1(name, 'full_text_lora'))):.0f}"
                for name in README_SETS[2:]
            },
        ],
    ),
    (
        "README.md",
        f"500 other questions of SQuAD the default's F1 is {NUMBER} instead of {NUMBER}",
        [f1("SQuAD, more"), f1("SQuAD")],
    ),
    (
        "README.md",
        rf"after {NUMBER} ms from cached slots; .*? not cached, .*? after {NUMBER} ms\. .*? of text is faster, "
        f"{NUMBER} ms",
        [cached_ms(arm) for arm in ("slots_x2_top_ranked", "text", "text_same_set")],
    ),
    ("README.md", f"min_confidence={NUMBER}` .*? is below {NUMBER}", [THRESHOLD, THRESHOLD]),
    ("README.md", f"Documents of more than {NUMBER} tokens", [LONGEST]),
    ("README.md", f"the sentence encoder's vector: {NUMBER} bytes", [str(2 * CONFIG["encoder_hidden_size"])]),
    ("docs/corpus.md", f"A slot takes {NUMBER} bytes", [str(2 * CONFIG["encoder_hidden_size"])]),
    ("docs/corpus.md", f"a slot of the shipped aligner take {NUMBER} KB in float32", CACHED),
    ("docs/server.md", f"a slot of the shipped aligner takes {NUMBER} KB", CACHED),
    ("docs/formats.md", f"a slot of the shipped aligner take {NUMBER} KB in float32", CACHED),
    ("docs/server.md", f"document of more than {NUMBER} tokens is cut", [LONGEST]),
    (
        "docs/extensions.md",
        f"more than {NUMBER} tokens .* at most {NUMBER} ",
        [LONGEST, str(PROCESSOR["passage_tokens"])],
    ),
    ("docs/evaluation.md", f"min_confidence={NUMBER}`.* falls from {NUMBER} to", [THRESHOLD, f1("SQuAD")]),
    (
        "docs/results.md",
        f"F1 is {NUMBER} to {NUMBER} points below .*? and {NUMBER} to {NUMBER} points above it on HotpotQA and PopQA.*?"
        f"F1 is {NUMBER} to {NUMBER} points above",
        [
            *distances("full_text_lora", README_SETS[:2]),
            *distances("full_text_lora", README_SETS[2:]),
            *distances("truncated_copying_x2"),
        ],
    ),
    ("docs/paper.md", f"{NUMBER} to {NUMBER} tokens per slot, depending on the set", SEGMENTS),
    ("docs/paper.md", f"a sentence has {NUMBER} to {NUMBER} tokens", SEGMENTS),
    (
        "docs/paper.md",
        r"gates on layers (.*?) \(counted from 0\) and allows",
        [", ".join(map(str, GATED["gate_layers"])).replace(", 20", " and 20")],
    ),
    ("docs/decisions.md", r"as shipped \| " + r" \| ".join([NUMBER] * 4), f1s()),
    (
        "CHANGELOG.md",
        "".join(
            rf"\| {tokens} \| " + r" \| ".join([rf"{NUMBER} \([\d.]+\)"] * 4) + r" \|.*?"
            for tokens in (r"2 \(default\)", "4", "8", "a sentence")
        ),
        OTHERS,
    ),
    ("CHANGELOG.md", f"With `min_confidence={NUMBER}` the aligner abstains", [THRESHOLD]),
]


@pytest.mark.parametrize(("page", "pattern", "numbers"), TYPED, ids=range(len(TYPED)))
def test_typed_numbers_are_current(page, pattern, numbers):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join((ROOT / page).read_text("utf-8").split()))
    assert (match := re.search(pattern, text)), pattern
    assert list(match.groups()) == numbers


def test_number_words_are_current():
    """Numbers that pages write as words: questions of the demo, layers with gates, parts of the training."""
    readme, training = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/training.md"))
    num_questions = sum(map(len, demo_questions("not in the text").values()))
    parts = [part for part in yaml.safe_load_all((SHIPPED / "recipe.yaml").read_text("utf-8")) if part]
    assert (num_questions, len(GATED["gate_layers"]), len(parts)) == (14, 5, 15)
    assert "answers fourteen sample questions" in readme and "trained in fifteen parts" in training
    assert "trained gates on five layers" in " ".join(readme.split())


def test_positions_saved_are_measured():
    """The first number of the README: positions saved with two tokens per slot and with a sentence."""
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    least, most = re.search(f"take {NUMBER} to about {NUMBER} times fewer positions", text).groups()
    assert round(min(tokens_per_slot("arcaligner"))) == int(least)
    measured = tokens_per_slot("arcaligner_xsegment")
    assert round(sum(measured) / len(measured), -1) == int(most)
