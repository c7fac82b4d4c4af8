"""Images of a conversation: refused before the engine sees them, and sent to it once."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
import verifiers.v1 as vf
from aiohttp import web
from made_up_tokenizers import control_of, made_up_tokenizer, renderer_names
from PIL import Image
from renderers.gemma4 import Gemma4Renderer

from gradus.environments.policy import images as shown_images
from gradus.environments.policy.images import CheckedImages, leave_images_to_engine
from gradus.environments.verifiers import engine_client
from gradus.environments.verifiers.engine_client import EngineClient
from gradus.errors import ProtocolError
from gradus.wire.inference import INFERENCE_TOKEN_VARIABLE

PLACEHOLDER = 90


def part(shade: int) -> dict[str, str]:
    """As verifiers gives an image of one colour and a random rest to the engine's client."""
    content = io.BytesIO()
    Image.frombytes("RGB", (8, 8), bytes([shade, *range(191)])).save(content, "PNG")
    encoded = base64.b64encode(content.getvalue()).decode()
    return {"type": "image_url", "url": f"data:image/png;base64,{encoded}"}


A, B, C = part(0), part(1), part(2)


class CachingEngine:
    """Owns a server that keeps images by their names, as vLLM's cache of processed images."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.asked: list[list[dict[str, str]]] = []
        """The images of each request."""
        self.shown: list[list[str]] = []
        """What the model saw."""
        self.refusal: str | None = None
        self.drifted: set[str] = set()
        """Images that its front has and its core has not, until it is asked for them."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        body = msgspec.json.decode(await request.read())
        parts = body["content_parts"]
        self.asked.append(parts)
        for number, it in enumerate(parts):
            if "url" not in it and it["uuid"] not in self.kept:
                return self.refused(f"Cache miss for image at index {number}")
            if "uuid" in it and "url" in it:
                self.kept[it["uuid"]] = it["url"]
        if drifted := self.drifted & {
            it["url"] if "url" in it else self.kept[it["uuid"]] for it in parts
        }:
            self.drifted -= drifted
            return self.refused("Internal server error", status=500)
        if self.refusal is not None:
            return self.refused(self.refusal)
        self.shown.append([it.get("url") or self.kept[it["uuid"]] for it in parts])
        return web.json_response({"choices": [{"token_ids": body["token_ids"]}]})

    def refused(self, text: str, *, status: int = 400) -> web.Response:
        return web.json_response({"error": {"message": text, "code": status}}, status=status)

    @property
    def num_sent(self) -> list[int]:
        """Images with their bytes in each request."""
        return [sum("url" in it for it in parts) for parts in self.asked]


@pytest.fixture
async def engine() -> CachingEngine:
    return CachingEngine()


@pytest.fixture
async def base_url(engine: CachingEngine) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(engine.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


@pytest.fixture
async def client(base_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    """Of the run's own engine."""
    monkeypatch.setenv(INFERENCE_TOKEN_VARIABLE, "token")
    config = vf.TrainClientConfig(base_url=base_url, api_key_var=INFERENCE_TOKEN_VARIABLE)
    opened = EngineClient(config)
    yield opened
    await opened.close()


async def ask(client: EngineClient, *parts: dict[str, str]) -> None:
    url = f"{client.base_url.removesuffix('/v1')}/inference/v1/generate"
    body: dict[str, Any] = {"model": "policy", "token_ids": [1, 2], "sampling_params": {}}
    await client.post(url, body={**body, "content_parts": [*parts]})


def urls(*parts: dict[str, str]) -> list[str]:
    return [it["url"] for it in parts]


async def test_images_of_earlier_turns_and_episodes_are_named_and_not_sent(
    engine: CachingEngine, client: EngineClient
) -> None:
    await ask(client, A)
    await ask(client, A, B)
    await ask(client, A, B, A, C)
    await ask(client, B)
    assert engine.num_sent == [1, 1, 1, 0]
    assert engine.shown == [urls(A), urls(A, B), urls(A, B, A, C), urls(B)]
    assert {key for parts in engine.asked for it in parts for key in it} == {"type", "uuid", "url"}


async def test_an_engine_that_has_none_of_them_any_more_gets_them_again(
    engine: CachingEngine, client: EngineClient
) -> None:
    """It was started again at the same address, or its cache was full."""
    await ask(client, A)
    engine.kept.clear()
    await ask(client, A, B)
    await ask(client, A, B)
    assert engine.num_sent == [1, 1, 2, 0]
    assert engine.shown == [urls(A), urls(A, B), urls(A, B)]


async def test_an_engine_whose_two_caches_differ_is_asked_again(
    engine: CachingEngine, client: EngineClient
) -> None:
    """First where all is sent, then where nothing was, and then where one of two is missing."""
    engine.drifted = {A["url"]}
    await ask(client, A)
    engine.drifted = {A["url"]}
    await ask(client, A)
    await ask(client, B)
    engine.drifted = {A["url"]}
    engine.kept = {name: url for name, url in engine.kept.items() if url == A["url"]}
    await ask(client, A, B)
    assert engine.num_sent == [1, 1, 0, 1, 1, 0, 2, 2]
    assert engine.shown == [urls(A), urls(A), urls(B), urls(A, B)]


async def test_another_error_is_told_after_the_images_were_sent_once_more(
    engine: CachingEngine, client: EngineClient
) -> None:
    await ask(client, A)
    engine.refusal = "the prompt is too long"
    with pytest.raises(openai.APIStatusError, match="the prompt is too long"):
        await ask(client, A)
    with pytest.raises(openai.APIStatusError, match="the prompt is too long"):
        await ask(client, A)
    assert engine.num_sent == [1, 0, 1, 1]


async def test_an_engine_of_others_gets_all_images_and_no_names(
    engine: CachingEngine, base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_TOKEN", "token")
    client = EngineClient(vf.TrainClientConfig(base_url=base_url, api_key_var="THE_TOKEN"))
    for _ in range(2):
        await ask(client, A)
    assert engine.asked == [[A], [A]]
    await client.close()


async def test_what_was_sent_longest_ago_is_forgotten_first(
    engine: CachingEngine, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_images, "REMEMBERED_IMAGES", 2)
    for it in (A, B, A, C, A, B):
        await ask(client, it)
    assert engine.num_sent == [1, 1, 0, 1, 0, 1]


async def test_an_image_that_cannot_be_shown_fails_its_own_request_and_the_engine_sees_none(
    engine: CachingEngine, client: EngineClient
) -> None:
    bad = [
        {"type": "image_url", "url": "http://127.0.0.1:9/a.png"},
        {"type": "image_url", "url": "data:image/png;base64,aGVsbG8="},
        {"type": "video_url", "url": "data:video/mp4;base64,aGVsbG8="},
    ]
    for it, said in zip(bad, ["not fetched", "cannot be decoded", "only images"], strict=True):
        with pytest.raises(openai.APIStatusError, match=f"image 1 of the conversation: .*{said}"):
            await ask(client, A, it)
    assert engine.asked == []
    await ask(client, A)
    assert engine.num_sent == [1]


async def test_a_task_cannot_name_an_image_of_another_one(
    engine: CachingEngine, client: EngineClient
) -> None:
    await ask(client, A)
    name = engine.asked[0][0]["uuid"]
    await ask(client, {**B, "uuid": name})
    with pytest.raises(openai.APIStatusError, match="expected data:image"):
        await ask(client, {"type": "image_url", "url": name})
    assert engine.shown == [urls(A), urls(B)]
    assert engine.kept[name] == A["url"]


async def test_a_conversation_in_which_the_policy_wrote_a_placeholder_fails_by_name() -> None:
    images = CheckedImages()
    await images.named([A], [1, PLACEHOLDER, PLACEHOLDER])  # nothing is known before an answer
    answer = msgspec.json.encode(
        {
            "prompt_token_ids": [1, PLACEHOLDER, PLACEHOLDER, 2],
            "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
        }
    )
    images.placeholders |= msgspec.json.decode(answer, type=engine_client._Reply).placeholders
    await images.named([A, B], [1, PLACEHOLDER, 5, PLACEHOLDER])
    with pytest.raises(ProtocolError, match="shows 1 images, and 2 tokens stand for one"):
        await images.named([A], [1, PLACEHOLDER, 5, PLACEHOLDER])
    assert msgspec.json.decode(b"{}", type=engine_client._Reply).placeholders == set()


class Sized:
    """Makes as many tokens of an image as its number says, as Gemma 4's processor does."""

    def image_processor(self, images: Any, **_: Any) -> dict[str, Any]:
        made = {name: [0] for name in ("pixel_values", "image_position_ids")}
        return {**made, "num_soft_tokens_per_image": [3 + images[0].size[0] % 5]}


@pytest.mark.parametrize("tools", [None, []])
def test_prompts_of_gemma_4_have_one_token_for_an_image_which_the_engine_writes_out(
    tools: Any,
) -> None:
    """vLLM puts those around it in its place too; both turns are then as when the images are
    processed here."""
    leave_images_to_engine()
    leave_images_to_engine()  # twice is harmless
    assert "gemma4" in renderer_names()
    tokenizer: Any = made_up_tokenizer(control_of("gemma4"))
    renderer: Any = Gemma4Renderer(tokenizer, processor=Sized())
    names = ("<|image>", "<|image|>", "<image|>")
    begin, image, end = (tokenizer.convert_tokens_to_ids(it) for it in names)

    def asked(*parts: dict[str, str]) -> list[dict[str, Any]]:
        shown = [{"type": "image_url", "image_url": {"url": it["url"]}} for it in parts]
        return [{"role": "user", "content": [*shown, {"type": "text", "text": "how many?"}]}]

    def written_out(token_ids: list[int], *, lengths: tuple[int, ...]) -> list[int]:
        left = iter(lengths)
        return [
            each
            for it in token_ids
            for each in ([begin, *[image] * next(left), end] if it == image else [it])
        ]

    first, second = asked(A, B), asked(C)
    reply = [*tokenizer.encode("two"), tokenizer.convert_tokens_to_ids("<turn|>")]
    options: dict[str, Any] = {"tools": tools}
    here = renderer.render(first, add_generation_prompt=True, **options)
    left = renderer.render(first, add_generation_prompt=True, process_multimodal=False, **options)
    lengths = tuple(it.length for it in here.multi_modal_data.mm_placeholders["image"])
    assert left.multi_modal_data is None
    assert left.token_ids.count(image) == 2
    assert begin not in left.token_ids
    assert written_out(left.token_ids, lengths=lengths) == here.token_ids
    left = renderer.bridge_to_next_turn(
        left.token_ids, reply, second, process_multimodal=False, **options
    )
    here = renderer.bridge_to_next_turn(here.token_ids, reply, second, **options)
    lengths += tuple(it.length for it in here.multi_modal_data.mm_placeholders["image"])
    assert written_out(left.token_ids, lengths=lengths) == here.token_ids
    found = engine_client._Reply(
        prompt_token_ids=here.token_ids,
        mm_placeholders={
            "image": [{"offset": here.token_ids.index(begin), "length": lengths[0] + 2}]
        },
    )
    assert found.placeholders == {image}
