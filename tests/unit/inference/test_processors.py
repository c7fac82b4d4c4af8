"""Kinds of processors: the table of docs/numerics.md is what gradus and vLLM choose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker.cpu_worker import CPUWorker

from gradus.inference.engine import precision
from gradus.inference.engine.worker import AmxWorker
from gradus.inference.settings import CPU_BLOCK_TOKENS
from gradus.plan.hardware import Hardware

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PAGE = Path(__file__).parents[3] / "docs" / "numerics.md"
ROW = re.compile(r"^\| (?P<kind>(?:x86|ARM)[^|]*) \| (?P<rest>.*) \|$", re.MULTILINE)
ROWS = {
    row["kind"]: [cell.strip() for cell in row["rest"].split("|")]
    for row in ROW.finditer(PAGE.read_text())
}


def test_the_table_has_every_kind() -> None:
    assert len(ROWS) == 6


@pytest.mark.parametrize("kind", ROWS)
def test_a_processor_gets_the_dtype_and_the_kernels_of_the_table(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, dtype, kernels, trial = ROWS[kind]
    flags = flags.strip("`")
    word = "Features" if kind.startswith("ARM") else "flags"
    here = Hardware.read(f"processor\t: 0\n{word}\t: fp {flags}\n")
    assert here.dtype() == dtype
    assert here.cpu_flags == {"fp", *flags.split()}
    assert (dtype == "bfloat16") == (trial == "the trial")

    capabilities = {name.replace("avx512f", "avx512_f"): True for name in flags.split()}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    architecture = CpuArchEnum.ARM if kind.startswith("ARM") else CpuArchEnum.X86
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: architecture)
    chosen = [_get_attn_isa(getattr(torch, dtype), CPU_BLOCK_TOKENS, size) for size in (64, 80)]
    assert "; ".join(f"`{name}`" for name in chosen) == kernels


def test_the_engines_kernels_agree_with_float32_here_and_a_wrong_one_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert precision.fault() == ""
    right = precision.engine_layer

    def wrong(*inputs: torch.Tensor) -> torch.Tensor:
        result = right(*inputs)
        result[-1] = 0.0
        return result

    monkeypatch.setattr(precision, "engine_layer", wrong)
    assert "computed other numbers than float32" in precision.fault()


def test_a_worker_asks_for_amx_before_it_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: order.append("asks"))
    monkeypatch.setattr(CPUWorker, "init_device", lambda _: order.append("device"))
    worker: Any = object.__new__(AmxWorker)
    worker.init_device()
    assert order == ["asks", "device"]
