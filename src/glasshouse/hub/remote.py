"""From what a user names, a folder or a model on the Hugging Face hub, to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from glasshouse import store
from glasshouse.errors import InputError
from glasshouse.hub import run_folder
from glasshouse.hub.model_folder import (
    CONFIG,
    EXTRA_FILES,
    INDEX,
    OTHER_TOKENIZERS,
    POOLING,
    TOKENIZER_FILES,
    VERIFIED,
    ModelFolder,
)

# All that is ever looked at; what else a repository holds (other formats, images, code) is not fetched.
WANTED = [CONFIG, "model*.safetensors", INDEX, POOLING, VERIFIED, *EXTRA_FILES, *TOKENIZER_FILES, *OTHER_TOKENIZERS]


def resolve_folder(place: str | Path, revision: str | None = None) -> ModelFolder:
    """Return the folder itself, that of a run's model, or the snapshot of a hub repository, fetched if need be.

    Fetching is huggingface_hub's work, with its cache and its settings: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
    """
    nowhere = InputError(
        f"there is no folder {str(place)!r}; give the folder of a model or a run, or a hub id such as 'gpt2'."
    )
    try:
        path = store.surviving_folder(Path(place).expanduser())
    except (OSError, RuntimeError):  # a name too long, the home of nobody
        raise nowhere from None
    if path.is_dir():
        if revision is not None:
            raise InputError(
                f"revision is {revision!r}, but {str(place)!r} is a folder, which has only one; leave it out."
            )
        return ModelFolder(run_folder.find_run_model(path) if run_folder.is_run(path) else path)
    if isinstance(place, Path) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) or path.exists():
        raise nowhere
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return ModelFolder(Path(huggingface_hub.snapshot_download(place, revision=revision, allow_patterns=WANTED)))
    except errors.LocalEntryNotFoundError as error:  # nothing in the cache, and no answer from the hub
        raise InputError(
            f"there is no folder {place!r} here, no model of that name was fetched before, and the Hugging Face hub "
            "cannot be reached; give the folder of a model, or try again with a connection."
        ) from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"the hub gives {place!r} only to those who accepted its terms; accept them on its page and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"there is no folder {place!r} here, and no public model of that name on the Hugging Face hub; give "
            "another, or set HF_TOKEN if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"revision is {revision!r}, which the hub's {place!r} does not have; give another."
        ) from error
    except (OSError, ValueError) as error:  # whatever is wrong out there, all of its errors are one of these
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{place!r} is no folder here and could not be fetched from the hub: {reason}") from error
