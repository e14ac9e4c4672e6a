from launch.agreement import differences

FACTS = {"optimizer.lr": "0.001", "versions.torch": "2.13.0", "hashes.tokenizer": "aa"}


def rank(host: str, *problems: str, **facts: str):
    renamed = {key.replace("__", "."): value for key, value in facts.items()}
    return host, problems, FACTS | renamed


def test_ranks_that_agree_have_nothing_to_say():
    assert differences([rank("n1"), rank("n1"), rank("n2")]) == []


def test_differences_name_rank_host_key_and_both_values():
    other = {"optimizer__lr": "0.002"}
    assert differences([rank("n1"), rank("n2", **other), rank("n2", **other)]) == [
        "ranks 1, 2 (n2): optimizer.lr is 0.002, and 0.001 on rank 0 (n1): "
        "all ranks need the same config, code and data"
    ]


def test_every_kind_of_difference_is_a_line():
    lines = differences(
        [
            rank("n1"),
            rank("n2", versions__torch="2.12.0"),
            rank("n3", hashes__tokenizer="bb", optimizer__lr="0.1"),
            ("n4", (), {k: v for k, v in FACTS.items() if k != "versions.torch"}),
        ]
    )
    assert [line.partition(":")[0] for line in lines] == [
        *("rank 1 (n2)", "rank 2 (n3)", "rank 2 (n3)", "rank 3 (n4)")
    ]
    assert "versions.torch is absent, and 2.13.0" in lines[-1]


def test_problems_come_first_and_name_their_ranks():
    lines = differences([rank("n1"), ("n2", ("data.train: nowhere",), {})])
    assert lines == ["rank 1 (n2): data.train: nowhere"]


def test_a_problem_of_all_is_said_once():
    everyone = [("n1", ("data.train: nowhere",), {})] * 8
    assert differences(everyone) == ["data.train: nowhere"]


def test_many_differences_are_cut_short():
    facts = {f"k{n}": "x" for n in range(50)}
    lines = differences([("n1", (), facts), ("n2", (), dict.fromkeys(facts, "y"))])
    assert len(lines) == 21
    assert lines[-1] == "and 30 more differences"


def test_many_ranks_are_named_in_short():
    everyone = [rank("n0"), *(rank(f"n{n}", optimizer__lr="1") for n in range(1, 9))]
    (line,) = differences(everyone)
    assert line.startswith("ranks 1, 2, 3, 4 and 4 more (n1, n2, n3 and 5 more): optimizer.lr")
