"""The built-in sets: right answers, found again by slower means; the same on every run; nothing in two splits."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import tokenize
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import babel
import pytest
from babel.dates import format_date

from glasshouse.data.builtin import (
    BuiltinDataset,
    builtin_dataset,
    builtin_datasets,
    chat,
    cldr,
    dates,
    langid,
    paraphrases,
    stdlib,
)
from glasshouse.errors import InputError

GENERATED = ("dates", "langid", "chat", "paraphrases", "preferences")
SPLITS = ("train", "validation", "test")
YEAR = [datetime.date(2024, 1, 1) + datetime.timedelta(days) for days in range(366)]


def texts(item: object) -> list[str]:
    if isinstance(item, tuple):
        return list(item)
    assert isinstance(item, list)
    return [message["content"] for message in item]


def sample(name: str, split: str = "train", size: int = 2000) -> list[object]:
    return list(itertools.islice(builtin_dataset(name).items(split), size))


# What holds for all of them.


def test_the_names_and_kinds() -> None:
    kinds = {name: builtin_dataset(name).kind for name in builtin_datasets()}
    assert kinds == {
        "stdlib": "text",
        "dates": "pairs",
        "langid": "labelled",
        "chat": "chat",
        "paraphrases": "pairs",
        "preferences": "preferences",
    }
    for name in builtin_datasets():
        assert builtin_dataset(name).description.endswith(".")
        assert bool(builtin_dataset(name).labels) == (name == "langid")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", builtin_datasets())
@pytest.mark.parametrize("split", SPLITS)
def test_items_from_a_start_are_the_tail_and_nothing_before_is_made(name: str, split: str) -> None:
    made = []

    def item(split: str, index: int) -> object:
        made.append(index)
        return builtin_dataset(name).item(split, index)

    whole = builtin_dataset(name, train=3000) if name in GENERATED else builtin_dataset(name)
    size = whole.sizes()[split]
    assert size > 50
    watched: BuiltinDataset = dataclasses.replace(whole, item=item)
    tail = list(watched.items(split, start=size - 20))
    assert made == list(range(size - 20, size))
    assert tail == list(whole.items(split))[-20:]
    assert list(whole.items(split, start=size + 5)) == []


@pytest.mark.few(4)
@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("split", SPLITS)
def test_texts_are_clean(name: str, split: str) -> None:
    for item in sample(name, split):
        for text in texts(item):
            assert text.strip() == text != ""
            assert "<|" not in text
            assert "  " not in text
            assert text == unicodedata.normalize("NFC", text)
            # Joiners are spelling in Persian, Malayalam and Bengali; nothing else invisible is.
            assert not {unicodedata.category(c) for c in text if c not in "\u200c\u200d"} & {"Cc", "Cf", "Co", "Cn"}
            assert {c for c in text if c.isspace()} <= {" "}


def test_a_larger_set_begins_with_the_smaller() -> None:
    assert list(builtin_dataset("dates", test=7).items("test")) == sample("dates", "test", 7)
    assert builtin_dataset("dates", test=7).sizes() == {"train": 50_000, "validation": 2_000, "test": 7}
    assert builtin_dataset("dates").sizes()["test"] == 2_000


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: builtin_dataset("lang_id"), "no built-in dataset 'lang_id'; did you mean langid?"),
        (lambda: builtin_dataset("dates").items("tests"), "no split 'tests' of dates; did you mean test?"),
        (lambda: builtin_dataset("dates").items(start=-1), "start is -1, but it must be 0 or more."),
        (lambda: builtin_dataset("dates", trian=5), "no split 'trian' of dates; did you mean train?"),
        (lambda: builtin_dataset("dates", train=-5), "train is -5, but a size must be 0 or more."),
        (lambda: builtin_dataset("stdlib", train=5), "stdlib has a fixed size"),
    ],
)
def test_mistakes_are_one_sentence(call: functools.partial[object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        call()


def python(script: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return run.stdout


@pytest.mark.long
@pytest.mark.slow
def test_processes_agree() -> None:
    assert os.environ.get("PYTHONHASHSEED") != "12345"
    script = (
        "import hashlib, itertools\n"
        "from glasshouse.data.builtin import builtin_dataset, builtin_datasets\n"
        "for name, split in itertools.product(builtin_datasets(), ('test', 'train')):\n"
        "    items = list(itertools.islice(builtin_dataset(name).items(split, start=30), 300))\n"
        "    print(name, split, hashlib.sha256(repr(items).encode()).hexdigest())\n"
    )
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(script, {})
    assert python(script) == here.getvalue() != ""


def test_without_babel() -> None:
    script = (
        "import sys\n"
        "from glasshouse.data.builtin import builtin_dataset\n"
        "assert 'babel' not in sys.modules\n"
        "sys.modules['babel'] = None\n"
        "print(next(builtin_dataset('stdlib').items())[0], builtin_dataset('langid').labels[0])\n"
        "for name in ('dates', 'langid', 'chat', 'preferences'):\n"
        "    try:\n"
        "        list(builtin_dataset(name).items('test'))\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    first, *errors = python(script).splitlines()
    assert first == "__future__.py en"
    assert len(errors) == 4
    for error in errors:
        assert error.startswith("InputError this dataset")
        assert error.endswith("run pip install 'glasshouse[cldr]'.")


# The standard library.


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for number in range(60):
        (tmp_path / f"module{number:02}.py").write_text(f"number = {number}\n")
    monkeypatch.setattr(stdlib, "_library", lambda: tmp_path)
    stdlib._files.cache_clear()
    yield tmp_path
    stdlib._files.cache_clear()


def every_name() -> list[str]:
    return [name for split in SPLITS for name, _ in builtin_dataset("stdlib").items(split)]


def test_the_library_leaves_out_what_is_no_text_of_its_own(library: Path) -> None:
    for folder in ("site-packages", "dist-packages", "__pycache__", "package"):
        (library / folder).mkdir()
        (library / folder / "module.py").write_text(f"{folder = }\n")
    (library / "blank.py").write_text(" \n")
    (library / "copy.py").write_text("number = 7\n")
    (library / "notes.txt").write_text("not Python\n")
    (library / "broken.py").write_bytes(b"name = '\xff\xfe'\n")
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (library / "nonsense.py").write_bytes(b"# -*- coding: no-such-code -*-\n")
    (library / "nowhere.py").symlink_to(library / "gone.py")
    (library / "windows.py").write_bytes(b"\xef\xbb\xbfname = 1\r\nname = 2\r\n")
    (library / "cookie.py").write_bytes("# coding: utf8\nname = 'é'\n".encode())
    modules = {f"module{number:02}.py" for number in range(60)} - {"module07.py"}  # copy.py is sorted before it
    assert set(every_name()) == modules | {"package/module.py", "windows.py", "cookie.py", "copy.py"}
    assert len(every_name()) == 63
    documents = dict(itertools.chain.from_iterable(builtin_dataset("stdlib").items(split) for split in SPLITS))
    assert documents["windows.py"] == "name = 1\nname = 2\n"
    assert documents["cookie.py"] == "# coding: utf8\nname = 'é'\n"


def test_a_library_without_sources_is_an_error(library: Path) -> None:
    for number in range(11):
        (library / f"module{number:02}.py").unlink()
    with pytest.raises(InputError, match=r"has 49 Python files, too few"):
        builtin_dataset("stdlib").items()


@pytest.mark.long
@pytest.mark.slow
def test_the_library_of_this_interpreter() -> None:
    names = every_name()
    assert len(names) == len(set(names)) == sum(builtin_dataset("stdlib").sizes().values())
    assert {"argparse.py", "json/decoder.py", "typing.py"} <= set(names)
    assert not any("site-packages" in name for name in names)
    for split in SPLITS:
        listed = [name for name, _ in builtin_dataset("stdlib").items(split)]
        assert listed == sorted(listed)
    sizes = builtin_dataset("stdlib").sizes()
    assert 0.03 < sizes["validation"] / len(names) < 0.08
    assert 0.03 < sizes["test"] / len(names) < 0.08
    name, text = next(builtin_dataset("stdlib").items("validation", start=3))
    with tokenize.open(Path(tokenize.__file__).parent / name) as file:
        assert text == file.read()


# Dates.


@pytest.mark.parametrize(
    ("locale", "date", "written"),
    [
        ("en-US", "2021-03-04", "Thursday, March 4, 2021"),
        ("en-US", "2021-03-04", "en-US: 3/4/2021"),
        ("en-GB", "2021-03-04", "en-GB: 04/03/2021"),
        ("de", "2021-03-04", "Donnerstag, 4. März 2021"),
        ("fr", "1999-12-31", "vendredi 31 décembre 1999"),
        ("es", "2021-03-04", "es: 4/3/2021"),
        ("ru", "2021-03-04", "4 марта 2021 г."),  # noqa: RUF001
        ("fi", "2021-03-04", "torstai 4. maaliskuuta 2021"),
        ("hu", "2000-01-01", "hu: 2000. 01. 01."),
        ("sv", "2021-03-04", "sv: 2021-03-04"),
        ("hr", "2021-10-04", "hr: 4. listopada 2021."),
        ("pl", "2021-11-04", "pl: 4 listopada 2021"),
        ("pl", "2021-10-04", "4 października 2021"),
        ("hr", "2021-06-04", "hr: 4. lip 2021."),
        ("ar", "2021-03-04", "ar: 4/3/2021"),
        ("he", "2021-03-04", "4 במרץ 2021"),
        ("fa", "2021-03-02", "سه\u200cشنبه 2 مارس 2021"),  # noqa: RUF001
        ("th", "2021-03-04", "4 มีนาคม ค.ศ. 2021"),
        ("ja", "2021-03-04", "2021年3月4日木曜日"),
        ("zh", "2021-03-04", "2021年3月4日"),
        ("ko", "2021-12-25", "2021년 12월 25일 토요일"),
    ],
)
def test_dates_by_hand(locale: str, date: str, written: str) -> None:
    assert written in [form.write(datetime.date.fromisoformat(date)) for form in dates.formats()[locale]]


YEAR_FIRST = {"sv", "af", "lt", "hu", "eu", "fa", "ko", "ja", "zh", "zh-Hant"}


def read_numbers(source: str) -> str | None:
    """Read a tagged date whose month is a number, by a table of who puts what first."""
    tag, colon, text = source.partition(": ")
    numbers = re.findall(r"\d+", re.sub(r"^Th \d, ", "", text))  # Vietnamese counts its weekdays
    if not colon or len(numbers) != 3:
        return None
    year, month, day = numbers if tag in YEAR_FIRST else (*numbers[2:], *numbers[1::-1])
    if tag == "en-US":
        month, day = day, month
    return f"{year}-{int(month):02}-{int(day):02}"


@pytest.mark.long
def test_numeric_dates_by_an_independent_reader() -> None:
    read = Counter()
    for locale, forms in dates.formats().items():
        for form, date in itertools.product(forms, YEAR):
            if (iso := read_numbers(form.write(date))) is not None:
                read[locale] += 1
                assert iso == date.isoformat(), form
    assert set(read) == set(dates.LOCALES)


@pytest.mark.long
def test_no_text_means_two_dates_in_a_leap_year() -> None:
    # The year is the one number of four digits, so what holds in one year holds in all.
    meaning: dict[str, datetime.date] = {}
    for form in itertools.chain.from_iterable(dates.formats().values()):
        for date in YEAR:
            source = form.write(date)
            assert re.findall(r"\d{3,}", source) == ["2024"]
            assert meaning.setdefault(source, date) == date
    assert len(meaning) > 80_000


@pytest.mark.long
@pytest.mark.slow
def test_no_text_means_two_dates_in_a_large_sample() -> None:
    meaning: dict[str, str] = {}
    seen = Counter()
    for source, target in builtin_dataset("dates", train=50_000).items():
        assert meaning.setdefault(source, target) == target
        assert "1900-01-01" <= target <= "2099-12-31"
        assert target[:4] in source
        seen[target[5:7]] += 1
    assert len(meaning) > 48_750
    assert min(seen.values()) > 3500


@functools.cache
def babels_patterns(locale: str) -> list[str]:
    own = babel.Locale.parse(locale, sep="-")
    keys = [key for key in own.datetime_skeletons if re.fullmatch("yM+E*d", key)]
    patterns = [own.date_formats[style] for style in own.date_formats]
    patterns += [own.datetime_skeletons[key] for key in keys]
    return [re.sub("y+", "y", pattern.pattern) for pattern in patterns]


def babel_writes(source: str, target: str) -> bool:
    """Say whether some pattern of some locale gives the text, as Babel itself formats it."""
    tag = re.match(r"([a-z]{2}(?:-[A-Za-z]+)?): ", source)
    text = source[tag.end() :] if tag else source
    for locale in [tag[1]] if tag else dates.LOCALES:
        for pattern in babels_patterns(locale):
            written = format_date(datetime.date.fromisoformat(target), pattern, locale.replace("-", "_"))
            if re.sub("\u200f|\u200e", "", written).replace("\u202f", " ").replace("\xa0", " ") == text:
                return True
    return False


def test_dates_are_as_babel_writes_them() -> None:
    for source, target in sample("dates", "validation", 150):
        assert babel_writes(source, target), source


def test_every_locale_has_names_and_numbers() -> None:
    assert len(dates.LOCALES) == len(set(dates.LOCALES)) == 60
    for locale, forms in dates.formats().items():
        tagged = [len(form.ambiguous_months) == 12 for form in forms]
        assert any(tagged), locale
        assert not all(tagged), locale
        for form in forms:
            names = [tuple(texts.values()) for texts in form.months]
            assert len(set(names)) == 12
            assert len({tuple(texts.values()) for texts in form.weekdays}) in (1, 7)


@pytest.mark.long
def test_no_date_is_in_two_splits() -> None:
    iso = {split: {target for _, target in sample("dates", split, 50_000)} for split in SPLITS}
    assert not iso["train"] & (iso["validation"] | iso["test"])
    assert not iso["validation"] & iso["test"]
    assert sum(map(len, dates._days().values())) == 73_049  # 200 years


# Languages.


@functools.cache
def babels_names(language: str) -> frozenset[str]:
    own = babel.Locale.parse(language)
    groups = (own.territories, own.languages, own.scripts, own.currencies)
    everything = itertools.chain.from_iterable(group.values() for group in groups)
    return frozenset(re.sub("\u200f|\u200e", "", name).replace("\xa0", " ") for name in everything)


def languages_of(text: str) -> set[str]:
    return {language for language in langid.LANGUAGES if set(text.split(", ")) <= babels_names(language)}


@pytest.mark.few(1)
@pytest.mark.parametrize("split", SPLITS)
def test_five_names_are_in_one_language_only(split: str) -> None:
    for text, label in sample("langid", split):
        assert len(set(text.split(", "))) == 5
        assert languages_of(text) == {label}


@pytest.mark.long
def test_labels_are_balanced() -> None:
    labels = builtin_dataset("langid").labels
    assert len(labels) == len(set(labels)) == 64
    counts = Counter(label for _, label in builtin_dataset("langid").items("train"))
    assert set(counts) == set(labels)
    assert 670 < min(counts.values()) <= max(counts.values()) < 892  # 781 each, give or take four deviations


def test_every_language_has_enough_names_in_every_split() -> None:
    for split in SPLITS:
        for language, own in langid.names()[split].items():
            assert len(own) == len(set(own)) >= 30, (split, language)


def test_the_best_possible_accuracy_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Evenly a, b or c. Every name of a tells: 1. Of b's four, Rom is likelier a's (1/2 against 1/4): 3/4. Of c's
    # eight, Rom is a's and Paris and Oslo are b's: 5/8.
    a, b = ("Rom", "Wien"), ("Paris", "Rom", "Oslo", "Praha")
    c = ("Rom", "Paris", "Oslo", *"12345")
    monkeypatch.setattr(langid, "names", lambda: {"test": {"c": c, "a": a, "b": b}})
    assert langid.bayes_accuracy("test") == (1 + 3 / 4 + 5 / 8) / 3


@pytest.mark.long
@pytest.mark.parametrize("split", SPLITS)
def test_the_best_possible_accuracy_by_enumeration(split: str) -> None:
    known = langid.names()[split]
    chances: dict[str, dict[str, Fraction]] = defaultdict(dict)
    for language in langid.LANGUAGES:
        for name in known[language]:
            chances[name][language] = Fraction(1, len(langid.LANGUAGES) * len(known[language]))
    highest = Counter(max(by.values()) for by in chances.values())
    everything = Counter(chance for by in chances.values() for chance in by.values())
    assert sum(chance * times for chance, times in everything.items()) == 1
    exact = sum(chance * times for chance, times in highest.items())
    assert langid.bayes_accuracy(split) == pytest.approx(float(exact), rel=1e-12)  # 64 divisions, each right to 1e-16


def test_every_language_has_an_english_name() -> None:
    names = [cldr.locale("en").languages[code] for code in langid.LANGUAGES]
    assert len(set(names)) == len(names)


@pytest.mark.long
def test_no_name_is_in_two_splits_nor_left_in_english() -> None:
    shown: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for text, label in sample("langid", split, 20_000):
            names = text.split(", ")
            shown[split] |= {name.lower() for name in names}
            if label != "en":
                assert not babels_names("en") & set(names)
            assert not re.search(r"\d", text)
    assert len(shown["train"]) > 30_000
    assert not shown["train"] & (shown["validation"] | shown["test"])
    assert not shown["validation"] & shown["test"]


def test_a_name_is_more_than_its_code() -> None:
    for language in langid.LANGUAGES:
        for key, name in cldr.names(language).items():
            assert key.partition(":")[2] != name


# Conversations.

TERSE = {"Answer with the result alone.", "Give only the answer, with no other words."}


def solve(question: str, same: str) -> tuple[str | None, str]:
    """Work out the answer with a pencil, and say what a later question would mean by `the same`.

    A date is checked elsewhere, and has no answer here.
    """
    quoted = re.search(r'"([A-Za-z]+)"', question)
    if "ISO" in question:
        return None, ""
    if re.match("Which language|Name the language", question):
        (code,) = languages_of(question.split(": ", 1)[1].removesuffix("?"))
        return babel.Locale.parse(code).get_display_name("en"), ""
    shown = same if "the same" in question else quoted[1] if quoted else question.split(": ", 1)[1].rstrip(".?")
    assert shown
    items = shown.split(", ")
    if "the same" not in question:  # without the word that it is about, which "letters" can be
        question = "".join(question.rpartition(shown)[::2])
    if "spell" in question.lower() or "letter by letter" in question:
        answer = shown[0]
        for letter in shown[1:]:
            answer += "-" + letter
    elif "vowels" in question:
        answer = str(len(re.findall("(?i)[aeiou]", shown)))
    elif "How many letters" in question or "ount the letters" in question or "How long" in question:
        answer = str(len(re.findall("[A-Za-z]", shown)))
    elif "backwards" in question or "everse" in question:
        answer = ""
        for letter in shown:
            answer = letter + answer
    elif "capital" in question:
        answer = "".join(chr(ord(c) - 32) if c >= "a" else c for c in shown)
    elif "How many words" in question or "ount the" in question:
        answer = str(shown.count(",") + 1)
    elif "longest" in question:
        (answer,) = [word for word in items if all(len(word) > len(other) for other in items if other != word)]
    elif "last in the alphabet" in question:
        (answer,) = [word for word in items if not any(word.lower() < other.lower() for other in items)]
    else:
        assert "lphabetical" in question
        left, ordered = list(items), []
        while left:
            (first,) = [word for word in left if not any(other.lower() < word.lower() for other in left)]
            ordered.append(first)
            left.remove(first)
        answer = ", ".join(ordered)
    return answer, shown


@pytest.mark.few(1)
@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right(split: str) -> None:
    dates_left = 25
    for messages in sample("chat", split):
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        turns = messages[1:] if system else messages
        assert [message["role"] for message in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert 1 <= len(turns) // 2 <= 3
        same = ""
        for user, assistant in zip(turns[::2], turns[1::2], strict=True):
            answer, same = solve(user["content"], same)
            reply = assistant["content"]
            if answer is None:
                answer = re.search(r"\d{4}-\d\d-\d\d", reply)[0]
                if dates_left:
                    dates_left -= 1
                    assert babel_writes(re.split("form: |date: ", user["content"])[1], answer)
            if system in TERSE:
                assert reply == answer
            else:
                assert reply.endswith(f" {answer}.") or reply in (
                    f"It has {answer} letters.",
                    f"The list has {answer} words.",
                )
    assert not dates_left


def test_conversations_vary() -> None:
    lengths, systems, openings = Counter(), Counter(), Counter()
    for messages in sample("chat", size=5000):
        lengths[sum(message["role"] == "user" for message in messages)] += 1
        systems[messages[0]["content"] if messages[0]["role"] == "system" else ""] += 1
        for message in messages:
            if message["role"] == "user":
                openings[re.sub(r'"\w+"|: .*', "", message["content"])] += 1
    assert min(lengths[1], lengths[2], lengths[3]) > 700
    assert len(systems) == 6
    assert len(openings) == 41
    assert min(openings.values()) > 20


@pytest.mark.long
def test_no_word_is_in_two_splits() -> None:
    shown: dict[str, set[str]] = defaultdict(set)
    asked: dict[str, set[str]] = defaultdict(set)
    for split in SPLITS:
        for message in itertools.chain.from_iterable(sample("chat", split, 20_000)):
            text = message["content"]
            if message["role"] != "user" or "ISO" in text or "the same" in text:
                continue
            quoted = re.findall(r'"(\w+)"', text)
            words = quoted or text.split(": ", 1)[1].rstrip(".?").split(", ")
            (asked if re.match("Which language|Name the language", text) else shown)[split] |= {
                word.lower() for word in words
            }
    for one, other in itertools.permutations(SPLITS, 2):
        assert not shown[one] & shown[other]
        assert not asked[one] & asked[other]
        assert not {word for word in shown[one] & asked[other] if word in {n.lower() for n in babels_names("en")}}
    assert len(shown["train"]) > 2000
    assert min(len(shown["validation"]), len(shown["test"])) > 80
    assert {word for split in SPLITS for word in chat.words()[split] if word.lower() == "france"} == {"France"}


# Paraphrases.


def meaning_of(text: str) -> tuple[int, ...]:
    """Read a sentence again: who, whom, the action, the thing and the time, each by its number."""
    text = text.removesuffix(".")
    times = []
    for time, phrases in enumerate(paraphrases.TIMES):
        for phrase in phrases:
            if text.lower().startswith(f"{phrase}, "):
                times.append((time, text[len(phrase) + 2 :]))
            elif text.endswith(f" {phrase}"):
                times.append((time, text.removesuffix(f" {phrase}")))
    ((time, rest),) = times
    word = r"(?P<{}>\w+)".format
    found = [
        (action, match)
        for action, forms in enumerate(paraphrases.ACTIONS)
        for form in forms
        if (
            match := re.fullmatch(
                form.format(one=word("one"), other=word("other"), thing=f"the {word('thing')}"), rest
            )
        )
    ]
    ((action, match),) = found
    (one,), (other,), (thing,) = (
        [number for number, forms in enumerate(choices) if match[name] in forms]
        for name, choices in (
            ("one", paraphrases.PEOPLE),
            ("other", paraphrases.PEOPLE),
            ("thing", paraphrases.THINGS),
        )
    )
    return one, other, action, thing, time


@pytest.mark.parametrize("split", SPLITS)
def test_paraphrases_mean_the_same_in_other_words(split: str) -> None:
    little = {*"the a at by to from of in with".split(), "ago"}  # noqa: SIM905
    for text, match in sample("paraphrases", split, 1000):  # type: ignore[attr-defined]
        assert meaning_of(text) == meaning_of(match)
        words = [{*re.findall(r"\w+", side.lower())} for side in (text, match)]
        assert words[0] & words[1] <= little


def test_meanings_are_in_one_split_and_have_their_twin_there() -> None:
    known = {split: {*paraphrases._meanings()[split]} for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not known[one] & known[other]
    for split in SPLITS:
        assert {(other, one, *rest) for one, other, *rest in known[split]} == known[split]
        assert {meaning_of(text) for text, _ in sample("paraphrases", split, 1000)} <= known[split]  # type: ignore[attr-defined]
    for split in ("validation", "test"):  # a text has one match only
        assert len({meaning_of(text) for text, _ in builtin_dataset("paraphrases").items(split)}) == 1000
