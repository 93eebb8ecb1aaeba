"""Verbs of trained weights: checkpoint, evaluate, sample.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

from pathlib import Path

from lockstep.cli.arguments import Parser, Subverbs, add_launch_options, launch_options
from lockstep.errors import EXIT_DONE, UsageError
from lockstep.files.paths import run_directory
from lockstep.run_directory.run_files import printable

CHECKPOINT_VERBS: Subverbs = {
    "list": ("List a run's checkpoints: size, time, and damage.", ("path",)),
    "inspect": ("Show what one holds: parameters, shapes, steps.", ("path",)),
    "verify": ("Read every byte and compare the checksums.", ("path",)),
    "digest": ("Print the SHA-256 of the parameters, equal on any topology.", ("path",)),
    "export": ("Write the weights for other programs.", ("path", "output", "to")),
    "convert": ("Write a checkpoint in another format.", ("path", "output", "to")),
    "import": ("Make a checkpoint of another trainer's weights.", ("path", "output", "prefix")),
}


def checkpoint(argv: list[str]) -> int:
    """Run `lockstep checkpoint list|inspect|verify|digest|export|convert|import PATH`."""
    text = "Inspect and verify checkpoints, export weights from one or import them into one."
    examples = [
        "lockstep checkpoint export runs/run --output model.safetensors",
        "lockstep checkpoint export runs/run --to huggingface --output model",
    ]
    parser = Parser("checkpoint", text, examples, CHECKPOINT_VERBS)
    parser.add_argument("verb", metavar="|".join(CHECKPOINT_VERBS))
    text = (
        "a run directory, its checkpoints, or one of them; the URL of a bucket; a storage,"
        " package.module:Name, or a config that names one; import: another trainer's file or folder"
    )
    parser.add_argument("path", metavar="PATH|URL", help=text)
    text = "export, convert, import: the file or folder to write"
    parser.add_argument("--output", metavar="PATH", type=Path, help=text)
    parser.add_argument(
        "--to",
        metavar="FORM",
        help="convert: full, one file of whole tensors, or torch, for torch.load; export:"
        " safetensors, one file (the default), huggingface, a folder for transformers with adapters"
        " merged, or adapter, a folder for peft",
    )
    text = (
        "import: a prefix of names in the file that the model's names lack, such as model. in a"
        " LightningModule"
    )
    parser.add_argument("--prefix", metavar="TEXT", help=text)
    args = parser.parse(argv)
    from lockstep.checkpoint import commands

    text = commands.run(args.verb, args.path, output=args.output, to=args.to, prefix=args.prefix)
    print(printable(text))  # names in it are those of a checkpoint, which may be a stranger's
    return EXIT_DONE


def evaluate(argv: list[str]) -> int:
    """Run `lockstep evaluate RUN [--data PATH] [--metrics NAME,…] [--step N] [--prompt TEXT]`."""
    parser = _evaluate_parser()
    args = parser.parse(argv)
    if not args.prompt:
        parser.refuse("RUN", "tokens", "temperature", fix="add --prompt TEXT, or leave it out")
    if not args.tasks:
        parser.refuse("RUN", "limit", fix="add --tasks NAME, or leave it out")
    others = [word for word in args.words if "=" not in word]
    if others:
        raise UsageError(
            f"one RUN is expected, and {others[0]} is another",
            fix="a key is overridden as KEY=VALUE, without spaces",
        )
    from lockstep.evaluate.subject import Asked
    from lockstep.launch.evaluate import Wanted
    from lockstep.launch.evaluate import evaluate as start

    asked = Asked(args.run, args.config, args.words, args.data, args.step)
    wanted = Wanted(
        metrics=_names(args.metrics),
        prompts=args.prompt,
        num_tokens=args.tokens,
        temperature=args.temperature,
        tasks=_names(args.tasks),
        limit=args.limit,
        in_json=args.json,
    )
    output = run_directory(args.output_dir or Path("runs", f"evaluate-{args.run.stem}"))
    return start(asked, wanted, launch_options(args), output_dir=output, argv=argv)


def _evaluate_parser() -> Parser:
    """Return the parser of `lockstep evaluate`."""
    text = (
        "Evaluate a run, a checkpoint, a file of weights or a folder of Hugging Face: the loss, own"
        " metrics, texts. The numbers are the same on any number of ranks."
    )
    examples = [
        "lockstep evaluate runs/run     # on its validation data",
        "lockstep evaluate runs/run --data test.jsonl --nproc-per-node 2",
        'lockstep evaluate runs/run --step 100 --prompt "The " --tokens 60',
        "lockstep evaluate model.safetensors --config run.yaml",
    ]
    parser = Parser("evaluate", text, examples)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run directory, a checkpoint, a file or a folder")
    add("words", metavar="KEY=VALUE", nargs="*", default=[], help="keys of its config to override")
    add("--config", metavar="FILE", type=Path, help="the config of a file of weights, or a folder")
    text = "other data: what the run's data set takes as a path, or a config with others"
    add("--data", metavar="PATH", type=Path, help=text)
    text = "functions (outputs, targets) -> values, or classes as torchmetrics has them"
    add("--metrics", metavar="package.module:Name,…", default="", help=text)
    add("--step", metavar="N", type=int, help="the run's checkpoint of that step, not the newest")
    text = "a text for a language model to continue; may be given several times"
    add("--prompt", metavar="TEXT", action="append", default=[], help=text)
    add("--tokens", metavar="N", type=int, default=60, help="added to a prompt (default: 60)")
    text = "of what is added (default: 0, always the likeliest token)"
    add("--temperature", metavar="T", type=float, default=0.0, help=text)
    text = "tasks of lm-evaluation-harness (pip install lm_eval), or paths of descriptions"
    add("--tasks", metavar="NAME,…", default="", help=text)
    add("--limit", metavar="N", type=int, help="with --tasks: requests of each (default: all)")
    add("--json", action="store_true", help="print one JSON object, for programs")
    text = "for the ranks' logs (default: runs/evaluate-<RUN's name>)"
    add("--output-dir", metavar="DIR", type=Path, help=text)
    add_launch_options(parser)
    return parser


def _names(text: str) -> list[str]:
    """Return the names in a list that is written as `a,b`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def sample(argv: list[str]) -> int:
    """Run `lockstep sample RUN_DIR [--prompt TEXT] [--tokens N] [--temperature T] [--seed N]`."""
    text = "Generate text with a run's language model, from its newest whole checkpoint."
    parser = Parser("sample", text, ['lockstep sample runs/run --prompt "The " --tokens 60'])
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("--prompt", metavar="TEXT", default="The ", help="the text to continue")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=200,
        help="number of tokens to add (default: 200)",
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest token"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse(argv)
    from lockstep.evaluate.sample import sample as write

    print(
        write(
            args.run,
            prompt=args.prompt,
            num_tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
    )
    return EXIT_DONE
