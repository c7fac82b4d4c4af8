"""Which position of a micro batch a logprob belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build_micro_batch, build_sample
from transformers import AutoModelForCausalLM

from gradus.trainer.model.policy_model import PolicyModel
from gradus.trainer.tensors import TrainTensors
from gradus.wire.sample import Sample

pytestmark = pytest.mark.torch


def plain_logprobs(model_dir: Path, sample: Sample) -> np.ndarray:
    """Of every token behind the first, [T - 1]: the labels are the inputs shifted left."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    token_ids = torch.from_numpy(sample.arrays.token_ids).long()
    temperatures = torch.from_numpy(sample.arrays.temperatures)[1:, None]
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0, :-1]
    scores = (logits / temperatures).log_softmax(-1).gather(1, token_ids[1:, None])
    return scores[:, 0].numpy()


def test_logprobs_are_shifted_back_and_the_first_of_each_sample_is_minus_ln_v(
    build_policy: Callable[[], PolicyModel], tiny_model: Path
) -> None:
    samples = [build_sample(9, prompt_length=3), build_sample(6, prompt_length=2, seed=1)]
    for sample in samples:
        sample.arrays.temperatures[sample.arrays.loss_mask] = 0.7
    policy = build_policy()
    tensors = TrainTensors.build(build_micro_batch(samples), torch.device("cpu"))
    with torch.no_grad():
        found = policy(tensors).logprobs.numpy()
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    start = 0
    for sample in samples:
        end = start + len(sample)
        trained = np.flatnonzero(sample.arrays.loss_mask)
        expected = plain_logprobs(tiny_model, sample)[trained - 1]
        np.testing.assert_allclose(found[start + trained], expected, atol=1e-5)
        assert found[start] == pytest.approx(-math.log(vocabulary))
        start = end
