"""Methods are found by name, with a rate; answers of one checkpoint are told from those of another."""

import shutil

import pytest
from conftest import edit_json

from arcaligner import ArcAlignerConfig
from arcaligner.evaluation import methods
from arcaligner.evaluation.methods import METHODS, Checkpoints, backbone_fingerprint, find_method, fingerprint, sort_key


@pytest.fixture
def copied(checkpoint_dir, tmp_path):
    return shutil.copytree(checkpoint_dir, tmp_path / "copied")


def test_a_copy_is_the_same_checkpoint_and_a_folder_without_weights_none(checkpoint_dir, copied):
    (copied / "README.md").write_text("another card")
    assert fingerprint(str(copied)) == fingerprint(str(checkpoint_dir))
    assert backbone_fingerprint(str(copied)) == backbone_fingerprint(str(checkpoint_dir))
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        fingerprint(str(copied / "nowhere"))


@pytest.mark.parametrize(
    "file, changes", [("config", {"gate_threshold": 0.9}), ("processor_config", {"sentences_per_segment": 3})]
)
def test_other_settings_are_another_checkpoint(checkpoint_dir, copied, file, changes):
    edit_json(copied / f"{file}.json", **changes)
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
    monkeypatch.setattr(methods, "try_to_load_from_cache", lambda name, file: f"{name}/{file}" and found)
    assert fingerprint("user/name") == "user/name@abc" and asked == ["user/name"]


def test_a_name_with_a_rate_is_a_method_of_its_own():
    method = find_method("arcaligner_x4")
    assert (method.name, method.title) == ("arcaligner_x4", "ArcAligner, 4 tokens per slot")
    assert find_method("llmlingua_xsegment").tokens_per_slot == "segment"
    assert all(find_method(name) is METHODS[name] for name in METHODS)


@pytest.mark.parametrize("name", ["naive_x4", "arcaligner_x0", "arcaligner_x", "arcaligner_xhalf", "arcaligner_4"])
def test_a_name_that_is_no_method_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"There is no method '{name}'.* with a rate, such as `_x4` .*: truncated"):
        find_method(name)


def test_a_text_cut_to_the_slots_of_another_aligner_is_another_text(checkpoint_dir, copied):
    def settings(aligner):
        checkpoints = Checkpoints(str(aligner), full_text_lora=str(checkpoint_dir))
        return find_method("truncated_lora_x4").answer_settings(checkpoints)

    assert settings(copied) == settings(checkpoint_dir)
    edit_json(copied / "processor_config.json", sentences_per_segment=3)
    assert settings(copied) != settings(checkpoint_dir)
    alone = Checkpoints(str(copied), projector_only=str(checkpoint_dir))  # reads slots of its own
    assert "slots_of" not in find_method("projector_only_x4").answer_settings(alone)


def test_rates_stand_after_their_method_from_fine_to_coarse():
    names = ["arcaligner_xsegment", "no_recursion", "arcaligner_x16", "naive", "arcaligner_x4", "arcaligner"]
    ordered = ["naive", "arcaligner", "arcaligner_x4", "arcaligner_x16", "arcaligner_xsegment", "no_recursion"]
    assert sorted(names, key=sort_key) == ordered


def test_the_rate_is_part_of_what_answers_depend_on(checkpoint_dir):
    checkpoints = Checkpoints(str(checkpoint_dir))
    plain, fine = (find_method(name).answer_settings(checkpoints) for name in ("arcaligner", "arcaligner_x4"))
    assert fine == plain | {"tokens_per_slot": 4}
    # Its slots decide how much text the baseline reads.
    baseline = find_method("llmlingua_x4").answer_settings(checkpoints)
    assert baseline["weights"] == plain["weights"] != find_method("llmlingua").answer_settings(checkpoints)["weights"]
