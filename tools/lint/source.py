"""What every check works on: the project's files, C++ with comments and strings blanked, and C++ functions."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CPP = (".cc", ".h", ".cu", ".cuh")
DEVICE = (".cu", ".cuh")
SKIPPED_DIRS = {".git", ".venv", ".cache", "build", "dist", "__pycache__", "node_modules"}


@dataclass(frozen=True, order=True)
class Problem:
    path: str
    line: int
    check: str
    message: str

    def __str__(self):
        return f"{self.path}:{self.line}: [{self.check}] {self.message}"


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    lines: int
    parameters: int
    body: str


class Source:
    """One file. `path` is relative to the root, with forward slashes."""

    def __init__(self, root, path):
        self.root, self.path = root, path

    @cached_property
    def bytes(self):
        return (self.root / self.path).read_bytes()

    @cached_property
    def text(self):
        return self.bytes.decode("utf-8", errors="replace")

    @cached_property
    def lines(self):
        return self.text.split("\n")

    @cached_property
    def code(self):
        return blank_cpp(self.text)

    @cached_property
    def includes(self):
        """(line, header, quoted)."""
        pattern = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
        return [
            (self.text.count("\n", 0, m.start()) + 1, m[2], m[1] == '"') for m in pattern.finditer(self.text)
        ]

    @cached_property
    def functions(self):
        return find_functions(self.code)

    @property
    def name(self):
        return self.path.rsplit("/", 1)[-1]

    @property
    def is_test(self):
        return self.name.endswith(("_test.cc", "_test.cu", "_test.py")) or self.name.startswith("test_")

    @property
    def is_data(self):
        """Not written by hand: weights, tokenizers, golden outputs, seeds of fuzzers."""
        if self.path.startswith("tests/fuzz/corpus/"):
            return True
        return self.path.startswith(("tests/golden/data/", "models/")) and not self.name.endswith(
            (".md", ".py")
        )


class Tree:
    """The files that git knows or would add; without git, all but build outputs."""

    def __init__(self, root):
        self.root = Path(root)
        self.files = {path: Source(self.root, path) for path in sorted(self._paths())}

    def _paths(self):
        command = [
            "git",
            "-C",
            str(self.root),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        try:
            listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
            paths = [path for path in listed if path and (self.root / path).is_file()]
            if paths:
                return paths
        except (OSError, subprocess.CalledProcessError):
            pass
        paths = []
        for folder, dirs, names in os.walk(self.root):
            dirs[:] = [name for name in dirs if name not in SKIPPED_DIRS]
            paths += [(Path(folder) / name).relative_to(self.root).as_posix() for name in names]
        return paths

    def cpp(self):
        return [file for file in self.files.values() if file.path.endswith(CPP)]


TOKEN = re.compile(
    r"""//(?:[^\\\n]|\\.|\\\n)*            # line comment
      | /\*.*?\*/                          # block comment
      | R"([^()\\\s]{0,16})\(.*?\)\1"      # raw string
      | "(?:[^"\\\n]|\\.)*"                # string
      | (?<![0-9A-Za-z_])'(?:[^'\\\n]|\\.)+'  # character, not a digit separator
    """,
    re.X | re.S,
)


def blank_cpp(text):
    """Comments and the insides of literals become spaces; lines and columns stay."""

    def blank(match):
        token = match[0]
        keep = 2 if token[0] in "\"'R" else 0
        inner = re.sub(r"[^\n]", " ", token)
        return inner if keep == 0 else '"' + inner[1:-1] + '"'

    if '#include "' in text or "#include <" in text:
        text = re.sub(r"(^[ \t]*#[ \t]*include[^\n]*)", lambda m: " " * len(m[0]), text, flags=re.M)
    return TOKEN.sub(blank, text)


CONTROL = {"if", "for", "while", "switch", "catch", "return", "sizeof", "do", "else"}
SCOPE = re.compile(
    r"^(?:template\s*<.*>\s*)?(?:inline\s+)?(?:export\s+)?(?:namespace|class|struct|union|enum|extern)\b",
    re.S,
)
INITIALISERS = re.compile(
    r"\)\s*(?:noexcept(?:\([^)]*\))?\s*)?:(?!:)\s*[^{]*$|\)\s*(?:noexcept\s*)?:(?!:).*[,:]\s*[\w:<>]+\s*$",
    re.S,
)


def match_brace(code, start):
    """The index just past the brace that closes code[start]."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    return len(code)


def find_functions(code):
    """Functions with a body at namespace or class scope; what is nested in one counts as part of it."""
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), code, flags=re.M)
    found, position, head_start = [], 0, 0
    for_delimiters = re.compile(r"[;{}]")
    while match := for_delimiters.search(code, position):
        position = match.end()
        if match[0] != "{":
            head_start = position
            continue
        head = code[head_start : match.start()]
        stripped = re.sub(r"^(?:\s*(?:public|private|protected)\s*:(?!:))+", "", head).strip()
        stripped = re.sub(r"^(?:\[\[.*?\]\]\s*)+", "", stripped, flags=re.S)
        if SCOPE.match(stripped):
            head_start = position
            continue
        end = match_brace(code, match.start())
        if "(" not in stripped or re.search(r"(?<![=!<>])=\s*$", stripped):
            position, head_start = end, end  # an initialiser
            continue
        if re.search(r"[\w>]\s*$", stripped) and INITIALISERS.search(stripped):
            position = end  # a member initialised with braces: the head goes on
            continue
        found.append(describe_function(code, head_start, head, stripped, end))
        position, head_start = end, end
    return found


def describe_function(code, head_start, head, stripped, end):
    first = head_start + max(head.find(stripped), 0)
    name = re.search(r"(operator\s*[^\s(]+|operator\s*\(\s*\)|~?[\w:]+)\s*\(", stripped)
    label = name[1] if name else "?"
    arguments = parameter_list(stripped, name.end() - 1) if name else ""
    if label in ("TEST", "TEST_F", "TEST_P", "TYPED_TEST", "RC_GTEST_PROP"):
        label = re.sub(r"[^\w]+", ".", arguments).strip(".")
        arguments = ""
    count = 0 if not arguments.strip() or arguments.strip() == "void" else count_commas(arguments) + 1
    lines = code.count("\n", first, end) + 1
    return Function(label, code.count("\n", 0, first) + 1, lines, count, code[first:end])


def parameter_list(text, start):
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
    return ""


def count_commas(text):
    depth = commas = 0
    for char in text.replace("->", "  "):
        depth += {"(": 1, "<": 1, "{": 1, "[": 1, ")": -1, ">": -1, "}": -1, "]": -1}.get(char, 0)
        commas += char == "," and depth == 0
    return commas
