"""The commands of the documents, run one after the other as they stand there, from a wheel, in a folder that has only
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
# In an order in which each finds what those before have made.
PAGES = ("docs/training.md", "README.md", "docs/corpus.md", "docs/evaluation.md", "docs/speed.md", "docs/server.md")
PAGES += ("docs/engines.md",)
# What is added to a command, by its beginning, so that it ends within a minute.
SHORTER = {
    "python -m arcaligner train --recipe tiny --output": "--max_train_samples 4",
    "python -m arcaligner train --recipe tiny": "-- --max_train_samples 4",
    "python -m arcaligner evaluate --recipe smollm2_135m --tasks": "--data FOLDER --methods naive,arcaligner -n 2",
    "python -m arcaligner evaluate --recipe": "--tasks squad --methods naive,standard_rag,arcaligner -n 2",
    "python -m arcaligner evaluate": "--data FOLDER -n 2",
    "python -m arcaligner.benchmarks.latency": "--sizes 1 --tokens-per-slot 2 --rounds 2 --seconds 1",
    "python -m arcaligner.benchmarks.kept": "--sizes 1 --tokens-per-slot 2 --rounds 2 --seconds 1",
    "arcaligner compare": "--tokens-per-slot 2 -n 2",
}
# Commands that are not run here, by what stands in them.
NOT_HERE = {
    "prepare_data": "the Hub; tested on copies in tests/train/test_prepare_data.py",
    "train --recipe smollm2_135m": "tens of hours",
    "--accelerate": "several GPUs",
    "arcaligner push": "the Hub",
    "user/aligner": "the Hub",
    "analyses.refusals": "answers at two rates; tested in tests/evaluation/test_refusals.py",
    "lm_eval": "the extra `lm-eval`",
    "llama.cpp": "the extra `llama-cpp`",
    "evaluation.publish": "writes the documents of a clone",
}


def documented_commands() -> list[str]:
    """Commands of the package in the documents, each once; `echo` and `curl` with them."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [re.sub(r"\s+# .*", "", line) for line in lines if not line.startswith(("make", "pip", "source"))]
    return list(dict.fromkeys(found))


def why_not(command: str) -> str | None:
    return next((reason for part, reason in NOT_HERE.items() if part in command), None)


COMMANDS = [command for command in documented_commands() if why_not(command) is None]


@pytest.fixture(scope="module")
def place(tmp_path_factory, installed) -> Path:
    """A folder with a reader's files. `arcaligner` is the wheel's."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("docs", "letters", "FOLDER", "tests/data"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "precision.md", folder / "docs")
    (folder / "letters" / "letter.txt").write_text("It was written by Ada.")
    (folder / "mine.jsonl").write_text('{"question": "Who wrote it?", "answers": ["Ada"]}\n')
    rows = (installed / "tests" / "data" / "squad_dev_sample.jsonl").read_bytes().splitlines(keepends=True)[:8]
    names = ("nq", "squad", "hotpotqa", "recon_train", "paragraphs", "FOLDER/squad", "FOLDER/nq")
    for name in names:
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(b"".join(rows)))
    (folder / "tests" / "data" / "squad_dev_sample.jsonl").write_bytes(b"".join(rows))  # the README's, of a clone
    return folder


@pytest.fixture
def environment(installed) -> dict[str, str]:
    """That of a shell in which `python` and `arcaligner` are the wheel's, without a network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PYTHONPATH": str(installed.parent), "HF_HUB_OFFLINE": "1", "PATH": path}


def test_there_are_twenty_commands_and_reasons_not_to_run_are_of_use():
    assert len(COMMANDS) >= 20
    documented = documented_commands()
    for part in (*NOT_HERE, *SHORTER):
        assert any(part in command for command in documented), part


@pytest.mark.load
@pytest.mark.default_backbone
@pytest.mark.parametrize("command", [each for each in COMMANDS if "serv" not in each and "curl" not in each])
def test_a_command_of_the_documents_runs(command, place, environment):
    added = next((more for beginning, more in SHORTER.items() if command.startswith(beginning)), "")
    run = subprocess.run(
        ["bash", "-c", f"{command} {added}"], cwd=place, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.load
@pytest.mark.default_backbone
def test_the_server_of_the_documents_answers_what_they_ask(place, environment):
    """`serve` and `curl`, at a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve, curl = ([each for each in COMMANDS if part in each] for part in ("arcaligner serve", "curl"))
    shutil.copy(ROOT / "docs" / "server.md", place / "docs")
    for command in serve:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command} --port {port}"],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            for line in server.stdout:
                if f"http://127.0.0.1:{port}" in line:
                    break
            for ask in curl:
                asked = f"curl --fail --silent --show-error{ask.replace(':8000', f':{port}')[4:]}"
                run = subprocess.run(["bash", "-c", asked], cwd=place, env=environment, capture_output=True, text=True)
                assert run.returncode == 0 and '"content"' in run.stdout, run.stdout + run.stderr
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
    assert len(serve) == 2 and len(curl) == 1
