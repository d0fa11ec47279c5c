"""vLLM behind this server: passages are retrieved, scored and precomputed here; vLLM answers from their files.

    engine = VllmEngine(ask, retriever, vllm=VllmProcess(python, base_model, folder), folder=folder)
    engine = VllmEngine(ask, retriever, vllm=VllmServer("http://10.0.0.7:8000"), folder="/shared/passages")

    submit -> passages -> selected passages -> files of their keys and values, written here if they are new
    -> ids and names of files to vLLM; meanwhile answerability, from the aligner's layers -> pieces of the answer

vLLM is unmodified: options of its server load `apps/engines/in_vllm/arcaligner_slots.py` ([`vllm_command`]). If vLLM
cannot be reached, a request ends with `UnavailableError`, status 503. Before the next request this engine checks again
that vLLM reads the files, because a vLLM that ignores them would answer without passages.
"""

import asyncio
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import torch

from ...answering_arcaligner import chat_inputs, copied_texts
from ...common.files import ROOT
from ...configuration_arcaligner import ArcAlignerConfig, check_length
from ...kv_cache_arcaligner import PrefixFiles, json_digest
from ...pipeline_arcaligner import ArcAlignerPipeline
from ..corpus.retrieve import Retriever
from .engine import Engine, isolate_failures
from .request import Answer, Request, UnavailableError, compression_statistics, timeout_error
from .turns import GroupTurn, ThreadTurn

logger = logging.getLogger(__name__)

IN_VLLM = ROOT / "apps" / "engines" / "in_vllm"
CONNECTOR = {"kv_connector": "SlotsConnector", "kv_connector_module_path": "arcaligner_slots"}
CONNECTOR |= {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}
START_SECONDS = 900.0  # how long a vLLM may take to load its model
# Maximum difference of vLLM's log-probabilities of a first token from those of this process, in any precision.
MAX_DIFFERENCE = 0.5
# Number of tokens that vLLM sends together, after the first one, if the client does not stream. Each message costs both
# processes time; but a request whose client has left ends only at the next message.
STREAM_INTERVAL = 16
NO_FILE = "0" * 64  # the name of a file that does not exist


def find_vllm() -> str | None:
    """The Python of vLLM's environment: `ARCALIGNER_VLLM`, or that of `make vllm`; `None` if there is neither."""
    if named := os.environ.get("ARCALIGNER_VLLM"):
        return named
    python = ROOT / ".vllm" / "bin" / "python"
    return str(python) if python.exists() else None


def vllm_command(
    python: str, base_model: str, host: str, port: int, options: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command that starts a vLLM that answers from slots, and its environment variables, except for
    `ARCALIGNER_PASSAGES`."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", base_model, "--host", host]
    command += ["--port", str(port), "--kv-transfer-config", json.dumps(CONNECTOR)]
    command += ["--logits-processors", "arcaligner_slots:SlotsLogitsProcessor", *options]
    return command, {"PYTHONPATH": str(IN_VLLM), "VLLM_USE_V2_MODEL_RUNNER": "0"}


def slots_request(files: PrefixFiles) -> dict[str, Any]:
    """Fields of a request to vLLM for a prompt of ids. The keys and values of the first ids, those of the text before
    the slots and of the slots, are in `files`."""
    slots = [[path.stem, count] for path, count in zip(files.paths, files.num_slots, strict=True)]
    return {
        "prompt": [*files.prefix_ids, *[0] * sum(files.num_slots[1:]), *files.suffix_ids],  # any id represents a slot
        "kv_transfer_params": {"slots": slots},
        "cache_salt": json_digest(slots),
    }


def copy_field(processor, documents: list, bonus: float | None, end_ids: list[int]) -> dict[str, Any] | None:
    """The field `copy` of a request to vLLM, for copy-biased decoding; `None` without a bias."""
    bonus = processor.copy_bonus if bonus is None else bonus
    texts = copied_texts(processor.tokenizer, documents, processor.no_answer) if bonus else []
    if not texts:
        return None
    packed = [[text.ids, text.ends_word, [word for words in text.words.values() for word in words]] for text in texts]
    return {"bonus": bonus, "texts": packed, "end_ids": end_ids}


def check_lora_positions(config: ArcAlignerConfig) -> None:
    """Raise `ValueError` for an aligner whose LoRA also applies to text. Gates are no problem: they act on slots only,
    and the precomputed keys and values include the passes that they add."""
    if config.lora_positions != "slots":
        raise ValueError(
            f"The checkpoint has `lora_positions` {config.lora_positions!r}; expected 'slots', because vLLM processes "
            "text without the LoRA. Use an aligner whose LoRA applies to slots only, or leave out `--engine vllm`."
        )


# A shell that ends a group of processes when its input is closed, which also happens if this process is killed.
END_GROUP_SCRIPT = 'read -r line; kill -s TERM -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"'
END_SECONDS = 10  # how long a vLLM may take to end


class VllmServer:
    """A vLLM that was started separately, with the options of [`vllm_command`] and the engine's folder of passages."""

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def is_starting(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: a vLLM that was started separately keeps running."""


class VllmProcess(VllmServer):
    """
    A vLLM that this process starts, and starts again if it ends. It ends with this process, even if this process is
    killed.

    Args:
        python (`str`): The Python of vLLM's environment.
        base_model (`str`): A folder, or a Hub id in the cache.
        folder (`Path`): The folder of the passages.
        options (`Sequence[str]`): Further options of vLLM's server.
        port (`int`, *optional*): A port of the loopback interface. Default: a free one.

    Raises:
        `OSError`: vLLM cannot be started.
    """

    def __init__(self, python: str, base_model: str, folder: Path, options: Sequence[str] = (), port: int = 0):
        if not port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}")
        command, variables = vllm_command(python, base_model, "127.0.0.1", port, options)
        self._command, self._closed, self._starting = command, threading.Event(), threading.Lock()
        self._variables = os.environ | variables | {"ARCALIGNER_PASSAGES": str(folder.resolve())}
        self.process, self._guard = self._start()
        self._watch = threading.Thread(target=self._start_again, name="arcaligner-vllm", daemon=True)
        self._watch.start()

    def _start(self) -> tuple[subprocess.Popen, subprocess.Popen]:
        try:  # in its own process group, so that all processes of vLLM end together
            process = subprocess.Popen(self._command, env=self._variables, start_new_session=True)
        except OSError as error:
            raise OSError(
                f"vLLM cannot be started with {self._command[0]} ({error}). Run `make vllm` in the repository, or set "
                "the environment variable ARCALIGNER_VLLM to the path of a Python interpreter that has vLLM."
            ) from error
        command = ["sh", "-c", END_GROUP_SCRIPT, "sh", str(process.pid), str(END_SECONDS)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return process, subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **quiet)

    def _start_again(self) -> None:
        waited = 1.0
        while True:
            began = time.monotonic()
            self.process.wait()
            self._end_group()
            if time.monotonic() - began > 60:
                waited = 1.0
            if self._closed.wait(waited):
                return
            waited = min(60.0, waited * 2)  # if vLLM cannot start, wait longer and longer before the next try
            logger.warning("vLLM ended with exit code %s. Restarting vLLM.", self.process.returncode)
            with self._starting:  # so that `close` ends the new process
                if self._closed.is_set():
                    return
                self.process, self._guard = self._start()

    def _end_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._guard.kill()  # before its input is closed: the number of the process group may soon be used again
        self._guard.wait()
        self._guard.stdin.close()

    @property
    def is_starting(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """End the vLLM that this process has started."""
        with self._starting:
            self._closed.set()
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self._end_group()
        self._watch.join()


class VllmEngine(Engine):
    """
    Answers requests with vLLM. In addition to the arguments and errors of [`Engine`]:

    Args:
        vllm ([`VllmServer`]): The vLLM to use.
        folder (`str` or `Path`): The folder of passages that vLLM reads.

    Raises:
        `ValueError`: the LoRA of the aligner also applies to text.
    """

    weights_passages = False  # vLLM's attention takes no bias for single keys

    def __init__(
        self,
        ask: ArcAlignerPipeline,
        retriever: Retriever | None = None,
        *,
        vllm: VllmServer,
        folder: str | Path,
        **settings: Any,
    ):
        self.vllm, self._is_checked = vllm, False
        self._pending: set[Future] = set()  # answers that vLLM generates
        self.model_name, self.max_model_len = "", 0
        self._loop = asyncio.new_event_loop()
        self._answering = threading.Thread(target=self._loop.run_forever, name="arcaligner-answers", daemon=True)
        self._answering.start()
        self._client = httpx.AsyncClient(
            base_url=vllm.url, headers=vllm.headers, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._checking = asyncio.Lock()
        try:
            check_lora_positions(ask.model.config)
            super().__init__(ask, retriever, folder=folder, **settings)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            vllm.close()
            raise
        # In a thread that ends, because PyTorch keeps a pool of threads for each thread that has computed.
        with ThreadPoolExecutor(1) as probing:
            self._probe, self._expected = probing.submit(self._make_probe).result()
        self._end_ids = torch.as_tensor(self.model.generation_config.eos_token_id, device="cpu").reshape(-1).tolist()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._pending)

    def warm_up(self) -> None:
        """Wait until vLLM is ready, and answer a first request.

        Raises:
            `OSError`: vLLM cannot be reached, or does not start.
            `ValueError`: vLLM does not read this aligner's passages.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self._wait(self._check_vllm())
                break
            except UnavailableError:
                if not self.vllm.is_starting or time.monotonic() > end:
                    raise
                time.sleep(0.5)
        super().warm_up()

    def close(self) -> None:
        """Stop accepting requests, answer those that wait, and end a vLLM that this process has started."""
        super().close()
        wait(set(self._pending))
        if self._answering.is_alive():
            self._wait(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._answering.join()
        self.vllm.close()

    def _wait(self, work: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The threads that prepare requests

    def _answer(self, turn: ThreadTurn, group: list[Request]) -> None:
        began = time.monotonic()
        for part, bodies in isolate_failures(group, functools.partial(self._bodies, turn)):
            scores = [Future() for _ in part]
            # vLLM computes the answer meanwhile, unless `min_confidence` decides by the answerability first.
            for request, body, score in zip(part, bodies, scores, strict=True):
                if request.min_confidence is None:
                    self._send(request, body, score, len(part), began)
            try:
                answerabilities = self._answerability(turn, part)
            except Exception as error:
                for request, body, score in zip(part, bodies, scores, strict=True):
                    score.set_exception(error)
                    if request.min_confidence is not None:
                        self._send(request, body, score, len(part), began)
                continue
            for request, body, score, answerability in zip(part, bodies, scores, answerabilities, strict=True):
                score.set_result(answerability)
                if request.min_confidence is None:
                    continue
                if answerability is None or answerability >= request.min_confidence:
                    self._send(request, body, score, len(part), began)
                    continue
                text, num_prompt = self.processor.no_answer, len(body["prompt"])
                request.on_text(text)
                self._finish(request, text, "stop", num_prompt, 0, answerability, len(part), began, time.monotonic())

    def _send(self, request: Request, body: dict, score: Future, batch_size: int, began: float) -> None:
        """Let the thread that collects answers send a request to vLLM; `score` will have its answerability."""
        work = self._ask_vllm(request, body, score, batch_size, began)
        self._pending.add(answering := asyncio.run_coroutine_threadsafe(work, self._loop))
        answering.add_done_callback(self._pending.discard)

    def _bodies(self, turn: ThreadTurn, group: list[Request]) -> list[dict[str, Any]]:
        """Bodies of the requests to vLLM: prompts with files of passages, or of text alone."""
        if group[0].passages is None:
            slots = {} if self.processor.chat_template is None else {"sanitize_control_tokens": True}
            bodies = []
            for request in group:
                ids = chat_inputs(self.processor, [self._chat(request)], **slots)["input_ids"][0].tolist()
                check_length(len(ids), "The prompt", self.model.config.text_config)
                bodies.append({"prompt": ids})
        else:
            files_of = self.store.prefix_files_of_batch(self._questions(group, GroupTurn(turn, group)))
            bodies = [slots_request(files) for files in files_of]
            for request, body, files in zip(group, bodies, files_of, strict=True):
                if request.num_cached is None:
                    request.num_cached = len(request.passages.documents) * files.num_cached // files.num_passages
                documents = request.passages.used
                copy = copy_field(self.processor, documents, request.copy_bonus, self._end_ids)
                body["kv_transfer_params"] |= {} if copy is None else {"copy": copy}
        for request, body in zip(group, bodies, strict=True):
            body |= {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.sampling_top_k,  # 0 means all tokens, here and in vLLM
                "min_p": request.min_p,
                "seed": request.seed,
                "stop": request.stop,
            }
            body |= {"stop_token_ids": self._end_ids}
            body |= {"stream_interval": 1 if request.is_streamed else STREAM_INTERVAL}
            if self.processor.context_token_id < self.model.config.text_config.vocab_size:
                body["logit_bias"] = {str(self.processor.context_token_id): -100}
        return bodies

    @torch.inference_mode()
    def _answerability(self, turn: ThreadTurn, group: list[Request]) -> list[float | None]:
        """The answerability of each request, from the aligner's layers. If a request uses one passage and this passage
        was scored, the score is the answerability."""
        if group[0].passages is None or self.model.answerability_head is None:
            return [None] * len(group)
        logits, chats = torch.zeros(len(group), device="cpu"), [self._chat(request) for request in group]
        known = {}
        for number, request in enumerate(group):
            passages = request.passages.used
            if len(passages) == 1 and "answerability" in passages[0]:
                known[number] = passages[0]["answerability"]
        for number, score in known.items():
            logits[number] = torch.tensor(score, dtype=torch.float64, device="cpu").logit(eps=1e-12)
        if rest := [number for number in range(len(group)) if number not in known]:
            inputs = self.store.prepare_batch(self._questions([group[number] for number in rest], turn))
            logits[rest] = self.store.prefill_suffix(inputs, True, turn).answerability_logits.float().cpu()
        call = self.answerer.answer(chats, [request.passages.used for request in group])
        return call.answerability_of(logits).tolist()

    # The thread that collects answers

    async def _ask_vllm(self, request: Request, body: dict, score: Future, batch_size: int, began: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, request.arrived + self.limits.seconds - time.monotonic())):
                await self._check_vllm()
                max_new_tokens = self.max_model_len - len(body["prompt"])
                if max_new_tokens < 1:
                    raise ValueError(
                        f"The prompt takes {len(body['prompt'])} positions, one for each slot and each token; expected "
                        f"at most {self.max_model_len - 1}, one less than the context length of vLLM, to leave space "
                        "for an answer. Pass fewer or shorter passages."
                    )
                body["max_tokens"] = min(request.max_new_tokens, max_new_tokens)
                await self._stream(request, body, score, batch_size, began)
        except TimeoutError:
            request.future.set_exception(timeout_error(self.limits.seconds))
        except Exception as error:
            request.future.set_exception(error)

    async def _stream(self, request: Request, body: dict, score: Future, batch_size: int, began: float) -> None:
        body = body | {"model": self.model_name, "stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage, first_token = "", None, {}, 0.0
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._error_of(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    if request.is_cancelled:
                        raise TimeoutError
                    part = json.loads(line.removeprefix("data: "))
                    if "error" in part:
                        raise UnavailableError(
                            f"vLLM failed during this answer ({part['error'].get('message')}). Try again later."
                        )
                    usage = part.get("usage") or usage
                    for choice in part["choices"]:
                        first_token = first_token or time.monotonic()
                        new = choice["text"] if text else choice["text"].lstrip()
                        text, reason = text + new, choice["finish_reason"] or reason
                        if new:
                            request.on_text(new)
        except (httpx.TransportError, json.JSONDecodeError) as error:
            self._is_checked = False
            raise self._unreachable(error) from error
        if reason not in ("stop", "length"):
            self._is_checked = False
            raise UnavailableError(
                f"vLLM ended this answer with the finish reason {reason!r}; expected 'stop' or 'length'. Try again. "
                "If the error persists, look for its reason in vLLM's log."
            )
        answerability = await asyncio.wrap_future(score)
        num_prompt, num_generated = len(body["prompt"]), usage.get("completion_tokens", 0)
        self._finish(request, text, reason, num_prompt, num_generated, answerability, batch_size, began, first_token)

    def _unreachable(self, error: Exception) -> UnavailableError:
        state = "is being started" if self.vllm.is_starting else "cannot be reached"
        return UnavailableError(f"vLLM at {self.vllm.url} {state} ({type(error).__name__}). Try again later.")

    def _error_of(self, response: httpx.Response) -> Exception:
        """Turn an error of vLLM into ours: a request that vLLM refuses is a mistake of the client, a failure is not."""
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:200]
        if response.status_code < 500 and response.status_code != 404:
            return ValueError(f"vLLM rejected this request: {message}")
        self._is_checked = False
        return UnavailableError(f"vLLM failed with status {response.status_code} ({message}). Try again later.")

    async def _check_vllm(self) -> None:
        """Check that vLLM reads this aligner's files, and answers from them as this process does. This is done once,
        and again after vLLM could not be reached."""
        async with self._checking:
            if self._is_checked:
                return
            try:
                models = await self._request("GET", "/v1/models")
                if models.status_code != 200:
                    raise self._error_of(models)
                model = models.json()["data"][0]
                self.model_name, self.max_model_len = model["id"], model["max_model_len"]
                slots = {"kv_transfer_params": {"slots": [[NO_FILE, 1]]}, "prompt": [0, 0], "max_tokens": 1}
                refused = await self._request("POST", "/v1/completions", json=slots | {"model": self.model_name})
                if refused.status_code != 400 or "precomputed passage" not in refused.text:
                    raise ValueError(
                        f"vLLM at {self.vllm.url} would ignore precomputed passages. Start that vLLM with the options "
                        "in docs/engines.md, or leave out `--vllm-url`."
                    )
                await self._compare()
            except (httpx.TransportError, json.JSONDecodeError) as error:
                raise self._unreachable(error) from error
            self._is_checked = True

    async def _request(self, method: str, path: str, **body: Any) -> httpx.Response:
        """The response to a request of [`_check_vllm`]. If vLLM fails on it, vLLM is ending or not ready yet."""
        response = await self._client.request(method, path, **body)
        if response.status_code >= 500:
            raise self._error_of(response)
        return response

    async def _compare(self) -> None:
        """Compare vLLM's log-probabilities of the first token, for a question about two passages, with those of this
        process."""
        body = self._probe | {
            "model": self.model_name,
            "max_tokens": 1,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        response = await self._request("POST", "/v1/completions", json=body)
        if response.status_code != 200:
            raise ValueError(
                f"vLLM at {self.vllm.url} cannot use this aligner's passages in {self.store.folder} "
                f"({self._error_of(response)}). Start that vLLM with the checkpoint's base model, and with "
                "ARCALIGNER_PASSAGES set to this folder."
            )
        logprobs = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        difference = max(
            abs(self._expected[int(name.removeprefix("token_id:"))].item() - value) for name, value in logprobs.items()
        )
        if not difference < MAX_DIFFERENCE:
            raise ValueError(
                f"Log-probabilities of vLLM at {self.vllm.url} differ by {difference:.2f} from those that PyTorch "
                f"computes for the same prompt; expected less than {MAX_DIFFERENCE}. Start that vLLM with the "
                "checkpoint's base model, without quantization."
            )

    @torch.inference_mode()
    def _make_probe(self) -> tuple[dict[str, Any], torch.Tensor]:
        # Of different lengths: the check fails if vLLM does not move the shorter one (`passage_alignment`).
        letter = (
            "Ada wrote the first letter in 1843, and she read it aloud to her friends in London. They liked it so much "
            "that she wrote another one in the same year, which was lost."
        )
        passages = [{"title": "Ada", "text": letter}, "The meeting was moved to Thursday."]
        (files,) = self.store.prefix_files("When is it?", passages)
        logits = self.store.prefill_suffix(self.store.prepare("When is it?", documents=passages)).logits[0, -1]
        return slots_request(files), logits.float().log_softmax(-1).cpu()

    def _finish(
        self,
        request: Request,
        text: str,
        reason: str,
        num_prompt: int,
        num_generated: int,
        answerability: float | None,
        batch_size: int,
        began: float,
        first: float,
    ) -> None:
        passages, parts = request.passages, {"retrieval": 0.0, "slots": 0.0, "scoring": 0.0}
        if passages is not None:
            parts |= passages.seconds
        first_token = (first or time.monotonic()) - request.arrived
        parts["model"] = request.arrived + first_token - began
        parts["waiting"] = first_token - sum(parts.values())
        request.future.set_result(
            Answer(
                text=text,
                finish_reason=reason,
                prompt_tokens=num_prompt,
                completion_tokens=num_generated,
                batch_size=batch_size,
                seconds={**parts, "first_token": first_token, "total": time.monotonic() - request.arrived},
                passages=passages,
                num_cached=request.num_cached or 0,
                answerability=answerability,
                answer_likelihood=None,  # vLLM does not report the likelihood of each token
                statistics=compression_statistics(self.processor, passages),
            )
        )
