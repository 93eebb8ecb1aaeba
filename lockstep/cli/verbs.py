"""The table of verbs: the function of each, `argv -> exit code`, and what `--help` says of it.

Each verb imports what it needs, so that `--help` loads neither torch nor the schema.

Tests: tests/cli/test_cli.py, tests/cli/test_completion.py
"""

from collections.abc import Callable

from lockstep.cli.arguments import Parser
from lockstep.cli.jobs import jobs, submit
from lockstep.cli.planning import doctor, plan
from lockstep.cli.projects import config, data, init, new_model
from lockstep.cli.proofs import compare, verify
from lockstep.cli.runs import report, top
from lockstep.cli.training import bench, launch, train, warm
from lockstep.cli.weights import checkpoint, evaluate, sample
from lockstep.errors import EXIT_DONE


def completion(argv: list[str]) -> int:
    """Run `lockstep completion bash|zsh`."""
    text = "Print a script with which the shell completes verbs, options and files."
    parser = Parser("completion", text, ["source <(lockstep completion bash)"])
    parser.add_argument("shell", metavar="bash|zsh")
    args = parser.parse(argv)
    from lockstep.cli.starter import completion_script

    print(completion_script(args.shell, VERBS), end="")
    return EXIT_DONE


Verb = tuple[Callable[[list[str]], int], str]
VERBS: dict[str, Verb] = {
    "init": (init, "write a starter project that trains at once"),
    "new-model": (new_model, "write a model of your own, with its config and its test of parity"),
    "train": (train, "train what a config says, on one rank or many"),
    "launch": (launch, "run any script of yours with the same launcher"),
    "verify": (verify, "prove that topologies take the steps that one process takes"),
    "compare": (compare, "prove that two programs train the same, or find why not"),
    "plan": (plan, "predict the memory and time of a run, and which layout is best"),
    "doctor": (doctor, "check machines, network and ranks before a run"),
    "warm": (warm, "leave a prepared process, so that later commands start at once"),
    "submit": (submit, "submit a run as a job of Slurm, Kubernetes or Ray"),
    "jobs": (jobs, "show, read or end jobs that were submitted"),
    "config": (config, "show, check or list configs"),
    "checkpoint": (
        checkpoint,
        "list, inspect, verify, digest, export, convert, import checkpoints",
    ),
    "evaluate": (evaluate, "evaluate weights on data: losses, metrics, texts"),
    "sample": (sample, "generate text with a trained language model"),
    "report": (report, "draw what runs did, and advise what to do next"),
    "top": (top, "show what the ranks of a running run do, again each second"),
    "bench": (bench, "measure how a config scales over ranks"),
    "data": (data, "prepare data, and show what of them is trained"),
    "completion": (completion, "print a script that lets bash or zsh complete"),
}
