"""Writes the golden files: answers of the current code, to compare later code with.

    PYTHONPATH=tests python -m golden.make          # shipped.json.gz, some minutes, and tiny.json.gz
    PYTHONPATH=tests python -m golden.make tiny     # tiny.json.gz alone
    PYTHONPATH=tests python -m golden.make drop "forward, budget" "cached, budget"    # records of removed cases

It computes on one thread and in float32; the files name the versions of libraries and the instructions of the CPU.
"""

import gzip
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .cases import (
    HERE,
    QUICK,
    SAVED,
    SHIPPED,
    SHIPPED_CASES,
    cached_passages,
    earlier_selection,
    found_in_corpus,
    load,
    load_tiny,
    remote,
    served,
    tiny_cases,
    tiny_models,
)

VERSIONS = ("torch", "transformers", "peft", "sentence-transformers", "spacy", "lancedb", "tokenizers")


def about() -> dict[str, Any]:
    """Versions of libraries and the CPU that the numbers were computed with."""
    versions = {name: version(name) for name in VERSIONS}
    return {"python": platform.python_version(), "cpu": torch.backends.cpu.get_cpu_capability(), **versions}


def shipped_records() -> dict[str, Any]:
    """The records of the shipped checkpoint; the seconds of the CPU that each took are printed."""
    loaded, records = load(SHIPPED), {}
    for name, case in SHIPPED_CASES.items():
        began = time.process_time()
        records[name] = case(loaded)
        print(f"{time.process_time() - began:6.2f} s  {'quick ' if name in QUICK else '      '}{name}", flush=True)
    return records | {"remote": remote()}


def tiny_records() -> dict[str, Any]:
    """The records of the tiny checkpoints, of the corpus, and of passages that are cached in files."""
    with tiny_models():
        loaded = {name: load_tiny(name) for name in ("joint", "separate")}
        records = {name: tiny_cases(models, name) for name, models in loaded.items()}
        separate = loaded["separate"]
        records["corpus"] = found_in_corpus(separate, SAVED / "corpus")
        records["server"] = served(separate._replace(rows=[*separate.rows] * 2), SAVED / "corpus", top_k=2)
        records["cached"] = cached_passages(separate, SAVED / "cached")
    return records


def read(name: str) -> dict[str, Any]:
    """A golden file: `about` and `records`."""
    return json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))


def drop(names: list[str]) -> None:
    """Removes records by their names from the golden files; the others stay as they were recorded."""
    for file in ("tiny", "shipped"):
        known = read(file)
        for records in (known["records"], *(known["records"].get(name, {}) for name in ("joint", "separate"))):
            for name in names:
                records.pop(name, None)
        print(write(file, **known))


def write(name: str, records: dict[str, Any], about: dict[str, Any]) -> Path:
    """Writes a golden file; equal content always becomes equal bytes."""
    path = HERE / f"{name}.json.gz"
    content = json.dumps({"about": about, "records": records}, ensure_ascii=False, sort_keys=True).encode()
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
        packed.write(content)
    return path


def main(what: list[str]) -> None:
    if what[:1] == ["drop"]:
        drop(what[1:])
        return
    torch.set_num_threads(1)
    for name, make in (("tiny", tiny_records), ("shipped", shipped_records)):
        if not what or name in what:
            with earlier_selection():
                print(write(name, make(), about()), f"{time.process_time():.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
