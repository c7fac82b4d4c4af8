"""Whatever is written, the answer is a config or a ConfigError, never another exception."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from configs import build_run_values, contradictions_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradus.config import RunConfig, dotted, load_config, resolve, run_name
from gradus.config.keys import all_key_paths
from gradus.config.schema.environment import NAME_PATTERN
from gradus.errors import ConfigError
from gradus.run.paths import RunDirectory

KEYS = st.one_of(
    st.sampled_from(sorted({str(part) for path in all_key_paths(RunConfig) for part in path})),
    st.sampled_from(["id", "pool", "type", "num_workers", "agents", "taskset", "max_tokens", "0"]),
    st.text(max_size=4),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.sampled_from(["None", "auto", "static", "elastic", "chat", "grpo"]),
    st.text(max_size=6),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=15,
)
FLAGS = st.sampled_from(
    [f"--{dotted(path).replace('_', '-')}" for path in all_key_paths(RunConfig)]
)
WORDS = st.one_of(
    FLAGS,
    FLAGS.map(lambda flag: flag.replace("--", "--no-", 1)),
    st.sampled_from(["@", "--", "-", "--x", "@nowhere.toml", "--orchestrator.train.env.0.id"]),
    st.sampled_from(["1", "true", "None", "[1, 2]", '{"a": 1}', "{", "--a.0.b=1", "--a..b", "--0"]),
    st.text(max_size=8).filter(lambda word: "/" not in word),
)
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.shows("F74")
@quick
@given(st.dictionaries(KEYS, TREES, max_size=5))
@example({"orchestrator": {"train": {"env": {"0": {"id": "x"}}}}})
@example({"orchestrator": {"env": [[]], "train": {"env": [1, None]}}})
@example({"orchestrator": {"train": {"env": [{"pool": {"type": []}}]}}})
@example({"orchestrator": {"train": {"env": [{"pool": {"type": None}}]}}})
@example({"trainer": {"env_vars": {"": ""}}})
def test_any_file_gives_a_config_or_a_config_error(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(values))
        with contextlib.suppress(ConfigError):
            load_config(RunConfig, ["@", str(path)], check=contradictions_of)


@pytest.mark.shows("F74")
@quick
@given(st.lists(WORDS, max_size=6))
@example(["--orchestrator.train.env.0", "x"])
@example(["--orchestrator.train.env", "{}", "--orchestrator.train.env.0.id", "x"])
@example(["--model", "x", "--model.name", "y"])
@example(["--model.name", "y", "--model", "x"])
@example(["--model", "--model.name", "y"])
@example(["--orchestrator.train.env.99999999999999999999.id", "x"])
@example(["--orchestrator.env.0", "x", "--orchestrator.env.0.num-workers", "x"])
def test_any_command_line_gives_a_config_or_a_config_error(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(json.dumps(build_run_values()))
        with contextlib.suppress(ConfigError):
            load_config(RunConfig, ["@", str(path), *words], check=contradictions_of)


@quick
@given(st.text(max_size=80))
@example("[[orchestrator.train.env]]\n[orchestrator.train]\n")
@example("a = '''\n[b]\n'''")
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(ConfigError):
            load_config(RunConfig, ["@", str(path)])


@pytest.mark.shows("F34")
@quick
@given(st.text(max_size=80), st.text(max_size=80), st.text(min_size=1, max_size=300))
@example("../x", "/etc", "a/b")
@example("", "x\0", "CON")
@example("x", "..", "../../etc/passwd")
def test_no_name_leaves_the_output_folder(run: str, source: str, model: str) -> None:
    values = build_run_values({"model": {"name": model}})
    values["orchestrator"]["train"]["env"][0]["id"] = source
    if run:
        values["name"] = run
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.json"
            path.write_text(json.dumps(values))
            config = load_config(RunConfig, ["@", str(path)], check=contradictions_of)
    except ConfigError:
        return
    name = run_name(config, "0123abcd")
    root = Path("/runs") / name
    assert root.resolve().parent == Path("/runs")
    for process in resolve(config, run_dir=root, term=0).by_process():
        assert RunDirectory(root).ready_file(process).resolve().parent == root / "ready"


@pytest.mark.shows("F34", "SEC14")
def test_the_pattern_of_names_is_the_one_that_keeps_them_inside() -> None:
    assert NAME_PATTERN.startswith("^[A-Za-z0-9]")
    assert "/" not in NAME_PATTERN
