"""Engine = trainer with images: as engine_logprobs.py, of models that read images.

    python benchmarks/engine_images.py CASE:DTYPE ...

Cases are those of tests/support/image_families.py. Each prompt shows one drawn image of another
size; vLLM and the trainer make its pixels each by itself. Results go where those of
engine_logprobs.py go.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engine_logprobs as of_text
from engine_logprobs import RESULTS, _config, _with

SIZES = ((98, 70), (64, 64), (33, 120), (70, 98))
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def main() -> None:
    from gradus.companions import show_torchvision
    from gradus.inference.server import prepare_process

    show_torchvision()
    prepare_process(_config("none", "float32"))
    for word in sys.argv[1:]:
        case, _, dtype = word.partition(":")
        began = time.monotonic()
        try:
            found = asyncio.run(asyncio.wait_for(_compared(case, dtype), 540))
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            found = {"error": f"{type(error).__name__}: {lines[-1] if lines else ''}"}
        print(f"{case} {dtype} {time.monotonic() - began:.0f} s: {found}", flush=True)
        if "error" not in found:
            noted = _with(case, dtype, found)
            RESULTS.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def _build(folder: Path, case: str, dtype: str, seed: int) -> int:
    """The model with its processor; the placeholder's token."""
    import transformers
    from image_families import TOWER, build_image_family, save_gemma4_processor
    from model_families import FAMILIES

    from gradus.testing.tiny_model import build_tiny_tokenizer

    tokenizer: Any = build_tiny_tokenizer(folder)
    if case.startswith("gemma4"):
        ids = save_gemma4_processor(folder, tokenizer)
        words = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
        sounds = FAMILIES["gemma4 with its tower"][1]["audio_config"]
        build_image_family(folder, case, seed=seed, text_config=words, audio_config=sounds, **ids)
        return ids["image_token_id"]
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(TOKENS))
    sides = {name: TOWER[name] for name in ("patch_size", "temporal_patch_size")}
    sides |= {
        "merge_size": TOWER["spatial_merge_size"],
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    kinds = ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")
    kinds = kinds if case == "qwen2_5_vl" else ("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
    processor, video_processor = (getattr(transformers, name) for name in kinds)
    processor(
        image_processor=transformers.Qwen2VLImageProcessor(
            **sides, size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
        ),
        tokenizer=tokenizer,
        video_processor=video_processor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    text: dict[str, Any] = {"vocab_size": len(tokenizer)}
    if case.startswith("qwen3_5") and dtype != "float32":
        text |= of_text.DELTA_SIZES
    build_image_family(
        folder,
        case,
        seed=seed,
        text_config=text,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return int(image)


async def _compared(case: str, dtype: str) -> dict[str, Any]:
    import torch
    from image_families import IMAGE_FAMILIES, image_policy

    from gradus.inference.policy_engine import EngineCounters, VllmControl
    from gradus.inference.vllm_server import build_arguments, start_engine
    from gradus.run.paths import RunDirectory
    from gradus.trainer.publish import serving_tensors
    from gradus.weights.filesystem import FilesystemWeights

    root, torch_dtype = Path(tempfile.mkdtemp(prefix="gradus_images_")), getattr(torch, dtype)
    image = _build(root / "first", case, dtype, 0)
    _build(root / "second", case, dtype, 1)
    routes = "num_experts" in IMAGE_FAMILIES[case][1]
    arguments = build_arguments(_config(str(root / "first"), dtype, routes))
    # vLLM gives transformers classes of its own for the configs of some families.
    policies = [image_policy(root / name, torch_dtype) for name in ("first", "second")]
    engine = start_engine(arguments, EngineCounters())
    try:
        await engine.update_weight_version("0")
        first = await _sampled(engine, image)
        again = await _sampled(engine, image)
        weights = FilesystemWeights(RunDirectory(root / "run"), term=0, extra_files={})
        tensors = serving_tensors(policies[1].model, torch_dtype)
        published = weights.publish_version(1, tensors)
        control = VllmControl(engine)
        await control.pause()
        await control.load(published.directory)
        await control.set_version(1)
        await control.resume()
        second = await _sampled(engine, image)
    finally:
        await asyncio.to_thread(engine.shutdown, 2.0)
    score = partial(_differences, folder=root / "first")
    replayed = of_text._replayed(policies, first, second, score) if routes else {}
    return {
        **({"experts": replayed} if replayed else {}),
        "first": of_text._summary(score(policies[0], first)),
        "cached": of_text._summary(score(policies[0], again)),
        "published": of_text._summary(score(policies[1], second)),
    }


def _drawn(size: tuple[int, int]) -> bytes:
    from PIL import Image, ImageDraw

    picture, file = Image.new("RGB", size, "white"), io.BytesIO()
    ImageDraw.Draw(picture).ellipse((5, 5, size[0] // 2, size[1] // 2), fill="red")
    picture.save(file, "PNG")
    return file.getvalue()


async def _sampled(engine: Any, image: int) -> Any:
    """Prompt, tokens, logprobs, experts and span of each reply."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from gradus.wire.images import open_image

    async def one(number: int, size: tuple[int, int]) -> Any:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=of_text.REPLY_TOKENS,
            ignore_eos=True,
            logprobs=0,
            seed=number,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        given = [*range(5, 15 + number), image, *range(20, 40)]
        pictures = {"image": [open_image(_drawn(size))]}
        prompt: Any = TokensPrompt(prompt_token_ids=given, multi_modal_data=pictures)
        async for output in engine.generate(prompt, params, f"{number}-{time.monotonic_ns()}"):
            reply = output.outputs[0]
        ids, read = list(reply.token_ids), list(output.prompt_token_ids)
        logprobs = [it[t].logprob for it, t in zip(reply.logprobs, ids, strict=True)]
        span = (read.index(image), read.count(image), size)
        return read, ids, logprobs, reply.routed_experts, span

    return await asyncio.gather(*(one(n, size) for n, size in enumerate(SIZES)))


def _differences(policy: Any, replies: Any, folder: Path) -> Any:
    """Policy logprob minus sampling logprob of each sampled token, all replies in one row."""
    import numpy as np
    import torch

    from gradus.config import ModelConfig
    from gradus.trainer.images.pixels import pixels_of
    from gradus.trainer.tensors import ReadyMicroBatch
    from gradus.wire.images import ImageSpan, ImageStore
    from gradus.wire.micro_batch import MicroBatch
    from gradus.wire.tokens import TokenArrays

    store = ImageStore(folder / "images")
    spans = [[ImageSpan(store.put(_drawn(it[2])), it[0], it[1])] for *_, it in replies]
    rows = [reply[0] + reply[1] for reply in replies]
    weight = np.concatenate(
        [np.arange(len(r)) >= len(it[0]) for r, it in zip(rows, replies, strict=True)]
    )
    arrays = TokenArrays.build(
        np.concatenate(rows),
        {"ce": weight.astype(np.float32)},
        experts=of_text._experts(replies),
    )
    batch = MicroBatch(list("abcd"), [len(row) for row in rows], arrays, images=spans)
    batch.check()
    pixels = pixels_of(policy.model, ModelConfig(name=str(folder)), store.folder, torch.float32)
    with torch.no_grad():
        ready = ReadyMicroBatch.of(batch, torch.device("cpu"), pixels)
        scores = policy(ready.tensors).logprobs[torch.from_numpy(weight)]
    return scores.double() - torch.cat([torch.tensor(it[2]) for it in replies]).double()


if __name__ == "__main__":
    main()
