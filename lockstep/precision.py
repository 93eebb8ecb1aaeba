"""Mixed precision as a value: autocast over fp32 parameters, and the loss scale that fp16 needs.

`bf16` and `fp16` mean the same under every strategy. The scaler's order is unscale → check → clip → step;
whether a step overflowed is read from the global gradient norm, so that all ranks agree. bf16 has the range of fp32 and
no scaler.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lockstep.config import PrecisionConfig

Mode = Literal["fp32", "bf16", "fp16"]


def resolve_mode(mode: str, device: torch.device) -> tuple[Mode, str]:
    """What `auto` means here: bf16 where the hardware computes in it, else fp32; with the reason."""
    if mode != "auto":
        return mode, ""  # type: ignore[return-value]
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "the GPU computes in bf16"
    return "fp32", "no bf16 hardware" if device.type == "cuda" else "on CPU"


def switch_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 (10 bits of mantissa) in fp32 matrix products and convolutions on GPUs, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


_NOTHING = nullcontext()  # one for all uses: making it is a call


@dataclass(frozen=True)
class Precision:
    """How forward passes compute.

    Attributes:
        mode: fp32, or the dtype of autocast.
        device_type: of the device that autocast watches.
    """

    mode: Mode
    device_type: str

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward pass and loss run inside.

        A weight is cast anew at each use. Autocast's cache would cast one that several layers share once, and add up
        the uses' gradients in low precision before they reach it; the stages of a pipeline each cast it, and add in
        float32: another step. Under FSDP the cache would also keep what a unit has let go of.
        """
        if self.mode == "fp32":
            return _NOTHING
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.mode]
        return torch.autocast(self.device_type, dtype=dtype, cache_enabled=False)


class LossScale:
    """The factor that keeps fp16 gradients from underflowing; it halves on overflow and grows after quiet steps.

    Every rank holds its own copy and sees the same overflows, so the copies stay equal without traffic.

    Args:
        dynamic: False keeps the scale where it starts.
        initial_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale: as torch's `GradScaler`,
            with bounds. `growth_interval` is in steps.
        history_size: how many steps `history` keeps, each as (scale, overflowed).
    """

    def __init__(
        self, *, dynamic: bool = True, initial_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, min_scale: float = 1.0,
        max_scale: float = 2.0**24, history_size: int = 100,
    ) -> None:  # fmt: skip
        self.dynamic, self.scale = dynamic, initial_scale
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.min_scale, self.max_scale = min_scale, max_scale
        self.quiet_steps = 0
        self.history: deque[tuple[float, bool]] = deque(maxlen=history_size)

    def get_scale(self) -> float:
        """The factor that the next step's loss is multiplied by."""
        return self.scale

    def update(self, overflowed: bool) -> None:
        """After each step: back off, or grow when `growth_interval` steps in a row were quiet."""
        self.history.append((self.scale, overflowed))
        if not self.dynamic:
            return
        if overflowed:
            self.scale, self.quiet_steps = max(self.min_scale, self.scale * self.backoff_factor), 0
            return
        self.quiet_steps += 1
        if self.quiet_steps >= self.growth_interval:
            self.scale, self.quiet_steps = min(self.max_scale, self.scale * self.growth_factor), 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"scale": self.scale, "quiet_steps": self.quiet_steps, "history": [list(h) for h in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.scale, self.quiet_steps = float(state["scale"]), int(state["quiet_steps"])
        self.history.clear()
        self.history.extend((float(scale), bool(overflowed)) for scale, overflowed in state["history"])


def loss_scale_for(config: PrecisionConfig, mode: Mode) -> LossScale | None:
    """The loss scale of a run: none unless it computes in fp16."""
    return LossScale(**config.loss_scale.model_dump()) if mode == "fp16" else None
