"""Rows become examples: the prompt of inference, labels on what the assistant says, turns side by side; and mixtures of
sources: shares, limits, questions that share an example, counted rows, blocks made once."""

import copy
import gc
import logging
import os
import pickle
import re
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import datasets
import pytest
from conftest import chat_inputs
from training_rows import CITIES, article_rows, city_rows, passage_rows, question_rows, write_rows

from arcaligner.common.files import stable_number
from arcaligner.segmentation_arcaligner import encoder_texts
from arcaligner.train import examples as module
from arcaligner.train.distractors import NearestPassages
from arcaligner.train.examples import (
    CONTINUATION,
    RECONSTRUCTION_TEMPLATES,
    ExampleBuilder,
    ExampleSelector,
    choose_template,
    missing_part,
    open_part,
)
from arcaligner.train.recipe import RecipeArguments

# Table "Stage-I instruction templates", as printed.
TEMPLATES = (
    "Background: [B]. This is equivalent to: [T].",
    "Rewrite the background in your own words: [B] → [T].",
    "Provide a restatement of the background: [B]. Return: [T].",
    "[B] is a paraphrase of what? Answer with: [T].",
    "These two expressions convey the same meaning: (1) [B] (2) [T].",
    "Restate [B] using a single sentence. Output only [T].",
)


@pytest.fixture
def builder(processor):
    return ExampleBuilder(processor, max_segments=2)


def targets(processor, example) -> list[str]:
    """The text that the assistant should write in each turn."""
    return [processor.decode([label for label in turn["labels"] if label != -100]) for turn in example["turns"]]


# Questions


def test_questions_use_inference_prompt(processor, builder):
    for row in (*question_rows(3), question_rows(1)[0] | {"question": "What does <context> mean?"}):
        (example,) = builder.question_examples([row])
        prompt = chat_inputs(processor, row["question"], row["passages"])["input_ids"][0].tolist()
        (turn,) = example["turns"]
        answer = processor.tokenizer(row["answers"][0] + "<|im_end|>")["input_ids"]
        whole = example["head"] + [processor.context_token_id] * len(example["segments"]) + turn["input_ids"]
        assert whole == prompt + answer
        assert turn["labels"] == [-100] * (len(turn["input_ids"]) - len(answer)) + answer
        assert example["length"] == len(whole)
        assert processor.context_token_id not in example["head"] + turn["input_ids"]
    (example,) = builder.question_examples([row | {"passages": []}])  # has the slot of the empty text
    empty = {"document": 0, "encoder_text": "", "encoder_start": 0, "word_ids": [], "word_ends": []}
    assert example["segments"] == [empty]


def test_questions_become_turns(processor, builder):
    """Questions about the same passages become turns of one example as far as they fit."""
    rows = [row | {"passages": question_rows(1)[0]["passages"]} for row in question_rows(5)]
    (together,) = builder.question_examples(rows)
    alone = [next(builder.question_examples([row])) for row in rows]
    assert together["turns"] == [example["turns"][0] for example in alone]
    assert all((example["head"], example["segments"]) == (together["head"], together["segments"]) for example in alone)
    one = together["length"] - sum(len(turn["input_ids"]) for turn in together["turns"][1:])
    assert one == alone[0]["length"]
    for limit, sizes in ((together["length"], [5]), (together["length"] - 1, [4, 1]), (one, [1] * 5), (1, [1] * 5)):
        examples = list(ExampleBuilder(processor, max_segments=2, max_tokens=limit).question_examples(rows))
        assert [len(example["turns"]) for example in examples] == sizes
        assert [turn for example in examples for turn in example["turns"]] == together["turns"]
        assert len({example["row_id"] for example in examples}) == len(examples)
        assert all(example["segments"] == together["segments"] for example in examples)
        assert limit in (1, one) or max(example["length"] for example in examples) <= limit


def test_finest_rate_decides_lengths(processor):
    """The finest rate decides the length of an example."""
    (row,) = question_rows(1)
    for rates in (["segment"], ["segment", 4, 2]):
        (example,) = ExampleBuilder(processor, tokens_per_slot=rates).question_examples([row])
        slots = processor.encode_documents(row["passages"], tokens_per_slot=rates[-1]).context_embeds
        assert example["length"] == len(example["head"]) + len(slots) + len(example["turns"][0]["input_ids"])


def test_inconsistent_template_is_refused(builder, processor, monkeypatch):
    """A template that renders the prompt in two ways is refused."""
    plain = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(processor, "chat_template", plain)  # this template ends no turn, so EOS is added
    (example,) = builder.question_examples(question_rows(1))
    assert processor.decode(example["turns"][0]["input_ids"]).endswith("it?<|im_end|>")
    monkeypatch.setattr(processor, "chat_template", plain + "{% if add_generation_prompt %}?{% endif %}")
    with pytest.raises(ValueError, match="prompt of row row-0 differently .*chat_template_path"):
        list(builder.question_examples(question_rows(1)))


# Texts to reconstruct


def test_templates_are_the_papers():
    """Templates are those of the paper, chosen by the id and used about equally often."""
    assert tuple(f"{before}[B]{after} [T]." for before, after in RECONSTRUCTION_TEMPLATES) == TEMPLATES
    # Written out: another hash would change every training set, and `hash` does so in each process.
    assert stable_number("recon_train_0", 1000) == 200
    counts = Counter(choose_template(f"row-{number}") for number in range(6000))
    assert len(counts) == 6 and min(counts.values()) > 850


def test_reconstruction_of_each_segment(processor):
    """Each segment is reconstructed once, by a template with its slots."""
    builder, sizes = ExampleBuilder(processor, max_segments=3), set()
    long = {"title": "", "text": " ".join(f"This is sentence {number}." for number in range(40))}
    for row in (*passage_rows(3), passage_rows(1)[0] | {"passages": [long]}):
        (passage,), texts, examples = row["passages"], [], list(builder.reconstruction_examples([row]))
        assert examples == list(builder.reconstruction_examples([row]))
        for example in examples:
            text = targets(processor, example)[0].removesuffix("<|im_end|>")
            before, after = choose_template(f"{row['id']}:0:{passage['text'].index(text)}")
            assert processor.decode(example["head"]) == f"<|im_start|>user\n{before}"
            turn = f"{after}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
            assert [processor.decode(encoded["input_ids"]) for encoded in example["turns"]] == [turn]
            texts.append(text)
        assert " ".join(texts) == passage["text"]
        segment_texts = [segment["encoder_text"] for example in examples for segment in example["segments"]]
        segments = processor.slot_encoder.segment_documents(row["passages"])
        assert segment_texts == encoder_texts(segments, row["passages"])
        sizes |= {len(example["segments"]) for example in examples}
    assert sizes == {1, 2, 3}


def test_second_turn_continues(processor):
    """A second turn continues with the next segment."""
    row = passage_rows(1)[0]
    builders = (ExampleBuilder(processor, continues=continues) for continues in (False, True))
    plain, examples = (list(builder.reconstruction_examples([row])) for builder in builders)
    texts = [segment.text + "<|im_end|>" for segment in processor.slot_encoder.segment_documents(row["passages"])]
    assert [targets(processor, example) for example in examples] == [texts[:2], texts[1:], texts[2:]]
    for example, without in zip(examples, plain, strict=True):
        assert all(example[key] == without[key] for key in ("head", "segments"))
        assert example["turns"][0] == without["turns"][0]
    second_turn = processor.decode(examples[0]["turns"][1]["input_ids"])
    assert second_turn.startswith(f"{CONTINUATION}<|im_end|>\n<|im_start|>assis")


# The choice of rows


@dataclass
class OneExample:
    """A builder that makes one example from rows with the same passages, with the length of the first question."""

    max_tokens: int | None = None
    drawn: list[list[dict]] = field(default_factory=list)  # the rows of each example

    def question_examples(self, rows):
        if rows[0]["id"] == os.environ.get("STOP_AT"):
            raise KeyboardInterrupt
        self.drawn.append(rows)
        made = {"head": [], "turns": [{"input_ids": [0], "labels": [0]} for _ in rows], "segments": []}
        yield made | {"row_id": ",".join(row["id"] for row in rows), "length": len(rows[0]["question"].split())}

    reconstruction_examples = question_examples

    def with_caches(self):
        return self

    def load(self):
        pass

    def tokenize(self, passages, rows):
        pass


@pytest.fixture
def selector(tmp_path):
    """Makes a selector from sources (files, or rows that are written to one) and changed keys of the recipe."""

    def selector(sources, limit=None, builder=None, seed=0, num_proc=None, **changes):
        keys = {"stage": "grounding", "model_name_or_path": "base", "data_dir": ""}
        if isinstance(sources, list):
            sources = write_rows(tmp_path / "rows.jsonl", sources)
        keys |= {"train_files": {sources: 1.0} if isinstance(sources, str) else sources}
        keys |= {"examples_cache_dir": str(tmp_path / "examples"), "max_train_samples": limit}
        return ExampleSelector(RecipeArguments(**keys | changes), builder or OneExample(), seed, num_proc)

    return selector


@pytest.fixture
def select(selector):
    return lambda *args, **kwargs: selector(*args, **kwargs).training_examples()


def test_mixture_keeps_shares(select, tmp_path):
    def write(kind, count):
        rows = [row | {"id": f"{kind}-{row['id']}"} for row in question_rows(count)]
        return write_rows(tmp_path / f"{kind}.jsonl", rows)

    files = [write("many", 30), write("few", 6)]

    def counts(limit, *weights):
        names = select(dict(zip(files, weights, strict=True)), limit)["row_id"]
        assert len(set(names)) == len(names)
        return [sum(name.startswith(kind) for name in names) for kind in ("many", "few")]

    assert counts(16, 3.0, 1.0) == [12, 4]
    for limit in (30, None):  # a short file shrinks the mixture but keeps its shares
        assert counts(limit, 1.0, 1.0) == [6, 6]
    id_lists = [list(select(files[0], 8, seed=seed)["row_id"]) for seed in (0, 0, 1)]
    assert id_lists[0] == id_lists[1] != id_lists[2] and id_lists[0] != [f"many-row-{number}" for number in range(8)]
    with pytest.raises(ValueError, match="has no usable row: .* longer than 1 tokens.*Raise `max_tokens`"):
        select(files[0], 8, OneExample(max_tokens=1))
    with pytest.raises(ValueError, match="weights above 0"):
        counts(8, 1.0, 0.0)


@pytest.fixture
def two_files(tmp_path):
    """A file of thirty rows and one of seven."""
    numbers = {"many": 30, "few": 7}
    rows = {kind: [row | {"id": f"{kind}-{row['id']}"} for row in question_rows(n)] for kind, n in numbers.items()}
    return [write_rows(tmp_path / f"{kind}.jsonl", of_kind) for kind, of_kind in rows.items()]


def test_oversampled_rows_are_used_again(select, two_files, caplog):
    """All rows of a source are used before one is used again, so that the shares stay."""
    with caplog.at_level(logging.INFO):
        names = select(dict.fromkeys(two_files, 1.0), oversample=True)["row_id"][:]
    few = Counter(name for name in names if name.startswith("few"))
    assert sorted(few.values()) == [4] * 5 + [5] * 2
    assert sorted(set(names) - set(few)) == sorted(name for name in names if name.startswith("many"))
    assert len(names) == 60 and f"{two_files[1]}: rows are used up to 5 times to make 30 examples" in caplog.text


def test_oversampling_keeps_the_limit(select, two_files):
    many, few = two_files
    names = select({many: 1.0, few: 3.0}, 20, oversample=True)["row_id"][:]
    assert [sum(name.startswith(kind) for name in names) for kind in ("many", "few")] == [5, 15]


def test_oversampled_rows_get_other_distractors(select, two_files, tmp_path):
    few, builder = write_rows(tmp_path / "cities.jsonl", city_rows(CITIES)), OneExample()
    select({two_files[0]: 1.0, few: 1.0}, builder=builder, oversample=True, distractors=1.0)
    passages = defaultdict(set)
    for (row,) in builder.drawn:
        if row["id"] in CITIES:
            passages[row["id"]].add(tuple(passage["text"] for passage in row["passages"]))
    assert passages.keys() == set(CITIES) and all(len(choices) > 1 for choices in passages.values())


def test_row_too_long_a_second_time(selector, two_files, monkeypatch):
    """A source whose rows cannot be used a second time is an error, not an endless loop."""
    takes = selector(dict.fromkeys(two_files, 1.0), oversample=True)
    original = ExampleSelector._take

    def take(self, *args, **kwargs):
        examples, left_out = original(self, *args, **kwargs)
        return (examples if self.seed == 0 else examples.select([])), left_out

    monkeypatch.setattr(ExampleSelector, "_take", take)
    with pytest.raises(ValueError, match=r"gives 7 of the 30 examples .*cannot be used again.*Raise `max_tokens`"):
        takes.training_examples()


def test_mixed_reconstruction_has_no_distractors(select, tmp_path, processor):
    questions = write_rows(tmp_path / "questions.jsonl", question_rows(12))
    passages = write_rows(tmp_path / "passages.jsonl", passage_rows(12))
    share = {"reconstruction_files": {passages: 1.0}, "reconstruction_share": 0.25, "distractors": 1.0}
    examples = select(questions, 8, ExampleBuilder(processor), max_questions=2, **share)
    texts = [processor.decode(example["turns"][0]["input_ids"]) for example in examples]
    assert ["Question: " in text for text in texts] == [True] * 6 + [False] * 2
    sizes = [len(segments) for segments in examples["segments"]]
    assert min(sizes[:6]) > 2 and sizes[6:] == [1] * 2


def test_long_examples_are_replaced(select, tmp_path, caplog):
    """Long examples are left out, replaced and counted."""
    rows = [row | {"question": "Who is it?" if number % 2 else "Who?"} for number, row in enumerate(question_rows(20))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.INFO):
        mixture = select(path, 8, OneExample(max_tokens=1))
    assert list(mixture["length"]) == [1] * 8
    assert f"{path}: 8 examples" in caplog.text
    assert f"{path}: left out 10 examples longer than 1 tokens" in caplog.text


def test_incomplete_rows_are_reported(select, tmp_path, caplog):
    """Incomplete rows are left out, and reported in one line without control characters."""
    rows = question_rows(16)
    rows[1]["question"], rows[2]["passages"], rows[3]["passages"][0]["text"] = " ", [], "\n"
    for row in rows[7:]:
        row |= {"id": f"\x1b[2J{row['id']}", "answers": []}
    gaps = write_rows(tmp_path / "gaps.jsonl", rows)
    with caplog.at_level(logging.INFO):
        examples = select(gaps)
    assert sorted(examples["row_id"]) == ["row-0", "row-4", "row-5", "row-6"]
    assert f"{gaps}: 4 examples" in caplog.text
    assert f"{gaps}: left out 1 example without a question; row ids: row-1" in caplog.text
    assert re.search(f"{gaps}: left out 2 examples without a passage; row ids: row-[23], row-[23]\n", caplog.text)
    (record,) = [record for record in caplog.records if "left out 9 examples without an answer" in record.message]
    assert record.levelname == "WARNING" and record.message.endswith(", ...")
    assert record.message.count(r"\x1b[2Jrow-") == 5 and "\x1b" not in caplog.text
    examples = select(gaps, stage="reconstruction")  # needs passages only
    assert len(examples) == 14 and not {"row-2", "row-3"} & {*examples["row_id"]}


def test_passage_words_cut_texts(select, tmp_path):
    path = str(tmp_path / "texts.parquet")
    datasets.Dataset.from_dict({"text": ["One two three."]}).to_parquet(path)
    assert sorted(select(path, stage="reconstruction", passage_words=2)["row_id"]) == ["0-0", "0-1"]


@pytest.mark.parametrize(
    "max_questions, sizes", [(1, [1] * 13), (2, [1] + [2] * 6), (3, [1, 1, 1, 1, 3, 3, 3]), (9, [1, 4, 4, 4])]
)
def test_same_passages_share_example(select, max_questions, sizes):
    rows = question_rows(13)
    rows[12]["passages"] = [rows[12]["passages"][0] | {"title": "Another"}]  # so the two differ
    examples = select(rows, max_questions=max_questions)
    groups = [ids.split(",") for ids in examples["row_id"]]
    assert sorted(map(len, groups)) == sizes and ["row-12"] in groups
    assert sorted(row_id for group in groups for row_id in group) == sorted(f"row-{n}" for n in range(13))
    assert all(len({int(row_id.removeprefix("row-")) % 3 for row_id in group}) == 1 for group in groups)


def test_shared_distractors(select):
    """Questions that share an example share distractors that answer none of them."""
    shared_passages = [{"title": "", "text": "A text of two questions."}]
    rows = [row | {"passages": shared_passages, "question": "Which second passage?"} for row in city_rows(CITIES[:2])]
    builder = OneExample()
    for seed in range(4):  # in some, the question whose answer is Rome comes second
        select([*rows, *city_rows(CITIES[2:])], builder=builder, seed=seed, max_questions=2, distractors=1.0)
    shared = [group for group in builder.drawn if group[0]["id"] in CITIES[:2]]
    for first, second in shared:
        assert first["passages"] == second["passages"] and shared_passages[0] in first["passages"]
        others = [passage for passage in first["passages"] if passage not in shared_passages]
        # The first passages of the other cities name Rome, too.
        assert 1 <= len(others) <= 4 and all(passage["text"].startswith("A second passage") for passage in others)
    assert {group[0]["id"] for group in shared} == set(CITIES[:2])


@pytest.mark.parametrize("max_questions, joined", [(1, 0), (2, 3)])
def test_questions_about_distractors(select, max_questions, joined):
    """If questions share an example, a question about each distractor is added."""
    rows = question_rows(8)
    for number, row in enumerate(rows):
        row |= {"id": str(number), "question": f"Which text has number {number}?", "answers": [f"n{number}"]}
        row |= {"passages": [{"title": "", "text": f"The text has the number n{number}."}]}
    builder = OneExample()
    select(rows, builder=builder, max_questions=max_questions, distractors=1.0, max_distractors=3)
    assert max(len(group) - 1 for group in builder.drawn) == joined
    for group in builder.drawn:
        texts = {passage["text"] for passage in group[0]["passages"]}
        assert 2 <= len(texts) <= 4 and all(row["passages"] == group[0]["passages"] for row in group)
        questioned = {f"The text has the number {row['answers'][0]}." for row in group}
        assert questioned == texts if joined else len(questioned) == 1 and questioned < texts


def titles(examples):
    return {segment["encoder_text"].partition(":")[0] for example in examples for segment in example["segments"]}


def test_held_out_articles_validate(selector, tmp_path, processor):
    """Held-out articles are used for validation and never for training."""
    path = write_rows(tmp_path / "rows.jsonl", article_rows(60))

    def parts(**changes):
        keys = {"eval_files": {path: 1.0}, "distractors": 1.0, "validation_share": 0.2} | changes
        made = selector(path, builder=ExampleBuilder(processor), **keys)
        return titles(made.training_examples()), titles(made.eval_examples())

    trained, validated = parts()
    assert trained | validated == {f"Town {number}" for number in range(60)} and not trained & validated
    assert 4 <= len(validated) <= 24
    assert parts() == (trained, validated) != parts(validation_seed=1)
    with pytest.raises(ValueError, match="`validation_share` is 0.9999, which leaves no row of .* for training"):
        parts(validation_share=0.9999)
    assert selector(path).eval_examples() is None
    assert len(selector("unused", eval_files={path: 1.0}, max_eval_samples=4).eval_examples()) == 4


# Blocks


def test_examples_are_cached(select, tmp_path, processor, monkeypatch):
    """Examples are made once for rows, segmenter, prompt and tokenizer."""

    def refuse(maker, groups):
        raise AssertionError("made before")

    rows = question_rows(6)
    made = select(rows, builder=ExampleBuilder(processor))
    monkeypatch.setattr(module._ExampleMaker, "__call__", refuse)
    path = str(tmp_path / "rows.jsonl")
    assert select(path, builder=ExampleBuilder(copy.deepcopy(processor))).to_dict() == made.to_dict()
    variants = [(processor, {"distractors": 1.0}), (processor, {"seed": 1})]
    changes = {"sentences_per_segment": 0.5, "spacy_model": "de", "context_token_id": 999}
    changes |= {"encoder_name_or_path": "org/another", "chat_template": "{% for m in messages %}{{ m }}{% endfor %}"}
    for name, value in changes.items():
        variants.append((copy.deepcopy(processor), {}))
        setattr(variants[-1][0], name, value)
    variants.append((copy.deepcopy(processor), {}))
    variants[-1][0].tokenizer.add_tokens(["sentence"])
    for other, keys in variants:
        with pytest.raises(AssertionError, match="made before"):
            select(path, builder=ExampleBuilder(other), **keys)
    with pytest.raises(AssertionError, match="made before"):
        select([row | {"question": "Another?"} for row in rows], builder=ExampleBuilder(processor))


def test_stopped_run_continues(select, tmp_path, monkeypatch):
    """A stopped run continues at its next block."""
    monkeypatch.setattr(module, "ROWS_PER_BLOCK", 4)
    path = write_rows(tmp_path / "rows.jsonl", question_rows(12))
    whole = select(path, examples_cache_dir=str(tmp_path / "whole"))
    monkeypatch.setenv("STOP_AT", whole["row_id"][9])
    with pytest.raises(KeyboardInterrupt):
        select(path)
    assert len(list((tmp_path / "examples").glob("*.arrow"))) == 2
    monkeypatch.setenv("STOP_AT", whole["row_id"][2])  # a row of the first block, which must not be used again
    assert select(path).to_dict() == whole.to_dict()


def row_by_row(made: ExampleSelector, source: str) -> list[dict]:
    """The examples of a source, made row by row without a cache."""
    recipe, builder, corpus = made.recipe, made.builder, list(open_part(made.recipe, source, held_out=False))
    nearest, examples = NearestPassages(corpus), []
    for numbers in made._order(open_part(recipe, source, held_out=False)):
        rows = [corpus[number] for number in numbers if not missing_part(corpus[number], asks=True)]
        if rows:
            passages = nearest.mixed(rows, recipe.distractors, made.seed, recipe.max_distractors)
            rows += [corpus[number] for number in nearest.questions_about(passages, rows[0], made.seed)]
            examples += builder.question_examples([row | {"passages": passages} for row in rows])
    return [example for example in examples if example["length"] <= builder.max_tokens]


def test_blocks_hold_plain_examples(selector, tmp_path, processor, monkeypatch):
    """Blocks, which cache passages and questions, have the examples that are made row by row."""
    monkeypatch.setattr(module, "ROWS_PER_BLOCK", 16)
    rows = [*article_rows(20, questions=3), *question_rows(8), *city_rows(CITIES)]
    rows[5]["answers"], rows[11]["question"] = [], ""
    rows[7]["passages"] = [{"title": "Long", "text": "Sentences. " + "A sentence as long as that, of words, " * 20}]
    path = write_rows(tmp_path / "rows.jsonl", [row | {"id": str(number)} for number, row in enumerate(rows)])
    builder = ExampleBuilder(processor, tokens_per_slot=[2, "segment"], max_tokens=300)
    keys = {"max_questions": 2, "distractors": 0.5, "validation_share": 0.1}
    made = selector(path, builder=builder, **keys)
    examples = made.training_examples().to_list()
    assert examples == row_by_row(made, path) and len(examples) > 2 * 16
    assert {len(example["turns"]) for example in examples} >= {1, 2, 3}


def test_processes_make_equal_examples(select, tmp_path, processor):
    rows, builder = question_rows(12), ExampleBuilder(processor)
    rows[3]["answers"] = []  # also in its place, without an example
    one = select(rows, builder=builder)
    for number in (2, 16):  # some of which have no rows
        several = select(rows, builder=builder, num_proc=number, examples_cache_dir=str(tmp_path / str(number)))
        assert several.to_dict() == one.to_dict()


def test_makers_can_be_pickled(selector, tmp_path, processor):
    """Where processes are spawned rather than forked, what they need is pickled."""
    path = write_rows(tmp_path / "rows.jsonl", city_rows(CITIES))
    _, maker, order = selector(path, builder=ExampleBuilder(processor), distractors=1.0)._prepare(path, None, False)
    sent = pickle.loads(pickle.dumps(maker)).with_caches()
    assert sent(order)[0].to_pylist() == maker(order)[0].to_pylist()


def test_collector_rests_and_returns(selector, tmp_path, processor, monkeypatch):
    """Garbage collection is off while a block is made, and on again after it, also after an error."""
    path, seen = write_rows(tmp_path / "rows.jsonl", question_rows(2)), []
    _, maker, order = selector(path, builder=ExampleBuilder(processor))._prepare(path, None, False)

    def failing(self, *args):
        seen.append(gc.isenabled())
        raise ValueError("no passages")

    monkeypatch.setattr(ExampleBuilder, "tokenize", failing)
    with pytest.raises(ValueError, match="no passages"):
        maker(order)
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_cut_cache_is_made_again(select, tmp_path, caplog, part):
    """A truncated file of examples, as after a full disk, is made again and loses no example."""
    path, cache = write_rows(tmp_path / "rows.jsonl", question_rows(6)), tmp_path / "examples"
    expected = list(select(path, examples_cache_dir=str(cache)))
    (block,) = cache.glob("*.arrow")
    block.write_bytes(block.read_bytes()[: int(part * block.stat().st_size)])
    assert list(select(path, examples_cache_dir=str(cache))) == expected
    assert f"{block}, a file of cached examples, is truncated. These examples are made again." in caplog.text


def test_missing_examples_name_the_reason(select, tmp_path):
    """If there are no examples because of a misspelt key, the error names the key and not the limits."""
    rows = [{key: row[key] for key in ("id", "question", "passages")} | {"answer": "Ada"} for row in question_rows(3)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        ValueError, match=rf"{path} has no usable row: 3 without an answer\. Its first row has the keys id, question, "
    ):
        select(path)


def test_unwritable_cache_is_named(select, tmp_path):
    """A cache that cannot be created is named, with the remedy."""
    (folder := tmp_path / "folder").touch()
    with pytest.raises(OSError, match=rf"cannot be cached in {folder} \(.*\). Set `examples_cache_dir`"):
        select(question_rows(2), examples_cache_dir=str(folder))


class NoMaker:
    """A maker of examples that makes none."""

    def with_caches(self):
        return self


def test_processes_tokenize_alone(monkeypatch):
    """A forked process tokenizes in one thread: several would wait for threads of its parent."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with ProcessPoolExecutor(1, initializer=module._set_maker, initargs=(NoMaker(),)) as process:
        assert process.submit(os.getenv, "TOKENIZERS_PARALLELISM").result() == "false"
