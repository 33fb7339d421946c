"""Rules of the tree that a linter does not know: nothing of one machine in it, and modules that can be read."""

import ast
import re

import tree

MAX_MODULE_LINES, MAX_FUNCTION_LINES = 500, 80

#: Absolute paths of somebody's machine, and hosts that packages are fetched from.
OF_A_MACHINE = re.compile(
    r"(?<![\w.$}/-])/(work|root|home|Users|opt/wheels)/|pypi\.org|files\.pythonhosted|deb\.debian\.org"
)


def test_no_file_names_a_path_or_a_host_of_one_machine() -> None:
    faults = []
    for file in tree.files():
        if file.name == "test_style.py":
            continue
        try:
            lines = (tree.ROOT / file).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # binary
        faults += [
            f"{file}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if OF_A_MACHINE.search(line)
        ]
    assert not faults, "\n".join(faults)


def test_the_pattern_finds_what_it_should() -> None:
    assert OF_A_MACHINE.search('path = "/root/model"')
    assert OF_A_MACHINE.search("see /home/somebody/engine")
    assert not OF_A_MACHINE.search("demo/work/engine and https://example.com/home/")


def test_modules_and_functions_can_be_read() -> None:
    faults = []
    for module in tree.modules():
        source = (tree.ROOT / module).read_text(encoding="utf-8")
        length = source.count("\n")
        if length > MAX_MODULE_LINES:
            faults.append(f"{module}: {length} lines, at most {MAX_MODULE_LINES}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(
                        f"{module}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                    )
    assert not faults, "\n".join(faults)


def test_every_module_says_what_it_is() -> None:
    """In a docstring; an empty __init__.py needs none."""
    faults = []
    for module in tree.modules():
        source = (tree.ROOT / module).read_text(encoding="utf-8")
        if source.strip() and not ast.get_docstring(ast.parse(source)):
            faults.append(str(module))
    assert not faults, "\n".join(faults)
