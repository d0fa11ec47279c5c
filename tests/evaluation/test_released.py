"""COCOM is called as its own code wants it; what is missing is named."""

import json

import huggingface_hub
import pytest
import torch
from training_rows import question_rows
from transformers import AutoConfig

from arcaligner.evaluation.answering import Answer, MissingMethodError
from arcaligner.evaluation.methods import METHODS, Checkpoints
from arcaligner.evaluation.released import CocomAnswerer, load_cocom_model

# The shape of COCOM's own code: a decoder that is loaded while the model is made.
COCOM_CODE = """
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel


class COCOMConfig(PretrainedConfig):
    model_type = "COCOM"

    def __init__(self, decoder_model_name="", **kwargs):
        super().__init__(**kwargs)
        self.decoder_model_name = decoder_model_name


class COCOM(PreTrainedModel):
    config_class = COCOMConfig

    def __init__(self, cfg):
        super().__init__(cfg)
        self.decoder = AutoModelForCausalLM.from_pretrained(cfg.decoder_model_name, low_cpu_mem_usage=True)
        self.decoder_tokenizer = AutoTokenizer.from_pretrained(cfg.decoder_model_name, padding_side="left")
        self.decoder_tokenizer.add_special_tokens({"additional_special_tokens": ["<MEM>", "<AE>", "<ENC>", "<SEP>"]})
        self.decoder.resize_token_embeddings(len(self.decoder_tokenizer))
"""


class FakeCocom:
    """Answers with what it was asked."""

    def __init__(self, tokenizer):
        self.decoder_tokenizer = tokenizer

    def generate_from_text(self, contexts, questions, max_new_tokens=128):
        assert len(contexts) == len(questions) == 1
        return [f" {questions[0]} {'|'.join(contexts[0])}"]


def test_cocom_reads_each_passage_by_itself_and_answers_in_order(tokenizer):
    rows = question_rows(3)  # with one, two and no passages
    rows[1]["passages"] = rows[0]["passages"] + rows[1]["passages"]
    rows[2]["passages"] = []
    ada, skier = f"Toronto Northwest: {rows[0]['passages'][0]['text']}", rows[1]["passages"][1]["text"]
    contexts = [[ada], [ada, skier], [""]]
    lengths = [[len(tokenizer(text)["input_ids"]) for text in texts] for texts in contexts]
    assert CocomAnswerer(FakeCocom(tokenizer), 4).answer(rows) == [
        Answer(f"{row['question']} {'|'.join(texts)}".strip(), [], sum(-(-n // 4) for n in length), sum(length))
        for row, texts, length in zip(rows, contexts, lengths, strict=True)
    ]


def test_a_model_that_loads_its_decoder_while_it_is_made_keeps_the_checkpoints_weights(tmp_path, base_model_dir):
    (tmp_path / "modeling_cocom.py").write_text(COCOM_CODE)
    namespace: dict = {}
    exec(COCOM_CODE, namespace)
    config = namespace["COCOMConfig"](decoder_model_name=str(base_model_dir))
    config.auto_map = {"AutoConfig": "modeling_cocom.COCOMConfig", "AutoModel": "modeling_cocom.COCOM"}
    model = namespace["COCOM"](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path)
    loaded = load_cocom_model(str(tmp_path))
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()))
    assert not loaded.training


def test_a_package_that_its_code_needs_is_named(tmp_path):
    (tmp_path / "modeling_cocom.py").write_text("import flash_attention_of_tomorrow\n" + COCOM_CODE)
    auto_map = {"AutoConfig": "modeling_cocom.COCOMConfig", "AutoModel": "modeling_cocom.COCOM"}
    config = AutoConfig.for_model("llama").to_dict() | {"model_type": "COCOM", "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MissingMethodError, match="flash_attention_of_tomorrow"):
        load_cocom_model(str(tmp_path))


@pytest.mark.parametrize("rate", [4, 16])
def test_absent_weights_are_named_with_the_command_that_gets_them(monkeypatch, tmp_path, rate):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingMethodError, match=rf"hf download naver/cocom-v1-{rate}-mistral-7b` gets it \(14.6 GB"):
        METHODS[f"cocom_{rate}"].load(Checkpoints("unused", device="cuda"))
