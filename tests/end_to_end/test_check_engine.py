"""The questions of a check to a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from running import RunningInference
from safetensors.torch import load_file

from gradus.cli.check.trying import PARTS
from gradus.orchestrator.play.inference_client import InferenceClient
from gradus.weights.filesystem import FilesystemWeights
from gradus.wire.events import PolicyPublished

pytestmark = [pytest.mark.end_to_end, pytest.mark.torch]


async def serve_initial_weights(server: RunningInference) -> None:
    """As one more version: what other tests published lies before it."""
    client = await InferenceClient.connect(server.run_dir, term=server.term)
    version = client.version + 1
    weights = FilesystemWeights(server.run_dir, term=server.term, extra_files={})
    tensors = load_file(server.model_dir / "model.safetensors")
    published = weights.publish_version(version, tensors.items())
    place = str(published.directory)
    await client.apply(PolicyPublished(version, server.term, place, published.digest))
    await client.close()


async def test_a_real_engine_answers_every_question_of_a_check(
    inference_server: RunningInference,
) -> None:
    await serve_initial_weights(inference_server)
    request = {
        "run_dir": str(inference_server.run_dir.root),
        "term": inference_server.term,
        "process": "inference",
        "model": {"name": str(Path(inference_server.model_dir)), "max_length_tokens": 1024},
        "dtype": "bfloat16",
        "vocabulary": 106,
        "lora": None,
        "takes_turns": False,
    }
    said = await asyncio.to_thread(PARTS["answers"], request)
    assert "refuses a wrong token of either kind" in said
    assert "nats of a float32 forward" in said
    assert "3 versions: each answers all of a batch once sent" in said
