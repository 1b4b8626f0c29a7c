"""A linear probe as a stop rule: fitted on a property of text that can be checked, and counted over many answers.

    python benchmarks/probe_rule.py [--answers 1000] [--new 64] [--save]

The property is whether a token of Python code is inside a string or a comment, which a scanner of the text knows. The
probe is fitted on files of the corpus stdlib that python-3m was not trained on; answers continue lines of other such
files, outside of a string. A rule that stops where one or three tokens in a row are above a threshold is right where
the scanner says the same of those tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections import Counter

from figures import add_save, record, save

import glasshouse as gh
from glasshouse.generation import Rule

SITE = "resid_post.4"
LITERAL = re.compile(
    r"""\#[^\n]* | (?:\b[rbuf]{1,2})?(?: '{3}.*?(?:'{3}|\Z) | "{3}.*?(?:"{3}|\Z)
    | '(?:\\.|[^'\\\n])*(?:'|$|(?=\n)) | "(?:\\.|[^"\\\n])*(?:"|$|(?=\n)))""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)


def inside(tok: gh.Tokenizer, text: str) -> list[bool]:
    """Return whether the last character of each token is inside a string or comment, its delimiters included."""
    marks = bytearray(len(text.encode()))
    for one in LITERAL.finditer(text):
        start, end = (len(text[:at].encode()) for at in one.span())
        marks[start:end] = b"\1" * (end - start)
    ends = itertools.accumulate(len(tok.decode_bytes([token])) for token in tok.encode(text))
    return [bool(marks[end - 1]) for end in ends]


def first_row(flags: list[bool], count: int) -> int | None:
    """Return where the first row of so many true flags ends."""
    ends = range(count - 1, len(flags))
    return next((end for end in ends if all(flags[end - count + 1 : end + 1])), None)


def outcome(scores: list[float], flags: list[bool], above: float, consecutive: int) -> str:
    """Return what a rule does in an answer: right, false, late, missed, or quiet where it is to be."""
    fires = first_row([score > above for score in scores], consecutive)
    true = first_row(flags[: len(scores)], consecutive)  # the last token may have no score
    if fires is None:
        return "quiet" if true is None else "missed"
    if not all(flags[fires - consecutive + 1 : fires + 1]):
        return "false"
    return "late" if true is not None and fires > true else "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000, help="to count over (default 1000)")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer (default 64)")
    add_save(parser)
    args = parser.parse_args()
    model, tok = gh.load("python-3m")
    files = [
        text for _, text in gh.data.builtin_dataset("stdlib").items("test") if text.isascii() and len(text) > 500
    ]
    random.Random(0).shuffle(files)
    half = len(files) // 2
    texts = [text[:3000] for text in files[:half]]
    probe = gh.probe(model, tok, texts, [inside(tok, text) for text in texts], site=SITE)
    print(f"{probe}, on {len(texts)} files")

    engine = gh.Engine(model, tok, slots=32, max_len=256, probes={"inside": probe})
    draw = random.Random(1)
    prompts = []
    while len(prompts) < args.answers:
        lines = draw.choice(files[half:]).splitlines(keepends=True)
        start = draw.randrange(len(lines))
        prompt = "".join(lines[start : start + 8])[:400]
        if prompt.strip() and not (flags := inside(tok, prompt))[-1] and len(flags) < 150:
            prompts.append(prompt)
    plain = [
        engine.submit(prompt, max_new_tokens=args.new, temperature=1.0, seed=number, probes=["inside"])
        for number, prompt in enumerate(prompts)
    ]
    engine.run()
    marks = []
    for prompt, one in zip(prompts, plain, strict=True):
        ids = tok.encode(prompt)
        marks.append(inside(tok, tok.decode([*ids, *one.ids]))[len(ids) :][: len(one.ids)])
    for consecutive, above in itertools.product((1, 3), (0.0, 2.0, 4.0)):
        pairs = zip(plain, marks, strict=True)
        counts = Counter(outcome(one.scores["inside"], flags, above, consecutive) for one, flags in pairs)
        name = f"probe_rule.{consecutive}_above_{above:g}"
        print(f"{consecutive} in a row above {above:g}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
        record(f"{name}_false", counts["false"] / args.answers, 1, "%")
        record(f"{name}_missed", counts["missed"] / args.answers, 1, "%")
    rule = Rule("inside", 2.0, "stop", consecutive=3)
    ruled = [
        engine.submit(prompt, max_new_tokens=args.new, temperature=1.0, seed=number, rules=rule)
        for number, prompt in enumerate(prompts)
    ]
    engine.run()
    same = 0  # in another batch a sum may round differently, and another token be drawn
    for alone, one in zip(plain, ruled, strict=True):
        at = first_row([score > rule.above for score in alone.scores["inside"]], rule.consecutive)
        same += one.ids == (alone.ids if at is None else alone.ids[: at + 1])
    print(f"the engine ended {same} of {args.answers} answers there and changed nothing before")
    record("probe_rule.accuracy", probe.accuracy, 3)
    record("probe_rule.auc", probe.auc, 3)
    save(args.save)


if __name__ == "__main__":
    main()
