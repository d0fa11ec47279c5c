"""Shared parts of the commands: options, loading of checkpoints, printing."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ...common.files import printable

# Time limit for asking the Hub whether it has a checkpoint; a proxy may take seconds.
HUB_SECONDS = 10

output = Console()
messages = Console(stderr=True)


Checkpoint = Annotated[
    str, typer.Option(help="Checkpoint of an aligner, the trained part of ArcAligner: a folder or a Hub id.")
]


def parse_tokens_per_slot(value: str) -> int | str:
    """Parse tokens per slot: a whole number, or `"segment"`."""
    if value != "segment" and not value.isdecimal():
        raise typer.BadParameter(f"{value!r} is neither a whole number nor `segment`. Pass 2, 4, 8, ... or `segment`.")
    return value if value == "segment" else int(value)


def _tokens_per_slot(default: str) -> Any:
    return typer.Option(
        parser=parse_tokens_per_slot,
        metavar="INTEGER|segment",
        help=f"Tokens of text per slot, or `segment` for one slot per sentence. Default: {default}.",
    )


# `Any` is `int | str | None`, which typer cannot read.
TokensPerSlot = Annotated[Any, _tokens_per_slot("the checkpoint's")]
CorpusTokensPerSlot = Annotated[Any, _tokens_per_slot("that of the corpus, if there is one, else the checkpoint's")]
MinConfidence = Annotated[
    float | None,
    typer.Option(
        help="Abstain, with a fixed sentence such as 'not in the text', if the answerability is below this value. "
        "Answerability is how likely it is that the passages contain an answer, not that the answer is right. Default: "
        "no threshold.",
        min=0,
        max=1,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum number of tokens of the answer.", min=1, max=1024)]
MaxPassages = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of passages to use: those that most likely contain the answer. "
        "Default: 1, or 2 for a question that needs two; all if the aligner cannot score passages.",
        min=1,
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "auto"] | None,
    typer.Option(
        help="Precision of the base model; `auto` means bfloat16 if this machine multiplies matrices much faster in "
        "bfloat16, else float32. Default: float32 on a CPU, the checkpoint's on an accelerator."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Device of the models: cpu, cuda, cuda:1, ... Default: an accelerator if there is one, else cpu."
    ),
]
CorpusFolder = Annotated[Path, typer.Option("--corpus", help="Folder of the corpus.")]


def check_checkpoint_exists(checkpoint: str) -> None:
    """Raise early if a checkpoint is neither a folder nor on the Hub. transformers would try to download each file six
    times, for minutes."""
    if not checkpoint:
        raise ValueError(
            "The checkpoint is empty (''); expected a folder or a Hub id. Pass no checkpoint for the shipped aligner."
        )
    path = Path(checkpoint)
    is_folder = path.is_absolute() or len(path.parts) > 2 or checkpoint.startswith(".") or Path(path.parts[0]).is_dir()
    if path.exists():
        return
    if is_folder:
        raise FileNotFoundError(
            f"There is no folder {checkpoint}. Pass the folder or Hub id of an aligner, or train one: see "
            "docs/training.md."
        )
    import huggingface_hub

    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(checkpoint, "config.json"), str):
            huggingface_hub.model_info(checkpoint, timeout=HUB_SECONDS)
    except Exception as error:  # of whichever HTTP library the Hub's client uses
        raise OSError(
            f"{checkpoint} is neither a folder on this machine nor a repository of the Hub that can be reached "
            f"({type(error).__name__}). Pass the folder or Hub id of an aligner, or train one: see docs/training.md."
        ) from error


def check_device(device: str | None) -> None:
    """Raise `ValueError` for a device that does not exist here, before models are loaded."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"`--device` is {device!r}, but this machine has no such device, or torch does not support it. Pass "
            "`--device cpu`, or leave out `--device`."
        ) from error


def silence_transformers() -> None:
    """Hide the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def limit_threads() -> None:
    """Use as many threads as cores are idle, unless `OMP_NUM_THREADS` is set: on a busy machine, threads that share a
    core wait for each other."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and sys.platform != "win32":
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - int(os.getloadavg()[0]))))


def load_pipeline(checkpoint: str, dtype: str | None = None, device: str | None = None):
    """Load the pipeline of a checkpoint with this package's own code, in the precision of [`Dtype`] and on the device
    of [`Device`]."""
    check_checkpoint_exists(checkpoint)
    # Imported here, so that `--help` and errors in options do not wait.
    import torch

    from ...encoder_arcaligner import fastest_dtype
    from ...modeling_arcaligner import ArcAlignerForCausalLM
    from ...pipeline_arcaligner import ArcAlignerPipeline
    from ...processing_arcaligner import ArcAlignerProcessor
    from ...share.hub import read_aligner_config

    check_device(device)
    silence_transformers()
    read_aligner_config(checkpoint)
    processor = ArcAlignerProcessor.from_pretrained(checkpoint)
    if dtype == "auto":
        place = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
        dtype = fastest_dtype("cpu" if place is None else place.type)
    options = {"dtype": dtype, "device_map": device}
    options = {name: value for name, value in options.items() if value is not None}
    model = ArcAlignerForCausalLM.from_pretrained(checkpoint, **options).eval()
    processor.encoder.device = device
    device_options = {} if device is None else {"device": device}
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", **device_options)


def load_engine(checkpoint: str, corpus: Path | None, dtype: str | None = None, device: str | None = None, **settings):
    """Load an engine and answer one request, so that no user waits for what is loaded on first use. The model is loaded
    in a thread that then ends, because PyTorch keeps a pool of threads for each thread that computes. Two pools on the
    same cores would make the engine up to a quarter slower."""
    from ..server.engine import Engine

    engine = Engine(*_load_parts(checkpoint, corpus, dtype, device), **settings)
    engine.warm_up()
    return engine


def _load_parts(checkpoint: str, corpus: Path | None, dtype: str | None, device: str | None) -> tuple:
    """The pipeline, and the retriever of a corpus or `None`."""
    from concurrent.futures import ThreadPoolExecutor

    from ..corpus.retrieve import Retriever
    from ..corpus.table import Corpus

    opened = None if corpus is None else Corpus(corpus)
    with ThreadPoolExecutor(1) as loading:
        ask = loading.submit(load_pipeline, checkpoint, dtype, device).result()
    return ask, None if opened is None else Retriever(opened, ask.processor)


def load_vllm_engine(
    checkpoint: str,
    corpus: Path | None,
    dtype: str | None,
    device: str | None,
    url: str | None,
    options: str,
    folder: Path | None,
    **settings,
):
    """As [`load_engine`], with a vLLM at `url` or one that is started with `options`. vLLM reads the keys and values of
    passages from `folder`."""
    import atexit
    import shlex
    import shutil
    import tempfile

    from ...configuration_arcaligner import ArcAlignerConfig
    from ...loading_arcaligner import resolve_model
    from ..server.vllm_engine import VllmEngine, VllmProcess, VllmServer, check_lora_positions, find_vllm

    if url and options:
        raise ValueError(
            "`--vllm-options` are for a vLLM that this command starts, but `--vllm-url` names one that is already "
            "running. Leave out one of the two."
        )
    if url and folder is None and corpus is None:
        raise ValueError(
            "`--vllm-url` needs the folder from which that vLLM reads passages. Pass this folder with `--passages`, or "
            "the corpus that contains it with `--corpus`."
        )
    if not url and (python := find_vllm()) is None:
        raise ImportError(
            "vLLM is not installed. Run `make vllm` in the repository, or set the environment variable ARCALIGNER_VLLM "
            "to the path of a Python interpreter that has vLLM."
        )
    check_checkpoint_exists(checkpoint)
    config = ArcAlignerConfig.from_pretrained(checkpoint)
    check_lora_positions(config)  # before vLLM is started
    ask, retriever = _load_parts(checkpoint, corpus, dtype, device)
    if folder is None and retriever is not None:
        folder = retriever.corpus.precomputed_folder
    elif folder is None:
        folder = Path(tempfile.mkdtemp(prefix="arcaligner-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if url:
        vllm = VllmServer(url)
    else:
        base_model = resolve_model(config.base_model_name_or_path)
        all_options = ["--dtype", str(ask.model.dtype).removeprefix("torch."), *shlex.split(options)]
        vllm = VllmProcess(python, base_model, folder, all_options)
    engine = VllmEngine(ask, retriever, vllm=vllm, folder=folder, **settings)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def load_processor(checkpoint: str):
    """The processor of a checkpoint, without the model."""
    check_checkpoint_exists(checkpoint)
    from ...processing_arcaligner import ArcAlignerProcessor

    silence_transformers()
    return ArcAlignerProcessor.from_pretrained(checkpoint)


def show(text: str) -> None:
    """Print text unwrapped, with control characters escaped."""
    output.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def one_line(text: str) -> str:
    """`text` with line breaks escaped, so that the id of a document cannot look like a line of output."""
    return printable(text).replace("\n", "\\n")


def busy(message: str) -> AbstractContextManager:
    """Show what is being done: with a spinner on a terminal, else in one line."""
    if messages.is_terminal:
        return messages.status(message)
    messages.print(message, soft_wrap=True)
    return nullcontext()
