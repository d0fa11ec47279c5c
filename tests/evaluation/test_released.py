"""Released checkpoints are called as their own code wants it; what is missing is named."""

import sys
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest
import torch
from training_rows import question_rows
from transformers import AutoConfig

from arcaligner.evaluation import released
from arcaligner.evaluation.answering import Answer, MissingMethodError
from arcaligner.evaluation.methods import Checkpoints
from arcaligner.evaluation.released import CocomAnswerer, load_cocom, load_cocom_model, load_released_xrag

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
        assert len(contexts) == len(questions)
        assert all(len(context) == len(contexts[0]) for context in contexts)
        return [f" {question} {'|'.join(context)}" for context, question in zip(contexts, questions, strict=True)]


def mixed_rows() -> list[dict]:
    """Rows of one, two and no passages."""
    rows = question_rows(4)
    rows[1]["passages"] = rows[0]["passages"] + rows[1]["passages"]
    rows[2]["passages"] = []
    return rows


def test_cocom_reads_each_passage_by_itself_and_answers_in_order(tokenizer):
    rows = mixed_rows()
    answers = CocomAnswerer(FakeCocom(tokenizer), 4).answer(rows)
    ada = rows[0]["passages"][0]["text"]
    skier = rows[1]["passages"][1]["text"]
    contexts = [
        [f"Toronto Northwest: {ada}"],
        [f"Toronto Northwest: {ada}", skier],
        [""],
        [f"Toronto Northwest: {ada}"],
    ]
    lengths = [[len(tokenizer(text)["input_ids"]) for text in texts] for texts in contexts]
    assert answers == [
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
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, expected[name], msg=name)
    assert not loaded.training


def test_a_package_that_its_code_asks_for_is_named(tmp_path):
    (tmp_path / "modeling_cocom.py").write_text("import flash_attention_of_tomorrow\n" + COCOM_CODE)
    config = AutoConfig.for_model("llama").to_dict() | {
        "model_type": "COCOM",
        "auto_map": {"AutoConfig": "modeling_cocom.COCOMConfig", "AutoModel": "modeling_cocom.COCOM"},
    }
    (tmp_path / "config.json").write_text(__import__("json").dumps(config))
    with pytest.raises(MissingMethodError, match="flash_attention_of_tomorrow"):
        load_cocom_model(str(tmp_path))


@pytest.mark.parametrize(
    ("load", "repo_id"),
    [
        (load_cocom(4), "naver/cocom-v1-4-mistral-7b"),
        (load_cocom(16), "naver/cocom-v1-16-mistral-7b"),
        (load_released_xrag, "Hannibal046/xrag-7b"),
    ],
)
def test_absent_weights_are_named_with_the_command_that_gets_them(monkeypatch, tmp_path, load, repo_id):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingMethodError, match=rf"hf download {repo_id}` gets it \(14\.\d GB"):
        load(Checkpoints("unused", device="cuda"))


class FakeXMistral:
    """Checks what the real one checks; answers with the sums of its slots."""

    device = torch.device("cpu")

    @classmethod
    def from_pretrained(cls, folder, dtype):
        return cls()

    def eval(self):
        return self

    def to(self, device):
        return self

    def set_xrag_token_id(self, token_id):
        self.xrag_token_id = token_id

    def generate(self, input_ids=None, retrieval_embeds=None, **kwargs):
        assert kwargs["do_sample"] is False and kwargs["max_new_tokens"] == released.MAX_NEW_TOKENS
        is_slot = input_ids == self.xrag_token_id
        assert is_slot.sum() == len(retrieval_embeds)
        self.input_ids, self.attention_mask, self.embeds = input_ids, kwargs["attention_mask"], retrieval_embeds
        return input_ids[:, -2:]


class FakeSFR(FakeXMistral):
    def get_doc_embedding(self, input_ids, attention_mask):
        return attention_mask.sum(dim=1, keepdim=True).float()  # (num_passages, 1): how long each is


def test_xrag_reads_a_slot_a_passage_with_its_own_prompt(monkeypatch, tmp_path, tokenizer):
    folder = tmp_path / "weights"
    own = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, pad_token="<|im_end|>")
    own.add_special_tokens({"extra_special_tokens": [released.XRAG_TOKEN]})
    own.save_pretrained(folder)
    monkeypatch.setattr(released, "downloaded", lambda *_: str(folder))
    module = ModuleType("src.model")
    module.XMistralForCausalLM, module.SFR = FakeXMistral, FakeSFR
    monkeypatch.setitem(sys.modules, "src", SimpleNamespace(model=module))
    monkeypatch.setitem(sys.modules, "src.model", module)

    rows = mixed_rows()
    answerer = load_released_xrag(Checkpoints("unused"))
    answers = answerer.answer(rows)
    prompts = [own.decode(answer.prompt_ids) for answer in answers]
    assert prompts[1] == (
        "[INST] Refer to the background document and answer the questions:\n\nBackground: <xRAG> <xRAG>\n\n"
        "Question: What is said in sentence 1? [/INST] The answer is:"
    )
    assert [prompt.count("<xRAG>") for prompt in prompts] == [1, 2, 1, 1]
    assert [answer.context_tokens for answer in answers] == [1, 2, 1, 1]
    assert (answerer.model.attention_mask[:, -1] == 1).all() and (answerer.model.attention_mask[:, 0] == 0).any()
    texts = [f"{p['title']}: {p['text']}" if p["title"] else p["text"] for row in rows for p in row["passages"]]
    texts.insert(3, "")  # of the row without a passage
    lengths = [float(len(own(text)["input_ids"])) for text in texts]
    assert answerer.model.embeds[:, 0].tolist() == lengths
    assert [answer.text for answer in answers] == [own.decode(answer.prompt_ids[-2:]).strip() for answer in answers]
