"""Answers what a model asks of values that the meta device does not have, as far as there is a likely answer.

Models look at their masks: are all elements true (then there is no padding), is any (then something is special)? The
answers are those of the plain case: all are, none is. Any other question fails as it does without us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ANSWER = "_ds_tba_answer"
_OF_ALL = {"aten::all": True, "aten::any": False}


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For meta tensors inside.

    Attributes:
        given: how many.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            answer = getattr(args[0], _ANSWER, None)
            if answer is not None:
                self.given += 1
                return answer
        result = func(*args, **(kwargs or {}))
        if name in _OF_ALL and isinstance(result, torch.Tensor):
            setattr(result, _ANSWER, _OF_ALL[name])
        return result
