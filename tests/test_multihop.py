"""The multi-hop head: what it computes, how many passages a question gets, and how checkpoints store it."""

import itertools
import json
import math
import time
from unittest import mock

import pytest
import torch
from conftest import edit_json, pipeline_of
from safetensors.torch import load_file, save_file
from tiny_models import backbone_config, random_head, tiny_aligner

from arcaligner import ArcAlignerConfig, ArcAlignerForCausalLM, answering_arcaligner, multihop_arcaligner
from arcaligner.answering_arcaligner import (
    Answerer,
    ScoredPassage,
    question_features,
    similarities_of,
    top_odds,
    word_matches,
)
from arcaligner.modeling_arcaligner import ArcAlignerModel, MultihopHead
from arcaligner.multihop_arcaligner import PassageWords, best_pair, combined_passages, match_gain, pair_features

QUESTION = "Who wrote it?"
PASSAGES = ["It was written by Ada.", "The loom wove. It was loud.", "Nobody read it.", "The pen is new."]
TOKENS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def answerer(separate):
    """An `Answerer` whose head takes every question for a multi-hop question."""
    model, processor = separate
    give_multihop_head(model, is_found=True)
    return Answerer(model, processor, model.passage_cache(processor))


def give_multihop_head(model, is_found):
    model.set_multihop_head(True)
    model.multihop_head.bias.fill_(1.0 if is_found else -1.0)


def selected(answerer, questions, documents, max_passages=None):
    return [list(selection.numbers) for selection in answerer.select(questions, documents, max_passages)]


# What it computes


def test_head_is_a_regression():
    """The inputs are the embedding, the logarithm of the number of words, the log-odds of the answerability, and the
    gain of a second passage."""
    head, generator = MultihopHead(3), torch.Generator().manual_seed(0)
    vectors, num_words = torch.randn(3, 3, generator=generator), torch.tensor([5.0, 1.0, 0.0])
    answerable, gains = torch.tensor([0.5, -6.0, 6.0]), torch.tensor([0.0, 0.1, 0.2])
    head.weight.copy_(torch.randn(6, generator=generator))
    head.bias.fill_(0.25)
    others = torch.stack([torch.tensor([math.log(5), 0.0, 0.0]), answerable, gains], dim=1)
    expected = (vectors * head.weight[:3]).sum(dim=1) + (others * head.weight[3:]).sum(dim=1) + 0.25
    torch.testing.assert_close(head(vectors, num_words, answerable, gains), expected)


def test_odds_are_bounded():
    """The log-odds of the top-ranked passage are bounded; the rank also depends on the cosine."""
    scores = [
        {0: ScoredPassage(0.5, 0.0, False, 10.0), 1: ScoredPassage(0.25, 0.5, False, 10.0)},
        {3: ScoredPassage(0.0, 0.0, False, 10.0)},
        {2: ScoredPassage(1.0, 0.0, False, 10.0)},
    ]
    expected = torch.tensor([math.log(0.25 / 0.75), -6.0, 6.0], dtype=torch.float64)
    torch.testing.assert_close(top_odds(scores), expected)


def test_features_are_of_the_question(processor):
    """The features of a chat are those of its last question, computed by the base encoder."""
    chat = [
        {"role": "user", "content": "Who was it?"},
        {"role": "assistant", "content": "Ada."},
        {"role": "user", "content": QUESTION},
    ]
    vectors, num_words = question_features(processor.encoder, [QUESTION, chat, "When?"])
    assert vectors.shape == (3, processor.encoder_hidden_size) and num_words.tolist() == [3.0, 3.0, 1.0]
    expected = processor.encoder.untrained.encode([QUESTION, QUESTION, "When?"])
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[0], vectors[2])


def test_gain_is_of_the_best_pair():
    """The gain is the score of the best pair less that of the best single passage; passages without words do not
    count."""
    matches = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [0.75, 0.75, 0.0], [math.nan] * 3])
    assert match_gain(matches) == pytest.approx((1 + 1 + 0.5) / 3 - 1.5 / 3)
    assert match_gain(matches[:1]) == match_gain(matches[3:]) == match_gain(torch.zeros(2, 0)) == 0.0


# Which two passages are a pair

COMMON = frozenset({"the", "of", "in", "was", "a", "he"})
FILM = {"title": "Casablanca (film)", "text": "The film of 1942 was directed by Michael Curtiz in Hollywood."}
CURTIZ = {"title": "Michael Curtiz", "text": "He was born in Budapest, left for Hollywood in 1926."}
ROME = {"title": "Rome", "text": "The city was founded by Romulus."}
ASKED = "Where was the director of the film Casablanca born?"


def test_words_of_a_passage():
    """A title does not include its brackets; without a title, names at the beginning of the text replace it."""
    words = PassageWords.of(FILM, COMMON)
    assert words.title == {"casablanca"}
    assert words.all == {"casablanca", "film", "1942", "directed", "by", "michael", "curtiz", "hollywood"}
    assert words.names == {"casablanca", "1942", "michael", "curtiz", "hollywood"}
    assert PassageWords.of(FILM["text"], COMMON).title == {"1942", "michael", "curtiz"}
    assert PassageWords.of("...", COMMON) == (frozenset(),) * 3


def test_features_of_pairs(processor, monkeypatch):
    monkeypatch.setattr(multihop_arcaligner, "stop_words", lambda spacy_model: COMMON | {"where"})
    log_odds = {0: 1.5, 1: -0.5, 2: 0.25}
    matches = {0: torch.tensor([0.5, 1.0]), 1: torch.tensor([0.75, 0.25]), 2: torch.tensor([math.nan, math.nan])}
    features = pair_features(ASKED, [FILM, CURTIZ, ROME], log_odds, matches, [(0, 1), (0, 2), (1, 2)], "en")
    # Of the four words of the question, the film has two and Curtiz has "born". The film has five names and so has
    # Curtiz; they share "hollywood", "michael" and "curtiz".
    expected = [
        [1.0, 3 / 4, 1.0, 3 / math.sqrt(5 * 5), 1.0, 1.0, 0.875, 1.25],
        [1.75, 2 / 4, 1.0, 0.0, 0.0, 1.0, 0.75, 0.75],
        [-0.25, 1 / 4, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
    ]
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64))


def test_compared_names_are_no_mention(processor):
    """If a question compares two names, a third passage that mentions both does not join the pair."""
    bogart = {"title": "Humphrey Bogart", "text": "He was an American actor, born in New York City in 1899."}
    film = {"title": "Casablanca", "text": "Directed by Michael Curtiz, with Humphrey Bogart."}
    pairs, question = [(0, 1), (0, 2), (1, 2)], "Who is older, Humphrey Bogart or Michael Curtiz?"
    log_odds, passages = dict.fromkeys(range(3), 0.0), [bogart, CURTIZ, film]
    features = pair_features(question, passages, log_odds, no_matches(3), pairs, "en")
    assert features[:, 2].tolist() == [1.0, 1.0, 1.0] and features[:, 5].tolist() == [2, 1, 1]
    assert features[:, 4].eq(0).all()


def no_matches(num_passages):
    """Late-interaction scores of passages for a question without words."""
    return dict.fromkeys(range(num_passages), torch.zeros(0))


def test_pair_has_the_words_of_the_question():
    """The pair is the two passages that together match the words of the question, not those that match most of it."""
    head, passages = MultihopHead(3), ["One.", "Two.", "Three."]
    head.pair.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    matches = {0: torch.tensor([1.0, 1.0, 0.0]), 1: torch.tensor([1.0, 1.0, 0.1]), 2: torch.tensor([0.0, 0.0, 1.0])}
    assert best_pair(head, "Who?", passages, dict.fromkeys(range(3), 0.0), matches, "en") == [0, 2]


def test_neutral_pair_is_top_ranked():
    """Before the head is fitted, the pair is the two passages with the highest log-odds."""
    head, passages = MultihopHead(3), ["One.", "Two.", "Three.", "Four."]
    assert best_pair(head, "Who?", passages, {0: -1.0, 1: 3.0, 2: 0.5, 3: 2.0}, no_matches(4), "en") == [1, 3]


def test_names_lead_to_the_pair():
    """The pair is the two passages linked by names, in any order of the passages."""
    head = MultihopHead(3)
    head.pair.copy_(torch.tensor([0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    for order in itertools.permutations([FILM, CURTIZ, ROME]):
        pair = best_pair(head, ASKED, order, {0: 1.0, 1: 1.0, 2: 1.0}, no_matches(3), "en")
        assert {order[number]["title"] for number in pair} == {FILM["title"], CURTIZ["title"]}


def test_copies_are_no_pair():
    """Of passages with equal text only the top-ranked one can be in a pair."""
    copy = {**FILM, "text": FILM["text"] + " "}
    assert combined_passages([FILM, copy, CURTIZ, ROME], {0: 1.0, 1: 2.0, 2: 0.0, 3: -1.0}) == [1, 2, 3]
    assert combined_passages([FILM, copy], {0: 1.0, 1: 2.0}) == [1]
    assert best_pair(MultihopHead(3), ASKED, [FILM, copy], {0: 1.0, 1: 2.0}, {1: torch.zeros(0)}, "en") == [1]


def test_pairs_are_ranked_exactly():
    """Close scores are ranked correctly under autocast, and if the head is in bfloat16."""
    head, odds = MultihopHead(3).to(torch.bfloat16), {0: 10.0, 1: 10.02, 2: 10.03}
    with torch.autocast("cpu", torch.bfloat16):
        assert best_pair(head, "Who?", ["One.", "Two.", "Three."], odds, no_matches(3), "en") == [1, 2]


def test_long_titles_are_read_fast():
    start = time.perf_counter()
    PassageWords.of({"title": "(" * 50_000, "text": "Ada."}, COMMON)
    assert time.perf_counter() - start < 1


def test_few_passages_are_combined(monkeypatch):
    """If there are very many passages, only the top-ranked ones can form a pair."""
    monkeypatch.setattr(multihop_arcaligner, "MAX_COMBINED", 2)
    assert combined_passages([FILM, CURTIZ, ROME], {0: 1.0, 1: -1.0, 2: 0.0}) == [0, 2]


# How many passages a question gets


@pytest.mark.parametrize("is_found, expected", [(True, 2), (False, 1)])
def test_multihop_question_gets_two(answerer, is_found, expected):
    give_multihop_head(answerer.model, is_found)
    (numbers,) = selected(answerer, [QUESTION], [PASSAGES])
    assert numbers == selected(answerer, [QUESTION], [PASSAGES], expected)[0] and len(numbers) == expected


def test_pair_is_selected(answerer):
    """The pair is selected from all passages, and the prompt has these two."""
    head, passages = answerer.model.multihop_head, [ROME, CURTIZ, "Nobody read it.", FILM]
    head.pair.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    (selection,) = answerer.select([ASKED], [passages])
    assert selection.numbers == [1, 3] and sorted(selection.scores) == [0, 1, 2, 3]
    (ids,) = answerer.cache.prepare_batch(selection.batch)["input_ids"]
    (expected,) = answerer.cache.prepare([ASKED], [[CURTIZ, FILM]])["input_ids"]
    assert torch.equal(ids, expected)


def test_pair_comes_first(answerer):
    """With a `max_passages` of several, the pair is among them, and attention to the others has a bias. The pair alone,
    and copies of one passage, have none."""
    head, passages = answerer.model.multihop_head, [ROME, CURTIZ, "Nobody read it.", FILM]
    head.pair.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    for most, expected in ((2, None), (4, [-1.0, 0.0, -1.0, 0.0])):
        (selection,) = answerer.select([ASKED], [passages], most)
        assert {1, 3} <= set(selection.numbers) and len(selection.numbers) == most
        assert selection.prior == expected
    (selection,) = answerer.select([ASKED], [[ROME] * 3], 3)
    assert selection.numbers == [0, 1, 2] and selection.prior is None


def test_questions_get_different_numbers(answerer):
    """Each question of a batch gets one or two passages by its own features."""
    vectors, _ = question_features(answerer.processor.encoder, [QUESTION, "When?"])
    head, towards = answerer.model.multihop_head, vectors[0] - vectors[1]
    head.bias.fill_(-0.5 * float(towards @ (vectors[0] + vectors[1])))
    head.weight[: len(towards)] = towards
    selections = selected(answerer, [QUESTION, "When?", QUESTION], [PASSAGES] * 3)
    assert [len(numbers) for numbers in selections] == [2, 1, 2]
    assert selections == [selected(answerer, [question], [PASSAGES])[0] for question in (QUESTION, "When?", QUESTION)]


def test_question_of_two_passages_gets_both(answerer):
    """A question gets one passage or two depending on what the second one adds to the words of the first, even if the
    late interaction does not rank passages."""
    question, passages = "Which mill ground while Ada wrote?", ["The mill ground.", "Ada wrote it.", "It is new."]
    gain = match_gain(word_matches(answerer.processor, question, passages))
    assert gain > 0
    answerer.model.config.match_weight = 0.0
    head = answerer.model.multihop_head
    head.weight[-1] = 1.0
    for bias, expected in ((-gain + 0.01, 2), (-gain - 0.01, 1)):
        head.bias.fill_(bias)
        assert len(selected(answerer, [question], [passages])[0]) == expected
    head.bias.fill_(-1e-6)
    assert len(selected(answerer, [question], [["The mill ground.", "the mill ground."]])[0]) == 1  # nothing is added


def test_gains_are_of_their_questions(answerer):
    """In a batch each question has the gain of its own passages, and a limit of one passage prevents a second one."""
    question, passages = "Which mill ground while Ada wrote?", ["The mill ground.", "Ada wrote it.", "It is new."]
    alike = ["The mill ground.", "the mill ground."]
    head = answerer.model.multihop_head
    head.weight[-1] = 1.0
    head.bias.fill_(-0.5 * match_gain(word_matches(answerer.processor, question, passages)))
    documents = [passages, alike, passages]
    assert list(map(len, selected(answerer, [question] * 3, documents))) == [2, 1, 2]
    assert list(map(len, selected(answerer, [question] * 2, documents[1:]))) == [1, 2]
    assert list(map(len, selected(answerer, [question] * 3, documents, [None, None, 1]))) == [2, 1, 1]


def test_gain_is_of_the_nearest_passages(answerer, monkeypatch):
    """The gain counts the most similar passages only, each text once."""
    monkeypatch.setattr(answering_arcaligner, "MATCHED_PASSAGES", 2)
    answerer.model.multihop_head.weight[-1] = 1.0
    passages = ["The mill ground.", "The  mill ground.", "It is new.", "Ada wrote it."]
    similar = [{0: 0.9, 1: 0.8, 2: 0.7, 3: 0.6}]
    compared = mock.Mock(side_effect=word_matches)
    monkeypatch.setattr(answering_arcaligner, "word_matches", compared)
    answerer.model.multihop_head.bias.fill_(-10.0)
    answerer.select([QUESTION], [passages], similarities=similar)
    texts = [passage for call in compared.call_args_list for passage in call.args[2]]
    assert texts == ["The mill ground.", "It is new."]


def test_pair_has_its_own_matches(answerer):
    """The pair is that of the passages whose words match, behind copies and a passage without words."""
    head = answerer.model.multihop_head
    head.pair.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    passages = ["It is new.", "It is new.", "...", "Ada wrote it.", "Nobody read it.", "The mill ground."]
    assert selected(answerer, ["Which mill ground while Ada wrote?"], [passages]) == [[3, 5]]


def test_answerable_question_gets_one(answerer):
    """A question gets one passage or two depending on the answerability of the top-ranked one."""
    (scores,) = answerer.score([QUESTION], [PASSAGES])
    best = max(scores.values(), key=lambda score: score.log_odds)
    odds = math.log(best.answerability / (1 - best.answerability))
    head = answerer.model.multihop_head
    head.weight[-2] = -1.0
    for bias, expected in ((odds + 0.01, 2), (odds - 0.01, 1)):
        head.bias.fill_(bias)
        assert len(selected(answerer, [QUESTION], [PASSAGES])[0]) == expected


def test_max_passages_per_row(answerer):
    """In a batch, `max_passages` can be set for some rows; the others use the default."""
    selections = selected(answerer, [QUESTION] * 3, [PASSAGES] * 3, [1, None, 3])
    assert [len(numbers) for numbers in selections] == [1, 2, 3]
    assert selected(answerer, [QUESTION], [PASSAGES[:1]]) == [[0]]


def test_one_text_is_no_pair(answerer):
    """Passages without a text are never used."""
    assert selected(answerer, [QUESTION], [[" ", "Ada wrote it.", ""]]) == [[1]]


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_no_passage_is_scored_twice(answerer, monkeypatch, limit):
    """No passage is scored twice for a multi-hop question, and only few are scored for another question."""
    monkeypatch.setattr(answerer.model.config, "most_answerability", limit)
    score, scored = answerer._score, []

    def recorded(batch, similarities, only):
        scored.extend(number for numbers in only for number in numbers)
        return score(batch, similarities, only)

    monkeypatch.setattr(answerer, "_score", recorded)
    (selection,) = answerer.select([QUESTION], [PASSAGES])
    assert sorted(scored) == sorted(selection.scores) == [0, 1, 2, 3]
    give_multihop_head(answerer.model, is_found=False)
    (selection,) = answerer.select([QUESTION], [PASSAGES])
    assert len(selection.scores) == (1 if limit == 0.0 else 2)


@pytest.mark.parametrize("number, expected", [(12, 12), (20, 20), (24, 20), (44, 22)])
def test_pair_candidates(answerer, number, expected):
    """Pairs are formed from the twenty most similar passages, or from the more similar half if that is more."""
    texts = [f"Passage {'more ' * place}text." for place in range(number)]
    (selection,) = answerer.select([QUESTION], [texts])
    similar = similarities_of(answerer.processor.encoder, QUESTION, texts)
    nearest = sorted(range(number), key=similar.__getitem__, reverse=True)[:expected]
    assert sorted(selection.scores) == sorted(nearest)


def test_pipeline_uses_two(answerer):
    """The pipeline gives the answer and the segments of two passages, and the scores of all."""
    ask = pipeline_of(answerer.model, answerer.processor, return_slots=True, **TOKENS)
    row = {"question": QUESTION, "documents": PASSAGES}
    (record,), (expected,) = ask(row), ask(row, max_passages=2)
    assert record["segments"] == expected["segments"] and record["generated_text"] == expected["generated_text"]
    assert len({segment["document"] for segment in record["segments"]}) == 2
    assert [*record["statistics"]["passage_answerabilities"]] == [0, 1, 2, 3]
    give_multihop_head(answerer.model, is_found=False)
    assert ask(row)[0]["segments"] == ask(row, max_passages=1)[0]["segments"] != record["segments"]


def test_cached_passages_stay_valid(answerer):
    """A new multi-hop head does not invalidate cached passages."""
    answerer.score([QUESTION], [PASSAGES])
    give_multihop_head(answerer.model, is_found=True)
    (selection,) = answerer.select([QUESTION], [PASSAGES])
    assert all(score.is_cached for score in selection.scores.values())


# Checkpoints


@pytest.fixture
def saved(model, checkpoint_dir, tmp_path):
    """A checkpoint with both heads, of an aligner around a base model."""
    random_head(model)
    random_multihop_head(model, seed=4)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def random_multihop_head(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model.set_multihop_head(True)
    for buffer in model.multihop_head.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))


def same_heads(loaded, expected):
    weights, others = (model.multihop_head.state_dict() for model in (loaded, expected))
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_saved_head_loads_in_float32(saved, model, dtype):
    loaded = ArcAlignerForCausalLM.from_pretrained(saved, dtype=dtype)
    assert loaded.config.use_multihop_head and same_heads(loaded, model)
    assert {buffer.dtype for buffer in loaded.multihop_head.buffers()} == {torch.float32}
    assert not any("multihop_head" in name for name, _ in loaded.aligner_parameters())


def test_bare_model_loads_without_head(saved, caplog):
    ArcAlignerModel.from_pretrained(saved)
    assert "multihop" not in caplog.text


def test_head_is_replaced_in_place(saved, model):
    """The head in a checkpoint is replaced, and nothing else changes."""
    before = load_file(saved / "model.safetensors"), json.loads((saved / "config.json").read_text())
    random_multihop_head(model, seed=3)
    model.save_heads(saved)
    weights, config = load_file(saved / "model.safetensors"), json.loads((saved / "config.json").read_text())
    assert same_heads(ArcAlignerForCausalLM.from_pretrained(saved), model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in before[0].items() if "multihop" not in name)
    assert {name for name in config if config[name] != before[1][name]} == {"digests"}
    model.set_multihop_head(False)
    model.save_heads(saved)
    assert ArcAlignerForCausalLM.from_pretrained(saved).multihop_head is None


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if "multihop_head.weight" not in name}


def former_head(tensors):
    """The head of an earlier version, which had fewer features."""
    pair = {"multihop_head.pair": tensors["multihop_head.pair"][:6].clone()}
    return tensors | pair | {"multihop_head.weight": tensors["multihop_head.weight"][:-1].clone()}


def another_head(tensors):
    return tensors | {"multihop_head.bias": tensors["multihop_head.bias"] + 1}


@pytest.mark.parametrize(
    "change, settings, message",
    [
        (without_head, {}, "lacks 1 of the .* aligner weights .* first `multihop_head.weight`"),
        (another_head, {}, "do not match their digest"),
        (
            former_head,
            {},
            "`multihop_head.pair` has shape .6. in the checkpoint .* `ignore_mismatched_sizes=True`, save it, and fit "
            "the head again with `python -m arcaligner.train.multihop`",
        ),
        (
            dict,
            {"use_multihop_head": False},
            "has 3 aligner weights that a model .* does not have.* `use_multihop_head`",
        ),
        (dict, {"use_multihop_head": 1}, "'use_multihop_head' expected bool, got int .value: 1"),
    ],
)
def test_mismatched_head_is_refused(saved, change, settings, message):
    save_file(change(load_file(saved / "model.safetensors")), saved / "model.safetensors", {"format": "pt"})
    edit_json(saved / "config.json", **settings)
    with pytest.raises(ValueError, match=message):
        ArcAlignerForCausalLM.from_pretrained(saved)


def test_answerability_is_required():
    with pytest.raises(ValueError, match="`use_multihop_head` is true, but `answerability_layers` is None"):
        ArcAlignerConfig(text_config=backbone_config("llama"), use_multihop_head=True)
    with pytest.raises(ValueError, match="the multi-hop head, .*, needs an answerability head"):
        tiny_aligner("llama").set_multihop_head(True)


def test_new_answerability_head_removes_it():
    """A new answerability head removes the multi-hop head, which was fitted to the former one."""
    model = tiny_aligner("llama", answerability_layers=[0], use_multihop_head=True)
    assert model.multihop_head.weight.eq(0).all() and model.multihop_head.pair.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    model.set_answerability_layers([1])
    assert model.multihop_head is None and model.config.use_multihop_head is False


def test_neutral_head_changes_nothing(separate):
    """Before the head is fitted, every question gets one passage."""
    model, processor = separate
    model.set_multihop_head(True)
    assert len(selected(Answerer(model, processor), [QUESTION], [PASSAGES])[0]) == 1
