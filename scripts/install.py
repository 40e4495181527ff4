"""Install what `make` needs into the environment whose Python runs this: `python scripts/install.py
[OPTIONS OF pip] EXTRAS`. Needs pip and nothing else.

With filled caches uv takes a third of the time of pip. It reads no settings of pip, so they are
passed to it. If uv is unavailable, fails, or lacks an equivalent of a pip setting, pip installs the
same packages. Neither compiles everything, which takes a minute; importing the modules in
`IMPORTED`, one process per line, compiles that tenth of the packages which is used most.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence

PINS = ("-c", "constraints.txt")
SECTIONS = (":env:", "install", "global")  # of pip's settings, the one that decides first
LISTS = ("index-url", "extra-index-url", "find-links", "constraint", "trusted-host")
"""pip settings that affect which packages are found: space-separated lists, named alike in uv."""
WITHOUT_EFFECT = (
    *("cache-dir", "cert", "client-cert", "default-timeout", "disable-pip-version-check"),
    *("no-cache-dir", "no-color", "no-compile", "no-input", "progress-bar", "quiet", "retries"),
    *("root-user-action", "timeout", "verbose"),
)
"""pip settings that do not affect which packages are found."""
IMPORTED = (  # what runs, tables and figures import, in two processes that share few modules
    "scipy.stats, sympy, hydra, httpx2, accelerate.utils.dataclasses",
    "torch, transformers.modeling_utils, dllm_bench.launch.local, dllm_bench.api.generation, "
    "dllm_bench.figures.draw, dllm_bench.site.build",
)


def uv_options(listed: str) -> list[str] | None:
    """Return the options that give uv the settings which `pip config list` printed; None where it
    lists one that uv has no equal of, such as `only-binary`."""
    pairs = (line.partition("=") for line in listed.splitlines())
    found = {key: str(ast.literal_eval(value)) for key, equals, value in pairs if equals}
    if {key.rpartition(".")[2] for key in found} - {*LISTS, "no-index", *WITHOUT_EFFECT}:
        return None

    def setting(name: str) -> str:
        keys = (f":env:.{name}" if part == ":env:" else f"{part}.{name}" for part in SECTIONS)
        return next((found[key] for key in keys if key in found), "")

    options = [f"--{name}={one}" for name in LISTS for one in setting(name).split()]
    if setting("no-index").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options


def install_by_uv(arguments: Sequence[str]) -> bool:
    """Install by uv; whether it did. Of several indexes any may have a version, as for pip."""
    pip, uv = python("-m", "pip"), python("-m", "uv", "pip", "install", "--python", sys.executable)
    given = [*PINS, *arguments[:-1]]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    options = uv_options(listed)
    if options is None or subprocess.run([*pip, "install", "-q", *given, "uv"]).returncode:
        return False
    every = ("-q", "--index-strategy", "unsafe-best-match", *options)
    return not subprocess.run([*uv, *every, *given, "pip", "-e", arguments[-1]]).returncode


def install_by_pip(arguments: Sequence[str]) -> bool:
    """Install by pip; whether it did."""
    command = [*python("-m", "pip", "install", "-q", "--no-compile"), *PINS, *arguments[:-1]]
    return not (
        subprocess.run([*command, "--upgrade", "pip"]).returncode
        or subprocess.run([*command, "-e", arguments[-1]]).returncode
    )


def python(*arguments: str) -> list[str]:
    """Return a command of this environment's Python."""
    return [sys.executable, *arguments]


def compile_imported() -> None:
    """Import `IMPORTED`, which compiles it; what fails to is compiled when it is first used."""
    for process in [subprocess.Popen(python("-c", f"import {names}")) for names in IMPORTED]:
        process.wait()


def main(arguments: Sequence[str]) -> int:
    """Install and compile; 1 if neither uv nor pip could install."""
    if not (install_by_uv(arguments) or install_by_pip(arguments)):
        return 1
    compile_imported()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
