"""Names that ship and names of the user's own: one rule for strategies, models, data sets, sinks and the rest.

A config names an object by a short name from a table, or as `package.module:Name`. The table holds the same form, so
that a family is imported when somebody asks for it.
"""

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.names import advice_for_object
from lockstep.errors import UsageError, did_you_mean


def load_object(name: str, where: str) -> Any:
    """Return what `package.module:Name` names.

    Args:
        where: the config key, for the message.

    Raises:
        UsageError: no such module, the module does not import, or it has no such name.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} does not name an object", where=where, fix="write package.module:Name")
    try:
        here: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"there is no module {error.name or module_name!r}, needed by {name}",
            where=where,
            fix=advice_for_object(name) or "set PYTHONPATH to the folder that holds it, or install it",
        ) from None
    except Exception as error:  # the user's own module, which may raise anything
        raise UsageError(
            f"the module {module_name} does not import", where=where, why=f"{type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(here, part):
            near = difflib.get_close_matches(part, [n for n in dir(here) if not n.startswith("_")], n=1)
            raise UsageError(f"{module_name} has no {attribute}", where=where, fix=f"write {near[0]}" if near else None)
        here = getattr(here, part)
    return here


@dataclass(frozen=True)
class Registry:
    """The names that ship for one kind of object.

    Attributes:
        kind: the noun for messages, as in `there is no strategy 'dpp'`.
        where: the config key.
        shipped: name → `package.module:Name`.
    """

    kind: str
    where: str
    shipped: Mapping[str, str]

    def load(self, name: str) -> Any:
        """Return the object called `name`: one that ships, or `package.module:Name`.

        Raises:
            UsageError: there is none, with the nearest name that ships.
        """
        self.require(name)
        return load_object(self.shipped.get(name, name), self.where)

    def require(self, name: str) -> None:
        """Check that `name` ships or has the form `package.module:Name`; nothing is imported.

        Raises:
            UsageError: neither.
        """
        if name not in self.shipped and ":" not in name:
            raise UsageError(
                f"there is no {self.kind} {name!r}{did_you_mean(name, self.shipped)}",
                where=self.where,
                fix=f"write {self.names()}",
            )

    def names(self) -> str:
        """Return the names that can be written, for messages and help."""
        return f"{', '.join(self.shipped)} or package.module:Name"
