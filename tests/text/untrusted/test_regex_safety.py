"""Which regular expressions of a file may be run: those of published models, and none that could take for ever."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import tokenizers
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.errors import StoreError
from glasshouse.text.untrusted import regex as regex_safety

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN_UPPER, HAN_LOWER = (part[:-1] + r"&&[^\p{Han}]]" for part in (UPPER, LOWER))
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE, SPACE = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"

PUBLISHED = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4, Llama 3": rf"{SHORT}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}",
    "GPT-4, possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    "GPT-4o": rf"{BEFORE}{UPPER}*{LOWER}+{SHORT}?|{BEFORE}{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}",
    "Qwen2": rf"{SHORT}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}",
    "Kimi K2": rf"[\p{{Han}}]+|{BEFORE}{HAN_UPPER}*{HAN_LOWER}+{SHORT}?|{BEFORE}{HAN_UPPER}+{HAN_LOWER}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACE}",
    "Tekken": rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACE}",
    "DeepSeek-V3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
    "DeepSeek-V3, numbers": r"\p{N}{1,3}",
    "DeepSeek-V3, scripts": "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    "DeepSeek-Coder": r"\s?\p{L}+",
    "StarCoder, SmolLM": r"\d",
    "Falcon": r"[0-9][0-9][0-9]",
    "Gemma, T5": " {2,}",
    "CLIP": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "CLIP, spaces": r"\s+",
    "BLOOM": " ?[^(\\s|[.,!?…。\uff0c、।\u06d4،])]+",
    "SuperBPE": r"(?=(\d{3})+(?!\d))",
    "Aya": r"\d{1,3}(?=(?:\d{3})*\b)",
    "Chameleon": r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "Chameleon, sentinels": r"<sentinel:[0-9]+>",
}

OTHERS_THAT_MAY = [
    "",
    "a*",
    "a*b",
    "a{2}{3}",
    "a{1,500}b",
    "(?:abc)*d",
    "(?>a+)b",
    "(?<word>a)+",
    "(?<=a|bc)d",
    "(?i)a+b",
    "(?-i:[a-z]+)",
    "[[:alpha:]&&[^a-c]]+x",
    r"[\b\]\[\\^-]+",
    r"\x41\x{1F600}\u00e9\p{^L}\P{N}+",
    "a{,}",  # no repeat, but characters
    ".*.*.*",  # nothing can fail
    ".*.*(?:a|)",
]

SLOW = [
    "(a+)+$",
    "(a|a)*b",
    "(a|aa)+$",
    r"(\w*)*x",
    "a*a*b",
    "a*a*a*b",
    "a*a*b+",
    "a*a*b{1,3}",
    "a*(?:a|aa|aaa){6}",
    "(.*)(.*)(.*)(.*)x",
    "((a{1,100}){1,100}){1,100}",
    "((a{1,9}){1,9}){1,9}",
    "(?:x+x+)+y",
    "(?:a?){30}b",
    "a{1,100}a{1,100}b",
    "a+?a+?b",
    "(?:a|b|ab)*c",
    "a*(?=a*b)c",
    "(?=(a+)+b)",
    "(?<=a*)b",
    "a*(?i)b|a*c",  # to Oniguruma a*(?:b|a*c)
    "a{1,3}+b",  # to Oniguruma (?:a{1,3})+b, not possessive
    "(?:a{2}?)+b",  # to Oniguruma (?:(?:a{2})?)+b, not lazy
    "(?:a|aa){20,1}b",  # to Oniguruma {1,20}
    "a**",
    "(?:()(?=a)){10000}",
    "(?:()(?=a)){9900,}b",
    "(?:()(?=a)){99}{99}{99}",
    "(?i)[ﬀf]+$",  # to Oniguruma (?:ff|[ﬀf])+$
    r"(?i:\p{L}+)x",
    r"(?mmi:\p{L}+)x",
]

NOT_UNDERSTOOD = [
    "(a",
    "a)",
    "(a))(",
    "[a",
    "a]",
    "[[a]",
    "[]",
    "[]a]",
    "[^]a]",
    "[[:foo]a]",
    "\\",
    "*a",
    "a|+",
    "(?)",
    r"(a)\1+",
    r"(?<n>a)\k<n>",
    r"(?<n>a\g<n>?)",
    r"\g<0>",
    "(?R)",
    "(?(1)a|b)",
    "(?~a)",
    "(?{x})",
    "(*FAIL)",
    "(?x) a # [",
    "(?#[)a",
    r"\c[(a+)+$]",  # to Oniguruma the bracket belongs to \c
    r"\M-[(a+)+$]",
    r"\x{[}(a+)+$]",
    r"\Qa\E",
    r"[\c]]",
    "(" * 21 + ")" * 21,
    "[" * 21 + "a" + "]" * 21,
    "a" * 10_001,
]


@pytest.mark.parametrize("expression", [*PUBLISHED.values(), *OTHERS_THAT_MAY], ids=[*PUBLISHED, *OTHERS_THAT_MAY])
def test_what_published_models_use_may_run(expression: str) -> None:
    tokenizers.Regex(expression)  # what is accepted here means something to Oniguruma
    regex_safety.check_regex(expression)


@pytest.mark.parametrize("expression", SLOW)
def test_a_regex_with_excessive_backtracking_is_refused(expression: str) -> None:
    tokenizers.Regex(expression)
    with pytest.raises(StoreError, match=r"^the pattern '.*' repeats .*; find another\.$"):
        regex_safety.check_regex(expression)


@pytest.mark.parametrize("expression", NOT_UNDERSTOOD, ids=lambda expression: expression[:20])
def test_what_is_not_understood_is_refused(expression: str) -> None:
    with pytest.raises(StoreError, match=r"^the pattern '.*' (is|has|opens|closes) .*; find another\.$"):
        regex_safety.check_regex(expression)


@given(st.text(alphabet="()[]{}|*+?^$\\ab,:!=<>&-i12", max_size=30))
def test_any_text_is_accepted_or_refused(expression: str) -> None:
    with contextlib.suppress(StoreError):  # and nothing else
        regex_safety.check_regex(expression)


# A backtracking matcher that counts its steps: slow, obvious, and with no idea of the rules above.
Node = str | tuple  # type: ignore[type-arg] - ("then" | "or", a, b), ("repeat", a, low, high), ("ahead" | "not", a)


def written(node: Node) -> str:
    match node:
        case ("then", a, b):
            return written(a) + written(b)
        case ("or", a, b):
            return f"(?:{written(a)}|{written(b)})"
        case ("repeat", a, low, high):
            times = f"{{{low},{'' if high is None else high}}}"
            return written(a) + times if isinstance(a, str) else f"(?:{written(a)}){times}"
        case ("ahead", a):
            return f"(?={written(a)})"
        case ("not", a):
            return f"(?!{written(a)})"
    return str(node)


class Steps:
    def __init__(self, text: str) -> None:
        self.text, self.taken = text, 0

    def ends(self, node: Node, at: int) -> Iterator[int]:
        """Yield where a match from here can end, in the order in which a backtracking matcher finds them."""
        self.taken += 1
        assert self.taken < 300_000, "it takes for ever"
        match node:
            case ("then", a, b):
                for middle in self.ends(a, at):
                    yield from self.ends(b, middle)
            case ("or", a, b):
                yield from self.ends(a, at)
                yield from self.ends(b, at)
            case ("repeat", a, low, high):
                if high is None or high > 0:
                    for middle in self.ends(a, at):
                        if middle > at or low > 0:
                            rest = ("repeat", a, max(0, low - 1), None if high is None else high - 1)
                            yield from self.ends(rest, middle)
                if low == 0:
                    yield at
            case ("ahead" | "not", a):
                if (next(self.ends(a, at), None) is not None) == (node[0] == "ahead"):
                    yield at
            case str(characters):
                if self.text[at : at + 1] and self.text[at] in characters:
                    yield at + 1


def steps(node: Node, text: str) -> int:
    counter = Steps(text)
    next(counter.ends(node, 0), None)
    return counter.taken


def chained(parts: list[Node]) -> Node:
    return functools.reduce(lambda a, b: ("then", a, b), parts)


characters: st.SearchStrategy[Node] = st.sampled_from(["a", "[ab]", "[ab]", "b"])
bounds = st.sampled_from([(0, 1), (0, None), (0, None), (1, None), (1, None), (2, None), (2, 2), (1, 3)])


def parts(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.tuples(inner, bounds).map(lambda both: ("repeat", both[0], *both[1])),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.sampled_from(["ahead", "not"]), inner),
        inner,
    )


def sequences(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.lists(inner, min_size=1, max_size=3).map(chained)


nodes = sequences(parts(sequences(parts(characters)) | characters))


@settings(max_examples=up_to(600), derandomize=True, deadline=None)
@given(node=nodes, last=st.sampled_from(["", "c"]), unit=st.sampled_from(["a", "ab", "aab"]))
def test_what_is_accepted_takes_linear_time_from_each_place(node: Node, last: str, unit: str) -> None:
    node = ("then", node, last) if last else node  # what never comes makes all before it fail
    try:
        regex_safety.check_regex(written(node))
    except StoreError:
        return
    # Twice the length, twice the further steps. Every period here divides 12, so that lengths fit alike.
    short, middle, long = (steps(node, unit * (n // len(unit))) for n in (24, 48, 96))
    assert long - middle <= 2 * (middle - short)


def test_the_slow_reference_detects_superlinear_patterns() -> None:
    twice: Node = ("then", ("repeat", "a", 0, None), ("then", ("repeat", "a", 0, None), "b"))
    short, middle, long = (steps(twice, "a" * n) for n in (24, 48, 96))
    assert long - middle > 2 * (middle - short)
    nested: Node = ("then", ("repeat", ("repeat", "a", 1, None), 1, None), "b")
    with pytest.raises(AssertionError, match="for ever"):
        steps(nested, "a" * 48)
