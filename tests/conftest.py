"""Shared fixtures for tests of processor, pipeline, training and command line.

No network, no download: a BPE tokenizer with ChatML turns trained on a few sentences, a random
Llama, a random sentence encoder and an aligner checkpoint around them, written once a session.
"""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads would wait for each other

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import datasets
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import backbone_config, float64_throughout, random_head, randomize, tiny_aligner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, BertConfig, BertModel, BertTokenizerFast, PreTrainedTokenizerFast

from arcaligner import ArcAlignerForCausalLM, ArcAlignerPipeline, ArcAlignerProcessor, answering_arcaligner
from arcaligner.answering_arcaligner import Answerer
from arcaligner.apps.cli import app as cli
from arcaligner.configuration_arcaligner import DEFAULT_BASE_MODEL, DEFAULT_ENCODER
from arcaligner.loading_arcaligner import models_directory

ENCODER_WIDTH = 12
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = (
    "Toronto Northwest was a federal electoral district in Canada.",
    "The riding was created in 1924 from parts of Parkdale.",
    "Radik Zhaparov is a Kazakh ski jumper who has competed since 2003.",
    "Refer to the background document: Question: What sport does he play?",
    "It was written by Ada, and nobody else knew how to read it aloud.",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests of the real default models where these are not on the machine."""
    if all((models_directory() / name).is_dir() for name in (DEFAULT_BASE_MODEL, DEFAULT_ENCODER)):
        return
    skip = pytest.mark.skip(reason="the default models are not there: `python -m arcaligner default-models`")
    for item in items:
        if item.get_closest_marker("default_backbone"):
            item.add_marker(skip)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text survives a round trip, ChatML's marks are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    turns = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **turns, chat_template=CHATML)


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory):
    """An empty cache of 🤗 Datasets for this test session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def base_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A random three-layer Llama with its tokenizer, as `from_pretrained` wants a base model."""
    folder = tmp_path_factory.mktemp("base_model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = AutoModelForCausalLM.from_config(backbone_config("llama", **sizes, **ids))
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one-layer sentence encoder, `ENCODER_WIDTH` wide, with a limit of 64 tokens."""
    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word.strip(".,:?").lower() for text in SENTENCES for word in text.split()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    vocab += [f"{mark}{chr(code)}" for code in range(33, 127) for mark in ("", "##")]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(vocab))}
    sizes = {"vocab_size": len(vocab), "hidden_size": ENCODER_WIDTH, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    bert = BertModel(BertConfig(**sizes))
    randomize(bert, seed=1)
    bert.save_pretrained(folder / "bert")
    BertTokenizerFast(vocab=vocab, model_max_length=64).save_pretrained(folder / "bert")
    modules = [Transformer(str(folder / "bert")), Pooling(ENCODER_WIDTH)]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "encoder"))
    return folder / "encoder"


@pytest.fixture(scope="session")
def processor(base_model_dir: Path, encoder_dir: Path) -> ArcAlignerProcessor:
    return new_processor(base_model_dir, encoder_dir)


def new_processor(base_model_dir: Path, encoder_dir: Path, **settings) -> ArcAlignerProcessor:
    """A processor for the tiny models, whose encoder runs on the CPU."""
    names = {"encoder_name_or_path": str(encoder_dir), "encoder_hidden_size": ENCODER_WIDTH}
    processor = ArcAlignerProcessor.from_base_model(str(base_model_dir), **names, **settings)
    processor.encoder.device = "cpu"
    return processor


def processor_with(processor: ArcAlignerProcessor, **settings) -> ArcAlignerProcessor:
    """A copy of `processor` with other settings."""
    same = {name: getattr(processor, name) for name in ("encoder_name_or_path", "encoder_hidden_size")}
    return ArcAlignerProcessor(processor.tokenizer, context_token_id=processor.context_token_id, **same, **settings)


def aligner_for(processor, backbone: str = "llama", text: dict | None = None, **settings) -> ArcAlignerForCausalLM:
    """A random aligner, in float64, that fits the processor; `text` changes settings of its backbone."""
    text = {"vocab_size": len(processor.tokenizer), "max_position_embeddings": 300} | (text or {})
    settings |= {"encoder_hidden_size": ENCODER_WIDTH, "context_token_id": processor.context_token_id}
    return tiny_aligner(backbone_config(backbone, **text), **settings)


def random_aligner(base_model: Path, processor, seed: int, **settings) -> ArcAlignerForCausalLM:
    """An aligner around `base_model` whose parameters are all random: some gates are open, some closed."""
    model = ArcAlignerForCausalLM.from_pretrained(
        str(base_model),
        encoder_name_or_path=processor.encoder_name_or_path,
        encoder_hidden_size=ENCODER_WIDTH,
        context_token_id=processor.context_token_id,
        **{"lora_r": 4, "gate_hidden_size": 8, **settings},
    )
    randomize(model, seed)
    return model


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory, base_model_dir: Path, processor) -> Path:
    """A checkpoint of a random aligner with its processor."""
    folder = tmp_path_factory.mktemp("checkpoint")
    random_aligner(base_model_dir, processor, seed=2).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes) -> None:
    """Changes fields of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def run_cli(capsys):
    """Runs the command line; gives exit code, standard output and standard error."""

    def run(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()  # what fixtures printed
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def few_tokens(monkeypatch):
    """Limits answers of an evaluation to four tokens, and shares no loaded model with other tests."""
    from arcaligner.benchmarks import compare  # of an extra, which not all tests need
    from arcaligner.evaluation import answering

    for module in (answering_arcaligner, compare):
        monkeypatch.setattr(module, "MAX_NEW_TOKENS", 4)
    answering.load_aligner.cache_clear()
    yield
    answering.load_aligner.cache_clear()


@pytest.fixture
def float64_model_code():
    """Model code that computes in float64 what it otherwise computes in float32."""
    with float64_throughout():
        yield


@pytest.fixture(params=["start"])
def separate(processor, request) -> tuple[ArcAlignerForCausalLM, ArcAlignerProcessor]:
    """A random aligner for independent passages, with an answerability head, and its processor. A test can have it with
    another `passage_alignment`."""
    model = aligner_for(processor, passage_attention="separate", passage_alignment=request.param)
    random_head(model)
    return model, processor_with(processor, passage_attention="separate", no_answer="not in the text")


def chat_inputs(processor, question: str | list[dict], documents: list | None = None, **options) -> dict:
    """Model inputs for a question or a chat, as a user asks for them."""
    chat = [{"role": "user", "content": question}] if isinstance(question, str) else question
    asked_for = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    return processor.apply_chat_template(chat, documents=documents, **asked_for | options)


def pipeline_of(model, processor, **settings) -> ArcAlignerPipeline:
    """The pipeline of an aligner, on the CPU."""
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu", **settings)


def greedy_answer(model, processor, inputs: dict, max_new_tokens: int) -> str:
    """The answer of `model` to the one row of `inputs`."""
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture
def model(checkpoint_dir: Path) -> ArcAlignerForCausalLM:
    """The aligner of `checkpoint_dir`, loaded again for each test."""
    return ArcAlignerForCausalLM.from_pretrained(str(checkpoint_dir)).eval()


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The folder that the wheel of this tree installs, `arcaligner`."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without folders outside the package and files that only a working copy has.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "docs", "*.egg-info", "*.lance")
    tree = shutil.copytree(Path(__file__).parents[1], folder / "tree", ignore=left_out)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=tree, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site" / "arcaligner"


@pytest.fixture
def give_head(request):
    """Gives a shared model an answerability head until the end of this test."""

    def give(model, **settings) -> None:
        random_head(model, **settings)
        request.addfinalizer(lambda: model.set_answerability_layers(None))

    return give


def score_passages(store, questions, documents=None, **kwargs):
    """`Answerer.score` with a cache of passages."""
    return Answerer(store.model, store.processor, store).score(questions, documents, **kwargs)
