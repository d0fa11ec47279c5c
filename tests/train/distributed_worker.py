"""One of several processes of `test_distributed.py`: runs training stages and reports what this process did.

    accelerate launch ... tests/train/distributed_worker.py RUNS REPORTS

RUNS is a JSON list of `{"arguments", "interrupt_at", "nan_at"}`: what `train.sft` gets, the step at which all processes
raise, and the step from which on the last process's projector gives NaN. Each process writes its list of reports to
`REPORTS/<process>.json`: `error` (of the run, if any), `rows` (ids, batch after batch), `written` (files that this
process gave their names).
"""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

from arcaligner.train import sft
from arcaligner.train.recipe import parse_recipe
from arcaligner.train.sft import AlignerTrainer
from arcaligner.train.stages import SCRIPT

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
compute_loss = AlignerTrainer.compute_loss
current: dict = {}  # the run and its report


def on_event(event: str, arguments: tuple) -> None:
    """Files of a checkpoint are written under another name, and then renamed."""
    if event == "os.rename" and current:
        current["written"].append(str(arguments[1]))


def record_and_compute(self, model, inputs, *args, **kwargs):
    step = self.state.global_step
    if step == current["interrupt_at"]:
        raise InterruptedError("interrupted")
    current["rows"].append(inputs["row_ids"])
    if step == current["nan_at"] and RANK == WORLD_SIZE - 1:
        self.model.model.projector.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    return compute_loss(self, model, inputs, *args, **kwargs)


def allowing_fsdp(init):
    """Makes accelerate treat CPUs as accelerators, because it shards a model on accelerators only."""

    def init_and_rename(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    return init_and_rename


def main(runs: list[dict]) -> list[dict]:
    reports = []
    for run in runs:
        current.update({"interrupt_at": None, "nan_at": None, "error": None, "rows": [], "written": []} | run)
        try:
            sft.train(*parse_recipe(SCRIPT, sft.KINDS, run["arguments"]))
        except (ValueError, InterruptedError) as error:
            current["error"] = str(error)
        reports.append({key: current[key] for key in ("error", "rows", "written")})
    current.clear()
    return reports


if __name__ == "__main__":
    sys.addaudithook(on_event)
    AlignerTrainer.compute_loss = record_and_compute
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState.__init__ = allowing_fsdp(PartialState.__init__)
    reports = main(json.loads(Path(sys.argv[1]).read_text()))
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(reports))
