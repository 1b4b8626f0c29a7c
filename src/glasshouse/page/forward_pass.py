"""What the page asks about: a text put to a model at a checkpoint of its training, with changes made inside."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from glasshouse.config import JsonDict, Settings


@dataclass(frozen=True)
class Scale(Settings):
    """What stands at a site, multiplied: by 0 it is switched off."""

    kind: ClassVar[str] = "scale"
    site: str
    factor: float = 0.0


@dataclass(frozen=True)
class Mean(Settings):
    """What stands at a site, replaced by its mean over all positions."""

    kind: ClassVar[str] = "mean"
    site: str


@dataclass(frozen=True)
class Patch(Settings):
    """What stands at a site, replaced by what stood there on the other text."""

    kind: ClassVar[str] = "patch"
    site: str


Edit = Scale | Mean | Patch


@dataclass(frozen=True)
class Prompt(Settings):
    """A text as the page holds it."""

    text: str = ""  # what a decoder or an encoder reads; of an encoder-decoder, the source
    target: str = ""  # of an encoder-decoder: what its decoder has written so far
    appended: tuple[int, ...] = ()  # tokens chosen one by one, after the text or the target
    masked: tuple[int, ...] = ()  # places where an encoder reads its mask token instead


@dataclass(frozen=True)
class ForwardPass(Settings):
    """A text, the checkpoint of the model it is put to, and what is changed inside meanwhile."""

    prompt: Prompt = field(default_factory=Prompt)
    checkpoint: str = ""  # "": the latest
    edits: tuple[Edit, ...] = ()
    patch_from: Prompt | None = None  # where patches come from

    @property
    def unedited(self) -> ForwardPass:
        """The same without changes."""
        return ForwardPass(self.prompt, self.checkpoint)

    @property
    def patch_pass(self) -> ForwardPass:
        """The text that patches come from, put to the same model."""
        return ForwardPass(self.patch_from or Prompt(), self.checkpoint)

    def without_patches(self) -> ForwardPass:
        """Return the question without what belongs to another text."""
        return replace(self, edits=tuple(one for one in self.edits if not isinstance(one, Patch)), patch_from=None)

    def without_position_edits(self) -> ForwardPass:
        """Return the question without what belongs to another text or to a single place."""
        kept = self.without_patches()
        return replace(kept, edits=tuple(one for one in kept.edits if "position" not in one.site))

    def to_json(self) -> JsonDict:
        """Return the question as the page sends it: what is as always is left out.

        >>> ForwardPass(Prompt("to be", appended=(5,)), edits=(Scale("z.0[head=1]"),)).to_json()
        {'prompt': {'text': 'to be', 'appended': [5]}, 'edits': [{'kind': 'scale', 'site': 'z.0[head=1]', 'factor': 0.0}]}
        """
        table: JsonDict = {"prompt": _given(self.prompt)}
        if self.checkpoint:
            table["checkpoint"] = self.checkpoint
        if self.edits:
            table["edits"] = [{"kind": one.kind, **vars(one)} for one in self.edits]
            if self.patch_from is not None:
                table["patch_from"] = _given(self.patch_from)
        return table


def _given(text: Prompt) -> JsonDict:
    rest = {"target": text.target, "appended": list(text.appended), "masked": list(text.masked)}
    return {"text": text.text, **{name: value for name, value in rest.items() if value}}
