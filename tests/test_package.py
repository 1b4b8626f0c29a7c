"""The package: import time, public names, and the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import glasshouse as gh

ROOT = Path(__file__).parents[1]


def python(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_presets_need_no_torch() -> None:
    out = python("import sys, glasshouse as gh; gh.preset('gpt2'); dir(gh); print('torch' in sys.modules)")
    assert out.strip() == "False"


def test_submodules_are_imported_lazily() -> None:
    assert (
        python("import glasshouse as gh; print(gh.spec.DecoderSpec.kind, gh.config.dump(gh.spec.Relu()))").split()[0]
        == "decoder"
    )


def test_modules_of_generation_are_found_by_name_and_in_any_order() -> None:
    """Its names are imported lazily; the command line reads modules as attributes."""
    code = "import glasshouse as gh; print(gh.generation.{}.__name__)"
    assert python(code.format("validation.check_model")).strip() == "check_model"
    assert python(code.format("speculation.Speculator")).strip() == "Speculator"
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        gh.generation.no_such_name  # noqa: B018


def test_every_public_name_exists() -> None:
    for name in gh.__all__:
        assert getattr(gh, name) is not None
    assert set(gh.__all__) <= set(dir(gh))
    with pytest.raises(AttributeError, match="no_such_name"):
        gh.no_such_name  # noqa: B018


def test_save_is_found_where_every_object_has_an_attribute_save() -> None:
    """As in a process that has imported nnsight, which adds one to `object`."""
    found = python(
        "import ctypes, gc, torch, glasshouse as gh\n"
        "gc.get_referents(object.__dict__)[0]['save'] = lambda self: 'of nnsight'\n"
        "ctypes.pythonapi.PyType_Modified(ctypes.py_object(object))\n"
        "assert (3).save() == 'of nnsight'\n"
        "print(gh.save.__module__)"
    )
    assert found.startswith("glasshouse.")


@pytest.mark.long
@pytest.mark.slow
def test_wheel_is_complete_and_works_without_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        packaged = {name for name in file.namelist() if name.startswith("glasshouse/")}
        file.extractall(tmp_path / "unpacked")
    package = ROOT / "src" / "glasshouse"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    files = (path for path in files if path.suffix != ".ts")  # types of the scripts, for development
    expected = {path.relative_to(package.parent).as_posix() for path in files}
    assert packaged == expected
    assert wheel.stat().st_size < 18e6
    out = python(
        f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r})\n"
        "import torch, glasshouse as gh\n"
        "print(gh.__file__); print(gh.build(gh.preset('tiny-decoder'))(torch.tensor([[1, 2]])).shape)"
    )
    assert str(tmp_path) in out
    assert "torch.Size([1, 2, 256])" in out
