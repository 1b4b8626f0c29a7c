"""Tokens per forward pass with the draft heads of multi-token prediction, and that the output is the same.

    python benchmarks/multi_token.py [--out runs/drafts] [--tokens 200] [train.steps=300 ...]

Trains the recipe `stdlib` with `train.objective = { kind = "multi_token", n = 4 }`, or takes the finished run, and
continues beginnings of files that it was not trained on, one at a time, without drafts and with those of its heads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import glasshouse as gh
from glasshouse.data import builtin_dataset
from glasshouse.generation import DraftHeads

PROMPTS, LENGTH = 8, 16  # files, and tokens of each
OBJECTIVE = 'train.objective={ kind = "multi_token", n = 4 }'


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/drafts"))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("settings", nargs="*", help="settings of the recipe to override")
    args = parser.parse_args()
    began = time.perf_counter()
    result = gh.train(gh.Run.load("stdlib", OBJECTIVE, f"train.out={args.out}", *args.settings))
    minutes = (time.perf_counter() - began) / 60
    model, tok = gh.load(args.out)
    assert isinstance(model, gh.models.Decoder)
    assert tok is not None
    texts = [text for _, text in builtin_dataset("stdlib").items("test")][:PROMPTS]
    prompts = [tok.encode(text)[:LENGTH] for text in texts]
    print(f"\nafter {result.steps} steps in {minutes:.1f} minutes: acceptance rate on the validation set "
          f"{result.report.metrics['acceptance_rate']:.1%}\n")  # fmt: skip
    print("| | tokens per pass | drafts accepted | tokens/s | same output |\n|---|---|---|---|---|")
    for temperature in (0.0, 0.8):
        expected: list[list[int]] = []
        for name, speculator in (("no drafts", None), ("draft heads", DraftHeads(model))):
            engine = gh.Engine(model, tok, slots=1, max_len=LENGTH + args.tokens, speculator=speculator)
            began = time.perf_counter()
            found = []
            for prompt in prompts:
                request = engine.submit(
                    prompt, max_new_tokens=args.tokens, temperature=temperature, min_new_tokens=args.tokens
                )
                engine.run()
                found.append(request.ids)
            speed = sum(map(len, found)) / (time.perf_counter() - began)
            expected = expected or found
            stats = engine.speculation
            accepted = f"{stats.acceptance_rate:.0%}" if stats.n_drafts else "-"
            print(
                f"| {name}, temperature {temperature:g} | {stats.tokens_per_pass:.2f} | {accepted} | {speed:,.0f} | "
                f"{'yes' if found == expected else 'NO'} |"
            )


if __name__ == "__main__":
    main()
