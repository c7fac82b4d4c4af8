"""Repeat the prompt; notes in the home directory what a program that it starts inherits."""

from __future__ import annotations

import subprocess
from pathlib import Path

from echo_tasksets import EchoTaskset

__all__ = ["EchoTaskset"]

_env = subprocess.run(["env"], capture_output=True, text=True, check=True)
(Path.home() / "inherited").write_text(_env.stdout)
