"""What a rank holds while a folder of Hugging Face becomes its shard: the peak of its memory beside
the file's size, and whether it stays below a limit that the model itself does not fit into.

    python -m benchmarks.weights_in_pieces [--megabytes 256] [--topologies fsdp:2,…] [--write]

A Llama of so many megabytes of float32, all of whose layers are alike. `peak`: the most that the
rank's memory grew (`VmHWM`, which counts files that are mapped, too) from before the model is
described until it is placed; of several ranks the largest. `least`: this rank's shard and the
largest weight. The limit of private memory (`RLIMIT_DATA`) is what the process had and three
quarters of the model.
"""

import argparse
import datetime
import json
import os
import resource
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.division import ceil_div
from tests.parity.adapted import trainer_of
from tests.ranks import free_port

MB = 2**20
TOPOLOGIES = ("single", "ddp:2", "fsdp:2", "tensor:2", "pipeline:2", "fsdp:4")
SETTINGS = {"model.lora": None, "distributed.reproducible": False}
LIMIT = 0.75  # of the model


def write_model(folder: Path, megabytes: int) -> None:
    """A Llama without a meaning, in files of a quarter each."""
    import transformers

    width = 512
    block = 4 * width * width + 3 * width * 4 * width
    vocabulary = 4096
    layers = max(2, (megabytes * MB // 4 - 2 * vocabulary * width) // block)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=int(layers),
        vocab_size=vocabulary,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = list(model.state_dict().items())
    per_file = ceil_div(len(weights), 4)
    index: dict[str, str] = {}
    for number in range(4):
        part = weights[number * per_file : (number + 1) * per_file]
        name = f"model-{number + 1:05d}-of-00004.safetensors"
        save_file({key: torch.full(t.shape, 0.01) for key, t in part}, folder / name)
        index |= {key: name for key, _ in part}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def held(name: str, topology: str, in_pieces: bool, limit: int | None) -> dict[str, Any]:
    """What this rank held while it placed the model, or that it did not get the memory."""
    from lockstep.models import hf

    hf.CAN_READ_PIECES = in_pieces and hf.CAN_READ_PIECES
    if limit is not None:
        most = status("VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    try:
        placed = trainer_of(name, topology, SETTINGS).placed
    except (MemoryError, RuntimeError, OSError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    parameters = placed.parameters.values()
    local = [getattr(p, "_local_tensor", p) for p in parameters]
    stored = getattr(placed.root, "stored_weights", None)
    return {
        "peak": status("VmHWM") - before,
        "shard": sum(p.numel() * 4 for p in local),
        "largest": max(p.numel() for p in parameters) * 4,
        "read": None if stored is None else stored.counted.total,
    }


def on_ranks(ranks: int, *args: Any) -> list[dict[str, Any]]:
    """What `held` says on each rank; ranks are forks of this process, which has imported all."""
    port = free_port()
    with tempfile.TemporaryDirectory() as answers:
        forks = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                try:
                    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
                    limit = datetime.timedelta(seconds=1800)
                    dist.init_process_group(
                        "gloo", store=store, rank=rank, world_size=ranks, timeout=limit
                    )
                    found = held(*args)
                except BaseException:
                    found = {"failed": traceback.format_exc()}
                Path(answers, str(rank)).write_text(json.dumps(found))
                os._exit(0)
            forks.append(child)
        for child in forks:
            os.waitpid(child, 0)
        return [json.loads(Path(answers, str(rank)).read_text()) for rank in range(ranks)]


def row(name: str, topology: str, size: int, in_pieces: bool) -> str:
    ranks = 1 if topology == "single" else int(topology.rpartition(":")[2])
    found = on_ranks(ranks, name, topology, in_pieces, None)
    failed = [each["failed"] for each in found if "failed" in each]
    if failed:
        raise SystemExit(f"{topology}: {failed[0]}")
    most = max(found, key=lambda each: int(each["peak"]))
    fits = all(each["shard"] < LIMIT * size for each in found)
    told = "–"
    if fits:
        limited = on_ranks(ranks, name, topology, in_pieces, int(LIMIT * size))
        failures = [each["failed"] for each in limited if "failed" in each]
        told = "fails" if failures else "below it"
    least = most["shard"] + most["largest"]
    read = "all" if most["read"] is None else f"{most['read'] / MB:.0f}"
    return (
        f"| {topology}{'' if in_pieces else ', read in full'} | {most['shard'] / MB:.0f} |"
        f" {read} | {least / MB:.0f} | {most['peak'] / MB:.0f} | {most['peak'] / least:.2f} |"
        f" {told} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--topologies", default=",".join(TOPOLOGIES))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    from lockstep.models import hf  # noqa: F401 – before ranks are forks of this process

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), asked.megabytes)
        files = Path(folder).glob("*.safetensors")
        size = sum(file.stat().st_size for file in files)
        rows = [
            row(f"hf:{folder}", topology, size, in_pieces=True)
            for topology in asked.topologies.split(",")
        ]
        rows.append(row(f"hf:{folder}", "fsdp:2", size, in_pieces=False))
    text = page(
        "Weights of a folder, read by pieces",
        f"python -m benchmarks.weights_in_pieces --megabytes {asked.megabytes}"
        f" --topologies {asked.topologies} --write",
        machine(),
        [
            f"A Llama of {size / MB:.0f} MB of float32 in four files. MB of one rank,"
            " the largest of all: its",
            "shard, what it has read of the files, the least (shard and largest weight), and"
            " the most that its memory",
            f"grew. The limit of private memory is {LIMIT:.0%} of the model above what the process"
            " had; – where a shard is",
            "larger than it.",
        ],
        "| topology | shard | read | least | peak | of the least | limit |",
        rows,
    )
    tell(text, RESULTS / "weights_in_pieces.md" if asked.write else None)


if __name__ == "__main__":
    main()
