"""Every table, figure and case study of the paper, from questions to Markdown and SVG: `arcaligner reproduce`.

    python -m arcaligner reproduce table1 --recipe smollm2_135m --data FOLDER --questions 20
    python -m arcaligner reproduce all --recipe paper --checkpoint user/aligner --device cuda

It uses `evaluate`: answers, methods and metrics are those of the run's folder, and a second run does only what is
missing. Results are written to `paper` in that folder: a page for each part and, for figures, the picture and its
numbers. A page compares our numbers with those that the paper prints. The paper prints none for its figures.
"""

import itertools
import json
import logging
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..common.files import CASE_STUDIES, digest, markdown_table, read_json_lines, write_atomically
from ..common.rows import Row
from ..pipeline_arcaligner import ArcAlignerPipeline
from ..processing_arcaligner import ArcAlignerProcessor
from ..share.hub import FEW_QUESTIONS
from ..train.examples import open_corpus
from ..train.stages import RECIPES
from .analyses import categories, gates, perplexity
from .analyses.figures import draw_bars, draw_ratios, save_figure
from .answering import load_aligner
from .chat_endpoint import ChatEndpoint
from .evaluate import answer_all, load_rows
from .judge import judge_run, judged_scores, judges_of
from .methods import MissingMethodError, find_method, fingerprint
from .metrics import shown_interval
from .results import CONTAIN_GOLD, PAPER, evidence, method_titles, sets_table, summarize, table
from .retrieval import RetrievalSettings, recall_table, retrieve
from .runs import AnswerFile
from .settings import EvaluationSettings
from .tasks import TASKS, select_passages, wrong_passages

logger = logging.getLogger(__name__)

FOLDER = "paper"  # in a run's folder
SEGMENT = "_xsegment"  # suffix of methods with one slot per sentence, as in the paper
LLMLINGUAS = ("llmlingua2", "llmlingua")  # the paper's, and a variant whose scores come from the backbone
ABLATIONS = ("no_recursion", "max_loop", "no_lora")
HELD_OUT = 10_000  # texts that are reconstructed, as many as in the paper
CONTROL = ("all_positions", "slot_positions")  # methods that are not in the paper
# The paper's names of methods. A name that ends in tokens per slot is looked up without this end.
PAPER_NAMES = {
    "naive": "Naive",
    "standard_rag": "StandardRAG",
    "xrag": "xRAG",
    "cocom_x4": "COCOM x4",
    "cocom_x16": "COCOM x16",
    "llmlingua2": "LLMLingua-2",
    "arcaligner": "ArcAligner",
    "no_recursion": "w/o Recursion",
    "max_loop": "w/o Gate (Max Loop)",
    "no_lora": "w/o LoRA & Recursion",
}
FIRST, SECOND = ("2wikimultihopqa", "hotpotqa", "nq"), ("popqa_longtail", "triviaqa", "webq")
TASKS_OF_PAPER = (*FIRST, *SECOND)
FOUR = ("2wikimultihopqa", "hotpotqa", "nq", "popqa_longtail")  # the paper does not say which four


class MissingPartError(Exception):
    """What a part needs is not on this machine; the message says how to get it."""


@dataclass
class Reproduction:
    """
    The parts of the paper for an aligner.

    Args:
        settings ([`EvaluationSettings`]): Settings of a recipe, with all of `TASKS_OF_PAPER`. Each part replaces the
            methods.
        num_questions (`int`, *optional*): Maximum number of questions of each task, and of texts.
    """

    settings: EvaluationSettings
    num_questions: int | None = None
    recalls: dict[str, dict[str, Any]] = field(default_factory=dict)  # of retrieval, by task
    skipped: dict[str, str] = field(default_factory=dict)  # sets and methods of the current part, with the reason

    @property
    def retrieval(self) -> RetrievalSettings | None:
        """Settings of the retrieval, if the recipe has them."""
        keys = self.settings.reproduce.retrieval
        return None if keys is None else RetrievalSettings(**keys)

    @property
    def folder(self) -> Path:
        return self.settings.output / FOLDER

    def suffix(self, checkpoint: str) -> str:
        """The suffix of methods that use an aligner with one slot per sentence; empty if that is its default."""
        return "" if ArcAlignerProcessor.from_pretrained(checkpoint).tokens_per_slot == "segment" else SEGMENT

    @property
    def gated(self) -> EvaluationSettings:
        """The settings of the aligner whose gates were trained, with another folder."""
        gated = self.settings.reproduce.gated
        if gated is None:
            return self.settings
        return replace(self.settings, checkpoint=gated, output=self.settings.output / "gated")

    # Steps

    def skip(self, title: str, reason: object) -> None:
        """Record and log what the current part lacks."""
        logger.warning("Skipped %s: %s", title, reason)
        self.skipped[title] = str(reason)

    def answer(
        self, settings: EvaluationSettings, tasks: Sequence[str], methods: Sequence[str], floor: bool = False
    ) -> dict[str, Any]:
        """Answer the available tasks with the available methods, and return the sets of their results, of these methods
        only."""
        about = {} if self.retrieval is None else {"passages": "given", "about": self.retrieval.about}
        task_settings = {name: replace(settings.tasks[name], **about) for name in tasks}
        run_settings, rows = replace(settings, tasks=task_settings, methods=list(methods)), {}
        for name in tasks:
            try:
                rows[name] = self.load(name, run_settings)
            except (FileNotFoundError, OSError) as error:
                self.skip(TASKS[name].title, error)
        if not rows:
            raise MissingPartError(
                f"None of the question sets {', '.join(TASKS[name].title for name in tasks)} could be loaded; the "
                "messages above say why. Pass a folder with their files with `--data`."
            )
        wrong = self.floors(rows) if floor else {}
        on_floor = len([name for name in methods if name != "naive"])
        total = len(methods) * sum(map(len, rows.values())) + on_floor * sum(map(len, wrong.values()))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, transient=True) as progress:
            bar = progress.add_task("All answers", total=total)
            self.skipped |= answer_all(rows, wrong, run_settings, lambda number: progress.advance(bar, number))
        self.judge(settings.output)
        sets = summarize(settings.output)["sets"]
        titles = [TASKS[name].title for name in rows]
        return {title: _only(sets[title], methods) for title in titles if title in sets}

    def floors(self, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
        """The questions of each task with the passages of other questions, which do not answer them. A task with too
        few questions for this is skipped."""
        wrong = {}
        for name, task_rows in rows.items():
            try:
                wrong[name] = wrong_passages(task_rows, TASKS[name].title)
            except ValueError as error:
                self.skip(f"{TASKS[name].title}, floor", error)
        return wrong

    def load(self, name: str, settings: EvaluationSettings) -> list[Row]:
        """The questions of a task with the passages to use: those of its rows, or the first retrieved one."""
        if self.retrieval is None:
            return load_rows(name, settings)
        rows = TASKS[name].load(self.settings.data, settings.tasks[name].num_questions)
        retrieved, self.recalls[name] = retrieve(
            self.retrieval, name, rows, self.settings.output / "retrieved", str(settings.data or ""), settings.device
        )
        return select_passages(retrieved, "given", settings.tasks[name].top_k or 1)

    def judge(self, run: Path) -> None:
        """Judge the answers of a run that have no verdict yet, if the endpoint of the judge is named."""
        of = self.settings.reproduce
        if of.endpoint is not None:
            logger.info("\n".join(judge_run(run, ChatEndpoint(of.judge, of.endpoint))))

    def cached(self, name: str, inputs: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The numbers of a step. They are computed by `make`, and cached until its `inputs` change."""
        path, key = self.folder / f"{name}.json", digest(inputs)
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["made_of"] == key:
                return stored["numbers"]
        numbers = make()
        write_atomically(path, json.dumps({"made_of": key, "numbers": numbers}, indent=1, ensure_ascii=False))
        return numbers

    def write(self, name: str, heading: str, lines: list[str], figure: Figure | None = None) -> Path:
        """Write a part's page and picture, with what is missing and why, and return the page's path."""
        picture = [] if figure is None else [f"![{heading}]({name}.svg)", ""]
        if self.skipped:
            reasons = (f"- {title}: {' '.join(reason.split())}" for title, reason in self.skipped.items())
            lines = [*lines, "", "Not measured:", "", *reasons]
        if figure is not None:
            save_figure(self.folder / f"{name}.svg", figure)
        write_atomically(path := self.folder / f"{name}.md", "\n".join([f"# {heading}", "", *picture, *lines, ""]))
        return path

    # Parts

    def main_table(self, name: str, title: str, tasks: Sequence[str]) -> Path:
        """Table 1 or 2."""
        methods = main_methods(self.suffix(self.settings.checkpoint))
        sets = self.answer(self.settings, tasks, methods, self.settings.floor)
        lines = [*comparison(sets, methods), *costs(sets), *footnote_of(sets, self.settings, explains_em=False)]
        return self.write(name, title, lines)

    def recall(self) -> Path:
        """Recall of the retriever before and after re-ranking."""
        if self.retrieval is None:
            raise MissingPartError(
                "The recipe has no `retrieval` in `reproduce`, so recall cannot be measured. Add `retrieval` with the "
                "keys `pool` and `retriever`, as in evaluation/recipes/paper.yaml."
            )
        for name in TASKS_OF_PAPER:
            try:
                self.load(name, self.settings)
            except (FileNotFoundError, OSError) as error:
                self.skip(TASKS[name].title, error)
        if not self.recalls:
            raise MissingPartError(
                "None of the paper's question sets could be loaded; the messages above say why. Pass a folder with "
                "their files with `--data`."
            )
        lines = [*recall_table(self.recalls), "", f"The passage that is used: {self.retrieval.about}."]
        return self.write("recall", TITLES["recall"], lines)

    def ablation(self) -> Path:
        """Table 3."""
        settings = self.gated
        suffix = self.suffix(settings.checkpoint)
        methods = [*(f"{method}{suffix}" for method in ("arcaligner", *ABLATIONS)), *CONTROL]
        sets = self.answer(settings, ("hotpotqa", "nq", "triviaqa"), methods)
        lines = [*comparison(sets, methods), *footnote_of(sets, settings, explains_em=False)]
        return self.write("ablation", TITLES["ablation"], lines)

    def backbones(self) -> Path:
        """Figure "Accuracy across different backbone language models"."""
        settings_of = {self.settings.reproduce.backbone: self.settings} | {
            title: replace(self.settings, checkpoint=checkpoint, output=self.settings.output / "backbones" / title)
            for title, checkpoint in self.settings.reproduce.backbones.items()
        }
        sets_of_backbone = {}
        for title, settings in settings_of.items():
            methods = ["naive", "standard_rag", f"arcaligner{self.suffix(settings.checkpoint)}"]
            sets_of_backbone[title] = self.answer(settings, FOUR, methods)
        lines, figure = backbones_part(sets_of_backbone)
        for title, sets in sets_of_backbone.items():
            lines += ["", f"**{title}**", "", *footnote_of(sets, settings_of[title])]
        return self.write("backbones", TITLES["backbones"], lines, figure)

    def perplexity(self) -> Path:
        """Figure "Reconstruction perplexity"."""
        named = self.settings.reproduce.stage_one
        arms, wanted = {}, {title: path for title, path in named.items() if Path(path).is_dir()}
        for title, path in named.items():
            if title not in wanted:
                self.skip(title, f"There is no folder {path}. To train this aligner, run `{stage_one_command(path)}`.")
        if not wanted:
            raise MissingPartError(
                "This machine has no checkpoint of stage I. Train one with `python -m arcaligner train --recipe "
                "smollm2_135m --stage 1`, and add its folder to `stage_one` of `reproduce` in the recipe."
            )
        rows = self.held_out()
        wanted = {perplexity.BASE: next(iter(wanted.values()))} | wanted
        for title, path in wanted.items():
            inputs = [fingerprint(path), digest([row["passages"] for row in rows]), title == perplexity.BASE]
            slug = title.lower().replace("/", "_").replace(" ", "_")
            arms[title] = self.cached(f"perplexity_{slug}", inputs, lambda p=path, t=title: self._arm(p, t, rows))
        lines = perplexity.perplexity_table(arms)
        return self.write("perplexity", TITLES["perplexity"], lines, perplexity.draw_perplexity(arms))

    def _arm(self, path: str, title: str, rows: list[Row]) -> dict[str, Any]:
        model, processor = load_aligner(path, self.settings.device)
        if title == perplexity.BASE:
            return perplexity.summarize_losses(perplexity.base_losses(model, processor, rows))
        losses = perplexity.slot_losses(model, processor, rows, "segment")
        return perplexity.summarize_losses(losses)

    def held_out(self) -> list[Row]:
        """Rows with texts that are not in the training data of stage I."""
        corpus = open_corpus(self.settings.reproduce.held_out, data_dir=str(self.settings.data or ""))
        rows = (row for row in corpus if any(passage["text"].strip() for passage in row["passages"]))
        return list(itertools.islice(rows, self.num_questions or HELD_OUT))

    def gates(self) -> Path:
        """Figure "Gate behavior analysis across layers"."""
        settings, sets = self.gated, {}
        model, processor = load_aligner(settings.checkpoint, settings.device)
        gates.require_gates(model, settings.checkpoint)
        for name in FOUR:
            try:
                of_task = replace(settings, tasks={name: settings.tasks[name]})
                rows = [row for row in self.load(name, of_task) if row["passages"]]
            except (FileNotFoundError, OSError) as error:
                self.skip(TASKS[name].title, error)
                continue
            inputs = [fingerprint(settings.checkpoint), digest([[row["id"], row["passages"]] for row in rows])]
            count = (model, processor, rows, settings.batch_size, TASKS[name].title, "segment")
            sets[TASKS[name].title] = self.cached(
                f"gates_{name}", inputs, lambda of=count: gates.summarize_loops(gates.count_loops(*of))
            )
        lines = [
            "The table and the figure show the mean number of passes of a slot at each layer. (The figure calls "
            "passes *loops*.) At layers without a row, every slot takes one pass. The last row is the mean over all "
            "layers.",
            "",
            *gates.loops_table(sets),
        ]
        return self.write("gates", TITLES["gates"], lines, gates.draw_loops(sets))

    def categories(self) -> Path:
        """Figure "4-way category analysis"."""
        ours = f"arcaligner{self.suffix(self.settings.checkpoint)}"
        sets = self.answer(self.settings, FOUR, [*categories.BASES, "xrag", ours])
        metric, names = metric_of([sets]), [name for name in TASKS if TASKS[name].title in sets]
        results = categories.categorize(self.settings.output, names, ["xrag", ours], right_by(metric))
        if not results:
            raise MissingPartError(
                "Naive and StandardRAG have answered none of the question sets; the messages above say why. Evaluate "
                f"both first: `arcaligner evaluate --tasks {','.join(FOUR)} --methods naive,standard_rag --output "
                f"{self.settings.output}`, with `--data FOLDER` if the sets are in files."
            )
        picture = categories.draw_categories(results, METRIC_NAMES[metric])
        right = {
            "em": "it contains a gold answer, an answer that the data set calls right",
            "acc": "the judge accepts it",
        }
        about = (
            "The first table shows the share of right answers in each group. (The figure calls it "
            f"{METRIC_NAMES[metric]}.) An answer is right if {right[metric]}. TT: Naive and StandardRAG are both "
            "right; TF: only Naive; FT: only StandardRAG; FF: neither. The rows *number of questions* show how many "
            "questions a group has."
        )
        note = footnote_of(sets, self.settings, has_f1=False, explains_em=False)
        lines = [about, "", *categories.categories_table(results), "", *note]
        return self.write("categories", TITLES["categories"], lines, picture)

    def ratios(self) -> Path:
        """Figure "Performance under different compression ratios"."""
        tasks, of = ("2wikimultihopqa", "popqa_longtail"), self.settings.reproduce
        points: dict[str, dict[str, dict[str, Any]]] = {}
        if of.ratios:  # a model for each, as in the paper
            for title, checkpoint in of.ratios.items():
                output = self.settings.output / "ratios" / title
                ratio_settings = replace(self.settings, checkpoint=checkpoint, output=output)
                method = f"arcaligner{self.suffix(checkpoint)}"
                for name, entry in self.answer(ratio_settings, tasks, [method]).items():
                    points.setdefault(name, {})[title] = entry["methods"][method]
        else:
            methods = [f"arcaligner_x{compression}" for compression in of.tokens_per_slot]
            for name, entry in self.answer(self.settings, tasks, methods).items():
                points[name] = {find_method(method).title: numbers for method, numbers in entry["methods"].items()}
        how = (
            "a model for each ratio"
            if of.ratios
            else "one checkpoint at several numbers of tokens per slot; the paper has a model for each"
        )
        lines, figure = ratios_part(points)
        return self.write("ratios", TITLES["ratios"], [f"Tokens per slot are measured; {how}.", "", *lines], figure)

    def cases(self) -> Path:
        """The three case studies."""
        checkpoint, lines = self.gated.checkpoint, []
        model, processor = load_aligner(checkpoint, "cpu")
        ask = ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")
        for number, row in enumerate(read_json_lines(CASE_STUDIES), start=1):
            case = gates.trace(ask, row, tokens_per_slot="segment", max_new_tokens=32)
            name = f"case_{number}"
            save_figure(self.folder / f"{name}.svg", gates.draw_trace(case, model.config.max_refinement_steps + 1))
            lines += [f"## Case {number}", "", f"![{case['question']}]({name}.svg)", "", *gates.trace_lines(case), ""]
        mode = model.config.gate_mode
        effects = {
            "adaptive": "trained gates decide about further passes",
            "always": "every slot takes all passes",
            "off": "every slot takes one pass",
        }
        about = (
            "In the paper's notation, `traj` is a list with an entry for each slot: the passes that this slot takes at "
            "a layer. `L0.` is one pass, `LL` two, `LLL` three. At layers without a `traj`, every slot takes one "
            f"pass. The answers are those of {Path(checkpoint).name} in the gate mode `{mode}`: {effects[mode]}."
        )
        return self.write("cases", TITLES["cases"], [about, "", *lines])


TITLES = {
    "table1": "Table 1: EM, F1 and Acc on 2WikiMultiHopQA, HotpotQA and Natural Questions",
    "table2": "Table 2: EM, F1 and Acc on PopQA_longtail, TriviaQA* and WebQuestions",
    "recall": "Recall of the retriever, before and after re-ranking",
    "ablation": "Table 3: ablations on HotpotQA, Natural Questions and TriviaQA*",
    "backbones": "Right answers of three methods, by backbone",
    "perplexity": "Reconstruction perplexity after stage I",
    "gates": "Mean passes of a slot at each layer",
    "categories": "Right answers in the groups TT, TF, FT and FF",
    "ratios": "F1 and EM at different compression ratios",
    "cases": "Case studies: the passes of each slot",
}
PARTS: dict[str, Callable[[Reproduction], Path]] = {
    "table1": lambda reproduction: reproduction.main_table("table1", TITLES["table1"], FIRST),
    "table2": lambda reproduction: reproduction.main_table("table2", TITLES["table2"], SECOND),
    "recall": Reproduction.recall,
    "ablation": Reproduction.ablation,
    "backbones": Reproduction.backbones,
    "perplexity": Reproduction.perplexity,
    "gates": Reproduction.gates,
    "categories": Reproduction.categories,
    "ratios": Reproduction.ratios,
    "cases": Reproduction.cases,
}
ALL = "all"


def reproduce(part: str, reproduction: Reproduction) -> list[Path]:
    """
    Make a part of the paper, or with `"all"` every part that can be made on this machine. Return the pages.

    Raises:
        `ValueError`: an unknown part, or one whose models or data are not on this machine. With `"all"` such a part is
            named in the log, and the others are made.
    """
    if part != ALL and part not in PARTS:
        raise ValueError(f"The part to reproduce is {part!r}; expected one of {', '.join(PARTS)}, or {ALL}.")
    pages = []
    for name in PARTS if part == ALL else [part]:
        reproduction.skipped = {}
        try:
            pages.append(PARTS[name](reproduction))
        except (MissingPartError, MissingMethodError, ValueError, OSError) as error:
            if part != ALL:
                raise ValueError(f"{name}: {error}") from error
            logger.warning("Left out %s: %s", name, error)
    if not pages:
        raise ValueError(
            "No part of the paper could be reproduced; the warnings above say why. Install or train what is missing."
        )
    return pages


# Numbers


METRIC_NAMES = {"em": "EM", "f1": "F1", "acc": "Acc"}


def find_base(method: str) -> str:
    """The name of a method without its tokens per slot, if the paper's name lacks them.

    >>> find_base("arcaligner_xsegment"), find_base("xrag")
    ('arcaligner', 'xrag')
    """
    base = method.rpartition("_x")[0]
    return method if method in PAPER_NAMES or base not in PAPER_NAMES else base


def score(numbers: dict[str, Any], metric: str) -> list[float] | None:
    """Mean and interval of a method's metric; Acc is by the first judge."""
    if metric == "acc":
        return next(iter(numbers.get("acc", {}).values()), None)
    return numbers[metric]


def metric_of(results: Sequence[dict[str, Any]]) -> str:
    """`"acc"`, as in the paper, if all answers of these sets were judged, else `"em"`."""
    entries = [numbers for sets in results for numbers in _numbers(sets)]
    return "acc" if entries and all(score(numbers, "acc") for numbers in entries) else "em"


def right_by(metric: str) -> Callable[[AnswerFile], dict[str, bool]]:
    """A function that says, for the answers of a file by their ids, whether each is right by EM or by the first
    judge."""
    if metric == "acc":
        return lambda file: {key: score == 1 for key, score in judged_scores(file, judges_of(file)[0]).items()}
    return lambda file: {answer["id"]: answer["em"] == 1 for answer in file.read()}


def _only(entry: dict[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """A set's entry with some of its methods only."""
    return entry | {"methods": {name: entry["methods"][name] for name in methods if name in entry["methods"]}}


def stage_one_command(path: str) -> str:
    """The command that makes a checkpoint after stage I. Each recipe of the package writes to a folder of its own name.

    >>> stage_one_command("runs/xrag/1_reconstruction")
    'python -m arcaligner train --recipe xrag --stage 1'
    """
    name = Path(path).parent.name
    return f"python -m arcaligner train --recipe {name if (RECIPES / name).is_dir() else 'RECIPE'} --stage 1"


# Tables


def main_methods(suffix: str) -> list[str]:
    """Methods of Tables 1 and 2. `suffix` ends the names of the aligner's methods with one slot per segment, as in the
    paper. The fine-tuned reader shows what text is worth."""
    ours = dict.fromkeys((f"arcaligner{suffix}", "arcaligner"))
    return ["naive", "standard_rag", "full_text_lora", "xrag", "cocom_x4", "cocom_x16", *LLMLINGUAS, *ours]


def published_table(results: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    """Markdown lines of Table 1 or 2 for the results of the shipped aligner."""
    titles = [TASKS[name].title for name in tasks]
    sets = {title: _only(results["sets"].get(title, {"methods": {}}), main_methods(SEGMENT)) for title in titles}
    measured = {title: entry for title, entry in sets.items() if entry["methods"]}
    return [*comparison(sets, main_methods(SEGMENT)), *costs(measured), *_questions_of(measured)]


def comparison(sets: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """Markdown lines: EM / F1 / Acc of the paper and of ours in adjacent columns, a row for each method with numbers of
    either. The paper's methods that we did not run are included, so that each of its numbers is shown."""
    titles = {name: find_method(name).title for name in methods}
    paper = {title: PAPER["sets"].get(title, {}) for title in sets}
    rows, shown = [], set()
    for name, title in titles.items():
        named = PAPER_NAMES.get(find_base(name), "")
        named = "" if named in shown else named
        shown.add(named)
        cells = [
            cell for set_title in sets for cell in (_triple(paper[set_title].get(named)), _ours(sets[set_title], name))
        ]
        if set(cells) != {"-"}:
            rows.append([title, _paper_title(named) or "-", *cells])
    published = dict.fromkeys(name for numbers in paper.values() for name in numbers)
    known = [name for name in published if (name in ABLATION_NAMES) == _is_ablation(methods)]
    for named in dict.fromkeys(known):
        if named not in shown:
            cells = [cell for set_title in sets for cell in (_triple(paper[set_title].get(named)), "-")]
            rows.append(["-", _paper_title(named), *cells])
    columns = [column for title in sets for column in (f"{title}: paper", f"{title}: ours")]
    return [
        *_comparison_notes(rows),
        "",
        *markdown_table(["Method here", "Method in the paper", *columns], rows),
        "",
    ]


def _comparison_notes(rows: list[list[str]]) -> list[str]:
    """Lines of Markdown that explain the cells of [`comparison`], as far as the table has them."""
    cells = [cell for row in rows for cell in row]
    about = "Each cell of the next table has three numbers in percent, EM / F1 / Acc. Higher is better:"
    notes = [
        "*EM* is the share of answers that contain a gold answer, an answer that the data set calls right.",
        "*F1* is the overlap of the words of answer and gold answer.",
        "*Acc* is the share of answers that a judge, a chat model, accepts as right.",
    ]
    if any("[" in cell for cell in cells):
        few = f"if fewer than {FEW_QUESTIONS} questions were answered"
        notes.append(f"Brackets contain a 95 % interval of F1, shown {few}.")
    if any(" of " in cell for cell in cells):
        notes.append('"of N" at the end of a cell means that only N questions of the set were answered.')
    notes += [
        "A dash means not measured or, in the first two columns, that there is no such method.",
        "*paper* is what the paper reports, for Mistral 7B. *ours* is what we measured.",
    ]
    return [about, "", *_items(notes)]


def _items(notes: list[str]) -> list[str]:
    """A list of Markdown at the width of the pages."""
    return [line for note in notes for line in textwrap.wrap(f"- {note}", 120, subsequent_indent="  ")]


def backbones_part(sets_of_backbone: dict[str, dict[str, Any]]) -> tuple[list[str], Figure]:
    """Markdown lines and a bar chart of results by backbone and set."""
    metric = metric_of(list(sets_of_backbone.values()))
    bars = {
        (title, set_title): {
            PAPER_NAMES[find_base(name)]: score(numbers, metric)[0] for name, numbers in entry["methods"].items()
        }
        for title, sets in sets_of_backbone.items()
        for set_title, entry in sets.items()
    }
    methods = list(dict.fromkeys(name for values in bars.values() for name in values))
    rows = [
        [*names, *(f"{values[name]:.1f}" if name in values else "-" for name in methods)]
        for names, values in bars.items()
    ]
    label = f"{METRIC_NAMES[metric]}, %"
    columns = ["Backbone", "Set", *(f"{name}: {label}" for name in methods)]
    return markdown_table(columns, rows), draw_bars(bars, label)


def published_backbone(results: dict[str, Any], backbone: str) -> tuple[list[str], Figure]:
    """The figure of backbones for the results of the shipped aligner."""
    methods = ["naive", "standard_rag", f"arcaligner{SEGMENT}"]
    sets = {name: _only(results["sets"][name], methods) for name in _titles_in(results, FOUR, methods)}
    lines, figure = backbones_part({backbone: sets})
    return [*lines, "", *_questions_of(sets)], figure


def ratios_part(points: dict[str, dict[str, dict[str, Any]]]) -> tuple[list[str], Figure]:
    """A Markdown table and curves of `points`: the results of a set at each number of tokens per slot, by the title of
    the set, then by that of the method with this number."""
    rows = [
        [
            name,
            title,
            f"{numbers['compression_rate']:.1f}",
            numbers["questions"],
            f"{numbers['em'][0]:.1f}",
            f"{numbers['f1'][0]:.1f}",
        ]
        for name, by_ratio in points.items()
        for title, numbers in by_ratio.items()
    ]
    columns = ["Set", "Method", "Tokens per slot, measured", "Questions", "EM, %", "F1, %"]
    return markdown_table(columns, rows), draw_ratios(points)


def published_ratios(results: dict[str, Any], compressions: Sequence[int | str]) -> tuple[list[str], Figure]:
    """The figure of ratios for the results of the shipped aligner, at the default and at these `compressions`."""
    methods = ["arcaligner", *(f"arcaligner_x{compression}" for compression in compressions)]
    points = {
        name: {find_method(method).title: results["sets"][name]["methods"][method] for method in methods}
        for name in _titles_in(results, FOUR, methods)
    }
    return ratios_part(points)


def _titles_in(results: dict[str, Any], tasks: Sequence[str], methods: Sequence[str]) -> list[str]:
    """The titles of those tasks that all the methods answered."""
    titles = [TASKS[name].title for name in tasks if TASKS[name].title in results["sets"]]
    return [title for title in titles if all(name in results["sets"][title]["methods"] for name in methods)]


def _questions_of(sets: dict[str, Any]) -> list[str]:
    """Markdown lines: how many questions of each set were asked, about which passages."""
    if not sets:
        return []
    rows = [
        [title, entry["questions"], f"{PAPER['questions'][title]:,}", entry["passages"], f"{entry['recall'][0]:.0f}"]
        for title, entry in sets.items()
    ]
    few = [title for title, entry in sets.items() if entry["questions"] < FEW_QUESTIONS]
    note = f"Sets with too few questions for a comparison: {', '.join(few)}."
    columns = ["Set", "Questions here", "Questions in the paper", "Passages here", CONTAIN_GOLD]
    return [*_passages_note(sets), *markdown_table(columns, rows), *(["", note] if few else [])]


def _passages_note(sets: dict[str, Any]) -> list[str]:
    """Markdown lines before a table of sets: what its words on passages mean."""
    words = " ".join(entry["passages"] for entry in sets.values())
    notes = {
        "gold": "*Gold* passages are those that, according to the data set, a question needs.",
        "Contriever": "*Contriever* is a model that finds passages for a question.",
        "MiniLM": "*MiniLM* is all-MiniLM-L6-v2, which also finds passages.",
    }
    if "Contriever" not in words:
        notes["MiniLM"] = "*MiniLM* is all-MiniLM-L6-v2, a model that finds passages for a question."
    about = "The next table describes the questions and passages of each set."
    note = " ".join([about, *(text for word, text in notes.items() if word in words)])
    return [*textwrap.wrap(note, 120), ""]


ABLATION_NAMES = {PAPER_NAMES[name] for name in ABLATIONS}


def _is_ablation(methods: Sequence[str]) -> bool:
    return any(find_base(name) in ABLATIONS for name in methods)


def _triple(numbers: Sequence[float | None] | None, digits: int = 2) -> str:
    shown = ("-" if number is None else f"{number:.{digits}f}" for number in numbers or ())
    return " / ".join(shown) or "-"


def _paper_title(named: str) -> str:
    """The paper's name of a method with its compression, if it prints one.

    >>> _paper_title("xRAG"), _paper_title("COCOM x4"), _paper_title("Naive")
    ('xRAG, x128', 'COCOM x4', 'Naive')
    """
    compression = PAPER["rates"].get(named)
    return named if compression is None or named.endswith(f"x{compression}") else f"{named}, x{compression}"


def _ours(entry: dict[str, Any], method: str) -> str:
    """Our EM, F1 and Acc, with the number of questions if not all, and the interval of F1 if they are few."""
    if (numbers := entry["methods"].get(method)) is None:
        return "-"
    em, f1, acc = (score(numbers, metric) for metric in ("em", "f1", "acc"))
    f1_shown = shown_interval(f1) if numbers["questions"] < FEW_QUESTIONS else f"{f1[0]:.1f}"
    shown = f"{em[0]:.1f} / {f1_shown} / {_triple([acc and acc[0]], digits=1)}"
    return shown + (f" of {numbers['questions']}" if numbers["questions"] < entry["questions"] else "")


def costs(sets: dict[str, Any]) -> list[str]:
    """Markdown lines: each F1 with the wrong-passage floor, the retention and the measured compression."""

    def cell(entry: dict, method: str) -> str | None:
        shown, compression = evidence(entry, method), entry["methods"].get(method, {}).get("compression_rate")
        return shown if shown is None or compression is None else f"{shown}, x{compression:.1f}"

    if sets and not any("full_text_lora" in entry["methods"] for entry in sets.values()):
        text = (
            "*Text* is the row StandardRAG, the base model without fine-tuning. It answers in sentences, whose other "
            "words lower its F1, so more than 100 % does not mean that slots contain more than text."
        )
    else:
        text = "*Text* is the row StandardRAG, fine-tuned or, if it was not measured, StandardRAG."
    floors = [(numbers["floor"], numbers) for numbers in _numbers(sets) if "floor" in numbers]
    fewer = any(floor["questions"] < of_all["questions"] for floor, of_all in floors)
    of_n = ' "of N" means that it was measured on only N questions.' if fewer else ""
    has_default = any("arcaligner" in entry["methods"] for entry in sets.values())
    which = "In the next table, the row in bold is our default. The table" if has_default else "The next table"
    about = f"{which} repeats F1, and adds three numbers where they were measured:"
    notes = [
        f"*floor* is the F1 if the passages belong to another question, in percent.{of_n} If it is far below F1, the "
        "answers come from the passages.",
        "*retained* is the share of the gain from text that the method keeps: (F1 - closed book) / (F1 of text - "
        f"closed book). 100 % means as good as text. *Closed book* is the F1 of Naive. {text} There is no share if "
        "text is not clearly better than closed book, or if the three F1 were measured on different numbers of "
        "questions.",
        "*x* is the measured compression: the number of tokens of the passages, divided by the number of positions "
        "that they take in the prompt.",
    ]
    rows = table("F1 (floor, retained), compression", method_titles(sets), sets, cell)
    return [*textwrap.wrap(about, 120), "", *_items(notes), "", *rows]


def footnote_of(
    sets: dict[str, Any], settings: EvaluationSettings, has_f1: bool = True, explains_em: bool = True
) -> list[str]:
    """Markdown lines: what the numbers are of, how far F1 may be off if the part shows it, and what EM is if the page
    has not explained it yet."""
    intervals = [numbers["f1"] for numbers in _numbers(sets)]
    widths = [max(high - mean, mean - low) for mean, low, high in intervals]
    about_f1 = (
        f"The 95 % interval of each F1 extends at most {max(widths):.0f} points to either side." if has_f1 else ""
    )
    about_em = (
        "*EM* is the share of answers that contain a gold answer, an answer that the data set calls right. "
        if explains_em
        else ""
    )
    note = f"Measured on: {summarize(settings.output)['machine']}. {about_em}{about_f1}".strip()
    return [*_passages_note(sets), *sets_table(sets), "", note]


def _numbers(sets: dict[str, Any]) -> list[dict[str, Any]]:
    return [numbers for entry in sets.values() for numbers in entry["methods"].values()]
