"""`Trainer(strategy="fsdp", batch_size=4)`: single keys of the config by their short names."""

from collections.abc import Mapping
from typing import Any

from lockstep.config import Config, config_from
from lockstep.config.flags import apply_flags


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with some keys replaced.

    Args:
        settings: short name (`batch_size`, as `--batch-size`) → value.

    Raises:
        UsageError: an unknown name (the nearest is named), a wrong value, a contradiction.
    """
    return config_from(apply_flags(settings), config) if settings else config
