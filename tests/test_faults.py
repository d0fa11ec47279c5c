"""Existing files survive a killed process, a full disk and a folder that cannot be written to."""

import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import tqdm
from tiny_models import backbone_config

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.common.files import write_atomically
from arcaligner.kv_cache_arcaligner import load_keys_values, save_keys_values
from arcaligner.loading_arcaligner import write_folder_atomically

# A killed child would keep the lock that tqdm shares between processes.
tqdm.tqdm.set_lock(threading.RLock())


def kill_while(action: Callable[[], object], seconds: float) -> None:
    """Repeats an action in another process, and kills the process."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            action()
    assert os.waitpid(child, 0)[1] == signal.SIGALRM


MOMENTS = [random.Random(seed).uniform(0.001, 0.1) for seed in range(20)]


def test_killed_save_leaves_loadable_checkpoint(model, processor, checkpoint_dir, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_dir, folder)
    before = (folder / "model.safetensors").read_bytes()
    for moment in MOMENTS:
        kill_while(lambda: (model.save_pretrained(folder), processor.save_pretrained(folder)), moment)
        assert (folder / "model.safetensors").read_bytes() == before
        assert all(json.loads(path.read_text()) for path in folder.glob("*.json"))
    assert ArcAlignerProcessor.from_pretrained(str(folder)).context_token_id == processor.context_token_id
    again = ArcAlignerForCausalLM.from_pretrained(str(folder))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    model.save_pretrained(folder)
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {p.name for p in checkpoint_dir.iterdir()}


def test_killed_write_keeps_old_file(tmp_path):
    """A killed write leaves the former file, and no incomplete slot prefix."""
    config, path = backbone_config(), tmp_path / "prefix.safetensors"
    prefix = torch.randn(config.num_hidden_layers, 2, config.num_key_value_heads, 90, config.head_dim)
    for moment in MOMENTS:
        kill_while(lambda: save_keys_values(path, prefix, {"passages": "abc"}), moment / 5)
        if path.exists():
            assert torch.equal(load_keys_values(path, {"passages": "abc"}, config), prefix)
            path.unlink()
        write_atomically(tmp_path / "results.json", "former " * 10**4)
        kill_while(lambda: write_atomically(tmp_path / "results.json", "next " * 10**5), moment / 10)
        assert (tmp_path / "results.json").read_text() in ("former " * 10**4, "next " * 10**5)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["results.json"]


def test_full_disk_restores_old_files(model, checkpoint_dir, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_dir, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left")

    model.model.projector.out.bias.data.add_(1.0)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    for save in (lambda: model.save_pretrained(folder), lambda: write_atomically(folder / "config.json", "{}")):
        with pytest.raises(OSError, match="No space left"):
            save()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


FORMER = {"config.json": "1", "model.safetensors": "1", "encoder/weights": "1", "same": "same"}
NEXT = FORMER | {"config.json": "2", "model.safetensors": "2", "encoder/weights": "2", "more/file": "2"}
MOVES = 7  # three former files are moved away, four new ones are moved in


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def contents_of(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize("fails_at", range(MOVES + 1))
def test_failed_move_keeps_old_files(tmp_path, fails_at, is_lasting, monkeypatch):
    """After a failed move the old files are back, or the error says where they are."""
    folder, replace, moves = tmp_path / "checkpoint", os.replace, itertools.count()

    def fail_later(*paths):
        if (move := next(moves)) == fails_at or (is_lasting and move > fails_at):
            raise OSError(errno.EIO, "of the disk")
        replace(*paths)

    write(folder, FORMER)
    monkeypatch.setattr(os, "replace", fail_later)
    is_abstention = pytest.raises(OSError, match="of the disk") if fails_at < MOVES else contextlib.nullcontext()
    with is_abstention as error, write_folder_atomically(folder) as temporary:
        write(temporary, NEXT)
    if fails_at == MOVES:
        assert contents_of(folder) == NEXT
    elif kept := re.search(r"Its former files are in (.+): move them back\.$", str(error.value)):
        assert is_lasting and fails_at
        assert FORMER.items() <= (contents_of(folder) | contents_of(Path(kept[1]))).items()
    else:
        assert contents_of(folder) == FORMER
