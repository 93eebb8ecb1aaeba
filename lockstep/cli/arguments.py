"""Arguments that several verbs share: a config and its overrides, processes and machines."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.launch.options import LaunchOptions

EPILOG = "Exit codes: 0 done; 1 the run failed; 2 the command or config is wrong; 75 preempted and saved."
FLAG = "flag:"  # marks the short names of keys among the parsed arguments


class Parser(argparse.ArgumentParser):
    """Parses arguments in any order, and raises one message instead of printing the usage."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(f"lockstep {verb}", description=description, allow_abbrev=False, epilog=EPILOG)

    def error(self, message: str) -> NoReturn:
        """Raise `message` as a `UsageError`."""
        raise UsageError(message, where=f"the command {self.prog!r}", fix=f"`{self.prog} --help` lists the arguments")

    def parse(self, argv: list[str], *, until_script: bool = False) -> argparse.Namespace:
        """Parse the arguments; underscores in flags equal dashes.

        Args:
            until_script: arguments after the first positional belong to a script, and are not changed.
        """
        dashed = self._dashed(argv, until_script)
        given, unknown = self.parse_known_args(dashed) if until_script else self.parse_known_intermixed_args(dashed)
        if unknown:
            self._reject([argv[dashed.index(token)] for token in unknown])
        return given

    def _dashed(self, argv: list[str], until_script: bool) -> list[str]:
        takes_value = {name for action in self._actions for name in action.option_strings if action.nargs != 0}
        result: list[str] = []
        for index, token in enumerate(argv):
            value_of_flag = bool(result) and result[-1] in takes_value
            if until_script and not token.startswith("-") and not value_of_flag:
                return result + argv[index:]
            name, equals, value = token.partition("=")
            result.append(name.replace("_", "-") + equals + value if token.startswith("--") else token)
        return result

    def _reject(self, tokens: list[str]) -> NoReturn:
        """Raise one error for all unknown arguments, because commands are often copied from other tools."""
        from lockstep.config.names import advice_for_flag

        tokens = [token for token in tokens if token.startswith("-")] or tokens  # others may be the values of these
        advice = {token: (token.startswith("-") and advice_for_flag(token)) or self._nearest(token) for token in tokens}
        fixes = [text if len(advice) == 1 else f"for {token}, {text}" for token, text in advice.items()]
        where = f"the command {self.prog!r}"
        raise UsageError(f"there is no argument {', '.join(advice)}", where=where, fix="; ".join(fixes))

    def _nearest(self, token: str) -> str:
        from difflib import get_close_matches

        near = get_close_matches(token.partition("=")[0], self._option_string_actions, n=1)
        return f"write {near[0]}" if near else f"`{self.prog} --help` lists the arguments"


def add_config(parser: Parser) -> None:
    """Add the config file, overrides and the short names of keys."""
    parser.add_argument("words", metavar="CONFIG KEY=VALUE", nargs="*", help="a YAML file, and keys to override")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the same as CONFIG")
    from lockstep.config.flags import FLAGS

    group = parser.add_argument_group("short names of keys")
    for flag in FLAGS:
        text = f"{flag.help} ({flag.key})"
        if flag.switch:
            group.add_argument(flag.option, dest=FLAG + flag.name, action="store_const", const="true", help=text)
        else:
            group.add_argument(flag.option, dest=FLAG + flag.name, metavar=flag.metavar, help=text)


def config_and_overrides(given: argparse.Namespace, *, required: bool = True) -> tuple[Path | None, list[str]]:
    """Return the config file, and the overrides: short names first, then KEY=VALUE in the order given."""
    from lockstep.config.flags import apply_flags, as_overrides

    values = {name.removeprefix(FLAG): value for name, value in vars(given).items() if name.startswith(FLAG)}
    short = as_overrides(apply_flags({name: value for name, value in values.items() if value is not None}))
    overrides = [word for word in given.words if re.match(r"[A-Za-z_][\w.]*=", word)]
    files = [Path(word) for word in given.words if word not in overrides]
    files += [given.config] if given.config is not None else []
    if len(files) > 1:
        raise UsageError(
            f"one config is expected, not {len(files)}: {', '.join(map(str, files))}",
            fix="a key is overridden as KEY=VALUE, without spaces; files are composed with `extends:`",
        )
    if not files and required:
        raise UsageError("no config is given", fix="name a YAML file, or one that ships: `lockstep config list`")
    return (files[0] if files else None), short + overrides


def add_launch_options(parser: Parser) -> None:
    """Add the options about processes and machines."""
    group = parser.add_argument_group("processes and machines, by torchrun's names")
    group.add_argument(
        "--nproc-per-node", metavar="N|auto|gpu|cpu", help="ranks on this machine (default: all visible GPUs, else 1)"
    )
    group.add_argument("--nnodes", metavar="N|MIN:MAX", default="1", help="machines (default: 1)")
    group.add_argument("--node-rank", metavar="N", type=int, help="this machine's number, from 0")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where machines meet, if they have no numbers")
    group.add_argument("--rdzv-id", metavar="NAME", help="distinguishes jobs that meet at one endpoint")
    group.add_argument("--rdzv-backend", help=argparse.SUPPRESS)
    group.add_argument("--rdzv-conf", metavar="KEY=VALUE,…", default="", help="rendezvous: timeout=900, is_host=1")
    group.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--master-addr", metavar="HOST", help="the machine with --node-rank 0")
    group.add_argument("--master-port", metavar="PORT", type=int, help="a free port there (default: 29500)")
    group.add_argument(
        "--max-restarts", metavar="N", type=int, default=0, help="how often failed ranks are restarted (default: 0)"
    )
    group.add_argument("--local-rank", help=argparse.SUPPRESS)


def launch_options(given: argparse.Namespace, *, at_once: bool = True) -> "LaunchOptions":
    """Return the options about processes and machines; check them together if ranks are started now."""
    from lockstep.launch.options import LaunchOptions

    if given.rdzv_backend not in (None, "", "c10d", "static"):
        raise UsageError(
            f"--rdzv-backend {given.rdzv_backend} is not supported",
            why="machines meet at a store that the first one hosts, as with torchrun's c10d; etcd is not needed",
            fix="leave it out: --rdzv-endpoint HOST:PORT, or --master-addr HOST with --node-rank N",
        )
    conf = dict(pair.partition("=")[::2] for pair in given.rdzv_conf.split(",") if pair)
    options = LaunchOptions(
        nproc_per_node=given.nproc_per_node,
        nnodes=given.nnodes,
        node_rank=given.node_rank,
        rdzv_endpoint=given.rdzv_endpoint,
        rdzv_id=given.rdzv_id,
        rdzv_conf=conf,
        master_addr=given.master_addr,
        master_port=given.master_port,
        max_restarts=given.max_restarts,
        **{name: vars(given)[name] for name in ("role", "local_addr", "monitor_interval") if name in given},
        **({} if vars(given).get("shutdown_timeout") is None else {"shutdown_timeout": given.shutdown_timeout}),
    )
    if at_once:
        options.check()
    return options
