"""Write what a terminal showed as a picture: SVG of its text, which a browser can search.

    gradus rl @ rl.toml | tee shown.txt
    python scripts/terminal_picture.py "gradus rl @ rl.toml" shown.txt docs/images/terminal.svg

Lines beyond `--columns` are cut; `--skip 6-12` leaves those lines out and says so with a line of
dots.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

CHARACTER, LINE, MARGIN = 7.2, 18, 16
FRAME = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    'aria-label="a terminal">\n<rect width="100%" height="100%" rx="8" fill="#1d2529"/>\n'
    '<g font-family="ui-monospace, DejaVu Sans Mono, Menlo, monospace" font-size="12" '
    'fill="#d5dde0">\n{lines}\n</g>\n</svg>\n'
)
COLOURS = {"$ ": "#7fd1c1", "verdict": "#f2c879", "next": "#f2c879", "step": "#d5dde0"}
PLAIN = "#93a1a6"


def kept(text: str) -> str:
    """Spaces that no browser folds."""
    return escape(text).replace(" ", "&#160;")


def picture(shown: list[str], columns: int) -> str:
    lines = []
    for number, line in enumerate(shown):
        colour = next((it for start, it in COLOURS.items() if line.startswith(start)), PLAIN)
        text = line if len(line) <= columns else f"{line[: columns - 1]}…"
        y = MARGIN + LINE * (number + 0.75)
        lines.append(f'<text x="{MARGIN}" y="{y:g}" fill="{colour}">{kept(text)}</text>')
    width = round(2 * MARGIN + columns * CHARACTER)
    height = 2 * MARGIN + LINE * len(shown)
    return FRAME.format(width=width, height=height, lines="\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what a terminal showed.")
    parser.add_argument("command")
    parser.add_argument("shown", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--skip", default="", help="first-last, counted from 1")
    given = parser.parse_args()
    shown = given.shown.read_text().rstrip().splitlines()
    if given.skip:
        first, last = map(int, given.skip.split("-"))
        shown[first - 1 : last] = ["..."]
    given.out.write_text(picture([f"$ {given.command}", *shown], given.columns))


if __name__ == "__main__":
    main()
