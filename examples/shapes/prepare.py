"""What the example starts from: a tiny Qwen3-VL that has seen some drawings.

    python examples/shapes/prepare.py runs/shapes/start

The model learns by supervised steps to answer with a number, and to count now and then: the state
in which reinforcement learning finds a pre-trained model. Needs the extra `images`.
"""

from __future__ import annotations

import argparse
import importlib
from itertools import islice
from pathlib import Path
from typing import Any

from gradus.companions import show_torchvision

show_torchvision()

import torch  # noqa: E402 - transformers must find torchvision

from gradus.testing.tiny_images import build_tiny_image_model  # noqa: E402
from gradus.wire.images import open_image  # noqa: E402
from gradus_shapes.drawing import QUESTION, Drawing, drawings  # noqa: E402

NUM_DRAWINGS = 64
"""Of a step."""
SEED = 7
"""Of the drawings; those of the environment have another."""


def rows_of(processor: Any, drawn: list[Drawing]) -> dict[str, torch.Tensor]:
    """A padded batch of questions with their answers."""
    asked = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    texts = [
        processor.apply_chat_template(
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": str(it.num_circles)},
            ]
        )
        for it in drawn
    ]
    images = [open_image(it.content) for it in drawn]
    rows: dict[str, torch.Tensor] = processor(
        text=[text.rstrip("\n") for text in texts], images=images, padding=True, return_tensors="pt"
    )
    return rows


def warm_up(folder: Path, *, num_steps: int, max_circles: int, learning_rate: float = 2e-3) -> None:
    """Train the model in `folder` on the answers, and write it again."""
    models: Any = importlib.import_module("transformers")
    processor = models.AutoProcessor.from_pretrained(folder, padding_side="right")
    model = models.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, num_steps)
    drawn = drawings(seed=SEED, max_circles=max_circles, max_squares=0)
    for step in range(num_steps):
        rows = rows_of(processor, list(islice(drawn, NUM_DRAWINGS)))
        ends = rows["attention_mask"].sum(1)
        places = torch.stack([ends - 3, ends - 2], 1)  # before the number, before the end of turn
        logits = torch.take_along_dim(model(**rows).logits, places[..., None], 1)
        targets = torch.take_along_dim(rows["input_ids"], places + 1, 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == num_steps - 1:
            right = (logits[:, 0].argmax(-1) == targets[:, 0]).float().mean()
            print(f"step {step}: loss {loss:.3f}, right {right:.2f}", flush=True)
    model.save_pretrained(folder)


def main() -> None:
    """Parse the command line and prepare."""
    parser = argparse.ArgumentParser(description="Build the tiny model and warm it up.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/shapes/start"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--max-circles", type=int, default=4)
    arguments = parser.parse_args()
    build_tiny_image_model(arguments.directory)
    warm_up(arguments.directory, num_steps=arguments.steps, max_circles=arguments.max_circles)
    print(f"the model is in {arguments.directory}")


if __name__ == "__main__":
    main()
