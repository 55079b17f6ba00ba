"""Uploads a saved checkpoint, merged or split, to the Hugging Face hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from oslo_models.checkpoint.filenames import MANIFEST, is_replaced_by_save, with_variant

_CONFIGURATIONS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Upload:
    """Upload target of a checkpoint: the arguments of transformers' ``save_pretrained(push_to_hub=True)``.

    Attributes:
        repo_id: the repository. It is created if it does not exist. Defaults to the name of the directory, in the
            user's namespace.
        token: the access token of the hub. Defaults to the token stored by ``hf auth login``.
        private, create_pr, revision, commit_message, commit_description: see ``huggingface_hub``.
    """

    repo_id: str | None = None
    token: str | bool | None = None
    private: bool | None = None
    create_pr: bool = False
    revision: str | None = None
    commit_message: str | None = None
    commit_description: str | None = None

    def push(self, directory: Path, variant: str | None, with_config: bool) -> None:
        """Upload the files of the checkpoint in one commit. The commit also deletes the files that they replace.

        Raises:
            OSError: the hub refused the upload or cannot be reached. The checkpoint in ``directory`` is complete.
        """
        name = with_variant(MANIFEST, variant)
        names = {name, *json.loads((directory / name).read_text())["files"]}
        if with_config:
            names |= {other for other in _CONFIGURATIONS if (directory / other).is_file()}
        try:
            self._commit(directory, sorted(names), variant)
        except Exception as error:
            raise OSError(
                f"{directory} is saved, but could not be uploaded to {self.repo_id or directory.name}: {error}"
            ) from error

    def _commit(self, directory: Path, names: list[str], variant: str | None) -> None:
        api = HfApi(token=self.token)
        repo = api.create_repo(self.repo_id or directory.resolve().name, private=self.private, exist_ok=True).repo_id
        if self.revision is not None and not self.revision.startswith("refs/pr"):
            api.create_branch(repo, branch=self.revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=self.revision)
        operations: list[Any] = [CommitOperationAdd(name, directory / name) for name in names]
        operations += [
            CommitOperationDelete(name) for name in there if name not in names and is_replaced_by_save(name, variant)
        ]
        api.create_commit(
            repo,
            operations,
            commit_message=self.commit_message or "Upload model",
            commit_description=self.commit_description,
            create_pr=self.create_pr,
            revision=self.revision,
        )
