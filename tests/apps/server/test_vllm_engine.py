"""With vLLM the answers are those of the PyTorch engine, and there is none if vLLM is down or does not read the files.

The vLLM here is the small server of `small_vllm.py`.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from conftest import aligner_for, pipeline_of, processor_with

pytest.importorskip("lancedb")
pytest.importorskip("fastapi")

from small_vllm import SmallVllm
from starlette.testclient import TestClient

from arcaligner.apps.server import vllm_engine
from arcaligner.apps.server.app import ServerSettings, create_app
from arcaligner.apps.server.engine import Engine
from arcaligner.apps.server.request import Limits, UnavailableError
from arcaligner.apps.server.request import Request as EngineRequest
from arcaligner.apps.server.vllm_engine import NO_FILE, STREAM_INTERVAL, VllmEngine, VllmProcess, VllmServer
from arcaligner.common.files import ROOT

ADA = {"title": "Ada", "text": "Ada wrote the letter in 1843. It was long."}
RADIK = "Radik Zhaparov is a Kazakh ski jumper who has competed since 2003."
LIMITS = Limits(max_documents=8, max_slots=60, max_new_tokens=64, seconds=60)


@pytest.fixture
def pipeline(separate):
    model, processor = separate
    processor.copy_bonus = 8.0
    return pipeline_of(model.eval(), processor)


@pytest.fixture
def vllm(pipeline, tmp_path):
    server = SmallVllm(pipeline.model, pipeline.processor, tmp_path)
    server.url = server.start()
    yield server
    server.stop()


@pytest.fixture
def front(pipeline, vllm, tmp_path):
    engine = VllmEngine(pipeline, vllm=VllmServer(vllm.url), folder=tmp_path, limits=LIMITS)
    yield engine
    engine.close()


def ask(engine, *documents, question="Who wrote it?", **settings):
    request = EngineRequest(
        [{"role": "user", "content": question}], list(documents) or None, max_new_tokens=12, **settings
    )
    request.pieces = []
    request.on_text = request.pieces.append
    return engine.submit(request).result(60), request


@pytest.mark.parametrize("separate", ["start", "end"], indirect=True)
def test_vllm_answers_equal_own_engine(front, pipeline, vllm):
    """With vLLM the answers equal those of `Engine`: with one, several, repeated and no passages, and with gates."""
    assert pipeline.model.config.refines()
    engine = Engine(pipeline, limits=LIMITS)
    engine.weights_passages = False  # vLLM cannot
    for documents, settings in (
        ([ADA], {}),
        ([ADA, RADIK], {}),
        ([ADA, RADIK, ADA], {"max_passages": 8}),
        ([ADA, RADIK], {"max_passages": 8, "copy_bonus": 0.0, "tokens_per_slot": 3}),
        ([], {}),
    ):
        (answer, request), (expected, _) = (ask(server, *documents, **settings) for server in (front, engine))
        assert answer.text == expected.text == "".join(request.pieces)
        for name in ("finish_reason", "prompt_tokens", "statistics", "sources"):
            assert getattr(answer, name) == getattr(expected, name)
        assert answer.answerability == pytest.approx(expected.answerability, abs=1e-6)
    assert ask(front, ADA)[0].num_cached == 1
    engine.close()


def test_unread_pieces_come_together(front, vllm):
    """If the client does not stream, vLLM sends the answer in few pieces, and the answer is the same."""
    (streamed, _), message = ask(front, ADA, is_streamed=True), {"role": "user", "content": "Who wrote it?"}
    whole = front.submit(EngineRequest([message], [ADA], max_new_tokens=12)).result(60)
    assert [body["stream_interval"] for body in vllm.requests[-2:]] == [1, STREAM_INTERVAL]
    assert whole.text == streamed.text and whole.completion_tokens == streamed.completion_tokens


def test_sampling_settings_reach_vllm(front, vllm):
    settings = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    ask(front, ADA, sampling_top_k=5, **settings)
    assert settings | {"top_k": 5} == {name: vllm.requests[-1][name] for name in ("top_k", *settings)}


def test_abstentions_skip_vllm(front, vllm):
    assert ask(front, ADA)[0].text  # after this, vLLM has been checked
    before = len(vllm.requests)
    answer, request = ask(front, ADA, min_confidence=1.0)
    assert answer.text == "not in the text" == "".join(request.pieces) and len(vllm.requests) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads_files": False}, "would ignore precomputed passages"),
        ({"logprob_difference": 1.0}, "differ by 1.00 from those"),
    ],
)
def test_differing_vllm_is_refused(front, vllm, change, message):
    vars(vllm).update(change)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            front.warm_up()
    with pytest.raises(ValueError, match=message):
        ask(front, ADA)


@pytest.mark.parametrize("request_of_check", [NO_FILE, "logprobs"], ids=["file", "comparison"])
def test_failing_check_is_no_mistake(front, vllm, request_of_check):
    """If vLLM ends while it is checked, the client gets an error that asks it to try again later."""
    vllm.stop()
    with pytest.raises(UnavailableError):
        ask(front, ADA)
    vllm.fails_on = request_of_check
    vllm.start()
    with pytest.raises(UnavailableError, match="it is ending"):
        ask(front, ADA)
    vllm.fails_on = None
    assert ask(front, ADA)[0].text


def test_vllm_may_come_back(front, vllm):
    """While vLLM is down, requests end with 503; after its restart they are answered."""
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


def test_killed_vllm_loses_no_answers(front, vllm):
    """vLLM is killed twice: clients get 503 with `Retry-After`, try again, and all get their answers."""
    app, answers, refused = create_app(front, ServerSettings("tiny")), [], []
    killed = {2: threading.Event(), 4: threading.Event()}  # these turns wait for the kill, so some are refused

    def ask_some(number):
        client = TestClient(app, base_url="http://localhost")
        for turn in range(5):
            if turn in killed:
                assert killed[turn].wait(300)
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"Who is {number} {turn}?"}]}
            body |= {"documents": [ADA], "max_tokens": 4}
            while (response := client.post("/v1/chat/completions", json=body)).status_code == 503:
                refused.append(response.headers["retry-after"])
                time.sleep(0.05)
            answers.append(response.json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask_some, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for least, turn in ((4, 2), (10, 4)):
        while len(answers) < least:
            time.sleep(0.01)
        vllm.kill()
        killed[turn].set()
        seen, end = len(refused), time.monotonic() + 30
        while len(refused) < seen + 2 and time.monotonic() < end:
            time.sleep(0.01)
        vllm.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 20 and all(answers) and len(refused) >= 4 and set(refused) == {"5"}


def test_lora_on_text_is_refused(processor, vllm, tmp_path):
    """An aligner whose LoRA applies to text is refused: vLLM reads text with the base model alone."""
    model = aligner_for(processor, passage_attention="separate", lora_positions="all")
    independent = processor_with(processor, passage_attention="separate")
    with pytest.raises(ValueError, match="has `lora_positions` 'all'; .* because vLLM processes text without the LoRA"):
        VllmEngine(pipeline_of(model.eval(), independent), vllm=VllmServer(vllm.url), folder=tmp_path)


def test_vllm_ends_within_answer(front, vllm):
    ask(front, ADA)
    vllm.dies = True
    with pytest.raises(UnavailableError, match="Try again later"):
        ask(front, ADA, copy_bonus=0.0)
    client = TestClient(create_app(front, ServerSettings("tiny")), base_url="http://localhost")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "documents": [ADA], "stream": True}
    lines = [line for line in client.post("/v1/chat/completions", json=body).text.splitlines() if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    vllm.dies, vllm.reads_files = False, False  # another vLLM has taken its place
    with pytest.raises(ValueError, match="would ignore precomputed passages"):
        ask(front, ADA)
    vllm.reads_files = True
    assert ask(front, ADA)[0].text


def test_long_prompts_are_refused(front, vllm):
    """Several passages together, and one passage alone, are refused if they are too long for vLLM."""
    vllm.max_model_len = 45
    front.warm_up()
    for documents in ([RADIK] * 4, [RADIK * 3]):
        with pytest.raises(ValueError, match=r"The prompt takes \d+ positions.*expected at most 44"):
            ask(front, *documents, max_passages=8, tokens_per_slot=2)


def test_full_folder_gives_503(front, tmp_path, monkeypatch):
    ask(front, RADIK)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arcaligner.kv_cache_arcaligner.save_keys_values", full)
    assert ask(front, RADIK)[0].text  # its file exists
    with pytest.raises(OSError, match="could not be written"):
        ask(front, ADA)


def test_two_fronts_share_a_folder(front, pipeline, vllm, tmp_path):
    """Two servers precompute the same passage at the same time: one file is written, and both answers are the same."""
    other = VllmEngine(pipeline, vllm=VllmServer(vllm.url), folder=tmp_path, limits=LIMITS)
    requests = [EngineRequest([{"role": "user", "content": "Who?"}], [ADA], max_new_tokens=8) for _ in range(8)]
    answers = [engine.submit(request) for engine, request in zip([front, other] * 4, requests, strict=True)]
    assert len({answer.result(60).text for answer in answers}) == 1
    assert not list(tmp_path.glob("*.tmp"))
    other.close()


def wait_for(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "it did not happen within a minute"
        time.sleep(0.05)


def test_ended_process_restarts(tmp_path):
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$$ $*" >> {tmp_path}/started\nexec sleep 600\n')
    script.chmod(0o755)
    process = VllmProcess(str(script), "base", tmp_path, ["--max-model-len", "8"], port=1)

    def started(count):
        path = tmp_path / "started"
        wait_for(lambda: path.exists() and len(path.read_text().splitlines()) == count)
        return path.read_text().splitlines()

    (line,) = started(1)
    assert "--model base" in line and line.endswith("--max-model-len 8") and process.is_starting
    process.process.send_signal(signal.SIGKILL)
    assert started(2)[0] == line
    process.close()
    assert not process.is_starting
    with pytest.raises(OSError, match="vLLM cannot be started with .*make vllm"):
        VllmProcess(str(tmp_path / "missing"), "base", tmp_path)


def is_gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # it has ended, but no parent has reaped it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_vllm_ends_with_its_parent(number, tmp_path):
    """vLLM ends with the process that started it, and so do its children, even if they ignore SIGTERM."""
    script, pids = tmp_path / "python", tmp_path / "pids"
    child = "sh -c 'trap : TERM; echo $$ >> pids; while :; do sleep 0.1; done'"
    script.write_text(f"#!/bin/sh\ncd {tmp_path}\necho $$ >> pids\n{child} &\nwait\n")
    script.chmod(0o755)
    code = f"""
import time
from pathlib import Path
from arcaligner.apps.server import vllm_engine
vllm_engine.END_SECONDS = 1
vllm_engine.VllmProcess({str(script)!r}, "base", Path({str(tmp_path)!r}), port=1)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        assert all(process.is_running() for process in processes)
        parent.send_signal(number)
    wait_for(lambda: all(map(is_gone, processes)))


def test_options_of_the_command_line(run_cli, checkpoint_dir, monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_vllm", lambda: None)
    serve = ("serve", "--checkpoint", checkpoint_dir, "--port", "0")
    for options, message in (
        (("--vllm-url", "http://x"), "work with `--engine vllm`"),
        (("--engine", "vllm"), "vLLM is not installed. Run `make vllm`"),
        (("--engine", "vllm", "--vllm-url", "http://x"), "Pass this folder with `--passages`"),
        (
            ("--engine", "vllm", "--vllm-url", "http://x", "--vllm-options", "-x"),
            "are for a vLLM that this command starts",
        ),
    ):
        code, _, output = run_cli(*serve, *options)
        assert code == 1 and message in output


@pytest.mark.load
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="`apt-get install haproxy`")
def test_ended_replica_loses_no_answers(pipeline, tmp_path):
    """Two replicas run behind the router of `docs/container`; one ends and restarts while eight clients ask."""
    replicas = [SmallVllm(pipeline.model, pipeline.processor, tmp_path) for _ in range(2)]
    ports = {
        str(default): replica.start().rpartition(":")[2]
        for default, replica in zip((8001, 8002), replicas, strict=True)
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        ports["9000"] = str(free.getsockname()[1])
    settings = (ROOT / "docs" / "container" / "haproxy.cfg").read_text()
    for default, port in ports.items():
        assert settings.count(f"127.0.0.1:{default}\n") == 1
        settings = settings.replace(f"127.0.0.1:{default}\n", f"127.0.0.1:{port}\n")
    (tmp_path / "haproxy.cfg").write_text(settings)
    router = subprocess.Popen(["haproxy", "-f", str(tmp_path / "haproxy.cfg")])
    engine = VllmEngine(pipeline, vllm=VllmServer(f"http://127.0.0.1:{ports['9000']}"), folder=tmp_path, limits=LIMITS)
    end, answers = time.monotonic() + 120, []

    def again(work):
        """Repeats `work` until it does not raise `UnavailableError`, as clients do after a 503."""
        while True:
            try:
                return work()
            except UnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def client(number):
        for turn in range(12):
            question = f"Who wrote {number} {turn}?"
            answers.append(again(lambda: ask(engine, ADA, question=question, copy_bonus=0.0))[0].text)  # noqa: B023

    again(engine.warm_up)  # once the router listens

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for change in (replicas[0].stop, replicas[0].start, replicas[1].stop):
        before = len(answers)
        while len(answers) < before + 16 and any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
        change()
    for thread in threads:
        thread.join()
    engine.close()
    router.terminate()
    router.wait()
    replicas[0].stop()
    assert len(answers) == 96 and all(len(replica.requests) > 8 for replica in replicas)
