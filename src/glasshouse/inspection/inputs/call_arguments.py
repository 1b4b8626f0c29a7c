"""The arguments of one call of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class CallArguments(NamedTuple):
    """The positional and keyword arguments of a model."""

    inputs: tuple[Tensor, ...]
    model_kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> Tensor:
        """Return the output of a model."""
        output: Tensor = model(*self.inputs, **self.model_kwargs)
        return output

    def repeated(self, copies: int) -> CallArguments:
        """Return the arguments of a batch of copies, one after the other.

        >>> import torch
        >>> one = CallArguments((torch.tensor([[1, 2]]),), {"lengths": torch.tensor([2])})
        >>> one.repeated(2)
        CallArguments(inputs=(tensor([[1, 2],
                [1, 2]]),), model_kwargs={'lengths': tensor([2, 2])})
        """
        # Every keyword but logits_to_keep has a batch axis.
        kwargs = {
            name: given if name == "logits_to_keep" else _repeat(given, copies)
            for name, given in self.model_kwargs.items()
        }
        return CallArguments(tuple(_repeat(given, copies) for given in self.inputs), kwargs)


def _repeat(given: Any, copies: int) -> Any:  # noqa: ANN401 - whatever the model takes
    return given.repeat(copies, *(1 for _ in given.shape[1:])) if isinstance(given, Tensor) else given
