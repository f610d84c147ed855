"""The pictures: each is what its chapter would draw today, small, and legible where a README is."""

import importlib.util

import pytest
from harness import ROOT, chapter
from matplotlib.figure import Figure
from PIL import Image

FOLDER = ROOT / "figures"
spec = importlib.util.spec_from_file_location("figures_make", FOLDER / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

SLOW = {"07_5d", "04_pp_schedules"}  # sixteen ranks; a thousand bars
each = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in make.PICTURES]
)
WHITE = {(255, 255, 255, 255)}


def corners(picture):
    """The colours of a picture's four corners; transparent ones would be lost on a dark page."""
    at = [(x, y) for x in (0, picture.width - 1) for y in (0, picture.height - 1)]
    return {picture.convert("RGBA").getpixel(xy) for xy in at}


@each
def test_a_picture_is_what_would_be_drawn_today(name, tmp_path):
    committed, drawn = FOLDER / f"{name}.png", tmp_path / f"{name}.png"
    data = make.PICTURES[name](drawn)
    with Image.open(committed) as old, Image.open(drawn) as new:
        assert old.size == new.size and corners(new) == WHITE
        assert new.text["Data"] == make.fingerprint(data)
        assert old.text["Data"] == new.text["Data"], f"run: python figures/make.py {name}"


def test_pictures_are_those_that_are_made():
    assert {path.stem for path in FOLDER.glob("*.png")} == {*make.PICTURES, *make.MEASURED}
    assert len(make.PICTURES) + len(make.MEASURED) <= 10


@pytest.mark.parametrize("name", make.PICTURES)
def test_a_picture_is_small_as_wide_as_a_readme_and_on_white(name):
    path = FOLDER / f"{name}.png"
    assert path.stat().st_size < 200_000
    with Image.open(path) as picture:
        assert picture.width == 900 and corners(picture) == WHITE


def one_bar(path, height=2.0, word="a"):
    """A picture of a bar and a word."""
    figure = Figure(figsize=(2, 2))
    axes = figure.subplots()
    axes.bar([0], [height])
    axes.plot([0, 1], [0, 1])
    axes.set_title(word)
    with make.recorded(path) as data:
        figure.savefig(path)
    return data


def test_data_changes_with_a_bar_or_a_word_and_with_nothing_else(tmp_path):
    same, again = (one_bar(tmp_path / "a.png") for _ in range(2))
    assert same == again and len(same) > 2
    changed = [one_bar(tmp_path / "b.png", height=2.001), one_bar(tmp_path / "c.png", word="b")]
    assert len({make.fingerprint(data) for data in (same, *changed)}) == 3


def test_sorted_numbers_as_spans():
    assert make.spans([0, 1, 4]) == "0-1, 4"
    assert make.spans([3]) == "3"
    assert make.spans([0, 1, 2, 3]) == "0-3"


def test_zero_s_numbers_are_those_of_its_formulas(tmp_path):
    """What memory_math draws beside the formulas: 2 bytes of weights and of gradients and 12 of
    optimizer state a parameter, each cut from its stage on; sent in P (n-1)/n."""
    cut = lambda size, stage, first, n: size / n if stage >= first else size
    each = lambda s, n: cut(2, s, 3, n) + cut(2, s, 2, n) + cut(12, s, 1, n)
    words = [x for x in make.draw_zero(tmp_path / "zero.png") if isinstance(x, str)]
    held = [f"{each(s, n):.3g}" for s in range(4) for n in (8, 64)]
    sent = [f"{calls:.3g}" for m in (1, 4) for calls in (2, 2, m + 1, 3 * m)]
    shown = [word for word in words if word.replace(".", "").isdigit()]
    labels = iter(shown)
    assert all(number in labels for number in held + sent), shown


@pytest.mark.slow
def test_each_axis_of_the_grid_is_shown_cut_and_carrying():
    five = chapter("07_5d")
    found = make.on_ranks(make.grid_of_07, five.options(["--timeout", "120"]))
    assert all(found["sent"][axis] > 0 for axis in make.AXES)
    for axis, rows in found["groups"].items():
        for ranks in rows:  # one along an axis, the ranks of a group hold all of what it splits
            parts = [found["holds"][rank][axis] for rank in ranks]
            together = sorted(part for mine, _ in parts for part in mine)
            assert together == list(range(parts[0][1])), (axis, ranks)


def test_a_rank_that_fails_is_an_error(capfd):
    five = chapter("07_5d")
    args = five.options(["--pp", "1", "--dp", "2", "--cp", "1", "--tp", "1"])
    with pytest.raises(RuntimeError, match="fails: a rank failed"):
        make.on_ranks(fails, args)
    capfd.readouterr()


def fails(args, device):
    raise ValueError("on purpose")
