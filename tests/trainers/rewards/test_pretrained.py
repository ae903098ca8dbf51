"""What a loader raises, in one line that names the reward and the setting."""

import pytest

from trainers.config_loader import ConfigError
from trainers.first_line import first_line
from trainers.rewards.pretrained import load


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n a cause \nand more"), "a cause "),
        (ValueError(), "ValueError"),
        (ValueError(" \n "), "ValueError"),
        ("one\ntwo", "one"),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(),
            r"its model cannot be loaded; got 'a/b' \(OSError\); set kwargs.model to a folder",
        ),
        (
            ImportError("\nATokenizer needs the apackage library\nSee its page"),
            r"its model needs another package; got 'a/b' \(ATokenizer needs the apackage library\); "
            r"install that, or set another kwargs.model$",
        ),
    ],
)
def test_what_a_loader_raises_is_one_line(error, message):
    def loader(name):
        raise error

    with pytest.raises(ConfigError, match="^reward 'some': " + message):
        load("some", "model", "a/b", loader)
