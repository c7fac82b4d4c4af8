"""What a server that was started with the run's settings answers, asked as episodes ask it."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.cli.check.child import Request
from gradus.cli.check.parts import WARNING
from gradus.config import LoraConfig, ModelConfig
from gradus.errors import ProtocolError
from gradus.files import free_bytes
from gradus.run.model_files import model_digest, model_folder
from gradus.run.paths import RunDirectory

if TYPE_CHECKING:
    from gradus.wire.events import PolicyPublished

QUESTION = {"role": "user", "content": "What is 12 + 30, and why?"}
_NUM_TOKENS = 10
_IN_BATCH = 8
_MIXED = 3
"""Prompts that are asked at once after each version."""
_LONG = 600
"""Tokens of a prompt that fills blocks of a prefix cache, where the model takes as many."""
_NUM_VERSIONS = 3
_LARGEST_REFERENCE_BYTES = 16 << 30
_LARGEST_PUBLISHED_BYTES = 4 << 30
_NOISE = 0.02
_ADAPTED = 0.05
_PEFT = "base_model.model.{}.weight"
_FAR = {"float32": 2e-3, "bfloat16": 0.1}
"""Nats between the engine's logprob of the median token and that of a float32 forward."""
_WAIT_SECONDS, _SLEEP_SECONDS = 60.0, 300.0

Tensors = Mapping[str, Any]
Make = Callable[[int], tuple["PolicyPublished", Tensors]]
"""Publishes a made-up version, and says what it holds."""


@dataclass(frozen=True)
class EngineReply:
    tokens: list[int]
    logprobs: list[float]


class RunServer:
    """The run's own server."""

    def __init__(self, session: Any, base_url: str, token: str) -> None:
        self._session, self._base_url, self._token = session, base_url, token

    async def post(
        self, body: Any, *, token: str | None = None, route: str = "/inference/v1/generate"
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or self._token}"}
        asking: AbstractAsyncContextManager[Any]
        asking = self._session.post(f"{self._base_url}{route}", json=body, headers=headers)
        async with asking as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def generate(self, prompt: Sequence[int], salt: str, **sampling: Any) -> EngineReply:
        status, answer = await self.post(generate_body(prompt, salt, **sampling))
        if status != 200:
            raise ProtocolError(f"it answered {status} to a prompt: {str(answer)[:300]}")
        choice = answer["choices"][0]
        found = [float(it["logprob"]) for it in choice["logprobs"]["content"]]
        return EngineReply(list(choice["token_ids"]), found)


def generate_body(prompt: Sequence[int], salt: str, **sampling: Any) -> dict[str, Any]:
    """Without a salt the server takes that of the version it serves."""
    params = {"temperature": 1.0, "max_tokens": _NUM_TOKENS, "logprobs": 1, "ignore_eos": True}
    return {
        "model": "policy",
        "token_ids": list(prompt),
        "sampling_params": {**params, **sampling},
        **({"cache_salt": salt} if salt else {}),
    }


class PlainModel:
    """The model in float32 by transformers alone, which answers for any weights of its shape; with
    `lora` for any adapter beside the ones that it has."""

    def __init__(self, folder: Path, lora: LoraConfig | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tied = set(self.model.all_tied_weights_keys)
        if lora is not None:
            from gradus.trainer.model.lora import add_adapters

            add_adapters(self.model, lora, torch.float32)
        self.initial = {
            name: it.clone()
            for name, it in self.model.state_dict().items()
            if name not in tied and (lora is None or name.endswith(("lora_A", "lora_B")))
        }

    def logprobs(self, prompt: Sequence[int], reply: EngineReply) -> list[float]:
        torch = self._torch
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *reply.tokens]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        found: list[float] = rows.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0].tolist()
        return found

    def load(self, tensors: Tensors) -> None:
        self.model.load_state_dict({name: it.float() for name, it in tensors.items()}, strict=False)


def distance(ones: Sequence[float], others: Sequence[float]) -> float:
    """Nats of the median token; infinite where one is no number."""
    apart = [abs(one - other) for one, other in zip(ones, others, strict=True)]
    return statistics.median(it if math.isfinite(it) else math.inf for it in apart)


def probe_engine(request: Request) -> str:
    return "\n".join(asyncio.run(_ask_engine(request)))


async def _ask_engine(request: Request) -> list[str]:
    import aiohttp

    from gradus.orchestrator.play.inference_client import InferenceClient
    from gradus.run.ready import read_token

    run_dir, term = RunDirectory(Path(request["run_dir"])), int(request["term"])
    model, dtype = ModelConfig.model_validate(request["model"]), str(request["dtype"])
    client = await InferenceClient.connect(run_dir, term=term, process=request["process"])
    try:
        await client.serve_initial()
        async with aiohttp.ClientSession() as session:
            asked = RunServer(session, client.base_url, read_token(run_dir.inference_token))
            prompt = _prompt(model)
            first = await asked.generate(prompt, "v0", seed=1)
            said = [f"{len(first.tokens)} tokens, {client.kv_capacity_tokens:,} in the cache"]
            said += await refusals(asked, prompt, int(request["vocabulary"]))
            said += await determinism(asked, prompt)
            if request["takes_turns"]:
                turn = {"run_id": run_dir.root.name, "term": term, "version": client.version}
                said.append(await turns(asked, prompt, turn, read_token(run_dir.admin_token)))
            folder = model_folder(model.name)
            assert folder is not None
            size = sum(it.stat().st_size for it in folder.glob("*.safetensors"))
            if size > _LARGEST_REFERENCE_BYTES:
                gib = f"{size >> 30} GiB are too many for a forward on this CPU"
                return [*said, f"logprobs and versions are not compared: {gib}"]
            given = request["lora"]
            lora = None if given is None else LoraConfig.model_validate(given)
            reference = PlainModel(folder, lora)
            said.append(compared(reference, prompt, first, dtype))
            held = sum(it.nbytes for it in reference.initial.values())
            room = min(_LARGEST_PUBLISHED_BYTES, (free_bytes(run_dir.root) or 0) // 6)
            if held > room:
                return [*said, f"versions are not tried: each takes {held >> 20} MiB of the disk"]
            make = made_up(run_dir, reference, folder, dtype, lora)
            longest = max(len(prompt), min(_LONG, model.max_length_tokens - _NUM_TOKENS))
            long = (prompt * (1 + longest // len(prompt)))[:longest]
            return [*said, await versions(asked, client, reference, [prompt, long], make)]
    finally:
        await client.close()


def _prompt(model: ModelConfig) -> list[int]:
    from gradus.orchestrator.play.renderer import load_policy_tokenizer

    tokenizer = load_policy_tokenizer(model.tokenizer or model.name)
    text = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


async def refusals(asked: RunServer, prompt: list[int], vocabulary: int) -> list[str]:
    """It must answer nobody without the run's token, and no token that the model does not have."""
    body = generate_body(prompt, "v0")
    status, _ = await asked.post(body, token=secrets.token_hex(32))
    if status != 401:
        raise ProtocolError(f"it answered {status} to a wrong bearer token, where 401 must come")
    status, _ = await asked.post({**body, "token_ids": [*prompt, vocabulary + 1]})
    if status not in (400, 422):
        raise ProtocolError(
            f"it answered {status} to token {vocabulary + 1} of a vocabulary of {vocabulary}"
        )
    return ["refuses a wrong token of either kind"]


async def determinism(asked: RunServer, prompt: list[int]) -> list[str]:
    """The same prompt twice, and in a batch with others."""
    one = await asked.generate(prompt, "v0", temperature=0.0)
    two = await asked.generate(prompt, "v0", temperature=0.0)
    others = [_rotated(prompt, number) for number in range(_IN_BATCH)]
    many = await asyncio.gather(*(asked.generate(it, "v0", temperature=0.0) for it in others))
    if one.tokens != two.tokens:
        return [f"{WARNING}a greedy prompt asked twice gives other tokens: numbers will not repeat"]
    moved = distance(one.logprobs, many[0].logprobs)
    if one.tokens != many[0].tokens:
        return [
            f"{WARNING}a greedy prompt gives other tokens in a batch than alone ({moved:.2g} nats)"
        ]
    return [f"a greedy prompt is the same alone and in a batch, within {moved:.1g} nats"]


def _rotated(prompt: list[int], places: int) -> list[int]:
    return [*prompt[places:], *prompt[:places]]


async def turns(asked: RunServer, prompt: list[int], turn: Mapping[str, Any], token: str) -> str:
    """Put to sleep as the trainer does before it learns, and woken: the same answer must come."""
    before = await asked.generate(prompt, "v0", temperature=0.0)
    took = []
    for what, doing in (("sleep", "fall asleep"), ("wake", "wake up")):
        body = {**turn, "wait_seconds": _WAIT_SECONDS, "sleep_seconds": _SLEEP_SECONDS}
        status, answer = await asked.post(body, token=token, route=f"/gradus/{what}")
        if status != 200:
            raise ProtocolError(f"it did not {doing} ({status}): {str(answer)[:300]}")
        took.append(float(answer["seconds"]))
        if not answer["was_in_time"]:
            raise ProtocolError(
                "it was awake before it was told to wake up: the trainer would not have the GPU"
            )
    after = await asked.generate(prompt, "v0", temperature=0.0)
    moved = distance(before.logprobs, after.logprobs)
    if before.tokens != after.tokens or moved > _FAR["bfloat16"]:
        raise ProtocolError(
            f"it answers otherwise after it slept ({moved:.2g} nats): what it woke up with is not "
            'what it fell asleep with; write inference.gpu_sharing = "memory"'
        )
    return f"falls asleep in {took[0]:.1f} s and wakes up as it was, within {moved:.1g} nats"


def compared(reference: PlainModel, prompt: list[int], reply: EngineReply, dtype: str) -> str:
    apart = distance(reply.logprobs, reference.logprobs(prompt, reply))
    if apart > _FAR[dtype]:
        raise ProtocolError(
            f"its logprobs are {apart:.2g} nats from a float32 forward of transformers (median of "
            f"{len(reply.tokens)} tokens), where {dtype} explains {_FAR[dtype]:g}: the engine "
            "computes another model; try inference.dtype = 'float32', or extra_args.enforce_eager"
        )
    return f"logprobs within {apart:.1g} nats of a float32 forward"


def made_up(
    run_dir: RunDirectory, reference: PlainModel, folder: Path, dtype: str, lora: LoraConfig | None
) -> Make:
    """Versions that differ a little from one another: whole weights, or adapters on them."""
    import torch

    from gradus.run.lease import read_term
    from gradus.trainer.model import lora as adapters
    from gradus.weights.filesystem import FilesystemWeights
    from gradus.weights.tensor_files import write_tensors
    from gradus.wire.events import PolicyPublished

    model, kind, term = reference.model, getattr(torch, dtype), read_term(run_dir)
    extra = {} if lora is None else adapters.adapter_files(model, lora, "", model_digest(folder))
    weights = FilesystemWeights(
        run_dir,
        term=term,
        extra_files=extra,
        keep_published=_NUM_VERSIONS,
        write=None if lora is None else partial(write_tensors, stem=adapters.ADAPTER_STEM),
    )
    before = dict(reference.initial)

    def make(version: int) -> tuple[PolicyPublished, Tensors]:
        random = torch.Generator().manual_seed(version)
        for name, it in before.items():
            # What adapters add is this factor times the other.
            is_new = name.endswith("lora_B")
            width = _ADAPTED if is_new else _NOISE * it.float().std()
            before[name] = _moved(it * 0 if is_new else it, width, random).to(kind)
        names = {name if lora is None else _PEFT.format(name): it for name, it in before.items()}
        made = weights.publish_version(version, names.items())
        return PolicyPublished(version, term, str(made.directory), made.digest), dict(before)

    return make


def _moved(tensor: Any, width: Any, random: Any) -> Any:
    """A little, and not the same way as any other."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    return tensor + width * tensor.new_empty(tensor.shape).normal_(generator=random)


async def versions(
    asked: RunServer, client: Any, reference: PlainModel, prompts: Sequence[list[int]], make: Make
) -> str:
    """Made-up versions one after the other: the one that answers is the one that was sent, to each
    prompt of a batch, and to one whose beginning older weights have read."""
    prompt, long = prompts
    before: Tensors = reference.initial
    seconds = []
    first = client.version + 1
    await asked.generate(long, "")
    for version in range(first, first + _NUM_VERSIONS):
        published, tensors = make(version)
        seconds.append((await client.apply(published)).apply_seconds)
        questions = [(_rotated(prompt, number), f"v{version}") for number in range(_MIXED)]
        questions.append((long, ""))
        replies = await asyncio.gather(
            *(asked.generate(said, salt, seed=version) for said, salt in questions)
        )
        pairs = [(said, it) for (said, _), it in zip(questions, replies, strict=True)]
        reference.load(before)
        stale = [distance(it.logprobs, reference.logprobs(said, it)) for said, it in pairs]
        reference.load(tensors)
        apart = [distance(it.logprobs, reference.logprobs(said, it)) for said, it in pairs]
        _refuse_stale(version, apart, stale)
        before = tensors
    kind = "adapters" if any("lora_A" in name for name in before) else "versions"
    return (
        f"{_NUM_VERSIONS} {kind}: each answers all of a batch once sent, with no cache of the one "
        f"before; {max(seconds):.2f} s the slowest"
    )


def _refuse_stale(version: int, apart: Sequence[float], stale: Sequence[float]) -> None:
    """ProtocolError where an answer is closer to the version before than to the one that was
    sent; the last answer is that which a prefix cache could give."""
    wrong = [place for place, it in enumerate(apart) if it >= stale[place]]
    if not wrong:
        return
    place, answers = wrong[0], len(apart)
    told = f"{apart[place]:.2g} nats from the one, {stale[place]:.2g} from the other"
    if wrong == [answers - 1]:
        raise ProtocolError(
            f"version {version} was sent, and a prompt that {version - 1} had read is answered "
            f"from its prefix cache: {told}; set inference.extra_args.enable_prefix_caching = false"
        )
    is_all = len(wrong) >= answers - 1
    who = "what answers" if is_all else f"{len(wrong)} of {answers} answers of a batch"
    verb = "is" if is_all or len(wrong) == 1 else "are"
    raise ProtocolError(
        f"version {version} was sent, and {who} {verb} closer to {version - 1}: {told}"
    )
