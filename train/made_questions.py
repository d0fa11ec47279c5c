"""Make questions about paragraphs without questions, to train on more questions than people wrote.

    python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/full_text.yaml       # a reader
    python -m arcaligner.train.full_text --config train/recipes/smollm2_135m/question_maker.yaml  # a maker
    python -m arcaligner.train.made_questions --maker runs/smollm2_135m/question_maker \\
        --reader runs/smollm2_135m/full_text --data data

Reader and maker are LoRAs of the base model with text as input. The maker writes an answer from a paragraph, and a
question for it. The reader then answers the question from the same paragraph, and the question is kept if the answers
agree (the *round trip*). Neither gets slots, so the selection does not depend on what an aligner can already answer.

The result is a file of rows like the others, `made_qa.jsonl.gz`, which a recipe names in `train_files`. Paragraphs of
the recipe's other questions are left out. The result is first written in parts, so that an interrupted run continues
with the next part. This is not in the paper, which trains on the questions of HotpotQA.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import AutoPeftModelForCausalLM
from peft.utils import CONFIG_NAME
from tqdm.auto import tqdm
from transformers import AutoTokenizer, set_seed

from ..common.files import counted, digest, digest_files, markdown_table, run_command, write_atomically
from ..common.rows import Row, find_answer, find_file, normalize_answer, read_rows
from ..loading_arcaligner import default_dtype
from ..tokenization_arcaligner import encode_marked, mark_control_tokens
from .prepare_data import write_file
from .prompts import full_text, question_prompt

logger = logging.getLogger(__name__)

MAX_TOKENS = 48  # of a question with its answer
MAX_ANSWER_TOKENS = 24  # of the reader's answer; a longer one is truncated, so it does not agree with the maker's
PARAGRAPHS_PER_PART = 1024
# For the maker's sampling: a token has to be at least this likely, relative to the most likely one. Unlike `top_p` this
# needs no sorting, which takes longer than the model on a GPU with thousands of rows.
MIN_P = 0.05


class TextReader:
    """
    Writes answers, or questions with their answers, with a base model and a LoRA trained by `train/full_text.py`.

    Args:
        folder (`str` or `Path`): The `output_dir` of that script.
        device (`str`): The device that it runs on.
        batch_tokens (`int`): Maximum number of tokens of a batch, with padding and generated ones.
    """

    def __init__(self, folder: str | Path, device: str = "cpu", batch_tokens: int = 16_384):
        if not Path(folder, CONFIG_NAME).exists():
            raise ValueError(
                f"{folder} has no {CONFIG_NAME}, so it is not the folder of a finished run of `python -m "
                "arcaligner.train.full_text`. Pass the folder of such a run."
            )
        model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=default_dtype(device))
        self.model = model.merge_and_unload().eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.digest = digest_files(sorted(Path(folder).glob("*.safetensors")))
        self.batch_tokens = batch_tokens

    @torch.inference_mode()
    def write(self, contents: Sequence[str], max_new_tokens: int, samples: int = 0, **options) -> list[list[str]]:
        """Generate texts for each user's turn of `contents`: `samples` texts, sampled with the `options` of `generate`,
        or by default one text, decoded greedily."""
        prompts = [self._prompt(content) for content in contents]
        written: list[list[str]] = [[] for _ in contents]
        drawn = {"do_sample": True, "num_return_sequences": samples, **options} if samples else {"do_sample": False}
        for numbers in batches_of([len(ids) + max_new_tokens for ids in prompts], self.batch_tokens // max(samples, 1)):
            inputs = self.tokenizer.pad({"input_ids": [prompts[n] for n in numbers]}, return_tensors="pt")
            ids = self.model.generate(
                **inputs.to(self.model.device), max_new_tokens=max_new_tokens, **drawn, top_k=0
            )  # (len(numbers) * max(samples, 1), seq_len)
            texts = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for place, text in enumerate(texts):
                written[numbers[place // max(samples, 1)]].append(text.strip())
        return written

    def _prompt(self, content: str) -> list[int]:
        """The ids of a conversation that begins with `content`, in which no character is a control token."""
        turn = mark_control_tokens(self.tokenizer, [{"role": "user", "content": content}])
        prompt = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return encode_marked(self.tokenizer, [prompt])[0]


def batches_of(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split rows of these lengths into batches, longest rows first. Return the indices of the rows of each batch. A
    batch has at most `max_tokens` tokens, padding included; a longer row is a batch by itself.

    >>> batches_of([3, 9, 4, 3], 8)
    [[1], [2, 0], [3]]
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def without_questions(paragraphs: Iterable[Row], questions: Iterable[Row]) -> list[Row]:
    """Rows of `paragraphs` with one passage each, without duplicates and without passages of the rows `questions`."""
    known = {passage["text"] for row in questions for passage in row["passages"]}
    unique = {}
    for row in paragraphs:
        if len(row["passages"]) == 1 and (text := row["passages"][0]["text"]).strip() and text not in known:
            unique.setdefault(text, row)
    return list(unique.values())


def parse_question(text: str, passage: dict[str, str]) -> tuple[str, str] | str:
    """The question and the answer of a maker's text, or the reason why it is not used. The text has the answer on its
    first line, and the question on the second."""
    answer, _, question = (part.strip() for part in text.partition("\n"))
    if not question:
        return "no question on a second line"
    if not question.endswith("?"):
        return "a question that does not end with a question mark"
    if not normalize_answer(answer) or find_answer(answer, passage["text"]) is None:
        return "an answer that is not in the paragraph"
    if find_answer(answer, question) is not None:
        return "a question that contains its answer"
    return question, answer


def make_questions(maker: TextReader, rows: Sequence[Row], number: int) -> tuple[list[Row], Counter]:
    """Sample `number` questions about each row's paragraph. Return those that can be used, all with different answers,
    and how many were left out, by reason."""
    prompts = [question_prompt(row) for row in rows]
    texts = maker.write(prompts, max_new_tokens=MAX_TOKENS, samples=number, min_p=MIN_P)
    new_rows, left_out = [], Counter()
    for row, texts_of_row in zip(rows, texts, strict=True):
        answers = set()
        for text in texts_of_row:
            parsed = parse_question(text, row["passages"][0])
            if isinstance(parsed, str):
                left_out[parsed] += 1
                continue
            question, answer = parsed
            if normalize_answer(answer) in answers:
                left_out["an answer that another question about the paragraph has"] += 1
                continue
            answers.add(normalize_answer(answer))
            new_rows.append(
                {"id": f"made_{row['id']}_{len(answers)}", "question": question, "answers": [answer]}
                | {"passages": row["passages"], "dataset": "made"}
            )
    return new_rows, left_out


def agreed(reader: TextReader, new_rows: Sequence[Row]) -> list[Row]:
    """The rows whose question the reader answers as the maker did, from the same paragraph; answers are compared after
    SQuAD's normalization."""
    answers = reader.write([full_text(row) for row in new_rows], max_new_tokens=MAX_ANSWER_TOKENS)
    pairs = zip(new_rows, answers, strict=True)
    return [row for row, (text,) in pairs if normalize_answer(text) == normalize_answer(row["answers"][0])]


def make_file(
    output: Path, paragraphs: Sequence[Row], maker: TextReader, reader: TextReader, number: int, seed: int
) -> Counter:
    """Write the questions about `paragraphs` to `output`, and return how many were kept and how many were left out, by
    reason. Parts that exist already are not made again."""
    parts = output.with_name(f"{output.name}.parts")
    parts.mkdir(parents=True, exist_ok=True)
    counts, names = Counter(), []
    starts = range(0, len(paragraphs), PARAGRAPHS_PER_PART)
    with tqdm(total=len(paragraphs), desc="making questions", unit="paragraph") as bar:
        for start in starts:
            rows = paragraphs[start : start + PARAGRAPHS_PER_PART]
            # The name is a digest of everything that the part depends on, so that different settings do not reuse it.
            key = digest([[row["id"], row["passages"]] for row in rows] + [maker.digest, reader.digest, number, seed])
            path = parts / f"{start:07}-{key[:16]}.json"
            if not path.exists():
                set_seed(seed + start)
                new_rows, left_out = make_questions(maker, rows, number)
                agreed_rows = agreed(reader, new_rows)
                left_out["an answer that differs from the reader's"] = len(new_rows) - len(agreed_rows)
                write_atomically(path, json.dumps({"rows": agreed_rows, "left_out": left_out}))
            part = json.loads(path.read_text(encoding="utf-8"))
            counts += Counter(part["left_out"]) + Counter({"kept": len(part["rows"])})
            names.append(path)
            bar.update(len(rows))
            bar.set_postfix(kept=counts["kept"])
    write_file(output, (row for path in names for row in json.loads(path.read_text(encoding="utf-8"))["rows"]))
    shutil.rmtree(parts)
    return counts


def main(
    maker: Annotated[
        Path,
        typer.Option(
            help="Folder of the LoRA that writes questions, trained with "
            "train/recipes/smollm2_135m/question_maker.yaml."
        ),
    ],
    reader: Annotated[
        Path,
        typer.Option(
            help="Folder of the LoRA that answers from text, trained with train/recipes/smollm2_135m/full_text.yaml."
        ),
    ],
    data: Annotated[str, typer.Option("--data", "--data-dir", help="Folder of the data files.")] = "data",
    paragraphs: Annotated[
        str, typer.Option(help="File in the folder `--data` with the paragraphs to write questions about.")
    ] = "recon_train.jsonl.gz",
    question_files: Annotated[
        list[str],
        typer.Option(
            "--asked",
            help="File in the folder `--data` with paragraphs that have questions already. No questions are written "
            "about these paragraphs. Can be repeated.",
        ),
    ] = ["train_qa.jsonl.gz", "train_extra.jsonl.gz"],  # noqa: B006
    output: Annotated[Path, typer.Option(help="File in which the questions are saved.")] = Path(
        "data/made_qa.jsonl.gz"
    ),
    limit: Annotated[int | None, typer.Option("-n", help="Maximum number of paragraphs. Default: all.", min=1)] = None,
    questions: Annotated[int, typer.Option(help="Maximum number of questions about each paragraph.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="Device of the models: cpu or cuda.")] = "cpu",
    batch_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens per batch; 500,000 fit on a GPU with 80 GB.")
    ] = 16_384,
    seed: Annotated[int, typer.Option(help="Seed for sampling the questions.")] = 0,
) -> None:
    """Write questions and answers about paragraphs with one LoRA, the maker. Keep the questions to which another LoRA,
    the reader, gives the same answer."""
    if output.exists():
        raise ValueError(f"{output} exists. Delete the file to make it again, or choose another `--output`.")
    known = (row for file in question_files for row in read_rows(find_file(file, data)))
    selected = without_questions(read_rows(find_file(paragraphs, data)), known)[:limit]
    models = (TextReader(folder, device, batch_tokens) for folder in (maker, reader))
    counts = make_file(output, selected, *models, questions, seed)
    table = markdown_table(["questions kept, or why they were left out", "number"], counts.most_common())
    saved = f"The kept questions were written to {output}."
    print("\n".join([counted(len(selected), "paragraph"), "", *table, "", saved]))


if __name__ == "__main__":
    run_command(main)
