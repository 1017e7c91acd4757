"""The licence of a pushed model: that of its base, from the folder's card or from the hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors

from approx.conversion.card import CARD, inherited
from approx.errors import ApproxError, Exit
from approx.pushing.folder import Checked
from approx.pushing.refusals import told

_FIELDS = ("license", "license_name", "license_link", "language")


def licence(checked: Checked, *, public: bool) -> dict[str, Any]:
    """Fields that the hub's card of the base adds to a card without a licence.

    The hub is asked only if the folder's card has no licence, or if the model becomes public.

    Raises:
        ApproxError: if the base is gated and the push public, or its card may not be read, or the hub does not answer.
    """
    base = checked.base
    known = "license" in inherited(checked.opened.source.folder / CARD)
    if base.revision is None or (known and not public):
        return {}
    return told_by_the_hub(base.name, public=public)


def told_by_the_hub(base: str, *, public: bool) -> dict[str, Any]:
    """Licence and language of a base on the hub; empty if it is no longer there.

    Raises:
        ApproxError: if the base is gated and the push public, or its card may not be read, or the hub does not answer.
    """
    with told("Reading the licence of the base", base):
        try:
            info = HfApi().model_info(base)
        except errors.GatedRepoError:
            raise
        except errors.RepositoryNotFoundError:
            # It was deleted, or belongs to somebody else; what is known without it has to do.
            return {}
    if info.gated and public:
        raise ApproxError(
            f"The base {base} is gated: its owner decides who gets it, so a model made from it is not pushed with --public. "
            "Push it privately, or ask the owner.",
            Exit.REFUSED,
        )
    said = info.card_data.to_dict() if info.card_data else {}
    return {key: said[key] for key in _FIELDS if said.get(key)}


def unlicensed(staged: Path) -> list[str]:
    """A note if the card of a folder has no licence."""
    if "license" in inherited(staged / CARD):
        return []
    return ["No licence is known, so the card names none, and nobody else may use the model."]
