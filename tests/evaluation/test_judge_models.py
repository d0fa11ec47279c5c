"""A judge replies greedily whatever its own settings, and one behind an endpoint is asked again, but not for ever."""

import shutil
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from chat_server import running_chat_server
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from arcaligner.evaluation import judge_models
from arcaligner.evaluation.judge_models import ATTEMPTS, MAX_NEW_TOKENS, EndpointJudge, LocalJudge, Reply

PROMPTS = ["Is it?", "Who wrote the letter, and did anybody else know of it?", "Was it created in 1924?", "Why?", "No?"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No pause between attempts, and requests to this machine although the tests are offline."""
    monkeypatch.setattr(judge_models, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def greedy_reply(folder: Path, prompt: str) -> str:
    """The most likely token after token, without `generate`."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    for _ in range(MAX_NEW_TOKENS):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True)


def texts(judge, prompts: list[str]) -> list[str | None]:
    """The replies in the prompts' order."""
    replies = {reply.index: reply.text for reply in judge.replies(prompts)}
    assert len(replies) == len(prompts)
    return [replies[index] for index in range(len(prompts))]


def test_a_local_judge_replies_greedily_in_batches_of_any_size(base_model_dir):
    expected = [greedy_reply(base_model_dir, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    assert texts(LocalJudge(str(base_model_dir), batch_size=2), PROMPTS) == expected
    assert texts(LocalJudge(str(base_model_dir), batch_size=5), PROMPTS) == expected


def test_the_way_a_judge_samples_by_itself_does_not_matter(base_model_dir, tmp_path):
    folder = shutil.copytree(base_model_dir, tmp_path / "judge")
    own = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=2, pad_token_id=2)
    own.save_pretrained(folder)
    assert texts(LocalJudge(str(folder)), PROMPTS) == texts(LocalJudge(str(base_model_dir)), PROMPTS)


def test_a_lack_of_memory_halves_the_batch(base_model_dir, monkeypatch):
    judge = LocalJudge(str(base_model_dir), batch_size=4)
    expected, judge.batch_size = texts(judge, PROMPTS), 4
    generate, sizes = judge.model.generate, []

    def short_of_memory(input_ids, **options):
        sizes.append(len(input_ids))
        if len(input_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return generate(input_ids, **options)

    monkeypatch.setattr(judge.model, "generate", short_of_memory)
    assert texts(judge, PROMPTS) == expected
    assert sizes == [4, 2, 1, 1, 1, 1, 1]


def test_another_error_is_not_taken_for_a_lack_of_memory(base_model_dir, monkeypatch):
    judge = LocalJudge(str(base_model_dir))

    def broken(*args, **options):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(judge.model, "generate", broken)
    with pytest.raises(RuntimeError, match="size mismatch"):
        texts(judge, PROMPTS)


def test_a_model_without_a_chat_template_is_refused(encoder_dir):
    with pytest.raises(ValueError, match="is no chat model .* chat template"):
        LocalJudge(str(encoder_dir))


def test_a_judge_that_is_not_there_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="judge `nobody/nothing` .*hf download nobody/nothing"):
        LocalJudge("nobody/nothing")


def test_an_endpoint_is_asked_greedily_for_the_model(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with running_chat_server(lambda prompt: f"Yes: {prompt}") as chat:
        assert texts(EndpointJudge("some/judge", chat.url), PROMPTS) == [f"Yes: {prompt}" for prompt in PROMPTS]
        assert chat.keys == {"Bearer none"}  # the Hub's token goes to the Hub alone
        monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
        texts(EndpointJudge("some/judge", chat.url), ["Is it?"])
    assert chat.keys == {"Bearer none", "Bearer sk-own"}
    assert len(chat.requests) == len(PROMPTS) + 1
    expected = {"model": "some/judge", "temperature": 0.0, "max_tokens": MAX_NEW_TOKENS, "stream": False}
    assert chat.requests[-1] == {**expected, "messages": [{"role": "user", "content": "Is it?"}]}


@pytest.mark.parametrize("failure", [500, 503, 429, b"<html>", b'{"choices": []}', b"{}", b"[]"])
def test_a_failure_of_the_server_is_asked_again(failure):
    replies = [failure, "No."]
    with running_chat_server(lambda prompt: replies.pop(0)) as chat:
        assert list(EndpointJudge("judge", chat.url).replies(["Is it?"])) == [Reply(0, "No.")]
    assert len(chat.requests) == 2


@pytest.mark.parametrize(("failure", "problem"), [(500, "status 500"), (b"<html>", "no chat completion")])
def test_after_some_attempts_there_is_no_reply_and_others_go_on(failure, problem):
    with running_chat_server(lambda prompt: failure if prompt == "Is it?" else "Yes") as chat:
        replies = {reply.index: reply for reply in EndpointJudge("judge", chat.url).replies(["Is it?", "Why?"])}
    assert replies[0].text is None and problem in replies[0].problem
    assert replies[1] == Reply(1, "Yes")
    assert len(chat.requests) == ATTEMPTS + 1


def test_an_endpoint_that_does_not_reply_is_given_up_in_time():
    with running_chat_server(lambda prompt: None) as chat:
        replies = list(EndpointJudge("judge", chat.url, timeout=0.2).replies(["Is it?"]))
    assert replies == [Reply(0, None, "no reply within 0.2 seconds")]
    assert len(chat.requests) == ATTEMPTS


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_request_that_is_refused_is_an_error_at_once(status):
    with running_chat_server(lambda prompt: status) as chat:
        with pytest.raises(ValueError, match=rf"`judge` judge \(status {status}: .*so it is.*OPENAI_API_KEY"):
            list(EndpointJudge("judge", chat.url, concurrency=1).replies(PROMPTS))
    assert len(chat.requests) < len(PROMPTS)


def test_an_endpoint_where_nobody_listens_is_an_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        judge = EndpointJudge("judge", f"http://127.0.0.1:{free.getsockname()[1]}/v1")
        with pytest.raises(ConnectionError, match="no endpoint at http://127.0.0.1"):
            list(judge.replies(["Is it?"]))


def test_an_endpoint_that_is_no_address_is_refused():
    with pytest.raises(ValueError, match="'localhost:8000'; expected an address"):
        EndpointJudge("judge", "localhost:8000")
