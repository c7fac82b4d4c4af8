"""What an episode of the check says: its tokens, and its words for a person.

The tokenizer has one token for each byte, so that a reply may be any text and also no text at all,
as a real engine may sample one. Its special tokens are those of the Qwen3 chat format, which the
`qwen3` renderer writes and reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from verifiers.v1.episode import WireEpisode
from verifiers.v1.trace import WireTrace

from gradus.conformance.findings import shortened
from gradus.testing.engine_script import GenerateCall

USER, END = "<|im_start|>user\n", "<|im_end|>"
_CONTROL = ("<|endoftext|>", "<|im_start|>", END)
_MAX_MESSAGES = 12
_WIDTH = 300
_MARKUP = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)


class ByteTokenizer:
    """Owns the tokenizer that the environment's worker loads from a folder.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("naïve"))
    'naïve'
    """

    def __init__(self) -> None:
        vocabulary = {symbol: byte for byte, symbol in enumerate(_symbols())}
        self._tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        for names, is_special in ((_CONTROL, True), (_MARKUP, False)):
            added = [AddedToken(name, special=is_special, normalized=False) for name in names]
            self._tokenizer.add_tokens(added) if not is_special else (
                self._tokenizer.add_special_tokens(added)
            )

    def save(self, folder: Path) -> None:
        """Write what transformers needs to load it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": _CONTROL[0],
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def encode(self, reply: str | bytes) -> list[int]:
        """Tokens of a text, or of bytes that may be none."""
        if isinstance(reply, bytes):
            return list(reply)
        tokens: list[int] = self._tokenizer.encode(reply, add_special_tokens=False).ids
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def last_user_text(self, prompt: Sequence[int]) -> str:
        """What the user said last in a prompt; empty without a message of the user.

        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.last_user_text(tokenizer.encode("<|im_start|>user\\nhello<|im_end|>"))
        'hello'
        """
        said = self.decode(prompt).rpartition(USER)
        return said[2].partition(END)[0] if said[1] else ""


def _symbols() -> list[str]:
    """The character by which a byte-level tokenizer writes each byte, in the order of the bytes:
    the byte's own where Latin-1 prints it, otherwise the next one from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    following = iter(range(256, 512))
    return [chr(byte if byte in plain else next(following)) for byte in range(256)]


def path_problem(traces: Sequence[WireTrace], calls: Sequence[GenerateCall]) -> str | None:
    """Why the tokens of a model call are not a path of its trace; None when each one is.

    A path from the root to a sampled message must hold the tokens of the prompt, then those of the
    reply, as the engine saw and gave them.
    """
    by_id = {trace.id: trace for trace in traces}
    for number, call in enumerate(calls, 1):
        if call.reply is None:
            continue
        trace = by_id.get(call.session_id or "")
        if trace is None:
            return f"model call {number} belongs to no trace of the episode"
        wanted = [*call.prompt_token_ids, *call.reply.token_ids]
        if wanted not in (_path(trace, index) for index, n in enumerate(trace.nodes) if n.sampled):
            return (
                f"the {len(wanted):,} tokens of model call {number} are not a path of the trace of "
                f"{trace.agent.name!r}"
            )
    return None


def _path(trace: WireTrace, index: int) -> list[int]:
    steps: list[Sequence[int]] = []
    at: int | None = index
    while at is not None:
        steps.append(trace.nodes[at].token_ids)
        at = trace.nodes[at].parent
    return [token for step in reversed(steps) for token in step]


def conversation(episode: WireEpisode) -> list[str]:
    """What was said, by agent, and what it brought."""
    lines: list[str] = []
    for trace in episode.traces:
        lines.append(f"  [{trace.agent.name}]")
        said = list(_messages(trace))
        half = _MAX_MESSAGES // 2
        if len(said) > _MAX_MESSAGES:
            said = [*said[:half], f"    … {len(said) - 2 * half} more …", *said[-half:]]
        lines += said
        parts = [
            f"{name} {'none' if reward is None else f'{reward.score:g} * {reward.weight:g}'}"
            for name, reward in trace.rewards.items()
        ]
        metrics = [
            f"{name} {value:g}" for name, value in trace.metrics.items() if value is not None
        ]
        lines.append(f"    reward {trace.reward:g} = {' + '.join(parts) or 'nothing'}")
        if metrics:
            lines.append(f"    metrics {', '.join(metrics)}")
    return lines


def last_reply(episode: WireEpisode) -> str:
    """What an agent that trains said last, with the last call of a tool before it."""
    traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    said = [node.message for node in traces[0].nodes if node.sampled]
    texts = [m.content for m in said if isinstance(m.content, str) and m.content.strip()]
    calls = [call for m in said for call in getattr(m, "tool_calls", None) or []]
    called = [f"{call.name}({call.arguments})" for call in calls[-1:]]
    return " ".join([*called, *texts[-1:]])


def _messages(trace: WireTrace) -> Iterator[str]:
    for node in trace.nodes:
        message = node.message
        text = message.content if isinstance(message.content, str) else str(message.content or "")
        calls = getattr(message, "tool_calls", None) or []
        called = "".join(f" → {call.name}({call.arguments})" for call in calls)
        yield f"    {message.role}: {shortened(text + called, _WIDTH)}"
