"""Writes a trained aligner for others: bfloat16 weights, processor, code, model card and the recipes of its stages.

    python -m arcaligner.train.export --stages runs/smollm2_135m --output checkpoints/arcaligner-smollm2-135m

Training keeps the aligner in float32, since small updates would be lost in bfloat16; a finished one does not need it,
and loads as float32 again. The last stage in the folder is taken.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .saving import save_stage


def main(
    stages: Annotated[Path, typer.Option(help="Folder of the stages' output folders.", exists=True)],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Writes the aligner of the last stage in `stages` to `output`."""
    folders = sorted(path.parent for path in stages.glob("*/config.json"))
    if not folders:
        raise typer.BadParameter(f"{stages} holds no finished stage, a folder with a config.json.")
    model = ArcAlignerForCausalLM.from_pretrained(folders[-1])
    for _, parameter in model.aligner_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    processor = ArcAlignerProcessor.from_pretrained(folders[-1], trust_remote_code=False)
    recipes = "---\n".join((folder / "recipe.yaml").read_text(encoding="utf-8") for folder in folders)
    save_stage(output, model, processor, recipes)
    typer.echo(f"wrote {folders[-1]} to {output}")


if __name__ == "__main__":
    typer.run(main)
