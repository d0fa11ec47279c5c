"""Distractors: passages that are nearest to the question, without its answer, drawn by seed and row alone."""

import pytest
from training_rows import CITIES, city_rows

from arcaligner.train.distractors import NearestPassages, contains_answer, needed_and_others


@pytest.fixture
def corpus():
    return [row | {"gold": []} for row in city_rows(CITIES)]


@pytest.fixture
def nearest(corpus):
    return NearestPassages(corpus)


def texts(passages):
    return [passage["text"] for passage in passages]


def nearest_of(titles):
    """The index of passages with these texts and titles, and the passages; they belong to no question."""
    passages = [{"title": title, "text": text} for text, title in titles.items()]
    return NearestPassages([{"question": "", "answers": [], "passages": passages, "gold": []}]), passages


def test_nearest_without_answer():
    """The nearest passages come first and contain no answer; on request they are of the same article."""
    sentences = ["The tower of Oslo is tall.", "Oslo has a tower.", "A tower.", "Nothing."]
    index, passages = nearest_of(dict.fromkeys(sentences, ""))
    assert texts(index.without_answer("the tower of oslo", ["tall"], [], 2)) == sentences[1:3]
    assert texts(index.without_answer("the tower of oslo", ["x"], passages[1:2], 1)) == sentences[:1]
    assert index.without_answer("?", ["x"], [], 3) == []
    index, passages = nearest_of({sentences[0]: "Oslo", "Oslo is old.": "Oslo", "The tower of Oslo burned.": "Norway"})
    arguments = "the tower of oslo", ["tall"], passages[:1], 3
    assert texts(index.without_answer(*arguments)) == ["The tower of Oslo burned.", "Oslo is old."]
    assert texts(index.without_answer(*arguments, in_article=True)) == ["Oslo is old."]
    assert index.without_answer("fjord", ["x"], passages[:1], 3, in_article=True) == []  # no word in common


def test_row_keeps_its_passages(corpus, nearest):
    """A row keeps its passages among one to four others of the corpus."""
    known = {text for row in corpus for text in texts(row["passages"])}
    numbers, places = set(), set()
    for seed in range(12):
        for row in corpus:
            mixed = texts(nearest.mixed([row | {"question": "second passage city"}], 1.0, seed))
            assert len(mixed) == len(set(mixed)) and set(texts(row["passages"])) < set(mixed) <= known
            numbers.add(len(mixed) - 2)
            places.add(mixed.index(texts(row["passages"])[0]))
    assert numbers == {1, 2, 3, 4} and places == set(range(6))
    assert len(nearest.mixed([corpus[0]], 1.0, seed=0, max_distractors=7)) > 2 + 4


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.33, 133), (1.0, 400)])
def test_distractors_depend_on_seed(corpus, nearest, share, expected):
    """A share of the rows gets distractors, which depend on seed and row only."""
    rows = [corpus[number % 8] | {"id": str(number), "question": "passage"} for number in range(400)]
    mixed = [nearest.mixed([row], share, seed=0) for row in rows]
    number = sum(passages != row["passages"] for row, passages in zip(rows, mixed, strict=True))
    assert abs(number - expected) < 30
    assert mixed[::-1] == [nearest.mixed([row], share, seed=0) for row in reversed(rows)]
    assert share == 0.0 or mixed != [nearest.mixed([row], share, seed=1) for row in rows]


def test_few_passages_few_distractors(corpus):
    """Few passages without an answer give fewer distractors."""
    row = corpus[0] | {"question": "second passage by the river"}  # Rome, which all first passages name
    two = NearestPassages(corpus[:2])
    for seed in range(8):
        expected = sorted([*texts(row["passages"]), texts(corpus[1]["passages"])[1]])
        assert sorted(texts(two.mixed([row], 1.0, seed))) == expected


def test_unneeded_passages_are_distractors(nearest):
    """If a row says which passages it needs, its other passages are distractors."""
    passages = [{"title": "", "text": f"Text {number}."} for number in range(10)]
    row = {"id": "x", "question": "Which?", "answers": ["Text 3"], "passages": passages, "gold": [3, 7]}
    for seed in range(20):
        mixed = nearest.mixed([row], 1.0, seed)
        assert {"Text 3.", "Text 7."} < set(texts(mixed)) <= set(texts(passages)) and len(mixed) <= 6
    others = [passage for passage in passages if passage["text"][5] not in "37"]
    assert needed_and_others(row) == ([passages[3], passages[7]], others)


@pytest.mark.parametrize(
    "text, answers, expected",
    [
        ("It is in ROME, Italy.", ["Rome"], True),
        ("It is in Italy.", ["Lima", "italy"], True),
        ("It is well known.", ["no"], False),
        ("New\n York is large.", ["new york"], True),
        ("It cost $5 (five).", ["$5"], True),
        ("Romeo came.", ["Rome"], False),
    ],
)
def test_answers_match_whole_words(text, answers, expected):
    assert contains_answer({"title": "", "text": text}, answers) is expected
    assert contains_answer({"title": text, "text": ""}, answers) is expected
