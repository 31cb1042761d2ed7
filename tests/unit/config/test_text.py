"""Letters that nobody sees: found in names, written out on terminals."""

from __future__ import annotations

import pytest

from lockstep.config.text import find_invisible, write_out


@pytest.mark.parametrize(
    "name",
    ["a\u202eb", "a\x1b[31m", "a\nb", "a\u200bb", "\ufeffa", "a\u2028b", "a\x9bb", "\ud800", "a\u2066", "\u061c"],
)
def test_a_name_that_is_not_what_one_sees(name):
    assert find_invisible(name) is not None


@pytest.mark.parametrize(
    "name", ["run", "My run (2)", "жизнь", "科学", "علم", "می\u200cرم", "👩\u200d🔬", "a\u00a0b", ""]
)
def test_names_of_every_script_are_names(name):
    assert find_invisible(name) is None


def test_a_terminal_is_told_nothing():
    assert (
        write_out("\x1b]52;c;eA==\x07 \u202egnp\r\n\tend\x9b2J")
        == r"\x1b]52;c;eA==\x07 \u202egnp\r" + "\n\tend" + r"\x9b2J"
    )
    assert write_out("10 %\r20 %", keep="\r") == "10 %\r20 %"
    assert write_out("plain, 科学, علم") == "plain, 科学, علم"
