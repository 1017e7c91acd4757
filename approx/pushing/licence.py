"""The base, licence and language of a pushed model: as the user states them, from the folder's card, or from the hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors
from huggingface_hub.utils import validate_repo_id

from approx.conversion.card import CARD, inherited
from approx.errors import ApproxError, Exit, shown
from approx.pushing.folder import Checked
from approx.pushing.refusals import told

_FIELDS = ("license", "license_name", "license_link", "language")
# As the hub writes them: `apache-2.0`; `en`, `zh-Hant` or `multilingual`.
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]+)*|multilingual|code")


def stated(base_model: str | None, license: str | None, language: str | Sequence[str] | None) -> dict[str, Any]:
    """Fields of a card that the user states.

    Raises:
        ApproxError: if one is not what the hub's cards may say.
    """
    fields: dict[str, Any] = {}
    if base_model is not None:
        try:
            validate_repo_id(base_model)
        except errors.HFValidationError:
            raise ApproxError(
                f"--base-model is {shown(base_model)}, which no model of the hub is called. The form is owner/name."
            ) from None
        fields |= {"base_model": base_model, "base_model_relation": "finetune"}
    if license is not None:
        if not _LICENCE.fullmatch(license):
            raise ApproxError(
                f"--license is {shown(license)}, but the hub's names of licences are like apache-2.0, mit or other."
            )
        fields["license"] = license
    languages = [language] if isinstance(language, str) else [*(language or [])]
    if wrong := [one for one in languages if not _LANGUAGE.fullmatch(one)]:
        raise ApproxError(f"--language is {shown(wrong[0])}; give codes such as en, de or zh-Hant, or multilingual.")
    if languages:
        fields["language"] = languages[0] if len(languages) == 1 else languages
    return fields


def licence(checked: Checked, said: Mapping[str, Any], *, public: bool) -> dict[str, Any]:
    """Fields that the hub's card of the base adds to a card without a licence.

    Args:
        checked: The folder.
        said: What the user states, from `stated`.
        public: Whether the model becomes public.

    The hub is asked only if the folder's card has no licence, or if the model becomes public.

    Raises:
        ApproxError: if the base is gated and the push public, or its card may not be read, or the hub does not answer.
    """
    base = said.get("base_model") or (checked.base.name if checked.base.revision else None)
    known = "license" in {**inherited(checked.opened.source.folder / CARD), **said}
    if base is None or (known and not public):
        return {}
    return told_by_the_hub(base, public=public)


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
