"""Tells whether a backward pass runs, and which node of its graph.

Public torch: none; `torch.utils.checkpoint` asks in the same way.
Seen to work: torch 2.13.0.
When gone: AttributeError, in the first forward pass of a model that is placed.
"""

import torch

# () → number of this thread's backward pass; -1: there is none
graph_task = torch._C._current_graph_task_id


def running_node() -> int | None:
    """Return the number of the node that the backward pass of this thread runs.

    None outside of a backward pass.
    """
    if graph_task() == -1:
        return None
    node = torch._C._current_autograd_node()  # None between the nodes
    return -1 if node is None else int(node._sequence_nr())
