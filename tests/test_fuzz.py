"""Any input works, or gets a `ValueError` or `TypeError` that says what was wrong; a command says so in one line."""

import itertools
import re

import numpy as np
import pytest
import torch
import typer
from conftest import ENCODER_WIDTH, pipeline_of
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from arcaligner.apps.cli import app as cli

PHASES = [Phase.explicit, Phase.generate]
BOUNDED = settings(
    max_examples=60, phases=PHASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SAYS = re.compile(r"expected|must|needs|is empty|not valid|has no|[Pp]ass |[Gg]ot |[Ff]ound |Use ")


def assert_works_or_says_why(call, *args, **kwargs):
    """Returns the result, or `None` if the call is refused in a sentence that says what was given or expected.

    Any other error fails the test."""
    try:
        return call(*args, **kwargs)
    except (ValueError, TypeError) as error:
        assert SAYS.search(str(error)), str(error)


def fields(**optional):
    """Dictionaries with some of these fields."""
    return st.fixed_dictionaries({}, optional=optional)


texts = st.sampled_from(["Who?", "It is. So.", "", " ", "<|im_end|>", "caf\udce9", "\x00\x1b[2J", "é漢😀", "(" * 50])
arrays = [np.zeros((2, 3)), np.array(["a", 5], object), torch.ones(3), torch.ones(1, 2, ENCODER_WIDTH)]
arrays += [torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
junk = st.sampled_from([None, True, 5, -1, 1.5, float("nan"), 10**30, b"x", object(), [], {}, (), lambda: 0, *arrays])
anything = texts | junk
documents = st.lists(texts | fields(text=anything, title=anything), max_size=3)
contents = anything | st.lists(anything | fields(type=st.just("text"), text=anything), max_size=2)
roles = st.sampled_from(["user", "assistant", "system", "?", None, 5])
messages = st.lists(fields(role=roles, content=contents), max_size=3)
tensors = st.builds(
    lambda shape, kind, scale: (torch.arange(float(np.prod(shape))).view(shape) * scale).to(kind),
    st.lists(st.sampled_from([0, 1, 2, 3, ENCODER_WIDTH]), max_size=4).map(tuple),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([0.1, 1.0, -1.0, 1e38, float("nan")]),
)
some_tensor = tensors | junk
options = fields(max_slots=st.integers(-1, 3) | junk, tokens_per_slot=st.sampled_from([1, 4, "segment", 0, "x"]) | junk)
gates = fields(
    gate_mode=st.sampled_from(["off", "adaptive", "always"]) | anything,
    gate_threshold=st.floats() | anything,
    max_refinement_steps=st.integers(-1, 3) | anything,
    refinement_budget=st.floats() | anything,
)
passages = fields(
    documents=anything | documents | st.lists(documents, max_size=2),
    context_embeds=some_tensor | st.lists(tensors, max_size=2),
    context_word_ids=some_tensor,
)


@BOUNDED
@given(text=anything | st.lists(texts, max_size=2), passages=passages, options=options)
@example(text="Who?", passages={"documents": [{"title": 5, "text": "It is."}]}, options={})
def test_processor(processor, text, passages, options):
    assert_works_or_says_why(processor, text=text, return_tensors="pt", **passages, **options)


@BOUNDED
@given(
    ids=some_tensor | st.just("slots"),
    embeds=some_tensor,
    mask=some_tensor.filter(lambda mask: getattr(mask, "ndim", 2) > 0),
    labels=some_tensor,
    gates=gates,
    generate=st.booleans(),
)
def test_model(model, ids, embeds, mask, labels, gates, generate):
    if isinstance(ids, str):
        ids = torch.tensor([[5, model.config.context_token_id, model.config.context_token_id, 6]])
    batch = {"input_ids": ids, "context_embeds": embeds, "attention_mask": mask, **gates}
    if generate:
        assert_works_or_says_why(model.generate, **batch, max_new_tokens=2)
    else:
        output = assert_works_or_says_why(model, **batch, labels=labels)
        assert output is None or torch.isfinite(output.logits).all()


@BOUNDED
@given(
    row=fields(question=anything, messages=messages | junk, documents=documents | junk) | anything | messages,
    documents=documents | junk,
    settings=options | gates,
    with_store=st.booleans(),
)
@example(row={"messages": []}, documents=["It is."], settings={}, with_store=False)
def test_pipeline_and_store(model, processor, row, documents, settings, with_store):
    if with_store:
        question = row.get("question") if isinstance(row, dict) else row
        assert_works_or_says_why(model.passage_cache(processor).prepare, question, documents, **settings)
    else:
        assert_works_or_says_why(pipeline_of(model, processor), row, documents=documents, max_new_tokens=1, **settings)


VALUES = ["", " ", "-1", "0", "1e999", ".", "letter.txt", "[{", "nan", "caf\udce9", "\x1b[2J"]


def commands_of(command, name=""):
    """All commands of the command line, with their names."""
    if not hasattr(command, "commands"):
        return [(name, command)]
    return [pair for key, part in command.commands.items() for pair in commands_of(part, f"{name} {key}".strip())]


COMMANDS = dict(commands_of(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_command_line(name, run_cli, tmp_path, monkeypatch):
    """A command whose checkpoint does not exist ends with one line of error for any value of any option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("It was written by Ada. So it is.")
    options = {option.opts[0]: option for option in COMMANDS[name].params if option.name != "help"}
    needed = [key for key, option in options.items() if option.required or option.name == "checkpoint"]
    required = dict.fromkeys(needed, "nobody/nothing")
    for option, value in itertools.product(options, VALUES):
        pairs = (required | {option: value}).items()
        arguments = [argument for key, text in pairs for argument in ([key, text] if key[0] == "-" else [text])]
        code, output, errors = run_cli(*name.split(), *arguments)
        assert code in (1, 2) and "Traceback" not in errors and "\x1b" not in output + errors
        assert (code == 1) == (len(re.findall(r"^Error:", errors, re.M)) == 1), errors
