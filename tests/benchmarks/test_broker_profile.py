from __future__ import annotations

from benchmarks.broker_profile import at_work, parse, shares

RAW = """\
main (cli.py:1);Broker._run (server.py:2);turn (server.py:3);write (libc.so.6) 6
main (cli.py:1);Broker._run (server.py:2);turn (server.py:3) 2
main (cli.py:1);Broker._run (server.py:2);turn (server.py:3);0x7f00 (libzmq.so) 2
main (cli.py:1);Broker._run (server.py:2);poll (libc.so.6) 30
main (cli.py:1);Thread.run (threading.py:9);read (libc.so.6) 40
"""


def test_only_the_loop_at_work_counts() -> None:
    stacks = at_work(parse(RAW))
    assert sum(stacks.values()) == 10
    assert all(stack[0] == "Broker._run (server.py:2)" for stack in stacks)


def test_shares_are_of_all_looks_and_functions_without_a_name_are_left_out() -> None:
    stacks = at_work(parse(RAW))
    assert shares(stacks, 3, inclusive=False) == [
        ("`write (libc.so.6)`", "60.0%"),
        ("`turn (server.py:3)`", "20.0%"),
    ]
    assert shares(stacks, 2, inclusive=True) == [
        ("`Broker._run (server.py:2)`", "100.0%"),
        ("`turn (server.py:3)`", "100.0%"),
    ]


def test_there_may_be_nothing_to_share() -> None:
    assert shares(parse(""), 3, inclusive=True) == []
