"""The packages that come with torch: which of them were built for another torch, and hiding those.

vLLM's CPU build needs `torch==2.13.0+cpu` and any torchvision, torchaudio and torchcodec. An index
that has no CPU build of these gives the CUDA builds, whose import fails, and transformers and vLLM
import them whenever they are installed. Training on text needs none of the three; models that read
images need torchvision's Python part, which works without its compiled one. So `make setup` sets
torchvision apart, where no script finds it but those that ask for it here.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from gradus.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
APART = Path(sysconfig.get_path("purelib")) / "gradus_images"
"""Where `make setup` puts torchvision."""
CUDA_LIBRARY = "libtorch_cuda.so"
"""What every CUDA build of torch has, and every CUDA build of a companion asks the loader for."""
_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "roi_pool"),
    *("_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool"),
    *("_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
)
"""What torchvision's Python part says more about when it is imported, and no processor calls."""


def misfits() -> tuple[str, ...]:
    """The installed companions that this machine's torch cannot load; imports none of them."""
    if _folder("torch") is None or has_cuda_torch():
        return ()
    return tuple(name for name in COMPANIONS if _needs_cuda(_folder(name)))


def has_cuda_torch() -> bool:
    """Whether the installed torch can compute on a GPU of NVIDIA; does not import it."""
    torch = _folder("torch")
    return torch is not None and (torch / "lib" / CUDA_LIBRARY).exists()


def hide_misfits() -> None:
    """Make this process believe that companions which it cannot load are not installed.

    An entry of None is Python's own way to say so: `import` and `find_spec` then find nothing.
    """
    for name in misfits():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    sys.meta_path.insert(0, PilInPlaceOfTorchvision)


def show_torchvision() -> None:
    """Make torchvision importable for the processors of images; nothing where it already is.

    Of a build that this machine's torch cannot load that is its Python part, beside operators that
    cannot be called. Goes before transformers is imported, which asks once. ConfigError where it
    comes later, and where no torchvision is installed, or one for another version of torch.
    """
    if sys.modules.get("torchvision") is not None:
        return
    is_apart = _folder("torchvision") is None
    if is_apart and not APART.is_dir():
        raise ConfigError(f"models that read images need torchvision; {_advice()}")
    if is_apart:
        sys.path.append(str(APART))
    is_misfit = "torchvision" in misfits()
    if (is_apart or is_misfit) and "transformers" in sys.modules:
        raise ConfigError(
            "transformers was imported while torchvision was hidden; call "
            "gradus.companions.show_torchvision() before anything imports transformers"
        )
    if is_misfit:
        sys.modules.pop("torchvision", None)
        library = importlib.import_module("torch.library")
        for name in _OPERATORS:
            library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"torchvision in {_folder('torchvision')} does not fit torch {version('torch')} "
            f"({error}); {_advice()}"
        ) from error


def _advice() -> str:
    return "pip install --no-deps torchvision==0.28.0, which goes with torch 2.13"


class PilInPlaceOfTorchvision:
    """Imports the one module of transformers that vLLM's models of text need torchvision for.

    Those of Qwen 3.5 lie beside its models of images, which import a function for the size of an
    image. transformers has the same function in a module that does without torchvision.
    """

    NAME = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

    @classmethod
    def find_spec(cls, name: str, _: Sequence[str] | None, __: object = None) -> ModuleSpec | None:
        if name != cls.NAME or importlib.util.find_spec("torchvision") is not None:
            return None
        return ModuleSpec(name, cls())  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        pil = importlib.import_module(self.NAME.replace("processing_", "processing_pil_"))
        vars(module)["smart_resize"] = pil.smart_resize
        vars(module)["Qwen2VLImageProcessor"] = pil.Qwen2VLImageProcessorPil


def _folder(package: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = PathFinder.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


def _needs_cuda(folder: Path | None) -> bool:
    return any(CUDA_LIBRARY.encode() in path.read_bytes() for path in _libraries(folder))


def _libraries(folder: Path | None) -> Iterator[Path]:
    return iter(()) if folder is None else folder.rglob("*.so")
