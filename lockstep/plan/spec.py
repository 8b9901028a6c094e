"""The Plan: a decision that is printed, saved and loaded.

It reads and writes JSON with a version. A strategy is a way to get one.
"""

import msgspec

from lockstep.disk import JsonFile
from lockstep.errors import PlanError
from lockstep.plan.decision import PLAN_VERSION, Decision


class Plan(Decision, JsonFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision about how to train one model on given devices.

    Attributes:
        strategy: the maker's name, for people.
        mesh: axes of the device mesh, outermost first; ranks count through it in row-major order.
        devices: the device of each rank.
        threads_per_device: compute threads of each rank; None leaves the process's setting.
        num_shares: parts into which every global batch is divided; see ``plan.shares``.
        shares_per_row: consecutive shares whose gradients are added up as they come, in one row of
            memory, before the sum over all rows: more save memory.
        interleaved: a rank's shares run together, layer by layer, because layers take statistics
            over the whole batch.
        layers: every layer and its stage.
        update: how gradients meet and parameters change.
        precision: ``"fp32"`` or ``"fp64"``; ``"bf16-mixed"`` or ``"fp16-mixed"``: parameters,
            updates and losses in float32, the model's own arithmetic in less where that is safe
            (autocast); ``"bf16"``: parameters in bfloat16, updates in float32.
        compiled: each rank compiles the model (torch.compile).
        channels_last: images run through the model with their channels together in memory.
        pipeline: the stages, where the model is cut into some; the shares of a batch are then its
            microbatches.
        hosts: the number of ranks on each of several hosts, in order; empty for one host. Inputs
            and output gradients that replicas exchange (``LayerPlacement.row_limit``) go to all
            hosts then, and every host updates all of that weight.
        engine: where the parameters are, and what moves tensors between ranks.
        compression: how hosts compress the gradients that they send each other, or the changes of
            replicas that train locally; None if nothing is compressed, and the result exact.
        ties: which layers have parameters in common.
        sharding: what is divided over the ranks; None if each has everything.
        tensor: how layers are divided inside; None if none is.
        notes: remarks on this plan for people.
        version: of this format.

    Raises:
        PlanError: the parts contradict one another.
    """

    @classmethod
    def from_json(cls, text: bytes | str) -> "Plan":
        """Read a Plan that ``to_json`` wrote.

        Raises:
            PlanError: the text is not a Plan, or of another version.
        """
        try:
            version = msgspec.json.decode(text, type=_Versioned).version
            if version != PLAN_VERSION:
                raise PlanError(
                    f"This Lockstep reads Plans of version {PLAN_VERSION}.",
                    received=f"version {version}",
                    fix="Make the Plan again with this Lockstep.",
                )
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError) as error:
            if isinstance(error.__cause__, PlanError):
                raise error.__cause__ from None
            raise PlanError(
                "This is not a Plan.", received=error, fix="Give a file that Plan.save wrote."
            ) from error

    def __str__(self) -> str:
        # Tables render through rich, which only a person who prints needs.
        from lockstep.plan.tables import plan_table

        return plan_table(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The text for notebooks and IPython."""
        from lockstep.plan.tables import plan_html

        return {"text/plain": str(self), "text/html": plan_html(self)}


class _Versioned(msgspec.Struct):
    version: int
