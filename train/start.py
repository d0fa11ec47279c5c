"""What a stage may start from: the stage before it, with the same backbone, encoder and segmentation."""

from pathlib import Path

from ..configuration_arcaligner import ArcAlignerConfig
from ..processing_arcaligner import ArcAlignerProcessor
from .recipe import RecipeArguments

BASE_MODEL = "base model"
# A stage may also go on from itself, on other data.
STARTS = {
    "lexical": (BASE_MODEL, "lexical"),
    "reconstruction": (BASE_MODEL, "lexical", "reconstruction"),
    "grounding": ("reconstruction", "grounding", BASE_MODEL),
    "gating": ("grounding", "gating"),
}
# What embeddings and weights were made for, besides shapes, which loading compares.
_OF_MODEL = ("base_model_name_or_path", "encoder_name_or_path", "encoder_hidden_size", "training_stage")
_OF_PROCESSOR = ("encoder_name_or_path", "encoder_hidden_size", "sentences_per_segment", "spacy_model")


def check_start(recipe: RecipeArguments, processor: ArcAlignerProcessor, start: ArcAlignerConfig | None) -> None:
    """Refuses a stage out of order, and a start that was made for something else than the recipe says.

    Args:
        recipe ([`RecipeArguments`]): Of the stage.
        processor ([`ArcAlignerProcessor`]): That the stage will use.
        start ([`ArcAlignerConfig`] or `None`): Of the aligner that `model_name_or_path` names; none for a base model.

    Raises:
        `ValueError`: what was found, what was expected, and what to change.
    """
    name = recipe.model_name_or_path
    found = BASE_MODEL if start is None else start.training_stage
    if found is not None and found not in STARTS[recipe.stage]:  # a checkpoint made by hand says no stage
        raise ValueError(
            f"Stage `{recipe.stage}` cannot start from {name}, which is a {found}{' checkpoint' if start else ''}; "
            f"expected one of {', '.join(STARTS[recipe.stage])}. Train `{STARTS[recipe.stage][0]}` first and name its "
            "`output_dir` as `model_name_or_path`."
        )
    if start is None:
        return
    for key in ("encoder_name_or_path", "encoder_hidden_size", "context_token_id"):
        of_model, of_processor = getattr(start, key), getattr(processor, key)
        if of_model not in (None, of_processor):
            raise ValueError(
                f"{name} holds files of two aligners: `{key}` is {of_model!r} in its config.json and {of_processor!r} "
                "in its processor_config.json. Start from a folder as a stage wrote it."
            )
    made_with = {key: getattr(processor, key) for key in recipe.processor}
    made_with |= {key: getattr(start, key) for key in recipe.aligner.keys() & {"base_model_name_or_path"}}
    for key, was in made_with.items():
        wanted = (recipe.processor | recipe.aligner)[key]
        if wanted != was:
            raise ValueError(
                f"The recipe sets `{key}` to {wanted!r}, but {name} was trained with {was!r}. Leave the key out, or "
                "train again from stage I with it."
            )


def check_resume(checkpoint: str | Path, config: ArcAlignerConfig, processor: ArcAlignerProcessor) -> None:
    """Refuses to go on from a checkpoint that another recipe left in the stage's folder.

    Raises:
        `ValueError`: another stage, backbone, encoder or segmentation, with both values.
    """
    of_checkpoint = ArcAlignerConfig.from_pretrained(checkpoint)
    other = ArcAlignerProcessor.from_pretrained(checkpoint)
    for now, then, keys in ((config, of_checkpoint, _OF_MODEL), (processor, other, _OF_PROCESSOR)):
        for key in keys:
            if getattr(then, key) not in (None, getattr(now, key)):
                raise ValueError(
                    f"{checkpoint} was made with `{key}` {getattr(then, key)!r}, but this run has "
                    f"{getattr(now, key)!r}. Delete that folder, or name another `output_dir`."
                )
