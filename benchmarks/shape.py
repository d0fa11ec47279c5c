"""Cost and savings of slots on a GPU, for a known model shape with random weights, in under five minutes.

    python -m arcaligner.benchmarks.shape --shape mistral-7b --device cuda --output FOLDER
    python -m arcaligner.benchmarks.shape --shape mistral-7b --device cpu       # operations, and the time to start them

Measured are aten operations, the first token of an answer from text and from slots, a generated token, a training step
of each stage compared with PEFT's LoRA on the text, and the memory of each. The weights are random: speed and memory
are real, answers are not. No gate is open, so *adaptive* measures the cost of evaluating the gates. All rows of a batch
have the same length.

A passage has five sentences of 30 tokens; there are 10 tokens before the passages and 40 after them. As slots, a
passage is five slots (one per sentence) or 40 (x4, about four tokens each). Passages are joint, as in the paper and in
the recipes for 7B models, or independent (`--passage-attention separate`). Arms that are compared take turns
(`arms.py`). The most important measurements come first. Those for which time or memory is not enough are left out, and
named.
"""

import contextlib
import datetime
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ..common.files import ROOT, counted, describe_machine, markdown_table, run_command, write_atomically
from ..encoder_arcaligner import EncodedDocuments
from ..kv_cache_arcaligner import cache_of, join_keys_values, prefill_passages, prefill_text
from ..modeling_arcaligner import ArcAlignerForCausalLM
from .arms import base_of, prefill, quartiles, share, time_rounds, wait_for
from .latency import parse_sizes
from .random_models import GIB, SHAPES, build_aligner, check_fits, make_config, prefill_bytes, step_bytes

BEFORE, SENTENCE, SENTENCES, AFTER = 10, 30, 5, 40  # tokens, and sentences of a passage
SLOTS = {"slots": SENTENCES, "slots_x4": 8 * SENTENCES}  # of a passage; 30 tokens at four per slot are eight slots
MODES = ("off", "adaptive", "always")
NEW_TOKENS, TOKEN_PASSAGES = 16, 5  # the time of a generated token is the mean of 16, after five passages
EXAMPLES = 8  # of a training step
# Slots and tokens of an example, without the `BEFORE`: of the aligner's stages, and of PEFT's LoRA on text.
STAGES = {"reconstruction": (4, 120), "grounding": (12, 40), "gating": (12, 40)}
PEFT_TOKENS = {"peft_positions": 52, "peft_text_1": 120, "peft_text_2": 400}
ANSWER = 8  # target tokens of stages II and III; in stage I the text of the slots is the target

GROUP_SECONDS = 3.0  # after which no further round of a group of arms begins
SHAPE_REPORT = "shape.json"

Arms = dict[str, Callable[[], Any]]


# What is timed


def random_ids(model: PreTrainedModel, *shape: int) -> torch.LongTensor:
    """Ids of words, none of them special."""
    return torch.randint(3, model.config.get_text_config().vocab_size - 1, shape, device=model.device)


def text_inputs(base: PreTrainedModel, batch: int, passages: int) -> dict[str, torch.Tensor]:
    """A prompt with the passages' text."""
    ids = random_ids(base, batch, BEFORE + passages * SENTENCES * SENTENCE + AFTER)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def slot_inputs(
    aligner: ArcAlignerForCausalLM, batch: int, passages: int, per_passage: int, num_after: int = AFTER
) -> dict[str, torch.Tensor]:
    """A prompt with the passages' slots."""
    num_slots, device = passages * per_passage, aligner.device
    ids = random_ids(aligner, batch, BEFORE + num_slots + num_after)
    ids[:, BEFORE : BEFORE + num_slots] = aligner.config.context_token_id
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "context_embeds": torch.randn(batch, num_slots, aligner.config.encoder_hidden_size, device=device),
    }
    if aligner.config.passage_attention == "separate":
        numbers = torch.arange(passages, device=device).repeat_interleave(per_passage)  # (num_slots,)
        inputs["context_passage_ids"] = numbers.expand(batch, -1)
    return inputs


def text_arms(base: PreTrainedModel, batch: int, passages: int) -> Arms:
    """Prefill of the bare model: of text, and of the question after the cache of the same text."""
    text, num_before = text_inputs(base, batch, passages), BEFORE + passages * SENTENCES * SENTENCE
    prefix = cache_of(prefill(base, {name: tensor[:, :num_before] for name, tensor in text.items()}))
    question = text | {"input_ids": text["input_ids"][:, num_before:]}
    return {"text": partial(prefill, base, text), "text_cached": lambda: prefill(base, question, share(prefix))}


def slot_arms(aligner: ArcAlignerForCausalLM, batch: int, passages: int, name: str) -> Arms:
    """Three groups of arms: a prompt of slots with gates off, adaptive and always open; the question after cached
    slots; and the question after slots that are first joined from precomputed passages, as for a new combination."""
    inputs = slot_inputs(aligner, batch, passages, SLOTS[name])
    arms = {f"{name}_{mode}": partial(prefill, aligner, inputs | {"gate_mode": mode}) for mode in MODES}
    ids, mask, num_before = inputs["input_ids"], inputs["attention_mask"], BEFORE + passages * SLOTS[name]
    positions = aligner.prompt_positions(ids, mask, inputs.get("context_passage_ids"))
    before = ids[0, :BEFORE].tolist()
    prefix = prefill_text(aligner, before)
    embeds = inputs["context_embeds"][0].cpu()  # (num_slots, encoder_hidden_size)
    is_separate = aligner.config.passage_attention == "separate"  # else all passages are precomputed together
    groups = embeds.split(SLOTS[name] if is_separate else len(embeds))
    encoded = [EncodedDocuments([], group, None, torch.zeros(len(group)).long(), []) for group in groups]
    parts = [[prefix, *prefill_passages(aligner, before, prefix, encoded, gate_mode="off")]] * batch
    join = partial(join_keys_values, parts, aligner.config.text_config, aligner.config.passage_alignment)
    question = {"input_ids": ids[:, num_before:], "position_ids": positions[:, num_before:], "attention_mask": mask}
    cached = join()
    arms[f"{name}_cached"] = lambda: prefill(aligner, question, share(cached))
    arms[f"{name}_joined"] = lambda: prefill(aligner, question, join())
    return arms


def token_arms(aligner: ArcAlignerForCausalLM, base: PreTrainedModel, batch: int) -> Arms:
    """`generate` of one token and of `NEW_TOKENS` more. The difference is the time of these further tokens."""
    arms = {}
    prompts = {
        "token_text": (base, text_inputs(base, batch, TOKEN_PASSAGES)),
        "token_slots": (aligner, slot_inputs(aligner, batch, TOKEN_PASSAGES, SENTENCES) | {"gate_mode": "off"}),
    }
    for name, (model, inputs) in prompts.items():
        model.generation_config.eos_token_id = None  # random weights must not end early
        options = {"do_sample": False, "pad_token_id": 0}
        for end, count in (("_first", 1), ("", 1 + NEW_TOKENS)):
            arms[name + end] = partial(model.generate, **inputs, **options, max_new_tokens=count)
    return arms


def step_arms(aligner: ArcAlignerForCausalLM, base: PreTrainedModel) -> Arms:
    """Forward and backward pass of a step of each stage and of PEFT's LoRA on text, without an optimizer. PEFT's model
    has the aligner's frozen weights. The caller sets a stage before its step."""
    arms = {}
    for stage, (num_slots, num_text) in STAGES.items():
        inputs = slot_inputs(aligner, EXAMPLES, 1, num_slots, num_text) | {"skip_logits": True}
        arms[stage] = partial(train_step, aligner, num_text if stage == "reconstruction" else ANSWER, inputs)
    config = aligner.config
    lora = LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    tuned = get_peft_model(base, lora).train()
    for name, num_text in PEFT_TOKENS.items():
        ids = random_ids(base, EXAMPLES, BEFORE + num_text)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arms[name] = partial(train_step, tuned, num_text if name == "peft_text_1" else ANSWER, inputs)
    return arms


def train_step(model: torch.nn.Module, learned: int, inputs: dict[str, Any]) -> None:
    """Forward and backward pass. The last `learned` tokens of each example are the targets."""
    labels = inputs["input_ids"].clone()
    labels[:, :-learned] = -100
    with torch.enable_grad():
        model(**inputs, labels=labels, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def count_operations(arm: Callable[[], Any]) -> int:
    """The number of aten operations that a call dispatches on the host, including nested ones."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints two lines for each count
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        arm()
    return sum(event.count for event in profiled.key_averages() if event.key.startswith("aten::"))


# Measuring


class Bench:
    """Measures groups of arms in turns, as long as time and memory suffice.

    Attributes: `rows`, the measurements of each arm; `left_out`, those that were skipped, and why."""

    def __init__(self, aligner: ArcAlignerForCausalLM, base: PreTrainedModel, end: float, show: Callable[[str], Any]):
        self.aligner, self.base, self.end, self.show = aligner, base, end, show
        self.device, self.dtype = aligner.device, aligner.dtype
        self.weights = sum(parameter.nbytes for parameter in aligner.parameters())
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []

    def fits(self, needed: int, **what: Any) -> bool:
        """Whether about `needed` bytes are free. If not, `what` is recorded as left out."""
        if self.device.type == "cpu":
            return True
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + reserved
        if needed > free:
            reason = f"needs about {needed / GIB:.1f} GiB in addition to the weights, and {free / GIB:.1f} GiB are free"
            self.left_out.append(what | {"reason": reason})
        return needed <= free

    def first_token(self, batch: int, passages: int, counts: bool) -> None:
        """Measure the first token for text and for slots of `passages` passages; with `counts` also operations."""
        config, what = self.aligner.config.text_config, {"batch": batch, "passages": passages}
        arms: Arms = {}
        positions: dict[str, int] = {}
        for name in ("text", *SLOTS):
            per_passage = SENTENCES * SENTENCE if name == "text" else SLOTS[name]
            length = BEFORE + passages * per_passage + AFTER
            if not self.fits(prefill_bytes(config, batch * length, self.dtype.itemsize), arm=name, **what):
                continue
            if name == "text":
                new = text_arms(self.base, batch, passages)
            else:
                new = slot_arms(self.aligner, batch, passages, name)
            arms |= new
            positions |= dict.fromkeys(new, length)
        self.measure(arms, positions, counts, what)

    def token(self, batch: int, counts: bool) -> None:
        """Measure the generation of a token after text, and after slots."""
        arms, what = token_arms(self.aligner, self.base, batch), {"batch": batch, "passages": TOKEN_PASSAGES}
        positions = {name: arms[name].keywords["input_ids"].shape[1] for name in arms}
        self.measure(arms, positions, counts, what)

    def steps(self, counts: bool) -> None:
        """Measure training steps."""
        arms, what = step_arms(self.aligner, base_of(self.aligner, self.dtype)), {"batch": EXAMPLES, "passages": None}
        aligner_bytes = sum(parameter.nbytes for _, parameter in self.aligner.aligner_parameters())
        positions = {name: BEFORE + slots + text for name, (slots, text) in STAGES.items()}
        positions |= {name: BEFORE + text for name, text in PEFT_TOKENS.items()}
        config = self.aligner.config.text_config
        arms = {
            name: arm
            for name, arm in arms.items()
            if self.fits(step_bytes(config, EXAMPLES * positions[name], aligner_bytes), arm=name, **what)
        }

        def before(name: str) -> None:
            if name in STAGES:
                self.aligner.set_stage(name)
                self.aligner.train()

        self.measure(arms, positions, counts, what, before)
        self.aligner.eval()

    def measure(
        self,
        arms: Arms,
        positions: dict[str, int],
        counts: bool,
        what: dict[str, Any],
        before: Callable[[str], Any] = lambda name: None,
    ) -> None:
        """Add a row for each arm. The first call warms up, and its memory is measured."""
        extras: dict[str, dict[str, Any]] = {}
        for name, arm in list(arms.items()):
            before(name)
            try:
                extras[name] = {"peak_gib": self.peak_gib(arm)}
            except torch.OutOfMemoryError:
                self.left_out.append({"arm": name, **what, "reason": "ran out of memory"})
                del arms[name]
                torch.cuda.empty_cache()
                continue
            if counts:
                extras[name]["operations"] = count_operations(arm)
        if not arms:
            return
        rounds = time_rounds(
            lambda _: arms, str(self.device), min(GROUP_SECONDS, self.end - time.perf_counter()), before
        )
        # Per token: the difference, divided by the tokens.
        for name in [name for name in arms if name.endswith("_first")]:
            last = name.removesuffix("_first")
            if last in arms:
                for seconds in rounds:
                    seconds[last] = (seconds[last] - seconds[name]) / NEW_TOKENS
                if counts:
                    extras[last]["operations"] = (extras[last]["operations"] - extras[name]["operations"]) // NEW_TOKENS
            del extras[name]
        for name, extra in extras.items():
            row = {"arm": name, **what, "positions": positions[name], "rounds": len(rounds)}
            row["milliseconds"] = quartiles([1000 * seconds[name] for seconds in rounds])
            if "text" in arms:
                row["speed_up"] = quartiles([seconds["text"] / seconds[name] for seconds in rounds])
            self.rows.append(row | extra)

    def peak_gib(self, arm: Callable[[], Any]) -> float | None:
        """Call an arm. Return the peak memory of the weights and of its allocations, without caches that existed
        before; `None` on a CPU."""
        if self.device.type == "cpu":
            arm()
            return None
        wait_for(str(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        arm()
        wait_for(str(self.device))
        return (torch.cuda.max_memory_allocated(self.device) - before + self.weights) / GIB

    @torch.no_grad()
    def run(self, passages: list[int], batches: list[int]) -> None:
        """Measure everything, most important first: the first batch size, training, the other batch sizes."""
        for number, batch in enumerate(batches):
            is_first = number == 0
            for place, k in enumerate(passages):
                counts = is_first and place == 0
                self.group(partial(self.first_token, batch, k, counts), what="first token", batch=batch, passages=k)
                if counts:
                    self.group(partial(self.steps, counts), what="training steps")
            self.group(partial(self.token, batch, is_first), what="a generated token", batch=batch)

    def group(self, measure: Callable[[], None], **what: Any) -> None:
        """Measure a group, or leave it out."""
        self.show(named(what))
        if time.perf_counter() > self.end:
            self.left_out.append(what | {"reason": "no time left"})
            return
        try:
            measure()
        except torch.OutOfMemoryError:
            self.left_out.append(what | {"reason": "ran out of memory"})
            torch.cuda.empty_cache()


# The report


def _slot_titles() -> dict[str, str]:
    """Titles of the arms of slots."""
    states = {"off": "gates off", "adaptive": "gates computed, all closed", "always": "two more passes in each layer"}
    titles = {}
    for name, which in {"slots": "a sentence each", "slots_x4": "x4, four tokens each"}.items():
        titles |= {f"{name}_{mode}": f"**slots**, {which}, {how}" for mode, how in states.items()}
        titles[f"{name}_cached"] = f"question after cached slots, {which}"
        titles[f"{name}_joined"] = f"question after cached slots, joined from precomputed passages, {which}"
    return titles


TITLES = {"text": "text, the bare model", "text_cached": "question after the cached text", **_slot_titles()}
TITLES |= {
    "token_text": f"a generated token, bare model after the text of {TOKEN_PASSAGES} passages",
    "token_slots": f"a generated token after the slots of {TOKEN_PASSAGES} passages, a sentence each",
    "reconstruction": "step of stage I: 4 slots, 120 tokens",
    "grounding": "step of stage II: 12 slots, 40 tokens",
    "gating": "step of stage III: 12 slots, 40 tokens",
    "peft_positions": "step of PEFT's LoRA on text: as many positions as stage II",
    "peft_text_1": "step of PEFT's LoRA on text: 120 tokens, those of stage I",
    "peft_text_2": "step of PEFT's LoRA on text: 400 tokens, those of stage II",
}
# The arms that operations are compared with.
_BARE = {"token_text": ("token_text", "token_slots"), "peft_positions": (*STAGES, *PEFT_TOKENS)}
BARE = {name: bare for bare, names in _BARE.items() for name in names}


def shape_table(report: dict[str, Any]) -> list[str]:
    """Markdown lines: a row for each arm, milliseconds at each batch size, and below the table what was measured and
    where."""
    by_arm = {(row["arm"], row["batch"], row["passages"]): row for row in report["rows"]}
    counts = {row["arm"]: row["operations"] for row in report["rows"] if "operations" in row}
    passages, batches, lines = sorted(report["passages"]), report["batches"], []
    for name, title in TITLES.items():
        rows_of_arm = [row for row in report["rows"] if row["arm"] == name]
        if not rows_of_arm:
            continue
        is_step, is_token = name in STAGES or name in PEFT_TOKENS, name.startswith("token")
        columns = [None] if is_step else [TOKEN_PASSAGES] if is_token else passages
        cells = []
        for batch in batches:
            rows = [by_arm.get((name, batch, k)) for k in columns]
            shown = " / ".join(f"{row['milliseconds']['median']:.1f}" if row else "-" for row in rows)
            cells.append("" if is_step else shown)
        step = f"{rows_of_arm[0]['milliseconds']['median']:.1f}" if is_step else ""
        operations = f"{counts[name]:,}" if name in counts else "-"
        if (bare := BARE.get(name, "text")) in counts and name in counts:
            operations += f" ({counts[name] / counts[bare]:.2f})"
        peaks = [row["peak_gib"] for row in rows_of_arm if row["peak_gib"] is not None]
        lines.append([title, operations, *cells, step, f"{max(peaks):.1f}" if peaks else "-"])
    sizes = " / ".join(map(str, passages))
    heads = [f"batch {batch}, ms at {sizes} passages" for batch in batches]
    columns = ["measured", "operations", *heads, f"ms, step of {EXAMPLES} examples", "peak memory, GiB"]
    return [*markdown_table(columns, lines), "", *notes(report)]


def notes(report: dict[str, Any]) -> list[str]:
    """Notes: what was measured and where, and what was left out."""
    machine, sizes = report["machine"], report["parameters"]
    passages = {"joint": "Joint passages", "separate": "Independent passages"}[report["passage_attention"]]
    cut = (
        " The hidden size is cut to 64: the numbers of operations are those of the whole shape, but the times are not."
        if report["is_cut"]
        else ""
    )
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    lines = [
        f"`{report['shape']}`, random weights: base model {sizes['backbone'] / 1e6:,.4g} million parameters in "
        f"{report['dtype']}, "
        f"aligner {sizes['aligner'] / 1e6:,.4g} million in float32. {passages}.{cut} Times are medians; all "
        f"measurements took {report['seconds']:.0f} s. In parentheses: operations divided by those of the bare model "
        "with text; for a generated token, by those of its generated token; for a training step, by those of PEFT's "
        "step on as many positions. A step is a forward and a backward pass, without an optimizer. Peak memory: the "
        "weights, and what a call allocates.",
        "",
        f"{machine['device']}{driver}, {machine['cpu']}, {machine['threads']} threads; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, peft {machine['peft']}; {machine['date']}{commit}.",
    ]
    for skipped in report["left_out"]:
        lines += ["", f"Left out: {named(skipped)} ({skipped['reason']})."]
    return lines


def named(what: dict[str, Any]) -> str:
    """A group or an arm in words.

    >>> named({"what": "first token", "batch": 16, "passages": 5})
    'first token, batch 16, 5 passages'
    """
    words = [what.get("what") or TITLES.get(what["arm"], what["arm"])]
    words += [f"batch {what['batch']}"] if "batch" in what else []
    words += [counted(what["passages"], "passage")] if what.get("passages") else []
    return ", ".join(words)


def _output_of(*command: str) -> str | None:
    """Output of a program; `None` if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def describe_benchmark(device: torch.device) -> dict[str, Any]:
    """The machine, the driver of its GPU, the date, and the commit, if this is a working copy."""
    machine = describe_machine(str(device)) | {"driver": None, "memory_gib": None, "commit": None}
    if device.type == "cuda":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        machine["driver"] = (_output_of(*query) or "").partition("\n")[0] or None
        machine["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
    if (ROOT / ".git").exists():
        machine["commit"] = _output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return machine | {"date": datetime.date.today().isoformat()}


# The command


def find_device(name: str, dtype: torch.dtype) -> torch.device:
    """The device of this name.

    Raises:
        `ValueError`: a device that does not exist, or does not support `dtype`.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`--device` is {name!r}; expected cpu, cuda, or cuda:1 for the second GPU.")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(
            f"`--device` is {name!r}, but torch {torch.__version__} finds no GPU with CUDA. Install a driver and a "
            "torch with CUDA, or pass `--device cpu`, which counts operations, but does not measure times of a GPU."
        )
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        expected = f"cuda:0 to cuda:{last}" if last else "cuda:0"
        raise ValueError(
            f"`--device` is {name!r}, but this machine has {counted(last + 1, 'GPU')}; expected {expected}. Pass "
            f"`--device cuda:{last}`."
        )
    with torch.cuda.device(device):
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(
                f"`--dtype` is bfloat16, but {torch.cuda.get_device_name(device)} does not compute in bfloat16. Pass "
                "`--dtype float16` or `--dtype float32`."
            )
    return device


def main(
    shape: Annotated[
        Literal[*SHAPES], typer.Option(help="Model whose number and sizes of layers are used.")
    ] = "mistral-7b",
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1, ...")] = "cuda",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Precision of the base model.", show_default="bfloat16; float32 on a CPU"),
    ] = None,
    passages: Annotated[
        str,
        typer.Option(help="Numbers of passages per question, separated by commas; they are measured in this order."),
    ] = "5,20,1",
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes, separated by commas.", show_default="1,16,32; 1 on a CPU")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time limit in seconds. Measurements that have not started by then are left out.")
    ] = 240.0,
    passage_attention: Annotated[
        Literal["joint", "separate"],
        typer.Option(
            help="joint: slots attend to their own and to earlier passages; separate: only to their own passage."
        ),
    ] = "joint",
    output: Annotated[Path | None, typer.Option(help="Folder for the report and its table.")] = None,
) -> None:
    """Compare slots with text on a model that has random weights and the shape of a well-known model. Measure the
    number of operations, the memory, and the times of the first token, of a further token and of training steps."""
    start = time.perf_counter()
    is_cpu = device.partition(":")[0] == "cpu"
    backbone_dtype = getattr(torch, dtype or ("float32" if is_cpu else "bfloat16"))
    place = find_device(device, backbone_dtype)
    sizes = parse_sizes(passages, "--passages")
    batch_sizes = parse_sizes(batches or ("1" if is_cpu else "1,16,32"), "--batches")
    if not is_cpu:
        longest = BEFORE + max(sizes) * SENTENCES * SENTENCE + AFTER
        check_fits(shape, backbone_dtype, longest, str(place), *torch.cuda.mem_get_info(place))
    report = {"shape": shape, "is_cut": is_cpu and shape != "tiny", "dtype": str(backbone_dtype).removeprefix("torch.")}
    report |= {
        "passage_attention": passage_attention,
        "passages": sizes,
        "batches": batch_sizes,
        "machine": describe_benchmark(place),
    }
    columns = (*Progress.get_default_columns()[:2], TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task("Building the model", total=1 + len(batch_sizes) * (1 + len(sizes)) + 1)
        config = make_config(shape, report["is_cut"], passage_attention)
        aligner = build_aligner(config, place, backbone_dtype)
        show = partial(progress.update, task, advance=1)
        bench = Bench(aligner, base_of(aligner, backbone_dtype), start + seconds, lambda what: show(description=what))
        bench.run(sizes, batch_sizes)
    num_aligner = sum(parameter.numel() for _, parameter in aligner.aligner_parameters())
    report["parameters"] = {"backbone": aligner.num_parameters() - num_aligner, "aligner": num_aligner}
    report |= {"seconds": time.perf_counter() - start, "rows": bench.rows, "left_out": bench.left_out}
    table = "\n".join(shape_table(report)) + "\n"
    typer.echo(table)
    typer.echo(json.dumps(report))
    if output is not None:
        write_atomically(output / SHAPE_REPORT, json.dumps(report, indent=1) + "\n")
        write_atomically(output / "shape.md", table)


if __name__ == "__main__":
    run_command(main)
