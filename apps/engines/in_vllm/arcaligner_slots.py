"""Precomputed passages of ArcAligner in an unmodified vLLM: prompts begin with slots, whose keys and values are in
files.

    ARCALIGNER_PASSAGES=FOLDER PYTHONPATH=apps/engines/in_vllm python -m vllm.entrypoints.openai.api_server \
        --model BASE_MODEL --logits-processors arcaligner_slots:SlotsLogitsProcessor --kv-transfer-config \
        '{"kv_connector": "SlotsConnector", "kv_connector_module_path": "arcaligner_slots",
          "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}'

Each worker keeps up to 1 GiB of the passages that it has read in memory. To set another number of bytes, add
`"kv_connector_extra_config": {"passage_bytes": 0}` to `--kv-transfer-config`.

This file needs only vLLM, torch and safetensors, and no other file of ArcAligner. The prompt of a request of
`/v1/completions` is a list of ids: those of the text before the slots, any id for each slot, and those of the text
after the slots. In addition, the request has

    "kv_transfer_params": {"slots": [[KEY, number of slots], ...], "copy": ...}, "cache_salt": salt_of(slots)

Each KEY names a file KEY.safetensors in FOLDER: first that of the text before the slots, then that of each passage, in
order; a passage that occurs twice is named twice. docs/formats.md describes the files. `copy`, which is optional, is
for copy-biased decoding.

A request that does not fit fails; it is never answered without its passages. If the files are faulty or do not belong
together, [`SlotsLogitsProcessor`] refuses the request with status 400, before it reaches the engine. If they do not fit
the prompt or the base model, the request fails in the engine, and vLLM's log has the reason.

Shapes: a file's `keys_values` is (num_layers, 2, key_value_heads, num_slots, head_dim).
"""

import hashlib
import json
import logging
import os
import re
import reprlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

logger = logging.getLogger("vllm.arcaligner")

FOLDER = "ARCALIGNER_PASSAGES"  # the environment variable that names the folder of the files
FORMAT, NAME = "arcaligner-passage-3", "keys_values"
PASSAGE_BYTES = 2**30  # memory of each worker for cached passages, unless `passage_bytes` is set
READERS = 4  # threads that read files
# Types of base models whose keys can be moved to later positions by a rotation, which several independent passages
# need. Other types may rotate other pairs of values, or have layers without positions.
ROTATED = ("llama", "mistral", "qwen2", "qwen3")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # scalings of RoPE with which keys of a prompt depend on its length


# Files


def json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def salt_of(slots: Sequence[Sequence]) -> str:
    """The `cache_salt` of a request. The ids of slots are arbitrary, so vLLM may share a cached prefix only between
    requests with the same salt."""
    return json_digest([list(key_and_count) for key_and_count in slots])


class Header(NamedTuple):
    """The metadata of a file."""

    shape: tuple[int, ...]
    is_int8: bool
    fingerprint: dict[str, Any]
    base_model: dict[str, Any]
    payload: str

    @property
    def num_slots(self) -> int:
        return self.shape[3]

    @property
    def head_dim(self) -> int:
        return self.shape[4] - 4 * self.is_int8


def read_header(key: str) -> Header:
    """The header of the file KEY.safetensors.

    Raises:
        `ValueError`: the file is missing, broken, of a different format, or renamed.
    """
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
        raise ValueError(
            f"{key!r} is not the key of a precomputed passage; expected 64 hexadecimal digits: the name of the "
            "passage's file, without .safetensors."
        )
    return _read_header(path_of(key), *stamp_of(key))


def stamp_of(key: str) -> tuple[int, int]:
    """The time of the last write and the size of a file, which show whether it was written again.

    Raises:
        `ValueError`: the file is missing.
    """
    path = path_of(key)
    try:
        state = path.stat()
    except OSError as error:
        raise ValueError(
            f"The precomputed passage {path.name} does not exist ({error.strerror}). Run `arcaligner corpus "
            "precompute` again."
        ) from error
    return state.st_mtime_ns, state.st_size


def path_of(key: str) -> Path:
    if not (folder := os.environ.get(FOLDER)):
        raise ValueError(
            f"The environment variable {FOLDER} is not set. Start vLLM with {FOLDER} set to the folder of precomputed "
            "passages."
        )
    return _path(folder, key)


@lru_cache(65536)
def _path(folder: str, key: str) -> Path:
    """Path of a passage's file, cached because a request needs it several times."""
    return Path(folder) / f"{key}.safetensors"


@lru_cache(65536)
def _read_header(path: Path, modified: int, size: int) -> Header:
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            if metadata.get("format") != FORMAT or names != [NAME]:
                raise ValueError(
                    f"its format is {metadata.get('format')!r} with the tensors {names}; expected {FORMAT!r} with "
                    f"{[NAME]}"
                )
            tensor = file.get_slice(NAME)
            shape, is_int8 = tuple(tensor.get_shape()), tensor.get_dtype() == "I8"
        if len(shape) != 5:
            raise ValueError(f"its tensor has the shape {shape}; expected (layers, 2, heads, slots, head_dim)")
        if "base_model" not in metadata:
            raise ValueError(
                "it was written by ArcAligner 0.2 and does not name its base model; expected a file of the "
                "installed version"
            )
        fingerprint, base_model = json.loads(metadata["fingerprint"]), json.loads(metadata["base_model"])
        # The name is the digest of everything that the keys and values depend on.
        of_passage = {name: fingerprint[name] for name in ("prompt", "passages", "has_slots")}
        shared = {name: value for name, value in fingerprint.items() if name not in of_passage}
        if json_digest([json_digest(shared), of_passage]) != path.stem:
            raise ValueError("its name does not match the `fingerprint` in its metadata; it may have been renamed")
        return Header(shape, is_int8, fingerprint, base_model, metadata["payload"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(path, error) from error


def check_slots(slots: Any) -> list[Header]:
    """The headers of the files of a request.

    Raises:
        `ValueError`: `slots` is not a list of pairs of a file's key and a number of slots, or the files do not belong
            together.
    """
    is_list = isinstance(slots, list) and slots and all(isinstance(pair, list) and len(pair) == 2 for pair in slots)
    if not is_list or not all(type(count) is int and count >= 0 for _, count in slots):
        raise ValueError(
            f"`slots` is {reprlib.repr(slots)}; expected [[KEY, number of slots], ...]. Each KEY is the name of a file "
            "in the folder of precomputed passages, without .safetensors. The first KEY must name the file of the text "
            "before the passages."
        )
    headers = [read_header(key) for key, _ in slots]
    first = headers[0]
    if (positions := first.fingerprint.get("lora_positions", "slots")) != "slots":
        raise ValueError(
            f"The aligner of these passages has `lora_positions` {positions!r}; expected 'slots', because vLLM "
            "processes text without the LoRA. Use an aligner whose LoRA applies to slots only."
        )
    for number, ((key, count), header) in enumerate(zip(slots, headers, strict=True)):
        if count > header.num_slots:
            raise ValueError(
                f"`slots` asks for {count} slots of the passage {key}; expected at most {header.num_slots}, the number "
                "in its file."
            )
        for name in (
            "prompt",
            "backbone",
            "backbone_weights",
            "aligner_weights",
            "passage_attention",
            "passage_alignment",
            "lora_positions",
        ):
            if header.fingerprint.get(name) != first.fingerprint.get(name):
                raise ValueError(
                    f"The files {slots[0][0]} and {key} do not belong together: they differ in `{name}`. Precompute "
                    "all passages with the same checkpoint and settings."
                )
        if header.base_model != first.base_model:
            raise ValueError(
                f"The files {slots[0][0]} and {key} were computed with different base models. Precompute all passages "
                "with the same checkpoint."
            )
        if header.fingerprint["has_slots"] != bool(number):
            raise ValueError(
                "`slots` is in the wrong order; expected first the file of the text before the passages, then only "
                "files of passages."
            )
    if slots[0][1] != first.num_slots:
        raise ValueError(
            f"`slots` asks for {slots[0][1]} tokens of the text before the passages; expected {first.num_slots}, the "
            "number in the file of this text."
        )
    if first.fingerprint.get("passage_attention") != "separate" and len(slots) > 2:
        raise ValueError(
            f"`slots` names {len(slots)} files; expected two, because passages of this aligner attend to each other: "
            "one of the text before the passages, and one of all passages of the question. Pass these two."
        )
    return headers


def moves_of(slots: Sequence[Sequence], headers: Sequence[Header]) -> list[int]:
    """By how many positions the keys of each file of a request are moved, so that the question can follow at the next
    position.

    All independent passages begin at the same position in their files, but vLLM counts the slots of all passages. So
    the question is at a later position, and all keys are moved by the difference. With `passage_alignment` "end" each
    passage directly precedes the question, so the keys of shorter passages are moved further.
    """
    counts = [count for _, count in slots[1:]]
    total, longest = sum(counts), max(counts, default=0)
    if headers[0].fingerprint.get("passage_alignment", "start") == "end":
        return [total - longest, *(total - count for count in counts)]
    return [total - longest] * len(slots)


class Passages:
    """
    Keys and values of files. The most recently used ones stay in memory.

    Each use checks the time and the size of the file, so that a file that was lost or replaced is noticed. Values are
    compared with their digest when they are read.

    Args:
        max_bytes (`int`): Memory for keys and values; 0 caches none.
        heads (`slice`): The key-value heads that are used.
    """

    def __init__(self, max_bytes: int, heads: slice):
        self.max_bytes, self.heads, self.bytes = max_bytes, heads, 0
        self._entries: OrderedDict[str, tuple[tuple[int, int], torch.Tensor]] = OrderedDict()  # longest unused first
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="arcaligner-passages")

    def read(self, keys: Iterable[str]) -> dict[str, torch.Tensor | ValueError]:
        """The keys and values of files, each (num_layers, 2, num_slots, heads, head_dim), or the reason why a file
        cannot be used."""
        passages, new = {}, {}
        for key in dict.fromkeys(keys):
            try:
                header, stamp = read_header(key), stamp_of(key)
            except ValueError as error:
                passages[key] = error
                continue
            if key in self._entries and self._entries[key][0] == stamp:
                self._entries.move_to_end(key)
                passages[key] = self._entries[key][1]
            else:
                new[key] = header, stamp
        # The readers wait for the disk and compute digests. They call no operation of PyTorch that computes, because it
        # would start further threads.
        values_of_files = self._readers.map(_read_values, new, [header for header, _ in new.values()])
        for (key, (header, stamp)), values in zip(new.items(), values_of_files, strict=True):
            passages[key] = values
            if isinstance(values, torch.Tensor):
                passages[key] = self._arranged(values, header)
                self._store(key, stamp, passages[key])
        return passages

    def _arranged(self, values: torch.Tensor, header: Header) -> torch.Tensor:
        """The values of a file in the form that an engine's layers take."""
        values = values[:, :, self.heads]
        if header.is_int8:  # the last four bytes of each vector are a float32, the scale of its other numbers
            values = values[..., :-4].float() * values[..., -4:].contiguous().view(torch.float32)
        return values.transpose(2, 3).contiguous()

    def _store(self, key: str, stamp: tuple[int, int], values: torch.Tensor) -> None:
        if key in self._entries:  # the file was replaced
            self.bytes -= self._entries.pop(key)[1].nbytes
        if values.nbytes > self.max_bytes:
            return
        while self.bytes + values.nbytes > self.max_bytes:
            self.bytes -= self._entries.popitem(last=False)[1][1].nbytes
        self._entries[key] = stamp, values
        self.bytes += values.nbytes


def _read_values(key: str, header: Header) -> torch.Tensor | ValueError:
    """The tensor of a file, or the reason why it cannot be used."""
    path = path_of(key)
    try:
        # Read, not mapped into memory: if another process truncates a mapped file, this process is killed.
        values = load_tensors(path.read_bytes())[NAME]
        digest = hashlib.sha256(f"{NAME} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy())
        if digest.hexdigest() != header.payload:
            raise ValueError("its keys and values do not match the digest in its metadata")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return _unusable(path, error)
    return values


def _unusable(path: Path, error: Exception) -> ValueError:
    reason = f"it has no entry {error}" if isinstance(error, KeyError) else error
    return ValueError(
        f"The precomputed passage {path.name} cannot be used: {reason}. Run `arcaligner corpus precompute` again."
    )


# The base model


def base_model_digest(folder: str | Path) -> str:
    """The SHA-256 of the weights of a decoder in safetensors files, as in the `base_model` of a passage's file."""
    names: dict[str, Path] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path)
    full_names = {name.removeprefix("model."): name for name in names if "rotary_emb." not in name}
    digest = hashlib.sha256()
    for short in sorted(name for name in full_names if name.startswith(("embed_tokens.", "layers.", "norm."))):
        name = full_names[short]
        with safe_open(names[name], framework="pt") as file:
            weight = file.get_tensor(name)
        digest.update(f"{short} {tuple(weight.shape)}".encode())
        digest.update(weight.to(torch.bfloat16).contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def folder_of(model: str, revision: str | None) -> str:
    """The folder with the weights of a base model on this machine."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(model, revision=revision, allow_patterns=["*.safetensors"], local_files_only=True)


def inverse_frequencies(config: Any) -> torch.Tensor:
    """Angle by which RoPE rotates each pair of values of a key per position, (head_dim / 2,), in float64."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")[0].double()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def key_rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors that move the key of each slot by its number of `positions`: cosines, by which the key is multiplied, and
    signed sines, by which the key with its halves swapped is multiplied; both (num_slots, 1, head_dim)."""
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def rotate_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys (num_slots, heads, head_dim) moved to later positions, with the factors of [`key_rotation`]."""
    keys = keys.float()
    return (keys * cos).addcmul_(keys.roll(keys.shape[-1] // 2, dims=-1), sin)


# The connector


@dataclass
class Load:
    """Keys and values to write to the blocks of vLLM's cache for a request. The keys of each file are moved by the
    positions in `moves`; the first `start` positions of the prompt are already there."""

    slots: list[list]
    moves: list[int]
    start: int
    blocks: list[int]


@dataclass
class SlotsMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # ids of requests that fail


class SlotsConnector(KVConnectorBase_V1, SupportsHMA):
    """Gives vLLM the keys and values of precomputed passages as if they were a cached prefix of the prompt."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = config = vllm_config.model_config.hf_text_config
        rope = getattr(config, "rope_parameters", None) or {}
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec) or specs[0].sliding_window is not None:
            raise ValueError(
                f"The base model has layers of the kinds {specs}; expected only layers that attend to all positions. "
                "Use a base model without a sliding window."
            )
        rope_type = rope.get("rope_type", "default")
        if "rope_theta" not in rope or rope_type in LENGTH_DEPENDENT:
            wrong = f"`rope_type` {rope_type!r}" if rope_type in LENGTH_DEPENDENT else "no `rope_theta`"
            raise ValueError(
                f"`rope_parameters` of the base model has {wrong}; expected a `rope_theta`, and a `rope_type` whose "
                f"angles do not depend on the length of a prompt (not {' or '.join(LENGTH_DEPENDENT)}). Use a base "
                "model with such a RoPE."
            )
        if (policy := self._kv_transfer_config.kv_load_failure_policy) != "fail":
            raise ValueError(
                f"`kv_load_failure_policy` is {policy!r}; expected 'fail', because a request without its passages must "
                "not be answered. Set it in `--kv-transfer-config`."
            )
        processors = vllm_config.model_config.logits_processors or []
        if not any("SlotsLogitsProcessor" in str(processor) for processor in processors):
            raise ValueError(
                "vLLM was started without the logits processor that checks requests. Start it with "
                "`--logits-processors arcaligner_slots:SlotsLogitsProcessor`."
            )
        self._block_size, self._dtype = specs[0].block_size, vllm_config.model_config.dtype
        self._heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._base_model = None
        if role == KVConnectorRole.SCHEDULER:
            model = vllm_config.model_config
            self._base_model = {"weights": base_model_digest(folder_of(model.model, model.revision)), "rope": rope}
        self._refused: dict[str, str] = {}
        self._moves: dict[str, list[int]] = {}
        self._pending: dict[str, tuple[list[list], list[int], int]] = {}
        self._broken: set[int] = set()
        self._failed: set[str] = set()
        self._passage_bytes = self._kv_transfer_config.get_from_extra_config("passage_bytes", PASSAGE_BYTES)
        if type(self._passage_bytes) is not int or self._passage_bytes < 0:
            raise ValueError(
                f"`passage_bytes` is {self._passage_bytes!r}; expected a whole number of bytes. Pass 0 to keep no "
                "passages in memory."
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        slots = (request.kv_transfer_params or {}).get("slots")
        if slots is None:
            return 0, False
        try:
            self._moves[request.request_id] = moves_of(slots, self._check(request, slots))
        except ValueError as error:
            if request.request_id not in self._refused:
                logger.error("Request %s failed: %s", request.request_id, error)
            # Say that the whole prompt will be loaded, so that vLLM computes none of it; then the worker reports that
            # loading has failed.
            self._refused[request.request_id] = str(error)
            return max(1, request.num_tokens - num_computed_tokens), True
        return max(0, sum(count for _, count in slots) - num_computed_tokens), False

    def _check(self, request, slots: Any) -> list[Header]:
        """The headers of the files of a request.

        Raises:
            `ValueError`: the files do not belong together, to the prompt, or to vLLM's base model.
        """
        headers, ids = check_slots(slots), list(request.prompt_token_ids or ())
        num_before, num_slots = slots[0][1], sum(count for _, count in slots)
        if num_slots >= len(ids):
            raise ValueError(
                f"The prompt has {len(ids)} token ids; expected more than {num_slots}, the number of its slots and of "
                "the tokens before them. Append the token ids of the question."
            )
        if json_digest(ids[:num_before]) != headers[0].fingerprint["prompt"]:
            raise ValueError(
                "The prompt does not begin with the text that preceded its passages when they were precomputed. Make "
                "the prompt with the chat template of the aligner's processor."
            )
        if request.cache_salt != salt_of(slots):
            raise ValueError(
                "`cache_salt` does not match `slots`, so vLLM could use the cached prefix of another request. Pass "
                "`arcaligner_slots.salt_of(slots)` as `cache_salt`."
            )
        for (key, _), header in zip(slots, headers, strict=True):
            shape = (header.shape[0], header.shape[1], header.shape[2], header.head_dim)
            expected = (self._config.num_hidden_layers, 2, self._heads, self._head_dim)
            if shape != expected:
                raise ValueError(
                    f"The passage {key} has the shape (layers, 2, heads, head_dim) {shape}; expected {expected}. Start "
                    "vLLM with the base model of the aligner."
                )
            for name in ("rope", "weights"):
                value, expected = header.base_model.get(name), self._base_model[name]
                if value != expected:
                    raise ValueError(
                        f"The passage {key} was computed with a different base model: its `{name}` is {value!r}; "
                        f"expected {expected!r}. Start vLLM with the base model of the aligner."
                    )
        if len(slots) > 2 and self._config.model_type not in ROTATED:
            raise ValueError(
                f"The base model is of type {self._config.model_type!r}; with several independent passages, expected "
                f"one of the types {', '.join(ROTATED)}. Pass one passage, or use a base model of such a type."
            )
        return headers

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if request.request_id in self._refused:
            if num_external_tokens > 0:
                self._failed.add(request.request_id)
        elif num_external_tokens > 0:
            slots = request.kv_transfer_params["slots"]
            start = sum(count for _, count in slots) - num_external_tokens
            self._pending[request.request_id] = slots, self._moves[request.request_id], start

    def build_connector_meta(self, scheduler_output) -> SlotsMetadata:
        meta = SlotsMetadata(refused=self._failed)
        new = [(request.req_id, request.block_ids) for request in scheduler_output.scheduled_new_reqs]
        cached = scheduler_output.scheduled_cached_reqs
        new += [  # requests that continue after a preemption: all their blocks are new
            (name, blocks)
            for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if name in cached.resumed_req_ids
        ]
        for name, block_ids in new:
            if name in self._pending:
                meta.loads.append(Load(*self._pending.pop(name), list(block_ids[0])))
        assert not self._pending, self._pending
        self._failed = set()
        return meta

    def request_finished(self, request, block_ids) -> tuple[bool, None]:
        self._refused.pop(request.request_id, None)
        self._moves.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # The worker's side

    def start_load_kv(self, forward_context, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        self._failed |= meta.refused
        passages = self._passages.read(key for load in meta.loads for key, _ in load.slots)
        loads = []
        for load in meta.loads:
            errors = [passages[key] for key, _ in load.slots if isinstance(passages[key], ValueError)]
            if not errors:
                loads.append(load)
                continue
            # A file was lost or damaged after the request was accepted.
            logger.error("A request failed: %s", errors[0])
            end = sum(count for _, count in load.slots)
            self._broken |= set(load.blocks[load.start // self._block_size : -(-end // self._block_size)])
        if loads:
            self._write(loads, passages, forward_context.no_compile_layers)

    def _write(self, loads: list[Load], passages: dict[str, torch.Tensor], layers: dict[str, Any]) -> None:
        """Write the keys and values of all requests to their blocks, in this worker's layers, in a few large operations
        instead of many small ones."""
        file_tensors, shifts, cells_of_loads = [], [], []
        for load in loads:
            lengths = torch.tensor([count for _, count in load.slots])
            file_tensors += self._tensors_of(load, passages)
            positions = torch.arange(load.start, int(lengths.sum()))
            shifts.append(torch.tensor(load.moves).repeat_interleave(lengths)[load.start :])
            cells_of_loads.append(
                torch.tensor(load.blocks)[positions // self._block_size] * self._block_size
                + positions % self._block_size
            )
        shift, cells = torch.cat(shifts), torch.cat(cells_of_loads)  # (slots of all requests,)
        moved = key_rotation(shift, self._frequencies) if shift.any() else None
        for name, layer in layers.items():
            cache = getattr(layer, "kv_cache", None)
            if cache is None:
                continue
            first = 2 * int(re.search(r"\.layers\.(\d+)\.", name)[1])
            keys, values = (torch.cat([tensors[index] for tensors in file_tensors]) for index in (first, first + 1))
            if moved is not None:
                keys = rotate_keys(keys, *moved)
            # (slots, heads of this worker, head_dim)
            keys, values = keys.to(cache.device, self._dtype), values.to(cache.device, self._dtype)
            layer.impl.do_kv_cache_update(layer, keys, values, cache, cells.to(cache.device))

    @cached_property
    def _passages(self) -> Passages:
        """The passages, with the key-value heads of this worker only."""
        world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        first = rank * self._heads // world  # if there are more workers than heads, several have the same head
        return Passages(self._passage_bytes, slice(first, first + max(1, self._heads // world)))

    def _tensors_of(self, load: Load, passages: dict[str, torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Tensors to write for each file: of each layer keys, then values, (slots, heads of this worker, head_dim)."""
        tensors, start = [], load.start
        for key, count in load.slots:
            if start < count:
                tensors.append(passages[key][:, :, start:count].flatten(0, 1).unbind())
            start = max(0, start - count)
        return tensors

    @cached_property
    def _frequencies(self) -> torch.Tensor:
        return inverse_frequencies(self._config)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        broken, self._broken = self._broken, set()
        return broken

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: everything is loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: passages are precomputed by ArcAligner, not by vLLM."""

    def wait_for_save(self) -> None:
        """Do nothing: vLLM saves no passages."""


# Checks of requests, and copy-biased decoding


def copied_next(texts: Sequence[Sequence], answer_ids: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """Ids that may follow an answer that was copied from `texts`: those that continue the copy and, at the end of a
    word, those that end the answer.

    Each text is `[ids, ends, words]`: the ids of the text, whether a word ends with each of them, and a list of its
    words. Each word is `[word_ids, word_ends, after]`: its ids if no space is before it, whether a word ends with each
    of them, and the index in `ids` at which the text continues after the word, as in `CopiedText`.
    """
    following, length = set(), len(answer_ids)
    for ids, ends, words in texts:
        for word_ids, word_ends, after in words:
            chain = word_ids[: length + 1]
            chain = chain + ids[after : after + length + 1 - len(chain)]
            if chain[:length] != answer_ids:
                continue
            following.update(chain[length:])
            is_in_word = length <= len(word_ids)
            if length and (word_ends[length - 1] if is_in_word else ends[after + length - len(word_ids) - 1]):
                following.update(end_ids)
    return sorted(following)


class SlotsLogitsProcessor(AdapterLogitsProcessor):
    """Refuses requests whose passages cannot be used, before they reach the engine. If a request has `copy` (`bonus` in
    log-odds, and `texts` and `end_ids` of [`copied_next`]), biases decoding towards the words of the passages."""

    @classmethod
    def validate_params(cls, sampling_params) -> None:
        params = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        if unknown := params.keys() - {"slots", "copy"}:
            raise ValueError(
                f"`kv_transfer_params` has the unknown keys {sorted(unknown)}; expected only `slots` and `copy`."
            )
        if "slots" in params:
            check_slots(params["slots"])
            if sampling_params.prompt_logprobs is not None or sampling_params.skip_reading_prefix_cache:
                raise ValueError(
                    "Requests with `slots` support neither `prompt_logprobs` nor `skip_reading_prefix_cache`. "
                    "Leave both out."
                )
        if (copy := params.get("copy")) is not None:
            try:
                copied_next(copy["texts"], [], copy["end_ids"])
                copied_next(copy["texts"], [0], copy["end_ids"])
                float(copy["bonus"])
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"`copy` is malformed ({type(error).__name__}: {error}); expected an object with `bonus`, `texts` "
                    "and `end_ids`."
                ) from error

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        copy = ((params.extra_args or {}).get("kv_transfer_params") or {}).get("copy")
        if not copy or not copy["texts"] or not copy["bonus"]:
            return None
        texts, end_ids, bonus = copy["texts"], copy["end_ids"], float(copy["bonus"])

        def prefer(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[copied_next(texts, list(output_ids), end_ids)] += bonus
            return logits

        return prefer
