"""Distractors: around a question's own passages, never with its answer, the same in each run."""

import datasets
import pytest

from arcaligner.train.corpora import open_corpus
from arcaligner.train.distractors import Distractors, contains_answer

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
def corpus(tmp_path):
    datasets.Dataset.from_list(rows_of(CITIES)).to_parquet(tmp_path / "cities.parquet")
    return open_corpus(str(tmp_path / "cities.parquet"))


def texts(row):
    return [passage["text"] for passage in row["passages"]]


def test_a_row_keeps_its_passages_among_others_of_the_corpus(corpus):
    known = {text for row in corpus for text in texts(row)}
    places = set()
    for seed in range(8):
        for row in corpus:
            mixed = texts(Distractors(corpus, 5, 5, seed)(row))
            assert len(mixed) == len(set(mixed)) == 5
            assert set(texts(row)) < set(mixed) <= known
            places.add(mixed.index(texts(row)[0]))
    assert places == set(range(5))


def test_no_distractor_holds_the_answer(corpus):
    row = corpus[0]  # Rome: the first passage of every other row names it
    for seed in range(20):
        others = [p for p in Distractors(corpus, 6, 6, seed)(row)["passages"] if p not in row["passages"]]
        assert len(others) == 4
        assert all(text.startswith("A second passage") for text in (passage["text"] for passage in others))


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
    draws = [Distractors(corpus, 2, 6, seed=0)(row) for row in corpus]
    backwards = [Distractors(corpus, 2, 6, seed=0)(row) for row in reversed(list(corpus))]
    assert draws == backwards[::-1]
    assert draws != [Distractors(corpus, 2, 6, seed=1)(row) for row in corpus]


def test_numbers_of_passages_are_drawn_from_the_range(corpus):
    counts = {len(Distractors(corpus, 1, 4, seed)(row)["passages"]) for seed in range(8) for row in corpus}
    assert counts == {2, 3, 4}  # its own two always stay


def test_a_corpus_with_too_few_passages_gives_fewer(tmp_path):
    datasets.Dataset.from_list(rows_of(CITIES[:2])).to_parquet(tmp_path / "two.parquet")
    corpus = open_corpus(str(tmp_path / "two.parquet"))
    assert sorted(texts(Distractors(corpus, 9, 9, seed=0)(corpus[0]))) == sorted(
        [*texts(corpus[0]), texts(corpus[1])[1]]
    )
