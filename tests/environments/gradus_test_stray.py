"""Leaves a process behind that nothing but its parent's death tells about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from echo_tasksets import EchoTaskset

__all__ = ["EchoTaskset"]

_ORPHAN = """
import subprocess
options = {"env": {}, "start_new_session": True, "stdout": -3, "stderr": -3}
print(subprocess.Popen(["sleep", "600"], **options).pid)
"""
_ended = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, check=True)
with (Path.home() / "strays").open("a") as _strays:
    _strays.write(_ended.stdout)
