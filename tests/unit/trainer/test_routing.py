"""Experts that the engine chose, in the place of the trainer's own choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import build_sample
from model_families import CPU, FAMILIES, build_family

from gradus.config import ModelConfig
from gradus.errors import ConfigError, ProtocolError
from gradus.trainer.distributed import World
from gradus.trainer.model.cpu.routing import (
    ROUTERS,
    ExpertLoad,
    Routers,
    chosen_by,
    routing_biases,
)
from gradus.trainer.model.layers import compile_layers, decoder_layers, recompute_layers
from gradus.trainer.model.load import load_model
from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors
from gradus.wire.micro_batch import MicroBatch
from gradus.wire.packing import build_dummy
from gradus.wire.tokens import NOT_CHOSEN, TokenArrays

pytestmark = pytest.mark.torch
LENGTHS = (9, 1, 20)
COUNT = sum(LENGTHS)
TABLE = {
    name: (family, {**options, "num_hidden_layers": 2})
    for name, (family, options) in FAMILIES.items()
    if name in ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "gpt_oss", "granitemoe")
}
TABLE["gpt_oss"][1]["layer_types"] = ["sliding_attention", "full_attention"]
TABLE["llama4"] = (
    "llama4_text",
    {**FAMILIES["llama4 of experts alone"][1], "num_hidden_layers": 2, "no_rope_layers": [0, 1]},
)
TABLE["deepseek_v3"] = ("deepseek_v3", {**FAMILIES["deepseek_v3"][1], "num_hidden_layers": 2})


def micro_batch(experts: Any = None, lengths: tuple[int, ...] = LENGTHS) -> MicroBatch:
    tokens = 3 + np.arange(sum(lengths)) * 7919 % 90
    arrays = TokenArrays.build(tokens, {"ce": np.ones(len(tokens), np.float32)}, experts=experts)
    return MicroBatch([f"g.{n}/0/0" for n in range(len(lengths))], list(lengths), arrays)


def load(folder: Path, family: str, options: dict[str, Any]) -> PolicyModel:
    build_family(folder, family, options)
    model = load_model(ModelConfig(name=str(folder), max_length_tokens=512), CPU)
    return PolicyModel(model, routers=Routers.of(model))


def scored(policy: PolicyModel, experts: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    policy.zero_grad()
    logprobs = policy(TrainTensors.build(micro_batch(experts), CPU)).logprobs
    logprobs.sum().backward()
    found = [it.grad.clone() for it in policy.parameters() if it.grad is not None]
    return logprobs.detach(), found


def own_choice(policy: PolicyModel) -> np.ndarray[Any, Any]:
    """What the routers choose by themselves, as an engine tells it."""
    routers = policy.routers
    assert routers is not None
    shape = (COUNT, routers.num_layers, routers.num_chosen)
    experts = np.full(shape, NOT_CHOSEN, np.int16)

    def note(layer: int) -> Any:
        def hook(router: Any, _: Any, outputs: Any) -> None:
            experts[:, layer] = chosen_by(router, outputs).numpy()

        return hook

    hooks = [it.register_forward_hook(note(layer)) for layer, it in routers.by_layer.items()]
    scored(policy, None)
    for hook in hooks:
        hook.remove()
    return experts


@pytest.mark.parametrize("name", TABLE)
def test_the_same_choice_gives_bit_by_bit_the_same_and_another_does_not(
    tmp_path: Path, name: str
) -> None:
    policy = load(tmp_path, *TABLE[name])
    plain, gradients = scored(policy, None)
    experts = own_choice(policy)
    experts[4] = NOT_CHOSEN
    logprobs, found = scored(policy, experts)
    assert torch.equal(logprobs, plain)
    assert all(map(torch.equal, found, gradients))
    other = (experts + 1) % 8
    moved, _ = scored(policy, other)
    assert float((moved - plain).abs().max()) > 1e-3
    # A later batch without experts is routed as before.
    assert torch.equal(scored(policy, None)[0], plain)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load(tmp_path_factory.mktemp("moe"), *TABLE["deepseek_v3"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return load(tmp_path_factory.mktemp("moe"), *TABLE["qwen3_moe"])


def told(policy: PolicyModel, *chosen: int) -> np.ndarray[Any, Any]:
    """Each token of each layer gets these experts."""
    layers = policy.routers.num_layers if policy.routers else 0
    return np.broadcast_to(np.array(chosen, np.int16), (COUNT, layers, len(chosen))).copy()


def test_scores_are_the_trainers_own_and_normalised_over_the_engines_experts(
    qwen: PolicyModel, policy: PolicyModel
) -> None:
    for model, scores_of in ((qwen, torch.nn.Softmax(dim=-1)), (policy, torch.nn.Sigmoid())):
        assert model.routers is not None
        router = model.routers.by_layer[1]
        hidden = torch.randn(COUNT, 128, generator=torch.Generator().manual_seed(0))
        model.routers.take(torch.from_numpy(told(model, 6, 3)))
        _, weights, chosen = router(hidden)
        model.routers.take(None)
        scores = scores_of(hidden @ router.weight.T)[:, [6, 3]]
        if model.routers is policy.routers or router.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        scores = scores * getattr(router, "routed_scaling_factor", 1.0)
        assert (chosen == torch.tensor([6, 3])).all()
        assert torch.allclose(weights, scores, atol=1e-6)


def test_one_expert_may_get_every_token_and_six_none(qwen: PolicyModel) -> None:
    logprobs, gradients = scored(qwen, told(qwen, 2, 5))
    assert logprobs.isfinite().all()
    assert all(it.isfinite().all() for it in gradients)
    by_expert = [it for it in gradients if it.ndim == 3]
    assert by_expert
    for gradient in by_expert:
        used = gradient.abs().sum(dim=(1, 2)) > 0
        assert used.nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("name", TABLE)
def test_the_load_of_experts_is_that_of_forwards_that_learn(
    tmp_path: Path, name: str, world: World
) -> None:
    policy = load(tmp_path, *TABLE[name])
    counted = ExpertLoad.of(policy, CPU)
    assert counted is not None
    # Whatever routes by itself: one expert of eight has half of all choices, five have none.
    experts = told(policy, 2, 5)
    experts[: COUNT // 2, :, 1] = 6
    scored(policy, experts)
    with torch.no_grad():
        policy(TrainTensors.build(micro_batch(told(policy, 0, 1)), CPU))
    # What keeps ranks in step trains nothing; it chooses for itself.
    policy(TrainTensors.build(build_dummy(build_sample(3)), CPU))
    found = counted.take()
    assert found == {"experts/load/max_over_mean": 4.0, "experts/unused/share": 5 / 8}
    others = told(policy, 0, 1)
    others[3, :, 1], others[4, :, 1] = 6, 7
    scored(policy, others)
    assert counted.take() == {"experts/load/max_over_mean": 4.0, "experts/unused/share": 4 / 8}
    recompute_layers(decoder_layers(policy.model), "full")
    scored(policy, experts)
    assert counted.take() == found


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "minimax_m2"])
def test_biases_move_by_the_sign_of_what_their_experts_lack(
    tmp_path: Path, name: str, world: World
) -> None:
    policy = load(tmp_path, *TABLE[name])
    counted = ExpertLoad.of(policy, CPU, moves_biases=True)
    assert counted is not None
    (bias, *_) = before = [it.clone() for it in routing_biases(policy).values()]
    assert bias.dtype == torch.float32
    assert counted.take(0.5)  # Nothing was counted.
    # Three experts of eight have all tokens, each more than the mean.
    experts = told(policy, 2, 5)
    experts[: COUNT // 2, :, 1] = 6
    scored(policy, experts)
    counted.take(0.5)
    for now, was in zip(routing_biases(policy).values(), before, strict=True):
        moved = [0.5, 0.5, -0.5, 0.5, 0.5, -0.5, -0.5, 0.5]
        assert torch.equal(now, was + torch.tensor(moved))
    scored(policy, experts)
    counted.take(0.0)
    assert torch.equal(now, was + torch.tensor(moved))


def test_a_model_without_biases_moves_none(tmp_path: Path, world: World) -> None:
    policy = load(tmp_path, *TABLE["qwen3_moe"])
    with pytest.raises(ConfigError, match="router_bias_rate: the model has no biases"):
        ExpertLoad.of(policy, CPU, moves_biases=True)
    assert ExpertLoad.of(policy, CPU) is not None
    dense = PolicyModel(build_family(tmp_path / "dense", *FAMILIES["llama"]))
    with pytest.raises(ConfigError, match="write 0"):
        ExpertLoad.of(dense, CPU, moves_biases=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mode", ["full", "selective", "compiled"])
def test_layers_that_are_computed_again_or_compiled_take_them_too(
    tmp_path: Path, mode: str
) -> None:
    policy = load(tmp_path, *TABLE["qwen3_moe"])
    experts = told(policy, 1, 4)
    logprobs, gradients = scored(policy, experts)
    if mode == "compiled":
        compile_layers(decoder_layers(policy.model), backend="eager")
    else:
        recompute_layers(decoder_layers(policy.model), mode)  # type: ignore[arg-type]
    again, found = scored(policy, experts)
    assert torch.allclose(again, logprobs, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, gradients, strict=True))


def test_what_a_model_cannot_take_is_refused_with_the_samples_name(policy: PolicyModel) -> None:
    routers = policy.routers
    assert routers is not None
    routers.check(micro_batch(None))
    good = told(policy, 1, 4)
    routers.check(micro_batch(good))
    # Layer 0 is dense: whatever an engine says of it is not read.
    good[:, 0] = 0
    routers.check(micro_batch(good))
    for change, words in (
        (lambda it: it[:, :1], r"sample g.0/0/0: .* \(1, 2\), this model has \(2, 2\)"),
        (lambda it: it[:, :, :1], r"\(2, 1\), this model has"),
        (
            lambda it: _with(it, 8),
            r"sample g.2/0/0: .* none of 8 .*\[8, 4\] for token 3 in layer 1",
        ),
        (lambda it: _with(it, 8, token=9), r"sample g.1/0/0: .* for token 0 in layer 1"),
        (lambda it: _with(it, -2), "none of 8"),
        (lambda it: _with(it, NOT_CHOSEN), "none of 8"),
        (lambda it: _with(it, 4), r"sample g.2/0/0: .* twice .*\[4, 4\] for token 3"),
    ):
        with pytest.raises(ProtocolError, match=words):
            routers.check(micro_batch(change(good.copy())))


def _with(experts: np.ndarray[Any, Any], number: int, *, token: int = 13) -> Any:
    experts[token, 1, 0] = number
    return experts


def test_a_sample_is_told_where_any_token_has_experts_in_a_layer_that_routes(
    policy: PolicyModel,
) -> None:
    routers = policy.routers
    assert routers is not None
    experts = told(policy, 1, 4)
    experts[:12, 1] = experts[:, 0] = NOT_CHOSEN
    assert routers.told([micro_batch(experts)]) == [False, False, True]
    experts[:, 0], experts[:, 1] = 1, NOT_CHOSEN
    assert routers.told([micro_batch(experts), micro_batch(None)]) == [False] * 6


def test_models_without_a_known_router_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no router that chooses experts"):
        load(tmp_path / "dense", "llama", {"num_hidden_layers": 1})
    staged = {**TABLE["deepseek_v3"][1], "topk_method": "group_limited_greedy"}
    with pytest.raises(ConfigError, match="DeepseekV2TopkRouter in groups, which cannot be told"):
        load(tmp_path / "staged", "deepseek_v2", staged)
    assert "FlexOlmoTopKRouter" not in ROUTERS
    flex = {"num_experts": 4, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match="routes by FlexOlmoTopKRouter"):
        load(tmp_path / "flex", "flex_olmo", flex)
