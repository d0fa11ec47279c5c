"""Records the requests of clients: `python record_clients.py CLIENT FOLDER`, in an environment that has the client.

Each run writes `CLIENT.json`: the client's version, its headers, and the bodies of its requests. The files for
`openai`, `langchain`, `llama_index` and `litellm` come from here; the others are written down from the sources that the
file names. `apps/server/test_clients.py` sends all of them to the server.
"""

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

QUESTION, MODEL = "What sport does he play?", "tiny"
TEXT = "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003."
ORIGIN = {"source": "people.txt", "title": "Radik Zhaparov", "page": 3}
TOOL = {"name": "look_up", "description": "Looks a person up.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
KEPT_HEADERS = ("accept", "content-type", "authorization")


class Recorder(BaseHTTPRequestHandler):
    """A server that answers as OpenAI does, and stores the requests."""

    protocol_version = "HTTP/1.1"
    recorded: dict = {}

    def do_POST(self) -> None:  # noqa: N802 (the name that http.server calls)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.recorded["headers"] = {name: self.headers[name] for name in KEPT_HEADERS if self.headers[name]}
        self.recorded.setdefault("requests", []).append(body)
        head = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
        message = {"role": "assistant", "content": "Ski jumping."}
        choice = {"index": 0, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if body.get("stream"):
            piece = head | {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            kind, text = "text/event-stream", f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n"
        else:
            whole = {"object": "chat.completion", "choices": [choice | {"message": message}], "usage": usage}
            kind, text = "application/json", json.dumps(head | whole)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        pass


def openai(url: str) -> None:
    from openai import OpenAI

    create = OpenAI(base_url=url, api_key="a key", max_retries=0).chat.completions.create
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    answer = create(model=MODEL, messages=turns, max_completion_tokens=8)
    turns += [answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "Since when?"}]}]
    create(model=MODEL, messages=turns, max_tokens=8, extra_body={"documents": [TEXT], "num_passages": 2})
    turns[2] = answer.choices[0].message.model_dump()  # including the fields that are null
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    turns += [called, {"role": "tool", "tool_call_id": "call_1", "content": "since 2003"}]
    neutral = {"logit_bias": {}, "modalities": ["text"], "reasoning_effort": "low", "verbosity": "low", "n": 1}
    neutral |= {"parallel_tool_calls": True, "tool_choice": "none", "functions": [], "function_call": "none"}
    neutral |= {"tools": [{"type": "function", "function": TOOL}], "response_format": {"type": "text"}, "seed": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "top_logprobs": 0, "store": False}
    neutral |= {"metadata": {"a": "b"}, "user": "somebody", "service_tier": "auto", "safety_identifier": "x"}
    neutral |= {"prompt_cache_key": "x", "prompt_cache_retention": "24h", "stop": [], "temperature": 0, "top_p": 1}
    neutral |= {"prediction": {"type": "content", "content": "Since"}, "max_tokens": 4096}
    stream = create(model=MODEL, messages=turns, stream=True, stream_options={"include_usage": True}, **neutral)
    list(stream)


def langchain(url: str) -> None:
    from langchain_core.documents import Document
    from langchain_core.load import dumpd
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    document = Document(page_content=TEXT, metadata=ORIGIN, id="7")
    extra = {"documents": [document.model_dump(), dumpd(document)], "min_p": 0, "repetition_penalty": 1.0}
    settings = {"model": MODEL, "base_url": url, "api_key": "a key", "max_retries": 0}
    ChatOpenAI(**settings).invoke(QUESTION)
    chat = ChatOpenAI(**settings, extra_body=extra, max_tokens=8, temperature=0, n=1, seed=1, stream_usage=True)
    call = {"name": "look_up", "args": {}, "id": "call_1", "type": "tool_call"}
    turns = [SystemMessage("Be brief."), HumanMessage(QUESTION), AIMessage("", tool_calls=[call])]
    turns += [ToolMessage("since 2003", tool_call_id="call_1"), AIMessage("Ski jumping.", id="run-1")]
    turns += [HumanMessage([{"type": "text", "text": "Since when?", "cache_control": {"type": "ephemeral"}}])]
    chat.invoke(turns, stop=["\n\n"])
    list(chat.stream(turns))


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import Document, NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    node = TextNode(text=TEXT, metadata=ORIGIN, id_="7")
    documents = [node.to_dict(), NodeWithScore(node=node, score=0.7).to_dict()]
    documents += [Document(text=TEXT, metadata=ORIGIN, id_="8").to_dict()]
    settings = {"model": MODEL, "api_base": url, "api_key": "a key", "is_chat_model": True, "max_retries": 0}
    OpenAILike(**settings).complete(QUESTION)
    model = OpenAILike(**settings, max_tokens=8, additional_kwargs={"extra_body": {"documents": documents}})
    turns = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]
    turns += [ChatMessage(role="assistant", content="Ski jumping."), ChatMessage(role="user", content="Since when?")]
    model.chat(turns)
    list(model.stream_chat(turns))


def litellm(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded
    import litellm

    arguments = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "a key", "max_retries": 0}
    turns = [{"role": "user", "content": QUESTION}]
    answer = litellm.completion(messages=turns, **arguments)
    turns += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Since when?"}]
    turns[1] |= {"reasoning_content": "He jumps.", "provider_specific_fields": {"refusal": None}}
    neutral = {
        "n": 1,
        "temperature": 0,
        "top_p": 1,
        "stop": ["\n\n"],
        "user": "somebody",
        "seed": 1,
        "max_tokens": 4096,
    }
    neutral |= {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "parallel_tool_calls": False}
    neutral |= {"metadata": {"a": "b"}, "top_k": 40, "repetition_penalty": 1.0, "caching": True}
    document = {"id": "7", "title": "Radik", "text": TEXT, "score": 0.7, "metadata": ORIGIN}
    list(litellm.completion(messages=turns, stream=True, extra_body={"documents": [document]}, **arguments, **neutral))


CLIENTS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "openai": (openai, ("openai",)),
    "langchain": (langchain, ("langchain-openai", "langchain-core", "openai")),
    "llama_index": (llama_index, ("llama-index-llms-openai-like", "llama-index-core", "openai")),
    "litellm": (litellm, ("litellm", "openai")),
}


def main(name: str, folder: str) -> None:
    ask, packages = CLIENTS[name]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Recorder.recorded["from"] = ", ".join(f"{package} {version(package)}" for package in packages)
    ask(f"http://127.0.0.1:{server.server_port}/v1")
    server.shutdown()
    Path(folder, f"{name}.json").write_text(json.dumps(Recorder.recorded, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
