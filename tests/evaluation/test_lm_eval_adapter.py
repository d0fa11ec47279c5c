"""lm-evaluation-harness asks an aligner the same questions, and scores its answers as the evaluation does."""

import sys

import pytest
import torch
from training_rows import question_rows, write_rows

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `pip install lm-eval==0.4.13`")

from lm_eval._cli import HarnessCLI  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from arcaligner.common.rows import contains_match, token_f1  # noqa: E402
from arcaligner.evaluation import lm_eval_adapter  # noqa: E402
from arcaligner.evaluation.answering import answer_slots, load_aligner  # noqa: E402
from arcaligner.evaluation.lm_eval_adapter import DECODING, TASKS_DIRECTORY, ArcAlignerLM, parse_prompt  # noqa: E402
from arcaligner.evaluation.tasks import TASKS  # noqa: E402


def manager(**metadata: str) -> TaskManager:
    return TaskManager(include_path=str(TASKS_DIRECTORY), include_defaults=False, metadata=metadata)


def request(prompt: str, **decoding) -> Instance:
    return Instance("generate_until", {}, (prompt, DECODING | decoding), 0)


def test_harness_gets_ordered_answers(tmp_path, checkpoint_dir):
    """The harness gets the aligner's own answers in order, and reports their scores."""
    rows = question_rows(5)
    rows[3]["passages"] = rows[0]["passages"] + rows[1]["passages"]
    predictions = [answer.text for answer in answer_slots(*load_aligner(str(checkpoint_dir), "cpu"), rows)]
    assert len(set(predictions)) > 1
    rows[1]["answers"], rows[2]["answers"] = [predictions[1]], [f"{predictions[2]} and more"]
    rows[4]["answers"] = ["nothing of it", predictions[4]]
    write_rows(tmp_path / "squad.jsonl.gz", rows)

    arguments = {"model": "arcaligner", "model_args": {"pretrained": str(checkpoint_dir)}}
    arguments["tasks"] = ["arcaligner_squad"]
    settings = {"batch_size": 2, "device": "cpu", "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(**arguments, **settings, task_manager=manager(data=str(tmp_path)))
    samples = sorted(results["samples"]["arcaligner_squad"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == predictions
    for name, metric in (("em", contains_match), ("f1", token_f1)):
        scores = [metric(prediction, row["answers"]) for prediction, row in zip(predictions, rows, strict=True)]
        assert results["results"]["arcaligner_squad"][f"{name},none"] == pytest.approx(sum(scores) / 5)
        assert scores[1] == scores[4] == 1.0


def test_sets_become_tasks(tmp_path):
    """Each set of questions with answers is a task with its own rows."""
    (row,) = question_rows(1)
    names = {f"arcaligner_{name}": name for name, task in TASKS.items() if task.is_answered}
    for name in names.values():
        write_rows(tmp_path / f"{name}.jsonl", [row | {"question": f"{name}?"}])
    tasks = manager(data=str(tmp_path))
    assert set(tasks.all_tasks) == set(names)
    for title, task in tasks.load(list(names))["tasks"].items():
        (document,) = task.test_docs()
        parsed = parse_prompt(task.doc_to_text(document))
        assert parsed == {"question": f"{names[title]}?", "passages": row["passages"]}
        assert task.doc_to_target(document) == row["answers"][0]
        assert task.config.generation_kwargs == DECODING


NO_PROMPTS = ["Question: Who?\nAnswer:", "5", '"text"', '{"question": "Who?"}', "[]"]


@pytest.mark.parametrize(
    "ask, message",
    [
        *((lambda lm, text=text: lm.generate_until([request(text)]), "expected JSON.*hf") for text in NO_PROMPTS),
        (lambda lm: lm.generate_until([request("{}", max_gen_toks=64)]), "'max_gen_toks': 64.*Leave out `--gen_kw"),
        (lambda lm: lm.loglikelihood([]), "computes no likelihoods"),
        (lambda lm: lm.loglikelihood_rolling([]), "computes no likelihoods"),
        (lambda lm: ArcAlignerLM("unused", batch_size="auto"), "`batch_size` is auto; expected a number"),
        (lambda lm: ArcAlignerLM("unused", batch_size=-1), "`batch_size` is -1; expected a number"),
    ],
)
def test_unsupported_requests_are_refused(checkpoint_dir, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(ArcAlignerLM(str(checkpoint_dir), batch_size=2, device="cpu"))


def test_command_line_defaults(monkeypatch):
    """The command line knows the model, the tasks, and a device that exists."""
    seen = []
    monkeypatch.setattr(lm_eval_adapter, "cli_evaluate", lambda: seen.append(HarnessCLI().parse_args()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--model_args", "pretrained=somewhere", "--tasks", "arcaligner_squad", "--metadata", "data=rows"]
    for more, device in (([], "cpu"), (["--device", "cuda:1"], "cuda:1")):
        monkeypatch.setattr(sys, "argv", ["program", *arguments, *more])
        lm_eval_adapter.main()
        args = seen.pop()
        assert (args.model, args.include_path, args.device) == ("arcaligner", str(TASKS_DIRECTORY), device)
        assert (args.model_args, args.metadata) == ({"pretrained": "somewhere"}, {"data": "rows"})
        assert args.tasks == ["arcaligner_squad"]
