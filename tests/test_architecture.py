"""The direction of imports, read from the source without running it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "data_pipeline", "model", "trainer", "launch")

MAY_IMPORT = {
    "launch": {"configs", "trainer", "data_pipeline", "model"},
    "trainer": {"model", "data_pipeline"},
    "configs": {"trainer.config", "data_pipeline.config", "model.config"},
    "model": set(),
    "data_pipeline": set(),
}

IMPORTED_BY = {
    "deepspeed": {"trainer.engine"},
    "mlflow": {"trainer.delivery"},
    "sentencepiece": {"data_pipeline.sentencepieces"},
    "rjieba": {"data_pipeline.wordpieces"},
    "tokenizers": {"data_pipeline.wordpieces"},
    "omegaconf": {"configs.loader"},
    "webdataset": {"data_pipeline.buckets"},
    "transformers": set(),
    "triton": {"model.kernels.rotary_triton"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(source: str) -> set[str]:
    """Return the modules that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import by the full name"
            found.add(node.module)
    return found


SOURCES = {
    module_of(path): path.read_text()
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def wrong_arrows(module: str, imported: set[str]) -> set[str]:
    package = module.partition(".")[0]
    allowed = MAY_IMPORT[package] | {package}
    ours = {name for name in imported if name.partition(".")[0] in PACKAGES}
    return {n for n in ours if n.partition(".")[0] not in allowed and n not in allowed}


@pytest.mark.parametrize("module", SOURCES)
def test_arrows_point_down(module):
    assert not wrong_arrows(module, imports(SOURCES[module]))


@pytest.mark.parametrize("library", IMPORTED_BY)
def test_each_library_has_one_door(library):
    found = {
        module
        for module, source in SOURCES.items()
        if any(name.partition(".")[0] == library for name in imports(source))
    }
    assert found == IMPORTED_BY[library]


@pytest.mark.parametrize("package", ["data_pipeline", "model", "trainer"])
def test_configs_are_free_of_torch(package):
    assert not {n for n in imports(SOURCES[f"{package}.config"]) if n.startswith("torch")}


def test_wrong_arrows_are_seen():
    assert wrong_arrows("model.encoder", {"trainer.config", "torch"}) == {"trainer.config"}
    assert wrong_arrows("configs.schema", {"trainer.loop"}) == {"trainer.loop"}
    assert not wrong_arrows("configs.schema", {"trainer.config"})
