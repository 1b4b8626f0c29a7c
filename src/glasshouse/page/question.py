"""What the page asks about: a text put to a model at a moment of its training, with changes made inside."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from glasshouse.config import JsonDict, Settings


@dataclass(frozen=True)
class Scale(Settings):
    """What stands at a site, multiplied: by 0 it is switched off."""

    kind: ClassVar[str] = "scale"
    site: str
    by: float = 0.0


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
class Text(Settings):
    """A text as the page holds it."""

    text: str = ""  # what a decoder or an encoder reads; of an encoder-decoder, the source
    target: str = ""  # of an encoder-decoder: what its decoder has written so far
    added: tuple[int, ...] = ()  # tokens chosen one by one, after the text or the target
    hidden: tuple[int, ...] = ()  # places where an encoder reads its mask token instead


@dataclass(frozen=True)
class Question(Settings):
    """A text, the moment of the model it is put to, and what is changed inside meanwhile."""

    asked: Text = field(default_factory=Text)
    moment: str = ""  # "": the latest
    edits: tuple[Edit, ...] = ()
    other: Text | None = None  # where patches come from

    @property
    def plain(self) -> Question:
        """The same without changes."""
        return Question(self.asked, self.moment)

    @property
    def source(self) -> Question:
        """The text that patches come from, put to the same model."""
        return Question(self.other or Text(), self.moment)

    def without_patches(self) -> Question:
        """Return the question without what belongs to another text."""
        return replace(self, edits=tuple(one for one in self.edits if not isinstance(one, Patch)), other=None)

    def without_places(self) -> Question:
        """Return the question without what belongs to another text or to a single place."""
        kept = self.without_patches()
        return replace(kept, edits=tuple(one for one in kept.edits if "position" not in one.site))

    def table(self) -> JsonDict:
        """Return the question as the page sends it: what is as always is left out.

        >>> Question(Text("to be", added=(5,)), edits=(Scale("z.0[head=1]"),)).table()
        {'asked': {'text': 'to be', 'added': [5]}, 'edits': [{'kind': 'scale', 'site': 'z.0[head=1]', 'by': 0.0}]}
        """
        table: JsonDict = {"asked": _given(self.asked)}
        if self.moment:
            table["moment"] = self.moment
        if self.edits:
            table["edits"] = [{"kind": one.kind, **vars(one)} for one in self.edits]
            if self.other is not None:
                table["other"] = _given(self.other)
        return table


def _given(text: Text) -> JsonDict:
    rest = {"target": text.target, "added": list(text.added), "hidden": list(text.hidden)}
    return {"text": text.text, **{name: value for name, value in rest.items() if value}}
