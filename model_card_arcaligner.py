"""The model card of a checkpoint: what its configuration knows, and a quick start."""

import re
from pathlib import Path

# Stands for the repository until there is one.
_REPOSITORY = "THIS_REPOSITORY"


def write_model_card(config, folder: Path) -> None:
    """A model card with what the configuration knows; one that is there already is left alone."""
    card = folder / "README.md"
    if card.exists():
        return
    base = config.base_model_name_or_path
    is_hub_id = base is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", base)
    header = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [arcaligner, rag, context-compression]",
    ]
    header += [f"base_model: {base}"] if is_hub_id else []
    text = "\n".join(
        [
            "---",
            *header,
            "---",
            "# ArcAligner",
            "",
            "Reads retrieved passages as context slots, one vector a sentence, with a frozen language model "
            "([paper](https://huggingface.co/papers/2601.05038)).",
            "",
            "| | |",
            "|---|---|",
            f"| base model | {base or 'in this checkpoint'} |",
            f"| sentence encoder | {config.encoder_name_or_path} |",
            f"| LoRA on slots | r {config.lora_r}, alpha {config.lora_alpha} |",
            f"| gates | {len(config.gated_layers)} layers, at most {config.max_refinement_steps} extra passes |",
            "",
            "```python",
            "from transformers import pipeline",
            "",
            f'ask = pipeline("text-generation", model="{_REPOSITORY}", trust_remote_code=True)',
            'ask({"question": "Who wrote it?", "documents": ["It was written by Ada."]})',
            "```",
            "",
        ]
    )
    temporary = card.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(card)


def name_repository(folder: Path, repo_id: str) -> None:
    """Writes the name of the repository into the quick start of the model card in `folder`."""
    card = folder / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace(_REPOSITORY, repo_id), encoding="utf-8")


__all__ = ["name_repository", "write_model_card"]
