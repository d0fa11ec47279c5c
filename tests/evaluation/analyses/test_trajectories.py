"""A trajectory's figure shows what the pipeline returns of a question, slot by slot and layer by layer."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import chat_inputs

from arcaligner import ArcAlignerPipeline
from arcaligner.evaluation.analyses import trajectories as module
from arcaligner.evaluation.analyses.figures import save_analysis
from arcaligner.evaluation.analyses.trajectories import draw, file_name, title, trace, trajectories
from arcaligner.files import read_json_lines

CASES = list(read_json_lines(module.CASE_STUDIES))


@pytest.fixture
def ask(model, processor) -> ArcAlignerPipeline:
    return ArcAlignerPipeline(model=model, processor=processor, task="text-generation", device="cpu")


def test_colors_are_the_loops_of_each_slot_at_each_layer(ask):
    row = CASES[0]
    case = trace(ask, row)
    inputs = chat_inputs(ask.processor, row["question"], row["passages"])
    loops = ask.model(**inputs).recursion_depth[0].numpy().T + 1  # (num_slots, num_layers)
    figure = draw(case, max_loops=3)
    axes, bar = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), loops)
    assert axes.images[0].get_clim() == (0.5, 3.5)
    assert len(set(loops.flat)) > 1
    notation = {1: "L0.", 2: "LL", 3: "LLL"}
    assert case["trajectories"] == [[notation[each] for each in layer] for layer in loops.T.tolist()]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["L0.", "LL", "LLL"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[2] == "It was located in the city of Toronto in the province of …"
    assert len(labels) == len(case["segments"]) == len(loops)
    assert axes.get_title(loc="left") == title(case)


def test_the_command_draws_the_cases_of_the_paper(ask, checkpoint_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "read_json_lines", lambda path: CASES[1:2])
    trajectories(checkpoint=str(checkpoint_dir), folder=tmp_path)
    name = "trajectory_what_sport_does_radik_zhaparov_play"
    assert file_name(CASES[1]["question"]) == name and len(CASES) == 3
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{suffix}" for suffix in ("png", "svg", "json")}
    data = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    asked = {"question": CASES[1]["question"], "documents": CASES[1]["passages"]}
    record = ask(asked, return_slots=True, max_new_tokens=32)[0]
    assert data["answer"] == record["generated_text"].strip() and data["gold"] == ["ski jumping"]
    assert data["segments"] == record["segments"] and data["trajectories"] == record["trajectories"]
    assert "each column a layer" in data["reading"]


def test_the_title_has_the_answer_and_the_gold_where_it_is_known():
    case = {"question": "Who wrote it?", "answer": "Ada", "gold": ["Ada", "Ada L."]}
    assert title(case) == "Who wrote it?\nanswer: Ada\ngold: Ada / Ada L."
    assert title(case | {"gold": []}) == "Who wrote it?\nanswer: Ada"


def test_dollar_signs_control_characters_and_an_empty_document_can_be_drawn(tmp_path):
    case = {
        "question": "Is it $5^ or $6_?",
        "answer": "$_{\x0e\x00",
        "gold": [],
        "segments": [],
        "trajectories": [["L0."]],
    }
    save_analysis(tmp_path, "own", draw(case, max_loops=1), case, "")
    priced = case | {"segments": [{"text": "From $5^ to $6_."}], "trajectories": [["LL"], ["L0."]]}
    save_analysis(tmp_path, "priced", draw(priced, max_loops=2), priced, "")
    for name in ("own", "priced"):
        picture = ElementTree.parse(tmp_path / f"{name}.svg").getroot()  # well-formed
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
