"""Answers, logits and depths are those that were recorded before the code was restructured (see README.md)."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lancedb")
pytest.importorskip("fastapi")

from golden import cases
from golden.make import about, read

# On the machine that recorded them, numbers differ only by the order of sums; on other CPUs kernels differ too.
IS_EXACT = os.environ.get("ARCALIGNER_GOLDEN_EXACT") == "1"
LOGITS = 1e-5 if IS_EXACT else 1e-3  # relative to the largest
MARGIN = 1e-4 if IS_EXACT else 1e-3  # an answer with a nearer second best token may be another one
OTHERS = 1e-4 if IS_EXACT else 1e-3  # kernels alone change norms of gradients by 2.4e-4, and scores by 1.1e-4
SCALE = 30  # about the largest logit; a margin is a difference of scores, which include the copy bonus


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def differences(expected: Any, actual: Any, margin: float | None = None, place: str = "") -> Iterator[str]:
    """Differences between two records, each with its place. `margin` is the margin of the enclosing record."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() == actual.keys() == {"ids", "values"}:
            yield from logit_differences(expected, actual, place)
            return
        margin = expected.get("margin", margin)
        for name in sorted(expected.keys() | actual.keys()):
            if name in ("answer", "raised", "margin") and margin is not None and margin <= MARGIN:
                continue
            if name == "margin" and isinstance(margin, float) and isinstance(actual.get(name), float):
                if not math.isclose(margin, actual[name], abs_tol=SCALE * LOGITS):
                    yield f"{place}/margin: {actual[name]} instead of {margin}"
            elif name not in expected or name not in actual:
                yield f"{place}/{name}: {'new' if name in actual else 'missing'}"
            else:
                yield from differences(expected[name], actual[name], margin, f"{place}/{name}")
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for number, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, margin, f"{place}/{number}")
    elif isinstance(expected, float) and isinstance(actual, float | int):
        if not abs(expected - actual) <= OTHERS * max(1.0, abs(expected)):
            yield f"{place}: {actual} instead of {expected}"
    elif expected != actual:
        yield f"{place}: {actual!r} instead of {expected!r}"


def logit_differences(expected: dict, actual: dict, place: str) -> Iterator[str]:
    """Differences between the largest logits of a position: other values, or a token that is no longer there."""
    scale = max(map(abs, expected["values"]))
    values = dict(zip(actual["ids"], actual["values"], strict=True))
    for token, value in zip(expected["ids"], expected["values"], strict=True):
        other = values.get(token, min(actual["values"]))  # it may have swapped with one that is not recorded
        if abs(other - value) > LOGITS * scale:
            yield f"{place}: token {token} has {other} instead of {value}, by {abs(other - value) / scale:.1e}"


def check(expected: Any, actual: Any, name: str) -> None:
    different = list(differences(as_json(expected), as_json(actual), place=name))
    assert not different, "\n".join([f"{len(different)} differences:", *different[:20]])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def as_selected_then() -> Iterator[None]:
    with cases.earlier_selection():
        yield


# The tiny checkpoints, which were saved by the code of that commit


@pytest.fixture(scope="module")
def loaded_tiny() -> dict[str, cases.Loaded]:
    with cases.tiny_models():
        return {name: cases.load_tiny(name) for name in ("joint", "separate")}


@pytest.fixture
def tiny(loaded_tiny) -> Iterator[dict[str, cases.Loaded]]:
    """The tiny checkpoints; their encoders are loaded on first use, while the names are known."""
    with cases.tiny_models():
        yield loaded_tiny


@pytest.fixture(scope="module")
def tiny_records() -> dict[str, Any]:
    return read("tiny")["records"]


@pytest.fixture
def saved(tmp_path) -> Path:
    """A copy of the saved files, so that tests write nothing next to them."""
    return shutil.copytree(cases.SAVED, tmp_path / "saved")


@pytest.mark.parametrize("name", ["joint", "separate"])
def test_saved_checkpoint_answers_equal(tiny, tiny_records, name):
    """Covers all gate modes, padding, beams, cached passages, a training step and the pipeline."""
    check(tiny_records[name], cases.tiny_cases(tiny[name], name), name)


def test_saved_corpus_finds_equal(tiny, tiny_records, saved):
    check(tiny_records["corpus"], cases.found_in_corpus(tiny["separate"], saved / "corpus"), "corpus")


def test_server_of_corpus_equal(tiny, tiny_records, saved):
    loaded = tiny["separate"]._replace(rows=[*cases.TINY_ROWS] * 2)
    check(tiny_records["server"], cases.served(loaded, saved / "corpus", top_k=2), "server")


def test_cached_files_answer_equal(tiny, tiny_records, saved):
    """With other versions of libraries, which are part of a file's key, passages are computed again."""
    expected = tiny_records["cached"]
    actual = cases.cached_passages(tiny["separate"], saved / "cached")
    if about() != read("tiny")["about"]:
        counts = expected.keys() & {"hits", "loads", "misses", "cached"}
        expected, actual = ({k: v for k, v in record.items() if k not in counts} for record in (expected, actual))
    check(expected, actual, "cached")


# The shipped checkpoint


@pytest.fixture(scope="module")
def shipped() -> cases.Loaded:
    return cases.load(cases.SHIPPED)


@pytest.fixture(scope="module")
def shipped_records() -> dict[str, Any]:
    return read("shipped")["records"]


@pytest.mark.default_backbone
def test_shipped_checkpoint_answers_equal(shipped, shipped_records):
    """A few questions of each section get the recorded answers."""
    for name in cases.SHIPPED_CASES:
        if name in cases.QUICK:
            check(shipped_records[name], cases.SHIPPED_CASES[name](shipped), name)


@pytest.mark.golden_full
@pytest.mark.default_backbone
@pytest.mark.parametrize("section", dict.fromkeys(name.partition("/")[0] for name in cases.SHIPPED_CASES))
def test_shipped_section_answers_equal(shipped, shipped_records, section):
    """All questions of a section get the recorded answers."""
    names = [name for name in cases.SHIPPED_CASES if name.partition("/")[0] == section]
    actual = {name: cases.SHIPPED_CASES[name](shipped) for name in names}
    check({name: shipped_records[name] for name in names}, actual, "")


@pytest.mark.golden_full
@pytest.mark.default_backbone
def test_remote_code_answers_equal(shipped_records):
    check(shipped_records["remote"], cases.remote(), "remote")


def test_golden_files_are_complete(shipped_records):
    """Each case has a record, and each record has a case."""
    assert shipped_records.keys() == {*cases.SHIPPED_CASES, "remote"}
