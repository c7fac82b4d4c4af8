"""What nvidia-smi says, with a script in its place: output, faults, and the shell's list."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gradus.plan.gpus import FoundGpus, Gpu, find_gpus

H100 = "NVIDIA H100 80GB HBM3"
ROWS = [f"{n}, GPU-{n}{n}aa-0000-{n}, {H100}, 81559" for n in range(8)]


def found(
    tmp_path: Path, script: str, *, visible: str | None = None, **changes: float
) -> FoundGpus:
    """What is found on a machine whose nvidia-smi is this shell script."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    return find_gpus(variables, is_usable=True, **changes)


def printing(rows: list[str]) -> str:
    return "cat <<'END'\n" + "\n".join(rows) + "\nEND"


def test_every_gpu_of_the_machine_is_found_with_its_memory(tmp_path: Path) -> None:
    seen = found(tmp_path, printing(ROWS[:2]))
    assert [gpu.device for gpu in seen.gpus] == ["0", "1"]
    assert seen.gpus[0] == Gpu("0", H100, 81559 << 20, "GPU-00aa-0000-0")
    assert seen.gpus[0].description == f"{H100}, 79.6 GiB"
    assert (seen.why_none, seen.is_broken) == ("", False)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("2,3", ["2", "3"]),
        ("3, 2", ["3", "2"]),
        ("GPU-55aa-0000-5,GPU-1", ["GPU-55aa-0000-5", "GPU-1"]),
        ("4,-1,5", ["4"]),
        ("MIG-6f2c,0", ["MIG-6f2c", "0"]),
    ],
)
def test_the_list_of_the_shell_decides_which_and_in_what_order(
    tmp_path: Path, visible: str, devices: list[str]
) -> None:
    seen = found(tmp_path, printing(ROWS), visible=visible)
    assert [gpu.device for gpu in seen.gpus] == devices


def test_a_part_of_a_gpu_has_no_known_memory(tmp_path: Path) -> None:
    seen = found(tmp_path, printing(ROWS[:1]), visible="MIG-6f2c")
    assert seen.gpus[0].description == "part of a GPU (MIG), memory unknown"


@pytest.mark.parametrize(
    ("visible", "text"),
    [
        ("0,9", "names '9', and the GPUs of this machine are 0, 1"),
        ("0,zero", "names 'zero'"),
        ("GPU-", "names 2 GPUs with 'GPU-'"),
        ("0,0", "names 0 twice"),
        ("0,GPU-00aa", "names GPU-00aa twice"),
        ("0,", "names ''"),
    ],
)
def test_a_list_that_names_what_is_not_there_is_no_silent_shorter_list(
    tmp_path: Path, visible: str, text: str
) -> None:
    seen = found(tmp_path, printing(ROWS[:2]), visible=visible)
    assert text in seen.why_none
    assert (seen.gpus, seen.is_broken) == ((), True)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_shell_that_hides_all_gpus_is_not_asked(tmp_path: Path, visible: str) -> None:
    seen = found(tmp_path, f"touch {tmp_path}/asked", visible=visible)
    assert "hides all" in seen.why_none
    assert not seen.is_broken
    assert not (tmp_path / "asked").exists()


def test_the_list_of_the_shell_does_not_reach_nvidia_smi(tmp_path: Path) -> None:
    script = f'echo "$CUDA_VISIBLE_DEVICES" > {tmp_path}/seen\n{printing(ROWS)}'
    assert len(found(tmp_path, script, visible="2").gpus) == 1
    assert (tmp_path / "seen").read_text() == "\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
            "(exit code 18): Failed to",
        ),
        ("exit 9", "(exit code 9): no message"),
        ("echo hello", "nvidia-smi printed 'hello'"),
        ("echo 0, GPU-1, name with, comma, 5", "nvidia-smi printed"),
        ("head -c 64 /dev/urandom", "nvidia-smi printed"),
    ],
)
def test_a_broken_nvidia_smi_is_named_and_not_taken_for_a_machine_without_gpus(
    tmp_path: Path, script: str, text: str
) -> None:
    seen = found(tmp_path, script)
    assert text in seen.why_none
    assert seen.is_broken


@pytest.mark.parametrize(
    "around",
    [
        "{}; echo 'WARNING: infoROM is corrupted at gpu 0000:01:00.0'; exit 14",
        "echo 'ERROR: ld.so: object tcmalloc.so cannot be preloaded: ignored.' >&2; {}",
    ],
)
def test_a_warning_beside_a_whole_list_hides_no_gpu(tmp_path: Path, around: str) -> None:
    script = around.format("; ".join(f"echo {row}" for row in ROWS[:2]))
    seen = found(tmp_path, script)
    assert [gpu.device for gpu in seen.gpus] == ["0", "1"]


def test_a_failure_that_is_told_on_stderr_is_named(tmp_path: Path) -> None:
    assert "(exit code 9): no driver" in found(tmp_path, "echo no driver >&2; exit 9").why_none


def test_an_nvidia_smi_that_hangs_is_left_behind_after_the_deadline(tmp_path: Path) -> None:
    begun = time.monotonic()
    seen = found(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 60", deadline_seconds=1.0)
    assert "did not answer in 1 s" in seen.why_none
    assert seen.is_broken
    assert time.monotonic() - begun < 20
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize("script", ["echo No devices were found; exit 6", "true"])
def test_a_driver_without_gpus_is_a_machine_without_gpus(tmp_path: Path, script: str) -> None:
    seen = found(tmp_path, script)
    assert (seen.why_none, seen.is_broken) == ("nvidia-smi lists none", False)


def test_memory_that_nvidia_smi_does_not_know_is_unknown(tmp_path: Path) -> None:
    assert found(tmp_path, "echo '0, GPU-1, NVIDIA GB10, [N/A]'").gpus[0].memory_bytes is None


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path: Path) -> None:
    seen = find_gpus({"PATH": str(tmp_path)}, is_usable=True, driver=tmp_path / "version")
    assert (seen.why_none, seen.is_broken) == ("nvidia-smi is not on the PATH", False)


def test_a_driver_without_nvidia_smi_says_what_is_missing(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.touch()
    seen = find_gpus({"PATH": str(tmp_path)}, is_usable=True, driver=driver)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in seen.why_none
    assert seen.is_broken


def test_a_torch_for_cpus_has_no_gpus_wherever_it_runs() -> None:
    assert "build for CPUs" in find_gpus(os.environ, is_usable=False).why_none
