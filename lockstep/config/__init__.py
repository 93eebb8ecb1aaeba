"""The config of a run: the typed schema, loading from files, and the templates that ship.

Nothing here imports torch. From a file to a `Config`:

    files.py        finds it, and those that it extends
    templates.py    renders those in the template language, line by line (prepass.py)
    tree.py         parses YAML; each value keeps its file and line
    loading.py      merges files and overrides; calc.py evaluates `!calc`
    schema*.py      the types; keys.py says in words what each key accepts, and what was meant
    checks*.py      contradictions between keys; checks.py has them in order
    names.py        names of other trainers, flags.py the short names of keys

    from lockstep.config import Config, load_config

Names are imported when first used, so that the command line can read `lockstep.config.flags`
without loading pydantic.

Tests: tests/config/test_loading.py, tests/cli/test_cli.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.checks import check, require_runnable
    from lockstep.config.checks_training import require_equation
    from lockstep.config.flags import FLAGS, apply_flags, as_overrides
    from lockstep.config.loading import config_from, load_config
    from lockstep.config.schema import (
        CheckpointConfig,
        Config,
        MonitorConfig,
        ProfileConfig,
        PrometheusConfig,
        StepConfig,
        StragglerConfig,
    )
    from lockstep.config.schema_distributed import (
        DDPConfig,
        DiLoCoConfig,
        DistributedConfig,
        FSDPConfig,
    )
    from lockstep.config.schema_training import (
        BadNumbersConfig,
        DataConfig,
        EarlyStoppingConfig,
        GradientClipConfig,
        ObjectSpec,
        PrecisionConfig,
        TrainingConfig,
        build_object,
    )

__all__ = [
    "FLAGS",
    "BadNumbersConfig",
    "CheckpointConfig",
    "Config",
    "DDPConfig",
    "DataConfig",
    "DiLoCoConfig",
    "DistributedConfig",
    "EarlyStoppingConfig",
    "FSDPConfig",
    "GradientClipConfig",
    "MonitorConfig",
    "ObjectSpec",
    "PrecisionConfig",
    "ProfileConfig",
    "PrometheusConfig",
    "StepConfig",
    "StragglerConfig",
    "TrainingConfig",
    "apply_flags",
    "as_overrides",
    "build_object",
    "check",
    "config_from",
    "load_config",
    "require_equation",
    "require_runnable",
]
_HOMES = (
    "flags",
    "schema_training",
    "schema_distributed",
    "schema",
    "checks",
    "checks_training",
    "loading",
)


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
