"""Bars stand in their group, as high as their mean, in one color per title."""

import pytest
from matplotlib.colors import to_hex

from arcaligner.evaluation.analyses.figures import draw_panels

PANELS = {
    "SQuAD": {"TT": {"ours": [50.0, 40.0, 70.0], "theirs": [20.0, 20.0, 20.0]}, "TF": {"theirs": [10.0, 0.0, 30.0]}},
    "NaturalQA": {"TT": {}, "TF": {"theirs": [5.0, 4.0, 6.0]}},
    "HotpotQA": {"TT": {}, "TF": {}},
}


@pytest.fixture
def figure():
    return draw_panels(PANELS, "right, %")


def test_bars_stand_side_by_side_in_their_group_and_a_missing_one_leaves_a_gap(figure):
    first, second, third, _ = figure.axes
    found = [
        (round(bar.get_x() + bar.get_width() / 2, 6), bar.get_height(), to_hex(bar.get_facecolor()).upper())
        for bar in sorted(first.patches, key=lambda bar: bar.get_x())
    ]
    assert found == [(-0.2, 50.0, "#0072B2"), (0.2, 20.0, "#E69F00"), (1.2, 10.0, "#E69F00")]
    (bar,) = second.patches
    assert to_hex(bar.get_facecolor()).upper() == "#E69F00"  # as in the first panel
    assert not third.patches
    assert [label.get_text() for label in third.get_xticklabels()] == ["TT", "TF"]


def test_an_interval_reaches_from_its_low_to_its_high_end(figure):
    reaches = [path.vertices[:, 1].tolist() for path in figure.axes[0].collections[0].get_paths()]
    assert reaches == [[40.0, 70.0]]
