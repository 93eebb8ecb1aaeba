"""Random numbers depend on what is computed, never on where or in which order."""

import torch
from torch import nn

from lockstep.randomness import RandomState, derive_key, key_segments, seeded


def test_keys_are_the_same_everywhere_and_differ_by_every_part() -> None:
    assert derive_key("init", 1, "w") == derive_key("init", 1, "w") < 2**63
    assert len({derive_key("init", s, n) for s in range(10) for n in "abc"}) == 30
    assert derive_key(1, 23) != derive_key(12, 3)


def test_the_outer_state_is_put_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1):
        torch.rand(7)
    random_state = RandomState(1, torch.device("cpu"))
    with random_state.running("train", 3):
        random_state.at(0)
        random_state.enter("block")
        torch.rand(100)
    assert torch.equal(torch.rand(3), expected)


def test_a_block_draws_the_same_whatever_ran_before_it() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5))
    random_state = RandomState(7, torch.device("cpu"))
    key_segments(random_state, list(model.named_children()), chain=True)
    x = torch.ones(64)
    with random_state.running("train", 0):
        random_state.at(3)
        whole = model[2](model[1](model[0](x)))
        random_state.at(3)
        last = model[2](x)  # as on the last stage of a pipeline
        random_state.at(4)
        other = model[2](x)
    assert torch.equal(whole != 0, (whole != 0) & (last != 0))
    assert not torch.equal(last, other)


def test_the_second_call_of_a_segment_draws_other_numbers() -> None:
    dropout = nn.Dropout(0.5)
    random_state = RandomState(7, torch.device("cpu"))
    key_segments(random_state, [("shared", dropout)], chain=True)
    x = torch.ones(64)
    with random_state.running("train", 0):
        random_state.at(0)
        first = dropout(x)
        second = dropout(x)
        random_state.at(0)
        again = dropout(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_trap_28_recomputation_draws_what_the_forward_pass_drew() -> None:
    """Under a pipeline another micro-batch is current when a block is recomputed; its gradient must
    not notice.
    """
    from lockstep.parallel.execution.activation import apply_activation_checkpointing

    def gradients(mode: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
        named = [(f"layers.{i}", b) for i, b in enumerate(blocks)]
        random_state = RandomState(7, torch.device("cpu"))
        key_segments(random_state, named, chain=True)
        apply_activation_checkpointing(named, mode, random_state)
        x = torch.ones(4, 8)
        losses = []
        with random_state.running("train", 0):
            for micro_batch in range(2):  # both forward passes first, as a pipeline does
                random_state.at(micro_batch)
                y = x
                for block in blocks:
                    y = block(y)
                losses.append(y.sum())
            for loss in losses:
                loss.backward()
        return [p.grad for b in blocks for p in b.parameters()]  # type: ignore[misc]

    plain = gradients("none")
    for mode in ("full", "selective", "every_n", "sequential"):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(mode), strict=True)), mode
