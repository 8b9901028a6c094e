"""A microbatch run: the forward and backward pass of one microbatch through one stage.

Forward, the stage's instructions run one by one. A value of another stage is received when the
first instruction needs it: it becomes a leaf of this run's own autograd graph. A value that other
stages need is sent after its last use here: it is a root of backward.

Backward, the gradients of the roots are received, and the gradient of each leaf is sent as soon as
it is complete.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from lockstep.capture.instructions import Input, Instruction, Output, run_instruction
from lockstep.capture.seeding import go_backward
from lockstep.data.trees import Tree, tensors_of
from lockstep.parallel.loss.share_losses import ShareLoss
from lockstep.parallel.pipeline.partition import StagePart
from lockstep.parallel.pipeline.stage_mail import StageMail

Gradients = list[torch.Tensor | None]


@dataclass(kw_only=True, eq=False)
class MicrobatchRun:
    """A microbatch in a stage.

    Attributes:
        stage: the stage.
        share: the microbatch.
        part: the stage's part of the trace.
        instructions: of the whole trace.
        model: the instructions call its modules.
        mail: from and to other stages.
    """

    stage: int
    share: int
    part: StagePart
    instructions: Sequence[Instruction]
    model: nn.Module
    mail: StageMail
    loss: ShareLoss | None = field(default=None, init=False)
    # Factors of gradients that wait for their pass: weight's number, inputs, output gradients.
    deferred: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list, init=False)
    _inputs: Tree = field(default=None, init=False)
    _values: dict[int, Any] = field(default_factory=dict, init=False)
    _received: dict[int, Any] = field(default_factory=dict, init=False)
    _leaves: dict[int, "_Leaves"] = field(default_factory=dict, init=False)
    _sent: dict[int, list[torch.Tensor]] = field(default_factory=dict, init=False)

    def forward(self, inputs: Tree) -> list[Any]:
        """Run the stage's instructions.

        It may run again, to recompute activations: received values are kept until then, and nothing
        is sent twice.

        Args:
            inputs: the model's, where the stage uses them.

        Returns:
            The model's output, if the stage has it, and all tensors that backward starts from.
        """
        # No closures that refer to each other: a cycle keeps activations until garbage collection.
        self._values = values = {}
        self._inputs = inputs
        output = None
        for number in self.part.instructions:
            values[number] = self._run(number)
            if isinstance(self.instructions[number], Output):
                output = values[number]
            for value in self.part.sent_after.get(number, ()):
                self._send(value, values[value])
            for value in self.part.dropped_after.get(number, ()):
                del values[value]
        self._values, self._inputs = {}, None
        return [output, *(tensor for tensors in self._sent.values() for tensor in tensors)]

    def _run(self, number: int) -> Any:
        instruction = self.instructions[number]
        return run_instruction(instruction, self.model, self._fetch, self._inputs)

    def _fetch(self, number: int) -> Any:
        if number not in self._values:
            is_input = isinstance(self.instructions[number], Input)
            self._values[number] = self._run(number) if is_input else self._receive(number)
        return self._values[number]

    def _receive(self, number: int) -> Any:
        if number not in self._received:
            sender = self.part.received[number]
            tree = self.mail.receive(number, sender, self.share)
            self._received[number] = tree
            leaves = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
            if leaves:
                self._leaves[number] = _Leaves(
                    leaves,
                    lambda gradients: self.mail.send_gradient(
                        self.stage, number, self.share, gradients
                    ),
                )
        return self._received[number]

    def _send(self, number: int, tree: Any) -> None:
        if number in self._sent:
            return
        self.mail.send(self.stage, number, self.share, tree)
        self._sent[number] = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]

    def backward(self, denominator: torch.Tensor | float) -> None:
        """Go backward from the loss, divided by ``denominator``, or from received gradients."""
        if self.loss is not None:
            self.loss.backward(denominator)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for number, tensors in self._sent.items():
            if tensors:
                found = self.mail.receive_gradients(self.stage, number, self.share)
                for tensor, parts in zip(tensors, zip(*found, strict=True), strict=True):
                    given = [part for part in parts if part is not None]
                    if given:  # added in their order; received gradients are not changed
                        roots.append(tensor)
                        gradients.append(reduce(operator.add, given))
        if roots:
            go_backward(roots, gradients)
        for leaves in self._leaves.values():
            leaves.complete()

    def defer(self, number: int, inputs: torch.Tensor, output_gradients: torch.Tensor) -> None:
        """Keep the factors of a weight's gradient, without their history, which is used up."""
        self.deferred.append((number, inputs.detach(), output_gradients.detach()))

    def end(self) -> None:
        """Give back the received values."""
        self.deferred.clear()
        self.mail.give_back(self.stage, self.share)
        for number, tensors in self._sent.items():
            if tensors:
                self.mail.give_gradients_back(self.stage, number, self.share)


class _Leaves:
    """The tensors of a received value that take part in backward."""

    def __init__(self, tensors: Sequence[torch.Tensor], send: Callable[[Gradients], None]) -> None:
        self._gradients: Gradients = [None] * len(tensors)
        self._send: Callable[[Gradients], None] | None = send
        self._missing = len(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_post_accumulate_grad_hook(partial(self._take, index))

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        before, gradient = self._gradients[index], tensor.grad
        assert gradient is not None
        tensor.grad = None
        self._gradients[index] = gradient if before is None else before + gradient
        self._missing -= before is None
        if not self._missing:
            self.complete()

    def complete(self) -> None:
        """Send the gradients, if they are not sent yet."""
        send, self._send = self._send, None
        if send is not None:
            send(self._gradients)
            self._gradients.clear()
