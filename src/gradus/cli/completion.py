"""`gradus completion`: lines for a shell that complete commands, keys and files."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence

from gradus.cli.main import COMMANDS
from gradus.cli.options import wants_help
from gradus.cli.runs import RUN_COMMANDS
from gradus.config import RunConfig, ServeConfig, StrictConfig, sections
from gradus.errors import ConfigError

CONFIGS: Mapping[str, type[StrictConfig]] = {
    **{name: command.config for name, command in RUN_COMMANDS.items()},
    "check": RunConfig,
    **dict.fromkeys(("serve", "chat"), ServeConfig),
}
"""Commands with a config, by which their keys are completed."""
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_PLACEHOLDERS = {"--key", "--section", "--option"}
_WORD = re.compile(r'"([^"]+)"')
USAGE = """\
usage: gradus completion bash|zsh|fish

Prints what makes TAB complete commands, keys and files. For every new shell:
  bash   echo 'source <(gradus completion bash)' >> ~/.bashrc
  zsh    echo 'source <(gradus completion zsh)' >> ~/.zshrc   (after compinit)
  fish   gradus completion fish > ~/.config/fish/completions/gradus.fish"""


def run(words: Sequence[str]) -> int:
    if wants_help(words):
        print(USAGE)
        return 0
    shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if len(words) != 1 or words[0] not in shells:
        given = f"{' '.join(words)!r} is no shell known here" if words else "name a shell"
        raise ConfigError(f"{given}\n{USAGE}")
    print("\n".join(shells[words[0]]()))
    return 0


def flags(command: str) -> list[str]:
    """Every flag of a command; an entry of a list is offered at its first place.

    >>> "--max-steps" in flags("rl")
    True
    """
    model = CONFIGS.get(command)
    found = [] if model is None else sections(model)
    paths = [f"{s.path}.{key.name}" if s.path else key.name for s in found for key in s.keys]
    named = [path.replace("_", "-") for path in paths if "<" not in path]
    keys = ["--" + path.replace(".N.", ".0.") for path in named]
    return sorted({*keys, *_options(command), "--help"})


def _options(command: str) -> Iterator[str]:
    """Options of a command that are not keys, as its help names them."""
    if command in RUN_COMMANDS:
        yield from (option.split()[0] for option in RUN_COMMANDS[command].all_options)
        return
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(ConfigError):
        COMMANDS[command].load(command)(["--help"])
    yield from set(_OPTION.findall(text.getvalue())) - _PLACEHOLDERS


def values() -> dict[str, list[str]]:
    """Flag → the words that it takes, where only some are valid; the same for all commands.

    >>> values()["--trainer.optimizer.type"]
    ['adamw', 'muon', 'sgd']
    """
    found: dict[str, list[str]] = {"--over": ["steps", "tokens", "minutes", "episodes"]}
    for model in dict.fromkeys(CONFIGS.values()):
        for section in sections(model):
            for key in section.keys:
                path = f"{section.path}.{key.name}" if section.path else key.name
                words = ["true", "false"] if "bool" in key.type.split(" or ") else []
                words += [word for word in _WORD.findall(key.type) if ":" not in word]
                if words and "<" not in path:
                    flag = "--" + path.replace("_", "-").replace(".N.", ".0.")
                    found[flag] = list(dict.fromkeys([*found.get(flag, []), *words]))
    return found


def _cases(line: str) -> Iterator[str]:
    for command in COMMANDS:
        yield f"    {command}) " + line.format(" ".join(flags(command))) + " ;;"


def _value_cases(line: str) -> Iterator[str]:
    """One line of a shell's `case` for all flags that take the same words."""
    by_words: dict[tuple[str, ...], list[str]] = {}
    for flag, words in values().items():
        by_words.setdefault(tuple(words), []).append(flag)
    for offered, names in by_words.items():
        yield f"    {'|'.join(names)}) " + line.format(" ".join(offered)) + " ;;"


def _bash() -> Iterator[str]:
    yield "_gradus() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" flags='
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$current")); return'
    yield "  fi"
    yield '  [[ "$current" == -* ]] || case "${COMP_WORDS[COMP_CWORD-1]}" in'
    yield from _value_cases('COMPREPLY=($(compgen -W "{}" -- "$current")); return')
    yield "  esac"
    yield '  case "${COMP_WORDS[1]}" in'
    yield from _cases('flags="{}"')
    yield "  esac"
    yield '  if [[ "$current" == -* ]]; then'
    yield '    COMPREPLY=($(compgen -W "$flags" -- "$current"))'
    yield "  else"
    yield '    COMPREPLY=($(compgen -f -- "$current"))'
    yield "  fi"
    yield "}"
    yield "complete -o filenames -F _gradus gradus"


def _zsh() -> Iterator[str]:
    yield "_gradus() {"
    yield "  local -a flags"
    yield f"  if (( CURRENT == 2 )); then compadd -- {' '.join(COMMANDS)}; return; fi"
    yield '  [[ "$PREFIX" == -* ]] || case $words[CURRENT-1] in'
    yield from _value_cases("compadd -- {}; return")
    yield "  esac"
    yield "  case $words[2] in"
    yield from _cases("flags=({})")
    yield "  esac"
    yield '  if [[ "$PREFIX" == -* ]]; then compadd -- $flags; else _files; fi'
    yield "}"
    yield "compdef _gradus gradus"


def _fish() -> Iterator[str]:
    known = values()
    for command, it in COMMANDS.items():
        yield (
            f"complete -c gradus -n __fish_use_subcommand -f -a {command} -d {_quoted(it.summary)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        for flag in flags(command):
            words = known.get(flag)
            taken = f" -x -a {_quoted(' '.join(words))}" if words else ""
            yield f"complete -c gradus {seen} -l {flag.removeprefix('--')}{taken}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
