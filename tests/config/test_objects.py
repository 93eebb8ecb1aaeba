"""Objects from the user's own code."""

from pathlib import Path

import pytest

from lockstep.config import ObjectSpec, build_object
from lockstep.errors import UsageError
from lockstep.registry import load_object

CODE = """
class Box:
    class Lid:
        pass

    def __init__(self, *inside, colour="red"):
        self.inside, self.colour = inside, colour

def strict(a, b=1):
    raise TypeError("from within")

number = 3
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_objects.py").write_text(CODE)
    (tmp_path / "users_broken.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "users_failing.py").write_text("raise RuntimeError('no luck')")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("users")
def test_objects_are_built_with_their_arguments_inner_ones_first() -> None:
    inner = {"name": "users_objects:Box", "args": {"colour": "blue"}}
    spec = ObjectSpec(
        name="users_objects:Box", positional=[inner, [inner]], args={"colour": {"deep": inner}}
    )
    box = build_object(spec, "loss_fn")
    assert box.inside[0].colour == "blue"
    assert box.inside[1][0].colour == "blue"
    assert box.colour["deep"].colour == "blue"
    assert build_object(spec, "loss_fn", colour="green").colour == "green"
    assert load_object("users_objects:Box.Lid", "x").__name__ == "Lid"


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Box", ("no module 'no_such_module'", "PYTHONPATH")),
        ("users_broken:Box", ("no module 'a_module_that_is_not_there'",)),
        ("users_failing:Box", ("does not import", "RuntimeError: no luck")),
        ("users_objects:Bax", ("has no Bax", "write Box")),
        ("users_objects", ("does not name an object", "package.module:Name")),
    ],
)
def test_what_can_not_be_loaded_is_told_with_the_key(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        load_object(name, "model.name")
    for word in (*words, "model.name"):
        assert word in str(caught.value)


@pytest.mark.usefixtures("users")
def test_arguments_that_do_not_fit_are_the_users_mistake_errors_within_are_not() -> None:
    with pytest.raises(UsageError, match="takes no argument"):
        build_object(ObjectSpec(name="users_objects:strict", args={"c": 1}), "loss_fn")
    with pytest.raises(TypeError, match="from within"):
        build_object(ObjectSpec(name="users_objects:strict", args={"a": 1}), "loss_fn")
    with pytest.raises(UsageError, match="can't be called"):
        build_object(ObjectSpec(name="users_objects:number"), "loss_fn")
