"""The demo's two phases with a small model of another family: warm-up, then RL with real vLLM.

    python benchmarks/family_run.py CASE [--steps 10] [--warm-up 220] [-- FLAGS of gradus rl]

CASE is one of tests/support/model_families.py. Prints the reward of the first step and of the last
three, the mismatch between engine and trainer on the same weights, and the minutes of both phases;
benchmarks/results/family_run.json has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "reverse_text"
sys.path[:0] = [str(ROOT / "tests" / "support"), str(EXAMPLE), str(Path(__file__).parent)]
RUNS = Path("runs/families")
RESULTS = ROOT / "benchmarks" / "results" / "family_run.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=220)
    # argparse takes no list of words behind an option.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked, flags = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    case = asked.case.replace(" ", "-")
    start = RUNS / f"{case}-start"
    build(asked.case, start / "model")
    common = ["--output-dir", str(RUNS), "--clean"]
    own_flags = [*common, *flags]
    data = ["--data.path", str(start / "conversations.jsonl")]
    seconds = [
        run("sft", f"{case}-warm-up", start / "model", asked.warm_up, [*data, *common]),
        run("rl", f"{case}-rl", RUNS / f"{case}-warm-up" / "model", asked.steps, own_flags),
    ]
    report(" ".join([asked.case, *flags]), RUNS / f"{case}-rl", seconds)


def build(case: str, folder: Path) -> None:
    """The case's model with the demo's tokenizer, and the demo's conversations beside it."""
    from engine_logprobs import engine_options
    from model_families import FAMILIES, build_family
    from prepare import NUM_CONVERSATIONS, build_conversations

    from gradus.testing.tiny_model import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(folder)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    options = engine_options(case)
    if "vocab_size_per_layer_input" in options:
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
        # The case's cap of 1 leaves every token nearly as likely as another.
        sizes["final_logit_softcapping"] = 30.0
    build_family(folder, FAMILIES[case][0], options | sizes, noise=0.0)
    rows = build_conversations(NUM_CONVERSATIONS, seed=0)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder.parent / "conversations.jsonl").write_text("".join(lines), encoding="utf-8")


def run(command: str, name: str, model: Path, steps: int, flags: list[str]) -> float:
    """Run a command of gradus on the demo's config; its seconds."""
    words = [
        sys.executable,
        "-m",
        "gradus.cli.main",
        command,
        "@",
        str(EXAMPLE / f"{command}.toml"),
    ]
    words += ["--name", name, "--model.name", str(model), "--max-steps", str(steps), *flags]
    began = time.monotonic()
    if code := subprocess.run(words, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"gradus {command} ended with code {code}; its own words are above")
    return time.monotonic() - began


def report(name: str, run_dir: Path, seconds: list[float]) -> None:
    from curve import read_curve

    metrics = ROOT / run_dir / "metrics.jsonl"
    reward, mismatch = read_curve(metrics), read_curve(metrics, "loss/mismatch_kl/mean")
    found = {
        "reward": [reward.first, reward.last],
        "steps": len(reward.steps),
        "mismatch_kl": mismatch.values[0],
        "minutes": [round(it / 60, 1) for it in seconds],
        "load": round(os.getloadavg()[0], 1),
        "seed": 0,
    }
    noted = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**noted, name: found}, indent=1, sort_keys=True) + "\n")
    print(f"{name}: {found}")


if __name__ == "__main__":
    main()
