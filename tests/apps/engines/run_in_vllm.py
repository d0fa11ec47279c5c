"""Runs in the environment of vLLM: answers the requests of a JSON file, and writes what came of each.

    python run_in_vllm.py requests.json answers.json

`requests.json` has `model`, `options` of `LLM`, and `rounds`, lists of requests that are asked together, each with
`prompt` (ids), `kv_transfer_params`, `cache_salt`, `max_tokens`, `stop_token_ids`, and further `sampling`. The other
file has the number of `preemptions`, and `rounds` of answers: `ids`, the log-probabilities `first` of the likeliest
first tokens, how many ids of the prompt were `cached`, or the `error` with which the request was refused.
"""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMValidationError


def params_of(request):
    extra = {"kv_transfer_params": request["kv_transfer_params"]} if request.get("kv_transfer_params") else None
    settings = {"temperature": 0, "logprobs": 8, "detokenize": False, **request.get("sampling", {})}
    return SamplingParams(
        max_tokens=request["max_tokens"], stop_token_ids=request.get("stop_token_ids"), extra_args=extra, **settings
    )


def prompt_of(request):
    salt = request.get("cache_salt")
    return {"prompt_token_ids": request["prompt"]} | ({"cache_salt": salt} if salt else {})


def ask(llm, requests):
    """The answers to requests that are sent together; a request that vLLM refuses at once has its error instead."""
    answers, numbers = [None] * len(requests), {}
    for place, request in enumerate(requests):
        try:
            (number,) = llm.enqueue([prompt_of(request)], [params_of(request)], use_tqdm=False)
            numbers[number.split("-")[0]] = place  # an output's id is the number without its suffix
        except (ValueError, VLLMValidationError) as error:
            answers[place] = {"error": str(error)}
    for output in llm.wait_for_completion(use_tqdm=False):
        answer = output.outputs[0]
        first = {id: token.logprob for id, token in answer.logprobs[0].items()} if answer.logprobs else {}
        answers[numbers[output.request_id]] = {
            "ids": list(answer.token_ids),
            "first": first,
            "cached": output.num_cached_tokens,
            "finish_reason": answer.finish_reason,
        }
    return answers


def main(path, output):
    job = json.load(open(path))
    transfer = {"kv_connector": "SlotsConnector", "kv_connector_module_path": "arcaligner_slots"}
    transfer |= {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}
    options = {
        "enforce_eager": True,
        "max_logprobs": 20,
        "logits_processors": ["arcaligner_slots:SlotsLogitsProcessor"],
    }
    options |= {"disable_log_stats": False} | job["options"]
    llm = LLM(job["model"], kv_transfer_config=KVTransferConfig(**transfer), **options)
    results = {"rounds": [ask(llm, requests) for requests in job["rounds"]]}
    results["preemptions"] = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    with open(output, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
