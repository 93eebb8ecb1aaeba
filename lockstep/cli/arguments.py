"""Arguments that verbs share: a config and its overrides, processes and machines.

And torchrun's further options.

Tests: tests/cli/test_unused_flags.py, tests/cli/test_cli.py
"""

import argparse
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lockstep.errors import UsageError
from lockstep.files.paths import local_path

if TYPE_CHECKING:
    from lockstep.launch.options import LaunchOptions


EPILOG = (
    "Exit codes: 0 done; 1 the run failed; 2 the command or config is wrong; 75 preempted and"
    " saved."
)
FLAG = "flag:"  # marks the short names of keys among the parsed arguments


# name → what it does, the names of its arguments
Subverbs = Mapping[str, tuple[str, tuple[str, ...]]]


class Parser(argparse.ArgumentParser):
    """Parses arguments in any order, and raises one message instead of printing the usage."""

    def __init__(
        self,
        verb: str,
        description: str,
        examples: Sequence[str] = (),
        subverbs: Subverbs | None = None,
    ) -> None:
        self._subverbs = subverbs or {}
        self._typed: dict[str, str] = {}  # argument → as it was typed
        super().__init__(
            f"lockstep {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=_Help,
            epilog=_epilog(self._subverbs, examples),
        )

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a `UsageError`."""
        raise UsageError(
            message,
            where=f"the command {self.prog!r}",
            fix=f"`{self.prog} --help` lists the arguments",
        )

    def parse(self, argv: list[str], *, until_script: bool = False) -> argparse.Namespace:
        """Parse the arguments.

        Underscores in flags equal dashes, but not in what follows a script's name.
        """
        if argv and argv[0] in self._subverbs and {"-h", "--help"} & set(argv):
            self._show_help_of(argv[0])
        dashed = self._dashed(argv, until_script)
        parse_known = self.parse_known_args if until_script else self.parse_known_intermixed_args
        args, unknown = parse_known(dashed)
        if unknown:
            self._reject([argv[dashed.index(token)] for token in unknown])
        self._note_typed(dashed, args)
        verb = str(getattr(args, "verb", ""))
        if verb in self._subverbs:
            # A schedule that is not drawn has a message of its own.
            accepted = (*self._subverbs[verb][1], "verb", "schedule", "ranks")
            self.take_only(verb, lambda dest: dest.split(":")[0] in accepted)
        self._require_local_paths(args)
        return args

    def _show_help_of(self, subverb: str) -> None:
        """Let `--help` describe one subverb, and leave the arguments of others out."""
        self.description, accepted = self._subverbs[subverb]
        self.prog = f"{self.prog} {subverb}"
        self.epilog = EPILOG
        for action in self._actions:
            if action.dest.split(":")[0] not in (*accepted, "help"):
                action.help = argparse.SUPPRESS

    def _require_local_paths(self, args: argparse.Namespace) -> None:
        """Raise a UsageError for a URL where a path of this machine is expected."""
        for action in self._actions:
            if action.type is not Path:
                continue
            name = action.option_strings[-1] if action.option_strings else str(action.metavar)
            values = vars(args)[action.dest]
            for value in values if isinstance(values, list) else [values]:
                if value is not None:
                    local_path(value, name)

    def _note_typed(self, dashed: list[str], args: argparse.Namespace) -> None:
        """Note which arguments were typed, and how."""
        self._typed = {}
        for token in dashed:
            option = token.partition("=")[0]
            if option in self._option_string_actions:
                self._typed.setdefault(self._option_string_actions[option].dest, option)
        for action in self._actions:
            value = vars(args).get(action.dest)
            if not action.option_strings and value:
                self._typed[action.dest] = (
                    " ".join(map(str, value)) if isinstance(value, list) else str(value)
                )

    def take_only(
        self, form: str, accepts: Callable[[str], bool], fix: str = "leave it out"
    ) -> None:
        """Raise a UsageError for an argument that this form of the command does not use."""
        unused = [typed for dest, typed in self._typed.items() if not accepts(dest)]
        if unused:
            verb = "mean" if len(unused) > 1 else "means"
            raise UsageError(
                f"{', '.join(unused)} {verb} nothing to `{self.prog} {form}`",
                where=f"the command {self.prog!r}",
                fix=fix,
            )

    def refuse(self, form: str, *names: str, fix: str = "leave it out") -> None:
        """Raise a UsageError if one of these arguments was typed.

        This form of the command does not use them.
        """
        self.take_only(form, lambda dest: dest not in names, fix)

    def _dashed(self, argv: list[str], until_script: bool) -> list[str]:
        """Write flags with dashes, such as `--save_steps`, up to the script's own arguments.

        A flag that may stand without a value gets its constant where another argument follows it.
        """
        takes_value = {
            name for action in self._actions for name in action.option_strings if action.nargs != 0
        }
        result: list[str] = []
        for index, token in enumerate(argv):
            value_of_flag = bool(result) and result[-1] in takes_value
            if until_script and not token.startswith("-") and not value_of_flag:
                return result + argv[index:]
            flag = self._optional.get(result[-1]) if value_of_flag else None
            if flag is not None and not _is_of(flag, token):
                # what follows a flag without its value is another argument
                result[-1] += f"={flag.const}"
                if until_script and not token.startswith("-"):
                    return result + argv[index:]
            name, equals, value = token.partition("=")
            result.append(
                name.replace("_", "-") + equals + value if token.startswith("--") else token
            )
        return result

    @property
    def _optional(self) -> dict[str, argparse.Action]:
        """Flags whose value may be left out, by name."""
        return {
            name: action
            for action in self._actions
            for name in action.option_strings
            if action.nargs == "?"
        }

    def _reject(self, tokens: list[str]) -> NoReturn:
        """Raise one error for all unknown arguments.

        Commands are often copied from other tools, with several of them.
        """
        from lockstep.config.names import advice_for_flag

        flags = [token for token in tokens if token.startswith("-")]
        advice: dict[str, str] = {}
        for token in flags or tokens:  # beside unknown flags, other tokens may be their values
            of_other_tools = advice_for_flag(token) if token.startswith("-") else None
            advice[token] = of_other_tools or self._nearest(token)
        fixes = list(advice.values())
        if len(advice) > 1:
            fixes = [f"for {token}, {text}" for token, text in advice.items()]
        names_keys = any(re.search(r"\bwrite \w+\.", text) for text in fixes)
        why = None
        if self.prog == "lockstep launch" and names_keys:
            why = "a script sets such keys itself, as in Trainer(model, precision='bf16')"
        raise UsageError(
            f"there is no argument {', '.join(advice)}",
            where=f"the command {self.prog!r}",
            why=why,
            fix="; ".join(fixes),
        )

    def _nearest(self, token: str) -> str:
        """Return what to write in place of an argument that there is not."""
        from difflib import get_close_matches

        from lockstep.config.names import SECTIONS

        option = token.partition("=")[0]
        if option[2:].partition(".")[0] in SECTIONS and "." in option:
            return f"write {option[2:]}=VALUE, without dashes"
        options = self._option_string_actions
        beginning_so = [name for name in options if name.startswith(option) and len(option) > 3]
        near = beginning_so or get_close_matches(option, options, n=1, cutoff=0.75)
        return f"write {near[0]}" if near else f"`{self.prog} --help` lists the arguments"


def _epilog(subverbs: Subverbs, examples: Sequence[str]) -> str:
    """Return what `--help` says below the arguments: subverbs, examples and exit codes."""
    paragraphs = []
    if subverbs:
        width = max(map(len, subverbs))
        lines = [f"  {name:<{width}}  {text}" for name, (text, _) in subverbs.items()]
        paragraphs.append("\n".join(lines))
    if examples:
        title = "example:" if len(examples) == 1 else "examples:"
        paragraphs.append("\n".join([title, *(f"  {line}" for line in examples)]))
    return "\n\n".join([*paragraphs, EPILOG])


def _is_of(action: argparse.Action, text: str) -> bool:
    """Return whether the text is a value of the type that a flag takes."""
    try:
        return not callable(action.type) or action.type(text) is not None
    except ValueError:
        return False


class _Help(argparse.HelpFormatter):
    """Fills paragraphs, and leaves indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line[:2] == "  " else textwrap.fill(line, width) for line in text.split("\n")
        )


def add_config(parser: Parser) -> None:
    """Add the config file, overrides and the short names of keys."""
    parser.add_argument(
        "words",
        metavar="CONFIG KEY=VALUE",
        nargs="*",
        default=[],
        help="a YAML file, and keys to override",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="the same as CONFIG")
    from lockstep.config.flags import FLAGS

    group = parser.add_argument_group("short names of keys")
    for flag in FLAGS:
        text = f"{flag.help} ({flag.key})"
        if flag.switch:
            group.add_argument(
                flag.option, dest=FLAG + flag.name, action="store_const", const="true", help=text
            )
        else:
            group.add_argument(flag.option, dest=FLAG + flag.name, metavar=flag.metavar, help=text)


def config_and_overrides(
    args: argparse.Namespace, *, required: bool = True
) -> tuple[Path | None, list[str]]:
    """Return the config file and the overrides.

    Short names come first, then `KEY=VALUE` in the order given.
    """
    from lockstep.config.flags import apply_flags, as_overrides

    flags = {
        name.removeprefix(FLAG): value
        for name, value in vars(args).items()
        if name.startswith(FLAG) and value is not None
    }
    short = as_overrides(apply_flags(flags))
    overrides = [word for word in args.words if re.match(r"[A-Za-z_][\w.]*=", word)]
    files = [local_path(word, "CONFIG") for word in args.words if word not in overrides]
    files += [args.config] if args.config is not None else []
    if len(files) > 1:
        fix = "a key is overridden as KEY=VALUE, without spaces; files are composed with `extends:`"
        raise UsageError(
            f"one config is expected, not {len(files)}: {', '.join(map(str, files))}", fix=fix
        )
    if not files and required:
        raise UsageError(
            "no config is given", fix="name a YAML file, or one that ships: `lockstep config list`"
        )
    return (files[0] if files else None), short + overrides


def add_launch_options(parser: Parser) -> None:
    """Add the options about processes and machines."""
    group = parser.add_argument_group("processes and machines, by torchrun's names")
    add = group.add_argument
    add(
        "--nproc-per-node",
        metavar="N|auto|gpu|cpu",
        help="ranks on this machine (default: all visible GPUs, else 1)",
    )
    add("--nnodes", metavar="N|MIN:MAX", default="1", help="machines (default: 1)")
    add("--node-rank", metavar="N", type=int, help="this machine's number, from 0")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where machines meet, if they have no numbers")
    add("--rdzv-id", metavar="NAME", help="distinguishes jobs that meet at one endpoint")
    add("--rdzv-backend", help=argparse.SUPPRESS)
    add("--rdzv-conf", metavar="KEY=VALUE,…", default="", help="rendezvous: timeout=900, is_host=1")
    add("--standalone", action="store_true", help=argparse.SUPPRESS)
    add("--master-addr", metavar="HOST", help="the machine with --node-rank 0")
    add("--master-port", metavar="PORT", type=int, help="a free port there (default: 29500)")
    add(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often failed ranks are restarted (default: 0)",
    )
    text = "ranks import for themselves, and are not forks of one process that did"
    add("--fresh-processes", action="store_true", help=text)
    add("--local-rank", help=argparse.SUPPRESS)


def launch_options(args: argparse.Namespace, *, at_once: bool = True) -> "LaunchOptions":
    """Return the options about processes and machines.

    Check them together if ranks are started now.
    """
    from lockstep.launch.options import LaunchOptions
    from lockstep.prepared.rank_starts import observes_itself

    if args.rdzv_backend not in (None, "", "c10d", "static"):
        fix = "leave it out: --rdzv-endpoint HOST:PORT, or --master-addr HOST with --node-rank N"
        why = (
            "machines meet at a store that the first one hosts, as with torchrun's c10d; etcd is"
            " not needed"
        )
        raise UsageError(f"--rdzv-backend {args.rdzv_backend} is not supported", why=why, fix=fix)
    chosen = {
        field.name: vars(args)[field.name] for field in fields(LaunchOptions) if field.name in args
    }
    chosen["rdzv_conf"] = dict(
        pair.partition("=")[::2] for pair in args.rdzv_conf.split(",") if pair
    )
    if observes_itself():
        chosen["fresh_processes"] = True
    options = LaunchOptions(**chosen)
    if at_once:
        options.check()
    return options


def add_torchrun_options(parser: Parser) -> None:
    """Add the options; variables named PET_* give their defaults."""
    group = parser.add_argument_group("as torchrun has them")
    add = group.add_argument
    add("--no-python", action="store_true", help="SCRIPT is a program of any kind, run as it is")
    add("--run-path", action="store_true", help=argparse.SUPPRESS)  # scripts always run that way
    add(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="folder of the ranks' logs (default: runs/<SCRIPT>/logs)",
    )
    add(
        "-t",
        "--tee",
        metavar="WHAT",
        default="0",
        help="also show 1 stdout, 2 stderr, 3 both; 0:3,1:2",
    )
    add("-r", "--redirects", metavar="WHAT", default="0", help="do not show, only log")
    add(
        "--local-ranks-filter",
        metavar="N,N,…",
        default="",
        help="show these local ranks (default: 0)",
    )
    add("--role", metavar="NAME", default="rank", help="the ranks' ROLE_NAME")
    add("--local-addr", metavar="HOST", help="the address at which other machines reach this one")
    add(
        "--monitor-interval",
        metavar="SECONDS",
        type=float,
        default=0.1,
        help="between checks of the ranks",
    )
    text = "for peers of a failed rank to end (default: 30)"
    add("--shutdown-timeout", metavar="SECONDS", type=int, default=30, help=text)
    for option in parser._actions:
        # torchrun's names: PET_NNODES, PET_NPROC_PER_NODE …
        value = os.environ.get(f"PET_{option.dest.upper()}")
        if value is not None and option.option_strings:
            option.default = value not in ("0", "") if option.nargs == 0 else value
