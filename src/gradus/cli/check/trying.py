"""The child of what costs more than loading a part, else as `gradus.cli.check.child`."""

from __future__ import annotations

import json
import secrets
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from gradus.cli.check.child import Request, main, renderer_of
from gradus.cli.check.engine import QUESTION, probe_engine
from gradus.cli.check.parts import WARNING
from gradus.cli.check.stepping import probe_step
from gradus.config import ModelConfig, TrackConfig, load_config
from gradus.errors import ConfigError, first_line
from gradus.files import read_json
from gradus.plan.machine import model_note
from gradus.run.model_files import model_folder, text_part
from gradus.run.paths import RunDirectory

_ANSWER = {"role": "assistant", "content": "It is 42.\n\nBecause 12 + 30 = 42."}


# Files of the model.
def probe_files(request: Request) -> str:
    """The tensors are whole and fit the config, and so are tokenizer, template and stop tokens."""
    model = ModelConfig.model_validate(request["model"])
    folder = model_folder(model.name)
    if folder is None:
        raise ConfigError(f"{model.name} is not on this machine; fetch it first")
    tensors = read_tensors(folder)
    config = read_json(folder / "config.json")
    text = text_part(config)
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
    from gradus.orchestrator.play.renderer import load_policy_tokenizer, render
    from gradus.tokenizing import misread
    from gradus.wire.control_tokens import common_prefix, read_stop_token_ids

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

    prompt, whole = tokens([QUESTION], opens=True), tokens([QUESTION, _ANSWER], opens=False)
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
    settings, how = renderer_of(model)
    try:
        rendered = render(tokenizer, settings, [dict(QUESTION)])
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
    if text := misread(tokenizer):
        said.append(f"{WARNING}{text}")
    return said


# Trackers.
def probe_tracker(request: Request) -> str:
    """One record under a name of its own, sent as a run sends it."""
    from gradus.monitor import JsonlMonitor
    from gradus.run.lease import mark_run
    from gradus.run.recording import note_launched
    from gradus.tracking.follow.process import send_run

    config = load_config(TrackConfig, [], base={"monitor": request["monitor"]})
    said: list[str] = []
    with TemporaryDirectory(prefix="gradus-check-") as folder:
        run_dir = RunDirectory(Path(folder) / f"check-{secrets.token_hex(3)}")
        run_dir.root.mkdir()
        mark_run(run_dir, "rl")
        note_launched(run_dir, "rl", {"model": {"name": "check"}, "monitor": []})
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
    "answers": probe_engine,
    "step": probe_step,
    "tracker": probe_tracker,
}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), PARTS)
