"""Mixtures of sources: shares, limits, questions that share a row, distractors, counted rows, blocks made once."""

import copy
import logging
import os
import re
from dataclasses import dataclass, replace

import datasets
import pytest
from training_rows import passage_rows, question_rows, write_rows

from arcaligner.train import selection
from arcaligner.train.corpora import open_corpus
from arcaligner.train.data import Example, ExampleBuilder, Turn
from arcaligner.train.recipe import RecipeArguments
from arcaligner.train.selection import Distractors, ExampleSelector, contains_answer

CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Quito", "Dakar", "Hanoi")


@dataclass
class OneExample:
    """A stand-in for a builder: one example for rows that share their passages, as long as the first question."""

    max_tokens: int | None = None

    def question_examples(self, rows):
        if rows[0]["id"] == os.environ.get("STOP_AT"):
            raise KeyboardInterrupt
        questions = [Turn([0], [0]) for _ in rows]
        yield Example(",".join(row["id"] for row in rows), [], questions, [], len(rows[0]["question"].split()))

    reconstruction_examples = question_examples


@pytest.fixture
def select(tmp_path):
    """Examples of sources, by a recipe with other keys."""

    def select(sources, limit=None, builder=None, seed=0, num_proc=None, **changes):
        keys = {"stage": "grounding", "model_name_or_path": "base", "data_dir": ""}
        keys |= {"train_files": dict.fromkeys([sources], 1.0) if isinstance(sources, str) else sources}
        keys |= {"examples_cache_dir": str(tmp_path / "examples"), "max_train_samples": limit}
        recipe = RecipeArguments(**keys | changes)
        return ExampleSelector(recipe, builder or OneExample(), seed, num_proc).training_examples()

    return select


def rows_of(cities):
    return [
        {
            "id": city,
            "question": "Which city is it?",
            "answers": [city],
            "passages": [
                {"title": f"About {city}", "text": f"It lies by a river, as {CITIES[0]} does. This is {city}."},
                {"title": "", "text": f"A second passage, number {number}."},
            ],
        }
        for number, city in enumerate(cities)
    ]


@pytest.fixture
def two_files(tmp_path):
    many = [{**row, "id": f"many-{row['id']}"} for row in question_rows(30)]
    few = [{**row, "id": f"few-{row['id']}"} for row in question_rows(6)]
    return write_rows(tmp_path / "many.jsonl", many), write_rows(tmp_path / "few.jsonl", few)


def counts(examples):
    return {kind: sum(row_id.startswith(kind) for row_id in examples["row_id"]) for kind in ("many", "few")}


def test_a_mixture_has_the_shares_and_repeats_nothing(select, two_files):
    many, few = two_files
    mixture = select({many: 3.0, few: 1.0}, 16)
    assert counts(mixture) == {"many": 12, "few": 4} and len(set(mixture["row_id"])) == 16
    for limit in (30, None):  # a short file shrinks the mixture but keeps its shares
        assert counts(select({many: 1.0, few: 1.0}, limit)) == {"many": 6, "few": 6}


def test_the_selection_is_random_and_repeatable(select, two_files):
    found = [list(select(two_files[0], 8, seed=seed)["row_id"]) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0] != [f"many-row-{number}" for number in range(8)]


def test_stage_one_examples_mix_in_without_distractors(select, tmp_path, processor):
    questions = write_rows(tmp_path / "questions.jsonl", question_rows(12))
    passages = write_rows(tmp_path / "passages.jsonl", passage_rows(12))
    share = {"reconstruction_files": {passages: 1.0}, "reconstruction_share": 0.25, "distractors": 1.0}
    examples = select(questions, 8, ExampleBuilder(processor), max_questions=2, **share)
    texts = [processor.decode(example["turns"][0]["input_ids"]) for example in examples]
    assert ["Question: " in text for text in texts] == [True] * 6 + [False] * 2
    sizes = [len(segments) for segments in examples["segments"]]
    assert min(sizes[:6]) > 2 and sizes[6:] == [1] * 2


def test_held_out_examples_are_those_of_the_stage(tmp_path, processor):
    passages = write_rows(tmp_path / "passages.jsonl", passage_rows(3))
    keys = {"stage": "reconstruction", "model_name_or_path": "base", "train_files": {passages: 1.0}, "data_dir": ""}
    recipe = RecipeArguments(**keys, eval_files={passages: 1.0}, max_eval_samples=4, examples_cache_dir=str(tmp_path))
    assert len(ExampleSelector(recipe, ExampleBuilder(processor)).eval_examples()) == 4
    assert ExampleSelector(replace(recipe, eval_files={}), ExampleBuilder(processor)).eval_examples() is None


def test_long_examples_are_left_out_made_up_for_and_counted(select, tmp_path, caplog):
    rows = [row | {"question": "Who is it?" if number % 2 else "Who?"} for number, row in enumerate(question_rows(20))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.INFO):
        mixture = select(path, 8, OneExample(max_tokens=1))
    assert list(mixture["length"]) == [1] * 8
    assert f"{path}: 8 examples" in caplog.text
    assert f"{path}: left out 10 longer than 1 tokens" in caplog.text


def test_no_examples_and_bad_weights_are_refused(select, two_files):
    many, few = two_files
    with pytest.raises(ValueError, match="No examples"):
        select(many, 8, OneExample(max_tokens=1))
    with pytest.raises(ValueError, match="positive weights"):
        select({many: 1.0, few: 0.0}, 8)


@pytest.fixture
def gaps(tmp_path):
    """Eight rows, of which four lack a part."""
    rows = question_rows(8)
    rows[1]["question"] = " "
    rows[2]["answers"] = []
    rows[3]["passages"] = []
    rows[4]["passages"][0]["text"] = "\n"
    return write_rows(tmp_path / "gaps.jsonl", rows)


def test_rows_without_a_part_are_left_out_and_reported(select, gaps, caplog):
    with caplog.at_level(logging.INFO):
        examples = select(gaps)
    assert sorted(examples["row_id"]) == ["row-0", "row-5", "row-6", "row-7"]
    assert f"{gaps}: 4 examples" in caplog.text
    assert f"{gaps}: left out 1 without a question: row-1" in caplog.text
    assert f"{gaps}: left out 1 without an answer: row-2" in caplog.text
    assert re.search(f"{gaps}: left out 2 without a passage: row-[34], row-[34]\n", caplog.text)
    examples = select(gaps, stage="reconstruction")  # needs passages only
    assert sorted(examples["row_id"]) == ["row-0", "row-1", "row-2", "row-5", "row-6", "row-7"]


def test_a_report_of_rows_is_short_and_cannot_steer_a_terminal(select, tmp_path, caplog):
    rows = [row | {"id": f"\x1b[2J{row['id']}", "answers": []} for row in question_rows(9)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, question_rows(1)[0] | {"id": "whole"}])
    select(path)
    (record,) = [record for record in caplog.records if "without an answer" in record.message]
    assert record.levelname == "WARNING" and "left out 9 " in record.message
    assert record.message.count(r"\x1b[2Jrow-") == 5 and record.message.endswith(", ...")


def test_a_corpus_of_texts_asks_no_questions(select, tmp_path):
    path = str(tmp_path / "texts.parquet")
    datasets.Dataset.from_dict({"text": ["One two three."]}).to_parquet(path)
    assert sorted(select(path, stage="reconstruction", passage_words=2)["row_id"]) == ["0-0", "0-1"]
    with pytest.raises(ValueError, match="texts.parquet has no questions"):
        select(path)


@pytest.mark.parametrize("max_questions, sizes", [(1, [1] * 12), (2, [2] * 6), (3, [1, 1, 1, 3, 3, 3]), (9, [4] * 3)])
def test_questions_about_the_same_passages_share_a_row(select, tmp_path, max_questions, sizes):
    rows = question_rows(12)
    groups = [
        ids.split(",") for ids in select(write_rows(tmp_path / "r.jsonl", rows), max_questions=max_questions)["row_id"]
    ]
    assert sorted(map(len, groups)) == sizes
    assert sorted(row_id for group in groups for row_id in group) == sorted(f"row-{n}" for n in range(12))
    assert all(len({int(row_id.removeprefix("row-")) % 3 for row_id in group}) == 1 for group in groups)


def test_passages_that_differ_in_their_titles_are_not_the_same(select, tmp_path):
    rows = question_rows(2)
    rows[1]["passages"] = [rows[0]["passages"][0] | {"title": "Another"}]
    assert len(select(write_rows(tmp_path / "rows.jsonl", rows), max_questions=2)) == 2


def test_questions_that_share_a_row_share_distractors_that_answer_none_of_them(select, tmp_path):
    own = [{"title": "", "text": "A text of two questions."}]
    rows = [row | {"passages": own} for row in rows_of(CITIES[:2])]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, *rows_of(CITIES[2:])])
    drawn = []

    class Recording(OneExample):
        def question_examples(self, rows):
            drawn.append(rows)
            yield from super().question_examples(rows)

    for seed in range(4):  # in some, the question whose answer is Rome comes second
        select(path, builder=Recording(), seed=seed, max_questions=2, distractors=1.0)
    for first, second in (group for group in drawn if len(group) == 2):
        assert first["passages"] == second["passages"] and own[0] in first["passages"]
        others = [passage for passage in first["passages"] if passage not in own]
        # The first passages of the other cities name Rome, too.
        assert 1 <= len(others) <= 4 and all(passage["text"].startswith("A second passage") for passage in others)
    assert {group[0]["id"] for group in drawn if len(group) == 2} == set(CITIES[:2])


# Blocks


def refuse(batch, **kwargs):
    raise AssertionError("these examples were made before")


def another_processor(processor, **changes):
    """A copy with other settings."""
    processor = copy.deepcopy(processor)
    if tokens := changes.pop("tokens", None):
        processor.tokenizer.add_tokens(tokens)
    for name, value in changes.items():
        setattr(processor, name, value)
    return processor


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sentences_per_segment": 0.5},
        {"spacy_model": "de"},
        {"context_token_id": 999},
        {"encoder_name_or_path": "org/another"},
        {"chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"},
        {"tokens": ["sentence"]},
    ],
    ids=lambda changes: next(iter(changes), "the same"),
)
def test_examples_are_made_once_for_a_segmenter_prompt_and_tokenizer(select, tmp_path, processor, monkeypatch, changes):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(3))
    made = select(path, builder=ExampleBuilder(processor))
    monkeypatch.setattr(selection, "_examples_of_rows", refuse)
    builder = ExampleBuilder(another_processor(processor, **changes))
    if not changes:
        assert select(path, builder=builder).to_dict() == made.to_dict()
    else:
        with pytest.raises(AssertionError, match="made before"):
            select(path, builder=builder)


@pytest.mark.parametrize("changes", [{}, {"distractors": 1.0}, {"seed": 1}])
def test_examples_of_other_data_are_not_taken(select, tmp_path, changes):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(6))
    select(path)
    path = write_rows(tmp_path / "rows.jsonl", [row | {"question": "Another?"} for row in question_rows(6)])
    fresh = select(path, **changes, examples_cache_dir=str(tmp_path / "fresh"))
    assert select(path, **changes).to_dict() == fresh.to_dict()


def test_a_stopped_run_goes_on_at_its_next_block(select, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "ROWS_PER_BLOCK", 4)
    path = write_rows(tmp_path / "rows.jsonl", question_rows(12))
    whole = select(path, examples_cache_dir=str(tmp_path / "whole"))
    monkeypatch.setenv("STOP_AT", whole["row_id"][9])
    with pytest.raises(KeyboardInterrupt):
        select(path)
    assert len(list((tmp_path / "examples").glob("*.arrow"))) == 2
    monkeypatch.setenv("STOP_AT", whole["row_id"][2])  # a row of the first block: it must not be asked again
    assert select(path).to_dict() == whole.to_dict()


def test_several_processes_make_the_same_examples(select, tmp_path, processor):
    path, builder = write_rows(tmp_path / "rows.jsonl", question_rows(6)), ExampleBuilder(processor)
    two = select(path, builder=builder, num_proc=2, examples_cache_dir=str(tmp_path / "two"))
    assert two.to_dict() == select(path, builder=builder).to_dict()


# Distractors


@pytest.fixture
def corpus(tmp_path):
    datasets.Dataset.from_list(rows_of(CITIES)).to_parquet(tmp_path / "cities.parquet")
    return open_corpus(str(tmp_path / "cities.parquet"))


def texts(row):
    return [passage["text"] for passage in row["passages"]]


def test_a_row_keeps_its_passages_among_one_to_four_others_of_the_corpus(corpus):
    known = {text for row in corpus for text in texts(row)}
    numbers, places = set(), set()
    for seed in range(12):
        for row in corpus:
            mixed = texts(Distractors(corpus, 1.0, seed)(row))
            assert len(mixed) == len(set(mixed)) and set(texts(row)) < set(mixed) <= known
            numbers.add(len(mixed) - 2)
            places.add(mixed.index(texts(row)[0]))
    assert numbers == {1, 2, 3, 4} and places == set(range(6))


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.33, 133), (1.0, 400)])
def test_a_share_of_the_rows_gets_distractors_and_the_others_stay_as_they_are(corpus, share, expected):
    mix = Distractors(corpus, share, seed=0)
    rows = [corpus[number % 8] | {"id": str(number)} for number in range(400)]
    assert abs(sum(mix(row) != row for row in rows) - expected) < 30


def test_no_distractor_holds_the_answer_and_few_passages_give_fewer(tmp_path, corpus):
    row = corpus[0]  # Rome: the first passage of every other row names it
    for seed in range(20):
        others = [p for p in Distractors(corpus, 1.0, seed)(row)["passages"] if p not in row["passages"]]
        assert others and all(passage["text"].startswith("A second passage") for passage in others)
    datasets.Dataset.from_list(rows_of(CITIES[:2])).to_parquet(tmp_path / "two.parquet")
    two = open_corpus(str(tmp_path / "two.parquet"))
    for seed in range(8):
        assert sorted(texts(Distractors(two, 1.0, seed)(two[0]))) == sorted([*texts(two[0]), texts(two[1])[1]])


@pytest.mark.parametrize(
    "text, answers, found",
    [
        ("It is in ROME, Italy.", ["Rome"], True),
        ("It is in Italy.", ["Lima", "italy"], True),
        ("It is well known.", ["no"], False),
        ("New\n York is large.", ["new york"], True),
        ("It cost $5 (five).", ["$5"], True),
        ("Romeo came.", ["Rome"], False),
    ],
)
def test_an_answer_is_found_as_whole_words(text, answers, found):
    assert contains_answer({"title": "", "text": text}, answers) is found
    assert contains_answer({"title": text, "text": ""}, answers) is found


def test_the_draw_depends_on_seed_and_row_only(corpus):
    draws = [Distractors(corpus, 0.5, seed=0)(row) for row in corpus]
    backwards = [Distractors(corpus, 0.5, seed=0)(row) for row in reversed(list(corpus))]
    assert draws == backwards[::-1]
    assert draws != [Distractors(corpus, 0.5, seed=1)(row) for row in corpus]
