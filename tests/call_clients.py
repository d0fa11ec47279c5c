"""Asks a server through a common client: `python call_clients.py CLIENT URL KEY`, in an environment that has it.

Prints a line of JSON: the answers from documents and from the corpus, each whole and streamed."""

import json
import os
import sys
import warnings

QUESTION = "What sport does he play?"
DOCUMENTS = ["Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003."]
EXTRAS = ({"documents": DOCUMENTS}, {"num_passages": 1})
MAX_TOKENS = 8


def langchain(url: str, key: str) -> list[str]:
    from langchain_openai import ChatOpenAI

    settings = {"model": "tiny", "base_url": url, "api_key": key, "max_tokens": MAX_TOKENS, "seed": 1}
    chats = [ChatOpenAI(**settings, extra_body=extra, stream_usage=True) for extra in EXTRAS]
    whole = [chat.invoke(QUESTION).content for chat in chats]
    return whole + ["".join(piece.content for piece in chat.stream(QUESTION)) for chat in chats]


def llama_index(url: str, key: str) -> list[str]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    settings = {"model": "tiny", "api_base": url, "api_key": key, "is_chat_model": True, "max_tokens": MAX_TOKENS}
    settings |= {"temperature": 0}
    models = [OpenAILike(**settings, additional_kwargs={"extra_body": extra}) for extra in EXTRAS]
    chat = [ChatMessage(role="user", content=QUESTION)]
    whole = [model.chat(chat).message.content for model in models]
    return whole + ["".join(piece.delta for piece in model.stream_complete(QUESTION)) for model in models]


def litellm(url: str, key: str) -> list[str]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded
    import litellm

    options = {"model": "openai/tiny", "api_base": url, "api_key": key, "max_tokens": MAX_TOKENS, "n": 1, "user": "me"}
    options["messages"] = [{"role": "user", "content": QUESTION}]
    whole = [litellm.completion(**options, extra_body=extra).choices[0].message.content for extra in EXTRAS]
    streams = [litellm.completion(**options, extra_body=extra, stream=True) for extra in EXTRAS]
    return whole + ["".join(piece.choices[0].delta.content or "" for piece in stream) for stream in streams]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, *address = sys.argv[1:]
    print(json.dumps({"langchain": langchain, "llama_index": llama_index, "litellm": litellm}[name](*address)))
