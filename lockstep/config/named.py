"""The type of a key whose value is a name from a registry, or `package.module:Name`."""

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lockstep.registry import Registry


class Named:
    """Marks a key of type `str`: `Annotated[str, Named(STRATEGIES)]`.

    Args:
        registry: the names that ship.
        also: further words that may stand there (`auto`).
    """

    def __init__(self, registry: Registry, *also: str) -> None:
        self.choices = (*also, *registry.shipped)

    def takes(self) -> str:
        """Return what can be written, for messages and tables."""
        return f"one of {', '.join(self.choices)}, or package.module:Name"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(self.choices)}, {"type": "string", "pattern": r"^[^:]+:[^:]+$"}]}

    def _checked(self, name: str) -> str:
        if name not in self.choices and ":" not in name:
            raise PydanticCustomError("unknown_name", "no such name")
        return name
