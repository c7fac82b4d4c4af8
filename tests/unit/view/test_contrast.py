"""The colours of the page can be told apart, in light and in dark."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STYLE = files("gradus.view").joinpath("page/style.css").read_text()
THEMES = {"light": r":root\{(.*?)\}", "dark": r":root\[data-theme=dark\]\{(.*?)\}"}
TEXT, GROUNDS = ("ink", "soft", "good", "bad", "wait", "accent"), ("bg", "card", "code")
PAIRS = [
    *((text, ground, 4.5) for text in TEXT for ground in GROUNDS),
    *((f"c{line}", ground, 3.0) for line in range(8) for ground in GROUNDS[:2]),
    *(("onlp", f"lp{step}", 4.5) for step in range(1, 6)),
]


def luminance(colour: str) -> float:
    """Of `#rrggbb` or `#rgb`, as WCAG 2 defines it."""
    digits = colour.removeprefix("#")
    whole = "".join(2 * it for it in digits) if len(digits) == 3 else digits
    parts = [int(whole[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (
        ((it + 0.055) / 1.055) ** 2.4 if it > 0.03928 else it / 12.92 for it in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", THEMES)
def test_texts_and_lines_stand_out_from_what_is_behind_them(theme: str) -> None:
    found = re.search(THEMES[theme], STYLE, re.DOTALL)
    assert found is not None
    colours = dict(re.findall(r"--(\w+):(#\w+)", found[1]))
    for one, other, least in PAIRS:
        dark, light = sorted(luminance(colours[name]) for name in (one, other))
        assert (light + 0.05) / (dark + 0.05) >= least, (one, other)


def test_the_dark_of_the_system_is_the_dark_that_is_chosen() -> None:
    by_system, chosen = (
        re.search(rf"{it}\{{(.*?)\}}", STYLE, re.DOTALL)
        for it in (r":root:not\(\[data-theme=light\]\)", r":root\[data-theme=dark\]")
    )
    assert by_system is not None
    assert chosen is not None
    assert by_system[1] == chosen[1]
