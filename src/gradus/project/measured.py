"""Rows measured as the policy reads them: by the model's own tokenizer and its renderer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradus.config import ModelConfig
from gradus.errors import ConfigError
from gradus.orchestrator.play.renderer import (
    find_renderer,
    known_renderer,
    load_policy_tokenizer,
    render,
)
from gradus.plan.machine import model_problems
from gradus.plan.memory import read_model_shape
from gradus.project.choices import TINY, RowLengths, Setting
from gradus.project.rows import TaskRow
from gradus.run.model_files import is_on_this_machine, json_table, model_folder, text_part
from gradus.testing.tiny_model import build_tiny_model

_MEASURED_ROWS = 500
"""Of a longer file those with the most characters."""
_CHARACTERS_A_TOKEN = 3
_TINY_POSITIONS = 4096
_TINY = (
    "A tiny untrained model, to see the way. Yours: a folder, or a name on the hub such as\n"
    '"Qwen/Qwen3-0.6B"; then remove `renderer`.'
)
_CALL = '<tool_call>\n{"name": "a_tools_name", "arguments": {"expression": "12 * 3"}}\n</tool_call>'
"""About as long as a call of a tool."""


def project_model(folder: Path, wanted: str | None) -> tuple[ModelConfig, list[Setting], str]:
    """The model, which is built in the folder when none is wanted, its keys, and what to tell."""
    if wanted is None:
        build_tiny_model(folder, max_length_tokens=_TINY_POSITIONS)
        told = "model: a tiny untrained one that knows nothing; --model NAME_OR_FOLDER for yours"
        return ModelConfig(name=str(folder), renderer="qwen3"), tiny_settings(), told
    name = str(Path(wanted).resolve()) if Path(wanted).is_dir() else wanted
    return ModelConfig(name=name), [Setting("name", name)], f"model: {wanted}"


def tiny_settings() -> list[Setting]:
    """The keys of the model that lies in the folder."""
    return [Setting("name", "./model", _TINY), Setting("renderer", "qwen3")]


def measure(
    model: ModelConfig, rows: Sequence[TaskRow], tools: list[dict[str, Any]] | None
) -> RowLengths:
    """ConfigError for what is no model, has no tokenizer or no chat template."""
    for problem in model_problems(model):
        raise ConfigError(f"--model {problem.message}")
    asked = [sum(len(message["content"]) for message in row.opening) for row in rows]
    replied = [len(row.answer or "") for row in rows]
    if not is_on_this_machine(model.name):
        return RowLengths(
            (max(asked) + len(json.dumps(tools or ""))) // _CHARACTERS_A_TOKEN + 32,
            max(replied) // _CHARACTERS_A_TOKEN,
            f"estimated at {_CHARACTERS_A_TOKEN} characters a token, as {model.name} is not on "
            "this machine",
            model=model.name,
            may_think=True,
        )
    folder = model_folder(model.name)
    if folder is not None and not any(folder.glob("tokenizer*")):
        raise ConfigError(f"--model {model.name} has no tokenizer: copy tokenizer.json into it")
    try:
        tokenizer = load_policy_tokenizer(model.name)
    except ConfigError as error:
        said, _, _ = str(error).partition(";")
        raise ConfigError(f"--model: {said}; name a folder that has them") from error
    settings = known_renderer(model) or find_renderer(model.name)
    prompts = {
        at: len(render(tokenizer, settings, rows[at].opening, tools)) for at in _longest(asked)
    }
    texts = [rows[at].answer or "" for at in _longest(replied)]
    texts += [_CALL] if tools and any(texts) else []
    is_all = len(rows) <= _MEASURED_ROWS
    counted = "all" if is_all else f"the {_MEASURED_ROWS} with the most characters of"
    shape = None if folder is None else read_model_shape(folder)
    is_tiny = shape is not None and shape.num_parameters < TINY
    return RowLengths(
        max(prompts.values()),
        max(len(tokenizer(text)["input_ids"]) for text in texts),
        f"counted in {counted} {len(rows)} rows by its tokenizer and the renderer "
        f"{settings['name']!r}",
        settings["name"],
        model.name,
        shape,
        None if folder is None else _positions(folder),
        longest_row=max(prompts, key=prompts.__getitem__) + 1,
        may_think=not is_tiny and "<think>" in str(tokenizer.chat_template),
    )


def _longest(characters: Sequence[int]) -> list[int]:
    """The places of the longest texts, in order: the most tokens are among the most characters."""
    places = sorted(range(len(characters)), key=lambda place: -characters[place])
    return sorted(places[:_MEASURED_ROWS])


def _positions(folder: Path) -> int | None:
    found = text_part(json_table(folder / "config.json")).get("max_position_embeddings")
    return found if isinstance(found, int) else None
