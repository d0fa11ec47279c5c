"""Training rows for the tests: questions and passages in the schema of the training files."""

import gzip
import json
from pathlib import Path

PASSAGES = (
    ("Toronto Northwest", "It was a federal district. It was created in 1924! Parkdale lost a part to it?"),
    ("", "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003."),
    ("Ada", "Nobody else knew how to read it aloud."),
)


# One row of each of a few data sets, in the format of the Hub.
SQUAD = {"id": "s1", "title": "Ada_L", "context": "Ada.", "question": "Who?", "answers": {"text": ["Ada", "Ada"]}}
_PARAGRAPHS = {"title": ["Cy", "Ada", "Ben"], "sentences": [["No."], ["Ada was born. ", "In 1815."], ["Ben. "]]}
HOTPOTQA = {"id": "h1", "question": "Was Ada born before Ben?", "answer": "yes", "context": _PARAGRAPHS}
HOTPOTQA["supporting_facts"] = {"title": ["Ben", "Ada", "Ben"], "sent_id": [0, 0, 1]}
MUSIQUE = {"id": "m1", "question": "Who?", "answer": "Ada", "answer_aliases": ["A."], "answerable": True}
MUSIQUE["paragraphs"] = [
    {"title": "x", "paragraph_text": "y", "is_supporting": False},
    {"title": "z", "paragraph_text": "w", "is_supporting": True},
]


def question_rows(count: int) -> list[dict]:
    """`count` rows; the question of row n is about passage n modulo 3."""
    rows = []
    for number in range(count):
        title, text = PASSAGES[number % len(PASSAGES)]
        row = {"id": f"row-{number}", "question": f"What is said in sentence {number}?"}
        row |= {"answers": [text.split()[-1], "another"], "passages": [{"title": title, "text": text}]}
        rows.append(row | {"dataset": "test"})
    return rows


def passage_rows(count: int) -> list[dict]:
    """`count` reconstruction rows: no question, no answer."""
    return [{**row, "question": "", "answers": []} for row in question_rows(count)]


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes `rows` as JSON Lines, gzipped when the name says so; returns the path."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def article_rows(count, questions=4):
    """Rows of articles on one subject each, so that the nearest other passage is that of another question."""
    rows = []
    for number in range(count):
        text = f"The mill of town {number} ground corn until {1800 + number}, by the river."
        fields = {"answers": [str(1800 + number)], "passages": [{"title": f"Town {number}", "text": text}]}
        for index in range(questions):
            question = f"Until when, question {index}, did the mill of town {number} grind?"
            rows.append({"id": f"{number}-{index}", "question": question} | fields)
    return rows


CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Quito", "Dakar", "Hanoi")


def city_rows(cities) -> list[dict]:
    """A row for each city, of two passages; all first ones name the first of `CITIES`."""
    rows = []
    for number, city in enumerate(cities):
        text = f"It lies by a river, as {CITIES[0]} does. This is {city}."
        second = {"title": "", "text": f"A second passage, number {number}."}
        fields = {"answers": [city], "passages": [{"title": f"About {city}", "text": text}, second]}
        rows.append({"id": city, "question": "Which city is it?"} | fields)
    return rows
