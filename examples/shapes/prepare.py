"""What the example starts from: a tiny Qwen3-VL, and drawings with their answers.

    python examples/shapes/prepare.py runs/shapes

Supervised steps (`sft.toml`) teach the model to answer with a number, and to count now and then:
the state in which reinforcement learning finds a pre-trained model. Needs the extra `images`.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from gradus.companions import show_torchvision

show_torchvision()  # before anything imports transformers

from gradus.testing.tiny_images import build_tiny_image_model  # noqa: E402
from gradus_shapes.drawing import QUESTION, drawings  # noqa: E402

SEED = 7
"""Of the drawings; those of the environment have another."""


def write_drawings(folder: Path, *, num_drawings: int, max_circles: int) -> None:
    """Conversations in `drawings.jsonl`, each beside the image that it shows."""
    (folder / "drawings").mkdir(parents=True, exist_ok=True)
    drawn = islice(drawings(seed=SEED, max_circles=max_circles, max_squares=0), num_drawings)
    with (folder / "drawings.jsonl").open("w") as file:
        for number, drawing in enumerate(drawn):
            name = f"drawings/{number}.png"
            (folder / name).write_bytes(drawing.content)
            image = {"type": "image_url", "image_url": {"url": name}}
            asked = [image, {"type": "text", "text": QUESTION}]
            answer = {"role": "assistant", "content": str(drawing.num_circles)}
            row = {"messages": [{"role": "user", "content": asked}, answer]}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Parse the command line and prepare."""
    parser = argparse.ArgumentParser(description="Build the tiny model and its drawings.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/shapes"))
    parser.add_argument("--drawings", type=int, default=5120)
    parser.add_argument("--max-circles", type=int, default=4)
    arguments = parser.parse_args()
    folder: Path = arguments.directory
    build_tiny_image_model(folder / "start")
    write_drawings(folder, num_drawings=arguments.drawings, max_circles=arguments.max_circles)
    print(f"{folder / 'start'}: the model; {folder / 'drawings.jsonl'}: {arguments.drawings} rows")


if __name__ == "__main__":
    main()
