"""What the small wikispeedia recipe starts from: a tiny model, and conversations that click.

    python examples/recipes/wikispeedia_tiny/prepare.py
    gradus sft @ examples/recipes/wikispeedia_tiny/sft.toml     # a minute or two on two cores

There are eight pages, with three links each; a click is on any of them, so that one in three pays.
One conversation in four declares the tools, which are most of its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from gradus.testing.tiny_model import build_tiny_model
from gradus_wikispeedia.demonstrations import demonstrations
from gradus_wikispeedia.graph import snap_graph

FOLDER = Path("runs/recipes/wikispeedia-start")
NUM_ROWS = 2_000
INSTRUCTION = "Walk to the target."
"""As in small/wikispeedia.toml."""
_DECLARES_TOOLS = 4


def main() -> None:
    """Write `model/` and `conversations.jsonl`."""
    build_tiny_model(FOLDER / "model", seed=0)
    graph = snap_graph(Path(__file__).parent / "pages")
    rows = demonstrations(NUM_ROWS, graph=graph, seed=0, instruction=INSTRUCTION)
    with (FOLDER / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if number % _DECLARES_TOOLS:
                del row["tools"]
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
