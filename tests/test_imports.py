"""Who may import whom. Kernels know nothing of ours, conversion knows no kernel, planning knows no jax.

The import graph is read from the sources (imports inside functions count too); what it claims about jax is then
confirmed in processes where jax cannot be imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import irminsul_jax

ROOT = Path(__file__).parent.parent
PACKAGES = ("irminsul_jax", "pallas_kernels", "checkpoints_convert")
JAX = ("jax", "jaxlib", "flax", "orbax")

JAX_FREE = (
    *("config", "errors", "sampling_params", "checkpoint_manifest", "cache", "text", "engine.outputs"),
    *("replay.trace", "replay.render", "replay.plan_only", "replay.report"),
)
"""Modules and packages of irminsul_jax that never import jax, not even inside a function."""
CONVERSION_MAY_USE = ("config", "errors", "checkpoint", "checkpoint_manifest", "model.params")
MAY_USE_KERNELS = ("model", "engine", "functional")
MAY_CONVERT_LAZILY = ("cli", "replay.demo")


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name of a module of ours, or the top-level name of a foreign package."""
    lazy: bool
    """Inside a function, so not executed when the module is imported."""


def under(module: str, names: Iterable[str]) -> bool:
    """Is `module` one of `names` (relative to irminsul_jax) or inside one of them?"""
    return any(f"{module}.".startswith(f"irminsul_jax.{name}.") for name in names)


def package_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _statements(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _statements(other, lazy)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _statements(child, lazy or is_function)


def _targets(statement: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        parents = module.split(".")[: None if is_package and statement.level == 1 else is_package - statement.level]
        base = ".".join([*parents, *([base] if base else [])])
    yield base
    for alias in statement.names:
        if base == "irminsul_jax" and alias.name in irminsul_jax._HOME:
            yield f"irminsul_jax.{irminsul_jax._HOME[alias.name]}"
        elif f"{base}.{alias.name}" in modules():
            yield f"{base}.{alias.name}"


@cache
def imports_of(module: str) -> frozenset[Import]:
    file = modules()[module]
    found = set()
    for statement, lazy in _statements(ast.parse(file.read_text())):
        for target in _targets(statement, module, file.name == "__init__.py"):
            found.add(Import(target if package_of(target) in PACKAGES else package_of(target), lazy))
    return frozenset(found)


def with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def reach(module: str, *, lazy: bool) -> dict[str, str]:
    """Everything that `module` imports at any depth → who imports it; `lazy` follows imports inside functions too."""
    seen: dict[str, str] = dict.fromkeys(with_parents(module), module)
    pending = list(seen)
    while pending:
        current = pending.pop()
        for found in imports_of(current) if current in modules() else ():
            if lazy or not found.lazy:
                for name in with_parents(found.target):
                    if name not in seen:
                        seen[name] = current
                        pending.append(name)
    return seen


def jax_free_modules() -> list[str]:
    return [m for m in modules() if under(m, JAX_FREE)]


def test_the_graph_is_read_at_all() -> None:
    assert Import("pallas_kernels", False) in imports_of("irminsul_jax.functional")
    assert "jax" in reach("irminsul_jax.functional", lazy=False)
    assert {package_of(m) for m in modules()} == set(PACKAGES)
    for name in (*JAX_FREE, *CONVERSION_MAY_USE):
        assert f"irminsul_jax.{name}" in modules(), f"{name} is gone; the rules of this test need a new name for it"


def test_every_imported_module_of_ours_exists() -> None:
    missing = [(m, i.target) for m in modules() for i in imports_of(m) if package_of(i.target) in PACKAGES]
    assert [(m, t) for m, t in missing if t not in modules()] == []


def test_kernels_import_nothing_of_ours() -> None:
    for module in modules():
        if package_of(module) == "pallas_kernels":
            ours = {package_of(i.target) for i in imports_of(module)} & set(PACKAGES)
            assert ours <= {"pallas_kernels"}, f"{module} imports {ours}"


def test_conversion_knows_only_configuration_errors_format_and_parameter_types() -> None:
    for module in modules():
        if package_of(module) == "checkpoints_convert":
            for target in (i.target for i in imports_of(module)):
                if target.startswith("irminsul_jax."):
                    allowed = under(target, CONVERSION_MAY_USE) or target == "irminsul_jax.model"
                    assert allowed, f"{module} imports {target}"
            # A converter must run where no kernel can be built.
            assert "pallas_kernels" not in reach(module, lazy=True), f"{module} reaches the kernels"


def test_only_model_engine_and_functional_use_the_kernels() -> None:
    for module in modules():
        if package_of(module) == "irminsul_jax" and not under(module, MAY_USE_KERNELS):
            assert "pallas_kernels" not in {package_of(i.target) for i in imports_of(module)}, module


def test_conversion_is_imported_lazily_by_the_command_line_alone() -> None:
    for module in modules():
        for found in imports_of(module):
            if package_of(module) == "irminsul_jax" and package_of(found.target) == "checkpoints_convert":
                assert found.lazy, f"{module} imports {found.target} when it is imported"
                assert under(module, MAY_CONVERT_LAZILY), f"{module} imports {found.target}"


@pytest.mark.parametrize("module", jax_free_modules())
def test_planning_and_text_never_reach_jax(module: str) -> None:
    reached = reach(module, lazy=True)
    for name in (*JAX, "pallas_kernels"):
        assert name not in reached, f"{module} reaches {name} through {reached[name]}"


@pytest.mark.parametrize("module", [m for m in modules() if under(m, ("cli",)) or m == "irminsul_jax"])
def test_importing_the_command_line_does_not_import_jax(module: str) -> None:
    reached = reach(module, lazy=False)
    for name in (*JAX, "pallas_kernels"):
        assert name not in reached, f"{module} reaches {name} through {reached[name]}"


_BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {JAX}:
            raise ImportError(f"{{name}} was imported although it must not be")

sys.meta_path.insert(0, Blocked())
"""


def run_without_jax(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", _BLOCKED + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_block_works() -> None:
    assert "it must not be" in run_without_jax("import irminsul_jax.functional").stderr


def test_jax_free_modules_import_where_jax_is_missing() -> None:
    names = ["irminsul_jax", *jax_free_modules()]
    done = run_without_jax("import importlib\nfor name in " + repr(names) + ": importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["replay", "--help"], ["convert", "--help"], ["inspect", "--help"], ["generate", "--help"]],
    ids=" ".join,
)
def test_help_works_where_jax_is_missing(arguments: list[str]) -> None:
    program = f"sys.argv = {['irminsul', *arguments]}\nfrom irminsul_jax.cli import main\nsys.exit(main())"
    done = run_without_jax(program)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
