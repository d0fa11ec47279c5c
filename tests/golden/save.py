"""Writes `saved/`: tiny models, checkpoints, a corpus and cached passages.

It was run once, at the commit that README.md names: the files stand for those that users have saved, and later code
does not write them again.

    PYTHONPATH=tests python -m golden.save
"""

import shutil
import tempfile
from pathlib import Path

import torch
from conftest import SENTENCES, tiny_tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import backbone_config, random_probe, randomize
from transformers import AutoModelForCausalLM, BertConfig, BertModel, BertTokenizerFast

from arcaligner.apps.corpus.build import build_corpus
from arcaligner.apps.corpus.precompute import precompute_corpus

from .cases import (
    PASSAGES,
    SAVED,
    ArcAlignerForCausalLM,
    ArcAlignerProcessor,
    Corpus,
    load_tiny,
    passage_cache,
    precompute,
    tiny_models,
)

BASE_MODEL, ENCODER, WIDTH = "golden/base-model", "golden/encoder", 12


def save_models(folder: Path) -> None:
    """A random three-layer Llama and a random sentence encoder of one layer."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = AutoModelForCausalLM.from_config(backbone_config("llama", **sizes, **ids))
    randomize(model)
    model.save_pretrained(folder / BASE_MODEL)
    tokenizer.save_pretrained(folder / BASE_MODEL)

    words = sorted({word.strip(".,:?").lower() for text in SENTENCES for word in text.split()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    vocab += [f"{mark}{chr(code)}" for code in range(33, 127) for mark in ("", "##")]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(vocab))}
    sizes = {"vocab_size": len(vocab), "hidden_size": WIDTH, "intermediate_size": 16, "max_position_embeddings": 64}
    bert = BertModel(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    randomize(bert, seed=1)
    with tempfile.TemporaryDirectory() as part:
        bert.save_pretrained(part)
        BertTokenizerFast(vocab=vocab, model_max_length=64).save_pretrained(part)
        SentenceTransformer(modules=[Transformer(part), Pooling(WIDTH)], device="cpu").save(str(folder / ENCODER))


def save_checkpoint(name: str, lora_r: int = 0, settings: dict | None = None, **aligner) -> None:
    """A random aligner with its processor; with `lora_r` the encoder is trained, that is, random as well."""
    names = {"encoder_name_or_path": ENCODER, "encoder_hidden_size": WIDTH}
    processor = ArcAlignerProcessor.from_base_model(BASE_MODEL, **names, **(settings or {}))
    processor.encoder.device = "cpu"
    if lora_r:
        for number, weight in enumerate(processor.train_encoder(lora_r)):
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(number))
    names["context_token_id"] = processor.context_token_id
    names |= {"lora_r": 4, "lora_dropout": 0.0, "gate_hidden_size": 8}
    model = ArcAlignerForCausalLM.from_pretrained(BASE_MODEL, **names, **aligner)
    randomize(model, seed=2)  # the base model, too, which is not saved
    if settings:
        words = {"scale": 0.7, "weight": 2.0, "bias": -1.0}
        processor.answer_probe = random_probe(model, words=words)
    model.save_pretrained(SAVED / name)
    processor.save_pretrained(SAVED / name)
    for code in (SAVED / name).glob("*.py"):  # for later code to load
        code.unlink()


def main() -> None:
    shutil.rmtree(SAVED, ignore_errors=True)
    with tiny_models():
        save_models(SAVED / "models")
        save_checkpoint("joint", gate_mode="adaptive")
        settings = {"passage_attention": "separate", "context_words": True, "no_answer": "not in the text"}
        settings |= {"copy_bonus": 3.0, "tokens_per_slot": 4, "trained_tokens_per_slot": [2, 4, "segment"]}
        save_checkpoint("separate", 2, settings, passage_attention="separate", word_parts=2, gate_mode="adaptive")
        letters = SAVED / "letters"  # next to the corpus, as paths of documents are relative
        letters.mkdir()
        for number, passage in enumerate(PASSAGES):
            text = passage if isinstance(passage, str) else f"# {passage['title']}\n\n{passage['text']}"
            (letters / f"{number}.{'txt' if isinstance(passage, str) else 'md'}").write_text(text, encoding="utf-8")
        loaded = load_tiny("separate")
        corpus = Corpus.create(SAVED / "corpus", loaded.processor, passage_tokens=17)
        build_corpus([str(letters)], corpus, loaded.processor)
        shutil.rmtree(letters)
        precompute_corpus(corpus, loaded.model, loaded.processor)
        precompute(passage_cache(loaded.model, loaded.processor, folder=SAVED / "cached"), "?", PASSAGES)
    for left in (SAVED / "corpus" / ".writer.lock", SAVED / "models" / ENCODER / "README.md"):
        left.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
