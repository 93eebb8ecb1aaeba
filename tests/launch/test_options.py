"""What people say about processes and machines."""

import pytest

from lockstep.errors import UsageError
from lockstep.launch.options import LaunchOptions


@pytest.mark.fault(
    "configuration: launch options that make no sense",
    "--nnodes 4:2, --nproc-per-node 0 …",
    "refused before anything starts, naming the option",
)
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"nproc_per_node": "0"}, "--nproc-per-node"),
        ({"nproc_per_node": "two"}, "--nproc-per-node"),
        ({"nnodes": "0"}, "--nnodes"),
        ({"nnodes": "4:2"}, "--nnodes"),
        ({"nnodes": "2"}, "--rdzv-endpoint"),
        ({"nnodes": "2", "master_addr": "h"}, "--node-rank"),
        ({"nnodes": "1:2", "master_addr": "h", "node_rank": 0}, "--rdzv-endpoint"),
        ({"nnodes": "2", "master_addr": "h", "node_rank": 2}, "--node-rank"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"master_port": 70000}, "--master-port"),
        ({"rdzv_conf": {"last_call": "5"}}, "write last_call_timeout"),
        ({"rdzv_conf": {"timeout": "soon"}}, "timeout=soon is not a number"),
        ({"rdzv_conf": {"is_host": "maybe"}}, "is_host=maybe"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: dict[str, object], word: str
) -> None:
    with pytest.raises(UsageError) as refused:
        LaunchOptions(**options).check()  # type: ignore[arg-type]
    assert word in str(refused.value)
