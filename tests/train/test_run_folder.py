"""A run's folder: one trainer at a time, settings written first."""

import pytest

from arcaligner.train.run_folder import claim_folder

SETTINGS = "# arcaligner.train.sft --config a.yaml\nseed: 1\n"


def test_settings_are_there_before_anything_else(tmp_path):
    folder = tmp_path / "runs" / "1"
    with claim_folder(str(folder), SETTINGS, is_main=True):
        assert (folder / "recipe.yaml").read_text() == SETTINGS
        assert {path.name for path in folder.iterdir()} == {"recipe.yaml", ".lock"}


def test_a_second_trainer_is_refused_until_the_first_has_ended(tmp_path):
    with claim_folder(str(tmp_path), SETTINGS, is_main=True):
        with pytest.raises(ValueError, match=f"Another process is training in {tmp_path}. Wait for its end"):
            with claim_folder(str(tmp_path), SETTINGS, is_main=True):
                raise AssertionError("two trainers")
        with claim_folder(str(tmp_path), SETTINGS, is_main=False):
            pass  # another process of the same run
    with claim_folder(str(tmp_path), SETTINGS, is_main=True):
        pass


def test_a_run_with_other_settings_is_refused_and_changes_nothing(tmp_path):
    with claim_folder(str(tmp_path), SETTINGS, is_main=True):
        (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="`seed` was 1 and is now 2"):
        with claim_folder(str(tmp_path), SETTINGS.replace("1", "2"), is_main=True):
            raise AssertionError("two settings")
    assert (tmp_path / "recipe.yaml").read_text() == SETTINGS


def test_settings_of_a_run_that_left_nothing_to_go_on_from_are_replaced(tmp_path):
    for settings in (SETTINGS, SETTINGS.replace("1", "2")):
        with claim_folder(str(tmp_path), settings, is_main=True):
            assert (tmp_path / "recipe.yaml").read_text() == settings


def test_the_other_processes_of_a_run_leave_the_folder_alone(tmp_path):
    with claim_folder(str(tmp_path / "run"), SETTINGS, is_main=False):
        assert not (tmp_path / "run").exists()
