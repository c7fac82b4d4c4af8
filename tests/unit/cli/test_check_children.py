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

from gradus.cli.check import engine as asking
from gradus.cli.check.engine import EngineReply, PlainModel
from gradus.cli.check.stepping import plain_step
from gradus.cli.check.trying import PARTS
from gradus.config import BenchConfig, LoraConfig, ModelConfig, TrainerConfig
from gradus.errors import ConfigError, DeadlineError, ProtocolError
from gradus.run.lease import RunLease
from gradus.run.paths import RunDirectory
from gradus.testing.tiny_model import build_tiny_model
from gradus.trainer.distributed import join_world
from gradus.trainer.entry.bench import MadeUpBatches
from gradus.trainer.ladder import Ladder
from gradus.trainer.learner import Learner

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
    ("fault", "title"),
    [
        (cut_off, "a file of weights that is cut off"),
        (no_header, "a page of HTML in the place of weights"),
        (lost_shard, "a file of weights that is missing"),
        (other_vocabulary, "the config of another model"),
        (no_head, "weights without their head"),
        (other_tokenizer, "the tokenizer of another model"),
        (no_stop_token, "no stop token"),
    ],
)
def test_a_fault_in_the_files_of_a_model_is_named(
    model: Path, fault: Callable[[Path], None], title: str
) -> None:
    fault(model)
    with pytest.raises(ConfigError):
        files(model)


def test_a_renderer_of_another_family_is_named(whole: Path) -> None:
    with pytest.raises(ConfigError):
        files(whole, renderer="llama-3")


def test_a_renderer_that_writes_otherwise_than_the_template_is_named(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text() + "{{ 'x' }}")
    with pytest.raises(ConfigError):
        files(model, renderer="qwen3")


class Engine:
    """Answers with one logprob, which `logprob` tells for a salt and a prompt."""

    def __init__(self, logprob: Callable[[str, list[int]], float]) -> None:
        self.logprob = logprob
        self.statuses = {"token": 401, "prompt": 400}

    async def post(
        self, body: Any, *, token: str | None = None, route: str = ""
    ) -> tuple[int, Any]:
        return self.statuses["token" if token else "prompt"], ""

    async def generate(self, prompt: list[int], salt: str, **_: Any) -> EngineReply:
        return EngineReply([1, 2], [self.logprob(salt, prompt)] * 2)


class Weights:
    """A reference whose logprobs are its only weight."""

    def __init__(self) -> None:
        self.initial = {"w": torch.tensor([[1.0, -3.0], [2.0, -1.0]])}
        self.model = None
        self.load(self.initial)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.now = float(tensors["w"].float().sum())

    def logprobs(self, prompt: list[int], reply: EngineReply) -> list[float]:
        return [self.now] * 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Any:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.root.mkdir()
    lease = RunLease.take(run_dir)
    yield run_dir
    lease.release()


LONG = [7] * 40


def versions(run_dir: RunDirectory, answers: Callable[[int, list[int]], int]) -> str:
    """`answers` gives the version that answers a prompt when another was sent."""
    sums = {0: float(Weights().initial["w"].sum())}
    client = SimpleNamespace(version=0)

    async def apply(published: Any) -> Any:
        tensors = load_file(Path(published.directory) / "model.safetensors")
        sums[published.version] = float(tensors["w"].float().sum())
        client.version = published.version
        return SimpleNamespace(apply_seconds=0.1)

    client.apply = apply
    engine: Any = Engine(lambda _, prompt: sums[answers(client.version, prompt)])
    weights: Any = Weights()
    make = asking.made_up(run_dir, weights, Path("/nowhere"), "float32", None)
    return asyncio.run(asking.versions(engine, client, weights, [PROMPT, LONG], make))


def test_an_engine_that_serves_what_it_was_sent_is_fine(run_dir: RunDirectory) -> None:
    assert versions(run_dir, lambda version, _: version).startswith("3 versions: each")


STALE: list[tuple[str, Callable[[int, list[int]], int]]] = [
    ("an engine that stays with the version before", lambda version, _: version - (version == 2)),
    (
        "an engine of which one slot stays behind",
        lambda version, prompt: version - (version == 3 and prompt[0] == PROMPT[1]),
    ),
    (
        "a prefix cache that outlives its weights",
        lambda version, prompt: version - (version == 1 and prompt == LONG),
    ),
]


@pytest.mark.parametrize(("title", "answers"), STALE)
def test_an_engine_that_answers_with_the_version_before_is_found(
    run_dir: RunDirectory, title: str, answers: Callable[[int, list[int]], int]
) -> None:
    with pytest.raises(ProtocolError):
        versions(run_dir, answers)


LORA = LoraConfig(rank=2, alpha=4)


class AdapterEngine:
    """A plain model that serves adapters as vLLM would, and one answer of a batch without."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.plain, self.fault, self.version = PlainModel(folder, LORA), fault, 0

    async def apply(self, published: Any) -> Any:
        self.version = published.version
        files = Path(published.directory)
        stored = load_file(files / "adapter_model.safetensors")
        assert json.loads((files / "adapter_config.json").read_text())["r"] == LORA.rank
        if self.fault != "keeps" or self.version < 3:
            head, tail = "base_model.model.", ".weight"
            names = {it.removeprefix(head).removesuffix(tail): it for it in stored}
            self.plain.load({name: stored[it] for name, it in names.items()})
        return SimpleNamespace(apply_seconds=0.1)

    async def generate(self, prompt: list[int], salt: str, **_: Any) -> EngineReply:
        reply = EngineReply([1, 2, 3, 4], [])
        now = {k: it.clone() for k, it in self.plain.model.state_dict().items() if "lora" in k}
        if self.fault == "bare" and prompt[0] == PROMPT[1]:
            self.plain.load(self.plain.initial)
        found = self.plain.logprobs(prompt, reply)
        self.plain.load(now)
        return EngineReply(reply.tokens, found)


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        ("", ""),
        ("bare", "an adapter that one answer of a batch lacks"),
        ("keeps", "a third adapter that is not taken"),
    ],
)
def test_three_adapters_are_swapped_and_one_that_is_left_out_of_a_row_is_found(
    whole: Path, run_dir: RunDirectory, fault: str, title: str
) -> None:
    engine: Any = AdapterEngine(whole, fault)
    plain = PlainModel(whole, LORA)
    make = asking.made_up(run_dir, plain, whole, "float32", LORA)
    asked = asking.versions(engine, engine, plain, [PROMPT, LONG], make)
    if not fault:
        said = asyncio.run(asked)
        assert said.startswith("3 adapters: each answers all of a batch once sent")
        return
    with pytest.raises(ProtocolError):
        asyncio.run(asked)


class Sleeper(Engine):
    """Sleeps and wakes; `wrong` is what of it fails."""

    def __init__(self, wrong: str) -> None:
        self.wrong, self.has_slept = wrong, False
        super().__init__(lambda *_: -1.0 - (self.has_slept and wrong == "forgets"))

    async def post(
        self, body: Any, *, token: str | None = None, route: str = ""
    ) -> tuple[int, Any]:
        assert (token, body["version"], body["term"]) == ("admin", 0, 1)
        self.has_slept |= route == "/gradus/wake"
        if self.wrong and route.endswith(self.wrong):
            return 504, "not now"
        is_early = self.wrong == "rises" and route == "/gradus/wake"
        return 200, {"seconds": 1.5, "was_in_time": not is_early}


@pytest.mark.parametrize(
    ("wrong", "title"),
    [
        ("", ""),
        ("sleep", "an engine that does not fall asleep"),
        ("wake", "an engine that does not wake up"),
        ("rises", "an engine that wakes up by itself"),
        ("forgets", "an engine that wakes up with other weights"),
    ],
)
def test_an_engine_that_does_not_wake_up_as_it_slept_is_found(wrong: str, title: str) -> None:
    turn = {"run_id": "r", "term": 1, "version": 0}
    sleeper: Any = Sleeper(wrong)
    asked = asking.turns(sleeper, PROMPT, turn, "admin")
    if not wrong:
        assert asyncio.run(asked).startswith("falls asleep in 1.5 s and wakes up as it was")
        return
    with pytest.raises(ProtocolError):
        asyncio.run(asked)


def test_an_engine_that_computes_another_model_is_found() -> None:
    weights: Any = Weights()
    said = asking.compared(weights, PROMPT, EngineReply([1, 2], [-1.0, -1.01]), "bfloat16")
    assert said == "logprobs within 0.005 nats of a float32 forward"
    for logprobs in ([float("nan")] * 2, [-1.5, -1.5]):
        with pytest.raises(ProtocolError, match="the engine computes another model"):
            asking.compared(weights, PROMPT, EngineReply([1, 2], logprobs), "bfloat16")
    with pytest.raises(ProtocolError):
        asking.compared(weights, PROMPT, EngineReply([1, 2], [-1.01, -1.01]), "float32")


@pytest.mark.parametrize(
    ("status", "said"),
    [({"token": 200}, "200 to a wrong bearer token"), ({"prompt": 500}, "500 to token 51")],
)
def test_an_engine_that_answers_strangers_or_strange_tokens_is_found(
    status: dict[str, int], said: str
) -> None:
    engine: Any = Engine(lambda *_: 0.0)
    assert asyncio.run(asking.refusals(engine, PROMPT, 50)) == [
        "refuses a wrong token of either kind"
    ]
    engine.statuses |= status
    with pytest.raises(ProtocolError, match=said):
        asyncio.run(asking.refusals(engine, PROMPT, 50))


def test_an_engine_that_depends_on_the_batch_is_told() -> None:
    class Moody(Engine):
        num_asked = 0
        steady = 0

        async def generate(self, prompt: list[int], salt: str, **_: Any) -> EngineReply:
            self.num_asked += 1
            return EngineReply([1 if self.num_asked <= self.steady else 2], [-0.5])

    engine: Any = Moody(lambda *_: 0.0)
    for steady, said in (
        (100, "same alone and in a batch"),
        (2, "in a batch than alone"),
        (1, "asked twice"),
    ):
        engine.steady, engine.num_asked = steady, 0
        assert said in asyncio.run(asking.determinism(engine, PROMPT))[0]


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
    with pytest.raises(DeadlineError):
        PARTS["tracker"]({"monitor": {"type": "wandb"}})


# A step of the trainer.
BENCH = {"steps": 1, "warmup_steps": 0, "samples_per_step": 2, "sample_tokens": 24, "ragged": False}


def step_of_trainer(model: Path, trainer: TrainerConfig, bench: BenchConfig) -> dict[str, float]:
    """What the trainer itself says of the first made-up batch."""
    records: list[dict[str, float]] = []
    with join_world(torch.device("cpu")) as world:
        base = ModelConfig(name=str(model), max_length_tokens=64)
        learner = Learner.build(base, trainer, trainer.loss, max_steps=1, world=world)
        batches = MadeUpBatches(
            bench, world, longest=24, max_tokens=64, vocabulary=learner.vocabulary
        )
        Ladder(learner, batches, record=lambda it: records.append(dict(it.metrics))).train(0, 1)
    return records[0]


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_step_that_is_not_that_of_the_model_is_found(
    whole: Path, lora: dict[str, int] | None
) -> None:
    trainer = TrainerConfig.model_validate({"lora": lora, "compute_dtype": "float32"})
    bench = BenchConfig.model_validate(BENCH)
    found = step_of_trainer(whole, trainer, bench)
    plain = PlainModel(whole, trainer.lora)
    expected = plain_step(plain, trainer, bench)
    assert ("optimizer/grad_norm" in expected) == (lora is None)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    request = {
        "model": str(whole),
        "trainer": trainer.model_dump(mode="json"),
        "bench": BENCH,
        "dtype": "float32",
    }
    assert "so says a plain float32 forward" in PARTS["step"](request | {"found": found})
    # What a trainer says that reads the logits at another temperature.
    with torch.no_grad():
        plain.model.lm_head.weight /= 1.3
    wrong = plain_step(plain, trainer, bench)
    with pytest.raises(ProtocolError, match=r"the trainer says loss \S+, not "):
        PARTS["step"](request | {"found": wrong})
