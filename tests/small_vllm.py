"""A small vLLM: it loads precomputed passages and answers with the base model of an aligner."""

import json
import threading
import time

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from safetensors.torch import load_file
from stub_vllm import load_slots_module
from transformers import LogitsProcessor, LogitsProcessorList

from arcaligner.kv_cache_arcaligner import join_keys_values

slots = load_slots_module()


class Copies(LogitsProcessor):
    def __init__(self, copy, length):
        self.copy, self.length = copy, length

    def __call__(self, ids, scores):
        scores[0, slots.copied_next(self.copy["texts"], ids[0, self.length :].tolist(), self.copy["end_ids"])] += 8.0
        return scores


class SmallVllm:
    """`/v1/models` and `/v1/completions` as vLLM has them, of requests that begin with files."""

    def __init__(self, model, processor, folder):
        self.model, self.processor, self.folder = model, processor, folder
        self.reads_files, self.logprob_difference, self.max_model_len, self.dies, self.requests = (
            True,
            0.0,
            200,
            False,
            [],
        )
        self.fails_on = None  # a text in the body of requests that end with status 500
        app = FastAPI()
        app.get("/health")(self.models)
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.complete)
        self.app, self.server, self.port = app, None, 0

    def start(self):
        config = uvicorn.Config(self.app, port=self.port, log_level="critical", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{self.port}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join()

    def kill(self):
        """Stops the server in the middle of the answers that it writes."""
        self.server.force_exit = True
        self.stop()

    async def models(self):
        return {"data": [{"id": "base", "max_model_len": self.max_model_len}]}

    async def complete(self, request: Request):
        body = await request.json()
        self.requests.append(body)
        if self.fails_on is not None and self.fails_on in json.dumps(body):
            return JSONResponse({"error": {"message": "it is ending"}}, 500)
        files = (body.get("kv_transfer_params") or {}).get("slots") if self.reads_files else None
        try:
            parts = [load_file(self.folder / f"{key}.safetensors")["keys_values"] for key, _ in files or ()]
        except FileNotFoundError:
            message = "The precomputed passage does not exist"
            return JSONResponse({"error": {"message": message}}, 400)
        ids, first = self.answer(body, files, parts)
        if "logprobs" in body:
            first = (first + self.logprob_difference).topk(5)
            top = {f"token_id:{id}": score for id, score in zip(*map(torch.Tensor.tolist, first[::-1]), strict=True)}
            return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}
        if not body.get("stream"):
            return {"choices": [{"text": ""}]}
        return StreamingResponse(self.events(body, ids), media_type="text/event-stream")

    @torch.no_grad()
    def answer(self, body, files, parts):
        ids, extra = list(body["prompt"]), {}
        if files:
            counts = [count for _, count in files]
            ids[counts[0] : sum(counts)] = [self.processor.context_token_id] * sum(counts[1:])
            numbers = torch.arange(len(counts) - 1).repeat_interleave(torch.tensor(counts[1:]))
            extra["context_passage_ids"] = numbers[None]
            config = self.model.config
            extra["past_key_values"] = join_keys_values([parts], config.text_config, config.passage_alignment)
        ids, copy = torch.tensor([ids]), (body.get("kv_transfer_params") or {}).get("copy")
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **extra,
            max_new_tokens=body["max_tokens"],
            eos_token_id=body.get("stop_token_ids"),
            do_sample=False,
            logits_processor=LogitsProcessorList([Copies(copy, ids.shape[1])] if copy else []),
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences[0, ids.shape[1] :].tolist(), output.logits[0][0].log_softmax(-1)

    async def events(self, body, ids):
        ends = ids[-1] in body["stop_token_ids"]
        text = self.processor.tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=True)
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)] or [""]
        for number, piece in enumerate(pieces):
            if self.dies and number:
                raise RuntimeError("gone")
            reason = ("stop" if ends else "length") if number == len(pieces) - 1 else None
            yield f"data: {json.dumps({'choices': [{'text': piece, 'finish_reason': reason}]})}\n\n"
        usage = {"completion_tokens": len(ids) - ends}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
