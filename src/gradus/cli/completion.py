"""`gradus completion`: lines for a shell that complete commands, keys and files."""

from __future__ import annotations

import importlib
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
    """Options of a command that are not keys, as its help lists them."""
    module = importlib.import_module(COMMANDS[command].entry.partition(":")[0])
    runs = RUN_COMMANDS.get(command)
    found = getattr(module, "OPTIONS", {}) if runs is None else runs.all_options
    yield from (option.split()[0] for option in found)


def _cases(line: str) -> Iterator[str]:
    """One line of a shell's `case` for each command."""
    for command in COMMANDS:
        yield f"    {command}) " + line.format(" ".join(flags(command))) + " ;;"


def _bash() -> Iterator[str]:
    yield "_gradus() {"
    yield '  local current="${COMP_WORDS[COMP_CWORD]}" flags='
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$current")); return'
    yield "  fi"
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
    yield "  case $words[2] in"
    yield from _cases("flags=({})")
    yield "  esac"
    yield '  if [[ "$PREFIX" == -* ]]; then compadd -- $flags; else _files; fi'
    yield "}"
    yield "compdef _gradus gradus"


def _fish() -> Iterator[str]:
    for command, it in COMMANDS.items():
        yield (
            f"complete -c gradus -n __fish_use_subcommand -f -a {command} -d {_quoted(it.summary)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        for flag in flags(command):
            yield f"complete -c gradus {seen} -l {flag.removeprefix('--')}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
