"""What Lockstep uses of torch that torch does not promise to keep.

``pyproject.toml`` gives torch no upper bound. With a version that lacks one of these, this is the
test that says so, by name; and code that reaches for another must add it here. Keras's private
parts, in files that are named after Keras, are not counted.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import transformers
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.hooks import RemovableHandle

import lockstep

PACKAGE = Path(lockstep.__file__).parent

FUNCTIONS = (
    "Tensor._make_wrapper_subclass",
    "_C.DisableTorchFunctionSubclass",
    "_C.TensorBase",
    "_C._are_functorch_transforms_active",
    "_C._autograd._profiler_enabled",
    "_C._current_graph_task_id",
    "_C._get_fp32_precision_getter",
    "_C._get_sdp_priority_order",
    "_C._len_torch_function_stack",
    "_C._set_fp32_precision_setter",
    "_C._set_sdp_priority_order",
    "_C._will_engine_execute_node",
    "_foreach_add_",
    "_foreach_clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_foreach_mul",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_sub_",
    "_fused_adam_",
    "_fused_adamw_",
    "_library.custom_ops.CustomOpDef",
    "_ops.HigherOrderOperator",
    "_ops.OpOverload",
    "_ops.OpOverloadPacket",
    "autograd.Variable._execution_engine.run_backward",
    "autograd._engine_run_backward",
    "utils.checkpoint._CheckpointFrame.save_inputs",
    "nn.modules.batchnorm._BatchNorm",
    "nn.modules.dropout._DropoutNd",
    "ops.aten._scaled_dot_product_attention_math",
    "ops.mkldnn._linear_pointwise",
    "utils._python_dispatch.TorchDispatchMode",
)

OBJECTS = (
    "_VF",
    "_library.custom_ops.OPDEFS",
    "compiler._is_compiling_flag",
    "distributed.tensor._utils.compute_local_shape_and_global_offset",
    "optim.optimizer._global_optimizer_post_hooks",
    "optim.optimizer._global_optimizer_pre_hooks",
)

# Attributes of objects, which do not follow ``torch.`` in the code.
ATTRIBUTES = {
    "module": (
        "_apply",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_call_impl",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_modules",
        "_parameters",
    ),
    "attention": ("_reset_parameters",),
    "recurrent layer": ("_flat_weight_refs", "_flat_weights"),
    "functional": ("_verify_batch_size",),
    "parameter": ("_backward_hooks", "_base", "_post_accumulate_grad_hooks", "_version"),
    "sparse tensor": ("_nnz",),
    "storage": ("_cdata",),
    "operator": ("_overloadname", "_overloadpacket", "_schema"),
    "operator packet": ("_qualified_op_name",),
    "custom operator": ("_backend_fns", "_namespace", "_tags", "_vmap_fn"),
    "optimizer": ("_opt_called", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "scheduled step": ("_wrapped_by_lr_sched",),
    "loader": ("_shutdown_workers",),
    "forward_ad": ("_current_level",),
    "parametrize": ("_inject_new_class", "_inject_property"),
    "process group": ("_Options",),
    "transformer": ("_can_record_outputs",),
    "hook": ("next_id",),
    "metric": ("_computed", "_defaults", "_update_count"),
}

# Of Python itself.
OF_PYTHON = {
    "_ActionsContainer",
    "_SubParsersAction",
    "_actions",
    "_args_from_interpreter_flags",
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_lru_cache_wrapper",
    "_option_string_actions",
    "_replace",
}

OF_CLOUDPICKLE = {"_code_reduce"}


@cache
def holders() -> dict[str, Any]:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return {
        "module": layer,
        "attention": nn.MultiheadAttention(1, 1),
        "recurrent layer": nn.LSTM(1, 1),
        "functional": nn.functional,
        "parameter": layer.weight,
        "sparse tensor": layer.weight.detach().to_sparse(),
        "storage": layer.weight.untyped_storage(),
        "operator": torch.ops.aten.add.Tensor,
        "operator packet": torch.ops.aten.add,
        "custom operator": torch.library.custom_op(
            "lockstep_tests::clone", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
        ),
        "optimizer": optimizer,
        "scheduled step": optimizer.step,
        "loader": _MultiProcessingDataLoaderIter,
        "forward_ad": forward_ad,
        "parametrize": parametrize,
        "process group": torch.distributed.ProcessGroupGloo,
        "transformer": transformers.PreTrainedModel,
        "hook": RemovableHandle,
        "metric": torchmetrics.MeanMetric(),
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_has(name: str) -> None:
    assert callable(attrgetter(name)(torch))


@pytest.mark.parametrize("name", OBJECTS)
def test_torch_holds(name: str) -> None:
    module, _, own_name = f"torch.{name}".rpartition(".")
    assert hasattr(import_module(module), own_name)


@pytest.mark.parametrize(
    ("holder", "name"), [(holder, name) for holder, names in ATTRIBUTES.items() for name in names]
)
def test_an_object_has(holder: str, name: str) -> None:
    assert hasattr(holders()[holder], name)


@pytest.mark.thorough
def test_no_others_are_used() -> None:
    known = {f"torch.{name}" for name in (*FUNCTIONS, *OBJECTS)} | OF_PYTHON | OF_CLOUDPICKLE
    known |= {name for names in ATTRIBUTES.values() for name in names}
    used: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        nodes = list(ast.walk(ast.parse(path.read_text())))
        known.update(_defined(nodes))
        used |= {
            f"{where}:{line}: {name}": name
            for line, name in _used(nodes, is_of_keras="keras" in where)
        }
    assert not {place for place, name in used.items() if name not in known}


def test_all_that_is_named_is_used() -> None:
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    # The hooks of optimizers are left out by how their names begin and end.
    named = {name.rpartition(".")[2] for name in FUNCTIONS}.union(*ATTRIBUTES.values())
    assert named <= words


def _defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Names that Lockstep gives."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used(nodes: Sequence[ast.AST], *, is_of_keras: bool) -> Iterator[tuple[int, str]]:
    """Private names that code reaches for: with their path if that begins with ``torch``."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = _dotted(node)
            if path.startswith("torch."):
                if _is_private(path) and not _is_private(path.rpartition(".")[0]):
                    yield node.lineno, _whole(nodes, node)
            elif _is_private(node.attr) and not is_of_keras:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            paths = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((node.lineno, path) for path in paths if _is_private(path))


def _whole(nodes: Sequence[ast.AST], part: ast.Attribute) -> str:
    """The longest path that begins with this one."""
    longer = (node for node in nodes if isinstance(node, ast.Attribute) and node.value is part)
    following = next(longer, None)
    return _dotted(part) if following is None else _whole(nodes, following)


def _dotted(node: ast.expr) -> str:
    """``a.b.c``; begins with a dot where what has the attributes is no name."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(path: str) -> bool:
    return any(re.match(r"_(?!_)", word) for word in path.split("."))
