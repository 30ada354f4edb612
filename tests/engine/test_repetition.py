"""Catches: a loop that runs to the limit, an answer cut where it merely resembles itself, counts
that survive a token outside the loop, two ways of answering that cut at different places."""

from tiny import tiny_llama

from eagle4.engine.continuous import Job, answer_all
from eagle4.engine.repetition import Repetition, without_loop
from eagle4.target import TargetAdapter

VERSE = list(range(20))


def counts(tokens, length=4):
    repetition = Repetition(length)
    return [repetition.add(token) for token in tokens]


def test_counting_begins_when_a_whole_passage_stood_before():
    assert counts([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]) == [0] * 8 + [1, 2, 3]


def test_one_new_token_ends_the_count():
    assert counts([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4]) == [0] * 8 + [1, 2, 0, 0, 0, 0, 1]


def test_short_likenesses_do_not_count():
    assert not any(counts([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9]))


def test_an_answer_keeps_the_beginning_of_its_loop():
    answer = VERSE * 5
    assert without_loop(answer, 16) == answer[: len(VERSE) + 11 + 16]
    assert without_loop(answer, 0) == without_loop(VERSE, 16) + VERSE * 4 == answer


def test_a_looping_row_ends_and_makes_room():
    model = tiny_llama(eos_token_id=None)
    adapter = TargetAdapter(model)
    jobs = [Job(str(i), [9 + i, 30], 90, max_repeated=5 * (i % 2)) for i in range(6)]
    found = {job.id: answer for job, answer in answer_all(adapter, jobs, num_rows=2, capacity=96)}
    whole = {
        job.id: answer
        for job, answer in answer_all(
            adapter, [job._replace(max_repeated=0) for job in jobs], num_rows=2, capacity=96
        )
    }
    for job in jobs:
        assert found[job.id] == without_loop(whole[job.id], job.max_repeated)
    assert all(len(answer) == 90 for answer in whole.values())
    assert min(map(len, found.values())) < 90
