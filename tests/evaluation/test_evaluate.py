"""An evaluation answers each question with each method once, goes on after a kill, and skips what is not here; answers
that do not belong together are refused."""

import json
import logging
from unittest.mock import Mock

import pytest
from conftest import random_aligner
from peft import LoraConfig, get_peft_model
from training_rows import question_rows, write_rows
from transformers import AutoModelForCausalLM

from arcaligner.evaluation import answering
from arcaligner.evaluation.evaluate import evaluate, load_rows
from arcaligner.evaluation.methods import METHODS
from arcaligner.evaluation.metrics import METRICS
from arcaligner.evaluation.runs import AnswerFile, row_digest
from arcaligner.evaluation.settings import read_settings
from arcaligner.train.cocom import CocomArguments, CompressingModel

pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def data(tmp_path):
    """Four questions of SQuAD, the same of HotpotQA with a second passage, and two of Natural Questions without any."""
    (folder := tmp_path / "data").mkdir()
    rows, other = question_rows(4), {"title": "", "text": "This is one. Not that."}
    write_rows(folder / "squad.jsonl.gz", rows)
    write_rows(folder / "hotpotqa.jsonl", [row | {"passages": [other, *row["passages"]]} for row in rows])
    write_rows(folder / "nq.jsonl", [row | {"passages": []} for row in rows[:2]])
    return folder


@pytest.fixture
def settings(tmp_path, data, checkpoint_dir):
    """Makes settings of an evaluation from some changed keys."""

    def make(tasks=("squad",), methods=("naive", "arcaligner"), of_tasks=None, **changes):
        keys = {"checkpoint": str(checkpoint_dir), "data": data, "output": tmp_path / "run", "batch_size": 2}
        command_keys = keys | {"tasks": list(tasks), "methods": list(methods)} | changes
        return read_settings(None, command_keys, of_tasks or {})

    return make


def answers(settings, task: str, method: str) -> list[dict]:
    return AnswerFile(settings.output, task, method).read()


def test_every_method_scores_every_question(settings, tmp_path, base_model_dir, processor, checkpoint_dir):
    """Every question gets an answer and its scores from every method."""
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    get_peft_model(base, lora).save_pretrained(tmp_path / "lora")
    random_aligner(base_model_dir, processor, seed=4, lora_r=0, gate_layers=[]).save_pretrained(tmp_path / "projector")
    processor.save_pretrained(tmp_path / "projector")
    others = dict.fromkeys(("xrag", "projector_only"), str(tmp_path / "projector"))
    random_aligner(base_model_dir, processor, seed=5, lora_positions="all").save_pretrained(tmp_path / "all")
    processor.save_pretrained(tmp_path / "all")
    others |= {"all_positions": str(tmp_path / "all"), "slot_positions": str(checkpoint_dir)}
    others |= dict.fromkeys(("full_text_lora", "text_independent"), str(tmp_path / "lora"))
    for name, tokens_per_slot in (("cocom_x4", 4), ("cocom_x16", 16)):
        recipe = CocomArguments("base", "file", 1, lora_r=2, tokens_per_slot=tokens_per_slot)
        base = AutoModelForCausalLM.from_pretrained(base_model_dir)
        (tmp_path / name).mkdir()
        CompressingModel.new(base, recipe).save(tmp_path / name)
        others[name] = str(tmp_path / name)
    left_out = ("llmlingua2", "llmlingua", "one_passage", "as_needed", "weighted", "zoomed")
    methods = [name for name in METHODS if name not in left_out]
    all_of_them = settings(("squad", "hotpotqa"), methods, **others)
    results = evaluate(all_of_them)
    assert list(results["sets"]) == ["HotpotQA", "SQuAD"]
    for task, title in (("squad", "SQuAD"), ("hotpotqa", "HotpotQA")):
        assert list(results["sets"][title]["methods"]) == methods
        for method in methods:
            rows = answers(all_of_them, task, method)
            assert sorted(row["id"] for row in rows) == [f"row-{number}" for number in range(4)]
            for row in rows:
                scores = {name: metric(row["prediction"], row["answers"]) for name, metric in METRICS.items()}
                assert scores.items() <= row.items() and row["recall"] == 1.0 and row["prompt_tokens"] > 0

    squad = results["sets"]["SQuAD"]["methods"]
    positions = [squad[name]["context_tokens"] for name in ("standard_rag", "truncated", "arcaligner")]
    assert positions[0] > positions[1] == positions[2]
    lengths = [row["passage_tokens"] for row in answers(all_of_them, "squad", "cocom_x4")]
    assert squad["cocom_x4"]["context_tokens"] == sum(-(-length // 4) for length in lengths) / len(lengths)
    cut, tuned = ({row["id"]: row for row in answers(all_of_them, "squad", f"truncated{end}")} for end in ("", "_lora"))
    assert all(row["prompt"] == tuned[key]["prompt"] for key, row in cut.items())
    assert any(row["prediction"] != tuned[key]["prediction"] for key, row in cut.items())


@pytest.mark.parametrize(
    "expected, of_tasks",
    [
        ("abcd abcd", {}),
        ("ab ab", {"top_k": 2}),
        ("db abcd", {"passages": "gold"}),
        ("d a", {"passages": "gold", "top_k": 1}),
    ],
)
def test_given_and_gold_passages(settings, data, of_tasks, expected):
    """Passages are the given or the gold ones, and the first of them."""
    passages = [{"title": "", "text": text} for text in "abcd"]
    rows = [row | {"passages": passages} for row in question_rows(2)]
    write_rows(data / "musique.jsonl", [rows[0] | {"meta": {"gold": [3, 1]}}, rows[1]])
    loaded = load_rows("musique", settings(["musique"], of_tasks=of_tasks))
    assert " ".join("".join(passage["text"] for passage in row["passages"]) for row in loaded) == expected


def test_second_run_answers_the_rest(settings, monkeypatch):
    """A second run answers nothing; after an interruption it answers what is missing."""
    monkeypatch.setattr(answering, "_generate", generate := Mock(wraps=answering._generate))
    results = evaluate(settings())
    assert generate.call_count == 4  # two methods, two batches each
    assert evaluate(settings()) == results and generate.call_count == 4
    file = AnswerFile(settings().output, "squad", "arcaligner")
    lines = file.path.read_bytes().splitlines(keepends=True)
    file.path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    evaluate(settings())
    assert generate.call_count == 5 and file.path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("place", ["/nowhere/at/all", "runs/not_there", "user/not-there"])
def test_missing_method_is_skipped(settings, caplog, place, checkpoint_dir):
    """A method whose model is missing is skipped by name, and no other takes its place."""
    methods = ["xrag", "full_text_lora", "projector_only", "naive"]
    with caplog.at_level(logging.WARNING):
        results = evaluate(settings(methods=methods, projector_only=place))
    assert list(results["sets"]["SQuAD"]["methods"]) == ["naive"]
    assert "Skipped xRAG (our training): No checkpoint was given. Pass one as `xrag` in the recipe" in caplog.text
    assert "to train one, run `python -m arcaligner train --recipe xrag`" in caplog.text
    assert "Skipped StandardRAG, fine-tuned: No checkpoint was given. Pass one as `full_text_lora`" in caplog.text
    assert f"Skipped projector only: There is no checkpoint {place}. To train one, run" in caplog.text
    with pytest.raises(ValueError, match="LoRA of rank 4; expected an aligner without a LoRA for the method"):
        evaluate(settings(methods=["xrag"], xrag=str(checkpoint_dir)))
    with pytest.raises(ValueError, match="`lora_positions` 'slots'; expected 'all' for the method `all_positions`"):
        evaluate(settings(methods=["all_positions"], all_positions=str(checkpoint_dir)))


def test_compressions_in_one_run(settings):
    """One run has several compressions of a checkpoint, and baselines with as many positions."""
    pytest.importorskip("llmlingua", reason="llmlingua is not installed: `pip install llmlingua==0.2.2`")
    methods, compressions = ["arcaligner", "no_lora", "truncated", "llmlingua"], ("4", "segment")
    names = {f"{name}_x{tokens_per_slot}" for name in methods for tokens_per_slot in compressions}
    made = settings(methods=["naive", *names])
    assert evaluate(made)["sets"]["SQuAD"]["methods"].keys() == {"naive"} | names
    positions = {name: {row["id"]: row["context_tokens"] for row in answers(made, "squad", name)} for name in names}
    assert positions["arcaligner_xsegment"] == {"row-0": 3, "row-1": 2, "row-2": 1, "row-3": 3}
    assert positions["no_lora_xsegment"] == positions["arcaligner_xsegment"]
    assert positions["truncated_x4"] == positions["arcaligner_x4"]
    for key, number in positions["arcaligner_xsegment"].items():
        assert positions["arcaligner_x4"][key] > number
        for name in ("truncated", "llmlingua"):
            for number in compressions:
                assert 0 < positions[f"{name}_x{number}"][key] <= positions[f"arcaligner_x{number}"][key]


def test_task_without_passages(settings, data, caplog):
    """A task without passages is answered only by methods that use none."""
    with pytest.raises(ValueError, match="The questions of Natural Questions have no passages. Retrieve some"):
        evaluate(settings(["nq"], ["naive", "arcaligner"]))
    assert evaluate(settings(["nq"], ["naive"]))["sets"]["Natural Questions"]["recall"][0] == 0.0
    rows = question_rows(2)
    write_rows(data / "nq.jsonl", [rows[0] | {"passages": []}, rows[1]])
    with caplog.at_level(logging.WARNING):
        evaluate(made := settings(["nq"], ["standard_rag", "arcaligner"], output=data / "other"))
    assert "Natural Questions: 1 of 2 questions have no passages" in caplog.text
    by_id = {row["id"]: row for row in answers(made, "nq", "arcaligner")}
    assert by_id["row-0"]["context_tokens"] == 1 and by_id["row-0"]["recall"] == 0.0


def test_task_without_gold_passages(settings, data):
    """The error for a task with passages, none of them gold, does not say that it has no passages."""
    rows = [row | {"meta": {"gold": []}} for row in question_rows(2)]
    write_rows(data / "musique.jsonl", rows)
    with pytest.raises(ValueError, match=r"have no gold passages \(`meta.gold` is empty\).*--passages given"):
        load_rows("musique", settings(["musique"], of_tasks={"passages": "gold"}))


# Answers line by line

SETTINGS = {"weights": "abc", "passages": "given", "top_k": None, "machine": "here", "checkpoint": "runs/a"}
ROWS = question_rows(4)
LINES = [{"id": row["id"], "prediction": "é", "row": row_digest(row)} for row in ROWS]


@pytest.fixture
def file(tmp_path) -> AnswerFile:
    """Answers to the first two rows."""
    file = AnswerFile(tmp_path, "squad", "naive")
    assert file.open(SETTINGS, ROWS) == ROWS
    file.append(LINES[:2])
    return file


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_truncated_line_is_answered_again(file, kept):
    """A line that a kill has truncated is answered again."""
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + json.dumps(LINES[2], ensure_ascii=False).encode()[:kept])
    assert file.read() == LINES[:2] and file.open(SETTINGS, ROWS) == ROWS[2:]
    with file.claim():
        with pytest.raises(ValueError, match=r"Another process is writing to .*naive\.jsonl"):
            with AnswerFile(file.run, file.task, file.method).claim():
                pass
        file.append(LINES[2:3])
    assert file.read() == LINES[:3] and file.path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "changed, row, message",
    [
        ({"machine": "there", "checkpoint": "runs/b"}, {}, None),  # the same weights in another place
        ({"weights": "other"}, {}, "`weights` was 'abc' and is now 'other'"),
        ({"top_k": 1}, {}, "`top_k` was not set and is now 1"),
        *(
            ({}, row, "the question, answers or passages of the row row-1 have changed")
            for row in ({"question": "Else?"}, {"answers": ["x"]}, {"passages": []})
        ),
    ],
)
def test_run_continues_unchanged_only(file, changed, row, message):
    """A run continues only with the same settings and rows."""
    before, other = file.path.read_bytes(), SETTINGS | changed
    rows = [ROWS[0], ROWS[1] | row]
    if message is None:
        assert file.open(other, rows) == [] and file.settings() == SETTINGS  # nothing was left to answer
        assert file.open(other, ROWS) == ROWS[2:] and file.settings() == other
    else:
        with pytest.raises(ValueError, match=f"2 answers made with different settings or questions: {message}"):
            file.open(other, rows)
        assert file.settings() == SETTINGS
    assert file.path.read_bytes() == before
