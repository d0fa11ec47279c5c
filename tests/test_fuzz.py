"""Whatever is given: it works, or a `ValueError` or `TypeError` says what was wrong; a command says it in one line."""

import functools
import gzip
import json
import re
import shutil

import numpy as np
import pytest
import torch
import typer
from conftest import ENCODER_WIDTH, pipeline_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from arcaligner.cli import app as cli
from arcaligner.cli import demo, shared
from arcaligner.corpus import build, table
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM
from arcaligner.server import listen
from arcaligner.train import stages

BOUNDED = settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
texts = st.sampled_from(["Who?", "It is. So.", "", " ", "<|im_end|>", "caf\udce9", "\x00\x1b[2J", "é漢😀", "(" * 50])
arrays = [np.zeros((2, 3)), np.array(["a", 5], object), torch.ones(3), torch.ones(1, 2, ENCODER_WIDTH)]
arrays += [torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
junk = st.sampled_from([None, True, 5, -1, 1.5, float("nan"), 10**30, b"x", object(), [], {}, (), lambda: 0, *arrays])
anything = texts | junk
documents = st.lists(texts | st.fixed_dictionaries({"text": anything}, optional={"title": anything}), max_size=3)
parts = anything | st.fixed_dictionaries({"type": st.just("text")}, optional={"text": anything})
contents = anything | st.lists(parts, max_size=2)
roles = st.sampled_from(["user", "assistant", "system", "?", None, 5])
messages = st.lists(st.fixed_dictionaries({}, optional={"role": roles, "content": contents}), max_size=3)
tensors = st.builds(
    lambda shape, kind, scale: (torch.arange(float(np.prod(shape))).view(shape) * scale).to(kind),
    st.lists(st.sampled_from([0, 1, 2, 3, ENCODER_WIDTH]), max_size=4).map(tuple),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([0.1, 1.0, -1.0, 1e38, float("nan")]),
)
options = st.fixed_dictionaries(
    {},
    optional={
        "max_slots": st.integers(-1, 3) | junk,
        "tokens_per_slot": st.sampled_from([1, 4, "segment", 0, "x"]) | junk,
    },
)
gates = st.fixed_dictionaries(
    {},
    optional={
        "gate_mode": st.sampled_from(["off", "adaptive", "always"]) | anything,
        "gate_threshold": st.floats() | anything,
        "max_refinement_steps": st.integers(-1, 3) | anything,
        "refinement_budget": st.floats() | anything,
    },
)


SAYS = re.compile(r"expected|must|needs|is empty|not valid|has no|[Pp]ass |[Gg]ot |[Ff]ound |Use ")


def assert_works_or_says_why(call):
    """Returns the result, or `None` for a mistake of the caller, refused in a sentence that says what was given or
    expected. Any other error fails the test."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        assert SAYS.search(str(error)), str(error)


def assert_finite(output):
    assert output is None or torch.isfinite(output.logits).all()


@BOUNDED
@given(
    text=anything | st.lists(texts, max_size=2),
    documents=anything | documents | st.lists(documents, max_size=2),
    options=options,
    embeds=tensors | junk | st.lists(tensors, max_size=2),
    words=st.none() | tensors | junk,
    given=st.sampled_from(["documents", "embeds", "both", "none"]),
)
def test_processor(processor, text, documents, options, embeds, words, given):
    passages = {"documents": documents if given in ("documents", "both") else None}
    passages |= {"context_embeds": embeds if given in ("embeds", "both") else None, "context_word_ids": words}
    assert_works_or_says_why(lambda: processor(text=text, return_tensors="pt", **passages, **options))


@BOUNDED
@given(chat=messages | anything | st.lists(messages, max_size=2), documents=documents | junk)
def test_chat(processor, chat, documents):
    asked = {"documents": documents, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    assert_works_or_says_why(lambda: processor.apply_chat_template(chat, **asked))


@pytest.fixture(scope="module")
def tiny(checkpoint_dir):
    return ArcAlignerForCausalLM.from_pretrained(str(checkpoint_dir)).eval()


@BOUNDED
@given(
    ids=tensors | junk | st.just("slots"),
    embeds=tensors | junk,
    mask=st.none() | tensors | junk,
    labels=st.none() | tensors | junk,
    gates=gates,
    generate=st.booleans(),
)
def test_model(tiny, ids, embeds, mask, labels, gates, generate):
    if isinstance(ids, str):
        ids = torch.tensor([[5, tiny.config.context_token_id, tiny.config.context_token_id, 6]])
    batch = {"input_ids": ids, "context_embeds": embeds, "attention_mask": mask, **gates}
    if generate:
        assert_works_or_says_why(lambda: tiny.generate(**batch, max_new_tokens=2))
    else:
        assert_finite(assert_works_or_says_why(lambda: tiny(**batch, labels=labels)))


@BOUNDED
@given(data=st.data())
def test_pipeline_and_store(tiny, processor, data):
    ask = pipeline_of(tiny, processor)
    row = data.draw(
        st.fixed_dictionaries(
            {}, optional={"question": anything, "messages": messages | junk, "documents": documents | junk}
        )
        | anything
        | messages
    )
    passages, settings = data.draw(documents | junk), data.draw(options | gates)
    if data.draw(st.booleans()):
        assert_works_or_says_why(lambda: ask(row, documents=passages, max_new_tokens=1, **settings))
    else:
        store = tiny.slot_prefix_store(processor)
        question = row.get("question") if isinstance(row, dict) else row
        assert_works_or_says_why(lambda: store.prepare(question, passages, **settings))


BAD_ROWS = [
    ({"question": ""}, "The question is empty"),
    ({"question": "caf\udce9"}, r"A message of the user is not valid Unicode at character 3: '\\udce9'"),
    ({"question": "Who?", "documents": 5}, r"`documents` of row \d is 5; expected a list"),
    ({"question": "Who?", "documents": [None]}, "Document 0 is of type NoneType; expected a string"),
    ({"question": "Who?", "documents": ["One. "] * 600}, r"The passages.* are 600 slots"),
    ({"question": "Who? " * 600, "documents": ["One."]}, "are 1 slots, but there is room for 0 .* Pass a shorter"),
    (7, "Expected a chat, .*; got int"),
]
questions = st.sampled_from(["Who?", "Who wrote it, and when?", "<|im_end|>?", "é漢😀?"])
good = st.sampled_from(["One.", "It is. So.", "<|im_end|>", {"title": "Ada", "text": "She wrote."}])
passages = st.lists(good, max_size=3)
rows = st.builds(lambda question, documents: {"question": question, "documents": documents}, questions, passages)


@settings(BOUNDED, max_examples=15)
@given(rows=st.lists(rows, min_size=1, max_size=4), bad=st.sampled_from(BAD_ROWS), place=st.integers(0, 4))
def test_good_rows_of_a_batch_are_answered_as_alone_and_a_bad_one_is_named(tiny, processor, rows, bad, place):
    ask = pipeline_of(tiny, processor)
    options = {"max_new_tokens": 2, "do_sample": False}
    together = ask(rows, batch_size=4, **options)
    assert together == [ask(row, **options) for row in rows]
    value, message = bad
    with pytest.raises((ValueError, TypeError), match=message):
        ask([*rows[:place], value, *rows[place:]], batch_size=4, **options)


# A command that works, for each there is; arguments without a name stand under "".
COMMANDS = {
    "answer": {"--question": "Who?", "--document": "letter.txt", "--checkpoint": "tiny"},
    "corpus build": {"": "letter.txt", "--output": "new.lance", "--checkpoint": "tiny"},
    "corpus remove": {"": "letter.txt", "--corpus": "corpus.lance"},
    "corpus info": {"--corpus": "corpus.lance"},
    "ask": {"": "Who?", "--corpus": "corpus.lance", "--checkpoint": "tiny", "--max-new-tokens": "2"},
    "serve": {"--checkpoint": "tiny", "--corpus": "corpus.lance"},
    "demo": {"--checkpoint": "tiny"},
    "train": {"--recipe": "tiny"},
    "evaluate": {"--checkpoint": "tiny", "--tasks": "squad", "--methods": "arcaligner", "--data": ".", "-n": "1"},
    "push": {"--repo-id": "user/name", "--checkpoint": "tiny"},
}
VALUES = ["", " ", "-1", "0", "2", "1e999", "nan", "none", "user/name", ".", "/", "letter.txt", "binary.txt"]
VALUES += ["rows.jsonl", "tiny", "corpus.lance", "segment", "off", "gold,x", "[{", "--", "caf\udce9", "\x1b[2J"]
VALUES += ["x" * 300]


def options_of(name: str) -> list[str]:
    command = typer.main.get_command(cli.app)
    for part in name.split():
        command = command.commands[part]
    return [each.opts[0] for each in command.params if each.opts[0] not in ("--help", "--private")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, checkpoint_dir, processor):
    """A folder with what the commands read."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(checkpoint_dir, folder / "tiny")
    (folder / "letter.txt").write_text("It was written by Ada. So it is.")
    (folder / "binary.txt").write_bytes(b"\xff")
    row = {"id": "1", "question": "Who?", "answers": ["Ada"], "passages": [{"title": "", "text": "Ada wrote it."}]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n[]\n")
    with gzip.open(folder / "squad.jsonl.gz", "wt") as file:
        file.write(json.dumps(row))
    corpus = table.Corpus.create(folder / "corpus.lance", processor)
    build.build_corpus([str(folder / "letter.txt")], corpus, processor)
    return folder


load = functools.cache(shared.load_pipeline)


@settings(BOUNDED, max_examples=25)
@given(data=st.data())
def test_command_line(workplace, monkeypatch, capsys, data):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(shared, "load_pipeline", load)
    monkeypatch.setattr(demo, "run_demo", lambda *args: None)
    monkeypatch.setattr(listen, "serve", lambda engine, settings, on_listening: engine.close())
    monkeypatch.setattr(stages, "run_stages", lambda *args: None)
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    given = dict(COMMANDS[name])
    for option in data.draw(st.lists(st.sampled_from(options_of(name)), max_size=2)):
        given["" if option[0] != "-" else option] = data.draw(st.sampled_from(VALUES))
    arguments = [each for pair in given.items() for each in pair if each is not pair[0] or each]
    try:
        cli.main([*name.split(), *arguments])
    except SystemExit as exit:
        output, errors = capsys.readouterr()
        assert exit.code in (0, 1, 2) and "Traceback" not in errors and "\x1b" not in output + errors
        assert (exit.code == 1) == (len(re.findall(r"^Error:", errors, re.M)) == 1), errors
