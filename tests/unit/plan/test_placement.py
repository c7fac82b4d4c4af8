"""Which process gets which GPUs, on machines that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.placement import GpuWish, Placement, place

GIB = 1 << 30


def machine(*devices: str) -> FoundGpus:
    return FoundGpus(
        tuple(Gpu(device, "NVIDIA L4", 22 * GIB, f"GPU-{device}") for device in devices)
    )


def placed(
    found: FoundGpus,
    *,
    engine: Sequence[int] | None = None,
    trainer: Sequence[int] | None = None,
    counts: tuple[int, int] = (1, 1),
    may_share: bool = False,
) -> Placement:
    engine_key = "inference.tensor_parallel_size"
    wishes = {
        "inference": GpuWish(("inference", "gpus"), engine, counts[0], engine_key, False),
        "trainer": GpuWish(("trainer", "gpus"), trainer, counts[1], "trainer.num_processes", True),
    }
    return place(wishes, found, may_share=may_share)


def refusal(placement: Placement) -> str:
    (problem,) = placement.refusals
    return str(problem)


def test_the_engine_takes_the_first_gpus_and_the_trainer_the_next() -> None:
    eight = machine(*"01234567")
    assert placed(eight).gpus == {"inference": (0,), "trainer": (1,)}
    assert placed(eight, counts=(4, 4)).gpus == {
        "inference": (0, 1, 2, 3),
        "trainer": (4, 5, 6, 7),
    }


def test_what_is_listed_is_kept_and_the_rest_is_free_for_the_other() -> None:
    assert placed(machine("0", "1"), engine=[1]).gpus == {"inference": (1,), "trainer": (0,)}
    assert placed(machine(*"0123"), trainer=[1, 0], counts=(2, 2)).gpus == {
        "inference": (2, 3),
        "trainer": (1, 0),
    }


def test_one_gpu_for_two_is_refused_with_what_to_write() -> None:
    text = refusal(placed(machine("0")))
    assert text.startswith("trainer.gpus: this shell has 1 GPU (NVIDIA L4, 22.0 GiB)")
    assert 'write inference.gpu_sharing = "turns"' in text
    assert "inference wants 1 (inference.tensor_parallel_size)" in text
    assert "trainer wants 1 (trainer.num_processes)" in text


def test_one_gpu_is_shared_when_that_is_allowed() -> None:
    placement = placed(machine("0"), may_share=True)
    assert placement.gpus == {"inference": (0,), "trainer": (0,)}
    assert placement.shared() == {0}


def test_a_trainer_on_the_cpu_leaves_the_only_gpu_to_the_engine() -> None:
    found = machine("7")
    placement = placed(found, trainer=[])
    assert placement.variables("trainer", found, {})["CUDA_VISIBLE_DEVICES"] == ""
    assert placement.variables("inference", found, {})["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"engine": [0, 1], "trainer": [1], "counts": (2, 1)},
            "trainer.gpus: [1]: GPU 1 belongs to inference.gpus too",
        ),
        ({"engine": [4]}, "inference.gpus: [4]: there is no GPU 4; this shell has 4: 0 to 3"),
        ({"trainer": [-1]}, "trainer.gpus: [-1]: there is no GPU -1"),
        ({"trainer": [1, 1], "counts": (1, 2)}, "trainer.gpus: [1, 1] names a GPU twice"),
        (
            {"trainer": [1, 2]},
            "trainer.gpus: [1, 2] has 2 GPUs, and trainer.num_processes = 1 computes on 1 GPU",
        ),
        (
            {"engine": [0], "counts": (2, 1)},
            "inference.gpus: [0] has 1 GPU, and inference.tensor_parallel_size = 2",
        ),
        ({"engine": []}, "inference.gpus: []: vLLM's build for GPUs serves on no CPU"),
        (
            {"counts": (4, 1)},
            "trainer.gpus: this shell has 4 GPUs (NVIDIA L4, 22.0 GiB), and inference",
        ),
        (
            {"may_share": True, "engine": [0], "trainer": [1]},
            "inference.gpu_sharing: the engine and the trainer have no GPU in common",
        ),
    ],
)
def test_what_does_not_add_up_is_refused_with_key_and_numbers(
    changes: dict[str, object], text: str
) -> None:
    placement = placed(machine(*"0123"), **changes)  # type: ignore[arg-type]
    assert refusal(placement).startswith(text)


@pytest.mark.parametrize("devices", [("2", "3"), ("GPU-8932f937", "MIG-aa/1/0")])
def test_a_process_sees_its_gpus_by_the_names_that_the_shell_gave_them(
    devices: tuple[str, str],
) -> None:
    found = machine(*devices)
    placement = placed(found)
    for process, device in zip(("inference", "trainer"), devices, strict=True):
        assert placement.variables(process, found, {}) == {
            "CUDA_VISIBLE_DEVICES": device,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }


def test_an_order_that_the_shell_chose_stays() -> None:
    found = machine("0", "1")
    given = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    variables = placed(found).variables("trainer", found, given)
    assert variables["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_without_gpus_nothing_is_placed_and_nothing_changes() -> None:
    none = FoundGpus(why_none="nvidia-smi is not on the PATH")
    placement = placed(none, trainer=[])
    assert (placement.gpus, placement.refusals) == ({}, ())
    assert placement.variables("trainer", none, {}) == {}


def test_asking_for_gpus_where_there_are_none_is_refused() -> None:
    none = FoundGpus(why_none="nvidia-smi is not on the PATH")
    text = refusal(placed(none, trainer=[0]))
    assert text == (
        "trainer.gpus: [0]: there is no GPU here: nvidia-smi is not on the PATH; remove the key"
    )
    assert refusal(placed(none, may_share=True)).startswith(
        "inference.gpu_sharing: there is no GPU here that could be shared"
    )


def test_gpus_that_cannot_be_counted_are_not_taken_for_none() -> None:
    broken = FoundGpus(why_none="nvidia-smi did not answer in 20 s", is_broken=True)
    placement = placed(broken)
    assert [it.path for it in placement.refusals] == [("inference", "gpus"), ("trainer", "gpus")]
    assert 'export CUDA_VISIBLE_DEVICES=""' in placement.refusals[0].message
