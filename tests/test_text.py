"""Text from outside is shown without what could do harm, and many numbers in a line."""

from mae.text import by_channel, listed, visible, without_common_folders


def test_control_characters_become_visible():
    assert visible("a\x1bb\u202ec\udcffd\x00") == "a\ufffdb\ufffdc\ufffdd\ufffd"
    assert visible("tab\tline\nהשם 猫 e\u0301 \u0915\u094d\u200d") == "tab\tline\nהשם 猫 e\u0301 \u0915\u094d\u200d"
    assert visible("a" + "\u0301" * 50) == "a\u0301\u0301"


def test_numbers_of_channels_fit_a_line():
    assert by_channel([0.25] * 16, digits=2) == " ".join(["0.25"] * 16)
    assert by_channel([0.5, *[0.25] * 16], digits=1) == "0.2 to 0.5 in 17 channels"


def test_names_of_channels_fit_a_line():
    assert listed(["red", "green"]) == "red, green" and listed([]) == "" and listed(["b"] * 16) == ", ".join("b" * 16)
    assert listed([f"b{number}" for number in range(200)]).endswith(", b14, b15, ... (200 in all)")


def test_names_of_files_lose_the_folders_that_all_are_in():
    assert without_common_folders(["d/one/1.png", "d/once/1.png"]) == ["one/1.png", "once/1.png"]
    assert without_common_folders(["/a/1.png", "/b/1.png"]) == ["a/1.png", "b/1.png"]
    assert without_common_folders(["d/1.png"]) == ["1.png"]
    assert without_common_folders(["d/1.png", "d/12.png", "d/1.png"]) == ["1.png", "12.png", "1.png"]
    assert without_common_folders(("/a/1", "b/1")) == ["/a/1", "b/1"] and without_common_folders([]) == []
