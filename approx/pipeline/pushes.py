"""The last stages of a run: push variants to a hub, with the record of the run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from approx.errors import ApproxError
from approx.pipeline.stages import Conversions, Study
from approx.pipeline.store import Stage, stage_key
from approx.pushing.licence import stated
from approx.pushing.options import PushStage
from approx.pushing.permission import check_permission
from approx.pushing.push import push
from approx.pushing.remote import endpoint
from approx.recipe import BASE, HEALED, Recipe, slug


@dataclass(frozen=True)
class Pushes:
    """The pushes of a run.

    Args:
        study: The study of the run.
        recipe: Its recipe.
        folders: The converted and the healed folders, by label.
        record: The record of the run.
        parts: The stages that the record is made of.
        send: Whether to push; otherwise the folders that would be pushed are written into `push/` of the run.
        offline: Without `send`: whether the hub may not be asked for the licence of the base.
        told: Called with stage, done and total.
    """

    study: Study
    recipe: Recipe
    folders: Conversions
    record: Path
    parts: tuple[Stage, ...]
    send: bool
    offline: bool
    told: Callable[[str, int, int], None]

    def stages(self) -> list[Stage]:
        """One stage for each push; the outcome is that of `approx.push`. Folders that are only written are written every time."""
        return [
            Stage(f"push to {asked.repo}", self._key(asked), partial(self._push, asked), noun="push", kept=self.send)
            for asked in self.recipe.push
        ]

    def check(self, *, every: bool) -> None:
        """Ask the hub whether the pushes that are not done, or every one, would be allowed.

        Raises:
            ApproxError: with all reasons why not; the exit code is their lowest.
        """
        source, errors = self.study.open()[BASE].source, list[ApproxError]()
        for number, (asked, stage) in enumerate(zip(self.recipe.push, self.stages(), strict=True)):
            if self.send and (every or self.study.store.state(stage) != "done"):
                try:
                    stated(asked.base_model, asked.license, asked.language)
                    check_permission(
                        asked.repo, base=asked.base_model or (source.name if source.revision else None),
                        public=asked.public, create_pr=asked.create_pr, revision=asked.revision,
                    )  # fmt: skip
                except ApproxError as error:
                    errors.append(ApproxError(f"{self.recipe.at('push', number)}Push: {error}", error.exit_code))
        if errors:
            raise ApproxError("\n".join(map(str, errors)), min(error.exit_code for error in errors))

    def _folder(self, asked: PushStage) -> Stage:
        """What a push takes: a variant as it is after its training."""
        name = asked.variant or next(iter([*self.recipe.variants, *self.recipe.search]))
        return self.folders.get(name + HEALED, self.folders[name])

    def _key(self, asked: PushStage) -> str:
        made_of = [one.key for one in (self._folder(asked), *self.parts)]
        return stage_key("push", endpoint(), asked.model_dump(), made_of, self.recipe.text)

    def _push(self, asked: PushStage) -> dict[str, Any]:
        folder = self._folder(asked).product
        assert folder is not None  # conversions and trainings make folders
        more: dict[str, Any] = {"records": [self.record], "public": asked.public, "progress": self.told}
        more |= {"base_model": asked.base_model, "license": asked.license, "language": asked.language}
        if not self.send:
            # As the hub's own cache writes it, since no name holds two hyphens.
            names = [*asked.repo.split("/"), *([slug(asked.revision)] if asked.revision else [])]
            place = self.record.parent / "push" / "--".join(names)
            return push(folder, asked.repo, dry_run=place, force=True, offline=self.offline, **more)
        try:
            return push(
                folder, asked.repo, create_pr=asked.create_pr, revision=asked.revision, message=asked.message, **more
            )
        except ApproxError as error:
            raise ApproxError(
                f"The run is complete but for its push. Continue it with --resume, or push by hand: approx push {folder} {asked.repo} "
                f"--record {self.record}. What stopped it: {error}",
                error.exit_code,
            ) from error
