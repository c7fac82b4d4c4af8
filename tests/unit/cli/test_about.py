"""`gradus --version --all`: enough for a report of a bug, and nothing that is private."""

from __future__ import annotations

import getpass
import socket
import stat
from pathlib import Path

import pytest

from gradus.cli.check.about import about
from gradus.cli.main import main

CPUINFO = "model name : Some CPU\nflags : fpu fma amx_bf16 amx_tile avx512_bf16 svm\n"


def lines_of(text: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in text.splitlines()}


def system(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_report_names_what_decides_how_a_run_behaves(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        proc__cpuinfo=CPUINFO,
        proc__meminfo="MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n",
        sys__fs__cgroup__memory_max="1073741824\n",
        sys__fs__cgroup__cpu_max="150000 100000\n",
        sys__fs__cgroup__pids_max="max\n",
    )
    lines = lines_of(about(root))
    assert lines["processor"].startswith("Some CPU, ")
    assert lines["flags"] == "amx_bf16 amx_tile avx512_bf16 fma"
    assert lines["memory"] == "2.0 GiB, 1.0 GiB available"
    assert lines["cgroup"] == "memory 1.0 GiB, CPU 150000 100000"
    assert {"gradus", "python", "system", "verifiers", "msgspec", "gpus"} <= lines.keys()


def test_a_machine_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    lines = lines_of(about(tmp_path))
    assert lines["processor"].startswith("unknown, ")
    assert lines["cgroup"] == "no limit found"


def test_an_nvidia_smi_that_fails_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert lines_of(about(tmp_path))["gpus"].startswith(("unknown: ", "none"))


def test_no_value_of_a_variable_and_no_name_of_person_or_machine_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/home/somebody/cache")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert main(["--version", "--all"]) == 0
    shown = capsys.readouterr().out
    assert {"HF_TOKEN", "VLLM_CACHE_ROOT"} <= set(lines_of(shown)["variables"].split())
    for private in ("secret", "somebody", "WANDB", str(Path.home()), str(Path.cwd())):
        assert private not in shown
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in shown
    assert socket.gethostname() not in shown.split()


def test_version_alone_is_one_line_and_takes_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--version"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["--version", "--al"]) == 64
    assert "only --all may follow, not --al" in capsys.readouterr().err
