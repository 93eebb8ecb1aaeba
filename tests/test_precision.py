"""The loss scale, and what `auto` means."""

import pytest
import torch

from lockstep.precision import LossScale, Precision, resolve_mode


def test_the_scale_halves_on_overflow_and_grows_after_quiet_steps() -> None:
    scale = LossScale(
        initial_scale=8.0, growth_interval=3, min_scale=2.0, max_scale=16.0, history_size=4
    )
    for overflowed, expected in [
        (True, 4.0),
        (True, 2.0),
        (True, 2.0),
        (False, 2.0),
        (False, 2.0),
        (False, 4.0),
    ]:
        scale.update(overflowed)
        assert scale.get_scale() == expected
    assert len(scale.history) == 4
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()


def test_the_scale_stays_within_its_bounds() -> None:
    scale = LossScale(
        initial_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1, max_scale=16.0
    )
    for overflowed, expected in [
        (False, 16.0),
        (False, 16.0),
        (True, 4.0),
        (True, 1.0),
        (True, 1.0),
    ]:
        scale.update(overflowed)
        assert scale.get_scale() == expected


def test_a_static_scale_stays() -> None:
    scale = LossScale(dynamic=False, initial_scale=128.0)
    scale.update(True)
    assert scale.get_scale() == 128.0


def test_auto_on_the_cpu_is_fp32_and_says_so() -> None:
    assert resolve_mode("auto", torch.device("cpu")) == ("fp32", "on CPU")
    assert resolve_mode("bf16", torch.device("cpu")) == ("bf16", "")


@pytest.mark.parametrize(("has_bf16", "mode"), [(True, "bf16"), (False, "fp32")])
def test_auto_on_a_gpu_is_bf16_where_it_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, mode: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert resolve_mode("auto", torch.device("cuda"))[0] == mode


def test_autocast_computes_in_its_dtype_over_fp32_parameters() -> None:
    linear = torch.nn.Linear(4, 4)
    with Precision("bf16", "cpu").autocast():
        assert linear(torch.ones(1, 4)).dtype == torch.bfloat16
    with Precision("fp32", "cpu").autocast():
        assert linear(torch.ones(1, 4)).dtype == torch.float32
    assert linear.weight.dtype == torch.float32
