"""The ends of objects: finalizers run wherever the garbage collector does, so that none may wait for anything."""

from __future__ import annotations

import ast
import gc
import sys
from types import FrameType

from support import runs

from ds_tba.core.accounts import Ends, Notice


class Watched:
    pass


class Gone(Notice):
    __slots__ = ("number",)

    number: int


def test_an_object_ends_without_a_line_of_ours() -> None:
    """A line is where a signal handler may run; what it raises in a finalizer is reported and lost."""
    acted, lines = list[int](), list[str]()
    ends = Ends(lambda gone: acted.append(gone.number))
    one, other = Watched(), Watched()
    other.itself = other  # type: ignore[attr-defined]
    for number, watched in enumerate((one, other), 1):
        notice = Gone(watched, ends.tell)
        notice.number = number
        ends.watch(notice)

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        lines.append(f"{event} {frame.f_code.co_name}")

    callbacks, gc.callbacks[:] = gc.callbacks[:], []  # those of the tests' libraries
    gc.collect()
    sys.setprofile(trace)
    try:
        del one, other, watched
        gc.collect()
    finally:
        sys.setprofile(None)
        gc.callbacks[:] = callbacks
    assert not [line for line in lines if not line.startswith("c_")]
    assert acted == []
    ends.act()
    assert acted == [1, 2] and not ends.left


def test_the_end_of_an_object_that_an_interrupt_kept_from_being_watched_is_nobodys() -> None:
    acted = list[Notice]()
    ends, one = Ends(acted.append), Watched()
    notice = Gone(one, ends.tell)  # held by the traceback
    del one
    assert [*ends.left] == [notice]
    ends.act()
    assert not acted and not ends.left


_IN_PYTHON = ("__del__", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet")
_NEVER = ("core", "device", "explain", "plan", "recompute", "remat", "storage")


def runs_python(node: ast.AST) -> bool:
    """Return whether this is a weak reference that calls back, or a finalizer."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name == "weakref.finalize" or (name == "weakref.ref" and len(node.args) > 1)  # type: ignore[attr-defined]


def test_no_class_has_a_finalizer_in_python() -> None:
    """See [Note: No Python in finalizers]: whoever adds one loses what a handler raises in it.

    Nor may a graph that is garbage wait for a lock wherever the collector runs, such as in a lane that has it.
    """
    package = runs.ROOT / "ds_tba"
    assert not [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "name", getattr(node, "attr", "")) in _IN_PYTHON
        or (path.relative_to(package).parts[0] in _NEVER and runs_python(node))
    ]
