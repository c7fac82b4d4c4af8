"""Which kernel runs on which device: a table, checked without any of the devices."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention._fa4 as version_4
from gpu_stand_in import HOPPER

import gradus
from gradus.errors import ConfigError
from gradus.trainer.distributed import CPU, training_device
from gradus.trainer.model.gpu.flash import choose_flash_attention
from gradus.trainer.model.kernels import (
    DeviceFacts,
    Platform,
    attention_kernel,
    compiles,
    flash_version,
    fuses_layers,
    gradient_sync,
    head_block,
    head_product,
    own_device,
)

pytestmark = pytest.mark.torch

PLAIN_CPU = DeviceFacts("cpu")
NEW_CPU = DeviceFacts("cpu", has_bfloat16=True)
TURING = replace(HOPPER, capability=(7, 5))
AMPERE = replace(HOPPER, capability=(8, 0))
BLACKWELL = replace(HOPPER, capability=(10, 0))
DESKTOP = replace(HOPPER, capability=(12, 0))
WITH_3 = replace(HOPPER, installed=frozenset({"FA3"}))
WITH_ALL = frozenset({"FA3", "FA4"})
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("facts", "dtype", "head_size", "kernel"),
    [
        (PLAIN_CPU, BF16, 64, "padded"),
        (NEW_CPU, BF16, 64, "padded"),
        (HOPPER, BF16, 128, "varlen"),
        (HOPPER, FP16, 64, "varlen"),
        (HOPPER, FP32, 64, "padded"),
        (HOPPER, BF16, 256, "varlen"),
        (HOPPER, BF16, 264, "padded"),
        (HOPPER, BF16, 60, "padded"),
        (AMPERE, BF16, 64, "varlen"),
        (DESKTOP, BF16, 64, "varlen"),
        (TURING, FP16, 64, "padded"),
        (replace(HOPPER, has_flash=False), BF16, 64, "padded"),
    ],
)
def test_attention(facts: DeviceFacts, dtype: torch.dtype, head_size: int, kernel: str) -> None:
    assert attention_kernel(facts, dtype, head_size) == kernel


@pytest.mark.parametrize(
    ("facts", "version"),
    [
        (PLAIN_CPU, "none"),
        (TURING, "none"),
        (replace(WITH_3, has_flash=False), "none"),
        (AMPERE, "FA2"),
        (HOPPER, "FA2"),
        (WITH_3, "FA3"),
        (replace(AMPERE, installed=WITH_ALL), "FA2"),
        (replace(HOPPER, installed=frozenset({"FA4"})), "FA4"),
        (replace(HOPPER, installed=WITH_ALL), "FA3"),
        (BLACKWELL, "FA2"),
        (replace(BLACKWELL, installed=WITH_ALL), "FA4"),
        (replace(DESKTOP, installed=WITH_ALL), "FA2"),
    ],
)
def test_version_of_flash_attention(facts: DeviceFacts, version: str) -> None:
    assert flash_version(facts) == version


@pytest.mark.parametrize(
    ("facts", "dtype", "product"),
    [
        (PLAIN_CPU, FP32, "plain"),
        (PLAIN_CPU, FP64, "plain"),
        (PLAIN_CPU, BF16, "float32"),
        (NEW_CPU, BF16, "shifted"),
        (NEW_CPU, FP16, "float32"),
        (HOPPER, BF16, "widening"),
        (TURING, FP16, "widening"),
        (HOPPER, FP32, "plain"),
    ],
)
def test_product_of_the_output_layer(facts: DeviceFacts, dtype: torch.dtype, product: str) -> None:
    assert head_product(facts, dtype) == product


@pytest.mark.parametrize(
    ("facts", "vocabulary", "block"),
    [
        (PLAIN_CPU, 152_000, (512, 1024)),
        (PLAIN_CPU, 128, (4096, 128)),
        (HOPPER, 152_000, (4096, 16384)),
        (HOPPER, 1024, (65536, 1024)),
    ],
)
def test_block_of_logits(facts: DeviceFacts, vocabulary: int, block: tuple[int, int]) -> None:
    assert head_block(facts, vocabulary) == block


@pytest.mark.parametrize(
    ("facts", "is_compiled", "expected"),
    [(PLAIN_CPU, False, True), (PLAIN_CPU, True, False), (HOPPER, False, False)],
)
def test_forms_of_a_layer_for_cpus(facts: DeviceFacts, is_compiled: bool, expected: bool) -> None:
    assert fuses_layers(facts, is_compiled=is_compiled) is expected


@pytest.mark.parametrize(
    ("facts", "choice", "expected"),
    [
        (PLAIN_CPU, "auto", False),
        (replace(PLAIN_CPU, can_compile=True), "auto", False),
        (PLAIN_CPU, True, True),
        (HOPPER, "auto", True),
        (HOPPER, False, False),
        (replace(HOPPER, can_compile=False), "auto", False),
        (replace(HOPPER, can_compile=False), True, True),
    ],
)
def test_compiled_layers(facts: DeviceFacts, choice: Any, expected: bool) -> None:
    assert compiles(facts, choice) is expected


@pytest.mark.parametrize(
    ("facts", "choice", "expected"),
    [
        (PLAIN_CPU, "auto", "last"),
        (HOPPER, "auto", "each"),
        (PLAIN_CPU, "each", "each"),
        (HOPPER, "last", "last"),
    ],
)
def test_sums_of_gradients(facts: DeviceFacts, choice: Any, expected: str) -> None:
    assert gradient_sync(facts, choice) == expected


def choose(
    facts: DeviceFacts, activate: Callable[[str], None], restored: list[bool] | None = None
) -> str:
    """Which version runs where all of them compute the same."""
    restore = (restored if restored is not None else []).append
    return choose_flash_attention(
        Platform(facts), activate, lambda: restore(True), lambda _: [torch.ones(2)]
    )


def test_a_newer_version_is_activated_by_the_name_that_torch_knows() -> None:
    activated: list[str] = []
    assert choose(WITH_3, activated.append) == "FA3"
    assert activated == ["FA3"]
    assert {"FA3", "FA4"} <= set(torch.nn.attention.list_flash_attention_impls())


def test_of_version_4_torch_gets_as_many_results_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its package gives five forward and four backward."""
    kernels: Any = ModuleType("flash_attn.cute.interface")
    kernels._flash_attn_fwd = lambda *_, **__: ("result", torch.ones(2), None, None, None)
    kernels._flash_attn_bwd = lambda *_, **__: ("q", "k", "v", "sinks")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    choose_flash_attention(
        Platform(replace(HOPPER, installed=frozenset({"FA4"}))), attend=lambda _: [torch.ones(2)]
    )
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "FA4"
        found = version_4._fa4_run_forward(*[None] * 12)  # type: ignore[arg-type]
        assert found[0] == "result"
        call = (*[None] * 5, torch.ones(2), *[None] * 6)
        assert version_4._fa4_run_backward(*call) == ("q", "k", "v")  # type: ignore[arg-type]
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("facts", [PLAIN_CPU, HOPPER])
def test_without_one_nothing_is_activated(facts: DeviceFacts) -> None:
    activated: list[str] = []
    assert choose_flash_attention(Platform(facts), activated.append) in ("none", "FA2")
    assert activated == []


def test_an_installation_that_does_not_fit_is_reported_and_version_2_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def activate(version: str) -> None:
        raise RuntimeError(f"does not expose {version} kernels")

    restored: list[bool] = []
    with caplog.at_level(logging.WARNING):
        assert choose(WITH_3, activate, restored) == "FA2"
    assert "does not expose FA3 kernels" in caplog.text
    assert restored == [True]


@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_a_version_that_computes_something_else_is_not_used(
    caplog: pytest.LogCaptureFixture, wrong: float
) -> None:
    """Here in one gradient alone."""
    right = [torch.ones(3), torch.ones(2), torch.ones(2)]
    found = iter([right, [right[0], right[1], torch.tensor([1.0, 1.0 + 2 * wrong])]])
    restored: list[bool] = []
    platform = Platform(WITH_3)
    with caplog.at_level(logging.WARNING):
        chosen = choose_flash_attention(
            platform, lambda _: None, lambda: restored.append(True), lambda _: next(found)
        )
    assert chosen == "FA2"
    assert restored == [True]
    assert "away from those of version 2" in caplog.text


def test_this_machine_is_known_by_its_cpu() -> None:
    facts = Platform.of(CPU).facts
    assert facts.kind == "cpu"
    assert facts.installed == frozenset()


def test_a_process_takes_the_gpu_of_its_own_number() -> None:
    assert own_device(0, 3) == CPU
    assert own_device(2, 1) == torch.device("cuda", 1)


def test_a_process_without_a_gpu_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="process 2 of this machine has no GPU: 2 can be seen"):
        own_device(2, 2)


def test_a_run_on_a_machine_without_gpus_trains_on_the_cpu() -> None:
    assert training_device() == CPU


def test_one_function_of_the_trainer_asks_whether_there_is_a_gpu() -> None:
    """`gradus check` looks for itself, without a trainer."""
    root = Path(gradus.__file__).parent / "trainer"
    asking = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for _ in re.finditer(r"cuda\.(is_available|device_count)\(\)", path.read_text())
    ]
    assert asking == ["model/kernels.py"] * 2
