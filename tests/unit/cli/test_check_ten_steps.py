"""What ten steps prove: each fault of units, masks, gradients and credit is the one bad line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from configs import build_run_config
from run_folders import a_run

from gradus.cli.check.findings import CheckVerdict
from gradus.cli.check.probes import Patient
from gradus.cli.check.sanity import NUM_STEPS, gradient_line, sanity_lines, ten_steps
from gradus.config import RunConfig
from gradus.monitor.token_record import TokenRecord, pack_records, record_file
from gradus.plan.processes import Machine
from gradus.run.paths import RunDirectory


def healthy(number: int) -> TokenRecord:
    """Six tokens given and ten sampled; every second sample is praised."""
    random = np.random.default_rng(number)
    trained = np.arange(16) >= 6
    logprobs = -random.random(10).astype(np.float32)
    advantages = np.full(10, 1.0 if number % 2 else -1.0, np.float32)
    ones = np.ones(10, np.float32)
    return TokenRecord(
        sample_id=f"g00000{number}.0/0/0",
        term=1,
        versions=[(-1, 6), (0, 10)],
        token_ids=np.arange(16, dtype=np.int32),
        is_trained=trained,
        sampling_logprobs=logprobs,
        policy_logprobs=logprobs + np.float32(0.001),
        entropies=ones,
        advantages=advantages,
        loss_weights={"rl": ones},
        pushes=np.float32(0.9) * advantages,
    )


def lines_of(
    root: Path, change: Callable[[TokenRecord], dict[str, Any]] = lambda _: {}
) -> dict[str, CheckVerdict]:
    a_run(root, metrics=[{"optimizer/grad_norm": 0.4}] * 2)
    for step in range(2):
        records = [healthy(number) for number in range(4)]
        changed = [msgspec.structs.replace(it, **change(it)) for it in records]
        path = record_file(RunDirectory(root), step, 0)
        path.parent.mkdir(parents=True)
        path.write_bytes(pack_records(changed))
    return {line.part: line.verdict for line in sanity_lines(RunDirectory(root))}


def test_a_healthy_run_has_no_bad_line(tmp_path: Path) -> None:
    found = lines_of(tmp_path)
    assert found.pop("weights") is CheckVerdict.UNKNOWN
    assert set(found.values()) == {CheckVerdict.OK}


@pytest.mark.parametrize(
    ("probe", "fault"),
    [
        ("masks", lambda it: {"versions": [(-1, 8), (0, 8)]}),
        ("masks", lambda it: {"is_trained": np.arange(16) < 10, "versions": []}),
        (
            "units",
            lambda it: {
                "sampling_logprobs": it.sampling_logprobs + 0.0,
                "entropies": -it.entropies,
            },
        ),
        ("units", lambda it: {"entropies": np.where(np.arange(10) == 3, np.nan, it.entropies)}),
        ("engine and trainer", lambda it: {"policy_logprobs": it.sampling_logprobs - 0.4}),
        ("credit", lambda it: {"pushes": -it.pushes}),
        ("credit", lambda it: {"advantages": 0 * it.advantages, "pushes": 0 * it.pushes}),
    ],
)
def test_a_fault_is_the_one_bad_line(
    tmp_path: Path, probe: str, fault: Callable[[TokenRecord], dict[str, Any]]
) -> None:
    found = lines_of(tmp_path, fault)
    assert [name for name, it in found.items() if it is CheckVerdict.FAILS] == [probe]


def test_a_penalty_that_holds_a_few_tokens_back_a_little_is_no_fault(tmp_path: Path) -> None:
    """As dppo does with what moved far from the engine: many tokens, each by 0.1 %."""

    def penalised(record: TokenRecord) -> dict[str, Any]:
        pushes = record.pushes.copy()
        pushes[: len(pushes) // 4] *= -0.001
        return {"pushes": pushes}

    assert CheckVerdict.FAILS not in lines_of(tmp_path, penalised).values()


def test_positive_logprobs_are_no_probabilities(tmp_path: Path) -> None:
    found = lines_of(
        tmp_path,
        lambda it: {
            "sampling_logprobs": -it.sampling_logprobs,
            "policy_logprobs": -it.policy_logprobs,
        },
    )
    assert [name for name, it in found.items() if it is CheckVerdict.FAILS] == ["units"]


@pytest.mark.parametrize("norms", [[], [0.0, 0.4], [float("nan"), 0.4]])
def test_a_step_without_a_gradient_fails(norms: list[float]) -> None:
    line = gradient_line([{"optimizer/grad_norm": norm} for norm in norms])
    assert line.verdict is CheckVerdict.FAILS


def test_a_run_that_recorded_nothing_fails(tmp_path: Path) -> None:
    a_run(tmp_path, metrics=[{"optimizer/grad_norm": 0.4}])
    (last,) = [line for line in sanity_lines(RunDirectory(tmp_path)) if line.part == "tokens"]
    assert last.verdict is CheckVerdict.FAILS


def test_the_ten_steps_are_those_of_the_config_without_what_ends_or_shows_them() -> None:
    config = build_run_config(
        {"max_steps": 500, "target_reward": 0.9, "monitor": [{"type": "tensorboard"}]}
    )
    changed = Patient(config, Machine.current()).changed(ten_steps(config))
    short = RunConfig.model_validate(changed)
    assert (short.max_steps, short.monitor, short.target_reward) == (NUM_STEPS, [], None)
    assert short.trainer.recorded_share == 1.0
    assert short.trainer.optimizer == config.trainer.optimizer
    assert ten_steps(build_run_config({"max_steps": 3}))["max_steps"] == 3


def test_an_algorithm_that_learns_given_tokens_or_gives_no_advantages_is_no_fault(
    tmp_path: Path,
) -> None:
    observed = {"versions": [(-1, 8), (0, 8)], "loss_weights": {"ce": np.ones(10, np.float32)}}
    found = lines_of(tmp_path, lambda it: {**observed, "advantages": 0 * it.advantages})
    assert (found["masks"], found["credit"]) == (CheckVerdict.SLOW, CheckVerdict.UNKNOWN)
    assert CheckVerdict.FAILS not in found.values()
