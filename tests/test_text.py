"""Text from outside is shown without what could do harm."""

from mae.text import visible


def test_control_characters_become_visible():
    assert visible("a\x1bb\u202ec\udcffd\x00") == "a\ufffdb\ufffdc\ufffdd\ufffd"
    assert visible("tab\tline\nהשם 猫 e\u0301 \u0915\u094d\u200d") == "tab\tline\nהשם 猫 e\u0301 \u0915\u094d\u200d"
    assert visible("a" + "\u0301" * 50) == "a\u0301\u0301"
