"""Which dtype a machine computes fast in, told from texts that the test gives."""

from __future__ import annotations

import pytest

from gradus.errors import ConfigError
from gradus.plan.gpus import FoundGpus, Gpu
from gradus.plan.hardware import Hardware, given_dtype

PLAIN = "processor\t: 0\nflags\t\t: fpu fma avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu fma\n"
AVX512 = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n"
AMX = "flags : avx512f amx_bf16 amx_tile amx_int8\n"
AMX_WITHOUT_BFLOAT16 = "flags : avx512f amx_tile amx_int8\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"
ONE_GPU = FoundGpus((Gpu("0", "NVIDIA L4", None),))


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        (PLAIN, "float32"),
        (AVX512, "bfloat16"),
        (AMX, "bfloat16"),
        (AMX_WITHOUT_BFLOAT16, "float32"),
        (ARM, "float32"),
        ("", "float32"),
    ],
    ids=["plain", "avx512", "amx", "amx_int8", "arm", "unreadable"],
)
def test_a_processor_that_multiplies_bfloat16_gets_it(cpuinfo: str, dtype: str) -> None:
    assert Hardware.read(cpuinfo).dtype() == dtype


def test_a_gpu_that_both_sides_use_decides_for_any_processor() -> None:
    assert Hardware.read(PLAIN, ONE_GPU).dtype() == "bfloat16"


def test_an_engine_on_a_plain_processor_keeps_a_trainer_on_a_gpu_at_its_dtype() -> None:
    found = Hardware.read(PLAIN, ONE_GPU, is_cpu_engine=True)
    assert (found.dtype(), found.dtype(serves=False)) == ("float32", "bfloat16")


def test_a_process_started_by_hand_must_be_told_its_dtype() -> None:
    assert given_dtype("inference.dtype", "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match='"auto" is decided where a run is launched'):
        given_dtype("inference.dtype", "auto")
