"""Provenance: commit and local changes; secrets in these are not stored, or struck out."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.runner import run
from dllm_bench.store import provenance
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.store import SESSIONS, Store
from tests.resume import fakes

KEY = 'api_key = "abcd-efgh-1234"'
SECRETS = {  # text -> part of it that may not be stored
    KEY: "abcd-efgh",
    "OPENAI_API_KEY=sk-proj-abcdefghijklmnop1234": "sk-proj",
    "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwx": "hf_abc",
    "password: hunter2hunter2": "hunter2",
    '{"client_secret": "0123456789abcdef"}': "0123456789abcdef",
    "url = https://me:opensesame@host/x": "opensesame",
    "https://opensesame@host/x": "opensesame",
    "postgres://me:open@sesame@host/x": "sesame",
    'environ["HF_TOKEN"] = "opensesame"': "opensesame",
    "setenv('HF_TOKEN', 'opensesame')": "opensesame",
    "api_key: str = 'opensesame'": "opensesame",
    'token="it\'s opensesame"': "opensesame",
    "server --api-key opensesame": "opensesame",
    "glpat-abcdefghijklmnopqrst": "glpat",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQOY\n-----END PGP PRIVATE KEY BLOCK-----": "lQOY",
    "Authorization: Bearer abcdef.ghijkl-mnop": "abcdef.ghijkl",
    "ghp_abcdefghijklmnopqrstuvwxyz0123": "ghp_",
    "AKIAABCDEFGHIJKLMNOP": "AKIAABC",
    "xoxb-123456789-abcdef": "xoxb-123",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "eyJhbGci",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nMIIEdef\n-----END RSA PRIVATE KEY-----": "MIIE",
}


@pytest.mark.parametrize(("secret", "telling"), SECRETS.items())
def test_what_looks_like_a_secret_is_struck_out(secret: str, telling: str) -> None:
    text = provenance.without_secrets(f"+before\n+{secret}\n+after = 1\n")
    assert telling not in text
    assert provenance.STRUCK in text and "+before" in text and "+after = 1" in text


def git(where: Path, line: str) -> None:
    words = f"-c user.name=a -c user.email=a@b {line}".split()
    subprocess.run(["git", "-C", str(where), *words], check=True, capture_output=True)


def committed(root: Path) -> Path:
    """Return the package folder of a new repository, whose one file is committed."""
    package = root / "dllm_bench"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    for line in ("init -q", "add .", "commit -q -m one"):
        git(root, line)
    return package


def test_the_text_of_changes_is_stored_only_on_request(tmp_path, monkeypatch) -> None:
    package = committed(tmp_path / "code")
    (package / "a.py").write_text(f"a = 2\n{KEY}\n" + "b = 3\n" * 2000)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    for choice, kept in (("hash", False), ("text", True)):
        spec = fakes.spec(2, runtime={"provenance": {"diff": choice}})
        store = Store(tmp_path / choice)
        environment = run(spec, store=store, deps=fakes.deps()).environment
        assert environment["dirty"] and environment["changed"] == ["dllm_bench/a.py"]
        assert len(environment["diff_sha256"]) == 64
        assert (environment["diff"] is not None and "+a = 2" in environment["diff"]) is kept
        assert len(environment["diff"] or "") == 4000 * kept
        assert "efgh-1234" not in (store.path(spec) / SESSIONS).read_text()
    with pytest.raises(DllmBenchError, match="provenance.diff is 'all'; give 'hash' or 'text'"):
        RunConfig({"provenance": {"diff": "all"}})


def test_commit_and_local_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dict.fromkeys(("commit", "dirty", "diff_sha256", "changed", "diff"))
    assert provenance.code(tmp_path) == nothing, "outside of a repository"
    git(tmp_path, "init -q")
    assert provenance.code(tmp_path) == nothing, "before the first commit"
    package = committed(tmp_path)
    clean = provenance.code(tmp_path)
    assert (len(clean["commit"]), clean["dirty"], clean["diff_sha256"]) == (40, False, None)
    (tmp_path / "results.txt").write_text("not code")
    assert provenance.code(tmp_path) == clean
    (package / "b.py").write_text("b = 1\n")
    untracked = provenance.code(tmp_path)
    assert untracked["dirty"] is True
    assert (untracked["changed"], untracked["diff"]) == (["dllm_bench/b.py"], None)
    (package / "a.py").write_text("a = 2\n")
    changed = provenance.code(tmp_path)
    assert changed["changed"] == ["dllm_bench/a.py", "dllm_bench/b.py"]
    assert len({str(x["diff_sha256"]) for x in (clean, untracked, changed)}) == 3
    assert provenance.code(package) == nothing, "inside somebody else's repository"
    (package / "\u00e4.py").write_text("a = 1\n")
    named = provenance.code(tmp_path)
    (package / "\u00e4.py").write_text("a = 2\n")
    assert named["changed"][-1] == "dllm_bench/\u00e4.py"
    edited = provenance.code(tmp_path)
    assert named["diff_sha256"] not in (changed["diff_sha256"], edited["diff_sha256"])
    monkeypatch.setattr(provenance, "PACKAGE", package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.environment()["commit"] is None, "without git"


def test_provenance_is_cheap_and_complete() -> None:
    provenance.environment()  # file caches
    started = time.process_time()
    facts = provenance.environment()
    assert time.process_time() - started < 0.3
    assert facts["packages"]["torch"] and isinstance(facts["packages"]["submitit"], str | None)
    assert facts["cpu"] and facts["device"] == facts["cpu"]
    assert facts["threads"] == 1 and facts["load"] >= 0
    json.dumps(facts)
