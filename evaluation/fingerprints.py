"""What tells the weights and settings that answers depend on from others."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers.utils import CONFIG_NAME

from ..configuration_arcaligner import ArcAlignerConfig
from ..model_card import is_hub_id
from ..files import digest_files as weights_digest

# Of a checkpoint's folder: what decides its answers.
PARTS = ("*.safetensors", "config.json", "adapter_config.json", "processor_config.json", "chat_template.jinja")


def fingerprint(checkpoint: str) -> str:
    """The digest of a folder's weights and settings, or the name and commit of a checkpoint on the Hub.

    Raises:
        `ValueError`: neither of both.
        `OSError`: a name that the Hub, as far as it can be reached, does not have.
    """
    folder = Path(checkpoint)
    if any(folder.glob("*.safetensors")):
        return weights_digest([path for part in PARTS for path in sorted(folder.glob(part))])[:16]
    if is_hub_id(checkpoint):
        ArcAlignerConfig.from_pretrained(checkpoint)  # in the cache from now on, if it was not
        commit = Path(try_to_load_from_cache(checkpoint, CONFIG_NAME)).parent.name
        return f"{checkpoint}@{commit}"
    raise ValueError(f"There is no checkpoint in {checkpoint}: no weights (*.safetensors). Name a finished folder.")


def backbone_fingerprint(aligner: str) -> str:
    """The name and revision of an aligner's backbone, and the chat template that it is asked with."""
    config = ArcAlignerConfig.from_pretrained(aligner)
    template = weights_digest(sorted(Path(aligner).glob("chat_template.jinja")))[:8]
    return f"{config.base_model_name_or_path}@{config.base_model_revision or 'main'}, chat template {template}"
