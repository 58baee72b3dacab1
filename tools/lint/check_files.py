"""Files: none that nothing builds, includes or names; no test without an assertion; no link that points nowhere."""

import re

from source import CPP, Problem

GLOBBED = re.compile(  # what CMake finds by itself
    r"^src/\w+/.*\.(cc|cu)$|^apps/tessera/(\w+/)?\w+\.cc$|^tests/(golden|sim|regress)/\w+\.cc$"
    r"|^tests/fuzz/\w+_fuzz\.cc$|^tests/(e2e|regress)/test_\w+\.py$"
)
CHECKED = (*CPP, ".py", ".md", ".js", ".css", ".html", ".sh", ".cmake")


def check_dead(tree, config):
    problems = []
    written = {
        path: file.text
        for path, file in tree.files.items()
        if not file.is_data and "\0" not in file.text[:1000]
    }
    included = {}
    for file in tree.cpp():
        for _, header, _ in file.includes:
            included.setdefault(header.rsplit("/", 1)[-1], []).append((header, file.path))
    for path, file in tree.files.items():
        if file.is_data or not path.endswith(CHECKED) or GLOBBED.match(path):
            continue
        if file.name in ("README.md", "conftest.py") or (path == "AGENTS.md"):
            continue
        if path.endswith((".h", ".cuh")):
            users = [
                user
                for header, user in included.get(file.name, ())
                if ("/" + path).endswith("/" + header) and user != path
            ]
        else:
            stem = re.sub(r"\.(py|cmake)$", "", file.name)  # imported, or include()d, without it
            name = re.compile(r"(?<![\w-])" + re.escape(stem) + r"(?![\w-])")
            users = [
                other
                for other, text in written.items()
                if other != path and stem in text and name.search(text)
            ]
        if not users:
            problems.append(
                Problem(path, 1, "dead", "nothing builds, includes, imports or names this file: remove it")
            )
    return problems


ASSERTION = re.compile(
    r"\b(EXPECT_\w+|ASSERT_\w+|RC_ASSERT\w*|RC_FAIL|ADD_FAILURE\w*|FAIL|check_integrity)\b|\brc::check\b"
)
TEST = re.compile(r"^\s*(?:TEST|TEST_F|TEST_P|TYPED_TEST|RC_GTEST_PROP|RC_GTEST_FIXTURE_PROP)\s*\(")


def check_assertions(tree, config):
    problems = []
    helpers = [
        file for file in tree.cpp() if file.is_test or "test" in file.name or "/tests/" in "/" + file.path
    ]
    asserting = {
        function.name.split("::")[-1]
        for file in helpers
        for function in file.functions
        if ASSERTION.search(function.body) and not TEST.match(function.body)
    }
    asserting = set(filter(re.compile(r"^\w+$").match, asserting))
    while True:  # a helper that calls an asserting helper asserts
        known = (
            re.compile(r"\b(" + "|".join(map(re.escape, sorted(asserting))) + r")\s*[(<]")
            if asserting
            else None
        )
        more = {
            f.name
            for file in helpers
            for f in file.functions
            if known
            and not TEST.match(f.body)
            and known.search(f.body[f.body.find("{") :])
            and re.match(r"^\w+$", f.name)
        }
        if more <= asserting:
            break
        asserting |= more
    for file in helpers:
        for function in file.functions:
            if not TEST.match(function.body) or ASSERTION.search(function.body):
                continue
            if not (known and known.search(function.body)):
                problems.append(
                    Problem(file.path, function.line, "tests", f"test {function.name} asserts nothing")
                )
    for file in tree.files.values():
        if (
            file.is_test
            and file.path.endswith(".py")
            and not re.search(r"\bassert\b|\bself\.assert|pytest\.raises", file.text)
        ):
            problems.append(Problem(file.path, 1, "tests", "asserts nothing"))
    return problems


LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


def anchors(text):
    headings = re.findall(r"^#{1,6}\s+(.*?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links(tree, config):
    problems = []
    folders = {path.rsplit("/", i)[0] for path in tree.files for i in range(1, path.count("/") + 1)}
    for file in tree.files.values():
        if not file.path.endswith(".md") or file.is_data:
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`", lambda m: re.sub(r"[^\n]", " ", m[0]), file.text, flags=re.S)
        for match in LINK.finditer(prose):
            target, _, anchor = match[1].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            parts = [] if target.startswith("/") else file.path.split("/")[:-1]
            for part in filter(None, target.split("/")):
                parts = parts[:-1] if part == ".." else parts if part == "." else [*parts, part]
            path = "/".join(parts) if target else file.path
            line = prose.count("\n", 0, match.start()) + 1
            if path not in tree.files and path not in folders and path != "":
                problems.append(Problem(file.path, line, "links", f"{match[1]} points nowhere"))
            elif anchor and path.endswith(".md") and anchor not in anchors(tree.files[path].text):
                problems.append(Problem(file.path, line, "links", f"{match[1]}: no such heading"))
    return problems


MENTION = re.compile(
    r"(?<![\w./<>*-])(?:docs|src|apps|tests|tools|web|models)/[\w./-]+\.(?:md|h|cc|py|toml|sh|js|json)\b"
)


def check_mentions(tree, config):
    """A path of this project that a document or a comment names must exist."""
    problems = []
    for file in tree.files.values():
        if (
            file.is_data
            or file.name == "lint_test.py"
            or not file.path.endswith((".md", ".h", ".cc", ".sh", ".txt"))
        ):
            continue
        for match in MENTION.finditer(file.text):
            if match[0] not in tree.files:
                line = file.text.count("\n", 0, match.start()) + 1
                problems.append(Problem(file.path, line, "links", f"{match[0]} does not exist"))
    return problems


def check_root(tree, config):
    """What a newcomer sees first holds nothing by accident."""
    return [
        Problem(path, 1, "root", "is not a file of the project's root: move it, or add it to layers.toml")
        for path in tree.files
        if "/" not in path and path not in config["root"]["files"]
    ]


CHECKS = [check_root, check_dead, check_assertions, check_links, check_mentions]
