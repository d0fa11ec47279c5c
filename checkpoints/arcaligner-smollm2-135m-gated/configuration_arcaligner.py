"""Configuration of ArcAligner: its fields, and validation of the gates' settings."""

import math
import warnings
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, NamedTuple

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.utils.versions import require_version

# As in `pyproject.toml`, which remote code does not have. They are checked before the other imports, because an older
# version may lack the imported names.
REQUIREMENTS = ("torch>=2.9", "transformers>=5.10", "peft>=0.18.1", "sentence-transformers>=5.2", "spacy>=3.8")
for _requirement in REQUIREMENTS:
    require_version(_requirement, f'Run `pip install "{_requirement}"`.')

from transformers import AutoConfig, PreTrainedConfig  # noqa: E402
from transformers.utils import logging  # noqa: E402

logger = logging.get_logger(__name__)

DEFAULT_BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"

GATE_MODES = ("adaptive", "off", "always")

PASSAGE_ATTENTIONS = ("joint", "separate")
PASSAGE_ALIGNMENTS = ("start", "end")

# How slots are refined: keyword arguments of `generate` and `forward`.
REFINEMENT_SETTINGS = ("gate_mode", "gate_threshold", "max_refinement_steps", "refinement_budget")

# How slots are made: keyword arguments of processor and pipeline.
SLOT_SETTINGS = ("max_slots", "tokens_per_slot")

AUTO_MAP = {
    "AutoConfig": "configuration_arcaligner.ArcAlignerConfig",
    "AutoModel": "modeling_arcaligner.ArcAlignerForCausalLM",
    "AutoModelForCausalLM": "modeling_arcaligner.ArcAlignerForCausalLM",
    "AutoProcessor": "processing_arcaligner.ArcAlignerProcessor",
}

CUSTOM_PIPELINES = {
    "text-generation": {
        "impl": "pipeline_arcaligner.ArcAlignerPipeline",
        "pt": ["AutoModelForCausalLM"],
        "tf": [],
        "default": {"model": {"pt": None}},
        "type": "text",
    }
}


def check_gates(
    gate_mode: str | None = None,
    gate_threshold: float | None = None,
    max_refinement_steps: int | None = None,
    refinement_budget: float | None = None,
) -> None:
    """Raise `ValueError` for invalid settings of the gates; `None` is valid."""
    if gate_mode is not None and gate_mode not in GATE_MODES:
        raise ValueError(f"`gate_mode` is {gate_mode!r}; expected one of {', '.join(GATE_MODES)}.")
    if gate_threshold is not None and not (is_number(gate_threshold, Real) and 0.0 < gate_threshold <= 1.0):
        raise ValueError(
            f"`gate_threshold` is {gate_threshold!r}; expected a probability above 0 and at most 1. Gates open at this "
            "probability or above."
        )
    steps = max_refinement_steps
    if steps is not None and not (is_number(steps, Integral) and steps >= 0):
        raise ValueError(
            f"`max_refinement_steps` is {steps!r}; expected a whole number of at least 0, the maximum number of extra "
            "passes of a slot through a layer."
        )
    if refinement_budget is not None and not (is_number(refinement_budget, Real) and refinement_budget >= 0):
        raise ValueError(
            f"`refinement_budget` is {refinement_budget!r}; expected a number of at least 0: how many operations extra "
            "passes of slots through layers may add, as a share of the operations of the prefill. 0.1 means 10 % more "
            "operations, 0 means no extra passes, and `math.inf` means no limit."
        )


def are_layers(layers: Any, num_layers: int) -> bool:
    """Whether `layers` is a list of layers of a backbone with `num_layers`, in ascending order, each once.

    >>> are_layers([0, 2], 3), are_layers([2, 0], 3), are_layers([-1], 3), are_layers([], 3)
    (True, False, False, False)
    """
    is_known = isinstance(layers, list) and all(is_number(layer, Integral) for layer in layers)
    return is_known and bool(layers) and layers == sorted({*layers}) and layers[0] >= 0 and layers[-1] < num_layers


def check_answerability_layers(layers: list[int] | None, num_layers: int) -> None:
    """Raise `ValueError` unless `layers` are layers of a backbone with `num_layers`, in order; `None` is valid."""
    if layers is not None and not are_layers(layers, num_layers):
        raise ValueError(
            f"`answerability_layers` is {layers!r}; expected a list of layer numbers from 0 to {num_layers - 1}, in "
            "ascending order and without repetition, or None for an aligner without an answerability head (the "
            "classifier that estimates how likely it is that the passages contain an answer)."
        )


# Types of backbones whose keys can be moved to other positions by a rotation of the two halves of a head. Other types
# may rotate other pairs of values, or have layers without positions.
ROTATED_BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
# Scalings of RoPE with which the keys of a prompt depend on its length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def warn_of_rename(old: str, new: str) -> None:
    """Warn the caller of a deprecated name."""
    warnings.warn(
        f"`{old}` is now called `{new}`; the old name will be removed in the next release.", FutureWarning, stacklevel=3
    )


def check_alignment(passage_alignment: str, text_config: PreTrainedConfig) -> None:
    """Raise `ValueError` for `passage_alignment="end"` with a backbone whose keys cannot be rotated to later
    positions."""
    if passage_alignment != "end":
        return
    rope = getattr(text_config, "rope_parameters", None) or {}
    is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    kind = rope.get("rope_type", "default")
    if text_config.model_type in ROTATED_BACKBONES and kind not in LENGTH_DEPENDENT_ROPES and not is_partial:
        return
    raise ValueError(
        f"`passage_alignment` is 'end', but the base model is of type {text_config.model_type!r} with the RoPE "
        f"parameters {rope}; expected one of the types {', '.join(ROTATED_BACKBONES)}, with a RoPE that rotates all "
        "dimensions of a head and does not depend on the length of the prompt. Use `passage_alignment='start'`, or "
        "another base model."
    )


def check_pointer_heads(heads: list[list[int]], num_layers: int, num_heads: int) -> None:
    """Raise `ValueError` for pointer heads that the backbone does not have."""
    for head in heads:
        if len(head) != 2 or not all(is_number(value, Integral) for value in head):
            raise ValueError(f"`pointer_heads` contains {head!r}; expected pairs [layer, head] of two whole numbers.")
        layer, number = head
        if not (0 <= layer < num_layers and 0 <= number < num_heads):
            raise ValueError(
                f"`pointer_heads` contains {head!r}, but the base model has layers 0 to {num_layers - 1} with heads 0 "
                f"to {num_heads - 1}. Find the heads of this base model with `python -m arcaligner.train.pointer`, or "
                "set `pointer_heads` to None."
            )


def check_multihop_head(is_used: bool, answerability_layers: list[int] | None) -> None:
    """Raise `ValueError` for an aligner with a multi-hop head, but without an answerability head."""
    if is_used and answerability_layers is None:
        raise ValueError(
            "`use_multihop_head` is true, but `answerability_layers` is None: the multi-hop head, which recognizes "
            "questions that need two passages, needs an answerability head, which scores passages. Fit an "
            "answerability head with `python -m arcaligner.train.confidence`, or set `use_multihop_head` to false."
        )


def normalize_budget(gate_mode: str | None, refinement_budget: float | None) -> tuple[str | None, float | None]:
    """Map settings that mean the same to one: a budget of 0 is no refinement, and an infinite budget is no limit.

    >>> normalize_budget("adaptive", 0), normalize_budget("adaptive", math.inf), normalize_budget("adaptive", 0.1)
    (('off', None), ('adaptive', None), ('adaptive', 0.1))
    """
    if refinement_budget == 0:
        return "off", None
    return gate_mode, None if refinement_budget == math.inf else refinement_budget


def is_number(value: Any, kind: type | UnionType) -> bool:
    """Whether a value is a number of this kind, and not a boolean."""
    return isinstance(value, kind) and not isinstance(value, bool)


class GateSettings(NamedTuple):
    """How the slots of one forward are refined: fields of [`ArcAlignerConfig`], and `refinement_budget`, the limit of
    the refinement's operations relative to the prefill's, `None` for no limit."""

    gate_mode: str
    gate_threshold: float
    max_refinement_steps: int
    refinement_budget: float | None


@strict
class ArcAlignerConfig(PreTrainedConfig):
    r"""
    Configuration of an [`ArcAlignerForCausalLM`]: a frozen backbone and the aligner around it.

    Args:
        text_config (`dict` or `PreTrainedConfig`, *optional*):
            The backbone, any decoder-only model with rotary attention. Default: a Llama.
        base_model_name_or_path (`str`, *optional*):
            The base model with the backbone's weights, a Hub id or a folder. With it, `save_pretrained` writes the
            aligner only; without it (a model made from a configuration) it writes everything.
        base_model_revision (`str`, *optional*): Revision of the base model on the Hub.
        encoder_name_or_path (`str`, *optional*): The sentence encoder whose embeddings the projector was trained on.
        encoder_hidden_size (`int`, defaults to 384): Width `d_r` of a context embedding.
        context_token (`str`, defaults to `"<context>"`): How a slot is shown to people.
        context_token_id (`int`, *optional*):
            The id that marks a slot in `input_ids`. It needs no row in the embedding matrix and no logit. Default: the
            backbone's `vocab_size`, the first id that the backbone does not use.
        lora_r (`int`, defaults to 128), lora_alpha (`int`, defaults to 32), lora_dropout (`float`, defaults to 0.05):
            The selective LoRA (Eq. 3); the values of the paper's hyperparameter tables. Rank 0 is no LoRA: with the
            gates off, the projector alone aligns a slot, which is xRAG's design.
        lora_target_modules (`str` or `list[str]`, defaults to `"all-linear"`):
            The linear layers inside the decoder layers that have LoRA, by PEFT's rules.
        lora_positions (`"slots"` or `"all"`, defaults to `"slots"`):
            Which positions LoRA is applied to. `"all"` is an ordinary LoRA, with which the paper compares its selective
            one. It changes how text is computed, so engines that have only the base model cannot run such an aligner.
        gate_layers (`"all"` or `list[int]`, defaults to `"all"`): Layers with a gate (the paper's `L_gate`).
        gate_hidden_size (`int`, defaults to 64): Width of the gate's hidden layer.
        gate_threshold (`float`, defaults to 0.5): A gate with at least this probability is open (Eq. 7).
        max_refinement_steps (`int`, defaults to 2):
            `T`, the maximum number of extra passes through a gated layer. The paper's "max loops 3" is the mandatory
            pass and 2 extra ones.
        gate_mode (`"adaptive"`, `"off"` or `"always"`, defaults to `"adaptive"`):
            `"adaptive"`: gates decide; `"off"`: no refinement (the paper's *w/o Recursion*); `"always"`: `T` steps for
            every slot (*w/o Gate*). `gate_mode`, `gate_threshold` and `max_refinement_steps` may be changed on a loaded
            model, or for one call: `generate` and `forward` take them as arguments.
        word_parts (`int`, defaults to 0):
            Beyond the paper: a slot also gets the embeddings of its tokens, from the backbone's frozen embedding table.
            A slot's tokens are cut into this many equal parts, in order. Each part is averaged and passed through a
            linear map of its own, so that some of the word order survives. 0 uses no token embeddings.
        passage_attention (`"joint"` or `"separate"`, defaults to `"joint"`):
            Beyond the paper, whose context is one passage: whether a slot attends to the slots of earlier passages.
            With `"separate"` it attends to its own passage and the text before the slots only, so that the keys and
            values of a passage serve every question that retrieves it. Training and use have to agree: a checkpoint's
            `config.json` has the value of training, and loading with another value gives a warning.
        passage_alignment (`"start"` or `"end"`, defaults to `"start"`):
            Beyond the paper: where independent passages of different lengths are. With `"start"` all begin at the same
            position, and the text after them continues after the longest, so that it is far from the shorter ones. With
            `"end"` the text after them continues directly after each of them: their keys are rotated to later positions
            when they are joined. Backbones of the types in `ROTATED_BACKBONES` support `"end"`.
        answerability_layers (`list[int]`, *optional*):
            Beyond the paper: the layers, in order, from whose states of the prompt's last token the answerability is
            computed. Default: the aligner has no [`AnswerabilityHead`].
        answerability_uses_match (`bool`, defaults to `False`):
            Whether the head's `match` was fitted: scale, weight and offset for the late-interaction score of question
            and passages.
        answerability_threshold (`float`, *optional*):
            The answerability below which the aligner should abstain, fitted by `train/confidence.py`: a suggestion for
            `min_confidence`.
        similarity_weight (`float`, defaults to 30):
            Weight of the cosine of question and passage when passages are selected; it is added to the answerability of
            the passage, in log-odds. The defaults of this setting and the next three were fitted on held-out questions
            of the shipped aligner.
        match_weight (`float`, defaults to 15):
            Weight of the late-interaction (MaxSim) score of question and passage when passages are selected, added in
            the same way. With 0 the score is not computed for this purpose; the multi-hop head uses it in any case.
        scored_share (`float`, defaults to 0.5):
            The largest share of a question's passages that are scored, the most relevant ones first, by the weighted
            similarities above; at least one more than are used. Scoring a passage takes as long as a prefill of its
            slots and the question.
        most_answerability (`float`, defaults to 0.98):
            The answerability that a passage is assumed to have before it is scored. A passage that would not be used
            even with this answerability is not scored.
        use_multihop_head (`bool`, defaults to `False`):
            Beyond the paper: whether the aligner has a [`MultihopHead`], fitted by `train/multihop.py`. With it a
            question that needs two passages gets two by default, and every other question one.
        answer_calibration (`list[float]`, *optional*):
            Three numbers, fitted by `train/confidence.py`, from which the likelihood that an answer is right is
            computed in log-odds: the weights of the answer's mean log-likelihood and of the log-odds of the
            answerability, and an offset. Default: the likelihood is not reported.
        pointer_heads (`list[list[int]]`, *optional*):
            Beyond the paper: attention heads that attend to the slots which an answer comes from, each the number of
            its layer and its own, found by `train/pointer.py`. `zoom` needs them and, with a `pointer_weight` above 0,
            a copied answer is more likely to begin in these slots. Default: none, so `zoom` is an error.
        pointer_weight (`float`, defaults to 0):
            Weight of the logarithm of that attention in the scores of the answer's first token; 0 switches it off.
        training_stage (`"reconstruction"`, `"grounding"` or `"gating"`, *optional*):
            The last stage of training, which the next stage checks. Set by `set_stage`.
        digests (`dict`, *optional*), includes_base_model (`bool`, *optional*):
            Digests of the parts of a saved checkpoint, and whether it contains the base model's weights as well.
            `save_pretrained` of model and processor writes them, and loading checks them; a loaded model has none.

    Raises:
        `ValueError`: a negative rank or number of parts, a gate layer or an answerability layer that the backbone does
            not have, a threshold outside (0, 1], negative steps.
    """

    model_type = "arcaligner"
    sub_configs = {"text_config": AutoConfig}

    text_config: dict | PreTrainedConfig | None = None
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    encoder_name_or_path: str | None = None
    encoder_hidden_size: int = 384
    context_token: str = "<context>"
    context_token_id: int | None = None
    lora_r: int = 128
    lora_alpha: int | float = 32
    lora_dropout: float | int = 0.05
    lora_target_modules: str | list[str] = "all-linear"
    lora_positions: Literal["slots", "all"] = "slots"
    gate_layers: str | list[int] = "all"
    gate_hidden_size: int = 64
    gate_threshold: float | int = 0.5
    max_refinement_steps: int = 2
    gate_mode: Literal["adaptive", "off", "always"] = "adaptive"
    word_parts: int = 0
    passage_attention: Literal["joint", "separate"] = "joint"
    passage_alignment: Literal["start", "end"] = "start"
    answerability_layers: list[int] | None = None
    answerability_uses_match: bool = False
    answerability_threshold: float | int | None = None
    similarity_weight: float | int = 30.0
    match_weight: float | int = 15.0
    scored_share: float | int = 0.5
    most_answerability: float | int = 0.98
    use_multihop_head: bool = False
    answer_calibration: list[float] | None = None
    pointer_heads: list[list[int]] | None = None
    pointer_weight: float | int = 0.0
    training_stage: Literal["reconstruction", "grounding", "gating"] | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    digests: dict | None = None
    includes_base_model: bool | None = None

    def __post_init__(self, **kwargs: Any):
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        kwargs.setdefault("custom_pipelines", CUSTOM_PIPELINES)
        if not isinstance(self.text_config, PreTrainedConfig):
            self.text_config = AutoConfig.for_model(**{"model_type": "llama", **(self.text_config or {})})
        super().__post_init__(**kwargs)
        if "vocab_size" not in self.text_config.to_dict():
            raise ValueError(
                f"Base models of type `{self.text_config.model_type}` are not supported: their configuration has no "
                "`vocab_size`, so they are not causal language models. Use a decoder-only model, or the text model of "
                "a multimodal one."
            )
        if self.context_token_id is None:  # beyond the vocabulary, so that no text has this id
            self.context_token_id = self.text_config.vocab_size
        # For some backbones, only their `text_config` says whether head and embeddings are one matrix.
        self.tie_word_embeddings = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        if self.lora_r < 0:
            raise ValueError(
                f"`lora_r` is {self.lora_r}; expected a rank of at least 1, or 0 for an aligner without LoRA."
            )
        if self.word_parts < 0:
            raise ValueError(
                f"`word_parts` is {self.word_parts}; expected a whole number of at least 0. The tokens of a slot are "
                "divided into this many parts, whose mean embeddings are added to the slot; with 0, none are added."
            )
        num_layers = self.text_config.num_hidden_layers
        if isinstance(self.gate_layers, str):
            if self.gate_layers != "all":
                raise ValueError(f'`gate_layers` is {self.gate_layers!r}; expected "all" or a list of layer numbers.')
        elif any(not 0 <= layer < num_layers for layer in self.gate_layers):
            raise ValueError(
                f"`gate_layers` is {self.gate_layers}; expected layers of the base model, numbered from 0 to "
                f"{num_layers - 1}."
            )
        check_gates(self.gate_mode, self.gate_threshold, self.max_refinement_steps)
        check_alignment(self.passage_alignment, self.text_config)
        check_answerability_layers(self.answerability_layers, num_layers)
        check_multihop_head(self.use_multihop_head, self.answerability_layers)
        if self.pointer_heads:
            check_pointer_heads(self.pointer_heads, num_layers, self.text_config.num_attention_heads)
        if not 0 <= self.pointer_weight < math.inf:
            raise ValueError(f"`pointer_weight` is {self.pointer_weight!r}; expected a finite number of at least 0.")
        for name in ("scored_share", "most_answerability"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"`{name}` is {value!r}; expected a number from 0 to 1.")
        if self.answer_calibration is not None and not (
            len(self.answer_calibration) == 3 and all(is_number(value, Real) for value in self.answer_calibration)
        ):
            raise ValueError(
                f"`answer_calibration` is {self.answer_calibration!r}; expected the three numbers that `python -m "
                "arcaligner.train.confidence` fits, or None."
            )
        self.named_dtype = self.dtype  # a copy, because the loader may change `dtype`

    @property
    def has_pointer(self) -> bool:
        """Whether pointer heads influence where a copied answer begins."""
        return bool(self.pointer_heads) and self.pointer_weight > 0

    @property
    def gated_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a gate, in order."""
        if self.gate_layers == "all":
            return tuple(range(self.text_config.num_hidden_layers))
        return tuple(sorted(set(self.gate_layers)))

    def gate_settings(
        self,
        gate_mode: str | None = None,
        gate_threshold: float | None = None,
        max_refinement_steps: int | None = None,
        refinement_budget: float | None = None,
    ) -> GateSettings:
        """The settings of a forward: the arguments of its call or, where an argument is `None`, the configuration's
        value. The arguments are not checked."""
        gate_mode, refinement_budget = normalize_budget(gate_mode or self.gate_mode, refinement_budget)
        steps = self.max_refinement_steps if max_refinement_steps is None else max_refinement_steps
        return GateSettings(gate_mode, gate_threshold or self.gate_threshold, steps, refinement_budget)

    def refines(self, **arguments: Any) -> bool:
        """Whether slots may take extra passes. `arguments` are those of `gate_settings`."""
        settings = self.gate_settings(**arguments)
        return settings.gate_mode != "off" and settings.max_refinement_steps > 0 and bool(self.gated_layers)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """Load a configuration, as in transformers.

        Raises:
            `ValueError`: a field of the wrong type; the message names the field and the file.
        """
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except StrictDataclassError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"The config.json of {pretrained_model_name_or_path} cannot be used: {reason}. Correct this field, or "
                "download the checkpoint again."
            ) from error

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Read a checkpoint's `config.json`. The one of a plain base model becomes the `text_config`. Warn if the
        argument `passage_attention` or `passage_alignment` differs from the saved one."""
        try:
            config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
            config_dict.items()
        except (AttributeError, TypeError) as error:  # the file contains other JSON
            raise ValueError(
                f"The config.json of {pretrained_model_name_or_path} does not contain a JSON object, so it is not a "
                "configuration. Download the checkpoint again."
            ) from error
        model_type = config_dict.get("model_type")
        settings = (("passage_attention", PASSAGE_ATTENTIONS), ("passage_alignment", PASSAGE_ALIGNMENTS))
        for name, (default, *others) in settings:
            saved, wanted = config_dict.get(name, default), kwargs.get(name)
            if config_dict.get("training_stage") and wanted in (default, *others) and wanted != saved:
                logger.warning_once(
                    f"{pretrained_model_name_or_path} was trained with `{name}={saved!r}` and is loaded with "
                    f"{wanted!r}. Expect worse answers from several passages, unless you train the aligner with "
                    f"{wanted!r}."
                )
        # The name of a base model loads an untrained aligner around it, with which training starts.
        if model_type is not None and model_type != cls.model_type:
            config_dict = {
                "text_config": config_dict,
                "base_model_name_or_path": str(pretrained_model_name_or_path),
                "dtype": config_dict.get("dtype") or config_dict.get("torch_dtype"),
            }
        return config_dict, kwargs

    def to_dict(self) -> dict[str, Any]:
        """The fields, as for any configuration, without those that describe a saved checkpoint."""
        of_checkpoint = ("digests", "includes_base_model", "named_dtype")
        return {name: value for name, value in super().to_dict().items() if name not in of_checkpoint}


def longest_prompt(config: PreTrainedConfig) -> int | None:
    """The maximum number of positions of a backbone, if its configuration says so."""
    return getattr(config, "max_position_embeddings", None)


def check_length(length: int, subject: str, config: PreTrainedConfig, position_ids=None) -> None:
    """Raise `ValueError` if `subject`, such as "The prompt", needs more positions than the backbone supports. It needs
    `length` positions, or fewer if passages share positions: then the largest of `position_ids`, plus one."""
    longest = longest_prompt(config)
    # Independent passages share positions, so a prompt may have more tokens than the backbone has positions.
    if longest is not None and length > longest and position_ids is not None:
        length = int(position_ids.max()) + 1
    if longest is not None and length > longest:
        raise ValueError(
            f"{subject} has {length} positions, but the base model (of type `{config.model_type}`) supports at most "
            f"{longest}. Pass fewer or shorter passages, put more text into each slot (a larger `tokens_per_slot`), or "
            "shorten the question."
        )


ArcAlignerConfig.register_for_auto_class()
