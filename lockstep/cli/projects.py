"""Verbs of what is written before a run: projects, models, configs, data.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

from pathlib import Path

from lockstep.cli.arguments import FLAG, Parser, Subverbs, add_config, config_and_overrides
from lockstep.errors import EXIT_DONE, UsageError


def init(argv: list[str]) -> int:
    """Run `lockstep init [DIR] [--script | --finetune FOLDER] [--data PATH]`."""
    parser = Parser(
        "init",
        "Write a starter project: a config, or a script, and data, which trains at once.",
        [
            "lockstep init first && cd first && lockstep train train.yaml",
            "lockstep init mine --script --data mine.csv",
            "lockstep init tuned --finetune FOLDER --data chat.jsonl",
        ],
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        default=Path("."),
        help="default: this folder",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--script", action="store_true", help="a Python script and a table, not a config and text"
    )
    text = "a config that trains this chat model of Hugging Face on conversations, by adapters"
    only.add_argument("--finetune", metavar="FOLDER", type=Path, help=text)
    text = (
        "your own: a text file or a folder of them; with --script a CSV file whose last column is"
        " the class; with --finetune conversations"
    )
    parser.add_argument("--data", metavar="PATH", type=Path, help=text)
    args = parser.parse(argv)
    from lockstep.cli import starter

    if args.finetune is not None:
        print(starter.finetuning(args.folder, model=args.finetune, data=args.data))
        return EXIT_DONE
    print(starter.project(args.folder, script=args.script, data=args.data))
    return EXIT_DONE


def new_model(argv: list[str]) -> int:
    """Run `lockstep new-model NAME`."""
    text = (
        "Write a language model of your own to change, a config that trains it, and a test that it"
        " takes the same steps on two ranks as in one process."
    )
    parser = Parser(
        "new-model", text, ["lockstep new-model my_model && lockstep train my_model.yaml"]
    )
    parser.add_argument(
        "name", metavar="NAME", help="my_model makes my_model.py with the class MyModel"
    )
    args = parser.parse(argv)
    from lockstep.cli import starter

    print(starter.model(args.name))
    return EXIT_DONE


_KEYS = ("words", "config", FLAG.rstrip(":"))

CONFIG_VERBS: Subverbs = {
    "show": (
        "Print the config with all defaults, or draw its pipeline.",
        (*_KEYS, "schedule", "ranks"),
    ),
    "check": ("Check every key, and what the config names. Nothing is trained.", _KEYS),
    "schema": ("Print the JSON schema, with which editors complete keys.", ()),
    "list": ("List the configs that ship, to train or extend by name.", ()),
}


def config(argv: list[str]) -> int:
    """Run `lockstep config show|check|schema|list [CONFIG] [KEY=VALUE …]`."""
    text = "Show a config as it resolves, check it, print its schema, list those that ship."
    parser = Parser(
        "config", text, ["lockstep config check run.yaml training.max_steps=10"], CONFIG_VERBS
    )
    parser.add_argument("verb", metavar="|".join(CONFIG_VERBS))
    add_config(parser)
    parser.add_argument(
        "--schedule", action="store_true", help="show: draw the schedule of a pipeline"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="with --schedule (default: the product of the sizes)"
    )
    args = parser.parse(argv)
    if (args.schedule and args.verb != "show") or (args.ranks is not None and not args.schedule):
        raise UsageError(
            "a schedule is drawn by `show`",
            fix="lockstep config show CONFIG --schedule [--ranks N]",
        )
    path, overrides = config_and_overrides(args, required=args.schedule)
    if args.schedule:
        from lockstep.config import load_config
        from lockstep.parallel.pipeline.schedules import picture_of

        assert path is not None
        print(picture_of(load_config(path, overrides).step, args.ranks))
        return EXIT_DONE

    from lockstep.config import commands

    text = commands.run(args.verb, path, overrides)
    if args.verb == "check" and path is not None:
        from lockstep.config import load_config
        from lockstep.trainer import check_named

        check_named(load_config(path, overrides), str(path))
    print(text)
    return EXIT_DONE


def data(argv: list[str]) -> int:
    """Run `lockstep data prepare …` or `lockstep data show CONFIG`."""
    if argv[:1] == ["show"]:
        return _show_data(argv[1:])
    from lockstep.data.prepare import prepare_command

    return prepare_command(argv)


def _show_data(argv: list[str]) -> int:
    """Run `lockstep data show CONFIG [KEY=VALUE …] [--samples N]`."""
    text = "Print samples of a config's training data as text, and which of their tokens train."
    parser = Parser("data show", text, ["lockstep data show chat.yaml --samples 1"])
    add_config(parser)
    parser.add_argument(
        "--samples", metavar="N", type=int, default=2, help="how many of the first (default: 2)"
    )
    args = parser.parse(argv)
    path, overrides = config_and_overrides(args)
    assert path is not None
    from lockstep.data import show

    print(show.show(path, overrides, args.samples))
    return EXIT_DONE
