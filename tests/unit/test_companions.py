"""torchvision, torchaudio and torchcodec that do not fit the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradus import companions
from gradus.errors import ConfigError

CUDA_BUILD = b"\x7fELF libtorch_cpu.so libtorch_cuda.so"
CPU_BUILD = b"\x7fELF libtorch_cpu.so"


def install(site: Path, package: str, library: str, content: bytes) -> None:
    """A package with one compiled part, whose import fails like that of a build for other hands."""
    path = site / package / library
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    (site / package / "__init__.py").write_text("raise RuntimeError('operator nms is missing')")


def python(site: Path, program: str) -> str:
    """What a new process prints that finds the packages of `site` first."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of a machine whose torch is a CPU build, with no torchvision set apart."""
    monkeypatch.setattr(companions, "APART", tmp_path / "none")
    install(tmp_path, "torch", "lib/libtorch_cpu.so", CPU_BUILD)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_cuda_builds_beside_a_cpu_torch_are_misfits(site: Path) -> None:
    install(site, "torchvision", "_C.so", CUDA_BUILD)
    install(site, "torchaudio", "lib/_torchaudio.so", CUDA_BUILD)
    install(site, "torchcodec", "libtorchcodec_core7.so", CPU_BUILD)
    assert companions.misfits() == ("torchvision", "torchaudio")


def test_cuda_builds_beside_a_cuda_torch_fit(site: Path) -> None:
    install(site, "torch", "lib/libtorch_cuda.so", CUDA_BUILD)
    install(site, "torchvision", "_C.so", CUDA_BUILD)
    assert companions.misfits() == ()


def test_without_torch_nothing_is_a_misfit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    install(tmp_path, "torchvision", "_C.so", CUDA_BUILD)
    assert companions.misfits() == ()


def test_after_gradus_a_misfit_is_not_installed_for_anybody(site: Path) -> None:
    install(site, "torchvision", "_C.so", CUDA_BUILD)
    program = (
        "import gradus, importlib.util\n"
        "try:\n    import torchvision\n"
        "except ModuleNotFoundError:\n    print(importlib.util.find_spec('torchvision'))"
    )
    assert python(site, program) == "None"


def test_a_companion_that_fits_stays_visible(site: Path) -> None:
    install(site, "torchvision", "_C.so", CPU_BUILD)
    program = "import gradus, importlib.util; print(importlib.util.find_spec('torchvision').name)"
    assert python(site, program) == "torchvision"


def test_who_reads_images_without_torchvision_is_told_what_to_install(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install --no-deps torchvision=="):
        companions.show_torchvision()


def test_who_imported_transformers_before_is_told_the_order(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "torchvision", "_C.so", CUDA_BUILD)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with pytest.raises(ConfigError, match=r"call .*show_torchvision\(\) before anything imports"):
        companions.show_torchvision()


@pytest.mark.torch
@pytest.mark.slow
def test_plain_scripts_run_in_the_environment_of_this_checkout() -> None:
    program = (
        "from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer\n"
        "config = Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, head_dim=4,\n"
        "    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)\n"
        "model = AutoModelForCausalLM.from_config(config)\n"
        "from transformers import Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration\n"
        "import datasets, importlib.util, peft, sys\n"
        "peft.get_peft_model(model, peft.LoraConfig(task_type='CAUSAL_LM'))\n"
        "if importlib.util.find_spec('trl'):\n    from trl import GRPOTrainer, SFTTrainer\n"
        "print(type(model) is Qwen3ForCausalLM, 'gradus' in sys.modules)"
    )
    assert python(Path(), program).splitlines()[-1] == "True False"


@pytest.mark.torch
def test_torchvisions_python_part_is_shown_to_who_reads_images() -> None:
    program = (
        "import gradus.companions as it, sys; it.show_torchvision(); it.show_torchvision()\n"
        "import torch\n"
        "from torchvision.transforms.v2 import functional\n"
        "print(*functional.resize(torch.zeros(3, 4, 6), [2, 3]).shape)"
    )
    assert python(Path(), program) == "3 2 3"


@pytest.mark.torch
def test_torchvision_for_another_torch_is_named(tmp_path: Path) -> None:
    install(tmp_path, "torchvision", "_C.so", CPU_BUILD)
    program = (
        "import gradus.companions as it\n"
        "try:\n    it.show_torchvision()\n"
        "except Exception as error:\n    print(type(error).__name__, 'nms' in str(error))"
    )
    assert python(tmp_path, program) == "ConfigError True"


@pytest.mark.torch
def test_vllms_models_of_text_find_the_size_of_an_image_without_torchvision() -> None:
    name = companions.PilInPlaceOfTorchvision.NAME
    program = (
        "import sys; sys.modules['torchvision'] = None; import gradus\n"
        f"from {name} import smart_resize; print(smart_resize(70, 98))"
    )
    assert python(Path(), program).splitlines()[-1] == "(56, 112)"


def test_with_torchvision_that_module_is_its_own(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    install(site, "torchvision", "_C.so", CPU_BUILD)
    finder = companions.PilInPlaceOfTorchvision
    assert finder.find_spec(finder.NAME, None) is None
    assert finder.find_spec("transformers", None) is None
