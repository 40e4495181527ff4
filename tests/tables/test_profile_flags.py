"""The options that a profile gives for a command to choose it again."""

from __future__ import annotations

from dllm_bench.cli.main import parse
from dllm_bench.cli.planned import chosen_profile
from dllm_bench.tables.load import load_profile


def test_the_flags_of_a_profile_choose_it_again() -> None:
    profile = load_profile("embedded").limited(20)
    for asked in (profile, profile.in_passes(1), profile.in_passes(3)):
        words = ["table", "lopa/table4", *asked.flags.split()]
        assert chosen_profile(parse(words)) == asked
    assert len({profile.flags, profile.in_passes(1).flags, profile.in_passes(3).flags}) == 3
