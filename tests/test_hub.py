"""A checkpoint goes to the Hub whole or not at all, and comes back in a process that has no copy of the project.

The Hub is `hub_server.py`; the client is the real one, see `hub_client.py`.
"""

import json
import os
import shutil
import signal
from concurrent.futures import Future
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch
from hub_client import load_and_answer, running_command_line
from hub_server import READER, Repository, running_hub
from safetensors.torch import load_file, save_file

from arcaligner import ArcAlignerPipeline

ROOT = Path(__file__).parents[1]
REPO = "someone/aligner"
BASE = "someone/base"
QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada. Nobody else knew.", {"title": "T", "text": "So be it."}]
CODE = {path.name for path in ROOT.glob("*_arcaligner.py")}
CHECKPOINT = CODE | {
    *("config.json", "generation_config.json", "model.safetensors", "README.md", "recipe.yaml", "results.json"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
}
PEFT = {f"peft_lora/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", "README.md")}
RESULTS = {
    "questions": 500,
    "sets": {
        "squad": {
            "compression_rate": 33.6,
            "methods": {
                "closed book": {"f1": [4.1, 3.1, 5.3]},
                "ours (adaptive)": {"f1": [9.7, 6.5, 13.2], "em": [5.0, 2.0, 8.5]},
            },
        },
        "nq": {"compression_rate": 30.04, "methods": {"ours (adaptive)": {"f1": [8.0, 6.0, 10.0]}}},
    },
}
RECIPES = """stage: reconstruction
train_files: {../data/recon_train.jsonl.gz: 1.0}
max_train_samples: 2400
---
stage: grounding
train_files: {hotpotqa/hotpot_qa: 0.5, ../data/train_qa.jsonl.gz: 0.5}
"""


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def empty_hub(hub):
    hub.repositories.clear()
    hub.large_files.clear()
    hub.requests.clear()
    hub.broken.clear()
    hub.on_break = bool


@pytest.fixture(scope="module")
def environment(hub, tmp_path_factory) -> dict[str, str]:
    """Of a machine that knows the Hub and nothing that was ever on it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home")), "TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "COLUMNS": "160"}
    return kept | home | settings


@pytest.fixture(scope="module")
def run(environment):
    with running_command_line(environment) as run:
        yield run


@pytest.fixture
def folder(checkpoint_dir, tmp_path) -> Path:
    """A checkpoint with recipe and results whose code is links, in a training stage's folder."""
    folder = tmp_path / "3_gating"
    folder.mkdir()
    for path in checkpoint_dir.iterdir():
        if path.name in CODE:
            (folder / path.name).symlink_to(path)
        else:
            shutil.copyfile(path, folder / path.name)
    (folder / "recipe.yaml").write_text(RECIPES)
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "checkpoint-40").mkdir()
    for left_out in ("checkpoint-40/model.safetensors", "training_args.bin", "trainer_state.json", ".env"):
        (folder / left_out).write_bytes(b"not for others")
    return folder


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def main_files(hub) -> dict[str, bytes]:
    """What is on the main branch, without the Hub's own file."""
    return {path: content for path, content in hub.repositories[REPO].at("main").files.items() if path[0] != "."}


def test_pushed_checkpoint_answers_in_a_process_without_the_project(
    hub, run, environment, folder, base_model_dir, model, processor, tmp_path
):
    edit_json(folder / "config.json", base_model_name_or_path=BASE)
    base = {path.name: path.read_bytes() for path in base_model_dir.iterdir()}
    hub.repositories[BASE] = Repository(private=False)
    hub.repositories[BASE].commit(base)
    code, out, err = run("push", "--repo-id", REPO, "--checkpoint", folder, "--peft")
    assert code == 0, err
    assert out == f"{hub.url}/{REPO}\n"
    assert len(hub.repositories[REPO].commits) == 2  # the Hub's own, and one
    files = main_files(hub)
    assert files.keys() == CHECKPOINT | PEFT
    for file in CHECKPOINT - {"README.md"}:
        assert files[file] == (folder / file).read_bytes(), file
    result = load_and_answer(environment, tmp_path, REPO, QUESTION, DOCUMENTS)
    inputs = processor(text=QUESTION, documents=DOCUMENTS, return_tensors="pt")
    for logits in result["logits"]:
        torch.testing.assert_close(torch.tensor(logits), model(**inputs).logits[0], rtol=0, atol=1e-6)
    assert result["adapters"] == [["slot"]] * 21
    ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
    assert result["answer"] == ask({"question": "Who wrote it?", "documents": ["It was written by Ada."]})
    assert hub.unknown == []


def killed_in_the_middle(hub, run, *arguments) -> tuple[int, str, str]:
    """Runs a command that a kill -9 ends where the Hub would drop the connection."""
    command = Future()
    hub.on_break = lambda: os.kill(command.result(), signal.SIGKILL)
    command.set_result(run.start(*arguments))
    return run.result()


@pytest.mark.parametrize(("step", "is_killed"), [("upload", False), ("commit", False), ("commit", True)])
def test_push_that_breaks_off_changes_nothing_and_done_again_finishes(hub, run, folder, step, is_killed):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    assert run(*push)[0] == 0
    before = list(hub.repositories[REPO].commits)
    change_weights(folder)
    hub.broken.add(step)
    if is_killed:
        assert killed_in_the_middle(hub, run, *push, "--peft") == (-signal.SIGKILL, "", "")
    else:
        code, out, err = run(*push, "--peft")
        assert code == 1 and out == ""
        assert "broke off" in err and "visible whole or not at all" in err and "Traceback" not in err
    assert hub.repositories[REPO].commits == before
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{hub.url}/{REPO}/resolve/main/peft_lora/adapter_config.json")
    hub.broken.clear()
    hub.requests.clear()
    assert run(*push, "--peft")[0] == 0
    assert main_files(hub).keys() == CHECKPOINT | PEFT
    assert main_files(hub)["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    uploads = sum(request.startswith("PUT") for request in hub.requests)
    assert uploads == (2 if step == "upload" else 0)  # aligner and PEFT adapter, unless they had arrived


def test_first_push_that_breaks_off_leaves_an_empty_repository(hub, run, folder):
    hub.broken.add("upload")
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    assert run(*push)[0] == 1
    assert main_files(hub) == {}
    hub.broken.clear()
    assert run(*push)[0] == 0
    assert main_files(hub).keys() == CHECKPOINT


def test_commit_whose_answer_is_lost_is_not_made_twice(hub, run, folder):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    hub.broken.add("answer")
    assert run(*push)[0] == 1
    hub.broken.clear()
    assert run(*push)[0] == 0
    assert len(hub.repositories[REPO].commits) == 2 and main_files(hub).keys() == CHECKPOINT


def test_next_push_removes_only_what_a_push_wrote_and_has_no_more(hub, run, folder):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    assert run(*push, "--peft")[0] == 0
    theirs = {"figure.png": b"png", "former_arcaligner.py": b"code"}
    hub.repositories[REPO].commit(hub.repositories[REPO].at("main").files | theirs)
    assert run(*push)[0] == 0
    assert main_files(hub).keys() == CHECKPOINT | {"figure.png"}


def test_next_push_leaves_nothing_of_the_former_aligner_beside_new_weights(hub, run, folder):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    assert run(*push)[0] == 0
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {f"model-{number:05}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)}
    for shard, keys in shards.items():
        save_file({key: weights[key] for key in keys}, folder / shard, {"format": "pt"})
    weight_map = {key: shard for shard, keys in shards.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in ("model.safetensors", "recipe.yaml", "results.json"):
        (folder / name).unlink()
    theirs = {"figure.png": b"png", "model.gguf": b"weights", "old_results.json": b"{}"}
    hub.repositories[REPO].commit(hub.repositories[REPO].at("main").files | theirs)
    num_commits = len(hub.repositories[REPO].commits)
    assert run(*push)[0] == 0
    assert len(hub.repositories[REPO].commits) == num_commits + 1
    gone = {"model.safetensors", "recipe.yaml", "results.json"}
    sharded = CHECKPOINT - gone | shards.keys() | {"model.safetensors.index.json"}
    assert main_files(hub).keys() == sharded | theirs.keys()
    assert "## Results" not in main_files(hub)["README.md"].decode()
    for name in shards:
        (folder / name).unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert run(*push)[0] == 0
    assert main_files(hub).keys() == CHECKPOINT - {"recipe.yaml", "results.json"} | theirs.keys()


def test_card_on_the_hub_is_written_from_the_run_unless_somebody_edited_it(hub, run, folder):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder)
    assert run(*push)[0] == 0
    card = main_files(hub)["README.md"].decode()
    assert f'model="{REPO}", trust_remote_code=True' in card
    assert "| ours (adaptive) | 9.7 [6.5, 13.2] | 8.0 [6.0, 10.0] |" in card
    assert "recon_train.jsonl.gz" in card and "- hotpotqa/hotpot_qa\n" in card
    edited = 'license: mit\n---\n# Mine\n\nask = pipeline("text-generation", model="elsewhere")\n'
    (folder / "README.md").write_text(f"---\n{edited}")
    assert run(*push)[0] == 0
    assert main_files(hub)["README.md"].decode() == f"---\n{edited}".replace("elsewhere", REPO)
    assert "elsewhere" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("hf_unknown", "does not accept the token"),
        (READER, "may not write to `someone/aligner` (403)"),
        ("", "No token to write to `someone/aligner`"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_token_that_may_not_write_is_refused_with_the_remedy(hub, run, folder, token, message, is_there):
    if is_there:
        hub.repositories[REPO] = Repository(private=False)
        hub.repositories[REPO].commit({".gitattributes": b""})
    code, out, err = run("push", "--repo-id", REPO, "--checkpoint", folder, token=token)
    assert code == 1 and out == ""
    assert message in err and f"{hub.url}/settings/tokens" in err
    assert not is_there or main_files(hub) == {}


def test_private_push_makes_a_private_repository_and_refuses_a_public_one(hub, run, folder):
    push = ("push", "--repo-id", REPO, "--checkpoint", folder, "--private")
    assert run(*push)[0] == 0 and hub.repositories[REPO].private
    with pytest.raises(HTTPError, match="401"):  # without its owner's token
        urlopen(f"{hub.url}/{REPO}/resolve/main/config.json")
    hub.repositories[REPO] = Repository(private=False)
    hub.repositories[REPO].commit({".gitattributes": b""})
    code, _, err = run(*push)
    assert code == 1 and "is public; nothing was uploaded" in err
    assert main_files(hub) == {}


def test_shipped_checkpoint_can_be_pushed(hub, run):
    shipped = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
    code, _, err = run("push", "--repo-id", REPO)
    assert code == 0, err
    files = main_files(hub)
    assert files.keys() == {path.name for path in shipped.iterdir()}
    assert all(files[path.name] == path.read_bytes() for path in shipped.iterdir() if path.name != "README.md")
    assert f'model="{REPO}", trust_remote_code=True' in files["README.md"].decode()


def test_commands_of_the_readme_share_a_checkpoint(hub, run, folder, tmp_path):
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## Share one\n")[1].split("```")[1]
    commands = [
        line.partition("#")[0].split()[3:] for line in block.splitlines() if line.startswith("python -m arcaligner ")
    ]
    assert [command[0] for command in commands] == ["push", "export-peft"]
    ours = {"user/name": REPO, "checkpoints/mine": folder, "lora": tmp_path / "lora"}
    for command in commands:
        code, _, err = run(*(ours.get(argument, argument) for argument in command))
        assert code == 0, err
    assert main_files(hub).keys() == CHECKPOINT
    assert {f"peft_lora/{path.name}" for path in (tmp_path / "lora").iterdir()} == PEFT


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(key for key in weights if "slot_gate" in key))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "There is no checkpoint in"),
        (lambda folder: edit_json(folder / "config.json", model_type="llama"), "a model of type 'llama'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "aligner weights"),
        (drop_a_weight, "lacks 1 of "),
        (cut_the_weights, "cannot be read"),
        (lambda folder: (folder / "processor_config.json").unlink(), "lacks its processor (processor_config.json)"),
        (lambda folder: (folder / "lora_arcaligner.py").unlink(), "lacks lora_arcaligner.py of its code"),
        (lambda folder: (folder / "results.json").write_text("{}"), "does not hold results"),
    ],
)
def test_incomplete_checkpoint_is_refused_before_the_hub_is_asked(hub, run, folder, damage, message):
    damage(folder)
    code, out, err = run("push", "--repo-id", REPO, "--checkpoint", folder)
    assert code == 1 and out == "" and message in err
    assert hub.requests == []


@pytest.mark.parametrize("repo_id", ["someone/else/where", "some one/aligner", "-/x--y"])
def test_name_that_is_none_is_refused_before_the_hub_is_asked(hub, run, folder, repo_id):
    code, _, err = run("push", "--repo-id", repo_id, "--checkpoint", folder)
    assert code == 1 and "cannot be the name of a repository" in err and "user/name" in err
    assert hub.requests == []
