"""A chat model behind an OpenAI-compatible endpoint, such as that of vLLM, llama.cpp or `transformers serve`. It judges
answers and re-ranks passages."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ENDPOINT = "http://localhost:8000/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
CONCURRENCY = 16  # requests at a time
RETRIES = 2


@dataclass(frozen=True)
class ChatEndpoint:
    """
    A chat model with greedy decoding.

    Args:
        model (`str`): Name of the model at the endpoint.
        url (`str`): An address such as `http://localhost:8000/v1`. If the endpoint needs a key, it is taken from the
            environment variable `OPENAI_API_KEY`.
        max_tokens (`int`): Maximum number of tokens of a reply.
        timeout (`float`): Seconds to wait for a reply.
    """

    model: str
    url: str = ENDPOINT
    max_tokens: int = 8
    timeout: float = 60.0

    def __call__(self, prompts: list[str]) -> Iterator[str | None]:
        """The reply to each prompt, in order; `None` if several attempts time out or fail on the server.

        Raises:
            `ConnectionError`: no server at the address.
            `ValueError`: an invalid address, or a request that the endpoint rejects, with its reason.
        """
        try:
            import openai
        except ImportError as error:
            message = "Requests to an endpoint need the package openai. Run `pip install 'arcaligner[evaluation]'`."
            raise ImportError(message) from error
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"The endpoint is {self.url!r}; expected an address that begins with http:// or https://, such as "
                f"{ENDPOINT}. Correct the address."
            )
        key = os.environ.get(KEY_VARIABLE) or "none"
        client = openai.OpenAI(base_url=self.url, api_key=key, timeout=self.timeout, max_retries=RETRIES)
        pool = ThreadPoolExecutor(CONCURRENCY)
        try:
            yield from pool.map(lambda prompt: self._ask(client, prompt), prompts)
        finally:
            pool.shutdown(cancel_futures=True)  # otherwise an error would wait for all remaining prompts
            client.close()

    def _ask(self, client, prompt: str) -> str | None:
        import openai

        message, greedy = {"role": "user", "content": prompt}, {"max_tokens": self.max_tokens, "temperature": 0.0}
        try:
            completion = client.chat.completions.create(model=self.model, messages=[message], **greedy)
            return completion.choices[0].message.content or ""
        except openai.APITimeoutError:
            problem = f"no reply within {self.timeout:g} seconds"
        except openai.APIConnectionError as error:
            raise ConnectionError(
                f"The endpoint {self.url} cannot be reached ({error.__cause__ or error}). Start the server or pass "
                "another address with `--endpoint`, and run the command again; it continues where it stopped."
            ) from error
        except (openai.InternalServerError, openai.RateLimitError) as error:
            problem = f"HTTP status {error.status_code}"
        except openai.APIStatusError as error:
            raise ValueError(
                f"{self.url} rejects requests to `{self.model}` (status {error.status_code}: "
                f"{error.response.text[:300]}). Check the address, the name of the model, and the key in the "
                f"environment variable {KEY_VARIABLE}."
            ) from error
        except (openai.OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"the reply is not a chat completion ({type(error).__name__}: {error})"
        logger.warning("A request to %s failed: %s", self.model, problem)
        return None
