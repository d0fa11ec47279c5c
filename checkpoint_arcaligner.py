"""Checkpoints: the aligner alone on disk, the base model by name; whole, or refused.

`save_pretrained` writes projector, LoRA and gates (tens of MB), the configuration and the code;
`from_pretrained` also loads the base model's own files, through transformers' loader, so that dtype, device map and
quantization work as for any model. A base model's own name or folder can be given to `from_pretrained` too: a
fresh aligner is put around it.

`digests` in `config.json` binds what gives slots their meaning: settings of aligner and processor, the aligner's
weights, the tokenizer and the encoder that was trained along. `save_pretrained` of model and of processor keep it true.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import Parameter
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.core_model_loading import WeightRenaming
from transformers.utils import cached_file, logging

from .configuration_arcaligner import default_dtype, settings_digests, slot_settings
from .folders_arcaligner import (
    BASE_MODEL_FILES,
    check_json_file,
    find_model,
    processor_digests,
    read_tensors,
    resolve_model,
    tensor_shapes,
    tensors_digest,
    weight_files,
    write_config,
    written_whole,
)

logger = logging.get_logger(__name__)

_ALIGNER_KEY = re.compile(r"(^|\.)(projector|slot_gate|lora_A\.slot|lora_B\.slot)\.")
# What a checkpoint carries to be loaded with `trust_remote_code=True`, in the order of the data flow.
CODE_FILES = (
    "configuration_arcaligner.py",
    "folders_arcaligner.py",
    "segmentation_arcaligner.py",
    "encoder_arcaligner.py",
    "processing_arcaligner.py",
    "backbones_arcaligner.py",
    "lora_arcaligner.py",
    "refinement_arcaligner.py",
    "passages_arcaligner.py",
    "modeling_arcaligner.py",
    "fingerprint_arcaligner.py",
    "prefix_store_arcaligner.py",
    "generation_arcaligner.py",
    "checkpoint_arcaligner.py",
    "confidence_arcaligner.py",
    "pipeline_arcaligner.py",
)
WEIGHTS_DIGEST = "model.safetensors"  # the aligner's weights in the `digests`, in however many files they are
# With `output_loading_info=True` missing and mismatched keys are reported to the caller, not refused.
_caller_reads_loading_info = ContextVar("caller_reads_loading_info", default=False)


class AlignerCheckpointMixin:
    """`from_pretrained` and `save_pretrained` of a model whose base weights live elsewhere."""

    hf_quantizer = None  # set by transformers where the base model is quantized
    _is_checked = False
    _has_default_dtype = False

    @staticmethod
    def is_aligner_key(key: str) -> bool:
        """Whether a parameter name belongs to projector, LoRA or a gate."""
        return _ALIGNER_KEY.search(key) is not None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As `PreTrainedModel.from_pretrained`, for an ArcAligner checkpoint or a plain base model.

        A base model gets a fresh aligner, shaped by configuration arguments such as `encoder_hidden_size=`, `lora_r=`.
        The base model is frozen. Without `dtype`, or with `"auto"`, it is float32 on a CPU, and elsewhere what
        `config.json` says.

        Raises:
            `ValueError`: aligner weights that are missing, do not fit or were quantized.
            `OSError`: a base model that is not on this machine and cannot be downloaded, with how to get it.
            `RuntimeError`: a version of transformers that loads weights in another way.
        """
        name = pretrained_model_name_or_path
        if name is not None:
            if (path := Path(name, "generation_config.json")).is_file():
                check_json_file(path)
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
        token = _caller_reads_loading_info.set(kwargs.get("output_loading_info", False))
        try:
            model = super().from_pretrained(name, *args, **kwargs)
        finally:
            _caller_reads_loading_info.reset(token)
        loaded = model[0] if isinstance(model, tuple) else model
        if not loaded._is_checked:  # the base model's weights would be random
            raise RuntimeError(
                f"transformers {transformers_version} loads weights in another way than ArcAligner knows of: its base "
                "model was not loaded. Take a version that docs/versions.md lists, or a newer ArcAligner."
            )
        loaded._has_default_dtype = has_default_dtype
        if loaded.hf_quantizer is not None:
            _check_aligner_is_whole(loaded)
        loaded.freeze_base_model()
        if loaded.can_generate():
            # transformers reads the aligner's settings as generation settings too.
            for name in kwargs.keys() & cls.config_class.__annotations__.keys():
                loaded.generation_config.__dict__.pop(name, None)
        return model

    # The one private method of transformers' loader that stands here: nothing public lets a model have files of two
    # places, read in parts, with device map, quantization and checks before anything is in memory. Where a version of
    # transformers does not call it, `from_pretrained` refuses.
    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *others):
        config = model.config
        model._is_checked = True
        if state_dict is not None or not checkpoint_files:
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *others)
        source = str(load_config.pretrained_model_name_or_path)
        is_base_model, is_refused = source == resolve_model(str(config.base_model_name_or_path)), True
        needs_base_model = False
        if not is_base_model:
            is_refused = not _caller_reads_loading_info.get()
            shapes = tensor_shapes(checkpoint_files)
            if is_refused:
                check_weights(model, checkpoint_files, source, load_config.ignore_mismatched_sizes)
            if needs_base_model := not _includes_base_model(config, shapes):
                checkpoint_files = checkpoint_files + _base_model_files(config, load_config.download_kwargs or {})
        renamings = _base_model_renamings(model) if is_base_model or needs_base_model else []
        load_config = replace(load_config, weight_mapping=[*renamings, *(load_config.weight_mapping or [])])
        loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *others)
        if is_refused:
            _check_base_model_loaded(model, loaded[0], load_config, None if renamings else source)
        config.digests = config.includes_base_model = None  # they hold for the files only
        # Kept, these renamings would be undone when the model is saved.
        model._weight_conversions = [c for c in model._weight_conversions if c not in renamings]
        return loaded

    def save_pretrained(self, save_directory, *args, save_base_model: bool | None = None, **kwargs):
        """Writes the aligner, the configuration and the code to `save_directory`. A quantization of the base model is
        not written: it is chosen when the aligner is loaded.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write to; created if it does not exist.
            save_base_model (`bool`, *optional*):
                Whether to write the base model's weights too. Default: only when `config.base_model_name_or_path` is
                not set, since nothing else says where they are.

        Raises:
            `ValueError`: `push_to_hub=True`, which would upload an incomplete checkpoint.
        """
        if kwargs.pop("push_to_hub", False):
            raise ValueError(
                "`push_to_hub=True` would upload the model without the pipeline's code. Call "
                "`model.push_to_hub(repo_id)`, or `push_to_hub(repo_id)` of the pipeline for the processor as well."
            )
        if save_base_model is None:
            save_base_model = self.config.base_model_name_or_path is None
        ignored_before, class_before = self._keys_to_ignore_on_save, type(self)
        quantizer, quantization = self.hf_quantizer, self.config.__dict__.get("quantization_config")
        if not save_base_model:
            self._keys_to_ignore_on_save = {key for key in self.state_dict() if not self.is_aligner_key(key)}
            self.hf_quantizer = None  # it would write the base model
            self.config.__dict__.pop("quantization_config", None)
        # FSDP2 puts a class of torch's before ours; the checkpoint would name that one, and hold torch's files.
        self.__class__ = next(cls for cls in class_before.__mro__ if not cls.__module__.startswith("torch."))
        is_main = kwargs.get("is_main_process", True)
        try:
            with written_whole(save_directory) if is_main else contextlib.nullcontext(save_directory) as folder:
                super().save_pretrained(folder, *args, **kwargs)
                if is_main:
                    self._copy_code(folder)
                    # On a CPU it was float32 whatever `config.json` says; elsewhere that holds still.
                    is_kept = self._has_default_dtype and not save_base_model and self.dtype == torch.float32
                    dtype = self.config.named_dtype if is_kept else None
                    _write_digests(Path(save_directory), folder, save_base_model, dtype)
        finally:
            self._keys_to_ignore_on_save, self.__class__ = ignored_before, class_before
            self.hf_quantizer = quantizer
            if quantization is not None:
                self.config.quantization_config = quantization

    def _copy_code(self, folder: Path) -> None:
        """Writes the code of model, processor and pipeline, and warns about files that it does not find."""
        missing = []
        for name in CODE_FILES:
            source = _find_code(name, self.config._name_or_path)
            if source is None:
                missing.append(name)
            else:
                shutil.copyfile(source, folder / name)
        if missing:
            logger.warning(
                f"The checkpoint lacks {', '.join(missing)}: this model was made from a configuration by remote code "
                "that has not loaded them. Load processor or pipeline first, or save from the installed package."
            )


def _find_code(name: str, checkpoint: str) -> Path | None:
    """Path of a code file: next to this one or, since remote code has only what was loaded, in the checkpoint."""
    beside = Path(__file__).with_name(name)
    if beside.exists() or not checkpoint:
        return beside if beside.exists() else None
    options = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    found = cached_file(checkpoint, name, **options)
    return None if found is None else Path(found)


def check_weights(model, files: list[str], source: str, ignore_mismatched_sizes: bool = False) -> None:
    """Refuses the weights in `files` of the checkpoint `source`, before any is loaded, unless they are those of the
    aligner of `model`, as they were saved. Weights of a base model are checked for NaN only.

    Raises:
        `ValueError`: weights that are missing, too many, of another shape, not finite or not those that were saved.
    """
    shapes, config = tensor_shapes(files), model.config
    prefix = f"{model.base_model_prefix}."
    found = {key.removeprefix(prefix): shape for key, shape in shapes.items() if model.is_aligner_key(key)}
    expected = {
        key.removeprefix(prefix): list(tensor.shape)
        for key, tensor in model.state_dict().items()
        if model.is_aligner_key(key)
    }
    described = f"backbone {config.base_model_name_or_path} ({config.text_config.model_type}, hidden size "
    described += f"{config.text_config.hidden_size}, {config.text_config.num_hidden_layers} layers) and encoder "
    described += f"{config.encoder_name_or_path} (width {config.encoder_hidden_size})"
    settings = "check `gate_layers`, `lora_r`, `lora_target_modules`, `word_parts` and `text_config` in its config.json"
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(
            f"Checkpoint {source} lacks {len(missing)} of {len(expected)} aligner weights that {described} needs, "
            f"first `{missing[0]}`. It was saved incompletely or for another backbone: {settings}."
        )
    if surplus := sorted(found.keys() - expected.keys()):
        raise ValueError(
            f"Checkpoint {source} has {len(surplus)} aligner weights that its settings have no place for, first "
            f"`{surplus[0]}`. One of the two was changed: {settings}."
        )
    others = sorted(key for key in expected if found[key] != expected[key])
    if others and not ignore_mismatched_sizes:
        raise ValueError(
            f"Checkpoint {source} does not fit {described}: `{others[0]}` has shape {found[others[0]]} in the "
            f"checkpoint and {expected[others[0]]} in the model ({len(others)} weights differ). Load it with the "
            "backbone, encoder and LoRA rank it was trained with."
        )
    strangers = sorted(key for key in shapes if not model.is_aligner_key(key))
    if strangers and not _includes_base_model(config, shapes):
        raise ValueError(
            f"Checkpoint {source} has {len(strangers)} weights that are no aligner's, first `{strangers[0]}`, but was "
            "saved without a base model. Download it again, or save it again."
        )
    check_values(model.is_aligner_key, files, source, (config.digests or {}).get(WEIGHTS_DIGEST))


def check_values(is_aligner_key, files: Iterable[str | Path], source: str, digest: str | None) -> None:
    """Refuses weights that are not finite, and an aligner's that are not those with the `digest`."""
    aligner = {}
    for key, tensor in read_tensors(files):
        if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
            raise ValueError(
                f"Checkpoint {source} has {int((~torch.isfinite(tensor)).sum())} NaN or infinite values of "
                f"{tensor.numel()} in `{key}`. Its training diverged, or the file is damaged: take another one."
            )
        if is_aligner_key(key):
            aligner[key] = tensor
    if digest is not None and tensors_digest(aligner) != digest:
        raise ValueError(
            f"The aligner's weights in {source} are not those that it was saved with. Download the checkpoint again, "
            "or save it again."
        )


def _includes_base_model(config, shapes: Iterable[str]) -> bool:
    """Whether a checkpoint with these weights is to have its base model's too. Older ones do not say so; they have if
    any weight is no aligner's."""
    if config.includes_base_model is not None:
        return config.includes_base_model
    return not all(map(AlignerCheckpointMixin.is_aligner_key, shapes))


def _check_aligner_is_whole(model) -> None:
    """Refuses aligner weights that a quantizer took."""
    taken = [(name, each) for name, each in model.aligner_parameters() if type(each) is not Parameter]
    if taken:
        raise ValueError(
            f"The quantizer took {len(taken)} weights of the aligner, first `{taken[0][0]}`, now of type "
            f"{type(taken[0][1]).__name__}; expected float32 there. Leave {model._keep_in_fp32_modules} out of the "
            "quantization."
        )


_BASE_MODEL_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _base_model_files(config, download: dict) -> list[str]:
    """The files of the base model's weights, downloaded when they are not on this machine.

    Raises:
        `OSError`: a base model that is not there.
        `ValueError`: one that the aligner was not trained around, by the sizes in its configuration.
    """
    name = config.base_model_name_or_path
    if name is None:
        raise ValueError("The checkpoint holds no base model and names none: pass `base_model_name_or_path`.")
    download = {key: download[key] for key in ("cache_dir", "local_files_only", "token") if key in download}
    folder = find_model("base model", name, BASE_MODEL_FILES, revision=config.base_model_revision, **download)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"The base model's folder {folder} has no config.json. Name a complete copy of it.")
    found, trained = AutoConfig.from_pretrained(folder).to_dict(), config.text_config.to_dict()
    others = [field for field in _BASE_MODEL_SIZES if found.get(field) != trained.get(field)]
    if others:
        described = ", ".join(f"{field} {trained.get(field)} (found {found.get(field)})" for field in others)
        raise ValueError(
            f"The base model {name} is not the one this aligner was trained around: a {config.text_config.model_type} "
            f"with {described}. Point `base_model_name_or_path` to the right one."
        )
    return weight_files(folder)


def _check_base_model_loaded(model, info, load_config, checkpoint: str | None) -> None:
    """Refuses a base model that lacks weights, has some of another shape or, as part of a `checkpoint`, others too."""
    where, kind = f"base model {model.config.base_model_name_or_path}", model.config.text_config.model_type
    if checkpoint is not None:
        where = f"checkpoint {checkpoint}, which is to hold its base model,"
    lacking = {key for key in info.missing_keys if not model.is_aligner_key(key)} - model.all_tied_weights_keys.keys()
    # The bare model reads the file of one with a head.
    surplus = {key for key in info.unexpected_keys if checkpoint is not None and not key.startswith("lm_head.")}
    shapes = {} if load_config.ignore_mismatched_sizes else {key: each for key, *each in info.mismatched_keys}
    faults = {"lacks {} weights of a": lacking, "has {} weights that are none of a": surplus}
    for fault, keys in (faults | {"has {} weights of other sizes than a": shapes}).items():
        if keys:
            raise ValueError(
                f"The {where} {fault.format(len(keys))} {kind}, first `{min(keys)}`. Download it again, or name a "
                "complete copy."
            )


def _base_model_renamings(model) -> list[WeightRenaming]:
    """From the names in a base model's checkpoint to ours: the decoder's prefix, and linears that carry LoRA."""
    prefix = "model." if model.base_model_prefix in dict(model.named_children()) else ""
    linears = (key.partition(".base_layer.")[0] for key in model.state_dict() if ".base_layer." in key)
    leaves = {name.rsplit(".", 1)[-1] for name in linears}
    renamings = [WeightRenaming(r"^(?:model|transformer|gpt_neox)\.(?!backbone\.|projector\.)", f"{prefix}backbone.")]
    if leaves:
        linears = "|".join(sorted(leaves))
        renamings.append(WeightRenaming(rf"\.({linears})\.(?=weight$|bias$)", r".\1.base_layer."))
    return renamings


def _write_digests(former: Path, folder: Path, includes_base_model: bool, dtype: torch.dtype | None = None) -> None:
    """Adds to the `config.json` in `folder` the digests of that and the weights beside it, and of a processor that is
    in the folder `former`, where all of it will be; and the `dtype` to load the base model in."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype"] = config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    weights = read_tensors(sorted(folder.glob("model*.safetensors")))
    aligner = {key: tensor for key, tensor in weights if AlignerCheckpointMixin.is_aligner_key(key)}
    own = {path.name: settings_digests(slot_settings(config)), WEIGHTS_DIGEST: tensors_digest(aligner)}
    config |= {"digests": own | processor_digests(former), "includes_base_model": includes_base_model}
    write_config(path, config)
