"""Invalid lines of journals, by file name."""

BRACKETS = "[" * 200_000
STEPS = ("null", '"x"', "true", "-1", "1.5", "[1]", "1e3", "NaN", 10**30, 2**63)
ANY = ("5", "null", '"step"', "[]", "{}", '{"a": 1}', BRACKETS, '{"a": ' * 200_000, "\0", "é" * 9)
ANY += tuple(f'{{"step": {step}}}' for step in STEPS)
NUMBERS = ('"a"', "true", "1e999", 10**400, "{}")  # NaN and Infinity are read as null
HEADS = (*NUMBERS, "5", "null", "[1]", "[null]", '[["a"]]', "[[[1]]]")
LAYERS = (*NUMBERS, "5", "null", "[[1]]", '["a"]', "[true]")
TEXTS = (*NUMBERS, "5", "null", "[5]", "[[]]", "[null]", "[{}]", '[{"text": ""}]', '[{"prompt": "", "text": 5}]')

DAMAGED = {
    "metrics.jsonl": (*ANY, *(f'{{"step": 1, "loss": {value}}}' for value in (*NUMBERS, "[1]"))),
    "probes.jsonl": (
        *ANY,
        *(f'{{"step": 1, "entropy": {value}}}' for value in HEADS),
        *(f'{{"step": 1, "logit_lens": {value}}}' for value in LAYERS),
        f'{{"step": 1, "unknown": {"[" * 500 + "]" * 500}}}',
    ),
    "samples.jsonl": (
        *ANY,
        *(f'{{"step": 1, "samples": {value}}}' for value in TEXTS),
        '{"step": 1, "samples": [{"prompt": "a", "text": "b", "reference": null}]}',
        '{"step": 1, "samples": [], "more": []}',
    ),
}
