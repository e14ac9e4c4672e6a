import pytest

from configs.loader import ConfigError
from launch.hostfile import Host, read_hostfile


def write(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    return path


def problems(path, **filters):
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path, **filters)
    return caught.value.problems


def test_hosts_in_order_with_comments_and_blanks(tmp_path):
    text = "# rack 1\nn2 slots=4\n\n  n1\tslots=2   # the slow one\n10.0.0.7 slots=1"
    assert read_hostfile(write(tmp_path, text)) == (
        Host("n2", (0, 1, 2, 3)),
        Host("n1", (0, 1)),
        Host("10.0.0.7", (0,)),
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("n9", "no slots; write `n9 slots=8`"),
        ("n9 slots=0", "slots=0 gives it no rank"),
        ("n9 slots = 4", "blanks around the `=`"),
        ("n9 slots= 4", "blanks around the `=`"),
        ("n9 slots =4", "blanks around the `=`"),
        ("n9 slots=", "blanks around the `=`"),
        ("n9 slots=4\r", "Windows (CRLF)"),
        ("me@n9 slots=4", "set `User me` for n9 in ~/.ssh/config"),
        ("n9 slots=4 max_slots=8", "'max_slots=8' behind the slots would be passed over"),
        ("n9 slots=4,n8 slots=4", "'4,n8' is no number of slots"),
        ("n9 slots=-1", "'-1' is no number of slots"),
        ("n9 4", "'4' is not `slots=8`"),
        ("n9,n8 slots=4", "'n9,n8' is no host name"),
        ("$(reboot) slots=4", "'$(reboot)' is no host name"),
        ("n1 slots=2", "n1 stands in line 1 already"),
        ("N1 slots=2", "N1 stands in line 1 already"),
        ("n9 slots=99999999999", "no machine has more than 1024 slots"),
        ("n9 slots=2\rn8 slots=2", "'n8 slots=2' behind the slots would be passed over"),
        ("\ufeffn9 slots=2", "is no host name or address"),
    ],
)
def test_every_bad_line_is_named(tmp_path, line, fault):
    path = write(tmp_path, f"n1 slots=2\n{line}\nn3\n")
    first, second = problems(path)
    assert first.startswith(f"hostfile {path}:2: ")
    assert fault in first
    assert second.startswith(f"hostfile {path}:3: 'n3': no slots")


@pytest.mark.parametrize("text", ["", "# n1 slots=2\n", "\n\n"])
def test_a_file_without_hosts_is_refused(tmp_path, text):
    assert "names no host" in problems(write(tmp_path, text))[0]


def test_a_missing_or_foreign_file_is_refused(tmp_path):
    assert "No such file" in problems(tmp_path / "nowhere")[0]
    (tmp_path / "hosts").write_bytes(b"\xff\xfen1 slots=2")
    assert "no UTF-8" in problems(tmp_path / "hosts")[0]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"include": "n2"}, [("n2", (0, 1, 2, 3))]),
        ({"include": "n2:3,1@n1"}, [("n1", (0, 1)), ("n2", (1, 3))]),
        ({"exclude": "n1"}, [("n2", (0, 1, 2, 3))]),
        ({"exclude": "n1:1@n2:0,1,2"}, [("n1", (0,)), ("n2", (3,))]),
        ({"exclude": "n1:0,1"}, [("n2", (0, 1, 2, 3))]),
    ],
)
def test_filters_choose_hosts_and_slots(tmp_path, filters, kept):
    path = write(tmp_path, "n1 slots=2\nn2 slots=4\n")
    assert [(h.name, h.slots) for h in read_hostfile(path, **filters)] == kept


@pytest.mark.parametrize(
    ("filters", "fault"),
    [
        ({"include": "n3"}, "'n3' is not in the hostfile"),
        ({"include": "n1:2"}, "n1 has 2 slots (0 to 1), and no 2"),
        ({"include": "n1:"}, "'n1:' is not `host` or `host:0,2`"),
        ({"include": "n1@"}, "'' is not `host`"),
        ({"exclude": "n1:x"}, "'n1:x' is not `host`"),
        ({"exclude": "n1@n2"}, "leaves no slot"),
        ({"include": "n1", "exclude": "n2"}, "give one of them"),
    ],
)
def test_filters_that_make_no_sense_are_refused(tmp_path, filters, fault):
    path = write(tmp_path, "n1 slots=2\nn2 slots=4\n")
    assert fault in problems(path, **filters)[0]
