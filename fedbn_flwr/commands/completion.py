"""`fedbn completion`: a script that completes commands, options, names and settings in a shell.

The script contains all words, so that the shell starts no Python process when the user presses TAB. argcomplete would
start one each time, and the names of models and strategies need PyTorch and Flower.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from .common import Commands, add_command
from .listing import KINDS

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
    """The words that can follow: by command and option, or by command and number of the argument.

    The last number of a command holds for further arguments too.
    """
    yield "commands", ["--help", "--version", *commands.choices]
    for name, parser in commands.choices.items():
        number = 0
        for action in parser._actions:
            words = _words(action)
            if action.option_strings:
                for option in action.option_strings if action.nargs != 0 else ():
                    yield f"{name} {option}", words
            elif name == "list" and action.dest == "names":
                for kind in KINDS:
                    yield f"list {kind}", _names(kind)
            else:
                number += 1
                yield f"{name} {number}", words
                if action.nargs in ("*", "+"):
                    yield f"{name} more", words
        yield f"{name} options", [option for action in parser._actions for option in action.option_strings]


def _words(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return list(map(str, action.choices))
    if action.dest in ("experiment", "source"):
        return [*_names("experiments"), FILES]
    if action.dest == "overrides":
        return _settings()
    if action.type is Path:
        return [FOLDERS if action.metavar == "DIR" else FILES]
    return []


def _names(kind: str) -> list[str]:
    match kind:
        case "strategies":
            from fedbn_flwr.strategies import STRATEGIES

            return list(STRATEGIES)
        case "models":
            from fedbn_flwr.models.build import MODELS

            return list(MODELS)
        case "norms":
            from fedbn_flwr.norms.convert import NORMS

            return list(NORMS)
        case "datasets":
            from fedbn_flwr.data.catalogue import CATALOGUE

            return list(CATALOGUE)
        case "partitions":
            from fedbn_flwr.data.partition.kinds import KINDS

            return list(KINDS)
        case _:
            from fedbn_flwr.experiment.content import shipped_experiments

            return list(shipped_experiments())


def _settings() -> list[str]:
    """`key=` for every setting, and `key=value` for the values that it can have."""
    from fedbn_flwr.experiment.template import setting_choices

    named = {
        "strategy.name": _names("strategies"),
        "model.name": _names("models"),
        "model.norm": _names("norms"),
        "data.name": _names("datasets"),
        "data.partition.kind": _names("partitions"),
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
  local line=${COMP_LINE:0:COMP_POINT} words before current state found word
  current=${line##*[[:space:]]}
  read -ra before <<<"${line:0:${#line}-${#current}}"
  local command=${before[1]:-} number=1 i
  if ((${#before[@]} < 2)); then
    found=$(_fedbn_words commands)
  elif [[ $current == -* ]]; then
    found=$(_fedbn_words "$command options")
  elif ! found=$(_fedbn_words "$command ${before[-1]}"); then
    for ((i = 2; i < ${#before[@]}; i++)); do
      if [[ ${before[i]} == -* ]]; then
        _fedbn_words "$command ${before[i]}" >/dev/null && ((i++))
      else
        ((number++))
      fi
    done
    found=$(_fedbn_words "$command $number" || _fedbn_words "$command ${before[2]:-}" || _fedbn_words "$command more")
  fi
  COMPREPLY=()
  for word in $found; do
    case $word in
      "<files>") compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$current") ;;
      "<folders>") compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -d -- "$current") ;;
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
  local current=$words[CURRENT] command=$words[2] found word number=1 i
  local -a plain keys
  if ((CURRENT == 2)); then
    found=$(_fedbn_words commands)
  elif [[ $current == -* ]]; then
    found=$(_fedbn_words "$command options")
  elif ! found=$(_fedbn_words "$command $words[CURRENT-1]"); then
    for ((i = 3; i < CURRENT; i++)); do
      if [[ $words[i] == -* ]]; then
        _fedbn_words "$command $words[i]" >/dev/null && ((i++))
      else
        ((number++))
      fi
    done
    found=$(_fedbn_words "$command $number" || _fedbn_words "$command $words[3]" || _fedbn_words "$command more")
  fi
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
  set -l number 1
  set -l found
  if test (count $before) -lt 2
    set found (__fedbn_words commands)
  else if string match -q -- '-*' "$current"
    set found (__fedbn_words "$command options")
  else if not set found (__fedbn_words "$command $before[-1]")
    set -l skip 0
    for word in $before[3..]
      if test $skip = 1
        set skip 0
      else if string match -q -- '-*' "$word"
        __fedbn_words "$command $word" >/dev/null; and set skip 1
      else
        set number (math $number + 1)
      end
    end
    set found (__fedbn_words "$command $number")
    or set found (__fedbn_words "$command $before[3]")
    or set found (__fedbn_words "$command more")
  end
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
