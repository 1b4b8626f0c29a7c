"""A forward pass: prompt, checkpoint and edits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from glasshouse.config import JsonDict, Settings


@dataclass(frozen=True)
class Scale(Settings):
    """Multiply an activation by a factor; 0 is zero ablation."""

    kind: ClassVar[str] = "scale"
    site: str
    factor: float = 0.0


@dataclass(frozen=True)
class Mean(Settings):
    """Replace an activation by its mean over positions (mean ablation)."""

    kind: ClassVar[str] = "mean"
    site: str


@dataclass(frozen=True)
class Patch(Settings):
    """Replace an activation by the one from another prompt (activation patching)."""

    kind: ClassVar[str] = "patch"
    site: str


Edit = Scale | Mean | Patch


@dataclass(frozen=True)
class PagePrompt(Settings):
    """The input of a model."""

    text: str = ""  # for an encoder-decoder, the source
    target: str = ""  # target prefix of an encoder-decoder
    appended: tuple[int, ...] = ()  # token ids after the text or the target
    masked: tuple[int, ...] = ()  # positions replaced by the mask token (encoders)


@dataclass(frozen=True)
class ForwardPass(Settings):
    """A prompt, the checkpoint of the model, and edits of its activations."""

    prompt: PagePrompt = field(default_factory=PagePrompt)
    checkpoint: str = ""  # "": the latest
    edits: tuple[Edit, ...] = ()
    patch_from: PagePrompt | None = None  # prompt that patches come from

    @property
    def unedited(self) -> ForwardPass:
        """The same forward pass without edits."""
        return ForwardPass(self.prompt, self.checkpoint)

    @property
    def patch_pass(self) -> ForwardPass:
        """The forward pass that patches come from."""
        return ForwardPass(self.patch_from or PagePrompt(), self.checkpoint)

    def without_patches(self) -> ForwardPass:
        """Return the forward pass without patches."""
        return replace(self, edits=tuple(one for one in self.edits if not isinstance(one, Patch)), patch_from=None)

    def without_position_edits(self) -> ForwardPass:
        """Return the forward pass without patches and position-specific edits."""
        kept = self.without_patches()
        return replace(kept, edits=tuple(one for one in kept.edits if "position" not in one.site))

    def to_json(self) -> JsonDict:
        """Return the JSON that the page sends; defaults are omitted.

        >>> ForwardPass(PagePrompt("to be", appended=(5,)), edits=(Scale("z.0"),)).to_json()
        {'prompt': {'text': 'to be', 'appended': [5]}, 'edits': [{'kind': 'scale', 'site': 'z.0', 'factor': 0.0}]}
        """
        table: JsonDict = {"prompt": _given(self.prompt)}
        if self.checkpoint:
            table["checkpoint"] = self.checkpoint
        if self.edits:
            table["edits"] = [{"kind": one.kind, **vars(one)} for one in self.edits]
            if self.patch_from is not None:
                table["patch_from"] = _given(self.patch_from)
        return table


def _given(text: PagePrompt) -> JsonDict:
    rest = {"target": text.target, "appended": list(text.appended), "masked": list(text.masked)}
    return {"text": text.text, **{name: value for name, value in rest.items() if value}}
