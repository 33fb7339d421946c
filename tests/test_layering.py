"""Who may import whom: plugins <- builder, plugins <- runtime <- model_repo. cli.py files put the parts together."""

import tree

#: What each part may import of the others; an entry allows itself and what lies under it.
ALLOWED = {
    "plugins": (),
    "builder": ("trtforge.plugins", "trtforge.runtime.manifest"),
    "runtime": ("trtforge.plugins",),
    "model_repo": ("trtforge.plugins", "trtforge.runtime"),
}


def allowed(part: str, name: str) -> bool:
    if name in ("trtforge", "trtforge.runtime") and part == "builder":
        return True  # the package on the way to trtforge.runtime.manifest; what is taken from it is checked by itself
    return any(name == a or name.startswith(a + ".") for a in (f"trtforge.{part}", *ALLOWED[part]))


def test_parts_import_only_downwards() -> None:
    faults = [
        f"{module}:{line}: imports {name}"
        for module in tree.modules()
        if module.name != "cli.py"
        for name, line in tree.imports(module)
        if name.split(".")[0] == "trtforge" and not allowed(module.parts[0], name)
    ]
    assert not faults, "\n".join(faults)


def test_no_part_is_imported_by_its_bare_name() -> None:
    faults = [
        f"{module}:{line}: imports {name}"
        for module in tree.files()
        if module.suffix == ".py" and module.parts[0] != "tests"
        for name, line in tree.imports(module)
        if name.split(".")[0] in tree.PARTS
    ]
    assert not faults, "\n".join(faults)


def test_the_scheduler_and_the_block_pool_are_plain_python() -> None:
    """They are fuzzed by the million, so they know no arrays."""
    for module in tree.modules():
        if module.name in ("scheduler.py", "block_pool.py", "request.py"):
            heavy = {name.split(".")[0] for name, _ in tree.imports(module)} & {"numpy", "openvino", "torch"}
            assert not heavy, f"{module} imports {heavy}"


def test_the_manifest_is_standard_library_only() -> None:
    import sys

    for name, line in tree.imports(tree.Path("runtime/manifest.py")):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "trtforge", (
            f"runtime/manifest.py:{line}: imports {name}"
        )
