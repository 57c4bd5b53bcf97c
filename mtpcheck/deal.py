"""Dealing a model out to the ranks of a topology: which rank holds what, under which name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

from mtpcheck.dialect import HEAD, Dialect, KeyForm
from mtpcheck.errors import UnsupportedError
from mtpcheck.facts import holds
from mtpcheck.plan import Plan, stack
from mtpcheck.roles import Address
from mtpcheck.rows import Row
from mtpcheck.tensormap import TensorMap, TensorRef
from mtpcheck.topology import Rank, Stage, Topology, indivisible

EMPTY = TensorRef("U8", Plan.zeros((0,), 1))
"""What Transformer Engine modules keep in ``_extra_state`` where nothing is quantized."""

Model = dict[str, TensorRef | None]


@dataclass(frozen=True)
class Dealer:
    """One model and one topology. Contents are made rank by rank, and only plans of them.

    Raises UnsupportedError or UsageError when made, if the model cannot be cut so: before anything is written.
    """

    tensor_map: TensorMap
    topology: Topology
    dialect: Dialect
    form: KeyForm
    padded_vocab: int

    def __post_init__(self) -> None:
        if reasons := list(indivisible(self.topology, self.tensor_map.facts, self.padded_vocab, self.form.mcore)):
            raise UnsupportedError(f"{self.topology}: " + "; ".join(reasons))
        self.topology.ranks()
        self.stages()

    def stages(self) -> list[Stage]:
        facts = self.tensor_map.facts
        return self.topology.stages(facts["layers"], facts["mtp_stored"])

    @property
    def nbytes(self) -> int:
        """Bytes of all rank files together, which hold many a tensor more than once."""
        pairs = [(rank.tp, rank.ep) for rank in self.topology.ranks() if not rank.pp]
        total = 0
        for stage in self.stages():
            for address, row in self._of_stage(stage):
                ref, role = self.tensor_map.parts[row.parts[0]], address.role
                nbytes = prod(row.shape(self.tensor_map.model.shapes)) * ref.plan.itemsize
                holders = len(pairs) // self.topology.ep if role and role.counter else len(pairs)
                cut = role.cut(self.form.spec, self.tensor_map.facts) if role else None
                count = self.topology.etp if role and role.counter else self.topology.tp
                total += nbytes * holders // (count if cut else 1)
        return total

    def deal(self) -> Iterator[tuple[Rank, list[Model]]]:
        """What each rank holds: its model chunks, in the order of the virtual stages."""
        stages = self.stages()
        rows = [self._of_stage(stage) for stage in stages]
        for rank in self.topology.ranks():
            chunks = range(rank.pp, len(stages), self.topology.pp)
            yield rank, [self._model(rank, stages[i], rows[i]) for i in chunks]

    @cached_property
    def _rows(self) -> list[tuple[Address, Row]]:
        rows = self.dialect.rows(self.tensor_map.model, self.padded_vocab, self.form).rows
        return [(self.dialect.address(row.name), row) for row in rows]

    def _of_stage(self, stage: Stage) -> list[tuple[Address, Row]]:
        """Rows of one stage, in the order of the model; where it holds a tied embedding as its head, that one too."""
        tied = bool(self.tensor_map.facts["tied"])
        chosen = [(a, row) for a, row in self._rows if stage.holds(a.place, a.layer, tied)]
        if tied and stage.holds("head", None, tied):
            embedding = next(row for address, row in self._rows if address.place == "embed")
            chosen.append((self.dialect.address(HEAD), embedding))
        return chosen

    def _model(self, rank: Rank, stage: Stage, rows: list[tuple[Address, Row]]) -> Model:
        plans = {part: ref.plan for part, ref in self.tensor_map.parts.items()}
        model: Model = {}
        for address, row in rows:
            moved = -stage.layers.start if address.lead == f"{self.dialect.decoder}." else 0
            if (plan := self._share(rank, address, row, plans)) is not None:
                name = address.name(moved, -rank.ep * self._experts if address.expert is not None else 0)
                model[name] = TensorRef(self.tensor_map.parts[row.parts[0]].dtype, plan)
                if address.role and self.form.spec in address.role.extra_in_memory:
                    kept = EMPTY if self.form.spec == "te" and address.place != "head" else None
                    model[f"{name.rsplit('.', 1)[0]}._extra_state"] = kept
        if stage.head:
            model.setdefault(f"{HEAD.rsplit('.', 1)[0]}._extra_state", None)
        return self._with_bare_extras(model)

    @property
    def _experts(self) -> int:
        """Experts of one expert rank."""
        return int(self.tensor_map.facts["experts"] or 0) // self.topology.ep

    def _share(self, rank: Rank, address: Address, row: Row, plans: Mapping[str, Plan]) -> Plan | None:
        """This rank's share of a tensor; None if it holds none of it."""
        shapes, facts = self.tensor_map.model.shapes, self.tensor_map.facts
        cut = address.role.cut(self.form.spec, facts) if address.role else None
        if address.expert is not None and address.expert // self._experts != rank.ep:
            return None
        expert = bool(address.role and address.role.counter)
        count = self.topology.etp if expert else self.topology.tp
        share = partial(cut.share, ranks=count, rank=rank.tp % count) if cut else lambda plan: plan
        if not row.stack:
            return share(row.join(plans, shapes, self.tensor_map.padding_plans))
        own = row.chunks(plans, shapes)[rank.ep * self._experts :][: self._experts]
        shares = [share(chunk).permute((1, 0)) for chunk in own]  # legacy grouped experts, see roles.Experts
        rows, columns = shares[0].shape
        grown = (rows, columns * len(shares)) if cut and cut.axis == 0 else (rows * len(shares), columns)
        return stack(shares).reshape(grown)

    def _with_bare_extras(self, model: Model) -> Model:
        """Add the ``_extra_state`` of modules without weights to every layer."""
        facts = self.tensor_map.facts
        bare = [b for b in self.dialect.bare_extra if self.form.spec in b["extra"] and holds(b["when"], facts)]
        layers = {(a.lead, a.layer, a.inner) for a in map(self.dialect.address, model) if a.layer is not None}
        for lead, layer, inner in layers:
            prefix = f"{lead}{layer}.{inner}"
            if inner or lead == f"{self.dialect.decoder}.":
                own = [b["module"] for b in bare if f"{prefix}{b['with']}" in model]
                model.update({f"{prefix}{module}._extra_state": EMPTY for module in own})
        return model
