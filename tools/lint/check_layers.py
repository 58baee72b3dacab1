"""Layers: who includes whom, which files may include which library, and how many headers a layer shows."""

import fnmatch
import re

from source import DEVICE, Problem


def layer_of(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def is_public(path):
    """A header directly in its layer's directory; for ops also in an operator's directory, but not in a deeper one.
    The CUDA face of a directory lies in its cuda/ and is as public as the directory."""
    parts = path.replace("/cuda/", "/").split("/")
    return len(parts) == 3 or (parts[1] == "ops" and len(parts) == 4)


def check_includes(tree, config):
    layers, problems = config["layers"], []
    for file in tree.cpp():
        layer = layer_of(file.path)
        if layer and layer not in layers:
            problems.append(
                Problem(file.path, 1, "layers", f"src/{layer} is not a layer of tools/lint/layers.toml")
            )
            continue
        allowed = {layer, *layers.get(layer, ())} if layer else set(layers)
        for folder, extra in config.get("extra", {}).items():
            if file.path.startswith(folder + "/"):
                allowed |= set(extra)
        for line, header, quoted in file.includes:
            if not quoted:
                continue
            target, other = "src/" + header, header.split("/")[0]
            if target not in tree.files:
                if layer and not neighbour(tree, file, header):
                    problems.append(Problem(file.path, line, "layers", f'"{header}" is not a file of src/'))
            elif other not in allowed:
                may = ", ".join(layers[layer]) or "nothing"
                problems.append(
                    Problem(
                        file.path, line, "layers", f"{layer} may not include {header}; it may include {may}"
                    )
                )
            elif other != layer and not is_public(target) and not file.path.startswith("tests/"):
                problems.append(Problem(file.path, line, "layers", f"{header} is private to its layer"))
    return problems


def neighbour(tree, file, header):
    return f"{file.path.rsplit('/', 1)[0]}/{header}" in tree.files or header in tree.files


def check_cycles(tree, config):
    """The table itself must have no cycle: a layer may use only layers listed before it, or the order is wrong."""
    problems, state = [], {}

    def visit(layer, path):
        if state.get(layer) == "done":
            return
        if state.get(layer) == "open":
            problems.append(
                Problem("tools/lint/layers.toml", 1, "layers", "cycle: " + " -> ".join([*path, layer]))
            )
            return
        state[layer] = "open"
        for below in config["layers"].get(layer, ()):
            visit(below, [*path, layer])
        state[layer] = "done"

    for layer in config["layers"]:
        visit(layer, [])
    return problems


def check_external(tree, config):
    problems = []
    for rule in config.get("external", ()):
        pattern, direct = re.compile(rule["headers"]), {}
        for file in tree.cpp():
            for line, header, _ in file.includes:
                if not pattern.search(header):
                    continue
                direct.setdefault(file.path, line)
                if not any(fnmatch.fnmatch(file.path, glob) for glob in rule["only"]):
                    only = ", ".join(rule["only"])
                    problems.append(
                        Problem(file.path, line, "external", f"<{header}> may be included only by {only}")
                    )
        if "files_max" in rule:
            units = reaching_units(tree, direct)
            if len(units) > rule["files_max"]:
                listed = ", ".join(sorted(units))
                message = f"{len(units)} translation units reach {rule['headers']}, {rule['files_max']} may: {listed}"
                problems.append(Problem("tools/lint/layers.toml", 1, "external", message))
    return problems


def reaching_units(tree, direct):
    """The .cc files that include one of `direct`, themselves or through the project's headers."""
    reach, grown = set(direct), True
    while grown:
        grown = False
        for file in tree.cpp():
            if file.path not in reach and any("src/" + header in reach for _, header, _ in file.includes):
                reach.add(file.path)
                grown = True
    return {path for path in reach if path.endswith((".cc", *DEVICE[:1]))}


def check_public_headers(tree, config):
    problems, limit = [], config["limits"]["public_headers"]
    for layer in config["layers"]:
        headers = [
            p
            for p in tree.files
            if p.startswith(f"src/{layer}/") and p.endswith(".h") and len(p.split("/")) == 3
        ]
        headers = [p for p in headers if not p.endswith(("_testing.h", "_test_support.h"))]
        if len(headers) > limit:
            message = f"{len(headers)} public headers, {limit} at most: move what others do not need into a directory below"
            problems.append(Problem(f"src/{layer}", 1, "layers", message))
    return problems


CHECKS = [check_includes, check_cycles, check_external, check_public_headers]
