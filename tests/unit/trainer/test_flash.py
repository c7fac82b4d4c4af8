"""Which attention a GPU gets, decided without one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from gradus.trainer.model.gpu import flash

pytestmark = pytest.mark.torch

GPU = torch.device("cuda", 0)
Machine = Callable[..., list[str]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Pretends to be a machine with a GPU; what it activates is in the list that it gives."""

    def pretend(
        *,
        capability: tuple[int, int] = (9, 0),
        has_kernels: bool = True,
        has_version_3: bool = False,
        problem: Exception | None = None,
    ) -> list[str]:
        activated: list[str] = []

        def activate(name: str) -> None:
            if problem is not None:
                raise problem
            activated.append(name)

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(flash, "is_flash_attention_available", lambda: has_kernels)
        monkeypatch.setattr(flash, "find_spec", lambda name: object() if has_version_3 else None)
        monkeypatch.setattr(flash, "activate_flash_attention_impl", activate)
        flash._has_kernel.cache_clear()
        return activated

    yield pretend
    flash._has_kernel.cache_clear()


def test_a_cpu_has_none() -> None:
    assert not flash.has_flash_attention(torch.device("cpu"))
    assert flash.choose_flash_attention(torch.device("cpu")) == "none"


@pytest.mark.parametrize(
    ("capability", "has_kernels", "expected"),
    [((7, 5), True, False), ((8, 0), True, True), ((12, 0), True, True), ((9, 0), False, False)],
)
def test_gpus_since_ampere_have_torchs_kernel_if_it_was_built(
    machine: Machine, capability: tuple[int, int], has_kernels: bool, expected: bool
) -> None:
    machine(capability=capability, has_kernels=has_kernels)
    assert flash.has_flash_attention(GPU) is expected
    assert flash.choose_flash_attention(GPU) == ("FA2" if expected else "none")


def test_version_3_runs_where_it_is_installed_on_hopper(machine: Machine) -> None:
    activated = machine(has_version_3=True)
    assert flash.choose_flash_attention(GPU) == "FA3"
    assert activated == ["FA3"]


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_version_3_is_left_alone_on_other_gpus(
    machine: Machine, capability: tuple[int, int]
) -> None:
    activated = machine(capability=capability, has_version_3=True)
    assert flash.choose_flash_attention(GPU) == "FA2"
    assert activated == []


def test_an_installation_that_does_not_fit_is_reported_and_version_2_stays(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine(has_version_3=True, problem=RuntimeError("does not expose FA3 kernels"))
    with caplog.at_level(logging.WARNING):
        assert flash.choose_flash_attention(GPU) == "FA2"
    assert "does not expose FA3 kernels" in caplog.text


def test_torch_knows_version_3_by_the_name_used_here() -> None:
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()
