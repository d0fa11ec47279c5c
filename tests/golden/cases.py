"""The cases of the golden files: questions to the shipped and to tiny checkpoints, and the record of each answer.

Everything goes through interfaces that users call. All names of the package are in the first part of this file: if code
is moved or renamed, only this part changes.

    CASES[name](loaded) -> record, a JSON value

A record has `answer`, which depends on the choice of tokens, and `margin`, the least difference between the scores of
the best and the second best token of any step: if it is tiny, another CPU may write another answer, and `answer` is not
compared. `logits` are the largest logits of some positions.
"""

import contextlib
import copy
import functools
import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoProcessor, TextStreamer, pipeline

import arcaligner.apps.corpus  # noqa: F401 (quiets lancedb, which reads its settings when it is imported)
from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor, answering_arcaligner
from arcaligner.answering_arcaligner import ScoredPassage
from arcaligner.apps.corpus.retrieve import Retriever
from arcaligner.apps.corpus.table import Corpus
from arcaligner.apps.server.app import ServerSettings, create_app
from arcaligner.apps.server.engine import Engine

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "checkpoints" / "arcaligner-smollm2-135m"
SAVED = HERE / "saved"  # by the code of the commit that README.md names
SAMPLE, QUESTIONS = HERE.parent / "data" / "squad_dev_sample.jsonl", HERE / "questions.jsonl.gz"

TOP = 8  # logits recorded of a position
NEW_TOKENS = 16


@contextlib.contextmanager
def earlier_selection() -> Iterator[None]:
    """Scores all passages and ranks them as that commit did. Later code may score only the most similar ones, and has
    other weights in the score, which is three times as large."""
    functions = {"candidates_of": lambda unscored, most, share: list(unscored), "are_sure": lambda *args: False}
    with (
        mock.patch.multiple(answering_arcaligner, **functions, PRIOR_SCALE=1.0),
        mock.patch.object(ScoredPassage, "log_odds", ScoredPassage.pair_odds),
    ):
        yield


def passage_cache(model, processor, **options):
    """The passage cache of a model."""
    return model.passage_cache(processor, **options)


def cache_counts(cache) -> dict[str, int]:
    return {"hits": cache.hits, "loads": cache.loads, "misses": cache.misses}


def precompute(cache, question, documents) -> list[Path]:
    return cache.precompute(question, documents)


def prepared_counts(inputs) -> dict[str, list[int]]:
    return {"passages": list(inputs.num_passages), "cached": list(inputs.num_cached)}


def statistics_of(record: dict) -> dict[str, Any]:
    """Statistics of the passages from the pipeline or the server, under the names that golden files use."""
    statistics = record["statistics"]
    names = {"tokens": "tokens", "slots": "slots", "compression": "compression_rate", "dropped": "dropped"}
    names |= {"answerability": "confidence", "scores": "passage_confidences"}
    return {name: statistics[key] for name, key in names.items() if statistics.get(key) is not None}


def described_server_answer(report: dict, usage: dict, text: str, finish_reason: str | None) -> dict[str, Any]:
    """The `arcaligner` part of a server's answer without times, under the names that golden files use."""
    sources = report["sources"]
    passages = [{name: source.get(name) for name in ("read", "confidence", "number", "document")} for source in sources]
    written = {"text": text, "finish_reason": finish_reason, "tokens": usage.get("completion_tokens")}
    return {
        "answer": written | {"found": [source["answer"] for source in sources]},
        "read": passages,
        "cached": report["kept"],
        "answerability": report["confidence"],
        "statistics": report["statistics"],
        "segments": digest(report["segments"]),
        "prompt_tokens": usage.get("prompt_tokens"),
    }


# Loading


@contextlib.contextmanager
def tiny_models() -> Iterator[None]:
    """Inside `with`, the tiny base model and encoder can be loaded by the names that saved checkpoints use."""
    before = os.environ.get("ARCALIGNER_MODELS")
    os.environ["ARCALIGNER_MODELS"] = str(SAVED / "models")
    try:
        yield
    finally:
        os.environ.pop("ARCALIGNER_MODELS")
        if before is not None:
            os.environ["ARCALIGNER_MODELS"] = before


class Loaded(NamedTuple):
    """A checkpoint, and the rows with its questions."""

    model: Any
    processor: Any
    ask: Any
    rows: list[dict]


def load(folder: Path, **options) -> Loaded:
    """A checkpoint in float32, on the CPU, without a multi-hop head: there was none when the answers were recorded."""
    processor = ArcAlignerProcessor.from_pretrained(folder)
    processor.encoder.device = "cpu"
    model = ArcAlignerForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model.set_multihop_head(False)
    return Loaded(model, processor, pipeline_of(model, processor), questions())


def pipeline_of(model, processor):
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")


def load_remote(folder: Path) -> Loaded:
    """A checkpoint by its own code, as `pipeline` loads it."""
    ask = pipeline("text-generation", model=str(folder), device="cpu", dtype=torch.float32, trust_remote_code=True)
    return Loaded(ask.model, ask.processor, ask, questions())


@functools.cache
def questions() -> list[dict]:
    """32 questions of SQuAD's development set, then 70 of held-out articles of its training set."""
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    lines += gzip.decompress(QUESTIONS.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]


# Recording


def digest(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def top_logits(logits: torch.Tensor) -> dict[str, list]:
    """The largest logits of one position (vocab_size,), with their ids."""
    values, ids = logits.double().topk(min(TOP, len(logits)))
    return {"ids": ids.tolist(), "values": [float(f"{value:.7g}") for value in values.tolist()]}


_STEPS = "scores", "logits"  # of each step, after and before logits processors


class Generation:
    """Inside `with`, every `generate` of a model is recorded: the logits of the first token, before any logits
    processor, the margin of each row, and what logits processors such as that of copying have added. Not with beams.

    The server answers before its thread has left `generate`, so records are complete only after that."""

    def __init__(self, model):
        self.model, self.lock = model, threading.Lock()
        self.logits, self.margins, self.bonuses, self.raised = [], [], [], []
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # scores and logits of each row, (steps, vocab_size)

    def __enter__(self) -> "Generation":
        self.generate = self.model.generate
        self.model.generate = self._generate
        return self

    def __exit__(self, *error) -> None:
        del self.model.generate  # the method of the class is there again

    def _generate(self, *args, **kwargs) -> torch.Tensor:
        with self.lock:
            return self._record(*args, **kwargs)

    def _record(self, *args, **kwargs) -> torch.Tensor:
        wanted = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
        if kwargs.get("generation_config") is None:
            kwargs |= wanted
        else:
            kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
            kwargs["generation_config"].update(**wanted)
        continues = self._continues(**kwargs)
        output = self.generate(*args, **kwargs)
        if not continues:
            self.logits += [top_logits(row) for row in output.logits[0]]
        if getattr(output, "beam_indices", None) is None:
            end = self.model.generation_config.eos_token_id
            for row, ids in enumerate(output.sequences[:, -len(output.scores) :].tolist()):
                steps = ids.index(end) + 1 if end in ids else len(ids)
                scores, logits = (torch.stack([values[row] for values in output[name][:steps]]) for name in _STEPS)
                if continues:
                    before = self.steps.pop()
                    scores, logits = torch.cat([before[0], scores]), torch.cat([before[1], logits])
                self.steps.append((scores, logits))
        return output.sequences

    def _continues(self, input_ids=None, past_key_values=None, **kwargs) -> bool:
        """Whether a call continues the answer of the previous call, as the server's second call does."""
        is_read = past_key_values is not None and past_key_values.get_seq_length() == input_ids.shape[1] - 1
        return is_read and bool(self.steps)

    def _record_bonus(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Records which tokens logits processors have raised, and by how much; both are (steps, vocab_size)."""
        added = (scores - logits).nan_to_num(neginf=torch.inf)
        added = (added - added.amin(dim=1, keepdim=True)).nan_to_num(posinf=0.0)
        self.bonuses.append(round(added.max().item(), 4))
        self.raised.append(digest((added > max(0.5 * self.bonuses[-1], 0.01)).nonzero().tolist()))

    @property
    def recorded(self) -> dict[str, Any]:
        with self.lock:
            for scores, logits in self.steps:
                best = scores.topk(2, dim=1).values
                self.margins.append(round((best[:, 0] - best[:, 1]).min().item(), 6))
                self._record_bonus(scores, logits)
            self.steps.clear()
            margin = min(self.margins, default=None)
            return {"margin": margin, "logits": self.logits, "bonus": self.bonuses, "raised": self.raised}


def described(record: dict) -> dict[str, Any]:
    """A record of the pipeline with `return_slots=True`: its answer, the passages that it used, and the slots."""
    text = record["generated_text"]
    segments, passes = record["segments"], record["trajectories"]
    return {
        "answer": {"text": text if isinstance(text, str) else text[-1]["content"]},
        "read": sorted({segment["document"] for segment in segments}),
        "segments": digest(segments),
        "depth": digest(passes),
        **statistics_of(record),
    }


def ask_pipeline(loaded: Loaded, inputs: Any, **options) -> dict[str, Any] | list:
    """The answer of the pipeline to one input, or to a list of inputs."""
    with Generation(loaded.model) as generation:
        records = loaded.ask(inputs, return_slots=True, **{"max_new_tokens": NEW_TOKENS} | options)
    is_many = isinstance(inputs, list) and isinstance(records[0], list)
    return {"records": [described(record[0] if is_many else record) for record in records]} | generation.recorded


# Inputs made of the rows: row 0 with its own passage, or with two of others, in some order


def one(loaded: Loaded, number: int) -> dict[str, Any]:
    row = loaded.rows[number]
    return {"question": row["question"], "documents": row["passages"]}


def others(loaded: Loaded, number: int, place: int) -> dict[str, Any]:
    """The question with its own passage at index `place`, and the passages of two other rows."""
    passages = [row["passages"][0] for row in (loaded.rows[number - 1], loaded.rows[number - 2])]
    passages.insert(place, loaded.rows[number]["passages"][0])
    return {"question": loaded.rows[number]["question"], "documents": passages}


def wrong(loaded: Loaded, number: int) -> dict[str, Any]:
    """The question with a passage of another article."""
    return {"question": loaded.rows[number]["question"], "documents": loaded.rows[number - 5]["passages"]}


def streamed(loaded: Loaded, inputs: Any, **options) -> dict[str, Any]:
    """The answer of the pipeline, and the pieces in which a streamer gets it."""
    pieces = []

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    streamer = Pieces(loaded.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    record = ask_pipeline(loaded, inputs, streamer=streamer, **options)
    record["records"][0]["answer"]["pieces"] = pieces
    return record


def chat_of(loaded: Loaded, number: int) -> dict[str, Any]:
    """A chat about one passage, with a system message and an earlier question."""
    row = loaded.rows[number]
    messages = [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": "What is the passage about?"},
        {"role": "assistant", "content": row["passages"][0]["title"]},
        {"role": "user", "content": row["question"]},
    ]
    return {"messages": messages, "documents": row["passages"]}


def long_document(loaded: Loaded, number: int) -> dict[str, Any]:
    """The question with one document that is cut into passages, and a short one."""
    passages = [loaded.rows[(number + other) % len(loaded.rows)]["passages"][0]["text"] for other in range(4)]
    documents = [{"title": "All", "text": " ".join(passages)}, *loaded.rows[number - 7]["passages"]]
    return {"question": loaded.rows[number]["question"], "documents": documents}


# The model without the pipeline


def model_inputs(loaded: Loaded, rows: list[dict], side: str = "left", **options) -> dict[str, torch.Tensor]:
    """Questions with their documents as a batch."""
    return loaded.processor.apply_chat_template(
        [[{"role": "user", "content": row["question"]}] for row in rows],
        documents=[row["documents"] for row in rows],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True, "padding_side": side},
        **options,
    )


def described_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs of the model: ids as digests, embeddings as the norm and one entry of each row."""
    ids = {name: digest(x.tolist()) for name, x in sorted(inputs.items()) if not x.is_floating_point()}
    embeds = inputs["context_embeds"].double()
    return {
        "shape": list(inputs["input_ids"].shape),
        "ids": ids,
        "embeds": {"shape": list(embeds.shape), "norms": rounded(embeds.flatten(1).norm(dim=1))},
        "some": rounded(embeds[:, 0, :4].flatten()),
    }


def rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.7g}") for value in values.tolist()]


@torch.no_grad()
def forward(loaded: Loaded, rows: list[dict], side: str = "left", gates: dict | None = None, **slots) -> dict[str, Any]:
    """The logits of the last position of each row, the norm of all logits, and the depth of each slot and layer."""
    inputs = model_inputs(loaded, rows, side, **slots)
    output = loaded.model(**inputs, **(gates or {}))
    is_real = inputs["attention_mask"].bool()
    last = is_real.long().cumsum(dim=1).argmax(dim=1)
    norms = [row[real].double().norm().item() for row, real in zip(output.logits, is_real, strict=True)]
    depth = output.recursion_depth.tolist()  # (batch, num_layers, max_slots)
    return {
        "inputs": described_inputs(inputs),
        "logits": [top_logits(row[place]) for row, place in zip(output.logits, last, strict=True)],
        "norms": norms,
        "depth": depth if output.recursion_depth.shape[1] < 5 else digest(depth),
    }


def generated(loaded: Loaded, inputs: dict, **options) -> dict[str, Any]:
    """The ids that `generate` writes."""
    length = inputs["input_ids"].shape[1]
    with Generation(loaded.model) as generation:
        ids = loaded.model.generate(**inputs, **{"max_new_tokens": 8, "do_sample": False} | options)
    return {"answer": {"ids": ids[:, length:].tolist()}} | generation.recorded


def beams(loaded: Loaded, rows: list[dict], **options) -> dict[str, Any]:
    """Ids and scores of beam search, without a margin; beams with close scores may change places."""
    inputs, wanted = model_inputs(loaded, rows), {"return_dict_in_generate": True, "output_scores": True}
    output = loaded.model.generate(**inputs, num_beams=3, max_new_tokens=6, do_sample=False, **wanted, **options)
    return {"ids": output.sequences[:, inputs["input_ids"].shape[1] :].tolist()} | {
        "scores": rounded(output.sequences_scores)
    }


def cached(loaded: Loaded, rows: list[dict], gates: dict | None = None, **options) -> dict[str, Any]:
    """Answers from the passage cache: the first call computes the passages, the second one finds them."""
    cache, records = passage_cache(loaded.model, loaded.processor, **options), []
    for _ in range(2):
        inputs = cache.prepare([row["question"] for row in rows], [row["documents"] for row in rows], **(gates or {}))
        records.append({**prepared_counts(inputs), **generated(loaded, inputs), **cache_counts(cache)})
    return {"records": records}


def training_step(loaded: Loaded, rows: list[dict]) -> dict[str, Any]:
    """The loss of the text after the slots, and the norm of the gradient of each parameter of the aligner."""
    inputs = model_inputs(loaded, rows, "right")
    is_text = inputs["attention_mask"].bool() & (inputs["input_ids"] != loaded.model.config.context_token_id)
    is_text[:, :10] = False  # and the text before the slots
    labels = inputs["input_ids"].masked_fill(~is_text, -100)
    loaded.model.train()
    try:
        loss = loaded.model(**inputs, labels=labels).loss
        loss.backward()
        norms = {
            name: float(f"{parameter.grad.double().norm().item():.6g}")
            for name, parameter in loaded.model.named_parameters()
            if parameter.grad is not None
        }
    finally:
        loaded.model.eval()
        loaded.model.zero_grad(set_to_none=True)
    return {"loss": loss.item(), "gradients": norms}


# The server


@contextlib.contextmanager
def server(loaded: Loaded, corpus: Path | None = None, **settings) -> Iterator[TestClient]:
    """A server in this process, without a port."""
    retriever = None if corpus is None else Retriever(Corpus(corpus), loaded.processor)
    engine = Engine(loaded.ask, retriever, batch_seconds=0.0, **settings)
    with TestClient(create_app(engine, ServerSettings(model="golden")), base_url="http://127.0.0.1") as client:
        yield client


def post(loaded: Loaded, client: TestClient, question: str, **body) -> dict[str, Any]:
    """The server's answer to a request; a streamed answer has the pieces of its text as well."""
    body = {"model": "golden", "messages": [{"role": "user", "content": question}], "max_tokens": NEW_TOKENS} | body
    with Generation(loaded.model) as generation:
        response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return {"status": response.status_code}
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        events = [json.loads(event) for event in events[:-1]]
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
        report, reason = events[-1]["arcaligner"], events[-1]["choices"][0]["finish_reason"]
        record = described_server_answer(report, {}, "".join(pieces), reason)
        record["answer"]["pieces"] = [piece for piece in pieces if piece]
    else:
        reply = response.json()
        choice = reply["choices"][0]
        record = described_server_answer(
            reply["arcaligner"], reply["usage"], choice["message"]["content"], choice["finish_reason"]
        )
    return record | generation.recorded


def served(loaded: Loaded, corpus: Path | None = None, **settings) -> dict[str, Any]:
    """Requests of all kinds, one after another."""
    texts = [row["passages"] for row in loaded.rows[:6]]
    with server(loaded, corpus, **settings) as client:
        send = functools.partial(post, loaded, client)
        asks = [row["question"] for row in loaded.rows]
        records = {
            "one": send(asks[0], documents=texts[0]),
            "again": send(asks[0], documents=texts[0]),
            "three": send(asks[1], documents=[texts[0][0], texts[1][0], texts[2][0]]),
            "all of three": send(asks[1], documents=[texts[0][0], texts[1][0], texts[2][0]], max_passages=3),
            "streamed": send(asks[2], documents=texts[2], stream=True, tokens_per_slot=4),
            "unsure": send(asks[3], documents=texts[5], min_confidence=0.73),
            "freely": send(asks[4], documents=texts[4], copy_bonus=0, stop=["."]),
            "text alone": send(asks[5], documents=None, max_tokens=4, num_passages=0) if corpus else None,
            "drawn": send(asks[5], documents=texts[5], temperature=0.7, top_p=0.9, seed=3)["logits"],
            "refused": send(asks[5], documents=texts[5], max_passages=0)["status"],
        }
        return records | {"health": client.get("/health").json()["status"]}


# The shipped checkpoint

Case = Callable[[Loaded], Any]
SHIPPED_CASES: dict[str, Case] = {}
QUICK: set[str] = set()  # cases of the shipped checkpoint that always run; those of the tiny checkpoints all do


def add(name: str, case: Case, is_quick: bool = False) -> None:
    SHIPPED_CASES[name] = case
    if is_quick:
        QUICK.add(name)


def ask_each(section: str, numbers: range, inputs_of: Callable[..., Any], quick: int = 0, **options) -> None:
    """Adds a case for each number; the first `quick` cases are quick."""
    for place, number in enumerate(numbers):
        add(
            f"{section}/{number}",
            lambda loaded, number=number: ask_pipeline(loaded, inputs_of(loaded, number), **options),
            place < quick,
        )


def rows_of(loaded: Loaded, *numbers: int) -> list[dict]:
    return [one(loaded, number) for number in numbers]


ask_each("one, 2", range(102), one, quick=2, tokens_per_slot=2)
ask_each("one, 4", range(24, 40), one, quick=1, tokens_per_slot=4)
ask_each("one, segment", range(40, 54), one, quick=1, tokens_per_slot="segment")
ask_each("three", range(32, 40), functools.partial(others, place=1), quick=1)
ask_each("three, 4", range(44, 47), functools.partial(others, place=2), tokens_per_slot=4)
ask_each("all of three", range(50, 54), functools.partial(others, place=0), quick=1, max_passages=3)
ask_each("two of three", range(58, 60), functools.partial(others, place=2), max_passages=2)
ask_each("threshold", range(10, 13), wrong, quick=1, min_confidence=0.73)
ask_each("threshold, own", range(15, 18), one, min_confidence=0.73)
ask_each("long", range(60, 62), long_document)
ask_each("chat", range(70, 73), chat_of, quick=1)
ask_each("freely", range(74, 76), one, copy_bonus=0)
ask_each("first slots", range(78, 80), one, max_slots=20)
ask_each("refined", range(80, 82), one, quick=1, gate_mode="always", tokens_per_slot=8)
ask_each("adaptive", range(82, 84), one, gate_mode="adaptive", gate_threshold=0.35, tokens_per_slot=4)
ask_each("nothing", range(84, 86), lambda loaded, number: one(loaded, number) | {"documents": []})
ask_each(
    "text alone", range(86, 87), lambda loaded, number: [{"role": "user", "content": one(loaded, number)["question"]}]
)
for first in (88, 92):
    add(
        f"batch/{first}",
        lambda loaded, first=first: ask_pipeline(loaded, rows_of(loaded, *range(first, first + 4)), batch_size=4),
    )
add("batch of three", lambda loaded: ask_pipeline(loaded, [others(loaded, n, 1) for n in (96, 97)], batch_size=2))
for number in (98, 99):
    add(f"streamed/{number}", lambda loaded, number=number: streamed(loaded, one(loaded, number)), number == 98)
for rate in (2, 4, "segment"):
    add(
        f"forward, {rate}",
        lambda loaded, rate=rate: forward(loaded, [one(loaded, 3), others(loaded, 34, 0)], tokens_per_slot=rate),
        rate == 4,
    )
add("forward, right", lambda loaded: forward(loaded, rows_of(loaded, 5, 6), "right"))
add("beams", lambda loaded: beams(loaded, rows_of(loaded, 7)))
add("cached", lambda loaded: cached(loaded, [one(loaded, 8), others(loaded, 37, 1)]))
add("cached, int8", lambda loaded: cached(loaded, rows_of(loaded, 9), dtype="int8"))
add("server", served)
add(
    "server, default rate", lambda loaded: served(loaded, tokens_per_slot="segment", min_confidence=0.5, max_passages=2)
)


def remote() -> dict[str, Any]:
    """The checkpoint run by the code in its folder: through the pipeline, and through the Auto classes."""
    loaded = load_remote(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, trust_remote_code=True, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(SHIPPED, trust_remote_code=True)
    processor.encoder.device = "cpu"
    auto = Loaded(model, processor, None, loaded.rows)
    return {"pipeline": ask_pipeline(loaded, one(loaded, 0)), "auto": forward(auto, rows_of(auto, 1))}


# The tiny checkpoints: `joint`, with one slot per segment and with gates; `separate`, with token embeddings in slots, a
# trained encoder, an answerability head and copying. Texts are short enough for the tiny base model.

PASSAGES = [
    "It was written by Ada, and nobody else knew how to read it aloud. She wrote it in 1843.",
    {"title": "Zhaparov", "text": "Radik Zhaparov is a Kazakh ski jumper. He has competed since 2003! He jumps."},
    {"title": "Toronto", "text": "Toronto Northwest was a federal district. The riding was created in 1924."},
    "Nobody read it.",
]
TINY_ROWS = [
    {"question": "Who wrote it?", "passages": [PASSAGES[0]]},
    {"question": "What sport does Radik Zhaparov play, and since when?", "passages": PASSAGES[:3]},
    {"question": "When was it created?", "passages": [PASSAGES[2], PASSAGES[3]]},
]
TINY_ROWS = [{**row, "documents": row["passages"]} for row in TINY_ROWS]
GATES: dict[str, dict] = {
    "off": {"gate_mode": "off"},
    "adaptive": {"gate_mode": "adaptive", "max_refinement_steps": 3},
    "low threshold": {"gate_mode": "adaptive", "gate_threshold": 0.2},
    "always": {"gate_mode": "always", "max_refinement_steps": 2},
    "budget": {"refinement_budget": 0.3},
}


def load_tiny(name: str) -> Loaded:
    """A tiny checkpoint, `joint` or `separate`."""
    return load(SAVED / name)._replace(rows=TINY_ROWS)


def cached_passages(loaded: Loaded, folder: Path) -> dict[str, Any]:
    """Answers from passages whose keys and values were saved in a folder."""
    return cached(loaded, TINY_ROWS, folder=folder, read_only=True)["records"][0]


def found_in_corpus(loaded: Loaded, corpus: Path) -> dict[str, Any]:
    """The size of a corpus, and the passages that it finds for each question."""
    opened = Corpus(corpus)
    retrieve, passages_of = Retriever(opened, loaded.processor), {}
    for row in TINY_ROWS:
        passages = retrieve(row["question"], 3)
        embeds = passages.encoded.context_embeds
        names = ("document", "title", "text", "start", "end", "similarity")
        passages_of[row["question"]] = {
            "passages": [{name: passage[name] for name in names} for passage in passages.documents],
            "embeds": {"shape": list(embeds.shape), "norms": rounded(embeds.double().norm(dim=1))},
        }
    numbers = ("documents", "passages", "slots")
    return {"found": passages_of, "info": {name: opened.info()[name] for name in numbers}}


def tiny_cases(loaded: Loaded, name: str) -> dict[str, Any]:
    """All records of a tiny checkpoint."""
    rows, records = TINY_ROWS, {}
    for gates, settings in GATES.items():
        records[f"forward, {gates}"] = forward(loaded, rows, gates=settings)
        records[f"cached, {gates}"] = cached(loaded, rows, gates=settings)
    for slots in ({"tokens_per_slot": 2}, {"tokens_per_slot": "segment"}, {"max_slots": 3}):
        records[f"forward, {slots}"] = forward(loaded, rows, **slots)
    records["forward, right"] = forward(loaded, rows, "right")
    records["forward, alone"] = [forward(loaded, [row]) for row in rows]
    for gates in ("off", "always"):
        records[f"generated, {gates}"] = generated(loaded, model_inputs(loaded, rows), **GATES[gates])
        records[f"beams, {gates}"] = beams(loaded, rows, **GATES[gates])
    records["cached, int8"] = cached(loaded, rows, dtype="int8")
    records["training step"] = training_step(loaded, rows)
    records["asked"] = [ask_pipeline(loaded, {n: row[n] for n in ("question", "documents")}) for row in rows]
    if name == "separate":
        questions = [{n: row[n] for n in ("question", "documents")} for row in rows]
        inputs = questions[1]
        records["all of three"] = ask_pipeline(loaded, inputs, max_passages=3, gate_mode="always")
        records["threshold"] = [ask_pipeline(loaded, inputs, min_confidence=share) for share in (0.05, 0.95)]
        records["batch"] = ask_pipeline(loaded, questions, batch_size=3)
        records["streamed"] = streamed(loaded, inputs)
        records["chat"] = ask_pipeline(
            loaded,
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yes?"},
                    {"role": "user", "content": "Who?"},
                ],
                "documents": PASSAGES,
            },
        )
    return records
