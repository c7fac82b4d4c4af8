"""What the doctor's children find in a model's files, in an engine's answers, in a tracker."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradus.cli.doctor import child
from gradus.cli.doctor.child import PARTS, EngineReply
from gradus.errors import ConfigError, DeadlineError, ProtocolError
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model

pytestmark = pytest.mark.torch
PROMPT = [5, 9, 13]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def files(model: Path, **options: Any) -> str:
    return PARTS["files"]({"model": {"name": str(model), **options}})


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_whole_model_is_said_to_be_whole(whole: Path) -> None:
    assert "renderer qwen3 (by its chat template) writes what the template writes" in files(whole)


def cut_off(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def no_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"<html>not found</html>")


def lost_shard(model: Path) -> None:
    index = {
        "weight_map": {"model.layers.7.mlp.up_proj.weight": "model-00002-of-00002.safetensors"}
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def other_vocabulary(model: Path) -> None:
    change(model / "config.json", vocab_size=4096)


def no_head(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file(
        {n: it for n, it in tensors.items() if n != "lm_head.weight"}, model / "model.safetensors"
    )
    change(model / "config.json", tie_word_embeddings=False)


def other_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    highest = max(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"]["beyond"] = highest + 4000
    path.write_text(json.dumps(tokenizer))


def no_stop_token(model: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        if (model / name).exists():
            change(model / name, eos_token_id=0)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["eos_token"] = tokenizer.get("pad_token") or tokenizer.get("unk_token")
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (cut_off, r"model.safetensors has [\d,]+ of [\d,]+ bytes; fetch it again"),
        (no_header, "has no header of safetensors"),
        (lost_shard, "1 tensors of the index are missing, model.layers.7"),
        (other_vocabulary, "vocab_size = 4096, and the embeddings have"),
        (no_head, "no file has lm_head.weight"),
        (other_tokenizer, "it is the tokenizer of another model"),
        (no_stop_token, "no stop token ends a turn: the template ends it with"),
    ],
)
def test_a_fault_in_the_files_of_a_model_is_named(
    model: Path, fault: Callable[[Path], None], said: str
) -> None:
    fault(model)
    with pytest.raises(ConfigError, match=said):
        files(model)


def test_a_renderer_of_another_family_is_named(whole: Path) -> None:
    with pytest.raises(ConfigError, match="cannot use this tokenizer: Special token"):
        files(whole, renderer="llama-3")


def test_a_renderer_that_writes_otherwise_than_the_template_is_named(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text() + "{{ 'x' }}")
    with pytest.raises(ConfigError, match="write other tokens from token"):
        files(model, renderer="qwen3")


class Engine:
    """Answers as the weights say that a fault left it with."""

    def __init__(self, logprob: Callable[[str], float]) -> None:
        self.logprob = logprob
        self.statuses = {"token": 401, "prompt": 400}

    async def post(self, body: Mapping[str, Any], *, token: str | None = None) -> tuple[int, Any]:
        return self.statuses["token" if token else "prompt"], ""

    async def generate(self, prompt: list[int], salt: str, **_: Any) -> EngineReply:
        return EngineReply([1, 2], [self.logprob(salt)] * 2)


class Weights:
    """A reference whose logprobs are its only weight."""

    def __init__(self) -> None:
        self.initial = {"w": torch.tensor([[1.0, -3.0], [2.0, -1.0]])}
        self.load(self.initial)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.now = float(tensors["w"].sum())

    def logprobs(self, prompt: list[int], reply: EngineReply) -> list[float]:
        return [self.now] * 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Any:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.root.mkdir()
    lease = RunLease.take(run_dir)
    yield run_dir
    lease.release()


def versions(run_dir: RunDirectory, *, answers: Callable[[int], int]) -> list[str]:
    """`answers` gives the version that an engine serves when another was sent."""
    sums = {0: float(Weights().initial["w"].sum())}

    async def apply(published: Any) -> Any:
        tensors = load_file(Path(published.directory) / "model.safetensors")
        sums[published.version] = float(tensors["w"].float().sum())
        return SimpleNamespace(apply_seconds=0.1)

    engine = Engine(lambda salt: sums[answers(int(salt[1:]))])
    client = SimpleNamespace(apply=apply, version=0)
    asked = child.versions(engine, client, Weights(), PROMPT, run_dir, "float32")  # type: ignore[arg-type]
    return asyncio.run(asked)


def test_an_engine_that_serves_what_it_was_sent_is_fine(run_dir: RunDirectory) -> None:
    assert versions(run_dir, answers=lambda version: version)[0].startswith("3 versions: each")


def test_an_engine_that_answers_with_the_version_before_is_found(run_dir: RunDirectory) -> None:
    with pytest.raises(ProtocolError, match="version 2 was sent, and what answers is closer to 1"):
        versions(run_dir, answers=lambda version: version - (version == 2))


def test_an_engine_that_computes_another_model_is_found() -> None:
    weights: Any = Weights()
    said = child.compared(weights, PROMPT, EngineReply([1, 2], [-1.0, -1.01]), "bfloat16")
    assert said == "logprobs within 0.005 nats of a float32 forward"
    for logprobs in ([-1.5, -1.5], [float("nan")] * 2):
        with pytest.raises(ProtocolError, match="the engine computes another model"):
            child.compared(weights, PROMPT, EngineReply([1, 2], logprobs), "bfloat16")
    with pytest.raises(ProtocolError):
        child.compared(weights, PROMPT, EngineReply([1, 2], [-1.01, -1.01]), "float32")


@pytest.mark.parametrize(
    ("status", "said"),
    [({"token": 200}, "200 to a wrong bearer token"), ({"prompt": 500}, "500 to token 51")],
)
def test_an_engine_that_answers_strangers_or_strange_tokens_is_found(
    status: dict[str, int], said: str
) -> None:
    engine: Any = Engine(lambda _: 0.0)
    assert asyncio.run(child.refusals(engine, PROMPT, 50)) == [
        "refuses a wrong token of either kind"
    ]
    engine.statuses |= status
    with pytest.raises(ProtocolError, match=said):
        asyncio.run(child.refusals(engine, PROMPT, 50))


def test_an_engine_that_depends_on_the_batch_is_told() -> None:
    class Moody(Engine):
        num_asked = 0
        steady = 0

        async def generate(self, prompt: list[int], salt: str, **_: Any) -> EngineReply:
            self.num_asked += 1
            return EngineReply([1 if self.num_asked <= self.steady else 2], [-0.5])

    engine: Any = Moody(lambda _: 0.0)
    for steady, said in (
        (100, "same alone and in a batch"),
        (2, "in a batch than alone"),
        (1, "asked twice"),
    ):
        engine.steady, engine.num_asked = steady, 0
        assert said in asyncio.run(child.determinism(engine, PROMPT))[0]


def test_a_tracker_takes_a_record_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = PARTS["tracker"]({"monitor": {"type": "tensorboard"}})
    assert said.startswith("1 record sent")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_away_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: Any, **__: Any) -> int:
        raise DeadlineError("wandb: 1 records are not sent: no route to host")

    monkeypatch.setattr("gradus.tracking.follow.process.send_run", send)
    with pytest.raises(DeadlineError, match="no route"):
        PARTS["tracker"]({"monitor": {"type": "wandb"}})
