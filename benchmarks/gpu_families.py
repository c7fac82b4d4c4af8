"""Whether a GPU computes each family of models as near to float32 as a CPU does in bfloat16.

    python benchmarks/gpu_families.py --output benchmarks/results/gpu_families.json
    python benchmarks/gpu_families.py --output OUT --ways plain gpt_oss qwen3_5

The small random models of tests/support/model_families.py, samples of ten lengths in one row.
`exact` is the trainer on the CPU in float32. For each case and way, in nats and as a share of the
gradient's norm: mean distance of logprobs and of gradients from `exact`, by transformers' own eager
forward in bfloat16 on a CPU (`own`), by the trainer's on the GPU (`gpu`; plain, compiled), and how
far the row is from its samples alone there (`alone`). `float32` is the GPU's largest distance in
float32. A family passes where the GPU's distances are no more than MARGIN times the model's own.
Workers take cases one by one; one that hangs is ended at its deadline, the case is noted, and
another worker goes on. The file is complete after each case. With `flash-linear-attention`
installed, the mixers that it has run by its kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "benchmarks", "tests/support")]

import older_torch

older_torch.mend()

import torch
from model_families import (
    CPU,
    FAMILIES,
    distance,
    family_config,
    family_folder,
    gradients,
    mean_distance,
    our_policy,
    own_logprobs,
    packed_logprobs,
    plain_model,
    rounded,
    samples,
)
from torch import Tensor

from gradus.trainer.model.kernels import Platform
from gradus.trainer.model.layers import compile_layers, decoder_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.wire.sample import Sample

LENGTHS = (65, 1, 300, 63, 2, 64, 128, 129, 200, 17)
MARGIN = 1.3
WAYS = ("plain", "compiled")
DEADLINES = {"plain": 60.0, "compiled": 100.0}
Found = dict[str, Any]


def gpu_policy(case: str, dtype: torch.dtype, way: str, platform: Platform | None) -> PolicyModel:
    """On the GPU, or by its code on this CPU where a `platform` stands in for it."""
    device = torch.device("cuda", 0) if platform is None else CPU
    model = load_model(family_config(family_folder(case)), device)
    policy = PolicyModel(rounded(model, dtype), platform=platform).to(device)
    here = platform or Platform.of(device)
    if way == "compiled":
        compile_layers(decoder_layers(policy.model), backend=here.compile_backend)
    else:
        policy.leave_uncompiled(here)
    return policy


def computed(
    policy: PolicyModel, found: list[Sample], device: torch.device
) -> tuple[list[Tensor], dict[str, Tensor]]:
    logprobs = packed_logprobs(policy, found, device)
    by_name = gradients(policy.model, logprobs)
    return [it.detach().cpu() for it in logprobs], {n: g.cpu() for n, g in by_name.items()}


def apart(ones: tuple[Any, Any], others: tuple[Any, Any]) -> list[float]:
    """Mean distance of logprobs, and of gradients; infinite for NaN."""
    squares = [
        float((ones[1][n].double() - g.double()).square().sum()) for n, g in others[1].items()
    ]
    both = [mean_distance(ones[0], others[0]), math.sqrt(sum(squares))]
    return [float(f"{it:.3g}") if math.isfinite(it) else math.inf for it in both]


def work(case: str, way: str, platform: Platform | None) -> Found:
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", 0) if platform is None else CPU
    found, half = samples(LENGTHS), torch.bfloat16
    exact = computed(our_policy(case), found, CPU)
    plain = plain_model(case, half)
    own = own_logprobs(plain, found)
    row: Found = {"own": apart((own, gradients(plain, own)), exact)}
    policy = gpu_policy(case, half, way, platform)
    together = computed(policy, found, device)
    row["gpu"] = apart(together, exact)
    if way == "plain":
        with torch.no_grad():
            alone = [packed_logprobs(policy, [it], device)[0].cpu() for it in found]
            wide = gpu_policy(case, torch.float32, way, platform)
            row["float32"] = distance([*_each(wide, found, device)], exact[0])
        row["alone"] = mean_distance(together[0], alone)
    row["passes"] = all(
        ours <= MARGIN * theirs for ours, theirs in zip(row["gpu"], row["own"], strict=True)
    )
    return row


def _each(policy: PolicyModel, found: list[Sample], device: torch.device) -> list[Tensor]:
    return [it.cpu() for it in packed_logprobs(policy, found, device)]


def serve(stand_in: bool) -> None:
    """One case and way per line of stdin, one answer per line."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    platform = None
    if stand_in:
        from gpu_stand_in import HOPPER, stand_in_gpu

        # A CPU keeps its own blocks of logits.
        platform = replace(stand_in_gpu()[0], facts=replace(HOPPER, can_compile=True))
    print("ready", flush=True)
    for line in sys.stdin:
        case, way = json.loads(line)
        started = time.perf_counter()
        try:
            row = work(case, way, platform)
        except Exception as error:
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        row["seconds"] = round(time.perf_counter() - started, 1)
        torch._dynamo.reset()
        print(json.dumps(row), flush=True)
        # Nothing works in a process after a GPU has reported an illegal access.
        if "CUDA error" in row.get("failed", ""):
            return


class Worker:
    """A process that computes cases; a new one after a case that it did not survive."""

    def __init__(self, stand_in: bool, log: Path) -> None:
        self.words = [sys.executable, __file__, "--serve", *(["--stand-in"] if stand_in else [])]
        self.log = log
        self.process: subprocess.Popen[str] | None = None

    def ask(self, case: str, way: str) -> Found:
        # One thread waits for a line, while this one watches the clock.
        with ThreadPoolExecutor(1) as reader:
            if self.process is None or self.process.poll() is not None:
                self.process = subprocess.Popen(
                    self.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log.open("a"),
                    text=True,
                )
                if self._line(reader, 120) is None:
                    return {"failed": "no worker came up in 120 s"}
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([case, way]) + "\n")
            self.process.stdin.flush()
            line = self._line(reader, DEADLINES[way])
        answer: Found = (
            json.loads(line) if line else {"failed": f"no answer in {DEADLINES[way]:g} s"}
        )
        return answer

    def _line(self, reader: ThreadPoolExecutor, seconds: float) -> str | None:
        assert self.process is not None
        assert self.process.stdout is not None
        waiting = reader.submit(self.process.stdout.readline)
        try:
            return waiting.result(seconds) or None
        except TimeoutError:
            self.end()
            return None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all unless named")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600, help="no case starts after these")
    parser.add_argument("--stand-in", action="store_true", help="a GPU's code on this CPU")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.stand_in)
        return
    if unknown := [it for it in options.cases if it not in FAMILIES]:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    if options.output is None:
        parser.error("--output FILE: where the numbers go")
    report: Found = {"machine": {}, "cases": {}}
    if options.output.exists():
        report = json.loads(options.output.read_text())
    if torch.cuda.is_available() and not options.stand_in:
        report["machine"] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    cases: Found = report["cases"]
    left = [(case, way) for way in options.ways.split(",") for case in options.cases or FAMILIES]
    lock, started = Lock(), time.monotonic()

    def run(number: int) -> None:
        log = Path(tempfile.gettempdir()) / f"gpu_families.{number}.log"
        worker = Worker(options.stand_in, log)
        while True:
            with lock:
                if not left or time.monotonic() - started > options.seconds:
                    break
                case, way = left.pop(0)
            row = worker.ask(case, way)
            with lock:
                cases.setdefault(case, {})[way] = row
                options.output.write_text(json.dumps(report, indent=1))
                print(case, way, json.dumps(row), flush=True)
        worker.end()

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, range(options.workers)))
    for case, way in left:
        cases.setdefault(case, {})[way] = {"failed": "its turn did not come"}
    options.output.write_text(json.dumps(report, indent=1))
    ways = [(case, way, row) for case, rows in cases.items() for way, row in rows.items()]
    bad = [f"{case} ({way})" for case, way, row in ways if not row.get("passes")]
    print(f"{len(ways) - len(bad)} of {len(ways)} pass; not: {', '.join(bad) or 'none'}")


if __name__ == "__main__":
    main()
