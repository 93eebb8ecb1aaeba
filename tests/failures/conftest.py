"""The launches of tests/launch, and its four hosts."""

from tests.launch.conftest import four, launch  # noqa: F401
