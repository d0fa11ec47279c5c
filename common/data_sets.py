"""Public data sets of questions and texts: their licences, and conversion of their rows to our schema (`rows.py`).

Training and evaluation use the same sets, so both take the rows from here. `train/prepare_data.py` makes the files of
`TRAINING_FILES`, which the recipes name. Like `rows.py`, it needs the standard library only.
"""

import json
import re
from collections.abc import Iterator

from .files import stable_number
from .rows import Row

SQUAD, HOTPOTQA, MUSIQUE = "rajpurkar/squad", "hotpotqa/hotpot_qa", "dgslibisey/MuSiQue"
QED, QAMR, WIKIPEDIA = "google-research-datasets/QED", "uwnlp/qamr", "wikimedia/wikipedia"
ON_GITHUB = (QED, QAMR, "stanford-futuredata/ARES")
# Name and licence of a set, by its id: a data set of the Hub or a repository of GitHub.
LICENCES = {
    SQUAD: ("SQuAD 1.1", "CC BY-SA 4.0"),
    QED: ("Natural Questions, from QED", "CC BY-SA 3.0"),
    HOTPOTQA: ("HotpotQA", "CC BY-SA 4.0"),
    MUSIQUE: ("MuSiQue", "CC BY 4.0"),
    QAMR: ("QAMR", "MIT"),
    "stanford-futuredata/ARES": ("synthetic questions of ARES", "Apache-2.0"),
    WIKIPEDIA: ("paragraphs of Wikipedia", "CC BY-SA 3.0 and GFDL"),
}
TRAINING_FILES = {
    "train_qa.jsonl.gz": (SQUAD, QED, HOTPOTQA, MUSIQUE),
    "train_extra.jsonl.gz": (QAMR,),
    "recon_train.jsonl.gz": (WIKIPEDIA,),
    "recon_heldout.jsonl.gz": (WIKIPEDIA,),
}
# The number of words of a suitable paragraph of Wikipedia: more than a heading, fewer than a table.
_FEWEST_WORDS, _MOST_WORDS = 20, 220
# Spaces that tokenization has put around punctuation.
_SPACE_BEFORE = re.compile(r" +([,.;:?!%)\]}]|'s\b|n't\b|'(?:re|ve|ll|d|m)\b)")
_SPACE_AFTER = re.compile(r"([(\[{$]) +")
_QUESTION_WIDTH = 50  # characters of a question in QAMR's readable files


def squad_row(row: dict) -> Row:
    """A question about its paragraph: SQuAD, and sets of the same form."""
    return {
        "id": row["id"],
        "question": row["question"],
        "answers": list(dict.fromkeys(row["answers"]["text"])),
        "passages": [{"title": row["title"].replace("_", " "), "text": row["context"]}],
    }


def hotpotqa_row(row: dict) -> Row:
    """A question about two of ten paragraphs; 2WikiMultiHopQA has the same form."""
    context, supporting = row["context"], set(row["supporting_facts"]["title"])
    return {
        "id": row.get("id"),
        "question": row["question"],
        "answers": [row["answer"]] if row["answer"] else [],
        "passages": [
            {"title": title, "text": " ".join(sentence.strip() for sentence in sentences)}
            for title, sentences in zip(context["title"], context["sentences"], strict=True)
        ],
        "meta": {"gold": [number for number, title in enumerate(context["title"]) if title in supporting]},
    }


def musique_row(row: dict) -> Row | None:
    """An answerable question about two to four of twenty paragraphs."""
    if not row["answerable"]:
        return None
    return {
        "id": row["id"],
        "question": row["question"],
        "answers": [row["answer"], *row["answer_aliases"]],
        "passages": [{"title": part["title"], "text": part["paragraph_text"]} for part in row["paragraphs"]],
        "meta": {"gold": [number for number, part in enumerate(row["paragraphs"]) if part["is_supporting"]]},
    }


def qed_row(row: dict) -> Row | None:
    """A question of Natural Questions about the paragraph with its answer, from a line of QED; `None` if,
    according to QED's annotators, the paragraph does not answer it."""
    row = json.loads(row["text"])
    if row["annotation"]["explanation_type"] == "none":
        return None
    answers = [", ".join(untokenized(span["string"]) for span in spans) for spans in row["original_nq_answers"]]
    return {
        "id": str(row["example_id"]),
        "question": row["question_text"],
        "answers": list(dict.fromkeys(answers)),
        "passages": [{"title": row["title_text"], "text": untokenized(row["paragraph_text"])}],
    }


def qamr_rows(row: dict) -> Iterator[Row]:
    """The questions about a sentence, from a block of QAMR's readable files: an id, the sentence, and a line for each
    question. The question fills `_QUESTION_WIDTH` characters; its answers follow between tabs."""
    name, sentence, *lines = row["text"].splitlines()
    for number, line in enumerate(lines):
        answers = [answer.strip() for answer in line[_QUESTION_WIDTH:].split("\t")]
        yield {
            "id": f"{name.removeprefix('#')}_{number}",
            "question": line[:_QUESTION_WIDTH].strip(),
            "answers": list(dict.fromkeys(filter(None, answers))),
            "passages": [{"title": "", "text": sentence}],
        }


def wikipedia_row(row: dict) -> Row | None:
    """One paragraph of an article, always the same one, without a question; `None` if no paragraph is suitable."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in row["text"].split("\n\n")]
    fitting = [text for text in paragraphs if _FEWEST_WORDS <= len(text.split()) <= _MOST_WORDS]
    if not fitting:
        return None
    text = fitting[stable_number(f"paragraph:{row['id']}", len(fitting))]
    return {
        "id": row["id"],
        "question": "",
        "answers": [],
        "passages": [{"title": row["title"], "text": text}],
    }


def untokenized(text: str) -> str:
    """Text without the spaces and quotation marks of the Penn Treebank.

    >>> untokenized("the `` Iron Lady '' ( born 1925 ) did n't say so .")
    'the "Iron Lady" (born 1925) didn\\'t say so.'
    """
    text = text.replace("`` ", '"').replace(" ''", '"')
    return _SPACE_AFTER.sub(r"\1", _SPACE_BEFORE.sub(r"\1", text))
