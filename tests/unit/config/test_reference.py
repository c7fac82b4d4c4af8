"""The schema as text: complete, with the defaults that hold, and fresh in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from configs import RUN_TOML, SFT_TOML, build_run_config, build_sft_config

from gradus.config import (
    EvalConfig,
    RunConfig,
    RunProcessConfig,
    SftConfig,
    dotted,
    load_config,
    sections,
)
from gradus.config.keys import all_key_paths
from gradus.config.reference import MOST_USED, command_help, help_text, reference
from gradus.errors import ConfigError
from gradus.plan.show import describe_config

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL))
]


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_config_in_the_docs_is_valid(block: str, tmp_path: Path) -> None:
    is_sft = block.startswith(("[eval]", "[data]"))
    file = tmp_path / "page.toml"
    if "[orchestrator.train.env." in block:  # below a source, which the page leaves out
        file.write_text(RUN_TOML + block)
        words = ["@", str(file)]
    else:
        file.write_text(block)
        base = tmp_path / "base.toml"
        base.write_text(f"max_steps = 20\n{SFT_TOML}" if is_sft else RUN_TOML)
        words = ["@", str(base), "@", str(file)]
    load_config(SftConfig if is_sft else RunConfig, words)


@pytest.mark.parametrize("model", MOST_USED)
def test_the_keys_that_people_set_stand_before_the_folded_rest(model: Any) -> None:
    command = {RunConfig: "rl", SftConfig: "sft", EvalConfig: "eval"}[model]
    chapter = reference().partition(f"## `gradus {command}`\n")[2].partition("\n## ")[0]
    first, _, folded = chapter.partition("<details>")
    shown = re.findall(r"^\| \[`(.+?)`\]", first, re.MULTILINE)
    assert shown == list(MOST_USED[model])
    assert len(lines_of(folded, "| `")) > 100
    assert chapter.rstrip().endswith("</details>"), "nothing stands behind the folds"


def test_each_fold_of_the_reference_closes_and_its_markdown_is_rendered() -> None:
    page = reference()
    folds = re.findall(
        r"<details>\n<summary>[^\n]+</summary>\n\n(.*?)\n\n</details>\n", page, re.DOTALL
    )
    assert len(folds) == page.count("<details>") == page.count("</details>") > 20
    assert not any("<details>" in fold for fold in folds)
    assert all(fold.startswith("### ") for fold in folds)


def test_a_link_into_a_folded_section_finds_it() -> None:
    page = reference()
    anchors = re.findall(r'<a id="([^"]+)"></a>', page)
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(anchors)
    assert {"rl-top", "rl-trainer-optimizer", "rl-trainer-optimizer-sgd", "eval-env-n"} <= set(
        anchors
    )
    links = {
        anchor
        for other in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for anchor in re.findall(r"configuration\.md#([^)\s]+)", other.read_text())
    }
    assert links <= set(anchors)


def test_every_key_has_a_meaning() -> None:
    silent = [
        f"{section.path}.{key.name}"
        for model in (RunConfig, SftConfig)
        for section in sections(model)
        for key in section.keys
        if not key.text and key.name != "type"
    ]
    assert silent == []


def test_every_key_path_is_in_the_help() -> None:
    text = help_text(RunConfig, width=100)
    listed = {
        f"{section.path}.{key.name}".strip(".")
        for section in sections(RunConfig)
        for key in section.keys
    }
    listed |= {section.path for section in sections(RunConfig)}
    for path in all_key_paths(RunConfig):
        assert dotted(path) in listed
    assert "--orchestrator.train.env.N.group-size  int at least 1, default: 8" in text


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("monitor", "below it: monitor.N"),
        ("orchestrator.train.env.0.agents", "below it: orchestrator.train.env.N.agents.<name>,"),
        ("--orchestrator.train.env.0.agents.my-judge.train", "agents.<name>.train  bool or None"),
        ("orchestrator.train.env.1.agents.judge", "[orchestrator.train.env.N.agents.<name>]"),
    ],
)
def test_the_help_of_a_list_or_of_a_named_table_goes_on_below(asked: str, told: str) -> None:
    assert told in command_help(RunConfig, "rl", asked, width=100)


def test_the_last_part_of_a_section_is_told_the_whole_name() -> None:
    with pytest.raises(ConfigError, match=r"there is trainer\.lora; --help without"):
        command_help(RunConfig, "rl", "lora", width=100)


def test_units_and_ranges_stand_in_the_help() -> None:
    text = help_text(RunConfig, width=100)
    assert "--launch.stop-timeout-seconds  float above 0, default: 8.0" in text
    assert "--inference.kv-cache-gib  float above 0 or None, default: None" in text
    assert "--max-steps  int at least 1, default: 1000000" in text


def test_a_default_that_a_section_changes_is_the_one_that_is_shown() -> None:
    text = help_text(RunConfig, width=100)
    assert (
        "--orchestrator.train.sampling.max-completion-tokens  int at least 1 or None, default: 512"
        in text
    )


def test_variants_are_told_apart_by_their_type() -> None:
    texts = [s.text for s in sections(RunConfig) if s.path.endswith(".curriculum")]
    assert any('With `type = "uniform"`' in text for text in texts)
    assert any('type = "difficulty"' in text for text in texts)


def test_help_keeps_to_the_width_of_the_terminal() -> None:
    meanings = [line for line in help_text(RunConfig, width=72).splitlines() if line[:6] == " " * 6]
    assert meanings
    assert max(map(len, meanings)) <= 72


def test_process_configs_have_help_too() -> None:
    assert "--sources.N.group-size" in help_text(RunProcessConfig, width=100)


def test_tables_in_the_reference_have_equal_columns() -> None:
    rows = lines_of(reference().replace("\\|", ""), "|")
    counts = {row.count("|") for row in rows}
    assert counts <= {3, 5}


def test_the_plan_of_a_run_names_every_process_in_order() -> None:
    config = build_run_config(
        {
            "orchestrator": {
                "train": {
                    "env": [
                        {"id": "reverse-text", "num_workers": 2},
                        {"id": "wordle"},
                        {"id": "zebra"},
                    ]
                }
            },
            "trainer": {"num_processes": 2},
        }
    )
    lines = describe_config(config)
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    environments = ["env_reverse-text", "env_reverse-text@2", "env_wordle", "env_zebra"]
    assert names == ["inference", *environments, "trainer", "orchestrator"]
    text = "\n".join(lines)
    assert "2 processes under torchrun" in text
    assert "zebra x 8 (grpo)" in text
    assert "runs/reverse-text_wordle_zebra--tiny--<8 hex>" in text


def test_the_plan_of_a_supervised_run() -> None:
    text = "\n".join(describe_config(build_sft_config({"name": "warm-up"})))
    assert "100 steps of 64 conversations from someone/conversations" in text
    assert "folder: runs/warm-up" in text
    assert "trainer" in text


def test_the_plan_says_that_only_an_adapter_is_trained() -> None:
    run = describe_config(build_run_config({"trainer": {"lora": {"rank": 4}}}))
    sft = describe_config(build_sft_config({"lora": {"rank": 4}}))
    assert all("LoRA rank 4" in "\n".join(lines) for lines in (run, sft))
    assert "LoRA" not in "\n".join(describe_config(build_run_config()))


@pytest.mark.parametrize(
    ("kind", "agents", "words"),
    [
        ("grpo", {"first": {}, "second": {}}, "first, second all train"),
        ("rae", {}, "rae compares agents. Whether this environment has several is"),
        ("rae", {"first": {}, "second": {}}, None),
        ("grpo", {"first": {}, "second": {"train": False}}, None),
        ("hierarchical_grpo", {"first": {}, "second": {}}, None),
        ("grpo", {}, None),
    ],
)
def test_the_overview_notes_what_the_start_may_refuse(
    kind: str, agents: dict[str, Any], words: str | None
) -> None:
    train = {"algo": {"type": kind}, "env": [{"id": "poker", "agents": agents}]}
    lines = describe_config(build_run_config({"orchestrator": {"train": train}}))
    notes = [line for line in lines if line.startswith("note: source 'poker'")]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]
