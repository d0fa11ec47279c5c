"""What a recipe says beyond TRL's own training arguments: which stage, which model, which data."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..defaults_arcaligner import cache_directory
from .data import Example, ExampleBuilder, select_examples


def default_embedding_cache() -> str:
    """Folder of the embedding stores in ArcAligner's cache."""
    return str(cache_directory() / "embeddings")


@dataclass
class RecipeArguments:
    """
    The keys of a recipe that are not [`AlignerTrainingConfig`]'s. Paths are relative to the working
    directory.

    Args:
        stage (`str`): `"reconstruction"`, `"grounding"` or `"gating"`: data, prompt and what is
            trained.
        model_name_or_path (`str`): A base model for the first stage, the previous stage's
            `output_dir` for the others.
        dtype (`str`): Of the frozen backbone; the aligner is always float32.
        aligner (`dict`): Fields of `ArcAlignerConfig` to set, such as `lora_r`.
        processor (`dict`): Settings of a new processor, such as `sentences_per_segment`; for a base
            model only.
        train_files (`dict[str, float]`): JSON Lines files and their weights in the mixture.
        max_train_samples (`int`, *optional*): Examples to train on.
        max_train_passages (`int`, *optional*): Sets of passages of each file to draw them from.
        eval_files, max_eval_samples: The same for the held-out loss.
        max_segments (`int`): The most segments (slots) of a reconstruction example.
        max_tokens (`int`, *optional*): Longer examples are left out.
        reconstruction_files (`dict[str, float]`), reconstruction_share (`float`): Share of stage-I
            examples in a later stage's training set, and where they come from.
        embedding_cache_dir (`str`): Where segments' embeddings are kept, for all stages.

    Raises:
        `ValueError`: a share outside [0, 1), or a share without files.
    """

    stage: Literal["reconstruction", "grounding", "gating"] = field(
        metadata={"help": "reconstruction, grounding or gating"}
    )
    model_name_or_path: str = field(metadata={"help": "Base model, or the previous stage's output_dir"})
    train_files: dict[str, float] = field(metadata={"help": "JSON Lines files and their weights in the mixture"})
    dtype: str = field(default="float32", metadata={"help": "dtype of the frozen backbone"})
    aligner: dict[str, Any] = field(default_factory=dict, metadata={"help": "Fields of ArcAlignerConfig"})
    processor: dict[str, Any] = field(default_factory=dict, metadata={"help": "Settings of a new processor"})
    max_train_samples: int | None = field(default=None, metadata={"help": "Training examples"})
    max_train_passages: int | None = field(
        default=None, metadata={"help": "Sets of passages to draw training examples from"}
    )
    eval_files: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Files for the held-out loss, with weights"}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Held-out examples"})
    max_segments: int = field(default=1, metadata={"help": "Most slots of a stage-I example"})
    max_tokens: int | None = field(default=None, metadata={"help": "Leave out longer examples"})
    reconstruction_files: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Files for stage-I examples in later stages"}
    )
    reconstruction_share: float = field(default=0.0, metadata={"help": "Share of stage-I examples in later stages"})
    embedding_cache_dir: str = field(
        default_factory=default_embedding_cache, metadata={"help": "Where embeddings are kept"}
    )

    def __post_init__(self):
        if not 0.0 <= self.reconstruction_share < 1.0:
            raise ValueError(
                f"`reconstruction_share` is {self.reconstruction_share}; expected at least 0 and less than 1."
            )
        if self.reconstruction_share and not self.reconstruction_files:
            raise ValueError(
                f"`reconstruction_share` is {self.reconstruction_share} but `reconstruction_files` "
                "names none. Name files of passages, or leave the share out."
            )


def training_examples(recipe: RecipeArguments, builder: ExampleBuilder, seed: int) -> list[Example]:
    """The stage's examples, with stage-I examples mixed in when the recipe says so."""
    share, limit = recipe.reconstruction_share, recipe.max_train_samples
    num_task = None if limit is None else round(limit * (1 - share))
    examples = select_examples(
        recipe.train_files,
        _maker(recipe, builder),
        num_task,
        recipe.max_tokens,
        seed,
        recipe.max_train_passages,
    )
    if share:
        num_reconstruction = round(len(examples) * share / (1 - share))
        examples += select_examples(
            recipe.reconstruction_files,
            builder.reconstruction_examples,
            num_reconstruction,
            recipe.max_tokens,
            seed,
        )
    return examples


def eval_examples(recipe: RecipeArguments, builder: ExampleBuilder, seed: int) -> list[Example]:
    """The stage's held-out examples; none without `eval_files`."""
    if not recipe.eval_files:
        return []
    return select_examples(
        recipe.eval_files,
        _maker(recipe, builder),
        recipe.max_eval_samples,
        recipe.max_tokens,
        seed,
    )


def _maker(recipe: RecipeArguments, builder: ExampleBuilder):
    if recipe.stage == "reconstruction":
        return builder.reconstruction_examples
    return builder.question_examples
