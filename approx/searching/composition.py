"""Models with any mix of mechanisms that share the weights of one base."""

import copy
import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from approx.checkpoints.checkpoint import Checkpoint
from approx.checkpoints.integrity import state_sha256
from approx.conversion import surgery
from approx.conversion.calibration import calibrate, mechanisms
from approx.conversion.calibration_inputs import calibration_batch, calibration_length
from approx.conversion.separator import of_checkpoint, with_separator
from approx.evaluation.prediction_cache import fingerprint
from approx.planning.anatomy import Anatomy, Site
from approx.planning.plan import Plan
from approx.planning.rule import Rule
from approx.planning.selection import ranges
from approx.searching.candidates import Candidate


class Choice:
    """What one site becomes: a candidate, and the heads that it converts."""

    def __init__(self, candidate: Candidate | None, heads: Sequence[int] = ()) -> None:
        self.candidate, self.heads = candidate, tuple(sorted(heads))

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "exact" if self.candidate is None else self.candidate.name

    def rule(self, site: Site) -> Rule | None:
        """The rule of a plan, without a layer; None for exact attention."""
        if self.candidate is None:
            return None
        heads = ranges(self.heads) if self.heads else "all"
        return dataclasses.replace(self.candidate.rule, layers=str(site.layer), heads=heads)


class Composer:
    """Makes models of one base by plans; their projections are the base's own tensors.

    Args:
        base: The exact checkpoint.
        anatomy: Its anatomy.
    """

    def __init__(self, base: Checkpoint, anatomy: Anatomy) -> None:
        self.base, self.anatomy = base, anatomy
        # Mechanism's state after fitting: (layer, candidate) -> its tensors.
        self.fitted: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def plan(self, choices: Sequence[Choice]) -> Plan | None:
        """The plan that gives each site its choice, in as few rules as possible; None if every site stays exact."""
        alike: dict[tuple[str, str], tuple[Rule, list[int]]] = {}
        for site, choice in zip(self.anatomy.sites, choices, strict=True):
            rule = choice.rule(site)
            if rule is not None:
                alike.setdefault((choice.name, rule.heads), (rule, []))[1].append(site.layer)
        if not alike:
            return None
        rules = (dataclasses.replace(rule, layers=ranges(layers)) for rule, layers in alike.values())
        return with_separator(Plan(tuple(rules)), lambda: of_checkpoint(self.base.source))

    def everywhere(self, candidate: Candidate) -> list[Choice]:
        """The candidate at every site that can become it."""
        return [
            Choice(candidate, range(candidate.heads or 0)) if candidate.on(site) else Choice(None)
            for site in self.anatomy.sites
        ]

    def make(self, choices: Sequence[Choice]) -> Checkpoint:
        """A checkpoint in memory with the plan of the choices; the base itself if every site stays exact."""
        plan = self.plan(choices)
        if plan is None:
            return self.base
        base: Any = self.base.model
        shared = {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
        model = copy.deepcopy(base, shared)
        surgery.exchange(model, plan)
        if any(mechanism.takes_calibration for mechanism in mechanisms(model)):
            calibrate(model, calibration_batch(self.base.source, model, calibration_length(model)).inputs)
        for site, choice in zip(self.anatomy.sites, choices, strict=True):
            if (state := self.fitted.get((site.layer, choice.name))) is not None:
                model.base_model.get_submodule(site.path).mechanism.load_state_dict(state)
        source = dataclasses.replace(self.base.source, raw=model.config.to_dict(), config=model.config, converted=True)
        own = [state_sha256(mechanism) for mechanism in mechanisms(model) if mechanism.state_dict()]
        return Checkpoint(source, model.eval(), fingerprint(self.base.weights_sha256, own))
