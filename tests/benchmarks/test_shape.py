"""The benchmark of shapes with random weights, on a CPU: what is measured, and errors for what does not fit."""

import contextlib
import json
import time

import pytest
import torch
from reference import EXACT

from arcaligner.benchmarks import shape
from arcaligner.benchmarks.arms import base_of
from arcaligner.benchmarks.random_models import build_aligner, check_fits, make_config, weight_bytes
from arcaligner.benchmarks.shape import (
    PEFT_TOKENS,
    SHAPE_REPORT,
    STAGES,
    TITLES,
    Bench,
    count_operations,
    find_device,
    main,
    slot_arms,
    step_arms,
    text_arms,
)
from arcaligner.kv_cache_arcaligner import cache_of

GIB = 2**30


def tiny(passage_attention="joint"):
    torch.manual_seed(0)
    aligner = build_aligner(make_config("tiny", passage_attention=passage_attention), "cpu", torch.float64).double()
    return aligner, base_of(aligner, torch.float64)


def test_command_writes_table_and_json(tmp_path, monkeypatch, capsys):
    """The report has each arm at each batch size, counts of operations, and the machine."""
    monkeypatch.setattr(shape, "GROUP_SECONDS", 0.0)
    monkeypatch.setattr(shape, "NEW_TOKENS", 2)
    monkeypatch.setattr(shape, "EXAMPLES", 1)
    main("tiny", "cpu", None, "2,1", "1,2", 300.0, output=tmp_path)
    report = json.loads((tmp_path / SHAPE_REPORT).read_text("utf-8"))
    table = (tmp_path / "shape.md").read_text("utf-8")
    assert table in capsys.readouterr().out and all(f"| {title} |" in table for title in TITLES.values())
    measured = [(row["arm"], row["batch"], row["passages"]) for row in report["rows"]]
    first = [name for name in TITLES if name.startswith(("text", "slots"))]
    expected = {(name, batch, k) for name in first for batch in (1, 2) for k in (1, 2)}
    expected |= {(name, batch, 5) for name in ("token_text", "token_slots") for batch in (1, 2)}
    expected |= {(name, 1, None) for name in (*STAGES, *PEFT_TOKENS)}
    assert len(measured) == len(expected) and set(measured) == expected and report["left_out"] == []
    counted = {row["arm"] for row in report["rows"] if "operations" in row}
    assert counted == set(TITLES) and {"torch", "transformers", "date", "driver"} <= set(report["machine"])
    assert all(row["rounds"] == 3 for row in report["rows"])
    # The time of a token is the difference of two times, which noise can make negative on such a small model.
    whole = [row for row in report["rows"] if not row["arm"].startswith("token_")]
    assert all(row["milliseconds"]["median"] > 0 for row in whole)


def test_time_limit_names_the_rest(tmp_path, capsys):
    """Without time nothing is measured, and all arms are named as not measured."""
    main("tiny", "cpu", None, "5,1", "1", 0.0)
    table = capsys.readouterr().out
    for what in ("first token, batch 1, 5 passages", "training steps", "a generated token, batch 1"):
        assert f"Left out: {what} (no time left)." in table


@torch.no_grad()
@pytest.mark.parametrize("passage_attention", ["joint", "separate"])
def test_arms_give_prompt_logits(passage_attention):
    """After cached passages, with joined caches or not, a question has the logits of the whole prompt, and so twice."""
    aligner, base = tiny(passage_attention)
    arms = text_arms(base, 2, 3) | slot_arms(aligner, 2, 3, "slots")
    whole = {"text_cached": arms["text"](), "slots_cached": arms["slots_off"]()}
    torch.testing.assert_close(arms["slots_adaptive"]().logits, whole["slots_cached"].logits)  # no gate is open
    assert (arms["slots_always"]().recursion_depth == torch.tensor([[2], [0]])).all()  # the last layer reads no slot
    for _ in range(2):
        torch.testing.assert_close(arms["text_cached"]().logits, whole["text_cached"].logits, **EXACT)
        same = arms["slots_cached"](), arms["slots_joined"]()
        torch.testing.assert_close(same[0].logits, same[1].logits, **EXACT)
    first = slice(0, 1)  # both questions are about the first one's passages
    torch.testing.assert_close(same[0].logits[first], whole["slots_cached"].logits[first], rtol=0, atol=1e-5)
    assert cache_of(same[0]).get_seq_length() == cache_of(whole["slots_cached"]).get_seq_length()


def test_base_shares_weights_and_buffers():
    """The base model has no tensor on the meta device, and reads text as the aligner does."""
    aligner, base = tiny()
    assert not any(tensor.is_meta for tensor in (*base.parameters(), *base.buffers()))
    ids = torch.randint(3, 499, (1, 9))
    assert torch.equal(base(ids).logits, aligner(ids).logits)


def test_steps_train_stage_parameters(monkeypatch):
    """Gradients are gone after a step, and each stage leaves the model able to read."""
    monkeypatch.setattr(shape, "GROUP_SECONDS", 0.0)
    monkeypatch.setattr(shape, "EXAMPLES", 1)
    aligner, base = tiny()
    arms = step_arms(aligner, base)
    assert list(arms) == [*STAGES, *PEFT_TOKENS]
    bench = Bench(aligner, base, time.perf_counter() + 60, lambda what: None)
    with torch.no_grad():
        bench.steps(counts=True)
    operations = {row["arm"]: row["operations"] for row in bench.rows}
    assert operations["grounding"] < operations["gating"]
    assert not aligner.training and all(parameter.grad is None for parameter in aligner.parameters())


def test_operations_are_counted_by_name():
    """Nested operations count too: a matrix product is one operation, a linear layer with bias several."""
    x, linear = torch.ones(2, 2), torch.nn.Linear(2, 2)
    assert [count_operations(lambda: x.neg()), count_operations(lambda: x.neg().neg())] == [1, 2]
    assert count_operations(lambda: linear(x)) > 2


# What does not fit


def test_weights_are_counted_without_memory():
    """The bytes of a 7B model in bfloat16 and of the paper's aligner in float32 are counted without allocating them."""
    backbone, aligner = weight_bytes("mistral-7b", torch.bfloat16)
    assert backbone == 2 * 7_241_732_096 and aligner == 4 * 377_499_680


def test_too_small_card_is_refused():
    """A GPU that is too small is refused with the need, the free memory and the shapes that fit."""
    message = r"`--shape` is mistral-7b, which needs about 1\d\.\d GiB in bfloat16, but cuda:0 has 6.0 GiB free of 8.0"
    with pytest.raises(ValueError, match=rf"{message}\. Pass a shape that fits: smollm2-135m, llama-1b\."):
        check_fits("mistral-7b", torch.bfloat16, 3050, "cuda:0", 6 * GIB, 8 * GIB)
    with pytest.raises(ValueError, match="No shape fits. Free memory of this GPU, or choose another GPU"):
        check_fits("smollm2-135m", torch.bfloat16, 3050, "cuda:0", GIB // 8, 8 * GIB)
    check_fits("smollm2-135m", torch.bfloat16, 3050, "cuda:0", 6 * GIB, 8 * GIB)


def test_oversized_arms_are_skipped(monkeypatch):
    """Free memory is that of the GPU plus what torch has reserved and does not use."""
    bench = Bench(*tiny(), time.perf_counter() + 60, lambda what: None)
    bench.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    assert bench.fits(2 * GIB, arm="text") and bench.left_out == []
    assert not bench.fits(3 * GIB, arm="text", batch=32, passages=20)
    reason = "needs about 3.0 GiB in addition to the weights, and 2.0 GiB are free"
    assert bench.left_out == [{"arm": "text", "batch": 32, "passages": 20, "reason": reason}]


def test_unusable_devices_are_refused(monkeypatch):
    """The error says what is missing and what to do."""
    with pytest.raises(ValueError, match="`--device` is 'gpu'; expected cpu, cuda, or cuda:1"):
        find_device("gpu", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no GPU with CUDA. Install a driver and a torch with CUDA, or pass"):
        find_device("cuda", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(ValueError, match="`--device` is 'cuda:1', but this machine has 1 GPU; expected cuda:0"):
        find_device("cuda:1", torch.float32)
    with pytest.raises(ValueError, match="Tesla T4 does not compute in bfloat16. Pass `--dtype float16`"):
        find_device("cuda", torch.bfloat16)
    assert find_device("cuda", torch.float16) == torch.device("cuda:0")
