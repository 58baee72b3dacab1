"""clang-format, where it is installed. Files that passed are remembered by their hash in build/lint/."""

import hashlib
import json
import os
import re
import shutil
import subprocess

from source import Problem

BATCH = 12


def check_format(tree, config):
    tool = shutil.which("clang-format-19")
    if tool is None or ".clang-format" not in tree.files:
        return []
    style = tree.files[".clang-format"].bytes
    passed_file = tree.root / "build" / "lint" / "formatted.json"
    try:
        passed = set(json.loads(passed_file.read_text()))
    except (OSError, ValueError):
        passed = set()
    hashes = {file.path: hashlib.sha256(style + file.bytes).hexdigest() for file in tree.cpp()}
    todo = [path for path, digest in hashes.items() if digest not in passed]
    bad = unformatted(tool, tree.root, todo)
    passed_file.parent.mkdir(parents=True, exist_ok=True)
    passed_file.write_text(json.dumps(sorted({d for path, d in hashes.items() if path not in bad})))
    return [
        Problem(path, line, "format", "not as clang-format writes it: make format")
        for path, line in bad.items()
    ]


def unformatted(tool, root, paths):
    """path -> first line that clang-format would change."""
    batches = [paths[i : i + BATCH] for i in range(0, len(paths), BATCH)]
    bad = {}
    while batches:
        now, batches = batches[: os.cpu_count() or 1], batches[os.cpu_count() or 1 :]
        command = [tool, "--dry-run", "--Werror"]
        running = [subprocess.Popen([*command, *b], cwd=root, stderr=subprocess.PIPE, text=True) for b in now]
        for process in running:
            for match in re.finditer(r"^(\S+?):(\d+):\d+: error", process.communicate()[1], re.M):
                bad.setdefault(match[1], int(match[2]))
    return bad


CHECKS = [check_format]
