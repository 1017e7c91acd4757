"""Run a search into a file and a folder: the plan, and the sensitivities, record and report behind it."""

import json
from pathlib import Path

from approx.checkpoints.atomic_folder import CLAIM, claim, held, refuse_unclaimed, remove
from approx.checkpoints.checkpoint import Checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.measuring.measure import Progress, make_record, silent
from approx.publishing.report import write_report
from approx.recipe import BASE
from approx.searching.options import SearchStage
from approx.searching.outcome import Searched
from approx.searching.search import FITTED, MEASURED, SENSITIVITIES, Search
from approx_kernels.runtime.atomic_file import write_whole

OUTCOME, BEST = "search.json", "best.yaml"


def folder_of(plan: Path) -> Path:
    """The folder beside a plan that holds what the search measured: `plan.yaml` -> `plan-search`."""
    return plan.with_name(f"{plan.stem}-search")


def search(
    base: Checkpoint,
    stage: SearchStage,
    plan: Path | None,
    *,
    folder: Path,
    sensitivities: Path | None = None,
    resume: bool = False,
    force: bool = False,
    seed: int = 0,
    command: str = "",
    progress: Progress = silent,
) -> Searched:
    """Search, and write the plan, `search.json`, the record and the report.

    After Ctrl-C the plan is the best one so far, and a comment in it says that it is not proven.

    Args:
        base: The exact checkpoint.
        stage: The options.
        plan: File for the plan; None writes none. It is not written if nothing fits what was asked for.
        folder: Folder for everything else.
        sensitivities: File of an earlier search of the same model, candidates and examples.
        resume: Go on with an earlier search in the folder.
        force: Start over, and replace an earlier search.
        seed: Seed of everything random.
        command: The command as typed, for the record.
        progress: Called with what happens, done and total.

    Raises:
        ApproxError: if an output exists or another process writes it, the options contradict each other or do not fit the model, or no plan could be as
            fast as asked.
    """
    with held(folder):
        _refuse(plan, folder, resume=resume, force=force)
        if sensitivities is not None and not sensitivities.is_file():
            raise ApproxError(
                f"{sensitivities} does not exist. Leave it out, and sensitivities are measured.", Exit.UNAVAILABLE
            )
        running = Search(base, stage, folder, resume=resume, seed=seed, progress=progress)
        if sensitivities is not None:
            running.know(sensitivities)
        claim(folder, "search", "a search", _begun)
        if not resume:
            remove(folder, "search")
            claim(folder, "search", "a search")
        for leftover in folder.rglob(".*.tmp"):
            # Killed processes leave these files, and the whole folder is ours.
            leftover.unlink(missing_ok=True)
        try:
            found = running.run()
        finally:
            if [path.name for path in folder.iterdir()] == [CLAIM]:
                remove(folder, "search")
        claim(folder, "search", "a search")
        write_whole(folder / OUTCOME, json.dumps(found.to_data(), indent=1, ensure_ascii=False) + "\n")
        usable = found.feasible or found.interrupted
        for file, wanted in ((plan, usable), (folder / BEST, not usable)):
            if file is not None and wanted and found.plan is not None:
                # A process that is killed here leaves nothing beside the plan.
                write_whole(file, found.to_yaml(), within=folder)
            elif file is not None:
                # A plan of an earlier search is not what this one found.
                file.unlink(missing_ok=True)
        if found.speed is not None:
            made = make_record(
                {BASE: base, **found.models}, title=f"Search: {found.asked}", notice=found.told, seed=seed, command=command,
                quality=[found.quality] if found.quality is not None else [], speed=[found.speed],
            )  # fmt: skip
            checked = [one.model_copy(update={"verified": found.verified[one.name]}) for one in made.variants]
            made = made.model_copy(update={"variants": checked})
            record.save(folder / "record.json", made)
            write_report([made], folder / "report")
        return found


def _refuse(plan: Path | None, folder: Path, *, resume: bool, force: bool) -> None:
    refuse_unclaimed(folder, "search", "a search", _begun)
    begun = folder.is_dir() and any(folder.iterdir())
    # Without an earlier search there is nothing to resume, so the plan is of someone else.
    if plan is not None and plan.exists() and not (plan.is_file() and (force or (resume and begun))):
        how = "Choose another name, or replace it with --force." if plan.is_file() else "Choose another name."
        raise ApproxError(f"{plan} exists. {how}", Exit.REFUSED)
    if begun and not (resume or force):
        raise ApproxError(
            f"{folder} holds an earlier search. Go on with it with --resume, or start over with --force.", Exit.REFUSED
        )


def _begun(folder: Path) -> bool:
    """Whether an earlier version, which made no claims, has searched in a folder."""
    own = {SENSITIVITIES, MEASURED, FITTED, OUTCOME, BEST, "record.json", "report"}
    try:
        data = json.loads((folder / SENSITIVITIES).read_bytes())
        return {*data} == {"schema", "about", "damages"} and {path.name for path in folder.iterdir()} <= own
    except (OSError, ValueError, TypeError, RecursionError):
        return False
