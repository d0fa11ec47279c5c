"""Export a trained aligner: bfloat16 weights, processor, code, model card and the recipes of its stages.

    python -m arcaligner.share.export --stages runs/smollm2_135m --output checkpoints/arcaligner-smollm2-135m

Training keeps the aligner in float32, because small updates would be lost in bfloat16. A finished aligner does not need
this precision; it is loaded as float32 again. The last stage in the folder is exported. The model card is rewritten
each time, unless it was edited: if the `results.json` of an evaluation is in the output folder, run this again to put
its numbers into the card.
"""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import CONFIG_NAME, PROCESSOR_NAME

from ..common.files import run_command
from ..configuration_arcaligner import ArcAlignerConfig
from ..loading_arcaligner import read_json, write_folder_atomically
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from .hub import RECIPE_FILE, RESULTS_FILE, write_model_card


def save_stage(
    output_dir: str | Path,
    model: ArcAlignerForCausalLM,
    processor: ArcAlignerProcessor,
    recipe: str,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write aligner, processor and the text of the recipe to `output_dir`, from which the next stage can load them.
    Training checkpoints in this folder are kept, and so are an edited model card and results of the same weights.
    `state_dict` has the weights if the model is sharded over processes."""
    with write_folder_atomically(output_dir) as folder:
        if Path(output_dir, "README.md").exists():  # the new card keeps edits of the old one
            shutil.copyfile(Path(output_dir, "README.md"), folder / "README.md")
        model.save_pretrained(folder, state_dict=state_dict)
        processor.save_pretrained(folder)
        results = Path(output_dir, RESULTS_FILE)
        if results.exists() and not answers_alike(Path(output_dir), folder):
            results.unlink()  # before the weights change, so that a kill leaves no results of different weights
            typer.echo(f"Removed {results}, because its numbers were measured with other weights or settings", err=True)
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        write_model_card(model.config, folder)


def answers_alike(*folders: Path) -> bool:
    """Whether two folders have the same weights, also of a trained encoder, and the same settings of the processor."""
    if not all((folder / CONFIG_NAME).exists() for folder in folders):
        return False
    there, new = (ArcAlignerConfig.from_pretrained(folder).digests or {} for folder in folders)
    names = {name for name in [*there, *new] if name.endswith(".safetensors")}
    settings, of_new = (read_json(folder / PROCESSOR_NAME) for folder in folders)
    return settings == of_new and all(there.get(name) == new.get(name) for name in names)


def main(
    stages: Annotated[
        Path,
        typer.Option(help="Folder that `train --output` wrote, with a folder for each stage.", exists=True),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the exported aligner.")],
) -> None:
    """Write the aligner of the last finished stage to a folder that can be pushed."""
    folders = sorted(path.parent for path in stages.glob("*/config.json"))
    if not folders:
        raise typer.BadParameter(
            f"{stages} contains no finished stage (a folder with a config.json). Pass the folder that `train --output` "
            "wrote."
        )
    model = ArcAlignerForCausalLM.from_pretrained(folders[-1])
    for _, parameter in model.aligner_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    processor = ArcAlignerProcessor.from_pretrained(folders[-1])
    if processor.trained_encoder:
        processor.encoder.cast(torch.float32, lora_dtype=torch.bfloat16)
    recipes = [(folder / RECIPE_FILE).read_text(encoding="utf-8").strip() for folder in folders]
    save_stage(output, model, processor, "\n---\n".join(recipes) + "\n")
    if not write_model_card(model.config, output):
        page = output / "README.md"
        typer.echo(f"{page} was edited and is not replaced. To get a new one, delete it and export again.")
    typer.echo(f"Wrote the aligner of {folders[-1]} to {output}")


if __name__ == "__main__":
    run_command(main)
