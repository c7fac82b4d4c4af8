"""Main memory of each trainer rank while it starts, by size of the model, before and after.

Makes a Qwen3-shaped model in bfloat16 on disk for every size, and starts one and two gloo ranks
that get it ready to learn, once from this tree and once from each tree given. Anonymous memory is
what a rank owns; the rest of its resident memory are pages of the mapped files, which all ranks
of a machine share and the system takes back when it needs them.

    python benchmarks/start_memory.py --before ../before/repo --sizes 0.1 0.3 1.0
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

GIB = 2**30
MODES = ("whole", "adapters")
POLL_SECONDS = 0.005
SHAPES = {
    "0.1": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16},
    "0.3": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16},
    "1.0": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 18},
}
"""Billions of parameters → a shape with about as many."""


def make_model(folder: Path, size: str) -> int:
    """Write a model with random weights tensor by tensor's worth of memory; its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=65536,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        **SHAPES[size],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


class Peak:
    """The largest memory of this process while the block runs."""

    def __enter__(self) -> Peak:
        self.anonymous = self.resident = 0
        self._before = self._read()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.note()

    def note(self) -> None:
        anonymous, resident = self._read()
        self.anonymous = max(self.anonymous, anonymous - self._before[0])
        self.resident = max(self.resident, resident - self._before[1])

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self.note()

    @staticmethod
    def _read() -> tuple[int, int]:
        sizes = {}
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "VmRSS"):
                sizes[name] = 1024 * int(value.split()[0])
        return sizes["RssAnon"], sizes["VmRSS"]


def be_rank(folder: Path, mode: str) -> None:
    """Get the model ready to learn, with the code of the tree that this process imports."""
    import torch

    from gradus.config import ModelConfig, TrainerConfig
    from gradus.trainer.distributed import join_world
    from gradus.trainer.learner import Learner

    given: dict[str, object] = {"compute_dtype": "bfloat16", "optimizer": {"type": "sgd"}}
    if mode == "adapters":
        given["lora"] = {"rank": 16}
    settings = TrainerConfig.model_validate(given)
    # Trees of before ask otherwise for a CPU.
    names = inspect.signature(join_world).parameters
    arguments: dict[str, Any] = {"on_cpu": True}
    if "device" in names:
        arguments = {"device": torch.device("cpu")}
    with join_world(**arguments) as world:
        torch.set_num_threads(1)
        started = time.process_time()
        with Peak() as peak:
            learner = Learner.build(
                ModelConfig(name=str(folder)), settings, settings.loss, max_steps=1, world=world
            )
            ready = Peak._read()[0] - peak._before[0]
        seconds = time.process_time() - started
        del learner
        found = {
            "peak_anonymous_gib": round(peak.anonymous / GIB, 3),
            "peak_resident_gib": round(peak.resident / GIB, 3),
            "ready_gib": round(ready / GIB, 3),
            "core_seconds": round(seconds, 2),
        }
        print(json.dumps(found), flush=True)


def start_ranks(tree: Path, folder: Path, mode: str, num_ranks: int, port: int) -> list[dict]:
    """The measurements of every rank of one world."""
    ranks = []
    for rank in range(num_ranks):
        variables = os.environ | {
            "PYTHONPATH": str(tree / "src"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--rank", str(folder), mode]
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    found = []
    for process in ranks:
        written, _ = process.communicate(timeout=300)
        assert process.returncode == 0, written
        found.append(json.loads(written.splitlines()[-1]))
    return found


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, action="append", default=[])
    parser.add_argument("--sizes", nargs="+", default=["0.1", "0.3"], choices=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rank:
        be_rank(Path(args.rank[0]), args.rank[1])
        return
    trees = {"after": Path(__file__).resolve().parents[1]}
    trees = {f"before {n}".removesuffix(" 0"): it for n, it in enumerate(args.before)} | trees
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for size in args.sizes:
            folder = Path(place) / size
            parameters = make_model(folder, size)
            for mode in args.modes:
                for num_ranks in args.ranks:
                    for name, tree in trees.items():
                        found = start_ranks(tree.resolve(), folder, mode, num_ranks, free_port())
                        largest = max(found, key=lambda it: it["peak_anonymous_gib"])
                        row = {"parameters": parameters, "trained": mode, "ranks": num_ranks}
                        rows.append({**row, "tree": name, **largest})
                        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
