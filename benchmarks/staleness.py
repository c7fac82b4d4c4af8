"""Staleness against its bound: one run with a slow trainer, one with slow episodes.

The real orchestrator with scripted peers on a simulated clock: hours pass in seconds, and every run
of this script gives the same numbers. Staleness is computed from the journal alone, from the
version at each episode's start and the step that trained it.

    python benchmarks/staleness.py --output benchmarks/results/staleness.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from simulation import SOURCE, SimulatedRun, Simulation, play, run_simulated

from gradus.orchestrator.records.journal import read_journal

LONGEST_SECONDS = 600.0


def short_episodes(source: random.Random) -> float:
    """About four seconds each."""
    return source.uniform(3.0, 5.0)


def heavy_tailed(source: random.Random) -> float:
    """Median about four seconds, one in forty above a minute."""
    return min(2.0 * source.paretovariate(1.1), LONGEST_SECONDS)


CASES = {
    "slow_trainer": Simulation(
        max_steps=100,
        settings={
            "groups_per_batch": 8,
            "max_lag": 3,
            "max_staleness": 4,
            "max_in_flight_episodes": 64,
        },
        episode_seconds=short_episodes,
        train_seconds=60.0,
    ),
    "slow_episodes": Simulation(
        max_steps=100,
        settings={
            "groups_per_batch": 8,
            "max_lag": 3,
            "max_staleness": 4,
            "max_in_flight_episodes": 128,
        },
        episode_seconds=heavy_tailed,
        train_seconds=5.0,
    ),
}


def staleness_of_samples(journal: Path) -> Counter[int]:
    """Staleness → trained samples, from the journal alone."""
    versions: dict[str, int] = {}
    found: Counter[int] = Counter()
    for line in read_journal(journal):
        if line["event"] in ("episode_started", "episode_retried"):
            versions[line["episode"]] = line["version"]
        elif line["event"] == "batch_shipped":
            for sample in line["samples"]:
                found[line["step"] - versions[sample.rsplit("/", 2)[0]]] += 1
    return found


def summarize(run: SimulatedRun, simulation: Simulation) -> dict[str, Any]:
    """What the run shows about staleness."""
    ages = staleness_of_samples(run.journal)
    events = Counter(line["event"] for line in read_journal(run.journal))
    stale = sum(r.get(f"sample/{SOURCE}/dropped/stale/sum", 0.0) for r in run.monitor.records)
    return {
        "settings": dict(simulation.settings),
        "steps": simulation.max_steps,
        "hours": round(run.seconds / 3600, 2),
        "samples_by_staleness": {str(age): ages[age] for age in sorted(ages)},
        "max_staleness_seen": max(ages),
        "groups_abandoned": events["group_abandoned"],
        "tasks_returned": events["task_returned"],
        "tasks_given_up": events["task_given_up"],
        "samples_dropped_as_stale": int(stale),
        "slow_bias_at_the_end": round(run.monitor.records[-1][f"episode/{SOURCE}/slow_bias"], 3),
        "trainer_idle_share": round(sum(run.idle_seconds[2:]) / run.seconds, 3),
    }


def run_case(name: str, root: Path) -> dict[str, Any]:
    """Simulate one case; its files go into `root`."""
    simulation = CASES[name]
    return summarize(run_simulated(play(simulation, root)), simulation)


def main() -> None:
    """Simulate every case, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    results = {}
    for name in CASES:
        with tempfile.TemporaryDirectory(prefix="gradus-bench-") as folder:
            results[name] = run_case(name, Path(folder))
        print(name, json.dumps(results[name]))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
