"""An evaluation answers each question with each method once, goes on after a kill, and skips what is not here."""

import json
import logging

import pytest
import torch
from conftest import random_aligner
from peft import LoraConfig, get_peft_model
from training_rows import question_rows, write_rows
from transformers import AutoModelForCausalLM

from arcaligner.evaluation import answering
from arcaligner.evaluation.evaluate import evaluate, load_rows
from arcaligner.evaluation.metrics import METRICS
from arcaligner.evaluation.runs import AnswerFile
from arcaligner.evaluation.settings import read_settings

OWN = ["naive", "standard_rag", "truncated", "arcaligner", "no_recursion", "max_loop", "no_lora"]
GIVEN = [
    "full_text_lora",
    "full_text_copying",
    "text_apart",
    "truncated_lora",
    "truncated_copying",
    "xrag",
    "projector_only",
]


pytestmark = pytest.mark.usefixtures("few_tokens")


@pytest.fixture
def data(tmp_path):
    """Four questions of SQuAD, and of HotpotQA four with a distractor among their passages."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = question_rows(4)
    write_rows(folder / "squad.jsonl.gz", rows)
    for row in rows:
        row["passages"] = [{"title": "", "text": "This is one. Not that."}, *row["passages"]]
        row["meta"] = {"gold": [1]}
    write_rows(folder / "hotpotqa.jsonl", rows)
    return folder


@pytest.fixture
def settings(tmp_path, data, checkpoint_dir):
    """Settings of an evaluation of two tasks, with changes to the keys."""

    def make(tasks=("squad", "hotpotqa"), methods=("naive", "arcaligner"), of_tasks=None, **changes):
        keys = {"checkpoint": str(checkpoint_dir), "data": data, "output": tmp_path / "run", "batch_size": 2}
        given = keys | {"tasks": list(tasks), "methods": list(methods)} | changes
        return read_settings(None, given, of_tasks or {})

    return make


@pytest.fixture
def asked(monkeypatch) -> list[list[str]]:
    """Ids of each batch that was answered."""
    batches, original = [], answering._generate

    def watched(model, processor, inputs, rows, *args, **kwargs):
        batches.append([row["id"] for row in rows])
        return original(model, processor, inputs, rows, *args, **kwargs)

    monkeypatch.setattr(answering, "_generate", watched)
    return batches


def answers(settings, task: str, method: str) -> list[dict]:
    return AnswerFile(settings.output, task, method).read()


def test_every_question_gets_an_answer_and_its_scores_from_every_method(settings, tmp_path, base_model_dir, processor):
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(base_model_dir)
    get_peft_model(base, lora).save_pretrained(tmp_path / "lora")
    random_aligner(base_model_dir, processor, seed=4, lora_r=0, gate_layers=[]).save_pretrained(tmp_path / "projector")
    processor.save_pretrained(tmp_path / "projector")
    others = {"xrag": str(tmp_path / "projector"), "projector_only": str(tmp_path / "projector")}
    others |= {"full_text_lora": str(tmp_path / "lora"), "text_apart": str(tmp_path / "lora")}
    all_of_them = settings(methods=OWN + GIVEN, **others)
    results = evaluate(all_of_them)
    assert list(results["sets"]) == ["HotpotQA", "SQuAD"]
    for entry in results["sets"].values():
        assert set(entry["methods"]) == {*OWN, *GIVEN}
    for task in all_of_them.tasks:
        for method in OWN + GIVEN:
            found = answers(all_of_them, task, method)
            assert sorted(row["id"] for row in found) == [f"row-{number}" for number in range(4)]
            for row in found:
                scores = {name: metric(row["prediction"], row["answers"]) for name, metric in METRICS.items()}
                assert scores.items() <= row.items()
                assert row["recall"] == 1.0 and row["prompt_tokens"] > 0
    whole, cut = (answers(all_of_them, "squad", name) for name in ("standard_rag", "truncated"))
    slots = answers(all_of_them, "squad", "arcaligner")
    assert sum(row["context_tokens"] for row in whole) > sum(row["context_tokens"] for row in cut)
    assert sorted(row["context_tokens"] for row in slots) == sorted(row["context_tokens"] for row in cut)
    tuned = answers(all_of_them, "squad", "truncated_lora")
    assert [row["prompt"] for row in tuned] == [row["prompt"] for row in cut]
    assert [row["prediction"] for row in tuned] != [row["prediction"] for row in cut]


@pytest.mark.parametrize("passages, number", [("given", 2), ("gold", 1)])
def test_gold_passages_alone_are_read_where_they_are_asked_for(settings, passages, number):
    made = settings(["hotpotqa"], of_tasks={"passages": passages})
    rows = load_rows("hotpotqa", made)
    assert [len(row["passages"]) for row in rows] == 4 * [number]


def test_a_second_run_asks_nothing_and_a_broken_one_the_rest(settings, asked):
    results = evaluate(settings())
    assert len(asked) == 8
    assert evaluate(settings()) == results and len(asked) == 8
    file = AnswerFile(settings().output, "squad", "arcaligner")
    lines = file.path.read_bytes().splitlines(keepends=True)
    file.path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    evaluate(settings())
    assert [sorted(ids) for ids in asked[8:]] == [sorted(json.loads(line)["id"] for line in lines[2:])]
    assert file.path.read_bytes() == b"".join(lines)


def test_a_method_that_is_not_here_is_skipped_by_name_and_never_replaced(settings, caplog):
    with caplog.at_level(logging.WARNING):
        results = evaluate(settings(["squad"], ["naive", "xrag", "full_text_lora"]))
    assert set(results["sets"]["SQuAD"]["methods"]) == {"naive"}
    assert "skipped xRAG (our training): name its checkpoint with `--xrag`" in caplog.text
    assert "`python -m arcaligner train --recipe xrag` makes one" in caplog.text
    assert "skipped StandardRAG, fine-tuned: name its checkpoint with `--full-text-lora`" in caplog.text


@pytest.mark.parametrize("place", ["/nowhere/at/all", "runs/not_there", "user/not-there"])
def test_a_checkpoint_that_is_named_but_not_there_is_skipped_too(settings, caplog, place):
    with caplog.at_level(logging.WARNING):
        results = evaluate(settings(["squad"], ["projector_only", "naive"], projector_only=place))
    assert set(results["sets"]["SQuAD"]["methods"]) == {"naive"}
    assert f"skipped projector only: there is no {place}, named with `--projector-only`" in caplog.text


def test_an_aligner_with_lora_is_no_projector_alone(settings, checkpoint_dir):
    with pytest.raises(ValueError, match="LoRA of rank 4; for `--xrag` expected an aligner of a projector alone"):
        evaluate(settings(["squad"], ["xrag"], xrag=str(checkpoint_dir)))


def test_another_aligner_is_refused_but_the_backbones_answers_are_kept(settings, model, processor, tmp_path, asked):
    evaluate(settings(["squad"], ["naive", "arcaligner"]))
    with torch.no_grad():
        next(model.model.projector.parameters()).add_(1.0)
    model.save_pretrained(tmp_path / "other")
    processor.save_pretrained(tmp_path / "other")
    evaluate(settings(["squad"], ["naive"], checkpoint=str(tmp_path / "other")))
    assert len(asked) == 4
    with pytest.raises(ValueError, match="`weights` was"):
        evaluate(settings(["squad"], ["arcaligner"], checkpoint=str(tmp_path / "other")))


def test_one_run_holds_several_rates_of_a_checkpoint_and_baselines_of_as_many_positions(settings):
    pytest.importorskip("llmlingua", reason="llmlingua is not installed: `pip install llmlingua==0.2.2`")
    methods = ["naive", "arcaligner", "no_lora", "truncated", "llmlingua"]
    made = settings(["squad"], methods, tokens_per_slot=[4, "segment"])
    results = evaluate(made)
    rates = ("4", "segment")
    names = {f"{name}_x{rate}" for name in methods[1:] for rate in rates}
    assert set(results["sets"]["SQuAD"]["methods"]) == {"naive"} | names
    found = {name: answers(made, "squad", name) for name in made.methods[1:]}
    positions = {name: {row["id"]: row["context_tokens"] for row in rows} for name, rows in found.items()}
    expected = {"row-0": 3, "row-1": 2, "row-2": 1, "row-3": 3}
    assert positions["arcaligner_xsegment"] == positions["no_lora_xsegment"] == expected
    assert all(positions["arcaligner_x4"][key] > number for key, number in positions["arcaligner_xsegment"].items())
    for name in ("truncated", "llmlingua"):
        for rate in ("4", "segment"):
            for key, number in positions[f"{name}_x{rate}"].items():
                assert 0 < number <= positions[f"arcaligner_x{rate}"][key]
    assert positions["truncated_x4"] == positions["arcaligner_x4"]


def test_a_task_without_any_passage_is_asked_of_those_that_read_none_alone(settings, data):
    write_rows(data / "nq.jsonl", [row | {"passages": []} for row in question_rows(2)])
    with pytest.raises(ValueError, match="NaturalQA has no passages of its own. Retrieve some"):
        evaluate(settings(["nq"], ["naive", "arcaligner"]))
    assert len(answers(settings(["nq"], ["naive"]), "nq", "naive")) == 0
    evaluate(settings(["nq"], ["naive"]))


def test_questions_without_a_passage_are_counted_and_asked(settings, data, caplog):
    rows = question_rows(2)
    rows[0]["passages"] = []
    write_rows(data / "nq.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        made = settings(["nq"], ["standard_rag", "arcaligner"])
        evaluate(made)
    assert "NaturalQA: 1 of 2 questions have no passage" in caplog.text
    by_id = {row["id"]: row for row in answers(made, "nq", "arcaligner")}
    assert by_id["row-0"]["context_tokens"] == 1 and by_id["row-0"]["recall"] == 0.0
