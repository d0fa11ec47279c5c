"""Pointer heads: their attention, what it changes at the beginning of an answer, and where it changes nothing."""

import pytest
import torch
from accelerate import dispatch_model
from conftest import aligner_for, chat_inputs, pipeline_of, processor_with, random_head
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_aligner
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from arcaligner import ArcAlignerConfig, answering_arcaligner
from arcaligner.answering_arcaligner import PassageCopyLogitsProcessor, greedy_answers
from arcaligner.attention_arcaligner import CACHE
from arcaligner.configuration_arcaligner import check_pointer_heads
from arcaligner.modeling_arcaligner import PrefillOutputs
from arcaligner.pointer_arcaligner import Pointer, PointerAttention, last_weights, log_shares_of_words
from arcaligner.segmentation_arcaligner import Segment

QUESTION = "Who wrote it?"
DOCUMENTS = ["It was written by Ada.  Nobody else knew.", {"title": "Toronto Northwest", "text": "A riding, in 1924."}]
HEADS = [[0, 1], [1, 0], [1, 3]]
HUGE = 1e4  # leaves no other token a chance


@pytest.fixture(params=["start", "end"])
def pointing(processor, request):
    """A random aligner for independent passages, with pointer heads, and its processor."""
    settings = {"passage_attention": "separate", "passage_alignment": request.param}
    model = aligner_for(processor, **settings, pointer_heads=HEADS, pointer_weight=1.0)
    return model, processor_with(processor, passage_attention="separate")


def attention_of(model, inputs) -> torch.Tensor:
    """The attention to the slots of one row, after `generate`."""
    model.generate(**inputs, max_new_tokens=1, do_sample=False, prefill=(prefill := PrefillOutputs()))
    return prefill.slot_attention


# The attention


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("backbone", ["llama", "qwen3"])
def test_attention_equals_recorded_weights(processor, backbone, kernel):
    """The mean over the heads of the weights that `output_attentions` records."""
    model = aligner_for(processor, backbone, pointer_heads=HEADS, pointer_weight=1.0, max_refinement_steps=2)
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    model.set_attn_implementation("eager")
    weights = model(**inputs, output_attentions=True).attentions  # each (1, heads, seq_len, seq_len)
    expected = torch.stack([weights[layer][0, head, -1] for layer, head in HEADS]).mean(dim=0)
    model.set_attn_implementation(kernel)
    model(
        **inputs, **{CACHE: DynamicCache(config=model.config.text_config)}, pointer=(pointer := PointerAttention(HEADS))
    )
    torch.testing.assert_close(pointer.mean()[0].double(), expected.double(), rtol=0, atol=1e-6)
    is_slot = inputs["input_ids"][0] == model.config.context_token_id
    torch.testing.assert_close(attention_of(model, inputs)[0], pointer.mean()[0, is_slot])


def test_cached_passages_have_the_same_attention(pointing):
    model, processor = pointing
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    cached = model.passage_cache(processor).prepare([QUESTION], [DOCUMENTS])
    torch.testing.assert_close(attention_of(model, cached), attention_of(model, inputs), rtol=0, atol=1e-6)


def test_static_cache_has_the_same_attention(pointing):
    model, processor = pointing
    inputs, length = chat_inputs(processor, QUESTION, DOCUMENTS), 150
    static = {CACHE: StaticCache(model.config.text_config, max_cache_len=length)}
    torch.testing.assert_close(attention_of(model, inputs | static), attention_of(model, inputs), rtol=0, atol=1e-6)


def test_padded_rows_have_their_own_attention(pointing):
    model, processor = pointing
    short = processor_with(processor, passage_attention="separate")
    rows = [chat_inputs(short, QUESTION, documents) for documents in (DOCUMENTS, DOCUMENTS[1:])]
    chats = [[{"role": "user", "content": QUESTION}]] * 2
    options = {"processor_kwargs": {"padding": True, "padding_side": "left"}, "add_generation_prompt": True}
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    both = attention_of(model, processor.apply_chat_template(chats, documents=[DOCUMENTS, DOCUMENTS[1:]], **options))
    first, second = (attention_of(model, row)[0] for row in rows)
    torch.testing.assert_close(both[0], first, rtol=0, atol=1e-6)
    torch.testing.assert_close(both[1, : len(second)], second, rtol=0, atol=1e-6)
    assert not both[1, len(second) :].any() and len(second) < len(first)


def test_attention_changes_nothing_else(pointing):
    """A layer that is computed once more leaves hidden states, cache and logits as they are."""
    model, processor = pointing
    inputs, results = chat_inputs(processor, QUESTION, DOCUMENTS), []
    for pointer in (None, PointerAttention(HEADS)):
        cache = DynamicCache(config=model.config.text_config)
        outputs = model(**inputs, **{CACHE: cache}, pointer=pointer)
        results.append([outputs.logits, *(layer.keys for layer in cache.layers)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert pointer.mean() is not None


def test_no_cache_has_no_attention(processor):
    model = aligner_for(processor, pointer_heads=HEADS, pointer_weight=1.0)
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    assert attention_of(model, inputs | {"use_cache": False}) is None and attention_of(model, inputs) is not None


class IdentityLayer(QuantizedLayer):
    """A quantized layer without rounding."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_quantized_cache_has_no_attention(processor):
    model = aligner_for(processor, pointer_heads=HEADS, pointer_weight=1.0)
    cache = Cache(layers=[IdentityLayer() for _ in range(model.config.text_config.num_hidden_layers)])
    assert attention_of(model, chat_inputs(processor, QUESTION, DOCUMENTS) | {CACHE: cache}) is None


def test_masks_of_flash_attention(processor):
    """A mask of positions hides padding."""
    model = aligner_for(processor, pointer_heads=HEADS, pointer_weight=1.0)
    states, mask = torch.randn(2, 1, 24, dtype=torch.float64), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    cache, layer = DynamicCache(config=model.config.text_config), model.model.decoder_layers[0]
    shape = 2, 2, 5, model.config.text_config.head_dim
    cache.update(torch.randn(*shape).double(), torch.randn(*shape).double(), 0)
    angles = torch.zeros(2, 5, shape[-1]).double()
    pointer = PointerAttention([[0, 1]])
    kwargs = {"position_embeddings": (angles + 1, angles), "attention_mask": mask, CACHE: cache}
    pointer.add(layer, type(layer).__bases__[-1].forward, states, kwargs)
    (weights,) = pointer.by_layer.values()
    assert not weights[0, :, :2].any() and weights[0, :, 2:].all() and weights[1].all()


def test_large_products_in_float16():
    """Scores above the range of float16 before they are scaled do not become NaN."""
    module, query = torch.nn.Module(), torch.full((1, 2, 1, 64), 40.0, dtype=torch.float16)
    key = torch.cat([query[:, :1], query[:, :1] - 1], dim=2)
    last_weights(module, query, key, key, None, scaling=0.001)
    expected = torch.tensor([40.0 * 40, 40 * 39]).mul(64 * 0.001).softmax(0)
    torch.testing.assert_close(module.last_weights[0, :, 0], expected.expand(2, 2), rtol=1e-3, atol=1e-3)


def test_hooked_modules_have_the_same_attention(processor):
    """accelerate replaces the forward of each module of a dispatched model."""
    model = aligner_for(processor, pointer_heads=HEADS, pointer_weight=1.0)
    inputs = chat_inputs(processor, QUESTION, DOCUMENTS)
    expected = attention_of(model, inputs)
    dispatched = dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    torch.testing.assert_close(attention_of(dispatched, inputs), expected, rtol=0, atol=1e-6)


def test_sliding_layers_have_no_attention(processor):
    """The keys of earlier positions are gone there."""
    model = aligner_for(processor, "mistral", {"sliding_window": 8}, pointer_heads=HEADS, pointer_weight=1.0)
    assert attention_of(model, chat_inputs(processor, QUESTION, DOCUMENTS)) is None


# The beginning of an answer


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 60), st.randoms(use_true_random=False))
def test_word_has_the_share_of_its_slot(lengths, place, draw):
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    spans = [Segment(0, end - length, end, "") for length, end in zip(lengths, ends, strict=True)]
    shares = [-draw.random() for _ in spans]
    inside = [share for span, share in zip(spans, shares, strict=True) if place in range(span.start, span.end)]
    assert log_shares_of_words({7: [place]}, spans, shares) == {7: inside[0] if inside else min(shares)}
    assert log_shares_of_words({7: [place, 0]}, spans, shares) == {7: max(shares[0], inside[0] if inside else -2.0)}


def test_spans_are_those_of_the_slots(pointing):
    """One span per slot, in order; the spans of a text cover it."""
    model, processor = pointing
    for rate in (1, 2, "segment"):
        spans = processor.slot_encoder.slot_spans(DOCUMENTS, rate)
        inputs = chat_inputs(processor, QUESTION, DOCUMENTS, tokens_per_slot=rate)
        assert len(spans) == int((inputs["input_ids"] == model.config.context_token_id).sum())
        assert "".join(span.text for span in spans if span.document == 1) == "A riding, in 1924."


def first_scores(processor, attention, weight, bonus=3.0, num_slots=None, rows=1):
    """Scores of the first token without a preference of the model, for copies of `DOCUMENTS`, in slots of a segment."""
    prefill = PrefillOutputs(slot_attention=torch.tensor([attention] * rows))
    prefill.is_slot = torch.ones(1, num_slots or len(attention), dtype=torch.bool)
    pointer = Pointer(processor, [DOCUMENTS], "segment", weight, prefill)
    copier = PassageCopyLogitsProcessor(processor, [DOCUMENTS], bonus, None, pointer)
    return copier(torch.zeros(rows, 4).long(), torch.zeros(rows, len(processor.tokenizer)))


@pytest.mark.parametrize("rows", [1, 3])
def test_attended_words_begin_answers(processor, rows):
    """The bonus of a word is less by the weighted logarithm of the attention to its slot, relative to the highest.
    Words of titles, "yes" and "no" have the whole bonus."""
    spans = processor.slot_encoder.slot_spans(DOCUMENTS, "segment")
    assert [span.text for span in spans] == ["It was written by Ada.", "Nobody else knew.", "A riding, in 1924."]
    scores = first_scores(processor, [0.1, 0.4, 0.2], 2.0, rows=rows)
    encode = lambda word: processor.tokenizer(word, add_special_tokens=False)["input_ids"][0]  # noqa: E731
    expected = torch.zeros(rows, len(processor.tokenizer))
    for words, share in ((("Nobody", "Toronto", "yes", "no"), 0.4), (("written", "Ada"), 0.1), (("riding",), 0.2)):
        for word in words:
            expected[:, encode(word)] = 3.0 + 2.0 * torch.log(torch.tensor(share / 0.4))
    expected = expected - (scores - scores.max(dim=1, keepdim=True).values).logsumexp(1, keepdim=True)
    for word in ("Nobody", "Toronto", "yes", "no", "written", "Ada", "riding"):
        difference = scores[:, encode(word)] - scores[:, encode("Nobody")]
        torch.testing.assert_close(difference, expected[:, encode(word)] - expected[:, encode("Nobody")])


def test_no_is_not_lowered(processor):
    """Also if a passage has this word in a slot with little attention."""
    documents = ["It was Ada. Then no more yes."]
    prefill = PrefillOutputs(slot_attention=torch.tensor([[0.9, 1e-4]]), is_slot=torch.ones(1, 2).bool())
    copier = PassageCopyLogitsProcessor(
        processor, [documents], 3.0, None, Pointer(processor, [documents], "segment", 2.0, prefill)
    )
    scores = copier(torch.zeros(1, 4).long(), torch.zeros(1, len(processor.tokenizer)))[0]
    first = {
        word: processor.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("no", "Ada", "more")
    }
    assert scores[first["no"]] == scores[first["Ada"]] > scores[first["more"]]


def test_other_slots_do_not_count(processor):
    """If the slots are not those of the passages, for example because of `max_slots`, all words are equal."""
    equal = first_scores(processor, [1.0, 1.0, 1.0], 2.0)
    torch.testing.assert_close(first_scores(processor, [0.1, 0.4, 0.2], 2.0, num_slots=2), equal, rtol=0, atol=0)


def test_later_tokens_have_the_whole_bonus(processor):
    prefill = PrefillOutputs(slot_attention=torch.tensor([[0.1, 0.4, 0.2]]), is_slot=torch.ones(1, 3).bool())
    results = []
    for pointer in (None, Pointer(processor, [DOCUMENTS], "segment", 2.0, prefill)):
        copier = PassageCopyLogitsProcessor(processor, [DOCUMENTS], 3.0, None, pointer)
        scores = torch.zeros(1, len(processor.tokenizer))
        copier(torch.zeros(1, 4).long(), scores)
        word = processor.tokenizer("written", add_special_tokens=False)["input_ids"]
        results.append(copier(torch.tensor([[0] * 4 + word]), scores))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_large_weight_decides_where_answers_begin(pointing, monkeypatch):
    """The answer begins with a word in the slot with the most attention, for pipeline and evaluation alike."""
    monkeypatch.setattr(answering_arcaligner, "YES_NO", ())
    model, processor = pointing
    model.config.pointer_weight = HUGE
    text = "Ada. Byron. Carl. Dora. Emil. Fred. Gina. Hugo."
    inputs = chat_inputs(processor, QUESTION, [text], tokens_per_slot=2)
    attention = attention_of(model, inputs)[0].tolist()
    share = {word: 0.0 for word in text.split()}
    for span, of_slot in zip(processor.slot_encoder.slot_spans([text], 2), attention, strict=True):
        for word in share:
            if span.start <= text.index(word) < span.end:
                share[word] = of_slot
    word = max(share, key=share.__getitem__)
    ask = pipeline_of(model, processor, max_new_tokens=4, tokens_per_slot=2)
    (record,) = ask(QUESTION, documents=[text], copy_bonus=HUGE)
    assert record["generated_text"].strip().startswith(word[:3])
    (answer,), _ = greedy_answers(model, processor, inputs, [QUESTION], [[text]], HUGE, 2, max_new_tokens=4)
    assert answer == record["generated_text"].strip()
    (without,), _ = greedy_answers(model, processor, inputs, [QUESTION], [[text]], HUGE, max_new_tokens=4)
    assert without != answer


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"max_passages": 2}], ids=str)
def test_batches_answer_as_single_questions(pointing, options):
    model, processor = pointing
    random_head(model)
    model.config.pointer_weight = HUGE
    rows = [{"question": QUESTION, "documents": documents} for documents in (DOCUMENTS, ["Ada. Byron."], [])]
    rows = rows if options.get("max_passages") else ["Once upon", *rows]
    ask = pipeline_of(model, processor, max_new_tokens=3)
    together, alone = (ask(rows, batch_size=size, copy_bonus=HUGE, **options) for size in (4, 1))
    assert together == alone and "recursion_depth" not in together[0][0]


# Settings


@pytest.mark.parametrize(
    "heads, message",
    [
        ([[2, 0]], r"contains \[2, 0\], but the base model has layers 0 to 1 with heads 0 to 3"),
        ([[0, 4]], r"contains \[0, 4\], but"),
        ([[0]], "expected pairs"),
        ([[0, 1.5]], "expected pairs"),
    ],
)
def test_missing_heads_are_refused(heads, message):
    with pytest.raises(ValueError, match=message):
        check_pointer_heads(heads, 2, 4)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_unusable_weight_is_refused(weight):
    with pytest.raises(ValueError, match="`pointer_weight` is .*; expected a finite number"):
        tiny_aligner(pointer_heads=HEADS, pointer_weight=weight)


def test_heads_are_saved(tmp_path):
    config = tiny_aligner(pointer_heads=HEADS, pointer_weight=2.0).config
    config.save_pretrained(tmp_path)
    loaded = ArcAlignerConfig.from_pretrained(tmp_path)
    assert (loaded.pointer_heads, loaded.pointer_weight, loaded.has_pointer) == (HEADS, 2.0, True)
    assert not tiny_aligner(pointer_heads=HEADS).config.has_pointer
