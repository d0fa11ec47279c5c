"""The end of a stage: a folder that the next stage, and anybody else, can load.

Files are written beside their place and moved, the configuration last: a folder without
`config.json` does not load, so an interrupted save is never mistaken for a model.
"""

import os
import shutil
import uuid
from pathlib import Path

import torch

from ..model_card import write_model_card
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor


def write_whole(path: Path, text: str) -> None:
    """Writes a file in one step, its folder as well; another process may write it, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_stage(
    output_dir: str | Path,
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: str,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes aligner, processor and recipe to `output_dir`, over what an earlier run left there.

    Args:
        output_dir (`str` or `Path`): The stage's folder; checkpoints in it stay, and a model card that was edited.
        model ([`ArcAlignerForCausalLM`]): Trained; its backbone is not written.
        processor ([`ArcAlignerProcessor`]): With the chat template the stage was trained with.
        recipe (`str`): Text of the recipe, saved as `recipe.yaml`.
        state_dict (`dict`, *optional*): The weights of a model that is spread over several processes.
    """
    output_dir = Path(output_dir)
    for leftover in output_dir.glob(".saving-*"):  # of a killed process
        shutil.rmtree(leftover)
    temporary = output_dir / f".saving-{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    try:
        if (output_dir / "README.md").exists():  # the new card keeps what the former one was told
            shutil.copyfile(output_dir / "README.md", temporary / "README.md")
        model.save_pretrained(temporary, state_dict=state_dict)
        processor.save_pretrained(temporary)
        (temporary / "recipe.yaml").write_text(recipe, encoding="utf-8")
        write_model_card(model.config, temporary, name=output_dir.as_posix())
        (output_dir / "config.json").unlink(missing_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, output_dir / path.name)
    finally:
        shutil.rmtree(temporary)
