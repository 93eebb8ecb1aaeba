"""Render configs in Forgather's template language.

Jinja2 renders them in its sandbox, and the result is read as YAML.

A file extends another with `-- extends 'trainers/fsdp.yaml'` (beside it, or shipped) and fills its
blocks: trainer_args (keys of any section by their last name, or sections), distributed_env (keys of
`distributed`), loss_fn and trainer_callbacks. Text outside of all blocks is merged over the result;
the later one of equal keys wins. A template can ask for any amount of memory and time, so it is
rendered in a child process with limits that the system enforces.
"""

import os
import pickle
import resource
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from lockstep.config.files import ResolvedFile, parent_file, read
from lockstep.config.flags import shallowest
from lockstep.config.keys import all_keys
from lockstep.config.prepass import PreparedTemplate, prepare, reindent, strip_marks
from lockstep.config.tree import Calc, Node, Origin, merge, parse
from lockstep.errors import UsageError

T = TypeVar("T")

SECONDS = 10  # of CPU time; rendering takes milliseconds
WALL_SECONDS = 120  # for a machine that is very busy
MEMORY_BYTES = 1 << 29  # in addition to those that the process has
RESULT_BYTES = 10_000_000
_NO_MEMORY = 3  # exit code


def render(file: ResolvedFile) -> Node:
    """Return the tree of a template and all files that it extends.

    Raises UsageError: the template or the YAML has a mistake; with file and line.
    """
    text, variables, files = within_limits(lambda: _render_chain(file), file.shown)
    plain, origins = strip_marks(text)

    def origin(line: int) -> Origin:
        index, number = origins[min(line, len(origins) - 1)]
        return Origin(files[index], number)

    return _expand(_with_variables(parse(plain, origin, overlay=True), variables))


def _render_chain(file: ResolvedFile) -> tuple[str, dict[str, int | float], list[str]]:
    """Return the rendered text with marks.

    The numbers that the template sets come with it, and the files that the marks refer to.
    """
    library = _TemplateFiles()
    chain = library.chain(file)
    _check_blocks(chain, library)
    variables: dict[str, Any] = {}
    from_string = library.environment.from_string
    texts = [
        _checked(
            library, lambda: _fill(library.environment.get_template(str(file.path)), variables)
        )
    ]
    for member in reversed(chain):
        outside = library.prepared[str(member.path)].outside
        if outside:
            texts.append(
                _checked(library, lambda text=outside: _fill(from_string(text), variables), member)
            )
    numbers = {name: value for name, value in variables.items() if type(value) in (int, float)}
    return "\n".join(texts), numbers, [member.shown for member in library.files]


def _fill(template: jinja2.Template, variables: dict[str, Any]) -> str:
    context = template.new_context()
    try:
        text = "".join(template.root_render_func(context))
    except Exception:
        template.environment.handle_exception()
    variables.update({name: context.vars[name] for name in context.exported_vars})
    return text


def _with_variables(node: Node, variables: Mapping[str, int | float]) -> Node:
    """Return a copy of a tree whose calculations know a template's variables."""
    if isinstance(node.value, dict):
        return replace(
            node,
            value={key: _with_variables(child, variables) for key, child in node.value.items()},
        )
    if isinstance(node.value, list):
        return replace(node, value=[_with_variables(child, variables) for child in node.value])
    return (
        replace(node, value=replace(node.value, variables=variables))
        if isinstance(node.value, Calc)
        else node
    )


class _Environment(SandboxedEnvironment):
    """A Jinja environment that finds templates beside the file, then among those that ship.

    It serves `extends` and `include`.

    Names of templates are absolute paths.
    """

    def __init__(self, library: "_TemplateFiles") -> None:
        super().__init__(
            loader=jinja2.FunctionLoader(library.source),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self.library = library
        self.filters["reindent"] = reindent

    def join_path(self, template: str, parent: str) -> str:
        child = self.library.by_path.get(parent) or self.library.files[0]
        base = parent_file(template, child, child.shown)
        self.library.add(base)
        return str(base.path)


class _TemplateFiles:
    """The template files that one rendering uses."""

    def __init__(self) -> None:
        self.files: list[ResolvedFile] = []
        self.by_path: dict[str, ResolvedFile] = {}
        self.prepared: dict[str, PreparedTemplate] = {}
        self.environment = _Environment(self)

    def add(self, file: ResolvedFile) -> PreparedTemplate:
        path = str(file.path)
        if path not in self.prepared:
            text = read(file)
            self.prepared[path] = prepare(text, len(self.files), file.shown)
            self.files.append(file)
            self.by_path[path] = file
        return self.prepared[path]

    def source(self, path: str) -> tuple[str, str, Any]:
        return self.prepared[path].source, path, lambda: True

    def chain(self, file: ResolvedFile) -> list[ResolvedFile]:
        """Return a template and those that it extends, one after the other; refuse a circle."""
        chain: list[ResolvedFile] = []
        following: ResolvedFile | None = file
        while following is not None:
            if following.path in [member.path for member in chain]:
                text = (
                    "`-- extends` goes round in a circle:"
                    f" {' → '.join(m.path.name for m in [*chain, following])}"
                )
                raise UsageError(text, where=file.shown, fix="take one `-- extends` out")
            chain.append(following)
            following = self._parent(following)
        return chain

    def _parent(self, file: ResolvedFile) -> ResolvedFile | None:
        """Return the template that a file extends; None if it extends none."""
        prepared = self.add(file)
        parsed = _checked(
            self, lambda: self.environment.parse(prepared.source, filename=str(file.path)), file
        )
        extends = parsed.find(nodes.Extends)
        if extends is None:
            return None
        where = f"{file.shown}:{extends.lineno}"
        if not isinstance(extends.template, nodes.Const):
            raise UsageError(
                "`extends` takes a quoted name",
                where=where,
                fix="write -- extends 'trainers/fsdp.yaml'",
            )
        return parent_file(str(extends.template.value), file, where)


def _check_blocks(chain: list[ResolvedFile], library: _TemplateFiles) -> None:
    """Refuse a block that no parent has, which Jinja would drop silently."""
    known: list[str] = []
    for member in reversed(chain):
        blocks = library.prepared[str(member.path)].blocks
        for block in blocks:
            if block.expands and block.name not in known:
                fix = (
                    f"its blocks are {', '.join(known)}"
                    if known
                    else "it is plain YAML: write `extends: NAME`"
                )
                text = f"the parent has no block {block.name}"
                raise UsageError(text, where=f"{member.shown}:{block.start + 1}", fix=fix)
        known += [block.name for block in blocks if block.name not in known]


def _checked(library: _TemplateFiles, work: Any, file: ResolvedFile | None = None) -> Any:
    """Return the result of `work()`, with Jinja's errors turned into UsageErrors."""
    try:
        return work()
    except jinja2.TemplateSyntaxError as error:
        path = error.filename or error.name
        shown = (
            library.by_path.get(str(Path(path)) if path else "") or file or library.files[0]
        ).shown
        fix = "mend the statement, or write {% raw %} around text that is not a template"
        text = f"the template can't be read: {error.message}"
        raise UsageError(text, where=f"{shown}:{error.lineno}", fix=fix) from None
    except (
        jinja2.TemplateError,
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        RecursionError,
    ) as error:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename in library.by_path
        ]
        where = (
            f"{library.by_path[frames[-1].filename].shown}:{frames[-1].lineno}" if frames else None
        )
        shown = where or (file or library.files[0]).shown
        fix = "define what it uses with `-- set NAME = VALUE`, or mend the expression"
        raise UsageError(
            f"the template can't be filled in: {error}", where=shown, fix=fix
        ) from None


def _expand(tree: Node) -> Node:
    """Move the template language's blocks to the sections of the config that they stand for."""
    if not isinstance(tree.value, dict):
        return tree
    names = ("trainer_args", "distributed_env", "trainer_callbacks")
    blocks = {name: _unwrapped(name, tree.value[name]) for name in names if name in tree.value}
    rest = Node({key: node for key, node in tree.value.items() if key not in names}, tree.origin)
    if "loss_fn" in rest.value:
        rest.value["loss_fn"] = _unwrapped("loss_fn", rest.value["loss_fn"])
    for name, node in blocks.items():
        if node.value is None:
            continue
        if name == "trainer_args":
            rest = merge(rest, _trainer_args(node))
        elif name == "distributed_env":
            rest = merge(rest, _distributed_env(node))
        else:
            rest = merge(
                rest, Node({"monitor": Node({"callbacks": node}, node.origin)}, node.origin)
            )
    return rest


def _unwrapped(name: str, node: Node) -> Node:
    """Return the content of a block whose text repeats its name.

    An example is `trainer_callbacks: &trainer_callbacks !list:@…`.
    """
    if isinstance(node.value, dict) and list(node.value) == [name]:
        inner: Node = node.value[name]
        return inner
    return node


def _trainer_args(node: Node) -> Node:
    """Return the tree in which each key of the block `trainer_args` is in its section.

    Raises UsageError.
    """
    if not isinstance(node.value, dict):
        fix = "write lines `key: value` in it"
        raise UsageError(
            "the block trainer_args holds keys and values", where=str(node.origin), fix=fix
        )
    placed = Node({}, node.origin)
    for name, child in node.value.items():
        shallow = shallowest(info.key for info in all_keys().values() if info.name == name)
        if len(shallow) > 1:
            fix = f"write the section too: {shallow[0].replace('.', ': {', 1)}: …}}"
            raise UsageError(
                f"{name} could be {' or '.join(shallow)}", where=str(child.origin), fix=fix
            )
        # The schema refuses keys that stay in `trainer_args`, with advice.
        path = shallow[0].split(".") if shallow else ["trainer_args", name]
        for part in reversed(path):
            child = Node({part: child}, child.origin)
        placed = merge(placed, child)
    return placed


def _distributed_env(node: Node) -> Node:
    inside = node
    if isinstance(node.value, dict) and "name" in node.value:
        name = str(node.value["name"].value)
        if name.rpartition(":")[2] != "DistributedEnvironment":
            fix = "write keys of `distributed`: backend, init_method, timeout_seconds …"
            raise UsageError(
                f"the block distributed_env can't be {name}", where=str(node.origin), fix=fix
            )
        inside = node.value.get("args", Node({}, node.origin))
    return Node({"distributed": inside}, node.origin)


def within_limits(work: Callable[[], T], what: str) -> T:
    """Return the result of `work()`, computed in a child process; result and errors must pickle.

    `work` uses neither devices nor other threads. Raises UsageError: from `work`, or because a
    limit was reached.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _run_in_child(work, writes)
    os.close(writes)
    data = b""
    status = signal.SIGKILL.value
    try:
        data, ended = _read_all(reads)
        if ended:  # not killed: its exit status shows why it ended
            _, status = os.waitpid(child, 0)
            child = 0
    finally:
        os.close(reads)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not data:
        of = f"time (more than {SECONDS} s)" if os.WIFSIGNALED(status) else "memory"
        raise _too_much(what, of)
    if len(data) > RESULT_BYTES:
        raise _too_much(what, f"text (more than {RESULT_BYTES // 10**6} MB)")
    ended_well, value = pickle.loads(data)  # our own child wrote it
    if not ended_well:
        raise value
    return value  # type: ignore[no-any-return]


def _too_much(what: str, of: str) -> UsageError:
    fix = "mend its loops (`-- for`), repetitions (`*`) and macros that call themselves"
    why = "a config is some pages of text: a loop or an expression in it grows without end"
    return UsageError(f"the template takes too much {of}", where=what, why=why, fix=fix)


def _run_in_child(work: Callable[[], object], writes: int) -> NoReturn:
    """Do the work within limits of memory and time, and exit.

    The pickled result goes into the pipe.
    """
    code = _NO_MEMORY
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        for limit, value in (
            (resource.RLIMIT_AS, used + MEMORY_BYTES),
            (resource.RLIMIT_CPU, SECONDS),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
        with os.fdopen(writes, "wb") as pipe:
            try:
                result = pickle.dumps((True, work()))
            except MemoryError:
                raise
            except Exception as error:
                result = pickle.dumps((False, error))
            pipe.write(result[: RESULT_BYTES + 1])
        code = 0
    finally:
        os._exit(code)


def _read_all(reads: int) -> tuple[bytes, bool]:
    """Return the output of the child, and whether it has ended in time."""
    deadline = time.monotonic() + WALL_SECONDS
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(reads, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(reads, 1 << 20)
            if not part:
                return b"".join(parts), True
            parts.append(part)
    return b"", False
