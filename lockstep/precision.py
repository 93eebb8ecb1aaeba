"""Defines mixed precision as a value: autocast over fp32 parameters, and the loss scale for fp16.

`bf16` and `fp16` mean the same under every strategy. The scaler's order is unscale → check → clip →
step; the global gradient norm shows an overflow, so that all ranks agree. bf16 has the range of
fp32 and no scaler.

Tests: tests/test_precision.py, tests/parity/test_precision.py
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.config import PrecisionConfig
from lockstep.machine import accelerator

Mode = Literal["fp32", "bf16", "fp16"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_mode(mode: str, device: torch.device) -> tuple[Mode, str]:
    """Return the mode that `auto` means here, with the reason.

    It is bf16 if the hardware supports it, else fp32.
    """
    if mode != "auto":
        return mode, ""  # type: ignore[return-value]
    if device.type == "cpu":
        return "fp32", "on CPU"
    if accelerator.computes_in_bf16(device):
        return "bf16", "the GPU computes in bf16"
    return "fp32", "no bf16 hardware"


def switch_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in fp32 matrix products and convolutions on GPUs, in this process.

    TF32 has 10 bits of mantissa.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


_NOTHING = nullcontext()  # shared: creating one takes a call


@dataclass(frozen=True)
class Precision:
    """The precision of forward passes: fp32, or the dtype of autocast on a type of device."""

    mode: Mode
    device_type: str

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for forward pass and loss, which can be entered repeatedly.

        A weight is cast at each use. Autocast's cache would cast a weight that several layers share
        only once, and sum its gradients in low precision; the stages of a pipeline each cast it,
        and sum in float32: another result. Under FSDP the cache would also keep parameters that a
        unit has freed.
        """
        if self.mode == "fp32":
            return _NOTHING
        return torch.autocast(self.device_type, dtype=DTYPES[self.mode], cache_enabled=False)


@dataclass(eq=False)
class LossScale:
    """A factor that keeps fp16 gradients from underflowing.

    It halves on overflow and grows after steps without one.

    Every rank has its own copy and sees the same overflows, so the copies stay equal without
    communication. The factors are those of torch's `GradScaler`.
    """

    dynamic: bool = True  # whether the scale changes
    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    history_size: int = 100

    def __post_init__(self) -> None:
        self.scale = self.initial_scale
        self.quiet_steps = 0
        # (scale, overflowed) of each step
        self.history: deque[tuple[float, bool]] = deque(maxlen=self.history_size)

    def get_scale(self) -> float:
        """Return the factor for the next step's loss."""
        return self.scale

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step.

        It backs off, or grows after `growth_interval` consecutive steps without overflow.
        """
        self.history.append((self.scale, overflowed))
        if not self.dynamic:
            return
        if overflowed:
            self.scale = max(self.min_scale, self.scale * self.backoff_factor)
            self.quiet_steps = 0
            return
        self.quiet_steps += 1
        if self.quiet_steps >= self.growth_interval:
            self.scale = min(self.max_scale, self.scale * self.growth_factor)
            self.quiet_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return {
            "scale": self.scale,
            "quiet_steps": self.quiet_steps,
            "history": [list(h) for h in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = float(state["scale"])
        self.quiet_steps = int(state["quiet_steps"])
        self.history.clear()
        self.history.extend(
            (float(scale), bool(overflowed)) for scale, overflowed in state["history"]
        )


def loss_scale_for(config: PrecisionConfig, mode: Mode) -> LossScale | None:
    """Return the loss scale of a run: None unless it computes in fp16."""
    return LossScale(**config.loss_scale.model_dump()) if mode == "fp16" else None
