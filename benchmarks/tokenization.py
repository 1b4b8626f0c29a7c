"""BPE training and corpus encoding throughput, compared with tokenizers and tiktoken.

Run by `make bench-text`. The text is this machine's own Python files; the peers get it in memory and write nothing.
Each measurement runs in its own process; numbers are medians over alternating repeats, with half the range.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import add_save, record, save

VOCAB_SIZE = 32_768
SIZES = (4, 40, 80, 160)  # megabytes
SMALL, SIZE = 4, 80
SMALL_VOCAB_SIZE = 8192
FEW_WORDS = 100_000
LONG = 1_000_000  # characters
END = "<|endoftext|>"

Metrics = dict[str, Any]


def make_corpus(folder: Path, megabytes: int) -> None:
    """Copy this machine's Python files, the standard library first, up to a total size."""
    folder.mkdir()
    remaining = megabytes * 1_000_000
    roots = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    found = dict.fromkeys(path for root in roots for path in sorted(Path(root).rglob("*.py")))
    for number, path in enumerate(found):
        data = path.read_bytes()[:remaining]
        text = data.decode(errors="ignore")
        (folder / f"{number:06}.py").write_text(text, encoding="utf-8", newline="")
        remaining -= len(text.encode())
        if remaining <= 0:
            return
    raise SystemExit(f"this machine has too few Python files: {remaining} bytes of {megabytes} MB are missing.")


def documents(folder: str) -> list[str]:
    return [path.read_bytes().decode("utf-8-sig") for path in sorted(Path(folder).iterdir())]


def peak_memory() -> float:
    """Return the peak resident memory of this process, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))


def timed(work: Callable[[], object]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


# Each of these runs in its own process.


def train_without_extra(folder: str, pattern: str, max_words: int, vocab_size: int) -> Metrics:
    """Train as if gigatoken were not installed."""
    from glasshouse.text.bpe import pretokenizer

    pretokenizer.gigatoken = None
    return train_ours(folder, pattern, max_words, vocab_size)


def train_ours(folder: str, pattern: str, max_words: int, vocab_size: int = VOCAB_SIZE) -> Metrics:
    import glasshouse as gh

    _ = gh.Tokenizer  # import time is excluded
    seconds, tok = timed(
        lambda: gh.Tokenizer.train(
            folder, vocab_size=vocab_size, pattern=pattern, special_tokens={"eos": END}, max_words=max_words
        )
    )
    tokenizer_folder = Path(folder).with_name("tokenizer")
    if max_words > FEW_WORDS and pattern == "gpt2" and vocab_size == VOCAB_SIZE and not tokenizer_folder.exists():
        tok.save(tokenizer_folder)
    merges = [[left.hex(), right.hex()] for left, right in tok.merge_ranks]
    return {"seconds": seconds, "memory": peak_memory(), "merges": merges if max_words > FEW_WORDS else None}


def train_tokenizers(folder: str, pattern: str, max_words: int, vocab_size: int = VOCAB_SIZE) -> Metrics:
    import tokenizers

    from glasshouse.text.bpe.byte_level import unicode_to_bytes
    from glasshouse.text.bpe.pretokenizer import PATTERNS

    texts = documents(folder)
    tok = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    if pattern == "gpt2":
        tok.pre_tokenizer = byte_level(add_prefix_space=False)
    else:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
        tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [split, byte_level(add_prefix_space=False, use_regex=False)]
        )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    seconds, _ = timed(lambda: tok.train_from_iterator(texts, trainer, len(texts)))
    merges = [
        [unicode_to_bytes(left).hex(), unicode_to_bytes(right).hex()]
        for left, right in json.loads(tok.to_str())["model"]["merges"]
    ]
    return {"seconds": seconds, "memory": peak_memory(), "merges": merges}


def shards_ours(folder: str) -> Metrics:
    import glasshouse as gh
    import glasshouse.data.preparation

    tok = gh.Tokenizer.load(Path(folder).with_name("tokenizer"))
    tok.corpus_encoder().encode([b"import time is excluded"])
    _ = tok.fingerprint  # so is the set-up of the tokenizer
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as temporary:
        seconds, corpus = timed(lambda: gh.data.prepare(folder, tok, f"{temporary}/corpus"))
        return {"seconds": seconds, "memory": peak_memory(), "tokens": corpus.n_tokens - len(corpus)}


def encode_tokenizers(folder: str) -> Metrics:
    import tokenizers

    tok = tokenizers.Tokenizer.from_file(str(Path(folder).with_name("tokenizer") / "tokenizer.json"))
    tok.encode_special_tokens = True  # special tokens in a file are plain text to all three
    texts = documents(folder)
    batches = [texts[at : at + 500] for at in range(0, len(texts), 500)]
    tok.encode_batch(["warm"])
    seconds, tokens = timed(lambda: sum(len(one) for batch in batches for one in tok.encode_batch(batch)))
    return {"seconds": seconds, "memory": peak_memory(), "tokens": tokens}


def encode_tiktoken(folder: str) -> Metrics:
    import os

    import tiktoken

    import glasshouse as gh
    from glasshouse.text.bpe.pretokenizer import PATTERNS

    tok = gh.Tokenizer.load(Path(folder).with_name("tokenizer"))
    ranks = {tok.decode_bytes([number]): number for number in range(len(tok)) if number not in tok.special_ids}
    encoding = tiktoken.Encoding(
        "ours", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens={END: tok.token_to_id(END)}
    )
    texts = documents(folder)
    encoding.encode_ordinary("warm")
    threads = os.cpu_count() or 1
    seconds, tokens = timed(lambda: sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=threads))))
    return {"seconds": seconds, "memory": peak_memory(), "tokens": tokens}


def encode_long(folder: str) -> Metrics:
    """Time long texts of one repeated character and of random bytes, and texts twice as long."""
    import glasshouse as gh

    tok = gh.Tokenizer.load(Path(folder).with_name("tokenizer"))
    tok.encode("word " * LONG)  # exclude what is set up at the first long text
    noise = random.Random(0).randbytes(2 * LONG)
    kinds: dict[str, Callable[[int], str | bytes]] = {
        "letters": lambda n: "a" * n,
        "spaces": lambda n: " " * n,
        "digits": lambda n: "7" * n,
        "CJK": lambda n: "中" * n,
        "emoji": lambda n: "😀" * n,
        "random bytes": lambda n: noise[:n],
    }
    found = {}
    for name, make in kinds.items():
        ratios, times = [], []
        for _ in range(5):
            (once, _), (twice, _) = (timed(lambda n=n: tok.encode(make(n))) for n in (LONG, 2 * LONG))  # noqa: B023
            times.append(once)
            ratios.append(twice / once)
        found[name] = {"seconds": times, "ratio": ratios}
    return found


TRAINING = (train_ours, train_without_extra, train_tokenizers)
TASKS = {task.__name__: task for task in (*TRAINING, shards_ours, encode_tokenizers, encode_tiktoken, encode_long)}


def run(task: Callable[..., Metrics], *arguments: object) -> Metrics:
    command = [sys.executable, __file__, "--task", task.__name__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def cell(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ±{(max(values) - min(values)) / 2:.{digits}f}"


def compare(
    label: str, figure: str, tasks: dict[str, Callable[[], Metrics]], repeats: int, size: int = SIZE
) -> dict[str, list[Metrics]]:
    """Run the tasks in turn, print their times, and record ours and the ratio of each peer's to it."""
    found: dict[str, list[Metrics]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            found[name].append(task())
    ours = statistics.median(one["seconds"] for one in found["ours"])
    for name, results in found.items():
        seconds = [one["seconds"] for one in results]
        ratio = statistics.median(seconds) / ours
        memory = max(one["memory"] for one in results)
        print(f"{label:24}{name:12}{cell(seconds):>16} s{size / statistics.median(seconds):9.1f} MB/s", end="")
        print(f"{memory:9.0f} MB" + (f"   ours {ratio:.2f}x as fast" if name != "ours" else ""))
        if name == "ours":
            record(f"tokenization.{figure}", seconds, 2, "s")
        else:
            peer = "" if name == "tokenizers" else f"_{name}"
            record(f"tokenization.{figure}{peer}_ratio", ratio, 2 if ratio < 2 else 1 if ratio < 20 else 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each measurement (default 3)")
    parser.add_argument("--small", action="store_true", help=f"only train, on {SMALL} MB without the extra")
    add_save(parser)
    options = parser.parse_args()
    if options.task:
        name, *arguments = options.task
        print(json.dumps(TASKS[name](*(int(one) if one.isdigit() else one for one in arguments))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folders = {size: str(Path(temporary) / str(size)) for size in (SIZES[:1] if options.small else SIZES)}
        for size, folder in folders.items():
            make_corpus(Path(folder), size)
        for pattern in ("gpt2", "gpt4"):
            few = (folders[SMALL], pattern, 750_000, SMALL_VOCAB_SIZE)
            tasks = {
                "ours": lambda few=few: run(train_without_extra, *few),
                "tokenizers": lambda few=few: run(train_tokenizers, *few),
            }
            found = compare(f"{SMALL} MB, no extra, {pattern}", f"small_{pattern}", tasks, options.repeats, SMALL)
            equal = found["ours"][0]["merges"] == found["tokenizers"][0]["merges"]
            print(f"{'':24}merges are {'equal' if equal else 'DIFFERENT'}")
        if options.small:
            save(options.save)
            return
        folder = folders[SIZE]
        print(f"{SIZE} MB in {len(list(Path(folder).iterdir())):,} files, vocab_size {VOCAB_SIZE:,}\n")
        for pattern in ("gpt2", "gpt4"):
            tasks = {
                "ours": lambda pattern=pattern: run(train_ours, folder, pattern, 750_000),
                "tokenizers": lambda pattern=pattern: run(train_tokenizers, folder, pattern, 0),
            }
            found = compare(
                f"train, {pattern}", f"train_{pattern}", tasks, options.repeats if pattern == "gpt2" else 1
            )
            equal = found["ours"][0]["merges"] == found["tokenizers"][0]["merges"]
            print(f"{'':24}merges are {'equal' if equal else 'DIFFERENT'}")
        found = compare(
            "text to ids",
            "encode",
            {
                "ours": lambda: run(shards_ours, folder),
                "tokenizers": lambda: run(encode_tokenizers, folder),
                "tiktoken": lambda: run(encode_tiktoken, folder),
            },
            options.repeats,
        )
        one = Path(temporary) / "one"
        one.mkdir()
        (one / "all.py").write_text("".join(documents(folder)), encoding="utf-8", newline="")
        whole = [run(shards_ours, one)["seconds"] for _ in range(options.repeats)]
        ratio = statistics.median(result["seconds"] for result in found["tokenizers"]) / statistics.median(whole)
        print(f"{'same text, one file':24}{'ours':12}{cell(whole):>16} s{'':43}{ratio:.1f}x tokenizers")
        record("tokenization.encode_file_ratio", ratio, 0)
        tokens = {results[0]["tokens"] for results in found.values()}
        print(f"{'':24}token counts are {'equal' if len(tokens) == 1 else 'DIFFERENT'}")

        print("\npeak memory of the process, MB")
        for label, task in {
            "train": lambda folder: run(train_ours, folder, "gpt2", 750_000),
            f"train, {FEW_WORDS:,} words": lambda folder: run(train_ours, folder, "gpt2", FEW_WORDS),
            "files to shards": lambda folder: run(shards_ours, folder),
        }.items():
            cells = (f"{size} MB: {task(folder)['memory']:.0f}" for size, folder in folders.items())
            print(f"{label:24}{'   '.join(cells)}")

        print(f"\nencode, {LONG:,} characters of one kind, and twice as many")
        for name, metrics in run(encode_long, folder).items():
            print(f"{name:24}{cell(metrics['seconds'], 3):>16} s   t(2n)/t(n) {cell(metrics['ratio']):>14}")
    save(options.save)


if __name__ == "__main__":
    main()
