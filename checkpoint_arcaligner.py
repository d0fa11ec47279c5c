"""Checkpoints: the aligner alone on disk, the base model by name.

`save_pretrained` writes projector, LoRA and gates (tens of MB), the configuration and the code;
`from_pretrained` also loads the base model's own files, through transformers' loader, so that dtype, device map and
quantization work as for any model. A base model's own name or folder can be given to `from_pretrained` too: a
fresh aligner is put around it.
"""

import contextlib
import re
import shutil
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.nn import Parameter
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.utils import cached_file, logging

from .configuration_arcaligner import check_json_file, missing_model_message, resolve_base_model, written_whole
from .lora_arcaligner import slot_lora_layers

logger = logging.get_logger(__name__)

_ALIGNER_KEY = re.compile(r"(^|\.)(projector|slot_gate|lora_A\.slot|lora_B\.slot)\.")
# What a checkpoint carries to be loaded with `trust_remote_code=True`, in the order of the data flow.
CODE_FILES = (
    "configuration_arcaligner.py",
    "segmentation_arcaligner.py",
    "encoder_arcaligner.py",
    "processing_arcaligner.py",
    "backbones_arcaligner.py",
    "lora_arcaligner.py",
    "refinement_arcaligner.py",
    "modeling_arcaligner.py",
    "fingerprint_arcaligner.py",
    "prefix_store_arcaligner.py",
    "generation_arcaligner.py",
    "checkpoint_arcaligner.py",
    "pipeline_arcaligner.py",
)
# With `output_loading_info=True` missing and mismatched keys are reported to the caller, not refused.
_caller_reads_loading_info = ContextVar("caller_reads_loading_info", default=False)


class AlignerCheckpointMixin:
    """`from_pretrained` and `save_pretrained` of a model whose base weights live elsewhere."""

    hf_quantizer = None  # set by transformers where the base model is quantized

    @staticmethod
    def is_aligner_key(key: str) -> bool:
        """Whether a parameter name belongs to projector, LoRA or a gate."""
        return _ALIGNER_KEY.search(key) is not None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As `PreTrainedModel.from_pretrained`, for an ArcAligner checkpoint or a plain base model.

        A base model gets a fresh aligner, shaped by configuration arguments such as `encoder_hidden_size=`, `lora_r=`.
        The base model is frozen.

        Raises:
            `ValueError`: aligner weights that are missing, do not fit or were quantized.
            `OSError`: a base model that is not on this machine and cannot be downloaded, with how to get it.
        """
        name = pretrained_model_name_or_path
        if name is not None:
            if (path := Path(name, "generation_config.json")).is_file():
                check_json_file(path)
            resolved = resolve_base_model(str(name))
            if resolved != str(name) and kwargs.get("config") is None:
                kwargs.setdefault("base_model_name_or_path", str(name))
            name = resolved
        kwargs.setdefault("use_safetensors", True)
        token = _caller_reads_loading_info.set(kwargs.get("output_loading_info", False))
        try:
            model = super().from_pretrained(name, *args, **kwargs)
        finally:
            _caller_reads_loading_info.reset(token)
        loaded = model[0] if isinstance(model, tuple) else model
        if loaded.hf_quantizer is not None:
            _check_aligner_is_whole(loaded)
        loaded.freeze_base_model()
        if loaded.can_generate():
            # transformers reads the aligner's settings as generation settings too.
            for name in kwargs.keys() & cls.config_class.__annotations__.keys():
                loaded.generation_config.__dict__.pop(name, None)
        return model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        config = model.config
        if state_dict is not None or not checkpoint_files:
            return PreTrainedModel._load_pretrained_model(
                model, state_dict, checkpoint_files, load_config, expected_keys
            )
        source = str(load_config.pretrained_model_name_or_path)
        has_base_model = source == resolve_base_model(str(config.base_model_name_or_path))
        if not has_base_model:
            shapes = tensor_shapes(checkpoint_files)
            if not _caller_reads_loading_info.get():
                check_aligner_weights(model, shapes, source, load_config.ignore_mismatched_sizes)
            if all(model.is_aligner_key(key) for key in shapes):
                _check_base_model_config(config)
                checkpoint_files = checkpoint_files + _base_model_files(config, load_config)
                has_base_model = True
        renamings = _base_model_renamings(model) if has_base_model else []
        load_config = replace(load_config, weight_mapping=[*renamings, *(load_config.weight_mapping or [])])
        loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)
        if has_base_model:
            _check_base_model_complete(model, loaded[0].missing_keys)
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


def tensor_shapes(checkpoint_files: list[str]) -> dict[str, list[int]]:
    """Names and shapes of the tensors in `checkpoint_files`, read from their headers.

    Raises:
        `ValueError`: a file that is not safetensors, or only a part of it.
    """
    shapes = {}
    for file in checkpoint_files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}). Save it again, or download it again.") from error
    return shapes


def check_aligner_weights(model, shapes, source: str, ignore_mismatched_sizes: bool) -> None:
    """Refuses a checkpoint whose aligner weights are missing or of another shape, before any weight is loaded."""
    prefix = f"{model.base_model_prefix}."
    found = {key.removeprefix(prefix): shape for key, shape in shapes.items() if model.is_aligner_key(key)}
    expected = {
        key.removeprefix(prefix): list(tensor.shape)
        for key, tensor in model.state_dict().items()
        if model.is_aligner_key(key)
    }
    config = model.config
    described = f"backbone {config.base_model_name_or_path} ({config.text_config.model_type}, hidden size "
    described += f"{config.text_config.hidden_size}, {config.text_config.num_hidden_layers} layers) and encoder "
    described += f"{config.encoder_name_or_path} (width {config.encoder_hidden_size})"
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ValueError(
            f"Checkpoint {source} lacks {len(missing)} of {len(expected)} aligner weights that {described} needs, "
            f"first `{missing[0]}`. It was saved incompletely or for another backbone: check `gate_layers`, "
            "`lora_target_modules` and `text_config` in its config.json."
        )
    others = sorted(key for key in expected if list(found[key]) != expected[key])
    if others and not ignore_mismatched_sizes:
        raise ValueError(
            f"Checkpoint {source} does not fit {described}: `{others[0]}` has shape {list(found[others[0]])} in the "
            f"checkpoint and {expected[others[0]]} in the model ({len(others)} weights differ). Load it with the "
            "backbone, encoder and LoRA rank it was trained with."
        )


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


def _check_base_model_config(config) -> None:
    """Refuses a base model that is not the one the aligner was trained around, by the sizes in its configuration."""
    name = config.base_model_name_or_path
    try:
        found = AutoConfig.from_pretrained(resolve_base_model(name), revision=config.base_model_revision).to_dict()
    except OSError as error:
        raise OSError(missing_model_message("base model", name, error)) from error
    trained = config.text_config.to_dict()
    others = [field for field in _BASE_MODEL_SIZES if found.get(field) != trained.get(field)]
    if others:
        described = ", ".join(f"{field} {trained.get(field)} (found {found.get(field)})" for field in others)
        raise ValueError(
            f"The base model {name} is not the one this aligner was trained around: a {config.text_config.model_type} "
            f"with {described}. Point `base_model_name_or_path` to the right one."
        )


def _check_base_model_complete(model, missing_keys) -> None:
    lacking = sorted(
        key for key in missing_keys if not model.is_aligner_key(key) and key not in model.all_tied_weights_keys
    )
    if lacking:
        raise ValueError(
            f"The base model {model.config.base_model_name_or_path} lacks {len(lacking)} weights of its "
            f"{model.config.text_config.model_type}, first `{lacking[0]}`. Download it again, or name a complete copy."
        )


def _base_model_files(config, load_config) -> list[str]:
    """The base model's own weight files, downloaded when they are not on this machine."""
    name = resolve_base_model(config.base_model_name_or_path)
    try:
        files, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=name,
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=False,
            download_kwargs={
                **(load_config.download_kwargs or {}),
                "revision": config.base_model_revision,
                "subfolder": "",
            },
        )
    except OSError as error:
        raise OSError(missing_model_message("base model", config.base_model_name_or_path, error)) from error
    return files


def _base_model_renamings(model) -> list[WeightRenaming]:
    """From the names in a base model's checkpoint to ours: the decoder's prefix, and linears that carry LoRA."""
    prefix = "model." if model.base_model_prefix in dict(model.named_children()) else ""
    layers = set(slot_lora_layers(model))
    leaves = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module in layers}
    renamings = [WeightRenaming(r"^(?:model|transformer|gpt_neox)\.(?!backbone\.|projector\.)", f"{prefix}backbone.")]
    if leaves:
        linears = "|".join(sorted(leaves))
        renamings.append(WeightRenaming(rf"\.({linears})\.(?=weight$|bias$)", r".\1.base_layer."))
    return renamings
