"""The few names of vLLM that `arcaligner_slots.py` imports, so that its checks are tested where vLLM is not."""

import importlib.util
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace

from arcaligner.apps.server.vllm_engine import IN_VLLM


class Connector:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind(self, metadata):
        self._metadata = metadata

    def _get_connector_metadata(self):
        return self._metadata


class Role(Enum):
    SCHEDULER, WORKER = 0, 1


@dataclass
class Results:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


@dataclass
class Spec:
    block_size: int = 4
    sliding_window: int | None = None


def load_slots_module() -> ModuleType:
    """`arcaligner_slots`, imported with a stand-in for vLLM that has only these names."""
    parallel = SimpleNamespace(world=1, rank=0)
    modules = {
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: parallel.rank,
            "get_tensor_model_parallel_world_size": lambda: parallel.world,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Connector,
            "KVConnectorMetadata": object,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": Results,
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": Spec},
        "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": object},
    }
    stubs = {}
    for name, names in modules.items():
        stubs[name] = ModuleType(name)
        vars(stubs[name]).update(names)
    spec = importlib.util.spec_from_file_location("arcaligner_slots_over_stubs", IN_VLLM / "arcaligner_slots.py")
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules |= stubs
    try:
        sys.modules[spec.name] = module  # dataclasses look up their module there
        spec.loader.exec_module(module)
    finally:
        for name, former in before.items():
            sys.modules.pop(name) if former is None else sys.modules.update({name: former})
    module.parallel = parallel
    return module
