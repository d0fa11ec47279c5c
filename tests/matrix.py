"""Tries this package with other versions of what it stands on, each in an environment of its own, and makes a table.

    python tests/matrix.py                                          # all of COMBINATIONS that were not tried yet
    python tests/matrix.py "transformers==5.10.4 peft==0.18.1"      # one, again
    python tests/matrix.py --table docs/versions.md                 # writes what was found between the marks there

It needs `uv`, which decides by its own settings where wheels come from: for torch without CUDA, `UV_TORCH_BACKEND=cpu`
or `UV_FIND_LINKS`. What a combination does not name is the newest that goes with it. In each environment the shipped
checkpoint is loaded as remote code, without this package, answers a question in three ways and is saved; then the
package trains for one step. Nothing is downloaded but wheels: `python -m arcaligner.cli.default_models` has to have put
the default models where they are found.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "versions"
CHECKPOINT = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
TOOLS = ("uv", "--quiet")
SHOWN = ("python", "torch", "transformers", "peft", "sentence-transformers", "trl", "huggingface-hub")
STEPS = ("answers", "keeps slots", "saves", "trains")
MARKS = "<!-- versions: tests/matrix.py -->", "<!-- end of versions -->"
OLDEST = "torch==2.9.1 transformers==5.10.4 peft==0.18.1 sentence-transformers==5.2.3 trl==1.8.0"
# One library is older at a time, then all of them; and other Pythons.
COMBINATIONS = [
    "",
    *(f"transformers==5.{minor}.*" for minor in range(23, 9, -1)),
    *(f"torch=={version}" for version in ("2.15.0", "2.14.1", "2.12.1", "2.11.0", "2.10.0", "2.9.1")),
    *(f"peft=={version}" for version in ("0.20.0", "0.19.1", "0.18.1")),
    *(f"sentence-transformers=={version}.*" for version in ("6.1", "6.0", "5.7", "5.6", "5.5", "5.4", "5.3", "5.2")),
    *(f"trl==1.{minor}.*" for minor in range(15, 7, -1)),
    "python==3.12",
    "python==3.13",
    OLDEST,
    f"{OLDEST} python==3.13",
]
DOCUMENTS = ["The meeting was moved from Monday to Thursday. Anna brings the cake."]
QUESTIONS = {"When is the meeting now?": "Thursday", "Who brings the cake?": "Anna"}


def probe(checkpoint: str) -> None:
    """Runs in the environment: prints what works with its libraries, as JSON in the last line."""
    from importlib.metadata import version

    sys.modules["arcaligner"] = None  # until training, importing the package is an error
    found = {name: version(name) for name in SHOWN[1:]} | {"python": sys.version.split()[0]}
    for step in STEPS:
        try:
            found |= {step: True} | globals()[step.replace(" ", "_")](checkpoint)
        except BaseException as error:
            found |= {step: False, "error": f"{step}: {type(error).__name__}: {error}"}
            break
    print(json.dumps(found))


def answers(checkpoint: str) -> dict:
    """The pipeline, and `generate` with the processor's inputs."""
    from transformers import AutoModelForCausalLM, AutoProcessor, pipeline

    global model, processor
    trust = {"trust_remote_code": True}
    ask = pipeline("text-generation", model=checkpoint, device="cpu", **trust)
    rows = [{"question": question, "documents": DOCUMENTS} for question in QUESTIONS]
    given = [record[0]["generated_text"].strip() for record in ask(rows, return_slots=True)]
    assert given == list(QUESTIONS.values()), given
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **trust)
    processor = AutoProcessor.from_pretrained(checkpoint, **trust)
    inputs = inputs_of(next(iter(QUESTIONS)))
    new = model.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    assert processor.decode(new, skip_special_tokens=True) == "Thursday"
    return {"logits": model(**inputs).logits[0, -1, ::16].tolist()}


def inputs_of(question: str) -> dict:
    """Model inputs for a question about the documents."""
    chat = [{"role": "user", "content": question}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(chat, documents=DOCUMENTS, **options)


def keeps_slots(checkpoint: str) -> dict:
    """Questions from slots that are kept, also by another store with the same folder."""
    with tempfile.TemporaryDirectory() as folder:
        for stored in (model.slot_prefix_store(processor, folder=folder) for _ in range(2)):
            inputs = stored.prepare(list(QUESTIONS), [DOCUMENTS] * len(QUESTIONS))
            new = model.generate(**inputs, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
            assert processor.batch_decode(new, skip_special_tokens=True) == list(QUESTIONS.values())
        assert (stored.loads, stored.misses) == (1, 0), (stored.loads, stored.misses)
    return {}


def saves(checkpoint: str) -> dict:
    """What is saved computes the same."""
    from transformers import AutoModelForCausalLM, AutoProcessor

    inputs = inputs_of(next(iter(QUESTIONS)))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        assert again(**inputs).logits.equal(model(**inputs).logits)
    return {}


def trains(checkpoint: str) -> dict:
    """One step of stage I with the package; its loss."""
    del sys.modules["arcaligner"]
    from arcaligner.train.stages import RECIPES

    recipe = RECIPES / "tiny" / "1_reconstruction.yaml"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "arcaligner.train.sft", "--config", str(recipe), "--max_steps", "1"]
        run = subprocess.run([*command, "--output_dir", folder], capture_output=True, text=True)
        assert run.returncode == 0, (run.stdout + run.stderr).strip()[-2000:]
        assert Path(folder, "model.safetensors").exists()
    return {"loss": float(re.search(r"'train_loss': '?([\d.]+)", run.stdout + run.stderr)[1])}


def attempt(combination: str) -> dict:
    """Makes an environment for a combination, and what `probe` finds in it."""
    wanted = dict(each.split("==") for each in combination.split())
    python = wanted.pop("python", f"{sys.version_info.major}.{sys.version_info.minor}")
    with tempfile.TemporaryDirectory(prefix="versions-") as temporary:
        folder, checkpoint = Path(temporary), Path(temporary, "checkpoint")
        shutil.copytree(CHECKPOINT, checkpoint)  # with files in place of links
        subprocess.run([*TOOLS, "venv", "--python", python, folder / "env"], check=True)
        made = install(folder, f"{ROOT}[train]", *(f"{name}=={version}" for name, version in wanted.items()))
        if made.returncode != 0:
            return dict.fromkeys(STEPS, False) | {"error": f"cannot be installed: {made.stderr.strip()[-1000:]}"}
        conflicts = subprocess.run([*TOOLS, "pip", "check", "--python", folder / "env"]).returncode
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        command = [folder / "env" / "bin" / "python", __file__, "--probe", checkpoint]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return json.loads(run.stdout.splitlines()[-1]) | {"pip check": conflicts == 0}


def install(folder: Path, package: str, *pins: str) -> subprocess.CompletedProcess:
    """Installs into the environment `env` in a folder."""
    (folder / "build.cfg").write_text(f"[build]\nbuild_base={folder}/build\n[egg_info]\negg_base={folder}\n")
    os.environ["DIST_EXTRA_CONFIG"] = str(folder / "build.cfg")  # or setuptools would leave files in the tree
    command = [*TOOLS, "pip", "install", "--python", folder / "env", package, *pins]
    return subprocess.run(command, capture_output=True, text=True)


def table() -> list[str]:
    """The lines of a Markdown table of all that was tried."""
    tried = {each: RESULTS / f"{slug(each)}.json" for each in COMBINATIONS}
    found = {each: json.loads(path.read_text()) for each, path in tried.items() if path.exists()}
    columns = [*SHOWN, *STEPS, "logits differ by", "loss of one step"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    newest = found.get("", {}).get("logits", [])
    for combination, each in found.items():
        named = {name.split("==")[0] for name in combination.split()}
        cells = [f"**{each.get(name, '-')}**" if name in named else each.get(name, "-") for name in SHOWN]
        cells += ["yes" if each.get(step) else "**no**" for step in STEPS]
        difference = max((abs(a - b) for a, b in zip(each.get("logits", []), newest, strict=False)), default=None)
        cells += ["-" if difference is None else f"{difference:.0e}", each.get("loss", "-")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def slug(combination: str) -> str:
    """The name of a combination's file."""
    return re.sub(r"[^\w.=-]+", "_", combination).strip("_") or "newest"


def main() -> None:
    """The command; fails when a combination does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("combinations", nargs="*", help="Pins such as 'torch==2.11.0 peft==0.20.0'. Default: all.")
    parser.add_argument("--table", type=Path, help="Document to write the table to, between its marks.")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        return probe(options.probe)
    RESULTS.mkdir(parents=True, exist_ok=True)
    wanted = [] if options.table and not options.combinations else options.combinations or COMBINATIONS
    failed = False
    for combination in wanted:
        path = RESULTS / f"{slug(combination)}.json"
        if options.combinations or not path.exists():
            found = attempt(combination)
            path.write_text(json.dumps(found))
            print(combination or "newest", found.get("error", "works"), flush=True)
            failed |= "error" in found
    if options.table:
        before, rest = options.table.read_text(encoding="utf-8").split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        options.table.write_text("\n".join([before + MARKS[0], *table(), MARKS[1] + after]), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
