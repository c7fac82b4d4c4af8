"""Tokenizers that say what their file says, loaded without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.made_up_tokenizers import made_up_tokenizer
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from gradus.testing.tiny_model import build_tiny_model
from gradus.tokenizing import load_tokenizer, replaced_class

pytestmark = [pytest.mark.torch]

TEXT = "The answer  is a City.\n\n\tLet us think of 1234. Ze\u0301ro \u2713 <|im_start|>user\n x"

NAMES = """
names = {
    name: sorted(module.__all__ if type(module).__name__ == "_LazyModule" else vars(module))
    for name, module in list(sys.modules.items())
    if name.startswith("transformers.") and name != "transformers.utils"
}
"""
ALONE = f"""
import json, sys, threading
from gradus.tokenizing import torch_waits
from renderers.base import load_tokenizer

answers = []
def ask():
    from transformers import configuration_utils
    answers.append(configuration_utils.is_torch_available())

with torch_waits():
    tokenizer = load_tokenizer(sys.argv[1])
    ask()
    other = threading.Thread(target=ask)
    other.start()
    other.join()
ask()
tokens = tokenizer.encode("Ünder <|im_start|> 12")
is_without = "torch" not in sys.modules
{NAMES}
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
class Remote(PreTrainedModel):
    def generate(self): pass
    def prepare_inputs_for_generation(self): pass
bases = [base.__name__ for base in add_generation_mixin_to_remote_model(Remote).__bases__]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
said = model.generate(**tokenizer("sun", return_tensors="pt"), max_new_tokens=2)
watermark = transformers.WatermarkingConfig().construct_processor(100, "cpu")
rope = sys.modules["transformers.modeling_rope_utils"].torch
print(json.dumps([
    is_without, answers, names, tokens, repr(tokenizer), said.shape[0],
    type(watermark).__name__, bases, rope.Tensor is sys.modules["torch"].Tensor,
    hasattr(rope, "__path__"), str(model.config.dtype),
]))
"""
WITH_TORCH = f"""
import json, sys
from renderers.base import load_tokenizer
from gradus import tokenizing
tokenizing.VERSION = "another"
with tokenizing.torch_waits():
    load_tokenizer(sys.argv[1])
{NAMES}
print(json.dumps(["torch" not in sys.modules, names]))
"""


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Lowercase()])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox", None])
@pytest.mark.parametrize(
    "kind",
    [
        *("LlamaTokenizerFast", "GPT2Tokenizer", "GPTNeoXTokenizerFast", "CodeGenTokenizer"),
        *("Qwen2Tokenizer", "GemmaTokenizer", "CohereTokenizerFast", "DebertaV2Tokenizer"),
        *("PreTrainedTokenizerFast", "TokenizersBackend", "SomeTokenizerOfTheirOwn"),
    ],
)
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(
    kind: str, model_type: str | None, normalizer: Any, tmp_path: Path
) -> None:
    built = made_up_tokenizer(("<|im_start|>", "<|im_end|>")).backend_tokenizer
    built.normalizer = normalizer
    built.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "eos_token": "<|im_end|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = load_tokenizer(str(tmp_path))
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert (ids, tokenizer.eos_token) == (expected.ids, "<|im_end|>")
    assert tokenizer.decode(ids) == built.decode(ids, skip_special_tokens=False)
    # What reads the file as it is, is no fault of the folder.
    assert not (kind.startswith("PreTrained") and replaced_class(tokenizer))


def test_the_space_that_a_config_asks_for_before_a_text_stays(tmp_path: Path) -> None:
    made_up_tokenizer(()).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a")) == " a"
    assert replaced_class(tokenizer) is None


@pytest.mark.slow
def test_a_tokenizer_comes_without_torch_and_models_find_everything_afterwards(
    tmp_path: Path,
) -> None:
    """If transformers changed, look at what its modules ask of torch as they are imported."""
    model = build_tiny_model(tmp_path / "model")
    is_without, answers, names, *found = said(ALONE, model)
    assert is_without
    assert answers == [False, True, True]
    ordinary = AutoTokenizer.from_pretrained(model)
    tokens = ordinary.encode("Ünder <|im_start|> 12")
    processor, bases = "WatermarkLogitsProcessor", ["Remote", "GenerationMixin"]
    assert found == [tokens, repr(ordinary), 1, processor, bases, True, False, "torch.bfloat16"]
    # Another version of transformers is imported as it is, and then has the same names.
    is_without, with_torch = said(WITH_TORCH, model)
    assert not is_without
    assert len(with_torch) > len(names) > 200
    lacking = {name: set(with_torch[name]) - set(names[name]) for name in names}
    # This one is added when a class of remote code asks for it.
    factory = "transformers.models.auto.auto_factory"
    assert {name: left for name, left in lacking.items() if left} == {factory: {"GenerationMixin"}}


def said(code: str, model: Path) -> Any:
    """What `code` prints as JSON in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
