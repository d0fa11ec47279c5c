"""Whatever is given: it works, or a `ValueError` or `TypeError` says what was wrong; a command says it in one line."""

import shutil

import numpy as np
import pytest
import torch
from conftest import ENCODER_WIDTH
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from arcaligner import ArcAlignerPipeline, cli
from arcaligner.modeling_arcaligner import ArcAlignerForCausalLM

BOUNDED = settings(
    max_examples=60,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
texts = st.sampled_from(["Who?", "It is. So.", "", " ", "<|im_end|>", "caf\udce9", "\x00\x1b[2J", "é漢😀", "(" * 50])
junk = st.sampled_from(
    [
        None,
        True,
        5,
        -1,
        1.5,
        float("nan"),
        10**30,
        b"x",
        object(),
        [],
        {},
        (),
        np.zeros((2, 3)),
        np.array(["a", 5], object),
    ]
    + [
        torch.ones(3),
        torch.ones(1, 2, ENCODER_WIDTH),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        lambda: 0,
    ]
)
anything = texts | junk
documents = st.lists(texts | st.fixed_dictionaries({"text": anything}, optional={"title": anything}), max_size=3)
contents = anything | st.lists(
    anything | st.fixed_dictionaries({"type": st.just("text")}, optional={"text": anything}), max_size=2
)
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
        "slot_policy": st.sampled_from(["drop", "merge", "x"]) | junk,
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


def check(call):
    """The result, or `None` for what is refused as a mistake of the caller. Any other error fails the test."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        assert str(error)


def assert_finite(output):
    assert output is None or torch.isfinite(output.logits).all()


@BOUNDED
@given(
    text=anything | st.lists(texts, max_size=2),
    documents=anything | documents | st.lists(documents, max_size=2),
    options=options,
    embeds=tensors | junk | st.lists(tensors, max_size=2),
    given=st.sampled_from(["documents", "embeds", "both", "none"]),
)
def test_processor(processor, text, documents, options, embeds, given):
    passages = {"documents": documents if given in ("documents", "both") else None}
    passages |= {"context_embeds": embeds if given in ("embeds", "both") else None}
    check(lambda: processor(text=text, return_tensors="pt", **passages, **options))


@BOUNDED
@given(chat=messages | anything | st.lists(messages, max_size=2), documents=documents | junk)
def test_chat(processor, chat, documents):
    check(
        lambda: processor.apply_chat_template(
            chat, documents=documents, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )


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
        check(lambda: tiny.generate(**batch, max_new_tokens=2))
    else:
        assert_finite(check(lambda: tiny(**batch, labels=labels)))


@BOUNDED
@given(data=st.data())
def test_pipeline_and_store(tiny, processor, data):
    ask = ArcAlignerPipeline(model=tiny, processor=processor, task="text-generation", device="cpu")
    row = data.draw(
        st.fixed_dictionaries(
            {}, optional={"question": anything, "messages": messages | junk, "documents": documents | junk}
        )
        | anything
        | messages
    )
    passages, settings = data.draw(documents | junk), data.draw(options | gates)
    if data.draw(st.booleans()):
        check(lambda: ask(row, documents=passages, max_new_tokens=1, **settings))
    else:
        store = tiny.slot_prefix_store(processor)
        check(lambda: store.prepare(row.get("question") if isinstance(row, dict) else row, passages, **settings))


FILES = ["config.json", "generation_config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"]
FILES += ["model.safetensors", "chat_template.jinja"]


@settings(BOUNDED, max_examples=12)
@given(name=st.sampled_from(FILES), change=st.sampled_from([None, b"", b"[]", b"{}", b"{%", b"5", b"\xff", "half"]))
def test_command_line_with_a_broken_checkpoint(checkpoint_dir, tmp_path_factory, capsys, name, change):
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(checkpoint_dir, folder, dirs_exist_ok=True)
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    if change is not None:
        (folder / name).write_bytes(whole[: len(whole) // 2] if change == "half" else change)
    (folder / "letter.txt").write_text("It was written by Ada.")
    command = ["answer", "--question", "Who?", "--document", str(folder / "letter.txt"), "--checkpoint", str(folder)]
    try:
        cli.main([*command, "--max-new-tokens", "1"])
    except SystemExit as exit:
        errors = capsys.readouterr().err
        assert exit.code == 0 or (errors.count("Error:") == 1 and "Traceback" not in errors)
