"""Train the same config on many topologies and print what each ends in: python
examples/same_bits.py [TOPOLOGY …]
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep import checkpoint
from lockstep.strategy import parse_topology

CONFIG = Path(__file__).with_suffix(".yaml")
TOPOLOGIES = (
    "single",
    "ddp:2",
    "ddp:4",
    "fsdp:2",
    "fsdp:4",
    "hybrid:2x2",
    "tensor:2",
    "fsdp:2*tensor:2",
    "pipeline:2",
    "pipeline:2*ddp:2",
    "pipeline:2*tensor:2",
)


def device_for(topologies: Sequence[str]) -> str:
    """The device on which all of them run: an accelerator where each rank has one of its own."""
    most = max(parse_topology(topology)[1] for topology in topologies)
    found = torch.accelerator.device_count()
    if 0 < found < most:
        print(f"on the CPU: {most} ranks need a device each, {found} visible", flush=True)
        return "cpu"
    return "auto"


def digest_of(topology: str, device: str, folder: Path) -> str:
    """The SHA-256 of the parameters after training on a topology."""
    settings, ranks = parse_topology(topology)
    overrides = [f"distributed.{key}={value}" for key, value in settings.items()]
    overrides.append(f"distributed.device={device}")
    run = folder / topology.replace(":", "-").replace("*", "-")
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        str(CONFIG),
        *overrides,
        "--output-dir",
        str(run),
    ]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{topology}: {done.stdout}{done.stderr}")
    found = checkpoint.newest(run / "checkpoints")
    assert found is not None
    return checkpoint.digest(found)


def main(topologies: list[str]) -> int:
    asked = topologies or TOPOLOGIES
    device = device_for(asked)
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        for topology in asked:
            digest = digest_of(topology, device, Path(folder))
            digests.add(digest)
            print(f"{topology:20} {digest}", flush=True)
    print("one digest" if len(digests) == 1 else f"{len(digests)} digests")
    return int(len(digests) != 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
