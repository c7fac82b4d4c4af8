"""No value of a file of prime-rl is lost: whatever is changed in it changes what is printed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradus.config import EvalConfig, RunConfig, SftConfig, sections
from gradus.config.keys import KeyPath
from gradus.errors import ConfigError
from gradus_convert.parts import COMMON
from gradus_convert.prime_rl import from_prime_rl

RL = """
max_steps = 20
seq_len = 4096
model.name = "someone/tiny"
[orchestrator]
batch_size = 64
group_size = 8
"""
SOURCE = '[[orchestrator.train.env]]\nid = "reverse-text"\n'
NESTED = '[[orchestrator.train.source]]\nname = "words"\nenv.taskset.id = "reverse-text"\n'
WRITTEN = tomllib.loads((Path(__file__).parent / "prime_rl_examples.toml").read_text())
RUNS, SOURCES, OTHERS = WRITTEN["run"], WRITTEN["source"], WRITTEN["other"]


def merged(base: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    both = {key: base[key] for key in base if key not in layer}
    for key, value in layer.items():
        inner = base.get(key)
        are_tables = isinstance(inner, dict) and isinstance(value, dict)
        both[key] = merged(inner, value) if are_tables else value  # type: ignore[arg-type]
    return both


def run_of(overlay: str, source: str = SOURCE) -> dict[str, Any]:
    return merged(merged(tomllib.loads(RL), tomllib.loads(source)), tomllib.loads(overlay))


EXAMPLES = {
    **{f"rl, {name}": run_of(overlay) for name, overlay in RUNS.items()},
    **{f"rl, source, {name}": run_of("", SOURCE + lines) for name, lines in SOURCES.items()},
    **{
        f"rl, nested, {name}": run_of("", NESTED + lines.replace("train.env.", "train.source."))
        for name, lines in SOURCES.items()
    },
    **{name: tomllib.loads(text) for name, text in OTHERS.items()},
}


def leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    entries = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        entries = list(enumerate(value))
    if not entries:
        yield path
    for key, child in entries:
        yield from leaves(child, (*path, key))


def other(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}zz"
    if isinstance(value, int | float):
        return value + 7
    return {"zzq": 1} if isinstance(value, dict) else ["zzq"]


def changed(values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    result = copy.deepcopy(values)
    holder: Any = result
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = other(holder[path[-1]])
    return result


OVERRIDDEN = {("orchestrator", "group_size"), ("orchestrator", "eval", "select", "limit")}
"""Defaults of prime-rl for sources, which mean nothing where each source has its own value."""


def lost(values: dict[str, Any]) -> list[KeyPath]:
    """The keys whose value does not reach the printed file, neither as a value nor in a note."""
    before, found = from_prime_rl(values).toml(), []
    for path in leaves(values):
        try:
            after = from_prime_rl(changed(values, path)).toml()
        except ConfigError:
            continue
        found += [path] if after == before else []
    return found


def test_there_are_examples_of_every_command() -> None:
    assert {from_prime_rl(values).command for values in EXAMPLES.values()} == {"rl", "sft", "eval"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_value_of_an_example_is_lost(name: str) -> None:
    values = EXAMPLES[name]
    before = copy.deepcopy(values)
    assert set(lost(values)) <= OVERRIDDEN
    assert values == before


def inner(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in entries:
        if isinstance(child, dict | list):
            yield (*path, key)
            yield from inner(child, (*path, key))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_value_of_another_kind_is_an_answer_too(name: str) -> None:
    for path, wrong in itertools.product(list(inner(EXAMPLES[name])), (3, ["x"], {})):
        values = copy.deepcopy(EXAMPLES[name])
        holder: Any = values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = wrong
        with contextlib.suppress(ConfigError):
            tomllib.loads(from_prime_rl(values).toml())


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(sorted(RUNS)), min_size=2, max_size=4, unique=True))
@example(["buffer", "curriculum"])
def test_no_value_is_lost_where_features_meet(names: list[str]) -> None:
    values = run_of("")
    for name in names:
        values = merged(values, tomllib.loads(RUNS[name]))
    assert set(lost(values)) <= OVERRIDDEN


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_printed_is_toml_that_says_what_is_still_refused(name: str) -> None:
    conversion = from_prime_rl(EXAMPLES[name])
    assert tomllib.loads(conversion.toml()) == conversion.values
    refused = conversion.toml().partition("# Still refused:")[2]
    key = REFUSED.get(name.removeprefix("rl, ").replace("nested", "source"), "")
    assert bool(refused) == bool(key)
    assert key in refused


REFUSED = {
    "own loss": "trainer.loss.type",
    "parallel": "trainer.parallel.expert_parallel_size",
    "sampling": "sampling.extra_body.top_k",
    "old sampling": "sampling.extra_body.repetition_penalty",
    "wandb of both processes": "monitor.1.name",
    "source, elastic": "env.0.address",
    "source, served": "env.0.address",
    "source, algorithm": "env.0.algo.type",
    "source, harness below arguments": "agents.judge.base_url",
}
"""Examples with values that gradus cannot have, or not together → a key that is refused."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[vllm]\nmodel = 'm'\n[server]\nport = 1\n", "prime-rl's inference alone"),
        ("batch_size = 8\n[[train.env]]\nid = 'a'\n", "prime-rl's orchestrator alone"),
        ("max_async_level = 1\n[[env]]\nid = 'a'\n", "prime-rl's orchestrator alone"),
        ("[optim]\nlr = 1e-5\n", "prime-rl's trainer alone"),
        ("[slurm]\njob_name = 'x'\n", "nothing of this file has an equivalent"),
    ],
)
def test_a_file_that_is_no_run_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_prime_rl(tomllib.loads(text))


def test_a_setting_that_gradus_has_is_never_said_to_be_missing() -> None:
    models = (RunConfig, SftConfig, EvalConfig)
    ours = {key.name for model in models for table in sections(model) for key in table.keys}
    notes = [note for values in EXAMPLES.values() for note in from_prime_rl(values).left_out]
    missing = {note.split(" = ")[0] for note in notes if note.endswith("has no such setting")}
    assert len(missing) > 20
    assert {key for key in missing if key.rpartition(".")[2] in ours - COMMON} == set()


def test_pairs_of_sources_stay_in_order() -> None:
    pairs = itertools.pairwise([SOURCE + "name = 'x'\n" + line for line in SOURCES.values()])
    for first, second in pairs:
        both = run_of("", first.replace("'x'", "'a'", 1) + second.replace("'x'", "'b'", 1))
        names = [it["name"] for it in from_prime_rl(both).values["orchestrator"]["train"]["env"]]
        assert names == ["a", "b"]
