"""The tokens of one episode with what engine and trainer said of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from run_folders import a_branching_episode, trained, write_trained
from tokenizers import Tokenizer, models

from gradus.monitor.token_record import record_file
from gradus.run.paths import RunDirectory
from gradus.view.episode import TokenRecords, TokenTexts, _NodeTokens, episode_page
from gradus.view.trained import trained_numbers


def tokens_of(root: Path) -> dict[str, Any]:
    return TokenRecords(RunDirectory(root)).read("g0.0", "first", 0)


def test_each_branch_brings_what_the_trainer_said_to_its_own_messages(tmp_path: Path) -> None:
    root = a_branching_episode(tmp_path / "run")
    write_trained(
        root,
        trained("g0.0/1/0", [1, 2, 3, 4, 5], [3, 4], 1.0),  # Cut at the longest length.
        trained("g0.0/1/1", [1, 2, 3, 4, 7], [4], 9.0),
        trained("g0.0/0/0", [1], [0], 5.0),
        trained("g0.0/7/0", [1], [0], 5.0),
        trained("g0.00/1/0", [1, 2, 3, 4, 5], [3], 5.0),
    )
    found = tokens_of(root)
    assert found["missing"] == {}
    nodes = found["traces"][1]
    assert [node.get("policy") for node in nodes] == [None, [None, 1.0], [2.0, None], [9.0]]
    assert nodes[2]["weight"] == [4.0, None]
    assert {"entropy", "advantage", "push"} <= nodes[1].keys()
    assert [node.get("reference") for node in nodes] == [None, [None, 0.5], [1.5, None], [8.5]]
    # The last has a note that does not fit its tokens.
    assert [node["versions"] for node in nodes] == [[], [None, 8], [8, 9], []]


def test_an_episode_without_numbers_of_the_trainer_says_why(tmp_path: Path) -> None:
    root = a_branching_episode(tmp_path / "run")
    run_dir = RunDirectory(root)
    assert "an older gradus" in tokens_of(root)["missing"]["trainer"]
    (run_dir.tokens / "step_1").mkdir(parents=True)
    missing = tokens_of(root)["missing"]
    assert "step_0 is not there" in missing["trainer"]
    assert missing["reference"] == missing["trainer"]
    write_trained(root, trained("g1.0/0/0", [1, 2], [1], 0.0))
    assert "not of the share" in tokens_of(root)["missing"]["trainer"]
    record_file(run_dir, 0, 0).write_bytes(b"gradus-tokens 9\n")
    found = tokens_of(root)
    assert "written by a newer gradus" in found["missing"]["trainer"]
    assert found["traces"][1][1]["logprobs"] == [None, -1.0]


def test_what_no_reference_scored_has_no_colour_of_it(tmp_path: Path) -> None:
    root = a_branching_episode(tmp_path / "run")
    whole = trained("g0.0/1/0", [1, 2, 3, 4, 5], [3, 4], 1.0)
    write_trained(root, msgspec.structs.replace(whole, reference_logprobs=None))
    found = tokens_of(root)
    assert found["missing"] == {"reference": "no reference model scored it"}
    assert found["traces"][1][1]["policy"] == [None, 1.0]
    assert found["traces"][1][1]["reference"] == [None, None]


def test_messages_in_a_circle_have_no_branch(tmp_path: Path) -> None:
    nodes = [_NodeTokens(parent=1, token_ids=[1]), _NodeTokens(parent=0, token_ids=[2])]
    nodes.append(_NodeTokens(parent=0, token_ids=[3]))
    write_trained(tmp_path, trained("g0.0/0/0", [1, 3], [1], 0.0))
    assert trained_numbers(RunDirectory(tmp_path), 0, "g0.0", [nodes])[0] == {}


def test_numbers_that_do_not_fit_their_tokens_cost_themselves_alone(tmp_path: Path) -> None:
    root = a_branching_episode(tmp_path / "run")
    whole = trained("g0.0/1/0", [1, 2, 3, 4, 5], [3, 4], 1.0)
    write_trained(root, msgspec.structs.replace(whole, is_trained=np.ones(9, bool)))
    found = tokens_of(root)
    assert "trainer" in found["missing"]
    assert found["traces"][1][1]["logprobs"] == [None, -1.0]


def test_tokens_whose_text_reads_as_other_tokens_are_named(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1, "c": 2, "ab": 3}
    Tokenizer(models.BPE(words, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path / "tokenizer.json")
    assert texts.read_otherwise([3, 2, 0]) == []
    assert texts.read_otherwise([2, 0, 1, 2]) == [1, 2]
    assert texts.read_otherwise([]) == []


def test_an_episode_brings_the_tools_of_its_agent_as_a_server_takes_them() -> None:
    tool = {"name": "look", "description": "Looks.", "parameters": {}}
    for given, found in (
        ([tool | {"type": "other"}], [{"type": "function", "function": tool}]),
        ([tool | {"description": "x" * 50_000}], []),
        (3, []),
    ):
        (trace,) = episode_page({"traces": [{"tools": given}]})["traces"]
        assert trace["tools"] == found
