"""The front of vLLM answers as the engine of PyTorch does, and never from a vLLM that is away or reads no files.

The vLLM here is a small server that reads the files and answers by the aligner's own base model.
"""

import json
import signal
import threading
import time

import pytest
import torch
from conftest import pipeline_of

pytest.importorskip("lancedb")
pytest.importorskip("fastapi")

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from safetensors.torch import load_file
from starlette.testclient import TestClient
from stub_vllm import load_slots_module
from transformers import LogitsProcessor, LogitsProcessorList

from arcaligner.apps.server import vllm_engine
from arcaligner.apps.server.app import ServerSettings, create_app
from arcaligner.apps.server.engine import Engine, Limits, UnavailableError
from arcaligner.apps.server.engine import Request as Asked
from arcaligner.apps.server.vllm_engine import VllmEngine, VllmProcess, VllmServer
from arcaligner.kv_cache_arcaligner import join_keys_values

slots = load_slots_module()

ADA = {"title": "Ada", "text": "Ada wrote the letter in 1843. It was long."}
RADIK = "Radik Zhaparov is a Kazakh ski jumper who has competed since 2003."
LIMITS = Limits(max_documents=8, max_slots=60, max_new_tokens=64, seconds=60)


class Copies(LogitsProcessor):
    def __init__(self, copy, length):
        self.copy, self.length = copy, length

    def __call__(self, ids, scores):
        scores[0, slots.copied_next(self.copy["texts"], ids[0, self.length :].tolist(), self.copy["end_ids"])] += 8.0
        return scores


class SmallVllm:
    """`/v1/models` and `/v1/completions` as vLLM has them, of requests that begin with files."""

    def __init__(self, model, processor, folder):
        self.model, self.processor, self.folder = model, processor, folder
        self.reads_files, self.apart, self.max_model_len, self.dies, self.asked = True, 0.0, 200, False, []
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.complete)
        self.app, self.server, self.port = app, None, 0

    def start(self):
        config = uvicorn.Config(self.app, port=self.port, log_level="critical", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join()

    async def models(self):
        return {"data": [{"id": "base", "max_model_len": self.max_model_len}]}

    async def complete(self, request: Request):
        body = await request.json()
        self.asked.append(body)
        files = (body.get("kv_transfer_params") or {}).get("slots") if self.reads_files else None
        try:
            parts = [load_file(self.folder / f"{key}.safetensors")["keys_values"] for key, _ in files or ()]
        except FileNotFoundError:
            message = "The precomputed passage is not there"
            return JSONResponse({"error": {"message": message}}, 400)
        ids, first = self.answer(body, files, parts)
        if "logprobs" in body:
            first = (first + self.apart).topk(5)
            top = {f"token_id:{id}": score for id, score in zip(*map(torch.Tensor.tolist, first[::-1]), strict=True)}
            return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}
        if not body.get("stream"):
            return {"choices": [{"text": ""}]}
        return StreamingResponse(self.events(body, ids), media_type="text/event-stream")

    @torch.no_grad()
    def answer(self, body, files, parts):
        ids, extra = list(body["prompt"]), {}
        if files:
            counts = [count for _, count in files]
            ids[counts[0] : sum(counts)] = [self.processor.context_token_id] * sum(counts[1:])
            numbers = torch.arange(len(counts) - 1).repeat_interleave(torch.tensor(counts[1:]))
            extra["context_passage_ids"] = numbers[None]
            extra["past_key_values"] = join_keys_values([parts], self.model.config.text_config)
        ids, copy = torch.tensor([ids]), (body.get("kv_transfer_params") or {}).get("copy")
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **extra,
            max_new_tokens=body["max_tokens"],
            eos_token_id=body.get("stop_token_ids"),
            do_sample=False,
            logits_processor=LogitsProcessorList([Copies(copy, ids.shape[1])] if copy else []),
            output_logits=True,
            return_dict_in_generate=True,
        )
        return found.sequences[0, ids.shape[1] :].tolist(), found.logits[0][0].log_softmax(-1)

    async def events(self, body, ids):
        ends = ids[-1] in body["stop_token_ids"]
        text = self.processor.tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=True)
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)] or [""]
        for number, piece in enumerate(pieces):
            if self.dies and number:
                raise RuntimeError("gone")
            reason = ("stop" if ends else "length") if number == len(pieces) - 1 else None
            yield f"data: {json.dumps({'choices': [{'text': piece, 'finish_reason': reason}]})}\n\n"
        usage = {"completion_tokens": len(ids) - ends}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


@pytest.fixture
def pipeline(separate):
    model, processor = separate
    processor.copy_bonus = 8.0
    return pipeline_of(model.eval(), processor)


@pytest.fixture
def vllm(pipeline, tmp_path):
    found = SmallVllm(pipeline.model, pipeline.processor, tmp_path)
    found.url = found.start()
    yield found
    found.stop()


@pytest.fixture
def front(pipeline, vllm, tmp_path):
    engine = VllmEngine(pipeline, vllm=VllmServer(vllm.url), folder=tmp_path, limits=LIMITS)
    yield engine
    engine.close()


def ask(engine, *documents, question="Who wrote it?", **settings):
    request = Asked([{"role": "user", "content": question}], list(documents) or None, max_new_tokens=12, **settings)
    request.pieces = []
    request.on_text = request.pieces.append
    return engine.submit(request).result(60), request


def test_answers_are_those_of_the_own_engine(front, pipeline, vllm):
    """One passage, the likeliest of several, several, one that stands twice, none found, and text alone."""
    engine = Engine(pipeline, limits=LIMITS)
    for documents, settings in (
        ([ADA], {}),
        ([ADA, RADIK], {}),
        ([ADA, RADIK, ADA], {"max_passages": 8}),
        ([ADA, RADIK], {"max_passages": 8, "copy_bonus": 0.0, "tokens_per_slot": 3}),
        ([], {}),
    ):
        (found, request), (expected, _) = (ask(each, *documents, **settings) for each in (front, engine))
        assert found.text == expected.text == "".join(request.pieces)
        for name in ("finish_reason", "prompt_tokens", "statistics", "sources"):
            assert getattr(found, name) == getattr(expected, name)
        assert found.confidence == pytest.approx(expected.confidence, abs=1e-6)
    assert ask(front, ADA)[0].kept == 1
    engine.close()


def test_refused_answers_are_not_asked_for(front, vllm):
    assert ask(front, ADA)[0].text  # after which vLLM is known
    before = len(vllm.asked)
    answer, request = ask(front, ADA, min_confidence=1.0)
    assert answer.text == "not in the text" == "".join(request.pieces) and len(vllm.asked) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads_files": False}, "does not read precomputed passages, so it would answer without them"),
        ({"apart": 1.0}, "with log-probabilities 1.00 apart"),
    ],
)
def test_vllm_that_answers_otherwise_is_refused(front, vllm, change, message):
    vars(vllm).update(change)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            front.warm_up()
    with pytest.raises(ValueError, match=message):
        ask(front, ADA)


def test_vllm_that_is_away_is_503_and_answers_again(front, vllm):
    client = TestClient(create_app(front, ServerSettings("tiny")), base_url="http://localhost")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "documents": [ADA], "max_tokens": 4}
    for stream in (False, True):
        assert client.post("/v1/chat/completions", json=body | {"stream": stream}).status_code == 200
        vllm.stop()
        for _ in range(2):
            away = client.post("/v1/chat/completions", json=body | {"stream": stream})
            assert away.status_code == 503 and away.headers["retry-after"] == "5"
            assert "cannot be reached" in away.json()["error"]["message"]
        vllm.start()
        assert client.post("/v1/chat/completions", json=body | {"stream": stream}).status_code == 200


def test_vllm_that_ends_within_an_answer(front, vllm):
    ask(front, ADA)
    vllm.dies = True
    with pytest.raises(UnavailableError, match="Try again later"):
        ask(front, ADA, copy_bonus=0.0)
    client = TestClient(create_app(front, ServerSettings("tiny")), base_url="http://localhost")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "documents": [ADA], "stream": True}
    lines = [line for line in client.post("/v1/chat/completions", json=body).text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    vllm.dies, vllm.reads_files = False, False  # another one stands there now
    with pytest.raises(ValueError, match="does not read precomputed passages"):
        ask(front, ADA)
    vllm.reads_files = True
    assert ask(front, ADA)[0].text


def test_prompts_that_do_not_fit_are_refused(front, vllm):
    vllm.max_model_len = 45
    front.warm_up()
    with pytest.raises(ValueError, match=r"The prompt has \d+ positions.*expected at most 44"):
        ask(front, *[RADIK] * 4, max_passages=8)


def test_folder_that_is_full_is_503(front, tmp_path, monkeypatch):
    ask(front, RADIK)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.save_keys_values", full)
    assert ask(front, RADIK)[0].text  # which is there
    with pytest.raises(OSError, match="could not be written"):
        ask(front, ADA)


def test_two_fronts_share_a_folder(front, pipeline, vllm, tmp_path):
    """Both precompute the same passage at the same time; one file is there, and both answers are the same."""
    other = VllmEngine(pipeline, vllm=VllmServer(vllm.url), folder=tmp_path, limits=LIMITS)
    requests = [Asked([{"role": "user", "content": "Who?"}], [ADA], max_new_tokens=8) for _ in range(8)]
    answers = [engine.submit(request) for engine, request in zip([front, other] * 4, requests, strict=True)]
    assert len({answer.result(60).text for answer in answers}) == 1
    assert not list(tmp_path.glob("*.tmp"))
    other.close()


def test_process_that_ends_is_started_again(tmp_path):
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$$ $*" >> {tmp_path}/started\nexec sleep 600\n')
    script.chmod(0o755)
    process = VllmProcess(str(script), "base", tmp_path, ["--max-model-len", "8"], port=1)

    def started(count):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            path = tmp_path / "started"
            if path.exists() and len(lines := path.read_text().splitlines()) == count:
                return lines
            time.sleep(0.05)
        raise AssertionError("it was not started")

    (line,) = started(1)
    assert "--model base" in line and line.endswith("--max-model-len 8") and process.is_starting
    process.process.send_signal(signal.SIGKILL)
    assert started(2)[0] == line
    process.close()
    assert not process.is_starting
    with pytest.raises(OSError, match="vLLM cannot be started by .*make vllm"):
        VllmProcess(str(tmp_path / "missing"), "base", tmp_path)


def test_options_of_the_command_line(run_cli, checkpoint_dir, monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_vllm", lambda: None)
    serve = ("serve", "--checkpoint", checkpoint_dir, "--port", "0")
    for options, message in (
        (("--vllm-url", "http://x"), "are for `--engine vllm`"),
        (("--engine", "vllm"), "vLLM is not installed: `make vllm`"),
        (("--engine", "vllm", "--vllm-url", "http://x"), "`--passages FOLDER`"),
        (("--engine", "vllm", "--vllm-url", "http://x", "--vllm-options", "-x"), "has its own"),
    ):
        code, _, said = run_cli(*serve, *options)
        assert code == 1 and message in said
