"""`fedbn completion`: a script that completes commands, options, names and settings in a shell.

The script contains all words, so that the shell starts no Python process when the user presses TAB. argcomplete would
start one each time, and the names of models and strategies need PyTorch and Flower.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from .common import Commands, add_command
from .listing import KINDS, names

FILES, FOLDERS = "<files>", "<folders>"  # the shell completes paths itself


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        lambda arguments: print(script(arguments.shell, commands), end=""),
        summary="a script that completes the command line: bash, zsh or fish",
        description="Print a script that completes fedbn's commands, options, experiments and settings on TAB.",
        epilog=(
            "bash: fedbn completion bash > ~/.local/share/bash-completion/completions/fedbn; "
            "zsh: fedbn completion zsh > DIR/_fedbn, with DIR in fpath; "
            "fish: fedbn completion fish > ~/.config/fish/completions/fedbn.fish. Repeat after an upgrade."
        ),
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def script(shell: str, commands: Commands) -> str:
    if shell == "fish":  # its `string split` fails where there is one word
        case, quote = "    case '{}'\n      printf '%s\\n' {}\n", "'{}'"
    else:
        case, quote = "    '{}') echo '{}' ;;\n", "{}"
    cases = "".join(case.format(state, " ".join(map(quote.format, words))) for state, words in states(commands))
    return _SCRIPTS[shell].replace("@CASES@", cases.rstrip("\n"))


def states(commands: Commands) -> Iterator[tuple[str, list[str]]]:
    """The words that can follow `fedbn`, each command, and each option that has a value."""
    yield "", ["--help", "--version", *commands.choices]
    for name, parser in commands.choices.items():
        words: list[str] = []
        for action in parser._actions:
            found = _words(action)
            for option in action.option_strings if action.nargs != 0 else ():
                yield f"{name} {option}", found
            words += action.option_strings or found
        yield name, words


def _words(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return list(map(str, action.choices))
    if action.dest in ("experiment", "source"):
        return [*names("experiments"), FILES]
    if action.dest == "overrides":
        return _settings()
    if action.dest == "names":  # of `fedbn list`
        return [name for kind in KINDS for name in names(kind)]
    return [FOLDERS if action.metavar == "DIR" else FILES] if action.type is Path else []


def _settings() -> list[str]:
    """`key=` for every setting, and `key=value` for the values that it can have."""
    from fedbn_flwr.experiment.template import setting_choices

    named = {
        "strategy.name": names("strategies"),
        "model.name": names("models"),
        "model.norm": names("norms"),
        "data.name": names("datasets"),
        "data.partition.kind": names("partitions"),
    }
    values = {**setting_choices(), **named, "only": [], "seeds": []}
    return [f"{key}={value}" for key, allowed in values.items() for value in ["", *allowed]]


_BASH = r"""# bash completion of fedbn, written by `fedbn completion bash`
_fedbn_words() {
  case "$1" in
@CASES@
    *) return 1 ;;
  esac
}

_fedbn() {
  local line=${COMP_LINE:0:COMP_POINT} before current found word paths
  current=${line##*[[:space:]]}
  read -ra before <<<"${line:0:${#line}-${#current}}"
  found=$(_fedbn_words "${before[1]:-} ${before[-1]}" || _fedbn_words "${before[1]:-}")
  COMPREPLY=()
  for word in $found; do
    case $word in
      "<files>"|"<folders>") # other words are not quoted as names of files
        [[ $word == "<files>" ]] && paths=$(compgen -f -- "$current") || paths=$(compgen -d -- "$current") || continue
        compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY <<<"$paths" ;;
      *=?*) [[ $current == *=* && $word == "$current"* ]] && COMPREPLY+=("${word#*=}") ;; # = ends a word of bash
      *=) [[ $current != *=* && $word == "$current"* ]] && { compopt -o nospace; COMPREPLY+=("$word"); } ;;
      *) [[ $word == "$current"* ]] && COMPREPLY+=("$word") ;;
    esac
  done
}
complete -F _fedbn fedbn
"""

_ZSH = r"""#compdef fedbn
# zsh completion of fedbn, written by `fedbn completion zsh`
_fedbn_words() {
  case "$1" in
@CASES@
    *) return 1 ;;
  esac
}

_fedbn() {
  local current=$words[CURRENT] command= found word
  local -a plain keys
  ((CURRENT > 2)) && command=$words[2]
  found=$(_fedbn_words "$command $words[CURRENT-1]" || _fedbn_words "$command")
  for word in ${=found}; do
    case $word in
      "<files>") _files ;;
      "<folders>") _files -/ ;;
      *=?*) [[ $current == *=* ]] && plain+=("$word") ;;
      *=) [[ $current != *=* ]] && keys+=("$word") ;;
      *) plain+=("$word") ;;
    esac
  done
  compadd -a plain
  compadd -S '' -a keys
}
compdef _fedbn fedbn
"""

_FISH = r"""# fish completion of fedbn, written by `fedbn completion fish`
function __fedbn_words
  switch "$argv[1]"
@CASES@
    case '*'
      return 1
  end
end

function __fedbn_complete
  set -l before (commandline -opc)
  set -l current (commandline -ct)
  set -l command $before[2]
  set -l found (__fedbn_words "$command $before[-1]")
  or set found (__fedbn_words "$command")
  for word in $found
    switch "$word"
      case '<files>'
        __fish_complete_path "$current"
      case '<folders>'
        __fish_complete_directories "$current"
      case '*'
        echo $word
    end
  end
end
complete -c fedbn -f -a '(__fedbn_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
