"""lm-evaluation-harness asks an aligner our questions and scores its answers as we do."""

import sys

import pytest
import torch
from training_rows import question_rows, write_rows

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `pip install lm-eval==0.4.13`")

from lm_eval._cli import HarnessCLI  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from arcaligner.evaluation import lm_eval_adapter  # noqa: E402
from arcaligner.evaluation.answering import SlotAnswerer, load_aligner  # noqa: E402
from arcaligner.evaluation.lm_eval_adapter import DECODING, TASKS_DIRECTORY, ArcAlignerLM, parse_prompt  # noqa: E402
from arcaligner.evaluation.metrics import contains_match, token_f1  # noqa: E402
from arcaligner.evaluation.tasks import TASKS  # noqa: E402

# Without an answer there is nothing to score.
ANSWERED = [name for name, task in TASKS.items() if task.is_answered]


def manager(**metadata: str) -> TaskManager:
    return TaskManager(include_path=str(TASKS_DIRECTORY), include_defaults=False, metadata=metadata)


def request(prompt: str, **decoding) -> Instance:
    return Instance("generate_until", {}, (prompt, DECODING | decoding), 0)


@pytest.fixture(scope="module")
def aligner(checkpoint_dir) -> ArcAlignerLM:
    return ArcAlignerLM(str(checkpoint_dir), batch_size=2, device="cpu")


def test_the_harness_gets_the_aligners_own_answers_in_order_and_reports_their_scores(tmp_path, checkpoint_dir):
    rows = question_rows(5)
    rows[3]["passages"] = rows[0]["passages"] + rows[1]["passages"]
    model, processor = load_aligner(str(checkpoint_dir), "cpu")
    predictions = [answer.text for answer in SlotAnswerer(model, processor).answer(rows)]
    assert len(set(predictions)) > 1
    rows[1]["answers"] = [predictions[1]]
    rows[4]["answers"] = ["nothing of it", predictions[4]]
    write_rows(tmp_path / "squad.jsonl.gz", rows)

    asked = {"model": "arcaligner", "model_args": {"pretrained": str(checkpoint_dir)}, "tasks": ["arcaligner_squad"]}
    settings = {"batch_size": 2, "device": "cpu", "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(**asked, **settings, task_manager=manager(data=str(tmp_path)))
    samples = sorted(results["samples"]["arcaligner_squad"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == predictions
    columns = list(zip(predictions, [row["answers"] for row in rows], strict=True))
    scores = results["results"]["arcaligner_squad"]
    em = [contains_match(*column) for column in columns]
    assert scores["em,none"] == pytest.approx(sum(em) / 5) and em[1] == em[4] == 1.0
    assert scores["f1,none"] == pytest.approx(sum(token_f1(*column) for column in columns) / 5)


def test_each_set_of_questions_is_a_task():
    assert sorted(manager().all_tasks) == sorted(f"arcaligner_{name}" for name in ANSWERED)


@pytest.mark.parametrize("name", ANSWERED)
def test_a_task_asks_its_own_rows(tmp_path, name):
    (row,) = question_rows(1)
    write_rows(tmp_path / f"{name}.jsonl", [row])
    task = manager(data=str(tmp_path)).load([f"arcaligner_{name}"])["tasks"][f"arcaligner_{name}"]
    (document,) = task.test_docs()
    asked = parse_prompt(task.doc_to_text(document))
    assert asked == {"question": row["question"], "passages": row["passages"]}
    assert task.doc_to_target(document) == row["answers"][0]
    assert task.config.generation_kwargs == DECODING


@pytest.mark.parametrize("prompt", ["Question: Who?\nAnswer:", "5", '"text"', '{"question": "Who?"}', "[]"])
def test_a_prompt_of_another_task_is_refused(aligner, prompt):
    with pytest.raises(ValueError, match=r"expected JSON.*lm_eval --model hf"):
        aligner.generate_until([request(prompt)])


@pytest.mark.parametrize(
    "ask, message",
    [
        (lambda lm: lm.generate_until([request("{}", max_gen_toks=64)]), "'max_gen_toks': 64.*Leave out `--gen_kw"),
        (lambda lm: lm.loglikelihood([]), "gives no likelihoods"),
        (lambda lm: lm.loglikelihood_rolling([]), "gives no likelihoods"),
        (lambda lm: lm.tokenizer_name, "leave out `--apply_chat_template`"),
        (lambda lm: ArcAlignerLM("unused", batch_size="auto"), "batch_size=auto; expected a number"),
        (lambda lm: ArcAlignerLM("unused", batch_size=-1), "batch_size=-1; expected a number"),
    ],
)
def test_what_an_aligner_cannot_do_is_refused(aligner, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(aligner)


def test_the_command_line_knows_model_tasks_and_a_device_that_is_there(monkeypatch):
    seen = []
    monkeypatch.setattr(lm_eval_adapter, "cli_evaluate", lambda: seen.append(HarnessCLI().parse_args()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--model_args", "pretrained=somewhere", "--tasks", "arcaligner_squad", "--metadata", "data=rows"]
    monkeypatch.setattr(sys, "argv", ["program", *given])
    lm_eval_adapter.main()
    (args,) = seen
    assert (args.model, args.include_path, args.device) == ("arcaligner", str(TASKS_DIRECTORY), "cpu")
    assert (args.model_args, args.metadata) == ({"pretrained": "somewhere"}, {"data": "rows"})
    assert args.tasks == ["arcaligner_squad"]

    monkeypatch.setattr(sys, "argv", ["program", *given, "--device", "cuda:1"])
    lm_eval_adapter.main()
    assert seen[-1].device == "cuda:1"
