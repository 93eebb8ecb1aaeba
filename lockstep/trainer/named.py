"""What a config names, looked up without training: classes, functions, and whether they take their arguments."""

from collections.abc import Callable, Iterator
from functools import partial

from lockstep.config import Config
from lockstep.config.mistakes import Mistake, usage_error
from lockstep.data import check_data
from lockstep.errors import UsageError
from lockstep.models import check_model
from lockstep.monitor.callbacks import check_callback
from lockstep.optim import check_optimizer
from lockstep.registry import load_object
from lockstep.trainer.settings import check_loss_fn


def check_named(config: Config, source: str) -> None:
    """Refuse what a run of this config could not import, or could not call with these arguments.

    Args:
        source: what the config is called in the message.

    Raises:
        UsageError: for all of it at once.
    """
    found = []
    for look in _lookups(config):
        try:
            look()
        except UsageError as error:
            found.append(
                Mistake(error.where or source, error.what + (f" ({error.why})" if error.why else ""), error.fix)
            )
    if found:
        raise usage_error(found, source)


def _lookups(config: Config) -> Iterator[Callable[[], object]]:
    yield partial(check_model, config.model)
    yield partial(check_data, config.data)
    if config.loss_fn is not None:
        yield partial(check_loss_fn, config.loss_fn)
    yield partial(check_optimizer, config.training.optimizer, config.training.optimizer_args)
    for number, spec in enumerate(config.monitor.callbacks):
        yield partial(check_callback, spec, f"monitor.callbacks[{number}]")
    policy = config.distributed.fsdp.auto_wrap_policy
    if isinstance(policy, str) and ":" in policy:
        yield partial(load_object, policy, "distributed.fsdp.auto_wrap_policy")
