"""The pieces of `benchmarks/gpu_train.py`, on a CPU with a tiny shape: only the device differs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_train.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("gpu_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_train"] = module
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules["gpu_train"]


def build_case(script: Any, **changes: Any) -> Any:
    settings = {"way": "gradus", "shape": "tiny", "tokens": 24, "lora": False, "recompute": "none"}
    settings |= {"device": "cpu", "steps": 2, "micro": 2}
    return script.Case(**(settings | changes))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("way", ["gradus", "transformers"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_way_trains_and_measures(script: Any, way: str, lora: bool, recompute: str) -> None:
    result = script.work(build_case(script, way=way, lora=lora, recompute=recompute))
    assert result["tokens_per_second"] > 0
    assert result["teraflops_per_second"] > 0
    assert result["peak_memory_gib"] > 0
    assert next(iter(result)) == "mfu"
    assert result["mfu"] is None  # a CPU has no known peak
    assert result["kernels"]["attention"] == ("padded" if way == "gradus" else "sdpa")


def test_both_ways_count_the_same_operations(script: Any) -> None:
    flops = []
    for way in ("gradus", "transformers"):
        case = build_case(script, way=way)
        model = script.build_model(case, torch.device("cpu"), "sdpa")
        flops.append(script.ModelFlops.of(model))
    assert flops[0] == flops[1]


@pytest.mark.parametrize(("shape", "billions"), [("0.6B", 0.596), ("1.7B", 1.72), ("4B", 4.02)])
def test_shapes_have_the_size_that_their_names_say(
    script: Any, shape: str, billions: float
) -> None:
    model = script.build_model(build_case(script, shape=shape), torch.device("meta"), "sdpa")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_case_that_does_not_fit_recomputes_more(script: Any) -> None:
    tried = []

    def run(case: Any) -> Any:
        tried.append(case.recompute)
        if case.recompute != "full":
            return script.CaseOutcome(False, "", "torch.OutOfMemoryError: CUDA out of memory.")
        return script.CaseOutcome(True, 'a line of a library\n{"mfu": 0.5}\n', "")

    result = script.measure(build_case(script), run)
    assert (result["recompute"], result["mfu"]) == ("full", 0.5)
    assert tried == ["none", "selective", "full"]
    assert result["tried"] == {"none": "out of memory", "selective": "out of memory"}


def test_a_case_that_never_fits_or_fails_otherwise_says_so(script: Any) -> None:
    full = script.CaseOutcome(False, "", "CUDA out of memory")
    assert script.measure(build_case(script), lambda case: full)["failed"] == "out of memory"
    broken = script.CaseOutcome(False, "", "Traceback\nValueError: heads\n")
    result = script.measure(build_case(script), lambda case: broken)
    assert (result["failed"], result["recompute"]) == ("ValueError: heads", "none")


def test_a_case_that_says_nothing_is_given_up_after_its_deadline(script: Any) -> None:
    result = script.measure(
        build_case(script), lambda case: script.in_a_process(case, seconds=0.05)
    )
    assert result["failed"] == "no answer in 0.05 s"


def test_all_ways_of_a_shape_and_length_stand_side_by_side(script: Any) -> None:
    options = argparse.Namespace(
        shapes=["0.6B", "4B"],
        tokens=[4096],
        ways=list(script.WAYS),
        device="cuda",
        steps=6,
        micro=2,
    )
    found = [(c.shape, c.lora, c.way) for c in script.cases(options)]
    assert len(found) == len(set(found)) == 2 * 2 * 4
    assert [way for _, _, way in found[:4]] == list(script.WAYS)
    assert json.loads(json.dumps(script.asdict(script.cases(options)[0])))["tokens"] == 4096
