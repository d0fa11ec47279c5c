"""Validates an aligner on the articles that a recipe holds out: losses, answers, refusals.

    python -m arcaligner.train.validate --recipe train/recipes/smollm2_135m/2_grounding.yaml --runs runs/mine
    python -m arcaligner.train.validate --recipe RECIPE --runs runs/a,runs/b --last 10 --answers 300 --output runs/mean

All decisions (which checkpoints to average, rates, learning rates, when to stop) are taken on these numbers; the test
sets are asked for a finished aligner only. The held-out rows are the same for each aligner: those of the recipe's
`train_files` and `reconstruction_files` whose articles it does not train on. A fifth of the questions is asked about
the nearest passage that does not answer them.

Losses come with their standard errors. `--against FOLDER` asks another aligner the same: the error of the difference,
which is what decides between the two.

With `--answers 300 --among 5 --max-passages 1,2` the questions are asked among other passages, and of these the
likeliest are read.

With `--output`, the mean of the checkpoints is written there; `train/confidence.py` then fits its confidence.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

from ..base_model_arcaligner import head_nll
from ..common.files import markdown_table, run_command, stable_number, write_whole
from ..common.rows import Row, token_f1
from ..configuration_arcaligner import check_gates
from ..modeling_arcaligner import ArcAlignerForCausalLM
from ..pipeline_arcaligner import check_max_passages
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.export import save_stage
from .data import ContextCollator, ExampleBuilder, encode_slots, read_slots, slot_inputs
from .metrics import greedy_answers, ranked_passages, with_likeliest
from .recipe import RecipeArguments
from .run import last_checkpoints, mean_of_checkpoints, read_keys
from .selection import NearestPassages, open_part, own_passages

UNANSWERABLE = 0.2  # share of the validation questions
BATCH = 16


def read_recipe(path: Path, data_dir: str | None) -> RecipeArguments:
    """The keys of a recipe's file that are ours, with the folder of the data where one is given."""
    names = {each.name for each in dataclasses.fields(RecipeArguments)}
    keys = {name: value for name, value in read_keys(path.read_text(encoding="utf-8")).items() if name in names}
    return RecipeArguments(**keys | ({} if data_dir is None else {"data_dir": data_dir}))


def kind_of(row: Row) -> str:
    """The set of questions that a row comes from: what its id begins with."""
    return row["id"].partition("_")[0]


def asked_rows(
    recipe: RecipeArguments,
    number: int,
    held_out: bool = True,
    unanswerable: float = UNANSWERABLE,
    in_article: float = 0.0,
    among: Sequence[int] = (1,),
) -> list[Row]:
    """About `number` questions of the held-out articles, or of the others, with the passages that they are asked about,
    as many of each set as of the others where there are enough. `is_answered` says whether the passages answer them;
    a share of `unanswerable` is asked about the nearest passage that does not, and a share `in_article` of these about
    the nearest one of the same article, which is harder to tell. Each has one of the numbers of passages in `among`:
    where it has fewer, the nearest ones that hold no answer are added."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    nearest = []
    for source in recipe.train_files:
        part = list(open_part(recipe, source, held_out))
        nearest.append(NearestPassages(part))
        for row in part:
            if row["question"].strip() and row["answers"]:
                by_kind[kind_of(row)].append(row | {"source": len(nearest) - 1})
    for rows in by_kind.values():
        rows.sort(key=lambda row: stable_number(f"validate:{row['id']}", 2**60))
    chosen, left = [], number
    for place, rows in enumerate(sorted(by_kind.values(), key=len)):
        taken = rows[: max(1, left // (len(by_kind) - place))]
        left -= len(taken)
        settings = recipe.no_answer, unanswerable, in_article
        for row in taken:
            row = _as_asked(row, near := nearest[row["source"]], *settings)
            size = among[stable_number(f"size:{row['id']}", len(among))]
            chosen.append(row | {"passages": _among_others(row, near, size)})
    return chosen


def _among_others(row: Row, nearest: NearestPassages, number: int) -> list[dict[str, str]]:
    """The row's passages in one piece somewhere among the nearest to the question, `number` in all."""
    passages = row["passages"]
    if number <= len(passages):
        return passages
    answers = row["answers"] if row["is_answered"] else row["own_answers"]
    own = row.get("own_passages", [])  # may answer without holding the answer's words, such as "yes"
    others = nearest.without_answer(row["question"], answers, [*passages, *own], number - len(passages))
    place = stable_number(f"among:{row['id']}", len(others) + 1)
    return [*others[:place], *passages, *others[place:]]


def _as_asked(row: Row, nearest: NearestPassages, no_answer: str, share: float, in_article: float) -> Row:
    if stable_number(f"unanswerable:{row['id']}", 100) < 100 * share:
        asked = row["question"], row["answers"], row["passages"], 1
        is_inside = stable_number(f"in article:{row['id']}", 100) < 100 * in_article
        near = (is_inside and nearest.without_answer(*asked, in_article=True)) or nearest.without_answer(*asked)
        if near:
            own = {"own_answers": row["answers"], "own_passages": row["passages"]}
            return row | {"passages": near, "answers": [no_answer], "is_answered": False} | own
    return row | {"passages": own_passages(row)[0], "is_answered": True}


def held_out_texts(recipe: RecipeArguments, number: int) -> list[Row]:
    """Held-out passages to read back."""
    rows = [row for source in recipe.reconstruction_files for row in open_part(recipe, source, held_out=True)]
    return sorted(rows, key=lambda row: stable_number(f"validate:{row['id']}", 2**60))[:number]


@torch.inference_mode()
def target_losses(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, examples: Sequence[dict], rate: int | str
) -> np.ndarray:
    """From slots at a rate the NLL of each example's target tokens (Eq. 10), summed, and their number:
    (num_examples, 2)."""
    collator = ContextCollator(
        processor.context_token_id, processor.tokenizer.pad_token_id or 0, (rate,), bool(model.config.word_parts)
    )
    losses = np.zeros((len(examples), 2))
    shortest_first = sorted(range(len(examples)), key=lambda number: examples[number]["length"])
    for start in tqdm(range(0, len(examples), BATCH), desc=f"losses, rate {rate}", leave=False):
        some = shortest_first[start : start + BATCH]
        batch = collator([examples[number] for number in some])
        slots = read_slots(model.config, batch, encode_slots(processor, batch))
        labels, mask = batch["labels"][:, 1:], (batch["turn_ids"] >= 0).long()
        hidden = model.model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False, **slots)
        for row, number in enumerate(some):
            is_target = labels[row] != -100
            states, targets = hidden.last_hidden_state[row, :-1][is_target], labels[row][is_target]
            nll = head_nll(states, targets, model.lm_head, model.config.text_config)
            losses[number] = nll.item(), is_target.sum().item()
    return losses


def means_and_errors(losses: np.ndarray, kinds: list[str], articles: list[str]) -> dict[str, tuple[float, float]]:
    """By kind the mean of `losses` (num_examples, 2) per target token, and its standard error, of drawing articles,
    since questions about one are alike (infinite for one alone).

    >>> means_and_errors(np.array([[1.0, 1], [3.0, 1], [4.0, 2]]), ["squad"] * 3, ["a", "b", "c"])
    {'squad': (2.0, 0.4330127018922193)}
    """
    sums: dict[str, dict[str, np.ndarray]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for loss, kind, article in zip(losses, kinds, articles, strict=True):
        sums[kind][article] += loss
    found = {}
    for kind, by_article in sorted(sums.items()):
        nll, tokens = np.array([*by_article.values()]).T
        mean, number = nll.sum() / tokens.sum(), len(tokens)
        spread = np.square(nll - mean * tokens).sum() * number / (number - 1) if number > 1 else math.inf
        found[kind] = float(mean), math.sqrt(spread) / float(tokens.sum())
    return found


def answers(
    model: ArcAlignerForCausalLM, processor: ArcAlignerProcessor, rows: list[Row], rate: int | str
) -> list[dict[str, Any]]:
    """Greedy answers to `rows`: F1 and whether it was refused: said to be `no_answer`, or below the threshold."""
    found = []
    rows = sorted(rows, key=lambda row: sum(len(each["text"]) for each in row["passages"]))
    for start in tqdm(range(0, len(rows), BATCH), desc=f"answers, rate {rate}", leave=False):
        some = rows[start : start + BATCH]
        inputs = slot_inputs(processor, some, tokens_per_slot=rate)
        asked = [row["question"] for row in some], [row["passages"] for row in some]
        texts, sure = greedy_answers(model, processor, inputs, *asked)
        least = processor.answer_probe["threshold"] if processor.answer_probe else 0.0
        for row, text, confidence in zip(some, texts, sure, strict=True):
            found.append(
                {
                    "kind": kind_of(row),
                    "is_answered": row["is_answered"],
                    "f1": token_f1(text, row["answers"]),
                    "is_refused": text == processor.no_answer or (confidence is not None and confidence < least),
                }
            )
    return found


def refusal_scores(found: list[dict[str, Any]]) -> dict[str, float]:
    """In percent: unanswerable questions refused, answerable ones wrongly refused, and the F1 that these lose."""
    answered = [each for each in found if each["is_answered"]]
    unanswered = [each for each in found if not each["is_answered"]]
    f1_lost = sum(each["f1"] for each in answered if each["is_refused"])
    return {
        "refused": 100 * sum(each["is_refused"] for each in unanswered) / max(1, len(unanswered)),
        "wrongly refused": 100 * sum(each["is_refused"] for each in answered) / max(1, len(answered)),
        "F1 lost": 100 * f1_lost / max(1e-9, sum(each["f1"] for each in answered)),
    }


def validate(
    model,
    processor,
    recipe: RecipeArguments,
    rates: Sequence[int | str],
    number: int,
    num_answers: int,
    among: Sequence[int] = (1,),
    max_passages: Sequence[int] = (),
    other: tuple[ArcAlignerForCausalLM, ArcAlignerProcessor] | None = None,
) -> dict[str, dict]:
    """Everything, by rate and, for each number of `among` but 1, by the number of passages; of the answers also where
    only the likeliest `max_passages` of these are read. Losses are pairs of a mean and its standard error, also those
    by which the losses are above the ones of an `other` aligner."""
    if max_passages and (not num_answers or min(max_passages) >= max(among)):
        raise ValueError(
            f"`max_passages` is {list(max_passages)} for {num_answers} answers among {list(among)} passages; expected "
            "answers (`--answers`), among more passages (`--among`)."
        )
    for each in max_passages:
        check_max_passages(processor, each)
    asked_too = [(model, processor)] if other is None else [(model, processor), other]
    results = {}
    for size in among:
        rows = asked_rows(recipe, number, among=(size,))
        asked = rows[:: max(1, len(rows) // num_answers)] if num_answers else []
        fewer = [each for each in max_passages if each < size]
        texts = held_out_texts(recipe, number // 4 if size == 1 else 0)
        examples = [_examples(each, rows, texts) for _, each in asked_too]
        kinds, articles = ([each[part] for each in examples[0]] for part in (0, 1))
        for rate in rates:
            name = str(rate) if size == 1 else f"{rate}, {size} passages"
            losses = [
                target_losses(*each, [example for *_, example in some], rate)
                for each, some in zip(asked_too, examples, strict=True)
            ]
            results[name] = {"loss": means_and_errors(losses[0], kinds, articles)}
            if other is not None:
                if not np.array_equal(losses[0][:, 1:], losses[1][:, 1:]):
                    raise ValueError("The aligner of `--against` has other target tokens; expected the same tokenizer.")
                losses[0][:, 0] -= losses[1][:, 0]
                results[name]["difference"] = means_and_errors(losses[0], kinds, articles)
            if asked:
                results[name] |= _scores(answers(model, processor, asked, rate))
            ranked = []
            if fewer:
                store = model.slot_prefix_store(processor, max_bytes=0)
                ranked = ranked_passages(store, asked, tokens_per_slot=rate)
            for most in fewer:
                likely = with_likeliest(asked, ranked, most)
                results[f"{name}, {most} read"] = _scores(answers(model, processor, likely, rate))
    return results


def _examples(processor: ArcAlignerProcessor, rows: list[Row], texts: list[Row]) -> list[tuple[str, str, dict]]:
    """Kind, article and example of each question, then of each part of a text to read back."""
    builder = ExampleBuilder(processor, max_segments=8, tokens_per_slot=(2,))
    kinds = [kind_of(row) if row["is_answered"] else "unanswerable" for row in rows]
    made = [(kind, row, builder.question_examples([row])) for kind, row in zip(kinds, rows, strict=True)]
    made += [("read back", row, builder.reconstruction_examples([row])) for row in texts]
    return [
        (kind, row["passages"][0]["title"] or row["passages"][0]["text"], asdict(example))
        for kind, row, examples in made
        for example in examples
    ]


def _scores(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind = defaultdict(list)
    for each in found:
        if each["is_answered"]:
            by_kind[each["kind"]].append(100 * each["f1"])
    return {"f1": {kind: sum(each) / len(each) for kind, each in sorted(by_kind.items())}, **refusal_scores(found)}


def table(results: dict[str, dict]) -> str:
    """The results as Markdown."""
    lines = []
    for measure, shown in (("loss", "{:.3f} ± {:.3f}"), ("difference", "{:+.3f} ± {:.3f}"), ("f1", "{:.1f}")):
        measured = {rate: each[measure] for rate, each in results.items() if measure in each}
        kinds = sorted({kind for each in measured.values() for kind in each})
        cells = [
            [rate, *(shown.format(*np.atleast_1d(each[kind])) if kind in each else "-" for kind in kinds)]
            for rate, each in measured.items()
        ]
        lines += [*markdown_table([measure, *kinds], cells), ""] if cells else []
    names = ("refused", "wrongly refused", "F1 lost")
    cells = [[rate, *(f"{each[name]:.3g}" for name in names)] for rate, each in results.items() if names[0] in each]
    return "\n".join(lines + (markdown_table(["rate", *names], cells) if cells else []))


def load_mean(folders: list[Path], dtype: str) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """The aligner with the mean of the weights of `folders`, and its processor."""
    processor = ArcAlignerProcessor.from_pretrained(folders[0])
    model = ArcAlignerForCausalLM.from_pretrained(folders[0], dtype=getattr(torch, dtype)).eval()
    if len(folders) > 1:
        processor.answer_probe = None  # other weights have other states
        model.load_state_dict(mean_of_checkpoints(folders, processor), strict=False)
    return model, processor


def main(
    recipe: Annotated[Path, typer.Option(help="The recipe of the stage: its data, and what is held out.")],
    runs: Annotated[str, typer.Option(help="Folders of runs or of aligners, separated by commas.")],
    last: Annotated[int, typer.Option(help="Last checkpoints of each run to average; 0 for the folders' own.")] = 0,
    rates: Annotated[str, typer.Option(help="Rates, separated by commas.")] = "2,4",
    number: Annotated[int, typer.Option("-n", help="Questions; a quarter as many texts.")] = 1000,
    num_answers: Annotated[int, typer.Option("--answers", help="Questions to answer as well; 0 for none.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for the mean.")] = None,
    among: Annotated[str, typer.Option(help="Passages of a question, the nearest others added; commas between.")] = "1",
    max_passages: Annotated[str, typer.Option(help="How many of these are read, the likeliest; commas between.")] = "",
    against: Annotated[Path | None, typer.Option(help="Folder of an aligner that is asked the same.")] = None,
    gate_mode: Annotated[str | None, typer.Option(help="off, adaptive or always, instead of the aligner's.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data, instead of the recipe's.")] = None,
    dtype: Annotated[str, typer.Option(help="The dtype of the backbone.")] = "float32",
) -> None:
    """Prints losses, answers and refusals on held-out articles."""
    check_gates(gate_mode=gate_mode)
    data = read_recipe(recipe, data_dir)
    folders = [Path(each) for each in runs.split(",")]
    if last:
        folders = [checkpoint for folder in folders for checkpoint in last_checkpoints(folder, last)]
    model, processor = load_mean(folders, dtype)
    own_mode, model.config.gate_mode = model.config.gate_mode, gate_mode or model.config.gate_mode
    wanted = [int(rate) if rate.isdecimal() else rate for rate in rates.split(",")]
    sizes, most = ([int(each) for each in given.split(",") if each] for given in (among, max_passages))
    other = None if against is None else load_mean([against], dtype)
    results = validate(model, processor, data, wanted, number, num_answers, sizes, most, other)
    print(table(results))
    if output is not None:
        model.config.gate_mode = own_mode
        save_stage(output, model, processor, recipe.read_text(encoding="utf-8"))
        write_whole(output / "validation.json", json.dumps(results, indent=1))


if __name__ == "__main__":
    run_command(main)
