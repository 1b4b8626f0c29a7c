"""Writes an encoder or a decoder as an ONNX graph, by torch's exporter."""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from glasshouse import store
from glasshouse.errors import InputError
from glasshouse.models import Decoder, Encoder, Model
from glasshouse.text import Tokenizer
from glasshouse.text.tokenizer_folder import TOKENIZER

INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # as in transformers; the last where there are segments
OUTPUTS = {"none": "last_hidden_state", "pooled": "sentence_embedding"}  # by the kind of head; of others, logits
EXAMPLE = (3, 5)  # rows and tokens of the example that is traced: not equal, nor 0 or 1, which would be fixed


class _Graph(nn.Module):
    """A model by the inputs that programs for ONNX know."""

    def __init__(self, model: Decoder | Encoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        more = {} if token_type_ids is None else {"segments": token_type_ids}
        return self.model(input_ids, mask=attention_mask.bool(), **more)


def write_onnx(file: Path, model: Model, tok: Tokenizer | None) -> None:
    """Write a model in float32, and its tokenizer's files beside it; batch and length are free."""
    if not isinstance(model, Decoder | Encoder):
        raise InputError(
            "the model is an encoder-decoder, but only encoders and decoders go to ONNX; export a folder."
        )
    if importlib.util.find_spec("onnxscript") is None:
        raise InputError("ONNX files need onnxscript; install it with pip install 'glasshouse[onnx]'.")
    file = file.expanduser()
    if file.is_dir():
        raise InputError(f"{str(file)!r} is a folder; name a file.")
    present = Tokenizer.load(file.parent) if (file.parent / TOKENIZER).exists() else None
    if tok is not None and present is not None and present.fingerprint != tok.fingerprint:
        raise InputError(
            f"{str(file.parent)!r} has the {TOKENIZER} of another model, and this one's would replace it; choose "
            "another folder."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    program = _program(model)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        program.save(Path(folder) / file.name)
        for written in sorted(Path(folder).iterdir(), reverse=True):  # weights beyond 2 GB, which are a file, first
            store.flush(written)
            written.replace(file.parent / written.name)
    if tok is not None:
        tok.save(file.parent)


def _program(model: Decoder | Encoder) -> torch.onnx.ONNXProgram:
    """Return the graph of a model with its weights."""
    graph = _Graph(copy.deepcopy(model).cpu().float()).eval()
    has_segments = isinstance(model, Encoder) and bool(model.spec.n_segments)
    names = INPUTS if has_segments else INPUTS[:2]
    sizes = {0: Dim("batch", min=1), 1: Dim("length", min=1, max=model.spec.position_limit)}
    shapes = (sizes,) * len(names)
    with torch.no_grad(), _quiet():
        # Strictly: `len` of a tensor would fix a size otherwise. Apart, as the next step would fix it without a word.
        exported = torch.export.export(
            graph, tuple(torch.ones(EXAMPLE, dtype=torch.long) for _ in names), dynamic_shapes=shapes, strict=True
        )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            input_names=list(names),
            output_names=[OUTPUTS.get(model.spec.head.kind, "logits")],
            dynamic_shapes=shapes,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph:
        node.metadata_props.clear()  # lines of our code, with its folder on this machine
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what the exporter says of itself, such as that there is no torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
