"""The options of a push in a recipe."""

from typing import Annotated

from pydantic import Field

from approx.validation import Model


class PushStage(Model):
    """A variant to push once everything is measured, with the record of the run.

    Attributes:
        repo: The repository, owner/name; created if it does not exist.
        variant: Name of the variant, pushed as it is after its training; may be left out if there is only one.
        public: Create a public repository; the default is private.
        create_pr: Open a pull request instead of writing to the branch.
        revision: The branch, created if it does not exist; main by default.
        message: Message of the commit.
        base_model: Model id of the base on the hub, if the checkpoint of the recipe is a local copy.
        license: The licence, by the hub's name; by default that of the base, where it is known.
        language: Codes of the languages; by default those of the base, where they are known.
    """

    repo: Annotated[str, Field(examples=["me/my-model"])]
    variant: str | None = None
    public: bool = False
    create_pr: bool = False
    revision: str | None = None
    message: str | None = None
    base_model: Annotated[str | None, Field(examples=["google-bert/bert-base-uncased"])] = None
    license: Annotated[str | None, Field(examples=["apache-2.0"])] = None
    language: str | list[str] | None = None
