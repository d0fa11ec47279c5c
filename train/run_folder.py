"""The folder of a run: for one trainer at a time, and for one set of settings."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ..model_card import RECIPE_FILE
from .saving import write_whole
from .settings import check_settings, has_begun

LOCK_FILE = ".lock"


@contextlib.contextmanager
def claim_folder(output_dir: str, settings: str, is_main: bool) -> Iterator[None]:
    """Keeps other trainers out of a folder, and writes down what it is trained with before anything else is there.

    Args:
        output_dir (`str`): The run's folder; made when it is not there.
        settings (`str`): Of `run_settings`, kept as `recipe.yaml`.
        is_main (`bool`): Whether this is the first of the run's processes; the others leave all of this to it.

    Raises:
        `ValueError`: a folder that another run trains in, or that was begun with other settings.
    """
    if not is_main:
        yield
        return
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / LOCK_FILE).acquire(timeout=0)  # the system frees it when the process ends, however
    except Timeout as error:
        raise ValueError(
            f"Another process is training in {folder}. Wait for its end or stop it, or name another `output_dir`."
        ) from error
    with lock:
        check_settings(folder, settings)
        if not has_begun(folder):
            write_whole(folder / RECIPE_FILE, settings)
        yield
