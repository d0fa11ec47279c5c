"""The vLLM benchmark asks all arms the same questions and summarizes their answers. Needs no vLLM."""

from types import SimpleNamespace

import pytest
from conftest import pipeline_of

from arcaligner.apps.server import vllm_engine
from arcaligner.apps.server.engine import Engine
from arcaligner.benchmarks import vllm

ROWS = [{"question": f"Q{number}?", "passages": [{"title": "", "text": f"P{number}."}]} for number in range(9)]


def test_questions_have_their_own_passage():
    drawn = [vllm.draw(ROWS, 5, number) for number in range(20)]
    for number, row in enumerate(drawn):
        texts = [passage["text"] for passage in row["passages"]]
        assert len(set(texts)) == 5 and f"P{number % 9}." in texts and row == vllm.draw(ROWS, 5, number)
    assert len({row["passages"][0]["text"] for row in drawn}) > 3  # otherwise text would find its prefix in the cache


def test_precomputed_passages_are_cached(separate, tmp_path):
    """A request after `precompute` finds all of its passages in the cache of each engine."""
    engines = [Engine(pipeline_of(*separate), folder=tmp_path) for _ in range(2)]
    for engine in engines:
        engine.weights_passages = False
    arms = SimpleNamespace(front=engines[0], engine=engines[1], processor=separate[1], tokens_per_slot="segment")
    arms.slots_body, arms.request = lambda row: None, lambda row: vllm.Arms.request(arms, row)
    row = {"question": "Who wrote it?", "passages": [{"title": "", "text": f"Ada wrote {n} pages."} for n in (1, 2)]}
    try:
        vllm.Arms.precompute(arms, row)
        assert [engine.submit(arms.request(row)).result().num_cached for engine in engines] == [2, 2]
    finally:
        for engine in engines:
            engine.close()


def test_arms_answer_in_turns(monkeypatch):
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(vllm.time, "perf_counter", lambda: float(next(clock)))

    def arm(name, answer):
        return lambda rows, clients: calls.append((name, clients, [row["question"] for row in rows])) or [answer] * 4

    by_name = {
        "slots": arm("slots", (0.5, "Ada")),
        "pytorch": arm("pytorch", (2.0, "Ada")),
        "text": arm("text", (9.0, "Bob")),
    }
    used = iter(range(1000))
    arms = SimpleNamespace(by_name=by_name, precompute=lambda row: None, processor_seconds=lambda name: next(used))
    report = vllm.measure(arms, ROWS, size=2, clients=3, requests=4, rounds=2, first=0)
    assert [name for name, _, _ in calls] == ["slots", "pytorch", "text"] * 2
    assert calls[0][2] == calls[1][2] == calls[2][2] == [f"Q{number}?" for number in range(4)] != calls[3][2]
    assert report["arms"]["slots"] == {
        "answers_per_second": 4.0,
        "processor_seconds": 0.25,
        "first_token": 0.5,
        "same_as_pytorch": 1.0,
    }
    assert report["arms"]["text"]["same_as_pytorch"] == 0.0 and report["requests"] == 8


def test_first_tokens_of_questions_together(monkeypatch):
    """The questions of a batch are sent at once, the last first token counts, and each text has its own salt."""
    calls, used = [], iter(range(1000))

    def arm(name, seconds):
        return lambda rows, *args: calls.append((name, args, rows)) or [(duration, "A") for duration in seconds]

    by_name = {"slots": arm("slots", [0.5, 1.0, 0.25]), "text": arm("text", [9.0, 25.0, 8.0])}
    arms = SimpleNamespace(by_name=by_name, precompute=lambda row: None, processor_seconds=lambda name: next(used))
    report = vllm.measure_first_tokens(arms, ROWS, size=2, questions=3, rounds=2, first=4)
    assert report["arms"] == {
        "slots": {"first_tokens": 1.0, "processor_seconds": 1.0},
        "text": {"first_tokens": 25.0, "processor_seconds": 1.0},
    }
    assert [(name, args) for name, args, _ in calls] == [("slots", (3, 1)), ("text", (3, 1))] * 2
    assert len({row["salt"] for _, _, rows in calls[::2] for row in rows}) == 6 and calls[0][2] == calls[1][2]


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (vllm.parse_batches, "5:0", "`--batches` is '5:0'; expected"),
        (vllm.parse_batches, "5", "`--batches` is '5'; expected"),
        (vllm.parse_arms, "slots,files", "`--arms` has 'files'; expected one or more of slots, front, text, pytorch"),
    ],
)
def test_wrong_arms_are_named(parse, text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_missing_vllm_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm, "find_vllm", lambda: None)
    with pytest.raises(ImportError, match="make vllm"):
        vllm.main(output=tmp_path)


def test_environment_of_vllm_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv("ARCALIGNER_VLLM", raising=False)
    monkeypatch.setattr(vllm_engine, "ROOT", tmp_path)
    assert vllm_engine.find_vllm() is None
    (tmp_path / ".vllm" / "bin").mkdir(parents=True)
    (tmp_path / ".vllm" / "bin" / "python").touch()
    assert vllm_engine.find_vllm() == str(tmp_path / ".vllm" / "bin" / "python")
    monkeypatch.setenv("ARCALIGNER_VLLM", "/other/python")
    assert vllm_engine.find_vllm() == "/other/python"
