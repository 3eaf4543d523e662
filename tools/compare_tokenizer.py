#!/usr/bin/env python3
"""Compares the engine's tokenizer with the Python package `tokenizers`.

    tools/compare_tokenizer.py compare MODEL.gguf TEXT [--program build/test/tests/kvarn-tokenize]
    tools/compare_tokenizer.py write-test MODEL.gguf tests/data/tokenizer.json

`compare` builds a tokenizer of that package from the vocabulary, merges and control tokens of
MODEL.gguf and compares the ids of kvarn-tokenize with its own: of TEXT with the model's own
pre-tokenisation, and of TEXT and of every character of Unicode, in several surroundings, with each
pre-tokenisation that the engine knows. Prints the first difference and fails where there is one.
Characters of a later Unicode version than PCRE2's are left out, see LATER.

`write-test` writes what tests/engine/tokenizer_test.cpp reads: a part of the model's vocabulary,
hard samples, the package's words and ids of them with that part, and its ids with all of it.

Needs the packages tokenizers, gguf and numpy:
    python3 -m venv build/venv && build/venv/bin/pip install tokenizers gguf
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unicodedata

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

CONTROL = int(gguf.TokenType.CONTROL)
NORMAL = int(gguf.TokenType.NORMAL)

# As in Qwen2's tokenizer.json.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRE_TOKENIZERS = {
    "gpt-2": lambda: byte_level(True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level(True)]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(False)]
    ),
}

# The end of a character's age in PCRE2 10.42 is Unicode 14; Python 3.11's unicodedata has the same.
# What it does not know as assigned may be a letter to one side and none to the other.
LATER = {"Cn"}


class Vocabulary:
    def __init__(self, path):
        fields = gguf.GGUFReader(path).fields

        def value(name):
            return fields["tokenizer.ggml." + name].contents()

        self.pre = value("pre")
        self.tokens = value("tokens")
        self.types = value("token_type")
        self.merges = value("merges")

    def reference(self, pre):
        """The package's tokenizer."""
        made = Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(self.tokens)},
                merges=[tuple(merge.split(" ")) for merge in self.merges],
            )
        )
        made.pre_tokenizer = PRE_TOKENIZERS[pre]()
        made.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(self.tokens, self.types)
                if kind == CONTROL
            ]
        )
        return made

    def write(self, path, pre):
        """A GGUF file of the vocabulary alone, with another pre-tokenisation."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

    def missing_bytes(self):
        """Bytes without a token: the package drops them, the engine refuses them."""
        symbols = gpt2_symbols()
        known = set(self.tokens)
        return {byte for byte in range(256) if symbols[byte] not in known}

    def trimmed(self, merge_count):
        """The control tokens, the single bytes, and the tokens of the first merges."""
        other = object.__new__(Vocabulary)
        other.pre = self.pre
        other.merges = self.merges[:merge_count]
        wanted = set(gpt2_symbols()) | {merge.replace(" ", "") for merge in other.merges}
        kept = [
            (token, kind)
            for token, kind in zip(self.tokens, self.types)
            if kind == CONTROL or token in wanted
        ]
        other.tokens = [token for token, _ in kept]
        other.types = [kind for _, kind in kept]
        return other


def gpt2_symbols():
    """The character of every byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return [symbols[byte] for byte in range(256)]


def every_character(missing):
    """Each assigned character between letters, digits, spaces and after an apostrophe."""
    parts = []
    for point in range(0x110000):
        character = chr(point)
        category = unicodedata.category(character)
        if category == "Cs" or category in LATER or missing & set(character.encode()):
            continue
        parts.append(f"a{character}b 1{character}2  {character}  {character}{character}\n'{character}")
    return "".join(parts)


def program_ids(program, model, text_path):
    run = subprocess.run([program, model, text_path], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(f"{program} failed: {run.stderr}")
    return [int(line) for line in run.stdout.split()]


def same(label, expected, got, vocabulary):
    if expected == got:
        print(f"{label}: {len(got)} tokens, equal")
        return True
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got))
    )

    def around(ids):
        return [vocabulary.tokens[i] for i in ids[max(0, at - 5) : at + 5]]

    print(f"{label}: {len(expected)} tokens expected, {len(got)} given, the first difference at {at}")
    print(f"  expected {around(expected)}\n  given    {around(got)}")
    return False


def compare(arguments):
    vocabulary = Vocabulary(arguments.model)
    text = pathlib.Path(arguments.text).read_bytes().decode()
    characters = every_character(vocabulary.missing_bytes())
    with tempfile.TemporaryDirectory() as folder:
        characters_path = pathlib.Path(folder) / "characters.txt"
        characters_path.write_bytes(characters.encode())
        ids = program_ids(arguments.program, arguments.model, arguments.text)
        expected = vocabulary.reference(vocabulary.pre).encode(text).ids
        equal = [same(f"the model as it is ({vocabulary.pre})", expected, ids, vocabulary)]
        for pre in PRE_TOKENIZERS:
            model = str(pathlib.Path(folder) / "vocabulary.gguf")
            vocabulary.write(model, pre)
            reference = vocabulary.reference(pre)
            for label, path, content in (
                ("text", arguments.text, text),
                ("every character", str(characters_path), characters),
            ):
                got = program_ids(arguments.program, model, path)
                expected = reference.encode(content).ids
                equal.append(same(f"{pre}, {label}", expected, got, vocabulary))
    return all(equal)


# Digits, accents, scripts, emoji, code, runs of white space, contractions, names of control tokens.
SAMPLES = [
    "",
    " ",
    "Hello world",
    "In 1984, 3.14159 and 1,234,567 cost  42 dollars.   99",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m e\u0301tude \u1e9e \u0130stanbul",
    "\u6771\u4eac\u90fd\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002 \uc11c\uc6b8 "
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\u2764\ufe0f ok",
    "for (int i = 0; i < n; ++i) {\n\tx[i] *= 0x1p-3f;\n\n    return a->b;\n}\r\n",
    "a  b   c    d\n\n\ne\t\tf \n g\r\n\r\n  h   ",
    "  7  \u0663 \u2167 \u00bd x\u00b2",
    "I'm he'll they've DON'T 'S it's we're you'd ''s '\u017f",
    "\u00a0a\u2003b\u3000c\u180ed\u0085e\u2028f\u000bg\u000ch\u200bi",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start <|im_end|><|im_end|>",
    "== Title ==\n @-@ unk <unk> _snake_case_ CamelCase!!! ... \u2014 \u201cquoted\u201d",
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
    "=" * 70 + "-" * 33 + " " * 41 + "." * 9,
]


def write_test(arguments):
    full = Vocabulary(arguments.model)
    small = full.trimmed(1200)
    without_special = {}
    with_special = {}
    words = {}
    for pre in PRE_TOKENIZERS:
        reference = small.reference(pre)
        with_special[pre] = [reference.encode(text).ids for text in SAMPLES]
        # In ByteLevel's words every character is a byte.
        words[pre] = [
            [len(word) for word, _ in reference.pre_tokenizer.pre_tokenize_str(text)]
            for text in SAMPLES
        ]
        plain = Tokenizer(reference.model)
        plain.pre_tokenizer = reference.pre_tokenizer
        without_special[pre] = [plain.encode(text).ids for text in SAMPLES]
    reference = full.reference(full.pre)
    content = {
        "tokens": small.tokens,
        "token_type": small.types,
        "merges": small.merges,
        "samples": SAMPLES,
        "word_bytes": words,
        "ids": with_special,
        "ids_without_special": without_special,
        "model_ids": [reference.encode(text).ids for text in SAMPLES],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    pathlib.Path(arguments.output).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("compare", help="compare with kvarn-tokenize")
    command.add_argument("model", help="GGUF file")
    command.add_argument("text", help="text file in UTF-8")
    command.add_argument("--program", default="build/test/tests/kvarn-tokenize")
    command.set_defaults(run=compare)
    command = commands.add_parser("write-test", help="write the data of the unit test")
    command.add_argument("model", help="GGUF file")
    command.add_argument("output", help="JSON file")
    command.set_defaults(run=write_test)
    arguments = parser.parse_args()
    return 0 if arguments.run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
