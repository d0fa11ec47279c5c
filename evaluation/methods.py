"""Methods to compare: the paper's baselines, its method, its ablations, and upper and lower bounds.

A method names its checkpoint and how to load it. If its weights or package are not on the machine, it raises
`MissingMethodError`; it is then skipped and named, never replaced.

A name may end in a number of tokens per slot, such as `arcaligner_x4` or `truncated_xsegment`. Methods that keep part
of the text (its beginning, or the selection of LLMLingua) then keep as many tokens as the aligner has slots. So one run
compares several numbers of tokens per slot with one checkpoint.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForTokenClassification, AutoTokenizer, DynamicCache
from transformers.utils import CONFIG_NAME

from ..answering_arcaligner import Answerer
from ..attention_arcaligner import CACHE
from ..common.files import digest_files
from ..common.rows import Row
from ..configuration_arcaligner import ArcAlignerConfig
from ..loading_arcaligner import missing_model_message, resolve_model
from ..processing_arcaligner import ArcAlignerProcessor
from ..segmentation_arcaligner import tokenize_segments
from ..train.prompts import passages_text
from ..zoom_arcaligner import ZOOM, check_zoom
from .answering import (
    Answer,
    answer_compressed,
    answer_independent,
    answer_slots,
    answer_text,
    count_tokens,
    load_aligner,
    load_compressing,
    load_text_lora,
)

# The files of a checkpoint's folder that decide its answers.
_CONFIGS = ("config.json", "adapter_config.json", "processor_config.json")
LLMLINGUA2 = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
CHECKPOINT_FILES = ("*.safetensors", *_CONFIGS, "chat_template.jinja")
LLMLINGUA_SHARE = 1 / 3  # the share of tokens that LLMLingua keeps, as in the paper
LORA_POSITIONS = {"all_positions": "all", "slot_positions": "slots"}  # which checkpoints in these fields must have
COMPRESSORS = ("cocom_x4", "cocom_x16")  # fields of `Checkpoints`
TEXT_READERS, PROJECTORS = ("full_text_lora", "text_independent"), ("xrag", "projector_only")  # fields of `Checkpoints`
TOP_RANKED = partial(answer_slots, gate_mode="off", max_passages=1)
AS_NEEDED = partial(answer_slots, gate_mode="off", as_needed=True)
WEIGHTED = partial(answer_slots, gate_mode="off", max_passages=1000)  # more than any question has
ZOOMED = partial(answer_slots, gate_mode="off", zoom=ZOOM)
_NO_LLMLINGUA = "The package llmlingua is not installed. Run `pip install llmlingua==0.2.2`."
PART_SIZE = 200  # tokens that LLMLingua scores together, the package's default


def compression_title(tokens_per_slot: int | str) -> str:
    """Tokens per slot as tables name them.

    >>> compression_title("segment"), compression_title(4)
    ('one slot per segment', '4 tokens per slot')
    """
    return "one slot per segment" if tokens_per_slot == "segment" else f"{tokens_per_slot} tokens per slot"


# Methods of version 0.2 with their new names. Recipes, runs and results may have the old ones.
NEW_NAMES = {"text_apart": "text_independent"}


class MissingMethodError(Exception):
    """The weights or the package of a method are not on this machine; the message says how to get them."""


@dataclass
class Checkpoints:
    """The checkpoints of the methods, folders or Hub ids, and the device of the models."""

    checkpoint: str  # the aligner: all methods use its backbone, chat template and segmentation
    xrag: str | None = None  # an aligner with a projector only, one slot per passage
    projector_only: str | None = None  # an aligner with a projector only, and the slots of `checkpoint`
    all_positions: str | None = None  # the control: an aligner with an ordinary LoRA, of the recipe `all_positions`
    slot_positions: str | None = None  # the aligner that the control is compared with, of the recipe `slot_positions`
    full_text_lora: str | None = None  # a LoRA of the backbone for text as input, of `train/full_text.py`
    text_independent: str | None = None  # a LoRA for text of independent passages, of the same script
    cocom_x4: str | None = None  # a run of `train/cocom.py`, with four tokens per compression token
    cocom_x16: str | None = None  # a run of `train/cocom.py`, with sixteen tokens per compression token
    device: str = "cpu"


def fingerprint(checkpoint: str) -> str:
    """The digest of a folder's weights and settings, or the name and commit of a checkpoint on the Hub."""
    folder = Path(checkpoint)
    if any(folder.glob("*.safetensors")):
        return digest_files([path for pattern in CHECKPOINT_FILES for path in sorted(folder.glob(pattern))])[:16]
    if folder.is_dir() or checkpoint.count("/") != 1:
        raise ValueError(
            f"{checkpoint} is not a folder with weights (*.safetensors). Pass the folder of a trained checkpoint."
        )
    ArcAlignerConfig.from_pretrained(checkpoint)  # downloads it, so that the cache has its commit
    commit = Path(try_to_load_from_cache(checkpoint, CONFIG_NAME)).parent.name
    return f"{checkpoint}@{commit}"


def backbone_fingerprint(aligner: str) -> str:
    """The name and revision of an aligner's backbone, and the digest of its chat template."""
    config = ArcAlignerConfig.from_pretrained(aligner)
    template = digest_files(sorted(Path(aligner).glob("chat_template.jinja")))[:8]
    return f"{config.base_model_name_or_path}@{config.base_model_revision or 'main'}, chat template {template}"


@dataclass(frozen=True)
class Method:
    """A way to answer."""

    name: str  # in commands and of files
    title: str  # in tables
    answer: Callable[..., list[Answer]]  # called with model, processor, rows and `tokens_per_slot`
    # The field of `Checkpoints` that decides the answers, if not the backbone alone.
    checkpoint_field: str | None = None
    command: str | None = None  # the command that makes such a checkpoint
    takes_tokens_per_slot: bool = False  # whether its name may end in a number of tokens per slot
    tokens_per_slot: int | str | None = None  # if not the checkpoint's default
    check: Callable[[], Any] | None = None  # loads further requirements, or raises `MissingMethodError`

    @property
    def option(self) -> str:
        """The command-line option that names the checkpoint of this method."""
        return f"--{self.checkpoint_field}".replace("_", "-")

    def with_tokens_per_slot(self, tokens_per_slot: int | str) -> "Method":
        """The same method with other tokens per slot, under another name and title."""
        return dataclasses.replace(
            self,
            name=f"{self.name}_x{tokens_per_slot}",
            title=f"{self.title}, {compression_title(tokens_per_slot)}",
            # The segments and tokens of the checkpoint decide the number of slots.
            checkpoint_field=self.checkpoint_field or "checkpoint",
            tokens_per_slot=tokens_per_slot,
        )

    def answer_settings(self, checkpoints: Checkpoints) -> dict[str, Any]:
        """The settings that the answers of this method depend on."""
        path = getattr(checkpoints, self.checkpoint_field or "checkpoint")
        if path is None:
            raise MissingMethodError(
                f"No checkpoint was given. Pass one as `{self.checkpoint_field}` in the recipe, or with "
                f"`{self.option}` of `arcaligner evaluate`; to train one, run `{self.command}`."
            )
        try:
            weights = backbone_fingerprint(path) if self.checkpoint_field is None else fingerprint(path)
        except (ValueError, OSError) as error:
            if self.command is None:
                raise
            message = f"There is no checkpoint {path}. To train one, run `{self.command}`."
            raise MissingMethodError(message) from error
        keys = {"weights": weights, "checkpoint": path}
        if self.tokens_per_slot is not None:
            keys["tokens_per_slot"] = self.tokens_per_slot
            if self.checkpoint_field in TEXT_READERS:
                keys["slots_of"] = fingerprint(checkpoints.checkpoint)  # decides the number of positions
        return keys

    def load(self, checkpoints: Checkpoints) -> Callable[[list[Row]], list[Answer]]:
        """Load the models of the method; return a function that answers rows."""
        if self.check is not None:
            self.check()
        path, device = getattr(checkpoints, self.checkpoint_field or "checkpoint"), checkpoints.device
        if self.checkpoint_field in COMPRESSORS:
            model, processor = load_compressing(checkpoints.checkpoint, path, device)
        elif self.checkpoint_field in TEXT_READERS:
            model, processor = load_text_lora(checkpoints.checkpoint, path, device)
        else:
            model, processor = load_aligner(path, device)
        if self.checkpoint_field in PROJECTORS and model.config.lora_r:
            raise ValueError(
                f"{path} has a LoRA of rank {model.config.lora_r}; expected an aligner without a LoRA for the method "
                f"`{self.name}`. Train one with `{self.command}`."
            )
        if (
            self.checkpoint_field in LORA_POSITIONS
            and model.config.lora_positions != LORA_POSITIONS[self.checkpoint_field]
        ):
            raise ValueError(
                f"{path} has `lora_positions` {model.config.lora_positions!r}; expected "
                f"{LORA_POSITIONS[self.checkpoint_field]!r} for the method `{self.name}`. Train such an aligner with "
                f"`{self.command}`."
            )
        try:
            if self.answer in (TOP_RANKED, AS_NEEDED, WEIGHTED):
                Answerer(model, processor).check(max_passages=1)
            if self.answer is ZOOMED:
                check_zoom(model, processor, ZOOM, self.tokens_per_slot)
        except ValueError as error:
            raise MissingMethodError(str(error)) from error
        if self.answer is AS_NEEDED and model.multihop_head is None:
            raise MissingMethodError(
                f"{path} has no multi-hop head (`config.use_multihop_head` is false). Fit one with `python -m "
                "arcaligner.train.multihop`."
            )
        return partial(self.answer, model, processor, tokens_per_slot=self.tokens_per_slot)


# Texts in place of a row's passages. `model` scores tokens for compression. With `tokens_per_slot`, shortened texts
# have no more tokens than the aligner has slots.


def no_text(model, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: None) -> str:
    """No text, for a closed book."""
    return ""


def whole_text(model, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: None) -> str:
    """The whole text of the passages."""
    return passages_text(row)


def truncated(model, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None) -> str:
    """The first tokens of the passages, as many as the aligner has slots."""
    return first_tokens(processor, passages_text(row), count_slots(processor, row, tokens_per_slot))


def compressed(model, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None) -> str:
    """The passages compressed by LLMLingua. It keeps the tokens that a language model, here the backbone, finds
    surprising: a third of them, or with `tokens_per_slot` no more than there are slots."""
    compress, text = llmlingua_compressor(model, processor.tokenizer), passages_text(row)
    if tokens_per_slot is None:
        return compress(text, LLMLINGUA_SHARE)
    num_slots, (length,) = count_slots(processor, row, tokens_per_slot), count_tokens(processor.tokenizer, [text])
    return first_tokens(processor, compress(text, num_slots / length) if length > num_slots else text, num_slots)


def count_slots(processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None) -> int:
    """The number of slots of a row's passages, without encoding them. Default: the processor's tokens per slot."""
    tokens_per_slot = tokens_per_slot or processor.tokens_per_slot
    segments = processor.slot_encoder.segment_documents(row["passages"])
    if tokens_per_slot == "segment":
        return max(1, len(segments))
    tokens = tokenize_segments(processor.tokenizer, segments, row["passages"])
    return max(1, sum(len(segment.token_spans(tokens_per_slot)) for segment in tokens))


def first_tokens(processor: ArcAlignerProcessor, text: str, number: int) -> str:
    """The first tokens of a text."""
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return processor.tokenizer.decode(ids[:number]).strip()


class PairCacheModel:
    """A language model as `llmlingua` calls it: its cache is a list of (keys, values), one pair per layer."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, attention_mask, past_key_values, use_cache):
        cache = DynamicCache(past_key_values)  # one pair (batch, heads, seq_len, head_dim) per layer, or `None`
        output = self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache, **{CACHE: cache})
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        return SimpleNamespace(logits=output.logits.float(), past_key_values=pairs)


def llmlingua_compressor(model, tokenizer) -> Callable[[str, float], str]:
    """LLMLingua whose scores come from `model`, a causal language model of transformers with its `tokenizer`. Returns a
    function from a text and the share of tokens to keep to the compressed text."""
    try:
        from llmlingua import PromptCompressor
    except ModuleNotFoundError as error:
        raise MissingMethodError(_NO_LLMLINGUA) from error
    # Without `__init__`, which would load another model, and download OpenAI's tokenizer for counts that are not used.
    compressor = PromptCompressor.__new__(PromptCompressor)
    compressor.model, compressor.tokenizer, compressor.device = PairCacheModel(model), tokenizer, model.device
    compressor.oai_tokenizer = tokenizer
    compressor.max_position_embeddings = model.config.get_text_config().max_position_embeddings
    compressor.use_llmlingua2 = False
    compressor.cache_bos_num = 10

    def compress(text: str, share: float) -> str:
        num_tokens = compressor.get_token_length(text, add_special_tokens=False)
        if num_tokens < 2:  # a single token has no context to predict it from
            return text
        # Equal parts, because the package does not compress a shorter last part.
        part_size = num_tokens // math.ceil(num_tokens / PART_SIZE)
        return compressor.compress_prompt([text], rate=share, iterative_size=part_size)["compressed_prompt"]

    return compress


def classified(model, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None) -> str:
    """The passages compressed by LLMLingua-2: the third of the words that its classifier finds most necessary."""
    compressor, text = llmlingua2_compressor(), passages_text(row)
    compressor.oai_tokenizer = processor.tokenizer  # counts tokens of a word; the package would download another one
    return (
        compressor.compress_prompt_llmlingua2([text], rate=LLMLINGUA_SHARE)["compressed_prompt"]
        if text.strip()
        else text
    )


@functools.lru_cache(maxsize=1)
def llmlingua2_compressor():
    """LLMLingua-2 of the package `llmlingua`, with the classifier that its authors trained, on the CPU.

    Raises:
        `MissingMethodError`: the package or the model is missing.
    """
    try:
        from llmlingua import PromptCompressor
    except ModuleNotFoundError as error:
        raise MissingMethodError(_NO_LLMLINGUA) from error
    name = resolve_model(LLMLINGUA2)
    try:
        model = AutoModelForTokenClassification.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise MissingMethodError(missing_model_message("classifier", LLMLINGUA2, error)) from error
    # Without `__init__`, as above.
    compressor = PromptCompressor.__new__(PromptCompressor)
    compressor.model, compressor.tokenizer, compressor.device = model.eval(), tokenizer, "cpu"
    compressor.model_name, compressor.use_llmlingua2, compressor.oai_tokenizer = name, True, tokenizer
    compressor.init_llmlingua2()
    return compressor


# All of them

_TRAIN = "python -m arcaligner train --recipe"
_FULL_TEXT = "python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml"
_COCOM_RUN = "python -m arcaligner.train.cocom --config train/recipes/smollm2_135m"
_COCOM_AT_16 = "--tokens_per_slot 16 --output_dir runs/smollm2_135m/cocom_x16"
_COCOM = f"{_COCOM_RUN}/cocom_pretraining.yaml && {_COCOM_RUN}/cocom.yaml"
_COCOM_16 = (
    f"{_COCOM_RUN}/cocom_pretraining.yaml {_COCOM_AT_16}_pretraining && "
    f"{_COCOM_RUN}/cocom.yaml {_COCOM_AT_16} --start_from runs/smollm2_135m/cocom_x16_pretraining"
)
_READER = {"checkpoint_field": "full_text_lora", "command": _FULL_TEXT}
_INDEPENDENT = {
    "checkpoint_field": "text_independent",
    "command": _FULL_TEXT.replace("full_text.yaml", "full_text_apart.yaml"),
}
_OURS = {"checkpoint_field": "checkpoint", "takes_tokens_per_slot": True}
_PROJECTOR = {"checkpoint_field": "projector_only", "command": f"{_TRAIN} projector_only"}


def _control(name: str) -> dict[str, str]:
    return {"checkpoint_field": name, "command": f"{_TRAIN} {name}"}


_WHOLE, _TRUNCATED = partial(answer_text, whole_text), partial(answer_text, truncated)
_ONE_PASS = partial(answer_slots, gate_mode="off")

METHODS = {
    method.name: method
    for method in (
        Method("naive", "Naive", partial(answer_text, no_text)),
        Method("standard_rag", "StandardRAG", _WHOLE),
        Method("full_text_lora", "StandardRAG, fine-tuned", _WHOLE, **_READER),
        Method(
            "full_text_copying", "StandardRAG, fine-tuned, copy-biased", partial(_WHOLE, copy_biased=True), **_READER
        ),
        Method("text_independent", "StandardRAG, fine-tuned, independent passages", answer_independent, **_INDEPENDENT),
        Method("truncated", "truncated text", _TRUNCATED, **_OURS),
        Method("truncated_lora", "truncated text, fine-tuned", _TRUNCATED, takes_tokens_per_slot=True, **_READER),
        Method(
            "truncated_copying",
            "truncated text, fine-tuned, copy-biased",
            partial(_TRUNCATED, copy_biased=True),
            takes_tokens_per_slot=True,
            **_READER,
        ),
        Method("llmlingua2", "LLMLingua-2", partial(answer_text, classified), check=lambda: llmlingua2_compressor()),
        Method(
            "llmlingua",
            "LLMLingua (scored by the base model)",
            partial(answer_text, compressed),
            takes_tokens_per_slot=True,
        ),
        Method("xrag", "xRAG (our training)", _ONE_PASS, checkpoint_field="xrag", command=f"{_TRAIN} xrag"),
        Method("cocom_x4", "COCOM x4 (our training)", answer_compressed, checkpoint_field="cocom_x4", command=_COCOM),
        Method(
            "cocom_x16", "COCOM x16 (our training)", answer_compressed, checkpoint_field="cocom_x16", command=_COCOM_16
        ),
        Method("projector_only", "projector only", _ONE_PASS, takes_tokens_per_slot=True, **_PROJECTOR),
        Method("arcaligner", "ArcAligner", answer_slots, **_OURS),
        Method("one_passage", "ArcAligner, top-ranked passage only", TOP_RANKED, **_OURS),
        Method("as_needed", "ArcAligner, one passage or two", AS_NEEDED, **_OURS),
        Method("weighted", "ArcAligner, all passages, weighted", WEIGHTED, **_OURS),
        Method("zoomed", "ArcAligner, zoomed", ZOOMED, **_OURS),
        Method("no_copying", "ArcAligner, without copy bias", partial(_ONE_PASS, copy_bonus=0.0), **_OURS),
        Method("no_recursion", "w/o Recursion", _ONE_PASS, **_OURS),
        Method("max_loop", "w/o Gate (Max Loop)", partial(answer_slots, gate_mode="always"), **_OURS),
        Method("no_lora", "w/o LoRA & Recursion", partial(_ONE_PASS, use_lora=False), **_OURS),
        # Not in the paper: an ordinary LoRA, and the selective LoRA trained on the same few rows.
        Method("all_positions", "LoRA on all positions", _ONE_PASS, **_control("all_positions")),
        Method("slot_positions", "LoRA on slots, same training", _ONE_PASS, **_control("slot_positions")),
    )
}


def split_name(name: str) -> tuple[Method, int | str | None]:
    """
    A method by its name, and the tokens per slot that the name ends in.

    >>> method, tokens_per_slot = split_name("arcaligner_x4")
    >>> method.title, tokens_per_slot
    ('ArcAligner', 4)
    """
    base, _, number = name.rpartition("_x")
    if name in METHODS:
        return METHODS[name], None
    if (
        base in METHODS
        and METHODS[base].takes_tokens_per_slot
        and (number == "segment" or (number.isdecimal() and int(number)))
    ):
        return METHODS[base], number if number == "segment" else int(number)
    names = ", ".join(method.name for method in METHODS.values() if method.takes_tokens_per_slot)
    raise ValueError(
        f"There is no method {name!r}; expected one of {', '.join(METHODS)}. To set the tokens per slot, append `_x` "
        f"and their number, or `_xsegment`, as in `arcaligner_x4` or `arcaligner_xsegment`, to one of {names}."
    )


def find_method(name: str) -> Method:
    """A method by its name, which may end in tokens per slot."""
    method, tokens_per_slot = split_name(name)
    return method if tokens_per_slot is None else method.with_tokens_per_slot(tokens_per_slot)


def depends_on_aligner(name: str) -> bool:
    """Whether a method's answers depend on the aligner's weights. Answers from text that is cut to the length of slots
    do not: they depend on sentence boundaries and tokens, which weights do not change."""
    method, _ = split_name(name)
    return method.checkpoint_field == "checkpoint" and method.answer is not _TRUNCATED


def sort_key(name: str) -> tuple[int, float]:
    """The order of names in tables: that of `METHODS`, each method first without and then with a number of tokens per
    slot."""
    method, tokens_per_slot = split_name(name)
    return list(METHODS).index(method.name), {None: 0.0, "segment": float("inf")}.get(tokens_per_slot, tokens_per_slot)
