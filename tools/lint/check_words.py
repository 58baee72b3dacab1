"""Banned words (words.toml), each with what to use instead; blanks at the ends of lines; tabs; the last newline."""

import fnmatch
import re
import tomllib
from pathlib import Path

from source import CPP, Problem

TEXT = (
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".cmake",
    ".txt",
    ".js",
    ".css",
    ".html",
    ".json",
    ".yml",
    ".yaml",
    ".in",
    *CPP,
)


def load_words(path=Path(__file__).with_name("words.toml")):
    words = tomllib.loads(path.read_text())["word"]
    return [{**word, "regex": re.compile(word["pattern"], re.M)} for word in words]


def is_written(file):
    if file.is_data or file.name == "LICENSE":
        return False
    return file.name.endswith(TEXT) or "." not in file.name or file.name.startswith(".")


def applies(word, path):
    matches = lambda globs: any(fnmatch.fnmatch(path, glob) for glob in globs)
    return matches(word.get("in", ["*"])) and not matches(word.get("except", []))


def check_words(tree, config):
    problems, words = [], load_words()
    for file in tree.files.values():
        if not is_written(file):
            continue
        for word in words:
            if not applies(word, file.path) or (word["kind"] == "code" and not file.path.endswith(CPP)):
                continue
            text = file.code if word["kind"] == "code" else file.text
            for match in word["regex"].finditer(text):
                line = text.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
                message = f"'{match[0].strip()}' is banned; use {word['use']}"
                problems.append(Problem(file.path, line, "words", message))
    return problems


def check_blanks(tree, config):
    problems = []
    for file in tree.files.values():
        if not is_written(file) or not file.text:
            continue
        for number, line in enumerate(file.lines, 1):
            if line.rstrip(" \t\r") != line:
                problems.append(Problem(file.path, number, "blanks", "blanks at the end of the line"))
            if "\t" in line and file.path.endswith((*CPP, ".py", ".toml", ".cmake")):
                problems.append(Problem(file.path, number, "blanks", "a tab"))
        if not file.text.endswith("\n") or file.text.endswith("\n\n"):
            problems.append(
                Problem(file.path, len(file.lines), "blanks", "the file must end with one newline")
            )
    return problems


def check_pragma(tree, config):
    # Highway's *-inl.h are included once a target, under a toggle of their own.
    headers = [f for f in tree.cpp() if f.path.endswith((".h", ".cuh")) and not f.path.endswith("-inl.h")]
    return [
        Problem(f.path, 1, "words", "a header needs #pragma once")
        for f in headers
        if "#pragma once" not in f.text
    ]


CHECKS = [check_words, check_blanks, check_pragma]
