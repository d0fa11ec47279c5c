"""vLLM behind the project's own server (in the making)."""

import os
from pathlib import Path
from typing import Any

from ...common.files import ROOT
from ...kv_cache_arcaligner import PrefixFiles, json_digest

IN_VLLM = ROOT / "apps" / "engines" / "in_vllm"


def find_vllm() -> str | None:
    """The Python of vLLM's environment: `ARCALIGNER_VLLM`, or that of `make vllm`."""
    if named := os.environ.get("ARCALIGNER_VLLM"):
        return named
    made = ROOT / ".vllm" / "bin" / "python"
    return str(made) if made.exists() else None


def slots_request(files: PrefixFiles) -> dict[str, Any]:
    """The fields of a request to vLLM that say what stands before a question: ids of a prompt, the first ones of which
    are there already."""
    slots = [[path.stem, count] for path, count in zip(files.paths, files.num_slots, strict=True)]
    placeholders = [0] * sum(files.num_slots[1:])
    return {
        "prompt": [*files.head, *placeholders, *files.tail],
        "kv_transfer_params": {"slots": slots},
        "cache_salt": json_digest(slots),
    }
