"""The script with which a shell completes verbs, subcommands, options and files."""

from collections.abc import Iterable

from lockstep.errors import UsageError

SHELLS = ("bash", "zsh")

_BASH = r"""# lockstep: completion for bash; put this line into ~/.bashrc: source <(lockstep completion bash)
declare -A _lockstep_help
_lockstep() {
  local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} found
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "VERBS --help --version" -- "$word"))
    return
  fi
  [ -n "${_lockstep_help[$verb]}" ] || _lockstep_help[$verb]=$(lockstep "$verb" --help 2>/dev/null)
  if [[ $word == -* ]]; then
    found=$(grep -oE -- '--[a-z][a-z-]+' <<<"${_lockstep_help[$verb]}" | sort -u)
  elif [ "$COMP_CWORD" -eq 2 ]; then
    found=$(grep -oE '^  [a-z]+(\|[a-z]+)+' <<<"${_lockstep_help[$verb]}" | head -1 | tr '|' ' ')
  fi
  COMPREPLY=($(compgen -W "$found" -- "$word"))
  if [ "${#COMPREPLY[@]}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _lockstep lockstep
"""
_ZSH = """# lockstep: completion for zsh; put this line into ~/.zshrc: source <(lockstep completion zsh)
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(shell: str, verbs: Iterable[str]) -> str:
    """Return the script, which reads options from `lockstep VERB --help` once per shell, so they are never out of date.

    Raises UsageError: the shell is not supported.
    """
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}", fix=f"lockstep completion {'|'.join(SHELLS)}")
    bash = _BASH.replace("VERBS", " ".join(verbs))
    return bash if shell == "bash" else _ZSH + bash.split("\n", 1)[1]
