"""Verbs that make a job of a run, and ask for it.

Each verb parses its arguments and calls the room that does the work.

Tests: tests/cli/test_cli.py
"""

from lockstep.cli.arguments import (
    Parser,
    add_config,
    add_launch_options,
    config_and_overrides,
    launch_options,
)
from lockstep.errors import EXIT_DONE, UsageError


def submit(argv: list[str]) -> int:
    """Run `lockstep submit slurm|kubernetes|ray CONFIG [KEY=VALUE …] [--dry-run]`."""
    from lockstep.submit import SCHEDULERS, add_options, run

    if argv[:1] in (["-h"], ["--help"]):
        description = "Make a job of a run; `lockstep submit slurm --help` lists the options."
        example = "lockstep submit slurm run.yaml --nproc-per-node 8 --nnodes 2 --dry-run"
        overview = Parser("submit", description, [example])
        overview.add_argument("scheduler", metavar="slurm|kubernetes|ray", help="the scheduler")
        overview.parse(argv)
    if not argv or argv[0] not in SCHEDULERS:
        fix = "lockstep submit slurm|kubernetes|ray CONFIG [KEY=VALUE …] [--dry-run]"
        what = f"there is no scheduler {argv[0]}" if argv else "no scheduler is given"
        raise UsageError(what, fix=fix)
    parser = Parser(f"submit {argv[0]}", "Make a job of a run, and submit it to the scheduler.")
    add_config(parser)
    add_launch_options(parser)
    parser.add_argument(
        "--output-dir",
        metavar="DIR|URL",
        help="the run directory, shared by all machines, or a bucket: s3://BUCKET/PREFIX",
    )
    add_options(parser, argv[0])
    args = parser.parse(argv[1:])
    parser.refuse(
        "CONFIG",
        "node_rank",
        "rdzv_id",
        "rdzv_endpoint",
        "rdzv_conf",
        "master_addr",
        "master_port",
        "local_rank",
        "standalone",
        "rdzv_backend",
        fix="leave it out: the job's machines find each other by themselves",
    )
    path, overrides = config_and_overrides(args)
    assert path is not None
    print(run(argv[0], args, path, overrides, launch_options(args, at_once=False)))
    return EXIT_DONE


def jobs(argv: list[str]) -> int:
    """Run `lockstep jobs status|logs|cancel JOB`."""
    from lockstep.submit import jobs as submitted
    from lockstep.submit.ray_job import add_address

    subverbs = {
        name: (text, ("job", "namespace", "address")) for name, text in submitted.VERBS.items()
    }
    text = "Ask for a job that was submitted, or end it."
    parser = Parser("jobs", text, ["lockstep jobs status slurm:4711"], subverbs)
    parser.add_argument("verb", metavar="|".join(subverbs))
    parser.add_argument(
        "job", metavar="JOB", help="slurm:NUMBER, kubernetes:job|jobset|trainjob/NAME, ray:ID"
    )
    parser.add_argument("--namespace", help="of Kubernetes; default: kubectl's own")
    add_address(parser)
    args = parser.parse(argv)
    print(submitted.run(args.verb, args.job, args))
    return EXIT_DONE
