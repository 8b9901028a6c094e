"""Plans as tables for people."""

from collections.abc import Iterator
from html import escape

from rich.table import Table
from rich.text import Text

from lockstep.formatting import format_bytes, format_count, format_time, plain_text
from lockstep.plan.averaging import AveragedUpdate
from lockstep.plan.decision import (
    Decision,
    LayerPlacement,
    LocalUpdate,
    Pipeline,
    ServedUpdate,
    Stage,
)
from lockstep.plan.mesh import division_axis
from lockstep.plan.sharding import Sharding

_MOST_LAYERS = 40


def plan_table(plan: Decision) -> str:
    """The Plan as text: a heading, its layers, its notes."""
    notes = [Text(f"Note: {note}") for note in plan.notes]
    return plain_text(Text(_heading(plan)), *_tables(plan), *notes)


def plan_html(plan: Decision) -> str:
    """The same for notebooks."""
    heading = "<br>".join(map(escape, _heading(plan).splitlines()))
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in plan.notes)
    return f"<p>{heading}</p>{''.join(map(_html, _tables(plan)))}{notes}"


def _html(table: Table) -> str:
    heads = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    aligned = [f'<td style="text-align: {column.justify}">' for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [
        "".join(
            f"{begin}{escape(str(cell))}</td>" for begin, cell in zip(aligned, row, strict=True)
        )
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _tables(plan: Decision) -> Iterator[Table]:
    if plan.pipeline is not None:
        yield _stages(plan, plan.pipeline)
    yield _layers(plan)


def _heading(plan: Decision) -> str:
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh) or "one device"
    threads = ""
    if plan.threads_per_device is not None:
        word = "thread" if plan.threads_per_device == 1 else "threads"
        threads = f" ({plan.threads_per_device} {word} each)"
    images = ", images channels last" if plan.channels_last else ""
    images += ", compiled" if plan.compiled else ""
    return (
        f"Plan: {plan.strategy}, {mesh}, {plan.precision}{images}\n"
        f"Devices: {_devices(plan)}{threads}\n"
        f"{_work(plan)}\n"
        f"Parameters: {format_count(plan.num_parameters())}{_ties(plan)}"
        f"{_sharding(plan)}{_tensor(plan)}"
    )


def _tensor(plan: Decision) -> str:
    """The shards of layers; a line of its own."""
    if plan.tensor is None:
        return ""
    if plan.tensor.by_time is not None:
        return f"\nSequences in {plan.tensor.num_shards} parts"
    count, of_all = len(plan.tensor.parameters), len(plan.tensor.parameters + plan.tensor.whole)
    return (
        f"\nShards of each divided layer: {plan.tensor.num_shards}; {count} of {of_all} Parameters"
    )


def _sharding(plan: Decision) -> str:
    """What is divided over the ranks; a line of its own."""
    if plan.sharding is None:
        return ""
    parts = {
        "slots": "the optimizer's slots",
        "gradients": "gradients and slots",
        "parameters": "parameters, gradients and slots",
    }
    units = f", in {len(plan.sharding.units)} units" if plan.sharding.units else ""
    shared = "; all have one copy of the parameters" if plan.sharding.shares_parameters else ""
    if plan.sharding.divides_parameters and len(plan.ranks_along("data", 0)) > 1:
        size = len(plan.ranks_along(division_axis(plan.mesh), 0))
        shared = f", parameters within groups of {size} ranks"
    place = _place(plan.sharding)
    if plan.num_ranks == 1:
        return f"\nSharding: on one device{place}"
    units += " that are gathered once in each step" if _gathers_once(plan.sharding) else ""
    divided = f"{parts[plan.sharding.level]}{units}"
    return f"\nSharding: each rank keeps its part of {divided}{shared}{place}"


def _gathers_once(sharding: Sharding) -> bool:
    return bool(sharding.units) and sharding.divides_parameters and sharding.is_small


def _place(sharding: Sharding) -> str:
    """What does not lie on the devices, and where."""
    if sharding.streams_parameters:
        return f"; all in host memory, from where {len(sharding.units)} units come to each device"
    if sharding.directory is not None:
        return f"; slots in a file in {sharding.directory}"
    return "; slots in host memory" if sharding.offload else ""


def _ties(plan: Decision) -> str:
    return ", tied ones counted once" if plan.ties else ""


def _devices(plan: Decision) -> str:
    """The ranks' devices, by their roles, or host by host where there are several."""
    if plan.num_servers:
        workers = plan.devices[: -plan.num_servers]
        servers = plan.devices[-plan.num_servers :]
        return f"workers on {', '.join(workers)}; servers on {', '.join(servers)}"
    if not plan.hosts:
        return ", ".join(plan.devices)
    return "; ".join(
        f"host {host}: " + ", ".join(plan.devices[rank] for rank in plan.ranks_of_host(host))
        for host in range(plan.num_hosts)
    )


def _work(plan: Decision) -> str:
    """How a batch is divided, and how parameters are updated."""
    apart = f"each replica's own, {plan.update}"
    if plan.pipeline is not None:
        is_apart = isinstance(plan.update, AveragedUpdate)
        return (
            f"Microbatches of each batch: {plan.num_shares}, schedule {plan.pipeline.schedule}; "
            + (f"parameters {apart}" if is_apart else "each stage updates its parameters")
            + _over(plan)
        )
    update = (
        "updated where they are"
        if isinstance(plan.update, LocalUpdate)
        else apart
        if isinstance(plan.update, AveragedUpdate)
        else f"in shared memory, {plan.update}"
        if isinstance(plan.update, ServedUpdate)
        else "in host memory, of which each rank updates its slice"
        if plan.sharding is not None and plan.sharding.streams_parameters
        else "in shared memory, each rank updates its slice"
        if plan.engine.shares_memory
        else f"in shared memory, each rank updates its slice; gradients over {plan.engine.name}"
        if plan.sharding is not None and plan.sharding.shares_parameters
        else f"each rank's own, which updates its slice{_over(plan)}"
    )
    together = ", those of a rank together" if plan.interleaved else ""
    return f"Shares of each batch: {plan.num_shares}{together}; parameters {update}"


def _over(plan: Decision) -> str:
    """The engine's name, if ranks share no memory."""
    return "" if plan.engine.shares_memory else f", over {plan.engine.name}"


def _stages(plan: Decision, pipeline: Pipeline) -> Table:
    table = Table("stage", "ranks", "first layer", box=None, pad_edge=False)
    for heading in ("layers", "parameters", "forward", "backward", "activations", "sends"):
        table.add_column(heading, justify="right")
    for number, stage in enumerate(pipeline.stages):
        layers = [layer for layer in plan.layers if layer.stage == number]
        table.add_row(
            str(number),
            _ranks(stage, plan.tensor_degree),
            Text(layers[0].name or "(model)") if layers else "",
            str(len(layers)),
            format_count(plan.num_parameters(number)),
            *_predicted(stage),
        )
    return table


def _ranks(stage: Stage, degree: int) -> str:
    """Those that hold a stage; those that divide its layers together as ``0+1``."""
    together = (stage.ranks[first : first + degree] for first in range(0, len(stage.ranks), degree))
    return ", ".join("+".join(map(str, ranks)) for ranks in together)


def _predicted(stage: Stage) -> tuple[str, ...]:
    """A stage's predicted times and sizes for one microbatch."""
    if stage.predicted is None:
        return ()
    kept = "again" if stage.recompute else format_bytes(stage.predicted.activation_bytes)
    return (
        format_time(stage.predicted.forward_seconds),
        format_time(stage.predicted.backward_seconds),
        kept,
        format_bytes(stage.predicted.sent_bytes),
    )


def _layers(plan: Decision) -> Table:
    table = Table("layer", "kind", box=None, pad_edge=False)
    table.add_column("parameters", justify="right")
    table.add_column("stage", justify="right")
    shows_rows = any(layer.row_limit for layer in plan.layers)
    if shows_rows:
        table.add_column("exchange")
    sharding = plan.sharding
    if sharding is not None and sharding.units:
        table.add_column("unit")
    if plan.tensor is not None:
        table.add_column("divided by")
    for layer in plan.layers[:_MOST_LAYERS]:
        table.add_row(
            Text(layer.name or "(model)"),
            Text(layer.kind),
            format_count(layer.num_parameters),
            str(layer.stage),
            *([_exchange(layer)] if shows_rows else []),
            *([Text(sharding.unit_of(layer.name))] if sharding and sharding.units else []),
            *([Text(plan.tensor.of_layer(layer.name))] if plan.tensor else []),
        )
    hidden = len(plan.layers) - _MOST_LAYERS
    if hidden > 0:
        rest = sum(layer.num_parameters for layer in plan.layers[_MOST_LAYERS:])
        rest -= sum(tie.num_parameters for tie in plan.ties if tie.second >= _MOST_LAYERS)
        table.add_row(f"and {hidden} more layers", "", format_count(rest), "")
    return table


def _exchange(layer: LayerPlacement) -> str:
    if not layer.row_limit:
        return "gradients"
    return f"activations, up to {format_count(layer.row_limit)} rows"
