#!/usr/bin/env python3
"""Checks what the compiler does not: layers, sizes, banned words, dead files, links, format. Standard library only.

usage: lint.py [ROOT]    exit status 0 when nothing is wrong, else 1 with one line a problem
"""

import sys
import time
import tomllib
from pathlib import Path

sys.dont_write_bytecode = True

import check_files
import check_format
import check_layers
import check_sizes
import check_words
from source import Tree

MODULES = [check_layers, check_sizes, check_words, check_files, check_format]


def lint(root, config=None):
    """All problems of the tree, in the order of paths and lines."""
    tree = Tree(root)
    if config is None:
        config = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())
    return sorted(problem for module in MODULES for check in module.CHECKS for problem in check(tree, config))


def main():
    start = time.monotonic()
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
    problems = lint(root)
    for problem in problems:
        print(problem)
    print(f"lint: {len(problems)} problems, {time.monotonic() - start:.1f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
