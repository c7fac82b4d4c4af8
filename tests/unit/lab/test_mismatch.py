"""What makes trainer and engine disagree: a fault of each kind is put in, and named first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from run_folders import a_run
from safetensors.torch import load_file, save_file

from gradus.cli.main import main
from gradus.config import RunConfig
from gradus.errors import ConfigError, ExitCode
from gradus.monitor.token_record import TokenRecord, pack_records, record_file
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model
from gradus_lab import mismatch as m
from gradus_lab import rescoring
from gradus_lab.rescoring import (
    BARE,
    FACTORS,
    OWN,
    Nats,
    SamplingCut,
    StoredSample,
    WeightsOnDisk,
)

pytestmark = pytest.mark.torch
ONES = len(FACTORS)
"""The column of temperature 1."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Rows this short are not worth waking others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is surer of its words than a random one is."""
    folder = build_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1, dtype=torch.float32
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 40 * tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Case:
    """A run of one step whose tokens are made up from the scores of a fault."""

    root: Path
    base: Path
    scratch: Path
    settings: dict[str, Any]
    step: int = 0

    @property
    def config(self) -> RunConfig:
        values = {"model": {"name": str(self.base)}, "max_steps": 9, **self.settings}
        train = values.setdefault("orchestrator", {}).setdefault("train", {})
        train["env"] = [{"id": "words"}]
        values.setdefault("inference", {}).setdefault("dtype", "float32")
        values.setdefault("trainer", {}).setdefault("compute_dtype", "float32")
        return RunConfig.model_validate(values)

    @property
    def weights(self) -> WeightsOnDisk:
        return WeightsOnDisk(RunDirectory(self.root), self.base, self.scratch)

    def samples(self, *, sampled_by: int | None = None) -> list[StoredSample]:
        random = np.random.default_rng(7)
        temperature = self.config.orchestrator.train.sampling.temperature or 1.0
        found = []
        for number in range(4):
            length = 24 + number
            trained = np.arange(length) >= 6
            empty = np.zeros(int(trained.sum()), np.float32)
            versions = [] if sampled_by is None else [(-1, 6), (sampled_by, length - 6)]
            ids = random.integers(10, 100, length).astype(np.int32)
            name = f"g00000{number}.0/0/0"
            record = TokenRecord(
                *(name, 1, versions, ids, trained, empty, empty, empty, empty, {"rl": empty}, empty)
            )
            found.append(StoredSample(record, self.step, temperature))
        return found

    def scores(
        self,
        samples: Sequence[StoredSample],
        version: int = 0,
        mode: str = "as trained",
        dtype: str = "float32",
    ) -> rescoring.Scores:
        model = self.weights.model(version, mode)
        return rescoring.plain_scores(
            model, samples, [SamplingCut(), SamplingCut(top_p=0.8)], dtype
        )


@pytest.fixture
def case(tmp_path: Path, base: Path) -> Case:
    (tmp_path / "scratch").mkdir()
    return Case(tmp_path / "run", base, tmp_path / "scratch", {})


def said(samples: Sequence[StoredSample], engine: Nats, trainer: Nats) -> list[StoredSample]:
    """The samples with these numbers noted."""
    noted, start = [], 0
    for it in samples:
        part = slice(start, start := start + len(it.places))
        numbers = {"sampling_logprobs": engine[part], "policy_logprobs": trainer[part]}
        changed = {name: value.astype(np.float32) for name, value in numbers.items()}
        noted.append(replace(it, record=replace_record(it.record, **changed)))
    return noted


def replace_record(record: TokenRecord, **changes: Any) -> TokenRecord:

    return msgspec.structs.replace(record, **changes)


def packed_of(case: Case) -> Callable[..., Nats]:
    """Packing that changes nothing, without the trainer's model, which takes seconds to build."""

    def packed(folder: Path, own: Sequence[StoredSample], heat: Sequence[float], _: object) -> Nats:
        version = case.step
        heated = [replace(it, temperature=value) for it, value in zip(own, heat, strict=True)]
        dtype = case.config.trainer.compute_dtype
        return case.scores(heated, version, dtype=dtype).by_temperature[:, OWN]

    return packed


def first_cause(
    case: Case, samples: Sequence[StoredSample], engine: Nats, trainer: Nats, **own: Any
) -> tuple[m.Cause, m.Splitting]:
    own.setdefault("packed", packed_of(case))
    found = m.split(said(samples, engine, trainer), case.weights, case.config, **own)
    together = sum(cause.nats for cause in found.causes)
    np.testing.assert_allclose(together, found.gap, atol=1e-6)
    return found.causes[0], found


def another_version(case: Case, version: int) -> None:
    folder = case.root / "weights" / f"version_{version:08d}"
    folder.mkdir(parents=True)
    for path in case.base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    random = torch.Generator().manual_seed(version)
    tensors = {
        name: it + 0.1 * it.std() * torch.randn(it.shape, generator=random) if it.ndim > 1 else it
        for name, it in load_file(case.base / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_go_by_their_step_and_not_by_the_term_behind_it(case: Case) -> None:
    for name in ("step_00000004", "step_00000006.term_00000002", "step_00000008.damaged"):
        (case.root / "checkpoints" / name).mkdir(parents=True)
    (case.root / "weights" / "version_00000009").mkdir(parents=True)
    assert sorted(case.weights.folders) == [0, 4, 6, 9]
    assert case.weights.folders[6].name == "step_00000006.term_00000002"


def test_numbers_that_agree_have_no_cause(case: Case) -> None:
    samples = case.samples()
    plain = case.scores(samples).by_temperature[:, OWN]
    first, found = first_cause(case, samples, plain, plain)
    assert first.size < 1e-6
    assert [cause.note for cause in found.causes if cause.note not in ("", "no cut")] == []


def test_a_trainer_at_another_temperature_is_named(case: Case) -> None:
    case.settings = {"orchestrator": {"train": {"sampling": {"temperature": 0.7}}}}
    samples = case.samples()
    scores = case.scores(samples)
    first, _ = first_cause(
        case, samples, scores.by_temperature[:, OWN], scores.by_temperature[:, ONES]
    )
    assert (first.name, first.note) == (m.TEMPERATURE, "engine at 0.7, trainer at 1")


def test_an_engine_at_another_temperature_is_named(case: Case) -> None:
    samples = case.samples()
    scores = case.scores(samples)
    first, _ = first_cause(
        case, samples, scores.by_temperature[:, OWN + 8], scores.by_temperature[:, OWN]
    )
    assert (first.name, first.note) == (m.TEMPERATURE, "engine at 1.27, trainer at 1")


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_nucleus_is_named_also_where_the_config_does_not_say_it(
    case: Case, is_declared: bool
) -> None:
    if is_declared:
        case.settings = {"orchestrator": {"train": {"sampling": {"top_p": 0.8}}}}
    samples = case.samples()
    scores = case.scores(samples)
    first, _ = first_cause(case, samples, scores.by_cut[:, 1], scores.by_temperature[:, OWN])
    assert (first.name, first.note) == (m.SAMPLING, "top_p 0.8")


def test_the_dtype_of_the_engine_is_named(case: Case) -> None:
    case.settings = {"inference": {"dtype": "bfloat16"}}
    samples = case.samples()
    rounded = case.scores(samples, dtype="bfloat16").by_temperature[:, OWN]
    first, _ = first_cause(case, samples, rounded, case.scores(samples).by_temperature[:, OWN])
    assert first.name == m.ENGINE_DTYPE


def test_the_dtype_of_the_trainer_is_named(case: Case) -> None:
    case.settings = {"trainer": {"compute_dtype": "bfloat16"}}
    samples = case.samples()
    rounded = case.scores(samples, dtype="bfloat16").by_temperature[:, OWN]
    first, _ = first_cause(case, samples, case.scores(samples).by_temperature[:, OWN], rounded)
    assert first.name == m.TRAINER_DTYPE


def test_kernels_that_compute_otherwise_are_the_engines(case: Case) -> None:
    samples = case.samples()
    plain = case.scores(samples).by_temperature[:, OWN]
    noise = np.random.default_rng(1).normal(0, 0.05, len(plain))
    first, _ = first_cause(case, samples, plain + noise, plain)
    assert first.name == m.KERNELS


def test_tokens_of_older_weights_are_stale(case: Case) -> None:
    case.step = 1
    another_version(case, 1)
    samples = case.samples(sampled_by=0)
    old, new = (
        case.scores(samples, 0).by_temperature[:, OWN],
        case.scores(samples, 1).by_temperature[:, OWN],
    )
    first, _ = first_cause(case, samples, old, new)
    assert first.name == m.LAG


def test_an_engine_that_serves_other_weights_than_it_says_is_named(case: Case) -> None:
    case.step = 1
    another_version(case, 1)
    samples = case.samples(sampled_by=1)
    old, new = (
        case.scores(samples, 0).by_temperature[:, OWN],
        case.scores(samples, 1).by_temperature[:, OWN],
    )
    first, _ = first_cause(case, samples, old, new)
    assert (first.name, first.note) == (m.STALE, "version 0 answered throughout")


def test_other_weights_are_named_also_where_the_config_cuts(case: Case) -> None:
    case.settings = {"orchestrator": {"train": {"sampling": {"top_p": 0.8}}}}
    case.step = 2
    for version in (1, 2):
        another_version(case, version)
    samples = case.samples(sampled_by=2)
    engine = case.scores(samples, 1).by_cut[:, 1]
    _, found = first_cause(case, samples, engine, case.scores(samples, 2).by_temperature[:, OWN])
    sizes = {cause.name: cause for cause in found.causes}
    assert sizes[m.KERNELS].size < 1e-6
    assert sizes[m.STALE].note == "version 1 answered throughout"


def test_an_engine_without_the_adapter_is_named(case: Case) -> None:
    case.settings = {"trainer": {"lora": {"rank": 2, "serve": "adapter"}}}
    case.step = 1
    folder = case.root / "weights" / "version_00000001"
    folder.mkdir(parents=True)
    settings = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": str(case.base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.mlp.up_proj"
    weight = load_file(case.base / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    random = torch.Generator().manual_seed(3)
    factors = {
        f"{name}.lora_A.weight": torch.randn(2, weight.shape[1], generator=random),
        f"{name}.lora_B.weight": torch.randn(weight.shape[0], 2, generator=random),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    samples = case.samples(sampled_by=1)
    bare, whole = (
        case.scores(samples, 1, BARE).by_temperature[:, OWN],
        case.scores(samples, 1).by_temperature[:, OWN],
    )
    first, _ = first_cause(case, samples, bare, whole)
    assert (first.name, first.note) == (m.ADAPTER, "the engine's adapter was left out")
    _, fine = first_cause(case, samples, whole, whole)
    assert fine.causes[0].size < 1e-6


def test_a_row_that_leaks_from_sample_to_sample_is_the_shape_of_the_batch(case: Case) -> None:
    samples = case.samples()
    plain = case.scores(samples).by_temperature[:, OWN]
    leak = np.linspace(-0.2, 0.2, len(plain))
    first, _ = first_cause(case, samples, plain, plain + leak, packed=lambda *_: plain + leak)
    assert first.name == m.PACKING


def test_what_nothing_explains_is_said_to_be_so(case: Case) -> None:
    samples = case.samples()
    plain = case.scores(samples).by_temperature[:, OWN]
    odd = plain - np.random.default_rng(2).normal(0, 0.3, len(plain))
    first, _ = first_cause(case, samples, plain, odd)
    assert first.name == m.REST


def test_text_that_was_tokenised_again_is_named(case: Case) -> None:
    samples = case.samples()
    plain = case.scores(samples).by_temperature[:, OWN]
    engine = plain.copy()
    engine[: len(samples[0].places)] -= 2.0
    names = frozenset({samples[0].record.sample_id})
    first, _ = first_cause(case, samples, engine, plain, retokenised=names)
    assert (first.name, first.note) == (m.RETOKENISED, "1 samples")


class Node:
    def __init__(self, token_ids: list[int], *, sampled: bool) -> None:
        self.token_ids, self.sampled = token_ids, sampled


def test_tokens_stand_as_they_were_sent_or_not(case: Case) -> None:
    record = case.samples()[0].record
    ids = record.token_ids.tolist()

    def episode(*nodes: Node) -> Any:
        return type("E", (), {"traces": [type("T", (), {"nodes": nodes})]})

    whole = episode(Node(ids[:6], sampled=False), Node(ids[6:], sampled=True))
    assert m._stands(whole, record)
    other = episode(Node(ids[:6], sampled=False), Node([*ids[6:-1], 3], sampled=True))
    assert not m._stands(other, record)


# The command.
def write(case: Case, samples: Sequence[StoredSample]) -> None:
    dumped = case.config.model_dump(mode="json")
    a_run(case.root, changes=dumped)
    path = record_file(RunDirectory(case.root), case.step, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_records([it.record for it in samples]))


def test_the_command_names_the_cause_with_its_worst_tokens(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = case.samples(sampled_by=0)
    scores = case.scores(samples)
    write(case, said(samples, scores.by_temperature[:, OWN], scores.by_temperature[:, OWN + 8]))
    assert main(["lab", "mismatch", str(case.root), "--json", "--tokens", "60"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["cause"] == m.TEMPERATURE
    assert len(found["causes"][0]["worst"]) == m.WORST
    assert 60 <= found["tokens"] < 80
    assert "re-tokenised text: the run keeps no replay" in found["not_looked_at"]
    packing = next(row for row in found["causes"] if row["cause"] == m.PACKING)
    assert packing["nats_per_token"] < 1e-4


def test_a_run_whose_weights_are_gone_is_refused_and_others_are_counted(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.step = 3
    samples = case.samples(sampled_by=3)
    plain = case.scores(samples).by_temperature[:, OWN]
    write(case, said(samples, plain, plain))
    assert main(["lab", "mismatch", str(case.root)]) == ExitCode.CONFIG
    assert "are gone (left: 0)" in capsys.readouterr().err
    path = record_file(RunDirectory(case.root), 0, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_records([it.record for it in said(case.samples(), plain, plain)]))
    chosen, left_out = m._choose(RunDirectory(case.root), case.config, case.weights, 10_000)
    assert (len(chosen), left_out) == (4, 4)


@pytest.mark.parametrize(
    ("words", "said_"),
    [
        (["nowhere"], "is not a folder of a run"),
        (["nowhere", "--tokens", "0"], "--tokens 0"),
        (["nowhere", "--max-steps", "3"], "--max-steps"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], said_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "mismatch", *words]) == ExitCode.CONFIG
    assert said_ in capsys.readouterr().err


def test_a_run_without_tokens_and_one_of_another_kind_are_refused(case: Case) -> None:
    a_run(case.root, changes=case.config.model_dump(mode="json"))
    with pytest.raises(ConfigError, match="keeps no tokens"):
        m.examine_mismatch(case.root, 100, case.scratch)
    launched = case.root / "config" / "launched.json"
    launched.write_text(launched.read_text().replace('"rl"', '"sft"', 1))
    with pytest.raises(ConfigError, match="of kind 'sft'"):
        m.examine_mismatch(case.root, 100, case.scratch)
