"""The comparison of lm-eval's scores with those in process: its questions, its scores, and what it calls different."""

from __future__ import annotations

import pytest

from experiments.lm_eval_parity import (
    CHOICES,
    SETTINGS,
    accuracies,
    compare,
    load_runner,
    make_questions,
    score_in_process,
)


def test_questions_are_the_same_for_a_seed_and_have_one_right_line() -> None:
    questions = make_questions(6, 3)
    assert questions == make_questions(6, 3) != make_questions(6, 4)
    for question in questions:
        assert len(set(question["choices"])) == len(question["choices"]) == CHOICES
        assert question["context"] == question["context"].rstrip()  # lm-eval moves white space to the line


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "one at a time"])
def test_scores_do_not_depend_on_the_setting(setting: str) -> None:
    questions = make_questions(2, 1)
    alone = score_in_process(load_runner(SETTINGS["one at a time"][0]), questions)
    found = compare(alone, score_in_process(load_runner(SETTINGS[setting][0]), questions))
    assert found["lines"] == 2 * CHOICES and found["largest_difference"] < 1e-3
    assert found["different_first_choices"] == 0


def test_other_scores_are_different() -> None:
    scores = [[(-1.0, True), (-2.0, False), (-3.0, False), (-4.0, False)]]
    other = [[(-1.0, True), (-2.5, False), (-3.0, True), (-4.0, False)]]
    assert compare(scores, other) == {"lines": 4, "largest_difference": 0.5, "different_first_choices": 1}
    question = {"choices": ["\na", "\nab", "\nabc", "\nabcdefgh"], "label": 3}
    assert accuracies([question], scores) == {"acc": 0.0, "acc_norm": 1.0}
