"""Secrets in uncommitted code: not stored unless asked for, and then struck out."""

from __future__ import annotations

import subprocess

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.runner import run
from dllm_bench.store import provenance
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.store import SESSIONS, Store
from tests.resume import fakes

SECRETS = (
    'api_key = "abcd-efgh-1234"',
    "OPENAI_API_KEY=sk-proj-abcdefghijklmnop1234",
    "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwx",
    "password: hunter2hunter2",
    '{"client_secret": "0123456789abcdef"}',
    "url = https://me:opensesame@host/x",
    "Authorization: Bearer abcdef.ghijkl-mnop",
    "ghp_abcdefghijklmnopqrstuvwxyz0123",
    "AKIAABCDEFGHIJKLMNOP",
    "xoxb-123456789-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nMIIEdef\n-----END RSA PRIVATE KEY-----",
)
TELLING = (
    "abcd-efgh", "sk-proj", "hf_abc", "hunter2", "0123456789abcdef", "opensesame",
    "abcdef.ghijkl", "ghp_", "AKIAABC", "xoxb-123", "eyJhbGci", "MIIE",
)  # fmt: skip


@pytest.mark.parametrize(("secret", "telling"), zip(SECRETS, TELLING, strict=True))
def test_what_looks_like_a_secret_is_struck_out(secret: str, telling: str) -> None:
    text = provenance.without_secrets(f"+before\n+{secret}\n+after = 1\n")
    assert telling not in text
    assert provenance.STRUCK in text and "+before" in text and "+after = 1" in text


def test_the_text_of_changes_is_stored_only_on_request(tmp_path, monkeypatch) -> None:
    root = tmp_path / "code"
    (root / "dllm_bench").mkdir(parents=True)
    file = root / "dllm_bench" / "a.py"
    file.write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(git, check=True, capture_output=True)
    file.write_text(f"a = 2\n{SECRETS[0]}\n" + "b = 3\n" * 2000)
    monkeypatch.setattr(provenance, "PACKAGE", root / "dllm_bench")
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
