"""One episode as a page shows it: its turns, numbers and tokens, each of bounded size."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gradus.errors import ConfigError, CorruptStateError
from gradus.run.episodes import images_in, text_of
from gradus.run.model_files import model_folder, published_models
from gradus.run.paths import RunDirectory
from gradus.run.recording import (
    EpisodeEntry,
    LaunchRecord,
    iter_entries,
    read_body,
    read_launched,
    recorded_terms,
)
from gradus.view.trained import NUMBERS, Found, trained_numbers
from gradus.wire.episode import POLICY_VERSIONS
from gradus.wire.versions import by_token, read_runs

MAX_CHARACTERS = 20_000
"""Of one text; the rest comes when it is asked for."""
MAX_NODES = 200
"""Messages of one trace; the others come when they are asked for."""
MAX_IMAGES = 64
"""Of one message."""
MAX_TOKENS = 20_000
"""Of one episode, with their numbers."""
_MAX_TRACES = 64
_MAX_INFO = 4_000
_SHORT = 80
_LARGEST = sys.float_info.max
_STAGES = ("boot", "setup", "agent", "finalize", "scoring")
_TOLD = ("texts", "sampled", "logprobs", "versions")
"""What the engine told of tokens; the trainer's are `NUMBERS`."""
_NAMES = {"texts": "text", "logprobs": "engine", "versions": "version", "policy": "trainer"}
"""What a row of a token calls its columns, where they differ."""
_WRONG_FORM = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def episode_page(record: Mapping[str, Any], *, first: int = 0) -> dict[str, Any]:
    """What stands in a record; of each trace the messages from `first` on."""
    own, task = _mapping(record.get("gradus")), _mapping(record.get("task"))
    named = _mapping(own.get("task")) or task
    data = _mapping(task.get("data"))
    traces = [it for it in _items(record.get("traces")) if isinstance(it, Mapping)]
    advantages = _items(own.get("advantages"))
    return {
        "id": own.get("episode") or record.get("id"),
        "source": own.get("source") or _mapping(record.get("env")).get("name"),
        "group": own.get("group") or _mapping(record.get("group")).get("id"),
        "task": {"key": named.get("key"), "index": named.get("index"), "name": data.get("name")},
        "answer": _bounded(data["answer"]) if isinstance(data.get("answer"), str) else None,
        "versions": own.get("versions"),
        "outcome": own.get("outcome"),
        "reward": _number(own.get("reward")),
        "dropped": _mapping(own.get("dropped")),
        "filters": _mapping(own.get("filters")),
        "error": own.get("error") or next(iter(_items(record.get("errors"))), None),
        "cut": own.get("cut"),
        "num_traces": len(traces),
        "traces": [
            _trace(it, advantages[place] if place < len(advantages) else None, first)
            for place, it in enumerate(traces[:_MAX_TRACES])
        ],
    }


def _trace(trace: Mapping[str, Any], advantage: Any, first: int) -> dict[str, Any]:
    agent, timing = _mapping(trace.get("agent")), _mapping(trace.get("timing"))
    nodes = _items(trace.get("nodes"))
    calls = [_mapping(it) for it in _items(trace.get("calls"))]
    call_of = {node: it for it in calls if isinstance(node := it.get("node"), int)}
    shown = [
        _node(place, _mapping(node), call_of.get(place, {}))
        for place, node in islice(enumerate(nodes), first, first + MAX_NODES)
    ]
    rewards = _mapping(trace.get("rewards"))
    return {
        "agent": agent.get("name") or "",
        "trainable": bool(agent.get("trainable", True)),
        "advantage": _number(advantage),
        "rewards": [
            {"name": name, "score": _number(it.get("score")), "weight": _number(it.get("weight"))}
            for name, part in rewards.items()
            for it in [_mapping(part)]
        ],
        "metrics": {str(k): _number(v) for k, v in _mapping(trace.get("metrics")).items()},
        "tools": _tools(trace.get("tools")),
        "stop": trace.get("stop_condition"),
        "truncated": trace.get("is_truncated"),
        "tokens": trace.get("num_output_tokens"),
        "prompt_tokens": trace.get("num_input_tokens"),
        "errors": [_bounded(json.dumps(it)) for it in _items(trace.get("errors"))[:8]],
        "info": json.dumps(trace.get("info") or {}, ensure_ascii=False)[:_MAX_INFO],
        "verdict": _verdict(_mapping(trace.get("info"))),
        "seconds": {name: _seconds(timing.get(name)) for name in _STAGES},
        "num_nodes": len(nodes),
        "nodes": shown,
    }


def _tools(given: Any) -> list[dict[str, Any]]:
    """As a server of chats takes them; none where they are too long for it."""
    names = ("name", "description", "parameters")
    found = [
        {"type": "function", "function": {name: it[name] for name in names if name in it}}
        for it in map(_mapping, _items(given)[:MAX_NODES])
    ]
    return found if len(json.dumps(found)) <= MAX_CHARACTERS else []


def _verdict(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a judge decided, who answered what at last, and what became of it when the judge was
    asked again with the sides in the other order; None for a trace that notes none."""
    told, again = _mapping(info.get("debate")), _mapping(info.get("judge_again"))
    if not told and not again:
        return None
    answers = {k.removeprefix("answer/"): v for k, v in told.items() if k.startswith("answer/")}
    return {
        "winner": _bounded(str(told.get("winner") or "")),
        "answers": {str(k)[:_SHORT]: _bounded(str(v)) for k, v in islice(answers.items(), 32)},
        "flipped": flipped if isinstance(flipped := again.get("flipped"), bool) else None,
        "failure": _bounded(str(again.get("failure") or "")),
    }


def _node(place: int, node: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    message = _mapping(node.get("message"))
    calls = [it for it in _items(message.get("tool_calls")) if isinstance(it, Mapping)]
    functions = [_mapping(it.get("function")) or it for it in calls]
    reasoning = message.get("reasoning_content")
    return {
        "node": place,
        "role": str(message.get("role") or ""),
        "sampled": bool(node.get("sampled")),
        "text": _bounded(text_of(message.get("content"))),
        "images": images_in(message.get("content"))[:MAX_IMAGES],
        "reasoning": _bounded(reasoning) if isinstance(reasoning, str) else None,
        "calls": [
            {"name": str(it.get("name") or ""), "arguments": _bounded(str(it.get("arguments")))}
            for it in functions[:MAX_NODES]
        ],
        "tool": message.get("name"),
        "tokens": node.get("num_sampled_tokens") or node.get("num_tokens"),
        "finish": call.get("finish_reason"),
        "seconds": _seconds(call.get("time")),
        "began": _number(_mapping(call.get("time")).get("start")),
    }


def whole_text(record: Mapping[str, Any], trace: int, node: int) -> str:
    """The content of one message, however long; ConfigError when there is none."""
    try:
        return text_of(record["traces"][trace]["nodes"][node]["message"]["content"])
    except _WRONG_FORM:
        raise ConfigError(f"the episode has no text {node} in trace {trace}") from None


def _bounded(text: str) -> dict[str, Any]:
    return {"text": text[:MAX_CHARACTERS], "length": len(text)}


def _seconds(span: Any) -> float | None:
    try:
        return _number(span["end"] - span["start"])
    except _WRONG_FORM:
        return None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) <= _LARGEST else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


class _NodeTokens(msgspec.Struct):
    parent: int | None = None
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []


class _TraceTokens(msgspec.Struct):
    nodes: list[_NodeTokens] = []
    info: Any = None


class _EpisodeTokens(msgspec.Struct):
    id: str = ""
    traces: list[_TraceTokens] = []


class _Played(msgspec.Struct):
    """An entry of `episodes.bin`, without what the readable record says too."""

    episode: bytes | None = None


class TokenRecords:
    """Finds the tokens of episodes in `replay/`; reads on as the files grow.

    >>> TokenRecords(run_dir).read("g000000.0", "5a79b57f", step=3)  # doctest: +SKIP
    {"traces": [...], "missing": {"trainer": "the run keeps none ..."}}
    """

    def __init__(self, run_dir: RunDirectory) -> None:
        self._run_dir = run_dir
        self._entries: dict[int, dict[str, EpisodeEntry]] = {}
        self._ends: dict[int, int] = {}

    def of(self, record: Mapping[str, Any], *, limit: int | None = MAX_TOKENS) -> dict[str, Any]:
        """The tokens of the episode that a record of `episodes/` is about."""
        own = _mapping(record.get("gradus"))
        step = own.get("step")
        step = step if isinstance(step, int) else -1
        name, record_id = str(own.get("episode") or ""), str(record.get("id") or "")
        return self.read(name, record_id, step, limit=limit)

    def read(
        self, episode: str, record_id: str, step: int, *, limit: int | None = MAX_TOKENS
    ) -> dict[str, Any]:
        """The tokens of an episode with what is known of them; `why` there are none, or what of
        them is `missing` and why.

        An episode that was played again after a resume has the same name in several launches;
        `record_id` tells them apart.
        """
        terms = recorded_terms(self._run_dir)
        if not terms:
            return {
                "why": "replay/ is not there: the run recorded no tokens (an evaluation, a "
                "supervised run, or orchestrator.recording = false), or they were deleted"
            }
        for term in reversed(terms):
            path = LaunchRecord(self._run_dir, term).episodes
            try:
                entry = self._find(term, path, episode)
                found = None if entry is None else _decode(path, entry)
            except (OSError, CorruptStateError, msgspec.DecodeError) as error:
                return {"why": f"the tokens cannot be read: {error}"}
            if found is not None and record_id in ("", found.id):
                nodes = [trace.nodes for trace in found.traces]
                trained, why = trained_numbers(self._run_dir, step, episode, nodes)
                shown = _shown(found, self.texts(), trained, limit)
                missing = {"trainer": why, "versions": _without_versions(shown)}
                if not _has_any(shown, "reference"):
                    missing["reference"] = why or "no reference model scored it"
                return shown | {"missing": {name: it for name, it in missing.items() if it}}
        return {
            "why": "replay/ does not hold this episode: evaluations are not recorded there, "
            "and keep_gib deletes the oldest"
        }

    def _find(self, term: int, path: Path, episode: str) -> EpisodeEntry | None:
        entries = self._entries.setdefault(term, {})
        if not path.is_file():
            return None
        if path.stat().st_size < self._ends.get(term, 0):
            entries.clear()
            self._ends[term] = 0
        for entry in iter_entries(path, start=self._ends.get(term, 0)):
            entries[entry.id] = entry
            self._ends[term] = entry.end
        return entries.get(episode)

    def texts(self) -> TokenTexts | None:
        """Of the run's tokenizer; None where none is found."""
        name = _mapping(read_launched(self._run_dir).config.get("model")).get("name")
        folders = [self._run_dir.model, *published_models(self._run_dir).values()]
        if isinstance(name, str) and (folder := model_folder(name, file="tokenizer.json")):
            folders.append(folder)
        paths = [folder / "tokenizer.json" for folder in folders]
        return next((_texts_of(path) for path in paths if path.is_file()), None)


def _decode(path: Path, entry: EpisodeEntry) -> _EpisodeTokens | None:
    with path.open("rb") as file:
        body = read_body(file, entry, path)
    played = msgspec.msgpack.decode(body, type=_Played)
    if played.episode is None:
        return None
    return msgspec.msgpack.decode(played.episode, type=_EpisodeTokens)


def _without_versions(shown: Mapping[str, Any]) -> str:
    return "" if _has_any(shown, "versions") else "the engine, or an older gradus, did not say"


def _has_any(shown: Mapping[str, Any], name: str) -> bool:
    nodes = (node for trace in shown["traces"] for node in trace)
    return any(it is not None for node in nodes for it in node.get(name, []))


def _shown(
    episode: _EpisodeTokens, texts: TokenTexts | None, trained: Found, limit: int | None
) -> dict[str, Any]:
    total = sum(len(node.token_ids) for trace in episode.traces for node in trace.nodes)
    left = most = total if limit is None else min(limit, total)
    traces = []
    for number, trace in enumerate(episode.traces):
        nodes = []
        noted = _mapping(_mapping(trace.info).get(POLICY_VERSIONS))
        for place, node in enumerate(trace.nodes):
            ids = node.token_ids[:left]
            left -= len(ids)
            numbers = iter(node.logprobs)
            is_sampled = node.mask or [False] * len(ids)
            own = [it for it, sampled in zip(ids, is_sampled, strict=False) if sampled]
            nodes.append(
                {
                    "ids": ids,
                    "texts": [texts.text(it) for it in ids] if texts else None,
                    "read_otherwise": texts.read_otherwise(own) if texts else [],
                    "logprobs": [
                        _number(next(numbers, None)) if sampled else None
                        for sampled in is_sampled[: len(ids)]
                    ],
                    "sampled": is_sampled[: len(ids)],
                    "versions": _versions(noted.get(str(place)), is_sampled)[: len(ids)],
                    **{k: it[: len(ids)] for k, it in trained.get((number, place), {}).items()},
                }
            )
        traces.append(nodes)
    return {"traces": traces, "left_out": total - (most - left), "has_texts": bool(texts)}


def token_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A dict for each token, with all that is known of it; numbers that nobody noted are None."""
    rows = []
    for trace, nodes in enumerate(found.get("traces") or []):
        for message, node in enumerate(nodes):
            for place, token in enumerate(node["ids"]):
                columns = {name: node.get(name) or [] for name in (*_TOLD, *NUMBERS)}
                row: dict[str, Any] = {
                    k: it[place] if place < len(it) else None for k, it in columns.items()
                }
                engine, trainer = row["logprobs"], row["policy"]
                is_both = engine is not None and trainer is not None
                rows.append(
                    {
                        "trace": trace,
                        "message": message,
                        "token": token,
                        **{_NAMES.get(name, name): value for name, value in row.items()},
                        "mismatch": trainer - engine if is_both else None,
                        "drift": None
                        if trainer is None or row["reference"] is None
                        else trainer - row["reference"],
                    }
                )
    return rows


def _versions(noted: Any, is_sampled: Sequence[bool]) -> list[int | None]:
    runs = read_runs(noted, sum(is_sampled))
    versions = iter(by_token(runs).tolist()) if runs else None
    return [next(versions) if it else None for it in is_sampled] if versions else []


class TokenTexts:
    """The text of each token of a vocabulary by itself; bytes that are no text as `\\xe2`."""

    def __init__(self, path: Path) -> None:
        """ConfigError when the file is no tokenizer's."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self._special = set(self._tokenizer.get_added_tokens_decoder())
        except Exception as error:  # The library raises nothing narrower.
            raise ConfigError(f"{path} cannot be read: {error}") from error
        form = json.loads(path.read_bytes())
        is_of_bytes = '"ByteLevel"' in json.dumps([form.get("decoder"), form.get("pre_tokenizer")])
        self._bytes = dict(_byte_letters()) if is_of_bytes else {}

    def text(self, token: int) -> str:
        """
        >>> TokenTexts(path).text(1053)  # doctest: +SKIP
        ' the'
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return f"<{token}>"
        if token in self._special:
            return str(piece)
        if self._bytes and all(letter in self._bytes for letter in piece):
            raw = bytes(self._bytes[letter] for letter in piece)
        elif found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            raw = bytes([int(found[1], 16)])
        else:
            return str(piece).replace("\u2581", " ")
        return raw.decode(errors="backslashreplace")

    def read_otherwise(self, tokens: Sequence[int]) -> list[int]:
        """Which of them, by their place, are other tokens when the text of all is read again."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        again = self._tokenizer.encode(text, add_special_tokens=False).ids
        if again == list(tokens) or "\ufffd" in text:
            return []
        blocks = SequenceMatcher(None, tokens, again, autojunk=False).get_matching_blocks()
        alike = {place for it in blocks for place in range(it.a, it.a + it.size)}
        return [place for place in range(len(tokens)) if place not in alike]


@lru_cache(maxsize=4)
def _texts_of(path: Path) -> TokenTexts | None:
    try:
        return TokenTexts(path)
    except ConfigError:
        return None


def _byte_letters() -> Iterator[tuple[str, int]]:
    """The letter by which tokenizers of bytes write each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in plain:
            yield chr(byte), byte
        else:
            yield chr(0x100 + others), byte
            others += 1
