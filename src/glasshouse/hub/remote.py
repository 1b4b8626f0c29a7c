"""Resolve a path or a Hugging Face hub id to a local model folder."""

from __future__ import annotations

import re
from pathlib import Path

from glasshouse import pretrained, store
from glasshouse.errors import InputError
from glasshouse.hub import run_checkpoints
from glasshouse.hub.model_folder import (
    CONFIG,
    EXTRA_FILES,
    INDEX,
    POOLING,
    TOKENIZER_FILES,
    VERIFIED,
    ModelFolder,
)

# The files that are used; the rest of a repository (other formats, images, code) is not downloaded.
DOWNLOADED = [
    CONFIG,
    "model*.safetensors",
    INDEX,
    POOLING,
    VERIFIED,
    *EXTRA_FILES,
    *TOKENIZER_FILES,
]


def resolve_folder(path_or_repo_id: str | Path, revision: str | None = None) -> ModelFolder:
    """Return a model folder: the path itself, the model of a run, a bundled model, or a snapshot from the hub.

    Downloads go through huggingface_hub, with its cache and settings: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
    """
    name = path_or_repo_id
    not_found = InputError(
        f"there is no folder {str(name)!r}; give a model folder, a run folder, a hub id such as 'gpt2', or a bundled "
        f"model: {', '.join(pretrained.names())}."
    )
    try:
        path = pretrained.find(name) or store.surviving_folder(Path(name).expanduser())
    except (OSError, RuntimeError):  # a name too long, an unknown user
        raise not_found from None
    if path.is_dir():
        if revision is not None:
            raise InputError(
                f"revision is {revision!r}, but {str(name)!r} is a folder, which has no revisions; leave it out."
            )
        return ModelFolder(run_checkpoints.find_run_model(path) if run_checkpoints.is_run(path) else path)
    if isinstance(name, Path) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or path.exists():
        raise not_found
    import huggingface_hub
    from huggingface_hub import errors

    try:
        snapshot = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=DOWNLOADED)
        return ModelFolder(Path(snapshot))
    except errors.LocalEntryNotFoundError as error:  # not in the cache, and no answer from the hub
        raise InputError(
            f"there is no folder {name!r}, no model of that name in the cache, and the Hugging Face hub cannot be "
            "reached; give the folder of a model, or try again with a connection."
        ) from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name!r} is a gated repository of the hub; accept its terms on its page and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {name!r}, and no public model of that name on the Hugging Face hub; give another, "
            "or set HF_TOKEN if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"revision is {revision!r}, which {name!r} does not have on the hub; give another."
        ) from error
    except (OSError, ValueError) as error:  # the base classes of all other errors of huggingface_hub
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{name!r} is not a folder and could not be downloaded from the hub: {reason}") from error
