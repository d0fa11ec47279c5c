"""Mixtures of sources: shares, limits, questions that share a row, distractors, counted rows, blocks made once."""

import copy
import logging
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import datasets
import pytest
from training_rows import article_rows, passage_rows, question_rows, write_rows

from arcaligner.train import selection
from arcaligner.train.data import Example, ExampleBuilder, Turn
from arcaligner.train.recipe import RecipeArguments
from arcaligner.train.selection import Distractors, ExampleSelector, NearestPassages, contains_answer, own_passages

CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Quito", "Dakar", "Hanoi")


@dataclass
class OneExample:
    """A stand-in for a builder: one example for rows that share their passages, as long as the first question."""

    max_tokens: int | None = None
    drawn: list[list[dict]] = field(default_factory=list)  # the rows of each example

    def question_examples(self, rows):
        if rows[0]["id"] == os.environ.get("STOP_AT"):
            raise KeyboardInterrupt
        self.drawn.append(rows)
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
    examples = select(write_rows(tmp_path / "rows.jsonl", rows), max_questions=max_questions)
    groups = [ids.split(",") for ids in examples["row_id"]]
    assert sorted(map(len, groups)) == sizes
    assert sorted(row_id for group in groups for row_id in group) == sorted(f"row-{n}" for n in range(12))
    assert all(len({int(row_id.removeprefix("row-")) % 3 for row_id in group}) == 1 for group in groups)


def test_passages_that_differ_in_their_titles_are_not_the_same(select, tmp_path):
    rows = question_rows(2)
    rows[1]["passages"] = [rows[0]["passages"][0] | {"title": "Another"}]
    assert len(select(write_rows(tmp_path / "rows.jsonl", rows), max_questions=2)) == 2


def test_questions_that_share_a_row_share_distractors_that_answer_none_of_them(select, tmp_path):
    own = [{"title": "", "text": "A text of two questions."}]
    rows = [row | {"passages": own, "question": "Which second passage?"} for row in rows_of(CITIES[:2])]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, *rows_of(CITIES[2:])])
    builder = OneExample()
    for seed in range(4):  # in some, the question whose answer is Rome comes second
        select(path, builder=builder, seed=seed, max_questions=2, distractors=1.0)
    shared = [group for group in builder.drawn if group[0]["id"] in CITIES[:2]]
    for first, second in shared:
        assert first["passages"] == second["passages"] and own[0] in first["passages"]
        others = [passage for passage in first["passages"] if passage not in own]
        # The first passages of the other cities name Rome, too.
        assert 1 <= len(others) <= 4 and all(passage["text"].startswith("A second passage") for passage in others)
    assert {group[0]["id"] for group in shared} == set(CITIES[:2])


@pytest.mark.parametrize("max_questions, joined", [(1, 0), (2, 3)])
def test_a_question_about_each_distractor_joins_where_questions_share_a_row(select, tmp_path, max_questions, joined):
    rows = question_rows(8)
    for number, row in enumerate(rows):
        row |= {"id": str(number), "question": f"Which text has number {number}?", "answers": [f"n{number}"]}
        row |= {"passages": [{"title": "", "text": f"The text has the number n{number}."}]}
    path, builder = write_rows(tmp_path / "rows.jsonl", rows), OneExample()
    select(path, builder=builder, max_questions=max_questions, distractors=1.0, max_distractors=3)
    assert max(len(group) - 1 for group in builder.drawn) == joined
    for group in builder.drawn:
        told = {passage["text"] for passage in group[0]["passages"]}
        assert 2 <= len(told) <= 4 and all(row["passages"] == group[0]["passages"] for row in group)
        asked = {f"The text has the number {row['answers'][0]}." for row in group}
        assert asked == told if joined else len(asked) == 1 and asked < told


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
def corpus():
    return [row | {"gold": []} for row in rows_of(CITIES)]


@pytest.fixture
def nearest(corpus):
    return NearestPassages(corpus)


def texts(passages):
    return [passage["text"] for passage in passages]


def nearest_of(passages):
    """Passages that no question is about."""
    return NearestPassages([{"question": "", "answers": [], "passages": passages, "gold": []}])


def test_the_nearest_passages_come_first_and_hold_no_answer():
    told = ["The tower of Oslo is tall.", "Oslo has a tower.", "A tower.", "Nothing."]
    found = nearest_of([{"title": "", "text": text} for text in told])
    assert texts(found.without_answer("the tower of oslo", ["tall"], [], 2)) == told[1:3]
    assert texts(found.without_answer("the tower of oslo", ["x"], [{"text": told[1]}], 1)) == told[:1]
    assert found.without_answer("?", ["x"], [], 3) == []


def test_the_nearest_passages_of_an_article_are_of_no_other():
    told = {"The tower of Oslo is tall.": "Oslo", "Oslo is old.": "Oslo", "The tower of Oslo burned.": "Norway"}
    passages = [{"title": title, "text": text} for text, title in told.items()]
    found = nearest_of(passages)
    asked = "the tower of oslo", ["tall"], passages[:1], 3
    assert texts(found.without_answer(*asked)) == ["The tower of Oslo burned.", "Oslo is old."]
    assert texts(found.without_answer(*asked, in_article=True)) == ["Oslo is old."]
    assert found.without_answer("fjord", ["x"], passages[:1], 3, in_article=True) == []  # no word in common


def test_a_row_keeps_its_passages_among_one_to_four_others_of_the_corpus(corpus, nearest):
    known = {text for row in corpus for text in texts(row["passages"])}
    numbers, places = set(), set()
    for seed in range(12):
        for row in corpus:
            mixed = texts(Distractors(nearest, 1.0, seed)([row | {"question": "second passage city"}]))
            assert len(mixed) == len(set(mixed)) and set(texts(row["passages"])) < set(mixed) <= known
            numbers.add(len(mixed) - 2)
            places.add(mixed.index(texts(row["passages"])[0]))
    assert numbers == {1, 2, 3, 4} and places == set(range(6))


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.33, 133), (1.0, 400)])
def test_a_share_of_the_rows_gets_distractors_and_the_others_stay_as_they_are(corpus, nearest, share, expected):
    mix = Distractors(nearest, share, seed=0)
    rows = [corpus[number % 8] | {"id": str(number), "question": "passage"} for number in range(400)]
    assert abs(sum(mix([row]) != row["passages"] for row in rows) - expected) < 30


def test_few_passages_that_hold_no_answer_give_fewer_distractors(corpus):
    row = corpus[0] | {"question": "second passage by the river"}  # Rome: all first passages name it
    two = NearestPassages(corpus[:2])
    for seed in range(8):
        expected = sorted([*texts(row["passages"]), texts(corpus[1]["passages"])[1]])
        assert sorted(texts(Distractors(two, 1.0, seed)([row]))) == expected


def test_the_draw_depends_on_seed_and_row_only(corpus, nearest):
    draws = [Distractors(nearest, 0.5, seed=0)([row]) for row in corpus]
    backwards = [Distractors(nearest, 0.5, seed=0)([row]) for row in reversed(corpus)]
    assert draws == backwards[::-1]
    assert draws != [Distractors(nearest, 0.5, seed=1)([row]) for row in corpus]
    assert len(Distractors(nearest, 1.0, seed=0, most=7)([corpus[0]])) > 2 + 4  # more than by default


def test_of_a_row_that_says_which_passages_it_needs_the_others_are_distractors(nearest):
    passages = [{"title": "", "text": f"Text {number}."} for number in range(10)]
    row = {"id": "x", "question": "Which?", "answers": ["Text 3"], "passages": passages, "gold": [3, 7]}
    for seed in range(20):
        mixed = Distractors(nearest, 1.0, seed)([row])
        assert {"Text 3.", "Text 7."} < set(texts(mixed)) <= set(texts(passages)) and len(mixed) <= 6
    assert own_passages(row) == ([passages[3], passages[7]], [each for each in passages if each["text"][5] not in "37"])


# Articles that are held out


def titles(examples):
    return {segment["encoder_text"].partition(":")[0] for example in examples for segment in example["segments"]}


def test_held_out_articles_are_validated_with_and_never_trained_on(tmp_path, processor):
    path = write_rows(tmp_path / "rows.jsonl", article_rows(60))
    keys = {"stage": "grounding", "model_name_or_path": "base", "train_files": {path: 1.0}, "eval_files": {path: 1.0}}
    keys |= {"data_dir": "", "distractors": 1.0, "examples_cache_dir": str(tmp_path / "cache")}

    def parts(**changes):
        recipe = RecipeArguments(**keys | {"validation_share": 0.2, **changes})
        selector = ExampleSelector(recipe, ExampleBuilder(processor))
        return titles(selector.training_examples()), titles(selector.eval_examples())

    trained, validated = parts()
    assert trained | validated == {f"Town {number}" for number in range(60)} and not trained & validated
    assert 4 <= len(validated) <= 24
    assert parts() == (trained, validated) != parts(validation_seed=1)
    with pytest.raises(ValueError, match="no row is left to train on with `validation_share` 0.9999"):
        parts(validation_share=0.9999)


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


@pytest.mark.parametrize("case", ["a file", "no permission"])
def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(select, tmp_path, monkeypatch, case):
    folder = tmp_path / "folder"
    if case == "a file":
        folder.touch()
    else:  # which root always has
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    rows = write_rows(tmp_path / "rows.jsonl", rows_of(CITIES[:2]))
    with pytest.raises(OSError, match=rf"cannot be kept in {folder} \(.*\). Name a folder .*examples_cache_dir"):
        select(rows, examples_cache_dir=str(folder))
