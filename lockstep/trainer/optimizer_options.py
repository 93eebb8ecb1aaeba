"""Sets the options of an optimizer that were changed since the checkpoint from which a run goes on.

Tests: tests/trainer/test_resume.py
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.run_directory.records import plain
from lockstep.trainer.changed_settings import Change


class GivenOptions:
    """The options of a user's optimizer, now and when the loaded checkpoint's run began."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._now = [_options(group) for group in optimizer.param_groups]
        self._before: list[dict[str, Any]] | None = None  # those in the checkpoint that was loaded

    def state(self) -> list[dict[str, Any]]:
        """Return those of now, by group."""
        return self._now

    def load_state(self, state: list[dict[str, Any]] | None) -> None:
        """Take over what `state` returned when the checkpoint was written; None: it has none."""
        self._before = state

    def apply_changes(self, optimizer: Optimizer) -> list[str]:
        """Set what differs between the two; return it in words.

        A rate that the run has changed since keeps its proportion to the first one.
        """
        groups = optimizer.param_groups
        changed = []
        before = self._before
        if before is None:  # a checkpoint of an older version: its groups know the first rate alone
            before = [
                {"lr": group["initial_lr"]} if "initial_lr" in group else {} for group in groups
            ]
        # others were added by the run
        for group, old, new in zip(groups, before, self._now, strict=False):
            for name in sorted(new.keys() & old.keys() - {"initial_lr"}):
                if _comparable(old[name]) == _comparable(new[name]):
                    continue
                changed.append(f"the optimizer's {name} {old[name]} → {new[name]}")
                if name == "lr":
                    proportion = float(group["lr"]) / old["lr"] if old["lr"] else 1.0
                    group["lr"] = new["lr"] * proportion
                    group["initial_lr"] = new.get("initial_lr", new["lr"])
                else:
                    group[name] = new[name]
        return list(dict.fromkeys(changed))


def apply_changed_settings(
    groups: list[dict[str, Any]], fresh: list[dict[str, Any]], changes: list[Change]
) -> None:
    """Set changed options of the config's optimizer in `groups` to their `fresh` values.

    A checkpoint has filled the `groups`.
    """
    prefix = "training.optimizer_args."
    keys = {change.key for change in changes}
    names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    if keys & {"training.learning_rate", "training.lr_scaling", "training.base_batch_size"}:
        names += ["lr", "initial_lr"]
    if "training.weight_decay" in keys:
        names.append("weight_decay")
    for group, new in zip(groups, fresh, strict=True):
        group.update({name: new[name] for name in names if name in new})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of an optimizer's parameters that JSON can hold."""
    options = {}
    for name, value in group.items():
        value = plain(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if name != "params" and (
            value is None or isinstance(value, bool | int | float | str | tuple | list)
        ):
            options[name] = value
    return options


def _comparable(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option
