"""The models that judge: a chat model of transformers, or one behind an OpenAI-compatible endpoint. Both are greedy."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

import torch
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, HTTPError, InferenceTimeoutError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..configuration_arcaligner import missing_model_message, resolve_base_model
from .batches import in_batches

MAX_NEW_TOKENS = 8  # a yes or a no, and what may stand before it
ATTEMPTS = 3
PAUSE_SECONDS = 2.0  # before the second attempt; twice as long before the third
KEY_VARIABLE = "OPENAI_API_KEY"
_BUSY = 429


@dataclass(frozen=True)
class Reply:
    """
    What a judge said.

    Args:
        index (`int`): Of the prompt.
        text (`str`, *optional*): The reply; `None` where there is none.
        problem (`str`, *optional*): Why there is none.
    """

    index: int
    text: str | None
    problem: str | None = None


class Judge(Protocol):
    """Replies to prompts."""

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt, in the order they come."""


class LocalJudge:
    """
    A chat model of transformers.

    Args:
        name (`str`): A folder or a Hub id.
        device (`str`): Where it runs; `"auto"` spreads it over the accelerators.
        batch_size (`int`): Prompts at a time; halved where memory is short.

    Raises:
        `ValueError`: no causal language model with a chat template.
        `OSError`: a model that is not there, with how to get it.
    """

    def __init__(self, name: str, device: str = "cpu", batch_size: int = 16):
        source = resolve_base_model(name)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
            if self.tokenizer.chat_template is None:
                raise ValueError("its tokenizer has no chat template")
            dtype = torch.float32 if device == "cpu" else "auto"
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device).eval()
        except OSError as error:
            raise OSError(missing_model_message("judge", name, error)) from error
        except ValueError as error:
            raise ValueError(
                f"{name} is no chat model that transformers can run: {error}. Name one that follows instructions, such "
                "as Qwen/Qwen3-30B-A3B-Instruct-2507."
            ) from error
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Nothing of its own way to sample: no temperature, no penalty for repetition.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.model.generation_config.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )
        self.batch_size = batch_size

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt, the longest first, those of like length together."""
        longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))

        def generate(batch: list[int]) -> list[str]:
            return self._generate([prompts[index] for index in batch])

        for batch, texts in in_batches(longest_first, self.batch_size, generate):
            yield from map(Reply, batch, texts)

    @torch.inference_mode()
    def _generate(self, prompts: list[str]) -> list[str]:
        inputs = self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            enable_thinking=False,  # of templates that know it, as Qwen3's
        ).to(self.model.device)
        input_ids = inputs["input_ids"]  # (batch, seq_len), left-padded
        output = self.model.generate(
            input_ids, attention_mask=inputs["attention_mask"], max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        return self.tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


class EndpointJudge:
    """
    A chat model behind an OpenAI-compatible endpoint, as of vLLM; `$OPENAI_API_KEY` is its key where it wants one.

    Args:
        name (`str`): The model's name there.
        url (`str`): As `http://localhost:8000/v1`.
        timeout (`float`): Seconds to wait for a reply.
        concurrency (`int`): Prompts at a time.

    Raises:
        `ValueError`: something else than the address of a server.
    """

    def __init__(self, name: str, url: str, timeout: float = 60.0, concurrency: int = 16):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The endpoint is {url!r}; expected an address, as http://localhost:8000/v1.")
        self.name, self.url, self.timeout, self.concurrency = name, url, timeout, concurrency
        # Without any key the client would send the one of the Hub to whoever listens there.
        key = os.environ.get(KEY_VARIABLE) or "none"
        self.client = InferenceClient(base_url=url, api_key=key, timeout=timeout)

    def replies(self, prompts: list[str]) -> Iterator[Reply]:
        """A reply to each prompt; none after some attempts that time out, fail on the server's side or make no sense.

        Raises:
            `ConnectionError`: nobody can be reached there.
            `ValueError`: a server that refuses the request.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._ask, index, prompt) for index, prompt in enumerate(prompts)]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, index: int, prompt: str) -> Reply:
        problem = ""
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE_SECONDS * attempt)
            try:
                return Reply(index, self._request(prompt))
            except InferenceTimeoutError:
                problem = f"no reply within {self.timeout:g} seconds"
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status < 500 and status != _BUSY:
                    raise ValueError(
                        f"{self.url} refuses to let `{self.name}` judge (status {status}: "
                        f"{error.response.text[:300]}). Check the address, the model's name there, and the key in "
                        f"${KEY_VARIABLE}."
                    ) from error
                problem = f"status {status}"
            except HTTPError as error:
                if attempt == ATTEMPTS - 1:
                    raise ConnectionError(
                        f"There is no endpoint at {self.url} that can be reached ({error}). Start the server, or name "
                        "another with `--endpoint`; verdicts so far are kept."
                    ) from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                problem = f"no chat completion ({type(error).__name__}: {error})"
        return Reply(index, None, problem)

    def _request(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        completion = self.client.chat_completion(messages, model=self.name, max_tokens=MAX_NEW_TOKENS, temperature=0.0)
        return completion.choices[0].message.content or ""
