"""What `lr = "auto"` becomes, and what is said of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from configs import build_run_config, build_sft_config, write_headers
from pages import ROOT

from gradus.plan.learning_rate import choose, learning_rate, with_learning_rate


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_larger_model_learns_more_slowly_and_adapters_faster(
    kind: Any, has_adapters: bool
) -> None:
    sizes = [10 ** (power / 4) for power in range(16, 50)]
    rates = [learning_rate(kind, size, has_adapters=has_adapters) for size in sizes]
    assert all(first >= second > 0 for first, second in pairwise(rates))
    assert learning_rate(kind, 7e9, has_adapters=True) == pytest.approx(
        10 * learning_rate(kind, 7e9, has_adapters=False), rel=0.05
    )


@pytest.mark.parametrize("size", [1, 10**15])
def test_sizes_beyond_the_table_have_the_rate_of_its_end(size: int) -> None:
    assert 1e-7 < learning_rate("rl", size, has_adapters=False) < 1e-2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Qwen/Qwen3-0.6B", "600 M parameters by its name"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "135 M parameters by its name"),
        ("x/Llama-3.2-1b", "1 B parameters by its name"),
        ("x/Qwen3B2B-1.5B", "1.5 B parameters by its name"),
        ("x/model-v2", "1 B parameters taken, since no file"),
        ("8B/model", "1 B parameters taken, since no file"),
        ("no such folder", "1 B parameters taken, since no file"),
    ],
)
def test_a_model_that_is_not_here_is_as_large_as_its_name_says(name: str, told: str) -> None:
    assert told in choose("rl", name, has_adapters=False).reason


def test_the_size_comes_from_the_files_of_the_model(tmp_path: Path) -> None:
    folder = write_headers(tmp_path / "model-70B", {}, {"embed_tokens.weight": [115, 1000]})
    found = choose("sft", str(folder), has_adapters=False)
    assert found.reason == "chosen for sft, all weights, 115 k parameters"
    assert found.lr > 3e-3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": -1}'])
def test_a_config_that_tells_no_size_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "better write lr" in choose("rl", str(tmp_path), has_adapters=True).reason


def test_only_auto_is_replaced_and_the_number_of_an_earlier_launch_stays() -> None:
    run = build_run_config({"trainer": {"optimizer": {"lr": 2e-5}}})
    assert with_learning_rate(run) == (run, "")
    run = build_run_config({"trainer": {"optimizer": {"weight_decay": 0.1}}})
    chosen, reason = with_learning_rate(run)
    assert chosen.trainer.optimizer.lr == 5e-6
    assert chosen.trainer.optimizer.weight_decay == 0.1
    assert reason.startswith("5e-06, chosen for rl, all weights, 1 B parameters")
    kept, reason = with_learning_rate(run, 3e-4)
    assert kept.trainer.optimizer.lr == 3e-4
    assert reason == "0.0003, as in the launches before"
    sft = build_sft_config({"lora": {"rank": 4}})
    assert with_learning_rate(sft)[0].optimizer.lr == 5e-4


def test_the_rate_that_auto_takes_was_measured_and_is_close_to_the_best() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "learning_rate.json").read_text())
    losses: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, run in found.items():
        size, what, factor, _ = key.split(" / ")
        losses.setdefault((size, what), {}).setdefault(factor, []).append(run["loss"])
        has_adapters, millions = what == "adapters", float(size.removesuffix(" M"))
        now = learning_rate("sft", 1e6 * millions, has_adapters=has_adapters)
        assert now == pytest.approx(run["auto"], rel=0.1), "run the benchmark again"
    means = [{it: fmean(values) for it, values in curve.items()} for curve in losses.values()]
    assert [len(curve) for curve in means] == [5] * 6
    assert all(curve["x1"] <= 1.05 * min(curve.values()) for curve in means)
