"""The alternatives, or *arms*, that the latency benchmark compares for k passages, from the same prompts.

standard_rag           the bare base model of transformers, with the passages' text
standard_rag_cached    the same, with cached keys and values of everything before the question
off                    slots without refinement
slots_cached           the same, with cached keys and values of the slots and of the text before them

A prompt is cut where the question begins. Its prefix (the passages, as text or as slots) does not depend on the
question, so the keys and values of a prefix serve any number of questions. The speed of a machine drifts, but ratios
measured close together do not. Arms therefore take turns in one process, each round begins with another arm, and ratios
are computed within a round. The report has the median over rounds and the quartiles.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..attention_arcaligner import CACHE
from ..common.files import counted
from ..common.rows import Row
from ..kv_cache_arcaligner import cache_of
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.prompts import slot_inputs, text_ids

TOKENS_PER_PASSAGE = 150
MIN_ROUNDS, MAX_ROUNDS = 3, 15


# Models


def load_models(
    checkpoint: str, dtype: torch.dtype, device: str, **settings: Any
) -> tuple[ArcAlignerForCausalLM, PreTrainedModel]:
    """A checkpoint's aligner, with `settings` in place of the stored ones, and a base model that shares its weights, so
    that both use the same memory."""
    aligner = ArcAlignerForCausalLM.from_pretrained(checkpoint, dtype=dtype, **settings).to(device).eval()
    return aligner, base_of(aligner, dtype)


def base_of(aligner: ArcAlignerForCausalLM, dtype: torch.dtype) -> PreTrainedModel:
    """The model of transformers with the backbone's weights and buffers. They are shared and not copied, so it needs no
    further memory."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(aligner.config.text_config, dtype=dtype).eval()

    def base_name(name: str) -> str:
        return name.replace(".base_layer.", ".").replace("model.backbone.", f"{base.base_model_prefix}.")

    state = {
        base_name(name): parameter
        for name, parameter in aligner.named_parameters(remove_duplicate=False)
        if not aligner.is_aligner_key(name)
    }
    base.load_state_dict(state, strict=True, assign=True)
    buffers = {base_name(name): buffer for name, buffer in aligner.named_buffers()}
    for name, _ in list(base.named_buffers()):  # rotary frequencies, which no state dict holds
        owner, _, last = name.rpartition(".")
        setattr(base.get_submodule(owner), last, buffers[name])
    return base.requires_grad_(False)


# Prompts


class Prompt(NamedTuple):
    """The inputs of a prompt with one question: all of it, its prefix, which does not depend on the question, and the
    rest."""

    full: dict[str, Any]
    prefix: dict[str, Any]
    suffix: dict[str, Any]

    @classmethod
    def cut(cls, num_before: int, slots: dict[str, Any], **inputs: torch.Tensor) -> "Prompt":
        """Cut `inputs` (1, seq_len) where the question begins. Its `slots` belong to the prefix."""
        prefix = {name: tensor[:, :num_before] for name, tensor in inputs.items()}
        return cls(inputs | slots, prefix | slots, {name: tensor[:, num_before:] for name, tensor in inputs.items()})


def select_rows(rows: list[Row], processor: ArcAlignerProcessor, number: int) -> list[Row]:
    """`number` rows with one passage each, all different: those with a length nearest to `TOKENS_PER_PASSAGE`."""
    pairs = ((row, passage) for row in rows if row["question"] for passage in row["passages"])
    candidates = list({passage["text"]: row | {"passages": [passage]} for row, passage in pairs}.values())
    if len(candidates) < number:
        raise ValueError(
            f"The data file has {counted(len(candidates), 'different passage')} with a question; expected at least "
            f"{number}. Pass a larger file with `--data`, or smaller numbers of passages with `--sizes`."
        )
    texts = [row["passages"][0]["text"] for row in candidates]
    counts = [len(ids) for ids in processor.tokenizer(texts)["input_ids"]]
    nearest = sorted(range(len(candidates)), key=lambda index: (abs(counts[index] - TOKENS_PER_PASSAGE), index))
    return [candidates[index] for index in nearest[:number]]


def join_rows(rows: list[Row]) -> Row:
    """The question of the first row, with the passages of all rows."""
    return {"question": rows[0]["question"], "passages": [passage for row in rows for passage in row["passages"]]}


def both_prompts(
    aligner: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, row: Row, tokens_per_slot: int | str | None = None
) -> tuple[Prompt, Prompt]:
    """The prompts of a row with the passages' text and with their slots."""
    prefix, suffix = text_ids(processor, row)
    text = Prompt.cut(len(prefix), {}, input_ids=torch.tensor([prefix + suffix], device=aligner.device))
    slots = slot_inputs(processor, [row], tokens_per_slot=tokens_per_slot).to(aligner.device)
    ids, _ = slots.pop("input_ids"), slots.pop("attention_mask")  # a single row has no padding
    positions = aligner.prompt_positions(ids, context_passage_ids=slots.get("context_passage_ids"))
    num_before = int((ids[0] == processor.context_token_id).nonzero().max()) + 1
    return text, Prompt.cut(num_before, {**slots, "gate_mode": "off"}, input_ids=ids, position_ids=positions)


# Arms


def share(cache: Cache) -> Cache:
    """A copy of a cache that shares its tensors; an update of the copy makes new ones."""
    shared = copy.copy(cache)
    shared.layers = [copy.copy(layer) for layer in cache.layers]
    return shared


def cache_bytes(cache: Cache) -> int:
    """The size of all keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def prefill(model: PreTrainedModel, inputs: dict[str, Any], cache: Cache | None = None) -> ModelOutput:
    """Prefill `inputs` after `cache`, and compute the logits of the first token of an answer: logits (1, 1,
    vocab_size)."""
    return model(**inputs, **{CACHE: cache}, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def make_arms(
    aligner: ArcAlignerForCausalLM, base: PreTrainedModel, text: Prompt, slots: Prompt
) -> dict[str, Callable[[], ModelOutput]]:
    """The arms of a prompt by name: functions without arguments, which compute the logits of the first token."""
    text_prefix, slot_prefix = cache_of(prefill(base, text.prefix)), cache_of(prefill(aligner, slots.prefix))
    return {
        "standard_rag": lambda: prefill(base, text.full),
        "standard_rag_cached": lambda: prefill(base, text.suffix, share(text_prefix)),
        "off": lambda: prefill(aligner, slots.full),
        "slots_cached": lambda: prefill(aligner, slots.suffix, share(slot_prefix)),
    }


# Time


def wait_for(device: str) -> None:
    """Wait until all work on `device` is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def time_rounds(
    arms_of: Callable[[int], dict[str, Callable[[], Any]]],
    device: str,
    seconds: float,
    before: Callable[[str], Any] = lambda name: None,
) -> list[dict[str, float]]:
    """Seconds of each arm in each round. There are `MIN_ROUNDS`, and then further ones, up to `MAX_ROUNDS`, until
    `seconds` have passed. `arms_of` returns the arms of a round by its number. `before` is called with the name of an
    arm before the arm is timed."""
    rounds, start = [], time.perf_counter()
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() - start < seconds):
        arms = arms_of(len(rounds))
        names, first, taken = list(arms), len(rounds) % len(arms), dict.fromkeys(arms, 0.0)
        for name in names[first:] + names[:first]:
            before(name)
            wait_for(device)
            begin = time.perf_counter()
            arms[name]()
            wait_for(device)
            taken[name] = time.perf_counter() - begin
        rounds.append(taken)
    return rounds


def quartiles(values: list[float]) -> dict[str, float]:
    """The median, and the quartiles around it."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return {"lower": lower, "median": median, "upper": upper}


def first_tokens(rounds: list[dict[str, float]], name: str, text: str) -> dict[str, dict[str, float]]:
    """Seconds of an arm, and how many times faster it is than the arm `text`: quartiles over rounds."""
    return {
        "first_token": quartiles([seconds[name] for seconds in rounds]),
        "speed_up": quartiles([seconds[text] / seconds[name] for seconds in rounds]),
    }
