"""docs/gpu.md is linked, and the report of a GPU tells no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_report
import pytest

ROOT = Path(__file__).parents[3]


def test_the_page_says_what_has_not_run_and_is_linked() -> None:
    assert "**vLLM, two GPUs and nccl have not**" in (ROOT / "docs" / "gpu.md").read_text()
    assert "docs/gpu.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_SecretSecret",
        "Authorization: Bearer SecretSecret",
        '{"Authorization": "Basic SecretSecret"}',
        "ghp_SecretSecret",
        "https://me:SecretSecret@proxy:8080/",
        "api_key=SecretSecret",
        "password: SecretSecret",
        "5ec2e7" * 8,
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str) -> None:
    masked = gpu_report.masked(f"before {text} after")
    assert "Secret" not in masked
    assert "5ec2e7" not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


def test_numbers_that_are_named_after_tokens_stay() -> None:
    text = '{"throughput/trained_tokens_per_second": 5231.5, "tokenizer": "Qwen/Qwen3-0.6B"}'
    assert gpu_report.masked(text) == text


@pytest.mark.torch
def test_a_report_holds_versions_configs_and_the_end_of_logs(tmp_path: Path) -> None:
    for folder in ("config", "logs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config" / "trainer.json").write_text('{"term": 1}')
    (tmp_path / "logs" / "trainer.log").write_text("\n".join(f"line {n}" for n in range(900)))
    script = Path(gpu_report.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert "torch 2." in done.stdout
    assert "===== nvidia-smi\nnot installed" in done.stdout
    assert '{"term": 1}' in done.stdout
    assert "(600 lines before)\nline 600\n" in done.stdout
    assert "line 899" in done.stdout


def test_a_report_of_a_folder_that_is_not_there_is_refused() -> None:
    script = Path(gpu_report.__file__)
    words = [sys.executable, str(script), "runs/none"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such folder" in done.stderr
