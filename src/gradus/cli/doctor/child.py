"""The child side of the doctor: tries one part and says what it measured, or why it fails.

`python -m gradus.cli.doctor.child PART REQUEST RESULT`, as in `gradus.cli.look.child`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import statistics
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradus.cli.look.child import Request, main
from gradus.cli.look.parts import WARNING
from gradus.config import ModelConfig, TrackConfig, load_config
from gradus.errors import ConfigError, ProtocolError, first_line
from gradus.files import free_bytes, read_json
from gradus.plan.machine import model_note
from gradus.run.model_files import model_folder
from gradus.run.paths import RunDirectory

_QUESTION = {"role": "user", "content": "What is 12 + 30, and why?"}
_ANSWER = {"role": "assistant", "content": "It is 42.\n\nBecause 12 + 30 = 42."}
_TEXT = "Zwölf + 30 = 42?\n\tdef f(x):  return x  # ✓ 数"
_NUM_TOKENS = 10
_IN_BATCH = 8
_NUM_VERSIONS = 3
_LARGEST_REFERENCE_BYTES = 16 << 30
_LARGEST_PUBLISHED_BYTES = 4 << 30
_NOISE = 0.02
_FAR = {"float32": 2e-3, "bfloat16": 0.1}
"""Nats between the engine's logprob of the median token and that of a float32 forward."""
_APPLY_SECONDS = 300.0


# Files of the model.
def probe_files(request: Request) -> str:
    """The tensors are whole and fit the config, and so are tokenizer, template and stop tokens."""
    model = ModelConfig.model_validate(request["model"])
    folder = model_folder(model.name)
    if folder is None:
        raise ConfigError(f"{model.name} is not on this machine; fetch it first")
    tensors = read_tensors(folder)
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    vocabulary = text.get("vocab_size")
    shape = next(
        (it[1] for name, it in tensors.items() if name.endswith("embed_tokens.weight")), None
    )
    if shape is not None and vocabulary is not None and shape[0] != vocabulary:
        raise ConfigError(
            f"config.json says vocab_size = {vocabulary}, and the embeddings have {shape[0]} rows; "
            "restore the config.json that belongs to these weights"
        )
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    if not is_tied and not any(name.endswith("lm_head.weight") for name in tensors):
        raise ConfigError(
            "tie_word_embeddings = false, and no file has lm_head.weight: the head would be noise. "
            "Set it to true in config.json, or fetch the missing file"
        )
    said = [f"{len(tensors)} tensors whole", *_conversations(model, vocabulary)]
    said.append(model_note(model.name))
    return "\n".join(said)


def read_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Name → dtype and shape, from the headers alone; ConfigError for a file that is not whole."""
    found: dict[str, tuple[str, list[int]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= size else None
        except (struct.error, ValueError):
            header = None
        if not isinstance(header, dict):
            raise ConfigError(f"{path.name} has no header of safetensors; fetch it again")
        header.pop("__metadata__", None)
        end = 8 + length + max((it["data_offsets"][1] for it in header.values()), default=0)
        if end != size:
            raise ConfigError(f"{path.name} has {size:,} of {end:,} bytes; fetch it again")
        found |= {name: (it["dtype"], it["shape"]) for name, it in header.items()}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        wanted = read_json(index)["weight_map"]
        if lost := sorted(set(wanted) - found.keys()):
            raise ConfigError(
                f"{len(lost)} tensors of the index are missing, {lost[0]} of {wanted[lost[0]]} the "
                "first; fetch that file"
            )
    return found


def _conversations(model: ModelConfig, vocabulary: int | None) -> list[str]:
    """What was seen of tokenizer, template, renderer and stop tokens; ConfigError for a misfit."""
    from gradus.cli.look.child import _renderer
    from gradus.orchestrator.play.renderer import load_policy_tokenizer, render
    from gradus.wire.turns import common_prefix, read_stop_token_ids

    tokenizer = load_policy_tokenizer(model.tokenizer or model.name)
    largest = max(tokenizer.get_vocab().values())
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"the tokenizer has token {largest}, and the model {vocabulary} of them: it is the "
            "tokenizer of another model; leave model.tokenizer out, or give the right one"
        )

    def tokens(messages: list[dict[str, str]], *, opens: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    prompt, whole = tokens([_QUESTION], opens=True), tokens([_QUESTION, _ANSWER], opens=False)
    said = [f"vocabulary of {largest + 1:,}"]
    shared = common_prefix(prompt, whole)
    if shared < len(prompt):
        said.append(
            f"{WARNING}a conversation does not begin with its own prompt (from token {shared} of "
            f"{len(prompt)} on): turns of several steps are read twice as branches"
        )
    stops = read_stop_token_ids(model.name, model.tokenizer)
    if not stops.intersection(whole[shared:]):
        ends = tokenizer.convert_ids_to_tokens(whole[-3:])
        raise ConfigError(
            f"no stop token ends a turn: the template ends it with {ends}, and the files name "
            f"{sorted(tokenizer.convert_ids_to_tokens(sorted(stops)))}; add its id to eos_token_id "
            "in generation_config.json, else replies run to their limit"
        )
    settings, how = _renderer(model)
    try:
        rendered = render(tokenizer, settings, [dict(_QUESTION)])
    except Exception as error:
        text = f"renderer {settings['name']} ({how}) cannot use this tokenizer: {first_line(error)}"
        raise ConfigError(f"{text}; set model.renderer to that of the family") from error
    if rendered != prompt:
        at = common_prefix(rendered, prompt)
        raise ConfigError(
            f"renderer {settings['name']} ({how}) and the chat template write other tokens from "
            f"token {at} on: {tokenizer.decode(rendered[at : at + 8])!r} and "
            f"{tokenizer.decode(prompt[at : at + 8])!r}; set model.renderer to that of the family"
        )
    said.append(f"renderer {settings['name']} ({how}) writes what the template writes")
    again = tokenizer.decode(tokenizer(_TEXT, add_special_tokens=False).input_ids)
    if again != _TEXT:
        said.append(
            f"{WARNING}text does not survive the tokenizer: {_TEXT!r} comes back as {again!r}"
        )
    return said


# The engine that serves.
@dataclass(frozen=True)
class EngineReply:
    tokens: list[int]
    logprobs: list[float]


class _Asked:
    """The run's own server, asked as episodes ask it."""

    def __init__(self, session: Any, base_url: str, token: str) -> None:
        self._session, self._base_url, self._token = session, base_url, token

    async def post(self, body: Mapping[str, Any], *, token: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or self._token}"}
        url = f"{self._base_url}/inference/v1/generate"
        async with self._session.post(url, json=body, headers=headers) as response:
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
    params = {"temperature": 1.0, "max_tokens": _NUM_TOKENS, "logprobs": 1, "ignore_eos": True}
    return {
        "model": "policy",
        "token_ids": list(prompt),
        "sampling_params": {**params, **sampling},
        "cache_salt": salt,
    }


class PlainModel:
    """The model in float32 by transformers alone, which answers for any weights of its shape."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tied = set(self._model.all_tied_weights_keys)
        state = self._model.state_dict()
        self.initial = {name: it.clone() for name, it in state.items() if name not in tied}

    def logprobs(self, prompt: Sequence[int], reply: EngineReply) -> list[float]:
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *reply.tokens]])).logits[0]
        rows = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        found: list[float] = rows.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0].tolist()
        return found

    def load(self, tensors: Mapping[str, Any]) -> None:
        self._model.load_state_dict(
            {name: it.float() for name, it in tensors.items()}, strict=False
        )


def distance(ones: Sequence[float], others: Sequence[float]) -> float:
    """Nats of the median token; infinite where one is no number."""
    apart = [abs(one - other) for one, other in zip(ones, others, strict=True)]
    return statistics.median(it if math.isfinite(it) else math.inf for it in apart)


def probe_engine(request: Request) -> str:
    """What a server that was started with the run's settings answers."""
    return "\n".join(asyncio.run(_ask_engine(request)))


async def _ask_engine(request: Request) -> list[str]:
    import aiohttp

    from gradus.orchestrator.play.inference_client import InferenceClient
    from gradus.run.ready import read_token

    run_dir, term = RunDirectory(Path(request["run_dir"])), int(request["term"])
    model = ModelConfig.model_validate(request["model"])
    client = await InferenceClient.connect(run_dir, term=term, process=request["process"])
    try:
        await client.serve_initial()
        token = read_token(run_dir.inference_token)
        async with aiohttp.ClientSession() as session:
            asked = _Asked(session, client.base_url, token)
            prompt = _prompt(model)
            first = await asked.generate(prompt, "v0", seed=1)
            said = [f"{len(first.tokens)} tokens, {client.kv_capacity_tokens:,} in the cache"]
            said += await refusals(asked, prompt, int(request["vocabulary"]))
            said += await determinism(asked, prompt)
            reference = _reference(model)
            if isinstance(reference, str):
                return [*said, reference]
            said.append(compared(reference, prompt, first, request["dtype"]))
            if request["serves_adapter"]:
                return [*said, "versions of an adapter are tried on the whole way"]
            dtype = str(request["dtype"])
            return said + await versions(asked, client, reference, prompt, run_dir, dtype)
    finally:
        await client.close()


def _prompt(model: ModelConfig) -> list[int]:
    from gradus.orchestrator.play.renderer import load_policy_tokenizer

    tokenizer = load_policy_tokenizer(model.tokenizer or model.name)
    text = tokenizer.apply_chat_template([_QUESTION], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


async def refusals(asked: _Asked, prompt: list[int], vocabulary: int) -> list[str]:
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


async def determinism(asked: _Asked, prompt: list[int]) -> list[str]:
    """The same prompt twice, and in a batch with others."""
    one = await asked.generate(prompt, "v0", temperature=0.0)
    two = await asked.generate(prompt, "v0", temperature=0.0)
    others = [[*prompt[: len(prompt) - number], *prompt[:number]] for number in range(_IN_BATCH)]
    many = await asyncio.gather(*(asked.generate(it, "v0", temperature=0.0) for it in others))
    if one.tokens != two.tokens:
        return [f"{WARNING}a greedy prompt asked twice gives other tokens: numbers will not repeat"]
    moved = distance(one.logprobs, many[0].logprobs)
    if one.tokens != many[0].tokens:
        return [
            f"{WARNING}a greedy prompt gives other tokens in a batch than alone ({moved:.2g} nats)"
        ]
    return [f"a greedy prompt is the same alone and in a batch, within {moved:.1g} nats"]


def _reference(model: ModelConfig) -> PlainModel | str:
    folder = model_folder(model.name)
    assert folder is not None
    size = sum(it.stat().st_size for it in folder.glob("*.safetensors"))
    if size > _LARGEST_REFERENCE_BYTES:
        return f"logprobs are not compared: {size >> 30} GiB are too many for a forward on this CPU"
    return PlainModel(folder)


def compared(reference: PlainModel, prompt: list[int], reply: EngineReply, dtype: str) -> str:
    apart = distance(reply.logprobs, reference.logprobs(prompt, reply))
    if apart > _FAR[dtype]:
        raise ProtocolError(
            f"its logprobs are {apart:.2g} nats from a float32 forward of transformers (median of "
            f"{len(reply.tokens)} tokens), where {dtype} explains {_FAR[dtype]:g}: the engine "
            "computes another model; try inference.dtype = 'float32', or extra_args.enforce_eager"
        )
    return f"logprobs within {apart:.1g} nats of a float32 forward"


async def versions(
    asked: _Asked,
    client: Any,
    reference: PlainModel,
    prompt: list[int],
    run_dir: RunDirectory,
    dtype: str,
) -> list[str]:
    """Made-up versions one after the other: the one that answers is the one that was sent."""
    import torch

    from gradus.run.lease import read_term
    from gradus.weights.filesystem import FilesystemWeights
    from gradus.wire.events import PolicyPublished

    term, size = read_term(run_dir), sum(it.nbytes for it in reference.initial.values())
    room = free_bytes(run_dir.root) or 0
    if size > min(_LARGEST_PUBLISHED_BYTES, room // (2 * _NUM_VERSIONS)):
        return [f"versions are not tried: each would take {size >> 20} MiB of the disk"]
    weights = FilesystemWeights(run_dir, term=term, extra_files={}, keep_published=_NUM_VERSIONS)
    before, seconds = reference.initial, []
    first = client.version + 1
    for version in range(first, first + _NUM_VERSIONS):
        random = torch.Generator().manual_seed(version)
        changed = {
            name: _moved(it, random).to(getattr(torch, dtype)) for name, it in before.items()
        }
        published = weights.publish_version(version, changed.items())
        applied = await client.apply(
            PolicyPublished(version, term, str(published.directory), published.digest)
        )
        seconds.append(applied.apply_seconds)
        reply = await asked.generate(prompt, f"v{version}", seed=version)
        reference.load(before)
        stale = distance(reply.logprobs, reference.logprobs(prompt, reply))
        reference.load(changed)
        apart = distance(reply.logprobs, reference.logprobs(prompt, reply))
        if apart >= stale:
            raise ProtocolError(
                f"version {version} was sent, and what answers is closer to {version - 1}: "
                f"{apart:.2g} nats from the one, {stale:.2g} from the other"
            )
        before = changed
    return [f"{_NUM_VERSIONS} versions: each answers once sent, {max(seconds):.2f} s the slowest"]


def _moved(tensor: Any, random: Any) -> Any:
    """A little, and not the same way as any other."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    return tensor + _NOISE * tensor.float().std() * tensor.new_empty(tensor.shape).normal_(
        generator=random
    )


# Trackers.
def probe_tracker(request: Request) -> str:
    """One record under a name of its own, sent as a run sends it."""
    from gradus.monitor import JsonlMonitor
    from gradus.run.lease import mark_run
    from gradus.run.recording import note_launched
    from gradus.tracking.follow.process import send_run

    config = load_config(TrackConfig, [], base={"monitor": request["monitor"]})
    said: list[str] = []
    with TemporaryDirectory(prefix="gradus-doctor-") as folder:
        run_dir = RunDirectory(Path(folder) / f"doctor-{secrets.token_hex(3)}")
        run_dir.root.mkdir()
        mark_run(run_dir, "rl")
        note_launched(run_dir, "rl", {"model": {"name": "doctor"}, "monitor": []})
        monitor = JsonlMonitor(run_dir.metrics)
        monitor.record({"loss/total/mean": 0.0}, step=0)
        monitor.close()
        num_sent = send_run(run_dir, config.monitor, say=said.append)
        name = run_dir.root.name
    kept = f"; it stays there as {name}" if config.monitor.library else ""
    where = f", seen at {said[-1]}" if said else ""
    return f"{num_sent} record sent{where}{kept}"


PARTS: Mapping[str, Callable[[Request], str]] = {
    "files": probe_files,
    "engine": probe_engine,
    "tracker": probe_tracker,
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), PARTS)
