"""A corpus built on two workers of Ray, one of which is killed, is the one that is built without."""

import json
import os
import signal

import pytest

pytest.importorskip("ray")

import ray

from arcaligner.corpus.build import build_corpus
from arcaligner.corpus.ray_build import EncodingWorker, RayWriter
from arcaligner.corpus.table import Corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class DyingWorker(EncodingWorker):
    """Kills its process once, in the middle of a build."""

    def __call__(self, rows):
        done = super().__call__(rows)
        folder = self.corpus.path.parent / "workers"
        is_first = not any(folder.iterdir())
        (folder / str(os.getpid())).touch()
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def test_two_workers_write_the_same_rows_though_one_is_killed(tmp_path, monkeypatch, processor, cluster):
    monkeypatch.setattr("arcaligner.corpus.ray_build.EncodingWorker", DyingWorker)
    (tmp_path / "workers").mkdir()
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"id": 3, "text": "It was another text."}) + "\n")
    made = [Corpus.create(tmp_path / name, processor) for name in ("here", "ray")]
    for corpus in made:
        build_corpus([str(source)], corpus, processor)
    rows = [{"id": each, "title": "T" * (each % 2), "text": f"Text {each}. It ends."} for each in range(1600)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"text": 5}\n')
    reports = [
        build_corpus([str(source)], corpus, processor, write_batches=write_batches)
        for corpus, write_batches in zip(made, (None, RayWriter(2)), strict=True)
    ]
    assert len(list((tmp_path / "workers").iterdir())) > 2  # two, and the one that died
    assert reports[0] == reports[1]
    assert (reports[1].added, reports[1].replaced, len(reports[1].skipped)) == (1599, 1, 1)
    tables = [corpus.table.search().to_arrow().sort_by("id") for corpus in made]
    assert tables[0].equals(tables[1])
    with pytest.raises(FileNotFoundError, match="There is no file or folder none.txt"):
        build_corpus(["none.txt"], made[1], processor, write_batches=RayWriter(1))
