"""A checkpoint is pushed to the Hub completely, in one commit, or not at all; an error of one line says why."""

import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import edit_json
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors.torch import load_file, save_file

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.common.files import DEFAULT_CHECKPOINT, ROOT
from arcaligner.loading_arcaligner import CODE_FILES
from arcaligner.share import hub

REPO = "someone/aligner"
CHECKPOINT = set(CODE_FILES) | {
    *("config.json", "generation_config.json", "model.safetensors", "README.md", "recipe.yaml", "results.json"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
}
RESULTS = {"questions": 500, "sets": {"squad": {"methods": {"arcaligner": {"f1": [9.7, 6.5, 13.2]}}}}}
RECIPE = "stage: grounding\ntrain_files: {hotpotqa/hotpot_qa: 0.5, ../data/train_qa.jsonl.gz: 0.5}\n"


@dataclass
class FakeHub:
    """A stand-in for the Hub: the files of one repository, and the errors that its calls raise."""

    files: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    private: bool | None = None  # None: the repository does not exist yet
    errors: dict[str, Exception] = field(default_factory=dict)  # by the call that raises it
    endpoint: str = "https://hub"

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]

    def create_repo(self, repo_id, private=None, exist_ok=False):
        self._call("create_repo")
        self.private = bool(private) if self.private is None else self.private
        return SimpleNamespace(repo_id=repo_id)

    def model_info(self, repo_id):
        return SimpleNamespace(private=self.private)

    def list_repo_files(self, repo_id):
        return list(self.files)

    def create_commit(self, repo_id, operations, commit_message):
        self._call("create_commit")
        assert len({operation.path_in_repo for operation in operations}) == len(operations)  # else refused
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                with operation.as_file() as file:
                    self.files[operation.path_in_repo] = file.read()
            else:
                del self.files[operation.path_in_repo]
        return SimpleNamespace(repo_url=SimpleNamespace(url=f"https://hub/{repo_id}"))

    def pull(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


@pytest.fixture
def fake_hub(monkeypatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(hub, "HfApi", lambda: fake)
    monkeypatch.setattr(hub, "get_token", lambda: "hf_of_someone")
    return fake


@pytest.fixture
def folder(checkpoint_dir, tmp_path) -> Path:
    """A checkpoint with recipe and results in a training stage's folder, its weights a link."""
    folder = tmp_path / "3_gating"
    shutil.copytree(checkpoint_dir, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "model.safetensors").symlink_to(checkpoint_dir / "model.safetensors")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    for left_out in ("checkpoint-40/model.safetensors", "training_args.bin", ".env"):
        (folder / left_out).parent.mkdir(exist_ok=True)
        (folder / left_out).write_bytes(b"not for others")
    return folder


@pytest.fixture
def push(run_cli, monkeypatch, folder):
    monkeypatch.setenv("COLUMNS", "160")

    def push(*options, repo_id=REPO, checkpoint=folder) -> tuple[int, str, str]:
        return run_cli("push", "--repo-id", repo_id, "--checkpoint", checkpoint, *options)

    return push


def test_push_is_one_commit(fake_hub, run_cli, folder, tmp_path):
    """The README's push is one commit of the whole checkpoint and nothing else."""
    (line,) = re.findall("python -m arcaligner push.*", (ROOT / "README.md").read_text("utf-8"))
    ours = {"user/name": REPO, "checkpoints/mine": str(folder)}
    (folder / "refinement_arcaligner.py").unlink()  # code is that of the package
    arguments = shlex.split(line, comments=True)[3:]
    code, out, err = run_cli(*(ours.get(argument, argument) for argument in arguments))
    assert (code, out) == (0, f"https://hub/{REPO}\n"), err
    assert fake_hub.calls == ["create_repo", "create_commit"] and not fake_hub.private
    assert fake_hub.files.keys() == CHECKPOINT
    for name in CHECKPOINT - {"README.md"}:
        assert fake_hub.files[name] == (ROOT if name in CODE_FILES else folder).joinpath(name).read_bytes(), name
    card = fake_hub.files["README.md"].decode()
    assert f'model="{REPO}", trust_remote_code=True' in card
    assert "| **slots** | segment | 9.7 |" in card and "- hotpotqa/hotpot_qa\n" in card
    ArcAlignerForCausalLM.from_pretrained(fake_hub.pull(tmp_path / "pulled"))


def test_shipped_checkpoint_is_pushed_whole(fake_hub):
    hub.push_checkpoint(REPO, DEFAULT_CHECKPOINT)
    assert {"encoder/adapter_config.json", "encoder/adapter_model.safetensors"} < fake_hub.files.keys() > CHECKPOINT
    for name in fake_hub.files.keys() - {"README.md"}:
        assert fake_hub.files[name] == (DEFAULT_CHECKPOINT / name).read_bytes(), name


def test_trained_encoder_is_pushed(fake_hub, push, folder, tmp_path):
    """A trained encoder is pushed with the aligner, and its absence is refused."""
    processor = ArcAlignerProcessor.from_pretrained(folder)
    processor.train_encoder(lora_r=2)
    processor.save_pretrained(folder)
    assert push()[0] == 0
    pulled = ArcAlignerProcessor.from_pretrained(fake_hub.pull(tmp_path / "pulled"))
    assert torch.equal(pulled.encoder.encode(["A text."]), processor.encoder.encode(["A text."]))
    shutil.rmtree(folder / "encoder")
    code, _, err = push()
    assert code == 1 and "has no encoder/adapter_config.json" in err


def test_next_push_replaces_the_aligner(fake_hub, push, folder):
    """The next push removes the rest of the former aligner, and keeps an edited card."""
    theirs = dict.fromkeys(("figure.png", "model.gguf", "old_results.json"), b"theirs")
    former = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.yaml", "results.json")
    fake_hub.files |= theirs | dict.fromkeys((*former, "former_arcaligner.py", "refinement_arcaligner.py"), b"former")
    for name in ("recipe.yaml", "results.json"):
        (folder / name).unlink()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert push()[0] == 0
    assert fake_hub.files.keys() == CHECKPOINT - {"recipe.yaml", "results.json"} | theirs.keys()
    assert fake_hub.files["README.md"] == b"---\nlicense: mit\n---\n# Mine\n"


def refusal(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("create_repo", refusal(401), "may not write to `someone/aligner` (status 401)"),
        ("create_commit", refusal(404), "may not write to `someone/aligner` (status 404)"),
        ("create_commit", refusal(500), "was interrupted (HfHubHTTPError"),
        ("create_commit", HTTPError("no route"), "was interrupted (HTTPError: no route)"),
        ("create_commit", RuntimeError("upload"), "was interrupted (RuntimeError: upload)"),
    ],
)
def test_hub_errors_say_the_remedy(fake_hub, push, call, error, message):
    """A refusal and a lost connection are reported with the remedy."""
    fake_hub.errors[call] = error
    code, out, err = push()
    assert (code, out, fake_hub.files) == (1, "", {})
    assert message in err and "Traceback" not in err
    fake_hub.errors.clear()
    assert push()[0] == 0 and fake_hub.files.keys() == CHECKPOINT


def test_private_push(fake_hub, push):
    """A private push creates a private repository, and refuses a public one."""
    assert push("--private")[0] == 0 and fake_hub.private
    fake_hub.private, fake_hub.files = False, {}
    code, _, err = push("--private")
    assert code == 1 and "is public; expected a private repository" in err and fake_hub.files == {}


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(key for key in weights if "slot_gate" in key))
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        (lambda folder: edit_json(folder / "config.json", model_type="llama"), "of type 'llama'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "aligner weights"),
        (drop_a_weight, "lacks 1 of the "),
        (lambda folder: (folder / "processor_config.json").unlink(), "lacks processor_config.json"),
        (lambda folder: (folder / "results.json").write_text("{}"), "does not contain results"),
    ],
)
def test_incomplete_checkpoint_is_refused_early(fake_hub, push, folder, damage, message):
    """An incomplete checkpoint is refused before the Hub is contacted."""
    damage(folder)
    code, out, err = push()
    assert code == 1 and out == "" and message in err and "Traceback" not in err
    assert fake_hub.calls == []


@pytest.mark.parametrize("repo_id", ["someone/else/where", REPO])
def test_invalid_push_is_refused_early(fake_hub, push, repo_id, monkeypatch):
    """An invalid name and a missing token are refused before the Hub is contacted."""
    monkeypatch.setattr(hub, "get_token", lambda: None)
    code, _, err = push(repo_id=repo_id)
    assert code == 1 and repo_id in err and fake_hub.calls == []
    assert ("No Hub token was found" in err and "/settings/tokens" in err) == (repo_id == REPO)
