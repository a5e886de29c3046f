import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import jax, jax.numpy as jnp
from convert import compile_cache
compile_cache.keep()
compile_cache.tell_compiling()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.monitoring.register_event_listener(lambda event, **_: print(event))
jax.jit(lambda x: x * 2 + 1)(jnp.ones(3)).block_until_ready()
"""


def start(home, **settings):
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT), **settings}
    run = [sys.executable, "-c", PROGRAM]
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=True)


def test_the_second_process_reads_what_the_first_compiled(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    [place] = (tmp_path / "dflash-jax" / "programs").iterdir()
    assert first.stderr == f"compiling; for the next time kept in {place}\n"
    assert second.stderr == "compiling\n"
    assert "cache_hits" not in first.stdout
    assert "cache_hits" in second.stdout


def test_jax_s_own_setting_decides(tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    assert start(tmp_path, JAX_COMPILATION_CACHE_DIR=elsewhere).stderr.endswith(f"{elsewhere}\n")
    assert not (tmp_path / "dflash-jax").exists()


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file").stderr == "compiling\n"


def test_what_was_cut_short_is_compiled_again_without_a_word(tmp_path):
    start(tmp_path)
    entries = [*tmp_path.rglob("*-cache")]
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    assert start(tmp_path).stderr == "compiling\n"
    for time in [*tmp_path.rglob("*-atime")]:
        time.unlink()
    assert start(tmp_path).stderr == f"compiling; for the next time kept in {entries[0].parent}\n"


def test_a_cache_that_is_turned_off_is_not_told_of(tmp_path):
    assert start(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false").stderr == "compiling\n"
    assert not (tmp_path / "dflash-jax").exists()
