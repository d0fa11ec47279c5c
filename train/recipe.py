"""What a recipe says beyond TRL's own training arguments: which stage, which model, which data."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
from trl import TrlParser

from ..configuration_arcaligner import ArcAlignerConfig
from ..configuration_arcaligner import cache_directory, resolve_base_model
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import check_tokens_per_slot
from .data import ExampleBuilder
from .selection import ExampleSelector

# Fields of `ArcAlignerConfig` that the processor decides.
_OF_PROCESSOR = {"encoder_name_or_path", "encoder_hidden_size", "context_token", "context_token_id"}


def default_examples_cache() -> str:
    """Folder of tokenised examples in ArcAligner's cache."""
    return str(cache_directory() / "examples")


@dataclass
class RecipeArguments:
    """
    The keys of a recipe that are not [`AlignerTrainingConfig`]'s. Paths are relative to the working
    directory.

    Args:
        stage (`str`): `"lexical"`, `"reconstruction"`, `"grounding"` or `"gating"`: data, prompt and what is
            trained.
        model_name_or_path (`str`): A base model for the first stage, the previous stage's
            `output_dir` for the others.
        dtype (`str`): Of the frozen backbone; the aligner is always float32.
        aligner (`dict`): Fields of `ArcAlignerConfig` to set, such as `lora_r`.
        processor (`dict`): Settings of a new processor, such as `sentences_per_segment`; for a base
            model only.
        train_files (`dict[str, float]`): Sources and their weights in the mixture: JSON Lines or Parquet files, data
            sets of the Hub; see `corpora.py`.
        max_train_samples (`int`, *optional*): Examples to train on.
        max_train_passages (`int`, *optional*): Sets of passages of each source to draw them from.
        eval_files, max_eval_samples: The same for the held-out loss.
        max_segments (`int`): The most segments (slots) of a reconstruction example.
        max_tokens (`int`, *optional*): Longer examples are left out, as are those that the backbone cannot read.
        passage_words (`int`): Words of a passage that the texts of a corpus are cut into.
        min_passages (`int`), max_passages (`int`, *optional*): Passages of a question, drawn evenly from this range:
            its own and distractors from other questions, in random order. Without a maximum, its own only.
        strict (`bool`): Stop at a row without a question, answer or passage, rather than leave it out and count it.
        reconstruction_files (`dict[str, float]`), reconstruction_share (`float`): Share of stage-I
            examples in a later stage's training set, and where they come from.
        max_questions (`int`): The most questions about the same passages in one example. They share the slots, each
            reads these and itself, so that a passage is computed once for all of them.
        continues (`bool`): Whether stage-I examples have a second turn, which goes on with the segment behind.
        tokens_per_slot (`list`): Rates of slots, whole numbers of tokens or `"segment"`; each batch draws one.
        attn_implementation (`str`, *optional*): transformers' name of an attention kernel. On CPUs `"eager"` is two to
            three times as fast backward as `"sdpa"` for rows of a few hundred tokens.
        compile_layers (`bool`): Whether the decoder layers are compiled, which takes a minute once and wins in long
            runs.
        examples_cache_dir (`str`): Where tokenised examples are kept, for all stages.

    Raises:
        `ValueError`: a share outside [0, 1), or a share without files; a range of passages that is none; unknown keys
            in `aligner` or `processor`.
    """

    stage: Literal["lexical", "reconstruction", "grounding", "gating"] = field(
        metadata={"help": "lexical, reconstruction, grounding or gating"}
    )
    model_name_or_path: str = field(metadata={"help": "Base model, or the previous stage's output_dir"})
    train_files: dict[str, float] = field(metadata={"help": "Files or Hub data sets, with their weights"})
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
    passage_words: int = field(default=100, metadata={"help": "Words of a passage that texts are cut into"})
    min_passages: int = field(default=1, metadata={"help": "Fewest passages of a question, with distractors"})
    max_passages: int | None = field(default=None, metadata={"help": "Most passages of a question, with distractors"})
    strict: bool = field(default=False, metadata={"help": "Stop at a row without question, answer or passage"})
    reconstruction_files: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Files for stage-I examples in later stages"}
    )
    reconstruction_share: float = field(default=0.0, metadata={"help": "Share of stage-I examples in later stages"})
    max_questions: int = field(default=1, metadata={"help": "Most questions about the same passages in one example"})
    continues: bool = field(default=False, metadata={"help": "Stage-I examples also go on with the text behind"})
    tokens_per_slot: list[str] = field(
        default_factory=lambda: ["segment"], metadata={"help": "Rates that batches are drawn at"}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention kernel"})
    compile_layers: bool = field(default=False, metadata={"help": "Compile the decoder layers"})
    examples_cache_dir: str = field(
        default_factory=default_examples_cache, metadata={"help": "Where tokenised examples are kept"}
    )

    def __post_init__(self):
        # A command line gives text, a recipe numbers.
        self.tokens_per_slot = [int(rate) if str(rate).isdecimal() else rate for rate in self.tokens_per_slot]
        for rate in self.tokens_per_slot:
            check_tokens_per_slot(rate)
        refuse_unknown("`aligner`", self.aligner, [f.name for f in dataclasses.fields(ArcAlignerConfig)])
        refuse_unknown("`processor`", self.processor, list(inspect.signature(ArcAlignerProcessor).parameters))
        for key in self.aligner.keys() & _OF_PROCESSOR:
            raise ValueError(f"`{key}` is in `aligner`, but follows from the processor: set it in `processor`.")
        self._check_passages()
        if not 0.0 <= self.reconstruction_share < 1.0:
            raise ValueError(
                f"`reconstruction_share` is {self.reconstruction_share}; expected at least 0 and less than 1."
            )
        if self.reconstruction_share and not self.reconstruction_files:
            raise ValueError(
                f"`reconstruction_share` is {self.reconstruction_share} but `reconstruction_files` "
                "names none. Name files of passages, or leave the share out."
            )

    def _check_passages(self) -> None:
        if self.max_passages is None and self.min_passages == 1:
            return
        if self.max_passages is None or not 1 <= self.min_passages <= self.max_passages:
            raise ValueError(
                f"`min_passages` is {self.min_passages} and `max_passages` {self.max_passages}; expected 1 <= "
                "`min_passages` <= `max_passages`, or neither for each question's own passages."
            )
        if self.stage in ("lexical", "reconstruction"):
            raise ValueError(
                "`max_passages` adds distractors to questions, and stage I asks none. Leave it out; `max_segments` "
                "says how many segments of a passage stage I reads at once."
            )


def refuse_unknown(place: str, keys: Iterable[str], known: list[str]) -> None:
    """Raises `ValueError` for the first of `keys` that is not `known`, with the nearest one that is."""
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"Unknown key `{key}` in {place}. Did you mean `{nearest}`?")


class RecipeParser(TrlParser):
    """`TrlParser` that says what an unknown key may have meant."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        refuse_unknown("the recipe", kwargs, [action.dest for action in self._actions])
        return super().set_defaults_with_config(**kwargs)

    def parse_args_into_dataclasses(self, args: list[str], **kwargs: Any) -> tuple:
        flags = [argument.split("=")[0].removeprefix("--") for argument in args if argument.startswith("--")]
        known = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        refuse_unknown("the command line", flags, known)
        return super().parse_args_into_dataclasses(args=args, **kwargs)


def training_examples(
    recipe: RecipeArguments, builder: ExampleBuilder, seed: int, num_proc: int | None = None
) -> datasets.Dataset:
    """The stage's examples, with stage-I examples mixed in when the recipe says so, each an [`Example`].

    Args:
        recipe ([`RecipeArguments`]): Sources and limits.
        builder ([`ExampleBuilder`]): Makes examples of rows.
        seed (`int`): Order of the rows.
        num_proc (`int`, *optional*): Processes that segment and tokenise.
    """
    share, limit = recipe.reconstruction_share, recipe.max_train_samples
    num_task = None if limit is None else round(limit * (1 - share))
    selector = _selector(recipe, builder, seed, num_proc)
    examples = dataclasses.replace(selector, passage_sets=recipe.max_train_passages).select(
        recipe.train_files, num_task
    )
    if share:
        num_reconstruction = round(len(examples) * share / (1 - share))
        reconstruction = dataclasses.replace(
            selector,
            make_examples=builder.reconstruction_examples,
            needs_question=False,
            max_questions=1,
            max_passages=None,
        ).select(recipe.reconstruction_files, num_reconstruction)
        examples = datasets.concatenate_datasets([examples, reconstruction])
    return examples


def eval_examples(
    recipe: RecipeArguments, builder: ExampleBuilder, seed: int, num_proc: int | None = None
) -> datasets.Dataset | None:
    """The stage's held-out examples; none without `eval_files`."""
    if not recipe.eval_files:
        return None
    return _selector(recipe, builder, seed, num_proc).select(recipe.eval_files, recipe.max_eval_samples)


def _selector(recipe: RecipeArguments, builder: ExampleBuilder, seed: int, num_proc: int | None) -> ExampleSelector:
    asks = recipe.stage in ("grounding", "gating")
    return ExampleSelector(
        builder.question_examples if asks else builder.reconstruction_examples,
        cache_dir=Path(recipe.examples_cache_dir),
        seed=seed,
        needs_question=asks,
        max_questions=recipe.max_questions if asks else 1,
        max_tokens=_token_limit(recipe),
        min_passages=recipe.min_passages,
        max_passages=recipe.max_passages,
        passage_words=recipe.passage_words,
        strict=recipe.strict,
        num_proc=num_proc,
    )


def _token_limit(recipe: RecipeArguments) -> int:
    """Tokens of the longest prompt with its target: what the recipe says, and never more than the backbone reads."""
    config = ArcAlignerConfig.from_pretrained(resolve_base_model(recipe.model_name_or_path))
    limit = config.text_config.max_position_embeddings
    return limit if recipe.max_tokens is None else min(limit, recipe.max_tokens)
