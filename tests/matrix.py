"""Tries the shipped checkpoint with the newest and the oldest versions of its dependencies, a line for each.

    python tests/matrix.py
    python tests/matrix.py "--python 3.12 --with transformers==5.15.*"    # options of `uv run`; the rest is the newest

In an environment of its own the checkpoint is loaded as remote code, without this package, answers, caches a passage
and is saved; then the package trains for one step, plans a training, and parses the baselines' recipes. It needs `uv`,
and the default models where `python -m arcaligner default-models` puts them. `UV_TORCH_BACKEND=cpu` takes torch without
CUDA.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
LIBRARIES = ("torch", "transformers", "peft", "sentence-transformers", "trl", "huggingface-hub")
NEWEST = "--python 3.13"
OLDEST = "--python 3.11 --with torch==2.9.1,transformers==5.10.4,peft==0.18.1,sentence-transformers==5.2.3,trl==1.8.0"
BASELINES = {"full_text": ("full_text", "full_text_apart", "question_maker"), "cocom": ("cocom_pretraining", "cocom")}
DOCUMENTS = ["The meeting was moved from Monday to Thursday. Anna brings the cake."]
QUESTIONS = {"When is the meeting now?": "Thursday", "Who brings the cake?": "Anna"}


def probe(checkpoint: str) -> None:
    """Runs in the environment: prints its versions and some logits as JSON, or ends in an error."""
    sys.modules["arcaligner"] = None  # importing the package is an error until the training
    from transformers import AutoModelForCausalLM, AutoProcessor, pipeline

    trust, answers = {"trust_remote_code": True}, list(QUESTIONS.values())
    ask = pipeline("text-generation", model=checkpoint, device="cpu", **trust)
    records = ask([{"question": question, "documents": DOCUMENTS} for question in QUESTIONS])
    assert [record[0]["generated_text"].strip() for record in records] == answers, records
    model, processor = (auto.from_pretrained(checkpoint, **trust) for auto in (AutoModelForCausalLM, AutoProcessor))
    inputs = processor(text="When is the meeting now?", documents=DOCUMENTS, return_tensors="pt")
    logits = model(**inputs).logits
    with tempfile.TemporaryDirectory() as folder:
        for store in (model.passage_cache(processor, folder=folder) for _ in range(2)):
            kept = store.prepare(list(QUESTIONS), [DOCUMENTS] * len(QUESTIONS))
            new = model.generate(**kept, max_new_tokens=8)[:, kept["input_ids"].shape[1] :]
            assert processor.batch_decode(new, skip_special_tokens=True) == answers
        assert (store.loads, store.misses) == (1, 0)
        model.save_pretrained(folder)
        assert AutoModelForCausalLM.from_pretrained(folder, **trust)(**inputs).logits.equal(logits)
        del sys.modules["arcaligner"]
        stages, recipe = (importlib.import_module(f"arcaligner.train.{name}") for name in ("stages", "recipe"))
        for options in (["--dry-run"], ["--", "--max_steps", "1"]):  # all three stages
            command = [sys.executable, "-m", "arcaligner", "train", "--recipe", "tiny", *options]
            subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
    for name, files in BASELINES.items():  # versions differ in which keys they know
        script = importlib.import_module(f"arcaligner.train.{name}")
        for file in files:
            path = stages.RECIPES / "smollm2_135m" / f"{file}.yaml"
            recipe.parse_recipe(script.SCRIPT, script.KINDS, ["--config", str(path), "--bf16", "false"])
    versions = [f"python {sys.version.split()[0]}", *(f"{name} {version(name)}" for name in LIBRARIES)]
    print(json.dumps([" ".join(versions), logits[0, -1, ::16].tolist()]))


def attempt(combination: str) -> subprocess.CompletedProcess:
    """Runs `probe` in an environment of a combination."""
    command = ["uv", "run", "--quiet", "--no-project", "--isolated", "--refresh-package=arcaligner"]
    command += [f"--with={ROOT}[train]", *combination.split()]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = shutil.copytree(CHECKPOINT, Path(folder, "checkpoint"))  # copied files instead of links
        setup = Path(folder, "setup.cfg")  # else setuptools leaves files in the tree
        setup.write_text(f"[build]\nbuild_base={folder}/build\n[egg_info]\negg_base={folder}\n")
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{folder}/hf", "DIST_EXTRA_CONFIG": str(setup), "PYTHONPATH": ""}
        command += ["python", __file__, "--probe", checkpoint]
        return subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True)


def main(combinations: list[str]) -> None:
    """Prints a line for each combination; exits with an error if one fails."""
    first, has_failed = None, False
    for combination in combinations:
        if (run := attempt(combination)).returncode == 0:
            versions, logits = json.loads(run.stdout.splitlines()[-1])
            first = first or logits
            difference = max(abs(a - b) for a, b in zip(logits, first, strict=True))
            print(f"{versions}: works, logits differ from those of the first by {difference:.0e}", flush=True)
        else:
            print(f"{combination} fails: {run.stderr.strip()[-2000:]}", flush=True)
            has_failed = True
    sys.exit(has_failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2])
    else:
        main(sys.argv[1:] or [NEWEST, OLDEST])
