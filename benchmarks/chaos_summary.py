"""What an hour of `gradus chaos` did to a run, from its history and the run's own files.

    python benchmarks/chaos_summary.py runs/demo/hour [--undisturbed runs/demo/calm] > hour.json

Says how many faults there were and how many of them ended a process, the seconds until the next
step by what was hit, every rule that broke, how the episodes ended, how much each role held in the
first and the second half, and the reward; beside it the reward of a run that nothing disturbed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from gradus.chaos.invariants import check_run
from gradus.chaos.soak import Round, growth
from gradus.files import read_json
from gradus.orchestrator.records.journal import check_journal, read_journal, surviving
from gradus.run.paths import RunDirectory
from gradus.run.records import read_records

ENDS = ("kill", "stop", "damage")
"""Kinds of faults after which a process is gone."""


def faults(rounds: list[Round]) -> dict[str, Any]:
    """Counts, seconds to the next step by what was hit, and what broke."""
    hit = rounds[:-1]
    seconds: dict[str, list[float]] = {}
    for it in hit:
        if it.seconds is not None:
            seconds.setdefault(re.sub(r"/\d+", "/n", it.fault), []).append(it.seconds)
    by_kind = Counter(it.fault.split()[0] for it in hit)
    return {
        "minutes": round((rounds[-1].at - hit[0].at) / 60, 1),
        "faults": len(hit),
        "by_kind": by_kind,
        "ended_a_process": sum(by_kind[kind] for kind in ENDS),
        "without_a_next_step": sum(it.seconds is None for it in hit),
        "steps_done_again": sum(it.again for it in rounds),
        "broken": [broken for it in rounds for broken in it.broken],
        "seconds_to_next_step": {
            fault: {"times": len(of), "median": round(median(of), 1), "longest": round(max(of), 1)}
            for fault, of in sorted(seconds.items())
        },
    }


def episodes(run_dir: RunDirectory) -> dict[str, Any]:
    """How the episodes of the lines that count ended, and what the checker of journals says."""
    lines = surviving(read_journal(run_dir.journal))
    ends = [line for line in lines if line["event"] == "episode_ended"]
    found = check_journal(lines)
    steps: dict[str, set[int]] = {}
    for line in lines:
        # After a kill the same batch may be sent again.
        for sample in line["samples"] if line["event"] == "batch_shipped" else ():
            steps.setdefault(sample, set()).add(line["step"])
    return {
        "ended": Counter(line["outcome"] for line in ends),
        "errors": Counter(line["error"] for line in ends if line["error"]),
        "played_again": sum(line["event"] == "episode_retried" for line in lines),
        "open_at_the_end": len(found.open_episodes),
        "set_aside": sum(line["event"] == "task_set_aside" for line in lines),
        "samples_trained": len(steps),
        "samples_trained_twice": sum(len(of) > 1 for of in steps.values()),
        "problems": found.problems,
    }


def reward(run_dir: RunDirectory, steps: int | None = None) -> dict[str, Any]:
    """Of the first step and the mean of the last three, of all steps or the first so many."""
    records = [it for it in read_records(run_dir.metrics) if not it.is_evaluation][:steps]
    means = [it.metrics["episode/reward/mean"] for it in records]
    return {
        "steps": len(means),
        "first_step": round(means[0], 3),
        "last_three_steps": round(fmean(means[-3:]), 3),
    }


def _outcome(run_dir: RunDirectory) -> str | None:
    """None while the run goes on."""
    return read_json(run_dir.summary)["outcome"] if run_dir.summary.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--undisturbed", type=Path)
    asked = parser.parse_args()
    history = asked.run.with_name(f"{asked.run.name}.chaos.jsonl").read_bytes()
    rounds = [msgspec.json.decode(line, type=Round) for line in history.splitlines()]
    run_dir = RunDirectory(asked.run)
    found = faults(rounds) | {
        "episodes": episodes(run_dir),
        "reward": reward(run_dir),
        "most_in_each_half": {
            role: {"mib": [it[0] for it in halves], "open_files": [it[1] for it in halves]}
            for role, halves in growth(rounds).items()
        },
        "broken_at_the_end": [str(it) for it in check_run(run_dir)],
        "outcome": _outcome(run_dir),
    }
    if asked.undisturbed:
        calm = RunDirectory(asked.undisturbed)
        found["undisturbed"] = {"reward": reward(calm, found["reward"]["steps"])}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
