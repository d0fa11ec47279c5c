"""An unmodified vLLM answers from precomputed passages as PyTorch does in small caches, other precisions and with
copying, and what does not fit is refused. `test_conformance.py` compares it with the other engines.

They need vLLM's environment (`make vllm`, or `ARCALIGNER_VLLM` names a Python that has it); those of
`test_vllm_files.py` do not.
"""

import os
import signal
import threading
import time

import pytest

from arcaligner.apps.server.vllm_engine import VllmEngine, VllmProcess, find_vllm, slots_request
from arcaligner.pipeline_arcaligner import ArcAlignerPipeline

VLLM = find_vllm()
pytestmark = [
    pytest.mark.default_backbone,
    pytest.mark.slow,
    pytest.mark.skipif(VLLM is None, reason="vLLM is not there: `make vllm`, or ARCALIGNER_VLLM=its Python"),
]
LENGTH = 4096


def differences(expected, answers) -> tuple[list[int], float]:
    """The numbers of the questions whose ids differ, and the largest difference of log-probabilities of first
    tokens."""
    other, largest = [], 0.0
    for number, ((_, ids, first), answer) in enumerate(zip(expected, answers, strict=True)):
        if answer.get("ids") != ids:
            other.append(number)
        for id, value in answer["first"].items():
            largest = max(largest, abs(first[int(id)].item() - value))
    return other, largest


def test_small_caches_keep_answers(reference, run_vllm):
    """Prompts are prefilled in chunks of 32 ids, and requests are preempted and started again, with their passages
    loaded again."""
    cache = reference.cache()
    long = {"max_new_tokens": 60, "eos_token_id": None}
    expected = [reference.ask(cache, number, **long) for number in (0, 3, 6, 9, 12, 15, 18, 21)]  # of one passage each
    options = {"max_model_len": 256, "block_size": 32, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 32}
    (answers,) = run_vllm([[request for request, _, _ in expected]], **options, enable_chunked_prefill=True)
    other, largest = differences(expected, answers)
    assert run_vllm.preemptions > 0 and not other and largest < 1e-3


def test_copied_answers_equal_pytorch(reference, run_vllm):
    cache = reference.cache()
    plain, copied = ([reference.ask(cache, number, bonus=bonus) for number in range(6)] for bonus in (0.0, 8.0))
    assert any(ids != others for (_, ids, _), (_, others, _) in zip(plain, copied, strict=True))
    requests = [request for pair in zip(plain, copied, strict=True) for request, _, _ in pair]
    (answers,) = run_vllm([requests])
    for expected, answered in ((plain, answers[::2]), (copied, answers[1::2])):
        assert differences(expected, answered)[0] == []


def test_precisions_agree_approximately(reference, run_vllm):
    """An engine in bfloat16 uses float32 files, and an engine in float32 uses int8 files."""
    expected = [reference.ask(reference.cache(), number) for number in range(6)]
    (answers,) = run_vllm([[request for request, _, _ in expected]], dtype="bfloat16")
    assert differences(expected, answers)[1] < 0.3
    int8 = [reference.ask(reference.cache(dtype="int8"), number) for number in range(6)]
    (answers,) = run_vllm([[request for request, _, _ in int8]])
    other, largest = differences(int8, answers)
    assert not other and largest < 1e-3


def test_killed_vllm_loses_no_answer(reference, monkeypatch):
    """vLLM is killed while eight clients ask: refusals are 503 with `Retry-After`, and all answers come after its
    restart."""
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from arcaligner.apps.server.app import ServerSettings, create_app

    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(name, value)
    options = ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(LENGTH)]
    process = VllmProcess(VLLM, str(reference.base_model), reference.folder, options)
    ask = ArcAlignerPipeline(model=reference.model, processor=reference.processor, task="text-generation")
    engine = VllmEngine(ask, vllm=process, folder=reference.folder)
    app, answers, refused = create_app(engine, ServerSettings("aligner")), [], []

    def ask_some(rows):
        client = TestClient(app, base_url="http://localhost")
        for row in rows:
            body = {"model": "aligner", "messages": [{"role": "user", "content": row["question"]}], "max_tokens": 16}
            body["documents"] = row["passages"]
            while (response := client.post("/v1/chat/completions", json=body)).status_code == 503:
                refused.append(response.headers["retry-after"])
                time.sleep(1)
            answers.append((row["id"], response.json()["choices"][0]["message"]["content"]))

    try:
        engine.warm_up()
        ask_some(reference.rows)
        before, first = dict(answers), process.process.pid
        answers.clear()
        threads = [threading.Thread(target=ask_some, args=(reference.rows[number::8],)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(answers) < 8:
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join()
    finally:
        engine.close()
    assert process.process.pid != first and dict(answers) == before and len(answers) == len(reference.rows)
    print(f"{len(refused)} times 503")
    assert refused and set(refused) == {"5"}


def test_invalid_requests_are_never_answered(reference, run_vllm):
    """An invalid request gets no answer, and the valid request in the same batch does."""
    (good, ids, _), cache = reference.ask(reference.cache(), 1), reference.cache()
    body = good["kv_transfer_params"]["slots"]
    (long,) = cache.prefix_files("Who?", [row["passages"][0] for row in reference.rows], tokens_per_slot=2)
    bad = {
        "does not exist": good | {"kv_transfer_params": {"slots": [body[0], ["a" * 64, 3]]}},
        "`slots` is []; expected": good | {"kv_transfer_params": {"slots": []}},
        "`prompt_logprobs`": good | {"sampling": {"prompt_logprobs": 1}},
        "maximum": slots_request(long) | {"prompt": [0] * LENGTH, "max_tokens": 4},
        "cache_salt": good | {"cache_salt": "mine"},
        "does not begin with the text": good | {"prompt": [0, *good["prompt"][1:]]},
        "of its slots and of the tokens before them": good | {"prompt": good["prompt"][:1]},
    }
    answers, again = run_vllm([[*bad.values(), good], [good]])
    assert answers[-1]["ids"] == again[0]["ids"] == ids
    for (reason, _), answer in zip(bad.items(), answers, strict=False):
        if "error" in answer:
            assert reason in answer["error"]
        else:  # refused within the engine, by name in its log
            assert answer["finish_reason"] == "error" and not answer["ids"] and reason in run_vllm.log
