"""The two who use the Hub in tests: somebody who pushes, and somebody who has nothing but the repository's name.

Both are processes of their own, since huggingface_hub reads its settings when it is imported.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE

from hub_server import OWNER

# Runs one command of the command line for each line it reads, in a process of its own, whose id it tells first.
PUSHER = """
import io, json, os, sys, time, traceback

time.sleep = lambda seconds: None  # the client waits before it tries again
from arcaligner import cli
from arcaligner.train import peft_export, push  # once, rather than in each process

for line in sys.stdin:
    command = os.fork()
    if command:
        status = os.waitpid(command, 0)[1]
        if os.WIFSIGNALED(status):
            print(json.dumps([-os.WTERMSIG(status), "", ""]), flush=True)
        continue
    print(os.getpid(), flush=True)
    arguments, os.environ["HF_TOKEN"] = json.loads(line)
    out, err = cli.output.file, cli.messages.file = io.StringIO(), io.StringIO()
    try:
        cli.main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
    os._exit(0)
"""

# What somebody does who has transformers and the name of the repository; then the card's own example.
LOADER = """
import json, re, sys

sys.modules["arcaligner"] = None  # from here on, importing it is an error
from huggingface_hub import hf_hub_download
from transformers import AutoModel, AutoModelForCausalLM, AutoProcessor

repo, question, documents = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
processor = AutoProcessor.from_pretrained(repo, trust_remote_code=True)
processor.encoder_device = "cpu"
inputs = processor(text=question, documents=documents, return_tensors="pt")
logits = []
for auto_class in (AutoModel, AutoModelForCausalLM):
    model = auto_class.from_pretrained(repo, trust_remote_code=True).eval()
    logits.append(model(**inputs).logits[0].tolist())
adapters = [list(m.lora_A) for m in model.modules() if "lora_A" in m._modules]
card = open(hf_hub_download(repo, "README.md"), encoding="utf-8").read()
names = {}
lines = re.search("```python\\n(.*?)```", card, re.DOTALL)[1].rstrip().split("\\n")
exec("\\n".join([*lines[:-1], "answer = " + lines[-1]]), names)
json.dump({"logits": logits, "adapters": adapters, "answer": names["answer"]}, sys.stdout)
"""


class CommandLine:
    """Commands of the command line, one after the other."""

    def __init__(self, process: subprocess.Popen):
        self.process = process

    def start(self, *arguments, token: str = OWNER) -> int:
        """Starts a command with a token; gives the id of its process."""
        self.process.stdin.write(json.dumps([[str(argument) for argument in arguments], token]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def result(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the command that was started."""
        return tuple(json.loads(self.process.stdout.readline()))

    def __call__(self, *arguments, token: str = OWNER) -> tuple[int, str, str]:
        self.start(*arguments, token=token)
        return self.result()


@contextmanager
def running_command_line(environment: dict[str, str]) -> Iterator[CommandLine]:
    """A [`CommandLine`] in an environment."""
    command = [sys.executable, "-c", PUSHER]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        yield CommandLine(process)
        process.stdin.close()


def load_and_answer(environment: dict[str, str], folder: Path, repo_id: str, question: str, documents: list) -> dict:
    """What the models, the processor and the card's quick start of a repository give, asked from `folder`."""
    loader = subprocess.run(
        [sys.executable, "-c", LOADER, repo_id, question, json.dumps(documents)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert loader.returncode == 0, loader.stderr[-4000:]
    return json.loads(loader.stdout)
