"""The order of the rooms: imports run downward, and there is no circle between files."""

from graphlib import TopologicalSorter

from tests.package_files import imports, package_modules

GROUND_NAMES = ("corpus", "endpoint", "errors", "experimental", "files", "progress", "tables")
GROUND = {f"keepsight.{name}" for name in GROUND_NAMES}
RUNTIME_ROOMS = {"quantized", "sparse_read", "retrieval", "drafting", "prompt_compression"}

# The rooms from the ground up, and those below that each may import from, beside itself and the ground floor.
BELOW: dict[str, set[str]] = {
    "models": {"checkpoints"},
    "runtime": {"models"},
    "data_gen": {"models", "runtime"},
    "runtime.quantized": {"models", "runtime"},
    "runtime.sparse_read": {"models", "runtime"},
    "runtime.retrieval": {"models", "runtime", "runtime.sparse_read"},
    "runtime.drafting": {"models", "runtime", "runtime.sparse_read"},
    "runtime.prompt_compression": {"models", "runtime", "runtime.drafting"},
    "runtime.methods": {"models", "runtime", *(f"runtime.{room}" for room in RUNTIME_ROOMS)},
    "train": {"models", "data_gen", "runtime"},
    "eval.tasks": {"models"},
    "serving": {"models", "runtime", "runtime.methods"},
    "serving.vllm": {"serving", "models", "runtime", "runtime.methods"},
}
BELOW["eval"] = {"eval.tasks", "runtime.methods", *BELOW["runtime.methods"]}
BELOW["eval.report"] = {"eval", "runtime", "runtime.methods"}
BELOW["eval.bench"] = {"eval", "train", "serving", *BELOW["eval"], *BELOW["train"]}
BELOW["checkpoints"] = BELOW["recipes"] = set()  # data
BELOW["commands"] = set(BELOW)


def _room(module: str) -> str | None:
    """The innermost room that holds a module; none for the ground floor, keepsight/."""
    inside = module.removeprefix("keepsight.")
    rooms = [room for room in BELOW if f"{inside}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def _graph() -> dict[str, set[str]]:
    """The modules of the package that each imports; keepsight/__init__.py only names what others may import."""
    modules = package_modules()
    graph = {}
    for name, path in modules.items():
        if name != "keepsight":
            graph[name] = imports(path) & modules.keys() - {name}
    return graph


def test_rooms_import_only_what_is_below_them() -> None:
    upward = set()
    for module, imported in _graph().items():
        room = _room(module)
        for other in imported:
            if module == "keepsight.__main__":
                is_allowed = other == "keepsight.commands.cli"
            elif room is None:
                is_allowed = other in GROUND
            else:
                is_allowed = other in GROUND | {"keepsight"} or _room(other) in {room, *BELOW[room]}
            if not is_allowed:
                upward.add((module, other))
    assert upward == set()


def test_no_circle_between_files() -> None:
    TopologicalSorter(_graph()).prepare()
