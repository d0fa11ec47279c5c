"""Inputs of the encoder: batches bounded by tokens, the tokens of each span, and flat tensors to move."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from arcaligner import ArcAlignerProcessor, encoder_arcaligner
from arcaligner.encoder_arcaligner import EncoderTokenizer, _span_tokens

ALPHABET = st.sampled_from("ab Ada.!?é漢😀\u200b'-")


@st.composite
def texts_with_spans(draw):
    """Texts of up to twice the encoder's limit, the offset where spans begin, and the offset where each span ends."""
    texts, starts, ends = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        text = draw(st.text(ALPHABET, max_size=120))
        start = draw(st.integers(0, len(text)))
        texts.append(text)
        starts.append(start)
        ends.append(sorted(draw(st.lists(st.integers(start, len(text)), min_size=1, max_size=9))))
    return texts, starts, ends


def plain_means(encoder, text: str, start: int, ends: list[int]) -> torch.Tensor:
    """Mean states of one text's spans (num_spans, encoder_hidden_size), computed in plain loops."""
    limit = encoder.model.max_seq_length
    tokens = encoder.model.tokenizer(
        text, truncation=True, max_length=limit, return_offsets_mapping=True, return_tensors="pt"
    )
    places = tokens.pop("offset_mapping")[0].tolist()
    states = encoder.model[0](dict(tokens))["token_embeddings"][0]
    middles, means = [(first + last) / 2 for first, last in places], []
    members = [[] for _ in ends]
    for token, (first, last) in enumerate(places):
        if last > first and middles[token] > start:
            members[next((n for n, end in enumerate(ends) if middles[token] <= end), len(ends) - 1)].append(token)
    for before, end, span_tokens in zip([start, *ends], ends, members, strict=False):
        nearest = min(range(len(places)), key=lambda token: abs(middles[token] - (before + end) / 2))
        means.append(states[span_tokens or [nearest]].mean(dim=0))
    return torch.stack(means)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts_and_spans=texts_with_spans(), batch_tokens=st.sampled_from([1, 40, 150, 10_000]))
def test_spans_equal_plain_means(texts_and_spans, batch_tokens, processor):
    """Embeddings of spans equal plain means for any batch size, also of cut texts and spans without a token."""
    encoder, (texts, starts, ends) = processor.encoder, texts_and_spans
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(encoder_arcaligner, "CPU_TOKENS", batch_tokens)
        embeds = encoder.encode_spans(texts, starts, ends)
        expected = [plain_means(encoder, *text_and_spans) for text_and_spans in zip(texts, starts, ends, strict=True)]
    torch.testing.assert_close(embeds, normalize(torch.cat(expected), dim=-1), rtol=0, atol=2e-6)


def test_tokens_of_two_texts():
    """A token across two spans belongs to one of them, and a token whose middle is where spans begin to none; a span
    after the last token gets that token."""
    offsets = np.array([[0, 0], [0, 2], [2, 3], [3, 5], [5, 6], [0, 0], [0, 3], [0, 0]])
    ends, counts = np.array([3, 4, 7, 20, 3]), np.array([4, 1])
    tokens, spans = _span_tokens(offsets, np.array([6, 2]), np.array([1, 0]), ends, counts)
    assert sorted(zip(spans.tolist(), tokens.tolist(), strict=True)) == [(0, 2), (1, 3), (2, 4), (3, 4), (4, 6)]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    batch_tokens=st.integers(1, 200),
    batch_padding=st.none() | st.integers(0, 40),
)
def test_batches_are_bounded_by_tokens(lengths, batch_tokens, batch_padding):
    """Batches have at most so many tokens, with padding, and so much padding, and are as large as possible; only a
    single long text exceeds the limit."""
    lengths, tokens = np.array(lengths), np.arange(sum(lengths))
    tokenizer = EncoderTokenizer(type("Tokenizer", (), {"pad_token_id": -5}), "", None, batch_tokens, batch_padding)
    inputs = tokenizer.batched(tokens, lengths, tokens, tokens, len(tokens))
    assert sum(count for count, _, _ in inputs.batches) == len(lengths)
    assert all(count == 1 or count * longest <= batch_tokens for count, longest, _ in inputs.batches)
    counts = [count for count, _, _ in inputs.batches]
    in_order, most_padding = np.sort(lengths), sum(lengths) * len(lengths) if batch_padding is None else batch_padding
    for count, end in zip(counts, np.cumsum(counts), strict=True):
        assert count * in_order[end - 1] - in_order[end - count : end].sum() <= most_padding
        if end < len(lengths):
            padded = (count + 1) * in_order[end]
            assert padded > batch_tokens or padded - in_order[end - count : end + 1].sum() > most_padding
    ids = inputs.input_ids.split([count * longest for count, longest, _ in inputs.batches])
    numbers = [number for _, _, number in inputs.batches]
    reads = zip(ids, inputs.tokens.split(numbers), inputs.slots.split(numbers), strict=True)
    for batch_ids, places, slots in reads:  # each token is at the place of its slot
        assert torch.equal(batch_ids[places], slots)
    assert sorted(inputs.input_ids[inputs.input_ids >= 0].tolist()) == tokens.tolist()


def test_the_tokenizer_goes_to_workers(processor):
    """The tokenizer can be pickled, as data loaders do if processes are not forked."""
    tokenizer = processor.encoder.text_tokenizer
    sent = pickle.loads(pickle.dumps(tokenizer))
    inputs, expected = (tokenize(["Ada wrote it.", "No."], [0, 0], [[3, 13], [3]]) for tokenize in (sent, tokenizer))
    assert torch.equal(inputs.input_ids, expected.input_ids) and inputs.batches == expected.batches


def test_inputs_move_as_flat_tensors(processor):
    inputs = processor.encoder.text_tokenizer(["Ada wrote it.", "No."], [0, 0], [[3, 13], [3]])
    moved = inputs.to("meta", non_blocking=True)
    for name in ("input_ids", "lengths", "tokens", "slots"):
        assert getattr(moved, name).is_meta and getattr(moved, name).dim() == 1
    assert (moved.batches, moved.num_slots, moved.of_tokens) == (inputs.batches, 3, True)


def test_gradients_ignore_batch_sizes(checkpoint_dir, monkeypatch):
    texts, starts, ends = ["Ada wrote it.", "No.", "Radik jumps far."], [0, 0, 6], [[3, 13], [3], [10, 16]]
    gradients = []
    for batch_tokens in (1, 10_000):
        monkeypatch.setattr(encoder_arcaligner, "CPU_TOKENS", batch_tokens)
        processor = ArcAlignerProcessor.from_pretrained(checkpoint_dir)
        weights = processor.train_encoder(lora_r=2)
        for weight in weights:
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
        embeds = processor.encoder.encode_spans(texts, starts, ends)
        (embeds * torch.linspace(0, 1, embeds.numel()).view_as(embeds)).sum().backward()
        gradients.append([weight.grad for weight in weights])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients[0])
