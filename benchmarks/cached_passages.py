"""Time to the first token of a new question about a new combination of cached passages, and the cached bytes of each.

    python -m arcaligner.benchmarks.cached_passages --output FOLDER [--sizes 1,5,10,20]
        [--tokens-per-slot 2,4,8,16,segment]

    text                the passages' text without a cache, by the base model
    text_same_set       cached keys and values of the text of the same passages in the same order (prefix caching)
    text_apart          cached keys and values of each passage's text, computed separately, joined like those of slots
    slots_x2, ...       cached keys and values of each passage's slots, for each number of tokens per slot

The last two are also measured from a folder, `..._folder`: files with checksums, which neither this process nor the
system has in memory. Only `text_same_set` gets the passages of the round before.

Each round draws a few of the precomputed passages and a question about one of them. All arms answer it in turns, from
the text of the question to the first token: tokenizing, cache look-up, joining, prefill. The time does not depend on
the weights, so a checkpoint that was trained with joint passages is run with independent ones.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ..answering_arcaligner import Answerer, clear_text_caches, similarities_of
from ..common.files import (
    DEFAULT_CHECKPOINT,
    SQUAD_SAMPLE,
    describe_machine,
    digest,
    run_command,
    temporary_folder,
    write_atomically,
)
from ..common.rows import Row, read_rows
from ..configuration_arcaligner import check_length
from ..evaluation.analyses.speed import CACHED_REPORT, TOP_RANKED, cached_passages_table
from ..evaluation.answering import independent_text
from ..evaluation.settings import split_tokens_per_slot
from ..kv_cache_arcaligner import (
    PassageCache,
    cache_of,
    join_keys_values,
    keys_values_of,
    load_keys_values,
    prefill_text,
    save_keys_values,
)
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..processing_arcaligner import ArcAlignerProcessor
from ..train.prompts import text_ids
from .arms import MIN_ROUNDS, first_tokens, join_rows, load_models, prefill, select_rows, share, time_rounds
from .latency import parse_sizes

SPARE = 4  # precomputed passages beyond those of the largest combination


class TextArms:
    """The base model with text: without a cache, with the cached passages of the previous round, or with independent
    `passages`, each cached in memory and in `folder`."""

    def __init__(self, base: PreTrainedModel, processor: ArcAlignerProcessor, passages: list[dict], folder: Path):
        self.base, self.processor, self.folder = base, processor, folder
        folder.mkdir(parents=True)
        self.cached: dict[str, torch.Tensor] = {}  # (num_layers, 2, heads, num_tokens, head_dim), by the text
        self._last: tuple[Row, Cache] | None = None
        prompt = independent_text(processor, {"question": "?", "passages": passages})
        self.prefix = prefill_text(base, prompt.prefix_ids)
        start = len(prompt.prefix_ids)
        for passage, ids in zip(passages, prompt.passages, strict=True):
            cache = cache_of(self._prefill(ids, join_keys_values([[self.prefix]], base.config)))
            self.cached[passage["text"]] = keys_values_of(cache, 0, start, start + len(ids))
            save_keys_values(self._path(passage), self.cached[passage["text"]], {})

    def uncached(self, row: Row) -> ModelOutput:
        """Answer from the whole text."""
        prefix, suffix = text_ids(self.processor, row)
        check_length(len(prefix) + len(suffix), "The prompt of text", self.base.config)
        output = self._prefill(prefix + suffix)
        self._last = row, cache_of(output)
        return output

    def same_set(self, row: Row) -> ModelOutput:
        """Answer the question of `row` from the passages of the last prompt of text."""
        last_row, before = self._last
        prefix, suffix = text_ids(self.processor, row | {"passages": last_row["passages"]})
        cache = share(before)
        cache.crop(len(prefix) - cache.get_seq_length())
        return self._prefill(suffix, cache)

    def independent(self, row: Row, from_folder: bool) -> ModelOutput:
        """Answer from cached passages. The positions of the question continue after the longest passage."""
        after = independent_text(self.processor, row | {"passages": []}).suffix_ids
        parts = [self.prefix]
        for passage in row["passages"]:
            file = (self._path(passage), {}, self.base.config, self.base.device)
            parts.append(load_keys_values(*file) if from_folder else self.cached[passage["text"]])
        start = self.prefix.shape[3] + max(part.shape[3] for part in parts[1:])
        positions = torch.arange(start, start + len(after), device=self.base.device)[None]
        return self._prefill(after, join_keys_values([parts], self.base.config), position_ids=positions)

    def _prefill(self, ids: list[int], cache: Cache | None = None, **positions: torch.Tensor) -> ModelOutput:
        return prefill(self.base, {"input_ids": torch.tensor([ids], device=self.base.device), **positions}, cache)

    def _path(self, passage: dict[str, str]) -> Path:
        return self.folder / f"{digest(passage['text'])}.safetensors"


def answer_from_cache(cache: PassageCache, row: Row, tokens_per_slot: int | str) -> ModelOutput:
    """Answer a row from the cached slots of its passages."""
    inputs = cache.prepare(row["question"], documents=row["passages"], tokens_per_slot=tokens_per_slot)
    return cache.prefill_suffix(inputs)


def answer_from_top_ranked(cache: PassageCache, row: Row, tokens_per_slot: int | str) -> ModelOutput:
    """Select one of the cached passages of a row, and answer from it, as is the default."""
    answerer = Answerer(cache.model, cache.processor, cache)
    (selection,) = answerer.select([row["question"]], [row["passages"]], 1, tokens_per_slot=tokens_per_slot)
    passages = [row["passages"][number] for number in selection.numbers]
    return answer_from_cache(cache, row | {"passages": passages}, tokens_per_slot)


def drop_page_cache(folder: Path) -> None:
    """Drop the files of a folder from the system's page cache. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # unwritten pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class CachedPassages:
    """Precomputed passages, and the alternatives ("arms") that answer from them. `models` are the aligner, with
    independent passages, and its base model; `rows` have a question and a passage each; `folder` is empty.

    Attributes: `arms`, by name the functions that compute the first token for a row; `folders`, by name those of the
    arms that read from one; `cached_bytes`, by name the cached bytes of a passage."""

    def __init__(
        self,
        models: tuple[ArcAlignerForCausalLM, PreTrainedModel],
        processor: ArcAlignerProcessor,
        rows: list[Row],
        compressions: list[int | str],
        folder: Path,
    ):
        (aligner, base), self.rows = models, rows
        self.device, self.encoder = str(base.device), processor.encoder
        passages = [row["passages"][0] for row in rows]
        text = TextArms(base, processor, passages, folder / "text_apart")
        self.text_tokens = sum(keys_values.shape[3] for keys_values in text.cached.values()) / len(rows)
        self.arms: dict[str, Callable[[Row], ModelOutput]] = {
            "text": text.uncached,
            "text_same_set": text.same_set,
            "text_apart": partial(text.independent, from_folder=False),
            "text_apart_folder": partial(text.independent, from_folder=True),
        }
        self.folders = {"text_apart_folder": text.folder}
        self.cached_bytes = {"text_apart": sum(keys_values.nbytes for keys_values in text.cached.values()) / len(rows)}
        per_slot = self.cached_bytes["text_apart"] / self.text_tokens
        for tokens_per_slot in compressions:
            name, path = f"slots_x{tokens_per_slot}", folder / f"slots_x{tokens_per_slot}"
            memory = PassageCache(aligner, processor, max_bytes=2**40)
            inputs = memory.prepare("?", documents=passages, tokens_per_slot=tokens_per_slot)
            disk = PassageCache(aligner, processor, max_bytes=0, folder=path)
            disk.precompute("?", documents=passages, tokens_per_slot=tokens_per_slot)
            self.cached_bytes[name] = inputs["context_passage_ids"].shape[1] * per_slot / len(rows)
            self.arms[name] = partial(answer_from_cache, memory, tokens_per_slot=tokens_per_slot)
            if Answerer(aligner, processor).can_score and tokens_per_slot == processor.tokens_per_slot:
                self.arms[f"{name}{TOP_RANKED}"] = partial(
                    answer_from_top_ranked, memory, tokens_per_slot=tokens_per_slot
                )
            self.arms[f"{name}_folder"] = partial(answer_from_cache, disk, tokens_per_slot=tokens_per_slot)
            self.folders[f"{name}_folder"] = path

    def forget_words(self) -> None:
        """Drop the encoded words of all texts, which selecting a passage compares, but not the embeddings of passages:
        a corpus has these, but not the words."""
        clear_text_caches()
        similarities_of(self.encoder, "?", [row["passages"][0] for row in self.rows])

    def draw(self, k: int, number: int) -> Row:
        """Draw a question about `k` passages; the same `number` gives the same one in each run."""
        rows = random.Random(number).sample(self.rows, k)
        return join_rows(rows[-1:] + rows[:-1])

    @torch.no_grad()
    def measure(self, k: int, seconds: float) -> dict[str, Any]:
        """Seconds to the first token of each arm over combinations of `k` passages."""

        def before(name: str) -> None:
            if name in self.folders:
                drop_page_cache(self.folders[name])
            if name.endswith(TOP_RANKED):
                self.forget_words()

        def turns(number: int) -> dict[str, Callable[[], ModelOutput]]:
            row = self.draw(k, number)
            return {name: partial(arm, row) for name, arm in self.arms.items()}

        for arm in turns(0).values():  # warms up; `text` comes first, because `text_same_set` needs its cache
            arm()
        rounds = time_rounds(lambda number: turns(number + 1), self.device, seconds, before)
        return {"k": k, "rounds": len(rounds), "arms": {name: first_tokens(rounds, name, "text") for name in self.arms}}


def main(
    output: Annotated[
        Path, typer.Option(help="Folder for the report and, while the benchmark runs, for cached passages.")
    ],
    checkpoint: Annotated[str, typer.Option(help="An aligner: a folder or a Hub id.")] = str(DEFAULT_CHECKPOINT),
    sizes: Annotated[str, typer.Option(help="Numbers of passages per question, separated by commas.")] = "1,5,10,20",
    tokens_per_slot: Annotated[
        str, typer.Option(help="Tokens per slot: numbers or `segment`, separated by commas.")
    ] = "2,4,8,16,segment",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of the models.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
    seconds: Annotated[
        float,
        typer.Option(
            help="Seconds after which no further round starts, for each number of passages. A round measures each row "
            f"of the table once. At least {MIN_ROUNDS} rounds are measured."
        ),
    ] = 60.0,
    data: Annotated[Path, typer.Option(help="JSON Lines file of questions with passages.")] = SQUAD_SAMPLE,
) -> None:
    """Measure the time to the first token of a new question about cached passages. Compare passages as slots with
    passages as text."""
    numbers_of_passages = parse_sizes(sizes)
    models = load_models(checkpoint, getattr(torch, dtype), device, passage_attention="separate")
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    processor.passage_attention = "separate"
    rows = select_rows(read_rows(data), processor, max(numbers_of_passages) + SPARE)
    output.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output, ".cached-") as folder:
        cached = CachedPassages(models, processor, rows, split_tokens_per_slot(tokens_per_slot), folder)
        report = {
            "model": checkpoint.rstrip("/").split("/")[-1],
            "own_tokens_per_slot": processor.tokens_per_slot,
            "dtype": dtype,
            "data": data.name,
            "machine": describe_machine(device),
            "known_passages": len(rows),
            "tokens_per_passage": cached.text_tokens,
            "kept_bytes": cached.cached_bytes,
            "sizes": [cached.measure(k, seconds) for k in numbers_of_passages],
        }
    typer.echo("\n".join(cached_passages_table(report)))
    typer.echo(json.dumps(report))
    write_atomically(output / CACHED_REPORT, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
