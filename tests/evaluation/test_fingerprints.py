"""Answers of one checkpoint are told from those of another, wherever it lies."""

import json
import shutil

import pytest

from arcaligner import ArcAlignerConfig
from arcaligner.evaluation import fingerprints
from arcaligner.evaluation.fingerprints import backbone_fingerprint, fingerprint


@pytest.fixture
def copied(checkpoint_dir, tmp_path):
    return shutil.copytree(checkpoint_dir, tmp_path / "copied")


def test_a_copy_is_the_same_checkpoint(checkpoint_dir, copied):
    (copied / "README.md").write_text("another card")
    assert fingerprint(str(copied)) == fingerprint(str(checkpoint_dir))
    assert backbone_fingerprint(str(copied)) == backbone_fingerprint(str(checkpoint_dir))


@pytest.mark.parametrize(
    "file, key, value",
    [("config.json", "gate_threshold", 0.9), ("processor_config.json", "sentences_per_segment", 3)],
)
def test_other_settings_are_another_checkpoint(checkpoint_dir, copied, file, key, value):
    settings = json.loads((copied / file).read_text("utf-8"))
    (copied / file).write_text(json.dumps(settings | {key: value}), encoding="utf-8")
    assert fingerprint(str(copied)) != fingerprint(str(checkpoint_dir))


def test_other_weights_are_another_checkpoint_of_the_same_backbone(checkpoint_dir, copied):
    (weights,) = copied.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert fingerprint(str(copied)) != fingerprint(str(checkpoint_dir))
    assert backbone_fingerprint(str(copied)) == backbone_fingerprint(str(checkpoint_dir))


def test_another_chat_template_asks_the_backbone_otherwise(checkpoint_dir, copied):
    template = copied / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + " ", encoding="utf-8")
    assert backbone_fingerprint(str(copied)) != backbone_fingerprint(str(checkpoint_dir))


def test_a_checkpoint_of_the_hub_is_named_with_its_commit(monkeypatch):
    asked = []
    monkeypatch.setattr(ArcAlignerConfig, "from_pretrained", asked.append)
    found = "hub/models--user--name/snapshots/abc/config.json"
    monkeypatch.setattr(fingerprints, "try_to_load_from_cache", lambda name, file: f"{name}/{file}" and found)
    assert fingerprint("user/name") == "user/name@abc" and asked == ["user/name"]


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        fingerprint(str(tmp_path / "nowhere"))
