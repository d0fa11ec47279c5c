"""The commands of the documents run one after the other, unchanged, from a wheel, in a folder that has only
a reader's own files.

All of them take ten minutes: `pytest -m load tests/test_commands.py`.
"""

import gzip
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The order matters: a command uses files that earlier ones wrote.
PAGES = ("docs/training.md", "README.md", "docs/corpus.md", "docs/evaluation.md", "docs/speed.md", "docs/server.md")
PAGES += ("docs/engines.md", "docs/gpu.md", "docs/gpu_training.md", "docs/paper.md", "docs/versions.md")
# Options that are added to a command, by its beginning, so that it ends within a minute.
SHORTER = {
    "python -m arcaligner train --recipe tiny --output": "--max_train_samples 4",
    "python -m arcaligner train --recipe tiny": "-- --max_train_samples 4",
    "python -m arcaligner.train.full_text": "--max_train_samples 4 --bf16 false",
    "python -m arcaligner.train.made_questions": "-n 1 --questions 1",
    "python -m arcaligner evaluate --recipe smollm2_135m --tasks": "--data FOLDER --methods naive,arcaligner -n 2",
    "python -m arcaligner evaluate --recipe": "--tasks squad --methods naive,standard_rag,arcaligner -n 2",
    "python -m arcaligner evaluate": "--data FOLDER -n 2",
    "python -m arcaligner.benchmarks.latency": "--sizes 1 --tokens-per-slot 2 --seconds 1",
    "python -m arcaligner.benchmarks.shape": "--shape tiny --device cpu --passages 1 --seconds 20",
    "python -m arcaligner.benchmarks.cached_passages": "--sizes 1 --tokens-per-slot 2 --seconds 1",
    "python -m arcaligner reproduce": "--questions 2",
    "arcaligner compare": "--tokens-per-slot 2 -n 2",
    "python -m arcaligner.benchmarks.serving": "--requests 4 --clients 2",
}
# Commands that are not run here, by a part of their text, with the reason.
NOT_HERE = {
    "prepare_data": "the Hub; tested on copies in tests/train/test_prepare_data.py",
    "train --recipe smollm2_135m": "tens of hours",
    "train.confidence": "thousands of questions; tested in tests/train/test_confidence.py",
    "train.ranking": "hundreds of questions; tested in tests/train/test_ranking.py",
    "--accelerate": "several GPUs",
    "accelerate launch": "several machines",
    "arcaligner push": "the Hub",
    "user/aligner": "the Hub",
    "analyses.abstentions": "answers at two rates; tested in tests/evaluation/test_results.py",
    "lm_eval": "the extra `lm-eval`",
    "llama.cpp": "the extra `llama-cpp`",
    "vllm": "vLLM's own environment; tested in tests/apps/engines/test_vllm.py",
    "haproxy": "HAProxy, and two vLLM",
    "evaluation.judge": "a judge; tested in tests/evaluation/test_judge.py",
    "runs/retrieved --tasks nq --top-k": "what evaluation.retrieval has written",
    "evaluation.retrieval": "a retriever of the Hub; tested in tests/evaluation/test_retrieval.py",
    "tests/matrix.py": "minutes for each environment",
    "reproduce all": "an hour",
    "evaluation.publish": "writes the documents of a clone",
}


def documented_commands() -> list[str]:
    """Commands of the package in the documents, each once; `echo` and `curl` with them."""
    commands = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = re.sub(
                r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), block.replace("\\\n", " ")
            ).splitlines()
            commands += [re.sub(r"(^|\s+)# .*", "", line.strip()) for line in lines]
    left_out = ("make", "pip", "source")
    return list(dict.fromkeys(command for command in commands if command and not command.startswith(left_out)))


DOCUMENTED = documented_commands()
COMMANDS = [command for command in DOCUMENTED if not any(part in command for part in NOT_HERE)]


@pytest.fixture(scope="module")
def place(tmp_path_factory, installed) -> Path:
    """A folder with a reader's files."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("letters", "FOLDER", "tests/data", "data"):
        (folder / name).mkdir(parents=True)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=lambda _, names: {*names} - {"precision.md", "server.md"})
    (folder / "letters" / "letter.txt").write_text("It was written by Ada.")
    (folder / "mine.jsonl").write_text('{"question": "Who wrote it?", "answers": ["Ada"]}\n')
    shutil.copytree(installed / "train" / "recipes", folder / "train" / "recipes")  # of a clone
    *rows, last = (installed / "tests" / "data" / "squad_dev_sample.jsonl").read_bytes().splitlines(keepends=True)[:9]
    for name in (
        "nq",
        "squad",
        "hotpotqa",
        "recon_train",
        "paragraphs",
        "FOLDER/squad",
        "FOLDER/nq",
        "data/train_qa",
        "data/train_extra",
    ):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(b"".join(rows)))
    (folder / "data" / "recon_train.jsonl.gz").write_bytes(gzip.compress(last))  # a paragraph without questions
    (folder / "tests" / "data" / "squad_dev_sample.jsonl").write_bytes(b"".join(rows))  # the README's, of a clone
    return folder


@pytest.fixture
def start(place, installed):
    """Starts a command in a shell in which `python` and `arcaligner` are the wheel's, without a network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(installed.parent), "HF_HUB_OFFLINE": "1", "PATH": path}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return lambda command: subprocess.Popen(["bash", "-c", command], cwd=place, env=environment, **output)


def end_of(process: subprocess.Popen) -> tuple[int, str]:
    """The exit code and the output of a command."""
    output, _ = process.communicate()
    return process.returncode, output


def test_lists_of_commands_are_current():
    """There are at least twenty commands, and each reason not to run one is used."""
    assert len(COMMANDS) >= 20
    for part in (*NOT_HERE, *SHORTER):
        assert any(part in command for command in DOCUMENTED), part


@pytest.mark.load
@pytest.mark.default_backbone
@pytest.mark.parametrize("command", [typed for typed in COMMANDS if "serv" not in typed and "curl" not in typed])
def test_documented_command_runs(command, start):
    added = next((short for beginning, short in SHORTER.items() if command.startswith(beginning)), "")
    code, output = end_of(start(f"{command} {added}"))
    assert code == 0, output


@pytest.mark.load
@pytest.mark.default_backbone
def test_documented_server_answers(start):
    """`serve`, `curl` and the load generator, at a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = ("curl", "arcaligner serve", "benchmarks.serving")
    (curl,), serve, loads = ([command for command in COMMANDS if part in command] for part in parts)
    assert len(serve) == len(loads) == 2
    for command in serve:
        server = start(f"exec {command} --port {port}")
        try:
            next(line for line in server.stdout if f"http://127.0.0.1:{port}" in line)
            code, output = end_of(start(f"{curl.replace(':8000', f':{port}')} --fail --silent --show-error"))
            assert code == 0 and '"content"' in output, output
            for load in loads:
                shorter = SHORTER["python -m arcaligner.benchmarks.serving"]
                code, output = end_of(start(f"{load} {shorter} --url http://127.0.0.1:{port}"))
                assert code == 0 and "| 0 |" in output, output
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
