"""Every private name of PyTorch and DeepSpeed that the package touches: where it lives, and what is lost without it.

A new PyTorch or DeepSpeed may take any of them away without a word. ``make canary`` looks for all of them in the newest
pre-releases, and here a name in the package that has no line fails, and so does a line without a name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import nn

PACKAGE = Path(__file__).parents[1] / "ds_tba"
ALL = "all: it does not import, or no forward runs"
AGAIN = "rematerialization: the report says among refused_sites that this PyTorch does not show what its graph holds"
RECOMPUTE = "recomputing: recompute.py"
SELECTIVE = "what selective checkpoints save: it stays in memory; PyTorch warns, or raises in later versions"
COMPILED = "torch.compile would compile our hooks: time"
UPDATE = "the interleaved optimizer update: update/zero3.py refuses what it does not know"
ZERO3 = "ZeRO-3: gathered parameters would look like activations"
PLAN = "`ds_tba plan`"


class Name(NamedTuple):
    """A private name."""

    spelling: str  # as the package has it: a path, or with a dot the attribute of an object, or its beginning
    lost: str  # without it
    # It lives, if that is not the spelling; or the module whose source gives an object that attribute later on.
    where: str = ""
    since: str = ""  # the first PyTorch that has it, if that is newer than the oldest that is supported


ZERO_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
DEEPSPEED_ENGINE = "deepspeed.runtime.engine"


def named(lost: str, *spellings: str, of: str = "", since: str = "") -> Iterator[Name]:
    """Names without which the same is lost; attributes of ``of``, if that is given."""
    return (Name(one, lost, f"{of}{one}" if of else "", since) for one in spellings)


NAMES = [
    # PyTorch: tensors and their storages
    *named(ALL, "._base", "._version", "._use_count", "._is_zerotensor", of="torch.Tensor"),
    *named("the memory of sparse tensors: it would count as 0 bytes", "._indices", of="torch.Tensor"),
    *(Name(f"._{what}", "the memory of jagged tensors: a part would not count",
           "source of torch.nested._internal.nested_tensor") for what in ("offsets", "lengths")),
    *named("the memory of CUDA graphs: it would be moved in vain", "._cdata", of="storage"),
    Name("torch._C._host_emptyCache", "pinned memory of closed engines: it stays pinned",
         "source of torch.cuda.graphs"),
    *named(ALL, "torch._C._storage_Use_Count", "torch._C._functorch.is_functorch_wrapped_tensor",
           "torch._C._dispatch_keys", "torch._C._dispatch_tls_is_dispatch_key_excluded",
           "torch._C._SetExcludeDispatchKeyGuard", "torch._C.DispatchKey.ADInplaceOrView"),
    # PyTorch: modules and optimizers
    *named(ALL, "._modules", "._parameters", "._buffers", of="module"),
    *named(ALL, "torch.nn.Module._wrapped_call_impl"),
    *named(UPDATE, "._optimizer_step_pre_hooks", "._optimizer_step_post_hooks", of="optimizer"),
    *named(UPDATE, "torch.optim.optimizer._global_optimizer_pre_hooks",
           "torch.optim.optimizer._global_optimizer_post_hooks"),
    # PyTorch: the graph
    *named(AGAIN, ".unpack_hook", ".data", of="saved"),
    *named(AGAIN, "._sequence_nr", "._input_metadata", of="node"),
    *named(ALL, "._raw_saved_tensors", of="own"),
    *named(AGAIN, "._forward_cls", of="own"),
    *named(AGAIN, "._raw_saved_result2", of="norm"),
    Name("._raw_saved_", AGAIN, "node._raw_saved_self"),
    Name("._saved_", AGAIN, "norm._saved_normalized_shape"),
    *named(ALL, "torch.autograd._get_sequence_nr", "torch._C._get_mkldnn_enabled", "torch._C._current_graph_task_id"),
    *named("RMS norms made again", "torch.ops.aten._fused_rms_norm"),
    *named("plans: no backward of a recording would be known to be whole",
           "torch.autograd.Variable._execution_engine.queue_callback"),
    *named("where memory ran out: it says forward", "._engine_run_backward", of="torch.autograd.graph"),
    # PyTorch: modes
    *named(AGAIN, "torch._C.DisableTorchFunction"),
    *named(ALL, "torch._C.DisableTorchFunctionSubclass", "torch._C._len_torch_dispatch_stack",
           "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
           "torch.utils._python_dispatch._disable_current_modes", "torch.utils._pytree.tree_flatten",
           "torch.utils._pytree.tree_unflatten", "torch.utils._pytree.tree_leaves"),
    *named(PLAN, "torch.utils._python_dispatch.TorchDispatchMode"),
    *named("its refusal around forward", "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled"),
    # PyTorch: checkpoints
    *named(ALL, "torch._C._autograd._top_saved_tensors_default_hooks"),
    *named("set_checkpoint_early_stop of a user around a recomputed block", "._enable_checkpoint_early_stop",
           of="torch.utils.checkpoint"),
    *named("parameters that a checkpoint in backward wants as themselves", "._CheckpointFrame",
           of="torch.utils.checkpoint"),
    *named(SELECTIVE, "._checkpoint_without_reentrant_generator_impl", "._current_user_saved_tensors_hooks",
           of="torch.utils.checkpoint", since="2.14"),
    Name("._checkpoint_internal", SELECTIVE, "source of torch.utils.checkpoint", "2.14"),
    Name("._user_hooks", SELECTIVE, "source of torch.utils.checkpoint", "2.14"),
    # PyTorch: the compiler
    *named(ALL, "torch._C._dynamo.eval_frame.set_eval_frame"),
    Name("torch._dynamo.eval_frame", COMPILED, "torch._dynamo.eval_frame.skip_code"),
    Name("torch._dynamo.utils", "whether a step compiled something", "torch._dynamo.utils.compilation_time_metrics"),
    *named("compiled code: nothing of it would be moved", "torch._functorch._aot_autograd"),
    Name("torch._inductor.cudagraph_trees", "the memory of CUDA graphs: it would be moved in vain",
         "torch._inductor.cudagraph_trees.get_manager"),
    # PyTorch: operators that `ds_tba plan` knows
    *named(PLAN, "._schema", of="torch.ops.aten.mm.default"),
    *named(PLAN, *(f"._scaled_dot_product_{kind}"
                   for kind in ("attention_math", "cudnn_attention", "efficient_attention")), of="torch.ops.aten"),
    *named(PLAN, "torch.library._scoped_library"),
    *named("several ranks", "torch.distributed.distributed_c10d._get_default_store"),
    # DeepSpeed
    Name("._config", ALL, f"source of {DEEPSPEED_ENGINE}"),
    Name("._param_dict", ALL, "source of deepspeed.runtime.config"),
    *named("a block in a wrong place: DeepSpeed's own message", "._initialize_params",
           of="deepspeed.runtime.config.DeepSpeedConfig"),
    Name("._is_compiled_autograd_enabled", "the refusal of compiled autograd", f"source of {DEEPSPEED_ENGINE}"),
    *named(UPDATE, "._zero3_consolidated_16bit_state_dict", of=f"{DEEPSPEED_ENGINE}.DeepSpeedEngine"),
    *named(UPDATE, "._optimizer_step", "._prepare_sub_group", "._release_sub_group",
           "._reassign_or_swap_out_partitioned_parameters", "._unflatten_partitioned_parameters", of=ZERO_3),
    *(Name(f".ds_{what}", ZERO3, f"source of {PARAMETERS}")
      for what in ("id", "shape", "tensor", "active_sub_modules")),
]  # fmt: skip

# Not somebody else's: of named tuples and Python, and of classes of this package from another file.
OURS = {"._asdict", "._replace", "sys._getframe", "._close", "._destroy", "._run_again", "._values"}
# Beginnings and ends of names.
PARTS = {"._back", "._backward", "._for_cpu", "._bytes", "._Made"}
# A search cannot tell them from other attributes and texts.
UNSEEN = {".unpack_hook", ".data", "._engine_run_backward"}
PRIVATE = re.compile(r"_(?!ds_tba)[A-Za-z]\w*")
IN_TEXT = re.compile(r"_(?!ds_tba)[A-Za-z]\w*|ds_(?!tba|config)\w+|torch(\.\w+)*\._\w+(\.\w+)*")
ASKS = {"getattr", "hasattr", "setattr", "attrgetter", "_of_node"}


@cache
def found() -> dict[str, list[str]]:
    """The private names in the package, with the files that have them."""
    names: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in sorted(set(names_in(ast.parse(path.read_text()))) - OURS - PARTS):
            names.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return names


def names_in(tree: ast.Module) -> Iterator[str]:
    imported = dict(imports(tree))
    yield from (path for path in imported.values() if is_private(path))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from of_attribute(node, imported)
        elif isinstance(node, ast.Call) and called(node) in ASKS:
            yield from texts(*node.args)
    yield from texts(*(one.value for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign) and one.value))
    yield from (one for one in texts(tree) if one.startswith("torch."))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.asname or one.name.split(".")[0], one.name.split(".")[0]) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("ds_tba", "__")):
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


def of_attribute(node: ast.Attribute, imported: dict[str, str]) -> Iterator[str]:
    parts: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        parts.insert(0, value.attr)
        value = value.value
    root = imported.get(value.id) if isinstance(value, ast.Name) else None
    if root is not None and root.partition(".")[0] in ("torch", "sys"):
        path = ".".join([root, *(one for one in parts if not one.startswith("__"))])
        yield from (path,) if is_private(path) else ()
        return
    is_own = isinstance(value, ast.Name) and value.id in ("self", "cls")
    yield from (f".{one}" for one in parts[is_own:] if PRIVATE.fullmatch(one))


def is_private(path: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in path.split("."))


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def texts(*nodes: ast.AST) -> Iterator[str]:
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_TEXT.fullmatch(node.value):
            yield node.value if node.value.startswith("torch.") else f".{node.value}"


def test_each_name_has_a_line_and_each_line_a_name() -> None:
    spelled = [name.spelling for name in NAMES]
    assert len(set(spelled)) == len(spelled)
    assert {name: found()[name] for name in sorted(found().keys() - set(spelled))} == {}, "a line for each in NAMES"
    assert set(spelled) - found().keys() == UNSEEN, "no file has these any more"


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@cache
def samples() -> dict[str, Any]:
    """Objects whose classes do not have the attributes that they get."""
    x = torch.ones(4, requires_grad=True)
    product = x * x
    return {
        "module": nn.Linear(1, 1), "optimizer": torch.optim.SGD([x]), "node": product.grad_fn,
        "saved": product.grad_fn._raw_saved_self, "norm": nn.functional.layer_norm(product, (4,)).grad_fn,
        "own": type(Own.apply(x).grad_fn), "storage": x.untyped_storage(),
    }  # fmt: skip


def resolved(path: str) -> Any:
    """An object by its path."""
    first, *rest = path.split(".")
    value = samples().get(first)
    if value is None:
        value = importlib.import_module(first)
    for at, name in enumerate(rest, 1):
        module = ".".join([first, *rest[:at]])
        if inspect.ismodule(value) and not hasattr(value, name):
            value = importlib.import_module(module)
        else:
            value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", NAMES, ids=[name.spelling for name in NAMES])
def test_it_is_there(name: Name) -> None:
    if name.since and Version(torch.__version__).release < Version(name.since).release:
        pytest.skip(f"since PyTorch {name.since}; without: {name.lost}")
    if name.where.startswith("source of "):
        module = importlib.import_module(name.where.removeprefix("source of "))
        there = re.search(rf"\b{name.spelling.lstrip('.')}\b", inspect.getsource(module)) is not None
        assert there, f"without it is lost: {name.lost}"
        return
    try:
        resolved(name.where or name.spelling)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{error}; without it is lost: {name.lost}")
