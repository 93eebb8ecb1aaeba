"""Attention to the strict past: the chunked form is the direct one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lockstep.models import bdh


def run(form: Any, q: Tensor, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of q and x for a loss that weighs every element differently."""
    q = q.clone().requires_grad_()
    x = x.clone().requires_grad_()
    out = form(q, x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert q.grad is not None
    assert x.grad is not None
    return [out.detach(), q.grad, x.grad]


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (5, 4), (16, 4), (23, 8), (23, 64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_give_what_the_table_of_scores_gives(
    length: int, chunk: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.rand(3, length, 10, generator=generator).to(dtype)
    x = torch.randn(3, length, 6, generator=generator).to(dtype)
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    exact = run(bdh.direct, q.double(), x.double())
    for there, here in zip(exact, run(lambda q, x: bdh.chunked(q, x, chunk), q, x), strict=True):
        assert here.dtype == dtype
        assert (there - here.double()).norm() <= allowed * (there.norm() + 1e-9)


def test_the_form_that_takes_fewer_multiplications_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BDH's sizes, N = 8192 neurons a head and D = 256: direct up to 624 positions."""
    taken = []
    monkeypatch.setattr(bdh, "direct", lambda q, x: taken.append("direct"))
    monkeypatch.setattr(bdh, "chunked", lambda q, x: taken.append("chunked"))
    for length in (512, 624, 625, 1024):
        bdh.sum_over_past(
            torch.empty(1, length, 8192, device="meta"), torch.empty(1, length, 256, device="meta")
        )
    assert taken == ["direct", "direct", "chunked", "chunked"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_may_be_kept_for_the_backward_pass(dtype: torch.dtype) -> None:
    """Selective checkpointing keeps them, and refuses those that were written to since."""
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(3, 16, 10, generator=generator).to(dtype)
    x = torch.randn(3, 16, 6, generator=generator).to(dtype)
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])

    def kept(q: Tensor, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(
            lambda q, x: bdh.chunked(q, x, 4), q, x, use_reentrant=False, context_fn=keep
        )
        return made

    plain = run(lambda q, x: bdh.chunked(q, x, 4), q, x)
    assert all(map(torch.equal, run(kept, q, x), plain))
