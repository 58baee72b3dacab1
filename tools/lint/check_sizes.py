"""Sizes as a ratchet: what is above a limit needs a waiver with its present size, and may only shrink."""

import ast

from source import CPP, DEVICE, Problem


def check_sizes(tree, config):
    limits, waivers = config["limits"], config.get("waivers", {})
    problems, used = [], set()

    def measure(path, line, key, size, limit, what):
        waiver = waivers.get(key)
        if waiver is not None:
            used.add(key)
        if size > (waiver or limit):
            rule = f"its waiver says {waiver}" if waiver else f"{limit} at most"
            problems.append(Problem(path, line, "size", f"{what}: {size} lines, {rule}"))
        elif waiver is not None and size < waiver:
            action = "remove its line" if size <= limit else f"write {size}"
            problems.append(
                Problem(
                    path, line, "size", f"{what} shrank below its waiver of {waiver}: {action} in layers.toml"
                )
            )

    for file in tree.files.values():
        limit = file_limit(file, limits)
        if limit is None:
            continue
        measure(file.path, 1, file.path, len(file.lines) - file.text.endswith("\n"), limit, "file")
        for name, line, lines, parameters in functions(file):
            allowed = limits["device_function" if file.path.endswith(DEVICE) else "function"]
            measure(file.path, line, f"{file.path}:{name}", lines, allowed, f"function {name}")
            if parameters > limits["parameters"] and file.path.endswith(CPP) and not file.is_test:
                message = f"function {name} has {parameters} parameters, {limits['parameters']} at most: use an Args struct"
                problems.append(Problem(file.path, line, "size", message))
    for key in waivers.keys() - used:
        problems.append(
            Problem("tools/lint/layers.toml", 1, "size", f"the waiver of {key} is for nothing: remove it")
        )
    return problems


def file_limit(file, limits):
    if file.is_data:
        return None
    if file.name == "CMakeLists.txt" or file.name.endswith(".cmake"):
        return limits["cmake_file"] if file.name == "CMakeLists.txt" else limits["script_file"]
    if file.path.endswith(CPP):
        if file.is_test:
            return limits["test_file"]
        return limits["device_file" if file.path.endswith(DEVICE) else "host_file"]
    if file.path.endswith((".py", ".js", ".css", ".html", ".sh")) or (
        file.lines and file.lines[0].startswith("#!")
    ):
        return limits["script_file"]
    return None


def functions(file):
    """(name, line, lines, parameters) of each function."""
    if file.path.endswith(CPP):
        return [(f.name, f.line, f.lines, f.parameters) for f in file.functions]
    if not file.path.endswith(".py"):
        return []
    try:
        nodes = ast.walk(ast.parse(file.text))
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.name, n.lineno, n.end_lineno - n.lineno + 1, 0) for n in nodes if isinstance(n, kinds)]


CHECKS = [check_sizes]
