"""Faults: a process that is killed, a full disk, a folder that cannot be written to. What was there stays whole."""

import argparse
import errno
import gc
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import tqdm
from huggingface_hub import HfApi
from safetensors.torch import load_file
from tiny_models import tiny_aligner
from training_rows import question_rows, write_rows

from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor
from arcaligner.checkpoint_arcaligner import written_whole
from arcaligner.common.files import write_whole
from arcaligner.evaluation import evaluate, settings
from arcaligner.generation_arcaligner import load_keys_values, save_keys_values
from arcaligner.share import export, hub
from arcaligner.train import metrics

# A killed child would keep the lock that tqdm shares between processes.
tqdm.tqdm.set_lock(threading.RLock())


def kill_while(action: Callable[[], object], seconds: float) -> None:
    """Repeats an action in another process, which ends without a chance to clean up."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            action()
    assert os.waitpid(child, 0)[1] == signal.SIGALRM


MOMENTS = [random.Random(seed).uniform(0.001, 0.1) for seed in range(20)]


def test_killed_save_leaves_a_checkpoint_that_loads(model, processor, checkpoint_dir, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_dir, folder)
    before = load_file(folder / "model.safetensors")
    for moment in MOMENTS:
        kill_while(lambda: (model.save_pretrained(folder), processor.save_pretrained(folder)), moment)
        after = load_file(folder / "model.safetensors")
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
        assert all(json.loads(path.read_text()) for path in folder.glob("*.json"))
    assert ArcAlignerProcessor.from_pretrained(str(folder)).context_token_id == processor.context_token_id
    again = ArcAlignerForCausalLM.from_pretrained(str(folder)).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    model.save_pretrained(folder)
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {p.name for p in checkpoint_dir.iterdir()}


def test_killed_write_leaves_no_half_of_a_slot_prefix(tmp_path):
    model = tiny_aligner()
    config, path = model.config.text_config, tmp_path / "prefix.safetensors"
    prefix = torch.randn(config.num_hidden_layers, 2, config.num_key_value_heads, 90, config.head_dim)
    for moment in MOMENTS:
        kill_while(lambda: save_keys_values(path, prefix, {"passages": "abc"}), moment / 5)
        if path.exists():
            found = load_keys_values(path, {"passages": "abc"}, config)
            assert torch.equal(found, prefix)
            path.unlink()
    assert not list(tmp_path.glob("[!.]*"))


def test_killed_write_leaves_the_former_file(tmp_path):
    for moment in MOMENTS:
        write_whole(tmp_path / "results.json", "former " * 10**4)
        kill_while(lambda: write_whole(tmp_path / "results.json", "next " * 10**5), moment / 10)
        assert (tmp_path / "results.json").read_text() in ("former " * 10**4, "next " * 10**5)


def contents(folder) -> dict[str, bytes]:
    """The files of a folder that are no leftovers of a killed process."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


def test_killed_export_leaves_a_whole_checkpoint_or_none(checkpoint_dir, tmp_path):
    shutil.copytree(checkpoint_dir, tmp_path / "runs" / "3_gating")
    (tmp_path / "runs" / "3_gating" / "recipe.yaml").write_text("stage: gating")
    folder = tmp_path / "exported"
    export.main(tmp_path / "runs", folder)
    whole = contents(folder)
    for moment in MOMENTS[:5]:
        shutil.rmtree(folder)
        kill_while(lambda: export.main(tmp_path / "runs", folder), 5 * moment)
        if (folder / "config.json").exists():
            assert contents(folder) == whole
        export.main(tmp_path / "runs", folder)
        assert contents(folder) == whole and not list(folder.glob(".saving-*"))


def test_killed_evaluation_goes_on_where_it_was(checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_NEW_TOKENS", 4)
    write_rows(tmp_path / "squad.jsonl.gz", question_rows(6))
    keys = {"checkpoint": str(checkpoint_dir), "data": tmp_path, "output": tmp_path / "run", "batch_size": 1}
    wanted = settings.read_settings(None, keys | {"tasks": ["squad"], "methods": ["arcaligner"]}, {})
    path = tmp_path / "run" / "squad" / "arcaligner.jsonl"

    def answers() -> list[tuple[str, str]]:
        evaluate.evaluate(wanted)
        return [(row["id"], row["prediction"]) for row in map(json.loads, path.read_text().splitlines())]

    expected = answers()
    for moment in MOMENTS[:5]:
        shutil.rmtree(tmp_path / "run")
        kill_while(answers, 2 * moment)
        assert answers() == expected


def test_killed_push_is_visible_whole_or_not_at_all(checkpoint_dir, tmp_path, monkeypatch):
    """The Hub shows a commit when all of it has arrived; ours must be a single one."""
    shown = tmp_path / "hub"

    def commit(self, repo_id, operations, commit_message):
        arriving = tmp_path / "arriving"
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
        for operation in operations:
            shutil.copy(operation.path_or_fileobj, arriving / operation.path_in_repo)
        shutil.rmtree(shown, ignore_errors=True)
        os.replace(arriving, shown)

    monkeypatch.setattr(hub, "get_token", lambda: "hf_of_someone")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **kwargs: argparse.Namespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, repo_id: [])
    monkeypatch.setattr(HfApi, "create_commit", commit)
    hub.push_checkpoint("someone/aligner", checkpoint_dir)
    whole = contents(shown)
    for moment in MOMENTS[:5]:
        shutil.rmtree(shown, ignore_errors=True)
        kill_while(lambda: hub.push_checkpoint("someone/aligner", checkpoint_dir), 5 * moment)
        assert not shown.exists() or contents(shown) == whole
    hub.push_checkpoint("someone/aligner", checkpoint_dir)
    assert contents(shown) == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_save_without_space_or_permission_leaves_what_was_there(model, checkpoint_dir, tmp_path, number, monkeypatch):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_dir, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    model.model.projector.out.bias.data.add_(1.0)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        model.save_pretrained(folder)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_whole(folder / "config.json", "{}")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_save_whose_files_cannot_be_moved_leaves_the_former_ones(tmp_path, is_lasting, monkeypatch):
    """Or says where they are, when they cannot be moved back either."""
    folder, replace, moves = tmp_path / "checkpoint", os.replace, 0
    former = {"config.json": "1", "model.safetensors": "1", "encoder/weights": "1", "same": "same"}
    new = {"config.json": "2", "model.safetensors": "2", "encoder/weights": "2", "same": "same", "more/file": "2"}

    def fail_later(*paths):
        nonlocal moves
        moves += 1
        if moves > fails_at if is_lasting else moves == fails_at + 1:
            raise OSError(errno.EIO, "of the disk")
        replace(*paths)

    def write(root, files):
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    def read(root):
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {path.relative_to(root).as_posix(): path.read_text() for path in paths}

    monkeypatch.setattr(os, "replace", fail_later)
    for fails_at in range(8):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, former)
        moves = 0
        if fails_at == 7:
            with written_whole(folder) as temporary:
                write(temporary, new)
            assert read(folder) == new and moves == 7
            continue
        with pytest.raises(OSError, match="of the disk") as error, written_whole(folder) as temporary:
            write(temporary, new)
        if kept := re.search("its former files are in (.+)\\.$", str(error.value)):
            assert is_lasting and fails_at
            write(folder, read(Path(kept[1])))
            shutil.rmtree(kept[1])
            assert former.items() <= read(folder).items()
        else:
            assert read(folder) == former


@pytest.mark.load
def test_a_thousand_requests_answer_as_alone_and_memory_stays(model, processor):
    """Long, short, without passages and bad ones, in batches of the pipeline and in 8 threads with one store."""
    ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
    draw, options = random.Random(0), {"max_new_tokens": 3, "do_sample": False}

    def request(number):
        documents = [f"Number {each} is here. It was written by Ada." for each in draw.sample(range(40), number % 5)]
        return {"question": "Who? " * (1 + number % 7), "documents": documents}

    requests = [request(number) for number in range(500)]
    bad = [{"question": ""}, {"question": "Who?", "documents": 5}, {"question": "caf\udce9", "documents": ["One."]}]
    alone = [ask(each, **options)[0]["generated_text"] for each in requests]
    store = model.slot_prefix_store(processor, max_bytes=10**6)

    def serve(number):
        if number % 10 == 9:
            with pytest.raises(ValueError):
                store.prepare(bad[number % 3]["question"], bad[number % 3].get("documents", []))
            return
        inputs = store.prepare(requests[number]["question"], requests[number]["documents"])
        answer = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
        assert processor.batch_decode(answer, skip_special_tokens=True) == [alone[number]]

    def round_of_requests():
        for first in range(0, 500, 50):
            found = ask(requests[first : first + 50], batch_size=8, **options)
            batch = [each["generated_text"] for row in found for each in row]
            assert batch == alone[first : first + 50]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(serve, range(500)))
        gc.collect()
        return psutil.Process().memory_info().rss

    before, after = round_of_requests(), round_of_requests()
    print(f"memory before {before / 1e6:.0f} MB, after {after / 1e6:.0f} MB; {store.hits} hits, {store.misses} misses")
    assert after < 1.05 * before and store.bytes <= store.max_bytes
