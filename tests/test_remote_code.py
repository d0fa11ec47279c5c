"""A checkpoint folder stands on its own: it loads without the package.

The loading runs in a fresh process without the package, without network and with an empty cache of
code, through transformers' Auto classes and `pipeline` alone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import pipeline_of
from safetensors.torch import load_file
from tiny_models import random_head
from transformers.dynamic_module_utils import get_relative_import_files

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.loading_arcaligner import CODE_FILES

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada. Nobody else knew.", {"title": "T", "text": "So be it."}]
ROW = {"question": QUESTION, "documents": DOCUMENTS}
ROOT = Path(__file__).parents[1]

# The fresh process makes a model from a configuration and saves it, before any code but the model's is loaded; then it
# loads the checkpoint and answers, saves it, loads the copy and answers again.
SCRIPT = """
import json, sys

sys.modules["arcaligner"] = None  # from here on, importing it is an error
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoProcessor, pipeline

first, second, made, row = sys.argv[1:]
row = json.loads(row)
trust = {"trust_remote_code": True}

loaded = AutoModelForCausalLM.from_pretrained(first, **trust)
config = loaded.config
fresh = type(loaded)(type(config)(text_config=config.text_config, lora_r=4))
fresh.save_pretrained(made)
again = AutoModelForCausalLM.from_pretrained(made, **trust)
assert all(again.state_dict()[name].equal(tensor) for name, tensor in fresh.state_dict().items())


def answers(folder):
    config = AutoConfig.from_pretrained(folder, **trust)
    processor = AutoProcessor.from_pretrained(folder, **trust)
    processor.encoder.device = "cpu"
    inputs = processor(text=row["question"], documents=row["documents"], return_tensors="pt")
    logits = []
    for auto_class in (AutoModelForCausalLM, AutoModel):
        model = auto_class.from_pretrained(folder, **trust).eval()
        logits.append(model(**inputs).logits[0, -1].tolist())
    assert model.passage_cache(processor).prepare(row["question"], row["documents"])["past_key_values"]
    records = []
    for task in ("text-generation", None):
        ask = pipeline(task, model=folder, device="cpu", max_new_tokens=6, **trust)
        records.append(ask(row, return_slots=True))
    return {"model_type": config.model_type, "logits": logits, "records": records}, ask


result, ask = answers(first)
ask.save_pretrained(second)
json.dump([result, answers(second)[0]], sys.stdout)
"""


@pytest.fixture(scope="module")
def fresh_process(checkpoint_dir, tmp_path_factory) -> tuple[list[dict], list[Path]]:
    """Answers of the script from the checkpoint and from its saved copy, and the folders of both."""
    folder = tmp_path_factory.mktemp("fresh")
    shutil.copytree(checkpoint_dir, folder / "first")
    processor = ArcAlignerProcessor.from_pretrained(folder / "first")
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir)
    random_head(model)
    processor.no_answer = "not in the text"
    for part in (model, processor):
        part.save_pretrained(folder / "first")
    folders = [folder / name for name in ("first", "second", "made")]
    command = [sys.executable, "-c", SCRIPT, *map(str, folders), json.dumps(ROW)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout), folders[:2]


def test_fresh_process_answers_the_same(fresh_process, model):
    """A fresh process gives the answers of this process, also from a checkpoint that this process saved."""
    results, (first, _) = fresh_process
    processor = ArcAlignerProcessor.from_pretrained(first)
    random_head(model)
    expected = pipeline_of(model, processor, max_new_tokens=6)(ROW, return_slots=True)
    sure = [expected[0]["statistics"].pop(name) for name in ("answerability", "confidence")]
    inputs = processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    logits = model(**inputs).logits[0, -1]
    for result in results:
        assert result["model_type"] == "arcaligner"
        for (record,) in result["records"]:
            probabilities = [record["statistics"].pop(name) for name in ("answerability", "confidence")]
            assert probabilities == pytest.approx(sure, abs=1e-5) and [record] == expected
        for values in result["logits"]:
            torch.testing.assert_close(torch.tensor(values), logits, rtol=0, atol=1e-6)


def test_save_keeps_weights_and_code(fresh_process):
    """A save contains the same weights, code and settings."""
    _, (first, second) = fresh_process
    weights, saved = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert saved.keys() == weights.keys() and all(saved[name].equal(weights[name]) for name in weights)
    assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()}
    for name in {*CODE_FILES, "config.json", "processor_config.json", "chat_template.jinja"}:
        assert (second / name).read_text() == (first / name).read_text(), name


def test_push_while_saving_is_refused(model, tmp_path):
    """Saving with `push_to_hub` is refused before anything is written."""
    with pytest.raises(ValueError, match="without the code of the pipeline.*model.push_to_hub\\(repo_id\\)"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


def imports(*names: str) -> set[str]:
    """The files that these flat files import, and what those import."""
    return {Path(path).name for name in names for path in get_relative_import_files(ROOT / name)}


def test_loading_takes_few_files():
    """Loading the model takes few files, and none that it does not use."""
    files = imports("modeling_arcaligner.py") | {"modeling_arcaligner.py"}
    assert len(files) <= 6 and files <= set(CODE_FILES)
    assert not files & {f"{name}_arcaligner.py" for name in ("encoder", "processing", "kv_cache")}


def test_checkpoints_contain_current_code():
    """Each checkpoint contains every flat file, and all that these import, as in this tree."""
    assert sorted(CODE_FILES) == sorted(path.name for path in ROOT.glob("*_arcaligner.py"))
    assert imports(*CODE_FILES) <= set(CODE_FILES)
    checkpoints = [*(ROOT / "checkpoints").iterdir()]
    assert checkpoints
    for folder in checkpoints:
        for name in CODE_FILES:
            assert (folder / name).read_bytes() == (ROOT / name).read_bytes(), "run `make code`"
        assert not any(path.is_symlink() for path in folder.rglob("*"))
        assert {path.name for path in folder.glob("*.py")} == set(CODE_FILES)


def test_copied_checkpoint_loads(tmp_path):
    """A copied checkpoint folder contains everything that its code imports."""
    shipped = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
    copy = shutil.copytree(shipped, tmp_path / "copy", symlinks=True)
    script = f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(copy)!r}, trust_remote_code=True)"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_import_loads_no_library():
    code = (
        "import sys, arcaligner; "
        "assert not {'torch', 'transformers'} & sys.modules.keys() and 'ArcAlignerConfig' in dir(arcaligner); "
        "from arcaligner import ArcAlignerConfig; print(ArcAlignerConfig.model_type)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "arcaligner"


def test_generation_config_excludes_aligner_settings(model):
    assert not {"encoder_hidden_size", "lora_r"} & model.generation_config.to_dict().keys()
