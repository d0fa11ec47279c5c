"""Mixtures of sources: shares, limits, questions that share a row, distractors, counted rows, blocks made once."""

import copy
import logging
import os
import re
from dataclasses import replace

import datasets
import pytest
from training_rows import question_rows, write_rows

from arcaligner.train import selection
from arcaligner.train.corpora import open_corpus, read_rows
from arcaligner.train.data import Example, ExampleBuilder, Turn
from arcaligner.train.selection import Distractors, ExampleSelector, contains_answer


def one_example(rows):
    """A stand-in for a builder: one example for rows that share their passages, as long as the first question."""
    questions = [Turn([0], [0]) for _ in rows]
    yield Example(",".join(row["id"] for row in rows), [], questions, [], len(rows[0]["question"].split()))


CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Quito", "Dakar", "Hanoi")


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
def selector(tmp_path):
    return ExampleSelector(one_example, tmp_path / "examples", seed=0)


@pytest.fixture
def two_files(tmp_path):
    many = [{**row, "id": f"many-{row['id']}"} for row in question_rows(30)]
    few = [{**row, "id": f"few-{row['id']}"} for row in question_rows(6)]
    return write_rows(tmp_path / "many.jsonl", many), write_rows(tmp_path / "few.jsonl", few)


def counts(examples):
    return {kind: sum(row_id.startswith(kind) for row_id in examples["row_id"]) for kind in ("many", "few")}


def test_a_mixture_has_the_shares_and_repeats_nothing(selector, two_files):
    many, few = two_files
    mixture = selector.select({many: 3.0, few: 1.0}, 16)
    assert counts(mixture) == {"many": 12, "few": 4}
    assert len(set(mixture["row_id"])) == 16


def test_a_short_file_shrinks_the_mixture_but_keeps_its_shares(selector, two_files):
    many, few = two_files
    for limit in (30, None):
        assert counts(selector.select({many: 1.0, few: 1.0}, limit)) == {"many": 6, "few": 6}


def test_the_selection_is_random_and_repeatable(selector, two_files, tmp_path):
    many, _ = two_files

    def ids(seed):
        return list(ExampleSelector(one_example, tmp_path, seed=seed).select({many: 1.0}, 8)["row_id"])

    assert ids(0) == ids(0) != ids(1)
    assert ids(0) != [f"many-row-{number}" for number in range(8)]


def test_long_examples_are_left_out_made_up_for_and_counted(tmp_path, caplog):
    rows = [row | {"question": "Who is it?" if number % 2 else "Who?"} for number, row in enumerate(question_rows(20))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    selector = ExampleSelector(one_example, tmp_path / "examples", max_tokens=1)
    with caplog.at_level(logging.INFO):
        mixture = selector.select({path: 1.0}, 8)
    assert list(mixture["length"]) == [1] * 8
    assert f"{path}: 8 examples" in caplog.text
    assert f"{path}: left out 10 longer than 1 tokens" in caplog.text


def test_no_examples_and_bad_weights_are_refused(selector, two_files):
    many, few = two_files
    selector.max_tokens = 0
    with pytest.raises(ValueError, match="No examples"):
        selector.select({many: 1.0}, 8)
    with pytest.raises(ValueError, match="positive weights"):
        selector.select({many: 1.0, few: 0.0}, 8)


@pytest.fixture
def gaps(tmp_path):
    """Eight rows, of which four lack a part."""
    rows = question_rows(8)
    rows[1]["question"] = " "
    rows[2]["answers"] = []
    rows[3]["passages"] = []
    rows[4]["passages"][0]["text"] = "\n"
    return write_rows(tmp_path / "gaps.jsonl", rows)


def test_rows_without_a_part_are_left_out_and_reported(tmp_path, gaps, caplog):
    selector = ExampleSelector(one_example, tmp_path / "examples", needs_question=True)
    with caplog.at_level(logging.INFO):
        examples = selector.select({gaps: 1.0})
    assert sorted(examples["row_id"]) == ["row-0", "row-5", "row-6", "row-7"]
    assert f"{gaps}: 4 examples" in caplog.text
    assert f"{gaps}: left out 1 without a question: row-1" in caplog.text
    assert f"{gaps}: left out 1 without an answer: row-2" in caplog.text
    assert re.search(f"{gaps}: left out 2 without a passage: row-[34], row-[34]\n", caplog.text)


def test_reconstruction_needs_passages_only(tmp_path, gaps):
    examples = ExampleSelector(one_example, tmp_path / "examples").select({gaps: 1.0})
    assert sorted(examples["row_id"]) == ["row-0", "row-1", "row-2", "row-5", "row-6", "row-7"]


def test_a_long_list_of_rows_is_cut_short(tmp_path, caplog):
    rows = [row | {"answers": []} for row in question_rows(9)] + [question_rows(1)[0] | {"id": "whole"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    ExampleSelector(one_example, tmp_path / "examples", needs_question=True).select({path: 1.0})
    (record,) = [record for record in caplog.records if "without an answer" in record.message]
    assert record.levelname == "WARNING" and "left out 9 " in record.message
    assert record.message.count("row-") == 5 and record.message.endswith(", ...")


@pytest.mark.parametrize("row_id, part", [("row-1", "question"), ("row-2", "answer"), ("row-3", "passage")])
def test_strict_stops_at_a_row_without_a_part(tmp_path, gaps, row_id, part):
    (row,) = [row for row in read_rows(gaps) if row["id"] == row_id]
    path = write_rows(tmp_path / "rows.jsonl", [*question_rows(1), row])
    selector = ExampleSelector(one_example, tmp_path / "examples", needs_question=True, strict=True)
    with pytest.raises(ValueError, match=f"{path}: row {row_id} has no {part}.*`strict`"):
        selector.select({path: 1.0})


def test_a_row_without_an_id_is_reported_by_its_number(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [*question_rows(1), question_rows(1)[0] | {"id": None, "answers": []}])
    selector = ExampleSelector(one_example, tmp_path / "examples", needs_question=True, strict=True)
    with pytest.raises(ValueError, match="row 1 has no answer"):
        selector.select({path: 1.0})


def test_strict_does_not_stop_at_long_examples(tmp_path):
    rows = [row | {"question": "Who?" if number else "Who is it?"} for number, row in enumerate(question_rows(4))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    selector = ExampleSelector(one_example, tmp_path / "examples", max_tokens=1, strict=True)
    assert sorted(selector.select({path: 1.0})["row_id"]) == ["row-1", "row-2", "row-3"]


def test_a_corpus_of_texts_asks_no_questions(tmp_path):
    path = str(tmp_path / "texts.parquet")
    datasets.Dataset.from_dict({"text": ["One two three."]}).to_parquet(path)
    examples = ExampleSelector(one_example, tmp_path / "examples", passage_words=2).select({path: 1.0})
    assert sorted(examples["row_id"]) == ["0-0", "0-1"]
    selector = ExampleSelector(one_example, tmp_path / "examples", needs_question=True)
    with pytest.raises(ValueError, match="texts.parquet has no questions"):
        selector.select({path: 1.0})


def texts_of(example) -> list[str]:
    return [segment["encoder_text"] for segment in example["segments"]]


def test_questions_get_distractors(tmp_path, processor):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(6))
    builder = ExampleBuilder(processor)
    selector = ExampleSelector(builder.question_examples, tmp_path / "examples", needs_question=True)
    alone, among = selector.select({path: 1.0}), replace(selector, distractors=1.0).select({path: 1.0})
    assert list(among["row_id"]) == list(alone["row_id"])
    for one, other in zip(alone, among, strict=True):
        assert set(texts_of(one)) < set(texts_of(other))


@pytest.mark.parametrize("max_questions, sizes", [(1, [1] * 12), (2, [2] * 6), (3, [1, 1, 1, 3, 3, 3]), (9, [4] * 3)])
def test_questions_about_the_same_passages_share_a_row(tmp_path, max_questions, sizes):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(12))
    examples = ExampleSelector(one_example, tmp_path / "e", max_questions=max_questions).select({path: 1.0})
    groups = [row_ids.split(",") for row_ids in examples["row_id"]]
    assert sorted(map(len, groups)) == sizes
    assert sorted(row_id for group in groups for row_id in group) == sorted(f"row-{n}" for n in range(12))
    assert all(len({int(row_id.removeprefix("row-")) % 3 for row_id in group}) == 1 for group in groups)


def test_passages_that_differ_in_their_titles_are_not_the_same(tmp_path):
    rows = question_rows(2)
    rows[1]["passages"] = [rows[0]["passages"][0] | {"title": "Another"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert len(ExampleSelector(one_example, tmp_path / "e", max_questions=2).select({path: 1.0})) == 2


def test_questions_that_share_a_row_share_distractors_that_answer_none_of_them(tmp_path):
    own = [{"title": "", "text": "A text of two questions."}]
    rows = [row | {"passages": own} for row in rows_of(CITIES[:2])]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, *rows_of(CITIES[2:])])
    drawn = []

    def record(rows):
        drawn.append(rows)
        yield from one_example(rows)

    for seed in range(4):  # in some, the question whose answer is Rome comes second
        selector = ExampleSelector(record, tmp_path / "e", seed=seed, max_questions=2, distractors=1.0)
        selector.select({path: 1.0})
    for first, second in (group for group in drawn if len(group) == 2):
        assert first["passages"] == second["passages"] and own[0] in first["passages"]
        others = [passage for passage in first["passages"] if passage not in own]
        assert 1 <= len(others) <= 4
        # The first passages of the other cities name Rome, too.
        assert all(passage["text"].startswith("A second passage") for passage in others)
    assert {group[0]["id"] for group in drawn if len(group) == 2} == set(CITIES[:2])


def refuse(*args, **kwargs):
    raise AssertionError("these examples were made before")


@pytest.fixture
def question_selector(tmp_path, processor):
    builder = ExampleBuilder(processor)
    return ExampleSelector(builder.question_examples, tmp_path / "examples", needs_question=True)


def test_examples_are_made_once(tmp_path, question_selector, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(6))
    made = question_selector.select({path: 1.0})
    monkeypatch.setattr(selection, "_examples_of_rows", refuse)
    again = replace(
        question_selector, make_examples=ExampleBuilder(make_processor(question_selector)).question_examples
    )
    assert again.select({path: 1.0}).to_dict() == made.to_dict()


def make_processor(selector, **changes):
    """The selector's processor, written and read anew, with other settings."""
    processor = copy.deepcopy(selector.make_examples.__self__.processor)
    for name, value in changes.items():
        setattr(processor, name, value)
    return processor


@pytest.mark.parametrize(
    "changes",
    [
        {"sentences_per_segment": 0.5},
        {"spacy_model": "de"},
        {"context_token_id": 999},
        {"encoder_name_or_path": "org/another"},
        {"chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_examples_of_another_segmenter_or_prompt_are_not_taken(tmp_path, question_selector, monkeypatch, changes):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(3))
    question_selector.select({path: 1.0})
    builder = ExampleBuilder(make_processor(question_selector, **changes))
    monkeypatch.setattr(selection, "_examples_of_rows", refuse)
    with pytest.raises(AssertionError, match="made before"):
        replace(question_selector, make_examples=builder.question_examples).select({path: 1.0})


def test_examples_of_another_tokenizer_are_not_taken(tmp_path, question_selector, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(3))
    question_selector.select({path: 1.0})
    processor = make_processor(question_selector)
    processor.tokenizer.add_tokens(["sentence"])
    monkeypatch.setattr(selection, "_examples_of_rows", refuse)
    with pytest.raises(AssertionError, match="made before"):
        replace(question_selector, make_examples=ExampleBuilder(processor).question_examples).select({path: 1.0})


@pytest.mark.parametrize("changed", ["data", "distractors"])
def test_examples_of_other_data_are_not_taken(tmp_path, question_selector, changed):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(6))
    selector = question_selector
    selector.select({path: 1.0})
    if changed == "data":
        path = write_rows(tmp_path / "rows.jsonl", [row | {"question": "Another?"} for row in question_rows(6)])
    else:
        selector = replace(selector, distractors=1.0)
    fresh = replace(selector, cache_dir=tmp_path / "fresh").select({path: 1.0})
    assert selector.select({path: 1.0}).to_dict() == fresh.to_dict()


def stopping_examples(rows):
    """One example; the process stops at the row that the environment names."""
    if rows[0]["id"] == os.environ.get("STOP_AT"):
        raise KeyboardInterrupt
    yield from one_example(rows)


def test_a_stopped_run_goes_on_at_its_next_block(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "ROWS_PER_BLOCK", 4)
    path = write_rows(tmp_path / "rows.jsonl", question_rows(12))
    whole = ExampleSelector(stopping_examples, tmp_path / "whole").select({path: 1.0})
    stopped = ExampleSelector(stopping_examples, tmp_path / "examples")
    monkeypatch.setenv("STOP_AT", whole["row_id"][9])
    with pytest.raises(KeyboardInterrupt):
        stopped.select({path: 1.0})
    assert len(list((tmp_path / "examples").glob("*.arrow"))) == 2
    monkeypatch.setenv("STOP_AT", whole["row_id"][2])  # a row of the first block: it must not be asked again
    assert stopped.select({path: 1.0}).to_dict() == whole.to_dict()


def test_several_processes_make_the_same_examples(tmp_path, question_selector):
    path = write_rows(tmp_path / "rows.jsonl", question_rows(6))
    two = replace(question_selector, num_proc=2, cache_dir=tmp_path / "two")
    assert two.select({path: 1.0}).to_dict() == question_selector.select({path: 1.0}).to_dict()


# Distractors


@pytest.fixture
def corpus(tmp_path):
    datasets.Dataset.from_list(rows_of(CITIES)).to_parquet(tmp_path / "cities.parquet")
    return open_corpus(str(tmp_path / "cities.parquet"))


def texts(row):
    return [passage["text"] for passage in row["passages"]]


def test_a_row_keeps_its_passages_among_one_to_four_others_of_the_corpus(corpus):
    known = {text for row in corpus for text in texts(row)}
    counts, places = set(), set()
    for seed in range(12):
        for row in corpus:
            mixed = texts(Distractors(corpus, 1.0, seed)(row))
            assert len(mixed) == len(set(mixed))
            assert set(texts(row)) < set(mixed) <= known
            counts.add(len(mixed) - 2)
            places.add(mixed.index(texts(row)[0]))
    assert counts == {1, 2, 3, 4} and places == set(range(6))


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.33, 133), (1.0, 400)])
def test_a_share_of_the_rows_gets_distractors_and_the_others_stay_as_they_are(corpus, share, expected):
    mix = Distractors(corpus, share, seed=0)
    rows = [corpus[number % 8] | {"id": str(number)} for number in range(400)]
    mixed = sum(mix(row) != row for row in rows)
    assert abs(mixed - expected) < 30


def test_no_distractor_holds_the_answer(corpus):
    row = corpus[0]  # Rome: the first passage of every other row names it
    for seed in range(20):
        others = [p for p in Distractors(corpus, 1.0, seed)(row)["passages"] if p not in row["passages"]]
        assert others and all(passage["text"].startswith("A second passage") for passage in others)


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


def test_a_corpus_with_too_few_passages_gives_fewer(tmp_path):
    datasets.Dataset.from_list(rows_of(CITIES[:2])).to_parquet(tmp_path / "two.parquet")
    corpus = open_corpus(str(tmp_path / "two.parquet"))
    for seed in range(8):  # the other row's first passage names this row's city
        assert sorted(texts(Distractors(corpus, 1.0, seed)(corpus[0]))) == sorted(
            [*texts(corpus[0]), texts(corpus[1])[1]]
        )
