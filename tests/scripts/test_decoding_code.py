"""The code that decides tokens does not change without a new version or a reason."""

from __future__ import annotations

from scripts import decoding_code

CODE = '"""What it is."""\n\n\ndef f(x):\n    """Give more."""\n    return x + 1  # one\n'


def test_the_code_that_decides_tokens_is_the_one_that_was_noted() -> None:
    assert decoding_code.problem() == ""


def test_comments_docstrings_and_layout_do_not_count() -> None:
    other = '"""Other."""\ndef f(x):\n\n    return (x\n            + 1)\n'
    assert decoding_code.digest(CODE) == decoding_code.digest(other)
    assert decoding_code.digest(CODE) != decoding_code.digest(CODE.replace("+ 1", "+ 2"))
    assert decoding_code.digest(CODE) != decoding_code.digest(CODE.replace("x + 1", "x - 1"))
    assert "models/layouts.yaml" in decoding_code.read()[2]
    plain, same, changed = "a: {b: 1}\n", "# why\na:\n  b: 1\n", "a: {b: 2}\n"
    assert decoding_code.digest(plain, ".yaml") == decoding_code.digest(same, ".yaml")
    assert decoding_code.digest(plain, ".yaml") != decoding_code.digest(changed, ".yaml")


def test_a_change_takes_a_note_or_a_version(tmp_path, capsys, monkeypatch) -> None:
    package, file = tmp_path / "package", tmp_path / "code.txt"
    (package / "core").mkdir(parents=True)
    code = package / "core" / "loop.py"

    def write(*arguments: str) -> int:
        return decoding_code.main(list(arguments), file, package)

    code.write_text(CODE)
    assert write() == 0, "the first time"
    code.write_text(CODE.replace("+ 1", "+ 2"))
    assert "core/loop.py" in decoding_code.problem(file, package)
    assert write() == 2
    assert "raise DECODING_VERSION" in capsys.readouterr().err
    assert write("--note", "nobody calls it") == 0
    assert decoding_code.problem(file, package) == ""
    assert decoding_code.read(file)[1] == ["nobody calls it"]
    code.rename(package / "core" / "moved.py")
    monkeypatch.setattr(decoding_code, "DECODING_VERSION", 99)
    assert write() == 0, "a new version needs no note"
    assert decoding_code.read(file)[:2] == (99, [])
