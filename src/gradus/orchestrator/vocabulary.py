"""The size of the model's vocabulary, read from its `config.json` without loading the model."""

from __future__ import annotations

import json

from gradus.config.model import ModelConfig
from gradus.recording import model_folder


def read_vocabulary_size(model: ModelConfig) -> int | None:
    """`vocab_size` of a model directory or of the hub's local cache; None when it is not there.

    The network is never asked: inference has fetched the model before the orchestrator starts.
    """
    folder = model_folder(model.name)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    text = config.get("text_config") if isinstance(config, dict) else None
    return _vocab_size(config) or _vocab_size(text)


def _vocab_size(config: object) -> int | None:
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
